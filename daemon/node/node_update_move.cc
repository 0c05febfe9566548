// How the buckets of a round move: what is reserved, the groups, the lanes.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/convert.h"
#include "daemon/node/node_update.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::Landing;
using transport::MakeError;

constexpr int kDefaultLanes = 3;
// How long a receiver whose last update hardly changed waits for the word that
// this one does not either, before it asks for bytes.
constexpr absl::Duration kBaseWait = absl::Seconds(2);

absl::Status InvalidFlow(absl::string_view sentence) {
  return MakeError(absl::StatusCode::kInvalidArgument, "FLOW_INVALID",
                   sentence);
}

}  // namespace

absl::Status NodeUpdate::RoundClosed() const {
  return MakeError(absl::StatusCode::kAborted, "ROUND_CLOSED",
                   absl::StrCat("update ", update_id_, " goes another way"));
}

// ---- What a round needs ----

bool NodeUpdate::PacksIntoSlot(const Round& round, int self,
                               int32_t bucket) const {
  if (self != 0 || !round.in_place || round.fetch) return false;
  // What its own workers need for a STAGE lies in the store.
  return round.stream ||
         !std::binary_search(layout_->needed_buckets.begin(),
                             layout_->needed_buckets.end(), bucket);
}

bool NodeUpdate::PassesOn(const Round& round, int32_t bucket) const {
  // A fetch may serve workers that the layout does not know.
  return round.stream &&
         (round.fetch ||
          std::binary_search(layout_->needed_buckets.begin(),
                             layout_->needed_buckets.end(), bucket));
}

absl::Status NodeUpdate::FillRound(Round* round) {
  const v1::PrepareUpdate& command = round->command;
  round->stream = command.update_mode() == v1::UPDATE_MODE_STREAM;
  round->in_place = command.publish_mode() == v1::PUBLISH_MODE_IN_PLACE;
  round->fetch = command.fetch();
  round->disk = command.has_checkpoint();
  round->load = command.load();
  if (round->disk &&
      (round->stream || round->in_place || context_.checkpoints == nullptr)) {
    return MakeError(absl::StatusCode::kUnimplemented,
                     "UPDATE_MODE_UNIMPLEMENTED",
                     absl::StrCat("node ", context_.node,
                                  " takes nothing but STAGE and SNAPSHOT by "
                                  "way of a checkpoint"));
  }
  if (round->stream && context_.sink == nullptr) {
    return MakeError(absl::StatusCode::kUnimplemented,
                     "UPDATE_MODE_UNIMPLEMENTED",
                     absl::StrCat("node ", context_.node,
                                  " has nobody to pass a STREAM to"));
  }
  absl::Status status = FillStore(round);
  if (!status.ok()) return status;
  return FillFlows(round);
}

