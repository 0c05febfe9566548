// Publishes: calls of ranks, and the opening of an update.

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/coordinator/core.h"
#include "proto/plan.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

constexpr size_t kMaxRequestId = 128;

Fault Unimplemented(const char* reason, const std::string& what) {
  return Fault(StatusCode::kUnimplemented, reason,
               absl::StrCat(what, " does not work yet"));
}

Fault CheckOptions(const v1::UpdateOptions& options) {
  if (options.update_mode() > v1::UPDATE_MODE_STAGE) {
    return Unimplemented("UPDATE_MODE_UNIMPLEMENTED",
                         v1::UpdateMode_Name(options.update_mode()));
  }
  if (options.publish_mode() > v1::PUBLISH_MODE_SNAPSHOT) {
    return Unimplemented("PUBLISH_MODE_UNIMPLEMENTED",
                         v1::PublishMode_Name(options.publish_mode()));
  }
  if (options.pause_mode() != v1::PAUSE_MODE_UNSPECIFIED &&
      options.pause_mode() != v1::PAUSE_MODE_DRAIN) {
    return Unimplemented("PAUSE_MODE_UNIMPLEMENTED",
                         v1::PauseMode_Name(options.pause_mode()));
  }
  if (options.commit_policy().has_rolling()) {
    return Unimplemented("COMMIT_POLICY_UNIMPLEMENTED", "rolling");
  }
  if (options.allow_no_recovery()) {
    return Unimplemented("OPTION_UNIMPLEMENTED", "allow_no_recovery");
  }
  if (options.verify_source()) {
    return Unimplemented("OPTION_UNIMPLEMENTED", "verify_source");
  }
  return Fault();
}

// Equal for options that mean the same.
std::string OptionsKey(const v1::UpdateOptions& options) {
  const bool evict = options.commit_policy().lockstep().on_straggler() ==
                     v1::LockstepPolicy::ON_STRAGGLER_EVICT;
  return absl::StrCat(
      evict ? "evict" : "abort", ":",
      PolicyToProto(PolicyFromProto(options.transfer_policy())));
}

v1::TransferPolicy PolicyOfKey(const std::string& key) {
  int number = 0;
  const size_t colon = key.find(':');
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(key.substr(colon + 1), &number) ||
      !v1::TransferPolicy_IsValid(number)) {
    return v1::TRANSFER_POLICY_AUTO;
  }
  return static_cast<v1::TransferPolicy>(number);
}

void SetIndex(v1::Reply* reply, int64_t publish_index) {
  if (publish_index != 0) {
    reply->mutable_publish_opened()->set_publish_index(publish_index);
  }
}

}  // namespace

void CoordinatorCore::PublishArrived(NodeRun* node, int64_t correlation,
                                     const v1::PublishArrived& arrived) {
  const auto refuse = [&](const Fault& fault) {
    ReplyTo(node->stream, correlation, fault);
  };
  if (!lost_evidence_.empty()) {
    return refuse(Fault(StatusCode::kFailedPrecondition, "JOURNAL_LOST",
                        absl::StrCat(lost_evidence_,
                                     "; nothing is accepted until the journal "
                                     "is brought back")));
  }
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
  Fault fault = CheckOptions(arrived.options());
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
  call.options = OptionsKey(arrived.options());
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
    case PublishBook::Decision::kJoin:
      JoinUpdate(model->running.get(), call);
      return;
    case PublishBook::Decision::kWait:
      TryOpen(model);
      return;
  }
}

