// The elementwise half of a producer's work: gates to sums of log2 decays, and these to Kd, Qd, Ki and Kr; see
// prepare.cuh.
#pragma once
#include "kda/numerics.h"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The log2 decay is lower_bound log2(e) sigmoid(exp(A_log) (g + bias)). With slope = -log2(e) exp(A_log), the exponent
/// of the sigmoid is slope g + offset. The constants live in shared memory, because the chunk needs the registers.
__device__ __forceinline__ float slope_of(const kda_fwd_params& p, int head) {
  const float A_log = p.A_log ? load_float(p.A_log, head * p.A_log_stride, p.A_log_dtype) : 0.0f;
  // Never 0: a tail's gate of -inf times the slope must be infinite. Steeper than exp(69) the sigmoid is a step.
  return -LOG2E * exp2_fast(LOG2E * clamp(A_log, -69.0f, 69.0f));
}

/// slope bias of four channels: finite, so that only g can make the exponent infinite.
__device__ __forceinline__ float4 offsets_of(const kda_fwd_params& p, float slope, int head, int channel) {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (p.dt_bias) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = head * p.dt_bias_stride[0] + (channel + i) * p.dt_bias_stride[1];
      const float bias = clamp(load_float(p.dt_bias, at, p.dt_bias_dtype), -1e30f, 1e30f);
      x[i] = clamp(slope * bias, -3e38f, 3e38f);
    }
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ float sigmoid(float g, float slope, float offset) {
  return reciprocal(1.0f + exp2_fast(fmaf(g, slope, offset)));
}

/// Rows in the body of a loop over a thread's 8. With all of them in line the roles' code outgrows the instruction
/// cache.
constexpr int ROWS = 2;

/// This thread's 8 rows of four channels in the tiles of a stage. A warp has all channels of its rows: lanes 0..15
/// those of the first half. 16 lanes then read a whole row of 128 bytes, so no bank twice.
///
/// Row and place within it are bits of the address that are nowhere else, so that a row is one exclusive or away.
struct Words {
  static constexpr uint32_t ROW = 128 + 16;  // i rows down, and swizzled for them
  uint32_t first;                            // of row 8 warp in the stage's k

  __device__ Words(const Stage& stage, int warp, int lane)
      : first(cute::cast_smem_ptr_to_uint(stage.half[0].k) + lane / 16 * HALF_STRIDE + warp * 8 * 128 + lane % 16 * 8) {
  }
  __device__ uint32_t row(uint32_t step) const { return first ^ step; }
};
static_assert(alignof(Stage) % 1024 == 0 && HALF_BYTES % 1024 == 0 && HALF_STRIDE % 1024 == 0);

/// Bytes from a stage's k to another of its tiles.
__device__ __forceinline__ uint32_t bytes_to(const Stage& stage, const char* tile) {
  return static_cast<uint32_t>(tile - stage.half[0].k);
}

