#include "daemon/node/store.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"
#include "daemon/node/testing.h"
#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

using testing::MakeParameter;
using testing::ModelBuilder;
using testing::TestNode;
using transport::ReasonOf;

// One bucket of 256 KiB and one of 64 KiB.
std::shared_ptr<const NodeLayout> Layout(const std::string& model) {
  const v1::DefineLayout define =
      ModelBuilder(model)
          .BucketBytes(256 << 10)
          .Parameter(MakeParameter("w", v1::DTYPE_U8, {256 << 10}))
          .Parameter(MakeParameter("b", v1::DTYPE_U8, {64 << 10}))
          .FsdpRanks("a", 1)
          .Worker("a")
          .Build();
  return std::make_shared<const NodeLayout>(*ComputeNodeLayout(define, "a"));
}

constexpr int64_t kUpdateBytes = 320 << 10;

class StoreTest : public ::testing::Test {
 protected:
  void Make(int64_t budget_bytes, int keep_updates = 2) {
    TestNode::Options options;
    options.budget_bytes = budget_bytes;
    options.keep_updates = keep_updates;
    node_ = std::make_unique<TestNode>("a", options);
  }
  Store& store() { return node_->store(); }
  v1::MemoryUse Use() {
    v1::MemoryUse use;
    store().FillMemoryUse(&use);
    return use;
  }
  absl::Status Reserve(const std::string& update_id,
                       std::shared_ptr<const NodeLayout> layout) {
    auto rooms = store().Reserve(update_id, 1, layout, {0, 1});
    if (!rooms.ok()) return rooms.status();
    for (const BucketRoom& room : *rooms) {
      std::memset(room.data.data(), update_id.back(), room.data.size());
    }
    return absl::OkStatus();
  }
  void Commit(const std::string& update_id,
              std::shared_ptr<const NodeLayout> layout) {
    absl::Status status = Reserve(update_id, layout);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(store().MarkWhole(update_id).ok());
    ASSERT_TRUE(store().Commit(update_id).ok());
  }
  // The first byte of the bucket, read as a worker does.
  char Byte(const v1::BucketLocation& location) {
    auto arena = store().FindArena(location.slot().arena_id());
    return arena->data()[location.slot().offset_bytes()];
  }

  std::unique_ptr<TestNode> node_;
  std::shared_ptr<const NodeLayout> layout_ = Layout("models/m");
};

TEST_F(StoreTest, MemoryIsMadeAheadAndUsedAgain) {
  Make(8 << 20);
  ASSERT_TRUE(store().ReserveFor("models/m", kUpdateBytes).ok());
  const std::vector<std::string> arenas = store().ArenaIds();
  EXPECT_EQ(arenas.size(), 2u)
      << "the incoming update beside the installed one";
  EXPECT_EQ(node_->arenas_added(), arenas);
  for (int i = 0; i < 10; ++i) Commit("u" + std::to_string(i), layout_);
  EXPECT_EQ(store().ArenaIds(), arenas) << "no memory is made for an update";
  EXPECT_EQ(store().HeldUpdates().size(), 2u);
  EXPECT_EQ(store().HeldUpdates()[0].update_id(), "u9");
  EXPECT_EQ(node_->evicted().size(), 8u);
  EXPECT_EQ(node_->evicted()[0], "u0");
}

// Memory whose pieces take as long to give back as the test likes.
class SlowMemory final : public transport::Memory {
 public:
  explicit SlowMemory(transport::Memory* host) : host_(host) {}
  ~SlowMemory() override { EXPECT_TRUE(given_back.HasBeenNotified()); }

  transport::MemoryKind kind() const override { return host_->kind(); }
  absl::StatusOr<std::unique_ptr<transport::Segment>> Allocate(
      int64_t bytes, const transport::AllocateOptions& options) override {
    auto made = host_->Allocate(bytes, options);
    if (!made.ok()) return made.status();
    return std::unique_ptr<transport::Segment>(
        std::make_unique<Slow>(this, *std::move(made)));
  }
  absl::StatusOr<transport::MemoryTicket> Export(
      const transport::Segment& segment,
      const transport::ExportOptions& options) override {
    return host_->Export(segment, options);
  }
  void Withdraw(const transport::MemoryTicket& ticket) override {
    host_->Withdraw(ticket);
  }
  absl::StatusOr<std::unique_ptr<transport::Segment>> Import(
      const transport::MemoryTicket& ticket, absl::Duration timeout) override {
    return host_->Import(ticket, timeout);
  }
  absl::Status Copy(absl::Span<const transport::CopyTask> tasks,
                    const transport::CopyOptions& options,
                    transport::Digest* digest) override {
    return host_->Copy(tasks, options, digest);
  }
  absl::Status Pack(const transport::PackRequest& request,
                    transport::PackResult* result) override {
    return host_->Pack(request, result);
  }
  absl::Status Read(const char* from, absl::Span<char> to) override {
    return host_->Read(from, to);
  }
  absl::Status Write(absl::Span<const char> from, char* to) override {
    return host_->Write(from, to);
  }

  absl::Notification giving_back, go_on, given_back;

