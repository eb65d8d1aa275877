// Which bytes the tensors of a call lie on, for the host: a buffer must lie on none of another's.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "kda/fwd.h"
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
    case KDA_FP64: return 8;
    case KDA_FP32: return 4;
    default: return 2;
  }
}

/// Whether the call's addresses are such that KDA_REFUSED is due.
inline bool refused(const kda_fwd_params& p) {
  constexpr int64_t K = SM90_CHANNELS, V = SM90_CHANNELS;
  auto rows = [&](const void* data, const int64_t (&stride)[3], int64_t heads, Dimension last, int element = 2) {
    return extent(data, element, {{p.B, stride[0]}, {p.T, stride[1]}, {heads, stride[2]}, last});
  };
  auto state = [&](const void* data, const int64_t (&stride)[3]) {
    return extent(data, bytes_of(p.state_dtype), {{p.N, stride[0]}, {p.HV, stride[1]}, {V, stride[2]}, {K, 1}});
  };
  const Extent out = rows(p.out, p.out_stride, p.HV, {V, 1}), final = state(p.final_state, p.final_stride);
  const Extent initial = state(p.initial_state, p.initial_stride);
  const Extent others[] = {
      rows(p.q, p.q_stride, p.H, {K, 1}),
      rows(p.k, p.k_stride, p.H, {K, 1}),
      rows(p.v, p.v_stride, p.HV, {V, 1}),
      rows(p.g, p.g_stride, p.HV, {K, 1}),
      rows(p.beta, p.beta_stride, p.HV, {1, 1}, bytes_of(p.beta_dtype)),
      extent(p.A_log, bytes_of(p.A_log_dtype), {{p.HV, p.A_log_stride}}),
      extent(p.dt_bias, bytes_of(p.dt_bias_dtype), {{p.HV, p.dt_bias_stride[0]}, {K, p.dt_bias_stride[1]}}),
      extent(p.cu_seqlens, p.cu_64 ? 8 : 4, {{p.N + 1, p.cu_stride}}),
  };
  for (const Extent& x : others) {
    if (x.meets(out) || x.meets(final)) return true;
  }
  bool in_place = p.initial_state == p.final_state;
  for (int i = 0; i < 3; ++i) in_place = in_place && p.initial_stride[i] == p.final_stride[i];
  if (out.meets(final) || out.meets(initial) || (final.meets(initial) && !in_place)) return true;

  uintptr_t bits = 0;
  for (const void* x : {p.q, p.k, p.v, p.g, static_cast<const void*>(p.out), p.initial_state,
                        static_cast<const void*>(p.final_state)}) {
    bits |= reinterpret_cast<uintptr_t>(x);
  }
  return bits % 16 != 0;
}

}  // namespace kda
