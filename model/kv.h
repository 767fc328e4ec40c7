// One sequence's K, V and index keys, held in tables of reference-counted blocks.
//
// A KV block is one layer, one group, block_tokens positions (runtime/ops.h: KvLayout); an index block is one sparse
// layer's keys of the same positions. Nothing assumes that neighbouring blocks are adjacent in memory, so fork shares
// blocks, truncate may cut across a block border, and a shared block is copied before it is written.
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
};

class KvCache {
 public:
  explicit KvCache(KvPools* pools);
  KvCache(KvCache&&) = default;
  KvCache& operator=(KvCache&&) = default;

  int64_t length() const { return length_; }
  const KvLayout& layout() const { return pools_->layout; }

  // Makes positions [length, length + tokens) writable in every layer: allocates blocks and copies a shared open block.
  // Nothing changes when it fails. Tables stay where they are until the next reserve.
  Status reserve(int64_t tokens);
  // Accepts the first `tokens` of what was reserved and written; the rest of the reservation is dropped.
  void commit(int64_t tokens);
  // Forgets positions >= n (n <= length) and any reservation.
  void truncate(int64_t n);
  // A second sequence with the same content; blocks are shared until one of them writes.
  KvCache fork() const;

  // What a layer's operations need for rows [row_begin, row_begin + n_rows) at positions from pos_begin.
  KvSpan span(int64_t layer, int64_t row_begin, int64_t n_rows, int64_t pos_begin) const;

  int64_t bytes() const;  // of the blocks this sequence refers to, shared ones included
  // Bytes that `tokens` positions take in all layers, whole blocks.
  static int64_t bytes_for(const ModelConfig& config, const KvLayout& layout, int64_t tokens);

 private:
  struct Layer {
    std::vector<BlockRef> kv;     // [groups][capacity]
    std::vector<void*> kv_table;  // same shape
    std::vector<BlockRef> index;  // [capacity]; empty for dense layers
    std::vector<void*> index_table;
  };
  int64_t blocks_for(int64_t tokens) const;
  void grow_tables(int64_t blocks);

  KvPools* pools_ = nullptr;
  int64_t length_ = 0;
  int64_t blocks_ = 0;    // blocks present in every layer
  int64_t capacity_ = 0;  // table entries a group
  std::vector<Layer> layers_;
};

}  // namespace firn::model
