// Number types and definitions that every kernel needs.
#pragma once
#ifdef IEC_EMULATED
#include "emulator.h"
#else
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void
#define SHARED __shared__
#define NEG_INF (-__int_as_float(0x7f800000))

const unsigned FULL_WARP = 0xffffffff;

// Shared memory whose size is set at launch.
__device__ __forceinline__ uint8_t* dynamic_shared() {
    extern __shared__ __align__(128) uint8_t dynamic[];
    return dynamic;
}
#endif

// bf16 tensor cores and asynchronous copies: from compute capability 8.0 on.
#if defined(IEC_EMULATED) || __CUDA_ARCH__ >= 800
#define TENSOR_CORES 1
#endif

// Returns the index at which column k of a row of bf16 activations is stored. Four lanes of a warp share a row of an
// operand of `mma.m16n8k16`; lane t of these reads columns 4t..4t+4 and 16+4t..16+4t+4 of a block of 32, like the codes
// of a tile (see matmul_fragments.cuh). These columns are stored side by side, with the middle two of each four
// exchanged, so that one load of 16 bytes fetches them. Columns 4i..4i+4 stay together.
__device__ __forceinline__ uint32_t place(uint32_t k) {
    return (k & ~31u) | (k & 12) << 1 | (k & 16) >> 2 | (k & 1) << 1 | (k >> 1 & 1);
}
