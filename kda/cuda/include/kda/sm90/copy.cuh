// The roles of single warps: bring tiles in, look at rows, take results out.
#pragma once
#include "cute/arch/copy_sm90_tma.hpp"
#include "kda/numerics.h"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// One lane: q, k, v, g of every chunk into the ring.
__device__ __forceinline__ void copy_in(const Arguments& a, Shared& s) {
  using Hint = cute::TMA::CacheHintSm90;
  const auto read_once = Hint::EVICT_FIRST, shared_by_group = a.p.H == a.p.HV ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL;
  Ring ring;
  for_tasks(a, s, [&](const Task& task) {
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++ring.chunk) {
      Stage& stage = s.stage[ring.stage()];
      TransactionBarrier& raw = s.raw[ring.stage()];
      s.empty[ring.stage()].wait(ring.use() ^ 1);
      raw.arrive_and_expect_tx(8 * HALF_BYTES);
      auto* mbarrier = reinterpret_cast<uint64_t*>(&raw);
      const int t = task.start + c * TOKENS;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int channel = half * HALF;
        auto load = [&](const CUtensorMap& map, void* to, int head, Hint hint) {
          cute::SM90_TMA_LOAD_4D::copy(&map, mbarrier, static_cast<uint64_t>(hint), to, channel, head, t, task.row);
        };
        load(a.g, stage.half[half].g, task.value_head, read_once);
        load(a.k, stage.half[half].k, task.head, shared_by_group);
        load(a.q, stage.half[half].q, task.head, shared_by_group);
        load(a.v, stage.half[half].v, task.value_head, read_once);
      }
    }
  });
}

/// 1 / norm of the 32 rows of a tile, through the diagonal of X X^T; `store(row, value)` is called once for each.
template <class Store>
__device__ __forceinline__ void inverse_norms(const Half& first, const Half& second, int lane, Store store) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t x[4];
      load_matrices(x, (i < 4 ? first : second) + swizzled(16 * block + lane % 16, i % 4 * 2 + lane / 16));
      mma(d[0], x, x[0], x[2]);  // rows against the first 8 of them
      mma(d[1], x, x[1], x[3]);  // and against the last 8
    }
    const int row = lane / 4;
    if (lane % 4 == row / 2) {  // this lane holds the diagonal's elements of rows `row` and `row + 8`
      store(16 * block + row, rsqrtf((row % 2 ? d[0][1] : d[0][0]) + L2NORM_EPS));
      store(16 * block + 8 + row, rsqrtf((row % 2 ? d[1][3] : d[1][2]) + L2NORM_EPS));
    }
  }
}

/// Two warps, one for k and g, one for q and v: norms, the activated beta, and what a tile holds beyond the sequence's
/// end, made harmless: k = q = v = 0 and a gate of -inf, the bounded gate's zero.
__device__ __forceinline__ void look_at_rows(const Arguments& a, Shared& s, bool queries) {
  const kda_fwd_params& p = a.p;
  const int lane = threadIdx.x % 32;
  Ring ring;
  for_tasks(a, s, [&](const Task& task) {
    const int64_t beta_row = task.row * p.beta_stride[0] + task.value_head * p.beta_stride[2];
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++ring.chunk) {
      Stage& stage = s.stage[ring.stage()];
      const int token = c * TOKENS + lane;
      float beta = 0.0f;
      if (!queries && token < task.length) {
        beta = load_float(p.beta, beta_row + int64_t{task.start + token} * p.beta_stride[1], p.beta_dtype);
        if (p.use_beta_sigmoid) beta = reciprocal(1.0f + exp2_fast(-LOG2E * beta));
        if (p.allow_neg_eigval) beta *= 2.0f;
      }
      s.raw[ring.stage()].wait(ring.use());
      if (!queries) stage.beta[lane] = beta;
      if (token >= task.length) {
        constexpr uint32_t minus_infinity = 0xff80ff80;  // two in bf16
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 gate = make_uint4(minus_infinity, minus_infinity, minus_infinity, minus_infinity);
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
          auto& half = stage.half[i / 8];
          const int at = swizzled(lane, i % 8);
          *reinterpret_cast<uint4*>((queries ? half.q : half.k) + at) = zero;
          *reinterpret_cast<uint4*>((queries ? half.v : half.g) + at) = queries ? zero : gate;
        }
        publish();  // the next bulk copy into this row comes after these stores
      }
      __syncwarp();
      float* norm = queries ? &stage.norm[0].y : &stage.norm[0].x;
      if (p.use_qk_l2norm) {
        inverse_norms(queries ? stage.half[0].q : stage.half[0].k, queries ? stage.half[1].q : stage.half[1].k, lane,
                      [&](int row, float x) { norm[2 * row] = x; });
      } else {
        norm[2 * lane] = 1.0f;
      }
      arrive_warp(s.ready[ring.stage()]);
    }
  });
}

/// One warp: o of every chunk out of shared memory; rows beyond the sequence's end are left alone.
__device__ __forceinline__ void copy_out(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int lane = threadIdx.x % 32;
  uint32_t chunk = 0;
  for_tasks(a, s, [&](const Task& task) {
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++chunk) {
      const int buffer = chunk % 2, rows = min(TOKENS, task.length - c * TOKENS);
      const int t = task.start + c * TOKENS;
      s.o_full[buffer].wait((chunk / 2) & 1);
      if (rows == TOKENS) {
        if (lane == 0) {
          for (int half = 0; half < 2; ++half)
            cute::SM90_TMA_STORE_4D::copy(&a.out, s.o[buffer].half[half], half * HALF, task.value_head, t, task.row);
          cute::tma_store_arrive();
          cute::tma_store_wait<0>();
        }
      } else {
        auto* out = static_cast<__nv_bfloat16*>(p.out) + task.row * p.out_stride[0] + task.value_head * p.out_stride[2];
#pragma unroll 1
        for (int i = lane; i < rows * 16; i += 32) {
          const int row = i / 16, vector = i % 16;
          const uint4 x = *reinterpret_cast<const uint4*>(s.o[buffer].half[vector / 8] + swizzled(row, vector % 8));
          *reinterpret_cast<uint4*>(out + int64_t{t + row} * p.out_stride[1] + vector * 8) = x;
        }
      }
      arrive_warp(s.o_empty[buffer]);
    }
  });
}

/// One warp per CTA: rows that belong to no sequence are zero.
__device__ __forceinline__ void clear_padding(const kda_fwd_params& p) {
  if (p.cu_seqlens == nullptr) return;
  const int64_t first = offset_of(p, p.N), rows = (p.T - first) * p.HV;
  for (int64_t i = blockIdx.x * 2 + threadIdx.x % 32 / 16; i < rows; i += gridDim.x * 2) {
    const int64_t t = first + i / p.HV, head = i % p.HV;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + t * p.out_stride[1] + head * p.out_stride[2];
    *reinterpret_cast<uint4*>(out + threadIdx.x % 16 * 8) = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace kda::sm90
