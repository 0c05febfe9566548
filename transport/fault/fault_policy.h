#ifndef WEIGHTSYNC_TRANSPORT_FAULT_FAULT_POLICY_H_
#define WEIGHTSYNC_TRANSPORT_FAULT_FAULT_POLICY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace weightsync {
namespace transport {

// What to do to one frame that is about to leave.
struct FrameFault {
  enum class Kind {
    kNone,
    kDamagePayload,  // one bit of the payload is flipped on the wire (never in
                     // memory)
    kDamageHeader,   // one bit of the header
    kDrop,           // the connection is closed instead
    kSilence,  // the connection stays open, and nothing is ever sent or read
               // again: a cut link, a frozen peer
  };
  Kind kind = Kind::kNone;
  absl::Duration delay = absl::ZeroDuration();  // hold the frame back;
                                                // heartbeats go on: a slow peer
};

// Decides about faults on the path of the bytes, for tests and chaos runs.
// Thread-safe.
class FaultPolicy {
 public:
  virtual ~FaultPolicy() = default;
  // Not OK: the connection from node `from` to node `to` cannot be made.
  virtual absl::Status OnConnect(absl::string_view from,
                                 absl::string_view to) = 0;
  // Asked for every frame of payload, repairs included.
  virtual FrameFault OnSend(absl::string_view from, absl::string_view to,
                            uint64_t bucket, uint32_t frame) = 0;
};

// Faults by rule: the first rule that matches an edge and is due is taken.
//
// Parse reads rules separated by ';', each of words separated by spaces:
//   kind=damage|damage_header|drop|silence|cut|delay   (cut: drop, and refuse
//   to connect again) edge=a->b    '*' stands for any node; without it every
//   edge after=N      pass N matching frames first (default 0) count=N      how
//   often it strikes (default 1; 0: always) ms=N         for delay bucket=N
//   frame=N   only this frame
// e.g. "kind=damage edge=a->b after=10 count=3; kind=delay edge=*->c ms=20
// count=0"
class FaultRules final : public FaultPolicy {
 public:
  struct Rule {
    enum class Kind { kDamage, kDamageHeader, kDrop, kSilence, kCut, kDelay };
    Kind kind = Kind::kDrop;
    std::string from = "*";
    std::string to = "*";
    int64_t after = 0;
    int64_t count = 1;
    absl::Duration delay = absl::ZeroDuration();
    int64_t bucket = -1;
    int64_t frame = -1;
  };

  static absl::StatusOr<std::vector<Rule>> Parse(absl::string_view text);

  FaultRules() = default;
  explicit FaultRules(std::vector<Rule> rules) { Set(std::move(rules)); }

  // Replaces all rules; their counts start again.
  void Set(std::vector<Rule> rules);
  // How often a rule struck since Set.
  int64_t strikes() const;

  absl::Status OnConnect(absl::string_view from, absl::string_view to) override;
  FrameFault OnSend(absl::string_view from, absl::string_view to,
                    uint64_t bucket, uint32_t frame) override;

 private:
  struct Armed {
    Rule rule;
    int64_t seen = 0;
    int64_t struck = 0;
  };

  mutable absl::Mutex mutex_;
  std::vector<Armed> rules_ ABSL_GUARDED_BY(mutex_);
  int64_t strikes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_FAULT_FAULT_POLICY_H_
