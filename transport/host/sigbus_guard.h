#ifndef WEIGHTSYNC_TRANSPORT_HOST_SIGBUS_GUARD_H_
#define WEIGHTSYNC_TRANSPORT_HOST_SIGBUS_GUARD_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace weightsync {
namespace transport {

// Runs `body`, which reads memory that somebody else may take away in the
// meantime: a file that its owner truncates under our mapping answers with
// SIGBUS. When that happens on this thread at an address in [begin, begin +
// bytes), rounded to whole pages, `body` is left where it stands, and the
// answer is DATA_LOSS (SOURCE_MEMORY_LOST).
//
// Being left like that (siglongjmp) `body` must not hold a lock nor own
// anything at that moment: it copies, and no more. A SIGBUS from elsewhere goes
// to the handler that was there before, or ends the process as it would have
// done. The handler is installed at the first call. Thread-safe; calls may be
// nested.
absl::Status RunGuarded(const void* begin, size_t bytes,
                        absl::FunctionRef<void()> body);

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_HOST_SIGBUS_GUARD_H_
