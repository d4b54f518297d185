// Changes of products by adapters (LoRA, DoRA): y = gain * (y + scale * B (A x)) + factor * add, in f32.
//
// `low_rank_input` computes h = A x, `low_rank` the rest. A launch computes all adapters of up to three products. Each
// result is summed in an order that depends on the sizes of its own matrices only, so its bits depend neither on other
// rows nor on other adapters in the launch.
#pragma once
#include "plain_weights.cuh"
#include "reduce.cuh"

#define LOW_RANK_THREADS 256
// Rows of x that a thread block computes at once.
#define LOW_RANK_ROWS 8
// Rows of A per thread block of `low_rank_input`.
#define LOW_RANK_LANES 4
// Columns of y per thread block of `low_rank`.
#define LOW_RANK_COLUMNS 128

// Consecutive rows of y with the same adapters and, in a stack, the same expert.
struct Span {
    uint32_t first;
    uint32_t count;
    uint32_t expert;
};

// Returns how many of `count` ascending numbers are less than `limit`.
__device__ __forceinline__ uint32_t count_below(const uint32_t* numbers, uint32_t count, uint32_t limit) {
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (numbers[middle] < limit) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Returns the rows of this thread block that an entry names: at most LOW_RANK_ROWS of them, or those of a share. They
// are counted from `from`. The pairs of a share ascend by their row of the batch.
__device__ __forceinline__ Span span_of(const LowRank& a, const Adapted& adapted) {
    const uint32_t end = adapted.first + adapted.count;
    if (a.shares == nullptr) {
        const uint32_t until = min(end, a.from + a.n);
        const uint32_t first = (adapted.first > a.from ? adapted.first : a.from) + blockIdx.y * LOW_RANK_ROWS;
        return {first - a.from, first < until ? min(until - first, uint32_t(LOW_RANK_ROWS)) : 0, 0};
    }
    if (blockIdx.y >= *a.count) {
        return {0, 0, 0};
    }
    const Share share = a.shares[blockIdx.y];
    const uint32_t* rows = a.inputs + share.first;
    const uint32_t first = count_below(rows, share.count, adapted.first);
    return {share.first + first, count_below(rows, share.count, end) - first, share.expert};
}

__device__ __forceinline__ const Change& change_of(const LowRank& a, const Adapted& adapted, uint32_t product,
                                                        uint32_t expert) {
    const Change* change = adapted.changes + a.index + product;
    return change->experts ? change->experts[expert] : *change;
}

// Returns the results of A of a row of y.
__device__ __forceinline__ float* results_of(const LowRank& a, uint32_t product, uint32_t part, uint32_t row) {
    return a.h + (product * a.parts + part) * a.part_stride + uint64_t(row) * a.h_stride;
}

// Returns W columns of a row of activations in the finest form that they have.
template <int W>
__device__ __forceinline__ Lanes<W> finest_lanes(const Acts& x, uint32_t row, uint32_t column) {
    if (x.f32) {
        return load_lanes<W>(x.f32 + uint64_t(row) * x.stride + column);
    }
    const uint64_t at = uint64_t(row) * x.half_stride + place(column);
    Lanes<W> lanes;
    if constexpr (W == 4) {
        // The order of `in_place`.
        const uint2 hi = *reinterpret_cast<const uint2*>(x.hi + at);
        const uint2 lo = x.lo ? *reinterpret_cast<const uint2*>(x.lo + at) : make_uint2(0, 0);
        lanes.v[0] = bf16_value(hi.x) + bf16_value(lo.x);
        lanes.v[1] = bf16_value(hi.y) + bf16_value(lo.y);
        lanes.v[2] = bf16_value(hi.x >> 16) + bf16_value(lo.x >> 16);
        lanes.v[3] = bf16_value(hi.y >> 16) + bf16_value(lo.y >> 16);
    } else {
        lanes.v[0] = bf16_value(x.hi[at]) + (x.lo ? bf16_value(x.lo[at]) : 0.0f);
    }
    return lanes;
}

// The rows of A of a thread block. Those beyond the last repeat it, and their results are not written.
struct RowsOfA {
    const uint8_t* rows[LOW_RANK_LANES];
    uint32_t kind;
    uint32_t first;
    __device__ __forceinline__ RowsOfA(const Change& change, uint32_t first, uint32_t cols)
        : kind(change.a_kind), first(first) {
#pragma unroll
        for (uint32_t i = 0; i < LOW_RANK_LANES; i++) {
            rows[i] = change.a + uint64_t(min(first + i, change.rank - 1)) * cols * (kind == KIND_F32 ? 4 : 2);
        }
    }
};

// Adds the products of this thread's columns of rows of x with rows of A; `weights_at(row, column)` returns W weights.
template <int W, int COUNT, class WeightsAt>
__device__ __forceinline__ void add_products(const LowRank& a, const uint32_t (&rows)[COUNT],
                                             float (&sums)[COUNT][LOW_RANK_LANES], WeightsAt weights_at) {
#pragma unroll 1
    for (uint32_t column = W * threadIdx.x; column < a.cols; column += W * LOW_RANK_THREADS) {
        Lanes<W> x[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[i] = finest_lanes<W>(a.x, rows[i], column);
        }
#pragma unroll
        for (int lane = 0; lane < LOW_RANK_LANES; lane++) {
            const Lanes<W> w = weights_at(lane, column);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
#pragma unroll
                for (int k = 0; k < W; k++) {
                    sums[i][lane] = fmaf(w.v[k], x[i].v[k], sums[i][lane]);
                }
            }
        }
    }
}

