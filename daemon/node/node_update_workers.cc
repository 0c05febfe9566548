// Workers of this node that take part in a STREAM.

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/node/node_update.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

using transport::MakeError;

absl::Status NodeUpdate::BeginStream(Round* round,
                                     const std::vector<int32_t>& alone,
                                     absl::Duration patience) {
  StreamStart start;
  start.model = model();
  start.update_id = update_id_;
  start.version = version_;
  start.step = round->command.step();
  start.layout = layout_;
  // Before its neighbours lose patience with this node.
  start.bucket_timeout = patience / 2;
  std::set<int32_t> ranks;
  for (int32_t bucket : alone) {
    if (!PacksIntoSlot(*round, 0, bucket)) continue;
    start.direct_candidates.insert(bucket);
    ranks.insert(
        layout_->plan.bucket(static_cast<uint32_t>(bucket)).source_rank);
  }
  auto state = std::make_shared<StreamState>();
  {
    absl::MutexLock lock(&mutex_);
    auto there = [this, &ranks]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      for (int32_t rank : ranks) {
        if (sources_.count(rank) == 0) return ended_;
      }
      return true;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&there), patience);
    if (ended_ || round->closed) return RoundClosed();
    for (int32_t rank : ranks) {
      auto found = sources_.find(rank);
      if (found == sources_.end()) {
        return MakeError(
            absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_TIMEOUT",
            absl::StrCat("rank ", rank, " of ", model(),
                         " did not give its tensors to update ", update_id_));
      }
      start.sources.push_back(found->second);
    }
    start.workers = round->stream_workers;
    stream_ = state;
  }
  context_.sink->Begin(
      std::move(start),
      [state](absl::Status status, std::set<int32_t> direct) {
        absl::MutexLock lock(&state->mutex);
        state->status = std::move(status);
        state->direct = std::move(direct);
        state->begun = true;
      },
      [state](int32_t bucket, TensorDigests tensors) {
        absl::MutexLock lock(&state->mutex);
        state->reads.emplace_back(bucket, std::move(tensors));
      },
      [state] {
        absl::MutexLock lock(&state->mutex);
        state->direct_done = true;
      });
  return absl::OkStatus();
}

absl::StatusOr<std::set<int32_t>> NodeUpdate::AwaitStream(
    absl::Duration patience) {
  std::shared_ptr<StreamState> state;
  {
    absl::MutexLock lock(&mutex_);
    auto known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return stream_ != nullptr || ended_;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&known), patience);
    if (ended_) return why_;
    state = stream_;
  }
  if (state != nullptr) {
    absl::MutexLock lock(&state->mutex);
    state->mutex.AwaitWithTimeout(absl::Condition(&state->begun), patience);
    if (state->begun) {
      if (!state->status.ok()) return state->status;
      return state->direct;
    }
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, "STREAM_START_TIMEOUT",
                   absl::StrCat("the workers of node ", context_.node,
                                " could not be told of update ", update_id_,
                                " within ", absl::FormatDuration(patience)));
}

absl::Status NodeUpdate::TakeDirectReads(const std::vector<int32_t>& buckets,
                                         absl::Duration patience) {
  std::shared_ptr<StreamState> state;
  {
    absl::MutexLock lock(&mutex_);
    state = stream_;
  }
  size_t seen = 0;
  while (true) {
    std::vector<std::pair<int32_t, TensorDigests>> fresh;
    bool done = false;
    {
      absl::MutexLock lock(&state->mutex);
      auto news = [&]() ABSL_SHARED_LOCKS_REQUIRED(state->mutex) {
        return state->reads.size() > seen || state->direct_done;
      };
      if (!state->mutex.AwaitWithTimeout(absl::Condition(&news), patience)) {
        return MakeError(
            absl::StatusCode::kDeadlineExceeded, "NO_PROGRESS",
            absl::StrCat("the workers of node ", context_.node,
                         " have read nothing of update ", update_id_, " for ",
                         absl::FormatDuration(patience)));
      }
      fresh.assign(state->reads.begin() + static_cast<std::ptrdiff_t>(seen),
                   state->reads.end());
      seen = state->reads.size();
      done = state->direct_done;
    }
    for (const auto& read : fresh) {
      transport::Digest digest;
      for (const auto& tensor : read.second) digest += tensor.second;
      absl::Status status = NoteSource(read.first, digest, read.second);
      if (!status.ok()) return status;
      absl::MutexLock lock(&mutex_);
      taken_.insert(read.first);
      passed_[read.first] = digest;
    }
    if (done) break;
  }
  // A worker that left may have been the only one to read a bucket; the digest
  // is still needed.
  absl::MutexLock lock(&mutex_);
  for (int32_t bucket : buckets) lane_buckets_.erase(bucket);
  return absl::OkStatus();
}

void NodeUpdate::PassToWorkers(int32_t bucket, const v1::SlotLocation& where) {
  struct Wait {
    absl::Mutex mutex;
    bool taken ABSL_GUARDED_BY(mutex) = false;
  };
  auto wait = std::make_shared<Wait>();
  context_.sink->Pass(update_id_, bucket, where, [wait] {
    absl::MutexLock lock(&wait->mutex);
    wait->taken = true;
  });
  // In bounded time: the sink gives a worker up that does not take it.
  absl::MutexLock lock(&wait->mutex);
  wait->mutex.Await(absl::Condition(&wait->taken));
}

}  // namespace daemon
}  // namespace weightsync
