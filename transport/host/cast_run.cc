#include "transport/host/cast_run.h"

#include <algorithm>
#include <cstring>

#include "transport/cast_definition.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define WEIGHTSYNC_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace weightsync {
namespace transport {
namespace {

template <typename T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Elements of one block: they have one scale.
void E4M3Scalar(uint8_t* dst, const char* src, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i)
    dst[i] = BF16ToE4M3(Load<uint16_t>(src + 2 * i), scale);
}

void BF16Scalar(char* dst, const char* src, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = FloatToBF16(Load<uint32_t>(src + 4 * i));
    std::memcpy(dst + 2 * i, &value, sizeof(value));
  }
}

void F16Scalar(char* dst, const char* src, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = FloatToF16(Load<uint32_t>(src + 4 * i));
    std::memcpy(dst + 2 * i, &value, sizeof(value));
  }
}

// The largest magnitude, as bits of bf16.
uint16_t LargestScalar(const char* src, int64_t stride, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest =
        std::max<uint16_t>(largest, Load<uint16_t>(src + i * stride) & 0x7fffu);
  }
  return largest;
}

// For each stretch of a run that has one scale: fn(offset, count, scale).
template <typename Fn>
void ForBlocks(const CopyBlocks& blocks, int64_t count, int64_t element,
               Fn fn) {
  const int64_t stride = blocks.block_columns();
  int64_t row = element / blocks.matrix_columns;
  int64_t column = element - row * blocks.matrix_columns;
  for (int64_t at = 0; at < count;) {
    const int64_t part = std::min({count - at, blocks.matrix_columns - column,
                                   kScaleBlock - column % kScaleBlock});
    fn(at, part,
       blocks.scales[(row - blocks.first_row) / kScaleBlock * stride +
                     (column - blocks.first_column) / kScaleBlock]);
    at += part;
    column += part;
    if (column == blocks.matrix_columns) {
      column = 0;
      ++row;
    }
  }
}

#if defined(__x86_64__)

// As FloatToBF16, in the low halves.
WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) __m256i BF16Lanes(
    __m256i bits) {
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))),
      16);
  const __m256i nan =
      _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)),
                         _mm256_set1_epi32(0x7f800000));
  return _mm256_blendv_epi8(
      rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}

WEIGHTSYNC_AVX2 void BF16Avx2(char* dst, const char* src, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i a = BF16Lanes(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 4 * i)));
    const __m256i b = BF16Lanes(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 4 * i + 32)));
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(dst + 2 * i),
        _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
  }
  BF16Scalar(dst + 2 * i, src + 4 * i, count - i);
}

WEIGHTSYNC_AVX2 void F16Avx2(char* dst, const char* src, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 value =
        _mm256_loadu_ps(reinterpret_cast<const float*>(src + 4 * i));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(dst + 2 * i),
        _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  F16Scalar(dst + 2 * i, src + 4 * i, count - i);
}

// As BF16ToE4M3 of eight values, in the low bytes. `scale` is not zero.
WEIGHTSYNC_AVX2 inline __attribute__((always_inline)) __m256i E4M3Lanes(
    __m128i bf16, __m256 scale) {
  const __m256i value = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16);
  const __m256i magnitude = _mm256_and_si256(
      _mm256_castps_si256(_mm256_div_ps(_mm256_castsi256_ps(value), scale)),
      _mm256_set1_epi32(0x7fffffff));
  // Above 2^-6: the exponent is made smaller, and bits are rounded away.
  const __m256i odd =
      _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i normal = _mm256_srli_epi32(
      _mm256_sub_epi32(
          _mm256_add_epi32(magnitude,
                           _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff))),
          _mm256_set1_epi32(0x3c000000)),
      20);
  // Below: 2^14 has units of 2^-9, to which the sum is rounded.
  const __m256 unit = _mm256_set1_ps(16384.0f);
  const __m256i small = _mm256_sub_epi32(
      _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), unit)),
      _mm256_castps_si256(unit));
  __m256i result = _mm256_blendv_epi8(
      normal, small,
      _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude));
  result = _mm256_blendv_epi8(
      result, _mm256_set1_epi32(0x7e),
      _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43dfffff)));
  result = _mm256_blendv_epi8(
      result, _mm256_set1_epi32(0x7f),
      _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
  const __m256i sign =
      _mm256_and_si256(_mm256_srli_epi32(value, 24), _mm256_set1_epi32(0x80));
  return _mm256_or_si256(result, sign);
}

