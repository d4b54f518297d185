// Tensor cores, the loads that feed them, and asynchronous copies to shared memory. Under IEC_EMULATED, the same
// functions are emulated with the same layouts over the lanes of a warp, for tests without a GPU.
#pragma once
#include "types.cuh"

#ifdef TENSOR_CORES

// Fragments of `mma.m16n8k16`, for lane = 4 g + t: two numbers in each register, the lower half first.
//   a[0]: row g, columns 2t, 2t+1     a[1]: row g+8, same columns     a[2], a[3]: as a[0], a[1], columns + 8
//   b[0]: rows 2t, 2t+1 of column g   b[1]: rows 2t+8, 2t+9 of column g
//   d[0], d[1]: row g, columns 2t, 2t+1   d[2], d[3]: row g+8, same columns

#ifndef IEC_EMULATED

// Shared memory as the instructions below address it: in bytes.
typedef uint32_t SharedAddress;

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
    return (SharedAddress)__cvta_generic_to_shared(p);
}

// d += a * b.
__device__ __forceinline__ void mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_f16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit numbers: lane 8 j + i gives the address of row i of matrix j (16 bytes, aligned). Lane 4
// g + t gets columns 2t, 2t+1 of row g of matrix j in r[j].
__device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Like `ldmatrix_x4`, with the matrices transposed: lane 4 g + t gets column g of rows 2t, 2t+1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Starts to copy 16 bytes, or zeros where not `valid` (then `from` is not read). Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Closes the group of the copies started since the last call.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last N groups of this thread are still in flight. Other threads see the bytes after a
// barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#else

typedef uintptr_t SharedAddress;

inline SharedAddress shared_address(const void* p) { return (SharedAddress)p; }

namespace emulator {

struct Mma {
    float* d;
    const uint32_t* a;
    const uint32_t* b;
};

// The sums are computed in the order of k, in f32; a GPU's order and rounding within the 16 are not documented.
template <float (*TO_FLOAT)(uint16_t)>
void mma(void* const* operands, unsigned) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Mma& m = *(const Mma*)operands[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; i++) a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = TO_FLOAT(m.a[i / 2] >> i % 2 * 16);
        for (int i = 0; i < 4; i++) b[2 * t + i % 2 + i / 2 * 8][g] = TO_FLOAT(m.b[i / 2] >> i % 2 * 16);
        for (int i = 0; i < 4; i++) d[g + i / 2 * 8][2 * t + i % 2] = m.d[i];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) ((const Mma*)operands[lane])->d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

struct LdMatrix {
    uint32_t* r;
    const uint8_t* row;
};

template <bool TRANS>
void ldmatrix(void* const* operands, unsigned) {
    for (int lane = 0; lane < 32; lane++)
        for (int j = 0; j < 4; j++) {
            uint32_t both = 0;
            for (int i = 0; i < 2; i++) {
                int row = TRANS ? 2 * (lane % 4) + i : lane / 4, column = TRANS ? lane / 4 : 2 * (lane % 4) + i;
                uint16_t number;
                memcpy(&number, ((const LdMatrix*)operands[8 * j + row])->row + 2 * column, 2);
                both |= (uint32_t)number << 16 * i;
            }
            ((const LdMatrix*)operands[lane])->r[j] = both;
        }
}

inline void check_row(SharedAddress row, const char* file, int line) {
    if (row % 16) fail("%s:%d: ldmatrix of a row that is not 16-byte aligned", file, line);
}

}  // namespace emulator

inline void mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2], EMULATOR_PLACE) {
    emulator::Mma mine = {d, a, b};
    emulator::collective(emulator::mma<emulator::bfloat_to_float>, &mine, FULL_WARP, file, line);
}

inline void mma_f16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2], EMULATOR_PLACE) {
    emulator::Mma mine = {d, a, b};
    emulator::collective(emulator::mma<emulator::half_to_float>, &mine, FULL_WARP, file, line);
}

inline void ldmatrix_x4(uint32_t r[4], SharedAddress row, EMULATOR_PLACE) {
    emulator::check_row(row, file, line);
    emulator::LdMatrix mine = {r, (const uint8_t*)row};
    emulator::collective(emulator::ldmatrix<false>, &mine, FULL_WARP, file, line);
}

inline void ldmatrix_x4_trans(uint32_t r[4], SharedAddress row, EMULATOR_PLACE) {
    emulator::check_row(row, file, line);
    emulator::LdMatrix mine = {r, (const uint8_t*)row};
    emulator::collective(emulator::ldmatrix<true>, &mine, FULL_WARP, file, line);
}

inline void cp_async_16(SharedAddress to, const void* from, bool valid = true, EMULATOR_PLACE) {
    emulator::copy_async((void*)to, from, valid, file, line);
}

inline void cp_async_commit() { emulator::commit_copies(); }

template <int N>
void cp_async_wait() {
    emulator::wait_for_copies(N);
}

#endif

// The functions above with pointers instead of shared addresses.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool valid = true) {
    cp_async_16(shared_address(to), from, valid);
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void* row) {
    ldmatrix_x4(r, shared_address(row));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], const void* row) {
    ldmatrix_x4_trans(r, shared_address(row));
}

#endif
