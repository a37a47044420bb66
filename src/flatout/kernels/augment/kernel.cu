// Crop, flip, normalise, cast and layout of a batch of uint8 images, in one pass.
//
// A byte has 256 values, so scale and normalisation are a table of 256 floats per channel, made by torch: no
// division here, and torch's own bits. The table is in shared memory. Memory-bound: a byte in, two or four
// out. Threads walk the output in its order and write 16 bytes each. They read adjacent bytes (mirrored if an
// image is flipped), all but once from L1.
#include "flatout.cuh"

template <typename T>
__device__ void augment(const unsigned char* images, const long long* top, const long long* left, const unsigned char* flip, const float* table, T* out,
                        long long H, long long W, long long channels, long long h, long long w, long long padding, long long fill,
                        long long hwc, long long channels_last) {
    FLATOUT_SHARED(float, value);
    for (long long i = threadIdx.x; i < 256 * channels; i += blockDim.x) value[i] = table[i];
    __syncthreads();
    const long long b = blockIdx.x, all = channels * h * w, y0 = top[b] - padding, x0 = left[b] - padding;
    const bool mirrored = flip[b];
    images += b * channels * H * W;
    out += b * all;
    const bool wide = all % PACK<T> == 0 && packs(out);
    const int together = wide ? PACK<T> : 1;
    const long long stride = static_cast<long long>(gridDim.y) * blockDim.x * together;
    for (long long first = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * together; first < all; first += stride) {
        Pack<T> made;
        for (int k = 0; k < together; k++) {
            // Indices within an image fit into 32 bits, and 32-bit division is several times as fast.
            const unsigned at = static_cast<unsigned>(first + k), C = channels, width = w, plane = h * w;
            const unsigned c = channels_last ? at % C : at / plane, pixel = channels_last ? at / C : at % plane;
            const long long i = pixel / width, j = pixel % width;
            const long long y = y0 + i, x = x0 + (mirrored ? w - 1 - j : j);
            const bool inside = y >= 0 && y < H && x >= 0 && x < W;
            const unsigned byte = inside ? images[hwc ? (y * W + x) * channels + c : (c * H + y) * W + x] : static_cast<unsigned>(fill);
            made.at[k] = rounded<T>(value[c * 256 + byte]);
        }
        if (wide) *reinterpret_cast<Pack<T>*>(out + first) = made; else out[first] = made.at[0];
    }
}

#define KERNELS(suffix, T) \
extern "C" __global__ void augment_##suffix(const unsigned char* images, const long long* top, const long long* left, const unsigned char* flip, \
                                            const float* table, T* out, long long H, long long W, long long channels, long long h, long long w, \
                                            long long padding, long long fill, long long hwc, long long channels_last) { \
    augment<T>(images, top, left, flip, table, out, H, W, channels, h, w, padding, fill, hwc, channels_last); \
}
KERNELS(f32, float)
KERNELS(f16, half_t)
KERNELS(bf16, bfloat_t)
