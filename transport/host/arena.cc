#include "transport/host/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "transport/error.h"
#include "transport/host/limits.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace weightsync {
namespace transport {
namespace {

constexpr char kMagic[8] = {'W', 'S', 'A', 'R', 'E', 'N', 'A', '\0'};
constexpr uint32_t kVersion = 1;
constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int kMaxGenerationSlots = 1 << 20;

// At the start of the memfd; the generations follow it. Read by processes of
// other builds: only a new version changes it.
struct Header {
  char magic[8];
  uint32_t version;
  uint32_t generation_slots;
  int64_t header_bytes;  // data starts here
  int64_t data_bytes;
  int64_t reserved[4];
};
static_assert(sizeof(Header) == 64, "part of the format");
static_assert(sizeof(std::atomic<uint64_t>) == 8 &&
                  std::atomic<uint64_t>::is_always_lock_free,
              "generations are shared between processes");

int64_t RoundUp(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

absl::Status NotAnArena(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status NoMemory(absl::string_view message, int error_number) {
  return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                        "NO_MEMORY_FOR_ARENA", message, error_number);
}

// errno, or 0.
int Populate(char* from, int64_t length, bool write) {
  while (true) {
    if (madvise(from, static_cast<size_t>(length),
                write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0) {
      return 0;
    }
    if (errno != EINTR && errno != EAGAIN) break;
  }
  // A page that cannot be had would be a SIGBUS at its first touch.
  if (errno != EINVAL) return errno;
  // Before Linux 5.14. Adding nothing makes the page there without changing
  // what another process may have stored.
  for (int64_t at = 0; at < length; at += kPage) {
    auto* byte = reinterpret_cast<std::atomic<char>*>(from + at);
    if (write) {
      byte->fetch_add(0, std::memory_order_relaxed);
    } else {
      byte->load(std::memory_order_relaxed);
    }
  }
  return 0;
}

// Faults a mapping in. NO_MEMORY_FOR_ARENA: not all of its pages are to be had.
absl::Status WarmUp(char* map, int64_t bytes, bool write, int threads) {
  const int64_t part =
      RoundUp(std::max<int64_t>(bytes / std::max(threads, 1), 1), kHugePage);
  std::atomic<int> failed{0};
  const auto populate = [&, map, bytes, write](int64_t from) {
    const int error = Populate(map + from, std::min(part, bytes - from), write);
    if (error != 0) failed.store(error, std::memory_order_relaxed);
  };
  std::vector<std::thread> helpers;
  for (int64_t from = part; from < bytes; from += part)
    helpers.emplace_back(populate, from);
  populate(0);
  for (std::thread& helper : helpers) helper.join();
  if (failed == 0) return absl::OkStatus();
  return NoMemory(
      absl::StrCat("the kernel does not give all pages of an arena of ", bytes,
                   " bytes (a limit of overcommitted memory, perhaps, or "
                   "pages that are broken)"),
      failed);
}

}  // namespace

absl::Status Arena::Map(int64_t file_bytes, bool huge_pages) {
  // Huge pages need an address that is as far from a huge page's start as the
  // offset in the file is. The kernel does not see to that for memfds: reserve
  // more, and map at the right place in it.
  const int64_t slack = huge_pages ? kHugePage : 0;
  char* reserved = static_cast<char*>(
      mmap(nullptr, file_bytes + slack, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (reserved == MAP_FAILED)
    return NoMemory("no address space for an arena", errno);
  char* at = reserved;
  if (huge_pages)
    at = reinterpret_cast<char*>(
        RoundUp(reinterpret_cast<int64_t>(reserved), kHugePage));
  void* map =
      mmap(at, file_bytes, writable_ ? PROT_READ | PROT_WRITE : PROT_READ,
           MAP_SHARED | MAP_FIXED, fd_.get(), 0);
  if (map == MAP_FAILED) {
    const int error_number = errno;
    munmap(reserved, file_bytes + slack);
    if (error_number == EPERM || error_number == EACCES) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "READ_ONLY",
          "this arena's exporter does not let other processes write to it");
    }
    return NoMemory("cannot map an arena", error_number);
  }
  if (at > reserved) munmap(reserved, at - reserved);
  char* const end = at + RoundUp(file_bytes, kPage);
  if (reserved + file_bytes + slack > end)
    munmap(end, reserved + file_bytes + slack - end);
  map_ = at;
  map_bytes_ = file_bytes;
  // Advice: on kernels without huge pages for shared memory nothing is lost.
  if (huge_pages) madvise(map_, map_bytes_, MADV_HUGEPAGE);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(
    int64_t bytes, const CreateOptions& options) {
  if (bytes <= 0 || bytes > INT64_MAX / 2) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SIZE",
                     absl::StrCat("an arena of ", bytes, " bytes"));
  }
  if (options.generation_slots < 0 ||
      options.generation_slots > kMaxGenerationSlots) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_SIZE",
        absl::StrCat("an arena of ", options.generation_slots,
                     " generation slots; the most is ", kMaxGenerationSlots));
  }
  const int64_t header_bytes = RoundUp(
      sizeof(Header) + sizeof(std::atomic<uint64_t>) * options.generation_slots,
      kPage);
  const int64_t file_bytes = header_bytes + RoundUp(bytes, kPage);
  const std::string name =
      absl::StrCat("weightsync-", options.name).substr(0, 200);

