#include "transport/cuda/agent/agent_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "transport/cuda/agent/agent_memory_segment.h"
#include "transport/cuda/launch_table.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr absl::Duration kCloseDeadline = absl::Seconds(5);
constexpr int64_t kPieceAlignment = 16;

int64_t Aligned(int64_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

absl::Status BadCopy(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_COPY", what);
}

}  // namespace

// ---- Regions ----

AgentMemory::Region::~Region() {
  if (data_ == nullptr) return;
  {
    absl::MutexLock lock(&memory_->mutex_);
    memory_->regions_.erase(data_);
  }
  munmap(data_, bytes_);
  absl::MutexLock lock(&mutex_);
  if (import_ == 0) return;
  memory_->Later([agent = gpu_->agent, epoch = epoch_, import = import_]() {
    const absl::Status status = agent->Close(epoch, import, kCloseDeadline);
    // With the agent everything that it had open is closed.
    if (!status.ok()) LOG(INFO) << "closing GPU memory: " << status;
  });
}

absl::StatusOr<uint64_t> AgentMemory::Region::ImportOf(uint64_t epoch) const {
  absl::MutexLock lock(&mutex_);
  if (epoch_ == epoch) return import_;
  const absl::StatusOr<uint64_t> opened = gpu_->agent->Open(
      epoch, handle_, /*writable=*/false, memory_->options_.timeout);
  if (!opened.ok()) {
    if (epoch_ == 0 || absl::IsUnavailable(opened.status()) ||
        absl::IsDeadlineExceeded(opened.status()))
      return opened.status();
    return MakeError(absl::StatusCode::kDataLoss, "SOURCE_MEMORY_LOST",
                     absl::StrCat("the device agent was started again, and "
                                  "cannot open the trainer's memory any more (",
                                  ReasonOf(opened.status()),
                                  "): ", opened.status().message()));
  }
  epoch_ = epoch;
  import_ = *opened;
  return import_;
}

absl::StatusOr<std::shared_ptr<const AgentMemory::Region>> AgentMemory::Open(
    const DeviceHandle& handle) {
  if (handle.bytes <= 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "HANDLE_MALFORMED",
                     "an allocation without bytes");
  }
  const absl::StatusOr<DeviceAgent*> agent = agents_->Get(handle.device_uuid);
  if (!agent.ok()) return agent.status();
  Gpu* const gpu = GpuOf(*agent, (*agent)->device_uuid());
  const absl::StatusOr<uint64_t> epoch = AwaitEpoch(*gpu);
  if (!epoch.ok()) return epoch.status();
  std::shared_ptr<Region> region(new Region(this, gpu, handle));
  const absl::StatusOr<uint64_t> import = region->ImportOf(*epoch);
  if (!import.ok()) return import.status();
  // Addresses, and no memory.
  void* const data = mmap(nullptr, handle.bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                          "NO_ADDRESS_SPACE",
                          absl::StrCat(handle.bytes, " bytes"), errno);
  }
  region->data_ = static_cast<char*>(data);
  region->bytes_ = handle.bytes;
  {
    absl::MutexLock lock(&mutex_);
    regions_[region->data_] = region;
  }
  const absl::Status pinned = PinAll(gpu, *epoch);
  if (!pinned.ok()) return pinned;
  return std::shared_ptr<const Region>(std::move(region));
}

std::shared_ptr<const AgentMemory::Region> AgentMemory::FindRegion(
    const char* address) const {
  // Let go of when the lock is: its end takes that.
  std::shared_ptr<const Region> region;
  absl::MutexLock lock(&mutex_);
  auto at = regions_.upper_bound(address);
  if (at == regions_.begin()) return nullptr;
  --at;
  // Nobody copies out of a region that nobody holds.
  region = at->second.lock();
  if (region == nullptr || address >= region->data() + region->bytes())
    return nullptr;
  return region;
}

