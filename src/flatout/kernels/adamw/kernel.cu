// One step of AdamW over chunks of many tensors, in one launch.
//
// A row of `table` is a chunk: addresses of its parameters, gradients, means and squares, and its length.
// Memory-bound: in addition to a float32 parameter and its gradient, 16 bytes of state are read and 8
// written. Each thread takes four adjacent elements.
#include "flatout.cuh"

template <typename T>
__device__ void step(const long long* table, float rate, float of_mean, float beta2, float of_square, float eps, float decay, float root) {
    const long long* chunk = table + static_cast<long long>(blockIdx.x) * 5;
    T* p = reinterpret_cast<T*>(chunk[0]);
    const T* g = reinterpret_cast<const T*>(chunk[1]);
    float* m = reinterpret_cast<float*>(chunk[2]);
    float* v = reinterpret_cast<float*>(chunk[3]);
    const long long count = chunk[4];
    struct __align__(4 * sizeof(T)) Few { T at[4]; };
    struct __align__(16) Four { float at[4]; };
    const bool wide = packs(p) && packs(g) && packs(m) && packs(v);
    const int together = wide ? 4 : 1;
    for (long long i = threadIdx.x * together; i < count; i += blockDim.x * together) {
        const bool whole = wide && i + 4 <= count;
        const int here = whole ? 4 : wide ? static_cast<int>(count - i) : 1;
        Few a, b; Four c, d;
        if (whole) {
            a = *reinterpret_cast<const Few*>(p + i); b = *reinterpret_cast<const Few*>(g + i);
            c = *reinterpret_cast<const Four*>(m + i); d = *reinterpret_cast<const Four*>(v + i);
        } else for (int k = 0; k < here; k++) { a.at[k] = p[i + k]; b.at[k] = g[i + k]; c.at[k] = m[i + k]; d.at[k] = v[i + k]; }
        for (int k = 0; k < here; k++) {
            float x = to_float(a.at[k]), slope = to_float(b.at[k]);
            c.at[k] += of_mean * (slope - c.at[k]);
            d.at[k] = beta2 * d.at[k] + of_square * slope * slope;
            a.at[k] = rounded<T>(x * decay - rate * c.at[k] / (sqrtf(d.at[k]) / root + eps));
        }
        if (whole) {
            *reinterpret_cast<Few*>(p + i) = a; *reinterpret_cast<Four*>(m + i) = c; *reinterpret_cast<Four*>(v + i) = d;
        } else for (int k = 0; k < here; k++) { p[i + k] = a.at[k]; m[i + k] = c.at[k]; v[i + k] = d.at[k]; }
    }
}

#define KERNELS(suffix, T) \
extern "C" __global__ void step_##suffix(const long long* table, float rate, float of_mean, float beta2, float of_square, float eps, \
                                         float decay, float root) { \
    step<T>(table, rate, of_mean, beta2, of_square, eps, decay, root); \
}
KERNELS(f32, float)
KERNELS(f16, half_t)
KERNELS(bf16, bfloat_t)
