// The slot cache: one table under one mutex, intrusive lists over its slots.
#include "storage/slot_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace firn::storage {
namespace {

constexpr int64_t kAlignment = 4096;
constexpr int64_t kLargeSlot = int64_t{1} << 20;  // from here on arenas align by themselves
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kPieces = 256;                // few, so that a large cache does not use up the process's mappings
constexpr int64_t kRefusalsBetweenTries = 256;  // an arena that refused is not asked for every miss

enum class State : uint8_t { kEmpty, kLoading, kReady, kFailed };
enum class For : uint8_t { kDemand, kGuess };

}  // namespace

const char* cause_name(Cause cause) {
  switch (cause) {
    case Cause::kDemand:
      return "demand";
    case Cause::kLookahead:
      return "lookahead";
    case Cause::kNearMiss:
      return "near-miss";
    case Cause::kPrevious:
      return "previous";
    case Cause::kFrequency:
      return "frequency";
    case Cause::kSequential:
      return "sequential";
    case Cause::kCount:
      break;
  }
  return "?";
}

// Fields are guarded by the mutex, except that state may be read without it, and that key and data do not change while
// there is a pin.
struct SlotCache::Slot {
  SlotKey key = 0;
  std::byte* data = nullptr;
  std::atomic<State> state{State::kEmpty};
  Cause cause = Cause::kDemand;
  bool mapped = false;     // the key leads here; else nobody can find it any more
  bool guess = false;      // speculative, and nobody has asked for it
  bool inserting = false;  // the bytes come from a caller
  int32_t pins = 0;
  int32_t previous = -1, next = -1;  // in the list it is on
  int64_t read_bytes = 0;
  int64_t born = 0;  // a guess: demands made when it became ready
  IoTicket ticket;   // while loading; a guess keeps it until asked for or given up
};

struct SlotCache::Core {
  struct List {
    int32_t first = -1, last = -1;
    int32_t size = 0;
  };
  struct Unsettled {
    IoTicket ticket;
    bool demanded;  // its seconds count
  };
  struct Entry {
    SlotKey key;
    int32_t slot;  // -1: free
  };

  Arena* arena;
  std::string what;
  int32_t n_slots;
  int64_t slot_bytes;
  IoQueue* queue;
  SlotSource* source;
  std::unique_ptr<CachePolicy> policy;

  mutable std::mutex mutex;
  std::condition_variable published;  // an insert was published or given up

  Slot* slots = nullptr;  // n_slots of them, of which the first `made` are alive: pages are touched as slots are made
  int32_t made = 0;
  std::vector<Buffer> pieces;
  std::byte* fresh = nullptr;  // of the newest piece: what no slot has yet
  int64_t fresh_slots = 0;
  int64_t piece_slots = 0;
  int64_t tries_to_skip = 0;

  std::vector<Entry> table;  // open addressing with linear probing, at most half full
  size_t table_mask = 0;
  size_t table_used = 0;

  std::vector<int32_t> empty;
  List loading;        // reads in flight that somebody asked for, or that were dropped
  List guess_loading;  // guesses in flight, oldest first
  List guess_ready;    // ready guesses, oldest first
  int32_t pinned = 0;
  std::unordered_map<const Slot*, Status> errors;  // of failed slots
  std::vector<Unsettled> unsettled;                // reads whose seconds are not known yet, or that are just finishing
  size_t unsettled_limit = 64;
  SlotCacheStats counts;

  ~Core() {
    for (int32_t i = 0; i < made; ++i) slots[i].~Slot();
    if (slots != nullptr) std::allocator<Slot>().deallocate(slots, static_cast<size_t>(n_slots));
  }

