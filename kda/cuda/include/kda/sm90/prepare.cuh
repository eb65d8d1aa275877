// What a chunk needs that does not depend on the state. One warpgroup per chunk; two groups take turns.
//
// With G the sum of log2 decays from the chunk's start, and rows t, s of the chunk:
//
//   Kd = k 2^G    Qd = q 2^G    Ki = k 2^-G    Kr = k 2^(G_end - G)
//   L  = strict_lower(Kd Ki^T) beta_t     M = lower(Qd Ki^T)
//   Ab = (I + L)^-1 diag(beta)            Ak = Ab^T Kr         Aq = M Ab
//
// 2^G spans more than the exponent of bf16 over 32 tokens of the strongest gate. So rows of Kd, Qd and Ki are anchored by
// constants, the same whatever the gates are (so that no row depends on a later token): G + CARRIED in rows 0..15, G +
// anchor in rows 16..31. Kd S would overflow for slow channels and large states; the recurrence carries its state times
// 2^-CARRIED. That leaves 2^(anchor - CARRIED) too much in block (rows >= 16, columns < 16) of L and M, taken out again
// exactly; rows of Aq are given their anchor, because they join Qd S and multiply what carries 2^-CARRIED.
#pragma once
#include "cute/arch/mma_sm90_gmma.hpp"
#include "kda/numerics.h"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The log2 decay is lower_bound log2(e) sigmoid(exp(A_log) (g + bias)). Its constants for two channels: the biases, and
/// -log2(e) exp(A_log). They live in shared memory, because the chunk needs the registers.
__device__ __forceinline__ float4 gate_of(const kda_fwd_params& p, int head, int channel) {
  const float A_log = p.A_log ? load_float(p.A_log, head * p.A_log_stride, p.A_log_dtype) : 0.0f;
  float bias[2] = {0.0f, 0.0f};
  if (p.dt_bias) {
    for (int i = 0; i < 2; ++i) {
      const int64_t at = head * p.dt_bias_stride[0] + (channel + i) * p.dt_bias_stride[1];
      bias[i] = clamp(load_float(p.dt_bias, at, p.dt_bias_dtype), -1e30f, 1e30f);
    }
  }
  // Never 0: a tail's gate of -inf times the slope must be infinite.
  return make_float4(bias[0], bias[1], -LOG2E * exp2_fast(LOG2E * clamp(A_log, -69.0f, MAX_EXP)), 0.0f);
}

__device__ __forceinline__ float sigmoid(float g, float bias, float slope) {
  return reciprocal(1.0f + exp2_fast(slope * (g + bias)));
}

/// Kd, Qd, Ki, Kr and the chunk's decay, each thread two channels of 16 rows, in place of k, q, g.
__device__ __forceinline__ void decay_rows(Stage& stage, float (&sums)[2][CHANNELS], const float4& gate, float bound,
                                           float anchor, int thread, int barrier, const Barrier& ready,
                                           uint32_t use) {
  const int warp = thread / 32, lane = thread % 32, half = warp & 1, upper = warp >> 1;
  const int channel = half * HALF + 2 * lane;
  const int first = upper * 16 * 128;  // byte of the thread's first row
  auto word = [&](char* tile, int i) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(tile + first + i * 128 + ((lane * 4) ^ ((i & 7) * 16)));
  };

  float G[2][16];
  float a = 0.0f, b = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t g = word(stage.half[half].g, i);
    a = fmaf(bound, sigmoid(low(g), gate.x, gate.z), a), b = fmaf(bound, sigmoid(high(g), gate.y, gate.z), b);
    G[0][i] = a, G[1][i] = b;
  }
  *reinterpret_cast<float2*>(&sums[upper][channel]) = make_float2(a, b);
  cutlass::arch::NamedBarrier::sync(128, barrier);
  ready.wait(use);
  const float2 before = *reinterpret_cast<const float2*>(&sums[0][channel]);
  const float2 after = *reinterpret_cast<const float2*>(&sums[1][channel]);
  const float2 end = make_float2(before.x + after.x, before.y + after.y);
  // What is added to G, and Kr = Ki * rest * rest: two factors keep every intermediate within the exponent.
  const float constant = upper ? anchor : static_cast<float>(CARRIED);
  const float2 shift = make_float2(upper ? before.x + constant : constant, upper ? before.y + constant : constant);
  const float2 rest = make_float2(exp2_fast(0.5f * (end.x + constant)), exp2_fast(0.5f * (end.y + constant)));
  if (upper) *reinterpret_cast<float2*>(&stage.decay[channel]) = make_float2(exp2_fast(end.x), exp2_fast(end.y));

