#include "transport/host/fd_socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);

std::string NewPath() {
  static std::atomic<int> counter{0};
  // Short: a unix socket's path has 107 bytes at most.
  return "/tmp/ws_fd_test_" + std::to_string(getpid()) + "_" +
         std::to_string(counter++);
}

UniqueFd Memfd(char byte) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(pwrite(fd.get(), &byte, 1, 0), 1);
  return fd;
}

char ByteOf(const UniqueFd& fd) {
  char byte = 0;
  EXPECT_EQ(pread(fd.get(), &byte, 1, 0), 1);
  return byte;
}

UniqueFd ConnectAndSayNothing(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  EXPECT_EQ(
      connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
      0);
  return fd;
}

class FdSocketTest : public ::testing::Test {
 protected:
  void Start(const FdServer::Options& options = FdServer::Options()) {
    absl::StatusOr<std::unique_ptr<FdServer>> server =
        FdServer::Start(NewPath(), options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string RedeemReason(const std::string& token) {
    return ReasonOf(RedeemFd(server_->path(), token, kLong).status());
  }
  std::unique_ptr<FdServer> server_;
};

TEST_F(FdSocketTest, ATokenIsRedeemedOnce) {
  Start();
  const std::string token = *server_->Offer(Memfd('a'), {}, kLong);
  EXPECT_EQ(token.size(), 32u);
  absl::StatusOr<UniqueFd> fd = RedeemFd(server_->path(), token, kLong);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(ByteOf(*fd), 'a');
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  const absl::Status again = RedeemFd(server_->path(), token, kLong).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(again), "TOKEN_REDEEMED");
  EXPECT_FALSE(again.message().empty());
}

TEST_F(FdSocketTest, UnknownExpiredAndWithdrawnTokens) {
  Start();
  EXPECT_EQ(RedeemReason(std::string(32, '0')), "TOKEN_UNKNOWN");
  EXPECT_EQ(RedeemReason("short"), "BAD_REQUEST");
  EXPECT_EQ(RedeemReason(std::string(500, 'x')), "BAD_REQUEST");
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), {}, absl::ZeroDuration())),
            "TOKEN_EXPIRED");
  const std::string token = *server_->Offer(Memfd('a'), {}, kLong);
  server_->Withdraw(token);
  EXPECT_EQ(RedeemReason(token), "TOKEN_UNKNOWN");
}

TEST_F(FdSocketTest, ATokenOfAnotherProcessStaysWhole) {
  Start();
  FdServer::Recipient other;
  other.pid = getpid() + 1;
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), other, kLong)),
            "TOKEN_OTHER_PROCESS");
  other.pid.reset();
  other.uid = getuid() + 1;
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), other, kLong)),
            "TOKEN_OTHER_PROCESS");

  // A child tries its parent's token; the parent can still have it.
  FdServer::Recipient me;
  me.pid = getpid();
  me.uid = getuid();
  const std::string token = *server_->Offer(Memfd('b'), me, kLong);
  const pid_t child = fork();
  if (child == 0) _exit(RedeemReason(token) == "TOKEN_OTHER_PROCESS" ? 0 : 1);
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(RedeemReason(token), "");
}

TEST_F(FdSocketTest, DepositsGoTheOtherWay) {
  Start();
  const UniqueFd mine = Memfd('d');
  absl::StatusOr<std::string> token =
      DepositFd(server_->path(), mine.get(), kLong);
  ASSERT_TRUE(token.ok()) << token.status();
  // It is not for others to redeem.
  EXPECT_EQ(RedeemReason(*token), "TOKEN_UNKNOWN");
  FdServer::Recipient other;
  other.pid = getpid() + 1;
  EXPECT_EQ(ReasonOf(server_->TakeDeposit(*token, other).status()),
            "TOKEN_OTHER_PROCESS");
  absl::StatusOr<FdServer::Deposit> deposit = server_->TakeDeposit(*token, {});
  ASSERT_TRUE(deposit.ok()) << deposit.status();
  EXPECT_EQ(ByteOf(deposit->fd), 'd');
  EXPECT_EQ(deposit->pid, getpid());
  EXPECT_EQ(deposit->uid, getuid());
  EXPECT_EQ(ReasonOf(server_->TakeDeposit(*token, {}).status()),
            "TOKEN_REDEEMED");
}

TEST_F(FdSocketTest, StuckClientsDisturbNobodyAndAreClosed) {
  FdServer::Options options;
  options.client_deadline = absl::Milliseconds(200);
  Start(options);
  std::vector<UniqueFd> stuck;
  for (int i = 0; i < 20; ++i)
    stuck.push_back(ConnectAndSayNothing(server_->path()));
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), {}, kLong)), "");
  char byte;
  for (const UniqueFd& fd : stuck) EXPECT_EQ(recv(fd.get(), &byte, 1, 0), 0);
}

TEST_F(FdSocketTest, MoreConnectionsThanAllowedWaitForTheirTurn) {
  FdServer::Options options;
  options.client_deadline = absl::Milliseconds(200);
  options.max_connections = 2;
  Start(options);
  std::vector<UniqueFd> stuck;
  for (int i = 0; i < 3; ++i)
    stuck.push_back(ConnectAndSayNothing(server_->path()));
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), {}, kLong)), "");
}

