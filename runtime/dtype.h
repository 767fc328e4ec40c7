// Element types and their exact conversions.
//
// Sources: bf16 is the upper half of an IEEE binary32; E4M3 is the "fn" variant (bias 7, no infinity, 0x7F/0xFF NaN,
// max 448); E8M0 is 2^(byte-127) with 255 = NaN; E2M1 is sign + {0, .5, 1, 1.5, 2, 3, 4, 6} (OCP MX specification).
// All functions here are pure and need no particular CPU.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace firn {

enum class DType : uint8_t { kF32, kBf16, kF16, kF8E4m3, kF8E8m0, kU8, kI8, kI32, kI64, kF64, kI16, kBool, kF8E5m2 };

// Bytes of one element. Packed 4-bit formats are carried as kU8, two elements a byte.
size_t dtype_bytes(DType dtype);
// The safetensors spelling: "F32", "BF16", "F8_E4M3", ...
const char* dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);

// Storage-only 16-bit type; arithmetic happens in float.
struct Bf16 {
  uint16_t bits = 0;
  friend bool operator==(Bf16, Bf16) = default;
};

inline float to_float(Bf16 v) { return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

// Round to nearest, ties to even; NaN stays NaN (quiet).
inline Bf16 to_bf16(float v) {
  uint32_t u = std::bit_cast<uint32_t>(v);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  u += 0x7FFFu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>(u >> 16)};
}

inline float round_to_bf16(float v) { return to_float(to_bf16(v)); }

float e4m3_to_float(uint8_t code);  // exact; NaN for 0x7F and 0xFF
float e8m0_to_float(uint8_t code);  // exact, 0 gives the subnormal 2^-127; NaN for 255
float e2m1_to_float(uint8_t code);  // low four bits
float f16_to_float(uint16_t bits);  // exact
uint8_t float_to_e4m3(float v);     // nearest even, saturating at 448; NaN gives 0x7F with the sign
uint8_t float_to_e2m1(float v);     // nearest even, saturating at 6; returns 0..15

}  // namespace firn
