// What one thread of each kernel does: host-device functions.
#ifndef WEIGHTSYNC_TRANSPORT_CUDA_KERNEL_BODY_H_
#define WEIGHTSYNC_TRANSPORT_CUDA_KERNEL_BODY_H_

#include <cstdint>
#include <cstring>

#include "transport/cast_definition.h"
#include "transport/cuda/kernels.h"
#include "transport/digest_definition.h"

// Rare paths stay small: a kernel of five times the code takes five times as
// long to compile for each generation of GPUs, and more registers.
#if defined(__CUDA_ARCH__)
#define WEIGHTSYNC_ROLLED _Pragma("unroll 1")
#define WEIGHTSYNC_OUT_OF_LINE __noinline__
#else
#define WEIGHTSYNC_ROLLED
#define WEIGHTSYNC_OUT_OF_LINE
#endif

namespace weightsync {
namespace transport {
namespace cuda {

template <int kBytes>
struct alignas(kBytes) Vector {
  unsigned char bytes[kBytes];
};

struct DigestLanes {
  uint64_t lane[kDigestLanes];
};

// What one word adds, with the keys from a table.
WEIGHTSYNC_HOST_DEVICE inline DigestLanes WordTerm(const int16_t* inner_keys,
                                                   uint64_t seed,
                                                   int64_t word_index,
                                                   int16_t word) {
  const int inner = static_cast<int>(word_index % kDigestBlockWords);
  const uint64_t bits = DigestBlockBits(seed, word_index / kDigestBlockWords);
  DigestLanes term;
  for (int lane = 0; lane < kDigestLanes; ++lane) {
    const int64_t product = static_cast<int64_t>(word) *
                            inner_keys[lane * kDigestBlockWords + inner];
    term.lane[lane] =
        static_cast<uint64_t>(product) *
        static_cast<uint64_t>(static_cast<int64_t>(DigestBlockKey(bits, lane)));
  }
  return term;
}

// The two sums of one thread. While words come in eights that stand alike in
// their blocks, as those of one thread in a long run do, the keys stay in
// registers.
struct DigestSum {
  uint64_t lanes[kDigestLanes] = {0, 0};
  const int16_t* inner_keys;
  int phase = -1;
  int32_t keys[kDigestLanes][8];

