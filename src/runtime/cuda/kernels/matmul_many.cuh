// Matrix products of many rows of x on tensor cores.
//
// A thread block of 8 warps computes a rectangle of y. Asynchronous copies bring its activations to shared memory, to
// three buffers (stages) in turn; weights are loaded from global memory to registers, where their codes become operand
// A. Warps that compute the same rows of the matrix take blocks of 32 columns in turn, and their sums are added at the
// end, in the order of warps.
//
// Activations lie in shared memory block by block, 64 bytes for each row of x: the 8 lanes that read at once cover all
// banks.
#pragma once
#include "matmul_fragments.cuh"
#include "matmul_job.cuh"

#ifdef TENSOR_CORES

#define MANY_THREADS 256
#define STAGES 3

// The rectangle that a thread block computes. COLUMNS are rows of x: they are the columns of operand B.
template <int COLUMNS_, int ROW_WARPS_, int TILES_, int SKIP_>
struct Shape {
    static constexpr int COLUMNS = COLUMNS_;            // rows of x
    static constexpr int ROW_WARPS = ROW_WARPS_;        // warps side by side along the rows of the matrix
    static constexpr int TILES = TILES_;                // tiles of 16 rows that each warp computes
    static constexpr int SKIP = SKIP_;                  // groups of 8 columns that are skipped together where x has no more rows
    static constexpr int K_WARPS = 8 / ROW_WARPS;       // warps that compute the same rows, each for some of the 32-column blocks
    static constexpr int EIGHTS = COLUMNS / 8;
    static constexpr int BLOCK_TILES = ROW_WARPS * TILES;
    static constexpr int PART = COLUMNS * BLOCK;        // activations of one block of 32
    static constexpr int PASS = PART * K_WARPS;         // activations of a step, hi or lo
    // Shared memory for the sums of one tile of each warp, 64 columns; the stride avoids bank conflicts (see
    // FEW_STRIDE).
    static constexpr int ROOM_ROWS = ROW_WARPS * TILE_ROWS;
    static constexpr int ROOM_COLUMNS = 64;
    static constexpr int ROOM_STRIDE = ROOM_ROWS + 4;
    static constexpr int ROOM_BYTES = K_WARPS * ROOM_COLUMNS * ROOM_STRIDE * 4;
};
typedef Shape<64, 2, 1, 4> Shape64;
typedef Shape<64, 4, 1, 2> ShapeSome;
typedef Shape<128, 4, 2, 8> Shape128;

