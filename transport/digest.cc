#include "transport/digest.h"

#include <cstdio>
#include <cstring>

#include "transport/digest_definition.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2")))
#endif

namespace weightsync {
namespace transport {
namespace {

constexpr int64_t kBlock = kDigestBlockWords;

struct InnerKeys {
  alignas(32) int16_t lane[kDigestLanes][kBlock];
};

constexpr InnerKeys MakeInnerKeys() {
  InnerKeys keys{};
  for (int lane = 0; lane < kDigestLanes; ++lane) {
    for (int i = 0; i < kBlock; ++i)
      keys.lane[lane][i] = DigestInnerKey(lane, i);
  }
  return keys;
}

constexpr InnerKeys kInnerKeys = MakeInnerKeys();

// Below this a run is not worth a non-temporal store: it would end in
// half-filled write-combining buffers.
constexpr size_t kMinNonTemporalBytes = 256;

// A run as words.
struct Words {
  explicit Words(const DigestRun& run)
      : seed(DigestSeed(run.ordinal)),
        bytes_per_word(run.element_bytes == 1 ? 1 : 2),
        first(run.element_bytes == 1
                  ? run.first_element
                  : run.first_element * (run.element_bytes / 2)),
        count(run.bytes() / bytes_per_word) {}
  uint64_t seed;
  int bytes_per_word;
  int64_t first;
  int64_t count;
};

inline int16_t LoadWord(const unsigned char* data, int bytes_per_word) {
  if (bytes_per_word == 1) return data[0];
  return static_cast<int16_t>(static_cast<uint16_t>(data[0] | (data[1] << 8)));
}

// Adds `count` words that start at word `first` and end in its block.
void AddInBlock(const unsigned char* data, int bytes_per_word, uint64_t seed,
                int64_t first, int64_t count, Digest* digest) {
  const int64_t phase = first % kBlock;
  int64_t sum[kDigestLanes] = {0, 0};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t word = LoadWord(data + i * bytes_per_word, bytes_per_word);
    sum[0] += word * kInnerKeys.lane[0][phase + i];
    sum[1] += word * kInnerKeys.lane[1][phase + i];
  }
  const uint64_t bits = DigestBlockBits(seed, first / kBlock);
  for (int lane = 0; lane < kDigestLanes; ++lane) {
    digest->lanes[lane] +=
        static_cast<uint64_t>(sum[lane]) *
        static_cast<uint64_t>(static_cast<int64_t>(DigestBlockKey(bits, lane)));
  }
}

#if defined(__x86_64__)

// The two running sums, four 64-bit lanes each. Named members, not arrays, here
// and below: gcc 12 sends arrays of vectors through memory, at a fifth of the
// speed.
struct Avx2Sums {
  __m256i lane0;
  __m256i lane1;
};

// A block of 64 words.
struct Block {
  __m256i a, b, c, d;
};

// Adds one lane's sum over a block.
WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) __m256i AddBlockLane(
    const Block& v, int lane, int32_t block_key, __m256i sum) {
  const __m256i* keys = reinterpret_cast<const __m256i*>(kInnerKeys.lane[lane]);
  // 8 products of 15 + 12 bits in each int32: below 2^30.
  const __m256i s01 =
      _mm256_add_epi32(_mm256_madd_epi16(v.a, _mm256_load_si256(keys)),
                       _mm256_madd_epi16(v.b, _mm256_load_si256(keys + 1)));
  const __m256i s23 =
      _mm256_add_epi32(_mm256_madd_epi16(v.c, _mm256_load_si256(keys + 2)),
                       _mm256_madd_epi16(v.d, _mm256_load_si256(keys + 3)));
  const __m256i s = _mm256_add_epi32(s01, s23);
  const __m256i key = _mm256_set1_epi32(block_key);
  const __m256i even = _mm256_mul_epi32(s, key);
  const __m256i odd = _mm256_mul_epi32(_mm256_srli_epi64(s, 32), key);
  return _mm256_add_epi64(sum, _mm256_add_epi64(even, odd));
}

template <int kBytesPerWord>
WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) __m256i LoadWords(
    const unsigned char* data) {
  if (kBytesPerWord == 2)
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  return _mm256_cvtepu8_epi16(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}

template <int kBytesPerWord>
WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) Block LoadBlock(
    const unsigned char* data) {
  constexpr int kStep = 16 * kBytesPerWord;
  return Block{LoadWords<kBytesPerWord>(data),
               LoadWords<kBytesPerWord>(data + kStep),
               LoadWords<kBytesPerWord>(data + 2 * kStep),
               LoadWords<kBytesPerWord>(data + 3 * kStep)};
}

WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) void AddBlock(
    const Block& v, uint64_t seed, int64_t block, Avx2Sums* sums) {
  const uint64_t bits = DigestBlockBits(seed, block);
  sums->lane0 = AddBlockLane(v, 0, DigestBlockKey(bits, 0), sums->lane0);
  sums->lane1 = AddBlockLane(v, 1, DigestBlockKey(bits, 1), sums->lane1);
}

WEIGHTSYNC_AVX2 inline uint64_t Collect(__m256i sum) {
  alignas(32) uint64_t part[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(part), sum);
  return part[0] + part[1] + part[2] + part[3];
}

WEIGHTSYNC_AVX2 inline void Collect(const Avx2Sums& sums, Digest* digest) {
  digest->lanes[0] += Collect(sums.lane0);
  digest->lanes[1] += Collect(sums.lane1);
}

// `blocks` whole blocks, the first of which is number `block`.
template <int kBytesPerWord>
WEIGHTSYNC_AVX2 void AddBlocksAvx2(const unsigned char* data, uint64_t seed,
                                   int64_t block, int64_t blocks,
                                   Digest* digest) {
  Avx2Sums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < blocks; ++i) {
    AddBlock(LoadBlock<kBytesPerWord>(data + i * kBlock * kBytesPerWord), seed,
             block + i, &sums);
  }
  Collect(sums, digest);
}

// The same, with the bytes copied to `dst`. kAligned: `dst` is on 32 bytes, so
// the words that were summed are the words that are stored. Otherwise the
// stores are moved to the next boundary, and their bytes are loaded a second
// time, from the first-level cache.
template <int kBytesPerWord, bool kAligned>
WEIGHTSYNC_AVX2 void CopyBlocksAvx2(unsigned char* dst,
                                    const unsigned char* src, uint64_t seed,
                                    int64_t block, int64_t blocks,
                                    Digest* digest) {
  constexpr int64_t kBytes = kBlock * kBytesPerWord;
  constexpr int kVectors = kBytes / 32;
  Avx2Sums sums = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const int64_t shift =
      kAligned ? 0 : (32 - reinterpret_cast<uintptr_t>(dst) % 32) % 32;
  if (!kAligned) std::memcpy(dst, src, shift);
  // The last block's moved stores would read past its end.
  const int64_t streamed = kAligned ? blocks : blocks - 1;
  for (int64_t i = 0; i < streamed; ++i) {
    const unsigned char* from = src + i * kBytes;
    _mm_prefetch(reinterpret_cast<const char*>(from) + 1024, _MM_HINT_NTA);
    if (kBytes > 64)
      _mm_prefetch(reinterpret_cast<const char*>(from) + 1024 + 64,
                   _MM_HINT_NTA);
    const Block v = LoadBlock<kBytesPerWord>(from);
    __m256i* to = reinterpret_cast<__m256i*>(dst + shift + i * kBytes);
    if (kAligned && kBytesPerWord == 2) {
      _mm256_stream_si256(to, v.a);
      _mm256_stream_si256(to + 1, v.b);
      _mm256_stream_si256(to + 2, v.c);
      _mm256_stream_si256(to + 3, v.d);
    } else {
      for (int k = 0; k < kVectors; ++k) {
        _mm256_stream_si256(
            to + k, _mm256_loadu_si256(
                        reinterpret_cast<const __m256i*>(from + shift) + k));
      }
    }
    AddBlock(v, seed, block + i, &sums);
  }
  Collect(sums, digest);
  if (!kAligned) {
    const int64_t last = blocks - 1;
    AddBlocksAvx2<kBytesPerWord>(src + last * kBytes, seed, block + last, 1,
                                 digest);
    std::memcpy(dst + shift + last * kBytes, src + shift + last * kBytes,
                kBytes - shift);
  }
}

