// Activation of gate and up in the launch that computes them for few rows, 16 rows of the matrix at a time.
#pragma once
#include "gated.cuh"
#include "matmul_job.cuh"
#include "reduce.cuh"

// Marks a function of which all kernels share one copy.
#ifdef IEC_EMULATED
#define SHARED_CODE inline
#else
#define SHARED_CODE __noinline__
#endif

// Computes the activation of tile `tile` of the products, for rows first .. first + count of x.
__device__ SHARED_CODE void activate_tile(Gated a, uint32_t tile, uint32_t first, uint32_t count) {
    const uint32_t columns = a.up ? TILE_ROWS : TILE_ROWS / 2, step = a.up ? 1 : 2;
    const float* ups = a.up ? a.up : a.gate + 1;
    for (uint32_t i = threadIdx.x; i < count * columns; i += blockDim.x) {
        const uint32_t row = first + i / columns, column = tile * columns + i % columns;
        if (column < a.width) {
            const uint64_t at = uint64_t(row) * a.stride + step * column;
            put(a.out, row, column, activated(a, a.gate[at], ups[at]));
        }
    }
    if (tile == (a.width - 1) / columns) {
        for (uint32_t row = first; row < first + count; row++) {
            pad(a.out, row, a.width, threadIdx.x, blockDim.x);
        }
    }
}

// Computes the activation of tile blockIdx.x if one is wanted, unless another thread block still computes the tile's
// gate or up. Called by all threads at the end of a kernel that has computed this tile of product blockIdx.z, for share
// blockIdx.y or for all rows.
__device__ __forceinline__ void finish_few(const Few& a) {
    if (a.then.n == 0 || blockIdx.x * TILE_ROWS >= a.of[0].w.rows) {
        return;
    }
    const Job job = job_of(a.of[0], 0, FEW_COLUMNS);
    if (job.count == 0) {
        return;
    }
    if (a.then.up == nullptr) {
        __syncthreads();
    } else if (!is_last(a.tickets + blockIdx.x, 2)) {
        return;
    }
    activate_tile(a.then, blockIdx.x, job.first, job.count);
}
