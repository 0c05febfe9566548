#include "transport/landing.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "transport/error.h"

namespace weightsync {
namespace transport {

constexpr int64_t Landing::kFrameBytes;
constexpr size_t Landing::kDigestFrames;

namespace {

uint32_t FrameCountOf(size_t bytes) {
  return static_cast<uint32_t>(
      (static_cast<int64_t>(bytes) + Landing::kFrameBytes - 1) /
      Landing::kFrameBytes);
}

}  // namespace

Landing::Landing(uint64_t bucket_id, absl::Span<char> data,
                 std::shared_ptr<const DigestMap> digests, FileRange file)
    : bucket_id_(bucket_id),
      data_(data),
      digests_(std::move(digests)),
      file_(file),
      frame_count_(FrameCountOf(data.size())),
      states_(frame_count_, FrameState::kEmpty),
      frame_digests_(frame_count_) {
  ready_order_.reserve(frame_count_);
}

Landing::Landing(uint64_t bucket_id, absl::Span<char> data,
                 std::shared_ptr<const FrameDigester> digester)
    : bucket_id_(bucket_id),
      data_(data),
      digester_(std::move(digester)),
      frame_count_(FrameCountOf(data.size())),
      states_(frame_count_, FrameState::kEmpty),
      frame_digests_(frame_count_) {
  ready_order_.reserve(frame_count_);
}

absl::Span<char> Landing::frame(uint32_t frame) const {
  DCHECK_LT(frame, frame_count_);
  return data_.subspan(static_cast<size_t>(frame) * kFrameBytes, kFrameBytes);
}

FileRange Landing::frame_file(uint32_t frame) const {
  DCHECK_LT(frame, frame_count_);
  FileRange file = file_;
  if (file.fd >= 0) file.offset += static_cast<int64_t>(frame) * kFrameBytes;
  return file;
}

Digest Landing::ComputeDigest(uint32_t frame_index) const {
  CHECK(!on_device()) << "nobody here can read bucket " << bucket_id_;
  return digests_->Of(static_cast<int64_t>(frame_index) * kFrameBytes,
                      frame(frame_index));
}

absl::StatusOr<std::vector<Digest>> Landing::ComputeDigests(
    absl::Span<const uint32_t> frames) const {
  std::vector<Digest> digests;
  digests.reserve(frames.size());
  if (!on_device()) {
    for (uint32_t frame : frames) digests.push_back(ComputeDigest(frame));
    return digests;
  }
  for (size_t at = 0; at < frames.size(); at += kDigestFrames) {
    const absl::Span<const uint32_t> part = frames.subspan(at, kDigestFrames);
    const absl::StatusOr<std::vector<Digest>> some =
        digester_->DigestFrames(part);
    if (!some.ok()) return some.status();
    if (some->size() != part.size()) {
      return MakeError(absl::StatusCode::kInternal, "DIGESTS_MISSING",
                       absl::StrCat(some->size(), " digests of ", part.size(),
                                    " frames of bucket ", bucket_id_));
    }
    digests.insert(digests.end(), some->begin(), some->end());
  }
  return digests;
}

bool Landing::Claim(uint32_t frame) {
  absl::MutexLock lock(&mutex_);
  if (states_[frame] != FrameState::kEmpty) return false;
  states_[frame] = FrameState::kFilling;
  return true;
}

void Landing::Unclaim(uint32_t frame) {
  absl::MutexLock lock(&mutex_);
  if (states_[frame] == FrameState::kFilling)
    states_[frame] = FrameState::kEmpty;
}

bool Landing::MarkReady(uint32_t frame, const Digest& digest) {
  absl::MutexLock lock(&mutex_);
  if (states_[frame] == FrameState::kReady) return false;
  states_[frame] = FrameState::kReady;
  frame_digests_[frame] = digest;
  sum_ += digest;
  ready_order_.push_back(frame);
  for (Watcher* watcher : watchers_)
    watcher->OnFramesReady(absl::MakeConstSpan(&frame, 1));
  return ready_order_.size() == frame_count_;
}

absl::Status Landing::MarkAllReady() {
  std::vector<uint32_t> frames;
  for (uint32_t i = 0; i < frame_count_; ++i) {
    // Several that are to send it do this at once, and share the work.
    if (!Claim(i)) continue;
    frames.push_back(i);
    // Part by part: what is marked is on its way meanwhile.
    if (frames.size() < (on_device() ? kDigestFrames : 1)) continue;
    absl::Status status = MarkReadyAsTheyAre(frames);
    if (!status.ok()) return status;
    frames.clear();
  }
  return MarkReadyAsTheyAre(frames);
}

absl::Status Landing::MarkReadyAsTheyAre(absl::Span<const uint32_t> frames) {
  if (frames.empty()) return absl::OkStatus();
  const absl::StatusOr<std::vector<Digest>> digests = ComputeDigests(frames);
  if (!digests.ok()) {
    for (uint32_t frame : frames) Unclaim(frame);
    return digests.status();
  }
  for (size_t i = 0; i < frames.size(); ++i)
    MarkReady(frames[i], (*digests)[i]);
  return absl::OkStatus();
}

void Landing::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok() || ready_order_.size() == frame_count_) return;
  status_ = status;
  for (Watcher* watcher : watchers_) watcher->OnFailed(status);
}

