// Loads settle lazily: nothing runs when a read ends, whoever looks at a loading slot next asks its ticket. So the
// queue's thread never needs the cache's mutex.
#include "storage/slot_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace firn::storage {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLargeSlot = int64_t{1} << 20;   // a buffer of its own
constexpr int64_t kChunkBytes = int64_t{4} << 20;  // shared by smaller ones

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

const char* cause_name(Cause cause) {
  switch (cause) {
    case Cause::kDemand:
      return "demand";
    case Cause::kLookahead:
      return "lookahead";
    case Cause::kNearMiss:
      return "near_miss";
    case Cause::kPrevious:
      return "previous";
    case Cause::kFrequency:
      return "frequency";
    case Cause::kSequential:
      return "sequential";
    case Cause::kCount:
      break;
  }
  return "unknown";
}

struct SlotCache::Core {
  enum class State : uint8_t { kEmpty, kLoading, kFilling, kReady, kFailed };
  struct Slot {
    std::byte* data = nullptr;
    SlotKey key = 0;
    State state = State::kEmpty;
    bool asked = false;   // somebody demanded it
    bool listed = false;  // the table finds it under its key
    Cause cause = Cause::kDemand;
    int32_t pins = 0;
    int64_t bytes = 0;  // of its read
    IoTicket ticket;
    Status error;
    double service = 0;  // seconds its read took, once settled
  };

  std::string what;
  Arena* arena = nullptr;
  IoQueue* queue = nullptr;
  SlotSource* source = nullptr;
  int64_t slot_bytes = 0;
  std::unique_ptr<CachePolicy> policy;

  mutable std::mutex mutex;
  std::condition_variable filled;  // a kFilling slot was published or given up
  // All below guarded by mutex.
  int32_t n_slots = 0;  // shrinks to what memory there was
  std::vector<Slot> slots;
  std::vector<Buffer> memory;
  std::vector<int32_t> free;
  std::unordered_map<SlotKey, int32_t> table;
  std::vector<int32_t> guesses;  // speculative, loading when last looked at, not asked for
  int32_t n_unasked = 0;         // speculative slots nobody asked for, loading or ready
  int32_t n_pinned = 0;
  SlotCacheStats stats;

  CauseStats& of(const Slot& s) { return stats.cause[static_cast<size_t>(s.cause)]; }
  Slot& at(int32_t slot) { return slots[static_cast<size_t>(slot)]; }

  Status grow() {
    const int64_t made = static_cast<int64_t>(slots.size());
    int64_t n = slot_bytes >= kLargeSlot ? 1 : kChunkBytes / slot_bytes;
    n = std::min<int64_t>(n, n_slots - made);
    auto buffer = arena->allocate(std::max(n * slot_bytes, n == 1 ? slot_bytes : kLargeSlot), what);
    if (!buffer.ok() && n > 1) {
      n = 1;
      buffer = arena->allocate(std::max(slot_bytes, kLargeSlot), what);
    }
    if (!buffer.ok()) return buffer.status();
    auto* data = buffer->as<std::byte>();
    memory.push_back(std::move(buffer).value());
    for (int64_t i = 0; i < n; ++i) {
      slots.emplace_back().data = data + i * slot_bytes;
      free.push_back(static_cast<int32_t>(made + n - 1 - i));
    }
    return {};
  }

  // Takes note of a read that has ended.
  void settle(int32_t slot) {
    Slot& s = at(slot);
    if (s.state != State::kLoading || !s.ticket.done()) return;
    const Status status = s.ticket.wait();
    s.service = s.ticket.seconds();
    s.ticket = IoTicket();
    if (status.ok()) {
      s.state = State::kReady;
      if (s.asked) stats.service_seconds += s.service;
      return;
    }
    s.state = State::kFailed;
    s.error = status;
    unlist(slot);  // its slot goes with its last pin, or when one is wanted
  }

  void unlist(int32_t slot) {
    Slot& s = at(slot);
    if (s.listed) table.erase(s.key);
    s.listed = false;
  }

  // Gives up what an unpinned slot holds. REQUIRES no read in flight.
  void clear(int32_t slot) {
    Slot& s = at(slot);
    if (s.state == State::kEmpty) return;
    if (!s.asked) {
      ++of(s).wasted;
      of(s).wasted_bytes += s.bytes;
      --n_unasked;
    }
    forget(slot);
  }

