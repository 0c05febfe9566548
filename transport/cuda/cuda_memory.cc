#include "transport/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/kernels.h"
#include "transport/cuda/segment_control.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

// What a segment is rounded up to by the driver, so that sums are right.
int64_t Rounded(int64_t bytes) { return (bytes + 511) / 512 * 512; }

}  // namespace

// The memory of a segment that was made here, and its control.
struct CudaMemory::Allocation {
  char* data = nullptr;
  int64_t bytes = 0;
  std::unique_ptr<Segment> control;
  int lock_fd = -1;
  std::shared_ptr<DeviceCore> core;
  std::shared_ptr<std::atomic<int64_t>> segments_bytes;

  // In place of a destructor: it goes when nobody has it open any more. (A
  // deleter that held the core itself would keep it for as long as there is a
  // weak_ptr.)
  static void Retire(Allocation* old) {
    const std::shared_ptr<DeviceCore> core = std::move(old->core);
    core->RemoveRange(old->data);
    reinterpret_cast<SegmentControl*>(old->control->data())->retired = 1;
    core->LaterWhen(
        // A lock that was got is kept until the end.
        [fd = old->lock_fd] { return flock(fd, LOCK_EX | LOCK_NB) == 0; },
        [old] {
          const absl::Status status =
              CheckCuda(cudaFree(old->data), "cudaFree");
          if (!status.ok()) LOG(WARNING) << status;
          *old->segments_bytes -= Rounded(old->bytes);
          close(old->lock_fd);
          delete old;
        });
  }
};

// What was made in this process, for whoever imports it in this process.
class CudaMemory::MadeHere {
 public:
  using Key = std::pair<uint64_t, uint64_t>;  // address, buffer id

  static void Add(const Key& key, const std::shared_ptr<Allocation>& made) {
    absl::MutexLock lock(&mutex());
    for (auto at = all().begin(); at != all().end();)
      at = at->second.expired() ? all().erase(at) : std::next(at);
    all()[key] = made;
  }
  static std::shared_ptr<Allocation> Find(uint64_t base, uint64_t buffer_id) {
    absl::MutexLock lock(&mutex());
    const auto at = all().find({base, buffer_id});
    return at == all().end() ? nullptr : at->second.lock();
  }

 private:
  static absl::Mutex& mutex() {
    static absl::Mutex* const mutex = new absl::Mutex;
    return *mutex;
  }
  static std::map<Key, std::weak_ptr<Allocation>>& all() {
    static auto* const all = new std::map<Key, std::weak_ptr<Allocation>>;
    return *all;
  }
};

class CudaSegment final : public Segment {
 public:
  // Either was made here (also when it was imported here), or is another's.
  std::shared_ptr<CudaMemory::Allocation> made;
  std::shared_ptr<const ImportedAllocation> imported;
  std::unique_ptr<Segment> imported_control;
  int lock_fd = -1;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  bool writable_ = true;

  ~CudaSegment() override {
    if (lock_fd >= 0) {
      // The lock goes when the memory is closed, not before: it is what keeps
      // its maker from freeing it.
      std::shared_ptr<DeviceCore> core = std::move(core_);
      imported.reset();
      core->Later([fd = lock_fd] { close(fd); });
    }
  }
  MemoryKind kind() const override { return MemoryKind::kCuda; }
  std::string device_uuid() const override { return core_->device().uuid; }
  char* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }
  bool writable() const override { return writable_; }
  int generation_slots() const override { return control().generation_slots(); }
  uint64_t Generation(int slot) const override {
    return control().Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return (made != nullptr ? *made->control : *imported_control)
        .AdvanceGeneration(slot);
  }

  const Segment& control() const {
    return made != nullptr ? *made->control : *imported_control;
  }
  std::shared_ptr<DeviceCore> core_;
};

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Create(
    Memory* host, const Options& options) {
  const absl::StatusOr<DeviceInfo> device = FindDevice(options.device_uuid);
  if (!device.ok()) return device.status();
  std::unique_ptr<CudaMemory> memory(new CudaMemory(host, options));
  absl::StatusOr<std::shared_ptr<DeviceCore>> core =
      DeviceCore::Create(*device, options.core);
  if (!core.ok()) return core.status();
  memory->core_ = *std::move(core);
  absl::StatusOr<std::unique_ptr<DeviceExporter>> exporter =
      DeviceExporter::Create(*device);
  if (!exporter.ok()) return exporter.status();
  memory->exporter_ = *std::move(exporter);
  const std::vector<int16_t> keys = InnerKeys();
  const size_t key_bytes = keys.size() * sizeof(keys[0]);
  absl::Status status = CheckCuda(
      cudaMalloc(reinterpret_cast<void**>(&memory->inner_keys_), key_bytes),
      "cudaMalloc");
  if (status.ok()) {
    status = CheckCuda(cudaMemcpy(memory->inner_keys_, keys.data(), key_bytes,
                                  cudaMemcpyHostToDevice),
                       "cudaMemcpy");
  }
  if (!status.ok()) return status;
  memory->imports_ = std::make_unique<ImportCache>(memory->core_);
  return memory;
}

