#include "daemon/node/node_journal.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {
namespace {

using transport::ReasonOf;

std::string Directory() {
  std::string directory =
      std::string(getenv("TEST_TMPDIR") ? getenv("TEST_TMPDIR") : "/tmp") +
      "/node_journal.XXXXXX";
  EXPECT_NE(mkdtemp(&directory[0]), nullptr);
  return directory;
}

RefusedOffer Offer(const std::string& command_id,
                   const std::string& incarnation = "i 1") {
  RefusedOffer offer;
  offer.model = "models/m";
  offer.replica = "r";
  offer.incarnation = incarnation;
  offer.command_id = command_id;
  offer.update_id = "u";
  offer.term = 7;
  return offer;
}

TEST(NodeJournal, WhatWasRefusedIsKnownAfterARestart) {
  const std::string directory = Directory();
  {
    auto journal = NodeJournal::Open(directory);
    ASSERT_TRUE(journal.ok()) << journal.status();
    ASSERT_TRUE((*journal)->Refuse(Offer("pause\t1\n")).ok());
    ASSERT_TRUE((*journal)->Refuse(Offer("pause-2")).ok());
    ASSERT_TRUE((*journal)->Refuse(Offer("pause-3", "another")).ok());
  }
  auto journal = NodeJournal::Open(directory);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ((*journal)->RefusedBy("models/m", "r", "i 1"),
            (std::vector<std::string>{"pause\t1\n", "pause-2"}));
  EXPECT_TRUE((*journal)->RefusedBy("models/m", "s", "i 1").empty());
}

TEST(NodeJournal, ADamagedFileIsRefusedByName) {
  const std::string directory = Directory();
  {
    auto journal = NodeJournal::Open(directory);
    ASSERT_TRUE((*journal)->Refuse(Offer("pause-1")).ok());
  }
  const std::string path = directory + "/node_journal";
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  for (size_t i = 0; i < content.str().size(); i += 3) {
    std::string text = content.str();
    text[i] ^= 1;
    std::ofstream(path, std::ios::trunc) << text;
    auto journal = NodeJournal::Open(directory);
    EXPECT_EQ(ReasonOf(journal.status()), "NODE_JOURNAL_DAMAGED")
        << "byte " << i;
  }
}

// It may say that an update was refused here: only where there is none was
// nothing.
TEST(NodeJournal, OneThatCannotBeReadIsNotTakenForNone) {
  const std::string directory = Directory();
  ASSERT_TRUE(NodeJournal::Open(directory).ok());
  ASSERT_EQ(mkdir((directory + "/node_journal").c_str(), 0700), 0);
  EXPECT_EQ(ReasonOf(NodeJournal::Open(directory).status()),
            "NODE_JOURNAL_UNREADABLE");
}

TEST(NodeJournal, AWriteThatFailsIsSaid) {
  const std::string directory = Directory();
  auto journal = NodeJournal::Open(directory);
  ASSERT_EQ(mkdir((directory + "/node_journal.new").c_str(), 0700), 0);
  EXPECT_EQ(ReasonOf((*journal)->Refuse(Offer("pause-1"))),
            "NODE_JOURNAL_WRITE_FAILED");
}

}  // namespace
}  // namespace daemon
}  // namespace weightsync
