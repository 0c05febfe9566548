#include "transport/tcp/frame_reader.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {

int64_t FrameReader::missing() const {
  switch (part_) {
    case Part::kHeader:
      break;
    case Part::kPayload:
      return static_cast<int64_t>(payload_.size()) - part_done_;
    case Part::kFrames:
      return frames_[frame_].length - part_done_;
  }
  return static_cast<int64_t>(kHeaderBytes) - part_done_;
}

iovec FrameReader::Current() {
  char* base = header_bytes_;
  if (part_ == Part::kPayload) base = &payload_[0];
  if (part_ == Part::kFrames) base = places_[frame_];
  return {base + part_done_, static_cast<size_t>(missing())};
}

absl::StatusOr<int64_t> FrameReader::ReadSome() {
  iovecs_.clear();
  iovecs_.push_back(Current());
  if (part_ == Part::kFrames) {
    for (size_t i = frame_ + 1; i < frames_.size(); ++i) {
      iovecs_.push_back({places_[i], frames_[i].length});
    }
    iovecs_.push_back({header_bytes_, kHeaderBytes});
  }
  msghdr message{};
  message.msg_iov = iovecs_.data();
  message.msg_iovlen = iovecs_.size();
  ssize_t n;
  do {
    n = recvmsg(fd_, &message, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    return ErrnoError("receiving", errno);
  }
  if (n == 0) return absl::OutOfRangeError("the peer closed the connection");
  for (int64_t left = n; left > 0;) {
    const int64_t step = std::min(left, missing());
    left -= step;
    if (step < missing()) {
      part_done_ += step;
      break;
    }
    if (absl::Status status = Finish(); !status.ok()) return status;
  }
  return n;
}

void FrameReader::StartHeader() {
  part_ = Part::kHeader;
  part_done_ = 0;
}

absl::Status FrameReader::Finish() {
  part_done_ = 0;
  switch (part_) {
    case Part::kHeader: {
      absl::StatusOr<Header> header = DecodeHeader(header_bytes_);
      if (!header.ok()) return header.status();
      header_ = *header;
      payload_.resize(header_.length);
      if (payload_.empty()) return FinishPayload();
      part_ = Part::kPayload;
      return absl::OkStatus();
    }
    case Part::kPayload:
      return FinishPayload();
    case Part::kFrames: {
      const size_t index = frame_++;
      if (frame_ == frames_.size()) StartHeader();
      return sink_->OnFrame(index);
    }
  }
  return absl::OkStatus();
}

absl::Status FrameReader::FinishPayload() {
  StartHeader();
  if (Crc32c(payload_) != header_.payload_crc) {
    return absl::DataLossError("a message arrived damaged");
  }
  if (header_.type != MessageType::kFrames) {
    return sink_->OnMessage(header_, payload_);
  }
  absl::StatusOr<std::vector<FrameHeader>> frames = DecodeFrames(payload_);
  if (!frames.ok()) return frames.status();
  frames_ = *std::move(frames);
  for (const FrameHeader& frame : frames_) {
    if (frame.length == 0) return absl::DataLossError("a frame is empty");
  }
  places_.clear();
  if (absl::Status status = sink_->OnFrames(header_, frames_, &places_);
      !status.ok()) {
    return status;
  }
  if (sink_->frames_elsewhere()) {
    if (absl::Status status = sink_->FetchFrames(frames_, places_);
        !status.ok()) {
      return status;
    }
    for (size_t i = 0; i < frames_.size(); ++i) {
      if (absl::Status status = sink_->OnFrame(i); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  part_ = Part::kFrames;
  frame_ = 0;
  return absl::OkStatus();
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
