// A cluster of real daemons on this machine, with trainers and engines in the
// test's own process.
#ifndef WEIGHTSYNC_TESTS_E2E_CLUSTER_H_
#define WEIGHTSYNC_TESTS_E2E_CLUSTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cc/replica.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "tests/e2e/processes.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace e2e {

// How long anything may take, with margin for a loaded machine.
inline constexpr absl::Duration kPatience = absl::Seconds(60);

class Cluster {
 public:
  Cluster() = default;
  ~Cluster();

  // Starts a daemon. The first one coordinates the others. Deadlines are short.
  // False, with the log printed, when it does not serve in time.
  bool StartNode(const std::string& node,
                 const std::vector<std::string>& flags = {});
  // Starts one again that has ended, at the same place, with the same flags.
  bool RestartNode(const std::string& node);
  // SIGKILL.
  void KillNode(const std::string& node);
  // SIGTERM; the exit code.
  absl::optional<int> EndNode(const std::string& node);

  Process* process(const std::string& node) {
    return nodes_.at(node).process.get();
  }
  // "unix:...".
  std::string address(const std::string& node) const;
  const TempDirectory& directory() const { return directory_; }

  // By way of the first node.
  absl::StatusOr<v1::Replica> GetReplica(const std::string& name);
  absl::StatusOr<v1::Version> GetVersion(const std::string& name);
  absl::StatusOr<v1::Node> GetNode(const std::string& name);
  // Of a registered model, and of a described one.
  absl::StatusOr<v1::PlanResponse> Plan(const v1::PlanRequest& request);
  bool WaitReplicaState(const std::string& replica, v1::Replica::State state,
                        absl::Duration timeout = kPatience);
  bool WaitNodeState(const std::string& node, v1::Node::State state,
                     absl::Duration timeout = kPatience);

  // Starts a program of the demo.
  std::unique_ptr<Process> Start(const std::string& name,
                                 std::vector<std::string> arguments);

 private:
  struct Node {
    std::vector<std::string> arguments;
    std::string ready;
    std::string listen;  // once it has served
    std::unique_ptr<Process> process;
  };

  bool Launch(Node* node);
  std::unique_ptr<v1::AdminService::Stub> Admin();

  TempDirectory directory_;
  std::string first_;
  std::map<std::string, Node> nodes_;
};

// "models/test" with three parameters of bf16; a version's bytes all have one
// value, so that a mix is seen at once.
std::vector<client::Tensor> TestParameters();

// All ranks of a trainer, FSDP-sharded.
class TestTrainer {
 public:
  // Fails the test where it cannot.
  TestTrainer(Cluster* cluster, const std::string& node, int ranks);
  // A rank on each of the nodes.
  TestTrainer(Cluster* cluster, const std::vector<std::string>& nodes);

  // Of the publishes from now on.
  void SetOptions(const v1::UpdateOptions& options) { options_ = options; }

  // Fills every rank's tensors with `value`, publishes from all ranks and
  // waits.
  absl::StatusOr<v1::Version> Publish(char value);
  // Without waiting for the outcome.
  absl::StatusOr<client::PublishResult> PublishOnly(char value);
  absl::StatusOr<v1::Version> Wait(const client::PublishResult& published);
  // One rank alone.
  absl::StatusOr<client::PublishResult> PublishRank(int rank, char value,
                                                    absl::Duration timeout);
  void CloseRank(int rank) { ranks_[rank].trainer->Close(); }

 private:
  struct Rank {
    std::unique_ptr<client::Trainer> trainer;
    std::vector<client::Tensor> shards;
  };
  std::vector<Rank> ranks_;
  v1::UpdateOptions options_;
};

// An engine of `workers` workers that each hold the rows of their part.
// Whenever it is resumed it checks that its memory is of one version.
class TestReplica {
 public:
  // With `swap` every worker has a spare set, to which the engine flips when it
  // is resumed.
  TestReplica(Cluster* cluster, const std::string& node,
              const std::string& name, int workers = 1, bool swap = false);
  // A worker on each of the nodes, the engine on the first.
  TestReplica(Cluster* cluster, const std::vector<std::string>& nodes,
              const std::string& name, bool swap = false);
  // The same by the addresses of their daemons, for another process.
  TestReplica(const std::vector<std::string>& addresses,
              const std::string& name, bool swap = false);
  ~TestReplica();

  // Waits until it serves memory that is all `value`.
  bool WaitServes(char value, absl::Duration timeout = kPatience);
  // The same, paused or not.
  bool WaitHolds(char value, absl::Duration timeout = kPatience);
  bool serving() const;
  // Bytes of two versions were seen while it served.
  bool SawMix() const;
  // A worker was about to write into what served.
  bool SawWriteWhileServing() const;
  // Makes pauses fail or last.
  void SetPause(absl::Status status, absl::Duration duration);
  // Flips one bit of what is served.
  void Damage();

  int resumes() const;
  int pauses() const;
  v1::PauseMode last_pause_mode() const;
  client::Worker* worker(int i) { return workers_[i].get(); }
  client::Replica* replica() { return replica_.get(); }

 private:
  // The value of all bytes that serve; -1 for a mix.
  int Value() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  struct Memory {
    std::vector<char> set[2];  // the second: spare
    int serving = 0;
    int next = 0;  // once it is resumed
  };

  mutable absl::Mutex mutex_;
  bool mix_ ABSL_GUARDED_BY(mutex_) = false;
  bool written_ ABSL_GUARDED_BY(mutex_) = false;
  bool serving_ ABSL_GUARDED_BY(mutex_) = true;
  int resumes_ ABSL_GUARDED_BY(mutex_) = 0;
  int pauses_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::PauseMode pause_mode_ ABSL_GUARDED_BY(mutex_) =
      v1::PAUSE_MODE_UNSPECIFIED;
  absl::Status pause_status_ ABSL_GUARDED_BY(mutex_);
  absl::Duration pause_duration_ ABSL_GUARDED_BY(mutex_);
  // Of each worker.
  std::vector<Memory> memory_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
  std::unique_ptr<client::Replica> replica_;
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_CLUSTER_H_