// Keeps a shared address in a register; otherwise the compiler computes it again at each use.
__device__ __forceinline__ SharedAddress keep(SharedAddress address) {
#ifndef IEC_EMULATED
    asm("" : "+r"(address));
#endif
    return address;
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared(SharedAddress from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint4*>(from);
#else
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
#endif
}

// Copies the activations of a step, which are K_WARPS blocks of 32 columns, to shared memory. Of each block, each of
// the THREADS threads copies 16 bytes of every (THREADS / 4)th row of x.
template <class SHAPE, int PASSES, int THREADS>
struct Copier {
    static constexpr int COLUMN_STEP = THREADS / 4;
    static constexpr int COLUMNS = SHAPE::COLUMNS / COLUMN_STEP;
    SharedAddress to;              // destination in stage 0
    const uint8_t* from[COLUMNS];  // source of the next step
    uint32_t blocks[COLUMNS];      // blocks of that row; 0 for rows that x does not have, whose results are never written
    uint64_t to_lo;                // bytes from `hi` to `lo`
    uint32_t block;                // first block of the next step

    __device__ __forceinline__ Copier(const Matmul& a, const Job& job, SharedAddress stages, uint32_t thread) : block(0) {
        to = keep(stages + thread * 16);
        to_lo = reinterpret_cast<uint64_t>(a.lo) - reinterpret_cast<uint64_t>(a.hi);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const uint32_t column = thread / 4 + i * COLUMN_STEP;
            const bool live = column < job.count;
            const uint32_t row = live ? input_of(a, job.first + column) : 0;
            blocks[i] = live ? a.w.blocks : 0;
            from[i] = opaque(reinterpret_cast<const uint8_t*>(a.hi) + (uint64_t(row) * a.half_stride + thread % 4 * 8) * 2);
        }
    }

    // Starts to copy the activations of the next step to stage `stage`.
    __device__ __forceinline__ void copy(uint32_t stage) {
        const SharedAddress stage_to = to + stage * (PASSES * SHAPE::PASS * 2);
#pragma unroll
        for (int part = 0; part < SHAPE::K_WARPS; part++) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                if (block + part < blocks[i]) {
                    const SharedAddress part_to = stage_to + (part * SHAPE::PART + i * COLUMN_STEP * BLOCK) * 2;
                    cp_async_16(part_to, from[i] + part * BLOCK * 2);
                    if (PASSES == 2) {
                        cp_async_16(part_to + SHAPE::PASS * 2, from[i] + part * BLOCK * 2 + to_lo);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            from[i] += SHAPE::K_WARPS * BLOCK * 2;
        }
        block += SHAPE::K_WARPS;
        cp_async_commit();
    }
};

// Writes to y the sums in shared memory: those of tile `tile` of every warp for ROOM_COLUMNS rows of x, beginning with
// row 8 * `eight`. The sums of warps that compute the same rows are added in the order of warps, and adjacent rows are
// written together.
template <class SHAPE>
__device__ __forceinline__ void write_sums(const Matmul& a, const Job& job, uint32_t first_tile, int tile, int eight, const float* room) {
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < SHAPE::ROOM_ROWS * SHAPE::ROOM_COLUMNS; i += blockDim.x) {
        const uint32_t within = i % SHAPE::ROOM_ROWS, room_column = i / SHAPE::ROOM_ROWS, column = eight * 8 + room_column;
        const uint32_t row = (first_tile + within / TILE_ROWS * SHAPE::TILES + tile) * TILE_ROWS + within % TILE_ROWS;
        if (row < a.w.rows && column < job.count) {
            float sum = 0.0f;
#pragma unroll
            for (int k_warp = 0; k_warp < SHAPE::K_WARPS; k_warp++) {
                sum += room[(k_warp * SHAPE::ROOM_COLUMNS + room_column) * SHAPE::ROOM_STRIDE + within];
            }
            a.y[uint64_t(job.first + column) * a.y_stride + row] = sum + (job.bias ? job.bias[row] : 0.0f);
        }
    }
    __syncthreads();
}

// Writes all sums, which the first 8 warps hold.
template <class SHAPE>
__device__ __forceinline__ void write_many(const Matmul& a, const Job& job, uint32_t first_tile, uint32_t warp, Lane lane,
                                           const float (&sums)[SHAPE::TILES][SHAPE::EIGHTS][4], float* room) {
    const uint32_t row = warp % SHAPE::ROW_WARPS * TILE_ROWS + 2 * lane.g;
    const uint32_t column = warp / SHAPE::ROW_WARPS * SHAPE::ROOM_COLUMNS + 2 * lane.t;
    float* mine = room + column * SHAPE::ROOM_STRIDE + row;
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < SHAPE::TILES; tile++) {
#pragma unroll
        for (int eight = 0; eight < SHAPE::EIGHTS; eight += SHAPE::ROOM_COLUMNS / 8) {
            if (warp < 8) {
#pragma unroll
                for (int i = 0; i < SHAPE::ROOM_COLUMNS / 8; i++) {
                    const float(&four)[4] = sums[tile][eight + i];
                    float* to = mine + i * 8 * SHAPE::ROOM_STRIDE;
                    *reinterpret_cast<float2*>(to) = make_float2(four[0], four[2]);
                    *reinterpret_cast<float2*>(to + SHAPE::ROOM_STRIDE) = make_float2(four[1], four[3]);
                }
            }
            write_sums<SHAPE>(a, job, first_tile, tile, eight, room);
        }
    }
}

