// Policies, plans and predictions, through the Coordinator: what nodes are told
// to move, what Plan answers, what a version says that it expects.

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/coordinator/coordinator.h"
#include "daemon/coordinator/fake_cluster.h"
#include "daemon/coordinator/update_plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::_;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

v1::UpdateOptions With(v1::TransferPolicy policy) {
  v1::UpdateOptions options;
  options.set_transfer_policy(policy);
  return options;
}

// Ranks on two nodes, one of them with an engine of its own; two more engines.
class PlanTest : public ::testing::Test {
 protected:
  PlanTest() {
    for (const char* node : {"n0", "n1", "n2", "n3"}) c_.AddNode(node);
    for (int rank = 0; rank < kRanks; ++rank) {
      c_.AddRank(rank, kRanks, rank < 2 ? "n0" : "n1");
    }
    c_.AddReplica("r1", {"n1"});
    c_.AddReplica("r2", {"n2", "n2"});
    c_.AddReplica("r3", {"n3"});
    c_.Run();
  }

  v1::Version Publish(v1::TransferPolicy policy) {
    c_.commands.clear();
    for (int rank = 0; rank < kRanks; ++rank) {
      c_.Publish(rank, 0, "", With(policy));
    }
    c_.Run();
    return c_.Version();
  }

  // The flows of an epoch that nodes were told of, by id.
  std::map<std::string, v1::Flow> Flows(int64_t epoch = 0) {
    std::map<std::string, v1::Flow> flows;
    for (const auto& command : c_.commands) {
      if (!command.second.has_prepare_update()) continue;
      const v1::PrepareUpdate& prepare = command.second.prepare_update();
      if (epoch != 0 && prepare.epoch().counter() != epoch) continue;
      for (const v1::Flow& flow : prepare.flows()) {
        const auto known = flows.emplace(flow.flow_id(), flow);
        EXPECT_EQ(known.first->second.SerializeAsString(),
                  flow.SerializeAsString());
      }
    }
    return flows;
  }

  // Every node that needs a bucket gets it once, from one that has it, and
  // owners get nothing of their own.
  void ExpectSound(const std::map<std::string, v1::Flow>& flows) {
    v1::DefineLayout define;
    for (const auto& command : c_.commands) {
      if (command.second.has_define_layout()) {
        layout_ = command.second.define_layout();
      }
    }
    const auto known = MakeKnownLayout(layout_);
    ASSERT_TRUE(known.ok()) << known.status();
    const auto& plan = (*known)->layout.plan;
    std::map<std::pair<int, std::string>, int> arrivals;
    for (const auto& flow : flows) {
      for (int bucket : flow.second.buckets()) {
        for (int i = 1; i < flow.second.members_size(); ++i) {
          ++arrivals[{bucket, flow.second.members(i).node()}];
        }
      }
    }
    for (const auto& arrival : arrivals) {
      EXPECT_EQ(arrival.second, 1);
      EXPECT_NE(
          arrival.first.second,
          (*known)->labels[plan.bucket(arrival.first.first).source_node].name);
    }
    for (uint32_t b = 0; b < plan.bucket_count(); ++b) {
      const std::string owner =
          (*known)->labels[plan.bucket(b).source_node].name;
      for (int32_t node : plan.need_nodes(b)) {
        const std::string& name = (*known)->labels[node].name;
        if (name != owner) {
          EXPECT_EQ(arrivals.count({b, name}), 1u) << b << " " << name;
        }
      }
      for (const auto& flow : flows) {
        for (int bucket : flow.second.buckets()) {
          const std::string& sender = flow.second.members(0).node();
          if (bucket == static_cast<int>(b) && sender != owner) {
            EXPECT_EQ(arrivals.count({b, sender}), 1u) << sender;
          }
        }
      }
    }
  }

  absl::StatusOr<schedule::PlanReport> Plan(v1::TransferPolicy policy,
                                            const std::string& model = kModel) {
    v1::PlanRequest request;
    request.set_model(model);
    request.set_policy(policy);
    return PlanAt(c_, request);
  }

  static absl::StatusOr<schedule::PlanReport> PlanAt(
      const FakeCluster& cluster, const v1::PlanRequest& request) {
    const auto inputs = cluster.coordinator->InputsOfPlan(request);
    if (!inputs.ok()) return inputs.status();
    return PlanOf(*inputs);
  }