 private:
  class Slow final : public transport::Segment {
   public:
    Slow(SlowMemory* memory, std::unique_ptr<transport::Segment> base)
        : memory_(memory), base_(std::move(base)) {}
    ~Slow() override {
      if (memory_->giving_back.HasBeenNotified()) return;
      memory_->giving_back.Notify();
      memory_->go_on.WaitForNotification();
      memory_->given_back.Notify();
    }
    transport::MemoryKind kind() const override { return base_->kind(); }
    char* data() const override { return base_->data(); }
    int64_t bytes() const override { return base_->bytes(); }
    bool writable() const override { return base_->writable(); }
    int generation_slots() const override { return base_->generation_slots(); }
    uint64_t Generation(int slot) const override {
      return base_->Generation(slot);
    }
    uint64_t AdvanceGeneration(int slot) override {
      return base_->AdvanceGeneration(slot);
    }

   private:
    SlowMemory* const memory_;
    const std::unique_ptr<transport::Segment> base_;
  };

  transport::Memory* const host_;
};

// To unmap hundreds of GB takes seconds: engines of other models that are to be
// resumed do not wait for that, nor does the thread that lets go.
TEST_F(StoreTest, MemoryThatIsGivenBackHoldsUpNobody) {
  Make(8 << 20);
  SlowMemory memory(&node_->memory());
  Store::Options options;
  options.budget_bytes = 8 << 20;
  Store slow(options, &memory, nullptr);
  ASSERT_TRUE(slow.ReserveFor("models/m", kUpdateBytes).ok());
  const auto other = Layout("models/other");
  const auto reserve = [&] {
    return slow.Reserve("u", 1, other, {0, 1}).status();
  };
  ASSERT_TRUE(slow.ReserveFor("models/other", kUpdateBytes).ok());
  ASSERT_TRUE(reserve().ok());
  slow.Forget("models/m");
  memory.giving_back.WaitForNotification();
  // All of these tell of what has changed meanwhile.
  { auto pin = slow.Pin("u"); }
  EXPECT_TRUE(reserve().ok());
  slow.Drop("u");
  EXPECT_FALSE(memory.given_back.HasBeenNotified());
  memory.go_on.Notify();
}

TEST_F(StoreTest, AReservationOverTheBudgetIsRefusedWithTheSums) {
  Make(1 << 20);
  absl::Status status = store().ReserveFor("models/m", 600 << 10);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "NO_STORE_ROOM");
  EXPECT_NE(status.message().find("614400"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("1048576"), absl::string_view::npos)
      << status;
  EXPECT_EQ(Use().store_reserved_bytes(), 0);
  // A model that fits is not disturbed.
  EXPECT_TRUE(store().ReserveFor("models/n", 500 << 10).ok());
  EXPECT_EQ(ReasonOf(store().ReserveFor("models/m", 100 << 10)),
            "NO_STORE_ROOM");
}

TEST_F(StoreTest, AnUpdateThatDoesNotFitBesideWhatIsPinnedIsRefused) {
  Make(2 * kUpdateBytes);
  Commit("u1", layout_);
  Commit("u2", layout_);
  // u1 may go, u2 is the newest.
  ASSERT_TRUE(Reserve("u3", layout_).ok());
  absl::Status status = Reserve("u4", layout_);
  EXPECT_EQ(ReasonOf(status), "NO_STORE_ROOM");
  EXPECT_NE(status.message().find("u2"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("u3"), absl::string_view::npos) << status;
  store().Drop("u3");
  EXPECT_TRUE(Reserve("u4", layout_).ok());
}

TEST_F(StoreTest, APinnedUpdateIsNotEvicted) {
  Make(2 * kUpdateBytes);
  Commit("u1", layout_);
  auto located = store().Locate("u1", {1, 0});
  ASSERT_TRUE(located.ok()) << located.status();
  ASSERT_EQ(located->buckets.size(), 2u);
  EXPECT_EQ(located->buckets[0].bucket(), 1);
  EXPECT_EQ(Byte(located->buckets[0]), '1');
  Commit("u2", layout_);
  EXPECT_EQ(ReasonOf(Reserve("u3", layout_)), "NO_STORE_ROOM");
  EXPECT_EQ(Byte(located->buckets[1]), '1');
  located->pin.Release();
  EXPECT_TRUE(Reserve("u3", layout_).ok());
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0}).status()), "UPDATE_UNKNOWN");
}

TEST_F(StoreTest, ADroppedUpdateStaysUntilItsPinIsReleased) {
  Make(8 << 20);
  Commit("u1", layout_);
  auto located = store().Locate("u1", {0});
  ASSERT_TRUE(located.ok());
  store().Drop("u1");
  EXPECT_TRUE(store().Holds("u1", {0})) << "committed ones stay";
  store().Drop("u1", /*committed_too=*/true);
  EXPECT_FALSE(store().Holds("u1", {0}));
  EXPECT_GT(Use().store_used_bytes(), 0);
  EXPECT_EQ(Byte(located->buckets[0]), '1');
  located->pin.Release();
  EXPECT_EQ(Use().store_used_bytes(), 0);
}

