// Tiles of kinds from KIND_CODED on: codes of 2 to 6 bits and FP8 numbers, with groups from 16 columns, scales of one or
// two levels, and minimums. Kernels for one kind know its coding at compile time, those for KIND_CODED read it from the
// matrix.
//
// Lanes have the rows and columns of matmul_weights.cuh. Bits that are not in nibbles or bytes lie in vectors of 64
// bytes, 4 bytes for each of the 16 rows, in which the bits of all columns alternate: those of columns 4f..4f+4 begin at
// bit `width * f` of each byte, counted over successive vectors.
#pragma once
#include "weight_loads.cuh"

// How codes become weights.
struct Coding {
    uint32_t bits;
    uint32_t codes;         // CodeMap
    uint32_t scale_kind;
    uint32_t minimum;
    uint32_t block_groups;  // groups in a block
};

// Scales whose type the matrix says.
#define SCALE_ANY 255

// Returns the coding of a kind.
constexpr Coding coding_of(uint32_t kind) {
    return kind == KIND_INT5     ? Coding{5, 16, SCALE_ANY, MINIMUM_NONE, 1}
           : kind == KIND_INT6   ? Coding{6, 32, SCALE_ANY, MINIMUM_NONE, 1}
           : kind == KIND_Q4_1   ? Coding{4, 0, SCALE_F16, MINIMUM_F16, 1}
           : kind == KIND_Q5_1   ? Coding{5, 0, SCALE_F16, MINIMUM_F16, 1}
           : kind == KIND_Q2_K   ? Coding{2, 0, SCALE_U8, MINIMUM_NIBBLE, 2}
           : kind == KIND_Q3_K   ? Coding{3, 4, SCALE_I8, MINIMUM_NONE, 2}
           : kind == KIND_Q4_K   ? Coding{4, 0, SCALE_U8, MINIMUM_U8, 1}
           : kind == KIND_Q5_K   ? Coding{5, 0, SCALE_U8, MINIMUM_U8, 1}
           : kind == KIND_Q6_K   ? Coding{6, 32, SCALE_I8, MINIMUM_NONE, 2}
           : kind == KIND_IQ4_XS ? Coding{4, CODES_NL4, SCALE_I8, MINIMUM_NONE, 1}
           : kind == KIND_INT4_ROW ? Coding{4, 8, SCALE_I8_ROW, MINIMUM_NONE, 1}
           : kind == KIND_NL4_ROW  ? Coding{4, CODES_NL4, SCALE_I8_ROW, MINIMUM_NONE, 1}
           : kind == KIND_T2     ? Coding{2, CODES_T2, SCALE_I8_ROW, MINIMUM_NONE, 1}
           : kind == KIND_T3     ? Coding{3, CODES_T3, SCALE_I8_ROW, MINIMUM_NONE, 1}
           : kind == KIND_FP8    ? Coding{8, CODES_E4M3, SCALE_ANY, MINIMUM_NONE, 1}
                                 : Coding{4, CODES_E2M1, SCALE_E4M3, MINIMUM_NONE, 2};
}

template <uint32_t KIND>
struct Rows<KIND, true> {
    const uint8_t* codes;   // block 0, rows 2g and 2g + 1 of its first vector
    const uint8_t* scales;  // of group 0
    const uint8_t* zeros;   // minimums of group 0
    const uint8_t* supers;  // numbers of the first 256 columns, or of the rows
    uint32_t t;             // of the lane
    uint32_t group_shift;   // (block >> group_shift) * block_groups = its first group
    Coding of_matrix;

    // Returns the coding, of which everything that KIND says is known at compile time.
    __device__ __forceinline__ Coding coding() const {
        if constexpr (KIND == KIND_CODED) {
            return of_matrix;
        } else {
            constexpr Coding OF_KIND = coding_of(KIND);
            Coding coding = OF_KIND;
            coding.scale_kind = OF_KIND.scale_kind == SCALE_ANY ? of_matrix.scale_kind : OF_KIND.scale_kind;
            return coding;
        }
    }
    __device__ __forceinline__ bool has_minimums() const { return coding().minimum != MINIMUM_NONE; }
};

template <uint32_t KIND>
struct Raw<KIND, true> {
    uint32_t words[6];   // [vector][row]
    uint32_t scales[2];  // f32: of both rows; others: both rows in one word, [half of the block]
    uint32_t zeros;      // of both rows
    uint32_t supers[2];  // of f16: both rows in one word, for scales and for minimums; f32: of both rows
};

// Scales and minimums of the lane's two rows in both halves of a block.
struct Factors {
    float2 scale[2];
    float2 minimum[2];
};

