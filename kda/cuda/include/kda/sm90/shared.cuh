// What lies in shared memory, and who hands it to whom.
//
//   copy ---raw---> rows ---ready---> prepare ---full---> recur ---o_full---> store
//     ^                                                    |  ^                 |
//     +---------------------------empty--------------------+  +-----o_empty-----+
//
// A stage holds one chunk of 32 tokens of one head. Tiles are two halves of 64 channels; a half is 32 rows of 128 bytes
// in the 128-byte swizzle of tensor maps and wgmma: the 16-byte vector c of row t lies at position c ^ (t % 8).
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "cute/arch/mma_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"
#include "kda/numerics.h"

namespace kda::sm90 {

constexpr int TOKENS = SM90_TOKENS;      // of a chunk
constexpr int CHANNELS = SM90_CHANNELS;  // K and V
constexpr int CARRIED = SM90_CARRIED;    // the state is held times 2^-CARRIED, see prepare.cuh
constexpr int HALF = 64;                 // channels in one half of a tile
constexpr int HALF_BYTES = TOKENS * HALF * 2;
constexpr int STAGES = 4;
constexpr int GROUPS = 2;         // of producers, and of consumers
constexpr int LOWER_PITCH = 36;   // floats: the 32 elements of a fragment's register meet no bank twice
constexpr int SOLVED_PITCH = 20;  // floats: columns of 16-row blocks of the inverse, stored by one lane each
constexpr int MOST_SORTED = 256;  // sequences that are ordered by length: every CTA compares each with all

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;
using Half = char[HALF_BYTES];

struct alignas(1024) Stage {
  struct {
    Half k;   // raw, then Kd
    Half q;   // raw, then Qd: with Kd above it one operand of 64 rows
    Half g;   // raw gate, then Ki, then Ak
    Half kr;  // Kr
    Half v;   // V
  } half[2];
  alignas(1024) char aq[TOKENS * TOKENS * 2];  // Aq: rows of 64 bytes, 64-byte swizzle
  float decay[CHANNELS];                       // of the whole chunk
  float beta[TOKENS];
  float2 norm[TOKENS];                         // what k and q are multiplied by
};

constexpr int HALF_STRIDE = sizeof(Stage{}.half[0]);  // bytes from one half of a tile to the other

struct Shared {
  Stage stage[STAGES];
  struct {
    Half half[2];
  } o[2];
  alignas(16) float lower[GROUPS][TOKENS * LOWER_PITCH];        // L transposed
  alignas(16) float solved[GROUPS][TOKENS * SOLVED_PITCH];      // diagonal 16 x 16 blocks of (I + L)^-1, transposed
  alignas(1024) char inverse[GROUPS][TOKENS * TOKENS * 2];      // Ab transposed: row j is column j of Ab; as aq
  float4 gate[GROUPS][128];                                     // each producer thread's own constants
  alignas(16) float sum[GROUPS][2][CHANNELS];                   // of log2 decays, tokens 0..15 and 16..31
  int order[MOST_SORTED];                                       // sequences, the longest first
  TransactionBarrier raw[STAGES];
  Barrier ready[STAGES], full[STAGES], empty[STAGES], o_full[2], o_empty[2];
};
static_assert(sizeof(Shared) <= 232448, "does not fit into the shared memory of a multiprocessor");

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
