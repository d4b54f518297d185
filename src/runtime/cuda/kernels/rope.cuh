// Rotary position embedding, and storing of keys and values in the cache.
#pragma once
#include "acts.cuh"
#include "cache.cuh"
#include "reduce.cuh"

// Number of pairs that a lane loads before it stores any: all of its pairs for heads of up to 256 numbers.
#define ROPE_HELD 4

// Stores a number in the type of the cache. Numbers that f16 cannot hold become its largest, as on the CPU; infinity
// and NaN stay.
__device__ __forceinline__ void store_kv(uint32_t kind, void* to, uint32_t at, float value) {
    if (kind == KV_F32) {
        static_cast<float*>(to)[at] = value;
    } else if (kind == KV_F16) {
        const float most = 65504.0f, size = fabsf(value);
        static_cast<__half*>(to)[at] = __float2half_rn(size > most && size <= 3.402823466e38f ? copysignf(most, value) : value);
    } else {
        static_cast<uint16_t*>(to)[at] = uint16_t(bf16_bits(value));
    }
}

// Work on one head.
struct HeadWork {
    const float* from;
    const float* norm;    // (head_dim), or null
    const float* angles;  // cosines, then sines of `half` pairs
    uint32_t half;        // the first 2 * half numbers are rotated; the others are not
    bool adjacent;        // numbers 2i and 2i + 1 are rotated together; else numbers i and half + i
    float scale;
    uint32_t kind;  // KvKind of what is stored
    void* to;       // may be `from`
};

// Returns 1 / sqrt(mean(head^2) + eps) to all lanes of the warp.
__device__ __forceinline__ float head_scale(const float* head, uint32_t head_dim, float eps) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % WARP; i < head_dim; i += WARP) {
        sum = fmaf(head[i], head[i], sum);
    }
    return 1.0f / sqrtf(warp_sum(sum) / float(head_dim) + eps);
}

