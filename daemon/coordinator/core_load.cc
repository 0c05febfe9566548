// LoadVersion: an update without trainer ranks. A node of the workers reads the
// headers, the layout names the checkpoint as the one that has all bytes, and
// every node of the workers reads what it needs; what they have read is the
// manifest.

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/coordinator/core.h"
#include "daemon/coordinator/queries.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/file/rooted_directory.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// RequestOpened.rank of a call that is no rank's.
constexpr int32_t kNoRank = -1;
constexpr size_t kMaxRequestId = 128;
constexpr int64_t kNewestVersion = int64_t{1} << 62;
constexpr size_t kMaxWaiting = 64;

// Of the machine's pseudo-rank of a receiving node.
int32_t RankOfNode(int node) { return -1 - node; }

std::map<std::string, std::map<std::string, std::string>> LabelsOf(
    const std::map<std::string, NodeRun>& nodes) {
  std::map<std::string, std::map<std::string, std::string>> labels;
  for (const auto& node : nodes) {
    for (const auto& label : node.second.hello.labels()) {
      labels[node.first][label.first] = label.second;
    }
  }
  return labels;
}

}  // namespace

void CoordinatorCore::Load(AdminWait wait, const v1::LoadVersionRequest& call) {
  const auto fail = [&](StatusCode code, const char* reason,
                        const std::string& message) {
    Answer(wait, ErrorStatus(code, reason, message));
  };
  const auto shown = Queries(*this).GetModel(call.name());
  if (!shown.ok()) return Answer(wait, shown.status());
  if (call.request_id().size() > kMaxRequestId) {
    return fail(
        StatusCode::kInvalidArgument, "REQUEST_ID_INVALID",
        absl::StrCat("a request_id has at most ", kMaxRequestId,
                     " characters, this one has ", call.request_id().size()));
  }
  if (call.version() < 0 || call.version() > kNewestVersion) {
    return fail(StatusCode::kInvalidArgument, "VERSION_INVALID",
                absl::StrCat("version ", call.version(),
                             "; give a positive one, or none to count on"));
  }
  wait.model = call.name();
  wait.deadline = now_ + Patience(call.has_timeout(), call.timeout(),
                                  options_.operation_timeout);
  ModelRun* model = Model(call.name());
  if (!call.request_id().empty()) {
    const JournalRequest* known =
        journal_.requests.Find(call.name(), kNoRank, call.request_id());
    if (known != nullptr) {
      wait.update = KeyOf(known->opened.update_id());
      waits_.push_back(std::move(wait));
      return;
    }
    for (const auto& load : model->loads) {
      if (load->call.request_id() != call.request_id()) continue;
      wait.job = load->id;
      waits_.push_back(std::move(wait));
      return;
    }
  }
  const auto path = transport::CheckRootedPath(call.path());
  if (!path.ok()) return Answer(wait, path.status());
  v1::UpdateOptions options = call.options();
  options.set_transfer_medium(v1::TRANSFER_MEDIUM_DISK);
  Fault fault = CheckOptions(options, v1::TRANSFER_MEDIUM_DISK);
  if (fault.ok()) fault = model->book.CheckAside(call.version());
  // One that waits for its ranks is waited for.
  if (fault.code == StatusCode::kUnavailable) fault = Fault();
  if (!fault.ok()) return Answer(wait, ToStatus(fault));
  std::string reader;
  for (const auto& entry : model->replicas) {
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    if (replica == nullptr || !replica->Complete() || Drained(entry.second)) {
      continue;
    }
    for (const WorkerEntry& worker : replica->workers) {
      if (ConnectedNode(worker.node) != nullptr) reader = worker.node;
    }
  }
  if (reader.empty()) {
    return fail(StatusCode::kFailedPrecondition, "NO_WORKERS",
                absl::StrCat("no replica of ", model->name,
                             " is complete: nobody wants the weights yet"));
  }
  if (model->loads.size() >= kMaxWaiting) {
    return fail(StatusCode::kResourceExhausted, "QUEUE_FULL",
                absl::StrCat(kMaxWaiting, " loads of ", model->name,
                             " wait already; try again later"));
  }
  auto load = std::make_unique<LoadRun>();
  load->id = options_.random_id();
  load->call = call;
  load->options = ResolveOptions(options, v1::TRANSFER_MEDIUM_DISK);
  load->options.set_publish_mode(v1::PUBLISH_MODE_SNAPSHOT);
  load->path = *path;
  load->node = reader;
  load->begin = now_;
  load->deadline = now_ + options_.prepare_timeout;
  wait.job = load->id;
  waits_.push_back(std::move(wait));
  SendRead(*load);
  model->loads.push_back(std::move(load));
}

void CoordinatorCore::SendRead(const LoadRun& load) {
  v1::ReadCheckpoint* read = SendTo(load.node)->mutable_read_checkpoint();
  read->set_command_id(load.id);
  read->set_path(load.path);
}

