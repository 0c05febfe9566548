// The node's part in moving updates: it reserves room, joins the groups of the
// flows it is in, sends, receives, compares with the manifest and reports.
//
// The commands are those of the stream between daemons (node.proto), in its
// order; each returns at once, and what comes of it is reported through
// Options::report:
//   PrepareUpdate  -> UpdatePrepared, with the failure if there is one
//   MoveUpdate     -> UpdateProgress while bytes come in, at most 5 a second
//   UpdateManifest -> (compared as soon as everything is there)
//                  -> UpdateVerified: every bucket that this node needs or is
//                  the
//                     source of is complete and agrees with the manifest; or
//                     with a failure and the edge, when a group fails. A node
//                     reports the failure of an edge even after it has
//                     verified: somebody behind it may lack bytes.
//   EndUpdate      -> groups are left; the store keeps or drops the bytes
//   PinUpdate      -> the store keeps what it has of an update, or need not
//   DropUpdate     -> the store gives it up
//   ReleaseSources -> ranks that publish IN_PLACE may change their tensors
// PrepareUpdate.fetch is for an update that is committed: who holds it sends it
// from the store, who receives it keeps it as if it had been there from the
// start. It ends by itself when the bytes are there; EndUpdate ends it early.
//
// A rank's tensors come in through SnapshotRank, which may be called before,
// while or after the update is prepared (it is reported as RankSnapshotted).
//
// PrepareUpdate again with a higher epoch leaves the groups of the old one and
// joins the new ones over the same landings: frames that are here stay. A
// command of an older epoch is refused (STALE_EPOCH) or ignored.

#ifndef WEIGHTSYNC_DAEMON_NODE_MOVER_H_
#define WEIGHTSYNC_DAEMON_NODE_MOVER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/node/device_copies.h"
#include "daemon/node/layouts.h"
#include "daemon/node/placement.h"
#include "daemon/node/snapshot.h"
#include "daemon/node/store.h"
#include "daemon/node/stream_sink.h"
#include "transport/group.h"
#include "transport/memory.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

class Checkpoints;
class NodeUpdate;

// What a rank gives to SnapshotRank.
struct RankSource {
  std::string model;
  std::string update_id;
  int64_t version = 0;
  std::string layout_id;
  int32_t rank = 0;
  std::vector<SourceRegion> regions;
  google::protobuf::RepeatedPtrField<v1::TensorShard> shards;
  // Released when the copy has ended: keeps the regions mapped.
  std::shared_ptr<const void> keep_alive;
  // Cancelled when the rank is lost. Never null.
  std::shared_ptr<CancelFlag> cancel;
  // PUBLISH_MODE_IN_PLACE: nothing is copied ahead, and the tensors stand still
  // until SnapshotRank returns.
  bool in_place = false;
  // Read everything twice and compare.
  bool verify_source = false;
};

// Thread-safe. A thread for each update that runs, and one for each group.
class Mover {
 public:
  struct Options {
    // This node's name.
    std::string node;
    // Takes reports for the coordinator; called on threads of the mover without
    // any lock, and must not block for long. Reports of one update come in the
    // order in which things happened.
    std::function<void(v1::NodeReport)> report;
    // Where nothing else says it (MoveUpdate.progress_timeout is absent).
    absl::Duration progress_timeout = absl::Seconds(15);
    absl::Duration prepare_timeout = absl::Seconds(30);
    // A peer of which nothing is heard for so long is lost.
    absl::Duration peer_deadline = absl::Seconds(10);
    absl::Duration report_interval = absl::Milliseconds(200);
  };

  // All but `options` outlive the mover.
  Mover(Options options, LayoutBook* layouts, Store* store,
        transport::Memory* memory, transport::GroupFactory* groups);
  // As Shutdown.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  // The workers of this node, for STREAM; outlives the mover's last command.
  // Before the first one.
  void SetSink(StreamSink* sink);

  // For updates by way of a checkpoint; outlives the mover. Before the first
  // command.
  void SetCheckpoints(Checkpoints* checkpoints);

  // For a store that has buckets on GPUs; both outlive the mover. Before the
  // first command.
  void SetDeviceStore(const Placement* placement, DeviceCopies* copies);

