#include "daemon/coordinator/publish_book.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weightsync {
namespace daemon {

Publish* PublishBook::Find(int64_t index) {
  if (publishes_.empty() || index < publishes_.front().index) return nullptr;
  const size_t place = static_cast<size_t>(index - publishes_.front().index);
  return place < publishes_.size() ? &publishes_[place] : nullptr;
}

const Publish* PublishBook::pending() const {
  if (publishes_.empty()) return nullptr;
  const Publish& last = publishes_.back();
  return last.state == Publish::kPending ? &last : nullptr;
}

Fault PublishBook::ForgottenFault(int64_t index) const {
  return Fault(absl::StatusCode::kAborted, "UPDATE_ABORTED",
               absl::StrCat("publish ", index,
                            " of the model was given up before this rank came "
                            "to it; publish again"));
}

Fault PublishBook::NotNewer(int64_t version) const {
  return Fault(
      absl::StatusCode::kFailedPrecondition, "VERSION_NOT_NEWER",
      absl::StrCat("version ", version, " is not above version ", floor_,
                   ", the highest accepted; give a higher one, or 0"));
}

void PublishBook::Recover(int64_t floor, int64_t index,
                          const std::string& update_id, int64_t step,
                          const Fault& newest_fault) {
  floor_ = floor;
  floor_aborted_ = !newest_fault.ok();
  newest_index_ = index;
  publishes_.clear();
  if (index == 0) return;
  Publish publish;
  publish.index = index;
  publish.version = floor;
  publish.step = step;
  publish.update_id = update_id;
  publish.state = newest_fault.ok() ? Publish::kDone : Publish::kFailed;
  publish.fault = newest_fault;
  publishes_.push_back(std::move(publish));
}

absl::optional<Publish> PublishBook::RankClaimed(int32_t rank,
                                                 int64_t last_index) {
  absl::optional<Publish> failed;
  // An earlier term numbered publishes that never became updates. Nobody was
  // told the number of one that waits here.
  if (pending() != nullptr && last_index >= newest_index_) {
    failed = Expire(absl::InfinitePast(), ForgottenFault(newest_index_), true);
  }
  if (last_index > newest_index_) {
    publishes_.clear();
    newest_index_ = last_index;
  }
  if (last_index > 0) {
    int64_t& last = last_[rank];
    last = std::max(last, last_index);
    return failed;
  }
  const int64_t newest_begun =
      pending() != nullptr ? newest_index_ - 1 : newest_index_;
  last_[rank] = newest_begun;
  return failed;
}

void PublishBook::RankGone(int32_t rank) {
  if (pending() == nullptr) return;
  std::vector<PublishCall>& waiting = publishes_.back().waiting;
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(),
                               [rank](const PublishCall& call) {
                                 return call.rank == rank;
                               }),
                waiting.end());
  // Nobody has a part in it: it has not been.
  if (waiting.empty()) {
    publishes_.pop_back();
    --newest_index_;
  }
}

PublishBook::Decision PublishBook::Refuse(Fault fault, int64_t index) const {
  Decision decision;
  decision.kind = Decision::kRefuse;
  decision.fault = std::move(fault);
  decision.publish_index = index;
  return decision;
}

PublishBook::Decision PublishBook::Disagree(Publish* publish,
                                            const PublishCall& call,
                                            const std::string& what) {
  Decision decision;
  decision.kind = Decision::kDisagree;
  decision.fault = Fault(
      absl::StatusCode::kInvalidArgument, "OPTIONS_DISAGREE",
      absl::StrCat("rank ", call.rank, " gives ", what,
                   " for the same publish; give the same on all ranks and "
                   "publish again"));
  decision.publish_index = publish->index;
  publish->disagreed = true;
  last_[call.rank] = publish->index;
  if (publish->state == Publish::kOpen) {
    decision.update_id = publish->update_id;
  } else {
    publish->state = Publish::kFailed;
    publish->fault = decision.fault;
    decision.told = std::move(publish->waiting);
    publish->waiting.clear();
    for (const PublishCall& other : decision.told) {
      last_[other.rank] = publish->index;
    }
  }
  decision.told.push_back(call);
  return decision;
}

PublishBook::Decision PublishBook::Enter(Publish* publish,
                                         const PublishCall& call) {
  if (publish->waiting.size() == 1 && publish->waiting[0].rank == call.rank) {
    publish->step = call.step;
    publish->options = call.options;
  }
  if (call.step != publish->step) {
    return Disagree(
        publish, call,
        absl::StrCat("step ", call.step, ", the others step ", publish->step));
  }
  if (call.options != publish->options) {
    const auto show = [this](const std::string& options) {
      return show_options_ == nullptr ? options : show_options_(options);
    };
    return Disagree(
        publish, call,
        absl::StrCat("options {", show(call.options), "}, the others {",
                     show(publish->options), "}"));
  }
  Decision decision;
  decision.publish_index = publish->index;
  if (publish->state == Publish::kOpen) {
    decision.kind = Decision::kJoin;
    decision.update_id = publish->update_id;
    last_[call.rank] = publish->index;
    return decision;
  }
  decision.kind = Decision::kWait;
  for (PublishCall& other : publish->waiting) {
    if (other.rank != call.rank) continue;
    decision.replaced = other;
    other = call;
    return decision;
  }
  publish->waiting.push_back(call);
  return decision;
}

