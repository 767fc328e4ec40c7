#include "gpu/gpu.h"

namespace firn::gpu {

std::vector<DeviceInfo> devices() { return {}; }
std::string why_none() { return "built without CUDA"; }
bool built_with_cuda() { return false; }

}  // namespace firn::gpu
