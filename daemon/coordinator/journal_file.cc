#include "daemon/coordinator/journal_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

absl::Status IoError(absl::string_view what, const std::string& path) {
  const int error = errno;
  return ErrorStatus(error == ENOENT ? absl::StatusCode::kNotFound
                                     : absl::StatusCode::kInternal,
                     "JOURNAL_IO",
                     absl::StrCat(what, " ", path, ": ",
                                  std::generic_category().message(error)));
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

class PosixFile : public JournalFile {
 public:
  PosixFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  absl::Status Append(absl::string_view data) override {
    while (!data.empty()) {
      const ssize_t n = write(fd_.get(), data.data(), data.size());
      if (n < 0) {
        if (errno == EINTR) continue;
        return IoError("cannot write", path_);
      }
      data.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (fdatasync(fd_.get()) != 0) return IoError("cannot sync", path_);
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  const Fd fd_;
};

class PosixFiles : public JournalFiles {
 public:
  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset,
                                   int64_t size) override {
    Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd.get() < 0) return IoError("cannot open", path);
    std::string data(static_cast<size_t>(size), '\0');
    size_t read = 0;
    while (read < data.size()) {
      const ssize_t n = pread(fd.get(), &data[read], data.size() - read,
                              offset + static_cast<int64_t>(read));
      if (n < 0) {
        if (errno == EINTR) continue;
        return IoError("cannot read", path);
      }
      if (n == 0) break;
      read += static_cast<size_t>(n);
    }
    data.resize(read);
    return data;
  }

  absl::StatusOr<std::unique_ptr<JournalFile>> Create(
      const std::string& path) override {
    const int fd =
        open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC,
             0600);
    if (fd < 0) return IoError("cannot create", path);
    return std::unique_ptr<JournalFile>(new PosixFile(path, fd));
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) != 0)
      return IoError("cannot rename", from);
    return absl::OkStatus();
  }

  absl::Status SyncDirectory(const std::string& dir) override {
    Fd fd(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd.get() < 0) return IoError("cannot open", dir);
    if (fsync(fd.get()) != 0) return IoError("cannot sync", dir);
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<void>> Lock(const std::string& path) override {
    auto fd = std::make_shared<Fd>(
        open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (fd->get() < 0) return IoError("cannot create", path);
    if (flock(fd->get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        return ErrorStatus(absl::StatusCode::kFailedPrecondition,
                           "JOURNAL_LOCKED",
                           absl::StrCat(path,
                                        " is held by another daemon; give this "
                                        "one another --state_dir"));
      }
      return IoError("cannot lock", path);
    }
    return std::shared_ptr<void>(std::move(fd));
  }
};

}  // namespace

JournalFiles* SystemJournalFiles() {
  static PosixFiles* const files = new PosixFiles;
  return files;
}

}  // namespace daemon
}  // namespace weightsync