  static constexpr int kRanks = 4;
  FakeCluster c_;
  v1::DefineLayout layout_;
};

TEST_F(PlanTest, APlanSaysWhoIsBesideItsSender) {
  // r1 is on a node of ranks, the others are elsewhere.
  for (const auto policy :
       {v1::TRANSFER_POLICY_SHARDED, v1::TRANSFER_POLICY_BROADCAST}) {
    const auto report = Plan(policy);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(schedule::ExplainPaths(*report),
              "inside a node, over no group: 1 worker beside the sender by "
              "shared memory (n1)");
  }
  // Under PAIRED it depends on whose target it is.
  const auto paired = Plan(v1::TRANSFER_POLICY_PAIRED);
  ASSERT_TRUE(paired.ok()) << paired.status();
  int beside = 0, inner = 0;
  for (const schedule::GroupReport& group : paired->groups) {
    const std::string& from = paired->nodes[group.sender_node];
    int here = 0;
    for (const auto& target : group.targets)
      here += target.first == 0 && from == "n1";  // r1 is the first
    beside += here;
    inner += here > 0 && here == static_cast<int>(group.targets.size());
  }
  int counted = 0;
  for (const int workers : paired->beside_sender) counted += workers;
  EXPECT_EQ(counted, beside);
  EXPECT_EQ(paired->inner_groups, inner);
  // A daemon that has opened GPU memory.
  v1::NodeReport heartbeat;
  v1::GpuUse* const gpu =
      heartbeat.mutable_heartbeat()->mutable_memory()->add_gpus();
  gpu->set_device_uuid("GPU-1");
  gpu->set_slot_count(3);
  const auto by = [&] {
    c_.Report("n1", heartbeat);
    const auto report = Plan(v1::TRANSFER_POLICY_SHARDED);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? schedule::ExplainPaths(*report) : "";
  };
  EXPECT_THAT(by(), HasSubstr("by CUDA IPC and shared memory (n1)"));
  // A store on the GPU, which the worker has not said that it reaches.
  gpu->set_device_store_bytes(1 << 20);
  EXPECT_THAT(by(), HasSubstr("by CUDA IPC and shared memory (n1)"));
  c_.engines["r1"].device_uuids = {"GPU-7", "GPU-1"};
  c_.Register("r1");
  c_.Run();
  EXPECT_THAT(by(), HasSubstr("by CUDA IPC for what waits on GPUs (n1)"));
  // Nor does anything wait there where the store is in host memory.
  gpu->clear_device_store_bytes();
  EXPECT_THAT(by(), HasSubstr("by CUDA IPC and shared memory (n1)"));
  // Another GPU of the node, out of its reach.
  gpu->set_device_store_bytes(1 << 20);
  v1::GpuUse* const other =
      heartbeat.mutable_heartbeat()->mutable_memory()->add_gpus();
  other->set_device_uuid("GPU-2");
  other->set_slot_count(3);
  EXPECT_THAT(by(), HasSubstr("by CUDA IPC and shared memory (n1)"));
}

