#include "storage/cache_policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <tuple>
#include <unordered_map>

namespace firn::storage {
namespace {

// A doubly linked list over slot numbers, oldest first.
class RecencyList {
 public:
  explicit RecencyList(int32_t n_slots) : links_(static_cast<size_t>(n_slots) + 1), end_(n_slots) {
    links_[static_cast<size_t>(end_)] = {end_, end_};
  }
  void push_back(int32_t slot) {
    Link& end = links_[static_cast<size_t>(end_)];
    links_[static_cast<size_t>(slot)] = {end.before, end_};
    links_[static_cast<size_t>(end.before)].after = slot;
    end.before = slot;
  }
  void remove(int32_t slot) {
    const Link link = links_[static_cast<size_t>(slot)];
    links_[static_cast<size_t>(link.before)].after = link.after;
    links_[static_cast<size_t>(link.after)].before = link.before;
  }
  int32_t first(const std::function<bool(int32_t)>& accept) const {
    for (int32_t slot = links_[static_cast<size_t>(end_)].after; slot != end_;
         slot = links_[static_cast<size_t>(slot)].after) {
      if (accept(slot)) return slot;
    }
    return -1;
  }

 private:
  struct Link {
    int32_t before = 0, after = 0;
  };
  std::vector<Link> links_;
  const int32_t end_;
};

class Lru final : public CachePolicy {
 public:
  explicit Lru(int32_t n_slots) : order_(n_slots) {}
  const char* name() const override { return "lru"; }
  void inserted(int32_t slot, SlotKey) override { order_.push_back(slot); }
  void used(int32_t slot) override {
    order_.remove(slot);
    order_.push_back(slot);
  }
  void removed(int32_t slot) override { order_.remove(slot); }
  int32_t victim(const std::function<bool(int32_t)>& evictable) override { return order_.first(evictable); }

 private:
  RecencyList order_;
};

// A use at time t weighs 2^(t / half_life): all weights decay alike, so the order of sums changes only where a use is
// added, and their logarithms never overflow.
class Frequency final : public CachePolicy {
 public:
  Frequency(int32_t n_slots, double half_life)
      : score_(static_cast<size_t>(n_slots)), last_(static_cast<size_t>(n_slots)), half_life_(half_life) {}
  const char* name() const override { return "frequency"; }

  void inserted(int32_t slot, SlotKey) override {
    score_[static_cast<size_t>(slot)] = now();
    add(slot);
  }
  void used(int32_t slot) override {
    removed(slot);
    double& score = score_[static_cast<size_t>(slot)];
    const double high = std::max(score, now()), low = std::min(score, now());
    score = high + std::log2(1.0 + std::exp2(low - high));
    add(slot);
  }
  void removed(int32_t slot) override { order_.erase(entry(slot)); }
  int32_t victim(const std::function<bool(int32_t)>& evictable) override {
    for (const Entry& e : order_) {
      if (evictable(std::get<2>(e))) return std::get<2>(e);
    }
    return -1;
  }

 private:
  using Entry = std::tuple<double, int64_t, int32_t>;
  double now() const { return static_cast<double>(uses_) / half_life_; }
  Entry entry(int32_t slot) const {
    return {score_[static_cast<size_t>(slot)], last_[static_cast<size_t>(slot)], slot};
  }
  void add(int32_t slot) {
    last_[static_cast<size_t>(slot)] = ++uses_;
    order_.insert(entry(slot));
  }

  std::vector<double> score_;
  std::vector<int64_t> last_;
  std::set<Entry> order_;
  const double half_life_;
  int64_t uses_ = 0;
};

class Static final : public CachePolicy {
 public:
  Static(int32_t n_slots, const std::vector<SlotKey>& ranking)
      : rank_of_slot_(static_cast<size_t>(n_slots), kUnranked), others_(n_slots) {
    for (size_t i = 0; i < ranking.size(); ++i) rank_.emplace(ranking[i], static_cast<int64_t>(i));
  }
  const char* name() const override { return "static"; }
  void inserted(int32_t slot, SlotKey key) override {
    const auto found = rank_.find(key);
    int64_t& rank = rank_of_slot_[static_cast<size_t>(slot)];
    rank = found == rank_.end() ? kUnranked : found->second;
    if (rank == kUnranked) {
      others_.push_back(slot);
    } else {
      ranked_.insert({-rank, slot});
    }
  }
  void used(int32_t slot) override {
    if (rank_of_slot_[static_cast<size_t>(slot)] != kUnranked) return;
    others_.remove(slot);
    others_.push_back(slot);
  }
  void removed(int32_t slot) override {
    const int64_t rank = rank_of_slot_[static_cast<size_t>(slot)];
    if (rank == kUnranked) {
      others_.remove(slot);
    } else {
      ranked_.erase({-rank, slot});
    }
  }
  int32_t victim(const std::function<bool(int32_t)>& evictable) override {
    if (const int32_t slot = others_.first(evictable); slot >= 0) return slot;
    for (const auto& [rank, slot] : ranked_) {
      if (evictable(slot)) return slot;
    }
    return -1;
  }

 private:
  static constexpr int64_t kUnranked = -1;
  std::unordered_map<SlotKey, int64_t> rank_;
  std::vector<int64_t> rank_of_slot_;
  RecencyList others_;
  std::set<std::pair<int64_t, int32_t>> ranked_;  // the least wanted first
};

}  // namespace

Result<std::unique_ptr<CachePolicy>> make_policy(const PolicyOptions& options, int32_t n_slots) {
  FIRN_CHECK(n_slots >= 1, "a cache without slots");
  if (options.name == "lru") return std::unique_ptr<CachePolicy>(std::make_unique<Lru>(n_slots));
  if (options.name == "static") {
    return std::unique_ptr<CachePolicy>(std::make_unique<Static>(n_slots, options.ranking));
  }
  if (options.name == "frequency") {
    const double half_life = options.half_life > 0 ? options.half_life : 8.0 * n_slots;
    return std::unique_ptr<CachePolicy>(std::make_unique<Frequency>(n_slots, half_life));
  }
  return invalid(fmt::format("cache policy '{}': expected lru, frequency or static", options.name));
}

int64_t belady_hits(const std::vector<SlotKey>& accesses, int32_t n_slots) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const auto n = static_cast<int64_t>(accesses.size());
  std::vector<int64_t> next(accesses.size(), kNever);
  std::unordered_map<SlotKey, int64_t> seen;
  for (int64_t i = n - 1; i >= 0; --i) {
    const auto [at, fresh] = seen.try_emplace(accesses[static_cast<size_t>(i)], i);
    if (!fresh) {
      next[static_cast<size_t>(i)] = at->second;
      at->second = i;
    }
  }
  std::set<std::pair<int64_t, SlotKey>> held;  // by next use
  std::unordered_map<SlotKey, int64_t> next_of;
  int64_t hits = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SlotKey key = accesses[static_cast<size_t>(i)];
    if (const auto at = next_of.find(key); at != next_of.end()) {
      ++hits;
      held.erase({at->second, key});
    } else if (static_cast<int64_t>(held.size()) >= n_slots) {
      const auto last = std::prev(held.end());
      next_of.erase(last->second);
      held.erase(last);
    }
    next_of[key] = next[static_cast<size_t>(i)];
    held.insert({next[static_cast<size_t>(i)], key});
  }
  return hits;
}

}  // namespace firn::storage
