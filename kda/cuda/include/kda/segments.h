// Where long sequences are cut so that their parts run side by side, and whether that pays: functions of lengths,
// heads and multiprocessors, of nothing else. The host asks where it knows the lengths, the kernel where they lie in
// cu_seqlens.
//
// A cut sequence has a first segment, middles of one length, and an end that is at most as long as a middle:
//
//   first | middle | ... | middle | end
//
// Side by side run, one after the other: the firsts, and for every middle its local state (from a state of zero) and
// its transition (from the identity, without values); then the chain S' = Phi S + S_local over the middles; then all
// that is left, each from its right state: middles, ends, and whole sequences. See hopper.md, section 6.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define KDA_BOTH __host__ __device__ __forceinline__
#else
#define KDA_BOTH inline
#endif

namespace kda {

/// Chunks; a multiple of 64 tokens, so even. `first` is 0 where nothing is cut.
struct Cut {
  int first, middle;
};

constexpr int MOST_CUT_SEQUENCES = 256;  // of a call, for any of them to be cut
constexpr int MOST_WHOLES = 64;          // and (sequence, head) pairs, for every multiprocessor
constexpr int MOST_SEGMENTS = 4;         // states between segments, and transitions, for every multiprocessor
constexpr int ROWS_OF_CHAIN = 16;        // of V: what one task of the chain carries over all middles
constexpr int CANDIDATES = 80;           // cuts that are looked at

// Of the workspace, for each segment and head: the state at its end in fp32, V first, and Phi transposed as two terms
// in bf16, one after the other; 128 rows each. Rows of Phi have a pitch, in elements, by which no bank of shared memory
// is met twice, so that all of them are copied at once.
constexpr int TRANSITION_PITCH = 128 + 8;

/// What the parts of a call take, in sixteenths of a chunk with o (124 ns on an H200); NOTES.md has the measurements.
constexpr int CHUNK_TIME = 16;
constexpr int PAIR_CHUNK_TIME = 12;   // with o, by two CTAs where there are enough for all, see pair.cuh
constexpr int STATE_CHUNK_TIME = 14;  // a chunk of a local state or a transition
constexpr int TASK_TIME = 8;          // a task's start and end
constexpr int FIRST_TIME = 32;        // and more than that of a first segment
constexpr int CHAIN_TIME = 9;         // the chain, a middle
constexpr int EXCHANGE_TIME = 125;    // to wait for all others, twice, and the chain's start
constexpr int GAIN_PERCENT = 5;       // what a cut must be predicted to gain
constexpr int WORTH_ASKING = 100;     // gained at most, for lengths on the device to be looked at: it takes a quarter

template <class T>
KDA_BOTH T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
KDA_BOTH T most(T a, T b) {
  return a > b ? a : b;
}
KDA_BOTH int divided_up(int a, int b) { return (a + b - 1) / b; }

/// Whether a sequence of some chunks is cut, its middles, and its last part: the end, or all of it.
KDA_BOTH bool is_cut(Cut cut, int chunks) { return cut.first > 0 && chunks > most(cut.first, cut.middle); }
KDA_BOTH int middles_of(Cut cut, int chunks) { return is_cut(cut, chunks) ? (chunks - cut.first - 1) / cut.middle : 0; }
KDA_BOTH int end_of(Cut cut, int chunks) {
  return is_cut(cut, chunks) ? chunks - cut.first - middles_of(cut, chunks) * cut.middle : chunks;
}

/// What a cut makes of a batch: sums and extremes over its sequences, for one head.
struct Batch {
  int sequences = 0, cut = 0, middles = 0, chunks = 0;  // chunks: of the last round, middles and last parts
  int longest_end = 0, shortest_end = INT32_MAX, most_middles = 0;

  /// `times` sequences of some chunks.
  KDA_BOTH void add(Cut c, int chunks_of_one, int times = 1) {
    const bool is = is_cut(c, chunks_of_one);
    const int m = middles_of(c, chunks_of_one), end = is ? chunks_of_one - c.first - m * c.middle : chunks_of_one;
    sequences += times, cut += is ? times : 0, middles += m * times;
    chunks += (end + m * c.middle) * times;
    longest_end = most(longest_end, end), shortest_end = least(shortest_end, end), most_middles = most(most_middles, m);
  }