absl::Status NodeUpdate::FillStore(Round* round) {
  const v1::PrepareUpdate& command = round->command;
  std::set<int32_t> received;
  std::set<int32_t> held;
  for (const v1::Flow& flow : command.flows()) {
    int self = -1;
    for (int i = 0; i < flow.members_size(); ++i) {
      if (flow.members(i).node() == context_.node) self = i;
    }
    if (self < 0 || flow.members_size() < 2) {
      return InvalidFlow(absl::StrCat(
          "flow ", flow.flow_id(), " of ", flow.members_size(),
          " nodes was told to node ", context_.node, ", which is not in it"));
    }
    for (int32_t bucket : flow.buckets()) {
      if (bucket < 0 || bucket >= layout_->bucket_count()) {
        return InvalidFlow(absl::StrCat("flow ", flow.flow_id(),
                                        " moves bucket ", bucket, " of ",
                                        layout_->bucket_count()));
      }
      (self > 0 ? received : held).insert(bucket);
    }
  }
  if (round->disk) {
    const std::vector<int32_t> local = layout_->LocalSourceBuckets();
    std::set_difference(layout_->needed_buckets.begin(),
                        layout_->needed_buckets.end(), local.begin(),
                        local.end(), std::inserter(received, received.end()));
  }
  received_.insert(received.begin(), received.end());
  receives_ = receives_ || !received.empty();
  if (command.dry()) {
    if (round->stream) return absl::OkStatus();
    return context_.store->ReserveFor(model(), layout_->LocalBytes());
  }

  if (round->fetch && !held.empty()) {
    // It is there: nothing is reserved for it, and it stays.
    auto pin = context_.store->Pin(update_id_);
    if (!pin.ok()) return pin.status();
    {
      absl::MutexLock lock(&mutex_);
      pins_.push_back(*std::move(pin));
    }
    const std::vector<int32_t> buckets(held.begin(), held.end());
    auto rooms = context_.store->Rooms(update_id_, buckets);
    if (!rooms.ok()) return rooms.status();
    auto landings = Landings(buckets, Use::kSend);
    if (!landings.ok()) return landings.status();
  }

  // What lies in the store when this epoch is through.
  std::set<int32_t> buckets;
  const std::vector<int32_t> local = layout_->LocalSourceBuckets();
  if (round->fetch) {
    if (!round->stream) buckets = received;
  } else {
    if (!round->in_place) buckets.insert(local.begin(), local.end());
    std::set<int32_t> there = received;
    there.insert(local.begin(), local.end());
    {
      // A bucket that came in an earlier epoch needs no flow any more.
      absl::MutexLock lock(&mutex_);
      for (const auto& count : counts_) {
        if (count.second->complete()) there.insert(count.first);
      }
      there.insert(taken_.begin(), taken_.end());
    }
    for (int32_t bucket : layout_->needed_buckets) {
      if (there.count(bucket) == 0) {
        return InvalidFlow(absl::StrCat("no flow brings bucket ", bucket,
                                        " to node ", context_.node,
                                        ", whose workers need it"));
      }
      if (!round->stream) buckets.insert(bucket);
    }
    if (!round->stream) buckets.insert(received.begin(), received.end());
  }
  // What comes, and what is packed.
  std::vector<int32_t> packed, others;
  for (int32_t bucket : buckets) {
    const bool pack = !round->fetch && !round->disk &&
                      std::binary_search(local.begin(), local.end(), bucket);
    (pack ? packed : others).push_back(bucket);
  }
  if (!packed.empty()) {
    auto landings = Landings(packed, Use::kPack);
    if (!landings.ok()) return landings.status();
  }
  if (others.empty()) return absl::OkStatus();
  auto landings = Landings(others, Use::kReceive);
  if (!landings.ok()) return landings.status();
  return round->disk ? LandFromDisk(others) : absl::OkStatus();
}

absl::Status NodeUpdate::FillFlows(Round* round) {
  if (round->disk) {
    AddDiskFlow(round, received_);
    return absl::OkStatus();
  }
  std::set<int32_t> in_flows;
  for (const v1::Flow& flow : round->command.flows()) {
    int self = 0;
    while (flow.members(self).node() != context_.node) ++self;
    in_flows.insert(flow.buckets().begin(), flow.buckets().end());
    absl::Status status = AddFlow(round, flow, self);
    if (!status.ok()) return status;
  }
  if (!round->stream || round->command.dry()) return absl::OkStatus();
  // What workers of this node get from ranks of this node; and the thread that
  // tells them that it begins.
  auto run = std::make_unique<FlowRun>();
  run->lane = true;
  for (int32_t bucket : layout_->LocalSourceBuckets()) {
    if (round->fetch || !PassesOn(*round, bucket) ||
        in_flows.count(bucket) > 0) {
      continue;
    }
    run->buckets.push_back(bucket);
  }
  if (context_.placement == nullptr) {
    absl::Status taken = TakeLaneSlot(*round, run.get(), "");
    if (!taken.ok()) return taken;
  }
  round->flows.push_back(std::move(run));
  return absl::OkStatus();
}

absl::Status NodeUpdate::AddFlow(Round* round, const v1::Flow& flow, int self) {
  const v1::PrepareUpdate& command = round->command;
  const bool lanes = round->stream || (round->in_place && !round->fetch);
  const int count = !lanes ? 1
                           : std::max(1, std::min(command.stream_slots() > 0
                                                      ? command.stream_slots()
                                                      : kDefaultLanes,
                                                  flow.buckets_size()));
  for (int lane = 0; lane < count; ++lane) {
    auto run = std::make_unique<FlowRun>();
    run->flow = flow;
    run->self = self;
    run->lane = lanes;
    for (int i = lane; i < flow.buckets_size(); i += count)
      run->buckets.push_back(flow.buckets(i));
    if (lanes && !command.dry() && context_.placement == nullptr) {
      absl::Status taken = TakeLaneSlot(*round, run.get(), "");
      if (!taken.ok()) return taken;
    }
    // A member that splits it otherwise is not met at all.
    const std::string group_id =
        lanes ? absl::StrCat(update_id_, "/", flow.flow_id(), "/", lane, "of",
                             count)
              : absl::StrCat(update_id_, "/", flow.flow_id());
    absl::Status status = MakeGroup(command, run.get(), group_id);
    if (!status.ok()) return status;
    round->flows.push_back(std::move(run));
  }
  return absl::OkStatus();
}

