// Attention of single rows (flash decoding): each sequence is cut into parts that blocks compute independently, and the
// results of the parts are combined by `attention_combine`. This kernel is for all types and shapes;
// `attention_decode_mma.cuh` has faster ones for some.
//
// Number of parts of each sequence, `splits`: the grid has splits * kv_heads * chunks * n thread blocks, where chunks =
// ceil(n_heads / kv_heads / 8). As positions are read from device memory, `splits` may be chosen once for a captured
// graph. For a device with N multiprocessors and sequences of up to `longest` positions (`window`, if that is less):
//     splits = clamp(resident * N / (kv_heads * chunks * n), 1, ceil(longest / 64)), at most 1024,
// where `resident`, the number of thread blocks that fit on a multiprocessor at once, is stated at each kernel.
// `partial` holds n * n_heads * splits * (value_dim + 2) floats: for each row, head and part the weighted values, then
// m and l.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"

// Query heads that share a key/value head and are computed together.
#define DECODE_HEADS 8
#define DECODE_THREADS 128
#define DECODE_WARPS (DECODE_THREADS / 32)

// Work of a thread block in decoding: some heads of a row over some steps of its sequence.
struct DecodePart {
    uint32_t row;
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first_head;
    uint32_t heads;
    Visible visible;
    uint32_t begin;  // first step; a step is `step` positions
    uint32_t end;    // step after the last one

    // The grid is (splits, kv_heads * chunks, n). A part without steps is possible.
    __device__ __forceinline__ DecodePart(const Attention& a, uint32_t step) {
        const uint32_t group = a.n_heads / a.cache.kv_heads, chunks = (group + DECODE_HEADS - 1) / DECODE_HEADS;
        row = blockIdx.z;
        kv_head = blockIdx.y / chunks;
        const uint32_t before = blockIdx.y % chunks * DECODE_HEADS;
        first_head = kv_head * group + before;
        heads = group - before < DECODE_HEADS ? group - before : DECODE_HEADS;
        sequence = a.rows[row].sequence;
        visible = visible_at(a.rows[row].position, a.window);
        const uint32_t first = visible.first / step, steps = visible.last / step - first + 1;
        begin = first + uint32_t(uint64_t(steps) * blockIdx.x / gridDim.x);
        end = first + uint32_t(uint64_t(steps) * (blockIdx.x + 1) / gridDim.x);
    }

    // Address of the results of a head.
    __device__ __forceinline__ float* partial(const Attention& a, uint32_t head) const {
        const uint64_t at = (uint64_t(row) * a.n_heads + first_head + head) * gridDim.x + blockIdx.x;
        return a.partial + at * (a.cache.value_dim + 2);
    }

    __device__ __forceinline__ const float* query(const Attention& a, uint32_t head) const {
        return a.q + uint64_t(row) * a.q_stride + (first_head + head) * a.cache.head_dim;
    }
};

// Multiplies the sums of each head by its factor, row PLAIN_STEP of `weights`, and adds the weighted sums of two
// columns of `rows`.
__device__ __forceinline__ void add_rows(uint32_t heads, const float* weights, const float* rows, uint32_t stride,
                                         float2 (&sums)[DECODE_HEADS]) {
#pragma unroll
    for (uint32_t half = 0; half < DECODE_HEADS; half += 4) {
        if (half >= heads) {
            break;
        }
        const float4 keep = *reinterpret_cast<const float4*>(weights + PLAIN_STEP * DECODE_HEADS + half);
        float2* own = sums + half;
        own[0] = make_float2(own[0].x * keep.x, own[0].y * keep.x);
        own[1] = make_float2(own[1].x * keep.y, own[1].y * keep.y);
        own[2] = make_float2(own[2].x * keep.z, own[2].y * keep.z);
        own[3] = make_float2(own[3].x * keep.w, own[3].y * keep.w);
#pragma unroll 2
        for (uint32_t slot = 0; slot < PLAIN_STEP; slot++) {
            const float4 weight = *reinterpret_cast<const float4*>(weights + slot * DECODE_HEADS + half);
            const float2 value = *reinterpret_cast<const float2*>(rows + slot * stride);
            own[0].x += weight.x * value.x;
            own[0].y += weight.x * value.y;
            own[1].x += weight.y * value.x;
            own[1].y += weight.y * value.y;
            own[2].x += weight.z * value.x;
            own[2].y += weight.z * value.y;
            own[3].x += weight.w * value.x;
            own[3].y += weight.w * value.y;
        }
    }
}

