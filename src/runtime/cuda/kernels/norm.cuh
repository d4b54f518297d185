// RMSNorm, including the addition of a branch to its input.
#pragma once
#include "acts.cuh"
#include "reduce.cuh"

// Number of vectors of a row that a thread keeps in registers between the sum of squares and the result; the rest of a
// wide row is read again.
#define NORM_HELD 2
// Number of expert results that a thread loads at once.
#define NORM_AHEAD 4

// W adjacent floats: one load where W is 4.
template <int W>
struct Lanes {
    float v[W];
};

template <int W>
__device__ __forceinline__ Lanes<W> load_lanes(const float* from) {
    Lanes<W> lanes;
    if constexpr (W == 4) {
        const float4 all = *reinterpret_cast<const float4*>(from);
        lanes.v[0] = all.x, lanes.v[1] = all.y, lanes.v[2] = all.z, lanes.v[3] = all.w;
    } else {
        lanes.v[0] = *from;
    }
    return lanes;
}

template <int W>
__device__ __forceinline__ void store_lanes(float* to, const Lanes<W>& lanes) {
    if constexpr (W == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(lanes.v[0], lanes.v[1], lanes.v[2], lanes.v[3]);
    } else {
        *to = lanes.v[0];
    }
}

template <int W>
__device__ __forceinline__ void put_lanes(const Acts& out, uint32_t row, uint32_t column, const Lanes<W>& lanes) {
    if constexpr (W == 4) {
        put4(out, row, column, make_float4(lanes.v[0], lanes.v[1], lanes.v[2], lanes.v[3]));
    } else {
        put(out, row, column, lanes.v[0]);
    }
}

template <int W>
__device__ __forceinline__ float squares(const Lanes<W>& lanes, float sum) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        sum = fmaf(lanes.v[i], lanes.v[i], sum);
    }
    return sum;
}

// Prefetches memory that is read after the next barrier.
__device__ __forceinline__ void prefetch(const void* from) {
#ifndef IEC_EMULATED
    asm volatile("prefetch.L1 [%0];" ::"l"(from));
#endif
}

// Returns W columns, from `column` on, of what is added to a row of `x`: a row of the branch, or the weighted sum of
// the results of the chosen experts.
template <int W, int AHEAD>
__device__ __forceinline__ Lanes<W> branch_lanes(const Norm& a, uint32_t row, uint32_t column) {
    if (!a.slots) {
        return load_lanes<W>(a.branch + uint64_t(row) * a.width + column);
    }
    Lanes<W> sum = {};
#pragma unroll(AHEAD)
    for (uint32_t k = 0; k < a.top_k; k++) {
        const uint32_t choice = row * a.top_k + k;
        const Lanes<W> y = load_lanes<W>(a.branch + uint64_t(a.slots[choice]) * a.width + column);
        const float weight = a.weights[choice];
#pragma unroll
        for (int i = 0; i < W; i++) {
            sum.v[i] = fmaf(y.v[i], weight, sum.v[i]);
        }
    }
    return sum;
}

// Returns 1 / sqrt(mean(branch^2) + eps) for a row if the branch is normalized, otherwise 1.
template <int W>
__device__ __forceinline__ float post_scale(const Norm& a, uint32_t row, float* room) {
    if (!a.branch || !a.post) {
        return 1.0f;
    }
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t column = W * threadIdx.x; column < a.width; column += W * blockDim.x) {
        prefetch(a.post + column);
        sum = squares(branch_lanes<W, 1>(a, row, column), sum);
    }
    return 1.0f / sqrtf(block_sum(sum, room) / float(a.width) + a.eps);
}

