// Which slot of a full cache gives way: the rule alone, without bytes, so that a recorded trace can be replayed
// through the very code the engine runs.
//
// Not thread-safe: the cache that owns a policy calls it under its own lock. A policy is deterministic: the same calls
// give the same victims.
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
  virtual int32_t victim(const std::function<bool(int32_t)>& evictable) = 0;
};

// "lru": the least recently used. "frequency": the smallest decayed use count, where a use counts half after
// `half_life` further uses of the cache, the less recent of equals. "static": keys of `ranking` (most wanted first) are
// kept before all others, the rest by lru.
struct PolicyOptions {
  std::string name = "frequency";
  double half_life = 0;  // uses; 0: eight times the number of slots
  std::vector<SlotKey> ranking;
};
Result<std::unique_ptr<CachePolicy>> make_policy(const PolicyOptions& options, int32_t n_slots);

// Hits that the best possible replacement would have had for these accesses with n_slots slots (Belady: evict what is
// used furthest in the future; a key may not bypass the cache). O(n log n).
int64_t belady_hits(const std::vector<SlotKey>& accesses, int32_t n_slots);

}  // namespace firn::storage