// Computes h for up to COUNT rows of a span, from its row `first` on.
template <int COUNT>
__device__ __forceinline__ void multiply_rows(const LowRank& a, const Change& change, const RowsOfA& of,
                                              const Span& span, uint32_t first, float* h,
                                              float (*room)[LOW_RANK_ROWS * LOW_RANK_LANES]) {
    uint32_t rows[COUNT];
    float sums[COUNT][LOW_RANK_LANES] = {};
    const uint32_t count = min(span.count - first, uint32_t(COUNT));
#pragma unroll
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t row = span.first + first + min(i, count - 1);
        rows[i] = a.gather ? a.inputs[row] : a.from + row;
    }
    const bool fours = a.cols % 4 == 0 && a.x.stride % 4 == 0 && on_16_bytes(a.x.f32) && on_16_bytes(change.a);
    if (!fours) {
        add_products<1>(a, rows, sums, [&](int i, uint32_t at) { return one_weight(of.kind, of.rows[i], at); });
    } else if (of.kind == KIND_F32) {
        add_products<4>(a, rows, sums, [&](int i, uint32_t at) { return four_weights<KIND_F32>(of.rows[i], at); });
    } else if (of.kind == KIND_F16) {
        add_products<4>(a, rows, sums, [&](int i, uint32_t at) { return four_weights<KIND_F16>(of.rows[i], at); });
    } else {
        add_products<4>(a, rows, sums, [&](int i, uint32_t at) { return four_weights<KIND_BF16>(of.rows[i], at); });
    }
#pragma unroll
    for (int i = 0; i < COUNT * LOW_RANK_LANES; i++) {
        const float sum = warp_sum(sums[i / LOW_RANK_LANES][i % LOW_RANK_LANES]);
        if (threadIdx.x % WARP == 0) {
            room[threadIdx.x / WARP][i] = sum;
        }
    }
    __syncthreads();
    const uint32_t row = threadIdx.x / LOW_RANK_LANES, lane = of.first + threadIdx.x % LOW_RANK_LANES;
    if (row < count && lane < change.rank) {
        float sum = 0.0f;
        for (uint32_t warp = 0; warp < LOW_RANK_THREADS / WARP; warp++) {
            sum += room[warp][threadIdx.x];
        }
        h[uint64_t(first + row) * a.h_stride + lane] = sum;
    }
    __syncthreads();
}

