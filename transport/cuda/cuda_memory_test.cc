// GPU memory between processes, and every input that is refused.
#include "transport/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cast_definition.h"
#include "transport/cuda/sim_control.h"
#include "transport/cuda/test_child.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"
#include "transport/eventually.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

class CudaMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { gpu_sim::Plant(""); }
  void TearDown() override {
    gpu_sim::Plant("");
    cudaGetLastError();
  }
};

TEST_F(CudaMemoryTest, AWorkerReadsWhatTheDaemonWrites) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(10000);
  const std::string bytes = RandomBytes(10000, 1);
  daemon.Write(bytes, segment->data());
  segment->AdvanceGeneration(0);
  Child worker("worker");
  worker.Send(Encode(Ticket(&daemon, *segment, true)));
  ASSERT_EQ(worker.Receive(), "OK");
  worker.Send("read");
  EXPECT_EQ(worker.Receive(), bytes + "1");
  // It was given to be read only.
  worker.Send("write");
  EXPECT_EQ(worker.Receive(), "BAD_COPY");
  worker.Send("end");
  EXPECT_EQ(worker.Wait(), 0);
}

TEST_F(CudaMemoryTest, WhatAWorkerHasOpenIsFreedWhenItHasClosedIt) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  EXPECT_EQ(daemon->GetUsage()->segments_bytes, 1 << 20);
  daemon.Write("still here", segment->data());
  Child worker("worker");
  worker.Send(Encode(Ticket(&daemon, *segment, true)));
  ASSERT_EQ(worker.Receive(), "OK");
  segment.reset();
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(daemon->GetUsage()->segments_bytes, 1 << 20);
  worker.Send("read");
  EXPECT_EQ(worker.Receive().substr(0, 10), "still here");
  worker.Send("close");
  ASSERT_EQ(worker.Receive(), "closed");
  EXPECT_TRUE(
      Eventually([&] { return daemon->GetUsage()->segments_bytes == 0; }));
}

TEST_F(CudaMemoryTest, WhatADeadWorkerHadOpenIsFreed) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  Child worker("worker");
  worker.Send(Encode(Ticket(&daemon, *segment, true)));
  ASSERT_EQ(worker.Receive(), "OK");
  worker.Kill();
  // Its context goes a moment after it, and with that its mapping.
  absl::SleepFor(absl::Milliseconds(100));
  segment.reset();
  EXPECT_TRUE(
      Eventually([&] { return daemon->GetUsage()->segments_bytes == 0; }));
}

TEST_F(CudaMemoryTest, ATicketOfWhatIsGone) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(4096);
  const MemoryTicket ticket = Ticket(&daemon, *segment, true);
  segment.reset();
  Child worker("worker");
  worker.Send(Encode(ticket));
  EXPECT_EQ(worker.Receive(), "SEGMENT_GONE");
}

TEST_F(CudaMemoryTest, AWorkerOnAnotherGpuIsToldWhichItSees) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(4096);
  Child worker("worker", {"GPU_SIM_DEVICES=2", "GPU_SIM_VISIBLE=1"});
  worker.Send(Encode(Ticket(&daemon, *segment, true)));
  EXPECT_EQ(worker.Receive(), "DEVICE_NOT_VISIBLE");
  const absl::Status status =
      FindDevice("GPU-00000000-0000-0000-0000-000000000000").status();
  EXPECT_EQ(ReasonOf(status), "DEVICE_NOT_VISIBLE");
  EXPECT_TRUE(absl::StrContains(status.message(), FindDevice("")->uuid));
}

// ---- What trainers export ----

