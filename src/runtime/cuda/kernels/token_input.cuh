// Further inputs of layers, which depend on the token alone.
#pragma once
#include "reduce.cuh"

// out[layer][row] = (x / sqrt(mean(x^2) + eps) * norm + embedded) / sqrt(2), where x = projected * scale.
//
// Grid: (ceil(layers / 4), n), n at most 65535. Block: 128, a warp per layer. Dynamic shared memory: none. Any width.
KERNEL token_inputs(TokenInputs a) {
    const uint32_t layer = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, row = blockIdx.y;
    if (layer >= a.layers) {
        return;
    }
    const uint64_t at = (uint64_t(row) * a.layers + layer) * a.width;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % WARP; i < a.width; i += WARP) {
        const float x = a.projected[at + i] * a.scale;
        sum = fmaf(x, x, sum);
    }
    const float inverse = 1.0f / sqrtf(warp_sum(sum) / float(a.width) + a.eps);
    float* out = a.out + (uint64_t(layer) * a.n + row) * a.width;
    for (uint32_t i = threadIdx.x % WARP; i < a.width; i += WARP) {
        const float x = a.projected[at + i] * a.scale * inverse * a.norm[i];
        out[i] = (x + a.embedded[at + i]) * 0.70710678f;
    }
}
