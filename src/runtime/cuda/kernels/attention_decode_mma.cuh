// Decoding on tensor cores for caches of 16-bit numbers: keys and values are loaded from memory directly to the
// registers of the warps that multiply them, 16 bytes at a time, and only once for all query heads that share them. See
// attention_decode.cuh for parts and their number.
//
// A warp takes every fourth step of 16 positions. In the notation of tensor.cuh (lane = 4 g + t):
//     scores (16 x positions) = queries * keys^T: row g is head g, rounded; row g + 8 is the rounding error. The lane's sum of
//         both is a score of full precision. The order of the dimensions within a product is free, so the lane loads dimensions
//         32 c + 8 t .. + 8 of position g and uses them as columns of four fragments.
//     sums^T (dimensions x heads) = values^T * weights^T: the scores of a lane, head g at positions 2t, 2t+1, 2t+8, 2t+9, become
//         its second operand without moving. For the first operand, the lane loads dimensions 64 c + 8 g .. + 8 of these four
//         positions and packs pairs of positions; row g of product i of c is dimension 64 c + 8 g + 2 i, row g + 8 the next one.
//         Weights, too, are multiplied as two numbers: the rounded weight and its rounding error.
#pragma once
#include "attention_decode.cuh"

#ifdef TENSOR_CORES

#define DECODE_STEP 16

// A lane's part of the result of a warp: m of head g, l of head g for the lane's positions, and the weighted values of
// heads 2t and 2t+1.
template <int D>
struct DecodeState {
    float m;
    float l;
    float sums[D / 16][4];
};

// Writes the queries to shared memory as fragments.
template <typename T, int D>
__device__ __forceinline__ void load_queries(const Attention& a, const DecodePart& part, uint4 (&queries)[D / 16][32]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (uint32_t k = threadIdx.x / 32; k < D / 16; k += DECODE_WARPS) {
        const uint32_t column = 32 * (k / 2) + 8 * t + 4 * (k % 2);
        float2 low = make_float2(0.0f, 0.0f), high = low;
        if (g < part.heads && column < a.cache.head_dim) {
            const float2* query = reinterpret_cast<const float2*>(part.query(a, g) + column);
            low = query[0];
            high = query[1];
        }
        uint4 fragment;
        split<T>(T::clamp(low.x), T::clamp(low.y), &fragment.x, &fragment.y);
        split<T>(T::clamp(high.x), T::clamp(high.y), &fragment.z, &fragment.w);
        queries[k][lane] = fragment;
    }
}

__device__ __forceinline__ const uint16_t* page_at(const Attention& a, const DecodePart& part, uint32_t step) {
    const uint32_t key_bytes = PAGE * 2 * a.cache.head_dim, value_bytes = PAGE * 2 * a.cache.value_dim;
    return reinterpret_cast<const uint16_t*>(kv_address(a.cache, key_bytes, value_bytes, part.sequence, part.kv_head, step * DECODE_STEP));
}

// Loads 16 bytes of a row of the page, or zeros. In assembly, so that there is no branch and the load starts before the
// products.
__device__ __forceinline__ uint4 load_row(const uint16_t* row, uint32_t column, uint32_t dim, bool wanted) {
    uint4 words = make_uint4(0, 0, 0, 0);
#ifdef IEC_EMULATED
    if (wanted && column < dim) {
        words = *reinterpret_cast<const uint4*>(row + column);
    }
#else
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; "
        "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(__cvta_generic_to_global(row + column)), "r"(uint32_t(wanted && column < dim)));
#endif
    return words;
}

template <int D>
__device__ __forceinline__ void load_keys(const uint16_t* page, const Visible& visible, uint32_t start, uint32_t dim,
                                          uint4 (&keys)[2][D / 32]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        const uint32_t position = start + 8 * j + g;
        const uint16_t* row = page + position % PAGE * dim;
#pragma unroll
        for (uint32_t c = 0; c < D / 32; c++) {
            keys[j][c] = load_row(row, 32 * c + 8 * t, dim, visible.has(position));
        }
    }
}

// Loads positions 2t, 2t+1, 2t+8, 2t+9. Positions that are not visible may hold any bits in memory and are loaded as
// zeros. `rows` are the values of the page, of `dim` numbers each.
template <int D>
__device__ __forceinline__ void load_values(const uint16_t* rows, const Visible& visible, uint32_t start, uint32_t dim,
                                            uint4 (&values)[4][D / 64]) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t position = start + 2 * t + i % 2 + i / 2 * 8;
        const uint16_t* row = rows + position % PAGE * dim;