WEIGHTSYNC_AVX2 void StreamAvx2(unsigned char* dst, const unsigned char* src,
                                size_t bytes) {
  const size_t head = (32 - reinterpret_cast<uintptr_t>(dst) % 32) % 32;
  std::memcpy(dst, src, head);
  dst += head;
  src += head;
  bytes -= head;
  while (bytes >= 128) {
    _mm_prefetch(reinterpret_cast<const char*>(src) + 1024, _MM_HINT_NTA);
    _mm_prefetch(reinterpret_cast<const char*>(src) + 1024 + 64, _MM_HINT_NTA);
    const __m256i* from = reinterpret_cast<const __m256i*>(src);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);
    __m256i* to = reinterpret_cast<__m256i*>(dst);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
    dst += 128;
    src += 128;
    bytes -= 128;
  }
  std::memcpy(dst, src, bytes);
}

#endif  // defined(__x86_64__)

void AddBlocksScalar(const unsigned char* data, int bytes_per_word,
                     uint64_t seed, int64_t block, int64_t blocks,
                     Digest* digest) {
  for (int64_t i = 0; i < blocks; ++i) {
    AddInBlock(data + i * kBlock * bytes_per_word, bytes_per_word, seed,
               (block + i) * kBlock, kBlock, digest);
  }
}

void AddBlocks(const unsigned char* data, int bytes_per_word, uint64_t seed,
               int64_t block, int64_t blocks, Digest* digest) {
#if defined(__x86_64__)
  static const bool avx2 = digest_internal::HasAvx2();
  if (avx2) {
    if (bytes_per_word == 2) {
      AddBlocksAvx2<2>(data, seed, block, blocks, digest);
    } else {
      AddBlocksAvx2<1>(data, seed, block, blocks, digest);
    }
    return;
  }
#endif
  AddBlocksScalar(data, bytes_per_word, seed, block, blocks, digest);
}

// Adds words that do not fill their block. Words that are not there count as
// zeros, which add nothing, so the vector code can take them too.
void AddPartialBlock(const unsigned char* data, const Words& words,
                     int64_t first, int64_t count, Digest* digest) {
  if (count <= 8)
    return AddInBlock(data, words.bytes_per_word, words.seed, first, count,
                      digest);
  alignas(32) unsigned char block[kBlock * 2] = {};
  std::memcpy(block + first % kBlock * words.bytes_per_word, data,
              count * words.bytes_per_word);
  AddBlocks(block, words.bytes_per_word, words.seed, first / kBlock, 1, digest);
}

// A run cut where blocks begin: some words, whole blocks, some words.
struct Cut {
  explicit Cut(const Words& words) {
    head = (kBlock - words.first % kBlock) % kBlock;
    if (head > words.count) head = words.count;
    blocks = (words.count - head) / kBlock;
    tail = words.count - head - blocks * kBlock;
  }
  int64_t head;    // words
  int64_t blocks;  // blocks
  int64_t tail;    // words
};

}  // namespace

std::string Digest::ToString() const {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx",
                static_cast<unsigned long long>(lanes[0]),
                static_cast<unsigned long long>(lanes[1]));
  return text;
}

void DigestAccumulate(const void* data, const DigestRun& run, Digest* digest) {
  const Words words(run);
  const Cut cut(words);
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  if (cut.head > 0)
    AddPartialBlock(bytes, words, words.first, cut.head, digest);
  bytes += cut.head * words.bytes_per_word;
  const int64_t first = words.first + cut.head;
  if (cut.blocks > 0)
    AddBlocks(bytes, words.bytes_per_word, words.seed, first / kBlock,
              cut.blocks, digest);
  bytes += cut.blocks * kBlock * words.bytes_per_word;
  if (cut.tail > 0)
    AddPartialBlock(bytes, words, first + cut.blocks * kBlock, cut.tail,
                    digest);
}