  // Before the first PrepareUpdate: from Welcome.
  void SetClusterId(const std::string& cluster_id);

  void PrepareUpdate(const v1::PrepareUpdate& command);
  void MoveUpdate(const v1::MoveUpdate& command);
  void UpdateManifest(const v1::UpdateManifest& command);
  void EndUpdate(const v1::EndUpdate& command);
  void PinUpdate(const v1::PinUpdate& command);
  void DropUpdate(const v1::DropUpdate& command);
  void ReleaseSources(const v1::ReleaseSources& command);

  // Reserves the rank's buckets and copies the tensors into them, on the
  // caller's thread and those of the memory. Returns when the rank may change
  // its tensors. Reports RankSnapshotted, with the failure on an error (which
  // is also returned):
  //   those of ResolveShards, TakeSnapshot and Store::Reserve; NOT_FOUND
  //   (LAYOUT_UNKNOWN); ABORTED with the update's own reason when it was ended
  //   meanwhile; ABORTED (SOURCE_CHANGED).
  // IN_PLACE: reports RankSnapshotted when all of the rank's bytes have been
  // read once, and returns after ReleaseSources or the end.
  absl::StatusOr<SnapshotResult> SnapshotRank(const RankSource& source);

  // The coordinator is lost: every update that is not whole here is given up,
  // with `why`; those that are whole stay in the store, INCOMING, until
  // EndUpdate says what became of them.
  void AbandonUpdates(const absl::Status& why);

  // Ends every update with UNAVAILABLE (SHUTTING_DOWN), in bounded time: at
  // return no thread of the mover runs and no landing is touched. Later
  // commands are ignored.
  void Shutdown();

 private:
  // The run of an update, made when there is none. Null, with *status, when the
  // update has ended, the layout is unknown or the mover is shut down.
  // `key`: the update_id, but for fetches from here. `again`: of an update
  // that has ended before.
  std::shared_ptr<NodeUpdate> FindOrMake(const std::string& key,
                                         const std::string& update_id,
                                         int64_t version,
                                         const std::string& layout_id,
                                         bool again, absl::Status* status);
  // By what a run is found. Several nodes may fetch one update from here at the
  // same time, each in an epoch of its own.
  std::string KeyOf(const v1::PrepareUpdate& command) const;
  std::shared_ptr<NodeUpdate> Find(const std::string& update_id);
  // All of an update.
  std::vector<std::shared_ptr<NodeUpdate>> RunsOf(const std::string& update_id);
  // Takes the run out and has it end.
  void EndRun(std::shared_ptr<NodeUpdate> run, bool committed,
              const absl::Status& why);
  // Remembers why an update ended, for ranks that come late.
  void Remember(const std::string& update_id, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Lets go of runs whose drivers have ended.
  void Reap();
  // Ends what PinUpdate began; nothing where it is not pinned.
  void Unpin(const std::string& update_id) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReportPrepareFailure(const v1::PrepareUpdate& command,
                            const absl::Status& status);

  // Constant after construction.
  const Options options_;
  LayoutBook* const layouts_;
  Store* const store_;
  transport::Memory* const memory_;
  transport::GroupFactory* const groups_;

  absl::Mutex mutex_;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::string cluster_id_ ABSL_GUARDED_BY(mutex_);
  StreamSink* sink_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Checkpoints* checkpoints_ ABSL_GUARDED_BY(mutex_) = nullptr;
  const Placement* placement_ ABSL_GUARDED_BY(mutex_) = nullptr;
  DeviceCopies* device_copies_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::flat_hash_map<std::string, std::shared_ptr<NodeUpdate>> runs_
      ABSL_GUARDED_BY(mutex_);
  // Told to end, and not done yet.
  std::vector<std::shared_ptr<NodeUpdate>> ending_ ABSL_GUARDED_BY(mutex_);
  // Newest last.
  std::deque<std::pair<std::string, absl::Status>> ended_
      ABSL_GUARDED_BY(mutex_);
  // By model.
  absl::flat_hash_map<std::string, transport::Epoch> newest_epochs_
      ABSL_GUARDED_BY(mutex_);
  // The coordinator's, by update_id.
  absl::flat_hash_map<std::string, StorePin> pins_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_MOVER_H_
