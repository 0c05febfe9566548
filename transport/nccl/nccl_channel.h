// The bytes of one edge of a chain, over a communicator of NCCL that only this
// edge has. BROADCAST, too, is a chain of such pairs and no ncclBroadcast: a
// collective that fails does not say at whom, and takes all of its members
// along.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/nccl/nccl_library.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace transport {
namespace nccl {

struct NcclOptions {
  std::string library;      // as NcclLibrary::Load
  std::string device_uuid;  // empty: the only one of the process
  // Of the GPU's SMs, for each operation: the rest is the trainer's or the
  // engine's.
  int max_ctas = 4;
  int cta_policy = 1;  // NCCL_CTA_POLICY_EFFICIENCY
  // Bytes move through a buffer of this size at each end of each edge.
  int64_t staging_bytes = 32 << 20;
  // How long a communicator that nothing is wrong with may take to come to its
  // end in good order. One that takes longer is aborted, as all others are.
  absl::Duration finalize_deadline = absl::Seconds(1);
  // An end that takes longer never returns (an abort is seen to hang): then
  // this is called, once, and the process is expected to end.
  absl::Duration abort_deadline = absl::Seconds(5);
  std::function<void(const absl::Status&)> on_hung;
};

// What all edges of one process on one GPU share. Thread-safe; outlives its
// channels.
class NcclDevice {
 public:
  // FAILED_PRECONDITION: NCCL_MISSING, NCCL_TOO_OLD, NCCL_SETTING,
  // DRIVER_TOO_OLD, NO_DEVICE; NOT_FOUND (DEVICE_NOT_VISIBLE).
  static absl::StatusOr<std::unique_ptr<NcclDevice>> Create(
      const NcclOptions& options);
  ~NcclDevice();

  // FAILED_PRECONDITION when the device is lost.
  absl::StatusOr<std::unique_ptr<tcp::PayloadChannel>> NewChannel();

  const NcclLibrary& library() const { return *library_; }
  const std::string& device_uuid() const { return uuid_; }
  // Communicators that were made and have not ended yet.
  int communicators() const;
  // Of the GPU's memory, in buffers: of channels, and of those that have ended.
  int64_t staging_bytes() const;

 private:
  friend class NcclChannel;

  // Streams and buffers are used again: to free is to wait for the whole GPU.
  struct Lane {
    cudaStream_t stream = nullptr;
    char* staging = nullptr;
  };

  explicit NcclDevice(const NcclOptions& options) : options_(options) {}
  absl::StatusOr<Lane> TakeLane();
  void GiveBack(const Lane& lane);
  // Ends it in bounded time: finalized and destroyed where it is `healthy` and
  // that can be done in time, aborted otherwise. False: it hangs, and so will
  // whatever follows.
  bool End(ncclComm_t comm, bool healthy);
  // Of the environment as NCCL has left it: its first call adds what stands in
  // /etc/nccl.conf, ~/.nccl.conf and the like. FAILED_PRECONDITION
  // (NCCL_SETTING).
  absl::Status CheckSettings();

  const NcclOptions options_;
  std::unique_ptr<NcclLibrary> library_;
  std::string uuid_;
  int ordinal_ = 0;

  mutable absl::Mutex mutex_;
  std::vector<Lane> free_ ABSL_GUARDED_BY(mutex_);
  int lanes_ ABSL_GUARDED_BY(mutex_) = 0;  // that were made
  int communicators_ ABSL_GUARDED_BY(mutex_) = 0;
  bool hung_ ABSL_GUARDED_BY(mutex_) = false;
  // As they were last told.
  std::string settings_ ABSL_GUARDED_BY(mutex_);
};

// A node's way into groups whose bytes go over NCCL: an Endpoint for everything
// else, whose edges have channels of `device`, which outlives it.
//
// A group of memory.h's kind is a chain, and a chain over NCCL is a
// communicator of two for each of its edges: so it can lose a member, be joined
// by one, and blame an edge, which a communicator over all cannot. The price is
// that a bucket is sent on by each node, as over TCP; the wires carry as much
// either way.
absl::StatusOr<std::unique_ptr<tcp::Endpoint>> CreateNcclEndpoint(
    tcp::EndpointOptions options, NcclDevice* device);

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_NCCL_CHANNEL_H_
