// The inverse folded into keys and queries: Ak = Ab^T Kr and Aq = M Ab; see prepare.cuh.
#pragma once
#include "cute/arch/mma_sm90_gmma.hpp"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"

namespace kda::sm90 {

/// Where a lane finds or puts a row of 16 x 16 block (row, column) of a matrix of 32 x 32: of its 8 x 8 blocks those of
/// the first column first, as for an operand of 16 rows, or those of the first row first, as for one of 16 columns,
/// given transposed.
__device__ __forceinline__ int by_columns(int row, int column, int lane) {
  return swizzled64(16 * row + lane % 16, 2 * column + lane / 16);
}
__device__ __forceinline__ int by_rows(int row, int column, int lane) {
  return swizzled64(16 * row + lane / 16 * 8 + lane % 8, 2 * column + lane / 8 % 2);
}

/// Product of 16 x 16 blocks; y is given transposed.
template <bool FP16>
__device__ __forceinline__ void multiply_blocks(float (&d)[8], const uint32_t (&x)[4], const uint32_t (&y)[4]) {
  mma<FP16>(d, x, y[0], y[1]);
  mma<FP16>(d + 4, x, y[2], y[3]);
}

/// Eight accumulators in bf16, times a power of two: scaled after the rounding, two at once, which is exact above
/// 2^-126.
__device__ __forceinline__ void pack_block(uint32_t (&y)[4], const float* d, float power) {
  const uint32_t both = pack(power, power);
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = multiply(pack(d[2 * i], d[2 * i + 1]), both);
}

/// Ak = Ab^T Kr, times 2^-CARRIED, into the place of Ki. By a warpgroup: 128 channels times 32 tokens.
template <bool FP16>
__device__ __forceinline__ void fold_keys(Stage& stage, uint32_t use, const char* inverse, int warp, int lane) {
  using namespace cute::SM90::GMMA;
  using Product = std::conditional_t<FP16, MMA_64x32x16_F32F16F16_SS<Major::MN, Major::K>,
                                     MMA_64x32x16_F32BF16BF16_SS<Major::MN, Major::K>>;
  const uint64_t kr = descriptor(stage.late(use, 0), LayoutType::B128, 1024),
                 ab = descriptor(inverse, LayoutType::B64, 512);
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // one after the other: the registers of both are not there
    float d[16];
    hold(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Product::fma(operand_at(kr, half * HALF_STRIDE + i * 16 * 128), operand_at(ab, i * 32), d[0], d[1], d[2], d[3],
                   d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                   i == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    hold(d);
#pragma unroll
    for (int m = 0; m < 2; ++m) {  // 16 tokens
      uint32_t y[4];
      pack_block(y, &d[8 * m], power_of_two(-CARRIED) / (SCALE<FP16> * SCALE<FP16>));
      char* row = stage.gate(use, half) + swizzled(16 * m + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
      store_transposed(row, y[0], y[1], y[2], y[3]);
    }
  }
}

/// Aq = M Ab in place of M, by a warp. `inverse` holds Ab transposed.
template <bool FP16>
__device__ __forceinline__ void fold_queries(char* aq, const char* inverse, int anchor, int lane) {
  uint32_t ab[3][4], m[3][4];  // blocks (0, 0), (1, 0), (1, 1)
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    load_matrices(ab[i], inverse + by_rows(i / 2, (i + 1) / 2, lane));
    load_matrices(m[i], aq + by_columns((i + 1) / 2, i / 2, lane));
  }
  float d[3][8] = {};
  multiply_blocks<FP16>(d[0], m[0], ab[0]);
  multiply_blocks<FP16>(d[1], m[1], ab[0]);
  multiply_blocks<FP16>(d[2], m[2], ab[2]);
  multiply_blocks<FP16>(d[1], m[2], ab[1]);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    uint32_t y[4];
    pack_block(y, d[i], (i ? power_of_two(anchor - CARRIED) : 1.0f) / (SCALE<FP16> * SCALE<FP16>));
    store_matrices(aq + by_columns((i + 1) / 2, i / 2, lane), y[0], y[1], y[2], y[3]);
  }
}

}  // namespace kda::sm90
