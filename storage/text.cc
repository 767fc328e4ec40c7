// Implementation of text.h.
#include "storage/text.h"

#include <algorithm>

namespace firn::storage {

std::string shown(std::string_view text) {
  constexpr size_t kMaxShown = 200;
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte >= 0x20 && byte < 0x7F ? c : '?';
  }
  out += text.size() > kMaxShown ? "...\"" : "\"";
  return out;
}

const TensorInfo* find_by_name(const std::vector<TensorInfo>& sorted, std::string_view name) {
  const auto it =
      std::lower_bound(sorted.begin(), sorted.end(), name,
                       [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return it != sorted.end() && it->name == name ? &*it : nullptr;
}

}  // namespace firn::storage
