#include "client/ctl/render.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"

namespace weightsync {
namespace ctl {
namespace {

using ::weightsync::client::FromProto;

std::string Dash(const std::string& text) { return text.empty() ? "-" : text; }

// update_ids are random: the first part is enough for people.
std::string ShortId(const std::string& id) { return Dash(id.substr(0, 8)); }

std::string WithoutPrefix(const std::string& name) {
  return absl::StartsWith(name, "STATE_") ? name.substr(6) : name;
}

std::string Number(int64_t number) {
  return number == 0 ? "-" : absl::StrCat(number);
}

std::string FailureText(const v1::Failure& failure) {
  return absl::StrCat(failure.reason(), ": ", failure.message());
}

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

// "label  value" lines, values aligned.
class Fields {
 public:
  void Add(const std::string& label, const std::string& value) {
    fields_.emplace_back(label, value);
    width_ = std::max(width_, label.size());
  }
  std::string ToString() const {
    std::string out;
    for (const auto& [label, value] : fields_) {
      absl::StrAppend(&out, label, std::string(width_ - label.size() + 2, ' '),
                      value, "\n");
    }
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
  size_t width_ = 0;
};

int CountReplicas(const v1::Version& version,
                  bool (v1::ReplicaTimes::*has)() const) {
  int count = 0;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if ((times.*has)()) ++count;
  }
  return count;
}

int64_t Received(const v1::Version& version) {
  return std::min(version.moved_bytes(), version.wire_bytes());
}

// The longest time that a replica was away.
absl::Duration LongestPause(const v1::Version& version) {
  absl::Duration longest;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if (times.has_pause_request_time() && times.has_resumed_time()) {
      longest = std::max(longest, FromProto(times.resumed_time()) -
                                      FromProto(times.pause_request_time()));
    }
  }
  return longest;
}

absl::Duration TotalTime(const v1::Version& version, absl::Time now) {
  if (!version.has_create_time()) return absl::ZeroDuration();
  const absl::Time end =
      version.has_end_time() ? FromProto(version.end_time()) : now;
  return std::max(end - FromProto(version.create_time()), absl::ZeroDuration());
}

absl::Duration Predicted(const v1::Version& version, const char* phase) {
  for (const v1::PhaseTime& time : version.phases()) {
    if (time.phase() == phase) return FromProto(time.predicted());
  }
  return absl::ZeroDuration();
}

// ", 790 ms predicted"; nothing where nothing was.
std::string PredictedText(const v1::Version& version, const char* phase) {
  const absl::Duration predicted = Predicted(version, phase);
  return predicted > absl::ZeroDuration()
             ? absl::StrCat(", ", HumanDuration(predicted), " predicted")
             : "";
}

// "SHARDED".
std::string PolicyText(v1::TransferPolicy policy) {
  const std::string name = v1::TransferPolicy_Name(policy);
  const std::string prefix = "TRANSFER_POLICY_";
  return absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
}

// "ACTIVE, 988.1 MB in 1.20 s, pause 310 ms".
std::string EndText(const v1::Version& version, absl::Time now) {
  if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
    return FailureText(version.failure());
  }
  std::string text = absl::StrCat(HumanBytes(version.total_bytes()), " in ",
                                  HumanDuration(TotalTime(version, now)));
  const absl::Duration transfer = PhaseDuration(version, "transfer");
  if (version.wire_bytes() > 0 && transfer > absl::ZeroDuration()) {
    absl::StrAppend(&text, ", transfer ", HumanDuration(transfer), " (",
                    HumanRate(version.wire_bytes(), transfer),
                    PredictedText(version, "transfer"), ")");
  }
  if (version.replicas_size() > 0) {
    absl::StrAppend(&text, ", pause ", HumanDuration(LongestPause(version)),
                    ", ", version.replicas_size(),
                    version.replicas_size() == 1 ? " replica" : " replicas");
  }
  return text;
}

}  // namespace