void CoordinatorCore::CheckpointRead(const std::string& node,
                                     const v1::CheckpointRead& report) {
  for (auto& entry : models_) {
    for (const auto& load : entry.second.loads) {
      if (load->id != report.command_id() || load->node != node || load->read) {
        continue;
      }
      Fault fault = FromProto(report.failure());
      if (!fault.ok()) {
        fault.message = SaidBy(absl::StrCat("node ", node), fault.message);
        return FailLoad(&entry.second, load->id, fault);
      }
      load->read = true;
      load->parameters.assign(report.parameters().begin(),
                              report.parameters().end());
      load->deadline = now_ + options_.publish_timeout;
      return TryOpen(&entry.second);
    }
  }
}

void CoordinatorCore::FailLoad(ModelRun* model, const std::string& id,
                               const Fault& fault) {
  for (AdminWait& wait : waits_) {
    if (wait.job != id) continue;
    Answer(wait, ToStatus(fault));
    // Answered: CheckWaits takes it out.
    wait.model.clear();
  }
  model->loads.erase(
      std::remove_if(model->loads.begin(), model->loads.end(),
                     [&id](const auto& load) { return load->id == id; }),
      model->loads.end());
}

void CoordinatorCore::TickLoads(ModelRun* model) {
  std::vector<std::pair<std::string, Fault>> late;
  for (const auto& load : model->loads) {
    if (now_ < load->deadline) continue;
    late.emplace_back(
        load->id,
        load->read
            ? Fault(StatusCode::kDeadlineExceeded, "QUEUE_TIMEOUT",
                    absl::StrCat("what ", model->name,
                                 " was busy with did not end within ",
                                 absl::FormatDuration(options_.publish_timeout),
                                 model->updates.empty() ? "" : ": ",
                                 model->updates.empty()
                                     ? ""
                                     : StillRuns(*model->updates[0]),
                                 "; load again when it has"))
            : Fault(StatusCode::kDeadlineExceeded, "PREPARE_TIMEOUT",
                    absl::StrCat(
                        "node ", load->node, " did not read the headers of ",
                        load->path, " within ",
                        absl::FormatDuration(options_.prepare_timeout))));
  }
  for (const auto& load : late) FailLoad(model, load.first, load.second);
}

void CoordinatorCore::TryLoad(ModelRun* model) {
  if (model->loads.empty() || !model->loads.front()->read ||
      !model->updates.empty() || now_ < adopting_until_) {
    return;
  }
  const LoadRun& load = *model->loads.front();
  // Those who came first go first; a publish that waits for ranks is not in the
  // way, unless it has named its version.
  const Publish* pending = model->book.pending();
  const ModelEntry* entry = registry_.FindModel(model->name);
  if (pending != nullptr && pending->begin < load.begin &&
      entry->Publishable()) {
    return;
  }
  const Fault fault = model->book.CheckAside(load.call.version());
  if (fault.code == StatusCode::kUnavailable) return;
  const std::string id = load.id;
  if (!fault.ok()) return FailLoad(model, id, fault);
  OpenLoad(model, load);
  model->loads.erase(
      std::remove_if(model->loads.begin(), model->loads.end(),
                     [&id](const auto& other) { return other->id == id; }),
      model->loads.end());
}

void CoordinatorCore::OpenLoad(ModelRun* model, const LoadRun& load) {
  std::set<std::string> replicas;
  for (const auto& entry : model->replicas) {
    const ReplicaEntry* replica =
        registry_.FindReplica(model->name, entry.first);
    if (replica != nullptr && replica->Complete() &&
        entry.second.machine.Complete() && !Drained(entry.second)) {
      replicas.insert(entry.first);
    }
  }
  const std::string id = load.id;
  if (replicas.empty()) {
    return FailLoad(model, id,
                    Fault(StatusCode::kFailedPrecondition, "NO_WORKERS",
                          absl::StrCat("no replica of ", model->name,
                                       " is complete any more")));
  }
  std::vector<v1::Parameter> parameters = load.parameters;
  Fault fault = registry_.FitCheckpoint(model->name, replicas, &parameters);
  if (fault.ok()) {
    fault = CheckPossible(model, load.options, replicas);
  }
  if (!fault.ok()) {
    fault.message = absl::StrCat(load.path, ": ", fault.message);
    return FailLoad(model, id, fault);
  }
  auto known = model->layouts.Make(
      registry_.LoadInput(model->name, replicas, parameters, LabelsOf(nodes_),
                          options_.bucket_bytes));
  if (!known.ok()) {
    return FailLoad(model, id,
                    Fault(known.status().code(), ErrorReason(known.status()),
                          std::string(known.status().message())));
  }
  layouts_[(*known)->id()] = *known;
  registry_.SetCatalog(model->name, parameters);
  if (model->prepare != nullptr) EndPrepare(model, Fault());

  const std::string update_id = options_.random_id();
  const int64_t version = model->book.OpenAside(load.call.version());
  auto* opened = Write()->mutable_update_opened();
  opened->set_model(model->name);
  opened->set_update_id(update_id);
  opened->set_version(version);
  opened->set_step(load.call.step());
  opened->set_publish_index(model->book.newest_index());
  *opened->mutable_time() = ToProto(now_);
  if (!load.call.request_id().empty()) {
    auto* request = Write()->mutable_request_opened();
    request->set_model(model->name);
    request->set_rank(kNoRank);
    request->set_request_id(load.call.request_id());
    request->set_update_id(update_id);
    request->set_version(version);
    *request->mutable_time() = ToProto(now_);
    journal_.requests.Open(*request);
  }
  auto update = NewRun(model, update_id, *known, load.options, version,
                       load.call.step(), load.begin);
  update->config.from_checkpoint = true;
  update->record.set_checkpoint_path(load.path);
  UpdateState& machine = update->machine;
  machine.checkpoint_written = true;
  for (size_t i = 0; i < machine.nodes.size(); ++i) {
    UpdateNode& node = machine.nodes[i];
    if (node.name == kCheckpointSource) {
      node.source = false;
      node.excluded = true;
    }
    if (!node.In()) continue;
    UpdateRank rank;
    rank.rank = RankOfNode(static_cast<int>(i));
    rank.node = static_cast<int>(i);
    rank.arrived = true;
    update->rank_index[rank.rank] = static_cast<int>(machine.ranks.size());
    machine.ranks.push_back(rank);
  }
  AddReplicas(replicas, model, update.get());
  for (AdminWait& wait : waits_) {
    if (wait.job != load.id) continue;
    wait.job.clear();
    wait.update = update->key;
  }
  Changed(update->record);
  model->updates.push_back(std::move(update));
  Post(*model->updates.back(), UpdateEvent());
}