  /// States between segments that are kept, for one head.
  KDA_BOTH int slots() const { return middles + cut; }
};

/// How the first round is dealt: after whole turns of first segments `late` of them are left, for as many CTAs; then
/// local states and transitions in turns, `with` to those CTAs and `without` to the others.
struct Deal {
  int late, with, without;
  int64_t time;
};

KDA_BOTH Deal deal_of(const Batch& b, Cut cut, int HV, int CTAs) {
  const int first = cut.first * CHUNK_TIME + TASK_TIME + FIRST_TIME, state = cut.middle * STATE_CHUNK_TIME + TASK_TIME;
  const int firsts = b.cut * HV, states = 2 * b.middles * HV, late = firsts % CTAs, early = CTAs - late;
  const int64_t base = int64_t{firsts / CTAs} * first;
  if (states == 0) return {late, 0, 0, base + (late ? first : 0)};
  // It ends with a state of a CTA that has no late first, or of one that has: the earlier such time by which all fit.
  // A late first takes as long as `whole` states and a part, `started` in all.
  const int whole = late ? first / state : 0, started = late ? divided_up(first, state) : 0;
  int without = divided_up(states, early);
  if (without > started) without = divided_up(states + late * started, CTAs);
  const int with = most(0, divided_up(most(0, states - early * whole), CTAs));
  const int64_t one = base + most(int64_t{late ? first : 0}, int64_t{without} * state);
  const int64_t other = base + first + int64_t{with} * state;
  if (!late || one <= other) return {late, most(0, without - started), without, one};
  return {late, with, with + whole, other};
}

/// What a chunk takes where `tasks` sequences and heads are whole.
KDA_BOTH int whole_chunk_time(int tasks, int CTAs) { return 2 * tasks <= CTAs ? PAIR_CHUNK_TIME : CHUNK_TIME; }

/// Predicted time of a call whose first round is dealt as `deal_of` says.
KDA_BOTH int64_t duration(const Batch& b, Cut cut, const Deal& deal, int HV, int CTAs) {
  // The last round: middles in turns, then last parts to who has the least.
  const int middles = b.middles * HV, ends = b.sequences * HV, turns = middles / CTAs, rest = middles % CTAs;
  const int low = turns * cut.middle, high = low + (rest ? cut.middle : 0);
  int chunks = most(high, ends ? low + b.longest_end : 0);
  if (ends > CTAs - rest) chunks = most(chunks, least(high, low + b.shortest_end) + b.shortest_end);
  // All chunks and heads over the CTAs, without a 64-bit division, which is a call.
  chunks = most(chunks, b.chunks / CTAs * HV + divided_up(b.chunks % CTAs * HV, CTAs));
  int64_t time = int64_t{chunks} * (b.cut > 0 ? CHUNK_TIME : whole_chunk_time(ends, CTAs));
  time += divided_up(middles + ends, CTAs) * TASK_TIME;
  if (b.cut > 0) {
    const int steps = most(b.most_middles, divided_up(middles * (128 / ROWS_OF_CHAIN), CTAs));
    time += deal.time + steps * CHAIN_TIME + EXCHANGE_TIME;
  }
  return time;
}

/// What a cut must be predicted to take less than, where whole sequences take `time`.
KDA_BOTH int64_t to_beat(int64_t time) { return time * (100 - GAIN_PERCENT) / 100; }

/// Time of all CTAs for a chunk each of `tasks` sequences and heads that are whole.
KDA_BOTH int whole_turn(int tasks, int CTAs) { return divided_up(tasks, CTAs) * whole_chunk_time(tasks, CTAs) * CTAs; }

/// Whether a cut can gain anything at all, for less than it takes to look at them: `chunks` in all, of one head; `turn`
/// is `whole_turn` of all. Where there are middles, parts of a sequence take at least one and a half times as long as
/// all of it.
KDA_BOTH bool may_gain(int longest, int chunks, int HV, int CTAs, int turn) {
  return int64_t{chunks} * HV * (CHUNK_TIME * 3 / 2) + EXCHANGE_TIME * CTAs < int64_t{longest} * turn;
}

/// Cut `i` of those that are looked at, by the longest sequence: 0 leaves all whole; the others cut it into 3 to 65
/// segments, with a first that takes about as long as one or two states of a middle, or, where these are short, less.
KDA_BOTH Cut candidate(int i, int longest) {
  if (i == 0 || longest < 4) return {0, 0};
  const int step = (i - 1) / 4, kind = (i - 1) % 4;
  const int segments = step < 15 ? 3 + step : 1 + 4 * (0x100c080605 >> 8 * (step - 15) & 255);  // 21, 25, 33, 49, 65
  // The first is 12, 21, 38 or 40 parts of 24 of a middle.
  const int length = kind < 2 ? 12 + 9 * kind : 34 + 2 * kind, parts = 24 * (segments - 1) + length;
  const int pairs = most(1, static_cast<int>((int64_t{12} * longest + parts - 1) / parts));  // 64 tokens
  return {2 * most(1, static_cast<int>((int64_t{pairs} * length + 12) / 24)), 2 * pairs};
}

/// Predicted time of `N` sequences of one length.
KDA_BOTH int64_t time_of_equals(Cut cut, int N, int chunks, int HV, int CTAs) {
  Batch b;
  b.add(cut, chunks, N);
  return duration(b, cut, deal_of(b, cut, HV, CTAs), HV, CTAs);
}

/// The best cut for `N` sequences of one length; `slots`: what a call may keep of states between segments, for a head.
KDA_BOTH Cut cut_of_equals(int N, int chunks, int HV, int CTAs, int slots) {
  Cut best{0, 0};
  if (N > MOST_CUT_SEQUENCES) return best;
  int64_t time = to_beat(time_of_equals(best, N, chunks, HV, CTAs));
  for (int i = 1; i < CANDIDATES; ++i) {
    const Cut cut = candidate(i, chunks);
    Batch b;
    b.add(cut, chunks, N);
    if (b.cut == 0 || b.slots() > slots) continue;
    if (const int64_t one = duration(b, cut, deal_of(b, cut, HV, CTAs), HV, CTAs); one < time) time = one, best = cut;
  }
  return best;
}

}  // namespace kda