absl::Status AgentMemory::AwaitClosed(
    std::vector<std::weak_ptr<const Region>> regions, absl::Duration timeout) {
  const absl::Time until = absl::Now() + timeout;
  while (true) {
    const bool gone =
        std::all_of(regions.begin(), regions.end(),
                    [](const auto& region) { return region.expired(); });
    if (gone) {
      absl::MutexLock lock(&mutex_);
      const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return later_.empty() && !busy_;
      };
      if (mutex_.AwaitWithDeadline(absl::Condition(&idle), until))
        return absl::OkStatus();
    }
    if (absl::Now() >= until) break;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, "REGION_IN_USE",
                   absl::StrCat("GPU memory of a trainer is still open after ",
                                absl::FormatDuration(timeout)));
}

// ---- Agents ----

AgentMemory::AgentMemory(Memory* host, DeviceAgents* agents, int slots,
                         int64_t slot_bytes, const Options& options)
    : host_(host),
      agents_(agents),
      slots_(slots),
      slot_bytes_(slot_bytes),
      options_(options),
      worker_([this] { RunLater(); }) {}

AgentMemory::~AgentMemory() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  worker_.join();
}

void AgentMemory::Later(std::function<void()> task) {
  absl::MutexLock lock(&mutex_);
  later_.push_back(std::move(task));
}

void AgentMemory::RunLater() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mutex_);
      const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !later_.empty();
      };
      mutex_.Await(absl::Condition(&due));
      if (later_.empty()) return;
      task = std::move(later_.front());
      later_.pop_front();
      busy_ = true;
    }
    task();
    task = nullptr;
    absl::MutexLock lock(&mutex_);
    busy_ = false;
  }
}

AgentMemory::Gpu* AgentMemory::GpuOf(DeviceAgent* agent,
                                     const std::string& uuid) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<Gpu>& gpu = gpus_[uuid];
  if (gpu == nullptr) {
    gpu = std::make_unique<Gpu>();
    gpu->uuid = uuid;
    gpu->agent = agent;
    for (int i = slots_; i-- > 0;)
      gpu->free_slots.push_back(static_cast<uint64_t>(i));
  }
  return gpu.get();
}

absl::StatusOr<uint64_t> AgentMemory::AwaitEpoch(const Gpu& gpu) const {
  const absl::Time until = absl::Now() + options_.timeout;
  while (true) {
    const uint64_t epoch = gpu.agent->epoch();
    if (epoch != 0) return epoch;
    if (absl::Now() >= until) {
      return MakeError(absl::StatusCode::kUnavailable, "DEVICE_AGENT_LOST",
                       absl::StrCat("the device agent of ", gpu.uuid,
                                    " has ended, and has not come back for ",
                                    absl::FormatDuration(options_.timeout)));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

class AgentMemory::SlotLease {
 public:
  SlotLease(AgentMemory* memory, Gpu* gpu, uint64_t slot)
      : memory_(memory), gpu_(gpu), slot_(slot) {}
  SlotLease(SlotLease&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        gpu_(other.gpu_),
        slot_(other.slot_) {}
  SlotLease& operator=(SlotLease&&) = delete;
  ~SlotLease() {
    if (memory_ == nullptr) return;
    absl::MutexLock lock(&memory_->mutex_);
    gpu_->free_slots.push_back(slot_);
  }
  uint64_t slot() const { return slot_; }

 private:
  AgentMemory* memory_;
  Gpu* const gpu_;
  const uint64_t slot_;
};

absl::StatusOr<AgentMemory::SlotLease> AgentMemory::TakeSlot(Gpu* gpu) {
  absl::MutexLock lock(&mutex_);
  const auto free = [gpu] { return !gpu->free_slots.empty(); };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), options_.timeout)) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEVICE_BUSY",
                     absl::StrCat("none of the ", slots_, " slots of ",
                                  gpu->uuid, " became free for ",
                                  absl::FormatDuration(options_.timeout)));
  }
  const uint64_t slot = gpu->free_slots.back();
  gpu->free_slots.pop_back();
  return SlotLease(this, gpu, slot);
}

// ---- Segments ----

