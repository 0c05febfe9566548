// How much room the clients of this node need in its store, model by model.
// Room is faulted in when a client registers, so that no update waits for fresh
// pages, and let go some time after the last client of a model has left: a
// worker that is started again finds its weights still there.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_STORE_ROOM_H_
#define WEIGHTSYNC_DAEMON_SERVICE_STORE_ROOM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/node/store.h"
#include "daemon/service/loop.h"

namespace weightsync {
namespace daemon {

// All on one loop.
class StoreRoom {
 public:
  // Faulting in happens on `reserving`. All outlive the room.
  StoreRoom(Store* store, Loop* loop, Loop* reserving, absl::Duration linger)
      : store_(store), loop_(loop), reserving_(reserving), linger_(linger) {}

  // `who` ("rank 3", "workers") needs `bytes` of each update of `model`;
  // replaces what it needed before. `model_bytes`: of the whole model, above
  // which the sum cannot be; 0 when not known. `done` is called on the loop,
  // with the errors of Store::ReserveFor; then nothing has changed.
  void Need(const std::string& model, const std::string& who, int64_t bytes,
            int64_t model_bytes, std::function<void(const absl::Status&)> done);
  // `who` has left. Unknown ones are fine.
  void Leave(const std::string& model, const std::string& who);

 private:
  struct Entry {
    std::map<std::string, int64_t> needs;
    int64_t model_bytes = 0;
    // Grows with every Need: a timer that was set before it does nothing.
    uint64_t generation = 0;
  };

  Store* const store_;
  Loop* const loop_;
  Loop* const reserving_;
  const absl::Duration linger_;
  std::map<std::string, Entry> models_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_STORE_ROOM_H_