  // The same without counting a guess as wasted.
  void forget(int32_t slot) {
    Slot& s = at(slot);
    unlist(slot);
    policy->removed(slot);
    s.state = State::kEmpty;
    s.ticket = IoTicket();
    s.error = Status();
    s.asked = false;
    s.bytes = 0;
    s.service = 0;
    free.push_back(slot);
  }

  // A read that has not begun is taken back; true if the slot is empty now.
  bool cancel(int32_t slot) {
    Slot& s = at(slot);
    if (s.state != State::kLoading || s.asked || s.pins > 0 || !s.ticket.cancel()) return false;
    CauseStats& c = of(s);
    ++c.cancelled;
    c.bytes -= s.bytes;
    --n_unasked;
    forget(slot);
    return true;
  }

  // An empty slot, or -1. For a demand guesses give way too.
  Result<int32_t> take(bool demand) {
    if (free.empty() && static_cast<int32_t>(slots.size()) < n_slots) {
      if (const Status s = grow(); !s.ok()) {
        if (slots.empty()) return s;
        n_slots = static_cast<int32_t>(slots.size());
      }
    }
    if (free.empty()) {
      const int32_t victim = policy->victim([&](int32_t slot) {
        if (at(slot).pins > 0) return false;
        settle(slot);
        const Slot& s = at(slot);
        if (!s.listed && s.state != State::kLoading) return true;  // failed or dropped
        return s.state == State::kReady && (s.asked || demand);
      });
      if (victim >= 0) {
        stats.evicted += at(victim).listed;
        clear(victim);
      }
    }
    if (free.empty() && demand) {
      while (!guesses.empty() && free.empty()) {
        const int32_t slot = guesses.back();
        guesses.pop_back();
        cancel(slot);
      }
    }
    if (free.empty()) {
      ++stats.refused;
      return -1;
    }
    const int32_t slot = free.back();
    free.pop_back();
    return slot;
  }

  void list(int32_t slot, SlotKey key) {
    Slot& s = at(slot);
    s.key = key;
    s.listed = true;
    table[key] = slot;
    policy->inserted(slot, key);
  }

  // Starts the key's read into a slot that take() gave.
  Status load(int32_t slot, SlotKey key, Cause cause) {
    Slot& s = at(slot);
    auto read = source->read_of(key, {s.data, static_cast<size_t>(slot_bytes)});
    if (!read.ok()) {
      free.push_back(slot);
      return read.status();
    }
    s.cause = cause;
    s.asked = cause == Cause::kDemand;
    s.bytes = 0;
    for (const IoPiece& piece : read->pieces) s.bytes += piece.bytes;
    read->io_class = s.asked ? IoClass::kDemand : IoClass::kSpeculative;
    ++of(s).loads;
    of(s).bytes += s.bytes;
    s.state = State::kLoading;
    list(slot, key);
    s.ticket = queue->submit(std::move(read).value());
    if (!s.asked) {
      ++n_unasked;
      if (guesses.size() > 2 * slots.size() + 64) prune_guesses();
      guesses.push_back(slot);
    }
    return {};
  }

  void prune_guesses() {
    std::sort(guesses.begin(), guesses.end());
    guesses.erase(std::unique(guesses.begin(), guesses.end()), guesses.end());
    std::erase_if(guesses, [&](int32_t slot) {
      settle(slot);
      return at(slot).state != State::kLoading || at(slot).asked;
    });
  }

  // A demand for what a slot holds or is about to.
  void demand(int32_t slot) {
    Slot& s = at(slot);
    const bool there = s.state == State::kReady;
    ++(there ? stats.hits : stats.joined);
    if (!s.asked) {
      s.asked = true;
      --n_unasked;
      CauseStats& c = of(s);
      ++(there ? c.useful : c.late);
      (there ? c.useful_bytes : c.late_bytes) += s.bytes;
      if (there) {
        stats.service_seconds += s.service;
      } else {
        s.ticket.promote();
      }
    }
    policy->used(slot);
    pin(slot);
  }

  void pin(int32_t slot) {
    if (at(slot).pins++ == 0) ++n_pinned;
  }

  void unpin(int32_t slot) {
    const std::lock_guard lock(mutex);
    Slot& s = at(slot);
    FIRN_CHECK(s.pins > 0, "a pin released twice");
    if (--s.pins > 0) return;
    --n_pinned;
    if (s.state == State::kFilling) {  // given up
      s.asked = true;
      forget(slot);
      filled.notify_all();
      return;
    }
    settle(slot);
    // Dropped or failed meanwhile.
    if (!s.listed && s.state != State::kLoading && s.state != State::kEmpty) clear(slot);
  }

