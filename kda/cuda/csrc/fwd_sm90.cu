// The fused forward kernel for Hopper and its launch.
//
// One persistent CTA per multiprocessor takes (sequence, value head) tasks. 640 threads: two consumer warpgroups hold
// the state, two producer warpgroups prepare chunks in turn, and the warps of a fifth bring tiles in, look at rows, and
// invert triangles.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cutlass/arch/reg_reconfig.h"
#include "kda/extents.h"
#include "kda/sm90/copy.cuh"
#include "kda/sm90/deal.cuh"
#include "kda/sm90/inverse.cuh"
#include "kda/sm90/prepare.cuh"
#include "kda/sm90/recur.cuh"

namespace kda::sm90 {
namespace {

constexpr int THREADS = 640;

/// FP16: for normalised keys and queries and weights of a sigmoid, see prepare.cuh. SLOTS: with a pool or checkpoints.
template <bool FP16, bool SLOTS>
__global__ void __launch_bounds__(THREADS, 1) fwd_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  // Above the diagonal the inverses and Aq stay zero.
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(s.inverse) / 16); i += THREADS) {
    reinterpret_cast<uint4*>(s.inverse)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < STAGES * static_cast<int>(sizeof(Stage{}.aq) / 16); i += THREADS) {
    constexpr int VECTORS = sizeof(Stage{}.aq) / 16;
    reinterpret_cast<uint4*>(s.stage[i / VECTORS].aq)[i % VECTORS] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      s.raw_gate[i].init(1), s.raw[i].init(1), s.ready[i].init(2);
      s.full[i].init(5), s.read[i].init(8), s.empty[i].init(8);
    }
    for (int i = 0; i < GROUPS; ++i) s.lower_full[i].init(4), s.inverse_full[i].init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  deal(args, s);

  if (group < 2) {
    cutlass::arch::warpgroup_reg_alloc<160>();
    recur<SLOTS>(args, s, group);
  } else if (group < 4) {
    cutlass::arch::warpgroup_reg_dealloc<56>();
    prepare<FP16, SLOTS>(args, s, group - 2);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<48>();
    if (warp == 16) {
      copy_in<SLOTS>(args, s);
      clear_padding<SLOTS>(args.p, s);
    } else if (warp < 19) {
      look_at_rows<SLOTS>(args, s, warp == 18);
    } else {
      invert_chunks<FP16, SLOTS>(args, s);
    }
  }
}

/// A map of [128, heads, tokens, batch] in bf16 whose boxes are half tiles of one head.
cudaError_t tensor_map(CUtensorMap& map, const void* data, const int64_t (&stride)[3], int64_t B, int64_t T,
                       int64_t heads) {
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
  const cuuint64_t size[4] = {CHANNELS, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(T),
                              static_cast<cuuint64_t>(B)};
  // A dimension of one element is never stepped over, whatever stride it is said to have.
  const cuuint64_t bytes[3] = {static_cast<cuuint64_t>(heads > 1 ? stride[2] * 2 : 256),
                               static_cast<cuuint64_t>(T > 1 ? stride[1] * 2 : 256),
                               static_cast<cuuint64_t>(B > 1 ? stride[0] * 2 : 256)};
  const cuuint32_t box[4] = {HALF, 1, TOKENS, 1}, step[4] = {1, 1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), size, bytes, box,
                                 step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// By FP16, by SLOTS.
const void* const KERNELS[2][2] = {
    {reinterpret_cast<const void*>(fwd_kernel<false, false>), reinterpret_cast<const void*>(fwd_kernel<false, true>)},
    {reinterpret_cast<const void*>(fwd_kernel<true, false>), reinterpret_cast<const void*>(fwd_kernel<true, true>)},
};

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
  for (const void* kernel : {KERNELS[0][0], KERNELS[0][1], KERNELS[1][0], KERNELS[1][1]}) {
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
      return error;
  }
  if (remembered) known[device].store(multiprocessors);
  return cudaSuccess;
}

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
  if (p->B * p->T > 0) {
    if (cudaError_t error = tensor_map(args.q, p->q, p->q_stride, p->B, p->T, p->H)) return error;
    if (cudaError_t error = tensor_map(args.k, p->k, p->k_stride, p->B, p->T, p->H)) return error;
    if (cudaError_t error = tensor_map(args.v, p->v, p->v_stride, p->B, p->T, p->HV)) return error;
    if (cudaError_t error = tensor_map(args.g, p->g, p->g_stride, p->B, p->T, p->HV)) return error;
    if (cudaError_t error = tensor_map(args.out, p->out, p->out_stride, p->B, p->T, p->HV)) return error;
  }
  const int grid = static_cast<int>(tasks < multiprocessors ? tasks : multiprocessors);
  args.tasks = static_cast<int>(tasks);
  args.sorted = p->cu_seqlens != nullptr && p->N > 1 && p->N <= MOST_SORTED && tasks > grid;
  void* arguments[] = {&args};
  const bool fp16 = p->use_qk_l2norm && p->use_beta_sigmoid;
  const bool slots = in_slots(*p) || p->checkpoints != nullptr;
  return cudaLaunchKernel(KERNELS[fp16][slots], dim3(grid), dim3(THREADS), arguments, shared_bytes,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace kda::sm90

extern "C" int kda_fwd_sm90(const kda_fwd_params* p, void* stream, int careful) {
  if (careful && kda::refused(*p)) return KDA_REFUSED;
  const cudaError_t error = kda::sm90::launch(p, stream);
  if (error != cudaSuccess) cudaGetLastError();  // ours is returned; the next launch must not find it again
  return error;
}
