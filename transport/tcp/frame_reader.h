#ifndef WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_
#define WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/tcp/wire.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Where the messages of one connection go. Called on the thread that reads.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  // These frames come next. Fills `places` with where the bytes of each are to
  // go; not null, and valid until OnFrame of that frame.
  virtual absl::Status OnFrames(const Header& header,
                                const std::vector<FrameHeader>& frames,
                                std::vector<char*>* places) = 0;
  // Where the bytes of frames do not come over the connection: fetches them all
  // to their places.
  virtual bool frames_elsewhere() const { return false; }
  virtual absl::Status FetchFrames(const std::vector<FrameHeader>& /*frames*/,
                                   const std::vector<char*>& /*places*/) {
    return absl::OkStatus();
  }
  // The bytes of the frame with that index in the last OnFrames are there.
  virtual absl::Status OnFrame(size_t index) = 0;
  // Any other message.
  virtual absl::Status OnMessage(const Header& header,
                                 absl::string_view payload) = 0;
};

// Takes one connection's bytes apart. Those of frames go straight to their
// place: one system call reads what is there of several frames and the header
// after them. Not thread-safe.
class FrameReader {
 public:
  FrameReader(int fd, MessageSink* sink) : fd_(fd), sink_(sink) {}

  // Reads once, without blocking. Bytes read; 0 when there are none now.
  // OUT_OF_RANGE when the peer closed, UNAVAILABLE for an error of the socket,
  // DATA_LOSS for bytes that make no message, or what the sink answered.
  absl::StatusOr<int64_t> ReadSome();

  // Bytes that the frame, payload or header being read still lacks; never 0.
  int64_t missing() const;
  bool in_frames() const { return part_ == Part::kFrames; }

 private:
  enum class Part { kHeader, kPayload, kFrames };

  // What is being read now, its first `part_done_` bytes being there already.
  iovec Current();
  // The current part is whole.
  absl::Status Finish();
  absl::Status FinishPayload();
  void StartHeader();

  const int fd_;
  MessageSink* const sink_;
  Part part_ = Part::kHeader;
  int64_t part_done_ = 0;
  char header_bytes_[kHeaderBytes];
  Header header_;
  std::string payload_;
  std::vector<FrameHeader> frames_;
  std::vector<char*> places_;
  size_t frame_ = 0;  // index of the one being read
  std::vector<iovec> iovecs_;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_FRAME_READER_H_
