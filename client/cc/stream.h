// One long-lived bidirectional stream to a daemon, with the two properties that
// a lease needs: writing never blocks, and every wait has a deadline.
//
//   auto stream = Stream<WorkerReport, WorkerCommand>::Open(
//       [&](grpc::ClientContext* context, auto* reactor) {
//         stub->async()->RunWorker(context, reactor);
//       });
//   stream->Write(registration);
//   WorkerCommand command;
//   switch (stream->Next(absl::Now() + absl::Seconds(1), &command)) { ... }
//
// Thread-safe. Messages are handed out in the order of arrival; Next may be
// called by one thread at a time.
#ifndef WEIGHTSYNC_CLIENT_CC_STREAM_H_
#define WEIGHTSYNC_CLIENT_CC_STREAM_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace weightsync {
namespace client {

enum class StreamEvent {
  kMessage,
  // Nothing came before the deadline.
  kTimeout,
  // The call is over and all its messages were handed out: see status().
  kEnded,
  // Wake() was called.
  kWoken,
};

template <typename Out, typename In>
class Stream {
 public:
  using Reactor = grpc::ClientBidiReactor<Out, In>;
  // Starts the call on the stub that the caller holds; the stub must outlive
  // the call to Open only.
  using Starter = std::function<void(grpc::ClientContext*, Reactor*)>;

  static std::unique_ptr<Stream> Open(const Starter& start) {
    return std::unique_ptr<Stream>(new Stream(start));
  }

  // Cancels the call where it still runs, and returns when gRPC has let go of
  // it (milliseconds: gRPC does not wait for the peer).
  ~Stream() {
    Cancel();
    absl::MutexLock lock(&core_->mutex);
    core_->mutex.Await(absl::Condition(&core_->done));
  }

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues a message. False when the call is over; the message is dropped.
  bool Write(Out message) { return core_->Write(std::move(message)); }

  // Waits until everything queued was handed to the transport. False at the
  // deadline, or when the call ended first.
  bool Flush(absl::Time deadline) {
    absl::MutexLock lock(&core_->mutex);
    core_->mutex.AwaitWithDeadline(
        absl::Condition(
            +[](Core* c) ABSL_EXCLUSIVE_LOCKS_REQUIRED(c->mutex) {
              return c->broken || c->done || (!c->writing && c->queue.empty());
            },
            core_.get()),
        deadline);
    return !core_->broken && !core_->done && !core_->writing &&
           core_->queue.empty();
  }

  // The next message, or why there is none.
  StreamEvent Next(absl::Time deadline, In* message) {
    absl::MutexLock lock(&core_->mutex);
    core_->mutex.AwaitWithDeadline(
        absl::Condition(
            +[](Core* c) ABSL_EXCLUSIVE_LOCKS_REQUIRED(c->mutex) {
              return c->woken || !c->inbox.empty() || c->done;
            },
            core_.get()),
        deadline);
    if (core_->woken) {
      core_->woken = false;
      return StreamEvent::kWoken;
    }
    if (!core_->inbox.empty()) {
      *message = std::move(core_->inbox.front());
      core_->inbox.pop_front();
      return StreamEvent::kMessage;
    }
    return core_->done ? StreamEvent::kEnded : StreamEvent::kTimeout;
  }

  // Makes the current or the next call of Next return kWoken.
  void Wake() {
    absl::MutexLock lock(&core_->mutex);
    core_->woken = true;
  }

  // Says that no more will be written: a daemon ends the lease cleanly. What is
  // queued goes out first.
  void FinishWrites() { core_->FinishWrites(); }

  // Ends the call at once.
  void Cancel() { core_->Cancel(); }

  // When the last message came; at first, when the call was opened.
  absl::Time last_received() const {
    absl::MutexLock lock(&core_->mutex);
    return core_->last_received;
  }

  // How the call ended. REQUIRES: Next returned kEnded.
  grpc::Status status() const {
    absl::MutexLock lock(&core_->mutex);
    return core_->status;
  }

 private:
  // gRPC calls it from its own threads until OnDone.
  struct Core : public Reactor {
    absl::Mutex mutex;
    grpc::ClientContext context;  // constant after Open
    std::deque<Out> queue ABSL_GUARDED_BY(mutex);
    Out current;  // owned by gRPC while writing
    In incoming;  // owned by gRPC while a read runs
    std::deque<In> inbox ABSL_GUARDED_BY(mutex);
    bool writing ABSL_GUARDED_BY(mutex) = false;
    bool finishing ABSL_GUARDED_BY(mutex) = false;
    bool finished ABSL_GUARDED_BY(mutex) = false;
    bool broken ABSL_GUARDED_BY(mutex) = false;
    bool held ABSL_GUARDED_BY(mutex) = true;
    bool done ABSL_GUARDED_BY(mutex) = false;
    bool woken ABSL_GUARDED_BY(mutex) = false;
    absl::Time last_received ABSL_GUARDED_BY(mutex) = absl::Now();
    grpc::Status status ABSL_GUARDED_BY(mutex);

    bool Write(Out message) {
      absl::MutexLock lock(&mutex);
      if (broken || done || finishing || !held) return false;
      queue.push_back(std::move(message));
      Pump();
      return true;
    }

    // REQUIRES: the hold is ours, so that gRPC takes new operations.
    void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      if (writing || broken || !held) return;
      if (!queue.empty()) {
        current = std::move(queue.front());
        queue.pop_front();
        writing = true;
        this->StartWrite(&current);
      } else if (finishing && !finished) {
        finished = true;
        this->StartWritesDone();
        Release();
      }
    }

    void FinishWrites() {
      absl::MutexLock lock(&mutex);
      if (broken || done || finishing) return;
      finishing = true;
      Pump();
    }

    void Cancel() {
      context.TryCancel();
      absl::MutexLock lock(&mutex);
      broken = true;
      Release();
    }

    void Release() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
      if (!held) return;
      held = false;
      this->RemoveHold();
    }

    void OnReadDone(bool ok) override {
      absl::MutexLock lock(&mutex);
      if (!ok) {
        // The server has ended the call, or it broke: OnDone comes as soon as
        // the hold is gone.
        broken = true;
        Release();
        return;
      }
      inbox.push_back(std::move(incoming));
      incoming = In();
      last_received = absl::Now();
      this->StartRead(&incoming);
    }

    void OnWriteDone(bool ok) override {
      absl::MutexLock lock(&mutex);
      writing = false;
      if (!ok) broken = true;
      Pump();
    }

    void OnDone(const grpc::Status& s) override {
      absl::MutexLock lock(&mutex);
      status = s;
      done = true;
    }
  };

  explicit Stream(const Starter& start) : core_(new Core) {
    start(&core_->context, core_.get());
    core_->AddHold();
    core_->StartRead(&core_->incoming);
    core_->StartCall();
  }

  const std::unique_ptr<Core> core_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_STREAM_H_
