// What operators ask for.

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cc/wire_time.h"
#include "client/ctl/ctl.h"
#include "client/ctl/format.h"
#include "client/ctl/names.h"
#include "client/ctl/render.h"

namespace weightsync {
namespace ctl {

int Ctl::Prepare() {
  if (arguments_.positional.size() != 1) return Usage("prepare needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::PrepareRequest request;
  request.set_model(*name);
  // The daemon's own answer comes before the call's deadline.
  *request.mutable_timeout() = client::ToProto(timeout() * 0.9);
  v1::PrepareResponse response;
  const absl::Status status =
      Call("Prepare", [&](grpc::ClientContext* context) {
        return stub_->Prepare(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  return Print(response, [&] {
    return absl::StrCat(
        *name, " is ready: layout ", response.layout_id(), ", ",
        Counted(response.bucket_count(), "bucket"), ", ",
        HumanBytes(response.wire_bytes()), " over the network, prepared in ",
        HumanDuration(client::FromProto(response.prepare_duration())), "\n");
  });
}

int Ctl::Pause() {
  const auto name = OneName("replicas", "pause needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::PauseReplicaRequest request;
  request.set_name(*name);
  const absl::StatusOr<v1::PauseMode> mode = PauseModeOf("--mode");
  if (!mode.ok()) return UsageOf(mode.status());
  request.set_mode(*mode);
  SayTimeout(&request);
  v1::Replica replica;
  const absl::Status status =
      Call("PauseReplica", [&](grpc::ClientContext* context) {
        return stub_->PauseReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Resume() {
  const auto name = OneName("replicas", "resume needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::ResumeReplicaRequest request;
  request.set_name(*name);
  waits_ = true;
  v1::Replica replica;
  const absl::Status status =
      Call("ResumeReplica", [&](grpc::ClientContext* context) {
        return stub_->ResumeReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Rollback() {
  const auto name = OneName("versions", "rollback needs a VERSION");
  if (!name.has_value()) return kExitUsage;
  v1::RollbackModelRequest request;
  request.set_version(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("RollbackModel", [&](grpc::ClientContext* context) {
        return stub_->RollbackModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    return absl::StrCat(model.name(), " serves ", model.held_version(),
                        " until `weightsyncctl release ",
                        LastPart(model.name()), "`\n");
  });
}

int Ctl::Release() {
  if (arguments_.positional.size() != 1) return Usage("release needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::ReleaseModelRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("ReleaseModel", [&](grpc::ClientContext* context) {
        return stub_->ReleaseModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    return absl::StrCat(model.name(), " serves ",
                        model.active_version().empty() ? "no version yet"
                                                       : model.active_version(),
                        " and follows new ones\n");
  });
}

int Ctl::Remove() {
  if (arguments_.positional.size() != 1) return Usage("remove needs a MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::RemoveModelRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::Model model;
  const absl::Status status =
      Call("RemoveModel", [&](grpc::ClientContext* context) {
        return stub_->RemoveModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] {
    if (!model.removed()) {
      return absl::StrCat(model.name(),
                          " was removed, and published again meanwhile: ",
                          model.active_version(), "\n");
    }
    if (model.absent_replicas().empty()) {
      return absl::StrCat(model.name(),
                          " is removed: no engine has it, until it is "
                          "published again\n");
    }
    return absl::StrCat(
        model.name(), " is removed from every engine that is here; ",
        Counted(model.absent_replicas_size(), "replica"),
        " may still hold it and ",
        model.absent_replicas_size() == 1 ? "drops it when it comes: "
                                          : "drop it when they come: ",
        NamesText(model.absent_replicas()), "\n");
  });
}

int Ctl::Verify() {
  const auto name = OneName("replicas", "verify needs a REPLICA");
  if (!name.has_value()) return kExitUsage;
  v1::VerifyReplicaRequest request;
  request.set_name(*name);
  SayTimeout(&request);
  v1::VerifyReplicaResponse response;
  const absl::Status status =
      Call("VerifyReplica", [&](grpc::ClientContext* context) {
        return stub_->VerifyReplica(context, request, &response);
      });
  if (!status.ok()) return Fail(status);
  const int printed = Print(response, [&] {
    // Who could not be compared has not been found different.
    const bool differs = std::any_of(
        response.workers().begin(), response.workers().end(),
        [](const auto& worker) { return worker.different_tensors_size() > 0; });
    std::string out = absl::StrCat(
        *name,
        response.equal() ? " holds version "
        : differs        ? " DIFFERS from version "
                         : " could not be compared with version ",
        response.version(), " (update ", response.update_id(), ")\n");
    for (const auto& worker : response.workers()) {
      absl::StrAppend(&out, "  worker ", worker.worker_index(), " on ",
                      LastPart(worker.node()), ": ");
      if (worker.has_failure()) {
        absl::StrAppend(&out, worker.failure().reason(), ": ",
                        worker.failure().message(), "\n");
        continue;
      }
      absl::StrAppend(&out, Counted(worker.tensor_count(), "tensor"),
                      " compared, ", worker.different_tensors_size(),
                      " different\n");
      for (const std::string& tensor : worker.different_tensors()) {
        absl::StrAppend(&out, "    ", tensor, "\n");
      }
    }
    return out;
  });
  return printed == kExitOk && !response.equal() ? kExitError : printed;
}

int Ctl::Drain() {
  if (arguments_.positional.size() != 1) return Usage("drain needs a NODE");
  const auto name = ParseTopName(arguments_.positional[0], "nodes");
  if (!name.ok()) return UsageOf(name.status());
  v1::DrainNodeRequest request;
  request.set_name(*name);
  request.set_undo(arguments_.undo);
  v1::Node node;
  const absl::Status status =
      Call("DrainNode", [&](grpc::ClientContext* context) {
        return stub_->DrainNode(context, request, &node);
      });
  if (!status.ok()) return Fail(status);
  return Print(node, [&] { return RenderNode(node, absl::Now()); });
}

int Ctl::Delete() {
  if (arguments_.positional.size() != 1) {
    return Usage("delete needs a VERSION or a REPLICA");
  }
  // MODEL/3 is a version, MODEL/NAME a replica; full names say it themselves.
  const std::string& text = arguments_.positional[0];
  const std::string last = LastPart(text);
  const bool version =
      absl::StrContains(text, "/versions/") ||
      (!absl::StrContains(text, "/replicas/") && !last.empty() &&
       last.find_first_not_of("0123456789") == std::string::npos);
  const auto name = OneName(version ? "versions" : "replicas",
                            "delete needs a VERSION or a REPLICA");
  if (!name.has_value()) return kExitUsage;
  const auto forgotten = [&] { return absl::StrCat(*name, " is forgotten\n"); };
  if (version) {
    v1::DeleteVersionRequest request;
    request.set_name(*name);
    v1::DeleteVersionResponse response;
    const absl::Status status =
        Call("DeleteVersion", [&](grpc::ClientContext* context) {
          return stub_->DeleteVersion(context, request, &response);
        });
    return status.ok() ? Print(response, forgotten) : Fail(status);
  }
  v1::DeleteReplicaRequest request;
  request.set_name(*name);
  v1::DeleteReplicaResponse response;
  const absl::Status status =
      Call("DeleteReplica", [&](grpc::ClientContext* context) {
        return stub_->DeleteReplica(context, request, &response);
      });
  return status.ok() ? Print(response, forgotten) : Fail(status);
}

int Ctl::Adopt() {
  if (arguments_.positional.size() > 1) return Usage("adopt takes one CLUSTER");
  v1::AdoptClusterRequest request;
  if (!arguments_.positional.empty()) {
    request.set_cluster_id(arguments_.positional[0]);
  }
  v1::Cluster cluster;
  const absl::Status status =
      Call("AdoptCluster", [&](grpc::ClientContext* context) {
        return stub_->AdoptCluster(context, request, &cluster);
      });
  if (!status.ok()) return Fail(status);
  return Print(cluster, [&] {
    return absl::StrCat("cluster ", cluster.cluster_id(),
                        " is adopted, in term ", cluster.term(), "\n");
  });
}

}  // namespace ctl
}  // namespace weightsync
