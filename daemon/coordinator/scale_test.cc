// With many nodes, ranks and tensors: what takes long is done as often as there
// is news, and what has gone is forgotten.

#include <cstdint>
#include <cstdlib>
#include <new>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/fake_expect.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

// Bytes that were allocated; tests here have one thread.
int64_t g_allocated = 0;

}  // namespace

void* operator new(size_t size) {
  g_allocated += static_cast<int64_t>(size);
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace weightsync {
namespace daemon {
namespace {

using Command = v1::NodeCommand;

// ---- Late joiners ----

TEST(ScaleTest, LateJoinersAreLookedAtAsOftenAsThereIsNews) {
  constexpr int kJoiners = 60;
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const CoordinatorCosts before = c.coordinator->costs();
  for (int i = 0; i < kJoiners; ++i) {
    const std::string node = absl::StrCat("j", i);
    c.AddNode(node);
    c.AddReplica(absl::StrCat("late", i), {node});
  }
  c.Run();
  ExpectAllServe(c, c.Version().update_id());
  const CoordinatorCosts after = c.coordinator->costs();
  EXPECT_LE(after.needed_buckets - before.needed_buckets, kJoiners);
  // As each joins, when its fetch begins, when its bytes are there, and as its
  // engine goes on. With all of them at each report: 60 times as many.
  EXPECT_LE(after.missing_buckets - before.missing_buckets, 6 * kJoiners);
}

TEST(ScaleTest, WhatAWorkerNeedsIsForgottenWithItsRegistration) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("n3");
  c.AddReplica("r3", {"n3"});
  c.Run();
  const int64_t before = c.coordinator->costs().needed_buckets;
  c.AddReplica("r4", {"n3"});
  c.Run();
  EXPECT_EQ(c.coordinator->costs().needed_buckets, before + 1);
  // They are started again, and may want something else by now.
  for (const char* engine : {"r3", "r4"}) {
    c.engines[engine].workers[0] = v1::InstalledState();
  }
  c.RestartNode("n3");
  c.Pass(absl::Seconds(20));
  EXPECT_EQ(c.coordinator->costs().needed_buckets, before + 3);
  ExpectAllServe(c, c.Version().update_id());
}

// ---- Edges ----

// A cluster in which n3 fetches from the first of the standard nodes, or, where
// a fetch over that edge has failed, from the other.
class EdgeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    c_.AddStandard();
    c_.PublishAll(2);
    c_.Run();
    c_.AddNode("n3");
    c_.intercept = [this](const std::string& node, const Command& command) {
      if (!command.has_prepare_update() || node == "n3") return false;
      if (sender_.empty() || node == sender_) {
        sender_ = node;
        v1::NodeReport report;
        auto* prepared = report.mutable_update_prepared();
        prepared->set_model(kModel);
        prepared->set_update_id(command.prepare_update().update_id());
        *prepared->mutable_epoch() = command.prepare_update().epoch();
        *prepared->mutable_failure() = MakeFailure(14, "EDGE_FAILED", "no way");
        c_.Report(node, report);
        return true;
      }
      return false;
    };
    c_.AddReplica("r3", {"n3"});
    c_.Run();
    c_.Pass(absl::Seconds(6));
    c_.intercept = nullptr;
    ExpectAllServe(c_, c_.Version().update_id());
    near_ = sender_;
    EXPECT_FALSE(near_.empty());
    EXPECT_NE(Sender(), near_);
  }

  // Of the newest fetch to n3.
  std::string Sender() const {
    std::string sender;
    for (const auto& command : c_.commands) {
      if (command.first == "n3" && command.second.has_prepare_update() &&
          command.second.prepare_update().fetch()) {
        sender = command.second.prepare_update().flows(0).members(0).node();
      }
    }
    return sender;
  }
  // n3 loses the bytes, and another replica there needs them.
  void FetchAgain(const std::string& replica) {
    v1::NodeReport report;
    report.mutable_update_evicted()->set_model(kModel);
    report.mutable_update_evicted()->set_update_id(c_.Version().update_id());
    c_.Report("n3", report);
    c_.AddReplica(replica, {"n3"});
    c_.Run();
    ExpectAllServe(c_, c_.Version().update_id());
  }

  FakeCluster c_;
  std::string sender_;
  std::string near_;
};

TEST_F(EdgeTest, OneThatFailedIsAvoidedForAWhile) {
  FetchAgain("r4");
  EXPECT_NE(Sender(), near_);
  c_.Pass(absl::Minutes(6));
  FetchAgain("r5");
  EXPECT_EQ(Sender(), near_);
}

TEST_F(EdgeTest, OneThatFailedIsTriedWhenANodeOfItIsBack) {
  c_.Reconnect(near_);
  c_.Run();
  FetchAgain("r4");
  EXPECT_EQ(Sender(), near_);
}

// ---- Who says again what it has ----

TEST(ScaleTest, ANodeThatIsBackHasNoCatalogMadeAnew) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const int64_t before = c.coordinator->costs().catalogs;
  EXPECT_GT(before, 0);
  c.Reconnect("n0");
  c.Run();
  EXPECT_EQ(c.coordinator->costs().catalogs, before);
  ExpectNextPublishWorks(&c);
}

