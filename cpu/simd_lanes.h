// Vectors of floats at the level the including file is compiled for, and the packing of keys.
//
// Everything here has internal linkage: each file that includes it gets its own copy, compiled with that file's flags,
// and the linker has nothing to share with code for older CPUs. Without AVX it falls back to 4-lane vectors of the
// baseline (any architecture). mul_add() rounds once where the level has FMA, twice at the baseline: results of one
// level are fixed, results of two levels may differ in last bits.
//
// Packed keys: groups of kLanes keys; group g holds [dim][kLanes] floats, keys past n_keys in the last group are zero.
// Conversion of bf16 is exact.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header writes "undefined" vectors as self-initialised ones and then warns of them where they are
// inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

// Keeps the arrays of a transposition in registers: without it GCC leaves its loops, and the arrays in memory.
#define FIRN_UNROLL _Pragma("GCC unroll 16")

namespace firn::cpu {
namespace {

#if defined(__AVX512F__)

constexpr int64_t kLanes = 16;
using Lanes = __m512;
inline Lanes lanes_set(float v) { return _mm512_set1_ps(v); }
inline Lanes lanes_load(const float* p) { return _mm512_loadu_ps(p); }
inline void lanes_store(float* p, Lanes v) { _mm512_storeu_ps(p, v); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// A NaN in `v` leaves `largest` as it is.
inline Lanes raise(Lanes largest, Lanes v) { return _mm512_max_ps(v, largest); }
// v in the first n lanes, `other` in the rest.
inline Lanes first_lanes(Lanes v, int64_t n, Lanes other) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << n) - 1u), other, v);
}
// 2^n for integral n in [-126, 127].
inline Lanes power_of_two(Lanes n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// 0 where x < limit, else v.
inline Lanes zero_below(Lanes x, Lanes limit, Lanes v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
inline Lanes lanes_load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

using Units = __m512i;  // kLanes 32-bit units
inline Units units_load(const void* p) { return _mm512_loadu_si512(p); }
inline void units_store(void* p, Units v) { _mm512_storeu_si512(p, v); }
inline Units low_bf16(Units v) { return _mm512_slli_epi32(v, 16); }
inline Units high_bf16(Units v) { return _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))); }

// Transposes kLanes x kLanes units in place.
inline void transpose_units(Units* r) {
  Units t[16];
  FIRN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  FIRN_UNROLL
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  FIRN_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  FIRN_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

#elif defined(__AVX2__)

constexpr int64_t kLanes = 8;
using Lanes = __m256;
inline Lanes lanes_set(float v) { return _mm256_set1_ps(v); }
inline Lanes lanes_load(const float* p) { return _mm256_loadu_ps(p); }
inline void lanes_store(float* p, Lanes v) { _mm256_storeu_ps(p, v); }
inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
inline Lanes raise(Lanes largest, Lanes v) { return _mm256_max_ps(v, largest); }
inline Lanes first_lanes(Lanes v, int64_t n, Lanes other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i in = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
}
inline Lanes power_of_two(Lanes n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes zero_below(Lanes x, Lanes limit, Lanes v) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), v);
}
inline Lanes lanes_load_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

using Units = __m256i;
inline Units units_load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void units_store(void* p, Units v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline Units low_bf16(Units v) { return _mm256_slli_epi32(v, 16); }
inline Units high_bf16(Units v) { return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))); }

