// Recurrent mixers: gated short convolution, gated delta net, Mamba-2. The state of a text is that after its last row;
// a step reads it at one address and writes it at another, which may be the same.
#pragma once
#include "gated.cuh"
#include "reduce.cuh"

// Most positions that a convolution reads before the present one.
#define CONV_REACH 7
// Columns of a block of 128 threads in convolutions.
#define CONV_SPAN 128
// Values of a head that a warp computes.
#define LINEAR_VALUES 4
// Most numbers of a key that a lane of a warp holds: keys of up to 256 numbers.
#define LINEAR_KEYS 8

// Convolution of one channel over the positions of a text: factors and the last inputs, the oldest first.
struct Channel {
    float factors[CONV_REACH + 1];
    float window[CONV_REACH];
    float bias;

    __device__ __forceinline__ Channel(
        const Conv& a, const StateRun& run, uint32_t channel) {
        const uint32_t reach = a.width - 1;
#pragma unroll
        for (uint32_t i = 0; i <= CONV_REACH; i++) {
            factors[i] = i <= reach ? a.kernel[uint64_t(i) * a.channels + channel] : 0.0f;
        }
#pragma unroll
        for (uint32_t i = 0; i < CONV_REACH; i++) {
            const bool known = i < reach && run.from;
            window[i] = known ? run.from[a.offset + uint64_t(i) * a.channels + channel] : 0.0f;
        }
        bias = a.bias ? a.bias[channel] : 0.0f;
    }

    // Returns the sum at the next position, whose input is x.
    __device__ __forceinline__ float next(uint32_t reach, float x) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < CONV_REACH; i++) {
            sum = i < reach ? fmaf(window[i], factors[i], sum) : sum;
        }
        float last = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i <= CONV_REACH; i++) {
            last = i == reach ? factors[i] : last;
        }
        sum = fmaf(x, last, sum);
#pragma unroll
        for (uint32_t i = 0; i < CONV_REACH; i++) {
            const float after = i + 1 < CONV_REACH ? window[i + 1] : 0.0f;
            window[i] = i + 1 == reach ? x : after;
        }
        return sum + bias;
    }

    __device__ __forceinline__ void keep(const Conv& a, const StateRun& run, uint32_t channel) const {
#pragma unroll
        for (uint32_t i = 0; i < CONV_REACH; i++) {
            if (i + 1 < a.width) {
                run.to[a.offset + uint64_t(i) * a.channels + channel] = window[i];
            }
        }
    }
};

// x = silu(conv(x)) for the columns of one projection, whose first channel is `first`.
//
// Grid: (ceil(columns / 128), runs), runs at most 65535. Block: 128. Dynamic shared memory: none. Width at most 8.
KERNEL convolve(Conv a) {
    const uint32_t column = blockIdx.x * CONV_SPAN + threadIdx.x;
    if (column >= a.columns) {
        return;
    }
    const StateRun run = a.runs[blockIdx.y];
    Channel channel(a, run, a.first + column);
    for (uint32_t row = 0; row < run.count; row++) {
        float* x = a.x + uint64_t(run.first + row) * a.columns + column;
        const float y = channel.next(a.width - 1, *x);
        *x = y * sigmoid(y);
    }
    channel.keep(a, run, a.first + column);
}

// out = C * conv(B * x) for rows of B, C and x side by side, each of `columns` numbers.
//
// Grid: (ceil(columns / 128), runs), runs at most 65535. Block: 128. Dynamic shared memory: none. Width at most 8.
KERNEL short_conv(Conv a) {
    const uint32_t column = blockIdx.x * CONV_SPAN + threadIdx.x;
    const StateRun run = a.runs[blockIdx.y];
    if (blockIdx.x == gridDim.x - 1) {
        for (uint32_t row = 0; row < run.count; row++) {
            pad(a.out, run.first + row, a.columns, threadIdx.x, CONV_SPAN);
        }
    }
    if (column >= a.columns) {
        return;
    }
    Channel channel(a, run, column);
    for (uint32_t row = 0; row < run.count; row++) {
        const float* x = a.x + 3 * uint64_t(run.first + row) * a.columns + column;
        put(a.out, run.first + row, column, channel.next(a.width - 1, x[0] * x[2 * a.columns]) * x[a.columns]);
    }
    channel.keep(a, run, column);
}

// ln(1 + e^x), which is x where the difference is below the precision of a float.
__device__ __forceinline__ float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

