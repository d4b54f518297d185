// Does the emulator see the mistakes that it is there to see? Each kernel below has one; it must abort with the words given, or give
// wrong numbers. Built and run by .ci/run.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "tensor.cuh"

struct Args {
    float* x;
    uint32_t n;
};

// Reverses the numbers of a block through shared memory.
template <bool WAITS>
void reverse(Args a) {
    SHARED float room[64];
    room[threadIdx.x] = a.x[threadIdx.x];
    if (WAITS) __syncthreads();
    a.x[threadIdx.x] = room[63 - threadIdx.x];
}

// Reverses them twice: the second time, `room` is overwritten while others may still read it.
template <bool WAITS>
void reverse_twice(Args a) {
    SHARED float room[64];
    for (int i = 0; i < 2; i++) {
        room[threadIdx.x] = a.x[threadIdx.x];
        __syncthreads();
        float other = room[63 - threadIdx.x];
        if (WAITS) __syncthreads();
        a.x[threadIdx.x] = other;
    }
}

template <bool WAITS>
void copy_async(Args a) {
    float* room = (float*)dynamic_shared();
    if (threadIdx.x < 16) cp_async_16(room + 4 * threadIdx.x, a.x + 4 * threadIdx.x);
    cp_async_commit();
    if (WAITS) cp_async_wait<0>();
    __syncthreads();
    float other = room[63 - threadIdx.x];
    if (!WAITS) cp_async_wait<0>();
    a.x[threadIdx.x] = other;
}

