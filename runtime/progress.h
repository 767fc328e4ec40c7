// Progress of long work, for whoever is waiting: a bar with rate and time left on a terminal, a plain line every few
// seconds in a log, nothing for work under a second, nothing when quiet.
//
// Contract: update() may be called from any thread and often: it is an atomic add unless a line is due. The text goes
// to stderr. `done` never falls. The destructor calls finish().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace firn {

// The unit that is printed as sizes; every other unit is a word after a count.
struct ProgressUnit {
  static constexpr const char* kBytes = "B";
};

struct ProgressSink {
  std::function<void(const std::string&)> write;  // empty: stderr
  std::function<int64_t()> now_ns;                // empty: the steady clock
  int terminal = -1;                              // 0, 1, or -1: ask whether stderr is one
  int columns = 0;                                // 0: ask the terminal, 80 if it does not say
};

class Progress {
 public:
  // total <= 0: the end is not known; no bar and no time left. unit "B" prints sizes and bytes per second, any other
  // its own name after a count ("tokens"); it may be empty.
  Progress(std::string label, int64_t total, std::string unit, bool quiet, ProgressSink sink = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  void update(int64_t done);  // the amount done so far
  void add(int64_t amount);
  // The last line, if any was shown: amount, time and mean rate. Idempotent.
  void finish();

 private:
  void maybe_print();
  std::string amount(int64_t value) const;
  std::string line(int64_t done, int64_t elapsed_ns) const;
  std::string bar_line(int64_t done, int64_t elapsed_ns) const;

  const std::string label_;
  const int64_t total_;
  const std::string unit_;
  const bool quiet_;
  ProgressSink sink_;
  const bool terminal_;
  const int64_t start_ns_;
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> next_print_ns_;
  std::mutex mutex_;  // printing: guards the two below and keeps lines whole
  bool shown_ = false;
  bool finished_ = false;
};

}  // namespace firn
