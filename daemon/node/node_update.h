// One update on this node, from its first command to its end. What Mover is
// made of.
//
// A thread of its own (the driver) carries the commands out, in order, and
// sends all reports but RankSnapshotted. It never waits inside a group: each
// group has a thread that joins, moves and waits, so that a new epoch or the
// end is taken up at once and aborts them.
//
// Whole buckets lie in the store where this node is to have a copy: what its
// workers need (STAGE), and what its ranks have published (SNAPSHOT). Where it
// has none, buckets pass through slots: a flow is split into lanes, each with a
// group and at most one slot of its own, and a lane moves its buckets one by
// one:
//   source, IN_PLACE   packed from the rank's memory into the slot, sent
//   receiver, STREAM   received into the slot and sent on, then passed to the
//                      workers; the slot is used again when all have taken it
// A lane waits while its slot is in use, here or after it: the chain is as slow
// as its slowest worker, and no worker waits for another lane. Members agree on
// the lanes (PrepareUpdate.stream_slots). After a failed edge everything is
// passed again from the source; workers are not given what they have.
//
// Buckets that shall lie on a GPU (Placement): those of this node's ranks are
// packed there. What a group carries out of and into memory of that GPU
// (Group::PayloadDevice) is sent from where it was packed, and lands where it
// is to lie; so do slots of lanes, where the node's workers reach the GPU. Each
// flow decides when its group has joined. All else goes by way of host memory:
// it is copied there to be sent, part by part, beside the connection, or lands
// there and is copied to the GPU bucket by bucket. The update is VERIFIED here
// when everything is where it is to be, and its digest there is the right one.

#ifndef WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_
#define WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "daemon/node/checkpoints.h"
#include "daemon/node/device_copies.h"
#include "daemon/node/layouts.h"
#include "daemon/node/placement.h"
#include "daemon/node/snapshot.h"
#include "daemon/node/store.h"
#include "daemon/node/stream_sink.h"
#include "transport/group.h"
#include "transport/landing.h"
#include "transport/memory.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

