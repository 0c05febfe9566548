// See small_objects.cc. A program that does not call EndHistory is as it was,
// only slower.
#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_SMALL_OBJECTS_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_SMALL_OBJECTS_H_

namespace weightsync {
namespace simulation {

// Between two histories of this thread: where all that was made since the last
// call is gone, the next one begins with the same memory, in order.
void EndHistory();

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_SMALL_OBJECTS_H_
