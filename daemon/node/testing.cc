#include "daemon/node/testing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/node/convert.h"
#include "daemon/node/direct_plan.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {
namespace testing {

namespace {

constexpr char kCluster[] = "test-cluster";

int64_t ElementBytes(const v1::Parameter& parameter) {
  return schedule::DTypeSize(FromProto(parameter.dtype()));
}

v1::Box WholeProtoBox(const v1::Parameter& parameter) {
  v1::Box box;
  for (int64_t extent : parameter.shape()) {
    box.add_offset(0);
    box.add_extent(extent);
  }
  return box;
}

}  // namespace

std::string TensorBytes(const v1::Parameter& parameter, uint64_t seed) {
  int64_t bytes = ElementBytes(parameter);
  for (int64_t extent : parameter.shape()) bytes *= extent;
  std::string result(static_cast<size_t>(bytes), '\0');
  uint64_t state = seed * 0x9E3779B97F4A7C15u + parameter.name().size();
  for (char c : parameter.name()) state = state * 131 + static_cast<uint8_t>(c);
  for (char& byte : result) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return result;
}

std::string BoxBytes(const v1::Parameter& parameter, const std::string& tensor,
                     const v1::Box& box) {
  const schedule::Dims shape(parameter.shape().begin(),
                             parameter.shape().end());
  schedule::Box b;
  b.offset.assign(box.offset().begin(), box.offset().end());
  b.extent.assign(box.extent().begin(), box.extent().end());
  const int64_t size = ElementBytes(parameter);
  std::string result;
  schedule::ForEachRun(b, shape, [&](int64_t first, int64_t count) {
    result.append(tensor, static_cast<size_t>(first * size),
                  static_cast<size_t>(count * size));
  });
  return result;
}

v1::Parameter MakeParameter(const std::string& name, v1::DType dtype,
                            const std::vector<int64_t>& shape) {
  v1::Parameter parameter;
  parameter.set_name(name);
  parameter.set_dtype(dtype);
  for (int64_t extent : shape) parameter.add_shape(extent);
  return parameter;
}

v1::Box MakeBox(const std::vector<int64_t>& offset,
                const std::vector<int64_t>& extent) {
  v1::Box box;
  for (int64_t o : offset) box.add_offset(o);
  for (int64_t e : extent) box.add_extent(e);
  return box;
}

// ---- ModelBuilder ----

ModelBuilder& ModelBuilder::BucketBytes(int64_t bytes) {
  define_.set_bucket_bytes(bytes);
  return *this;
}

ModelBuilder& ModelBuilder::SmallModel(int64_t scale) {
  Parameter(MakeParameter("embed", v1::DTYPE_BF16, {1000 * scale, 48}));
  Parameter(MakeParameter("layers.0.q.weight", v1::DTYPE_BF16, {256, 192}));
  Parameter(MakeParameter("layers.0.q.bias", v1::DTYPE_F32, {255}));
  Parameter(MakeParameter("layers.0.up.weight", v1::DTYPE_F16, {130, 96}));
  Parameter(MakeParameter("layers.0.scale", v1::DTYPE_F32, {}));
  Parameter(MakeParameter("layers.0.mask", v1::DTYPE_U8, {33, 7}));
  Parameter(MakeParameter("layers.0.conv", v1::DTYPE_F32, {6, 5, 4, 3}));
  Parameter(MakeParameter("norm", v1::DTYPE_F64, {2}));
  return *this;
}

ModelBuilder& ModelBuilder::Parameter(const v1::Parameter& parameter) {
  *define_.add_catalog() = parameter;
  return *this;
}

int ModelBuilder::Node(const std::string& name) {
  auto it = nodes_.find(name);
  if (it != nodes_.end()) return it->second;
  const int index = define_.nodes_size();
  define_.add_nodes()->set_node(name);
  nodes_[name] = index;
  return index;
}

ModelBuilder& ModelBuilder::FsdpRanks(const std::string& node, int count) {
  const int first = define_.sources_size();
  for (int r = 0; r < count; ++r) {
    v1::LayoutSource* source = define_.add_sources();
    source->set_rank(first + r);
    source->set_node(Node(node));
    for (int p = 0; p < define_.catalog_size(); ++p) {
      const v1::Parameter& parameter = define_.catalog(p);
      v1::Box box = WholeProtoBox(parameter);
      if (parameter.shape_size() == 0) {
        if (r != 0) continue;
      } else {
        const int64_t rows = parameter.shape(0);
        const int64_t share = (rows + count - 1) / count;
        const int64_t begin = std::min(rows, share * r);
        const int64_t end = std::min(rows, begin + share);
        if (begin == end) continue;
        box.set_offset(0, begin);
        box.set_extent(0, end - begin);
      }
      v1::OrdinalBox* shard = source->add_shards();
      shard->set_ordinal(p);
      *shard->mutable_box() = box;
    }
  }
  return *this;
}

ModelBuilder& ModelBuilder::Worker(const std::string& node) {
  return TensorParallelWorker(node, 0, 1);
}

ModelBuilder& ModelBuilder::TensorParallelWorker(const std::string& node,
                                                 int index, int count) {
  v1::LayoutWorker* worker = define_.add_workers();
  worker->set_replica(absl::StrCat("r", define_.workers_size()));
  worker->set_worker_index(index);
  worker->set_node(Node(node));
  for (int p = 0; p < define_.catalog_size(); ++p) {
    const v1::Parameter& parameter = define_.catalog(p);
    v1::OrdinalBox* want = worker->add_boxes();
    want->set_ordinal(p);
    v1::Box box = WholeProtoBox(parameter);
    const int last = parameter.shape_size() - 1;
    if (last > 0 && parameter.shape(last) % count == 0) {
      const int64_t share = parameter.shape(last) / count;
      box.set_offset(last, share * index);
      box.set_extent(last, share);
    }
    *want->mutable_box() = box;
  }
  return *this;
}

v1::DefineLayout ModelBuilder::Build() {
  auto layout = ComputeNodeLayout(define_, "");
  EXPECT_TRUE(layout.ok()) << layout.status();
  if (layout.ok()) define_.set_layout_id(layout->id);
  return define_;
}

ModelBytes::ModelBytes(const v1::DefineLayout& define, uint64_t seed) {
  for (const v1::Parameter& parameter : define.catalog()) {
    tensors_.push_back(TensorBytes(parameter, seed));
  }
}

RankMemory MakeRankMemory(const v1::DefineLayout& define,
                          const ModelBytes& model, int rank) {
  RankMemory memory;
  for (const v1::LayoutSource& source : define.sources()) {
    if (source.rank() != rank) continue;
    for (const v1::OrdinalBox& held : source.shards()) {
      const v1::Parameter& parameter = define.catalog(held.ordinal());
      v1::TensorShard* shard = memory.shards.Add();
      *shard->mutable_parameter() = parameter;
      *shard->mutable_box() = held.box();
      shard->set_region(0);
      shard->set_offset_bytes(static_cast<int64_t>(memory.bytes.size()));
      memory.bytes +=
          BoxBytes(parameter, model.tensor(held.ordinal()), held.box());
    }
  }
  return memory;
}

WantedTensors WantedBy(const v1::DefineLayout& define, int index) {
  WantedTensors wanted;
  for (const v1::OrdinalBox& box : define.workers(index).boxes()) {
    const v1::Parameter& parameter = define.catalog(box.ordinal());
    v1::WantedTensor* tensor = wanted.Add();
    tensor->set_name(parameter.name());
    tensor->set_dtype(parameter.dtype());
    *tensor->mutable_shape() = parameter.shape();
    *tensor->mutable_box() = box.box();
  }
  return wanted;
}

// ---- TestNode ----

int64_t TestNode::UsedBytes() const {
  v1::MemoryUse use;
  store_->FillMemoryUse(&use);
  return use.store_used_bytes();
}

TestNode::TestNode(std::string name, Options options)
    : name_(std::move(name)),
      pool_(2),
      memory_(&pool_, nullptr, transport::HostMemory::Options()),
      gpus_(&memory_),
      layouts_(name_) {
  Store::Options store;
  store.budget_bytes = options.budget_bytes;
  store.keep_updates = options.keep_updates;
  store.device_budget_bytes = options.device_budget_bytes;
  store_ = std::make_unique<Store>(store, &gpus_, this);
  device_copies_ = std::make_unique<DeviceCopies>(store_.get(), &gpus_);
  transport::tcp::EndpointOptions endpoint;
  // Like a daemon at its first start, it learns its cluster later.
  endpoint.faults = options.faults;
  if (!options.payload_device.empty()) {
    endpoint.payload = gpus_.Channels();
    endpoint.payload_device = options.payload_device;
  }
  endpoint.payload_optional = options.any_way;
  auto made = transport::tcp::Endpoint::Create(endpoint);
  CHECK(made.ok()) << made.status();
  endpoint_ = *std::move(made);
  Mover::Options mover;
  mover.node = name_;
  mover.prepare_timeout = options.prepare_timeout;
  mover.peer_deadline = options.peer_deadline;
  mover.report = [this](v1::NodeReport report) {
    absl::MutexLock lock(&mutex_);
    reports_.push_back(std::move(report));
  };
  mover_ = std::make_unique<Mover>(mover, &layouts_, store_.get(), &gpus_,
                                   endpoint_.get());
  mover_->SetClusterId(kCluster);
  Checkpoints::Options checkpoints;
  checkpoints.node = name_;
  checkpoints.root = options.checkpoint_root;
  checkpoints.state_dir = options.state_dir;
  checkpoints.report = mover.report;
  checkpoints_ =
      std::make_unique<Checkpoints>(checkpoints, &layouts_, store_.get());
  mover_->SetCheckpoints(checkpoints_.get());
  if (options.device_budget_bytes > 0) {
    mover_->SetDeviceStore(&placement_, device_copies_.get());
    checkpoints_->SetDeviceCopies(device_copies_.get());
  }
}

TestNode::~TestNode() {
  mover_->Shutdown();
  checkpoints_->Shutdown();
}

v1::NodeReport TestNode::WaitFor(
    std::function<bool(const v1::NodeReport&)> wanted, absl::Duration timeout) {
  auto position = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return std::find_if(reports_.begin(), reports_.end(), wanted);
  };
  auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return position() != reports_.end();
  };
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(&there), timeout)) {
    ADD_FAILURE() << "node " << name_ << " did not report within " << timeout;
    for (const v1::NodeReport& report : reports_) {
      LOG(INFO) << "Reported: " << report.ShortDebugString();
    }
    return v1::NodeReport();
  }
  auto it = position();
  v1::NodeReport report = *it;
  reports_.erase(it);
  return report;
}

