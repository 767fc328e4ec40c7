// Linear kernels for AVX2, FMA and F16C: a pair of vectors holds the 16 lanes.
#include <immintrin.h>

#include <cstdint>

#include "cpu/linear_kernels.h"

namespace firn::cpu {
namespace {

struct V16 {
  __m256 low, high;
};

inline V16 scaled(V16 v, float factor) {
  const __m256 f = _mm256_set1_ps(factor);
  return {_mm256_mul_ps(v.low, f), _mm256_mul_ps(v.high, f)};
}

inline __m256 widen8(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }

// Each format gives 16 weights from input k on in units of kUnit; tail() gives n < 16 of them and zeros.
struct F32 {
  static V16 load(const uint8_t* row, const uint8_t*, const float*, int64_t k) {
    const float* const p = reinterpret_cast<const float*>(row + k * 4);
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static V16 tail(const uint8_t* row, const uint8_t*, const float*, int64_t k, int64_t n) {
    alignas(32) uint8_t bytes[64] = {};
    for (int64_t i = 0; i < n * 4; ++i) bytes[i] = row[k * 4 + i];
    return load(bytes, nullptr, nullptr, 0);
  }
};

struct Bf16Weights {
  static V16 load(const uint8_t* row, const uint8_t*, const float*, int64_t k) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k * 2));
    return {widen8(_mm256_castsi256_si128(v)), widen8(_mm256_extracti128_si256(v, 1))};
  }
  static V16 tail(const uint8_t* row, const uint8_t*, const float*, int64_t k, int64_t n) {
    alignas(32) uint8_t bytes[32] = {};
    for (int64_t i = 0; i < n * 2; ++i) bytes[i] = row[k * 2 + i];
    return load(bytes, nullptr, nullptr, 0);
  }
};

struct Mxfp8 {
  static V16 load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
    return scaled({_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))},
                  table[scales[k / 32]]);
  }
  static V16 tail(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t) {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};  // inputs come in groups of 32
  }
};

// E2M1 doubled is an integer of one byte: looked up, widened, and brought to value / 8 by a power of two.
inline V16 nibbles(const uint8_t* p) {
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i fifteen = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, fifteen), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), fifteen);
  const __m128i values = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(low, high));
  const V16 v = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(values, 8)))};
  return scaled(v, 0.0625f);
}

struct Nvfp4 {
  static V16 load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k) {
    return scaled(nibbles(row + k / 2), table[scales[k / 16]]);
  }
  static V16 tail(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t) {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};  // inputs come in groups of 16
  }
};

struct Mxfp4 {
  static V16 load(const uint8_t* row, const uint8_t* scales, const float* table, int64_t k) {
    return scaled(nibbles(row + k / 2), table[scales[k / 32]]);
  }
  static V16 tail(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t) {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
  }
};

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Bytes of 16 weights.
inline int64_t bytes16(const WeightRows& w) { return w.k > 0 ? w.row_bytes * 16 / w.k : 0; }

