// Replacement policies: victims of hand-made sequences, a plain twin under random calls, and Belady against every
// possible choice.
#include "storage/cache_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;

std::unique_ptr<CachePolicy> make(const std::string& name, int32_t n_slots, double half_life = 0,
                                  std::vector<SlotKey> ranking = {}) {
  auto made = make_policy({name, half_life, std::move(ranking)}, n_slots);
  FIRN_CHECK(made.ok(), made.status().message());
  return std::move(made).value();
}

bool any(int32_t) { return true; }

// Victims until there are none.
std::vector<int32_t> drain(CachePolicy& policy) {
  std::vector<int32_t> out;
  for (int32_t slot = policy.victim(any); slot >= 0; slot = policy.victim(any)) {
    out.push_back(slot);
    policy.removed(slot);
  }
  return out;
}

TEST_CASE("lru gives up the least recently used", "[cache_policy]") {
  auto policy = make("lru", 4);
  CHECK(policy->name() == std::string("lru"));
  CHECK(policy->victim(any) == -1);
  for (int32_t i = 0; i < 4; ++i) policy->inserted(i, 100u + static_cast<SlotKey>(i));
  policy->used(0);
  policy->used(2);
  CHECK(policy->victim(any) == 1);
  CHECK(policy->victim(any) == 1);  // it stays until it is removed
  CHECK(policy->victim([](int32_t s) { return s != 1 && s != 3; }) == 0);
  CHECK(policy->victim([](int32_t) { return false; }) == -1);
  policy->removed(3);
  policy->inserted(3, 7);
  CHECK(drain(*policy) == std::vector<int32_t>{1, 0, 2, 3});
}

TEST_CASE("frequency gives up the least used, the less recent of equals", "[cache_policy]") {
  auto policy = make("frequency", 4, 1e12);  // no decay to speak of
  for (int32_t i = 0; i < 4; ++i) policy->inserted(i, static_cast<SlotKey>(i));
  for (int i = 0; i < 3; ++i) policy->used(0);
  policy->used(1);
  policy->used(3);
  policy->used(2);
  policy->used(2);
  CHECK(drain(*policy) == std::vector<int32_t>{1, 3, 2, 0});
  // What was removed starts anew.
  policy->inserted(0, 0);
  policy->inserted(1, 1);
  policy->used(1);
  CHECK(drain(*policy) == std::vector<int32_t>{0, 1});
}

TEST_CASE("A use counts half after half_life further uses", "[cache_policy]") {
  // Slot 0: three uses at the start. Slot 1: its first after `gap` uses of slot 2. It weighs more than the three when
  // they have decayed to less than a third of what they were: after 1.58 half-lives.
  for (const double half_life : {10.0, 50.0}) {
    for (const int gap : {1, 10, 14, 18, 40, 70, 88, 200}) {
      auto policy = make("frequency", 3, half_life);
      policy->inserted(0, 0);
      policy->used(0);
      policy->used(0);
      policy->inserted(2, 2);
      for (int i = 1; i < gap; ++i) policy->used(2);
      policy->inserted(1, 1);
      double old = 0;
      for (int i = 1; i <= 3; ++i) old += std::exp2(-(gap + i) / half_life);
      INFO("half-life " << half_life << " gap " << gap << " old uses weigh " << old);
      CHECK(policy->victim([](int32_t s) { return s != 2; }) == (old < 1 ? 0 : 1));
    }
  }
}

TEST_CASE("frequency keeps its order after many uses", "[cache_policy]") {
  auto policy = make("frequency", 3, 2);  // a score would overflow a double a thousand times over
  for (int32_t i = 0; i < 3; ++i) policy->inserted(i, static_cast<SlotKey>(i));
  for (int i = 0; i < 3000000; ++i) policy->used(i % 2 == 0 ? 0 : 2);
  CHECK(policy->victim(any) == 1);
  for (int i = 0; i < 40; ++i) policy->used(1);
  CHECK(drain(*policy) == std::vector<int32_t>{0, 2, 1});
}

TEST_CASE("Slots set aside while they could not go come back", "[cache_policy]") {
  auto policy = make("frequency", 4, 1e9);
  for (int32_t i = 0; i < 4; ++i) policy->inserted(i, static_cast<SlotKey>(i));
  CHECK(policy->victim([](int32_t s) { return s == 3; }) == 3);
  policy->released(1);
  policy->used(2);
  CHECK(policy->victim(any) == 1);
  policy->removed(1);
  policy->removed(0);  // while set aside
  CHECK(policy->victim(any) == 3);
  policy->removed(3);
  CHECK(policy->victim([](int32_t) { return false; }) == -1);
  CHECK(policy->victim(any) == 2);  // unannounced, but there is no other
}

