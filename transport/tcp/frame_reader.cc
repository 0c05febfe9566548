#include "transport/tcp/frame_reader.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {

absl::StatusOr<int64_t> FrameReader::ReadSome() {
  iovec parts[2];
  size_t count = 0;
  if (in_payload_)
    parts[count++] = {payload_ + payload_done_,
                      static_cast<size_t>(length_ - payload_done_)};
  parts[count++] = {header_bytes_ + header_done_,
                    kHeaderBytes - static_cast<size_t>(header_done_)};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t n;
  do {
    n = recvmsg(fd_, &message, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    return ErrnoError("receiving", errno);
  }
  if (n == 0) return absl::OutOfRangeError("the peer closed the connection");
  if (absl::Status status = Advance(n); !status.ok()) return status;
  return n;
}

absl::Status FrameReader::Advance(int64_t bytes) {
  if (in_payload_) {
    const int64_t part = std::min(bytes, length_ - payload_done_);
    payload_done_ += part;
    bytes -= part;
    if (payload_done_ < length_) return absl::OkStatus();
    if (absl::Status status = FinishPayload(); !status.ok()) return status;
  }
  header_done_ += bytes;
  if (header_done_ < static_cast<int64_t>(kHeaderBytes))
    return absl::OkStatus();
  header_done_ = 0;
  absl::StatusOr<Header> header = DecodeHeader(header_bytes_);
  if (!header.ok()) return header.status();
  header_ = *header;
  length_ = header_.length;
  payload_done_ = 0;
  if (header_.type == MessageType::kData) {
    absl::StatusOr<char*> place = sink_->OnDataHeader(header_);
    if (!place.ok()) return place.status();
    payload_ = *place;
  } else {
    control_.resize(length_);
    payload_ = &control_[0];
  }
  in_payload_ = true;
  return length_ == 0 ? FinishPayload() : absl::OkStatus();
}

absl::Status FrameReader::FinishPayload() {
  in_payload_ = false;
  if (header_.type == MessageType::kData) return sink_->OnData(header_);
  if (Crc32c(control_) != header_.payload_crc) {
    return absl::DataLossError("a message arrived damaged");
  }
  return sink_->OnMessage(header_, control_);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
