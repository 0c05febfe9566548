// Segments of GPUs: memory of device agents that lasts.

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/cuda/agent/agent_memory_segment.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kFreeDeadline = absl::Seconds(5);
constexpr absl::Duration kImportDeadline = absl::Seconds(5);

absl::Status BadCopy(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
}

}  // namespace

// The control is mapped here: generations do not end with the agent.
class AgentMemory::DeviceSegment final : public Segment {
 public:
  DeviceSegment(AgentMemory* memory, std::unique_ptr<Segment> control,
                char* data, const DeviceInfo& device)
      : memory_(memory),
        control_(std::move(control)),
        data_(data),
        device_(device) {}
  ~DeviceSegment() override {
    {
      absl::MutexLock lock(&memory_->mutex_);
      memory_->devices_.erase(data_);
    }
    munmap(data_, static_cast<size_t>(device_.bytes));
    memory_->Later([device = device_] {
      const absl::Status status = device.gpu->agent->FreeStore(
          device.epoch, device.store, kFreeDeadline);
      // With the agent all that it had is free.
      if (!status.ok()) LOG(INFO) << "freeing GPU memory: " << status;
    });
  }
  const Segment& control() const { return *control_; }

  MemoryKind kind() const override { return MemoryKind::kCuda; }
  char* data() const override { return data_; }
  int64_t bytes() const override { return device_.bytes; }
  std::string device_uuid() const override { return device_.gpu->uuid; }
  bool writable() const override { return true; }
  int generation_slots() const override { return control_->generation_slots(); }
  uint64_t Generation(int slot) const override {
    return control_->Generation(slot);
  }
  uint64_t AdvanceGeneration(int slot) override {
    return control_->AdvanceGeneration(slot);
  }

 private:
  AgentMemory* const memory_;
  const std::unique_ptr<Segment> control_;
  char* const data_;
  const DeviceInfo device_;
};

absl::StatusOr<std::unique_ptr<Segment>> AgentMemory::AllocateOnDevice(
    int64_t bytes, const AllocateOptions& options) {
  if (bytes <= 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SIZE",
                     absl::StrCat("a segment of ", bytes, " bytes"));
  }
  const absl::StatusOr<DeviceAgent*> agent = agents_->Get(options.device_uuid);
  if (!agent.ok()) return agent.status();
  DeviceInfo device;
  device.bytes = bytes;
  device.gpu = GpuOf(*agent, (*agent)->device_uuid());
  const absl::StatusOr<uint64_t> epoch = AwaitEpoch(*device.gpu);
  if (!epoch.ok()) return epoch.status();
  device.epoch = *epoch;
  const absl::StatusOr<DeviceAgent::StorePart> part = (*agent)->MakeStore(
      *epoch, bytes, options.generation_slots, options.name, options_.timeout);
  if (!part.ok()) return part.status();
  device.store = part->id;
  const auto give_back = [&](const absl::Status& status) {
    (void)(*agent)->FreeStore(*epoch, part->id, kFreeDeadline);
    return status;
  };
  absl::StatusOr<std::unique_ptr<Segment>> control =
      host_->Import(part->control, kImportDeadline);
  if (!control.ok()) return give_back(control.status());
  // Addresses, and no memory.
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return give_back(MakeErrnoError(absl::StatusCode::kResourceExhausted,
                                    "NO_ADDRESS_SPACE",
                                    absl::StrCat(bytes, " bytes"), errno));
  }
  auto segment = std::make_unique<DeviceSegment>(
      this, *std::move(control), static_cast<char*>(data), device);
  {
    absl::MutexLock lock(&mutex_);
    devices_[segment->data()] = device;
  }
  return std::unique_ptr<Segment>(std::move(segment));
}