v1::UpdatePrepared TestNode::WaitPrepared(absl::Duration timeout) {
  return WaitFor(
             [](const v1::NodeReport& r) { return r.has_update_prepared(); },
             timeout)
      .update_prepared();
}

v1::UpdateVerified TestNode::WaitVerified(absl::Duration timeout) {
  return WaitFor(
             [](const v1::NodeReport& r) { return r.has_update_verified(); },
             timeout)
      .update_verified();
}

std::vector<v1::NodeReport> TestNode::TakeReports() {
  absl::MutexLock lock(&mutex_);
  std::vector<v1::NodeReport> taken(reports_.begin(), reports_.end());
  reports_.clear();
  return taken;
}

absl::StatusOr<SnapshotResult> TestNode::Snapshot(
    const v1::DefineLayout& define, const std::string& update_id,
    int64_t version, int rank, const RankMemory& memory,
    std::shared_ptr<CancelFlag> cancel, bool in_place, bool verify_source) {
  RankSource source;
  source.model = define.model();
  source.update_id = update_id;
  source.version = version;
  source.layout_id = define.layout_id();
  source.rank = rank;
  SourceRegion region;
  region.data = memory.bytes.data();
  region.size_bytes = static_cast<int64_t>(memory.bytes.size());
  if (in_place) {
    // Stands for the arena that a trainer's memory would be.
    auto arena = memory_.Allocate(4096, {});
    if (!arena.ok()) return arena.status();
    region.arena = *std::move(arena);
    region.arena_id = absl::StrCat("rank-", rank);
  }
  source.regions.push_back(region);
  source.shards = memory.shards;
  source.cancel = std::move(cancel);
  source.in_place = in_place;
  source.verify_source = verify_source;
  return mover_->SnapshotRank(source);
}

