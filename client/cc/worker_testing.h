#ifndef WEIGHTSYNC_CLIENT_CC_WORKER_TESTING_H_
#define WEIGHTSYNC_CLIENT_CC_WORKER_TESTING_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cc/client_memory.h"
#include "client/cc/fake_daemon.h"
#include "client/cc/rpc.h"
#include "client/cc/worker.h"
#include "transport/host/fd_socket.h"

namespace weightsync {
namespace client {

inline constexpr absl::Duration kSoon = absl::Seconds(20);

// A worker with one tensor of 1000 bytes, and a store with two slots of 1000
// bytes of which either can be its next update.
class WorkerTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = 1000;

  WorkerTest()
      : pool_(1),
        directory_(MakeDirectory()),
        fds_(*transport::FdServer::Start(directory_ + "/fd",
                                         transport::FdServer::Options())),
        memory_(&pool_, fds_.get(), transport::HostMemory::Options()) {
    transport::AllocateOptions options;
    options.name = "store";
    options.generation_slots = 2;
    store_ = *memory_.Allocate(2 * kBytes, options);
    memset(store_->data(), 1, kBytes);
    memset(store_->data() + kBytes, 2, kBytes);
    live_.assign(kBytes, 0);
  }

  static std::string MakeDirectory() {
    std::string directory = "/tmp/worker_test.XXXXXX";
    EXPECT_NE(mkdtemp(&directory[0]), nullptr);
    return directory;
  }

  ~WorkerTest() override {
    worker_ = nullptr;
    fds_ = nullptr;
    rmdir(directory_.c_str());
  }

  void StartWorker() {
    options_.address = daemon_.address();
    options_.model = "m";
    options_.replica = "r";
    options_.incarnation = "i";
    options_.max_backoff = absl::Milliseconds(100);
    Tensor tensor;
    tensor.name = "w";
    tensor.dtype = v1::DTYPE_U8;
    tensor.shape = {kBytes};
    tensor.data = live_.data();
    auto worker = Worker::Start(options_, {tensor});
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }

  v1::WorkerCommand Offer() {
    transport::ExportOptions options;
    options.read_only = true;
    options.pid = getpid();
    const auto ticket = memory_.Export(*store_, options);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    v1::WorkerCommand command;
    v1::ArenaOffer* offer = command.mutable_arena();
    offer->set_arena_id("store-1");
    offer->set_size_bytes(store_->bytes() + 4096);
    offer->set_data_offset_bytes(4096);
    offer->set_descriptor_socket(ticket->address);
    offer->set_token(ticket->token);
    offer->set_read_only(true);
    return command;
  }

  static v1::WorkerCommand Plan() {
    v1::WorkerCommand command;
    v1::CopyPlan* plan = command.mutable_copy_plan();
    plan->set_layout_id("layout");
    v1::BucketCopies* bucket = plan->add_buckets();
    v1::TensorCopy* copy = bucket->add_copies();
    copy->set_run_bytes(kBytes);
    return command;
  }

  // Update u1 lies in slot 0, u2 in slot 1.
  v1::WorkerCommand Apply(int update) {
    v1::WorkerCommand command;
    v1::ApplyUpdate* apply = command.mutable_apply();
    apply->set_command_id(absl::StrCat("c", ++commands_));
    apply->set_update_id(absl::StrCat("u", update));
    apply->set_version(update);
    apply->set_layout_id("layout");
    apply->set_commit_term(1);
    apply->mutable_timeout()->set_seconds(20);
    v1::SlotLocation* slot = apply->add_buckets()->mutable_slot();
    slot->set_arena_id("store-1");
    slot->set_offset_bytes((update - 1) * kBytes);
    slot->set_size_bytes(kBytes);
    slot->set_generation_slot(update - 1);
    slot->set_generation(store_->Generation(update - 1));
    return command;
  }

  // Registered, with arena and plan.
  std::shared_ptr<FakeWorkerStream> Accept(
      v1::RegisterWorker* registration = nullptr) {
    auto stream = daemon_.AcceptWorker(registration);
    if (stream == nullptr) return nullptr;
    stream->Send(Offer());
    stream->Send(Plan());
    return stream;
  }

  // The answer to an apply, with or without WorkerWriting before it.
  static v1::WorkerApplied Answer(FakeWorkerStream* stream,
                                  bool writing_expected) {
    v1::WorkerReport report;
    if (writing_expected) {
      EXPECT_TRUE(stream->Receive(&report));
      EXPECT_TRUE(report.has_writing()) << report.DebugString();
    }
    EXPECT_TRUE(stream->Receive(&report));
    EXPECT_TRUE(report.has_applied()) << report.DebugString();
    return report.applied();
  }

  // Update `update` streamed: the beginning, its one bucket, its end.
  static v1::WorkerCommand Begin(int update) {
    v1::WorkerCommand command;
    v1::ApplyUpdate* apply = command.mutable_apply();
    apply->set_command_id(absl::StrCat("stream/u", update));
    apply->set_update_id(absl::StrCat("u", update));
    apply->set_version(update);
    apply->set_layout_id("layout");
    apply->set_stream(true);
    apply->mutable_timeout()->set_seconds(20);
    return command;
  }
  v1::WorkerCommand Bucket(int update) {
    v1::WorkerCommand command;
    v1::StreamBucket* bucket = command.mutable_stream_bucket();
    bucket->set_update_id(absl::StrCat("u", update));
    bucket->set_command_id(absl::StrCat("stream/u", update));
    *bucket->mutable_location()->mutable_slot() =
        Apply(update).apply().buckets(0).slot();
    return command;
  }
  static v1::WorkerCommand End(int update, bool complete) {
    v1::WorkerCommand command;
    v1::EndStream* end = command.mutable_end_stream();
    end->set_update_id(absl::StrCat("u", update));
    end->set_command_id("commit");
    end->set_complete(complete);
    return command;
  }
  static v1::StreamBucketTaken Taken(FakeWorkerStream* stream) {
    v1::WorkerReport report;
    EXPECT_TRUE(stream->Receive(&report));
    EXPECT_TRUE(report.has_stream_bucket_taken()) << report.DebugString();
    return report.stream_bucket_taken();
  }

  bool LiveIs(char value) const {
    return live_ == std::vector<char>(kBytes, value);
  }

  transport::CopyPool pool_;
  const std::string directory_;
  std::unique_ptr<transport::FdServer> fds_;
  transport::HostMemory memory_;
  std::unique_ptr<transport::Segment> store_;
  std::vector<char> live_;
  FakeDaemon daemon_;
  WorkerOptions options_;
  std::unique_ptr<Worker> worker_;
  int commands_ = 0;
};

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_WORKER_TESTING_H_
