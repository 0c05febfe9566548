// Both ends of a bidirectional stream, over gRPC's callback API: thousands of
// idle streams cost no thread. Each has a queue of messages to write, so that
// nobody waits for the network, and hands what comes in to a handler in order.
//
//   auto stream = ServerStream<In, Out>::Open(context);
//   stream->Start(on_message, on_end_of_input, on_closed);
//   return stream->reactor();
//
// Handlers are called on threads of gRPC, which they must not block, one call
// at a time, from the moment of Start on. on_closed comes once, after
// everything else; then all are destroyed, so that what they hold (the stream,
// as a rule) is let go.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_STREAM_H_
#define WEIGHTSYNC_DAEMON_SERVICE_STREAM_H_

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/client_callback.h"
#include "grpcpp/support/server_callback.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

// What waits to be written. The one at the front is with gRPC while `writing`;
// a deque does not move its elements.
template <typename Out>
struct WriteQueue {
  std::deque<Out> messages;
  bool writing = false;

  // Takes the message; what to give to StartWrite now, if anything.
  const Out* Push(Out message) {
    messages.push_back(std::move(message));
    if (writing) return nullptr;
    writing = true;
    return &messages.front();
  }
  // The front one is done; the next to give to StartWrite, if any.
  const Out* Pop(bool ok) {
    messages.pop_front();
    if (!ok) messages.clear();
    writing = !messages.empty();
    return writing ? &messages.front() : nullptr;
  }
};

// The server's end. Thread-safe.
template <typename In, typename Out>
class ServerStream : private grpc::ServerBidiReactor<In, Out> {
 public:
  using OnMessage = std::function<void(In)>;
  using OnClosed = std::function<void()>;

  static std::shared_ptr<ServerStream> Open(
      grpc::CallbackServerContext* context) {
    std::shared_ptr<ServerStream> stream(new ServerStream(context));
    stream->self_ = stream;
    return stream;
  }
  // Once. `on_end_of_input`: the client will say no more and waits for the
  // stream to end: Finish it when what it held is freed. Does not come where
  // on_closed says it all.
  void Start(OnMessage on_message, std::function<void()> on_end_of_input,
             OnClosed on_closed) {
    on_message_ = std::move(on_message);
    on_end_of_input_ = std::move(on_end_of_input);
    on_closed_ = std::move(on_closed);
    this->StartRead(&incoming_);
  }
  // For gRPC, once.
  grpc::ServerBidiReactor<In, Out>* reactor() { return this; }

  // Never blocks; dropped when the stream is over.
  void Write(Out message) {
    const Out* first;
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value() || broken_) return;
      first = outgoing_.Push(std::move(message));
    }
    if (first != nullptr) this->StartWrite(first);
  }

  // Ends the stream after what was written before. The first call counts.
  void Finish(const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value()) return;
      status_ = status;
      if (outgoing_.writing) return;
    }
    grpc::ServerBidiReactor<In, Out>::Finish(ToGrpcStatus(status));
  }

  // Ends it at once, for a peer that does not read any more; it sees CANCELLED.
  void Cancel() {
    absl::MutexLock lock(&mutex_);
    if (context_ != nullptr) context_->TryCancel();
  }

 private:
  explicit ServerStream(grpc::CallbackServerContext* context)
      : context_(context) {}

  void OnReadDone(bool ok) override {
    if (!ok) {
      // After a cancellation OnCancel sees to the rest.
      on_end_of_input_();
      return;
    }
    on_message_(std::move(incoming_));
    incoming_ = In();
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value()) return;
    }
    this->StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    const Out* next;
    absl::optional<absl::Status> finish;
    {
      absl::MutexLock lock(&mutex_);
      next = outgoing_.Pop(ok);
      if (!ok) broken_ = true;
      if (next == nullptr) finish = status_;
    }
    if (next != nullptr) {
      this->StartWrite(next);
    } else if (finish.has_value()) {
      grpc::ServerBidiReactor<In, Out>::Finish(ToGrpcStatus(*finish));
    }
  }

  void OnCancel() override {
    Finish(ErrorStatus(absl::StatusCode::kCancelled, "CANCELLED",
                       "the stream was cancelled"));
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&mutex_);
      context_ = nullptr;
    }
    std::shared_ptr<ServerStream> self = std::move(self_);
    OnClosed on_closed = std::move(on_closed_);
    on_message_ = nullptr;
    on_end_of_input_ = nullptr;
    if (on_closed) on_closed();
  }

  // Set by Start; used by one reaction at a time.
  OnMessage on_message_;
  std::function<void()> on_end_of_input_;
  OnClosed on_closed_;
  In incoming_;
  // gRPC's own share.
  std::shared_ptr<ServerStream> self_;

  absl::Mutex mutex_;
  // Null when gRPC is done.
  grpc::CallbackServerContext* context_ ABSL_GUARDED_BY(mutex_);
  WriteQueue<Out> outgoing_ ABSL_GUARDED_BY(mutex_);
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
};

// The server's end of a stream in one direction. Thread-safe.
template <typename Out>
class WriteStream : private grpc::ServerWriteReactor<Out> {
 public:
  static std::shared_ptr<WriteStream> Open() {
    std::shared_ptr<WriteStream> stream(new WriteStream);
    stream->self_ = stream;
    return stream;
  }
  // Once, before anything else. `on_written`: nothing waits to be written any
  // more. `on_closed` comes once, last.
  void Start(std::function<void()> on_written,
             std::function<void()> on_closed) {
    on_written_ = std::move(on_written);
    on_closed_ = std::move(on_closed);
  }
  // For gRPC, once.
  grpc::ServerWriteReactor<Out>* reactor() { return this; }

