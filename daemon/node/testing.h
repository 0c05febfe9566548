// Clusters of the data side in one process, for tests: nodes that move real
// bytes over loopback, a model whose every element is known, and a stand-in for
// the coordinator.

#ifndef WEIGHTSYNC_DAEMON_NODE_TESTING_H_
#define WEIGHTSYNC_DAEMON_NODE_TESTING_H_

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
#include "daemon/node/checkpoints.h"
#include "daemon/node/copy_plan.h"
#include "daemon/node/device_copies.h"
#include "daemon/node/fake_gpus.h"
#include "daemon/node/layouts.h"
#include "daemon/node/mover.h"
#include "daemon/node/placement.h"
#include "daemon/node/snapshot.h"
#include "daemon/node/store.h"
#include "daemon/node/stream_sink.h"
#include "transport/fault/fault_policy.h"
#include "transport/host/copy_pool.h"
#include "transport/host/host_memory.h"
#include "transport/tcp/endpoint.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/replica.pb.h"

namespace weightsync {
namespace daemon {
namespace testing {

// Long enough for a loaded machine; a test that works never waits for it.
constexpr absl::Duration kDeadline = absl::Seconds(30);

// A tensor as its trainer has it: every byte differs between seeds.
std::string TensorBytes(const v1::Parameter& parameter, uint64_t seed);

// `box` of a tensor, dense.
std::string BoxBytes(const v1::Parameter& parameter, const std::string& tensor,
                     const v1::Box& box);

v1::Parameter MakeParameter(const std::string& name, v1::DType dtype,
                            const std::vector<int64_t>& shape);
v1::Box MakeBox(const std::vector<int64_t>& offset,
                const std::vector<int64_t>& extent);

// Builds a DefineLayout: catalog, nodes, ranks with FSDP shards, workers.
class ModelBuilder {
 public:
  explicit ModelBuilder(std::string model = "models/m") {
    define_.set_model(std::move(model));
    define_.set_bucket_bytes(64 << 10);
  }
  ModelBuilder& BucketBytes(int64_t bytes);
  // A mixture of dtypes, shapes and sizes, of about `scale` times 300 KB.
  ModelBuilder& SmallModel(int64_t scale = 1);
  ModelBuilder& Parameter(const v1::Parameter& parameter);
  // Ranks 0 .. count-1 on `node`; each holds ceil(rows / count) rows of every
  // parameter, the last ones fewer or none. Scalars are rank 0's.
  ModelBuilder& FsdpRanks(const std::string& node, int count);
  // Wants everything.
  ModelBuilder& Worker(const std::string& node);
  // Wants part `index` of `count` along the last dimension of matrices (rows of
  // vectors that do not divide are whole).
  ModelBuilder& TensorParallelWorker(const std::string& node, int index,
                                     int count);
  // With the layout_id that the coordinator would name.
  v1::DefineLayout Build();

 private:
  int Node(const std::string& name);

  v1::DefineLayout define_;
  std::map<std::string, int> nodes_;
};

// The tensors of one version of the model.
class ModelBytes {
 public:
  ModelBytes(const v1::DefineLayout& define, uint64_t seed);
  const std::string& tensor(int ordinal) const { return tensors_[ordinal]; }
  // Makes another version of it: one byte is different.
  void Change(int ordinal, size_t byte) { tensors_[ordinal].at(byte) ^= 1; }

