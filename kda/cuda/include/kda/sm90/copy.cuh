// The roles of single warps: bring tiles in, look at rows.
#pragma once
#include "cute/arch/copy_sm90_tma.hpp"
#include "kda/numerics.h"
#include "kda/sm90/device.cuh"
#include "kda/sm90/pair.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// One warp: the initial state of every task, then q, k, v, g of its chunks into the ring.
template <Features WITH, class Exchange>
__device__ __forceinline__ void copy_in(const Arguments& a, Shared& s, Exchange exchange) {
  using Hint = cute::TMA::CacheHintSm90;
  const kda_fwd_params& p = a.p;
  const auto read_once = Hint::EVICT_FIRST, shared_by_group = p.H == p.HV ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL;
  const int lane = threadIdx.x % 32;
  Ring ring;
  uint32_t states = 0;  // bit i: stage i held a state last
  auto task_in = [&](const Task& task) {
    const int places = places_of_state<WITH>(task);
#pragma unroll 1
    for (int place = 0; place < places; ++place, ++ring.chunk) {
      const uint32_t use = ring.use();
      const int half = half_of<WITH>(place);
      TransactionBarrier &raw_gate = s.raw_gate[ring.stage()], &raw = s.raw[ring.stage()];
      states |= 1u << ring.stage();
      s.full[ring.stage()].wait(use ^ 1), s.read[ring.stage()].wait(use ^ 1), s.empty[ring.stage()].wait(use ^ 1);
      if constexpr (WITH == PAIRS) {
        if (is_own<WITH>(ring.chunk)) {
          s.peer_empty[ring.stage()].wait(use ^ 1);
        } else if (lane == 0) {
          s.full[ring.stage()].arrive();
        }
      }
      if (lane == 0) {
        const CUtensorMap& map = WITH >= SEGMENTS && task.carried ? a.carried : a.initial;
        const int size = state_dtype<WITH>(p, task) == KDA_BF16 ? 2 : 4;
        raw_gate.arrive(), raw.arrive_and_expect_tx(HALF * CHANNELS * size);
        char* to = reinterpret_cast<char*>(s.stage[ring.stage()].half);
#pragma unroll 1
        for (int channel = 0; channel < CHANNELS; channel += 128 / size, to += STATE_TILE_BYTES) {
          cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&raw),
                                       static_cast<uint64_t>(Hint::EVICT_NORMAL), to, channel, half * HALF,
                                       task.value_head, task.initial);
        }
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++ring.chunk) {
      Stage& stage = s.stage[ring.stage()];
      const uint32_t use = ring.use();
      const int t = task.start + c * TOKENS;
      auto load = [&](const CUtensorMap& map, TransactionBarrier& full, void* to, int half, int head, Hint hint) {
        cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint), to,
                                     half * HALF, head, t, task.row);
      };
      TransactionBarrier &raw_gate = s.raw_gate[ring.stage()], &raw = s.raw[ring.stage()];
      s.full[ring.stage()].wait(use ^ 1);  // then its Kr is done with
      if constexpr (WITH == PAIRS) {
        if (!is_own<WITH>(ring.chunk)) {  // V is all that this CTA brings in
          s.read[ring.stage()].wait(use ^ 1);
          if (lane == 0) {
            s.full[ring.stage()].arrive_and_expect_tx(PACKET_BYTES);
            raw.arrive_and_expect_tx(HALF_BYTES);
            load(a.v, raw, stage.half[0].v, half_of<WITH>(0), task.value_head, read_once);
          }
          __syncwarp();
          continue;
        }
      }
      if (states >> ring.stage() & 1) s.read[ring.stage()].wait(use ^ 1), states ^= 1u << ring.stage();
      if (lane == 0) {
        raw_gate.arrive_and_expect_tx(2 * HALF_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load(a.g, raw_gate, stage.gate(use, half), half, task.value_head, read_once);
      }
      s.read[ring.stage()].wait(use ^ 1);
      if constexpr (WITH == PAIRS) s.peer_empty[ring.stage()].wait(use ^ 1);
      if (lane == 0) {
        const bool queries = makes_output<WITH>(task), values = WITH != PAIRS && (queries || task.kind == LOCAL);
        raw.arrive_and_expect_tx((WITH == PAIRS ? 5 : queries ? 6 : values ? 4 : 2) * HALF_BYTES);
        if constexpr (WITH == PAIRS) {
          load(a.v, raw, stage.half[0].v, half_of<WITH>(0), task.value_head, read_once);
        }
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          load(a.k, raw, stage.half[half].k, half, task.head, shared_by_group);
          if (queries) load(a.q, raw, stage.half[half].q, half, task.head, shared_by_group);
          if (values) load(a.v, raw, stage.half[half].v, half, task.value_head, read_once);
        }
      }
      __syncwarp();
    }
  };
  for_tasks<WITH>(a, s, task_in, exchange);
}

/// 1 / norm of this lane's row of a tile. Not by the tensor cores, though it takes more instructions: these come when
/// the consumers keep the tensor cores busy, and wait for them.
__device__ __forceinline__ float inverse_norm(const Half& first, int lane) {
  float sum[4] = {};
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(first + i / 8 * HALF_STRIDE + swizzled(lane, i % 8));
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] = fmaf(low(pairs[j]), low(pairs[j]), sum[j]);
      sum[j] = fmaf(high(pairs[j]), high(pairs[j]), sum[j]);
    }
  }
  return rsqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + L2NORM_EPS);
}

