#ifndef WEIGHTSYNC_TRANSPORT_HOST_FOREIGN_MEMORY_H_
#define WEIGHTSYNC_TRANSPORT_HOST_FOREIGN_MEMORY_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {

// A mapping of memory that a client owns and may truncate at any time: torch's
// shared files, POSIX shm. Copy from it with CopyOptions::guard_source.
class ForeignMemory {
 public:
  // Maps `bytes` bytes from `offset` of the file. OUT_OF_RANGE
  // (SEGMENT_TOO_SMALL) when the file is shorter, INVALID_ARGUMENT (BAD_SIZE,
  // NOT_MEMORY), FAILED_PRECONDITION (READ_ONLY), RESOURCE_EXHAUSTED
  // (NO_ADDRESS_SPACE).
  static absl::StatusOr<std::unique_ptr<ForeignMemory>> Map(const UniqueFd& fd,
                                                            int64_t offset,
                                                            int64_t bytes,
                                                            bool writable);

  ~ForeignMemory();
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Nobody can shrink it, so nothing needs a guard.
  bool sealed() const { return sealed_; }

 private:
  ForeignMemory() = default;

  // Constant after Map.
  char* map_ = nullptr;
  int64_t map_bytes_ = 0;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  bool sealed_ = false;
};

// Opens POSIX shared memory by its name ("/name", no other slash). NOT_FOUND
// (SEGMENT_UNKNOWN), PERMISSION_DENIED (SEGMENT_DENIED), INVALID_ARGUMENT
// (BAD_SEGMENT_NAME).
absl::StatusOr<UniqueFd> OpenPosixShm(const std::string& name, bool writable);

// Opens, for reading, a file that another process of this pid namespace has
// open as `fd`: a memfd, or one that was unlinked. `device` and `inode` are
// what that process knows it by. NOT_FOUND (SEGMENT_UNKNOWN: no such process or
// descriptor, or another file), PERMISSION_DENIED (SEGMENT_DENIED), and those
// of CheckIsMemory.
absl::StatusOr<UniqueFd> OpenProcessFile(pid_t process, int fd, uint64_t device,
                                         uint64_t inode);

// Whether the file's pages are memory and nothing else: reading it must not
// wait for a disk, and a file on one is somebody's data. INVALID_ARGUMENT
// (NOT_MEMORY).
absl::Status CheckIsMemory(int fd, const std::string& name);

// Whether a process of this user and group may read the memory by itself: what
// a daemon of another user opens for it must not be more than that. OK for
// root. PERMISSION_DENIED (SEGMENT_DENIED).
absl::Status CheckOwner(const UniqueFd& fd, const std::string& name, uid_t uid,
                        gid_t gid);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_FOREIGN_MEMORY_H_
