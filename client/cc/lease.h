// Keeps one registration with a daemon alive: registers, sends heartbeats,
// notices a daemon that has gone silent, and registers again after a back-off
// when the stream breaks.
//
// One thread per lease does all of it; every callback runs on that thread.
// Callbacks must not block for longer than a heartbeat interval (hand work that
// does to another thread) and must not call Start or Stop.
#ifndef WEIGHTSYNC_CLIENT_CC_LEASE_H_
#define WEIGHTSYNC_CLIENT_CC_LEASE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cc/rpc.h"
#include "client/cc/stream.h"

namespace weightsync {
namespace client {

struct LeaseOptions {
  // For people: "worker 1 of models/m/replicas/r".
  std::string what;
  // Without a word of the daemon after the stream was opened. A daemon that
  // makes room for the registrant, which may take long, answers heartbeats
  // meanwhile.
  absl::Duration register_timeout = absl::Seconds(20);
  // A name that a dead predecessor still holds is asked for again this long.
  absl::Duration taken_grace = absl::Seconds(15);
  absl::Duration first_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
  // How long Stop waits for the daemon to end the stream cleanly.
  absl::Duration stop_timeout = absl::Seconds(2);
  // False: the lease ends with its first stream.
  bool reconnect = true;
  // Once it was registered, FAILED_PRECONDITION (it does not fit what trainers
  // hold now) is no end: they change, and it is asked for again.
  bool outlives_misfit = false;
};

// What the daemon asked for when it took the registration.
struct LeaseTerms {
  absl::Duration heartbeat_interval;
  absl::Duration heartbeat_timeout;
  std::string node;
};

template <typename Out, typename In>
class Lease {
 public:
  // Names one stream of this lease; 0 is none.
  using StreamNumber = uint64_t;

  struct Callbacks {
    typename Stream<Out, In>::Starter start;
    // Runs before each attempt, with no stream open.
    std::function<void()> before_attempt = [] {};
    // The first message of a stream.
    std::function<Out()> registration;
    std::function<Out()> heartbeat;
    // True and *terms filled when `message` is the daemon's answer to the
    // registration.
    std::function<bool(const In& message, LeaseTerms* terms)> accepted;
    // Everything else that the daemon says after it has accepted.
    std::function<void(In message, StreamNumber stream)> message;
    // The stream has ended; `status` says why.
    std::function<void(const absl::Status& status)> lost =
        [](const absl::Status&) {};
    // The last callback: no further attempt will be made.
    std::function<void(const absl::Status& status)> ended =
        [](const absl::Status&) {};
  };

  Lease(LeaseOptions options, Callbacks callbacks)
      : options_(std::move(options)), callbacks_(std::move(callbacks)) {}
  ~Lease() { Stop(); }

  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // REQUIRES: called once.
  void Start() {
    thread_ = std::thread([this] { Run(); });
  }

  // Deregisters and joins. Idempotent; not from a callback.
  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      if (stream_ != nullptr) stream_->Wake();
    }
    absl::MutexLock lock(&join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

  // Ends the current stream and registers anew, without a back-off.
  void Restart() {
    absl::MutexLock lock(&mutex_);
    restart_ = true;
    if (stream_ != nullptr) stream_->Cancel();
  }

  // Writes on stream `number`. False when that one has ended.
  bool Write(StreamNumber number, Out message) {
    std::shared_ptr<Stream<Out, In>> stream = StreamOf(number);
    return stream != nullptr && stream->Write(std::move(message));
  }

  // Waits until what was written on stream `number` has left this process.
  bool Flush(StreamNumber number, absl::Time deadline) {
    std::shared_ptr<Stream<Out, In>> stream = StreamOf(number);
    return stream != nullptr && stream->Flush(deadline);
  }

  // OK while registered. Otherwise why not: the last error while it is tried
  // again, or the error that ended the lease for good.
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return registered_ ? absl::OkStatus() : status_;
  }

