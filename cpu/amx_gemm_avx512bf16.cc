// The tile kernels of amx_gemm.h: 32 weight rows x 32 input rows in four accumulators.
#include "cpu/amx_gemm.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own header writes "undefined" vectors as self-initialised ones and then warns of them where they are
// inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define FIRN_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace firn::cpu {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kTileBytes = 1024;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// 16 x 16 words, rows become columns.
inline void transpose(__m512 r[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int g = 0; g < 16; g += 4) {
    b[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[g]), _mm512_castps_pd(a[g + 2])));
    b[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[g]), _mm512_castps_pd(a[g + 2])));
    b[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[g + 1]), _mm512_castps_pd(a[g + 3])));
    b[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[g + 1]), _mm512_castps_pd(a[g + 3])));
  }
  // b[4g + j], lane l: column 4l + j of rows 4g to 4g + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512 even_low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
    const __m512 even_high = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
    r[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    r[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xDD);
    r[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    r[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xDD);
  }
}

// [row tile][dim tile][pair of dims][row][2]
void pack_x(const uint16_t* x, int64_t stride, int64_t m, int64_t k, void* out) {
  char* to = static_cast<char*>(out);
  for (int64_t first = 0; first < m; first += kTile) {
    for (int64_t d = 0; d < k; d += kAmxDims, to += kTileBytes) {
      __m512 r[16];
      for (int64_t i = 0; i < kTile; ++i) {
        r[i] = first + i < m ? _mm512_loadu_ps(x + (first + i) * stride + d) : _mm512_setzero_ps();
      }
      transpose(r);
      for (int64_t i = 0; i < kTile; ++i) _mm512_storeu_ps(to + i * 64, r[i]);
    }
  }
}

// c holds one accumulator [16 outputs][16 rows].
inline void put(const float* c, int64_t rows, float* out, int64_t out_stride) {
  __m512 r[16];
  for (int64_t i = 0; i < kTile; ++i) r[i] = _mm512_load_ps(c + i * kTile);
  transpose(r);
  for (int64_t i = 0; i < rows; ++i) _mm512_storeu_ps(out + i * out_stride, r[i]);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// kW weight tiles times kX input tiles.
template <int kW, int kX>
FIRN_AMX inline void block(const AmxGemmArgs& a, const char* w, const char* x, int64_t m, float* out) {
  const int64_t steps = a.k / kAmxDims, x_step = steps * kTileBytes;
  _tile_zero(0);
  if (kX > 1) _tile_zero(1);
  if (kW > 1) _tile_zero(2);
  if (kW > 1 && kX > 1) _tile_zero(3);
  for (int64_t d = 0; d < steps; ++d) {
    _tile_loadd(6, x + d * kTileBytes, 64);
    _tile_loadd(4, w + d * 64, a.w_row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kX > 1) {
      _tile_loadd(7, x + x_step + d * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kW > 1) {
      _tile_loadd(5, w + kTile * a.w_row_bytes + d * 64, a.w_row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kX > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float c[4][256];
  _tile_stored(0, c[0], 64);
  if (kX > 1) _tile_stored(1, c[1], 64);
  if (kW > 1) _tile_stored(2, c[2], 64);
  if (kW > 1 && kX > 1) _tile_stored(3, c[3], 64);
  const int64_t low = least(m, kTile), high = m - low;
  put(c[0], low, out, a.out_stride);
  if (kX > 1) put(c[1], high, out + kTile * a.out_stride, a.out_stride);
  if (kW > 1) put(c[2], low, out + kTile, a.out_stride);
  if (kW > 1 && kX > 1) put(c[3], high, out + kTile * a.out_stride + kTile, a.out_stride);
}

FIRN_AMX void gemm(const AmxGemmArgs& a) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const char* w = static_cast<const char*>(a.w);
  const char* x = static_cast<const char*>(a.x);
  for (int64_t row = 0; row < a.m; row += 2 * kTile) {
    const int64_t m = least(2 * kTile, a.m - row);
    const char* xr = x + row * a.k * 2;
    float* out = a.out + row * a.out_stride;
    int64_t n = 0;
    for (; n + kTile < a.n; n += 2 * kTile) {
      if (m > kTile) {
        block<2, 2>(a, w + n * a.w_row_bytes, xr, m, out + n);
      } else {
        block<2, 1>(a, w + n * a.w_row_bytes, xr, m, out + n);
      }
    }
    if (n < a.n) {
      if (m > kTile) {
        block<1, 2>(a, w + n * a.w_row_bytes, xr, m, out + n);
      } else {
        block<1, 1>(a, w + n * a.w_row_bytes, xr, m, out + n);
      }
    }
  }
  _tile_release();
}

}  // namespace

const AmxKernels& amx_kernels() {
  static constexpr AmxKernels kTable = {pack_x, gemm};
  return kTable;
}

}  // namespace firn::cpu
