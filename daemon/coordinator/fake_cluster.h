// A coordinator with nodes, trainers and engines that exist in this process
// alone and do what they are told, for tests that step everything by hand.
//
// Nodes answer commands when Run() is called, in the order in which they came.
// `intercept` sees each command first: what it returns true for is swallowed.
// Engines keep the promise that everything here is about: a Resume that finds
// workers with different contents, or an Apply to an engine that runs and would
// write, is counted in `violations`.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_CLUSTER_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_CLUSTER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/journal_state.h"

namespace weightsync {
namespace daemon {

inline constexpr char kModel[] = "models/m";
inline std::string ReplicaName(const std::string& name) {
  return std::string(kModel) + "/replicas/" + name;
}
inline std::string VersionName(int number) {
  return std::string(kModel) + "/versions/" + std::to_string(number);
}

struct FakeEngine {
  std::string node;
  std::string incarnation;
  bool paused = false;
  std::vector<std::string> worker_nodes;
  std::vector<v1::InstalledState> workers;
  int pauses = 0;
  int resumes = 0;
  int applies = 0;
  bool atomic_swap = false;
  bool removable = false;
  // How often its workers were told to drop the model; and they cannot.
  int removes = 0;
  bool fail_remove = false;
  bool isolation_hold = false;
  // That its workers have said they reach.
  std::vector<std::string> device_uuids;
  std::vector<std::string> refused_command_ids;
  // What it was told under which id, in its whole life: a client answers a
  // command that it knows from memory.
  std::map<std::string, std::string> told;
  v1::PauseReplicaCommand last_pause;
  v1::ResumeReplica last_resume;
  // A worker whose memory is not what it says it is; -1: none.
  int damaged_worker = -1;
};

class FakeCluster {
 public:
  explicit FakeCluster(CoordinatorOptions options = CoordinatorOptions());

  // ---- The world ----
  void AddNode(const std::string& name);
  // Session "s{rank}"; each rank holds 4 rows of "w" [4 * world, 8] BF16.
  void AddRank(int rank, int world, const std::string& node);
  // One worker for each entry of `worker_nodes`, each wanting all of "w".
  void AddReplica(const std::string& name,
                  const std::vector<std::string>& worker_nodes);
  // Two ranks on n0, replicas r1 (n1) and r2 (two workers on n2).
  void AddStandard();
  // The same, of a model that both can go on without.
  void AddStandardAdapter();

  // ---- What happens ----
  // Publishes on one rank; the number of its call.
  int64_t Publish(int rank, int64_t version = 0,
                  const std::string& request_id = "",
                  const v1::UpdateOptions& options = v1::UpdateOptions(),
                  int64_t step = 0);
  void PublishAll(int world, int64_t version = 0);
  // Lets nodes answer until all is quiet.
  void Run();
  // Time passes, in ticks of `tick`; nodes send heartbeats and answer.
  void Pass(absl::Duration time, absl::Duration tick = absl::Seconds(1));
  void Disconnect(const std::string& node);
  // Same daemon, new stream: says hello and names what it has.
  void Reconnect(const std::string& node);
  // The daemon was started again: its store is empty, its clients register.
  void RestartNode(const std::string& node);
  // The coordinator ends without a word and is started on its journal; nodes
  // reconnect.
  void RestartCoordinator();
  // An engine registers again; what its workers hold is theirs to say. Not
  // `ready`: their node has no room for them yet.
  void Register(const std::string& replica, bool ready = true);
  void RegisterWorker(const std::string& name, int worker, bool ready = true);
  // A trainer process ends; another takes its place with AddRank.
  void LoseRank(int rank);
  // An operator's call; its number. Its answer, when there is one, is in
  // `answered`.
  int64_t Ask(AdminRequest call);
  const AdminDone* Answered(int64_t request) const;
  void LoseWorker(const std::string& replica, int worker);
  void Report(const std::string& node, v1::NodeReport report);
  void Do(Actions actions);
  // A command that was swallowed reaches its node after all.
  void Deliver(const std::string& node, const v1::NodeCommand& command) {
    Answer(node, command);
  }

  // ---- What came of it ----
  const v1::Reply* FindReply(int64_t correlation) const;
  v1::Version Version(const std::string& name = "latest") const;
  v1::Replica Replica(const std::string& name) const;
  int CountCommands(v1::NodeCommand::CommandCase kind) const;

  absl::Time now = absl::FromUnixSeconds(1000);
  std::unique_ptr<Coordinator> coordinator;
  JournalState journal;
  // In order: "send:<node>:<command>", "journal:<record>".
  std::vector<std::string> trace;
  std::vector<std::pair<std::string, v1::NodeCommand>> commands;
  std::vector<CloseNode> closed;
  std::vector<PrepareDone> prepared;
  std::vector<AdminDone> answered;
  // (node, update_id) that are pinned now; and was each holder so when asked to
  // send?
  std::set<std::pair<std::string, std::string>> pinned;
  std::map<std::string, FakeEngine> engines;
  std::function<bool(const std::string& node, const v1::NodeCommand&)>
      intercept;
  // Between a node's hello and what it names.
  std::function<void(const std::string& node)> after_hello;
  // Reads other bytes of a checkpoint than the others; empty: none.
  std::string damaged_reader;
  // Every report is delivered twice.
  bool twice = false;
  // Commands that are lost with the process: dies when one begins with this.
  std::string crash_before;
  bool crashed = false;
  // Weights that were written under a running engine, an engine that was
  // resumed with a mixture, or an id of a command that was another's.
  int violations = 0;
  // What nodes say their cluster is; empty: the coordinator's.
  std::string remembered_cluster;

 private:
  void Tell(FakeEngine* engine, const std::string& command_id,
            const std::string& what);

  struct Node {
    std::string incarnation;
    std::string stream;
    int64_t term = 0;
    std::deque<v1::NodeCommand> inbox;
    // By update: epoch, told to move, has the manifest, verified.
    struct Update {
      v1::Epoch epoch;
      std::string layout_id;
      int64_t version = 0;
      bool prepared = false;
      bool moving = false;
      bool manifest = false;
      bool whole = false;
      bool stream = false;
      bool fetch = false;
      bool load = false;
      std::vector<v1::StreamWorker> stream_workers;
      v1::UpdateManifest digests;
    };
    std::map<std::string, Update> updates;
  };
  struct Rank {
    std::string node;
    std::string session;
    int world = 0;
    int64_t publish_index = 0;
  };

  void Hello(const std::string& name);
  void Answer(const std::string& name, const v1::NodeCommand& command);
  void ClaimRank(int rank);
  void RegisterReplica(const std::string& name, const std::string& node);

  CoordinatorOptions options_;
  std::map<std::string, Node> nodes_;
  std::map<int, Rank> ranks_;
  std::map<int64_t, v1::Reply> replies_;
  // Publish calls: who waits for which reply.
  std::map<int64_t, int> calls_;
  int64_t next_correlation_ = 1;
  int next_stream_ = 1;
  int next_id_ = 1;
  int64_t next_request_ = 1;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_CLUSTER_H_
