// WatchVersion and WaitVersion on the coordinator: both look at a version
// whenever it changes.

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "daemon/service/admin_service.h"
#include "proto/status.h"

namespace weightsync {
namespace daemon {
namespace {

constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);

bool Ended(const v1::Version& version) {
  return version.state() == v1::Version::STATE_ACTIVE ||
         version.state() == v1::Version::STATE_ABORTED ||
         version.state() == v1::Version::STATE_SUPERSEDED ||
         version.state() == v1::Version::STATE_LOST;
}

// "models/m/versions/3" -> "models/m"; the name itself where it is none.
std::string ModelOf(const std::string& name) {
  return name.substr(0, name.find("/versions/"));
}

// One WatchVersion. All but construction on the coordinator's loop.
class Follower : public std::enable_shared_from_this<Follower> {
 public:
  Follower(CoordinatorLoop* loop, std::string name,
           std::shared_ptr<VersionStream> stream)
      : loop_(loop),
        name_(std::move(name)),
        model_(ModelOf(name_)),
        latest_(absl::EndsWith(name_, "/versions/latest")),
        stream_(std::move(stream)) {}

  void Begin() {
    // The caller has gone meanwhile.
    if (over_) return;
    watcher_ =
        loop_->Watch([self = shared_from_this()](const VersionChanged& change) {
          if (change.model == self->model_) self->Look();
        });
    loop_->Ask([self = shared_from_this()](const Coordinator&, absl::Time) {
      self->Look();
    });
  }

  // Nothing is queued for the client any more.
  void Written() {
    loop_->Ask([self = shared_from_this()](const Coordinator&, absl::Time) {
      self->writing_ = false;
      self->Look();
    });
  }

  void Closed() {
    // It may not have begun.
    loop_->Ask([self = shared_from_this()](const Coordinator&, absl::Time) {
      self->over_ = true;
      self->loop_->Unwatch(self->watcher_);
    });
  }

 private:
  // A changed version is looked at by a question of its own: not in the middle
  // of the coordinator's actions, and one look for many changes.
  void Look() {
    if (looking_ || writing_ || over_) return;
    looking_ = true;
    const absl::Time now = absl::Now();
    auto look = [self = shared_from_this()] {
      self->loop_->Ask([self](const Coordinator& coordinator, absl::Time at) {
        self->looking_ = false;
        self->Send(coordinator, at);
      });
    };
    if (now >= next_) {
      look();
    } else {
      loop_->loop()->PostAt(next_, std::move(look));
    }
  }

  void Send(const Coordinator& coordinator, absl::Time now) {
    if (writing_ || over_) return;
    absl::StatusOr<v1::Version> version =
        latest_ ? coordinator.GetVersion(name_, "", now)
                : coordinator.GetVersion(name_, update_id_, now);
    if (!version.ok()) {
      const bool not_yet =
          latest_ && ErrorReason(version.status()) == "VERSION_UNKNOWN";
      if (!not_yet) Finish(version.status());
      return;
    }
    if (latest_ && !update_id_.empty() && version->update_id() != update_id_ &&
        !ended_) {
      // How the one before ended comes first.
      absl::StatusOr<v1::Version> before =
          coordinator.GetVersion(last_name_, update_id_, now);
      ended_ = true;
      if (before.ok()) version = std::move(before);
    }
    if (version->update_id() != update_id_) ended_ = false;
    update_id_ = version->update_id();
    last_name_ = version->name();
    if (Ended(*version)) ended_ = true;
    std::string bytes = version->SerializeAsString();
    if (bytes == last_) return;
    last_ = std::move(bytes);
    next_ = absl::Now() + kWatchInterval;
    writing_ = true;
    stream_->Write(*std::move(version));
    if (ended_ && !latest_) Finish(absl::OkStatus());
  }

  void Finish(const absl::Status& status) {
    over_ = true;
    stream_->Finish(status);
  }

  CoordinatorLoop* const loop_;
  const std::string name_;
  const std::string model_;
  const bool latest_;
  const std::shared_ptr<VersionStream> stream_;
  // Constant after Begin.
  CoordinatorLoop::WatcherId watcher_ = 0;

