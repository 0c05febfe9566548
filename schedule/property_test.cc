// Thousands of random layouts against a brute-force map of elements: whatever
// the sharding on either side, the bytes of every worker end as the trainer's,
// every one written exactly once; every node gets what its workers need and
// nothing that none of them needs.
//
// Elements are uint32 and hold (ordinal, flat index), so that a wrong element
// cannot pass for a right one.

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "schedule/error.h"
#include "schedule/layout.h"
#include "schedule/parallel.h"
#include "schedule/plan.h"
#include "schedule/policy.h"
#include "schedule/reshard.h"
#include "schedule/testing.h"

namespace weightsync {
namespace schedule {
namespace {

constexpr uint32_t kUnwritten = 0xFFFFFFFFu;

uint32_t ElementOf(uint32_t ordinal, int64_t flat) {
  return (ordinal + 1) << 16 | static_cast<uint32_t>(flat);
}

class World {
 public:
  explicit World(uint32_t seed) : rng_(seed) {}

  int Uniform(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(rng_);
  }
  bool Chance(int percent) { return Uniform(1, 100) <= percent; }

  void Make() {
    MakeCatalog();
    MakeSources();
    MakeWorkers();
    bucket_bytes_ = Chance(50) ? 16 * Uniform(1, 12) : Uniform(16, 4000);
  }

  void Check() {
    auto layout = BuildLayout(*catalog_, Sources(), Workers(), bucket_bytes_);
    ASSERT_TRUE(layout.ok()) << layout.status();
    auto again = BuildLayout(*catalog_, Sources(), Workers(), bucket_bytes_);
    EXPECT_EQ(layout->digest, again->digest);
    CheckPieces(*layout);
    if (::testing::Test::HasFatalFailure()) return;
    CheckNeeds(*layout);
    CheckFlows(*layout);
    CheckBytes(*layout);
  }

 private:
  // One party's tensors in memory of its own.
  struct Party {
    int32_t number = 0;
    int32_t node = 0;
    std::vector<MemoryBox> boxes;
    std::vector<std::vector<uint32_t>> memory;
  };

  void MakeCatalog() {
    std::vector<Param> params;
    const int count = Uniform(1, 4);
    for (int i = 0; i < count; ++i) {
      Dims shape;
      const int dims = Uniform(0, 4);
      for (int d = 0; d < dims; ++d) shape.push_back(Uniform(1, 9));
      params.push_back(
          testing::MakeParam(absl::StrCat("p", i), shape, DType::kU32));
    }
    catalog_ = Catalog::Create(std::move(params));
    ASSERT_TRUE(catalog_.ok());
  }

  // A partition of a tensor into disjoint boxes, by one of the ways in use or
  // by cutting at random.
  std::vector<Box> Partition(const Dims& shape) {
    std::vector<Box> boxes;
    const Box whole = WholeBox(shape);
    const int ways = Uniform(1, 5);
    switch (shape.empty() ? 0 : Uniform(0, 4)) {
      case 0:
        boxes.push_back(whole);
        break;
      case 1:  // FSDP2, with empty last ranks
        for (int i = 0; i < ways; ++i) {
          const Range range = CeilChunk(shape[0], ways, i);
          if (!range.empty()) {
            boxes.push_back(SliceBox(shape, 0, range.begin, range.end));
          }
        }
        break;
      case 2: {  // tensor parallel in any dimension
        const int d = Uniform(0, static_cast<int>(shape.size()) - 1);
        for (int i = 0; i < ways; ++i) {
          const int64_t begin = shape[d] * i / ways;
          const int64_t end = shape[d] * (i + 1) / ways;
          if (begin < end) boxes.push_back(SliceBox(shape, d, begin, end));
        }
        break;
      }
      case 3: {  // FSDP1: flat
        const int64_t total = whole.Volume();
        for (int i = 0; i < ways; ++i) {
          const Range range = CeilChunk(total, ways, i);
          BoxesOfFlatRange(shape, range.begin, range.end, &boxes);
        }
        break;
      }
      default:
        Shatter(whole, 3, &boxes);
    }
    std::shuffle(boxes.begin(), boxes.end(), rng_);
    return boxes;
  }

  void Shatter(const Box& box, int depth, std::vector<Box>* out) {
    const int d = Uniform(0, box.dims() - 1);
    if (depth == 0 || box.extent[d] < 2 || Chance(20)) {
      out->push_back(box);
      return;
    }
    const int64_t at = Uniform(1, static_cast<int>(box.extent[d]) - 1);
    Box left = box;
    left.extent[d] = at;
    Box right = box;
    right.offset[d] += at;
    right.extent[d] -= at;
    Shatter(left, depth - 1, out);
    Shatter(right, depth - 1, out);
  }