absl::StatusOr<std::vector<std::string>> TestNode::Apply(
    const v1::DefineLayout& define, const std::string& update_id,
    const WantedTensors& wanted) {
  auto layout = layouts_.Find(define.layout_id());
  if (!layout.ok()) return layout.status();
  auto plan = plans_.PlanFor(**layout, wanted);
  if (!plan.ok()) return plan.status();
  // Copies last as long as this.
  auto pin = store_->Pin(update_id);
  if (!pin.ok()) return pin.status();
  absl::Status copied =
      device_copies_->ToHost(*layout, update_id, BucketsOf(**plan), reachable_);
  if (!copied.ok()) return copied;
  auto located = store_->Locate(update_id, BucketsOf(**plan), reachable_);
  if (!located.ok()) return located.status();

  std::vector<std::string> live;
  int64_t expected_bytes = 0;
  for (const v1::WantedTensor& tensor : wanted) {
    int64_t bytes = schedule::DTypeSize(FromProto(tensor.dtype()));
    for (int64_t extent : tensor.box().extent()) bytes *= extent;
    live.emplace_back(static_cast<size_t>(bytes), '\xA5');
    expected_bytes += bytes;
  }
  EXPECT_EQ(BytesOf(**plan), expected_bytes);
  for (int i = 0; i < (*plan)->buckets_size(); ++i) {
    const v1::BucketCopies& bucket = (*plan)->buckets(i);
    const v1::SlotLocation& slot = located->buckets[i].slot();
    EXPECT_EQ(located->buckets[i].bucket(), bucket.bucket());
    auto arena = store_->FindArena(slot.arena_id());
    if (arena == nullptr) return absl::InternalError("no such arena");
    std::vector<transport::CopyTask> tasks;
    for (const v1::TensorCopy& copy : bucket.copies()) {
      transport::CopyTask task;
      task.src =
          arena->data() + slot.offset_bytes() + copy.bucket_offset_bytes();
      task.dst = &live[copy.tensor()][0] + copy.tensor_offset_bytes();
      task.run_bytes = copy.run_bytes();
      for (int d = 0; d < copy.extents_size(); ++d) {
        transport::CopyDim dim;
        dim.extent = copy.extents(d);
        dim.src_stride = copy.bucket_strides_bytes(d);
        dim.dst_stride = copy.tensor_strides_bytes(d);
        task.dims.push_back(dim);
      }
      tasks.push_back(std::move(task));
    }
    absl::Status status = transport::GuardedApply(
        &gpus_, *arena, slot.generation_slot(), slot.generation(), tasks);
    if (!status.ok()) return status;
  }
  return live;
}

