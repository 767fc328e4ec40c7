// Printing of progress. The clock is read on every update, but only the thread that wins the next due time prints.
#include "runtime/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "runtime/units.h"

namespace firn {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kQuietTime = kSecond;  // shorter work shows nothing
constexpr int64_t kTerminalInterval = kSecond / 5;
constexpr int64_t kLogInterval = 5 * kSecond;

int64_t steady_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(std::string label, int64_t total, std::string unit, bool quiet, ProgressSink sink)
    : label_(std::move(label)),
      total_(total),
      unit_(std::move(unit)),
      quiet_(quiet),
      sink_(std::move(sink)),
      terminal_(sink_.terminal < 0 ? isatty(STDERR_FILENO) == 1 : sink_.terminal == 1),
      start_ns_(sink_.now_ns ? sink_.now_ns() : steady_now()),
      next_print_ns_(start_ns_ + kQuietTime) {
  if (!sink_.now_ns) sink_.now_ns = steady_now;
  if (sink_.columns <= 0) sink_.columns = terminal_columns();
  if (!sink_.write) {
    sink_.write = [](const std::string& text) {
      std::fwrite(text.data(), 1, text.size(), stderr);
      std::fflush(stderr);
    };
  }
}

Progress::~Progress() { finish(); }

void Progress::update(int64_t done) {
  int64_t before = done_.load(std::memory_order_relaxed);
  while (before < done && !done_.compare_exchange_weak(before, done, std::memory_order_relaxed)) {
  }
  maybe_print();
}

void Progress::add(int64_t amount) {
  done_.fetch_add(amount, std::memory_order_relaxed);
  maybe_print();
}

void Progress::maybe_print() {
  if (quiet_) return;
  const int64_t now = sink_.now_ns();
  int64_t due = next_print_ns_.load(std::memory_order_relaxed);
  if (now < due) return;
  if (!next_print_ns_.compare_exchange_strong(due, now + (terminal_ ? kTerminalInterval : kLogInterval))) return;
  std::lock_guard lock(mutex_);
  if (finished_) return;
  const int64_t done = done_.load(std::memory_order_relaxed);
  shown_ = true;
  sink_.write(terminal_ ? "\r\x1b[K" + bar_line(done, now - start_ns_) : line(done, now - start_ns_) + "\n");
}

void Progress::finish() {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (!shown_) return;
  const int64_t done = done_.load(), elapsed = std::max<int64_t>(1, sink_.now_ns() - start_ns_);
  const double rate = static_cast<double>(done) * 1e9 / static_cast<double>(elapsed);
  sink_.write(fmt::format("{}{}: {} in {} ({}/s)\n", terminal_ ? "\r\x1b[K" : "", label_, amount(done),
                          format_duration(elapsed), amount(static_cast<int64_t>(rate))));
}

std::string Progress::amount(int64_t value) const {
  if (unit_ == ProgressUnit::kBytes) return format_size(value);
  return unit_.empty() ? format_count(value) : format_count(value) + " " + unit_;
}

std::string Progress::line(int64_t done, int64_t elapsed_ns) const {
  const double seconds = static_cast<double>(std::max<int64_t>(1, elapsed_ns)) / 1e9;
  const double rate = static_cast<double>(done) / seconds;
  const std::string speed = amount(static_cast<int64_t>(rate)) + "/s";
  if (total_ <= 0) return fmt::format("{}: {}, {}", label_, amount(done), speed);
  const int64_t shown = std::min(done, total_);
  std::string text = fmt::format("{}: {:3.0f}%  {} of {}, {}", label_,
                                 100.0 * static_cast<double>(shown) / static_cast<double>(total_), amount(shown),
                                 amount(total_), speed);
  const double left_ns = rate > 0 ? static_cast<double>(total_ - shown) / rate * 1e9 : 9e18;
  // Beyond a month it is no estimate; nothing done yet gives none either.
  if (left_ns < 2.6e15) text += fmt::format(", {} left", format_duration(static_cast<int64_t>(left_ns)));
  return text;
}

std::string Progress::bar_line(int64_t done, int64_t elapsed_ns) const {
  std::string text = line(done, elapsed_ns);
  const int room = std::min(30, sink_.columns - static_cast<int>(text.size()) - 4);
  if (total_ > 0 && room >= 8) {
    const double share = static_cast<double>(std::min(done, total_)) / static_cast<double>(total_);
    const int full = static_cast<int>(share * room);
    text +=
        "  [" + std::string(static_cast<size_t>(full), '#') + std::string(static_cast<size_t>(room - full), '.') + "]";
  }
  // A line longer than the terminal would wrap, and \r could not take it back.
  if (text.size() >= static_cast<size_t>(sink_.columns)) text.resize(static_cast<size_t>(sink_.columns) - 1);
  return text;
}

}  // namespace firn