TEST_F(CudaMemoryTest, ATrainersAllocationIsOpenedOnceAndClosedLater) {
  TestProcess daemon;
  Child trainer("trainer");
  const absl::StatusOr<DeviceHandle> handle =
      DeviceHandle::Decode(trainer.Receive());
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_EQ(handle->bytes, 10000);
  EXPECT_EQ(handle->exporter.pid, trainer.pid());
  auto one = daemon->imports()->Acquire(*handle, false);
  ASSERT_TRUE(one.ok()) << one.status();
  auto two = daemon->imports()->Acquire(*handle, false);
  EXPECT_EQ(*one, *two);
  EXPECT_EQ(daemon->imports()->size(), 1);
  // A strided tensor of it, packed with its digest.
  const std::unique_ptr<Segment> slot = daemon.Allocate(4096);
  const std::string bytes = RandomBytes(10000, 77);
  PackPiece piece;
  piece.copy = MakeBoxCopy({20, 50}, 2, nullptr, {50, 1}, (*one)->data + 100,
                           {80, 1}, GlobalBox{3, {20, 80}, {0, 0}});
  PackRequest request;
  request.bucket = slot->data();
  request.bucket_bytes = 2000;
  request.pieces = absl::MakeConstSpan(&piece, 1);
  PackResult result;
  ASSERT_TRUE(daemon->Pack(request, &result).ok());
  Digest want;
  for (int row = 0; row < 20; ++row) {
    EXPECT_EQ(daemon.Read(slot->data() + row * 100, 100),
              bytes.substr(100 + row * 160, 100));
    DigestAccumulate(bytes.data() + 100 + row * 160, {3, row * 80, 50, 2},
                     &want);
  }
  EXPECT_EQ(result.bucket, want);
  one->reset();
  two->reset();
  daemon->core()->Drain(absl::Seconds(5));
  EXPECT_EQ(daemon->imports()->size(), 0);
  // What is closed is not touched any more.
  EXPECT_EQ(ReasonOf(daemon->Pack(request, &result)), "BAD_COPY");
}

TEST_F(CudaMemoryTest, ATrainerThatFreesOrDies) {
  TestProcess daemon;
  Child trainer("trainer");
  const DeviceHandle first = *DeviceHandle::Decode(trainer.Receive());
  trainer.Send("free");
  EXPECT_EQ(trainer.Receive(), "ALLOCATION_FREED");
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(first, false).status()),
            "ALLOCATION_FREED");
  trainer.Send("again");
  EXPECT_EQ(trainer.Receive(), "1 ALLOCATION_FREED");
  const DeviceHandle second = *DeviceHandle::Decode(trainer.Receive());
  EXPECT_EQ(first.base, second.base);
  auto open = daemon->imports()->Acquire(second, false);
  ASSERT_TRUE(open.ok()) << open.status();
  const std::string bytes = daemon.Read((*open)->data, 10000);
  trainer.Kill();
  // What is open stays; what is not open yet is refused.
  EXPECT_EQ(daemon.Read((*open)->data, 10000), bytes);
  open->reset();
  daemon->core()->Drain(absl::Seconds(5));
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(second, false).status()),
            "EXPORTER_DEAD");
  // Another process with its pid is not it.
  DeviceHandle other = second;
  other.exporter = ThisProcess();
  other.exporter.start_time -= 1;
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(other, false).status()),
            "EXPORTER_DEAD");
}

// Where a trainer frees what is still open here, and gets the same address
// again, the cache must not take the new allocation for the one it has.
TEST_F(CudaMemoryTest, TwoAllocationsAtOneAddressAreTwo) {
  TestProcess daemon;
  Child trainer("trainer");
  const DeviceHandle first = *DeviceHandle::Decode(trainer.Receive());
  auto one = daemon->imports()->Acquire(first, false);
  ASSERT_TRUE(one.ok()) << one.status();
  trainer.Send("free");
  EXPECT_EQ(trainer.Receive(), "ALLOCATION_FREED");
  trainer.Send("again");
  EXPECT_EQ(trainer.Receive(), "1 ALLOCATION_FREED");
  const DeviceHandle second = *DeviceHandle::Decode(trainer.Receive());
  EXPECT_EQ(first.base, second.base);
  EXPECT_NE(first.buffer_id, second.buffer_id);
  auto two = daemon->imports()->Acquire(second, false);
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_NE(*one, *two);
  EXPECT_NE((*one)->data, (*two)->data);
  EXPECT_EQ(daemon->imports()->size(), 2);
  // The trainer's fault, as the driver would see it. The second it frees when
  // that is closed.
  EXPECT_NE(gpu_sim::TakeFindings(), "");
  one->reset();
  two->reset();
  EXPECT_TRUE(daemon->core()->Drain(absl::Seconds(5)));
}

