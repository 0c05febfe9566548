// For tests: a daemon's services for clients, in this process, that do what the
// test says.
#ifndef WEIGHTSYNC_CLIENT_CC_FAKE_DAEMON_H_
#define WEIGHTSYNC_CLIENT_CC_FAKE_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "client/cc/fake_stream.h"
#include "weightsync/v1/admin.grpc.pb.h"
#include "weightsync/v1/replica.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace client {

using FakeWorkerStream = FakeStream<v1::WorkerReport, v1::WorkerCommand>;
using FakeReplicaStream = FakeStream<v1::ReplicaReport, v1::ReplicaCommand>;
using FakeTrainerStream = FakeStream<v1::TrainerHeartbeat, v1::TrainerEvent>;

class FakeDaemon {
 public:
  // Listens at a loopback port that the kernel chooses, or at `address`.
  explicit FakeDaemon(const std::string& address = "127.0.0.1:0") {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(),
                             &port_);
    builder.SetMaxReceiveMessageSize(-1);
    builder.RegisterService(&replica_service_);
    builder.RegisterService(&trainer_service_);
    builder.RegisterService(&admin_service_);
    server_ = builder.BuildAndStart();
  }
  ~FakeDaemon() { Stop(); }

  void Stop() {
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_->Wait();
      server_ = nullptr;
    }
  }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // Streams that clients opened.
  FakeStreams<FakeWorkerStream>& workers() { return replica_service_.workers; }
  FakeStreams<FakeReplicaStream>& replicas() {
    return replica_service_.replicas;
  }
  FakeStreams<FakeTrainerStream>& trainers() {
    return trainer_service_.trainers;
  }

  // What the trainer's calls answer; set before they come. They run on threads
  // of the server.
  std::function<grpc::Status(const v1::AllocateArenaRequest&,
                             v1::AllocateArenaResponse*)>
      on_allocate;
  std::function<grpc::Status(const v1::RegisterShardsRequest&,
                             v1::RegisterShardsResponse*)>
      on_register;
  std::function<grpc::Status(const v1::PublishVersionRequest&,
                             v1::PublishVersionResponse*)>
      on_publish;
  std::function<grpc::Status(const v1::WaitVersionRequest&, v1::Version*)>
      on_wait;
  std::function<grpc::Status(const v1::PrepareRequest&, v1::PrepareResponse*)>
      on_prepare;
  std::function<grpc::Status(const v1::GetVersionRequest&, v1::Version*)>
      on_get_version;

  // What the next trainer is told; "session-1" otherwise.
  void SetSession(const std::string& session) { session_ = session; }

  // The next worker, its registration received and accepted.
  std::shared_ptr<FakeWorkerStream> AcceptWorker(
      v1::RegisterWorker* registration = nullptr,
      absl::Duration heartbeat_interval = absl::Seconds(1),
      absl::Duration heartbeat_timeout = absl::Seconds(20)) {
    std::shared_ptr<FakeWorkerStream> stream = workers().Next();
    v1::WorkerReport report;
    if (stream == nullptr || !stream->Receive(&report)) return nullptr;
    if (registration != nullptr) *registration = report.register_();
    v1::WorkerCommand command;
    auto* registered = command.mutable_registered();
    SetTerms(heartbeat_interval, heartbeat_timeout, registered);
    stream->Send(command);
    return stream;
  }

  std::shared_ptr<FakeReplicaStream> AcceptReplica(
      v1::RegisterReplica* registration = nullptr) {
    std::shared_ptr<FakeReplicaStream> stream = replicas().Next();
    v1::ReplicaReport report;
    if (stream == nullptr || !stream->Receive(&report)) return nullptr;
    if (registration != nullptr) *registration = report.register_();
    v1::ReplicaCommand command;
    SetTerms(absl::Seconds(1), absl::Seconds(20), command.mutable_registered());
    stream->Send(command);
    return stream;
  }

  std::shared_ptr<FakeTrainerStream> AcceptTrainer(
      v1::TrainerIdentity* identity = nullptr,
      absl::Duration heartbeat_interval = absl::Seconds(1),
      absl::Duration heartbeat_timeout = absl::Seconds(20)) {
    std::shared_ptr<FakeTrainerStream> stream = trainers().Next();
    v1::TrainerHeartbeat first;
    if (stream == nullptr || !stream->Receive(&first)) return nullptr;
    if (identity != nullptr) *identity = first.identity();
    v1::TrainerEvent event;
    SetTerms(heartbeat_interval, heartbeat_timeout, event.mutable_opened());
    event.mutable_opened()->set_session(session_);
    stream->Send(event);
    return stream;
  }

 private:
  template <typename Message>
  static void SetTerms(absl::Duration interval, absl::Duration timeout,
                       Message* message) {
    message->mutable_heartbeat_interval()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(interval) % 1000000000));
    message->mutable_heartbeat_interval()->set_seconds(
        absl::ToInt64Seconds(interval));
    message->mutable_heartbeat_timeout()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(timeout) % 1000000000));
    message->mutable_heartbeat_timeout()->set_seconds(
        absl::ToInt64Seconds(timeout));
    message->set_node("nodes/fake");
  }

  struct ReplicaServiceImpl : public v1::ReplicaService::CallbackService {
    grpc::ServerBidiReactor<v1::WorkerReport, v1::WorkerCommand>* RunWorker(
        grpc::CallbackServerContext*) override {
      auto stream = FakeWorkerStream::Make(
          [](const v1::WorkerReport& report, v1::WorkerCommand* answer) {
            answer->mutable_heartbeat();
            return report.has_heartbeat();
          });
      workers.Add(stream);
      return stream.get();
    }
    grpc::ServerBidiReactor<v1::ReplicaReport, v1::ReplicaCommand>*
    ControlReplica(grpc::CallbackServerContext*) override {
      auto stream = FakeReplicaStream::Make(
          [](const v1::ReplicaReport& report, v1::ReplicaCommand* answer) {
            answer->mutable_heartbeat();
            return report.has_heartbeat();
          });
      replicas.Add(stream);
      return stream.get();
    }
    FakeStreams<FakeWorkerStream> workers;
    FakeStreams<FakeReplicaStream> replicas;
  };

  struct TrainerServiceImpl : public v1::TrainerService::CallbackService {
    explicit TrainerServiceImpl(FakeDaemon* daemon) : daemon(daemon) {}

    grpc::ServerBidiReactor<v1::TrainerHeartbeat, v1::TrainerEvent>*
    OpenSession(grpc::CallbackServerContext*) override {
      auto stream = FakeTrainerStream::Make(
          [](const v1::TrainerHeartbeat& heartbeat, v1::TrainerEvent* answer) {
            answer->mutable_heartbeat_interval()->set_seconds(1);
            return !heartbeat.has_identity();
          });
      trainers.Add(stream);
      return stream.get();
    }

    template <typename Fn, typename Request, typename Response>
    static grpc::ServerUnaryReactor* Answer(
        grpc::CallbackServerContext* context, const Fn& fn,
        const Request* request, Response* response) {
      auto* reactor = context->DefaultReactor();
      reactor->Finish(fn ? fn(*request, response)
                         : grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""));
      return reactor;
    }
    grpc::ServerUnaryReactor* AllocateArena(
        grpc::CallbackServerContext* context,
        const v1::AllocateArenaRequest* request,
        v1::AllocateArenaResponse* response) override {
      return Answer(context, daemon->on_allocate, request, response);
    }
    grpc::ServerUnaryReactor* RegisterShards(
        grpc::CallbackServerContext* context,
        const v1::RegisterShardsRequest* request,
        v1::RegisterShardsResponse* response) override {
      return Answer(context, daemon->on_register, request, response);
    }
    grpc::ServerUnaryReactor* PublishVersion(
        grpc::CallbackServerContext* context,
        const v1::PublishVersionRequest* request,
        v1::PublishVersionResponse* response) override {
      return Answer(context, daemon->on_publish, request, response);
    }
    grpc::ServerUnaryReactor* WaitVersion(grpc::CallbackServerContext* context,
                                          const v1::WaitVersionRequest* request,
                                          v1::Version* response) override {
      return Answer(context, daemon->on_wait, request, response);
    }

    FakeDaemon* const daemon;
    FakeStreams<FakeTrainerStream> trainers;
  };

  struct AdminServiceImpl : public v1::AdminService::Service {
    explicit AdminServiceImpl(FakeDaemon* daemon) : daemon(daemon) {}
    grpc::Status Prepare(grpc::ServerContext*,
                         const v1::PrepareRequest* request,
                         v1::PrepareResponse* response) override {
      return daemon->on_prepare(*request, response);
    }
    grpc::Status GetVersion(grpc::ServerContext*,
                            const v1::GetVersionRequest* request,
                            v1::Version* response) override {
      return daemon->on_get_version(*request, response);
    }
    FakeDaemon* const daemon;
  };

  ReplicaServiceImpl replica_service_;
  TrainerServiceImpl trainer_service_{this};
  AdminServiceImpl admin_service_{this};
  int port_ = 0;
  std::string session_ = "session-1";
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_FAKE_DAEMON_H_
