// For tests of what ends in the background.
#ifndef WEIGHTSYNC_TRANSPORT_EVENTUALLY_H_
#define WEIGHTSYNC_TRANSPORT_EVENTUALLY_H_

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace weightsync {
namespace transport {

// True as soon as `done` is. A test that passes waits no longer than it must,
// so the patience is for the most loaded machine.
template <typename Done>
bool Eventually(const Done& done, absl::Duration patience = absl::Seconds(60)) {
  const absl::Time until = absl::Now() + patience;
  while (!done()) {
    if (absl::Now() > until) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_EVENTUALLY_H_
