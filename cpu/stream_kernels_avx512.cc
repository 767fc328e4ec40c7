// Streams with 64-byte vectors.
// GCC 12 warns about its own _mm512_undefined_epi32().
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "cpu/stream_kernels.h"

namespace firn::cpu {
namespace {

// Bytes a line is asked for before it is used; 1 to 4 KiB measure the same.
constexpr int64_t kAhead = 3072;

uint64_t read(const uint8_t* data, int64_t bytes) {
  __m512i sums[4];
  for (__m512i& s : sums) s = _mm512_setzero_si512();
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int j = 0; j < 4; ++j) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i + kAhead + 64 * j), _MM_HINT_T0);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(data + i + 64 * j));
    }
  }
  const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, sum);
  uint64_t total = 0;
  for (const uint64_t w : words) total += w;
  return total;
}

void write(uint8_t* data, int64_t bytes, uint8_t value) {
  const __m512i v = _mm512_set1_epi8(static_cast<char>(value));
  for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(data + i), v);
  _mm_sfence();
}

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + kAhead), _MM_HINT_T0);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  }
  _mm_sfence();
}

}  // namespace

const StreamKernels& stream_kernels_avx512() {
  static constexpr StreamKernels kTable = {"avx512", read, write, copy};
  return kTable;
}

}  // namespace firn::cpu
