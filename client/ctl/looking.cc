// Looking at a cluster.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cc/rpc.h"
#include "client/ctl/ctl.h"
#include "client/ctl/format.h"
#include "client/ctl/names.h"
#include "client/ctl/render.h"
#include "proto/status.h"

namespace weightsync {
namespace ctl {

int Ctl::Status() {
  if (!arguments_.positional.empty()) return Usage("status takes no argument");
  v1::Cluster cluster;
  v1::ListNodesResponse nodes;
  v1::ListModelsResponse models;
  v1::ListReplicasResponse replicas;
  absl::Status status = GetCluster(&cluster);
  if (status.ok()) status = ListNodes(&nodes);
  if (status.ok()) status = ListModels(&models);
  if (status.ok()) status = ListReplicas("models/-", &replicas);
  if (!status.ok()) return Fail(status);
  // The newest of each model, and the one that runs.
  v1::ListVersionsResponse versions;
  for (const v1::Model& model : models.models()) {
    std::vector<std::string> names = {
        absl::StrCat(model.name(), "/versions/latest")};
    if (!model.updating_version().empty()) {
      names.push_back(model.updating_version());
    }
    for (const std::string& name : names) {
      v1::GetVersionRequest request;
      request.set_name(name);
      v1::Version version;
      status = Call("GetVersion", [&](grpc::ClientContext* context) {
        return stub_->GetVersion(context, request, &version);
      });
      // There is none before the first publish, and old ones are forgotten.
      if (absl::IsNotFound(status)) continue;
      if (!status.ok()) return Fail(status);
      const bool known =
          std::any_of(versions.versions().begin(), versions.versions().end(),
                      [&](const v1::Version& v) {
                        return v.update_id() == version.update_id();
                      });
      if (!known) *versions.add_versions() = version;
    }
  }
  if (!arguments_.json) {
    Snapshot snapshot;
    snapshot.cluster = cluster;
    snapshot.nodes = ToVector(nodes.nodes());
    snapshot.models = ToVector(models.models());
    snapshot.replicas = ToVector(replicas.replicas());
    snapshot.versions = ToVector(versions.versions());
    *screen_.out << RenderStatus(snapshot, absl::Now());
    return cluster.has_blocked() ? kExitError : kExitOk;
  }
  const auto list = [](const auto& items) {
    return absl::StrJoin(items, ",", [](std::string* out, const auto& item) {
      out->append(ToJson(item, /*pretty=*/false).value_or("{}"));
    });
  };
  *screen_.out << "{\"cluster\":"
               << ToJson(cluster, /*pretty=*/false).value_or("{}")
               << ",\"nodes\":[" << list(nodes.nodes()) << "],\"models\":["
               << list(models.models()) << "],\"replicas\":["
               << list(replicas.replicas()) << "],\"versions\":["
               << list(versions.versions()) << "]}\n";
  return cluster.has_blocked() ? kExitError : kExitOk;
}

absl::StatusOr<std::string> Ctl::WatchedName() {
  if (arguments_.positional.empty()) {
    v1::ListModelsResponse models;
    const absl::Status status = ListModels(&models);
    if (!status.ok()) return status;
    if (models.models().empty()) {
      return ErrorStatus(absl::StatusCode::kNotFound, "MODEL_UNKNOWN",
                         "There is no model yet.");
    }
    if (models.models_size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "there are several models, name one: ",
          absl::StrJoin(models.models(), ", ",
                        [](std::string* out, const v1::Model& model) {
                          out->append(LastPart(model.name()));
                        })));
    }
    return absl::StrCat(models.models(0).name(), "/versions/latest");
  }
  const absl::StatusOr<Name> name =
      ParseName(arguments_.positional[0], "versions");
  if (!name.ok()) return name.status();
  return name->resource.empty() ? absl::StrCat(name->model, "/versions/latest")
                                : name->resource;
}

