#ifndef WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_
#define WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Where the messages of one connection go. Called on the thread that reads.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  // The header of a DATA frame is there: where are its `header.length` bytes to
  // go? Not null.
  virtual absl::StatusOr<char*> OnDataHeader(const Header& header) = 0;
  // They are there.
  virtual absl::Status OnData(const Header& header) = 0;
  // Any other message.
  virtual absl::Status OnMessage(const Header& header,
                                 absl::string_view payload) = 0;
};

// Takes one connection's bytes apart. Payload of DATA goes straight to its
// place: one system call reads the rest of a payload and the header after it.
// Not thread-safe.
class FrameReader {
 public:
  FrameReader(int fd, MessageSink* sink) : fd_(fd), sink_(sink) {}

  // Reads once, without blocking. Bytes read; 0 when there are none now.
  // OUT_OF_RANGE when the peer closed, UNAVAILABLE for an error of the socket,
  // or what the sink answered.
  absl::StatusOr<int64_t> ReadSome();

  // Bytes that the payload or the header being read still lacks; never 0.
  int64_t missing() const {
    return in_payload_ ? length_ - payload_done_
                       : static_cast<int64_t>(kHeaderBytes) - header_done_;
  }
  // Whether a DATA payload is half read.
  bool in_data() const {
    return in_payload_ && header_.type == MessageType::kData;
  }
  const Header& header() const { return header_; }

 private:
  absl::Status Advance(int64_t bytes);
  absl::Status FinishPayload();

  const int fd_;
  MessageSink* const sink_;
  char header_bytes_[kHeaderBytes];
  int64_t header_done_ = 0;
  bool in_payload_ = false;
  Header header_;
  char* payload_ = nullptr;
  int64_t length_ = 0;
  int64_t payload_done_ = 0;
  std::string control_;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_
