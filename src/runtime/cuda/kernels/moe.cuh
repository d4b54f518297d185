// Mixtures of experts: the choice of experts for each row, and sorting of the row-expert pairs by expert.
#pragma once
#include "acts.cuh"
#include "gated.cuh"
#include "norm.cuh"
#include "reduce.cuh"

// Number of counters of `group`: segments of pairs times experts.
#define GROUP_CELLS 8192

// The best expert of those that are assigned to this lane (lane, lane + 32, ...) and not yet taken.
struct Candidate {
    uint32_t rank;  // 0 = none is left
    uint32_t expert;
};

// Returns this lane's candidate by `score(expert)`; bit i of `taken` is set if expert `lane + 32 i` was taken.
template <class Score>
__device__ __forceinline__ Candidate best_left(Score score, uint32_t experts, uint32_t taken) {
    Candidate best = {0, 0xffffffffu};
#pragma unroll 4
    for (uint32_t expert = threadIdx.x % WARP; expert < experts; expert += WARP) {
        const uint32_t rank = taken >> (expert / WARP) & 1 ? 0 : rank_of(score(expert));
        if (rank > best.rank) {
            best = {rank, expert};
        }
    }
    return best;
}

// Returns the expert with the n-th largest score to lane n, for n < top_k; called by a whole warp.
template <class Score>
__device__ __forceinline__ uint32_t choose(Score score, uint32_t experts, uint32_t top_k) {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t taken = 0, chosen = 0;
    Candidate own = best_left(score, experts, taken);
    for (uint32_t choice = 0; choice < top_k; choice++) {
        const uint32_t rank = warp_max(own.rank);
        const uint32_t expert = warp_min(own.rank == rank ? own.expert : 0xffffffffu);
        if (lane == choice) {
            chosen = expert;
        }
        if (own.expert == expert) {
            taken |= 1u << (expert / WARP);
            own = best_left(score, experts, taken);
        }
        __syncwarp();
    }
    return chosen;
}

// Scores of the experts of a row.
struct Scores {
    const float* logits;
    const float* bias;  // or null
    bool sigmoids;
    float top;      // without sigmoids: largest logit
    float all;      // without sigmoids: sum of e^(logit - top)
    uint32_t size;  // experts of a group; 0 = all are searched
    uint32_t open;  // bit for each group that is searched

    // Weight of an expert before weights are divided by their sum.
    __device__ __forceinline__ float weight(uint32_t expert) const {
        return sigmoids ? sigmoid(logits[expert]) : expf(logits[expert] - top) / all;
    }
    __device__ __forceinline__ float biased(uint32_t expert) const {
        return weight(expert) + (bias ? bias[expert] : 0.0f);
    }
    __device__ __forceinline__ float operator()(uint32_t expert) const {
        return size != 0 && !(open >> (expert / size) & 1) ? NEG_INF : biased(expert);
    }
};

// Returns a bit for each group of experts that is searched: those with the largest sums of their best scores. Lane g
// computes the sum of group g.
__device__ __forceinline__ uint32_t open_groups(const Route& a, const Scores& scores) {
    const uint32_t lane = threadIdx.x % WARP, size = a.experts / a.groups;
    uint32_t first = 0, second = 0;
    for (uint32_t i = 0; lane < a.groups && i < size; i++) {
        const uint32_t rank = rank_of(scores.biased(lane * size + i));
        second = rank > first ? first : rank > second ? rank : second;
        first = rank > first ? rank : first;
    }
    uint32_t left = 0, open = 0;
    if (lane < a.groups) {
        left = rank_of(logit_of(first) + (a.groups_best > 1 ? logit_of(second) : 0.0f));
    }
    for (uint32_t choice = 0; choice < a.groups_chosen; choice++) {
        const uint32_t rank = warp_max(left);
        const uint32_t group = warp_min(left == rank ? lane : WARP);
        open |= 1u << group;
        left = lane == group ? 0 : left;
    }
    return open;
}

// Added to the sum of the scores of the chosen experts, as in src/runtime/moe.rs.
#define LEAST_SUM 1e-20f

