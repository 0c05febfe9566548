#include "transport/host/foreign_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr int64_t kPage = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<ForeignMemory>> ForeignMemory::Map(
    const UniqueFd& fd, int64_t offset, int64_t bytes, bool writable) {
  if (offset < 0 || bytes <= 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_SIZE",
        absl::StrCat(bytes, " bytes at offset ", offset, " of a segment"));
  }
  struct stat found;
  if (fstat(fd.get(), &found) != 0 || !S_ISREG(found.st_mode)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_MEMORY",
                     "the descriptor is not of shared memory or a file");
  }
  if (offset > found.st_size || bytes > found.st_size - offset) {
    return MakeError(absl::StatusCode::kOutOfRange, "SEGMENT_TOO_SMALL",
                     absl::StrCat(bytes, " bytes at offset ", offset,
                                  " go beyond a segment of ", found.st_size));
  }
  const int64_t start = offset / kPage * kPage;
  std::unique_ptr<ForeignMemory> memory(new ForeignMemory);
  memory->map_bytes_ = bytes + (offset - start);
  void* map = mmap(nullptr, memory->map_bytes_,
                   writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                   fd.get(), start);
  if (map == MAP_FAILED) {
    if (errno == EACCES || errno == EPERM) {
      return MakeErrnoError(absl::StatusCode::kFailedPrecondition, "READ_ONLY",
                            "cannot map the segment this way", errno);
    }
    return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                          "NO_ADDRESS_SPACE", "cannot map a segment", errno);
  }
  memory->map_ = static_cast<char*>(map);
  memory->data_ = memory->map_ + (offset - start);
  memory->bytes_ = bytes;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  memory->sealed_ = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  return memory;
}

ForeignMemory::~ForeignMemory() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

absl::StatusOr<UniqueFd> OpenPosixShm(const std::string& name, bool writable) {
  if (name.size() < 2 || name[0] != '/' ||
      name.find('/', 1) != std::string::npos || name == "/." || name == "/.." ||
      name.find('\0') != std::string::npos) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SEGMENT_NAME",
                     absl::StrCat("\"", name,
                                  "\" is no name of POSIX shared memory: "
                                  "\"/name\", without another slash"));
  }
  UniqueFd fd(
      shm_open(name.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0));
  if (fd.valid()) return fd;
  if (errno == EACCES || errno == EPERM) {
    return MakeErrnoError(absl::StatusCode::kPermissionDenied, "SEGMENT_DENIED",
                          absl::StrCat("cannot open ", name), errno);
  }
  return MakeErrnoError(absl::StatusCode::kNotFound, "SEGMENT_UNKNOWN",
                        absl::StrCat("cannot open ", name,
                                     "; do both sides see the same /dev/shm"),
                        errno);
}

absl::Status CheckOwner(const UniqueFd& fd, const std::string& name, uid_t uid,
                        gid_t gid) {
  struct stat found;
  if (fstat(fd.get(), &found) != 0) {
    return MakeErrnoError(absl::StatusCode::kInvalidArgument, "NOT_MEMORY",
                          absl::StrCat("cannot look at ", name), errno);
  }
  if (uid == 0) return absl::OkStatus();
  // As the kernel decides: the first class that fits is the one that counts.
  const mode_t needed = found.st_uid == uid   ? S_IRUSR
                        : found.st_gid == gid ? S_IRGRP
                                              : S_IROTH;
  if ((found.st_mode & needed) != 0) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kPermissionDenied, "SEGMENT_DENIED",
      absl::StrCat(name, " belongs to user ", found.st_uid, ", and user ", uid,
                   ", who registers it, may not read it"));
}

}  // namespace transport
}  // namespace weightsync