// Computes attention of values of up to PAIRS * 2 * DECODE_THREADS numbers.
template <int PAIRS>
__device__ __forceinline__ void decode_plain(const Attention& a) {
    const DecodePart part(a, PLAIN_STEP);
    const uint32_t dim = a.cache.head_dim, value_dim = a.cache.value_dim, stride = plain_stride(a.cache);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* queries = reinterpret_cast<float*>(dynamic_shared());  // (DECODE_HEADS, stride): zeros where there is no head
    float* rows = queries + DECODE_HEADS * stride;                // (PLAIN_STEP, stride): keys, then values
    float* weights = rows + PLAIN_STEP * stride;                  // (PLAIN_STEP + 1, DECODE_HEADS); the last row: factors of sums
    float* keep = weights + PLAIN_STEP * DECODE_HEADS;
    // A warp computes the weights of heads 2 * warp and 2 * warp + 1.
    const uint32_t own = 2 * warp;
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t d = lane; d < stride; d += 32) {
            queries[(own + i) * stride + d] = own + i < part.heads && d < dim ? part.query(a, own + i)[d] : 0.0f;
        }
    }
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f};
    float2 sums[PAIRS][DECODE_HEADS] = {};

    for (uint32_t step = part.begin; step < part.end; step++) {
        const uint32_t start = step * PLAIN_STEP;
        __syncthreads();
        load_rows(a.cache, part.sequence, part.kv_head, 0, part.visible, start, rows);
        __syncthreads();
        if (own < part.heads) {
            float scores[2];
            dots<2>(queries + own * stride, rows + lane * stride, stride, scores);
            for (uint32_t i = 0; i < 2; i++) {
                const float kept = weigh(a, part.visible.has(start + lane), &scores[i], &m[i], &l[i]);
                weights[lane * DECODE_HEADS + own + i] = scores[i];
                keep[own + i] = kept;
            }
        }
        __syncthreads();
        load_rows(a.cache, part.sequence, part.kv_head, 1, part.visible, start, rows);
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
            const uint32_t column = 2 * (threadIdx.x + i * DECODE_THREADS);
            if (column < value_dim) {
                add_rows(part.heads, weights, rows + column, stride, sums[i]);
            }
        }
    }

    for (uint32_t i = 0; i < 2; i++) {
        const float sum = warp_sum(l[i]);
        if (own + i < part.heads && lane == 0) {
            *reinterpret_cast<float2*>(part.partial(a, own + i) + value_dim) = make_float2(m[i], sum);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; i++) {
        const uint32_t column = 2 * (threadIdx.x + i * DECODE_THREADS);
        float* partial = part.partial(a, 0) + column;
#pragma unroll
        for (uint32_t head = 0; head < DECODE_HEADS; head++) {
            if (head < part.heads && column < value_dim) {
                *reinterpret_cast<float2*>(partial) = sums[i][head];
            }
            partial += uint64_t(gridDim.x) * (value_dim + 2);
        }
    }
}

// Computes attention of each row over each part of its sequence, and writes the results to `partial`. It takes any
// type, any even head_dim and value_dim up to 256 (`attention_decode_wide`: 512), and any number of query heads per
// key/value head.
//
// Grid: (splits, kv_heads * chunks, n). Block: 128. Dynamic shared memory: 4 * (40 * stride + 264) bytes, where stride
// = (the larger of head_dim and value_dim rounded up to a multiple of 4) + 4; above 296, this is more than 48 KiB, the
// default limit, which the host then has to raise. Resident thread blocks per multiprocessor: 5; wide: 2.
KERNEL __launch_bounds__(DECODE_THREADS, 5) attention_decode(Attention a) {
    decode_plain<1>(a);
}
KERNEL __launch_bounds__(DECODE_THREADS, 2) attention_decode_wide(Attention a) {
    decode_plain<2>(a);
}

