// Attention of single rows (flash decoding): each text is cut into parts that blocks compute independently, and the results of the
// parts are put together by `attention_combine`. Here for all types and shapes; `attention_decode_mma.cuh` has the fast ones.
//
// How many parts: blocks = splits * kv_heads * chunks * n, chunks = ceil(n_heads / kv_heads / 8). As positions are read from device
// memory, `splits` may be chosen once for a captured graph. For a device with N multiprocessors and texts of up to `longest`
// positions (`window`, if that is less):
//     splits = clamp(resident * N / (kv_heads * chunks * n), 1, ceil(longest / 64)), at most 1024,
// where `resident`, the blocks that fit a multiprocessor together, is stated at each kernel.
// `partial` holds n * n_heads * splits * (head_dim + 2) floats: the values, m, l.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"

// Query heads that share a key/value head and are computed together.
#define DECODE_HEADS 8
#define DECODE_THREADS 128
#define DECODE_WARPS (DECODE_THREADS / 32)

// What a block of decoding computes: some heads of a row over some steps of its text.
struct DecodePart {
    uint32_t row;
    uint32_t sequence;
    uint32_t kv_head;
    uint32_t first_head;
    uint32_t heads;
    Visible visible;
    uint32_t begin;  // steps begin .. end of `step` positions
    uint32_t end;

    // For grid (splits, kv_heads * chunks, n). A part without steps is possible.
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

    // Where the results for a head go.
    __device__ __forceinline__ float* partial(const Attention& a, uint32_t head) const {
        const uint64_t at = (uint64_t(row) * a.n_heads + first_head + head) * gridDim.x + blockIdx.x;
        return a.partial + at * (a.cache.head_dim + 2);
    }

    __device__ __forceinline__ const float* query(const Attention& a, uint32_t head) const {
        return a.q + uint64_t(row) * a.q_stride + (first_head + head) * a.cache.head_dim;
    }
};

// Shared memory of `decode`, for steps of 32 positions.
struct DecodeRoom {
    float* keys;     // (32, head_dim + 1)
    float* queries;  // (DECODE_HEADS, head_dim): zeros where there is no head
    float* weights;  // (DECODE_HEADS, 32)
    float* keep;     // (DECODE_HEADS): what multiplies the values that were gathered before

    __device__ __forceinline__ DecodeRoom(uint32_t dim) {
        keys = reinterpret_cast<float*>(dynamic_shared());
        queries = keys + 32 * (dim + 1);
        weights = queries + DECODE_HEADS * dim;
        keep = weights + DECODE_HEADS * 32;
    }
};

// Copies the keys of a step to shared memory, zeros for what is not visible.
template <typename T>
__device__ __forceinline__ void load_step(const typename T::Element* page, const Visible& visible, uint32_t start, uint32_t dim,
                                          float* keys) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t pair = lane; pair < dim / 2; pair += 32) {
#pragma unroll
        for (uint32_t i = 0; i < 32 / DECODE_WARPS; i++) {
            const uint32_t slot = warp + DECODE_WARPS * i, position = start + slot;
            float2 key = make_float2(0.0f, 0.0f);
            if (visible.has(position)) {
                key = T::two(page + position % PAGE * dim + 2 * pair);
            }
            keys[slot * (dim + 1) + 2 * pair] = key.x;
            keys[slot * (dim + 1) + 2 * pair + 1] = key.y;
        }
    }
}

// Scores of the heads `warp` and `warp + DECODE_WARPS`, a position per lane, become weights. `m` and `l` are those of the two heads,
// `l` for this lane's positions alone.
__device__ __forceinline__ void weigh_step(const Attention& a, const DecodeRoom& room, bool seen, float m[2], float l[2]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = a.cache.head_dim;
    const float *key = room.keys + lane * (dim + 1), *query = room.queries + warp * dim;
    float scores[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (uint32_t d = 0; d < dim; d++) {
        scores[0] += query[d] * key[d];
        scores[1] += query[DECODE_WARPS * dim + d] * key[d];
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        float score = a.softcap != 0.0f ? capped(scores[i], a.softcap, 1.0f / a.softcap) : scores[i];
        score = seen ? score : NEG_INF;
        float larger = m[i] < score ? score : m[i];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            larger = fmaxf(larger, __shfl_xor_sync(FULL_WARP, larger, step));
        }
        const float reference = reference_of(larger), keep = exp2_of(m[i] - reference), weight = exp2_of(score - reference);
        l[i] = l[i] * keep + weight;
        m[i] = larger;
        const uint32_t head = warp + DECODE_WARPS * i;
        room.weights[head * 32 + lane] = weight;
        if (lane == 0) {
            room.keep[head] = keep;
        }
    }
}

template <typename T>
__device__ __forceinline__ void decode(const Attention& a) {
    const DecodePart part(a, 32);
    const uint32_t dim = a.cache.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = threadIdx.x;
    const DecodeRoom room(dim);
    for (uint32_t i = threadIdx.x; i < DECODE_HEADS * dim; i += DECODE_THREADS) {
        const uint32_t head = i / dim;
        room.queries[i] = head < part.heads ? part.query(a, head)[i - head * dim] : 0.0f;
    }
    float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f};
    float2 sums[DECODE_HEADS];
