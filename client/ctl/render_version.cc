// Versions: how they go, and how they went.

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cc/served.h"
#include "client/cc/wire_time.h"
#include "client/ctl/format.h"
#include "client/ctl/render.h"
#include "client/ctl/render_common.h"

namespace weightsync {
namespace ctl {
namespace {

using ::weightsync::client::FromProto;

int CountReplicas(const v1::Version& version,
                  bool (v1::ReplicaTimes::*has)() const) {
  int count = 0;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if ((times.*has)()) ++count;
  }
  return count;
}

int64_t Received(const v1::Version& version) {
  return std::min(version.moved_bytes(), version.wire_bytes());
}

// The longest time that a replica was away.
absl::Duration LongestPause(const v1::Version& version) {
  absl::Duration longest;
  for (const v1::ReplicaTimes& times : version.replicas()) {
    if (times.has_pause_request_time() && times.has_resumed_time()) {
      longest = std::max(longest, FromProto(times.resumed_time()) -
                                      FromProto(times.pause_request_time()));
    }
  }
  return longest;
}

absl::Duration TotalTime(const v1::Version& version, absl::Time now) {
  if (!version.has_create_time()) return absl::ZeroDuration();
  const absl::Time end =
      version.has_end_time() ? FromProto(version.end_time()) : now;
  return std::max(end - FromProto(version.create_time()), absl::ZeroDuration());
}

absl::Duration Predicted(const v1::Version& version, const char* phase) {
  for (const v1::PhaseTime& time : version.phases()) {
    if (time.phase() == phase) return FromProto(time.predicted());
  }
  return absl::ZeroDuration();
}

// ", 790 ms predicted"; nothing where nothing was.
std::string PredictedText(const v1::Version& version, const char* phase) {
  const absl::Duration predicted = Predicted(version, phase);
  return predicted > absl::ZeroDuration()
             ? absl::StrCat(", ", HumanDuration(predicted), " predicted")
             : "";
}

// Of a version that an earlier coordinator had only its journal knows: no
// times.
std::string TotalText(const v1::Version& version, absl::Time now) {
  return version.has_create_time() ? HumanDuration(TotalTime(version, now))
                                   : "-";
}

// "1 of 2 replicas", "0 of 1 rank".
std::string PartOf(int part, int all, const char* what) {
  return absl::StrCat(part, " of ", Counted(all, what));
}

std::string BytesText(const v1::Version& version) {
  return version.total_bytes() > 0 ? HumanBytes(version.total_bytes()) : "-";
}

// "SHARDED".
std::string PolicyText(v1::TransferPolicy policy) {
  const std::string name = v1::TransferPolicy_Name(policy);
  const std::string prefix = "TRANSFER_POLICY_";
  return absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
}

// "ACTIVE, 988.1 MB in 1.20 s, pause 310 ms".
std::string EndText(const v1::Version& version, absl::Time now) {
  if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
    return FailureText(version.failure());
  }
  std::string text = BytesText(version);
  if (version.has_create_time()) {
    absl::StrAppend(&text, " in ", TotalText(version, now));
  }
  const absl::Duration transfer = PhaseDuration(version, "transfer");
  if (version.wire_bytes() > 0 && transfer > absl::ZeroDuration()) {
    absl::StrAppend(&text, ", transfer ", HumanDuration(transfer), " (",
                    HumanRate(version.wire_bytes(), transfer),
                    PredictedText(version, "transfer"), ")");
  }
  if (version.replicas_size() > 0) {
    absl::StrAppend(&text, ", pause ", HumanDuration(LongestPause(version)),
                    ", ", client::ServingReplicas(version));
  }
  return absl::StrCat(text, client::NotServedText(version));
}

}  // namespace

std::string StateName(v1::Version::State state) {
  return WithoutPrefix(v1::Version::State_Name(state));
}
bool HasEnded(const v1::Version& version) {
  return version.state() == v1::Version::STATE_ACTIVE ||
         version.state() == v1::Version::STATE_ABORTED ||
         version.state() == v1::Version::STATE_SUPERSEDED ||
         version.state() == v1::Version::STATE_LOST;
}

absl::Duration PhaseDuration(const v1::Version& version,
                             const std::string& phase) {
  for (const v1::PhaseTime& time : version.phases()) {
    if (time.phase() == phase) return FromProto(time.measured());
  }
  return absl::ZeroDuration();
}