// Computes h = A x. `h` may be y: a matrix in place of that of the model is an A with all outputs as its rank.
//
// Grid: (ceil(largest rank / 4), ceil(n / 8) or the largest number of shares, products * slots). Block: 256. Dynamic
// shared memory: none. Any rank and cols; `change.a` as the weights of `router`.
KERNEL __launch_bounds__(LOW_RANK_THREADS) low_rank_input(LowRank a) {
    SHARED float room[LOW_RANK_THREADS / WARP][LOW_RANK_ROWS * LOW_RANK_LANES];
    const uint32_t product = blockIdx.z / a.slots;
    const Adapted& adapted = a.adapted[blockIdx.z % a.slots];
    if (adapted.count == 0) {
        return;
    }
    const Span span = span_of(a, adapted);
    if (span.count == 0) {
        return;
    }
    const Change& change = change_of(a, adapted, product, span.expert);
    if (change.a == nullptr || blockIdx.x * LOW_RANK_LANES >= change.rank) {
        return;
    }
    const RowsOfA of(change, blockIdx.x * LOW_RANK_LANES, a.cols);
    float* h = results_of(a, product, adapted.part, span.first);
#pragma unroll 1
    for (uint32_t first = 0; first < span.count; first += LOW_RANK_ROWS) {
        if (span.count - first == 1) {
            multiply_rows<1>(a, change, of, span, first, h, room);
        } else {
            multiply_rows<LOW_RANK_ROWS>(a, change, of, span, first, h, room);
        }
    }
}

// Changes `count` numbers of a column of y; `h` has the results of A of these rows.
__device__ __forceinline__ void change_column(const LowRank& a, const Change& change, float factor, uint32_t column,
                                              uint32_t width, const float* h, uint32_t count,
                                              float (&y)[LOW_RANK_ROWS]) {
    if (change.b) {
        float sums[LOW_RANK_ROWS] = {};
#pragma unroll 2
        for (uint32_t k = 0; k < change.rank; k++) {
            const float weight = one_weight(change.b_kind, change.b, k * width + column).v[0];
#pragma unroll
            for (uint32_t i = 0; i < LOW_RANK_ROWS; i++) {
                if (i < count) {
                    sums[i] = fmaf(h[uint64_t(i) * a.h_stride + k], weight, sums[i]);
                }
            }
        }
        const float scale = change.scale * factor;
#pragma unroll
        for (uint32_t i = 0; i < LOW_RANK_ROWS; i++) {
            y[i] = fmaf(scale, sums[i], y[i]);
        }
    }
    const float gain = change.gain ? change.gain[column] : 1.0f, add = change.add ? change.add[column] : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < LOW_RANK_ROWS; i++) {
        if (change.gain) {
            y[i] = __fmul_rn(y[i], gain);
        }
        if (change.add) {
            y[i] = fmaf(change.add_scales ? factor : 1.0f, add, y[i]);
        }
    }
}

// Changes y by h, gains and added numbers; adapters of the same rows one after the other.
//
// Grid: (ceil(largest width / 128), ceil(n / 8) or the largest number of shares, products * slots). Block: 128. Dynamic
// shared memory: none. rank * width is less than 2^32.
KERNEL __launch_bounds__(LOW_RANK_COLUMNS) low_rank(LowRank a) {
    const uint32_t product = blockIdx.z / a.slots, width = a.widths[product];
    const uint32_t column = blockIdx.x * LOW_RANK_COLUMNS + threadIdx.x;
    const Adapted* adapted = a.adapted + blockIdx.z % a.slots;
    if (adapted->parts == 0 || column >= width) {
        return;
    }
    const Span span = span_of(a, *adapted);
#pragma unroll 1
    for (uint32_t from = 0; from < span.count; from += LOW_RANK_ROWS) {
        const uint32_t first = span.first + from, count = min(span.count - from, uint32_t(LOW_RANK_ROWS));
        float* to = a.y[product] + uint64_t(first) * width + column;
        float y[LOW_RANK_ROWS];
#pragma unroll
        for (uint32_t i = 0; i < LOW_RANK_ROWS; i++) {
            y[i] = i < count ? to[uint64_t(i) * width] : 0.0f;
        }
#pragma unroll 1
        for (uint32_t part = 0; part < adapted->parts; part++) {
            const Change& change = change_of(a, adapted[part], product, span.expert);
            const float* h = results_of(a, product, part, first);
            change_column(a, change, adapted[part].factor, column, width, h, count, y);
        }
#pragma unroll
        for (uint32_t i = 0; i < LOW_RANK_ROWS; i++) {
            if (i < count) {
                to[uint64_t(i) * width] = y[i];
            }
        }
    }
}
