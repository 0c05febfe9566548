// What happens at some time of a history: a closure, kept where it is made. A
// history makes hundreds of them, and std::function would go to the heap for
// each.

#ifndef WEIGHTSYNC_TESTS_CHAOS_SIMULATION_TASK_H_
#define WEIGHTSYNC_TESTS_CHAOS_SIMULATION_TASK_H_

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace weightsync {
namespace simulation {

class Task {
 public:
  Task() = default;
  ~Task() { Clear(); }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // REQUIRES: it holds nothing.
  template <typename F>
  void Set(F&& what) {
    using Closure = std::decay_t<F>;
    static_assert(sizeof(Closure) <= kRoom, "capture less, or raise kRoom");
    static_assert(alignof(Closure) <= alignof(std::max_align_t), "");
    new (room_) Closure(std::forward<F>(what));
    run_ = [](void* room) { (*static_cast<Closure*>(room))(); };
    end_ = [](void* room) { static_cast<Closure*>(room)->~Closure(); };
  }
  void Run() { run_(room_); }
  void Clear() {
    if (end_ != nullptr) end_(room_);
    end_ = nullptr;
  }

 private:
  static constexpr size_t kRoom = 160;
  alignas(std::max_align_t) unsigned char room_[kRoom];
  void (*run_)(void*) = nullptr;
  void (*end_)(void*) = nullptr;
};

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_TESTS_CHAOS_SIMULATION_TASK_H_
