// Files with content that can be recognised anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "support/temp_folder.h"

namespace firn::test {

// The byte at an offset: neighbours, blocks and pieces all differ.
inline std::byte pattern_at(int64_t offset) {
  auto x = static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15u;
  return static_cast<std::byte>((x >> 56) ^ (x >> 24));
}

inline std::string pattern(int64_t begin, int64_t bytes) {
  std::string out(static_cast<size_t>(bytes), '\0');
  for (int64_t i = 0; i < bytes; ++i) out[static_cast<size_t>(i)] = static_cast<char>(pattern_at(begin + i));
  return out;
}

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace firn::test
