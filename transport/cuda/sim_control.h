// What a test does to the simulated machine (tests/gpu/sim) that it runs on.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_SIM_CONTROL_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_SIM_CONTROL_H_

#include <string>

namespace gpu_sim {

// Replaces what is to go wrong: rules as in tests/gpu/sim/faults.h, separated
// by ';'. Counts start again.
void Plant(const std::string& rules);

// What was found so far, and forgets it: a test that provokes misuse takes it,
// or fails. Waits a moment for the first, which another process may note.
std::string TakeFindings();

// What the simulator has noted so far (FaultSpec note=1).
std::string Notes();

// The calls that rules had noted (note=1) so far, a line each, and forgets
// them.
std::string TakeNotes();

}  // namespace gpu_sim

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_SIM_CONTROL_H_