  void MakeSources() {
    trainers_.resize(Uniform(1, 6));
    for (size_t r = 0; r < trainers_.size(); ++r) {
      trainers_[r].number = static_cast<int32_t>(10 + r);
      trainers_[r].node = Uniform(0, 3);
    }
    for (uint32_t o = 0; o < catalog_->size(); ++o) {
      for (const Box& box : Partition(catalog_->param(o).shape)) {
        // One holder, or several replicas.
        const int holders = Chance(30) ? Uniform(1, 3) : 1;
        std::set<int> chosen;
        for (int h = 0; h < holders; ++h) {
          chosen.insert(Uniform(0, static_cast<int>(trainers_.size()) - 1));
        }
        for (int r : chosen) Place(o, box, &trainers_[r]);
      }
    }
    for (Party& trainer : trainers_) {
      for (const MemoryBox& box : trainer.boxes) {
        ForEachElement(box, [&](uint32_t value, size_t at) {
          trainer.memory[box.memory][at] = value;
        });
      }
    }
  }

  void MakeWorkers() {
    workers_.resize(Uniform(0, 5));
    for (size_t w = 0; w < workers_.size(); ++w) {
      workers_[w].number = static_cast<int32_t>(w);
      workers_[w].node = Uniform(0, 5);
      for (uint32_t o = 0; o < catalog_->size(); ++o) {
        if (Chance(15)) continue;
        const std::vector<Box> parts = Partition(catalog_->param(o).shape);
        // Some of the parts; now and then one twice (an untied copy).
        for (const Box& box : parts) {
          if (Chance(60)) Place(o, box, &workers_[w]);
          if (Chance(5)) Place(o, box, &workers_[w]);
        }
      }
    }
  }

  // Puts the box into the party's memory: dense, padded, or transposed; or
  // behind the last one (fused).
  void Place(uint32_t ordinal, const Box& box, Party* party) {
    MemoryBox placed;
    placed.ordinal = ordinal;
    placed.box = box;
    const int n = box.dims();
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    if (Chance(25)) std::shuffle(order.begin(), order.end(), rng_);
    placed.strides.resize(n);
    int64_t stride = 4;
    for (int i = n - 1; i >= 0; --i) {
      placed.strides[order[i]] = stride;
      stride *= box.extent[order[i]] + (Chance(15) ? 1 : 0);
    }
    const auto words = static_cast<size_t>(stride / 4);
    if (!party->memory.empty() && Chance(30)) {
      placed.memory = static_cast<int32_t>(party->memory.size()) - 1;
    } else {
      placed.memory = static_cast<int32_t>(party->memory.size());
      party->memory.emplace_back();
    }
    std::vector<uint32_t>& memory = party->memory[placed.memory];
    placed.offset = static_cast<int64_t>(memory.size()) * 4;
    memory.resize(memory.size() + words, kUnwritten);
    party->boxes.push_back(std::move(placed));
  }

  // fn(value of the element, index of its word in the memory).
  template <typename Fn>
  void ForEachElement(const MemoryBox& box, Fn fn) {
    ForEachFlat(box.ordinal, box.box, [&](int64_t flat, const Dims& index) {
      int64_t at = box.offset;
      for (int d = 0; d < box.box.dims(); ++d) {
        at += (index[d] - box.box.offset[d]) * box.strides[d];
      }
      fn(ElementOf(box.ordinal, flat), static_cast<size_t>(at / 4));
    });
  }

  template <typename Fn>
  void ForEachFlat(uint32_t ordinal, const Box& box, Fn fn) {
    const Dims& shape = catalog_->param(ordinal).shape;
    Dims index = box.offset;
    while (true) {
      int64_t flat = 0;
      for (size_t d = 0; d < shape.size(); ++d)
        flat = flat * shape[d] + index[d];
      fn(flat, index);
      int d = box.dims() - 1;
      for (; d >= 0; --d) {
        if (++index[d] < box.end(d)) break;
        index[d] = box.offset[d];
      }
      if (d < 0) return;
    }
  }

  static BoxListRef ListOf(const Party& party) {
    std::vector<OrdinalBox> boxes;
    for (const MemoryBox& box : party.boxes) {
      boxes.push_back(testing::On(box.ordinal, box.box));
    }
    return MakeBoxList(std::move(boxes));
  }
  std::vector<SourceRank> Sources() const {
    std::vector<SourceRank> sources;
    for (const Party& t : trainers_) {
      sources.push_back(SourceRank{t.number, t.node, ListOf(t)});
    }
    return sources;
  }
  std::vector<WorkerNeed> Workers() const {
    std::vector<WorkerNeed> workers;
    for (const Party& w : workers_) {
      workers.push_back(WorkerNeed{w.number, w.node, ListOf(w)});
    }
    return workers;
  }

