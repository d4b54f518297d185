// Matrix products of few rows of x (at most 8) on tensor cores, which read the weights at the bandwidth of memory.
//
// A thread block computes 16 rows of the matrix; its warps take blocks of 32 columns in turn, and their sums are added
// in the order of warps. A lane loads codes into registers several blocks ahead of the block that it computes: the
// bytes in flight must be at least the bandwidth of memory times its latency, about 40 KB per multiprocessor of an
// H200. Activations are small and read by every thread block, so they come from the caches.
#pragma once
#include "matmul_fragments.cuh"
#include "matmul_job.cuh"

#ifdef TENSOR_CORES

// Number of 32-column blocks that a warp loads ahead: 1 KB of 4-bit codes, 2 KB of others. The scales and minimums of
// kinds from KIND_CODED on need registers, too.
template <uint32_t KIND>
constexpr int few_ahead() {
    return is_plain(KIND) || is_coded(KIND) ? 2 : 4;
}

template <uint32_t KIND, int PASSES>
__device__ __forceinline__ void matmul_few(const Matmul& a) {
    static_assert(KIND != KIND_TILES, "a kernel for each kind");
    SHARED __align__(16) float partial[FEW_FLOATS];
    constexpr int AHEAD = few_ahead<KIND>();
    const uint32_t tile = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = a.w.blocks;
    const Job job = job_of(a, 0, FEW_COLUMNS);
    if (job.count == 0 || tile * TILE_ROWS >= a.w.rows) {
        return;
    }
    const Lane lane = lane_of(threadIdx.x);
    const Rows<KIND> rows = rows_of<KIND>(a.w, job.data, tile, lane);
    // Beyond the last block, the last one is computed again and not added, so that there is no branch between two
    // loads.
    const uint32_t last = blocks - 1;
    Raw<KIND> raw[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        raw[i] = load_block(rows, min(warp + i * warps, last));
    }
    // Beyond the last column, the first one is computed again and not written.
    const uint32_t row = input_of(a, job.first + (lane.g < job.count ? lane.g : 0));
    const uint64_t start = (uint64_t(row) * a.half_stride + lane.t * 8) * 2;
    const uint8_t* const hi = opaque(reinterpret_cast<const uint8_t*>(a.hi) + start);
    const uint8_t* const lo = PASSES == 2 ? opaque(reinterpret_cast<const uint8_t*>(a.lo) + start) : hi;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t from = warp; from < blocks; from += AHEAD * warps) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t block = from + i * warps;
            const uint64_t at = uint64_t(min(block, last)) * (BLOCK * 2);
            const uint4 x = __ldg(reinterpret_cast<const uint4*>(hi + at));
            const uint4 rest = PASSES == 2 ? __ldg(reinterpret_cast<const uint4*>(lo + at)) : x;
            Fragments<KIND> f;
            if constexpr (is_coded(KIND)) {
                fragments_of(rows, raw[i], f);
                const Factors factors = factors_of(rows, raw[i]);
                raw[i] = load_block(rows, min(block + AHEAD * warps, last));
                Halves products;
                multiply_halves<KIND, PASSES>(products, f, Columns<PASSES>(x, rest), rows.has_minimums());
                if (block < blocks) {
                    add_halves(sums, products.codes, products.ones, factors, rows.has_minimums());
                }
            } else {
                fragments_of(raw[i], f);
                const float2 scales = scales_of(rows.wide, raw[i]);
                raw[i] = load_block(rows, min(block + AHEAD * warps, last));
                float products[4];
                multiply_block<KIND, PASSES>(products, f, Columns<PASSES>(x, rest));
                if (block < blocks) {
                    add_scaled(sums, products, scales);
                }
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
