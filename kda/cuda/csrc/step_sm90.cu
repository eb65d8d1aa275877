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
constexpr int WARPS = 1;                         // of a CTA
constexpr int CTAS = CHANNELS / (ROWS * WARPS);  // of one state

__device__ __forceinline__ float4 widened(const float4& x) { return x; }
__device__ __forceinline__ float4 widened(const uint2& x) {
  return make_float4(low(x.x), high(x.x), low(x.y), high(x.y));
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

/// The sums over the lanes of ROWS numbers, that of x[lane / 4] in this lane. Every exchange halves what a lane still
/// has to add.
__device__ __forceinline__ float over_lanes(float (&x)[ROWS], int lane) {
#pragma unroll
  for (int half = ROWS / 2; half > 0; half /= 2) {
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int r = 0; r < half; ++r) {
      x[r] = (upper ? x[r + half] : x[r]) + __shfl_xor_sync(~0u, upper ? x[r] : x[r + half], 4 * half);
    }
  }
  x[0] += __shfl_xor_sync(~0u, x[0], 2);
  return x[0] + __shfl_xor_sync(~0u, x[0], 1);
}

__device__ __forceinline__ float exponential(float x) { return exp2_fast(x * LOG2E); }

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

/// 1 / sqrt(x) by a Newton step from the device's own, whose error would be seen.
__device__ __forceinline__ float inverse_root(float x) {
  const float y = rsqrtf(x);
  return y == 0.0f ? y : fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y);  // of infinity 0
}

__device__ __forceinline__ float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + log1pf(exponential(x > 0.0f ? -x : x));
}

/// exp of the activated gate.
__device__ __forceinline__ float decay_of(const kda_step_params& p, float g, float rate, float bias) {
  if (p.gate == KDA_GIVEN) return exponential(g);
  g += bias;
  return exponential(p.gate == KDA_BOUNDED ? p.lower_bound * sigmoid(rate * g) : -rate * softplus(g));
}

/// What a lane has of a token, as it lies in memory, so that nothing waits for a load before it is used.
struct Token {
  uint2 q, k;
  float4 g;
  __nv_bfloat16 v;
  uint32_t beta;
  float A_log, bias[4];  // not the token's, but kept between two tokens they would cost registers

  __device__ __forceinline__ void load(const kda_step_params& p, int64_t n, int64_t t, int head, int value_head,
                                       int row, int lane) {
    auto four = [&](const void* x, const int64_t (&stride)[3], int of) {
      return reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(x) + row_of(stride, n, t, of))[lane];
    };
    q = four(p.q, p.q_stride, head), k = four(p.k, p.k_stride, head);
    if (p.g_dtype == KDA_FP32) {
      const auto* row_of_g = static_cast<const float*>(p.g) + row_of(p.g_stride, n, t, value_head);
      g = reinterpret_cast<const float4*>(row_of_g)[lane];
    } else {
      g = widened(four(p.g, p.g_stride, value_head));
    }
    v = static_cast<const __nv_bfloat16*>(p.v)[row_of(p.v_stride, n, t, value_head) + row];
    const int64_t at = row_of(p.beta_stride, n, t, value_head);
    beta = p.beta_dtype == KDA_FP32 ? static_cast<const uint32_t*>(p.beta)[at]
                                    : static_cast<uint32_t>(static_cast<const uint16_t*>(p.beta)[at]) << 16;
    A_log = p.A_log == nullptr ? 0.0f : load_float(p.A_log, value_head * p.A_log_stride, p.A_log_dtype);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t channel = value_head * p.dt_bias_stride[0] + (4 * lane + i) * p.dt_bias_stride[1];
      bias[i] = p.dt_bias == nullptr ? 0.0f : load_float(p.dt_bias, channel, p.dt_bias_dtype);
    }
  }
};