bool Landing::IsReady(uint32_t frame) const {
  absl::MutexLock lock(&mutex_);
  return states_[frame] == FrameState::kReady;
}

Digest Landing::frame_digest(uint32_t frame) const {
  absl::MutexLock lock(&mutex_);
  return frame_digests_[frame];
}

uint32_t Landing::ready_frames() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<uint32_t>(ready_order_.size());
}

bool Landing::complete() const {
  absl::MutexLock lock(&mutex_);
  return ready_order_.size() == frame_count_;
}

absl::Status Landing::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

Digest Landing::bucket_digest() const {
  absl::MutexLock lock(&mutex_);
  return sum_;
}

std::vector<uint8_t> Landing::ReadyBitmap() const {
  absl::MutexLock lock(&mutex_);
  std::vector<uint8_t> bits((frame_count_ + 7) / 8, 0);
  for (uint32_t frame : ready_order_)
    bits[frame / 8] |= static_cast<uint8_t>(1u << (frame % 8));
  return bits;
}

absl::Status Landing::WaitComplete(absl::Duration no_progress) const {
  absl::MutexLock lock(&mutex_);
  while (true) {
    if (ready_order_.size() == frame_count_) return absl::OkStatus();
    if (!status_.ok()) return status_;
    const size_t before = ready_order_.size();
    auto moved = [this, before]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return ready_order_.size() != before || !status_.ok();
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&moved), no_progress)) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, "NO_PROGRESS",
          absl::StrCat("bucket ", bucket_id_, " has ", before, " of ",
                       frame_count_, " frames and got none for ",
                       absl::FormatDuration(no_progress)));
    }
  }
}

void Landing::AddWatcher(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.push_back(watcher);
  if (!ready_order_.empty()) watcher->OnFramesReady(ready_order_);
  if (!status_.ok()) watcher->OnFailed(status_);
}

void Landing::RemoveWatcher(Watcher* watcher) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(std::remove(watchers_.begin(), watchers_.end(), watcher),
                  watchers_.end());
}

bool Landing::AcquireReceiver(const void* owner) {
  absl::MutexLock lock(&mutex_);
  if (receiver_ != nullptr && receiver_ != owner) return false;
  receiver_ = owner;
  return true;
}

void Landing::ReleaseReceiver(const void* owner) {
  absl::MutexLock lock(&mutex_);
  if (receiver_ == owner) receiver_ = nullptr;
}

}  // namespace transport
}  // namespace weightsync