// Largest number of parts and of warps of `attention_combine`, and number of loads that each thread has in flight.
#define COMBINE_PARTS 1024
#define COMBINE_WARPS 8
#define COMBINE_LOADS 8

// Returns the largest value of the block to all its threads; `room` holds a number per warp.
__device__ __forceinline__ float block_largest(float value, float* room) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
    }
    if (threadIdx.x % 32 == 0) {
        room[threadIdx.x / 32] = value;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = 0; i < blockDim.x / 32; i++) {
        value = fmaxf(value, room[i]);
    }
    return value;
}

// Combines the results of the parts in a fixed order and writes the result, including the zeros after the last column.
// It is launched after every `attention_decode*`, with the same arguments, even if `splits` is 1.
//
// Grid: (n_heads, n). Block: 256, or 128 for value_dim up to 256. Dynamic shared memory: none.
KERNEL __launch_bounds__(32 * COMBINE_WARPS, 4) attention_combine(Attention a) {
    SHARED float weights[COMBINE_PARTS], largest[COMBINE_WARPS], totals[COMBINE_WARPS];
    SHARED float2 sums[32 * COMBINE_WARPS];
    const uint32_t head = blockIdx.x, row = blockIdx.y, dim = a.cache.value_dim, length = dim + 2;
    const float* parts = a.partial + (uint64_t(row) * a.n_heads + head) * a.splits * length;

    const float sink = a.sinks ? a.sinks[head] : NEG_INF;
    float m = sink;
    for (uint32_t part = threadIdx.x; part < a.splits; part += blockDim.x) {
        weights[part] = parts[uint64_t(part) * length + dim];
        m = fmaxf(m, weights[part]);
    }
    const float reference = reference_of(block_largest(m, largest));
    float total = 0.0f;
    for (uint32_t part = threadIdx.x; part < a.splits; part += blockDim.x) {
        const float weight = exp2_of(weights[part] - reference);
        weights[part] = weight;
        total += weight * parts[uint64_t(part) * length + dim + 1];
    }
    // The barrier in `block_sum` also makes the weights visible to all threads.
    total = block_sum(total, totals) + exp2_of(sink - reference);

    // A thread adds two columns of every `slices`th part, with several loads in flight. Loads beyond the last part read
    // the last part again, and their values get weight 0.
    const uint32_t pairs = dim / 2, slices = blockDim.x / pairs, slice = threadIdx.x / pairs, column = threadIdx.x % pairs * 2;
    float2 own = make_float2(0.0f, 0.0f);
    for (uint32_t first = slice; first < a.splits && slice < slices; first += COMBINE_LOADS * slices) {
        float2 values[COMBINE_LOADS];
#pragma unroll
        for (uint32_t i = 0; i < COMBINE_LOADS; i++) {
            const uint32_t part = first + i * slices, last = a.splits - 1;
            values[i] = *reinterpret_cast<const float2*>(parts + uint64_t(part < last ? part : last) * length + column);
        }
#pragma unroll
        for (uint32_t i = 0; i < COMBINE_LOADS; i++) {
            const uint32_t part = first + i * slices;
            const float weight = part < a.splits ? weights[part] : 0.0f;
            own.x += weight * values[i].x;
            own.y += weight * values[i].y;
        }
    }
    sums[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x < pairs) {
#pragma unroll 1
        for (uint32_t i = 1; i < slices; i++) {
            own.x += sums[threadIdx.x + i * pairs].x;
            own.y += sums[threadIdx.x + i * pairs].y;
        }
        const uint32_t first = head * dim + column;
        put(a.out, row, first, own.x / total * gate_of(a, row, first));
        put(a.out, row, first + 1, own.y / total * gate_of(a, row, first + 1));
    }
    if (head + 1 == a.n_heads) {
        pad(a.out, row, a.n_heads * dim, threadIdx.x, blockDim.x);
    }
}
