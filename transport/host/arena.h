#ifndef WEIGHTSYNC_TRANSPORT_HOST_ARENA_H_
#define WEIGHTSYNC_TRANSPORT_HOST_ARENA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/host/unique_fd.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {

// A segment of host memory: a memfd of fixed size, sealed so that nobody can
// shrink it under a reader, with a header that holds the generations.
//
//   | header: magic, version, sizes, generations; whole pages | data; whole
//   pages |
//
// It is reserved and faulted in when it is created, because a fresh page costs
// twenty times what a copy into a warm one costs, and because a machine without
// the memory should say so at once and not by a killed process in mid-update.
class Arena final : public Segment {
 public:
  struct CreateOptions {
    std::string name;
    int generation_slots = 0;
    // Seals the memfd so that nobody can make a writable mapping after this
    // process has made its own.
    bool others_read_only = false;
    int warm_up_threads = 2;
    bool huge_pages = true;  // where the kernel gives them
    int64_t keep_free_bytes = 256 << 20;
  };
  struct ImportOptions {
    bool read_only = false;
    // Makes the page tables now, and not one fault at a time in the first copy.
    bool warm_up = true;
    int64_t min_bytes = 0;  // ARENA_TOO_SMALL below
  };

  // RESOURCE_EXHAUSTED (NO_MEMORY_FOR_ARENA), INVALID_ARGUMENT (BAD_SIZE).
  static absl::StatusOr<std::unique_ptr<Arena>> Create(
      int64_t bytes, const CreateOptions& options);

  // `fd` is of an Arena of any process. INVALID_ARGUMENT (NOT_AN_ARENA,
  // ARENA_NOT_SEALED, ARENA_DAMAGED, ARENA_TOO_SMALL), FAILED_PRECONDITION
  // (READ_ONLY): the exporter does not let others write.
  static absl::StatusOr<std::unique_ptr<Arena>> Import(
      UniqueFd fd, const ImportOptions& options);

  ~Arena() override;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  MemoryKind kind() const override { return MemoryKind::kHost; }
  char* data() const override { return data_; }
  int64_t bytes() const override { return bytes_; }
  bool writable() const override { return writable_; }
  int file(int64_t* offset) const override {
    *offset = data_offset_bytes();
    return fd_.get();
  }
  int generation_slots() const override { return generation_slots_; }
  uint64_t Generation(int slot) const override;
  uint64_t AdvanceGeneration(int slot) override;

  // A new descriptor for another process. Read-only ones are opened anew so
  // that they cannot be mapped for writing; with others_read_only the seal sees
  // to it as well. FAILED_PRECONDITION (READ_ONLY).
  absl::StatusOr<UniqueFd> Share(bool read_only) const;

  // Copies the bytes of `old`, which is as large and was mapped for writing by
  // this process, and takes the place of its mapping: whoever holds addresses
  // in it has this arena's memory under them from now on. `old` has no memory
  // any more. REQUIRES: nobody writes to `old` meanwhile, and this arena's own
  // address was given to nobody. FAILED_PRECONDITION (ARENA_MISMATCH).
  absl::Status TakePlaceOf(Arena* old);

  // Where data() lies in the mapping: after the header.
  int64_t data_offset_bytes() const { return data_ - map_; }

  // What Create or Import spent on faulting in.
  absl::Duration warm_up_time() const { return warm_up_time_; }

 private:
  Arena() = default;

  absl::Status Map(int64_t file_bytes, bool huge_pages);

  // Constant after Create or Import.
  UniqueFd fd_;
  char* map_ = nullptr;
  int64_t map_bytes_ = 0;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  bool writable_ = false;
  bool others_read_only_ = false;
  int generation_slots_ = 0;
  std::atomic<uint64_t>* generations_ = nullptr;  // in the header
  absl::Duration warm_up_time_;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_ARENA_H_