void CopyAccumulateUnfenced(void* dst, const void* src, const DigestRun& run,
                            Digest* digest) {
#if defined(__x86_64__)
  static const bool avx2 = digest_internal::HasAvx2();
  const Words words(run);
  const Cut cut(words);
  if (avx2 && cut.blocks * kBlock * words.bytes_per_word >=
                  static_cast<int64_t>(kMinNonTemporalBytes)) {
    unsigned char* to = static_cast<unsigned char*>(dst);
    const unsigned char* from = static_cast<const unsigned char*>(src);
    int64_t part = cut.head * words.bytes_per_word;
    std::memcpy(to, from, part);
    if (cut.head > 0) AddPartialBlock(to, words, words.first, cut.head, digest);
    to += part;
    from += part;
    const int64_t block = (words.first + cut.head) / kBlock;
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 32 == 0;
    if (words.bytes_per_word == 2) {
      (aligned ? CopyBlocksAvx2<2, true>
               : CopyBlocksAvx2<2, false>)(to, from, words.seed, block,
                                           cut.blocks, digest);
    } else {
      (aligned ? CopyBlocksAvx2<1, true>
               : CopyBlocksAvx2<1, false>)(to, from, words.seed, block,
                                           cut.blocks, digest);
    }
    part = cut.blocks * kBlock * words.bytes_per_word;
    to += part;
    from += part;
    std::memcpy(to, from, cut.tail * words.bytes_per_word);
    if (cut.tail > 0)
      AddPartialBlock(to, words, (block + cut.blocks) * kBlock, cut.tail,
                      digest);
    return;
  }
#endif
  std::memcpy(dst, src, run.bytes());
  DigestAccumulate(dst, run, digest);
}

void CopyNonTemporalUnfenced(void* dst, const void* src, size_t bytes) {
#if defined(__x86_64__)
  static const bool avx2 = digest_internal::HasAvx2();
  if (avx2 && bytes >= kMinNonTemporalBytes) {
    StreamAvx2(static_cast<unsigned char*>(dst),
               static_cast<const unsigned char*>(src), bytes);
    return;
  }
#endif
  std::memcpy(dst, src, bytes);
}

void NonTemporalFence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  __sync_synchronize();
#endif
}

void CopyAccumulate(void* dst, const void* src, const DigestRun& run,
                    Digest* digest) {
  CopyAccumulateUnfenced(dst, src, run, digest);
  NonTemporalFence();
}

void CopyNonTemporal(void* dst, const void* src, size_t bytes) {
  CopyNonTemporalUnfenced(dst, src, bytes);
  NonTemporalFence();
}

namespace digest_internal {

void DigestAccumulateByDefinition(const void* data, const DigestRun& run,
                                  Digest* digest) {
  const Words words(run);
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  for (int64_t i = 0; i < words.count; ++i) {
    const int16_t word =
        LoadWord(bytes + i * words.bytes_per_word, words.bytes_per_word);
    for (int lane = 0; lane < kDigestLanes; ++lane) {
      digest->lanes[lane] +=
          DigestWordTerm(lane, words.seed, words.first + i, word);
    }
  }
}

void DigestAccumulateScalar(const void* data, const DigestRun& run,
                            Digest* digest) {
  const Words words(run);
  const Cut cut(words);
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  const int size = words.bytes_per_word;
  AddInBlock(bytes, size, words.seed, words.first, cut.head, digest);
  const int64_t first = words.first + cut.head;
  AddBlocksScalar(bytes + cut.head * size, size, words.seed, first / kBlock,
                  cut.blocks, digest);
  AddInBlock(bytes + (cut.head + cut.blocks * kBlock) * size, size, words.seed,
             first + cut.blocks * kBlock, cut.tail, digest);
}

bool HasAvx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

}  // namespace digest_internal
}  // namespace transport
}  // namespace weightsync
