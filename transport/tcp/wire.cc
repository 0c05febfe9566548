#include "transport/tcp/wire.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace tcp {
namespace {

constexpr uint32_t kHelloMagic = 0x31485357;    // "WSH1"
constexpr uint32_t kWelcomeMagic = 0x31575357;  // "WSW1"
constexpr uint32_t kHeaderMagic = 0x31465357;   // "WSF1"

std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

template <typename Int>
void Put(Int value, char* out) {
  for (size_t i = 0; i < sizeof(Int); ++i)
    out[i] = static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
}

template <typename Int>
Int Get(const char* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Int); ++i)
    value |= static_cast<uint64_t>(static_cast<uint8_t>(in[i])) << (8 * i);
  return static_cast<Int>(value);
}

template <typename Int>
void Append(Int value, std::string* out) {
  char bytes[sizeof(Int)];
  Put(value, bytes);
  out->append(bytes, sizeof(Int));
}

void AppendString(absl::string_view text, std::string* out) {
  Append(static_cast<uint32_t>(text.size()), out);
  out->append(text.data(), text.size());
}

// Reads what a peer sent: never past the end; `ok` turns false instead.
class Cursor {
 public:
  explicit Cursor(absl::string_view bytes) : rest_(bytes) {}

  template <typename Int>
  Int Number() {
    if (rest_.size() < sizeof(Int)) {
      ok_ = false;
      return Int{};
    }
    const Int value = Get<Int>(rest_.data());
    rest_.remove_prefix(sizeof(Int));
    return value;
  }
  absl::string_view Bytes(uint64_t length) {
    if (!ok_ || rest_.size() < length) {
      ok_ = false;
      return absl::string_view();
    }
    const absl::string_view bytes = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return bytes;
  }
  std::string String() { return std::string(Bytes(Number<uint32_t>())); }
  std::string Rest() { return std::string(Bytes(rest_.size())); }

  bool ok() const { return ok_; }
  bool ok_and_done() const { return ok_ && rest_.empty(); }
  bool done() const { return rest_.empty(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};

std::string Envelope(uint32_t magic, const std::string& body) {
  std::string out;
  Append(magic, &out);
  Append(kProtocolVersion, &out);
  Append(static_cast<uint32_t>(body.size()), &out);
  Append(Crc32c(body), &out);
  return out + body;
}

absl::Status NotAPeer(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "NOT_A_PEER",
                   absl::StrCat("not a handshake: ", what));
}

absl::StatusOr<absl::string_view> EnvelopeBody(absl::string_view envelope,
                                               bool hello) {
  absl::StatusOr<uint32_t> length =
      DecodeEnvelopeHeader(envelope.substr(0, kEnvelopeHeaderBytes), hello);
  if (!length.ok()) return length.status();
  const absl::string_view body = envelope.substr(kEnvelopeHeaderBytes);
  if (body.size() != *length) return NotAPeer("its length is wrong");
  if (Crc32c(body) != Get<uint32_t>(envelope.data() + 12))
    return NotAPeer("its checksum is wrong");
  return body;
}

}  // namespace

uint32_t Crc32c(absl::string_view bytes) {
  static const std::array<uint32_t, 256>& table =
      *new std::array<uint32_t, 256>(MakeCrcTable());
  uint32_t crc = ~0u;
  for (const char byte : bytes)
    crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  return ~crc;
}

std::string EncodeHello(const Hello& hello) {
  std::string body;
  AppendString(hello.cluster_id, &body);
  AppendString(hello.group_id, &body);
  Append(hello.epoch.term, &body);
  Append(hello.epoch.counter, &body);
  AppendString(hello.secret, &body);
  AppendString(hello.from, &body);
  AppendString(hello.to, &body);
  Append(hello.stream, &body);
  Append(hello.stream_count, &body);
  return Envelope(kHelloMagic, body);
}

std::string EncodeWelcome(const absl::Status& status) {
  std::string body = EncodeStatus(status);
  if (body.size() > kMaxEnvelopeBody) {
    body = EncodeStatus(absl::Status(
        status.code(), status.message().substr(0, kMaxEnvelopeBody / 2)));
  }
  return Envelope(kWelcomeMagic, body);
}