// Normalizes, rotates, scales and stores a head with one warp. The numbers are processed in pairs: first those that are
// rotated together, then the others, any two at a time.
__device__ __forceinline__ void turn(const HeadWork& work, uint32_t head_dim, float eps) {
    const uint32_t half = work.half, kept = (head_dim - 2 * half + 1) / 2, pairs = half + kept;
    // The sum over the warp also ensures that no lane writes before all lanes have read the head.
    const float norm = work.norm ? head_scale(work.from, head_dim, eps) : 1.0f;
    for (uint32_t first = threadIdx.x % WARP; first < pairs; first += WARP * ROPE_HELD) {
        float a[ROPE_HELD], b[ROPE_HELD], cosine[ROPE_HELD], sine[ROPE_HELD];
        uint32_t at[ROPE_HELD], other[ROPE_HELD];
#pragma unroll
        for (uint32_t i = 0; i < ROPE_HELD; i++) {
            const uint32_t pair = first + i * WARP;
            at[i] = pair >= half ? pair + half : work.adjacent ? 2 * pair : pair;
            other[i] = at[i] + (pair >= half ? kept : work.adjacent ? 1 : half);
            a[i] = b[i] = cosine[i] = sine[i] = 0.0f;
            if (pair < half) {
                cosine[i] = work.angles[pair];
                sine[i] = work.angles[half + pair];
            }
            if (pair < pairs) {
                a[i] = work.from[at[i]] * (work.norm ? norm * work.norm[at[i]] : 1.0f);
            }
            if (pair < pairs && other[i] < head_dim) {
                b[i] = work.from[other[i]] * (work.norm ? norm * work.norm[other[i]] : 1.0f);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < ROPE_HELD; i++) {
            const uint32_t pair = first + i * WARP;
            const bool turns = pair < half;
            if (pair < pairs) {
                store_kv(work.kind, work.to, at[i], (turns ? a[i] * cosine[i] - b[i] * sine[i] : a[i]) * work.scale);
            }
            if (pair < pairs && other[i] < head_dim) {
                store_kv(work.kind, work.to, other[i], (turns ? b[i] * cosine[i] + a[i] * sine[i] : b[i]) * work.scale);
            }
        }
    }
}

// Stores a head in a cache of KV_INT8 with one warp: for each block, the scale is the largest magnitude divided by 127,
// and the codes are the numbers divided by it. NaN counts as zero.
__device__ __forceinline__ void store_codes(const float* from, uint64_t to, uint32_t slot, uint32_t head_dim) {
    const uint32_t lane = threadIdx.x % WARP, blocks = kv_blocks(head_dim);
    int8_t* codes = reinterpret_cast<int8_t*>(to) + slot * head_dim;
    float* scales = reinterpret_cast<float*>(to + PAGE * head_dim) + slot * blocks;
#pragma unroll 1
    for (uint32_t block = 0; block < blocks; block++) {
        const uint32_t column = block * KV_BLOCK + lane;
        const float value = column < head_dim ? from[column] : 0.0f;
        float largest = fmaxf(0.0f, fabsf(value));
#pragma unroll
        for (int step = WARP / 2; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
        }
        const float scale = largest / 127.0f, inverse = 1.0f / scale;
        // The inverse of zero, or of a number near it, is not finite.
        const float scaled = inverse <= 3.402823466e38f ? value * inverse : 0.0f;
        if (column < head_dim) {
            codes[column] = int8_t(scaled == scaled ? __float2int_rn(fminf(fmaxf(scaled, -127.0f), 127.0f)) : 0);
        }
        if (lane == 0) {
            scales[block] = scale;
        }
    }
}

// Address of position `slot` of a page, in keys or values of `dim` numbers of a type other than KV_INT8 at `place`.
__device__ __forceinline__ void* kv_slot(uint32_t kind, uint64_t place, uint32_t slot, uint32_t dim) {
    return reinterpret_cast<uint8_t*>(place) + uint64_t(slot) * dim * (kind == KV_F32 ? 4 : 2);
}

// For each row: queries are normalized (with `q_norm`), rotated and scaled in place; keys are normalized and rotated,
// values are normalized (with `v_norm`), and both are stored in the cache.
//
// Grid: (ceil((n_heads + 2 * kv_heads) / 4), n). Block: 128, a warp per head. Dynamic shared memory: none.
// Any head_dim and value_dim; rotary_dim is even and at most head_dim. Rows of one sequence differ in position, so no
// two write the same bytes.
KERNEL rope(Rope a) {
    // Index of the warp's head; query heads are counted first, then the heads of keys, then those of values.
    const uint32_t unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    const Cache& cache = a.cache;
    if (unit >= a.n_heads + 2 * a.kv_heads) {
        return;
    }
    const Row at = a.rows[row];
    HeadWork work;
    work.angles = a.angles + uint64_t(row) * a.rotary_dim, work.half = a.rotary_dim / 2;
    work.adjacent = a.adjacent != 0;
    if (unit < a.n_heads) {
        float* q = a.q + (uint64_t(row) * a.n_heads + unit) * cache.head_dim;
        work.from = q, work.norm = a.q_norm, work.scale = a.q_scale * at.q_factor;
        work.kind = KV_F32, work.to = q;
        turn(work, cache.head_dim, a.eps);
        return;
    }
    const bool is_value = unit >= a.n_heads + a.kv_heads;
    const uint32_t head = unit - a.n_heads - (is_value ? a.kv_heads : 0), slot = at.position % PAGE;
    const uint32_t dim = is_value ? cache.value_dim : cache.head_dim;
    const uint64_t place = kv_part(cache, at.sequence, head, is_value ? 1 : 0, at.position);
    float* own = (is_value ? a.v : a.k) + (uint64_t(row) * a.kv_heads + head) * dim;
    work.from = own, work.norm = is_value ? a.v_norm : a.k_norm, work.scale = 1.0f;
    work.half = is_value ? 0 : work.half;
    if (cache.kind != KV_INT8) {
        work.kind = cache.kind, work.to = kv_slot(cache.kind, place, slot, dim);
        turn(work, dim, a.eps);
        return;
    }
    if (!is_value || a.v_norm) {
        work.kind = KV_F32, work.to = own;
        turn(work, dim, a.eps);
        __syncwarp();
    }
    store_codes(own, place, slot, dim);
}