  // Buckets are aligned, in order, of the right size, and hold every element
  // exactly once.
  void CheckPieces(const UpdateLayout& layout) {
    std::set<std::pair<uint32_t, int64_t>> seen;
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      const Bucket& bucket = layout.bucket(b);
      ASSERT_GT(bucket.bytes, 0);
      ASSERT_LE(bucket.bytes, bucket_bytes_);
      int64_t end = 0;
      uint32_t last = 0;
      for (const Piece& piece : layout.pieces(b)) {
        ASSERT_EQ(piece.offset % kPieceAlignment, 0);
        ASSERT_GE(piece.offset, end);
        ASSERT_GE(piece.ordinal, last);
        last = piece.ordinal;
        end = piece.offset + piece.box.Volume() * 4;
        int64_t offset = piece.offset;
        for (const ElementRun& run : RunsOf(*catalog_, piece)) {
          ASSERT_EQ(run.bucket_offset, offset);
          offset += run.element_count * 4;
          for (int64_t i = 0; i < run.element_count; ++i) {
            ASSERT_TRUE(
                seen.emplace(piece.ordinal, run.first_element + i).second);
          }
        }
        ASSERT_EQ(offset, end);
      }
      ASSERT_EQ(end, bucket.bytes);
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), catalog_->total_elements());
  }

  // A bucket's class is exactly the nodes that need each of its elements.
  void CheckNeeds(const UpdateLayout& layout) {
    std::map<std::pair<uint32_t, int64_t>, std::set<int32_t>> need;
    for (const Party& worker : workers_) {
      for (const MemoryBox& box : worker.boxes) {
        ForEachFlat(box.ordinal, box.box, [&](int64_t flat, const Dims&) {
          need[{box.ordinal, flat}].insert(worker.node);
        });
      }
    }
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      const std::set<int32_t> nodes(layout.need_nodes(b).begin(),
                                    layout.need_nodes(b).end());
      for (const Piece& piece : layout.pieces(b)) {
        ForEachFlat(piece.ordinal, piece.box, [&](int64_t flat, const Dims&) {
          auto it = need.find({piece.ordinal, flat});
          ASSERT_EQ(it == need.end() ? std::set<int32_t>() : it->second, nodes);
        });
      }
    }
  }

  // Every policy brings each bucket to each node that needs it, once, from a
  // node that has it.
  void CheckFlows(const UpdateLayout& layout) {
    const std::vector<NodeLabels> nodes = testing::PlainNodes(6);
    auto plan = PlanUpdate(layout, nodes);
    ASSERT_TRUE(plan.ok()) << plan.status();
    CheckDelivery(layout, {}, plan->flows);
    EXPECT_GE(plan->cost.transfer_seconds,
              plan->cost.lower_bound_seconds * (1 - 1e-9));

    std::vector<PairedRoute> routes;
    for (const Party& worker : workers_) {
      routes.push_back(
          PairedRoute{trainers_[worker.number % trainers_.size()].node,
                      worker.node, ListOf(worker)});
    }
    auto paired = RoutePaired(layout, nodes, routes, /*gather=*/true);
    ASSERT_TRUE(paired.ok()) << paired.status();
    CheckDelivery(layout, paired->gather, paired->flows);

    const std::vector<int32_t> heads(6, trainers_[0].node);
    auto broadcast = RouteBroadcast(layout, nodes, heads, /*gather=*/true);
    ASSERT_TRUE(broadcast.ok()) << broadcast.status();
    CheckDelivery(layout, broadcast->gather, broadcast->flows);
  }