// Returns whether scales are multiplied by the f32 number of their row.
__device__ __forceinline__ bool is_of_row(const Coding& coding) {
    return coding.scale_kind == SCALE_E4M3 || coding.scale_kind == SCALE_I8_ROW;
}

// Returns the bytes of a scale.
__device__ __forceinline__ uint32_t scale_bytes(uint32_t scale_kind) {
    return scale_kind == SCALE_F32 ? 4 : scale_kind == SCALE_F16 ? 2 : 1;
}

template <uint32_t KIND>
__device__ __forceinline__ Rows<KIND> coded_rows(const Matrix& w, const uint8_t* data, uint32_t tile, Lane lane) {
    const uint8_t* bytes = data + uint64_t(tile) * w.tile_bytes;
    Rows<KIND> rows;
    rows.of_matrix = {w.block_bytes / 64, w.codes, w.scale_kind, w.minimum, w.block_groups};
    const Coding coding = rows.coding();
    rows.codes = opaque(bytes + w.codes_offset + lane.g * 8);
    rows.scales = opaque(bytes + 2 * lane.g * scale_bytes(coding.scale_kind));
    rows.zeros = bytes + w.zeros_offset + 2 * lane.g * (coding.minimum == MINIMUM_F16 ? 2 : 1);
    rows.supers = bytes + w.supers_offset + 2 * lane.g * (is_of_row(coding) ? 4 : 2);
    rows.t = lane.t;
    rows.group_shift = group_shift_of(w);
    return rows;
}

// Loads this lane's share of a block.
template <uint32_t KIND>
__device__ __forceinline__ Raw<KIND> load_coded(const Rows<KIND>& rows, uint32_t block) {
    Raw<KIND> raw;
    const Coding coding = rows.coding();
    const uint32_t bits = coding.bits;
    const uint8_t* codes = rows.codes + uint64_t(block) * (64 * bits);
    const uint2 first = load_once(codes + (bits >= 4 ? rows.t * 64 : 0));
    raw.words[0] = first.x, raw.words[1] = first.y;
    if (bits != 4) {
        const uint2 second = load_once(codes + (bits == 8 ? 256 + rows.t * 64 : bits > 4 ? 256 : 64));
        raw.words[2] = second.x, raw.words[3] = second.y;
    }
    if (bits == 3 || bits == 6) {
        const uint2 third = load_once(codes + (bits == 6 ? 320 : 128));
        raw.words[4] = third.x, raw.words[5] = third.y;
    }
    const uint32_t group = (block >> rows.group_shift) * coding.block_groups, size = scale_bytes(coding.scale_kind);
    load_scales(rows.scales + uint64_t(group) * (size * TILE_ROWS), size, raw.scales);
    if (coding.block_groups == 2) {  // these scales are bytes
        raw.scales[1] = __ldg(reinterpret_cast<const uint16_t*>(rows.scales + uint64_t(group + 1) * TILE_ROWS));
    }
    if (is_of_row(coding)) {
        load_scales(rows.supers, 4, raw.supers);
    } else if (coding.scale_kind == SCALE_U8) {
        const uint8_t* supers = rows.supers + uint64_t(block / 8) * (4 * TILE_ROWS);
        raw.supers[0] = __ldg(reinterpret_cast<const uint32_t*>(supers));
        raw.supers[1] = __ldg(reinterpret_cast<const uint32_t*>(supers + 2 * TILE_ROWS));
    } else if (coding.scale_kind == SCALE_I8) {
        raw.supers[0] = __ldg(reinterpret_cast<const uint32_t*>(rows.supers + uint64_t(block / 8) * (2 * TILE_ROWS)));
    }
    if (coding.minimum == MINIMUM_U8) {
        raw.zeros = __ldg(reinterpret_cast<const uint16_t*>(rows.zeros + uint64_t(group) * TILE_ROWS));
    } else if (coding.minimum == MINIMUM_F16) {
        raw.zeros = __ldg(reinterpret_cast<const uint32_t*>(rows.zeros + uint64_t(group) * (2 * TILE_ROWS)));
    }
    return raw;
}

// Returns an FP8 number; its NaN counts as 480.
__device__ __forceinline__ float float_of_e4m3(uint32_t code) {
    // Exponent and fraction are moved to those of an f32 number, which is then too small by a factor of 2^120.
    return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * __uint_as_float(247u << 23);
}

