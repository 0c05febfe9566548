#include "daemon/service/client_services.h"

#include <utility>

#include "daemon/service/forward.h"
#include "daemon/service/proto_time.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

// The loop may be slow to begin and fast to end: tasks hold the stream, never a
// pointer into it.
template <typename Sessions, typename In, typename Out>
grpc::ServerBidiReactor<In, Out>* Serve(Agent* agent,
                                        Sessions* (Agent::*sessions)(),
                                        grpc::CallbackServerContext* context) {
  using Stream = ServerStream<In, Out>;
  std::shared_ptr<Stream> stream = Stream::Open(context);
  grpc::ServerBidiReactor<In, Out>* reactor = stream->reactor();
  agent->Post(
      [agent, sessions, stream] { (agent->*sessions)()->Open(stream); });
  stream->Start(
      [agent, sessions, stream](In message) {
        agent->Post([agent, sessions, stream, message = std::move(message)] {
          (agent->*sessions)()->Heard(stream.get(), message);
        });
      },
      [agent, sessions, stream] {
        agent->Post([agent, sessions, stream] {
          (agent->*sessions)()->Closed(stream.get());
        });
      },
      [agent, sessions, stream] {
        agent->Post([agent, sessions, stream] {
          (agent->*sessions)()->Closed(stream.get());
        });
      });
  return reactor;
}

}  // namespace

TrainerServiceImpl::TrainerServiceImpl(Agent* agent, CoordinatorAccess access,
                                       Deadlines deadlines)
    : agent_(agent),
      access_(std::move(access)),
      deadlines_(deadlines),
      stub_(access_.remote == nullptr
                ? nullptr
                : v1::TrainerService::NewStub(access_.remote)) {}

grpc::ServerBidiReactor<v1::TrainerHeartbeat, v1::TrainerEvent>*
TrainerServiceImpl::OpenSession(grpc::CallbackServerContext* context) {
  return Serve<TrainerSessions, v1::TrainerHeartbeat, v1::TrainerEvent>(
      agent_, &Agent::trainers, context);
}

grpc::ServerUnaryReactor* TrainerServiceImpl::AllocateArena(
    grpc::CallbackServerContext* context,
    const v1::AllocateArenaRequest* request,
    v1::AllocateArenaResponse* response) {
  // Faulting in a terabyte takes minutes.
  auto answer = std::make_shared<Answer<v1::AllocateArenaResponse>>(
      context, response, deadlines_.wait);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  agent_->Post(
      [agent = agent_, request = *request, answer = std::move(answer)] {
        agent->trainers()->AllocateArena(request, answer);
      });
  return reactor;
}

grpc::ServerUnaryReactor* TrainerServiceImpl::RegisterShards(
    grpc::CallbackServerContext* context,
    const v1::RegisterShardsRequest* request,
    v1::RegisterShardsResponse* response) {
  auto answer = std::make_shared<Answer<v1::RegisterShardsResponse>>(
      context, response, deadlines_.wait);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  // A large one, and gRPC keeps it until the answer is finished.
  agent_->Post([agent = agent_, request, answer = std::move(answer)] {
    agent->trainers()->RegisterShards(request, answer);
  });
  return reactor;
}

grpc::ServerUnaryReactor* TrainerServiceImpl::PublishVersion(
    grpc::CallbackServerContext* context,
    const v1::PublishVersionRequest* request,
    v1::PublishVersionResponse* response) {
  // The coordinator's own deadlines come first.
  auto answer = std::make_shared<Answer<v1::PublishVersionResponse>>(
      context, response, deadlines_.publish + deadlines_.gather);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  agent_->Post(
      [agent = agent_, request = *request, answer = std::move(answer)] {
        agent->trainers()->PublishVersion(request, answer);
      });
  return reactor;
}

grpc::ServerUnaryReactor* TrainerServiceImpl::WaitVersion(
    grpc::CallbackServerContext* context, const v1::WaitVersionRequest* request,
    v1::Version* response) {
  absl::Duration timeout = deadlines_.wait;
  if (request->has_timeout())
    timeout = std::min(timeout, DecodeDuration(request->timeout()));
  auto answer =
      std::make_shared<Answer<v1::Version>>(context, response, timeout);
  grpc::ServerUnaryReactor* reactor = answer->reactor();
  if (timeout < absl::ZeroDuration()) {
    answer->Finish(ErrorStatus(absl::StatusCode::kInvalidArgument,
                               "TIMEOUT_INVALID",
                               "give a timeout that is not negative, or none"));
  } else if (access_.local != nullptr) {
    WaitForVersion(access_.local, *request, std::move(answer));
  } else if (const absl::Status status = CheckNotForwarded(*context);
             !status.ok()) {
    answer->Finish(status);
  } else {
    // The coordinator keeps to the timeout in the request; its answer must
    // still have time to come.
    Forward(
        std::move(answer), *request, access_.name, deadlines_.call,
        [this](grpc::ClientContext* client, const v1::WaitVersionRequest* asked,
               v1::Version* into, std::function<void(grpc::Status)> done) {
          stub_->async()->WaitVersion(client, asked, into, std::move(done));
        });
  }
  return reactor;
}

grpc::ServerBidiReactor<v1::ReplicaReport, v1::ReplicaCommand>*
ReplicaServiceImpl::ControlReplica(grpc::CallbackServerContext* context) {
  return Serve<ReplicaSessions, v1::ReplicaReport, v1::ReplicaCommand>(
      agent_, &Agent::replicas, context);
}

grpc::ServerBidiReactor<v1::WorkerReport, v1::WorkerCommand>*
ReplicaServiceImpl::RunWorker(grpc::CallbackServerContext* context) {
  return Serve<ReplicaSessions, v1::WorkerReport, v1::WorkerCommand>(
      agent_, &Agent::replicas, context);
}

}  // namespace daemon
}  // namespace weightsync
