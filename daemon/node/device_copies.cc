#include "daemon/node/device_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/node/bucket_digest.h"
#include "schedule/box.h"
#include "schedule/catalog.h"
#include "transport/copy.h"
#include "transport/error.h"

namespace weightsync {
namespace daemon {

namespace {

constexpr int64_t kPartBytes = 16 << 20;

}  // namespace

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
    if (piece.box.Volume() == 0) continue;
    const schedule::Param& param = layout.catalog.param(piece.ordinal);
    transport::GlobalBox global;
    global.ordinal = piece.ordinal;
    global.shape = param.shape;
    global.offset = piece.box.offset;
    const schedule::Dims dense = schedule::DenseStrides(piece.box.extent, 1);
    tasks.push_back(transport::MakeBoxCopy(
        piece.box.extent, static_cast<int32_t>(DTypeSize(param.dtype)),
        /*dst=*/nullptr, dense, data + piece.offset, dense, global));
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
