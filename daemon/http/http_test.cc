#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/http/http_server.h"
#include "daemon/http/metrics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// What is answered, head and all.
std::string Ask(int port, const std::string& request) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience = {20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) ==
      0) {
    EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    char buffer[4096];
    ssize_t size;
    while ((size = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
      answer.append(buffer, static_cast<size_t>(size));
    }
  }
  close(fd);
  return answer;
}

std::string Get(int port, const std::string& path) {
  return Ask(port, absl::StrCat("GET ", path,
                                " HTTP/1.1\r\nHost: here\r\n"
                                "Connection: close\r\n\r\n"));
}

TEST(HttpServerTest, ServesItsPagesAndNothingElse) {
  bool well = true;
  auto server = HttpServer::Start(
      "127.0.0.1:0",
      {{"/a", "text/plain", [&well]() -> absl::StatusOr<std::string> {
          if (well) return std::string("hello\n");
          return absl::UnavailableError("it hangs");
        }}});
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  ASSERT_GT(port, 0);
  EXPECT_THAT(Get(port, "/a"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get(port, "/a"), EndsWith("\r\n\r\nhello\n"));
  EXPECT_THAT(Get(port, "/a?x=1"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get(port, "/b"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(Get(port, "/b"), HasSubstr("there is: /a"));
  EXPECT_THAT(Get(port, "/../a"), Not(HasSubstr("root")));
  EXPECT_THAT(Ask(port,
                  "POST /a HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n"
                  "Connection: close\r\n\r\n"),
              StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(Ask(port,
                  "HEAD /a HTTP/1.1\r\nHost: here\r\n"
                  "Connection: close\r\n\r\n"),
              EndsWith("\r\n\r\n"));
  well = false;
  EXPECT_THAT(Get(port, "/a"), StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(Get(port, "/a"), HasSubstr("it hangs"));
  // Taken.
  const auto second = HttpServer::Start(absl::StrCat("127.0.0.1:", port), {});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("another process"));
}

TEST(MetricsTest, EachGpuApart) {
  NodeFigures figures;
  v1::MemoryUse& memory = figures.memory;
  memory.set_store_budget_bytes(4096);
  memory.set_store_used_bytes(100);
  for (const char* uuid : {"GPU-1", "GPU-2"}) {
    v1::GpuUse* gpu = memory.add_gpus();
    gpu->set_device_uuid(uuid);
    gpu->set_device_name("a \"fast\" one");
    gpu->set_slot_count(3);
    gpu->set_slot_bytes(768);
  }
  memory.mutable_gpus(0)->set_state(v1::GpuUse::STATE_READY);
  memory.mutable_gpus(1)->set_state(v1::GpuUse::STATE_FAILED);
  memory.mutable_gpus(1)->set_restart_count(2);
  memory.mutable_gpus(1)->set_device_store_bytes(int64_t{16} << 30);
  figures.nccl_communicators["GPU-2"] = 5;
  const std::string text = RenderMetrics("n", "1.2", figures);
  EXPECT_THAT(text, HasSubstr("# TYPE weightsync_store_used_bytes gauge\n"
                              "weightsync_store_used_bytes 100"));
  EXPECT_THAT(text, HasSubstr("weightsync_build_info{node=\"n\","
                              "version=\"1.2\"} 1"));
  const std::string first =
      "{device_uuid=\"GPU-1\",device_name=\"a \\\"fast\\\" one\"} ";
  const std::string second =
      "{device_uuid=\"GPU-2\",device_name=\"a \\\"fast\\\" one\"} ";
  EXPECT_THAT(text, HasSubstr("weightsync_gpu_up" + first + "1"));
  EXPECT_THAT(text, HasSubstr("weightsync_gpu_up" + second + "0"));
  EXPECT_THAT(text, HasSubstr("# TYPE weightsync_gpu_agent_restarts_total "
                              "counter\n"));
  EXPECT_THAT(text,
              HasSubstr("weightsync_gpu_agent_restarts_total" + second + "2"));
  EXPECT_THAT(text, HasSubstr("weightsync_gpu_slot_bytes" + first + "768"));
  EXPECT_THAT(text, HasSubstr("weightsync_gpu_device_store_bytes" + second +
                              "17179869184"));
  EXPECT_THAT(text, HasSubstr("# TYPE weightsync_gpu_nccl_communicators gauge\n"
                              "weightsync_gpu_nccl_communicators" +
                              first + "0\n"));
  EXPECT_THAT(text,
              HasSubstr("weightsync_gpu_nccl_communicators" + second + "5\n"));
  // Of a node without one, nothing.
  memory.clear_gpus();
  EXPECT_THAT(RenderMetrics("n", "1.2", figures), Not(HasSubstr("gpu")));
}

// What on_isolation = KEEP_SERVING leaves to be seen at the node itself.
TEST(MetricsTest, ANodeThatIsCutOffSaysForHowLong) {
  NodeFigures figures;
  EXPECT_THAT(RenderMetrics("n", "1.2", figures),
              HasSubstr("\nweightsync_coordinator_silence_seconds 0\n"));
  EXPECT_THAT(RenderMetrics("n", "1.2", figures),
              HasSubstr("\nweightsync_replica_alarms 0\n"));
  figures.coordinator_silence = absl::Milliseconds(1500);
  figures.replica_alarms = 2;
  const std::string text = RenderMetrics("n", "1.2", figures);
  EXPECT_THAT(text,
              HasSubstr("# TYPE weightsync_coordinator_silence_seconds gauge\n"
                        "weightsync_coordinator_silence_seconds 1.5\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE weightsync_replica_alarms gauge\n"
                              "weightsync_replica_alarms 2\n"));
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
