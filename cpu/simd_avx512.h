// Sixteen fp32 lanes as one AVX-512 register: the vocabulary that simd_avx2.h and simd_scalar.h spell in their own way.
//
// Contract: include exactly one simd_*.h, and only from a source file compiled for that instruction set: everything is
// in an anonymous namespace, so that no code compiled for a newer CPU can be linked into code for an older one.
//   F16                          sixteen lanes
//   load, store                  f32, or bf16 held as uint16_t (rounded to nearest even, NaN kept); unaligned
//   load_first, store_first      the first n < 16 only; the other lanes load as zero
//   mul_add(a, b, c)             a * b + c, fused where the CPU has it
//   sum_lanes                    lanes added as a fixed tree: i and i + 8, then + 4, + 2, + 1
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers of its own AVX-512 headers for mistakes of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace firn::cpu {
namespace {

inline constexpr int64_t kLanes = 16;

struct F16 {
  __m512 v;
};

inline F16 broadcast(float v) { return {_mm512_set1_ps(v)}; }
inline F16 zero16() { return {_mm512_setzero_ps()}; }
inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F16 widen_bf16(__m256i raw) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))}; }

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline F16 load_first(const uint16_t* p, int64_t n) { return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

inline __m256i round_bf16(F16 f) {
  const __m512i u = _mm512_castps_si512(f.v);
  const __m512i top = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(f.v, f.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, top, _mm512_set1_epi32(0x40)));
}

inline void store(float* p, F16 v) { _mm512_storeu_ps(p, v.v); }
inline void store(uint16_t* p, F16 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(v)); }
inline void store_first(float* p, F16 v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v.v); }
inline void store_first(uint16_t* p, F16 v, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), round_bf16(v)); }

inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 mul_add(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline float sum_lanes(F16 v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace
}  // namespace firn::cpu