  void CheckDelivery(const UpdateLayout& layout,
                     const std::vector<Flow>& gather,
                     const std::vector<Flow>& flows) {
    std::set<std::pair<int32_t, uint32_t>> held;
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      held.emplace(layout.bucket(b).source_node, b);
    }
    for (const std::vector<Flow>* phase : {&gather, &flows}) {
      const auto before = held;
      for (const Flow& flow : *phase) {
        ASSERT_FALSE(flow.chain.empty());
        int64_t bytes = 0;
        for (uint32_t b : flow.buckets) {
          bytes += layout.bucket(b).bytes;
          ASSERT_TRUE(before.count({flow.source_node, b}));
          for (int32_t node : flow.chain) {
            const bool fresh = held.emplace(node, b).second;
            // A node may be sent again what it got in the gather.
            ASSERT_TRUE(fresh || before.count({node, b}));
          }
        }
        ASSERT_EQ(bytes, flow.bytes);
      }
      // No link carries two flows of one wave.
      std::set<std::tuple<int32_t, int32_t, bool>> used;
      for (const Flow& flow : *phase) {
        int32_t from = flow.source_node;
        for (int32_t to : flow.chain) {
          ASSERT_TRUE(used.emplace(flow.wave, from, true).second);
          ASSERT_TRUE(used.emplace(flow.wave, to, false).second);
          from = to;
        }
      }
    }
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      for (int32_t node : layout.need_nodes(b)) {
        ASSERT_TRUE(held.count({node, b}));
      }
    }
  }

  // Runs the copies on real bytes.
  void CheckBytes(const UpdateLayout& layout) {
    std::vector<std::vector<uint32_t>> buckets(layout.bucket_count());
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      buckets[b].assign((layout.bucket(b).bytes + 3) / 4, kUnwritten);
    }
    for (const Party& trainer : trainers_) {
      auto copies =
          SnapshotCopies(*catalog_, layout, trainer.number, trainer.boxes);
      ASSERT_TRUE(copies.ok()) << copies.status();
      for (const BucketCopy& copy : *copies) {
        RunCopy(copy.copy, trainer.memory[copy.memory], &buckets[copy.bucket]);
      }
    }
    for (uint32_t b = 0; b < layout.bucket_count(); ++b) {
      for (const Piece& piece : layout.pieces(b)) {
        for (const ElementRun& run : RunsOf(*catalog_, piece)) {
          for (int64_t i = 0; i < run.element_count; ++i) {
            ASSERT_EQ(buckets[b][run.bucket_offset / 4 + i],
                      ElementOf(piece.ordinal, run.first_element + i));
          }
        }
      }
    }
    for (Party& worker : workers_) {
      auto copies = ApplyCopies(*catalog_, layout, worker.boxes);
      ASSERT_TRUE(copies.ok()) << copies.status();
      for (const BucketCopy& copy : *copies) {
        const std::vector<int32_t>& nodes = layout.need_nodes(copy.bucket);
        ASSERT_TRUE(
            std::binary_search(nodes.begin(), nodes.end(), worker.node));
        RunCopy(copy.copy, buckets[copy.bucket], &worker.memory[copy.memory]);
      }
      size_t written = 0;
      for (const MemoryBox& box : worker.boxes) {
        ForEachElement(box, [&](uint32_t value, size_t at) {
          ASSERT_EQ(worker.memory[box.memory][at], value);
          ++written;
        });
      }
      // Nothing beside the boxes was touched.
      size_t touched = 0;
      for (const std::vector<uint32_t>& memory : worker.memory) {
        for (uint32_t word : memory) touched += word != kUnwritten;
      }
      ASSERT_EQ(touched, written);
    }
  }

  // Refuses to write a word twice.
  static void RunCopy(const StridedCopy& copy, const std::vector<uint32_t>& src,
                      std::vector<uint32_t>* dst) {
    ASSERT_EQ(copy.run_bytes % 4, 0);
    for (int64_t run = 0; run < copy.Runs(); ++run) {
      int64_t from = copy.src_offset;
      int64_t to = copy.dst_offset;
      int64_t rest = run;
      for (int d = static_cast<int>(copy.extents.size()) - 1; d >= 0; --d) {
        from += rest % copy.extents[d] * copy.src_strides[d];
        to += rest % copy.extents[d] * copy.dst_strides[d];
        rest /= copy.extents[d];
      }
      for (int64_t i = 0; i < copy.run_bytes / 4; ++i) {
        ASSERT_GE(from, 0);
        ASSERT_LT(from / 4 + i, static_cast<int64_t>(src.size()));
        ASSERT_LT(to / 4 + i, static_cast<int64_t>(dst->size()));
        ASSERT_EQ((*dst)[to / 4 + i], kUnwritten) << "written twice";
        (*dst)[to / 4 + i] = src[from / 4 + i];
      }
    }
  }

  std::mt19937 rng_;
  absl::StatusOr<Catalog> catalog_;
  std::vector<Party> trainers_;
  std::vector<Party> workers_;
  int64_t bucket_bytes_ = 0;
};

TEST(PropertyTest, EveryElementArrivesOnceFromACorrectSource) {
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    world.Make();
    world.Check();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace schedule
}  // namespace weightsync
