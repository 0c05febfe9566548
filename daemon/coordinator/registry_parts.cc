// Who has a part in what, by name.

#include <set>
#include <string>
#include <utility>

#include "daemon/coordinator/registry.h"

namespace weightsync {
namespace daemon {

Registry::Parts Registry::PartsOf(const std::string& model,
                                  const std::string& node) const {
  Parts parts;
  const ModelEntry* entry = FindModel(model);
  if (entry == nullptr) return parts;
  for (const auto& rank : entry->ranks) {
    if (rank.second.node != node) continue;
    parts.ranks.push_back({rank.first, rank.second.session});
  }
  for (const auto& replica : entry->replicas) {
    Parts::Replica part{replica.first,
                        replica.second.incarnation,
                        replica.second.control && replica.second.node == node,
                        {}};
    for (size_t i = 0; i < replica.second.workers.size(); ++i) {
      const WorkerEntry& worker = replica.second.workers[i];
      if (worker.present && worker.node == node) {
        part.workers.push_back(static_cast<int>(i));
      }
    }
    if (part.control || !part.workers.empty()) {
      parts.replicas.push_back(std::move(part));
    }
  }
  return parts;
}

std::set<std::string> Registry::NamedNodes() const {
  std::set<std::string> nodes;
  for (const auto& model : models_) {
    for (const auto& rank : model.second.ranks) nodes.insert(rank.second.node);
    for (const auto& replica : model.second.replicas) {
      nodes.insert(replica.second.node);
      for (const WorkerEntry& worker : replica.second.workers) {
        nodes.insert(worker.node);
      }
    }
  }
  return nodes;
}

std::set<int64_t> Registry::RegistrationNumbers() const {
  std::set<int64_t> numbers;
  for (const auto& model : models_) {
    for (const auto& replica : model.second.replicas) {
      for (const WorkerEntry& worker : replica.second.workers) {
        numbers.insert(worker.registration_number);
      }
    }
  }
  return numbers;
}

}  // namespace daemon
}  // namespace weightsync
