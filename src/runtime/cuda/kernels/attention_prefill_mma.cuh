// Prefilling on tensor cores, for caches of 16-bit numbers. See attention_prefill.cuh for tiles and pairs.
//
// A block of 4 warps has M = 64 * TILES pairs, a warp 16 * TILES of them, and steps are 64 positions. Queries stay in
// shared memory, rounded to the type of the cache. Keys of the next step are copied while values are multiplied, and
// values while scores are computed, so one buffer for each and two barriers per step suffice. The rounded weights of a
// warp are an operand of the second product without leaving their registers. Rows in shared memory are 16 bytes longer
// than D numbers, an odd number of 16 bytes, so that the eight rows of a matrix that `ldmatrix` reads lie in different
// banks.
#pragma once
#include "attention_prefill.cuh"

#ifdef TENSOR_CORES

#define PREFILL_MMA_STEP 64
#define PREFILL_MMA_THREADS 128

// State of a lane's pairs: lane 4 g + t has pairs g and g + 8 of every 16 pairs.
template <int TILES>
struct PrefillPairs {
    uint32_t positions[TILES][2];
    Visible any;  // positions that at least one pair of the warp sees
    float m[TILES][2];
    float l[TILES][2];  // of this lane's positions

    __device__ __forceinline__ PrefillPairs(const Attention& a, const PrefillPart& part) {
        const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t pair = warp * 16 * TILES + i * 16 + half * 8 + g;
                positions[i][half] = a.rows[part.row(pair)].position;
                m[i][half] = NEG_INF;
                l[i][half] = 0.0f;
            }
        }
        const uint32_t low = a.rows[part.row(warp * 16 * TILES)].position;
        const uint32_t high = a.rows[part.row(warp * 16 * TILES + 16 * TILES - 1)].position;
        any = {visible_at(low, a.window).first, high};
    }
};

__device__ __forceinline__ const uint16_t* page_at(const Attention& a, const PrefillPart& part, uint32_t position) {
    const uint32_t key_bytes = PAGE * 2 * a.cache.head_dim, value_bytes = PAGE * 2 * a.cache.value_dim;
    return reinterpret_cast<const uint16_t*>(kv_address(a.cache, key_bytes, value_bytes, part.sequence, part.kv_head, position));
}

// Starts to copy 64 rows of keys or values; positions that no row of the tile sees and columns after the last dimension
// become zero.
template <int D>
__device__ __forceinline__ void copy_rows(const uint16_t* rows, const Visible& visible, uint32_t start, uint32_t dim,
                                          uint16_t* out) {
    // A thread copies the same 16 bytes of every `STRIDE`th row.
    const uint32_t PIECES = D / 8, STRIDE = PREFILL_MMA_THREADS / PIECES;
    static_assert(STRIDE * PIECES == PREFILL_MMA_THREADS && PREFILL_MMA_STEP % STRIDE == 0, "whole rows");
    const uint32_t slot = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
    const uint16_t* from = rows + (start % PAGE + slot) * dim + column;
    const SharedAddress to = shared_address(out + slot * (D + 8) + column);
#pragma unroll
    for (uint32_t i = 0; i < PREFILL_MMA_STEP / STRIDE; i++) {
        const bool wanted = visible.has(start + slot + i * STRIDE) && column < dim;
        cp_async_16(to + 2 * i * STRIDE * (D + 8), from + i * STRIDE * dim, wanted);
    }
}

// Writes the rounded queries of all pairs to shared memory.
template <typename T, int D, int TILES>
__device__ __forceinline__ void round_queries(const Attention& a, const PrefillPart& part, uint16_t* out) {
    const uint32_t lane = threadIdx.x % 32, dim = a.cache.head_dim;
    for (uint32_t pair = threadIdx.x / 32; pair < 64 * TILES; pair += PREFILL_MMA_THREADS / 32) {
        const float* query = part.query(a, pair);
        for (uint32_t column = 2 * lane; column < D; column += 64) {
            float2 two = make_float2(0.0f, 0.0f);
            if (column < dim) {
                two = *reinterpret_cast<const float2*>(query + column);
            }
            *reinterpret_cast<uint32_t*>(out + pair * (D + 8) + column) = T::pack(T::clamp(two.x), T::clamp(two.y));
        }
    }
}

// Computes scores[i][n]: those of the warp's pairs 16 i .. at positions 8 n .. of the step.
template <typename T, int D, int TILES>
__device__ __forceinline__ void multiply_keys(const uint16_t* queries, const uint16_t* keys, float (&scores)[TILES][8][4]) {
    const uint32_t lane = threadIdx.x % 32;
    const SharedAddress query = shared_address(queries + lane % 16 * (D + 8) + lane / 16 * 8);
    const SharedAddress key = shared_address(keys + (lane / 16 * 8 + lane % 8) * (D + 8) + lane / 8 % 2 * 8);
#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                scores[i][n][j] = 0.0f;
            }
        }
    }
