// What a node does in each mode of an update, and by itself: a real daemon with
// real clients, driven by hand.

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
#include "transport/digest.h"
#include "transport/eventually.h"

namespace weightsync {
namespace e2e {
namespace {

using transport::Eventually;

constexpr int64_t kRows = 96;
constexpr int64_t kColumns = 512;
constexpr int64_t kTensorBytes = kRows * kColumns * 2;
constexpr int kTensors = 3;

std::vector<client::Tensor> Tensors(char* data) {
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
  std::vector<client::ResumeInfo> resumes() {
    absl::MutexLock lock(&mutex_);
    return resumes_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<client::ResumeInfo> resumes_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> live_;
  std::unique_ptr<client::Replica> replica_;
  std::vector<std::unique_ptr<client::Worker>> workers_;
};

class NodeModesTest : public ::testing::Test {
 protected:
  NodeModesTest() {
    char path[] = "/tmp/wsXXXXXX";
    EXPECT_NE(mkdtemp(path), nullptr);
    directory_ = path;
  }
  ~NodeModesTest() override {
    if (publisher_.joinable()) {
      coordinator_.Leave();
      daemon_->Shutdown();
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

TEST_F(NodeModesTest, StreamInPlaceGoesFromTheTrainersMemoryToTheLiveTensors) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  for (int version = 1; version <= 2; ++version) {
    const std::string update_id = absl::StrCat("u", version);
    Fill(version);
    const v1::DefineLayout define = Prepare(
        update_id, version, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_IN_PLACE);
    EXPECT_NE(engine_->live(0), Published());
    Pause(update_id);
    Move(define, update_id, version, 2);
    Verify(define, update_id);
    for (int w = 0; w < 2; ++w) {
      EXPECT_EQ(engine_->worker(w).installed().state(),
                v1::InstalledState::STATE_WRITING)
          << "there is no commit yet";
      EXPECT_TRUE(engine_->live(w) == Published());
    }
    EXPECT_FALSE(returned_) << "the source is not released";
    v1::NodeCommand release;
    release.mutable_release_sources()->set_model("models/m");
    release.mutable_release_sources()->set_update_id(update_id);
    coordinator_.Send("a", release);
    EXPECT_TRUE(Eventually([&] { return returned_.load(); }));
    EXPECT_TRUE(published_.ok()) << published_;
    for (int w = 0; w < 2; ++w) Apply(define, w, update_id, version);
    Resume(update_id);
    End(update_id, true);
  }
}

TEST_F(NodeModesTest, AStreamThatIsGivenUpIsReportedAsAMix) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define =
      Prepare("u1", 1, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT);
  Pause("u1");
  Move(define, "u1", 1, 1);
  Verify(define, "u1");
  End("u1", false);
  const v1::WorkerAppliedReport applied = WaitApplied("");
  EXPECT_EQ(applied.installed().state(), v1::InstalledState::STATE_WRITING);
  EXPECT_EQ(applied.installed().update_id(), "u1");
  EXPECT_TRUE(applied.has_failure());
  // The next one mends it.
  Fill(2);
  const v1::DefineLayout next = Stage("u2", 2);
  Apply(next, 0, "u2", 2);
  EXPECT_TRUE(engine_->live(0) == Published());
  End("u2", true);
}

TEST_F(NodeModesTest, LiveMemoryIsDigestedForTheCoordinator) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1");
  Apply(define, 0, "u1", 1);
  const v1::NodeCommand apply =
      coordinator_.ApplyOf(define, "r", 0, "u1", 1, "");
  v1::NodeCommand command;
  v1::DigestWorker* digest = command.mutable_digest_worker();
  digest->set_model("models/m");
  digest->set_replica("r");
  digest->set_incarnation(apply.apply_worker().incarnation());
  digest->mutable_digest()->set_command_id("d1");
  for (int i = 0; i < kTensors; ++i) digest->mutable_digest()->add_ordinals(i);
  coordinator_.Send("a", command);
  const v1::WorkerDigests digests =
      coordinator_
          .WaitFor(
              "a",
              [](const v1::NodeReport& r) { return r.has_worker_digests(); })
          .worker_digests();
  ASSERT_EQ(digests.digests().digests_size(), kTensors);
  for (int i = 0; i < kTensors; ++i) {
    transport::DigestRun run;
    run.ordinal = static_cast<uint32_t>(i);
    run.element_count = kRows * kColumns;
    run.element_bytes = 2;
    transport::Digest expected;
    transport::DigestAccumulate(memory_ + i * kTensorBytes, run, &expected);
    EXPECT_EQ(digests.digests().digests(i).lane0(), expected.lanes[0]);
    EXPECT_EQ(digests.digests().digests(i).lane1(), expected.lanes[1]);
  }
  // One that is not here is said to be lost.
  digest->set_worker_index(7);
  coordinator_.Send("a", command);
  EXPECT_EQ(coordinator_
                .WaitFor("a",
                         [](const v1::NodeReport& r) {
                           return r.has_worker_digests();
                         })
                .worker_digests()
                .digests()
                .failure()
                .reason(),
            "WORKER_LOST");
  End("u1", true);
}

// ---- Without a coordinator ----

TEST_F(NodeModesTest, AnOfferWhoseCommitNeverComesIsRefusedForGood) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  EXPECT_TRUE(engine_->replica().paused());
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "") << "on what it came with";
  EXPECT_FALSE(engine_->resumes()[0].weights_changed);
  // Also by a daemon that was started again meanwhile: it is on the disk.
  daemon_->Shutdown();
  daemon_ = nullptr;
  publisher_.join();
  StartDaemon();
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() &&
           r.replica_joined().refused_command_ids_size() > 0;
  });
  EXPECT_EQ(joined.replica_joined().refused_command_ids(0), "pause/u1");
  EXPECT_FALSE(joined.replica_joined().registration().paused());
  // And what was committed after all is not written into an engine that runs.
  coordinator_.Define("models/m", 64 << 10, {"a"});
  ASSERT_TRUE(Eventually([&] {
    return engine_->worker(0).status().ok() && engine_->worker(1).status().ok();
  }));
  coordinator_.Send("a", coordinator_.ApplyOf(define, "r", 0, "u1", 1, "late"));
  EXPECT_EQ(WaitApplied("late").failure().reason(), "REPLICA_RUNNING");
  EXPECT_EQ(engine_->live(0)[0], '\xA5');
}

