// Memory budgets: bytes are charged before they exist.
//
// Contract: a Budget is a promise to the user (--ram, --kv-ram, ...). reserve() either grants the bytes and returns a
// Reservation that gives them back when it dies, or refuses with a message that names what was asked, what is left and
// the limit. A child budget charges its parent too. Thread-safe; a Budget must outlive its Reservations and children.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "runtime/status.h"

namespace firn {

class Budget;

// Move-only claim on bytes of a budget. An empty Reservation holds nothing.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();

  int64_t bytes() const { return bytes_; }
  void release();  // gives the bytes back now; idempotent

 private:
  friend class Budget;
  Reservation(Budget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
  Budget* budget_ = nullptr;
  int64_t bytes_ = 0;
};

class Budget {
 public:
  // `name` appears in messages ("--ram"); limit_bytes < 0 means unlimited.
  Budget(std::string name, int64_t limit_bytes, Budget* parent = nullptr);

  Result<Reservation> reserve(int64_t bytes, const std::string& what);
  int64_t used_bytes() const { return used_.load(); }
  int64_t peak_bytes() const { return peak_.load(); }
  int64_t limit_bytes() const { return limit_; }
  int64_t left_bytes() const;  // the smallest of this and all parents; INT64_MAX if unlimited
  const std::string& name() const { return name_; }

 private:
  friend class Reservation;
  void give_back(int64_t bytes);
  const std::string name_;
  const int64_t limit_;
  Budget* const parent_;
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace firn