  // REQUIRES: word_index is a multiple of 8.
  WEIGHTSYNC_HOST_DEVICE void AddEight(uint64_t seed, int64_t word_index,
                                       const int16_t words[8]) {
    const int now = static_cast<int>(word_index % kDigestBlockWords);
    if (now != phase) {
      phase = now;
      for (int lane = 0; lane < kDigestLanes; ++lane)
        for (int i = 0; i < 8; ++i)
          keys[lane][i] = inner_keys[lane * kDigestBlockWords + now + i];
    }
    // 8 products of 15 + 12 bits: below 2^30.
    int32_t sums[kDigestLanes] = {0, 0};
    for (int i = 0; i < 8; ++i) {
      sums[0] += words[i] * keys[0][i];
      sums[1] += words[i] * keys[1][i];
    }
    const uint64_t bits = DigestBlockBits(seed, word_index / kDigestBlockWords);
    for (int lane = 0; lane < kDigestLanes; ++lane) {
      lanes[lane] += static_cast<uint64_t>(
          static_cast<int64_t>(sums[lane]) *
          static_cast<int64_t>(DigestBlockKey(bits, lane)));
    }
  }
};

// A vector whose words do not stand in eights, word by word. By value: what a
// function out of line can point to does not stay in registers.
template <int kBytes>
WEIGHTSYNC_HOST_DEVICE WEIGHTSYNC_OUT_OF_LINE inline DigestLanes VectorByWords(
    const Vector<kBytes> vector, uint64_t seed, int64_t element,
    int32_t element_bytes, const int16_t* inner_keys) {
  DigestLanes sum = {{0, 0}};
  const bool bytes = element_bytes == 1;
  const int64_t word = bytes ? element : element * (element_bytes / 2);
  WEIGHTSYNC_ROLLED
  for (int i = 0; i < (bytes ? kBytes : kBytes / 2); ++i) {
    const int16_t value = bytes
                              ? static_cast<int16_t>(vector.bytes[i])
                              : static_cast<int16_t>(static_cast<uint16_t>(
                                    vector.bytes[(2 * i) % kBytes] |
                                    (vector.bytes[(2 * i + 1) % kBytes] << 8)));
    const DigestLanes term = WordTerm(inner_keys, seed, word + i, value);
    sum.lane[0] += term.lane[0];
    sum.lane[1] += term.lane[1];
  }
  return sum;
}

// Adds a vector of elements that follow one another from `element` on.
template <int kBytes>
WEIGHTSYNC_HOST_DEVICE inline void AddVector(const Vector<kBytes>& vector,
                                             uint64_t seed, int64_t element,
                                             int32_t element_bytes,
                                             DigestSum* sum) {
  if (kBytes == 16 && element_bytes == 1 && element % 8 == 0) {
    for (int at = 0; at + 8 <= kBytes; at += 8) {
      int16_t words[8];
      for (int i = 0; i < 8; ++i) words[i] = vector.bytes[at + i];
      sum->AddEight(seed, element + at, words);
    }
    return;
  }
  const int64_t word = element * (element_bytes / 2);
  if (kBytes == 16 && element_bytes != 1 && word % 8 == 0) {
    int16_t words[8];
    for (int i = 0; i < 8; ++i) {
      words[i] = static_cast<int16_t>(
          static_cast<uint16_t>(vector.bytes[(2 * i) % kBytes] |
                                (vector.bytes[(2 * i + 1) % kBytes] << 8)));
    }
    sum->AddEight(seed, word, words);
    return;
  }
  const DigestLanes more = VectorByWords<kBytes>(
      vector, seed, element, element_bytes, sum->inner_keys);
  sum->lanes[0] += more.lane[0];
  sum->lanes[1] += more.lane[1];
}

// Where the byte `at` of a copy's dense destination lies.
struct CopyPlace {
  int64_t src, dst;  // bytes from the copy's own
  int64_t element;   // of the global tensor
  int64_t in_run;    // elements from the start of the run
};

WEIGHTSYNC_HOST_DEVICE WEIGHTSYNC_OUT_OF_LINE inline CopyPlace PlaceOf(
    const DeviceCopy& copy, int64_t element) {
  CopyPlace place;
  int64_t row;
  // Division of 64 bits costs a GPU four times that of 32.
  if (static_cast<uint64_t>(element) <= 0xffffffffu &&
      static_cast<uint64_t>(copy.run_elements) <= 0xffffffffu) {
    row = static_cast<uint32_t>(element) /
          static_cast<uint32_t>(copy.run_elements);
  } else {
    row = element / copy.run_elements;
  }
  place.in_run = element - row * copy.run_elements;
  place.src = place.in_run * copy.src_element_bytes;
  place.dst = place.in_run * copy.dst_element_bytes;
  place.element = copy.first_element + place.in_run;
  WEIGHTSYNC_ROLLED
  for (int i = copy.dim_count; i-- > 0;) {
    const DeviceDim& dim = copy.dims[i];
    int64_t outer;
    if (static_cast<uint64_t>(row) <= 0xffffffffu &&
        static_cast<uint64_t>(dim.extent) <= 0xffffffffu) {
      outer = static_cast<uint32_t>(row) / static_cast<uint32_t>(dim.extent);
    } else {
      outer = row / dim.extent;
    }
    const int64_t index = row - outer * dim.extent;
    row = outer;
    place.src += index * dim.src_stride;
    place.dst += index * dim.dst_stride;
    place.element += index * dim.element_stride;
  }
  return place;
}

template <typename T>
WEIGHTSYNC_HOST_DEVICE inline T Load(const char* from, bool unaligned) {
  if (!unaligned) return *reinterpret_cast<const T*>(from);
  T value;
  WEIGHTSYNC_ROLLED
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i)
    reinterpret_cast<char*>(&value)[i] = from[i];
  return value;
}

// Reads what becomes one vector of the destination. `element`: in the whole
// tensor.
template <int kBytes>
WEIGHTSYNC_HOST_DEVICE inline Vector<kBytes> LoadCast(const DeviceCopy& copy,
                                                      const char* src,
                                                      int64_t element) {
  const bool unaligned = copy.unaligned != 0;
  Vector<kBytes> out = {};
  switch (copy.cast) {
    case DeviceCast::kNone:
      break;
    case DeviceCast::kF32ToBF16:
    case DeviceCast::kF32ToF16:
      WEIGHTSYNC_ROLLED
      for (int i = 0; i < kBytes / 2; ++i) {
        const uint32_t bits = Load<uint32_t>(src + 4 * i, unaligned);
        const uint16_t value = copy.cast == DeviceCast::kF32ToBF16
                                   ? FloatToBF16(bits)
                                   : FloatToF16(bits);
        out.bytes[(2 * i) % kBytes] = static_cast<unsigned char>(value);
        out.bytes[(2 * i + 1) % kBytes] =
            static_cast<unsigned char>(value >> 8);
      }
      return out;
    case DeviceCast::kBF16ToF8E4M3: {
      int64_t row = element / copy.scale_columns;
      int64_t column = element - row * copy.scale_columns;
      row -= copy.scale_row;
      float scale = 0;
      WEIGHTSYNC_ROLLED
      for (int i = 0; i < kBytes; ++i, ++column) {
        if (column == copy.scale_columns) {
          column = 0;
          ++row;
        }
        if (i == 0 || column % kScaleBlock == 0) {
          scale = copy.scales[row / kScaleBlock * copy.scale_stride +
                              (column - copy.scale_column) / kScaleBlock];
        }
        out.bytes[i] =
            BF16ToE4M3(Load<uint16_t>(src + 2 * i, unaligned), scale);
      }
      return out;
    }
  }
  return out;
}

template <int kBytes>
WEIGHTSYNC_HOST_DEVICE inline void Store(char* to, const Vector<kBytes>& vector,
                                         bool unaligned) {
  if (!unaligned) {
    *reinterpret_cast<Vector<kBytes>*>(to) = vector;
    return;
  }
  for (int i = 0; i < kBytes; ++i) to[i] = static_cast<char>(vector.bytes[i]);
}

// Bytes [begin, end), which lie in one run, as they are: what nearly all bytes
// of a model are. Several loads are under way at a time.
template <int kBytes>
WEIGHTSYNC_HOST_DEVICE inline void CopyInRun(const DeviceCopy& copy,
                                             int64_t begin, int64_t end,
                                             uint32_t thread, uint32_t threads,
                                             bool digest, DigestSum* sum) {
  constexpr int kInFlight = 4;
  const uint64_t seed = DigestSeed(copy.ordinal);
  const CopyPlace place = PlaceOf(copy, begin / copy.dst_element_bytes);
  const char* const src = copy.src + place.src;
  char* const dst = copy.dst == nullptr ? nullptr : copy.dst + place.dst;
  const int64_t bytes = end - begin;
  const int64_t step = static_cast<int64_t>(threads) * kBytes;
  const int64_t step_elements = step / copy.dst_element_bytes;
  int64_t at = static_cast<int64_t>(thread) * kBytes;
  int64_t element = place.element + at / copy.dst_element_bytes;
  while (at < bytes) {
    Vector<kBytes> vectors[kInFlight];
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * step < bytes)
        vectors[i] =
            *reinterpret_cast<const Vector<kBytes>*>(src + at + i * step);
    }
    for (int i = 0; i < kInFlight; ++i) {
      if (at + i * step >= bytes) break;
      if (dst != nullptr)
        *reinterpret_cast<Vector<kBytes>*>(dst + at + i * step) = vectors[i];
      if (digest) {
        AddVector<kBytes>(vectors[i], seed, element + i * step_elements,
                          copy.dst_element_bytes, sum);
      }
    }
    at += kInFlight * step;
    element += kInFlight * step_elements;
  }
}

