// What is launched, and how often; kernels that nothing else launches yet.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "transport/cuda/cuda_memory.h"
#include "transport/cuda/kernel_body.h"
#include "transport/cuda/kernels.h"
#include "transport/cuda/sim_control.h"
#include "transport/cuda/test_child.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

class CudaKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant("");
    gpu_sim::TakeNotes();
  }
  void TearDown() override { gpu_sim::Plant(""); }

  // Calls of `name` from now on are noted.
  void Count(const std::string& name) {
    gpu_sim::TakeNotes();
    gpu_sim::Plant("call=" + name + " note=1 count=0");
  }
  static int64_t Counted() {
    const std::string notes = gpu_sim::TakeNotes();
    return std::count(notes.begin(), notes.end(), '\n');
  }

  // Too small for a copy engine, every one of them.
  static std::vector<CopyTask> SmallPieces(int count, const Segment& from,
                                           const Segment& to) {
    std::vector<CopyTask> tasks;
    for (int i = 0; i < count; ++i) {
      CopyTask task;
      task.src = from.data() + i * 300 + 1;
      task.dst = to.data() + i * 299;
      task.run_bytes = 1 + i % 299;
      tasks.push_back(task);
    }
    return tasks;
  }
};

TEST_F(CudaKernelsTest, ThousandsOfPiecesAreOneLaunch) {
  TestProcess process;
  const std::unique_ptr<Segment> from = process.Allocate(1 << 20);
  const std::unique_ptr<Segment> to = process.Allocate(1 << 20);
  const std::vector<CopyTask> tasks = SmallPieces(3000, *from, *to);
  Count("cudaLaunchKernel");
  ASSERT_TRUE(process->Copy(tasks, {}, nullptr).ok());
  EXPECT_EQ(Counted(), 1);
  Digest digest;
  ASSERT_TRUE(process->Copy(tasks, {}, &digest).ok());
  EXPECT_EQ(Counted(), 1);
}

TEST_F(CudaKernelsTest, APackIsOneLaunchForEachPart) {
  const CudaMemory::Options options = TestProcess::SmallOptions();
  TestProcess process(options);
  const std::unique_ptr<Segment> from = process.Allocate(1 << 20);
  const std::unique_ptr<Segment> bucket = process.Allocate(1 << 20);
  std::vector<PackPiece> pieces;
  for (const CopyTask& task : SmallPieces(3000, *from, *bucket)) {
    PackPiece piece;
    piece.offset = static_cast<int64_t>(pieces.size()) * 304;
    piece.copy = task;
    piece.copy.dst = nullptr;
    pieces.push_back(piece);
  }
  PackRequest request;
  request.bucket = bucket->data();
  request.pieces = pieces;
  for (const int parts : {7, 8}) {
    // 3000 pieces end in the seventh part.
    request.bucket_bytes = parts * options.pack_part_bytes;
    Count("cudaLaunchKernel");
    ASSERT_TRUE(process->Pack(request, nullptr).ok());
    EXPECT_EQ(Counted(), parts);
  }
}

TEST_F(CudaKernelsTest, ContiguousPiecesGoByCopyEngines) {
  TestProcess process;
  const std::unique_ptr<Segment> segment = process.Allocate(1 << 20);
  std::vector<CopyTask> tasks(3);
  for (int i = 0; i < 3; ++i) {
    tasks[i].src = segment->data() + i * 100000;
    tasks[i].dst = segment->data() + 500000 + i * 100000;
    tasks[i].run_bytes = 90000;
  }
  Count("cudaLaunchKernel");
  ASSERT_TRUE(process->Copy(tasks, {}, nullptr).ok());
  EXPECT_EQ(Counted(), 0);
  // Where the engines cannot, nothing takes their place unseen.
  gpu_sim::Plant("call=cudaMemcpyBatchAsync error=2");
  EXPECT_EQ(ReasonOf(process->Copy(tasks, {}, nullptr)), "NO_DEVICE_MEMORY");
  // All three were one call.
  gpu_sim::Plant("call=cudaMemcpyBatchAsync error=2 after=1");
  EXPECT_TRUE(process->Copy(tasks, {}, nullptr).ok());
}

