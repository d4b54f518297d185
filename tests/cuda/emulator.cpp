// Runs blocks of CUDA threads as fibers. A thread runs until it waits for others; then the next one that can go on does, of the same
// warp if possible, whose stacks are in the cache. Odd blocks and launches run their threads from last to first, so that code which
// relies on an order without a barrier gives wrong numbers.
#include "emulator.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Where the variables of kernels lie, if the program was linked so (scripts/simulated-cuda.sh).
extern "C" __attribute__((weak, visibility("hidden"))) uint8_t emulator_shared_begin[], emulator_shared_end[];

namespace emulator {

Thread* current = nullptr;

namespace {

#ifdef __SANITIZE_ADDRESS__
const size_t STACK_BYTES = 256 << 10;
#else
const size_t STACK_BYTES = 64 << 10;
#endif
const size_t GUARD_BYTES = 4096;
const size_t DYNAMIC_ALIGNMENT = 128;
const uint8_t GARBAGE = 0xAB;  // as a half a small number, as a float too: wrong, and not NaN, which `max` would hide

// Saves the registers of this fiber and where its stack is in `*save`, and goes on at the stack `load`.
extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");

void* first_frame(uint8_t* top, void (*entry)()) {
    void** sp = (void**)top;
    *--sp = nullptr;
    *--sp = (void*)entry;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,%function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch,.-emulator_switch
)");

void* first_frame(uint8_t* top, void (*entry)()) {
    void** sp = (void**)(top - 160);
    memset(sp, 0, 160);
    sp[11] = (void*)entry;
    return sp;
}
#else
#error "emulator_switch is written for x86-64 and aarch64"
#endif

struct Warp {
    void* operands[32];
    unsigned exists;
    unsigned waiting;
    unsigned exited;
};

// Lanes of a warp that can go on.
struct Ready {
    unsigned warp;
    unsigned lanes;
};

struct Launch {
    const char* name;
    dim3 grid, block;
    size_t dynamic_bytes;
    const std::function<void()>* kernel;
};

// The fibers. They stay between launches.
class Runner : public Block {
  public:
    Runner();
    void run(const Launch& launch);

    void wait_in_warp(Combine combine, void* operand, unsigned mask, const char* file, int line);
    void wait_at_barrier(const char* file, int line, bool warps_apart);
    const char* kernel_name() const { return launch_ ? launch_->name : "?"; }

  private:
    static void entry();
    void run_block(uint64_t block);
    void start(unsigned number);
    void exit_thread();
    void to_next(Thread& from, bool exited);
    void to(Thread* from, void** save, Thread* next);
    Thread* next();
    void push(Ready ready);
    void check_same(const Thread& a, const Thread& b) const;
    [[noreturn]] void deadlock();
    void push_all();
    const Thread& first_of_warp_at_barrier(const Thread& t) const;
    void take_dynamic();

