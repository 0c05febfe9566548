#include "transport/tcp/outbound.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"
#include "transport/tcp/out_stream.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Hears of one landing's frames for one move.
class Outbound::Tap final : public Landing::Watcher {
 public:
  Tap(Outbound* hop, uint64_t move, size_t index)
      : hop_(hop), move_(move), index_(index) {}

  void OnFramesReady(absl::Span<const uint32_t> frames) override {
    hop_->FramesReady(move_, index_, frames);
  }
  void OnFailed(const absl::Status& status) override { hop_->GiveUp(status); }

 private:
  Outbound* const hop_;
  const uint64_t move_;
  const size_t index_;
};

Outbound::Outbound(HopOptions options, Observer* observer)
    : options_(std::move(options)), observer_(observer) {}

Outbound::~Outbound() {
  Stop(StopMode::kAbort, absl::CancelledError("the group was destroyed"));
}

void Outbound::Start(std::vector<Fd> streams) {
  heard_nanos_ = NowNanos();
  absl::MutexLock stop_lock(&stop_mutex_);
  for (Fd& fd : streams)
    streams_.push_back(std::make_unique<OutStream>(this, std::move(fd),
                                                   /*talks=*/streams_.empty()));
  for (const auto& stream : streams_) stream->Start();
}

void Outbound::StartMove(uint64_t move,
                         std::vector<std::shared_ptr<Landing>> landings) {
  RemoveTaps();
  PeerMove peer;
  bool left = false;
  {
    absl::MutexLock lock(&mutex_);
    move_ = move;
    landings_ = std::move(landings);
    peer_have_.assign(landings_.size(), {});
    queue_.clear();
    repairs_.clear();
    left = left_;
    if (peer_.number == move) peer = peer_;
    begun_ = peer.have.has_value();
  }
  if (peer.have) Begin(move, *peer.have);
  if (peer.complete) observer_->OnPeerComplete(move);
  if (peer.chain) observer_->OnPeerChain(move, *peer.chain);
  if (left) PeerLeft(/*talks=*/true);
}

void Outbound::Begin(uint64_t move, const std::vector<HaveEntry>& have) {
  std::vector<size_t> wanted;
  std::vector<std::shared_ptr<Landing>> landings;
  absl::Status mismatch;
  {
    absl::MutexLock lock(&mutex_);
    if (move != move_) return;
    landings = landings_;
    std::map<uint64_t, size_t> index;
    for (size_t i = 0; i < landings.size(); ++i)
      index[landings[i]->bucket_id()] = i;
    for (const HaveEntry& entry : have) {
      const auto found = index.find(entry.bucket);
      const bool fits =
          found != index.end() &&
          static_cast<uint64_t>(landings[found->second]->size()) == entry.size;
      const size_t bitmap =
          fits ? (landings[found->second]->frame_count() + 7) / 8 : 0;
      if (!fits || (!entry.bitmap.empty() && entry.bitmap.size() != bitmap)) {
        mismatch = EdgeError(
            absl::StatusCode::kFailedPrecondition, "MOVE_MISMATCH",
            options_.from, options_.to,
            absl::StrCat(options_.to, " wants bucket ", entry.bucket, " of ",
                         entry.size, " bytes, ", options_.from,
                         fits || found != index.end() ? " has another size"
                                                      : " does not move it"));
        break;
      }
      peer_have_[found->second] = entry.bitmap;
      wanted.push_back(found->second);
    }
  }
  if (!mismatch.ok()) {
    Fail(mismatch);
    return;
  }
  absl::MutexLock lock(&taps_mutex_);
  if (taps_closed_) return;
  for (const size_t i : wanted) {
    taps_.emplace_back(landings[i], std::make_unique<Tap>(this, move, i));
    landings[i]->AddWatcher(taps_.back().second.get());
  }
}

void Outbound::FramesReady(uint64_t move, size_t index,
                           absl::Span<const uint32_t> frames) {
  absl::MutexLock lock(&mutex_);
  if (move != move_ || !failure_.ok()) return;
  const std::vector<uint8_t>& have = peer_have_[index];
  Landing* const landing = landings_[index].get();
  size_t added = 0;
  for (const uint32_t frame : frames) {
    if (!have.empty() && ((have[frame / 8] >> (frame % 8)) & 1) != 0) continue;
    queue_.push_back({landing, frame});
    ++added;
  }
  WakeSleepersLocked(added);
}

