// One trainer rank of a chaos run. It publishes what it is told to, and writes
// down what a worker must hash that holds it: before the publish, so that no
// update is ever served of which the log says nothing.
//
// Commands: publish {version, content, ...}: takes the place of those that have
// not begun; with "queued" it comes after them, and with "no_wait" the rank
// goes on without its outcome. dump {content, path, index, count} writes a
// worker's bytes of that content to a file.
#include "client/cc/trainer.h"

#include <gflags/gflags.h>
#include <stdio.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "tests/chaos/control.h"
#include "tests/chaos/model.h"

DEFINE_string(who, "", "What this process is called in the logs.");
DEFINE_string(address, "", "The daemon of this node.");
DEFINE_string(model, "chaos", "");
DEFINE_int32(rank, 0, "");
DEFINE_int32(world_size, 1, "");
DEFINE_uint64(seed, 1, "Of shapes and values.");
DEFINE_int64(bytes, 8 << 20, "Of the model, about.");
DEFINE_int32(gpu, -1, "The GPU on which the tensors are; -1: in host memory.");
DEFINE_string(control_socket, "", "Where the run says what to do.");
DEFINE_string(run_socket, "", "Where the run hears of points reached.");
DEFINE_string(log, "", "Appended to.");

namespace weightsync {
namespace chaos {
namespace {

class Rank {
 public:
  Rank();
  int Run();

 private:
  void OnCommand(const nlohmann::json& command);
  void Publish(const nlohmann::json& command);
  absl::Status Connect();
  // Where the bytes of a shard are written; with a GPU they go there by Push.
  char* Bytes(size_t shard);
  absl::Status Push() { return gpu_.there() ? gpu_.Push() : absl::OkStatus(); }
  void FillShards(int64_t content);
  // A process whose context of CUDA is lost can do nothing but end.
  void EndIfLost(const absl::Status& status);
  void Dump(const nlohmann::json& command);
  v1::UpdateOptions Options(const nlohmann::json& command) const;

  const std::vector<client::Tensor> parameters_;
  // Of parameters_, where this rank holds a part.
  std::vector<int> ordinals_;
  std::unique_ptr<client::Trainer> trainer_;
  std::vector<client::Tensor> shards_;
  // Stays when the session does not, as a training program's tensors do.
  OnGpu gpu_;

  absl::Mutex mutex_;
  std::deque<nlohmann::json> next_ ABSL_GUARDED_BY(mutex_);
  Control control_;
};

Rank::Rank()
    : parameters_(Parameters(FLAGS_seed, FLAGS_bytes)),
      control_(FLAGS_who, FLAGS_control_socket, FLAGS_run_socket, FLAGS_log,
               [this](const nlohmann::json& command) { OnCommand(command); }) {
  control_.Log({{"ev", "trainer"}, {"rank", FLAGS_rank}});
}

void Rank::OnCommand(const nlohmann::json& command) {
  const std::string cmd = command.value("cmd", "");
  if (cmd == "dump") Dump(command);
  if (cmd != "publish") return;
  absl::MutexLock lock(&mutex_);
  if (!command.value("queued", false)) next_.clear();
  next_.push_back(command);
}

void Rank::Dump(const nlohmann::json& command) {
  const std::string path = command.value("path", "");
  std::ofstream out(path + ".tmp", std::ios::binary);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    std::vector<char> whole(client::PartBytes(parameters_[i]));
    Fill(FLAGS_seed, command.value("content", int64_t{0}), i, &whole);
    const std::vector<char> part =
        Cut(parameters_[i],
            WorkerBox(parameters_[i], i, command.value("index", 0),
                      command.value("count", 1)),
            whole);
    out.write(part.data(), part.size());
  }
  out.close();
  rename((path + ".tmp").c_str(), path.c_str());
}

absl::Status Rank::Connect() {
  if (trainer_ != nullptr && trainer_->status().ok()) return absl::OkStatus();
  trainer_ = nullptr;
  client::TrainerOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_model;
  options.rank = FLAGS_rank;
  options.world_size = FLAGS_world_size;
  options.client = "chaos";
  options.connect_timeout = absl::Seconds(4);
  auto trainer = client::Trainer::Connect(options);
  if (!trainer.ok()) return trainer.status();

  shards_.clear();
  ordinals_.clear();
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    client::Tensor shard = parameters_[i];
    client::Box box;
    if (!RankBox(shard, FLAGS_rank, FLAGS_world_size, &box)) continue;
    shard.box = box;
    shards_.push_back(shard);
    ordinals_.push_back(i);
    bytes += (client::PartBytes(shard) + 63) / 64 * 64;
  }
  if (FLAGS_gpu >= 0) {
    const absl::Status placed = gpu_.Place(FLAGS_gpu, &shards_);
    if (!placed.ok()) return placed;
  } else {
    auto arena = (*trainer)->AllocateArena(bytes, absl::Seconds(5));
    if (!arena.ok()) return arena.status();
    char* data = arena->data;
    for (client::Tensor& shard : shards_) {
      shard.data = data;
      data += (client::PartBytes(shard) + 63) / 64 * 64;
    }
  }
  auto registered = (*trainer)->RegisterShards(shards_, absl::Seconds(5));
  if (!registered.ok()) return registered.status();
  trainer_ = *std::move(trainer);
  return absl::OkStatus();
}

void Rank::EndIfLost(const absl::Status& status) {
  if (ErrorReason(status) != "DEVICE_FAULT") return;
  control_.Log({{"ev", "gpu_lost"}, {"error", std::string(status.message())}});
  _exit(4);
}

char* Rank::Bytes(size_t shard) {
  return gpu_.there() ? gpu_.copy(shard)
                      : static_cast<char*>(shards_[shard].data);
}

void Rank::FillShards(int64_t content) {
  for (size_t i = 0; i < shards_.size(); ++i) {
    const client::Tensor& parameter = parameters_[ordinals_[i]];
    std::vector<char> whole(client::PartBytes(parameter));
    Fill(FLAGS_seed, content, ordinals_[i], &whole);
    const std::vector<char> part = Cut(parameter, *shards_[i].box, whole);
    memcpy(Bytes(i), part.data(), part.size());
  }
}

v1::UpdateOptions Rank::Options(const nlohmann::json& command) const {
  v1::UpdateOptions options;
  options.set_update_mode(
      static_cast<v1::UpdateMode>(command.value("update_mode", 0)));
  options.set_publish_mode(
      static_cast<v1::PublishMode>(command.value("publish_mode", 0)));
  options.set_pause_mode(
      static_cast<v1::PauseMode>(command.value("pause_mode", 0)));
  options.set_delivery_policy(
      static_cast<v1::DeliveryPolicy>(command.value("delivery_policy", 0)));
  options.set_allow_no_recovery(command.value("allow_no_recovery", false));
  options.set_verify_source(command.value("verify_source", false));
  const int rolling = command.value("max_unavailable", 0);
  if (rolling > 0) {
    options.mutable_commit_policy()->mutable_rolling()->set_max_unavailable(
        rolling);
  } else if (command.value("evict", false)) {
    options.mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
        v1::LockstepPolicy::ON_STRAGGLER_EVICT);
  }
  return options;
}

