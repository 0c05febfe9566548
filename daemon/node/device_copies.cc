#include "daemon/node/device_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/node/bucket_digest.h"
#include "schedule/catalog.h"
#include "transport/copy.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

constexpr int64_t kPartBytes = 16 << 20;

}  // namespace

absl::StatusOr<std::vector<transport::Digest>>
DeviceFrameDigester::DigestFrames(absl::Span<const uint32_t> frames) const {
  // The GPU is asked for each once, in order.
  std::vector<uint32_t> ordered(frames.begin(), frames.end());
  std::sort(ordered.begin(), ordered.end());
  ordered.erase(std::unique(ordered.begin(), ordered.end()), ordered.end());
  constexpr int64_t kFrame = transport::Landing::kFrameBytes;
  std::vector<transport::PackPiece> pieces;
  size_t next = 0;
  for (const schedule::Piece& piece :
       layout_->plan.pieces(static_cast<uint32_t>(bucket_))) {
    const int64_t bytes =
        piece.box.Volume() *
        schedule::DTypeSize(layout_->catalog.param(piece.ordinal).dtype);
    if (bytes == 0) continue;
    // Both are in the order of the bucket.
    while (next < ordered.size() &&
           (int64_t{ordered[next]} + 1) * kFrame <= piece.offset) {
      ++next;
    }
    if (next == ordered.size()) break;
    if (int64_t{ordered[next]} * kFrame >= piece.offset + bytes) continue;
    transport::PackPiece read;
    read.offset = piece.offset;
    read.copy = ReadPiece(*layout_, piece, data_);
    pieces.push_back(std::move(read));
  }
  transport::FrameDigestRequest request;
  request.pieces = pieces;
  request.frame_bytes = kFrame;
  request.frames = ordered;
  auto digests = memory_->DigestFrames(request);
  if (!digests.ok()) return digests.status();
  std::vector<transport::Digest> result;
  result.reserve(frames.size());
  for (uint32_t frame : frames) {
    result.push_back((*digests)[static_cast<size_t>(
        std::lower_bound(ordered.begin(), ordered.end(), frame) -
        ordered.begin())]);
  }
  return result;
}

absl::Status DeviceCopies::Copy(absl::Span<const char> from,
                                absl::Span<char> to,
                                const std::function<void(int64_t)>& part) {
  const int64_t bytes = static_cast<int64_t>(from.size());
  for (int64_t at = 0; at < bytes; at += kPartBytes) {
    transport::CopyTask task;
    task.src = from.data() + at;
    task.dst = to.data() + at;
    task.run_bytes = std::min(kPartBytes, bytes - at);
    absl::Status status =
        memory_->Copy({task}, transport::CopyOptions(), nullptr);
    if (!status.ok()) return status;
    if (part != nullptr) part(at + task.run_bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<transport::Digest> DeviceCopies::DigestOnDevice(
    const NodeLayout& layout, int32_t bucket, const char* data) {
  std::vector<transport::CopyTask> tasks;
  for (const schedule::Piece& piece :
       layout.plan.pieces(static_cast<uint32_t>(bucket))) {
    if (piece.box.Volume() > 0) tasks.push_back(ReadPiece(layout, piece, data));
  }
  transport::Digest digest;
  absl::Status status = memory_->Copy(tasks, transport::CopyOptions(), &digest);
  if (!status.ok()) return status;
  return digest;
}

absl::Status DeviceCopies::Compare(const std::string& update_id, int32_t bucket,
                                   const transport::Digest& is,
                                   const transport::Digest& should) {
  if (is == should) return absl::OkStatus();
  return transport::MakeError(
      absl::StatusCode::kDataLoss, "DEVICE_STORE_DAMAGED",
      absl::StrCat("bucket ", bucket, " of update ", update_id,
                   " was copied between the GPU and host memory, has digest ",
                   is.ToString(), " there and should have ",
                   should.ToString()));
}

absl::Status DeviceCopies::ToHost(
    const std::shared_ptr<const NodeLayout>& layout,
    const std::string& update_id, const std::vector<int32_t>& buckets,
    const std::vector<std::string>& reachable,
    absl::optional<transport::Digest> digest) {
  absl::StatusOr<StorePin> pin = store_->Pin(update_id);
  if (!pin.ok()) return pin.status();
  absl::MutexLock lock(&mutex_);
  const std::vector<int32_t> missing =
      store_->OutOfReach(update_id, buckets, reachable);
  if (missing.empty()) return absl::OkStatus();
  const auto from = store_->Rooms(update_id, missing, /*incoming=*/true);
  if (!from.ok()) return from.status();
  const auto to = store_->ReserveCopies(update_id, missing);
  if (!to.ok()) return to.status();
  for (size_t i = 0; i < missing.size(); ++i) {
    const BucketRoom& source = (*from)[i];
    const BucketRoom& room = (*to)[i];
    if (source.device.empty() || room.data.empty()) continue;
    absl::Status status = Copy(source.data, room.data);
    if (!status.ok()) return status;
    const absl::optional<transport::Digest> known =
        digest.has_value() ? digest : store_->DigestOf(update_id, missing[i]);
    if (known.has_value()) {
      status =
          Compare(update_id, missing[i],
                  BucketDigestMap(layout, missing[i]).Of(0, room.data), *known);
      if (!status.ok()) return status;
    }
    status = store_->MarkCopies(update_id, {missing[i]});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace daemon
}  // namespace weightsync