#pragma unroll
        for (uint32_t c = 0; c < D / 64; c++) {
            values[i][c] = load_row(row, 64 * c + 8 * g, dim, visible.has(position));
        }
    }
}

// Computes the scores of head g at positions 2t, 2t+1, 2t+8, 2t+9 of the step.
template <typename T, int D>
__device__ __forceinline__ void score_step(const Attention& a, const Visible& visible, uint32_t start,
                                           const uint4 (&queries)[D / 16][32], const uint4 (&keys)[2][D / 32], float scores[4]) {
    const uint32_t lane = threadIdx.x % 32, t = lane % 4;
    float products[2][4] = {};
#pragma unroll
    for (uint32_t c = 0; c < D / 32; c++) {
        const uint4 first = queries[2 * c][lane], second = queries[2 * c + 1][lane];
        const uint32_t q[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t k[2][2] = {{keys[j][c].x, keys[j][c].y}, {keys[j][c].z, keys[j][c].w}};
            T::mma(products[j], q[0], k[0]);
            T::mma(products[j], q[1], k[1]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float score = products[i / 2][i % 2] + products[i / 2][i % 2 + 2];
        if (a.softcap != 0.0f) {
            score = capped(score, a.softcap);
        }
        scores[i] = visible.has(start + 2 * t + i % 2 + i / 2 * 8) ? score : NEG_INF;
    }
}

// Turns scores into weights, and makes the sums over earlier positions relative to the new m.
template <int D>
__device__ __forceinline__ void weigh_scores(DecodeState<D>& state, float scores[4]) {
    const uint32_t t = threadIdx.x % 4;
    float m = fmaxf(fmaxf(state.m, fmaxf(scores[0], scores[1])), fmaxf(scores[2], scores[3]));
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
    const float reference = reference_of(m), keep = exp2_of(state.m - reference);
    if (__any_sync(FULL_WARP, m != state.m)) {
        const float first = __shfl_sync(FULL_WARP, keep, 8 * t), second = __shfl_sync(FULL_WARP, keep, 8 * t + 4);
#pragma unroll
        for (uint32_t i = 0; i < D / 16; i++) {
            state.sums[i][0] *= first;
            state.sums[i][1] *= second;
            state.sums[i][2] *= first;
            state.sums[i][3] *= second;
        }
        state.l *= keep;
    }
    state.m = m;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        scores[i] = exp2_of(scores[i] - reference);
        state.l += scores[i];
    }
}

template <typename T, int D>
__device__ __forceinline__ void add_values(DecodeState<D>& state, const uint4 (&values)[4][D / 64], const float weights[4]) {
    uint32_t rounded[2], rest[2];
    split<T>(weights[0], weights[1], &rounded[0], &rest[0]);
    split<T>(weights[2], weights[3], &rounded[1], &rest[1]);
#pragma unroll
    for (uint32_t c = 0; c < D / 64; c++) {
        uint32_t words[4][4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            words[i][0] = values[i][c].x;
            words[i][1] = values[i][c].y;
            words[i][2] = values[i][c].z;
            words[i][3] = values[i][c].w;
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t v[4] = {
                __byte_perm(words[0][i], words[1][i], 0x5410), __byte_perm(words[0][i], words[1][i], 0x7632),
                __byte_perm(words[2][i], words[3][i], 0x5410), __byte_perm(words[2][i], words[3][i], 0x7632)};
            T::mma(state.sums[4 * c + i], v, rounded);
            T::mma(state.sums[4 * c + i], v, rest);
        }
    }
}

// Combines the results of the warps of a block and writes the combined result to `partial`.
template <int D>
__device__ __forceinline__ void merge_warps(const Attention& a, const DecodePart& part, DecodeState<D>& state,
                                            float (&sums)[DECODE_WARPS][DECODE_HEADS][D + 2]) {
    SHARED float largest[DECODE_WARPS][DECODE_HEADS], totals[DECODE_WARPS][DECODE_HEADS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    state.l += __shfl_xor_sync(FULL_WARP, state.l, 1);
    state.l += __shfl_xor_sync(FULL_WARP, state.l, 2);
    if (t == 0) {
        largest[warp][g] = state.m;
    }
    __syncthreads();
    float m = largest[0][g];
#pragma unroll
    for (uint32_t i = 1; i < DECODE_WARPS; i++) {
        m = fmaxf(m, largest[i][g]);
    }
    const float keep = exp2_of(state.m - reference_of(m));
    if (t == 0) {
        totals[warp][g] = state.l * keep;
    }
    const float first = __shfl_sync(FULL_WARP, keep, 8 * t), second = __shfl_sync(FULL_WARP, keep, 8 * t + 4);
#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++) {
        const uint32_t column = 64 * (i / 4) + 8 * g + 2 * (i % 4);
        *reinterpret_cast<float2*>(&sums[warp][2 * t][column]) = make_float2(state.sums[i][0] * first, state.sums[i][2] * first);
        *reinterpret_cast<float2*>(&sums[warp][2 * t + 1][column]) = make_float2(state.sums[i][1] * second, state.sums[i][3] * second);
    }
    __syncthreads();
    const uint32_t dim = a.cache.value_dim;
    for (uint32_t head = warp; head < part.heads; head += DECODE_WARPS) {
        float* partial = part.partial(a, head);
        for (uint32_t column = 2 * lane; column < dim; column += 64) {
            float2 sum = *reinterpret_cast<const float2*>(&sums[0][head][column]);
#pragma unroll
            for (uint32_t i = 1; i < DECODE_WARPS; i++) {
                const float2 other = *reinterpret_cast<const float2*>(&sums[i][head][column]);
                sum.x += other.x;
                sum.y += other.y;
            }
            *reinterpret_cast<float2*>(partial + column) = sum;
        }
        const float total = totals[0][head] + totals[1][head] + totals[2][head] + totals[3][head];
        const float top = fmaxf(fmaxf(largest[0][head], largest[1][head]), fmaxf(largest[2][head], largest[3][head]));
        if (lane == 0) {
            *reinterpret_cast<float2*>(partial + dim) = make_float2(top, total);
        }
    }
}

template <typename T, int D>
__device__ __forceinline__ void decode_mma(const Attention& a) {
    SHARED __align__(16) uint4 queries[D / 16][32];
    SHARED __align__(16) float sums[DECODE_WARPS][DECODE_HEADS][D + 2];
    const DecodePart part(a, DECODE_STEP);
    const uint32_t dim = a.cache.head_dim;
    load_queries<T, D>(a, part, queries);
    __syncthreads();

    DecodeState<D> state = {NEG_INF, 0.0f, {}};
    uint32_t step = part.begin + threadIdx.x / 32;
    uint4 keys[2][D / 32], values[4][D / 64];
    const uint16_t* page = nullptr;
    if (step < part.end) {
        page = page_at(a, part, step);
        load_keys<D>(page, part.visible, step * DECODE_STEP, dim, keys);
    }
    while (step < part.end) {
        // The values are loaded during the first product, and the next keys during the second. The address of the page
        // of the next keys is loaded before both.
        const uint32_t start = step * DECODE_STEP, next = step + DECODE_WARPS;
        const uint16_t* next_page = page;
        if (next < part.end) {
            next_page = page_at(a, part, next);
        }
        load_values<D>(page + PAGE * dim, part.visible, start, a.cache.value_dim, values);
        float scores[4];
        score_step<T, D>(a, part.visible, start, queries, keys, scores);
        if (next < part.end) {
            load_keys<D>(next_page, part.visible, next * DECODE_STEP, dim, keys);
        }
        weigh_scores<D>(state, scores);
        add_values<T, D>(state, values, scores);
        step = next;
        page = next_page;
    }
    merge_warps<D>(a, part, state, sums);
}

// Computes attention of each row over each part of its sequence, and writes the results to `partial`. head_dim and
// value_dim are multiples of 8 and at most the number in the name; any number of query heads may share a key/value
// head. If several kernels can compute a shape, the one with the smallest number is the fastest.
//
// Grid: (splits, kv_heads * chunks, n). Block: 128. Dynamic shared memory: none. Resident thread blocks per
// multiprocessor: 5 for head_dim 64, 3 for 128, 2 for 256.
#define DECODE_MMA(name, T, D)                                   \
    KERNEL __launch_bounds__(DECODE_THREADS) name(Attention a) { \
        decode_mma<T, D>(a);                                     \
    }
DECODE_MMA(attention_decode_f16_64, KvF16, 64)
DECODE_MMA(attention_decode_f16_128, KvF16, 128)
DECODE_MMA(attention_decode_f16_256, KvF16, 256)
DECODE_MMA(attention_decode_bf16_64, KvBf16, 64)
DECODE_MMA(attention_decode_bf16_128, KvBf16, 128)
DECODE_MMA(attention_decode_bf16_256, KvBf16, 256)
#undef DECODE_MMA

#endif