std::vector<std::string> TestNode::arenas_added() {
  absl::MutexLock lock(&mutex_);
  return added_;
}
std::vector<std::string> TestNode::arenas_dropped() {
  absl::MutexLock lock(&mutex_);
  return dropped_;
}
std::vector<std::string> TestNode::evicted() {
  absl::MutexLock lock(&mutex_);
  return evicted_;
}
void TestNode::OnArenaAdded(const std::string& arena_id) {
  absl::MutexLock lock(&mutex_);
  added_.push_back(arena_id);
}
void TestNode::OnArenaDropped(const std::string& arena_id) {
  absl::MutexLock lock(&mutex_);
  dropped_.push_back(arena_id);
}
void TestNode::OnUpdateEvicted(const std::string&,
                               const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  evicted_.push_back(update_id);
}

// ---- TestSink ----

TestSink::~TestSink() { node_->mover().Shutdown(); }

TestSink::TestSink(TestNode* node, const v1::DefineLayout& define)
    : node_(node), define_(define) {
  for (int w = 0; w < define.workers_size(); ++w) {
    if (define.nodes(define.workers(w).node()).node() != node->name()) continue;
    for (const v1::WantedTensor& tensor : WantedBy(define, w)) {
      int64_t bytes = schedule::DTypeSize(FromProto(tensor.dtype()));
      for (int64_t extent : tensor.box().extent()) bytes *= extent;
      live_[w].emplace_back(static_cast<size_t>(bytes), '\xA5');
    }
  }
}

