// What the tests of the read queue share: files of a known pattern, and ones that can be held back.
#pragma once

#include "storage/io_queue.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;
using namespace std::chrono_literals;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr std::byte kUntouched{0xA5};

std::unique_ptr<IoQueue> make_queue(const IoQueueOptions& options) {
  auto queue = IoQueue::create(options);
  REQUIRE(queue.ok());
  return std::move(*queue);
}

// Both backends where the kernel has both; the fallback twice where it does not.
std::vector<IoQueueOptions> backends() {
  IoQueueOptions preads;
  preads.io_uring = false;
  IoQueueOptions ring;
  IoQueueOptions polled;
  polled.sqpoll = true;
  return {preads, ring, polled};
}

// Memory at a chosen distance from an alignment, with guards around it.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t skew)
      : bytes_(bytes), all_(static_cast<std::byte*>(std::aligned_alloc(4096, total(bytes))), &std::free) {
    std::memset(all_.get(), static_cast<int>(kUntouched), total(bytes));
    data_ = all_.get() + 4096 + skew;
  }
  std::byte* data() const { return data_; }
  bool holds_pattern(int64_t offset) const {
    for (int64_t i = 0; i < bytes_; ++i) {
      if (data_[i] != test::pattern_at(offset + i)) return false;
    }
    return true;
  }
  bool guards_intact() const {
    const auto untouched = [](std::byte b) { return b == kUntouched; };
    return std::all_of(all_.get(), data_, untouched) &&
           std::all_of(data_ + bytes_, all_.get() + total(bytes_), untouched);
  }

 private:
  static size_t total(int64_t bytes) { return static_cast<size_t>((bytes / 4096 + 4) * 4096); }
  int64_t bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> all_;
  std::byte* data_;
};

// A file that reports how it is read, and holds reads back while its gate is shut.
class GateFile : public File {
 public:
  explicit GateFile(const File& inner) : inner_(inner) {}
  const std::string& path() const override { return inner_.path(); }
  Result<int64_t> size() const override { return inner_.size(); }
  int64_t direct_alignment() const override { return inner_.direct_alignment(); }
  Status read_at(int64_t offset, std::span<std::byte> out) const override { return inner_.read_at(offset, out); }
  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    {
      std::unique_lock lock(mutex_);
      order_.push_back(offset);
      ++in_flight_;
      bytes_ += static_cast<int64_t>(out.size());
      most_ = std::max(most_, in_flight_);
      most_bytes_ = std::max(most_bytes_, bytes_);
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
    }
    if (pause_ > 0us) std::this_thread::sleep_for(pause_);
    Result<int64_t> n = inner_.read_some_at(offset, out);
    const std::lock_guard lock(mutex_);
    --in_flight_;
    bytes_ -= static_cast<int64_t>(out.size());
    return n;
  }
  Status write_at(int64_t, std::span<const std::byte>) override { return unsupported("a file for reading"); }
  Status sync() override { return {}; }

  void shut() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool wait_for_reads(size_t n) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 5s, [&] { return order_.size() >= n; });
  }
  std::vector<int64_t> order() const {
    const std::lock_guard lock(mutex_);
    return order_;
  }
  int most() const { return most_; }
  int64_t most_bytes() const { return most_bytes_; }
  void pause(std::chrono::microseconds p) { pause_ = p; }

 private:
  const File& inner_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::vector<int64_t> order_;
  mutable int in_flight_ = 0, most_ = 0;
  mutable int64_t bytes_ = 0, most_bytes_ = 0;
  bool open_ = true;
  std::chrono::microseconds pause_{0};
};

struct PatternFile {
  explicit PatternFile(int64_t size, OpenMode mode = OpenMode::kReadDirect, FileSystem* fs = nullptr) : bytes(size) {
    test::put_file(path, test::pattern(0, size));
    auto opened = (fs != nullptr ? *fs : FileSystem::real()).open(path, mode);
    REQUIRE(opened.ok());
    file = std::move(*opened);
  }
  TempFolder folder;
  const std::string path = folder / "data";
  const int64_t bytes;
  std::unique_ptr<File> file;
};

struct Shape {
  const char* name;
  struct Range {
    int64_t offset, bytes, skew;
  };
  std::vector<Range> ranges;
};

}  // namespace
}  // namespace firn::storage
