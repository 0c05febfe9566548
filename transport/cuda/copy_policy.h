// Which of a GPU's two ways a copy within its memory takes: its copy engines,
// which compute nothing and take one command for each contiguous piece, or a
// kernel, which takes any number of pieces of any shape in one launch, and SMs.
// Memory of a peer that is mapped here is as memory of its own. Between a GPU
// and the host it is always the engines: a kernel makes less of the bus.
//
// The numbers are estimates, from what a command is known to cost, 2 to 3 us of
// the GPU, in which an H100 or H200 copies 3 to 5 MB. tests/gpu/gpu_bench.cc
// measures both ways; tests/gpu/RESULTS.md says whether it has.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_COPY_POLICY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_COPY_POLICY_H_

#include <cstdint>

#include "transport/copy.h"

namespace weightsync {
namespace transport {
namespace cuda {

// Where others compute meanwhile, as beside a device agent: what is contiguous
// leaves the SMs to them, down to where a command costs more than it copies,
// many times over.
constexpr int64_t kEngineBytesBesideWork = 64 << 10;

// Where nobody computes, as in an engine's pause: whatever is quickest. A
// kernel copies at some 0.85 of the engines' rate, so that a command's time is
// won back from here on. A model's 18,867 pieces are a few hundred commands and
// some launches then; each by a command of its own, they take 50 ms, in which
// the GPU could have copied them five times.
constexpr int64_t kEngineBytesInPause = 16 << 20;

// So many commands of copy engines take no longer than a launch, which is one
// for its table and one for itself.
constexpr int64_t kCommandsOfALaunch = 2;

// A valid task with a destination, of which no digest is wanted.
inline bool ByCopyEngine(const CopyTask& task, int64_t engine_bytes) {
  return task.cast == CopyCast::kNone && task.dims.empty() &&
         task.run_bytes >= engine_bytes;
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_COPY_POLICY_H_
