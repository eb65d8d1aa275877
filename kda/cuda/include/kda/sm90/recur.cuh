// The recurrence over chunks. One warpgroup per 64 columns of V; the state, transposed, is its fp32 accumulator.
//
//   R = V - Kd S      O = Qd S + Aq R      S' = decay S + Ak^T R
//
// Everything is linear in (V, S). S and the R that is folded into it carry 2^-CARRIED, which rows 0..15 of Kd and Qd make
// up for, so that these rows of R and O have their true size; rows 16..31 have 2^(anchor - CARRIED) more until the end.
#pragma once
#include "cute/arch/mma_sm90_gmma.hpp"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The state of a thread: element [4 j + 2 r + e] is V row 8 r + lane / 4 of the warp's 16, channel 8 j + lane % 4 * 2 + e.
using State = float[64];

template <class Body>
__device__ __forceinline__ void for_pairs(Body body) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) body(4 * j + 2 * r, 8 * r + threadIdx.x % 32 / 4, 8 * j + threadIdx.x % 4 * 2);
  }
}

__device__ __forceinline__ void load_state(const kda_fwd_params& p, const Task& task, int first_row, float scale, State& s) {
  if (p.initial_state == nullptr) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    return;
  }
  const int64_t base = task.sequence * p.initial_stride[0] + task.value_head * p.initial_stride[1];
  for_pairs([&](int i, int row, int channel) {
    const int64_t at = base + (first_row + row) * p.initial_stride[2] + channel;
    float2 x;
    if (p.state_dtype == KDA_BF16) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p.initial_state) + at);
      x = make_float2(low(pair), high(pair));
    } else {
      x = *reinterpret_cast<const float2*>(static_cast<const float*>(p.initial_state) + at);
    }
    s[i] = x.x * scale, s[i + 1] = x.y * scale;
  });
}

__device__ __forceinline__ void store_state(const kda_fwd_params& p, const Task& task, int first_row, float scale,
                                            const State& s) {
  if (p.final_state == nullptr) return;
  const int64_t base = task.sequence * p.final_stride[0] + task.value_head * p.final_stride[1];
  for_pairs([&](int i, int row, int channel) {
    const int64_t at = base + (first_row + row) * p.final_stride[2] + channel;
    const float x = s[i] * scale, y = s[i + 1] * scale;
    if (p.state_dtype == KDA_BF16) {
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.final_state) + at) = pack(x, y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(p.final_state) + at) = make_float2(x, y);
    }
  });
}

/// The state of an empty sequence, bit for bit.
__device__ __forceinline__ void copy_state(const kda_fwd_params& p, const Task& task, int first_row) {
  if (p.final_state == nullptr) return;
  const int64_t from = task.sequence * p.initial_stride[0] + task.value_head * p.initial_stride[1];
  const int64_t to = task.sequence * p.final_stride[0] + task.value_head * p.final_stride[1];
  auto copy = [&](auto pair) {
    using Pair = decltype(pair);
    for_pairs([&](int, int row, int channel) {
      const auto* source = static_cast<const Pair*>(p.initial_state);
      const int64_t i = (from + (first_row + row) * p.initial_stride[2] + channel) / 2;
      static_cast<Pair*>(p.final_state)[(to + (first_row + row) * p.final_stride[2] + channel) / 2] =
          source ? source[i] : Pair{};
    });
  };
  if (p.state_dtype == KDA_BF16) {
    copy(uint32_t{});
  } else {
    copy(uint2{});
  }
}

template <class Product>
__device__ __forceinline__ void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                        cute::SM90::GMMA::ScaleOut keep = cute::SM90::GMMA::ScaleOut::One) {
  Product::fma(a[0], a[1], a[2], a[3], b, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11],
               d[12], d[13], d[14], d[15], keep);
}

__device__ __forceinline__ void add_to_state(State& s, const uint32_t (&a)[4], uint64_t b) {
  using namespace cute::SM90::GMMA;
  MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>::fma(
      a[0], a[1], a[2], a[3], b, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13],
      s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23], s[24], s[25], s[26], s[27], s[28], s[29],
      s[30], s[31], s[32], s[33], s[34], s[35], s[36], s[37], s[38], s[39], s[40], s[41], s[42], s[43], s[44], s[45],
      s[46], s[47], s[48], s[49], s[50], s[51], s[52], s[53], s[54], s[55], s[56], s[57], s[58], s[59], s[60], s[61],
      s[62], s[63]);
}

