// Sums and maxima over the threads of a warp or a block, in a fixed order.
#pragma once
#include "args.cuh"

#define WARP 32

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(FULL_WARP, value, step);
    }
    return value;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if defined(IEC_EMULATED) || __CUDA_ARCH__ < 800
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(FULL_WARP, value, step);
        value = other > value ? other : value;
    }
    return value;
#else
    return __reduce_max_sync(FULL_WARP, value);
#endif
}

__device__ __forceinline__ uint32_t warp_min(uint32_t value) {
    return ~warp_max(~value);
}

// Returns the bit mask of the lanes whose value equals that of this lane.
__device__ __forceinline__ uint32_t warp_peers(uint32_t value) {
#ifdef IEC_EMULATED
    uint32_t peers = 0;
    for (int lane = 0; lane < WARP; lane++) {
        peers |= uint32_t(__shfl_sync(FULL_WARP, value, lane) == value) << lane;
    }
    return peers;
#else
    return __match_any_sync(FULL_WARP, value);
#endif
}

// Returns the sum over a block of whole warps to all its threads. `room` holds a number per warp; it may be reused
// after a barrier.
__device__ __forceinline__ float block_sum(float value, float* room) {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    if (lane == 0) {
        room[warp] = value;
    }
    __syncthreads();
    return warp_sum(lane < warps ? room[lane] : 0.0f);
}

// Returns the sum of the values of the threads before this one, in a block of whole warps; `total` becomes the sum over
// all threads. `room` is used as in `block_sum`.
__device__ __forceinline__ uint32_t block_sum_before(uint32_t value, uint32_t* room, uint32_t* total) {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < WARP; step *= 2) {
        const uint32_t other = __shfl_up_sync(FULL_WARP, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == WARP - 1) {
        room[warp] = sum;
    }
    __syncthreads();
    uint32_t before = 0, all = 0;
    for (uint32_t i = 0; i < warps; i++) {
        before += i < warp ? room[i] : 0;
        all += room[i];
    }
    *total = all;
    return before + sum - value;
}

// Returns whether this block is the last of `blocks` to call this function; the last one sees what the others wrote
// before. `ticket` is 0 before the first call and again after the last. Each block calls it once, with all threads.
__device__ __forceinline__ bool is_last(uint32_t* ticket, uint32_t blocks) {
    SHARED bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // results before the ticket
        last = atomicAdd(ticket, 1u) == blocks - 1;
        if (last) {
            *ticket = 0;
        }
        __threadfence();  // the ticket before the results of other blocks
    }
    __syncthreads();
    return last;
}

// Maps logits to unsigned numbers above 0 in the same order: NaN is the smallest, both zeros are equal.
__device__ __forceinline__ uint32_t rank_of(float logit) {
    if (logit != logit) {
        return 1;
    }
    const uint32_t bits = logit == 0.0f ? 0 : __float_as_uint(logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The logit that has this rank.
__device__ __forceinline__ float logit_of(uint32_t rank) {
    if (rank <= 1) {
        return __uint_as_float(0x7fffffffu);
    }
    return __uint_as_float(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}
