// From segment to segment: S' = Phi S + S_local over the middles of every sequence that is cut, between the rounds of
// the kernel. Operands have two terms in bf16, so 16 bits, because it is here that what slow channels remember goes
// from one segment to the next.
#pragma once
#include "cute/arch/copy_sm90_tma.hpp"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

constexpr int CHAIN_THREADS = 256;  // of the consumers: 8 warps of 16 channels each
static_assert(ROWS_OF_CHAIN == 16 && CHAIN_THREADS / 32 * 16 == CHANNELS);

/// What the chain needs of shared memory, in place of the ring, which is empty then. Of everything the two terms.
struct Chain {
  __nv_bfloat16 phi[2][2][CHANNELS][TRANSITION_PITCH];        // transposed: this middle's and the next one's
  __nv_bfloat16 rows[2][2][ROWS_OF_CHAIN][TRANSITION_PITCH];  // of the state, V first: before and after
};
static_assert(sizeof(Chain) <= STAGES * sizeof(Stage));

__device__ __forceinline__ void sync_chain() { cutlass::arch::NamedBarrier::sync(CHAIN_THREADS, 2 * GROUPS); }

/// Two channels of a row of the state, in both terms.
__device__ __forceinline__ void put_pair(__nv_bfloat16 (&rows)[2][ROWS_OF_CHAIN][TRANSITION_PITCH], int row, int column,
                                         float2 x) {
  const uint32_t first = pack(x.x, x.y);
  *reinterpret_cast<uint32_t*>(&rows[0][row][column]) = first;
  *reinterpret_cast<uint32_t*>(&rows[1][row][column]) = pack_rest(first, x.x, x.y);
}

/// By the consumers. A task has ROWS_OF_CHAIN columns of V of one head through all of a sequence's middles. Transposed,
/// as everything lies: S'^T = S^T Phi^T + S_local^T. The new state takes the place of the local one.
__device__ __forceinline__ void carry_states(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  constexpr int BANDS = CHANNELS / ROWS_OF_CHAIN, BYTES = 2 * TRANSITION_BYTES;
  Chain& chain = *reinterpret_cast<Chain*>(s.stage);
  const int lane = fresh_lane(), warp = uniform(threadIdx.x / 32), thread = 32 * warp + lane;
  const int g = lane / 4, t = 2 * (lane % 4);
  const int HV = static_cast<int>(p.HV);
  uint32_t fills = 0;  // of the two places for Phi, in turns
#pragma unroll 1
  for (int task = blockIdx.x; task < s.cuts * HV * BANDS; task += gridDim.x) {
    const int band = task % BANDS, head = task / BANDS % HV;
    const int n = owner(p, task / BANDS / HV, s.cut_before, nullptr);
    const int middles = middles_of(s.cut, s.chunks[n]), slot = s.slots_before[n];
    auto pair_at = [&](int i, int row, int column) {  // two channels of the state after segment i
      return reinterpret_cast<float2*>(state_at(a, slot + i, head) + (band * ROWS_OF_CHAIN + row) * CHANNELS + column);
    };
    auto fetch = [&](int i, uint32_t fill) {
      if (thread != 0 || i > middles) return;
      TransactionBarrier& full = s.transition[fill % 2];
      full.arrive_and_expect_tx(BYTES);
      const int64_t at = (slot + i) * a.transition_stride[0] + head * a.transition_stride[1];
      cute::SM90_BULK_COPY_G2S::copy(static_cast<const __nv_bfloat16*>(a.transitions) + at,
                                     reinterpret_cast<uint64_t*>(&full), chain.phi[fill % 2], BYTES);
    };
    sync_chain();  // the task before is done with its rows
    fetch(1, fills);
#pragma unroll 1
    for (int i = thread; i < ROWS_OF_CHAIN * CHANNELS / 2; i += CHAIN_THREADS) {
      const int row = i / (CHANNELS / 2), column = i % (CHANNELS / 2) * 2;
      put_pair(chain.rows[0], row, column, __ldcg(pair_at(0, row, column)));
    }
    sync_chain();
#pragma unroll 1
    for (int i = 1; i <= middles; ++i, ++fills) {
      fetch(i + 1, fills + 1);
      const auto& rows = chain.rows[(i - 1) % 2];
      float2 local[2][2];  // wanted last, asked for first
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) local[m][r] = __ldcg(pair_at(i, g + 8 * r, 16 * warp + 8 * m + t));
      }
      s.transition[fills % 2].wait(fills / 2 % 2);
      const auto& phi = chain.phi[fills % 2];
      float d[2][2][4] = {};  // by columns; large products, and those of one small term
#pragma unroll
      for (int k = 0; k < CHANNELS; k += 16) {
        uint32_t x[2][4], y[2][4];
#pragma unroll
        for (int term = 0; term < 2; ++term) {
          load_matrices(x[term], &rows[term][lane % 16][k + lane / 16 * 8]);
          load_transposed(y[term], &phi[term][k + lane % 16][16 * warp + lane / 16 * 8]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(d[m][0], x[0], y[0][2 * m], y[0][2 * m + 1]);
          mma(d[m][1], x[1], y[0][2 * m], y[0][2 * m + 1]);
          mma(d[m][1], x[0], y[1][2 * m], y[1][2 * m + 1]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        add(d[m][0], d[m][1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = g + 8 * r, column = 16 * warp + 8 * m + t;
          const float2 next = make_float2(d[m][0][2 * r] + local[m][r].x, d[m][0][2 * r + 1] + local[m][r].y);
          __stcg(pair_at(i, row, column), next);
          put_pair(chain.rows[i % 2], row, column, next);
        }
      }
      sync_chain();
    }
  }
  sync_chain();
  clear_upper(s, thread, CHAIN_THREADS);
  publish();  // the ring's copies come after these stores
}

/// How often CTAs of this device have come to wait for one another. Every launch that does has as many, one for each
/// multiprocessor (but for an odd one), and waits twice, so what it finds is a multiple of that; and no two launches
/// wait at the same time, because a CTA has all of a multiprocessor's shared memory.
__device__ unsigned long long arrivals;

/// All threads, from wherever their roles are: not __syncthreads, which all must come to in the same place. Lanes must
/// come together.
__device__ __forceinline__ void sync_roles() {
  __syncwarp();
  cutlass::arch::NamedBarrier::sync(THREADS, 2 * GROUPS + 1);
}

/// Waits until all CTAs of the launch, which is a cooperative one, are here; by all threads, the consumers' first among
/// them.
template <bool CONSUMER>
__device__ __forceinline__ void sync_grid() {
  sync_roles();
  if (CONSUMER && threadIdx.x == 0) {
    __threadfence();
    const unsigned long long all = gridDim.x, own = atomicAdd(&arrivals, 1ull), last = (own / all + 1) * all;
    while (*static_cast<volatile unsigned long long*>(&arrivals) < last) __nanosleep(20);
    __threadfence();
  }
  sync_roles();
}

/// Waits until all CTAs have done what comes before the last round, and lets the consumers carry the states on; by all
/// roles.
template <bool CONSUMER>
__device__ __forceinline__ void exchange(const Arguments& a, Shared& s) {
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    fence_async();  // states go out by ordinary stores and come back by bulk copies
    sync_grid<CONSUMER>();
    if (CONSUMER && round == 0) carry_states(a, s);
  }
  fence_async();
}

}  // namespace kda::sm90
