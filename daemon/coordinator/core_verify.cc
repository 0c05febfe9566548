// VerifyReplica: every worker digests its live memory, and the digests are
// compared with those of the update that it says it holds.
//
// The digest of a parameter is a sum over its elements, each keyed by its place
// in the whole, so the boxes of tensor-parallel workers add up to the value
// that the trainers counted. Compared are parameters whose distinct boxes tile
// the whole: equal boxes with each other, and the sum with the trainers'.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"
#include "daemon/node/convert.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

struct Part {
  schedule::Box box;
  int worker = 0;
  v1::Digest digest;
};

bool Equal(const v1::Digest& a, const v1::Digest& b) {
  return a.lane0() == b.lane0() && a.lane1() == b.lane1();
}

// The workers whose part of the parameter differs; all of a tiling when its sum
// does. nullopt: its parts do not tile it, nothing can be said.
absl::optional<std::set<int>> Differing(const schedule::Param& param,
                                        const std::vector<Part>& parts,
                                        const v1::Digest& whole) {
  std::vector<const Part*> distinct;
  int64_t volume = 0;
  for (const Part& part : parts) {
    const bool known = std::any_of(
        distinct.begin(), distinct.end(),
        [&part](const Part* other) { return other->box == part.box; });
    if (known) continue;
    for (const Part* other : distinct) {
      schedule::Box overlap;
      if (schedule::Intersect(part.box, other->box, &overlap)) {
        return absl::nullopt;
      }
    }
    distinct.push_back(&part);
    volume += part.box.Volume();
  }
  if (volume != schedule::WholeBox(param.shape).Volume()) return absl::nullopt;
  std::set<int> differing;
  // Workers that hold the same box say the same, or one of them is wrong; which
  // one, the sum tells when it fits one of them.
  for (const Part* first : distinct) {
    v1::Digest others;
    for (const Part* other : distinct) {
      if (other == first) continue;
      others.set_lane0(others.lane0() + other->digest.lane0());
      others.set_lane1(others.lane1() + other->digest.lane1());
    }
    for (const Part& part : parts) {
      if (!(part.box == first->box)) continue;
      v1::Digest sum;
      sum.set_lane0(others.lane0() + part.digest.lane0());
      sum.set_lane1(others.lane1() + part.digest.lane1());
      if (!Equal(sum, whole)) differing.insert(part.worker);
    }
  }
  return differing;
}

}  // namespace

