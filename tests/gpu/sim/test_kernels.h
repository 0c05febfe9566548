#ifndef WEIGHTSYNC_TESTS_GPU_SIM_TEST_KERNELS_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_TEST_KERNELS_H_

#include <cstdint>

namespace gpu_sim {

// to[i] = from[i] * factor + offset, as a kernel. `stream` is a cudaStream_t.
// Returns a cudaError_t.
int LaunchScale(const int32_t* from, int32_t* to, int64_t count, int32_t factor,
                int32_t offset, void* stream);

// Adds all values to *sum.
int LaunchSum(const int32_t* from, int64_t count, unsigned long long* sum,
              void* stream);

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_TEST_KERNELS_H_