TEST_F(FdSocketTest, GarbageIsRefusedAndServingGoesOn) {
  Start();
  const UniqueFd fd = ConnectAndSayNothing(server_->path());
  ASSERT_EQ(send(fd.get(), "hello", 5, MSG_NOSIGNAL), 5);
  char reply[256];
  const ssize_t received = recv(fd.get(), reply, sizeof(reply), 0);
  ASSERT_GT(received, 6);
  EXPECT_EQ(std::memcmp(reply, "WSFD", 4), 0);
  EXPECT_EQ(RedeemReason(*server_->Offer(Memfd('a'), {}, kLong)), "");
}

TEST_F(FdSocketTest, TooManyTokens) {
  FdServer::Options options;
  options.max_tokens = 2;
  Start(options);
  ASSERT_TRUE(server_->Offer(Memfd('a'), {}, kLong).ok());
  ASSERT_TRUE(server_->Offer(Memfd('b'), {}, kLong).ok());
  EXPECT_EQ(ReasonOf(server_->Offer(Memfd('c'), {}, kLong).status()),
            "TOO_MANY_TOKENS");
  const UniqueFd mine = Memfd('d');
  EXPECT_EQ(ReasonOf(DepositFd(server_->path(), mine.get(), kLong).status()),
            "TOO_MANY_TOKENS");
}

TEST_F(FdSocketTest, ManyClientsAtATime) {
  Start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([this] {
      for (int round = 0; round < 50; ++round) {
        const std::string token = *server_->Offer(Memfd('a'), {}, kLong);
        EXPECT_EQ(RedeemReason(token), "");
        EXPECT_EQ(RedeemReason(token), "TOKEN_REDEEMED");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FdSocketTest, OnlyTheUserMayConnectAndNothingIsLeftBehind) {
  Start();
  const std::string path = server_->path();
  struct stat found;
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  server_.reset();
  EXPECT_NE(stat(path.c_str(), &found), 0);
  EXPECT_NE(stat((path + ".lock").c_str(), &found), 0);
}

TEST_F(FdSocketTest, WithAGroupItsMembersMayConnect) {
  FdServer::Options options;
  options.group = getgid();
  Start(options);
  struct stat found;
  ASSERT_EQ(stat(server_->path().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0660u);
}

TEST(FdClient, NobodyThere) {
  const absl::Status status =
      RedeemFd(NewPath(), std::string(32, '0'), kLong).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "FD_SOCKET_UNREACHABLE");
}

TEST(FdClient, AServerThatNeverAnswers) {
  const std::string path = NewPath();
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)),
            0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  const absl::Status status =
      RedeemFd(path, std::string(32, '0'), absl::Milliseconds(50)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(status), "FD_SOCKET_TIMEOUT");
  unlink(path.c_str());
}

TEST(SocketClaim, ASecondOneIsRefusedWhileTheFirstLives) {
  const std::string path = NewPath();
  absl::StatusOr<std::unique_ptr<SocketClaim>> first = SocketClaim::Take(path);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = SocketClaim::Take(path).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReasonOf(second), "SOCKET_IN_USE");
  first->reset();
  EXPECT_TRUE(SocketClaim::Take(path).ok());
}

TEST(SocketClaim, ASocketThatADeadProcessLeftIsRemoved) {
  const std::string path = NewPath();
  const pid_t child = fork();
  if (child == 0) {
    // Dies without cleaning up.
    absl::StatusOr<std::unique_ptr<FdServer>> server =
        FdServer::Start(path, FdServer::Options());
    _exit(server.ok() ? 0 : 1);
  }
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  struct stat found;
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  absl::StatusOr<std::unique_ptr<FdServer>> server =
      FdServer::Start(path, FdServer::Options());
  EXPECT_TRUE(server.ok()) << server.status();
}

TEST(SocketClaim, AServerWithoutAClaimIsSeenToBeAlive) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const std::string path = NewPath();
    UniqueFd listener(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address),
                   sizeof(address)),
              0);
    ASSERT_EQ(listen(listener.get(), 8), 0);
    EXPECT_EQ(ReasonOf(SocketClaim::Take(path).status()), "SOCKET_IN_USE");
    listener.reset();
    EXPECT_TRUE(SocketClaim::Take(path).ok()) << "stale, of type " << type;
  }
}

TEST(SocketClaim, OtherFilesStayWhereTheyAre) {
  const std::string path = NewPath();
  std::ofstream(path) << "precious";
  EXPECT_EQ(ReasonOf(SocketClaim::Take(path).status()), "NOT_A_SOCKET");
  struct stat found;
  EXPECT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_NE(stat((path + ".lock").c_str(), &found), 0);
  unlink(path.c_str());
}

TEST(SocketClaim, PathsThatCannotBe) {
  EXPECT_EQ(ReasonOf(SocketClaim::Take("").status()), "SOCKET_PATH_TOO_LONG");
  EXPECT_EQ(
      ReasonOf(SocketClaim::Take("/tmp/" + std::string(110, 'x')).status()),
      "SOCKET_PATH_TOO_LONG");
  EXPECT_EQ(ReasonOf(SocketClaim::Take("/tmp/no/such/directory").status()),
            "SOCKET_DIRECTORY");
}

}  // namespace
}  // namespace transport
}  // namespace weightsync
