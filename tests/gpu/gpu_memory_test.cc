// A real daemon with --memory=cuda, its device agents, and clients with their
// tensors on GPUs, over the simulator.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cc/rpc.h"
#include "client/cc/worker.h"
#include "grpcpp/grpcpp.h"
#include "proto/status.h"
#include "tests/e2e/cluster.h"
#include "tests/gpu/gpu_cluster.h"
#include "transport/cuda/sim_control.h"
#include "weightsync/v1/admin.grpc.pb.h"

namespace weightsync {
namespace e2e {
namespace {

using GpuMemoryTest = GpuClusterTest;

// tests/gpu/sim/protocol.h: kContextBytes.
constexpr int64_t kSimulatedContextBytes = 8 << 20;

TEST_F(GpuMemoryTest, TensorsGoFromGpuToGpu) {
  StartNode("a", GpuFlags());
  StartNode("b", {"--bucket_bytes=16384"});  // its GPUs are its workers' own
  GpuTrainer trainer(&cluster_, "a", 2, /*devices=*/2);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  GpuReplica near(&cluster_, "a", "near", 2, 1);
  GpuReplica far(&cluster_, "b", "far", 1, 3);
  for (const int version : {1, 2, 3}) {
    v1::UpdateOptions options;
    options.set_verify_source(version == 2);
    if (version == 3) {
      options.set_update_mode(v1::UPDATE_MODE_STREAM);
      options.set_publish_mode(v1::PUBLISH_MODE_IN_PLACE);
      options.set_allow_no_recovery(true);
    }
    const auto published = trainer.Publish(version, options);
    ASSERT_TRUE(published.ok()) << version << ": " << published.status();
    EXPECT_EQ(published->state(), v1::Version::STATE_ACTIVE);
    EXPECT_TRUE(near.Holds(version));
    EXPECT_TRUE(far.Holds(version));
  }
  // What lies on the GPUs is what the trainer had, and a flipped bit is seen.
  for (const char* name : {"near", "far"}) {
    grpc::ClientContext context;
    v1::VerifyReplicaRequest request;
    request.set_name(absl::StrCat("models/", kModel, "/replicas/", name));
    v1::VerifyReplicaResponse response;
    ASSERT_TRUE(Admin("a")->VerifyReplica(&context, request, &response).ok());
    EXPECT_TRUE(response.equal()) << response.ShortDebugString();
  }
  near.tensors(1)->FlipBit();
  grpc::ClientContext context;
  v1::VerifyReplicaRequest request;
  request.set_name(absl::StrCat("models/", kModel, "/replicas/near"));
  v1::VerifyReplicaResponse response;
  ASSERT_TRUE(Admin("a")->VerifyReplica(&context, request, &response).ok());
  EXPECT_FALSE(response.equal());

  // Two GPUs are in use, and each has exactly its slots.
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 1).slot_bytes() == 2 * 16384; }));
  for (const size_t index : {0, 1}) {
    const v1::GpuUse use = Gpu("a", index);
    EXPECT_TRUE(absl::StartsWith(use.device_uuid(), "GPU-"));
    EXPECT_EQ(use.state(), v1::GpuUse::STATE_READY);
    EXPECT_EQ(use.slot_count(), 2);
    EXPECT_EQ(use.slot_bytes(), use.slot_count() * 16384);
    // What the simulated driver takes for a context, and tables of launches,
    // no more than some MB; nothing of NCCL.
    EXPECT_GE(use.context_bytes(), kSimulatedContextBytes);
    EXPECT_LT(use.context_bytes(), kSimulatedContextBytes + (56 << 20));
    EXPECT_EQ(use.nccl_bytes(), 0);
    EXPECT_EQ(use.device_store_bytes(), 0);
    EXPECT_GT(use.total_bytes(), use.free_bytes());
    EXPECT_GT(use.free_bytes(), 0);
  }
  const auto node = cluster_.GetNode("a");
  ASSERT_TRUE(node.ok());
  EXPECT_EQ(node->memory().gpus_size(), 2);
}