void TestSink::Hold(bool hold) {
  std::vector<Held> held;
  {
    absl::MutexLock lock(&mutex_);
    hold_ = hold;
    if (hold) return;
    held.swap(held_);
    for (const Held& h : held) Take(h.bucket, h.where);
  }
  for (const Held& h : held) h.taken();
}
int TestSink::held() {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(held_.size());
}
int TestSink::begun() {
  absl::MutexLock lock(&mutex_);
  return begun_;
}
bool TestSink::left_behind() {
  absl::MutexLock lock(&mutex_);
  return left_behind_;
}

int TestSink::aborted() {
  absl::MutexLock lock(&mutex_);
  return aborted_;
}
int TestSink::direct_reads() {
  absl::MutexLock lock(&mutex_);
  return direct_reads_;
}
std::vector<std::string> TestSink::live(int w) {
  absl::MutexLock lock(&mutex_);
  return live_[w];
}

void TestSink::Begin(
    StreamStart start,
    std::function<void(absl::Status, std::set<int32_t>)> started,
    std::function<void(int32_t, TensorDigests)> read,
    std::function<void()> direct_done) {
  if (before_begin) before_begin();
  std::set<int32_t> direct;
  std::vector<std::pair<int32_t, TensorDigests>> reads;
  {
    absl::MutexLock lock(&mutex_);
    ++begun_;
    left_behind_ = true;
    for (const v1::StreamWorker& worker : start.workers) {
      const int w = std::stoi(worker.replica());
      auto plan = MakeCopyPlan(*start.layout, WantedBy(define_, w));
      if (!plan.ok()) {
        started(plan.status(), {});
        return;
      }
      plans_[w] = std::make_shared<const v1::CopyPlan>(*std::move(plan));
    }
    for (int32_t bucket : start.direct_candidates) {
      for (const auto& source : start.sources) {
        for (const auto& plan : plans_) {
          const WantedTensors wanted = WantedBy(define_, plan.first);
          const std::vector<int32_t> ordinals =
              OrdinalsOf(*start.layout, wanted);
          auto copies = DirectPlanner(*start.layout, *source, wanted, ordinals)
                            .Copies(bucket);
          if (!copies.has_value()) continue;
          direct.insert(bucket);
          for (const v1::DirectCopies& from : *copies) {
            for (const v1::TensorCopy& copy : from.copies()) {
              EXPECT_EQ(copy.extents_size(), 0);
              memcpy(&live_[plan.first][copy.tensor()][0] +
                         copy.tensor_offset_bytes(),
                     source->regions[0].data + copy.bucket_offset_bytes(),
                     static_cast<size_t>(copy.run_bytes()));
            }
          }
          TensorDigests tensors;
          auto digest =
              DigestSourceBucket(*start.layout, source->rank, source->shards,
                                 bucket, &node_->memory(), &tensors);
          EXPECT_TRUE(digest.ok()) << digest.status();
          reads.emplace_back(bucket, std::move(tensors));
          ++direct_reads_;
        }
      }
    }
  }
  started(absl::OkStatus(), direct);
  for (const auto& r : reads) read(r.first, r.second);
  direct_done();
}

void TestSink::Pass(const std::string&, int32_t bucket,
                    const v1::SlotLocation& where,
                    std::function<void()> taken) {
  {
    absl::MutexLock lock(&mutex_);
    if (hold_) {
      held_.push_back({bucket, where, std::move(taken)});
      return;
    }
    Take(bucket, where);
  }
  taken();
}

void TestSink::Take(int32_t bucket, const v1::SlotLocation& where) {
  auto arena = node_->store().FindArena(where.arena_id());
  ASSERT_NE(arena, nullptr);
  EXPECT_EQ(arena->Generation(where.generation_slot()), where.generation());
  for (const auto& plan : plans_) {
    for (const v1::BucketCopies& copies : plan.second->buckets()) {
      if (copies.bucket() != bucket) continue;
      std::vector<transport::CopyTask> tasks;
      for (const v1::TensorCopy& copy : copies.copies()) {
        transport::CopyTask task;
        task.src =
            arena->data() + where.offset_bytes() + copy.bucket_offset_bytes();
        task.dst =
            &live_[plan.first][copy.tensor()][0] + copy.tensor_offset_bytes();
        task.run_bytes = copy.run_bytes();
        for (int d = 0; d < copy.extents_size(); ++d) {
          transport::CopyDim dim;
          dim.extent = copy.extents(d);
          dim.src_stride = copy.bucket_strides_bytes(d);
          dim.dst_stride = copy.tensor_strides_bytes(d);
          task.dims.push_back(dim);
        }
        tasks.push_back(std::move(task));
      }
      EXPECT_TRUE(node_->gpus().Copy(tasks, {}, nullptr).ok());
    }
  }
}