/// Quarter: four channels of a state as they lie in memory, fp32 or bf16. USUAL: one token, and rows of V that follow
/// each other. Many warps to a multiprocessor is what counts, so registers are few.
template <class Quarter, bool USUAL>
__global__ void __launch_bounds__(32 * WARPS, (USUAL ? 28 : 24) / WARPS)
    step_kernel(const __grid_constant__ kda_step_params p) {
  constexpr int SIZE = sizeof(Quarter) / 4;
  const int lane = threadIdx.x % 32, n = blockIdx.y, value_head = blockIdx.x / CTAS;
  const int head = value_head / p.group;
  const int first_row = (blockIdx.x % CTAS * WARPS + threadIdx.x / 32) * ROWS, own_row = first_row + lane / 4;
  auto* out = static_cast<__nv_bfloat16*>(p.out);
  const int read = p.state_indices == nullptr
                       ? n
                       : slot_at(p.state_indices, n * p.state_indices_stride, p.state_indices_dtype, p.slots);
  if (read < 0) {
    for (int64_t t = 0; t < p.T; ++t) {
      if (lane % 4 == 0) out[row_of(p.out_stride, n, t, value_head) + own_row] = __float2bfloat16(0.0f);
    }
    return;
  }

  const int64_t row = USUAL ? CHANNELS : p.state_stride[2];
  const int64_t in_slot = value_head * p.state_stride[1] + first_row * row + 4 * lane;
  auto quarters_of = [&](int slot) {
    return reinterpret_cast<Quarter*>(static_cast<char*>(p.state) + (slot * p.state_stride[0] + in_slot) * SIZE);
  };
  float4 S[ROWS] = {};
  if (p.fresh == nullptr || !static_cast<const bool*>(p.fresh)[n * p.fresh_stride]) {
    const Quarter* from = quarters_of(read);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) S[r] = widened(from[r * row / 4]);
  }
  auto keep = [&](int slot) {
    if (slot < 0) return;
    Quarter* to = quarters_of(slot);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) put_quarter(to + r * row / 4, S[r]);
  };

  Token token{};
  if (USUAL || p.T > 0) token.load(p, n, 0, head, value_head, own_row, lane);

#pragma unroll 1
  for (int64_t t = 0; t < (USUAL ? 1 : p.T); ++t) {
    float4 q = widened(token.q), k = widened(token.k);
    const float4 g = token.g;
    const float v = __bfloat162float(token.v);
    float beta = __uint_as_float(token.beta);
    if (p.use_beta_sigmoid) beta = sigmoid(beta);
    if (p.allow_neg_eigval) beta *= 2.0f;

    float q_factor = p.scale, k_factor = 1.0f;
    if (p.use_qk_l2norm) {
      q_factor *= inverse_root(over_lanes(dot(q, q)) + L2NORM_EPS);
      k_factor *= inverse_root(over_lanes(dot(k, k)) + L2NORM_EPS);
    }
    q.x *= q_factor, q.y *= q_factor, q.z *= q_factor, q.w *= q_factor;
    k.x *= k_factor, k.y *= k_factor, k.z *= k_factor, k.w *= k_factor;
    const float rate = exponential(clamp(token.A_log, -MAX_EXP, MAX_EXP));
    const float decay[4] = {decay_of(p, g.x, rate, token.bias[0]), decay_of(p, g.y, rate, token.bias[1]),
                            decay_of(p, g.z, rate, token.bias[2]), decay_of(p, g.w, rate, token.bias[3])};

    float by_row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      S[r].x *= decay[0], S[r].y *= decay[1], S[r].z *= decay[2], S[r].w *= decay[3];
      by_row[r] = dot(S[r], k);
    }
    const float update = beta * (v - over_lanes(by_row, lane));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float w = __shfl_sync(~0u, update, 4 * r);
      S[r] = make_float4(fmaf(w, k.x, S[r].x), fmaf(w, k.y, S[r].y), fmaf(w, k.z, S[r].z), fmaf(w, k.w, S[r].w));
      by_row[r] = dot(S[r], q);
    }
    const float o = over_lanes(by_row, lane);
    if (lane % 4 == 0) out[row_of(p.out_stride, n, t, value_head) + own_row] = __float2bfloat16(o);
    if (p.token_indices != nullptr) {
      const int64_t at = n * p.token_indices_stride[0] + t * p.token_indices_stride[1];
      keep(slot_at(p.token_indices, at, p.token_indices_dtype, p.slots));
    }
    if (!USUAL && t + 1 < p.T) token.load(p, n, t + 1, head, value_head, own_row, lane);
  }
  keep(p.write_indices == nullptr
           ? read
           : slot_at(p.write_indices, n * p.write_indices_stride, p.write_indices_dtype, p.slots));
}

}  // namespace
}  // namespace kda::sm90

extern "C" int kda_step_sm90(const kda_step_params* p, void* stream, int careful) {
  if (careful && kda::refused(*p)) return KDA_REFUSED;
  if (p->N * p->HV == 0) return cudaSuccess;
  using namespace kda::sm90;
  const bool usual = p->T == 1 && p->state_stride[2] == CHANNELS, bf16 = p->state_dtype == KDA_BF16;
  const void* const kernels[2][2] = {
      {reinterpret_cast<const void*>(step_kernel<float4, false>),
       reinterpret_cast<const void*>(step_kernel<float4, true>)},
      {reinterpret_cast<const void*>(step_kernel<uint2, false>),
       reinterpret_cast<const void*>(step_kernel<uint2, true>)},
  };
  void* arguments[] = {const_cast<kda_step_params*>(p)};
  const dim3 grid(static_cast<unsigned>(p->HV * CTAS), static_cast<unsigned>(p->N));
  const cudaError_t error =
      cudaLaunchKernel(kernels[bf16][usual], grid, dim3(32 * WARPS), arguments, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) cudaGetLastError();  // ours is returned; the next launch must not find it again
  return error;
}
