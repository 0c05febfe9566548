#include "transport/file/rooted_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr size_t kMaxPathBytes = 2048;
constexpr int kMaxTreeDepth = 32;

int Openat2(int at, const char* path, int flags, mode_t mode) {
  open_how how = {};
  how.flags = static_cast<uint64_t>(static_cast<unsigned>(flags));
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(syscall(SYS_openat2, at, path, &how, sizeof(how)));
}

int Renameat2(int from_at, const char* from, int to_at, const char* to,
              unsigned flags) {
  return static_cast<int>(
      syscall(SYS_renameat2, from_at, from, to_at, to, flags));
}

// Takes the descriptor of a directory.
absl::StatusOr<std::vector<std::string>> NamesIn(UniqueFd fd,
                                                 absl::string_view path) {
  DIR* directory = fdopendir(fd.get());
  if (directory == nullptr) return FileError("list", path, errno);
  fd.release();
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int error = errno;
  closedir(directory);
  if (error != 0) return FileError("list", path, error);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status RemoveTreeAt(int at, const std::string& name,
                          const std::string& path, int depth) {
  if (unlinkat(at, name.c_str(), 0) == 0 || errno == ENOENT) {
    return absl::OkStatus();
  }
  if (errno != EISDIR && errno != EPERM) {
    return FileError("remove", path, errno);
  }
  UniqueFd fd(openat(at, name.c_str(),
                     O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return FileError("remove", path, errno);
  if (depth > kMaxTreeDepth) return FileError("remove", path, ENAMETOOLONG);
  UniqueFd again(dup(fd.get()));
  auto names = NamesIn(std::move(again), path);
  if (!names.ok()) return names.status();
  for (const std::string& inner : *names) {
    absl::Status status = RemoveTreeAt(
        fd.get(), inner, absl::StrCat(path, "/", inner), depth + 1);
    if (!status.ok()) return status;
  }
  if (unlinkat(at, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return FileError("remove", path, errno);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> CheckRootedPath(absl::string_view path) {
  const bool control = std::any_of(path.begin(), path.end(), [](const char c) {
    return absl::ascii_iscntrl(static_cast<unsigned char>(c));
  });
  const auto invalid = [path, control](absl::string_view why) {
    const absl::string_view begin = path.substr(0, 200);
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CHECKPOINT_PATH_INVALID",
        absl::StrCat("\"",
                     control ? absl::CHexEscape(begin) : std::string(begin),
                     "\" ", why,
                     "; give a path below --checkpoint_root, such as "
                     "runs/7"));
  };
  if (path.empty()) return invalid("is empty");
  if (path.size() > kMaxPathBytes) return invalid("is too long");
  if (path[0] == '/') return invalid("is absolute");
  if (control) return invalid("has a control character");
  std::vector<std::string> parts = absl::StrSplit(path, '/', absl::SkipEmpty());
  for (const std::string& part : parts) {
    if (part == "." || part == "..") {
      return invalid("has a component that is \".\" or \"..\"");
    }
    if (part.size() > 255) return invalid("has a component that is too long");
  }
  return absl::StrJoin(parts, "/");
}

absl::Status FileError(absl::string_view what, absl::string_view path,
                       int error_number) {
  const std::string sentence = absl::StrCat("cannot ", what, " ", path);
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return MakeErrnoError(absl::StatusCode::kNotFound, "CHECKPOINT_NOT_FOUND",
                            sentence, error_number);
    case ELOOP:
    case EXDEV:
      return MakeError(
          absl::StatusCode::kInvalidArgument, "CHECKPOINT_PATH_INVALID",
          absl::StrCat(sentence,
                       ": it has a symbolic link, or leads out of "
                       "--checkpoint_root; give a path without links"));
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return MakeErrnoError(absl::StatusCode::kResourceExhausted, "DISK_FULL",
                            absl::StrCat(sentence, "; make room"),
                            error_number);
    case EEXIST:
    case ENOTEMPTY:
      return MakeError(absl::StatusCode::kAlreadyExists, "CHECKPOINT_EXISTS",
                       absl::StrCat(path,
                                    " is there already; give another path, or "
                                    "say overwrite"));
    default:
      return MakeErrnoError(absl::StatusCode::kInternal, "CHECKPOINT_IO",
                            sentence, error_number);
  }
}

absl::StatusOr<std::shared_ptr<const RootedDirectory>> RootedDirectory::Open(
    const std::string& root, bool use_openat2) {
  UniqueFd fd(open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) {
    return MakeErrnoError(
        absl::StatusCode::kFailedPrecondition, "CHECKPOINT_ROOT_MISSING",
        absl::StrCat("--checkpoint_root=", root, " cannot be opened"), errno);
  }
  if (use_openat2) {
    UniqueFd probe(Openat2(fd.get(), ".", O_RDONLY | O_CLOEXEC, 0));
    use_openat2 = probe.valid();
  }
  return std::shared_ptr<const RootedDirectory>(
      new RootedDirectory(root, std::move(fd), use_openat2));
}

absl::Status RootedDirectory::OpenError(const std::string& path,
                                        int error_number) const {
  for (size_t slash = 0; slash != std::string::npos && !path.empty();) {
    slash = path.find('/', slash + 1);
    const std::string part = path.substr(0, slash);
    const Kind kind = KindOf(part);
    if (kind == Kind::kLink &&
        (error_number == ELOOP || error_number == EXDEV ||
         error_number == ENOTDIR)) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "CHECKPOINT_PATH_INVALID",
          absl::StrCat(
              part, " is a symbolic link, and none is followed below ",
              "--checkpoint_root: put what it points to in its place"));
    }
    if (kind != Kind::kDirectory && kind != Kind::kNothing &&
        error_number == ENOTDIR) {
      return MakeError(absl::StatusCode::kNotFound, "CHECKPOINT_NOT_FOUND",
                       absl::StrCat(part,
                                    " is a file, and a directory is "
                                    "looked for at ",
                                    path, ": give another path"));
    }
    if (kind == Kind::kNothing) break;
  }
  if (error_number == ENOENT) {
    return MakeError(
        absl::StatusCode::kNotFound, "CHECKPOINT_NOT_FOUND",
        absl::StrCat("there is no ", path, " below --checkpoint_root=", root_));
  }
  return FileError("open", path, error_number);
}

absl::StatusOr<UniqueFd> RootedDirectory::OpenChecked(const std::string& path,
                                                      int flags,
                                                      mode_t mode) const {
  flags |= O_CLOEXEC;
  const std::string name = path.empty() ? "." : path;
  if (openat2_) {
    // Without O_NOFOLLOW, under which a link to a directory is called none.
    UniqueFd fd(Openat2(fd_.get(), name.c_str(), flags, mode));
    if (!fd.valid()) return OpenError(path, errno);
    return fd;
  }
  UniqueFd at(dup(fd_.get()));
  if (!at.valid()) return FileError("open", path, errno);
  const std::vector<std::string> parts = absl::StrSplit(name, '/');
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool last = i + 1 == parts.size();
    UniqueFd next(openat(at.get(), parts[i].c_str(),
                         last ? flags | O_NOFOLLOW
                              : O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
                         mode));
    if (!next.valid()) return OpenError(path, errno);
    at = std::move(next);
  }
  return at;
}

absl::StatusOr<UniqueFd> RootedDirectory::OpenParent(const std::string& path,
                                                     std::string* leaf) const {
  auto checked = CheckRootedPath(path);
  if (!checked.ok()) return checked.status();
  const size_t slash = checked->rfind('/');
  *leaf = slash == std::string::npos ? *checked : checked->substr(slash + 1);
  return OpenChecked(
      slash == std::string::npos ? std::string() : checked->substr(0, slash),
      O_RDONLY | O_DIRECTORY, 0);
}

absl::StatusOr<UniqueFd> RootedDirectory::OpenFile(const std::string& path,
                                                   int flags,
                                                   mode_t mode) const {
  auto checked = CheckRootedPath(path);
  if (!checked.ok()) return checked.status();
  // A pipe would make us wait.
  auto fd = OpenChecked(*checked, flags | O_NONBLOCK, mode);
  if (!fd.ok()) return fd.status();
  struct stat info;
  if (fstat(fd->get(), &info) != 0) return FileError("open", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     "CHECKPOINT_DAMAGED",
                     absl::StrCat(path, " is no regular file"));
  }
  return fd;
}

