// Matrix products: y = x w^T + bias, for one matrix or for the experts that tokens chose.
//
// Entry points: KIND is one of f32, f16, bf16, int4, int4_affine, nl4, mxfp4, int8, int5, int6, q4_1, q5_1, q2_k, q3_k,
// q4_k, q5_k, q6_k, iq4_xs, fp8, nvfp4, int4_row, nl4_row, t2, t3 (`Kind` in args.cuh). STORE is one of f32, f16, bf16, `coded`
// for the kinds from int5 on, and `tiles` for those before.
//
//   name                              reads     rows of x   threads     dynamic shared   where
//   matmul_f32_KIND_8                 x         at most 8   128 .. 512  0                any GPU; `coded` from int5 on
//   matmul_f32_STORE_64               x         any         128         0                any GPU
//   matmul_bf16_KIND_PASSES_8         hi (, lo) at most 8   128 .. 512  0                8.0 on; not f32
//   matmul_bf16_STORE_PASSES_64       hi (, lo) any         256         PASSES * 49152   8.0 on; not f32, tiles
//   matmul_bf16_tiles_1_64            hi        any         384         81408            8.0 on
//   matmul_bf16_tiles_2_64            hi, lo    any         384         87040            8.0 on
//   matmul_bf16_STORE_PASSES_128      hi (, lo) any         256         PASSES * 49152   8.0 on; not f32, f16
//   matmul_bf16_{int4,mxfp4}_1_128    the same as matmul_bf16_tiles_1_128, faster
//
// Those for few rows take `Few`: up to three matrices, one for each blockIdx.z, of one kind (few.cuh).
// PASSES is 1 (x rounded to bf16) or 2 (hi + lo, about 16 bits); f16 weights take two bf16 numbers each and always use
// 2 passes. The number at the end, COLUMNS, is how many rows of x a block computes. With experts (`shares` given) it is
// also the largest number of rows that a share may have, whatever n is.
//
// Grid: (row blocks * column blocks, shares or 1), where
//   row blocks = ceil(rows / R) with R = 16 for COLUMNS 8, 64 for .._64 but 32 for matmul_bf16_{f16,bf16,coded}_.._64, 128 for
//   .._128;
//   column blocks = 1 with experts and for COLUMNS 8, else ceil(n / COLUMNS);
//   shares = the largest possible number of shares; blocks beyond *count return at once.
// Threads for COLUMNS 8: the largest of 512, 256 and 128 with which the whole grid has at most 1024 threads per
// multiprocessor, otherwise 128, so that many threads share 16 rows of a small matrix. The order of sums depends on
// this number.
//
// Choice of the kernel: n <= 8 (or shares of at most 8): .._8. Otherwise for x in f32: .._64. Otherwise .._128 if there
// is one, n > 32 (or shares have so many rows) and its grid has at least 3/4 as many blocks as the GPU has
// multiprocessors, else .._64.
//
// Any rows, cols > 0 and strides. Loads are wide where cols (of floats), x_stride and y_stride are multiples of 4 and
// matrices are aligned to 16 bytes; `hi` and `lo` must be aligned to 16 bytes, `half_stride` is a multiple of 32 and at
// least 32 * blocks. Tiles are aligned to 64 bytes. Sums are computed in f32, in an order that depends only on the
// shape, the entry point and the number of threads.
#pragma once
#include "few.cuh"
#include "matmul_f32.cuh"
#include "matmul_few.cuh"
#include "matmul_many.cuh"
#include "matmul_some.cuh"

#define MATMUL_F32_FEW(name, KIND)                                  \
    KERNEL __launch_bounds__(512, 2) matmul_f32_##name##_8(Few a) { \
        matmul_f32_few<KIND>(a.of[blockIdx.z]);                     \
        finish_few(a);                                              \
    }
#define MATMUL_F32_MANY(name, KIND)                                                \
    KERNEL __launch_bounds__(SQUARE_THREADS, 4) matmul_f32_##name##_64(Matmul a) { \
        matmul_f32_many<KIND>(a);                                                  \
    }

MATMUL_F32_FEW(f32, KIND_F32)
MATMUL_F32_FEW(f16, KIND_F16)
MATMUL_F32_FEW(bf16, KIND_BF16)
MATMUL_F32_FEW(int4, KIND_INT4)
MATMUL_F32_FEW(int4_affine, KIND_INT4_AFFINE)
MATMUL_F32_FEW(nl4, KIND_NL4)
MATMUL_F32_FEW(mxfp4, KIND_MXFP4)
MATMUL_F32_FEW(int8, KIND_INT8)
MATMUL_F32_FEW(coded, KIND_CODED)

MATMUL_F32_MANY(f32, KIND_F32)
MATMUL_F32_MANY(f16, KIND_F16)
MATMUL_F32_MANY(bf16, KIND_BF16)
MATMUL_F32_MANY(tiles, KIND_TILES)
MATMUL_F32_MANY(coded, KIND_CODED)

#ifdef TENSOR_CORES