void Outbound::WakeSleepersLocked(size_t wanted) {
  for (; wanted > 0 && !sleeping_.empty(); --wanted) {
    sleeping_.back()->Wake();
    sleeping_.pop_back();
  }
}

void Outbound::GiveUp(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (giving_up_) return;
  giving_up_ = true;
  give_up_why_ = why;
  WakeSleepersLocked(sleeping_.size());
}

void Outbound::Stop(StopMode mode, const absl::Status& why) {
  absl::MutexLock stop_lock(&stop_mutex_);
  {
    absl::MutexLock lock(&mutex_);
    if (stop_mode_.load() == StopMode::kRun) {
      stop_why_ = why;
      stop_mode_.store(mode, std::memory_order_release);
    }
  }
  for (const auto& stream : streams_) stream->Wake();
  for (const auto& stream : streams_) stream->Join();
  {
    absl::MutexLock lock(&taps_mutex_);
    taps_closed_ = true;
  }
  RemoveTaps();
}

void Outbound::RemoveTaps() {
  absl::MutexLock lock(&taps_mutex_);
  for (const auto& tap : taps_) tap.first->RemoveWatcher(tap.second.get());
  taps_.clear();
}

PeerProgress Outbound::Progress() const {
  PeerProgress progress;
  progress.node = options_.to;
  progress.upstream = false;
  progress.bytes = bytes_.load(std::memory_order_relaxed);
  progress.frames = frames_.load(std::memory_order_relaxed);
  progress.silence = absl::Nanoseconds(
      NowNanos() - heard_nanos_.load(std::memory_order_relaxed));
  absl::MutexLock lock(&mutex_);
  progress.repaired_frames = repaired_;
  progress.queued_frames =
      static_cast<int64_t>(queue_.size() + repairs_.size()) +
      taken_frames_.load(std::memory_order_relaxed);
  progress.bytes_per_second = rate_.bytes_per_second();
  progress.status = failure_;
  return progress;
}

absl::Status Outbound::stop_why() const {
  absl::MutexLock lock(&mutex_);
  return failure_.ok() ? stop_why_ : failure_;
}

void Outbound::Take(OutStream* stream, size_t limit, Work* work) {
  work->frames.clear();
  absl::MutexLock lock(&mutex_);
  sleeping_.erase(std::remove(sleeping_.begin(), sleeping_.end(), stream),
                  sleeping_.end());
  work->move = move_;
  while (!repairs_.empty() && work->frames.size() < limit) {
    work->frames.push_back(repairs_.front());
    repairs_.pop_front();
  }
  while (!queue_.empty() && work->frames.size() < limit) {
    work->frames.push_back(queue_.front());
    queue_.pop_front();
  }
  taken_frames_.fetch_add(static_cast<int64_t>(work->frames.size()),
                          std::memory_order_relaxed);
  work->give_up = giving_up_ && queue_.empty() && repairs_.empty();
  if (work->give_up) work->give_up_why = give_up_why_;
  if (work->frames.empty()) sleeping_.push_back(stream);
}

void Outbound::Sent(int64_t bytes, size_t frames) {
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  frames_.fetch_add(static_cast<int64_t>(frames), std::memory_order_relaxed);
  taken_frames_.fetch_sub(static_cast<int64_t>(frames),
                          std::memory_order_relaxed);
  observer_->OnSentSome();
}

void Outbound::GaveUp(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (++gave_up_streams_ < streams_.size()) return;
  }
  observer_->OnGaveUp(why);
}

void Outbound::PeerLeft(bool talks) {
  // Another stream may say BYE before the one that talks has said COMPLETE.
  if (!talks) return;
  bool early;
  {
    absl::MutexLock lock(&mutex_);
    left_ = true;
    early =
        move_ != 0 && !(peer_.number == move_ && peer_.complete && peer_.chain);
  }
  if (early) {
    Fail(EdgeError(
        absl::StatusCode::kUnavailable, "EDGE_LOST", options_.from, options_.to,
        absl::StrCat(options_.to, " left before it had everything")));
  }
}

void Outbound::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok() || stop_mode_.load() != StopMode::kRun) return;
    failure_ = status;
    queue_.clear();
    repairs_.clear();
    stop_mode_.store(StopMode::kAbort, std::memory_order_release);
  }
  for (const auto& stream : streams_) stream->Wake();
  observer_->OnOutboundFailed(status);
}

