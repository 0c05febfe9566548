// What can be said about a request by looking at it alone. Everything here is
// pure.
//
// The coordinator checks the same things again where it depends on them; these
// checks come first, so that nothing about a request that cannot be right
// leaves the node.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_VALIDATE_H_
#define WEIGHTSYNC_DAEMON_SERVICE_VALIDATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "weightsync/v1/admin.pb.h"
#include "weightsync/v1/replica.pb.h"
#include "weightsync/v1/trainer.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

// The highest version that a trainer may name: the server counts on from there,
// and must not run out of numbers.
constexpr int64_t kNewestVersion = int64_t{1} << 62;

// Parameters, dimensions and workers beyond these are mistakes, and would make
// lists that nobody can hold.
inline constexpr int kMaxDimensions = 8;
inline constexpr int kMaxWorldSize = 65536;
inline constexpr int kMaxWorkers = 4096;
inline constexpr size_t kMaxIncarnation = 128;
inline constexpr int kMaxParameters = 1 << 20;
inline constexpr int64_t kMaxDimension = int64_t{1} << 31;

// 1 to 63 of [a-z0-9._-], beginning with a letter or digit.
bool IsName(absl::string_view name);

// INVALID_ARGUMENT (MODEL_NAME_INVALID) unless "models/{model}".
absl::Status CheckModelName(absl::string_view model);

// FAILED_PRECONDITION (PROTOCOL_UNSUPPORTED). 0 is a client that does not say.
absl::Status CheckProtocol(int version);

// 0 for an unknown one.
int BytesOf(v1::DType dtype);

// Bytes of the whole tensor. REQUIRES: its type and shape were checked.
int64_t ParameterBytes(const v1::Parameter& parameter);

absl::Status CheckIdentity(const v1::TrainerIdentity& identity);
absl::Status CheckReplica(const v1::RegisterReplica& registration);
// Everything of a worker's registration, its tensors too.
absl::Status CheckWorker(const v1::RegisterWorker& registration);

// Names, types, shapes, boxes, strides and places in regions, but not what lies
// in the regions.
//   INVALID_ARGUMENT  DTYPE_UNKNOWN, SHAPE_INVALID, BOX_OUT_OF_RANGE,
//   STRIDES_INVALID,
//     DUPLICATE_NAME (one box of a parameter twice), CATALOG_MISMATCH (one name
//     with two types or shapes), DTYPE_MISMATCH (as ShardDType of
//     daemon/node/convert.h), MEMORY_OUT_OF_RANGE (beyond the region, or no
//     such region), MEMORY_SIZE_INVALID.
absl::Status CheckShards(const v1::RegisterShardsRequest& request);

// Bytes that all shards are copied out as, with the scales that are made on the
// way. REQUIRES: CheckShards is OK.
int64_t ShardBytes(const v1::RegisterShardsRequest& request);
// The same of all of the parameters that have a shard here.
int64_t ModelBytes(
    const google::protobuf::RepeatedPtrField<v1::TensorShard>& shards);

//   INVALID_ARGUMENT  VERSION_INVALID, REQUEST_ID_INVALID. Its options are the
//   coordinator's to judge.
absl::Status CheckPublish(const v1::PublishVersionRequest& request);

// What a client says for people, cut between characters where it is longer: it
// is kept for each replica, sent to everybody who looks, and an exception's
// text may hold a tensor.
inline constexpr size_t kLongestClient = 256;
inline constexpr size_t kLongestWords = 2000;
void Cut(size_t longest, std::string* words);
v1::Failure CutFailure(const v1::Failure& failure);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_VALIDATE_H_
