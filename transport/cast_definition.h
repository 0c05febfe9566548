// What a cast on the way does to one element, in a form that a GPU kernel can
// include: the same bits on every machine, CPU or GPU.
//
// Rounding is to the nearest, ties to even. bf16 and fp16 keep infinities and
// NaN, and overflow to infinity. E4M3 (the "fn" kind: no infinities) saturates
// at 448, as engines' own conversions do; NaN stays NaN.
#ifndef WEIGHTSYNC_TRANSPORT_CAST_DEFINITION_H_
#define WEIGHTSYNC_TRANSPORT_CAST_DEFINITION_H_

#include <cstdint>
#include <cstring>

#include "transport/digest_definition.h"  // WEIGHTSYNC_HOST_DEVICE

namespace weightsync {
namespace transport {

constexpr int64_t kScaleBlock = 128;
constexpr float kLargestE4M3 = 448.0f;

WEIGHTSYNC_HOST_DEVICE inline uint32_t FloatBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

WEIGHTSYNC_HOST_DEVICE inline float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

WEIGHTSYNC_HOST_DEVICE inline float BF16ToFloat(uint16_t bits) {
  return FloatOfBits(static_cast<uint32_t>(bits) << 16);
}

WEIGHTSYNC_HOST_DEVICE inline uint16_t FloatToBF16(uint32_t bits) {
  // NaN: quiet, and not rounded to infinity.
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

WEIGHTSYNC_HOST_DEVICE inline uint16_t FloatToF16(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  // 65520 and more round to infinity.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Below the normal numbers: units of 2^-24.
    if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - (magnitude >> 23);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rounded =
        (mantissa + half - 1 + ((mantissa >> shift) & 1u)) >> shift;
    return static_cast<uint16_t>(sign | rounded);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

WEIGHTSYNC_HOST_DEVICE inline uint8_t FloatToE4M3(uint32_t bits) {
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  // 448 is 0x43e00000; what would round above it saturates too.
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  if (magnitude < 0x3c800000u) {
    // Below 2^-6: units of 2^-9.
    if (magnitude < 0x3a800000u) return static_cast<uint8_t>(sign);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 141 - (magnitude >> 23);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rounded =
        (mantissa + half - 1 + ((mantissa >> shift) & 1u)) >> shift;
    return static_cast<uint8_t>(sign | rounded);
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

// The scale of a block whose largest magnitude has these bits. A block with a
// NaN has one NaN: arithmetic makes another of it on a GPU than on a CPU.
WEIGHTSYNC_HOST_DEVICE inline float BlockScale(uint32_t largest_bits) {
  if (largest_bits > 0x7f800000u) return FloatOfBits(0x7fc00000u);
  return FloatOfBits(largest_bits) / kLargestE4M3;
}

// A block of zeros has the scale zero, and zeros. The sign is the value's, also
// of a NaN that the division makes.
WEIGHTSYNC_HOST_DEVICE inline uint8_t BF16ToE4M3(uint16_t value, float scale) {
  const uint32_t sign = (value >> 8) & 0x80u;
  if (scale == 0.0f) return static_cast<uint8_t>(sign);
  return static_cast<uint8_t>(
      sign | (FloatToE4M3(FloatBits(BF16ToFloat(value) / scale)) & 0x7fu));
}

}  // namespace transport
}  // namespace weightsync

#endif  // WEIGHTSYNC_TRANSPORT_CAST_DEFINITION_H_
