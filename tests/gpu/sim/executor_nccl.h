// A simulated communicator, as one rank's executor holds it.
#ifndef WEIGHTSYNC_TESTS_GPU_SIM_EXECUTOR_NCCL_H_
#define WEIGHTSYNC_TESTS_GPU_SIM_EXECUTOR_NCCL_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/sim/protocol.h"

namespace gpu_sim {

// ncclResult_t, as nccl.h has it.
enum NcclResult {
  kNcclSuccess = 0,
  kNcclInternalError = 3,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};

// Meets the other ranks through sockets in the machine's folder: one connection
// for each ordered pair, on which the receiver grants a transfer and the sender
// then sends. So nobody passes an operation whose peer has not come to it, but
// for short sends where they are eager, as NCCL's are that fit into its own
// buffers: these may stay on the connection for whoever receives next.
class NcclComm {
 public:
  struct Options {
    std::string key;  // hexadecimal
    std::string host_id;
    int ranks = 0;
    int rank = 0;
    int version = 0;
    // A send of at most so many bytes does not wait for its receiver.
    uint64_t eager_bytes = 0;
    unsigned char uuid[16];
  };

  explicit NcclComm(const Options& options);
  // REQUIRES: no Run is at work.
  ~NcclComm();

  // kNcclInProgress until all ranks have met.
  int async_error() const { return async_error_; }
  void Fail(int error);

  // On a stream: returns when all items are done. After an error it goes on
  // holding the stream until Abort, as a real one does.
  void Run(const std::vector<NcclItem>& items);
  void Abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

 private:
  struct Hello {
    uint32_t magic;
    int32_t rank, ranks, version;
    unsigned char uuid[16];
    char host_id[kHostIdBytes];
  };

  void Meet();
  bool Listen();
  std::string SocketPath(int rank) const;
  void CheckPeer(const Hello& hello);
  void Hold();

  const Options options_;
  std::atomic<int> async_error_{kNcclInProgress};
  std::atomic<bool> aborted_{false};
  int listener_ = -1;
  std::vector<int> to_;  // sockets by rank, this rank sends
  // Grants of eager sends, by rank, that are still to come.
  std::vector<uint64_t> owed_grants_;
  std::vector<int> from_;  // this rank receives
  std::thread thread_;
};

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TESTS_GPU_SIM_EXECUTOR_NCCL_H_
