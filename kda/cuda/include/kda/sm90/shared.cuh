// What lies in shared memory, and who hands it to whom.
//
//                                       invert -------full-----+
//                            lower_full ^    | inverse_full      |
//                                       |    v                   v
//   copy ---raw---> rows ---ready---> prepare ---full---------> recur ---> out
//     | ^                               ^ | ^                    | |
//     +-|----------raw_gate-------------+ | +-------empty--------+ |
//       +------full: room for a gate------+                        |
//       +------read: room for k, q and v---------------------------+
//
// (Of a place that holds a state the inverting warp waits for raw_gate too, and arrives.)
//
// A stage holds one chunk of 32 tokens of one head, or half of the initial state of a task, which comes before its
// chunks. Tiles are two halves of 64 channels; a half is 32 rows of 128 bytes in the 128-byte swizzle of tensor maps
// and wgmma: the 16-byte vector c of row t lies at position c ^ (t % 8).
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "cute/arch/mma_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"
#include "kda/numerics.h"
#include "kda/segments.h"

namespace kda::sm90 {

constexpr int TOKENS = SM90_TOKENS;      // of a chunk
constexpr int CHANNELS = SM90_CHANNELS;  // K and V
constexpr int CARRIED = SM90_CARRIED;    // the state is held times 2^-CARRIED, see prepare.cuh
constexpr int HALF = 64;                 // channels in one half of a tile
constexpr int HALF_BYTES = TOKENS * HALF * 2;
constexpr int THREADS = 640;  // of a CTA
constexpr int STAGES = 4;
constexpr int GROUPS = 2;          // of producers, and of consumers
constexpr int LOWER_PITCH = 36;    // floats: the 32 elements of a fragment's register meet no bank twice
constexpr int SOLVED_PITCH = 12;   // floats: columns of 8-row blocks of the inverse, stored by one lane each
constexpr int MOST_SORTED = 256;   // sequences that are ordered by length: every CTA compares each with all
constexpr int HAND = 64;           // heads that are dealt at once, see deal.cuh
constexpr int MOST_HANDS = 64;     // each takes the CTA a search and a barrier
constexpr int MOST_LISTED = 96;    // tasks of a CTA, where sequences may be cut
constexpr int MOST_STARTS = 1024;  // offsets of sequences that are kept

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
using Half = char[HALF_BYTES];

struct alignas(1024) Stage {
  struct {
    Half k;     // raw, then Kd
    Half q;     // raw, then Qd: with Kd above it one operand of 64 rows
    Half x[2];  // see gate() and late()
    Half v;     // V
  } half[2];
  alignas(1024) char aq[TOKENS * TOKENS * 2];  // M, then Aq: rows of 64 bytes, 64-byte swizzle
  alignas(16) float decay[CHANNELS];           // of the whole chunk
  float beta[TOKENS];
  float2 norm[TOKENS];  // what k and q are multiplied by

  /// Two tiles that change places from one use of the stage to the next: in `gate` the raw gate, then half of the sums
  /// of log2 decays, then Ki, then Ak; in `late` the other half of the sums, then Kr. Kr is done with when Ak and Aq
  /// are there, so the next chunk's gate can come while this chunk's Ak is in use.
  __device__ char* gate(uint32_t use, int i) { return half[i].x[use]; }
  __device__ char* late(uint32_t use, int i) { return half[i].x[use ^ 1]; }
};

/// What a stage holds in place of a chunk when a task begins: 64 rows of its state, as tiles of 128 bytes of a row in
/// the same swizzle.
constexpr int STATE_TILE_BYTES = HALF * 128;
static_assert(CHANNELS * sizeof(float) / 128 * STATE_TILE_BYTES <= sizeof(Stage{}.half));

constexpr int HALF_STRIDE = sizeof(Stage{}.half[0]);  // bytes from one half of a tile to the other

/// Chunks that some tokens of a sequence take.
template <class Tokens>
KDA_BOTH int chunks_of(Tokens tokens) {
  return static_cast<int>((tokens + TOKENS - 1) / TOKENS);
}

/// What a task makes of its tokens.
enum Kind : uint8_t {
  OUTPUT,      // o, and the state after them
  LOCAL,       // the state after them from one of zero
  TRANSITION,  // Phi: the same from the identity, without values
};

/// One sequence of one value head, or a segment of it.
struct Task {
  int row, start, length;  // batch row, first token, tokens; none of padding
  int sequence, head, value_head;
  int initial;  // slot of the initial state, -1 for zero
  // Of segments, see segments.h:
  int before;   // chunks of the sequence before it
  int segment;  // slot of their states for the one at its end; -1 where that is the sequence's end
  Kind kind;
  bool carried;  // `initial` is a slot of theirs

