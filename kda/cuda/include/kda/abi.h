// The C ABI of the library: what a caller fills in, and the functions it exports. Plain C, no torch, no CUDA header.
// `kda/cuda/params.py` mirrors the structures field by field; KDA_ABI changes with every change here.
#pragma once
#include <stdint.h>

#define KDA_ABI 5

#ifdef __cplusplus
extern "C" {
#endif

/// Returned where nothing was launched because a buffer may lie on another tensor (other than `final_state` exactly on
/// `initial_state`, and `checkpoints` exactly on `state_pool`), or the address of a tensor with rows is no multiple
/// of 16.
#define KDA_REFUSED (-1)

/// Dtypes of a tensor that may come in more than one.
enum kda_dtype {
  KDA_NONE = 0,
  KDA_BF16 = 1,
  KDA_FP16 = 2,
  KDA_FP32 = 3,
  KDA_FP64 = 4,
  KDA_INT8 = 5,
  KDA_INT16 = 6,
  KDA_INT32 = 7,
  KDA_INT64 = 8,
  KDA_UINT8 = 9
};

/// One forward call of the SM90 kernel. K = V = 128; strides in elements; the last dimension has stride 1.
struct kda_fwd_params {
  const void* q;                   // [B, T, H, 128] bf16
  const void* k;                   // [B, T, H, 128] bf16
  const void* v;                   // [B, T, HV, 128] bf16
  const void* g;                   // [B, T, HV, 128] bf16
  const void* beta;                // [B, T, HV] bf16 or fp32
  void* out;                       // [B, T, HV, 128] bf16
  const void* A_log;               // [HV] any float, or null
  const void* dt_bias;             // [HV, 128] any float, or null
  const void* initial_state;       // [N, HV, 128, 128] (V, K), or null
  void* final_state;               // [N, HV, 128, 128] (V, K), or null
  const void* cu_seqlens;          // [N + 1] int32 or int64, or null: then N = B and every row is a sequence
  void* state_pool;                // [slots, HV, 128, 128] (V, K) instead of the two states, or null
  const void* state_indices;       // [N] integers: the slot to read, negative for padding; or null: 0 .. N - 1
  const void* write_indices;       // [N] integers: the slot to write, negative for none; or null: the one that was read
  const void* fresh;               // [N] bool: begin from zero; or null
  void* checkpoints;               // [checkpoint_slots, HV, 128, 128] (V, K), or null
  const void* checkpoint_indices;  // [N, checkpoint_columns] integers: a slot for every checkpoint, negative for none
  void* workspace;                 // as many bytes as kda_fwd_plan says, at a multiple of 16; or null: nothing is cut
  int64_t q_stride[3];             // batch, token, head
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t g_stride[3];
  int64_t beta_stride[3];
  int64_t out_stride[3];
  int64_t initial_stride[3];  // sequence, head, v
  int64_t final_stride[3];
  int64_t pool_stride[3];        // slot, head, v
  int64_t checkpoint_stride[3];  // slot, head, v
  int64_t A_log_stride;
  int64_t dt_bias_stride[2];  // head, channel
  int64_t cu_stride;
  int64_t state_indices_stride;
  int64_t write_indices_stride;
  int64_t fresh_stride;
  int64_t checkpoint_indices_stride[2];
  int64_t B, T, H, HV, N;
  int64_t slots;
  int64_t checkpoint_slots;
  int64_t checkpoint_columns;
  int64_t checkpoint_every;  // tokens, a multiple of the kernel's chunk
  int64_t segment_slots;     // of segments' states in the workspace, for every head
  int32_t first_segment;     // chunks of the first segment and of the next ones; 0: nothing is cut
  int32_t segment;
  int32_t equal_chunks;  // packed: of every sequence that is cut so; other lengths are looked at on the device. 0: all
  float scale;
  float lower_bound;
  int32_t beta_dtype;  // enum kda_dtype
  int32_t A_log_dtype;
  int32_t dt_bias_dtype;
  int32_t state_dtype;  // of both states and the pool
  int32_t checkpoint_dtype;
  int32_t state_indices_dtype;
  int32_t write_indices_dtype;
  int32_t checkpoint_indices_dtype;
  int32_t cu_64;  // cu_seqlens holds int64
  int32_t use_qk_l2norm;
  int32_t use_beta_sigmoid;
  int32_t allow_neg_eigval;
  int32_t batch_invariant;
};

/// The gates, told apart by the caller's arguments.
enum kda_gate { KDA_BOUNDED = 0, KDA_SOFTPLUS = 1, KDA_GIVEN = 2 };

/// One decode step of the SM90 kernel: T tokens for each of N rows, at most 65535, whose states lie in a pool. As above
/// otherwise.
struct kda_step_params {
  const void* q;              // [N, T, H, 128] bf16
  const void* k;              // [N, T, H, 128] bf16
  const void* v;              // [N, T, HV, 128] bf16
  const void* g;              // [N, T, HV, 128] bf16 or fp32
  const void* beta;           // [N, T, HV] bf16 or fp32
  void* state;                // [slots, HV, 128, 128] (V, K)
  void* out;                  // [N, T, HV, 128] bf16
  const void* A_log;          // [HV] any float, or null
  const void* dt_bias;        // [HV, 128] any float, or null
  const void* state_indices;  // [N] integers: the slot to read, negative for padding; or null: 0 .. N - 1
  const void* write_indices;  // [N] integers: the slot to write, negative for none; or null: the one that was read
  const void* token_indices;  // [N, T] integers: slots for the state after each token, negative for none; or null
  const void* fresh;          // [N] bool: begin from zero; or null
  int64_t q_stride[3];        // row, token, head
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t g_stride[3];
  int64_t beta_stride[3];
  int64_t out_stride[3];
  int64_t state_stride[3];  // slot, head, v
  int64_t A_log_stride;
  int64_t dt_bias_stride[2];  // head, channel
  int64_t state_indices_stride;
  int64_t write_indices_stride;
  int64_t token_indices_stride[2];
  int64_t fresh_stride;
  int64_t N, T, H, HV, slots;
  float scale;
  float lower_bound;
  int32_t g_dtype;  // enum kda_dtype
  int32_t beta_dtype;
  int32_t A_log_dtype;
  int32_t dt_bias_dtype;
  int32_t state_dtype;
  int32_t state_indices_dtype;
  int32_t write_indices_dtype;
  int32_t token_indices_dtype;
  int32_t gate;   // enum kda_gate
  int32_t group;  // HV / H
  int32_t use_qk_l2norm;
  int32_t use_beta_sigmoid;
  int32_t allow_neg_eigval;
};

/// KDA_ABI of the binary.
int kda_abi(void);

/// Compute capability the kernels were compiled for, such as 90.
int kda_arch(void);

/// Fills in how sequences are to be cut into segments on a device with some multiprocessors, and returns the bytes of
/// workspace that this takes, 0 if none are cut. Depends on sizes, `batch_invariant` and whether there are cu_seqlens.
int64_t kda_fwd_plan(struct kda_fwd_params* params, int multiprocessors);

/// Launch on `stream` (a cudaStream_t) of the current device. Returns 0 or an error of CUDA; or KDA_REFUSED, but only
/// if `careful` asks for a look at the addresses: by first and last bytes alone, so views side by side in one tensor
/// are refused.
int kda_fwd_sm90(const struct kda_fwd_params* params, void* stream, int careful);

/// The same for a step.
int kda_step_sm90(const struct kda_step_params* params, void* stream, int careful);

/// Text of what the functions above returned; never null.
const char* kda_error_text(int error);

#ifdef __cplusplus
}
#endif
