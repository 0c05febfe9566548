// An engine's memory: what it allocates and imports on the host, and its own
// parameters on a GPU, which others open as a trainer's.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "transport/conformance/memory_conformance.h"
#include "transport/cuda/late_cudart.h"
#include "transport/cuda/live_memory.h"
#include "transport/cuda/process_gpu.h"
#include "transport/cuda/segment_control.h"
#include "transport/error.h"
#include "transport/host/host_memory.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kTensorBytes = 4096;

// Of a GPU, until it ends.
class Allocations {
 public:
  ~Allocations() {
    for (void* data : all_) EXPECT_EQ(cudaFree(data), cudaSuccess);
  }
  char* Make(int64_t bytes) {
    void* data = nullptr;
    if (cudaMalloc(&data, static_cast<size_t>(bytes)) != cudaSuccess)
      return nullptr;
    all_.push_back(data);
    const std::string zeros(static_cast<size_t>(bytes), '\0');
    EXPECT_EQ(
        cudaMemcpy(data, zeros.data(), zeros.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
    return static_cast<char*>(data);
  }

 private:
  std::vector<void*> all_;
};

// An engine with one tensor on its GPU.
class Engine {
 public:
  Engine() : fds_(Start()), host_(&pool_, fds_.get(), {}), live_(&host_) {
    const absl::Status found = FindCudart();
    EXPECT_TRUE(found.ok()) << found;
    const absl::Status added =
        live_.AddRange(gpu_.Make(kTensorBytes), kTensorBytes);
    EXPECT_TRUE(added.ok()) << added;
  }
  HostMemory* host() { return &host_; }
  LiveMemory* live() { return &live_; }
  Allocations* gpu() { return &gpu_; }

 private:
  static std::unique_ptr<FdServer> Start() {
    static std::atomic<int> counter{0};
    auto server = FdServer::Start(
        absl::StrCat(getenv("GPU_SIM_DIR"), "/live_", getpid(), "_", counter++),
        FdServer::Options());
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  }

  Allocations gpu_;
  CopyPool pool_{1};
  const std::unique_ptr<FdServer> fds_;
  HostMemory host_;
  LiveMemory live_;
};

// ---- On the host ----

class HostFixture : public MemoryFixture {
 public:
  Memory* memory() override { return engine_.live(); }
  Memory* importer() override { return other_.live(); }

 private:
  Engine engine_, other_;
};

// ---- On a GPU ----

// LiveMemory makes no GPU memory: here its ranges stand for segments, and are
// made known as a daemon makes a trainer's known, by a control.
class RangeSegment final : public Segment {
 public:
  RangeSegment(char* data, int64_t bytes, std::unique_ptr<Segment> control)
      : data_(data), bytes_(bytes), control_(std::move(control)) {}
  MemoryKind kind() const override { return MemoryKind::kCuda; }
  char* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }
  bool writable() const override { return true; }
  int generation_slots() const override { return control_->generation_slots(); }
  uint64_t Generation(int slot) const override {
    return control_->Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return control_->AdvanceGeneration(slot);
  }
  const Segment& control() const { return *control_; }

 private:
  char* const data_;
  const int64_t bytes_;
  const std::unique_ptr<Segment> control_;
};

class LiveRanges final : public Memory {
 public:
  explicit LiveRanges(Engine* engine) : engine_(engine) {}

  MemoryKind kind() const override { return MemoryKind::kCuda; }
  absl::StatusOr<std::unique_ptr<Segment>> Allocate(
      int64_t bytes, const AllocateOptions& options) override {
    // Of a size that cannot be no engine has a tensor.
    if (bytes <= 0 || bytes > int64_t{1} << 40)
      return engine_->host()->Allocate(bytes, options);
    auto control = engine_->host()->Allocate(sizeof(SegmentControl), options);
    if (!control.ok()) return control.status();
    char* const data = engine_->gpu()->Make(bytes);
    if (data == nullptr) return absl::ResourceExhaustedError("cudaMalloc");
    const absl::Status added = engine_->live()->AddRange(data, bytes);
    if (!added.ok()) return added;
    const auto gpu = ProcessGpu::Of(data);
    if (!gpu.ok()) return gpu.status();
    const auto place = (*gpu)->Describe(data, bytes);
    if (!place.ok()) return place.status();
    WriteSegmentControl(place->handle, bytes, control->get());
    return std::unique_ptr<Segment>(
        std::make_unique<RangeSegment>(data, bytes, *std::move(control)));
  }
  absl::StatusOr<MemoryTicket> Export(const Segment& segment,
                                      const ExportOptions& options) override {
    if (!options.read_only) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "READ_ONLY",
                       "others copy out of it");
    }
    auto ticket = engine_->host()->Export(
        static_cast<const RangeSegment&>(segment).control(), options);
    if (!ticket.ok()) return ticket;
    ticket->kind = MemoryKind::kCuda;
    ticket->bytes = segment.bytes();
    return ticket;
  }
  void Withdraw(const MemoryTicket& ticket) override {
    MemoryTicket control = ticket;
    control.kind = MemoryKind::kHost;
    engine_->host()->Withdraw(control);
  }
  absl::StatusOr<std::unique_ptr<Segment>> Import(
      const MemoryTicket& ticket, absl::Duration timeout) override {
    return engine_->live()->Import(ticket, timeout);
  }
  absl::Status Copy(absl::Span<const CopyTask> tasks,
                    const CopyOptions& options, Digest* digest) override {
    return engine_->live()->Copy(tasks, options, digest);
  }
  absl::Status Pack(const PackRequest& request, PackResult* result) override {
    return engine_->live()->Pack(request, result);
  }
  absl::Status Read(const char* from, absl::Span<char> to) override {
    return engine_->live()->Read(from, to);
  }
  absl::Status Write(absl::Span<const char> from, char* to) override {
    return engine_->live()->Write(from, to);
  }

 private:
  Engine* const engine_;
};

class GpuFixture : public MemoryFixture {
 public:
  Memory* memory() override { return &memory_; }
  Memory* importer() override { return other_.live(); }
  bool others_may_write() const override { return false; }
  // That is done by those who send.
  bool packs() const override { return false; }

 private:
  Engine engine_, other_;
  LiveRanges memory_{&engine_};
};

INSTANTIATE_TEST_SUITE_P(
    LiveHost, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<HostFixture>();
    }));
INSTANTIATE_TEST_SUITE_P(
    LiveGpu, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<GpuFixture>();
    }));

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
