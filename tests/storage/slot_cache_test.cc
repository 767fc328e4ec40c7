// The slot cache: hand-made sequences with reads held back, an exact twin under random calls, and threads.
#include "tests/storage/slot_cache_fixture.h"

namespace firn::storage {
namespace {

TEST_CASE("A load is shared, its pins move, and its bytes are the key's", "[slot_cache]") {
  Bench b(3);
  b.file.open(false);
  auto first = b.get(5);
  auto second = b.get(5);
  CHECK_FALSE(first.ready());
  CHECK(b.cache->contains(5));
  CHECK_FALSE(b.cache->ready(5));
  CHECK(first.data() == second.data());
  CHECK(b.cache->pinned() == 1);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      auto pin = b.cache->find(5);
      if (pin && pin->wait().ok() && holds(pin->data(), 5)) ++right;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  b.file.open(true);
  REQUIRE(first.wait().ok());
  for (auto& t : threads) t.join();
  CHECK(right == 3);
  CHECK(holds(first.data(), 5));
  CHECK(first.ready());
  CHECK(first.key() == 5);

  SlotCache::Pin moved(std::move(first));
  CHECK_FALSE(first);  // NOLINT: a moved-from pin is empty
  second = std::move(moved);
  CHECK(b.cache->pinned() == 1);
  SlotCache::Pin& self = second;
  second = std::move(self);
  CHECK(second);
  second.release();
  second.release();
  CHECK(b.cache->pinned() == 0);
  CHECK(b.cache->ready(5));
  const auto s = b.cache->stats();
  CHECK(s.misses == 1);
  CHECK(s.joined + s.hits == 4);
  CHECK(b.file.order() == std::vector<int64_t>{5});
  CHECK(s.wait_seconds > 0);
  CHECK(s.service_seconds > 0);
  CHECK(b.cause(Cause::kDemand).loads == 1);
  CHECK(b.cause(Cause::kDemand).bytes == kSlot);
  // No wait, no time.
  b.load(5);
  CHECK(b.cache->stats().wait_seconds == s.wait_seconds);
  CHECK_FALSE(b.cache->find(6));
  CHECK(b.cache->stats().misses == 1);
}

TEST_CASE("Pinned and loading slots stay; the least recent unpinned goes", "[slot_cache]") {
  Bench b(3);
  auto pin = b.get(0);
  b.load(1);
  b.load(2);
  b.load(1);
  b.load(3);  // takes 2's
  CHECK(b.cache->contains(1));
  CHECK_FALSE(b.cache->contains(2));
  auto one = b.get(1), three = b.get(3);
  CHECK(b.full(4));
  CHECK(b.cache->stats().refused == 1);
  CHECK_FALSE(b.cache->prefetch(4, Cause::kLookahead));
  CHECK_FALSE(b.cache->insert(4));
  CHECK(b.cache->stats().refused == 3);
  CHECK(b.cache->stats().evicted == 1);
  three.release();
  b.load(4);
  CHECK_FALSE(b.cache->contains(3));
  CHECK(pin.wait().ok());
  CHECK(holds(pin.data(), 0));
  CHECK(b.cache->in_use() == 3);
}

TEST_CASE("The error of a load goes to every pin, and the next acquire tries again", "[slot_cache]") {
  for (const bool in_finish : {false, true}) {
    Bench b(2);
    bool broken = true;
    if (in_finish) b.source.finish = [&](SlotKey) { return broken ? corrupt("checksum of gated: bad") : Status(); };
    b.file.bad(7, !in_finish);
    b.file.open(false);
    auto a = b.get(7), c = b.get(7);
    b.file.open(true);
    const Code code = in_finish ? Code::kCorrupt : Code::kIo;
    CHECK(a.wait().code() == code);
    CHECK(contains(a.wait().message(), "gated"));
    CHECK_FALSE(b.cache->contains(7));
    CHECK(c.ready());
    CHECK(c.wait().code() == code);
    CHECK(b.cache->in_use() == 1);
    b.file.bad(7, false);
    broken = false;
    b.load(7);  // in the other slot, while pins on the failed one live
    CHECK(c.wait().code() == code);
    a.release();
    CHECK(b.cache->in_use() == 2);
    c.release();
    CHECK(b.cache->in_use() == 1);
    CHECK(b.cache->ready(7));
    CHECK(b.cause(Cause::kDemand).loads == 2);
  }
}

TEST_CASE("A failed load that nobody waits for gives its slot back", "[slot_cache]") {
  Bench b(1);
  b.file.bad(7, true);
  b.get(7).release();
  while (!b.queue->idle()) std::this_thread::yield();
  b.load(3);  // the only slot
  CHECK(b.cache->prefetch(7, Cause::kPrevious));
  b.settle(7);
  CHECK_FALSE(b.cache->contains(7));
  CHECK(b.cache->in_use() == 0);
  CHECK(b.cause(Cause::kPrevious).wasted == 1);
  CHECK(b.cause(Cause::kPrevious).loads == 1);
  auto refused = b.cache->acquire(1000);
  CHECK(refused.status().code() == Code::kNotFound);
  CHECK_FALSE(b.cache->prefetch(1000, Cause::kPrevious));
  b.load(2);  // the slot of the refused key is free
  CHECK(b.cache->stats().misses == 3);
}

TEST_CASE("Guesses: useful, late and promoted, wasted, cancelled", "[slot_cache]") {
  Bench b(4);
  REQUIRE(b.cache->prefetch(1, Cause::kLookahead));
  CHECK_FALSE(b.cache->prefetch(1, Cause::kNearMiss));
  b.settle(1);
  b.load(1);
  b.load(1);
  CHECK(b.cause(Cause::kLookahead).useful == 1);
  CHECK(b.cause(Cause::kLookahead).useful_bytes == kSlot);
  CHECK(b.cache->stats().hits == 2);

  b.file.open(false);
  REQUIRE(b.cache->prefetch(2, Cause::kNearMiss));
  b.file.wait_started(2);  // at the drive
  REQUIRE(b.cache->prefetch(3, Cause::kSequential));
  REQUIRE(b.cache->prefetch(4, Cause::kSequential));
  {
    auto four = b.get(4);  // promoted past 3
    b.file.open(true);
    REQUIRE(four.wait().ok());
    CHECK(holds(four.data(), 4));
  }
  b.settle(3);
  CHECK(b.file.order() == std::vector<int64_t>{1, 2, 4, 3});
  CHECK(b.cause(Cause::kSequential).late == 1);
  CHECK(b.cause(Cause::kSequential).late_bytes == kSlot);
  b.cache->drop(3);
  CHECK(b.cause(Cause::kSequential).wasted == 1);
  CHECK(b.cause(Cause::kSequential).wasted_bytes == kSlot);

  b.file.open(false);
  REQUIRE(b.cache->prefetch(5, Cause::kFrequency));
  b.file.wait_started(5);
  b.load(2);
  REQUIRE(b.cache->prefetch(6, Cause::kFrequency));  // takes 1's slot
  b.cache->cancel_speculation();
  CHECK(b.cache->contains(5));
  CHECK_FALSE(b.cache->contains(6));
  CHECK(b.cause(Cause::kFrequency).cancelled == 1);
  CHECK(b.cause(Cause::kFrequency).loads == 2);
  CHECK(b.cause(Cause::kFrequency).bytes == kSlot);
  b.cache->drop(5);  // at the drive: forgotten, its slot follows
  CHECK_FALSE(b.cache->contains(5));
  CHECK(b.cause(Cause::kFrequency).wasted == 1);
  const int32_t before = b.cache->in_use();
  b.file.open(true);
  while (b.cache->in_use() == before) std::this_thread::yield();
  CHECK(b.cache->in_use() == before - 1);
}

TEST_CASE("A demand that finds no slot cancels a guess that is still queued", "[slot_cache]") {
  Bench b(3);
  b.file.open(false);
  auto pin = b.get(0);
  b.file.wait_started(1);
  REQUIRE(b.cache->prefetch(1, Cause::kLookahead));
  REQUIRE(b.cache->prefetch(2, Cause::kNearMiss));
  CHECK_FALSE(b.cache->prefetch(3, Cause::kLookahead));  // a guess cancels nothing
  auto three = b.get(3);                                 // the newest guess gives way
  CHECK_FALSE(b.cache->contains(2));
  auto four = b.get(4);
  CHECK_FALSE(b.cache->contains(1));
  CHECK(b.full(5));
  b.file.open(true);
  CHECK((three.wait().ok() && four.wait().ok() && pin.wait().ok()));
  CHECK((holds(three.data(), 3) && holds(four.data(), 4)));
  CHECK(b.cause(Cause::kLookahead).cancelled == 1);
  CHECK(b.cause(Cause::kNearMiss).cancelled == 1);
  CHECK(b.cause(Cause::kNearMiss).bytes == 0);
}

TEST_CASE("A guess does not take a fresh guess's slot, but a stale one's", "[slot_cache]") {
  Bench b(4);
  for (SlotKey key = 0; key < 4; ++key) b.load(key);
  for (SlotKey key = 10; key < 12; ++key) {
    REQUIRE(b.cache->prefetch(key, Cause::kLookahead));
    b.settle(key);
  }
  CHECK_FALSE(b.cache->prefetch(12, Cause::kLookahead));  // half are guesses: the rest is for what was asked for
  CHECK((b.cache->contains(2) && b.cache->contains(3)));
  CHECK_FALSE((b.cache->contains(0) || b.cache->contains(1)));
  for (int i = 0; i < 4; ++i) b.load(3);
  REQUIRE(b.cache->prefetch(12, Cause::kLookahead));
  b.settle(12);
  CHECK_FALSE(b.cache->contains(10));
  // A demand takes the policy's victim before a fresh guess.
  b.load(20);  // 11 is stale
  CHECK_FALSE(b.cache->contains(11));
  b.load(21);
  CHECK_FALSE(b.cache->contains(2));
  CHECK(b.cache->contains(12));
  // With everything else pinned the fresh guess goes.
  auto a = b.get(3), c = b.get(20), d = b.get(21);
  REQUIRE(b.cache->contains(12));
  b.cache->drop(12);
  REQUIRE(b.cache->prefetch(13, Cause::kLookahead));
  b.settle(13);
  b.load(22);
  CHECK_FALSE(b.cache->contains(13));
  CHECK(b.cause(Cause::kLookahead).wasted == 4);
}

TEST_CASE("Drop forgets at once; pins stay good", "[slot_cache]") {
  Bench b(3);
  auto old = b.get(1);
  REQUIRE(old.wait().ok());
  b.cache->drop(1);
  b.cache->drop(1);
  CHECK_FALSE(b.cache->contains(1));
  CHECK(holds(old.data(), 1));
  auto fresh = b.get(1);
  REQUIRE(fresh.wait().ok());
  CHECK(fresh.data() != old.data());
  b.file.open(false);
  auto loading = b.get(2);
  b.cache->drop(2);
  loading.release();
  CHECK(b.cache->in_use() == 3);
  b.file.open(true);
  while (b.cache->in_use() != 2) std::this_thread::yield();
  old.release();
  CHECK(b.cache->in_use() == 1);
  b.cache->drop(1);
  CHECK(b.cache->in_use() == 1);
  fresh.release();
  CHECK(b.cache->in_use() == 0);
  b.file.bad(4, true);
  b.file.open(false);
  auto failing = b.get(4);
  b.cache->drop(4);
  b.file.open(true);
  CHECK(failing.wait().code() == Code::kIo);
}

TEST_CASE("Inserted bytes are there for others once published", "[slot_cache]") {
  Bench b(2);
  auto mine = b.cache->insert(9);
  REQUIRE(mine);
  CHECK(b.cache->contains(9));
  CHECK_FALSE(b.cache->ready(9));
  auto theirs = b.get(9);
  CHECK_FALSE(theirs.ready());
  CHECK_FALSE(b.cache->prefetch(9, Cause::kLookahead));
  bool right = false;
  std::thread waiter([&] { right = theirs.wait().ok() && holds(theirs.data(), 900); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::memcpy(mine->data(), test::pattern(content_at(900), kSlot).data(), static_cast<size_t>(kSlot));
  b.cache->publish(*mine);
  waiter.join();
  CHECK(right);
  CHECK((b.cache->ready(9) && mine->wait().ok()));
  mine.reset();
  theirs.release();
  CHECK(b.cache->stats().inserted == 1);
  CHECK(b.file.order().empty());
  // Given up.
  auto second = b.cache->insert(1000);
  REQUIRE(second);
  auto other = b.cache->find(1000);
  REQUIRE(other);
  Status given_up;
  std::thread hopeful([&] { given_up = other->wait(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  second.reset();
  hopeful.join();
  CHECK(given_up.code() == Code::kCancelled);
  CHECK_FALSE(b.cache->contains(1000));
  other.reset();
  CHECK(b.cache->in_use() == 1);
  // Dropped before it is published.
  auto third = b.cache->insert(1001);
  REQUIRE(third);
  b.cache->drop(1001);
  b.cache->publish(*third);
  third.reset();
  CHECK(b.cache->in_use() == 1);
}

TEST_CASE("Memory comes in pieces, on pages, and a refusal leaves the slots there are", "[slot_cache]") {
  {
    Bench b(1000, "lru", 40 * kSlot);  // a first piece of 4 MiB is refused, so are smaller ones
    for (SlotKey key = 0; key < 60; ++key) b.load(key);
    CHECK(b.cache->in_use() >= 30);
    CHECK(b.cache->in_use() <= 40);
    CHECK(b.budget.used_bytes() <= 40 * kSlot);
    CHECK(b.cache->stats().evicted == 60 - b.cache->in_use());
  }
  {
    Bench b(4, "lru", kSlot - 1);
    CHECK(b.cache->acquire(1).status().code() == Code::kNoMemory);
    CHECK(contains(b.cache->acquire(1).status().message(), "slots"));
    CHECK_FALSE(b.cache->prefetch(1, Cause::kLookahead));
    CHECK_FALSE(b.cache->insert(1));
    CHECK(b.cache->in_use() == 0);
  }
  Bench b(1);
  Budget small("--ram", 9 << 20);
  HostArena arena(&small);
  const auto create = [&](int32_t n, int64_t bytes, const PolicyOptions& policy, bool all) {
    return SlotCache::create(&arena, "experts", n, bytes, policy, b.queue.get(), &b.source, all);
  };
  CHECK(create(10, 1 << 20, {}, true).status().code() == Code::kNoMemory);
  CHECK(create(0, 1 << 20, {}, false).status().code() == Code::kInvalid);
  CHECK(create(1, 0, {}, false).status().code() == Code::kInvalid);
  CHECK(create(INT32_MAX, int64_t{1} << 40, {}, false).status().code() == Code::kInvalid);
  CHECK(contains(create(1, 1, {"mru", 0, {}}, false).status().message(), "experts"));
  {
    auto cache = create(10, (1 << 20) - 1, {}, false);
    REQUIRE(cache.ok());
    CHECK((*cache)->slot_bytes() == 1 << 20);
    CHECK(small.used_bytes() == 0);
    std::vector<SlotCache::Pin> pins;
    for (SlotKey key = 0; key < 10; ++key) {
      auto pin = (*cache)->acquire(key);
      REQUIRE(pin.ok());
      CHECK(pin->has_value() == (key < 9));
      if (*pin) pins.push_back(std::move(**pin));
    }
    for (const auto& pin : pins) CHECK((pin.wait().ok() && holds(pin.data(), static_cast<int64_t>(pin.key()))));
  }
  CHECK(small.used_bytes() == 0);
}

TEST_CASE("Names of causes differ", "[slot_cache]") {
  std::set<std::string> names;
  for (int i = 0; i < static_cast<int>(Cause::kCount); ++i) names.insert(cause_name(static_cast<Cause>(i)));
  CHECK(names.size() == static_cast<size_t>(Cause::kCount));
}

// What the cache must do when every read ends before the next call: plain lists, lru.
class Twin {
 public:
  struct Held {
    SlotKey key = 0;
    int64_t tag = 0;
    int pins = 0;
    bool mapped = true, guess = false, failed = false;
    Cause cause = Cause::kDemand;
    int64_t born = 0;
  };
  using Slot = std::list<Held>::iterator;
  explicit Twin(int n_slots) : n_(n_slots) {}

  Slot find(SlotKey key) {
    return std::find_if(held.begin(), held.end(), [&](const Held& h) { return h.mapped && h.key == key; });
  }
  void ask(Slot h) {
    ++stats.hits;
    if (h->guess) {
      ++of(*h).useful;
      of(*h).useful_bytes += kSlot;
      h->guess = false;
      h->born = 0;
    }
    recent.remove(h->key);
    recent.push_back(h->key);
    ++h->pins;
  }
  // False: no slot.
  bool obtain(bool demand) {
    if (static_cast<int>(held.size()) < n_) return true;
    const Slot guess = oldest_guess();
    if (guess != held.end() && demands() - guess->born >= n_) return evict(guess);
    const auto guesses = std::count_if(held.begin(), held.end(), [](const Held& h) { return h.guess; });
    if (demand || guesses < std::max(1, n_ / 2)) {
      for (const SlotKey key : recent) {
        const Slot h = find(key);
        if (h->pins == 0) return evict(h);
      }
    }
    if (demand && guess != held.end()) return evict(guess);
    ++stats.refused;
    return false;
  }
  Slot add(SlotKey key, int64_t tag, Cause cause, bool guess) {
    held.push_back({key, tag, 0, true, guess, false, cause, guess ? demands() : 0});
    if (!guess) recent.push_back(key);
    return std::prev(held.end());
  }
  void forget(Slot h) {
    if (h->guess) {
      ++of(*h).wasted;
      of(*h).wasted_bytes += kSlot;
      h->guess = false;
    }
    recent.remove(h->key);
    h->mapped = false;
    if (h->pins == 0) held.erase(h);
  }
  void unpin(Slot h) {
    if (--h->pins == 0 && !h->mapped) held.erase(h);
  }
  int64_t demands() const { return stats.hits + stats.joined + stats.misses; }
  CauseStats& of(const Held& h) { return stats.cause[static_cast<size_t>(h.cause)]; }
  int pinned() const {
    return static_cast<int>(std::count_if(held.begin(), held.end(), [](const Held& h) { return h.pins > 0; }));
  }

  std::list<Held> held;
  std::list<SlotKey> recent;  // least recent first; without guesses
  SlotCacheStats stats;

 private:
  Slot oldest_guess() {  // held is in the order of loading
    return std::find_if(held.begin(), held.end(), [](const Held& h) { return h.guess; });
  }
  bool evict(Slot h) {
    ++stats.evicted;
    forget(h);
    return true;
  }
  const int n_;
};

TEST_CASE("The cache does what its twin does", "[slot_cache]") {
  std::mt19937_64 random(3);
  int64_t evicted = 0, useful = 0, wasted = 0, failed = 0, refused = 0;
  for (int round = 0; round < 60; ++round) {
    const int n = 1 + static_cast<int>(random() % 10);
    Bench b(n);
    Twin twin(n);
    struct Both {
      SlotCache::Pin pin;
      Twin::Slot slot;
    };
    std::vector<Both> pins;
    std::set<int64_t> bad;
    int64_t serial = 1000;
    const uint64_t keys = 2 + random() % 25;
    for (int step = 0; step < 400; ++step) {
      const SlotKey key = random() % keys;
      const bool is_bad = bad.count(static_cast<int64_t>(key)) != 0;
      INFO("round " << round << " step " << step << " key " << key);
      switch (random() % 15) {
        case 0:
        case 1:
        case 2:
        case 3: {
          auto pin = b.cache->acquire(key);
          REQUIRE(pin.ok());
          auto h = twin.find(key);
          if (h != twin.held.end()) {
            REQUIRE(*pin);
            twin.ask(h);
          } else {
            const bool got = twin.obtain(true);
            REQUIRE(pin->has_value() == got);
            if (!got) break;
            h = twin.add(key, static_cast<int64_t>(key), Cause::kDemand, false);
            h->pins = 1;
            ++twin.stats.misses;
            ++twin.of(*h).loads;
            twin.of(*h).bytes += kSlot;
            const Status status = (*pin)->wait();
            REQUIRE(status.ok() == !is_bad);
            if (is_bad) {
              ++failed;
              h->failed = true;
              twin.forget(h);
            }
          }
          pins.push_back({std::move(**pin), h});
          break;
        }
        case 4: {
          auto pin = b.cache->find(key);
          const auto h = twin.find(key);
          REQUIRE(pin.has_value() == (h != twin.held.end()));
          if (!pin) break;
          twin.ask(h);
          pins.push_back({std::move(*pin), h});
          break;
        }
        case 5:
        case 6: {
          const auto cause = static_cast<Cause>(1 + random() % 5);
          const bool started = b.cache->prefetch(key, cause);
          const bool there = twin.find(key) != twin.held.end();
          REQUIRE(started == (!there && twin.obtain(false)));
          if (!started) break;
          const auto h = twin.add(key, static_cast<int64_t>(key), cause, true);
          ++twin.of(*h).loads;
          twin.of(*h).bytes += kSlot;
          b.settle(key);
          if (is_bad) twin.forget(h);
          break;
        }
        case 7: {
          if (twin.find(key) != twin.held.end()) break;
          auto pin = b.cache->insert(key);
          const bool got = twin.obtain(true);
          REQUIRE(pin.has_value() == got);
          if (!got) break;
          const auto h = twin.add(key, ++serial, Cause::kDemand, false);
          h->pins = 1;
          ++twin.stats.inserted;
          if (random() % 8 == 0) {  // given up
            pin.reset();
            h->pins = 0;
            twin.forget(h);
            break;
          }
          const std::string bytes = test::pattern(content_at(serial), kSlot);
          std::memcpy(pin->data(), bytes.data(), bytes.size());
          b.cache->publish(*pin);
          pins.push_back({std::move(*pin), h});
          break;
        }
        case 8: {
          b.cache->drop(key);
          const auto h = twin.find(key);
          if (h != twin.held.end()) twin.forget(h);
          break;
        }
        case 9:
          if (bad.erase(static_cast<int64_t>(key)) == 0 && bad.size() < 3) bad.insert(static_cast<int64_t>(key));
          b.file.bad(static_cast<int64_t>(key), bad.count(static_cast<int64_t>(key)) != 0);
          break;
        default:
          if (pins.empty()) break;
          std::swap(pins[random() % pins.size()], pins.back());
          twin.unpin(pins.back().slot);
          pins.pop_back();
      }
      for (SlotKey k = 0; k < keys; ++k) {
        const bool there = twin.find(k) != twin.held.end();
        REQUIRE(b.cache->contains(k) == there);
        REQUIRE(b.cache->ready(k) == there);
      }
      REQUIRE(b.cache->pinned() == twin.pinned());
      REQUIRE(b.cache->in_use() == static_cast<int32_t>(twin.held.size()));
      for (const Both& both : pins) {
        REQUIRE(both.pin.ready());
        REQUIRE(both.pin.key() == both.slot->key);
        REQUIRE(both.pin.wait().ok() == !both.slot->failed);
        if (!both.slot->failed && step % 8 == 0) REQUIRE(holds(both.pin.data(), both.slot->tag));
      }
      const auto s = b.cache->stats();
      REQUIRE(s.hits == twin.stats.hits);
      REQUIRE(s.joined == 0);
      REQUIRE(s.misses == twin.stats.misses);
      REQUIRE(s.inserted == twin.stats.inserted);
      REQUIRE(s.evicted == twin.stats.evicted);
      REQUIRE(s.refused == twin.stats.refused);
      for (size_t c = 0; c < static_cast<size_t>(Cause::kCount); ++c) {
        const CauseStats &x = s.cause[c], &y = twin.stats.cause[c];
        REQUIRE((x.loads == y.loads && x.bytes == y.bytes && x.useful == y.useful && x.useful_bytes == y.useful_bytes &&
                 x.late == 0 && x.wasted == y.wasted && x.wasted_bytes == y.wasted_bytes && x.cancelled == 0));
        useful += step == 399 ? x.useful : 0;
        wasted += step == 399 ? x.wasted : 0;
      }
    }
    evicted += twin.stats.evicted;
    refused += twin.stats.refused;
  }
  INFO(evicted << " evicted, " << useful << " useful, " << wasted << " wasted, " << failed << " failed, " << refused
               << " refused");
  CHECK((evicted > 500 && useful > 100 && wasted > 100 && failed > 20 && refused > 100));
}

// With the cache at rest and no pins: every load is accounted for.
void check_books(SlotCache& cache, int64_t demands, SlotKey keys) {
  for (SlotKey key = 0; key < keys; ++key) cache.drop(key);
  while (cache.in_use() > 0) std::this_thread::yield();
  CHECK(cache.pinned() == 0);
  const auto s = cache.stats();
  CHECK(s.hits + s.joined + s.misses == demands);
  CHECK(s.cause[0].loads == s.misses);
  CHECK(s.cause[0].bytes == s.misses * kSlot);
  int64_t useful = 0, late = 0;
  for (size_t i = 1; i < static_cast<size_t>(Cause::kCount); ++i) {
    const CauseStats& c = s.cause[i];
    CHECK(c.loads == c.useful + c.late + c.wasted + c.cancelled);
    CHECK(c.bytes == c.useful_bytes + c.late_bytes + c.wasted_bytes);
    CHECK(c.bytes == (c.loads - c.cancelled) * kSlot);
    useful += c.useful;
    late += c.late;
  }
  CHECK(useful <= s.hits);
  CHECK(late <= s.joined);
  CHECK(s.service_seconds > 0);
}

TEST_CASE("Threads share the cache", "[slot_cache]") {
  const test::TempFolder folder;
  test::put_file(folder / "data", test::pattern(0, kKeys * kSlot));
  for (const std::string policy : {"lru", "frequency"}) {
    FaultyFileSystem files(FileSystem::real(),
                           {{.kind = FaultKind::kReadError, .probability = 0.1},
                            {.kind = FaultKind::kSlowRead, .probability = 0.1, .delay = std::chrono::milliseconds(1)}});
    auto file = files.open(folder / "data", OpenMode::kRead);
    REQUIRE(file.ok());
    FileSource source(file->get());
    Budget budget("--ram", -1);
    HostArena arena(&budget);
    auto queue = IoQueue::create({});
    REQUIRE(queue.ok());
    constexpr int kThreads = 4;
    constexpr SlotKey kOwn = 8;  // keys that only their thread inserts and drops, the others find
    auto made = SlotCache::create(&arena, "slots", 20, kSlot, {policy, 0, {}}, queue->get(), &source);
    REQUIRE(made.ok());
    SlotCache& cache = **made;
    std::vector<std::string> wanted;
    for (int64_t k = 0; k < kKeys + kThreads * static_cast<int64_t>(kOwn); ++k) {
      wanted.push_back(test::pattern(content_at(k), kSlot));
    }
    std::atomic<int64_t> demands{0}, wrong{0}, errors{0}, nulls{0};
    const auto work = [&](int thread) {
      std::mt19937_64 random(static_cast<uint64_t>(thread) + 77);
      std::vector<SlotCache::Pin> pins;
      const auto keep = [&](SlotCache::Pin pin) {
        ++demands;
        pins.push_back(std::move(pin));
      };
      const auto check = [&](const SlotCache::Pin& pin) {
        if (!pin.wait().ok()) {
          ++errors;
        } else if (std::memcmp(pin.data(), wanted[pin.key()].data(), static_cast<size_t>(kSlot)) != 0) {
          ++wrong;
        }
      };
      for (int step = 0; step < 3000; ++step) {
        const SlotKey key = std::min(random() % kKeys, random() % kKeys);
        switch (random() % 10) {
          case 0:
          case 1:
          case 2: {
            auto pin = cache.acquire(key);
            if (!pin.ok()) {
              ++wrong;
            } else if (*pin) {
              keep(std::move(**pin));
            } else {
              ++nulls;
            }
            break;
          }
          case 3:
            if (auto pin = cache.find(kKeys + random() % (kThreads * kOwn))) keep(std::move(*pin));
            break;
          case 4:
          case 5:
            cache.prefetch(key, static_cast<Cause>(1 + random() % 5));
            break;
          case 6: {
            const SlotKey own = static_cast<SlotKey>(kKeys) + static_cast<SlotKey>(thread) * kOwn + random() % kOwn;
            if (cache.contains(own)) {
              if (random() % 2 == 0) cache.drop(own);
              break;
            }
            auto pin = cache.insert(own);
            if (!pin || random() % 8 == 0) break;
            std::memcpy(pin->data(), wanted[own].data(), static_cast<size_t>(kSlot));
            cache.publish(*pin);
            break;
          }
          case 7:
            if (random() % 4 == 0) cache.drop(key);
            if (random() % 16 == 0) cache.cancel_speculation();
            if (random() % 16 == 0) (void)cache.stats();
            break;
          default:
            break;
        }
        while (pins.size() > random() % 6) {
          std::swap(pins[random() % pins.size()], pins.back());
          if (random() % 8 != 0) check(pins.back());
          pins.pop_back();
        }
      }
      for (const auto& pin : pins) check(pin);
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
    for (auto& t : threads) t.join();
    CHECK(wrong == 0);
    CHECK(files.hits() > 0);
    INFO(policy << " demands " << demands << " errors " << errors << " without a slot " << nulls);
    CHECK(demands > 3000);
    check_books(cache, demands, kKeys + kThreads * kOwn);
  }
}

TEST_CASE("A cache may go while its guesses are loading", "[slot_cache]") {
  for (int round = 0; round < 50; ++round) {
    Bench b(8);
    for (SlotKey key = 0; key < 8; ++key) CHECK(b.cache->prefetch(key, Cause::kLookahead));
    if (round % 2 == 0) b.get(3).release();
    b.cache.reset();
  }
}

// Not a test of speed: prints what a hit costs. Run with "[.slot_cache_ns]".
TEST_CASE("Cost of a hit", "[.slot_cache_ns]") {
  Bench b(1);
  constexpr int32_t kSlots = 1000000;
  for (const std::string policy : {"lru", "frequency"}) {
    auto made = SlotCache::create(&b.arena, "blocks", kSlots, 4096, {policy, 0, {}}, b.queue.get(), &b.source);
    REQUIRE(made.ok());
    SlotCache& cache = **made;
    // Processor time: what others do on the machine is not ours.
    auto seconds = [begin = std::clock()]() mutable {
      const auto now = std::clock();
      return static_cast<double>(now - std::exchange(begin, now)) / CLOCKS_PER_SEC;
    };
    for (SlotKey key = 0; key < kSlots; ++key) cache.publish(*cache.insert(key));
    const double fill = seconds();
    std::mt19937_64 random(1);
    // Anywhere, and as decoding does it: nearly the same 4000 blocks, token after token.
    std::vector<SlotKey> keys(4000000), near(keys.size());
    for (SlotKey& key : keys) key = random() % kSlots;
    for (size_t i = 0; i < near.size(); ++i) near[i] = keys[i % 4000];
    (void)seconds();
    for (const SlotKey key : keys) (void)cache.acquire(key);
    const double hit = seconds();
    for (const SlotKey key : near) (void)cache.acquire(key);
    const double near_hit = seconds();
    for (size_t i = 0; i < 500000; ++i) cache.publish(*cache.insert(kSlots + i));
    const double evict = seconds();
    std::vector<SlotCache::Pin> pins;
    for (size_t i = 0; i < 300000; ++i) {
      if (auto pin = cache.find(kSlots + i)) pins.push_back(std::move(*pin));
    }
    const size_t found = pins.size();
    (void)seconds();
    for (size_t i = 0; i < 300000; ++i) cache.publish(*cache.insert(2 * kSlots + i));
    const double pinned = seconds();
    WARN(policy << ": insert " << fill / kSlots * 1e9 << " ns, acquire hit and release "
                << hit / static_cast<double>(keys.size()) * 1e9 << " ns (the same 4000: "
                << near_hit / static_cast<double>(near.size()) * 1e9 << " ns), insert that evicts " << evict / 5e5 * 1e9
                << " ns, with " << found << " pinned " << pinned / 3e5 * 1e9 << " ns");
  }
}

}  // namespace
}  // namespace firn::storage
