#include "schedule/simulate.h"

#include <cmath>

#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/parallel.h"
#include "schedule/plan.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using testing::PlainNodes;

Flow MakeFlow(int32_t source, std::vector<int32_t> chain, int64_t bytes,
              int32_t wave = 0) {
  Flow flow;
  flow.source_node = source;
  flow.chain = std::move(chain);
  flow.bytes = bytes;
  flow.wave = wave;
  return flow;
}

// 1 MB/s links without latency.
Rates Simple() {
  Rates rates;
  rates.link = 1e6;
  rates.hop_latency = 0;
  rates.frame_bytes = 1;
  return rates;
}

double Seconds(std::vector<Flow> flows, int nodes,
               SimulationOptions options = {}, Rates rates = Simple()) {
  auto result = SimulateTransfer(flows, PlainNodes(nodes), rates, options);
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->aborted);
  return result->seconds;
}

TEST(SimulateTest, AChainTakesAsLongAsOneHop) {
  EXPECT_NEAR(Seconds({MakeFlow(0, {1}, 1000000)}, 2), 1, 1e-3);
  EXPECT_NEAR(Seconds({MakeFlow(0, {1, 2, 3}, 1000000)}, 4), 1, 1e-3);
}

TEST(SimulateTest, FlowsThatShareALinkShareItsRate) {
  EXPECT_NEAR(
      Seconds({MakeFlow(0, {1}, 1000000), MakeFlow(0, {2}, 1000000)}, 3), 2,
      1e-3);
  EXPECT_NEAR(Seconds({MakeFlow(0, {2}, 1000000), MakeFlow(1, {2}, 500000)}, 3),
              1.5, 1e-3);
  EXPECT_NEAR(
      Seconds({MakeFlow(0, {2}, 1000000), MakeFlow(1, {3}, 1000000)}, 4), 1,
      1e-3);
}

TEST(SimulateTest, WavesRunOneAfterAnother) {
  SimulationOptions options;
  options.by_wave = true;
  EXPECT_NEAR(
      Seconds({MakeFlow(0, {2}, 1000000, 0), MakeFlow(1, {2}, 500000, 1)}, 3,
              options),
      1.5, 1e-3);
}

TEST(SimulateTest, ASlowNodeSlowsWhatComesAfterItNotBefore) {
  SimulationOptions options;
  options.events = {{0, 2, SimulatedEvent::Kind::kSlow, 0.5}};
  auto result = SimulateTransfer({MakeFlow(0, {1, 2, 3}, 1000000)},
                                 PlainNodes(4), Simple(), options);
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->node_seconds[1], 1, 1e-3);
  EXPECT_NEAR(result->node_seconds[2], 2, 1e-3);
  EXPECT_NEAR(result->node_seconds[3], 2, 1e-3);
}

TEST(SimulateTest, ASlowHopCatchesUpWhenItIsFastAgain) {
  SimulationOptions options;
  options.events = {{0.0, 2, SimulatedEvent::Kind::kSlow, 0.5},
                    {0.5, 2, SimulatedEvent::Kind::kSlow, 1}};
  auto result = SimulateTransfer({MakeFlow(0, {1, 2}, 1000000)}, PlainNodes(3),
                                 Simple(), options);
  EXPECT_NEAR(result->node_seconds[1], 1, 1e-3);
  EXPECT_NEAR(result->node_seconds[2], 1.25, 1e-3);
}

TEST(SimulateTest, ADeadNodeIsBypassedAndItsSuccessorGoesOn) {
  SimulationOptions options;
  options.events = {{0.4, 1, SimulatedEvent::Kind::kFail, 1}};
  options.rebuild_seconds = 0.3;
  auto result = SimulateTransfer({MakeFlow(0, {1, 2, 3}, 1000000)},
                                 PlainNodes(4), Simple(), options);
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->aborted);
  EXPECT_LT(result->node_seconds[1], 0);
  EXPECT_NEAR(result->node_seconds[2], 1.3, 1e-3);
  EXPECT_NEAR(result->node_seconds[3], 1.3, 1e-3);
}

TEST(SimulateTest, ADeadSourceAbortsUnlessItsBytesAreOut) {
  SimulationOptions options;
  options.events = {{0.4, 0, SimulatedEvent::Kind::kFail, 1}};
  auto result = SimulateTransfer({MakeFlow(0, {1, 2}, 1000000)}, PlainNodes(3),
                                 Simple(), options);
  EXPECT_TRUE(result->aborted);
  // Node 2 is slow; the source dies when node 1 has everything.
  options.events = {{0, 2, SimulatedEvent::Kind::kSlow, 0.5},
                    {1.5, 0, SimulatedEvent::Kind::kFail, 1}};
  result = SimulateTransfer({MakeFlow(0, {1, 2}, 1000000)}, PlainNodes(3),
                            Simple(), options);
  EXPECT_FALSE(result->aborted);
  EXPECT_NEAR(result->node_seconds[2], 2, 1e-3);
}

TEST(SimulateTest, EventsOnNoNodeAreRefused) {
  SimulationOptions options;
  options.events = {{0, 9, SimulatedEvent::Kind::kFail, 1}};
  EXPECT_EQ(ReasonOf(SimulateTransfer({MakeFlow(0, {1}, 1)}, PlainNodes(2),
                                      Simple(), options)
                         .status()),
            "INVALID_TOPOLOGY");
}

