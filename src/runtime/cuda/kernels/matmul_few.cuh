// Matrix products of few rows of x (at most 8) on tensor cores: made to read the weights as fast as memory gives them.
//
// A block computes 16 rows of the matrix; its warps take blocks of 32 columns in turn, and add up what they have in the order of
// warps. A lane keeps the next codes on their way to its registers while it works on the last, several blocks ahead: what is on its
// way at any time must be the bandwidth of memory times its latency, some 40 KB for each multiprocessor of an H200. Activations are
// small and read by every block: they come from the caches.
#pragma once
#include "matmul_fragments.cuh"
#include "matmul_job.cuh"

#ifdef TENSOR_CORES

// Blocks on their way to the registers of a warp: 1 KB of 4-bit codes, 2 KB of others.
template <uint32_t KIND>
constexpr int few_ahead() {
    return is_plain(KIND) ? 2 : 4;
}

template <uint32_t KIND, int PASSES>
__device__ __forceinline__ void matmul_few(const Matmul& a) {
    SHARED __align__(16) float partial[FEW_FLOATS];
    constexpr int AHEAD = few_ahead<KIND>();
    const uint32_t tile = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = a.w.blocks;
    const Job job = job_of(a, 0, FEW_COLUMNS);
    if (job.count == 0 || tile * TILE_ROWS >= a.w.rows) {
        return;
    }
    const Lane lane = lane_of(threadIdx.x);
    const Rows<KIND> rows = rows_of<KIND>(a.w, job.data, tile, lane);
    Raw<KIND> raw[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (warp + i * warps < blocks) {
            raw[i] = load_block(rows, warp + i * warps);
        }
    }
    const bool live = lane.g < job.count;
    const uint64_t start = uint64_t(live ? input_of(a, job.first + lane.g) : 0) * a.half_stride + lane.t * 8;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t from = warp; from < blocks; from += AHEAD * warps) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t block = from + i * warps, next = block + AHEAD * warps;
            if (block < blocks) {
                const uint64_t at = start + block * BLOCK;
                const uint4 hi = live ? __ldg(reinterpret_cast<const uint4*>(a.hi + at)) : zeros;
                const uint4 lo = PASSES == 2 && live ? __ldg(reinterpret_cast<const uint4*>(a.lo + at)) : zeros;
                const Fragments<KIND> f = fragments_of(raw[i]);
                const float2 scales = scales_of(rows, raw[i]);
                if (next < blocks) {
                    raw[i] = load_block(rows, next);
                }
                add_block<KIND, PASSES>(sums, f, scales, hi, lo);
            }
        }
    }
    float* mine = partial + warp * FEW_COLUMNS * FEW_STRIDE + 2 * lane.g;
    *reinterpret_cast<float2*>(mine + 2 * lane.t * FEW_STRIDE) = make_float2(sums[0], sums[2]);
    *reinterpret_cast<float2*>(mine + (2 * lane.t + 1) * FEW_STRIDE) = make_float2(sums[1], sums[3]);
    __syncthreads();
    write_few(a, job, tile, partial);
}

#endif