  // One at a time, so that the second one's look at the memory sees what the
  // first one took.
  static absl::Mutex* const one_at_a_time = new absl::Mutex;
  absl::MutexLock lock(one_at_a_time);
  absl::Status status =
      CheckMemory(absl::StrCat("arena \"", options.name, "\""), file_bytes,
                  options.keep_free_bytes, LookAtMemory());
  if (!status.ok()) return status;

  std::unique_ptr<Arena> arena(new Arena);
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  arena->fd_ = UniqueFd(memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (!arena->fd_.valid() && errno == EINVAL)
    arena->fd_ = UniqueFd(memfd_create(name.c_str(), flags));
  if (!arena->fd_.valid()) return NoMemory("cannot create a memfd", errno);
  if (ftruncate(arena->fd_.get(), file_bytes) != 0)
    return NoMemory("cannot size a memfd", errno);
  arena->writable_ = true;
  const bool huge_pages = options.huge_pages && file_bytes >= kHugePage;
  status = arena->Map(file_bytes, huge_pages);
  if (!status.ok()) return status;
  int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (options.others_read_only) seals |= F_SEAL_FUTURE_WRITE;
  if (fcntl(arena->fd_.get(), F_ADD_SEALS, seals) != 0) {
    return MakeErrnoError(absl::StatusCode::kInternal, "ARENA_NOT_SEALED",
                          "cannot seal a memfd", errno);
  }
  arena->others_read_only_ = options.others_read_only;

  const absl::Time start = absl::Now();
  status =
      WarmUp(arena->map_, file_bytes, /*write=*/true, options.warm_up_threads);
  if (!status.ok()) return status;
  arena->warm_up_time_ = absl::Now() - start;

  Header* header = reinterpret_cast<Header*>(arena->map_);
  header->version = kVersion;
  header->generation_slots = static_cast<uint32_t>(options.generation_slots);
  header->header_bytes = header_bytes;
  header->data_bytes = bytes;
  std::memcpy(header->magic, kMagic, sizeof(kMagic));
  arena->generation_slots_ = options.generation_slots;
  arena->generations_ =
      reinterpret_cast<std::atomic<uint64_t>*>(arena->map_ + sizeof(Header));
  arena->data_ = arena->map_ + header_bytes;
  arena->bytes_ = bytes;
  return arena;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Import(
    UniqueFd fd, const ImportOptions& options) {
  struct stat stat_buffer;
  if (fstat(fd.get(), &stat_buffer) != 0) {
    return MakeErrnoError(absl::StatusCode::kInvalidArgument, "NOT_AN_ARENA",
                          "no such descriptor", errno);
  }
  const int64_t file_bytes = stat_buffer.st_size;
  if (!S_ISREG(stat_buffer.st_mode) ||
      file_bytes < static_cast<int64_t>(sizeof(Header))) {
    return NotAnArena("NOT_AN_ARENA", "the descriptor is not of an arena");
  }
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return NotAnArena("ARENA_NOT_SEALED",
                      "the descriptor is of memory that its owner could shrink "
                      "under a reader; create it as an arena");
  }
  // A copy: the exporter may change its header at any time, and what was
  // checked is what is used.
  Header header;
  if (pread(fd.get(), &header, sizeof(header), 0) !=
      static_cast<ssize_t>(sizeof(header))) {
    return MakeErrnoError(absl::StatusCode::kInvalidArgument, "NOT_AN_ARENA",
                          "cannot read the header", errno);
  }
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return NotAnArena("NOT_AN_ARENA",
                      "the memory does not start as an arena does");
  }
  if (header.version != kVersion) {
    return NotAnArena("NOT_AN_ARENA",
                      absl::StrCat("an arena of version ", header.version,
                                   "; this program knows ", kVersion,
                                   ". Let both sides be of one release."));
  }
  if (header.generation_slots > kMaxGenerationSlots ||
      header.header_bytes <= 0 || header.header_bytes % kPage != 0 ||
      header.header_bytes > file_bytes || header.data_bytes <= 0 ||
      header.data_bytes > file_bytes - header.header_bytes ||
      static_cast<int64_t>(sizeof(Header) +
                           header.generation_slots * sizeof(uint64_t)) >
          header.header_bytes) {
    return NotAnArena("ARENA_DAMAGED",
                      "the sizes in the arena's header do not fit the memory");
  }
  if (header.data_bytes < options.min_bytes) {
    return NotAnArena(
        "ARENA_TOO_SMALL",
        absl::StrCat("the arena has ", header.data_bytes, " bytes, and ",
                     options.min_bytes, " were announced"));
  }
  std::unique_ptr<Arena> arena(new Arena);
  arena->fd_ = std::move(fd);
  arena->writable_ = !options.read_only;
  arena->others_read_only_ = (seals & F_SEAL_FUTURE_WRITE) != 0;
  absl::Status status = arena->Map(file_bytes, file_bytes >= kHugePage);
  if (!status.ok()) return status;
  if (options.warm_up) {
    const absl::Time start = absl::Now();
    status = WarmUp(arena->map_, file_bytes, arena->writable_, /*threads=*/1);
    if (!status.ok()) return status;
    arena->warm_up_time_ = absl::Now() - start;
  }
  arena->generation_slots_ = static_cast<int>(header.generation_slots);
  arena->generations_ =
      reinterpret_cast<std::atomic<uint64_t>*>(arena->map_ + sizeof(Header));
  arena->data_ = arena->map_ + header.header_bytes;
  arena->bytes_ = header.data_bytes;
  return arena;
}