TEST_F(CudaMemoryTest, AHandleFromAnotherNamespaceThatCannotBeOpened) {
  TestProcess daemon;
  Child trainer("trainer");
  DeviceHandle handle = *DeviceHandle::Decode(trainer.Receive());
  handle.exporter.pid_namespace += 1;
  gpu_sim::Plant("call=cudaIpcOpenMemHandle error=205");
  const absl::Status status =
      daemon->imports()->Acquire(handle, false).status();
  EXPECT_EQ(ReasonOf(status), "FOREIGN_NAMESPACE");
  EXPECT_TRUE(absl::StrContains(status.message(), "shareProcessNamespace"));
  // Where it can be opened all the same, nothing is wrong with it.
  EXPECT_TRUE(daemon->imports()->Acquire(handle, false).ok());
  daemon->core()->Drain(absl::Seconds(5));
}

TEST_F(CudaMemoryTest, MemoryThatIsNotTheExportersIsNotUsed) {
  TestProcess daemon;
  Child trainer("trainer");
  DeviceHandle handle = *DeviceHandle::Decode(trainer.Receive());
  handle.nonce[3] ^= 1;
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(handle, false).status()),
            "PROBE_FAILED");
  daemon->core()->Drain(absl::Seconds(5));
}

TEST_F(CudaMemoryTest, HandlesThatAreNone) {
  EXPECT_EQ(ReasonOf(DeviceHandle::Decode("short").status()),
            "HANDLE_MALFORMED");
  EXPECT_TRUE(absl::StrContains(
      DeviceHandle::Decode("short").status().message(), "this one has 5"));
  std::string bytes = DeviceHandle().Encode();
  bytes[0] ^= 1;
  EXPECT_EQ(ReasonOf(DeviceHandle::Decode(bytes).status()), "HANDLE_MALFORMED");
  TestProcess daemon;
  const std::unique_ptr<Segment> segment = daemon.Allocate(4096);
  const absl::StatusOr<DevicePlace> own =
      daemon->exporter().Describe(segment->data(), 4096);
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(own->handle, false).status()),
            "OWN_EXPORT");
  EXPECT_EQ(ReasonOf(CheckPlace(own->handle, 4000, 97)), "PAST_ALLOCATION");
  EXPECT_EQ(ReasonOf(CheckPlace(own->handle, -1, 1)), "PAST_ALLOCATION");
  EXPECT_EQ(
      ReasonOf(CheckPlace(own->handle, int64_t{1} << 62, int64_t{1} << 62)),
      "PAST_ALLOCATION");
  EXPECT_TRUE(CheckPlace(own->handle, 4000, 96).ok());
  EXPECT_EQ(
      ReasonOf(
          daemon->exporter().Describe(segment->data() + 4000, 97).status()),
      "PAST_ALLOCATION");
  int on_the_host = 0;
  EXPECT_EQ(ReasonOf(daemon->exporter().Describe(&on_the_host, 4).status()),
            "NOT_DEVICE_MEMORY");
}

TEST_F(CudaMemoryTest, ExpandableSegmentsAreRefusedByName) {
  TestProcess daemon;
  gpu_sim::Plant("call=cudaMalloc unexportable=1");
  void* pointer = nullptr;
  ASSERT_EQ(cudaMalloc(&pointer, 4096), cudaSuccess);
  const absl::Status status =
      daemon->exporter().Describe(pointer, 4096).status();
  EXPECT_EQ(ReasonOf(status), "NOT_EXPORTABLE");
  EXPECT_TRUE(absl::StrContains(status.message(), "expandable_segments"));
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
}

TEST_F(CudaMemoryTest, AGpuWithoutRoomSaysBothSums) {
  TestProcess daemon;
  const CudaMemory::Usage usage = *daemon->GetUsage();
  const absl::Status status =
      daemon->Allocate(usage.free_bytes, AllocateOptions()).status();
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA");
  EXPECT_TRUE(
      absl::StrContains(status.message(), absl::StrCat(usage.free_bytes)));
  EXPECT_TRUE(
      absl::StrContains(status.message(), absl::StrCat(usage.total_bytes)));
  // And when others were faster than its look.
  gpu_sim::Plant("call=cudaMalloc error=2");
  EXPECT_EQ(ReasonOf(daemon->Allocate(4096, AllocateOptions()).status()),
            "NO_MEMORY_FOR_ARENA");
  EXPECT_TRUE(daemon->Allocate(4096, AllocateOptions()).ok());
}

