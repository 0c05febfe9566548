// Named points of the life of an update, at which chaos runs (tests/chaos) stop
// or end a daemon. The product has no Options::fault_point, and passes them by.
//
//   coordinator:journal:RECORD      before a record is written
//   coordinator:journalled:RECORD   it is on the disk, and nobody was told
//   coordinator:command:COMMAND     before a node is told
//   node:command:COMMAND            a node was told, and has done nothing yet
//   node:report:REPORT              before the coordinator is told
//
// RECORD, COMMAND and REPORT are the names of the fields in JournalRecord,
// NodeCommand and NodeReport.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_FAULT_POINT_H_
#define WEIGHTSYNC_DAEMON_SERVICE_FAULT_POINT_H_

#include "absl/strings/string_view.h"
#include "daemon/options.h"
#include "google/protobuf/message.h"

namespace weightsync {
namespace daemon {

// Calls `hook`, where there is one, with `where` + the name of the field that
// is set in `message`, and the update that the field speaks of.
void ReachFaultPoint(const FaultPoint& hook, absl::string_view where,
                     const google::protobuf::Message& message);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_FAULT_POINT_H_
