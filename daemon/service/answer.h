// The answer to one unary call, given later and from any thread.
//
// A handler takes the request, makes an Answer and returns its reactor to gRPC
// at once; whoever holds the Answer finishes it once. An Answer that nobody
// finished (the daemon is going down and dropped the task that held it)
// finishes itself, so that no caller waits for nothing.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_ANSWER_H_
#define WEIGHTSYNC_DAEMON_SERVICE_ANSWER_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

inline absl::Status ShuttingDown() {
  return ErrorStatus(
      absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
      "this weightsyncd is going down; try again with a back-off");
}

// The caller's deadline, or `default_timeout` from now when that is sooner or
// there is none.
inline absl::Time DeadlineOf(const grpc::CallbackServerContext& context,
                             absl::Duration default_timeout) {
  const absl::Time own = absl::Now() + default_timeout;
  const auto said = context.deadline();
  // Far-away deadlines overflow in conversions; they are none.
  if (said >=
      std::chrono::system_clock::now() + absl::ToChronoHours(absl::Hours(24)))
    return own;
  return std::min(own, absl::FromChrono(said));
}

// Held by shared_ptr. Finish is thread-safe; the response belongs to whoever
// will finish.
template <typename Response>
class Answer {
 public:
  // `context` and `response` as gRPC gave them to the handler. The deadline is
  // the caller's, at most `default_timeout` away.
  Answer(grpc::CallbackServerContext* context, Response* response,
         absl::Duration default_timeout)
      : reactor_(new Reactor),
        response_(response),
        deadline_(DeadlineOf(*context, default_timeout)) {}
  ~Answer() { Finish(ShuttingDown()); }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  // For gRPC; once, before anybody else can finish the answer.
  grpc::ServerUnaryReactor* reactor() { return reactor_; }

  // REQUIRES: not finished.
  Response* response() { return response_; }
  absl::Time deadline() const { return deadline_; }
  bool finished() const { return finished_.load(std::memory_order_acquire); }

  // Calls `cancelled` once when the caller has gone, or is cut off because this
  // daemon ends: at once, if that was before. On a thread of gRPC, which it
  // must not block. Whoever holds the answer finishes it all the same.
  // REQUIRES: not finished.
  void OnCancel(std::function<void()> cancelled) {
    reactor_->SetOnCancel(std::move(cancelled));
  }

  // The first call counts; says whether this was it.
  bool Finish(const absl::Status& status) {
    return FinishAs(ToGrpcStatus(status));
  }
  // With a status that came from another daemon, as it is.
  bool FinishAs(const grpc::Status& status) {
    if (finished_.exchange(true, std::memory_order_acq_rel)) return false;
    reactor_->Finish(status);
    return true;
  }

 private:
  class Reactor : public grpc::ServerUnaryReactor {
   public:
    void SetOnCancel(std::function<void()> cancelled) {
      {
        absl::MutexLock lock(&mutex_);
        if (!is_cancelled_) {
          on_cancel_ = std::move(cancelled);
          return;
        }
      }
      cancelled();
    }
    void OnCancel() override {
      std::function<void()> cancelled;
      {
        absl::MutexLock lock(&mutex_);
        is_cancelled_ = true;
        cancelled.swap(on_cancel_);
      }
      if (cancelled) cancelled();
    }
    void OnDone() override { delete this; }

   private:
    absl::Mutex mutex_;
    bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
    std::function<void()> on_cancel_ ABSL_GUARDED_BY(mutex_);
  };

  // Lives until OnDone, which comes after Finish.
  Reactor* const reactor_;
  Response* const response_;
  const absl::Time deadline_;
  std::atomic<bool> finished_{false};
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_ANSWER_H_
