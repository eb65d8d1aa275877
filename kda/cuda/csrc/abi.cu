// What the library exports besides its kernels.
#include <cuda_runtime.h>

#include "kda/abi.h"

extern "C" int kda_abi(void) { return KDA_ABI; }

extern "C" int kda_arch(void) { return 90; }

extern "C" const char* kda_error_text(int error) {
  if (error == KDA_REFUSED) return "a buffer may lie on another tensor, or an address is not a multiple of 16";
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
