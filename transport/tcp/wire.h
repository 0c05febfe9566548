#ifndef WEIGHTSYNC_TRANSPORT_TCP_WIRE_H_
#define WEIGHTSYNC_TRANSPORT_TCP_WIRE_H_

// What goes over one TCP connection of a chain. All integers are little-endian.
//
//   connector                        acceptor
//   Hello envelope          ->
//                           <-       Welcome envelope (OK, or why not)
//   then messages in both directions: a header of 40 bytes and `length` bytes
//   of payload; after that of FRAMES, the bytes of the frames that it lists.
//
//   forward                          backward
//                           <-       HAVE: what the receiver wants and what it
//                                    holds of it; starts a move
//   FRAMES                  ->
//                           <-       NAK: this frame was damaged, send it again
//                           <-       COMPLETE: this member holds everything,
//                                    verified
//                           <-       CHAIN: how it went in the members after it
//   GIVE_UP: no more comes, because of a failure before the sender
//   FAIL: the edge is given up (either direction)
//   HEARTBEAT, BYE (either direction)
//
// Where the bytes of frames go another way (payload_channel.h), PAYLOAD_OFFER
// and PAYLOAD_ANSWER come first, FRAMES is not followed by any, and
// PAYLOAD_READY says that they may be sent.
//
// Several frames share a FRAMES message because calls of 64 KiB cost a third
// more CPU on both ends than calls of 512 KiB; each is verified and sent on as
// soon as its own bytes are there.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/digest.h"
#include "transport/group.h"

namespace weightsync {
namespace transport {
namespace tcp {

constexpr uint32_t kProtocolVersion = 1;

uint32_t Crc32c(absl::string_view bytes);

// ---- Handshake ----

struct Hello {
  uint32_t version = kProtocolVersion;
  std::string cluster_id;
  std::string group_id;
  Epoch epoch;
  std::string secret;
  std::string from;  // node names
  std::string to;
  uint32_t stream = 0;
  uint32_t stream_count = 1;
};

// An envelope: magic, version, length of the body, CRC of the body; then the
// body.
constexpr size_t kEnvelopeHeaderBytes = 16;
// A stranger can make us hold no more than this.
constexpr uint32_t kMaxEnvelopeBody = 4096;

std::string EncodeHello(const Hello& hello);
std::string EncodeWelcome(const absl::Status& status);
// The body's length; INVALID_ARGUMENT (NOT_A_PEER) for anything but an envelope
// of the kind asked for.
absl::StatusOr<uint32_t> DecodeEnvelopeHeader(absl::string_view header,
                                              bool hello);
// `envelope` is header and body together.
absl::StatusOr<Hello> DecodeHello(absl::string_view envelope);
// The acceptor's answer, or INVALID_ARGUMENT if it cannot be read.
absl::Status DecodeWelcome(absl::string_view envelope);

// ---- Messages ----

enum class MessageType : uint8_t {
  kFrames = 1,
  kHeartbeat = 2,
  kHave = 3,
  kNak = 4,
  kComplete = 5,
  kChain = 6,
  kGiveUp = 7,
  kFail = 8,
  kBye = 9,
  // Of a payload channel: see payload_channel.h.
  kPayloadOffer = 10,
  kPayloadAnswer = 11,
  kPayloadReady = 12,
};

constexpr size_t kHeaderBytes = 40;
constexpr uint32_t kMaxPayload = 64u << 20;

struct Header {
  MessageType type = MessageType::kHeartbeat;
  uint64_t move = 0;    // the moves of a group are counted from 1
  uint64_t bucket = 0;  // of a NAK
  uint32_t frame = 0;   // of a NAK
  uint32_t length = 0;  // of the payload, bytes
  uint32_t payload_crc = 0;
};

void EncodeHeader(const Header& header, char* out /* kHeaderBytes */);
// DATA_LOSS if the header was damaged or is none.
absl::StatusOr<Header> DecodeHeader(const char* in /* kHeaderBytes */);
// Header and payload; fills length and payload_crc.
std::string EncodeMessage(Header header, absl::string_view payload);
std::string EncodeMessage(MessageType type, absl::string_view payload);

// One frame of a FRAMES message.
struct FrameHeader {
  uint64_t bucket = 0;
  uint32_t frame = 0;
  uint32_t length = 0;  // bytes
  Digest digest;
};
constexpr size_t kFrameHeaderBytes = 32;
constexpr size_t kMaxFrames = 512;  // of one message

// Everything of a FRAMES message but the frames' own bytes.
std::string EncodeFrames(uint64_t move, const std::vector<FrameHeader>& frames);
absl::StatusOr<std::vector<FrameHeader>> DecodeFrames(
    absl::string_view payload);

// One bucket of a HAVE.
struct HaveEntry {
  uint64_t bucket = 0;
  uint64_t size = 0;  // bytes, so that both sides find out when they do not
                      // mean the same bucket
  std::vector<uint8_t> bitmap;  // as Landing::ReadyBitmap
};

std::string EncodeHave(const std::vector<HaveEntry>& entries);
absl::StatusOr<std::vector<HaveEntry>> DecodeHave(absl::string_view payload);

// A PAYLOAD_ANSWER: why not, or what the channel's receiving end has to say.
// One that refuses reads as in releases that had nothing else to say.
std::string EncodePayloadAnswer(const absl::Status& status,
                                absl::string_view answer);
// False if `payload` is none.
bool DecodePayloadAnswer(absl::string_view payload, absl::Status* status,
                         std::string* answer);

// A status with its reason and edge.
std::string EncodeStatus(const absl::Status& status);
// False if `payload` is none.
bool DecodeStatus(absl::string_view payload, absl::Status* status);

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_TCP_WIRE_H_