  // ---- table ----
  static size_t hash(SlotKey key) {
    key ^= key >> 32;
    key *= 0x9E3779B97F4A7C15u;
    key ^= key >> 29;
    key *= 0xBF58476D1CE4E5B9u;
    return static_cast<size_t>(key ^ (key >> 32));
  }
  Slot* lookup(SlotKey key) const {
    for (size_t i = hash(key) & table_mask;; i = (i + 1) & table_mask) {
      const Entry& e = table[i];
      if (e.slot < 0) return nullptr;
      if (e.key == key) return &slots[e.slot];
    }
  }
  void place(SlotKey key, int32_t slot) {
    size_t i = hash(key) & table_mask;
    while (table[i].slot >= 0) i = (i + 1) & table_mask;
    table[i] = {key, slot};
  }
  void map(Slot& s, SlotKey key) {
    if (2 * (table_used + 1) > table.size()) {
      std::vector<Entry> old(2 * table.size(), Entry{0, -1});
      old.swap(table);
      table_mask = table.size() - 1;
      for (const Entry& e : old) {
        if (e.slot >= 0) place(e.key, e.slot);
      }
    }
    s.key = key;
    s.mapped = true;
    place(key, index(s));
    ++table_used;
  }
  // Entries behind the hole move up when their own place is not between it and them.
  void unmap(Slot& s) {
    s.mapped = false;
    --table_used;
    size_t hole = hash(s.key) & table_mask;
    while (table[hole].slot < 0 || table[hole].key != s.key) hole = (hole + 1) & table_mask;
    for (size_t i = (hole + 1) & table_mask; table[i].slot >= 0; i = (i + 1) & table_mask) {
      const size_t home = hash(table[i].key) & table_mask;
      if (((i - home) & table_mask) >= ((i - hole) & table_mask)) {
        table[hole] = table[i];
        hole = i;
      }
    }
    table[hole].slot = -1;
  }

  // ---- lists ----
  int32_t index(const Slot& s) const { return static_cast<int32_t>(&s - slots); }
  void append(List& list, Slot& s) {
    s.previous = list.last;
    s.next = -1;
    (list.last < 0 ? list.first : slots[list.last].next) = index(s);
    list.last = index(s);
    ++list.size;
  }
  void remove(List& list, Slot& s) {
    (s.previous < 0 ? list.first : slots[s.previous].next) = s.next;
    (s.next < 0 ? list.last : slots[s.next].previous) = s.previous;
    --list.size;
  }

  // ---- counters ----
  int64_t demands() const { return counts.hits + counts.joined + counts.misses; }
  CauseStats& of(const Slot& s) { return counts.cause[static_cast<size_t>(s.cause)]; }
  void count_wasted(const Slot& s) {
    ++of(s).wasted;
    of(s).wasted_bytes += s.read_bytes;
  }
  void settle_later(const IoTicket& ticket, bool demanded) {
    if (!ticket) return;
    unsettled.push_back({ticket, demanded});
    if (unsettled.size() > unsettled_limit) settle();
  }
  void settle() {
    const auto finished = [this](const Unsettled& u) {
      if (!u.ticket.done()) return false;
      if (u.demanded) counts.service_seconds += u.ticket.seconds();
      return true;
    };
    unsettled.erase(std::remove_if(unsettled.begin(), unsettled.end(), finished), unsettled.end());
    unsettled_limit = 64 + 2 * unsettled.size();
  }

  // ---- from state to state ----
  bool evictable(const Slot& s) const {
    return s.pins == 0 && s.state.load(std::memory_order_relaxed) == State::kReady;
  }
  void set(Slot& s, State state) { s.state.store(state, std::memory_order_release); }

