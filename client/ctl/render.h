// Resources as text for people. Pure functions; `now` is the reader's clock.
#ifndef WEIGHTSYNC_CLIENT_CTL_RENDER_H_
#define WEIGHTSYNC_CLIENT_CTL_RENDER_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace ctl {

// Everything that `status` shows.
struct Snapshot {
  v1::Cluster cluster;
  std::vector<v1::Node> nodes;
  std::vector<v1::Model> models;
  std::vector<v1::Replica> replicas;
  // The newest one of each model, and those that run.
  std::vector<v1::Version> versions;
};

std::string RenderStatus(const Snapshot& snapshot, absl::Time now);

std::string RenderNodes(const std::vector<v1::Node>& nodes, absl::Time now);
std::string RenderModels(const std::vector<v1::Model>& models);
std::string RenderReplicas(const std::vector<v1::Replica>& replicas);
std::string RenderVersions(const std::vector<v1::Version>& versions,
                           absl::Time now);

// One resource with its details, a field a line.
std::string RenderNode(const v1::Node& node, absl::Time now);
std::string RenderModel(const v1::Model& model);
std::string RenderReplica(const v1::Replica& replica);
std::string RenderVersion(const v1::Version& version, absl::Time now);

// Short names, with commas.
std::string NamesText(
    const google::protobuf::RepeatedPtrField<std::string>& names);

// "MOVING": the enum's value without its prefix.
std::string StateName(v1::Version::State state);
std::string StateName(v1::Replica::State state);
std::string StateName(v1::Node::State state);

bool HasEnded(const v1::Version& version);

// How far the current state of the version is, 0 to 1.
double Fraction(const v1::Version& version);
// What Fraction counts: "412.0 MB of 988.1 MB", "2 of 3 replicas paused".
std::string ProgressText(const v1::Version& version);
// Measured time of a phase; zero when it is not there.
absl::Duration PhaseDuration(const v1::Version& version,
                             const std::string& phase);

// One line for a terminal, at most `columns` wide:
// "models/m/versions/3  MOVING    [######----]  62%  613.2 MB of 988.1 MB  1.21
// GB/s"
std::string ProgressBar(const v1::Version& version, absl::Time now,
                        int columns);
// One line for a log.
std::string ProgressLine(const v1::Version& version, absl::Time now);

}  // namespace ctl
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CTL_RENDER_H_
