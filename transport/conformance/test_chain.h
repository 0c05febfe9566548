#ifndef WEIGHTSYNC_TRANSPORT_CONFORMANCE_TEST_CHAIN_H_
#define WEIGHTSYNC_TRANSPORT_CONFORMANCE_TEST_CHAIN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/conformance/group_conformance.h"
#include "transport/group.h"
#include "transport/landing.h"

namespace weightsync {
namespace transport {

// Memory and landing of one bucket on one node, of 16-bit elements and, at the
// end of an odd size, one byte. Buckets of odd ids lie in a file too, at some
// odd place of it.
class TestBucket {
 public:
  TestBucket(uint64_t id, int64_t size);
  ~TestBucket();
  TestBucket(const TestBucket&) = delete;
  TestBucket& operator=(const TestBucket&) = delete;
  // Random bytes by `seed`, all frames ready.
  void FillAndMark(uint32_t seed);
  // Random bytes, nothing marked.
  void Fill(uint32_t seed);
  // Marks one frame with the digest of its bytes.
  void Mark(uint32_t frame);
  // As if an earlier group had brought this frame here.
  void TakeFrom(const TestBucket& other, uint32_t frame);

  const std::shared_ptr<Landing>& landing() const { return landing_; }
  absl::Span<char> bytes() { return bytes_; }
  absl::Span<const char> bytes() const { return bytes_; }

 private:
  std::vector<char> memory_;
  int file_ = -1;
  char* map_ = nullptr;
  size_t map_bytes_ = 0;
  absl::Span<char> bytes_;
  std::shared_ptr<Landing> landing_;
};

// The buckets of one node.
class TestStore {
 public:
  explicit TestStore(const std::vector<int64_t>& sizes, uint64_t first_id = 0);
  void FillAndMark(uint32_t seed);
  std::vector<std::shared_ptr<Landing>> landings() const;
  TestBucket& operator[](size_t i) { return *buckets_[i]; }
  const TestBucket& operator[](size_t i) const { return *buckets_[i]; }
  size_t size() const { return buckets_.size(); }
  int64_t frames() const;

 private:
  std::vector<std::unique_ptr<TestBucket>> buckets_;
};

// Every bucket of `got` complete, with the bytes and digests of `want`.
void ExpectSameBytes(const TestStore& want, const TestStore& got);

struct ChainOptions {
  Epoch epoch{1, 1};
  std::string group_id = "update/flow";
  std::string secret = "s3cret";
  absl::Duration peer_deadline = absl::Seconds(5);
  std::function<void(const absl::Status&)> on_edge_failed;
};

// Nodes "a", "b", ... in this process.
class TestNodes {
 public:
  TestNodes(const GroupNodeMaker& make_node, int count,
            FaultPolicy* faults = nullptr);
  GroupFactory& node(int i) { return *nodes_[i]; }
  // The spec of a chain over the given nodes, as seen by its member `self`.
  GroupSpec Spec(const std::vector<int>& chain, int self,
                 const ChainOptions& options = {}) const;
  std::unique_ptr<Group> NewGroup(const std::vector<int>& chain, int self,
                                  const ChainOptions& options = {});
  // A group for each member.
  std::vector<std::unique_ptr<Group>> NewGroups(
      const std::vector<int>& chain, const ChainOptions& options = {});

 private:
  std::vector<std::unique_ptr<GroupFactory>> nodes_;
};

// Runs `step` on all groups at once; the results in order.
std::vector<absl::Status> OnAll(
    const std::vector<std::unique_ptr<Group>>& groups,
    const std::function<absl::Status(Group&, size_t)>& step);
void JoinAll(const std::vector<std::unique_ptr<Group>>& groups);
void MoveAll(const std::vector<std::unique_ptr<Group>>& groups,
             const std::vector<TestStore*>& stores);
std::vector<absl::Status> WaitAll(
    const std::vector<std::unique_ptr<Group>>& groups);

// "EDGE_LOST a->b" and the like, "OK", or the whole status if it has no reason.
std::string Blame(const absl::Status& status);

// Progress towards one neighbour.
PeerProgress PeerOf(const Group& group, bool upstream);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CONFORMANCE_TEST_CHAIN_H_
