// One int64 per dimension: a vector of at most kMaxDims values that keeps up to
// two inline, for plans hold millions of boxes and nearly all are of matrices.

#ifndef WEIGHTSYNC_SCHEDULE_DIMS_H_
#define WEIGHTSYNC_SCHEDULE_DIMS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <utility>

#include "absl/types/span.h"

namespace weightsync {
namespace schedule {

// More dimensions than any published model has; a catalog with more is refused.
inline constexpr int kMaxDims = 8;

// Outermost dimension first. The interface is std::vector's; more than kMaxDims
// values are held, too (a catalog must be able to refuse them).
class Dims {
 public:
  using value_type = int64_t;
  using iterator = int64_t*;
  using const_iterator = const int64_t*;

  Dims() = default;
  explicit Dims(size_t n, int64_t value = 0) { assign(n, value); }
  Dims(std::initializer_list<int64_t> values) {
    assign(values.begin(), values.end());
  }
  explicit Dims(absl::Span<const int64_t> values) {
    assign(values.begin(), values.end());
  }
  template <typename It, typename = decltype(*std::declval<It&>())>
  Dims(It first, It last) {
    assign(first, last);
  }
  Dims(const Dims& other) {
    if (other.heap()) {
      assign(other.begin(), other.end());
    } else {
      store_ = other.store_;
      size_ = other.size_;
    }
  }
  Dims(Dims&& other) noexcept { Take(&other); }
  Dims& operator=(const Dims& other) {
    if (this == &other) return *this;
    if (heap() || other.heap()) {
      assign(other.begin(), other.end());
    } else {
      store_ = other.store_;
      size_ = other.size_;
    }
    return *this;
  }
  Dims& operator=(Dims&& other) noexcept {
    if (this != &other) {
      Free();
      Take(&other);
    }
    return *this;
  }
  ~Dims() { Free(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t* data() { return heap() ? store_.heap : store_.inlined; }
  const int64_t* data() const { return heap() ? store_.heap : store_.inlined; }
  iterator begin() { return data(); }
  iterator end() { return data() + size_; }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size_; }
  int64_t& operator[](size_t i) { return data()[i]; }
  int64_t operator[](size_t i) const { return data()[i]; }
  int64_t front() const { return data()[0]; }
  int64_t back() const { return data()[size_ - 1]; }

  void clear() { size_ = 0; }
  void pop_back() { --size_; }
  void push_back(int64_t value) {
    Reserve(size_ + 1);
    data()[size_++] = value;
  }
  void resize(size_t n) {
    Reserve(n);
    for (size_t i = size_; i < n; ++i) data()[i] = 0;
    size_ = static_cast<uint32_t>(n);
  }
  void assign(size_t n, int64_t value) {
    size_ = 0;
    Reserve(n);
    std::fill_n(data(), n, value);
    size_ = static_cast<uint32_t>(n);
  }
  template <typename It, typename = decltype(*std::declval<It&>())>
  void assign(It first, It last) {
    const auto n = static_cast<size_t>(last - first);
    size_ = 0;
    Reserve(n);
    std::copy(first, last, data());
    size_ = static_cast<uint32_t>(n);
  }

  friend bool operator==(const Dims& a, const Dims& b) {
    if (a.size_ != b.size_) return false;
    // A loop, for calling memcmp costs more than two words do.
    const int64_t* x = a.data();
    const int64_t* y = b.data();
    for (uint32_t i = 0; i < a.size_; ++i) {
      if (x[i] != y[i]) return false;
    }
    return true;
  }
  friend bool operator!=(const Dims& a, const Dims& b) { return !(a == b); }
  friend bool operator<(const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }
  template <typename H>
  friend H AbslHashValue(H h, const Dims& dims) {
    return H::combine(
        H::combine_contiguous(std::move(h), dims.data(), dims.size()),
        dims.size());
  }
  friend std::ostream& operator<<(std::ostream& out, const Dims& dims) {
    out << "[";
    for (size_t i = 0; i < dims.size(); ++i) out << (i ? ", " : "") << dims[i];
    return out << "]";
  }

 private:
  static constexpr uint32_t kInlined = 2;

  bool heap() const { return capacity_ > kInlined; }
  void Reserve(size_t n) {
    if (n <= capacity_) return;
    const auto capacity = static_cast<uint32_t>(std::max<size_t>(n, kMaxDims));
    auto* grown = new int64_t[capacity];
    std::copy(begin(), end(), grown);
    Free();
    store_.heap = grown;
    capacity_ = capacity;
  }
  void Free() {
    if (heap()) delete[] store_.heap;
    capacity_ = kInlined;
  }
  void Take(Dims* other) {
    store_ = other->store_;
    size_ = other->size_;
    capacity_ = other->capacity_;
    other->size_ = 0;
    other->capacity_ = kInlined;
  }

  union Store {
    int64_t inlined[kInlined] = {0, 0};
    int64_t* heap;
  } store_;
  uint32_t size_ = 0;
  uint32_t capacity_ = kInlined;
};

}  // namespace schedule
}  // namespace weightsync

#endif  // WEIGHTSYNC_SCHEDULE_DIMS_H_
