// Loads of weights that are floats stored row by row.
#pragma once
#include "norm.cuh"

// Returns columns `column` .. `column + 4` of a row of weights, which are aligned to 8 bytes (f32: 16).
template <uint32_t KIND>
__device__ __forceinline__ Lanes<4> four_weights(const uint8_t* row, uint32_t column) {
    if constexpr (KIND == KIND_F32) {
        return load_lanes<4>(reinterpret_cast<const float*>(row) + column);
    } else {
        const uint2 all = *reinterpret_cast<const uint2*>(row + 2 * column);
        const uint32_t bits[4] = {all.x & 0xffff, all.x >> 16, all.y & 0xffff, all.y >> 16};
        Lanes<4> lanes;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            lanes.v[i] = KIND == KIND_F16 ? __half2float(__ushort_as_half(uint16_t(bits[i]))) : bf16_value(bits[i]);
        }
        return lanes;
    }
}

// One weight.
__device__ __forceinline__ Lanes<1> one_weight(uint32_t kind, const uint8_t* row, uint32_t column) {
    if (kind == KIND_F32) {
        return {reinterpret_cast<const float*>(row)[column]};
    }
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[column];
    return {kind == KIND_F16 ? __half2float(__ushort_as_half(bits)) : bf16_value(bits)};
}
