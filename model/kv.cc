#include "model/kv.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

namespace firn::model {

namespace {
// Large enough for huge pages, small enough that a short question does not hold much.
constexpr int64_t kSlabBytes = int64_t{4} << 20;
}  // namespace

BlockRef::BlockRef(const BlockRef& other) : block_(other.block_) {
  if (block_ != nullptr) block_->refs.fetch_add(1, std::memory_order_relaxed);
}

BlockRef::~BlockRef() {
  if (block_ != nullptr && block_->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) block_->pool->release(block_);
}

void* BlockRef::data() const { return block_ == nullptr ? nullptr : block_->data; }
bool BlockRef::shared() const { return block_ != nullptr && block_->refs.load(std::memory_order_acquire) > 1; }

BlockPool::BlockPool(Arena* arena, int64_t block_bytes, std::string what)
    : arena_(arena), block_bytes_(block_bytes), what_(std::move(what)) {}

BlockPool::~BlockPool() { FIRN_CHECK(in_use_ == 0, fmt::format("{} blocks of {} still held", in_use_, what_)); }

Status BlockPool::add_slab_locked(int64_t at_least) {
  const int64_t n = std::max(at_least, std::max<int64_t>(1, kSlabBytes / block_bytes_));
  auto memory = arena_->allocate(n * block_bytes_, what_);
  int64_t count = n;
  if (!memory.ok() && n > at_least) {  // a full slab does not fit: take what is needed
    memory = arena_->allocate(at_least * block_bytes_, what_);
    count = at_least;
  }
  if (!memory.ok()) return memory.status();
  Slab slab;
  slab.memory = std::move(memory).value();
  slab.blocks.reserve(count);
  for (int64_t i = count - 1; i >= 0; --i) {
    auto block = std::make_unique<BlockRef::Block>();
    block->data = slab.memory.as<std::byte>() + i * block_bytes_;
    block->pool = this;
    block->refs.store(0, std::memory_order_relaxed);
    free_.push_back(block.get());
    slab.blocks.push_back(std::move(block));
  }
  slabs_.push_back(std::move(slab));
  return {};
}

Status BlockPool::ensure_free(int64_t n) {
  const std::lock_guard lock(mutex_);
  const int64_t missing = n - static_cast<int64_t>(free_.size());
  return missing <= 0 ? Status() : add_slab_locked(missing);
}

Result<BlockRef> BlockPool::acquire() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) FIRN_TRY(add_slab_locked(1));
  BlockRef::Block* block = free_.back();
  free_.pop_back();
  ++in_use_;
  block->refs.store(1, std::memory_order_relaxed);
  return BlockRef(block);
}

void BlockPool::release(BlockRef::Block* block) {
  const std::lock_guard lock(mutex_);
  free_.push_back(block);
  --in_use_;
}

int64_t BlockPool::blocks_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

int64_t BlockPool::bytes_held() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory.bytes();
  return total;
}

void BlockPool::trim() {
  const std::lock_guard lock(mutex_);
  // The free list decides: a block whose count is zero may still be on its way there, waiting for mutex_.
  std::unordered_set<const BlockRef::Block*> listed(free_.begin(), free_.end());
  std::erase_if(slabs_, [&](const Slab& slab) {
    const bool unused =
        std::all_of(slab.blocks.begin(), slab.blocks.end(), [&](const auto& b) { return listed.count(b.get()) > 0; });
    if (unused) {
      for (const auto& block : slab.blocks) listed.erase(block.get());
    }
    return unused;
  });
  std::erase_if(free_, [&](const BlockRef::Block* block) { return listed.count(block) == 0; });
}

KvPools::KvPools(Ops* ops_in, Arena* arena, const ModelConfig& config_in, DType dtype)
    : ops(ops_in),
      config(config_in),
      layout(config_in.kv_layout(dtype)),
      kv(arena, layout.kv_block_bytes(), "K and V blocks"),
      index(arena, layout.index_block_bytes(), "index-key blocks") {}

KvCache::KvCache(KvPools* pools) : pools_(pools), layers_(pools->config.layers) {}

int64_t KvCache::blocks_for(int64_t tokens) const {
  const int64_t n = pools_->layout.block_tokens;
  return (tokens + n - 1) / n;
}

int64_t KvCache::bytes_for(const ModelConfig& config, const KvLayout& layout, int64_t tokens) {
  const int64_t blocks = (tokens + layout.block_tokens - 1) / layout.block_tokens;
  return blocks *
         (config.layers * layout.groups * layout.kv_block_bytes() + config.n_sparse() * layout.index_block_bytes());
}

int64_t KvCache::bytes() const {
  const KvLayout& l = pools_->layout;
  return blocks_ *
         (pools_->config.layers * l.groups * l.kv_block_bytes() + pools_->config.n_sparse() * l.index_block_bytes());
}

void KvCache::grow_tables(int64_t blocks) {
  if (blocks <= capacity_) return;
  const int64_t groups = pools_->layout.groups;
  const int64_t capacity = std::max(blocks, capacity_ * 2);
  for (int64_t layer = 0; layer < pools_->config.layers; ++layer) {
    Layer& tables = layers_[layer];
    std::vector<BlockRef> kv(groups * capacity);
    std::vector<void*> kv_table(groups * capacity, nullptr);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t b = 0; b < blocks_; ++b) {
        kv[g * capacity + b] = std::move(tables.kv[g * capacity_ + b]);
        kv_table[g * capacity + b] = tables.kv_table[g * capacity_ + b];
      }
    }
    tables.kv = std::move(kv);
    tables.kv_table = std::move(kv_table);
    if (pools_->config.sparse_layer[layer]) {
      tables.index.resize(capacity);
      tables.index_table.resize(capacity, nullptr);
    }
  }
  capacity_ = capacity;
}

