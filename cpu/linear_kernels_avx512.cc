// The AVX-512 linear kernels (linear_kernels.h): F, BW, DQ and VL; newer extensions are not used.

// GCC 12 warns about its own _mm512_undefined_ps().
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "cpu/linear_kernels.h"

namespace firn::cpu {
namespace {

// A weight stream per output row; the hardware prefetcher follows four streams well inside a row but loses them at row
// ends, so the lines of the next block of rows are asked for while this one is computed.
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Each format turns 32 consecutive weights into two vectors of 16 f32, in units of kUnit. tail() gives n < 32 weights
// and zeros.
struct F32 {
  static constexpr int64_t kBytes32 = 128;
  static void load(const uint8_t* row, const uint8_t*, const float*, int64_t k, __m512& a, __m512& b) {
    a = _mm512_loadu_ps(row + k * 4);
    b = _mm512_loadu_ps(row + k * 4 + 64);
  }
  static void tail(const uint8_t* row, const uint8_t*, const float*, int64_t k, int64_t n, __m512& a, __m512& b) {
    const uint32_t mask = (1u << n) - 1;
    a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), row + k * 4);
    b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), row + k * 4 + 64);
  }
};

inline __m512 widen16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

struct Bf16Weights {
  static constexpr int64_t kBytes32 = 64;
  static void load(const uint8_t* row, const uint8_t*, const float*, int64_t k, __m512& a, __m512& b) {
    a = widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k * 2)));
    b = widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k * 2 + 32)));
  }
  static void tail(const uint8_t* row, const uint8_t*, const float*, int64_t k, int64_t n, __m512& a, __m512& b) {
    const __m512i v = _mm512_maskz_loadu_epi16((1u << n) - 1, row + k * 2);
    a = widen16(_mm512_castsi512_si256(v));
    b = widen16(_mm512_extracti64x4_epi64(v, 1));
  }
};

// E4M3 to fp16: the code shifted by 7 with its sign moved up is the value / 256, subnormals included.
struct Mxfp8 {
  static constexpr int64_t kBytes32 = 32;
  static void load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k, __m512& a, __m512& b) {
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(static_cast<int16_t>(0xBFFF)));
    const __m512 scale = _mm512_set1_ps(table[scales[k / 32]]);
    a = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), scale);
    b = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), scale);
  }
  static void tail(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t, __m512& a, __m512& b) {
    a = b = _mm512_setzero_ps();  // inputs come in groups of 32
  }
};

// E2M1 / 8, by code; vpermps looks at the low four bits of each index only.
inline __m512 nibbles(const uint8_t* p) {
  const __m512 table = _mm512_setr_ps(0.0f, 0.0625f, 0.125f, 0.1875f, 0.25f, 0.375f, 0.5f, 0.75f, -0.0f, -0.0625f,
                                      -0.125f, -0.1875f, -0.25f, -0.375f, -0.5f, -0.75f);
  const __m512i q = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm512_permutexvar_ps(_mm512_or_si512(q, _mm512_slli_epi64(q, 28)), table);
}

struct Nvfp4 {
  static constexpr int64_t kBytes32 = 16;
  static void load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k, __m512& a, __m512& b) {
    a = _mm512_mul_ps(nibbles(row + k / 2), _mm512_set1_ps(table[scales[k / 16]]));
    b = _mm512_mul_ps(nibbles(row + k / 2 + 8), _mm512_set1_ps(table[scales[k / 16 + 1]]));
  }
  static void tail(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k, int64_t, __m512& a,
                   __m512& b) {  // inputs come in groups of 16
    a = _mm512_mul_ps(nibbles(row + k / 2), _mm512_set1_ps(table[scales[k / 16]]));
    b = _mm512_setzero_ps();
  }
};

struct Mxfp4 {
  static constexpr int64_t kBytes32 = 16;
  static void load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k, __m512& a, __m512& b) {
    const __m512 scale = _mm512_set1_ps(table[scales[k / 32]]);
    a = _mm512_mul_ps(nibbles(row + k / 2), scale);
    b = _mm512_mul_ps(nibbles(row + k / 2 + 8), scale);
  }
  static void tail(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t, __m512& a, __m512& b) {
    a = b = _mm512_setzero_ps();
  }
};