absl::Status Arena::TakePlaceOf(Arena* old) {
  if (map_bytes_ != old->map_bytes_ || bytes_ != old->bytes_ ||
      data_ - map_ != old->data_ - old->map_ || !writable_ || !old->writable_) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "ARENA_MISMATCH",
        absl::StrCat("an arena of ", bytes_,
                     " bytes cannot take the place of one of ", old->bytes_));
  }
  std::memcpy(data_, old->data_, static_cast<size_t>(bytes_));
  void* moved = mremap(map_, map_bytes_, map_bytes_,
                       MREMAP_MAYMOVE | MREMAP_FIXED, old->map_);
  if (moved == MAP_FAILED) return NoMemory("cannot move an arena", errno);
  map_ = old->map_;
  data_ = old->data_;
  generations_ =
      reinterpret_cast<std::atomic<uint64_t>*>(map_ + sizeof(Header));
  // What was there is gone with the move.
  old->map_ = nullptr;
  old->data_ = nullptr;
  old->map_bytes_ = 0;
  old->bytes_ = 0;
  old->generations_ = nullptr;
  old->generation_slots_ = 0;
  return absl::OkStatus();
}

Arena::~Arena() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

uint64_t Arena::Generation(int slot) const {
  return generations_[slot].load(std::memory_order_acquire);
}

uint64_t Arena::AdvanceGeneration(int slot) {
  const uint64_t generation =
      generations_[slot].fetch_add(1, std::memory_order_seq_cst) + 1;
  // Non-temporal stores do not wait for ordinary ones.
  NonTemporalFence();
  return generation;
}

absl::StatusOr<UniqueFd> Arena::Share(bool read_only) const {
  if (!read_only) {
    if (!writable_ || others_read_only_) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "READ_ONLY",
          "this arena cannot be exported for writing; export it read-only");
    }
    UniqueFd fd(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
    if (fd.valid()) return fd;
    return MakeErrnoError(absl::StatusCode::kResourceExhausted,
                          "NO_DESCRIPTORS", "cannot duplicate a descriptor",
                          errno);
  }
  // Another open file of the same memory, because a duplicate would share this
  // one's right to write.
  UniqueFd fd(open(absl::StrCat("/proc/self/fd/", fd_.get()).c_str(),
                   O_RDONLY | O_CLOEXEC));
  if (fd.valid()) return fd;
  const int error_number = errno;
  if (others_read_only_) {
    // No /proc here; the seal protects the memory all the same.
    fd = UniqueFd(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
    if (fd.valid()) return fd;
  }
  return MakeErrnoError(absl::StatusCode::kFailedPrecondition, "READ_ONLY",
                        "cannot open an arena read-only", error_number);
}

}  // namespace transport
}  // namespace weightsync