bool CoordinatorCore::AnswerRepeated(NodeRun* node, int64_t correlation,
                                     const v1::PublishArrived& arrived) {
  if (arrived.request_id().empty()) return false;
  auto it = journal_.requests.find(
      RequestKey(arrived.model(), arrived.rank(), arrived.request_id()));
  if (it == journal_.requests.end()) return false;
  const JournalRequest& request = it->second;
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
  if (!request.copied) {
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
    journal_.requests[RequestKey(update->model, call.rank, call.request_id)]
        .opened = *request;
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
  Post(update->model, event);
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
  opened->set_publish_index(models_.at(update->model).book.open()->index);
}

void CoordinatorCore::SendLayout(const KnownLayout& layout,
                                 const std::string& name) {
  NodeRun* node = ConnectedNode(name);
  if (node == nullptr || !node->layouts.insert(layout.id()).second) return;
  *SendTo(name)->mutable_define_layout() = layout.define;
}

absl::StatusOr<std::shared_ptr<const KnownLayout>> CoordinatorCore::LayoutOfNow(
    ModelRun* model, std::set<std::string>* replicas) {
  v1::DefineLayout input = LayoutInputNow(*model, replicas);
  std::string key = input.SerializeAsString();
  if (model->layout != nullptr && model->layout_input == key) {
    return model->layout;
  }
  auto known = MakeKnownLayout(std::move(input));
  if (!known.ok()) return known.status();
  model->layout = *known;
  model->layout_input = std::move(key);
  layouts_[(*known)->id()] = *known;
  return model->layout;
}

void CoordinatorCore::TryOpen(ModelRun* model) {
  if (model->book.pending() == nullptr || model->running != nullptr) return;
  const ModelEntry* entry = registry_.FindModel(model->name);
  if (entry == nullptr || !entry->Publishable()) return;
  std::set<std::string> replicas;
  auto layout = LayoutOfNow(model, &replicas);
  if (!layout.ok()) {
    Fault fault(layout.status().code(), ErrorReason(layout.status()),
                std::string(layout.status().message()));
    absl::optional<Publish> failed = model->book.Expire(now_, fault, true);
    FailPublish(*failed);
    return;
  }
  if (model->prepare != nullptr) {
    // What it prepared is prepared; the update says the rest.
    EndPrepare(model, Fault());
  }

  Fault plan_fault;
  auto update = std::make_unique<UpdateRun>();
  update->model = model->name;
  update->update_id = options_.random_id();
  update->key = KeyOf(update->update_id);
  update->layout = *layout;
  update->group_secret = options_.random_id();
  update->begin = now_;
  const Publish publish = model->book.Open(update->update_id);
  if (absl::StartsWith(publish.options, "evict")) {
    update->config.evict_stragglers = true;
    update->options.mutable_commit_policy()
        ->mutable_lockstep()
        ->set_on_straggler(v1::LockstepPolicy::ON_STRAGGLER_EVICT);
  }
  update->options.set_transfer_policy(PolicyOfKey(publish.options));
  update->options.set_publish_mode(v1::PUBLISH_MODE_SNAPSHOT);
  update->options.set_update_mode(v1::UPDATE_MODE_STAGE);
  update->options.set_pause_mode(v1::PAUSE_MODE_DRAIN);
  if (!update->config.evict_stragglers) {
    update->options.mutable_commit_policy()
        ->mutable_lockstep()
        ->set_on_straggler(v1::LockstepPolicy::ON_STRAGGLER_ABORT);
  }

  auto* opened = Write()->mutable_update_opened();
  opened->set_model(model->name);
  opened->set_update_id(update->update_id);
  opened->set_version(publish.version);
  opened->set_step(publish.step);
  opened->set_publish_index(publish.index);
  *opened->mutable_time() = ToProto(now_);

  UpdateConfig& config = update->config;
  config.gather_timeout = options_.gather_timeout;
  config.prepare_timeout = options_.prepare_timeout;
  config.progress_timeout = options_.progress_timeout;
  config.recovery_timeout = options_.recovery_timeout;
  config.max_reconfigurations = options_.max_reconfigurations;

  const KnownLayout& known = *update->layout;
  UpdateState& machine = update->machine;
  machine.epoch = model->epoch;
  for (size_t i = 0; i < known.labels.size(); ++i) {
    UpdateNode node;
    node.name = known.labels[i].name;
    node.source = known.source[i];
    node.receiver = known.receiver[i];
    machine.nodes.push_back(std::move(node));
  }
  v1::Version& record = update->record;
  record.set_name(absl::StrCat(model->name, "/versions/", publish.version));
  record.set_version(publish.version);
  record.set_update_id(update->update_id);
  record.set_step(publish.step);
  record.set_state(v1::Version::STATE_GATHERING);
  *record.mutable_options() = update->options;
  *record.mutable_create_time() = ToProto(publish.begin);
  record.set_total_bytes(known.total_bytes);
  record.set_bucket_count(
      static_cast<int32_t>(known.layout.plan.bucket_count()));
  record.set_layout_id(known.id());
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
    out.node = known.node_index.at(rank.second.node);
    update->rank_index[rank.first] = static_cast<int>(machine.ranks.size());
    machine.ranks.push_back(out);
    record.add_ranks()->set_rank(rank.first);
  }
  for (const std::string& name : replicas) {
    UpdateReplica out;
    out.name = model->replicas.at(name).machine.name;
    update->replica_index[name] = static_cast<int>(machine.replicas.size());
    machine.replicas.push_back(std::move(out));
  }
  update->phase_name = "gather";
  update->phase_begin = now_;
  BeginUpdate(config, now_, &machine);
  // Buckets may have to be sent at once: not all ranks have to be there first.
  for (size_t i = 0; i < machine.nodes.size(); ++i) {
    if (machine.nodes[i].In()) SendLayout(known, machine.nodes[i].name);
  }
  model->running = std::move(update);
  for (const PublishCall& call : publish.waiting) {
    JoinUpdate(model->running.get(), call);
  }
  if (!plan_fault.ok()) {
    UpdateEvent cancel;
    cancel.kind = UpdateEvent::kCancel;
    cancel.fault = plan_fault;
    Post(model->name, std::move(cancel));
  }
}

void CoordinatorCore::ExpirePublishes(ModelRun* model) {
  if (model->book.pending() == nullptr) return;
  const ModelEntry* entry = registry_.FindModel(model->name);
  Fault fault;
  if (model->running != nullptr) {
    fault = Fault(
        StatusCode::kDeadlineExceeded, "QUEUE_TIMEOUT",
        absl::StrCat("version ", model->running->record.version(), " of ",
                     model->name, " was still ",
                     UpdatePhaseName(model->running->machine.phase), " after ",
                     absl::FormatDuration(options_.publish_timeout),
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
