// Matrix products in f32, for every kind of weights and every GPU.
//
// `matmul_f32_few` (at most 8 rows of x): a thread block computes 16 rows of the matrix; its warps take blocks of 32
// columns in turn. A lane multiplies its 2 x 8 weights with 8 columns of each row of x; the sums of four lanes are
// added, then those of warps. `matmul_f32_many`: a thread block computes 64 x 64 numbers of y, each thread 8 x 4 of
// them. Both operands are copied to shared memory first; weights are multiplied by their scales on the way.
#pragma once
#include "matmul_job.cuh"

// Loads columns `from` .. `from + 4` of a row of x; columns beyond the last are zero. If ALIGNED, each group of four
// columns is aligned to 16 bytes, and the last group is readable as a whole.
template <bool ALIGNED>
__device__ __forceinline__ float4 load_x(const float* row, uint32_t from, uint32_t cols) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (ALIGNED) {
        if (from < cols) {
            x = __ldg(reinterpret_cast<const float4*>(row + from));
        }
        x.y = from + 1 < cols ? x.y : 0.0f;
        x.z = from + 2 < cols ? x.z : 0.0f;
        x.w = from + 3 < cols ? x.w : 0.0f;
    } else {
#pragma unroll 1
        for (uint32_t i = from; i < from + 4; i++) {
            x.x = x.y, x.y = x.z, x.z = x.w;
            x.w = i < cols ? row[i] : 0.0f;
        }
    }
    return x;
}

// Returns whether the rows of x fulfil the condition of ALIGNED in `load_x`.
__device__ __forceinline__ bool fours_aligned(const Matmul& a) {
    return a.x_stride % 4 == 0 && reinterpret_cast<uint64_t>(a.x) % 16 == 0;
}

// A lane's weights of a block as floats, not yet multiplied by their scales; those of kinds from KIND_CODED
// on are.
template <uint32_t KIND>
struct Floats {
    float w[2][8];
    float2 scales;
    __device__ __forceinline__ Floats(const Rows<KIND>& rows, const Raw<KIND>& raw) {
        if constexpr (is_coded(KIND)) {
            const Factors factors = factors_of(rows, raw);
            weights_of(rows, raw, factors, 0, w[0]);
            weights_of(rows, raw, factors, 1, w[1]);
            scales = make_float2(1.0f, 1.0f);
        } else {
            from_kind(rows, raw);
        }
    }
    __device__ __forceinline__ void from_kind(const Rows<KIND>& rows, const Raw<KIND>& raw) {
        with_kind<KIND>(rows.kind, [&](auto kind) {
            const Raw<decltype(kind)::value> read = as_kind<decltype(kind)::value>(raw);
            floats_of(read, 0, w[0]);
            floats_of(read, 1, w[1]);
            scales = scales_of(rows.wide, read);
        });
    }
};

// Returns the dot product of a lane's weights of a row with eight columns of x.
__device__ __forceinline__ float dot8(const float (&w)[8], float4 x, float4 y) {
    float sum = w[0] * x.x;
    sum = __fmaf_rn(w[1], x.y, sum);
    sum = __fmaf_rn(w[2], x.z, sum);
    sum = __fmaf_rn(w[3], x.w, sum);
    sum = __fmaf_rn(w[4], y.x, sum);
    sum = __fmaf_rn(w[5], y.y, sum);
    sum = __fmaf_rn(w[6], y.z, sum);
    return __fmaf_rn(w[7], y.w, sum);
}

