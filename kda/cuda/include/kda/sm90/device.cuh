// Device helpers that CUTLASS has no name for, and short names for those of its instructions that are used everywhere.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"

namespace kda::sm90 {

/// The lane, asked for anew: what a loop derives from it is computed where it is used, not kept in registers around it.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// The thread in its block, likewise: what comes before the roles must not keep it in a register all through them.
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ float exp2_fast(float x) {  // relative error 2^-22; results below 2^-126 are zero
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {  // relative error 2^-23; 1 / inf is 0
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// NaN stays NaN, as it does not with fmin and fmax.
__device__ __forceinline__ float clamp(float x, float least, float most) {
  x = x < least ? least : x;
  return x > most ? most : x;
}

/// Two floats rounded to bf16, `low` in the lower half: the order of two neighbours in memory and in a fragment.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// The same in fp16 where FP16: for what stays below 65504 and gains from three more bits.
template <bool FP16>
__device__ __forceinline__ uint32_t pack16(float low, float high) {
  if constexpr (!FP16) return pack(low, high);
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// What `first`, two floats packed, lacks of them, packed: the second of two terms.
__device__ __forceinline__ uint32_t pack_rest(uint32_t first, float x, float y) {
  return pack(x - low(first), y - high(first));
}

/// Products of two pairs in bf16.
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

/// What lies at an address of shared memory, as those instructions have it that need no more than 32 bits.
template <class T>
__device__ __forceinline__ T& in_shared(uint32_t address) {
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}

/// 2^n for -126 <= n <= 127.
__device__ __forceinline__ float power_of_two(int n) { return __int_as_float((n + 127) << 23); }

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

__device__ __forceinline__ void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  cute::SM90_U32x4_STSM_N::copy(a, b, c, d, *static_cast<cute::uint128_t*>(row));
}

__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  cute::SM90_U16x8_STSM_T::copy(a, b, c, d, *static_cast<cute::uint128_t*>(row));
}

__device__ __forceinline__ void store_transposed(void* row, uint32_t a, uint32_t b) {
  cute::SM90_U16x4_STSM_T::copy(a, b, *static_cast<cute::uint128_t*>(row));
}

/// d += a b for one 16 x 8 x 16 product in bf16, or fp16. A lane holds of a [16 x 16] in row-major order rows lane / 4
/// and 8 more, columns lane % 4 * 2 and 8 more; b is [8 x 16] the same way.
template <bool FP16 = false>
__device__ __forceinline__ void mma(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using Product = std::conditional_t<FP16, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  Product::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

/// A float as two of tf32, of which the tensor cores ignore the lower 13 bits. NaN stays NaN.
struct Split {
  uint32_t large, small;
  __device__ explicit Split(float x) {
    large = __float_as_uint(x) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(large));
  }
};

/// d + small += a b for one 16 x 8 x 8 product in tf32 with two terms: 21 bits. Two accumulators, because each product
/// waits for the one before it. With the eight k in the order 0, 2, 4, 6, 1, 3, 5, 7 a lane holds of a rows g = lane /
/// 4 and g + 8, k = 2 t and 2 t + 1 for t = lane % 4 (g 2 t, g + 8 2 t, g 2 t + 1, ...), and of b the same k of column
/// g: in d, two neighbours of a row.
__device__ __forceinline__ void mma_tf32x2(float (&d)[4], float (&small)[4], const Split (&a)[4], const Split (&b)[2]) {
  using Product = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  Product::fma(d[0], d[1], d[2], d[3], a[0].large, a[1].large, a[2].large, a[3].large, b[0].large, b[1].large, d[0],
               d[1], d[2], d[3]);
  Product::fma(small[0], small[1], small[2], small[3], a[0].small, a[1].small, a[2].small, a[3].small, b[0].large,
               b[1].large, small[0], small[1], small[2], small[3]);
  Product::fma(small[0], small[1], small[2], small[3], a[0].large, a[1].large, a[2].large, a[3].large, b[0].small,
               b[1].small, small[0], small[1], small[2], small[3]);
}

__device__ __forceinline__ void add(float (&x)[4], const float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}

/// Keeps the compiler from moving registers across a wgmma.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(x[i]);
}

/// Everything this thread wrote to shared memory is seen by wgmma and bulk copies that come after the next barrier.
__device__ __forceinline__ void publish() { cutlass::arch::fence_view_async_shared(); }

/// What ordinary stores wrote anywhere, and this thread has learnt of, is seen by its bulk copies from now on.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// One arrival for a whole warp, after all its lanes came here.
__device__ __forceinline__ void arrive_warp(const cutlass::arch::ClusterBarrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

}  // namespace kda::sm90
