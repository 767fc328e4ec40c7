// A folder of small files that stands for /proc, /sys or /sys/fs/cgroup; removed when it goes out of scope.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "runtime/status.h"

namespace firn::test {

class TempTree {
 public:
  TempTree() {
    std::string pattern = (std::filesystem::temp_directory_path() / "firn-test-XXXXXX").string();
    FIRN_CHECK(mkdtemp(pattern.data()) != nullptr, "no temporary folder at " + pattern);
    root_ = pattern;
  }
  TempTree(const TempTree&) = delete;
  TempTree& operator=(const TempTree&) = delete;
  ~TempTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  const std::string& root() const { return root_; }
  void write(const std::string& relative, const std::string& content) {
    const std::filesystem::path path = std::filesystem::path(root_) / relative;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream file(path);
    file << content;
    FIRN_CHECK(file.good(), "cannot write " + path.string());
  }

 private:
  std::string root_;
};

}  // namespace firn::test
