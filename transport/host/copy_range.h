#ifndef WEIGHTSYNC_TRANSPORT_HOST_COPY_RANGE_H_
#define WEIGHTSYNC_TRANSPORT_HOST_COPY_RANGE_H_

#include <cstdint>

#include "transport/copy.h"

namespace weightsync {
namespace transport {

// Does bytes [begin, end) of `task`, counted through its rows as if they
// followed one another; neither splits an element. With a `digest`, adds the
// digest of these bytes. Owns nothing and takes no lock, so that it may run in
// a SIGBUS guard. Stores are not fenced (NonTemporalFence). REQUIRES:
// task.Validate() is OK; 0 <= begin <= end <= task.bytes(); blocks have their
// scales, and the cast is not kBF16BlockScale.
void CopyRange(const CopyTask& task, int64_t begin, int64_t end,
               Digest* digest);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_COPY_RANGE_H_
