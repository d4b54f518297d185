// The weights of a block (16 rows by 32 columns) as operand A of `mma.m16n8k16`: exact bf16 numbers without their
// scales, which are applied to the sums.
//
// Row g of the operand is row 2g of the 16, row g + 8 is row 2g + 1. A block takes two products: one for columns 0..16,
// one for the others. Columns 2t, 2t + 1, 2t + 8 and 2t + 9 of the operand are columns 4t, 4t + 2, 4t + 1 and 4t + 3 of
// the matrix, because one AND extracts such a pair from a word of codes. Activations are stored in that order
// (`place`), 16 bytes for lane t.
#pragma once
#include "matmul_weights.cuh"
#include "tensor.cuh"

#ifdef TENSOR_CORES

// Operand A of both products; `rest` holds the rounding errors of f16 numbers, which need two bf16 numbers each.
template <uint32_t KIND>
struct Fragments {
    static constexpr bool TWO = KIND == KIND_F16;
    uint32_t a[2][4];
    uint32_t rest[TWO ? 2 : 1][4];
};

// Returns a * b + c; each word holds two bf16 numbers.
__device__ __forceinline__ uint32_t bf16_fma(uint32_t a, uint32_t b, uint32_t c) {
#ifdef IEC_EMULATED
    uint32_t both = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const __nv_bfloat16 x = __ushort_as_bfloat16(uint16_t(a >> shift)), y = __ushort_as_bfloat16(uint16_t(b >> shift));
        both |= uint32_t(__bfloat16_as_ushort(__hfma(x, y, __ushort_as_bfloat16(uint16_t(c >> shift))))) << shift;
    }
    return both;
#else
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#endif
}

// Returns a & mask | value, in one instruction although `mask` and `value` are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t value) {
#ifdef IEC_EMULATED
    return (a & mask) | value;
#else
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(value));
    return d;
#endif
}

#define BF16_ONES 0x3f803f80u
// 128 as bf16, twice. The low seven bits of each are free for a number below 128, which is then added to the 128.
#define BF16_128 0x43004300u

// Returns two bf16 numbers: the codes in bits 0..4 and 16..20 of `codes`, each plus 128 and plus the bf16 number in its
// half of `minus`.
__device__ __forceinline__ uint32_t bf16_of_codes(uint32_t codes, uint32_t minus) {
    return bf16_fma(and_or(codes, 0x000f000f, BF16_128), BF16_ONES, minus);
}

// Returns the signed bytes in bits 0..8 and 16..24 of `pair` as two bf16 numbers. Each is computed as 128 plus its low
// seven bits, minus 128, or minus 256 if its sign bit is set.
__device__ __forceinline__ uint32_t bf16_of_bytes(uint32_t pair) {
    return bf16_fma(and_or(pair, 0x007f007f, BF16_128), BF16_ONES, and_or(pair, 0x00800080, 0xc300c300u));
}

// Returns the E2M1 codes in bits 0..4 and 16..20 of `word >> SHIFT` as two bf16 numbers. The exponent and mantissa bits
// of a code are moved to those of a bf16 number, which is then too small by a factor of 2^126 and is multiplied by it.
template <int SHIFT>
__device__ __forceinline__ uint32_t bf16_of_e2m1(uint32_t word) {
    const uint32_t magnitude = SHIFT <= 6 ? word << (6 - SHIFT) : word >> (SHIFT - 6);
    const uint32_t bits = (magnitude & 0x01c001c0) | (word << (12 - SHIFT) & 0x80008000u);
    return bf16_fma(bits, 0x7e807e80u, 0x80008000u);
}

// Returns two numbers rounded to bf16, the first in the low half of the word.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Splits two f16 numbers into `hi`, the numbers rounded to bf16, and `rest`, their rounding errors, which bf16
// represents exactly; the error of infinity is zero.
__device__ __forceinline__ void split_halves(uint32_t halves, uint32_t& hi, uint32_t& rest) {
    const float x = __half2float(__ushort_as_half(uint16_t(halves))), y = __half2float(__ushort_as_half(uint16_t(halves >> 16)));
    hi = bf16_pair(x, y);
    const float x_hi = __uint_as_float(hi << 16), y_hi = __uint_as_float(hi & 0xffff0000u);
    rest = bf16_pair(x == x_hi ? 0.0f : x - x_hi, y == y_hi ? 0.0f : y - y_hi);
}

