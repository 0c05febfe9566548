// The update layouts that this node knows: which bytes of the model lie where
// in which bucket. The coordinator sends the inputs (DefineLayout), every node
// computes the layout from them and compares its digest with the id, so that
// sender and receiver never disagree about a byte.

#ifndef WEIGHTSYNC_DAEMON_NODE_LAYOUTS_H_
#define WEIGHTSYNC_DAEMON_NODE_LAYOUTS_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "schedule/catalog.h"
#include "schedule/layout.h"
#include "weightsync/v1/node.pb.h"

namespace weightsync {
namespace daemon {

// A layout as one node sees it. Immutable: share it between threads.
struct NodeLayout {
  std::string id;
  std::string model;
  schedule::Catalog catalog;
  schedule::UpdateLayout plan;
  // Node names by the index that the plan uses.
  std::vector<std::string> nodes;
  // This node's index; -1 when it has no part in the layout.
  int node = -1;
  // Buckets that the workers of this node need some bytes of, ascending.
  std::vector<int32_t> needed_buckets;

  int32_t bucket_count() const {
    return static_cast<int32_t>(plan.bucket_count());
  }
  int64_t bucket_bytes(int32_t bucket) const {
    return plan.bucket(static_cast<uint32_t>(bucket)).bytes;
  }
  // Buckets that `rank` fills, ascending; none for a rank that sends nothing.
  std::vector<int32_t> RankBuckets(int32_t rank) const;
  // Buckets that ranks of this node fill, ascending.
  std::vector<int32_t> LocalSourceBuckets() const;
  // Sum of bucket_bytes over `buckets`.
  int64_t Bytes(const std::vector<int32_t>& buckets) const;
  // Of one update on this node: what its ranks fill and its workers need.
  int64_t LocalBytes() const;
};

// How a digest of the plan, the model and the node names is written as the
// layout's id: 16 hexadecimal digits.
std::string LayoutId(uint64_t digest);

// The catalog, sources, needs and options that a DefineLayout states, in the
// form that schedule/ takes, made into the layout; `id` is the computed one.
// INVALID_ARGUMENT with schedule's reasons, or LAYOUT_INVALID for an index out
// of range.
absl::StatusOr<NodeLayout> ComputeNodeLayout(const v1::DefineLayout& define,
                                             absl::string_view node);

// Thread-safe. Computing happens on the caller's thread, without the lock.
class LayoutBook {
 public:
  // Layouts that nobody else refers to go when this many of the model were
  // defined after them. The coordinator counts along, and defines one again
  // that has gone.
  static constexpr size_t kKeptPerModel = 4;

  // `node`: this node's name, as in LayoutNode.node.
  explicit LayoutBook(std::string node);

  // Computes and remembers; one that is known already is the newest again.
  // FAILED_PRECONDITION (LAYOUT_MISMATCH) when the digest is not layout_id: the
  // two daemons run different software.
  absl::Status Define(const v1::DefineLayout& define);

  // NOT_FOUND (LAYOUT_UNKNOWN).
  absl::StatusOr<std::shared_ptr<const NodeLayout>> Find(
      absl::string_view layout_id) const;

 private:
  void Keep(std::shared_ptr<const NodeLayout> layout);

  const std::string node_;

  mutable absl::Mutex mutex_;
  // Also finds what was pushed out of recent_ and is still used by somebody.
  absl::flat_hash_map<std::string, std::weak_ptr<const NodeLayout>> by_id_
      ABSL_GUARDED_BY(mutex_);
  // By model, newest last.
  absl::flat_hash_map<std::string,
                      std::deque<std::shared_ptr<const NodeLayout>>>
      recent_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_LAYOUTS_H_
