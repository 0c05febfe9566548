// One suite that every Memory passes. An implementation adds one fixture:
//
//   class HostFixture : public MemoryFixture { ... };
//   INSTANTIATE_TEST_SUITE_P(Host, MemoryConformance, ::testing::Values(
//       []() -> std::unique_ptr<MemoryFixture> { return
//       std::make_unique<HostFixture>(); }));
#ifndef WEIGHTSYNC_TRANSPORT_CONFORMANCE_MEMORY_CONFORMANCE_H_
#define WEIGHTSYNC_TRANSPORT_CONFORMANCE_MEMORY_CONFORMANCE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "transport/error.h"
#include "transport/memory.h"

namespace weightsync {
namespace transport {

class MemoryFixture {
 public:
  virtual ~MemoryFixture() = default;
  // The Memory under test.
  virtual Memory* memory() = 0;
  // The same kind of memory as a second party sees it, who imports; addresses
  // of what it has imported are good for it alone. May be the same object where
  // one process can be both.
  virtual Memory* importer() = 0;

  // ---- What not every Memory does as others do ----
  // What its segments are made of, besides what the suite asks for.
  virtual void Shape(AllocateOptions* /*options*/) {}
  virtual MemoryKind kind() { return memory()->kind(); }
  // Puts bytes into one of its segments.
  virtual absl::Status Write(absl::Span<const char> from, char* to) {
    return memory()->Write(from, to);
  }
  // Others may be given a segment for writing. False: READ_ONLY is said.
  virtual bool others_may_write() const { return true; }
  // Between its segments rows are copied, and with their digest. False: whole
  // stretches, without one; BAD_COPY is said of all else.
  virtual bool copies_rows() const { return true; }
  // False: BAD_COPY is said.
  virtual bool packs() const { return true; }
  // Where `bytes` lie that it packs. Null: in a segment.
  virtual const char* Source(const std::string& /*bytes*/) { return nullptr; }
};

class MemoryConformance : public ::testing::TestWithParam<
                              std::function<std::unique_ptr<MemoryFixture>()>> {
 protected:
  static constexpr absl::Duration kTimeout = absl::Seconds(20);

  MemoryConformance() : fixture_(GetParam()()) {}
  Memory* memory() { return fixture_->memory(); }

  std::unique_ptr<Segment> Allocate(int64_t bytes, int slots = 2,
                                    bool others_read_only = false) {
    AllocateOptions options;
    options.name = "conformance";
    options.generation_slots = slots;
    options.others_read_only = others_read_only;
    fixture_->Shape(&options);
    absl::StatusOr<std::unique_ptr<Segment>> segment =
        memory()->Allocate(bytes, options);
    EXPECT_TRUE(segment.ok()) << segment.status();
    return segment.ok() ? *std::move(segment) : nullptr;
  }

  absl::StatusOr<std::unique_ptr<Segment>> Hand(const Segment& segment,
                                                bool read_only) {
    ExportOptions options;
    options.read_only = read_only;
    const absl::StatusOr<MemoryTicket> ticket =
        memory()->Export(segment, options);
    if (!ticket.ok()) return ticket.status();
    EXPECT_EQ(ticket->bytes, segment.bytes());
    return fixture_->importer()->Import(*ticket, kTimeout);
  }

  // As much as others may be given.
  ExportOptions Given() {
    ExportOptions options;
    options.read_only = !fixture_->others_may_write();
    return options;
  }

  std::string RandomBytes(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::string bytes(count, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
  }
  void Write(const std::string& bytes, char* to) {
    const absl::Status status =
        fixture_->Write(absl::MakeConstSpan(bytes.data(), bytes.size()), to);
    ASSERT_TRUE(status.ok()) << status;
  }
  static void WriteBy(Memory* memory, const std::string& bytes, char* to) {
    ASSERT_TRUE(
        memory->Write(absl::MakeConstSpan(bytes.data(), bytes.size()), to)
            .ok());
  }
  std::string Read(const char* from, size_t count) {
    return ReadBy(memory(), from, count);
  }
  static std::string ReadBy(Memory* memory, const char* from, size_t count) {
    std::string bytes(count, '\0');
    EXPECT_TRUE(memory->Read(from, absl::MakeSpan(&bytes[0], count)).ok());
    return bytes;
  }

  std::unique_ptr<MemoryFixture> fixture_;
};

TEST_P(MemoryConformance, ASegmentStartsWithZerosAndKeepsWhatIsWritten) {
  const std::unique_ptr<Segment> segment = Allocate(100000);
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(segment->kind(), fixture_->kind());
  EXPECT_EQ(segment->bytes(), 100000);
  EXPECT_TRUE(segment->writable());
  EXPECT_EQ(Read(segment->data(), 100000), std::string(100000, '\0'));
  const std::string bytes = RandomBytes(100000, 1);
  Write(bytes, segment->data());
  EXPECT_EQ(Read(segment->data(), 100000), bytes);
}

TEST_P(MemoryConformance, SizesThatCannotBeAreRefused) {
  AllocateOptions options;
  fixture_->Shape(&options);
  EXPECT_EQ(ReasonOf(memory()->Allocate(0, options).status()), "BAD_SIZE");
  EXPECT_EQ(ReasonOf(memory()->Allocate(-5, options).status()), "BAD_SIZE");
  const absl::Status status =
      memory()->Allocate(int64_t{1} << 55, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA");
}

TEST_P(MemoryConformance, GenerationsCountUpOneByOneEachForItself) {
  const std::unique_ptr<Segment> segment = Allocate(4096, 3);
  ASSERT_EQ(segment->generation_slots(), 3);
  EXPECT_EQ(segment->Generation(1), 0u);
  EXPECT_EQ(segment->AdvanceGeneration(1), 1u);
  EXPECT_EQ(segment->AdvanceGeneration(1), 2u);
  EXPECT_EQ(segment->Generation(0), 0u);
  EXPECT_EQ(segment->Generation(1), 2u);
  EXPECT_EQ(segment->Generation(2), 0u);
}

TEST_P(MemoryConformance, AnImporterSeesBytesAndGenerations) {
  const std::unique_ptr<Segment> segment = Allocate(5000);
  absl::StatusOr<std::unique_ptr<Segment>> other =
      Hand(*segment, /*read_only=*/true);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_GE((*other)->bytes(), 5000);
  EXPECT_FALSE((*other)->writable());
  const std::string bytes = RandomBytes(5000, 2);
  Write(bytes, segment->data());
  segment->AdvanceGeneration(1);
  EXPECT_EQ(ReadBy(fixture_->importer(), (*other)->data(), 5000), bytes);
  EXPECT_EQ((*other)->Generation(1), 1u);
}

TEST_P(MemoryConformance, AnImporterMayWriteWhereItWasGivenThat) {
  const std::unique_ptr<Segment> segment = Allocate(5000);
  absl::StatusOr<std::unique_ptr<Segment>> other =
      Hand(*segment, /*read_only=*/false);
  if (!fixture_->others_may_write()) {
    EXPECT_EQ(ReasonOf(other.status()), "READ_ONLY");
    return;
  }
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_TRUE((*other)->writable());
  const std::string bytes = RandomBytes(5000, 3);
  WriteBy(fixture_->importer(), bytes, (*other)->data());
  EXPECT_EQ(Read(segment->data(), 5000), bytes);
}

TEST_P(MemoryConformance, WhatOthersMayOnlyReadIsNotExportedForWriting) {
  const std::unique_ptr<Segment> segment =
      Allocate(5000, 1, /*others_read_only=*/true);
  EXPECT_EQ(ReasonOf(Hand(*segment, /*read_only=*/false).status()),
            "READ_ONLY");
  EXPECT_TRUE(Hand(*segment, /*read_only=*/true).ok());
}

TEST_P(MemoryConformance, BytesOutliveTheirMaker) {
  std::unique_ptr<Segment> segment = Allocate(5000);
  const std::string bytes = RandomBytes(5000, 4);
  Write(bytes, segment->data());
  absl::StatusOr<std::unique_ptr<Segment>> other =
      Hand(*segment, /*read_only=*/true);
  ASSERT_TRUE(other.ok());
  segment.reset();
  EXPECT_EQ(ReadBy(fixture_->importer(), (*other)->data(), 5000), bytes);
}

TEST_P(MemoryConformance, ATicketIsGoodForOneImport) {
  const std::unique_ptr<Segment> segment = Allocate(5000);
  const absl::StatusOr<MemoryTicket> ticket =
      memory()->Export(*segment, Given());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(fixture_->importer()->Import(*ticket, kTimeout).ok());
  EXPECT_FALSE(fixture_->importer()->Import(*ticket, kTimeout).ok());
}

TEST_P(MemoryConformance, AnExportThatWasTakenBackIsGoodForNothing) {
  const std::unique_ptr<Segment> segment = Allocate(5000);
  const absl::StatusOr<MemoryTicket> ticket =
      memory()->Export(*segment, Given());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  memory()->Withdraw(*ticket);
  EXPECT_FALSE(fixture_->importer()->Import(*ticket, kTimeout).ok());
  memory()->Withdraw(*ticket);  // once more: nothing happens
}

TEST_P(MemoryConformance, StridedCopyWithDigest) {
  const std::unique_ptr<Segment> segment = Allocate(1 << 20);
  const std::string source = RandomBytes(100 * 300 * 2, 5);
  char* from = segment->data();
  char* to = segment->data() + (512 << 10);
  Write(source, from);
  // Columns 40 to 240 of a tensor of 100 x 300 bf16, put side by side.
  const CopyTask task =
      MakeBoxCopy({100, 200}, 2, to, {200, 1}, from + 40 * 2, {300, 1},
                  GlobalBox{6, {100, 300}, {0, 40}});
  Digest digest;
  const absl::Status copied = memory()->Copy({task}, CopyOptions(), &digest);
  if (fixture_->copies_rows()) {
    ASSERT_TRUE(copied.ok()) << copied;
    for (int row = 0; row < 100; ++row)
      EXPECT_EQ(Read(to + row * 400, 400), source.substr(row * 600 + 80, 400));
  } else {
    EXPECT_EQ(ReasonOf(copied), "BAD_COPY");
    EXPECT_EQ(Read(to, 40000), std::string(40000, '\0'));
    EXPECT_EQ(digest, Digest());
  }
  Digest expected;
  for (int row = 0; row < 100; ++row) {
    DigestAccumulate(source.data() + row * 600 + 80,
                     {6, row * 300 + 40, 200, 2}, &expected);
  }
  if (copied.ok()) {
    EXPECT_EQ(digest, expected);
  }
  CopyTask look = task;
  look.dst = nullptr;
  Digest seen;
  ASSERT_TRUE(memory()->Copy({look}, CopyOptions(), &seen).ok());
  EXPECT_EQ(seen, expected);
}

TEST_P(MemoryConformance, ABadCopyWritesNothing) {
  const std::unique_ptr<Segment> segment = Allocate(10000);
  const std::string source = RandomBytes(1000, 6);
  Write(source, segment->data());
  std::vector<CopyTask> tasks(2);
  for (CopyTask& task : tasks) {
    task.src = segment->data();
    task.dst = segment->data() + 5000;
    task.run_bytes = 1000;
  }
  tasks[1].element_bytes = 7;
  Digest digest;
  EXPECT_EQ(ReasonOf(memory()->Copy(tasks, CopyOptions(), &digest)),
            "BAD_COPY");
  EXPECT_EQ(Read(segment->data() + 5000, 1000), std::string(1000, '\0'));
  EXPECT_EQ(digest, Digest());
}

TEST_P(MemoryConformance, PackMakesABucketItsDigestAndThatOfItsFrames) {
  const std::unique_ptr<Segment> segment = Allocate(1 << 20);
  const std::unique_ptr<Segment> store = Allocate(1 << 20);
  const std::string bytes = RandomBytes(300000, 7);
  const char* source = fixture_->Source(bytes);
  if (source == nullptr) {
    Write(bytes, segment->data());
    source = segment->data();
  }
  Write(std::string(400000, 'x'), store->data());
  std::vector<PackPiece> pieces(2);
  pieces[0].offset = 0;
  pieces[0].copy = MakeBoxCopy({50001}, 2, nullptr, {1}, source, {1},
                               GlobalBox{0, {50001}, {0}});
  pieces[1].offset = 100016;
  pieces[1].copy =
      MakeBoxCopy({100, 500}, 2, nullptr, {500, 1}, source + 100002, {1000, 1},
                  GlobalBox{1, {100, 1000}, {0, 0}});
  PackRequest request;
  request.bucket = store->data();
  request.bucket_bytes = 200016;
  request.pieces = pieces;
  std::vector<Digest> told;
  request.on_frames = [&told](int64_t first, int64_t last,
                              absl::Span<const Digest> digests) {
    EXPECT_EQ(first, static_cast<int64_t>(told.size()));
    told.insert(told.end(), digests.begin(), digests.end());
    EXPECT_EQ(last, static_cast<int64_t>(told.size()));
  };
  PackResult result;
  const absl::Status packed = memory()->Pack(request, &result);
  if (!fixture_->packs()) {
    EXPECT_EQ(ReasonOf(packed), "BAD_COPY");
    EXPECT_EQ(Read(store->data(), 400000), std::string(400000, 'x'));
    return;
  }
  ASSERT_TRUE(packed.ok()) << packed;
  ASSERT_EQ(result.frames.size(), 4u);
  EXPECT_EQ(told, result.frames);

  std::string expected = bytes.substr(0, 100002) + std::string(14, '\0');
  Digest digest;
  DigestAccumulate(bytes.data(), {0, 0, 50001, 2}, &digest);
  for (int row = 0; row < 100; ++row) {
    expected += bytes.substr(100002 + row * 2000, 1000);
    DigestAccumulate(bytes.data() + 100002 + row * 2000,
                     {1, row * 1000, 500, 2}, &digest);
  }
  EXPECT_EQ(Read(store->data(), 200016), expected);
  EXPECT_EQ(Read(store->data() + 200016, 100), std::string(100, 'x'));
  EXPECT_EQ(result.bucket, digest);
  Digest first_frame;
  DigestAccumulate(bytes.data(), {0, 0, kFrameBytes / 2, 2}, &first_frame);
  EXPECT_EQ(result.frames[0], first_frame);
}

TEST_P(MemoryConformance, GuardedApplyTakesTheGenerationThatItMeans) {
  const std::unique_ptr<Segment> store = Allocate(10000);
  const std::unique_ptr<Segment> live = Allocate(10000);
  const std::string bytes = RandomBytes(10000, 8);
  Write(bytes, store->data());
  const uint64_t generation = store->AdvanceGeneration(0);
  CopyTask task;
  task.src = store->data();
  task.dst = live->data();
  task.run_bytes = 10000;
  EXPECT_TRUE(GuardedApply(memory(), *store, 0, generation, {task}).ok());
  EXPECT_EQ(Read(live->data(), 10000), bytes);

  Write(std::string(10000, 'l'), live->data());
  const absl::Status status =
      GuardedApply(memory(), *store, 0, generation + 1, {task});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(status), "SLOT_REUSED");
  EXPECT_EQ(Read(live->data(), 10000), std::string(10000, 'l'));
  EXPECT_EQ(ReasonOf(GuardedApply(memory(), *store, 2, 0, {task})), "BAD_SLOT");
  EXPECT_EQ(ReasonOf(GuardedApply(memory(), *store, -1, 0, {task})),
            "BAD_SLOT");
}

// Whoever reuses a part while it is read is noticed: an OK never covers a
// mixture.
TEST_P(MemoryConformance, GuardedApplyNeverPassesAMixtureAsWhole) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "reading what is being written is what this test is about";
#endif
  constexpr int64_t kBytes = 256 << 10;
  const std::unique_ptr<Segment> store = Allocate(kBytes);
  const std::unique_ptr<Segment> live = Allocate(kBytes);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int round = 1; !stop; ++round) {
      store->AdvanceGeneration(0);
      const std::string bytes(kBytes, static_cast<char>(round));
      (void)fixture_->Write(absl::MakeConstSpan(bytes.data(), bytes.size()),
                            store->data());
      // Odd: being written; even: whole, for about as long as a copy takes.
      store->AdvanceGeneration(0);
      absl::SleepFor(absl::Microseconds(round % 4 * 50));
    }
  });
  CopyTask task;
  task.src = store->data();
  task.dst = live->data();
  task.run_bytes = kBytes;
  int whole = 0;
  int reused = 0;
  const absl::Time deadline = absl::Now() + kTimeout;
  while ((whole < 20 || reused < 20) && absl::Now() < deadline) {
    const uint64_t generation = store->Generation(0);
    if (generation == 0 || generation % 2 != 0) continue;
    const absl::Status status =
        GuardedApply(memory(), *store, 0, generation, {task});
    if (!status.ok()) {
      EXPECT_EQ(ReasonOf(status), "SLOT_REUSED");
      ++reused;
      continue;
    }
    ++whole;
    const std::string bytes = Read(live->data(), kBytes);
    EXPECT_EQ(bytes, std::string(kBytes, bytes[0]));
  }
  stop = true;
  writer.join();
  EXPECT_GT(whole, 0);
}

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CONFORMANCE_MEMORY_CONFORMANCE_H_
