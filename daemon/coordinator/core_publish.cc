// Publishes: calls of ranks, and the opening of an update.

#include <google/protobuf/text_format.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "daemon/node/layouts.h"
#include "proto/plan.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr size_t kMaxRequestId = 128;

// A value of a newer client, or of none: taken for a default it would do
// something else than it says.
Fault UnknownOption(const char* option, int value) {
  return Fault(StatusCode::kInvalidArgument, "OPTION_UNKNOWN",
               absl::StrCat(option, " has no value ", value,
                            "; leave it out for the default"));
}

}  // namespace

Fault CheckOptions(const v1::UpdateOptions& options,
                   v1::TransferMedium medium) {
  if (!v1::TransferMedium_IsValid(options.transfer_medium())) {
    return UnknownOption("transfer_medium", options.transfer_medium());
  }
  if (!v1::PublishMode_IsValid(options.publish_mode())) {
    return UnknownOption("publish_mode", options.publish_mode());
  }
  if (!v1::UpdateMode_IsValid(options.update_mode())) {
    return UnknownOption("update_mode", options.update_mode());
  }
  if (!v1::PauseMode_IsValid(options.pause_mode())) {
    return UnknownOption("pause_mode", options.pause_mode());
  }
  if (!v1::TransferPolicy_IsValid(options.transfer_policy())) {
    return UnknownOption("transfer_policy", options.transfer_policy());
  }
  if (!v1::DeliveryPolicy_IsValid(options.delivery_policy())) {
    return UnknownOption("delivery_policy", options.delivery_policy());
  }
  const v1::LockstepPolicy& lockstep = options.commit_policy().lockstep();
  if (!v1::LockstepPolicy::OnStraggler_IsValid(lockstep.on_straggler())) {
    return UnknownOption("on_straggler", lockstep.on_straggler());
  }
  if (options.commit_policy().has_rolling()) {
    if (options.commit_policy().rolling().max_unavailable() < 1) {
      return Fault(StatusCode::kInvalidArgument, "MAX_UNAVAILABLE_INVALID",
                   "a rolling commit needs max_unavailable of at least 1");
    }
    if (options.update_mode() == v1::UPDATE_MODE_STREAM) {
      return Fault(StatusCode::kUnimplemented, "COMMIT_POLICY_UNIMPLEMENTED",
                   "STREAM writes into all replicas at once: it has no rolling "
                   "commit; use LOCKSTEP, or STAGE");
    }
  }
  if (options.pause_mode() == v1::PAUSE_MODE_NONE &&
      options.update_mode() == v1::UPDATE_MODE_STREAM) {
    return Fault(StatusCode::kUnimplemented, "PAUSE_MODE_UNIMPLEMENTED",
                 "STREAM writes into live memory: it has no PAUSE_MODE_NONE");
  }
  const v1::TransferMedium chosen =
      ResolveOptions(options, medium).transfer_medium();
  if (chosen == v1::TRANSFER_MEDIUM_NETWORK) return Fault();
  const std::string by_disk = absl::StrCat(
      "by way of disk (",
      options.transfer_medium() == chosen ? "transfer_medium" : "--update",
      ") an update is ");
  if (options.update_mode() == v1::UPDATE_MODE_STREAM) {
    return Fault(StatusCode::kUnimplemented, "UPDATE_MODE_UNIMPLEMENTED",
                 absl::StrCat(by_disk, "staged: use STAGE, or NETWORK"));
  }
  if (options.publish_mode() == v1::PUBLISH_MODE_IN_PLACE) {
    return Fault(
        StatusCode::kUnimplemented, "PUBLISH_MODE_UNIMPLEMENTED",
        absl::StrCat(by_disk, "copied out first: use SNAPSHOT, or NETWORK"));
  }
  return Fault();
}