double Fraction(const v1::Version& version) {
  const auto part = [](double done, double all) {
    return all > 0 ? std::min(done / all, 1.0) : 1.0;
  };
  const int replicas = version.replicas_size();
  switch (version.state()) {
    case v1::Version::STATE_GATHERING: {
      int done = 0;
      for (const v1::RankProgress& rank : version.ranks()) {
        if (rank.has_snapshot_time()) ++done;
      }
      return version.ranks_size() == 0 ? 0 : part(done, version.ranks_size());
    }
    case v1::Version::STATE_PREPARING:
      return 0;
    case v1::Version::STATE_MOVING:
      return part(static_cast<double>(Received(version)),
                  static_cast<double>(version.wire_bytes()));
    case v1::Version::STATE_PAUSING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_paused_time),
                  replicas);
    case v1::Version::STATE_APPLYING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_applied_time),
                  replicas);
    case v1::Version::STATE_RESUMING:
      return part(CountReplicas(version, &v1::ReplicaTimes::has_resumed_time),
                  replicas);
    default:
      return 1;
  }
}

std::string ProgressText(const v1::Version& version) {
  const int replicas = version.replicas_size();
  switch (version.state()) {
    case v1::Version::STATE_GATHERING: {
      int done = 0;
      for (const v1::RankProgress& rank : version.ranks()) {
        if (rank.has_snapshot_time()) ++done;
      }
      return absl::StrCat(PartOf(done, version.ranks_size(), "rank"),
                          " copied out");
    }
    case v1::Version::STATE_PREPARING:
      return "reserving memory, joining groups";
    case v1::Version::STATE_MOVING:
      return absl::StrCat(HumanBytes(Received(version)), " of ",
                          HumanBytes(version.wire_bytes()),
                          PredictedText(version, "transfer"));
    case v1::Version::STATE_PAUSING:
      return absl::StrCat(
          PartOf(CountReplicas(version, &v1::ReplicaTimes::has_paused_time),
                 replicas, "replica"),
          " paused");
    case v1::Version::STATE_APPLYING:
      return absl::StrCat(
          PartOf(CountReplicas(version, &v1::ReplicaTimes::has_applied_time),
                 replicas, "replica"),
          " written");
    case v1::Version::STATE_RESUMING:
      return absl::StrCat(
          PartOf(CountReplicas(version, &v1::ReplicaTimes::has_resumed_time),
                 replicas, "replica"),
          " resumed");
    default:
      return "";
  }
}

std::string ProgressBar(const v1::Version& version, absl::Time now,
                        int columns) {
  std::string line =
      absl::StrFormat("%s  %-9s  ", version.name(), StateName(version.state()));
  if (HasEnded(version)) {
    absl::StrAppend(&line, EndText(version, now));
  } else {
    constexpr int kWidth = 24;
    const double fraction = Fraction(version);
    const int filled = static_cast<int>(std::floor(fraction * kWidth));
    absl::StrAppend(
        &line,
        absl::StrFormat("[%s%s] %3d%%  ", std::string(filled, '#'),
                        std::string(kWidth - filled, '-'),
                        static_cast<int>(std::floor(fraction * 100))),
        ProgressText(version), "  ", TotalText(version, now));
  }
  if (columns > 0 && static_cast<int>(line.size()) > columns) {
    line.resize(columns);
  }
  return line;
}

std::string ProgressLine(const v1::Version& version, absl::Time now) {
  std::string line =
      absl::StrCat(version.name(), " ", StateName(version.state()));
  if (HasEnded(version)) {
    absl::StrAppend(&line, " ", EndText(version, now));
  } else {
    const std::string text = ProgressText(version);
    absl::StrAppend(
        &line,
        absl::StrFormat(" %d%%",
                        static_cast<int>(std::floor(Fraction(version) * 100))));
    if (!text.empty()) absl::StrAppend(&line, " ", text);
  }
  return line;
}
std::string RenderVersions(const std::vector<v1::Version>& versions,
                           absl::Time now) {
  if (versions.empty()) return "No versions.\n";
  Table table({"MODEL", "VERSION", "UPDATE", "STATE", "BYTES", "TRANSFER",
               "PREDICTED", "PAUSE", "TOTAL", "STARTED"});
  std::string failures;
  for (const v1::Version& version : versions) {
    const std::string& name = version.name();
    const size_t cut = name.find("/versions/");
    const absl::Duration transfer = PhaseDuration(version, "transfer");
    const absl::Duration predicted = Predicted(version, "transfer");
    const absl::Duration pause = LongestPause(version);
    table.Add(
        {LastPart(name.substr(0, cut)), absl::StrCat(version.version()),
         ShortId(version.update_id()), StateName(version.state()),
         BytesText(version),
         transfer > absl::ZeroDuration() ? HumanDuration(transfer) : "-",
         predicted > absl::ZeroDuration() ? HumanDuration(predicted) : "-",
         pause > absl::ZeroDuration() ? HumanDuration(pause) : "-",
         TotalText(version, now),
         version.has_create_time() ? Ago(now, FromProto(version.create_time()))
                                   : "-"});
    if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
      absl::StrAppend(&failures, name, ": ", FailureText(version.failure()),
                      "\n");
    } else if (!version.absent_replicas().empty()) {
      absl::StrAppend(&failures, name, client::NotServedText(version), "\n");
    }
  }
  return absl::StrCat(table.ToString(), failures);
}