TEST_F(CudaMemoryTest, SlotsTakeExactlyWhatTheyAre) {
  TestProcess daemon;
  std::vector<std::unique_ptr<Segment>> slots;
  for (int i = 0; i < 3; ++i) slots.push_back(daemon.Allocate(256 << 10));
  EXPECT_EQ(daemon->GetUsage()->segments_bytes, 3 * (256 << 10));
}

// ---- Copies ----

TEST_F(CudaMemoryTest, AddressesThatAreNobodysAreRefusedAndNotTouched) {
  TestProcess daemon;
  const std::unique_ptr<Segment> segment = daemon.Allocate(10000);
  CopyTask task;
  task.src = segment->data();
  task.dst = segment->data() + 5000;
  task.run_bytes = 5001;
  EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, nullptr)), "BAD_COPY");
  task.run_bytes = 100;
  task.src = segment->data() - 1;
  EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, nullptr)), "BAD_COPY");
  char host[100];
  task.src = host;
  EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, nullptr)), "BAD_COPY");
  task.src = segment->data();
  task.dims.push_back({100, 100, 100, 0});
  EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, nullptr)), "BAD_COPY");
  EXPECT_EQ(
      ReasonOf(daemon->Read(segment->data() + 9990, absl::MakeSpan(host, 11))),
      "BAD_COPY");
}

TEST_F(CudaMemoryTest, ThousandsOfPiecesOfEveryKindInOneCall) {
  TestProcess daemon;
  constexpr int kPieces = 3000;
  const std::unique_ptr<Segment> from = daemon.Allocate(2 << 20);
  const std::unique_ptr<Segment> to = daemon.Allocate(2 << 20);
  const std::string bytes = RandomBytes(2 << 20, 5);
  daemon.Write(bytes, from->data());
  std::mt19937 random(6);
  std::vector<CopyTask> tasks;
  std::string want(2 << 20, '\0');
  int64_t at = 0;
  for (int i = 0; i < kPieces; ++i) {
    // Some are long enough for a copy engine.
    const int64_t length = i % 100 == 0 ? 8192 : random() % 400 + 1;
    CopyTask task;
    task.src = from->data() + random() % ((2 << 20) - length);
    task.dst = to->data() + at;
    task.run_bytes = length;
    std::memcpy(&want[at], bytes.data() + (task.src - from->data()), length);
    at += length + random() % 3;
    tasks.push_back(task);
  }
  ASSERT_LT(at, 2 << 20);
  ASSERT_TRUE(daemon->Copy(tasks, {}, nullptr).ok());
  EXPECT_TRUE(daemon.Read(to->data(), 2 << 20) == want);
}

TEST_F(CudaMemoryTest, BetweenTheGpuAndPinnedHostMemory) {
  TestProcess daemon;
  const std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  AllocateOptions options;
  options.name = "store";
  const std::shared_ptr<Segment> store =
      *daemon.host()->Allocate(1 << 20, options);
  {
    auto pinned = daemon->PinHost(store->data(), store->bytes(), true, store);
    ASSERT_TRUE(pinned.ok()) << pinned.status();
    const std::string bytes = RandomBytes(1 << 20, 7);
    std::memcpy(store->data(), bytes.data(), bytes.size());
    CopyTask task;
    task.src = store->data();
    task.dst = segment->data();
    task.run_bytes = 1 << 20;
    ASSERT_TRUE(daemon->Copy({task}, {}, nullptr).ok());
    EXPECT_TRUE(daemon.Read(segment->data(), 1 << 20) == bytes);
    // Rows of a tensor back, side by side.
    std::memset(store->data(), 0, 1 << 20);
    task.src = segment->data();
    task.dst = store->data();
    task.run_bytes = 1000;
    task.dims.push_back({100, 1000, 4096, 0});
    ASSERT_TRUE(daemon->Copy({task}, {}, nullptr).ok());
    for (int row = 0; row < 100; ++row) {
      ASSERT_EQ(std::memcmp(store->data() + row * 1000,
                            bytes.data() + row * 4096, 1000),
                0);
    }
    Digest digest;
    EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, &digest)), "BAD_COPY");
    // Twice the same memory.
    EXPECT_EQ(
        ReasonOf(daemon->PinHost(store->data(), store->bytes(), true, store)
                     .status()),
        "CUDA_ERROR");
  }
  CopyTask task;
  task.src = segment->data();
  task.dst = store->data();
  task.run_bytes = 100;
  EXPECT_EQ(ReasonOf(daemon->Copy({task}, {}, nullptr)), "BAD_COPY");
}

