#include "daemon/service/listen.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

std::string TempDir() {
  std::string path = testing::TempDir() + "/listenXXXXXX";
  return mkdtemp(&path[0]);
}

TEST(ListenTest, Addresses) {
  const auto v4 = ParseHostPort("127.0.0.1:7670");
  ASSERT_TRUE(v4.ok());
  EXPECT_TRUE(v4->loopback);
  EXPECT_EQ(v4->text(), "127.0.0.1:7670");
  const auto v6 = ParseHostPort("[::1]:0");
  ASSERT_TRUE(v6.ok());
  EXPECT_TRUE(v6->loopback);
  EXPECT_EQ(v6->text(), "[::1]:0");
  EXPECT_EQ(ParseHostPort("localhost:1")->text(), "127.0.0.1:1");
  for (const char* bad :
       {"", "127.0.0.1", ":1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1",
        "example.org:80", "::1:80", "[::1:80", "[127.0.0.1]:80", "1.2.3:4"}) {
    EXPECT_EQ(ErrorReason(ParseHostPort(bad).status()), "ADDRESS_INVALID")
        << bad;
  }
}

TEST(ListenTest, WhatOthersCanReachNeedsToBeAllowed) {
  for (const char* open : {"0.0.0.0:1", "[::]:1", "10.1.2.3:1"}) {
    const auto address = ParseHostPort(open);
    ASSERT_TRUE(address.ok());
    EXPECT_EQ(ErrorReason(CheckReach(*address, false, "listen")),
              "INSECURE_REQUIRED")
        << open;
    EXPECT_TRUE(CheckReach(*address, true, "listen").ok());
  }
  EXPECT_TRUE(CheckReach(*ParseHostPort("127.9.9.9:1"), false, "listen").ok());
}

TEST(ListenTest, SaysWhyNothingCanListen) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  HostPort taken = *ParseHostPort("127.0.0.1:0");
  EXPECT_TRUE(WhyNotListen(taken).ok());
  taken.port = ntohs(address.sin_port);
  EXPECT_EQ(ErrorReason(WhyNotListen(taken)), "SOCKET_IN_USE");
  close(fd);
  // TEST-NET-1: nobody has it.
  EXPECT_EQ(ErrorReason(WhyNotListen(*ParseHostPort("192.0.2.1:0"))),
            "ADDRESS_INVALID");
}

TEST(ListenTest, WhatCanBeDialled) {
  for (const char* good : {"10.0.0.4:7670", "trainer-0.jobs:7670",
                           "[fd00::4]:7670", "unix:/run/a.sock"}) {
    EXPECT_TRUE(CheckDialled(good).ok()) << good;
  }
  for (const char* bad :
       {"nonsense", "host:", ":7670", "host:0", "host:65536", "host:x",
        "fd00::4:7670", "unix:", "dns:///a:1", "a b:1"}) {
    EXPECT_EQ(ErrorReason(CheckDialled(bad)), "ADDRESS_INVALID") << bad;
  }
}

TEST(ListenTest, ADirectoryHasOneOwner) {
  const std::string directory = TempDir() + "/a/b";
  ASSERT_TRUE(MakeDirectories(directory, 0700).ok());
  ASSERT_TRUE(MakeDirectories(directory, 0700).ok());
  auto first = DirectoryClaim::Take(directory);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(ErrorReason(DirectoryClaim::Take(directory).status()),
            "STATE_DIR_IN_USE");
  first->reset();
  EXPECT_TRUE(DirectoryClaim::Take(directory).ok());
  EXPECT_EQ(ErrorReason(DirectoryClaim::Take(directory + "/none").status()),
            "DIRECTORY_FAILED");
}

TEST(ListenTest, FilesAreWrittenWhole) {
  const std::string path = TempDir() + "/file";
  EXPECT_EQ(*ReadSmallFile(path), "");
  ASSERT_TRUE(WriteFileAtomically(path, "one").ok());
  ASSERT_TRUE(WriteFileAtomically(path, "two").ok());
  EXPECT_EQ(*ReadSmallFile(path), "two");
  EXPECT_EQ(ErrorReason(WriteFileAtomically("/nowhere/at/all", "x")),
            "FILE_FAILED");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
