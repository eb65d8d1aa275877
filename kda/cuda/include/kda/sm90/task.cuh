// The kernel's arguments, and how (sequence, head) tasks are cut out of them.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "kda/abi.h"
#include "kda/segments.h"
#include "kda/sm90/element.cuh"
#include "kda/sm90/shared.cuh"

namespace kda::sm90 {

/// What a kernel is compiled with; each has all before it. What a call does not need costs it 6 % of its time where
/// sequences are short, unused.
enum Features {
  PLAIN,
  SLOTS,     // pools and checkpoints
  PAIRS,     // two CTAs to a task, see pair.cuh; not with segments
  SEGMENTS,  // sequences that are cut, see segments.h
};

struct Arguments {
  kda_fwd_params p;
  CUtensorMap q, k, v, g, out;  // [128, heads, T, B], boxes of [64, 1, 32, 1]
  CUtensorMap initial;          // [128, V, heads, slots], boxes of 128 bytes and 64 rows
  CUtensorMap carried;          // the same of `states`
  int anchor;                   // rows 16..31 of a chunk carry 2^anchor, see prepare.cuh
  float minus_exact;            // -2^(CARRIED - anchor): what takes it out where they meet the state
  float late_scale;             // of o in those rows
  int tasks;                    // N * HV
  int sorted;                   // CTAs take several tasks each, of sequences that may differ in length
  // SEGMENTS:
  int equal;  // chunks of every sequence that `cut` and `deal` are for: others are found out about
  Cut cut;    // if `equal` is 0, for any
  Deal deal;
  int middles;                   // of every such sequence
  int turn;                      // `whole_turn` of all tasks
  float* states;                 // [slots, HV, 128, 128] (V, K), of segments' ends; see segments.h
  void* transitions;             // [slots, HV, 2, 128, 128] in bf16: two terms
  int64_t segment_stride[3];     // of states: slot, head, v
  int64_t transition_stride[3];  // of transitions, of one term
};

/// Whether o is asked for: known to the compiler where there are no segments.
template <Features WITH>
__device__ __forceinline__ bool makes_output(const Task& task) {
  return WITH < SEGMENTS || task.kind == OUTPUT;
}

/// Dtype of a task's initial state.
template <Features WITH>
__device__ __forceinline__ int state_dtype(const kda_fwd_params& p, const Task& task) {
  return WITH >= SEGMENTS && task.carried ? KDA_FP32 : p.state_dtype;
}

/// Where the state of a segment's end lies.
__device__ __forceinline__ float* state_at(const Arguments& a, int slot, int value_head) {
  return a.states + slot * a.segment_stride[0] + value_head * a.segment_stride[1];
}

/// Bytes of one term of a transition.
constexpr int TRANSITION_BYTES = CHANNELS * TRANSITION_PITCH * 2;

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

/// The slot whose state a sequence begins from, unless it is fresh; -1 for padding.
template <Features WITH>
__device__ __forceinline__ int slot_to_read(const kda_fwd_params& p, int sequence) {
  if (WITH < SLOTS || p.state_indices == nullptr) return sequence;
  return slot_at(p.state_indices, sequence * p.state_indices_stride, p.state_indices_dtype, p.slots);
}

/// The slot for a sequence's final state, -1 for none.
template <Features WITH>
__device__ __forceinline__ int slot_to_write(const kda_fwd_params& p, int sequence) {
  if (p.final_state == nullptr) return -1;
  const int read = slot_to_read<WITH>(p, sequence);
  if (WITH < SLOTS || read < 0 || p.write_indices == nullptr) return read;
  return slot_at(p.write_indices, sequence * p.write_indices_stride, p.write_indices_dtype, p.slots);
}

/// A number that is the same in all lanes, said so that the compiler knows it and keeps it in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/// Task `value_head` of `sequence`; by a whole warp, or with segments by any thread.
template <Features WITH>
__device__ __forceinline__ Task task_of(const kda_fwd_params& p, const Shared& s, int sequence, int value_head) {
  auto uniform = [](int x) { return WITH >= SEGMENTS ? x : sm90::uniform(x); };
  const int HV = static_cast<int>(p.HV), H = static_cast<int>(p.H);
  Task task{};
  task.segment = -1;
  task.sequence = uniform(sequence), task.value_head = uniform(value_head), task.head = task.value_head / (HV / H);
  if (p.cu_seqlens == nullptr) {
    task.row = task.sequence, task.start = 0, task.length = static_cast<int>(p.T);
  } else {
    task.row = 0, task.start = uniform(start_of(p, s, sequence)), task.length = uniform(length_of(p, s, sequence));
  }
  task.initial = p.initial_state == nullptr ? -1 : task.sequence;
  if (WITH >= SLOTS && in_slots(p)) {
    const int read = slot_to_read<WITH>(p, task.sequence);
    const bool fresh = p.fresh != nullptr && static_cast<const bool*>(p.fresh)[task.sequence * p.fresh_stride];
    task.initial = uniform(fresh ? -1 : read);
    if (uniform(read) < 0) task.length = 0;
  }
  return task;
}

/// Places in the ring that the initial state takes before a task's chunks: one for each group of consumers that works.
template <Features WITH>
__device__ __forceinline__ int places_of_state(const Task& task) {
  return task.initial >= 0 && task.length > 0 ? (WITH == PAIRS ? 1 : GROUPS) : 0;
}

/// Chunks from one checkpoint of a sequence to the next.
__device__ __forceinline__ int chunks_between_checkpoints(const kda_fwd_params& p) {
  return static_cast<int>(p.checkpoint_every) / TOKENS;
}

/// Parts that a sequence's heads are dealt in, see deal.cuh.
__device__ __forceinline__ int hands_of(const kda_fwd_params& p) { return (static_cast<int>(p.HV) + HAND - 1) / HAND; }

/// The last sequence before which `before`, less what `without` counts if it is there, is at most `i`.
__device__ __forceinline__ int owner(const kda_fwd_params& p, int i, const int* before, const int* without) {
  int low = 0, high = static_cast<int>(p.N);
#pragma unroll 1
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (before[middle] - (without ? without[middle] : 0) <= i ? low : high) = middle;
  }
  return low;
}

