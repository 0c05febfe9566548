#include "transport/nccl/kept_communicators.h"

#include <cstring>
#include <iterator>
#include <utility>

namespace weightsync {
namespace transport {
namespace nccl {

bool Communicator::Is(const ncclUniqueId& other) const {
  return memcmp(id.internal, other.internal, sizeof(id.internal)) == 0;
}

template <typename Pick>
std::vector<Communicator> KeptCommunicators::TakeIf(Pick pick) {
  std::vector<Communicator> taken;
  for (auto at = kept_.begin(); at != kept_.end();) {
    if (pick(*at)) {
      taken.push_back(std::move(at->communicator));
      at = kept_.erase(at);
    } else {
      ++at;
    }
  }
  return taken;
}

std::vector<Communicator> KeptCommunicators::Put(Communicator kept,
                                                 absl::Time now) {
  kept_.push_back({std::move(kept), now});
  std::vector<Communicator> gone;
  while (kept_.size() > most_) {
    gone.push_back(std::move(kept_.front().communicator));
    kept_.pop_front();
  }
  return gone;
}

absl::optional<Communicator> KeptCommunicators::Take(const std::string& peer,
                                                     int rank,
                                                     const ncclUniqueId* id) {
  for (auto at = kept_.end(); at != kept_.begin();) {
    --at;
    const Communicator& found = at->communicator;
    if (found.rank != rank || found.peer != peer) continue;
    if (id != nullptr && !found.Is(*id)) continue;
    absl::optional<Communicator> taken = std::move(at->communicator);
    kept_.erase(at);
    return taken;
  }
  return absl::nullopt;
}

std::vector<Communicator> KeptCommunicators::TakeOfOthers(
    const std::string& peer, int rank, uint64_t process) {
  return TakeIf([&](const Kept& kept) {
    return kept.communicator.rank == rank && kept.communicator.peer == peer &&
           kept.communicator.peer_process != process;
  });
}

std::vector<Communicator> KeptCommunicators::TakeExpired(absl::Time now) {
  return TakeIf([&](const Kept& kept) { return now - kept.since >= limit_; });
}

std::vector<Communicator> KeptCommunicators::TakeAll() {
  return TakeIf([](const Kept&) { return true; });
}

}  // namespace nccl
}  // namespace transport
}  // namespace weightsync