absl::Status NodeUpdate::TakeLaneSlot(const Round& round, FlowRun* flow,
                                      const std::string& device) {
  std::vector<int32_t> through;
  int64_t most = 0;
  for (int32_t bucket : flow->buckets) {
    if (!PacksIntoSlot(round, flow->self, bucket) &&
        (flow->self == 0 || !round.stream)) {
      continue;
    }
    through.push_back(bucket);
    most = std::max(most, layout_->bucket_bytes(bucket));
  }
  if (most == 0) return absl::OkStatus();
  const std::string on = SlotDevice(round, *flow, through, device);
  auto slot = context_.store->TakeSlot(model(), most, on);
  if (!slot.ok() && !on.empty()) {
    LOG(INFO) << "a lane of update " << update_id_ << " of " << model()
              << " goes through host memory: " << slot.status();
    slot = context_.store->TakeSlot(model(), most);
  }
  if (!slot.ok()) return slot.status();
  flow->slot = *std::move(slot);
  return absl::OkStatus();
}

absl::Status NodeUpdate::MakeGroup(const v1::PrepareUpdate& command,
                                   FlowRun* run, const std::string& group_id) {
  transport::GroupSpec spec;
  spec.cluster_id = context_.cluster_id;
  spec.group_id = group_id;
  spec.epoch = FromProto(command.epoch());
  spec.secret = command.group_secret();
  spec.self = run->self;
  for (const v1::FlowMember& member : run->flow.members()) {
    transport::GroupMember m;
    m.node = member.node();
    m.address = member.data_address();
    spec.members.push_back(std::move(m));
  }
  transport::GroupOptions options;
  options.peer_deadline = context_.peer_deadline;
  options.on_edge_failed = [this](const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    edge_failures_.push_back(status);
    woken_ = true;
  };
  auto group = context_.groups->NewGroup(std::move(spec), std::move(options));
  if (!group.ok()) return group.status();
  run->group = *std::move(group);
  return absl::OkStatus();
}

// ---- The thread of a flow ----

void NodeUpdate::RunFlow(Round* round, FlowRun* flow) {
  const absl::Duration timeout =
      DurationOr(round->command.has_timeout(), round->command.timeout(),
                 context_.prepare_timeout);
  const absl::Time deadline = absl::Now() + timeout;
  absl::Status status;
  if (flow->group != nullptr) status = flow->group->Join(timeout);
  if (flow->disk) {
    status = context_.checkpoints->See(round->command.checkpoint());
  } else if (status.ok() && !round->command.dry()) {
    // An edge that fails meanwhile is blamed when it is to move: then another
    // route is found.
    absl::StatusOr<std::string> device = std::string();
    if (flow->group != nullptr && context_.placement != nullptr)
      device = flow->group->PayloadDevice(deadline - absl::Now());
    status = Land(*round, flow, device.ok() ? *device : "");
    if (!status.ok() && !device.ok()) status = device.status();
  }
  absl::Duration patience;
  {
    absl::MutexLock lock(&mutex_);
    flow->joined = status.ok();
    flow->done = !status.ok();
    flow->status = status;
    woken_ = true;
    if (!status.ok()) return;
    auto called = [this, round]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return round->move || round->closed;
    };
    mutex_.Await(absl::Condition(&called));
    if (round->closed) return;
    patience = round->progress_timeout;
  }
  status = flow->disk   ? MoveFromDisk(round, flow)
           : flow->lane ? MoveLane(round, flow, patience)
                        : MoveWhole(round, flow, patience);
  absl::MutexLock lock(&mutex_);
  flow->done = true;
  flow->status = status;
  woken_ = true;
}

absl::Status NodeUpdate::MoveWhole(Round* round, FlowRun* flow,
                                   absl::Duration patience) {
  if (flow->self > 0 && !round->fetch) FillFromBase(*round, flow, patience);
  absl::Status status;
  for (const auto& landing : flow->landings) {
    // What it has already on a GPU, and is only to send on.
    const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
    if (flow->self == 0 || flow->staged.count(bucket) == 0) continue;
    status = FillStaged(bucket, landing.get(), patience);
    if (!status.ok()) return status;
  }
  status = flow->group->Move(flow->landings);
  if (!status.ok()) return status;
  if (round->fetch && flow->self == 0) {
    // Of a holder: digested as they are sent.
    for (const auto& landing : flow->landings) {
      if (cancel_.cancelled()) break;
      status = FillFromStore(landing.get());
      if (!status.ok()) {
        landing->Fail(status);
        flow->group->Abort(status);
        return status;
      }
    }
  } else if (flow->self == 0) {
    for (const auto& landing : flow->landings) {
      const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
      if (flow->staged.count(bucket) == 0) continue;
      status = FillStaged(bucket, landing.get(), patience);
      if (!status.ok()) {
        if (!landing->complete()) landing->Fail(status);
        flow->group->Abort(status);
        return status;
      }
    }
  }
  return AwaitChain(*round, flow, patience);
}

