// Reading, writing and copying memory as fast as one core can: the yardstick of bandwidth-bound kernels.
//
// Plain data only (see linear_kernels.h). Pointers are 64-byte aligned, bytes a multiple of 1024.
#pragma once

#include <cstdint>

namespace firn::cpu {

struct StreamKernels {
  const char* name;
  uint64_t (*read)(const uint8_t* data, int64_t bytes);        // a checksum, so that no load can be left out
  void (*write)(uint8_t* data, int64_t bytes, uint8_t value);  // past the caches where the level can
  void (*copy)(uint8_t* to, const uint8_t* from, int64_t bytes);
};

const StreamKernels& stream_kernels_scalar();
const StreamKernels& stream_kernels_avx2();
const StreamKernels& stream_kernels_avx512();

}  // namespace firn::cpu
