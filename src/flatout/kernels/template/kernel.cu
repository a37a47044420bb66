// silu_mul in CUDA C++. Each thread takes 16 bytes of each tensor at a time, next to those of the adjacent
// threads. The remainder, or data not aligned to 16 bytes, is processed element by element. Indices are 64
// bits wide.
#include "flatout.cuh"

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// Calls at(i) for every element of this thread, or packs_at(i) for PACK<T> elements from i on.
template <typename T, typename Packs, typename At>
__device__ void each(long long count, bool wide, Packs packs_at, At at) {
    const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, all = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long packed = wide ? count / PACK<T> : 0;
    for (long long i = me; i < packed; i += all) packs_at(i * PACK<T>);
    for (long long i = packed * PACK<T> + me; i < count; i += all) at(i);
}

template <typename T> __device__ T one(T a, T b) { return rounded<T>(to_float(a) * sigmoid(to_float(a)) * to_float(b)); }
template <typename T> __device__ T one_of_a(T g, T a, T b) {
    float x = to_float(a), s = sigmoid(x);
    return rounded<T>(to_float(g) * to_float(b) * s * (1 + x * (1 - s)));
}

template <typename T> __device__ void forward(const T* a, const T* b, T* y, long long count) {
    using P = Pack<T>;
    each<T>(count, packs(a) && packs(b) && packs(y),
        [=](long long i) {
            P p = *reinterpret_cast<const P*>(a + i), q = *reinterpret_cast<const P*>(b + i), r;
            for (int k = 0; k < PACK<T>; k++) r.at[k] = one(p.at[k], q.at[k]);
            *reinterpret_cast<P*>(y + i) = r;
        },
        [=](long long i) { y[i] = one(a[i], b[i]); });
}

template <typename T> __device__ void backward(const T* g, const T* a, const T* b, T* of_a, T* of_b, long long count) {
    using P = Pack<T>;
    each<T>(count, packs(g) && packs(a) && packs(b) && packs(of_a) && packs(of_b),
        [=](long long i) {
            P d = *reinterpret_cast<const P*>(g + i), p = *reinterpret_cast<const P*>(a + i), q = *reinterpret_cast<const P*>(b + i), r, s;
            for (int k = 0; k < PACK<T>; k++) { r.at[k] = one_of_a(d.at[k], p.at[k], q.at[k]); s.at[k] = one(p.at[k], d.at[k]); }
            *reinterpret_cast<P*>(of_a + i) = r;
            *reinterpret_cast<P*>(of_b + i) = s;
        },
        [=](long long i) { of_a[i] = one_of_a(g[i], a[i], b[i]); of_b[i] = one(a[i], g[i]); });
}

#define KERNELS(suffix, T) \
extern "C" __global__ void forward_##suffix(const T* a, const T* b, T* y, long long count) { forward<T>(a, b, y, count); } \
extern "C" __global__ void backward_##suffix(const T* g, const T* a, const T* b, T* of_a, T* of_b, long long count) { \
    backward<T>(g, a, b, of_a, of_b, count); \
}
KERNELS(f32, float)
KERNELS(f16, half_t)
KERNELS(bf16, bfloat_t)
