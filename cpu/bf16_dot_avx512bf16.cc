// The kernels of bf16_dot.h.
#include "cpu/bf16_dot.h"

#include "cpu/weight_units.h"

namespace firn::cpu {
namespace {

FIRN_INLINE float sum_lanes(__m512 v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

FIRN_INLINE __m512 multiply(__m512 sum, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

FIRN_INLINE __mmask32 first_halves(int64_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

// Formats whose weights become bf16 as they are: outputs [r, r + kOuts) of all rows.
template <class Units, int kOuts, int kRows>
FIRN_INLINE void dot_block(const Bf16DotArgs& a, int64_t r) {
  __m512 sums[kOuts][kRows];
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) sums[o][i] = _mm512_setzero_ps();
  const uint8_t* w = a.w.data + r * a.w.row_bytes;
  const uint8_t* scales = a.w.scales + r * a.w.scale_row_bytes;
  const int64_t whole = a.w.k / kUnitDims * kUnitDims;
  // The next block of rows, line by line: from 4 to 100 KiB ahead measure the same, 190 KiB as bad as nothing.
  const int64_t ahead = kOuts * a.w.row_bytes, scales_ahead = kOuts * a.w.scale_row_bytes;
  for (int64_t k = 0; k < whole; k += kUnitDims, w += Units::kBytes, scales += Units::kScales) {
    if (Units::kScales > 0 && k % 2048 == 0) {
      for (int o = 0; o < kOuts; ++o) prefetch(scales + o * a.w.scale_row_bytes + scales_ahead);
    }
    for (int o = 0; o < kOuts; ++o) {
      __m512i w0, w1;
      Units::convert(w + o * a.w.row_bytes, scales + o * a.w.scale_row_bytes, w0, w1);
      prefetch(w + o * a.w.row_bytes + ahead);
      if (Units::kBytes > 64) prefetch(w + o * a.w.row_bytes + ahead + 64);
      for (int i = 0; i < kRows; ++i) {
        const uint16_t* const x = a.x + i * a.x_stride + k;
        sums[o][i] = multiply(sums[o][i], w0, _mm512_loadu_si512(x));
        sums[o][i] = multiply(sums[o][i], w1, _mm512_loadu_si512(x + 32));
      }
    }
  }
  for (int64_t k = whole; k < a.w.k; k += 32) {
    const __mmask32 mask = first_halves(a.w.k - k);
    for (int o = 0; o < kOuts; ++o) {
      __m512i w0;
      Units::tail(w + o * a.w.row_bytes + (k - whole) / 32 * (Units::kBytes / 2),
                  scales + o * a.w.scale_row_bytes + (k - whole) / 32 * (Units::kScales / 2), mask, w0);
      for (int i = 0; i < kRows; ++i) {
        sums[o][i] = multiply(sums[o][i], w0, _mm512_maskz_loadu_epi16(mask, a.x + i * a.x_stride + k));
      }
    }
  }
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) a.out[i * a.out_stride + r + o] = a.out_scale * sum_lanes(sums[o][i]);
}

// The FP4 formats, 32 weights at once.
// The values of 16 scale bytes (E4M3).
FIRN_INLINE __m512 nvfp4_scales(const uint8_t* scales) {
  const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

struct Fp4Constants {
  __m512i codes, first, step;
};

FIRN_INLINE Fp4Constants fp4_constants() {
  Fp4Constants c;
  // E2M1 / 8 as bf16, twice: the lookup sees five bits, the fifth belongs to a neighbour.
  constexpr uint16_t e2m1[8] = {0x0000, 0x3D80, 0x3E00, 0x3E40, 0x3E80, 0x3EC0, 0x3F00, 0x3F40};
  alignas(64) uint16_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint16_t>(e2m1[i % 8] | (i % 16 < 8 ? 0 : 0x8000));
  c.codes = _mm512_load_si512(codes);
  c.first = _mm512_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1);
  c.step = _mm512_set1_epi32(2);
  return c;
}

FIRN_INLINE __m512i fp4_unscaled(const uint8_t* w, const Fp4Constants& c) {
  return _mm512_permutexvar_epi16(fp4_codes(w), c.codes);
}

template <int kOuts, int kRows>
FIRN_INLINE void add_scaled(__m512 (&sums)[kOuts][kRows], int o, __m512i w, __m512 scale, const uint16_t* x,
                            int64_t x_stride) {
  for (int i = 0; i < kRows; ++i) {
    const __m512 part = multiply(_mm512_setzero_ps(), w, _mm512_loadu_si512(x + i * x_stride));
    sums[o][i] = _mm512_fmadd_ps(part, scale, sums[o][i]);
  }
}

template <bool kNv, int kOuts, int kRows>
FIRN_INLINE void dot_block_fp4(const Bf16DotArgs& a, const Fp4Constants& c, int64_t r) {
  constexpr int64_t kStep = 256;  // weights of 16 scales of 16
  __m512 sums[kOuts][kRows];
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) sums[o][i] = _mm512_setzero_ps();
  const uint8_t* w = a.w.data + r * a.w.row_bytes;
  const uint8_t* scales = a.w.scales + r * a.w.scale_row_bytes;
  constexpr int64_t kScaleBytes = kNv ? 16 : 8;
  const int64_t ahead = kOuts * a.w.row_bytes, scales_ahead = kOuts * a.w.scale_row_bytes;
  const int64_t whole = a.w.k / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kStep, w += kStep / 2, scales += kScaleBytes) {
    for (int o = 0; o < kOuts; ++o) {
      const uint8_t* const wo = w + o * a.w.row_bytes;
      const uint8_t* const so = scales + o * a.w.scale_row_bytes;
      prefetch(wo + ahead);
      prefetch(wo + ahead + 64);
      if (k % 1024 == 0) prefetch(so + scales_ahead);
      __m512 values;
      if (kNv) {
        values = nvfp4_scales(so);
      }
      __m512i at = c.first;
#pragma GCC unroll 8
      for (int64_t j = 0; j < 8; ++j) {
        const __m512 scale = kNv ? _mm512_permutexvar_ps(at, values) : _mm512_set1_ps(a.w.scale_table[so[j]]);
        if (kNv) at = _mm512_add_epi32(at, c.step);
        add_scaled(sums, o, fp4_unscaled(wo + j * 16, c), scale, a.x + k + j * 32, a.x_stride);
      }
    }
  }
  for (int64_t k = whole; k < a.w.k; k += 32) {
    for (int o = 0; o < kOuts; ++o) {
      const uint8_t* const row = a.w.data + (r + o) * a.w.row_bytes + k / 2;
      const uint8_t* const s = a.w.scales + (r + o) * a.w.scale_row_bytes;
      const bool half = a.w.k - k < 32;  // one group of 16: the inputs of the other are zero
      alignas(16) uint8_t bytes[16] = {};
      __builtin_memcpy(bytes, row, 8);
      if (!half) __builtin_memcpy(bytes + 8, row + 8, 8);
      const float low = kNv ? a.w.scale_table[s[k / 16]] : a.w.scale_table[s[k / 32]];
      const float high = kNv && !half ? a.w.scale_table[s[k / 16 + 1]] : low;
      const __m512 scale = _mm512_mask_mov_ps(_mm512_set1_ps(low), 0xCCCC, _mm512_set1_ps(high));
      add_scaled(sums, o, fp4_unscaled(bytes, c), scale, a.x + k, a.x_stride);
    }
  }
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) a.out[i * a.out_stride + r + o] = a.out_scale * sum_lanes(sums[o][i]);
}

