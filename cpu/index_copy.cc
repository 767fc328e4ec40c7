// Rounding of keys and queries for the low-bit copy. Baseline code only: the same bytes on every level.
#include "cpu/index_copy.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/dtype.h"

namespace firn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The smallest bf16 not below v >= 0.
uint16_t bf16_above(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if (std::isnan(v)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

float widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}

float float_above(double v) {
  const float f = static_cast<float>(v);
  return static_cast<double>(f) >= v ? f : std::nextafter(f, kInfinity);
}

}  // namespace

void write_index_copy(const void* key, bool bf16, int64_t dim, void* copy, int64_t slot) {
  char* group = static_cast<char*>(copy) + slot / kCopyGroup * copy_group_bytes(dim);
  const int64_t lane = slot % kCopyGroup, chunks = copy_chunks(dim);
  const auto element = [&](int64_t d) {
    if (!bf16) return static_cast<const float*>(key)[d];
    uint16_t bits;
    std::memcpy(&bits, static_cast<const char*>(key) + 2 * d, sizeof bits);
    return widen(bits);
  };
  float largest = 0;
  bool nan = false;
  for (int64_t d = 0; d < dim; ++d) {
    const float v = std::fabs(element(d));
    nan |= std::isnan(v);
    largest = v > largest ? v : largest;
  }
  const bool usable = !nan && largest < kInfinity;
  const uint16_t scale_bits = usable ? bf16_above(largest / 7.5f) : 0;
  const float scale = widen(scale_bits);
  const float inverse = scale > 0 ? 1 / scale : 0;  // infinite for the smallest: the level is then an end of the range
  double squares = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    uint32_t word = 0;
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t d = 8 * c + j;
      uint32_t level = 8;
      if (usable && d < dim) {
        const float v = element(d), at = v * inverse + 8;
        level = at >= 15 ? 15 : at >= 1 ? static_cast<uint32_t>(at) : 0;  // 0 also where at is NaN
        const double rest = static_cast<double>(v) - (static_cast<double>(level) - 7.5) * scale;
        squares += rest * rest;
      }
      word |= level << (8 * (j % 4) + 4 * (j / 4));
    }
    std::memcpy(group + c * 64 + lane * 4, &word, sizeof word);
  }
  const float rest = usable ? float_above(std::sqrt(squares) * (1 + 0x1p-40)) : std::numeric_limits<float>::quiet_NaN();
  const uint16_t rest_bits = bf16_above(rest);
  std::memcpy(group + chunks * 64 + lane * 2, &scale_bits, sizeof scale_bits);
  std::memcpy(group + chunks * 64 + 32 + lane * 2, &rest_bits, sizeof rest_bits);
}

CopyQuery round_query(const float* q, int64_t dim, int8_t* x) {
  CopyQuery out;
  std::memset(x, 0, static_cast<size_t>(8 * copy_chunks(dim)));
  double squares = 0, largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double v = std::fabs(static_cast<double>(q[d]));
    squares += v * v;
    largest = v > largest ? v : largest;
  }
  out.norm = std::sqrt(squares) * (1 + 0x1p-40);
  if (!(out.norm < 0x1p120)) return out;
  out.c = static_cast<float>(largest / 254);
  const double step = 2 * static_cast<double>(out.c);
  squares = 0;
  int32_t sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double level = step > 0 ? std::nearbyint(q[d] / step) : 0;
    const double kept = level > 127 ? 127 : level < -127 ? -127 : level;
    x[d] = static_cast<int8_t>(kept);
    sum += x[d];
    const double rest = q[d] - kept * step;
    squares += rest * rest;
  }
  out.residual = std::sqrt(squares) * (1 + 0x1p-40);
  out.sum15 = 15 * sum;
  out.a = float_above((out.norm + out.residual) * (1 + 0x1p-20));
  out.bounded = true;
  return out;
}

float copy_width(const CopyQuery& query, double k_norm) {
  const double both = query.norm + query.residual;
  if (!query.bounded || !(both * k_norm < 0x1p120)) return kInfinity;
  return float_above((query.residual * k_norm + 0x1p-20 * both * k_norm) * (1 + 0x1p-40) + 0x1p-100);
}

}  // namespace firn::cpu
