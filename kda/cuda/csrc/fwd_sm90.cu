// The fused forward kernel for Hopper and its launch.
//
// One persistent CTA per multiprocessor takes (sequence, value head) tasks. 640 threads: two consumer warpgroups hold
// the state, two producer warpgroups prepare chunks in turn, and the warps of a fifth bring tiles in, look at rows, and
// invert triangles.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "cutlass/arch/reg_reconfig.h"
#include "kda/extents.h"
#include "kda/segments.h"
#include "kda/sm90/chain.cuh"
#include "kda/sm90/copy.cuh"
#include "kda/sm90/deal.cuh"
#include "kda/sm90/inverse.cuh"
#include "kda/sm90/prepare.cuh"
#include "kda/sm90/recur.cuh"

namespace kda::sm90 {
namespace {

template <Features WITH>
__device__ __forceinline__ void init_barriers(Shared& s) {
  if (threadIdx.x != 0) return;
  const int consumers = WITH == PAIRS ? 4 : 8;
  for (int i = 0; i < STAGES; ++i) {
    const bool own = is_own<WITH>(i);
    s.raw_gate[i].init(1), s.raw[i].init(1), s.ready[i].init(own ? 2 : 1);
    s.full[i].init(own ? 5 : 1), s.read[i].init(consumers), s.empty[i].init(consumers);
    s.peer_empty[i].init(consumers);
  }
  for (int i = 0; i < GROUPS; ++i) s.lower_full[i].init(4), s.inverse_full[i].init(1);
  for (int i = 0; i < 2; ++i) s.transition[i].init(1);
  cutlass::arch::fence_barrier_init();
}

/// For the counts of another program; where no barrier is in use, as all threads know.
__device__ __forceinline__ void invalidate_barriers(Shared& s) {
  if (threadIdx.x != 0) return;
  auto invalidate = [](auto& barriers) {
    for (auto& x : barriers) Barrier::invalidate(reinterpret_cast<const Barrier::ValueType*>(&x));
  };
  invalidate(s.raw_gate), invalidate(s.raw), invalidate(s.ready), invalidate(s.full), invalidate(s.read);
  invalidate(s.empty), invalidate(s.peer_empty), invalidate(s.lower_full), invalidate(s.inverse_full);
  invalidate(s.transition);
}

/// FP16: for normalised keys and queries and weights of a sigmoid, see prepare.cuh.
template <bool FP16, Features WITH>
__device__ __forceinline__ void play_roles(const Arguments& args, Shared& s) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  auto wait = [&] { exchange<false>(args, s); };
  if (group < 2) {
    cutlass::arch::warpgroup_reg_alloc<160>();
    recur<WITH>(args, s, group, [&] { exchange<true>(args, s); });
  } else if (group < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    prepare<FP16, WITH>(args, s, group - 2, wait);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<48>();
    if (warp == 16) {
      copy_in<WITH>(args, s, wait);
      clear_padding<WITH>(args.p, s);
    } else if (warp < 19) {
      look_at_rows<WITH>(args, s, warp == 18, wait);
    } else {
      invert_chunks<FP16, WITH>(args, s, wait);
    }
  }
  sync_pair<WITH>();  // the other may still have something to tell this one
}

/// With SEGMENTS, WHOLE is what sequences need that turn out not to be cut: there are two programs in one kernel,
/// because only here is known which it is. (What cuts takes 4 % longer for a chunk.) Code that has not run lately comes
/// from memory, and later the further it lies from the kernel's beginning, so what is not cut, which has less to gain,
/// comes first. Where sequences of one length are cut, and the host expects no others, WHOLE is SEGMENTS, and there is
/// the one program, which can do with any.
template <bool FP16, Features WITH, Features WHOLE = WITH>
__global__ void __launch_bounds__(THREADS, 1) fwd_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared);
  load_starts(args.p, s);
  if constexpr (WITH >= SEGMENTS) look_at_lengths(args, s);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(s.inverse) / 16); i += THREADS) {
    reinterpret_cast<uint4*>(s.inverse)[i] = make_uint4(0, 0, 0, 0);  // above the diagonal they stay zero
  }
  clear_upper(s, threadIdx.x, THREADS);
  publish();
  init_barriers<WHOLE>(s);
  __syncthreads();
  sync_pair<WHOLE>();
  auto run_whole = [&] {
    deal_whole<WHOLE>(args, s);
    play_roles<FP16, WHOLE>(args, s);
  };
  auto run_cut = [&] {
    deal_segments<WHOLE>(args, s);
    if constexpr (WHOLE == PAIRS) {
      invalidate_barriers(s);
      init_barriers<WITH>(s);
      __syncthreads();
    }
    play_roles<FP16, WITH>(args, s);
  };
  if constexpr (WITH < SEGMENTS) {
    run_whole();
  } else {
    if (s.longest > 0 && s.cut.first == 0) find_cut(args, s);
    if (WHOLE == SEGMENTS || s.longest > 0) [[unlikely]]
      return run_cut();
    if constexpr (WHOLE < SEGMENTS) run_whole();
  }
}

