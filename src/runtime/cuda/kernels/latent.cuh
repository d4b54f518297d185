// Multi-head latent attention: rotation, and storing of keys and values that were expanded from one vector per token.
#pragma once
#include "rope.cuh"

// Scales and stores `kept` numbers of a head, and after them the `rope` numbers of `tail`, which are rotated.
__device__ __forceinline__ void turn_tail(const float* from, uint32_t kept, HeadWork tail, uint32_t rope, void* to) {
    turn({from, nullptr, nullptr, 0, false, tail.scale, tail.kind, to}, kept, 0.0f);
    tail.to = static_cast<uint8_t*>(to) + uint64_t(kept) * (tail.kind == KV_F32 ? 4 : 2);
    turn(tail, rope, 0.0f);
}

// For each row: the last `rope` numbers of each head of queries are rotated, and queries are scaled in place; keys are
// put together from the numbers of their head and the rotated ones that all heads share, and stored in the cache like
// the values.
//
// Grid: (ceil(3 * n_heads / 4), n). Block: 128, a warp per head. Dynamic shared memory: none. Any nope and value_dim;
// rope is even. Rows of one sequence differ in position, so no two write the same bytes.
KERNEL latent_rope(LatentRope a) {
    // Index of the warp's head; query heads are counted first, then the heads of keys, then those of values.
    const uint32_t unit = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    const Cache& cache = a.cache;
    if (unit >= 3 * a.n_heads) {
        return;
    }
    const Row at = a.rows[row];
    const uint32_t head = unit % a.n_heads, slot = at.position % PAGE;
    const uint64_t heads_before = uint64_t(row) * a.n_heads + head;
    const float* angles = a.angles + uint64_t(row) * a.rope;
    const uint32_t half = a.angles ? a.rope / 2 : 0;
    HeadWork tail = {nullptr, nullptr, angles, half, a.adjacent != 0, 1.0f, KV_F32, nullptr};
    if (unit < a.n_heads) {
        float* q = a.q + heads_before * cache.head_dim;
        tail.from = q + a.nope, tail.scale = a.q_scale * at.q_factor;
        turn_tail(q, a.nope, tail, a.rope, q);
        return;
    }
    const bool is_value = unit >= 2 * a.n_heads;
    const uint64_t place = kv_part(cache, at.sequence, head, is_value ? 1 : 0, at.position);
    const float* expanded = a.expanded + heads_before * (a.nope + cache.value_dim);
    if (is_value) {
        if (cache.kind == KV_INT8) {
            store_codes(expanded + a.nope, place, slot, cache.value_dim);
            return;
        }
        void* to = kv_slot(cache.kind, place, slot, cache.value_dim);
        turn({expanded + a.nope, nullptr, nullptr, 0, false, 1.0f, cache.kind, to}, cache.value_dim, 0.0f);
        return;
    }
    tail.from = a.latent + uint64_t(row + 1) * a.latent_stride - a.rope;
    if (cache.kind != KV_INT8) {
        tail.kind = cache.kind;
        turn_tail(expanded, a.nope, tail, a.rope, kv_slot(cache.kind, place, slot, cache.head_dim));
        return;
    }
    float* k = a.k + heads_before * cache.head_dim;
    turn_tail(expanded, a.nope, tail, a.rope, k);
    __syncwarp();
    store_codes(k, place, slot, cache.head_dim);
}
