// Bytes that come by way of a checkpoint instead of groups: the marker is
// looked for when the round is prepared, the files are read when they are
// complete.

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/convert.h"
#include "daemon/node/node_update.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::Landing;
using transport::MakeError;

// Read at once, and then told of.
constexpr uint32_t kChunkFrames = 64;
// For a network file system to show what was renamed a moment ago.
constexpr absl::Duration kOpenPatience = absl::Seconds(3);

}  // namespace

void NodeUpdate::AddDiskFlow(Round* round, const std::set<int32_t>& received) {
  auto run = std::make_unique<FlowRun>();
  run->disk = true;
  run->buckets.assign(received.begin(), received.end());
  {
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : run->buckets) {
      auto landing = landings_.find(bucket);
      if (landing != landings_.end()) run->landings.push_back(landing->second);
    }
  }
  round->flows.push_back(std::move(run));
}

bool NodeUpdate::IsClosed(const Round& round) {
  absl::MutexLock lock(&mutex_);
  return round.closed || ended_;
}

absl::Status NodeUpdate::MoveFromDisk(Round* round, FlowRun* flow) {
  if (flow->landings.empty()) return absl::OkStatus();
  std::string path;
  {
    absl::MutexLock lock(&mutex_);
    path = round->checkpoint_path;
  }
  auto data = context_.checkpoints->OpenToRead(path, layout_);
  const absl::Time deadline = absl::Now() + kOpenPatience;
  while (absl::IsNotFound(data.status()) && absl::Now() < deadline &&
         !IsClosed(*round)) {
    absl::SleepFor(absl::Milliseconds(50));
    data = context_.checkpoints->OpenToRead(path, layout_);
  }
  if (absl::IsNotFound(data.status())) {
    return MakeError(absl::StatusCode::kFailedPrecondition,
                     "CHECKPOINT_NOT_SHARED",
                     absl::StrCat("node ", context_.node, " does not see ",
                                  path, ": ", data.status().message()));
  }
  if (!data.ok()) return data.status();

  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  absl::Mutex mutex;
  absl::Status status;
  const auto work = [&] {
    for (size_t i = next++; i < flow->landings.size() && !failed; i = next++) {
      absl::Status read = ReadLanding(*round, **data, flow->landings[i].get());
      if (read.ok()) continue;
      absl::MutexLock lock(&mutex);
      if (!failed.exchange(true)) status = read;
    }
  };
  std::vector<std::thread> threads;
  const int count = std::min<int>(context_.checkpoints->threads(),
                                  static_cast<int>(flow->landings.size()));
  for (int i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&mutex);
  return status;
}

absl::Status NodeUpdate::ReadLanding(const Round& round,
                                     const CheckpointData& data,
                                     Landing* landing) {
  const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
  for (uint32_t frame = 0; frame < landing->frame_count();) {
    if (IsClosed(round)) {
      return RoundClosed();
    }
    // What came over a group before is here already, and stays.
    if (!landing->Claim(frame)) {
      ++frame;
      continue;
    }
    uint32_t end = frame + 1;
    while (end < landing->frame_count() && end - frame < kChunkFrames &&
           landing->Claim(end)) {
      ++end;
    }
    absl::Status status =
        data.Read(bucket, static_cast<int64_t>(frame) * Landing::kFrameBytes,
                  std::min(landing->size(),
                           static_cast<int64_t>(end) * Landing::kFrameBytes),
                  landing->frame(0).data());
    for (; frame < end; ++frame) {
      if (status.ok()) {
        landing->MarkReady(frame, landing->ComputeDigest(frame));
      } else {
        landing->Unclaim(frame);
      }
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void NodeUpdate::ReportLoaded() {
  std::vector<std::shared_ptr<Landing>> landings;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& landing : landings_) landings.push_back(landing.second);
  }
  round_->loaded = true;
  v1::NodeReport report;
  v1::RankSnapshotted* loaded = report.mutable_rank_snapshotted();
  loaded->set_model(model());
  loaded->set_update_id(update_id_);
  loaded->set_rank(-1);
  TensorDigests tensors;
  for (const auto& landing : landings) {
    const int32_t bucket = static_cast<int32_t>(landing->bucket_id());
    v1::BucketDigest* digest = loaded->add_buckets();
    digest->set_bucket(bucket);
    ToProto(landing->bucket_digest(), digest->mutable_digest());
    // Several nodes have read it; one counts it.
    const auto& readers =
        layout_->plan.need_nodes(static_cast<uint32_t>(bucket));
    if (!readers.empty() && readers.front() == layout_->node) {
      absl::Status added =
          AddTensorDigests(*layout_, *landing, context_.memory, &tensors);
      LOG_IF(DFATAL, !added.ok()) << added;
    }
  }
  for (const auto& tensor : tensors) {
    v1::TensorDigest* digest = loaded->add_tensors();
    digest->set_ordinal(static_cast<int32_t>(tensor.first));
    ToProto(tensor.second, digest->mutable_digest());
  }
  context_.report(std::move(report));
}

}  // namespace daemon
}  // namespace weightsync
