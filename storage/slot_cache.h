// A cache of equal slots in host memory, filled from disk: experts, and far KV blocks.
//
//   auto pin = cache->acquire(key, Cause::kDemand);     // starts the load if need be; nullopt: every slot is taken
//   ... compute on what is there ...
//   FIRN_TRY(pin->wait());                              // its bytes are there now
//   use(pin->data());                                   // until the Pin dies
//
// Slot states:
//   empty --acquire/prefetch/insert--> loading --read done--> ready --evicted or dropped--> empty
//   loading --read failed or cancelled--> empty (the error goes to everyone who holds a pin on it)
// A slot with pins, or loading, is never a victim, except that a load made on a guess which nobody has asked for is
// cancelled when a demand finds no other slot (if the queue has not started it). Victims come from the policy.
//
// Speculation: prefetch() loads without a pin. Each such load carries its cause; the first demand for it counts as
// useful (it was ready) or late (it was still loading: the read is promoted, the demand waits for the rest); when it
// is evicted, cancelled after it was read, or dropped before any demand it counts as wasted. Counters are per cause.
//
// Threads: all methods may be called from any thread; the bytes of a pinned ready slot may be read freely. One mutex
// guards the table; it is never held during I/O or a wait. Lock order: the cache's mutex, then the IoQueue's. The read
// that SlotSource::read_of returns finishes on the queue's thread, which takes the cache's mutex alone. Pins must not
// outlive the cache; the destructor CHECKs that.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/arena.h"
#include "runtime/status.h"
#include "storage/cache_policy.h"
#include "storage/io_queue.h"

namespace firn::storage {

// Why a load was started.
enum class Cause : uint8_t { kDemand, kLookahead, kNearMiss, kPrevious, kFrequency, kSequential, kCount };
const char* cause_name(Cause cause);  // "demand", "lookahead", ...

// How a key's bytes come into a slot.
class SlotSource {
 public:
  virtual ~SlotSource() = default;
  // The read that fills `slot` (slot_bytes long, 4096-aligned) with the key's content, io_class left alone. Called with
  // the cache's mutex held: it must be quick and must not call the cache.
  virtual Result<IoRead> read_of(SlotKey key, std::span<std::byte> slot) = 0;
};

struct CauseStats {
  int64_t loads = 0, bytes = 0;          // started and read for this cause
  int64_t useful = 0, useful_bytes = 0;  // ready when first asked for
  int64_t late = 0, late_bytes = 0;      // still loading when first asked for
  int64_t wasted = 0, wasted_bytes = 0;  // given up before anybody asked
  int64_t cancelled = 0;                 // of the loads, those the drive never saw; they count no bytes
};
struct SlotCacheStats {
  int64_t hits = 0;                                // demands that found the key ready
  int64_t joined = 0;                              // demands that found it loading
  int64_t misses = 0;                              // demands that started a load
  int64_t inserted = 0, evicted = 0, refused = 0;  // refused: acquire/prefetch/insert that found no slot
  double wait_seconds = 0;                         // spent in Pin::wait
  double service_seconds = 0;                      // of reads that somebody demanded (IoTicket::seconds)
  CauseStats cause[static_cast<size_t>(Cause::kCount)];
};

class SlotCache {
 public:
  class Pin {
   public:
    Pin() = default;
    Pin(Pin&& other) noexcept;
    Pin& operator=(Pin&& other) noexcept;
    ~Pin();
    explicit operator bool() const { return cache_ != nullptr; }
    bool ready() const;       // wait() would return at once
    Status wait() const;      // until its bytes are there; or why they never will be
    std::byte* data() const;  // of the slot; content is valid once wait() returned ok
    SlotKey key() const;
    void release();  // as the destructor; idempotent

   private:
    friend class SlotCache;
    Pin(SlotCache* cache, int32_t slot) : cache_(cache), slot_(slot) {}
    SlotCache* cache_ = nullptr;
    int32_t slot_ = -1;
  };

  // n_slots >= 1 slots of slot_bytes (rounded up to 4096) from the arena, charged there. The queue, source and arena
  // must outlive the cache. Memory is taken in pieces as slots come into use unless `all_at_once`.
  static Result<std::unique_ptr<SlotCache>> create(Arena* arena, const std::string& what, int32_t n_slots,
                                                   int64_t slot_bytes, const PolicyOptions& policy, IoQueue* queue,
                                                   SlotSource* source, bool all_at_once = false);
  ~SlotCache();  // waits for its loads

  // A pin on the key's slot; counts a use. nullopt: the key is not there and no slot can be had now (all pinned or
  // loading). An error: the source refused, or memory for a new slot is short.
  Result<std::optional<Pin>> acquire(SlotKey key);
  // As acquire, but where only loads made on a guess stand in the way it waits for one of them and takes its slot.
  Result<std::optional<Pin>> acquire_waiting(SlotKey key);
  // As acquire for keys that are ready or loading; never starts a load and never evicts. Counts a use when found.
  std::optional<Pin> find(SlotKey key);
  bool contains(SlotKey key) const;  // ready or loading; counts nothing
  bool ready(SlotKey key) const;

  // Starts a speculative load. False: already there, no slot to be had without hurting a demand, or the source refused.
  bool prefetch(SlotKey key, Cause cause);
  // Cancels speculative loads that nobody asked for and the drive has not begun.
  void cancel_speculation();

  // A slot for bytes that the caller has: fill data(), then publish(). Until then the slot counts as loading for
  // everyone else. nullopt: no slot to be had. The key must not be in the cache (CHECKed).
  std::optional<Pin> insert(SlotKey key);
  void publish(const Pin& pin);

  // Forgets the key: at once when unpinned, else when its last pin goes. A later acquire loads it anew.
  void drop(SlotKey key);

  int32_t n_slots() const;
  int64_t slot_bytes() const;
  int32_t in_use() const;  // ready or loading
  int32_t pinned() const;
  SlotCacheStats stats() const;

 private:
  struct Core;
  explicit SlotCache(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace firn::storage