// Two groups are under way; the older one is needed.
template <int PENDING>
void pipeline(Args a) {
    float* room = (float*)dynamic_shared();
    if (threadIdx.x < 16) cp_async_16(room + 4 * threadIdx.x, a.x + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_commit();
    cp_async_wait<PENDING>();
    __syncthreads();
    float other = room[63 - threadIdx.x];
    cp_async_wait<0>();
    a.x[threadIdx.x] = other;
}

void never_waits(Args a) {
    if (threadIdx.x == 0) cp_async_16(dynamic_shared(), a.x);
    cp_async_commit();
}
void misaligned_copy(Args a) { cp_async_16(dynamic_shared(), a.x + 1); }
void lane_outside_mask(Args a) {
    if (threadIdx.x < 16) a.x[threadIdx.x] = __shfl_xor_sync(0xffff, a.x[threadIdx.x], 16);
}
void lane_missing(Args a) {
    if (threadIdx.x % 32 != 5) a.x[threadIdx.x] = __shfl_xor_sync(FULL_WARP, a.x[threadIdx.x], 1);
}
void caller_outside_mask(Args a) { a.x[threadIdx.x] = __shfl_sync(0xffff, a.x[threadIdx.x], 0); }
void divergent_shuffles(Args a) {
    if (threadIdx.x % 2)
        a.x[threadIdx.x] = __shfl_sync(FULL_WARP, 1.0f, 0);
    else
        a.x[threadIdx.x] = __shfl_sync(FULL_WARP, 2.0f, 1);
}
void divergent_barrier(Args a) {
    if (threadIdx.x < a.n) __syncthreads();
}
void two_barriers(Args a) {
    if (threadIdx.x < a.n)
        __syncthreads();
    else
        __syncthreads();
}
void barrier_and_shuffle(Args a) {
    if (threadIdx.x < a.n)
        __syncthreads();
    else
        a.x[threadIdx.x] = __shfl_sync(FULL_WARP, 1.0f, 0);
}
void past_dynamic(Args a) { ((float*)dynamic_shared())[threadIdx.x] = a.x[threadIdx.x]; }
void past_static(Args a) {
    SHARED float room[64];
    room[threadIdx.x + a.n] = 1;
    a.x[threadIdx.x] = room[threadIdx.x];
}
void past_global(Args a) { a.x[threadIdx.x + 1] = 1; }
void misaligned_load(Args a) { a.x[0] = ((float4*)(a.x + 1))->x; }
void nothing(Args) {}

struct Case {
    const char* name;
    void (*kernel)(Args);
    unsigned threads;
    unsigned n;
    size_t dynamic;
    const char* says;  // null: gives wrong numbers; empty: is right
    bool sanitizer = false;
};

#define CASE(kernel) #kernel, kernel
const Case CASES[] = {
    {CASE(reverse<true>), 64, 0, 0, ""},
    {CASE(reverse<false>), 64, 0, 0, nullptr},
    {CASE(reverse_twice<true>), 64, 0, 0, "twice"},
    {CASE(reverse_twice<false>), 64, 0, 0, nullptr},
    {CASE(copy_async<true>), 64, 0, 256, ""},
    {CASE(copy_async<false>), 64, 0, 256, nullptr},
    {CASE(pipeline<1>), 64, 0, 256, ""},
    {CASE(pipeline<2>), 64, 0, 256, nullptr},
    {CASE(never_waits), 64, 0, 256, "has not waited for"},
    {CASE(misaligned_copy), 64, 0, 256, "not aligned"},
    {CASE(lane_outside_mask), 64, 0, 0, "which mask 0000ffff lacks"},
    {CASE(lane_missing), 64, 0, 0, "lanes that have exited"},
    {CASE(caller_outside_mask), 64, 0, 0, "lacks the lane"},
    {CASE(divergent_shuffles), 64, 0, 0, "at different operations"},
    {CASE(divergent_barrier), 64, 32, 0, "__syncthreads"},
    {CASE(two_barriers), 64, 32, 0, "waits in that of"},
    {CASE(barrier_and_shuffle), 64, 48, 0, "wait for each other for ever"},
    {CASE(nothing), 1025, 0, 0, "a block of 1025"},
    {CASE(nothing), 64, 0, 100 << 10, "dynamic shared memory"},
    {CASE(past_dynamic), 64, 0, 252, "heap-buffer-overflow", true},
    {CASE(past_static), 64, 1, 0, "global-buffer-overflow", true},
    {CASE(past_global), 64, 0, 0, "heap-buffer-overflow", true},
    {CASE(misaligned_load), 64, 0, 0, "misaligned", true},
};

// 0: reversed; 1: back in order; 2: wrong. Two launches, since the order of threads alternates.
int run(const Case& c) {
    int result = 0;
    for (int launch = 0; launch < 2; launch++) {
        float* x = (float*)aligned_alloc(64, 64 * sizeof(float));
        for (int i = 0; i < 64; i++) x[i] = i;
        emulator::launch(c.name, 1, c.threads, c.dynamic, [&] { c.kernel(Args{x, c.n}); });
        bool reversed = true, same = true;
        for (int i = 0; i < 64; i++) reversed &= x[i] == 63 - i, same &= x[i] == i;
        result = std::max(result, reversed ? 0 : same ? 1 : 2);
        free(x);
    }
    return result;
}

bool good(const Case& c) {
    int ends[2];
    if (pipe(ends)) return false;
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], 2);
        _exit(run(c));
    }
    close(ends[1]);
    std::string said;
    char text[4096];
    for (ssize_t n; (n = read(ends[0], text, sizeof text)) > 0;) said.append(text, n);
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    bool as_told = !c.says ? code == 2 : !*c.says ? code == 0 : !strcmp(c.says, "twice") ? code == 1 : said.find(c.says) != said.npos;
    if (!as_told) printf("%s: ended with %d and said: %.400s\n", c.name, code, said.c_str());
    return as_told;
}

int main() {
    int tried = 0, bad = 0;
    for (const Case& c : CASES) {
#ifndef __SANITIZE_ADDRESS__
        if (c.sanitizer) continue;
#endif
        tried++;
        bad += !good(c);
    }
    printf("%d kernels with and without mistakes, %d not judged as they should be\n", tried, bad);
    return bad != 0;
}
