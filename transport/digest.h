// The digest of tensor bytes, and copies that compute it on the way.
//
//   Digest d;
//   CopyAccumulate(store + piece.offset, shard, {ordinal, first_element, count,
//   /*element_bytes=*/2}, &d);
//   ... on another node, over what it stored, in any split and any order ...
//   if (received != d) { this frame is sent again }
//
// What the value is stands in digest_definition.h. Every function here may be
// called from any number of threads at a time, on different digests. All of
// them use AVX2 where the CPU has it and the scalar definition elsewhere; the
// values are the same.
#ifndef WEIGHTSYNC_TRANSPORT_DIGEST_H_
#define WEIGHTSYNC_TRANSPORT_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace weightsync {
namespace transport {

// Sums mod 2^64. The digest of nothing is zero in both lanes (and so is that of
// zeros).
struct Digest {
  uint64_t lanes[2] = {0, 0};

  Digest& operator+=(const Digest& other) {
    lanes[0] += other.lanes[0];
    lanes[1] += other.lanes[1];
    return *this;
  }
  Digest& operator-=(const Digest& other) {
    lanes[0] -= other.lanes[0];
    lanes[1] -= other.lanes[1];
    return *this;
  }
  friend Digest operator+(Digest a, const Digest& b) { return a += b; }
  friend Digest operator-(Digest a, const Digest& b) { return a -= b; }
  friend bool operator==(const Digest& a, const Digest& b) {
    return a.lanes[0] == b.lanes[0] && a.lanes[1] == b.lanes[1];
  }
  friend bool operator!=(const Digest& a, const Digest& b) { return !(a == b); }

  // 32 hexadecimal digits, for logs and messages.
  std::string ToString() const;
};

// Elements that follow one another both in memory and in the flattened
// (row-major) global tensor.
struct DigestRun {
  uint32_t ordinal = 0;       // the parameter's place in the catalog
  int64_t first_element = 0;  // index in the flattened global tensor
  int64_t element_count = 0;
  int32_t element_bytes = 1;  // 1, or an even number
  int64_t bytes() const { return element_count * element_bytes; }
};

// Adds the digest of run.bytes() bytes at `data` to *digest. No alignment is
// asked for.
void DigestAccumulate(const void* data, const DigestRun& run, Digest* digest);

// Copies run.bytes() bytes from `src` to `dst`, which do not overlap, and adds
// their digest to *digest: one pass over the source, and stores that go round
// the cache. What is digested is what was read, so the digest tells later
// whether `dst` was written right; a source that changes meanwhile may leave a
// digest of neither its old bytes nor its new ones, which later looks like
// damage, as it should. The stores are visible to whoever sees a later store of
// this thread.
void CopyAccumulate(void* dst, const void* src, const DigestRun& run,
                    Digest* digest);

// The same without a digest.
void CopyNonTemporal(void* dst, const void* src, size_t bytes);

// For many short copies in a row: the two functions above without their fence.
// The caller calls NonTemporalFence once, after the last of them and before it
// tells anyone (another thread, process or device) that bytes are there.
void CopyAccumulateUnfenced(void* dst, const void* src, const DigestRun& run,
                            Digest* digest);
void CopyNonTemporalUnfenced(void* dst, const void* src, size_t bytes);
void NonTemporalFence();

namespace digest_internal {
// The definition, a word at a time: what tests compare with.
void DigestAccumulateByDefinition(const void* data, const DigestRun& run,
                                  Digest* digest);
// The path that CPUs without AVX2 take.
void DigestAccumulateScalar(const void* data, const DigestRun& run,
                            Digest* digest);
bool HasAvx2();
}  // namespace digest_internal

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_DIGEST_H_
