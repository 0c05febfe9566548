// Replicas that serve on while their node is away (on_isolation =
// KEEP_SERVING): after max_staleness whoever looks is told.

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr char kStale[] = "STALE_REPLICA";

bool HasPart(const ReplicaEntry& entry, const std::string& node) {
  return (entry.control && entry.node == node) ||
         std::any_of(entry.workers.begin(), entry.workers.end(),
                     [&node](const WorkerEntry& worker) {
                       return worker.present && worker.node == node;
                     });
}

}  // namespace

void CoordinatorCore::NoteAway(const NodeRun& node) {
  for (auto& model : models_) {
    for (auto& replica : model.second.replicas) {
      const ReplicaEntry* entry =
          registry_.FindReplica(model.first, replica.first);
      if (entry == nullptr || !HasPart(*entry, node.name)) continue;
      // Later on nothing is known any more.
      if (replica.second.away.empty()) {
        replica.second.may_serve = MayServe(replica.second);
      }
      replica.second.away.emplace(node.name, node.last_report);
    }
  }
}

std::string CoordinatorCore::MayServe(const ReplicaRun& replica) const {
  const ReplicaState& machine = replica.machine;
  WorkerContent serves = machine.served;
  if (!machine.served_known && machine.Servable()) {
    serves = machine.workers[0].content;
  }
  const bool ours = serves.kind == Content::kInstalled;
  std::string text = "the weights that it came with";
  if (ours) {
    text = absl::StrCat("version ",
                        Describe(replica.model, serves.update).version);
  }
  // Its node finishes by itself what was committed.
  const UpdateKey target = machine.target;
  if (target > 0 && !(ours && target == serves.update)) {
    absl::StrAppend(&text, " or version ",
                    Describe(replica.model, target).version);
  }
  return text;
}

void CoordinatorCore::NoteBack(const std::string& node) {
  for (auto& model : models_) {
    for (auto& entry : model.second.replicas) {
      ReplicaRun& replica = entry.second;
      if (replica.away.erase(node) != 0 && replica.away.empty() &&
          replica.last_failure.reason() == kStale) {
        replica.last_failure.Clear();
      }
    }
  }
}

void CoordinatorCore::FlagStale(ModelRun* model) {
  for (auto& entry : model->replicas) {
    ReplicaRun& replica = entry.second;
    if (replica.away.empty() || replica.last_failure.reason() == kStale) {
      continue;
    }
    absl::Time since = absl::InfiniteFuture();
    std::vector<std::string> nodes;
    for (const auto& away : replica.away) {
      since = std::min(since, away.second);
      nodes.push_back(away.first);
    }
    if (now_ - since < options_.max_staleness) continue;

    const Fault fault(
        StatusCode::kUnavailable, kStale,
        absl::StrCat(
            "nothing was heard of node ", absl::StrJoin(nodes, ", "), " since ",
            absl::FormatTime(since, absl::UTCTimeZone()), ", for longer than ",
            absl::FormatDuration(options_.max_staleness), ": ",
            replica.machine.name, " may still serve ", replica.may_serve,
            " there, unless --on_isolation=PAUSE stopped it; bring "
            "the node or its link back, or end the engine"));
    LOG(ERROR) << kStale << ": " << fault.message;
    replica.last_failure = ToProto(fault);
  }
}

}  // namespace daemon
}  // namespace weightsync