std::string StateName(v1::Version::State state) {
  return WithoutPrefix(v1::Version::State_Name(state));
}
std::string StateName(v1::Replica::State state) {
  return WithoutPrefix(v1::Replica::State_Name(state));
}
std::string StateName(v1::Node::State state) {
  return WithoutPrefix(v1::Node::State_Name(state));
}

bool HasEnded(const v1::Version& version) {
  return version.state() == v1::Version::STATE_ACTIVE ||
         version.state() == v1::Version::STATE_ABORTED ||
         version.state() == v1::Version::STATE_SUPERSEDED ||
         version.state() == v1::Version::STATE_LOST;
}

absl::Duration PhaseDuration(const v1::Version& version,
                             const std::string& phase) {
  for (const v1::PhaseTime& time : version.phases()) {
    if (time.phase() == phase) return FromProto(time.measured());
  }
  return absl::ZeroDuration();
}

double Fraction(const v1::Version& version) {
  const auto part = [](double done, double all) {
    return all > 0 ? std::min(done / all, 1.0) : 1.0;
  };
  const int replicas = version.replicas_size();
  switch (version.state()) {
    case v1::Version::STATE_GATHERING: {
      int done = 0;
      for (const v1::RankProgress& rank : version.ranks()) {
        if (rank.has_snapshot_time()) ++done;
      }
      return version.ranks_size() == 0 ? 0 : part(done, version.ranks_size());
    }
    case v1::Version::STATE_PREPARING:
      return 0;
    case v1::Version::STATE_MOVING:
      return part(static_cast<double>(Received(version)),
                  static_cast<double>(version.wire_bytes()));
    case v1::Version::STATE_PAUSING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_paused_time),
                  replicas);
    case v1::Version::STATE_APPLYING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_applied_time),
                  replicas);
    case v1::Version::STATE_RESUMING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_resumed_time),
                  replicas);
    default:
      return 1;
  }
}

std::string ProgressText(const v1::Version& version) {
  const int replicas = version.replicas_size();
  switch (version.state()) {
    case v1::Version::STATE_GATHERING: {
      int done = 0;
      for (const v1::RankProgress& rank : version.ranks()) {
        if (rank.has_snapshot_time()) ++done;
      }
      return absl::StrCat(done, " of ", version.ranks_size(),
                          " ranks copied out");
    }
    case v1::Version::STATE_PREPARING:
      return "reserving memory, joining groups";
    case v1::Version::STATE_MOVING:
      return absl::StrCat(HumanBytes(Received(version)), " of ",
                          HumanBytes(version.wire_bytes()),
                          PredictedText(version, "transfer"));
    case v1::Version::STATE_PAUSING:
      return absl::StrCat(
          CountReplicas(version, &v1::ReplicaTimes::has_paused_time), " of ",
          replicas, " replicas paused");
    case v1::Version::STATE_APPLYING:
      return absl::StrCat(
          CountReplicas(version, &v1::ReplicaTimes::has_applied_time), " of ",
          replicas, " replicas written");
    case v1::Version::STATE_RESUMING:
      return absl::StrCat(
          CountReplicas(version, &v1::ReplicaTimes::has_resumed_time), " of ",
          replicas, " replicas resumed");
    default:
      return "";
  }
}

std::string ProgressBar(const v1::Version& version, absl::Time now,
                        int columns) {
  std::string line =
      absl::StrFormat("%s  %-9s  ", version.name(), StateName(version.state()));
  if (HasEnded(version)) {
    absl::StrAppend(&line, EndText(version, now));
  } else {
    constexpr int kWidth = 24;
    const double fraction = Fraction(version);
    const int filled = static_cast<int>(std::floor(fraction * kWidth));
    absl::StrAppend(
        &line,
        absl::StrFormat("[%s%s] %3d%%  ", std::string(filled, '#'),
                        std::string(kWidth - filled, '-'),
                        static_cast<int>(std::floor(fraction * 100))),
        ProgressText(version), "  ", HumanDuration(TotalTime(version, now)));
  }
  if (columns > 0 && static_cast<int>(line.size()) > columns) {
    line.resize(columns);
  }
  return line;
}