void TestSink::Abort(const std::string&) {
  std::vector<Held> held;
  {
    absl::MutexLock lock(&mutex_);
    ++aborted_;
    left_behind_ = false;
    held.swap(held_);
  }
  for (const Held& h : held) h.taken();
}

void TestSink::Close(const std::string&) {}

// ---- TestUpdate ----

TestUpdate::TestUpdate(v1::DefineLayout define, std::string update_id,
                       int64_t version, std::vector<TestNode*> nodes)
    : define_(std::move(define)),
      update_id_(std::move(update_id)),
      version_(version),
      nodes_(std::move(nodes)) {
  auto layout = ComputeNodeLayout(define_, "");
  CHECK(layout.ok()) << layout.status();
  layout_ = std::make_unique<NodeLayout>(*std::move(layout));
  manifest_.set_model(define_.model());
  manifest_.set_update_id(update_id_);
}

TestNode* TestUpdate::Find(const std::string& name) const {
  for (TestNode* node : nodes_) {
    if (node->name() == name) return node;
  }
  return nullptr;
}

void TestUpdate::Lose(TestNode* node) {
  nodes_.erase(std::remove(nodes_.begin(), nodes_.end(), node), nodes_.end());
}

void TestUpdate::Define() {
  for (TestNode* node : nodes_) {
    ASSERT_TRUE(node->layouts().Define(define_).ok());
  }
}

void TestUpdate::BuildFlows() {
  flows_.clear();
  std::map<std::string, v1::Flow> flows;
  for (int32_t b = 0; b < layout_->bucket_count(); ++b) {
    const schedule::Bucket& bucket = layout_->plan.bucket(b);
    v1::Flow& flow =
        flows[absl::StrCat(bucket.source_node, "-", bucket.need_class)];
    if (flow.buckets_size() == 0) {
      flow.set_flow_id(
          absl::StrCat(bucket.source_node, "-", bucket.need_class));
      std::vector<int32_t> chain = {bucket.source_node};
      for (int32_t n : layout_->plan.need_nodes(b)) {
        if (n != bucket.source_node) chain.push_back(n);
      }
      for (int32_t n : chain) {
        TestNode* node = Find(layout_->nodes[n]);
        if (node == nullptr) continue;
        v1::FlowMember* member = flow.add_members();
        member->set_node(node->name());
        member->set_data_address(node->address());
      }
    }
    flow.add_buckets(b);
  }
  for (auto& flow : flows) {
    if (flow.second.members_size() > 1) flows_.push_back(flow.second);
  }
}

v1::PrepareUpdate TestUpdate::PrepareCommand(TestNode* node) const {
  v1::PrepareUpdate command;
  command.set_model(define_.model());
  command.set_update_id(update_id_);
  command.set_version(version_);
  command.set_layout_id(define_.layout_id());
  command.mutable_epoch()->set_term(1);
  command.mutable_epoch()->set_counter(epoch_);
  command.set_group_secret("secret");
  command.set_update_mode(update_mode_);
  command.set_publish_mode(publish_mode_);
  command.set_stream_slots(stream_slots_);
  for (const v1::Flow& flow : flows_) {
    for (const v1::FlowMember& member : flow.members()) {
      if (member.node() == node->name()) {
        *command.add_flows() = flow;
        break;
      }
    }
  }
  return command;
}

void TestUpdate::Prepare() {
  ++epoch_;
  BuildFlows();
  for (TestNode* node : nodes_) {
    node->mover().PrepareUpdate(PrepareCommand(node));
  }
}

void TestUpdate::PrepareAgain(TestNode* node) {
  node->mover().PrepareUpdate(PrepareCommand(node));
}

v1::MoveUpdate TestUpdate::MoveCommand(TestNode* node) const {
  v1::MoveUpdate command;
  command.set_model(define_.model());
  command.set_update_id(update_id_);
  command.mutable_epoch()->set_term(1);
  command.mutable_epoch()->set_counter(epoch_);
  if (update_mode_ == v1::UPDATE_MODE_STREAM) {
    for (int w = 0; w < define_.workers_size(); ++w) {
      if (define_.nodes(define_.workers(w).node()).node() != node->name()) {
        continue;
      }
      command.add_stream_workers()->set_replica(absl::StrCat(w));
    }
  }
  return command;
}

