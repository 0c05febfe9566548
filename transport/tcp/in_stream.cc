#include "transport/tcp/in_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr absl::Duration kLeaveLimit = absl::Seconds(1);
// The rate and the time of the last word are noted this often.
constexpr int64_t kNoteEveryNanos = 50000000;

}  // namespace

InStream::InStream(Inbound* hop, Fd fd, bool talks)
    : hop_(hop), talks_(talks), fd_(std::move(fd)), reader_(fd_.get(), this) {}

InStream::~InStream() { Join(); }

void InStream::Start() {
  thread_ = std::thread([this] { Run(); });
}

void InStream::Join() {
  if (thread_.joinable()) thread_.join();
}

void InStream::Run() {
  last_sent_ = last_heard_ = NowNanos();
  if (hop_->options().payload == nullptr) ReceivesOver(false);
  absl::Status status = Loop();
  while (!status.ok() && ReasonOf(status).empty() && channel_ != nullptr &&
         hop_->stop_mode() == StopMode::kRun) {
    // It waited for the channel; the peer may have said why it left.
    const absl::StatusOr<int64_t> n = reader_.ReadSome();
    if (!n.ok() && !ReasonOf(n.status()).empty()) status = n.status();
    if (!n.ok() || *n == 0) break;
  }
  for (const Incoming& frame : incoming_) {
    if (frame.landing != nullptr) frame.landing->Unclaim(frame.header.frame);
  }
  incoming_.clear();
  if (!status.ok()) hop_->Fail(BlameEdge(hop_->options(), status));
  hop_->StreamEnded();
  const bool leaves = hop_->stop_mode() == StopMode::kLeave || peer_left_;
  // Before the wait for the peer: the next edge between the two may be made.
  if (channel_ != nullptr && status.ok() && leaves &&
      hop_->stop_mode() != StopMode::kAbort) {
    channel_->Finish();
    channel_ = nullptr;
  }
  if (leaves) {
    // COMPLETE and CHAIN may still wait to be sent.
    const int64_t until = NowNanos() + absl::ToInt64Nanoseconds(kLeaveLimit);
    if (talks_) out_ += hop_->TakeMessages();
    out_ += EncodeMessage(MessageType::kBye, "");
    while (Flush(NowNanos()).ok() && out_done_ < out_.size() &&
           NowNanos() < until) {
      pollfd wait{fd_.get(), POLLOUT, 0};
      poll(&wait, 1, 50);
    }
    CloseGently(fd_.get(), peer_left_ ? absl::ZeroDuration() : kLeaveLimit);
  } else if (out_done_ == out_.size()) {
    if (talks_) SendNow(fd_.get(), hop_->TakeMessages());
    SendNow(fd_.get(),
            EncodeMessage(MessageType::kFail, EncodeStatus(hop_->stop_why())));
  }
  fd_.reset();
}

absl::Status InStream::Loop() {
  const int64_t deadline =
      absl::ToInt64Nanoseconds(hop_->options().peer_deadline);
  int64_t noted = 0;
  while (hop_->stop_mode() == StopMode::kRun) {
    const int64_t now = NowNanos();
    if (absl::Status status = Flush(now); !status.ok()) return status;
    absl::StatusOr<int64_t> n = reader_.ReadSome();
    if (!n.ok()) return n.status();
    if (peer_left_) {
      hop_->PeerLeft();
      return absl::OkStatus();
    }
    if (*n > 0) {
      last_heard_ = now;
      if (now - noted > kNoteEveryNanos) {
        noted = now;
        hop_->Heard(now, /*moves=*/reader_.in_frames());
      }
      continue;
    }
    if (now - last_heard_ > deadline) {
      return PeerSilent(hop_->options(), hop_->options().from,
                        now - last_heard_);
    }
    Poll();
  }
  return absl::OkStatus();
}

