#ifndef WEIGHTSYNC_TRANSPORT_CUDA_CUDA_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_CUDA_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/cuda/copy_policy.h"
#include "transport/cuda/device_core.h"
#include "transport/cuda/device_handle.h"
#include "transport/cuda/import_cache.h"
#include "transport/cuda/launch_table.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {
namespace cuda {

// The memory of one GPU, in one process.
//
// A segment is one cudaMalloc, exported once. Beside it lies a small arena of
// host memory, its control: the generations, which a CPU must read, and the
// handle by which another process opens it. A ticket is a ticket of the
// control. Who imports it holds a lock on the control's file for as long as it
// has the memory open, so that its maker, who must not free what is open
// elsewhere, knows when it may, also when the importer dies. So the bytes of a
// segment outlive it, but not the process that made it.
//
// CUDA IPC knows no read-only mappings: writable() is false in who got a
// segment to read, and copies to it are refused, but a process that wants to
// harm can.
//
// Copies are what copy engines can do where that is contiguous and no digest is
// asked for, and one kernel launch for all the rest; packs are one launch for
// each 32 MiB (pack_part_bytes), however many pieces there are. Copies may also
// be between device memory and pinned host memory (PinHost), without a kernel.
class CudaMemory final : public Memory {
 public:
  struct Options {
    std::string device_uuid;  // empty: the only one
    // Left to others, beside what is allocated.
    int64_t keep_free_bytes = 64 << 20;
    // Told of frames of a pack after each part of this size.
    int64_t pack_part_bytes = 32 << 20;
    // From here on, contiguous copies go to the copy engines.
    int64_t copy_engine_bytes = kEngineBytesBesideWork;
    // How long the end waits for importers to close what was exported to them.
    absl::Duration importers_deadline = absl::Seconds(5);
    DeviceCore::Options core;
  };

  // `host` makes, exports and imports the controls; it outlives this. NOT_FOUND
  // (DEVICE_NOT_VISIBLE), FAILED_PRECONDITION (DRIVER_TOO_OLD, NO_DEVICE,
  // MIG_NO_IPC), RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Create(
      Memory* host, const Options& options);
  // Segments and imports do not outlive it.
  ~CudaMemory() override;

  MemoryKind kind() const override { return MemoryKind::kCuda; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override;
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override;
  void Withdraw(const MemoryTicket& ticket) override;
  // Besides what memory.h says: FAILED_PRECONDITION (SEGMENT_GONE), and the
  // errors of ImportCache.
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override;
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override;
  // In launches of its own, which write nothing.
  absl::Status DigestEach(absl::Span<const CopyTask> tasks,
                          const CopyOptions& options,
                          absl::Span<Digest> digests) override;
  absl::Status Pack(const PackRequest& request, PackResult* result) override;
  absl::StatusOr<std::vector<Digest>> DigestFrames(
      const FrameDigestRequest& request) override;
  absl::Status Read(const char* from, absl::Span<char> to) override;
  absl::Status Write(absl::Span<const char> from, char* to) override;

  // As Pack; `host` gets the same bytes, part by part, before on_frames tells
  // of them: pinned memory (PinHost). Null: nothing does.
  absl::Status PackTo(const PackRequest& request, char* host,
                      PackResult* result);

  // Host memory that copies may touch: registered with CUDA once, and not again
  // for each copy. Undone some time after the handle has gone.
  class PinnedHost {
   public:
    ~PinnedHost();

   private:
    friend class CudaMemory;
    PinnedHost(std::shared_ptr<DeviceCore> core, char* data,
               std::shared_ptr<const void> memory)
        : core_(std::move(core)), data_(data), memory_(std::move(memory)) {}
    const std::shared_ptr<DeviceCore> core_;
    char* const data_;
    std::shared_ptr<const void> memory_;
    std::shared_ptr<const void> owner_;
  };
  // `memory` is what [data, data + bytes) is mapped by. It is let go of when
  // the memory is not registered any more, and never where that fails: a copy
  // engine may still write to it.
  absl::StatusOr<std::unique_ptr<PinnedHost>> PinHost(
      char* data, int64_t bytes, bool writable,
      std::shared_ptr<const void> memory);

  // Allocations that trainers and engines have exported.
  ImportCache* imports() { return imports_.get(); }
  const std::shared_ptr<DeviceCore>& core() const { return core_; }
  const DeviceExporter& exporter() const { return *exporter_; }

  // For people: what this process has taken of the GPU's memory.
  struct Usage {
    int64_t context_bytes = 0;  // DeviceCore::context_bytes
    int64_t segments_bytes = 0;
    int64_t scratch_bytes = 0;  // tables of launches, digests
    int64_t free_bytes = 0;     // of the whole GPU
    int64_t total_bytes = 0;
  };
  absl::StatusOr<Usage> GetUsage();

 private:
  friend class CudaSegment;
  struct Allocation;
  class MadeHere;

  CudaMemory(Memory* host, const Options& options)
      : host_(host), options_(options) {}

  // May place the table's scales.
  absl::Status Run(LaunchTable* table, bool digests, const PackRequest* request,
                   char* host, std::vector<Digest>* frames,
                   const std::function<absl::Status(Lane*)>& before);
  // What a task reads is device memory; `owners` get what keeps it.
  absl::Status PinSource(const CopyTask& task,
                         std::vector<std::shared_ptr<const void>>* owners,
                         bool* host) const;
  absl::Status Transfer(char* device, char* host, int64_t bytes, bool to_host);

  Memory* const host_;
  const Options options_;
  std::shared_ptr<DeviceCore> core_;
  std::unique_ptr<DeviceExporter> exporter_;
  std::unique_ptr<ImportCache> imports_;
  std::shared_ptr<std::atomic<int64_t>> segments_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);
  // DigestInnerKey on the device.
  int16_t* inner_keys_ = nullptr;
};

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_CUDA_MEMORY_H_