inline float sum_lanes(V16 v) {
  const __m256 a = _mm256_add_ps(v.low, v.high);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline void accumulate(V16& sum, const V16& w, const float* x) {
  sum.low = _mm256_fmadd_ps(w.low, _mm256_loadu_ps(x), sum.low);
  sum.high = _mm256_fmadd_ps(w.high, _mm256_loadu_ps(x + 8), sum.high);
}

// The cache lines of the next rows are asked for while these are computed; hardware prefetchers stop at row ends.
template <class Format, int kOuts, int kRows>
inline void dot_block(const DotArgs& a, int64_t r, int64_t m) {
  V16 sums[kOuts][kRows];
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) sums[o][i] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const uint8_t* const row = a.w.data + r * a.w.row_bytes;
  const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
  const float* const x = a.x + m * a.x_stride;
  const int64_t whole = a.w.k / 16 * 16;
  const int64_t step_bytes = bytes16(a.w);
  for (int64_t k = 0; k < whole; k += 16) {
    for (int o = 0; o < kOuts; ++o) {
      const uint8_t* const p = row + o * a.w.row_bytes;
      const V16 w = Format::load(p, scales + o * a.w.scale_row_bytes, a.w.scale_table, k);
      prefetch(p + kOuts * a.w.row_bytes + k / 16 * step_bytes);
      for (int i = 0; i < kRows; ++i) accumulate(sums[o][i], w, x + i * a.x_stride + k);
    }
  }
  if (whole < a.w.k) {
    for (int o = 0; o < kOuts; ++o) {
      const V16 w = Format::tail(row + o * a.w.row_bytes, scales + o * a.w.scale_row_bytes, a.w.scale_table, whole,
                                 a.w.k - whole);
      for (int i = 0; i < kRows; ++i) accumulate(sums[o][i], w, x + i * a.x_stride + whole);
    }
  }
  for (int o = 0; o < kOuts; ++o)
    for (int i = 0; i < kRows; ++i) a.out[(m + i) * a.out_stride + r + o] = a.out_scale * sum_lanes(sums[o][i]);
}

template <class Format, int kOuts, int kRows>
inline void dot_rows(const DotArgs& a, int64_t m) {
  int64_t r = 0;
  for (; r + kOuts <= a.w.n; r += kOuts) dot_block<Format, kOuts, kRows>(a, r, m);
  for (; r < a.w.n; ++r) dot_block<Format, 1, kRows>(a, r, m);
}

// Sixteen registers hold at most six sums of 16 lanes. Beyond four inputs the weights of one output, still in the
// first-level cache, are taken twice.
template <class Format>
void dot(const DotArgs& a) {
  switch (a.n_x) {
    case 1:
      return dot_rows<Format, 4, 1>(a, 0);
    case 2:
      return dot_rows<Format, 2, 2>(a, 0);
    case 3:
      return dot_rows<Format, 1, 3>(a, 0);
    case 4:
      return dot_rows<Format, 1, 4>(a, 0);
    default:
      break;
  }
  for (int64_t r = 0; r < a.w.n; ++r) {
    dot_block<Format, 1, 4>(a, r, 0);
    for (int64_t m = 4; m < a.n_x; ++m) dot_block<Format, 1, 1>(a, r, m);
  }
}

void dot_many(const DotArgs& a) {
  int64_t m = 0;
  for (; m + 2 <= a.n_x; m += 2) {
    int64_t r = 0;
    for (; r + 3 <= a.w.n; r += 3) dot_block<F32, 3, 2>(a, r, m);
    for (; r < a.w.n; ++r) dot_block<F32, 1, 2>(a, r, m);
  }
  for (; m < a.n_x; ++m) dot_rows<F32, 4, 1>(a, m);
}

// The upper halves of 16 floats: exact where the values are bf16.
inline __m256i upper_halves(V16 v) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(v.low), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(v.high), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}

template <class Format>
void dequantise_bf16(const DequantiseArgs& a) {
  const int64_t whole = a.w.k / 16 * 16, step_bytes = bytes16(a.w);
  for (int64_t r = 0; r < a.w.n; ++r) {
    const uint8_t* const row = a.w.data + r * a.w.row_bytes;
    const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
    uint16_t* const out = static_cast<uint16_t*>(a.out) + r * a.out_stride;
    for (int64_t c = 0; c < whole; c += 16) {
      prefetch(row + a.w.row_bytes + c / 16 * step_bytes);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + c),
                          upper_halves(Format::load(row, scales, a.w.scale_table, c)));
    }
    if (whole < a.w.k) {
      alignas(32) uint16_t tail[16];
      _mm256_store_si256(reinterpret_cast<__m256i*>(tail),
                         upper_halves(Format::tail(row, scales, a.w.scale_table, whole, a.w.k - whole)));
      for (int64_t c = whole; c < a.w.k; ++c) out[c] = tail[c - whole];
    }
  }
}

