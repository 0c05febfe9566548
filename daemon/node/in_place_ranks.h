// Ranks of a node that publish IN_PLACE, for tests.

#ifndef WEIGHTSYNC_DAEMON_NODE_IN_PLACE_RANKS_H_
#define WEIGHTSYNC_DAEMON_NODE_IN_PLACE_RANKS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/node/convert.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace testing {

// Expects that worker w of the layout has exactly the model's bytes.
inline void ExpectBytes(const v1::DefineLayout& define, const ModelBytes& model,
                        int w, const std::vector<std::string>& live) {
  const v1::LayoutWorker& worker = define.workers(w);
  ASSERT_EQ(static_cast<int>(live.size()), worker.boxes_size());
  for (int i = 0; i < worker.boxes_size(); ++i) {
    const int ordinal = worker.boxes(i).ordinal();
    const v1::Parameter& parameter = define.catalog(ordinal);
    EXPECT_TRUE(live[static_cast<size_t>(i)] == BoxBytes(parameter,
                                                         model.tensor(ordinal),
                                                         worker.boxes(i).box()))
        << parameter.name() << " of worker " << w;
  }
}

// The ranks of a model, all of them of `node`, publishing IN_PLACE on threads
// of their own; with their tensors on `device`, where one is given.
class InPlaceRanks {
 public:
  InPlaceRanks(TestNode* node, const v1::DefineLayout& define,
               const std::string& update_id, const ModelBytes& model,
               bool verify_source = false, const std::string& device = "") {
    for (const v1::LayoutSource& source : define.sources()) {
      memory.push_back(MakeRankMemory(define, model, source.rank()));
      if (device.empty()) continue;
      node->gpus().SetTensors(memory.back().bytes.data(),
                              static_cast<int64_t>(memory.back().bytes.size()),
                              device);
      node->placement().SetRank(define.model(), source.rank(), device);
    }
    results.resize(memory.size(), absl::UnknownError("runs"));
    returned = std::vector<std::atomic<bool>>(memory.size());
    for (size_t r = 0; r < memory.size(); ++r) {
      threads.emplace_back([=, &define] {
        auto result = node->Snapshot(define, update_id, 1, static_cast<int>(r),
                                     memory[r], std::make_shared<CancelFlag>(),
                                     /*in_place=*/true, verify_source);
        results[r] = result.status();
        returned[r] = true;
      });
    }
  }
  ~InPlaceRanks() { Join(); }
  void Join() {
    for (std::thread& thread : threads) {
      if (thread.joinable()) thread.join();
    }
  }
  // Takes the digests that the ranks report into the manifest.
  void Collect(TestNode* node, TestUpdate* update) {
    for (size_t r = 0; r < memory.size(); ++r) {
      auto report = node->WaitFor([](const v1::NodeReport& report) {
        return report.has_rank_snapshotted();
      });
      ASSERT_EQ(report.rank_snapshotted().failure().reason(), "");
      for (const auto& bucket : report.rank_snapshotted().buckets()) {
        *update->manifest().add_buckets() = bucket;
      }
      for (const auto& tensor : report.rank_snapshotted().tensors()) {
        tensors[tensor.ordinal()] += FromProto(tensor.digest());
      }
    }
  }

  // What all ranks say of each parameter is its digest.
  void ExpectTensors(const v1::DefineLayout& define, const ModelBytes& model) {
    ASSERT_EQ(static_cast<int>(tensors.size()), define.catalog_size());
    for (const auto& tensor : tensors) {
      const std::string& bytes = model.tensor(tensor.first);
      transport::DigestRun run;
      run.ordinal = static_cast<uint32_t>(tensor.first);
      run.element_bytes = static_cast<int32_t>(
          schedule::DTypeSize(FromProto(define.catalog(tensor.first).dtype())));
      run.element_count =
          static_cast<int64_t>(bytes.size()) / run.element_bytes;
      transport::Digest expected;
      transport::DigestAccumulate(bytes.data(), run, &expected);
      EXPECT_TRUE(expected == tensor.second)
          << define.catalog(tensor.first).name();
    }
  }

  std::map<int, transport::Digest> tensors;
  std::vector<RankMemory> memory;
  std::vector<absl::Status> results;
  std::vector<std::atomic<bool>> returned;
  std::vector<std::thread> threads;
};

}  // namespace testing
}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_IN_PLACE_RANKS_H_
