// Attention of many rows of one sequence at once, for all types and shapes, without tensor cores;
// `attention_prefill_mma.cuh` has the faster kernels for caches of 16-bit numbers.
//
// A thread block computes up to M pairs. A pair is a row of the block's tile and one of the query heads that share a
// key/value head. The block processes the positions that the rows see in steps, and loads the keys and values of a step
// into shared memory. If a tile has few rows, the block computes several of these query heads, M divided by the number
// of rows, so that keys and values are read less often.
//
// The host cuts the rows of each sequence in the batch into tiles of up to M consecutive rows. For a sequence with less
// than about 16 rows, decoding is faster.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"

// Work of a thread block in prefilling. Pair p of its `pairs` is head first_head + p % heads of row first + p / heads.
struct PrefillPart {
    uint32_t first;  // row of the batch
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first_head;
    uint32_t heads;
    uint32_t pairs;     // 0 = this block has no work
    uint32_t begin;     // first step with positions that at least one row sees; a step is `step` positions
    uint32_t end;       // step after the last one
    Visible visible;    // positions that at least one row sees
    Visible by_all;     // positions that all rows see; may be empty (last < first)

    // The grid is (n_heads, tiles), and a thread block computes up to `most` pairs. The last tiles, which see the most
    // positions, come first.
    __device__ __forceinline__ PrefillPart(const Attention& a, uint32_t most, uint32_t step) {
        const Tile tile = a.tiles[gridDim.y - 1 - blockIdx.y];
        const uint32_t group = a.n_heads / a.cache.kv_heads, together = tile.count < most ? most / tile.count : 1;
        kv_head = blockIdx.x / group;
        const uint32_t before = blockIdx.x % group * together;
        first = tile.first;
        first_head = kv_head * group + before;
        heads = before >= group ? 0 : group - before < together ? group - before : together;
        pairs = tile.count * heads;
        const Row low = a.rows[first], high = a.rows[first + tile.count - 1];
        sequence = low.sequence;
        visible = {visible_at(low.position, a.window).first, high.position};
        by_all = {visible_at(high.position, a.window).first, low.position};
        begin = visible.first / step;
        end = visible.last / step + 1;
    }

    // Row of the batch and head of a pair; pairs beyond the last one repeat it.
    __device__ __forceinline__ uint32_t row(uint32_t pair) const {
        return first + (pair < pairs ? pair : pairs - 1) / heads;
    }
    __device__ __forceinline__ uint32_t head(uint32_t pair) const {
        return first_head + (pair < pairs ? pair : pairs - 1) % heads;
    }
    __device__ __forceinline__ const float* query(const Attention& a, uint32_t pair) const {
        return a.q + uint64_t(row(pair)) * a.q_stride + head(pair) * a.cache.head_dim;
    }

    // Writes the zeros after the last column, in the block that has the last head.
    __device__ __forceinline__ void pad_rows(const Attention& a) const {
        if (first_head + heads != a.n_heads) {
            return;
        }
        const uint32_t count = pairs / heads;
        for (uint32_t i = threadIdx.x / 32; i < count; i += blockDim.x / 32) {
            pad(a.out, first + i, a.n_heads * a.cache.value_dim, threadIdx.x % 32, 32);
        }
    }
};

// Returns the final factor of the weighted values of a pair: 1 / (l + weight of the sink, if there is one).
__device__ __forceinline__ float last_factor(const Attention& a, uint32_t head, float m, float l) {
    // l is at least 1, the weight of the largest score.
    if (a.sinks == nullptr) {
        return inverse_of(l);
    }
    const float sink = a.sinks[head], reference = reference_of(fmaxf(m, sink)), keep = exp2_of(m - reference);
    return keep * inverse_of(l * keep + exp2_of(sink - reference));
}

// Writes the results of one head of a row, which are in shared memory and aligned to 16 bytes; called by a whole warp.
__device__ __forceinline__ void write_row(const Attention& a, uint32_t row, uint32_t head, const float* values) {
    const uint32_t dim = a.cache.value_dim, lane = threadIdx.x % 32, first = head * dim;
    if (dim % 4 == 0 && takes_fours(a.out)) {
#pragma unroll 1
        for (uint32_t column = 4 * lane; column < dim; column += 128) {
            float4 four = *reinterpret_cast<const float4*>(values + column);
            if (a.gate) {
                four.x *= gate_of(a, row, first + column);
                four.y *= gate_of(a, row, first + column + 1);
                four.z *= gate_of(a, row, first + column + 2);
                four.w *= gate_of(a, row, first + column + 3);
            }
            put4(a.out, row, first + column, four);
        }
    } else {
#pragma unroll 1
        for (uint32_t column = lane; column < dim; column += 32) {
            put(a.out, row, first + column, values[column] * gate_of(a, row, first + column));
        }
    }
}

