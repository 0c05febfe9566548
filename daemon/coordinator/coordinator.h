// The coordinator: decides, for every model, when replicas switch to which
// update. It sees the cluster through the streams of the nodes (node.proto) and
// acts through Actions; it does no I/O, reads no clock and has no threads, so
// that tests and simulations step it by hand.
//
//   Coordinator c(options, journal->state());
//   Do(c.Start(now));
//   for each report:      Do(c.OnReport(now, stream, report));
//   for a broken stream:  Do(c.OnDisconnected(now, stream));
//   every 100 ms or so:   Do(c.OnTick(now));
//
// How it is made:
//   update_machine.h   one update, from the first rank's arrival to its end
//   replica_machine.h  one replica: pause, apply, resume, fence
//   publish_book.h     which call of which rank belongs to which update
//   registry.h         who is there, and what fits together
// Those are plain and know no protos; this class translates.
//
// Not thread-safe: one thread calls everything. `now` never goes back.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_COORDINATOR_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_COORDINATOR_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/coordinator/actions.h"
#include "daemon/coordinator/costs.h"
#include "daemon/coordinator/journal_state.h"
#include "daemon/coordinator/options.h"
#include "daemon/coordinator/update_plan.h"
#include "schedule/describe.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

class CoordinatorCore;

class Coordinator {
 public:
  // `recovered`: what the journal held. An empty one makes a new cluster.
  Coordinator(CoordinatorOptions options, JournalState recovered);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Once, before anything else: takes the next term.
  Actions Start(absl::Time now);

  // `node_stream`: any name that no other stream has had. Its first report must
  // be a Hello.
  Actions OnReport(absl::Time now, const std::string& node_stream,
                   const v1::NodeReport& report);
  // Unknown streams are fine.
  Actions OnDisconnected(absl::Time now, const std::string& node_stream);
  // Looks at deadlines.
  Actions OnTick(absl::Time now);

  // AdminService.Prepare. Answered by PrepareDone{request}, perhaps at once.
  // `request` is the caller's number.
  Actions OnPrepareRequest(absl::Time now, int64_t request,
                           const v1::PrepareRequest& prepare);

  // The calls of AdminService that change something. Answered by
  // AdminDone{request}, perhaps at once.
  Actions OnAdminRequest(absl::Time now, int64_t request,
                         const AdminRequest& call);

  // ---- Queries: AdminService's answers, with its codes and reasons ----

  // All but answered_by and the protocol versions.
  void FillCluster(v1::Cluster* cluster) const;
  absl::StatusOr<v1::Node> GetNode(absl::string_view name) const;
  absl::StatusOr<v1::Model> GetModel(absl::string_view name) const;
  absl::StatusOr<v1::Replica> GetReplica(absl::string_view name) const;
  // "models/{model}/versions/{version}" or "…/versions/latest"; the newest
  // attempt at the number where `update_id` is empty. `now` is for the phase
  // that runs.
  //   NOT_FOUND  MODEL_UNKNOWN (not for …/latest of a model that is
  //   registered), VERSION_UNKNOWN.
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

  // For AdminService.Plan of a registered model: what PlanOf takes, which is
  // too slow for the thread that updates need.
  absl::StatusOr<PlanInputs> InputsOfPlan(const v1::PlanRequest& request) const;

  const std::string& cluster_id() const;
  int64_t term() const;
  CoordinatorCosts costs() const;

 private:
  std::unique_ptr<CoordinatorCore> core_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_COORDINATOR_H_