absl::StatusOr<MemoryTicket> AgentMemory::Export(const Segment& segment,
                                                 const ExportOptions& options) {
  const auto* device = dynamic_cast<const DeviceSegment*>(&segment);
  const auto* arena = dynamic_cast<const ArenaSegment*>(&segment);
  if (device == nullptr && arena == nullptr)
    return host_->Export(segment, options);
  if (!options.read_only) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "READ_ONLY",
                     "the store is for others to read");
  }
  if (arena != nullptr) return host_->Export(arena->base(), options);
  absl::StatusOr<MemoryTicket> ticket =
      host_->Export(device->control(), options);
  if (!ticket.ok()) return ticket;
  ticket->kind = MemoryKind::kCuda;
  ticket->bytes = segment.bytes();
  return ticket;
}

AgentMemory::DeviceInfo AgentMemory::FindDevice(const char* address,
                                                int64_t* offset) const {
  absl::MutexLock lock(&mutex_);
  auto at = devices_.upper_bound(address);
  if (at == devices_.begin()) return DeviceInfo();
  --at;
  *offset = address - at->first;
  return *offset < at->second.bytes ? at->second : DeviceInfo();
}

absl::StatusOr<AgentPlace> AgentMemory::DevicePlaceOf(const DeviceInfo& device,
                                                      int64_t offset,
                                                      int64_t bytes) const {
  if (bytes < 0 || bytes > device.bytes - offset)
    return BadCopy("more than the GPU's segment has");
  if (device.gpu->agent->epoch() != device.epoch) {
    return MakeError(
        absl::StatusCode::kUnavailable, "DEVICE_STORE_LOST",
        absl::StrCat("the device agent of ", device.gpu->uuid,
                     " has ended, and what the store had there with it"));
  }
  return AgentPlace{AgentPlace::Kind::kStore, device.store, offset};
}

std::string AgentMemory::DeviceOf(const char* address) const {
  int64_t offset = 0;
  const DeviceInfo device = FindDevice(address, &offset);
  if (device.gpu != nullptr) return device.gpu->uuid;
  const std::shared_ptr<const Region> region = FindRegion(address);
  return region == nullptr ? "" : region->gpu_->uuid;
}

