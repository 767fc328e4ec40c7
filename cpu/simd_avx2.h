// Sixteen fp32 lanes as two AVX2 registers; see simd_avx512.h for the vocabulary.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace firn::cpu {
namespace {

inline constexpr int64_t kLanes = 16;

struct F16 {
  __m256 low, high;
};

inline F16 broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline F16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

inline __m256 widen_bf16(__m128i raw) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16)); }

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F16 load_first(const float* p, int64_t n) {
  float raw[kLanes] = {};
  __builtin_memcpy(raw, p, static_cast<size_t>(n) * 4);
  return load(raw);
}
inline F16 load_first(const uint16_t* p, int64_t n) {
  uint16_t raw[kLanes] = {};
  __builtin_memcpy(raw, p, static_cast<size_t>(n) * 2);
  return load(raw);
}

// Rounds eight lanes to nearest even; the results stand in the low halves of the 32-bit lanes. NaN stays NaN.
inline __m256i round_bf16(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

inline void store(float* p, F16 v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
inline void store(uint16_t* p, F16 v) {
  // packus works inside the two 128-bit halves; the permutation puts the quarters back in order.
  const __m256i packed = _mm256_packus_epi32(round_bf16(v.low), round_bf16(v.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
inline void store_first(float* p, F16 v, int64_t n) {
  float raw[kLanes];
  store(raw, v);
  __builtin_memcpy(p, raw, static_cast<size_t>(n) * 4);
}
inline void store_first(uint16_t* p, F16 v, int64_t n) {
  uint16_t raw[kLanes];
  store(raw, v);
  __builtin_memcpy(p, raw, static_cast<size_t>(n) * 2);
}

inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 mul_add(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline float sum_lanes(F16 v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace
}  // namespace firn::cpu
