#include "daemon/coordinator/journal.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "daemon/coordinator/convert.h"
#include "glog/logging.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using internal::v1::JournalRecord;

constexpr absl::string_view kMagicStem = "WSJRNL";
constexpr absl::string_view kMagic = "WSJRNL02";
// Without batches.
constexpr absl::string_view kMagicBefore = "WSJRNL01";
constexpr size_t kFrameHead = 8;
// In a length: it was appended together with the record before.
constexpr uint32_t kContinues = 1u << 31;
// No record is larger; a length above it is damage.
constexpr uint32_t kMaxRecord = 512u << 20;
// Read and written at once; and read at most, of a record that is larger.
constexpr size_t kPiece = 1 << 20;
constexpr size_t kLargePiece = 16 << 20;
constexpr absl::Duration kForgetInterval = absl::Minutes(1);

std::string PathIn(const std::string& dir) {
  return dir + "/coordinator.journal";
}

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

void AppendFrame(const JournalRecord& record, bool continues,
                 std::string* out) {
  const std::string payload = record.SerializeAsString();
  std::string length;
  PutU32(static_cast<uint32_t>(payload.size()) | (continues ? kContinues : 0),
         &length);
  *out += length;
  PutU32(Crc32c(payload, Crc32c(length)), out);
  *out += payload;
}

absl::Status Damaged(const std::string& path, size_t offset,
                     absl::string_view what) {
  return ErrorStatus(
      absl::StatusCode::kDataLoss, "JOURNAL_DAMAGED",
      absl::StrCat(path, " is damaged at offset ", offset, ": ", what,
                   "; bring it back from a copy, or, to begin a new cluster, "
                   "empty the state directories of all its daemons"));
}

// A record is a message in a field of its own: what is not that needs no
// checksum to be told from one.
bool LooksLikeRecord(absl::string_view payload) {
  google::protobuf::io::CodedInputStream in(
      reinterpret_cast<const uint8_t*>(payload.data()),
      static_cast<int>(payload.size()));
  uint32_t length = 0;
  return (in.ReadTag() & 7) == 2 && in.ReadVarint32(&length) &&
         static_cast<size_t>(in.CurrentPosition()) + length == payload.size();
}

// Whether the well-formed beginning of a batch is somewhere in `data`: what
// lies before it was not torn by a crash.
bool HoldsBatch(absl::string_view data) {
  for (size_t at = 0; at + kFrameHead < data.size(); ++at) {
    const uint32_t length = GetU32(data.substr(at));
    if (length == 0 || length > data.size() - at - kFrameHead) continue;
    const absl::string_view payload = data.substr(at + kFrameHead, length);
    if (LooksLikeRecord(payload) &&
        GetU32(data.substr(at + 4)) ==
            Crc32c(payload, Crc32c(data.substr(at, 4)))) {
      return true;
    }
  }
  return false;
}

// A file from its front, in pieces.
class Pieces {
 public:
  Pieces(JournalFiles* files, const std::string& path)
      : files_(files), path_(path) {}

  // Of what was not skipped at least so much is there, or all that there is.
  absl::Status Fill(size_t size) {
    while (data().size() < size && !ended_) {
      buffer_.erase(0, skipped_);
      skipped_ = 0;
      const auto wanted = static_cast<int64_t>(
          std::min(kLargePiece, std::max(kPiece, size - buffer_.size())));
      auto piece = files_->Read(path_, read_, wanted);
      if (!piece.ok()) return piece.status();
      ended_ = static_cast<int64_t>(piece->size()) < wanted;
      read_ += static_cast<int64_t>(piece->size());
      buffer_ += *piece;
    }
    return absl::OkStatus();
  }
  absl::Status FillAll() {
    absl::Status status;
    while (status.ok() && !ended_) status = Fill(data().size() + kPiece);
    return status;
  }
  absl::string_view data() const {
    return absl::string_view(buffer_).substr(skipped_);
  }
  void Skip(size_t size) { skipped_ += size; }
  // Of the file, where data() begins.
  size_t offset() const { return static_cast<size_t>(read_) - data().size(); }