// Multiplies rows `first` .. `first + COLUMNS` of the job with the blocks of this warp, and writes the sums to
// `partial`.
template <uint32_t KIND, int COLUMNS, bool ALIGNED>
__device__ __forceinline__ void sum_columns(const Matmul& a, const Job& job, uint32_t first, const Rows<KIND>& rows, Lane lane,
                                            float* partial) {
    const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = a.w.blocks, last = blocks - 1;
    const float* x[COLUMNS];
    float sums[COLUMNS][2];
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; i++) {
        x[i] = a.x + uint64_t(input_of(a, job.first + min(first + i, job.count - 1))) * a.x_stride;
        sums[i][0] = sums[i][1] = 0.0f;
    }
    Raw<KIND> raw = load_block(rows, min(warp, last));
    for (uint32_t block = warp; block < blocks; block += warps) {
        const Floats<KIND> f(rows, raw);
        raw = load_block(rows, min(block + warps, last));
        const uint32_t column = block * BLOCK + 4 * lane.t;
#pragma unroll
        for (uint32_t i = 0; i < COLUMNS; i++) {
            if (first + i < job.count) {
                const float4 low = load_x<ALIGNED>(x[i], column, a.w.cols);
                const float4 high = load_x<ALIGNED>(x[i], column + 16, a.w.cols);
                sums[i][0] = __fmaf_rn(dot8(f.w[0], low, high), f.scales.x, sums[i][0]);
                sums[i][1] = __fmaf_rn(dot8(f.w[1], low, high), f.scales.y, sums[i][1]);
            }
        }
    }
    float* mine = partial + (warp * FEW_COLUMNS + first) * FEW_STRIDE + 2 * lane.g;
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; i++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            sums[i][row] += __shfl_xor_sync(FULL_WARP, sums[i][row], 1);
            sums[i][row] += __shfl_xor_sync(FULL_WARP, sums[i][row], 2);
        }
        if (lane.t == i % 4) {
            *reinterpret_cast<float2*>(mine + i * FEW_STRIDE) = make_float2(sums[i][0], sums[i][1]);
        }
    }
}

template <uint32_t KIND>
__device__ __forceinline__ void matmul_f32_few(const Matmul& a) {
    SHARED __align__(16) float partial[FEW_FLOATS];
    const uint32_t tile = blockIdx.x;
    const Job job = job_of(a, 0, FEW_COLUMNS);
    if (job.count == 0 || tile * TILE_ROWS >= a.w.rows) {
        return;
    }
    const Lane lane = lane_of(threadIdx.x);
    const Rows<KIND> rows = rows_of<KIND>(a.w, job.data, tile, lane);
    if (!fours_aligned(a)) {
#pragma unroll 1
        for (uint32_t i = 0; i < job.count; i++) {
            sum_columns<KIND, 1, false>(a, job, i, rows, lane, partial);
        }
    } else {
#pragma unroll 1
        for (uint32_t i = 0; i < job.count; i += 4) {
            sum_columns<KIND, 4, true>(a, job, i, rows, lane, partial);
        }
    }
    __syncthreads();
    write_few(a, job, tile, partial);
}

#define SQUARE 64
#define SQUARE_THREADS 128
// Floats from column to column of an operand in shared memory, such that groups of four rows are aligned to 16 bytes.
#define SQUARE_STRIDE (SQUARE + 4)

// Both operands of 32 columns: [column][row].
struct Square {
    float w[BLOCK][SQUARE_STRIDE];
    float x[BLOCK][SQUARE_STRIDE];
};

// A thread's share of the rows of x: columns 4 (thread % 8) .. + 4 of rows thread / 8 + 16 i.
struct XPart {
    const float* rows[4];
    float4 x[4];
    __device__ __forceinline__ XPart(const Matmul& a, const Job& job) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = threadIdx.x / 8 + 16 * i;
            rows[i] = row < job.count ? a.x + uint64_t(input_of(a, job.first + row)) * a.x_stride : nullptr;
        }
    }
    __device__ __forceinline__ void load(uint32_t block, uint32_t cols, bool aligned) {
        const uint32_t from = block * BLOCK + threadIdx.x % 8 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (rows[i]) {
                x[i] = aligned ? load_x<true>(rows[i], from, cols) : load_x<false>(rows[i], from, cols);
            }
        }
    }
    __device__ __forceinline__ void store(Square& square) const {
        const uint32_t column = threadIdx.x % 8 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t row = threadIdx.x / 8 + 16 * i;
            square.x[column][row] = x[i].x;
            square.x[column + 1][row] = x[i].y;
            square.x[column + 2][row] = x[i].z;
            square.x[column + 3][row] = x[i].w;
        }
    }
};