  // Slot of a key that is ready or loading, or -1.
  int32_t look(SlotKey key) {
    const auto found = table.find(key);
    if (found == table.end()) return -1;
    const int32_t slot = found->second;
    settle(slot);
    return at(slot).listed && at(slot).state != State::kEmpty ? slot : -1;
  }
};

SlotCache::SlotCache(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Result<std::unique_ptr<SlotCache>> SlotCache::create(Arena* arena, const std::string& what, int32_t n_slots,
                                                     int64_t slot_bytes, const PolicyOptions& policy, IoQueue* queue,
                                                     SlotSource* source, bool all_at_once) {
  FIRN_CHECK(n_slots >= 1 && slot_bytes >= 1, "a cache without slots");
  auto core = std::make_unique<Core>();
  core->what = what;
  core->arena = arena;
  core->queue = queue;
  core->source = source;
  core->slot_bytes = (slot_bytes + kPage - 1) / kPage * kPage;
  core->n_slots = n_slots;
  FIRN_ASSIGN(core->policy, make_policy(policy, n_slots));
  while (all_at_once && static_cast<int32_t>(core->slots.size()) < n_slots) FIRN_TRY(core->grow());
  return std::unique_ptr<SlotCache>(new SlotCache(std::move(core)));
}

SlotCache::~SlotCache() {
  std::vector<IoTicket> reads;
  {
    const std::lock_guard lock(core_->mutex);
    FIRN_CHECK(core_->n_pinned == 0, fmt::format("{} slots of the {} are still pinned", core_->n_pinned, core_->what));
    for (const Core::Slot& s : core_->slots) {
      if (s.state == Core::State::kLoading) reads.push_back(s.ticket);
    }
  }
  for (const IoTicket& read : reads) {
    if (!read.cancel()) (void)read.wait();
  }
}

Result<std::optional<SlotCache::Pin>> SlotCache::acquire(SlotKey key) {
  const std::lock_guard lock(core_->mutex);
  if (const int32_t slot = core_->look(key); slot >= 0) {
    core_->demand(slot);
    return std::optional<Pin>(Pin(this, slot));
  }
  FIRN_ASSIGN(const int32_t slot, core_->take(true));
  if (slot < 0) return std::optional<Pin>();
  FIRN_TRY(core_->load(slot, key, Cause::kDemand));
  ++core_->stats.misses;
  core_->pin(slot);
  return std::optional<Pin>(Pin(this, slot));
}

Result<std::optional<SlotCache::Pin>> SlotCache::acquire_waiting(SlotKey key) {
  for (;;) {
    FIRN_ASSIGN(auto pin, acquire(key));
    if (pin.has_value()) return pin;
    IoTicket guess;
    {
      const std::lock_guard lock(core_->mutex);
      core_->prune_guesses();
      for (const Core::Slot& s : core_->slots) {
        if (s.state == Core::State::kLoading && s.pins == 0) guess = s.ticket;
      }
    }
    if (!guess) return std::optional<Pin>();
    const auto start = std::chrono::steady_clock::now();
    (void)guess.wait();
    const std::lock_guard lock(core_->mutex);
    core_->stats.wait_seconds += seconds_since(start);
  }
}

std::optional<SlotCache::Pin> SlotCache::find(SlotKey key) {
  const std::lock_guard lock(core_->mutex);
  const int32_t slot = core_->look(key);
  if (slot < 0) return std::nullopt;
  core_->demand(slot);
  return Pin(this, slot);
}

bool SlotCache::contains(SlotKey key) const {
  const std::lock_guard lock(core_->mutex);
  return core_->look(key) >= 0;
}

bool SlotCache::ready(SlotKey key) const {
  const std::lock_guard lock(core_->mutex);
  const int32_t slot = core_->look(key);
  return slot >= 0 && core_->at(slot).state == Core::State::kReady;
}

bool SlotCache::prefetch(SlotKey key, Cause cause) {
  FIRN_CHECK(cause != Cause::kDemand, "a guess is no demand");
  const std::lock_guard lock(core_->mutex);
  if (core_->look(key) >= 0) return false;
  // Guesses take at most half of the cache.
  if (core_->n_unasked >= std::max(1, core_->n_slots / 2)) {
    ++core_->stats.refused;
    return false;
  }
  const auto slot = core_->take(false);
  if (!slot.ok() || *slot < 0) return false;
  return core_->load(*slot, key, cause).ok();
}

void SlotCache::cancel_speculation() {
  const std::lock_guard lock(core_->mutex);
  for (const int32_t slot : std::exchange(core_->guesses, {})) {
    if (!core_->cancel(slot) && core_->at(slot).state == Core::State::kLoading && !core_->at(slot).asked) {
      core_->guesses.push_back(slot);
    }
  }
}

std::optional<SlotCache::Pin> SlotCache::insert(SlotKey key) {
  const std::lock_guard lock(core_->mutex);
  FIRN_CHECK(core_->look(key) < 0, "a key is inserted that is there already");
  const auto slot = core_->take(true);
  if (!slot.ok() || *slot < 0) return std::nullopt;
  Core::Slot& s = core_->at(*slot);
  s.cause = Cause::kDemand;
  s.asked = true;
  s.state = Core::State::kFilling;
  core_->list(*slot, key);
  core_->pin(*slot);
  ++core_->stats.inserted;
  return Pin(this, *slot);
}

void SlotCache::publish(const Pin& pin) {
  const std::lock_guard lock(core_->mutex);
  FIRN_CHECK(pin.cache_ == this && core_->at(pin.slot_).state == Core::State::kFilling, "publish() without insert()");
  core_->at(pin.slot_).state = Core::State::kReady;
  core_->filled.notify_all();
}

void SlotCache::drop(SlotKey key) {
  const std::lock_guard lock(core_->mutex);
  const int32_t slot = core_->look(key);
  if (slot < 0) return;
  if (core_->cancel(slot)) return;
  core_->unlist(slot);
  // A pinned one goes with its last pin, a loading one when a slot is wanted or the cache ends.
  if (core_->at(slot).pins == 0 && core_->at(slot).state == Core::State::kReady) core_->clear(slot);
}

int32_t SlotCache::n_slots() const {
  const std::lock_guard lock(core_->mutex);
  return core_->n_slots;
}
int64_t SlotCache::slot_bytes() const { return core_->slot_bytes; }
int32_t SlotCache::in_use() const {
  const std::lock_guard lock(core_->mutex);
  return static_cast<int32_t>(core_->slots.size() - core_->free.size());
}
int32_t SlotCache::pinned() const {
  const std::lock_guard lock(core_->mutex);
  return core_->n_pinned;
}
SlotCacheStats SlotCache::stats() const {
  const std::lock_guard lock(core_->mutex);
  return core_->stats;
}

SlotCache::Pin::Pin(Pin&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)), slot_(std::exchange(other.slot_, -1)) {}