void Outbound::Heard(int64_t now) {
  heard_nanos_.store(now, std::memory_order_relaxed);
  absl::MutexLock lock(&mutex_);
  rate_.Update(now, bytes_.load(std::memory_order_relaxed));
}

Outbound::PeerMove* Outbound::NotePeer(const Header& header) {
  if (header.move < peer_.number) return nullptr;
  if (header.move > peer_.number) {
    peer_ = PeerMove();
    peer_.number = header.move;
  }
  return &peer_;
}

absl::Status Outbound::OnMessage(const Header& header,
                                 absl::string_view payload) {
  switch (header.type) {
    case MessageType::kHeartbeat:
      return absl::OkStatus();
    case MessageType::kHave: {
      absl::StatusOr<std::vector<HaveEntry>> have = DecodeHave(payload);
      if (!have.ok()) return have.status();
      {
        absl::MutexLock lock(&mutex_);
        PeerMove* const peer = NotePeer(header);
        if (peer == nullptr || peer->have) return absl::OkStatus();
        peer->have = *have;
        if (header.move != move_) return absl::OkStatus();
        begun_ = true;
      }
      Begin(header.move, *have);
      return absl::OkStatus();
    }
    case MessageType::kNak:
      return Repair(header);
    case MessageType::kComplete: {
      {
        absl::MutexLock lock(&mutex_);
        PeerMove* const peer = NotePeer(header);
        if (peer == nullptr) return absl::OkStatus();
        peer->complete = true;
        if (header.move != move_) return absl::OkStatus();
      }
      observer_->OnPeerComplete(header.move);
      return absl::OkStatus();
    }
    case MessageType::kChain: {
      absl::Status status;
      if (!DecodeStatus(payload, &status))
        return absl::DataLossError("a CHAIN message cannot be read");
      {
        absl::MutexLock lock(&mutex_);
        PeerMove* const peer = NotePeer(header);
        if (peer == nullptr) return absl::OkStatus();
        peer->chain = status;
        if (header.move != move_) return absl::OkStatus();
      }
      observer_->OnPeerChain(header.move, status);
      return absl::OkStatus();
    }
    case MessageType::kFail: {
      absl::Status told;
      if (!DecodeStatus(payload, &told))
        return absl::DataLossError("a FAIL message cannot be read");
      return PeerFailure(options_, options_.to, told);
    }
    case MessageType::kFrames:
    case MessageType::kGiveUp:
    case MessageType::kBye:
    case MessageType::kPayloadOffer:
    case MessageType::kPayloadAnswer:
    case MessageType::kPayloadReady:
      break;
  }
  return absl::DataLossError("a message came in the wrong direction");
}

absl::Status Outbound::Repair(const Header& header) {
  std::shared_ptr<Landing> landing;
  {
    absl::MutexLock lock(&mutex_);
    if (header.move != move_) return absl::OkStatus();
    for (const auto& candidate : landings_) {
      if (candidate->bucket_id() == header.bucket) landing = candidate;
    }
  }
  if (landing == nullptr || header.frame >= landing->frame_count() ||
      !landing->IsReady(header.frame)) {
    return absl::DataLossError(
        "the peer asks again for a frame that it was never sent");
  }
  // The blame is exact: either our own bytes changed after they were digested,
  // or the way damaged them.
  const absl::StatusOr<std::vector<Digest>> now =
      landing->ComputeDigests({header.frame});
  if (!now.ok()) return ChannelFailure(options_, now.status());
  if ((*now)[0] != landing->frame_digest(header.frame)) {
    return EdgeError(absl::StatusCode::kDataLoss, "HOLDER_DAMAGED",
                     options_.from, options_.to,
                     absl::StrCat("bucket ", header.bucket, " frame ",
                                  header.frame, " changed in ", options_.from,
                                  "'s own memory after it was digested"));
  }
  LOG(WARNING) << "edge " << options_.from << "->" << options_.to << ": bucket "
               << header.bucket << " frame " << header.frame
               << " arrived damaged and is sent again";
  absl::MutexLock lock(&mutex_);
  ++repaired_;
  repairs_.push_back({landing.get(), header.frame});
  WakeSleepersLocked(1);
  return absl::OkStatus();
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
