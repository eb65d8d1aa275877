// The inverse of a chunk's triangle, and Aq from it: the role of one warp, beside the producers, because it is one long
// chain that four warps would wait for.
#pragma once
#include "kda/sm90/device.cuh"
#include "kda/sm90/fold.cuh"
#include "kda/sm90/pair.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The 16 x 16 blocks on the diagonal of Ab = (I + L)^-1 diag(beta), transposed: row j of `inverse` is column j of Ab.
///
/// Entries of the inverse are bounded, powers of L are not, so 8 x 8 blocks are substituted, in fp32, a column a lane,
/// and merged by (A 0; C B)^-1 = (A' 0; -B' C A' B') on the tensor cores, in tf32 with two terms an operand: with
/// weights near 2 one term loses what Ab would still hold. C A' is made transposed, A'^T C^T: then a lane's
/// accumulators are its operands of the next product. Both merges share a product of 16 rows, 8 each.
template <bool FP16>
__device__ __forceinline__ void invert(const float* lower, float* solved, const Stage& stage, char* inverse, int lane) {
  const int block = lane / 8, column = lane % 8, g = lane / 4, t = 2 * (lane % 4);
  {
    const float* diagonal = lower + 8 * block * (LOWER_PITCH + 1);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 7; ++j) {
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < 8; i += 4) {
        const float4 l = *reinterpret_cast<const float4*>(diagonal + j * LOWER_PITCH + i);
        const float part[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e > j) x[i + e] = fmaf(-part[e], x[j], x[i + e]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      *reinterpret_cast<float4*>(&solved[lane * SOLVED_PITCH + i]) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
    const float beta = stage.beta[lane] * SCALE<FP16>;
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = pack16<FP16>(x[2 * i] * beta, x[2 * i + 1] * beta);
    *reinterpret_cast<uint4*>(inverse + swizzled64(lane, block)) = make_uint4(y[0], y[1], y[2], y[3]);
  }
  __syncwarp();

  auto solved_at = [&](int block, int row, int column) { return solved[(8 * block + column) * SOLVED_PITCH + row]; };
  const Split zero(0.0f);
  float product[4] = {}, corner[4] = {};  // A'^T C^T and B' C A': rows 0..7 of the first merge, 8..15 of the second
  float small[4] = {}, corner_small[4] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 a = *reinterpret_cast<const float2*>(&solved[(16 * m + g) * SOLVED_PITCH + t]);
    const float* c = lower + (16 * m + t) * LOWER_PITCH + 16 * m + 8 + g;
    const Split x(a.x), y(a.y), b[2] = {Split(c[0]), Split(c[LOWER_PITCH])};
    const Split rows[4] = {m ? zero : x, m ? x : zero, m ? zero : y, m ? y : zero};
    mma_tf32x2(product, small, rows, b);
  }
  add(product, small);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const Split x(solved_at(2 * m + 1, g, t)), y(solved_at(2 * m + 1, g, t + 1));
    const Split rows[4] = {m ? zero : x, m ? x : zero, m ? zero : y, m ? y : zero};
    const Split b[2] = {Split(product[2 * m]), Split(product[2 * m + 1])};
    mma_tf32x2(corner, corner_small, rows, b);
  }
  add(corner, corner_small);
  uint32_t y[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 beta = *reinterpret_cast<const float2*>(&stage.beta[16 * m + t]);
    y[m] = pack16<FP16>(-corner[2 * m] * (beta.x * SCALE<FP16>), -corner[2 * m + 1] * (beta.y * SCALE<FP16>));
  }
  store_transposed(inverse + swizzled64(16 * (lane / 8 % 2) + lane % 8, 1 + 2 * (lane / 8 % 2)), y[0], y[1]);
}

/// Where a lane finds or puts a row of one of the terms of minus T: beside the first block of L.
__device__ __forceinline__ char* term_of_t(float* lower, int term, int lane) {
  return reinterpret_cast<char*>(lower + lane % 16 * LOWER_PITCH + 16) + 32 * term + lane / 16 * 16;
}

/// Two floats over SCALE as operands: in bf16 with two terms, because T and what it is multiplied with cancel where
/// weights are near 2.
template <bool FP16>
constexpr int TERMS = FP16 ? 1 : 2;

template <bool FP16>
__device__ __forceinline__ void split(uint32_t (&y)[TERMS<FP16>], float first, float second) {
  y[0] = pack16<FP16>(first, second);
  if constexpr (!FP16) y[1] = pack_rest(y[0], first, second);
}

/// The block below: of Ab = (A 0; -B T A  B), where T is that of Kd Ki^T (L is diag(beta) Kd Ki^T, and B has its beta).
template <bool FP16>
__device__ __forceinline__ void merge(float* lower, char* inverse, int lane) {
  uint32_t a[4], b[4], t[4];
  load_matrices(a, inverse + by_rows(0, 0, lane));
  load_transposed(b, inverse + by_rows(1, 1, lane));
  float bt[8] = {}, c[8] = {};
#pragma unroll
  for (int i = 0; i < TERMS<FP16>; ++i) {
    load_transposed(t, term_of_t(lower, i, lane));
    multiply_blocks<FP16>(bt, b, t);
  }
  uint32_t x[TERMS<FP16>][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t y[TERMS<FP16>];
    split<FP16>(y, bt[2 * i] * (1.0f / SCALE<FP16>), bt[2 * i + 1] * (1.0f / SCALE<FP16>));
#pragma unroll
    for (int j = 0; j < TERMS<FP16>; ++j) x[j][i] = y[j];
  }
#pragma unroll
  for (int j = 0; j < TERMS<FP16>; ++j) multiply_blocks<FP16>(c, x[j], a);
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = pack16<FP16>(c[2 * i] * (1.0f / SCALE<FP16>), c[2 * i + 1] * (1.0f / SCALE<FP16>));
  }
  store_transposed(inverse + by_rows(0, 1, lane), y[0], y[1], y[2], y[3]);
}

/// The role of a warp: every chunk of this CTA.
template <bool FP16, Features WITH, class Exchange>
__device__ __forceinline__ void invert_chunks(const Arguments& args, Shared& s, Exchange exchange) {
  Ring ring;
  uint32_t turns = 0;  // bit g: of group g
  auto invert_task = [&](const Task& task) {
#pragma unroll 1
    for (int place = places_of_state<WITH>(task); place > 0; --place, ++ring.chunk) {
      if (!is_own<WITH>(ring.chunk)) continue;
      s.raw_gate[ring.stage()].wait(ring.use());
      arrive_warp(s.full[ring.stage()]);
    }
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++ring.chunk) {
      if (!is_own<WITH>(ring.chunk)) continue;
      const int group = group_of<WITH>(ring.chunk), lane = fresh_lane();
      Stage& stage = s.stage[ring.stage()];
      s.lower_full[group].wait(turns >> group & 1);
      turns ^= 1u << group;
      invert<FP16>(s.lower[group], s.solved, stage, s.inverse[group], lane);
      __syncwarp();
      merge<FP16>(s.lower[group], s.inverse[group], lane);
      publish();
      arrive_warp(s.inverse_full[group]);
      if (makes_output<WITH>(task)) {
        fold_queries<FP16>(stage.aq, s.inverse[group], args.anchor, lane);
        publish();
        if constexpr (WITH == PAIRS) {
          __syncwarp();
          if (lane == 0) send(stage.aq, sizeof(stage.aq), s.full[ring.stage()]);
        }
      }
      arrive_warp(s.full[ring.stage()]);
    }
  };
  for_tasks<WITH>(args, s, invert_task, exchange);
}

}  // namespace kda::sm90