std::string ProgressLine(const v1::Version& version, absl::Time now) {
  std::string line =
      absl::StrCat(version.name(), " ", StateName(version.state()));
  if (HasEnded(version)) {
    absl::StrAppend(&line, " ", EndText(version, now));
  } else {
    const std::string text = ProgressText(version);
    absl::StrAppend(
        &line,
        absl::StrFormat(" %d%%",
                        static_cast<int>(std::floor(Fraction(version) * 100))));
    if (!text.empty()) absl::StrAppend(&line, " ", text);
  }
  return line;
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
         Dash(LastPart(replica.node())), replica.behind() ? "behind" : ""});
    if (!replica.last_failure().reason().empty()) {
      absl::StrAppend(&failures, LastPart(name), ": ",
                      FailureText(replica.last_failure()), "\n");
    }
  }
  return absl::StrCat(table.ToString(), failures);
}

std::string RenderVersions(const std::vector<v1::Version>& versions,
                           absl::Time now) {
  if (versions.empty()) return "No versions.\n";
  Table table({"MODEL", "VERSION", "UPDATE", "STATE", "BYTES", "TRANSFER",
               "PREDICTED", "PAUSE", "TOTAL", "STARTED"});
  std::string failures;
  for (const v1::Version& version : versions) {
    const std::string& name = version.name();
    const size_t cut = name.find("/versions/");
    const absl::Duration transfer = PhaseDuration(version, "transfer");
    const absl::Duration predicted = Predicted(version, "transfer");
    const absl::Duration pause = LongestPause(version);
    table.Add(
        {LastPart(name.substr(0, cut)), absl::StrCat(version.version()),
         ShortId(version.update_id()), StateName(version.state()),
         HumanBytes(version.total_bytes()),
         transfer > absl::ZeroDuration() ? HumanDuration(transfer) : "-",
         predicted > absl::ZeroDuration() ? HumanDuration(predicted) : "-",
         pause > absl::ZeroDuration() ? HumanDuration(pause) : "-",
         HumanDuration(TotalTime(version, now)),
         version.has_create_time() ? Ago(now, FromProto(version.create_time()))
                                   : "-"});
    if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
      absl::StrAppend(&failures, name, ": ", FailureText(version.failure()),
                      "\n");
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
  std::string text =
      absl::StrCat(name, ", ", HumanBytes(gpu.free_bytes()), " free of ",
                   HumanBytes(gpu.total_bytes()), "; ", gpu.slot_count(),
                   " slots ", HumanBytes(gpu.slot_bytes()), ", tables ",
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
  fields.Add("floor", Number(model.floor_version()));
  fields.Add("replicas", absl::StrCat(model.replica_count(), " with ",
                                      model.worker_count(), " workers"));
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
    Table table({"VERSION", "UPDATE", "TO PAUSE", "TO WRITE", "TO RESUME",
                 "AWAY", "FAILURE"});
    for (const v1::ReplicaTimes& times : replica.history()) {
      const auto between = [](bool has, const auto& from, const auto& to) {
        return has ? HumanDuration(FromProto(to) - FromProto(from))
                   : std::string("-");
      };
      table.Add({absl::StrCat(times.version()), ShortId(times.update_id()),
                 between(times.has_paused_time(), times.pause_request_time(),
                         times.paused_time()),
                 between(times.has_applied_time(), times.paused_time(),
                         times.applied_time()),
                 between(times.has_resumed_time() && times.has_applied_time(),
                         times.applied_time(), times.resumed_time()),
                 between(times.has_resumed_time(), times.pause_request_time(),
                         times.resumed_time()),
                 times.failure().reason()});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  return out;
}

std::string RenderVersion(const v1::Version& version, absl::Time now) {
  Fields fields;
  fields.Add("version", version.name());
  fields.Add("state", StateName(version.state()));
  if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
    fields.Add("because", FailureText(version.failure()));
  } else if (!HasEnded(version)) {
    fields.Add(
        "progress",
        absl::StrFormat("%d%%  %s",
                        static_cast<int>(std::floor(Fraction(version) * 100)),
                        ProgressText(version)));
  }
  fields.Add("update_id", version.update_id());
  fields.Add("step", absl::StrCat(version.step()));
  if (version.has_create_time()) {
    fields.Add("started", Ago(now, FromProto(version.create_time())));
  }
  fields.Add("model bytes", HumanBytes(version.total_bytes()));
  fields.Add("wire bytes",
             absl::StrCat(HumanBytes(version.wire_bytes()), " in ",
                          version.bucket_count(), " buckets"));
  if (version.transfer_policy() != v1::TRANSFER_POLICY_UNSPECIFIED) {
    fields.Add("policy", PolicyText(version.transfer_policy()));
    fields.Add("bound by", Dash(version.bound_by()));
    fields.Add("lower bound", HumanDuration(FromProto(version.lower_bound())));
  }
  if (!version.checkpoint_path().empty()) {
    fields.Add("checkpoint", version.checkpoint_path());
  }
  fields.Add("layout", Dash(version.layout_id()));
  fields.Add("digest", absl::StrFormat("%016x%016x", version.digest().lane0(),
                                       version.digest().lane1()));
  std::string out = fields.ToString();
  if (version.phases_size() > 0) {
    Table table({"PHASE", "MEASURED", "PREDICTED"});
    for (const v1::PhaseTime& phase : version.phases()) {
      table.Add({phase.phase(), HumanDuration(FromProto(phase.measured())),
                 phase.has_predicted()
                     ? HumanDuration(FromProto(phase.predicted()))
                     : "-"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.ranks_size() > 0) {
    Table table({"RANK", "COPIED", "COPY", "RATE"});
    for (const v1::RankProgress& rank : version.ranks()) {
      const bool done = rank.has_snapshot_time();
      table.Add({absl::StrCat(rank.rank()),
                 done ? HumanBytes(rank.copied_bytes()) : "-",
                 done ? HumanDuration(FromProto(rank.copy_duration())) : "-",
                 done ? HumanRate(rank.copied_bytes(),
                                  FromProto(rank.copy_duration()))
                      : "-"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.nodes_size() > 0) {
    Table table({"NODE", "RECEIVED", "NEEDED", "REPAIRED", "VERIFIED"});
    for (const v1::NodeProgress& node : version.nodes()) {
      table.Add({LastPart(node.node()), HumanBytes(node.received_bytes()),
                 HumanBytes(node.needed_bytes()),
                 absl::StrCat(node.repaired_frames()),
                 node.verified() ? "yes" : "no"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.replicas_size() > 0) {
    Table table(
        {"REPLICA", "TO PAUSE", "TO WRITE", "TO RESUME", "AWAY", "FAILURE"});
    for (const v1::ReplicaTimes& times : version.replicas()) {
      const auto between = [](bool has, const auto& from, const auto& to) {
        return has ? HumanDuration(FromProto(to) - FromProto(from))
                   : std::string("-");
      };
      table.Add({LastPart(times.replica()),
                 between(times.has_paused_time(), times.pause_request_time(),
                         times.paused_time()),
                 between(times.has_applied_time(), times.paused_time(),
                         times.applied_time()),
                 between(times.has_resumed_time() && times.has_applied_time(),
                         times.applied_time(), times.resumed_time()),
                 between(times.has_resumed_time(), times.pause_request_time(),
                         times.resumed_time()),
                 times.failure().reason()});
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