// Returns the scales of both rows that lie in a word (f16) or in bytes, without the numbers that multiply them.
__device__ __forceinline__ float2 narrow_scales(const Coding& coding, uint32_t word) {
    const uint32_t x = word & 255, y = word >> 8 & 255;
    switch (coding.scale_kind) {
    case SCALE_F16:
        return halves_of(word);
    case SCALE_E8M0:
        return make_float2(power_of_two(x), power_of_two(y));
    case SCALE_E4M3:
        return make_float2(float_of_e4m3(x), float_of_e4m3(y));
    case SCALE_I8:
    case SCALE_I8_ROW:
        return make_float2(float(int8_t(x)), float(int8_t(y)));
    default:
        const uint32_t mask = coding.minimum == MINIMUM_NIBBLE ? 15 : 255;
        return make_float2(float(x & mask), float(y & mask));
    }
}

// Returns the scales and minimums of a block, as `TileLayout::factors` of src/scheme defines them.
template <uint32_t KIND>
__device__ __forceinline__ Factors factors_of(const Rows<KIND>& rows, const Raw<KIND>& raw) {
    const Coding coding = rows.coding();
    float2 supers = make_float2(1.0f, 1.0f), second = supers;
    if (is_of_row(coding)) {
        supers = make_float2(__uint_as_float(raw.supers[0]), __uint_as_float(raw.supers[1]));
    } else if (coding.scale_kind == SCALE_I8 || coding.scale_kind == SCALE_U8) {
        supers = halves_of(raw.supers[0]);
        second = coding.scale_kind == SCALE_U8 ? halves_of(raw.supers[1]) : second;
    }
    Factors factors;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t word = coding.block_groups == 2 ? raw.scales[half] : raw.scales[0];
        float2 scale, minimum = make_float2(0.0f, 0.0f);
        if (coding.scale_kind == SCALE_F32) {
            scale = make_float2(__uint_as_float(raw.scales[0]), __uint_as_float(raw.scales[1]));
        } else {
            scale = narrow_scales(coding, word);
            scale = make_float2(scale.x * supers.x, scale.y * supers.y);
        }
        if (coding.minimum == MINIMUM_F16) {
            minimum = halves_of(raw.zeros);
        } else if (coding.minimum != MINIMUM_NONE) {
            const uint32_t of = coding.minimum == MINIMUM_U8 ? raw.zeros : word >> 4 & 0x0f0f;
            minimum = make_float2(-second.x * float(of & 255), -second.y * float(of >> 8 & 255));
        }
        factors.scale[half] = scale, factors.minimum[half] = minimum;
    }
    return factors;
}

// The values of trellises (src/scheme/trellis.rs) as signed bytes.
#define T2_TABLE \
    {\
     {0xfb09e419u, 0x20f1bd58u, 0x4c1f0dd9u, 0xe4a5fbceu}, \
     {0x1be5cdafu, 0x2ecb03e4u, 0x02e04525u, 0x15ec1733u}, \
     {0xdcf9000cu, 0x0927bd41u, 0xd302274bu, 0xf626d900u}, \
     {0x15c881ecu, 0xeb7826f8u, 0xe541f80au, 0xb9023a18u} \
    }
#define T3_TABLE \
    {\
     {0x0483f926u, 0xdf14eeb8u, 0xffe4f7c1u, 0x27ea0dd2u}, \
     {0x7f2c0645u, 0x0ef1d61cu, 0xf01f3406u, 0xfe4ee312u}, \
     {0x110120f1u, 0xc9d8fae8u, 0x13c7de2cu, 0x3df71a06u}, \
     {0xba0ca61au, 0xed31d7fdu, 0xd13df10fu, 0x5b0223e3u} \
    }

__device__ __forceinline__ bool is_trellis(uint32_t map) {
    return map == CODES_T2 || map == CODES_T3;
}

// Returns four codes in the low bytes of `codes`, each below 16, as adjacent nibbles.
__device__ __forceinline__ uint32_t nibbles_of(uint32_t codes) {
    const uint32_t pairs = codes | codes >> 4;
    return (pairs & 0xff) | (pairs >> 8 & 0xff00);
}

// Looks up four indices of 6 bits, one per byte, in a table of 64 bytes: all its quarters are looked up, and the upper
// two bits of each index select the result.
__device__ __forceinline__ uint32_t look_up_64(uint32_t indices, const uint32_t (&table)[4][4]) {
    const uint32_t low = nibbles_of(indices & 0x0f0f0f0f);
    const uint32_t fifth = nibbles_of(indices >> 4 & 0x01010101) * 4 + 0x3210;
    const uint32_t sixth = nibbles_of(indices >> 5 & 0x01010101) * 4 + 0x3210;
    const uint32_t lower = __byte_perm(look_up(low, table[0]), look_up(low, table[1]), fifth);
    const uint32_t upper = __byte_perm(look_up(low, table[2]), look_up(low, table[3]), fifth);
    return __byte_perm(lower, upper, sixth);
}

