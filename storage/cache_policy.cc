// Replacement policies: lists and a heap over slot numbers.
#include "storage/cache_policy.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <queue>
#include <set>
#include <unordered_map>

namespace firn::storage {
namespace {

// A doubly linked list of slots through arrays, from the least to the most recently used.
class RecencyList {
 public:
  explicit RecencyList(int32_t n_slots) : n_slots_(n_slots) { nodes_.reserve(static_cast<size_t>(n_slots)); }

  bool contains(int32_t slot) const {
    return slot >= 0 && static_cast<size_t>(slot) < nodes_.size() && at(slot).next != kOut;
  }
  void push(int32_t slot) {
    FIRN_CHECK(slot >= 0 && slot < n_slots_, "a slot beyond the cache");
    if (static_cast<size_t>(slot) >= nodes_.size()) nodes_.resize(static_cast<size_t>(slot) + 1);
    FIRN_CHECK(at(slot).next == kOut, "a slot inserted twice");
    link(slot);
  }
  void erase(int32_t slot) {
    FIRN_CHECK(contains(slot), "a slot that holds nothing");
    unlink(slot);
    at(slot).next = kOut;
  }
  void touch(int32_t slot) {
    FIRN_CHECK(contains(slot), "a slot that holds nothing");
    if (slot == newest_) return;
    unlink(slot);
    link(slot);
  }
  int32_t oldest(const std::function<bool(int32_t)>& evictable) const {
    for (int32_t slot = oldest_; slot >= 0; slot = at(slot).next) {
      if (evictable(slot)) return slot;
    }
    return -1;
  }

 private:
  static constexpr int32_t kEnd = -1, kOut = -2;
  struct Node {
    int32_t previous = kOut, next = kOut;
  };
  Node& at(int32_t slot) { return nodes_[static_cast<size_t>(slot)]; }
  const Node& at(int32_t slot) const { return nodes_[static_cast<size_t>(slot)]; }
  void link(int32_t slot) {
    at(slot) = {newest_, kEnd};
    (newest_ == kEnd ? oldest_ : at(newest_).next) = slot;
    newest_ = slot;
  }
  void unlink(int32_t slot) {
    const Node node = at(slot);
    (node.previous == kEnd ? oldest_ : at(node.previous).next) = node.next;
    (node.next == kEnd ? newest_ : at(node.next).previous) = node.previous;
  }

  const int32_t n_slots_;
  std::vector<Node> nodes_;
  int32_t oldest_ = kEnd, newest_ = kEnd;
};

class Lru final : public CachePolicy {
 public:
  explicit Lru(int32_t n_slots) : list_(n_slots) {}
  const char* name() const override { return "lru"; }
  void inserted(int32_t slot, SlotKey) override { list_.push(slot); }
  void used(int32_t slot) override { list_.touch(slot); }
  void removed(int32_t slot) override { list_.erase(slot); }
  int32_t victim(const std::function<bool(int32_t)>& evictable) override { return list_.oldest(evictable); }

 private:
  RecencyList list_;
};

// A use at tick t weighs 2^(t / half_life), so nothing decays: all old uses fall behind at the same rate, and the order
// of two slots changes only when one is used. Scores are kept as log2 of the sum, which no number of ticks overflows.
//
// The heap holds what each score was when last looked at. Scores only grow, so an entry is a lower bound: used() leaves
// the heap alone, and victim() brings the entry on top up to date until the top one is.
class Frequency final : public CachePolicy {
 public:
  Frequency(int32_t n_slots, double half_life) : n_slots_(n_slots), per_tick_(1 / half_life) {
    nodes_.reserve(static_cast<size_t>(n_slots));
    heap_.reserve(static_cast<size_t>(n_slots));
  }
  const char* name() const override { return "frequency"; }

  void inserted(int32_t slot, SlotKey) override {
    FIRN_CHECK(slot >= 0 && slot < n_slots_, "a slot beyond the cache");
    if (static_cast<size_t>(slot) >= nodes_.size()) nodes_.resize(static_cast<size_t>(slot) + 1);
    Node& n = at(slot);
    FIRN_CHECK(n.place == kOut, "a slot inserted twice");
    ++tick_;
    n.true_key = {static_cast<double>(tick_) * per_tick_, tick_};
    push(slot);
  }

