// How a warp reads a weight matrix, and the conversion of codes to floats.
//
// A warp takes 16 rows and 32 columns (a block) at a time. Lane 4g + t has rows 2g and 2g + 1 of the 16, and of both
// rows columns 4t..4t+4 and 16+4t..16+4t+4. In a tile the codes of a lane are adjacent: one load of 8 bytes by each
// lane fetches a whole block of 4-bit codes, and two such loads fetch a block of 8-bit codes.
#pragma once
#include "coded_weights.cuh"

// Rows 16 tile .. 16 tile + 16 of a matrix, as one lane reads them.
template <uint32_t KIND>
struct Rows<KIND, false> {
    const uint8_t* codes;   // of tiles: this lane's codes of block 0; of floats: its first row, column 4t
    const uint8_t* scales;  // this lane's scales of group 0
    const uint8_t* zeros;
    uint32_t group_shift;   // block >> group_shift = group
    uint32_t scale_size;
    uint32_t block_bytes;
    uint32_t cols;
    uint32_t column;        // 4t
    uint32_t second;        // of floats: bytes from the first row to the second; 0 where there is none
    bool wide;              // scales are f32; of floats: fours of columns are aligned
    uint32_t kind;
};

// A lane's share of a block, as it is stored. Order of the words: [row][half][..] for floats, [half][row] for int8,
// [row] for others.
template <uint32_t KIND>
struct Raw<KIND, false> {
    static constexpr int WORDS = KIND == KIND_F32 ? 16 : KIND <= KIND_BF16 ? 8 : KIND >= KIND_INT8 ? 4 : 2;
    uint32_t words[WORDS];
    uint32_t scales[2];
    uint32_t zeros;
};

template <uint32_t KIND>
__device__ __forceinline__ Rows<KIND> rows_of(const Matrix& w, const uint8_t* data, uint32_t tile, Lane lane) {
    Rows<KIND> rows;
    if constexpr (is_coded(KIND)) {
        rows = coded_rows<KIND>(w, data, tile, lane);
    } else if constexpr (is_plain(KIND)) {
        constexpr uint32_t SIZE = KIND == KIND_F32 ? 4 : 2;
        const uint32_t row = tile * TILE_ROWS + 2 * lane.g;
        rows.kind = KIND;
        rows.cols = w.cols;
        rows.column = 4 * lane.t;
        // For a row that does not exist, another one is computed and never written.
        rows.codes = opaque(data + (uint64_t(row < w.rows ? row : 0) * w.cols + rows.column) * SIZE);
        rows.second = row + 1 < w.rows ? w.cols * SIZE : 0;
        rows.wide = w.cols % 4 == 0 && reinterpret_cast<uint64_t>(data) % (4 * SIZE) == 0;
    } else {
        const uint8_t* bytes = data + uint64_t(tile) * w.tile_bytes;
        const bool any = KIND == KIND_TILES, wide = KIND != KIND_NL4 && KIND != KIND_MXFP4 && w.scale_kind == SCALE_F32;
        const uint32_t size = KIND == KIND_MXFP4 || (any && w.scale_kind == SCALE_E8M0) ? 1 : wide ? 4 : 2;
        rows.kind = w.kind;
        rows.wide = wide;
        rows.scale_size = size;
        rows.block_bytes = w.block_bytes;
        rows.codes = opaque(bytes + w.codes_offset + lane.t * 64 + lane.g * 8);
        rows.scales = opaque(bytes + 2 * lane.g * size);
        rows.zeros = bytes + w.zeros_offset + 2 * lane.g;
        rows.group_shift = group_shift_of(w);
    }
    return rows;
}