template <class Units, int kRows>
inline void dot_rows(const Bf16DotArgs& a) {
  constexpr int kOuts = kRows <= 4 ? 4 : 2;  // enough chains to cover the latency of a sum
  int64_t r = 0;
  for (; r + kOuts <= a.w.n; r += kOuts) dot_block<Units, kOuts, kRows>(a, r);
  for (; r < a.w.n; ++r) dot_block<Units, 1, kRows>(a, r);
}

template <bool kNv, int kRows>
inline void dot_rows_fp4(const Bf16DotArgs& a) {
  const Fp4Constants c = fp4_constants();
  constexpr int kOuts = kRows <= 4 ? 4 : 2;
  int64_t r = 0;
  for (; r + kOuts <= a.w.n; r += kOuts) dot_block_fp4<kNv, kOuts, kRows>(a, c, r);
  for (; r < a.w.n; ++r) dot_block_fp4<kNv, 1, kRows>(a, c, r);
}

template <class Units>
void dot(const Bf16DotArgs& a) {
  switch (a.n_x) {
    case 1:
      return dot_rows<Units, 1>(a);
    case 2:
      return dot_rows<Units, 2>(a);
    case 3:
      return dot_rows<Units, 3>(a);
    case 4:
      return dot_rows<Units, 4>(a);
    case 5:
      return dot_rows<Units, 5>(a);
    case 6:
      return dot_rows<Units, 6>(a);
    case 7:
      return dot_rows<Units, 7>(a);
    default:
      return dot_rows<Units, 8>(a);
  }
}

template <bool kNv>
void dot_fp4(const Bf16DotArgs& a) {
  switch (a.n_x) {
    case 1:
      return dot_rows_fp4<kNv, 1>(a);
    case 2:
      return dot_rows_fp4<kNv, 2>(a);
    case 3:
      return dot_rows_fp4<kNv, 3>(a);
    case 4:
      return dot_rows_fp4<kNv, 4>(a);
    case 5:
      return dot_rows_fp4<kNv, 5>(a);
    case 6:
      return dot_rows_fp4<kNv, 6>(a);
    case 7:
      return dot_rows_fp4<kNv, 7>(a);
    default:
      return dot_rows_fp4<kNv, 8>(a);
  }
}

void order_fp4(const uint16_t* x, int64_t k, uint16_t* out) {
  for (int64_t c = 0; c < k; c += 32) {
    for (int64_t i = 0; i < 32; ++i) {
      const int64_t from = c + fp4_place(i);
      out[c + i] = from < k ? x[from] : 0;
    }
  }
}

}  // namespace

const Bf16DotKernels& bf16_dot_kernels() {
  static constexpr Bf16DotKernels kTable = {{nullptr, dot<Bf16Units>, dot<Mxfp8Units>, dot_fp4<true>, dot_fp4<false>},
                                            order_fp4};
  return kTable;
}

}  // namespace firn::cpu
