// Elements of tensors that may come in more than one dtype, and slots of pools.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kda/abi.h"
#include "kda/sm90/device.cuh"

namespace kda::sm90 {

__device__ __forceinline__ float load_float(const void* x, int64_t i, int dtype) {
  switch (dtype) {
    case KDA_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
    case KDA_FP16: return __half2float(static_cast<const __half*>(x)[i]);
    case KDA_FP64: return static_cast<float>(static_cast<const double*>(x)[i]);
    default: return static_cast<const float*>(x)[i];
  }
}

/// Four channels of a state as they lie in memory, fp32 or bf16.
__device__ __forceinline__ void put_quarter(float4* to, const float4& x) { *to = x; }
__device__ __forceinline__ void put_quarter(uint2* to, const float4& x) {
  *to = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
}

/// What is lost of them in bf16, as a second term.
__device__ __forceinline__ void put_rest(uint2* to, const float4& x) {
  *to = make_uint2(pack_rest(pack(x.x, x.y), x.x, x.y), pack_rest(pack(x.z, x.w), x.z, x.w));
}

/// Entry i of some slots' numbers; -1 for what is none of `slots`.
__device__ __forceinline__ int slot_at(const void* indices, int64_t i, int dtype, int64_t slots) {
  int64_t slot;
  switch (dtype) {
    case KDA_INT8: slot = static_cast<const int8_t*>(indices)[i]; break;
    case KDA_UINT8: slot = static_cast<const uint8_t*>(indices)[i]; break;
    case KDA_INT16: slot = static_cast<const int16_t*>(indices)[i]; break;
    case KDA_INT32: slot = static_cast<const int32_t*>(indices)[i]; break;
    default: slot = static_cast<const int64_t*>(indices)[i];
  }
  return slot >= 0 && slot < slots ? static_cast<int>(slot) : -1;
}

}  // namespace kda::sm90
