#include "schedule/route.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/plan.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

using ::testing::ElementsAre;
using testing::Everything;
using ::testing::IsEmpty;
using testing::MakeBox;
using testing::MakeParam;
using testing::On;
using testing::PlainNodes;

Catalog OneMatrix() { return *Catalog::Create({MakeParam("w", {1024, 16})}); }

// Rank r on node r holds the r-th part of the rows.
std::vector<SourceRank> RowShards(const Catalog& catalog, int ranks) {
  const Dims& shape = catalog.param(0).shape;
  std::vector<SourceRank> sources;
  for (int r = 0; r < ranks; ++r) {
    sources.push_back(
        SourceRank{r, r,
                   MakeBoxList({On(0, SliceBox(shape, 0, shape[0] * r / ranks,
                                               shape[0] * (r + 1) / ranks))})});
  }
  return sources;
}

TEST(ChainTest, GoesThroughTheSourcesRackThenZoneThenTheRest) {
  std::vector<NodeLabels> nodes(8);
  const char* kZones[] = {"a", "a", "a", "a", "b", "b", "b", "a"};
  const char* kRacks[] = {"1", "2", "1", "2", "1", "2", "1", "1"};
  for (int n = 0; n < 8; ++n) {
    nodes[n].zone = kZones[n];
    nodes[n].rack = kRacks[n];
    nodes[n].name = absl::StrCat("n", n);
  }
  EXPECT_THAT(ChainOrder(nodes, 0, {1, 2, 3, 4, 5, 6, 7}, 0),
              ElementsAre(2, 7, 1, 3, 4, 6, 5));
  EXPECT_THAT(ChainOrder(nodes, 0, {1, 2, 3, 4, 5, 6, 7}, 1),
              ElementsAre(7, 2, 3, 1, 5, 6, 4));
}

TEST(RouteTest, OneFlowPerSourceNodeAndClass) {
  const Catalog catalog = OneMatrix();
  auto layout = BuildLayout(catalog, RowShards(catalog, 2),
                            {WorkerNeed{0, 2, Everything(catalog)},
                             WorkerNeed{1, 3, Everything(catalog)}},
                            1024);
  ASSERT_TRUE(layout.ok());
  auto flows = RouteFlows(*layout, PlainNodes(4));
  ASSERT_TRUE(flows.ok()) << flows.status();
  ASSERT_EQ(flows->size(), 2u);
  EXPECT_THAT((*flows)[0].chain, ElementsAre(2, 3));
  EXPECT_THAT((*flows)[1].chain, ElementsAre(3, 2));
  EXPECT_EQ((*flows)[0].bytes, catalog.total_bytes() / 2);
  EXPECT_NE((*flows)[0].wave, (*flows)[1].wave) << "both enter node 2";
  std::set<uint32_t> buckets;
  for (const Flow& flow : *flows) {
    buckets.insert(flow.buckets.begin(), flow.buckets.end());
  }
  EXPECT_EQ(buckets.size(), layout->bucket_count());
}

TEST(RouteTest, ANodeThatHoldsTheSourceIsNotInTheChain) {
  const Catalog catalog = OneMatrix();
  auto layout = BuildLayout(catalog, RowShards(catalog, 1),
                            {WorkerNeed{0, 0, Everything(catalog)},
                             WorkerNeed{1, 1, Everything(catalog)}},
                            1 << 20);
  auto flows = RouteFlows(*layout, PlainNodes(2));
  ASSERT_EQ(flows->size(), 1u);
  EXPECT_THAT((*flows)[0].chain, ElementsAre(1));

  layout = BuildLayout(catalog, RowShards(catalog, 1),
                       {WorkerNeed{0, 0, Everything(catalog)}}, 1 << 20);
  EXPECT_THAT(*RouteFlows(*layout, PlainNodes(2)), IsEmpty());
  layout = BuildLayout(catalog, RowShards(catalog, 1), {}, 1 << 20);
  EXPECT_THAT(*RouteFlows(*layout, PlainNodes(2)), IsEmpty());
}

TEST(RouteTest, DisjointFlowsShareAWave) {
  const Catalog catalog = OneMatrix();
  const Dims& shape = catalog.param(0).shape;
  // Worker nodes 2 and 3 need what rank 0 and rank 1 hold.
  auto layout = BuildLayout(
      catalog, RowShards(catalog, 2),
      {WorkerNeed{0, 2, MakeBoxList({On(0, SliceBox(shape, 0, 0, 512))})},
       WorkerNeed{1, 3, MakeBoxList({On(0, SliceBox(shape, 0, 512, 1024))})}},
      1 << 20);
  auto flows = RouteFlows(*layout, PlainNodes(4));
  ASSERT_EQ(flows->size(), 2u);
  EXPECT_EQ((*flows)[0].wave, 0);
  EXPECT_EQ((*flows)[1].wave, 0);
}

TEST(RouteTest, SlowNodesGoToTheTail) {
  const Catalog catalog = OneMatrix();
  std::vector<WorkerNeed> workers;
  for (int n = 1; n < 5; ++n) {
    workers.push_back(WorkerNeed{n, n, Everything(catalog)});
  }
  auto layout = BuildLayout(catalog, RowShards(catalog, 1), workers, 1 << 20);
  RouteOptions options;
  options.last = {3, 1};
  auto flows = RouteFlows(*layout, PlainNodes(5), options);
  EXPECT_THAT((*flows)[0].chain, ElementsAre(2, 4, 3, 1));
}

TEST(RouteTest, UnknownNodesAreRefused) {
  const Catalog catalog = OneMatrix();
  auto layout = BuildLayout(catalog, RowShards(catalog, 1),
                            {WorkerNeed{0, 5, Everything(catalog)}}, 1 << 20);
  EXPECT_EQ(ReasonOf(RouteFlows(*layout, PlainNodes(2)).status()),
            "INVALID_TOPOLOGY");
}

TEST(PlanTest, SameInputsSameDigestAndTheModelsTime) {
  const Catalog catalog = OneMatrix();
  auto layout = BuildLayout(catalog, RowShards(catalog, 2),
                            {WorkerNeed{0, 2, Everything(catalog)},
                             WorkerNeed{1, 3, Everything(catalog)}},
                            1 << 20);
  PlanOptions options;
  options.rates.link = 1e6;
  options.rates.hop_latency = 0;
  auto plan = PlanUpdate(*layout, PlainNodes(4), options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->digest, PlanUpdate(*layout, PlainNodes(4), options)->digest);
  EXPECT_EQ(plan->cost.bound_by, "link into n02");
  EXPECT_EQ(plan->cost.wire_bytes, 2 * catalog.total_bytes());
  EXPECT_NEAR(plan->cost.lower_bound_seconds, catalog.total_bytes() / 1e6,
              1e-9);
  options.rates.link = 0;
  EXPECT_EQ(ReasonOf(PlanUpdate(*layout, PlainNodes(4), options).status()),
            "INVALID_RATE");
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