TEST_F(CudaMemoryTest, CastsOnTheWayIntoABucket) {
  TestProcess daemon;
  constexpr int kRows = 200, kColumns = 300;
  const std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  const std::unique_ptr<Segment> bucket = daemon.Allocate(256 << 10);
  std::mt19937 random(8);
  std::vector<uint32_t> floats(kRows * kColumns);
  std::vector<uint16_t> halves(kRows * kColumns);
  for (size_t i = 0; i < floats.size(); ++i) {
    floats[i] = FloatBits(static_cast<float>(random()) / 1e9f - 2.0f);
    halves[i] = FloatToBF16(floats[i]);
  }
  const auto text = [](const auto& values) {
    return std::string(reinterpret_cast<const char*>(values.data()),
                       values.size() * sizeof(values[0]));
  };
  daemon.Write(text(floats), segment->data());
  char* const bf16 = segment->data() + floats.size() * 4;
  daemon.Write(text(halves), bf16);
  std::vector<PackPiece> pieces(3);
  pieces[0].copy.src = segment->data();
  pieces[0].copy.element_bytes = 2;
  pieces[0].copy.run_bytes = kRows * kColumns * 2;
  pieces[0].copy.cast = CopyCast::kF32ToBF16;
  pieces[1].offset = (kRows * kColumns * 2 + 15) / 16 * 16;
  pieces[1].copy.src = bf16;
  pieces[1].copy.ordinal = 1;
  pieces[1].copy.run_bytes = kRows * kColumns;
  pieces[1].copy.cast = CopyCast::kBF16ToF8E4M3;
  CopyBlocks& blocks = pieces[1].copy.blocks;
  blocks.src = bf16;
  blocks.row_stride = kColumns * 2;
  blocks.column_stride = 2;
  blocks.rows = kRows;
  blocks.columns = blocks.matrix_columns = kColumns;
  pieces[2].offset = pieces[1].offset + kRows * kColumns;
  ASSERT_EQ(pieces[2].offset % 16, 0);
  pieces[2].copy.src = bf16;
  pieces[2].copy.ordinal = 2;
  pieces[2].copy.element_bytes = 4;
  pieces[2].copy.run_bytes = 24;
  pieces[2].copy.cast = CopyCast::kBF16BlockScale;
  pieces[2].copy.blocks = blocks;
  PackRequest request;
  request.bucket = bucket->data();
  request.bucket_bytes = pieces[2].offset + 24;
  request.pieces = pieces;
  PackResult result;
  ASSERT_TRUE(daemon->Pack(request, &result).ok());
  EXPECT_TRUE(daemon.Read(bucket->data(), halves.size() * 2) == text(halves));
  std::vector<float> got_scales(6);
  const std::string scale_bytes =
      daemon.Read(bucket->data() + pieces[2].offset, 24);
  std::memcpy(got_scales.data(), scale_bytes.data(), 24);
  const std::string quantised =
      daemon.Read(bucket->data() + pieces[1].offset, kRows * kColumns);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const int i = row * kColumns + column;
      ASSERT_EQ(
          static_cast<uint8_t>(quantised[i]),
          BF16ToE4M3(halves[i], got_scales[row / 128 * 3 + column / 128]));
    }
  }
  for (int block = 0; block < 6; ++block) {
    uint32_t largest = 0;
    for (int row = block / 3 * 128;
         row < std::min(kRows, block / 3 * 128 + 128); ++row) {
      for (int column = block % 3 * 128;
           column < std::min(kColumns, block % 3 * 128 + 128); ++column) {
        largest = std::max(largest, (halves[row * kColumns + column] & 0x7fffu)
                                        << 16);
      }
    }
    EXPECT_EQ(got_scales[block], BlockScale(largest));
  }
  Digest want;
  DigestAccumulate(halves.data(), {0, 0, kRows * kColumns, 2}, &want);
  DigestAccumulate(quantised.data(), {1, 0, kRows * kColumns, 1}, &want);
  DigestAccumulate(scale_bytes.data(), {2, 0, 6, 4}, &want);
  EXPECT_EQ(result.bucket, want);
  // The same by a look at the tensors alone.
  std::vector<CopyTask> tasks;
  for (const PackPiece& piece : pieces) tasks.push_back(piece.copy);
  Digest seen;
  ASSERT_TRUE(daemon->Copy(tasks, {}, &seen).ok());
  EXPECT_EQ(seen, want);
}

