// How tasks are dealt to CTAs that take several, so that all end at about the same time. Each CTA finds its own, from
// the lengths alone: no counter in memory, and the same on every run.
#pragma once
#include "kda/sm90/shared.cuh"
#include "kda/sm90/task.cuh"

namespace kda::sm90 {

/// Tokens of a sequence's last part: the end of one that is cut, else all.
template <Features WITH>
__device__ __forceinline__ int last_part(const kda_fwd_params& p, const Shared& s, int n) {
  const int length = length_of(p, s, n);
  if (WITH < SEGMENTS || s.cut.first == 0) return length;
  const int chunks = chunks_of(length);
  return length - (chunks - end_of(s.cut, chunks)) * TOKENS;
}

/// The sequences, the one with the longest last part first.
template <Features WITH>
__device__ __forceinline__ void sort_sequences(const kda_fwd_params& p, Shared& s, int* lengths) {
  const int N = static_cast<int>(p.N);
#pragma unroll 1
  for (int n = threadIdx.x; n < N; n += blockDim.x) lengths[n] = last_part<WITH>(p, s, n);
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
template <Features WITH>
__device__ __forceinline__ void balance(const kda_fwd_params& p, Shared& s, int* scratch) {
  const int hands = hands_of(p), all = static_cast<int>(p.N) * hands, HV = static_cast<int>(p.HV);
  const int grid = gridDim.x, i = threadIdx.x;
  int *load = scratch, *cta = scratch + grid, *next_load = scratch + 2 * grid, *next_cta = scratch + 3 * grid;
  if (i < grid) {
    load[i] = 0, cta[i] = i;
    if constexpr (WITH >= SEGMENTS) {  // middles come before
      const int middles = s.middles * HV, more = middles % grid;
      load[i] = (middles / grid + (i >= grid - more)) * (s.cut.middle + 1), cta[i] = (more + i) % grid;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int hand = 0; hand < all; ++hand) {
    const int heads = min(HAND, HV - hand % hands * HAND);
    const int chunks =
        chunks_of(last_part<WITH>(p, s, s.order[hand / hands])) + 1;  // a task takes about one chunk's time besides
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

/// Sorts the sequences, and deals them by load where they differ in length.
template <Features WITH>
__device__ __forceinline__ void sort_and_balance(const kda_fwd_params& p, Shared& s) {
  const int N = static_cast<int>(p.N);
  int* scratch = reinterpret_cast<int*>(s.o);
  sort_sequences<WITH>(p, s, scratch);
  const bool differ = last_part<WITH>(p, s, s.order[0]) != last_part<WITH>(p, s, s.order[N - 1]);
  if (!differ || N * hands_of(p) > MOST_HANDS || gridDim.x < HAND || gridDim.x > blockDim.x) return;
  if (threadIdx.x == 0) s.balanced = 1;
  balance<WITH>(p, s, scratch);
}

/// What is looked at to find where sequences are cut, in place of o.
struct Cuts {
  Cut cut[CANDIDATES];
  Batch batch[CANDIDATES];
  Deal deal[CANDIDATES];
};
static_assert(sizeof(Cuts) <= 4 * sizeof(Half));

// All code up to the roles comes from memory when a call begins, so there is each piece of it once, and no loop is
// unrolled.

/// Where sequences are cut: as the host has said, or as is found best; and how tasks are counted then.
__device__ __forceinline__ void cut_sequences(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int N = static_cast<int>(p.N), HV = static_cast<int>(p.HV), grid = gridDim.x, lane = threadIdx.x % 8;
  Cuts& cuts = *reinterpret_cast<Cuts*>(s.o);
  const bool given = a.cut.first > 0;
  if (p.cu_seqlens == nullptr) {  // all are cut alike, and the host knows all about it
    const int middles = middles_of(a.cut, chunks_of(static_cast<int>(p.T)));
#pragma unroll 1
    for (int n = threadIdx.x; n < N; n += blockDim.x) {
      s.chunks[n] = chunks_of(static_cast<int>(p.T)), s.slots_before[n] = n * (middles + 1), s.cut_before[n] = n;
    }
    if (threadIdx.x == 0) s.cut = a.cut, s.deal = a.deal, s.cuts = N, s.middles = N * middles;
    return;
  }
  if (threadIdx.x < 32) {
    int longest = 0, all = 0;
#pragma unroll 1
    for (int n = threadIdx.x; n < N; n += 32) {
      const int chunks = chunks_of(length_of(p, s, n));
      s.chunks[n] = chunks, longest = max(longest, chunks), all += chunks;
    }
    longest = __reduce_max_sync(~0u, longest), all = __reduce_add_sync(~0u, all);
    if (threadIdx.x == 0) {
      const bool may = given || may_gain(longest, all, N, HV, grid);
      s.fastest = ~0ull, s.longest = may ? longest : 0;
      s.cut = {0, 0}, s.deal = {}, s.cuts = s.middles = 0;
    }
  }
  __syncthreads();
  const int longest = s.longest;
  if (longest == 0) return;
  if (const int i = threadIdx.x / 8; i < (given ? 4 : CANDIDATES)) {  // eight threads a cut, whole warps
    const Cut cut = given ? a.cut : candidate(i, longest);
    Batch b;
#pragma unroll 1
    for (int n = lane; n < N; n += 8) b.add(cut, s.chunks[n]);
#pragma unroll 1
    for (int x = 1; x < 8; x *= 2) {
      auto other = [&](int y) { return __shfl_xor_sync(~0u, y, x); };
      b.sequences += other(b.sequences), b.cut += other(b.cut), b.middles += other(b.middles);
      b.chunks += other(b.chunks), b.longest_end = max(b.longest_end, other(b.longest_end));
      b.shortest_end = min(b.shortest_end, other(b.shortest_end));
      b.most_middles = max(b.most_middles, other(b.most_middles));
    }
    if (lane == 0) cuts.cut[i] = cut, cuts.batch[i] = b;
  }
  __syncthreads();
  // Then a thread a cut, in few warps: what they do together takes longer.
  if (const int i = threadIdx.x; i < (given ? 1 : CANDIDATES)) {
    const Cut cut = cuts.cut[i];
    const Batch b = cuts.batch[i];
    const bool whole = b.cut == 0;
    if (whole ? i == 0 : b.slots() <= p.segment_slots) {
      cuts.deal[i] = deal_of(b, cut, HV, grid);
      int64_t time = duration(b, cut, cuts.deal[i], HV, grid);
      if (whole) time = to_beat(time);
      atomicMin(&s.fastest, static_cast<unsigned long long>(time) * 128 + i);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int best = static_cast<int>(s.fastest % 128);
    // Nothing is cut if a given cut has too many segments, because sequences lie on one another in cu_seqlens.
    if (s.fastest != ~0ull && cuts.batch[best].cut > 0) {
      s.cut = cuts.cut[best], s.deal = cuts.deal[best];
      s.cuts = cuts.batch[best].cut, s.middles = cuts.batch[best].middles;
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32 || s.cut.first == 0) return;
  int slots = 0, cut_before = 0;  // sums over the sequences before
#pragma unroll 1
  for (int first = 0; first < N; first += 32) {
    const int n = first + threadIdx.x, chunks = n < N ? s.chunks[n] : 0;
    const int is = is_cut(s.cut, chunks), own = is + middles_of(s.cut, chunks);
    int sum = own << 9 | is;  // both in one: at most 256 are cut
#pragma unroll 1
    for (int x = 1; x < 32; x *= 2) {
      const int y = __shfl_up_sync(~0u, sum, x);
      if (static_cast<int>(threadIdx.x) >= x) sum += y;
    }
    if (n < N) s.slots_before[n] = slots + (sum >> 9) - own, s.cut_before[n] = cut_before + (sum & 511) - is;
    sum = __shfl_sync(~0u, sum, 31);
    slots += sum >> 9, cut_before += sum & 511;
  }
}

/// The tasks of this CTA, a thread for each: first segments; local states and transitions; then middles and last parts.
__device__ __forceinline__ void list_tasks(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int grid = gridDim.x, cta = blockIdx.x, HV = static_cast<int>(p.HV), i = threadIdx.x;
  const int middles = s.middles * HV, ends = static_cast<int>(p.N) * HV, late = s.deal.late, with = s.deal.with;
  // The number of a local state or transition, in turns that not all CTAs take part in. Neighbours have the two tasks
  // of a middle: one brings its tokens into the cache for the other.
  auto state_at = [&](int turn) { return turn * grid + cta - (turn >= with ? (turn - with + 1) * late : 0); };
  // Where they are listed: firsts, states, middles, last parts.
  const int cuts = s.cuts * HV, firsts = cuts / grid + (cta < cuts % grid), extra = middles % grid;
  int states = cta < late ? with : s.deal.without;
  while (states > 0 && state_at(states - 1) >= 2 * middles) --states;
  const int before = firsts + states, wholes = before + middles / grid + (cta < extra);

  // What thread i lists: a number among the tasks of its kind, and from it sequence, head and segment.
  int n = 0, head = 0, segment = -1;
  Kind kind = OUTPUT;
  bool listed = i < MOST_LISTED;
  if (i >= wholes) {
    int turn = i - wholes;
    if (s.balanced) {  // the hand in which this CTA gets a head for the turn + 1st time
      const int hands = hands_of(p), all = static_cast<int>(p.N) * hands;
      int hand = 0;
#pragma unroll 1
      for (; hand < all; ++hand) {
        if (s.rank[hand] >= 0 && turn-- == 0) break;
      }
      listed &= hand < all;
      if (listed) n = s.order[hand / hands], head = hand % hands * HAND + s.rank[hand];
    } else {
      const int first = cta - extra + (cta < extra ? grid : 0);  // who has a middle less comes first
      const int x = turn * grid + (s.sorted && turn % 2 ? grid - 1 - first : first);
      listed &= x < ends;
      if (listed) n = x / HV, head = x % HV;
      if (listed && s.sorted) n = s.order[n];
    }
  } else {
    const bool is_state = i >= firsts && i < before;
    int x = is_state ? state_at(i - firsts) : (i < firsts ? i : i - before) * grid + cta;
    if (is_state) kind = x % 2 ? TRANSITION : LOCAL, x /= 2;
    n = owner(p, x / HV, i < firsts ? s.cut_before : s.slots_before, i < firsts ? nullptr : s.cut_before);
    head = x % HV, segment = i < firsts ? 0 : 1 + x / HV - (s.slots_before[n] - s.cut_before[n]);
  }
  if (listed) {
    Task task = task_of<SEGMENTS>(p, s, n, head);
    cut_out(s, task, segment);
    task.kind = kind;
    if (kind != OUTPUT) task.initial = -1;
    s.list[i] = task;
  }
  const int count = __syncthreads_count(listed);
  if (i == 0) s.listed_before = before, s.listed = count;
  __syncthreads();
}

/// What there is to know of cu_seqlens, for all that follows a barrier.
__device__ __forceinline__ void load_starts(const kda_fwd_params& p, Shared& s) {
  if (p.cu_seqlens != nullptr && p.N < MOST_STARTS) {
    const int N = static_cast<int>(p.N);
#pragma unroll 1
    for (int n = threadIdx.x; n <= N; n += blockDim.x) s.start[n] = static_cast<int>(offset_of(p, n));
  }
  if (threadIdx.x == 0) s.balanced = 0;
}

/// What every CTA finds out before its roles begin: where sequences start, where they are cut, and, where last parts
/// differ in length and there are more of them than CTAs, who takes what.
template <Features WITH>
__device__ __forceinline__ void deal(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int N = static_cast<int>(p.N);
  bool sorted = a.sorted;
  if constexpr (WITH >= SEGMENTS) {
    cut_sequences(a, s);
    __syncthreads();
    const int ends = N * static_cast<int>(p.HV), grid = gridDim.x;
    const bool paired = s.cut.first == 0 && 2 * ends <= grid;
    // Not where all find a CTA of their own.
    sorted = sorted && !paired && ends + s.middles * static_cast<int>(p.HV) % grid > grid;
    if (threadIdx.x == 0) s.paired = paired;
  }
  if (threadIdx.x == 0) s.sorted = sorted;
  if (sorted) sort_and_balance<WITH>(p, s);
  __syncthreads();
  if constexpr (WITH >= SEGMENTS) {
    if (s.cut.first > 0) list_tasks(a, s);
  }
}

}  // namespace kda::sm90