// Loads four adjacent floats of the lane's columns in the 16 from `from` on, packed into words; zeros beyond the last
// column.
template <uint32_t KIND>
__device__ __forceinline__ void load_plain(const Rows<KIND>& rows, const uint8_t* row, uint32_t from, uint32_t* words) {
    constexpr uint32_t SIZE = KIND == KIND_F32 ? 4 : 2;
    const uint8_t* at = row + uint64_t(from) * SIZE;
    const uint32_t column = from + rows.column;
    uint4 four = make_uint4(0, 0, 0, 0);
    if (rows.wide) {
        if (column < rows.cols) {
            if constexpr (KIND == KIND_F32) {
                four = load_four_once(at);
            } else {
                const uint2 two = load_once(at);
                four.x = two.x, four.y = two.y;
            }
        }
    } else {
#pragma unroll 1
        for (uint32_t i = 0; i < 4; i++) {
            four.x = four.y, four.y = four.z, four.z = four.w, four.w = 0;
            if (column + i < rows.cols) {
                four.w = SIZE == 4 ? reinterpret_cast<const uint32_t*>(at)[i] : reinterpret_cast<const uint16_t*>(at)[i];
            }
        }
        if constexpr (SIZE == 2) {
            four.x |= four.y << 16, four.y = four.z | four.w << 16;
        }
    }
    words[0] = four.x, words[1] = four.y;
    if constexpr (SIZE == 4) {
        words[2] = four.z, words[3] = four.w;
    }
}

// Loads this lane's share of a block.
template <uint32_t KIND>
__device__ __forceinline__ Raw<KIND> load_block(const Rows<KIND>& rows, uint32_t block) {
    Raw<KIND> raw;
    if constexpr (is_coded(KIND)) {
        raw = load_coded(rows, block);
    } else if constexpr (is_plain(KIND)) {
        constexpr uint32_t PART = Raw<KIND>::WORDS / 4;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            load_plain<KIND>(rows, rows.codes + (i / 2 ? rows.second : 0), block * BLOCK + i % 2 * 16, raw.words + i * PART);
        }
    } else {
        const uint32_t bytes = KIND == KIND_TILES ? rows.block_bytes : KIND == KIND_INT8 ? 512 : 256;
        const uint8_t* codes = rows.codes + uint64_t(block) * bytes;
        const uint2 first = load_once(codes);
        raw.words[0] = first.x, raw.words[1] = first.y;
        if constexpr (KIND >= KIND_INT8) {
            if (KIND == KIND_INT8 || rows.kind == KIND_INT8) {
                const uint2 second = load_once(codes + 256);
                raw.words[2] = second.x, raw.words[3] = second.y;
            }
        }
        if constexpr (KIND == KIND_MXFP4) {
            raw.scales[0] = __ldg(reinterpret_cast<const uint16_t*>(rows.scales + uint64_t(block) * TILE_ROWS));
        } else if constexpr (KIND == KIND_NL4) {
            raw.scales[0] = __ldg(reinterpret_cast<const uint32_t*>(rows.scales + uint64_t(block) * (TILE_ROWS * 2)));
        } else {
            const uint32_t group = block >> rows.group_shift;
            const uint32_t size = KIND == KIND_TILES ? rows.scale_size : rows.wide ? 4 : 2;
            load_scales(rows.scales + uint64_t(group) * (size * TILE_ROWS), size, raw.scales);
            raw.zeros = 0x0808;
            if (KIND == KIND_INT4_AFFINE || (KIND == KIND_TILES && rows.kind == KIND_INT4_AFFINE)) {
                raw.zeros = __ldg(reinterpret_cast<const uint16_t*>(rows.zeros + uint64_t(group) * TILE_ROWS));
            }
        }
    }
    return raw;
}

// Returns the scales of the lane's two rows; floats have none, which counts as 1.
template <uint32_t KIND>
__device__ __forceinline__ float2 scales_of(bool rows_wide, const Raw<KIND>& raw) {
    if constexpr (is_plain(KIND)) {
        return make_float2(1.0f, 1.0f);
    } else if constexpr (KIND == KIND_MXFP4) {
        return make_float2(power_of_two(raw.scales[0] & 255), power_of_two(raw.scales[0] >> 8));
    } else {
        const float2 halves = halves_of(raw.scales[0]);
        const bool wide = KIND != KIND_NL4 && rows_wide;
        return make_float2(wide ? __uint_as_float(raw.scales[0]) : halves.x, wide ? __uint_as_float(raw.scales[1]) : halves.y);
    }
}

