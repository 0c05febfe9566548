#include "daemon/node/node_update.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/convert.h"
#include "glog/logging.h"
#include "proto/status.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::Landing;
using transport::MakeError;

// After a commit every byte is everywhere; what may still be on its way is a
// neighbour's word that it is.
constexpr absl::Duration kLeaveTogether = absl::Seconds(2);

}  // namespace

absl::Duration DurationOr(bool present, const google::protobuf::Duration& d,
                          absl::Duration otherwise) {
  if (!present) return otherwise;
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

transport::Epoch FromProto(const v1::Epoch& epoch) {
  transport::Epoch result;
  result.term = static_cast<uint64_t>(epoch.term());
  result.counter = static_cast<uint64_t>(epoch.counter());
  return result;
}

NodeUpdate::NodeUpdate(Context context, std::string update_id, int64_t version,
                       std::shared_ptr<const NodeLayout> layout)
    : context_(std::move(context)),
      update_id_(std::move(update_id)),
      version_(version),
      layout_(std::move(layout)),
      driver_([this] { Drive(); }) {}

NodeUpdate::~NodeUpdate() { driver_.join(); }

// ---- Commands ----

void NodeUpdate::Prepare(const v1::PrepareUpdate& command) {
  absl::MutexLock lock(&mutex_);
  prepare_ = command;
  woken_ = true;
}

void NodeUpdate::Move(const v1::MoveUpdate& command) {
  absl::MutexLock lock(&mutex_);
  move_ = command;
  woken_ = true;
}

void NodeUpdate::Manifest(const v1::UpdateManifest& command) {
  absl::MutexLock lock(&mutex_);
  manifest_.clear();
  for (const v1::BucketDigest& bucket : command.buckets()) {
    manifest_[bucket.bucket()] = FromProto(bucket.digest());
  }
  has_manifest_ = true;
  woken_ = true;
}

void NodeUpdate::End(bool committed, absl::Status why) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  ended_ = true;
  committed_ = committed;
  why_ = why.ok() ? MakeError(absl::StatusCode::kAborted, "UPDATE_ENDED",
                              absl::StrCat("update ", update_id_, " has ended"))
                  : std::move(why);
  cancel_.Cancel(why_);
  woken_ = true;
}

void NodeUpdate::Wake() {
  absl::MutexLock lock(&mutex_);
  woken_ = true;
}

// ---- Bytes ----

absl::Status NodeUpdate::PinInStore() {
  // An entry without buckets first: room that is not pinned yet could be given
  // away under our hands (Store::Forget).
  auto made = context_.store->Reserve(update_id_, version_, layout_, {});
  if (!made.ok()) return made.status();
  auto pin = context_.store->Pin(update_id_);
  if (!pin.ok()) return pin.status();
  absl::MutexLock lock(&mutex_);
  pins_.push_back(*std::move(pin));
  return absl::OkStatus();
}

absl::StatusOr<SnapshotResult> NodeUpdate::Snapshot(
    int32_t rank, const std::vector<SourceShard>& shards, bool verify_source,
    const CancelFlag* cancel) {
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return why_;
    ++snapshots_;
  }
  absl::StatusOr<SnapshotResult> result = [&] {
    using Result = absl::StatusOr<SnapshotResult>;
    const std::vector<int32_t> buckets = layout_->RankBuckets(rank);
    auto landings = Landings(buckets, Use::kPack);
    if (!landings.ok()) return Result(landings.status());
    Result taken = TakeSnapshot(*layout_, rank, shards, *landings,
                                context_.memory, {cancel, &cancel_});
    for (size_t i = 0; taken.ok() && verify_source && i < buckets.size(); ++i) {
      TensorDigests unused;
      auto again = DigestSourceBucket(*layout_, rank, shards, buckets[i],
                                      context_.memory, &unused);
      if (!again.ok()) return Result(again.status());
      const transport::Digest before = (*landings)[i]->bucket_digest();
      if (*again == before) continue;
      return Result(SourceChanged(*layout_, rank, buckets[i], before, *again));
    }
    return taken;
  }();
  absl::MutexLock lock(&mutex_);
  --snapshots_;
  woken_ = true;
  return result;
}

// ---- The driver ----

void NodeUpdate::AwaitFinished() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &NodeUpdate::finished));
}

void NodeUpdate::SetFinished() {
  absl::MutexLock lock(&mutex_);
  finished_.store(true, std::memory_order_release);
}