// Chooses the experts of a row by scores; called by a whole warp.
__device__ __forceinline__ void route_row_by_scores(const Route& a, uint32_t row) {
    const uint32_t lane = threadIdx.x % WARP;
    Scores scores = {a.logits + uint64_t(row) * a.experts, a.bias, a.sigmoid != 0, 0.0f, 1.0f, 0, 0};
    if (!scores.sigmoids) {
        uint32_t top = 0;
        for (uint32_t expert = lane; expert < a.experts; expert += WARP) {
            const uint32_t rank = rank_of(scores.logits[expert]);
            top = rank > top ? rank : top;
        }
        scores.top = logit_of(warp_max(top));
        float all = 0.0f;
        for (uint32_t expert = lane; expert < a.experts; expert += WARP) {
            all += expf(scores.logits[expert] - scores.top);
        }
        scores.all = warp_sum(all);
    }
    if (a.groups != 0) {
        scores.open = open_groups(a, scores);
        scores.size = a.experts / a.groups;
    }
    const uint32_t chosen = choose(scores, a.experts, a.top_k);
    const bool has = lane < a.top_k;
    const float weight = has ? scores.weight(chosen) : 0.0f, sum = warp_sum(weight);
    if (has) {
        const float factor = a.factors ? a.factors[chosen] : 1.0f;
        a.experts_of[uint64_t(row) * a.top_k + lane] = chosen;
        const float share = weight / (a.softmax_over_all ? 1.0f : sum + LEAST_SUM);
        a.weights[uint64_t(row) * a.top_k + lane] = share * a.scale * factor;
    }
}

// Chooses the experts of a row; called by a whole warp.
__device__ __forceinline__ void route_row(const Route& a, uint32_t row) {
    if (a.scored) {
        route_row_by_scores(a, row);
        return;
    }
    const uint32_t lane = threadIdx.x % WARP;
    const float* logits = a.logits + uint64_t(row) * a.experts;
    const uint32_t chosen = choose([&](uint32_t expert) { return logits[expert]; }, a.experts, a.top_k);
    const bool has = lane < a.top_k;
    const float logit = has ? logits[chosen] : 0.0f;
    const float top = __shfl_sync(FULL_WARP, logit, 0);
    const float weight = has ? expf(logit - top) : 0.0f;
    float sum = weight;
    if (a.softmax_over_all) {
        sum = 0.0f;
        for (uint32_t expert = lane; expert < a.experts; expert += WARP) {
            sum += expf(logits[expert] - top);
        }
    }
    sum = warp_sum(sum);
    if (has) {
        a.experts_of[uint64_t(row) * a.top_k + lane] = chosen;
        a.weights[uint64_t(row) * a.top_k + lane] = weight / sum * (a.factors ? a.factors[chosen] : 1.0f);
    }
}

// Chooses the top_k experts with the largest logits or scores, best first (of equal ones the first; NaN counts as the
// smallest), and computes their weights, a softmax over the chosen experts or over all, or from the scores.
//
// Grid: ceil(n / 4). Block: 128, a warp per row. Dynamic shared memory: none. At most 1024 experts; top_k at most 32
// and experts. At most 32 groups of one size, which divides the experts.
KERNEL route(Route a) {
    const uint32_t row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row < a.n) {
        route_row(a, row);
    }
}

// Counts how many pairs of each segment go to each expert: cells[segment][expert].
__device__ __forceinline__ void count_pairs(const Group& a, uint32_t* cells, uint32_t segments, uint32_t length) {
    for (uint32_t i = threadIdx.x; i < segments * a.experts; i += blockDim.x) {
        cells[i] = 0;
    }
    __syncthreads();
    for (uint32_t pair = threadIdx.x; pair < a.pairs; pair += blockDim.x) {
        atomicAdd(&cells[pair / length * a.experts + a.experts_of[pair]], 1u);
    }
    __syncthreads();
}