v1::UpdateOptions ResolveOptions(const v1::UpdateOptions& options,
                                 v1::TransferMedium medium) {
  v1::UpdateOptions resolved = options;
  if (options.transfer_medium() == v1::TRANSFER_MEDIUM_UNSPECIFIED) {
    // What cannot go by disk does not fall back to it either.
    const bool can = options.update_mode() != v1::UPDATE_MODE_STREAM &&
                     options.publish_mode() != v1::PUBLISH_MODE_IN_PLACE;
    resolved.set_transfer_medium(
        medium == v1::TRANSFER_MEDIUM_NETWORK_OR_DISK && !can
            ? v1::TRANSFER_MEDIUM_NETWORK
            : medium);
  }
  if (options.publish_mode() == v1::PUBLISH_MODE_UNSPECIFIED) {
    resolved.set_publish_mode(v1::PUBLISH_MODE_SNAPSHOT);
  }
  if (options.update_mode() == v1::UPDATE_MODE_UNSPECIFIED) {
    resolved.set_update_mode(v1::UPDATE_MODE_STAGE);
  }
  if (options.pause_mode() == v1::PAUSE_MODE_UNSPECIFIED) {
    resolved.set_pause_mode(v1::PAUSE_MODE_DRAIN);
  }
  if (options.delivery_policy() == v1::DELIVERY_POLICY_UNSPECIFIED) {
    resolved.set_delivery_policy(v1::DELIVERY_POLICY_QUEUE);
  }
  if (options.transfer_policy() == v1::TRANSFER_POLICY_UNSPECIFIED) {
    resolved.set_transfer_policy(v1::TRANSFER_POLICY_AUTO);
  }
  if (!options.commit_policy().has_rolling() &&
      options.commit_policy().lockstep().on_straggler() ==
          v1::LockstepPolicy::ON_STRAGGLER_UNSPECIFIED) {
    resolved.mutable_commit_policy()->mutable_lockstep()->set_on_straggler(
        v1::LockstepPolicy::ON_STRAGGLER_ABORT);
  }
  return resolved;
}

namespace {

void SetIndex(v1::Reply* reply, int64_t publish_index) {
  if (publish_index != 0) {
    reply->mutable_publish_opened()->set_publish_index(publish_index);
  }
}

}  // namespace

std::string ShowOptions(const std::string& options) {
  v1::UpdateOptions read;
  read.ParseFromString(options);
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::string text;
  printer.PrintToString(read, &text);
  return text;
}

void SetPolicies(const v1::UpdateOptions& options, UpdateConfig* config) {
  config->stream = options.update_mode() == v1::UPDATE_MODE_STREAM;
  config->in_place = options.publish_mode() == v1::PUBLISH_MODE_IN_PLACE;
  config->disk_fallback =
      options.transfer_medium() == v1::TRANSFER_MEDIUM_NETWORK_OR_DISK;
  config->latest = options.delivery_policy() == v1::DELIVERY_POLICY_LATEST;
  config->max_unavailable =
      options.commit_policy().has_rolling()
          ? options.commit_policy().rolling().max_unavailable()
          : 0;
  config->evict_stragglers =
      options.commit_policy().lockstep().on_straggler() ==
      v1::LockstepPolicy::ON_STRAGGLER_EVICT;
}

