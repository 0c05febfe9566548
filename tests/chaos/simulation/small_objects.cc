// operator new for a program that makes and drops small objects by the hundred
// million and does little else: a history is made of strings, messages and map
// nodes that live for milliseconds, and a quarter of its time went to malloc.
//
// Objects of up to kLargest bytes come from lists, one for each size in steps
// of kStep, one set of lists for each thread; what is freed goes to the list of
// the thread that frees it, and nothing goes back to the system. Bigger ones
// are malloc's. Between histories the lists are thrown away and the chunks are
// used again from the first on, where nothing in them is alive: else every
// history would find its memory more scattered than the one before. Under
// sanitizers there is nothing here: they want to see every allocation.

#include "tests/chaos/simulation/small_objects.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define WEIGHTSYNC_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WEIGHTSYNC_SANITIZED
#endif

#ifndef WEIGHTSYNC_SANITIZED

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr size_t kStep = 16;
constexpr size_t kLargest = 512;
constexpr size_t kSizes = kLargest / kStep + 1;
// Objects of one size lie together in chunks, so that an address says the size.
constexpr size_t kChunk = size_t{1} << 16;
constexpr size_t kChunks = size_t{1} << 16;  // 4 GiB of addresses

struct Free {
  Free* next;
};

thread_local Free* free_objects[kSizes];

// Of the chunk that is given away now, of each size: what was never in a list.
struct Bump {
  char* next = nullptr;
  char* end = nullptr;
};
thread_local Bump bumps[kSizes];

// The chunks of each size that this thread took since its first EndHistory, in
// order, and the next one to be used again. Index 0 is none: it is taken
// before.
thread_local uint16_t first_chunks[kSizes];
thread_local uint16_t last_chunks[kSizes];
thread_local uint16_t again[kSizes];
uint16_t next_of_size[size_t{1} << 16];
// Chunks before this one may hold what lives for ever.
thread_local size_t base_chunk = 0;
// Objects in later ones that are alive.
thread_local int64_t alive = 0;

std::atomic<char*> first{nullptr};
std::atomic<size_t> next_chunk{0};
uint8_t size_of_chunk[kChunks];

char* Reserve() {
  void* room = mmap(nullptr, kChunk * kChunks, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1, 0);
  if (room == MAP_FAILED) return nullptr;
  char* expected = nullptr;
  if (!first.compare_exchange_strong(expected, static_cast<char*>(room))) {
    munmap(room, kChunk * kChunks);  // another thread was faster
    return expected;
  }
  return static_cast<char*>(room);
}

// False when there is no room.
bool Refill(size_t size) {
  char* base = first.load(std::memory_order_acquire);
  if (base == nullptr) base = Reserve();
  if (base == nullptr) return false;
  size_t chunk = again[size];
  if (chunk != 0) {
    again[size] = next_of_size[chunk];
  } else {
    chunk = next_chunk.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= kChunks) return false;
    size_of_chunk[chunk] = static_cast<uint8_t>(size);
    if (base_chunk != 0) {
      const auto index = static_cast<uint16_t>(chunk);
      (first_chunks[size] == 0 ? first_chunks[size]
                               : next_of_size[last_chunks[size]]) = index;
      last_chunks[size] = index;
    }
  }
  const size_t bytes = size * kStep;
  bumps[size].next = base + chunk * kChunk;
  bumps[size].end = bumps[size].next + kChunk / bytes * bytes;
  return true;
}

void* FromMalloc(size_t bytes) {
  while (true) {
    void* memory = std::malloc(bytes);
    if (memory != nullptr) return memory;
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) throw std::bad_alloc();
    handler();
  }
}

void* Allocate(size_t bytes) {
  if (bytes > kLargest) return FromMalloc(bytes);
  const size_t size = bytes == 0 ? 1 : (bytes + kStep - 1) / kStep;
  Free* object = free_objects[size];
  if (object != nullptr) {
    free_objects[size] = object->next;
    ++alive;
    return object;
  }
  Bump& bump = bumps[size];
  if (bump.next == bump.end && !Refill(size)) return FromMalloc(bytes);
  ++alive;
  void* memory = bump.next;
  bump.next += size * kStep;
  return memory;
}

void Release(void* memory) {
  if (memory == nullptr) return;
  const char* const base = first.load(std::memory_order_relaxed);
  const size_t offset =
      static_cast<size_t>(static_cast<const char*>(memory) - base);
  if (base == nullptr || offset >= kChunk * kChunks) return std::free(memory);
  const size_t chunk = offset / kChunk;
  // What was there before the first history ends stays out of use.
  if (chunk < base_chunk) return;
  Free* object = static_cast<Free*>(memory);
  const size_t size = size_of_chunk[chunk];
  object->next = free_objects[size];
  free_objects[size] = object;
  --alive;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete[](void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete[](void* memory, size_t) noexcept { Release(memory); }

namespace weightsync {
namespace simulation {

void EndHistory() {
  // What a program adds up over histories begins to live in one of the first
  // hundred, and stays.
  thread_local int kept = 0;
  if (base_chunk != 0 && alive != 0 && ++kept < 100) return;
  const bool anew = base_chunk == 0 || alive != 0;
  for (size_t size = 0; size < kSizes; ++size) {
    free_objects[size] = nullptr;
    bumps[size] = Bump();
    if (anew) first_chunks[size] = 0;
    again[size] = first_chunks[size];
  }
  if (!anew) return;
  base_chunk = next_chunk.load(std::memory_order_relaxed);
  alive = 0;
  kept = 0;
}

}  // namespace simulation
}  // namespace weightsync

#else

namespace weightsync {
namespace simulation {

void EndHistory() {}

}  // namespace simulation
}  // namespace weightsync

#endif  // WEIGHTSYNC_SANITIZED
