// What the digest is, word by word, in a form that a GPU kernel can include.
//
// Bytes are seen as 16-bit words of the *global* tensor: an element of 1 byte
// is one word (the byte, zero-extended, so 0..255) and an element of 2n bytes
// is n little-endian int16 words. Word w of the tensor with catalog ordinal p
// adds, in each of two lanes,
//
//     word * InnerKey(lane, w % 64) * BlockKey(lane, p, w / 64)      mod 2^64
//
// Both keys are odd, so a flipped bit moves the lane by a power of two times an
// odd number, which is never 0: any single flipped bit is seen, always. The
// inner keys of a lane are pairwise different, so two words of a block that
// changed places are seen, always. Addition does not ask for an order: parts
// may be summed by any number of threads, and frames, buckets, shards and boxes
// add up to the one value of the tensor.
//
// Inner keys have 12 bits: 8 products of an int16 and an inner key fit an
// int32, which is what vpmaddwd wants. It guards against damage, not against
// somebody who wants to deceive.
#ifndef WEIGHTSYNC_TRANSPORT_DIGEST_DEFINITION_H_
#define WEIGHTSYNC_TRANSPORT_DIGEST_DEFINITION_H_

#include <cstdint>

#if defined(__CUDACC__)
#define WEIGHTSYNC_HOST_DEVICE __host__ __device__
#else
#define WEIGHTSYNC_HOST_DEVICE
#endif

namespace weightsync {
namespace transport {

constexpr int kDigestLanes = 2;
// Words that share a block key.
constexpr int64_t kDigestBlockWords = 64;

// An odd number below 4096; for a fixed lane a different one for each `index`
// in [0, 64). Every step is a bijection of 11-bit numbers, which is what makes
// them different; the steps are not linear, so that errors in arithmetic
// progression do not cancel.
WEIGHTSYNC_HOST_DEVICE constexpr int16_t DigestInnerKey(int lane, int index) {
  uint32_t x = (static_cast<uint32_t>(index) * (lane == 0 ? 0x4f5u : 0x2b3u) +
                (lane == 0 ? 0x1c7u : 0x5e9u)) &
               0x7ffu;
  x ^= x >> 6;
  x = (x * (lane == 0 ? 0x6a5u : 0x357u)) & 0x7ffu;
  x ^= x >> 5;
  x = (x * (lane == 0 ? 0x53bu : 0x7c9u)) & 0x7ffu;
  x ^= x >> 6;
  return static_cast<int16_t>(2 * x + 1);
}

// Steele, Lea and Flood's SplitMix64 finaliser.
WEIGHTSYNC_HOST_DEVICE constexpr uint64_t DigestMix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

WEIGHTSYNC_HOST_DEVICE constexpr uint64_t DigestSeed(uint32_t ordinal) {
  return DigestMix((static_cast<uint64_t>(ordinal) + 1) *
                   0x9e3779b97f4a7c15ull);
}

// 64 bits of which lane 0 takes the low half and lane 1 the high half.
WEIGHTSYNC_HOST_DEVICE constexpr uint64_t DigestBlockBits(uint64_t seed,
                                                          int64_t block) {
  return DigestMix(seed + static_cast<uint64_t>(block) * 0x9e3779b97f4a7c15ull);
}

WEIGHTSYNC_HOST_DEVICE constexpr int32_t DigestBlockKey(uint64_t block_bits,
                                                        int lane) {
  return static_cast<int32_t>(static_cast<uint32_t>(block_bits >> (32 * lane)) |
                              1u);
}

// What one word adds to one lane. `seed` is DigestSeed(ordinal).
WEIGHTSYNC_HOST_DEVICE constexpr uint64_t DigestWordTerm(int lane,
                                                         uint64_t seed,
                                                         int64_t word_index,
                                                         int16_t word) {
  const int64_t inner = static_cast<int64_t>(word) *
                        DigestInnerKey(lane, static_cast<int>(word_index % 64));
  const int64_t key = DigestBlockKey(
      DigestBlockBits(seed, word_index / kDigestBlockWords), lane);
  return static_cast<uint64_t>(inner) * static_cast<uint64_t>(key);
}

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_DIGEST_DEFINITION_H_