TEST_CASE("static keeps the ranked keys, the rest is lru", "[cache_policy]") {
  auto policy = make("static", 5, 0, {50, 40, 30});
  policy->inserted(0, 30);
  policy->inserted(1, 1);
  policy->inserted(2, 50);
  policy->inserted(3, 2);
  policy->inserted(4, 40);
  policy->used(1);
  policy->used(0);
  CHECK(policy->victim([](int32_t s) { return s == 4 || s == 2; }) == 4);
  CHECK(drain(*policy) == std::vector<int32_t>{3, 1, 0, 4, 2});
  policy->inserted(2, 9);  // a slot that held a ranked key
  policy->inserted(1, 50);
  policy->inserted(0, 8);
  CHECK(drain(*policy) == std::vector<int32_t>{2, 0, 1});
}

TEST_CASE("Bad policies are refused by name", "[cache_policy]") {
  CHECK(contains(make_policy({"mru", 0, {}}, 4).status().message(), "mru"));
  CHECK(make_policy({"mru", 0, {}}, 4).status().code() == Code::kInvalid);
  CHECK(make_policy({"lru", 0, {}}, 0).status().code() == Code::kInvalid);
  CHECK(make_policy({"frequency", -1, {}}, 4).status().code() == Code::kInvalid);
  CHECK(make_policy({"frequency", std::nan(""), {}}, 4).status().code() == Code::kInvalid);
  CHECK(make_policy({"frequency", std::numeric_limits<double>::infinity(), {}}, 4).status().code() == Code::kInvalid);
  CHECK(contains(make_policy({"static", 0, {7, 8, 7}}, 4).status().message(), "key 7"));
}

// The definition, with sums over all uses and a look at every slot.
class PlainPolicy {
 public:
  PlainPolicy(std::string name, int32_t n_slots, double half_life, std::vector<SlotKey> ranking)
      : name_(std::move(name)), half_life_(half_life > 0 ? half_life : 8.0 * n_slots), ranking_(std::move(ranking)) {}
  void inserted(int32_t slot, SlotKey key) { held_[slot] = {key, {++tick_}}; }
  void used(int32_t slot) { held_[slot].uses.push_back(++tick_); }
  void removed(int32_t slot) { held_.erase(slot); }
  template <typename F>
  int32_t victim(const F& evictable) const {
    int32_t best = -1;
    for (const auto& [slot, held] : held_) {
      if (evictable(slot) && (best < 0 || before(held, held_.at(best)))) best = slot;
    }
    return best;
  }

 private:
  struct Held {
    SlotKey key = 0;
    std::vector<int64_t> uses;
  };
  double score(const Held& h) const {
    double sum = 0;
    for (const int64_t t : h.uses) sum += std::exp2(-static_cast<double>(tick_ - t) / half_life_);
    return sum;
  }
  size_t rank(const Held& h) const {
    return static_cast<size_t>(std::find(ranking_.begin(), ranking_.end(), h.key) - ranking_.begin());
  }
  bool before(const Held& a, const Held& b) const {
    if (name_ == "static" && rank(a) != rank(b)) return rank(a) > rank(b);
    if (name_ == "frequency") {
      const double x = score(a), y = score(b);
      if (std::abs(x - y) > 1e-12 * std::max(x, y)) return x < y;
    }
    return a.uses.back() < b.uses.back();
  }
  const std::string name_;
  const double half_life_;
  const std::vector<SlotKey> ranking_;
  int64_t tick_ = 0;
  std::map<int32_t, Held> held_;
};

TEST_CASE("Policies agree with their definitions on random calls", "[cache_policy]") {
  std::mt19937_64 random(11);
  int64_t victims = 0;
  for (int round = 0; round < 150; ++round) {
    const std::string name = std::vector<std::string>{"lru", "frequency", "static"}[static_cast<size_t>(round % 3)];
    const auto n = static_cast<int32_t>(1 + random() % 12);
    const double half_life = random() % 2 == 0 ? 0 : 1.5 + static_cast<double>(random() % 40);
    const std::vector<SlotKey> ranking = {3, 9, 1, 4};
    auto policy = make(name, n, half_life, ranking);
    auto again = make(name, n, half_life, ranking);
    PlainPolicy plain(name, n, half_life, ranking);
    std::set<int32_t> held, blocked;
    std::set<SlotKey> keys;
    std::map<int32_t, SlotKey> key_of;
    for (int step = 0; step < 400; ++step) {
      const auto slot = static_cast<int32_t>(random() % static_cast<uint64_t>(n));
      switch (random() % 6) {
        case 0: {
          const SlotKey key = random() % 20;
          if (held.count(slot) != 0 || keys.count(key) != 0) break;
          policy->inserted(slot, key);
          again->inserted(slot, key);
          plain.inserted(slot, key);
          held.insert(slot);
          keys.insert(key);
          key_of[slot] = key;
          break;
        }
        case 1:
        case 2:
          if (held.count(slot) == 0) break;
          policy->used(slot);
          again->used(slot);
          plain.used(slot);
          break;
        case 3:  // pins come and go
          if (blocked.erase(slot) == 0) {
            blocked.insert(slot);
          } else if (held.count(slot) != 0) {
            policy->released(slot);
            again->released(slot);
          }
          break;
        default: {
          const auto evictable = [&](int32_t s) { return blocked.count(s) == 0; };
          const int32_t victim = policy->victim(evictable);
          INFO(name << " round " << round << " step " << step);
          REQUIRE(victim == again->victim(evictable));
          REQUIRE(victim == plain.victim(evictable));
          if (victim < 0 || random() % 2 == 0) break;
          ++victims;
          policy->removed(victim);
          again->removed(victim);
          plain.removed(victim);
          held.erase(victim);
          keys.erase(key_of[victim]);
        }
      }
    }
  }
  CHECK(victims > 3000);
}

