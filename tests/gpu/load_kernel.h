// Kernels of test programs: work for a GPU that somebody else wants to use as
// well, and reading as a floor.
#ifndef WEIGHTSYNC_TESTS_GPU_LOAD_KERNEL_H_
#define WEIGHTSYNC_TESTS_GPU_LOAD_KERNEL_H_

#include <cstdint>

namespace weightsync {
namespace load {

constexpr int kThreads = 256;

// Multiplies and adds `rounds` times in each of `blocks` x kThreads threads:
// what an SM has of arithmetic, and no memory. `out` has a value for each
// thread; `stream` is a cudaStream_t. Returns a cudaError_t.
int LaunchLoad(float* out, int64_t rounds, int blocks, void* stream);

// Reads `bytes`, a multiple of 16, and keeps nothing of them: `out` is only
// written to if they add up to a number that they do not. As LaunchLoad.
int LaunchRead(const char* from, int64_t bytes, char* out, int blocks,
               void* stream);

}  // namespace load
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_LOAD_KERNEL_H_
