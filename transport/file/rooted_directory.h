// Files below one directory, and nowhere else: names come from other machines.
//
// A path is relative, of plain names ("runs/7/model.safetensors"). None of its
// components is a symbolic link, also when one is put there while it is being
// opened: the kernel resolves it (openat2), or every component is opened by
// itself, without following links.
#ifndef WEIGHTSYNC_TRANSPORT_FILE_ROOTED_DIRECTORY_H_
#define WEIGHTSYNC_TRANSPORT_FILE_ROOTED_DIRECTORY_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace transport {

// "a/b" of "a//b/". INVALID_ARGUMENT (CHECKPOINT_PATH_INVALID): empty,
// absolute, a component that is "." or "..", a control character, too long.
absl::StatusOr<std::string> CheckRootedPath(absl::string_view path);

// What a system call on a file of a checkpoint says:
//   NOT_FOUND (CHECKPOINT_NOT_FOUND), INVALID_ARGUMENT
//   (CHECKPOINT_PATH_INVALID: a symbolic link), RESOURCE_EXHAUSTED (DISK_FULL),
//   ALREADY_EXISTS (CHECKPOINT_EXISTS), INTERNAL (CHECKPOINT_IO).
absl::Status FileError(absl::string_view what, absl::string_view path,
                       int error_number);

// Thread-safe.
class RootedDirectory {
 public:
  // `use_openat2`: false as on a kernel that has none.
  //   FAILED_PRECONDITION (CHECKPOINT_ROOT_MISSING): it cannot be opened.
  static absl::StatusOr<std::shared_ptr<const RootedDirectory>> Open(
      const std::string& root, bool use_openat2 = true);

  const std::string& root() const { return root_; }

  // All of these check the path; errors of FileError.

  // `flags` and `mode` as of open(2); O_CLOEXEC is added.
  absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags,
                                    mode_t mode = 0) const;
  absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path) const;
  // What lies there; a link is not followed. Of a path that cannot be looked
  // at: kNothing.
  enum class Kind { kNothing, kFile, kDirectory, kLink, kOther };
  Kind KindOf(const std::string& path) const;
  bool Exists(const std::string& path) const {
    return KindOf(path) != Kind::kNothing;
  }
  // With those above it that are missing; they and what holds them are synced.
  // `fresh`: it must not be there (CHECKPOINT_EXISTS).
  absl::Status MakeDirectory(const std::string& path, bool fresh) const;
  // Names of what is in it, sorted.
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) const;
  absl::StatusOr<std::string> ReadFile(const std::string& path,
                                       int64_t most_bytes) const;
  // Synced. The file must not be there.
  absl::Status WriteNewFile(const std::string& path,
                            absl::string_view bytes) const;
  absl::Status RemoveFile(const std::string& path) const;
  // With all that is in it; links are removed, not followed. One that is not
  // there is fine.
  absl::Status RemoveTree(const std::string& path) const;
  // A directory, if nothing is in it; whether it is gone.
  bool RemoveIfEmpty(const std::string& path) const;
  // Of the directory itself.
  absl::Status Sync(const std::string& path) const;

  // Puts directory `from` where `to` is or is not; both are beside each other.
  // Nobody sees `to` missing or half there. With `replace` what was at `to` is
  // at `from` afterwards, or nothing. Synced; what cannot be is undone.
  //   CHECKPOINT_EXISTS: something is there, and not `replace`.
  // Where the file system cannot exchange two names, `to` is first moved to
  // AsideName(to), and moved back by Recover if that was cut short.
  absl::Status Put(const std::string& from, const std::string& to,
                   bool replace) const;
  static std::string AsideName(const std::string& to);
  // Completes or undoes what a Put to `to` may have left when its process
  // ended.
  absl::Status RecoverPut(const std::string& to) const;

  // For tests: Put as on a file system without renameat2's flags.
  void PretendNoExchange() const { no_exchange_ = true; }

 private:
  RootedDirectory(std::string root, UniqueFd fd, bool use_openat2)
      : root_(std::move(root)), fd_(std::move(fd)), openat2_(use_openat2) {}

  // REQUIRES: a path of CheckRootedPath, or "" for the root.
  absl::StatusOr<UniqueFd> OpenChecked(const std::string& path, int flags,
                                       mode_t mode) const;
  // Why OpenChecked could not: with the part of the path that is in the way.
  absl::Status OpenError(const std::string& path, int error_number) const;
  // The directory that holds `path`; *leaf gets its last component.
  absl::StatusOr<UniqueFd> OpenParent(const std::string& path,
                                      std::string* leaf) const;

  const std::string root_;
  const UniqueFd fd_;
  const bool openat2_;
  mutable bool no_exchange_ = false;
};

// All of `bytes` at `offset`; errors of FileError.
absl::Status WriteAt(int fd, absl::string_view name, const char* bytes,
                     int64_t size, int64_t offset);
// The same for reading. A file that ends before is FAILED_PRECONDITION
// (CHECKPOINT_DAMAGED).
absl::Status ReadAt(int fd, absl::string_view name, char* bytes, int64_t size,
                    int64_t offset);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_FILE_ROOTED_DIRECTORY_H_
