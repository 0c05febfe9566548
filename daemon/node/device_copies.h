// Copies of buckets between a GPU and host memory of this node's store.

#ifndef WEIGHTSYNC_DAEMON_NODE_DEVICE_COPIES_H_
#define WEIGHTSYNC_DAEMON_NODE_DEVICE_COPIES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "daemon/node/layouts.h"
#include "daemon/node/store.h"
#include "transport/digest.h"
#include "transport/landing.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {

// Digests of a bucket's frames by the GPU in whose memory it lies.
class DeviceFrameDigester final : public transport::FrameDigester {
 public:
  // `data` is the bucket's first byte there. `memory` outlives it. REQUIRES:
  // 0 <= bucket < layout->bucket_count().
  DeviceFrameDigester(std::shared_ptr<const NodeLayout> layout, int32_t bucket,
                      const char* data, transport::Memory* memory)
      : layout_(std::move(layout)),
        bucket_(bucket),
        data_(data),
        memory_(memory) {}

  // Errors of Memory::DigestFrames.
  absl::StatusOr<std::vector<transport::Digest>> DigestFrames(
      absl::Span<const uint32_t> frames) const override;

 private:
  const std::shared_ptr<const NodeLayout> layout_;
  const int32_t bucket_;
  const char* const data_;
  transport::Memory* const memory_;
};

// Thread-safe. Everything that is copied is digested where it arrives, and
// compared.
class DeviceCopies {
 public:
  // Both outlive it.
  DeviceCopies(Store* store, transport::Memory* memory)
      : store_(store), memory_(memory) {}

  // Those of `buckets` that lie on a GPU out of `reachable` alone, and of which
  // there is no copy, get one, which lasts as long as somebody else has the
  // update pinned.
  // `digest`: of a bucket of which the store does not know it yet. Blocks;
  // bounded by the deadlines of the device agents.
  //   The errors of Store::ReserveCopies and Memory::Copy; DATA_LOSS
  //   (DEVICE_STORE_DAMAGED).
  absl::Status ToHost(const std::shared_ptr<const NodeLayout>& layout,
                      const std::string& update_id,
                      const std::vector<int32_t>& buckets,
                      const std::vector<std::string>& reachable = {},
                      absl::optional<transport::Digest> digest = absl::nullopt);

  // Bytes between rooms, in parts, after each of which `part` is told how many
  // are there. `room`s are of one bucket; one of them is on a GPU.
  absl::Status Copy(absl::Span<const char> from, absl::Span<char> to,
                    const std::function<void(int64_t)>& part = nullptr);
  // Of what stands in a room on a GPU, by that GPU.
  absl::StatusOr<transport::Digest> DigestOnDevice(const NodeLayout& layout,
                                                   int32_t bucket,
                                                   const char* data);
  // DATA_LOSS (DEVICE_STORE_DAMAGED) unless both are the same.
  static absl::Status Compare(const std::string& update_id, int32_t bucket,
                              const transport::Digest& is,
                              const transport::Digest& should);

 private:
  Store* const store_;
  transport::Memory* const memory_;
  // Two that want the same copy make one.
  absl::Mutex mutex_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_DEVICE_COPIES_H_
