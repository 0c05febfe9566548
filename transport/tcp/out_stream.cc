#include "transport/tcp/out_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

// Frames of one system call: enough that calls cost little, few enough that the
// streams end together.
constexpr size_t kBatchFrames = 8;
// What comes back is looked at this often while the socket takes everything.
constexpr int64_t kReadEveryNanos = 5000000;
constexpr absl::Duration kLeaveLimit = absl::Seconds(1);

}  // namespace

OutStream::OutStream(Outbound* hop, Fd fd, bool talks)
    : hop_(hop), talks_(talks), fd_(std::move(fd)), reader_(fd_.get(), this) {
  headers_.resize(kBatchFrames * kHeaderBytes);
  damaged_.reserve(kBatchFrames);
}

OutStream::~OutStream() { Join(); }

void OutStream::Start() {
  thread_ = std::thread([this] { Run(); });
}

void OutStream::Join() {
  if (thread_.joinable()) thread_.join();
}

void OutStream::Run() {
  last_sent_ = last_heard_ = last_read_ = NowNanos();
  absl::Status status = Loop();
  if (!status.ok() && hop_->stop_mode() == StopMode::kRun) {
    // A peer that gives up says why before it closes; sending fails first.
    bool heard = false;
    const absl::Status last = ReadAll(&heard);
    if (!ReasonOf(last).empty() && ReasonOf(status).empty()) status = last;
    hop_->Fail(BlameEdge(hop_->options(), status));
  }
  if (silent_) {
    fd_.reset();
    return;
  }
  if (hop_->stop_mode() == StopMode::kLeave || peer_left_) {
    if (batch_empty()) SendNow(fd_.get(), EncodeMessage(MessageType::kBye, ""));
    CloseGently(fd_.get(), peer_left_ ? absl::ZeroDuration() : kLeaveLimit);
  } else if (batch_empty()) {
    SendNow(fd_.get(),
            EncodeMessage(MessageType::kFail, EncodeStatus(hop_->stop_why())));
  }
  fd_.reset();
}

absl::Status OutStream::Loop() {
  const int64_t deadline =
      absl::ToInt64Nanoseconds(hop_->options().peer_deadline);
  while (hop_->stop_mode() == StopMode::kRun) {
    int64_t now = NowNanos();
    if (batch_empty() && !silent_) {
      if (absl::Status status = FillBatch(now); !status.ok()) return status;
    }
    const bool idle = batch_empty() || silent_;
    bool blocked = false;
    if (!idle) {
      if (absl::Status status = SendBatch(&blocked); !status.ok())
        return status;
      if (!blocked && now - last_read_ < kReadEveryNanos) continue;
    }
    if (blocked || idle) Poll(blocked, now);
    now = NowNanos();
    last_read_ = now;
    bool heard = false;
    if (!silent_) {
      if (absl::Status status = ReadAll(&heard); !status.ok()) return status;
    }
    if (peer_left_) {
      hop_->PeerLeft(talks_);
      return absl::OkStatus();
    }
    if (heard) {
      last_heard_ = now;
      hop_->Heard(now);
    } else if (now - last_heard_ > deadline) {
      return PeerSilent(hop_->options(), hop_->options().to, now - last_heard_);
    }
  }
  return absl::OkStatus();
}

absl::Status OutStream::FillBatch(int64_t now) {
  parts_.clear();
  next_part_ = 0;
  batch_frames_ = 0;
  control_.clear();
  damaged_.clear();
  while (!delayed_.empty() && delayed_.front().due <= now &&
         batch_frames_ < kBatchFrames) {
    const Outbound::FrameRef ref = delayed_.front().ref;
    delayed_.pop_front();
    if (absl::Status status = AddFrame(ref, work_.move, /*now=*/0);
        !status.ok())
      return status;
  }
  if (delayed_.size() < kBatchFrames) {
    hop_->Take(this, kBatchFrames - batch_frames_, &work_);
  } else {
    work_.frames.clear();
  }
  for (const Outbound::FrameRef& ref : work_.frames) {
    if (absl::Status status = AddFrame(ref, work_.move, now); !status.ok())
      return status;
    if (silent_) return absl::OkStatus();
  }
  if (work_.give_up && !said_give_up_ && batch_empty() && delayed_.empty()) {
    said_give_up_ = true;
    control_ =
        EncodeMessage(MessageType::kGiveUp, EncodeStatus(work_.give_up_why));
    AddBytes(control_.data(), control_.size());
    hop_->GaveUp(work_.give_up_why);
  }
  if (batch_empty() &&
      now - last_sent_ >= absl::ToInt64Nanoseconds(hop_->options().heartbeat)) {
    control_ = EncodeMessage(MessageType::kHeartbeat, "");
    AddBytes(control_.data(), control_.size());
  }
  return absl::OkStatus();
}