CudaMemory::~CudaMemory() {
  if (core_ == nullptr) return;
  core_->Finish(options_.importers_deadline);
  if (core_->Use().ok()) cudaFree(inner_keys_);
}

absl::StatusOr<std::unique_ptr<Segment>> CudaMemory::Allocate(
    int64_t bytes, const AllocateOptions& options) {
  if (bytes <= 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SIZE",
                     absl::StrCat("a segment of ", bytes, " bytes"));
  }
  absl::Status status = core_->Use();
  if (!status.ok()) return status;
  size_t free = 0, total = 0;
  status = CheckCuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (!status.ok()) return status;
  const auto no_memory = [&](absl::string_view more) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "NO_MEMORY_FOR_ARENA",
        absl::StrCat("'", options.name, "' needs ", bytes, " bytes of ",
                     core_->device().uuid, ", which has ", free, " free of ",
                     total, " and keeps ", options_.keep_free_bytes,
                     " for others", more,
                     ": give the engine a smaller part of the GPU, or the "
                     "daemon less (--gpu_slots, --bucket_bytes, "
                     "--device_store_bytes)"));
  };
  if (bytes > static_cast<int64_t>(free) - options_.keep_free_bytes)
    return no_memory("");

  auto made = std::make_unique<Allocation>();
  made->bytes = bytes;
  made->core = core_;
  absl::StatusOr<std::unique_ptr<Segment>> control =
      host_->Allocate(sizeof(SegmentControl), options);
  if (!control.ok()) return control.status();
  made->control = *std::move(control);
  made->lock_fd = OpenSegmentControl(*made->control).release();
  if (made->lock_fd < 0) {
    return MakeErrnoError(absl::StatusCode::kInternal, "LOCK_FAILED",
                          "the control of a segment", errno);
  }
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error != cudaSuccess) {
    status = CheckCuda(error, "cudaMalloc");
    close(made->lock_fd);
    return error == cudaErrorMemoryAllocation
               ? no_memory(", in pieces that are too small")
               : status;
  }
  made->data = static_cast<char*>(data);
  // From here on it is given back by whoever lets it go last.
  made->segments_bytes = segments_bytes_;
  *made->segments_bytes += Rounded(bytes);
  const std::shared_ptr<Allocation> shared(made.release(), &Allocation::Retire);
  core_->AddRange(data, bytes, DeviceCore::Place::kDevice, true, shared);
  {
    // Fresh memory holds what others left.
    absl::StatusOr<DeviceCore::LaneLease> lane = core_->TakeLane();
    if (!lane.ok()) return lane.status();
    status = CheckCuda(cudaMemsetAsync(data, 0, bytes, (*lane)->stream),
                       "cudaMemsetAsync");
    if (status.ok()) status = core_->Wait(*lane->get());
    if (!status.ok()) return status;
  }
  const absl::StatusOr<DevicePlace> place = exporter_->Describe(data, bytes);
  if (!place.ok()) return place.status();
  WriteSegmentControl(place->handle, bytes, shared->control.get());
  MadeHere::Add({place->handle.base, place->handle.buffer_id}, shared);

  auto segment = std::make_unique<CudaSegment>();
  segment->made = shared;
  segment->data_ = shared->data;
  segment->bytes_ = bytes;
  segment->core_ = core_;
  return std::unique_ptr<Segment>(std::move(segment));
}