// The fixed reduction tree.
inline float sum_lanes(__m512 v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// Outputs [r, r + kOuts) of input rows [m, m + kRows).
template <class Format, int kOuts, int kRows, bool kPrefetch>
inline void dot_block(const DotArgs& a, int64_t r, int64_t m) {
  __m512 sums[kOuts][kRows];
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) sums[o][i] = _mm512_setzero_ps();
  const uint8_t* const row = a.w.data + r * a.w.row_bytes;
  const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
  const float* const x = a.x + m * a.x_stride;
  const int64_t ahead = kOuts * a.w.row_bytes;
  const int64_t whole = a.w.k / 32 * 32;
  const auto step = [&](int64_t k) {
    for (int o = 0; o < kOuts; ++o) {
      __m512 w0, w1;
      Format::load(row + o * a.w.row_bytes, scales + o * a.w.scale_row_bytes, a.w.scale_table, k, w0, w1);
      for (int i = 0; i < kRows; ++i) {
        const float* const xi = x + i * a.x_stride + k;
        sums[o][i] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(xi), sums[o][i]);
        sums[o][i] = _mm512_fmadd_ps(w1, _mm512_loadu_ps(xi + 16), sums[o][i]);
      }
    }
  };
  // As many inputs as fill a cache line of weights, or two lines, so that each line is asked for once.
  constexpr int64_t kLine = Format::kBytes32 >= 64 ? 32 : 32 * (64 / Format::kBytes32);
  int64_t k = 0;
  for (; k + kLine <= whole; k += kLine) {
    if constexpr (kPrefetch) {
      for (int o = 0; o < kOuts; ++o) {
        const uint8_t* const next = row + o * a.w.row_bytes + ahead + k / 32 * Format::kBytes32;
        prefetch(next);
        if constexpr (Format::kBytes32 > 64) prefetch(next + 64);
      }
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLine; i += 32) step(k + i);
  }
  for (; k < whole; k += 32) step(k);
  if (whole < a.w.k) {
    for (int o = 0; o < kOuts; ++o) {
      __m512 w0, w1;
      Format::tail(row + o * a.w.row_bytes, scales + o * a.w.scale_row_bytes, a.w.scale_table, whole, a.w.k - whole, w0,
                   w1);
      for (int i = 0; i < kRows; ++i) {
        const float* const xi = x + i * a.x_stride + whole;
        sums[o][i] = _mm512_fmadd_ps(w0, _mm512_loadu_ps(xi), sums[o][i]);
        sums[o][i] = _mm512_fmadd_ps(w1, _mm512_loadu_ps(xi + 16), sums[o][i]);
      }
    }
  }
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) a.out[(m + i) * a.out_stride + r + o] = a.out_scale * sum_lanes(sums[o][i]);
}

template <class Format, int kOuts, int kRows>
inline void dot_rows(const DotArgs& a) {
  int64_t r = 0;
  for (; r + kOuts <= a.w.n; r += kOuts) dot_block<Format, kOuts, kRows, true>(a, r, 0);
  for (; r < a.w.n; ++r) dot_block<Format, 1, kRows, true>(a, r, 0);
}

template <class Format>
void dot(const DotArgs& a) {
  switch (a.n_x) {
    case 1:
      return dot_rows<Format, 4, 1>(a);
    case 2:
      return dot_rows<Format, 4, 2>(a);
    case 3:
      return dot_rows<Format, 4, 3>(a);
    case 4:
      return dot_rows<Format, 4, 4>(a);
    case 5:
      return dot_rows<Format, 4, 5>(a);
    case 6:
      return dot_rows<Format, 4, 6>(a);
    case 7:
      return dot_rows<Format, 3, 7>(a);
    default:
      return dot_rows<Format, 3, 8>(a);
  }
}

// 4 inputs x 6 outputs of accumulators: 24 fused multiply-adds for 10 loads. A tail of the inputs' lanes adds zeros, as
// in dot.
void dot_many(const DotArgs& a) {
  DotArgs padded = a;
  padded.w.k = (a.w.k + kXPad - 1) / kXPad * kXPad;
  int64_t m = 0;
  for (; m + 4 <= a.n_x; m += 4) {
    int64_t r = 0;
    for (; r + 6 <= a.w.n; r += 6) dot_block<F32, 6, 4, false>(padded, r, m);
    for (; r < a.w.n; ++r) dot_block<F32, 1, 4, false>(padded, r, m);
  }
  for (; m < a.n_x; ++m) {
    int64_t r = 0;
    for (; r + 4 <= a.w.n; r += 4) dot_block<F32, 4, 1, false>(padded, r, m);
    for (; r < a.w.n; ++r) dot_block<F32, 1, 1, false>(padded, r, m);
  }
}

// The upper halves of 32 floats in order: exact where the values are bf16.
inline __m512i upper_halves(__m512 a, __m512 b) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
}