// A chain is as quick as its slowest link. Who has everything, and has sent it
// on, hears nothing until those behind it are through: they watch what they
// lack, the coordinator watches all, and a peer that is gone is noticed by its
// silence.
absl::Status NodeUpdate::AwaitChain(const Round& round, FlowRun* flow,
                                    absl::Duration patience) {
  while (true) {
    const absl::Status status = flow->group->Wait(patience);
    if (transport::ReasonOf(status) != "NO_PROGRESS") return status;
    const transport::GroupProgress progress = flow->group->Progress();
    bool waits = progress.ready_frames == progress.frame_count;
    for (const transport::PeerProgress& peer : progress.peers) {
      waits = waits && (peer.upstream || peer.queued_frames == 0);
    }
    if (!waits) return status;
    absl::MutexLock lock(&mutex_);
    if (round.closed || ended_) return status;
  }
}

absl::Status NodeUpdate::MoveLane(Round* round, FlowRun* flow,
                                  absl::Duration patience) {
  std::set<int32_t> direct;
  if (round->stream) {
    if (flow->group == nullptr) {
      absl::Status status = BeginStream(round, flow->buckets, patience);
      if (!status.ok()) return status;
    }
    auto begun = AwaitStream(patience);
    if (!begun.ok()) return begun.status();
    direct = *std::move(begun);
  }
  for (int32_t bucket : flow->buckets) {
    if (flow->group == nullptr && direct.count(bucket) > 0) continue;
    {
      absl::MutexLock lock(&mutex_);
      if (round->closed || ended_) return RoundClosed();
    }
    absl::Status status = MoveBucket(round, flow, bucket, patience);
    if (!status.ok()) return status;
  }
  if (flow->group != nullptr || direct.empty()) return absl::OkStatus();
  std::set<int32_t> unread;
  absl::Status status = TakeDirectReads(flow->buckets, patience, &unread);
  for (int32_t bucket : unread) {
    if (!status.ok()) break;
    status = MoveBucket(round, flow, bucket, patience);
  }
  return status;
}

absl::Status NodeUpdate::MoveBucket(Round* round, FlowRun* flow, int32_t bucket,
                                    absl::Duration patience) {
  const bool staged = flow->staged.count(bucket) > 0;
  std::shared_ptr<Landing> landing;
  {
    absl::MutexLock lock(&mutex_);
    auto found = landings_.find(bucket);
    if (found != landings_.end()) {
      landing = staged ? staged_.at(bucket) : found->second;
    }
  }
  const bool in_store = landing != nullptr;
  if (!in_store) {
    if (flow->slot == nullptr) {
      return MakeError(
          absl::StatusCode::kInternal, "SLOT_MISSING",
          absl::StrCat("bucket ", bucket, " of update ", update_id_,
                       " has no place on node ", context_.node));
    }
    BucketRoom room;
    room.bucket = bucket;
    room.data = flow->slot->data().subspan(
        0, static_cast<size_t>(layout_->bucket_bytes(bucket)));
    room.file = flow->slot->file();
    room.device = flow->slot->device();
    landing = NewLanding(room);
  }
  if (staged && flow->self > 0) {
    absl::Status status = FillStaged(bucket, landing.get(), patience);
    if (!status.ok()) return status;
  }
  if (flow->group != nullptr) {
    absl::Status status = flow->group->Move({landing});
    if (!status.ok()) return status;
  }
  if (flow->self == 0) {
    absl::Status status;
    if (round->fetch) {
      status = FillFromStore(landing.get());
    } else if (staged) {
      status = FillStaged(bucket, landing.get(), patience);
    } else if (!in_store) {
      status = FillFromSource(bucket, landing.get(), patience);
    }
    if (!status.ok()) {
      if (!landing->complete()) landing->Fail(status);
      if (flow->group != nullptr) flow->group->Abort(status);
      return status;
    }
  }
  absl::Status status = flow->group != nullptr
                            ? flow->group->Wait(patience)
                            : landing->WaitComplete(patience);
  if (!status.ok()) return status;

  if (PassesOn(*round, bucket)) {
    bool taken = false;
    {
      absl::MutexLock lock(&mutex_);
      taken = taken_.count(bucket) > 0;
    }
    if (!taken) {
      v1::SlotLocation where;
      if (in_store) {
        auto location = context_.store->LocationOf(update_id_, bucket);
        if (!location.ok()) return location.status();
        where = *std::move(location);
      } else {
        where = flow->slot->Location(layout_->bucket_bytes(bucket));
        if (flow->slot->lost()) {
          return MakeError(
              absl::StatusCode::kUnavailable, "DEVICE_STORE_LOST",
              absl::StrCat("bucket ", bucket, " of update ", update_id_,
                           " was in memory of a GPU of node ", context_.node,
                           " whose device agent has ended"));
        }
      }
      PassToWorkers(bucket, where);
    }
  }
  const transport::Digest digest = landing->bucket_digest();
  if (!in_store) flow->slot->Recycle();
  absl::MutexLock lock(&mutex_);
  passed_[bucket] = digest;
  if (PassesOn(*round, bucket)) taken_.insert(bucket);
  return absl::OkStatus();
}