TEST_F(StoreTest, AReaderOfAReusedExtentNotices) {
  Make(2 * kUpdateBytes);
  Commit("u1", layout_);
  v1::SlotLocation slot;
  {
    auto located = store().Locate("u1", {0});
    ASSERT_TRUE(located.ok());
    slot = located->buckets[0].slot();
    // The worker goes on reading although its apply was given up.
  }
  auto arena = store().FindArena(slot.arena_id());
  EXPECT_EQ(arena->Generation(slot.generation_slot()), slot.generation());
  Commit("u2", layout_);
  ASSERT_TRUE(Reserve("u3", layout_).ok());
  EXPECT_NE(arena->Generation(slot.generation_slot()), slot.generation());

  std::string live(static_cast<size_t>(slot.size_bytes()), 'x');
  transport::CopyTask task;
  task.src = arena->data() + slot.offset_bytes();
  task.dst = &live[0];
  task.run_bytes = slot.size_bytes();
  absl::Status status =
      transport::GuardedApply(&node_->memory(), *arena, slot.generation_slot(),
                              slot.generation(), {task});
  EXPECT_EQ(ReasonOf(status), "SLOT_REUSED") << status;
  EXPECT_EQ(live, std::string(live.size(), 'x'));
}

TEST_F(StoreTest, OnlyWholeUpdatesAreGivenOut) {
  Make(8 << 20);
  ASSERT_TRUE(Reserve("u1", layout_).ok());
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0}).status()), "UPDATE_INCOMPLETE");
  EXPECT_EQ(ReasonOf(store().Commit("u1")), "UPDATE_INCOMPLETE");
  ASSERT_TRUE(store().MarkWhole("u1").ok());
  EXPECT_TRUE(store().Locate("u1", {0}).ok());
  EXPECT_EQ(ReasonOf(store().Locate("u1", {0, 2}).status()), "BUCKET_UNKNOWN");
  EXPECT_EQ(ReasonOf(store().Commit("u9")), "UPDATE_UNKNOWN");
}

TEST_F(StoreTest, ReservingAgainAnswersTheSameRoom) {
  Make(8 << 20);
  auto first = store().Reserve("u1", 1, layout_, {0});
  auto again = store().Reserve("u1", 1, layout_, {0, 1});
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ((*first)[0].data.data(), (*again)[0].data.data());
  EXPECT_EQ(
      ReasonOf(store().Reserve("u1", 1, Layout("models/n"), {0}).status()),
      "UPDATE_LAYOUT_MISMATCH");
}

TEST_F(StoreTest, ForgettingAModelGivesItsMemoryBack) {
  Make(8 << 20);
  ASSERT_TRUE(store().ReserveFor("models/m", kUpdateBytes).ok());
  Commit("u1", layout_);
  auto pin = store().Pin("u1");
  ASSERT_TRUE(pin.ok());
  store().Forget("models/m");
  EXPECT_EQ(node_->arenas_dropped().size(), 1u) << "the one that is not in use";
  EXPECT_FALSE(store().Holds("u1", {0}));
  pin->Release();
  EXPECT_EQ(node_->arenas_dropped().size(), 2u);
  EXPECT_EQ(Use().store_reserved_bytes(), 0);
}

TEST_F(StoreTest, PiecesTooSmallMakeRoomForOneOfTheRightSize) {
  Make(4 * kUpdateBytes);
  // Small arenas take up the budget.
  ASSERT_TRUE(store().ReserveFor("models/small", kUpdateBytes / 4).ok());
  ASSERT_TRUE(store().ReserveFor("models/m", kUpdateBytes).ok());
  store().Forget("models/small");
  Commit("u1", layout_);
  Commit("u2", layout_);
  ASSERT_TRUE(Reserve("u3", layout_).ok());
  EXPECT_LE(Use().store_reserved_bytes(), 4 * kUpdateBytes + (64 << 10));
}

TEST_F(StoreTest, AllOrNothing) {
  Make(kUpdateBytes - 4096);
  EXPECT_EQ(ReasonOf(Reserve("u1", layout_)), "NO_STORE_ROOM");
  EXPECT_EQ(Use().store_used_bytes(), 0);
  EXPECT_TRUE(store().HeldUpdates().empty());
}

// Two runs of one update on a node, one of which receives what the other has no
// part in.
TEST_F(StoreTest, OnlyWhatWasLookedAtIsWhole) {
  Make(8 << 20);
  ASSERT_TRUE(Reserve("u1", layout_).ok());
  const std::map<int32_t, transport::Digest> digests = {
      {0, transport::Digest()}};
  ASSERT_TRUE(store().MarkWhole("u1", &digests).ok());
  EXPECT_TRUE(store().Locate("u1", {0}).ok());
  EXPECT_FALSE(store().Locate("u1", {0, 1}).ok());
  // It was given up: what is whole stays.
  store().DropIncoming("u1");
  EXPECT_TRUE(store().Locate("u1", {0}).ok());
  EXPECT_FALSE(store().Locate("u1", {1}).ok());
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
