// A folder of its own for a test, removed afterwards, and whole files in and out.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
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
  // Writes a file, in folders of its own if need be; returns its path.
  std::string write(const std::string& name, std::string_view content) const;
  int64_t entries() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::string path_;
};

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

inline std::string TempFolder::write(const std::string& name, std::string_view content) const {
  const std::string path = *this / name;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  put_file(path, content);
  return path;
}

}  // namespace firn::test
