// Guessing the word that was meant, for messages about unknown options, commands and benches.
#include <algorithm>
#include <cstdint>

#include "tools/cli.h"

namespace firn::tools {

namespace {
int64_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<int64_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int64_t diagonal = row[0];
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}
}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& names) {
  std::string best;
  int64_t least = std::max<int64_t>(2, static_cast<int64_t>(word.size()) / 3) + 1;
  for (const std::string& name : names) {
    if (const int64_t d = edit_distance(word, name); d < least) {
      least = d;
      best = name;
    }
  }
  return best;
}

}  // namespace firn::tools
