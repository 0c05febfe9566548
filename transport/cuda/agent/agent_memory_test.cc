#include "transport/cuda/agent/agent_memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "glog/logging.h"
#include "gtest/gtest.h"
#include "transport/cuda/agent/agent_server.h"
#include "transport/cuda/sim_control.h"
#include "transport/cuda/testing.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace cuda {
namespace {

constexpr int64_t kSlotBytes = 1 << 20;
constexpr int64_t kBytes = 600000;

std::string RandomBytes(size_t count, uint32_t seed) {
  std::string bytes(count, '\0');
  uint64_t state = seed;
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

// A trainer in a process of its own, with RandomBytes(kBytes, 5 + device) on a
// GPU. It frees them when it is told to, or at its end.
class Trainer {
 public:
  explicit Trainer(int device = 0) {
    int to[2], from[2];
    EXPECT_EQ(pipe2(to, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      execl("/proc/self/exe", "trainer", "--trainer",
            absl::StrCat(device).c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
    char bytes[4096];
    const ssize_t n = read(from_, bytes, sizeof(bytes));
    const auto handle =
        DeviceHandle::Decode(absl::string_view(bytes, n > 0 ? n : 0));
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (handle.ok()) handle_ = *handle;
  }
  ~Trainer() {
    close(to_);
    waitpid(pid_, nullptr, 0);
    close(from_);
  }
  const DeviceHandle& handle() const { return handle_; }
  // Returns when it has.
  void Free() {
    EXPECT_EQ(write(to_, "f", 1), 1);
    char byte;
    EXPECT_EQ(read(from_, &byte, 1), 1);
  }
  void Kill() { kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0); }

  static int Play(int device) {
    const auto devices = ListDevices();
    auto exporter = DeviceExporter::Create((*devices)[device]);
    void* pointer = nullptr;
    cudaSetDevice(device);
    cudaMalloc(&pointer, kBytes);
    const std::string bytes = RandomBytes(kBytes, 5 + device);
    cudaMemcpy(pointer, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    const std::string handle =
        (*exporter)->Describe(pointer, kBytes)->handle.Encode();
    if (write(1, handle.data(), handle.size()) < 0) return 1;
    char byte;
    while (read(0, &byte, 1) > 0) {
      cudaFree(pointer);
      pointer = nullptr;
      if (write(1, "f", 1) < 0) return 1;
    }
    cudaFree(pointer);
    return 0;
  }

 private:
  pid_t pid_;
  int to_, from_;
  DeviceHandle handle_;
};

class AgentMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_sim::Plant("");
    static std::atomic<int> counter{0};
    const std::string prefix = absl::StrCat(getenv("GPU_SIM_DIR"), "/memory_",
                                            getpid(), "_", counter++);
    auto fds = FdServer::Start(prefix, FdServer::Options());
    ASSERT_TRUE(fds.ok());
    fds_ = *std::move(fds);
    host_ =
        std::make_unique<HostMemory>(&pool_, fds_.get(), HostMemory::Options());
    options_.agent.command = {"/usr/bin/env", "GPU_SIM_ROLE=agent",
                              "/proc/self/exe"};
    char path[4096];
    options_.agent.command[2].assign(
        path, readlink("/proc/self/exe", path, sizeof(path)));
    options_.agent.config.slots = 2;
    options_.agent.config.slot_bytes = kSlotBytes;
    options_.agent.config.keep_free_bytes = 1 << 20;
    options_.agent.config.stall_deadline_ms = 1000;
    options_.agent.fd_socket_prefix = prefix + "_agent";
    options_.agent.backoff = absl::Milliseconds(10);
    options_.usage_interval = absl::Milliseconds(20);
  }
  void TearDown() override {
    gpu_sim::Plant("");
    memory_ = nullptr;
    agents_ = nullptr;
  }
  void Start() {
    auto agents = DeviceAgents::Create(options_);
    ASSERT_TRUE(agents.ok()) << agents.status();
    agents_ = *std::move(agents);
    AgentMemory::Options options;
    options.timeout = absl::Seconds(10);
    memory_ = std::make_unique<AgentMemory>(host_.get(), agents_.get(), 2,
                                            kSlotBytes, options);
  }
  std::unique_ptr<Segment> Arena(int64_t bytes) {
    AllocateOptions options;
    options.name = "store";
    options.generation_slots = 4;
    options.others_read_only = true;
    auto arena = memory_->Allocate(bytes, options);
    EXPECT_TRUE(arena.ok()) << arena.status();
    return *std::move(arena);
  }
  std::shared_ptr<const AgentMemory::Region> Open(const Trainer& trainer) {
    auto region = memory_->Open(trainer.handle());
    EXPECT_TRUE(region.ok()) << region.status();
    return region.ok() ? *std::move(region) : nullptr;
  }
  static PackPiece Piece(int64_t offset, const char* src, int64_t bytes,
                         uint32_t ordinal) {
    PackPiece piece;
    piece.offset = offset;
    piece.copy.src = src;
    piece.copy.run_bytes = bytes;
    piece.copy.element_bytes = 2;
    piece.copy.ordinal = ordinal;
    return piece;
  }
  // Until nothing of a trainer is open: then it may end, and free it.
  void Close(std::initializer_list<std::shared_ptr<const AgentMemory::Region>*>
                 regions) {
    for (auto* region : regions) *region = nullptr;
    EXPECT_TRUE(memory_->AwaitClosed({}, absl::Seconds(10)).ok());
  }
  pid_t AgentPid(const Trainer& trainer) {
    return (*agents_->Get(trainer.handle().device_uuid))->pid();
  }

  CopyPool pool_{1};
  std::unique_ptr<FdServer> fds_;
  std::unique_ptr<HostMemory> host_;
  DeviceAgents::Options options_;
  std::unique_ptr<DeviceAgents> agents_;
  std::unique_ptr<AgentMemory> memory_;
};

TEST_F(AgentMemoryTest, APackOutOfARegionIsThatOfTheSameBytesInHostMemory) {
  Start();
  Trainer trainer;
  auto region = Open(trainer);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->bytes(), kBytes);
  const std::unique_ptr<Segment> arena = Arena(2 << 20);
  const std::string bytes = RandomBytes(kBytes, 5);
  // Strided, too: every second row of 100 bytes.
  const auto pieces_of = [](const char* base) {
    std::vector<PackPiece> pieces = {Piece(0, base + 64, 200000, 1)};
    PackPiece rows = Piece(200016, base + 300000, 100, 2);
    rows.copy.dims.push_back({1000, 100, 200, 50});
    pieces.push_back(rows);
    return pieces;
  };
  PackRequest request;
  request.bucket = arena->data() + 4096;
  request.bucket_bytes = 300016;
  auto pieces = pieces_of(region->data());
  request.pieces = pieces;
  int64_t told = 0;
  request.on_frames = [&](int64_t first, int64_t last,
                          absl::Span<const Digest>) {
    EXPECT_EQ(first, told);
    told = last;
  };
  PackResult got;
  const absl::Status status = memory_->Pack(request, &got);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(told, static_cast<int64_t>(got.frames.size()));

  std::vector<char> expected(300016);
  pieces = pieces_of(bytes.data());
  request.pieces = pieces;
  request.bucket = expected.data();
  request.on_frames = nullptr;
  PackResult want;
  ASSERT_TRUE(host_->Pack(request, &want).ok());
  EXPECT_EQ(memcmp(arena->data() + 4096, expected.data(), expected.size()), 0);
  EXPECT_EQ(got.frames, want.frames);
  EXPECT_EQ(got.bucket, want.bucket);
  // What is read of the same pieces, and written nowhere.
  std::vector<CopyTask> tasks;
  for (const PackPiece& piece : pieces_of(region->data()))
    tasks.push_back(piece.copy);
  Digest read;
  ASSERT_TRUE(memory_->Copy(tasks, CopyOptions(), &read).ok());
  EXPECT_EQ(read, want.bucket);
  // The agent told what it has taken.
  for (int i = 0; i < 500 && agents_->Reports()[0].usage.slots_bytes == 0; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(agents_->Reports()[0].usage.slots_bytes, 2 * kSlotBytes);
  EXPECT_EQ(agents_->Reports().size(), 1u);  // nobody asked for the other
  Close({&region});
}

TEST_F(AgentMemoryTest, ABucketMayComeFromTwoGpusAndTheHost) {
  Start();
  Trainer one(0), two(1);
  auto a = Open(one), b = Open(two);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  const std::unique_ptr<Segment> arena = Arena(1 << 20);
  const std::string here = RandomBytes(70000, 77);
  const std::vector<PackPiece> pieces = {
      Piece(0, b->data(), 100000, 1), Piece(100000, here.data(), 70000, 2),
      Piece(170000, a->data() + 32, 90000, 3),
      Piece(260000, b->data() + 200000, 50000, 4)};
  PackRequest request;
  request.bucket = arena->data();
  request.bucket_bytes = 310000;
  request.pieces = pieces;
  int calls = 0;
  request.on_frames = [&](int64_t first, int64_t last,
                          absl::Span<const Digest> digests) {
    EXPECT_EQ(first, 0);
    EXPECT_EQ(last, static_cast<int64_t>(digests.size()));
    ++calls;
  };
  PackResult got;
  const absl::Status status = memory_->Pack(request, &got);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(calls, 1);
  const std::string first = RandomBytes(kBytes, 5);
  const std::string second = RandomBytes(kBytes, 6);
  std::vector<PackPiece> local = pieces;
  local[0].copy.src = second.data();
  local[2].copy.src = first.data() + 32;
  local[3].copy.src = second.data() + 200000;
  std::vector<char> expected(310000);
  request.bucket = expected.data();
  request.pieces = local;
  request.on_frames = nullptr;
  PackResult want;
  ASSERT_TRUE(host_->Pack(request, &want).ok());
  EXPECT_EQ(memcmp(arena->data(), expected.data(), expected.size()), 0);
  EXPECT_EQ(got.frames, want.frames);
  Close({&a, &b});
}

// As many tensors as there may be: one question to each GPU's agent.
TEST_F(AgentMemoryTest, DigestsOfEachTensorAreThoseOfTheSameBytes) {
  Start();
  Trainer one(0), two(1);
  auto a = Open(one), b = Open(two);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  const std::string bytes = RandomBytes(kBytes, 5),
                    other = RandomBytes(kBytes, 6);
  const std::string here = RandomBytes(7000, 77);
  std::vector<CopyTask> tasks, same;
  const auto add = [&](const char* base, const char* copy, int64_t offset,
                       int64_t run) {
    CopyTask task =
        Piece(0, base + offset, run, static_cast<uint32_t>(tasks.size())).copy;
    if (tasks.size() % 3 == 1) {
      task.run_bytes = run / 10;
      task.dims.push_back({5, run / 10, run / 10 + 32, 1000});
    }
    tasks.push_back(task);
    task.src = copy + offset;
    same.push_back(task);
  };
  for (int64_t i = 0; i < 40; ++i) {
    add(a->data(), bytes.data(), 64 + i * 2000, 1600);
    add(b->data(), other.data(), 96 + i * 3000, 2400);
  }
  add(a->data(), bytes.data(), 0, 300000);  // several frames
  add(here.data(), here.data(), 0, 7000);
  std::vector<Digest> got(tasks.size()), want(tasks.size());
  const absl::Status status =
      memory_->DigestEach(tasks, CopyOptions(), absl::MakeSpan(got));
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(
      host_->DigestEach(same, CopyOptions(), absl::MakeSpan(want)).ok());
  for (size_t i = 0; i < tasks.size(); ++i) {
    EXPECT_EQ(got[i], want[i]) << i;
    EXPECT_NE(got[i], Digest()) << i;
  }
  Close({&a, &b});
}

TEST_F(AgentMemoryTest, CopiesGoIntoTheStoreRowByRow) {
  Start();
  Trainer trainer;
  auto region = Open(trainer);
  const std::unique_ptr<Segment> arena = Arena(2 << 20);
  CopyTask task;
  task.src = region->data() + 10000;
  task.dst = arena->data() + 500;
  task.run_bytes = 40;
  task.dims.push_back({300, 64, 50, 0});
  ASSERT_TRUE(memory_->Copy({task}, CopyOptions(), nullptr).ok());
  const std::string bytes = RandomBytes(kBytes, 5);
  for (int row = 0; row < 300; ++row) {
    ASSERT_EQ(memcmp(arena->data() + 500 + row * 64,
                     bytes.data() + 10000 + row * 50, 40),
              0);
  }
  // Not into a region, and not to where no agent could write.
  std::string elsewhere(40 * 300, '\0');
  task.dst = &elsewhere[0];
  EXPECT_EQ(ReasonOf(memory_->Copy({task}, CopyOptions(), nullptr)),
            "BAD_COPY");
  task.src = elsewhere.data();
  task.dst = const_cast<char*>(region->data());
  EXPECT_EQ(ReasonOf(memory_->Copy({task}, CopyOptions(), nullptr)),
            "BAD_COPY");
  // A bucket that no slot holds.
  PackRequest request;
  request.bucket = arena->data();
  request.bucket_bytes = kSlotBytes + 16;
  const std::vector<PackPiece> pieces = {Piece(0, region->data(), 1000, 1)};
  request.pieces = pieces;
  EXPECT_EQ(ReasonOf(memory_->Pack(request, nullptr)), "SLOT_TOO_SMALL");
  Close({&region});
}

TEST_F(AgentMemoryTest, ASegmentOfAGpuIsPackedReadAndEndsWithItsAgent) {
  Start();
  Trainer trainer;
  auto region = Open(trainer);
  ASSERT_NE(region, nullptr);
  const std::string uuid = trainer.handle().device_uuid;
  AllocateOptions where;
  where.name = "device store";
  where.generation_slots = 4;
  where.device_uuid = uuid;
  // More than the GPU has, with the sums.
  const auto refused = memory_->Allocate(int64_t{1} << 40, where);
  EXPECT_EQ(ReasonOf(refused.status()), "NO_MEMORY_FOR_ARENA");
  auto store = memory_->Allocate(kSlotBytes * 2, where);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ((*store)->kind(), MemoryKind::kCuda);
  EXPECT_EQ((*store)->device_uuid(), uuid);
  EXPECT_EQ(memory_->DeviceOf((*store)->data() + 17), uuid);
  EXPECT_EQ(memory_->DeviceOf(region->data()), uuid);
  const std::unique_ptr<Segment> arena = Arena(4 << 20);
  EXPECT_EQ(memory_->DeviceOf(arena->data()), "");

  // A pack without a slot: more than one holds.
  const std::string bytes = RandomBytes(kBytes, 5);
  const int64_t kBucket = kSlotBytes + 4096;
  char* const bucket = (*store)->data() + 8192;
  std::vector<PackPiece> pieces = {Piece(0, region->data(), 400000, 1),
                                   Piece(1000000, region->data(), 52000, 2)};
  PackRequest request;
  request.bucket = bucket;
  request.bucket_bytes = kBucket;
  request.pieces = pieces;
  int64_t told = 0;
  request.on_frames = [&](int64_t first, int64_t last,
                          absl::Span<const Digest>) {
    EXPECT_EQ(first, told);
    told = last;
  };
  PackResult got;
  absl::Status status = memory_->Pack(request, &got);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(told, static_cast<int64_t>(got.frames.size()));
  std::vector<char> expected(static_cast<size_t>(kBucket));
  for (PackPiece& piece : pieces)
    piece.copy.src = bytes.data() + (piece.copy.src - region->data());
  request.pieces = pieces;
  request.bucket = expected.data();
  request.on_frames = nullptr;
  PackResult want;
  ASSERT_TRUE(host_->Pack(request, &want).ok());
  EXPECT_EQ(got.frames, want.frames);

  // Some of its frames, where they lie: at the ends of pieces, in their middle,
  // and where there is none.
  std::vector<PackPiece> lying = pieces;
  for (PackPiece& piece : lying) piece.copy.src = bucket + piece.offset;
  for (const std::vector<uint32_t>& frames :
       {std::vector<uint32_t>{0, 1, 2, 3}, {6}, {3, 6, 9, 15, 16}, {9}, {16}}) {
    FrameDigestRequest asked;
    asked.pieces = lying;
    asked.frames = frames;
    const auto digests = memory_->DigestFrames(asked);
    ASSERT_TRUE(digests.ok()) << digests.status();
    ASSERT_EQ(digests->size(), frames.size());
    for (size_t i = 0; i < frames.size(); ++i)
      EXPECT_EQ((*digests)[i], want.frames[frames[i]]) << frames[i];
  }
  const std::vector<uint32_t> twice = {2, 2};
  FrameDigestRequest wrong;
  wrong.pieces = lying;
  wrong.frames = twice;
  EXPECT_EQ(ReasonOf(memory_->DigestFrames(wrong).status()), "BAD_COPY");
  wrong.pieces = pieces;
  EXPECT_EQ(ReasonOf(memory_->DigestFrames(wrong).status()), "BAD_COPY")
      << "of host memory";

  // What channels call it.
  const absl::StatusOr<DeviceAgent*> agent = agents_->Get(uuid);
  ASSERT_TRUE(agent.ok());
  auto place = memory_->PlaceForChannel(*agent, 1, bucket, 100);
  ASSERT_TRUE(place.ok() && place->has_value()) << place.status();
  EXPECT_EQ((*place)->kind, AgentPlace::Kind::kStore);
  EXPECT_EQ((*place)->offset, 8192);
  place = memory_->PlaceForChannel(*agent, 1, arena->data() + 300, 100);
  ASSERT_TRUE(place.ok() && place->has_value()) << place.status();
  EXPECT_EQ((*place)->kind, AgentPlace::Kind::kHost);
  EXPECT_EQ((*place)->offset, 300);
  // Of nobody's: it goes through a buffer.
  place = memory_->PlaceForChannel(*agent, 1, expected.data(), 100);
  EXPECT_TRUE(place.ok() && !place->has_value());
  EXPECT_EQ(ReasonOf(memory_->PlaceForChannel(*agent, 2, bucket, 100).status()),
            "DEVICE_STORE_LOST");
  EXPECT_EQ(
      ReasonOf(memory_->PlaceForChannel(*agent, 1, bucket, 1 << 30).status()),
      "BAD_COPY");

  // Down to the host, up to another place, and digested there.
  CopyTask down;
  down.src = bucket;
  down.dst = arena->data() + 4096;
  down.run_bytes = kBucket;
  status = memory_->Copy({down}, CopyOptions(), nullptr);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(memcmp(down.dst, expected.data(), expected.size()), 0);
  CopyTask up = down;
  up.src = down.dst;
  up.dst = (*store)->data();
  status = memory_->Copy({up}, CopyOptions(), nullptr);
  ASSERT_TRUE(status.ok()) << status;
  Digest there, here;
  CopyTask digested = pieces[0].copy;
  digested.src = (*store)->data();
  status = memory_->Copy({digested}, CopyOptions(), &there);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(host_->Copy({pieces[0].copy}, CopyOptions(), &here).ok());
  EXPECT_EQ(there, here);
  std::string read(1 << 20, '\0');
  read.resize(static_cast<size_t>(kBucket));
  status = memory_->Read((*store)->data(), absl::MakeSpan(&read[0], kBucket));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(read, std::string(expected.begin(), expected.end()));

  // Nothing is copied that this does not name, and no other GPU's.
  CopyTask rows = down;
  rows.run_bytes = 10;
  rows.dims.push_back({2, 100, 100, 0});
  EXPECT_EQ(ReasonOf(memory_->Copy({rows}, CopyOptions(), nullptr)),
            "BAD_COPY");
  down.run_bytes = 4 * kSlotBytes;
  EXPECT_EQ(ReasonOf(memory_->Copy({down}, CopyOptions(), nullptr)),
            "BAD_COPY");
  EXPECT_EQ(ReasonOf(memory_->Write("x", (*store)->data())), "BAD_COPY");
  {
    Trainer other(1);
    auto far = Open(other);
    const std::vector<PackPiece> from_far = {Piece(0, far->data(), 1000, 1)};
    request.pieces = from_far;
    request.bucket = bucket;
    EXPECT_EQ(ReasonOf(memory_->Pack(request, nullptr)), "OTHER_DEVICE");
    const std::string mine(1000, 'm');
    const std::vector<PackPiece> from_here = {Piece(0, mine.data(), 1000, 1)};
    request.pieces = from_here;
    EXPECT_EQ(ReasonOf(memory_->Pack(request, nullptr)), "OTHER_DEVICE");
    Close({&far});
  }

  // Another opens it by its ticket, and sees the generations.
  ExportOptions to_read;
  EXPECT_EQ(ReasonOf(memory_->Export(**store, to_read).status()), "READ_ONLY");
  to_read.read_only = true;
  const auto ticket = memory_->Export(**store, to_read);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->kind, MemoryKind::kCuda);
  EXPECT_EQ(ticket->bytes, 2 * kSlotBytes);
  {
    CudaMemory::Options options;
    options.device_uuid = uuid;
    auto opener = CudaMemory::Create(host_.get(), options);
    ASSERT_TRUE(opener.ok()) << opener.status();
    auto imported = (*opener)->Import(*ticket, absl::Seconds(5));
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_EQ((*imported)->generation_slots(), 4);
    const uint64_t before = (*imported)->Generation(2);
    (*store)->AdvanceGeneration(2);
    EXPECT_EQ((*imported)->Generation(2), before + 1);
    // It was copied there last.
    std::string seen(1000, '\0');
    ASSERT_TRUE(
        (*opener)
            ->Read((*imported)->data(), absl::MakeSpan(&seen[0], seen.size()))
            .ok());
    EXPECT_EQ(seen, bytes.substr(0, 1000));
  }
  const auto usage = [&] { return agents_->Reports()[0].usage; };
  for (int i = 0; i < 500 && usage().store_bytes == 0; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(usage().store_bytes, 2 * kSlotBytes);
  EXPECT_EQ(usage().slots_bytes, 2 * kSlotBytes);
  // What is freed is given back, and the sums with it.
  *store = nullptr;
  for (int i = 0; i < 500 && usage().store_bytes != 0; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(usage().store_bytes, 0);
  EXPECT_EQ(usage().slots_bytes, 2 * kSlotBytes);

  store = memory_->Allocate(kSlotBytes, where);
  ASSERT_TRUE(store.ok()) << store.status();
  std::atomic<int> lost{0};
  agents_->OnLost([&](const std::string& gone) {
    EXPECT_EQ(gone, uuid);
    ++lost;
  });
  kill(AgentPid(trainer), SIGKILL);
  for (int i = 0; i < 500 && lost == 0; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(lost, 1);
  down.run_bytes = 1000;
  down.src = (*store)->data();
  EXPECT_EQ(ReasonOf(memory_->Copy({down}, CopyOptions(), nullptr)),
            "DEVICE_STORE_LOST");
  for (PackPiece& piece : lying)
    piece.copy.src = (*store)->data() + piece.offset;
  lying.resize(1);
  const std::vector<uint32_t> first = {0};
  FrameDigestRequest gone;
  gone.pieces = lying;
  gone.frames = first;
  EXPECT_EQ(ReasonOf(memory_->DigestFrames(gone).status()),
            "DEVICE_STORE_LOST");
  // Its generations are still there to be moved on.
  const uint64_t before = (*store)->Generation(1);
  EXPECT_EQ((*store)->AdvanceGeneration(1), before + 1);
  agents_->OnLost(nullptr);
  // And the next life has memory of its own.
  auto next = memory_->Allocate(kSlotBytes, where);
  ASSERT_TRUE(next.ok()) << next.status();
  *next = nullptr;
  *store = nullptr;
  Close({&region});
}

TEST_F(AgentMemoryTest, AnAgentThatDiesIsAskedAgainInItsNextLife) {
  Start();
  Trainer trainer;
  auto region = Open(trainer);
  const std::unique_ptr<Segment> arena = Arena(1 << 20);
  PackRequest request;
  request.bucket = arena->data();
  request.bucket_bytes = kBytes;
  const std::vector<PackPiece> pieces = {Piece(0, region->data(), kBytes, 1)};
  request.pieces = pieces;
  ASSERT_TRUE(memory_->Pack(request, nullptr).ok());
  kill(AgentPid(trainer), SIGKILL);
  // It may be found dead once; nothing is written by it then.
  absl::Status status = memory_->Pack(request, nullptr);
  if (!status.ok()) {
    EXPECT_EQ(ReasonOf(status), "DEVICE_AGENT_LOST");
    status = memory_->Pack(request, nullptr);
  }
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(memcmp(arena->data(), RandomBytes(kBytes, 5).data(), kBytes), 0);
  for (int i = 0; i < 500 && agents_->Reports()[0].restarts == 0; ++i)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(agents_->Reports()[0].restarts, 1);

  // A fault of the GPU costs its agent, and is told by name.
  gpu_sim::Plant("call=cudaLaunchKernel process=agent sticky=700");
  status = memory_->Pack(request, nullptr);
  EXPECT_TRUE(ReasonOf(status) == "DEVICE_FAULT" ||
              ReasonOf(status) == "DEVICE_AGENT_LOST")
      << status;
  gpu_sim::Plant("");
  EXPECT_TRUE(memory_->Pack(request, nullptr).ok());

  // With the agent gone, and the trainer too, nobody has the bytes.
  const pid_t agent = AgentPid(trainer);
  trainer.Kill();
  kill(agent, SIGKILL);
  status = memory_->Pack(request, nullptr);
  if (ReasonOf(status) == "DEVICE_AGENT_LOST")
    status = memory_->Pack(request, nullptr);
  EXPECT_EQ(ReasonOf(status), "SOURCE_MEMORY_LOST") << status;
}

TEST_F(AgentMemoryTest, WhatIsClosedMayBeFreed) {
  Start();
  Trainer trainer;
  auto region = Open(trainer);
  std::weak_ptr<const AgentMemory::Region> weak = region;
  EXPECT_EQ(ReasonOf(memory_->AwaitClosed({weak}, absl::Milliseconds(20))),
            "REGION_IN_USE");
  region = nullptr;
  ASSERT_TRUE(memory_->AwaitClosed({weak}, absl::Seconds(10)).ok());
  // A finding of the simulator otherwise: "freed that another has open".
  trainer.Free();
  EXPECT_EQ(ReasonOf(memory_->Open(trainer.handle()).status()),
            "ALLOCATION_FREED");
}

TEST_F(AgentMemoryTest, DevicesThatCannotServeAreNamed) {
  Start();
  DeviceHandle handle;
  handle.bytes = 1;
  handle.device_uuid = "GPU-of-another-machine";
  absl::Status status = memory_->Open(handle).status();
  EXPECT_EQ(ReasonOf(status), "DEVICE_NOT_VISIBLE");
  const auto devices = ListDevices();
  for (const DeviceInfo& device : *devices)
    EXPECT_TRUE(absl::StrContains(status.message(), device.uuid)) << status;
  handle.device_uuid.clear();
  EXPECT_EQ(ReasonOf(memory_->Open(handle).status()), "DEVICE_NOT_NAMED");
  // What is said of an allocation is looked at before it is believed.
  for (const char* reason :
       {"PAST_ALLOCATION", "PROBE_FAILED", "ALLOCATION_FREED"}) {
    Trainer liar;
    DeviceHandle wrong = liar.handle();
    if (reason[1] == 'A') wrong.bytes *= 2;
    if (reason[1] == 'R') wrong.nonce[3] ^= 1;
    if (reason[1] == 'L') wrong.ipc[5] ^= 1;
    EXPECT_EQ(ReasonOf(memory_->Open(wrong).status()), reason);
    Close({});
  }
  memory_ = nullptr;
  agents_ = nullptr;
  Start();
  handle.bytes = 0;
  EXPECT_EQ(ReasonOf(memory_->Open(handle).status()), "HANDLE_MALFORMED");

  // No room for the slots: this GPU fails, by name, and may be tried again.
  Trainer trainer;
  gpu_sim::Plant("call=cudaMalloc process=agent error=2 after=2 count=0");
  status = memory_->Open(trainer.handle()).status();
  EXPECT_EQ(ReasonOf(status), "NO_MEMORY_FOR_ARENA") << status;
  ASSERT_EQ(agents_->Reports().size(), 1u);
  EXPECT_EQ(agents_->Reports()[0].state, DeviceReport::State::kFailed);
  gpu_sim::Plant("");
  EXPECT_TRUE(memory_->Open(trainer.handle()).ok());
  EXPECT_EQ(agents_->Reports()[0].state, DeviceReport::State::kReady);
  Close({});

  // A node that serves some of its GPUs only.
  options_.device_uuids = {(*devices)[1].uuid};
  memory_ = nullptr;
  agents_ = nullptr;
  Start();
  EXPECT_EQ(ReasonOf(memory_->Open(trainer.handle()).status()),
            "DEVICE_NOT_VISIBLE");
  options_.device_uuids = {"GPU-x"};
  EXPECT_EQ(ReasonOf(DeviceAgents::Create(options_).status()),
            "DEVICE_NOT_VISIBLE");
}

TEST_F(AgentMemoryTest, WorkersCannotMapTheStoreForWriting) {
  Start();
  const std::unique_ptr<Segment> arena = Arena(1 << 20);
  ExportOptions options;
  EXPECT_EQ(ReasonOf(memory_->Export(*arena, options).status()), "READ_ONLY");
  options.read_only = true;
  const auto ticket = memory_->Export(*arena, options);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const auto fd = RedeemFd(ticket->address, ticket->token, absl::Seconds(5));
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0),
      MAP_FAILED);
}

}  // namespace
}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

int main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--trainer")
      return weightsync::transport::cuda::Trainer::Play(atoi(argv[i + 1]));
    if (absl::StartsWith(word, "--device_agent="))
      return weightsync::transport::cuda::RunDeviceAgent(
          atoi(word.c_str() + strlen("--device_agent=")));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
