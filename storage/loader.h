// Parallel loading of file ranges into memory, in disk order.
//
// Ranges are sorted by (file, offset), neighbours merged, cut into pieces of a few MiB and read by `n_readers` threads
// through O_DIRECT bounce buffers (buffered where O_DIRECT is refused). Every byte is accounted for: a short file is an
// error that names file, offset, expected and found. Nothing is written to a destination outside its range; after an
// error or a cancel the destinations hold anything. The bounce buffers take about 4 MiB a reader.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"

namespace firn::storage {

struct LoadRange {
  int32_t file = 0;  // index into LoadPlan::paths
  int64_t offset = 0;
  int64_t bytes = 0;
  void* dst = nullptr;  // host memory
};

struct LoadPlan {
  std::vector<std::string> paths;
  std::vector<LoadRange> ranges;
  int n_readers = 4;
  bool direct = true;
};

struct LoadStats {
  int64_t bytes = 0;
  double seconds = 0;
  bool direct = false;   // every file was read with O_DIRECT
  std::string fallback;  // why not, in words; empty otherwise
};

// progress(bytes_done, bytes_total) is called from one thread at a time, a few times a second. `cancel` may be null.
Result<LoadStats> load(FileSystem& fs, const LoadPlan& plan, const std::function<void(int64_t, int64_t)>& progress,
                       const std::atomic<bool>* cancel);

}  // namespace firn::storage
