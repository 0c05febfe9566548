// PAIRED, BROADCAST and SHARDED over clusters whose nodes hold trainers and
// workers in any mix: who has to send gets the bytes, nobody gets them twice.

#include "schedule/choose.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/simulate.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using testing::Everything;
using testing::MakeParam;
using testing::On;
using testing::PlainNodes;

struct Planned {
  Catalog catalog;
  PlanCluster cluster;
  UpdateLayout layout;
};

// `ranks` ranks hold one tensor by rows; ranks and workers lie on any of
// `nodes` nodes. Workers want all of it, or a half.
Planned Random(std::mt19937* random, int nodes, int ranks, int workers) {
  const auto pick = [random](int n) {
    return static_cast<int>((*random)() % static_cast<unsigned>(n));
  };
  Planned planned;
  const int64_t rows = 4 * ranks;
  planned.catalog = *Catalog::Create({MakeParam("w", {rows, 16})});
  const Dims shape = {rows, 16};
  std::vector<SourceRank> sources;
  for (int rank = 0; rank < ranks; ++rank) {
    const int node = pick(nodes);
    sources.push_back(
        {rank, node,
         MakeBoxList({On(0, SliceBox(shape, 0, 4 * rank, 4 * rank + 4))})});
    planned.cluster.rank_nodes.push_back(node);
  }
  for (int w = 0; w < workers; ++w) {
    BoxListRef boxes = Everything(planned.catalog);
    const int half = pick(3);
    if (half < 2) {
      boxes = MakeBoxList({On(0, SliceBox(shape, 1, 8 * half, 8 * half + 8))});
    }
    planned.cluster.workers.push_back({w, pick(nodes), boxes});
    planned.cluster.worker_ids.emplace_back(w, 0);
  }
  planned.cluster.nodes = PlainNodes(nodes);
  planned.cluster.counts.sharding = TrainingSharding::kFsdp;
  planned.cluster.counts.training_gpus = ranks;
  planned.cluster.counts.inference_replicas = workers;
  planned.cluster.counts.inference_tp = 1;
  planned.layout =
      *BuildLayout(planned.catalog, sources, planned.cluster.workers, 64);
  return planned;
}

// What every policy promises, whatever lies where.
void ExpectSound(const Planned& planned, const PolicyPlan& plan) {
  std::map<std::pair<uint32_t, int32_t>, int> arrivals;
  std::set<std::pair<uint32_t, int32_t>> gathered;
  for (const auto* flows : {&plan.flows.gather, &plan.flows.flows}) {
    for (const Flow& flow : *flows) {
      ASSERT_FALSE(flow.chain.empty());
      int64_t bytes = 0;
      for (uint32_t b : flow.buckets) {
        bytes += planned.layout.bucket(b).bytes;
        for (int32_t node : flow.chain) {
          ++arrivals[{b, node}];
          ASSERT_NE(node, flow.source_node);
          if (flows == &plan.flows.gather) gathered.insert({b, node});
        }
      }
      EXPECT_EQ(bytes, flow.bytes);
    }
  }
  for (const auto& arrival : arrivals) {
    EXPECT_EQ(arrival.second, 1)
        << "bucket " << arrival.first.first << " to " << arrival.first.second;
    EXPECT_NE(planned.layout.bucket(arrival.first.first).source_node,
              arrival.first.second)
        << "its owner was sent it";
  }
  for (uint32_t b = 0; b < planned.layout.bucket_count(); ++b) {
    const int32_t owner = planned.layout.bucket(b).source_node;
    for (int32_t node : planned.layout.need_nodes(b)) {
      EXPECT_TRUE(node == owner || arrivals.count({b, node}) > 0);
    }
  }
  for (const Flow& flow : plan.flows.gather) {
    for (uint32_t b : flow.buckets) {
      EXPECT_EQ(planned.layout.bucket(b).source_node, flow.source_node);
    }
  }
  for (const Flow& flow : plan.flows.flows) {
    for (uint32_t b : flow.buckets) {
      EXPECT_TRUE(planned.layout.bucket(b).source_node == flow.source_node ||
                  gathered.count({b, flow.source_node}) > 0)
          << "node " << flow.source_node << " has no bucket " << b;
    }
  }
}

