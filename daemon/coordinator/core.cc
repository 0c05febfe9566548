#include "daemon/coordinator/core.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace weightsync {
namespace daemon {

using absl::StatusCode;

namespace {

// "rank 0 on node b has gone: why"; where `why` begins with "rank 0" itself,
// only the node is put into it.
std::string GoneText(const std::string& who, const std::string& node,
                     const std::string& what, const std::string& why) {
  const std::string there = absl::StrCat(who, " on node ", node);
  if (absl::StartsWith(why, absl::StrCat(who, " "))) {
    return absl::StrCat(there, why.substr(who.size()));
  }
  return absl::StrCat(there, " ", what, why.empty() ? "" : ": ", why);
}

ReplicaTimeouts TimeoutsOf(const CoordinatorOptions& options) {
  ReplicaTimeouts timeouts;
  timeouts.pause = options.pause_timeout;
  timeouts.apply = options.apply_timeout;
  timeouts.resume = options.resume_timeout;
  timeouts.apply_attempts = options.apply_attempts;
  return timeouts;
}

}  // namespace

const CommittedUpdate& ModelRun::Newest() const {
  static const auto* const kNone = new CommittedUpdate();
  return commits.empty() ? *kNone : commits.back();
}

const CommittedUpdate* ModelRun::FindCommit(
    const std::string& update_id) const {
  for (auto it = commits.rbegin(); it != commits.rend(); ++it) {
    if (it->update_id == update_id) return &*it;
  }
  return nullptr;
}

const CommittedUpdate* ModelRun::Wanted() const {
  const CommittedUpdate* wanted = !held_update_id.empty()
                                      ? FindCommit(held_update_id)
                                  : commits.empty() ? nullptr
                                                    : &commits.back();
  return wanted == nullptr || wanted->lost ? nullptr : wanted;
}

std::vector<std::string> ModelRun::AbsentReplicas() const {
  std::set<std::string> absent = unseen_replicas;
  for (const auto& replica : replicas) {
    if (!replica.second.machine.Complete()) absent.insert(replica.first);
  }
  return {absent.begin(), absent.end()};
}

UpdateRun* ModelRun::FindUpdate(const std::string& update_id) const {
  for (const auto& update : updates) {
    if (update->update_id == update_id) return update.get();
  }
  return nullptr;
}

bool NodeRun::Holds(const std::string& update_id) const {
  for (const auto& update : held) {
    if (update.second == update_id) return true;
  }
  return false;
}

CoordinatorCore::CoordinatorCore(CoordinatorOptions options,
                                 JournalState recovered)
    : options_(std::move(options)),
      replica_timeouts_(TimeoutsOf(options_)),
      journal_(std::move(recovered)),
      ids_({{0, ""}}) {
  keys_[""] = 0;
}

Actions CoordinatorCore::Start(absl::Time now) {
  now_ = now;
  start_time_ = now;
  fresh_ = journal_.cluster_id.empty();
  cluster_id_ = fresh_ ? options_.random_id() : journal_.cluster_id;
  term_ = journal_.term + 1;
  command_prefix_ =
      absl::StrCat(options_.random_id().substr(0, 12), ".", term_, ".");
  lost_evidence_ = journal_.lost_evidence;
  auto* started = Write()->mutable_started();
  started->set_cluster_id(cluster_id_);
  started->set_term(term_);
  *started->mutable_time() = ToProto(now);
  for (const auto& layout : journal_.layouts) {
    auto known = MakeKnownLayout(layout.second);
    if (!known.ok() || (*known)->id() != layout.first) {
      // Its late joiners wait for the next publish.
      LOG(WARNING) << "layout " << layout.first
                   << " of the journal cannot be computed any more: "
                   << known.status();
      continue;
    }
    layouts_[layout.first] = *std::move(known);
  }
  seen_term_ = term_;
  if (journal_.adopted_term != 0 && journal_.adopted_term == journal_.term) {
    // It ended before all nodes can have said what there is.
    adopting_until_ = now + options_.recovery_timeout;
  }
  for (const auto& model : journal_.models) Recover(model.first, model.second);
  DrainQueue();
  CheckWaits();
  return Take();
}

Actions CoordinatorCore::OnReport(absl::Time now, const std::string& stream,
                                  const v1::NodeReport& report) {
  now_ = now;
  actions_.clear();
  if (report.report_case() == v1::NodeReport::kHello) {
    Hello(stream, report.hello());
  } else {
    auto it = streams_.find(stream);
    if (it == streams_.end()) {
      Close(stream, Fault(StatusCode::kInvalidArgument, "HELLO_EXPECTED",
                          "the first report of a stream says hello"));
    } else {
      NodeRun* node = FindNode(it->second);
      node->last_report = now;
      Dispatch(node, report);
    }
  }
  DrainQueue();
  CheckWaits();
  return Take();
}

Actions CoordinatorCore::OnDisconnected(absl::Time now,
                                        const std::string& stream) {
  now_ = now;
  actions_.clear();
  auto it = streams_.find(stream);
  if (it != streams_.end()) Disconnected(FindNode(it->second));
  DrainQueue();
  CheckWaits();
  return Take();
}

Actions CoordinatorCore::OnTick(absl::Time now) {
  now_ = now;
  actions_.clear();
  if (adopting_until_ != absl::InfinitePast() && now >= adopting_until_) {
    // Now that all have said what they serve it is known what was committed.
    adopting_until_ = absl::InfinitePast();
    for (auto& entry : nodes_) {
      if (!entry.second.stream.empty()) SendEnds(&entry.second);
    }
  }
  for (auto& entry : nodes_) {
    NodeRun& node = entry.second;
    if (node.lost) continue;
    if (node.stream.empty()) {
      if (now >= node.lost_time) {
        LoseNode(
            &node,
            Fault(StatusCode::kUnavailable, "NODE_LOST",
                  absl::StrCat(
                      "node ", node.name, " did not come back within ",
                      absl::FormatDuration(options_.node_reconnect_grace))));
      }
      continue;
    }
    if (now - node.last_report >= options_.heartbeat_timeout) {
      const std::string stream = node.stream;
      Disconnected(&node);
      Close(stream,
            Fault(StatusCode::kDeadlineExceeded, "HEARTBEAT_LOST",
                  absl::StrCat("node ", node.name, " said nothing for ",
                               absl::FormatDuration(options_.heartbeat_timeout),
                               "; say hello again")));
      continue;
    }
    if (!node.ready && now - node.connect_time >= options_.recovery_timeout) {
      const std::string stream = node.stream;
      Disconnected(&node);
      Close(stream,
            Fault(StatusCode::kDeadlineExceeded, "HELLO_TIMEOUT",
                  absl::StrCat("node ", node.name, " did not say within ",
                               absl::FormatDuration(options_.recovery_timeout),
                               " who is registered with it; say hello again")));
      continue;
    }
    if (now - node.last_heartbeat >= options_.heartbeat_interval) {
      node.last_heartbeat = now;
      SendTo(node.name)->mutable_heartbeat();
    }
  }
  DrainQueue();
  TickCheckpoints();
  UpdateEvent tick;
  ReplicaEvent replica_tick;
  for (auto& entry : models_) {
    ModelRun& model = entry.second;
    for (auto& replica : model.replicas) {
      Step(&replica.second, replica_tick);
    }
    FlagStale(&model);
    for (const auto& update : model.updates) {
      const bool late =
          update->machine.blocked && now >= update->machine.deadline;
      tick.behind = late ? StillRuns(*model.updates[0]) : "";
      Post(*update, tick);
    }
    DrainQueue();
    ExpirePublishes(&model);
    TryOpen(&model);
    TickPrepare(&model);
    TickFetch(&model);
    TickLoads(&model);
    for (auto& replica : model.replicas) {
      if (replica.second.not_before == absl::InfinitePast() ||
          now < replica.second.not_before) {
        continue;
      }
      replica.second.not_before = absl::InfinitePast();
      Settle(&replica.second);
    }
    DrainQueue();
  }
  Forget();
  CheckWaits();
  return Take();
}

// ---- Nodes ----

void CoordinatorCore::Dispatch(NodeRun* node, const v1::NodeReport& report) {
  const int64_t correlation = report.correlation_id();
  switch (report.report_case()) {
    case v1::NodeReport::kHelloDone:
      return HelloDone(node);
    case v1::NodeReport::kHeartbeat:
      if (report.heartbeat().has_memory()) {
        node->memory = report.heartbeat().memory();
      }
      return;
    case v1::NodeReport::kClaimRank:
      return ClaimRank(node, correlation, report.claim_rank());
    case v1::NodeReport::kRankShards:
      return RankShards(node, correlation, report.rank_shards());
    case v1::NodeReport::kRankLost: {
      const auto& lost = report.rank_lost();
      Fault fault(StatusCode::kAborted, "RANK_LOST",
                  GoneText(absl::StrCat("rank ", lost.rank()), node->name,
                           "has gone", lost.failure().message()));
      return LoseRank(lost.model(), lost.rank(), lost.session(), fault);
    }
    case v1::NodeReport::kReplicaJoined:
      return ReplicaJoined(node, correlation, report.replica_joined());
    case v1::NodeReport::kReplicaLeft: {
      const auto& left = report.replica_left();
      Fault fault(
          StatusCode::kUnavailable, "REPLICA_LOST",
          GoneText(absl::StrCat(left.model(), "/replicas/", left.replica()),
                   node->name, "ended its control stream",
                   left.failure().message()));
      return LoseControl(left.model(), left.replica(), left.incarnation(),
                         fault);
    }
    case v1::NodeReport::kWorkerJoined:
      return WorkerJoined(node, correlation, report.worker_joined());
    case v1::NodeReport::kWorkerLeft: {
      const auto& left = report.worker_left();
      Fault fault(
          StatusCode::kUnavailable, "WORKER_LOST",
          GoneText(absl::StrCat("worker ", left.worker_index(), " of ",
                                left.model(), "/replicas/", left.replica()),
                   node->name, "has gone", left.failure().message()));
      return LoseWorker(left.model(), left.replica(), left.worker_index(),
                        left.incarnation(), fault);
    }
    case v1::NodeReport::kPublishArrived:
      return PublishArrived(node, correlation, report.publish_arrived());
    case v1::NodeReport::kRankSnapshotted:
      return RankSnapshotted(node->name, report.rank_snapshotted());
    case v1::NodeReport::kUpdatePrepared:
      return UpdatePrepared(node->name, report.update_prepared());
    case v1::NodeReport::kUpdateProgress:
      return UpdateProgress(node->name, report.update_progress());
    case v1::NodeReport::kUpdateVerified:
      return UpdateVerified(node->name, report.update_verified());
    case v1::NodeReport::kReplicaPaused:
      return ReplicaPaused(report.replica_paused());
    case v1::NodeReport::kWorkerApplied:
      return WorkerApplied(report.worker_applied());
    case v1::NodeReport::kReplicaResumed:
      return ReplicaResumed(report.replica_resumed());
    case v1::NodeReport::kUpdateEvicted: {
      const auto& evicted = report.update_evicted();
      return ForgetHeld(node, evicted.model(), evicted.update_id());
    }
    case v1::NodeReport::kWorkerDigests:
      return WorkerDigests(report.worker_digests());
    case v1::NodeReport::kCheckpointWritten:
      return CheckpointWritten(report.checkpoint_written());
    case v1::NodeReport::kCheckpointRead:
      return CheckpointRead(node->name, report.checkpoint_read());
    case v1::NodeReport::kHello:
    case v1::NodeReport::REPORT_NOT_SET:
      // Of a later release.
      return;
  }
}

Actions CoordinatorCore::Take() {
  Actions actions;
  actions.swap(actions_);
  const auto nowhere = [](const Action& action) {
    const SendCommand* send = absl::get_if<SendCommand>(&action);
    return send != nullptr && send->node_stream.empty();
  };
  actions.erase(std::remove_if(actions.begin(), actions.end(), nowhere),
                actions.end());
  return actions;
}

void CoordinatorCore::Close(const std::string& stream, const Fault& fault) {
  actions_.push_back(CloseNode{stream, ToProto(fault)});
}

void CoordinatorCore::JournalLost(const std::string& evidence) {
  if (!lost_evidence_.empty()) return;
  lost_evidence_ = evidence;
  LOG(ERROR) << "JOURNAL_LOST: " << evidence;
  Write()->mutable_lost()->set_evidence(evidence);
}

Fault CoordinatorCore::LostFault() const {
  return Fault(
      StatusCode::kFailedPrecondition, "JOURNAL_LOST",
      absl::StrCat(lost_evidence_,
                   "; nothing is accepted until the journal is brought back, "
                   "or `weightsyncctl adopt` takes the nodes' word"));
}

NodeRun* CoordinatorCore::FindNode(const std::string& name) {
  auto it = nodes_.find(name);
  return it == nodes_.end() ? nullptr : &it->second;
}

NodeRun* CoordinatorCore::ConnectedNode(const std::string& name) {
  NodeRun* node = FindNode(name);
  return node == nullptr || node->stream.empty() ? nullptr : node;
}

ModelRun* CoordinatorCore::Model(const std::string& name) {
  ModelRun& model = models_[name];
  model.name = name;
  return &model;
}

v1::NodeCommand* CoordinatorCore::SendTo(const std::string& name) {
  const NodeRun* node = ConnectedNode(name);
  SendCommand* send = Add<SendCommand>();
  if (node != nullptr) send->node_stream = node->stream;
  return &send->command;
}

v1::Reply* CoordinatorCore::ReplyTo(const std::string& stream,
                                    int64_t correlation, const Fault& fault) {
  SendCommand* send = Add<SendCommand>();
  send->node_stream = stream;
  v1::Reply* reply = send->command.mutable_reply();
  reply->set_correlation_id(correlation);
  if (!fault.ok()) *reply->mutable_failure() = ToProto(fault);
  return reply;
}

internal::v1::JournalRecord* CoordinatorCore::Write() {
  return &Add<JournalAppend>()->record;
}

void CoordinatorCore::Changed(const v1::Version& record) {
  const std::string& name = record.name();
  VersionChanged* changed = Add<VersionChanged>();
  changed->model = name.substr(0, name.find("/versions/"));
  changed->version = record.version();
  changed->update_id = record.update_id();
}

CoordinatorCosts CoordinatorCore::costs() const {
  CoordinatorCosts costs;
  costs.catalogs = registry_.fits();
  costs.needed_buckets = needs_.computed();
  costs.missing_buckets = missing_computed_;
  costs.collections = collections_;
  return costs;
}

UpdateKey CoordinatorCore::KeyOf(const std::string& update_id) {
  auto it = keys_.emplace(update_id, next_key_);
  if (it.second) ids_[next_key_++] = update_id;
  return it.first->second;
}

UpdateKey CoordinatorCore::FindKey(const std::string& update_id) const {
  auto it = keys_.find(update_id);
  return it == keys_.end() ? 0 : it->second;
}

const std::string& CoordinatorCore::IdOf(UpdateKey key) const {
  auto it = ids_.find(key);
  return it == ids_.end() ? ids_.at(0) : it->second;
}

}  // namespace daemon
}  // namespace weightsync