absl::Status InStream::Flush(int64_t now) {
  if (out_done_ == out_.size()) {
    out_.clear();
    out_done_ = 0;
  }
  if (talks_ && hop_->has_messages()) out_ += hop_->TakeMessages();
  if (out_.empty() &&
      now - last_sent_ >= absl::ToInt64Nanoseconds(hop_->options().heartbeat)) {
    out_ = EncodeMessage(MessageType::kHeartbeat, "");
  }
  if (out_done_ == out_.size()) return absl::OkStatus();
  const ssize_t n = send(fd_.get(), out_.data() + out_done_,
                         out_.size() - out_done_, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)
      return absl::OkStatus();
    return ErrnoError("answering", errno);
  }
  last_sent_ = now;
  out_done_ += static_cast<size_t>(n);
  return absl::OkStatus();
}

absl::Status InStream::FlushAll() {
  const int64_t deadline =
      NowNanos() + absl::ToInt64Nanoseconds(hop_->options().peer_deadline);
  while (true) {
    const int64_t now = NowNanos();
    if (absl::Status status = Flush(now); !status.ok()) return status;
    if (out_done_ == out_.size()) return absl::OkStatus();
    if (now > deadline || hop_->stop_mode() != StopMode::kRun) {
      return PeerSilent(hop_->options(), hop_->options().from,
                        now - last_heard_);
    }
    pollfd wait{fd_.get(), POLLOUT, 0};
    poll(&wait, 1, 10);
  }
}

bool InStream::Stopped() const {
  return hop_->stop_mode() != StopMode::kRun || HungUp(fd_.get());
}

absl::Status InStream::FromChannel(const absl::Status& status) {
  last_heard_ = NowNanos();
  if (status.ok()) return status;
  if (hop_->stop_mode() == StopMode::kRun && HungUp(fd_.get()))
    return absl::UnavailableError("the peer closed the connection");
  return ChannelFailure(hop_->options(), status);
}

void InStream::ReceivesOver(bool channel) {
  if (way_known_) return;
  way_known_ = true;
  hop_->ReceivesOver(channel);
}

absl::Status InStream::OnOffer(absl::string_view offer) {
  absl::Status status;
  PayloadChannel::Acceptance acceptance;
  if (hop_->options().payload == nullptr) {
    status =
        MakeError(absl::StatusCode::kFailedPrecondition, "GROUP_KIND_MISMATCH",
                  absl::StrCat(hop_->options().to,
                               " moves over TCP alone: give all nodes the "
                               "same --group"));
  } else {
    if (offered_ == nullptr) {
      const HopOptions& options = hop_->options();
      absl::StatusOr<std::unique_ptr<PayloadChannel>> channel =
          options.payload(PayloadPeer(options, options.from));
      status = channel.status();
      if (status.ok()) offered_ = *std::move(channel);
    }
    if (status.ok()) {
      absl::StatusOr<PayloadChannel::Acceptance> accepted =
          offered_->Accept(offer);
      status = accepted.status();
      if (status.ok()) acceptance = *std::move(accepted);
    }
    if (!status.ok()) {
      offered_ = nullptr;
    } else if (acceptance.agreed) {
      channel_ = std::move(offered_);
    }
  }
  out_ += EncodeMessage(MessageType::kPayloadAnswer,
                        EncodePayloadAnswer(status, acceptance.answer));
  if (absl::Status sent = FlushAll(); !sent.ok()) return sent;
  if (status.ok() && !acceptance.agreed) return absl::OkStatus();
  if (!status.ok()) {
    // The sender has been told, and goes on over the connection.
    if (!hop_->options().payload_optional)
      return ChannelFailure(hop_->options(), status);
    ReceivesOver(false);
    return absl::OkStatus();
  }
  status = FromChannel(channel_->Connect(hop_->options().peer_deadline,
                                         [this] { return Stopped(); }));
  if (status.ok()) ReceivesOver(true);
  return status;
}

absl::Status InStream::FetchFrames(const std::vector<FrameHeader>& frames,
                                   const std::vector<char*>& places) {
  out_ += EncodeMessage(MessageType::kPayloadReady, "");
  if (absl::Status status = FlushAll(); !status.ok()) return status;
  std::vector<absl::Span<char>> parts;
  for (size_t i = 0; i < frames.size(); ++i)
    parts.push_back(absl::MakeSpan(places[i], frames[i].length));
  const absl::Status status = FromChannel(channel_->Receive(
      parts, hop_->options().peer_deadline, [this] { return Stopped(); }));
  return status.ok() ? DigestOnDevices() : status;
}

