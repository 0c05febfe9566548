// What the coordinator remembers of nodes, models, updates, replicas and of
// what runs for them: plain data, with what can be said of it by itself.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_CORE_RUNS_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_CORE_RUNS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "daemon/coordinator/actions.h"
#include "daemon/coordinator/checkpoint_machine.h"
#include "daemon/coordinator/convert.h"
#include "daemon/coordinator/known_layout.h"
#include "daemon/coordinator/publish_book.h"
#include "daemon/coordinator/replica_machine.h"
#include "daemon/coordinator/update_machine.h"
#include "schedule/describe.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// PublishCall::options for people.
std::string ShowOptions(const std::string& options);

struct NodeRun {
  std::string name;
  v1::Hello hello;
  // Empty: its stream broke, and it is lost after `lost_time`.
  std::string stream;
  bool ready = false;  // HelloDone was said on this stream
  bool lost = false;
  absl::Time connect_time;
  absl::Time last_report;
  absl::Time last_heartbeat;
  absl::Time lost_time;
  v1::MemoryUse memory;
  // Whole updates in its store, newest first: (model, update_id).
  std::vector<std::pair<std::string, std::string>> held;
  // Buckets that were fetched to it beyond what the layout says it receives, by
  // update_id.
  std::map<std::string, std::set<uint32_t>> fetched;
  // Takes no new replicas and no updates, and is no holder.
  bool draining = false;
  // By model: layouts that were defined on this stream and that its LayoutBook
  // still keeps, oldest first.
  std::map<std::string, std::deque<std::string>> layouts;
  // Ranks, replicas and workers named on this stream; see HelloDone.
  std::set<std::string> said;

  bool Holds(const std::string& update_id) const;
};

// What is known of an update that was committed; update_id empty: none.
struct CommittedUpdate {
  std::string update_id;
  int64_t version = 0;
  int64_t step = 0;
  std::string layout_id;
  int64_t term = 0;
  // Null: the layout cannot be computed any more (or an adopted cluster's is
  // not known): nothing can be installed from it.
  std::shared_ptr<const KnownLayout> layout;
  // How it is to be installed.
  v1::UpdateOptions options;
  std::vector<v1::BucketDigest> manifest;
  std::vector<v1::TensorDigest> tensors;
  // No holder of its bytes is left.
  bool lost = false;

  // Whose stores have its bytes: sources (SNAPSHOT), receivers (STAGE).
  bool SourcesHold() const {
    return options.publish_mode() != v1::PUBLISH_MODE_IN_PLACE;
  }
  bool ReceiversHold() const {
    return options.update_mode() != v1::UPDATE_MODE_STREAM;
  }
};

// What the store of a node has of an update. Both outlive it.
class Holdings {
 public:
  Holdings(const NodeRun& node, const CommittedUpdate& update);
  const NodeRun& node() const { return *node_; }
  bool any() const { return any_; }
  bool Has(uint32_t bucket) const;

 private:
  const NodeRun* node_;
  const CommittedUpdate* update_;
  bool any_;
  // Null: nothing was fetched to it.
  const std::set<uint32_t>* fetched_ = nullptr;
  // In the layout; -1: it is not there.
  int32_t index_ = -1;
};

struct UpdateRun {
  std::string model;
  std::string update_id;
  UpdateKey key = 0;
  v1::UpdateOptions options;
  std::shared_ptr<const KnownLayout> layout;
  UpdateConfig config;
  UpdateState machine;
  // What GetVersion shows; phases are added as they end.
  v1::Version record;
  std::string phase_name;
  absl::Time phase_begin;
  absl::Time begin;
  std::map<int32_t, int> rank_index;
  std::map<std::string, int> replica_index;  // by short name
  std::vector<v1::BucketDigest> manifest;
  std::map<int32_t, v1::Digest> tensors;  // by ordinal, summed over ranks
  // Null for one that an earlier term committed.
  std::shared_ptr<const schedule::PolicyPlan> plan;
  // By phase, as PhaseTime names them.
  std::map<std::string, absl::Duration> predicted;
  std::vector<v1::Flow> flows;
  int64_t flows_epoch = -1;
  std::string group_secret;
  int64_t publish_index = 0;
  bool recovered = false;
  // By way of disk: key into checkpoints_; empty: not begun, or of a load.
  std::string checkpoint;
  // Nodes that wait for it to be begun, and to be complete.
  std::set<int> disk_preparing;
  std::set<int> disk_moving;
};

// A checkpoint that nodes write, for SaveVersion or for an update.
struct CheckpointRun {
  std::string id;
  std::string model;
  // What is written.
  std::string update_id;
  int64_t version = 0;
  std::shared_ptr<const KnownLayout> layout;
  std::string path;
  std::string temporary;
  std::string marker;
  std::string template_path;
  bool overwrite = false;
  int64_t max_shard_bytes = 0;
  struct Writer {
    std::string node;
    std::vector<int32_t> buckets;
    // Of the last command; empty: it is answered.
    std::string command_id;
    v1::NodeCommand command;
  };
  std::vector<Writer> writers;
  CheckpointState machine;
  absl::Time begin;
  int64_t written_bytes = 0;
  int shard_count = 0;
  // The update that comes by it. Else it is a SaveVersion's.
  bool of_update = false;
};