// Turns counts into the sorted index of the first pair of each segment and expert, and lists the shares; a thread per
// expert.
__device__ __forceinline__ void place_experts(const Group& a, uint32_t* cells, uint32_t segments, uint32_t* room) {
    // One 32-bit sum counts shares in its upper and pairs in its lower 16 bits; neither exceeds the number of pairs.
    uint32_t before_all = 0;
    for (uint32_t first = 0; first < a.experts; first += blockDim.x) {
        const uint32_t expert = first + threadIdx.x;
        uint32_t count = 0;
        for (uint32_t segment = 0; expert < a.experts && segment < segments; segment++) {
            count += cells[segment * a.experts + expert];
        }
        const uint32_t shares = (count + a.share_rows - 1) / a.share_rows;
        uint32_t total;
        const uint32_t before = before_all + block_sum_before(shares << 16 | count, room, &total);
        before_all += total;
        uint32_t start = before & 0xffff;
        for (uint32_t share = 0; share < shares; share++) {
            const uint32_t done = share * a.share_rows, left = count - done;
            const uint32_t rows = left < a.share_rows ? left : a.share_rows;
            a.shares[(before >> 16) + share] = {expert, start + done, rows, 0};
        }
        for (uint32_t segment = 0; expert < a.experts && segment < segments; segment++) {
            uint32_t* cell = &cells[segment * a.experts + expert];
            const uint32_t own = *cell;
            *cell = start;
            start += own;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *a.count = before_all >> 16;
    }
}

// Assigns their indices after sorting to the pairs of a segment, in the order of the pairs; a warp per segment.
__device__ __forceinline__ void place_pairs(const Group& a, uint32_t* starts, uint32_t first, uint32_t end) {
    const uint32_t lane = threadIdx.x % WARP;
    for (uint32_t base = first; base < end; base += WARP) {
        const uint32_t pair = base + lane;
        // Lanes beyond the end have an expert that does not exist.
        const uint32_t expert = pair < end ? a.experts_of[pair] : a.experts;
        const uint32_t peers = warp_peers(expert);
        const uint32_t earlier = __popc(peers & ((1u << lane) - 1));
        const uint32_t start = pair < end ? starts[expert] : 0;
        __syncwarp();
        if (pair < end) {
            if (earlier == 0) {
                starts[expert] = start + __popc(peers);
            }
            a.slots[pair] = start + earlier;
            a.inputs[start + earlier] = pair / a.top_k;
        }
        __syncwarp();
    }
}

// A stable counting sort by a whole block: pairs are cut into segments, and for each segment a warp assigns the indices
// after sorting.
__device__ __forceinline__ void group_pairs(const Group& a, uint32_t* cells, uint32_t* room) {
    const uint32_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const uint32_t fitting = GROUP_CELLS / a.experts;
    const uint32_t most = fitting < warps ? fitting : warps;
    const uint32_t length = ((a.pairs + most - 1) / most + WARP - 1) / WARP * WARP;
    const uint32_t segments = (a.pairs + length - 1) / length;
    count_pairs(a, cells, segments, length);
    place_experts(a, cells, segments, room);
    if (warp < segments) {
        const uint32_t end = (warp + 1) * length;
        place_pairs(a, cells + warp * a.experts, warp * length, end < a.pairs ? end : a.pairs);
    }
}

// Sorts the pairs (row, choice) by expert, stably. Writes the sorted index of each pair, the row of each sorted pair,
// and the shares in the order of experts: at most min(pairs, experts + pairs / share_rows) of them.
//
// Grid: 1. Block: the larger of pairs and experts rounded up to a multiple of 32, at least 128 and at most 1024 (any
// multiple of 32 up to 1024 is correct). Dynamic shared memory: none. 1 to 16384 pairs, at most 1024 experts;
// share_rows is at least 1.
KERNEL __launch_bounds__(1024, 1) group(Group a) {
    SHARED uint32_t cells[GROUP_CELLS], room[WARP];
    group_pairs(a, cells, room);
}

// Chooses experts for all rows, and sorts the pairs; called by a whole block.
__device__ __forceinline__ void route_and_group(const RouteGroup& a, uint32_t* cells, uint32_t* room) {
    for (uint32_t row = threadIdx.x / WARP; row < a.route.n; row += blockDim.x / WARP) {
        route_row(a.route, row);
    }
    __syncthreads();  // `group_pairs` reads what all threads of the block wrote
    group_pairs(a.group, cells, room);
}

