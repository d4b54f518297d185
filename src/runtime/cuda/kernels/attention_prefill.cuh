// Attention of many rows of one text at once, for all types and shapes in plain arithmetic; `attention_prefill_mma.cuh` has the fast
// one for caches of 16-bit numbers.
//
// A block computes up to M pairs of a row of its tile and a query head of one key/value head, and goes through what the rows see in
// steps of positions, whose keys and values it has in shared memory. Where a tile has few rows, several heads of the group share a
// block: M / count of them, so that keys and values are read less often.
//
// The host cuts each text's rows of the batch into tiles of up to M consecutive ones; where that makes too few blocks to occupy the
// device (n_heads * tiles less than the multiprocessors), halves of it. For a text with less than about 16 rows decoding is faster.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"

// What a block of prefilling computes. Pair p of its `pairs` is head first_head + p % heads of row first + p / heads.
struct PrefillPart {
    uint32_t first;  // row of the batch
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first_head;
    uint32_t heads;
    uint32_t pairs;     // 0: nothing is left for this block
    uint32_t begin;     // steps begin .. end of `step` positions, of which some row sees something
    uint32_t end;
    Visible visible;    // what any row sees
    Visible by_all;     // what all rows see; may be empty (last < first)

    // For grid (n_heads, tiles) and blocks of `most` pairs. The last tiles, which see most, come first.
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

    // Row of the batch and head of a pair; pairs beyond the last one do what that does.
    __device__ __forceinline__ uint32_t row(uint32_t pair) const {
        return first + (pair < pairs ? pair : pairs - 1) / heads;
    }
    __device__ __forceinline__ uint32_t head(uint32_t pair) const {
        return first_head + (pair < pairs ? pair : pairs - 1) % heads;
    }
    __device__ __forceinline__ const float* query(const Attention& a, uint32_t pair) const {
        return a.q + uint64_t(row(pair)) * a.q_stride + head(pair) * a.cache.head_dim;
    }

    // Zeros after the last column, by the block that has the last head.
    __device__ __forceinline__ void pad_rows(const Attention& a) const {
        if (first_head + heads != a.n_heads) {
            return;
        }
        const uint32_t count = pairs / heads;
        for (uint32_t i = threadIdx.x / 32; i < count; i += blockDim.x / 32) {
            pad(a.out, first + i, a.n_heads * a.cache.head_dim, threadIdx.x % 32, 32);
        }
    }
};

// What the values of a pair are multiplied by in the end, where `m` and `l` are all there is to a sink.
__device__ __forceinline__ float last_factor(const Attention& a, uint32_t head, float m, float l) {
    if (a.sinks == nullptr) {
        return 1.0f / l;
    }
    const float sink = a.sinks[head], reference = reference_of(fmaxf(m, sink)), keep = exp2_of(m - reference);
    return keep / (l * keep + exp2_of(sink - reference));
}

// Pairs of a warp, and positions of a step (one for each lane).
#define PREFILL_PAIRS 4
#define PREFILL_STEP 32

// Dimensions of a row in shared memory: whole 16 bytes, and 16 more so that neighbouring rows lie in other banks.
__device__ __forceinline__ uint32_t prefill_stride(uint32_t dim) {
    return ((dim + 3) & ~3u) + 4;
}

// Keys or values of a step as floats, zeros for what no row sees and after the last dimension.
template <typename T>
__device__ __forceinline__ void load_rows(const typename T::Element* rows, const Visible& visible, uint32_t start, uint32_t dim,
                                          float* out) {
    const uint32_t stride = prefill_stride(dim), warps = blockDim.x / 32;
    for (uint32_t slot = threadIdx.x / 32; slot < PREFILL_STEP; slot += warps) {
        const bool seen = visible.has(start + slot);
        const typename T::Element* row = rows + (start % PAGE + slot) * dim;
        for (uint32_t column = 2 * (threadIdx.x % 32); column < stride; column += 64) {
            float2 two = make_float2(0.0f, 0.0f);
            if (seen && column < dim) {
                two = T::two(row + column);
            }
            *reinterpret_cast<float2*>(out + slot * stride + column) = two;
        }
    }
}

// The scores of the pairs of a warp at the position of this lane.
__device__ __forceinline__ void score_pairs(const float* queries, const float* keys, uint32_t stride, float scores[PREFILL_PAIRS]) {
    const float4* key = reinterpret_cast<const float4*>(keys + threadIdx.x % 32 * stride);
    const float4* query = reinterpret_cast<const float4*>(queries + threadIdx.x / 32 * PREFILL_PAIRS * stride);
#pragma unroll
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        scores[i] = 0.0f;
    }
