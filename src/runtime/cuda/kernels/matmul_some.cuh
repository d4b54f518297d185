// Matrix products of 9 to about 64 rows of x with tiles, on tensor cores. Such products are still limited by memory.
//
// 8 warps compute, 4 warps copy activations. Each computing warp copies the codes of its tile, with their scales, to
// shared memory of its own, many blocks ahead. The copies of a thread complete in order. Therefore other threads copy
// the activations, which cannot be copied so far ahead because shared memory is too small.
#pragma once
#include "matmul_many.cuh"

#ifdef TENSOR_CORES

#define SOME_THREADS 384
#define SOME_COPIERS 128

// Number of blocks of codes that a warp has in shared memory.
template <int PASSES>
constexpr int some_depth() {
    return PASSES == 1 ? 12 : 8;
}

// Bytes of the largest block: 8-bit codes, f32 scales, zero points.
#define SOME_SLOT (512 + 64 + 16)
#define SOME_BYTES(PASSES) (STAGES * PASSES * ShapeSome::PASS * 2 + 8 * some_depth<PASSES>() * SOME_SLOT)
static_assert(SOME_BYTES(1) == 81408 && SOME_BYTES(2) == 87040, "as matmul.cuh says");

// Ring buffer of the blocks of a tile in a warp's part of shared memory. Each of its DEPTH slots holds one block: the
// codes, then 64 bytes for scales, then 16 bytes for zero points. A lane copies 16 bytes of the codes of each block, or
// of its scales or zero points.
template <int DEPTH>
struct Ring {
    const uint8_t* from;    // source of this lane in block or group 0
    const uint8_t* scales;  // source of the scales of 8-bit codes, whose codes occupy all lanes
    SharedAddress slots;    // destination in the first slot
    uint32_t step;          // bytes from block to block or from group to group
    uint32_t scale_step;
    uint32_t block_bytes;
    uint32_t slot_bytes;
    uint32_t group_shift;
    bool active, codes, scales_too;

    __device__ __forceinline__ Ring(const Matrix& w, const uint8_t* tile, SharedAddress room, uint32_t lane) {
        const uint32_t size = w.scale_kind == SCALE_F32 ? 4 : w.scale_kind == SCALE_E8M0 ? 1 : 2;
        const uint32_t chunks = w.block_bytes / 16, extra = lane - chunks;  // lanes beyond the codes copy scales, then zero points
        codes = lane < chunks;
        const bool zeros = !codes && extra == 4;
        active = codes || extra < size || (zeros && w.kind == KIND_INT4_AFFINE);
        scales_too = chunks == 32 && lane < size;
        block_bytes = w.block_bytes;
        slot_bytes = w.block_bytes + 80;
        scale_step = TILE_ROWS * size;
        step = codes ? w.block_bytes : zeros ? TILE_ROWS : scale_step;
        scales = tile + lane * 16;
        from = codes ? tile + w.codes_offset + lane * 16 : zeros ? tile + w.zeros_offset : tile + extra * 16;
        slots = room + lane * 16;
        group_shift = w.group_blocks >= w.blocks ? 31 : 31 - __clz(w.group_blocks);
    }

    // Starts to copy a block.
    __device__ __forceinline__ void copy(uint32_t block, uint32_t slot) const {
        const SharedAddress to = slots + slot * slot_bytes;
        const uint32_t group = block >> group_shift;
        if (active) {
            cp_async_16(to, from + uint64_t(codes ? block : group) * step);
        }
        if (scales_too) {
            cp_async_16(to + block_bytes, scales + uint64_t(group) * scale_step);
        }
    }
};

__device__ __forceinline__ uint2 load_shared_two(SharedAddress from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint2*>(from);
#else
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
    return v;
#endif
}

__device__ __forceinline__ uint32_t load_shared_pair(SharedAddress from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint16_t*>(from);
#else
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
    return v;
#endif
}

__device__ __forceinline__ uint32_t load_shared_one(SharedAddress from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint32_t*>(from);
#else
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
#endif
}

// Loads a lane's share of the block in a slot.
__device__ __forceinline__ Raw<KIND_TILES> load_slot(const Matrix& w, SharedAddress slot, Lane lane) {
    Raw<KIND_TILES> raw;
    const SharedAddress codes = slot + lane.t * 64 + lane.g * 8, scales = slot + w.block_bytes;
    const uint2 first = load_shared_two(codes);
    raw.words[0] = first.x, raw.words[1] = first.y;
    if (w.kind == KIND_INT8) {
        const uint2 second = load_shared_two(codes + 256);
        raw.words[2] = second.x, raw.words[3] = second.y;
    }
    if (w.scale_kind == SCALE_F32) {
        const uint2 two = load_shared_two(scales + lane.g * 8);
        raw.scales[0] = two.x, raw.scales[1] = two.y;
    } else if (w.scale_kind == SCALE_E8M0) {
        raw.scales[0] = load_shared_pair(scales + lane.g * 2);
    } else {
        raw.scales[0] = load_shared_one(scales + lane.g * 4);
    }
    raw.zeros = w.kind == KIND_INT4_AFFINE ? load_shared_pair(scales + 64 + lane.g * 2) : 0x0808;
    return raw;
}