SlotCache::Pin& SlotCache::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    cache_ = std::exchange(other.cache_, nullptr);
    slot_ = std::exchange(other.slot_, -1);
  }
  return *this;
}

SlotCache::Pin::~Pin() { release(); }

void SlotCache::Pin::release() {
  if (cache_ == nullptr) return;
  cache_->core_->unpin(slot_);
  cache_ = nullptr;
  slot_ = -1;
}

bool SlotCache::Pin::ready() const {
  if (cache_ == nullptr) return true;
  const std::lock_guard lock(cache_->core_->mutex);
  cache_->core_->settle(slot_);
  const Core::State state = cache_->core_->at(slot_).state;
  return state == Core::State::kReady || state == Core::State::kFailed;
}

Status SlotCache::Pin::wait() const {
  if (cache_ == nullptr) return {};
  Core& core = *cache_->core_;
  std::unique_lock lock(core.mutex);
  core.settle(slot_);
  if (core.at(slot_).state == Core::State::kLoading) {
    const IoTicket ticket = core.at(slot_).ticket;
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    (void)ticket.wait();
    const double waited = seconds_since(start);
    lock.lock();
    core.stats.wait_seconds += waited;
    core.settle(slot_);
  }
  core.filled.wait(lock, [&] { return core.at(slot_).state != Core::State::kFilling; });
  const Core::Slot& s = core.at(slot_);
  return s.state == Core::State::kFailed ? s.error : Status();
}

std::byte* SlotCache::Pin::data() const {
  FIRN_CHECK(cache_ != nullptr, "data() of an empty pin");
  const std::lock_guard lock(cache_->core_->mutex);  // slots may move as the cache grows
  return cache_->core_->at(slot_).data;
}

SlotKey SlotCache::Pin::key() const {
  FIRN_CHECK(cache_ != nullptr, "key() of an empty pin");
  const std::lock_guard lock(cache_->core_->mutex);
  return cache_->core_->at(slot_).key;
}

}  // namespace firn::storage