 private:
  JournalFiles* const files_;
  const std::string path_;
  std::string buffer_;
  size_t skipped_ = 0;
  int64_t read_ = 0;
  bool ended_ = false;
};

// *batches: whether the format has them. *empty: there is nothing behind it.
absl::Status ReadMagic(const std::string& path, Pieces* file, bool* batches,
                       bool* empty) {
  absl::Status status = file->Fill(kMagic.size());
  if (!status.ok()) return status;
  const absl::string_view magic = file->data().substr(0, kMagic.size());
  *batches = magic != kMagicBefore;
  *empty = magic.size() < kMagic.size();
  if (*empty) {
    // The crash came before the file had its name, or never was a journal.
    if (kMagic.substr(0, magic.size()) == magic ||
        kMagicBefore.substr(0, magic.size()) == magic) {
      return absl::OkStatus();
    }
    return Damaged(path, 0, "it does not begin as a journal does");
  }
  if (magic != kMagic && magic != kMagicBefore) {
    if (magic.substr(0, kMagicStem.size()) != kMagicStem) {
      return Damaged(path, 0, "it does not begin as a journal does");
    }
    return ErrorStatus(
        absl::StatusCode::kFailedPrecondition, "JOURNAL_FORMAT_UNSUPPORTED",
        absl::StrCat(path, " has format ", magic.substr(kMagicStem.size()),
                     "; this release reads 01 and 02"));
  }
  file->Skip(kMagic.size());
  return absl::OkStatus();
}

// Of requests those after `oldest` count.
absl::Status Replay(const std::string& path, JournalFiles* files,
                    absl::Time oldest, JournalState* state) {
  Pieces file(files, path);
  bool batches = false;
  bool empty = false;
  absl::Status status = ReadMagic(path, &file, &batches, &empty);
  if (!status.ok() || empty) return status;
  while (true) {
    status = file.Fill(kFrameHead);
    if (!status.ok()) return status;
    if (file.data().empty()) return absl::OkStatus();
    absl::string_view why = "the file ends in the head of a record";
    if (file.data().size() >= kFrameHead) {
      uint32_t length = GetU32(file.data());
      if (batches) length &= ~kContinues;
      if (length > kMaxRecord) {
        why = "a record has no sensible length";
      } else {
        // And the length of the next.
        status = file.Fill(kFrameHead + length + 4);
        if (!status.ok()) return status;
        const absl::string_view data = file.data();
        const absl::string_view payload = data.substr(kFrameHead, length);
        JournalRecord record;
        if (payload.size() < length) {
          why = "the file ends in a record";
        } else if (length == 0 ||
                   GetU32(data.substr(4)) !=
                       Crc32c(payload, Crc32c(data.substr(0, 4)))) {
          why = "a record's checksum is wrong";
          const absl::string_view behind = data.substr(kFrameHead + length);
          const uint32_t next = behind.size() < 4 ? 0 : GetU32(behind);
          // It was on the disk when the next batch was begun.
          if (length != 0 && (batches ? next != 0 && (next & kContinues) == 0
                                      : !behind.empty())) {
            return Damaged(path, file.offset(), why);
          }
        } else if (!record.ParseFromArray(payload.data(),
                                          static_cast<int>(length))) {
          return Damaged(path, file.offset(), "a record cannot be read");
        } else {
          const bool old = record.has_request_opened() &&
                           FromProto(record.request_opened().time()) <= oldest;
          if (!old) ApplyRecord(record, state);
          file.Skip(kFrameHead + length);
          continue;
        }
      }
    }
    status = file.FillAll();
    if (!status.ok()) return status;
    const absl::string_view rest = file.data();
    if (rest.find_first_not_of('\0') == absl::string_view::npos) {
      why = "the file ends in zeros";
    } else if (HoldsBatch(rest.substr(1))) {
      return Damaged(path, file.offset(), why);
    }
    LOG(WARNING) << path << ": " << why << " at offset " << file.offset()
                 << "; the last " << rest.size()
                 << " bytes were never promised to anybody and are cut";
    return absl::OkStatus();
  }
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
    JournalFiles* files, int64_t grown_bytes) {
  if (files == nullptr) files = SystemJournalFiles();
  const std::string path = PathIn(dir);
  absl::StatusOr<std::shared_ptr<void>> lock =
      files->Lock(dir + "/coordinator.lock");
  if (!lock.ok()) return lock.status();

  JournalState state;
  const absl::Status replayed = Replay(path, files, now - request_ttl, &state);
  if (!replayed.ok() && replayed.code() != absl::StatusCode::kNotFound) {
    return replayed;
  }
  ForgetOld(now - request_ttl, &state);

  auto journal =
      absl::WrapUnique(new Journal(dir, request_ttl, files, grown_bytes,
                                   std::move(state), *std::move(lock)));
  bool replaced = false;
  const absl::Status status = journal->WriteAnew(&replaced);
  if (!status.ok()) return status;
  journal->forget_time_ = now + kForgetInterval;
  return journal;
}