#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 norm = stage.norm[upper * 16 + i];
    const float x = G[0][i] + shift.x, y = G[1][i] + shift.y;
    const float ex = exp2_fast(x), ey = exp2_fast(y);
    const uint32_t k = word(stage.half[half].k, i), q = word(stage.half[half].q, i);
    const float kx = low(k) * norm.x, ky = high(k) * norm.x;
    const float ix = kx * exp2_fast(-x), iy = ky * exp2_fast(-y);
    word(stage.half[half].k, i) = pack(kx * ex, ky * ey);
    word(stage.half[half].q, i) = pack(low(q) * norm.y * ex, high(q) * norm.y * ey);
    word(stage.half[half].g, i) = pack(ix, iy);
    word(stage.half[half].kr, i) = pack(ix * rest.x * rest.x, iy * rest.y * rest.y);
  }
}

/// Rows of Kd Ki^T (warps 0 and 1) and Qd Ki^T (warps 2 and 3): 16 rows a warp, 32 columns.
__device__ __forceinline__ void score(Stage& stage, float (&d)[16]) {
  using namespace cute::SM90::GMMA;
  using Product = MMA_64x32x16_F32BF16BF16_SS<Major::K, Major::K>;
  const uint64_t kq = descriptor(stage.half[0].k, LayoutType::B128, 1024);
  const uint64_t ki = descriptor(stage.half[0].g, LayoutType::B128, 1024);
  hold(d);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Product::fma(operand_at(kq, i / 4 * HALF_STRIDE + i % 4 * 32), operand_at(ki, i / 4 * HALF_STRIDE + i % 4 * 32),
                 d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                 i == 0 ? ScaleOut::Zero : ScaleOut::One);
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
  hold(d);
}

/// L transposed, in fp32, from 16 rows of Kd Ki^T. Element d[4 n + 2 r + e] is row 8 r + lane / 4 of the warp's 16 and
/// column 8 n + lane % 4 * 2 + e. Masks select: what they hide may be infinite.
__device__ __forceinline__ void mask_keys(const Stage& stage, const float (&d)[16], float exact, float* lower, int upper,
                                          int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * upper + 8 * r + lane / 4;
    const float beta = stage.beta[row], early = beta * exact;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + lane % 4 * 2 + e;
        const float x = d[4 * n + 2 * r + e] * (n < 2 ? early : beta);
        lower[column * LOWER_PITCH + row] = column < row ? x : 0.0f;
      }
    }
  }
}

/// 16 rows of M from those of Qd Ki^T. They wait in the place of Aq, so that the inverse has the registers.
__device__ __forceinline__ void mask_queries(Stage& stage, const float (&d)[16], float exact, int upper, int lane) {
  uint32_t m[2][4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 16 * upper + 8 * r + lane / 4, column = 8 * n + lane % 4 * 2;
      const float scale = n < 2 ? exact : 1.0f;
      const float x = d[4 * n + 2 * r] * scale, y = d[4 * n + 2 * r + 1] * scale;
      m[n / 2][n % 2 * 2 + r] = pack(column <= row ? x : 0.0f, column + 1 <= row ? y : 0.0f);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    store_matrices(stage.aq + swizzled64(16 * upper + lane % 16, 2 * n + lane / 16), m[n][0], m[n][1], m[n][2], m[n][3]);
  }
}