absl::StatusOr<std::unique_ptr<Segment>> AgentMemory::Allocate(
    int64_t bytes, const AllocateOptions& options) {
  if (!options.device_uuid.empty()) return AllocateOnDevice(bytes, options);
  // Of a client: it is read where it lies.
  if (options.generation_slots == 0) return host_->Allocate(bytes, options);
  AllocateOptions shared = options;
  shared.others_read_only = false;
  absl::StatusOr<std::unique_ptr<Segment>> base =
      host_->Allocate(bytes, shared);
  if (!base.ok()) return base.status();
  auto segment = std::make_unique<ArenaSegment>(this, *std::move(base));
  std::vector<Gpu*> gpus;
  {
    absl::MutexLock lock(&mutex_);
    arenas_[segment->data()] = {segment.get(), segment->bytes()};
    for (const auto& [uuid, gpu] : gpus_) gpus.push_back(gpu.get());
  }
  for (Gpu* gpu : gpus) {
    const uint64_t epoch = gpu->agent->epoch();
    if (epoch == 0) continue;
    const absl::StatusOr<AgentPlace> pinned =
        PlaceOf(gpu, epoch, segment->data(), segment->bytes());
    // Tried again, and told, by who first packs into it.
    if (!pinned.ok()) LOG(WARNING) << gpu->uuid << ": " << pinned.status();
  }
  return std::unique_ptr<Segment>(std::move(segment));
}

absl::StatusOr<AgentPlace> AgentMemory::PlaceOf(Gpu* gpu, uint64_t epoch,
                                                const char* address,
                                                int64_t bytes) {
  int64_t at_offset = 0;
  const DeviceInfo device = FindDevice(address, &at_offset);
  if (device.gpu != nullptr) {
    if (device.gpu != gpu)
      return BadCopy("this node copies nothing between its GPUs");
    return DevicePlaceOf(device, at_offset, bytes);
  }
  const char* begin = nullptr;
  ArenaInfo arena;
  // What moves does not wait for what is being pinned.
  absl::StatusOr<absl::optional<AgentPlace>> found =
      FindPinned(*gpu, epoch, address, bytes, &arena, &begin);
  if (!found.ok()) return found.status();
  if (found->has_value()) return **found;
  absl::MutexLock pinning(&gpu->pin_mutex);
  found = FindPinned(*gpu, epoch, address, bytes, &arena, &begin);
  if (!found.ok()) return found.status();
  if (found->has_value()) return **found;
  // Its owner keeps it: there is somebody who copies to it.
  int64_t offset = 0;
  const int fd = arena.segment->file(&offset);
  const absl::StatusOr<uint64_t> host =
      gpu->agent->MapHost(epoch, fd, offset, arena.bytes,
                          // At a GB/s, if it must be faulted in.
                          options_.timeout + absl::Nanoseconds(arena.bytes));
  if (!host.ok()) return host.status();
  absl::MutexLock lock(&mutex_);
  gpu->pinned[begin] = {epoch, *host};
  return AgentPlace{AgentPlace::Kind::kHost, *host, address - begin};
}

absl::StatusOr<absl::optional<AgentPlace>> AgentMemory::FindPinned(
    const Gpu& gpu, uint64_t epoch, const char* address, int64_t bytes,
    ArenaInfo* arena, const char** begin) const {
  absl::MutexLock lock(&mutex_);
  const auto after = arenas_.upper_bound(address);
  if (after == arenas_.begin() || address - std::prev(after)->first >
                                      std::prev(after)->second.bytes - bytes) {
    return BadCopy("GPU memory is copied to the store, and nowhere else");
  }
  *begin = std::prev(after)->first;
  *arena = std::prev(after)->second;
  const auto pinned = gpu.pinned.find(*begin);
  if (pinned == gpu.pinned.end() || pinned->second.epoch != epoch) {
    return absl::optional<AgentPlace>();
  }
  return absl::optional<AgentPlace>(AgentPlace{
      AgentPlace::Kind::kHost, pinned->second.host, address - *begin});
}

absl::Status AgentMemory::PinAll(Gpu* gpu, uint64_t epoch) {
  std::vector<std::pair<const char*, int64_t>> all;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [data, arena] : arenas_)
      all.emplace_back(data, arena.bytes);
  }
  for (const auto& [data, bytes] : all) {
    const absl::Status status = PlaceOf(gpu, epoch, data, bytes).status();
    // One that has gone meanwhile is none that it would be packed into.
    if (!status.ok() && ReasonOf(status) != "BAD_COPY") return status;
  }
  return absl::OkStatus();
}

