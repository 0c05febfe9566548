// The executor's one promise: what is decided is on the disk before anybody
// hears of it, and a disk that fails ends the process before that.

#include "daemon/service/coordinator_loop.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "daemon/coordinator/journal_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weightsync/internal/v1/journal.pb.h"

namespace weightsync {
namespace daemon {
namespace {

using internal::v1::JournalRecord;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kModel[] = "models/m";
constexpr size_t kFrameHead = 8;  // of the journal's format

std::string NameOf(const google::protobuf::Message& message, int number) {
  const auto* field = message.GetDescriptor()->FindFieldByNumber(number);
  return field == nullptr ? "none" : field->name();
}

// The machine's files, but a disk that does not take one kind of record.
class FailingFiles : public JournalFiles {
 public:
  explicit FailingFiles(std::string record) : record_(std::move(record)) {}
  int syncs() const { return syncs_; }

  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset,
                                   int64_t size) override {
    return SystemJournalFiles()->Read(path, offset, size);
  }
  absl::StatusOr<std::unique_ptr<JournalFile>> Create(
      const std::string& path) override {
    auto file = SystemJournalFiles()->Create(path);
    if (!file.ok()) return file.status();
    return std::unique_ptr<JournalFile>(
        new File(record_, &syncs_, *std::move(file)));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return SystemJournalFiles()->Rename(from, to);
  }
  absl::Status SyncDirectory(const std::string& dir) override {
    return SystemJournalFiles()->SyncDirectory(dir);
  }
  absl::StatusOr<std::shared_ptr<void>> Lock(const std::string& path) override {
    return SystemJournalFiles()->Lock(path);
  }

 private:
  class File : public JournalFile {
   public:
    File(std::string failing, std::atomic<int>* syncs,
         std::unique_ptr<JournalFile> file)
        : failing_(std::move(failing)), syncs_(syncs), file_(std::move(file)) {}
    absl::Status Append(absl::string_view data) override {
      // Of each file the first bytes are its magic.
      absl::string_view frames = data;
      if (absl::StartsWith(frames, "WSJRNL")) frames.remove_prefix(8);
      while (frames.size() > kFrameHead) {
        uint32_t length = 0;
        for (int i = 3; i >= 0; --i) {
          length = length << 8 | static_cast<unsigned char>(frames[i]);
        }
        length &= 0x7fffffff;  // the top bit: of one batch with that before
        JournalRecord record;
        EXPECT_TRUE(record.ParseFromString(
            std::string(frames.substr(kFrameHead, length))));
        broken_ = broken_ || NameOf(record, record.record_case()) == failing_;
        frames.remove_prefix(kFrameHead + length);
      }
      return file_->Append(data);
    }
    absl::Status Sync() override {
      ++*syncs_;
      return broken_ ? absl::InternalError("the disk is broken")
                     : file_->Sync();
    }

   private:
    const std::string failing_;
    std::atomic<int>* const syncs_;
    const std::unique_ptr<JournalFile> file_;
    bool broken_ = false;
  };

  const std::string record_;
  std::atomic<int> syncs_{0};
};

// A node with one rank and one replica, which does what it is told, at once,
// and says on stderr what it was told.
class Node {
 public:
  explicit Node(CoordinatorLoop* loop) : loop_(loop) {
    CoordinatorLoop::NodePeer peer;
    peer.send = [this](v1::NodeCommand command) { Told(command); };
    peer.close = [](const absl::Status& why) {
      std::fprintf(stderr, "CLOSED %s\n", why.ToString().c_str());
    };
    stream_ = loop_->Connected(std::move(peer));
  }

  void Join() {
    v1::NodeReport report;
    v1::Hello* hello = report.mutable_hello();
    hello->set_node("n0");
    hello->set_incarnation("n0-1");
    hello->set_protocol_version(1);
    hello->set_data_address("n0:1");
    Say(report);
    report.mutable_claim_rank()->set_model(kModel);
    report.mutable_claim_rank()->set_world_size(1);
    report.mutable_claim_rank()->set_session("s");
    Say(report);
    v1::RankShards* shards = report.mutable_rank_shards();
    shards->set_model(kModel);
    shards->set_session("s");
    v1::Parameter* parameter = shards->add_parameters();
    parameter->set_name("w");
    parameter->set_dtype(v1::DTYPE_BF16);
    v1::Box* box = shards->add_shards()->mutable_box();
    for (int extent : {4, 8}) {
      parameter->add_shape(extent);
      box->add_offset(0);
      box->add_extent(extent);
    }
    Say(report);
    v1::RegisterReplica* replica =
        report.mutable_replica_joined()->mutable_registration();
    replica->set_model(kModel);
    replica->set_replica("r");
    replica->set_worker_count(1);
    replica->set_incarnation("i");
    Say(report);
    report.mutable_worker_joined()->set_ready(true);
    v1::RegisterWorker* worker =
        report.mutable_worker_joined()->mutable_registration();
    worker->set_model(kModel);
    worker->set_replica("r");
    worker->set_worker_count(1);
    worker->set_incarnation("i");
    v1::WantedTensor* tensor = worker->add_tensors();
    tensor->set_name("w");
    tensor->set_dtype(v1::DTYPE_BF16);
    tensor->add_shape(4);
    tensor->add_shape(8);
    Say(report);
    report.mutable_hello_done();
    Say(report);
  }
  void Publish() {
    v1::NodeReport report;
    v1::PublishArrived* arrived = report.mutable_publish_arrived();
    arrived->set_model(kModel);
    arrived->set_session("s");
    Say(report);
  }
  // Up to the end of the update; false when that does not come.
  bool WaitEnd() {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&ended_), absl::Seconds(60));
  }