// Returns the zero point of a row, or 8 for codes with a bias. The encoders of iec write only zero points of at most
// 15; larger ones in other files are read as 15.
template <uint32_t KIND>
__device__ __forceinline__ uint32_t zero_of(const Raw<KIND>& raw, uint32_t row) {
    if constexpr (KIND == KIND_INT4_AFFINE) {
        return min(raw.zeros >> 8 * row & 255, 15u);
    } else {
        return 8;
    }
}

// A kind as a type, for functions that are generic in it.
template <uint32_t KIND>
struct KindIs {
    static constexpr uint32_t value = KIND;
};

// Calls `f` with the kind, which is known at compile time or read from the matrix. Codes with a bias count as codes
// with a zero point.
template <uint32_t KIND, class F>
__device__ __forceinline__ void with_kind(uint32_t kind, F f) {
    if constexpr (KIND != KIND_TILES) {
        f(KindIs<KIND>());
    } else if (kind == KIND_INT8) {
        f(KindIs<KIND_INT8>());
    } else if (kind == KIND_NL4) {
        f(KindIs<KIND_NL4>());
    } else if (kind == KIND_MXFP4) {
        f(KindIs<KIND_MXFP4>());
    } else {
        f(KindIs<KIND_INT4_AFFINE>());
    }
}

// Converts words that were read as tiles of any kind to those of KIND.
template <uint32_t KIND>
__device__ __forceinline__ Raw<KIND> as_kind(const Raw<KIND_TILES>& raw) {
    Raw<KIND> same;
#pragma unroll
    for (int i = 0; i < Raw<KIND>::WORDS; i++) {
        same.words[i] = raw.words[i];
    }
    same.scales[0] = raw.scales[0], same.scales[1] = raw.scales[1];
    same.zeros = raw.zeros;
    return same;
}
template <uint32_t KIND>
__device__ __forceinline__ const Raw<KIND>& as_kind(const Raw<KIND>& raw) {
    return raw;
}

// Writes the lane's eight values of one of its two rows, in the order of columns and without their scale.
template <uint32_t KIND>
__device__ __forceinline__ void floats_of(const Raw<KIND>& raw, uint32_t row, float (&out)[8]) {
    if constexpr (KIND == KIND_F32) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            out[i] = __uint_as_float(raw.words[8 * row + i]);
        }
    } else if constexpr (KIND == KIND_F16 || KIND == KIND_BF16) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t word = raw.words[4 * row + i / 2];
            const uint32_t bits = i % 2 ? word >> 16 : word & 0xffff;
            out[i] = KIND == KIND_F16 ? __half2float(__ushort_as_half(uint16_t(bits))) : __uint_as_float(bits << 16);
        }
    } else if constexpr (KIND == KIND_INT8) {
        floats_of_bytes(raw.words[row], out);
        floats_of_bytes(raw.words[2 + row], out + 4);
    } else if constexpr (KIND == KIND_NL4 || KIND == KIND_MXFP4) {
        const uint32_t nl4[4] = NL4_TABLE, e2m1[4] = E2M1_TABLE;
        float values[8];
        floats_of_bytes(look_up(raw.words[row], KIND == KIND_NL4 ? nl4 : e2m1), values);
        floats_of_bytes(look_up(raw.words[row] >> 16, KIND == KIND_NL4 ? nl4 : e2m1), values + 4);
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const float value = values[i % 4 * 2 + i / 4];  // low nibbles first
            out[i] = KIND == KIND_MXFP4 ? value * 0.5f : value;
        }
    } else {
        const float zero = 8388608.0f + float(zero_of(raw, row));
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t code = raw.words[row] >> (8 * (i % 4) + 4 * (i / 4)) & 15;
            out[i] = __uint_as_float(code | 0x4b000000u) - zero;
        }
    }
}
