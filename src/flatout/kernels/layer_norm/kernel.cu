// Layer normalisation of rows, with a residual. One block per row.
//
// Memory-bound: a row is read once, kept in shared memory as float32 while its mean and variance are
// computed, and written once. If rows and pointers are aligned, each thread loads and stores 16 adjacent
// bytes, next to those of the adjacent threads.
#include "flatout.cuh"

template <typename T>
__device__ void forward(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* h, float* mean, float* rstd,
                        long long width, float eps) {
    FLATOUT_SHARED(float, row);
    const long long at = static_cast<long long>(blockIdx.x) * width;
    x += at; y += at;
    if (residual) { residual += at; h += at; }
    const bool wide = width % PACK<T> == 0 && packs(x) && packs(y) && (!residual || (packs(residual) && packs(h)));

    float sum = 0;
    if (wide) {
        for (long long i = threadIdx.x * PACK<T>; i < width; i += blockDim.x * PACK<T>) {
            Pack<T> a = *reinterpret_cast<const Pack<T>*>(x + i), b;
            if (residual) b = *reinterpret_cast<const Pack<T>*>(residual + i);
            for (int k = 0; k < PACK<T>; k++) {
                // As in torch, the sum is rounded to T before it is normalised and returned.
                if (residual) a.at[k] = rounded<T>(to_float(a.at[k]) + to_float(b.at[k]));
                float v = to_float(a.at[k]);
                row[i + k] = v;
                sum += v;
            }
            if (residual) *reinterpret_cast<Pack<T>*>(h + i) = a;
        }
    } else {
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {
            T a = x[i];
            if (residual) { a = rounded<T>(to_float(a) + to_float(residual[i])); h[i] = a; }
            row[i] = to_float(a);
            sum += row[i];
        }
    }
    const float m = block_sum(sum) / width;
    // Each thread reads only its own writes, so `row` needs no barrier.
    float squares = 0;
    const long long first = wide ? threadIdx.x * PACK<T> : threadIdx.x, stride = wide ? blockDim.x * PACK<T> : blockDim.x;
    const int together = wide ? PACK<T> : 1;
    for (long long i = first; i < width; i += stride)
        for (int k = 0; k < together; k++) { float d = row[i + k] - m; squares += d * d; }
    const float r = 1.0f / sqrtf(block_sum(squares) / width + eps);
    if (threadIdx.x == 0) { mean[blockIdx.x] = m; rstd[blockIdx.x] = r; }
    for (long long i = first; i < width; i += stride) {
        Pack<T> out;
        for (int k = 0; k < together; k++) {
            float v = (row[i + k] - m) * r;
            if (weight) v *= to_float(weight[i + k]);
            if (bias) v += to_float(bias[i + k]);
            out.at[k] = rounded<T>(v);
        }
        if (wide) *reinterpret_cast<Pack<T>*>(y + i) = out; else y[i] = out.at[0];
    }
}

// Each block takes every gridDim.x-th row and keeps the sums for weight and bias in shared memory. A thread
// owns its columns, so nothing is atomic and the result is deterministic. `partial` is [gridDim.x, 2, width];
// torch sums its first axis.
template <typename T>
__device__ void backward(const T* dy, const T* dh, const T* h, const T* weight, const float* mean, const float* rstd, T* dx, float* partial,
                         long long rows, long long width) {
    FLATOUT_SHARED(float, sums);
    for (long long i = threadIdx.x; i < 2 * width; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long at = row * width;
        const float m = mean[row], r = rstd[row];
        float along = 0, total = 0;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {
            float g = to_float(dy[at + i]), normal = (to_float(h[at + i]) - m) * r;
            sums[i] += g * normal;
            sums[width + i] += g;
            if (weight) g *= to_float(weight[i]);
            along += g * normal;
            total += g;
        }
        along = block_sum(along) / width;
        total = block_sum(total) / width;
        for (long long i = threadIdx.x; i < width; i += blockDim.x) {  // the row is in the cache
            float g = to_float(dy[at + i]), normal = (to_float(h[at + i]) - m) * r;
            if (weight) g *= to_float(weight[i]);
            float d = (g - normal * along - total) * r;
            if (dh) d += to_float(dh[at + i]);
            dx[at + i] = rounded<T>(d);
        }
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < 2 * width; i += blockDim.x) partial[blockIdx.x * 2 * width + i] = sums[i];
}

#define KERNELS(suffix, T) \
extern "C" __global__ void forward_##suffix(const T* x, const T* residual, const T* weight, const T* bias, T* y, T* h, float* mean, float* rstd, \
                                            long long width, float eps) { \
    forward<T>(x, residual, weight, bias, y, h, mean, rstd, width, eps); \
} \
extern "C" __global__ void backward_##suffix(const T* dy, const T* dh, const T* h, const T* weight, const float* mean, const float* rstd, T* dx, \
                                             float* partial, long long rows, long long width) { \
    backward<T>(dy, dh, h, weight, mean, rstd, dx, partial, rows, width); \
}
KERNELS(f32, float)
KERNELS(f16, half_t)
KERNELS(bf16, bfloat_t)
