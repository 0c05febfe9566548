#include "tests/e2e/cluster.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cc/rpc.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/demo_model.h"

namespace weightsync {
namespace e2e {

Cluster::~Cluster() {
  for (auto& [name, node] : nodes_) {
    if (node.process != nullptr) node.process->Signal(SIGTERM);
  }
  for (auto& [name, node] : nodes_) {
    if (node.process == nullptr) continue;
    node.process->Wait(absl::Seconds(10));
    if (::testing::Test::HasFailure()) std::cerr << node.process->Log();
  }
}

bool Cluster::StartNode(const std::string& name,
                        const std::vector<std::string>& flags) {
  Node& node = nodes_[name];
  const std::string base = directory_.path() + "/" + name;
  node.ready = base + ".ready";
  node.arguments = {DataPath("daemon/weightsyncd"),
                    "--node=" + name,
                    "--unix_socket=" + base + ".sock",
                    "--state_dir=" + base + ".state",
                    "--ready_file=" + node.ready,
                    "--store_budget_bytes=200000000",
                    "--heartbeat_interval=200ms",
                    "--heartbeat_timeout=2s",
                    "--gather_timeout=10s",
                    "--publish_timeout=10s",
                    "--prepare_timeout=10s",
                    "--progress_timeout=3s",
                    "--pause_timeout=5s",
                    "--apply_timeout=10s",
                    "--resume_timeout=5s",
                    "--node_reconnect_grace=2s",
                    "--recovery_timeout=10s"};
  if (first_.empty()) {
    first_ = name;
  } else {
    node.arguments.push_back("--coordinator_address=" +
                             nodes_.at(first_).listen);
  }
  node.arguments.insert(node.arguments.end(), flags.begin(), flags.end());
  return Launch(&node);
}

bool Cluster::Launch(Node* node) {
  std::vector<std::string> arguments = node->arguments;
  // A daemon that starts again keeps its port, as one with a fixed flag would.
  arguments.push_back("--listen=" +
                      (node->listen.empty() ? "127.0.0.1:0" : node->listen));
  unlink(node->ready.c_str());
  node->process = std::make_unique<Process>(
      arguments, node->ready.substr(0, node->ready.size() - 6) + ".log");
  const bool ready = WaitUntil(
      [&] {
        return access(node->ready.c_str(), F_OK) == 0 ||
               !node->process->Running();
      },
      kPatience);
  if (!ready || !node->process->Running()) {
    std::cerr << node->process->Log();
    return false;
  }
  std::ifstream file(node->ready);
  const nlohmann::json addresses = nlohmann::json::parse(file, nullptr, false);
  if (addresses.is_discarded()) return false;
  node->listen = addresses["listen"][0].get<std::string>();
  return true;
}

bool Cluster::RestartNode(const std::string& name) {
  return Launch(&nodes_.at(name));
}

void Cluster::KillNode(const std::string& name) {
  process(name)->Signal(SIGKILL);
  process(name)->Wait(kPatience);
}

absl::optional<int> Cluster::EndNode(const std::string& name) {
  process(name)->Signal(SIGTERM);
  return process(name)->Wait(kPatience);
}

std::string Cluster::address(const std::string& node) const {
  return absl::StrCat("unix:", directory_.path(), "/", node, ".sock");
}

std::unique_ptr<v1::AdminService::Stub> Cluster::Admin() {
  return v1::AdminService::NewStub(*client::MakeChannel(address(first_)));
}

namespace {

template <typename Request, typename Response, typename Fn>
absl::StatusOr<Response> Get(const std::string& name, Fn call) {
  grpc::ClientContext context;
  client::PrepareContext(absl::Now() + absl::Seconds(10), &context);
  Request request;
  request.set_name(name);
  Response response;
  const absl::Status status =
      client::CallStatus(name, call(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

}  // namespace

absl::StatusOr<v1::Replica> Cluster::GetReplica(const std::string& name) {
  const auto stub = Admin();
  return Get<v1::GetReplicaRequest, v1::Replica>(
      "models/test/replicas/" + name, [&](auto* context, auto& q, auto* r) {
        return stub->GetReplica(context, q, r);
      });
}

absl::StatusOr<v1::Version> Cluster::GetVersion(const std::string& name) {
  const auto stub = Admin();
  return Get<v1::GetVersionRequest, v1::Version>(
      "models/test/versions/" + name, [&](auto* context, auto& q, auto* r) {
        return stub->GetVersion(context, q, r);
      });
}

absl::StatusOr<v1::Node> Cluster::GetNode(const std::string& name) {
  const auto stub = Admin();
  return Get<v1::GetNodeRequest, v1::Node>(
      "nodes/" + name, [&](auto* context, auto& q, auto* r) {
        return stub->GetNode(context, q, r);
      });
}

absl::StatusOr<v1::PlanResponse> Cluster::Plan(const v1::PlanRequest& request) {
  const auto stub = Admin();
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  v1::PlanResponse response;
  const absl::Status status =
      FromGrpcStatus(stub->Plan(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

bool Cluster::WaitReplicaState(const std::string& name,
                               v1::Replica::State state,
                               absl::Duration timeout) {
  return WaitUntil(
      [&] {
        const auto replica = GetReplica(name);
        return replica.ok() && replica->state() == state;
      },
      timeout);
}

bool Cluster::WaitNodeState(const std::string& name, v1::Node::State state,
                            absl::Duration timeout) {
  return WaitUntil(
      [&] {
        const auto node = GetNode(name);
        return node.ok() && node->state() == state;
      },
      timeout);
}

std::unique_ptr<Process> Cluster::Start(const std::string& name,
                                        std::vector<std::string> arguments) {
  arguments[0] = DataPath(arguments[0]);
  return std::make_unique<Process>(
      arguments, absl::StrCat(directory_.path(), "/", name, ".log"));
}

std::vector<client::Tensor> TestParameters() {
  std::vector<client::Tensor> parameters(3);
  parameters[0].name = "embed.weight";
  parameters[0].shape = {1000, 64};
  parameters[1].name = "up.weight";
  parameters[1].shape = {66, 130};
  parameters[2].name = "norm.weight";
  parameters[2].shape = {6};
  for (client::Tensor& parameter : parameters) {
    parameter.dtype = v1::DTYPE_BF16;
  }
  return parameters;
}

namespace {

// Rows [part/parts) of each parameter; nothing where there are too few.
std::vector<client::Tensor> Rows(int part, int parts) {
  std::vector<client::Tensor> tensors;
  for (client::Tensor tensor : TestParameters()) {
    const int64_t rows = tensor.shape[0];
    const int64_t chunk = (rows + parts - 1) / parts;
    const int64_t begin = std::min(chunk * part, rows);
    const int64_t end = std::min(begin + chunk, rows);
    if (begin == end) continue;
    client::Box box;
    box.offset.assign(tensor.shape.size(), 0);
    box.extent = tensor.shape;
    box.offset[0] = begin;
    box.extent[0] = end - begin;
    tensor.box = box;
    tensors.push_back(tensor);
  }
  return tensors;
}

}  // namespace

TestTrainer::TestTrainer(Cluster* cluster, const std::string& node, int ranks)
    : TestTrainer(cluster, std::vector<std::string>(ranks, node)) {}

TestTrainer::TestTrainer(Cluster* cluster,
                         const std::vector<std::string>& nodes) {
  const int ranks = static_cast<int>(nodes.size());
  for (int i = 0; i < ranks; ++i) {
    client::TrainerOptions options;
    options.address = addresses[i];
    options.model = "test";
    options.rank = i;
    options.world_size = ranks;
    auto trainer = client::Trainer::Connect(options);
    if (!trainer.ok()) {
      ADD_FAILURE() << trainer.status();
      return;
    }
    Rank rank;
    rank.trainer = *std::move(trainer);
    rank.shards = Rows(i, ranks);
    const auto arena =
        rank.trainer->AllocateArena(demo::PlaceTensors(&rank.shards, nullptr));
    if (!arena.ok()) {
      ADD_FAILURE() << arena.status();
      return;
    }
    demo::PlaceTensors(&rank.shards, arena->data);
    const auto registered = rank.trainer->RegisterShards(rank.shards);
    EXPECT_TRUE(registered.ok()) << registered.status();
    ranks_.push_back(std::move(rank));
  }
}

absl::StatusOr<client::PublishResult> TestTrainer::PublishRank(
    int rank, char value, absl::Duration timeout) {
  for (const client::Tensor& shard : ranks_[rank].shards) {
    memset(shard.data, value, client::PartBytes(shard));
  }
  client::PublishOptions options;
  options.timeout = timeout;
  options.update = options_;
  return ranks_[rank].trainer->Publish(options);
}

absl::StatusOr<client::PublishResult> TestTrainer::PublishOnly(char value) {
  std::vector<absl::StatusOr<client::PublishResult>> results(
      ranks_.size(), absl::UnknownError("not run"));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    threads.emplace_back([&, i] {
      results[i] = PublishRank(static_cast<int>(i), value, kPatience);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) {
    if (!result.ok()) return result;
    EXPECT_EQ(result->update_id, results[0]->update_id);
  }
  return results[0];
}

absl::StatusOr<v1::Version> TestTrainer::Wait(
    const client::PublishResult& published) {
  return ranks_[0].trainer->Wait(published, kPatience);
}

absl::StatusOr<v1::Version> TestTrainer::Publish(char value) {
  const auto published = PublishOnly(value);
  if (!published.ok()) return published.status();
  return Wait(*published);
}

TestReplica::TestReplica(Cluster* cluster, const std::string& node,
                         const std::string& name, int workers, bool swap)
    : TestReplica(cluster, std::vector<std::string>(workers, node), name,
                  swap) {}

namespace {

std::vector<std::string> AddressesOf(const Cluster& cluster,
                                     const std::vector<std::string>& nodes) {
  std::vector<std::string> addresses;
  for (const std::string& node : nodes) {
    addresses.push_back(cluster.address(node));
  }
  return addresses;
}

}  // namespace

TestReplica::TestReplica(Cluster* cluster,
                         const std::vector<std::string>& nodes,
                         const std::string& name, bool swap)
    : TestReplica(AddressesOf(*cluster, nodes), name, swap) {}

TestReplica::TestReplica(const std::vector<std::string>& addresses,
                         const std::string& name, bool swap)
    : memory_(addresses.size()) {
  const std::string incarnation = client::RandomId();
  const int workers = static_cast<int>(addresses.size());
  for (int i = 0; i < workers; ++i) {
    Memory* memory = &memory_[i];
    std::vector<client::Tensor> tensors = Rows(i, workers);
    std::vector<client::Tensor> spare;
    memory->set[0].resize(demo::PlaceTensors(&tensors, nullptr));
    demo::PlaceTensors(&tensors, memory->set[0].data());
    client::WorkerOptions options;
    options.address = cluster->address(nodes[i]);
    options.model = "test";
    options.replica = name;
    options.incarnation = incarnation;
    options.worker_index = i;
    options.worker_count = workers;
    options.max_backoff = absl::Milliseconds(500);
    if (swap) {
      spare = tensors;
      memory->set[1].resize(memory->set[0].size());
      demo::PlaceTensors(&spare, memory->set[1].data());
      options.swap = [this, memory](int set, const std::string&) {
        absl::MutexLock lock(&mutex_);
        memory->next = set;
        return absl::OkStatus();
      };
    } else {
      options.on_writing = [this](const std::string&) {
        absl::MutexLock lock(&mutex_);
        written_ = written_ || serving_;
      };
    }
    auto worker = client::Worker::Start(options, tensors, spare);
    EXPECT_TRUE(worker.ok()) << worker.status();
    workers_.push_back(*std::move(worker));
  }
  client::ReplicaOptions options;
  options.address = addresses[0];
  options.model = "test";
  options.replica = name;
  options.incarnation = incarnation;
  options.worker_count = workers;
  options.atomic_swap = swap;
  options.max_backoff = absl::Milliseconds(500);
  client::ReplicaHooks hooks;
  hooks.on_pause =
      [this](const client::PauseRequest& pause) -> absl::StatusOr<std::string> {
    absl::Duration duration;
    {
      absl::MutexLock lock(&mutex_);
      duration = pause_duration_;
      ++pauses_;
      pause_mode_ = pause.mode;
    }
    absl::SleepFor(duration);
    absl::MutexLock lock(&mutex_);
    if (!pause_status_.ok()) return pause_status_;
    serving_ = false;
    return std::string("stopped");
  };
  hooks.on_resume = [this](const client::ResumeInfo&) {
    absl::MutexLock lock(&mutex_);
    for (Memory& memory : memory_) memory.serving = memory.next;
    if (Value() < 0) mix_ = true;
    serving_ = true;
    ++resumes_;
    return absl::OkStatus();
  };
  auto replica = client::Replica::Start(options, hooks);
  EXPECT_TRUE(replica.ok()) << replica.status();
  replica_ = *std::move(replica);
}

TestReplica::~TestReplica() {
  if (replica_ != nullptr) replica_->Close();
  for (auto& worker : workers_) worker->Close();
}

int TestReplica::Value() const {
  // Padding between tensors stays zero: look where tensors are.
  int value = -2;
  const int workers = static_cast<int>(memory_.size());
  for (int i = 0; i < workers; ++i) {
    std::vector<client::Tensor> tensors = Rows(i, workers);
    const Memory& memory = memory_[i];
    demo::PlaceTensors(&tensors,
                       const_cast<char*>(memory.set[memory.serving].data()));
    for (const client::Tensor& tensor : tensors) {
      const char* data = static_cast<const char*>(tensor.data);
      for (int64_t b = 0; b < client::PartBytes(tensor); ++b) {
        if (value == -2) value = static_cast<unsigned char>(data[b]);
        if (value != static_cast<unsigned char>(data[b])) return -1;
      }
    }
  }
  return value;
}

bool TestReplica::WaitServes(char value, absl::Duration timeout) {
  return WaitUntil(
      [&] {
        absl::MutexLock lock(&mutex_);
        return serving_ && Value() == static_cast<unsigned char>(value);
      },
      timeout);
}

bool TestReplica::WaitHolds(char value, absl::Duration timeout) {
  return WaitUntil(
      [&] {
        absl::MutexLock lock(&mutex_);
        return Value() == static_cast<unsigned char>(value);
      },
      timeout);
}

bool TestReplica::serving() const {
  absl::MutexLock lock(&mutex_);
  return serving_;
}

bool TestReplica::SawMix() const {
  absl::MutexLock lock(&mutex_);
  return mix_;
}

bool TestReplica::SawWriteWhileServing() const {
  absl::MutexLock lock(&mutex_);
  return written_;
}

int TestReplica::resumes() const {
  absl::MutexLock lock(&mutex_);
  return resumes_;
}

int TestReplica::pauses() const {
  absl::MutexLock lock(&mutex_);
  return pauses_;
}

v1::PauseMode TestReplica::last_pause_mode() const {
  absl::MutexLock lock(&mutex_);
  return pause_mode_;
}

void TestReplica::SetPause(absl::Status status, absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  pause_status_ = std::move(status);
  pause_duration_ = duration;
}

void TestReplica::Damage() {
  absl::MutexLock lock(&mutex_);
  memory_[0].set[memory_[0].serving][4] ^= 1;
}

}  // namespace e2e
}  // namespace weightsync
