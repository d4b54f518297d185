// Which matrix of a stack and which rows of the batch a block computes.
#pragma once
#include "matmul_weights.cuh"

struct Job {
    const uint8_t* data;
    const float* bias;
    uint32_t first;  // first row of y
    uint32_t count;  // number of rows of y
};

// Returns the job for at most `columns` rows, beginning with row `from` of the batch or of the share with index
// blockIdx.y; its count is 0 if there is no work.
__device__ __forceinline__ Job job_of(const Matmul& a, uint32_t from, uint32_t columns) {
    if (a.shares == nullptr) {
        const uint32_t left = from < a.n ? a.n - from : 0;
        return {a.w.data, a.bias, from, left < columns ? left : columns};
    }
    if (blockIdx.y >= *a.count) {
        return {nullptr, nullptr, 0, 0};
    }
    const Share share = a.shares[blockIdx.y];
    const float* bias = a.bias ? a.bias + uint64_t(share.expert) * a.w.rows : nullptr;
    const uint32_t left = from < share.count ? share.count - from : 0;
    return {a.w.data + share.expert * a.w.stride, bias, share.first + from, left < columns ? left : columns};
}

// Returns the row of x from which a row of y is computed.
__device__ __forceinline__ uint32_t input_of(const Matmul& a, uint32_t row) {
    return a.inputs ? a.inputs[row] : row;
}

// Kernels for few rows of x: a thread block computes 16 rows of the matrix. Each of its warps, at most 16, computes
// some of the 32-column blocks of these rows, and the partial sums of all warps are then added.
#define FEW_WARPS 16
#define FEW_COLUMNS 8
// Floats per column of the partial sums. Two columns are 8 more than a multiple of 32 banks, so half a warp writes
// without conflicts.
#define FEW_STRIDE 20
#define FEW_FLOATS (FEW_WARPS * FEW_COLUMNS * FEW_STRIDE)

// Adds up the partial sums of the warps, in the order of warps, adds the bias, and writes the result to y.
__device__ __forceinline__ void write_few(const Matmul& a, const Job& job, uint32_t tile, const float* partial) {
    const uint32_t column = threadIdx.x / TILE_ROWS, within = threadIdx.x % TILE_ROWS;
    const uint32_t row = tile * TILE_ROWS + within;
    if (column >= job.count || row >= a.w.rows) {
        return;
    }
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t warp = 0; warp < blockDim.x / 32; warp++) {
        sum += partial[(warp * FEW_COLUMNS + column) * FEW_STRIDE + within];
    }
    a.y[uint64_t(job.first + column) * a.y_stride + row] = sum + (job.bias ? job.bias[row] : 0.0f);
}
