// A node that is driven by hand: a real daemon with real clients, and a
// coordinator that does what a test says.

#ifndef WEIGHTSYNC_TESTS_E2E_NODE_FIXTURE_H_
#define WEIGHTSYNC_TESTS_E2E_NODE_FIXTURE_H_

#include <atomic>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/replica.h"
#include "client/cc/rpc.h"
#include "client/cc/trainer.h"
#include "client/cc/worker.h"
#include "daemon/daemon.h"
#include "gtest/gtest.h"
#include "tests/e2e/hand_coordinator.h"
#include "transport/eventually.h"

namespace weightsync {
namespace e2e {

inline constexpr int64_t kRows = 96;
inline constexpr int64_t kColumns = 512;
inline constexpr int64_t kTensorBytes = kRows * kColumns * 2;
inline constexpr int kTensors = 3;

using transport::Eventually;

inline std::vector<client::Tensor> Tensors(char* data) {
  std::vector<client::Tensor> tensors;
  for (int i = 0; i < kTensors; ++i) {
    client::Tensor tensor;
    tensor.name = absl::StrCat("layers.", i, ".weight");
    tensor.dtype = v1::DTYPE_BF16;
    tensor.shape = {kRows, kColumns};
    tensor.data = data + i * kTensorBytes;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// One engine with `workers` workers, each of which wants everything.
class Engine {
 public:
  Engine(const std::string& address, int workers,
         const std::function<absl::Status()>& may_write = nullptr) {
    const std::string incarnation = client::RandomId();
    client::ReplicaOptions options;
    options.address = address;
    options.model = "m";
    options.replica = "r";
    options.incarnation = incarnation;
    options.worker_count = workers;
    client::ReplicaHooks hooks;
    hooks.on_pause = [](const client::PauseRequest&) {
      return absl::StatusOr<std::string>("drained");
    };
    hooks.on_resume = [this](const client::ResumeInfo& info) {
      absl::MutexLock lock(&mutex_);
      if (refusals_ > 0) {
        --refusals_;
        return absl::UnavailableError("not now");
      }
      resumes_.push_back(info);
      return absl::OkStatus();
    };
    auto replica = client::Replica::Start(options, hooks);
    EXPECT_TRUE(replica.ok()) << replica.status();
    replica_ = *std::move(replica);
    EXPECT_TRUE(replica_->WaitRegistered(absl::Seconds(60)).ok());
    for (int i = 0; i < workers; ++i) {
      live_.emplace_back(kTensors * kTensorBytes, '\xA5');
      client::WorkerOptions worker;
      worker.address = address;
      worker.model = "m";
      worker.replica = "r";
      worker.incarnation = incarnation;
      worker.worker_index = i;
      worker.worker_count = workers;
      worker.may_write = may_write;
      auto started = client::Worker::Start(worker, Tensors(&live_[i][0]));
      EXPECT_TRUE(started.ok()) << started.status();
      workers_.push_back(*std::move(started));
      EXPECT_TRUE(workers_[i]->WaitRegistered(absl::Seconds(60)).ok());
    }
  }

  client::Replica& replica() { return *replica_; }
  client::Worker& worker(int i) { return *workers_[i]; }
  const std::string& live(int i) const { return live_[i]; }
  // That many resumes fail.
  void RefuseResumes(int count) {
    absl::MutexLock lock(&mutex_);
    refusals_ = count;
  }
  std::vector<client::ResumeInfo> resumes() {
    absl::MutexLock lock(&mutex_);
    return resumes_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<client::ResumeInfo> resumes_ ABSL_GUARDED_BY(mutex_);
  int refusals_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::string> live_;
  std::unique_ptr<client::Replica> replica_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
};

class NodeTest : public ::testing::Test {
 protected:
  NodeTest() {
    char path[] = "/tmp/wsXXXXXX";
    EXPECT_NE(mkdtemp(path), nullptr);
    directory_ = path;
  }
  ~NodeTest() override {
    if (publisher_.joinable()) {
      coordinator_.Leave();
      if (daemon_ != nullptr) daemon_->Shutdown();
      publisher_.join();
    }
    engine_ = nullptr;
    trainer_ = nullptr;
    if (daemon_ != nullptr) daemon_->Shutdown();
    daemon_ = nullptr;
    std::filesystem::remove_all(directory_);
  }

  void StartDaemon(
      const std::function<void(daemon::Options*)>& change = nullptr) {
    daemon::Options options;
    options.node = "a";
    options.unix_socket = directory_ + "/d.sock";
    options.state_dir = directory_ + "/state";
    options.coordinator_address = coordinator_.address();
    options.store_budget_bytes = 64 << 20;
    options.copy_threads = 2;
    options.deadlines.heartbeat_interval = absl::Milliseconds(200);
    options.deadlines.heartbeat = absl::Seconds(20);
    options.deadlines.node_reconnect_grace = absl::Milliseconds(300);
    if (change) change(&options);
    auto daemon = daemon::Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  std::string address() const { return "unix:" + directory_ + "/d.sock"; }

  void StartTrainer() {
    client::TrainerOptions options;
    options.address = address();
    options.model = "m";
    options.reconnect = false;
    auto trainer = client::Trainer::Connect(options);
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    trainer_ = *std::move(trainer);
    auto arena =
        trainer_->AllocateArena(kTensors * kTensorBytes, absl::Seconds(60));
    ASSERT_TRUE(arena.ok()) << arena.status();
    memory_ = arena->data;
    ASSERT_TRUE(
        trainer_->RegisterShards(Tensors(memory_), absl::Seconds(60)).ok());
  }
  void Fill(int seed) {
    for (int64_t i = 0; i < kTensors * kTensorBytes; ++i) {
      memory_[i] = static_cast<char>((i * 31 + seed * 7 + i / 251) & 0xff);
    }
  }
  std::string Published() const {
    return std::string(memory_, kTensors * kTensorBytes);
  }
  void Publish(v1::UpdateMode update, v1::PublishMode publish) {
    if (publisher_.joinable()) publisher_.join();
    returned_ = false;
    publisher_ = std::thread([this, update, publish] {
      client::PublishOptions options;
      options.update.set_update_mode(update);
      options.update.set_publish_mode(publish);
      options.update.set_allow_no_recovery(true);
      published_ = trainer_->Publish(options).status();
      returned_ = true;
    });
  }

  // Up to where bytes move. Flows: none, everything is on node a.
  v1::DefineLayout Prepare(const std::string& update_id, int64_t version,
                           v1::UpdateMode update, v1::PublishMode publish) {
    const v1::DefineLayout define =
        coordinator_.Define("models/m", 64 << 10, {"a"});
    Publish(update, publish);
    coordinator_.OpenPublish(define, update_id, version);
    v1::NodeCommand prepare;
    v1::PrepareUpdate* p = prepare.mutable_prepare_update();
    p->set_model("models/m");
    p->set_update_id(update_id);
    p->set_version(version);
    p->set_layout_id(define.layout_id());
    p->mutable_epoch()->set_term(coordinator_.term());
    p->mutable_epoch()->set_counter(version);
    p->set_update_mode(update);
    p->set_publish_mode(publish);
    coordinator_.Send("a", prepare);
    const auto prepared = coordinator_.WaitFor(
        "a", [](const v1::NodeReport& r) { return r.has_update_prepared(); });
    EXPECT_FALSE(prepared.update_prepared().has_failure())
        << prepared.ShortDebugString();
    return define;
  }

  void Pause(const std::string& update_id, bool may_refuse = false,
             int barrier_seconds = 60) {
    v1::NodeCommand pause =
        coordinator_.PauseOf("r", "pause/" + update_id, update_id);
    pause.mutable_pause_replica()->set_may_refuse(may_refuse);
    pause.mutable_pause_replica()->mutable_barrier_timeout()->set_seconds(
        barrier_seconds);
    coordinator_.Send("a", pause);
    const auto paused = coordinator_.WaitFor(
        "a", [](const v1::NodeReport& r) { return r.has_replica_paused(); });
    EXPECT_FALSE(paused.replica_paused().has_failure());
  }

  void Move(const v1::DefineLayout& define, const std::string& update_id,
            int64_t version, int stream_workers) {
    v1::NodeCommand move;
    v1::MoveUpdate* m = move.mutable_move_update();
    m->set_model("models/m");
    m->set_update_id(update_id);
    m->mutable_epoch()->set_term(coordinator_.term());
    m->mutable_epoch()->set_counter(version);
    for (int w = 0; w < stream_workers; ++w) {
      const v1::NodeCommand apply =
          coordinator_.ApplyOf(define, "r", w, update_id, version, "");
      v1::StreamWorker* worker = m->add_stream_workers();
      worker->set_replica("r");
      worker->set_worker_index(w);
      worker->set_incarnation(apply.apply_worker().incarnation());
    }
    coordinator_.Send("a", move);
  }

  void Verify(const v1::DefineLayout& define, const std::string& update_id) {
    v1::NodeCommand manifest;
    *manifest.mutable_update_manifest() =
        coordinator_.Manifest(define, update_id);
    coordinator_.Send("a", manifest);
    const auto verified = coordinator_.WaitFor(
        "a", [](const v1::NodeReport& r) { return r.has_update_verified(); });
    EXPECT_FALSE(verified.update_verified().has_failure())
        << verified.ShortDebugString();
  }

  v1::WorkerAppliedReport WaitApplied(const std::string& command_id) {
    return coordinator_
        .WaitFor("a",
                 [&](const v1::NodeReport& r) {
                   return r.has_worker_applied() &&
                          r.worker_applied().command_id() == command_id;
                 })
        .worker_applied();
  }

  void Apply(const v1::DefineLayout& define, int worker,
             const std::string& update_id, int64_t version) {
    const std::string command_id =
        absl::StrCat("apply/", update_id, "/", worker);
    coordinator_.Send("a", coordinator_.ApplyOf(define, "r", worker, update_id,
                                                version, command_id));
    const v1::WorkerAppliedReport applied = WaitApplied(command_id);
    EXPECT_FALSE(applied.has_failure()) << applied.ShortDebugString();
    EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_INSTALLED);
    EXPECT_EQ(applied.installed().update_id(), update_id);
  }

  void Resume(const std::string& update_id) {
    coordinator_.Send(
        "a", coordinator_.ResumeOf("r", "resume/" + update_id, update_id));
    coordinator_.WaitFor(
        "a", [](const v1::NodeReport& r) { return r.has_replica_resumed(); });
  }

  void End(const std::string& update_id, bool committed) {
    v1::NodeCommand end;
    end.mutable_end_update()->set_model("models/m");
    end.mutable_end_update()->set_update_id(update_id);
    end.mutable_end_update()->set_committed(committed);
    coordinator_.Send("a", end);
  }

  // A whole STAGE update, by the book.
  v1::DefineLayout Stage(const std::string& update_id, int64_t version) {
    const v1::DefineLayout define = Prepare(
        update_id, version, v1::UPDATE_MODE_STAGE, v1::PUBLISH_MODE_SNAPSHOT);
    Move(define, update_id, version, 0);
    Verify(define, update_id);
    return define;
  }

  HandCoordinator coordinator_;
  std::string directory_;
  std::unique_ptr<daemon::Daemon> daemon_;
  std::unique_ptr<client::Trainer> trainer_;
  std::unique_ptr<Engine> engine_;
  char* memory_ = nullptr;
  std::thread publisher_;
  std::atomic<bool> returned_{false};
  absl::Status published_;
};

}  // namespace e2e
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_E2E_NODE_FIXTURE_H_
