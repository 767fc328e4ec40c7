// The CUDA backend's face towards the rest of firn: which devices there are, or why there are none.
//
// This version is built without CUDA kernels; devices() is empty and why_none() says so. No header outside gpu/ names a
// CUDA type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace firn::gpu {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int64_t memory_bytes = 0;
};

std::vector<DeviceInfo> devices();
std::string why_none();  // in words for the first line and `firn doctor`
bool built_with_cuda();

}  // namespace firn::gpu
