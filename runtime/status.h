// Status and Result<T>: how every boundary in firn reports what went wrong.
//
// Contract: constructors do not fail; functions that can fail return Status or Result<T>. A message names the thing,
// the value expected, the value found and what to do. FIRN_CHECK is for our own bugs and is always on; the outside
// world (files, options, memory) is never asserted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace firn {

enum class Code : uint8_t {
  kOk,
  kInvalid,      // bad input or option value; the user can correct it
  kNotFound,     // a named file, tensor or key does not exist
  kCorrupt,      // bytes contradict their own description (length, checksum, shape)
  kIo,           // the operating system refused or failed
  kNoMemory,     // a budget or the machine has too little memory
  kUnsupported,  // valid, but this build or version cannot do it
  kCancelled,    // asked to stop
  kInternal,     // a bug of ours that was caught at a boundary
};

const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // The same status with "context: " in front, for callers that know which file or option was meant.
  Status with_context(const std::string& context) const {
    return ok() ? *this : Status(code_, context + ": " + message_);
  }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status invalid(std::string m) { return {Code::kInvalid, std::move(m)}; }
inline Status not_found(std::string m) { return {Code::kNotFound, std::move(m)}; }
inline Status corrupt(std::string m) { return {Code::kCorrupt, std::move(m)}; }
inline Status io_error(std::string m) { return {Code::kIo, std::move(m)}; }
inline Status no_memory(std::string m) { return {Code::kNoMemory, std::move(m)}; }
inline Status unsupported(std::string m) { return {Code::kUnsupported, std::move(m)}; }
inline Status cancelled(std::string m) { return {Code::kCancelled, std::move(m)}; }
inline Status internal(std::string m) { return {Code::kInternal, std::move(m)}; }

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);

// Always-on check of our own invariants: prints place, condition and message, then aborts.
#define FIRN_CHECK(cond, ...)                                                      \
  do {                                                                             \
    if (!(cond)) [[unlikely]]                                                      \
      ::firn::check_failed(__FILE__, __LINE__, #cond, ::std::string{__VA_ARGS__}); \
  } while (0)

// A value or the Status that says why there is none. T must be movable; it need not be default-constructible.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit on purpose
    FIRN_CHECK(!status_.ok(), "Result built from an ok Status without a value");
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    FIRN_CHECK(ok(), status_.message());
    return *value_;
  }
  const T& value() const& {
    FIRN_CHECK(ok(), status_.message());
    return *value_;
  }
  T&& value() && {
    FIRN_CHECK(ok(), status_.message());
    return std::move(*value_);
  }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

#define FIRN_CONCAT_INNER(a, b) a##b
#define FIRN_CONCAT(a, b) FIRN_CONCAT_INNER(a, b)

// Returns the status to the caller unless it is ok.
#define FIRN_TRY(expr)                           \
  do {                                           \
    ::firn::Status firn_status_ = (expr);        \
    if (!firn_status_.ok()) return firn_status_; \
  } while (0)

// FIRN_ASSIGN(auto x, f()): declares x from a Result, or returns its status.
#define FIRN_ASSIGN(lhs, expr) FIRN_ASSIGN_INNER(FIRN_CONCAT(firn_result_, __LINE__), lhs, expr)
#define FIRN_ASSIGN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                      \
  if (!tmp.ok()) return tmp.status();     \
  lhs = std::move(tmp).value()

}  // namespace firn