    const Launch* launch_ = nullptr;
    uint64_t launches_ = 0;
    std::vector<Thread> threads_;
    Warp warps_[MAX_THREADS / 32];
    Ready ready_[MAX_THREADS + 1];  // the last one runs next
    unsigned n_ready_ = 0;
    bool last_first_ = false;
    unsigned n_ = 0, live_ = 0, at_barrier_ = 0;
    const Thread* first_at_barrier_ = nullptr;
    uint8_t* stacks_;
    void* main_ = nullptr;
    void* main_fake_stack_ = nullptr;
    const void* main_bottom_ = nullptr;
    size_t main_bytes_ = 0;
};

Runner::Runner() : threads_(MAX_THREADS) {
    size_t bytes = MAX_THREADS * STACK_BYTES;
    stacks_ = (uint8_t*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks_ == MAP_FAILED) fail("no memory for the stacks of %zu threads", MAX_THREADS);
    for (size_t i = 0; i < MAX_THREADS; i++) mprotect(stacks_ + i * STACK_BYTES, GUARD_BYTES, PROT_NONE);
    dynamic = nullptr;
}

void Runner::entry() {
    Runner* runner = (Runner*)current->block;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, runner->main_bottom_ ? nullptr : &runner->main_bottom_,
                                    runner->main_bytes_ ? nullptr : &runner->main_bytes_);
#endif
    (*runner->launch_->kernel)();
    runner->exit_thread();
    abort();
}

// Leaves `from` (null: the runner itself) for `next` (null: the runner itself).
inline void Runner::to(Thread* from, void** save, Thread* next) {
#ifdef __SANITIZE_ADDRESS__
    bool leaves_for_good = from && from->state == EXITED;
    void** fake = from ? &from->fake_stack : &main_fake_stack_;
    const void* bottom = next ? stacks_ + next->number * STACK_BYTES : main_bottom_;
    __sanitizer_start_switch_fiber(leaves_for_good ? nullptr : fake, bottom, next ? STACK_BYTES : main_bytes_);
#else
    (void)from;
#endif
    current = next;
    emulator_switch(save, next ? next->stack_pointer : main_);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
#endif
}

// Lists hold lanes, each lane once: there are never more lists than threads.
inline void Runner::push(Ready ready) {
    while (n_ready_ && !ready_[n_ready_ - 1].lanes) n_ready_--;
    ready_[n_ready_++] = ready;
}

// The next thread that can go on, or null.
inline Thread* Runner::next() {
    while (n_ready_ && !ready_[n_ready_ - 1].lanes) n_ready_--;
    if (!n_ready_) return nullptr;
    Ready& ready = ready_[n_ready_ - 1];
    unsigned lane = last_first_ ? 31 - __builtin_clz(ready.lanes) : __builtin_ctz(ready.lanes);
    ready.lanes &= ~(1u << lane);
    return &threads_[ready.warp * 32 + lane];
}

inline void Runner::to_next(Thread& from, bool exited) {
    Thread* thread = next();
    if (!thread && !(exited && live_ == 0)) deadlock();
    to(&from, &from.stack_pointer, thread);
}

void Runner::exit_thread() {
    Thread& t = *current;
    if (!t.copies.empty()) fail("the thread exits with asynchronous copies that it has not waited for");
    if (at_barrier_) fail("the thread exits while others wait in __syncthreads");
    t.state = EXITED;
    warps_[t.number / 32].exited |= 1u << (t.number & 31);
    live_--;
    to_next(t, true);
}

void Runner::check_same(const Thread& a, const Thread& b) const {
    bool same_place = a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
    if (a.mask == b.mask && a.combine == b.combine && same_place) return;
    fail("lanes wait for each other at different operations: lane %u at %s:%d with mask %08x, lane %u at %s:%d with mask %08x",
         a.number & 31, a.file, a.line, a.mask, b.number & 31, b.file, b.line, b.mask);
}

void Runner::wait_in_warp(Combine combine, void* operand, unsigned mask, const char* file, int line) {
    Thread& t = *current;
    Warp& warp = warps_[t.number / 32];
    unsigned lane = t.number & 31;
    if (!(mask >> lane & 1)) fail("%s:%d: mask %08x lacks the lane %u that calls", file, line, mask, lane);
    if (mask & ~warp.exists) fail("%s:%d: mask %08x names lanes that this block does not have", file, line, mask);
    if (mask & warp.exited) fail("%s:%d: mask %08x names lanes that have exited (%08x)", file, line, mask, warp.exited);
    t.combine = combine;
    t.mask = mask;
    t.file = file;
    t.line = line;
    // Whoever waits here already agrees with the others that wait.
    if (unsigned here = warp.waiting & mask) check_same(t, threads_[(t.number & ~31u) + __builtin_ctz(here)]);
    warp.operands[lane] = operand;
    warp.waiting |= 1u << lane;
    if ((warp.waiting & mask) != mask) {
        t.state = IN_WARP;
        to_next(t, false);
        t.state = READY;
        return;
    }
    combine(warp.operands, mask);
    warp.waiting &= ~mask;
    push({t.number / 32, mask & ~(1u << lane)});
}

void Runner::wait_at_barrier(const char* file, int line, bool warps_apart) {
    Thread& t = *current;
    if (live_ != n_) fail("%s:%d: __syncthreads, but %u of %u threads have exited", file, line, n_ - live_, n_);
    t.combine = nullptr;
    t.mask = 0;
    t.file = file;
    t.line = line;
    if (!at_barrier_) first_at_barrier_ = &t;
    const Thread& first = warps_apart ? first_of_warp_at_barrier(t) : *first_at_barrier_;
    if (first.line != line || (first.file != file && strcmp(first.file, file)))
        fail("%s:%d: __syncthreads, but thread %u waits in that of %s:%d", file, line, first.number, first.file, first.line);
    if (++at_barrier_ < n_) {
        t.state = AT_BARRIER;
        to_next(t, false);
        t.state = READY;
        return;
    }
    at_barrier_ = 0;
    for (unsigned i = 0; i < n_; i++) threads_[i].state = READY;
    push_all();
    unsigned lane = t.number & 31;
    for (unsigned i = 0; i < n_ready_; i++)
        if (ready_[i].warp == t.number / 32) ready_[i].lanes &= ~(1u << lane);
}

const Thread& Runner::first_of_warp_at_barrier(const Thread& t) const {
    for (unsigned i = t.number & ~31u; i < n_ && i < (t.number | 31u); i++)
        if (threads_[i].state == AT_BARRIER) return threads_[i];
    return t;
}

// Every thread of the block, the first warp to run last in the list.
void Runner::push_all() {
    unsigned warps = (n_ + 31) / 32;
    n_ready_ = 0;
    for (unsigned i = 0; i < warps; i++) {
        unsigned warp = last_first_ ? i : warps - 1 - i;
        push({warp, warps_[warp].exists});
    }
}

void Runner::deadlock() {
    for (unsigned i = 0, told = 0; i < n_ && told < 8; i++) {
        const Thread& t = threads_[i];
        if (t.state == READY || t.state == EXITED) continue;
        fprintf(stderr, "emulator: thread %u waits at %s:%d for %08x%s\n", i, t.file, t.line, t.mask, t.state == AT_BARRIER ? " (__syncthreads)" : "");
        told++;
    }
    fail("the threads of the block wait for each other for ever: %u at barriers, %u of %u exited", at_barrier_, n_ - live_, n_);
}

void Runner::start(unsigned i) {
    Thread& t = threads_[i];
    t.block = this;
    t.number = i;
    t.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.state = READY;
    t.group = 0;
    t.copies.clear();
    t.fake_stack = nullptr;
    // Not all stacks begin in the same cache lines.
    uint8_t* top = stacks_ + (i + 1) * STACK_BYTES - 64 - i * 576 % 16384;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(top - 8192, 8192);  // the last thread on it never returned from its first functions
#endif
    t.stack_pointer = first_frame(top, entry);
}

void Runner::run_block(uint64_t block) {
    index = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y), (unsigned)(block / ((uint64_t)grid.x * grid.y))};
    if (dynamic_bytes) memset(dynamic, GARBAGE, dynamic_bytes);
    live_ = n_;
    at_barrier_ = 0;
    for (unsigned w = 0; w * 32 < n_; w++) {
        unsigned lanes = std::min(32u, n_ - w * 32);
        warps_[w].exists = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warps_[w].waiting = warps_[w].exited = 0;
    }
    last_first_ = (block + launches_) & 1;
    for (unsigned i = 0; i < n_; i++) start(i);
    push_all();
    to(nullptr, &main_, next());
}