#define MATMUL_FEW(name, KIND, PASSES)                                          \
    KERNEL __launch_bounds__(512, 2) matmul_bf16_##name##_##PASSES##_8(Few a) { \
        matmul_few<KIND, PASSES>(a.of[blockIdx.z]);                             \
        finish_few(a);                                                          \
    }
#define MATMUL_64(name, KIND, PASSES)                                                         \
    KERNEL __launch_bounds__(MANY_THREADS, 2) matmul_bf16_##name##_##PASSES##_64(Matmul a) {  \
        matmul_many<KIND, PASSES, Shape64>(a);                                                \
    }
#define MATMUL_SOME(PASSES)                                                             \
    KERNEL __launch_bounds__(SOME_THREADS, 1) matmul_bf16_tiles_##PASSES##_64(Matmul a) { \
        matmul_some<PASSES>(a);                                                          \
    }
#define MATMUL_128(name, KIND, PASSES)                                                        \
    KERNEL __launch_bounds__(MANY_THREADS, 1) matmul_bf16_##name##_##PASSES##_128(Matmul a) { \
        matmul_many<KIND, PASSES, Shape128>(a);                                               \
    }

MATMUL_FEW(f16, KIND_F16, 2)
MATMUL_FEW(bf16, KIND_BF16, 1)
MATMUL_FEW(bf16, KIND_BF16, 2)
MATMUL_FEW(int4, KIND_INT4, 1)
MATMUL_FEW(int4, KIND_INT4, 2)
MATMUL_FEW(int4_affine, KIND_INT4_AFFINE, 1)
MATMUL_FEW(int4_affine, KIND_INT4_AFFINE, 2)
MATMUL_FEW(nl4, KIND_NL4, 1)
MATMUL_FEW(nl4, KIND_NL4, 2)
MATMUL_FEW(mxfp4, KIND_MXFP4, 1)
MATMUL_FEW(mxfp4, KIND_MXFP4, 2)
MATMUL_FEW(int8, KIND_INT8, 1)
MATMUL_FEW(int8, KIND_INT8, 2)
MATMUL_FEW(int5, KIND_INT5, 1)
MATMUL_FEW(int5, KIND_INT5, 2)
MATMUL_FEW(int6, KIND_INT6, 1)
MATMUL_FEW(int6, KIND_INT6, 2)
MATMUL_FEW(q4_1, KIND_Q4_1, 1)
MATMUL_FEW(q4_1, KIND_Q4_1, 2)
MATMUL_FEW(q5_1, KIND_Q5_1, 1)
MATMUL_FEW(q5_1, KIND_Q5_1, 2)
MATMUL_FEW(q2_k, KIND_Q2_K, 1)
MATMUL_FEW(q2_k, KIND_Q2_K, 2)
MATMUL_FEW(q3_k, KIND_Q3_K, 1)
MATMUL_FEW(q3_k, KIND_Q3_K, 2)
MATMUL_FEW(q4_k, KIND_Q4_K, 1)
MATMUL_FEW(q4_k, KIND_Q4_K, 2)
MATMUL_FEW(q5_k, KIND_Q5_K, 1)
MATMUL_FEW(q5_k, KIND_Q5_K, 2)
MATMUL_FEW(q6_k, KIND_Q6_K, 1)
MATMUL_FEW(q6_k, KIND_Q6_K, 2)
MATMUL_FEW(iq4_xs, KIND_IQ4_XS, 1)
MATMUL_FEW(iq4_xs, KIND_IQ4_XS, 2)
MATMUL_FEW(nvfp4, KIND_NVFP4, 1)
MATMUL_FEW(nvfp4, KIND_NVFP4, 2)
MATMUL_FEW(fp8, KIND_FP8, 2)
MATMUL_FEW(int4_row, KIND_INT4_ROW, 1)
MATMUL_FEW(int4_row, KIND_INT4_ROW, 2)
MATMUL_FEW(nl4_row, KIND_NL4_ROW, 1)
MATMUL_FEW(nl4_row, KIND_NL4_ROW, 2)
MATMUL_FEW(t2, KIND_T2, 1)
MATMUL_FEW(t2, KIND_T2, 2)
MATMUL_FEW(t3, KIND_T3, 1)
MATMUL_FEW(t3, KIND_T3, 2)

MATMUL_64(f16, KIND_F16, 2)
MATMUL_64(bf16, KIND_BF16, 1)
MATMUL_64(bf16, KIND_BF16, 2)
MATMUL_64(coded, KIND_CODED, 1)
MATMUL_64(coded, KIND_CODED, 2)
MATMUL_SOME(1)
MATMUL_SOME(2)

MATMUL_128(bf16, KIND_BF16, 1)
MATMUL_128(bf16, KIND_BF16, 2)
MATMUL_128(int4, KIND_INT4, 1)
MATMUL_128(mxfp4, KIND_MXFP4, 1)
MATMUL_128(tiles, KIND_TILES, 1)
MATMUL_128(tiles, KIND_TILES, 2)
MATMUL_128(coded, KIND_CODED, 1)
MATMUL_128(coded, KIND_CODED, 2)

#endif