absl::StatusOr<MemoryTicket> CudaMemory::Export(const Segment& segment,
                                                const ExportOptions& options) {
  if (segment.kind() != MemoryKind::kCuda) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WRONG_MEMORY_KIND",
                     "this segment is not GPU memory");
  }
  const auto& found = static_cast<const CudaSegment&>(segment);
  if (found.made == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_EXPORTABLE",
                     "what another process made is that process's to export");
  }
  if (!found.writable() && !options.read_only) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "READ_ONLY",
                     "this segment was given to be read only");
  }
  absl::StatusOr<MemoryTicket> ticket =
      host_->Export(*found.made->control, options);
  if (!ticket.ok()) return ticket.status();
  ticket->kind = MemoryKind::kCuda;
  ticket->bytes = segment.bytes();
  return ticket;
}

void CudaMemory::Withdraw(const MemoryTicket& ticket) {
  MemoryTicket control = ticket;
  control.kind = MemoryKind::kHost;
  host_->Withdraw(control);
}

absl::StatusOr<std::unique_ptr<Segment>> CudaMemory::Import(
    const MemoryTicket& ticket, absl::Duration timeout) {
  if (ticket.kind != MemoryKind::kCuda) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WRONG_MEMORY_KIND",
                     "this ticket is not for GPU memory");
  }
  MemoryTicket control_ticket = ticket;
  control_ticket.kind = MemoryKind::kHost;
  control_ticket.bytes = sizeof(SegmentControl);
  absl::StatusOr<std::unique_ptr<Segment>> control =
      host_->Import(control_ticket, timeout);
  if (!control.ok()) return control.status();
  const absl::StatusOr<DeviceHandle> handle =
      ReadSegmentControl(**control, ticket.bytes);
  if (!handle.ok()) return handle.status();
  const int64_t bytes =
      reinterpret_cast<const SegmentControl*>((*control)->data())->bytes;

  auto segment = std::make_unique<CudaSegment>();
  segment->writable_ = !ticket.read_only;
  segment->core_ = core_;
  absl::StatusOr<UniqueFd> lock = LockSegmentControl(**control);
  if (!lock.ok()) return lock.status();
  segment->lock_fd = lock->release();
  if (handle->exporter == ThisProcess()) {
    // CUDA opens nothing in the process that made it; here the address is good
    // as it is.
    segment->made = MadeHere::Find(handle->base, handle->buffer_id);
    if (segment->made == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "SEGMENT_GONE",
                       "this process has given the segment back");
    }
    close(segment->lock_fd);
    segment->lock_fd = -1;
    segment->data_ = segment->made->data;
    segment->bytes_ = bytes;
    if (segment->made->core != core_) {
      core_->AddRange(segment->data_, bytes, DeviceCore::Place::kDevice,
                      segment->writable_, segment->made);
    }
  } else {
    absl::StatusOr<std::shared_ptr<const ImportedAllocation>> imported =
        imports_->Acquire(*handle, segment->writable_);
    if (!imported.ok()) return imported.status();
    segment->imported = *std::move(imported);
    segment->data_ = segment->imported->data;
    segment->bytes_ = bytes;
  }
  segment->imported_control = *std::move(control);
  return std::unique_ptr<Segment>(std::move(segment));
}

// ---- Copies ----

