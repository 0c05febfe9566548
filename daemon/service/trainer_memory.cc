// The memory that RegisterShards names, found and opened.

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "daemon/service/trainer_sessions.h"
#include "daemon/service/validate.h"
#include "proto/status.h"
#include "transport/host/foreign_memory.h"

namespace weightsync {
namespace daemon {
namespace {

// A daemon of root can open what its client cannot. A process that cannot be
// looked at (of another pid namespace) is not asked: it could say anything.
absl::Status MayName(pid_t process, const transport::UniqueFd& fd,
                     const std::string& name) {
  // Not the owner of /proc/PID: that is root for a process that has changed its
  // user.
  std::ifstream status(absl::StrCat("/proc/", process, "/status"));
  absl::optional<uid_t> uid, gid;
  std::string word;
  uint32_t real, effective;
  while (status >> word) {
    if (word == "Uid:" && status >> real >> effective) uid = effective;
    if (word == "Gid:" && status >> real >> effective) gid = effective;
  }
  if (!uid.has_value() || !gid.has_value()) return absl::OkStatus();
  return transport::CheckOwner(fd, name, *uid, *gid);
}

}  // namespace

absl::Status TrainerSessions::AddForeign(pid_t process,
                                         absl::StatusOr<transport::UniqueFd> fd,
                                         const std::string& name, int64_t bytes,
                                         Registration* registration) {
  if (!fd.ok()) return fd.status();
  const absl::Status allowed = MayName(process, *fd, name);
  if (!allowed.ok()) return allowed;
  absl::StatusOr<std::unique_ptr<transport::ForeignMemory>> mapped =
      transport::ForeignMemory::Map(*fd, 0, bytes, /*writable=*/false);
  if (!mapped.ok()) return mapped.status();
  std::shared_ptr<transport::ForeignMemory> memory = *std::move(mapped);
  registration->regions.push_back({memory->data(), bytes, !memory->sealed(),
                                   /*arena=*/nullptr, /*arena_id=*/"",
                                   /*device_uuid=*/""});
  registration->memory.push_back(memory);
  return absl::OkStatus();
}

// REQUIRES: CheckShards(request) is OK. It takes its time, and is done once.
absl::StatusOr<std::shared_ptr<TrainerSessions::Registration>>
TrainerSessions::Resolve(const Session& session,
                         const v1::RegisterShardsRequest& request,
                         const DeviceRegions& devices) {
  auto registration = std::make_shared<Registration>();
  for (const v1::MemoryRegion& region : request.regions()) {
    const int index = static_cast<int>(registration->regions.size());
    switch (region.memory().kind_case()) {
      case v1::MemoryHandle::kArena: {
        auto arena = session.arenas.find(region.memory().arena().arena_id());
        if (arena == session.arenas.end()) {
          return ErrorStatus(
              absl::StatusCode::kNotFound, "ARENA_UNKNOWN",
              absl::StrCat("arena \"", region.memory().arena().arena_id(),
                           "\" is none that this session allocated"));
        }
        if (region.size_bytes() > arena->second->bytes()) {
          return ErrorStatus(
              absl::StatusCode::kInvalidArgument, "MEMORY_OUT_OF_RANGE",
              absl::StrCat("a region of ", region.size_bytes(),
                           " bytes in an arena of ", arena->second->bytes()));
        }
        registration->regions.push_back({arena->second->data(),
                                         region.size_bytes(), /*guard=*/false,
                                         arena->second, arena->first,
                                         /*device_uuid=*/""});
        registration->memory.push_back(arena->second);
        break;
      }
      case v1::MemoryHandle::kPosixShm: {
        const std::string& name = region.memory().posix_shm().name();
        const absl::Status status = AddForeign(
            session.process, transport::OpenPosixShm(name, /*writable=*/false),
            name, region.size_bytes(), registration.get());
        if (!status.ok()) return ApiStatus(status);
        break;
      }
      case v1::MemoryHandle::kOpenFile: {
        const v1::OpenFileMemory& file = region.memory().open_file();
        if (session.process <= 0) {
          return ErrorStatus(
              absl::StatusCode::kNotFound, "MEMORY_UNKNOWN",
              absl::StrCat("process ", session.identity.pid(),
                           " is none that this daemon sees, so it cannot open "
                           "the files that it has open: give both one pid "
                           "namespace, or keep the tensors in an arena"));
        }
        const absl::Status status =
            AddForeign(session.process,
                       transport::OpenProcessFile(session.process, file.fd(),
                                                  file.device(), file.inode()),
                       absl::StrCat("descriptor ", file.fd()),
                       region.size_bytes(), registration.get());
        if (!status.ok()) return ApiStatus(status);
        break;
      }
      case v1::MemoryHandle::kCudaIpc: {
        const auto& [device, made] = devices[index];
        // What workers have open already stays open, where it is the same.
        std::shared_ptr<const DeviceShare> share = made;
        if (share != nullptr && session.registration != nullptr) {
          for (const auto& before : session.registration->shares) {
            if (before->handle == share->handle) share = before;
          }
        }
        SourceRegion source;
        source.data = device->data();
        source.size_bytes = region.size_bytes();
        if (share != nullptr) {
          source.arena = share->control;
          source.arena_id = share->arena_id;
          source.device_uuid = share->device_uuid;
          registration->shares.push_back(share);
        }
        registration->regions.push_back(std::move(source));
        registration->memory.push_back(device);
        registration->devices.push_back(device);
        break;
      }
      default:
        return ErrorStatus(absl::StatusCode::kInvalidArgument,
                           "MEMORY_KIND_MISSING",
                           "a region has no memory handle; name an arena or "
                           "POSIX shared memory");
    }
  }
  const absl::Status memory =
      CheckShardMemory(registration->regions, request.shards());
  if (!memory.ok()) return memory;
  registration->shards = request.shards();
  registration->bytes = ShardBytes(request);
  return registration;
}

void TrainerSessions::ReportShards(const Session& session,
                                   const Registration& registration,
                                   v1::RankShards* report) {
  report->set_model(session.identity.model());
  report->set_rank(session.identity.rank());
  report->set_session(session.session);
  absl::flat_hash_map<absl::string_view, int> index;
  index.reserve(static_cast<size_t>(registration.shards.size()));
  report->mutable_parameters()->Reserve(registration.shards.size());
  report->mutable_shards()->Reserve(registration.shards.size());
  for (const v1::TensorShard& shard : registration.shards) {
    const auto added =
        index.emplace(shard.parameter().name(), report->parameters_size());
    if (added.second) *report->add_parameters() = shard.parameter();
    v1::ShardBox* box = report->add_shards();
    box->set_parameter(added.first->second);
    if (shard.has_box()) *box->mutable_box() = shard.box();
    box->set_dtype(shard.dtype());
  }
}

}  // namespace daemon
}  // namespace weightsync
