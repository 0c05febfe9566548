// GPUs for tests of a node: host memory under addresses that nobody can follow,
// as those of device agents are.

#ifndef WEIGHTSYNC_DAEMON_NODE_FAKE_GPUS_H_
#define WEIGHTSYNC_DAEMON_NODE_FAKE_GPUS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "transport/memory.h"
#include "transport/tcp/payload_channel.h"

namespace weightsync {
namespace daemon {
namespace testing {

// Takes what cuda::AgentMemory takes, and refuses the rest. Thread-safe.
class FakeGpus final : public transport::Memory {
 public:
  // Outlives it.
  explicit FakeGpus(transport::Memory* host) : host_(host) {}

  // From now on [data, data + bytes) is a trainer's memory on `device`.
  void SetTensors(const void* data, int64_t bytes, const std::string& device);
  // The trainers free their memory: other things may lie there.
  void ForgetTensors();
  // What it has is gone; what is made later is there.
  void Lose(const std::string& device);
  // The next copies to or from a GPU flip a bit of what they write.
  void DamageCopies(int count);
  // Ends of edges that carry bytes between GPUs of nodes of this process, and
  // host memory, as those of device agents do (transport/cuda/agent).
  transport::tcp::PayloadChannelFactory Channels();
  // From now on no new one can be made.
  void RefuseChannels();
  // A bit flips in every 4 KiB of what it has.
  void DamageSegments(const std::string& device);
  // Bytes that were copied between a GPU and host memory, or went over a
  // channel from or to host memory.
  int64_t crossed_bytes() const;
  // Bytes of its segments.
  int64_t device_bytes(const std::string& device) const;

  transport::MemoryKind kind() const override {
    return transport::MemoryKind::kHost;
  }
  absl::StatusOr<std::unique_ptr<transport::Segment>> Allocate(
      int64_t bytes, const transport::AllocateOptions& options) override;
  absl::StatusOr<transport::MemoryTicket> Export(
      const transport::Segment& segment,
      const transport::ExportOptions& options) override {
    return host_->Export(segment, options);
  }
  void Withdraw(const transport::MemoryTicket& ticket) override {
    host_->Withdraw(ticket);
  }
  absl::StatusOr<std::unique_ptr<transport::Segment>> Import(
      const transport::MemoryTicket& ticket, absl::Duration timeout) override {
    return host_->Import(ticket, timeout);
  }
  std::string DeviceOf(const char* address) const override;
  absl::Status Copy(absl::Span<const transport::CopyTask> tasks,
                    const transport::CopyOptions& options,
                    transport::Digest* digest) override;
  absl::Status Pack(const transport::PackRequest& request,
                    transport::PackResult* result) override;
  absl::StatusOr<std::vector<transport::Digest>> DigestFrames(
      const transport::FrameDigestRequest& request) override;
  absl::Status Read(const char* from, absl::Span<char> to) override;
  absl::Status Write(absl::Span<const char> from, char* to) override {
    return host_->Write(from, to);
  }

 private:
  class Channel;
  class GpuSegment;
  struct Range {
    int64_t bytes = 0;
    std::string device;
    char* real = nullptr;  // null: of a trainer, at its own address
    bool lost = false;
  };

  // Where the bytes are. An address as any other is answered as it is.
  absl::StatusOr<char*> Find(const char* address, std::string* device) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  transport::Memory* const host_;
  mutable absl::Mutex mutex_;
  std::map<const char*, Range> ranges_ ABSL_GUARDED_BY(mutex_);
  int damage_ ABSL_GUARDED_BY(mutex_) = 0;
  bool refuse_channels_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t crossed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_FAKE_GPUS_H_