/// A tensor [size[0], size[1], size[2], 128] with strides in elements, in boxes of 128 bytes of a row, and of the
/// dimensions before it `box`.
struct Tiled {
  CUtensorMapDataType type;
  const void* data;
  int64_t size[3];
  const int64_t (&stride)[3];
  int box[2];  // of dimensions 1 and 2
};

cudaError_t tensor_map(CUtensorMap& map, const Tiled& x) {
  static std::atomic<void*> known{nullptr};
  void* function = known.load();
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult found;
    if (cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found)) {
      return error;
    }
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    known.store(function);
  }
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const int64_t element = x.type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 4;
  cuuint64_t size[4] = {CHANNELS}, bytes[3];
  for (int i = 0; i < 3; ++i) {
    size[1 + i] = x.size[2 - i];
    // A dimension of one element is never stepped over, whatever stride it is said to have.
    bytes[i] = x.size[2 - i] > 1 ? x.stride[2 - i] * element : 256;
  }
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element), static_cast<cuuint32_t>(x.box[1]),
                             static_cast<cuuint32_t>(x.box[0]), 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, x.type, 4, const_cast<void*>(x.data), size, bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Places of kernels: by Features; then of those that ask on the device whether to cut, by the features of WHOLE.
enum { ASKING = SEGMENTS + 1, KERNELS = ASKING + SEGMENTS };

template <bool FP16>
std::array<const void*, KERNELS> kernels() {
  auto kernel = [](auto function) { return reinterpret_cast<const void*>(function); };
  return {kernel(fwd_kernel<FP16, PLAIN>),           kernel(fwd_kernel<FP16, SLOTS>),
          kernel(fwd_kernel<FP16, PAIRS>),           kernel(fwd_kernel<FP16, SEGMENTS>),
          kernel(fwd_kernel<FP16, SEGMENTS, PLAIN>), kernel(fwd_kernel<FP16, SEGMENTS, SLOTS>),
          kernel(fwd_kernel<FP16, SEGMENTS, PAIRS>)};
}
/// By FP16.
const std::array<const void*, KERNELS> KERNEL[2] = {kernels<false>(), kernels<true>()};

/// Multiprocessors of the current device, after the kernels were allowed its shared memory there.
cudaError_t prepare_device(int& multiprocessors, int shared_bytes) {
  static std::atomic<int> known[64];
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const bool remembered = device < 64;
  multiprocessors = remembered ? known[device].load() : 0;
  if (multiprocessors > 0) return cudaSuccess;
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device))
    return error;
  for (const auto& kernels : KERNEL) {
    for (const void* kernel : kernels) {
      if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
        return error;
    }
  }
  if (remembered) known[device].store(multiprocessors);
  return cudaSuccess;
}

/// CTAs of a launch that may cut: whole pairs.
int even(int multiprocessors) { return multiprocessors / 2 * 2; }