// ---- Packs ----

absl::Status AgentMemory::PackOn(
    Gpu* gpu, const AgentPlace& bucket, const PackRequest& request,
    const Regions& regions, bool to_host,
    std::function<void(int64_t, int64_t, absl::Span<const Digest>)> on_frames,
    uint64_t* epoch) {
  if (bucket.kind == AgentPlace::Kind::kSlot &&
      request.bucket_bytes > slot_bytes_) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "SLOT_TOO_SMALL",
        absl::StrCat("a bucket of ", request.bucket_bytes,
                     " bytes does not fit into the GPU's slots of ",
                     slot_bytes_,
                     ": start all daemons with the same --bucket_bytes"));
  }
  const absl::StatusOr<uint64_t> now = AwaitEpoch(*gpu);
  if (!now.ok()) return now.status();
  *epoch = *now;
  AgentPack pack;
  pack.bucket_bytes = request.bucket_bytes;
  pack.frame_bytes = request.frame_bytes;
  pack.bucket = bucket;
  pack.to_host = to_host;
  if (to_host) {
    const absl::StatusOr<AgentPlace> place =
        PlaceOf(gpu, *now, request.bucket, request.bucket_bytes);
    if (!place.ok()) return place.status();
    pack.host = *place;
  }
  for (size_t i = 0; i < request.pieces.size(); ++i) {
    if (regions[i] == nullptr || regions[i]->gpu_ != gpu) continue;
    const absl::StatusOr<uint64_t> import = regions[i]->ImportOf(*now);
    if (!import.ok()) return import.status();
    AgentPiece piece;
    piece.offset = request.pieces[i].offset;
    piece.copy = request.pieces[i].copy;
    piece.source = {AgentPlace::Kind::kImport, *import,
                    piece.copy.source() - regions[i]->data()};
    pack.pieces.push_back(std::move(piece));
  }
  const absl::Status status =
      gpu->agent->Pack(*now, pack, std::move(on_frames), options_.timeout)
          .status();
  if (!status.ok()) gpu->agent->AwaitEnd(*now, status);
  return status;
}

absl::Status AgentMemory::Pack(const PackRequest& request, PackResult* result) {
  Regions regions;
  std::vector<Gpu*> gpus;
  bool host = false;
  for (const PackPiece& piece : request.pieces) {
    if (piece.copy.bytes() == 0) {
      regions.push_back(nullptr);
      continue;
    }
    regions.push_back(FindRegion(piece.copy.source()));
    if (regions.back() == nullptr) {
      host = true;
      continue;
    }
    if (std::find(gpus.begin(), gpus.end(), regions.back()->gpu_) == gpus.end())
      gpus.push_back(regions.back()->gpu_);
  }
  int64_t offset = 0;
  const DeviceInfo device = FindDevice(request.bucket, &offset);
  const bool on_device = device.gpu != nullptr;
  if (gpus.empty() && !on_device) return host_->Pack(request, result);
  absl::Status status = CheckPack(request);
  if (!status.ok()) return status;
  if (on_device && (host || gpus.size() != 1 || gpus[0] != device.gpu)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "OTHER_DEVICE",
                     absl::StrCat("a bucket is to lie on ", device.gpu->uuid,
                                  ", and its tensors do not all lie there any "
                                  "more: publish again"));
  }
  if (host || gpus.size() > 1) return PackMixed(request, regions, gpus, result);
  AgentPlace bucket;
  absl::optional<SlotLease> lease;
  if (on_device) {
    const absl::StatusOr<AgentPlace> place =
        DevicePlaceOf(device, offset, request.bucket_bytes);
    if (!place.ok()) return place.status();
    bucket = *place;
  } else {
    absl::StatusOr<SlotLease> taken = TakeSlot(gpus[0]);
    if (!taken.ok()) return taken.status();
    lease.emplace(*std::move(taken));
    bucket = {AgentPlace::Kind::kSlot, lease->slot(), 0};
  }
  std::vector<Digest> frames;
  uint64_t epoch;
  status = PackOn(
      gpus[0], bucket, request, regions, /*to_host=*/!on_device,
      [&](int64_t first, int64_t last, absl::Span<const Digest> digests) {
        frames.insert(frames.end(), digests.begin(), digests.end());
        if (request.on_frames != nullptr)
          request.on_frames(first, last, digests);
      },
      &epoch);
  if (!status.ok() || result == nullptr) return status;
  result->bucket = Digest();
  for (const Digest& digest : frames) result->bucket += digest;
  result->frames = std::move(frames);
  return absl::OkStatus();
}