// Dynamic shared memory ends where nothing can be touched, or nearly: at a multiple of what it is aligned to.
void Runner::take_dynamic() {
#ifdef __SANITIZE_ADDRESS__
    free(dynamic);
    dynamic = nullptr;
    void* memory;
    if (dynamic_bytes && posix_memalign(&memory, DYNAMIC_ALIGNMENT, dynamic_bytes)) fail("no memory");
    if (dynamic_bytes) dynamic = (uint8_t*)memory;
#else
    static uint8_t* end = nullptr;
    if (!end) {
        const size_t room = (MAX_DYNAMIC_BYTES + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES;
        void* all = mmap(nullptr, room + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) fail("no memory");
        end = (uint8_t*)all + room;
        mprotect(end, GUARD_BYTES, PROT_NONE);
    }
    dynamic = end - (dynamic_bytes + DYNAMIC_ALIGNMENT - 1) / DYNAMIC_ALIGNMENT * DYNAMIC_ALIGNMENT;
#endif
}

void Runner::run(const Launch& launch) {
    launch_ = &launch;
    grid = launch.grid;
    size = launch.block;
    n_ = size.x * size.y * size.z;
    dynamic_bytes = launch.dynamic_bytes;
    take_dynamic();
#ifndef __SANITIZE_ADDRESS__
    if (emulator_shared_begin) memset(emulator_shared_begin, GARBAGE, emulator_shared_end - emulator_shared_begin);
#endif
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t block = 0; block < blocks; block++) run_block(block);
    launches_++;
    launch_ = nullptr;
}