 private:
  std::vector<std::string> tensors_;
};

// One rank's memory: its shards, one after the other in one region.
struct RankMemory {
  std::string bytes;
  google::protobuf::RepeatedPtrField<v1::TensorShard> shards;
};
RankMemory MakeRankMemory(const v1::DefineLayout& define,
                          const ModelBytes& model, int rank);

// What worker `index` of the layout would register.
WantedTensors WantedBy(const v1::DefineLayout& define, int index);

class TestNode : public Store::Observer {
 public:
  struct Options {
    int64_t budget_bytes = 64 << 20;
    int keep_updates = 2;
    transport::FaultPolicy* faults = nullptr;
    absl::Duration prepare_timeout = absl::Seconds(20);
    absl::Duration peer_deadline = absl::Seconds(5);
    // Of Checkpoints; empty: none.
    std::string checkpoint_root;
    std::string state_dir;
    // Of each of its GPUs; 0: buckets lie in host memory.
    int64_t device_budget_bytes = 0;
    // The GPU between whose memory and that of other nodes bytes go; empty:
    // they go over TCP. `any_way`: where a neighbour has none, over TCP.
    std::string payload_device;
    bool any_way = false;
  };

  explicit TestNode(std::string name) : TestNode(std::move(name), Options()) {}
  TestNode(std::string name, Options options);
  ~TestNode() override;

  const std::string& name() const { return name_; }
  LayoutBook& layouts() { return layouts_; }
  Store& store() { return *store_; }
  // Of the store.
  int64_t UsedBytes() const;
  Mover& mover() { return *mover_; }
  Checkpoints& checkpoints() { return *checkpoints_; }
  transport::HostMemory& memory() { return memory_; }
  FakeGpus& gpus() { return gpus_; }
  Placement& placement() { return placement_; }
  DeviceCopies& device_copies() { return *device_copies_; }
  std::string address() const { return endpoint_->address(); }

  // The first report, from now or before, for which `wanted` is true; it is
  // taken out. One without anything set, and a test failure, after `timeout`.
  v1::NodeReport WaitFor(std::function<bool(const v1::NodeReport&)> wanted,
                         absl::Duration timeout = kDeadline);
  v1::UpdatePrepared WaitPrepared(absl::Duration timeout = kDeadline);
  v1::UpdateVerified WaitVerified(absl::Duration timeout = kDeadline);
  // Takes out all reports so far.
  std::vector<v1::NodeReport> TakeReports();

  // Snapshots a rank on the caller's thread.
  absl::StatusOr<SnapshotResult> Snapshot(
      const v1::DefineLayout& define, const std::string& update_id,
      int64_t version, int rank, const RankMemory& memory,
      std::shared_ptr<CancelFlag> cancel = std::make_shared<CancelFlag>(),
      bool in_place = false, bool verify_source = false);

  // Installs the update in a fresh worker as a worker's process would: by its
  // CopyPlan, under the generations. Its tensors, in the order of `wanted`.
  absl::StatusOr<std::vector<std::string>> Apply(const v1::DefineLayout& define,
                                                 const std::string& update_id,
                                                 const WantedTensors& wanted);
  // From now on they reach the memory of these GPUs; what lies on others is
  // brought to host memory first.
  void SetReachable(std::vector<std::string> devices) {
    reachable_ = std::move(devices);
  }

  // What the store told.
  std::vector<std::string> arenas_added();
  std::vector<std::string> arenas_dropped();
  std::vector<std::string> evicted();

  void OnArenaAdded(const std::string& arena_id) override;
  void OnArenaDropped(const std::string& arena_id) override;
  void OnUpdateEvicted(const std::string& model,
                       const std::string& update_id) override;

 private:
  const std::string name_;
  transport::CopyPool pool_;
  transport::HostMemory memory_;
  FakeGpus gpus_;
  Placement placement_;
  std::vector<std::string> reachable_;
  LayoutBook layouts_;
  CopyPlanCache plans_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<DeviceCopies> device_copies_;
  std::unique_ptr<transport::tcp::Endpoint> endpoint_;

  absl::Mutex mutex_;
  std::deque<v1::NodeReport> reports_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> added_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> dropped_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> evicted_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<Checkpoints> checkpoints_;
  std::unique_ptr<Mover> mover_;
};

// Workers of one node that take part in a STREAM: they have live tensors, and
// copy what they are passed as a worker's process does.
class TestSink : public StreamSink {
 public:
  // Worker w of the layout is StreamWorker{replica = "w"}; those of `node` take
  // part.
  TestSink(TestNode* node, const v1::DefineLayout& define);
  // Ends the node's updates first: they call it.
  ~TestSink() override;

