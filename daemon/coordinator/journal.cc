#include "daemon/coordinator/journal.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using internal::v1::JournalRecord;

constexpr absl::string_view kMagicStem = "WSJRNL";
constexpr absl::string_view kMagic = "WSJRNL01";
constexpr size_t kFrameHead = 8;
// No record is larger; a length above it is damage.
constexpr uint32_t kMaxRecord = 512u << 20;

std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table;
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) ? 0x82F63B78u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}

void PutU32(uint32_t value, std::string* out) {
  for (int i = 0; i < 4; ++i)
    out->push_back(static_cast<char>(value >> (8 * i)));
}

uint32_t GetU32(absl::string_view data) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    value |= static_cast<uint32_t>(static_cast<unsigned char>(data[i]))
             << (8 * i);
  }
  return value;
}

std::string Frame(const JournalRecord& record) {
  const std::string payload = record.SerializeAsString();
  std::string length;
  PutU32(static_cast<uint32_t>(payload.size()), &length);
  std::string frame = length;
  PutU32(Crc32c(payload, Crc32c(length)), &frame);
  frame += payload;
  return frame;
}

absl::Status Damaged(const std::string& path, size_t offset,
                     absl::string_view what) {
  return ErrorStatus(
      absl::StatusCode::kDataLoss, "JOURNAL_DAMAGED",
      absl::StrCat(path, " is damaged at offset ", offset, ": ", what,
                   "; bring it back from a copy, or, to begin a new cluster, "
                   "empty the state directories of all its daemons"));
}

// Whether a well-formed frame begins somewhere in `data`: what lies before it
// was not torn by a crash.
bool HoldsFrame(absl::string_view data) {
  for (size_t at = 0; at + kFrameHead < data.size(); ++at) {
    const uint32_t length = GetU32(data.substr(at));
    if (length == 0 || length > data.size() - at - kFrameHead) continue;
    const uint32_t crc = GetU32(data.substr(at + 4));
    if (crc == Crc32c(data.substr(at + kFrameHead, length),
                      Crc32c(data.substr(at, 4)))) {
      return true;
    }
  }
  return false;
}

absl::Status Replay(const std::string& path, absl::string_view data,
                    JournalState* state) {
  if (data.size() < kMagic.size()) {
    // The crash came before the file had its name, or never was a journal.
    if (kMagic.substr(0, data.size()) == data) return absl::OkStatus();
    return Damaged(path, 0, "it does not begin as a journal does");
  }
  if (data.substr(0, kMagic.size()) != kMagic) {
    if (data.substr(0, kMagicStem.size()) != kMagicStem) {
      return Damaged(path, 0, "it does not begin as a journal does");
    }
    return ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "JOURNAL_FORMAT_UNSUPPORTED",
        absl::StrCat(path, " has format ", data.substr(kMagicStem.size(), 2),
                     "; this release reads 01"));
  }
  size_t at = kMagic.size();
  while (at < data.size()) {
    const size_t left = data.size() - at;
    absl::string_view why;
    if (data.find_first_not_of('\0', at) == absl::string_view::npos) {
      why = "the file ends in zeros";
    } else if (left < kFrameHead) {
      why = "the file ends in the head of a record";
    } else {
      const uint32_t length = GetU32(data.substr(at));
      if (length > kMaxRecord) {
        why = "a record has no sensible length";
      } else if (length > left - kFrameHead) {
        why = "the file ends in a record";
      } else {
        const absl::string_view payload = data.substr(at + kFrameHead, length);
        JournalRecord record;
        if (GetU32(data.substr(at + 4)) !=
            Crc32c(payload, Crc32c(data.substr(at, 4)))) {
          why = "a record's checksum is wrong";
          if (left - kFrameHead > length) return Damaged(path, at, why);
        } else if (!record.ParseFromArray(payload.data(),
                                          static_cast<int>(length))) {
          return Damaged(path, at, "a record cannot be read");
        } else {
          ApplyRecord(record, state);
          at += kFrameHead + length;
          continue;
        }
      }
    }
    if (HoldsFrame(data.substr(at + 1))) return Damaged(path, at, why);
    LOG(WARNING) << path << ": " << why << " at offset " << at << "; the last "
                 << left << " bytes were never promised to anybody and are cut";
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace

uint32_t Crc32c(absl::string_view data, uint32_t crc) {
  static const std::array<uint32_t, 256> table = MakeCrcTable();
  crc = ~crc;
  for (unsigned char c : data) crc = table[(crc ^ c) & 0xff] ^ (crc >> 8);
  return ~crc;
}

absl::StatusOr<std::unique_ptr<Journal>> Journal::Open(
    const std::string& dir, absl::Time now, absl::Duration request_ttl,
    JournalFiles* files) {
  if (files == nullptr) files = SystemJournalFiles();
  const std::string path = dir + "/coordinator.journal";
  const std::string fresh_path = path + ".new";

  absl::StatusOr<std::shared_ptr<void>> lock =
      files->Lock(dir + "/coordinator.lock");
  if (!lock.ok()) return lock.status();

  JournalState state;
  absl::StatusOr<std::string> data = files->Read(path);
  if (data.ok()) {
    absl::Status replayed = Replay(path, *data, &state);
    if (!replayed.ok()) return replayed;
  } else if (data.status().code() != absl::StatusCode::kNotFound) {
    return data.status();
  }
  ForgetOld(now - request_ttl, &state);

  std::string content(kMagic);
  for (const JournalRecord& record : RecordsOf(state)) content += Frame(record);
  absl::StatusOr<std::unique_ptr<JournalFile>> file = files->Create(fresh_path);
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Append(content);
  if (status.ok()) status = (*file)->Sync();
  if (status.ok()) status = files->Rename(fresh_path, path);
  if (status.ok()) status = files->SyncDirectory(dir);
  if (!status.ok()) return status;

  return std::unique_ptr<Journal>(
      new Journal(std::move(state), *std::move(lock), *std::move(file),
                  static_cast<int64_t>(content.size())));
}

Journal::Journal(JournalState recovered, std::shared_ptr<void> lock,
                 std::unique_ptr<JournalFile> file, int64_t size_bytes)
    : recovered_(std::move(recovered)),
      lock_(std::move(lock)),
      file_(std::move(file)),
      size_bytes_(size_bytes) {}

absl::Status Journal::Append(const JournalRecord& record) {
  if (!broken_.ok()) return broken_;
  const std::string frame = Frame(record);
  absl::Status status = file_->Append(frame);
  if (status.ok()) status = file_->Sync();
  if (!status.ok()) {
    broken_ = status;
    return status;
  }
  size_bytes_ += static_cast<int64_t>(frame.size());
  return status;
}

}  // namespace daemon
}  // namespace weightsync
