// What the kernels on matrix tiles (AMX-BF16) share. Include it only from files named _avx512bf16.cc: their flags stop
// short of AMX, so functions that use tiles are marked FIRN_AMX. Internal linkage throughout.
//
// A call that uses tiles configures them and releases them: other users (oneDNN) on the same thread do likewise. The
// compiler does not know what tile loads read: stores they depend on need a barrier in between.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header writes "undefined" vectors as self-initialised ones and then warns of them where they are
// inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#define FIRN_AMX __attribute__((target("amx-tile,amx-bf16")))
// GCC 12 removes calls of a function that only prefetches unless it is inlined before it is judged free of effects.
#define FIRN_INLINE inline __attribute__((always_inline))

namespace firn::cpu {
namespace {

constexpr int64_t kTile = 16;         // rows of a tile
constexpr int64_t kTileBytes = 1024;  // of a whole one

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 x 16 words, rows become columns.
FIRN_INLINE void transpose_words(__m512i r[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int g = 0; g < 16; g += 4) {
    b[g] = _mm512_unpacklo_epi64(a[g], a[g + 2]);
    b[g + 1] = _mm512_unpackhi_epi64(a[g], a[g + 2]);
    b[g + 2] = _mm512_unpacklo_epi64(a[g + 1], a[g + 3]);
    b[g + 3] = _mm512_unpackhi_epi64(a[g + 1], a[g + 3]);
  }
  // Quarter l of b[4g + j] holds column 4l + j of rows 4g to 4g + 3.
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xDD);
    r[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    r[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

}  // namespace
}  // namespace firn::cpu