void CoordinatorCore::PublishArrived(NodeRun* node, int64_t correlation,
                                     const v1::PublishArrived& arrived) {
  const auto refuse = [&](const Fault& fault) {
    ReplyTo(node->stream, correlation, fault);
  };
  if (!lost_evidence_.empty()) return refuse(LostFault());
  const ModelEntry* entry = registry_.FindModel(arrived.model());
  const RankEntry* rank = nullptr;
  if (entry != nullptr) {
    auto it = entry->ranks.find(arrived.rank());
    if (it != entry->ranks.end()) rank = &it->second;
  }
  if (rank == nullptr || rank->session != arrived.session()) {
    return refuse(
        Fault(StatusCode::kNotFound, "SESSION_UNKNOWN",
              absl::StrCat("rank ", arrived.rank(), " of ", arrived.model(),
                           " has no such session; open one first")));
  }
  if (arrived.request_id().size() > kMaxRequestId) {
    return refuse(Fault(StatusCode::kInvalidArgument, "REQUEST_ID_INVALID",
                        absl::StrCat("a request_id has at most ", kMaxRequestId,
                                     " characters, this one has ",
                                     arrived.request_id().size())));
  }
  Fault fault = CheckOptions(arrived.options(), options_.transfer_medium);
  if (!fault.ok()) return refuse(fault);
  if (AnswerRepeated(node, correlation, arrived)) return;
  if (!rank->registered) {
    return refuse(Fault(StatusCode::kFailedPrecondition, "NOT_REGISTERED",
                        absl::StrCat("rank ", arrived.rank(),
                                     " has registered no shards; call "
                                     "RegisterShards first")));
  }

  PublishCall call;
  call.rank = arrived.rank();
  call.version = arrived.version();
  call.step = arrived.step();
  // Equal for options that mean the same; can be read back.
  call.options = ResolveOptions(arrived.options(), options_.transfer_medium)
                     .SerializeAsString();
  call.request_id = arrived.request_id();
  call.stream = node->stream;
  call.correlation = correlation;
  ModelRun* model = Model(arrived.model());
  const PublishBook::Decision decision =
      model->book.OnCall(call, now_, options_.publish_timeout);
  if (decision.replaced.has_value()) {
    ReplyTo(decision.replaced->stream, decision.replaced->correlation,
            Fault(StatusCode::kAborted, "CALL_REPLACED",
                  absl::StrCat("rank ", arrived.rank(),
                               " called again while this call waited")));
  }
  switch (decision.kind) {
    case PublishBook::Decision::kRefuse:
      SetIndex(ReplyTo(node->stream, correlation, decision.fault),
               decision.publish_index);
      return;
    case PublishBook::Decision::kJoin: {
      UpdateRun* update = model->FindUpdate(decision.update_id);
      if (update != nullptr) JoinUpdate(update, call);
      return;
    }
    case PublishBook::Decision::kDisagree:
      return Disagree(model, decision);
    case PublishBook::Decision::kWait:
      TryOpen(model);
      return;
  }
}

void CoordinatorCore::Disagree(ModelRun* model,
                               const PublishBook::Decision& decision) {
  for (const PublishCall& told : decision.told) {
    SetIndex(ReplyTo(told.stream, told.correlation, decision.fault),
             decision.publish_index);
  }
  const UpdateRun* update = model->FindUpdate(decision.update_id);
  if (update == nullptr) return;
  UpdateEvent cancel;
  cancel.kind = UpdateEvent::kCancel;
  cancel.fault = decision.fault;
  Post(*update, std::move(cancel));
}

bool CoordinatorCore::AnswerRepeated(NodeRun* node, int64_t correlation,
                                     const v1::PublishArrived& arrived) {
  if (arrived.request_id().empty()) return false;
  const JournalRequest* known = journal_.requests.Find(
      arrived.model(), arrived.rank(), arrived.request_id());
  if (known == nullptr) return false;
  const JournalRequest& request = *known;
  if (arrived.version() != 0 && arrived.version() != request.opened.version()) {
    ReplyTo(node->stream, correlation,
            Fault(StatusCode::kInvalidArgument, "REQUEST_ID_INVALID",
                  absl::StrCat("this request_id published version ",
                               request.opened.version(), ", not ",
                               arrived.version())));
    return true;
  }
  UpdateRun* running = Running(arrived.model(), request.opened.update_id());
  if (!request.copied && running != nullptr) {
    // The first answer was lost before the copy was made; it is made once.
    SendOpened(running, node->name, node->stream, correlation);
    return true;
  }
  // A commit says that the rank may go on, also where it could not be told.
  const bool committed =
      Model(arrived.model())->FindCommit(request.opened.update_id()) != nullptr;
  if (!request.copied && !committed) {
    Fault fault = FromProto(request.failure);
    if (fault.ok()) {
      fault.reason = "UPDATE_ABORTED";
      fault.message = "the update was given up";
    }
    fault.code = StatusCode::kAborted;
    ReplyTo(node->stream, correlation, fault);
    return true;
  }
  v1::PublishOpened* opened =
      ReplyTo(node->stream, correlation, Fault())->mutable_publish_opened();
  opened->set_update_id(request.opened.update_id());
  opened->set_version(request.opened.version());
  opened->set_repeated_request(true);
  opened->set_copied_bytes(request.copied_bytes);
  *opened->mutable_copy_duration() = ToProto(request.copy_duration);
  return true;
}

