// Stored weights to bf16 in registers, 64 of a row at once and in their order: shared by the kernels for CPUs with
// AVX512_BF16 and VBMI. Include it only from files named _avx512bf16.cc.
//
// The result is weight / kUnit[format] exactly, except that E8M0 scales below 2^-109 count as zero: their products
// would leave bf16's normal numbers, and the instructions that multiply bf16 read subnormal numbers as zero.
#pragma once

#include <cstdint>

#include "cpu/matrix_tiles.h"

namespace firn::cpu {
namespace {

constexpr int64_t kUnitDims = 64;  // weights converted at once
constexpr int kLeastScale = 18;    // E8M0 bytes below count as zero

FIRN_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

struct Tables {
  alignas(64) uint8_t high[128], low[128];  // the magnitudes of E4M3 as bf16 times 2^119
  uint32_t shift[256];                      // of an E8M0 byte: what brings those to value * scale / 256, twice
  alignas(64) uint16_t e8m0[256][16];       // E2M1 code times scale / 8
  uint16_t e4m3[256][16];
};

constexpr uint16_t upper_half(float v) { return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, v) >> 16); }

constexpr float power_of_two(int e) {  // -126 <= e <= 127
  return __builtin_bit_cast(float, static_cast<uint32_t>(e + 127) << 23);
}

constexpr float e4m3_magnitude(int code) {
  const int e = code >> 3, m = code & 7;
  return e == 0 ? static_cast<float>(m) * power_of_two(-9) : static_cast<float>(8 + m) * power_of_two(e - 10);
}

constexpr Tables make_tables() {
  Tables t = {};
  for (int i = 0; i < 128; ++i) {
    const uint16_t word = upper_half(e4m3_magnitude(i) * power_of_two(119));
    t.high[i] = static_cast<uint8_t>(word >> 8);
    t.low[i] = static_cast<uint8_t>(word & 255);
  }
  constexpr float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int s = 0; s < 256; ++s) {
    const int down = s < kLeastScale ? 511 : s < 255 ? 254 - s : 254;  // 119 + 8 + 127 - s
    t.shift[s] = static_cast<uint32_t>(down) << 7 | static_cast<uint32_t>(down) << 23;
    for (int i = 0; i < 16; ++i) {
      const uint16_t sign = i < 8 ? 0 : 0x8000;
      const float by_e8m0 = s < kLeastScale || s > 254 ? 0.0f : e2m1[i % 8] * 0.125f * power_of_two(s - 127);
      t.e8m0[s][i] = static_cast<uint16_t>(upper_half(by_e8m0) | sign);
      t.e4m3[s][i] = static_cast<uint16_t>(upper_half(e2m1[i % 8] * e4m3_magnitude(s & 127) * 0.125f) ^
                                           (s < 128 ? sign : static_cast<uint16_t>(sign ^ 0x8000)));
    }
  }
  return t;
}

constexpr Tables kTables = make_tables();

// What a unit reads: `dims` weights (32 or 64) of one row from input k on.
struct Bf16Units {
  static constexpr int64_t kBytes = 128, kScales = 0;
  static FIRN_INLINE void convert(const uint8_t* w, const uint8_t*, __m512i& a, __m512i& b) {
    a = _mm512_loadu_si512(w);
    b = _mm512_loadu_si512(w + 64);
  }
  static FIRN_INLINE void convert_half(const uint8_t* w, const uint8_t*, __m512i& a) { a = _mm512_loadu_si512(w); }
  static FIRN_INLINE void tail(const uint8_t* w, const uint8_t*, __mmask32 mask, __m512i& a) {
    a = _mm512_maskz_loadu_epi16(mask, w);
  }
};