  // Never blocks; dropped when the stream is over.
  void Write(Out message) {
    const Out* first;
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value()) return;
      first = outgoing_.Push(std::move(message));
    }
    if (first != nullptr) this->StartWrite(first);
  }

  // Ends the stream after what was written before. The first call counts.
  void Finish(const absl::Status& status) { FinishAs(ToGrpcStatus(status)); }
  void FinishAs(const grpc::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value()) return;
      status_ = status;
      if (outgoing_.writing) return;
    }
    grpc::ServerWriteReactor<Out>::Finish(status);
  }

  // Whether Finish was called, or the client is gone.
  bool finished() const {
    absl::MutexLock lock(&mutex_);
    return status_.has_value();
  }

 private:
  WriteStream() = default;

  void OnWriteDone(bool ok) override {
    const Out* next;
    absl::optional<grpc::Status> finish;
    {
      absl::MutexLock lock(&mutex_);
      next = outgoing_.Pop(ok);
      if (next == nullptr) finish = status_;
    }
    if (next != nullptr) {
      this->StartWrite(next);
    } else if (finish.has_value()) {
      grpc::ServerWriteReactor<Out>::Finish(*finish);
    } else if (ok) {
      on_written_();
    }
  }

  void OnCancel() override {
    Finish(ErrorStatus(absl::StatusCode::kCancelled, "CANCELLED",
                       "the stream was cancelled"));
  }

  void OnDone() override {
    std::shared_ptr<WriteStream> self = std::move(self_);
    std::function<void()> on_closed = std::move(on_closed_);
    on_written_ = nullptr;
    if (on_closed) on_closed();
  }

  // Set by Start; used by one reaction at a time.
  std::function<void()> on_written_;
  std::function<void()> on_closed_;
  // gRPC's own share.
  std::shared_ptr<WriteStream> self_;

  mutable absl::Mutex mutex_;
  WriteQueue<Out> outgoing_ ABSL_GUARDED_BY(mutex_);
  absl::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

// The client's end. Thread-safe.
template <typename Out, typename In>
class ClientStream : private grpc::ClientBidiReactor<Out, In> {
 public:
  using OnMessage = std::function<void(In)>;
  // With the status that the server, or gRPC, gave.
  using OnClosed = std::function<void(absl::Status)>;
  // Has the stub begin the call: [stub](context, reactor) {
  // stub->async()->Method(context, reactor); }
  using Begin = std::function<void(grpc::ClientContext*,
                                   grpc::ClientBidiReactor<Out, In>*)>;

  static std::shared_ptr<ClientStream> Open(const Begin& begin,
                                            OnMessage on_message,
                                            OnClosed on_closed) {
    std::shared_ptr<ClientStream> stream(new ClientStream);
    stream->self_ = stream;
    stream->on_message_ = std::move(on_message);
    stream->on_closed_ = std::move(on_closed);
    begin(&stream->context_, stream.get());
    // Writes come from outside of reactions: without a hold the call could end
    // under one.
    stream->AddHold();
    stream->StartRead(&stream->incoming_);
    stream->StartCall();
    return stream;
  }

  // Never blocks; dropped when the stream is over.
  void Write(Out message) {
    const Out* first;
    {
      absl::MutexLock lock(&mutex_);
      if (over_) return;
      first = outgoing_.Push(std::move(message));
      if (first != nullptr) ++starting_;
    }
    if (first == nullptr) return;
    this->StartWrite(first);
    StartedWrite();
  }

  // Ends it at once.
  void Cancel() { context_.TryCancel(); }

 private:
  ClientStream() = default;

  // The hold goes when nothing can be written any more and nobody is just about
  // to.
  void StartedWrite() {
    {
      absl::MutexLock lock(&mutex_);
      if (--starting_ > 0 || !over_ || hold_removed_) return;
      hold_removed_ = true;
    }
    this->RemoveHold();
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      on_message_(std::move(incoming_));
      incoming_ = In();
      this->StartRead(&incoming_);
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      over_ = true;
      if (starting_ > 0 || hold_removed_) return;
      hold_removed_ = true;
    }
    this->RemoveHold();
  }

  void OnWriteDone(bool ok) override {
    const Out* next;
    {
      absl::MutexLock lock(&mutex_);
      next = outgoing_.Pop(ok);
      if (!ok) over_ = true;
    }
    // In a reaction: needs no hold.
    if (next != nullptr) this->StartWrite(next);
  }

  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<ClientStream> self = std::move(self_);
    OnClosed on_closed = std::move(on_closed_);
    on_message_ = nullptr;
    if (on_closed) on_closed(FromGrpcStatus(status));
  }

  grpc::ClientContext context_;
  OnMessage on_message_;
  OnClosed on_closed_;
  In incoming_;
  std::shared_ptr<ClientStream> self_;

  absl::Mutex mutex_;
  WriteQueue<Out> outgoing_ ABSL_GUARDED_BY(mutex_);
  // Threads between taking a message to the front and giving it to gRPC.
  int starting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool hold_removed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_STREAM_H_
