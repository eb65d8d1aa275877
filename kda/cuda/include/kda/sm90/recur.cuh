// The recurrence over chunks. One warpgroup per 64 columns of V; the state, transposed, is its fp32 accumulator.
//
//   R = V - Kd S      O = Qd S + Aq R      S' = decay S + Ak^T R
//
// S carries 2^-CARRIED, and Ak with it. Rows 0..15 of Kd and Qd make up for that; rows 16..31 have 2^(anchor - CARRIED)
// more, which is taken out where R is formed, and of O at the end. So R has its true size.
#pragma once
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "kda/sm90/device.cuh"
#include "kda/sm90/pair.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/state.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// d = (Kd S)^T beside (Qd S)^T for 16 of the channels: one operand of 64 rows.
__device__ __forceinline__ void multiply_state(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                               cute::SM90::GMMA::ScaleOut keep) {
  using namespace cute::SM90::GMMA;
  MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[0], d[1], d[2], d[3], d[4], d[5],
                                                       d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                                                       d[16], d[17], d[18], d[19], d[20], d[21], d[22], d[23], d[24],
                                                       d[25], d[26], d[27], d[28], d[29], d[30], d[31], keep);
}

/// d = (Kd S)^T for 16 of the channels.
__device__ __forceinline__ void multiply_state(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                               cute::SM90::GMMA::ScaleOut keep) {
  using namespace cute::SM90::GMMA;
  MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[0], d[1], d[2], d[3], d[4], d[5],
                                                       d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                                                       keep);
}

/// o += (Aq R)^T for 16 of the tokens of R.
__device__ __forceinline__ void add_to_output(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  using namespace cute::SM90::GMMA;
  MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K>::fma(a[0], a[1], a[2], a[3], b, d[0], d[1], d[2], d[3], d[4], d[5],
                                                       d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13], d[14],
                                                       d[15]);
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

__device__ __forceinline__ void pack_state(const State& state, uint32_t (&a)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[i][j] = pack(state[8 * i + 2 * j], state[8 * i + 2 * j + 1]);
  }
}

/// o of a chunk, packed, into shared memory; `send_output` then takes it out.
__device__ __forceinline__ void store_output(Shared& s, uint32_t chunk, int group, int lane, int vector,
                                             const uint32_t (&o)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    store_transposed(s.o[chunk % 2].half[group] + swizzled(16 * h + lane % 16, vector), o[h][0], o[h][2], o[h][1],
                     o[h][3]);
  }
}

/// o of chunk `chunk` of the CTA, `c` of the task, out of shared memory; rows beyond the sequence's end are left alone.
/// Buffers change with every chunk, so a group's barrier also says that the buffer before is free. Only the LAST chunk
/// of a task can have such rows.
template <bool LAST>
__device__ __forceinline__ void send_output(const Arguments& a, Shared& s, const Task& task, uint32_t chunk, int c,
                                            int group, int half) {
  const kda_fwd_params& p = a.p;
  const char* o = s.o[chunk % 2].half[group];
  const int t = task.start + c * TOKENS, thread = threadIdx.x % 128;
  publish();
  if (thread == 0) cute::tma_store_wait<0>();  // what was sent a chunk ago was read
  cutlass::arch::NamedBarrier::sync(128, GROUPS + group);
  const int rows = LAST ? task.length - c * TOKENS : TOKENS;
  if (rows >= TOKENS) {
    if (thread == 0) {
      cute::SM90_TMA_STORE_4D::copy(&a.out, o, half * HALF, task.value_head, t, task.row);
      cute::tma_store_arrive();
    }
    return;
  }
  auto* out =
      static_cast<__nv_bfloat16*>(p.out) + task.row * p.out_stride[0] + task.value_head * p.out_stride[2] + half * HALF;
#pragma unroll 1
  for (int i = thread; i < rows * 8; i += 128) {
    const int row = i / 8, vector = i % 8;
    const uint4 x = *reinterpret_cast<const uint4*>(o + swizzled(row, vector));
    *reinterpret_cast<uint4*>(out + int64_t{t + row} * p.out_stride[1] + vector * 8) = x;
  }
}