transport::Epoch FromProto(const v1::Epoch& epoch);
absl::Duration DurationOr(bool present, const google::protobuf::Duration& d,
                          absl::Duration otherwise);

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
    // Null where no worker can take part in a STREAM.
    StreamSink* sink = nullptr;
    // Null where nothing can come by way of a checkpoint.
    Checkpoints* checkpoints = nullptr;
    // Null where there is no device store: both.
    const Placement* placement = nullptr;
    DeviceCopies* device_copies = nullptr;
    // Earlier runs of the same update that are ending: until they have, what
    // they reserved in the store is theirs to drop. Waited for before anything
    // is done; they are told to end, so that is bounded.
    std::vector<std::shared_ptr<NodeUpdate>> predecessors;
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
      int32_t rank, const std::vector<SourceShard>& shards, bool verify_source,
      const CancelFlag* cancel);

  // IN_PLACE: hands the rank's memory in, blocks until the digests of all of
  // its buckets are known, and answers them.
  absl::StatusOr<SnapshotResult> ReadInPlace(
      std::shared_ptr<const InPlaceSource> source, bool verify_source);
  // Blocks until the rank may change its memory: OK after Release or a commit.
  absl::Status WaitReleased(const CancelFlag* cancel);
  void Release();

  // Every byte is here and agrees with the manifest.
  bool whole() const { return whole_.load(std::memory_order_acquire); }
  // The driver has ended: destruction does not wait.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // REQUIRES: End was called, or it ends by itself.
  void AwaitFinished() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Counts the ready frames of one landing without asking it.
  class FrameCount;

  struct FlowRun {
    v1::Flow flow;
    int self = 0;
    // Of a lane; outlives the group that moves it.
    std::unique_ptr<StoreSlot> slot;
    // Constant once the thread runs. Null: buckets that this node's workers get
    // from its own ranks.
    std::unique_ptr<transport::Group> group;
    // Of a flow that moves as a whole; set when it has joined.
    std::vector<std::shared_ptr<transport::Landing>> landings;
    // Sent from host memory, while they lie on a GPU. Set as that.
    std::set<int32_t> staged;
    // By way of a checkpoint: no group.
    bool disk = false;
    // Of a lane.
    bool lane = false;
    std::vector<int32_t> buckets;
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
    // Constant after FillRound.
    bool stream = false;
    bool in_place = false;
    bool fetch = false;
    bool disk = false;
    bool load = false;
    // Guarded by the run's mutex_.
    std::string checkpoint_path;
    bool closed = false;
    bool move = false;
    absl::Duration progress_timeout;
    std::vector<v1::StreamWorker> stream_workers;
    // Of the driver.
    bool answered = false;
    bool prepared = false;
    bool verified = false;
    bool loaded = false;  // what was read was reported
    bool unfit = false;   // what is here is not what it should be: reported
    absl::Time prepared_time;
    std::set<std::string> blamed;
    // The answer to Prepare, and what came of the round, in order: each may be
    // lost on its way.
    absl::Status answer;
    std::vector<v1::NodeReport> outcomes;
  };

  // What the sink answers; outlives the run where a callback comes late.
  struct StreamState {
    absl::Mutex mutex;
    bool begun ABSL_GUARDED_BY(mutex) = false;
    absl::Status status ABSL_GUARDED_BY(mutex);
    std::set<int32_t> direct ABSL_GUARDED_BY(mutex);
    std::vector<std::pair<int32_t, TensorDigests>> reads ABSL_GUARDED_BY(mutex);
    bool direct_done ABSL_GUARDED_BY(mutex) = false;
  };

  void Drive();
  void StartRound(const v1::PrepareUpdate& command);
  // Whether nobody needs this fetch any more, or it has come to nothing; then
  // it is ended.
  bool FetchEnded() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FillRound(Round* round);
  absl::Status FillStore(Round* round);
  absl::Status FillFlows(Round* round);
  // Splits a flow into lanes, or makes one run of it.
  absl::Status AddFlow(Round* round, const v1::Flow& flow, int self);
  // The memory that a lane's buckets pass through; of the GPU `device`, where
  // all who have to do with it reach that.
  absl::Status TakeLaneSlot(const Round& round, FlowRun* flow,
                            const std::string& device);
  absl::Status MakeGroup(const v1::PrepareUpdate& command, FlowRun* run,
                         const std::string& group_id);
  // Where buckets pass through slots: see the top of the file.
  bool PacksIntoSlot(const Round& round, int self, int32_t bucket) const;
  bool PassesOn(const Round& round, int32_t bucket) const;
  absl::Status MoveWhole(Round* round, FlowRun* flow, absl::Duration patience);
  absl::Status AwaitChain(const Round& round, FlowRun* flow,
                          absl::Duration patience) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MoveLane(Round* round, FlowRun* flow, absl::Duration patience);
  absl::Status MoveBucket(Round* round, FlowRun* flow, int32_t bucket,
                          absl::Duration patience);
  // Buckets that this node has in an older update need no bytes.
  void FillFromBase(const Round& round, FlowRun* flow, absl::Duration patience);
  // A whole bucket, where `base` is found to have that digest; untouched
  // otherwise.
  void FillFrom(absl::Span<const char> base, const transport::Digest& digest,
                transport::Landing* landing);
  absl::Status FillFromSource(int32_t bucket, transport::Landing* landing,
                              absl::Duration patience);
  // What was read of a rank's memory: the first word counts, another one is
  // SOURCE_CHANGED.
  // `tensors`: the same by parameter.
  absl::Status NoteSource(int32_t bucket, const transport::Digest& digest,
                          const TensorDigests& tensors);
  // Tells the workers, once the memory that they may read directly is known.
  // `alone`: buckets that only workers of this node get.
  absl::Status BeginStream(Round* round, const std::vector<int32_t>& alone,
                           absl::Duration patience);
  // Until the workers know. The buckets that they read by themselves.
  absl::StatusOr<std::set<int32_t>> AwaitStream(absl::Duration patience);
  // Adds to *unread what some worker could not read, and is to be passed.
  absl::Status TakeDirectReads(const std::vector<int32_t>& buckets,
                               absl::Duration patience,
                               std::set<int32_t>* unread);
  void PassToWorkers(int32_t bucket, const v1::SlotLocation& where);
  void RunFlow(Round* round, FlowRun* flow);
  absl::Status RoundClosed() const;
  // ---- By way of a checkpoint: node_update_disk.cc ----
  void AddDiskFlow(Round* round, const std::set<int32_t>& received);
  absl::Status MoveFromDisk(Round* round, FlowRun* flow);
  absl::Status ReadLanding(const Round& round, const CheckpointData& data,
                           transport::Landing* landing);
  bool IsClosed(const Round& round) ABSL_LOCKS_EXCLUDED(mutex_);
  // What a load's source is found to hold.
  void ReportLoaded();
  void CloseRound(const absl::Status& why);
  // What has happened since the last look, as reports.
  void LookAtFlows();
  void LookAtEdges();
  void LookAtBytes();
  bool AllMoved() ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void ReportProgress(bool last);
  void ReportFailure(const absl::Status& status);
  // Kept, to be said again.
  void ReportOutcome(v1::NodeReport report);
  void AnswerPrepare(Round* round, const absl::Status& status);
  void Finish();

  // What is done with a bucket here, and so where it may lie.
  enum class Use {
    kPack,     // of a rank of this node
    kReceive,  // for workers of this node
    kSend,     // it is there
  };
  // Room for `buckets`, those that are there already as they are, and landings:
  // but for those that are to lie on a GPU and come from others, or go to them,
  // for which the flow that moves them makes some (Land).
  absl::StatusOr<std::vector<std::shared_ptr<transport::Landing>>> Landings(
      const std::vector<int32_t>& buckets, Use use);
  // ---- Buckets on GPUs: node_update_device.cc ----
  std::shared_ptr<transport::Landing> NewLanding(const BucketRoom& room) const;
  // The caller starts what it answers, without our lock.
  FrameCount* AddLanding(const BucketRoom& room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where the buckets of a flow land and are sent from, now that it is known
  // whether its group moves memory of a GPU, and of which (empty: of none).
  absl::Status Land(const Round& round, FlowRun* flow,
                    const std::string& device)
      ABSL_LOCKS_EXCLUDED(land_mutex_, mutex_);
  // In host memory, though they are to lie on a GPU; what a landing there has
  // of them so far is given up. `received`: they are to get there.
  absl::Status LandBeside(const std::vector<int32_t>& buckets, bool received);
  // What is read from files lands beside.
  absl::Status LandFromDisk(const std::vector<int32_t>& buckets);
  // Where a lane's slot may lie. Empty: in host memory.
  std::string SlotDevice(const Round& round, const FlowRun& flow,
                         const std::vector<int32_t>& buckets,
                         const std::string& device) const;
  // Of those of `buckets` whose landing is on a GPU: room to send them from.
  absl::Status StageForSending(const std::vector<int32_t>& buckets);
  // Copies it to where it is sent from, as far as it is not there.
  absl::Status FillStaged(int32_t bucket, transport::Landing* staged,
                          absl::Duration patience);
  // Of a fetch, on the node that has the bucket.
  absl::Status FillFromStore(transport::Landing* landing);
  // The thread that takes buckets to where they are to lie.
  void StartPlacing();
  void PlaceBuckets();
  absl::Status PlaceOnDevice(int32_t bucket, transport::Landing* landing);
  // What is not there yet.
  bool AllPlaced() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // An update of which bytes were on a GPU whose agent has ended.
  absl::Status CheckNotLost();
  absl::Status PinInStore();
  int64_t RepairedFrames() const;
  void Wake() ABSL_LOCKS_EXCLUDED(mutex_);
  void SetFinished() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after construction, but for predecessors.
  Context context_;
  const std::string update_id_;
  const int64_t version_;
  const std::shared_ptr<const NodeLayout> layout_;

  std::atomic<bool> whole_{false};
  std::atomic<bool> finished_{false};
  CancelFlag cancel_;

  // One flow after the other decides: they may have buckets in common.
  absl::Mutex land_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
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
  // Rooms on GPUs of which no flow has said yet how they are used.
  std::map<int32_t, BucketRoom> undecided_ ABSL_GUARDED_BY(mutex_);
  // Whose landing is on a GPU, and on which; and what they are sent from, where
  // that is in host memory.
  std::map<int32_t, std::string> on_device_ ABSL_GUARDED_BY(mutex_);
  std::map<int32_t, std::shared_ptr<transport::Landing>> staged_
      ABSL_GUARDED_BY(mutex_);
  // Whose landing is not where they are to be, or not everywhere.
  std::set<int32_t> to_place_ ABSL_GUARDED_BY(mutex_);
  std::set<int32_t> placed_ ABSL_GUARDED_BY(mutex_);
  absl::Status place_status_ ABSL_GUARDED_BY(mutex_);
  std::vector<StorePin> pins_ ABSL_GUARDED_BY(mutex_);
  // Buckets that have passed through here, with the digest of what did.
  std::map<int32_t, transport::Digest> passed_ ABSL_GUARDED_BY(mutex_);
  // What this node's workers have taken; lanes of every epoch look at it.
  std::set<int32_t> taken_ ABSL_GUARDED_BY(mutex_);
  int64_t from_base_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int32_t, std::shared_ptr<const InPlaceSource>> sources_
      ABSL_GUARDED_BY(mutex_);
  std::map<int32_t, transport::Digest> source_digests_ ABSL_GUARDED_BY(mutex_);
  std::map<int32_t, TensorDigests> source_tensors_ ABSL_GUARDED_BY(mutex_);
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  // Buckets that a lane of the newest epoch reads from ranks of this node.
  bool knows_lanes_ ABSL_GUARDED_BY(mutex_) = false;
  bool stream_mode_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<int32_t> lane_buckets_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<StreamState> stream_ ABSL_GUARDED_BY(mutex_);

  // Of the driver.
  std::unique_ptr<Round> round_;
  // Buckets that come, or came, from others.
  std::set<int32_t> received_;
  bool receives_ = false;
  int64_t repaired_before_ = 0;
  int64_t progress_sent_ = -1;
  absl::Time next_progress_ = absl::InfinitePast();
  bool dry_ = false;
  bool fetch_ = false;

  // Started by the driver.
  std::thread placer_;
  std::thread driver_;
};

// Called under the landing's lock: wakes the driver, under whose lock nobody
// calls a landing.
class NodeUpdate::FrameCount final : public transport::Landing::Watcher {
 public:
  FrameCount(NodeUpdate* run, std::shared_ptr<transport::Landing> landing)
      : run_(run),
        landing_(std::move(landing)),
        frames_(landing_->frame_count()) {}

  void OnFramesReady(absl::Span<const uint32_t> frames) override {
    const int64_t count = static_cast<int64_t>(frames.size());
    if (ready_.fetch_add(count) + count == frames_) run_->Wake();
  }
  void OnFailed(const absl::Status&) override { run_->Wake(); }

  void Start() { landing_->AddWatcher(this); }
  void Stop() { landing_->RemoveWatcher(this); }
  bool complete() const { return ready_.load() == frames_; }
  int64_t size() const { return landing_->size(); }
  int64_t ready_bytes() const {
    return std::min(ready_.load() * transport::Landing::kFrameBytes,
                    landing_->size());
  }

 private:
  NodeUpdate* const run_;
  const std::shared_ptr<transport::Landing> landing_;
  const int64_t frames_;
  std::atomic<int64_t> ready_{0};
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_NODE_UPDATE_H_
