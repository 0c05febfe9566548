// One checkpoint that nodes write together, as a pure state machine: no clock,
// no protos, no I/O; nodes are numbers. Writer 0 leads.
//
//   stage       is left when                          to          and does
//   BEGINNING   the lead has made the directory       SEEING      kSee each
//                                                                 other writer
//   SEEING      every writer sees it, and the owner   WRITING     kWrite each
//               lets it (`go`)                                    that may
//   WRITING     every writer has written; each is     COMPLETING  kComplete
//               told once it may (`ready`)
//   COMPLETING  the lead has renamed it               DONE        kEnd
//   before DONE a failure, a lost writer, the         FAILED      kGiveUp each,
//               deadline or a cancellation                        kEnd
// Nobody writes before everybody has said that he sees where.

#ifndef WEIGHTSYNC_DAEMON_COORDINATOR_CHECKPOINT_MACHINE_H_
#define WEIGHTSYNC_DAEMON_COORDINATOR_CHECKPOINT_MACHINE_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "daemon/coordinator/fault.h"

namespace weightsync {
namespace daemon {

enum class CheckpointStage : uint8_t {
  kBeginning,
  kSeeing,
  kWriting,
  kCompleting,
  kDone,
  kFailed,
};

struct CheckpointWriter {
  bool sees = false;
  // Its bytes are whole.
  bool ready = false;
  bool told = false;
  bool written = false;
};

struct CheckpointState {
  CheckpointStage stage = CheckpointStage::kBeginning;
  // At least one.
  std::vector<CheckpointWriter> writers;
  // The owner finds out by itself who sees it.
  bool owner_sees = false;
  bool go = false;
  absl::Time deadline = absl::InfiniteFuture();
  // What is said when it has passed.
  Fault late;
  Fault fault;

  bool Ended() const { return stage >= CheckpointStage::kDone; }
};

struct CheckpointEvent {
  enum Kind : uint8_t {
    kTick,
    kAnswered,  // `writer` to its last command; `fault`
    kReady,     // `writer`
    kGo,
    kWriterLost,  // `writer`, `fault`
    kCancel,      // `fault`
  };
  Kind kind = kTick;
  int writer = 0;
  Fault fault;
};

struct CheckpointAction {
  enum Kind : uint8_t { kSee, kWrite, kComplete, kGiveUp, kEnd };
  Kind kind = kSee;
  int writer = 0;
};

// The first command, to make the directory, is the owner's to give.
std::vector<CheckpointAction> StepCheckpoint(const CheckpointEvent& event,
                                             absl::Time now,
                                             CheckpointState* state);

}  // namespace daemon
}  // namespace weightsync

#endif  // WEIGHTSYNC_DAEMON_COORDINATOR_CHECKPOINT_MACHINE_H_