absl::StatusOr<uint32_t> DecodeEnvelopeHeader(absl::string_view header,
                                              bool hello) {
  if (header.size() != kEnvelopeHeaderBytes) return NotAPeer("it is too short");
  if (Get<uint32_t>(header.data()) != (hello ? kHelloMagic : kWelcomeMagic))
    return NotAPeer("wrong first bytes");
  const uint32_t version = Get<uint32_t>(header.data() + 4);
  if (version != kProtocolVersion) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PROTOCOL_VERSION",
                     absl::StrCat("the peer speaks data protocol ", version,
                                  ", this node speaks ", kProtocolVersion,
                                  ": run the same release on all nodes"));
  }
  const uint32_t length = Get<uint32_t>(header.data() + 8);
  if (length > kMaxEnvelopeBody) return NotAPeer("it is too long");
  return length;
}

absl::StatusOr<Hello> DecodeHello(absl::string_view envelope) {
  absl::StatusOr<absl::string_view> body =
      EnvelopeBody(envelope, /*hello=*/true);
  if (!body.ok()) return body.status();
  Cursor cursor(*body);
  Hello hello;
  hello.cluster_id = cursor.String();
  hello.group_id = cursor.String();
  hello.epoch.term = cursor.Number<uint64_t>();
  hello.epoch.counter = cursor.Number<uint64_t>();
  hello.secret = cursor.String();
  hello.from = cursor.String();
  hello.to = cursor.String();
  hello.stream = cursor.Number<uint32_t>();
  hello.stream_count = cursor.Number<uint32_t>();
  if (!cursor.ok_and_done()) return NotAPeer("its fields do not fit");
  return hello;
}

absl::Status DecodeWelcome(absl::string_view envelope) {
  absl::StatusOr<absl::string_view> body =
      EnvelopeBody(envelope, /*hello=*/false);
  if (!body.ok()) return body.status();
  absl::Status status;
  if (!DecodeStatus(*body, &status)) return NotAPeer("its fields do not fit");
  return status;
}

void EncodeHeader(const Header& header, char* out) {
  std::memset(out, 0, kHeaderBytes);
  Put(kHeaderMagic, out);
  Put(static_cast<uint8_t>(header.type), out + 4);
  Put(header.move, out + 8);
  Put(header.bucket, out + 16);
  Put(header.frame, out + 24);
  Put(header.length, out + 28);
  Put(header.payload_crc, out + 32);
  Put(Crc32c(absl::string_view(out, kHeaderBytes - 4)), out + kHeaderBytes - 4);
}

absl::StatusOr<Header> DecodeHeader(const char* in) {
  const bool whole = Get<uint32_t>(in) == kHeaderMagic &&
                     Get<uint32_t>(in + kHeaderBytes - 4) ==
                         Crc32c(absl::string_view(in, kHeaderBytes - 4));
  const uint8_t type = static_cast<uint8_t>(in[4]);
  if (!whole || type < static_cast<uint8_t>(MessageType::kFrames) ||
      type > static_cast<uint8_t>(MessageType::kPayloadReady)) {
    return absl::DataLossError(
        "a header arrived damaged, so that the stream cannot be read on");
  }
  Header header;
  header.type = static_cast<MessageType>(type);
  header.move = Get<uint64_t>(in + 8);
  header.bucket = Get<uint64_t>(in + 16);
  header.frame = Get<uint32_t>(in + 24);
  header.length = Get<uint32_t>(in + 28);
  header.payload_crc = Get<uint32_t>(in + 32);
  if (header.length > kMaxPayload) {
    return absl::DataLossError("a message is longer than any can be");
  }
  return header;
}

std::string EncodeMessage(Header header, absl::string_view payload) {
  header.length = static_cast<uint32_t>(payload.size());
  header.payload_crc = Crc32c(payload);
  std::string out(kHeaderBytes, '\0');
  EncodeHeader(header, &out[0]);
  out.append(payload.data(), payload.size());
  return out;
}

std::string EncodeMessage(MessageType type, absl::string_view payload) {
  Header header;
  header.type = type;
  return EncodeMessage(header, payload);
}