// The magnitude by table, times its scale by subtracting from the exponent: saturation keeps zero zero. The sign is put
// in before that, except for the code of -0, which subtraction would break.
struct Mxfp8Units {
  static constexpr int64_t kBytes = 64, kScales = 2;
  static FIRN_INLINE void words(__m512i v, __m512i& low, __m512i& high) {
    const __m512i h =
        _mm512_permutex2var_epi8(_mm512_load_si512(kTables.high), v, _mm512_load_si512(kTables.high + 64));
    const __m512i l = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.low), v, _mm512_load_si512(kTables.low + 64));
    const __m512i top = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i less = _mm512_add_epi8(v, _mm512_set1_epi8(-1));
    const __m512i sign = _mm512_ternarylogic_epi64(less, v, top, 0x80);  // all of them
    const __m512i signed_high = _mm512_or_si512(h, sign);
    low = _mm512_unpacklo_epi8(l, signed_high);
    high = _mm512_unpackhi_epi8(l, signed_high);
  }
  static FIRN_INLINE __m512i scale(uint8_t s) { return _mm512_set1_epi32(static_cast<int>(kTables.shift[s])); }
  // Eighths of the input in the order that the unpacking undoes.
  static FIRN_INLINE void convert(const uint8_t* w, const uint8_t* scales, __m512i& a, __m512i& b) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i low, high;
    words(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(w)), low, high);
    a = _mm512_subs_epu16(low, scale(scales[0]));
    b = _mm512_subs_epu16(high, scale(scales[1]));
  }
  static FIRN_INLINE void convert_half(const uint8_t* w, const uint8_t* scales, __m512i& a) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i low, high;
    words(_mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi64(0x0F, w)), low, high);
    a = _mm512_subs_epu16(low, scale(scales[0]));
  }
  static FIRN_INLINE void tail(const uint8_t* w, const uint8_t* scales, __mmask32, __m512i& a) {
    convert_half(w, scales, a);  // inputs come in groups of 32
  }
};

// FP4: groups of 16 weights (eight bytes each) alternate by four weights, because VPMULTISHIFTQB takes nibbles from the
// quadword they go to. Inputs of these formats are put into the same order (fp4_place).
constexpr int64_t fp4_place(int64_t i) {  // which of 32 weights stands at place i
  return i / 4 % 2 * 16 + i / 8 * 4 + i % 4;
}

struct Fp4Order {
  alignas(64) uint8_t shifts[64];  // of byte b in quadword q; the upper bytes of words are not looked at
  constexpr Fp4Order() : shifts() {
    for (int q = 0; q < 8; ++q) {
      for (int b = 0; b < 8; ++b) shifts[q * 8 + b] = static_cast<uint8_t>(16 * (q / 2) + 4 * (b / 2));
    }
  }
};
constexpr Fp4Order kFp4Order;

// Words whose low four bits are the codes; what is above belongs to neighbours.
FIRN_INLINE __m512i fp4_codes(const uint8_t* w) {
  const __m512i both = _mm512_broadcast_i64x2(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm512_multishift_epi64_epi8(_mm512_load_si512(kFp4Order.shifts), both);
}

// The codes look up their value in one table of 16 for each group.
FIRN_INLINE __m512i fp4_words(const uint8_t* w, const uint16_t* first, const uint16_t* second) {
  const __m512i groups =
      _mm512_set_epi64(0x0010001000100010, 0, 0x0010001000100010, 0, 0x0010001000100010, 0, 0x0010001000100010, 0);
  const __m512i table =
      _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first))),
                         _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
  const __m512i index = _mm512_ternarylogic_epi64(fp4_codes(w), _mm512_set1_epi16(15), groups, 0xEA);  // (a & b) | c
  return _mm512_permutexvar_epi16(index, table);
}

struct Nvfp4Units {
  static constexpr int64_t kBytes = 32, kScales = 4;
  static FIRN_INLINE void convert(const uint8_t* w, const uint8_t* scales, __m512i& a, __m512i& b) {
    a = fp4_words(w, kTables.e4m3[scales[0]], kTables.e4m3[scales[1]]);
    b = fp4_words(w + 16, kTables.e4m3[scales[2]], kTables.e4m3[scales[3]]);
  }
  static FIRN_INLINE void convert_half(const uint8_t* w, const uint8_t* scales, __m512i& a) {
    a = fp4_words(w, kTables.e4m3[scales[0]], kTables.e4m3[scales[1]]);
  }
};

struct Mxfp4Units {
  static constexpr int64_t kBytes = 32, kScales = 2;
  static FIRN_INLINE void convert(const uint8_t* w, const uint8_t* scales, __m512i& a, __m512i& b) {
    a = fp4_words(w, kTables.e8m0[scales[0]], kTables.e8m0[scales[0]]);
    b = fp4_words(w + 16, kTables.e8m0[scales[1]], kTables.e8m0[scales[1]]);
  }
  static FIRN_INLINE void convert_half(const uint8_t* w, const uint8_t* scales, __m512i& a) {
    a = fp4_words(w, kTables.e8m0[scales[0]], kTables.e8m0[scales[0]]);
  }
};

}  // namespace
}  // namespace firn::cpu