/// The role of a consumer warpgroup: columns 64 `group` .. of V, every chunk of this CTA.
__device__ __forceinline__ void recur(const Arguments& args, Shared& s, int group) {
  using namespace cute::SM90::GMMA;
  using Add = MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K>;
  using Subtract = MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K, ScaleIn::Neg>;
  const kda_fwd_params& p = args.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int first_row = group * HALF + warp * 16;
  const float down = power_of_two(-CARRIED), up = power_of_two(CARRIED);
  const float seed = power_of_two(args.anchor - CARRIED), anchor_down = power_of_two(-args.anchor);
  const float result[2] = {p.scale, p.scale * power_of_two(CARRIED - args.anchor)};
  const int vector = 2 * warp + lane / 16;  // of V and O, for ldmatrix and stmatrix
  Ring ring;
  State state;

  for_tasks(args, s, [&](const Task& task) {
    const int chunks = task.chunks();
    if (chunks == 0) {
      copy_state(p, task, first_row);
      return;
    }
    load_state(p, task, first_row, down, state);
#pragma unroll 1
    for (const uint32_t end = ring.chunk + chunks; ring.chunk != end; ++ring.chunk) {
      Stage& stage = s.stage[ring.stage()];
      uint32_t a[8][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = pack(state[8 * i + 2 * j], state[8 * i + 2 * j + 1]);
      }
      s.raw[ring.stage()].wait(ring.use());
      s.full[ring.stage()].wait(ring.use());

      float residual[16], o[16];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t v[4];
        load_transposed(v, stage.half[group].v + swizzled(16 * h + lane % 16, vector));
        const uint32_t order[4] = {v[0], v[2], v[1], v[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          residual[8 * h + 2 * i] = h ? low(order[i]) * seed : low(order[i]);
          residual[8 * h + 2 * i + 1] = h ? high(order[i]) * seed : high(order[i]);
        }
      }
      const uint64_t kd = descriptor(stage.half[0].k, LayoutType::B128, 1024);
      const uint64_t qd = operand_at(kd, HALF_BYTES);
      const uint64_t ak = descriptor(stage.half[0].g, LayoutType::B128, 1024, HALF_STRIDE);
      const uint64_t aq = descriptor(stage.aq, LayoutType::B64, 512);

      hold(residual), hold(o);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 8; ++i) product<Subtract>(residual, a[i], operand_at(kd, i / 4 * HALF_STRIDE + i % 4 * 32));
      cute::warpgroup_commit_batch();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        product<Add>(o, a[i], operand_at(qd, i / 4 * HALF_STRIDE + i % 4 * 32), i == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      hold(residual);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 decay = *reinterpret_cast<const float2*>(&stage.decay[8 * j + lane % 4 * 2]);
        state[4 * j] *= decay.x, state[4 * j + 1] *= decay.y, state[4 * j + 2] *= decay.x, state[4 * j + 3] *= decay.y;
      }
      uint32_t r[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[0][i] = pack(residual[2 * i] * down, residual[2 * i + 1] * down);
        r[1][i] = pack(residual[8 + 2 * i] * anchor_down, residual[8 + 2 * i + 1] * anchor_down);
      }
      hold(state);
      cute::warpgroup_arrive();
      add_to_state(state, r[0], ak);
      add_to_state(state, r[1], operand_at(ak, 16 * 128));
      cute::warpgroup_commit_batch();
      product<Add>(o, r[0], aq);
      product<Add>(o, r[1], operand_at(aq, 32));
      cute::warpgroup_commit_batch();
      const int buffer = ring.chunk % 2;
      s.o_empty[buffer].wait(((ring.chunk / 2) & 1) ^ 1);
      cute::warpgroup_wait<0>();
      hold(state), hold(o);
      arrive_warp(s.empty[ring.stage()]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = result[h];
        store_transposed(s.o[buffer].half[group] + swizzled(16 * h + lane % 16, vector), pack(o[8 * h] * x, o[8 * h + 1] * x),
                         pack(o[8 * h + 4] * x, o[8 * h + 5] * x), pack(o[8 * h + 2] * x, o[8 * h + 3] * x),
                         pack(o[8 * h + 6] * x, o[8 * h + 7] * x));
      }
      publish();
      arrive_warp(s.o_full[buffer]);
    }
    store_state(p, task, first_row, up, state);
  });
}

}  // namespace kda::sm90
