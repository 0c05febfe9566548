#include "daemon/run.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <iostream>
#include <memory>

#include "daemon/daemon.h"
#include "daemon/flags/flags.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr int kWrongFlags = 1;
constexpr int kNotStarted = 2;
constexpr int kInUse = 3;

// Ends that hang are ended.
constexpr unsigned kShutdownSeconds = 30;

int Fail(int code, const absl::Status& status) {
  std::cerr << "weightsyncd: " << ErrorReason(status) << ": "
            << status.message() << "\n";
  return code;
}

void RaiseDescriptorLimit() {
  // Arenas on offer and connections each take one.
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
    PLOG(WARNING) << "cannot raise RLIMIT_NOFILE";
}

}  // namespace

int RunDaemon(int argc, char** argv,
              const std::function<void(Options*)>& prepare) {
  ParseCommandLine(&argc, &argv);
  google::InitGoogleLogging(argv[0]);
  absl::StatusOr<Options> options = OptionsFromFlags();
  if (!options.ok()) return Fail(kWrongFlags, options.status());

  // Before any thread, so that all inherit it: signals are taken here and
  // nowhere else.
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // A checkpoint beyond RLIMIT_FSIZE fails alone.
  signal(SIGXFSZ, SIG_IGN);
  RaiseDescriptorLimit();
  if (prepare) prepare(&*options);

  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(*options);
  if (!daemon.ok()) {
    if (absl::IsInvalidArgument(daemon.status()) ||
        ErrorReason(daemon.status()) == "INSECURE_REQUIRED") {
      return Fail(kWrongFlags, daemon.status());
    }
    return Fail(absl::IsAlreadyExists(daemon.status()) ? kInUse : kNotStarted,
                daemon.status());
  }
  LOG(INFO) << "weightsyncd " << kSoftwareVersion << " serves node "
            << options->node << " at " << (*daemon)->addresses().unix_socket;
  for (const std::string& address : (*daemon)->addresses().listen) {
    LOG(INFO) << "listening at " << address;
  }

  int signal = 0;
  sigwait(&signals, &signal);
  LOG(INFO) << strsignal(signal) << ": shutting down";
  alarm(kShutdownSeconds);
  (*daemon)->Shutdown();
  return 0;
}

}  // namespace daemon
}  // namespace weightsync
