// Streams with 32-byte vectors.
#include <immintrin.h>

#include "cpu/stream_kernels.h"

namespace firn::cpu {
namespace {

constexpr int64_t kAhead = 2048;

uint64_t read(const uint8_t* data, int64_t bytes) {
  __m256i sums[4];
  for (__m256i& s : sums) s = _mm256_setzero_si256();
  for (int64_t i = 0; i < bytes; i += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(data + i + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + i + kAhead + 64), _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) {
      sums[j] = _mm256_add_epi64(sums[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum);
  return words[0] + words[1] + words[2] + words[3];
}

void write(uint8_t* data, int64_t bytes, uint8_t value) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(value));
  for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(data + i), v);
  _mm_sfence();
}

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + kAhead), _MM_HINT_T0);
    for (int64_t j = i; j < i + 64; j += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(from + j)));
    }
  }
  _mm_sfence();
}

}  // namespace

const StreamKernels& stream_kernels_avx2() {
  static constexpr StreamKernels kTable = {"avx2", read, write, copy};
  return kTable;
}

}  // namespace firn::cpu
