// Memory that others hold, or that is taken for other memory: when it is closed
// and freed, and when it must not be.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/cuda/sim_control.h"
#include "transport/cuda/test_child.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

class CudaEndsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant("");
    gpu_sim::TakeNotes();
  }
  void TearDown() override {
    gpu_sim::Plant("");
    cudaGetLastError();
  }
};

// ---- Who is who ----

// Of a process in another pid namespace nobody here knows more than a number
// that it has given.
ProcessIdentity Foreign(int64_t pid) {
  ProcessIdentity process;
  process.pid = pid;
  return process;
}

TEST_F(CudaEndsTest, TwoContainersWithOnePidAreTwo) {
  TestProcess daemon;
  Child one("trainer", {"TRAINER_SEED=1"});
  Child two("trainer", {"TRAINER_SEED=2"});
  DeviceHandle first = *DeviceHandle::Decode(one.Receive());
  DeviceHandle second = *DeviceHandle::Decode(two.Receive());
  // The same program in two containers: the same pid, address and number.
  first.exporter = second.exporter = Foreign(17);
  second.base = first.base;
  second.buffer_id = first.buffer_id;
  auto of_one = daemon->imports()->Acquire(first, false);
  ASSERT_TRUE(of_one.ok()) << of_one.status();
  auto of_two = daemon->imports()->Acquire(second, false);
  ASSERT_TRUE(of_two.ok()) << of_two.status();
  EXPECT_EQ(daemon->imports()->size(), 2);
  EXPECT_TRUE(daemon.Read((*of_one)->data, 10000) == RandomBytes(10000, 1));
  EXPECT_TRUE(daemon.Read((*of_two)->data, 10000) == RandomBytes(10000, 2));
  of_one->reset();
  of_two->reset();
  EXPECT_TRUE(daemon->core()->Drain(absl::Seconds(4)));
}

TEST_F(CudaEndsTest, AProbeIsOfOneExporterWhateverItsPid) {
  TestProcess daemon;
  Child one("trainer"), two("trainer");
  DeviceHandle first = *DeviceHandle::Decode(one.Receive());
  DeviceHandle second = *DeviceHandle::Decode(two.Receive());
  first.exporter = second.exporter = Foreign(17);
  ASSERT_TRUE(daemon->imports()->Acquire(first, false).ok());
  // What it opens is not what its exporter has: the probe of the other does not
  // speak for it.
  second.nonce[3] ^= 1;
  EXPECT_EQ(ReasonOf(daemon->imports()->Acquire(second, false).status()),
            "PROBE_FAILED");
  EXPECT_TRUE(daemon->core()->Drain(absl::Seconds(4)));
}

// ---- Closing ----

TEST_F(CudaEndsTest, WhatAWorkerHoldsCostsNobodyElse) {
  TestProcess daemon;
  std::unique_ptr<Segment> segment = daemon.Allocate(1 << 20);
  Child worker("worker");
  worker.Send(Encode(Ticket(&daemon, *segment, true)));
  ASSERT_EQ(worker.Receive(), "OK");
  segment.reset();
  Child trainer("trainer");
  auto import = daemon->imports()->Acquire(
      *DeviceHandle::Decode(trainer.Receive()), false);
  ASSERT_TRUE(import.ok()) << import.status();
  import->reset();
  // The trainer's is closed at once, and the worker's is not forgotten.
  const absl::Time start = absl::Now();
  EXPECT_TRUE(daemon->core()->Drain(absl::Seconds(4)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  EXPECT_EQ(daemon->GetUsage()->segments_bytes, 1 << 20);
  worker.Send("close");
  ASSERT_EQ(worker.Receive(), "closed");
  EXPECT_TRUE(
      Eventually([&] { return daemon->GetUsage()->segments_bytes == 0; }));
}

// A pack that is under way for as long as this is.
class LongPack {
 public:
  explicit LongPack(TestProcess* process)
      : segment_(process->Allocate(100000)), thread_([this, process] {
          PackPiece piece;
          piece.copy.src = segment_->data();
          piece.copy.run_bytes = 50000;
          PackRequest request;
          request.bucket = segment_->data() + 50000;
          request.bucket_bytes = 50000;
          request.pieces = absl::MakeConstSpan(&piece, 1);
          request.on_frames = [this](int64_t, int64_t,
                                     absl::Span<const Digest>) {
            if (!begun_.HasBeenNotified()) begun_.Notify();
            end_.WaitForNotification();
          };
          EXPECT_TRUE((*process)->Pack(request, nullptr).ok());
        }) {
    begun_.WaitForNotification();
  }
  ~LongPack() {
    end_.Notify();
    thread_.join();
  }

 private:
  const std::unique_ptr<Segment> segment_;
  absl::Notification begun_, end_;
  std::thread thread_;
};

TEST_F(CudaEndsTest, NothingIsClosedWhileACopyIsUnderWay) {
  TestProcess daemon;
  // What somebody has held for long is no reason to close anything now.
  std::unique_ptr<Segment> held = daemon.Allocate(1 << 20);
  Child worker("worker");
  worker.Send(Encode(Ticket(&daemon, *held, true)));
  ASSERT_EQ(worker.Receive(), "OK");
  held.reset();
  Child trainer("trainer");
  auto import = daemon->imports()->Acquire(
      *DeviceHandle::Decode(trainer.Receive()), false);
  ASSERT_TRUE(import.ok()) << import.status();
  daemon->core()->Drain(absl::Seconds(4));
  absl::SleepFor(absl::Milliseconds(2300));
  gpu_sim::Plant(
      "call=cudaIpcCloseMemHandle note=1 count=0;call=cudaFree note=1 count=0");
  {
    LongPack pack(&daemon);
    import->reset();
    absl::SleepFor(absl::Milliseconds(700));
    EXPECT_EQ(gpu_sim::TakeNotes(), "");
    // The worker's is free to be freed, and waits as well.
    worker.Send("close");
    ASSERT_EQ(worker.Receive(), "closed");
    EXPECT_EQ(gpu_sim::TakeNotes(), "cudaIpcCloseMemHandle\n")
        << "the worker's";
  }
  EXPECT_TRUE(
      Eventually([&] { return daemon->GetUsage()->segments_bytes == 0; }));
  gpu_sim::Plant("");
  const std::string notes = gpu_sim::TakeNotes();
  EXPECT_TRUE(absl::StrContains(notes, "cudaIpcCloseMemHandle\n")) << notes;
  EXPECT_TRUE(absl::StrContains(notes, "cudaFree\n")) << notes;
}

// ---- Pinned memory ----

std::shared_ptr<char> Mapping(int64_t bytes) {
  return std::shared_ptr<char>(
      static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0)),
      [bytes](char* gone) { munmap(gone, bytes); });
}

