// What AdminService shows of the coordinator. Reads only.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_QUERIES_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_QUERIES_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/coordinator/core.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace daemon {

// See Coordinator, whose calls these are.
class Queries {
 public:
  // `core` outlives it.
  explicit Queries(const CoordinatorCore& core) : core_(core) {}

  void FillCluster(v1::Cluster* cluster) const;
  absl::StatusOr<v1::Node> GetNode(absl::string_view name) const;
  absl::StatusOr<v1::Model> GetModel(absl::string_view name) const;
  // `tensors`: with what its workers take, which may be thousands.
  absl::StatusOr<v1::Replica> GetReplica(absl::string_view name,
                                         bool tensors = false) const;
  absl::StatusOr<v1::Version> GetVersion(absl::string_view name,
                                         absl::string_view update_id,
                                         absl::Time now) const;
  absl::StatusOr<v1::ListNodesResponse> ListNodes(
      const v1::ListNodesRequest& request) const;
  absl::StatusOr<v1::ListModelsResponse> ListModels(
      const v1::ListModelsRequest& request) const;
  absl::StatusOr<v1::ListReplicasResponse> ListReplicas(
      const v1::ListReplicasRequest& request) const;
  absl::StatusOr<v1::ListVersionsResponse> ListVersions(
      const v1::ListVersionsRequest& request, absl::Time now) const;

 private:
  v1::Node ShowNode(const NodeRun& node) const;
  v1::Model ShowModel(const ModelRun& model) const;
  v1::Replica ShowReplica(const ModelRun& model, const ReplicaRun& run) const;
  // Whether a replica that was not whole when the update began has neither it
  // nor what was committed after it.
  bool StillAbsent(const ModelRun& model, const std::string& replica,
                   const std::string& update_id) const;
  v1::Version Show(const ModelRun& model, const v1::Version& record) const;
  v1::Version ShowRunning(const ModelRun& model, const UpdateRun& update,
                          absl::Time now) const;
  // Newest first.
  std::vector<v1::Version> Versions(const ModelRun& model,
                                    absl::Time now) const;
  absl::StatusOr<const ModelRun*> FindModel(absl::string_view name) const;
  // The models that "models/{model}" or "models/-" names.
  absl::StatusOr<std::vector<const ModelRun*>> Parents(
      absl::string_view parent) const;

  const CoordinatorCore& core_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_QUERIES_H_
