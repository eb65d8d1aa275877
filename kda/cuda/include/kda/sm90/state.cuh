// States: out of the ring into registers, and from there into memory.
#pragma once
#include "kda/sm90/device.cuh"
#include "kda/sm90/pair.cuh"
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The state of a thread: element [4 j + 2 r + e] is V row 8 r + lane / 4 of the warp's 16, channel 8 j + lane % 4 * 2
/// + e.
using State = float[64];

// Final states go to memory from the registers. Of 16 channels of a row four lanes hold two and two each, eight
// channels apart; two neighbours exchange a pair, so that each has four in a row, a quarter: the even lane for j even,
// the odd lane for j odd. Stores of 16 bytes are half as many as those of 8, and it is their number that costs.

__device__ __forceinline__ float2 from_neighbour(float2 x) {
  return make_float2(__shfl_xor_sync(~0u, x.x, 1), __shfl_xor_sync(~0u, x.y, 1));
}

/// Byte of a thread's first four channels in its first row of a head's state in a slot, and of 8 rows.
struct Rows {
  int64_t first, step;
  __device__ Rows(const int64_t (&stride)[3], int size, int slot, int value_head, int first_row) {
    const int lane = fresh_lane(), channel = lane % 2 * 8 + lane % 4 / 2 * 4;
    first = (slot * stride[0] + value_head * stride[1] + (first_row + lane / 4) * stride[2] + channel) * size;
    step = 8 * stride[2] * size;
  }
};

/// As what a state is stored.
enum Stored { AS_FP32, AS_BF16, AS_TWO_TERMS };  // in bf16, the second TRANSITION_BYTES behind the first

/// One piece of code for all three: it comes from memory when a call first ends.
template <Features WITH>
__device__ __forceinline__ void store_rows(void* to, Stored as, const Rows& rows, float scale, const State& s) {
  const bool odd = fresh_lane() % 2;
  char* first = static_cast<char*>(to) + rows.first;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    char* row = first + r * rows.step;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a0 = s[8 * i + 2 * r], a1 = s[8 * i + 2 * r + 1], b0 = s[8 * i + 4 + 2 * r],
                  b1 = s[8 * i + 5 + 2 * r];
      const float2 own = make_float2(odd ? b0 : a0, odd ? b1 : a1);
      const float2 other = from_neighbour(make_float2(odd ? a0 : b0, odd ? a1 : b1));
      const float4 x = odd ? make_float4(other.x * scale, other.y * scale, own.x * scale, own.y * scale)
                           : make_float4(own.x * scale, own.y * scale, other.x * scale, other.y * scale);
      if (as == AS_FP32) {
        put_quarter(reinterpret_cast<float4*>(row) + 4 * i, x);
      } else {
        put_quarter(reinterpret_cast<uint2*>(row) + 4 * i, x);
        if (WITH >= SEGMENTS && as == AS_TWO_TERMS) {
          put_rest(reinterpret_cast<uint2*>(row + TRANSITION_BYTES) + 4 * i, x);
        }
      }
    }
  }
}

/// The initial state, which comes in the ring's next places.
template <Features WITH>
__device__ __forceinline__ void load_state(const kda_fwd_params& p, Shared& s, const Task& task, Ring& ring, int group,
                                           float scale, State& state) {
  if (task.initial < 0) {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0.0f;
    return;
  }
  const Ring first = ring, own{ring.chunk + group};
  for (const int places = places_of_state<WITH>(task); ring.chunk != first.chunk + places; ++ring.chunk) {
    s.raw[ring.stage()].wait(ring.use());
    if (!is_own<WITH>(ring.chunk)) s.ready[ring.stage()].wait(ring.use());  // as on every use
  }
  const int lane = fresh_lane(), row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  auto load = [&](auto two) {
    using Two = decltype(two);
    constexpr int BYTES = 4 * sizeof(Two), TILE = 128 / BYTES;  // of eight channels; and how often these are in a tile
    const int within = lane % 4 * sizeof(Two);
    const uint32_t first =
        cute::cast_smem_ptr_to_uint(s.stage[own.stage()].half) + swizzled(row, within / 16) + within % 16;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        two = in_shared<Two>((first ^ j % TILE * BYTES) + j / TILE * STATE_TILE_BYTES + r * 8 * 128);
        if constexpr (sizeof(Two) == 4) {
          state[4 * j + 2 * r] = low(two) * scale, state[4 * j + 2 * r + 1] = high(two) * scale;
        } else {
          state[4 * j + 2 * r] = two.x * scale, state[4 * j + 2 * r + 1] = two.y * scale;
        }
      }
    }
  };
  if (state_dtype<WITH>(p, task) == KDA_BF16) {
    load(uint32_t{});
  } else {
    load(float2{});
  }
  for (Ring place = first; place.chunk != ring.chunk; ++place.chunk) {
    arrive_warp(s.read[place.stage()]);
    arrive_warp(s.empty[place.stage()]);
    arrive_peer<WITH>(s, place);
  }
}