/// Makes a whole sequence's task that of its segment `i`: 0 is the first, -1 the last, also of a sequence that is not
/// cut.
__device__ __forceinline__ void cut_out(const Shared& s, Task& task, int i) {
  const Cut cut = s.cut;
  const int chunks = s.chunks[task.sequence], middles = middles_of(cut, chunks), slot = s.slots_before[task.sequence];
  if (!is_cut(cut, chunks)) return;
  if (i < 0) i = middles + 1;
  if (i > 0) task.before = cut.first + (i - 1) * cut.middle, task.carried = true, task.initial = slot + i - 1;
  if (i <= middles) task.segment = slot + i;
  const int tokens = task.length - task.before * TOKENS;  // negative for padding, which has none
  task.start += task.before * TOKENS;
  task.length = max(i > middles ? tokens : min(tokens, (i ? cut.middle : cut.first) * TOKENS), 0);
}

/// The next task of this CTA where nothing is cut; `position` is 0 at first. False if there are no more. Tasks that are
/// sorted, but too many to be dealt by load, go to CTAs forth and back, so that who had the longest of one round has
/// the shortest of the next.
template <Features WITH>
__device__ __forceinline__ bool next_whole(const Arguments& a, const Shared& s, int& position, Task& task) {
  constexpr int TOGETHER = WITH == PAIRS ? 2 : 1;  // CTAs that have the same tasks
  const int grid = gridDim.x / TOGETHER, cta = blockIdx.x / TOGETHER, HV = static_cast<int>(a.p.HV);
  int sequence, head;
  if (WITH != PAIRS && s.balanced) {
    const int hands = hands_of(a.p), all = static_cast<int>(a.p.N) * hands;
    while (position < all && s.rank[position] < 0) ++position;
    if (position == all) return false;
    sequence = s.order[position / hands], head = position % hands * HAND + s.rank[position];
  } else {
    const bool sorted = WITH != PAIRS && s.sorted, back = sorted && position % 2;
    const int64_t index = int64_t{position} * grid + (back ? grid - 1 - cta : cta);
    if (index >= a.tasks) return false;
    sequence = static_cast<int>(index) / HV, head = static_cast<int>(index) % HV;
    if (sorted) sequence = s.order[sequence];
  }
  ++position;
  task = task_of<WITH>(a.p, s, sequence, head);
  return true;
}

/// A role's place among the tasks of its CTA. With segments they are listed, see deal.cuh: those before the exchange of
/// states, and the rest.
struct Place {
  int position = 0;
  bool exchanged = false;
};

/// The next task; false if there are no more, or none before the exchange.
template <Features WITH>
__device__ __forceinline__ bool next_task(const Arguments& a, const Shared& s, Place& place, Task& task) {
  if constexpr (WITH < SEGMENTS) return next_whole<WITH>(a, s, place.position, task);
  if (place.position == (place.exchanged ? s.listed : s.listed_before)) return false;
  task = s.list[place.position++];
  return true;
}

/// Calls `body(task)` for the tasks of this CTA, in the same order in every role, and `exchange()` in their midst where
/// sequences are cut.
template <Features WITH, class Body, class Exchange>
__device__ __forceinline__ void for_tasks(const Arguments& a, const Shared& s, Body body, Exchange exchange) {
  Task task;
  Place place;
#pragma unroll 1
  for (place.exchanged = WITH < SEGMENTS;; place.exchanged = true) {
#pragma unroll 1
    while (next_task<WITH>(a, s, place, task)) body(task);
    if (place.exchanged) break;
    exchange();
  }
}

/// The same for a warp of the consumers, whose registers have no room for where it is and with what.
template <Features WITH, class Body, class Exchange>
__device__ __forceinline__ void for_tasks_aside(const Arguments& a, Shared& s, Body body, Exchange exchange) {
  if constexpr (WITH < SEGMENTS) {
    for_tasks<WITH>(a, s, body, exchange);
  } else {
    // All lanes write, and read, the same.
    auto position = [&]() -> volatile int& { return s.position[threadIdx.x / 32]; };
    position() = 0;
#pragma unroll 1
    for (;; position() = position() + 1) {
      const int now = uniform(position());
      if (now == s.listed_before) exchange();
      if (now == s.listed) break;
      body(s.list[now]);
    }
  }
}

}  // namespace kda::sm90