TEST_F(CudaEndsTest, PinnedMemoryIsMappedUntilItIsNotPinned) {
  TestProcess daemon;
  std::shared_ptr<char> memory = Mapping(1 << 20);
  const std::weak_ptr<char> mapped = memory;
  auto pinned = daemon->PinHost(memory.get(), 1 << 20, true, memory);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  memory = nullptr;
  {
    LongPack pack(&daemon);
    pinned->reset();
    absl::SleepFor(absl::Milliseconds(300));
    EXPECT_FALSE(mapped.expired());
  }
  EXPECT_TRUE(daemon->core()->Drain(absl::Seconds(4)));
  EXPECT_TRUE(mapped.expired());
}

// In a process of its own: what stays registered is a leak.
int Unpinnable(const std::string& rule) {
  TestProcess process;
  std::shared_ptr<char> memory = Mapping(1 << 20);
  const std::weak_ptr<char> mapped = memory;
  auto pinned = process->PinHost(memory.get(), 1 << 20, true, memory);
  memory = nullptr;
  gpu_sim::Plant("call=cudaHostUnregister " + rule);
  pinned->reset();
  process->core()->Drain(absl::Milliseconds(300));
  process->core()->Finish(absl::Milliseconds(300));
  ToParent(mapped.expired() ? "unmapped" : "mapped");
  _exit(0);
}

TEST_F(CudaEndsTest, WhatCannotBeUnpinnedStaysMapped) {
  Child refused("unpin_refused");
  EXPECT_EQ(refused.Receive(), "mapped");
  Child hangs("unpin_hangs");
  EXPECT_EQ(hangs.Receive(), "mapped");
}

// ---- Errors ----

TEST_F(CudaEndsTest, ErrorsThatStayUntilTheProcessEnds) {
  for (const cudaError_t error :
       {cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable,
        cudaErrorContained, cudaErrorIllegalAddress, cudaErrorLaunchTimeout,
        cudaErrorContextIsDestroyed, cudaErrorAssert,
        cudaErrorHardwareStackError, cudaErrorIllegalInstruction,
        cudaErrorMisalignedAddress, cudaErrorInvalidAddressSpace,
        cudaErrorInvalidPc, cudaErrorLaunchFailure, cudaErrorTensorMemoryLeak,
        cudaErrorMpsRpcFailure, cudaErrorMpsClientTerminated,
        cudaErrorExternalDevice, cudaErrorUnknown}) {
    EXPECT_EQ(ReasonOf(CheckCuda(error, "a call")), "DEVICE_FAULT") << error;
  }
  for (const cudaError_t error :
       {cudaErrorInvalidValue, cudaErrorInvalidResourceHandle,
        cudaErrorMapBufferObjectFailed, cudaErrorMpsServerNotReady,
        cudaErrorMpsMaxClientsReached, cudaErrorPeerAccessAlreadyEnabled}) {
    EXPECT_EQ(ReasonOf(CheckCuda(error, "a call")), "CUDA_ERROR") << error;
  }
}

TEST_F(CudaEndsTest, ALostContextIsNotTakenForAnotherFault) {
  TestProcess process;
  const std::unique_ptr<Segment> segment = process.Allocate(4096);
  const DevicePlace place =
      *process->exporter().Describe(segment->data(), 4096);
  gpu_sim::Plant("call=cuPointerGetAttribute error=700");
  EXPECT_EQ(ReasonOf(DeviceExporter::CheckStillThere(place.handle)),
            "DEVICE_FAULT");
  gpu_sim::Plant("call=cuPointerGetAttribute error=999");
  EXPECT_EQ(
      ReasonOf(process->exporter().Describe(segment->data(), 4096).status()),
      "DEVICE_FAULT");
  gpu_sim::Plant("call=cuMemGetAddressRange error=4");
  EXPECT_EQ(
      ReasonOf(process->exporter().Describe(segment->data(), 4096).status()),
      "CUDA_ERROR");
  gpu_sim::Plant("");
  EXPECT_TRUE(DeviceExporter::CheckStillThere(place.handle).ok());
}

int Play(const std::string& part) {
  if (part == "worker") return Worker();
  if (part == "trainer") return Trainer();
  if (part == "unpin_refused") return Unpinnable("error=1");
  if (part == "unpin_hangs") return Unpinnable("hang=1");
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
