#include "tests/e2e/demo_util.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cc/rpc.h"
#include "client/cc/wire_time.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace demo {

absl::StatusOr<std::vector<v1::TransferPolicy>> ParsePolicies(
    const std::string& text) {
  std::vector<v1::TransferPolicy> policies;
  for (absl::string_view name : absl::StrSplit(text, ',')) {
    v1::TransferPolicy policy;
    if (!v1::TransferPolicy_Parse(
            absl::StrCat("TRANSFER_POLICY_", absl::AsciiStrToUpper(name)),
            &policy)) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no transfer policy ", name));
    }
    policies.push_back(policy);
  }
  return policies;
}

void ExitUnless(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", ErrorReason(status).c_str(),
               std::string(status.message()).c_str());
  // At once, as if it had crashed: what callers have on GPUs and at the daemon
  // is theirs to give back only where all is well.
  std::fflush(nullptr);
  std::_Exit(1);
}

absl::Status WaitForReplicas(const std::string& address,
                             const std::string& model, int replicas,
                             absl::Duration timeout) {
  if (replicas == 0) return absl::OkStatus();
  const auto channel = client::MakeChannel(address);
  if (!channel.ok()) return channel.status();
  const auto stub = v1::AdminService::NewStub(*channel);
  const absl::Time deadline = absl::Now() + timeout;
  int serving = 0;
  while (absl::Now() < deadline) {
    grpc::ClientContext context;
    client::PrepareContext(deadline, &context);
    v1::ListReplicasRequest request;
    request.set_parent(client::ModelName(model));
    v1::ListReplicasResponse response;
    const absl::Status status = client::CallStatus(
        "ListReplicas", stub->ListReplicas(&context, request, &response));
    if (!status.ok() && !absl::IsNotFound(status) &&
        !absl::IsUnavailable(status)) {
      return status;
    }
    serving = static_cast<int>(
        std::count_if(response.replicas().begin(), response.replicas().end(),
                      [](const v1::Replica& replica) {
                        return replica.state() == v1::Replica::STATE_SERVING;
                      }));
    if (serving >= replicas) return absl::OkStatus();
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("only ", serving, " of ", replicas, " replicas serve after ",
                   absl::FormatDuration(timeout)));
}

absl::Status AppendTo(const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ostringstream old;
  old << std::ifstream(path).rdbuf();
  const std::string temporary = path + ".tmp";
  std::ofstream out(temporary);
  out << old.str() << text;
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

namespace {

std::atomic<bool> waiting{false};
absl::Notification& Signalled() {
  static auto* const notification = new absl::Notification;
  return *notification;
}

}  // namespace

void HandleSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] {
    int signal = 0;
    sigwait(&signals, &signal);
    if (!waiting) _exit(128 + signal);
    Signalled().Notify();
  }).detach();
}

double MonotonicSeconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

void WaitForSignal() {
  waiting = true;
  Signalled().WaitForNotification();
}

std::string ResultLine(const v1::Version& version, absl::Duration stall) {
  const auto phase = [&](absl::string_view name) {
    for (const v1::PhaseTime& time : version.phases()) {
      if (time.phase() == name) {
        return absl::ToDoubleSeconds(client::FromProto(time.measured()));
      }
    }
    return 0.0;
  };
  absl::Duration pause;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    pause = std::max(pause, client::FromProto(times.resumed_time()) -
                                client::FromProto(times.pause_request_time()));
  }
  return absl::StrFormat(
      "result version=%d bytes=%d stall=%.6f transfer=%.6f pause=%.6f "
      "total=%.6f\n",
      version.version(), version.total_bytes(), absl::ToDoubleSeconds(stall),
      phase("transfer"), absl::ToDoubleSeconds(pause), phase("total"));
}

}  // namespace demo
}  // namespace weightsync
