// Named counters and gauges that an object is handed and its owner reads.
//
// Contract: value() makes a name on first use and always returns the same atomic for it, whose address holds as long as
// the Metrics lives; objects keep that reference, so counting is one relaxed add. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace firn {

class Metric {
 public:
  void add(int64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  void set(int64_t n) { value_.store(n, std::memory_order_relaxed); }
  int64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

class Metrics {
 public:
  Metric& value(const std::string& name);
  std::vector<std::pair<std::string, int64_t>> snapshot() const;  // by name

 private:
  mutable std::mutex mutex_;              // guards the map, not the values
  std::map<std::string, Metric> values_;  // nodes never move
};

}  // namespace firn