absl::StatusOr<UniqueFd> RootedDirectory::OpenDirectory(
    const std::string& path) const {
  auto checked = CheckRootedPath(path);
  if (!checked.ok()) return checked.status();
  return OpenChecked(*checked, O_RDONLY | O_DIRECTORY, 0);
}

RootedDirectory::Kind RootedDirectory::KindOf(const std::string& path) const {
  std::string leaf;
  auto parent = OpenParent(path, &leaf);
  struct stat info;
  if (!parent.ok() ||
      fstatat(parent->get(), leaf.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return Kind::kNothing;
  }
  return S_ISREG(info.st_mode)   ? Kind::kFile
         : S_ISDIR(info.st_mode) ? Kind::kDirectory
         : S_ISLNK(info.st_mode) ? Kind::kLink
                                 : Kind::kOther;
}

absl::Status RootedDirectory::MakeDirectory(const std::string& path,
                                            bool fresh) const {
  auto checked = CheckRootedPath(path);
  if (!checked.ok()) return checked.status();
  for (size_t slash = 0; slash != std::string::npos;) {
    slash = checked->find('/', slash == 0 ? 0 : slash + 1);
    const std::string prefix = checked->substr(0, slash);
    std::string leaf;
    auto parent = OpenParent(prefix, &leaf);
    if (!parent.ok()) return parent.status();
    if (mkdirat(parent->get(), leaf.c_str(), 0777) != 0) {
      const int error = errno;
      const bool last = slash == std::string::npos;
      if (error != EEXIST || (last && fresh)) {
        return FileError("make", prefix, error);
      }
      continue;
    }
    if (fsync(parent->get()) != 0) return FileError("sync", prefix, errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> RootedDirectory::List(
    const std::string& path) const {
  auto fd = OpenDirectory(path);
  if (!fd.ok()) return fd.status();
  return NamesIn(*std::move(fd), path);
}

absl::StatusOr<std::string> RootedDirectory::ReadFile(
    const std::string& path, int64_t most_bytes) const {
  auto fd = OpenFile(path, O_RDONLY);
  if (!fd.ok()) return fd.status();
  struct stat info;
  if (fstat(fd->get(), &info) != 0) return FileError("read", path, errno);
  if (info.st_size > most_bytes) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "CHECKPOINT_DAMAGED",
        absl::StrCat(path, " has ", info.st_size, " bytes; more than ",
                     most_bytes, " are not believed"));
  }
  std::string bytes(static_cast<size_t>(info.st_size), '\0');
  absl::Status status = ReadAt(fd->get(), path, &bytes[0], info.st_size, 0);
  if (!status.ok()) return status;
  return bytes;
}

absl::Status RootedDirectory::WriteNewFile(const std::string& path,
                                           absl::string_view bytes) const {
  auto fd = OpenFile(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (!fd.ok()) return fd.status();
  absl::Status status = WriteAt(fd->get(), path, bytes.data(),
                                static_cast<int64_t>(bytes.size()), 0);
  if (!status.ok()) return status;
  if (fsync(fd->get()) != 0) return FileError("sync", path, errno);
  return absl::OkStatus();
}

absl::Status RootedDirectory::RemoveFile(const std::string& path) const {
  std::string leaf;
  auto parent = OpenParent(path, &leaf);
  if (!parent.ok()) return parent.status();
  if (unlinkat(parent->get(), leaf.c_str(), 0) != 0 && errno != ENOENT) {
    return FileError("remove", path, errno);
  }
  return absl::OkStatus();
}

absl::Status RootedDirectory::RemoveTree(const std::string& path) const {
  std::string leaf;
  auto parent = OpenParent(path, &leaf);
  if (!parent.ok()) {
    return absl::IsNotFound(parent.status()) ? absl::OkStatus()
                                             : parent.status();
  }
  absl::Status status = RemoveTreeAt(parent->get(), leaf, path, 0);
  if (!status.ok()) return status;
  if (fsync(parent->get()) != 0) return FileError("sync", path, errno);
  return absl::OkStatus();
}

bool RootedDirectory::RemoveIfEmpty(const std::string& path) const {
  std::string leaf;
  auto parent = OpenParent(path, &leaf);
  return parent.ok() &&
         (unlinkat(parent->get(), leaf.c_str(), AT_REMOVEDIR) == 0 ||
          errno == ENOENT);
}

absl::Status RootedDirectory::Sync(const std::string& path) const {
  auto fd = OpenDirectory(path);
  if (!fd.ok()) return fd.status();
  if (fsync(fd->get()) != 0) return FileError("sync", path, errno);
  return absl::OkStatus();
}

std::string RootedDirectory::AsideName(const std::string& to) {
  const size_t slash = to.rfind('/');
  const size_t leaf = slash == std::string::npos ? 0 : slash + 1;
  return absl::StrCat(to.substr(0, leaf), ".", to.substr(leaf),
                      ".weightsync-aside");
}

absl::Status RootedDirectory::Put(const std::string& from,
                                  const std::string& to, bool replace) const {
  std::string from_leaf;
  std::string to_leaf;
  auto from_parent = OpenParent(from, &from_leaf);
  if (!from_parent.ok()) return from_parent.status();
  auto to_parent = OpenParent(to, &to_leaf);
  if (!to_parent.ok()) return to_parent.status();
  const int from_at = from_parent->get();
  const int to_at = to_parent->get();
  // Nobody may count on what could not be synced: `undo` takes it back.
  const auto synced = [&](const auto& undo) {
    if (fsync(to_at) == 0) return absl::OkStatus();
    const absl::Status status = FileError("sync", to, errno);
    undo();
    return status;
  };
  // Until the name is free, or taken: somebody else may be at it.
  for (int attempt = 0; attempt < 8 && !no_exchange_; ++attempt) {
    if (Renameat2(from_at, from_leaf.c_str(), to_at, to_leaf.c_str(),
                  RENAME_NOREPLACE) == 0) {
      return synced([&] {
        Renameat2(to_at, to_leaf.c_str(), from_at, from_leaf.c_str(),
                  RENAME_NOREPLACE);
      });
    }
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) break;
    if (errno != EEXIST || !replace) return FileError("make", to, errno);
    if (Renameat2(from_at, from_leaf.c_str(), to_at, to_leaf.c_str(),
                  RENAME_EXCHANGE) == 0) {
      return synced([&] {
        Renameat2(to_at, to_leaf.c_str(), from_at, from_leaf.c_str(),
                  RENAME_EXCHANGE);
      });
    }
    if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) break;
    if (errno != ENOENT) return FileError("replace", to, errno);
  }
  struct stat info;
  const bool there =
      fstatat(to_at, to_leaf.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
  if (there && !replace) return FileError("make", to, EEXIST);
  std::string aside_leaf;
  if (there) {
    const std::string aside = AsideName(to);
    absl::Status status = RemoveTree(aside);
    if (!status.ok()) return status;
    auto parent = OpenParent(aside, &aside_leaf);
    if (!parent.ok()) return parent.status();
    if (renameat(to_at, to_leaf.c_str(), to_at, aside_leaf.c_str()) != 0) {
      return FileError("replace", to, errno);
    }
  }
  if (renameat(from_at, from_leaf.c_str(), to_at, to_leaf.c_str()) != 0) {
    const absl::Status status = FileError("make", to, errno);
    if (there) renameat(to_at, aside_leaf.c_str(), to_at, to_leaf.c_str());
    return status;
  }
  absl::Status status = synced([&] {
    renameat(to_at, to_leaf.c_str(), from_at, from_leaf.c_str());
    if (there) renameat(to_at, aside_leaf.c_str(), to_at, to_leaf.c_str());
  });
  if (!status.ok() || !there) return status;
  return RemoveTree(AsideName(to));
}

absl::Status RootedDirectory::RecoverPut(const std::string& to) const {
  const std::string aside = AsideName(to);
  if (!Exists(aside)) return absl::OkStatus();
  if (Exists(to)) return RemoveTree(aside);
  return Put(aside, to, false);
}

absl::Status WriteAt(int fd, absl::string_view name, const char* bytes,
                     int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t done = pwrite(fd, bytes, static_cast<size_t>(size),
                                static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    // A file system that is full may say so with nothing written.
    if (done <= 0) return FileError("write", name, done < 0 ? errno : ENOSPC);
    bytes += done;
    size -= done;
    offset += done;
  }
  return absl::OkStatus();
}

absl::Status ReadAt(int fd, absl::string_view name, char* bytes, int64_t size,
                    int64_t offset) {
  while (size > 0) {
    const ssize_t done =
        pread(fd, bytes, static_cast<size_t>(size), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return FileError("read", name, errno);
    if (done == 0) {
      return MakeError(absl::StatusCode::kFailedPrecondition,
                       "CHECKPOINT_DAMAGED",
                       absl::StrCat(name, " ends before byte ", offset + size,
                                    ", which it had when it was opened"));
    }
    bytes += done;
    size -= done;
    offset += done;
  }
  return absl::OkStatus();
}

}  // namespace transport
}  // namespace weightsync
