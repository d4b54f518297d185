// The end of the forward pass: scales and caps logits, and finds the largest ones.
#pragma once
#include "acts.cuh"
#include "gated.cuh"
#include "reduce.cuh"

// Returns the sort key of a logit and its index: larger for a larger logit, and among equal logits for a lower index. 0
// is less than all keys.
__device__ __forceinline__ uint64_t key_of(float logit, uint32_t place) {
    return uint64_t(rank_of(logit)) << 32 | uint32_t(~place);
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

__device__ __forceinline__ uint64_t warp_largest(uint64_t key) {
    const uint32_t high = uint32_t(key >> 32), top = warp_max(high);
    const uint32_t low = warp_max(high == top ? uint32_t(key) : 0);
    return uint64_t(top) << 32 | low;
}

// Largest of the logits that this thread has read so far in a part of a row.
struct Sight {
    float scale;
    float softcap;
    uint32_t rank;
    uint32_t place;
};

__device__ __forceinline__ float seen(Sight& sight, float logit, uint32_t place) {
    logit *= sight.scale;
    if (sight.softcap != 0.0f) {
        logit = sight.softcap * tanhf(logit / sight.softcap);
    }
    const uint32_t rank = rank_of(logit);
    if (rank > sight.rank) {  // indices ascend within a thread, so the first of equal logits stays
        sight.rank = rank;
        sight.place = place;
    }
    return logit;
}

// Scales and caps the logits of a part (where there is a factor or a cap), and finds its largest.
//
// Grid: (parts, n), n at most 65535. Block: 256. Dynamic shared memory: none. Any vocabulary and number of parts; a
// fast number is ceil(vocab / 2048) parts, at most 512.
KERNEL logits_parts(Logits a) {
    const uint32_t span = ((a.vocab + a.parts - 1) / a.parts + 3) & ~3u, row = blockIdx.y;
    const uint64_t begin = uint64_t(blockIdx.x) * span;
    const uint32_t first = begin < a.vocab ? uint32_t(begin) : a.vocab;
    const uint32_t end = a.vocab - first < span ? a.vocab : first + span;
    float* logits = a.logits + uint64_t(row) * a.vocab;
    const bool changes = a.scale != 1.0f || a.softcap != 0.0f;
    Sight sight = {a.scale, a.softcap, 0, 0xffffffffu};
    uint32_t i = first + 4 * threadIdx.x;
    if (a.vocab % 4 == 0 && on_16_bytes(a.logits)) {
#pragma unroll 2
        for (; i < end; i += 4 * blockDim.x) {
            float4 x = four_of(logits + i);
            x.x = seen(sight, x.x, i), x.y = seen(sight, x.y, i + 1);
            x.z = seen(sight, x.z, i + 2), x.w = seen(sight, x.w, i + 3);
            if (changes) {
                *reinterpret_cast<float4*>(logits + i) = x;
            }
        }
    } else {
        for (i = first + threadIdx.x; i < end; i += blockDim.x) {
            const float x = seen(sight, logits[i], i);
            if (changes) {
                logits[i] = x;
            }
        }
    }
    SHARED uint64_t room[WARP];
    const uint64_t key = warp_largest(uint64_t(sight.rank) << 32 | uint32_t(~sight.place));
    if (threadIdx.x % WARP == 0) {
        room[threadIdx.x / WARP] = key;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t best = 0;
        for (uint32_t warp = 0; warp < blockDim.x / WARP; warp++) {
            best = larger(best, room[warp]);
        }
        // A part without logits yields NaN and an index beyond all others.
        a.partial[uint64_t(row) * a.parts + blockIdx.x] = logit_of(uint32_t(best >> 32));
        a.places[uint64_t(row) * a.parts + blockIdx.x] = best == 0 ? 0xffffffffu : ~uint32_t(best);
    }
}

// Sorts TOP_K_SPAN keys with a bitonic network, the largest first; called by a whole thread block.
__device__ __forceinline__ void sort_keys(uint64_t* keys) {
#pragma unroll 1
    for (uint32_t size = 2; size <= TOP_K_SPAN; size *= 2) {
#pragma unroll 1
        for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < TOP_K_SPAN / 2; i += blockDim.x) {
                const uint32_t low = 2 * i - (i & (stride - 1)), high = low + stride;
                const uint64_t a = keys[low], b = keys[high];
                if ((a < b) == ((low & size) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    }
    __syncthreads();
}

// Finds the k largest of each part of TOP_K_SPAN numbers. The host launches it again and again: the keys that one
// launch writes are the numbers of the next (len = parts * k), until there is one part; that launch writes ids and
// values. Values have the bits of the logits, except NaN, whose bits are lost, and zeros, which become positive. If k >
// len, the ids beyond len are 0xffffffff.
//
// Grid: (parts, n) with parts = ceil(len / TOP_K_SPAN), n at most 65535. Block: 512. Dynamic shared memory: none. k at
// most 1024.
KERNEL __launch_bounds__(512) top_k(TopK a) {
    SHARED uint64_t keys[TOP_K_SPAN];
    const uint32_t first = blockIdx.x * TOP_K_SPAN;
    const uint64_t row = blockIdx.y;
    for (uint32_t i = threadIdx.x; i < TOP_K_SPAN; i += blockDim.x) {
        const uint32_t place = first + i;
        uint64_t key = 0;
        if (place < a.len) {
            key = a.logits ? key_of(a.logits[row * a.len + place], place) : a.from[row * a.len + place];
        }
        keys[i] = key;
    }
    sort_keys(keys);
    for (uint32_t i = threadIdx.x; i < a.k; i += blockDim.x) {
        if (a.parts > 1) {
            a.to[(row * a.parts + blockIdx.x) * a.k + i] = keys[i];
        } else {
            a.ids[row * a.k + i] = keys[i] == 0 ? 0xffffffffu : ~uint32_t(keys[i]);
            a.values[row * a.k + i] = logit_of(uint32_t(keys[i] >> 32));
        }
    }
}