TEST_F(NodeModesTest, WithoutLeaveToRefuseItStaysPaused) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  Stage("u1", 1);
  Pause("u1", /*may_refuse=*/false, /*barrier_seconds=*/1);
  coordinator_.Leave();
  absl::SleepFor(absl::Seconds(3));
  EXPECT_TRUE(engine_->replica().paused());
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() && r.replica_joined().registration().paused();
  });
  EXPECT_EQ(joined.replica_joined().refused_command_ids_size(), 0);
}

TEST_F(NodeModesTest, PastTheCommitAReplicaFinishesByItself) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 2);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  // The word came for one worker of two.
  Apply(define, 0, "u1", 1);
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  for (int w = 0; w < 2; ++w) {
    EXPECT_EQ(engine_->worker(w).installed().update_id(), "u1");
    EXPECT_TRUE(engine_->live(w) == Published());
  }
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "u1");
  EXPECT_TRUE(engine_->resumes()[0].weights_changed);
}

// A command that the coordinator of the term before gave may still wait in the
// worker's queue. Its successor, who may not know of it, must not take the
// memory for what it was: it could resume the engine just before it is written.
TEST_F(NodeModesTest, AnApplyThatWasRelayedCountsAsWritingUntilItIsAnswered) {
  StartDaemon();
  StartTrainer();
  absl::Notification asked, go_on;
  engine_ = std::make_unique<Engine>(address(), 1, [&] {
    if (!asked.HasBeenNotified()) asked.Notify();
    EXPECT_TRUE(go_on.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return absl::OkStatus();
  });
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1");
  coordinator_.Send("a",
                    coordinator_.ApplyOf(define, "r", 0, "u1", 1, "first"));
  ASSERT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_NE(engine_->worker(0).installed().state(),
            v1::InstalledState::STATE_WRITING);
  coordinator_.Leave();
  coordinator_.Return();
  const v1::NodeReport joined =
      coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
        return r.has_worker_joined() &&
               r.worker_joined().registration().installed().state() ==
                   v1::InstalledState::STATE_WRITING;
      });
  EXPECT_EQ(joined.worker_joined().registration().installed().update_id(),
            "u1");
  go_on.Notify();
  EXPECT_EQ(WaitApplied("first").installed().state(),
            v1::InstalledState::STATE_INSTALLED);
  // Answered: its own word counts again.
  coordinator_.Leave();
  coordinator_.Return();
  coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_worker_joined() &&
           r.worker_joined().registration().installed().state() ==
               v1::InstalledState::STATE_INSTALLED;
  });
}

