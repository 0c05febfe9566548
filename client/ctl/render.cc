#include "client/ctl/render.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"
#include "client/ctl/render_common.h"

namespace weightsync {
namespace ctl {
namespace {

using ::weightsync::client::FromProto;

// "installed version 3", "mix of version 3", ...
std::string InstalledText(const v1::InstalledState& installed) {
  switch (installed.state()) {
    case v1::InstalledState::STATE_INSTALLED:
      return absl::StrCat("version ", installed.version(), " (",
                          ShortId(installed.update_id()), ")");
    case v1::InstalledState::STATE_WRITING:
      return absl::StrCat("a MIX: version ", installed.version(), " (",
                          ShortId(installed.update_id()),
                          ") was not written to its end");
    case v1::InstalledState::STATE_NOTHING:
      return "nothing";
    default:
      return "what it came with";
  }
}

}  // namespace

std::string NamesText(
    const google::protobuf::RepeatedPtrField<std::string>& names) {
  return absl::StrJoin(names, ", ",
                       [](std::string* out, const std::string& name) {
                         out->append(LastPart(name));
                       });
}

std::vector<std::string> TimesCells(const v1::ReplicaTimes& times) {
  const auto between = [](bool has, const auto& from, const auto& to) {
    return has ? HumanDuration(FromProto(to) - FromProto(from))
               : std::string("-");
  };
  return {between(times.has_paused_time(), times.pause_request_time(),
                  times.paused_time()),
          between(times.has_applied_time(), times.paused_time(),
                  times.applied_time()),
          between(times.has_resumed_time() && times.has_applied_time(),
                  times.applied_time(), times.resumed_time()),
          between(times.has_resumed_time(), times.pause_request_time(),
                  times.resumed_time()),
          times.failure().reason()};
}

std::string StateName(v1::Replica::State state) {
  return WithoutPrefix(v1::Replica::State_Name(state));
}
std::string StateName(v1::Node::State state) {
  return WithoutPrefix(v1::Node::State_Name(state));
}

namespace {

std::string NodeState(const v1::Node& node) {
  return absl::StrCat(StateName(node.state()),
                      node.draining() ? ", DRAINING" : "");
}

}  // namespace

std::string RenderNodes(const std::vector<v1::Node>& nodes, absl::Time now) {
  if (nodes.empty()) return "No nodes.\n";
  Table table({"NODE", "STATE", "RANKS", "WORKERS", "STORE USED", "BUDGET",
               "UPDATES", "DATA ADDRESS", "CONNECTED"});
  for (const v1::Node& node : nodes) {
    table.Add({LastPart(node.name()), NodeState(node),
               absl::StrCat(node.trainer_rank_count()),
               absl::StrCat(node.worker_count()),
               HumanBytes(node.memory().store_used_bytes()),
               HumanBytes(node.memory().store_budget_bytes()),
               absl::StrCat(node.update_ids_size()), Dash(node.data_address()),
               node.has_connect_time()
                   ? Ago(now, FromProto(node.connect_time()))
                   : "-"});
  }
  return table.ToString();
}

std::string RenderModels(const std::vector<v1::Model>& models) {
  if (models.empty()) return "No models.\n";
  Table table({"MODEL", "ACTIVE", "UPDATING", "FLOOR", "PARAMETERS", "BYTES",
               "RANKS", "REPLICAS", "WORKERS"});
  for (const v1::Model& model : models) {
    const int ranks = static_cast<int>(std::count_if(
        model.trainer_ranks().begin(), model.trainer_ranks().end(),
        [](const v1::TrainerRank& r) { return r.registered(); }));
    table.Add({LastPart(model.name()), Dash(LastPart(model.active_version())),
               Dash(LastPart(model.updating_version())),
               Number(model.floor_version()),
               WithCommas(model.parameter_count()),
               HumanBytes(model.total_bytes()),
               absl::StrCat(ranks, "/", model.world_size()),
               absl::StrCat(model.replica_count()),
               absl::StrCat(model.worker_count())});
  }
  std::string out = table.ToString();
  for (const v1::Model& model : models) {
    if (!model.held_version().empty()) {
      absl::StrAppend(&out, LastPart(model.name()), " is held at version ",
                      LastPart(model.held_version()),
                      " by a rollback: newer ones are kept, not applied, until "
                      "`weightsyncctl release ",
                      LastPart(model.name()), "`\n");
    }
    if (model.removed()) {
      absl::StrAppend(&out, LastPart(model.name()),
                      " was removed: no engine has it until it is published\n");
    }
    if (!model.blocked_reason().empty()) {
      absl::StrAppend(&out, LastPart(model.name()),
                      " cannot be published: ", model.blocked_reason(), "\n");
    }
  }
  return out;
}

namespace {

// What an operator has to know of one in a row of a table: who keeps it paused,
// but for updates, which let go of it by themselves.
std::string ReplicaNote(const v1::Replica& replica) {
  std::vector<std::string> notes;
  if (replica.behind()) notes.push_back("behind");
  for (const std::string& holder : replica.pause_holders()) {
    if (holder == "operator" || holder == "isolation") {
      notes.push_back(absl::StrCat("paused by ", holder));
    }
  }
  return absl::StrJoin(notes, ", ");
}

}  // namespace

std::string RenderReplicas(const std::vector<v1::Replica>& replicas) {
  if (replicas.empty()) return "No replicas.\n";
  Table table({"MODEL", "REPLICA", "STATE", "VERSION", "UPDATE", "WORKERS",
               "NODE", "NOTE"});
  std::string failures;
  for (const v1::Replica& replica : replicas) {
    // models/{model}/replicas/{replica}
    const std::string& name = replica.name();
    const size_t cut = name.find("/replicas/");
    table.Add(
        {LastPart(name.substr(0, cut)), LastPart(name),
         StateName(replica.state()), Number(replica.version()),
         ShortId(replica.update_id()),
         absl::StrCat(replica.workers_size(), "/", replica.worker_count()),
         Dash(LastPart(replica.node())), ReplicaNote(replica)});
    if (!replica.last_failure().reason().empty()) {
      absl::StrAppend(&failures, LastPart(name), ": ",
                      FailureText(replica.last_failure()), "\n");
    }
  }
  return absl::StrCat(table.ToString(), failures);
}

namespace {

std::string GpuText(const v1::GpuUse& gpu) {
  const std::string name = Dash(gpu.device_name());
  const std::string restarts =
      gpu.restart_count() == 0
          ? ""
          : absl::StrCat(", agent started again ", gpu.restart_count(), "x");
  switch (gpu.state()) {
    case v1::GpuUse::STATE_READY:
      break;
    case v1::GpuUse::STATE_STARTING:
      return absl::StrCat(name, ", its agent starts", restarts);
    default:
      return absl::StrCat(name, ", FAILED: ", FailureText(gpu.failure()));
  }
  std::string text = absl::StrCat(name, ", ", HumanBytes(gpu.free_bytes()),
                                  " free of ", HumanBytes(gpu.total_bytes()),
                                  "; ", Counted(gpu.slot_count(), "slot"), " ",
                                  HumanBytes(gpu.slot_bytes()), ", context ",
                                  HumanBytes(gpu.context_bytes()));
  if (gpu.device_store_bytes() > 0)
    absl::StrAppend(&text, ", store ", HumanBytes(gpu.device_store_bytes()));
  if (gpu.nccl_bytes() > 0)
    absl::StrAppend(&text, ", NCCL ", HumanBytes(gpu.nccl_bytes()));
  return absl::StrCat(text, restarts);
}

}  // namespace

std::string RenderNode(const v1::Node& node, absl::Time now) {
  Fields fields;
  fields.Add("node", node.name());
  fields.Add("state", NodeState(node));
  if (node.has_connect_time()) {
    fields.Add("connected", Ago(now, FromProto(node.connect_time())));
  }
  fields.Add("software", Dash(node.software_version()));
  fields.Add("data address", Dash(node.data_address()));
  std::vector<std::string> labels;
  for (const auto& [key, value] : node.labels()) {
    labels.push_back(absl::StrCat(key, "=", value));
  }
  std::sort(labels.begin(), labels.end());
  fields.Add("labels", Dash(absl::StrJoin(labels, ", ")));
  fields.Add("trainer ranks", absl::StrCat(node.trainer_rank_count()));
  fields.Add("workers", absl::StrCat(node.worker_count()));
  fields.Add(
      "store",
      absl::StrCat(HumanBytes(node.memory().store_used_bytes()), " used, ",
                   HumanBytes(node.memory().store_reserved_bytes()),
                   " reserved, budget ",
                   HumanBytes(node.memory().store_budget_bytes())));
  fields.Add("trainer arenas", HumanBytes(node.memory().trainer_arena_bytes()));
  fields.Add("daemon itself", HumanBytes(node.memory().resident_bytes()));
  for (const v1::GpuUse& gpu : node.memory().gpus())
    fields.Add(gpu.device_uuid(), GpuText(gpu));
  fields.Add("holds updates",
             Dash(absl::StrJoin(node.update_ids(), ", ",
                                [](std::string* out, const std::string& id) {
                                  out->append(ShortId(id));
                                })));
  return fields.ToString();
}

std::string RenderModel(const v1::Model& model) {
  Fields fields;
  fields.Add("model", model.name());
  fields.Add("parameters", WithCommas(model.parameter_count()));
  fields.Add("bytes", HumanBytes(model.total_bytes()));
  fields.Add("catalog", Dash(model.catalog_digest()));
  fields.Add("active", Dash(model.active_version()));
  fields.Add("updating", Dash(model.updating_version()));
  if (!model.held_version().empty()) {
    fields.Add("held at", model.held_version());
  }
  if (model.removed()) fields.Add("removed", "until it is published again");
  if (!model.absent_replicas().empty()) {
    fields.Add("may still hold it", NamesText(model.absent_replicas()));
  }
  fields.Add("floor", Number(model.floor_version()));
  fields.Add("replicas", absl::StrCat(model.replica_count(), " with ",
                                      Counted(model.worker_count(), "worker")));
  if (!model.blocked_reason().empty()) {
    fields.Add("blocked", model.blocked_reason());
  }
  std::string out = fields.ToString();
  if (model.trainer_ranks_size() > 0) {
    Table table({"RANK", "NODE", "PID", "BYTES", "STATE", "CLIENT"});
    for (const v1::TrainerRank& rank : model.trainer_ranks()) {
      table.Add({absl::StrCat(rank.rank()), Dash(LastPart(rank.node())),
                 Number(rank.pid()), HumanBytes(rank.shard_bytes()),
                 rank.registered() ? "registered" : "connected",
                 rank.client()});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (model.parameters_size() > 0) {
    Table table({"PARAMETER", "DTYPE", "SHAPE"});
    for (const v1::Parameter& parameter : model.parameters()) {
      const std::string dtype = v1::DType_Name(parameter.dtype());
      table.Add(
          {parameter.name(),
           absl::StartsWith(dtype, "DTYPE_") ? dtype.substr(6) : dtype,
           absl::StrCat("[", absl::StrJoin(parameter.shape(), ", "), "]")});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  return out;
}

std::string RenderReplica(const v1::Replica& replica) {
  Fields fields;
  fields.Add("replica", replica.name());
  fields.Add("state", StateName(replica.state()));
  fields.Add("serves", replica.update_id().empty()
                           ? std::string("what it came with")
                           : absl::StrCat("version ", replica.version(), " (",
                                          ShortId(replica.update_id()), ")",
                                          replica.behind() ? ", behind" : ""));
  fields.Add("node", Dash(replica.node()));
  fields.Add("client", Dash(replica.client()));
  fields.Add("incarnation", Dash(replica.incarnation()));
  fields.Add("paused by", Dash(absl::StrJoin(replica.pause_holders(), ", ")));
  if (!replica.last_failure().reason().empty()) {
    fields.Add("last failure", FailureText(replica.last_failure()));
  }
  std::string out = fields.ToString();
  if (replica.workers_size() > 0) {
    Table table({"WORKER", "NODE", "PID", "BYTES", "HOLDS", "CLIENT"});
    for (const v1::Worker& worker : replica.workers()) {
      table.Add({absl::StrCat(worker.index()), Dash(LastPart(worker.node())),
                 Number(worker.pid()), HumanBytes(worker.tensor_bytes()),
                 InstalledText(worker.installed()), worker.client()});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (replica.history_size() > 0) {
    Table table(WithTimes({"VERSION", "UPDATE"}, TimesColumns()));
    for (const v1::ReplicaTimes& times : replica.history()) {
      table.Add(
          WithTimes({absl::StrCat(times.version()), ShortId(times.update_id())},
                    TimesCells(times)));
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  return out;
}

std::string RenderStatus(const Snapshot& snapshot, absl::Time now) {
  const v1::Cluster& cluster = snapshot.cluster;
  std::string out = absl::StrCat(
      "cluster ", ShortId(cluster.cluster_id()), ", coordinator ",
      Dash(LastPart(cluster.coordinator())), " (term ", cluster.term(),
      cluster.has_start_time()
          ? absl::StrCat(", up ",
                         HumanDuration(absl::Trunc(
                             std::max(now - FromProto(cluster.start_time()),
                                      absl::ZeroDuration()),
                             absl::Seconds(1))))
          : "",
      "), weightsync ", Dash(cluster.software_version()), "\n");
  if (cluster.has_blocked()) {
    absl::StrAppend(
        &out, "NOTHING IS ACCEPTED: ", FailureText(cluster.blocked()), "\n");
  }
  absl::StrAppend(&out, "\n", RenderNodes(snapshot.nodes, now), "\n",
                  RenderModels(snapshot.models), "\n",
                  RenderReplicas(snapshot.replicas));
  bool first = true;
  for (const v1::Version& version : snapshot.versions) {
    absl::StrAppend(&out, first ? "\n" : "", ProgressLine(version, now), "\n");
    first = false;
  }
  return out;
}

}  // namespace ctl
}  // namespace weightsync