template <class Format>
void dequantise_f32(const DequantiseArgs& a) {
  const int64_t whole = a.w.k / 16 * 16, padded = (a.w.k + kXPad - 1) / kXPad * kXPad;
  const int64_t step_bytes = bytes16(a.w);
  for (int64_t r = 0; r < a.w.n; ++r) {
    const uint8_t* const row = a.w.data + r * a.w.row_bytes;
    const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
    float* const out = static_cast<float*>(a.out) + r * a.out_stride;
    int64_t c = 0;
    for (; c < whole; c += 16) {
      prefetch(row + a.w.row_bytes + c / 16 * step_bytes);
      const V16 v = Format::load(row, scales, a.w.scale_table, c);
      _mm256_storeu_ps(out + c, v.low);
      _mm256_storeu_ps(out + c + 8, v.high);
    }
    if (c < a.w.k) {
      const V16 v = Format::tail(row, scales, a.w.scale_table, c, a.w.k - c);
      _mm256_storeu_ps(out + c, v.low);
      _mm256_storeu_ps(out + c + 8, v.high);
      c += 16;
    }
    for (; c < padded; ++c) out[c] = 0;
  }
}

// e^z for |z| <= 87: z = n ln 2 + r, a polynomial in r, and n put into the exponent.
inline __m256 exp8(__m256 z) {
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(z, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), z);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

// The bounds come first in min and max so that a NaN operand passes through.
inline __m256 activate8(__m256 gate, __m256 up, const ActivateArgs& a) {
  const __m256 limit = _mm256_set1_ps(a.limit);
  const __m256 g = _mm256_min_ps(limit, gate);
  const __m256 u = _mm256_min_ps(limit, _mm256_max_ps(_mm256_set1_ps(-a.limit), up));
  __m256 z = _mm256_mul_ps(_mm256_set1_ps(-a.alpha), g);
  z = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(87.0f), z));
  const __m256 part = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(z)));
  return _mm256_mul_ps(_mm256_add_ps(u, _mm256_set1_ps(a.beta)), part);
}

// Nearest even, as the upper half of each lane; NaN stays NaN.
inline __m256i round_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_and_si256(_mm256_blendv_epi8(rounded, quiet, nan), _mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
}

void activate(const ActivateArgs& a) {
  for (int64_t i = 0; i < a.n; i += 8) {
    const int64_t n = a.n - i < 8 ? a.n - i : 8;
    alignas(32) float gates[8] = {}, ups[8] = {}, values[8];
    for (int64_t j = 0; j < n; ++j) {
      gates[j] = a.gate[i + j];
      ups[j] = a.up[i + j];
    }
    const __m256 v = activate8(_mm256_mul_ps(_mm256_load_ps(gates), _mm256_set1_ps(a.gate_scale)),
                               _mm256_mul_ps(_mm256_load_ps(ups), _mm256_set1_ps(a.up_scale)), a);
    if (a.out_bf16 != nullptr) {
      alignas(32) uint32_t words[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(words), round_bf16(v));
      for (int64_t j = 0; j < n; ++j) a.out_bf16[i + j] = static_cast<uint16_t>(words[j] >> 16);
    } else {
      _mm256_store_ps(values, a.round_to_bf16 ? _mm256_castsi256_ps(round_bf16(v)) : v);
      for (int64_t j = 0; j < n; ++j) a.out_f32[i + j] = values[j];
    }
  }
}

void widen(const uint16_t* bf16, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bf16 + i))));
  }
  for (; i < n; ++i) {
    const __m128i bits = _mm_cvtsi32_si128(static_cast<int>(static_cast<uint32_t>(bf16[i]) << 16));
    out[i] = _mm_cvtss_f32(_mm_castsi128_ps(bits));
  }
}

void scale(float* values, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}

}  // namespace

const LinearKernels& linear_kernels_avx2() {
  static constexpr LinearKernels kTable = {
      "avx2",
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