/// Ab = (I + L)^-1 diag(beta), transposed, in bf16; by one warp.
///
/// Entries of the inverse are bounded, powers of L are not, so the four 8 x 8 blocks of the diagonal are substituted, in
/// fp32, a column a lane. Blocks are merged, 8 to 16 to 32, by (A 0; C B)^-1 = (A' 0; -B' C A' B') on the tensor cores, in
/// tf32 with two terms an operand: with weights near 2 one term loses what Ab in bf16 would still hold.
__device__ __forceinline__ void invert(const float* lower, float* solved, const Stage& stage, char* inverse, int lane) {
  const int block = lane / 8, g = lane / 4, t = 2 * (lane % 4);
  auto L = [&](int row, int column) {  // and the row after it
    return *reinterpret_cast<const float2*>(lower + column * LOWER_PITCH + row);
  };
  auto T = [&](int row, int column) -> float& { return solved[column * SOLVED_PITCH + row]; };
  auto T2 = [&](int row, int column) { return *reinterpret_cast<const float2*>(&T(row, column)); };

  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == lane % 8 ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 7; ++j) {
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 8; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(lower + (8 * block + j) * LOWER_PITCH + 8 * block + i);
      const float column[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e > j) x[i + e] = fmaf(-column[e], x[j], x[i + e]);
      }
    }
  }
  const int place = block % 2 * 8;  // of the block in its 16 x 16 block
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(&T(place + i, lane)) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    if (place) *reinterpret_cast<float4*>(&T(i, lane)) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncwarp();

  {  // 8 to 16, two at once: of a product's rows the first eight belong to one, the last eight to the other
    float p[4] = {}, q[4] = {};
    const float b[4] = {T(8 + g, 8 + t), T(8 + g, 24 + t), T(8 + g, 8 + t + 1), T(8 + g, 24 + t + 1)};
    mma_tf32x2(p, b[0], b[1], b[2], b[3], L(8 + t, g));
    mma_tf32x2(q, b[0], b[1], b[2], b[3], L(24 + t, 16 + g));
    float first[4] = {}, second[4] = {};
    mma_tf32x2(first, p[0], q[2], p[1], q[3], T2(t, g));
    mma_tf32x2(second, p[0], q[2], p[1], q[3], T2(t, 16 + g));
    T(8 + g, t) = -first[0], T(8 + g, t + 1) = -first[1];
    T(8 + g, 16 + t) = -second[2], T(8 + g, 16 + t + 1) = -second[3];
  }
  __syncwarp();

  float product[2][4] = {}, corner[2][4] = {};  // columns 0..7 and 8..15
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    const float b[4] = {T(g, 16 + k + t), T(8 + g, 16 + k + t), T(g, 16 + k + t + 1), T(8 + g, 16 + k + t + 1)};
    for (int n = 0; n < 2; ++n) mma_tf32x2(product[n], b[0], b[1], b[2], b[3], L(16 + k + t, 8 * n + g));
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float(&p)[4] = product[k];
    for (int n = 0; n < 2; ++n) mma_tf32x2(corner[n], p[0], p[2], p[1], p[3], T2(8 * k + t, 8 * n + g));
  }
  const float2 beta0 = *reinterpret_cast<const float2*>(&stage.beta[t]);
  const float2 beta1 = *reinterpret_cast<const float2*>(&stage.beta[8 + t]);
  store_transposed(inverse + swizzled64(lane % 16, 2 + lane / 16), pack(-corner[0][0] * beta0.x, -corner[0][1] * beta0.y),
                   pack(-corner[1][0] * beta1.x, -corner[1][1] * beta1.y),
                   pack(-corner[0][2] * beta0.x, -corner[0][3] * beta0.y),
                   pack(-corner[1][2] * beta1.x, -corner[1][3] * beta1.y));
  const float beta = stage.beta[lane];
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    const float4 a = *reinterpret_cast<const float4*>(&T(i, lane)), b = *reinterpret_cast<const float4*>(&T(i + 4, lane));
    *reinterpret_cast<uint4*>(inverse + swizzled64(lane, lane / 16 * 2 + i / 8)) =
        make_uint4(pack(a.x * beta, a.y * beta), pack(a.z * beta, a.w * beta), pack(b.x * beta, b.y * beta),
                   pack(b.z * beta, b.w * beta));
  }
}

/// Ak = Ab^T Kr into the place of Ki: a warp makes 32 channels of all rows.
__device__ __forceinline__ void fold_keys(Stage& stage, const char* inverse, int warp, int lane) {
  const int half = warp / 2, row = lane % 16, side = lane / 16;
  uint32_t a[3][4];  // blocks (0, 0), (0, 1), (1, 1) of Ab^T; (1, 0) is zero
  load_matrices(a[0], inverse + swizzled64(row, side));
  load_matrices(a[1], inverse + swizzled64(row, 2 + side));
  load_matrices(a[2], inverse + swizzled64(16 + row, 2 + side));
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int vector = warp % 2 * 4 + n * 2 + side;
    uint32_t early[4], late[4];  // Kr of tokens 0..15 and 16..31, 16 channels
    load_transposed(early, stage.half[half].kr + swizzled(row, vector));
    load_transposed(late, stage.half[half].kr + swizzled(16 + row, vector));
    float d[2][2][4] = {};
    for (int m = 0; m < 2; ++m) {
      if (m == 0) {
        mma(d[0][0], a[0], early[0], early[1]);
        mma(d[0][1], a[0], early[2], early[3]);
      }
      mma(d[m][0], a[1 + m], late[0], late[1]);
      mma(d[m][1], a[1 + m], late[2], late[3]);
      store_matrices(stage.half[half].g + swizzled(16 * m + row, vector), pack(d[m][0][0], d[m][0][1]),
                     pack(d[m][0][2], d[m][0][3]), pack(d[m][1][0], d[m][1][1]), pack(d[m][1][2], d[m][1][3]));
    }
  }
}