/// The state that a transition (the identity) or a local state (zero) begins from.
__device__ __forceinline__ void begin_state(const Task& task, int first_row, float one, State& state) {
  const int lane = fresh_lane(), row = first_row + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int up = i / 2 % 2 * 8, along = i / 4 * 8 + i % 2;
    state[i] = task.kind == TRANSITION && row + up == column + along ? one : 0.0f;
  }
}

/// The slot for the checkpoint after some chunks of a task, -1 if there is none to be kept.
__device__ __forceinline__ int checkpoint_of(const kda_fwd_params& p, const Task& task, int chunks) {
  if (p.checkpoints == nullptr || chunks * TOKENS > task.length) return -1;
  chunks += task.before;
  const int every = chunks_between_checkpoints(p), column = chunks / every - 1;
  if (chunks % every != 0 || column >= p.checkpoint_columns) return -1;
  const int64_t at = task.sequence * p.checkpoint_indices_stride[0] + column * p.checkpoint_indices_stride[1];
  return slot_at(p.checkpoint_indices, at, p.checkpoint_indices_dtype, p.checkpoint_slots);
}

/// The state after some chunks of a task, to where it is asked for: as a checkpoint, and after the last as the final
/// state, or that between two segments.
template <Features WITH>
__device__ __forceinline__ void keep_state(const Arguments& args, const Task& task, int chunks, int first_row,
                                           float scale, const State& s) {
  const kda_fwd_params& p = args.p;
#pragma unroll 1
  for (int final = WITH >= SLOTS ? 0 : 1; final < 2; ++final) {  // a loop, so that the code that stores is there once
    const bool segment = WITH >= SEGMENTS && final && task.segment >= 0;
    const bool transition = segment && task.kind == TRANSITION;
    const int64_t (&stride)[3] = transition ? args.transition_stride
                                 : segment  ? args.segment_stride
                                 : final    ? p.final_stride
                                            : p.checkpoint_stride;
    int slot;
    if (!final) {
      // Not that of a local state or a transition, which end where a checkpoint may be due, but hold another.
      slot = makes_output<WITH>(task) ? checkpoint_of(p, task, chunks) : -1;
    } else if (chunks != task.chunks()) {
      slot = -1;
    } else {
      slot = segment ? task.segment : slot_to_write<WITH>(p, task.sequence);
    }
    if (slot < 0) continue;
    void* to = transition ? args.transitions : segment ? args.states : final ? p.final_state : p.checkpoints;
    const bool bf16 = !segment && (final ? p.state_dtype : p.checkpoint_dtype) == KDA_BF16;
    const Stored as = transition ? AS_TWO_TERMS : bf16 ? AS_BF16 : AS_FP32;
    store_rows<WITH>(to, as, Rows(stride, as == AS_FP32 ? 4 : 2, slot, task.value_head, first_row), scale, s);
  }
}

/// The state of an empty sequence, bit for bit; nothing for padding.
template <Features WITH>
__device__ __forceinline__ void copy_state(const kda_fwd_params& p, const Task& task, int first_row) {
  const int slot = slot_to_write<WITH>(p, task.sequence);
  if (slot < 0) return;
  auto copy = [&](auto quarter) {
    using Quarter = decltype(quarter);
    const int size = sizeof(Quarter) / 4;
    const Rows from(p.initial_stride, size, task.initial, task.value_head, first_row);
    const Rows to(p.final_stride, size, slot, task.value_head, first_row);
    const char* source = static_cast<const char*>(p.initial_state) + from.first;
    char* target = static_cast<char*>(p.final_state) + to.first;
#pragma unroll 1
    for (int i = 0; i < 16; ++i, quarter = Quarter{}) {
      if (task.initial >= 0) quarter = reinterpret_cast<const Quarter*>(source + i / 8 * from.step)[i % 8 * 4];
      reinterpret_cast<Quarter*>(target + i / 8 * to.step)[i % 8 * 4] = quarter;
    }
  };
  if (p.state_dtype == KDA_BF16) {
    copy(uint2{});
  } else {
    copy(uint4{});
  }
}

}  // namespace kda::sm90
