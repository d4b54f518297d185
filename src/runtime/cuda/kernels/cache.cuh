// Layout of the KV cache in device memory. A page holds for each layer and key/value head the keys of PAGE positions,
// then the values. Keys, like values, are (PAGE, head_dim) numbers; those of KV_INT8 are followed by (PAGE, blocks)
// scales, one f32 for each block of KV_BLOCK numbers of a position.
#pragma once
#include "args.cuh"

// Numbers of a key or value that share a scale in a cache of KV_INT8.
#define KV_BLOCK 32

__device__ __forceinline__ uint32_t kv_blocks(uint32_t head_dim) {
    return (head_dim + KV_BLOCK - 1) / KV_BLOCK;
}

// Bytes of the keys, or of the values, of one head in a page.
__device__ __forceinline__ uint32_t kv_head_bytes(uint32_t kind, uint32_t head_dim) {
    if (kind == KV_INT8) {
        return PAGE * (head_dim + 4 * kv_blocks(head_dim));
    }
    return PAGE * head_dim * (kind == KV_F32 ? 4 : 2);
}

// Address of the keys (part 0) or values (part 1) of one head in the page that holds `position`.
__device__ __forceinline__ uint64_t kv_address(const Cache& cache, uint32_t head_bytes, uint32_t sequence, uint32_t head,
                                               uint32_t part, uint32_t position) {
    const uint64_t page = cache.pages[uint64_t(sequence) * cache.table_stride + position / PAGE];
    return page + cache.layer_offset + uint64_t(2 * head + part) * head_bytes;
}