cudaError_t launch(const kda_fwd_params* p, void* stream) {
  const int64_t tasks = p->N * p->HV;
  if (tasks == 0) return cudaSuccess;
  constexpr int shared_bytes = sizeof(Shared);
  int multiprocessors = 0;
  if (cudaError_t error = prepare_device(multiprocessors, shared_bytes)) return error;

  Arguments args;
  args.p = *p;
  if (p->state_pool != nullptr) {  // then its slots are both states
    args.p.initial_state = args.p.final_state = p->state_pool;
    std::copy_n(p->pool_stride, 3, args.p.initial_stride), std::copy_n(p->pool_stride, 3, args.p.final_stride);
  }
  args.p.checkpoint_every = std::min(p->checkpoint_every, (int64_t{1} << 31) - 64);  // more is never reached
  // Not more than Kr's one factor in fp16 leaves room for, see decay.cuh; bounds past -5 have a little less below then.
  args.anchor =
      std::min(static_cast<int>(std::lround(16.0 * std::fabs(p->lower_bound) * kda::LOG2E)), 127 - SM90_FP16_BITS);
  args.minus_exact = -std::ldexp(1.0f, CARRIED - args.anchor);
  args.late_scale = p->scale * -args.minus_exact;
  if (p->B * p->T > 0) {
    // Half tiles of one head.
    auto tokens = [&](CUtensorMap& map, const void* data, const int64_t (&stride)[3], int64_t heads) {
      return tensor_map(map, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, data, {p->B, p->T, heads}, stride, {TOKENS, 1}});
    };
    if (cudaError_t error = tokens(args.q, p->q, p->q_stride, p->H)) return error;
    if (cudaError_t error = tokens(args.k, p->k, p->k_stride, p->H)) return error;
    if (cudaError_t error = tokens(args.v, p->v, p->v_stride, p->HV)) return error;
    if (cudaError_t error = tokens(args.g, p->g, p->g_stride, p->HV)) return error;
    if (cudaError_t error = tokens(args.out, p->out, p->out_stride, p->HV)) return error;
  }
  auto states = [&](CUtensorMap& map, bool bf16, const void* data, int64_t slots, const int64_t (&stride)[3]) {
    const auto type = bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    return tensor_map(map, {type, data, {slots, p->HV, CHANNELS}, stride, {1, HALF}});
  };
  if (const int64_t slots = in_slots(*p) ? p->slots : p->N; args.p.initial_state != nullptr && slots > 0) {
    if (cudaError_t error =
            states(args.initial, p->state_dtype == KDA_BF16, args.p.initial_state, slots, args.p.initial_stride))
      return error;
  }
  const bool segments = p->workspace != nullptr, packed = p->cu_seqlens != nullptr;
  const bool likely_cut = segments && p->first_segment > 0, asking = segments && !likely_cut;
  const bool paired = 2 * tasks <= multiprocessors && !likely_cut;
  const int grid = segments                  ? even(multiprocessors)
                   : paired                  ? static_cast<int>(2 * tasks)
                   : tasks > multiprocessors ? multiprocessors
                                             : static_cast<int>(tasks);
  args.tasks = static_cast<int>(tasks);
  args.sorted = packed && p->N > 1 && p->N <= MOST_SORTED && (segments || tasks > grid);
  if (segments) {
    args.cut = {p->first_segment, p->segment};
    args.equal = packed ? p->equal_chunks : chunks_of(p->T);
    if (args.cut.first > 0) {
      Batch batch;
      batch.add(args.cut, args.equal, static_cast<int>(p->N));
      args.deal = deal_of(batch, args.cut, static_cast<int>(p->HV), grid);
    }
    args.middles = middles_of(args.cut, args.equal), args.turn = whole_turn(args.tasks, grid);
    args.states = static_cast<float*>(p->workspace);
    auto strides = [&](int64_t (&stride)[3], int64_t head, int row) {
      stride[0] = p->HV * head, stride[1] = head, stride[2] = row;
    };
    strides(args.segment_stride, CHANNELS * CHANNELS, CHANNELS);
    strides(args.transition_stride, 2 * CHANNELS * TRANSITION_PITCH, TRANSITION_PITCH);
    args.transitions = args.states + p->segment_slots * args.segment_stride[0];
    if (cudaError_t error = states(args.carried, false, args.states, p->segment_slots, args.segment_stride))
      return error;
  }
  void* arguments[] = {&args};
  const bool fp16 = p->use_qk_l2norm && p->use_beta_sigmoid;
  const bool slots = in_slots(*p) || p->checkpoints != nullptr;
  const Features whole = paired ? PAIRS : slots ? SLOTS : PLAIN;
  const int kernel = asking ? ASKING + whole : likely_cut ? SEGMENTS : whole;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;  // CTAs wait for one another: all of them are there, or none
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = 2, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  const cudaLaunchConfig_t config{dim3(grid),
                                  dim3(THREADS),
                                  shared_bytes,
                                  static_cast<cudaStream_t>(stream),
                                  segments ? attributes : attributes + 1,
                                  static_cast<unsigned>(segments) + paired};
  return cudaLaunchKernelExC(&config, KERNEL[fp16][kernel], arguments);
}