// A bucket of which parts lie in several places: each place packs its own, and
// all but the first are copied over the zeros that the first has left.
absl::Status AgentMemory::PackMixed(const PackRequest& request,
                                    const Regions& regions,
                                    const std::vector<Gpu*>& gpus,
                                    PackResult* result) {
  const int64_t frame_count =
      (request.bucket_bytes + request.frame_bytes - 1) / request.frame_bytes;
  std::vector<Digest> frames(static_cast<size_t>(frame_count));
  const auto add = [&](int64_t first, int64_t last,
                       absl::Span<const Digest> digests) {
    for (int64_t i = first; i < last; ++i)
      frames[static_cast<size_t>(i)] += digests[static_cast<size_t>(i - first)];
  };
  for (size_t g = 0; g < gpus.size(); ++g) {
    Gpu* const gpu = gpus[g];
    const absl::StatusOr<SlotLease> lease = TakeSlot(gpu);
    if (!lease.ok()) return lease.status();
    uint64_t epoch;
    absl::Status status =
        PackOn(gpu, {AgentPlace::Kind::kSlot, lease->slot(), 0}, request,
               regions, /*to_host=*/g == 0, add, &epoch);
    if (!status.ok()) return status;
    if (g == 0) continue;
    const absl::StatusOr<AgentPlace> place =
        PlaceOf(gpu, epoch, request.bucket, request.bucket_bytes);
    if (!place.ok()) return place.status();
    std::vector<AgentCopy> copies;
    for (size_t i = 0; i < request.pieces.size(); ++i) {
      if (regions[i] == nullptr || regions[i]->gpu_ != gpu) continue;
      AgentCopy copy;
      copy.bytes = request.pieces[i].copy.bytes();
      copy.from = {AgentPlace::Kind::kSlot, lease->slot(),
                   request.pieces[i].offset};
      copy.to = *place;
      copy.to.offset += request.pieces[i].offset;
      copies.push_back(copy);
    }
    status = gpu->agent->Copy(epoch, copies, options_.timeout);
    if (!status.ok()) {
      gpu->agent->AwaitEnd(epoch, status);
      return status;
    }
  }
  std::vector<PackPiece> here;
  for (size_t i = 0; i < request.pieces.size(); ++i) {
    if (regions[i] == nullptr) here.push_back(request.pieces[i]);
  }
  if (!here.empty()) {
    std::vector<char> beside(static_cast<size_t>(request.bucket_bytes));
    PackRequest packed = request;
    packed.bucket = beside.data();
    packed.pieces = here;
    packed.on_frames = add;
    absl::Status status = host_->Pack(packed, nullptr);
    std::vector<CopyTask> over;
    for (const PackPiece& piece : here) {
      CopyTask task;
      task.src = beside.data() + piece.offset;
      task.dst = request.bucket + piece.offset;
      task.run_bytes = piece.copy.bytes();
      over.push_back(task);
    }
    if (status.ok()) status = host_->Copy(over, CopyOptions(), nullptr);
    if (!status.ok()) return status;
  }
  if (request.on_frames != nullptr) request.on_frames(0, frame_count, frames);
  if (result != nullptr) {
    result->bucket = Digest();
    for (const Digest& digest : frames) result->bucket += digest;
    result->frames = std::move(frames);
  }
  return absl::OkStatus();
}

// ---- Copies ----