absl::Status InStream::DigestOnDevices() {
  std::map<Landing*, std::vector<size_t>> of_landing;
  for (size_t i = 0; i < incoming_.size(); ++i) {
    Landing* const landing = incoming_[i].landing.get();
    if (landing != nullptr && landing->on_device())
      of_landing[landing].push_back(i);
  }
  for (const auto& [landing, indices] : of_landing) {
    std::vector<uint32_t> frames;
    for (const size_t i : indices) frames.push_back(incoming_[i].header.frame);
    const absl::StatusOr<std::vector<Digest>> digests =
        landing->ComputeDigests(frames);
    if (!digests.ok()) return FromChannel(digests.status());
    for (size_t i = 0; i < indices.size(); ++i)
      incoming_[indices[i]].digest = (*digests)[i];
  }
  last_heard_ = NowNanos();
  return absl::OkStatus();
}

void InStream::Poll() {
  const HopOptions& options = hop_->options();
  const int64_t span = absl::ToInt64Nanoseconds(
                           std::min(options.heartbeat, options.peer_deadline)) /
                       4;
  const bool waits_to_send = out_done_ < out_.size();
  pollfd waits[2] = {
      {fd_.get(), static_cast<int16_t>(POLLIN | (waits_to_send ? POLLOUT : 0)),
       0},
      {wake_.fd(), POLLIN, 0}};
  poll(waits, 2, static_cast<int>(std::max<int64_t>(1, span / 1000000)));
  if (waits[1].revents != 0) wake_.Drain();
}

absl::Status InStream::OnFrames(const Header& header,
                                const std::vector<FrameHeader>& frames,
                                std::vector<char*>* places) {
  move_ = header.move;
  incoming_.clear();
  if (channel_ == nullptr) ReceivesOver(false);
  for (const FrameHeader& frame : frames) {
    absl::StatusOr<std::shared_ptr<Landing>> landing = hop_->Find(move_, frame);
    if (!landing.ok()) return landing.status();
    if (*landing != nullptr && (*landing)->Claim(frame.frame)) {
      places->push_back((*landing)->frame(frame.frame).data());
      incoming_.push_back({frame, *std::move(landing), absl::nullopt});
      continue;
    }
    if (frame.length > Landing::kFrameBytes) {
      return absl::DataLossError("a frame is too long");
    }
    // It is here already, or its move is over.
    scratch_.resize(Landing::kFrameBytes);
    places->push_back(&scratch_[0]);
    incoming_.push_back({frame, nullptr, absl::nullopt});
  }
  return absl::OkStatus();
}

absl::Status InStream::OnFrame(size_t index) {
  const FrameHeader& frame = incoming_[index].header;
  const std::shared_ptr<Landing> landing = std::move(incoming_[index].landing);
  incoming_[index].landing = nullptr;
  if (landing == nullptr) return absl::OkStatus();
  const absl::optional<Digest>& by_gpu = incoming_[index].digest;
  const Digest came =
      by_gpu.has_value() ? *by_gpu : landing->ComputeDigest(frame.frame);
  if (came != frame.digest) {
    landing->Unclaim(frame.frame);
    if (absl::Status status = hop_->Damaged(frame); !status.ok()) return status;
    Header nak;
    nak.type = MessageType::kNak;
    nak.move = move_;
    nak.bucket = frame.bucket;
    nak.frame = frame.frame;
    out_ += EncodeMessage(nak, "");
    return absl::OkStatus();
  }
  const bool complete = landing->MarkReady(frame.frame, frame.digest);
  hop_->Received(frame.length, 1);
  if (complete) hop_->Completed(move_);
  return absl::OkStatus();
}

absl::Status InStream::OnMessage(const Header& header,
                                 absl::string_view payload) {
  if (header.type == MessageType::kBye) {
    peer_left_ = true;
    return absl::OkStatus();
  }
  if (header.type == MessageType::kPayloadOffer && channel_ == nullptr)
    return OnOffer(payload);
  if (channel_ == nullptr && offered_ == nullptr) ReceivesOver(false);
  return hop_->OnMessage(header, payload);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
