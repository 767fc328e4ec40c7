// Small helpers shared by the safetensors sources: names from untrusted files in messages, and look-up by name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "storage/safetensors.h"

namespace firn::storage {

// `text` in quotes, cut after 200 bytes, with control characters and broken bytes replaced: safe to print anywhere.
std::string shown(std::string_view text);

// Binary search in a list sorted by name; nullptr when absent.
const TensorInfo* find_by_name(const std::vector<TensorInfo>& sorted, std::string_view name);

}  // namespace firn::storage