  void used(int32_t slot) override {
    Node& n = held(slot);
    ++tick_;
    // log2(2^a + 2^b) with b the new use's weight: exact enough that equal histories give equal scores.
    const double a = n.true_key.score, b = static_cast<double>(tick_) * per_tick_;
    const double high = std::max(a, b), low = std::min(a, b);
    n.true_key = {high + std::log1p(std::exp2(low - high)) * kLog2E, tick_};
    unpark(slot);
  }

  void removed(int32_t slot) override {
    Node& n = held(slot);
    if (n.place <= kParked) {
      unlist(slot);
    } else {
      take_out(n.place);
    }
    n.place = kOut;
  }

  void released(int32_t slot) override {
    held(slot);
    unpark(slot);
  }

  int32_t victim(const std::function<bool(int32_t)>& evictable) override {
    while (!heap_.empty()) {
      const int32_t slot = heap_[0].slot;
      Node& n = at(slot);
      if (heap_[0].key < n.true_key) {
        heap_[0].key = n.true_key;
        sift_down(0);
        continue;
      }
      if (evictable(slot)) return slot;
      take_out(0);
      n.place = kParked - static_cast<int32_t>(parked_.size());
      parked_.push_back(slot);
    }
    // Everything was set aside: whoever is evictable by now was not announced, or nobody is.
    int32_t best = -1;
    for (const int32_t slot : parked_) {
      if (evictable(slot) && (best < 0 || at(slot).true_key < at(best).true_key)) best = slot;
    }
    return best;
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr int32_t kOut = -1, kParked = -2;  // kParked - i: the i-th of parked_
  struct Key {
    double score = 0;
    int64_t tick = 0;  // of the last use: distinct, so that the order is total
    bool operator<(const Key& o) const { return score != o.score ? score < o.score : tick < o.tick; }
  };
  struct Node {
    Key true_key;
    int32_t place = kOut;  // in the heap
  };
  struct Entry {
    Key key;
    int32_t slot;
  };

  Node& at(int32_t slot) { return nodes_[static_cast<size_t>(slot)]; }
  Node& held(int32_t slot) {
    FIRN_CHECK(slot >= 0 && static_cast<size_t>(slot) < nodes_.size() && at(slot).place != kOut,
               "a slot that holds nothing");
    return at(slot);
  }
  void unlist(int32_t slot) {
    const int32_t i = kParked - at(slot).place;
    const int32_t last = parked_.back();
    parked_[static_cast<size_t>(i)] = last;
    at(last).place = kParked - i;
    parked_.pop_back();
  }
  void unpark(int32_t slot) {
    if (at(slot).place > kParked) return;
    unlist(slot);
    push(slot);
  }
  void put(size_t i, const Entry& e) {
    heap_[i] = e;
    at(e.slot).place = static_cast<int32_t>(i);
  }
  void push(int32_t slot) {
    heap_.push_back({at(slot).true_key, slot});
    sift_up(heap_.size() - 1);
  }
  void take_out(int32_t place) {
    const Entry last = heap_.back();
    heap_.pop_back();
    const auto i = static_cast<size_t>(place);
    if (i == heap_.size()) return;
    put(i, last);
    sift_up(i);
    sift_down(static_cast<size_t>(at(last.slot).place));
  }
  void sift_up(size_t i) {
    const Entry e = heap_[i];
    for (; i > 0 && e.key < heap_[(i - 1) / 2].key; i = (i - 1) / 2) put(i, heap_[(i - 1) / 2]);
    put(i, e);
  }
  void sift_down(size_t i) {
    const Entry e = heap_[i];
    for (;;) {
      size_t child = 2 * i + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && heap_[child + 1].key < heap_[child].key) ++child;
      if (!(heap_[child].key < e.key)) break;
      put(i, heap_[child]);
      i = child;
    }
    put(i, e);
  }

