// operator new for a program that makes and drops small objects by the hundred
// million and does little else: a history is made of strings, messages and map
// nodes that live for milliseconds, and a quarter of its time went to malloc.
//
// Objects of up to kLargest bytes come from lists, one for each size in steps
// of kStep, one set of lists for each thread; what is freed goes to the list of
// the thread that frees it, and nothing goes back to the system. Bigger ones
// are malloc's. Under sanitizers there is nothing here: they want to see every
// allocation.

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

// Null when there is no room.
void* Refill(size_t size) {
  char* base = first.load(std::memory_order_acquire);
  if (base == nullptr) base = Reserve();
  if (base == nullptr) return nullptr;
  const size_t chunk = next_chunk.fetch_add(1, std::memory_order_relaxed);
  if (chunk >= kChunks) return nullptr;
  size_of_chunk[chunk] = static_cast<uint8_t>(size);
  const size_t bytes = size * kStep;
  char* const begin = base + chunk * kChunk;
  Free* list = nullptr;
  for (size_t i = kChunk / bytes; i-- > 1;) {
    Free* object = reinterpret_cast<Free*>(begin + i * bytes);
    object->next = list;
    list = object;
  }
  free_objects[size] = list;
  return begin;
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
    return object;
  }
  void* memory = Refill(size);
  return memory != nullptr ? memory : FromMalloc(bytes);
}

void Release(void* memory) {
  if (memory == nullptr) return;
  const char* const base = first.load(std::memory_order_relaxed);
  const size_t offset =
      static_cast<size_t>(static_cast<const char*>(memory) - base);
  if (base == nullptr || offset >= kChunk * kChunks) return std::free(memory);
  Free* object = static_cast<Free*>(memory);
  const size_t size = size_of_chunk[offset / kChunk];
  object->next = free_objects[size];
  free_objects[size] = object;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* memory) noexcept { Release(memory); }
void operator delete[](void* memory) noexcept { Release(memory); }
void operator delete(void* memory, size_t) noexcept { Release(memory); }
void operator delete[](void* memory, size_t) noexcept { Release(memory); }

#endif  // WEIGHTSYNC_SANITIZED
