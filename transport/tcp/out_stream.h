#ifndef WEIGHTSYNC_TRANSPORT_TCP_OUT_STREAM_H_
#define WEIGHTSYNC_TRANSPORT_TCP_OUT_STREAM_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "transport/tcp/frame_reader.h"
#include "transport/tcp/outbound.h"
#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {

// One connection towards the successor, and the thread that sends on it and
// reads what comes back.
class OutStream : private MessageSink {
 public:
  // `talks`: the peer's messages about moves come back on this one.
  OutStream(Outbound* hop, Fd fd, bool talks);
  ~OutStream() override;

  void Start();
  void Wake() { wake_.Wake(); }
  void Join();

 private:
  // Bytes to send: in memory, or (file.fd >= 0) a range of a file.
  struct Part {
    const char* data = nullptr;
    size_t bytes = 0;
    FileRange file;
  };
  struct Delayed {
    int64_t due;
    Outbound::FrameRef ref;
  };

  void Run();
  absl::Status Loop();
  // There is none to be had: the bytes go over the connection, or the edge is
  // of no use.
  absl::Status WithoutChannel(const absl::Status& why);
  // Offers, until both ends of the payload channel agree, and meets the
  // receiver's.
  absl::Status ConnectChannel();
  // Both ends leave in good order.
  void FinishChannel();
  // Sends the batch's frames over the channel, when the receiver is ready.
  absl::Status SendOverChannel();
  // Whether the payload channel is to stop waiting.
  bool Stopped() const;
  // What the channel said; less, when the peer had more to say (Run).
  absl::Status FromChannel(const absl::Status& status);
  // Reads until `done`, the end of the stream, or the peer's silence.
  absl::Status ReadUntil(const bool& done);
  absl::Status SendAll(const std::string& message);
  // Makes the next batch of bytes to send, if there are any.
  absl::Status FillBatch(int64_t now);
  // Adds a frame to the batch, as the fault policy likes it. Silence ends in
  // silent_.
  absl::Status AddFrame(const Outbound::FrameRef& ref, int64_t now);
  // *blocked when the socket takes no more now.
  absl::Status SendBatch(bool* blocked);
  // One system call for what lies in memory, or in one run of a file, next.
  // What it returns, and errno.
  ssize_t SendParts();
  absl::Status ReadAll(bool* heard);
  void Poll(bool blocked, int64_t now);
  bool batch_empty() const { return next_part_ == parts_.size(); }

  absl::Status OnFrames(const Header& header,
                        const std::vector<FrameHeader>& frames,
                        std::vector<char*>* places) override;
  absl::Status OnFrame(size_t index) override;
  absl::Status OnMessage(const Header& header,
                         absl::string_view payload) override;

  Outbound* const hop_;
  const bool talks_;
  Fd fd_;
  WakeFd wake_;
  FrameReader reader_;
  std::thread thread_;

  // Only the thread touches these.
  Outbound::Work work_;
  std::vector<FrameHeader> frames_;   // of the batch
  std::string control_;               // what comes before them, or a message
  std::vector<std::string> damaged_;  // copies for the fault policy
  bool damage_header_ = false;        // for the fault policy
  std::vector<Part> parts_;
  size_t next_part_ = 0;
  std::deque<Delayed> delayed_;
  std::unique_ptr<PayloadChannel> channel_;
  std::vector<absl::Span<const char>> payload_;  // of the batch
  bool answered_ = false;
  absl::Status answer_;
  std::string payload_answer_;  // of the channel's other end
  bool ready_ = false;          // the peer is about to receive
  bool said_give_up_ = false;
  bool silent_ = false;
  bool peer_left_ = false;
  int64_t last_sent_ = 0;
  int64_t last_heard_ = 0;
  int64_t last_read_ = 0;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_OUT_STREAM_H_