TEST(PlanPolicyTest, ThousandsOfMixedClusters) {
  std::mt19937 random(7);
  for (int i = 0; i < 3000; ++i) {
    const int nodes = 1 + static_cast<int>(random() % 6);
    const Planned planned = Random(&random, nodes, 1 + random() % 5,
                                   1 + static_cast<int>(random() % 6));
    for (Policy policy :
         {Policy::kSharded, Policy::kPaired, Policy::kBroadcast}) {
      const auto plan =
          PlanPolicy(policy, planned.cluster, planned.layout, Rates());
      ASSERT_TRUE(plan.ok()) << plan.status();
      ExpectSound(planned, *plan);
      int64_t wire = 0;
      for (const auto* flows : {&plan->flows.gather, &plan->flows.flows}) {
        for (const Flow& flow : *flows) {
          wire += flow.bytes * static_cast<int64_t>(flow.chain.size());
        }
      }
      EXPECT_EQ(plan->cost.wire_bytes, wire);
      if (::testing::Test::HasFailure()) {
        FAIL() << "cluster " << i << " under " << PolicyName(policy);
      }
    }
  }
}

TEST(ChoosePlanTest, BoundingInsteadOfPlanningNeverChangesTheChoice) {
  std::mt19937 random(11);
  int bounded = 0;
  int others = 0;
  for (int i = 0; i < 400; ++i) {
    const Planned planned =
        Random(&random, 1 + random() % 8, 4, 1 + random() % 12);
    // Latencies that matter, and such that do not.
    Rates rates;
    if (i % 2 == 0) rates.hop_latency = 1e-3;
    if (i % 3 == 0) rates.link = 1e5;
    const auto all = ChoosePlan(Policy::kAuto, planned.cluster, planned.layout,
                                rates, 1 << 20);
    ASSERT_TRUE(all.ok()) << all.status();
    const auto few =
        ChoosePlan(Policy::kAuto, planned.cluster, planned.layout, rates, 0);
    ASSERT_TRUE(few.ok()) << few.status();
    ASSERT_EQ(all->policies.size(), 3u);
    ASSERT_EQ(few->policies.size(), 3u);
    EXPECT_EQ(all->plan.policy, few->plan.policy);
    others += few->plan.policy != Policy::kSharded;
    for (int p = 0; p < 3; ++p) {
      EXPECT_FALSE(all->policies[p].at_least);
      EXPECT_GE(all->policies[p].total_seconds * kWorthChanging,
                all->plan.cost.total_seconds);
      if (few->policies[p].at_least) {
        ++bounded;
        EXPECT_LE(few->policies[p].total_seconds,
                  all->policies[p].total_seconds);
      }
    }
  }
  EXPECT_GT(bounded, 100);
  EXPECT_GT(others, 10);
}

TEST(ChoosePlanTest, WhatCannotBeHadIsLeftOutAndSaysWhy) {
  std::mt19937 random(3);
  Planned planned = Random(&random, 4, 2, 5);
  planned.cluster.counts.sharding = TrainingSharding::kZero3;
  planned.cluster.stages = 3;  // which do not divide two ranks
  for (int64_t weigh_up_to : {0, 1 << 20}) {
    const auto chosen = ChoosePlan(Policy::kAuto, planned.cluster,
                                   planned.layout, Rates(), weigh_up_to);
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->plan.policy, Policy::kSharded);
    EXPECT_EQ(ReasonOf(chosen->policies[1].status), "TOO_FEW_TRAINERS");
    EXPECT_EQ(ReasonOf(chosen->policies[2].status), "INVALID_COUNT");
  }
}

