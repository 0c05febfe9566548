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

struct alignas(16) ReadWords {
  unsigned long long a, b;  // NOLINT: one load of 16 bytes
};

__global__ void Read(const ReadWords* from, int64_t count,
                     unsigned long long* out) {  // NOLINT
  unsigned long long sum = 0;                    // NOLINT
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const ReadWords words = from[i];
    sum += words.a ^ words.b;
  }
  if (sum == 0x5eed5eed5eed5eedull) *out = sum;
}

#if defined(__CUDACC__)

int LaunchLoad(float* out, int64_t rounds, int blocks, void* stream) {
  Load<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(out, rounds);
  return cudaGetLastError();
}

int LaunchRead(const char* from, int64_t bytes, char* out, int blocks,
               void* stream) {
  Read<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const ReadWords*>(from),
      bytes / static_cast<int64_t>(sizeof(ReadWords)),
      reinterpret_cast<unsigned long long*>(out));  // NOLINT
  return cudaGetLastError();
}

#else

GPU_SIM_TWIN(Load);
GPU_SIM_TWIN(Read);

#endif

}  // namespace load
}  // namespace weightsync