// Found by tests/chaos/simulation (seed 160790): the same for buckets of a
// STREAM that nobody goes on with; they may still lie in the worker's queue.
TEST_F(NodeModesTest, AStreamCountsAsWritingUntilItsEndIsAnswered) {
  StartDaemon();
  StartTrainer();
  absl::Notification asked, go_on;
  engine_ = std::make_unique<Engine>(address(), 1, [&] {
    if (!asked.HasBeenNotified()) asked.Notify();
    EXPECT_TRUE(go_on.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return absl::OkStatus();
  });
  Fill(1);
  const v1::DefineLayout define =
      Prepare("u1", 1, v1::UPDATE_MODE_STREAM, v1::PUBLISH_MODE_SNAPSHOT);
  Pause("u1");
  Move(define, "u1", 1, 1);
  ASSERT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_NE(engine_->worker(0).installed().state(),
            v1::InstalledState::STATE_WRITING);
  const auto joined_with = [this](v1::InstalledState::State state) {
    coordinator_.Leave();
    coordinator_.Return();
    return coordinator_
        .WaitFor(
            "a",
            [state](const v1::NodeReport& r) {
              return r.has_worker_joined() &&
                     r.worker_joined().registration().installed().state() ==
                         state;
            })
        .worker_joined()
        .registration()
        .installed()
        .update_id();
  };
  EXPECT_EQ(joined_with(v1::InstalledState::STATE_WRITING), "u1");
  go_on.Notify();
  engine_ = nullptr;  // it asks those of this test
}

// The coordinator says so when an operator holds a replica beside an update:
// what the update needs does not end the operator's pause, also where no
// coordinator is there to remember it.
TEST_F(NodeModesTest, PastTheCommitAnOperatorsHoldStays) {
  StartDaemon();
  StartTrainer();
  engine_ = std::make_unique<Engine>(address(), 1);
  Fill(1);
  const v1::DefineLayout define = Stage("u1", 1);
  Pause("u1", /*may_refuse=*/true, /*barrier_seconds=*/1);
  Apply(define, 0, "u1", 1);
  Pause("");
  coordinator_.Leave();
  absl::SleepFor(absl::Seconds(2));
  EXPECT_TRUE(engine_->replica().paused());
  coordinator_.Return();
  coordinator_.Define("models/m", 64 << 10, {"a"});
  // The operator's hold ends, the update's is still there.
  Pause("u1");
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
  ASSERT_EQ(engine_->resumes().size(), 1u);
  EXPECT_EQ(engine_->resumes()[0].update_id, "u1");
  EXPECT_EQ(engine_->resumes()[0].version, 1);
}

// Found by tests/model: a daemon that was started again followed a coordinator
// which had been replaced and still ran, for it did not remember the newer
// term.
TEST_F(NodeModesTest, TheNewestTermOutlivesTheDaemon) {
  StartDaemon();
  const auto term_of = [](const v1::NodeReport& r) {
    return r.hello().newest_term();
  };
  const auto is_hello = [](const v1::NodeReport& r) { return r.has_hello(); };
  const auto is_done = [](const v1::NodeReport& r) {
    return r.has_hello_done();
  };
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 0);
  coordinator_.WaitFor("a", is_done);
  coordinator_.Leave();
  coordinator_.Return();
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 1);
  ASSERT_EQ(coordinator_.term(), 2);
  coordinator_.WaitFor("a", is_done);
  daemon_->Shutdown();
  daemon_ = nullptr;
  StartDaemon();
  EXPECT_EQ(term_of(coordinator_.WaitFor("a", is_hello)), 2);
}

TEST_F(NodeModesTest, AnIsolatedReplicaIsPausedWhereItWasToldSo) {
  StartDaemon([](daemon::Options* options) {
    options->pause_on_isolation = true;
    options->deadlines.max_staleness = absl::Seconds(1);
  });
  engine_ = std::make_unique<Engine>(address(), 1);
  coordinator_.Leave();
  EXPECT_TRUE(Eventually([&] { return engine_->replica().paused(); }));
  coordinator_.Return();
  const auto joined = coordinator_.WaitFor("a", [](const v1::NodeReport& r) {
    return r.has_replica_joined() && r.replica_joined().isolation_hold();
  });
  EXPECT_TRUE(joined.replica_joined().registration().paused());
  Resume("");
  EXPECT_TRUE(Eventually([&] { return !engine_->replica().paused(); }));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