// ---- Bytes that are here already ----

void NodeUpdate::FillFromBase(const Round& round, FlowRun* flow,
                              absl::Duration patience) {
  if (!context_.store->ExpectsEqual(*layout_)) return;
  std::map<int32_t, transport::Digest> manifest;
  {
    absl::MutexLock lock(&mutex_);
    auto told = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return has_manifest_ || ended_;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&told),
                            std::min(kBaseWait, patience / 4));
    manifest = manifest_;
  }
  for (const auto& landing : flow->landings) {
    // Updates share nothing on a GPU, so there is seldom anything to find for
    // it; and what travels between GPUs is as quick as what is read again.
    if (landing->on_device() || landing->ready_frames() > 0) continue;
    const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
    auto said = manifest.find(bucket);
    if (said == manifest.end()) continue;
    {
      // Whoever closes a round waits for this.
      absl::MutexLock lock(&mutex_);
      if (round.closed || ended_) return;
    }
    StorePin pin;
    const absl::Span<const char> base = context_.store->FindEqual(
        update_id_, *layout_, bucket, said->second, &pin);
    if (static_cast<int64_t>(base.size()) != landing->size()) continue;
    FillFrom(base, said->second, landing.get());
  }
}

void NodeUpdate::FillFrom(absl::Span<const char> base,
                          const transport::Digest& digest, Landing* landing) {
  std::vector<uint32_t> claimed;
  claimed.reserve(landing->frame_count());
  for (uint32_t frame = 0; frame < landing->frame_count(); ++frame) {
    if (landing->Claim(frame)) claimed.push_back(frame);
  }
  absl::Status status;
  transport::PackResult packed;
  // Otherwise somebody has begun to fill it.
  if (claimed.size() == landing->frame_count() && !claimed.empty()) {
    std::vector<transport::PackPiece> pieces;
    for (const schedule::Piece& piece :
         layout_->plan.pieces(static_cast<uint32_t>(landing->bucket_id()))) {
      if (piece.box.Volume() == 0) continue;
      transport::PackPiece read;
      read.offset = piece.offset;
      read.copy = ReadPiece(*layout_, piece, base.data());
      pieces.push_back(std::move(read));
    }
    transport::PackRequest request;
    request.bucket = landing->frame(0).data();
    request.bucket_bytes = landing->size();
    request.frame_bytes = Landing::kFrameBytes;
    request.pieces = pieces;
    status = context_.memory->Pack(request, &packed);
    if (status.ok() && packed.bucket == digest) {
      {
        // Before it is complete: what follows counts what has travelled.
        absl::MutexLock lock(&mutex_);
        from_base_bytes_ += landing->size();
      }
      for (uint32_t frame : claimed) {
        landing->MarkReady(frame, packed.frames[frame]);
      }
      return;
    }
    // Memory that was damaged is not handed on for ever: it travels again.
    LOG(WARNING) << "bucket " << landing->bucket_id() << " of update "
                 << update_id_
                 << " is not what an older update has, though its "
                 << "digest was the same, and comes from the trainers: "
                 << (status.ok() ? packed.bucket.ToString()
                                 : status.ToString());
  }
  for (uint32_t frame : claimed) landing->Unclaim(frame);
}

}  // namespace daemon
}  // namespace weightsync
