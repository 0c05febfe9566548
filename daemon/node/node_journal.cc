#include "daemon/node/node_journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "schedule/stable_hash.h"
#include "transport/error.h"
#include "transport/host/unique_fd.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::MakeError;

constexpr char kHeader[] = "weightsync node journal 1";

std::string Checksum(absl::string_view text) {
  schedule::StableHash hash;
  hash.Add(text);
  return absl::StrCat("end ", hash.Finish());
}

absl::Status WriteError(const std::string& path, absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, "NODE_JOURNAL_WRITE_FAILED",
                   absl::StrCat(path, ": ", what, ": ", strerror(errno)));
}

absl::Status WriteAll(int fd, absl::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return WriteError(path, "write");
    text.remove_prefix(static_cast<size_t>(n));
  }
  if (fsync(fd) != 0) return WriteError(path, "fsync");
  return absl::OkStatus();
}

// errno, or 0.
int ReadAll(const std::string& path, std::string* text) {
  const transport::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return errno;
  char part[4096];
  while (true) {
    const ssize_t n = read(fd.get(), part, sizeof(part));
    if (n == 0) return 0;
    if (n > 0) {
      text->append(part, static_cast<size_t>(n));
    } else if (errno != EINTR) {
      return errno;
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeJournal>> NodeJournal::Open(
    const std::string& directory) {
  std::unique_ptr<NodeJournal> journal(new NodeJournal(directory));
  absl::Status status = journal->Read();
  if (!status.ok()) return status;
  return journal;
}

absl::Status NodeJournal::Read() {
  if (directory_.empty()) return absl::OkStatus();
  std::string text;
  const int error = ReadAll(path(), &text);
  // A node's first start. Whatever else stands in the way says nothing about
  // what was refused here.
  if (error == ENOENT) return absl::OkStatus();
  if (error != 0) {
    return transport::MakeErrnoError(
        absl::StatusCode::kFailedPrecondition, "NODE_JOURNAL_UNREADABLE",
        absl::StrCat(path(),
                     " cannot be read, and may say that updates were refused "
                     "here: let this user read and write it, or restart this "
                     "node's engines and remove it"),
        error);
  }
  auto damaged = [this](absl::string_view why) {
    return MakeError(
        absl::StatusCode::kDataLoss, "NODE_JOURNAL_DAMAGED",
        absl::StrCat(path(), " is damaged (", why,
                     "): it may have said that updates were refused here. "
                     "Restart this node's engines, remove the file and start "
                     "again"));
  };
  std::vector<std::string> lines =
      absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (lines.size() < 2 || lines[0] != kHeader) return damaged("no header");
  const size_t end = text.rfind("end ");
  if (end == std::string::npos ||
      lines.back() != Checksum(absl::string_view(text).substr(0, end))) {
    return damaged("the checksum does not fit");
  }
  for (size_t i = 1; i + 1 < lines.size(); ++i) {
    std::vector<std::string> fields = absl::StrSplit(lines[i], '\t');
    RefusedOffer offer;
    if (fields.size() != 7 || fields[0] != "refused" ||
        !absl::SimpleAtoi(fields[1], &offer.term) ||
        !absl::CUnescape(fields[2], &offer.model) ||
        !absl::CUnescape(fields[3], &offer.replica) ||
        !absl::CUnescape(fields[4], &offer.incarnation) ||
        !absl::CUnescape(fields[5], &offer.command_id) ||
        !absl::CUnescape(fields[6], &offer.update_id)) {
      return damaged(absl::StrCat("line ", i + 1));
    }
    refused_.push_back(std::move(offer));
  }
  return absl::OkStatus();
}

absl::Status NodeJournal::Refuse(const RefusedOffer& offer) {
  refused_.push_back(offer);
  if (refused_.size() > kKept) refused_.pop_front();
  return Write();
}

absl::Status NodeJournal::Write() const {
  if (directory_.empty()) return absl::OkStatus();
  std::string text = absl::StrCat(kHeader, "\n");
  for (const RefusedOffer& offer : refused_) {
    absl::StrAppend(
        &text, "refused\t", offer.term, "\t", absl::CEscape(offer.model), "\t",
        absl::CEscape(offer.replica), "\t", absl::CEscape(offer.incarnation),
        "\t", absl::CEscape(offer.command_id), "\t",
        absl::CEscape(offer.update_id), "\n");
  }
  absl::StrAppend(&text, Checksum(text), "\n");

  const std::string temporary = absl::StrCat(path(), ".new");
  const int fd =
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return WriteError(temporary, "open");
  absl::Status status = WriteAll(fd, text, temporary);
  close(fd);
  if (!status.ok()) return status;
  if (rename(temporary.c_str(), path().c_str()) != 0) {
    return WriteError(path(), "rename");
  }
  const int dir = open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return WriteError(directory_, "open");
  if (fsync(dir) != 0) status = WriteError(directory_, "fsync");
  close(dir);
  return status;
}

std::vector<std::string> NodeJournal::RefusedBy(
    absl::string_view model, absl::string_view replica,
    absl::string_view incarnation) const {
  std::vector<std::string> ids;
  for (const RefusedOffer& offer : refused_) {
    if (offer.model == model && offer.replica == replica &&
        offer.incarnation == incarnation) {
      ids.push_back(offer.command_id);
    }
  }
  return ids;
}

}  // namespace daemon
}  // namespace weightsync
