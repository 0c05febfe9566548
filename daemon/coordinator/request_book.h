// Publishes by their request_id: whoever repeats one is told what became of the
// first. Found by request, and by update and rank, for a day of a cluster has
// 100,000 of them.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_REQUEST_BOOK_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_REQUEST_BOOK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "absl/time/time.h"
#include "weightsync/internal/v1/journal.pb.h"
#include "weightsync/v1/types.pb.h"

namespace weightsync {
namespace daemon {

struct JournalRequest {
  internal::v1::RequestOpened opened;
  bool copied = false;
  int64_t copied_bytes = 0;
  absl::Duration copy_duration;
  // Set when the update was aborted.
  v1::Failure failure;
};

class RequestBook {
 public:
  using Map = std::map<std::string, JournalRequest>;

  // Null: never seen, or forgotten.
  const JournalRequest* Find(const std::string& model, int32_t rank,
                             const std::string& request_id) const;
  // The same again changes nothing. One that comes for another update is a new
  // one: what it was before had been forgotten.
  void Open(const internal::v1::RequestOpened& opened);
  // True when it was news of some request.
  bool Copied(const internal::v1::RankCopied& copied);
  void Failed(const std::string& update_id, const v1::Failure& failure);
  // Those that were opened then or before.
  void ForgetUntil(absl::Time oldest);

  size_t size() const { return requests_.size(); }
  Map::const_iterator begin() const { return requests_.begin(); }
  Map::const_iterator end() const { return requests_.end(); }

 private:
  using ByUpdate = std::set<std::tuple<std::string, int32_t, std::string>>;

  // Those of the update, of ranks from `first` to `last`.
  void ForEach(const std::string& update_id, int32_t first, int32_t last,
               const std::function<void(JournalRequest*)>& visit);

  // By model, rank and request_id, in one.
  Map requests_;
  // (update_id, rank, key of requests_).
  ByUpdate by_update_;
};

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_REQUEST_BOOK_H_