void NodeUpdate::Drive() {
  for (const auto& run : context_.predecessors) run->AwaitFinished();
  context_.predecessors.clear();
  while (true) {
    absl::optional<v1::PrepareUpdate> prepare;
    absl::optional<v1::MoveUpdate> move;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Duration patience = round_ != nullptr
                                          ? context_.report_interval
                                          : absl::InfiniteDuration();
      mutex_.AwaitWithTimeout(absl::Condition(&woken_), patience);
      woken_ = false;
      if (ended_) break;
      prepare.swap(prepare_);
      // A move of the epoch that is prepared next is kept for it.
      if (!prepare.has_value()) move.swap(move_);
      if (prepare.has_value() && move_.has_value()) woken_ = true;
    }
    if (prepare.has_value()) StartRound(*prepare);
    if (move.has_value()) {
      if (round_ == nullptr ||
          !(FromProto(move->epoch()) == FromProto(round_->command.epoch()))) {
        LOG(WARNING) << "MoveUpdate of update " << update_id_
                     << " for an epoch that is not prepared is ignored";
      } else {
        absl::MutexLock lock(&mutex_);
        round_->progress_timeout =
            DurationOr(move->has_progress_timeout(), move->progress_timeout(),
                       context_.progress_timeout);
        round_->stream_workers.assign(move->stream_workers().begin(),
                                      move->stream_workers().end());
        round_->checkpoint_path = move->checkpoint().path();
        round_->move = true;
      }
    }
    if (round_ == nullptr) continue;
    LookAtFlows();
    LookAtEdges();
    LookAtBytes();
    if (fetch_ && FetchEnded()) break;
    if (dry_ && round_->answered &&
        absl::Now() > round_->prepared_time + context_.prepare_timeout) {
      // Nobody ended it.
      break;
    }
  }
  Finish();
}

bool NodeUpdate::FetchEnded() {
  // Nobody ends what was committed long ago: of a holder the coordinator only
  // says that it keeps what it had. The next attempt is another run; this one
  // must not keep the update pinned until then, or for good.
  absl::MutexLock lock(&mutex_);
  const bool through =
      round_->move && AllMoved() && (round_->verified || !receives_);
  const bool refused = round_->answered && !round_->answer.ok();
  const bool failed = round_->move && (!AllMoved() || round_->unfit) &&
                      std::all_of(round_->flows.begin(), round_->flows.end(),
                                  [](const std::unique_ptr<FlowRun>& flow) {
                                    return flow->done;
                                  });
  // By then the coordinator has given up on whoever it waited for.
  const bool forgotten =
      round_->answered && !round_->move &&
      absl::Now() >
          round_->prepared_time + 2 * DurationOr(round_->command.has_timeout(),
                                                 round_->command.timeout(),
                                                 context_.prepare_timeout);
  if (!through && !refused && !failed && !forgotten) return false;
  ended_ = true;
  committed_ = through;
  why_ = MakeError(absl::StatusCode::kAborted, "UPDATE_ENDED",
                   "the fetch has ended");
  return true;
}

void NodeUpdate::StartRound(const v1::PrepareUpdate& command) {
  if (round_ != nullptr) {
    const transport::Epoch now = FromProto(round_->command.epoch());
    const transport::Epoch asked = FromProto(command.epoch());
    if (asked < now) {
      v1::NodeReport report;
      v1::UpdatePrepared* answer = report.mutable_update_prepared();
      answer->set_model(model());
      answer->set_update_id(update_id_);
      *answer->mutable_epoch() = command.epoch();
      *answer->mutable_failure() = ToFailure(MakeError(
          absl::StatusCode::kFailedPrecondition, "STALE_EPOCH",
          absl::StrCat("node ", context_.node, " has prepared update ",
                       update_id_, " for epoch ", now.term, ".", now.counter,
                       " already")));
      context_.report(std::move(report));
      return;
    }
    if (asked == now) {
      // Said twice: it may be that nobody heard what was answered.
      if (round_->answered) {
        round_->answered = false;
        AnswerPrepare(round_.get(), round_->answer);
        for (const v1::NodeReport& outcome : round_->outcomes) {
          context_.report(outcome);
        }
      }
      return;
    }
    CloseRound(MakeError(
        absl::StatusCode::kAborted, "NEWER_EPOCH",
        absl::StrCat("epoch ", asked.term, ".", asked.counter, " has begun")));
  }
  round_ = std::make_unique<Round>();
  round_->command = command;
  dry_ = command.dry();
  fetch_ = command.fetch();
  absl::Status status = FillRound(round_.get());
  if (!status.ok()) {
    CloseRound(status);
    // Kept without flows: the epoch is known and commands of it are answered.
    round_ = std::make_unique<Round>();
    round_->command = command;
    AnswerPrepare(round_.get(), status);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    knows_lanes_ = true;
    stream_mode_ = round_->stream;
    lane_buckets_.clear();
    for (const auto& flow : round_->flows) {
      if (!flow->lane || flow->self > 0) continue;
      lane_buckets_.insert(flow->buckets.begin(), flow->buckets.end());
    }
  }
  StartPlacing();
  for (auto& flow : round_->flows) {
    FlowRun* f = flow.get();
    Round* round = round_.get();
    f->thread = std::thread([this, round, f] { RunFlow(round, f); });
  }
}