absl::Status AgentMemory::Copy(absl::Span<const CopyTask> tasks,
                               const CopyOptions& options, Digest* digest) {
  // All of them before the first byte, wherever that is.
  for (const CopyTask& task : tasks) {
    const absl::Status status = task.Validate();
    if (!status.ok()) return status;
  }
  std::vector<CopyTask> here;
  std::vector<const CopyTask*> on_device;
  std::map<Gpu*, std::pair<std::vector<CopyTask>, Regions>> there;
  for (const CopyTask& task : tasks) {
    if (task.dst != nullptr && FindRegion(task.dst) != nullptr)
      return BadCopy("nobody copies into a trainer's memory");
    int64_t offset = 0;
    if (FindDevice(task.source(), &offset).gpu != nullptr) {
      on_device.push_back(&task);
      continue;
    }
    std::shared_ptr<const Region> region = FindRegion(task.source());
    if (region == nullptr && task.dst != nullptr &&
        FindDevice(task.dst, &offset).gpu != nullptr) {
      on_device.push_back(&task);
      continue;
    }
    if (region == nullptr) {
      here.push_back(task);
      continue;
    }
    auto& [of_gpu, regions] = there[region->gpu_];
    for (CopyTask& part : SplitCopy(task, slot_bytes_)) {
      of_gpu.push_back(std::move(part));
      regions.push_back(region);
    }
  }
  if (there.empty() && on_device.empty())
    return host_->Copy(tasks, options, digest);
  Digest sum;
  if (!on_device.empty()) {
    const absl::Status status =
        CopyOnDevice(on_device, digest == nullptr ? nullptr : &sum);
    if (!status.ok()) return status;
  }
  if (!here.empty()) {
    const absl::Status status =
        host_->Copy(here, options, digest == nullptr ? nullptr : &sum);
    if (!status.ok()) return status;
  }
  for (const auto& [gpu, work] : there) {
    const absl::Status status = CopyFrom(gpu, work.first, work.second, &sum);
    if (!status.ok()) return status;
  }
  if (digest != nullptr) *digest += sum;
  return absl::OkStatus();
}

absl::Status AgentMemory::CopyFrom(Gpu* gpu, absl::Span<const CopyTask> tasks,
                                   const Regions& regions, Digest* digest) {
  const absl::StatusOr<SlotLease> lease = TakeSlot(gpu);
  if (!lease.ok()) return lease.status();
  for (size_t next = 0; next < tasks.size();) {
    // As many as a slot holds, one behind the other.
    PackRequest request;
    std::vector<PackPiece> pieces;
    Regions of_pieces;
    const size_t first = next;
    int64_t at = 0;
    for (; next < tasks.size(); ++next) {
      if (next > first && at + tasks[next].bytes() > slot_bytes_) break;
      PackPiece piece;
      piece.offset = at;
      piece.copy = tasks[next];
      at = Aligned(at + piece.copy.bytes());
      pieces.push_back(std::move(piece));
      of_pieces.push_back(regions[next]);
    }
    request.bucket_bytes = std::min(at, slot_bytes_);
    request.pieces = pieces;
    uint64_t epoch;
    absl::Status status = PackOn(
        gpu, {AgentPlace::Kind::kSlot, lease->slot(), 0}, request, of_pieces,
        /*to_host=*/false,
        [digest](int64_t, int64_t, absl::Span<const Digest> digests) {
          for (const Digest& frame : digests) *digest += frame;
        },
        &epoch);
    if (!status.ok()) return status;
    std::vector<AgentCopy> copies;
    for (const PackPiece& piece : pieces) {
      if (piece.copy.dst == nullptr) continue;
      int64_t from = piece.offset;
      for (const CopyTask& row : DenseRows(piece.copy)) {
        const absl::StatusOr<AgentPlace> to =
            PlaceOf(gpu, epoch, row.dst, row.bytes());
        if (!to.ok()) return to.status();
        AgentCopy copy;
        copy.from = {AgentPlace::Kind::kSlot, lease->slot(), from};
        copy.to = *to;
        copy.bytes = row.bytes();
        copies.push_back(copy);
        from += copy.bytes;
      }
    }
    if (copies.empty()) continue;
    status = gpu->agent->Copy(epoch, copies, options_.timeout);
    if (!status.ok()) {
      gpu->agent->AwaitEnd(epoch, status);
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
