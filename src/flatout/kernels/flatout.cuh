// Common header of all CUDA C++ kernels: storage types, 16-byte loads, sums over a block, shared memory.
//
// It includes no header, not even CUDA's. The same text compiles with NVRTC (which comes with torch), with
// nvcc, and, after emulator.h, with a C++ compiler for a machine without a GPU. Launch arguments are
// pointers, `long long` and `float`.
#pragma once

#ifndef FLATOUT_EMULATED
#define FLATOUT_SHARED(type, name) extern __shared__ __align__(16) unsigned char flatout_shared[]; type* name = reinterpret_cast<type*>(flatout_shared)
#endif

constexpr int WARP = 32;

struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat_t x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float to_float(half_t x) {
#ifdef FLATOUT_EMULATED
    return emulated_half_to_float(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

__device__ inline void from_float(float x, float& y) { y = x; }
__device__ inline void from_float(float x, bfloat_t& y) {  // to nearest, ties to even; NaN stays NaN
    unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ inline void from_float(float x, half_t& y) {
#ifdef FLATOUT_EMULATED
    y.bits = emulated_float_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}
template <typename T> __device__ inline T rounded(float x) { T y; from_float(x, y); return y; }

// Sixteen bytes at once: the widest load, with a quarter of the instructions of four-byte loads.
template <typename T> struct __align__(16) Pack { T at[16 / sizeof(T)]; };
template <typename T> constexpr int PACK = 16 / sizeof(T);
template <typename T> __device__ inline bool packs(const T* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

__device__ inline float warp_sum(float x) {
    for (int gap = WARP / 2; gap; gap /= 2) x += __shfl_xor_sync(0xffffffffu, x, gap);
    return x;
}

// The sum over all threads of a block, returned to every thread. The block is a multiple of a warp, at most
// 1,024 threads. The order of the additions is fixed, so the same input gives the same bits.
__device__ inline float block_sum(float x) {
    __shared__ float part[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // the reads of the previous call are complete
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? part[lane] : 0.0f);
}
