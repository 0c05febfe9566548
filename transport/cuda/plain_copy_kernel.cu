#include "transport/cuda/kernel_body.h"
#include "transport/cuda/kernels.h"

namespace weightsync {
namespace transport {
namespace cuda {

// What CopyKernel does for copies that are neither cast nor digested. A kernel
// of its own: every client library carries it (driver_kernel.h), and each of
// its processes has it on its GPU. 200 KB for all the architectures; CopyKernel
// has half a MB.
__global__ void __launch_bounds__(kBlockThreads, 3)
    PlainCopyKernel(const CopyLaunch launch) {
  for (int64_t unit = blockIdx.x; unit < launch.unit_count; unit += gridDim.x) {
    DigestSum none;
    CopyUnit<true>(launch, unit, threadIdx.x, blockDim.x, &none);
  }
}

#if !defined(__CUDACC__)

GPU_SIM_TWIN(PlainCopyKernel);

#endif

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