// Adds the products of a block of 32 columns with the activations in shared memory. Two groups of 8 rows of x are
// computed together, so that a product need not wait for the one whose sums it continues.
template <uint32_t KIND, int PASSES, class SHAPE>
__device__ __forceinline__ void multiply_step(float (&sums)[SHAPE::TILES][SHAPE::EIGHTS][4],
                                              const Fragments<KIND> (&f)[SHAPE::TILES], const float2 (&scales)[SHAPE::TILES],
                                              SharedAddress acts, uint32_t count) {
    typedef Products<KIND, PASSES> P;
    constexpr int TOGETHER = 2;
#pragma unroll
    for (int eight = 0; eight < SHAPE::EIGHTS; eight += TOGETHER) {
        if (eight % SHAPE::SKIP == 0 && eight * 8 >= count) {
            return;
        }
        Columns<PASSES> x[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const SharedAddress at = acts + (eight + i) * 8 * BLOCK * 2;
            const uint4 hi = load_shared(at);
            x[i] = Columns<PASSES>(hi, PASSES == 2 ? load_shared(at + SHAPE::PASS * 2) : hi);
        }
        float blocks[TOGETHER][SHAPE::TILES][4];
#pragma unroll
        for (int product = 0; product < P::COUNT; product++) {
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
#pragma unroll
                for (int tile = 0; tile < SHAPE::TILES; tile++) {
                    if constexpr (is_plain(KIND)) {
                        P::template add<false>(sums[tile][eight + i], f[tile], x[i], product);
                    } else {
                        P::template add<true>(blocks[i][tile], f[tile], x[i], product);
                    }
                }
            }
        }
        if constexpr (!is_plain(KIND)) {
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
#pragma unroll
                for (int tile = 0; tile < SHAPE::TILES; tile++) {
                    add_scaled(sums[tile][eight + i], blocks[i][tile], scales[tile]);
                }
            }
        }
    }
}

// The same for KIND_CODED. The sums of x that minimums multiply are computed once for all tiles.
template <uint32_t KIND, int PASSES, class SHAPE>
__device__ __forceinline__ void multiply_step(float (&sums)[SHAPE::TILES][SHAPE::EIGHTS][4],
                                              const Fragments<KIND> (&f)[SHAPE::TILES], const Factors (&factors)[SHAPE::TILES],
                                              SharedAddress acts, uint32_t count, bool minimums) {
#pragma unroll
    for (int eight = 0; eight < SHAPE::EIGHTS; eight++) {
        if (eight % SHAPE::SKIP == 0 && eight * 8 >= count) {
            return;
        }
        const SharedAddress at = acts + eight * 8 * BLOCK * 2;
        const uint4 hi = load_shared(at);
        const Columns<PASSES> x(hi, PASSES == 2 ? load_shared(at + SHAPE::PASS * 2) : hi);
        Halves products[SHAPE::TILES];
#pragma unroll
        for (int tile = 0; tile < SHAPE::TILES; tile++) {
            multiply_halves<KIND, PASSES>(products[tile], f[tile], x, minimums && tile == 0);
        }
#pragma unroll
        for (int tile = 0; tile < SHAPE::TILES; tile++) {
            add_halves(sums[tile][eight], products[tile].codes, products[0].ones, factors[tile], minimums);
        }
    }
}

// Number of 32-column blocks of each tile that a warp loads ahead.
template <uint32_t KIND, class SHAPE>
constexpr int steps_ahead() {
    return SHAPE::TILES > 1 || is_coded(KIND) ? 1 : 2;
}

