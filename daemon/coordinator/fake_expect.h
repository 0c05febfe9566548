// What many tests with a FakeCluster ask for, and what all of them expect in
// the end.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_EXPECT_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_EXPECT_H_

#include <string>

#include "absl/strings/match.h"
#include "daemon/coordinator/fake_cluster.h"
#include "gtest/gtest.h"

namespace weightsync {
namespace daemon {

// ---- Requests ----

inline v1::PauseReplicaRequest Pause(const std::string& name) {
  v1::PauseReplicaRequest request;
  request.set_name(ReplicaName(name));
  return request;
}
inline v1::ResumeReplicaRequest Resume(const std::string& name) {
  v1::ResumeReplicaRequest request;
  request.set_name(ReplicaName(name));
  return request;
}
inline v1::RollbackModelRequest RollbackTo(int version) {
  v1::RollbackModelRequest request;
  request.set_version(VersionName(version));
  return request;
}

// ---- Expectations ----

// Where in the trace the first (or last) entry with this part stands; -1: none.
inline int First(const FakeCluster& c, const std::string& part) {
  for (size_t i = 0; i < c.trace.size(); ++i) {
    if (absl::StrContains(c.trace[i], part)) return static_cast<int>(i);
  }
  return -1;
}
inline int Last(const FakeCluster& c, const std::string& part) {
  for (size_t i = c.trace.size(); i-- > 0;) {
    if (absl::StrContains(c.trace[i], part)) return static_cast<int>(i);
  }
  return -1;
}

// Everybody runs, with the same update and without a mix.
inline void ExpectAllServe(const FakeCluster& c, const std::string& update_id) {
  EXPECT_EQ(c.violations, 0);
  for (const auto& engine : c.engines) {
    EXPECT_FALSE(engine.second.paused) << engine.first;
    for (const v1::InstalledState& worker : engine.second.workers) {
      EXPECT_EQ(worker.update_id(), update_id) << engine.first;
      EXPECT_NE(worker.state(), v1::InstalledState::STATE_WRITING)
          << engine.first;
    }
  }
}

// The cluster still works: a new version reaches everybody.
inline void ExpectNextPublishWorks(FakeCluster* c, int world = 2) {
  c->intercept = nullptr;
  c->PublishAll(world);
  c->Run();
  const v1::Version version = c->Version();
  EXPECT_EQ(version.state(), v1::Version::STATE_ACTIVE)
      << version.ShortDebugString();
  ExpectAllServe(*c, version.update_id());
}

inline v1::Failure MakeFailure(int code, const std::string& reason,
                               const std::string& message) {
  v1::Failure failure;
  failure.set_code(code);
  failure.set_reason(reason);
  failure.set_message(message);
  return failure;
}

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_FAKE_EXPECT_H_
