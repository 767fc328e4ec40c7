// Which slot of a full cache gives way: the rule alone, without bytes, so that a recorded trace can be replayed
// through the very code the engine runs.
//
// Not thread-safe: the cache that owns a policy calls it under its own lock. A policy is deterministic: the same calls
// give the same victims. Slots are 0 .. n_slots - 1; inserted() of a slot that holds something, and used() or removed()
// of one that does not, are bugs (CHECKed).
//
// Cost: lru: O(1) for each call; a victim passes over the slots in front of it that evictable() rejects, which are few
// when the rejected ones are the recently used. frequency: used() is O(1), the rest O(log n) amortised; rejected slots
// are set aside so that the next victim does not meet them again. static: as lru for keys outside the ranking, O(log n)
// for those in it. Memory: up to 40 bytes a slot, as slots come into use.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/status.h"

namespace firn::storage {

using SlotKey = uint64_t;  // opaque: the cache's owner knows what it means

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;
  virtual const char* name() const = 0;
  virtual void inserted(int32_t slot, SlotKey key) = 0;  // the slot now holds the key; counts as one use
  virtual void used(int32_t slot) = 0;                   // a demand for what it holds
  virtual void removed(int32_t slot) = 0;                // its content is gone
  // The slot to give up among those that hold something and for which evictable(slot) is true; -1 when there is none.
  // The slot stays in the policy until removed() says that it was given up.
  virtual int32_t victim(const std::function<bool(int32_t)>& evictable) = 0;
  // evictable(slot) has become true again. A policy may pass over a slot that evictable() rejected until it hears
  // released(slot) or used(slot), or until it finds no other; a caller whose evictable() never changes its mind about a
  // slot need not call this.
  virtual void released(int32_t slot) { (void)slot; }
};

// "lru": the least recently used. "frequency": the smallest decayed use count, where a use counts half after
// `half_life` further uses of the cache, the less recent of equals; what is removed loses its count. "static": keys of
// `ranking` (most wanted first) are kept before all others, the rest by lru; among ranked keys the least wanted goes.
struct PolicyOptions {
  std::string name = "frequency";
  double half_life = 0;  // uses; 0: eight times the number of slots
  std::vector<SlotKey> ranking;
};
// kInvalid: an unknown name, a half_life that is negative or not a number, a key twice in the ranking, n_slots < 1.
Result<std::unique_ptr<CachePolicy>> make_policy(const PolicyOptions& options, int32_t n_slots);

// Hits that the best possible replacement would have had for these accesses with n_slots slots (Belady: evict what is
// used furthest in the future; a key may not bypass the cache). O(n log n). 0 when n_slots < 1.
int64_t belady_hits(const std::vector<SlotKey>& accesses, int32_t n_slots);

}  // namespace firn::storage
