// Decimal texts are read digit by digit in 128-bit integers: no rounding before the unit is applied, no overflow.
#include "runtime/units.h"

#include <fmt/format.h>

#include <array>
#include <limits>
#include <optional>

namespace firn {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

struct Unit {
  std::string_view name;  // lower case
  int64_t value;
};

constexpr std::array<Unit, 14> kSizeUnits = {{{"b", 1},
                                              {"kb", 1'000},
                                              {"mb", 1'000'000},
                                              {"gb", 1'000'000'000},
                                              {"tb", 1'000'000'000'000},
                                              {"pb", 1'000'000'000'000'000},
                                              {"eb", 1'000'000'000'000'000'000},
                                              {"kib", int64_t{1} << 10},
                                              {"mib", int64_t{1} << 20},
                                              {"gib", int64_t{1} << 30},
                                              {"tib", int64_t{1} << 40},
                                              {"pib", int64_t{1} << 50},
                                              {"eib", int64_t{1} << 60},
                                              {"", 1}}};

constexpr std::array<Unit, 6> kTimeUnits = {{{"ns", 1},
                                             {"us", 1'000},
                                             {"ms", 1'000'000},
                                             {"s", 1'000'000'000},
                                             {"m", 60'000'000'000},
                                             {"h", 3'600'000'000'000}}};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// A number without its unit: whole + fraction / scale.
struct Decimal {
  Wide whole = 0;
  Wide fraction = 0, scale = 1;
  bool too_large = false;

  // Rounded down; nothing when it does not fit 63 bits.
  std::optional<int64_t> times(int64_t unit) const {
    if (too_large) return std::nullopt;
    const Wide value = whole * static_cast<Wide>(unit) + fraction * static_cast<Wide>(unit) / scale;
    if (value > static_cast<Wide>(kMax)) return std::nullopt;
    return static_cast<int64_t>(value);
  }
};

// Takes digits[.digits] off the front; nothing when there is no digit in front, or none after a point.
std::optional<Decimal> take_decimal(std::string_view* text) {
  Decimal number;
  if (text->empty() || !is_digit(text->front())) return std::nullopt;
  while (!text->empty() && is_digit(text->front())) {
    number.whole = number.whole * 10 + static_cast<Wide>(text->front() - '0');
    if (number.whole > static_cast<Wide>(kMax)) {
      number.too_large = true;
      number.whole = 0;  // any value; keeps the sum from wrapping
    }
    text->remove_prefix(1);
  }
  if (text->empty() || text->front() != '.') return number;
  text->remove_prefix(1);
  if (text->empty() || !is_digit(text->front())) return std::nullopt;
  for (int digits = 0; !text->empty() && is_digit(text->front()); ++digits) {
    if (digits < 18) {  // later digits are below one byte or nanosecond of every unit
      number.fraction = number.fraction * 10 + static_cast<Wide>(text->front() - '0');
      number.scale *= 10;
    }
    text->remove_prefix(1);
  }
  return number;
}

std::string take_unit(std::string_view* text) {
  while (!text->empty() && text->front() == ' ') text->remove_prefix(1);
  std::string unit;
  while (!text->empty() && is_letter(text->front())) {
    unit.push_back(static_cast<char>(text->front() | 0x20));
    text->remove_prefix(1);
  }
  return unit;
}

template <size_t N>
std::optional<int64_t> find_unit(const std::array<Unit, N>& units, std::string_view name) {
  for (const Unit& unit : units) {
    if (unit.name == name) return unit.value;
  }
  return std::nullopt;
}

// At most `decimals` digits after the point, trailing zeros dropped.
std::string short_decimal(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (text.find('.') == std::string::npos) return text;
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

}  // namespace

Result<int64_t> parse_size(std::string_view text) {
  const auto wrong = [&](const char* why) {
    return invalid(
        fmt::format("'{}' is not a size: {}; expected bytes or a number with a unit, like 4096, 512MiB, "
                    "1.5GiB or 2GB",
                    text, why));
  };
  std::string_view rest = trimmed(text);
  if (rest.empty()) return wrong("it is empty");
  if (rest.front() == '-') return wrong("it is negative");
  const std::optional<Decimal> number = take_decimal(&rest);
  if (!number) return wrong("it does not start with a number");
  const std::string name = take_unit(&rest);
  const std::optional<int64_t> unit = find_unit(kSizeUnits, name);
  if (!rest.empty() || !unit) return wrong("the unit is unknown");
  if (*unit == 1 && number->fraction != 0) return wrong("there is no part of a byte");
  const std::optional<int64_t> bytes = number->times(*unit);
  if (!bytes) return wrong("it is larger than 2^63 - 1 bytes");
  return *bytes;
}

std::string format_size(int64_t bytes) {
  constexpr std::array<const char*, 6> kNames = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const std::string sign = bytes < 0 ? "-" : "";
  const uint64_t magnitude = bytes < 0 ? 0 - static_cast<uint64_t>(bytes) : static_cast<uint64_t>(bytes);
  if (magnitude < 1024) return fmt::format("{}{}B", sign, magnitude);
  size_t unit = 0;
  double value = static_cast<double>(magnitude) / 1024;
  while (value >= 1023.995 && unit + 1 < kNames.size()) {  // would print as 1024
    value /= 1024;
    ++unit;
  }
  return sign + short_decimal(value, 2) + kNames[unit];
}

Result<int64_t> parse_duration(std::string_view text) {
  const auto wrong = [&](const char* why) {
    return invalid(
        fmt::format("'{}' is not a duration: {}; expected a number with a unit, like 350ms, 2.4s, 1m05s or "
                    "2h",
                    text, why));
  };
  std::string_view rest = trimmed(text);
  if (rest.empty()) return wrong("it is empty");
  if (rest.front() == '-') return wrong("it is negative");
  int64_t total = 0, last_unit = kMax;
  while (!rest.empty()) {
    const std::optional<Decimal> number = take_decimal(&rest);
    if (!number) return wrong("a number is missing");
    const std::string name = take_unit(&rest);
    if (name.empty()) return wrong("the unit is missing");
    const std::optional<int64_t> unit = find_unit(kTimeUnits, name);
    if (!unit) return wrong("the unit is unknown");
    if (*unit >= last_unit) return wrong("units must fall, as in 1h30m");
    last_unit = *unit;
    const std::optional<int64_t> part = number->times(*unit);
    if (!part || *part > kMax - total) return wrong("it is longer than 292 years");
    total += *part;
  }
  return total;
}

std::string format_duration(int64_t duration_ns) {
  if (duration_ns < 0) {
    return "-" + format_duration(duration_ns == std::numeric_limits<int64_t>::min() ? kMax : -duration_ns);
  }
  const auto ns = static_cast<double>(duration_ns);
  if (duration_ns < 1'000) return fmt::format("{}ns", duration_ns);
  if (ns < 999.5e3) return fmt::format("{:.0f}us", ns / 1e3);
  if (ns < 999.5e6) return fmt::format("{:.0f}ms", ns / 1e6);
  if (ns < 59.95e9) return short_decimal(ns / 1e9, 1) + "s";
  const int64_t seconds = duration_ns / 1'000'000'000 + (duration_ns % 1'000'000'000 >= 500'000'000 ? 1 : 0);
  if (seconds < 3600) return fmt::format("{}m{:02}s", seconds / 60, seconds % 60);
  const int64_t minutes = seconds / 60;
  return fmt::format("{}h{:02}m", minutes / 60, minutes % 60);
}

std::string format_count(int64_t count) {
  const std::string digits = fmt::format("{}", count);
  const size_t start = count < 0 ? 1 : 0;
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > start && (digits.size() - i) % 3 == 0) out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

}  // namespace firn
