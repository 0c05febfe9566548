// A serving engine, as processes: one that controls it, one for each worker.
//
// Whenever it is not paused the control process takes a step: every worker
// hashes its live memory, all at once, and the step ends when all have
// answered. What the step saw goes to the control process's log, from which
// tests/chaos/checker.py judges: the hashes must be those of one committed
// update, the same for all workers. A pause waits for the step.
//
// The workers' processes reach the control process by a unix socket of the
// engine's own. When one of them is gone the engine steps no more, until
// whoever watches over it starts all of it again; so it does when the daemon
// has refused a process for good.
//
// With --swap workers have a spare set of tensors. A step is of the update that
// the engine was told at its last resume, and all workers hash the set that
// holds it.
#include <errno.h>
#include <gflags/gflags.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cc/replica.h"
#include "client/cc/worker.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "tests/chaos/control.h"
#include "tests/chaos/model.h"

DEFINE_string(role, "", "control or worker.");
DEFINE_string(who, "", "What this process is called in the logs.");
DEFINE_string(address, "", "The daemon of this node.");
DEFINE_string(model, "chaos", "");
DEFINE_string(replica, "", "");
DEFINE_string(incarnation, "", "Of the whole engine.");
DEFINE_int32(index, 0, "Of the worker.");
DEFINE_int32(workers, 1, "How many the engine has.");
DEFINE_uint64(seed, 1, "Of the shapes.");
DEFINE_int64(bytes, 8 << 20, "Of the model, about.");
DEFINE_bool(swap, false, "Workers have a spare set of tensors.");
DEFINE_bool(paused, false, "The engine waits for weights before it serves.");
DEFINE_int32(gpu, -1,
             "The GPU on which a worker's tensors are; -1: in host memory.");
DEFINE_string(engine_socket, "", "Between control process and workers.");
DEFINE_string(control_socket, "", "Where the run says what to do.");
DEFINE_string(run_socket, "", "Where the run hears of points reached.");
DEFINE_string(log, "", "Appended to.");

