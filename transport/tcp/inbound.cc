#include "transport/tcp/inbound.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"
#include "transport/tcp/in_stream.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr uint32_t kMaxStreams = 16;

}  // namespace

Inbound::Inbound(HopOptions options, Observer* observer)
    : options_(std::move(options)), observer_(observer) {}

Inbound::~Inbound() {
  Stop(StopMode::kAbort, absl::CancelledError("the group was destroyed"));
}

absl::Status Inbound::Check(uint32_t stream, uint32_t stream_count) {
  absl::MutexLock lock(&mutex_);
  if (stop_mode() != StopMode::kRun) {
    return MakeError(absl::StatusCode::kAborted, "PEER_ABORTED",
                     absl::StrCat(options_.to, " has left the group"));
  }
  if (stream_count == 0 || stream_count > kMaxStreams ||
      stream >= stream_count ||
      (!streams_.empty() && streams_.size() != stream_count)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "NOT_A_PEER",
        absl::StrCat("stream ", stream, " of ", stream_count, " does not fit"));
  }
  if (!streams_.empty() && streams_[stream] != nullptr) {
    return MakeError(absl::StatusCode::kAlreadyExists, "STREAM_TAKEN",
                     absl::StrCat("stream ", stream, " is connected already"));
  }
  return absl::OkStatus();
}

void Inbound::AddStream(Fd fd, uint32_t stream, uint32_t stream_count) {
  bool all;
  {
    absl::MutexLock lock(&mutex_);
    if (stop_mode() != StopMode::kRun) return;
    heard_nanos_ = NowNanos();
    if (streams_.empty()) streams_.resize(stream_count);
    streams_[stream] =
        std::make_unique<InStream>(this, std::move(fd), /*talks=*/stream == 0);
    ++running_;
    streams_[stream]->Start();
    all = std::all_of(streams_.begin(), streams_.end(),
                      [](const auto& s) { return s != nullptr; });
  }
  if (all) observer_->OnAllStreams();
}

bool Inbound::has_all_streams() const {
  absl::MutexLock lock(&mutex_);
  return !streams_.empty() &&
         std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& s) { return s != nullptr; });
}

void Inbound::StartMove(uint64_t move,
                        std::vector<std::shared_ptr<Landing>> landings) {
  std::vector<HaveEntry> have;
  size_t incomplete = 0;
  for (const auto& landing : landings) {
    HaveEntry entry;
    entry.bucket = landing->bucket_id();
    entry.size = static_cast<uint64_t>(landing->size());
    entry.bitmap = landing->ReadyBitmap();
    have.push_back(std::move(entry));
    if (!landing->complete()) ++incomplete;
  }
  bool left;
  {
    absl::MutexLock lock(&mutex_);
    move_ = move;
    landings_.clear();
    for (auto& landing : landings) {
      const uint64_t id = landing->bucket_id();
      landings_[id] = std::move(landing);
    }
    incomplete_ = incomplete;
    damaged_.clear();
    left = left_;
  }
  Header header;
  header.type = MessageType::kHave;
  header.move = move;
  Send(EncodeMessage(header, EncodeHave(have)));
  if (incomplete == 0) {
    header.type = MessageType::kComplete;
    Send(EncodeMessage(header, ""));
    observer_->OnFilled(move);
  } else if (left) {
    PeerLeft();
  }
}

void Inbound::SendChain(uint64_t move, const absl::Status& status) {
  Header header;
  header.type = MessageType::kChain;
  header.move = move;
  Send(EncodeMessage(header, EncodeStatus(status)));
}

void Inbound::Send(std::string message) {
  absl::MutexLock lock(&mutex_);
  messages_ += message;
  has_messages_.store(true, std::memory_order_release);
  if (!streams_.empty() && streams_[0] != nullptr) streams_[0]->Wake();
}

std::string Inbound::TakeMessages() {
  absl::MutexLock lock(&mutex_);
  has_messages_.store(false, std::memory_order_release);
  return std::exchange(messages_, std::string());
}

void Inbound::Stop(StopMode mode, const absl::Status& why) {
  absl::MutexLock stop_lock(&stop_mutex_);
  std::vector<InStream*> streams;
  {
    absl::MutexLock lock(&mutex_);
    if (stop_mode_.load() == StopMode::kRun) {
      stop_why_ = why;
      stop_mode_.store(mode, std::memory_order_release);
    }
    for (const auto& stream : streams_) {
      if (stream != nullptr) streams.push_back(stream.get());
    }
  }
  for (InStream* stream : streams) stream->Wake();
  for (InStream* stream : streams) stream->Join();
}

PeerProgress Inbound::Progress() const {
  PeerProgress progress;
  progress.node = options_.from;
  progress.upstream = true;
  progress.bytes = bytes_.load(std::memory_order_relaxed);
  progress.frames = frames_.load(std::memory_order_relaxed);
  progress.silence = absl::Nanoseconds(
      NowNanos() - heard_nanos_.load(std::memory_order_relaxed));
  absl::MutexLock lock(&mutex_);
  progress.repaired_frames = repaired_;
  progress.bytes_per_second = rate_.bytes_per_second();
  progress.status = failure_;
  return progress;
}