#pragma unroll 4
    for (uint32_t k = 0; k < D / 16; k++) {
        uint32_t q[TILES][4];
#pragma unroll
        for (uint32_t i = 0; i < TILES; i++) {
            ldmatrix_x4(q[i], query + 2 * (i * 16 * (D + 8) + k * 16));
        }
#pragma unroll
        for (uint32_t n = 0; n < 4; n++) {
            uint32_t both[4];
            ldmatrix_x4(both, key + 2 * (n * 16 * (D + 8) + k * 16));
#pragma unroll
            for (uint32_t i = 0; i < TILES; i++) {
                T::mma(scores[i][2 * n], q[i], both);
                T::mma(scores[i][2 * n + 1], q[i], both + 2);
            }
        }
    }
}

// Sets the scores of positions that a pair does not see to minus infinity.
template <int TILES>
__device__ __forceinline__ void mask_scores(const PrefillPairs<TILES>& pairs, uint32_t start, uint32_t window,
                                            float (&scores)[TILES][8][4]) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                if (!sees(pairs.positions[i][j / 2], start + 8 * n + 2 * t + j % 2, window)) {
                    scores[i][n][j] = NEG_INF;
                }
            }
        }
    }
}

template <int TILES>
__device__ __forceinline__ void cap_scores(float cap, float (&scores)[TILES][8][4]) {
#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                scores[i][n][j] = capped(scores[i][n][j], cap);
            }
        }
    }
}

// Turns scores into weights, and makes the sums over earlier positions relative to the new m.
template <int D, int TILES>
__device__ __forceinline__ void weigh_pairs(PrefillPairs<TILES>& pairs, float (&scores)[TILES][8][4], float (&sums)[TILES][D / 8][4]) {
#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
        float reference[2], keep[2];
        bool grew = false;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            float m = pairs.m[i][half];
#pragma unroll
            for (uint32_t n = 0; n < 8; n++) {
                m = fmaxf(m, fmaxf(scores[i][n][2 * half], scores[i][n][2 * half + 1]));
            }
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
            grew |= m != pairs.m[i][half];
            reference[half] = reference_of(m);
            keep[half] = exp2_of(pairs.m[i][half] - reference[half]);
            pairs.m[i][half] = m;
        }
        if (__any_sync(FULL_WARP, grew)) {
#pragma unroll
            for (uint32_t n = 0; n < D / 8; n++) {
#pragma unroll
                for (uint32_t j = 0; j < 4; j++) {
                    sums[i][n][j] *= keep[j / 2];
                }
            }
            pairs.l[i][0] *= keep[0];
            pairs.l[i][1] *= keep[1];
        }
#pragma unroll
        for (uint32_t n = 0; n < 8; n++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                scores[i][n][j] = exp2_of(scores[i][n][j] - reference[j / 2]);
                pairs.l[i][j / 2] += scores[i][n][j];
            }
        }
    }
}

// sums[i][n] += weights of the warp's pairs 16 i .. times dimensions 8 n .. of the values.
template <typename T, int D, int TILES>
__device__ __forceinline__ void multiply_values(const uint16_t* values, const float (&weights)[TILES][8][4],
                                                float (&sums)[TILES][D / 8][4]) {
    const uint32_t lane = threadIdx.x % 32;
    const SharedAddress value = shared_address(values + lane % 16 * (D + 8) + lane / 16 * 8);
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t w[TILES][4];
#pragma unroll
        for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                w[i][j] = T::pack(weights[i][2 * k + j / 2][j % 2 * 2], weights[i][2 * k + j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (uint32_t n = 0; n < D / 16; n++) {
            uint32_t both[4];
            ldmatrix_x4_trans(both, value + 2 * (k * 16 * (D + 8) + n * 16));
#pragma unroll
            for (uint32_t i = 0; i < TILES; i++) {
                T::mma(sums[i][2 * n], w[i], both);
                T::mma(sums[i][2 * n + 1], w[i], both + 2);
            }
        }
    }
}

// Divides by the sums and writes the warp's pairs, through (16 * TILES, D + 8) floats of shared memory of its own.
template <int D, int TILES>
__device__ __forceinline__ void write_pairs(const Attention& a, const PrefillPart& part, PrefillPairs<TILES>& pairs,
                                            const float (&sums)[TILES][D / 8][4], float* room) {
    const uint32_t first = threadIdx.x / 32 * 16 * TILES, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < TILES; i++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t own = i * 16 + half * 8 + g;
            float l = pairs.l[i][half];
            l += __shfl_xor_sync(FULL_WARP, l, 1);
            l += __shfl_xor_sync(FULL_WARP, l, 2);
            const float factor = last_factor(a, part.head(first + own), pairs.m[i][half], l);
            float2* out = reinterpret_cast<float2*>(room + own * (D + 8) + 2 * t);
#pragma unroll
            for (uint32_t n = 0; n < D / 8; n++) {
                out[4 * n] = make_float2(sums[i][n][2 * half] * factor, sums[i][n][2 * half + 1] * factor);
            }
        }
    }
    __syncwarp();
    for (uint32_t own = 0; own < 16 * TILES && first + own < part.pairs; own++) {
        write_row(a, part.row(first + own), part.head(first + own), room + own * (D + 8));
    }
}

