#include "transport/cuda/agent/agent_channel.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kShort = absl::Seconds(10);
// Staging buffers of one request.
constexpr int64_t kAtATime = 8;

}  // namespace

class AgentChannel final : public tcp::PayloadChannel {
 public:
  static absl::StatusOr<std::unique_ptr<PayloadChannel>> Make(
      AgentChannels* channels, const std::string& peer) {
    const absl::Status rested = channels->CheckRested();
    if (!rested.ok()) return rested;
    std::unique_ptr<AgentChannel> made(new AgentChannel(channels));
    made->epoch_ = made->agent()->epoch();
    if (made->epoch_ == 0) {
      return MakeError(absl::StatusCode::kUnavailable, "DEVICE_AGENT_LOST",
                       "the device agent is being started again");
    }
    const absl::StatusOr<uint64_t> id =
        made->agent()->NewChannel(made->epoch_, peer, kShort);
    if (!id.ok()) return id.status();
    made->id_ = *id;
    return std::unique_ptr<PayloadChannel>(std::move(made));
  }
  ~AgentChannel() override {
    if (id_ != 0) (void)agent()->EndChannel(epoch_, id_, finished_, kShort);
    if (buffer_ != nullptr) {
      (void)agent()->UnmapHost(epoch_, buffer_host_, kShort);
      munmap(buffer_, buffer_bytes());
    }
  }

  absl::StatusOr<std::string> Offer() override {
    return agent()->ChannelOffer(epoch_, id_, kShort);
  }
  absl::StatusOr<Acceptance> Accept(absl::string_view offer) override {
    return agent()->ChannelAccept(epoch_, id_, std::string(offer), kShort);
  }
  absl::StatusOr<bool> Answered(absl::string_view answer) override {
    return agent()->ChannelAnswered(epoch_, id_, std::string(answer), kShort);
  }
  absl::Status Connect(absl::Duration timeout,
                       const Stopped& stopped) override {
    const absl::Status status =
        agent()->ChannelConnect(epoch_, id_, timeout, stopped);
    // Not of one that was called off.
    if (!status.ok() && !stopped()) channels_->NoteFailure(status);
    return status;
  }
  absl::Status Send(absl::Span<const absl::Span<const char>> parts,
                    absl::Duration timeout, const Stopped& stopped) override {
    return Move<const char>(parts, true, timeout, stopped);
  }
  absl::Status Receive(absl::Span<const absl::Span<char>> parts,
                       absl::Duration timeout,
                       const Stopped& stopped) override {
    return Move<char>(parts, false, timeout, stopped);
  }
  void Finish() override { finished_ = true; }

 private:
  explicit AgentChannel(AgentChannels* channels) : channels_(channels) {}
  DeviceAgent* agent() const { return channels_->agent_; }
  int64_t buffer_bytes() const { return channels_->staging_bytes_; }

  // What does not lie in memory that the agent has.
  struct Bounced {
    char* here;
    int64_t at, bytes;
  };

  // Several staging buffers at a time, so that the agents copy one piece while
  // they move another; no more than one where bytes have to lie in the buffer
  // that both have. Whole ones: both agents cut at the same bytes.
  template <typename Byte>
  absl::Status Move(absl::Span<const absl::Span<Byte>> parts, bool send,
                    absl::Duration timeout, const Stopped& stopped) {
    std::vector<AgentPart> piece;
    std::vector<Bounced> bounced;
    int64_t bytes = 0, in_buffer = 0;
    const auto flush = [&]() -> absl::Status {
      if (bytes == 0) return absl::OkStatus();
      absl::Status status =
          agent()->ChannelMove(epoch_, id_, send, piece, timeout, stopped);
      // Until its end a copy engine may write to what was to be received into.
      if (!status.ok() && !send) agent()->AwaitEnd(epoch_, status);
      if (status.ok() && !send) {
        for (const Bounced& part : bounced)
          memcpy(part.here, buffer_ + part.at, part.bytes);
      }
      piece.clear();
      bounced.clear();
      bytes = in_buffer = 0;
      return status;
    };
    for (absl::Span<Byte> part : parts) {
      while (!part.empty()) {
        const absl::Span<Byte> head = part.subspan(
            0, static_cast<size_t>(buffer_bytes() - bytes % buffer_bytes()));
        part.remove_prefix(head.size());
        const int64_t size = static_cast<int64_t>(head.size());
        const absl::StatusOr<absl::optional<AgentPart>> found =
            channels_->Find(head.data(), size, epoch_);
        if (!found.ok()) return found.status();
        AgentPart placed;
        if (found->has_value()) {
          placed = **found;
        } else {
          absl::Status status = MakeBuffer();
          if (!status.ok()) return status;
          placed.place = {AgentPlace::Kind::kHost, buffer_host_, in_buffer};
          placed.bytes = size;
          if (send) {
            memcpy(buffer_ + in_buffer, head.data(), head.size());
          } else {
            bounced.push_back(
                {const_cast<char*>(head.data()), in_buffer, size});
          }
          in_buffer += size;
        }
        piece.push_back(placed);
        bytes += size;
        if (bytes % buffer_bytes() == 0 &&
            (in_buffer > 0 || bytes >= kAtATime * buffer_bytes())) {
          absl::Status status = flush();
          if (!status.ok()) return status;
        }
      }
    }
    return flush();
  }

  absl::Status MakeBuffer() {
    if (buffer_ != nullptr) return absl::OkStatus();
    const int64_t bytes = buffer_bytes();
    const int fd = memfd_create("weightsync_channel", MFD_CLOEXEC);
    void* data = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, bytes) == 0) {
      data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (data == MAP_FAILED) {
      const int error = errno;
      if (fd >= 0) close(fd);
      return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                            "HOST_MAP_FAILED", "a channel's buffer", error);
    }
    const absl::StatusOr<uint64_t> host =
        agent()->MapHost(epoch_, fd, 0, bytes, kShort);
    close(fd);
    if (!host.ok()) {
      munmap(data, bytes);
      return host.status();
    }
    buffer_ = static_cast<char*>(data);
    buffer_host_ = *host;
    return absl::OkStatus();
  }

  AgentChannels* const channels_;
  uint64_t epoch_ = 0;
  uint64_t id_ = 0;
  bool finished_ = false;
  char* buffer_ = nullptr;
  uint64_t buffer_host_ = 0;
};

absl::Status AgentChannels::CheckRested() const {
  absl::MutexLock lock(&mutex_);
  const absl::Duration left = failed_at_ + rest_ - absl::Now();
  if (left <= absl::ZeroDuration()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kUnavailable, "CHANNEL_RESTS",
      absl::StrCat("a channel did not connect (", ReasonOf(failure_), ": ",
                   failure_.message(), "); tried again in ",
                   absl::FormatDuration(left)));
}

void AgentChannels::NoteFailure(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_at_ = absl::Now();
  failure_ = status;
}

absl::StatusOr<absl::optional<AgentPart>> AgentChannels::Find(const char* data,
                                                              int64_t bytes,
                                                              uint64_t epoch) {
  if (memory_ == nullptr) return absl::optional<AgentPart>();
  const absl::StatusOr<absl::optional<AgentPlace>> place =
      memory_->PlaceForChannel(agent_, epoch, data, bytes);
  if (!place.ok()) return place.status();
  if (!place->has_value()) return absl::optional<AgentPart>();
  AgentPart part;
  part.place = **place;
  part.bytes = bytes;
  return absl::optional<AgentPart>(part);
}

tcp::PayloadChannelFactory AgentChannels::Factory() {
  return [this](const std::string& peer) {
    return AgentChannel::Make(this, peer);
  };
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
