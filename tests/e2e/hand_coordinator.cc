#include "tests/e2e/hand_coordinator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/layouts.h"
#include "glog/logging.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace e2e {

HandCoordinator::HandCoordinator() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port_);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

HandCoordinator::~HandCoordinator() {
  {
    absl::MutexLock lock(&mutex_);
    away_ = true;
    for (const auto& node : nodes_) {
      if (node.second.context != nullptr) node.second.context->TryCancel();
    }
  }
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

std::string HandCoordinator::address() const {
  return absl::StrCat("127.0.0.1:", port_);
}

grpc::Status HandCoordinator::Connect(grpc::ServerContext* context,
                                      Stream* stream) {
  v1::NodeReport report;
  if (!stream->Read(&report) || !report.has_hello()) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no hello");
  }
  const std::string name = report.hello().node();
  {
    absl::MutexLock lock(&mutex_);
    if (away_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "away");
    Node& node = nodes_[name];
    node.stream = stream;
    node.context = context;
    node.data_address = report.hello().data_address();
    node.reports.push_back(report);
    v1::NodeCommand command;
    command.mutable_welcome()->set_cluster_id("hand");
    command.mutable_welcome()->set_term(term_);
    command.mutable_welcome()->set_coordinator("nodes/hand");
    stream->Write(command);
  }
  while (stream->Read(&report)) {
    absl::MutexLock lock(&mutex_);
    Answer(name, report);
  }
  absl::MutexLock lock(&mutex_);
  Node& node = nodes_[name];
  if (node.stream == stream) {
    node.stream = nullptr;
    node.context = nullptr;
  }
  return grpc::Status::OK;
}

void HandCoordinator::Reply(const std::string& node, v1::Reply reply) {
  v1::NodeCommand command;
  *command.mutable_reply() = std::move(reply);
  if (nodes_[node].stream != nullptr) nodes_[node].stream->Write(command);
}

void HandCoordinator::Answer(const std::string& node,
                             const v1::NodeReport& report) {
  v1::Reply reply;
  reply.set_correlation_id(report.correlation_id());
  switch (report.report_case()) {
    case v1::NodeReport::kHeartbeat: {
      v1::NodeCommand command;
      command.mutable_heartbeat();
      if (nodes_[node].stream != nullptr) nodes_[node].stream->Write(command);
      return;
    }
    case v1::NodeReport::kClaimRank:
      reply.mutable_rank_accepted();
      Reply(node, std::move(reply));
      break;
    case v1::NodeReport::kRankShards:
      ranks_[report.rank_shards().rank()] = {node, report.rank_shards()};
      reply.mutable_rank_accepted()->set_registered_rank_count(
          static_cast<int>(ranks_.size()));
      Reply(node, std::move(reply));
      break;
    case v1::NodeReport::kReplicaJoined:
      replicas_[report.replica_joined().registration().replica()] =
          report.replica_joined().registration();
      Reply(node, std::move(reply));
      break;
    case v1::NodeReport::kWorkerJoined: {
      const v1::RegisterWorker& worker = report.worker_joined().registration();
      workers_[{worker.replica(), worker.worker_index()}] = {node, worker};
      int64_t bytes = 0;
      for (const v1::WantedTensor& tensor : worker.tensors()) {
        int64_t elements = 8;
        for (int64_t extent : tensor.shape()) elements *= extent;
        bytes += elements;
      }
      reply.mutable_worker_accepted()->set_tensor_bytes(bytes);
      reply.mutable_worker_accepted()->set_store_bytes(
          std::min(bytes, int64_t{16} << 20));
      Reply(node, std::move(reply));
      break;
    }
    default:
      break;
  }
  nodes_[node].reports.push_back(report);
}

