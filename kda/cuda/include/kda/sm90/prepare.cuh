// What a chunk needs that does not depend on the state. One warpgroup per chunk; two groups take turns.
//
// With G the sum of log2 decays from the chunk's start, and rows t, s of the chunk:
//
//   Kd = k 2^G    Qd = q 2^G    Ki = k 2^-G    Kr = k 2^(G_end - G)
//   L  = strict_lower(Kd Ki^T) beta_t     M = lower(Qd Ki^T)
//   Ab = (I + L)^-1 diag(beta)            Ak = Ab^T Kr         Aq = M Ab
//
// 2^G spans more than the exponent of bf16 over 32 tokens of the strongest gate. So rows of Kd, Qd and Ki are anchored
// by constants, the same whatever the gates are (so that no row depends on a later token): G + CARRIED in rows 0..15, G
// + anchor in rows 16..31. Kd S would overflow for slow channels and large states; the recurrence carries its state,
// and Ak, times 2^-CARRIED. That leaves 2^(anchor - CARRIED) too much in block (rows >= 16, columns < 16) of L and M,
// taken out again exactly; rows >= 16 of Aq are given it back, because they join those of Qd S.
//
// Ab, M and Kr are at most 4, 1 and 1 where keys and queries are normalised and the weight is a sigmoid's. Then they
// are fp16: in bf16 their roundings are half of the kernel's error. What fp16 lacks below 2^-14 they gain by a factor
// of 2^SM90_FP16_BITS. Raw keys, queries and weights may be larger than fp16 reaches.
#pragma once
#include "cute/arch/mma_sm90_gmma.hpp"
#include "kda/numerics.h"
#include "kda/sm90/decay.cuh"
#include "kda/sm90/device.cuh"
#include "kda/sm90/fold.cuh"
#include "kda/sm90/inverse.cuh"
#include "kda/sm90/pair.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// Rows of Kd Ki^T (warps 0 and 1) and Qd Ki^T (warps 2 and 3): 16 rows a warp, 32 columns.
__device__ __forceinline__ void score(Stage& stage, const char* gate, float (&d)[16]) {
  using namespace cute::SM90::GMMA;
  using Product = MMA_64x32x16_F32BF16BF16_SS<Major::K, Major::K>;
  const uint64_t kq = descriptor(stage.half[0].k, LayoutType::B128, 1024);
  const uint64_t ki = descriptor(gate, LayoutType::B128, 1024);
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

/// From 16 rows of Kd Ki^T: the blocks on the diagonal of L transposed, in fp32, and what is below them, T, as it is,
/// negated. Element d[4 n + 2 r + e] is row 8 r + lane / 4 of the warp's 16 and column 8 n + lane % 4 * 2 + e. 8 x 8
/// blocks above the diagonal are left out; what is above it in a block, and may be infinite, is stored and never used.
template <bool FP16, bool UPPER>
__device__ __forceinline__ void store_keys(const float (&beta)[2], const float (&d)[16], float exact, float* lower,
                                           int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 16 * UPPER + 8 * r + lane / 4;
#pragma unroll
    for (int n = 2 * UPPER; n <= 2 * UPPER + r; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        lower[(8 * n + lane % 4 * 2 + e) * LOWER_PITCH + row] = d[4 * n + 2 * r + e] * beta[r];
    }
  }
  if constexpr (UPPER) {
    const float scale = -exact * SCALE<FP16>;
    uint32_t y[4][TERMS<FP16>];
#pragma unroll
    for (int i = 0; i < 4; ++i) split<FP16>(y[i], d[2 * i] * scale, d[2 * i + 1] * scale);
#pragma unroll
    for (int i = 0; i < TERMS<FP16>; ++i) store_matrices(term_of_t(lower, i, lane), y[0][i], y[1][i], y[2][i], y[3][i]);
  }
}

/// 16 rows of M from those of Qd Ki^T into the place of Aq: blocks of 16 columns up to the diagonal's. Masks select:
/// what they hide may be infinite.
template <bool FP16, bool UPPER>
__device__ __forceinline__ void store_queries(const float (&d)[16], float exact, char* aq, int lane) {
  const bool within[2] = {lane % 4 * 2 <= lane / 4, lane % 4 * 2 + 1 <= lane / 4};  // an 8 x 8 block of the diagonal
#pragma unroll
  for (int block = 0; block < 1 + UPPER; ++block) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * block + i / 2, r = i % 2;
      const int below = 2 * UPPER + r - n;  // blocks from here to the diagonal
      const float scale = (UPPER && n < 2 ? exact : 1.0f) * SCALE<FP16>;
      const float x = d[4 * n + 2 * r] * scale, y = d[4 * n + 2 * r + 1] * scale;
      m[i] = below < 0 ? 0 : pack16<FP16>(below || within[0] ? x : 0.0f, below || within[1] ? y : 0.0f);
    }
    store_matrices(aq + by_columns(UPPER, block, lane), m[0], m[1], m[2], m[3]);
  }
}

/// The chunks of one group of producers: every other of this CTA's.
template <Features WITH>
struct Chunks {
  const Arguments& a;
  const Shared& s;
  Ring ring;
  Place place;       // of the next task
  uint32_t end = 0;  // where the current task's chunks end
  // Of the current task, where it is not listed:
  int tail_tokens = 0;  // of its last chunk, 0 if that is whole
  int value_head = -1;

