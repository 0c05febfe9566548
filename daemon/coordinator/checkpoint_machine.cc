#include "daemon/coordinator/checkpoint_machine.h"

#include <algorithm>

namespace weightsync {
namespace daemon {

namespace {

// Its answer ends the step that it was told to take.
void Answered(const CheckpointEvent& event, CheckpointState* state,
              std::vector<CheckpointAction>* actions) {
  CheckpointWriter& writer = state->writers[static_cast<size_t>(event.writer)];
  switch (state->stage) {
    case CheckpointStage::kBeginning:
      if (event.writer != 0) return;
      writer.sees = true;
      state->stage = CheckpointStage::kSeeing;
      for (size_t i = 1; i < state->writers.size(); ++i) {
        if (state->owner_sees) {
          state->writers[i].sees = true;
        } else {
          actions->push_back({CheckpointAction::kSee, static_cast<int>(i)});
        }
      }
      return;
    case CheckpointStage::kSeeing:
      writer.sees = true;
      return;
    case CheckpointStage::kWriting:
      if (writer.told) writer.written = true;
      return;
    case CheckpointStage::kCompleting:
      if (event.writer != 0) return;
      state->stage = CheckpointStage::kDone;
      actions->push_back({CheckpointAction::kEnd, 0});
      return;
    case CheckpointStage::kDone:
    case CheckpointStage::kFailed:
      return;
  }
}

void Fail(const Fault& fault, CheckpointState* state,
          std::vector<CheckpointAction>* actions) {
  state->stage = CheckpointStage::kFailed;
  state->fault = fault;
  for (size_t i = 0; i < state->writers.size(); ++i) {
    actions->push_back({CheckpointAction::kGiveUp, static_cast<int>(i)});
  }
  actions->push_back({CheckpointAction::kEnd, 0});
}

}  // namespace

std::vector<CheckpointAction> StepCheckpoint(const CheckpointEvent& event,
                                             absl::Time now,
                                             CheckpointState* state) {
  std::vector<CheckpointAction> actions;
  if (state->Ended()) return actions;
  if (!event.fault.ok()) {
    Fail(event.fault, state, &actions);
    return actions;
  }
  switch (event.kind) {
    case CheckpointEvent::kTick:
      if (now >= state->deadline) Fail(state->late, state, &actions);
      break;
    case CheckpointEvent::kAnswered:
      Answered(event, state, &actions);
      break;
    case CheckpointEvent::kReady:
      state->writers[static_cast<size_t>(event.writer)].ready = true;
      break;
    case CheckpointEvent::kGo:
      state->go = true;
      break;
    case CheckpointEvent::kWriterLost:
    case CheckpointEvent::kCancel:
      break;
  }
  const auto all = [state](bool CheckpointWriter::*what) {
    return std::all_of(
        state->writers.begin(), state->writers.end(),
        [what](const CheckpointWriter& writer) { return writer.*what; });
  };
  if (state->stage == CheckpointStage::kSeeing && state->go &&
      all(&CheckpointWriter::sees)) {
    state->stage = CheckpointStage::kWriting;
  }
  if (state->stage == CheckpointStage::kWriting) {
    for (size_t i = 0; i < state->writers.size(); ++i) {
      CheckpointWriter& writer = state->writers[i];
      if (!writer.ready || writer.told) continue;
      writer.told = true;
      actions.push_back({CheckpointAction::kWrite, static_cast<int>(i)});
    }
    if (all(&CheckpointWriter::written)) {
      state->stage = CheckpointStage::kCompleting;
      actions.push_back({CheckpointAction::kComplete, 0});
    }
  }
  return actions;
}

}  // namespace daemon
}  // namespace weightsync