// Returns W columns, from `column` on, of the input of the norm: the sum of `x` and the branch.
template <int W, int AHEAD>
__device__ __forceinline__ Lanes<W> norm_input(const Norm& a, uint32_t row, uint32_t column, float scale) {
    Lanes<W> x = load_lanes<W>(a.x + uint64_t(row) * a.width + column);
    if (!a.branch) {
        return x;
    }
    Lanes<W> y = branch_lanes<W, AHEAD>(a, row, column);
    if (a.post) {
        const Lanes<W> post = load_lanes<W>(a.post + column);
#pragma unroll
        for (int i = 0; i < W; i++) {
            y.v[i] = y.v[i] * scale * post.v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < W; i++) {
        x.v[i] += y.v[i];
    }
    return x;
}

// Writes the sum back to `x`, if there is a branch.
template <int W>
__device__ __forceinline__ void keep_input(const Norm& a, uint32_t row, uint32_t column, const Lanes<W>& x) {
    if (a.branch) {
        store_lanes<W>(a.x + uint64_t(row) * a.width + column, x);
    }
}

template <int W>
__device__ __forceinline__ void norm_output(
    const Norm& a, uint32_t column, Lanes<W> x, const Lanes<W>& weight, float scale) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        x.v[i] = x.v[i] * scale * weight.v[i];
    }
    put_lanes<W>(a.out, blockIdx.x, column, x);
}

template <int W, int HELD, int AHEAD>
__device__ __forceinline__ void norm_row(const Norm& a, float* post_room, float* room) {
    const uint32_t row = a.rows ? a.rows[blockIdx.x] : blockIdx.x;
    const uint32_t first = W * threadIdx.x, step = W * blockDim.x;
    // Weights are not in the caches, so they are loaded first.
    Lanes<W> x[HELD], weight[HELD];
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (a.weight && first + i * step < a.width) {
            weight[i] = load_lanes<W>(a.weight + first + i * step);
        }
    }
    const float post = post_scale<W>(a, row, post_room);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (first + i * step < a.width) {
            x[i] = norm_input<W, AHEAD>(a, row, first + i * step, post);
            sum = squares(x[i], sum);
        }
    }
    // The sums are stored only now, because the compiler moves no load before a store.
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (first + i * step < a.width) {
            keep_input<W>(a, row, first + i * step, x[i]);
        }
    }
#pragma unroll 1
    for (uint32_t column = first + HELD * step; column < a.width; column += step) {
        const Lanes<W> input = norm_input<W, 1>(a, row, column, post);
        keep_input<W>(a, row, column, input);
        sum = squares(input, sum);
    }
    if (!a.weight) {
        return;
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, room) / float(a.width) + a.eps);
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (first + i * step < a.width) {
            norm_output<W>(a, first + i * step, x[i], weight[i], scale);
        }
    }
#pragma unroll 1
    for (uint32_t column = first + HELD * step; column < a.width; column += step) {
        // Each thread reads what it wrote itself.
        const Lanes<W> again = load_lanes<W>(a.x + uint64_t(row) * a.width + column);
        norm_output<W>(a, column, again, load_lanes<W>(a.weight + column), scale);
    }
    pad(a.out, blockIdx.x, a.width, threadIdx.x, blockDim.x);
}

__device__ __forceinline__ bool on_16_bytes(const void* p) {
    return (reinterpret_cast<uint64_t>(p) & 15) == 0;
}

// x += branch (normalized with `post`, if given); out = x / sqrt(mean(x^2) + eps) * weight. With `slots`, `branch`
// holds the results of experts, and row i of `x` grows by the sum over k < top_k of weights[i][k] *
// branch[slots[i][k]], in that order.
//
// Grid: n. Block: width / 8 rounded up to a multiple of 32, at least 32 and at most 1024 (any multiple of 32 up to 1024
// is correct). Dynamic shared memory: none. Any width. With `rows`, output row i is computed from row rows[i] of `x`,
// `branch` and `slots`. Without a branch, these rows may be in any order and may repeat. With a branch they must
// differ, because it is added in place, and it is added to these rows only. Rows are read four columns at a time if
// width is a multiple of four and all arrays are aligned to 16 bytes.
KERNEL __launch_bounds__(1024, 1) norm(Norm a) {
    SHARED float post_room[WARP], room[WARP];
    const bool fours = a.width % 4 == 0 && on_16_bytes(a.x) && on_16_bytes(a.branch) && on_16_bytes(a.post)
        && on_16_bytes(a.weight) && takes_fours(a.out);
    if (fours) {
        norm_row<4, NORM_HELD, NORM_AHEAD>(a, post_room, room);
    } else {
        norm_row<1, 1, 1>(a, post_room, room);
    }
}
