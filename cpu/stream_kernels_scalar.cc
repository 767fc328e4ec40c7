// Streams by the C library and a plain loop.
#include "cpu/stream_kernels.h"

#include <cstring>

namespace firn::cpu {
namespace {

uint64_t read(const uint8_t* data, int64_t bytes) {
  uint64_t sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 32) {
    uint64_t words[4];
    std::memcpy(words, data + i, 32);
    for (int j = 0; j < 4; ++j) sums[j] += words[j];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

void write(uint8_t* data, int64_t bytes, uint8_t value) { std::memset(data, value, static_cast<size_t>(bytes)); }

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

}  // namespace

const StreamKernels& stream_kernels_scalar() {
  static constexpr StreamKernels kTable = {"scalar", read, write, copy};
  return kTable;
}

}  // namespace firn::cpu
