#include "transport/host/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "transport/error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace weightsync {
namespace transport {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<Arena> Make(int64_t bytes, bool others_read_only = false,
                            int slots = 4) {
  Arena::CreateOptions options;
  options.name = "test";
  options.generation_slots = slots;
  options.others_read_only = others_read_only;
  absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(bytes, options);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

std::string ImportReason(UniqueFd fd, int64_t min_bytes = 0,
                         bool read_only = true) {
  Arena::ImportOptions options;
  options.read_only = read_only;
  options.min_bytes = min_bytes;
  return ReasonOf(Arena::Import(std::move(fd), options).status());
}

UniqueFd Memfd(int64_t bytes, int seals) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(Arena, IsWritableZeroedAndReportsItsWarmUp) {
  const std::unique_ptr<Arena> arena = Make(5 << 20);
  EXPECT_EQ(arena->bytes(), 5 << 20);
  EXPECT_TRUE(arena->writable());
  EXPECT_GT(arena->warm_up_time(), absl::ZeroDuration());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->data()) % 4096, 0u);
  EXPECT_EQ(arena->data()[0], 0);
  arena->data()[arena->bytes() - 1] = 7;
}

TEST(Arena, SecondMappingSeesBytesAndGenerations) {
  const std::unique_ptr<Arena> arena = Make(10000);
  absl::StatusOr<UniqueFd> fd = arena->Share(/*read_only=*/false);
  ASSERT_TRUE(fd.ok()) << fd.status();
  absl::StatusOr<std::unique_ptr<Arena>> other =
      Arena::Import(*std::move(fd), Arena::ImportOptions());
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE((*other)->data(), arena->data());
  EXPECT_EQ((*other)->bytes(), 10000);
  EXPECT_EQ((*other)->generation_slots(), 4);
  EXPECT_EQ((*other)->Generation(3), 0u);
  EXPECT_EQ(arena->AdvanceGeneration(3), 1u);
  EXPECT_EQ((*other)->Generation(3), 1u);
  EXPECT_EQ((*other)->Generation(2), 0u);
  (*other)->data()[9999] = 42;
  EXPECT_EQ(arena->data()[9999], 42);
}

TEST(Arena, LivesOnInTheImporter) {
  std::unique_ptr<Arena> arena = Make(4096);
  arena->data()[5] = 5;
  absl::StatusOr<std::unique_ptr<Arena>> other =
      Arena::Import(*arena->Share(true), {/*read_only=*/true});
  ASSERT_TRUE(other.ok());
  arena.reset();
  EXPECT_EQ((*other)->data()[5], 5);
}

TEST(Arena, NobodyCanResizeIt) {
  const std::unique_ptr<Arena> arena = Make(1 << 20);
  const UniqueFd fd = *arena->Share(/*read_only=*/false);
  EXPECT_EQ(ftruncate(fd.get(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(fd.get(), 64 << 20), -1);
}

TEST(Arena, ReadOnlyShareCannotBeMappedForWriting) {
  const std::unique_ptr<Arena> arena = Make(1 << 20);
  const UniqueFd fd = *arena->Share(/*read_only=*/true);
  EXPECT_EQ(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0),
      MAP_FAILED);
  EXPECT_EQ(ImportReason(*arena->Share(true), 0, /*read_only=*/false),
            "READ_ONLY");
}

TEST(Arena, OthersReadOnlyHoldsAgainstReopening) {
  const std::unique_ptr<Arena> arena = Make(1 << 20, /*others_read_only=*/true);
  EXPECT_EQ(ReasonOf(arena->Share(/*read_only=*/false).status()), "READ_ONLY");
  const UniqueFd fd = *arena->Share(/*read_only=*/true);
  EXPECT_NE(fcntl(fd.get(), F_GET_SEALS) & F_SEAL_FUTURE_WRITE, 0);
  // What a worker that wants to write could try.
  const UniqueFd again(
      open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR));
  if (again.valid()) {
    EXPECT_EQ(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0),
        MAP_FAILED);
    EXPECT_EQ(pwrite(again.get(), "x", 1, 0), -1);
  }
  // The maker still writes.
  arena->data()[0] = 1;
  absl::StatusOr<std::unique_ptr<Arena>> other =
      Arena::Import(*arena->Share(true), {/*read_only=*/true});
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ((*other)->data()[0], 1);
  EXPECT_FALSE((*other)->writable());
}

