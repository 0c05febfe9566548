#include "daemon/coordinator/request_book.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "daemon/coordinator/convert.h"

namespace weightsync {
namespace daemon {
namespace {

std::string KeyOf(const std::string& model, int32_t rank,
                  const std::string& request_id) {
  return absl::StrCat(model, "/", rank, "/", request_id);
}

}  // namespace

const JournalRequest* RequestBook::Find(const std::string& model, int32_t rank,
                                        const std::string& request_id) const {
  const auto it = requests_.find(KeyOf(model, rank, request_id));
  return it == requests_.end() ? nullptr : &it->second;
}

void RequestBook::Open(const internal::v1::RequestOpened& opened) {
  const std::string key =
      KeyOf(opened.model(), opened.rank(), opened.request_id());
  JournalRequest& request = requests_[key];
  if (request.opened.update_id() != opened.update_id()) {
    by_update_.erase({request.opened.update_id(), opened.rank(), key});
    request = JournalRequest();
  }
  request.opened = opened;
  by_update_.insert({opened.update_id(), opened.rank(), key});
}

bool RequestBook::Copied(const internal::v1::RankCopied& copied) {
  bool news = false;
  ForEach(copied.update_id(), copied.rank(), copied.rank(),
          [&](JournalRequest* request) {
            if (request->copied || request->opened.model() != copied.model()) {
              return;
            }
            request->copied = true;
            request->copied_bytes = copied.copied_bytes();
            request->copy_duration = FromProto(copied.copy_duration());
            news = true;
          });
  return news;
}

void RequestBook::Failed(const std::string& update_id,
                         const v1::Failure& failure) {
  ForEach(update_id, std::numeric_limits<int32_t>::min(),
          std::numeric_limits<int32_t>::max(),
          [&](JournalRequest* request) { request->failure = failure; });
}

void RequestBook::ForgetUntil(absl::Time oldest) {
  for (auto it = requests_.begin(); it != requests_.end();) {
    const internal::v1::RequestOpened& opened = it->second.opened;
    if (FromProto(opened.time()) > oldest) {
      ++it;
      continue;
    }
    by_update_.erase({opened.update_id(), opened.rank(), it->first});
    it = requests_.erase(it);
  }
}

void RequestBook::ForEach(const std::string& update_id, int32_t first,
                          int32_t last,
                          const std::function<void(JournalRequest*)>& visit) {
  for (auto it = by_update_.lower_bound({update_id, first, ""});
       it != by_update_.end() && std::get<0>(*it) == update_id &&
       std::get<1>(*it) <= last;
       ++it) {
    visit(&requests_.at(std::get<2>(*it)));
  }
}

}  // namespace daemon
}  // namespace weightsync