 private:
  void Say(v1::NodeReport report) {
    report.set_correlation_id(++correlation_);
    loop_->Report(stream_, std::move(report));
  }

  void Told(const v1::NodeCommand& command) {
    const std::string name =
        command.reply().has_publish_opened()
            ? "publish_opened"
            : NameOf(command, static_cast<int>(command.command_case()));
    std::fprintf(stderr, "TOLD %s\n", name.c_str());
    v1::NodeReport report;
    switch (command.command_case()) {
      case v1::NodeCommand::kReply: {
        if (!command.reply().has_publish_opened()) return;
        v1::RankSnapshotted* copied = report.mutable_rank_snapshotted();
        copied->set_model(kModel);
        copied->set_update_id(command.reply().publish_opened().update_id());
        return Say(report);
      }
      case v1::NodeCommand::kPrepareUpdate: {
        v1::UpdatePrepared* prepared = report.mutable_update_prepared();
        prepared->set_model(kModel);
        prepared->set_update_id(command.prepare_update().update_id());
        *prepared->mutable_epoch() = command.prepare_update().epoch();
        return Say(report);
      }
      case v1::NodeCommand::kMoveUpdate: {
        v1::UpdateVerified* verified = report.mutable_update_verified();
        verified->set_model(kModel);
        verified->set_update_id(command.move_update().update_id());
        *verified->mutable_epoch() = command.move_update().epoch();
        return Say(report);
      }
      case v1::NodeCommand::kPauseReplica: {
        v1::ReplicaPausedReport* paused = report.mutable_replica_paused();
        paused->set_model(kModel);
        paused->set_replica("r");
        paused->set_incarnation("i");
        paused->set_command_id(command.pause_replica().pause().command_id());
        return Say(report);
      }
      case v1::NodeCommand::kApplyWorker: {
        v1::WorkerAppliedReport* applied = report.mutable_worker_applied();
        applied->set_model(kModel);
        applied->set_replica("r");
        applied->set_incarnation("i");
        applied->set_update_id(command.apply_worker().update_id());
        applied->set_command_id(command.apply_worker().command_id());
        return Say(report);
      }
      case v1::NodeCommand::kResumeReplica: {
        v1::ReplicaResumedReport* resumed = report.mutable_replica_resumed();
        resumed->set_model(kModel);
        resumed->set_replica("r");
        resumed->set_incarnation("i");
        resumed->set_command_id(command.resume_replica().resume().command_id());
        return Say(report);
      }
      case v1::NodeCommand::kEndUpdate: {
        absl::MutexLock lock(&mutex_);
        ended_ = command.end_update().committed();
        return;
      }
      default:
        return;
    }
  }

  CoordinatorLoop* const loop_;
  std::string stream_;
  int64_t correlation_ = 0;  // Join and Publish, then the loop
  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

class CoordinatorLoopTest : public ::testing::Test {
 protected:
  CoordinatorLoopTest() {
    // Threads run: the child begins the test anew.
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    char path[] = "/tmp/wsXXXXXX";
    EXPECT_NE(mkdtemp(path), nullptr);
    directory_ = path;
  }
  ~CoordinatorLoopTest() override { std::filesystem::remove_all(directory_); }

  // One update, on a disk that does not take `failing`.
  bool Update(const std::string& failing) {
    FailingFiles files(failing);
    CoordinatorOptions options;
    options.coordinator_node = "n0";
    int ids = 0;
    options.random_id = [&ids] { return absl::StrCat("id", ++ids); };
    auto loop = CoordinatorLoop::Start(options, directory_, nullptr, &files);
    EXPECT_TRUE(loop.ok()) << loop.status();
    if (!loop.ok()) return false;
    Node node(loop->get());
    node.Join();
    node.Publish();
    const bool ended = node.WaitEnd();
    (*loop)->Stop();
    return ended;
  }