void TestUpdate::Move() {
  for (TestNode* node : nodes_) node->mover().MoveUpdate(MoveCommand(node));
}

void TestUpdate::SetModes(v1::UpdateMode update, v1::PublishMode publish,
                          int slots) {
  update_mode_ = update;
  publish_mode_ = publish;
  stream_slots_ = slots;
}

v1::PrepareUpdate TestUpdate::FetchCommand(
    TestNode* from, TestNode* to, const std::vector<int32_t>& buckets) {
  v1::PrepareUpdate command;
  command.set_model(define_.model());
  command.set_update_id(update_id_);
  command.set_version(version_);
  command.set_layout_id(define_.layout_id());
  command.mutable_epoch()->set_term(1);
  command.mutable_epoch()->set_counter(++epoch_);
  command.set_group_secret("secret");
  command.set_fetch(true);
  v1::Flow* flow = command.add_flows();
  flow->set_flow_id(absl::StrCat("fetch-", to->name()));
  for (TestNode* node : {from, to}) {
    v1::FlowMember* member = flow->add_members();
    member->set_node(node->name());
    member->set_data_address(node->address());
  }
  for (int32_t bucket : buckets) flow->add_buckets(bucket);
  return command;
}

absl::Status TestUpdate::Snapshot(TestNode* node, const ModelBytes& model) {
  for (const v1::LayoutSource& source : define_.sources()) {
    if (define_.nodes(source.node()).node() != node->name()) continue;
    const RankMemory memory = MakeRankMemory(define_, model, source.rank());
    auto result =
        node->Snapshot(define_, update_id_, version_, source.rank(), memory);
    if (!result.ok()) return result.status();
    for (const v1::BucketDigest& bucket : result->buckets) {
      *manifest_.add_buckets() = bucket;
    }
  }
  return absl::OkStatus();
}

void TestUpdate::Manifest() {
  for (TestNode* node : nodes_) node->mover().UpdateManifest(manifest_);
}

void TestUpdate::End(bool committed) {
  for (TestNode* node : nodes_) {
    v1::EndUpdate command;
    command.set_model(define_.model());
    command.set_update_id(update_id_);
    command.set_committed(committed);
    node->mover().EndUpdate(command);
  }
}

void TestUpdate::RunToVerified(const ModelBytes& model) {
  Define();
  Prepare();
  for (TestNode* node : nodes_) {
    const v1::UpdatePrepared prepared = node->WaitPrepared();
    ASSERT_EQ(prepared.update_id(), update_id_);
    ASSERT_EQ(prepared.failure().reason(), "") << prepared.ShortDebugString();
  }
  Move();
  for (TestNode* node : nodes_) {
    absl::Status status = Snapshot(node, model);
    ASSERT_TRUE(status.ok()) << status;
  }
  Manifest();
  for (TestNode* node : nodes_) {
    const v1::UpdateVerified verified = node->WaitVerified();
    ASSERT_EQ(verified.update_id(), update_id_);
    ASSERT_EQ(verified.failure().reason(), "") << verified.ShortDebugString();
  }
}

void TestUpdate::ExpectWorkersEqual(const ModelBytes& model) {
  for (int w = 0; w < define_.workers_size(); ++w) {
    const v1::LayoutWorker& worker = define_.workers(w);
    TestNode* node = Find(define_.nodes(worker.node()).node());
    if (node == nullptr) continue;
    auto live = node->Apply(define_, update_id_, WantedBy(define_, w));
    ASSERT_TRUE(live.ok()) << live.status();
    for (int i = 0; i < worker.boxes_size(); ++i) {
      const int ordinal = worker.boxes(i).ordinal();
      const v1::Parameter& parameter = define_.catalog(ordinal);
      EXPECT_TRUE((*live)[i] == BoxBytes(parameter, model.tensor(ordinal),
                                         worker.boxes(i).box()))
          << parameter.name() << " of worker " << w << " on " << node->name();
    }
  }
}

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync
