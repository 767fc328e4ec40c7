// Kernels of the low-bit copy for AVX-512, with and without VNNI: a group of 16 keys is one register of sums.
#include "cpu/index_copy.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace firn::cpu {
namespace {

inline __m512 widen(const char* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512i broadcast4(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// Always inlined: GCC 12 judges a function that only prefetches free of effects and drops its calls.
__attribute__((always_inline)) inline void prefetch(const void* base, int64_t at, int64_t bytes) {
  if (base == nullptr) return;
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(base) + at + i, _MM_HINT_T1);
}

// Upper ends of one group and its part of the maxima.
inline void finish(const CopyScanArgs& p, int64_t query, const char* meta, __m512i sum, float* upper, __m512* largest,
                   __m512* largest_upper) {
  const __m512i twice = _mm512_sub_epi32(_mm512_slli_epi32(sum, 1), _mm512_set1_epi32(p.sum15[query]));
  const __m512 approximate =
      _mm512_mul_ps(_mm512_mul_ps(widen(meta), _mm512_set1_ps(p.c[query])), _mm512_cvtepi32_ps(twice));
  const __m512 width = _mm512_fmadd_ps(_mm512_set1_ps(p.a[query]), widen(meta + 32), _mm512_set1_ps(p.b[query]));
  const __m512 end = _mm512_add_ps(approximate, width);
  _mm512_storeu_ps(upper, end);
  *largest = _mm512_max_ps(approximate, *largest);  // a NaN in the first operand leaves the second
  *largest_upper = _mm512_max_ps(end, *largest_upper);
}

inline float largest_of(__m512 v) { return _mm512_reduce_max_ps(v); }

// A pair of products is at most 2 * 15 * 127; eight of them fit 16 bits.
template <int kQ>
inline void sums_in_pairs(const CopyScanArgs& p, const int8_t* x, const char* group, __m512i* sum) {
  const __m512i nibble = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
  for (int i = 0; i < kQ; ++i) sum[i] = _mm512_setzero_si512();
  for (int64_t begin = 0; begin < p.chunks; begin += 4) {
    const int64_t end = begin + 4 < p.chunks ? begin + 4 : p.chunks;
    __m512i pairs[kQ];
    for (int i = 0; i < kQ; ++i) pairs[i] = _mm512_setzero_si512();
    for (int64_t c = begin; c < end; ++c) {
      const __m512i bytes = _mm512_loadu_si512(group + c * 64);
      const __m512i low = _mm512_and_si512(bytes, nibble), high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
      for (int i = 0; i < kQ; ++i) {
        const int8_t* w = x + (i * p.chunks + c) * 8;
        pairs[i] = _mm512_add_epi16(pairs[i], _mm512_maddubs_epi16(low, broadcast4(w)));
        pairs[i] = _mm512_add_epi16(pairs[i], _mm512_maddubs_epi16(high, broadcast4(w + 4)));
      }
    }
    for (int i = 0; i < kQ; ++i) sum[i] = _mm512_add_epi32(sum[i], _mm512_madd_epi16(pairs[i], ones));
  }
}

template <int kQ>
void scan_queries(const CopyScanArgs& p, int64_t first) {
  const int64_t group_bytes = (p.chunks + 1) * 64, n_keys = p.n_groups * kCopyGroup;
  __m512 largest[kQ], largest_upper[kQ];
  for (int i = 0; i < kQ; ++i) largest[i] = largest_upper[i] = _mm512_set1_ps(-__builtin_inff());
  for (int64_t g = 0; g < p.n_groups; ++g) {
    if (first == 0) prefetch(p.ahead, g * group_bytes, group_bytes);
    const char* group = static_cast<const char*>(p.copy) + g * group_bytes;
    __m512i sum[kQ];
    sums_in_pairs<kQ>(p, p.x + first * 8 * p.chunks, group, sum);
    for (int i = 0; i < kQ; ++i) {
      finish(p, first + i, group + p.chunks * 64, sum[i], p.upper + (first + i) * n_keys + g * kCopyGroup, &largest[i],
             &largest_upper[i]);
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

// The file's flags stop short of VNNI, so whatever uses it names it.
#define FIRN_VNNI __attribute__((target("avx512vnni")))

// Two groups at a time, low and high halves of the bytes in sums of their own: enough chains to hide the latency.
template <int kQ, int kG>
FIRN_VNNI inline void vnni_groups(const CopyScanArgs& p, int64_t first, int64_t g, __m512* largest,
                                  __m512* largest_upper) {
  const int64_t group_bytes = (p.chunks + 1) * 64, n_keys = p.n_groups * kCopyGroup;
  const char* group = static_cast<const char*>(p.copy) + g * group_bytes;
  const __m512i nibble = _mm512_set1_epi8(15);
  const int8_t* x = p.x + first * 8 * p.chunks;
  __m512i low_sum[kG][kQ], high_sum[kG][kQ];
  for (int y = 0; y < kG; ++y) {
    for (int i = 0; i < kQ; ++i) low_sum[y][i] = high_sum[y][i] = _mm512_setzero_si512();
  }
  for (int64_t c = 0; c < p.chunks; ++c) {
    __m512i low[kG], high[kG];
    for (int y = 0; y < kG; ++y) {
      const __m512i bytes = _mm512_loadu_si512(group + y * group_bytes + c * 64);
      low[y] = _mm512_and_si512(bytes, nibble);
      high[y] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
    }
    for (int i = 0; i < kQ; ++i) {
      const int8_t* w = x + (i * p.chunks + c) * 8;
      const __m512i w_low = broadcast4(w), w_high = broadcast4(w + 4);
      for (int y = 0; y < kG; ++y) {
        low_sum[y][i] = _mm512_dpbusd_epi32(low_sum[y][i], low[y], w_low);
        high_sum[y][i] = _mm512_dpbusd_epi32(high_sum[y][i], high[y], w_high);
      }
    }
  }
  for (int y = 0; y < kG; ++y) {
    for (int i = 0; i < kQ; ++i) {
      finish(p, first + i, group + y * group_bytes + p.chunks * 64, _mm512_add_epi32(low_sum[y][i], high_sum[y][i]),
             p.upper + (first + i) * n_keys + (g + y) * kCopyGroup, &largest[i], &largest_upper[i]);
    }
  }
}

template <int kQ>
FIRN_VNNI void vnni_queries(const CopyScanArgs& p, int64_t first) {
  const int64_t group_bytes = (p.chunks + 1) * 64;
  __m512 largest[kQ], largest_upper[kQ];
  for (int i = 0; i < kQ; ++i) largest[i] = largest_upper[i] = _mm512_set1_ps(-__builtin_inff());
  int64_t g = 0;
  for (; g + 2 <= p.n_groups; g += 2) {
    if (first == 0) prefetch(p.ahead, g * group_bytes, 2 * group_bytes);
    vnni_groups<kQ, 2>(p, first, g, largest, largest_upper);
  }
  if (g < p.n_groups) vnni_groups<kQ, 1>(p, first, g, largest, largest_upper);
  for (int i = 0; i < kQ; ++i) {
    p.largest[first + i] = largest_of(largest[i]);
    p.largest_upper[first + i] = largest_of(largest_upper[i]);
  }
}

FIRN_VNNI void vnni_scan(const CopyScanArgs& p) {
  int64_t i = 0;
  for (; i + 4 <= p.n_queries; i += 4) vnni_queries<4>(p, i);
  for (; i < p.n_queries; ++i) vnni_queries<1>(p, i);
}

int64_t collect(const float* upper, int64_t n, float threshold, uint32_t first, uint32_t* keys, float* uppers) {
  const __m512 limit = _mm512_set1_ps(threshold);
  __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                                _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_loadu_ps(upper + i);
    const __mmask16 mask = _mm512_cmp_ps_mask(v, limit, _CMP_GE_OQ);
    if (mask != 0) {
      _mm512_mask_compressstoreu_epi32(keys + found, mask, at);
      _mm512_mask_compressstoreu_ps(uppers + found, mask, v);
      found += __builtin_popcount(mask);
    }
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  return found;
}

}  // namespace

const IndexCopyKernels kIndexCopyAvx512 = {scan, collect};
const IndexCopyKernels kIndexCopyVnni = {vnni_scan, collect};

}  // namespace firn::cpu
