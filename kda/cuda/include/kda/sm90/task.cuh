// The kernel's arguments, and how (sequence, head) tasks are cut out of them.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "kda/fwd.h"
#include "kda/sm90/shared.cuh"

namespace kda::sm90 {

struct Arguments {
  kda_fwd_params p;
  CUtensorMap q, k, v, g, out;  // [128, heads, T, B], boxes of [64, 1, 32, 1]
  int anchor;                   // rows 16..31 of a chunk carry 2^anchor, see prepare.cuh
};

/// One sequence of one value head.
struct Task {
  int row, start, length;  // batch row, first token, tokens
  int sequence, head, value_head;

  __device__ int chunks() const { return (length + TOKENS - 1) / TOKENS; }
};

__device__ __forceinline__ int64_t offset_of(const kda_fwd_params& p, int64_t i) {
  const int64_t at = i * p.cu_stride;
  const int64_t x = p.cu_64 ? static_cast<const int64_t*>(p.cu_seqlens)[at] : static_cast<const int32_t*>(p.cu_seqlens)[at];
  return min(max(x, int64_t{0}), p.T);
}

__device__ __forceinline__ Task task_of(const kda_fwd_params& p, int index) {
  const int HV = static_cast<int>(p.HV), H = static_cast<int>(p.H);
  Task task;
  task.sequence = index / HV;
  task.value_head = index % HV;
  task.head = task.value_head / (HV / H);
  if (p.cu_seqlens == nullptr) {
    task.row = task.sequence, task.start = 0, task.length = static_cast<int>(p.T);
  } else {
    const int64_t start = offset_of(p, task.sequence), stop = offset_of(p, task.sequence + 1);
    task.row = 0, task.start = static_cast<int>(start), task.length = static_cast<int>(max(stop - start, int64_t{0}));
  }
  return task;
}

__device__ __forceinline__ float load_float(const void* x, int64_t i, int dtype) {
  switch (dtype) {
    case KDA_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
    case KDA_FP16: return __half2float(static_cast<const __half*>(x)[i]);
    case KDA_FP64: return static_cast<float>(static_cast<const double*>(x)[i]);
    default: return static_cast<const float*>(x)[i];
  }
}

/// Calls `body(task)` for the tasks of this CTA, in the same order in every role.
template <class Body>
__device__ __forceinline__ void for_tasks(const kda_fwd_params& p, Body body) {
  const int tasks = static_cast<int>(p.N * p.HV);
#pragma unroll 1
  for (int i = blockIdx.x; i < tasks; i += gridDim.x) body(task_of(p, i));
}

}  // namespace kda::sm90