// Converts stored words to fragments; AS may be KIND_TILES, because the fragments of all kinds of tiles have the same
// form.
template <uint32_t KIND, uint32_t AS>
__device__ __forceinline__ void fragments_of(const Raw<KIND>& raw, Fragments<AS>& f) {
#pragma unroll
    for (uint32_t row = 0; row < 2; row++) {
        if constexpr (KIND == KIND_BF16 || KIND == KIND_F16) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t low = raw.words[4 * row + 2 * half], high = raw.words[4 * row + 2 * half + 1];
                const uint32_t even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
                if constexpr (KIND == KIND_BF16) {
                    f.a[half][row] = even, f.a[half][row + 2] = odd;
                } else {
                    split_halves(even, f.a[half][row], f.rest[half][row]);
                    split_halves(odd, f.a[half][row + 2], f.rest[half][row + 2]);
                }
            }
        } else if constexpr (KIND == KIND_INT8) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                f.a[half][row] = bf16_of_bytes(raw.words[2 * half + row]);
                f.a[half][row + 2] = bf16_of_bytes(raw.words[2 * half + row] >> 8);
            }
        } else if constexpr (KIND == KIND_NL4) {
            const uint32_t table[4] = NL4_TABLE;
            // Bytes 0 to 3: columns 0, 16, 1, 17 of `low`, 2, 18, 3, 19 of `high`.
            const uint32_t low = look_up(raw.words[row], table), high = look_up(raw.words[row] >> 16, table);
            f.a[0][row] = bf16_of_bytes(__byte_perm(low, high, 0x4400));
            f.a[1][row] = bf16_of_bytes(__byte_perm(low, high, 0x5511));
            f.a[0][row + 2] = bf16_of_bytes(__byte_perm(low, high, 0x6622));
            f.a[1][row + 2] = bf16_of_bytes(__byte_perm(low, high, 0x7733));
        } else if constexpr (KIND == KIND_MXFP4) {
            f.a[0][row] = bf16_of_e2m1<0>(raw.words[row]);
            f.a[1][row] = bf16_of_e2m1<4>(raw.words[row]);
            f.a[0][row + 2] = bf16_of_e2m1<8>(raw.words[row]);
            f.a[1][row + 2] = bf16_of_e2m1<12>(raw.words[row]);
        } else {
            const uint32_t minus = 0xc300c300u + zero_of(raw, row) * 0x10001u;
            f.a[0][row] = bf16_of_codes(raw.words[row], minus);
            f.a[1][row] = bf16_of_codes(raw.words[row] >> 4, minus);
            f.a[0][row + 2] = bf16_of_codes(raw.words[row] >> 8, minus);
            f.a[1][row + 2] = bf16_of_codes(raw.words[row] >> 12, minus);
        }
    }
}

// Returns the FP8 numbers in bits 0..8 and 16..24 of `pair` as two bf16 numbers, like `bf16_of_e2m1`.
__device__ __forceinline__ uint32_t bf16_of_e4m3(uint32_t pair) {
    return bf16_fma((pair & 0x007f007f) << 4 | (pair & 0x00800080) << 8, 0x7b807b80u, 0x80008000u);
}

// Returns the numbers of the codes in bits 0..8 and 16..24 of `pair` as two bf16 numbers.
__device__ __forceinline__ uint32_t bf16_of_coded(uint32_t map, uint32_t pair) {
    if (map == CODES_E4M3) {
        return bf16_of_e4m3(pair);
    }
    if (map == CODES_E2M1) {
        return bf16_of_e2m1<0>(pair);
    }
    if (is_trellis(map)) {
        return bf16_of_bytes(pair);
    }
    if (map == CODES_NL4) {
        const uint32_t table[4] = NL4_TABLE;
        return bf16_of_bytes(look_up((pair & 15) | (pair >> 8 & 0xf00), table));
    }
    return bf16_fma(and_or(pair, 0x007f007f, BF16_128), BF16_ONES, 0xc300c300u + map * 0x10001u);
}

// Converts codes of kinds from KIND_CODED on to fragments.
template <uint32_t KIND>
__device__ __forceinline__ void fragments_of(const Rows<KIND>& rows, const Raw<KIND>& raw, Fragments<KIND>& f) {
#pragma unroll
    for (uint32_t row = 0; row < 2; row++) {
        const uint2 codes = codes_of(rows, raw, row);
        const uint32_t map = rows.coding().codes;
        f.a[0][row] = bf16_of_coded(map, codes.x);
        f.a[0][row + 2] = bf16_of_coded(map, codes.x >> 8);
        f.a[1][row] = bf16_of_coded(map, codes.y);
        f.a[1][row + 2] = bf16_of_coded(map, codes.y >> 8);
    }
}