TEST_F(PlanTest, AReplicaThatComesBackBringsItsLayoutBack) {
  Publish(v1::TRANSFER_POLICY_SHARDED);
  ExpectSound(Flows());
  layout_.clear_layout_id();
  v1::DefineLayout smaller = layout_;
  smaller.mutable_workers()->RemoveLast();
  v1::DefineLayout other = layout_;
  other.set_bucket_bytes(2 * other.bucket_bytes());

  RecentLayouts recent;
  const auto first = recent.Make(layout_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto without = recent.Make(smaller);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_NE((*without)->id(), (*first)->id());
  EXPECT_EQ(recent.Find(layout_), *first);
  EXPECT_EQ(*recent.Make(layout_), *first);
  // The one that was of use longest ago goes.
  ASSERT_TRUE(recent.Make(other).ok());
  EXPECT_EQ(recent.Find(smaller), nullptr);
  EXPECT_EQ(*recent.Make(layout_), *first);
  EXPECT_THAT(recent.ids(), ElementsAre(_, (*first)->id()));
  // What cannot be made is not kept.
  other.mutable_workers(0)->set_node(99);
  EXPECT_FALSE(recent.Make(other).ok());
  EXPECT_THAT(recent.ids(), ElementsAre(_, (*first)->id()));
}

TEST_F(PlanTest, EachPolicyMovesEverythingOnceAndAsPlanned) {
  for (v1::TransferPolicy policy :
       {v1::TRANSFER_POLICY_SHARDED, v1::TRANSFER_POLICY_PAIRED,
        v1::TRANSFER_POLICY_BROADCAST}) {
    const auto planned = Plan(policy);
    ASSERT_TRUE(planned.ok()) << planned.status();
    const v1::Version version = Publish(policy);
    ASSERT_EQ(version.state(), v1::Version::STATE_ACTIVE)
        << version.ShortDebugString();
    EXPECT_EQ(version.transfer_policy(), policy);
    EXPECT_EQ(version.options().transfer_policy(), policy);
    EXPECT_EQ(version.wire_bytes(), planned->wire_bytes);
    EXPECT_EQ(version.bound_by(), planned->cost.bound_by);
    EXPECT_TRUE(version.has_lower_bound());
    ExpectSound(Flows());
  }
}

TEST_F(PlanTest, ShardedSendsFromEveryOwnerWithoutGathering) {
  Publish(v1::TRANSFER_POLICY_SHARDED);
  std::set<std::string> senders;
  for (const auto& flow : Flows()) {
    senders.insert(flow.second.members(0).node());
    EXPECT_THAT(flow.first, ::testing::Not(HasSubstr("gather")));
  }
  EXPECT_EQ(senders, (std::set<std::string>{"n0", "n1"}));
}

TEST_F(PlanTest, BroadcastGathersAtTheHeadAndSendsFromThere) {
  Publish(v1::TRANSFER_POLICY_BROADCAST);
  int gathered = 0;
  for (const auto& flow : Flows()) {
    if (flow.first.find("gather") != std::string::npos) {
      ++gathered;
      EXPECT_EQ(flow.second.members(0).node(), "n1");
      EXPECT_EQ(flow.second.members(1).node(), "n0");
    } else {
      EXPECT_EQ(flow.second.members(0).node(), "n0");
    }
  }
  EXPECT_GT(gathered, 0);
}

TEST_F(PlanTest, PairedDealsTargetsOverRanks) {
  // Targets in order: r1:0 on n1, r2:0 and r2:1 on n2, r3:0 on n3; senders are
  // ranks 0 to 3 on n0, n0, n1, n1.
  Publish(v1::TRANSFER_POLICY_PAIRED);
  std::map<std::string, std::set<std::string>> senders;
  for (const auto& flow : Flows()) {
    if (flow.first.find("gather") != std::string::npos) continue;
    ASSERT_EQ(flow.second.members_size(), 2);
    senders[flow.second.members(1).node()].insert(
        flow.second.members(0).node());
  }
  EXPECT_EQ(senders["n3"], std::set<std::string>{"n1"});
  // n2's two workers want the same: it comes from whoever has less to send.
  EXPECT_FALSE(senders["n2"].empty());
}

TEST_F(PlanTest, AutoIsTheDefaultAndNeverShownAsSuch) {
  const v1::Version version = Publish(v1::TRANSFER_POLICY_UNSPECIFIED);
  EXPECT_EQ(version.transfer_policy(), v1::TRANSFER_POLICY_SHARDED);
  EXPECT_EQ(version.options().transfer_policy(), v1::TRANSFER_POLICY_AUTO);
  const auto report = Plan(v1::TRANSFER_POLICY_AUTO);
  ASSERT_TRUE(report.ok()) << report.status();
  // Who asks sees what the others would cost.
  ASSERT_EQ(report->policies.size(), 3u);
  for (const schedule::PolicyReport& weighed : report->policies) {
    EXPECT_FALSE(weighed.at_least);
  }
}

TEST_F(PlanTest, WithoutAPolicyItIsThatOfTheLastUpdate) {
  const auto first = Plan(v1::TRANSFER_POLICY_UNSPECIFIED);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->requested, schedule::Policy::kAuto);
  Publish(v1::TRANSFER_POLICY_BROADCAST);
  const auto then = Plan(v1::TRANSFER_POLICY_UNSPECIFIED);
  ASSERT_TRUE(then.ok()) << then.status();
  EXPECT_EQ(then->requested, schedule::Policy::kBroadcast);
}

TEST_F(PlanTest, APlanOutlivesWhatItWasMadeOf) {
  v1::PlanRequest request;
  request.set_model(kModel);
  // Before any layout was made, and after.
  for (int i = 0; i < 2; ++i) {
    const auto inputs = c_.coordinator->InputsOfPlan(request);
    ASSERT_TRUE(inputs.ok()) << inputs.status();
    EXPECT_EQ(inputs->known == nullptr, i == 0);
    Publish(v1::TRANSFER_POLICY_SHARDED);
    const auto plan = PlanOf(*inputs);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->wire_bytes, c_.Version().wire_bytes());
  }
}

