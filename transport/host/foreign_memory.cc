#include "transport/host/foreign_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

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

absl::Status CheckIsMemory(int fd, const std::string& name) {
  struct stat found;
  struct statfs system;
  if (fstat(fd, &found) != 0 || fstatfs(fd, &system) != 0) {
    return MakeErrnoError(absl::StatusCode::kInvalidArgument, "NOT_MEMORY",
                          absl::StrCat("cannot look at ", name), errno);
  }
  if (S_ISREG(found.st_mode) && system.f_type == TMPFS_MAGIC) {
    return absl::OkStatus();
  }
  const char* what = !S_ISREG(found.st_mode) ? "is no file"
                     : system.f_type == HUGETLBFS_MAGIC
                         ? "is of huge pages"
                         : "is a file on a disk";
  return MakeError(absl::StatusCode::kInvalidArgument, "NOT_MEMORY",
                   absl::StrCat(name, " ", what,
                                ": give shared memory (memfd_create, shm_open, "
                                "a file on tmpfs), or place the tensors in an "
                                "arena"));
}

absl::StatusOr<UniqueFd> OpenProcessFile(pid_t process, int fd, uint64_t device,
                                         uint64_t inode) {
  const std::string name = absl::StrCat("/proc/", process, "/fd/", fd);
  struct stat found;
  // Looked at first: opening a pipe or a device is not without effects.
  if (process <= 0 || fd < 0 || stat(name.c_str(), &found) != 0) {
    if (process > 0 && fd >= 0 && (errno == EACCES || errno == EPERM)) {
      return MakeErrnoError(absl::StatusCode::kPermissionDenied,
                            "SEGMENT_DENIED",
                            absl::StrCat("cannot look at ", name,
                                         ": a daemon that is not root's "
                                         "opens files of its own user's "
                                         "processes"),
                            errno);
    }
    return MakeError(absl::StatusCode::kNotFound, "SEGMENT_UNKNOWN",
                     absl::StrCat("there is no ", name,
                                  " here; do both sides see the same "
                                  "processes (one pid namespace)"));
  }
  const auto is_meant = [&] {
    return static_cast<uint64_t>(found.st_dev) == device &&
           static_cast<uint64_t>(found.st_ino) == inode;
  };
  const auto another = [&] {
    return MakeError(absl::StatusCode::kNotFound, "SEGMENT_UNKNOWN",
                     absl::StrCat(name,
                                  " is another file here than the one that is "
                                  "meant; do both sides see the same "
                                  "processes (one pid namespace)"));
  };
  if (!is_meant()) return another();
  if (!S_ISREG(found.st_mode)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NOT_MEMORY",
                     absl::StrCat(name, " is no file: give shared memory"));
  }
  UniqueFd opened(
      open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!opened.valid()) {
    if (errno == EACCES || errno == EPERM) {
      return MakeErrnoError(absl::StatusCode::kPermissionDenied,
                            "SEGMENT_DENIED", absl::StrCat("cannot open ", name),
                            errno);
    }
    return MakeErrnoError(absl::StatusCode::kNotFound, "SEGMENT_UNKNOWN",
                          absl::StrCat("cannot open ", name), errno);
  }
  // The number may have been given to another file meanwhile.
  if (fstat(opened.get(), &found) != 0 || !is_meant()) return another();
  const absl::Status memory = CheckIsMemory(opened.get(), name);
  if (!memory.ok()) return memory;
  return opened;
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