  // Nobody can find the slot or its key any more. Guesses are counted as wasted.
  void forget(Slot& s) {
    unmap(s);
    if (s.guess) {
      count_wasted(s);
      s.guess = false;
      if (s.state == State::kLoading) {
        remove(guess_loading, s);
        append(loading, s);
      } else {
        remove(guess_ready, s);
      }
      settle_later(s.ticket, false);
    } else {
      policy->removed(index(s));
    }
  }
  void make_empty(Slot& s) {
    FIRN_CHECK(s.pins == 0 && !s.mapped, what);
    s.ticket = {};
    s.inserting = false;
    if (s.state == State::kFailed) errors.erase(&s);
    set(s, State::kEmpty);
    empty.push_back(index(s));
  }
  // Pins went to zero or the load ended: what follows for a slot.
  void rest(Slot& s) {
    if (s.pins > 0 || s.state == State::kLoading) return;
    if (!s.mapped) {
      make_empty(s);
    } else if (!s.guess) {
      policy->released(index(s));
    }
  }
  void became_ready(Slot& s) {
    set(s, State::kReady);
    if (s.guess) {
      remove(guess_loading, s);
      append(guess_ready, s);
      s.born = demands();
    } else {
      if (!s.inserting) remove(loading, s);
      s.ticket = {};
    }
    s.inserting = false;
    rest(s);
  }
  void fail(Slot& s, Status status) {
    if (s.mapped) forget(s);
    if (!s.inserting) remove(loading, s);
    s.inserting = false;
    s.ticket = {};
    set(s, State::kFailed);
    if (s.pins > 0) errors.emplace(&s, std::move(status));
    rest(s);
  }
  // Notices a read that ended without finishing. True: the slot no longer holds its key.
  bool failed_meanwhile(Slot& s) {
    if (s.state != State::kLoading || s.inserting || !s.ticket.done()) return false;
    // finish() runs before a read is done and makes the slot ready, so this one failed.
    Status status = s.ticket.wait();
    if (status.ok()) status = internal(fmt::format("{}: a read of key {} ended without its bytes", what, s.key));
    fail(s, std::move(status));
    return true;
  }
  bool notice_failures() {
    bool any = false;
    for (const List* list : {&loading, &guess_loading}) {
      for (int32_t i = list->first; i >= 0;) {
        Slot& s = slots[i];
        i = s.next;
        any |= failed_meanwhile(s);
      }
    }
    return any;
  }
  bool cancel(Slot& s) {
    if (!s.ticket.cancel()) return false;
    CauseStats& c = of(s);
    ++c.cancelled;
    c.bytes -= s.read_bytes;
    unmap(s);
    remove(guess_loading, s);
    s.guess = false;
    make_empty(s);
    return true;
  }
  void pin(Slot& s) {
    if (s.pins++ == 0) ++pinned;
  }
  void unpin(Slot& s) {
    FIRN_CHECK(s.pins > 0, what);
    if (--s.pins > 0) return;
    --pinned;
    rest(s);
  }

  // ---- slots ----
  Status add_piece(int64_t count) {
    // Small buffers of an arena are not aligned to pages.
    const int64_t bytes = count * slot_bytes + (count * slot_bytes < kLargeSlot ? kAlignment : 0);
    FIRN_ASSIGN(Buffer piece, arena->allocate(bytes, what));
    const auto address = reinterpret_cast<uintptr_t>(piece.data());
    const uintptr_t aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
    FIRN_CHECK(static_cast<int64_t>(aligned - address) + count * slot_bytes <= bytes, "a large buffer off its page");
    fresh = piece.as<std::byte>() + (aligned - address);
    fresh_slots = count;
    pieces.push_back(std::move(piece));
    return {};
  }
  Status grow() {
    Status status;
    for (int64_t count = std::min<int64_t>(piece_slots, n_slots - made); count >= 1; count /= 2) {
      status = add_piece(count);
      if (status.ok()) break;
      piece_slots = std::max<int64_t>(1, count / 2);
    }
    return status;
  }
  Slot* new_slot(Status* refusal) {
    if (made == n_slots) return nullptr;
    if (fresh_slots == 0) {
      if (made > 0 && tries_to_skip > 0) {
        --tries_to_skip;
        return nullptr;
      }
      *refusal = grow();
      if (!refusal->ok()) {
        tries_to_skip = kRefusalsBetweenTries;
        return nullptr;
      }
    }
    Slot* s = new (&slots[made]) Slot;
    ++made;
    s->data = fresh;
    fresh += slot_bytes;
    --fresh_slots;
    return s;
  }
  Slot* take_empty() {
    if (empty.empty()) return nullptr;
    Slot* s = &slots[empty.back()];
    empty.pop_back();
    return s;
  }
  Slot* evict(Slot& s) {
    ++counts.evicted;
    forget(s);
    make_empty(s);
    return take_empty();
  }
  // An empty slot, off the list of empty ones; nullptr when there is none. An error: there are no slots at all.
  Result<Slot*> obtain(For purpose) {
    if (Slot* s = take_empty()) return s;
    Status refusal;
    if (Slot* s = new_slot(&refusal)) return s;
    if (made == 0) return refusal;
    if (guess_ready.first >= 0) {
      Slot& oldest = slots[guess_ready.first];
      if (demands() - oldest.born >= n_slots) return evict(oldest);
    }
    const int32_t guesses = guess_ready.size + guess_loading.size;
    if (purpose == For::kDemand || guesses < std::max(1, n_slots / 2)) {
      const int32_t victim = policy->victim([this](int32_t i) { return evictable(slots[i]); });
      if (victim >= 0) return evict(slots[victim]);
    }
    if (purpose == For::kDemand && guess_ready.first >= 0) return evict(slots[guess_ready.first]);
    if (notice_failures()) {
      if (Slot* s = take_empty()) return s;
    }
    if (purpose == For::kDemand) {
      // The newest first: the least likely to be at the drive, and the last to be needed.
      for (int32_t i = guess_loading.last; i >= 0; i = slots[i].previous) {
        if (cancel(slots[i])) return take_empty();
      }
    }
    ++counts.refused;
    return static_cast<Slot*>(nullptr);
  }

