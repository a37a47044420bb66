// The losses of a chunk of rows of logits; their gradients, before any scaling by the batch, replace the
// logits.
//
// One block per row makes two passes. The first computes the maximum, the sum of exponentials (rescaled as
// the maximum grows: Milakov and Gimelshein, 2018) and the plain sum; the second writes. Memory-bound: a row
// is read twice, the second time from the L2 cache, and written once. Each thread loads and stores 16 bytes
// if the row is aligned; sums over a block use warp shuffles.
#include "flatout.cuh"

template <typename T>
__device__ void losses(T* logits, const long long* target, float* loss, long long classes, long long columns, long long ignore_index,
                       float smoothing, long long with_gradient) {
    T* row = logits + static_cast<long long>(blockIdx.x) * columns;
    const long long right = target[blockIdx.x];
    const bool counts = right != ignore_index;
    const bool wide = columns % PACK<T> == 0 && packs(row);
    const long long first = wide ? threadIdx.x * PACK<T> : threadIdx.x, stride = wide ? blockDim.x * PACK<T> : blockDim.x;
    const int together = wide ? PACK<T> : 1;
    const float minus_infinity = -__int_as_float(0x7f800000);

    float most = minus_infinity, sum = 0, plain = 0, of_right = 0;
    for (long long i = first; i < classes && counts; i += stride) {
        Pack<T> a;
        if (wide) a = *reinterpret_cast<const Pack<T>*>(row + i); else a.at[0] = row[i];
        float local = most;
        for (int k = 0; k < together && i + k < classes; k++) local = fmaxf(local, to_float(a.at[k]));
        if (local > most) { sum *= __expf(most - local); most = local; }
        for (int k = 0; k < together && i + k < classes; k++) {
            float v = to_float(a.at[k]);
            // All of a row may be minus infinity so far: add nothing, and avoid (-inf) - (-inf).
            if (v != minus_infinity) sum += __expf(v - most);
            plain += v;
            if (i + k == right) of_right = v;
        }
    }
    const float top = block_max(most);
    sum = block_sum(most == minus_infinity ? (sum != sum ? sum : 0.0f) : sum * __expf(most - top));
    plain = smoothing > 0 ? block_sum(plain) : 0.0f;
    of_right = block_sum(of_right);
    const float log_sum = top + logf(sum);
    if (threadIdx.x == 0) {
        float one = log_sum - (1 - smoothing) * of_right;
        if (smoothing > 0) one -= smoothing * plain / classes;
        // An invalid class gives a NaN loss; torch aborts on the device.
        loss[blockIdx.x] = !counts ? 0.0f : right < 0 || right >= classes ? __int_as_float(0x7fffffff) : one;
    }
    if (!with_gradient) return;
    for (long long i = first; i < columns; i += stride) {
        Pack<T> a;
        if (wide) a = *reinterpret_cast<const Pack<T>*>(row + i); else a.at[0] = row[i];
        for (int k = 0; k < together; k++) {
            float g = __expf(to_float(a.at[k]) - log_sum) - smoothing / classes - (i + k == right ? 1 - smoothing : 0.0f);
            a.at[k] = rounded<T>(counts && i + k < classes ? g : 0.0f);
        }
        if (wide) *reinterpret_cast<Pack<T>*>(row + i) = a; else row[i] = a.at[0];
    }
}

#define KERNELS(suffix, T) \
extern "C" __global__ void losses_##suffix(T* logits, const long long* target, float* loss, long long classes, \
                                           long long columns, long long ignore_index, float smoothing, long long with_gradient) { \
    losses<T>(logits, target, loss, classes, columns, ignore_index, smoothing, with_gradient); \
}
KERNELS(f32, float)
KERNELS(f16, half_t)
KERNELS(bf16, bfloat_t)