absl::Status OutStream::AddFrame(const Outbound::FrameRef& ref, uint64_t move,
                                 int64_t now) {
  const HopOptions& options = hop_->options();
  const absl::Span<const char> payload = ref.landing->frame(ref.frame);
  FrameFault fault;
  // now == 0: a frame that was held back goes without being asked for again.
  if (options.faults != nullptr && now != 0) {
    fault = options.faults->OnSend(options.from, options.to,
                                   ref.landing->bucket_id(), ref.frame);
    if (fault.kind == FrameFault::Kind::kDrop)
      return absl::UnavailableError("dropped by a fault rule");
    if (fault.kind == FrameFault::Kind::kSilence) {
      silent_ = true;
      return absl::OkStatus();
    }
    if (fault.delay > absl::ZeroDuration()) {
      // One after the other: a slow peer, not a late burst.
      const int64_t from = delayed_.empty() ? now : delayed_.back().due;
      delayed_.push_back({from + absl::ToInt64Nanoseconds(fault.delay), ref});
      return absl::OkStatus();
    }
  }
  Header header;
  header.type = MessageType::kData;
  header.move = move;
  header.bucket = ref.landing->bucket_id();
  header.frame = ref.frame;
  header.length = static_cast<uint32_t>(payload.size());
  header.digest = ref.landing->frame_digest(ref.frame);
  char* const header_bytes = headers_.data() + batch_frames_ * kHeaderBytes;
  EncodeHeader(header, header_bytes);
  ++batch_frames_;
  if (fault.kind == FrameFault::Kind::kDamageHeader)
    header_bytes[kHeaderBytes / 2] ^= 1;
  AddBytes(header_bytes, kHeaderBytes);
  if (fault.kind == FrameFault::Kind::kDamagePayload) {
    damaged_.emplace_back(payload.data(), payload.size());
    damaged_.back()[payload.size() / 2] ^= 1;
    AddBytes(damaged_.back().data(), payload.size());
  } else {
    AddBytes(payload.data(), payload.size());
  }
  return absl::OkStatus();
}

void OutStream::AddBytes(const void* data, size_t bytes) {
  parts_.push_back({const_cast<void*>(data), bytes});
}

absl::Status OutStream::SendBatch(bool* blocked) {
  msghdr message{};
  message.msg_iov = &parts_[next_part_];
  message.msg_iovlen = parts_.size() - next_part_;
  const ssize_t n = sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EINTR) return absl::OkStatus();
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      *blocked = true;
      return absl::OkStatus();
    }
    return ErrnoError("sending", errno);
  }
  last_sent_ = NowNanos();
  size_t left = static_cast<size_t>(n);
  while (left > 0) {
    iovec& part = parts_[next_part_];
    if (left < part.iov_len) {
      part.iov_base = static_cast<char*>(part.iov_base) + left;
      part.iov_len -= left;
      *blocked = true;
      break;
    }
    left -= part.iov_len;
    ++next_part_;
  }
  // Heartbeats are no progress.
  if (batch_frames_ > 0) hop_->Sent(n, batch_empty() ? batch_frames_ : 0);
  return absl::OkStatus();
}

absl::Status OutStream::ReadAll(bool* heard) {
  while (true) {
    absl::StatusOr<int64_t> n = reader_.ReadSome();
    if (!n.ok()) return n.status();
    if (*n == 0 || peer_left_) return absl::OkStatus();
    *heard = true;
  }
}

void OutStream::Poll(bool blocked, int64_t now) {
  pollfd waits[2] = {
      {fd_.get(), static_cast<int16_t>(POLLIN | (blocked ? POLLOUT : 0)), 0},
      {wake_.fd(), POLLIN, 0}};
  // Silent: as if the peer were gone.
  if (silent_) waits[0].fd = -1;
  const HopOptions& options = hop_->options();
  int64_t until = now + absl::ToInt64Nanoseconds(std::min(
                            options.heartbeat, options.peer_deadline)) /
                            4;
  if (!delayed_.empty()) until = std::min(until, delayed_.front().due);
  const int64_t millis = std::max<int64_t>(0, (until - now + 999999) / 1000000);
  poll(waits, 2, static_cast<int>(millis));
  if (waits[1].revents != 0) wake_.Drain();
}

absl::StatusOr<char*> OutStream::OnDataHeader(const Header&) {
  return absl::DataLossError("payload came in the wrong direction");
}

absl::Status OutStream::OnData(const Header&) { return absl::OkStatus(); }

absl::Status OutStream::OnMessage(const Header& header,
                                  absl::string_view payload) {
  if (header.type == MessageType::kBye) {
    peer_left_ = true;
    return absl::OkStatus();
  }
  return hop_->OnMessage(header, payload);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