  Status start(Slot& s, SlotKey key, Cause cause) {
    Result<IoRead> read = source->read_of(key, {s.data, static_cast<size_t>(slot_bytes)});
    if (!read.ok()) {
      empty.push_back(index(s));
      return read.status();
    }
    s.cause = cause;
    s.guess = cause != Cause::kDemand;
    s.read_bytes = 0;
    for (const IoPiece& piece : read->pieces) s.read_bytes += piece.bytes;
    set(s, State::kLoading);
    map(s, key);
    ++of(s).loads;
    of(s).bytes += s.read_bytes;
    append(s.guess ? guess_loading : loading, s);
    if (!s.guess) policy->inserted(index(s), key);
    read->io_class = s.guess ? IoClass::kSpeculative : IoClass::kDemand;
    read->finish = [this, &s, inner = std::move(read->finish)]() -> Status {
      if (inner) FIRN_TRY(inner());
      const std::lock_guard<std::mutex> lock(mutex);
      became_ready(s);
      return {};
    };
    s.ticket = queue->submit(std::move(read).value());
    if (!s.guess) settle_later(s.ticket, true);
    return {};
  }

  // A demand for a slot that holds its key.
  void ask(Slot& s) {
    const bool is_ready = s.state == State::kReady;
    ++(is_ready ? counts.hits : counts.joined);
    if (s.guess) {
      CauseStats& c = of(s);
      ++(is_ready ? c.useful : c.late);
      (is_ready ? c.useful_bytes : c.late_bytes) += s.read_bytes;
      s.guess = false;
      settle_later(s.ticket, true);
      if (is_ready) {
        remove(guess_ready, s);
        s.ticket = {};
      } else {
        remove(guess_loading, s);
        append(loading, s);
        s.ticket.promote();
      }
      policy->inserted(index(s), s.key);
    } else {
      policy->used(index(s));
    }
    pin(s);
  }
  // The slot that holds the key, ready or loading.
  Slot* held(SlotKey key) {
    Slot* s = lookup(key);
    return s == nullptr || failed_meanwhile(*s) ? nullptr : s;
  }

  // ---- pins ----
  bool pin_ready(const Slot& s) const {
    if (s.state.load(std::memory_order_acquire) != State::kLoading) return true;
    const std::lock_guard<std::mutex> lock(mutex);
    return s.state != State::kLoading || (!s.inserting && s.ticket.done());
  }
  Status wait(Slot& s) {
    if (s.state.load(std::memory_order_acquire) == State::kReady) return {};
    std::unique_lock<std::mutex> lock(mutex);
    if (s.state == State::kLoading && !failed_meanwhile(s)) {
      const auto begin = std::chrono::steady_clock::now();
      if (s.inserting) {
        published.wait(lock, [&s] { return s.state != State::kLoading; });
      } else {
        const IoTicket ticket = s.ticket;
        lock.unlock();
        (void)ticket.wait();
        lock.lock();
        failed_meanwhile(s);
      }
      counts.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    if (s.state == State::kReady) return {};
    return errors.at(&s);
  }
  void release(Slot& s, bool inserting) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (inserting && s.inserting) {
      fail(s, cancelled(fmt::format("{}: key {} was given up before its bytes were there", what, s.key)));
      published.notify_all();
    }
    unpin(s);
  }
};