void CoordinatorCore::LoadDigests(const std::string& node, UpdateRun* update,
                                  const v1::RankSnapshotted& report) {
  auto index = update->layout->node_index.find(node);
  if (index == update->layout->node_index.end()) return;
  auto rank = update->rank_index.find(RankOfNode(index->second));
  if (rank == update->rank_index.end() ||
      update->machine.ranks[static_cast<size_t>(rank->second)].copied) {
    return;
  }
  UpdateEvent event;
  event.kind = UpdateEvent::kRankCopied;
  event.rank = rank->second;
  event.fault = FromProto(report.failure());
  std::map<int32_t, v1::Digest> known;
  for (const v1::BucketDigest& bucket : update->manifest) {
    known[bucket.bucket()] = bucket.digest();
  }
  for (const v1::BucketDigest& bucket : report.buckets()) {
    auto entered = known.emplace(bucket.bucket(), bucket.digest());
    if (entered.second) {
      update->manifest.push_back(bucket);
      continue;
    }
    const v1::Digest& before = entered.first->second;
    if (before.lane0() == bucket.digest().lane0() &&
        before.lane1() == bucket.digest().lane1()) {
      continue;
    }
    event.fault =
        Fault(StatusCode::kFailedPrecondition, "CHECKPOINT_NOT_SHARED",
              absl::StrCat("node ", node, " has read other bytes at ",
                           update->record.checkpoint_path(),
                           " than another node (bucket ", bucket.bucket(),
                           "): let all of them see the same files"));
  }
  for (const v1::TensorDigest& tensor : report.tensors()) {
    v1::Digest& sum = update->tensors[tensor.ordinal()];
    sum.set_lane0(sum.lane0() + tensor.digest().lane0());
    sum.set_lane1(sum.lane1() + tensor.digest().lane1());
  }
  Post(*update, std::move(event));
}

bool CoordinatorCore::FinishLoad(AdminWait* wait) {
  if (wait->model.empty()) return true;
  ModelRun* model = Model(wait->model);
  const auto late = [&](const std::string& what) {
    if (now_ < wait->deadline) return false;
    Answer(*wait,
           ErrorStatus(StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT", what));
    return true;
  };
  if (!wait->job.empty()) {
    return late(absl::StrCat("it waits until ", wait->model, " is free"));
  }
  const std::string update_id = IdOf(wait->update);
  const v1::Version* record = FindRecord(model, update_id);
  if (record == nullptr) {
    Answer(*wait, ErrorStatus(StatusCode::kNotFound, "VERSION_UNKNOWN",
                              absl::StrCat("the version of this request_id is "
                                           "not remembered any more")));
    return true;
  }
  if (record->state() == v1::Version::STATE_ACTIVE) {
    Answer(*wait, *Queries(*this).GetVersion(record->name(), update_id, now_));
    return true;
  }
  if (record->has_end_time() || record->has_failure()) {
    Fault fault = FromProto(record->failure());
    if (!absl::StartsWith(fault.reason, "CHECKPOINT_")) {
      fault.code = StatusCode::kAborted;
    }
    Answer(*wait, ToStatus(fault));
    return true;
  }
  return late(absl::StrCat(record->name(), " is still ",
                           v1::Version::State_Name(record->state()).substr(6),
                           "; it goes on"));
}

}  // namespace daemon
}  // namespace weightsync