  const int32_t n_slots_;
  const double per_tick_;
  int64_t tick_ = 0;
  std::vector<Node> nodes_;
  std::vector<Entry> heap_;
  std::vector<int32_t> parked_;
};

class Static final : public CachePolicy {
 public:
  explicit Static(int32_t n_slots) : rest_(n_slots) { rank_of_slot_.reserve(static_cast<size_t>(n_slots)); }
  Status rank(const std::vector<SlotKey>& ranking) {
    for (size_t i = 0; i < ranking.size(); ++i) {
      if (!rank_.emplace(ranking[i], static_cast<int64_t>(i)).second) {
        return invalid(
            fmt::format("cache policy static: key {} is twice in the ranking; name each key once", ranking[i]));
      }
    }
    return {};
  }
  const char* name() const override { return "static"; }
  void inserted(int32_t slot, SlotKey key) override {
    if (slot >= 0 && static_cast<size_t>(slot) >= rank_of_slot_.size()) {
      rank_of_slot_.resize(static_cast<size_t>(slot) + 1, -1);
    }
    const auto it = rank_.find(key);
    if (it == rank_.end()) return rest_.push(slot);
    FIRN_CHECK(slot >= 0 && rank_of_slot(slot) < 0 && !rest_.contains(slot), "a slot inserted twice");
    rank_of_slot(slot) = it->second;
    ranked_.emplace(-it->second, slot);
  }
  void used(int32_t slot) override {
    if (!is_ranked(slot)) rest_.touch(slot);
  }
  void removed(int32_t slot) override {
    if (!is_ranked(slot)) return rest_.erase(slot);
    ranked_.erase({-rank_of_slot(slot), slot});
    rank_of_slot(slot) = -1;
  }
  int32_t victim(const std::function<bool(int32_t)>& evictable) override {
    const int32_t slot = rest_.oldest(evictable);
    if (slot >= 0) return slot;
    for (const auto& [rank, ranked] : ranked_) {
      if (evictable(ranked)) return ranked;
    }
    return -1;
  }

 private:
  int64_t& rank_of_slot(int32_t slot) { return rank_of_slot_[static_cast<size_t>(slot)]; }
  bool is_ranked(int32_t slot) {
    return slot >= 0 && static_cast<size_t>(slot) < rank_of_slot_.size() && rank_of_slot(slot) >= 0;
  }
  std::unordered_map<SlotKey, int64_t> rank_;
  RecencyList rest_;
  std::vector<int64_t> rank_of_slot_;             // -1: in rest_, or empty
  std::set<std::pair<int64_t, int32_t>> ranked_;  // least wanted first
};

}  // namespace

Result<std::unique_ptr<CachePolicy>> make_policy(const PolicyOptions& options, int32_t n_slots) {
  if (n_slots < 1) return invalid(fmt::format("cache policy: expected at least one slot, found {}", n_slots));
  if (!(options.half_life >= 0) || std::isinf(options.half_life)) {
    return invalid(fmt::format("cache policy: half_life {}: expected a number of uses, or 0 for eight times the slots",
                               options.half_life));
  }
  if (options.name == "lru") return std::unique_ptr<CachePolicy>(std::make_unique<Lru>(n_slots));
  if (options.name == "frequency") {
    const double half_life = options.half_life > 0 ? options.half_life : 8.0 * n_slots;
    return std::unique_ptr<CachePolicy>(std::make_unique<Frequency>(n_slots, half_life));
  }
  if (options.name == "static") {
    auto policy = std::make_unique<Static>(n_slots);
    FIRN_TRY(policy->rank(options.ranking));
    return std::unique_ptr<CachePolicy>(std::move(policy));
  }
  return invalid(fmt::format("cache policy \"{}\": expected lru, frequency or static", options.name));
}

int64_t belady_hits(const std::vector<SlotKey>& accesses, int32_t n_slots) {
  if (n_slots < 1) return 0;
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const auto n = static_cast<int64_t>(accesses.size());
  std::vector<int64_t> next(accesses.size(), kNever);
  {
    std::unordered_map<SlotKey, int64_t> seen;
    for (int64_t i = n - 1; i >= 0; --i) {
      const auto [it, fresh] = seen.try_emplace(accesses[static_cast<size_t>(i)], i);
      if (fresh) continue;
      next[static_cast<size_t>(i)] = it->second;
      it->second = i;
    }
  }
  // (next use, key) of what is cached, furthest first; an entry whose key has been used since is out of date.
  std::priority_queue<std::pair<int64_t, SlotKey>> furthest;
  std::unordered_map<SlotKey, int64_t> cached;  // key -> next use
  int64_t hits = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SlotKey key = accesses[static_cast<size_t>(i)];
    const int64_t use = next[static_cast<size_t>(i)];
    const auto it = cached.find(key);
    if (it != cached.end()) {
      ++hits;
      it->second = use;
    } else {
      while (cached.size() >= static_cast<size_t>(n_slots)) {
        const auto [when, candidate] = furthest.top();
        furthest.pop();
        const auto c = cached.find(candidate);
        if (c != cached.end() && c->second == when) cached.erase(c);
      }
      cached.emplace(key, use);
    }
    furthest.emplace(use, key);
  }
  return hits;
}

}  // namespace firn::storage
