// Routed experts that do not all stay in memory: a slot cache fed from the checkpoint's own files or a packed one.
//
// A slot holds one expert as load_weights lays it out: w1, its scales, w3, its scales, w2, its scales, each at a
// multiple of 64. A packed file stores an expert in the same order and alignment, so one direct read fills a slot; in
// safetensors it is up to six ranges, which the queue brings together.
//
// Every read is checked: its length; against the stored checksum where the file has one; and, the first time an expert
// is read, its codes for NaN, as load_weights does.
//
// Threads: create() and the walks below belong to the thread that drives the engine; read_of() is called by the cache.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/weights.h"
#include "storage/slot_cache.h"

namespace firn::model {

class ExpertWalk;

class ExpertStore final : private storage::SlotSource {
 public:
  // The largest expert of the checkpoint, as a slot; 0 without routed experts.
  static int64_t slot_bytes(const Survey& survey);
  static int64_t n_experts(const Survey& survey);  // of all layers together

  // n_slots >= 2 slots from the arena. Opens every shard and reads the experts' tensor scales, nothing else. All
  // referenced objects must outlive the store.
  static Result<std::unique_ptr<ExpertStore>> create(storage::FileSystem& fs, const Survey& survey, Arena* arena,
                                                     storage::IoQueue* queue, int64_t n_slots,
                                                     const storage::PolicyOptions& policy);
  ~ExpertStore() override;

  storage::SlotKey key(int64_t layer, int64_t expert) const { return static_cast<uint64_t>(layer * experts_ + expert); }
  storage::SlotCache& cache() { return *cache_; }
  const storage::SlotCache& cache() const { return *cache_; }
  // Views of an expert whose bytes lie in `slot`.
  ExpertWeights weights(int64_t layer, int64_t expert, const std::byte* slot) const;
  int64_t bytes(int64_t layer, int64_t expert) const;  // as stored, without padding

  // Asks for an expert on a guess; false: it is there, or there is no room for guesses.
  bool prefetch(int64_t layer, int64_t expert, storage::Cause cause) {
    return cache_->prefetch(key(layer, expert), cause);
  }

 private:
  friend class ExpertWalk;
  struct Part {  // one matrix
    const FoundSlot* slot = nullptr;
    int64_t data_at = 0, scales_at = 0;  // in the slot
    float tensor_scale = 1.0f;
  };
  struct Expert {
    Part parts[3];  // gate, up, down
    int64_t slot_bytes = 0;
    bool one_piece = false;  // lies in its file as it lies in a slot
    uint64_t checksum = 0;   // of the extent, where has_checksum
    bool has_checksum = false;
    int64_t extent_bytes = 0;
  };
  ExpertStore(const Survey& survey);
  Status lay_out();
  Status read_tensor_scales(storage::FileSystem& fs);
  Result<storage::IoRead> read_of(storage::SlotKey key, std::span<std::byte> slot) override;
  Status check(size_t at, const std::byte* slot);
  // Walks other than `but` give up what they pinned ahead; true if any had something.
  bool reclaim(const ExpertWalk* but);

  const Survey& survey_;
  const int64_t experts_;
  std::vector<Expert> all_;  // [layers * experts]; parts empty where the layer has none
  std::unique_ptr<std::atomic<bool>[]> codes_checked_;
  std::vector<std::unique_ptr<storage::File>> files_;
  std::vector<ExpertWalk*> walks_;
  std::unique_ptr<storage::SlotCache> cache_;
};

// One pass over experts of a layer, in ascending id across several steps; reads run ahead as far as slots allow.
class ExpertWalk {
 public:
  struct Ready {
    int32_t expert;
    ExpertWeights weights;
  };
  // ids ascending: every expert the pass will need.
  ExpertWalk(ExpertStore* store, int64_t layer, std::vector<int32_t> ids);
  ~ExpertWalk();
  ExpertWalk(const ExpertWalk&) = delete;
  ExpertWalk& operator=(const ExpertWalk&) = delete;

  // Hands each of `ids` (ascending, the next of the pass; the last may come again) to compute() exactly once, those
  // that are there first, the rest as they arrive, several at a time. `keep_last`: the last one is needed again.
  Status each(std::span<const int32_t> ids, bool keep_last,
              const std::function<Status(std::span<const Ready>)>& compute);
  // Starts reads as far as slots allow; each() does it too.
  Status ask();
  bool all_asked() const { return next_ == ids_.size(); }

 private:
  friend class ExpertStore;
  bool release_ahead();

  ExpertStore* const store_;
  const int64_t layer_;
  const std::vector<int32_t> ids_;
  std::vector<storage::SlotCache::Pin> pins_;  // [ids]
  std::vector<bool> done_;
  size_t next_ = 0;   // the first that was not asked for yet; some behind it may be pinned already
  size_t first_ = 0;  // the first that is not done
};

}  // namespace firn::model
