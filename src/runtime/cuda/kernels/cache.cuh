// Layout of the KV cache in device memory. A page holds for each layer and key/value head the keys of PAGE positions,
// then the values. Keys are (PAGE, head_dim) numbers, values (PAGE, value_dim); those of KV_INT8 are followed by (PAGE,
// blocks) scales, one f32 for each block of KV_BLOCK numbers of a position.
#pragma once
#include "args.cuh"

// Numbers of a key or value that share a scale in a cache of KV_INT8.
#define KV_BLOCK 32

__device__ __forceinline__ uint32_t kv_blocks(uint32_t dim) {
    return (dim + KV_BLOCK - 1) / KV_BLOCK;
}

// Bytes of the keys, or of the values, of one head in a page.
__device__ __forceinline__ uint32_t kv_bytes(uint32_t kind, uint32_t dim) {
    if (kind == KV_INT8) {
        return PAGE * (dim + 4 * kv_blocks(dim));
    }
    return PAGE * dim * (kind == KV_F32 ? 4 : 2);
}

// Address of the keys of one head in the page that holds `position`; the values follow them. `key_bytes` and
// `value_bytes` are those of a head.
__device__ __forceinline__ uint64_t kv_address(const Cache& cache, uint32_t key_bytes, uint32_t value_bytes,
                                               uint32_t sequence, uint32_t head, uint32_t position) {
    const uint64_t page = cache.pages[uint64_t(sequence) * cache.table_stride + position / PAGE];
    return page + cache.layer_offset + uint64_t(head) * (key_bytes + value_bytes);
}

// Address of the keys (part 0) or values (part 1) of one head in the page that holds `position`, for any type.
__device__ __forceinline__ uint64_t kv_part(const Cache& cache, uint32_t sequence, uint32_t head, uint32_t part,
                                            uint32_t position) {
    const uint32_t key_bytes = kv_bytes(cache.kind, cache.head_dim);
    const uint32_t value_bytes = kv_bytes(cache.kind, cache.value_dim);
    return kv_address(cache, key_bytes, value_bytes, sequence, head, position) + (part == 0 ? 0 : key_bytes);
}
