#include "daemon/coordinator/coordinator.h"

#include <utility>

#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"

namespace weightsync {
namespace daemon {

Coordinator::Coordinator(CoordinatorOptions options, JournalState recovered)
    : core_(std::make_unique<CoordinatorCore>(std::move(options),
                                              std::move(recovered))) {}
Coordinator::~Coordinator() = default;

Actions Coordinator::Start(absl::Time now) { return core_->Start(now); }

Actions Coordinator::OnReport(absl::Time now, const std::string& node_stream,
                              const v1::NodeReport& report) {
  return core_->OnReport(now, node_stream, report);
}

Actions Coordinator::OnDisconnected(absl::Time now,
                                    const std::string& node_stream) {
  return core_->OnDisconnected(now, node_stream);
}

Actions Coordinator::OnTick(absl::Time now) { return core_->OnTick(now); }

Actions Coordinator::OnPrepareRequest(absl::Time now, int64_t request,
                                      const v1::PrepareRequest& prepare) {
  return core_->OnPrepareRequest(now, request, prepare);
}

Actions Coordinator::OnAdminRequest(absl::Time now, int64_t request,
                                    const AdminRequest& call) {
  return core_->OnAdminRequest(now, request, call);
}

void Coordinator::FillCluster(v1::Cluster* cluster) const {
  Queries(*core_).FillCluster(cluster);
}
absl::StatusOr<v1::Node> Coordinator::GetNode(absl::string_view name) const {
  return Queries(*core_).GetNode(name);
}
absl::StatusOr<v1::Model> Coordinator::GetModel(absl::string_view name) const {
  return Queries(*core_).GetModel(name);
}
absl::StatusOr<v1::Replica> Coordinator::GetReplica(
    absl::string_view name) const {
  return Queries(*core_).GetReplica(name, /*tensors=*/true);
}
absl::StatusOr<v1::Version> Coordinator::GetVersion(absl::string_view name,
                                                    absl::string_view update_id,
                                                    absl::Time now) const {
  return Queries(*core_).GetVersion(name, update_id, now);
}
absl::StatusOr<v1::ListNodesResponse> Coordinator::ListNodes(
    const v1::ListNodesRequest& request) const {
  return Queries(*core_).ListNodes(request);
}
absl::StatusOr<v1::ListModelsResponse> Coordinator::ListModels(
    const v1::ListModelsRequest& request) const {
  return Queries(*core_).ListModels(request);
}
absl::StatusOr<v1::ListReplicasResponse> Coordinator::ListReplicas(
    const v1::ListReplicasRequest& request) const {
  return Queries(*core_).ListReplicas(request);
}
absl::StatusOr<v1::ListVersionsResponse> Coordinator::ListVersions(
    const v1::ListVersionsRequest& request, absl::Time now) const {
  return Queries(*core_).ListVersions(request, now);
}

absl::StatusOr<PlanInputs> Coordinator::InputsOfPlan(
    const v1::PlanRequest& request) const {
  return core_->InputsOfPlan(request);
}
const std::string& Coordinator::cluster_id() const {
  return core_->cluster_id();
}
int64_t Coordinator::term() const { return core_->term(); }
CoordinatorCosts Coordinator::costs() const { return core_->costs(); }

}  // namespace daemon
}  // namespace weightsync
