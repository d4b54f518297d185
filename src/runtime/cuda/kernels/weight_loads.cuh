// Loads and conversions that all kinds of weights share (matmul_weights.cuh).
#pragma once
#include "args.cuh"

#define BLOCK 32
#define TILE_ROWS 16

// In addition to the kinds of args.cuh: any kind of tiles, selected by `Matrix::kind` at run time. It is used by
// kernels that compute so much per block that the selection costs little, and whose code would be large for each kind.
#define KIND_TILES 8

// Index of a lane in its warp, 4g + t.
struct Lane {
    uint32_t g, t;
};

__device__ __forceinline__ Lane lane_of(uint32_t thread) {
    return {thread / 4 % 8, thread % 4};
}

constexpr bool is_plain(uint32_t kind) {
    return kind <= KIND_BF16;
}
constexpr bool is_coded(uint32_t kind) {
    return kind >= KIND_CODED;
}

// This lane's rows of a tile, and its share of a block as it is stored; CODED are defined in coded_weights.cuh, the
// others in matmul_weights.cuh.
template <uint32_t KIND, bool CODED = is_coded(KIND)>
struct Rows;
template <uint32_t KIND, bool CODED = is_coded(KIND)>
struct Raw;

// Returns the shift that turns the index of a block into that of its group.
__device__ __forceinline__ uint32_t group_shift_of(const Matrix& w) {
    return w.group_blocks >= w.blocks ? 31 : 31 - __clz(w.group_blocks);
}

// Hides from the compiler how an address is computed; otherwise it computes the whole sum again in each iteration of a
// loop.
__device__ __forceinline__ const uint8_t* opaque(const uint8_t* p) {
#ifndef IEC_EMULATED
    asm("" : "+l"(p));
#endif
    return p;
}

// Reads 8 bytes without keeping them in the L1 cache, because they are not read again soon.
__device__ __forceinline__ uint2 load_once(const uint8_t* from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint2*>(from);
#else
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
#endif
}

__device__ __forceinline__ uint4 load_four_once(const uint8_t* from) {
#ifdef IEC_EMULATED
    return *reinterpret_cast<const uint4*>(from);
#else
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
#endif
}

// Reads two scales of `size` bytes each, without a branch.
__device__ __forceinline__ void load_scales(const uint8_t* from, uint32_t size, uint32_t (&scales)[2]) {
#ifdef IEC_EMULATED
    scales[0] = size == 1 ? *reinterpret_cast<const uint16_t*>(from) : *reinterpret_cast<const uint32_t*>(from);
    scales[1] = size == 4 ? reinterpret_cast<const uint32_t*>(from)[1] : 0;
#else
    asm("{\n .reg .pred p, q, r;\n setp.eq.u32 p, %3, 4;\n setp.eq.u32 q, %3, 2;\n setp.eq.u32 r, %3, 1;\n"
        " @p ld.global.nc.v2.u32 {%0,%1}, [%2];\n @q ld.global.nc.u32 %0, [%2];\n @r ld.global.nc.u16 %0, [%2];\n}"
        : "=r"(scales[0]), "=r"(scales[1])
        : "l"(from), "r"(size));
#endif
}

// Returns 2^(s - 127), exactly.
__device__ __forceinline__ float power_of_two(uint32_t s) {
    return __uint_as_float(max(s << 23, 1u << 22));
}

// Returns the two f16 numbers of a word.
__device__ __forceinline__ float2 halves_of(uint32_t word) {
    return make_float2(__half2float(__ushort_as_half(uint16_t(word))), __half2float(__ushort_as_half(uint16_t(word >> 16))));
}

// Looks up four codes (nibbles 0 to 3 of `codes`) in a table of 16 bytes. A selector of PRMT has only three bits per
// code, so both halves of the table are looked up, and the fourth bit of each code selects the result.
__device__ __forceinline__ uint32_t look_up(uint32_t codes, const uint32_t (&table)[4]) {
    const uint32_t within = codes & 0x7777;
    const uint32_t lower = __byte_perm(table[0], table[1], within);
    const uint32_t upper = __byte_perm(table[2], table[3], within);
    return __byte_perm(lower, upper, (codes >> 1 & 0x4444) | 0x3210);
}

// The values of nl4 (`CodeTable::Iq4Nl` of src/scheme) as signed bytes.
#define NL4_TABLE {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}
// Twice the values of E2M1 as signed bytes.
#define E2M1_TABLE {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}

// Writes four signed bytes as floats. Each is computed as (2^23 + (128 + byte)) - (2^23 + 128), which is exact.
__device__ __forceinline__ void floats_of_bytes(uint32_t bytes, float* out) {
    const uint32_t shifted = bytes ^ 0x80808080u;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        out[i] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
    }
}

