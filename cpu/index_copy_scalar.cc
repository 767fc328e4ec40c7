// Kernels of the low-bit copy for the baseline: what the others are checked against.
#include "cpu/index_copy.h"

namespace firn::cpu {
namespace {

float widen(const char* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const uint32_t word = uint32_t{bits} << 16;
  float v;
  __builtin_memcpy(&v, &word, sizeof v);
  return v;
}

void scan(const CopyScanArgs& p) {
  const int64_t n_keys = p.n_groups * kCopyGroup;
  for (int64_t i = 0; i < p.n_queries; ++i) {
    const int8_t* x = p.x + i * 8 * p.chunks;
    float largest = -__builtin_inff(), largest_upper = largest;
    for (int64_t key = 0; key < n_keys; ++key) {
      const char* group = static_cast<const char*>(p.copy) + key / kCopyGroup * (p.chunks + 1) * 64;
      const int64_t lane = key % kCopyGroup;
      int32_t sum = 0;
      for (int64_t c = 0; c < p.chunks; ++c) {
        for (int64_t j = 0; j < 4; ++j) {
          const int byte = static_cast<unsigned char>(group[c * 64 + lane * 4 + j]);
          sum += (byte & 15) * x[8 * c + j] + (byte >> 4) * x[8 * c + 4 + j];
        }
      }
      const char* meta = group + p.chunks * 64;
      const float approximate = widen(meta + 2 * lane) * p.c[i] * static_cast<float>(2 * sum - p.sum15[i]);
      const float upper = approximate + (p.a[i] * widen(meta + 32 + 2 * lane) + p.b[i]);
      p.upper[i * n_keys + key] = upper;
      if (approximate > largest) largest = approximate;
      if (upper > largest_upper) largest_upper = upper;
    }
    p.largest[i] = largest;
    p.largest_upper[i] = largest_upper;
  }
}

int64_t collect(const float* upper, int64_t n, float threshold, uint32_t first, uint32_t* keys, float* uppers) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(upper[i] >= threshold)) continue;
    keys[found] = first + static_cast<uint32_t>(i);
    uppers[found++] = upper[i];
  }
  return found;
}

}  // namespace

const IndexCopyKernels kIndexCopyScalar = {scan, collect};

}  // namespace firn::cpu
