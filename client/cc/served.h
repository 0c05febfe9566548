// Who serves a version, in a sentence.
#ifndef WEIGHTSYNC_CLIENT_CC_SERVED_H_
#define WEIGHTSYNC_CLIENT_CC_SERVED_H_

#include <string>

#include "weightsync/v1/admin.pb.h"

namespace weightsync {
namespace client {

// Replicas that run with it.
int ServingCount(const v1::Version& version);

// False of one that an earlier coordinator had: only its journal knows it, and
// that does not tell who serves it.
bool ServersKnown(const v1::Version& version);

// How many, in words: "no replica", "1 replica", "2 replicas".
std::string ServingReplicas(const v1::Version& version);

// Of one that is ACTIVE, which says that nobody is waited for any more, not
// that everybody has it:
//   "2 replicas serve models/m/versions/3"
//   "1 replica serves models/m/versions/3; not yet: r1 (not whole when it
//   began, gets it when it comes); left out: r2 (HOOK_FAILED: worker 0 of
//   models/m/replicas/r2: RuntimeError: no room)"
// Of any other: its state, and why it was given up.
std::string ServedText(const v1::Version& version);

// The second half alone, from "; not yet" on; empty where there is none.
std::string NotServedText(const v1::Version& version);

}  // namespace client
}  // namespace weightsync

#endif  // WEIGHTSYNC_CLIENT_CC_SERVED_H_
