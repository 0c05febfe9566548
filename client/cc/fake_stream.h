// For tests: the server's end of a stream, stepped by hand.
#ifndef WEIGHTSYNC_CLIENT_CC_FAKE_STREAM_H_
#define WEIGHTSYNC_CLIENT_CC_FAKE_STREAM_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace client {

// Owned by itself until the call is over, and by whoever has it from
// FakeStreams. Heartbeats are answered and counted, unless Mute() was called,
// and are not handed to the test. Thread-safe.
template <typename In, typename Out>
class FakeStream : public grpc::ServerBidiReactor<In, Out> {
 public:
  // `heartbeat` says whether a message is one, and fills the answer.
  using HeartbeatFn = std::function<bool(const In&, Out*)>;

  static std::shared_ptr<FakeStream> Make(HeartbeatFn heartbeat) {
    std::shared_ptr<FakeStream> stream(new FakeStream(std::move(heartbeat)));
    stream->self_ = stream;
    absl::MutexLock lock(&stream->mutex_);
    stream->StartRead(&stream->incoming_);
    return stream;
  }

  // The next message that is no heartbeat; false when none comes in time or the
  // client has gone.
  bool Receive(In* message, absl::Duration timeout = absl::Seconds(20)) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(
        absl::Condition(
            +[](FakeStream* s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s->mutex_) {
              return !s->inbox_.empty() || s->reads_done_;
            },
            this),
        timeout);
    if (inbox_.empty()) return false;
    *message = std::move(inbox_.front());
    inbox_.pop_front();
    return true;
  }

  void Send(Out message) {
    absl::MutexLock lock(&mutex_);
    outbox_.push_back(std::move(message));
    Pump();
  }

  // Ends the call; what was sent before goes out first.
  void End(grpc::Status status) {
    absl::MutexLock lock(&mutex_);
    if (finish_asked_) return;
    finish_asked_ = true;
    end_status_ = std::move(status);
    Pump();
  }

  // The client has gone or said that it will write no more.
  bool WaitClientDone(absl::Duration timeout = absl::Seconds(20)) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&reads_done_), timeout);
  }

  bool WaitHeartbeats(int count, absl::Duration timeout = absl::Seconds(20)) {
    absl::MutexLock lock(&mutex_);
    wanted_heartbeats_ = count;
    return mutex_.AwaitWithTimeout(
        absl::Condition(
            +[](FakeStream* s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s->mutex_) {
              return s->heartbeats_ >= s->wanted_heartbeats_;
            },
            this),
        timeout);
  }

  // As a daemon that stands still.
  void Mute() {
    absl::MutexLock lock(&mutex_);
    muted_ = true;
  }

 private:
  explicit FakeStream(HeartbeatFn heartbeat)
      : heartbeat_(std::move(heartbeat)) {}

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!outbox_.empty()) {
      current_ = std::move(outbox_.front());
      outbox_.pop_front();
      writing_ = true;
      this->StartWrite(&current_);
    } else if (finish_asked_) {
      finished_ = true;
      this->Finish(end_status_);
    }
  }

  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      reads_done_ = true;
      // The client has finished or gone: so does the call.
      if (!finish_asked_) {
        finish_asked_ = true;
        end_status_ = grpc::Status::OK;
      }
      Pump();
      return;
    }
    Out answer;
    if (heartbeat_(incoming_, &answer)) {
      ++heartbeats_;
      if (!muted_) {
        outbox_.push_back(std::move(answer));
        Pump();
      }
    } else {
      inbox_.push_back(std::move(incoming_));
    }
    incoming_ = In();
    this->StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) outbox_.clear();
    Pump();
  }

  void OnDone() override {
    std::shared_ptr<FakeStream> self = std::move(self_);
    absl::MutexLock lock(&mutex_);
    reads_done_ = true;
  }

  const HeartbeatFn heartbeat_;
  std::shared_ptr<FakeStream> self_;

  absl::Mutex mutex_;
  In incoming_;
  Out current_;
  std::deque<In> inbox_ ABSL_GUARDED_BY(mutex_);
  std::deque<Out> outbox_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool finish_asked_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool muted_ ABSL_GUARDED_BY(mutex_) = false;
  int heartbeats_ ABSL_GUARDED_BY(mutex_) = 0;
  int wanted_heartbeats_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::Status end_status_ ABSL_GUARDED_BY(mutex_);
};

// Streams in the order in which clients opened them. Thread-safe.
template <typename S>
class FakeStreams {
 public:
  void Add(std::shared_ptr<S> stream) {
    absl::MutexLock lock(&mutex_);
    streams_.push_back(std::move(stream));
  }

  // The next one; null when none comes in time.
  std::shared_ptr<S> Next(absl::Duration timeout = absl::Seconds(20)) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(
        absl::Condition(
            +[](FakeStreams* s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s->mutex_) {
              return !s->streams_.empty();
            },
            this),
        timeout);
    if (streams_.empty()) return nullptr;
    std::shared_ptr<S> stream = std::move(streams_.front());
    streams_.pop_front();
    return stream;
  }

 private:
  absl::Mutex mutex_;
  std::deque<std::shared_ptr<S>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_FAKE_STREAM_H_
