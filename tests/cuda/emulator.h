// The part of the CUDA kernel language that the kernels of src/runtime/cuda/kernels use, as C++ for the host. `types.cuh` includes
// this where IEC_EMULATED is defined; emulator.cpp runs the blocks. Each CUDA thread is a fiber. What a GPU leaves undefined is
// refused where it can be seen: a message names kernel, block, thread and line, and the process aborts.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#ifndef KERNEL  // scripts/simulated-cuda.sh lists the kernels by it
#define KERNEL void
#endif
#define NEG_INF (-INFINITY)

// Memory of a block: one runs at a time. Plain globals have red zones under AddressSanitizer.
#define SHARED static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
    unsigned x, y, z;
};

namespace emulator {

// Most of one launch, as on the GPUs that are supported.
const size_t MAX_THREADS = 1024;
const size_t MAX_DYNAMIC_BYTES = 99 * 1024;

struct Copy {
    void* to;
    uint8_t bytes[16];
    unsigned group;
};

// What the last lane to arrive does for all: `operands[lane]` is what that lane gave to `collective`.
typedef void (*Combine)(void* const* operands, unsigned mask);

struct Block;
enum State : uint8_t { READY, AT_BARRIER, IN_WARP, EXITED };

struct Thread {
    void* stack_pointer;
    Block* block;
    uint3 index;
    unsigned number;  // within the block
    unsigned mask;    // lanes that this one waits for
    State state;
    Combine combine;
    const char* file;  // where it waits
    int line;
    unsigned group;  // of asynchronous copies: how many were committed
    std::vector<Copy> copies;
    void* fake_stack;  // of AddressSanitizer
};

struct Block {
    uint3 index;
    dim3 size;
    dim3 grid;
    uint8_t* dynamic;
    size_t dynamic_bytes;
};

extern Thread* current;

// Runs a kernel over a grid and returns when it is done; one at a time. The kernel's arguments are bound in `kernel`.
void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel);

// Waits until all lanes of `mask` are here, and has the last one combine what they brought.
void collective(Combine combine, void* operand, unsigned mask, const char* file, int line);
// Waits for the whole block; in one place, or, as PTX allows, each warp where it likes.
void barrier(const char* file, int line, bool warps_apart = false);

void copy_async(void* to, const void* from, bool valid, const char* file, int line);
void commit_copies();
void wait_for_copies(unsigned pending);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline unsigned lane() { return current->number & 31; }

}  // namespace emulator

// emulator_launch(kernel, grid, block, dynamic bytes, arguments)
#define emulator_launch(kernel, grid, block, bytes, ...) \
    emulator::launch(#kernel, grid, block, bytes, [&] { kernel(__VA_ARGS__); })

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::current->block->size)
#define gridDim (emulator::current->block->grid)
static const int warpSize = 32;

// At least 128-byte aligned, filled with garbage.
inline uint8_t* dynamic_shared() { return emulator::current->block->dynamic; }

#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
const unsigned FULL_WARP = ~0u;

inline void __syncthreads(EMULATOR_PLACE) { emulator::barrier(file, line); }
inline void __threadfence() {}
inline void __threadfence_block() {}

inline void __syncwarp(unsigned mask = FULL_WARP, EMULATOR_PLACE) {
    emulator::collective([](void* const*, unsigned) {}, nullptr, mask, file, line);
}

namespace emulator {

template <class T>
struct Shuffle {
    T value, result;
    unsigned source;
};

template <class T>
T shuffle(unsigned mask, T value, unsigned source, const char* file, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    if (source < 32 && !(mask >> source & 1)) fail("%s:%d: shuffle reads lane %u, which mask %08x lacks", file, line, source, mask);
    Shuffle<T> mine = {value, value, source};
    collective(
        [](void* const* operands, unsigned mask) {
            for (unsigned i = 0; i < 32; i++)
                if (mask >> i & 1) {
                    Shuffle<T>& s = *(Shuffle<T>*)operands[i];
                    s.result = ((Shuffle<T>*)operands[s.source])->value;
                }
        },
        &mine, mask, file, line);
    return mine.result;
}

struct Vote {
    unsigned value;
};

inline unsigned vote(unsigned mask, bool value, const char* file, int line) {
    Vote mine = {value};
    collective(
        [](void* const* operands, unsigned mask) {
            unsigned all = 0;
            for (unsigned i = 0; i < 32; i++)
                if (mask >> i & 1) all |= ((Vote*)operands[i])->value << i;
            for (unsigned i = 0; i < 32; i++)
                if (mask >> i & 1) ((Vote*)operands[i])->value = all;
        },
        &mine, mask, file, line);
    return mine.value;
}

}  // namespace emulator

// Lanes that would read outside their part of `width` lanes read themselves.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_PLACE) {
    unsigned lane = emulator::lane(), base = lane & ~(width - 1u);
    return emulator::shuffle(mask, value, base + (source & (width - 1u)), file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_PLACE) {
    unsigned lane = emulator::lane(), source = lane ^ bits;
    return emulator::shuffle(mask, value, source < (lane | (width - 1u)) + 1 ? source : lane, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_PLACE) {
    unsigned lane = emulator::lane(), source = lane + by;
    return emulator::shuffle(mask, value, source <= (lane | (width - 1u)) ? source : lane, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_PLACE) {
    unsigned lane = emulator::lane(), base = lane & ~(width - 1u);
    return emulator::shuffle(mask, value, lane >= base + by ? lane - by : lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int value, EMULATOR_PLACE) { return emulator::vote(mask, value != 0, file, line); }
inline int __any_sync(unsigned mask, int value, EMULATOR_PLACE) { return emulator::vote(mask, value != 0, file, line) != 0; }
inline int __all_sync(unsigned mask, int value, EMULATOR_PLACE) { return emulator::vote(mask, value != 0, file, line) == mask; }

template <class T>
T atomicAdd(T* address, T value) {
    static_assert(std::is_integral<T>::value, "sums of floats depend on the order of their terms");
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* address, T value) {
    static_assert(std::is_integral<T>::value, "only integers");
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <class T>
T atomicExch(T* address, T value) {
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
// Counts up to `last`, then begins again at 0.
inline unsigned atomicInc(unsigned* address, unsigned last) {
    unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
    __atomic_store_n(address, old >= last ? 0 : old + 1, __ATOMIC_RELAXED);  // one thread runs at a time
    return old;
}

#include "numbers.h"