  std::string directory_;
};

using CoordinatorLoopDeathTest = CoordinatorLoopTest;

constexpr char kBroken[] = "the journal cannot be written: ";

// The others die for no other reason.
TEST_F(CoordinatorLoopTest, OnADiskThatWorksTheUpdateIsCarriedOut) {
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(Update("nothing"));
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      AllOf(HasSubstr("TOLD publish_opened"), HasSubstr("TOLD pause_replica"),
            HasSubstr("TOLD apply_worker"), HasSubstr("TOLD resume_replica"),
            HasSubstr("TOLD end_update")));
}

// Each sync takes milliseconds, in which the loop does nothing else.
TEST_F(CoordinatorLoopTest, RanksThatWaitAreToldAfterOneSync) {
  constexpr int kRanks = 64;
  FailingFiles files("nothing");
  CoordinatorOptions options;
  options.coordinator_node = "n0";
  int ids = 0;
  options.random_id = [&ids] { return absl::StrCat("id", ++ids); };
  auto loop = CoordinatorLoop::Start(options, directory_, nullptr, &files);
  ASSERT_TRUE(loop.ok()) << loop.status();
  std::atomic<int> opened{0};
  CoordinatorLoop::NodePeer peer;
  peer.send = [&opened](v1::NodeCommand command) {
    opened += command.reply().has_publish_opened();
  };
  peer.close = [](const absl::Status& why) { ADD_FAILURE() << why; };
  const std::string stream = (*loop)->Connected(std::move(peer));
  int64_t correlation = 0;
  const auto say = [&](v1::NodeReport report) {
    report.set_correlation_id(++correlation);
    (*loop)->Report(stream, std::move(report));
  };
  v1::NodeReport report;
  report.mutable_hello()->set_node("n0");
  report.mutable_hello()->set_incarnation("n0-1");
  report.mutable_hello()->set_protocol_version(1);
  report.mutable_hello()->set_data_address("n0:1");
  say(report);
  const auto shards_of = [](int rank) {
    v1::NodeReport report;
    v1::RankShards* shards = report.mutable_rank_shards();
    shards->set_model(kModel);
    shards->set_rank(rank);
    shards->set_session(absl::StrCat("s", rank));
    v1::Parameter* parameter = shards->add_parameters();
    parameter->set_name("w");
    parameter->set_dtype(v1::DTYPE_BF16);
    parameter->add_shape(kRanks);
    shards->add_shards()->mutable_box()->add_offset(rank);
    shards->mutable_shards(0)->mutable_box()->add_extent(1);
    return report;
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    v1::ClaimRank* claim = report.mutable_claim_rank();
    claim->set_model(kModel);
    claim->set_rank(rank);
    claim->set_world_size(kRanks);
    claim->set_session(absl::StrCat("s", rank));
    say(report);
    // The last one makes them wait.
    if (rank == kRanks - 1) continue;
    say(shards_of(rank));
    v1::PublishArrived* arrived = report.mutable_publish_arrived();
    arrived->set_model(kModel);
    arrived->set_rank(rank);
    arrived->set_session(absl::StrCat("s", rank));
    arrived->set_request_id(absl::StrCat("q", rank));
    say(report);
  }
  const auto settle = [&] {
    absl::Notification done;
    (*loop)->Ask([&done](const Coordinator&, absl::Time) { done.Notify(); });
    done.WaitForNotification();
  };
  settle();
  EXPECT_EQ(opened, 0);
  const int before = files.syncs();
  say(shards_of(kRanks - 1));
  settle();
  EXPECT_EQ(opened, kRanks - 1);
  EXPECT_EQ(files.syncs(), before + 1);
  (*loop)->Stop();
}

TEST_F(CoordinatorLoopDeathTest, NobodyHearsOfATermThatIsNotOnTheDisk) {
  EXPECT_DEATH(Update("started"),
               AllOf(HasSubstr(kBroken), Not(HasSubstr("TOLD"))));
}

TEST_F(CoordinatorLoopDeathTest, NobodyHearsOfAnUpdateThatIsNotOnTheDisk) {
  EXPECT_DEATH(Update("update_opened"),
               AllOf(HasSubstr("TOLD welcome"), HasSubstr(kBroken),
                     Not(HasSubstr("TOLD publish_opened")),
                     Not(HasSubstr("TOLD prepare_update"))));
}

TEST_F(CoordinatorLoopDeathTest, NobodyHearsOfACommitThatIsNotOnTheDisk) {
  EXPECT_DEATH(Update("update_committed"),
               AllOf(HasSubstr("TOLD pause_replica"), HasSubstr(kBroken),
                     Not(HasSubstr("TOLD apply_worker")),
                     Not(HasSubstr("TOLD resume_replica")),
                     Not(HasSubstr("TOLD end_update"))));
}

TEST_F(CoordinatorLoopDeathTest, NobodyHearsOfAnEndThatIsNotOnTheDisk) {
  EXPECT_DEATH(Update("update_ended"),
               AllOf(HasSubstr("TOLD resume_replica"), HasSubstr(kBroken),
                     Not(HasSubstr("TOLD end_update"))));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