// The cost model against the simulation, over real plans on uniform links: the
// promise is 10%, and SHARDED within 1.05 of the lower bound.
struct ModelCase {
  const char* model;
  DataSharding sharding;
  int ranks, pp, tp, replicas, ep;
  int worker_tp, worker_ep, inference_replicas;
};

TEST(CostTest, PredictsTheSimulationWithinTenPercent) {
  const ModelCase kCases[] = {
      {"qwen2.5-0.5b", DataSharding::kReplicated, 8, 1, 1, 1, 1, 1, 1, 8},
      {"llama-3.1-8b", DataSharding::kDim0, 16, 1, 1, 1, 1, 2, 1, 8},
      {"llama-3.1-8b", DataSharding::kFlatLayer, 16, 1, 1, 1, 1, 8, 1, 4},
      {"llama-3.1-70b", DataSharding::kDim0, 64, 2, 4, 2, 1, 8, 1, 8},
      {"llama-3.1-70b", DataSharding::kFlatTensor, 32, 1, 1, 1, 1, 16, 1, 3},
      {"qwen3-30b-a3b", DataSharding::kDim0, 64, 2, 1, 1, 32, 2, 32, 2},
  };
  for (const ModelCase& c : kCases) {
    SCOPED_TRACE(c.model);
    const ModelConfig config = *FindModel(c.model);
    const Catalog catalog = *ModelCatalog(config);
    TrainerSpec trainer;
    trainer.sharding = c.sharding;
    trainer.ranks = c.ranks;
    trainer.pp = c.pp;
    trainer.tp = c.tp;
    trainer.replicas = c.replicas;
    trainer.ep = c.ep;
    auto shards = TrainerLists(catalog, config, trainer);
    ASSERT_TRUE(shards.ok()) << shards.status();
    WorkerSpec worker;
    worker.tp = c.worker_tp;
    worker.ep = c.worker_ep;
    auto needs = WorkerLists(catalog, config, worker);
    ASSERT_TRUE(needs.ok()) << needs.status();
    std::vector<SourceRank> sources;
    for (int r = 0; r < c.ranks; ++r) {
      sources.push_back(SourceRank{r, r / 8, (*shards)[r]});
    }
    const int first = (c.ranks + 7) / 8;
    std::vector<WorkerNeed> workers;
    const int width = static_cast<int>(needs->size());
    for (int w = 0; w < width * c.inference_replicas; ++w) {
      workers.push_back(WorkerNeed{w, first + w / 8, (*needs)[w % width]});
    }
    const int nodes = first + (static_cast<int>(workers.size()) + 7) / 8;
    auto layout = BuildLayout(catalog, sources, workers, kDefaultBucketBytes);
    ASSERT_TRUE(layout.ok()) << layout.status();
    auto plan = PlanUpdate(*std::move(layout), PlainNodes(nodes));
    ASSERT_TRUE(plan.ok()) << plan.status();
    auto simulated = SimulateTransfer(plan->flows, PlainNodes(nodes), Rates());
    ASSERT_TRUE(simulated.ok());
    EXPECT_NEAR(simulated->seconds / plan->cost.transfer_seconds, 1, 0.1)
        << plan->cost.bound_by;
    EXPECT_LE(plan->cost.transfer_seconds,
              1.05 * plan->cost.lower_bound_seconds);
    EXPECT_LE(simulated->seconds, 1.05 * plan->cost.lower_bound_seconds);
    EXPECT_NEAR(static_cast<double>(simulated->wire_bytes),
                static_cast<double>(plan->cost.wire_bytes), 1e3);
  }
}

TEST(CostTest, SharedProcessorsBindChainsOnOneMachine) {
  std::vector<NodeLabels> nodes = PlainNodes(5);
  for (NodeLabels& node : nodes) node.host = "box";
  Rates rates = Simple();
  rates.host_hops = 2e6;
  const std::vector<Flow> flows = {MakeFlow(0, {1, 2, 3, 4}, 1000000)};
  CostEstimate cost;
  cost.nodes.resize(5);
  EstimateTransfer(flows, nodes, rates, &cost);
  EXPECT_NEAR(cost.transfer_seconds, 2, 1e-3);
  EXPECT_EQ(cost.bound_by, "processors of box");
  auto simulated = SimulateTransfer(flows, nodes, rates);
  EXPECT_NEAR(simulated->seconds, 2, 1e-2);
}

TEST(CostTest, RackUplinksAreCrossedOnce) {
  std::vector<NodeLabels> nodes = PlainNodes(5);
  for (int n = 0; n < 5; ++n) nodes[n].rack = n < 1 ? "a" : "b";
  Rates rates = Simple();
  rates.rack_uplink = 5e5;
  const std::vector<Flow> flows = {MakeFlow(0, {1, 2, 3, 4}, 1000000)};
  CostEstimate cost;
  cost.nodes.resize(5);
  EstimateTransfer(flows, nodes, rates, &cost);
  EXPECT_NEAR(cost.transfer_seconds, 2, 1e-3);
  EXPECT_EQ(cost.bound_by, "uplink of rack a");
  EXPECT_NEAR(SimulateTransfer(flows, nodes, rates)->seconds, 2, 1e-2);
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
