// Forms in which matrix products read activations: as floats (`f32`), and as one or two bf16 numbers (`hi`, `lo`).
//
// `hi` is the value rounded to bf16. `lo` is the rounding error, rounded to bf16 as well; `hi + lo` has about 16
// significant bits. Where `hi` is infinite or NaN, `lo` is zero, so that their sum is still `hi`.
//
// `hi` and `lo` must be aligned to 8 bytes (then so are their rows); `f32` need not be aligned.
#pragma once
#include "args.cuh"

// Returns the bits of the nearest bf16 number (ties to even). Too large values become infinite, NaN stays NaN.
__device__ __forceinline__ uint32_t bf16_bits(float value) {
#if defined(IEC_EMULATED) || __CUDA_ARCH__ < 800
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return bits >> 16 | 0x40;  // a NaN with only low mantissa bits must not become infinite
    }
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
#else
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#endif
}

// Returns the float that has these bf16 bits.
__device__ __forceinline__ float bf16_value(uint32_t bits) {
    return __uint_as_float(bits << 16);
}

// Returns the rounding error `value - hi` as bf16 bits.
__device__ __forceinline__ uint32_t bf16_rest(float value, uint32_t hi) {
    return (hi & 0x7f80u) == 0x7f80u ? 0 : bf16_bits(value - bf16_value(hi));
}

// Returns whether `put4` may be used for `acts`: each of its rows of floats is aligned to 16 bytes.
__device__ __forceinline__ bool takes_fours(const Acts& acts) {
    return acts.f32 == nullptr || ((reinterpret_cast<uint64_t>(acts.f32) & 15) == 0 && (acts.stride & 3) == 0);
}

// Writes one value in all forms that are wanted.
__device__ __forceinline__ void put(const Acts& acts, uint32_t row, uint32_t column, float value) {
    if (acts.f32) {
        acts.f32[uint64_t(row) * acts.stride + column] = value;
    }
    if (acts.hi) {
        const uint64_t at = uint64_t(row) * acts.half_stride + place(column);
        const uint32_t hi = bf16_bits(value);
        acts.hi[at] = uint16_t(hi);
        if (acts.lo) {
            acts.lo[at] = uint16_t(bf16_rest(value, hi));
        }
    }
}

// Returns the bf16 bits of four adjacent columns as two words, in the order of `place`.
__device__ __forceinline__ uint2 in_place(const uint32_t (&bits)[4]) {
    return make_uint2(bits[0] | bits[2] << 16, bits[1] | bits[3] << 16);
}

// Writes the values of columns `column` .. `column + 4` to `hi` and `lo` only; `column` is a multiple of four.
__device__ __forceinline__ void put4_halves(const Acts& acts, uint32_t row, uint32_t column, float4 value) {
    if (!acts.hi) {
        return;
    }
    const float values[4] = {value.x, value.y, value.z, value.w};
    uint32_t hi[4], lo[4];
    const uint64_t at = uint64_t(row) * acts.half_stride + place(column);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        hi[i] = bf16_bits(values[i]);
        lo[i] = bf16_rest(values[i], hi[i]);
    }
    *reinterpret_cast<uint2*>(acts.hi + at) = in_place(hi);
    if (acts.lo) {
        *reinterpret_cast<uint2*>(acts.lo + at) = in_place(lo);
    }
}

// Writes the values of columns `column` .. `column + 4` in all forms that are wanted. `column` is a multiple of four,
// and `takes_fours(acts)` is true.
__device__ __forceinline__ void put4(const Acts& acts, uint32_t row, uint32_t column, float4 value) {
    if (acts.f32) {
        *reinterpret_cast<float4*>(acts.f32 + uint64_t(row) * acts.stride + column) = value;
    }
    put4_halves(acts, row, column, value);
}

// Sets the columns of `hi` and `lo` from `width` up to the next multiple of 32 to zero; `threads` threads share the
// work.
__device__ __forceinline__ void pad(const Acts& acts, uint32_t row, uint32_t width, uint32_t thread, uint32_t threads) {
    if (!acts.hi) {
        return;
    }
    const uint32_t end = (width + 31) & ~31u;
    for (uint32_t column = width + thread; column < end; column += threads) {
        const uint64_t at = uint64_t(row) * acts.half_stride + place(column);
        acts.hi[at] = 0;
        if (acts.lo) {
            acts.lo[at] = 0;
        }
    }
}
