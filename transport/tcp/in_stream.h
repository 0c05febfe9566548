#ifndef WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_
#define WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/types/optional.h"
#include "transport/digest.h"
#include "transport/landing.h"
#include "transport/tcp/frame_reader.h"
#include "transport/tcp/inbound.h"
#include "transport/tcp/socket.h"

namespace weightsync {
namespace transport {
namespace tcp {

// One connection from the predecessor, and the thread that reads it, verifies
// frames and answers.
class InStream : private MessageSink {
 public:
  // `talks`: carries the hop's messages back (HAVE, COMPLETE, CHAIN).
  InStream(Inbound* hop, Fd fd, bool talks);
  ~InStream() override;

  void Start();
  void Wake() { wake_.Wake(); }
  void Join();

 private:
  void Run();
  absl::Status Loop();
  absl::Status Flush(int64_t now);
  // Until everything in out_ is sent.
  absl::Status FlushAll();
  // Whether a payload channel is to stop waiting.
  bool Stopped() const;
  // What the channel said; less, when the peer had more to say (Run).
  absl::Status FromChannel(const absl::Status& status);
  // Told once, by the sender's first word.
  void ReceivesOver(bool channel);
  // Answers, and where they agree meets the sender's end of the payload
  // channel.
  absl::Status OnOffer(absl::string_view offer);
  void Poll();

  absl::Status OnFrames(const Header& header,
                        const std::vector<FrameHeader>& frames,
                        std::vector<char*>* places) override;
  bool frames_elsewhere() const override { return channel_ != nullptr; }
  // Has GPUs digest what was fetched into their memory.
  absl::Status DigestOnDevices();
  absl::Status FetchFrames(const std::vector<FrameHeader>& frames,
                           const std::vector<char*>& places) override;
  absl::Status OnFrame(size_t index) override;
  absl::Status OnMessage(const Header& header,
                         absl::string_view payload) override;

  Inbound* const hop_;
  const bool talks_;
  Fd fd_;
  WakeFd wake_;
  std::unique_ptr<PayloadChannel> offered_;  // no offer has been agreed on yet
  std::unique_ptr<PayloadChannel> channel_;
  FrameReader reader_;
  std::thread thread_;

  // Only the thread touches these.
  struct Incoming {
    FrameHeader header;
    std::shared_ptr<Landing> landing;  // null: not ours to fill
    absl::optional<Digest> digest;     // by a GPU: of what came
  };
  uint64_t move_ = 0;  // of the frames being read
  std::vector<Incoming> incoming_;
  std::string scratch_;  // where frames go that are here already
  std::string out_;
  size_t out_done_ = 0;
  bool peer_left_ = false;
  bool way_known_ = false;
  int64_t last_sent_ = 0;
  int64_t last_heard_ = 0;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_
