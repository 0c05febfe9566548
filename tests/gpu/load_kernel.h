// Work for a GPU that somebody else wants to use as well.
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

}  // namespace load
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_GPU_LOAD_KERNEL_H_
