// What is read of the memory of this node's ranks, IN_PLACE.

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/node/bucket_digest.h"
#include "daemon/node/convert.h"
#include "daemon/node/node_update.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

using transport::Landing;
using transport::MakeError;

// How often those who wait for two things at once look at the second.
constexpr absl::Duration kLook = absl::Milliseconds(20);

}  // namespace

absl::Status NodeUpdate::NoteSource(int32_t bucket,
                                    const transport::Digest& digest,
                                    const TensorDigests& tensors) {
  absl::MutexLock lock(&mutex_);
  source_tensors_.emplace(bucket, tensors);
  auto known = source_digests_.emplace(bucket, digest);
  woken_ = true;
  if (known.second || known.first->second == digest) return absl::OkStatus();
  return SourceChanged(
      *layout_, layout_->plan.bucket(static_cast<uint32_t>(bucket)).source_rank,
      bucket, known.first->second, digest);
}

absl::Status NodeUpdate::FillFromSource(int32_t bucket, Landing* landing,
                                        absl::Duration patience) {
  const int32_t rank =
      layout_->plan.bucket(static_cast<uint32_t>(bucket)).source_rank;
  std::shared_ptr<const InPlaceSource> source;
  {
    absl::MutexLock lock(&mutex_);
    auto there = [this, rank]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return sources_.count(rank) > 0 || ended_;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&there), patience);
    if (ended_) return why_;
    auto found = sources_.find(rank);
    if (found == sources_.end()) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, "SNAPSHOT_TIMEOUT",
          absl::StrCat("rank ", rank, " of ", model(),
                       " did not give its tensors to update ", update_id_,
                       " within ", absl::FormatDuration(patience)));
    }
    source = found->second;
  }
  if (source->cancel->cancelled()) return source->cancel->status();
  auto digest = PackSourceBucket(*layout_, rank, source->shards, landing,
                                 context_.memory);
  if (!digest.ok()) return digest.status();
  if (source->cancel->cancelled()) return source->cancel->status();
  TensorDigests tensors;
  absl::Status added =
      AddTensorDigests(*layout_, *landing, context_.memory, &tensors);
  if (!added.ok()) return added;
  return NoteSource(bucket, *digest, tensors);
}

absl::StatusOr<SnapshotResult> NodeUpdate::ReadInPlace(
    std::shared_ptr<const InPlaceSource> source, bool verify_source) {
  const absl::Time begin = absl::Now();
  const int32_t rank = source->rank;
  const std::vector<int32_t> buckets = layout_->RankBuckets(rank);
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return why_;
    sources_[rank] = source;
    ++snapshots_;
    woken_ = true;
  }
  absl::StatusOr<SnapshotResult> result = [&] {
    using Result = absl::StatusOr<SnapshotResult>;
    auto stopped = [&]() -> absl::Status {
      if (source->cancel->cancelled()) return source->cancel->status();
      return cancel_.cancelled() ? cancel_.status() : absl::OkStatus();
    };
    auto read_again = [&](int32_t bucket) {
      TensorDigests tensors;
      auto digest = DigestSourceBucket(*layout_, rank, source->shards, bucket,
                                       context_.memory, &tensors);
      return digest.ok() ? NoteSource(bucket, *digest, tensors)
                         : digest.status();
    };
    // The round says which of them pass through lanes.
    std::set<int32_t> lanes;
    bool stream = false;
    while (true) {
      absl::Status stop = stopped();
      if (!stop.ok()) return Result(stop);
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&knows_lanes_), kLook);
      if (!knows_lanes_) continue;
      lanes = lane_buckets_;
      stream = stream_mode_;
      break;
    }
    // What this node's workers need for a STAGE is packed into the store, where
    // lanes find it.
    for (int32_t bucket : buckets) {
      absl::Status stop = stopped();
      if (!stop.ok()) return Result(stop);
      if (stream ||
          !std::binary_search(layout_->needed_buckets.begin(),
                              layout_->needed_buckets.end(), bucket)) {
        continue;
      }
      auto landing = Landings({bucket}, Use::kPack);
      if (!landing.ok()) return Result(landing.status());
      auto digest = PackSourceBucket(*layout_, rank, source->shards,
                                     (*landing)[0].get(), context_.memory);
      absl::Status status = digest.status();
      if (digest.ok()) {
        TensorDigests tensors;
        status = AddTensorDigests(*layout_, *(*landing)[0], context_.memory,
                                  &tensors);
        if (status.ok()) status = NoteSource(bucket, *digest, tensors);
      }
      if (!status.ok()) {
        (*landing)[0]->Fail(status);
        return Result(status);
      }
    }
    // The others are read when a lane or a worker comes to them; and by nobody
    // when a new epoch has none for them.
    while (true) {
      absl::Status stop = stopped();
      if (!stop.ok()) return Result(stop);
      int32_t unread = -1;
      {
        absl::MutexLock lock(&mutex_);
        auto all = [this, &buckets]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          for (int32_t bucket : buckets) {
            if (source_digests_.count(bucket) == 0) return false;
          }
          return true;
        };
        if (all()) break;
        for (int32_t bucket : buckets) {
          if (source_digests_.count(bucket) == 0 &&
              lane_buckets_.count(bucket) == 0) {
            unread = bucket;
          }
        }
        if (unread < 0) {
          mutex_.AwaitWithTimeout(absl::Condition(&all), kLook);
          continue;
        }
      }
      absl::Status status = read_again(unread);
      if (!status.ok()) return Result(status);
    }
    for (int32_t bucket : buckets) {
      absl::Status stop = stopped();
      if (!stop.ok()) return Result(stop);
      if (!verify_source) break;
      absl::Status status = read_again(bucket);
      if (!status.ok()) return Result(status);
    }
    SnapshotResult read;
    absl::MutexLock lock(&mutex_);
    for (int32_t bucket : buckets) {
      v1::BucketDigest digest;
      digest.set_bucket(bucket);
      ToProto(source_digests_.at(bucket), digest.mutable_digest());
      read.buckets.push_back(std::move(digest));
      for (const auto& tensor : source_tensors_.at(bucket)) {
        read.tensors[tensor.first] += tensor.second;
      }
    }
    read.copy_duration = absl::Now() - begin;
    return Result(std::move(read));
  }();
  absl::MutexLock lock(&mutex_);
  --snapshots_;
  woken_ = true;
  return result;
}

absl::Status NodeUpdate::WaitReleased(const CancelFlag* cancel) {
  absl::MutexLock lock(&mutex_);
  ++snapshots_;
  auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return released_ || ended_;
  };
  while (!over() && !cancel->cancelled()) {
    mutex_.AwaitWithTimeout(absl::Condition(&over), kLook);
  }
  --snapshots_;
  woken_ = true;
  if (released_ || (ended_ && committed_)) return absl::OkStatus();
  return ended_ ? why_ : cancel->status();
}

void NodeUpdate::Release() {
  absl::MutexLock lock(&mutex_);
  released_ = true;
}

}  // namespace daemon
}  // namespace weightsync
