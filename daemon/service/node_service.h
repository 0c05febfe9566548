// NodeService: the coordinator's end of the streams between daemons.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_NODE_SERVICE_H_
#define WEIGHTSYNC_DAEMON_SERVICE_NODE_SERVICE_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "daemon/service/coordinator_loop.h"
#include "daemon/service/stream.h"
#include "weightsync/v1/node.grpc.pb.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class NodeServiceImpl final : public v1::NodeService::CallbackService {
 public:
  // `loop` null: this daemon is no coordinator, and every call is told so
  // (NOT_COORDINATOR). `coordinator`: the one to dial instead.
  NodeServiceImpl(CoordinatorLoop* loop, std::string coordinator)
      : loop_(loop), coordinator_(std::move(coordinator)) {}

  grpc::ServerBidiReactor<v1::NodeReport, v1::NodeCommand>* Connect(
      grpc::CallbackServerContext* context) override;

  // Ends all streams, and those that come later.
  void Shutdown();

 private:
  using Stream = ServerStream<v1::NodeReport, v1::NodeCommand>;

  CoordinatorLoop* const loop_;
  const std::string coordinator_;

  absl::Mutex mutex_;
  bool down_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_NODE_SERVICE_H_
