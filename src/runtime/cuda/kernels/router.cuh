// The router for few rows of x: its product, the choice of experts and sorting by expert in one launch.
//
// A router matrix has few rows, one per expert, of many columns. One thread block per expert reads them faster than
// thread blocks for 16 rows each would; the last thread block to finish its logits chooses the experts of all rows of
// x.
#pragma once
#include "moe.cuh"
#include "plain_weights.cuh"

// Adds the products of this thread's columns of a row of weights with the rows of x; `weights_at(column)` returns W
// weights.
template <int W, class WeightsAt>
__device__ __forceinline__ void add_columns(const Matmul& a, float (&sums)[ROUTER_ROWS], WeightsAt weights_at) {
#pragma unroll 1
    for (uint32_t column = W * threadIdx.x; column < a.w.cols; column += W * blockDim.x) {
        const Lanes<W> w = weights_at(column);
#pragma unroll
        for (uint32_t i = 0; i < ROUTER_ROWS; i++) {
            if (i < a.n) {
                const Lanes<W> x = load_lanes<W>(a.x + uint64_t(i) * a.x_stride + column);
#pragma unroll
                for (int k = 0; k < W; k++) {
                    sums[i] = fmaf(w.v[k], x.v[k], sums[i]);
                }
            }
        }
    }
}

// Computes the logits of expert blockIdx.x for all rows of x and writes them to y.
__device__ __forceinline__ void router_logits(const Matmul& a, float (*room)[WARP]) {
    const uint32_t kind = a.w.kind, size = kind == KIND_F32 ? 4 : 2;
    const uint8_t* row = a.w.data + uint64_t(blockIdx.x) * a.w.cols * size;
    // Prefetches the whole row, in sectors of 32 bytes, so that its columns do not wait for each other.
    for (uint32_t at = 32 * threadIdx.x; at < a.w.cols * size; at += 32 * blockDim.x) {
        prefetch(row + at);
    }
    float sums[ROUTER_ROWS] = {};
    const bool fours = a.w.cols % 4 == 0 && a.x_stride % 4 == 0 && on_16_bytes(a.x) && on_16_bytes(a.w.data);
    if (!fours) {
        add_columns<1>(a, sums, [&](uint32_t column) { return one_weight(kind, row, column); });
    } else if (kind == KIND_F32) {
        add_columns<4>(a, sums, [&](uint32_t column) { return four_weights<KIND_F32>(row, column); });
    } else if (kind == KIND_F16) {
        add_columns<4>(a, sums, [&](uint32_t column) { return four_weights<KIND_F16>(row, column); });
    } else {
        add_columns<4>(a, sums, [&](uint32_t column) { return four_weights<KIND_BF16>(row, column); });
    }
#pragma unroll
    for (uint32_t i = 0; i < ROUTER_ROWS; i++) {
        if (i < a.n) {
            const float sum = warp_sum(sums[i]);
            if (threadIdx.x % WARP == 0) {
                room[i][threadIdx.x / WARP] = sum;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < a.n) {
        float sum = 0.0f;
        for (uint32_t warp = 0; warp < blockDim.x / WARP; warp++) {
            sum += room[threadIdx.x][warp];
        }
        a.y[uint64_t(threadIdx.x) * a.y_stride + blockIdx.x] = sum + (a.bias ? a.bias[blockIdx.x] : 0.0f);
    }
}

// Computes logits[i][e] = sum over c of x[i][c] * w[e][c] + bias[e], for i < n, and then what `route` and `group`
// compute. The weights are floats of any kind.
//
// Grid: experts (product.w.rows). Block: 256. Dynamic shared memory: none. n is 1 to ROUTER_ROWS; any number of
// columns, any x_stride; y_stride is the number of experts. product.y is then.route.logits; limits of `route` and
// `group`. Launches with the same `ticket` must not overlap.
KERNEL __launch_bounds__(256) router(Router a) {
    SHARED float room[ROUTER_ROWS][WARP];
    SHARED uint32_t cells[GROUP_CELLS];
    router_logits(a.product, room);
    if (is_last(a.ticket, gridDim.x)) {
        route_and_group(a.then, cells, reinterpret_cast<uint32_t*>(room[0]));
    }
}
