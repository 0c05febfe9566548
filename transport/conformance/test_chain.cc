#include "transport/conformance/test_chain.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "transport/digest_map.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

std::shared_ptr<const DigestMap> MapOf(uint64_t id, int64_t size) {
  std::vector<PlacedRun> runs;
  const uint32_t ordinal = static_cast<uint32_t>(id);
  // Two tensors, so that some frame holds parts of both.
  const int64_t first = size / 3 / 2;
  const int64_t second = size / 2 - first;
  if (first > 0) runs.push_back({0, DigestRun{ordinal, 5, first, 2}});
  if (second > 0)
    runs.push_back({first * 2, DigestRun{ordinal + 1000, 0, second, 2}});
  if (size % 2 != 0)
    runs.push_back({size - 1, DigestRun{ordinal + 2000, 0, 1, 1}});
  return std::make_shared<RunDigestMap>(std::move(runs));
}

}  // namespace

TestBucket::TestBucket(uint64_t id, int64_t size) {
  constexpr int64_t kPlace = 1234;
  FileRange range;
  if (id % 2 == 1) {
    file_ = memfd_create("test_bucket", MFD_CLOEXEC);
    map_bytes_ = static_cast<size_t>(kPlace + size);
    EXPECT_EQ(ftruncate(file_, static_cast<off_t>(map_bytes_)), 0);
    map_ = static_cast<char*>(mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE,
                                   MAP_SHARED, file_, 0));
    EXPECT_NE(map_, MAP_FAILED);
    range = {file_, kPlace};
    bytes_ = absl::MakeSpan(map_ + kPlace, static_cast<size_t>(size));
  } else {
    memory_.resize(static_cast<size_t>(size));
    bytes_ = absl::MakeSpan(memory_);
  }
  landing_ = std::make_shared<Landing>(id, bytes_, MapOf(id, size), range);
}

TestBucket::~TestBucket() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
  if (file_ >= 0) close(file_);
}

void TestBucket::Fill(uint32_t seed) {
  std::mt19937 random(seed);
  for (char& byte : bytes_) byte = static_cast<char>(random());
}

void TestBucket::FillAndMark(uint32_t seed) {
  Fill(seed);
  EXPECT_TRUE(landing_->MarkAllReady().ok());
}

void TestBucket::Mark(uint32_t frame) {
  landing_->MarkReady(frame, landing_->ComputeDigest(frame));
}

void TestBucket::TakeFrom(const TestBucket& other, uint32_t frame) {
  const absl::Span<char> from = other.landing_->frame(frame);
  std::memcpy(landing_->frame(frame).data(), from.data(), from.size());
  Mark(frame);
}

TestStore::TestStore(const std::vector<int64_t>& sizes, uint64_t first_id) {
  for (size_t i = 0; i < sizes.size(); ++i)
    buckets_.push_back(std::make_unique<TestBucket>(first_id + i, sizes[i]));
}

void TestStore::FillAndMark(uint32_t seed) {
  for (const auto& bucket : buckets_) bucket->FillAndMark(seed++);
}

std::vector<std::shared_ptr<Landing>> TestStore::landings() const {
  std::vector<std::shared_ptr<Landing>> landings;
  for (const auto& bucket : buckets_) landings.push_back(bucket->landing());
  return landings;
}

int64_t TestStore::frames() const {
  int64_t frames = 0;
  for (const auto& bucket : buckets_)
    frames += bucket->landing()->frame_count();
  return frames;
}

void ExpectSameBytes(const TestStore& want, const TestStore& got) {
  ASSERT_EQ(want.size(), got.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_TRUE(got[i].landing()->complete()) << "bucket " << i;
    EXPECT_TRUE(want[i].bytes() == got[i].bytes()) << "bucket " << i;
    EXPECT_TRUE(want[i].landing()->bucket_digest() ==
                got[i].landing()->bucket_digest())
        << "bucket " << i;
  }
}

TestNodes::TestNodes(const GroupNodeMaker& make_node, int count,
                     FaultPolicy* faults) {
  for (int i = 0; i < count; ++i) nodes_.push_back(make_node(faults));
}

GroupSpec TestNodes::Spec(const std::vector<int>& chain, int self,
                          const ChainOptions& options) const {
  GroupSpec spec;
  spec.cluster_id = kConformanceCluster;
  spec.group_id = options.group_id;
  spec.epoch = options.epoch;
  spec.secret = options.secret;
  for (const int i : chain)
    spec.members.push_back(
        {std::string(1, static_cast<char>('a' + i)), nodes_[i]->address()});
  spec.self = self;
  return spec;
}

std::unique_ptr<Group> TestNodes::NewGroup(const std::vector<int>& chain,
                                           int self,
                                           const ChainOptions& options) {
  GroupOptions group_options;
  group_options.peer_deadline = options.peer_deadline;
  group_options.on_edge_failed = options.on_edge_failed;
  auto group =
      nodes_[chain[self]]->NewGroup(Spec(chain, self, options), group_options);
  EXPECT_TRUE(group.ok()) << group.status();
  return group.ok() ? *std::move(group) : nullptr;
}

std::vector<std::unique_ptr<Group>> TestNodes::NewGroups(
    const std::vector<int>& chain, const ChainOptions& options) {
  std::vector<std::unique_ptr<Group>> groups;
  for (size_t i = 0; i < chain.size(); ++i)
    groups.push_back(NewGroup(chain, static_cast<int>(i), options));
  return groups;
}

std::vector<absl::Status> OnAll(
    const std::vector<std::unique_ptr<Group>>& groups,
    const std::function<absl::Status(Group&, size_t)>& step) {
  std::vector<absl::Status> results(groups.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = step(*groups[i], i); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

void JoinAll(const std::vector<std::unique_ptr<Group>>& groups) {
  for (const absl::Status& status : OnAll(
           groups, [](Group&g, size_t) { return g.Join(absl::Seconds(10)); })) {
    ASSERT_TRUE(status.ok()) << status;
  }
}

void MoveAll(const std::vector<std::unique_ptr<Group>>& groups,
             const std::vector<TestStore*>& stores) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const absl::Status status = groups[i]->Move(stores[i]->landings());
    ASSERT_TRUE(status.ok()) << status;
  }
}

std::vector<absl::Status> WaitAll(
    const std::vector<std::unique_ptr<Group>>& groups) {
  return OnAll(groups,
               [](Group& g, size_t) { return g.Wait(absl::Seconds(10)); });
}

std::string Blame(const absl::Status& status) {
  if (status.ok()) return "OK";
  const std::string reason = ReasonOf(status);
  if (reason.empty()) return status.ToString();
  const absl::optional<std::string> edge = EdgeOf(status);
  return edge ? absl::StrCat(reason, " ", *edge) : reason;
}

PeerProgress PeerOf(const Group& group, bool upstream) {
  for (const PeerProgress& peer : group.Progress().peers) {
    if (peer.upstream == upstream) return peer;
  }
  ADD_FAILURE() << "no such neighbour";
  return PeerProgress();
}

}  // namespace transport
}  // namespace weightsync