void NodeUpdate::CloseRound(const absl::Status& why) {
  if (round_ == nullptr) return;
  std::vector<transport::Group*> busy;
  {
    absl::MutexLock lock(&mutex_);
    round_->closed = true;
    for (const auto& flow : round_->flows) {
      // One that is at rest leaves quietly.
      const bool rests =
          flow->joined && flow->status.ok() && (flow->done || !round_->move);
      if (flow->group != nullptr && !rests) busy.push_back(flow->group.get());
    }
  }
  for (transport::Group* group : busy) group->Abort(why);
  for (const auto& flow : round_->flows) {
    if (flow->thread.joinable()) flow->thread.join();
  }
  repaired_before_ = RepairedFrames();
  round_ = nullptr;
  absl::MutexLock lock(&mutex_);
  edge_failures_.clear();
  // A copy for sending that failed has failed for good; the next round makes
  // another.
  for (auto staged = staged_.begin(); staged != staged_.end();) {
    staged = staged->second->status().ok() ? std::next(staged)
                                           : staged_.erase(staged);
  }
}

// ---- Reports ----

void NodeUpdate::AnswerPrepare(Round* round, const absl::Status& status) {
  if (round->answered) return;
  round->answered = true;
  round->answer = status;
  round->prepared = status.ok();
  round->prepared_time = absl::Now();
  v1::NodeReport report;
  v1::UpdatePrepared* answer = report.mutable_update_prepared();
  answer->set_model(model());
  answer->set_update_id(update_id_);
  *answer->mutable_epoch() = round->command.epoch();
  if (!status.ok()) *answer->mutable_failure() = ToFailure(status);
  context_.report(std::move(report));
}

void NodeUpdate::LookAtFlows() {
  bool all_joined = true;
  std::vector<std::pair<FlowRun*, absl::Status>> failed;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& flow : round_->flows) {
      all_joined = all_joined && flow->joined;
      if (flow->done && !flow->status.ok() && !flow->reported) {
        flow->reported = true;
        failed.emplace_back(flow.get(), flow->status);
      }
    }
  }
  for (const auto& failure : failed) {
    if (!round_->answered) {
      AnswerPrepare(round_.get(), failure.second);
    } else if (round_->prepared) {
      ReportFailure(failure.second);
    }
    if (failure.first->group != nullptr) {
      failure.first->group->Abort(failure.second);
    }
  }
  if (all_joined) AnswerPrepare(round_.get(), absl::OkStatus());
}

void NodeUpdate::LookAtEdges() {
  // Before the answer to Prepare, Join says what is wrong.
  if (!round_->prepared) return;
  std::vector<absl::Status> failures;
  {
    absl::MutexLock lock(&mutex_);
    failures.swap(edge_failures_);
  }
  for (const absl::Status& failure : failures) ReportFailure(failure);
}

bool NodeUpdate::AllMoved() {
  for (const auto& flow : round_->flows) {
    if (!flow->done || !flow->status.ok()) return false;
  }
  return true;
}

