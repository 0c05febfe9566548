// STREAM on the node's side of its workers: who takes part in which update,
// which buckets they have been given and have taken.
//
//   Begin -> (plans, on the data loop) -> ApplyUpdate{stream} to each worker
//   Pass  -> StreamBucket -> StreamBucketTaken of all -> the slot is free
//   COMMIT: ApplyWorker -> EndStream{complete} -> WorkerApplied INSTALLED
//   Abort -> EndStream{complete=false} -> WorkerApplied: WRITING, and stays so;
//            or what it held before, where it had not begun
// A worker that does not take a bucket in time, or cannot, is given up: its
// replica leaves, the update goes on.
//
// A bucket that lies on a GPU, and that workers copy within it: the GPU's agent
// computes the digest, and not they, before they are told.
// With verify_source it is computed again when all have read: whatever has
// changed between is found. A worker that cannot open the memory, or has its
// tensors elsewhere, says so and is passed the bucket as any other.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_WORKER_STREAMS_H_
#define WEIGHTSYNC_DAEMON_SERVICE_WORKER_STREAMS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/stream_sink.h"
#include "daemon/service/node_context.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {

// The StreamSink may be called on any thread, all else on the node's loop.
class WorkerStreams final : public StreamSink {
 public:
  // The workers' sessions, by their ids.
  class Host {
   public:
    virtual ~Host() = default;
    // 0: not here.
    virtual uint64_t FindStreamWorker(const std::string& model,
                                      const v1::StreamWorker& worker) = 0;
    virtual const WantedTensors* TensorsOf(uint64_t worker) = 0;
    // The GPUs out of whose memory it can copy.
    virtual std::vector<std::string> ReachableBy(uint64_t worker) = 0;
    virtual std::string NameOf(uint64_t worker) = 0;
    virtual void Send(uint64_t worker, v1::WorkerCommand command) = 0;
    // Once for each layout.
    virtual void SendPlan(uint64_t worker, const v1::CopyPlan& plan) = 0;
    virtual absl::Status OfferStore(uint64_t worker,
                                    const std::string& arena_id) = 0;
    virtual absl::Status OfferMemory(uint64_t worker,
                                     const SourceRegion& region) = 0;
    virtual void GiveUp(uint64_t worker, const absl::Status& why) = 0;
  };

  // Both outlive this.
  WorkerStreams(const NodeContext* node, CopyPlanCache* plans, Host* host)
      : node_(*node), plans_(*plans), host_(*host) {}

  void Begin(StreamStart start,
             std::function<void(absl::Status, std::set<int32_t>)> started,
             std::function<void(int32_t, TensorDigests)> read,
             std::function<void()> direct_done) override;
  void Pass(const std::string& update_id, int32_t bucket,
            const v1::SlotLocation& where,
            std::function<void()> taken) override;
  void Abort(const std::string& update_id) override;
  void Close(const std::string& update_id) override;

  // What a stream's ApplyUpdate is called.
  static std::string CommandOf(const std::string& update_id) {
    return "stream/" + update_id;
  }

  // ---- On the loop ----
  void Taken(uint64_t worker, const v1::StreamBucketTaken& taken);
  // The worker has left.
  void Left(uint64_t worker);
  // Its part in the update is over and committed: true, and it counts no
  // longer. False when it has none. An error when it lacks a bucket.
  absl::StatusOr<bool> Complete(uint64_t worker, const std::string& update_id);
  // The version that the worker is about to write; 0: none of that update.
  int64_t VersionOf(uint64_t worker, const std::string& update_id) const;

 private:
  struct Member {
    std::set<int32_t> wants;
    std::set<int32_t> taken;
    // Buckets that it reads directly, in parts.
    struct Part {
      int32_t ordinal = 0;  // of the parameter
      std::string arena_id;
    };
    std::map<int32_t, std::vector<Part>> parts;
    std::map<int32_t, TensorDigests> digests;
    std::map<int32_t, size_t> parts_taken;
    // Those that it could not read so, and is passed.
    std::set<int32_t> returned;
  };
  struct Passing {
    std::set<uint64_t> waiting;
    std::function<void()> taken;
    Loop::TimerId timer = 0;
  };
  struct Stream {
    StreamStart start;
    bool begun = false;
    std::map<uint64_t, Member> members;
    std::set<int32_t> direct;
    // Of those on GPUs: what the GPU's agent has read.
    std::map<int32_t, TensorDigests> device_digests;
    std::map<int32_t, Passing> passing;
    std::map<int32_t, TensorDigests> read_digests;
    std::function<void(int32_t, TensorDigests)> read;
    std::function<void()> direct_done;
    Loop::TimerId direct_timer = 0;
  };
  // Found on the data loop.
  struct Plans;

  void Told(const std::string& update_id, const std::shared_ptr<Plans>& plans,
            std::function<void(absl::Status, std::set<int32_t>)> started);
  absl::Status Tell(uint64_t worker, const Stream& stream, const Plans& plans);
  void PassNow(const std::string& update_id, int32_t bucket,
               const v1::SlotLocation& where, std::function<void()> taken);
  void Settle(Stream* stream);
  void WatchDirect(const std::string& update_id);
  // Which of the candidates every worker that wants them copies straight.
  static void PlanDirect(const StreamStart& start, Plans* plans);
  // The digests of the buckets that lie on GPUs; those that have none are not
  // read directly.
  void DigestDevices(const StreamStart& start, Plans* plans);
  bool DirectWaits(const Stream& stream, uint64_t worker) const;

  const NodeContext& node_;
  CopyPlanCache& plans_;
  Host& host_;
  std::map<std::string, Stream> streams_;
  // By worker: memory on GPUs that it could not copy out of.
  std::map<uint64_t, std::set<std::string>> unreadable_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_WORKER_STREAMS_H_