  // While held, nobody takes anything.
  void Hold(bool hold);
  // What was passed while it was held.
  int held();
  int begun();
  int aborted();
  int direct_reads();
  // The tensors of worker w, in the order of WantedBy.
  std::vector<std::string> live(int w);

  void Begin(StreamStart start,
             std::function<void(absl::Status, std::set<int32_t>)> started,
             std::function<void(int32_t, TensorDigests)> read,
             std::function<void()> direct_done) override;
  void Pass(const std::string& update_id, int32_t bucket,
            const v1::SlotLocation& where,
            std::function<void()> taken) override;
  void Abort(const std::string& update_id) override;
  void Close(const std::string& update_id) override;

 private:
  void Take(int32_t bucket, const v1::SlotLocation& where)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  TestNode* const node_;
  const v1::DefineLayout define_;
  absl::Mutex mutex_;
  std::map<int, std::vector<std::string>> live_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::shared_ptr<const v1::CopyPlan>> plans_
      ABSL_GUARDED_BY(mutex_);
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  struct Held {
    int32_t bucket = 0;
    v1::SlotLocation where;
    std::function<void()> taken;
  };
  std::vector<Held> held_ ABSL_GUARDED_BY(mutex_);
  int begun_ ABSL_GUARDED_BY(mutex_) = 0;
  int aborted_ ABSL_GUARDED_BY(mutex_) = 0;
  int direct_reads_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The commands of one update, as the coordinator gives them. Flows are chains
// through the nodes that need a bucket, in the order of `nodes`.
class TestUpdate {
 public:
  TestUpdate(v1::DefineLayout define, std::string update_id, int64_t version,
             std::vector<TestNode*> nodes);

  // Before Prepare.
  void SetModes(v1::UpdateMode update, v1::PublishMode publish, int slots);
  // Another update of the same bytes: what `to` needs of this one, which has
  // been committed, comes from `from`. Answers the flows' buckets.
  v1::PrepareUpdate FetchCommand(TestNode* from, TestNode* to,
                                 const std::vector<int32_t>& buckets);
  v1::MoveUpdate MoveCommand(TestNode* node) const;

  // Leaves a node out of the flows of the next epoch.
  void Lose(TestNode* node);
  void Define();
  // To every node that is in a flow or is a source. Raises the epoch.
  void Prepare();
  void Move();
  // Snapshots all ranks that live on `node`, one after the other.
  absl::Status Snapshot(TestNode* node, const ModelBytes& model);
  // From what the snapshots counted.
  void Manifest();
  void End(bool committed);
  // All of the above, to the verified update. Expects that nothing fails.
  void RunToVerified(const ModelBytes& model);

  // Expects that every worker of the layout gets exactly the model's bytes.
  void ExpectWorkersEqual(const ModelBytes& model);

  const std::string& update_id() const { return update_id_; }
  const v1::DefineLayout& define() const { return define_; }
  v1::PrepareUpdate PrepareCommand(TestNode* node) const;
  v1::UpdateManifest& manifest() { return manifest_; }

 private:
  TestNode* Find(const std::string& name) const;
  void BuildFlows();

  const v1::DefineLayout define_;
  const std::string update_id_;
  const int64_t version_;
  std::vector<TestNode*> nodes_;
  std::unique_ptr<NodeLayout> layout_;
  std::vector<v1::Flow> flows_;
  int64_t epoch_ = 0;
  v1::UpdateMode update_mode_ = v1::UPDATE_MODE_STAGE;
  v1::PublishMode publish_mode_ = v1::PUBLISH_MODE_SNAPSHOT;
  int stream_slots_ = 0;
  v1::UpdateManifest manifest_;
};

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_TESTING_H_