v1::NodeReport HandCoordinator::WaitFor(
    const std::string& node,
    const std::function<bool(const v1::NodeReport&)>& wanted,
    absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  std::deque<v1::NodeReport>& reports = nodes_[node].reports;
  auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return std::any_of(reports.begin(), reports.end(), wanted);
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&there), timeout)) {
    ADD_FAILURE() << "node " << node << " did not report";
    for (const v1::NodeReport& report : reports) {
      LOG(INFO) << node
                << " reported: " << report.ShortDebugString().substr(0, 300);
    }
    return v1::NodeReport();
  }
  auto it = std::find_if(reports.begin(), reports.end(), wanted);
  v1::NodeReport report = *it;
  reports.erase(it);
  return report;
}

bool HandCoordinator::Has(
    const std::string& node,
    const std::function<bool(const v1::NodeReport&)>& wanted) {
  absl::MutexLock lock(&mutex_);
  const std::deque<v1::NodeReport>& reports = nodes_[node].reports;
  return std::any_of(reports.begin(), reports.end(), wanted);
}

void HandCoordinator::Send(const std::string& node, v1::NodeCommand command) {
  absl::MutexLock lock(&mutex_);
  auto connected = [this, &node]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return nodes_[node].stream != nullptr;
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&connected),
                               absl::Seconds(30))) {
    ADD_FAILURE() << "node " << node << " is not connected";
    return;
  }
  nodes_[node].stream->Write(command);
}

std::string HandCoordinator::DataAddress(const std::string& node) {
  absl::MutexLock lock(&mutex_);
  return nodes_[node].data_address;
}

void HandCoordinator::Leave() {
  absl::MutexLock lock(&mutex_);
  away_ = true;
  for (const auto& node : nodes_) {
    if (node.second.context != nullptr) node.second.context->TryCancel();
  }
}

void HandCoordinator::Return() {
  absl::MutexLock lock(&mutex_);
  away_ = false;
  ++term_;
}

int64_t HandCoordinator::term() {
  absl::MutexLock lock(&mutex_);
  return term_;
}

v1::DefineLayout HandCoordinator::Define(
    const std::string& model, int64_t bucket_bytes,
    const std::vector<std::string>& nodes) {
  v1::DefineLayout define;
  {
    absl::MutexLock lock(&mutex_);
    define.set_model(model);
    define.set_bucket_bytes(bucket_bytes);
    std::map<std::string, int> index, ordinal;
    auto node_of = [&](const std::string& node) {
      auto added = index.emplace(node, define.nodes_size());
      if (added.second) define.add_nodes()->set_node(node);
      return added.first->second;
    };
    for (const auto& rank : ranks_) {
      const v1::RankShards& shards = rank.second.second;
      v1::LayoutSource* source = define.add_sources();
      source->set_rank(rank.first);
      source->set_node(node_of(rank.second.first));
      for (const v1::ShardBox& shard : shards.shards()) {
        const v1::Parameter& parameter = shards.parameters(shard.parameter());
        auto added = ordinal.emplace(parameter.name(), define.catalog_size());
        if (added.second) *define.add_catalog() = parameter;
        v1::OrdinalBox* box = source->add_shards();
        box->set_ordinal(added.first->second);
        if (shard.has_box()) *box->mutable_box() = shard.box();
        box->set_dtype(shard.dtype());
      }
    }
    for (const auto& worker : workers_) {
      v1::LayoutWorker* to = define.add_workers();
      to->set_replica(worker.first.first);
      to->set_worker_index(worker.first.second);
      to->set_node(node_of(worker.second.first));
      for (const v1::WantedTensor& tensor : worker.second.second.tensors()) {
        v1::OrdinalBox* box = to->add_boxes();
        box->set_ordinal(ordinal.at(tensor.name()));
        if (tensor.has_box()) *box->mutable_box() = tensor.box();
      }
    }
  }
  auto layout = daemon::ComputeNodeLayout(define, "");
  EXPECT_TRUE(layout.ok()) << layout.status();
  if (layout.ok()) define.set_layout_id(layout->id);
  v1::NodeCommand command;
  *command.mutable_define_layout() = define;
  for (const std::string& node : nodes) Send(node, command);
  return define;
}