/// Beta as it lies in memory, so that a load can be waited for where it is used; `activate_beta` makes it the weight.
__device__ __forceinline__ uint32_t load_beta(const kda_fwd_params& p, const Task& task, int token) {
  const int64_t i =
      task.row * p.beta_stride[0] + int64_t{task.start + token} * p.beta_stride[1] + task.value_head * p.beta_stride[2];
  return p.beta_dtype == KDA_FP32 ? static_cast<const uint32_t*>(p.beta)[i] : static_cast<const uint16_t*>(p.beta)[i];
}

__device__ __forceinline__ float activate_beta(const kda_fwd_params& p, uint32_t bits) {
  float beta = __uint_as_float(p.beta_dtype == KDA_FP32 ? bits : bits << 16);
  if (p.use_beta_sigmoid) beta = reciprocal(1.0f + exp2_fast(-LOG2E * beta));
  return p.allow_neg_eigval ? 2.0f * beta : beta;
}

/// Two warps, one for k and g, one for q and v: norms, the activated beta, and what a tile holds beyond the sequence's
/// end, made harmless: k = q = v = 0 and a gate of -inf, the bounded gate's zero.
template <Features WITH, class Exchange>
__device__ __forceinline__ void look_at_rows(const Arguments& a, Shared& s, bool queries, Exchange exchange) {
  const kda_fwd_params& p = a.p;
  Ring ring;
  auto look = [&](const Task& task) {
    uint32_t next = 0;
    if (const int lane = fresh_lane(); !queries && lane < task.length) next = load_beta(p, task, lane);
#pragma unroll 1
    for (int place = places_of_state<WITH>(task); place > 0; --place, ++ring.chunk) {
      if (!queries && !is_own<WITH>(ring.chunk)) continue;
      s.raw[ring.stage()].wait(ring.use());
      arrive_warp(s.ready[ring.stage()]);
    }
#pragma unroll 1
    for (int c = 0; c < task.chunks(); ++c, ++ring.chunk) {
      Stage& stage = s.stage[ring.stage()];
      const int lane = fresh_lane(), token = c * TOKENS + lane;
      const bool own = is_own<WITH>(ring.chunk);
      if (own || queries) s.raw[ring.stage()].wait(ring.use());
      if (!queries) {  // loaded one chunk ahead
        if (own) stage.beta[lane] = token < task.length ? activate_beta(p, next) : 0.0f;
        if (token + TOKENS < task.length) next = load_beta(p, task, token + TOKENS);
      }
      if (!own && !queries) continue;
      if (token >= task.length) {
        if (!queries) s.raw_gate[ring.stage()].wait(ring.use());
        constexpr uint32_t minus_infinity = 0xff80ff80;  // two in bf16
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 gate = make_uint4(minus_infinity, minus_infinity, minus_infinity, minus_infinity);
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
          auto& half = stage.half[i / 8];
          const int at = swizzled(lane, i % 8);
          if (own) *reinterpret_cast<uint4*>((queries ? half.q : half.k) + at) = zero;
          *reinterpret_cast<uint4*>((queries ? half.v : stage.gate(ring.use(), i / 8)) + at) = queries ? zero : gate;
        }
        publish();  // the next bulk copy into this row comes after these stores
      }
      __syncwarp();
      float norm = 1.0f;
      if (p.use_qk_l2norm && own && (!queries || makes_output<WITH>(task)))
        norm = inverse_norm(queries ? stage.half[0].q : stage.half[0].k, lane);
      if (own) (queries ? stage.norm[lane].y : stage.norm[lane].x) = norm;
      arrive_warp(s.ready[ring.stage()]);
    }
  };
  for_tasks<WITH>(a, s, look, exchange);
}

/// Zero in o of all heads for some tokens of a batch row; by a warp of every CTA, 16 lanes to a token and head.
__device__ __forceinline__ void clear_tokens(const kda_fwd_params& p, int row, int first, int end) {
  const int HV = static_cast<int>(p.HV), lane = threadIdx.x % 32, begin = blockIdx.x * 2 + lane / 16;
  const int step = gridDim.x * 2, tokens = step / HV, heads = step % HV;  // instead of a division for each of them
  auto* out = static_cast<__nv_bfloat16*>(p.out) + row * p.out_stride[0] + lane % 16 * 8;
  int64_t t = first + begin / HV;
#pragma unroll 1
  for (int head = begin % HV; t < end; t += tokens, head += heads) {
    if (head >= HV) {
      head -= HV;
      if (++t == end) break;
    }
    *reinterpret_cast<uint4*>(out + t * p.out_stride[1] + head * p.out_stride[2]) = make_uint4(0, 0, 0, 0);
  }
}

/// One warp per CTA: o of what belongs to no sequence, or to one without a slot, is zero.
template <Features WITH>
__device__ __forceinline__ void clear_padding(const kda_fwd_params& p, const Shared& s) {
  const bool packed = p.cu_seqlens != nullptr, in_slots = WITH >= SLOTS && p.state_indices != nullptr;
  const int N = static_cast<int>(p.N), T = static_cast<int>(p.T);
  // Number N stands for what lies behind the last one.
#pragma unroll 1
  for (int at = in_slots ? 0 : N / 32 * 32; at <= N; at += 32) {
    const int n = at + threadIdx.x % 32;
    uint32_t padding = __ballot_sync(~0u, n < N ? in_slots && slot_to_read<WITH>(p, n) < 0 : n == N && packed);
#pragma unroll 1
    for (; padding != 0; padding &= padding - 1) {
      const int sequence = at + __ffs(padding) - 1, first = packed ? start_of(p, s, sequence) : 0;
      const int end = packed && sequence < N ? first + length_of(p, s, sequence) : T;
      clear_tokens(p, packed ? 0 : sequence, first, end);
    }
  }
}

}  // namespace kda::sm90