TEST_CASE("Victims cost little when the pinned are many", "[cache_policy]") {
  // Half of 200000 slots are pinned and the least used; 20000 victims must not look at them each time.
  constexpr int32_t kSlots = 200000;
  for (const std::string name : {"lru", "frequency"}) {
    auto policy = make(name, kSlots, 1e15);
    int64_t looks = 0;
    const bool low = name == "frequency";
    const auto evictable = [&](int32_t s) {
      ++looks;
      return (s < kSlots / 2) != low;  // lru: the recent are pinned; frequency: the least used
    };
    for (int32_t i = 0; i < kSlots; ++i) policy->inserted(i, static_cast<SlotKey>(i));
    for (int i = 0; i < 20000; ++i) {
      const int32_t victim = policy->victim(evictable);
      REQUIRE(victim >= 0);
      policy->removed(victim);
      policy->inserted(victim, static_cast<SlotKey>(victim));
    }
    CHECK(looks <= kSlots / 2 + 20000);
  }
}

// The best of all choices of what to evict.
int64_t best_hits(const std::vector<SlotKey>& accesses, size_t at, std::set<SlotKey> cached, size_t n_slots) {
  int64_t hits = 0;
  for (; at < accesses.size(); ++at) {
    const SlotKey key = accesses[at];
    if (cached.count(key) != 0) {
      ++hits;
      continue;
    }
    if (cached.size() == n_slots) {
      int64_t best = 0;
      for (const SlotKey out : cached) {
        std::set<SlotKey> next = cached;
        next.erase(out);
        next.insert(key);
        best = std::max(best, best_hits(accesses, at + 1, std::move(next), n_slots));
      }
      return hits + best;
    }
    cached.insert(key);
  }
  return hits;
}

TEST_CASE("Belady's hits are the best there can be", "[cache_policy]") {
  CHECK(belady_hits({}, 3) == 0);
  CHECK(belady_hits({1, 1, 1}, 0) == 0);
  CHECK(belady_hits({1, 1, 1}, 1) == 2);
  CHECK(belady_hits({1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5}, 3) == 5);
  std::mt19937_64 random(5);
  for (int round = 0; round < 1500; ++round) {
    std::vector<SlotKey> accesses(random() % 13);
    const uint64_t keys = 2 + random() % 4;
    for (SlotKey& key : accesses) key = random() % keys;
    const auto n = static_cast<int32_t>(1 + random() % 3);
    REQUIRE(belady_hits(accesses, n) == best_hits(accesses, 0, {}, static_cast<size_t>(n)));
  }
}

TEST_CASE("No policy beats Belady, and a long trace is quick", "[cache_policy]") {
  std::mt19937_64 random(6);
  std::vector<SlotKey> accesses(100000);
  for (SlotKey& key : accesses) key = std::min(random() % 3000, random() % 3000);
  const int64_t best = belady_hits(accesses, 500);
  for (const std::string name : {"lru", "frequency", "static"}) {
    auto policy = make(name, 500, 0, {0, 1, 2, 3});
    std::map<SlotKey, int32_t> where;
    std::vector<SlotKey> what;
    int64_t hits = 0;
    for (const SlotKey key : accesses) {
      const auto it = where.find(key);
      if (it != where.end()) {
        ++hits;
        policy->used(it->second);
        continue;
      }
      auto slot = static_cast<int32_t>(what.size());
      if (slot < 500) {
        what.push_back(key);
      } else {
        slot = policy->victim(any);
        policy->removed(slot);
        where.erase(what[static_cast<size_t>(slot)]);
        what[static_cast<size_t>(slot)] = key;
      }
      where[key] = slot;
      policy->inserted(slot, key);
    }
    INFO(name << " " << hits << " of " << best);
    CHECK(hits <= best);
    CHECK(hits > best / 3);
  }
}

}  // namespace
}  // namespace firn::storage