void HandCoordinator::OpenPublish(const v1::DefineLayout& define,
                                  const std::string& update_id,
                                  int64_t version) {
  for (const v1::LayoutSource& source : define.sources()) {
    const std::string node = define.nodes(source.node()).node();
    const v1::NodeReport arrived =
        WaitFor(node, [&source](const v1::NodeReport& report) {
          return report.has_publish_arrived() &&
                 report.publish_arrived().rank() == source.rank();
        });
    v1::Reply reply;
    reply.set_correlation_id(arrived.correlation_id());
    reply.mutable_publish_opened()->set_update_id(update_id);
    reply.mutable_publish_opened()->set_version(version);
    reply.mutable_publish_opened()->set_layout_id(define.layout_id());
    reply.mutable_publish_opened()->set_publish_index(version);
    absl::MutexLock lock(&mutex_);
    Reply(node, std::move(reply));
  }
}

v1::UpdateManifest HandCoordinator::Manifest(const v1::DefineLayout& define,
                                             const std::string& update_id) {
  v1::UpdateManifest manifest;
  manifest.set_model(define.model());
  manifest.set_update_id(update_id);
  for (const v1::LayoutSource& source : define.sources()) {
    const v1::NodeReport report = WaitFor(
        define.nodes(source.node()).node(), [&](const v1::NodeReport& r) {
          return r.has_rank_snapshotted() &&
                 r.rank_snapshotted().update_id() == update_id &&
                 r.rank_snapshotted().rank() == source.rank();
        });
    EXPECT_FALSE(report.rank_snapshotted().has_failure())
        << report.ShortDebugString();
    for (const v1::BucketDigest& bucket : report.rank_snapshotted().buckets()) {
      *manifest.add_buckets() = bucket;
    }
  }
  return manifest;
}

v1::NodeCommand HandCoordinator::PauseOf(const std::string& replica,
                                         const std::string& command_id,
                                         const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  v1::NodeCommand command;
  v1::PauseReplicaCommand* pause = command.mutable_pause_replica();
  const v1::RegisterReplica& registered = replicas_[replica];
  pause->set_model(registered.model());
  pause->set_replica(replica);
  pause->set_incarnation(registered.incarnation());
  pause->mutable_pause()->set_command_id(command_id);
  pause->mutable_pause()->set_update_id(update_id);
  pause->mutable_pause()->set_mode(v1::PAUSE_MODE_DRAIN);
  pause->mutable_pause()->mutable_timeout()->set_seconds(30);
  return command;
}

v1::NodeCommand HandCoordinator::ResumeOf(const std::string& replica,
                                          const std::string& command_id,
                                          const std::string& update_id) {
  absl::MutexLock lock(&mutex_);
  v1::NodeCommand command;
  v1::ResumeReplicaCommand* resume = command.mutable_resume_replica();
  const v1::RegisterReplica& registered = replicas_[replica];
  resume->set_model(registered.model());
  resume->set_replica(replica);
  resume->set_incarnation(registered.incarnation());
  resume->mutable_resume()->set_command_id(command_id);
  resume->mutable_resume()->set_update_id(update_id);
  resume->mutable_resume()->set_weights_changed(true);
  return command;
}

v1::NodeCommand HandCoordinator::ApplyOf(const v1::DefineLayout& define,
                                         const std::string& replica, int worker,
                                         const std::string& update_id,
                                         int64_t version,
                                         const std::string& command_id) {
  absl::MutexLock lock(&mutex_);
  v1::NodeCommand command;
  v1::ApplyWorker* apply = command.mutable_apply_worker();
  const v1::RegisterWorker& registered = workers_[{replica, worker}].second;
  apply->set_model(registered.model());
  apply->set_replica(replica);
  apply->set_worker_index(worker);
  apply->set_incarnation(registered.incarnation());
  apply->set_update_id(update_id);
  apply->set_version(version);
  apply->set_layout_id(define.layout_id());
  apply->set_commit_term(term_);
  apply->mutable_timeout()->set_seconds(30);
  apply->set_command_id(command_id);
  return command;
}

}  // namespace e2e
}  // namespace weightsync