void CoordinatorCore::JoinUpdate(UpdateRun* update, const PublishCall& call) {
  if (!call.request_id.empty()) {
    auto* request = Write()->mutable_request_opened();
    request->set_model(update->model);
    request->set_rank(call.rank);
    request->set_request_id(call.request_id);
    request->set_update_id(update->update_id);
    request->set_version(update->record.version());
    *request->mutable_time() = ToProto(now_);
    journal_.requests.Open(*request);
  }
  const int index = update->rank_index.at(call.rank);
  const ModelEntry* entry = registry_.FindModel(update->model);
  auto rank = entry->ranks.find(call.rank);
  if (rank != entry->ranks.end()) {
    SendOpened(update, rank->second.node, call.stream, call.correlation);
  }
  for (v1::RankProgress& progress : *update->record.mutable_ranks()) {
    if (progress.rank() == call.rank) {
      *progress.mutable_arrive_time() = ToProto(now_);
    }
  }
  Changed(update->record);
  UpdateEvent event;
  event.kind = UpdateEvent::kRankArrived;
  event.rank = index;
  Post(*update, event);
}

void CoordinatorCore::SendOpened(UpdateRun* update, const std::string& node,
                                 const std::string& stream,
                                 int64_t correlation) {
  SendLayout(*update->layout, node);
  v1::PublishOpened* opened =
      ReplyTo(stream, correlation, Fault())->mutable_publish_opened();
  opened->set_update_id(update->update_id);
  opened->set_version(update->record.version());
  opened->set_layout_id(update->layout->id());
  opened->set_publish_index(update->publish_index);
}

void CoordinatorCore::SendLayout(const KnownLayout& layout,
                                 const std::string& name) {
  NodeRun* node = ConnectedNode(name);
  if (node == nullptr) return;
  // It forgets what is old, and so must we: a layout that comes back, with a
  // replica that left, is defined again.
  std::deque<std::string>& kept = node->layouts[layout.define.model()];
  if (std::find(kept.begin(), kept.end(), layout.id()) != kept.end()) return;
  kept.push_back(layout.id());
  if (kept.size() > LayoutBook::kKeptPerModel) kept.pop_front();
  *SendTo(name)->mutable_define_layout() = layout.define;
}

absl::StatusOr<std::shared_ptr<const KnownLayout>> CoordinatorCore::LayoutOfNow(
    ModelRun* model, std::set<std::string>* replicas) {
  auto known = model->layouts.Make(LayoutInputNow(*model, replicas));
  if (known.ok()) layouts_[(*known)->id()] = *known;
  return known;
}

Fault CoordinatorCore::CheckPossible(ModelRun* model,
                                     const v1::UpdateOptions& options,
                                     const std::set<std::string>& replicas) {
  if (options.pause_mode() == v1::PAUSE_MODE_NONE) {
    for (const std::string& name : replicas) {
      const ReplicaEntry* entry = registry_.FindReplica(model->name, name);
      if (entry->registration.atomic_swap()) continue;
      return Fault(StatusCode::kFailedPrecondition, "ATOMIC_SWAP_REQUIRED",
                   absl::StrCat(model->name, "/replicas/", name,
                                " does not declare atomic_swap, so it must "
                                "pause; publish with another pause_mode"));
    }
  }
  if (options.update_mode() != v1::UPDATE_MODE_STREAM ||
      options.allow_no_recovery() ||
      options.publish_mode() != v1::PUBLISH_MODE_IN_PLACE) {
    return Fault();
  }
  // The sender's own copy may vanish in the middle: then the old one must be
  // there for everybody whose memory is a mix by then.
  const CommittedUpdate* old = model->Wanted();
  std::string lacking;
  for (const std::string& name : replicas) {
    std::map<std::string, std::set<uint32_t>> missing;
    const bool covered = old != nullptr &&
                         Missing(model->replicas.at(name), *old, &missing) &&
                         !Unheld(*old, missing).has_value();
    if (!covered) lacking = name;
  }
  if (lacking.empty()) return Fault();
  return Fault(
      StatusCode::kFailedPrecondition, "NO_RECOVERY_SOURCE",
      absl::StrCat("no whole copy, old or new, would outlive the trainer for ",
                   model->name, "/replicas/", lacking,
                   " if STREAM broke off: publish with SNAPSHOT, or say "
                   "allow_no_recovery"));
}