// ---- A GPU that fails ----

// In processes of their own: their contexts are lost.
int Faulty() {
  TestProcess process;
  const std::unique_ptr<Segment> segment = process.Allocate(100000);
  gpu_sim::Plant("call=cudaLaunchKernel sticky=700");
  CopyTask task;
  task.src = segment->data();
  task.dst = segment->data() + 50000;
  task.run_bytes = 10;
  ToParent(ReasonOf(process->Copy({task}, {}, nullptr)));
  gpu_sim::Plant("");
  // For good.
  ToParent(ReasonOf(process->Copy({task}, {}, nullptr)));
  ToParent(ReasonOf(process->Allocate(10, AllocateOptions()).status()));
  return 0;
}

int Stalled() {
  CudaMemory::Options options = TestProcess::SmallOptions();
  options.core.stall_deadline = absl::Milliseconds(300);
  TestProcess process(options);
  const std::unique_ptr<Segment> segment = process.Allocate(1 << 20);
  CopyTask task;
  task.src = segment->data();
  task.dst = segment->data() + 500000;
  task.run_bytes = 100;
  gpu_sim::Plant("call=cudaLaunchKernel stall=1");
  const absl::Time start = absl::Now();
  ToParent(ReasonOf(process->Copy({task}, {}, nullptr)));
  ToParent(absl::Now() - start < absl::Seconds(5) ? "soon" : "late");
  ToParent(ReasonOf(
      process->Read(segment->data(), absl::MakeSpan(new char[10], 10))));
  _exit(0);
}

TEST_F(CudaMemoryTest, FloatsBecomeHalvesAsOnTheHost) {
  TestProcess daemon;
  constexpr int kCount = 70000;  // more than a frame
  const std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  const std::unique_ptr<Segment> bucket = daemon.Allocate(256 << 10);
  std::mt19937 random(9);
  // Any bits: infinities, numbers that are none, and what is too large or too
  // small for a half; and each exponent that a half has.
  std::vector<uint32_t> floats(kCount);
  for (uint32_t& bits : floats) bits = static_cast<uint32_t>(random());
  for (int i = 0; i < kCount; i += 2)
    floats[i] = (floats[i] & 0x807fffffu) | ((100 + i / 2 % 50) << 23);
  const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                              0x477fefff, 0x477ff000, 0x33000000, 0x33000001,
                              0x80000000, 0x387fffff};
  std::copy(std::begin(special), std::end(special), floats.begin());
  std::string bytes(reinterpret_cast<const char*>(floats.data()), 4 * kCount);
  daemon.Write(bytes, segment->data());
  PackPiece piece;
  piece.copy.src = segment->data();
  piece.copy.element_bytes = 2;
  piece.copy.run_bytes = 2 * kCount;
  piece.copy.cast = CopyCast::kF32ToF16;
  PackRequest request;
  request.bucket = bucket->data();
  request.bucket_bytes = 2 * kCount;
  request.pieces = absl::MakeConstSpan(&piece, 1);
  PackResult result;
  ASSERT_TRUE(daemon->Pack(request, &result).ok());
  const std::string got = daemon.Read(bucket->data(), 2 * kCount);
  for (int i = 0; i < kCount; ++i) {
    uint16_t half;
    std::memcpy(&half, got.data() + 2 * i, 2);
    ASSERT_EQ(half, FloatToF16(floats[i])) << std::hex << floats[i];
  }
  Digest want;
  DigestAccumulate(got.data(), {0, 0, kCount, 2}, &want);
  EXPECT_EQ(result.bucket, want);
}