// What Prepare joins must be what the next update wants.
TEST_F(PlanTest, PrepareMakesReadyForThePolicyOfTheLastUpdate) {
  const auto shapes = [](const std::map<std::string, v1::Flow>& flows) {
    std::set<std::string> shapes;
    for (const auto& flow : flows) {
      std::string shape = flow.first + ":";
      for (const v1::FlowMember& member : flow.second.members()) {
        shape += " " + member.node();
      }
      shapes.insert(shape);
    }
    return shapes;
  };
  const auto prepare = [&](int64_t request) {
    c_.commands.clear();
    v1::PrepareRequest asked;
    asked.set_model(kModel);
    c_.Do(c_.coordinator->OnPrepareRequest(c_.now, request, asked));
    c_.Run();
    return Flows();
  };
  const auto before = prepare(1);
  EXPECT_FALSE(before.empty());
  for (v1::TransferPolicy policy :
       {v1::TRANSFER_POLICY_SHARDED, v1::TRANSFER_POLICY_PAIRED,
        v1::TRANSFER_POLICY_BROADCAST}) {
    SCOPED_TRACE(v1::TransferPolicy_Name(policy));
    const v1::Version version = Publish(policy);
    const auto updated = shapes(Flows());
    EXPECT_EQ(shapes(prepare(10 + policy)), updated);
    ASSERT_FALSE(c_.prepared.empty());
    EXPECT_EQ(c_.prepared.back().failure.code(), 0);
    EXPECT_EQ(c_.prepared.back().response.wire_bytes(), version.wire_bytes());
    // Nobody has asked for anything else yet: AUTO, which is SHARDED here.
    if (policy == v1::TRANSFER_POLICY_SHARDED) {
      EXPECT_EQ(shapes(before), updated);
    }
  }
}

TEST_F(PlanTest, AfterAnEdgeFailedTheRestTravelsAnotherWay) {
  for (v1::TransferPolicy policy :
       {v1::TRANSFER_POLICY_PAIRED, v1::TRANSFER_POLICY_BROADCAST}) {
    bool failed = false;
    c_.intercept = [&](const std::string& node,
                       const v1::NodeCommand& command) {
      if (!command.has_move_update() || node != "n3" || failed) return false;
      failed = true;
      v1::NodeReport report;
      v1::UpdateVerified* verified = report.mutable_update_verified();
      verified->set_model(kModel);
      verified->set_update_id(command.move_update().update_id());
      *verified->mutable_epoch() = command.move_update().epoch();
      verified->mutable_failure()->set_code(14);
      verified->mutable_failure()->set_reason("EDGE_LOST");
      verified->mutable_failure()->set_message("gone");
      verified->set_edge_from(policy == v1::TRANSFER_POLICY_PAIRED ? "n1"
                                                                   : "n2");
      verified->set_edge_to("n3");
      c_.Report("n3", report);
      return true;
    };
    const v1::Version version = Publish(policy);
    EXPECT_TRUE(failed);
    ASSERT_EQ(version.state(), v1::Version::STATE_ACTIVE)
        << version.ShortDebugString();
    int64_t newest = 0;
    for (const auto& command : c_.commands) {
      if (!command.second.has_prepare_update()) continue;
      newest =
          std::max(newest, command.second.prepare_update().epoch().counter());
    }
    ExpectSound(Flows(newest));
    const std::string bad = policy == v1::TRANSFER_POLICY_PAIRED ? "n1" : "n2";
    for (const auto& flow : Flows(newest)) {
      for (int i = 1; i < flow.second.members_size(); ++i) {
        EXPECT_FALSE(flow.second.members(i - 1).node() == bad &&
                     flow.second.members(i).node() == "n3");
      }
    }
  }
}

TEST_F(PlanTest, EveryPhaseButTheGatheringIsPredicted) {
  const v1::Version version = Publish(v1::TRANSFER_POLICY_AUTO);
  for (const v1::PhaseTime& phase : version.phases()) {
    EXPECT_TRUE(phase.has_measured()) << phase.phase();
    EXPECT_EQ(phase.has_predicted(), phase.phase() != "gather")
        << phase.phase();
  }
}

