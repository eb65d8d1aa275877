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
  int tasks;                    // N * HV
  int sorted;                   // CTAs take several tasks each, of sequences that may differ in length
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

__device__ __forceinline__ int length_of(const kda_fwd_params& p, int sequence) {
  return static_cast<int>(max(offset_of(p, sequence + 1) - offset_of(p, sequence), int64_t{0}));
}

/// Fills `order` with the sequences, the longest first; by the whole CTA, before the roles begin.
__device__ __forceinline__ void sort_sequences(const kda_fwd_params& p, int* lengths, int* order) {
  const int N = static_cast<int>(p.N);
  for (int n = threadIdx.x; n < N; n += blockDim.x) lengths[n] = length_of(p, n);
  __syncthreads();
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    const int length = lengths[n];
    int rank = 0;
    for (int m = 0; m < N; ++m) rank += lengths[m] > length || (lengths[m] == length && m < n);
    order[rank] = n;
  }
  __syncthreads();
}

__device__ __forceinline__ Task task_of(const kda_fwd_params& p, const int* order, int index) {
  const int HV = static_cast<int>(p.HV), H = static_cast<int>(p.H);
  Task task;
  task.sequence = index / HV;
  if (order != nullptr) task.sequence = order[task.sequence];
  task.value_head = index % HV;
  task.head = task.value_head / (HV / H);
  if (p.cu_seqlens == nullptr) {
    task.row = task.sequence, task.start = 0, task.length = static_cast<int>(p.T);
  } else {
    task.row = 0, task.start = static_cast<int>(offset_of(p, task.sequence)), task.length = length_of(p, task.sequence);
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

/// Calls `body(task)` for the tasks of this CTA, in the same order in every role. Where tasks are sorted, CTAs take turns
/// forth and back, so that who had the longest of one round has the shortest of the next.
template <class Body>
__device__ __forceinline__ void for_tasks(const Arguments& a, const Shared& s, Body body) {
  const int grid = gridDim.x;
#pragma unroll 1
  for (int first = 0; first < a.tasks; first += grid) {
    const bool back = a.sorted && first / grid % 2;
    const int index = first + (back ? grid - 1 - static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x));
    if (index < a.tasks) body(task_of(a.p, a.sorted ? s.order : nullptr, index));
  }
}

}  // namespace kda::sm90