Journal::Journal(const std::string& dir, absl::Duration request_ttl,
                 JournalFiles* files, int64_t grown_bytes, JournalState state,
                 std::shared_ptr<void> lock)
    : dir_(dir),
      request_ttl_(request_ttl),
      files_(files),
      grown_bytes_(grown_bytes),
      state_(std::move(state)),
      lock_(std::move(lock)) {}

absl::Status Journal::WriteAnew(bool* replaced) {
  *replaced = false;
  const std::string path = PathIn(dir_);
  const std::string fresh_path = path + ".new";
  absl::StatusOr<std::unique_ptr<JournalFile>> file =
      files_->Create(fresh_path);
  if (!file.ok()) return file.status();
  std::string piece(kMagic);
  int64_t size = 0;
  const auto write = [&] {
    const absl::Status status = (*file)->Append(piece);
    size += static_cast<int64_t>(piece.size());
    piece.clear();
    return status;
  };
  absl::Status status;
  for (const JournalRecord& record : RecordsOf(state_)) {
    AppendFrame(record, false, &piece);
    if (piece.size() >= kPiece) status = write();
    if (!status.ok()) return status;
  }
  status = write();
  if (status.ok()) status = (*file)->Sync();
  if (!status.ok()) return status;
  *replaced = true;
  status = files_->Rename(fresh_path, path);
  if (status.ok()) status = files_->SyncDirectory(dir_);
  if (!status.ok()) return status;
  file_ = *std::move(file);
  size_bytes_ = size;
  anew_at_ = std::max(grown_bytes_, 4 * size);
  return absl::OkStatus();
}

absl::Status Journal::Append(const std::vector<const JournalRecord*>& records) {
  if (!broken_.ok()) return broken_;
  std::string frames;
  for (const JournalRecord* record : records) {
    AppendFrame(*record, record != records.front(), &frames);
  }
  absl::Status status = file_->Append(frames);
  if (status.ok()) status = file_->Sync();
  if (!status.ok()) {
    broken_ = status;
    return status;
  }
  size_bytes_ += static_cast<int64_t>(frames.size());
  for (const JournalRecord* record : records) ApplyRecord(*record, &state_);
  return status;
}

absl::Status Journal::Append(const JournalRecord& record) {
  return Append(std::vector<const JournalRecord*>{&record});
}

absl::Status Journal::Tend(absl::Time now) {
  if (!broken_.ok()) return broken_;
  if (now >= forget_time_) {
    forget_time_ = now + kForgetInterval;
    state_.requests.ForgetUntil(now - request_ttl_);
  }
  if (size_bytes_ < anew_at_) return absl::OkStatus();
  const int64_t before = size_bytes_;
  ForgetOld(now - request_ttl_, &state_);
  bool replaced = false;
  const absl::Status status = WriteAnew(&replaced);
  if (status.ok()) {
    LOG(INFO) << PathIn(dir_) << " had " << before
              << " bytes and was written anew with " << size_bytes_;
    return status;
  }
  if (replaced) {
    broken_ = status;
    return status;
  }
  // All that was promised is in the old one.
  anew_at_ = size_bytes_ + grown_bytes_ / 4;
  LOG(ERROR) << PathIn(dir_) << " has " << before
             << " bytes and cannot be written anew: " << status
             << "; make room on its disk";
  return absl::OkStatus();
}

}  // namespace daemon
}  // namespace weightsync
