// Budgets: a compare-and-swap on each level, from the child up to the root.
//
// A level is never above its limit, not even for a moment: a charge is added only when it fits. When an ancestor
// refuses, the levels already charged are given back, so a reservation racing with that one may be refused although
// both could not have fit either way at the ancestor; it is never granted wrongly.
#include "runtime/budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/units.h"

namespace firn {

Reservation::Reservation(Reservation&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Reservation::~Reservation() { release(); }

void Reservation::release() {
  if (budget_ != nullptr) budget_->give_back(bytes_);
  budget_ = nullptr;
  bytes_ = 0;
}

Budget::Budget(std::string name, int64_t limit_bytes, Budget* parent)
    : name_(std::move(name)), limit_(limit_bytes < 0 ? -1 : limit_bytes), parent_(parent) {}

Result<Reservation> Budget::reserve(int64_t bytes, const std::string& what) {
  FIRN_CHECK(bytes >= 0, fmt::format("{}: {} bytes asked for {}", name_, bytes, what));
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    const int64_t limit = level->limit_ < 0 ? std::numeric_limits<int64_t>::max() : level->limit_;
    int64_t used = level->used_.load();
    while (bytes <= limit - used && !level->used_.compare_exchange_weak(used, used + bytes)) {
    }
    if (bytes > limit - used) {
      for (Budget* charged = this; charged != level; charged = charged->parent_) charged->used_.fetch_sub(bytes);
      return no_memory(
          fmt::format("{}: {} ({} bytes) asked for {}, {} ({} bytes) left of a limit of {} ({} bytes); raise "
                      "{} or ask for less",
                      level->name_, format_size(bytes), bytes, what, format_size(limit - used), limit - used,
                      format_size(limit), limit, level->name_));
    }
  }
  // Only now: a reservation that an ancestor refused never existed.
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    const int64_t used = level->used_.load();
    int64_t peak = level->peak_.load();
    while (peak < used && !level->peak_.compare_exchange_weak(peak, used)) {
    }
  }
  return Reservation(this, bytes);
}

int64_t Budget::left_bytes() const {
  int64_t left = std::numeric_limits<int64_t>::max();
  for (const Budget* level = this; level != nullptr; level = level->parent_) {
    if (level->limit_ >= 0) left = std::min(left, level->limit_ - level->used_.load());
  }
  return left;
}

void Budget::give_back(int64_t bytes) {
  for (Budget* level = this; level != nullptr; level = level->parent_) {
    const int64_t before = level->used_.fetch_sub(bytes);
    FIRN_CHECK(before >= bytes, level->name_ + ": more bytes given back than were reserved");
  }
}

}  // namespace firn