void NodeUpdate::LookAtBytes() {
  if (!round_->prepared || dry_) return;
  absl::Status lost = CheckNotLost();
  if (!lost.ok()) {
    round_->unfit = true;
    ReportFailure(lost);
  }
  bool complete = true;
  bool has_manifest = false;
  bool moving = false;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& count : counts_) {
      complete = complete && count.second->complete();
    }
    // Buckets that pass through are here when they have passed.
    for (const auto& flow : round_->flows) {
      if (flow->lane) complete = complete && flow->done && flow->status.ok();
    }
    if (round_->in_place) {
      for (const auto& source : sources_) {
        for (int32_t bucket : layout_->RankBuckets(source.first)) {
          complete = complete && source_digests_.count(bucket) > 0;
        }
      }
    }
    complete = complete && AllPlaced();
    has_manifest = has_manifest_;
    moving = round_->move;
  }
  if (moving && !round_->verified && absl::Now() >= next_progress_) {
    ReportProgress(false);
  }
  if (complete && moving && round_->load && !round_->loaded) ReportLoaded();
  if (!complete || !has_manifest || round_->verified) return;
  // A STREAM that has nothing to receive still waits for its workers.
  if (round_->stream && !moving) return;

  std::map<int32_t, transport::Digest> here;
  std::map<int32_t, transport::Digest> manifest;
  std::vector<std::shared_ptr<Landing>> landings;
  {
    absl::MutexLock lock(&mutex_);
    here = source_digests_;
    here.insert(passed_.begin(), passed_.end());
    for (const auto& landing : landings_) landings.push_back(landing.second);
    manifest = manifest_;
  }
  for (const auto& landing : landings) {
    here[static_cast<int32_t>(landing->bucket_id())] = landing->bucket_digest();
  }
  absl::Status status;
  for (const auto& bucket : here) {
    auto said = manifest.find(bucket.first);
    if (said == manifest.end()) {
      status = MakeError(absl::StatusCode::kDataLoss, "MANIFEST_MISMATCH",
                         absl::StrCat("the manifest of update ", update_id_,
                                      " has no bucket ", bucket.first));
    } else if (!(bucket.second == said->second)) {
      status = MakeError(
          absl::StatusCode::kDataLoss, "MANIFEST_MISMATCH",
          absl::StrCat("bucket ", bucket.first, " of update ", update_id_,
                       " has digest ", bucket.second.ToString(), " on node ",
                       context_.node, " and ", said->second.ToString(),
                       " in the manifest"));
    }
  }
  if (!status.ok()) {
    round_->unfit = true;
    ReportFailure(status);
    return;
  }
  if (round_->fetch && !receives_) {
    // What it has was whole before, and what it has not another run may be
    // receiving.
    round_->verified = true;
    whole_.store(true, std::memory_order_release);
    return;
  }
  absl::Status marked = context_.store->MarkWhole(update_id_, &here);
  // A STREAM may have nothing in the store.
  if (!marked.ok() && !(absl::IsNotFound(marked) && landings.empty())) {
    round_->unfit = true;
    ReportFailure(marked);
    return;
  }
  round_->verified = true;
  whole_.store(true, std::memory_order_release);
  ReportProgress(true);
  v1::NodeReport report;
  v1::UpdateVerified* verified = report.mutable_update_verified();
  verified->set_model(model());
  verified->set_update_id(update_id_);
  *verified->mutable_epoch() = round_->command.epoch();
  verified->set_received_bytes(std::max(int64_t{0}, progress_sent_));
  verified->set_repaired_frames(RepairedFrames());
  ReportOutcome(std::move(report));
}

void NodeUpdate::ReportOutcome(v1::NodeReport report) {
  round_->outcomes.push_back(report);
  context_.report(std::move(report));
}

void NodeUpdate::ReportProgress(bool last) {
  int64_t received = 0;
  int64_t needed = 0;
  {
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : received_) {
      auto count = counts_.find(bucket);
      if (count == counts_.end()) {
        needed += layout_->bucket_bytes(bucket);
        if (passed_.count(bucket) > 0) {
          received += layout_->bucket_bytes(bucket);
        }
        continue;
      }
      received += count->second->ready_bytes();
      needed += count->second->size();
    }
    // What did not have to travel.
    received -= from_base_bytes_;
    needed -= from_base_bytes_;
  }
  next_progress_ = absl::Now() + context_.report_interval;
  const bool news = received != progress_sent_;
  progress_sent_ = received;
  if (!news || (needed == 0 && !last)) return;
  v1::NodeReport report;
  v1::UpdateProgress* progress = report.mutable_update_progress();
  progress->set_model(model());
  progress->set_update_id(update_id_);
  progress->set_received_bytes(received);
  progress->set_needed_bytes(needed);
  progress->set_repaired_frames(RepairedFrames());
  context_.report(std::move(report));
}

