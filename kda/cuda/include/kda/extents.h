// Which bytes the tensors of a call lie on, for the host: a buffer must lie on none of another's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kda/abi.h"
#include "kda/numerics.h"

namespace kda {

struct Extent {
  uintptr_t start = 0, stop = 0;  // the same where there is nothing

  bool meets(const Extent& x) const { return start < x.stop && x.start < stop; }
};

struct Dimension {
  int64_t size, stride;
};

inline Extent extent(const void* data, int element, std::initializer_list<Dimension> dimensions) {
  int64_t last = 0;
  for (const Dimension& d : dimensions) {
    if (d.size == 0 || data == nullptr) return {};
    last += (d.size - 1) * d.stride;
  }
  const auto start = reinterpret_cast<uintptr_t>(data);
  return {start, start + static_cast<uintptr_t>(last + 1) * element};
}

inline int bytes_of(int dtype) {
  switch (dtype) {
    case KDA_FP64:
    case KDA_INT64: return 8;
    case KDA_FP32:
    case KDA_INT32: return 4;
    case KDA_INT8:
    case KDA_UINT8: return 1;
    default: return 2;
  }
}

/// The extents of a call's tensors. P: the structure of its parameters, which names batch rows B or N.
template <class P>
struct Extents {
  static constexpr int64_t K = SM90_CHANNELS, V = SM90_CHANNELS;
  const P& p;
  int64_t B;

  Extent rows(const void* data, const int64_t (&stride)[3], int64_t heads, Dimension last, int dtype) const {
    return extent(data, bytes_of(dtype), {{B, stride[0]}, {p.T, stride[1]}, {heads, stride[2]}, last});
  }
  Extent of_v(const void* data, const int64_t (&stride)[3]) const { return rows(data, stride, p.HV, {V, 1}, KDA_BF16); }
  Extent states(const void* data, const int64_t (&stride)[3], int64_t slots, int dtype) const {
    return extent(data, bytes_of(dtype), {{slots, stride[0]}, {p.HV, stride[1]}, {V, stride[2]}, {K, 1}});
  }
  Extent of_sequences(const void* data, int64_t stride, int element) const {
    return extent(data, element, {{p.N, stride}});
  }
  /// Whether any of the inputs that all calls have, and `more`, meets what is written.
  bool read(std::initializer_list<Extent> written, int g_dtype, std::initializer_list<Extent> more) const {
    const Extent inputs[] = {
        rows(p.q, p.q_stride, p.H, {K, 1}, KDA_BF16),
        rows(p.k, p.k_stride, p.H, {K, 1}, KDA_BF16),
        of_v(p.v, p.v_stride),
        rows(p.g, p.g_stride, p.HV, {K, 1}, g_dtype),
        rows(p.beta, p.beta_stride, p.HV, {1, 1}, p.beta_dtype),
        extent(p.A_log, bytes_of(p.A_log_dtype), {{p.HV, p.A_log_stride}}),
        extent(p.dt_bias, bytes_of(p.dt_bias_dtype), {{p.HV, p.dt_bias_stride[0]}, {K, p.dt_bias_stride[1]}}),
        of_sequences(p.state_indices, p.state_indices_stride, bytes_of(p.state_indices_dtype)),
        of_sequences(p.write_indices, p.write_indices_stride, bytes_of(p.write_indices_dtype)),
        of_sequences(p.fresh, p.fresh_stride, 1),
    };
    for (const Extent& buffer : written) {
      for (const Extent& x : inputs) {
        if (x.meets(buffer)) return true;
      }
      for (const Extent& x : more) {
        if (x.meets(buffer)) return true;
      }
    }
    return false;
  }
};

/// Whether one of the addresses is no multiple of 16.
inline bool unaligned(std::initializer_list<const void*> addresses) {
  uintptr_t bits = 0;
  for (const void* x : addresses) bits |= reinterpret_cast<uintptr_t>(x);
  return bits % 16 != 0;
}

/// Whether the call's addresses are such that KDA_REFUSED is due.
inline bool refused(const kda_fwd_params& p) {
  const Extents<kda_fwd_params> of{p, p.B};
  auto in_place = [](const void* a, const int64_t (&a_stride)[3], const void* b, const int64_t (&b_stride)[3]) {
    return a == b && std::equal(a_stride, a_stride + 3, b_stride);
  };
  const Extent out = of.of_v(p.out, p.out_stride);
  const Extent initial = of.states(p.initial_state, p.initial_stride, p.N, p.state_dtype);
  const Extent final = of.states(p.final_state, p.final_stride, p.N, p.state_dtype);
  const Extent pool = of.states(p.state_pool, p.pool_stride, p.slots, p.state_dtype);
  const Extent checkpoints = of.states(p.checkpoints, p.checkpoint_stride, p.checkpoint_slots, p.checkpoint_dtype);
  const Extent offsets = extent(p.cu_seqlens, p.cu_64 ? 8 : 4, {{p.N + 1, p.cu_stride}});
  const Extent columns =
      extent(p.checkpoint_indices, bytes_of(p.checkpoint_indices_dtype),
             {{p.N, p.checkpoint_indices_stride[0]}, {p.checkpoint_columns, p.checkpoint_indices_stride[1]}});
  if (of.read({out, final, pool, checkpoints}, KDA_BF16, {offsets, columns})) return true;
  for (const Extent& x : {final, initial, pool, checkpoints}) {
    if (x.meets(out)) return true;
  }
  // There is a pool or there are the other two states.
  const bool updated = in_place(p.initial_state, p.initial_stride, p.final_state, p.final_stride);
  const bool kept_in_pool = in_place(p.state_pool, p.pool_stride, p.checkpoints, p.checkpoint_stride) &&
                            p.state_dtype == p.checkpoint_dtype && p.slots == p.checkpoint_slots;
  if ((final.meets(initial) && !updated) || (pool.meets(checkpoints) && !kept_in_pool)) return true;
  if (checkpoints.meets(initial) || checkpoints.meets(final)) return true;
  return unaligned({p.q, p.k, p.v, p.g, p.out, p.initial_state, p.final_state, p.state_pool, p.checkpoints});
}

inline bool refused(const kda_step_params& p) {
  const Extents<kda_step_params> of{p, p.N};
  const Extent out = of.of_v(p.out, p.out_stride);
  const Extent state = of.states(p.state, p.state_stride, p.slots, p.state_dtype);
  const Extent tokens = extent(p.token_indices, bytes_of(p.token_indices_dtype),
                               {{p.N, p.token_indices_stride[0]}, {p.T, p.token_indices_stride[1]}});
  return of.read({out, state}, p.g_dtype, {tokens}) || out.meets(state) ||
         unaligned({p.q, p.k, p.v, p.g, p.out, p.state});
}

}  // namespace kda