void Rank::Publish(const nlohmann::json& command) {
  const int64_t content = command.value("content", int64_t{0});
  nlohmann::json line = {{"content", content},
                         {"version", command.value("version", int64_t{0})}};
  const auto log = [&](const char* event, const absl::Status& status) {
    nlohmann::json out = line;
    out["ev"] = event;
    out["ok"] = status.ok();
    if (!status.ok()) {
      out["reason"] = ErrorReason(status);
      out["error"] = std::string(status.message());
    }
    control_.Log(out);
  };
  nlohmann::json begin = line;
  begin["ev"] = "content";
  for (int count : {1, 2}) {
    begin[absl::StrCat("hashes", count)] =
        ExpectedHashes(parameters_, FLAGS_seed, content, count);
  }
  control_.Log(begin);

  const absl::Status connected = Connect();
  if (!connected.ok()) {
    log("connect", connected);
    EndIfLost(connected);
    return;
  }
  FillShards(content);
  const absl::Status pushed = Push();
  if (!pushed.ok()) {
    log("connect", pushed);
    EndIfLost(pushed);
    return;
  }
  control_.Reach("trainer:publishing", "");
  client::PublishOptions options;
  options.version = command.value("version", int64_t{0});
  options.step = content;
  options.update = Options(command);
  options.timeout = absl::Milliseconds(command.value("publish_ms", 8000));
  const auto published = trainer_->Publish(options);
  if (published.ok()) {
    line["update"] = published->update_id;
    line["version"] = published->version;
  }
  log("published", published.status());
  // Of this process, and not of its node's device agent.
  if (!published.ok()) {
    if (gpu_.there()) EndIfLost(gpu_.Pull());
    return;
  }
  control_.Reach("trainer:published", published->update_id);
  // The trainer goes on: what it publishes must not change with its tensors.
  for (size_t i = 0; i < shards_.size(); ++i)
    memset(Bytes(i), 0xa5, client::PartBytes(shards_[i]));
  EndIfLost(Push());
  if (command.value("no_wait", false)) {
    log("left", absl::OkStatus());
    return;
  }
  const auto version = trainer_->Wait(
      *published, absl::Milliseconds(command.value("wait_ms", 15000)));
  log("outcome", version.status());
}

int Rank::Run() {
  while (true) {
    nlohmann::json command;
    {
      absl::MutexLock lock(&mutex_);
      const auto there = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return !next_.empty();
      };
      // A rank that idles still mends its session.
      if (mutex_.AwaitWithTimeout(absl::Condition(&there),
                                  absl::Milliseconds(300))) {
        command = next_.front();
        next_.pop_front();
      }
    }
    if (!command.is_null()) {
      Publish(command);
    } else if (trainer_ == nullptr || !trainer_->status().ok()) {
      const absl::Status status = Connect();
      nlohmann::json line = {{"ev", "session"}, {"ok", status.ok()}};
      if (!status.ok()) line["error"] = std::string(status.message());
      control_.Log(line);
      EndIfLost(status);
    }
  }
}

}  // namespace
}  // namespace chaos
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;  // no files of its own
  google::InitGoogleLogging(argv[0]);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return weightsync::chaos::Rank().Run();
}