  // True when no further attempt will be made.
  bool ended() const {
    absl::MutexLock lock(&mutex_);
    return ended_;
  }

  // What the daemon said when it last accepted.
  LeaseTerms terms() const {
    absl::MutexLock lock(&mutex_);
    return terms_;
  }

  // Waits until it is registered or has ended. DEADLINE_EXCEEDED carries the
  // last error.
  absl::Status WaitRegistered(absl::Time deadline) const {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithDeadline(
        absl::Condition(
            +[](const Lease* l) ABSL_EXCLUSIVE_LOCKS_REQUIRED(l->mutex_) {
              return l->registered_ || l->ended_;
            },
            this),
        deadline);
    if (registered_) return absl::OkStatus();
    if (ended_) return status_;
    return ErrorStatus(
        absl::StatusCode::kDeadlineExceeded, "REGISTER_TIMEOUT",
        absl::StrCat(options_.what,
                     " is not registered yet; it goes on trying. "
                     "The last answer was: ",
                     status_.message()));
  }

  // Waits until the lease has ended; false at the deadline.
  bool WaitEnded(absl::Time deadline) const {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithDeadline(absl::Condition(&ended_), deadline);
  }

 private:
  std::shared_ptr<Stream<Out, In>> StreamOf(StreamNumber number) const {
    absl::MutexLock lock(&mutex_);
    return number == number_ ? stream_ : nullptr;
  }

