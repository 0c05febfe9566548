// Which buckets lie on which GPU of this node (--store=device).
//
// What a rank publishes lies where its tensors do: then its copy is one within
// the GPU. What comes from elsewhere lies on a GPU that one of the model's
// workers on this node is on, and out of whose memory all of them can copy. In
// host memory, in one piece and once, lies everything else:
//   - of a rank with tensors on several GPUs or in host memory, or with a
//     parameter in several shards
//   - what a worker needs that has no GPU; what comes from elsewhere while no
//     one GPU is in reach of all workers
// A GPU's bucket that somebody needs who cannot reach the GPU is copied to host
// memory (DeviceCopies).

#ifndef WEIGHTSYNC_DAEMON_NODE_PLACEMENT_H_
#define WEIGHTSYNC_DAEMON_NODE_PLACEMENT_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/node/layouts.h"
#include "daemon/node/snapshot.h"
#include "transport/memory.h"
#include "weightsync/v1/trainer.pb.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class Placement {
 public:
  // The one GPU on which all of a rank's shards lie, none of them a part of a
  // parameter of which the rank has another; empty: there is none.
  static std::string DeviceOfShards(
      const transport::Memory& memory, const std::vector<SourceRegion>& regions,
      const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards);

  // `device` as of DeviceOfShards.
  void SetRank(const std::string& model, int32_t rank,
               const std::string& device);
  // A worker of this node, and the GPUs out of whose memory it can copy: the
  // first is its own.
  void SetWorker(const std::string& model, const std::string& worker,
                 std::vector<std::string> reachable);
  void RemoveWorker(const std::string& model, const std::string& worker);

  // The GPUs of those of `buckets` that shall lie on one: of ranks of this
  // node, and of others.
  std::map<int32_t, std::string> ForPacked(
      const NodeLayout& layout, const std::vector<int32_t>& buckets) const;
  std::map<int32_t, std::string> ForReceived(
      const NodeLayout& layout, const std::vector<int32_t>& buckets) const;
  // Whether every worker of the model here reaches the GPU.
  bool AllReach(const std::string& model, const std::string& device) const;

 private:
  using Workers = std::map<std::string, std::vector<std::string>>;

  mutable absl::Mutex mutex_;
  std::map<std::pair<std::string, int32_t>, std::string> ranks_
      ABSL_GUARDED_BY(mutex_);
  // By model.
  std::map<std::string, Workers> workers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_PLACEMENT_H_