namespace weightsync {
namespace chaos {
namespace {

constexpr absl::Duration kBetweenSteps = absl::Milliseconds(20);
// An unchanged step is logged this often.
constexpr absl::Duration kLogAgain = absl::Milliseconds(500);

sockaddr_un EngineAddress() {
  sockaddr_un address;
  memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof(address.sun_path), "%s",
           FLAGS_engine_socket.c_str());
  return address;
}

bool Send(int fd, const nlohmann::json& message) {
  const std::string text = message.dump();
  return send(fd, text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

// Null at the end of the connection.
nlohmann::json Receive(int fd) {
  char buffer[4096];
  ssize_t n;
  do {
    n = recv(fd, buffer, sizeof(buffer), 0);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) return nullptr;
  return nlohmann::json::parse(buffer, buffer + n, nullptr, false);
}

// Ends this process when the daemon wants no more of it: only a new one, of a
// new incarnation, will be asked again.
template <typename Client>
void EndWhenRefused(Client* client, Control* control) {
  std::thread([client, control] {
    while (!client->ended()) absl::SleepFor(absl::Milliseconds(100));
    control->Log({{"ev", "refused"},
                  {"error", std::string(client->status().message())}});
    _exit(3);
  }).detach();
}

// A process whose context of CUDA is lost can do nothing but end, as an engine
// does at its next kernel.
void EndIfLost(const absl::Status& status, Control* control) {
  if (status.ok()) return;
  control->Log({{"ev", "gpu_lost"}, {"error", std::string(status.message())}});
  _exit(4);
}

// ---- worker ----

class WorkerProcess {
 public:
  int Run();

 private:
  void OnCommand(const nlohmann::json& command);
  // Writes into live memory behind the daemon's back, so that the checker has
  // something to find.
  void Plant(const std::string& path);
  // That set holds the update whole.
  absl::Status Swap(int set, const std::string& update);
  // Of the set that holds `told`.
  std::string Hash(const std::string& told);

  LiveModel live_;
  // With --swap alone.
  LiveModel spare_;
  absl::Mutex serving_mutex_;
  int serving_ ABSL_GUARDED_BY(serving_mutex_) = 0;
  std::string updates_[2] ABSL_GUARDED_BY(serving_mutex_);
  std::atomic<int64_t> hang_ms_{0};
  std::unique_ptr<Control> control_;
  std::unique_ptr<client::Worker> worker_;
};

void WorkerProcess::OnCommand(const nlohmann::json& command) {
  const std::string cmd = command.value("cmd", "");
  if (cmd == "hang_apply") hang_ms_ = command.value("ms", int64_t{0});
  if (cmd == "plant") Plant(command.value("path", ""));
}

void WorkerProcess::Plant(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  absl::MutexLock lock(&serving_mutex_);
  LiveModel& serving = serving_ == 0 ? live_ : spare_;
  for (std::vector<char>& bytes : serving.storage) {
    in.read(bytes.data(), bytes.size());
  }
  EndIfLost(serving.Push(), control_.get());
  control_->Log({{"ev", "planted"}, {"ok", static_cast<bool>(in)}});
}

absl::Status WorkerProcess::Swap(int set, const std::string& update) {
  control_->Reach("worker:writing", update);
  absl::SleepFor(absl::Milliseconds(hang_ms_.exchange(0)));
  absl::MutexLock lock(&serving_mutex_);
  control_->Log({{"ev", "swapped"}, {"update", update}});
  updates_[set] = update;
  return absl::OkStatus();
}

std::string WorkerProcess::Hash(const std::string& told) {
  absl::MutexLock lock(&serving_mutex_);
  for (int set = 0; set < 2; ++set) {
    if (!told.empty() && updates_[set] == told) serving_ = set;
  }
  LiveModel& serving = serving_ == 0 ? live_ : spare_;
  EndIfLost(serving.Pull(), control_.get());
  return serving.Hash();
}

int WorkerProcess::Run() {
  const auto parameters = Parameters(FLAGS_seed, FLAGS_bytes);
  live_ = MakeLive(parameters, FLAGS_index, FLAGS_workers);
  if (FLAGS_swap) spare_ = MakeLive(parameters, FLAGS_index, FLAGS_workers);
  control_ = std::make_unique<Control>(
      FLAGS_who, FLAGS_control_socket, FLAGS_run_socket, FLAGS_log,
      [this](const nlohmann::json& command) { OnCommand(command); });
  control_->Log({{"ev", "worker"},
                 {"replica", FLAGS_replica},
                 {"incarnation", FLAGS_incarnation},
                 {"index", FLAGS_index},
                 {"workers", FLAGS_workers},
                 {"own", live_.Hash()}});
  if (FLAGS_gpu >= 0) {
    EndIfLost(live_.MoveToGpu(FLAGS_gpu), control_.get());
    if (FLAGS_swap) EndIfLost(spare_.MoveToGpu(FLAGS_gpu), control_.get());
  }
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const sockaddr_un address = EngineAddress();
  for (int attempt = 0; connect(fd, reinterpret_cast<const sockaddr*>(&address),
                                sizeof(address)) != 0;
       ++attempt) {
    if (attempt == 1000) return 1;
    absl::SleepFor(absl::Milliseconds(10));
  }

  client::WorkerOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_model;
  options.replica = FLAGS_replica;
  options.incarnation = FLAGS_incarnation;
  options.worker_index = FLAGS_index;
  options.worker_count = FLAGS_workers;
  options.copy_threads = 1;
  options.client = "chaos";
  options.register_timeout = absl::Seconds(5);
  options.max_backoff = absl::Milliseconds(500);
  options.on_writing = [this](const std::string& update) {
    control_->Log({{"ev", "writing"}, {"update", update}});
    control_->Reach("worker:writing", update);
    absl::SleepFor(absl::Milliseconds(hang_ms_.exchange(0)));
  };
  options.on_applied = [this](const client::AppliedInfo& applied) {
    control_->Log({{"ev", "applied"},
                   {"update", applied.update_id},
                   {"version", applied.version},
                   {"ok", applied.status.ok()},
                   {"error", std::string(applied.status.message())}});
    if (ErrorReason(applied.status) == "DEVICE_FAULT")
      EndIfLost(applied.status, control_.get());
    control_->Reach("worker:applied", applied.update_id);
  };
  if (FLAGS_swap) {
    options.swap = [this](int set, const std::string& update) {
      return Swap(set, update);
    };
  }
  auto worker =
      FLAGS_swap ? client::Worker::Start(options, live_.tensors, spare_.tensors)
                 : client::Worker::Start(options, live_.tensors);
  if (!worker.ok()) {
    std::cerr << worker.status() << "\n";
    return 1;
  }
  worker_ = *std::move(worker);
  EndWhenRefused(worker_.get(), control_.get());
  // Its index, then a hash for each step.
  Send(fd, {{"index", FLAGS_index}});
  while (true) {
    const nlohmann::json step = Receive(fd);
    if (step.is_null()) break;
    const std::string hash = Hash(step.value("update", ""));
    const v1::InstalledState installed = worker_->installed();
    Send(fd, {{"step", step["step"]},
              {"hash", hash},
              {"state", static_cast<int>(installed.state())},
              {"update", installed.update_id()}});
  }
  control_->Log({{"ev", "engine_gone"}});
  // Whoever watches over the engine ends this.
  while (true) pause();
}

// ---- control ----

class ControlProcess {
 public:
  int Run();

 private:
  void OnCommand(const nlohmann::json& command);
  absl::StatusOr<std::string> Pause(const client::PauseRequest& request);
  absl::Status Resume(const client::ResumeInfo& info);
  void Serve();
  // False when a worker is gone.
  bool Step(int64_t number, nlohmann::json* line);

  std::unique_ptr<Control> control_;
  std::unique_ptr<client::Replica> replica_;
  std::vector<int> workers_;
  std::atomic<int64_t> hang_ms_{0};

  absl::Mutex mutex_;
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool stepping_ ABSL_GUARDED_BY(mutex_) = false;
  // What the engine was told that it serves.
  std::string update_ ABSL_GUARDED_BY(mutex_);
  int64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool changed_ ABSL_GUARDED_BY(mutex_) = true;
};

void ControlProcess::OnCommand(const nlohmann::json& command) {
  if (command.value("cmd", "") == "hang_pause") {
    hang_ms_ = command.value("ms", int64_t{0});
  }
}

absl::StatusOr<std::string> ControlProcess::Pause(
    const client::PauseRequest& request) {
  control_->Log({{"ev", "pausing"},
                 {"update", request.update_id},
                 {"mode", static_cast<int>(request.mode)}});
  control_->Reach("control:pausing", request.update_id);
  absl::SleepFor(
      std::min(absl::Milliseconds(hang_ms_.load()),
               request.deadline - absl::Now() + absl::Milliseconds(500)));
  bool drained;
  {
    absl::MutexLock lock(&mutex_);
    paused_ = true;
    const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !stepping_;
    };
    drained =
        mutex_.AwaitWithDeadline(absl::Condition(&idle), request.deadline);
  }
  if (!drained) {
    control_->Log({{"ev", "pause_failed"}, {"update", request.update_id}});
    return absl::DeadlineExceededError("a step is still running");
  }
  control_->Log({{"ev", "paused"}, {"update", request.update_id}});
  control_->Reach("control:paused", request.update_id);
  return "no step is running";
}

absl::Status ControlProcess::Resume(const client::ResumeInfo& info) {
  control_->Reach("control:resuming", info.update_id);
  control_->Log({{"ev", "resumed"},
                 {"update", info.update_id},
                 {"version", info.version},
                 {"changed", info.weights_changed}});
  absl::MutexLock lock(&mutex_);
  paused_ = false;
  update_ = info.update_id;
  version_ = info.version;
  changed_ = true;
  return absl::OkStatus();
}

bool ControlProcess::Step(int64_t number, nlohmann::json* line) {
  for (int fd : workers_) {
    if (!Send(fd, {{"step", number}, {"update", (*line)["update"]}})) {
      return false;
    }
  }
  (*line)["workers"] = nlohmann::json::array();
  for (int fd : workers_) {
    nlohmann::json answer = Receive(fd);
    if (!answer.is_object() || answer["step"] != number) return false;
    answer.erase("step");
    (*line)["workers"].push_back(std::move(answer));
  }
  return true;
}

void ControlProcess::Serve() {
  nlohmann::json last;
  absl::Time logged;
  for (int64_t number = 1;; ++number) {
    nlohmann::json line = {{"ev", "step"}, {"step", number}};
    bool changed;
    {
      absl::MutexLock lock(&mutex_);
      const auto running = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return !paused_;
      };
      mutex_.Await(absl::Condition(&running));
      stepping_ = true;
      line["update"] = update_;
      line["version"] = version_;
      changed = changed_;
      changed_ = false;
    }
    line["began"] = MonotonicNanos();
    const bool whole = Step(number, &line);
    if (!whole) {
      control_->Log({{"ev", "engine_broken"}});
      // A pause must not succeed: nobody knows what the workers are doing.
      return;
    }
    // Every step is compared with the one before; only news is written down.
    if (changed || line["workers"] != last ||
        absl::Now() - logged > kLogAgain) {
      last = line["workers"];
      logged = absl::Now();
      control_->Log(line);
    }
    {
      absl::MutexLock lock(&mutex_);
      stepping_ = false;
    }
    absl::SleepFor(kBetweenSteps);
  }
}

int ControlProcess::Run() {
  control_ = std::make_unique<Control>(
      FLAGS_who, FLAGS_control_socket, FLAGS_run_socket, FLAGS_log,
      [this](const nlohmann::json& command) { OnCommand(command); });
  control_->Log({{"ev", "engine"},
                 {"replica", FLAGS_replica},
                 {"incarnation", FLAGS_incarnation},
                 {"workers", FLAGS_workers},
                 {"swap", FLAGS_swap},
                 {"paused", FLAGS_paused}});
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  unlink(FLAGS_engine_socket.c_str());
  const sockaddr_un address = EngineAddress();
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address),
           sizeof(address)) != 0 ||
      listen(listener, FLAGS_workers) != 0) {
    perror("engine socket");
    return 1;
  }
  workers_.assign(FLAGS_workers, -1);
  for (int i = 0; i < FLAGS_workers; ++i) {
    pollfd waiting = {listener, POLLIN, 0};
    if (poll(&waiting, 1, 20000) != 1) return 1;
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    const nlohmann::json hello = Receive(fd);
    if (!hello.is_object()) return 1;
    workers_[hello.value("index", 0)] = fd;
  }
  paused_ = FLAGS_paused;

  client::ReplicaOptions options;
  options.address = FLAGS_address;
  options.model = FLAGS_model;
  options.replica = FLAGS_replica;
  options.incarnation = FLAGS_incarnation;
  options.worker_count = FLAGS_workers;
  options.paused = FLAGS_paused;
  options.atomic_swap = FLAGS_swap;
  options.client = "chaos";
  options.register_timeout = absl::Seconds(5);
  options.max_backoff = absl::Milliseconds(500);
  client::ReplicaHooks hooks;
  hooks.on_pause = [this](const client::PauseRequest& request) {
    return Pause(request);
  };
  hooks.on_resume = [this](const client::ResumeInfo& info) {
    return Resume(info);
  };
  auto replica = client::Replica::Start(options, hooks);
  if (!replica.ok()) {
    std::cerr << replica.status() << "\n";
    return 1;
  }
  replica_ = *std::move(replica);
  EndWhenRefused(replica_.get(), control_.get());
  Serve();
  while (true) pause();
}

}  // namespace
}  // namespace chaos
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;  // no files of its own
  google::InitGoogleLogging(argv[0]);
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  if (FLAGS_role == "worker") return weightsync::chaos::WorkerProcess().Run();
  return weightsync::chaos::ControlProcess().Run();
}