SlotCache::Pin::Pin(Pin&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)),
      slot_(std::exchange(other.slot_, nullptr)),
      inserting_(std::exchange(other.inserting_, false)) {}

SlotCache::Pin& SlotCache::Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    release();
    cache_ = std::exchange(other.cache_, nullptr);
    slot_ = std::exchange(other.slot_, nullptr);
    inserting_ = std::exchange(other.inserting_, false);
  }
  return *this;
}

SlotCache::Pin::~Pin() { release(); }

void SlotCache::Pin::release() {
  if (cache_ == nullptr) return;
  std::exchange(cache_, nullptr)->release(*std::exchange(slot_, nullptr), std::exchange(inserting_, false));
}

bool SlotCache::Pin::ready() const {
  FIRN_CHECK(cache_ != nullptr, "an empty pin");
  return cache_->pin_ready(*slot_);
}

Status SlotCache::Pin::wait() const {
  FIRN_CHECK(cache_ != nullptr, "an empty pin");
  return cache_->wait(*slot_);
}

std::byte* SlotCache::Pin::data() const {
  FIRN_CHECK(cache_ != nullptr, "an empty pin");
  return slot_->data;
}

SlotKey SlotCache::Pin::key() const {
  FIRN_CHECK(cache_ != nullptr, "an empty pin");
  return slot_->key;
}

SlotCache::SlotCache(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Result<std::unique_ptr<SlotCache>> SlotCache::create(Arena* arena, const std::string& what, int32_t n_slots,
                                                     int64_t slot_bytes, const PolicyOptions& policy, IoQueue* queue,
                                                     SlotSource* source, bool all_at_once) {
  if (n_slots < 1) return invalid(fmt::format("{}: expected at least one slot, found {}", what, n_slots));
  if (slot_bytes < 1 || slot_bytes > (int64_t{1} << 56) / n_slots - kAlignment) {
    return invalid(fmt::format("{}: {} slots of {} bytes: expected a positive size that memory can hold", what, n_slots,
                               slot_bytes));
  }
  FIRN_CHECK(arena->space() == Space::kHost, what);
  auto core = std::make_unique<Core>();
  core->arena = arena;
  core->what = what;
  core->n_slots = n_slots;
  core->slot_bytes = (slot_bytes + kAlignment - 1) / kAlignment * kAlignment;
  core->queue = queue;
  core->source = source;
  {
    auto made = make_policy(policy, n_slots);
    if (!made.ok()) return made.status().with_context(what);
    core->policy = std::move(made).value();
  }
  const int64_t total = core->slot_bytes * n_slots;
  core->piece_slots =
      all_at_once ? n_slots : std::max<int64_t>(1, std::max(kPieceBytes, total / kPieces) / core->slot_bytes);
  if (all_at_once) FIRN_TRY(core->add_piece(n_slots));
  core->slots = std::allocator<Slot>().allocate(static_cast<size_t>(n_slots));
  core->table.assign(16, Core::Entry{0, -1});
  core->table_mask = core->table.size() - 1;
  return std::unique_ptr<SlotCache>(new SlotCache(std::move(core)));
}

SlotCache::~SlotCache() {
  cancel_speculation();
  Core& c = *core_;
  std::vector<IoTicket> tickets;
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    FIRN_CHECK(c.pinned == 0, fmt::format("{}: {} slots are pinned at its end", c.what, c.pinned));
    for (int32_t i = 0; i < c.made; ++i) {
      if (c.slots[i].ticket) tickets.push_back(c.slots[i].ticket);
    }
    for (const Core::Unsettled& u : c.unsettled) tickets.push_back(u.ticket);
  }
  for (const IoTicket& ticket : tickets) (void)ticket.wait();
}