#pragma unroll 2
    for (uint32_t d = 0; d < stride / 4 - 1; d++) {
        const float4 k = key[d];
#pragma unroll
        for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
            const float4 q = query[i * (stride / 4) + d];
            scores[i] += q.x * k.x;
            scores[i] += q.y * k.y;
            scores[i] += q.z * k.z;
            scores[i] += q.w * k.w;
        }
    }
}

template <typename T>
__device__ __forceinline__ void prefill(const Attention& a) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = blockDim.x / 32 * PREFILL_PAIRS;
    const PrefillPart part(a, most, PREFILL_STEP);
    if (part.pairs == 0) {
        return;
    }
    const uint32_t dim = a.cache.head_dim, stride = prefill_stride(dim);
    float* queries = reinterpret_cast<float*>(dynamic_shared());  // (most, stride)
    float* rows = queries + most * stride;                        // (PREFILL_STEP, stride): keys, then values
    float* weights = rows + PREFILL_STEP * stride + warp * PREFILL_PAIRS * PREFILL_STEP;  // (PREFILL_STEP, PREFILL_PAIRS) a warp

    Visible visible[PREFILL_PAIRS];
    float m[PREFILL_PAIRS], l[PREFILL_PAIRS], sums[PREFILL_PAIRS][8];
#pragma unroll
    for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
        const uint32_t pair = warp * PREFILL_PAIRS + i;
        visible[i] = visible_at(a.rows[part.row(pair)].position, a.window);
        m[i] = NEG_INF;
        l[i] = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            sums[i][j] = 0.0f;
        }
        const float* query = part.query(a, pair);
        for (uint32_t d = lane; d < stride; d += 32) {
            queries[pair * stride + d] = d < dim ? query[d] : 0.0f;
        }
    }

    for (uint32_t step = part.begin; step < part.end; step++) {
        const uint32_t start = step * PREFILL_STEP;
        const typename T::Element* page = page_of<T>(a.cache, part.sequence, part.kv_head, start);
        __syncthreads();
        load_rows<T>(page, part.visible, start, dim, rows);
        __syncthreads();
        float scores[PREFILL_PAIRS];
        score_pairs(queries, rows, stride, scores);
#pragma unroll
        for (uint32_t i = 0; i < PREFILL_PAIRS; i++) {
            float score = a.softcap != 0.0f ? capped(scores[i], a.softcap, 1.0f / a.softcap) : scores[i];
            score = visible[i].has(start + lane) ? score : NEG_INF;
            float larger = fmaxf(m[i], score);
#pragma unroll
            for (int by = 16; by > 0; by /= 2) {
                larger = fmaxf(larger, __shfl_xor_sync(FULL_WARP, larger, by));
            }
            const float reference = reference_of(larger), keep = exp2_of(m[i] - reference), weight = exp2_of(score - reference);
            m[i] = larger;
            l[i] = l[i] * keep + weight;
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) {
                sums[i][j] *= keep;
            }
            weights[lane * PREFILL_PAIRS + i] = weight;
        }
        __syncthreads();
        load_rows<T>(page + PAGE * dim, part.visible, start, dim, rows);
        __syncthreads();
#pragma unroll 2
        for (uint32_t slot = 0; slot < PREFILL_STEP; slot++) {
            const float4 weight = *reinterpret_cast<const float4*>(weights + slot * PREFILL_PAIRS);
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) {
                if (32 * j < dim) {
                    const uint32_t column = lane + 32 * j;
                    const float value = column < dim ? rows[slot * stride + column] : 0.0f;
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
        const uint32_t pair = warp * PREFILL_PAIRS + i, head = part.head(pair);
        const float factor = last_factor(a, head, m[i], warp_sum(l[i]));
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            if (pair < part.pairs && lane + 32 * j < dim) {
                put(a.out, part.row(pair), head * dim + lane + 32 * j, sums[i][j] * factor);
            }
        }
    }
    part.pad_rows(a);
}

// Attention of the rows of tiles: any even head_dim up to 256, any group. Tiles of up to M = threads / 8 rows.
// Grid (n_heads, tiles), 256 threads for head_dim up to 128, else 128; dynamic shared memory
// (M + 32) * stride * 4 + threads * 16 bytes, stride = (head_dim rounded up to a multiple of 4) + 4. That may be 52,000: for
// head_dim above 170 the host has to raise the limit.
KERNEL __launch_bounds__(256) attention_prefill_f32(Attention a) {
    prefill<KvF32>(a);
}
KERNEL __launch_bounds__(256) attention_prefill_f16(Attention a) {
    prefill<KvF16>(a);
}
KERNEL __launch_bounds__(256) attention_prefill_bf16(Attention a) {
    prefill<KvBf16>(a);
}