/// Fills in how sequences are cut, see abi.h.
void plan(kda_fwd_params& p, int multiprocessors) {
  Cut cut{p.first_segment, p.segment};
  multiprocessors = even(multiprocessors);
  p.first_segment = p.segment = p.equal_chunks = 0, p.segment_slots = 0;
  if (multiprocessors == 0 || p.batch_invariant || p.T == 0 || p.HV == 0 || p.N == 0 || p.N > MOST_CUT_SEQUENCES)
    return;
  if (p.N * p.HV > MOST_WHOLES * multiprocessors) return;
  const int N = static_cast<int>(p.N), HV = static_cast<int>(p.HV);
  const int chunks = chunks_of(p.T), most_slots = MOST_SEGMENTS * multiprocessors / HV;
  if (p.cu_seqlens == nullptr) {
    if (cut.first == 0) cut = cut_of_equals(N, chunks, HV, multiprocessors, most_slots);
    Batch b;
    b.add(cut, chunks, N);
    if (b.cut == 0 || b.slots() > most_slots) return;
    p.first_segment = cut.first, p.segment = cut.middle, p.segment_slots = b.slots();
  } else if (cut.first > 0) {
    p.first_segment = cut.first, p.segment = cut.middle;
    p.segment_slots = least(most_slots, 2 * divided_up(chunks, cut.middle));
  } else {
    // One sequence of all tokens would gain most; what there is the kernel finds, and to do so takes time too.
    // Sequences of one length are what there is most often, so their cut goes along.
    const int slots = least(most_slots, chunks / 2), equal = divided_up(chunks, N);
    auto gain = [&](Cut cut) {
      return time_of_equals({0, 0}, 1, chunks, HV, multiprocessors) -
             time_of_equals(cut, 1, chunks, HV, multiprocessors);
    };
    cut = cut_of_equals(N, equal, HV, multiprocessors, slots);
    const Cut best = N == 1 ? cut : cut_of_equals(1, chunks, HV, multiprocessors, slots);
    if (cut.first == 0 && (best.first == 0 || gain(best) < WORTH_ASKING)) return;
    p.first_segment = cut.first, p.segment = cut.middle, p.equal_chunks = equal, p.segment_slots = slots;
  }
}

}  // namespace
}  // namespace kda::sm90

extern "C" int kda_fwd_sm90(const kda_fwd_params* p, void* stream, int careful) {
  if (careful && kda::refused(*p)) return KDA_REFUSED;
  const cudaError_t error = kda::sm90::launch(p, stream);
  if (error != cudaSuccess) cudaGetLastError();  // ours is returned; the next launch must not find it again
  return error;
}

extern "C" int64_t kda_fwd_plan(kda_fwd_params* p, int multiprocessors) {
  kda::sm90::plan(*p, multiprocessors);
  constexpr int64_t STATE = kda::sm90::CHANNELS * kda::sm90::CHANNELS * int64_t{sizeof(float)};
  return p->segment_slots * p->HV * (STATE + 2 * kda::sm90::TRANSITION_BYTES);
}