absl::Status AgentMemory::CopyOnDevice(absl::Span<const CopyTask* const> tasks,
                                       Digest* digest) {
  // What one agent of one epoch is asked for.
  struct Work {
    std::vector<AgentCopy> copies;
    AgentPack digested;
  };
  std::map<std::pair<Gpu*, uint64_t>, Work> works;
  for (const CopyTask* task : tasks) {
    absl::Status status = task->Validate();
    if (!status.ok()) return status;
    if (task->cast != CopyCast::kNone)
      return BadCopy("what a GPU's segment has is not cast any more");
    int64_t from_offset = 0, to_offset = 0;
    const DeviceInfo from = FindDevice(task->src, &from_offset);
    const DeviceInfo to =
        task->dst == nullptr ? DeviceInfo() : FindDevice(task->dst, &to_offset);
    const DeviceInfo& device = from.gpu != nullptr ? from : to;
    Work& work = works[{device.gpu, device.epoch}];
    if (task->dst == nullptr) {
      const absl::StatusOr<AgentPlace> place =
          DevicePlaceOf(from, from_offset, task->src_extent());
      if (!place.ok()) return place.status();
      AgentPiece piece;
      piece.source = *place;
      piece.copy = *task;
      work.digested.pieces.push_back(std::move(piece));
      continue;
    }
    if (!task->dims.empty() || digest != nullptr)
      return BadCopy("a GPU's segment is copied in whole stretches");
    AgentCopy copy;
    copy.bytes = task->bytes();
    const absl::StatusOr<AgentPlace> source =
        PlaceOf(device.gpu, device.epoch, task->src, copy.bytes);
    if (!source.ok()) return source.status();
    const absl::StatusOr<AgentPlace> target =
        PlaceOf(device.gpu, device.epoch, task->dst, copy.bytes);
    if (!target.ok()) return target.status();
    copy.from = *source;
    copy.to = *target;
    work.copies.push_back(copy);
  }
  for (const auto& [where, work] : works) {
    const auto& [gpu, epoch] = where;
    absl::Status status;
    if (!work.copies.empty()) {
      status = gpu->agent->Copy(epoch, work.copies, options_.timeout);
    }
    if (status.ok() && digest != nullptr && !work.digested.pieces.empty()) {
      const absl::StatusOr<std::vector<Digest>> parts =
          gpu->agent->DigestOf(epoch, work.digested, options_.timeout);
      status = parts.status();
      if (parts.ok()) {
        for (const Digest& part : *parts) *digest += part;
      }
    }
    if (!status.ok()) {
      gpu->agent->AwaitEnd(epoch, status);
      return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Digest>> AgentMemory::DigestFrames(
    const FrameDigestRequest& request) {
  AgentPack pack;
  pack.frame_bytes = request.frame_bytes;
  pack.frames.assign(request.frames.begin(), request.frames.end());
  DeviceInfo device;
  for (const PackPiece& piece : request.pieces) {
    if (piece.copy.bytes() == 0) continue;
    absl::Status status = piece.copy.Validate();
    if (!status.ok()) return status;
    int64_t offset = 0;
    const DeviceInfo here = FindDevice(piece.copy.src, &offset);
    if (here.gpu == nullptr ||
        (device.gpu != nullptr &&
         (here.gpu != device.gpu || here.epoch != device.epoch)))
      return BadCopy("frames of a bucket lie in one GPU's segments");
    device = here;
    const absl::StatusOr<AgentPlace> place =
        DevicePlaceOf(here, offset, piece.copy.src_extent());
    if (!place.ok()) return place.status();
    AgentPiece named;
    named.offset = piece.offset;
    named.source = *place;
    named.copy = piece.copy;
    pack.pieces.push_back(std::move(named));
  }
  // Padding adds nothing.
  if (device.gpu == nullptr) return std::vector<Digest>(pack.frames.size());
  absl::StatusOr<std::vector<Digest>> digests =
      device.gpu->agent->DigestFrames(device.epoch, pack, options_.timeout);
  if (!digests.ok())
    device.gpu->agent->AwaitEnd(device.epoch, digests.status());
  return digests;
}

absl::StatusOr<absl::optional<AgentPlace>> AgentMemory::PlaceForChannel(
    DeviceAgent* agent, uint64_t epoch, const char* address, int64_t bytes) {
  int64_t offset = 0;
  const DeviceInfo device = FindDevice(address, &offset);
  if (device.gpu == nullptr) {
    return ArenaForChannel(agent, epoch, address, bytes);
  }
  if (device.gpu->agent != agent) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "OTHER_DEVICE",
        absl::StrCat("bytes of ", device.gpu->uuid,
                     " do not go over a channel of ", agent->device_uuid()));
  }
  if (device.epoch != epoch) {
    return MakeError(absl::StatusCode::kUnavailable, "DEVICE_STORE_LOST",
                     absl::StrCat("the channel is not of the device agent of ",
                                  device.gpu->uuid, " that has the bytes"));
  }
  const absl::StatusOr<AgentPlace> place = DevicePlaceOf(device, offset, bytes);
  if (!place.ok()) return place.status();
  return absl::optional<AgentPlace>(*place);
}

absl::StatusOr<absl::optional<AgentPlace>> AgentMemory::ArenaForChannel(
    DeviceAgent* agent, uint64_t epoch, const char* address, int64_t bytes) {
  Gpu* const gpu = GpuOf(agent, agent->device_uuid());
  const char* begin = nullptr;
  ArenaInfo arena;
  const absl::StatusOr<absl::optional<AgentPlace>> pinned =
      FindPinned(*gpu, epoch, address, bytes, &arena, &begin);
  // Memory of somebody else's.
  if (!pinned.ok()) return absl::optional<AgentPlace>();
  if (pinned->has_value()) return pinned;
  // An agent that was started again has pinned nothing. To do so takes seconds,
  // which the other end of an edge does not wait: until then bytes go through
  // the buffer.
  {
    absl::MutexLock lock(&mutex_);
    uint64_t& tried = gpu->pin_tried[begin];
    if (tried == epoch) return absl::optional<AgentPlace>();
    tried = epoch;
  }
  Later([this, gpu, epoch, begin, size = arena.bytes] {
    const absl::Status status = PlaceOf(gpu, epoch, begin, size).status();
    if (status.ok() || ReasonOf(status) == "BAD_COPY") return;
    LOG(WARNING) << gpu->uuid << " does not pin " << size
                 << " bytes of the store, which go through a buffer: "
                 << status;
  });
  return absl::optional<AgentPlace>();
}

void AgentMemory::PinFor(DeviceAgent* agent) {
  GpuOf(agent, agent->device_uuid());
}

absl::Status AgentMemory::DigestEach(absl::Span<const CopyTask> tasks,
                                     const CopyOptions& options,
                                     absl::Span<Digest> digests) {
  struct Work {
    AgentPack pack;
    std::vector<size_t> tasks;
    Regions regions;
  };
  std::map<Gpu*, Work> works;
  for (size_t i = 0; i < tasks.size(); ++i) {
    absl::Status status = tasks[i].Validate();
    if (!status.ok()) return status;
    if (tasks[i].bytes() == 0) continue;
    std::shared_ptr<const Region> region = FindRegion(tasks[i].source());
    if (region == nullptr) {
      status = Copy({tasks[i]}, options, &digests[i]);
      if (!status.ok()) return status;
      continue;
    }
    Work& work = works[region->gpu_];
    work.tasks.push_back(i);
    work.regions.push_back(std::move(region));
  }
  for (auto& [gpu, work] : works) {
    const absl::StatusOr<uint64_t> epoch = AwaitEpoch(*gpu);
    if (!epoch.ok()) return epoch.status();
    for (size_t i = 0; i < work.tasks.size(); ++i) {
      const absl::StatusOr<uint64_t> import = work.regions[i]->ImportOf(*epoch);
      if (!import.ok()) return import.status();
      AgentPiece piece;
      piece.copy = tasks[work.tasks[i]];
      piece.copy.dst = nullptr;
      piece.source = {AgentPlace::Kind::kImport, *import,
                      piece.copy.source() - work.regions[i]->data()};
      work.pack.pieces.push_back(std::move(piece));
    }
    const absl::StatusOr<std::vector<Digest>> parts =
        gpu->agent->DigestOf(*epoch, work.pack, options_.timeout);
    if (!parts.ok()) {
      gpu->agent->AwaitEnd(*epoch, parts.status());
      return parts.status();
    }
    for (size_t i = 0; i < work.tasks.size(); ++i)
      digests[work.tasks[i]] += (*parts)[i];
  }
  return absl::OkStatus();
}

absl::Status AgentMemory::Read(const char* from, absl::Span<char> to) {
  int64_t offset = 0;
  const DeviceInfo device = FindDevice(from, &offset);
  if (device.gpu == nullptr) {
    if (FindRegion(from) != nullptr)
      return BadCopy("a trainer's memory is packed, not read");
    return host_->Read(from, to);
  }
  const int64_t bytes = static_cast<int64_t>(to.size());
  for (int64_t at = 0; at < bytes; at += DeviceAgent::kMaxReadBytes) {
    const int64_t part = std::min(DeviceAgent::kMaxReadBytes, bytes - at);
    const absl::StatusOr<AgentPlace> place =
        DevicePlaceOf(device, offset + at, part);
    if (!place.ok()) return place.status();
    const absl::StatusOr<std::string> read = device.gpu->agent->ReadBytes(
        device.epoch, *place, part, options_.timeout);
    if (!read.ok()) return read.status();
    if (static_cast<int64_t>(read->size()) != part)
      return BadCopy("the device agent has read something else");
    std::copy(read->begin(), read->end(), to.begin() + at);
  }
  return absl::OkStatus();
}

absl::Status AgentMemory::Write(absl::Span<const char> from, char* to) {
  int64_t offset = 0;
  if (FindDevice(to, &offset).gpu != nullptr || FindRegion(to) != nullptr)
    return BadCopy("GPU memory is written by copies alone");
  return host_->Write(from, to);
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