// d = a * b.
__device__ __forceinline__ void mma_start(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef IEC_EMULATED
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    mma_bf16_16x8x16(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#endif
}

// This lane's activations of 8 rows of x in a block of 32 columns: operand B of both products; `rest` holds the
// rounding errors.
template <int PASSES>
struct Columns {
    uint32_t b[2][2];
    uint32_t rest[PASSES == 2 ? 2 : 1][2];
    __device__ __forceinline__ Columns() {}
    __device__ __forceinline__ Columns(uint4 hi, uint4 lo) : b{{hi.x, hi.y}, {hi.z, hi.w}} {
        if constexpr (PASSES == 2) {
            rest[0][0] = lo.x, rest[0][1] = lo.y, rest[1][0] = lo.z, rest[1][1] = lo.w;
        }
    }
};

// The COUNT products that a block takes. `add` computes the one with index `product` and adds it to `sums`; if START,
// product 0 overwrites `sums` instead.
template <uint32_t KIND, int PASSES>
struct Products {
    static constexpr int EACH = PASSES * (Fragments<KIND>::TWO ? 2 : 1), COUNT = 2 * EACH;
    template <bool START>
    static __device__ __forceinline__ void add(float (&sums)[4], const Fragments<KIND>& f, const Columns<PASSES>& x, int product) {
        const int half = product % 2, which = product / 2;
        const uint32_t(&a)[4] = which < PASSES ? f.a[half] : f.rest[Fragments<KIND>::TWO ? half : 0];
        const uint32_t(&b)[2] = which % PASSES == 0 ? x.b[half] : x.rest[PASSES == 2 ? half : 0];
        if (START && product == 0) {
            mma_start(sums, a, b);
        } else {
            mma_bf16_16x8x16(sums, a, b);
        }
    }
};

// sums += block * scales.
__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&block)[4], float2 scales) {
    sums[0] = __fmaf_rn(block[0], scales.x, sums[0]);
    sums[1] = __fmaf_rn(block[1], scales.x, sums[1]);
    sums[2] = __fmaf_rn(block[2], scales.y, sums[2]);
    sums[3] = __fmaf_rn(block[3], scales.y, sums[3]);
}

// Computes the product of a block of weights, without their scales, with 8 rows of x.
template <uint32_t KIND, int PASSES>
__device__ __forceinline__ void multiply_block(float (&block)[4], const Fragments<KIND>& f, const Columns<PASSES>& x) {
    typedef Products<KIND, PASSES> P;
#pragma unroll
    for (int product = 0; product < P::COUNT; product++) {
        P::template add<true>(block, f, x, product);
    }
}

// Products of the two halves of a block of kinds from KIND_CODED on with 8 rows of x, before scales and minimums: of the codes, and of
// ones, which are the sums of x that minimums multiply.
struct Halves {
    float codes[2][4];
    float ones[2][4];
};

// Computes these products; those of ones only if groups have minimums.
template <uint32_t KIND, int PASSES>
__device__ __forceinline__ void multiply_halves(Halves& out, const Fragments<KIND>& f, const Columns<PASSES>& x, bool minimums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mma_start(out.codes[half], f.a[half], x.b[half]);
        if constexpr (PASSES == 2) {
            mma_bf16_16x8x16(out.codes[half], f.a[half], x.rest[half]);
        }
    }
    if (minimums) {
        const uint32_t ones[4] = {BF16_ONES, BF16_ONES, BF16_ONES, BF16_ONES};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            mma_start(out.ones[half], ones, x.b[half]);
            if constexpr (PASSES == 2) {
                mma_bf16_16x8x16(out.ones[half], ones, x.rest[half]);
            }
        }
    }
}

// sums += codes * scales + ones * minimums.
__device__ __forceinline__ void add_halves(float (&sums)[4], const float (&codes)[2][4], const float (&ones)[2][4],
                                           const Factors& factors, bool minimums) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        add_scaled(sums, codes[half], factors.scale[half]);
        if (minimums) {
            add_scaled(sums, ones[half], factors.minimum[half]);
        }
    }
}

#endif