WEIGHTSYNC_AVX2 void E4M3Avx2(uint8_t* dst, const char* src, int64_t count,
                              float scale) {
  int64_t i = 0;
  if (scale != 0.0f) {
    const __m256 divisor = _mm256_set1_ps(scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (; i + 32 <= count; i += 32) {
      const __m128i* from = reinterpret_cast<const __m128i*>(src + 2 * i);
      const __m256i ab =
          _mm256_packus_epi32(E4M3Lanes(_mm_loadu_si128(from), divisor),
                              E4M3Lanes(_mm_loadu_si128(from + 1), divisor));
      const __m256i cd =
          _mm256_packus_epi32(E4M3Lanes(_mm_loadu_si128(from + 2), divisor),
                              E4M3Lanes(_mm_loadu_si128(from + 3), divisor));
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(dst + i),
          _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
    }
  }
  E4M3Scalar(dst + i, src + 2 * i, count - i, scale);
}

WEIGHTSYNC_AVX2 uint16_t LargestAvx2(const char* src, int64_t count) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i largest = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    largest = _mm256_max_epu16(
        largest,
        _mm256_and_si256(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 2 * i)),
            mask));
  }
  alignas(32) uint16_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
  return std::max(*std::max_element(lanes, lanes + 16),
                  LargestScalar(src + 2 * i, 2, count - i));
}

bool HasF16Avx2() {
  return __builtin_cpu_supports("avx2") != 0 &&
         __builtin_cpu_supports("f16c") != 0;
}

#endif

}  // namespace

namespace cast_internal {

void CastRunScalar(CopyCast cast, const CopyBlocks& blocks, void* dst,
                   const void* src, int64_t count, int64_t element) {
  char* const to = static_cast<char*>(dst);
  const char* const from = static_cast<const char*>(src);
  if (cast == CopyCast::kF32ToBF16) {
    BF16Scalar(to, from, count);
  } else if (cast == CopyCast::kF32ToF16) {
    F16Scalar(to, from, count);
  } else {
    ForBlocks(blocks, count, element,
              [&](int64_t at, int64_t part, float scale) {
                E4M3Scalar(static_cast<uint8_t*>(dst) + at, from + 2 * at, part,
                           scale);
              });
  }
}

}  // namespace cast_internal

void CastRun(CopyCast cast, const CopyBlocks& blocks, void* dst,
             const void* src, int64_t count, int64_t element) {
#if defined(__x86_64__)
  static const bool avx2 = HasF16Avx2();
  if (avx2) {
    char* const to = static_cast<char*>(dst);
    const char* const from = static_cast<const char*>(src);
    if (cast == CopyCast::kF32ToBF16) {
      BF16Avx2(to, from, count);
    } else if (cast == CopyCast::kF32ToF16) {
      F16Avx2(to, from, count);
    } else {
      ForBlocks(blocks, count, element,
                [&](int64_t at, int64_t part, float scale) {
                  E4M3Avx2(static_cast<uint8_t*>(dst) + at, from + 2 * at, part,
                           scale);
                });
    }
    return;
  }
#endif
  cast_internal::CastRunScalar(cast, blocks, dst, src, count, element);
}

void ScalesOfBlockRow(const CopyBlocks& blocks, int64_t block_row,
                      float* scales) {
  const int64_t first = block_row * kScaleBlock;
  const int64_t last = std::min(blocks.rows, first + kScaleBlock);
  const int64_t count = blocks.block_columns();
  // A few rows of one block after another would be what a cache likes least: a
  // row is read to its end. Magnitudes are in the order of their bits.
  std::fill_n(scales, count, 0.0f);
  for (int64_t row = first; row < last; ++row) {
    const char* const src = blocks.src + row * blocks.row_stride;
    for (int64_t block = 0; block < count; ++block) {
      const int64_t column = block * kScaleBlock;
      const int64_t columns = std::min(kScaleBlock, blocks.columns - column);
      const char* const from = src + column * blocks.column_stride;
      uint16_t largest;
#if defined(__x86_64__)
      static const bool avx2 = HasF16Avx2();
      if (avx2 && blocks.column_stride == 2) {
        largest = LargestAvx2(from, columns);
      } else {
        largest = LargestScalar(from, blocks.column_stride, columns);
      }
#else
      largest = LargestScalar(from, blocks.column_stride, columns);
#endif
      const uint32_t bits = static_cast<uint32_t>(largest) << 16;
      if (bits > FloatBits(scales[block])) scales[block] = FloatOfBits(bits);
    }
  }
  for (int64_t block = 0; block < count; ++block)
    scales[block] = BlockScale(FloatBits(scales[block]));
}

}  // namespace transport
}  // namespace weightsync