#ifndef __SANITIZE_ADDRESS__
const int CRASHES[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction before[sizeof CRASHES / sizeof *CRASHES];

// Tells which thread crashed and where; crashes outside kernels are left to whoever was asked before.
void on_crash(int signal, siginfo_t* info, void*) {
    for (size_t i = 0; i < sizeof CRASHES / sizeof *CRASHES; i++)
        if (!current && CRASHES[i] == signal) {
            sigaction(signal, &before[i], nullptr);
            return;
        }
    // Trapped instructions give their own address, the others the memory they touched.
    Dl_info object;
    if (signal == SIGILL && dladdr(info->si_addr, &object)) {
        char command[1024];
        size_t offset = (uint8_t*)info->si_addr - (uint8_t*)object.dli_fbase;
        snprintf(command, sizeof command, "addr2line -Cifse '%s' %#zx >&2", object.dli_fname, offset);
        if (system(command)) fprintf(stderr, "%s\n", command);
        fail("misaligned access");
    }
    fail("signal %d at address %p: memory that no allocation holds", signal, info->si_addr);
}

void catch_crashes() {
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (size_t i = 0; i < sizeof CRASHES / sizeof *CRASHES; i++) sigaction(CRASHES[i], &action, &before[i]);
}
#else
void catch_crashes() {}
#endif

Runner& runner() {
    static Runner* only = new Runner;  // as long as the process
    return *only;
}

}  // namespace

void fail(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (current) {
        Block& b = *current->block;
        fprintf(stderr, "emulator: kernel %s, block (%u, %u, %u), thread (%u, %u, %u): %s\n", ((Runner&)b).kernel_name(), b.index.x,
                b.index.y, b.index.z, current->index.x, current->index.y, current->index.z, text);
    } else {
        fprintf(stderr, "emulator: %s\n", text);
    }
    abort();
}

void collective(Combine combine, void* operand, unsigned mask, const char* file, int line) {
    ((Runner*)current->block)->wait_in_warp(combine, operand, mask, file, line);
}

void barrier(const char* file, int line, bool warps_apart) { ((Runner*)current->block)->wait_at_barrier(file, line, warps_apart); }

// The bytes are taken now and appear when waited for; until then the place holds garbage.
void copy_async(void* to, const void* from, bool valid, const char* file, int line) {
    Block& b = *current->block;
    if ((uintptr_t)to % 16 || (valid && (uintptr_t)from % 16)) fail("%s:%d: cp.async of 16 bytes from %p to %p: not aligned", file, line, from, to);
    if (b.dynamic_bytes && (uint8_t*)to >= b.dynamic && (uint8_t*)to < b.dynamic + b.dynamic_bytes && (uint8_t*)to + 16 > b.dynamic + b.dynamic_bytes)
        fail("%s:%d: cp.async past the end of dynamic shared memory", file, line);
    Copy copy = {to, {}, current->group};
    if (valid) memcpy(copy.bytes, from, 16);
    memset(to, GARBAGE, 16);
    current->copies.push_back(copy);
}

void commit_copies() { current->group++; }

void wait_for_copies(unsigned pending) {
    std::vector<Copy>& copies = current->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group + pending < current->group; done++) memcpy(copies[done].to, copies[done].bytes, 16);
    copies.erase(copies.begin(), copies.begin() + done);
}

void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!threads || threads > MAX_THREADS || block.x > 1024 || block.y > 1024 || block.z > 64)
        fail("%s: a block of %u x %u x %u threads", name, block.x, block.y, block.z);
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        fail("%s: a grid of %u x %u x %u blocks", name, grid.x, grid.y, grid.z);
    if (dynamic_bytes > MAX_DYNAMIC_BYTES) fail("%s: %zu bytes of dynamic shared memory", name, dynamic_bytes);
    static bool ready = (catch_crashes(), true);
    (void)ready;
    runner().run(Launch{name, grid, block, dynamic_bytes, &kernel});
}

}  // namespace emulator
