// The workers of this node that take part in a STREAM, as the mover sees them:
// they are told that it begins, are passed bucket after bucket, and are told
// how it ended.

#ifndef WEIGHTSYNC_DAEMON_NODE_STREAM_SINK_H_
#define WEIGHTSYNC_DAEMON_NODE_STREAM_SINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/node/layouts.h"
#include "daemon/node/snapshot.h"
#include "weightsync/v1/node.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

// The memory of a trainer rank of this node whose tensors stand still until the
// update is through.
struct InPlaceSource {
  int32_t rank = 0;
  std::vector<SourceRegion> regions;
  std::vector<SourceShard> shards;
  // Keeps the regions mapped.
  std::shared_ptr<const void> keep_alive;
  std::shared_ptr<CancelFlag> cancel;
};

struct StreamStart {
  std::string model;
  std::string update_id;
  int64_t version = 0;
  int64_t step = 0;
  std::shared_ptr<const NodeLayout> layout;
  // Those that are not here (any more) have no part in it.
  std::vector<v1::StreamWorker> workers;
  // A worker that takes longer than this for a bucket is given up.
  absl::Duration bucket_timeout;
  // Buckets that nobody else needs and whose bytes are in `sources`.
  std::set<int32_t> direct_candidates;
  std::vector<std::shared_ptr<const InPlaceSource>> sources;
};

// Thread-safe. Callbacks come on any thread, each once, in bounded time after
// the call or after End; they must not block. A worker that leaves has taken
// everything: that its replica is lost is the coordinator's to judge.
class StreamSink {
 public:
  virtual ~StreamSink() = default;

  // Tells the workers; those who were told before are not told again.
  // `started` gets an error when some worker cannot be told what to do, and
  // otherwise those of the candidates that every worker copies straight from
  // the sources. `read` is called for each of these, for every worker that
  // wants it, with the digests of what it read; with none where that worker
  // could not, which is to be passed the bucket then. `direct_done` is called
  // when no more comes.
  virtual void Begin(
      StreamStart start,
      std::function<void(absl::Status, std::set<int32_t> direct)> started,
      std::function<void(int32_t bucket, TensorDigests tensors)> read,
      std::function<void()> direct_done) = 0;

  // Has every worker that needs it copy a bucket, which stays where it is until
  // `taken` is called. OK also when none does.
  virtual void Pass(const std::string& update_id, int32_t bucket,
                    const v1::SlotLocation& where,
                    std::function<void()> taken) = 0;

  // The update is over before its commit: its workers hold a mix and are told
  // so. What is outstanding is answered.
  virtual void Abort(const std::string& update_id) = 0;
  // Nothing will be passed any more; ApplyWorker completes the workers.
  virtual void Close(const std::string& update_id) = 0;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_NODE_STREAM_SINK_H_