TEST_F(PlanTest, RanksMustAskForTheSamePolicy) {
  const int64_t first = c_.Publish(0, 0, "", With(v1::TRANSFER_POLICY_PAIRED));
  const int64_t second =
      c_.Publish(1, 0, "", With(v1::TRANSFER_POLICY_BROADCAST));
  c_.Run();
  (void)first;
  ASSERT_NE(c_.FindReply(second), nullptr);
  EXPECT_NE(c_.FindReply(second)->failure().code(), 0);
}

TEST_F(PlanTest, AModelThatCannotBePublishedHasNoPlan) {
  EXPECT_EQ(ErrorReason(Plan(v1::TRANSFER_POLICY_AUTO, "models/x").status()),
            "MODEL_UNKNOWN");
  EXPECT_EQ(ErrorReason(Plan(v1::TRANSFER_POLICY_AUTO, "x").status()),
            "RESOURCE_NAME_INVALID");
  FakeCluster bare;
  bare.AddNode("n0");
  bare.AddRank(0, 2, "n0");
  v1::PlanRequest request;
  request.set_model(kModel);
  EXPECT_EQ(ErrorReason(PlanAt(bare, request).status()), "WORLD_INCOMPLETE");
  bare.AddRank(1, 2, "n0");
  EXPECT_EQ(ErrorReason(PlanAt(bare, request).status()), "NO_WORKERS");
}

// ---- Rates ----

TEST(RateBookTest, TheFirstUpdateReplacesTheDefaultsTheNextCountHalf) {
  RateBook book;
  EXPECT_EQ(book.rates().link, schedule::Rates().link);
  RateBook::Seen seen;
  seen.model = "models/m";
  seen.link_bytes = 100 << 20;
  seen.transfer = absl::Seconds(1);
  seen.snapshot_bytes = 100 << 20;
  seen.snapshot = absl::Milliseconds(50);
  seen.apply_bytes = 100 << 20;
  seen.apply = absl::Milliseconds(100);
  seen.rounds["pause"] = absl::Milliseconds(30);
  book.Learn(seen);
  EXPECT_DOUBLE_EQ(book.rates().link, 100 << 20);
  EXPECT_DOUBLE_EQ(book.rates().copy, 20.0 * (100 << 20));
  EXPECT_DOUBLE_EQ(book.rates().apply_copy, 10.0 * (100 << 20));
  EXPECT_EQ(book.Round("models/m", "pause"), absl::Milliseconds(30));
  EXPECT_EQ(book.Round("models/other", "pause"), absl::Milliseconds(1));
  seen.transfer = absl::Seconds(2);
  seen.rounds["pause"] = absl::Milliseconds(10);
  book.Learn(seen);
  EXPECT_DOUBLE_EQ(book.rates().link, 75 << 20);
  EXPECT_EQ(book.Round("models/m", "pause"), absl::Milliseconds(20));
}

TEST(RateBookTest, WhatTellsNothingIsNotLearned) {
  RateBook book;
  RateBook::Seen seen;
  seen.link_bytes = 1000;  // latency
  seen.transfer = absl::Seconds(1);
  book.Learn(seen);
  seen.link_bytes = 100 << 20;  // the copy out was what it waited for
  seen.snapshot_bytes = 100 << 20;
  seen.snapshot = absl::Seconds(2);
  book.Learn(seen);
  EXPECT_EQ(book.rates().link, schedule::Rates().link);
  EXPECT_DOUBLE_EQ(book.rates().copy, 50 << 20);
}

TEST(PredictPhasesTest, SnapshotGatheringAndTransferOverlap) {
  schedule::CostEstimate cost;
  cost.snapshot_seconds = 3;
  cost.gather_seconds = 1;  // a part of the transfer
  cost.transfer_seconds = 2.5;
  cost.apply_seconds = 0.5;
  auto phases = PredictPhases(cost, "models/m", RateBook());
  EXPECT_EQ(phases["transfer"], absl::Seconds(3.001));
  cost.transfer_seconds = 5;
  phases = PredictPhases(cost, "models/m", RateBook());
  EXPECT_EQ(phases["transfer"], absl::Seconds(5.001));
  EXPECT_EQ(phases["apply"], absl::Seconds(0.501));
  // Prepare, pause, commit and resume are a round each before the first.
  EXPECT_EQ(phases["total"], absl::Seconds(5.506));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