// A LoadVersion that is not an update yet.
struct LoadRun {
  std::string id;
  v1::LoadVersionRequest call;
  v1::UpdateOptions options;
  std::string path;
  // Who reads the headers; what they say, when it has.
  std::string node;
  bool read = false;
  std::vector<v1::Parameter> parameters;
  absl::Time begin;
  absl::Time deadline;
};

struct ReplicaRun {
  std::string model;
  std::string name;
  std::string incarnation;
  ReplicaState machine;
  // A late join, repair, rollback or removal (kRemoval) under way: this update
  // is being installed.
  UpdateKey installing = 0;
  // Its nodes lacked bytes of that when it was last looked, and nothing has
  // come to them since.
  bool lacks = false;
  // It was tried for this one, in vain: not again.
  UpdateKey given_up = 0;
  // Fetches to its nodes that failed one after the other, and when to try again
  // at the earliest.
  int fetch_failures = 0;
  absl::Time not_before = absl::InfinitePast();
  // What the engine said that its pause did.
  std::string pause_detail;
  // Newest last.
  std::deque<v1::ReplicaTimes> history;
  v1::Failure last_failure;
  // Nodes of its that are away, with when each was last heard of. What ran
  // there may run on, with `may_serve`, for sentences.
  std::map<std::string, absl::Time> away;
  std::string may_serve;
  // Set while it is not complete after it had been.
  bool lost = false;
  absl::Time lost_time;
  // Nobody of it has been here since, whether it was complete before or not.
  absl::Time empty_since = absl::InfiniteFuture();
};

// An update on its way from holders to nodes that lack it.
struct FetchRun {
  UpdateKey update = 0;
  CommittedUpdate of;
  int64_t epoch = 0;
  std::string secret;
  // [holder, target] with the buckets, as told.
  std::vector<v1::Flow> flows;
  std::set<std::string> holders;
  // Who has yet to get all of it, and who has it.
  std::set<std::string> targets;
  std::set<std::string> done;
  // Who has yet to answer PrepareUpdate.
  std::set<std::string> preparing;
  bool moving = false;
  absl::Time deadline;
  std::map<std::string, int64_t> received_bytes;
};

// A call of an operator that waits for something.
struct AdminWait {
  int64_t request = 0;
  AdminRequest call;
  std::string model;
  std::string replica;
  UpdateKey update = 0;
  absl::Time deadline;
  // VerifyReplica: who has answered.
  std::string command_id;
  std::map<int, v1::WorkerDigests> digests;
  // SaveVersion: key into checkpoints_. LoadVersion: LoadRun::id, until it is
  // `update`.
  std::string job;
};

// A Prepare that nodes have yet to answer.
struct PrepareJob {
  std::vector<std::pair<int64_t, absl::Time>> requests;  // number, deadline
  std::string update_id;
  int64_t epoch = 0;
  std::set<std::string> waiting;  // nodes
  absl::Time begin;
  v1::PrepareResponse response;
};

// Ended updates of a model that a node which comes back is told about.
inline constexpr int kEndsTold = 4;

struct ModelRun {
  std::string name;
  PublishBook book{&ShowOptions};
  // Oldest first; at most two: the one that is delivered, and the one behind.
  std::vector<std::unique_ptr<UpdateRun>> updates;
  // Oldest first, at most kOlderCommits + 1.
  std::deque<CommittedUpdate> commits;
  // The rollback that holds the model; no update_id: none.
  std::string held_update_id;
  // Replicas that an operator keeps paused, present or not.
  std::set<std::string> held_replicas;
  // Taken out of its engines, and nothing was committed since.
  bool removed = false;
  // Replicas that the journal names and that have not come in this term.
  std::set<std::string> unseen_replicas;
  std::unique_ptr<FetchRun> fetch;
  // (node, update_id) that were told to keep it.
  std::set<std::pair<std::string, std::string>> pins;
  // Newest last.
  std::deque<v1::Version> ended;
  // Of those that were deleted, or removed with the model: nodes that come back
  // are told so much still.
  std::deque<v1::EndUpdate> forgotten;
  int64_t epoch = 0;
  std::map<std::string, ReplicaRun> replicas;
  std::unique_ptr<PrepareJob> prepare;
  // In the order in which they came.
  std::vector<std::unique_ptr<LoadRun>> loads;
  RecentLayouts layouts;

  // The newest committed one; no update_id: none.
  const CommittedUpdate& Newest() const;
  const CommittedUpdate* FindCommit(const std::string& update_id) const;
  // Short names of the replicas that are known and not whole now.
  std::vector<std::string> AbsentReplicas() const;
  // What replicas shall have: what a rollback holds, else the newest; null:
  // nothing, or nobody has its bytes any more.
  const CommittedUpdate* Wanted() const;
  // Null: none with that id runs.
  UpdateRun* FindUpdate(const std::string& update_id) const;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_CORE_RUNS_H_
