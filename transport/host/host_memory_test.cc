#include "transport/host/host_memory.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "transport/conformance/memory_conformance.h"
#include "transport/error.h"
#include "transport/fault/faulty_memory.h"

namespace weightsync {
namespace transport {
namespace {

// A daemon's memory, and a worker's, which exports nothing.
class HostFixture : public MemoryFixture {
 public:
  HostFixture()
      : pool_(2),
        fds_(Start()),
        memory_(&pool_, fds_.get(), {}),
        importer_(&pool_, nullptr, {}) {}
  Memory* memory() override { return &memory_; }
  Memory* importer() override { return &importer_; }

 private:
  static std::unique_ptr<FdServer> Start() {
    static std::atomic<int> counter{0};
    absl::StatusOr<std::unique_ptr<FdServer>> server =
        FdServer::Start("/tmp/ws_memory_test_" + std::to_string(getpid()) +
                            "_" + std::to_string(counter++),
                        FdServer::Options());
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  }

  CopyPool pool_;
  const std::unique_ptr<FdServer> fds_;
  HostMemory memory_;
  HostMemory importer_;
};

// The decorator, while it injects nothing, is as good as what it decorates.
class FaultyFixture : public MemoryFixture {
 public:
  FaultyFixture() : faulty_(host_.memory()) {}
  Memory* memory() override { return &faulty_; }
  Memory* importer() override { return host_.importer(); }

 private:
  HostFixture host_;
  FaultyMemory faulty_;
};

INSTANTIATE_TEST_SUITE_P(
    Host, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<HostFixture>();
    }));
INSTANTIATE_TEST_SUITE_P(
    HostBehindFaults, MemoryConformance,
    ::testing::Values([]() -> std::unique_ptr<MemoryFixture> {
      return std::make_unique<FaultyFixture>();
    }));

TEST(HostMemory, AWorkerExportsNothing) {
  HostFixture fixture;
  absl::StatusOr<std::unique_ptr<Segment>> segment =
      fixture.importer()->Allocate(4096, AllocateOptions());
  ASSERT_TRUE(segment.ok());
  EXPECT_EQ(
      ReasonOf(fixture.importer()->Export(**segment, ExportOptions()).status()),
      "NO_FD_SOCKET");
}

TEST(HostMemory, ATicketForAnotherProcess) {
  HostFixture fixture;
  absl::StatusOr<std::unique_ptr<Segment>> segment =
      fixture.memory()->Allocate(4096, AllocateOptions());
  ASSERT_TRUE(segment.ok());
  ExportOptions options;
  options.pid = getpid() + 1;
  const absl::StatusOr<MemoryTicket> ticket =
      fixture.memory()->Export(**segment, options);
  ASSERT_TRUE(ticket.ok());
  EXPECT_EQ(
      ReasonOf(fixture.importer()->Import(*ticket, absl::Seconds(20)).status()),
      "TOKEN_OTHER_PROCESS");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