template <uint32_t KIND, int PASSES, class SHAPE>
__device__ __forceinline__ void matmul_many(const Matmul& a) {
    constexpr int AHEAD = steps_ahead<KIND, SHAPE>();
    constexpr uint32_t STAGE_BYTES = PASSES * SHAPE::PASS * 2;
    static_assert(SHAPE::ROOM_BYTES <= STAGES * STAGE_BYTES, "the sums fit where the activations were");
    const SharedAddress stages = shared_address(dynamic_shared());
    const uint32_t parts = a.shares ? 1 : (a.n + SHAPE::COLUMNS - 1) / SHAPE::COLUMNS;
    const uint32_t first_tile = blockIdx.x / parts * SHAPE::BLOCK_TILES;
    const Job job = job_of(a, blockIdx.x % parts * SHAPE::COLUMNS, SHAPE::COLUMNS);
    if (job.count == 0 || first_tile * TILE_ROWS >= a.w.rows) {
        return;
    }
    const uint32_t warp = threadIdx.x / 32, row_warp = warp % SHAPE::ROW_WARPS, k_warp = warp / SHAPE::ROW_WARPS;
    const Lane lane = lane_of(threadIdx.x);
    const uint32_t tile = first_tile + row_warp * SHAPE::TILES, last_tile = (a.w.rows - 1) / TILE_ROWS;
    const uint32_t steps = (a.w.blocks + SHAPE::K_WARPS - 1) / SHAPE::K_WARPS, last = a.w.blocks - 1;

    Copier<SHAPE, PASSES, MANY_THREADS> copier(a, job, stages, threadIdx.x);
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) {
        copier.copy(step);
    }
    Rows<KIND> rows[SHAPE::TILES];
    Raw<KIND> raw[AHEAD][SHAPE::TILES];
    float sums[SHAPE::TILES][SHAPE::EIGHTS][4];
#pragma unroll
    for (int i = 0; i < SHAPE::TILES; i++) {
        // Warps beyond the last tile compute it again without writing it. Beyond the last block, the last one is read
        // again.
        rows[i] = rows_of<KIND>(a.w, job.data, min(tile + i, last_tile), lane);
#pragma unroll
        for (int step = 0; step < AHEAD; step++) {
            raw[step][i] = load_block(rows[i], min(step * SHAPE::K_WARPS + k_warp, last));
        }
#pragma unroll
        for (int j = 0; j < SHAPE::EIGHTS * 4; j++) {
            sums[i][j / 4][j % 4] = 0.0f;
        }
    }
    const SharedAddress mine = keep(stages + (k_warp * SHAPE::PART + lane.g * BLOCK + lane.t * 8) * 2);
    uint32_t stage = 0;
    for (uint32_t from = 0; from < steps; from += AHEAD) {
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            if (from + ahead < steps) {
                cp_async_wait<STAGES - 2>();
                __syncthreads();
                copier.copy(stage == 0 ? STAGES - 1 : stage - 1);
                const uint32_t block = (from + ahead) * SHAPE::K_WARPS + k_warp;
                if (block <= last) {
                    Fragments<KIND> f[SHAPE::TILES];
                    const auto load_next = [&] {
#pragma unroll
                        for (int i = 0; i < SHAPE::TILES; i++) {
                            raw[ahead][i] = load_block(rows[i], min(block + AHEAD * SHAPE::K_WARPS, last));
                        }
                    };
                    if constexpr (is_coded(KIND)) {
                        Factors factors[SHAPE::TILES];
#pragma unroll
                        for (int i = 0; i < SHAPE::TILES; i++) {
                            fragments_of(rows[i], raw[ahead][i], f[i]);
                            factors[i] = factors_of(rows[i], raw[ahead][i]);
                        }
                        load_next();
                        multiply_step<KIND, PASSES, SHAPE>(sums, f, factors, mine + stage * STAGE_BYTES, job.count,
                                                           rows[0].has_minimums());
                    } else {
                        float2 scales[SHAPE::TILES];
                        with_kind<KIND>(a.w.kind, [&](auto kind) {
                            constexpr uint32_t K = decltype(kind)::value;
#pragma unroll
                            for (int i = 0; i < SHAPE::TILES; i++) {
                                const Raw<K> read = as_kind<K>(raw[ahead][i]);
                                fragments_of(read, f[i]);
                                scales[i] = scales_of(rows[i].wide, read);
                            }
                        });
                        load_next();
                        multiply_step<KIND, PASSES, SHAPE>(sums, f, scales, mine + stage * STAGE_BYTES, job.count);
                    }
                }
                stage = stage == STAGES - 1 ? 0 : stage + 1;
            }
        }
    }
    cp_async_wait<0>();
    write_many<SHAPE>(a, job, first_tile, warp, lane, sums, reinterpret_cast<float*>(dynamic_shared()));
}

#endif
