// TrainerService and ReplicaService: hand what comes over gRPC to the agent's
// loop.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_CLIENT_SERVICES_H_
#define WEIGHTSYNC_DAEMON_SERVICE_CLIENT_SERVICES_H_

#include <memory>

#include "daemon/options.h"
#include "daemon/service/admin_service.h"
#include "daemon/service/agent.h"
#include "weightsync/v1/replica.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace daemon {

// Thread-safe.
class TrainerServiceImpl final : public v1::TrainerService::CallbackService {
 public:
  // `agent` outlives the service.
  TrainerServiceImpl(Agent* agent, CoordinatorAccess access,
                     Deadlines deadlines);

  grpc::ServerBidiReactor<v1::TrainerHeartbeat, v1::TrainerEvent>* OpenSession(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* AllocateArena(
      grpc::CallbackServerContext* context,
      const v1::AllocateArenaRequest* request,
      v1::AllocateArenaResponse* response) override;
  grpc::ServerUnaryReactor* RegisterShards(
      grpc::CallbackServerContext* context,
      const v1::RegisterShardsRequest* request,
      v1::RegisterShardsResponse* response) override;
  grpc::ServerUnaryReactor* PublishVersion(
      grpc::CallbackServerContext* context,
      const v1::PublishVersionRequest* request,
      v1::PublishVersionResponse* response) override;
  grpc::ServerUnaryReactor* WaitVersion(grpc::CallbackServerContext* context,
                                        const v1::WaitVersionRequest* request,
                                        v1::Version* response) override;

 private:
  Agent* const agent_;
  const CoordinatorAccess access_;
  const Deadlines deadlines_;
  const std::unique_ptr<v1::TrainerService::Stub> stub_;
};

// Thread-safe.
class ReplicaServiceImpl final : public v1::ReplicaService::CallbackService {
 public:
  // `agent` outlives the service.
  explicit ReplicaServiceImpl(Agent* agent) : agent_(agent) {}

  grpc::ServerBidiReactor<v1::ReplicaReport, v1::ReplicaCommand>*
  ControlReplica(grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<v1::WorkerReport, v1::WorkerCommand>* RunWorker(
      grpc::CallbackServerContext* context) override;

 private:
  Agent* const agent_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_CLIENT_SERVICES_H_
