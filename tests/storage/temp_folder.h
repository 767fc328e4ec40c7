// A folder of its own for a test, removed afterwards, and files with content that can be recognised anywhere.
#pragma once

#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "runtime/status.h"

namespace firn::test {

class TempFolder {
 public:
  explicit TempFolder(const std::string& base = std::filesystem::temp_directory_path().string()) {
    std::string name = base + "/firn-test-XXXXXX";
    FIRN_CHECK(::mkdtemp(name.data()) != nullptr, "cannot create a folder in " + base);
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  int64_t entries() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::string path_;
};

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

inline void put_file(const std::string& path, std::string_view content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  FIRN_CHECK(out.good(), "cannot write " + path);
}

inline std::string get_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  FIRN_CHECK(in.good(), "cannot read " + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace firn::test