absl::Status Inbound::stop_why() const {
  absl::MutexLock lock(&mutex_);
  return failure_.ok() ? stop_why_ : failure_;
}

absl::StatusOr<std::shared_ptr<Landing>> Inbound::Find(
    uint64_t move, const FrameHeader& frame) {
  absl::MutexLock lock(&mutex_);
  if (move < move_) return std::shared_ptr<Landing>();
  const auto found = landings_.find(frame.bucket);
  if (move > move_ || found == landings_.end()) {
    return absl::DataLossError(absl::StrCat("a frame of bucket ", frame.bucket,
                                            " came that nobody asked for"));
  }
  const Landing& landing = *found->second;
  if (frame.frame >= landing.frame_count() ||
      frame.length != landing.frame(frame.frame).size()) {
    return absl::DataLossError(
        absl::StrCat("frame ", frame.frame, " of bucket ", frame.bucket,
                     " does not fit: ", frame.length, " bytes"));
  }
  return found->second;
}

void Inbound::Completed(uint64_t move) {
  {
    absl::MutexLock lock(&mutex_);
    if (move != move_ || --incomplete_ > 0) return;
  }
  Header header;
  header.type = MessageType::kComplete;
  header.move = move;
  Send(EncodeMessage(header, ""));
  observer_->OnFilled(move);
}

absl::Status Inbound::Damaged(const FrameHeader& frame) {
  absl::MutexLock lock(&mutex_);
  const int times = ++damaged_[{frame.bucket, frame.frame}];
  if (times >= options_.max_damaged) {
    return EdgeError(
        absl::StatusCode::kDataLoss, "EDGE_DAMAGED", options_.from, options_.to,
        absl::StrCat("bucket ", frame.bucket, " frame ", frame.frame,
                     " arrived damaged ", times, " times"));
  }
  ++repaired_;
  LOG(WARNING) << "edge " << options_.from << "->" << options_.to << ": bucket "
               << frame.bucket << " frame " << frame.frame
               << " arrived damaged, time " << times;
  return absl::OkStatus();
}

void Inbound::Received(int64_t bytes, int64_t frames) {
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  frames_.fetch_add(frames, std::memory_order_relaxed);
  observer_->OnReceivedSome();
}

absl::Status Inbound::OnMessage(const Header& header,
                                absl::string_view payload) {
  switch (header.type) {
    case MessageType::kHeartbeat:
      return absl::OkStatus();
    case MessageType::kGiveUp: {
      absl::Status why;
      if (!DecodeStatus(payload, &why) || why.ok())
        return absl::DataLossError("a GIVE_UP message cannot be read");
      {
        absl::MutexLock lock(&mutex_);
        if (++gave_up_streams_ < streams_.size()) return absl::OkStatus();
      }
      observer_->OnInboundFailed(why, /*own_edge=*/false);
      return absl::OkStatus();
    }
    case MessageType::kFail: {
      absl::Status told;
      if (!DecodeStatus(payload, &told))
        return absl::DataLossError("a FAIL message cannot be read");
      return PeerFailure(options_, options_.from, told);
    }
    case MessageType::kFrames:
    case MessageType::kHave:
    case MessageType::kNak:
    case MessageType::kComplete:
    case MessageType::kChain:
    case MessageType::kBye:
    case MessageType::kPayloadOffer:
    case MessageType::kPayloadAnswer:
    case MessageType::kPayloadReady:
      break;
  }
  return absl::DataLossError("a message came in the wrong direction");
}

void Inbound::PeerLeft() {
  bool early;
  {
    absl::MutexLock lock(&mutex_);
    left_ = true;
    early = incomplete_ > 0;
  }
  if (early) {
    Fail(EdgeError(
        absl::StatusCode::kUnavailable, "EDGE_LOST", options_.from, options_.to,
        absl::StrCat(options_.from, " left before everything was here")));
  }
}

void Inbound::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok() || stop_mode_.load() != StopMode::kRun) return;
    failure_ = status;
    stop_mode_.store(StopMode::kAbort, std::memory_order_release);
    for (const auto& stream : streams_) {
      if (stream != nullptr) stream->Wake();
    }
  }
  MaybeReportFailure();
}

void Inbound::StreamEnded() {
  {
    absl::MutexLock lock(&mutex_);
    --running_;
  }
  MaybeReportFailure();
}

void Inbound::MaybeReportFailure() {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok() || failure_told_ || running_ > 0) return;
    failure_told_ = true;
    status = failure_;
  }
  observer_->OnInboundFailed(status, /*own_edge=*/true);
}

void Inbound::Heard(int64_t now, bool moves) {
  heard_nanos_.store(now, std::memory_order_relaxed);
  if (moves) observer_->OnReceivedSome();
  absl::MutexLock lock(&mutex_);
  rate_.Update(now, bytes_.load(std::memory_order_relaxed));
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
