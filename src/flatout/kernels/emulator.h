// A slow CPU emulator for CUDA C++: enough of the language to run a kernel without a GPU.
//
// Blocks run one after another. The threads of a block are fibers that yield at __syncthreads() and at warp
// shuffles. So code between two barriers runs thread by thread, and a missing barrier gives a wrong result
// here too. Shared memory is filled with NaN before each block. The emulator cannot show races inside a warp,
// memory ordering between blocks, or speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define FLATOUT_EMULATED 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define FLATOUT_SHARED(type, name) type* name = reinterpret_cast<type*>(emulated::shared)

struct dim3 { unsigned x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf expf  // glibc has a function of this name
static inline float emulated_half_to_float(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return static_cast<float>(h); }
static inline unsigned short emulated_float_to_half(float x) { _Float16 h = static_cast<_Float16>(x); unsigned short bits; std::memcpy(&bits, &h, 2); return bits; }

namespace emulated {

constexpr size_t STACK = 64 << 10;
enum class Waits { NO, BARRIER, WARP };
struct Fiber { ucontext_t context; dim3 index; bool done = false; Waits waits = Waits::NO; float given = 0; };

static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static ucontext_t scheduler;
static size_t current = 0;
static unsigned char* shared = nullptr;
static void (*body)(void*) = nullptr;
static void* body_arguments = nullptr;

static void give_way(Waits why) {
    fibers[current].waits = why;
    swapcontext(&fibers[current].context, &scheduler);
}

static void enter() {
    body(body_arguments);
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

[[noreturn]] static void stop(const char* why) {
    std::fprintf(stderr, "emulated block (%u, %u): %s\n", blockIdx.x, blockIdx.y, why);
    std::abort();
}

// Runs each fiber to its next barrier, then releases all of them (or all of a warp) together.
static void run_block() {
    size_t count = fibers.size();
    for (size_t i = 0; i < count; i++) {
        Fiber& f = fibers[i];
        f = Fiber{};
        f.index = dim3{unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y), unsigned(i / (blockDim.x * blockDim.y))};
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks.data() + i * STACK;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, reinterpret_cast<void (*)()>(enter), 0);
    }
    for (;;) {
        bool ran = false;
        for (size_t i = 0; i < count; i++) {
            if (fibers[i].done || fibers[i].waits != Waits::NO) continue;
            current = i;
            threadIdx = fibers[i].index;
            swapcontext(&scheduler, &fibers[i].context);
            ran = true;
        }
        bool released = false;
        for (size_t first = 0; first < count; first += 32) {
            size_t end = first + 32 < count ? first + 32 : count, at_warp = 0;
            for (size_t i = first; i < end; i++) at_warp += fibers[i].waits == Waits::WARP;
            if (!at_warp) continue;
            if (at_warp != end - first) { if (!ran) stop("threads of one warp do not reach the same shuffle"); continue; }
            for (size_t i = first; i < end; i++) fibers[i].waits = Waits::NO;
            released = true;
        }
        if (released || ran) { if (released) continue; }
        size_t at_barrier = 0, done = 0;
        for (const Fiber& f : fibers) { at_barrier += f.waits == Waits::BARRIER; done += f.done; }
        if (done == count) return;
        if (at_barrier == count) { for (Fiber& f : fibers) f.waits = Waits::NO; continue; }
        if (!ran) stop("not all threads of the block reach __syncthreads()");
    }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) { kernel(*static_cast<A*>(arguments[I])...); }

template <typename... A>
void launch(void (*kernel)(A...), dim3 grid, dim3 block, size_t shared_bytes, void** arguments) {
    using Bound = std::pair<void (*)(A...), void**>;
    Bound bound{kernel, arguments};
    body = [](void* b) { auto* pair = static_cast<Bound*>(b); call(pair->first, pair->second, std::index_sequence_for<A...>{}); };
    body_arguments = &bound;
    // Shared memory ends at a protected page.
    size_t page = sysconf(_SC_PAGESIZE), pages = (shared_bytes + page - 1) / page * page;
    auto* place = static_cast<unsigned char*>(mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(place + pages, page, PROT_NONE);
    shared = place + pages - shared_bytes;
    gridDim = grid; blockDim = block;
    fibers.assign(size_t(block.x) * block.y * block.z, Fiber{});
    stacks.resize(fibers.size() * STACK);
    for (unsigned z = 0; z < grid.z; z++) for (unsigned y = 0; y < grid.y; y++) for (unsigned x = 0; x < grid.x; x++) {
        blockIdx = dim3{x, y, z};
        std::memset(place, 0xff, pages);
        run_block();
    }
    munmap(place, pages + page);
}

}  // namespace emulated

static inline void __syncthreads() { emulated::give_way(emulated::Waits::BARRIER); }
static inline float __shfl_xor_sync(unsigned, float x, int mask) {
    using namespace emulated;
    size_t me = current, other = (me & ~size_t(31)) | ((me & 31) ^ size_t(mask));
    fibers[me].given = x;
    give_way(Waits::WARP);
    float got = fibers[other].given;
    give_way(Waits::WARP);  // all threads read this value before the next is written
    return got;
}
