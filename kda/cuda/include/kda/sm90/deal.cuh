// How tasks are dealt to CTAs that take several, so that all end at about the same time. Each CTA finds its own, from
// the lengths alone: no counter in memory, and the same on every run.
#pragma once
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// The sequences, the longest first.
__device__ __forceinline__ void sort_sequences(const kda_fwd_params& p, Shared& s, int* lengths) {
  const int N = static_cast<int>(p.N);
  for (int n = threadIdx.x; n < N; n += blockDim.x) lengths[n] = length_of(p, s, n);
  __syncthreads();
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    const int length = lengths[n];
    int rank = 0;
    for (int m = 0; m < N; ++m) rank += lengths[m] > length || (lengths[m] == length && m < n);
    s.order[rank] = n;
  }
  __syncthreads();
}

/// Deals the heads of a sequence by hands of HAND, one to a CTA, to those that have the fewest chunks so far (Graham's
/// rule of the longest first): of a hand this CTA has head `s.rank`, or none if that is negative. A thread for every
/// CTA of the grid keeps them sorted by load: those of a hand stay in order when they are given the same, and are
/// merged with the others.
__device__ __forceinline__ void balance(const kda_fwd_params& p, Shared& s, int* scratch) {
  const int hands = hands_of(p), all = static_cast<int>(p.N) * hands, HV = static_cast<int>(p.HV);
  const int grid = gridDim.x, i = threadIdx.x;
  int *load = scratch, *cta = scratch + grid, *next_load = scratch + 2 * grid, *next_cta = scratch + 3 * grid;
  if (i < grid) load[i] = 0, cta[i] = i;
  __syncthreads();
#pragma unroll 1
  for (int hand = 0; hand < all; ++hand) {
    const int heads = min(HAND, HV - hand % hands * HAND);
    const int chunks =
        chunks_of(length_of(p, s, s.order[hand / hands])) + 1;  // a task takes about one chunk's time besides
    if (i < grid) {
      const bool dealt = i < heads;
      const int own = load[i] + (dealt ? chunks : 0), add = dealt ? 0 : chunks;
      int low = dealt ? heads : 0,
          high = dealt ? grid : heads;  // others are searched for the first that comes after this
      const int from = low;
      while (low < high) {
        const int middle = (low + high) / 2, other = load[middle] + add;
        if (other < own || (!dealt && other == own)) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      const int to = (dealt ? i : i - heads) + low - from;
      next_load[to] = own, next_cta[to] = cta[i];
      if (cta[i] == static_cast<int>(blockIdx.x)) s.rank[hand] = dealt ? i : -1;
    }
    __syncthreads();
    int* old = load;
    load = next_load, next_load = old;
    old = cta;
    cta = next_cta, next_cta = old;
  }
}

/// What every CTA finds out before its roles begin: where sequences start, and, where they differ in length and there
/// are more tasks than CTAs, who takes what.
__device__ __forceinline__ void deal(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int N = static_cast<int>(p.N);
  if (p.cu_seqlens != nullptr && N < MOST_STARTS) {
    for (int n = threadIdx.x; n <= N; n += blockDim.x) s.start[n] = static_cast<int>(offset_of(p, n));
  }
  if (threadIdx.x == 0) s.balanced = 0;
  __syncthreads();
  if (!a.sorted) return;
  int* scratch = reinterpret_cast<int*>(s.o);
  sort_sequences(p, s, scratch);
  const bool differ = length_of(p, s, s.order[0]) != length_of(p, s, s.order[N - 1]);
  if (!differ || N * hands_of(p) > MOST_HANDS || gridDim.x < HAND || gridDim.x > blockDim.x) return;
  if (threadIdx.x == 0) s.balanced = 1;
  balance(p, s, scratch);
}

}  // namespace kda::sm90
