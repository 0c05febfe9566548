#include "tests/gpu/load_kernel.h"

namespace weightsync {
namespace load {

__global__ void Load(float* out, int64_t rounds) {
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  // Chains that do not wait for one another.
  float a = static_cast<float>(index) * 1e-6f, b = a + 1, c = a + 2, d = a + 3;
  for (int64_t i = 0; i < rounds; ++i) {
    a = a * 0.999f + 0.5f;
    b = b * 0.998f + 0.5f;
    c = c * 0.997f + 0.5f;
    d = d * 0.996f + 0.5f;
  }
  out[index] = a + b + c + d;
}

#if defined(__CUDACC__)

int LaunchLoad(float* out, int64_t rounds, int blocks, void* stream) {
  Load<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(out, rounds);
  return cudaGetLastError();
}

#else

GPU_SIM_TWIN(Load);

#endif

}  // namespace load
}  // namespace weightsync
