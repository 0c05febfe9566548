// What is to go wrong in a simulated machine.
//
// $GPU_SIM_DIR/faults holds rules, one a line; it is read again when it
// changes. A rule is words separated by spaces:
//   call=NAME      the call of cudart, NCCL or the driver (cuModule…,
//                  cuLaunchKernel) that it is about; or
//   hostToDevice,
//                  deviceToHost: what any copy moves that way, to be noted; or
//                  peerAccess: see no=1
//   process=ROLE   only in processes with this GPU_SIM_ROLE
//   after=N        the first N matching calls of a process pass (default 0)
//   count=N        how often it strikes (default 1; 0: always)
// and one of
//   error=E        the call does nothing and returns E
//   sticky=E       as error, and the context is lost: every later call says E
//   hang=1         the call never returns
//   stall=1        the call returns, and what it began never ends: the stream
//                  does no more work (cudaLaunchKernel, cuLaunchKernel,
//                  cudaMemcpyAsync), the communicator stays in progress
//                  (ncclCommFinalize)
//   note=1         the call goes on, and is noted in $GPU_SIM_DIR/notes, with
//                  what it was given where that is nowhere else to be seen.
//                  copyToHost, copyToDevice, copyWithin (one GPU) and
//                  copyBetween (out of another's memory) stand for all calls
//                  that copy so: the call and its bytes are noted
//   no=1           (peerAccess) cudaDeviceCanAccessPeer says no, and memory of
//                  another GPU cannot be opened
//   unexportable=1 (cudaMalloc) the memory is as PyTorch's expandable segments
//   async=E        (ncclGroupEnd) the communicator has the error E from now on
// e.g. "call=cudaMalloc error=2 after=1", "call=ncclCommAbort hang=1".
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_FAULTS_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_FAULTS_H_

#include <string>

namespace gpu_sim {

struct Fault {
  int error = 0;
  int sticky = 0;
  int async = 0;
  bool stall = false;
  bool unexportable = false;
  bool note = false;
  bool no = false;
  bool any() const {
    return error || sticky || async || stall || unexportable || note || no;
  }
};

// What is planted for this call of `name`, with `given`, for notes. Does not
// return from a hang.
Fault Planted(const char* name, const std::string& given = "");

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_FAULTS_H_