// Returns the values of a step of the streams of a row, whose vectors are `words`, as signed bytes.
__device__ __forceinline__ uint32_t values_of_step(const Coding& coding, const uint32_t (&words)[3], uint32_t step) {
    const uint32_t bit = coding.bits * step, vector = bit / 8, within = bit % 8;
    const uint32_t own = vector == 0 ? words[0] : vector == 1 ? words[1] : words[2];
    const uint32_t next = vector + 1 == coding.bits ? words[0] : vector == 0 ? words[1] : words[2];
    // Shifts of whole words move bits of other bytes into the place of those of the next vector.
    const uint32_t mask = (0xffu >> within) * 0x01010101u;
    const uint32_t indices = ((own >> within & mask) | (next << (8 - within) & ~mask)) & 0x3f3f3f3f;
    const uint32_t t2[4][4] = T2_TABLE, t3[4][4] = T3_TABLE;
    return coding.codes == CODES_T2 ? look_up_64(indices, t2) : look_up_64(indices, t3);
}

// Returns the lane's codes of a row, one per byte: columns 4t..4t+4 in x, 16+4t..16+4t+4 in y. Those of trellises are
// values.
template <uint32_t KIND>
__device__ __forceinline__ uint2 codes_of(const Rows<KIND>& rows, const Raw<KIND>& raw, uint32_t row) {
    const uint32_t bits = rows.coding().bits, t = rows.t;
    const uint32_t first = raw.words[row];
    if (bits == 8) {
        return make_uint2(first, raw.words[2 + row]);
    }
    if (bits == 4) {
        return make_uint2(first & 0x0f0f0f0f, first >> 4 & 0x0f0f0f0f);
    }
    const uint32_t second = raw.words[2 + row];
    if (bits == 5) {
        return make_uint2((first & 0x0f0f0f0f) | (second >> t & 0x01010101) << 4,
                          (first >> 4 & 0x0f0f0f0f) | (second >> (t + 4) & 0x01010101) << 4);
    }
    if (bits == 2 && !is_trellis(rows.coding().codes)) {
        return make_uint2(first >> 2 * t & 0x03030303, second >> 2 * t & 0x03030303);
    }
    const uint32_t third = raw.words[4 + row];
    if (is_trellis(rows.coding().codes)) {
        const uint32_t words[3] = {first, second, third};
        return make_uint2(values_of_step(rows.coding(), words, t), values_of_step(rows.coding(), words, t + 4));
    }
    if (bits == 6) {
        return make_uint2((first & 0x0f0f0f0f) | (second >> 2 * t & 0x03030303) << 4,
                          (first >> 4 & 0x0f0f0f0f) | (third >> 2 * t & 0x03030303) << 4);
    }
    return make_uint2((first >> 2 * t & 0x03030303) | (third >> t & 0x01010101) << 2,
                      (second >> 2 * t & 0x03030303) | (third >> (t + 4) & 0x01010101) << 2);
}

// Writes the numbers of four codes as floats.
__device__ __forceinline__ void floats_of_codes(uint32_t map, uint32_t codes, float* out) {
    if (map == CODES_E4M3) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            out[i] = float_of_e4m3(codes >> 8 * i & 255);
        }
    } else if (is_trellis(map)) {
        floats_of_bytes(codes, out);
    } else if (map == CODES_NL4) {
        const uint32_t table[4] = NL4_TABLE;
        floats_of_bytes(look_up(nibbles_of(codes), table), out);
    } else if (map == CODES_E2M1) {
        const uint32_t table[4] = E2M1_TABLE;
        floats_of_bytes(look_up(nibbles_of(codes), table), out);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            out[i] *= 0.5f;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            out[i] = __uint_as_float((codes >> 8 * i & 255) | 0x4b000000u) - (8388608.0f + float(map));
        }
    }
}

// Writes the lane's eight weights of one of its two rows, in the order of columns.
template <uint32_t KIND>
__device__ __forceinline__ void weights_of(const Rows<KIND>& rows, const Raw<KIND>& raw, const Factors& factors, uint32_t row,
                                           float (&out)[8]) {
    const uint2 codes = codes_of(rows, raw, row);
    floats_of_codes(rows.coding().codes, codes.x, out);
    floats_of_codes(rows.coding().codes, codes.y, out + 4);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const float2 scale = factors.scale[i / 4], minimum = factors.minimum[i / 4];
        const float product = __fmul_rn(out[i], row ? scale.y : scale.x);
        out[i] = __fadd_rn(product, row ? minimum.y : minimum.x);
    }
}
