// Elementwise kernels: the activation of the feed-forward block.
#pragma once
#include "acts.cuh"
#include "norm.cuh"
#include "reduce.cuh"

// Columns of a block of 128 threads.
#define ELEMENTWISE_SPAN 512

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// Returns activation(gate) * up, like `gated` in src/runtime/ops.rs.
__device__ __forceinline__ float activated(const Gated& a, float gate, float up) {
    if (a.activation == ACT_SILU) {
        return gate * sigmoid(gate) * up;
    }
    if (a.activation == ACT_GELU_TANH) {
        // x (1 + tanh u) / 2 = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        const float cubic = fmaf(gate * gate * gate, 0.044715f, gate);
        return gate * sigmoid(1.595769f * cubic) * up;
    }
    if (a.activation == ACT_RELU2) {
        // The only factor, which the host passes as both.
        gate = gate < 0.0f ? 0.0f : gate;
        return gate * gate;
    }
    // Comparisons, because fminf would lose NaN.
    gate = gate > a.limit ? a.limit : gate;
    up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
    return (up + 1.0f) * (gate * sigmoid(a.alpha * gate));
}

// Writes four columns of one row: `four(row, column)` returns all of them, `one(row, column)` a single one. `hi` and
// `lo` are padded with zeros to whole blocks of 32.
template <class Four, class One>
__device__ __forceinline__ void elementwise(const Acts& out, uint32_t width, bool fours, Four four, One one) {
    const uint32_t row = blockIdx.y, column = blockIdx.x * ELEMENTWISE_SPAN + 4 * threadIdx.x;
    if (fours && column + 4 <= width) {
        put4(out, row, column, four(row, column));
    } else {
        for (uint32_t i = column; i < column + 4 && i < width; i++) {
            put(out, row, i, one(row, i));
        }
    }
    if (blockIdx.x == gridDim.x - 1) {
        pad(out, row, width, threadIdx.x, blockDim.x);
    }
}

__device__ __forceinline__ float4 four_of(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}

// out[i][c] = activation(gate[i][c]) * up[i][c]; where `up` is null, gate[i][2c] and gate[i][2c + 1] are gate and up.
//
// Grid: (ceil(width / 512), n), n at most 65535. Block: 128. Dynamic shared memory: none. Any width.
KERNEL gated(Gated a) {
    const bool fours = a.stride % 4 == 0 && on_16_bytes(a.gate) && on_16_bytes(a.up) && takes_fours(a.out);
    elementwise(
        a.out, a.width, fours,
        [&](uint32_t row, uint32_t column) {
            const float* gates = a.gate + uint64_t(row) * a.stride;
            float4 gate, up;
            if (a.up) {
                gate = four_of(gates + column);
                up = four_of(a.up + uint64_t(row) * a.stride + column);
            } else {
                const float4 low = four_of(gates + 2 * column), high = four_of(gates + 2 * column + 4);
                gate = make_float4(low.x, low.z, high.x, high.z);
                up = make_float4(low.y, low.w, high.y, high.w);
            }
            return make_float4(
                activated(a, gate.x, up.x), activated(a, gate.y, up.y), activated(a, gate.z, up.z),
                activated(a, gate.w, up.w));
        },
        [&](uint32_t row, uint32_t column) {
            const float* gates = a.gate + uint64_t(row) * a.stride;
            return a.up ? activated(a, gates[column], a.up[uint64_t(row) * a.stride + column])
                        : activated(a, gates[2 * column], gates[2 * column + 1]);
        });
}

// x[i][c] *= sigmoid(gate[i]).
//
// Grid: (ceil(width / 128), n), n at most 65535. Block: 128. Dynamic shared memory: none. Any width.
KERNEL gate_rows(RowGate a) {
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column < a.width) {
        a.x[uint64_t(row) * a.width + column] *= sigmoid(a.gate[row]);
    }
}

// out[i][h * width + c] = x[i][h]: a number of each head for each of its columns.
//
// Grid: (heads, n), n at most 65535. Block: 128. Dynamic shared memory: none. Any width.
KERNEL spread_heads(SpreadHeads a) {
    const uint64_t head = uint64_t(blockIdx.y) * a.heads + blockIdx.x;
    for (uint32_t i = threadIdx.x; i < a.width; i += blockDim.x) {
        a.out[head * a.width + i] = a.x[head];
    }
}