// A machine whose driver came without its management library.
TEST_F(GpuMemoryTest, WithoutNvmlNobodySaysWhatTheContextTakes) {
  gpu_sim::Plant("call=nvmlInit_v2 error=12 count=0");
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 0);
  ASSERT_TRUE(trainer.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).context_bytes() > 0; }));
  EXPECT_LT(Gpu("a", 0).context_bytes(), kSimulatedContextBytes);
  EXPECT_NE(cluster_.process("a")->Log().find("NVML") +
                cluster_.process("a")->Log().find("nvmlInit_v2"),
            2 * std::string::npos);
}

// To pin memory is to hold the GPU up: it is done when an arena is new, at both
// of its ends, and not again for each version.
TEST_F(GpuMemoryTest, ArenasArePinnedOnce) {
  StartNode("a", GpuFlags());
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=cudaHostRegister note=1 count=0");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  // The store has places for two versions.
  for (const int version : {1, 2}) ASSERT_TRUE(trainer.Publish(version).ok());
  const std::string first = gpu_sim::TakeNotes();
  // By the agent, and by the worker.
  EXPECT_GE(std::count(first.begin(), first.end(), '\n'), 2) << first;
  for (const int version : {3, 4, 5}) {
    ASSERT_TRUE(trainer.Publish(version).ok());
    EXPECT_TRUE(replica.Holds(version));
  }
  EXPECT_EQ(gpu_sim::TakeNotes(), "");
  gpu_sim::Plant("");
}

// "0x7f…" in a process: which file is mapped there. 0: none is.
uint64_t FileAt(pid_t process, const std::string& address) {
  const uint64_t at = std::stoull(address, nullptr, 16);
  std::ifstream maps(absl::StrCat("/proc/", process, "/maps"));
  std::string line;
  while (std::getline(maps, line)) {
    uint64_t begin = 0, end = 0, file = 0;
    if (sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64,
               &begin, &end, &file) == 3 &&
        at >= begin && at < end)
      return file;
  }
  return 0;
}

// Notes of a call, with the process that made each (note=2).
struct Note {
  pid_t process = 0;
  std::string what;  // the first word of what it was given
};
std::vector<Note> NotesOf(const std::string& call) {
  std::vector<Note> notes;
  std::istringstream lines(gpu_sim::Notes());
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name, by;
    Note note;
    if (words >> name >> by >> note.process >> note.what && name == call)
      notes.push_back(note);
  }
  return notes;
}

// Whoever pins the same arena twice, perhaps at two addresses, holds its GPU up
// twice.
TEST_F(GpuMemoryTest, EachProcessPinsAnArenaOnce) {
  StartNode("a", GpuFlags());
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=cudaHostRegister note=2 count=0");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  for (const int version : {1, 2, 3, 4, 5}) {
    ASSERT_TRUE(trainer.Publish(version).ok());
    EXPECT_TRUE(replica.Holds(version));
  }
  const pid_t agent =
      ChildOf(cluster_.process("a")->pid(), "weightsync_device_agent");
  ASSERT_NE(agent, 0);
  // By process, and by the file that an arena is.
  std::map<pid_t, std::map<uint64_t, int>> pinned;
  for (const Note& note : NotesOf("cudaHostRegister")) {
    const uint64_t file = FileAt(note.process, note.what);
    // A worker's own memory is none of the daemon's arenas.
    if (file != 0) ++pinned[note.process][file];
  }
  EXPECT_EQ(pinned.size(), 2u) << gpu_sim::Notes();
  // The store has places for two versions.
  EXPECT_FALSE(pinned[agent].empty()) << gpu_sim::Notes();
  EXPECT_FALSE(pinned[getpid()].empty()) << gpu_sim::Notes();
  for (const auto& [process, files] : pinned) {
    for (const auto& [file, times] : files)
      EXPECT_EQ(times, 1) << process << ": " << file << " in\n"
                          << gpu_sim::Notes();
  }
  // A worker pins nothing but what the agent has, too.
  for (const auto& [file, times] : pinned[getpid()])
    EXPECT_EQ(pinned[agent].count(file), 1u) << file;
  gpu_sim::TakeNotes();
}

