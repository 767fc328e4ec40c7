// One sequence's K, V and index keys, held in tables of reference-counted blocks.
//
// A KV block is one layer, one group, block_tokens positions (runtime/ops.h: KvLayout); an index block is one sparse
// layer's keys of the same positions. Nothing assumes that neighbouring blocks are adjacent in memory, so fork shares
// blocks, truncate may cut across a block border, and a shared block is copied before it is written.
//
// Where blocks are. Index keys, dense layers' KV and the open block of every layer are near, in blocks of the pools.
// With a KvTier, sealed blocks are written to a log, and where the tier is limited those of sparse layers then leave
// memory: their table entry is null until somebody pins the block in the tier's near cache (set_near). What a wave
// appends to a layer is near while the wave passes that layer, and so, for waves of many rows, is all the layer held
// before: begin_layer() brings it, end_layer() writes what is full in one run and lets it go. Small waves leave writing
// to commit(). None of this changes a byte that attention sees.
//
// Threads: a KvCache is used by one thread at a time; BlockPools may be shared by caches on different threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/kv_tier.h"
#include "runtime/ops.h"

namespace firn::model {

class BlockPool;

// Counted handle to one block; copying shares it.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(const BlockRef& other);
  BlockRef(BlockRef&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  BlockRef& operator=(BlockRef other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~BlockRef();

  void* data() const;
  bool shared() const;  // somebody else holds it too
  bool empty() const { return block_ == nullptr; }

 private:
  friend class BlockPool;
  struct Block {
    void* data;
    BlockPool* pool;
    std::atomic<int32_t> refs;
  };
  explicit BlockRef(Block* block) : block_(block) {}
  Block* block_ = nullptr;
};

// Blocks of one size out of slabs of one arena. Freed blocks are kept for reuse; trim() returns slabs that are wholly
// free.
class BlockPool {
 public:
  BlockPool(Arena* arena, int64_t block_bytes, std::string what);
  ~BlockPool();  // CHECKs that no block is still held

  // Makes sure that `n` acquire() calls in a row succeed, or says what is short. Others may take them meanwhile.
  Status ensure_free(int64_t n);
  Result<BlockRef> acquire();
  int64_t block_bytes() const { return block_bytes_; }
  int64_t blocks_in_use() const;
  int64_t bytes_held() const;
  void trim();

 private:
  friend class BlockRef;
  struct Slab {
    Buffer memory;
    std::vector<std::unique_ptr<BlockRef::Block>> blocks;
  };
  void release(BlockRef::Block* block);
  Status add_slab_locked(int64_t at_least);

  Arena* const arena_;
  const int64_t block_bytes_;
  const std::string what_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;             // guarded by mutex_
  std::vector<BlockRef::Block*> free_;  // guarded by mutex_
  int64_t in_use_ = 0;                  // guarded by mutex_
};

// The two pools every sequence of a model draws from, on one Ops object.
struct KvPools {
  KvPools(Ops* ops_in, Arena* arena, const ModelConfig& config_in, DType dtype);
  Ops* const ops;
  const ModelConfig& config;
  const KvLayout layout;
  BlockPool kv;
  BlockPool index;
  KvTier* tier = nullptr;  // null: everything stays near and nothing is logged
};

class KvCache {
 public:
  // Waves of at least so many rows bring a layer's far blocks near all at once instead of those they choose.
  static constexpr int64_t kManyRows = 64;

  explicit KvCache(KvPools* pools);
  KvCache(KvCache&&) = default;
  KvCache& operator=(KvCache&&) = default;

  int64_t length() const { return length_; }
  const KvLayout& layout() const { return pools_->layout; }

  // Makes positions [length, length + tokens) writable in every layer: allocates blocks and copies a shared open block.
  // Nothing changes when it fails. Tables stay where they are until the next reserve. In a limited tier blocks of
  // sparse layers come with begin_layer.
  Status reserve(int64_t tokens);
  // Around a layer's attention in a wave of `rows` rows (of all sequences).
  Status begin_layer(int64_t layer, int64_t rows);
  Status end_layer(int64_t layer);
  // Accepts the first `tokens` of what was reserved and written; the rest of the reservation is dropped. Blocks that
  // filled go to the log. On an error they stay near and the tokens are accepted all the same.
  Status commit(int64_t tokens);
  // Forgets positions >= n (n <= length) and any reservation.
  void truncate(int64_t n);
  // A second sequence with the same content; blocks are shared until one of them writes.
  KvCache fork() const;

  // What a layer's operations need for rows [row_begin, row_begin + n_rows) at positions from pos_begin.
  KvSpan span(int64_t layer, int64_t row_begin, int64_t n_rows, int64_t pos_begin) const;

  // Key of a block that is not near (0 if it is), and its address while somebody holds it near (null again after).
  storage::SlotKey far_key(int64_t layer, int64_t group, int64_t block) const {
    const Layer& tables = layers_[layer];
    const int64_t at = group * capacity_ + block;
    return tables.kv_table[at] == nullptr && !tables.far.empty() ? tables.far[at] : 0;
  }
  void set_near(int64_t layer, int64_t group, int64_t block, void* data) {
    layers_[layer].kv_table[group * capacity_ + block] = data;
  }
  // Whether any block of a sparse layer could be far; far_key() answers for one.
  bool may_be_far() const { return pools_->tier != nullptr; }
  KvTier* tier() const { return pools_->tier; }
  int64_t far_blocks() const;  // K and V blocks that only the log (and perhaps the near cache) holds

  // --- Sessions on disk: everything goes to `log`, index keys and dense layers included.
  void attach(std::shared_ptr<KvLogHandle> log);
  const std::shared_ptr<KvLogHandle>& log() const { return log_; }
  // Writes what fork, save and reopen need beside the sealed blocks: the open block of every layer.
  Status log_open_blocks();
  // Becomes the sequence of `length` tokens that the log holds: reads index keys and dense layers, refers to the rest.
  Status restore(std::shared_ptr<KvLogHandle> log, int64_t length);
  // In the middle of a wave that another process began: positions [length, length + tokens) are reserved and layers
  // below `layers` hold them already, full blocks in the log and the open block as log_open_blocks(layer) wrote it.
  Status restore_wave(int64_t tokens, int64_t layers);
  Status log_open_block(int64_t layer);

  int64_t bytes() const;  // of the blocks this sequence refers to, shared ones included
  // Bytes that `tokens` positions take in all layers, whole blocks.
  static int64_t bytes_for(const ModelConfig& config, const KvLayout& layout, int64_t tokens);
  // Of these, what may be far: K and V of sparse layers.
  static int64_t far_bytes_for(const ModelConfig& config, const KvLayout& layout, int64_t tokens);
  // The smallest near cache: what one token may choose in a layer, and a few more.
  static int64_t least_near_bytes(const ModelConfig& config, const KvLayout& layout);
  // What a limited tier needs near besides dense layers, index keys and its cache, for waves of `rows` rows: open
  // blocks, and one layer's K and V.
  static int64_t working_bytes(const ModelConfig& config, const KvLayout& layout, int64_t context, int64_t rows);

 private:
  struct Layer {
    std::vector<BlockRef> kv;           // [groups][capacity]
    std::vector<void*> kv_table;        // same shape
    std::vector<storage::SlotKey> far;  // same shape; 0: in no log. Empty without a tier
    std::vector<BlockRef> index;        // [capacity]; empty for dense layers
    std::vector<void*> index_table;
    int64_t logged = 0;  // blocks [0, logged) are in a log
  };
  int64_t blocks_for(int64_t tokens) const;
  void grow_tables(int64_t blocks);
  bool leaves(int64_t layer) const;     // its sealed blocks leave memory
  bool is_logged(int64_t layer) const;  // its sealed blocks are written
  Status ensure_log();
  Status seal(int64_t layer_begin, int64_t layer_end, int64_t blocks, bool keep_all);
  Status bring(int64_t layer, int64_t block_begin, int64_t block_end);
  Status read_near(int64_t layer_begin, int64_t layer_end, int64_t block_begin, int64_t block_end);
  void let_go(int64_t layer, int64_t begin, int64_t end);

  KvPools* pools_ = nullptr;
  int64_t length_ = 0;
  int64_t reserved_ = 0;  // tokens beyond length_
  int64_t blocks_ = 0;    // blocks present in every layer
  int64_t capacity_ = 0;  // table entries a group
  std::vector<Layer> layers_;
  std::shared_ptr<KvLogHandle> log_;                  // where sealed blocks go; null until one does
  std::vector<std::shared_ptr<KvLogHandle>> shared_;  // of sequences this one was forked from
  mutable std::shared_ptr<char> forks_;               // held by every fork as well
  std::vector<std::shared_ptr<char>> parents_;
  bool conflict_ = false;     // a durable log would have to hold two versions of a block
  int64_t brought_from_ = 0;  // first block that begin_layer() made near
};

}  // namespace firn::model