TEST(ChoosePlanTest, TheCostOfEveryPolicyIsThatOfTheSimulation) {
  // Large buckets over slow links: latencies do not count.
  Planned planned;
  planned.catalog = *Catalog::Create({MakeParam("w", {4096, 4096})});
  std::vector<SourceRank> sources;
  for (int rank = 0; rank < 4; ++rank) {
    sources.push_back({rank, rank,
                       MakeBoxList({On(0, SliceBox({4096, 4096}, 0, 1024 * rank,
                                                   1024 * rank + 1024))})});
    planned.cluster.rank_nodes.push_back(rank);
  }
  for (int w = 0; w < 6; ++w) {
    planned.cluster.workers.push_back({w, 4 + w, Everything(planned.catalog)});
    planned.cluster.worker_ids.emplace_back(w, 0);
  }
  planned.cluster.nodes = PlainNodes(10);
  planned.cluster.counts.sharding = TrainingSharding::kFsdp;
  planned.cluster.counts.training_gpus = 4;
  planned.cluster.counts.inference_replicas = 6;
  planned.cluster.counts.inference_tp = 1;
  planned.layout =
      *BuildLayout(planned.catalog, sources, planned.cluster.workers, 1 << 20);
  Rates rates;
  rates.link = 125e6;
  for (Policy policy :
       {Policy::kSharded, Policy::kPaired, Policy::kBroadcast}) {
    const auto plan =
        PlanPolicy(policy, planned.cluster, planned.layout, rates);
    ASSERT_TRUE(plan.ok()) << plan.status();
    // Gathering and sending share their links.
    std::vector<Flow> flows = plan->flows.gather;
    flows.insert(flows.end(), plan->flows.flows.begin(),
                 plan->flows.flows.end());
    const auto simulated =
        SimulateTransfer(flows, planned.cluster.nodes, rates);
    ASSERT_TRUE(simulated.ok()) << simulated.status();
    EXPECT_NEAR(plan->cost.transfer_seconds / simulated->seconds, 1, 0.1)
        << PolicyName(policy);
    EXPECT_EQ(plan->cost.gather_seconds > 0, policy != Policy::kSharded);
    EXPECT_LE(plan->cost.gather_seconds, plan->cost.transfer_seconds);
    // Copies out run beside; the pause follows.
    EXPECT_DOUBLE_EQ(
        plan->cost.total_seconds,
        std::max(plan->cost.snapshot_seconds, plan->cost.transfer_seconds) +
            rates.control_latency + plan->cost.pause_seconds);
    if (plan->flows.gather.empty()) continue;
    const auto gathered =
        SimulateTransfer(plan->flows.gather, planned.cluster.nodes, rates);
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    EXPECT_NEAR(plan->cost.gather_seconds / gathered->seconds, 1, 0.1)
        << PolicyName(policy);
  }
}

TEST(ChoosePlanTest, AutoLeavesShardedForSomethingMuchCheaper) {
  // A chain over many nodes takes its latencies one after another.
  Planned planned;
  planned.catalog = *Catalog::Create({MakeParam("w", {4, 4})});
  planned.cluster.rank_nodes = {0};
  for (int w = 0; w < 40; ++w) {
    planned.cluster.workers.push_back({w, 1 + w, Everything(planned.catalog)});
    planned.cluster.worker_ids.emplace_back(w, 0);
  }
  planned.cluster.nodes = PlainNodes(41);
  planned.cluster.counts.sharding = TrainingSharding::kFsdp;
  planned.cluster.counts.training_gpus = 1;
  planned.cluster.counts.inference_replicas = 40;
  planned.cluster.counts.inference_tp = 1;
  planned.layout = *BuildLayout(planned.catalog,
                                {SourceRank{0, 0, Everything(planned.catalog)}},
                                planned.cluster.workers, 1 << 20);
  Rates rates;
  rates.hop_latency = 0.01;
  const auto chosen =
      ChoosePlan(Policy::kAuto, planned.cluster, planned.layout, rates);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->plan.policy, Policy::kPaired);
}

TEST(ChoosePlanTest, NobodyWhoCouldSendIsRefused) {
  std::mt19937 random(1);
  Planned planned = Random(&random, 2, 2, 2);
  planned.cluster.rank_nodes.clear();
  for (Policy policy : {Policy::kPaired, Policy::kBroadcast}) {
    EXPECT_EQ(
        ReasonOf(ChoosePlan(policy, planned.cluster, planned.layout, Rates())
                     .status()),
        "INVALID_COUNT");
  }
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