// To ask for a handle takes a lock of the driver. A trainer's allocation has
// one, and so have its probe and each arena of the agent, for all updates.
TEST_F(GpuMemoryTest, AHandleIsMadeOncePerAllocation) {
  std::vector<std::string> flags = GpuFlags();
  flags.push_back("--store=device");
  StartNode("a", flags);
  gpu_sim::TakeNotes();
  gpu_sim::Plant("call=cudaIpcGetMemHandle note=2 count=0");
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 0);
  for (const int version : {1, 2}) ASSERT_TRUE(trainer.Publish(version).ok());
  const size_t first = NotesOf("cudaIpcGetMemHandle").size();
  for (const int version : {3, 4, 5}) {
    ASSERT_TRUE(trainer.Publish(version).ok());
    EXPECT_TRUE(replica.Holds(version));
  }
  const pid_t agent =
      ChildOf(cluster_.process("a")->pid(), "weightsync_device_agent");
  std::map<pid_t, std::map<std::string, int>> made;
  for (const Note& note : NotesOf("cudaIpcGetMemHandle"))
    ++made[note.process][note.what];
  for (const auto& [process, allocations] : made) {
    for (const auto& [allocation, times] : allocations)
      EXPECT_EQ(times, 1) << process << ": " << allocation << " in\n"
                          << gpu_sim::Notes();
  }
  // The trainer's: the allocation and the probe. The agent's: at least its
  // probe, its slots and a version's arena.
  EXPECT_EQ(made.size(), 2u) << gpu_sim::Notes();
  EXPECT_EQ(made[getpid()].size(), 2u) << gpu_sim::Notes();
  EXPECT_GE(made[agent].size(), 4u) << gpu_sim::Notes();
  // Arenas are used again: later updates make none.
  EXPECT_EQ(NotesOf("cudaIpcGetMemHandle").size(), first) << gpu_sim::Notes();
  gpu_sim::TakeNotes();
}

TEST_F(GpuMemoryTest, ADeadAgentCostsOnePublishAtMost) {
  StartNode("a", GpuFlags());
  GpuTrainer trainer(&cluster_, "a", 1);
  ASSERT_TRUE(trainer.Register().ok());
  GpuReplica replica(&cluster_, "a", "one", 1, 1);
  ASSERT_TRUE(trainer.Publish(1).ok());
  EXPECT_TRUE(replica.Holds(1));

  // Killed while nothing runs: nobody notices.
  const pid_t daemon = cluster_.process("a")->pid();
  const pid_t agent = ChildOf(daemon, "weightsync_device_agent");
  ASSERT_NE(agent, 0);
  ASSERT_EQ(kill(agent, SIGKILL), 0);
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).restart_count() == 1; }));
  auto published = trainer.Publish(2);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(2));

  // A fault of the GPU in the middle: the publish fails by name, nothing
  // changes in the replica, and others are served.
  gpu_sim::Plant("call=cudaLaunchKernel process=node sticky=700");
  published = trainer.Publish(3);
  EXPECT_FALSE(published.ok());
  const std::string reason = ErrorReason(published.status());
  EXPECT_TRUE(reason == "DEVICE_FAULT" || reason == "DEVICE_AGENT_LOST")
      << published.status();
  EXPECT_TRUE(replica.Holds(2));
  gpu_sim::Plant("");
  EXPECT_TRUE(cluster_.process("a")->Running());
  published = trainer.Publish(4);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(4));

  // One that hangs is killed at its deadline; tensors in host memory go their
  // way meanwhile.
  TestTrainer other(&cluster_, "a", 1);
  TestReplica others(&cluster_, "a", "other");
  ASSERT_TRUE(other.Publish(1).ok());
  gpu_sim::Plant("call=cudaLaunchKernel process=node stall=1");
  absl::Status stalled;
  std::thread stuck([&] { stalled = trainer.Publish(5).status(); });
  for (const char value : {2, 3}) EXPECT_TRUE(other.Publish(value).ok());
  EXPECT_TRUE(others.WaitServes(3));
  stuck.join();
  EXPECT_TRUE(ErrorReason(stalled) == "DEVICE_AGENT_HUNG" ||
              ErrorReason(stalled) == "DEVICE_STALLED" ||
              ErrorReason(stalled) == "DEVICE_AGENT_LOST")
      << stalled;
  gpu_sim::Plant("");
  EXPECT_TRUE(replica.Holds(4));
  published = trainer.Publish(6);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(replica.Holds(6));
}

