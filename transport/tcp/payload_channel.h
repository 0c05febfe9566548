#ifndef WEIGHTSYNC_TRANSPORT_TCP_PAYLOAD_CHANNEL_H_
#define WEIGHTSYNC_TRANSPORT_TCP_PAYLOAD_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace weightsync {
namespace transport {
namespace tcp {

// Another way for the bytes of frames over one edge, beside the connection that
// goes on to carry everything else: who is there, which frames come, which were
// damaged, how it went. With one, a chain has all that it has without, and its
// bytes go over, say, a communicator of NCCL.
//
//   sender                     receiver
//   Offer()         ->  (PAYLOAD_OFFER)
//                   <-  (PAYLOAD_ANSWER) Accept(offer)
//   Answered(answer)           and so on, until they agree
//   Connect()                  Connect()
//   FRAMES          ->
//                   <-  (PAYLOAD_READY)
//   Send()                     Receive()
//   Finish()                   Finish()
//
// Nothing is sent before the receiver has said that it is about to receive: a
// kernel that waits for its peer would keep the GPU from those who compute on
// it. Used by one thread at each end; what it waits for ends early when
// `stopped` says so, in bounded time.
class PayloadChannel {
 public:
  using Stopped = std::function<bool()>;

  // In bounded time; afterwards no memory of anybody's is touched.
  virtual ~PayloadChannel() = default;

  // What the receiver makes of an offer.
  struct Acceptance {
    bool agreed = true;  // or the sender is to make another one
    std::string answer;  // for the sender's Answered
  };

  // Sender: what the receiver must know.
  virtual absl::StatusOr<std::string> Offer() = 0;
  // Receiver: judges it. The error, if any, is told to the sender.
  virtual absl::StatusOr<Acceptance> Accept(absl::string_view offer) = 0;
  // Sender: whether they agree; otherwise it makes another offer.
  virtual absl::StatusOr<bool> Answered(absl::string_view answer) = 0;
  virtual absl::Status Connect(absl::Duration timeout,
                               const Stopped& stopped) = 0;
  // The parts' bytes one after another. The receiver's parts have together as
  // many. After an error the channel is of no use, and what was received is
  // undefined.
  virtual absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                            absl::Duration timeout, const Stopped& stopped) = 0;
  virtual absl::Status Receive(absl::Span<const absl::Span<char>> parts,
                               absl::Duration timeout,
                               const Stopped& stopped) = 0;
  // Last, and only where both ends leave in good order: what the channel has of
  // its peer may serve the next edge between the two.
  virtual void Finish() = 0;
};

// Makes one end. Called on the thread that will use it. `peer` is the cluster
// and the node at the other end: the same for every edge between the same two.
using PayloadChannelFactory =
    std::function<absl::StatusOr<std::unique_ptr<PayloadChannel>>(
        const std::string& peer)>;

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_PAYLOAD_CHANNEL_H_
