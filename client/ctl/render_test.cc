#include "client/ctl/render.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

namespace weightsync {
namespace ctl {
namespace {

template <typename T>
T Parse(const std::string& text) {
  T message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

absl::Time Now() { return absl::FromUnixSeconds(2000); }

v1::Version Moving() {
  return Parse<v1::Version>(R"(
    name: "models/qwen/versions/3" version: 3
    update_id: "0123456789abcdef0123456789abcdef"
    state: STATE_MOVING
    create_time { seconds: 1998 }
    total_bytes: 988065536 wire_bytes: 988065536 moved_bytes: 613000000
    bucket_count: 12)");
}

v1::Version Active() {
  return Parse<v1::Version>(R"(
    name: "models/qwen/versions/2" version: 2 step: 7
    update_id: "fedcba9876543210fedcba9876543210"
    state: STATE_ACTIVE layout_id: "00aa"
    create_time { seconds: 1900 } end_time { seconds: 1901 nanos: 500000000 }
    total_bytes: 988065536 wire_bytes: 988065536 moved_bytes: 988065536
    bucket_count: 12 digest { lane0: 1 lane1: 255 }
    transfer_policy: TRANSFER_POLICY_SHARDED bound_by: "link into b"
    lower_bound { nanos: 780000000 }
    phases { phase: "gather" measured { nanos: 100000 } }
    phases { phase: "transfer" measured { nanos: 800000000 }
             predicted { nanos: 790000000 } }
    phases { phase: "apply" measured { nanos: 200000000 }
             predicted { nanos: 180000000 } }
    ranks { rank: 0 snapshot_time { seconds: 1900 } copied_bytes: 329355264
            copy_duration { nanos: 100000000 } }
    nodes { node: "nodes/b" received_bytes: 988065536 needed_bytes: 988065536
            verified: true repaired_frames: 2 }
    replicas { replica: "models/qwen/replicas/r0" version: 2
      pause_request_time { seconds: 1901 }
      paused_time { seconds: 1901 nanos: 10000000 }
      applied_time { seconds: 1901 nanos: 250000000 }
      resumed_time { seconds: 1901 nanos: 260000000 } })");
}

v1::Version Aborted() {
  return Parse<v1::Version>(R"(
    name: "models/qwen/versions/4" version: 4
    update_id: "aaaaaaaabbbbbbbb" state: STATE_ABORTED
    create_time { seconds: 1990 } end_time { seconds: 1995 }
    total_bytes: 10
    failure { code: 4 reason: "PAUSE_TIMEOUT"
              message: "Replica r1 did not pause in 60 s." })");
}

TEST(RenderTest, ABarForTerminals) {
  EXPECT_EQ(ProgressBar(Moving(), Now(), 200),
            "models/qwen/versions/3  MOVING     "
            "[##############----------]  62%  613.0 MB of 988.1 MB  2.00 s");
  EXPECT_EQ(ProgressBar(Moving(), Now(), 30).size(), 30u);
  EXPECT_EQ(ProgressBar(Active(), Now(), 200),
            "models/qwen/versions/2  ACTIVE     988.1 MB in 1.50 s, transfer "
            "800 ms (1.24 GB/s, 790 ms predicted), pause 260 ms, 1 replica");
  v1::Version moving = Moving();
  v1::PhaseTime* transfer = moving.add_phases();
  transfer->set_phase("transfer");
  transfer->mutable_predicted()->set_seconds(3);
  EXPECT_THAT(ProgressBar(moving, Now(), 200),
              ::testing::HasSubstr("of 988.1 MB, 3.00 s predicted"));
  EXPECT_EQ(ProgressBar(Aborted(), Now(), 200),
            "models/qwen/versions/4  ABORTED    PAUSE_TIMEOUT: Replica r1 did "
            "not pause in 60 s.");
}

TEST(RenderTest, LinesForLogs) {
  EXPECT_EQ(ProgressLine(Moving(), Now()),
            "models/qwen/versions/3 MOVING 62% 613.0 MB of 988.1 MB");
}

TEST(RenderTest, EveryStateCountsItsOwnProgress) {
  v1::Version version = Moving();
  version.set_state(v1::Version::STATE_GATHERING);
  EXPECT_EQ(Fraction(version), 0);
  version.add_ranks()->mutable_snapshot_time()->set_seconds(1);
  version.add_ranks();
  EXPECT_EQ(Fraction(version), 0.5);
  EXPECT_EQ(ProgressText(version), "1 of 2 ranks copied out");
  version.set_state(v1::Version::STATE_PAUSING);
  EXPECT_EQ(Fraction(version), 1) << "without replicas there is nothing to do";
  version.add_replicas()->mutable_paused_time()->set_seconds(1);
  version.add_replicas();
  EXPECT_EQ(Fraction(version), 0.5);
  EXPECT_EQ(ProgressText(version), "1 of 2 replicas paused");
  version.set_state(v1::Version::STATE_APPLYING);
  EXPECT_EQ(Fraction(version), 0);
  version.set_state(v1::Version::STATE_MOVING);
  version.set_wire_bytes(0);
  EXPECT_EQ(Fraction(version), 1) << "all on one node";
  EXPECT_FALSE(HasEnded(version));
}

TEST(RenderTest, Versions) {
  EXPECT_EQ(
      RenderVersions({Aborted(), Moving(), Active()}, Now()),
      "MODEL  VERSION  UPDATE    STATE       BYTES  TRANSFER  PREDICTED   "
      "PAUSE   TOTAL       STARTED\n"
      "qwen         4  aaaaaaaa  ABORTED      10 B         -          -       "
      "-  5.00 s      10 s ago\n"
      "qwen         3  01234567  MOVING   988.1 MB         -          -       "
      "-  2.00 s       2 s ago\n"
      "qwen         2  fedcba98  ACTIVE   988.1 MB    800 ms     790 ms  "
      "260 ms  1.50 s  "
      "1 m 40 s ago\n"
      "models/qwen/versions/4: PAUSE_TIMEOUT: Replica r1 did not pause in 60 "
      "s.\n");
  EXPECT_EQ(RenderVersions({}, Now()), "No versions.\n");
}

TEST(RenderTest, OneVersion) {
  EXPECT_EQ(RenderVersion(Active(), Now()),
            R"(version      models/qwen/versions/2
state        ACTIVE
update_id    fedcba9876543210fedcba9876543210
step         7
started      1 m 40 s ago
served by    1 replica
model bytes  988.1 MB
wire bytes   988.1 MB in 12 buckets
policy       SHARDED
bound by     link into b
lower bound  780 ms
layout       00aa
digest       000000000000000100000000000000ff

PHASE     MEASURED  PREDICTED
gather      100 us          -
transfer    800 ms     790 ms
apply       200 ms     180 ms

RANK    COPIED    COPY       RATE
   0  329.4 MB  100 ms  3.29 GB/s

NODE  RECEIVED    NEEDED  REPAIRED  VERIFIED
b     988.1 MB  988.1 MB         2  yes

REPLICA  TO PAUSE  TO WRITE  TO RESUME    AWAY  FAILURE
r0        10.0 ms    240 ms    10.0 ms  260 ms
)");
}

TEST(RenderTest, ReplicasSayWhatTheyHold) {
  const auto replica = Parse<v1::Replica>(R"(
    name: "models/qwen/replicas/r1" state: STATE_FENCED version: 2
    update_id: "fedcba9876543210" worker_count: 2 node: "nodes/b" behind: true
    incarnation: "i" client: "vllm" pause_holders: "update/x"
    workers { index: 0 node: "nodes/b" pid: 7 tensor_bytes: 500
              installed { state: STATE_INSTALLED update_id: "fedcba9876543210"
                          version: 2 } }
    workers { index: 1 node: "nodes/b" pid: 8 tensor_bytes: 500
              installed { state: STATE_WRITING update_id: "0123456789"
                          version: 3 } }
    last_failure { reason: "APPLY_TIMEOUT" message: "Worker 1 is late." })");
  EXPECT_EQ(RenderReplicas({replica}),
            "MODEL  REPLICA  STATE   VERSION  UPDATE    WORKERS  NODE  NOTE\n"
            "qwen   r1       FENCED        2  fedcba98      2/2  b     behind\n"
            "r1: APPLY_TIMEOUT: Worker 1 is late.\n");
  // An update lets go of it by itself; these do not.
  auto held = Parse<v1::Replica>(R"(
    name: "models/qwen/replicas/r1" state: STATE_PAUSED version: 2
    update_id: "fedcba9876543210" worker_count: 2 node: "nodes/b"
    pause_holders: "update/x" pause_holders: "operator"
    pause_holders: "isolation")");
  EXPECT_EQ(
      RenderReplicas({held}),
      "MODEL  REPLICA  STATE   VERSION  UPDATE    WORKERS  NODE  NOTE\n"
      "qwen   r1       PAUSED        2  fedcba98      0/2  b     paused by "
      "operator, paused by isolation\n");
  EXPECT_EQ(RenderReplica(replica),
            R"(replica       models/qwen/replicas/r1
state         FENCED
serves        version 2 (fedcba98), behind
node          nodes/b
client        vllm
incarnation   i
paused by     update/x
last failure  APPLY_TIMEOUT: Worker 1 is late.

WORKER  NODE  PID  BYTES  HOLDS                                                   CLIENT
     0  b       7  500 B  version 2 (fedcba98)
     1  b       8  500 B  a MIX: version 3 (01234567) was not written to its end
)");
}

TEST(RenderTest, AReplicasHistoryNewestLast) {
  const auto replica = Parse<v1::Replica>(R"(
    name: "models/qwen/replicas/r1" state: STATE_PAUSED version: 2
    update_id: "fedcba9876543210" worker_count: 1 node: "nodes/b"
    history { replica: "models/qwen/replicas/r1" version: 2
              update_id: "fedcba9876543210"
              pause_request_time { seconds: 100 }
              paused_time { seconds: 100 nanos: 10000000 }
              applied_time { seconds: 100 nanos: 250000000 }
              resumed_time { seconds: 100 nanos: 260000000 } }
    history { replica: "models/qwen/replicas/r1" version: 3
              update_id: "0123456789abcdef"
              pause_request_time { seconds: 200 }
              paused_time { seconds: 201 }
              resumed_time { seconds: 205 }
              failure { reason: "PAUSE_TIMEOUT" message: "r2 is late." } }
    history { replica: "models/qwen/replicas/r1" version: 3
              update_id: "aaaabbbbccccdddd"
              pause_request_time { seconds: 300 } })");
  EXPECT_EQ(RenderReplica(replica),
            R"(replica      models/qwen/replicas/r1
state        PAUSED
serves       version 2 (fedcba98)
node         nodes/b
client       -
incarnation  -
paused by    -

VERSION  UPDATE    TO PAUSE  TO WRITE  TO RESUME    AWAY  FAILURE
      2  fedcba98   10.0 ms    240 ms    10.0 ms  260 ms
      3  01234567    1.00 s         -          -  5.00 s  PAUSE_TIMEOUT
      3  aaaabbbb         -         -          -       -
)");
}

TEST(RenderTest, StatusAtAGlance) {
  Snapshot snapshot;
  snapshot.cluster = Parse<v1::Cluster>(R"(
    cluster_id: "c0ffee00c0ffee00" coordinator: "nodes/a" term: 4
    start_time { seconds: 1875 } software_version: "0.1.0")");
  snapshot.nodes.push_back(Parse<v1::Node>(R"(
    name: "nodes/a" state: STATE_CONNECTED data_address: "10.0.0.1:7001"
    connect_time { seconds: 1990 } trainer_rank_count: 3
    memory { store_budget_bytes: 4000000000 store_used_bytes: 988065536 }
    update_ids: "x")"));
  snapshot.models.push_back(Parse<v1::Model>(R"(
    name: "models/qwen" parameter_count: 494032768 total_bytes: 988065536
    world_size: 3 trainer_ranks { rank: 0 registered: true }
    trainer_ranks { rank: 1 registered: true } trainer_ranks { rank: 2 }
    floor_version: 3 active_version: "models/qwen/versions/2"
    updating_version: "models/qwen/versions/3"
    blocked_reason: "Rank 2 is not registered.")"));
  snapshot.versions.push_back(Moving());
  EXPECT_EQ(
      RenderStatus(snapshot, Now()),
      R"(cluster c0ffee00, coordinator a (term 4, up 2 m 05 s), weightsync 0.1.0

NODE  STATE      RANKS  WORKERS  STORE USED   BUDGET  UPDATES  DATA ADDRESS   CONNECTED
a     CONNECTED      3        0    988.1 MB  4.00 GB        1  10.0.0.1:7001   10 s ago

MODEL  ACTIVE  UPDATING  FLOOR   PARAMETERS     BYTES  RANKS  REPLICAS  WORKERS
qwen        2         3      3  494,032,768  988.1 MB    2/3         0        0
qwen cannot be published: Rank 2 is not registered.

No replicas.

models/qwen/versions/3 MOVING 62% 613.0 MB of 988.1 MB
)");
}

TEST(RenderTest, WhatHasBeenTakenOfEachGpu) {
  using ::testing::HasSubstr;
  const std::string text = RenderNode(Parse<v1::Node>(R"(
    name: "nodes/a" state: STATE_CONNECTED
    memory {
      gpus { device_uuid: "GPU-0" device_name: "Card" state: STATE_READY
        total_bytes: 80000000000 free_bytes: 60000000000 slot_count: 3
        slot_bytes: 768000000 context_bytes: 300000000
        device_store_bytes: 16000000000 nccl_bytes: 64000000 restart_count: 2 }
      gpus { device_uuid: "GPU-1" device_name: "Card" state: STATE_STARTING }
      gpus { device_uuid: "GPU-2" state: STATE_FAILED
        failure { reason: "NO_DEVICE" message: "none is here" } }
    })"),
                                      Now());
  EXPECT_THAT(text,
              HasSubstr("Card, 60.0 GB free of 80.0 GB; 3 slots 768.0 MB, "
                        "context 300.0 MB, store 16.0 GB, NCCL 64.0 MB, agent "
                        "started again 2x"));
  EXPECT_THAT(text, HasSubstr("Card, its agent starts\n"));
  EXPECT_THAT(text, HasSubstr("-, FAILED: "));
  EXPECT_THAT(text, HasSubstr("NO_DEVICE"));
  EXPECT_THAT(text, HasSubstr("none is here"));
}

TEST(RenderTest, WhoDoesNotServeAVersionYetIsNamed) {
  using ::testing::HasSubstr;
  v1::Version version = Active();
  version.add_absent_replicas("models/qwen/replicas/r1");
  const std::string text =
      "; not yet: r1 (not whole when it began, gets it when it comes)\n";
  EXPECT_THAT(ProgressLine(version, Now()) + "\n", HasSubstr(text));
  EXPECT_THAT(RenderVersions({version}, Now()),
              HasSubstr("\nmodels/qwen/versions/2" + text));
  EXPECT_THAT(RenderVersion(version, Now()),
              HasSubstr("\nserved by    1 replica" + text));
  // The same words as in C++ and Python.
  version.mutable_replicas(0)->mutable_failure()->set_reason("PAUSE_TIMEOUT");
  EXPECT_THAT(RenderVersion(version, Now()),
              HasSubstr("\nserved by    no replica; not yet: r1 ("));
  EXPECT_THAT(ProgressLine(version, Now()), HasSubstr(", no replica; not yet"));
  v1::Model model;
  model.set_removed(true);
  model.add_absent_replicas("models/qwen/replicas/r1");
  EXPECT_THAT(RenderModel(model), HasSubstr("may still hold it  r1\n"));
}

// Of a version of the coordinator's life before this one the journal alone
// knows, and not when it began.
TEST(RenderTest, WhatIsNotKnownIsNoZero) {
  const v1::Version version = Parse<v1::Version>(R"(
    name: "models/qwen/versions/2" version: 2 update_id: "fedcba98"
    state: STATE_ACTIVE commit_time { seconds: 1900 })");
  EXPECT_EQ(ProgressLine(version, Now()), "models/qwen/versions/2 ACTIVE -");
  const std::string shown = RenderVersion(version, Now()) +
                            RenderVersions({version}, Now()) +
                            ProgressBar(version, Now(), 200);
  EXPECT_EQ(shown.find("no replica"), std::string::npos) << shown;
  EXPECT_THAT(shown, ::testing::HasSubstr("\nserved by    -\n"));
  EXPECT_EQ(shown.find("0 s"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("0 B"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("000"), std::string::npos) << shown;
}

TEST(RenderTest, OneOfAKindIsNotMany) {
  v1::Version version = Moving();
  version.set_state(v1::Version::STATE_GATHERING);
  version.add_ranks();
  EXPECT_EQ(ProgressText(version), "0 of 1 rank copied out");
  version.set_state(v1::Version::STATE_PAUSING);
  version.add_replicas();
  EXPECT_EQ(ProgressText(version), "0 of 1 replica paused");
  version.set_bucket_count(1);
  EXPECT_THAT(RenderVersion(version, Now()),
              ::testing::HasSubstr(" in 1 bucket\n"));
  v1::Model model;
  model.set_replica_count(1);
  model.set_worker_count(1);
  EXPECT_THAT(RenderModel(model), ::testing::HasSubstr("1 with 1 worker\n"));
}

TEST(RenderTest, WhatAnOperatorHasAskedForIsSeen) {
  using ::testing::HasSubstr;
  using ::testing::Not;
  v1::Node node;
  node.set_name("nodes/a");
  node.set_state(v1::Node::STATE_CONNECTED);
  EXPECT_THAT(RenderNodes({node}, Now()), Not(HasSubstr("DRAINING")));
  node.set_draining(true);
  EXPECT_THAT(RenderNodes({node}, Now()), HasSubstr("CONNECTED, DRAINING"));
  EXPECT_THAT(RenderNode(node, Now()), HasSubstr("CONNECTED, DRAINING"));
  v1::Model model;
  model.set_name("models/m");
  model.set_active_version("models/m/versions/3");
  EXPECT_THAT(RenderModel(model), Not(HasSubstr("held")));
  model.set_held_version("models/m/versions/2");
  EXPECT_THAT(RenderModels({model}), HasSubstr("m is held at version 2"));
  EXPECT_THAT(RenderModels({model}), HasSubstr("release m"));
  EXPECT_THAT(RenderModel(model), HasSubstr("models/m/versions/2"));
}

}  // namespace
}  // namespace ctl
}  // namespace weightsync