PublishBook::Decision PublishBook::OnCall(const PublishCall& call,
                                          absl::Time now,
                                          absl::Duration patience) {
  if (call.version < 0) {
    return Refuse(Fault(absl::StatusCode::kInvalidArgument, "VERSION_INVALID",
                        absl::StrCat("version ", call.version,
                                     " is negative; give a higher one than "
                                     "every one before, or 0")));
  }
  SkipLowerSteps(call);
  for (int64_t index = last_[call.rank] + 1; index <= newest_index_; ++index) {
    Publish* publish = Find(index);
    if (publish == nullptr) {
      // Too long ago, or of an earlier term. With a number of its own the call
      // says itself what it belongs to.
      if (call.version != 0) continue;
      last_[call.rank] = index;
      return Refuse(ForgottenFault(index), index);
    }
    const bool ended =
        publish->state == Publish::kDone || publish->state == Publish::kFailed;
    if (call.version != 0 && !publish->disagreed) {
      const int64_t its = publish->version != 0 ? publish->version
                          : publish->state == Publish::kPending ? next_version()
                                                                : 0;
      if (its != call.version) {
        if (ended) continue;
        if (publish->waiting.size() == 1 &&
            publish->waiting[0].rank == call.rank &&
            (call.version > floor_ ||
             (call.version == floor_ && floor_aborted_))) {
          // It was alone, and has changed its mind.
          publish->version = call.version;
          return Enter(publish, call);
        }
        return Disagree(publish, call,
                        absl::StrCat("version ", call.version,
                                     ", the others version ", its));
      }
    }
    switch (publish->state) {
      case Publish::kDone:
        last_[call.rank] = index;
        continue;
      case Publish::kFailed: {
        last_[call.rank] = index;
        Fault fault = publish->fault;
        if (!publish->disagreed) fault.code = absl::StatusCode::kAborted;
        return Refuse(std::move(fault), index);
      }
      case Publish::kOpen:
      case Publish::kPending:
        return Enter(publish, call);
    }
  }

  if (call.version != 0 && call.version <= floor_ &&
      !(call.version == floor_ && floor_aborted_)) {
    return Refuse(NotNewer(call.version));
  }
  Publish publish;
  publish.index = ++newest_index_;
  publish.version = call.version;
  publish.step = call.step;
  publish.options = call.options;
  publish.begin = now;
  publish.deadline = now + patience;
  publishes_.push_back(std::move(publish));
  while (publishes_.size() > kKept) publishes_.pop_front();
  return Enter(&publishes_.back(), call);
}

void PublishBook::SkipLowerSteps(const PublishCall& call) {
  if (call.version != 0 || call.step == 0) return;
  int64_t& last = last_[call.rank];
  for (const Publish& publish : publishes_) {
    if (publish.index <= last) continue;
    // Those before it that are not remembered any more went the same way.
    if (publish.state != Publish::kFailed || publish.disagreed ||
        publish.step == 0 || publish.step >= call.step) {
      return;
    }
    last = publish.index;
  }
}

Publish PublishBook::Open(const std::string& update_id) {
  Publish& publish = publishes_.back();
  if (publish.version == 0) publish.version = next_version();
  floor_ = publish.version;
  floor_aborted_ = false;
  publish.update_id = update_id;
  publish.state = Publish::kOpen;
  Publish copy = publish;
  for (const PublishCall& call : publish.waiting) {
    last_[call.rank] = publish.index;
  }
  publish.waiting.clear();
  return copy;
}

Fault PublishBook::CheckAside(int64_t version) const {
  if (version != 0 && version <= floor_ &&
      !(version == floor_ && floor_aborted_)) {
    return NotNewer(version);
  }
  if (pending() != nullptr && pending()->version != 0) {
    return Fault(absl::StatusCode::kUnavailable, "PUBLISH_WAITS",
                 absl::StrCat("version ", pending()->version,
                              " is being published; it comes first"));
  }
  return Fault();
}

int64_t PublishBook::OpenAside(int64_t version) {
  floor_ = version == 0 ? next_version() : version;
  floor_aborted_ = false;
  return floor_;
}

void PublishBook::EndAside(int64_t version, const Fault& fault) {
  if (version == floor_) floor_aborted_ = !fault.ok();
}

absl::optional<Publish> PublishBook::RaiseFloor(int64_t version) {
  if (version <= floor_) return absl::nullopt;
  floor_ = version;
  floor_aborted_ = false;
  if (pending() == nullptr || pending()->version == 0 ||
      pending()->version > floor_) {
    return absl::nullopt;
  }
  return Expire(absl::InfinitePast(), NotNewer(pending()->version), true);
}

void PublishBook::End(const std::string& update_id, const Fault& fault) {
  for (Publish& publish : publishes_) {
    if (publish.update_id != update_id || publish.state != Publish::kOpen) {
      continue;
    }
    publish.state = fault.ok() ? Publish::kDone : Publish::kFailed;
    publish.fault = fault;
    if (publish.version == floor_) floor_aborted_ = !fault.ok();
  }
}

absl::optional<Publish> PublishBook::Expire(absl::Time now, const Fault& fault,
                                            bool force) {
  if (pending() == nullptr) return absl::nullopt;
  Publish& publish = publishes_.back();
  if (!force && now < publish.deadline) return absl::nullopt;
  publish.state = Publish::kFailed;
  publish.fault = fault;
  Publish copy = publish;
  for (const PublishCall& call : publish.waiting) {
    last_[call.rank] = publish.index;
  }
  publish.waiting.clear();
  return copy;
}

}  // namespace daemon
}  // namespace weightsync
