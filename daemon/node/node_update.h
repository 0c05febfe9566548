// One update on this node, from its first command to its end. What Mover is
// made of.
//
// A thread of its own (the driver) carries the commands out, in order, and
// sends all reports but RankSnapshotted. It never waits inside a group: each
// group has a thread that joins, moves and waits, so that a new epoch or the
// end is taken up at once and aborts them.

#ifndef WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_
#define WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/node/layouts.h"
#include "daemon/node/snapshot.h"
#include "daemon/node/store.h"
#include "transport/group.h"
#include "transport/landing.h"
#include "transport/memory.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

transport::Epoch FromProto(const v1::Epoch& epoch);

class NodeUpdate {
 public:
  // All pointers outlive the run.
  struct Context {
    std::string node;
    std::string cluster_id;
    std::function<void(v1::NodeReport)> report;
    absl::Duration progress_timeout;
    absl::Duration prepare_timeout;
    absl::Duration peer_deadline;
    absl::Duration report_interval;
    Store* store = nullptr;
    transport::Memory* memory = nullptr;
    transport::GroupFactory* groups = nullptr;
  };

  NodeUpdate(Context context, std::string update_id, int64_t version,
             std::shared_ptr<const NodeLayout> layout);
  // REQUIRES: End was called. Joins the driver.
  ~NodeUpdate();

  const std::string& update_id() const { return update_id_; }
  const std::string& model() const { return layout_->model; }
  const std::shared_ptr<const NodeLayout>& layout() const { return layout_; }

  // These return at once.
  void Prepare(const v1::PrepareUpdate& command);
  void Move(const v1::MoveUpdate& command);
  void Manifest(const v1::UpdateManifest& command);
  // The first call counts. `why` is what a rank that is being copied out is
  // told.
  void End(bool committed, absl::Status why);

  // On the caller's thread; see Mover::SnapshotRank. Does not report.
  absl::StatusOr<SnapshotResult> Snapshot(
      int32_t rank, const std::vector<SourceShard>& shards,
      const CancelFlag* cancel);

  // Every byte is here and agrees with the manifest.
  bool whole() const { return whole_.load(std::memory_order_acquire); }
  // The driver has ended: destruction does not wait.
  bool finished() const { return finished_.load(std::memory_order_acquire); }

 private:
  // Counts the ready frames of one landing without asking it.
  class FrameCount;

  struct FlowRun {
    v1::Flow flow;
    int self = 0;
    // Constant once the thread runs.
    std::unique_ptr<transport::Group> group;
    std::vector<std::shared_ptr<transport::Landing>> landings;
    std::thread thread;
    // Guarded by the run's mutex_.
    bool joined = false;
    bool done = false;
    absl::Status status;
    // Of the driver.
    bool reported = false;
  };

  // The groups of one epoch. Owned by the driver.
  struct Round {
    v1::PrepareUpdate command;
    std::vector<std::unique_ptr<FlowRun>> flows;
    // Guarded by the run's mutex_.
    bool closed = false;
    bool move = false;
    absl::Duration progress_timeout;
    // Of the driver.
    bool answered = false;
    bool prepared = false;
    bool verified = false;
    absl::Time prepared_time;
    std::set<std::string> blamed;
  };

  void Drive();
  void StartRound(const v1::PrepareUpdate& command);
  absl::Status FillRound(Round* round);
  void RunFlow(Round* round, FlowRun* flow);
  void CloseRound(const absl::Status& why);
  // What has happened since the last look, as reports.
  void LookAtFlows();
  void LookAtEdges();
  void LookAtBytes();
  void ReportProgress(bool last);
  void ReportFailure(const absl::Status& status);
  void AnswerPrepare(Round* round, const absl::Status& status);
  void Finish();

  // Room and landings for `buckets`, those that are there already as they are.
  absl::StatusOr<std::vector<std::shared_ptr<transport::Landing>>> Landings(
      const std::vector<int32_t>& buckets);
  absl::Status PinInStore();
  int64_t RepairedFrames() const;
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction.
  const Context context_;
  const std::string update_id_;
  const int64_t version_;
  const std::shared_ptr<const NodeLayout> layout_;

  std::atomic<bool> whole_{false};
  std::atomic<bool> finished_{false};
  CancelFlag cancel_;

  mutable absl::Mutex mutex_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<v1::PrepareUpdate> prepare_ ABSL_GUARDED_BY(mutex_);
  absl::optional<v1::MoveUpdate> move_ ABSL_GUARDED_BY(mutex_);
  bool has_manifest_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<int32_t, transport::Digest> manifest_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool committed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
  int snapshots_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<absl::Status> edge_failures_ ABSL_GUARDED_BY(mutex_);
  std::map<int32_t, std::shared_ptr<transport::Landing>> landings_
      ABSL_GUARDED_BY(mutex_);
  std::map<int32_t, std::unique_ptr<FrameCount>> counts_
      ABSL_GUARDED_BY(mutex_);
  std::vector<StorePin> pins_ ABSL_GUARDED_BY(mutex_);

  // Of the driver.
  std::unique_ptr<Round> round_;
  // Buckets that come, or came, from others.
  std::set<int32_t> received_;
  int64_t repaired_before_ = 0;
  int64_t progress_sent_ = -1;
  absl::Time next_progress_ = absl::InfinitePast();
  bool dry_ = false;

  std::thread driver_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_