std::string RenderVersion(const v1::Version& version, absl::Time now) {
  Fields fields;
  fields.Add("version", version.name());
  fields.Add("state", StateName(version.state()));
  if (HasEnded(version) && version.state() != v1::Version::STATE_ACTIVE) {
    fields.Add("because", FailureText(version.failure()));
  } else if (!HasEnded(version)) {
    fields.Add(
        "progress",
        absl::StrFormat("%d%%  %s",
                        static_cast<int>(std::floor(Fraction(version) * 100)),
                        ProgressText(version)));
  }
  fields.Add("update_id", version.update_id());
  fields.Add("step", absl::StrCat(version.step()));
  if (version.has_create_time()) {
    fields.Add("started", Ago(now, FromProto(version.create_time())));
  }
  if (version.state() == v1::Version::STATE_ACTIVE) {
    fields.Add("served by", client::ServersKnown(version)
                                ? absl::StrCat(client::ServingReplicas(version),
                                               client::NotServedText(version))
                                : "-");
  }
  fields.Add("model bytes", BytesText(version));
  // Of one that an earlier coordinator had only the journal knows.
  fields.Add("wire bytes",
             version.bucket_count() == 0 || !version.has_create_time()
                 ? "-"
                 : absl::StrCat(HumanBytes(version.wire_bytes()), " in ",
                                Counted(version.bucket_count(), "bucket")));
  if (version.transfer_policy() != v1::TRANSFER_POLICY_UNSPECIFIED) {
    fields.Add("policy", PolicyText(version.transfer_policy()));
    fields.Add("bound by", Dash(version.bound_by()));
    fields.Add("lower bound", HumanDuration(FromProto(version.lower_bound())));
  }
  if (!version.checkpoint_path().empty()) {
    fields.Add("checkpoint", version.checkpoint_path());
  }
  fields.Add("layout", Dash(version.layout_id()));
  fields.Add("digest",
             version.has_digest()
                 ? absl::StrFormat("%016x%016x", version.digest().lane0(),
                                   version.digest().lane1())
                 : "-");
  std::string out = fields.ToString();
  if (version.phases_size() > 0) {
    Table table({"PHASE", "MEASURED", "PREDICTED"});
    for (const v1::PhaseTime& phase : version.phases()) {
      table.Add({phase.phase(), HumanDuration(FromProto(phase.measured())),
                 phase.has_predicted()
                     ? HumanDuration(FromProto(phase.predicted()))
                     : "-"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.ranks_size() > 0) {
    Table table({"RANK", "COPIED", "COPY", "RATE"});
    for (const v1::RankProgress& rank : version.ranks()) {
      const bool done = rank.has_snapshot_time();
      table.Add({absl::StrCat(rank.rank()),
                 done ? HumanBytes(rank.copied_bytes()) : "-",
                 done ? HumanDuration(FromProto(rank.copy_duration())) : "-",
                 done ? HumanRate(rank.copied_bytes(),
                                  FromProto(rank.copy_duration()))
                      : "-"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.nodes_size() > 0) {
    Table table({"NODE", "RECEIVED", "NEEDED", "REPAIRED", "VERIFIED"});
    for (const v1::NodeProgress& node : version.nodes()) {
      table.Add({LastPart(node.node()), HumanBytes(node.received_bytes()),
                 HumanBytes(node.needed_bytes()),
                 absl::StrCat(node.repaired_frames()),
                 node.verified() ? "yes" : "no"});
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  if (version.replicas_size() > 0) {
    Table table(WithTimes({"REPLICA"}, TimesColumns()));
    for (const v1::ReplicaTimes& times : version.replicas()) {
      table.Add(WithTimes({LastPart(times.replica())}, TimesCells(times)));
    }
    absl::StrAppend(&out, "\n", table.ToString());
  }
  return out;
}
}  // namespace ctl
}  // namespace weightsync