template <int PASSES>
__device__ __forceinline__ void matmul_some(const Matmul& a) {
    typedef ShapeSome SHAPE;
    constexpr int DEPTH = some_depth<PASSES>();
    constexpr uint32_t STAGE_BYTES = PASSES * SHAPE::PASS * 2;
    const SharedAddress stages = shared_address(dynamic_shared()), rings = stages + STAGES * STAGE_BYTES;
    const uint32_t parts = a.shares ? 1 : (a.n + SHAPE::COLUMNS - 1) / SHAPE::COLUMNS;
    const uint32_t first_tile = blockIdx.x / parts * SHAPE::BLOCK_TILES;
    const Job job = job_of(a, blockIdx.x % parts * SHAPE::COLUMNS, SHAPE::COLUMNS);
    if (job.count == 0 || first_tile * TILE_ROWS >= a.w.rows) {
        return;
    }
    const uint32_t warp = threadIdx.x / 32, row_warp = warp % SHAPE::ROW_WARPS, k_warp = warp / SHAPE::ROW_WARPS;
    const uint32_t steps = (a.w.blocks + SHAPE::K_WARPS - 1) / SHAPE::K_WARPS;
    const Lane lane = lane_of(threadIdx.x);
    float sums[1][SHAPE::EIGHTS][4];
#pragma unroll
    for (int i = 0; i < SHAPE::EIGHTS * 4; i++) {
        sums[0][i / 4][i % 4] = 0.0f;
    }
    const bool computes = warp < 8;
    const uint32_t tile = min(first_tile + row_warp, (a.w.rows - 1) / TILE_ROWS);
    const SharedAddress room = rings + (computes ? warp : 0) * DEPTH * SOME_SLOT;
    const Ring<DEPTH> ring(a.w, job.data + uint64_t(tile) * a.w.tile_bytes, room, threadIdx.x % 32);
    Copier<SHAPE, PASSES, SOME_COPIERS> copier(a, job, stages, threadIdx.x % SOME_COPIERS);
    uint32_t next = k_warp;  // block to copy
    if (computes) {
#pragma unroll 1
        for (uint32_t slot = 0; slot < DEPTH - 1; slot++, next += SHAPE::K_WARPS) {
            if (next < a.w.blocks) {
                ring.copy(next, slot);
            }
            cp_async_commit();
        }
    } else {
#pragma unroll 1
        for (uint32_t stage = 0; stage < STAGES - 1; stage++) {
            copier.copy(stage);
        }
    }
    const SharedAddress acts = keep(stages + (k_warp * SHAPE::PART + lane.g * BLOCK + lane.t * 8) * 2);
    uint32_t stage = 0, slot = 0;
#pragma unroll 1
    for (uint32_t step = 0; step < steps; step++) {
        if (computes) {
            cp_async_wait<DEPTH - 2>();
        } else {
            cp_async_wait<STAGES - 2>();
        }
        __syncthreads();
        if (computes) {
            if (next < a.w.blocks) {
                ring.copy(next, slot == 0 ? DEPTH - 1 : slot - 1);
            }
            cp_async_commit();
            next += SHAPE::K_WARPS;
            if (step * SHAPE::K_WARPS + k_warp < a.w.blocks) {
                const Raw<KIND_TILES> raw = load_slot(a.w, room + slot * ring.slot_bytes, lane);
                Fragments<KIND_TILES> f[1];
                float2 scales[1];
                with_kind<KIND_TILES>(a.w.kind, [&](auto kind) {
                    const Raw<decltype(kind)::value> read = as_kind<decltype(kind)::value>(raw);
                    fragments_of(read, f[0]);
                    scales[0] = scales_of(a.w.scale_kind == SCALE_F32, read);
                });
                multiply_step<KIND_TILES, PASSES, SHAPE>(sums, f, scales, acts + stage * STAGE_BYTES, job.count);
            }
        } else {
            copier.copy(stage == 0 ? STAGES - 1 : stage - 1);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
    }
    cp_async_wait<0>();
    write_many<SHAPE>(a, job, first_tile, warp, lane, sums, reinterpret_cast<float*>(dynamic_shared()));
}

#endif
