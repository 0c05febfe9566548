// What a daemon and its device agents say to each other, over a socket that
// nobody else has. Both are one program, started together: the format has no
// versions.
//
// A message is a header and a payload; one may bring a file descriptor along.
// Each request has a number, and its answers have the same.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_WIRE_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_WIRE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {
namespace cuda {

enum class AgentMessage : uint32_t {
  kDevices = 1,  // which GPUs there are; instead of kConfigure
  kConfigure,
  kPing,
  kUsage,
  kOpen,
  kClose,
  kMapHost,
  kUnmapHost,
  kPack,
  kCopy,
  kMakeStore,  // memory of the GPU that lasts
  kFreeStore,
  kDigest,
  kRead,  // a few bytes of GPU memory
  kChannelNew,
  kChannelOffer,
  kChannelAccept,
  kChannelAnswered,
  kChannelConnect,
  kChannelMove,
  kChannelStop,  // what waits on it is to end; not answered
  kChannelEnd,
  // Answers.
  kFrames,  // some frames of a kPack are in place
  kDone,    // the last: a status, then what was asked for
};

// Requests that end something, or give it back.
inline bool GivesBack(AgentMessage type) {
  return type == AgentMessage::kClose || type == AgentMessage::kUnmapHost ||
         type == AgentMessage::kFreeStore || type == AgentMessage::kChannelEnd;
}

// Numbers and strings, one after another.
class AgentWriter {
 public:
  template <typename T>
  AgentWriter& Put(const T& value) {
    static_assert(std::is_trivially_copyable<T>::value, "plain values");
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  AgentWriter& PutString(absl::string_view text) {
    Put(static_cast<uint64_t>(text.size()));
    bytes_.append(text.data(), text.size());
    return *this;
  }
  // With its reason.
  AgentWriter& PutStatus(const absl::Status& status);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// After something was not there, everything is zero and ok() false.
class AgentReader {
 public:
  explicit AgentReader(absl::string_view bytes) : left_(bytes) {}
  template <typename T>
  T Get() {
    static_assert(std::is_trivially_copyable<T>::value, "plain values");
    T value = {};
    if (left_.size() < sizeof(T)) {
      ok_ = false;
      left_ = {};
      return value;
    }
    memcpy(&value, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return value;
  }
  std::string GetString();
  absl::Status GetStatus();
  bool ok() const { return ok_; }
  bool done() const { return ok_ && left_.empty(); }

 private:
  absl::string_view left_;
  bool ok_ = true;
};

struct AgentPacket {
  AgentMessage type = AgentMessage::kPing;
  uint64_t id = 0;
  std::string payload;
  UniqueFd fd;
};

// Blocking; for one thread at a time on each side. UNAVAILABLE when the other
// end is gone, DEADLINE_EXCEEDED when it takes nothing for `timeout`.
absl::Status SendPacket(int socket, AgentMessage type, uint64_t id,
                        absl::string_view payload, int fd = -1,
                        absl::Duration timeout = absl::Seconds(10));
absl::StatusOr<AgentPacket> ReceivePacket(int socket);

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_AGENT_AGENT_WIRE_H_