int Ctl::Watch() {
  if (arguments_.positional.size() > 1) return Usage("watch takes one VERSION");
  const absl::StatusOr<std::string> name = WatchedName();
  if (!name.ok()) {
    return absl::IsInvalidArgument(name.status()) ? UsageOf(name.status())
                                                  : Fail(name.status());
  }
  const bool latest = absl::EndsWith(*name, "/latest");
  v1::WatchVersionRequest request;
  request.set_name(*name);
  grpc::ClientContext context;
  if (arguments_.timeout.has_value()) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + *arguments_.timeout));
  }
  const std::unique_ptr<grpc::ClientReader<v1::Version>> reader =
      stub_->WatchVersion(&context, request);
  v1::Version version;
  std::string shown_update;
  v1::Version::State shown_state = v1::Version::STATE_UNSPECIFIED;
  int shown_tenth = -1;
  bool line_open = false;
  while (reader->Read(&version)) {
    const bool ended = HasEnded(version);
    const absl::Time now = absl::Now();
    if (arguments_.json) {
      *screen_.out << ToJson(version, /*pretty=*/false).value_or("{}") << "\n";
    } else if (screen_.terminal) {
      if (line_open && shown_update != version.update_id()) {
        *screen_.out << "\n";
      }
      *screen_.out << "\r\033[K" << ProgressBar(version, now, screen_.columns);
      if (ended) *screen_.out << "\n";
      line_open = !ended;
    } else {
      // A line for each state, and for each tenth of a state that takes long.
      const int tenth = static_cast<int>(Fraction(version) * 10);
      if (shown_update != version.update_id() ||
          shown_state != version.state() || tenth > shown_tenth) {
        *screen_.out << ProgressLine(version, now) << "\n";
        shown_tenth = tenth;
      }
    }
    screen_.out->flush();
    shown_update = version.update_id();
    shown_state = version.state();
  }
  if (line_open) *screen_.out << "\n";
  const absl::Status status =
      client::CallStatus("WatchVersion", reader->Finish());
  if (status.ok()) {
    if (shown_state == v1::Version::STATE_ACTIVE) return kExitOk;
    if (HasEnded(version)) return kExitAborted;
    return Fail(ErrorStatus(absl::StatusCode::kUnavailable, "STREAM_ENDED",
                            "The daemon ended the watch before the version "
                            "had ended."));
  }
  if (absl::IsDeadlineExceeded(status) && arguments_.timeout.has_value()) {
    // Asked for; the newest version is followed until then. But silence may be
    // that of a coordinator which does not answer.
    if (latest) {
      v1::Cluster cluster;
      const absl::Status alive = GetCluster(&cluster);
      return alive.ok() ? kExitOk : Fail(alive);
    }
    return Fail(ErrorStatus(
        absl::StatusCode::kDeadlineExceeded, "WATCH_TIMEOUT",
        absl::StrCat(*name, " goes on after ",
                     absl::FormatDuration(*arguments_.timeout), ".")));
  }
  return Fail(status);
}

int Ctl::Models() {
  if (arguments_.positional.empty()) {
    v1::ListModelsResponse response;
    const absl::Status status = ListModels(&response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.models_size(),
                     [&] { return RenderModels(ToVector(response.models())); });
  }
  if (arguments_.positional.size() > 1) return Usage("models takes one MODEL");
  const auto name = ParseTopName(arguments_.positional[0], "models");
  if (!name.ok()) return UsageOf(name.status());
  v1::GetModelRequest request;
  request.set_name(*name);
  v1::Model model;
  const absl::Status status =
      Call("GetModel", [&](grpc::ClientContext* context) {
        return stub_->GetModel(context, request, &model);
      });
  if (!status.ok()) return Fail(status);
  return Print(model, [&] { return RenderModel(model); });
}

int Ctl::Versions() {
  if (arguments_.positional.size() > 1) {
    return Usage("versions takes one MODEL or VERSION");
  }
  Name name;
  name.model = "models/-";
  if (!arguments_.positional.empty()) {
    const auto parsed = ParseName(arguments_.positional[0], "versions");
    if (!parsed.ok()) return UsageOf(parsed.status());
    name = *parsed;
  }
  if (name.resource.empty()) {
    v1::ListVersionsResponse response;
    const absl::Status status = ListVersions(name.model, &response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.versions_size(), [&] {
      return RenderVersions(ToVector(response.versions()), absl::Now());
    });
  }
  v1::GetVersionRequest request;
  request.set_name(name.resource);
  v1::Version version;
  const absl::Status status =
      Call("GetVersion", [&](grpc::ClientContext* context) {
        return stub_->GetVersion(context, request, &version);
      });
  if (!status.ok()) return Fail(status);
  return Print(version, [&] { return RenderVersion(version, absl::Now()); });
}

int Ctl::Replicas() {
  if (arguments_.positional.size() > 1) {
    return Usage("replicas takes one MODEL or REPLICA");
  }
  Name name;
  name.model = "models/-";
  if (!arguments_.positional.empty()) {
    const auto parsed = ParseName(arguments_.positional[0], "replicas");
    if (!parsed.ok()) return UsageOf(parsed.status());
    name = *parsed;
  }
  if (name.resource.empty()) {
    v1::ListReplicasResponse response;
    const absl::Status status = ListReplicas(name.model, &response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.replicas_size(), [&] {
      return RenderReplicas(ToVector(response.replicas()));
    });
  }
  v1::GetReplicaRequest request;
  request.set_name(name.resource);
  v1::Replica replica;
  const absl::Status status =
      Call("GetReplica", [&](grpc::ClientContext* context) {
        return stub_->GetReplica(context, request, &replica);
      });
  if (!status.ok()) return Fail(status);
  return Print(replica, [&] { return RenderReplica(replica); });
}

int Ctl::Nodes() {
  if (arguments_.positional.empty()) {
    v1::ListNodesResponse response;
    const absl::Status status = ListNodes(&response);
    if (!status.ok()) return Fail(status);
    return PrintList(response, response.nodes_size(), [&] {
      return RenderNodes(ToVector(response.nodes()), absl::Now());
    });
  }
  if (arguments_.positional.size() > 1) return Usage("nodes takes one NODE");
  const auto name = ParseTopName(arguments_.positional[0], "nodes");
  if (!name.ok()) return UsageOf(name.status());
  v1::GetNodeRequest request;
  request.set_name(*name);
  v1::Node node;
  const absl::Status status =
      Call("GetNode", [&](grpc::ClientContext* context) {
        return stub_->GetNode(context, request, &node);
      });
  if (!status.ok()) return Fail(status);
  return Print(node, [&] { return RenderNode(node, absl::Now()); });
}

}  // namespace ctl
}  // namespace weightsync
