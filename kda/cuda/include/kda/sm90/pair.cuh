// Two CTAs to a task, for calls with at most half as many tasks as multiprocessors: a cluster. Each has half of V, in
// one group of consumers, and prepares every other chunk, which it sends to the other. The arithmetic is that of one
// CTA.
//
// Both have the same tasks and so the same places in their rings. Place c is prepared by CTA c % 2, so a stage holds
// chunks of its own CTA always or never. A group of producers, or the inverting warp, knows only stages of its own;
// what of a chunk comes from the other CTA, all but V, arrives at `full`. `peer_empty` tells an owner that the
// consumers over there are done with what it sent, which then has left here too.
#pragma once
#include "cute/arch/cluster_sm90.hpp"
#include "kda/sm90/device.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// Whether this CTA prepares the chunk at a place.
template <Features WITH>
__device__ __forceinline__ bool is_own(uint32_t place) {
  return WITH != PAIRS || place % 2 == cute::block_rank_in_cluster();
}

/// Half of V that a group of consumers has.
template <Features WITH>
__device__ __forceinline__ int half_of(int group) {
  return WITH == PAIRS ? static_cast<int>(cute::block_rank_in_cluster()) : group;
}

/// Places from one chunk of a group of producers to its next, and its first one.
template <Features WITH>
constexpr uint32_t STEP = WITH == PAIRS ? 2 * GROUPS : GROUPS;
template <Features WITH>
__device__ __forceinline__ uint32_t first_place(int group) {
  return WITH == PAIRS ? cute::block_rank_in_cluster() + 2 * group : group;
}
template <Features WITH>
__device__ __forceinline__ int group_of(uint32_t place) {
  return (WITH == PAIRS ? place / 2 : place) % GROUPS;
}

/// Bytes that arrive of a chunk: Kd and Qd; Ak; Aq; its decay.
constexpr int PACKET_BYTES = 6 * HALF_BYTES + sizeof(Stage{}.aq) + sizeof(Stage{}.decay);

/// Sends some of a stage to the same place in the other CTA.
__device__ __forceinline__ void send(const void* from, int bytes, const TransactionBarrier& full) {
  const uint32_t peer = cute::block_rank_in_cluster() ^ 1, at = cute::cast_smem_ptr_to_uint(from);
  const uint32_t barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&full), peer);
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(at, peer)),
               "r"(at), "r"(bytes), "r"(barrier)
               : "memory");
}

/// What a group of producers makes, by one thread after all have come here.
__device__ __forceinline__ void send_keys(Shared& s, Ring ring) {
  Stage& stage = s.stage[ring.stage()];
  const TransactionBarrier& full = s.full[ring.stage()];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    send(stage.half[half].k, 2 * HALF_BYTES, full);
    send(stage.gate(ring.use(), half), HALF_BYTES, full);
  }
  send(stage.decay, sizeof(stage.decay), full);
}

/// One arrival of a warp for the CTA that prepared the chunk, or would have, if that is the other.
template <Features WITH>
__device__ __forceinline__ void arrive_peer(const Shared& s, Ring ring) {
  if (is_own<WITH>(ring.chunk)) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) s.peer_empty[ring.stage()].arrive(cute::block_rank_in_cluster() ^ 1);
}

/// Waits until the other CTA is where this one is; by all threads.
template <Features WITH>
__device__ __forceinline__ void sync_pair() {
  if constexpr (WITH == PAIRS) cute::cluster_arrive(), cute::cluster_wait();
}

}  // namespace kda::sm90