  /// Goes on to the chunk's task; false if there are no more for now.
  __device__ __forceinline__ bool seek() {
    while (ring.chunk >= end) {
      Task task;
      if (!next_task<WITH>(a, s, place, task)) return false;
      const int places = places_of_state<WITH>(task);
      ring.chunk = uniform(ring.chunk < end + places ? ring.chunk + STEP<WITH> : ring.chunk);
      end += places + task.chunks(), tail_tokens = task.length % TOKENS, value_head = task.value_head;
    }
    return true;
  }
  __device__ const Task& listed() const { return s.list[place.position - 1]; }
  __device__ int head() const { return WITH < SEGMENTS ? value_head : listed().value_head; }
  __device__ bool output() const { return WITH < SEGMENTS || listed().kind == OUTPUT; }
  __device__ bool is_tail() const {
    return ring.chunk + 1 == end && (WITH < SEGMENTS ? tail_tokens : listed().length % TOKENS) != 0;
  }
};

/// The role of a producer warpgroup. While a chunk's triangle is inverted elsewhere, the group sums the gates of its
/// next.
template <bool FP16, Features WITH, class Exchange>
__device__ __forceinline__ void prepare(const Arguments& args, Shared& s, int group, Exchange exchange) {
  const kda_fwd_params& p = args.p;
  // Whether gates of the next chunk are summed while this one's triangle is inverted. Of a pair the next one has this
  // one's place.
  constexpr bool AHEAD = WITH != PAIRS;
  const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
  Chunks<WITH> chunks{args, s, Ring{first_place<WITH>(group)}};
  Ring seen = chunks.ring;  // the place after the last chunk's

  // Places of states are waited for and handed back as those of chunks are: a wait tells a barrier's phase from the one
  // before it, not from the one before that.
  auto pass = [&](uint32_t end) {
#pragma unroll 1
    for (; seen.chunk < end; seen.chunk += STEP<WITH>) {
      s.raw_gate[seen.stage()].wait(seen.use());
      s.ready[seen.stage()].wait(seen.use());
      arrive_warp(s.full[seen.stage()]);
    }
  };
  auto gates = [&] {
    const Ring ring = chunks.ring;
    Stage& stage = s.stage[ring.stage()];
    s.raw_gate[ring.stage()].wait(ring.use());
    s.empty[ring.stage()].wait(ring.use() ^ 1);  // `late` was the last chunk's Ak
    if constexpr (WITH == PAIRS) s.peer_empty[ring.stage()].wait(ring.use() ^ 1);
    if (chunks.is_tail()) s.ready[ring.stage()].wait(ring.use());
    const int lane = fresh_lane();
    sum_gates(stage, ring.use(), s.sum[group], s.offset[group][32 * warp + lane], s.slope[group][32 * warp + lane],
              p.lower_bound * LOG2E, warp, lane);
  };

  uint32_t turn = 0;
  auto chunk = [&](bool& more, bool& fresh) {
    if (fresh) {
      const int lane = fresh_lane(), thread = 32 * warp + lane;
      const float slope = slope_of(p, chunks.head());
      s.slope[group][thread] = slope;
      s.offset[group][thread] = offsets_of(p, slope, chunks.head(), 4 * lane);
    }
    if (!AHEAD || fresh) {
      pass(chunks.ring.chunk);
      gates();
    }
    const Ring ring = chunks.ring;
    chunks.ring.chunk += STEP<WITH>;
    Stage& stage = s.stage[ring.stage()];
    const int lane = fresh_lane();
    cutlass::arch::NamedBarrier::sync(128, group);
    s.ready[ring.stage()].wait(ring.use());
    const bool output = chunks.output();
    const float anchor = static_cast<float>(args.anchor);
    if (output) {
      decay_rows<FP16, true>(stage, ring.use(), s.sum[group], anchor, warp, lane);
    } else {
      decay_rows<FP16, false>(stage, ring.use(), s.sum[group], anchor, warp, lane);
    }
    publish();
    cutlass::arch::NamedBarrier::sync(128, group);

    const float beta[2] = {stage.beta[16 * (warp % 2) + lane / 4], stage.beta[16 * (warp % 2) + 8 + lane / 4]};
    float d[16];
    score(stage, stage.gate(ring.use(), 0), d);
    const float exact = power_of_two(CARRIED - args.anchor);
    switch (warp) {
      case 0: store_keys<FP16, false>(beta, d, exact, s.lower[group], lane); break;
      case 1: store_keys<FP16, true>(beta, d, exact, s.lower[group], lane); break;
      case 2:
        if (output) store_queries<FP16, false>(d, exact, stage.aq, lane);
        break;
      default:
        if (output) store_queries<FP16, true>(d, exact, stage.aq, lane);
    }
    arrive_warp(s.lower_full[group]);  // of all: each warp's share of the scores has read Ki, which Ak will overwrite

    const int position = chunks.place.position;
    more = chunks.seek();
    // Not into another task, whose constants take long to load, and whose chunk may need this one's place.
    fresh = chunks.place.position != position;
    if (AHEAD && more && !fresh) gates();

    s.inverse_full[group].wait(turn);
    turn ^= 1;
    fold_keys<FP16>(stage, ring.use(), s.inverse[group], warp, lane);
    publish();
    if constexpr (WITH == PAIRS) {
      cutlass::arch::NamedBarrier::sync(128, group);
      if (warp == 0 && fresh_lane() == 0) send_keys(s, ring);
    }
    arrive_warp(s.full[ring.stage()]);
    seen.chunk = ring.chunk + STEP<WITH>;
  };
#pragma unroll 1
  for (chunks.place.exchanged = WITH < SEGMENTS;; chunks.place.exchanged = true) {
#pragma unroll 1
    for (bool more = chunks.seek(), fresh = true; more;) chunk(more, fresh);
    pass(chunks.end);
    if (chunks.place.exchanged) break;
    exchange();
  }
}

}  // namespace kda::sm90