/// Sums of log2 decays from the first of the warp's rows, in place of the gate and in a tile that is free: registers
/// have no room for them until the decays are made. The warp's whole sums are for the other warps.
__device__ __forceinline__ void sum_gates(Stage& stage, uint32_t use, float4 (&sums)[4][32], const float4& offset,
                                          const float& slope, float bound, int warp, int lane) {
  const Words words(stage, warp, lane);
  const uint32_t gate = bytes_to(stage, stage.gate(use, 0)), late = bytes_to(stage, stage.late(use, 0));
  const float4 b = offset;
  const float a = slope;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint2 next[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) next[r] = in_shared<uint2>(words.row(r * Words::ROW) + gate);
#pragma unroll 1
  for (uint32_t step = 0; step < 8 * Words::ROW; step += ROWS * Words::ROW) {
    const uint32_t ahead = step + ROWS * Words::ROW < 8 * Words::ROW ? step + ROWS * Words::ROW : 0;
    uint2 g[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      g[r] = next[r], next[r] = in_shared<uint2>((words.row(ahead) ^ r * Words::ROW) + gate);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sum[0] = fmaf(bound, sigmoid(low(g[r].x), a, b.x), sum[0]),
      sum[1] = fmaf(bound, sigmoid(high(g[r].x), a, b.y), sum[1]);
      sum[2] = fmaf(bound, sigmoid(low(g[r].y), a, b.z), sum[2]),
      sum[3] = fmaf(bound, sigmoid(high(g[r].y), a, b.w), sum[3]);
      const uint32_t row = words.row(step) ^ r * Words::ROW;
      in_shared<float2>(row + gate) = make_float2(sum[0], sum[1]);
      in_shared<float2>(row + late) = make_float2(sum[2], sum[3]);
    }
  }
  sums[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/// Kd, Qd, Ki and Kr in place of k, q, and the sums; and the decay of the whole chunk. QUERIES: whether there are any.
template <bool FP16, bool QUERIES>
__device__ __forceinline__ void decay_rows(Stage& stage, uint32_t use, const float4 (&sums)[4][32], float anchor,
                                           int warp, int lane) {
  const Words words(stage, warp, lane);
  const uint32_t queries = bytes_to(stage, stage.half[0].q);
  const uint32_t gate = bytes_to(stage, stage.gate(use, 0)), late = bytes_to(stage, stage.late(use, 0));

  // What is added to G: the rows before, and a constant. Kr = Ki 2^(G_end + constant): in bf16 by two equal factors,
  // which keep every intermediate within the exponent. In fp16, where it has SCALE too, one will do: it is at most
  // 2^127, and underflows, below 2^-126, only in rows 0..15, where G >= -anchor, so where Kr < 2^-50. Sums grow in the
  // order of rows, so none depends on a later one.
  const float constant = warp >= 2 ? anchor : static_cast<float>(CARRIED);
  float rest[4], shift[4];
  {
    float before[4] = {0.0f, 0.0f, 0.0f, 0.0f}, end[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = sums[i][lane];
      const float sum[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (i == warp) before[c] = end[c];
        end[c] = i ? end[c] + sum[c] : sum[c];
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      rest[c] = exp2_fast(FP16 ? end[c] + (constant + SM90_FP16_BITS) : 0.5f * (end[c] + constant));
      shift[c] = before[c] + constant;
    }
    if (warp == 2) {  // which has the least to do afterwards
#pragma unroll
      for (int c = 0; c < 4; c += 2) {
        *reinterpret_cast<float2*>(&stage.decay[decay_at(4 * lane + c)]) =
            make_float2(exp2_fast(end[c]), exp2_fast(end[c + 1]));
      }
    }
  }

  const float2* norms = &stage.norm[8 * warp];
#pragma unroll 1
  for (uint32_t step = 0; step < 8 * Words::ROW; step += ROWS * Words::ROW, norms += ROWS) {
    uint2 k[ROWS], q[ROWS];
    float2 g[ROWS][2], norm[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // before the stores, which no load is moved across
      const uint32_t row = words.row(step) ^ r * Words::ROW;
      k[r] = in_shared<uint2>(row);
      if constexpr (QUERIES) q[r] = in_shared<uint2>(row + queries);
      g[r][0] = in_shared<float2>(row + gate), g[r][1] = in_shared<float2>(row + late);
      norm[r] = norms[r];
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const uint32_t pairs[2] = {k[r].x, k[r].y};
      uint2 kd, qd, ki, kr;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = g[r][j].x + shift[2 * j], y = g[r][j].y + shift[2 * j + 1];
        const float ex = exp2_fast(x), ey = exp2_fast(y);
        const float kx = low(pairs[j]) * norm[r].x, ky = high(pairs[j]) * norm[r].x;
        const float ix = kx * exp2_fast(-x), iy = ky * exp2_fast(-y);
        (j ? kd.y : kd.x) = pack(kx * ex, ky * ey);
        if constexpr (QUERIES) {
          const uint32_t other = j ? q[r].y : q[r].x;
          (j ? qd.y : qd.x) = pack(low(other) * norm[r].y * ex, high(other) * norm[r].y * ey);
        }
        (j ? ki.y : ki.x) = pack(ix, iy);
        const float rx = ix * rest[2 * j], ry = iy * rest[2 * j + 1];
        (j ? kr.y : kr.x) = FP16 ? pack16<FP16>(rx, ry) : pack(rx * rest[2 * j], ry * rest[2 * j + 1]);
      }
      const uint32_t row = words.row(step) ^ r * Words::ROW;
      in_shared<uint2>(row) = kd;
      if constexpr (QUERIES) in_shared<uint2>(row + queries) = qd;
      in_shared<uint2>(row + gate) = ki, in_shared<uint2>(row + late) = kr;
    }
  }
}

}  // namespace kda::sm90
