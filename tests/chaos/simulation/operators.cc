// What people ask the coordinator for, and take back after a while: holds,
// rollbacks, drains, the end of a version, adoption.

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/chaos/simulation/world.h"

namespace weightsync {
namespace simulation {

void World::Admin(daemon::AdminRequest call, std::function<void(bool)> done) {
  if (coordinator_ == nullptr) return done(false);
  const int64_t request = next_admin_++;
  admin_[request] = std::move(done);
  last_admin_ = std::max(last_admin_ + 1, now_ + Delay());
  By(&host_, last_admin_ - now_,
     [this, request,
      call = std::make_shared<daemon::AdminRequest>(std::move(call))] {
       if (coordinator_ == nullptr || admin_.count(request) == 0) return;
       if (trace_ != nullptr) {
         absl::visit(
             [this](const auto& asked) {
               Trace("operator asks ", asked.GetTypeName(), " ",
                     asked.ShortDebugString());
             },
             *call);
       }
       Execute(coordinator_->OnAdminRequest(Clock(), request, *call));
     });
}

void World::AdminDone(int64_t request, bool ok) {
  auto found = admin_.find(request);
  if (found == admin_.end()) return;
  const auto done = std::move(found->second);
  admin_.erase(found);
  done(ok);
}

void World::Insist(daemon::AdminRequest call, std::function<void()> done) {
  Admin(call, [this, call, done](bool ok) {
    if (ok) return done();
    After(300 * kMillisecond, [this, call, done] { Insist(call, done); });
  });
}

void World::HoldByHand() {
  const std::string replica =
      engines_[static_cast<size_t>(
                   random_.Below(static_cast<int64_t>(engines_.size())))]
          .name;
  const Time lasts = random_.Between(500 * kMillisecond, 6 * kSecond);
  // The first who takes it back would do so for both.
  if (!held_by_hand_.insert(replica).second) return;
  ++operators_;
  v1::PauseReplicaRequest pause;
  pause.set_name(absl::StrCat("models/m/replicas/", replica));
  // Shared: the answer may come before or after it is taken back.
  auto asked = std::make_shared<bool>(true);
  const int64_t life = engines_[replica.back() - '0'].life;
  Admin(pause, [this, replica, asked, life](bool ok) {
    // Said of this very engine, and not taken back.
    if (ok && *asked && engines_[replica.back() - '0'].life == life) {
      Trace("operator: ", replica, " stands still");
      checker_.Held(replica, true);
    }
  });
  After(lasts, [this, replica, asked] {
    *asked = false;
    checker_.Held(replica, false);
    v1::ResumeReplicaRequest resume;
    resume.set_name(absl::StrCat("models/m/replicas/", replica));
    Insist(resume, [this, replica] {
      --operators_;
      held_by_hand_.erase(replica);
    });
  });
}

void World::RollBack() {
  // To one of the last few that were committed.
  std::vector<v1::Version> known;
  if (coordinator_ != nullptr && !impostor_) {
    v1::ListVersionsRequest list;
    list.set_parent("models/m");
    const auto versions = coordinator_->ListVersions(list, Clock());
    if (versions.ok()) {
      for (const v1::Version& version : versions->versions()) {
        if (version.state() == v1::Version::STATE_ACTIVE) {
          known.push_back(version);
        }
      }
    }
  }
  if (known.empty()) return;
  const size_t most = known.size() < 3 ? known.size() : 3;
  const size_t which =
      static_cast<size_t>(random_.Below(static_cast<int64_t>(most)));
  const Time lasts = random_.Between(kSecond, 6 * kSecond);
  ++operators_;
  v1::RollbackModelRequest rollback;
  rollback.set_version(known[which].name());
  Admin(rollback, [this](bool ok) {
    Trace("operator: the rollback ", ok ? "is done" : "was refused or is late");
  });
  After(lasts, [this] {
    v1::ReleaseModelRequest release;
    release.set_name("models/m");
    Insist(release, [this] { --operators_; });
  });
}

void World::DrainNode() {
  const std::string node = absl::StrCat(
      "nodes/", nodes_[static_cast<size_t>(
                           random_.Below(static_cast<int64_t>(nodes_.size())))]
                    .name);
  const Time lasts = random_.Between(kSecond, 6 * kSecond);
  ++operators_;
  v1::DrainNodeRequest drain;
  drain.set_name(node);
  Admin(drain, [](bool) {});
  After(lasts, [this, node] {
    v1::DrainNodeRequest undo;
    undo.set_name(node);
    undo.set_undo(true);
    Insist(undo, [this] { --operators_; });
  });
}

void World::DeleteVersion() {
  v1::DeleteVersionRequest request;
  request.set_name(
      absl::StrCat("models/m/versions/",
                   (named_versions_ ? 1000000 : 0) + random_.Between(1, 4)));
  Admin(request, [](bool) {});
}

void World::RemoveModel(int tries) {
  ++operators_;
  v1::RemoveModelRequest remove;
  remove.set_name("models/m");
  Admin(remove, [this, tries](bool ok) {
    --operators_;
    Trace("operator: the model is ", ok ? "removed" : "not removed yet");
    // An update is under way, or somebody takes his time.
    if (ok || tries == 0) return;
    After(random_.Between(20 * kMillisecond, 400 * kMillisecond),
          [this, tries] { RemoveModel(tries - 1); });
  });
}

void World::SaveVersion() {
  ++operators_;
  v1::SaveVersionRequest save;
  save.set_name("models/m/versions/latest");
  save.set_path(absl::StrCat("saved/", random_.Between(1, 2)));
  save.set_overwrite(random_.Chance(500));
  Admin(save, [this](bool ok) {
    --operators_;
    Trace("operator: the checkpoint is ", ok ? "saved" : "not saved");
    if (ok && random_.Chance(500)) LoadVersion();
  });
}

void World::LoadVersion() {
  // What was saved, and what updates came by; or something that is not there.
  std::vector<std::string> paths = {"saved/1", "saved/2"};
  for (const auto& directory : disks_[0]) {
    if (directory.second.complete) paths.push_back(directory.first);
  }
  ++operators_;
  v1::LoadVersionRequest load;
  load.set_name("models/m");
  load.set_path(paths[static_cast<size_t>(
      random_.Below(static_cast<int64_t>(paths.size())))]);
  if (random_.Chance(500)) load.set_request_id(absl::StrCat("l", next_id_++));
  Admin(load, [this](bool ok) {
    --operators_;
    Trace("operator: the checkpoint is ", ok ? "loaded" : "not loaded");
  });
}

void World::Adopt() {
  if (!impostor_) return;
  Admin(v1::AdoptClusterRequest(), [this](bool ok) {
    Trace("operator: the cluster ", ok ? "is adopted" : "is not adopted yet");
    if (!ok) After(300 * kMillisecond, [this] { Adopt(); });
  });
}

}  // namespace simulation
}  // namespace weightsync