void CoordinatorCore::TryOpen(ModelRun* model) {
  TryLoad(model);
  if (model->book.pending() == nullptr || model->updates.size() > 1 ||
      now_ < adopting_until_) {
    return;
  }
  // Behind one that still gathers nothing is opened: its ranks would be copied
  // out of order.
  if (!model->updates.empty() &&
      model->updates[0]->machine.phase == UpdatePhase::kGathering) {
    return;
  }
  const ModelEntry* entry = registry_.FindModel(model->name);
  if (entry == nullptr || !entry->Publishable()) return;
  std::set<std::string> replicas;
  auto layout = LayoutOfNow(model, &replicas);
  Fault impossible;
  v1::UpdateOptions options;
  if (!layout.ok()) {
    impossible = Fault(layout.status().code(), ErrorReason(layout.status()),
                       std::string(layout.status().message()));
  } else {
    options.ParseFromString(model->book.pending()->options);
    impossible = CheckPossible(model, options, replicas);
  }
  if (!impossible.ok()) {
    absl::optional<Publish> failed = model->book.Expire(now_, impossible, true);
    FailPublish(*failed);
    return;
  }
  if (model->prepare != nullptr) {
    // What it prepared is prepared; the update says the rest.
    EndPrepare(model, Fault());
  }

  Fault plan_fault;
  const std::string update_id = options_.random_id();
  const Publish publish = model->book.Open(update_id);
  auto* opened = Write()->mutable_update_opened();
  opened->set_model(model->name);
  opened->set_update_id(update_id);
  opened->set_version(publish.version);
  opened->set_step(publish.step);
  opened->set_publish_index(publish.index);
  *opened->mutable_time() = ToProto(now_);
  auto update = NewRun(model, update_id, *layout, options, publish.version,
                       publish.step, publish.begin);
  update->publish_index = publish.index;
  UpdateState& machine = update->machine;
  v1::Version& record = update->record;
  const absl::Status planned =
      PlanRun(update->options.transfer_policy(), update.get());
  if (!planned.ok()) {
    // Before the first byte: the update ends as soon as it runs.
    plan_fault = Fault(planned.code(), ErrorReason(planned),
                       std::string(planned.message()));
  }
  for (const auto& rank : entry->ranks) {
    UpdateRank out;
    out.rank = rank.first;
    out.node = update->layout->node_index.at(rank.second.node);
    update->rank_index[rank.first] = static_cast<int>(machine.ranks.size());
    machine.ranks.push_back(out);
    record.add_ranks()->set_rank(rank.first);
  }
  AddReplicas(replicas, model, update.get());
  model->updates.push_back(std::move(update));
  for (const PublishCall& call : publish.waiting) {
    JoinUpdate(model->updates.back().get(), call);
  }
  if (!plan_fault.ok()) {
    UpdateEvent cancel;
    cancel.kind = UpdateEvent::kCancel;
    cancel.fault = plan_fault;
    Post(*model->updates.back(), std::move(cancel));
  }
}