// Bytes [begin, end) of the copy's dense destination, in vectors, every
// `threads`th from the `thread`th on.
template <int kBytes, bool kCast>
WEIGHTSYNC_HOST_DEVICE inline void CopyVectors(const DeviceCopy& copy,
                                               int64_t begin, int64_t end,
                                               uint32_t thread,
                                               uint32_t threads, bool digest,
                                               DigestSum* sum) {
  const uint64_t seed = DigestSeed(copy.ordinal);
  const int64_t step = static_cast<int64_t>(threads) * kBytes;
  const int64_t step_elements = step / copy.dst_element_bytes;
  int64_t at = begin + static_cast<int64_t>(thread) * kBytes;
  if (at >= end) return;
  CopyPlace place = PlaceOf(copy, at / copy.dst_element_bytes);
  while (true) {
    Vector<kBytes> vector;
    if (copy.src == nullptr) {
      vector = Vector<kBytes>();
    } else if (kCast) {
      vector = LoadCast<kBytes>(copy, copy.src + place.src, place.element);
    } else {
      vector = Load<Vector<kBytes>>(copy.src + place.src, copy.unaligned != 0);
    }
    if (copy.dst != nullptr)
      Store<kBytes>(copy.dst + place.dst, vector, copy.unaligned != 0);
    if (digest) {
      AddVector<kBytes>(vector, seed, place.element, copy.dst_element_bytes,
                        sum);
    }
    at += step;
    if (at >= end) return;
    if (place.in_run + step_elements < copy.run_elements) {
      place.in_run += step_elements;
      place.src += step_elements * copy.src_element_bytes;
      place.dst += step;
      place.element += step_elements;
    } else {
      place = PlaceOf(copy, at / copy.dst_element_bytes);
    }
  }
}

