// Decode: one token, or a few, for each of many states. A step reads and writes every state once, and that is what it
// costs.
//
// A warp has 8 rows of V of one state: a lane holds 4 channels of each. All is fp32, and no warp sees another, so a
// row's bits do not depend on what else is in the batch.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kda/extents.h"
#include "kda/numerics.h"
#include "kda/sm90/element.cuh"

namespace kda::sm90 {
namespace {

constexpr int CHANNELS = SM90_CHANNELS;
constexpr int ROWS = 8;                          // of V, to a warp
constexpr int WARPS = 4;                         // of a CTA
constexpr int CTAS = CHANNELS / (ROWS * WARPS);  // of one state

__device__ __forceinline__ float4 widened(const float4& x) { return x; }
__device__ __forceinline__ float4 widened(const uint2& x) {
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u), __uint_as_float(x.y << 16),
                     __uint_as_float(x.y & 0xffff0000u));
}

__device__ __forceinline__ uint32_t pair(float low, float high) {
  const __nv_bfloat162 y = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ __forceinline__ void put(float4* to, const float4& x) { *to = x; }
__device__ __forceinline__ void put(uint2* to, const float4& x) { *to = make_uint2(pair(x.x, x.y), pair(x.z, x.w)); }

/// This lane's four channels of a row.
__device__ __forceinline__ float4 channels_of(const void* x, int64_t row, int dtype, int lane) {
  if (dtype == KDA_FP32) return *reinterpret_cast<const float4*>(static_cast<const float*>(x) + row + 4 * lane);
  return widened(*reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(x) + row + 4 * lane));
}

__device__ __forceinline__ int64_t row_of(const int64_t (&stride)[3], int64_t n, int64_t t, int64_t head) {
  return n * stride[0] + t * stride[1] + head * stride[2];
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

/// The sum over the lanes, in all of them.
__device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

/// The sums over the lanes of two times ROWS numbers: of a[lane % 16 / 2] in the first half of the warp, of b in the
/// second. Every exchange halves what a lane still has to add.
__device__ __forceinline__ float over_lanes(const float (&a)[ROWS], const float (&b)[ROWS], int lane) {
  float x[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    x[r] = (lane & 16 ? b[r] : a[r]) + __shfl_xor_sync(~0u, lane & 16 ? a[r] : b[r], 16);
  }
#pragma unroll
  for (int half = ROWS / 2; half > 0; half /= 2) {
    const bool upper = lane & 2 * half;
#pragma unroll
    for (int r = 0; r < half; ++r) {
      x[r] = (upper ? x[r + half] : x[r]) + __shfl_xor_sync(~0u, upper ? x[r] : x[r + half], 2 * half);
    }
  }
  return x[0] + __shfl_xor_sync(~0u, x[0], 1);
}

/// Within the range whose exp neither overflows nor vanishes; NaN stays NaN.
__device__ __forceinline__ float within_exp(float x) {
  x = x > MAX_EXP ? MAX_EXP : x;
  return x < -MAX_EXP ? -MAX_EXP : x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float softplus(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(x > 0.0f ? -x : x)); }

/// exp of the activated gate.
__device__ __forceinline__ float decay_of(const kda_step_params& p, float g, float rate, float bias) {
  if (p.gate == KDA_GIVEN) return expf(g);
  g += bias;
  return expf(p.gate == KDA_BOUNDED ? p.lower_bound * sigmoid(rate * g) : -rate * softplus(g));
}

/// Quarter: four channels of a state as they lie in memory, fp32 or bf16.
template <class Quarter>
__global__ void __launch_bounds__(32 * WARPS) step_kernel(const __grid_constant__ kda_step_params p) {
  constexpr int SIZE = sizeof(Quarter) / 4;
  const int lane = threadIdx.x % 32, HV = static_cast<int>(p.HV);
  const int task = blockIdx.x / CTAS, n = task / HV, value_head = task % HV, head = value_head / (HV / p.H);
  const int first_row = (blockIdx.x % CTAS * WARPS + threadIdx.x / 32) * ROWS, own_row = first_row + lane % 16 / 2;
  auto* out = static_cast<__nv_bfloat16*>(p.out);
  const int read = p.state_indices == nullptr
                       ? n
                       : slot_at(p.state_indices, n * p.state_indices_stride, p.state_indices_dtype, p.slots);
  if (read < 0) {
    for (int64_t t = 0; t < p.T; ++t) {
      if (lane < 16) out[row_of(p.out_stride, n, t, value_head) + own_row] = __float2bfloat16(0.0f);
    }
    return;
  }

  const int64_t in_slot = value_head * p.state_stride[1] + first_row * p.state_stride[2] + 4 * lane;
  auto quarter_of = [&](int slot, int r) {
    const int64_t at = slot * p.state_stride[0] + in_slot + r * p.state_stride[2];
    return reinterpret_cast<Quarter*>(static_cast<char*>(p.state) + at * SIZE);
  };
  float4 S[ROWS] = {};
  if (p.fresh == nullptr || !static_cast<const bool*>(p.fresh)[n * p.fresh_stride]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) S[r] = widened(*quarter_of(read, r));
  }
  auto keep = [&](int slot) {
    if (slot < 0) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) put(quarter_of(slot, r), S[r]);
  };

  const float rate =
      p.A_log == nullptr ? 1.0f : expf(within_exp(load_float(p.A_log, value_head * p.A_log_stride, p.A_log_dtype)));
  float bias[4] = {};
  if (p.dt_bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = value_head * p.dt_bias_stride[0] + (4 * lane + i) * p.dt_bias_stride[1];
      bias[i] = load_float(p.dt_bias, at, p.dt_bias_dtype);
    }
  }