std::unique_ptr<UpdateRun> CoordinatorCore::NewRun(
    ModelRun* model, const std::string& update_id,
    std::shared_ptr<const KnownLayout> layout, const v1::UpdateOptions& options,
    int64_t version, int64_t step, absl::Time begin) {
  auto update = std::make_unique<UpdateRun>();
  update->model = model->name;
  update->update_id = update_id;
  update->key = KeyOf(update_id);
  update->layout = std::move(layout);
  update->group_secret = options_.random_id();
  update->begin = now_;
  update->options = options;

  UpdateConfig& config = update->config;
  config.gather_timeout = options_.gather_timeout;
  config.prepare_timeout = options_.prepare_timeout;
  config.progress_timeout = options_.progress_timeout;
  config.recovery_timeout = options_.recovery_timeout;
  config.max_reconfigurations = options_.max_reconfigurations;
  config.queue_timeout = options_.publish_timeout;
  config.checkpoint_timeout = options_.checkpoint_timeout;
  SetPolicies(options, &config);

  const KnownLayout& known = *update->layout;
  UpdateState& machine = update->machine;
  machine.epoch = model->epoch;
  machine.blocked = !model->updates.empty();
  machine.disk = options.transfer_medium() == v1::TRANSFER_MEDIUM_DISK;
  for (size_t i = 0; i < known.labels.size(); ++i) {
    UpdateNode node;
    node.name = known.labels[i].name;
    node.source = known.source[i];
    node.receiver = known.receiver[i];
    machine.nodes.push_back(std::move(node));
  }
  v1::Version& record = update->record;
  record.set_name(absl::StrCat(model->name, "/versions/", version));
  record.set_version(version);
  record.set_update_id(update_id);
  record.set_step(step);
  record.set_state(v1::Version::STATE_GATHERING);
  *record.mutable_options() = update->options;
  record.set_transfer_medium(machine.disk ? v1::TRANSFER_MEDIUM_DISK
                                          : v1::TRANSFER_MEDIUM_NETWORK);
  *record.mutable_create_time() = ToProto(begin);
  record.set_total_bytes(known.total_bytes);
  record.set_bucket_count(
      static_cast<int32_t>(known.layout.plan.bucket_count()));
  record.set_layout_id(known.id());
  update->phase_name = "gather";
  update->phase_begin = now_;
  return update;
}

void CoordinatorCore::AddReplicas(const std::set<std::string>& replicas,
                                  ModelRun* model, UpdateRun* update) {
  UpdateState& machine = update->machine;
  for (const std::string& name : model->AbsentReplicas()) {
    update->record.add_absent_replicas(
        absl::StrCat(model->name, "/replicas/", name));
  }
  for (const std::string& name : replicas) {
    // What a rollback holds back is kept in the stores, and installed on
    // nobody.
    if (!model->held_update_id.empty()) break;
    UpdateReplica out;
    out.name = model->replicas.at(name).machine.name;
    update->replica_index[name] = static_cast<int>(machine.replicas.size());
    machine.replicas.push_back(std::move(out));
  }
  BeginUpdate(update->config, now_, &machine);
  // Buckets may have to be sent at once: not all ranks have to be there first.
  for (const UpdateNode& node : machine.nodes) {
    if (node.In()) SendLayout(*update->layout, node.name);
  }
}

std::string CoordinatorCore::StillRuns(const UpdateRun& update) const {
  const std::string waits_for = WaitsFor(update.machine);
  return absl::StrCat("version ", update.record.version(), " of ", update.model,
                      " is ", UpdatePhaseName(update.machine.phase),
                      waits_for.empty() ? "" : " and waits for ", waits_for);
}

void CoordinatorCore::ExpirePublishes(ModelRun* model) {
  if (model->book.pending() == nullptr) return;
  const ModelEntry* entry = registry_.FindModel(model->name);
  Fault fault;
  if (now_ < adopting_until_) return;
  if (!model->updates.empty()) {
    fault = Fault(StatusCode::kDeadlineExceeded, "QUEUE_TIMEOUT",
                  absl::StrCat("the update before it did not end within ",
                               absl::FormatDuration(options_.publish_timeout),
                               ": ", StillRuns(*model->updates[0]),
                               "; publish again when it has ended"));
  } else {
    fault = entry->Unpublishable();
  }
  absl::optional<Publish> failed = model->book.Expire(now_, fault);
  if (failed.has_value()) FailPublish(*failed);
}

void CoordinatorCore::FailPublish(const Publish& publish) {
  for (const PublishCall& call : publish.waiting) {
    SetIndex(ReplyTo(call.stream, call.correlation, publish.fault),
             publish.index);
  }
}

}  // namespace daemon
}  // namespace weightsync
