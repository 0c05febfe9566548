#include "transport/host/sigbus_guard.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "absl/base/call_once.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

struct Guard {
  sigjmp_buf back;
  uintptr_t begin;
  uintptr_t end;
  Guard* outer;
};

constexpr uintptr_t kPage = 4096;

// The innermost guard of this thread.
thread_local Guard* current_guard = nullptr;
struct sigaction previous_action;

void OnSigbus(int signal_number, siginfo_t* info, void* context) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Guard* guard = current_guard; guard != nullptr; guard = guard->outer) {
    if (address >= guard->begin && address < guard->end)
      siglongjmp(guard->back, 1);
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal_number, info, context);
  } else if (previous_action.sa_handler != SIG_DFL &&
             previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal_number);
  } else {
    // Back to the default; the instruction runs again and ends the process with
    // the right signal.
    struct sigaction action;
    std::memset(&action, 0, sizeof(action));
    action.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &action, nullptr);
    // A signal that was sent does not come again by itself.
    if (info->si_code <= 0) raise(SIGBUS);
  }
}

void Install() {
  struct sigaction action;
  std::memset(&action, 0, sizeof(action));
  action.sa_sigaction = OnSigbus;
  sigemptyset(&action.sa_mask);
  // SA_NODEFER: the handler is left by a jump that does not restore the mask
  // (saving it would be a system call for every guard), so the signal must not
  // be blocked in it.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGBUS, &action, &previous_action);
}

}  // namespace

absl::Status RunGuarded(const void* begin, size_t bytes,
                        absl::FunctionRef<void()> body) {
  static absl::once_flag once;
  absl::call_once(once, Install);
  Guard guard;
  guard.begin = reinterpret_cast<uintptr_t>(begin) / kPage * kPage;
  guard.end =
      (reinterpret_cast<uintptr_t>(begin) + bytes + kPage - 1) / kPage * kPage;
  guard.outer = current_guard;
  if (sigsetjmp(guard.back, /*savemask=*/0) == 0) {
    current_guard = &guard;
    body();
    current_guard = guard.outer;
    return absl::OkStatus();
  }
  current_guard = guard.outer;
  return MakeError(absl::StatusCode::kDataLoss, "SOURCE_MEMORY_LOST",
                   "memory was taken away by its owner (truncated or unmapped) "
                   "while it was copied; register it again");
}

}  // namespace transport
}  // namespace weightsync