Result<std::optional<SlotCache::Pin>> SlotCache::acquire(SlotKey key) {
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  Slot* s = c.held(key);
  if (s != nullptr) {
    c.ask(*s);
  } else {
    FIRN_ASSIGN(s, c.obtain(For::kDemand));
    if (s == nullptr) return std::optional<Pin>();
    FIRN_TRY(c.start(*s, key, Cause::kDemand));
    ++c.counts.misses;
    c.pin(*s);
  }
  return std::optional<Pin>(Pin(&c, s, false));
}

Result<std::optional<SlotCache::Pin>> SlotCache::acquire_waiting(SlotKey key) {
  Core& c = *core_;
  for (;;) {
    FIRN_ASSIGN(auto pin, acquire(key));
    if (pin.has_value()) return pin;
    IoTicket guess;
    {
      const std::lock_guard<std::mutex> lock(c.mutex);
      if (c.guess_loading.first >= 0) guess = c.slots[c.guess_loading.first].ticket;
    }
    if (!guess) return std::optional<Pin>();
    (void)guess.wait();
  }
}

std::optional<SlotCache::Pin> SlotCache::find(SlotKey key) {
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  Slot* s = c.held(key);
  if (s == nullptr) return std::nullopt;
  c.ask(*s);
  return Pin(&c, s, false);
}

bool SlotCache::contains(SlotKey key) const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return core_->held(key) != nullptr;
}

bool SlotCache::ready(SlotKey key) const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  const Slot* s = core_->lookup(key);
  return s != nullptr && s->state == State::kReady;
}

bool SlotCache::prefetch(SlotKey key, Cause cause) {
  FIRN_CHECK(cause != Cause::kDemand && cause < Cause::kCount, "a prefetch has a cause of its own");
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  if (c.held(key) != nullptr) return false;
  const Result<Slot*> slot = c.obtain(For::kGuess);
  if (!slot.ok()) ++c.counts.refused;
  return slot.ok() && slot.value() != nullptr && c.start(*slot.value(), key, cause).ok();
}

void SlotCache::cancel_speculation() {
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  for (int32_t i = c.guess_loading.last; i >= 0;) {
    Slot& s = c.slots[i];
    i = s.previous;
    c.cancel(s);
  }
}

std::optional<SlotCache::Pin> SlotCache::insert(SlotKey key) {
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  FIRN_CHECK(c.held(key) == nullptr, fmt::format("{}: insert of key {}, which is there", c.what, key));
  const Result<Slot*> slot = c.obtain(For::kDemand);
  if (!slot.ok()) ++c.counts.refused;
  if (!slot.ok() || slot.value() == nullptr) return std::nullopt;
  Slot& s = *slot.value();
  s.cause = Cause::kDemand;
  s.guess = false;
  s.inserting = true;
  s.read_bytes = 0;
  c.set(s, State::kLoading);
  c.map(s, key);
  c.policy->inserted(c.index(s), key);
  c.pin(s);
  ++c.counts.inserted;
  return Pin(&c, &s, true);
}

void SlotCache::publish(const Pin& pin) {
  Core& c = *core_;
  FIRN_CHECK(pin.cache_ == &c && pin.inserting_, "publish of a pin that insert did not give");
  const std::lock_guard<std::mutex> lock(c.mutex);
  FIRN_CHECK(pin.slot_->inserting, "published twice");
  c.became_ready(*pin.slot_);
  c.published.notify_all();
}

void SlotCache::drop(SlotKey key) {
  Core& c = *core_;
  const std::lock_guard<std::mutex> lock(c.mutex);
  Slot* s = c.held(key);
  if (s == nullptr) return;
  if (s->guess && s->state == State::kLoading && c.cancel(*s)) return;
  c.forget(*s);
  c.rest(*s);
}

int32_t SlotCache::n_slots() const { return core_->n_slots; }
int64_t SlotCache::slot_bytes() const { return core_->slot_bytes; }

int32_t SlotCache::in_use() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->notice_failures();
  return core_->made - static_cast<int32_t>(core_->empty.size());
}

int32_t SlotCache::pinned() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  return core_->pinned;
}

SlotCacheStats SlotCache::stats() const {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->notice_failures();
  core_->settle();
  return core_->counts;
}

}  // namespace firn::storage