Status KvCache::reserve(int64_t tokens) {
  truncate(length_);  // drops an earlier reservation
  const ModelConfig& config = pools_->config;
  const KvLayout& layout = pools_->layout;
  const int64_t blocks = blocks_for(length_ + tokens);
  const int64_t fresh = blocks - blocks_;

  // The open block is written in place unless a fork holds it too.
  const bool open = tokens > 0 && length_ % layout.block_tokens != 0;
  std::vector<std::pair<BlockRef*, void**>> copies;
  int64_t kv_copies = 0;
  if (open) {
    for (Layer& tables : layers_) {
      for (int64_t g = 0; g < layout.groups; ++g) {
        const int64_t at = g * capacity_ + blocks_ - 1;
        if (tables.kv[at].shared()) copies.emplace_back(&tables.kv[at], &tables.kv_table[at]);
      }
    }
    kv_copies = static_cast<int64_t>(copies.size());
    for (Layer& tables : layers_) {
      if (!tables.index.empty() && tables.index[blocks_ - 1].shared()) {
        copies.emplace_back(&tables.index[blocks_ - 1], &tables.index_table[blocks_ - 1]);
      }
    }
  }
  const int64_t index_copies = static_cast<int64_t>(copies.size()) - kv_copies;
  const std::string context = fmt::format("{} more tokens after {}", tokens, length_);
  Status room = pools_->kv.ensure_free(fresh * config.layers * layout.groups + kv_copies);
  if (room.ok()) room = pools_->index.ensure_free(fresh * config.n_sparse() + index_copies);
  if (!room.ok()) {
    pools_->kv.trim();  // one pool may have grown in vain
    return room.with_context(context);
  }

  std::vector<BlockRef> replacements;
  for (size_t i = 0; i < copies.size(); ++i) {
    BlockPool& pool = static_cast<int64_t>(i) < kv_copies ? pools_->kv : pools_->index;
    FIRN_ASSIGN(BlockRef copy, pool.acquire());
    pools_->ops->copy(copy.data(), copies[i].first->data(), pool.block_bytes());
    replacements.push_back(std::move(copy));
  }
  std::vector<BlockRef> fresh_kv, fresh_index;
  for (int64_t i = 0; i < fresh * config.layers * layout.groups; ++i) {
    FIRN_ASSIGN(BlockRef block, pools_->kv.acquire());
    fresh_kv.push_back(std::move(block));
  }
  for (int64_t i = 0; i < fresh * config.n_sparse(); ++i) {
    FIRN_ASSIGN(BlockRef block, pools_->index.acquire());
    fresh_index.push_back(std::move(block));
  }

  // Nothing fails from here on.
  for (size_t i = 0; i < copies.size(); ++i) {
    *copies[i].second = replacements[i].data();
    *copies[i].first = std::move(replacements[i]);
  }
  grow_tables(blocks);
  size_t next_kv = 0, next_index = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    Layer& tables = layers_[layer];
    for (int64_t g = 0; g < layout.groups; ++g) {
      for (int64_t b = blocks_; b < blocks; ++b) {
        tables.kv_table[g * capacity_ + b] = fresh_kv[next_kv].data();
        tables.kv[g * capacity_ + b] = std::move(fresh_kv[next_kv++]);
      }
    }
    if (!config.sparse_layer[layer]) continue;
    for (int64_t b = blocks_; b < blocks; ++b) {
      tables.index_table[b] = fresh_index[next_index].data();
      tables.index[b] = std::move(fresh_index[next_index++]);
    }
  }
  blocks_ = blocks;
  return {};
}

void KvCache::commit(int64_t tokens) {
  FIRN_CHECK(blocks_for(length_ + tokens) <= blocks_, "commit of more than was reserved");
  truncate(length_ += tokens);
}

void KvCache::truncate(int64_t n) {
  FIRN_CHECK(n >= 0 && n <= length_, fmt::format("truncate({}) of a sequence of {}", n, length_));
  const int64_t keep = blocks_for(n);
  for (Layer& tables : layers_) {
    for (int64_t g = 0; g < pools_->layout.groups; ++g) {
      for (int64_t b = keep; b < blocks_; ++b) {
        tables.kv[g * capacity_ + b] = BlockRef();
        tables.kv_table[g * capacity_ + b] = nullptr;
      }
    }
    if (tables.index.empty()) continue;
    for (int64_t b = keep; b < blocks_; ++b) {
      tables.index[b] = BlockRef();
      tables.index_table[b] = nullptr;
    }
  }
  blocks_ = keep;
  length_ = n;
}

KvCache KvCache::fork() const {
  KvCache other(pools_);
  other.length_ = length_;
  other.blocks_ = blocks_;
  other.capacity_ = capacity_;
  other.layers_ = layers_;
  other.truncate(length_);  // a reservation is not shared
  return other;
}

KvSpan KvCache::span(int64_t layer, int64_t row_begin, int64_t n_rows, int64_t pos_begin) const {
  const Layer& tables = layers_[layer];
  KvSpan s;
  s.row_begin = row_begin;
  s.n_rows = n_rows;
  s.pos_begin = pos_begin;
  s.kv = tables.kv_table.data();
  s.index = tables.index_table.empty() ? nullptr : tables.index_table.data();
  s.table_stride = capacity_;
  return s;
}

}  // namespace firn::model
