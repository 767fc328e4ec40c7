// Linear kernels in plain C++ for any x86-64, and the model the vector levels follow: the same lanes, the same tree.
#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/linear_kernels.h"
#include "runtime/dtype.h"

namespace firn::cpu {
namespace {

enum Format { kF32, kBf16, kMxfp8, kNvfp4, kMxfp4 };

float load_f32(const uint8_t* p) {
  uint32_t bits = 0;
  for (int i = 3; i >= 0; --i) bits = bits << 8 | p[i];
  return std::bit_cast<float>(bits);
}

// Code << 7 with the sign moved up is the value / 256 as fp16.
float e4m3_unit(uint8_t code) { return f16_to_float(static_cast<uint16_t>((code & 0x80u) << 8 | (code & 0x7Fu) << 7)); }

// Weight c of a row in units of kUnit; exact.
template <int kFormat>
float element(const uint8_t* row, const uint8_t* scales, const float* table, int64_t c) {
  if constexpr (kFormat == kF32) return load_f32(row + c * 4);
  if constexpr (kFormat == kBf16) return to_float(Bf16{static_cast<uint16_t>(row[c * 2] | row[c * 2 + 1] << 8)});
  if constexpr (kFormat == kMxfp8) return e4m3_unit(row[c]) * table[scales[c / 32]];
  if constexpr (kFormat == kNvfp4 || kFormat == kMxfp4) {
    const uint8_t pair = row[c / 2];
    const auto code = static_cast<uint8_t>(c % 2 == 0 ? pair & 15 : pair >> 4);
    return e2m1_to_float(code) * 0.125f * table[scales[c / (kFormat == kNvfp4 ? 16 : 32)]];
  }
}

float sum_lanes(float* lanes) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <int kFormat>
void dot(const DotArgs& a) {
  for (int64_t r = 0; r < a.w.n; ++r) {
    const uint8_t* const row = a.w.data + r * a.w.row_bytes;
    const uint8_t* const scales = a.w.scales + r * a.w.scale_row_bytes;
    for (int64_t m0 = 0; m0 < a.n_x; m0 += 8) {
      const int64_t rows = std::min<int64_t>(8, a.n_x - m0);
      float lanes[8][16] = {};
      for (int64_t c = 0; c < a.w.k; ++c) {
        const float w = element<kFormat>(row, scales, a.w.scale_table, c);
        for (int64_t m = 0; m < rows; ++m) lanes[m][c % 16] += w * a.x[(m0 + m) * a.x_stride + c];
      }
      for (int64_t m = 0; m < rows; ++m) a.out[(m0 + m) * a.out_stride + r] = a.out_scale * sum_lanes(lanes[m]);
    }
  }
}

template <int kFormat>
void dequantise_bf16(const DequantiseArgs& a) {
  for (int64_t r = 0; r < a.w.n; ++r) {
    auto* const out = static_cast<uint16_t*>(a.out) + r * a.out_stride;
    for (int64_t c = 0; c < a.w.k; ++c) {
      out[c] = to_bf16(element<kFormat>(a.w.data + r * a.w.row_bytes, a.w.scales + r * a.w.scale_row_bytes,
                                        a.w.scale_table, c))
                   .bits;
    }
  }
}

template <int kFormat>
void dequantise_f32(const DequantiseArgs& a) {
  const int64_t padded = (a.w.k + kXPad - 1) / kXPad * kXPad;
  for (int64_t r = 0; r < a.w.n; ++r) {
    auto* const out = static_cast<float*>(a.out) + r * a.out_stride;
    for (int64_t c = 0; c < a.w.k; ++c) {
      out[c] = element<kFormat>(a.w.data + r * a.w.row_bytes, a.w.scales + r * a.w.scale_row_bytes, a.w.scale_table, c);
    }
    std::fill(out + a.w.k, out + padded, 0.0f);
  }
}

void activate(const ActivateArgs& a) {
  for (int64_t i = 0; i < a.n; ++i) {
    // The comparisons are false for NaN, which so passes through.
    float g = a.gate_scale * a.gate[i], u = a.up_scale * a.up[i];
    if (g > a.limit) g = a.limit;
    if (u > a.limit) u = a.limit;
    if (u < -a.limit) u = -a.limit;
    const float z = std::min(std::max(-a.alpha * g, -87.0f), 87.0f);
    const float v = (u + a.beta) * (g / (1.0f + std::exp(z)));
    if (a.out_bf16 != nullptr) {
      a.out_bf16[i] = to_bf16(v).bits;
    } else {
      a.out_f32[i] = a.round_to_bf16 ? round_to_bf16(v) : v;
    }
  }
}

void widen(const uint16_t* bf16, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(Bf16{bf16[i]});
}

void scale(float* values, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}

}  // namespace

const LinearKernels& linear_kernels_scalar() {
  static constexpr LinearKernels kTable = {
      "scalar",
      {dot<kF32>, dot<kBf16>, dot<kMxfp8>, dot<kNvfp4>, dot<kMxfp4>},
      dot<kF32>,
      {dequantise_bf16<kF32>, dequantise_bf16<kBf16>, dequantise_bf16<kMxfp8>, dequantise_bf16<kNvfp4>,
       dequantise_bf16<kMxfp4>},
      {dequantise_f32<kF32>, dequantise_f32<kBf16>, dequantise_f32<kMxfp8>, dequantise_f32<kNvfp4>,
       dequantise_f32<kMxfp4>},
      activate,
      widen,
      scale,
  };
  return kTable;
}

}  // namespace firn::cpu