#pragma unroll 1
  for (int64_t t = 0; t < p.T; ++t) {
    float4 q = channels_of(p.q, row_of(p.q_stride, n, t, head), KDA_BF16, lane);
    float4 k = channels_of(p.k, row_of(p.k_stride, n, t, head), KDA_BF16, lane);
    const float4 g = channels_of(p.g, row_of(p.g_stride, n, t, value_head), p.g_dtype, lane);
    const float v = load_float(p.v, row_of(p.v_stride, n, t, value_head) + own_row, KDA_BF16);
    float beta = load_float(p.beta, row_of(p.beta_stride, n, t, value_head), p.beta_dtype);
    if (p.use_beta_sigmoid) beta = sigmoid(beta);
    if (p.allow_neg_eigval) beta *= 2.0f;

    float q_factor = p.scale, k_factor = 1.0f;
    if (p.use_qk_l2norm) {
      q_factor /= sqrtf(over_lanes(dot(q, q)) + L2NORM_EPS);
      k_factor /= sqrtf(over_lanes(dot(k, k)) + L2NORM_EPS);
    }
    q.x *= q_factor, q.y *= q_factor, q.z *= q_factor, q.w *= q_factor;
    k.x *= k_factor, k.y *= k_factor, k.z *= k_factor, k.w *= k_factor;
    const float qk = over_lanes(dot(q, k));
    const float decay[4] = {decay_of(p, g.x, rate, bias[0]), decay_of(p, g.y, rate, bias[1]),
                            decay_of(p, g.z, rate, bias[2]), decay_of(p, g.w, rate, bias[3])};

    // The decayed state, asked for k and for q at once: o = q^T S + (q^T k) w, with w the row's update along k.
    float by_k[ROWS], by_q[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      S[r].x *= decay[0], S[r].y *= decay[1], S[r].z *= decay[2], S[r].w *= decay[3];
      by_k[r] = dot(S[r], k), by_q[r] = dot(S[r], q);
    }
    const float sum = over_lanes(by_k, by_q, lane);
    const float update = beta * (v - sum);  // right in the first half of the warp
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float w = __shfl_sync(~0u, update, 2 * r);
      S[r] = make_float4(fmaf(w, k.x, S[r].x), fmaf(w, k.y, S[r].y), fmaf(w, k.z, S[r].z), fmaf(w, k.w, S[r].w));
    }
    const float w = __shfl_sync(~0u, update, lane % 16);
    if (lane >= 16 && lane % 2 == 0) {
      out[row_of(p.out_stride, n, t, value_head) + own_row] = __float2bfloat16(fmaf(qk, w, sum));
    }
    if (p.token_indices != nullptr) {
      const int64_t at = n * p.token_indices_stride[0] + t * p.token_indices_stride[1];
      keep(slot_at(p.token_indices, at, p.token_indices_dtype, p.slots));
    }
  }
  keep(p.write_indices == nullptr
           ? read
           : slot_at(p.write_indices, n * p.write_indices_stride, p.write_indices_dtype, p.slots));
}

}  // namespace
}  // namespace kda::sm90

extern "C" int kda_step_sm90(const kda_step_params* p, void* stream, int careful) {
  if (careful && kda::refused(*p)) return KDA_REFUSED;
  const int64_t ctas = p->N * p->HV * kda::sm90::CTAS;
  if (ctas == 0) return cudaSuccess;
  const void* kernel = p->state_dtype == KDA_BF16 ? reinterpret_cast<const void*>(kda::sm90::step_kernel<uint2>)
                                                  : reinterpret_cast<const void*>(kda::sm90::step_kernel<float4>);
  void* arguments[] = {const_cast<kda_step_params*>(p)};
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), dim3(32 * kda::sm90::WARPS),
                                             arguments, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();  // ours is returned; the next launch must not find it again
  return error;
}