/// The role of a consumer warpgroup: columns 64 `group` .. of V, every chunk of this CTA.
template <Features WITH, class Exchange>
__device__ __forceinline__ void recur(const Arguments& args, Shared& s, int group, Exchange exchange) {
  using namespace cute::SM90::GMMA;
  const kda_fwd_params& p = args.p;
  if (WITH == PAIRS && group != 0) return;
  const int warp = threadIdx.x % 128 / 32, half = half_of<WITH>(group), first_row = half * HALF + warp * 16;
  const float down = power_of_two(-CARRIED), up = power_of_two(CARRIED);
  Ring ring;
  State state;

  // The chunks of a task from the ring's place to `end`. OUTPUT: whether o is asked for, else the state alone. Chunk 0
  // of the task was, or would have been, at `zero`.
  auto walk = [&](auto output, const Task& task, uint32_t zero, uint32_t end) {
    constexpr bool OUTPUT = decltype(output)::value;
    const int lane = fresh_lane(), vector = 2 * warp + lane / 16;  // of V and O, for ldmatrix and stmatrix
    uint32_t a[8][4];                                              // the state in bf16, an operand
    pack_state(state, a);
    uint32_t done[2][4];  // o of the chunk before, to be stored under the products of this one
    bool begun = false;
    s.raw[ring.stage()].wait(ring.use());
#pragma unroll 1
    do {
      Stage& stage = s.stage[ring.stage()];
      s.full[ring.stage()].wait(ring.use());
      if (!is_own<WITH>(ring.chunk)) s.ready[ring.stage()].wait(ring.use());  // V beyond the end is made harmless here

      float d[OUTPUT ? 32 : 16];  // Kd S, then Qd S
      uint32_t v[2][4];           // V in bf16
      const uint64_t kq = descriptor(stage.half[0].k, LayoutType::B128, 1024);
      const uint64_t ak = descriptor(stage.gate(ring.use(), 0), LayoutType::B128, 1024, HALF_STRIDE);
      const uint64_t aq = descriptor(stage.aq, LayoutType::B64, 512);

      hold(d);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        multiply_state(d, a[i], operand_at(kq, i / 4 * HALF_STRIDE + i % 4 * 32),
                       i == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
      cute::warpgroup_commit_batch();
      // Under the products, which read the packed state. The branches keep ptxas from moving it among them or after.
      if constexpr (OUTPUT) {
        if (begun) store_output(s, ring.chunk - 1, group, lane, vector, done);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_transposed(v[h], stage.half[group].v + swizzled(16 * h + lane % 16, vector));
        if (!OUTPUT && task.kind == TRANSITION) v[h][0] = v[h][1] = v[h][2] = v[h][3] = 0;  // whatever lay there
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 decay = *reinterpret_cast<const float4*>(&stage.decay[decay_at(16 * j + lane % 4 * 2)]);
        float* x = &state[8 * j];
        x[0] *= decay.x, x[1] *= decay.y, x[2] *= decay.x, x[3] *= decay.y;
        x[4] *= decay.z, x[5] *= decay.w, x[6] *= decay.z, x[7] *= decay.w;
      }
      hold(state);
      if constexpr (OUTPUT) {
        if (begun) send_output<false>(args, s, task, ring.chunk - 1, ring.chunk - 1 - zero, group, half);
        begun = true;
      }
      cute::warpgroup_wait<0>();
      hold(d);
      float o[16];  // a copy: ptxas cannot accumulate into a part of an earlier product's registers
      if constexpr (OUTPUT) {
#pragma unroll
        for (int i = 0; i < 16; ++i) o[i] = d[16 + i];
      }
      arrive_warp(s.read[ring.stage()]);
      uint32_t r[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float scale = i < 4 ? -1.0f : args.minus_exact;
        const uint32_t x = v[i / 4][i % 2 * 2 + i % 4 / 2];
        r[i / 4][i % 4] = pack(fmaf(d[2 * i], scale, low(x)), fmaf(d[2 * i + 1], scale, high(x)));
      }
      hold(state);
      if constexpr (OUTPUT) hold(o);
      cute::warpgroup_arrive();
      add_to_state(state, r[0], ak);
      add_to_state(state, r[1], operand_at(ak, 16 * 128));
      cute::warpgroup_commit_batch();
      if constexpr (OUTPUT) {
        add_to_output(o, r[0], aq);
        add_to_output(o, r[1], operand_at(aq, 32));
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
      } else {
        cute::warpgroup_wait<0>();
        arrive_warp(s.empty[ring.stage()]);
      }
      hold(state);
      // Under the products of Aq. The wait for the next V, which is there long before its operands, keeps ptxas from
      // moving it.
      pack_state(state, a);
      if (const Ring next{ring.chunk + 1}; next.chunk != end) s.raw[next.stage()].wait(next.use());
      if constexpr (OUTPUT) {
        cute::warpgroup_wait<0>();
        hold(o);
        arrive_warp(s.empty[ring.stage()]);
        arrive_peer<WITH>(s, ring);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = h ? args.late_scale : p.scale;
            done[h][i] = pack(o[8 * h + 2 * i] * scale, o[8 * h + 2 * i + 1] * scale);
          }
        }
      }
    } while (++ring.chunk != end);
    if constexpr (OUTPUT) {
      store_output(s, ring.chunk - 1, group, lane, vector, done);
      send_output<true>(args, s, task, ring.chunk - 1, ring.chunk - 1 - zero, group, half);
    }
  };

  auto recur_task = [&](const Task& task) {
    if (task.chunks() == 0) {
      copy_state<WITH>(p, task, first_row);
      return;
    }
    if (makes_output<WITH>(task)) {
      load_state<WITH>(p, s, task, ring, group, down, state);
    } else {
      begin_state(task, first_row, down, state);
    }
    const uint32_t zero = ring.chunk;
    do {  // in parts, after each of which the state is kept
      uint32_t end = zero + uniform(task.chunks());
      if (makes_output<WITH>(task)) {
        if (WITH >= SLOTS && p.checkpoints != nullptr) {
          const int every = chunks_between_checkpoints(p);
          end = min(end, ring.chunk + every - (task.before + ring.chunk - zero) % every);
        }
        walk(std::true_type{}, task, zero, end);
      } else {
        walk(std::false_type{}, task, zero, end);
      }
      keep_state<WITH>(args, task, ring.chunk - zero, first_row, up, state);
    } while (ring.chunk != zero + task.chunks());
  };
  for_tasks_aside<WITH>(args, s, recur_task, exchange);
  if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();  // shared memory is read until then
}

}  // namespace kda::sm90