/// 16 rows of Aq = M Ab, times `scale`, in place of those rows of M.
__device__ __forceinline__ void fold_queries(Stage& stage, const char* inverse, float scale, int upper, int lane) {
  const int column = lane % 8 + lane / 16 * 8, side = lane / 8 % 2, row = 16 * upper + lane % 16;
  float d[4][4] = {};
  uint32_t m[2][4], b[4];
  load_matrices(m[0], stage.aq + swizzled64(row, lane / 16));
  load_matrices(m[1], stage.aq + swizzled64(row, 2 + lane / 16));
  load_matrices(b, inverse + swizzled64(column, side));
  mma(d[0], m[0], b[0], b[1]);
  mma(d[1], m[0], b[2], b[3]);
  if (upper) {
    load_matrices(b, inverse + swizzled64(column, 2 + side));
    mma(d[0], m[1], b[0], b[1]);
    mma(d[1], m[1], b[2], b[3]);
    load_matrices(b, inverse + swizzled64(16 + column, 2 + side));
    mma(d[2], m[1], b[0], b[1]);
    mma(d[3], m[1], b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float(&x)[4] = d[2 * n], (&y)[4] = d[2 * n + 1];
    store_matrices(stage.aq + swizzled64(row, 2 * n + lane / 16), pack(x[0] * scale, x[1] * scale),
                   pack(x[2] * scale, x[3] * scale), pack(y[0] * scale, y[1] * scale), pack(y[2] * scale, y[3] * scale));
  }
}

/// The role of a producer warpgroup: chunks `group`, `group + 2`, ... of this CTA.
__device__ __forceinline__ void prepare(const Arguments& args, Shared& s, int group) {
  const kda_fwd_params& p = args.p;
  const int thread = threadIdx.x % 128, warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
  float* lower = s.lower[group];
  char* inverse = s.inverse[group];
  Ring ring;
  for_tasks(args, s, [&](const Task& task) {
    s.gate[group][thread] = gate_of(p, task.value_head, (warp & 1) * HALF + 2 * lane);
#pragma unroll 1
    for (const uint32_t end = ring.chunk + task.chunks(); ring.chunk != end; ++ring.chunk) {
      if (ring.chunk % GROUPS != group) continue;
      Stage& stage = s.stage[ring.stage()];
      s.raw[ring.stage()].wait(ring.use());
      const bool tail = ring.chunk + 1 == end && task.length % TOKENS != 0;
      if (tail) s.ready[ring.stage()].wait(ring.use());  // else the gates can be read before the norms are there
      decay_rows(stage, s.sum[group], s.gate[group][thread], p.lower_bound * LOG2E, static_cast<float>(args.anchor), thread, group,
                 s.ready[ring.stage()], ring.use());
      publish();
      cutlass::arch::NamedBarrier::sync(128, group);

      float d[16];
      score(stage, d);
      const int upper = warp & 1;
      const float exact = upper ? power_of_two(CARRIED - args.anchor) : 1.0f;
      if (warp < 2) {
        mask_keys(stage, d, exact, lower, upper, lane);
        cutlass::arch::NamedBarrier::sync(64, GROUPS + group);
        if (warp == group) invert(lower, s.solved[group], stage, inverse, lane);
      } else {
        mask_queries(stage, d, exact, upper, lane);
      }
      cutlass::arch::NamedBarrier::sync(128, group);
      fold_keys(stage, inverse, warp, lane);
      if (warp >= 2) fold_queries(stage, inverse, power_of_two(upper ? args.anchor : CARRIED), upper, lane);
      publish();
      arrive_warp(s.full[ring.stage()]);
    }
  });
}

}  // namespace kda::sm90
