// A coordinator that does what the test says: nodes are driven by hand through
// node.proto, with real daemons and the client library at the other ends. For
// what a node must do by itself, and for orders of events that a coordinator
// gives only by chance.

#ifndef WEIGHTSYNC_TESTS_E2E_HAND_COORDINATOR_H_
#define WEIGHTSYNC_TESTS_E2E_HAND_COORDINATOR_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "weightsync/v1/node.grpc.pb.h"

namespace weightsync {
namespace e2e {

class HandCoordinator final : public v1::NodeService::Service {
 public:
  HandCoordinator();
  ~HandCoordinator() override;

  // "host:port".
  std::string address() const;

  // Registrations are taken at once; PublishArrived waits for Open. Everything
  // else is kept for WaitFor.
  // The next report of the node, from now or before, for which `wanted` is
  // true; it is taken out. One without anything set, and a test failure, when
  // none comes.
  v1::NodeReport WaitFor(
      const std::string& node,
      const std::function<bool(const v1::NodeReport&)>& wanted,
      absl::Duration timeout = absl::Seconds(30));
  // The same, left where it is and without a test failure.
  bool Has(const std::string& node,
           const std::function<bool(const v1::NodeReport&)>& wanted);
  void Send(const std::string& node, v1::NodeCommand command);
  // The address at which the node takes weights.
  std::string DataAddress(const std::string& node);

  // All nodes lose the stream, and are not let in until Return, which raises
  // the term.
  void Leave();
  void Return();
  int64_t term();

  // The layout of everything that has registered for `model`, in the order of
  // the registrations, sent to `nodes`.
  v1::DefineLayout Define(const std::string& model, int64_t bucket_bytes,
                          const std::vector<std::string>& nodes);
  // Waits for a publish of every rank of the layout and opens it.
  void OpenPublish(const v1::DefineLayout& define, const std::string& update_id,
                   int64_t version);
  // Waits for the ranks' digests and makes the manifest.
  v1::UpdateManifest Manifest(const v1::DefineLayout& define,
                              const std::string& update_id);

  // Commands about one replica or worker of what has registered.
  v1::NodeCommand PauseOf(const std::string& replica,
                          const std::string& command_id,
                          const std::string& update_id);
  v1::NodeCommand ResumeOf(const std::string& replica,
                           const std::string& command_id,
                           const std::string& update_id);
  v1::NodeCommand ApplyOf(const v1::DefineLayout& define,
                          const std::string& replica, int worker,
                          const std::string& update_id, int64_t version,
                          const std::string& command_id);

 private:
  using Stream = grpc::ServerReaderWriter<v1::NodeCommand, v1::NodeReport>;

  struct Node {
    Stream* stream = nullptr;
    grpc::ServerContext* context = nullptr;
    std::string data_address;
    std::deque<v1::NodeReport> reports;
  };

  grpc::Status Connect(grpc::ServerContext* context, Stream* stream) override;
  void Answer(const std::string& node, const v1::NodeReport& report)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reply(const std::string& node, v1::Reply reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  absl::Mutex mutex_;
  bool away_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t term_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<std::string, Node> nodes_ ABSL_GUARDED_BY(mutex_);
  // By rank; by replica and index.
  std::map<int, std::pair<std::string, v1::RankShards>> ranks_
      ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::RegisterReplica> replicas_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, int>,
           std::pair<std::string, v1::RegisterWorker>>
      workers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_HAND_COORDINATOR_H_