// Does one unit; returns the frame to which *sum belongs. kPlain: of copies
// that are neither cast nor digested, in a third of the code.
template <bool kPlain>
WEIGHTSYNC_HOST_DEVICE inline int64_t CopyUnit(const CopyLaunch& launch,
                                               int64_t unit_index,
                                               uint32_t thread,
                                               uint32_t threads,
                                               DigestSum* sum) {
  const DeviceUnit unit = launch.units[unit_index];
  const DeviceCopy& copy = launch.copies[unit.copy];
  const int64_t unit_begin = unit.place * launch.unit_bytes;
  int64_t begin = unit_begin - copy.place;
  int64_t end = begin + launch.unit_bytes;
  if (begin < 0) begin = 0;
  if (end > copy.bytes) end = copy.bytes;
  const bool digest =
      !kPlain && launch.digests != nullptr && copy.src != nullptr;
  const bool cast = !kPlain && copy.cast != DeviceCast::kNone;
  if (copy.vector_bytes == 16 && copy.src != nullptr && !cast &&
      copy.unaligned == 0) {
    const int64_t run_bytes = copy.run_elements * copy.dst_element_bytes;
    if (copy.dim_count == 0 || begin / run_bytes == (end - 1) / run_bytes) {
      CopyInRun<16>(copy, begin, end, thread, threads, digest, sum);
      return launch.frame_bytes == 0 ? 0 : unit_begin / launch.frame_bytes;
    }
  }
  if (cast) {
    switch (copy.vector_bytes) {
      case 16:
        CopyVectors<16, true>(copy, begin, end, thread, threads, digest, sum);
        break;
      case 2:
        CopyVectors<2, true>(copy, begin, end, thread, threads, digest, sum);
        break;
      default:
        CopyVectors<1, true>(copy, begin, end, thread, threads, digest, sum);
        break;
    }
  } else {
    switch (copy.vector_bytes) {
      case 16:
        CopyVectors<16, false>(copy, begin, end, thread, threads, digest, sum);
        break;
      case 8:
        CopyVectors<8, false>(copy, begin, end, thread, threads, digest, sum);
        break;
      case 4:
        CopyVectors<4, false>(copy, begin, end, thread, threads, digest, sum);
        break;
      case 2:
        CopyVectors<2, false>(copy, begin, end, thread, threads, digest, sum);
        break;
      default:
        CopyVectors<1, false>(copy, begin, end, thread, threads, digest, sum);
        break;
    }
  }
  return launch.frame_bytes == 0 ? 0 : unit_begin / launch.frame_bytes;
}