// The rule of linear attention, row by row: the delta rule with `rates`, otherwise Mamba-2.
//   S = exp(decay * step) S + k u',  out = S' q,  step = softplus(decays + decay_bias)
//   u = sigmoid(rate) (v - S' k) with k and q of length 1 and q / sqrt(key), or u = step v and out += skip v
// The state of a head is `(value, key)`: a warp holds four rows of it.
//
// Grid: (ceil(value / 16), value heads, runs), both at most 65535. Block: 128. Dynamic shared memory: none. Keys of at
// most 256.
KERNEL linear_attention(LinearAttention a) {
    const uint32_t lane = threadIdx.x % WARP, head = blockIdx.y;
    const uint32_t first = (blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP) * LINEAR_VALUES;
    if (first >= a.value_dim) {
        return;
    }
    const uint32_t heads = a.key_heads * a.per_key;
    const uint32_t key_head = a.tiled ? head % a.key_heads : head / a.per_key;
    const StateRun run = a.runs[blockIdx.z];
    const uint64_t state = a.offset + uint64_t(head) * a.value_dim * a.key_dim;
    float held[LINEAR_VALUES][LINEAR_KEYS];
#pragma unroll
    for (uint32_t c = 0; c < LINEAR_VALUES; c++) {
#pragma unroll
        for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
            const uint32_t key = lane + i * WARP;
            const bool known = run.from && key < a.key_dim && first + c < a.value_dim;
            held[c][i] = known ? run.from[state + uint64_t(first + c) * a.key_dim + key] : 0.0f;
        }
    }
    for (uint32_t t = 0; t < run.count; t++) {
        const uint64_t row = run.first + t;
        const uint64_t at = (row * a.key_heads + key_head) * a.key_dim;
        float k[LINEAR_KEYS], q[LINEAR_KEYS], of_k = 0.0f, of_q = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
            const uint32_t key = lane + i * WARP;
            k[i] = key < a.key_dim ? a.k[at + key] : 0.0f;
            q[i] = key < a.key_dim ? a.q[at + key] : 0.0f;
            of_k = fmaf(k[i], k[i], of_k);
            of_q = fmaf(q[i], q[i], of_q);
        }
        const float step = softplus(a.decays[row * heads + head] + a.decay_bias[head]);
        const float decay = expf(a.decay[head] * step);
        float rate = step;
        if (a.rates) {
            rate = sigmoid(a.rates[row * heads + head]);
            const float by_k = 1.0f / sqrtf(warp_sum(of_k) + 1e-6f);
            const float by_q = 1.0f / (sqrtf(warp_sum(of_q) + 1e-6f) * sqrtf(float(a.key_dim)));
#pragma unroll
            for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
                k[i] *= by_k;
                q[i] *= by_q;
            }
        }
#pragma unroll
        for (uint32_t c = 0; c < LINEAR_VALUES; c++) {
            const bool exists = first + c < a.value_dim;
            const uint64_t place = (row * heads + head) * a.value_dim + first + c;
            const float v = exists ? a.v[place] : 0.0f;
            float recalled = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
                held[c][i] *= decay;
                recalled = fmaf(k[i], held[c][i], recalled);
            }
            const float u = a.rates ? rate * (v - warp_sum(recalled)) : rate * v;
            float out = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
                held[c][i] = fmaf(k[i], u, held[c][i]);
                out = fmaf(q[i], held[c][i], out);
            }
            out = warp_sum(out);
            if (exists && lane == 0) {
                a.out[place] = a.skip ? fmaf(a.skip[head], v, out) : out;
            }
        }
    }
#pragma unroll
    for (uint32_t c = 0; c < LINEAR_VALUES; c++) {
#pragma unroll
        for (uint32_t i = 0; i < LINEAR_KEYS; i++) {
            const uint32_t key = lane + i * WARP;
            if (key < a.key_dim && first + c < a.value_dim) {
                run.to[state + uint64_t(first + c) * a.key_dim + key] = held[c][i];
            }
        }
    }
}

// Norm of groups of `group` columns, times silu(gate): the factors are those of a group, and the norm comes first; or,
// with `gate_first`, the gate does, and each column has a factor.
//
// Grid: (width / group, n), n at most 65535. Block: 128. Dynamic shared memory: none. Any group.
KERNEL gated_norm(GatedNorm a) {
    SHARED float room[WARP];
    const uint32_t row = blockIdx.y, begin = blockIdx.x * a.group;
    const float* x = a.x + uint64_t(row) * a.width + begin;
    const float* gate = a.gate + uint64_t(row) * a.width + begin;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.group; i += blockDim.x) {
        const float y = a.gate_first ? x[i] * (gate[i] * sigmoid(gate[i])) : x[i];
        sum = fmaf(y, y, sum);
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, room) / float(a.group) + a.eps);
    for (uint32_t i = threadIdx.x; i < a.group; i += blockDim.x) {
        const float y = x[i] * (gate[i] * sigmoid(gate[i])) * scale;
        put(a.out, row, begin + i, y * a.weight[a.gate_first ? begin + i : i]);
    }
    if (blockIdx.x == gridDim.x - 1) {
        pad(a.out, row, a.width, threadIdx.x, blockDim.x);
    }
}
