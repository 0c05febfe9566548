#ifndef WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_
#define WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

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
  void Poll();
  void SetLowWater(int bytes);

  absl::StatusOr<char*> OnDataHeader(const Header& header) override;
  absl::Status OnData(const Header& header) override;
  absl::Status OnMessage(const Header& header,
                         absl::string_view payload) override;

  Inbound* const hop_;
  const bool talks_;
  Fd fd_;
  WakeFd wake_;
  FrameReader reader_;
  std::thread thread_;

  // Only the thread touches these.
  std::shared_ptr<Landing>
      landing_;          // of the frame being read, if it is ours to fill
  std::string scratch_;  // where frames go that are here already
  std::string out_;
  size_t out_done_ = 0;
  int low_water_ = 1;
  bool peer_left_ = false;
  int64_t last_sent_ = 0;
  int64_t last_heard_ = 0;
};

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_IN_STREAM_H_