// Pairs of a warp.
#define PREFILL_PAIRS 4

// Computes attention of values of up to 32 * COLUMNS numbers.
template <int COLUMNS>
__device__ __forceinline__ void prefill_plain(const Attention& a) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = blockDim.x / 32 * PREFILL_PAIRS;
    const PrefillPart part(a, most, PLAIN_STEP);
    if (part.pairs == 0) {
        return;
    }
    const uint32_t dim = a.cache.head_dim, value_dim = a.cache.value_dim, stride = plain_stride(a.cache);
    // The warp's queries, and later its results.
    float* queries = reinterpret_cast<float*>(dynamic_shared()) + warp * PREFILL_PAIRS * stride;  // (PREFILL_PAIRS, stride)
    float* rows = reinterpret_cast<float*>(dynamic_shared()) + most * stride;  // (PLAIN_STEP, stride): keys, then values
    float* weights = rows + (stride + warp * PREFILL_PAIRS) * PLAIN_STEP;      // (PLAIN_STEP, PREFILL_PAIRS), the warp's

    uint32_t positions[PREFILL_PAIRS];
    float m[PREFILL_PAIRS], l[PREFILL_PAIRS], sums[PREFILL_PAIRS][COLUMNS];
#pragma unroll
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        positions[i] = a.rows[part.row(warp * PREFILL_PAIRS + i)].position;
        m[i] = NEG_INF;
        l[i] = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < COLUMNS; j++) {
            sums[i][j] = 0.0f;
        }
    }
#pragma unroll 1
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        const float* query = part.query(a, warp * PREFILL_PAIRS + i);
#pragma unroll 1
        for (uint32_t d = lane; d < stride; d += 32) {
            queries[i * stride + d] = d < dim ? query[d] : 0.0f;
        }
    }

    for (uint32_t step = part.begin; step < part.end; step++) {
        const uint32_t start = step * PLAIN_STEP;
        __syncthreads();
        load_rows(a.cache, part.sequence, part.kv_head, 0, part.visible, start, rows);
        __syncthreads();
        float scores[PREFILL_PAIRS];
        dots<PREFILL_PAIRS>(queries, rows + lane * stride, stride, scores);
#pragma unroll
        for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
            const float keep = weigh(a, sees(positions[i], start + lane, a.window), &scores[i], &m[i], &l[i]);
#pragma unroll
            for (uint32_t j = 0; j < COLUMNS; j++) {
                sums[i][j] *= keep;
            }
        }
        *reinterpret_cast<float4*>(weights + lane * PREFILL_PAIRS) = make_float4(scores[0], scores[1], scores[2], scores[3]);
        __syncthreads();
        load_rows(a.cache, part.sequence, part.kv_head, 1, part.visible, start, rows);
        __syncthreads();
#pragma unroll 2
        for (uint32_t slot = 0; slot < PLAIN_STEP; slot++) {
            const float4 weight = *reinterpret_cast<const float4*>(weights + slot * PREFILL_PAIRS);
#pragma unroll
            for (uint32_t j = 0; j < COLUMNS; j++) {
                if (lane + 32 * j < value_dim) {
                    const float value = rows[slot * stride + lane + 32 * j];
                    sums[0][j] += weight.x * value;
                    sums[1][j] += weight.y * value;
                    sums[2][j] += weight.z * value;
                    sums[3][j] += weight.w * value;
                }
            }
        }
    }

#pragma unroll
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        const float factor = last_factor(a, part.head(warp * PREFILL_PAIRS + i), m[i], warp_sum(l[i]));
        float* result = queries + i * stride + lane;
#pragma unroll
        for (uint32_t j = 0; j < COLUMNS; j++) {
            if (lane + 32 * j < value_dim) {
                result[32 * j] = sums[i][j] * factor;
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        const uint32_t pair = warp * PREFILL_PAIRS + i;
        if (pair < part.pairs) {
            write_row(a, part.row(pair), part.head(pair), queries + i * stride);
        }
    }
    part.pad_rows(a);
}

// Computes attention of the rows of tiles. It takes any type, any even head_dim and value_dim up to 256
// (`attention_prefill_wide`: 512), any number of query heads per key/value head, and tiles of up to M = threads / 8
// rows.
//
// Grid: (n_heads, tiles). Block: 256 for dimensions up to 128, else 128. Dynamic shared memory: (M + 32) * stride * 4 +
// threads * 16 bytes, where stride = (the larger of head_dim and value_dim rounded up to a multiple of 4) + 4. For more
// than 240 this exceeds 48 KiB, the default limit, which the host then has to raise.
KERNEL __launch_bounds__(256, 2) attention_prefill(Attention a) {
    prefill_plain<8>(a);
}
KERNEL __launch_bounds__(128, 2) attention_prefill_wide(Attention a) {
    prefill_plain<16>(a);
}
