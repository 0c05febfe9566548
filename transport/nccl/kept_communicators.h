// Communicators between two uses.
#ifndef WEIGHTSYNC_TRANSPORT_NCCL_KEPT_COMMUNICATORS_H_
#define WEIGHTSYNC_TRANSPORT_NCCL_KEPT_COMMUNICATORS_H_

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace weightsync {
namespace transport {
namespace nccl {

// One end of a communicator of two, and what was done on it.
struct Communicator {
  ncclComm_t comm = nullptr;
  ncclUniqueId id = {};
  int rank = 0;               // 0 sends, 1 receives
  std::string peer;           // as a PayloadChannelFactory knows it
  uint64_t peer_process = 0;  // see NcclDevice::process
  // Completed on it by this end.
  uint64_t operations = 0;
  uint64_t bytes = 0;
  int64_t memory_bytes = 0;  // of the GPU, an estimate

  bool Is(const ncclUniqueId& other) const;
};

// Idle ones, the most recently used last. Ends none: what has to go is handed
// to the caller. Not thread-safe.
class KeptCommunicators {
 public:
  // At most `most`, each for at most `limit` without use.
  KeptCommunicators(size_t most, absl::Duration limit)
      : most_(most), limit_(limit) {}

  // Those that have to go for it: itself, where none may be kept.
  std::vector<Communicator> Put(Communicator kept, absl::Time now);
  // The one with this peer that was used last; with `id`, that one.
  absl::optional<Communicator> Take(const std::string& peer, int rank,
                                    const ncclUniqueId* id = nullptr);
  // Those with another process of this peer than `process`: it has gone, and
  // nobody will ask for them.
  std::vector<Communicator> TakeOfOthers(const std::string& peer, int rank,
                                         uint64_t process);
  std::vector<Communicator> TakeExpired(absl::Time now);
  std::vector<Communicator> TakeAll();

  size_t size() const { return kept_.size(); }

 private:
  struct Kept {
    Communicator communicator;
    absl::Time since;
  };
  template <typename Pick>
  std::vector<Communicator> TakeIf(Pick pick);

  const size_t most_;
  const absl::Duration limit_;
  std::list<Kept> kept_;
};

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_NCCL_KEPT_COMMUNICATORS_H_