// The largest magnitude (as bits) of what one thread sees of a block.
WEIGHTSYNC_HOST_DEVICE inline uint32_t BlockLargest(const ScaleLaunch& launch,
                                                    int64_t unit_index,
                                                    uint32_t thread,
                                                    uint32_t threads,
                                                    float** scale) {
  const ScaleUnit unit = launch.units[unit_index];
  const DeviceScale& box = launch.scales[unit.scale];
  *scale = box.scales + unit.row * box.scale_stride + unit.column;
  const int64_t row0 = unit.row * kScaleBlock;
  const int64_t column0 = unit.column * kScaleBlock;
  int64_t rows = box.rows - row0;
  if (rows > kScaleBlock) rows = kScaleBlock;
  int64_t columns = box.columns - column0;
  if (columns > kScaleBlock) columns = kScaleBlock;
  uint32_t largest = 0;
  for (int64_t i = thread; i < rows * kScaleBlock; i += threads) {
    const int64_t column = i % kScaleBlock;
    if (column >= columns) continue;
    const uint16_t value =
        Load<uint16_t>(box.src + (row0 + i / kScaleBlock) * box.row_stride +
                           (column0 + column) * box.column_stride,
                       box.unaligned != 0);
    const uint32_t bits = static_cast<uint32_t>(value & 0x7fffu) << 16;
    if (bits > largest) largest = bits;
  }
  return largest;
}

template <typename T>
WEIGHTSYNC_HOST_DEVICE inline uint64_t ChangedWordOf(const ScanLaunch& scan,
                                                     int64_t first,
                                                     int64_t count) {
  const T* before = reinterpret_cast<const T*>(scan.before) + first;
  const T* after = reinterpret_cast<const T*>(scan.after) + first;
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i)
    word |= static_cast<uint64_t>(before[i] != after[i]) << i;
  return word;
}

// One bit for each of 64 elements.
WEIGHTSYNC_HOST_DEVICE inline uint64_t ChangedWord(const ScanLaunch& scan,
                                                   int64_t word) {
  const int64_t first = word * kScanWord;
  int64_t count = scan.element_count - first;
  if (count > kScanWord) count = kScanWord;
  switch (scan.element_bytes) {
    case 1:
      return ChangedWordOf<uint8_t>(scan, first, count);
    case 2:
      return ChangedWordOf<uint16_t>(scan, first, count);
    case 4:
      return ChangedWordOf<uint32_t>(scan, first, count);
    default:
      return ChangedWordOf<uint64_t>(scan, first, count);
  }
}

WEIGHTSYNC_HOST_DEVICE inline uint32_t PopCount(uint64_t word) {
  uint32_t count = 0;
  for (; word != 0; word &= word - 1) ++count;
  return count;
}

// Writes the changed elements of one word of 64.
WEIGHTSYNC_HOST_DEVICE inline void CompactWord(const CompactLaunch& launch,
                                               int64_t word) {
  const ScanLaunch& scan = launch.scan;
  constexpr int64_t kWords = kScanGroup / kScanWord;
  uint64_t changed = scan.changed[word];
  if (changed == 0) return;
  const int64_t group = word / kWords;
  int64_t to = launch.first[group];
  for (int64_t i = group * kWords; i < word; ++i)
    to += PopCount(scan.changed[i]);
  for (int bit = 0; bit < kScanWord; ++bit) {
    if (((changed >> bit) & 1u) == 0) continue;
    const int64_t element = word * kScanWord + bit;
    launch.indices[to] = static_cast<uint32_t>(element);
    for (int i = 0; i < scan.element_bytes; ++i) {
      launch.values[to * scan.element_bytes + i] =
          scan.after[element * scan.element_bytes + i];
    }
    ++to;
  }
}

}  // namespace cuda
}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CUDA_KERNEL_BODY_H_