  void Run() {
    absl::BitGen random;
    absl::Duration backoff = options_.first_backoff;
    absl::Time taken_since = absl::InfiniteFuture();
    bool ever_registered = false;
    while (true) {
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_) break;
      }
      callbacks_.before_attempt();
      bool was_registered = false;
      const absl::Status end = RunStream(&was_registered);
      callbacks_.lost(end);
      ever_registered = ever_registered || was_registered;
      const bool misfit = options_.outlives_misfit && ever_registered &&
                          absl::IsFailedPrecondition(end);
      if (was_registered) {
        backoff = options_.first_backoff;
        taken_since = absl::InfiniteFuture();
      }
      if (absl::IsAlreadyExists(end)) {
        taken_since = std::min(taken_since, absl::Now());
      }
      const bool give_up =
          !options_.reconnect ||
          (absl::IsAlreadyExists(end)
               ? absl::Now() - taken_since > options_.taken_grace
               : IsPermanent(end) && !misfit);
      absl::MutexLock lock(&mutex_);
      registered_ = false;
      status_ = end;
      if (stopping_ || give_up) break;
      if (restart_) continue;
      // Jitter, so that the clients of a restarted daemon do not come at once.
      mutex_.AwaitWithTimeout(
          absl::Condition(
              +[](Lease* l) ABSL_EXCLUSIVE_LOCKS_REQUIRED(l->mutex_) {
                return l->stopping_ || l->restart_;
              },
              this),
          backoff * absl::Uniform(random, 0.5, 1.0));
      backoff = std::min(backoff * 2, options_.max_backoff);
    }
    absl::Status last;
    {
      absl::MutexLock lock(&mutex_);
      registered_ = false;
      if (stopping_) {
        status_ = ErrorStatus(absl::StatusCode::kCancelled, "CLOSED",
                              absl::StrCat(options_.what, " was closed."));
      }
      ended_ = true;
      last = status_;
    }
    callbacks_.ended(last);
  }

  // One stream from registration to its end.
  absl::Status RunStream(bool* was_registered) {
    std::shared_ptr<Stream<Out, In>> stream =
        Stream<Out, In>::Open(callbacks_.start);
    StreamNumber number;
    {
      absl::MutexLock lock(&mutex_);
      restart_ = false;
      stream_ = stream;
      number = ++number_;
      // A Stop that came before the stream was known has woken nobody.
      if (stopping_) stream->Wake();
    }
    const absl::Status end = Serve(stream.get(), number, was_registered);
    absl::MutexLock lock(&mutex_);
    registered_ = false;
    stream_ = nullptr;
    return end;
  }

  absl::Status Serve(Stream<Out, In>* stream, StreamNumber number,
                     bool* was_registered) {
    stream->Write(callbacks_.registration());
    absl::Time next_heartbeat = absl::Now() + absl::Seconds(1);
    LeaseTerms terms;
    In message;
    while (true) {
      const absl::Time silence_deadline =
          stream->last_received() + (*was_registered
                                         ? terms.heartbeat_timeout
                                         : options_.register_timeout);
      switch (
          stream->Next(std::min(next_heartbeat, silence_deadline), &message)) {
        case StreamEvent::kEnded:
          return EndOf(stream);
        case StreamEvent::kWoken:
          if (Stopping()) return EndCleanly(stream);
          break;
        case StreamEvent::kMessage:
          if (!*was_registered) {
            if (!callbacks_.accepted(message, &terms)) break;
            if (terms.heartbeat_interval <= absl::ZeroDuration()) {
              terms.heartbeat_interval = absl::Seconds(1);
            }
            if (terms.heartbeat_timeout <= terms.heartbeat_interval) {
              terms.heartbeat_timeout = 5 * terms.heartbeat_interval;
            }
            *was_registered = true;
            next_heartbeat = absl::Now() + terms.heartbeat_interval;
            absl::MutexLock lock(&mutex_);
            terms_ = terms;
            registered_ = true;
            status_ = absl::OkStatus();
          } else {
            callbacks_.message(std::move(message), number);
            message = In();
          }
          break;
        case StreamEvent::kTimeout:
          break;
      }
      const absl::Time now = absl::Now();
      if (now >= next_heartbeat) {
        stream->Write(callbacks_.heartbeat());
        next_heartbeat = now + (*was_registered ? terms.heartbeat_interval
                                                : absl::Seconds(1));
      }
      if (now < stream->last_received() + (*was_registered
                                               ? terms.heartbeat_timeout
                                               : options_.register_timeout)) {
        continue;
      }
      stream->Cancel();
      if (!*was_registered) {
        return ErrorStatus(
            absl::StatusCode::kUnavailable, "REGISTER_TIMEOUT",
            absl::StrCat(options_.what, ": the daemon did not answer within ",
                         absl::FormatDuration(options_.register_timeout),
                         "; is it running?"));
      }
      return ErrorStatus(
          absl::StatusCode::kUnavailable, "HEARTBEAT_LOST",
          absl::StrCat(options_.what, ": the daemon has been silent for ",
                       absl::FormatDuration(terms.heartbeat_timeout), "."));
    }
  }

  absl::Status EndOf(Stream<Out, In>* stream) const {
    const absl::Status status = FromGrpcStatus(stream->status());
    if (!status.ok()) return status;
    return ErrorStatus(
        absl::StatusCode::kUnavailable, "STREAM_ENDED",
        absl::StrCat(options_.what, ": the daemon ended the stream."));
  }

  bool Stopping() const {
    absl::MutexLock lock(&mutex_);
    return stopping_;
  }

  // Says that nothing more will come and gives the daemon a moment to end the
  // stream, which it does when everything of the lease is freed.
  absl::Status EndCleanly(Stream<Out, In>* stream) const {
    stream->FinishWrites();
    const absl::Time deadline = absl::Now() + options_.stop_timeout;
    In message;
    while (absl::Now() < deadline) {
      if (stream->Next(deadline, &message) == StreamEvent::kEnded) break;
    }
    stream->Cancel();
    return absl::CancelledError("closed");
  }

  const LeaseOptions options_;
  const Callbacks callbacks_;
  std::thread thread_;
  absl::Mutex join_mutex_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool restart_ ABSL_GUARDED_BY(mutex_) = false;
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_) =
      absl::UnavailableError("no attempt was made yet");
  LeaseTerms terms_ ABSL_GUARDED_BY(mutex_);
  StreamNumber number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Stream<Out, In>> stream_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_LEASE_H_