template <class Format>
void dequantise_bf16(const DequantiseArgs& a) {
  const int64_t k = a.w.k, whole = k / 32 * 32;
  for (int64_t r = 0; r < a.w.n; ++r) {
    const uint8_t* const row = a.w.data + r * a.w.row_bytes;
    const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
    uint16_t* const out = static_cast<uint16_t*>(a.out) + r * a.out_stride;
    __m512 w0, w1;
    for (int64_t c = 0; c < whole; c += 32) {
      Format::load(row, scales, a.w.scale_table, c, w0, w1);
      prefetch(row + a.w.row_bytes + c / 32 * Format::kBytes32);
      _mm512_storeu_si512(out + c, upper_halves(w0, w1));
    }
    if (whole < k) {
      Format::tail(row, scales, a.w.scale_table, whole, k - whole, w0, w1);
      _mm512_mask_storeu_epi16(out + whole, (1u << (k - whole)) - 1, upper_halves(w0, w1));
    }
  }
}

template <class Format>
void dequantise_f32(const DequantiseArgs& a) {
  const int64_t k = a.w.k, whole = k / 32 * 32;
  for (int64_t r = 0; r < a.w.n; ++r) {
    const uint8_t* const row = a.w.data + r * a.w.row_bytes;
    const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
    float* const out = static_cast<float*>(a.out) + r * a.out_stride;
    __m512 w0, w1;
    for (int64_t c = 0; c < whole; c += 32) {
      Format::load(row, scales, a.w.scale_table, c, w0, w1);
      prefetch(row + a.w.row_bytes + c / 32 * Format::kBytes32);
      if (Format::kBytes32 > 64) prefetch(row + a.w.row_bytes + c / 32 * Format::kBytes32 + 64);
      _mm512_storeu_ps(out + c, w0);
      _mm512_storeu_ps(out + c + 16, w1);
    }
    if (whole < k) {
      Format::tail(row, scales, a.w.scale_table, whole, k - whole, w0, w1);
      _mm512_storeu_ps(out + whole, w0);
      _mm512_storeu_ps(out + whole + 16, w1);
    }
  }
}

// e^z for |z| <= 87, within 2 units in the last place: z = n ln 2 + r, a polynomial in r, and n put into the exponent.
inline __m512 exp16(__m512 z) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(z, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), z);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// The bounds come first in min and max so that a NaN operand passes through.
inline __m512 activate16(__m512 gate, __m512 up, const ActivateArgs& a) {
  const __m512 limit = _mm512_set1_ps(a.limit);
  const __m512 g = _mm512_min_ps(limit, gate);
  const __m512 u = _mm512_min_ps(limit, _mm512_max_ps(_mm512_set1_ps(-a.limit), up));
  __m512 z = _mm512_mul_ps(_mm512_set1_ps(-a.alpha), g);
  z = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(87.0f), z));
  const __m512 sigmoid = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(z)));
  return _mm512_mul_ps(_mm512_add_ps(u, _mm512_set1_ps(a.beta)), sigmoid);
}

// Nearest even; NaN stays NaN.
inline __m512i round_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000)), 16);
}

void activate(const ActivateArgs& a) {
  for (int64_t i = 0; i < a.n; i += 16) {
    const __mmask16 mask = a.n - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (a.n - i)) - 1);
    const __m512 gate = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, a.gate + i), _mm512_set1_ps(a.gate_scale));
    const __m512 up = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, a.up + i), _mm512_set1_ps(a.up_scale));
    const __m512 v = activate16(gate, up, a);
    if (a.out_bf16 != nullptr) {
      _mm256_mask_storeu_epi16(a.out_bf16 + i, mask, _mm512_cvtepi32_epi16(round_bf16(v)));
    } else {
      const __m512 stored = a.round_to_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(round_bf16(v), 16)) : v;
      _mm512_mask_storeu_ps(a.out_f32 + i, mask, stored);
    }
  }
}

void widen(const uint16_t* bf16, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm512_storeu_ps(out + i, widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16 + i))));
  }
  if (i < n) {
    const __mmask16 mask = static_cast<__mmask16>((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(out + i, mask, widen16(_mm256_maskz_loadu_epi16(mask, bf16 + i)));
  }
}

void scale(float* values, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 v = _mm512_maskz_loadu_ps(mask, values + i);
    _mm512_mask_storeu_ps(values + i, mask, _mm512_mul_ps(v, _mm512_set1_ps(factor)));
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx512() {
  static constexpr LinearKernels kTable = {
      "avx512",
      {dot<F32>, dot<Bf16Weights>, dot<Mxfp8>, dot<Nvfp4>, dot<Mxfp4>},
      dot_many,
      {dequantise_bf16<F32>, dequantise_bf16<Bf16Weights>, dequantise_bf16<Mxfp8>, dequantise_bf16<Nvfp4>,
       dequantise_bf16<Mxfp4>},
      {dequantise_f32<F32>, dequantise_f32<Bf16Weights>, dequantise_f32<Mxfp8>, dequantise_f32<Nvfp4>,
       dequantise_f32<Mxfp4>},
      activate,
      widen,
      scale,
  };
  return kTable;
}

}  // namespace firn::cpu