namespace {

int64_t Aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

absl::Status CudaMemory::Run(LaunchTable* launch_table, bool digests,
                             const PackRequest* request, char* host,
                             std::vector<Digest>* frames,
                             const std::function<absl::Status(Lane*)>& before) {
  LaunchTable& table = *launch_table;
  // The second goes to the host with one part while the first packs the next.
  absl::StatusOr<std::vector<DeviceCore::LaneLease>> leases =
      core_->TakeLanes(host != nullptr ? 2 : 1);
  if (!leases.ok()) return leases.status();
  Lane* const lane = leases->front().get();
  Lane* const to_host = leases->back().get();
  const bool told =
      request != nullptr && (request->on_frames != nullptr || host != nullptr);
  cudaStream_t const stream = lane->stream;
  absl::Status status = before != nullptr ? before(lane) : absl::OkStatus();
  if (!status.ok()) return status;
  const int64_t copies_bytes =
      static_cast<int64_t>(table.copies.size() * sizeof(DeviceCopy));
  const int64_t units_bytes =
      static_cast<int64_t>(table.units.size() * sizeof(DeviceUnit));
  const int64_t digests_bytes =
      digests ? static_cast<int64_t>(table.frames * sizeof(Digest)) : 0;
  // Copies, then units, then digests, at the same places on both sides; and
  // what scales are computed from. The scales are the device's alone.
  const int64_t blocks_at = Aligned(copies_bytes + units_bytes + digests_bytes);
  const int64_t scales_bytes =
      static_cast<int64_t>(table.scales.size() * sizeof(DeviceScale));
  const int64_t scale_units_bytes =
      static_cast<int64_t>(table.scale_units.size() * sizeof(ScaleUnit));
  const int64_t blocks_bytes = scales_bytes + scale_units_bytes;
  const int64_t floats_at = Aligned(blocks_at + blocks_bytes);
  const int64_t floats_bytes =
      table.scale_count * static_cast<int64_t>(sizeof(float));
  const int64_t all = blocks_at + blocks_bytes;
  if (all > 0) {
    status = core_->Reserve(lane, all, floats_at + floats_bytes);
    if (!status.ok()) return status;
    if (blocks_bytes > 0) {
      char* const floats = lane->device + floats_at;
      PlaceScales(reinterpret_cast<float*>(floats), &table);
      memcpy(lane->host + blocks_at, table.scales.data(), scales_bytes);
      memcpy(lane->host + blocks_at + scales_bytes, table.scale_units.data(),
             scale_units_bytes);
      status = CheckCuda(
          cudaMemcpyAsync(lane->device + blocks_at, lane->host + blocks_at,
                          blocks_bytes, cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync of a launch's table");
      if (status.ok()) {
        status = CheckCuda(cudaMemsetAsync(floats, 0, floats_bytes, stream),
                           "cudaMemsetAsync");
      }
      ScaleLaunch scales = {};
      scales.scales =
          reinterpret_cast<const DeviceScale*>(lane->device + blocks_at);
      scales.units = reinterpret_cast<const ScaleUnit*>(
          lane->device + blocks_at + scales_bytes);
      scales.unit_count = static_cast<int64_t>(table.scale_units.size());
      if (status.ok()) {
        status = CheckCuda(
            static_cast<cudaError_t>(LaunchBlockLargest(scales, stream)),
            "the scale kernel");
      }
      if (status.ok()) {
        status = CheckCuda(
            static_cast<cudaError_t>(LaunchBlockScale(scales, stream)),
            "the scale kernel");
      }
      if (!status.ok()) return status;
    }
    memcpy(lane->host, table.copies.data(), copies_bytes);
    memcpy(lane->host + copies_bytes, table.units.data(), units_bytes);
    status = CheckCuda(
        cudaMemcpyAsync(lane->device, lane->host, copies_bytes + units_bytes,
                        cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync of a launch's table");
    if (!status.ok()) return status;
  }
  char* const device_digests = lane->device + copies_bytes + units_bytes;
  const Digest* const host_digests =
      reinterpret_cast<const Digest*>(lane->host + copies_bytes + units_bytes);
  if (digests_bytes > 0) {
    status =
        CheckCuda(cudaMemsetAsync(device_digests, 0, digests_bytes, stream),
                  "cudaMemsetAsync");
    if (!status.ok()) return status;
  }
  CopyLaunch launch = {};
  launch.copies = reinterpret_cast<const DeviceCopy*>(lane->device);
  launch.unit_bytes = table.unit_bytes;
  launch.frame_bytes = table.frame_bytes;
  launch.digests =
      digests ? reinterpret_cast<unsigned long long*>(  // NOLINT: CUDA's type
                    device_digests)
              : nullptr;
  launch.inner_keys = inner_keys_;

  // Parts that end where frames do. What is not packed is one part.
  struct Part {
    int64_t first_frame, last_frame;
  };
  std::vector<Part> parts;
  const int64_t part_frames =
      table.frame_bytes == 0
          ? table.frames
          : std::max<int64_t>(1, options_.pack_part_bytes / table.frame_bytes);
  for (int64_t frame = 0; frame < table.frames; frame += part_frames)
    parts.push_back({frame, std::min(table.frames, frame + part_frames)});
  size_t unit = 0;
  const size_t units = table.units.size();
  for (size_t i = 0; i < parts.size(); ++i) {
    size_t end = units;
    if (i + 1 < parts.size()) {
      const int64_t limit =
          parts[i].last_frame * (table.frame_bytes / table.unit_bytes);
      end = unit;
      while (end < units && table.units[end].place < limit) ++end;
    }
    launch.units =
        reinterpret_cast<const DeviceUnit*>(lane->device + copies_bytes) + unit;
    launch.unit_count = static_cast<int64_t>(end - unit);
    unit = end;
    status = CheckCuda(static_cast<cudaError_t>(LaunchCopy(launch, stream)),
                       "the copy kernel");
    if (!status.ok()) return status;
    if (digests_bytes > 0) {
      const int64_t at =
          copies_bytes + units_bytes +
          parts[i].first_frame * static_cast<int64_t>(sizeof(Digest));
      status = CheckCuda(
          cudaMemcpyAsync(
              lane->host + at, lane->device + at,
              (parts[i].last_frame - parts[i].first_frame) * sizeof(Digest),
              cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync of digests");
      if (!status.ok()) return status;
    }
    if (!told) continue;
    const absl::StatusOr<cudaEvent_t> packed = core_->Event(lane, i);
    if (!packed.ok()) return packed.status();
    status = CheckCuda(cudaEventRecord(*packed, stream), "cudaEventRecord");
    if (!status.ok()) return status;
    if (host == nullptr) continue;
    const absl::StatusOr<cudaEvent_t> copied = core_->Event(to_host, i);
    if (!copied.ok()) return copied.status();
    status = CheckCuda(cudaStreamWaitEvent(to_host->stream, *packed, 0),
                       "cudaStreamWaitEvent");
    if (!status.ok()) return status;
    const int64_t begin = parts[i].first_frame * table.frame_bytes;
    const int64_t bytes = std::min(request->bucket_bytes,
                                   parts[i].last_frame * table.frame_bytes) -
                          begin;
    status =
        CheckCuda(cudaMemcpyAsync(host + begin, request->bucket + begin, bytes,
                                  cudaMemcpyDeviceToHost, to_host->stream),
                  "cudaMemcpyAsync to the host");
    if (!status.ok()) return status;
    status =
        CheckCuda(cudaEventRecord(*copied, to_host->stream), "cudaEventRecord");
    if (!status.ok()) return status;
  }
  if (told) {
    for (size_t i = 0; i < parts.size(); ++i) {
      // Its digests are there before its bytes are on the host.
      const absl::StatusOr<cudaEvent_t> event = core_->Event(to_host, i);
      if (!event.ok()) return event.status();
      status = core_->WaitEvent(*event);
      if (!status.ok()) return status;
      const Part part = parts[i];
      if (request->on_frames == nullptr) continue;
      request->on_frames(
          part.first_frame, part.last_frame,
          absl::MakeConstSpan(host_digests + part.first_frame,
                              part.last_frame - part.first_frame));
    }
  }
  status = core_->Wait(*lane);
  if (status.ok() && frames != nullptr && digests_bytes > 0)
    frames->assign(host_digests, host_digests + table.frames);
  return status;
}

absl::Status CudaMemory::PinSource(
    const CopyTask& task, std::vector<std::shared_ptr<const void>>* owners,
    bool* host) const {
  const auto pin = [&](const char* pointer, int64_t bytes) -> absl::Status {
    const absl::StatusOr<DeviceCore::Pinned> pinned =
        core_->Pin(pointer, bytes, false);
    if (!pinned.ok()) return pinned.status();
    *host = *host || pinned->place == DeviceCore::Place::kPinnedHost;
    owners->push_back(pinned->owner);
    return absl::OkStatus();
  };
  const absl::Status status = pin(task.source(), task.src_extent());
  if (!status.ok() || task.cast != CopyCast::kBF16ToF8E4M3) return status;
  return pin(task.blocks.src, task.blocks.extent());
}

absl::Status CudaMemory::Copy(absl::Span<const CopyTask> tasks,
                              const CopyOptions&, Digest* digest) {
  absl::Status status = core_->Use();
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<const void>> owners;
  std::vector<CopyTask> kernel_tasks;
  std::vector<const CopyTask*> engine_tasks;  // contiguous
  std::vector<const CopyTask*> host_tasks;    // to or from pinned memory
  for (size_t i = 0; i < tasks.size(); ++i) {
    const CopyTask& task = tasks[i];
    status = task.Validate();
    if (!status.ok()) return status;
    if (task.bytes() == 0) continue;
    int64_t dst_extent = task.run_bytes;
    for (const CopyDim& dim : task.dims)
      dst_extent += (dim.extent - 1) * dim.dst_stride;
    bool host = false;
    status = PinSource(task, &owners, &host);
    if (!status.ok()) return status;
    if (task.dst != nullptr) {
      const absl::StatusOr<DeviceCore::Pinned> dst =
          core_->Pin(task.dst, dst_extent, true);
      if (!dst.ok()) return dst.status();
      host |= dst->place == DeviceCore::Place::kPinnedHost;
      owners.push_back(dst->owner);
    }
    if (host) {
      // A kernel could reach pinned memory, at a fraction of what a copy engine
      // makes of the same bus, and with the SMs that others need.
      if (digest != nullptr || task.cast != CopyCast::kNone ||
          task.dst == nullptr || task.dims.size() > 1 ||
          (task.dims.size() == 1 &&
           (task.dims[0].src_stride < task.run_bytes ||
            task.dims[0].dst_stride < task.run_bytes))) {
        return MakeError(
            absl::StatusCode::kInvalidArgument, "BAD_COPY",
            "between a GPU and the host only plain rows are copied: pack on "
            "the GPU first");
      }
      host_tasks.push_back(&task);
    } else if (digest == nullptr && task.dst != nullptr &&
               ByCopyEngine(task, options_.copy_engine_bytes)) {
      engine_tasks.push_back(&task);
    } else if (task.dst != nullptr || digest != nullptr) {
      kernel_tasks.push_back(task);
    }
  }
  LaunchTable table;
  status = AddTasks(kernel_tasks, &table);
  if (!status.ok()) return status;
  const auto engines = [&](Lane* lane) -> absl::Status {
    if (!engine_tasks.empty()) {
      std::vector<void*> dsts;
      std::vector<const void*> srcs;
      std::vector<size_t> sizes;
      for (const CopyTask* task : engine_tasks) {
        dsts.push_back(task->dst);
        srcs.push_back(task->src);
        sizes.push_back(static_cast<size_t>(task->run_bytes));
      }
      cudaMemcpyAttributes attributes = {};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      // Engines and not SMs: others compute meanwhile.
      attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
      size_t first = 0;
      const absl::Status status =
          CheckCuda(cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(),
                                         sizes.size(), &attributes, &first, 1,
                                         lane->stream),
                    "cudaMemcpyBatchAsync");
      if (!status.ok()) return status;
    }
    for (const CopyTask* task : host_tasks) {
      const cudaError_t error =
          task->dims.empty()
              ? cudaMemcpyAsync(task->dst, task->src, task->run_bytes,
                                cudaMemcpyDefault, lane->stream)
              : cudaMemcpy2DAsync(task->dst, task->dims[0].dst_stride,
                                  task->src, task->dims[0].src_stride,
                                  task->run_bytes, task->dims[0].extent,
                                  cudaMemcpyDefault, lane->stream);
      const absl::Status status = CheckCuda(error, "cudaMemcpyAsync");
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  if (engine_tasks.empty() && host_tasks.empty() && table.units.empty())
    return absl::OkStatus();
  std::vector<Digest> digests;
  status = Run(&table, digest != nullptr, nullptr, nullptr, &digests, engines);
  if (status.ok() && digest != nullptr && !digests.empty())
    *digest += digests[0];
  return status;
}

absl::StatusOr<std::vector<Digest>> CudaMemory::DigestFrames(
    const FrameDigestRequest& request) {
  absl::Status status = core_->Use();
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<const void>> owners;
  bool host = false;
  for (const PackPiece& piece : request.pieces) {
    status = piece.copy.Validate();
    if (status.ok()) status = PinSource(piece.copy, &owners, &host);
    if (!status.ok()) return status;
  }
  if (host) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                     "frames of host memory are not for the GPU to digest");
  }
  LaunchTable table;
  status = AddFrameDigests(request, &table);
  if (!status.ok()) return status;
  std::vector<Digest> digests(request.frames.size());
  if (table.units.empty()) return digests;
  std::vector<Digest> all;
  status = Run(&table, true, nullptr, nullptr, &all, nullptr);
  if (!status.ok()) return status;
  for (size_t i = 0; i < digests.size(); ++i)
    digests[i] = all[request.frames[i] - request.frames[0]];
  return digests;
}

absl::Status CudaMemory::DigestEach(absl::Span<const CopyTask> tasks,
                                    const CopyOptions&,
                                    absl::Span<Digest> digests) {
  absl::Status status = core_->Use();
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<const void>> owners;
  bool host = false;
  for (const CopyTask& task : tasks) {
    status = task.Validate();
    if (status.ok() && task.bytes() > 0)
      status = PinSource(task, &owners, &host);
    if (!status.ok()) return status;
  }
  if (host) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                     "the digest of host memory is the host's to compute");
  }
  LaunchTable table;
  std::vector<int64_t> first_frames;
  status = AddDigests(tasks, &table, &first_frames);
  if (!status.ok() || table.units.empty()) return status;
  std::vector<Digest> frames;
  status = Run(&table, true, nullptr, nullptr, &frames, nullptr);
  if (!status.ok()) return status;
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (int64_t f = first_frames[i]; f < first_frames[i + 1]; ++f)
      digests[i] += frames[static_cast<size_t>(f)];
  }
  return absl::OkStatus();
}

absl::Status CudaMemory::Pack(const PackRequest& request, PackResult* result) {
  return PackTo(request, nullptr, result);
}

absl::Status CudaMemory::PackTo(const PackRequest& request, char* host,
                                PackResult* result) {
  absl::Status status = CheckPack(request);
  if (status.ok()) status = core_->Use();
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<const void>> owners;
  absl::StatusOr<DeviceCore::Pinned> pinned =
      core_->Pin(request.bucket, request.bucket_bytes, true);
  if (!pinned.ok()) return pinned.status();
  owners.push_back(pinned->owner);
  bool elsewhere = pinned->place != DeviceCore::Place::kDevice;
  if (host != nullptr) {
    pinned = core_->Pin(host, request.bucket_bytes, true);
    if (!pinned.ok()) return pinned.status();
    owners.push_back(pinned->owner);
    elsewhere = elsewhere || pinned->place != DeviceCore::Place::kPinnedHost;
  }
  for (const PackPiece& piece : request.pieces) {
    if (piece.copy.bytes() == 0) continue;
    status = PinSource(piece.copy, &owners, &elsewhere);
    if (!status.ok()) return status;
  }
  if (elsewhere) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY",
                     "a bucket is packed in GPU memory, and goes from there to "
                     "pinned memory of the host");
  }
  LaunchTable table;
  status = AddPack(request, &table);
  if (!status.ok()) return status;
  std::vector<Digest> frames;
  status = Run(&table, true, &request, host, &frames, nullptr);
  if (!status.ok()) return status;
  if (result != nullptr) {
    result->bucket = Digest();
    for (const Digest& digest : frames) result->bucket += digest;
    result->frames = std::move(frames);
  }
  return absl::OkStatus();
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
