#include "client/cc/served.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace weightsync {
namespace client {
namespace {

v1::Version Active(int serving) {
  v1::Version version;
  version.set_name("models/m/versions/3");
  version.set_state(v1::Version::STATE_ACTIVE);
  version.mutable_create_time()->set_seconds(1);
  for (int i = 0; i < serving; ++i) {
    v1::ReplicaTimes* times = version.add_replicas();
    times->set_replica(absl::StrCat("models/m/replicas/r", i));
    times->mutable_resumed_time()->set_seconds(1);
  }
  return version;
}

TEST(ServedTest, CountsWhoServes) {
  EXPECT_EQ(ServedText(Active(0)), "no replica serves models/m/versions/3");
  EXPECT_EQ(ServedText(Active(1)), "1 replica serves models/m/versions/3");
  EXPECT_EQ(ServedText(Active(2)), "2 replicas serve models/m/versions/3");
}

// Who published hears what the engine's load callback has raised.
TEST(ServedTest, SaysWhyAReplicaWasLeftOut) {
  v1::Version version = Active(9);
  v1::Failure* failure = version.mutable_replicas(1)->mutable_failure();
  failure->set_reason("HOOK_FAILED");
  failure->set_message("RuntimeError: no room\nfor w");
  EXPECT_EQ(ServedText(version),
            "8 replicas serve models/m/versions/3; left out: r1 (HOOK_FAILED: "
            "RuntimeError: no room for w)");
  std::string message(119, 'x');
  for (int i = 0; i < 10; ++i) message += "\xc3\xa4";  // one over byte 120
  failure->set_message(message);
  EXPECT_EQ(ServedText(version),
            absl::StrCat("8 replicas serve models/m/versions/3; left out: r1 "
                         "(HOOK_FAILED: ",
                         std::string(119, 'x'), "...)"));
  // Many shall not fill the screen.
  for (int i = 0; i < 9; ++i) {
    *version.mutable_replicas(i)->mutable_failure() = *failure;
  }
  EXPECT_EQ(ServedText(version).find("xx"), std::string::npos);
  EXPECT_NE(ServedText(version).find("r1 (HOOK_FAILED), r2 (HOOK_FAILED)"),
            std::string::npos);
}

TEST(ServedTest, WhatIsNotKnownIsNotNobody) {
  v1::Version version = Active(0);
  version.clear_create_time();
  EXPECT_EQ(ServedText(version),
            "models/m/versions/3 is ACTIVE; the coordinator was started again "
            "since, and `weightsyncctl replicas` says who serves it");
}

TEST(ServedTest, NamesWhoDoesNot) {
  v1::Version version = Active(0);
  version.add_absent_replicas("models/m/replicas/a");
  EXPECT_EQ(ServedText(version),
            "no replica serves models/m/versions/3; not yet: a (not whole when "
            "it began, gets it when it comes)");
  version = Active(3);
  version.add_absent_replicas("models/m/replicas/a");
  version.add_absent_replicas("models/m/replicas/b");
  version.mutable_replicas(1)->mutable_failure()->set_reason("PAUSE_TIMEOUT");
  EXPECT_EQ(ServingCount(version), 2);
  EXPECT_EQ(ServedText(version),
            "2 replicas serve models/m/versions/3; not yet: a, b (not whole "
            "when it began, get it when they come); left out: r1 "
            "(PAUSE_TIMEOUT)");
  version.clear_absent_replicas();
  for (int i = 0; i < 20; ++i) {
    version.add_absent_replicas(absl::StrCat("models/m/replicas/x", i));
  }
  EXPECT_NE(ServedText(version).find("x6, x7 and 12 more ("),
            std::string::npos);
}

// It has the version, and an operator keeps it paused: nobody else says so.
TEST(ServedTest, NamesWhoIsKeptPaused) {
  v1::Version version = Active(3);
  v1::ReplicaTimes* held = version.mutable_replicas(1);
  *held->mutable_applied_time() = held->resumed_time();
  held->clear_resumed_time();
  EXPECT_EQ(ServedText(version),
            "2 replicas serve models/m/versions/3; kept paused: r1");
  held->mutable_failure()->set_reason("REPLICA_LOST");
  EXPECT_EQ(ServedText(version),
            "2 replicas serve models/m/versions/3; left out: r1 "
            "(REPLICA_LOST)");
}

TEST(ServedTest, OneThatIsNotActiveSaysWhatItIs) {
  v1::Version version = Active(1);
  version.set_state(v1::Version::STATE_MOVING);
  EXPECT_EQ(ServedText(version), "models/m/versions/3 is MOVING");
  version.set_state(v1::Version::STATE_ABORTED);
  version.mutable_failure()->set_reason("DISK_FULL");
  version.mutable_failure()->set_message("Full.");
  EXPECT_EQ(ServedText(version),
            "models/m/versions/3 is ABORTED: DISK_FULL: Full.");
}

}  // namespace
}  // namespace client
}  // namespace weightsync