void CoordinatorCore::Verify(AdminWait wait,
                             const v1::VerifyReplicaRequest& call) {
  const auto shown = Queries(*this).GetReplica(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  const std::string& name = call.name();
  wait.model = name.substr(0, name.find("/replicas/"));
  wait.replica = name.substr(name.rfind('/') + 1);
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(wait.model);
  const ReplicaRun& replica = model->replicas.at(wait.replica);
  const ReplicaState& machine = replica.machine;
  if (!machine.Complete()) {
    return Answer(wait, ErrorStatus(StatusCode::kUnavailable, "REPLICA_LOST",
                                    absl::StrCat(name,
                                                 " is not there with all of "
                                                 "its workers")));
  }
  if (!machine.Servable() ||
      machine.workers[0].content.kind != Content::kInstalled) {
    return Answer(
        wait, ErrorStatus(StatusCode::kFailedPrecondition, "NOTHING_INSTALLED",
                          absl::StrCat(name,
                                       " holds no update: what its engine "
                                       "came with, or a mix")));
  }
  wait.update = machine.workers[0].content.update;
  const CommittedUpdate* commit = model->FindCommit(IdOf(wait.update));
  if (commit == nullptr || commit->layout == nullptr ||
      commit->tensors.empty()) {
    return Answer(
        wait, ErrorStatus(StatusCode::kFailedPrecondition, "DIGESTS_UNKNOWN",
                          absl::StrCat("the digests of update ",
                                       IdOf(wait.update), ", which ", name,
                                       " holds, are not known any more; "
                                       "publish again")));
  }
  wait.command_id = absl::StrCat("verify-", term_, ".", next_verify_++);
  const ReplicaEntry* entry = registry_.FindReplica(wait.model, wait.replica);
  for (size_t i = 0; i < entry->workers.size(); ++i) {
    const WorkerEntry& worker = entry->workers[i];
    v1::DigestWorker* out = SendTo(worker.node)->mutable_digest_worker();
    out->set_model(wait.model);
    out->set_replica(wait.replica);
    out->set_worker_index(static_cast<int32_t>(i));
    out->set_incarnation(entry->incarnation);
    out->mutable_digest()->set_command_id(wait.command_id);
    for (const v1::WantedTensor& tensor : worker.registration.tensors()) {
      const auto ordinal = commit->layout->layout.catalog.Find(tensor.name());
      out->mutable_digest()->add_ordinals(
          ordinal.has_value() ? static_cast<int32_t>(*ordinal) : -1);
    }
  }
  waits_.push_back(std::move(wait));
}

void CoordinatorCore::WorkerDigests(const v1::WorkerDigests& report) {
  for (AdminWait& wait : waits_) {
    if (wait.command_id != report.digests().command_id() ||
        wait.model != report.model() || wait.replica != report.replica()) {
      continue;
    }
    wait.digests[report.worker_index()] = report;
  }
}

bool CoordinatorCore::FinishVerify(AdminWait* wait) {
  ModelRun* model = Model(wait->model);
  const std::string name =
      absl::StrCat(wait->model, "/replicas/", wait->replica);
  const ReplicaEntry* entry = registry_.FindReplica(wait->model, wait->replica);
  const CommittedUpdate* commit = model->FindCommit(IdOf(wait->update));
  if (entry == nullptr || !entry->Complete() || commit == nullptr) {
    Answer(*wait, ErrorStatus(StatusCode::kUnavailable, "REPLICA_LOST",
                              absl::StrCat(name,
                                           " left while its memory was "
                                           "digested; ask again")));
    return true;
  }
  std::vector<std::string> missing;
  for (size_t i = 0; i < entry->workers.size(); ++i) {
    if (wait->digests.count(static_cast<int>(i)) == 0) {
      missing.push_back(absl::StrCat(i));
    }
  }
  if (!missing.empty()) {
    if (now_ < wait->deadline) return false;
    Answer(*wait,
           ErrorStatus(
               StatusCode::kDeadlineExceeded, "VERIFY_TIMEOUT",
               absl::StrCat("worker ", absl::StrJoin(missing, ", "), " of ",
                            name, " did not digest its memory in time")));
    return true;
  }

  v1::VerifyReplicaResponse response;
  response.set_update_id(commit->update_id);
  response.set_version(commit->version);
  bool equal = true;
  const schedule::Catalog& catalog = commit->layout->layout.catalog;
  std::map<uint32_t, std::vector<Part>> parts;
  for (size_t i = 0; i < entry->workers.size(); ++i) {
    const WorkerEntry& worker = entry->workers[i];
    const v1::TensorDigests& digests =
        wait->digests.at(static_cast<int>(i)).digests();
    auto* result = response.add_workers();
    result->set_worker_index(static_cast<int32_t>(i));
    result->set_node(absl::StrCat("nodes/", worker.node));
    *result->mutable_digest_duration() = digests.digest_duration();
    if (IsFailure(digests.failure())) {
      *result->mutable_failure() = digests.failure();
    } else if (digests.installed().update_id() != commit->update_id) {
      *result->mutable_failure() =
          ToProto(Fault(StatusCode::kAborted, "UPDATE_CHANGED",
                        "another update was installed meanwhile; ask again"));
    } else if (digests.digests_size() != worker.registration.tensors_size()) {
      *result->mutable_failure() = ToProto(Fault(
          StatusCode::kInternal, "DIGESTS_INCOMPLETE",
          absl::StrCat("it gave ", digests.digests_size(), " digests for ",
                       worker.registration.tensors_size(), " tensors")));
    }
    if (IsFailure(result->failure())) {
      equal = false;
      continue;
    }
    result->set_digested_bytes(worker.tensor_bytes);
    for (int t = 0; t < digests.digests_size(); ++t) {
      const v1::WantedTensor& tensor = worker.registration.tensors(t);
      const auto ordinal = catalog.Find(tensor.name());
      if (!ordinal.has_value()) continue;
      const schedule::Param& param = catalog.param(*ordinal);
      auto box = BoxFromProto(tensor.has_box(), tensor.box(), param.shape,
                              tensor.name());
      if (!box.ok()) continue;
      parts[*ordinal].push_back(
          {*std::move(box), static_cast<int>(i), digests.digests(t)});
    }
  }
  for (const v1::TensorDigest& tensor : commit->tensors) {
    const uint32_t ordinal = static_cast<uint32_t>(tensor.ordinal());
    auto found = parts.find(ordinal);
    if (found == parts.end() || ordinal >= catalog.size()) continue;
    const auto differing =
        Differing(catalog.param(ordinal), found->second, tensor.digest());
    if (!differing.has_value()) continue;
    std::set<int> workers;
    for (const Part& part : found->second) workers.insert(part.worker);
    for (const int worker : workers) {
      auto* result = response.mutable_workers(worker);
      result->set_tensor_count(result->tensor_count() + 1);
      if (differing->count(worker) == 0) continue;
      result->add_different_tensors(catalog.param(ordinal).name);
      equal = false;
    }
  }
  response.set_equal(equal);
  Answer(*wait, std::move(response));
  return true;
}

}  // namespace daemon
}  // namespace weightsync
