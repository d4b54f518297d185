// Norms of rows, including the addition of a branch to their input.
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

// Adds the squares of the distances from `mean` to `sum`.
template <int W>
__device__ __forceinline__ float squares(const Lanes<W>& lanes, float mean, float sum) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        const float distance = lanes.v[i] - mean;
        sum = fmaf(distance, distance, sum);
    }
    return sum;
}

// Adds what the first sum over a row consists of: the numbers themselves for their mean, otherwise their squares.
template <int W>
__device__ __forceinline__ float measured(uint32_t kind, const Lanes<W>& lanes, float sum) {
    if (kind != NORM_LAYER) {
        return squares(lanes, 0.0f, sum);
    }
#pragma unroll
    for (int i = 0; i < W; i++) {
        sum += lanes.v[i];
    }
    return sum;
}

// Prefetches memory that is read after the next barrier.
__device__ __forceinline__ void prefetch(const void* from) {
#ifndef IEC_EMULATED
    asm volatile("prefetch.L1 [%0];" ::"l"(from));
#endif
}

// Returns W columns, from `column` on, of a row of the branch, or of the weighted sum of the results of the chosen
// experts.
template <int W, int AHEAD>
__device__ __forceinline__ Lanes<W> first_lanes(const Norm& a, uint32_t row, uint32_t column) {
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

// Returns W columns, from `column` on, of the sum of both branches in a row.
template <int W, int AHEAD>
__device__ __forceinline__ Lanes<W> branch_lanes(const Norm& a, uint32_t row, uint32_t column) {
    Lanes<W> sum = first_lanes<W, AHEAD>(a, row, column);
    if (a.beside) {
        const Lanes<W> beside = load_lanes<W>(a.beside + uint64_t(row) * a.width + column);
#pragma unroll
        for (int i = 0; i < W; i++) {
            sum.v[i] += beside.v[i];
        }
    }
    return sum;
}

// Returns 1 / sqrt(mean(branch^2) + post_eps) for a row if the branch is normalized, otherwise 1.
template <int W>
__device__ __forceinline__ float post_scale(const Norm& a, uint32_t row, float* room) {
    if (!a.branch || !a.post) {
        return 1.0f;
    }
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t column = W * threadIdx.x; column < a.width; column += W * blockDim.x) {
        prefetch(a.post + column);
        sum = squares(branch_lanes<W, 1>(a, row, column), 0.0f, sum);
    }
    return 1.0f / sqrtf(block_sum(sum, room) / float(a.width) + a.post_eps);
}

// Returns W columns, from `column` on, of the input of the norm: the sum of `x` and the branch, scaled.
template <int W, int AHEAD>
__device__ __forceinline__ Lanes<W> norm_input(const Norm& a, uint32_t row, uint32_t column, float scale) {
    Lanes<W> x = load_lanes<W>(a.x + uint64_t(row) * a.x_stride + column);
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
        x.v[i] = fmaf(y.v[i], a.branch_scale, x.v[i]) * a.x_scale;
    }
    return x;
}

// Writes the sum back to `x`, if there is a branch.
template <int W>
__device__ __forceinline__ void keep_input(const Norm& a, uint32_t row, uint32_t column, const Lanes<W>& x) {
    if (a.branch) {
        store_lanes<W>(a.x + uint64_t(row) * a.x_stride + column, x);
    }
}

// Returns W factors of the norm, from `column` on.
template <int W>
__device__ __forceinline__ Lanes<W> weight_lanes(const Norm& a, uint32_t column) {
    if (a.weight) {
        return load_lanes<W>(a.weight + column);
    }
    Lanes<W> ones;
#pragma unroll
    for (int i = 0; i < W; i++) {
        ones.v[i] = 1.0f;
    }
    return ones;
}

template <int W>
__device__ __forceinline__ void norm_output(
    const Norm& a, uint32_t column, Lanes<W> x, const Lanes<W>& weight, float mean, float scale) {
#pragma unroll
    for (int i = 0; i < W; i++) {
        x.v[i] = (x.v[i] - mean) * scale * weight.v[i];
    }
    put_lanes<W>(a.out, blockIdx.x, column, x);
}