#pragma unroll
    for (uint32_t head = 0; head < DECODE_HEADS; head++) {
        sums[head] = make_float2(0.0f, 0.0f);
    }
    for (uint32_t step = part.begin; step < part.end; step++) {
        const uint32_t start = step * 32;
        const typename T::Element* page = page_of<T>(a.cache, part.sequence, part.kv_head, start);
        load_step<T>(page, part.visible, start, dim, room.keys);
        __syncthreads();
        if (warp < part.heads) {
            weigh_step(a, room, part.visible.has(start + lane), m, l);
        }
        __syncthreads();
        if (pair < dim / 2) {
            // What is not visible is not read: it need not be a number.
            const uint32_t from = part.visible.first > start ? part.visible.first - start : 0;
            const uint32_t to = part.visible.last - start < 32 ? part.visible.last - start + 1 : 32;
            const typename T::Element* values = page + (PAGE + start % PAGE) * dim + 2 * pair;
#pragma unroll
            for (uint32_t head = 0; head < DECODE_HEADS; head++) {
                if (head < part.heads) {
                    sums[head].x *= room.keep[head];
                    sums[head].y *= room.keep[head];
                }
            }
#pragma unroll 4
            for (uint32_t i = from; i < to; i++) {
                const float2 value = T::two(values + i * dim);
#pragma unroll
                for (uint32_t head = 0; head < DECODE_HEADS; head++) {
                    if (head < part.heads) {
                        sums[head].x += room.weights[head * 32 + i] * value.x;
                        sums[head].y += room.weights[head * 32 + i] * value.y;
                    }
                }
            }
        }
    }
#pragma unroll
    for (uint32_t head = 0; head < DECODE_HEADS; head++) {
        if (head < part.heads && pair < dim / 2) {
            *reinterpret_cast<float2*>(part.partial(a, head) + 2 * pair) = sums[head];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t head = warp + DECODE_WARPS * i;
        const float sum = warp_sum(l[i]);
        if (head < part.heads && lane == 0) {
            *reinterpret_cast<float2*>(part.partial(a, head) + dim) = make_float2(m[i], sum);
        }
    }
}

// Attention of each row over each part of its text, into `partial`: any even head_dim up to 256, any group.
// Grid (splits, kv_heads * chunks, n), 128 threads, 4 * (40 * head_dim + 296) bytes of dynamic shared memory; 5 blocks resident.
KERNEL __launch_bounds__(DECODE_THREADS) attention_decode_f32(Attention a) {
    decode<KvF32>(a);
}
KERNEL __launch_bounds__(DECODE_THREADS) attention_decode_f16(Attention a) {
    decode<KvF16>(a);
}
KERNEL __launch_bounds__(DECODE_THREADS) attention_decode_bf16(Attention a) {
    decode<KvBf16>(a);
}

// Puts the parts together in a fixed order and writes the result, the zeros after the last column included. Runs after every
// `attention_decode_*`, with the same arguments, also where `splits` is 1.
// Grid (n_heads, n), 128 threads, no dynamic shared memory.
KERNEL __launch_bounds__(DECODE_THREADS) attention_combine(Attention a) {
    SHARED float largest[DECODE_WARPS], totals[DECODE_WARPS];
    SHARED float2 sums[DECODE_WARPS][128];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, row = blockIdx.y;
    const uint32_t dim = a.cache.head_dim, length = dim + 2;
    const float* parts = a.partial + (uint64_t(row) * a.n_heads + head) * a.splits * length;

    float m = NEG_INF;
    for (uint32_t part = threadIdx.x; part < a.splits; part += DECODE_THREADS) {
        m = fmaxf(m, parts[uint64_t(part) * length + dim]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, step));
    }
    if (lane == 0) {
        largest[warp] = m;
    }
    __syncthreads();
    const float sink = a.sinks ? a.sinks[head] : NEG_INF;
    m = sink;
    for (uint32_t i = 0; i < DECODE_WARPS; i++) {
        m = fmaxf(m, largest[i]);
    }
    const float reference = reference_of(m);

    float total = 0.0f;
    float2 own[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        own[j] = make_float2(0.0f, 0.0f);
    }
    for (uint32_t part = warp; part < a.splits; part += DECODE_WARPS) {
        const float* values = parts + uint64_t(part) * length;
        const float2 state = *reinterpret_cast<const float2*>(values + dim);
        const float weight = exp2_of(state.x - reference);
        total += weight * state.y;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            if (lane + 32 * j < dim / 2) {
                const float2 value = *reinterpret_cast<const float2*>(values + 2 * (lane + 32 * j));
                own[j].x += weight * value.x;
                own[j].y += weight * value.y;
            }
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        sums[warp][lane + 32 * j] = own[j];
    }
    if (lane == 0) {
        totals[warp] = total;
    }
    __syncthreads();
    total = exp2_of(sink - reference);
    for (uint32_t i = 0; i < DECODE_WARPS; i++) {
        total += totals[i];
    }
    const uint32_t pair = threadIdx.x;
    if (pair < dim / 2) {
        float2 sum = sums[0][pair];
        for (uint32_t i = 1; i < DECODE_WARPS; i++) {
            sum.x += sums[i][pair].x;
            sum.y += sums[i][pair].y;
        }
        put(a.out, row, head * dim + 2 * pair, sum.x / total);
        put(a.out, row, head * dim + 2 * pair + 1, sum.y / total);
    }
    if (head + 1 == a.n_heads) {
        pad(a.out, row, a.n_heads * dim, threadIdx.x, DECODE_THREADS);
    }
}
