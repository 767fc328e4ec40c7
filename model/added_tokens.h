// Finds added tokens in text: the leftmost, and of those that begin at one place the longest.
//
// Contract: linear time for tokens of bounded length. Immutable once built; const methods are thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace firn::model {

class AddedTokenFinder {
 public:
  struct Match {
    size_t begin = 0;
    size_t length = 0;  // 0: none
    int32_t id = -1;
  };

  void add(std::string_view content, int32_t id) {
    auto& bucket = by_first_[static_cast<uint8_t>(content[0])];
    size_t at = 0;
    while (at < bucket.size() && bucket[at].first.size() >= content.size()) ++at;
    bucket.emplace(bucket.begin() + static_cast<ptrdiff_t>(at), std::string(content), id);
    starts_[static_cast<uint8_t>(content[0])] = true;
    empty_ = false;
  }

  bool empty() const { return empty_; }

  Match find(std::string_view text, size_t from) const {
    if (empty_) return {};
    for (size_t pos = from; pos < text.size(); ++pos) {
      const auto first = static_cast<uint8_t>(text[pos]);
      if (!starts_[first]) continue;
      for (const auto& [content, id] : by_first_[first]) {
        if (text.compare(pos, content.size(), content) == 0) return {pos, content.size(), id};
      }
    }
    return {};
  }

 private:
  std::array<std::vector<std::pair<std::string, int32_t>>, 256> by_first_;  // longest first
  std::array<bool, 256> starts_{};
  bool empty_ = true;
};

}  // namespace firn::model