TEST_F(CudaMemoryTest, AFaultIsForGoodAndHasAName) {
  Child child("faulty");
  EXPECT_EQ(child.Receive(), "DEVICE_FAULT");
  EXPECT_EQ(child.Receive(), "DEVICE_FAULT");
  EXPECT_EQ(child.Receive(), "DEVICE_FAULT");
  EXPECT_EQ(child.Wait(), 0);
  TestProcess daemon;
  EXPECT_NE(daemon.Allocate(4096), nullptr);
}

TEST_F(CudaMemoryTest, WorkThatDoesNotEndIsADeadline) {
  Child child("stalled");
  EXPECT_EQ(child.Receive(), "DEVICE_STALLED");
  EXPECT_EQ(child.Receive(), "soon");
  EXPECT_EQ(child.Receive(), "DEVICE_STALLED");
}

// ---- Machines without a usable GPU ----

std::string CreateReason() {
  CopyPool pool(1);
  HostMemory host(&pool, nullptr, {});
  return ReasonOf(CudaMemory::Create(&host, {}).status());
}

TEST_F(CudaMemoryTest, MachinesThatCannot) {
  for (const auto& [setting, reason] :
       std::vector<std::pair<std::string, std::string>>{
           {"GPU_SIM_DRIVER_VERSION=12040", "DRIVER_TOO_OLD"},
           {"GPU_SIM_DEVICES=0", "NO_DEVICE"},
           {"GPU_SIM_MIG=0", "MIG_NO_IPC"},
           {"GPU_SIM_DEVICES=2", "DEVICE_NOT_NAMED"}}) {
    Child child("create", {setting});
    EXPECT_EQ(child.Receive(), reason) << setting;
  }
}

// Code for every generation that we name, and PTX for one that is to come.
TEST_F(CudaMemoryTest, KernelsRunOnEveryGeneration) {
  for (const char* capability : {"80", "86", "90", "100", "120"}) {
    // PTX of the oldest would do for all of them, after a compilation at every
    // start.
    Child child("kernel",
                {absl::StrCat("GPU_SIM_CC=", capability), "GPU_SIM_PTX=0"});
    EXPECT_EQ(child.Receive(), "OK") << capability;
  }
  for (const auto& [ptx, answer] :
       std::vector<std::pair<std::string, std::string>>{
           {"GPU_SIM_PTX=1", "OK"}, {"GPU_SIM_PTX=0", "CUDA_ERROR"}}) {
    Child child("kernel", {"GPU_SIM_CC=130", ptx});
    EXPECT_EQ(child.Receive(), answer) << ptx;
  }
  Child child("kernel", {"GPU_SIM_CC=75"});
  EXPECT_EQ(child.Receive(), "CUDA_ERROR");
}

int Kernel() {
  TestProcess process;
  const std::unique_ptr<Segment> segment = process.Allocate(100000);
  CopyTask task;
  task.src = segment->data();
  task.dst = segment->data() + 50000;
  task.run_bytes = 10;
  const absl::Status status = process->Copy({task}, {}, nullptr);
  ToParent(status.ok() ? "OK" : ReasonOf(status));
  return 0;
}

int Play(const std::string& part) {
  if (part == "worker") return Worker();
  if (part == "trainer") return Trainer();
  if (part == "faulty") return Faulty();
  if (part == "stalled") return Stalled();
  if (part == "kernel") return Kernel();
  if (part == "create") {
    ToParent(CreateReason());
    return 0;
  }
  return 4;
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  FLAGS_logtostderr = true;
  if (argc == 2 &&
      absl::StartsWith(argv[1], weightsync::transport::cuda::kChild)) {
    return weightsync::transport::cuda::Play(
        argv[1] + std::strlen(weightsync::transport::cuda::kChild));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