// Sums of a block, each with a number per warp.
struct NormRoom {
    float post[WARP];
    float mean[WARP];
    float squares[WARP];
};

template <int W, int HELD, int AHEAD>
__device__ __forceinline__ void norm_row(const Norm& a, NormRoom& room) {
    const bool wanted = a.out.f32 || a.out.hi;
    const uint32_t row = a.rows ? a.rows[blockIdx.x] : blockIdx.x;
    const uint32_t first = W * threadIdx.x, step = W * blockDim.x;
    // Weights are not in the caches, so they are loaded first.
    Lanes<W> x[HELD], weight[HELD];
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (wanted && first + i * step < a.width) {
            weight[i] = weight_lanes<W>(a, first + i * step);
        }
    }
    const float post = post_scale<W>(a, row, room.post);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (first + i * step < a.width) {
            x[i] = norm_input<W, AHEAD>(a, row, first + i * step, post);
            sum = measured(a.kind, x[i], sum);
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
        sum = measured(a.kind, input, sum);
    }
    if (!wanted) {
        return;
    }
    // From here on, each thread reads from `x` what it wrote itself.
    float* own = a.x + uint64_t(row) * a.x_stride;
    float mean = 0.0f;
    if (a.kind == NORM_LAYER) {
        mean = block_sum(sum, room.mean) / float(a.width);
        sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < HELD; i++) {
            if (first + i * step < a.width) {
                sum = squares(x[i], mean, sum);
            }
        }
#pragma unroll 1
        for (uint32_t column = first + HELD * step; column < a.width; column += step) {
            sum = squares(load_lanes<W>(own + column), mean, sum);
        }
    }
    float scale = 1.0f;
    if (a.kind != NORM_NONE) {
        scale = 1.0f / sqrtf(block_sum(sum, room.squares) / float(a.width) + a.eps);
    }
#pragma unroll
    for (uint32_t i = 0; i < HELD; i++) {
        if (first + i * step < a.width) {
            norm_output<W>(a, first + i * step, x[i], weight[i], mean, scale);
        }
    }
#pragma unroll 1
    for (uint32_t column = first + HELD * step; column < a.width; column += step) {
        norm_output<W>(a, column, load_lanes<W>(own + column), weight_lanes<W>(a, column), mean, scale);
    }
    pad(a.out, blockIdx.x, a.width, threadIdx.x, blockDim.x);
}

__device__ __forceinline__ bool on_16_bytes(const void* p) {
    return (reinterpret_cast<uint64_t>(p) & 15) == 0;
}

// x = (x + branch_scale * branch) * x_scale, where the branch is first normalized with `post`, if given; out = x
// normalized, times weight: x / sqrt(mean(x^2) + eps) for NORM_RMS, (x - mean(x)) / sqrt(variance(x) + eps) for
// NORM_LAYER, and x itself for NORM_NONE. With `slots`, `branch` holds the results of experts, and that of row i is the
// sum over k < top_k of weights[i][k] * branch[slots[i][k]], in that order. `beside` is added to the branch.
//
// Grid: n. Block: width / 8 rounded up to a multiple of 32, at least 32 and at most 1024 (any multiple of 32 up to 1024
// is correct). Dynamic shared memory: none. Any width. With `rows`, output row i is computed from row rows[i] of `x`,
// `branch` and `slots`. Without a branch, these rows may be in any order and may repeat. With a branch they must
// differ, because it is added in place, and it is added to these rows only. Without both, `out.f32` may be `x`. Rows
// are read four columns at a time if width and x_stride are multiples of four and all arrays are aligned to 16 bytes.
KERNEL __launch_bounds__(1024, 1) norm(Norm a) {
    SHARED NormRoom room;
    const bool fours = a.width % 4 == 0 && a.x_stride % 4 == 0 && on_16_bytes(a.x) && on_16_bytes(a.branch)
        && on_16_bytes(a.beside) && on_16_bytes(a.post) && on_16_bytes(a.weight) && takes_fours(a.out);
    if (fours) {
        norm_row<4, NORM_HELD, NORM_AHEAD>(a, room);
    } else {
        norm_row<1, 1, 1>(a, room);
    }
}