void NodeUpdate::ReportFailure(const absl::Status& status) {
  const std::string edge = transport::EdgeOf(status).value_or("");
  // Both Wait and on_edge_failed tell of an edge.
  if (!round_->blamed.insert(edge.empty() ? transport::ReasonOf(status) : edge)
           .second) {
    return;
  }
  LOG(WARNING) << "Update " << update_id_ << " of " << model() << ": "
               << status;
  v1::NodeReport report;
  v1::UpdateVerified* verified = report.mutable_update_verified();
  verified->set_model(model());
  verified->set_update_id(update_id_);
  *verified->mutable_epoch() = round_->command.epoch();
  *verified->mutable_failure() = ToFailure(status);
  std::vector<std::string> ends = absl::StrSplit(edge, "->");
  if (ends.size() == 2) {
    verified->set_edge_from(ends[0]);
    verified->set_edge_to(ends[1]);
  }
  verified->set_repaired_frames(RepairedFrames());
  ReportOutcome(std::move(report));
}

int64_t NodeUpdate::RepairedFrames() const {
  int64_t repaired = repaired_before_;
  if (round_ == nullptr) return repaired;
  for (const auto& flow : round_->flows) {
    if (flow->group == nullptr) continue;
    for (const transport::PeerProgress& peer : flow->group->Progress().peers) {
      if (peer.upstream) repaired += peer.repaired_frames;
    }
  }
  return repaired;
}

// ---- The end ----

void NodeUpdate::Finish() {
  absl::Status why;
  bool committed = false;
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_) {
      // A dry run that nobody ended.
      ended_ = true;
      why_ = MakeError(absl::StatusCode::kAborted, "UPDATE_ENDED",
                       "a dry run has ended");
    }
    why = why_;
    committed = committed_;
  }
  if (committed && round_ != nullptr) {
    absl::MutexLock lock(&mutex_);
    Round* round = round_.get();
    auto at_rest = [this, round]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !round->move ||
             std::all_of(round->flows.begin(), round->flows.end(),
                         [](const std::unique_ptr<FlowRun>& flow) {
                           return flow->done;
                         });
    };
    mutex_.AwaitWithTimeout(absl::Condition(&at_rest), kLeaveTogether);
  }
  if (!committed && context_.sink != nullptr) {
    bool streams = false;
    {
      absl::MutexLock lock(&mutex_);
      streams = stream_ != nullptr;
    }
    // First: lanes wait for workers.
    if (streams) context_.sink->Abort(update_id_);
  }
  CloseRound(why);
  if (!committed && context_.sink != nullptr) {
    // And again: a lane may have been about to begin.
    absl::MutexLock lock(&mutex_);
    if (stream_ != nullptr) context_.sink->Abort(update_id_);
  }
  // It looks whether this has ended before every bucket.
  if (placer_.joinable()) placer_.join();

  std::map<int32_t, std::unique_ptr<FrameCount>> counts;
  std::vector<StorePin> pins;
  {
    absl::MutexLock lock(&mutex_);
    // They look at cancel_ before every bucket.
    auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return snapshots_ == 0;
    };
    mutex_.Await(absl::Condition(&idle));
    counts.swap(counts_);
    pins.swap(pins_);
  }
  for (const auto& count : counts) count.second->Stop();
  counts.clear();
  {
    absl::MutexLock lock(&mutex_);
    landings_.clear();
    staged_.clear();
    sources_.clear();
    if (stream_ != nullptr && committed) context_.sink->Close(update_id_);
  }
  if (fetch_) {
    if (receives_ && whole()) {
      absl::Status status = context_.store->Adopt(update_id_);
      LOG_IF(ERROR, !status.ok() && !absl::IsNotFound(status))
          << "Update " << update_id_ << " of " << model()
          << " was fetched, but is not kept: " << status;
    } else if (receives_) {
      context_.store->DropIncoming(update_id_);
    }
    pins.clear();
    SetFinished();
    return;
  }
  bool keep = committed;
  if (keep) {
    absl::Status status = context_.store->Commit(update_id_);
    if (absl::IsNotFound(status)) {
      // A STREAM that left nothing here.
      keep = false;
    } else if (!status.ok()) {
      LOG(ERROR) << "Update " << update_id_ << " of " << model()
                 << " was committed, but is not kept here: " << status;
      keep = false;
    }
  }
  if (!keep) context_.store->Drop(update_id_);
  pins.clear();
  if (keep) {
    const int64_t freed = context_.store->ShareEqual(update_id_);
    LOG_IF(INFO, freed > 0)
        << "Update " << update_id_ << " of " << model() << " shares " << freed
        << " bytes with the one before";
  }
  SetFinished();
}

}  // namespace daemon
}  // namespace weightsync