inline void transpose_units(Units* r) {
  Units t[8];
  FIRN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  Units u[8];
  FIRN_UNROLL
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  FIRN_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

#else

constexpr int64_t kLanes = 4;
using Lanes = float __attribute__((vector_size(16)));
using Units = uint32_t __attribute__((vector_size(16)));
inline Lanes lanes_set(float v) { return Lanes{v, v, v, v}; }
inline Lanes lanes_load(const float* p) {
  Lanes v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void lanes_store(float* p, Lanes v) { __builtin_memcpy(p, &v, sizeof v); }
inline Lanes add(Lanes a, Lanes b) { return a + b; }
inline Lanes sub(Lanes a, Lanes b) { return a - b; }
inline Lanes mul(Lanes a, Lanes b) { return a * b; }
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) { return a * b + c; }
inline Lanes raise(Lanes largest, Lanes v) { return v > largest ? v : largest; }
inline Lanes first_lanes(Lanes v, int64_t n, Lanes other) {
  for (int64_t i = n; i < kLanes; ++i) v[i] = other[i];
  return v;
}
inline Lanes power_of_two(Lanes n) {
  using Ints = int32_t __attribute__((vector_size(16)));
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  Lanes v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}
inline Lanes zero_below(Lanes x, Lanes limit, Lanes v) { return x < limit ? lanes_set(0) : v; }
inline Lanes lanes_load_bf16(const uint16_t* p) {
  const Units bits = {uint32_t{p[0]} << 16, uint32_t{p[1]} << 16, uint32_t{p[2]} << 16, uint32_t{p[3]} << 16};
  Lanes v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}
inline Units units_load(const void* p) {
  Units v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void units_store(void* p, Units v) { __builtin_memcpy(p, &v, sizeof v); }
inline Units low_bf16(Units v) { return v << 16; }
inline Units high_bf16(Units v) { return v & 0xFFFF0000u; }
inline void transpose_units(Units* r) {
  for (int i = 0; i < 4; ++i) {
    for (int j = i + 1; j < 4; ++j) {
      const uint32_t a = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = a;
    }
  }
}

#endif

inline float load_float(const void* row, bool bf16, int64_t i) {
  float v;
  if (!bf16) {
    __builtin_memcpy(&v, static_cast<const char*>(row) + 4 * i, 4);
    return v;
  }
  uint16_t half;
  __builtin_memcpy(&half, static_cast<const char*>(row) + 2 * i, 2);
  const uint32_t bits = uint32_t{half} << 16;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

// The lanes combined in a fixed tree.
inline float sum_of(Lanes v) {
  float a[kLanes];
  lanes_store(a, v);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) a[i] += a[i + half];
  }
  return a[0];
}

inline float largest_of(Lanes v) {
  float a[kLanes];
  lanes_store(a, v);
  float m = a[0];
  for (int64_t i = 1; i < kLanes; ++i) m = a[i] > m ? a[i] : m;
  return m;
}

// Packs keys [n_keys, dim] (rows back to back).
inline void pack_keys_lanes(const void* keys, bool bf16, int64_t n_keys, int64_t dim, float* out) {
  const int64_t row_bytes = dim * (bf16 ? 2 : 4), unit_dims = bf16 ? 2 : 1;
  const char* base = static_cast<const char*>(keys);
  for (int64_t first = 0; first < n_keys; first += kLanes, out += dim * kLanes) {
    const char* rows = base + first * row_bytes;
    const int64_t n = n_keys - first < kLanes ? n_keys - first : kLanes;
    int64_t d = 0;
    if (n == kLanes) {
      for (; d + unit_dims * kLanes <= dim; d += unit_dims * kLanes) {
        Units u[kLanes];
        FIRN_UNROLL
        for (int64_t i = 0; i < kLanes; ++i) u[i] = units_load(rows + i * row_bytes + d * (bf16 ? 2 : 4));
        // The same piece of the keys two groups on: rows are too far apart for the hardware to see a stream.
        FIRN_UNROLL
        for (int64_t i = 0; i < kLanes; ++i) {
          __builtin_prefetch(rows + (2 * kLanes + i) * row_bytes + d * (bf16 ? 2 : 4));
        }
        transpose_units(u);
        float* to = out + d * kLanes;
        if (bf16) {
          FIRN_UNROLL
          for (int64_t i = 0; i < kLanes; ++i) {
            units_store(to + 2 * i * kLanes, low_bf16(u[i]));
            units_store(to + (2 * i + 1) * kLanes, high_bf16(u[i]));
          }
        } else {
          FIRN_UNROLL
          for (int64_t i = 0; i < kLanes; ++i) units_store(to + i * kLanes, u[i]);
        }
      }
    }
    for (int64_t i = 0; i < kLanes; ++i) {
      for (int64_t j = d; j < dim; ++j) {
        out[j * kLanes + i] = i < n ? load_float(rows + i * row_bytes, bf16, j) : 0.0f;
      }
    }
  }
}

// c[q][x * kLanes + lane] = sum over i ascending of a[q][i] * b[x * vector_step + i * row_step + lane], one chain of
// mul_add an element: the result does not depend on how queries and vectors are tiled.
template <int kQ, int kX>
inline void multiply_tile(const float* const* a, int64_t n, const float* b, int64_t vector_step, int64_t row_step,
                          float* const* c, int64_t c_offset) {
  Lanes sum[kQ][kX];
  for (int q = 0; q < kQ; ++q) {
    for (int x = 0; x < kX; ++x) sum[q][x] = lanes_set(0);
  }
  for (int64_t i = 0; i < n; ++i) {
    Lanes v[kX];
    for (int x = 0; x < kX; ++x) v[x] = lanes_load(b + x * vector_step + i * row_step);
    for (int q = 0; q < kQ; ++q) {
      const Lanes w = lanes_set(a[q][i]);
      for (int x = 0; x < kX; ++x) sum[q][x] = mul_add(w, v[x], sum[q][x]);
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int x = 0; x < kX; ++x) lanes_store(c[q] + c_offset + x * kLanes, sum[q][x]);
  }
}

constexpr int kTileQ = 4;
#if defined(__AVX512F__)
constexpr int kTileX = 4;
#else
constexpr int kTileX = 2;
#endif

template <int kQ>
inline void multiply_rows(const float* const* a, int64_t n, const float* b, int64_t vectors, int64_t vector_step,
                          int64_t row_step, float* const* c) {
  int64_t x = 0;
  for (; x + kTileX <= vectors; x += kTileX) {
    multiply_tile<kQ, kTileX>(a, n, b + x * vector_step, vector_step, row_step, c, x * kLanes);
  }
  for (; x < vectors; ++x) multiply_tile<kQ, 1>(a, n, b + x * vector_step, vector_step, row_step, c, x * kLanes);
}

inline void multiply(const float* const* a, int64_t n_queries, int64_t n, const float* b, int64_t vectors,
                     int64_t vector_step, int64_t row_step, float* const* c) {
  int64_t q = 0;
  for (; q + kTileQ <= n_queries; q += kTileQ) {
    multiply_rows<kTileQ>(a + q, n, b, vectors, vector_step, row_step, c + q);
  }
  for (; q < n_queries; ++q) multiply_rows<1>(a + q, n, b, vectors, vector_step, row_step, c + q);
}

}  // namespace
}  // namespace firn::cpu