TEST(Arena, RefusesMoreThanThereIs) {
  const absl::Status status =
      Arena::Create(int64_t{1} << 50, Arena::CreateOptions()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA");
  EXPECT_THAT(std::string(status.message()), HasSubstr("available"));
}

TEST(Arena, RefusesSizesThatCannotBe) {
  EXPECT_EQ(ReasonOf(Arena::Create(0, Arena::CreateOptions()).status()),
            "BAD_SIZE");
  EXPECT_EQ(ReasonOf(Arena::Create(-1, Arena::CreateOptions()).status()),
            "BAD_SIZE");
  EXPECT_EQ(ReasonOf(Arena::Create(INT64_MAX, Arena::CreateOptions()).status()),
            "BAD_SIZE");
  Arena::CreateOptions options;
  options.generation_slots = -1;
  EXPECT_EQ(ReasonOf(Arena::Create(1, options).status()), "BAD_SIZE");
}

TEST(Arena, ManyGenerationSlotsTakeMorePagesOfHeader) {
  const std::unique_ptr<Arena> arena = Make(4096, false, 5000);
  for (int slot = 0; slot < 5000; ++slot) arena->AdvanceGeneration(slot);
  EXPECT_EQ(arena->data()[0], 0);
  absl::StatusOr<std::unique_ptr<Arena>> other =
      Arena::Import(*arena->Share(true), {/*read_only=*/true});
  ASSERT_TRUE(other.ok());
  EXPECT_EQ((*other)->Generation(4999), 1u);
}

TEST(ArenaImport, RefusesWhatIsNoArena) {
  EXPECT_EQ(ImportReason(UniqueFd()), "NOT_AN_ARENA");
  EXPECT_EQ(ImportReason(UniqueFd(open("/dev/null", O_RDONLY))),
            "NOT_AN_ARENA");
  EXPECT_EQ(ImportReason(Memfd(0, F_SEAL_SHRINK)), "NOT_AN_ARENA");
  EXPECT_EQ(ImportReason(Memfd(8192, F_SEAL_SHRINK)), "NOT_AN_ARENA");
  EXPECT_EQ(ImportReason(Memfd(8192, 0)), "ARENA_NOT_SEALED");
}

TEST(ArenaImport, RefusesAHeaderThatDoesNotFitTheMemory) {
  const std::unique_ptr<Arena> arena = Make(10000);
  char header[4096];
  std::memcpy(header, arena->data() - 4096, sizeof(header));
  // data_bytes stands at byte 24, header_bytes at 16, generation_slots at 12.
  const auto with = [&header](int at, int64_t value, size_t size) {
    UniqueFd fd = Memfd(4096 + 12288, 0);
    char copy[4096];
    std::memcpy(copy, header, sizeof(copy));
    std::memcpy(copy + at, &value, size);
    EXPECT_EQ(pwrite(fd.get(), copy, sizeof(copy), 0),
              static_cast<ssize_t>(sizeof(copy)));
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return ImportReason(std::move(fd));
  };
  EXPECT_EQ(with(24, 10000, 8), "");
  EXPECT_EQ(with(24, 12289, 8), "ARENA_DAMAGED");
  EXPECT_EQ(with(24, -1, 8), "ARENA_DAMAGED");
  EXPECT_EQ(with(24, INT64_MAX, 8), "ARENA_DAMAGED");
  EXPECT_EQ(with(16, 1, 8), "ARENA_DAMAGED");
  EXPECT_EQ(with(16, int64_t{1} << 40, 8), "ARENA_DAMAGED");
  EXPECT_EQ(with(12, 1 << 19, 4), "ARENA_DAMAGED");
  EXPECT_EQ(with(12, -1, 4), "ARENA_DAMAGED");
  EXPECT_EQ(with(8, 2, 4), "NOT_AN_ARENA");
}

TEST(ArenaImport, RefusesLessThanWasAnnounced) {
  const std::unique_ptr<Arena> arena = Make(10000);
  EXPECT_EQ(ImportReason(*arena->Share(true), 10000), "");
  EXPECT_EQ(ImportReason(*arena->Share(true), 10001), "ARENA_TOO_SMALL");
}

TEST(Arena, OneTakesThePlaceOfAnotherUnderItsAddresses) {
  Arena::CreateOptions options;
  options.keep_free_bytes = 0;
  for (const int64_t bytes : {int64_t{10000}, int64_t{5} << 20}) {
    auto old = Arena::Create(bytes, options);
    auto fresh = Arena::Create(bytes, options);
    ASSERT_TRUE(old.ok() && fresh.ok());
    char* const address = (*old)->data();
    for (int64_t i = 0; i < bytes; ++i) address[i] = static_cast<char>(i * 7);
    ASSERT_TRUE((*fresh)->TakePlaceOf(old->get()).ok());
    EXPECT_EQ((*fresh)->data(), address);
    *old = nullptr;
    for (int64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(address[i], static_cast<char>(i * 7)) << i;
    }
    // It is the new arena's memory: whoever maps that sees what is written.
    address[3] = 'x';
    auto fd = (*fresh)->Share(/*read_only=*/true);
    ASSERT_TRUE(fd.ok()) << fd.status();
    Arena::ImportOptions import;
    import.read_only = true;
    auto seen = Arena::Import(*std::move(fd), import);
    ASSERT_TRUE(seen.ok()) << seen.status();
    EXPECT_EQ((*seen)->data()[3], 'x');
    auto other = Arena::Create(bytes + 4096, options);
    ASSERT_TRUE(other.ok());
    EXPECT_EQ(ReasonOf((*other)->TakePlaceOf(fresh->get())), "ARENA_MISMATCH");
  }
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