TEST_F(GpuMemoryTest, WhatATrainerCannotExportIsNamed) {
  StartNode("a", GpuFlags());
  {
    // As PyTorch's expandable segments are.
    gpu_sim::Plant("call=cudaMalloc unexportable=1");
    GpuTrainer trainer(&cluster_, "a", 1);
    gpu_sim::Plant("");
    const absl::Status status = trainer.Register();
    EXPECT_EQ(ErrorReason(status), "NOT_EXPORTABLE");
    EXPECT_TRUE(absl::StrContains(status.message(), "expandable_segments"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "embed.weight"));
    // With other memory the same trainer goes on.
    trainer.NewTensors(0);
    EXPECT_TRUE(trainer.Register().ok());
  }
  {
    GpuTrainer trainer(&cluster_, "a", 1);
    std::vector<client::Tensor> tensors = trainer.tensors(0)->tensors();
    // Not on a GPU at all, and beyond the end of what is.
    std::vector<char> host(1 << 20);
    tensors[0].data = host.data();
    EXPECT_EQ(ErrorReason(trainer.trainer(0)->RegisterShards(tensors).status()),
              "NOT_DEVICE_MEMORY");
    tensors = trainer.tensors(0)->tensors();
    tensors[0].shape[0] = 100000;
    EXPECT_EQ(ErrorReason(trainer.trainer(0)->RegisterShards(tensors).status()),
              "PAST_ALLOCATION");
    client::WorkerOptions options;
    options.address = cluster_.address("a");
    options.model = kModel;
    options.replica = "bad";
    options.incarnation = client::RandomId();
    tensors = trainer.tensors(0)->tensors();
    tensors[1].data = host.data();
    EXPECT_EQ(ErrorReason(client::Worker::Start(options, tensors).status()),
              "NOT_DEVICE_MEMORY");
  }
  {
    // Other tensors are registered: what was before may be freed at once, and
    // the simulator would say so if somebody still had it open.
    GpuTrainer trainer(&cluster_, "a", 1);
    ASSERT_TRUE(trainer.Register().ok());
    GpuReplica replica(&cluster_, "a", "one", 1, 1);
    ASSERT_TRUE(trainer.Publish(1).ok());
    trainer.NewTensors(0);
    ASSERT_TRUE(trainer.Register().ok());
    trainer.FreeBefore();
    ASSERT_TRUE(trainer.Publish(2).ok());
    EXPECT_TRUE(replica.Holds(2));
    // Freed under a registration: found before a byte is read.
    trainer.tensors(0)->Free();
    EXPECT_TRUE(absl::StrContains(gpu_sim::TakeFindings(), "freed"));
    const auto published =
        trainer.trainer(0)->Publish(client::PublishOptions());
    EXPECT_EQ(ErrorReason(published.status()), "ALLOCATION_FREED")
        << published.status();
    EXPECT_TRUE(replica.Holds(2));
  }
}

TEST_F(GpuMemoryTest, ADaemonWithoutGpusSaysSo) {
  StartNode("a", {});
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status status = trainer.Register();
  EXPECT_EQ(ErrorReason(status), "MEMORY_KIND_DISABLED") << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "--memory=cuda"));
  EXPECT_FALSE(cluster_.StartNode(
      "b", {"--memory=cuda", "--device_uuid=GPU-of-another-machine"}));
  EXPECT_TRUE(
      absl::StrContains(cluster_.process("b")->Log(), "DEVICE_NOT_VISIBLE"));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
