// What Prometheus is told of a daemon's GPUs: what the agent has for itself,
// NCCL's, slots and the device store, each apart.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/gpu_uuid.h"
#include "tests/gpu/gpu_cluster.h"

namespace weightsync {
namespace e2e {
namespace {

// The body of GET /metrics at 127.0.0.1:port; empty when there is none.
std::string Scrape(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const timeval patience = {30, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  std::string answer;
  const std::string get =
      "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) == 0 &&
      write(fd, get.data(), get.size()) == static_cast<ssize_t>(get.size())) {
    char buffer[4096];
    ssize_t got;
    while ((got = read(fd, buffer, sizeof(buffer))) > 0)
      answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

// The figures of one GPU, by their names without "weightsync_gpu_".
std::map<std::string, double> FiguresOf(const std::string& metrics,
                                        const std::string& uuid) {
  std::map<std::string, double> figures;
  std::istringstream lines(metrics);
  std::string line;
  while (std::getline(lines, line)) {
    const std::string prefix = "weightsync_gpu_";
    const size_t labels = line.find('{');
    if (!absl::StartsWith(line, prefix) || labels == std::string::npos ||
        !absl::StrContains(line, absl::StrCat("device_uuid=\"", uuid, "\""))) {
      continue;
    }
    figures[line.substr(prefix.size(), labels - prefix.size())] =
        std::atof(line.substr(line.rfind(' ')).c_str());
  }
  return figures;
}

class GpuMetricsTest : public GpuClusterTest {
 protected:
  int HttpPort(const std::string& node) {
    const std::string log = cluster_.process(node)->Log();
    const std::string before = "probes: http://127.0.0.1:";
    const size_t at = log.find(before);
    EXPECT_NE(at, std::string::npos) << log;
    return at == std::string::npos ? 0 : std::atoi(&log[at + before.size()]);
  }
};

TEST_F(GpuMetricsTest, EveryUseOfAGpuIsToldApart) {
  for (const auto& [node, device] :
       std::vector<std::pair<std::string, int>>{{"a", 0}, {"b", 1}}) {
    std::vector<std::string> flags = GpuFlags();
    flags.insert(flags.end(), {"--store=device", "--group=nccl",
                               "--http_address=127.0.0.1:0",
                               absl::StrCat("--device_uuid=", UuidOf(device))});
    StartNode(node, flags);
  }
  GpuTrainer trainer(&cluster_, "a", 1);
  const absl::Status registered = trainer.Register();
  ASSERT_TRUE(registered.ok()) << registered;
  GpuReplica near(&cluster_, "a", "near", 1, 0);
  GpuReplica far(&cluster_, "b", "far", 1, 1);
  for (const int version : {1, 2}) {
    const auto published = trainer.Publish(version);
    ASSERT_TRUE(published.ok()) << published.status();
    ASSERT_TRUE(far.Holds(version));
  }

  // Staging memory of the one edge, and its communicator of 4 MiB (the
  // simulator's), which both stay when its update has ended.
  ASSERT_TRUE(WaitUntil([&] { return Gpu("a", 0).nccl_bytes() == 20 << 20; }))
      << Gpu("a", 0).ShortDebugString();
  const v1::GpuUse said = Gpu("a", 0);
  ASSERT_EQ(said.device_uuid(), UuidOf(0));
  const std::string metrics = Scrape(HttpPort("a"));
  const std::map<std::string, double> figures =
      FiguresOf(metrics, said.device_uuid());
  const auto figure = [&](const std::string& name) {
    const auto found = figures.find(name);
    EXPECT_NE(found, figures.end()) << name << " is not in\n" << metrics;
    return found == figures.end() ? -1 : found->second;
  };
  EXPECT_EQ(figure("up"), 1);
  EXPECT_EQ(figure("agent_restarts_total"), 0);
  // Exactly the slots.
  EXPECT_EQ(figure("slots"), 2);
  EXPECT_EQ(figure("slot_bytes"), 2 * 16384);
  // Two versions of the model at least, and not the whole GPU.
  int64_t model_bytes = 0;
  for (const client::Tensor& tensor : Parameters())
    model_bytes += client::PartBytes(tensor);
  EXPECT_GE(figure("device_store_bytes"), 2 * model_bytes);
  EXPECT_LT(figure("device_store_bytes"), figure("memory_total_bytes"));
  // The context (8 MiB in the simulator) and tables of launches, and no part of
  // the others.
  EXPECT_GT(figure("context_bytes"), 0);
  EXPECT_LT(figure("context_bytes"), 64 << 20);
  EXPECT_EQ(figure("nccl_bytes"), 20 << 20);
  EXPECT_EQ(figure("nccl_communicators"), 1);
  EXPECT_EQ(figure("memory_total_bytes"), said.total_bytes());
  EXPECT_LT(figure("memory_free_bytes"), figure("memory_total_bytes"));
  EXPECT_LE(figure("slot_bytes") + figure("device_store_bytes") +
                figure("context_bytes") + figure("nccl_bytes"),
            figure("memory_total_bytes") - figure("memory_free_bytes"));
}

}  // namespace
}  // namespace e2e
}  // namespace weightsync
