// The inverse folded into keys and queries: Ak = Ab^T Kr and Aq = M Ab; see prepare.cuh.
#pragma once
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"

namespace kda::sm90 {

/// Products with Ab = (A 0; -B T A  B), of which A and B are its blocks on the diagonal, and T that of Kd Ki^T below it (L is
/// diag(beta) Kd Ki^T and B has its beta, so B T is what (I + L)^-1 has there):
///
///   (X Y) Ab = ((X - (Y B) T) A   Y B)
///
/// The same for 16 rows of M, and for 16 channels of Kr^T, which gives those of Ak^T. In bf16, T and what is multiplied again
/// have two terms: with one, weights near 2 double the kernel's error.
template <bool FP16>
struct Fold {
  using Operand = uint32_t[4];

  static constexpr int TERMS = FP16 ? 1 : 2;
  Operand a, b, minus_t;    // [n][k] for k = 0..7 and 8..15, n = 0..7, then n = 8..15
  const char* second_term;  // of minus_t, for which registers have no room

  __device__ __forceinline__ Fold(const char* inverse, int lane) : second_term(inverse + term_of_t(1, lane)) {
    const int n = lane % 8 + lane / 16 * 8, k = lane / 8 % 2;
    load_matrices(a, inverse + swizzled64(n, k));
    load_matrices(b, inverse + swizzled64(16 + n, 2 + k));
    load_transposed(minus_t, inverse + term_of_t(0, lane));
  }

  /// Where a lane finds or puts a row of one of T's terms: above the diagonal of Ab, then below it.
  static __device__ __forceinline__ int term_of_t(int term, int lane) {
    return swizzled64(16 * term + lane % 16, 2 - 2 * term + lane / 16);
  }

  static __device__ __forceinline__ void times(float (&d)[2][4], const Operand& x, const Operand& y) {
    mma<FP16>(d[0], x, y[0], y[1]);
    mma<FP16>(d[1], x, y[2], y[3]);
  }

  /// Accumulators over SCALE as an operand of the next product.
  static __device__ __forceinline__ void again(Operand (&x)[TERMS], const float (&d)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = d[i / 2][i % 2 * 2] * (1.0f / SCALE<FP16>), second = d[i / 2][i % 2 * 2 + 1] * (1.0f / SCALE<FP16>);
      x[0][i] = pack16<FP16>(first, second);
      if constexpr (TERMS == 2) x[1][i] = pack(first - low(x[0][i]), second - high(x[0][i]));
    }
  }

  /// Times SCALE^2.
  __device__ __forceinline__ void operator()(const Operand& x, const Operand& y, float (&first)[2][4],
                                             float (&second)[2][4]) const {
    Operand next[TERMS];
    float z[2][4] = {};
    times(second, y, b);
    times(first, x, a);
    again(next, second);
    times(z, next[0], minus_t);
    if constexpr (TERMS == 2) {
      times(z, next[1], minus_t);
      Operand rest;
      load_transposed(rest, second_term);
      times(z, next[0], rest);
    }
    again(next, z);
#pragma unroll
    for (int i = 0; i < TERMS; ++i) times(first, next[i], a);
  }
};

/// Four registers of 16 x 16 accumulators in bf16, times `scale`: two 8 x 8 blocks of the first 8 columns, two of the last.
__device__ __forceinline__ void pack_block(uint32_t (&y)[4], const float (&d)[2][4], float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = pack(d[i / 2][i % 2 * 2] * scale, d[i / 2][i % 2 * 2 + 1] * scale);
}

/// Ak = Ab^T Kr into the place of Ki: a warp makes 32 channels of all rows.
template <bool FP16>
__device__ __forceinline__ void fold_keys(char* gate, const char* late, const Fold<FP16>& fold, int warp, int lane) {
  const int offset = warp / 2 * HALF_STRIDE;
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    const int vector = warp % 2 * 4 + n * 2;  // channels 0..7 of the 16; those of the other 8 follow
    uint32_t x[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      load_transposed(x[m], late + offset + swizzled(16 * m + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2));
    }
    float d[2][2][4] = {};
    fold(x[0], x[1], d[0], d[1]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t y[4];
      pack_block(y, d[m], 1.0f / (SCALE<FP16> * SCALE<FP16>));
      store_transposed(gate + offset + swizzled(16 * m + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2), y[0], y[1], y[2], y[3]);
    }
  }
}

/// 16 rows of Aq = M Ab, times `scale`.
template <bool FP16, bool UPPER>
__device__ __forceinline__ void fold_queries(Stage& stage, const Fold<FP16>& fold, float scale, int lane,
                                             const uint32_t (&m)[2][4]) {
  float d[2][2][4] = {};
  if constexpr (UPPER) {
    fold(m[0], m[1], d[0], d[1]);
  } else {
    fold.times(d[0], m[0], fold.a);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    uint32_t y[4];
    pack_block(y, d[n], scale);
    store_matrices(stage.aq + swizzled64(16 * UPPER + lane % 16, 2 * n + lane / 16), y[0], y[1], y[2], y[3]);
  }
}

}  // namespace kda::sm90