// Writes a lane's weights of a block, times their scales, to shared memory.
template <uint32_t KIND>
__device__ __forceinline__ void store_weights(Square& square, const Rows<KIND>& rows, const Raw<KIND>& raw, uint32_t warp, Lane lane) {
    const Floats<KIND> f(rows, raw);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        float* to = &square.w[4 * lane.t + i % 4 + i / 4 * 16][warp * TILE_ROWS + 2 * lane.g];
        *reinterpret_cast<float2*>(to) = make_float2(f.w[0][i] * f.scales.x, f.w[1][i] * f.scales.y);
    }
}

// Adds the products of 32 columns to a thread's sums[i][j]: i = 0 to 3 are rows 4 (thread % 8) + i of the matrix, i = 4
// to 7 the rows 32 after these, and j = 0 to 3 are rows 4 (thread / 8) + j of x.
__device__ __forceinline__ void multiply_square(float (&sums)[8][4], const Square& square) {
    const uint32_t row = threadIdx.x % 8 * 4, column = threadIdx.x / 8 * 4;
#pragma unroll 2
    for (int k = 0; k < BLOCK; k++) {
        const float4 low = *reinterpret_cast<const float4*>(&square.w[k][row]);
        const float4 high = *reinterpret_cast<const float4*>(&square.w[k][row + SQUARE / 2]);
        const float4 x4 = *reinterpret_cast<const float4*>(&square.x[k][column]);
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const float x[4] = {x4.x, x4.y, x4.z, x4.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sums[i][j] = __fmaf_rn(w[i], x[j], sums[i][j]);
            }
        }
    }
}

// Writes the sums through shared memory, so that adjacent rows are written to memory together.
__device__ __forceinline__ void write_square(const Matmul& a, const Job& job, uint32_t first_row, const float (&sums)[8][4],
                                             Square& square) {
    __syncthreads();
    float* room = &square.w[0][0];  // [column][row], into square.x
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        float* to = room + (threadIdx.x / 8 * 4 + j) * SQUARE_STRIDE + threadIdx.x % 8 * 4;
        *reinterpret_cast<float4*>(to) = make_float4(sums[0][j], sums[1][j], sums[2][j], sums[3][j]);
        *reinterpret_cast<float4*>(to + SQUARE / 2) = make_float4(sums[4][j], sums[5][j], sums[6][j], sums[7][j]);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < SQUARE * SQUARE; i += SQUARE_THREADS) {
        const uint32_t row = first_row + i % SQUARE, column = i / SQUARE;
        if (row < a.w.rows && column < job.count) {
            const float sum = room[column * SQUARE_STRIDE + i % SQUARE];
            a.y[uint64_t(job.first + column) * a.y_stride + row] = sum + (job.bias ? job.bias[row] : 0.0f);
        }
    }
}

template <uint32_t KIND>
__device__ __forceinline__ void matmul_f32_many(const Matmul& a) {
    SHARED __align__(16) Square square;
    const uint32_t parts = a.shares ? 1 : (a.n + SQUARE - 1) / SQUARE;
    const uint32_t first_row = blockIdx.x / parts * SQUARE;
    const Job job = job_of(a, blockIdx.x % parts * SQUARE, SQUARE);
    if (job.count == 0 || first_row >= a.w.rows) {
        return;
    }
    const uint32_t warp = threadIdx.x / 32, tile = first_row / TILE_ROWS + warp, last_tile = (a.w.rows - 1) / TILE_ROWS;
    const Lane lane = lane_of(threadIdx.x);
    const bool aligned = fours_aligned(a);
    const Rows<KIND> rows = rows_of<KIND>(a.w, job.data, tile < last_tile ? tile : last_tile, lane);
    XPart x(a, job);
    float sums[8][4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sums[i / 4][i % 4] = 0.0f;
    }
    Raw<KIND> raw = load_block(rows, 0);
    x.load(0, a.w.cols, aligned);
    for (uint32_t block = 0; block < a.w.blocks; block++) {
        __syncthreads();
        store_weights(square, rows, raw, warp, lane);
        x.store(square);
        __syncthreads();
        if (block + 1 < a.w.blocks) {
            raw = load_block(rows, block + 1);
            x.load(block + 1, a.w.cols, aligned);
        }
        multiply_square(sums, square);
    }
    write_square(a, job, first_row, sums, square);
}
