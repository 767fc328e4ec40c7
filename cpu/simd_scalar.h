// Sixteen fp32 lanes without any instruction set beyond the baseline; see simd_avx512.h for the vocabulary.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace firn::cpu {
namespace {

inline constexpr int64_t kLanes = 16;

struct F16 {
  float lane[kLanes];
};

inline float bits_to_float(uint32_t bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

inline uint32_t float_to_bits(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}

inline F16 broadcast(float v) {
  F16 r;
  for (float& lane : r.lane) lane = v;
  return r;
}
inline F16 zero16() { return broadcast(0.0f); }

inline F16 load(const float* p) {
  F16 r;
  __builtin_memcpy(r.lane, p, sizeof r.lane);
  return r;
}
inline F16 load(const uint16_t* p) {
  uint16_t raw[kLanes];
  __builtin_memcpy(raw, p, sizeof raw);
  F16 r;
  for (int i = 0; i < kLanes; ++i) r.lane[i] = bits_to_float(static_cast<uint32_t>(raw[i]) << 16);
  return r;
}
inline F16 load_first(const float* p, int64_t n) {
  F16 r = zero16();
  __builtin_memcpy(r.lane, p, static_cast<size_t>(n) * 4);
  return r;
}
inline F16 load_first(const uint16_t* p, int64_t n) {
  uint16_t raw[kLanes] = {};
  __builtin_memcpy(raw, p, static_cast<size_t>(n) * 2);
  return load(raw);
}

inline uint16_t round_bf16(float v) {
  const uint32_t u = float_to_bits(v);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

inline void store(float* p, F16 v) { __builtin_memcpy(p, v.lane, sizeof v.lane); }
inline void store_first(float* p, F16 v, int64_t n) { __builtin_memcpy(p, v.lane, static_cast<size_t>(n) * 4); }
inline void store_first(uint16_t* p, F16 v, int64_t n) {
  uint16_t raw[kLanes];
  for (int i = 0; i < kLanes; ++i) raw[i] = round_bf16(v.lane[i]);
  __builtin_memcpy(p, raw, static_cast<size_t>(n) * 2);
}
inline void store(uint16_t* p, F16 v) { store_first(p, v, kLanes); }

inline F16 add(F16 a, F16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline F16 sub(F16 a, F16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] -= b.lane[i];
  return a;
}
inline F16 mul(F16 a, F16 b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
  return a;
}
// a * b + c, here with two roundings: a fused one would be a call into the C library.
inline F16 mul_add(F16 a, F16 b, F16 c) { return add(mul(a, b), c); }

inline float sum_lanes(F16 v) {
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) v.lane[i] += v.lane[i + width];
  }
  return v.lane[0];
}

}  // namespace
}  // namespace firn::cpu
