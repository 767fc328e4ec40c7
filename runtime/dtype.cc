// Element types: names, sizes and the conversions that are not one shift. Integer arithmetic on the bits, so that the
// rounding is the one written here and not the processor's current mode.
#include "runtime/dtype.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace firn {
namespace {

constexpr std::array<std::pair<const char*, size_t>, 13> kTypes = {{
    {"F32", 4},
    {"BF16", 2},
    {"F16", 2},
    {"F8_E4M3", 1},
    {"F8_E8M0", 1},
    {"U8", 1},
    {"I8", 1},
    {"I32", 4},
    {"I64", 8},
    {"F64", 8},
    {"I16", 2},
    {"BOOL", 1},
    {"F8_E5M2", 1},
}};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

size_t dtype_bytes(DType dtype) { return kTypes[static_cast<size_t>(dtype)].second; }
const char* dtype_name(DType dtype) { return kTypes[static_cast<size_t>(dtype)].first; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (name == kTypes[i].first) return static_cast<DType>(i);
  }
  return std::nullopt;
}

float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-9f, std::bit_cast<float>(sign));
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

float e8m0_to_float(uint8_t code) {
  if (code == 255) return kNan;
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

float e2m1_to_float(uint8_t code) {
  constexpr std::array<float, 8> kValues = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float v = kValues[code & 7];
  return (code & 8) != 0 ? -v : v;
}

float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) return std::copysign(static_cast<float>(mantissa) * 0x1p-24f, std::bit_cast<float>(sign));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint8_t float_to_e4m3(float v) {
  uint32_t u = std::bit_cast<uint32_t>(v);
  const auto sign = static_cast<uint8_t>((u >> 24) & 0x80);
  u &= 0x7FFFFFFFu;
  if (u > 0x7F800000u) return sign | 0x7F;
  const float a = std::bit_cast<float>(u);
  if (a >= 448.0f) return sign | 0x7E;
  if (a < 0x1p-6f) {
    // Subnormal: a multiple of 2^-9. The product is exact; fraction and ties are settled in integers.
    const float scaled = a * 512.0f;
    auto code = static_cast<uint32_t>(scaled);
    const float rest = scaled - static_cast<float>(code);
    if (rest > 0.5f || (rest == 0.5f && (code & 1) != 0)) ++code;
    return sign | static_cast<uint8_t>(code);
  }
  u += 0x7FFFFu + ((u >> 20) & 1u);  // keep three mantissa bits
  return sign | static_cast<uint8_t>((u >> 20) - (120u << 3));
}

// NaN has no code here; it becomes the largest magnitude, which shows, rather than zero, which hides.
uint8_t float_to_e2m1(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  const auto sign = static_cast<uint8_t>((u >> 28) & 8);
  const float a = std::bit_cast<float>(u & 0x7FFFFFFFu);
  if (std::isnan(v)) return sign | 7;
  // The limits are the midpoints; >= where the even code is the upper one.
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return sign | static_cast<uint8_t>(code);
}

}  // namespace firn
