// Rows of floats to codes and scales; the rules stand in the header. Everything is exact but the one rounding of each
// code.
#include "model/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace firn::model {
namespace {

constexpr int kExponentBias = 127;
constexpr float kLargestE4m3 = 448.0f, kLargestE2m1 = 6.0f;
constexpr float kSmallestBlockScale = 1.0f / 512;

// The byte of the smallest power of two s with amax <= 448 * s. 448 is 1.75 * 2^8.
uint8_t mxfp8_scale(float amax) {
  if (amax == 0) return kExponentBias;
  int exponent = 0;
  const float mantissa = 2 * std::frexp(amax, &exponent);  // in [1, 2); amax = mantissa * 2^(exponent - 1)
  const int scale = exponent - 1 - 8 + (mantissa > 1.75f ? 1 : 0);
  return static_cast<uint8_t>(std::clamp(scale + kExponentBias, 0, 254));
}

uint8_t mxfp4_scale(float amax) {
  if (amax == 0) return kExponentBias;
  return static_cast<uint8_t>(std::clamp(std::ilogb(amax) - 2 + kExponentBias, 0, 254));
}

// v / 2^(byte - 127), rounded once: ldexp is exact but for results below the float range, which round to code 0 anyway.
float unscaled(float v, uint8_t byte) { return std::ldexp(v, kExponentBias - static_cast<int>(byte)); }

void pack(const float* scaled, int64_t n, uint8_t* out) {
  for (int64_t j = 0; j < n / 2; ++j) {
    out[j] = static_cast<uint8_t>(float_to_e2m1(scaled[2 * j]) | (float_to_e2m1(scaled[2 * j + 1]) << 4));
  }
}

void nvfp4_group(const float* in, float tensor_scale, uint8_t* data, uint8_t* scale) {
  const float amax = largest_magnitude(in, 16);
  const float wanted =
      amax == 0 ? 1.0f : std::clamp(amax / kLargestE2m1 / tensor_scale, kSmallestBlockScale, kLargestE4m3);
  *scale = float_to_e4m3(wanted);
  const float divisor = e4m3_to_float(*scale) * tensor_scale;
  float scaled[16];
  for (int i = 0; i < 16; ++i) scaled[i] = in[i] / divisor;
  pack(scaled, 16, data);
}

}  // namespace

float largest_magnitude(const float* values, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float v = std::abs(values[i]);
    if (!(v <= largest)) largest = v;  // also takes NaN, and keeps it: nothing compares with it
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

float nvfp4_tensor_scale(float amax) { return amax == 0 ? 1.0f : amax / (kLargestE2m1 * kLargestE4m3); }

void quantise_row(WeightFormat format, const float* row, int64_t cols, float tensor_scale, void* data, void* scales) {
  const int64_t group = weight_scale_group(format);
  FIRN_CHECK(group == 0 || cols % group == 0, "the row is no multiple of the scale group");
  auto* const codes = static_cast<uint8_t*>(data);
  auto* const scale = static_cast<uint8_t*>(scales);
  switch (format) {
    case WeightFormat::kF32:
      std::memcpy(data, row, static_cast<size_t>(cols) * sizeof(float));
      return;
    case WeightFormat::kBf16:
      for (int64_t i = 0; i < cols; ++i) {
        const Bf16 v = to_bf16(row[i]);
        std::memcpy(codes + 2 * i, &v.bits, sizeof(v.bits));
      }
      return;
    case WeightFormat::kMxfp8:
      for (int64_t g = 0; g < cols / group; ++g) {
        const float* const in = row + g * group;
        scale[g] = mxfp8_scale(largest_magnitude(in, group));
        for (int64_t i = 0; i < group; ++i) codes[g * group + i] = float_to_e4m3(unscaled(in[i], scale[g]));
      }
      return;
    case WeightFormat::kNvfp4:
      for (int64_t g = 0; g < cols / group; ++g) nvfp4_group(row + g * group, tensor_scale, codes + g * 8, scale + g);
      return;
    case WeightFormat::kMxfp4:
      for (int64_t g = 0; g < cols / group; ++g) {
        const float* const in = row + g * group;
        scale[g] = mxfp4_scale(largest_magnitude(in, group));
        float scaled[32];
        for (int i = 0; i < 32; ++i) scaled[i] = unscaled(in[i], scale[g]);
        pack(scaled, 32, codes + g * 16);
      }
      return;
  }
}

}  // namespace firn::model
