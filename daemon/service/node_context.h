// What the sessions of one node work with. All parts outlive the sessions.

#ifndef WEIGHTSYNC_DAEMON_SERVICE_NODE_CONTEXT_H_
#define WEIGHTSYNC_DAEMON_SERVICE_NODE_CONTEXT_H_

#include <map>
#include <string>

#include "daemon/node/device_copies.h"
#include "daemon/node/layouts.h"
#include "daemon/node/mover.h"
#include "daemon/node/node_journal.h"
#include "daemon/node/placement.h"
#include "daemon/node/store.h"
#include "daemon/options.h"
#include "daemon/service/loop.h"
#include "daemon/service/node_link.h"
#include "daemon/service/process_watcher.h"
#include "daemon/service/store_room.h"
#include "daemon/service/task_threads.h"
#include "transport/cuda/agent/agent_memory.h"
#include "transport/memory.h"

namespace weightsync {
namespace daemon {

struct NodeContext {
  const Options* options = nullptr;
  // Whatever sessions are is touched on this loop alone.
  Loop* loop = nullptr;
  // Commands about layouts and updates, in the order in which the coordinator
  // gave them.
  Loop* data = nullptr;
  // What faults memory in, or gives it back.
  Loop* reserving = nullptr;
  // Copies of trainers' tensors.
  TaskThreads* copies = nullptr;
  NodeLink* link = nullptr;
  LayoutBook* layouts = nullptr;
  Store* store = nullptr;
  StoreRoom* room = nullptr;
  Mover* mover = nullptr;
  transport::Memory* memory = nullptr;
  // Null where trainers may not use GPUs.
  transport::cuda::AgentMemory* devices = nullptr;
  // Null without a device store: both.
  Placement* placement = nullptr;
  DeviceCopies* device_copies = nullptr;
  ProcessWatcher* processes = nullptr;
  // On the loop.
  NodeJournal* journal = nullptr;
  // The newest term that was seen.
  const int64_t* term = nullptr;
};

// transport's reasons for what clients ask for, under the names that the API
// promises.
absl::Status ApiStatus(const absl::Status& status);

// What one client was offered. Offers that it has not taken when this goes are
// taken back: an offer keeps the memory alive.
class ArenaOffers {
 public:
  ArenaOffers() = default;
  ~ArenaOffers();
  ArenaOffers(const ArenaOffers&) = delete;
  ArenaOffers& operator=(const ArenaOffers&) = delete;

  // Exports `segment` to process `pid` (0: to whoever has the token) under the
  // name `arena_id`. `memory` outlives this.
  absl::StatusOr<v1::ArenaOffer> Make(transport::Memory* memory,
                                      const std::string& arena_id,
                                      const transport::Segment& segment,
                                      pid_t pid, bool read_only);
  bool Has(const std::string& arena_id) const;
  void TakeBackAll();
  // False: there was none.
  bool TakeBack(const std::string& arena_id);

 private:
  transport::Memory* memory_ = nullptr;
  std::map<std::string, transport::MemoryTicket> tickets_;
};

// 32 hexadecimal digits that nobody can guess.
std::string RandomId();

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_SERVICE_NODE_CONTEXT_H_