// A node with a worker of many tensors.
class ManyTensorsTest : public ::testing::Test {
 protected:
  static constexpr int kTensors = 10000;

  void SetUp() override {
    CoordinatorOptions options;
    options.coordinator_node = "n";
    options.random_id = [this] { return absl::StrCat("id", ++ids_); };
    coordinator_ =
        std::make_unique<Coordinator>(std::move(options), JournalState());
    coordinator_->Start(now_);
    Hello("s1");
    v1::NodeReport report;
    auto* control = report.mutable_replica_joined()->mutable_registration();
    control->set_model(kModel);
    control->set_replica("r");
    control->set_worker_count(1);
    control->set_incarnation("i");
    control_ = report;
    coordinator_->OnReport(now_, "s1", control_);
    report.Clear();
    report.mutable_worker_joined()->set_ready(true);
    auto* worker = report.mutable_worker_joined()->mutable_registration();
    worker->set_model(kModel);
    worker->set_replica("r");
    worker->set_worker_count(1);
    worker->set_incarnation("i");
    for (int i = 0; i < kTensors; ++i) {
      v1::WantedTensor* tensor = worker->add_tensors();
      tensor->set_name(absl::StrCat("model.layers.", i, ".weight"));
      tensor->set_dtype(v1::DTYPE_BF16);
      tensor->add_shape(4);
      tensor->add_shape(8);
    }
    worker_ = report;
    coordinator_->OnReport(now_, "s1", worker_);
    ASSERT_EQ(coordinator_->GetReplica(ReplicaName("r"))->workers_size(), 1);
  }

  void Hello(const std::string& stream) {
    v1::NodeReport report;
    report.mutable_hello()->set_node("n");
    report.mutable_hello()->set_incarnation("i");
    report.mutable_hello()->set_protocol_version(1);
    report.mutable_hello()->set_data_address("n:1");
    coordinator_->OnReport(now_, stream, report);
  }
  int64_t DoneBytes(const std::string& stream) {
    v1::NodeReport report;
    report.mutable_hello_done();
    const int64_t before = g_allocated;
    coordinator_->OnReport(now_, stream, report);
    return g_allocated - before;
  }

  int ids_ = 0;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::unique_ptr<Coordinator> coordinator_;
  v1::NodeReport control_;
  v1::NodeReport worker_;
};

TEST_F(ManyTensorsTest, NobodyCopiesThemWhenANodeHasSaidAll) {
  DoneBytes("s1");
  coordinator_->OnDisconnected(now_, "s1");
  Hello("s2");
  coordinator_->OnReport(now_, "s2", control_);
  coordinator_->OnReport(now_, "s2", worker_);
  EXPECT_LT(DoneBytes("s2"), 50000);
  EXPECT_EQ(coordinator_->GetReplica(ReplicaName("r"))->state(),
            v1::Replica::STATE_SERVING);
}

TEST_F(ManyTensorsTest, WhatItDoesNotNameIsGone) {
  DoneBytes("s1");
  coordinator_->OnDisconnected(now_, "s1");
  Hello("s2");
  coordinator_->OnReport(now_, "s2", control_);
  EXPECT_LT(DoneBytes("s2"), 50000);
  EXPECT_NE(coordinator_->GetReplica(ReplicaName("r"))->state(),
            v1::Replica::STATE_SERVING);
}

TEST_F(ManyTensorsTest, NobodyCopiesThemWhenANodeIsLost) {
  DoneBytes("s1");
  coordinator_->OnTick(now_);
  coordinator_->OnDisconnected(now_, "s1");
  now_ += absl::Seconds(6);
  const int64_t before = g_allocated;
  coordinator_->OnTick(now_);
  EXPECT_LT(g_allocated - before, 50000);
  EXPECT_EQ(coordinator_->GetReplica(ReplicaName("r"))->state(),
            v1::Replica::STATE_LOST);
}

// ---- What has gone ----

std::set<std::string> NodesOf(const FakeCluster& c) {
  std::set<std::string> nodes;
  v1::ListNodesRequest request;
  do {
    const auto response = c.coordinator->ListNodes(request);
    EXPECT_TRUE(response.ok()) << response.status();
    if (!response.ok()) break;
    for (const v1::Node& node : response->nodes()) nodes.insert(node.name());
    request.set_page_token(response->next_page_token());
  } while (!request.page_token().empty());
  return nodes;
}

