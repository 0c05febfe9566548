#include "transport/tcp/out_stream.h"

#include <poll.h>
#include <signal.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
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
// Of one payload channel: something kept that the peer has not kept, and
// something new.
constexpr int kMaxOffers = 4;

}  // namespace

OutStream::OutStream(Outbound* hop, Fd fd, bool talks)
    : hop_(hop), talks_(talks), fd_(std::move(fd)), reader_(fd_.get(), this) {
  damaged_.reserve(kMaxFrames);
}

OutStream::~OutStream() { Join(); }

void OutStream::Start() {
  thread_ = std::thread([this] { Run(); });
}

void OutStream::Join() {
  if (thread_.joinable()) thread_.join();
}

void OutStream::Run() {
  // sendfile has no MSG_NOSIGNAL.
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  last_sent_ = last_heard_ = last_read_ = NowNanos();
  absl::Status status =
      hop_->options().payload != nullptr ? ConnectChannel() : absl::OkStatus();
  if (status.ok() && hop_->stop_mode() == StopMode::kRun) {
    if (talks_) hop_->SendsOver(channel_ != nullptr);
    // The peer may wait to hear which way bytes come: its next word is the
    // first that it hears, when there is no channel.
    if (talks_ && channel_ == nullptr) last_sent_ = 0;
  }
  if (status.ok()) status = Loop();
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
  const bool leaves = hop_->stop_mode() == StopMode::kLeave || peer_left_;
  // Before the wait for the peer: the next edge between the two may be made.
  if (status.ok() && leaves && batch_empty() &&
      hop_->stop_mode() != StopMode::kAbort)
    FinishChannel();
  if (leaves) {
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

absl::Status OutStream::ReadUntil(const bool& done) {
  const int64_t deadline =
      absl::ToInt64Nanoseconds(hop_->options().peer_deadline);
  while (!done && hop_->stop_mode() == StopMode::kRun && !peer_left_) {
    bool heard = false;
    if (absl::Status status = ReadAll(&heard); !status.ok()) return status;
    const int64_t now = NowNanos();
    if (heard) {
      last_heard_ = now;
      hop_->Heard(now);
    } else if (now - last_heard_ > deadline) {
      return PeerSilent(hop_->options(), hop_->options().to, now - last_heard_);
    } else if (!done) {
      Poll(/*blocked=*/false, now);
    }
  }
  return absl::OkStatus();
}

absl::Status OutStream::SendAll(const std::string& message) {
  size_t done = 0;
  while (done < message.size() && hop_->stop_mode() == StopMode::kRun) {
    const ssize_t n = send(fd_.get(), message.data() + done,
                           message.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      Poll(/*blocked=*/true, NowNanos());
    } else if (errno != EINTR) {
      return ErrnoError("sending", errno);
    }
  }
  return absl::OkStatus();
}

absl::Status OutStream::WithoutChannel(const absl::Status& why) {
  if (!hop_->options().payload_optional)
    return ChannelFailure(hop_->options(), why);
  channel_ = nullptr;
  LOG(INFO) << hop_->options().from << "->" << hop_->options().to
            << ": bytes go over TCP: " << ReasonOf(why) << ": "
            << why.message();
  return absl::OkStatus();
}

absl::Status OutStream::ConnectChannel() {
  const HopOptions& options = hop_->options();
  absl::StatusOr<std::unique_ptr<PayloadChannel>> channel =
      options.payload(PayloadPeer(options, options.to));
  if (!channel.ok()) return WithoutChannel(channel.status());
  channel_ = *std::move(channel);
  bool agreed = false;
  for (int i = 0; !agreed; ++i) {
    if (i == kMaxOffers)
      return absl::DataLossError("the peer accepts no offer and refuses none");
    const absl::StatusOr<std::string> offer = channel_->Offer();
    if (!offer.ok()) return WithoutChannel(offer.status());
    answered_ = false;
    absl::Status status =
        SendAll(EncodeMessage(MessageType::kPayloadOffer, *offer));
    if (status.ok()) status = ReadUntil(answered_);
    if (!status.ok() || hop_->stop_mode() != StopMode::kRun || !answered_)
      return status;
    if (!answer_.ok()) return WithoutChannel(answer_);
    const absl::StatusOr<bool> heard = channel_->Answered(payload_answer_);
    if (!heard.ok()) return FromChannel(heard.status());
    agreed = *heard;
  }
  return FromChannel(channel_->Connect(hop_->options().peer_deadline,
                                       [this] { return Stopped(); }));
}

void OutStream::FinishChannel() {
  if (channel_ == nullptr) return;
  channel_->Finish();
  channel_ = nullptr;
}

bool OutStream::Stopped() const {
  return hop_->stop_mode() != StopMode::kRun || HungUp(fd_.get());
}

absl::Status OutStream::FromChannel(const absl::Status& status) {
  last_heard_ = NowNanos();
  if (status.ok()) return status;
  if (hop_->stop_mode() == StopMode::kRun && HungUp(fd_.get()))
    return absl::UnavailableError("the peer closed the connection");
  return ChannelFailure(hop_->options(), status);
}

absl::Status OutStream::SendOverChannel() {
  if (absl::Status status = ReadUntil(ready_); !status.ok()) return status;
  if (!ready_) return absl::OkStatus();  // it ends
  ready_ = false;
  const absl::Status status = FromChannel(channel_->Send(
      payload_, hop_->options().peer_deadline, [this] { return Stopped(); }));
  if (!status.ok()) return status;
  int64_t bytes = 0;
  for (const absl::Span<const char> part : payload_)
    bytes += static_cast<int64_t>(part.size());
  last_sent_ = last_heard_ = NowNanos();
  hop_->Sent(bytes, frames_.size());
  return absl::OkStatus();
}

absl::Status OutStream::FillBatch(int64_t now) {
  // The first part is for what comes before the frames.
  parts_.assign(1, Part());
  next_part_ = 1;
  frames_.clear();
  damaged_.clear();
  payload_.clear();
  damage_header_ = false;
  const size_t batch_frames = channel_ != nullptr ? kMaxFrames : kBatchFrames;
  while (!delayed_.empty() && delayed_.front().due <= now &&
         frames_.size() < batch_frames) {
    const Outbound::FrameRef ref = delayed_.front().ref;
    delayed_.pop_front();
    if (absl::Status status = AddFrame(ref, /*now=*/0); !status.ok()) {
      return status;
    }
  }
  if (delayed_.size() < kBatchFrames) {
    hop_->Take(this, batch_frames - frames_.size(), &work_);
  } else {
    work_.frames.clear();
  }
  for (const Outbound::FrameRef& ref : work_.frames) {
    if (absl::Status status = AddFrame(ref, now); !status.ok()) return status;
    if (silent_) return absl::OkStatus();
  }
  if (!frames_.empty()) {
    control_ = EncodeFrames(work_.move, frames_);
    if (damage_header_) control_[kHeaderBytes / 2] ^= 1;
  } else if (work_.give_up && !said_give_up_ && delayed_.empty()) {
    said_give_up_ = true;
    control_ =
        EncodeMessage(MessageType::kGiveUp, EncodeStatus(work_.give_up_why));
    hop_->GaveUp(work_.give_up_why);
  } else if (now - last_sent_ >=
             absl::ToInt64Nanoseconds(hop_->options().heartbeat)) {
    control_ = EncodeMessage(MessageType::kHeartbeat, "");
  } else {
    return absl::OkStatus();
  }
  parts_[0].data = control_.data();
  parts_[0].bytes = control_.size();
  next_part_ = 0;
  return absl::OkStatus();
}

absl::Status OutStream::AddFrame(const Outbound::FrameRef& ref, int64_t now) {
  const HopOptions& options = hop_->options();
  const absl::Span<const char> payload = ref.landing->frame(ref.frame);
  FrameFault fault;
  // now == 0: a frame that was held back goes without being asked for again.
  if (options.faults != nullptr && now != 0) {
    fault = options.faults->OnSend(options.from, options.to,
                                   ref.landing->bucket_id(), ref.frame);
    if (fault.kind == FrameFault::Kind::kDrop) {
      return absl::UnavailableError("dropped by a fault rule");
    }
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
  FrameHeader header;
  header.bucket = ref.landing->bucket_id();
  header.frame = ref.frame;
  header.length = static_cast<uint32_t>(payload.size());
  header.digest = ref.landing->frame_digest(ref.frame);
  frames_.push_back(header);
  if (fault.kind == FrameFault::Kind::kDamageHeader) damage_header_ = true;
  if (fault.kind == FrameFault::Kind::kDamagePayload) {
    if (ref.landing->on_device()) {
      // What nobody here can read goes as something else altogether.
      damaged_.emplace_back(payload.size(), '\x5a');
    } else {
      damaged_.emplace_back(payload.data(), payload.size());
    }
    damaged_.back()[payload.size() / 2] ^= 1;
    if (channel_ != nullptr) {
      payload_.push_back(absl::MakeConstSpan(damaged_.back()));
      return absl::OkStatus();
    }
    parts_.push_back({damaged_.back().data(), payload.size(), FileRange()});
    return absl::OkStatus();
  }
  if (channel_ != nullptr) {
    payload_.push_back(payload);
    return absl::OkStatus();
  }
  const FileRange file = ref.landing->frame_file(ref.frame);
  if (!parts_.empty() && file.fd >= 0 && parts_.back().file.fd == file.fd &&
      parts_.back().file.offset + static_cast<int64_t>(parts_.back().bytes) ==
          file.offset) {
    parts_.back().bytes += payload.size();
  } else {
    parts_.push_back({payload.data(), payload.size(), file});
  }
  return absl::OkStatus();
}

// From a file the kernel sends the pages themselves. They must not change until
// the peer has them: a READY frame never does while its group lives, and what a
// connection that was given up still carries fails its digest.
ssize_t OutStream::SendParts() {
  const Part& first = parts_[next_part_];
  if (first.file.fd >= 0) {
    off_t offset = static_cast<off_t>(first.file.offset);
    const ssize_t n = sendfile(fd_.get(), first.file.fd, &offset, first.bytes);
    if (n != 0) return n;
    errno = EIO;  // the file is shorter than the memory that it was
    return -1;
  }
  iovec vectors[kBatchFrames + 1];
  size_t count = 0;
  while (next_part_ + count < parts_.size() && count < kBatchFrames + 1 &&
         parts_[next_part_ + count].file.fd < 0) {
    const Part& part = parts_[next_part_ + count];
    vectors[count++] = {const_cast<char*>(part.data), part.bytes};
  }
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
  const bool more = next_part_ + count < parts_.size();
  return sendmsg(fd_.get(), &message,
                 MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
}

absl::Status OutStream::SendBatch(bool* blocked) {
  const ssize_t n = SendParts();
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
    Part& part = parts_[next_part_];
    if (left < part.bytes) {
      part.data += left;
      part.bytes -= left;
      part.file.offset += static_cast<int64_t>(left);
      break;
    }
    left -= part.bytes;
    ++next_part_;
  }
  if (channel_ != nullptr) {
    return batch_empty() && !frames_.empty() ? SendOverChannel()
                                             : absl::OkStatus();
  }
  // Heartbeats are no progress.
  if (!frames_.empty()) hop_->Sent(n, batch_empty() ? frames_.size() : 0);
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

absl::Status OutStream::OnFrames(const Header&, const std::vector<FrameHeader>&,
                                 std::vector<char*>*) {
  return absl::DataLossError("frames came in the wrong direction");
}

absl::Status OutStream::OnFrame(size_t) { return absl::OkStatus(); }

absl::Status OutStream::OnMessage(const Header& header,
                                  absl::string_view payload) {
  if (header.type == MessageType::kBye) {
    peer_left_ = true;
    return absl::OkStatus();
  }
  if (header.type == MessageType::kPayloadReady) {
    ready_ = true;
    return absl::OkStatus();
  }
  if (header.type == MessageType::kPayloadAnswer) {
    if (!DecodePayloadAnswer(payload, &answer_, &payload_answer_))
      return absl::DataLossError("an answer that is none");
    answered_ = true;
    return absl::OkStatus();
  }
  return hop_->OnMessage(header, payload);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
