// Kernels of the low-bit copy for AVX2: eight keys a register, products in pairs to 16 bits.
#include "cpu/index_copy.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace firn::cpu {
namespace {

inline __m256 widen(const char* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m256i broadcast4(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}

// Eight keys (half a group) for kQ queries. A pair of products is at most 2 * 15 * 127; eight of them fit 16 bits.
template <int kQ>
inline void half_group(const CopyScanArgs& p, int64_t first, const char* group, int64_t half, float* upper,
                       int64_t n_keys, __m256* largest, __m256* largest_upper) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const int8_t* x = p.x + first * 8 * p.chunks;
  __m256i sum[kQ];
  for (int i = 0; i < kQ; ++i) sum[i] = _mm256_setzero_si256();
  for (int64_t begin = 0; begin < p.chunks; begin += 4) {
    const int64_t end = begin + 4 < p.chunks ? begin + 4 : p.chunks;
    __m256i pairs[kQ];
    for (int i = 0; i < kQ; ++i) pairs[i] = _mm256_setzero_si256();
    for (int64_t c = begin; c < end; ++c) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + c * 64 + half * 32));
      const __m256i low = _mm256_and_si256(bytes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
      for (int i = 0; i < kQ; ++i) {
        const int8_t* w = x + (i * p.chunks + c) * 8;
        pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(low, broadcast4(w)));
        pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(high, broadcast4(w + 4)));
      }
    }
    for (int i = 0; i < kQ; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(pairs[i], ones));
  }
  const char* meta = group + p.chunks * 64 + half * 16;
  const __m256 scale = widen(meta), rest = widen(meta + 32);
  for (int i = 0; i < kQ; ++i) {
    const __m256i twice = _mm256_sub_epi32(_mm256_slli_epi32(sum[i], 1), _mm256_set1_epi32(p.sum15[first + i]));
    const __m256 approximate =
        _mm256_mul_ps(_mm256_mul_ps(scale, _mm256_set1_ps(p.c[first + i])), _mm256_cvtepi32_ps(twice));
    const __m256 width = _mm256_fmadd_ps(_mm256_set1_ps(p.a[first + i]), rest, _mm256_set1_ps(p.b[first + i]));
    const __m256 end = _mm256_add_ps(approximate, width);
    _mm256_storeu_ps(upper + (first + i) * n_keys + half * 8, end);
    largest[i] = _mm256_max_ps(approximate, largest[i]);
    largest_upper[i] = _mm256_max_ps(end, largest_upper[i]);
  }
}

inline float largest_of(__m256 v) {
  float a[8];
  _mm256_storeu_ps(a, v);
  float m = a[0];
  for (int i = 1; i < 8; ++i) m = a[i] > m ? a[i] : m;
  return m;
}

template <int kQ>
void scan_queries(const CopyScanArgs& p, int64_t first) {
  const int64_t group_bytes = (p.chunks + 1) * 64, n_keys = p.n_groups * kCopyGroup;
  __m256 largest[kQ], largest_upper[kQ];
  for (int i = 0; i < kQ; ++i) largest[i] = largest_upper[i] = _mm256_set1_ps(-__builtin_inff());
  for (int64_t g = 0; g < p.n_groups; ++g) {
    if (p.ahead != nullptr && first == 0) {
      const char* ahead = static_cast<const char*>(p.ahead) + g * group_bytes;
      for (int64_t at = 0; at < group_bytes; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T0);
    }
    const char* group = static_cast<const char*>(p.copy) + g * group_bytes;
    for (int64_t half = 0; half < 2; ++half) {
      half_group<kQ>(p, first, group, half, p.upper + g * kCopyGroup, n_keys, largest, largest_upper);
    }
  }
  for (int i = 0; i < kQ; ++i) {
    p.largest[first + i] = largest_of(largest[i]);
    p.largest_upper[first + i] = largest_of(largest_upper[i]);
  }
}

void scan(const CopyScanArgs& p) {
  int64_t i = 0;
  for (; i + 4 <= p.n_queries; i += 4) scan_queries<4>(p, i);
  for (; i < p.n_queries; ++i) scan_queries<1>(p, i);
}

int64_t collect(const float* upper, int64_t n, float threshold, uint32_t first, uint32_t* keys, float* uppers) {
  const __m256 limit = _mm256_set1_ps(threshold);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 8) {
    auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(upper + i), limit, _CMP_GE_OQ)));
    for (; mask != 0; mask &= mask - 1) {
      const int64_t at = i + __builtin_ctz(mask);
      keys[found] = first + static_cast<uint32_t>(at);
      uppers[found++] = upper[at];
    }
  }
  return found;
}

}  // namespace

const IndexCopyKernels kIndexCopyAvx2 = {scan, collect};

}  // namespace firn::cpu
