// The kernel's arguments, and how (sequence, head) tasks are cut out of them.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "kda/abi.h"
#include "kda/sm90/element.cuh"
#include "kda/sm90/shared.cuh"

namespace kda::sm90 {

struct Arguments {
  kda_fwd_params p;
  CUtensorMap q, k, v, g, out;  // [128, heads, T, B], boxes of [64, 1, 32, 1]
  int anchor;                   // rows 16..31 of a chunk carry 2^anchor, see prepare.cuh
  int tasks;                    // N * HV
  int sorted;                   // CTAs take several tasks each, of sequences that may differ in length
};

__device__ __forceinline__ int chunks_of(int length) { return (length + TOKENS - 1) / TOKENS; }

/// One sequence of one value head.
struct Task {
  int row, start, length;  // batch row, first token, tokens; none of padding
  int sequence, head, value_head;
  int initial;  // slot of the initial state, -1 for zero

  __device__ int chunks() const { return chunks_of(length); }
};

__device__ __forceinline__ int64_t offset_of(const kda_fwd_params& p, int64_t i) {
  const int64_t at = i * p.cu_stride;
  const int64_t x =
      p.cu_64 ? static_cast<const int64_t*>(p.cu_seqlens)[at] : static_cast<const int32_t*>(p.cu_seqlens)[at];
  return min(max(x, int64_t{0}), p.T);
}

/// First token of a sequence, or the end of the last one.
__device__ __forceinline__ int start_of(const kda_fwd_params& p, const Shared& s, int sequence) {
  return p.N < MOST_STARTS ? s.start[sequence] : static_cast<int>(offset_of(p, sequence));
}

__device__ __forceinline__ int length_of(const kda_fwd_params& p, const Shared& s, int sequence) {
  return max(start_of(p, s, sequence + 1) - start_of(p, s, sequence), 0);
}

/// Whether states lie in a pool. One without slots, all of whose sequences are padding, has no address.
__host__ __device__ __forceinline__ bool in_slots(const kda_fwd_params& p) {
  return p.state_pool != nullptr || p.state_indices != nullptr;
}

/// The slot whose state a sequence begins from, unless it is fresh; -1 for padding. SLOTS, here and elsewhere: whether
/// the call has a pool or checkpoints. Without, what they need costs short sequences 6 % of their time, unused.
template <bool SLOTS>
__device__ __forceinline__ int slot_to_read(const kda_fwd_params& p, int sequence) {
  if (!SLOTS || p.state_indices == nullptr) return sequence;
  return slot_at(p.state_indices, sequence * p.state_indices_stride, p.state_indices_dtype, p.slots);
}

/// The slot for a sequence's final state, -1 for none.
template <bool SLOTS>
__device__ __forceinline__ int slot_to_write(const kda_fwd_params& p, int sequence) {
  if (p.final_state == nullptr) return -1;
  const int read = slot_to_read<SLOTS>(p, sequence);
  if (!SLOTS || read < 0 || p.write_indices == nullptr) return read;
  return slot_at(p.write_indices, sequence * p.write_indices_stride, p.write_indices_dtype, p.slots);
}

/// A number that is the same in all lanes, said so that the compiler knows it and keeps it in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/// Task `value_head` of `sequence`; by a whole warp.
template <bool SLOTS>
__device__ __forceinline__ Task task_of(const kda_fwd_params& p, const Shared& s, int sequence, int value_head) {
  const int HV = static_cast<int>(p.HV), H = static_cast<int>(p.H);
  Task task;
  task.sequence = uniform(sequence), task.value_head = uniform(value_head), task.head = task.value_head / (HV / H);
  if (p.cu_seqlens == nullptr) {
    task.row = task.sequence, task.start = 0, task.length = static_cast<int>(p.T);
  } else {
    task.row = 0, task.start = uniform(start_of(p, s, sequence)), task.length = uniform(length_of(p, s, sequence));
  }
  task.initial = p.initial_state == nullptr ? -1 : task.sequence;
  if (SLOTS && in_slots(p)) {
    const int read = slot_to_read<SLOTS>(p, task.sequence);
    const bool fresh = p.fresh != nullptr && static_cast<const bool*>(p.fresh)[task.sequence * p.fresh_stride];
    task.initial = uniform(fresh ? -1 : read);
    if (uniform(read) < 0) task.length = 0;
  }
  return task;
}

/// Places in the ring that the initial state takes before a task's chunks: one for each group of consumers.
__device__ __forceinline__ int places_of_state(const Task& task) {
  return task.initial >= 0 && task.length > 0 ? GROUPS : 0;
}

/// Chunks from one checkpoint of a sequence to the next.
__device__ __forceinline__ int chunks_between_checkpoints(const kda_fwd_params& p) {
  return static_cast<int>(p.checkpoint_every) / TOKENS;
}

/// Parts that a sequence's heads are dealt in, see deal.cuh.
__device__ __forceinline__ int hands_of(const kda_fwd_params& p) { return (static_cast<int>(p.HV) + HAND - 1) / HAND; }

/// The next task of this CTA; `position` is 0 at first. False if there are no more. Tasks that are sorted, but too many
/// to be dealt by load, go to CTAs forth and back, so that who had the longest of one round has the shortest of the
/// next.
template <bool SLOTS>
__device__ __forceinline__ bool next_task(const Arguments& a, const Shared& s, int& position, Task& task) {
  const int grid = gridDim.x, cta = blockIdx.x, HV = static_cast<int>(a.p.HV);
  if (s.balanced) {
    const int hands = hands_of(a.p), all = static_cast<int>(a.p.N) * hands;
    while (position < all && s.rank[position] < 0) ++position;
    if (position == all) return false;
    task = task_of<SLOTS>(a.p, s, s.order[position / hands], position % hands * HAND + s.rank[position]);
    ++position;
    return true;
  }
  const bool back = a.sorted && position % 2;
  const int64_t index = int64_t{position} * grid + (back ? grid - 1 - cta : cta);
  if (index >= a.tasks) return false;
  ++position;
  const int sequence = static_cast<int>(index) / HV;
  task = task_of<SLOTS>(a.p, s, a.sorted ? s.order[sequence] : sequence, static_cast<int>(index) % HV);
  return true;
}

/// Calls `body(task)` for the tasks of this CTA, in the same order in every role.
template <bool SLOTS, class Body>
__device__ __forceinline__ void for_tasks(const Arguments& a, const Shared& s, Body body) {
  Task task;
#pragma unroll 1
  for (int position = 0; next_task<SLOTS>(a, s, position, task);) body(task);
}

}  // namespace kda::sm90
