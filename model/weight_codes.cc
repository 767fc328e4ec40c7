#include "model/weight_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace firn::model {
namespace {

constexpr int64_t kScanPiece = int64_t{1} << 16;

// Position of the first bad code, or -1. The inner loop has no branch, so that compilers make it wide.
template <typename Bad>
int64_t scan(const uint8_t* p, int64_t n, Bad bad) {
  for (int64_t begin = 0; begin < n; begin += kScanPiece) {
    const int64_t end = std::min(n, begin + kScanPiece);
    unsigned any = 0;
    for (int64_t i = begin; i < end; ++i) any |= static_cast<unsigned>(bad(p[i]));
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (bad(p[i])) return i;
    }
  }
  return -1;
}

Status describe_bad(const storage::TensorInfo& t, uint8_t code, int64_t at, const char* what) {
  const int64_t cols = t.shape.empty() ? 1 : std::max<int64_t>(t.shape.back(), 1);
  return corrupt(fmt::format("{}: code 0x{:02X} at [{}, {}] {}; the file is damaged or was converted wrongly", t.name,
                             code, at / cols, at % cols, what));
}

}  // namespace

Status check_weight_codes(const FoundSlot& found, const std::byte* data) {
  if (found.format != WeightFormat::kMxfp8) return {};
  const auto* p = reinterpret_cast<const uint8_t*>(data);
  const int64_t at = scan(p, found.data->bytes, [](uint8_t c) { return (c & 0x7F) == 0x7F; });
  return at < 0 ? Status() : describe_bad(*found.data, p[at], at, "is an E4M3 NaN; expected a number");
}

Status check_scale_codes(const FoundSlot& found, const std::byte* scales) {
  if (found.scales == nullptr) return {};
  const auto* p = reinterpret_cast<const uint8_t*>(scales);
  const bool e4m3 = found.format == WeightFormat::kNvfp4;
  const int64_t at = e4m3 ? scan(p, found.scales->bytes, [](uint8_t c) { return c >= 0x7F; })
                          : scan(p, found.scales->bytes, [](uint8_t c) { return c == 0xFF; });
  if (at < 0) return {};
  return describe_bad(*found.scales, p[at], at,
                      e4m3 ? "is not a positive E4M3 number; a scale must be 0x00 to 0x7E"
                           : "scale byte 255 is NaN (E8M0); expected 0 to 254");
}

Result<float> usable_tensor_scale(const FoundSlot& found, float stored) {
  if (!(std::isfinite(stored) && stored > 0)) {
    return corrupt(fmt::format("{}: the scale of the whole matrix must be a positive number, found {}",
                               found.scalar->name, stored));
  }
  const float scale = found.scalar_inverse ? 1.0f / stored : stored;
  if (!(std::isfinite(scale) && scale > 0)) {
    return corrupt(fmt::format("{}: {} has no usable inverse", found.scalar->name, stored));
  }
  return scale;
}

}  // namespace firn::model