const std::set<std::string>& Standard() {
  static const auto* const kNodes =
      new std::set<std::string>{"nodes/n0", "nodes/n1", "nodes/n2"};
  return *kNodes;
}

TEST(ScaleTest, NodesThatCameAndWentAreForgotten) {
  constexpr int kNodes = 1000;
  CoordinatorOptions options;
  options.lost_replica_ttl = absl::Minutes(10);
  FakeCluster c(options);
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  for (int i = 0; i < kNodes; ++i) {
    const std::string node = absl::StrCat("pod-", i);
    c.AddNode(node);
    c.Disconnect(node);
  }
  EXPECT_EQ(NodesOf(c).size(), Standard().size() + kNodes);
  c.Pass(absl::Minutes(9), absl::Seconds(4));
  EXPECT_EQ(NodesOf(c).size(), Standard().size() + kNodes);
  c.Pass(absl::Minutes(2), absl::Seconds(4));
  EXPECT_EQ(NodesOf(c), Standard());
  // One that comes back is as new.
  c.Reconnect("pod-7");
  c.AddReplica("late", {"pod-7"});
  c.Pass(absl::Seconds(10));
  ExpectAllServe(c, c.Version().update_id());
  ExpectNextPublishWorks(&c);
}

TEST(ScaleTest, NodesThatSomebodyNamesAreNot) {
  CoordinatorOptions options;
  options.lost_replica_ttl = absl::Minutes(10);
  FakeCluster c(options);
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  c.AddNode("drained");
  v1::DrainNodeRequest drain;
  drain.set_name("nodes/drained");
  c.Ask(drain);
  c.Run();
  c.Disconnect("drained");
  // A replica of two nodes: one of them is lost, and is what it waits for.
  c.AddNode("n3");
  c.AddReplica("wide", {"n2", "n3"});
  c.Run();
  c.Pass(absl::Seconds(10));
  ExpectAllServe(c, c.Version().update_id());
  c.Disconnect("n3");
  c.Pass(absl::Minutes(12), absl::Seconds(4));
  std::set<std::string> named = Standard();
  named.insert({"nodes/drained", "nodes/n3"});
  EXPECT_EQ(NodesOf(c), named);
}

// One whose engine never became whole is shown no longer than one that was.
TEST(ScaleTest, ReplicasThatNeverBecameWholeAreForgotten) {
  CoordinatorOptions options;
  options.lost_replica_ttl = absl::Minutes(10);
  FakeCluster c(options);
  c.AddStandard();
  c.AddNode("pod");
  c.AddReplica("crashes", {"pod"});
  c.engines.erase("crashes");
  c.AddNode("other");
  c.AddReplica("half", {"other", "nowhere"});
  c.engines.erase("half");
  c.Run();
  c.Disconnect("pod");
  c.Disconnect("other");
  v1::ListReplicasRequest all;
  all.set_parent(kModel);
  EXPECT_EQ(c.coordinator->ListReplicas(all)->replicas_size(), 4);
  c.Pass(absl::Minutes(12), absl::Seconds(4));
  EXPECT_EQ(c.coordinator->ListReplicas(all)->replicas_size(), 2);
  EXPECT_EQ(NodesOf(c), Standard());
}

TEST(ScaleTest, WhatHasGoneIsLookedForNowAndThen) {
  FakeCluster c;
  c.AddStandard();
  const int64_t before = c.coordinator->costs().collections;
  c.Pass(absl::Minutes(1), absl::Milliseconds(100));
  const int64_t passes = c.coordinator->costs().collections - before;
  EXPECT_GE(passes, 6);
  EXPECT_LE(passes, 7);
}

// ---- Layouts in the journal ----

// The journal drops a layout with the last commit that names it.
TEST(ScaleTest, ALayoutThatComesBackIsWrittenAgain) {
  FakeCluster c;
  c.AddStandard();
  c.PublishAll(2);
  c.Run();
  const std::string first = c.Version().layout_id();
  ASSERT_EQ(c.journal.layouts.count(first), 1u);
  c.AddNode("n3");
  c.AddReplica("r3", {"n3"});
  c.Run();
  c.Pass(absl::Seconds(10));
  for (size_t i = 0; i < kOlderCommits + 2; ++i) {
    ExpectNextPublishWorks(&c);
    ASSERT_NE(c.Version().layout_id(), first);
  }
  // As Journal::Tend does.
  ForgetOld(absl::InfinitePast(), &c.journal);
  ASSERT_EQ(c.journal.layouts.count(first), 0u);
  c.Disconnect("n3");
  c.engines.erase("r3");
  c.Pass(absl::Seconds(10));
  ExpectNextPublishWorks(&c);
  ASSERT_EQ(c.Version().layout_id(), first);
  EXPECT_EQ(c.journal.layouts.count(first), 1u);
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
