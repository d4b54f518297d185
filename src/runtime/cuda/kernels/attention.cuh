// Code that the attention kernels share: addresses of keys and values, the positions that a row attends to ("sees"),
// and the arithmetic of scores.
//
// Scores are exponents of two. Every kernel processes the positions of a row in steps and keeps, for the positions so
// far, the largest score m, the sum l of 2^(s - m), and the sum of the values weighted by 2^(s - m). When m grows, l
// and the weighted sum are multiplied by 2^(old m - new m); two such results are combined in the same way. At the end,
// the weighted sum is divided by l, to which a sink, if there is one, adds its own power of two.
//
// Positions are cut into steps at multiples of the step, which divides PAGE: a step never crosses the border of a page.
#pragma once
#include "acts.cuh"
#include "cache.cuh"
#include "gated.cuh"
#include "tensor.cuh"

// Range of positions, such as those that a row sees: `first` .. `last`, both included.
struct Visible {
    uint32_t first;
    uint32_t last;

    __device__ __forceinline__ bool has(uint32_t position) const {
        return position - first <= last - first;
    }
};

__device__ __forceinline__ Visible visible_at(uint32_t position, uint32_t window) {
    return {window != 0 && position >= window ? position - window + 1 : 0, position};
}

// Returns whether a row at position `row` sees `position`, with fewer registers than `Visible`. Positions are below
// 2^31.
__device__ __forceinline__ bool sees(uint32_t row, uint32_t position, uint32_t window) {
    return row - position < (window != 0 ? window : 0x80000000u);
}

// 2^x within 2 units in the last place; 0 below -126.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef IEC_EMULATED
    return x < -126.0f ? 0.0f : exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1 / x within 1 unit in the last place.
__device__ __forceinline__ float inverse_of(float x) {
#ifdef IEC_EMULATED
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The score that weights are relative to: the largest one, or 0 where all are minus infinity (whose difference would be
// NaN).
__device__ __forceinline__ float reference_of(float largest) {
    return largest == NEG_INF ? 0.0f : largest;
}

// cap * tanh(score / cap), with an error of at most 2^-22 * cap.
__device__ __forceinline__ float capped(float score, float cap) {
    const float log2e_twice = 2.885390082f;
    return cap - 2.0f * cap * inverse_of(1.0f + exp2_of(score * (log2e_twice / cap)));
}

// Element types of keys and values. `two` reads two adjacent numbers, aligned to the size of both.
struct KvF32 {
    typedef float Element;

    static __device__ __forceinline__ float2 two(const float* p) {
        return *reinterpret_cast<const float2*>(p);
    }
};

struct KvF16 {
    typedef uint16_t Element;

    static __device__ __forceinline__ float low(uint32_t both) {
        return __half2float(__ushort_as_half(uint16_t(both)));
    }
    static __device__ __forceinline__ float high(uint32_t both) {
        return __half2float(__ushort_as_half(uint16_t(both >> 16)));
    }
    static __device__ __forceinline__ float2 two(const uint16_t* p) {
        const uint32_t both = *reinterpret_cast<const uint32_t*>(p);
        return make_float2(low(both), high(both));
    }
    // Numbers that are too large for f16 become its largest number, NaN stays NaN.
    static __device__ __forceinline__ float clamp(float x) {
        return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    }
    // `low` and `high`, rounded, as the halves of a word.
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
#if defined(IEC_EMULATED) || __CUDA_ARCH__ < 800
        return __half_as_ushort(__float2half_rn(low)) | uint32_t(__half_as_ushort(__float2half_rn(high))) << 16;
#else
        uint32_t both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#endif
    }
#ifdef TENSOR_CORES
    static __device__ __forceinline__ void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
        mma_f16_16x8x16(d, a, b);
    }
#endif
};

struct KvBf16 {
    typedef uint16_t Element;

    static __device__ __forceinline__ float low(uint32_t both) {
        return __uint_as_float(both << 16);
    }
    static __device__ __forceinline__ float high(uint32_t both) {
        return __uint_as_float(both & 0xffff0000u);
    }
    static __device__ __forceinline__ float2 two(const uint16_t* p) {
        const uint32_t both = *reinterpret_cast<const uint32_t*>(p);
        return make_float2(low(both), high(both));
    }
    // No f32 is too large, because bf16 has the same exponents.
    static __device__ __forceinline__ float clamp(float x) {
        return x;
    }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
#if defined(IEC_EMULATED) || __CUDA_ARCH__ < 800
        return bf16_bits(low) | bf16_bits(high) << 16;
#else
        uint32_t both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
#endif
    }
#ifdef TENSOR_CORES
    static __device__ __forceinline__ void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
        mma_bf16_16x8x16(d, a, b);
    }
#endif
};

// Splits two numbers into the pair of rounded numbers and the pair of their rounding errors.
template <typename T>
__device__ __forceinline__ void split(float low, float high, uint32_t* rounded, uint32_t* rest) {
    *rounded = T::pack(low, high);
    *rest = T::pack(low - T::low(*rounded), high - T::high(*rounded));
}

// Positions of a step of the plain kernels: one for each lane of a warp.
#define PLAIN_STEP 32

