// A cache of equal slots in host memory, filled from disk: experts, and far KV blocks.
//
//   auto pin = cache->acquire(key, Cause::kDemand);     // starts the load if need be; nullopt: every slot is taken
//   ... compute on what is there ...
//   FIRN_TRY(pin->wait());                              // its bytes are there now
//   use(pin->data());                                   // until the Pin dies
//
// Slot states:
//   empty --acquire/prefetch--> loading --read done--> ready --evicted or dropped--> empty
//   empty --insert--> loading --publish--> ready
//   loading --read failed, or the inserting pin died unpublished--> failed --last pin goes--> empty
//   loading --cancelled--> empty
// The error of a failed load goes to everyone who holds a pin on it. The key of a failed slot is forgotten at once, so
// that the next acquire tries again, in another slot while pins on the failed one live. A failure of a read that nobody
// waits for is noticed when somebody next asks for the key, when a slot is short, or by stats() and in_use().
//
// Choice of a slot: an empty one; a new one, while fewer than n_slots exist and the arena gives memory (a refusal is
// tried again after a while); the oldest stale guess; the policy's victim; for a demand or insert only, the oldest
// guess that is ready, then that of a guess whose read the queue has not started and which is cancelled. A slot with
// pins, or loading, is never a victim.
//
// Speculation: prefetch() loads without a pin. Each such load carries its cause; the first demand for it counts as
// useful (it was ready) or late (it was still loading: the read is promoted, the demand waits for the rest); when it
// is evicted, dropped or fails before any demand it counts as wasted. Until its first demand such a load is a "guess":
// the policy does not know it, so a guess is no use and does not disturb the order of what was asked for. A ready guess
// is stale when n_slots demands were made since it became ready. A prefetch never takes the slot of a guess that is not
// stale, and takes the policy's victim only while guesses hold less than half of n_slots (at least one): speculation
// alone cannot push out more than half of what was asked for.
//
// Counters are per cause. At any time, for every cause but kDemand:
//   loads = useful + late + wasted + cancelled + guesses now loading or ready
//   bytes = useful_bytes + late_bytes + wasted_bytes + bytes of guesses now loading or ready
// and kDemand, asked for from the start, counts only loads (= misses) and bytes. demands that were served = hits +
// joined + misses; sum of useful <= hits, sum of late <= joined. Bytes are those of the read's pieces, whether it
// succeeds or not.
//
// Threads: all methods may be called from any thread, a Pin's by one thread at a time; the bytes of a pinned ready slot
// may be read freely. One mutex guards the table; it is never held during I/O or a wait. Lock order: the cache's mutex,
// then the IoQueue's. The read that SlotSource::read_of returns finishes on the queue's thread, which takes the cache's
// mutex alone. Pins must not outlive the cache; the destructor CHECKs that.
//
// Memory: slots from the arena, in pieces of a few MiB up to 1/256 of the whole (one slot each when they are larger),
// every slot 4096-aligned. Beside that about 200 bytes a slot in use, which no budget sees.
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
  int64_t loads = 0, bytes = 0;          // started for this cause
  int64_t useful = 0, useful_bytes = 0;  // ready when first asked for
  int64_t late = 0, late_bytes = 0;      // still loading when first asked for
  int64_t wasted = 0, wasted_bytes = 0;  // given up, or failed, before anybody asked
  int64_t cancelled = 0;                 // of the loads, those the drive never saw; they count no bytes
};
struct SlotCacheStats {
  int64_t hits = 0;            // demands that found the key ready
  int64_t joined = 0;          // demands that found it loading
  int64_t misses = 0;          // demands that started a load
  int64_t inserted = 0;        // slots handed out by insert()
  int64_t evicted = 0;         // ready contents given up for another key
  int64_t refused = 0;         // acquire/prefetch/insert that found no slot
  double wait_seconds = 0;     // spent in Pin::wait
  double service_seconds = 0;  // of finished reads that somebody demanded (IoTicket::seconds)
  CauseStats cause[static_cast<size_t>(Cause::kCount)];
};

class SlotCache {
  struct Slot;
  struct Core;

 public:
  class Pin {
   public:
    Pin() = default;
    Pin(Pin&& other) noexcept;
    Pin& operator=(Pin&& other) noexcept;  // releases what it held; to itself: nothing
    ~Pin();
    explicit operator bool() const { return cache_ != nullptr; }
    // The rest needs a pin that is not empty (CHECKed), except release().
    bool ready() const;       // wait() would return at once
    Status wait() const;      // until its bytes are there; or why they never will be
    std::byte* data() const;  // of the slot; content is valid once wait() returned ok
    SlotKey key() const;
    void release();  // as the destructor; idempotent

   private:
    friend class SlotCache;
    Pin(Core* cache, Slot* slot, bool inserting) : cache_(cache), slot_(slot), inserting_(inserting) {}
    Core* cache_ = nullptr;
    Slot* slot_ = nullptr;
    bool inserting_ = false;  // from insert()
  };

  // n_slots >= 1 slots of slot_bytes (rounded up to 4096) from the arena, charged there. The queue, source and arena
  // must outlive the cache. Memory is taken in pieces as slots come into use unless `all_at_once`; then a refusal of
  // the arena is the error. kInvalid: n_slots, slot_bytes or the policy's options.
  static Result<std::unique_ptr<SlotCache>> create(Arena* arena, const std::string& what, int32_t n_slots,
                                                   int64_t slot_bytes, const PolicyOptions& policy, IoQueue* queue,
                                                   SlotSource* source, bool all_at_once = false);
  ~SlotCache();  // waits for its loads

  // A pin on the key's slot; counts a use. nullopt: the key is not there and no slot can be had now (all pinned or
  // loading). An error: the source refused, or there is no slot at all yet and the arena refused memory for one.
  Result<std::optional<Pin>> acquire(SlotKey key);
  // As acquire, but where only loads made on a guess stand in the way it waits for one of them and takes its slot.
  Result<std::optional<Pin>> acquire_waiting(SlotKey key);
  // As acquire for keys that are ready or loading; never starts a load and never evicts. Counts a use when found.
  std::optional<Pin> find(SlotKey key);
  bool contains(SlotKey key) const;  // ready or loading; counts nothing
  bool ready(SlotKey key) const;

  // Starts a speculative load. False: already there, no slot to be had without hurting a demand, or the source refused.
  // `cause` is not kDemand (CHECKed).
  bool prefetch(SlotKey key, Cause cause);
  // Cancels speculative loads that nobody asked for and the drive has not begun.
  void cancel_speculation();

  // A slot for bytes that the caller has: fill data(), then publish() once. Until then the slot counts as loading for
  // everyone else; the filling thread alone may touch data() and must not wait() on it. A pin that dies unpublished
  // gives the others kCancelled. nullopt: no slot to be had. The key must not be in the cache (CHECKed).
  std::optional<Pin> insert(SlotKey key);
  void publish(const Pin& pin);

  // Forgets the key at once: a later acquire loads it anew, a later insert may bring other bytes. Its slot becomes
  // empty now, or when its last pin goes and its read has ended; pins on it stay good. A guess that is still queued is
  // cancelled.
  void drop(SlotKey key);

  int32_t n_slots() const;
  int64_t slot_bytes() const;
  int32_t in_use() const;  // slots that are not empty
  int32_t pinned() const;  // slots with at least one pin
  SlotCacheStats stats() const;

 private:
  explicit SlotCache(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace firn::storage