template <typename T, int D, int TILES>
__device__ __forceinline__ void prefill_mma(const Attention& a) {
    const PrefillPart part(a, 64 * TILES, PREFILL_MMA_STEP);
    if (part.pairs == 0) {
        return;
    }
    const uint32_t dim = a.cache.head_dim, warp = threadIdx.x / 32;
    uint16_t* queries = reinterpret_cast<uint16_t*>(dynamic_shared());  // (64 * TILES, D + 8)
    uint16_t* keys = queries + 64 * TILES * (D + 8);                    // (64, D + 8)
    uint16_t* values = keys + PREFILL_MMA_STEP * (D + 8);               // (64, D + 8)

    const uint16_t* page = page_at(a, part, part.begin * PREFILL_MMA_STEP);
    copy_rows<D>(page, part.visible, part.begin * PREFILL_MMA_STEP, dim, keys);
    cp_async_commit();
    round_queries<T, D, TILES>(a, part, queries);
    PrefillPairs<TILES> pairs(a, part);
    float sums[TILES][D / 8][4] = {};
    const bool used = warp * 16 * TILES < part.pairs;  // a tile with few rows does not need all warps

    for (uint32_t step = part.begin; step < part.end; step++) {
        const uint32_t start = step * PREFILL_MMA_STEP, next = start + PREFILL_MMA_STEP;
        const bool more = step + 1 < part.end, busy = used && start <= pairs.any.last && next > pairs.any.first;
        const uint16_t* next_page = more ? page_at(a, part, next) : page;
        float scores[TILES][8][4];

        cp_async_wait<0>();
        __syncthreads();  // the keys have arrived, and no thread reads the last values any more
        copy_rows<D>(page + PAGE * dim, part.visible, start, a.cache.value_dim, values);
        cp_async_commit();
        if (busy) {
            multiply_keys<T, D, TILES>(queries + warp * 16 * TILES * (D + 8), keys, scores);
        }
        cp_async_wait<0>();
        __syncthreads();  // the values have arrived, and no thread reads these keys any more
        if (more) {
            copy_rows<D>(next_page, part.visible, next, dim, keys);
        }
        cp_async_commit();
        if (busy) {
            if (a.softcap != 0.0f) {
                cap_scores<TILES>(a.softcap, scores);
            }
            if (start < part.by_all.first || next > part.by_all.last + 1) {
                mask_scores<TILES>(pairs, start, a.window, scores);
            }
            weigh_pairs<D, TILES>(pairs, scores, sums);
            multiply_values<T, D, TILES>(values, scores, sums);
        }
        page = next_page;
    }
    __syncthreads();  // no thread reads queries, keys and values any more
    float* room = reinterpret_cast<float*>(dynamic_shared()) + warp * 16 * TILES * (D + 8);
    write_pairs<D, TILES>(a, part, pairs, sums, room);
    part.pad_rows(a);
}

// Computes attention of the rows of tiles. With D the first and M the second number in the name, head_dim and value_dim
// are multiples of 8 and at most D, and tiles have up to M rows; any number of query heads may share a key/value head.
// If several kernels can compute a shape, the one with the smallest D is the fastest.
//
// Grid: (n_heads, tiles). Block: 128. Dynamic shared memory: (M + 128) * (D + 8) * 2 bytes, up to 101,376, so the host
// has to raise the limit.
#define PREFILL_MMA(name, T, D, TILES)                                   \
    KERNEL __launch_bounds__(PREFILL_MMA_THREADS, 2) name(Attention a) { \
        prefill_mma<T, D, TILES>(a);                                     \
    }
PREFILL_MMA(attention_prefill_f16_64_128, KvF16, 64, 2)
PREFILL_MMA(attention_prefill_f16_128_128, KvF16, 128, 2)
PREFILL_MMA(attention_prefill_f16_256_64, KvF16, 256, 1)
PREFILL_MMA(attention_prefill_bf16_64_128, KvBf16, 64, 2)
PREFILL_MMA(attention_prefill_bf16_128_128, KvBf16, 128, 2)
PREFILL_MMA(attention_prefill_bf16_256_64, KvBf16, 256, 1)
#undef PREFILL_MMA

#endif
