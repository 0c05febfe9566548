#include "tests/gpu/sim/test_kernels.h"

namespace gpu_sim {

struct ScaleParams {
  const int32_t* from;
  int32_t* to;
  int64_t count;
};

__global__ void Scale(ScaleParams params, int32_t factor, int32_t offset) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < params.count; i += stride) {
    params.to[i] = params.from[i] * factor + offset;
  }
}

template <typename T>
__global__ void Sum(const T* from, int64_t count, unsigned long long* sum) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    atomicAdd(sum, static_cast<unsigned long long>(from[i]));
  }
}

#if defined(__CUDACC__)

int LaunchScale(const int32_t* from, int32_t* to, int64_t count, int32_t factor,
                int32_t offset, void* stream) {
  Scale<<<3, 64, 0, static_cast<cudaStream_t>(stream)>>>(
      ScaleParams{from, to, count}, factor, offset);
  return cudaGetLastError();
}

int LaunchSum(const int32_t* from, int64_t count, unsigned long long* sum,
              void* stream) {
  Sum<int32_t><<<dim3(2, 1, 1), 32, 0, static_cast<cudaStream_t>(stream)>>>(
      from, count, sum);
  return cudaGetLastError();
}

#else

GPU_SIM_TWIN(Scale);
GPU_SIM_TWIN(Sum<int32_t>);

#endif

}  // namespace gpu_sim
