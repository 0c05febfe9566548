#include "daemon/service/listen.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string Sentence(const absl::Status& status) {
  return std::string(status.message());
}

std::string TempDir() {
  std::string path = testing::TempDir() + "/listenXXXXXX";
  return mkdtemp(&path[0]);
}

TEST(ListenTest, Addresses) {
  const auto v4 = ParseHostPort("127.0.0.1:7670", "listen");
  ASSERT_TRUE(v4.ok());
  EXPECT_TRUE(v4->loopback);
  EXPECT_EQ(v4->text(), "127.0.0.1:7670");
  const auto v6 = ParseHostPort("[::1]:0", "listen");
  ASSERT_TRUE(v6.ok());
  EXPECT_TRUE(v6->loopback);
  EXPECT_EQ(v6->text(), "[::1]:0");
  EXPECT_EQ(ParseHostPort("localhost:1", "listen")->text(), "127.0.0.1:1");
  for (const char* bad :
       {"", "127.0.0.1", ":1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1",
        "example.org:80", "::1:80", "[::1:80", "[127.0.0.1]:80", "1.2.3:4"}) {
    EXPECT_EQ(ErrorReason(ParseHostPort(bad, "listen").status()),
              "ADDRESS_INVALID")
        << bad;
  }
}

// The sentence speaks of the flag that must be changed.
TEST(ListenTest, NamesTheFlag) {
  const auto http = [](absl::string_view text) {
    return *ParseHostPort(text, "http_address");
  };
  EXPECT_THAT(Sentence(ParseHostPort("nowhere", "http_address").status()),
              StartsWith("--http_address=nowhere is no address"));
  EXPECT_THAT(Sentence(ParseHost("nowhere", "data_address").status()),
              StartsWith("--data_address=nowhere is no address"));
  EXPECT_THAT(
      Sentence(WhyNotListen(http("192.0.2.1:0"), "http_address")),
      StartsWith("--http_address=192.0.2.1 is not an address of this machine"));
  const absl::Status read =
      CheckReach(http("0.0.0.0:1"), false, "http_address");
  EXPECT_THAT(Sentence(read), HasSubstr("read the figures of this node"));
  EXPECT_THAT(Sentence(read), Not(HasSubstr("weights")));
  EXPECT_THAT(Sentence(CheckReach(http("0.0.0.0:1"), false, "listen")),
              HasSubstr("read and replace weights"));
}

TEST(ListenTest, OnePlaceIsNotGivenTwice) {
  const auto place = [](const char* flag, absl::string_view text) {
    return ListenFlag{flag, *ParseHostPort(text, flag)};
  };
  const auto sentence = [&](const ListenFlag& a, const ListenFlag& b) {
    const absl::Status status = CheckApart({a, b});
    if (status.ok()) return std::string();
    EXPECT_EQ(ErrorReason(status), "ADDRESS_INVALID");
    return std::string(status.message());
  };
  EXPECT_EQ(sentence(place("listen", "127.0.0.1:7670"),
                     place("http_address", "127.0.0.1:7671")),
            "");
  EXPECT_EQ(sentence(place("listen", "127.0.0.1:0"),
                     place("http_address", "127.0.0.1:0")),
            "");
  EXPECT_EQ(sentence(place("listen", "127.0.0.1:7670"),
                     place("http_address", "127.0.0.2:7670")),
            "");
  EXPECT_EQ(sentence(place("listen", "0.0.0.0:7670"),
                     place("http_address", "[::1]:7670")),
            "");
  EXPECT_EQ(sentence(place("listen", "localhost:7670"),
                     place("http_address", "127.0.0.1:7670")),
            "--listen and --http_address both name 127.0.0.1:7670: give one of "
            "them another port");
  EXPECT_EQ(sentence(place("listen", "0.0.0.0:7670"),
                     place("http_address", "127.0.0.1:7670")),
            "--listen and --http_address both name 0.0.0.0:7670 and "
            "127.0.0.1:7670: give one of them another port");
  EXPECT_THAT(
      sentence(place("listen", "127.0.0.1:1"), place("listen", "127.0.0.1:1")),
      StartsWith("--listen names 127.0.0.1:1, which is one place twice"));
}

TEST(ListenTest, WhatOthersCanReachNeedsToBeAllowed) {
  for (const char* open : {"0.0.0.0:1", "[::]:1", "10.1.2.3:1"}) {
    const auto address = ParseHostPort(open, "listen");
    ASSERT_TRUE(address.ok());
    EXPECT_EQ(ErrorReason(CheckReach(*address, false, "listen")),
              "INSECURE_REQUIRED")
        << open;
    EXPECT_TRUE(CheckReach(*address, true, "listen").ok());
  }
  EXPECT_TRUE(
      CheckReach(*ParseHostPort("127.9.9.9:1", "listen"), false, "listen")
          .ok());
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
  HostPort taken = *ParseHostPort("127.0.0.1:0", "listen");
  EXPECT_TRUE(WhyNotListen(taken, "listen").ok());
  taken.port = ntohs(address.sin_port);
  EXPECT_EQ(ErrorReason(WhyNotListen(taken, "listen")), "SOCKET_IN_USE");
  EXPECT_THAT(Sentence(WhyNotListen(taken, "http_address")),
              EndsWith("or give this daemon another --http_address"));
  close(fd);
  // TEST-NET-1: nobody has it.
  EXPECT_EQ(ErrorReason(WhyNotListen(*ParseHostPort("192.0.2.1:0", "listen"),
                                     "listen")),
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

TEST(ListenTest, WhatIsCertainlyElsewhere) {
  for (const char* perhaps :
       {"unix:/run/a.sock", "localhost:7670", "127.0.0.1:7670", "127.8.0.1:1",
        "[::1]:7670", "trainer-0.jobs:7670"}) {
    EXPECT_FALSE(IsElsewhere(perhaps)) << perhaps;
  }
  // TEST-NET-1, and its like: nobody has them.
  for (const char* there : {"192.0.2.4:7670", "[2001:db8::4]:7670"}) {
    EXPECT_TRUE(IsElsewhere(there)) << there;
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
