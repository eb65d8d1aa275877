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

/// What it takes to order and deal sequences, in place of o.
struct Scratch {
  int length[MOST_SORTED];  // of last parts, in tokens
  struct {
    int load, cta;
  } by_load[2][THREADS];  // of the grid: before and after a hand
};
static_assert(sizeof(Scratch) <= sizeof(Shared::o));

/// The sequences, the one with the longest last part first.
template <Features WITH>
__device__ __forceinline__ void sort_sequences(const kda_fwd_params& p, Shared& s, Scratch& scratch) {
  const int N = static_cast<int>(p.N);
#pragma unroll 1
  for (int n = fresh_thread(); n < N; n += blockDim.x) scratch.length[n] = last_part<WITH>(p, s, n);
  __syncthreads();
#pragma unroll 1
  for (int n = fresh_thread(); n < N; n += blockDim.x) {
    const int length = scratch.length[n];
    int rank = 0;
#pragma unroll 4
    for (int m = 0; m < N; ++m) rank += scratch.length[m] > length || (scratch.length[m] == length && m < n);
    s.order[rank] = n;
  }
  __syncthreads();
}

/// Deals the heads of a sequence by hands of HAND, one to a CTA, to those that have the fewest chunks so far (Graham's
/// rule of the longest first): of a hand this CTA has head `s.rank`, or none if that is negative. A thread for every
/// CTA of the grid keeps them sorted by load: those of a hand stay in order when they are given the same, and are
/// merged with the others.
template <Features WITH>
__device__ __forceinline__ void balance(const kda_fwd_params& p, Shared& s, Scratch& scratch) {
  const int hands = hands_of(p), all = static_cast<int>(p.N) * hands, HV = static_cast<int>(p.HV);
  const int grid = gridDim.x, i = fresh_thread();
  if (i < grid) {
    auto& first = scratch.by_load[0][i];
    first.load = 0, first.cta = i;
    if constexpr (WITH >= SEGMENTS) {  // middles come before
      const int middles = s.middles * HV, more = middles % grid;
      first.load = (middles / grid + (i >= grid - more)) * (s.cut.middle + 1), first.cta = (more + i) % grid;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int hand = 0; hand < all; ++hand) {
    const int heads = min(HAND, HV - hand % hands * HAND);
    const int chunks = chunks_of(scratch.length[s.order[hand / hands]]) + 1;  // a task takes about one chunk's besides
    if (i < grid) {
      const auto& before = scratch.by_load[hand % 2];
      const auto own = before[i];
      const bool dealt = i < heads;
      const int load = own.load + (dealt ? chunks : 0), add = dealt ? 0 : chunks;
      int low = dealt ? heads : 0,
          high = dealt ? grid : heads;  // others are searched for the first that comes after this
      const int from = low;
#pragma unroll 1
      while (low < high) {
        const int middle = (low + high) / 2, other = before[middle].load + add;
        if (other < load || (!dealt && other == load)) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      scratch.by_load[hand % 2 ^ 1][(dealt ? i : i - heads) + low - from] = {load, own.cta};
      if (own.cta == static_cast<int>(blockIdx.x)) s.rank[hand] = dealt ? i : -1;
    }
    __syncthreads();
  }
}

/// Sorts the sequences, and deals them by load where they differ in length.
template <Features WITH>
__device__ __forceinline__ void sort_and_balance(const kda_fwd_params& p, Shared& s) {
  const int N = static_cast<int>(p.N);
  Scratch& scratch = *reinterpret_cast<Scratch*>(s.o);
  sort_sequences<WITH>(p, s, scratch);
  const bool differ = scratch.length[s.order[0]] != scratch.length[s.order[N - 1]];
  if (!differ || N * hands_of(p) > MOST_HANDS || gridDim.x < HAND || gridDim.x > blockDim.x) return;
  if (fresh_thread() == 0) s.balanced = 1;
  balance<WITH>(p, s, scratch);
}

/// What is looked at to find where sequences are cut, in place of o.
struct Cuts {
  Cut cut[CANDIDATES];
  Batch batch[CANDIDATES];
  Deal deal[CANDIDATES];
};
static_assert(sizeof(Cuts) <= sizeof(Shared::o));

// All code up to the roles comes from memory when a call begins, so there is each piece of it once, and no loop is
// unrolled.

/// Whether a cut could gain anything: `s.longest` is not 0 then. `s.cut` is the cut if it is known, as the host has
/// said it for sequences of these lengths; else `find_cut` looks for one. By one warp, beside what others do, and a
/// barrier is to come.
__device__ __forceinline__ void look_at_lengths(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int N = static_cast<int>(p.N), lane = fresh_thread() - 32;
  if (lane < 0 || lane >= 32) return;
  int longest = 0, all = 0;
#pragma unroll 1
  for (int n = lane; n < N; n += 32) {
    const int chunks =
        p.cu_seqlens == nullptr ? a.equal : chunks_of(max(static_cast<int>(offset_of(p, n + 1) - offset_of(p, n)), 0));
    s.chunks[n] = chunks, longest = max(longest, chunks), all += chunks;
    s.slots_before[n] = n * (a.middles + 1), s.cut_before[n] = n;  // if they are equal
  }
  longest = __reduce_max_sync(~0u, longest), all = __reduce_add_sync(~0u, all);
  if (lane != 0) return;
  const bool given = a.equal == 0, known = longest == a.equal && all == N * longest;
  const bool may =
      given || (known ? a.cut.first > 0 : may_gain(longest, all, static_cast<int>(p.HV), gridDim.x, a.turn));
  s.fastest = ~0ull, s.longest = may ? longest : 0;
  s.cut = known ? a.cut : Cut{0, 0}, s.deal = known ? a.deal : Deal{};
  s.cuts = known ? N : 0, s.middles = known ? N * a.middles : 0;
}

/// Where sequences are cut: as is asked for, or as is found best; and how tasks are counted then. `s.longest` is 0 if
/// none is.
__device__ __forceinline__ void find_cut(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int N = static_cast<int>(p.N), HV = static_cast<int>(p.HV), grid = gridDim.x, lane = fresh_thread() % 8;
  const int longest = s.longest;
  Cuts& cuts = *reinterpret_cast<Cuts*>(s.o);
  const bool given = a.equal == 0;
  if (const int i = fresh_thread() / 8; i < (given ? 4 : CANDIDATES)) {  // eight threads a cut, whole warps
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
  if (const int i = fresh_thread(); i < (given ? 1 : CANDIDATES)) {
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
  if (fresh_thread() == 0) {
    const int best = static_cast<int>(s.fastest % 128);
    // Nothing is cut if a given cut has too many segments, because sequences lie on one another in cu_seqlens.
    if (s.fastest != ~0ull && cuts.batch[best].cut > 0) {
      s.cut = cuts.cut[best], s.deal = cuts.deal[best];
      s.cuts = cuts.batch[best].cut, s.middles = cuts.batch[best].middles;
    } else {
      s.longest = 0;
    }
  }
  __syncthreads();
  if (fresh_thread() >= 32 || s.longest == 0) return;
  int slots = 0, cut_before = 0;  // sums over the sequences before
#pragma unroll 1
  for (int first = 0; first < N; first += 32) {
    const int n = first + fresh_thread(), chunks = n < N ? s.chunks[n] : 0;
    const int is = is_cut(s.cut, chunks), own = is + middles_of(s.cut, chunks);
    int sum = own << 9 | is;  // both in one: at most 256 are cut
#pragma unroll 1
    for (int x = 1; x < 32; x *= 2) {
      const int y = __shfl_up_sync(~0u, sum, x);
      if (static_cast<int>(fresh_thread()) >= x) sum += y;
    }
    if (n < N) s.slots_before[n] = slots + (sum >> 9) - own, s.cut_before[n] = cut_before + (sum & 511) - is;
    sum = __shfl_sync(~0u, sum, 31);
    slots += sum >> 9, cut_before += sum & 511;
  }
}

/// The tasks of this CTA, a thread for each: first segments; local states and transitions; then middles and last parts.
__device__ __forceinline__ void list_tasks(const Arguments& a, Shared& s) {
  const kda_fwd_params& p = a.p;
  const int grid = gridDim.x, cta = blockIdx.x, HV = static_cast<int>(p.HV), i = fresh_thread();
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
    for (int n = fresh_thread(); n <= N; n += blockDim.x) s.start[n] = static_cast<int>(offset_of(p, n));
  }
  if (fresh_thread() == 0) s.balanced = s.sorted = 0;
}

/// Where there are more last parts than CTAs that have none yet, and they differ in length: who takes what. `more`:
/// whether that can be, of whatever lengths.
template <Features WITH>
__device__ __forceinline__ void order_tasks(const Arguments& a, Shared& s, bool more) {
  const bool sorted = WITH != PAIRS && a.sorted && more;
  if (fresh_thread() == 0) s.sorted = sorted;
  if (sorted) sort_and_balance<WITH>(a.p, s);
  __syncthreads();
}

/// Of whole sequences: what every CTA finds out before its roles begin.
template <Features WITH>
__device__ __forceinline__ void deal_whole(const Arguments& a, Shared& s) {
  order_tasks<WITH>(a, s, a.tasks > static_cast<int>(gridDim.x));
}

/// The same where some are cut. WHOLE: see fwd_kernel.
template <Features WHOLE>
__device__ __forceinline__ void deal_segments(const Arguments& a, Shared& s) {
  const int middles = s.middles * static_cast<int>(a.p.HV), grid = gridDim.x;
  if (WHOLE < SEGMENTS || a.p.cu_seqlens != nullptr) order_tasks<SEGMENTS>(a, s, a.tasks + middles % grid > grid);
  list_tasks(a, s);
}

}  // namespace kda::sm90