// Floats per row of keys or values in the shared memory of the plain kernels: a multiple of 16 bytes, and 16 more so
// that adjacent rows use different banks.
__device__ __forceinline__ uint32_t plain_stride(const Cache& cache) {
    const uint32_t dim = cache.head_dim > cache.value_dim ? cache.head_dim : cache.value_dim;
    return ((dim + 3) & ~3u) + 4;
}

// Factor of a column of the result of a row: the sigmoid of the gate, if there is one.
__device__ __forceinline__ float gate_of(const Attention& a, uint32_t row, uint32_t column) {
    return a.gate ? sigmoid(a.gate[uint64_t(row) * a.n_heads * a.cache.value_dim + column]) : 1.0f;
}

// Keys or values of one head in a page, without scales.
template <typename T>
struct PlainRows {
    const typename T::Element* numbers;  // (PAGE, dim)
    uint32_t dim;

    __device__ __forceinline__ float2 two(uint32_t slot, uint32_t column) const {
        return T::two(numbers + slot * dim + column);
    }
};

// Keys or values of one head in a page of KV_INT8.
struct CodedRows {
    const int8_t* codes;   // (PAGE, dim)
    const float* scales;   // (PAGE, blocks)
    uint32_t dim;
    uint32_t blocks;

    __device__ __forceinline__ float2 two(uint32_t slot, uint32_t column) const {
        const uint32_t both = *reinterpret_cast<const uint16_t*>(codes + slot * dim + column);
        const float scale = scales[slot * blocks + column / KV_BLOCK];
        return make_float2(float(int8_t(both)) * scale, float(int8_t(both >> 8)) * scale);
    }
};

// Loads the keys or values of a step as floats to rows of `stride` of `out`, with all threads of the block; positions
// that are not visible and the columns after the last dimension become zero.
template <typename Rows>
__device__ __forceinline__ void load_step(const Visible& visible, const Rows& rows, uint32_t start, uint32_t stride,
                                          float* out) {
    const uint32_t dim = rows.dim, warps = blockDim.x / 32;
#pragma unroll 1
    for (uint32_t column = 2 * (threadIdx.x % 32); column < stride; column += 64) {
#pragma unroll 4
        for (uint32_t slot = threadIdx.x / 32; slot < PLAIN_STEP; slot += warps) {
            float2 two = make_float2(0.0f, 0.0f);
            if (visible.has(start + slot) && column < dim) {
                two = rows.two(start % PAGE + slot, column);
            }
            *reinterpret_cast<float2*>(out + slot * stride + column) = two;
        }
    }
}

// `load_step` for the keys (part 0) or values (part 1) of a head in a cache of any type.
__device__ __forceinline__ void load_rows(const Cache& cache, uint32_t sequence, uint32_t head, uint32_t part,
                                          const Visible& visible, uint32_t start, float* out) {
    const uint32_t dim = part == 0 ? cache.head_dim : cache.value_dim, stride = plain_stride(cache);
    const uint64_t from = kv_part(cache, sequence, head, part, start);
    if (cache.kind == KV_F32) {
        load_step(visible, PlainRows<KvF32>{reinterpret_cast<const float*>(from), dim}, start, stride, out);
    } else if (cache.kind == KV_F16) {
        load_step(visible, PlainRows<KvF16>{reinterpret_cast<const uint16_t*>(from), dim}, start, stride, out);
    } else if (cache.kind == KV_BF16) {
        load_step(visible, PlainRows<KvBf16>{reinterpret_cast<const uint16_t*>(from), dim}, start, stride, out);
    } else {
        const float* scales = reinterpret_cast<const float*>(from + PAGE * dim);
        const CodedRows rows = {reinterpret_cast<const int8_t*>(from), scales, dim, kv_blocks(dim)};
        load_step(visible, rows, start, stride, out);
    }
}

// out[i] = dot product of rows[i] and `row`. Rows have `stride` numbers, of which the last four are padding, aligned to
// 16 bytes.
template <int ROWS>
__device__ __forceinline__ void dots(const float* rows, const float* row, uint32_t stride, float out[ROWS]) {
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        out[i] = 0.0f;
    }
#pragma unroll 2
    for (uint32_t d = 0; d < stride - 4; d += 4) {
        const float4 r = *reinterpret_cast<const float4*>(row + d);
#pragma unroll
        for (uint32_t i = 0; i < ROWS; i++) {
            const float4 q = *reinterpret_cast<const float4*>(rows + i * stride + d);
            out[i] += q.x * r.x;
            out[i] += q.y * r.y;
            out[i] += q.z * r.z;
            out[i] += q.w * r.w;
        }
    }
}

// Turns the scores of a warp, one position per lane, into weights, and updates `m` and `l` (the latter for this lane's
// positions only). Returns the factor for the sums over earlier positions.
__device__ __forceinline__ float weigh(const Attention& a, bool seen, float* score, float* m, float* l) {
    const float kept = a.softcap != 0.0f ? capped(*score, a.softcap) : *score;
    float larger = fmaxf(*m, seen ? kept : NEG_INF);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        larger = fmaxf(larger, __shfl_xor_sync(FULL_WARP, larger, step));
    }
    const float reference = reference_of(larger), keep = exp2_of(*m - reference);
    *score = seen ? exp2_of(kept - reference) : 0.0f;
    *l = *l * keep + *score;
    *m = larger;
    return keep;
}
