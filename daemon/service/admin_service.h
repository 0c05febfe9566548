// AdminService: answered by this daemon's coordinator, or by the one that it
// follows.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_ADMIN_SERVICE_H_
#define WEIGHTSYNC_DAEMON_SERVICE_ADMIN_SERVICE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "daemon/options.h"
#include "daemon/service/answer.h"
#include "daemon/service/coordinator_loop.h"
#include "daemon/service/stream.h"
#include "daemon/service/task_threads.h"
#include "grpcpp/channel.h"
#include "weightsync/v1/admin.grpc.pb.h"
#include "weightsync/v1/trainer.grpc.pb.h"

namespace weightsync {
namespace daemon {

// The coordinator as this daemon reaches it: one of the two is set.
struct CoordinatorAccess {
  CoordinatorLoop* local = nullptr;
  std::shared_ptr<grpc::Channel> remote;
  // For sentences.
  std::string name;
};

using VersionStream = WriteStream<v1::Version>;

// Thread-safe.
class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  AdminServiceImpl(CoordinatorAccess access, std::string node,
                   Deadlines deadlines);

  grpc::ServerUnaryReactor* GetCluster(grpc::CallbackServerContext* context,
                                       const v1::GetClusterRequest* request,
                                       v1::Cluster* response) override;
  grpc::ServerUnaryReactor* ListNodes(grpc::CallbackServerContext* context,
                                      const v1::ListNodesRequest* request,
                                      v1::ListNodesResponse* response) override;
  grpc::ServerUnaryReactor* GetNode(grpc::CallbackServerContext* context,
                                    const v1::GetNodeRequest* request,
                                    v1::Node* response) override;
  grpc::ServerUnaryReactor* ListModels(
      grpc::CallbackServerContext* context,
      const v1::ListModelsRequest* request,
      v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::Model* response) override;
  grpc::ServerUnaryReactor* ListReplicas(
      grpc::CallbackServerContext* context,
      const v1::ListReplicasRequest* request,
      v1::ListReplicasResponse* response) override;
  grpc::ServerUnaryReactor* GetReplica(grpc::CallbackServerContext* context,
                                       const v1::GetReplicaRequest* request,
                                       v1::Replica* response) override;
  grpc::ServerUnaryReactor* ListVersions(
      grpc::CallbackServerContext* context,
      const v1::ListVersionsRequest* request,
      v1::ListVersionsResponse* response) override;
  grpc::ServerUnaryReactor* GetVersion(grpc::CallbackServerContext* context,
                                       const v1::GetVersionRequest* request,
                                       v1::Version* response) override;
  grpc::ServerWriteReactor<v1::Version>* WatchVersion(
      grpc::CallbackServerContext* context,
      const v1::WatchVersionRequest* request) override;
  grpc::ServerUnaryReactor* Prepare(grpc::CallbackServerContext* context,
                                    const v1::PrepareRequest* request,
                                    v1::PrepareResponse* response) override;
  // A described plan is made here, whoever coordinates. In admin_plan.cc.
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context,
                                 const v1::PlanRequest* request,
                                 v1::PlanResponse* response) override;

  // What changes something.
  grpc::ServerUnaryReactor* PauseReplica(grpc::CallbackServerContext* context,
                                         const v1::PauseReplicaRequest* request,
                                         v1::Replica* response) override;
  grpc::ServerUnaryReactor* ResumeReplica(
      grpc::CallbackServerContext* context,
      const v1::ResumeReplicaRequest* request, v1::Replica* response) override;
  grpc::ServerUnaryReactor* RollbackModel(
      grpc::CallbackServerContext* context,
      const v1::RollbackModelRequest* request, v1::Model* response) override;
  grpc::ServerUnaryReactor* ReleaseModel(grpc::CallbackServerContext* context,
                                         const v1::ReleaseModelRequest* request,
                                         v1::Model* response) override;
  grpc::ServerUnaryReactor* VerifyReplica(
      grpc::CallbackServerContext* context,
      const v1::VerifyReplicaRequest* request,
      v1::VerifyReplicaResponse* response) override;
  grpc::ServerUnaryReactor* DrainNode(grpc::CallbackServerContext* context,
                                      const v1::DrainNodeRequest* request,
                                      v1::Node* response) override;
  grpc::ServerUnaryReactor* DeleteVersion(
      grpc::CallbackServerContext* context,
      const v1::DeleteVersionRequest* request,
      v1::DeleteVersionResponse* response) override;
  grpc::ServerUnaryReactor* DeleteReplica(
      grpc::CallbackServerContext* context,
      const v1::DeleteReplicaRequest* request,
      v1::DeleteReplicaResponse* response) override;
  grpc::ServerUnaryReactor* RemoveModel(grpc::CallbackServerContext* context,
                                        const v1::RemoveModelRequest* request,
                                        v1::Model* response) override;
  grpc::ServerUnaryReactor* AdoptCluster(grpc::CallbackServerContext* context,
                                         const v1::AdoptClusterRequest* request,
                                         v1::Cluster* response) override;
  grpc::ServerUnaryReactor* SaveVersion(
      grpc::CallbackServerContext* context,
      const v1::SaveVersionRequest* request,
      v1::SaveVersionResponse* response) override;
  grpc::ServerUnaryReactor* LoadVersion(grpc::CallbackServerContext* context,
                                        const v1::LoadVersionRequest* request,
                                        v1::Version* response) override;

  // Ends all watches, and those that come later.
  void Shutdown();

 private:
  // `local` fills the response from the coordinator, on its loop; `method` is
  // the stub's.
  template <typename Request, typename Response, typename Local,
            typename Method>
  grpc::ServerUnaryReactor* Handle(grpc::CallbackServerContext* context,
                                   const Request* request, Response* response,
                                   absl::Duration timeout, Local local,
                                   Method method);

  // The same for what changes something: `timeout` is the caller's wish, at
  // most operation_timeout.
  template <typename Request, typename Response, typename Method>
  grpc::ServerUnaryReactor* Change(grpc::CallbackServerContext* context,
                                   const Request* request, Response* response,
                                   absl::Duration timeout, Method method);

  // Answers with the plan that `make` returns, from a thread of its own.
  // PLAN_BUSY when too many are being made.
  template <typename Make>
  void MakePlan(std::shared_ptr<Answer<v1::PlanResponse>> answer, Make make);

  const CoordinatorAccess access_;
  const std::string node_;
  const Deadlines deadlines_;
  // Null where the coordinator is local.
  const std::unique_ptr<v1::AdminService::Stub> stub_;

  // Open streams of WatchVersion, which take themselves out.
  struct Watches {
    absl::Mutex mutex;
    bool down ABSL_GUARDED_BY(mutex) = false;
    absl::flat_hash_set<std::shared_ptr<VersionStream>> open
        ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Watches> watches_ = std::make_shared<Watches>();

  // Plans that are being made: large ones take seconds and memory.
  std::atomic<int> planning_{0};
  TaskThreads plans_{"ws-plan"};
};

// Follows a version as AdminService.WatchVersion promises. On a coordinator.
// Ends with the stream.
void FollowVersion(CoordinatorLoop* loop, const std::string& name,
                   std::shared_ptr<VersionStream> stream,
                   std::function<void()> on_closed);

// Waits for the end of an update as TrainerService.WaitVersion promises. On a
// coordinator.
void WaitForVersion(CoordinatorLoop* loop,
                    const v1::WaitVersionRequest& request,
                    std::shared_ptr<Answer<v1::Version>> answer);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_ADMIN_SERVICE_H_