  // The update that was sent last, and whether its end was.
  std::string update_id_;
  std::string last_name_;
  bool ended_ = false;
  std::string last_;
  bool looking_ = false;
  bool writing_ = false;
  bool over_ = false;
  absl::Time next_ = absl::InfinitePast();
};

// One WaitVersion. On the coordinator's loop.
class Waiter : public std::enable_shared_from_this<Waiter> {
 public:
  Waiter(CoordinatorLoop* loop, const v1::WaitVersionRequest& request,
         std::shared_ptr<Answer<v1::Version>> answer)
      : loop_(loop),
        name_(request.name()),
        update_id_(request.update_id()),
        answer_(std::move(answer)) {}

  void Begin() {
    timer_ =
        loop_->loop()->PostAt(answer_->deadline(), [self = shared_from_this()] {
          self->loop_->Ask(
              [self](const Coordinator& coordinator, absl::Time now) {
                self->Look(coordinator, now, true);
              });
        });
    watcher_ = loop_->Watch([self = shared_from_this(), model = ModelOf(name_)](
                                const VersionChanged& change) {
      if (change.model != model || self->looking_) return;
      self->looking_ = true;
      self->loop_->Ask([self](const Coordinator& coordinator, absl::Time now) {
        self->looking_ = false;
        self->Look(coordinator, now, false);
      });
    });
    loop_->Ask([self = shared_from_this()](const Coordinator& coordinator,
                                           absl::Time now) {
      self->Look(coordinator, now, false);
    });
  }

 private:
  void Look(const Coordinator& coordinator, absl::Time now, bool late) {
    if (answer_ == nullptr) return;
    absl::StatusOr<v1::Version> version =
        coordinator.GetVersion(name_, update_id_, now);
    if (!version.ok()) {
      Finish(version.status());
      return;
    }
    // From now on this attempt, and no other at the same number.
    update_id_ = version->update_id();
    name_ = version->name();
    if (version->state() == v1::Version::STATE_ACTIVE) {
      *answer_->response() = *std::move(version);
      Finish(absl::OkStatus());
    } else if (Ended(*version)) {
      Finish(ErrorStatus(absl::StatusCode::kAborted,
                         version->failure().reason(),
                         version->failure().message()));
    } else if (late) {
      Finish(ErrorStatus(
          absl::StatusCode::kDeadlineExceeded, "WAIT_TIMEOUT",
          absl::StrCat(version->name(), " (update ", update_id_,
                       ") goes on: it is in ",
                       v1::Version::State_Name(version->state()), ", ",
                       version->moved_bytes(), " of ", version->wire_bytes(),
                       " bytes moved; wait again")));
    }
  }

  void Finish(const absl::Status& status) {
    loop_->loop()->Cancel(timer_);
    loop_->Unwatch(watcher_);
    answer_->Finish(status);
    answer_ = nullptr;
  }

  CoordinatorLoop* const loop_;
  std::string name_;
  std::string update_id_;
  std::shared_ptr<Answer<v1::Version>> answer_;
  CoordinatorLoop::WatcherId watcher_ = 0;
  Loop::TimerId timer_ = 0;
  bool looking_ = false;
};

}  // namespace

void FollowVersion(CoordinatorLoop* loop, const std::string& name,
                   std::shared_ptr<VersionStream> stream,
                   std::function<void()> on_closed) {
  auto follower = std::make_shared<Follower>(loop, name, stream);
  stream->Start([follower] { follower->Written(); },
                [follower, on_closed = std::move(on_closed)] {
                  follower->Closed();
                  on_closed();
                });
  loop->loop()->Post([follower] { follower->Begin(); });
}

void WaitForVersion(CoordinatorLoop* loop,
                    const v1::WaitVersionRequest& request,
                    std::shared_ptr<Answer<v1::Version>> answer) {
  auto waiter = std::make_shared<Waiter>(loop, request, std::move(answer));
  loop->loop()->Post([waiter] { waiter->Begin(); });
}

}  // namespace daemon
}  // namespace weightsync