  __device__ int chunks() const { return chunks_of(length); }
};

struct Shared {
  Stage stage[STAGES];
  struct {
    Half half[2];
  } o[2];
  // L transposed: its 16 x 16 blocks on the diagonal; and minus the block below them of Kd Ki^T, see `term_of_t`
  alignas(16) float lower[GROUPS][TOKENS * LOWER_PITCH];
  alignas(16) float solved[TOKENS * SOLVED_PITCH];  // diagonal 8 x 8 blocks of (I + L)^-1, transposed
  // Ab transposed: row j is column j of Ab. Rows as of aq.
  alignas(1024) char inverse[GROUPS][TOKENS * TOKENS * 2];
  float4 offset[GROUPS][128];  // each producer thread's own constants of the gate
  float slope[GROUPS][128];
  float4 sum[GROUPS][4][32];  // of log2 decays: 8 rows a warp, 4 channels a lane
  int order[MOST_SORTED];     // sequences, the longest first
  int rank[MOST_HANDS];       // see deal.cuh
  int balanced, sorted;
  int start[MOST_STARTS];               // first tokens of sequences, and the end of the last one
  TransactionBarrier raw_gate[STAGES];  // g, or the turn of a state
  TransactionBarrier raw[STAGES];       // q, k and v, or half of a state
  Barrier ready[STAGES];                // norms, beta, and tails
  TransactionBarrier full[STAGES];      // Kd, Qd, Ak and decay of a group, Aq of the inverse; Kr is done with
  Barrier read[STAGES];                 // k, q and v are done with
  Barrier empty[STAGES];                // all of the stage is
  Barrier peer_empty[STAGES];           // and where it was sent to, see pair.cuh
  Barrier lower_full[GROUPS], inverse_full[GROUPS];
  TransactionBarrier transition[2];  // see chain.cuh
  // How sequences are cut, see deal.cuh.
  Cut cut;
  Deal deal;
  int cuts, middles;  // sequences that are cut, and all middles, of one head
  unsigned long long fastest;
  int longest;
  Task list[MOST_LISTED];  // of this CTA
  int listed_before, listed;
  int position[4 * GROUPS];  // of each warp of the consumers among them
  int chunks[MOST_CUT_SEQUENCES], slots_before[MOST_CUT_SEQUENCES], cut_before[MOST_CUT_SEQUENCES];
};
static_assert(sizeof(Shared) <= 232448, "does not fit into the shared memory of a multiprocessor");

/// Zero in Aq of all stages: above the diagonal it stays so.
__device__ __forceinline__ void clear_upper(Shared& s, int thread, int threads) {
  constexpr int VECTORS = sizeof(Stage{}.aq) / 16;
  for (int i = thread; i < STAGES * VECTORS; i += threads) {
    reinterpret_cast<uint4*>(s.stage[i / VECTORS].aq)[i % VECTORS] = make_uint4(0, 0, 0, 0);
  }
}

/// Where the decay of an even channel lies, and the next one's after it: in the order in which a consumer's lane needs
/// them, 8 j + 2 t, 8 j + 2 t + 1 for t = lane % 4, four at a time.
__device__ __forceinline__ int decay_at(int channel) {
  return channel / 16 * 16 + channel % 8 * 2 + channel / 8 % 2 * 2;
}

/// What fp16 operands are multiplied by.
template <bool FP16>
constexpr float SCALE = FP16 ? 1 << SM90_FP16_BITS : 1;

/// Byte of the 16-byte vector `vector` (8 channels) of row `row` in a half tile.
__device__ __forceinline__ int swizzled(int row, int vector) { return row * 128 + ((vector ^ (row & 7)) * 16); }

/// The same in a tile of 64-byte rows with the 64-byte swizzle.
__device__ __forceinline__ int swizzled64(int row, int vector) { return row * 64 + ((vector ^ ((row >> 1) & 3)) * 16); }

/// wgmma descriptor. Bytes between 8-row groups: `group`. `leading`: bytes between halves of a transposed operand.
__device__ __forceinline__ uint64_t descriptor(const void* tile, cute::SM90::GMMA::LayoutType layout, int group,
                                               int leading = 16) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(tile) >> 4;
  d.bitfield.leading_byte_offset_ = leading >> 4;
  d.bitfield.stride_byte_offset_ = group >> 4;
  d.bitfield.base_offset_ = 0;
  d.bitfield.layout_type_ = static_cast<uint8_t>(layout);
  return d;
}

/// A descriptor advanced by `bytes`.
__device__ __forceinline__ uint64_t operand_at(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

/// Position in the ring of stages: which stage a chunk uses, and how often it was used before.
struct Ring {
  uint32_t chunk = 0;
  __device__ int stage() const { return chunk % STAGES; }
  __device__ uint32_t use() const { return (chunk / STAGES) & 1; }
};

}  // namespace kda::sm90