// ---- Changed elements ----

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Values(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class ScanTest : public CudaKernelsTest,
                 public ::testing::WithParamInterface<int> {};

TEST_P(ScanTest, TheLaunchesDoWhatTheBodiesDo) {
  const int element_bytes = GetParam();
  // Ends within a word, and within a group.
  constexpr int64_t kElements = 3 * kScanGroup + 1007;
  constexpr int64_t kWords = (kElements + kScanWord - 1) / kScanWord;
  constexpr int64_t kGroups = (kElements + kScanGroup - 1) / kScanGroup;
  const std::string before =
      RandomBytes(static_cast<size_t>(kElements * element_bytes), 3);
  std::string after = before;
  std::mt19937 random(element_bytes);
  std::vector<uint32_t> changed_elements;
  for (int64_t i = 0; i < kElements; ++i) {
    // In the last group nothing but its end; in the second nothing.
    const bool change = i / kScanGroup == 1   ? false
                        : i / kScanGroup == 3 ? i == kElements - 1
                                              : random() % 20 == 0;
    if (!change) continue;
    after[static_cast<size_t>(i * element_bytes + random() % element_bytes)] ^=
        0x40;
    changed_elements.push_back(static_cast<uint32_t>(i));
  }

  // The bodies, on the CPU.
  std::vector<unsigned long long> words(kWords);  // NOLINT: CUDA's type
  std::vector<unsigned int> counts(kGroups);
  ScanLaunch scan = {};
  scan.before = before.data();
  scan.after = after.data();
  scan.element_count = kElements;
  scan.element_bytes = element_bytes;
  scan.changed = words.data();
  for (int64_t word = 0; word < kWords; ++word) {
    words[word] = ChangedWord(scan, word);
    counts[word / (kScanGroup / kScanWord)] += PopCount(words[word]);
  }
  std::vector<int64_t> first(kGroups);
  for (int64_t group = 1; group < kGroups; ++group)
    first[group] = first[group - 1] + counts[group - 1];
  CompactLaunch compact = {};
  compact.scan = scan;
  compact.first = first.data();
  std::vector<uint32_t> indices(changed_elements.size());
  std::string values(changed_elements.size() * element_bytes, '\0');
  compact.indices = indices.data();
  compact.values = &values[0];
  for (int64_t word = 0; word < kWords; ++word) CompactWord(compact, word);
  EXPECT_EQ(indices, changed_elements);

  // The launches.
  TestProcess process;
  const auto on_device = [&process](const std::string& bytes) {
    std::unique_ptr<Segment> segment =
        process.Allocate(static_cast<int64_t>(bytes.size()));
    process.Write(bytes, segment->data());
    return segment;
  };
  const std::unique_ptr<Segment> device_before = on_device(before);
  const std::unique_ptr<Segment> device_after = on_device(after);
  const std::unique_ptr<Segment> device_words =
      on_device(std::string(kWords * 8, 'x'));
  const std::unique_ptr<Segment> device_counts =
      on_device(std::string(kGroups * 4, '\0'));
  const std::unique_ptr<Segment> device_first = on_device(Bytes(first));
  const std::unique_ptr<Segment> device_indices =
      on_device(std::string(indices.size() * 4, 'x'));
  const std::unique_ptr<Segment> device_values =
      on_device(std::string(values.size(), 'x'));
  scan.before = device_before->data();
  scan.after = device_after->data();
  scan.changed =
      reinterpret_cast<unsigned long long*>(device_words->data());  // NOLINT
  scan.counts = reinterpret_cast<unsigned int*>(device_counts->data());
  compact.scan = scan;
  compact.first = reinterpret_cast<const int64_t*>(device_first->data());
  compact.indices = reinterpret_cast<uint32_t*>(device_indices->data());
  compact.values = device_values->data();
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
            cudaSuccess);
  ASSERT_EQ(LaunchScan(scan, stream), cudaSuccess);
  ASSERT_EQ(LaunchCompact(compact, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(Values<unsigned long long>(  // NOLINT
                process.Read(device_words->data(), kWords * 8)),
            words);
  EXPECT_EQ(
      Values<unsigned int>(process.Read(device_counts->data(), kGroups * 4)),
      counts);
  EXPECT_EQ(Values<uint32_t>(
                process.Read(device_indices->data(), indices.size() * 4)),
            indices);
  EXPECT_EQ(process.Read(device_values->data(), values.size()), values);
}

INSTANTIATE_TEST_SUITE_P(Elements, ScanTest, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync
