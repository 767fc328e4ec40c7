// Sizes, durations and counts as people write and read them.
//
// Contract: what format_* prints, parse_* accepts (format_size and format_duration round, so the value may differ in
// the digits that were not printed). Units with an i are powers of two, those without powers of ten; letters in any
// case.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/status.h"

namespace firn {

// "512MiB", "1.5GiB", "2GB", "4096" (bytes), "100B". Errors name the text and show the accepted form.
Result<int64_t> parse_size(std::string_view text);
// The largest power-of-two unit that leaves at least 1, at most two decimals: "512MiB", "1.5GiB", "100B".
std::string format_size(int64_t bytes);

// "350ms", "2.4s", "1m05s", "2h", "1h30m", "15us"; a unit is required.
Result<int64_t> parse_duration(std::string_view text);  // nanoseconds
// "850us", "350ms", "2.4s", "1m05s", "2h03m".
std::string format_duration(int64_t duration_ns);

std::string format_count(int64_t count);  // "1,048,576"

}  // namespace firn