std::string EncodeFrames(uint64_t move,
                         const std::vector<FrameHeader>& frames) {
  std::string payload;
  payload.reserve(frames.size() * kFrameHeaderBytes);
  for (const FrameHeader& frame : frames) {
    Append(frame.bucket, &payload);
    Append(frame.frame, &payload);
    Append(frame.length, &payload);
    Append(frame.digest.lanes[0], &payload);
    Append(frame.digest.lanes[1], &payload);
  }
  Header header;
  header.type = MessageType::kFrames;
  header.move = move;
  return EncodeMessage(header, payload);
}

absl::StatusOr<std::vector<FrameHeader>> DecodeFrames(
    absl::string_view payload) {
  std::vector<FrameHeader> frames;
  Cursor cursor(payload);
  while (cursor.ok() && !cursor.done() && frames.size() <= kMaxFrames) {
    FrameHeader frame;
    frame.bucket = cursor.Number<uint64_t>();
    frame.frame = cursor.Number<uint32_t>();
    frame.length = cursor.Number<uint32_t>();
    frame.digest.lanes[0] = cursor.Number<uint64_t>();
    frame.digest.lanes[1] = cursor.Number<uint64_t>();
    frames.push_back(frame);
  }
  if (!cursor.ok_and_done() || frames.empty() || frames.size() > kMaxFrames) {
    return absl::DataLossError("a FRAMES message cannot be read");
  }
  return frames;
}

std::string EncodeHave(const std::vector<HaveEntry>& entries) {
  std::string out;
  for (const HaveEntry& entry : entries) {
    Append(entry.bucket, &out);
    Append(entry.size, &out);
    // Most receivers hold nothing.
    const bool none = std::all_of(entry.bitmap.begin(), entry.bitmap.end(),
                                  [](uint8_t b) { return b == 0; });
    const size_t length = none ? 0 : entry.bitmap.size();
    Append(static_cast<uint32_t>(length), &out);
    out.append(reinterpret_cast<const char*>(entry.bitmap.data()), length);
  }
  return out;
}

absl::StatusOr<std::vector<HaveEntry>> DecodeHave(absl::string_view payload) {
  std::vector<HaveEntry> entries;
  Cursor cursor(payload);
  while (cursor.ok() && !cursor.done()) {
    HaveEntry entry;
    entry.bucket = cursor.Number<uint64_t>();
    entry.size = cursor.Number<uint64_t>();
    const absl::string_view bits = cursor.Bytes(cursor.Number<uint32_t>());
    entry.bitmap.assign(bits.begin(), bits.end());
    entries.push_back(std::move(entry));
  }
  if (!cursor.ok()) return absl::DataLossError("a HAVE message cannot be read");
  return entries;
}

std::string EncodeStatus(const absl::Status& status) {
  std::string out;
  Append(static_cast<uint32_t>(status.code()), &out);
  AppendString(ReasonOf(status), &out);
  AppendString(EdgeOf(status).value_or(""), &out);
  AppendString(status.message(), &out);
  return out;
}

namespace {

// What comes after the status goes to `rest`, where anything may.
bool ReadStatus(absl::string_view payload, absl::Status* status,
                std::string* rest) {
  Cursor cursor(payload);
  const uint32_t code = cursor.Number<uint32_t>();
  const std::string reason = cursor.String();
  const std::string edge = cursor.String();
  const std::string message = cursor.String();
  if (rest != nullptr && code == 0) *rest = cursor.Rest();
  if (!cursor.ok_and_done() ||
      code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated))
    return false;
  *status =
      code == 0 ? absl::OkStatus()
      : reason.empty()
          ? absl::Status(static_cast<absl::StatusCode>(code), message)
          : MakeError(static_cast<absl::StatusCode>(code), reason, message);
  if (code != 0 && !edge.empty()) SetEdge(status, edge);
  return true;
}

}  // namespace

bool DecodeStatus(absl::string_view payload, absl::Status* status) {
  return ReadStatus(payload, status, nullptr);
}

std::string EncodePayloadAnswer(const absl::Status& status,
                                absl::string_view answer) {
  std::string out = EncodeStatus(status);
  if (status.ok()) out.append(answer.data(), answer.size());
  return out;
}

bool DecodePayloadAnswer(absl::string_view payload, absl::Status* status,
                         std::string* answer) {
  answer->clear();
  return ReadStatus(payload, status, answer);
}

}  // namespace tcp
}  // namespace transport
}  // namespace weightsync
