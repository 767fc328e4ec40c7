#include "model/kv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace firn::model {

namespace {
// Large enough for huge pages, small enough that a short question does not hold much.
constexpr int64_t kSlabBytes = int64_t{4} << 20;
// A wave that fills at least so many blocks of a layer writes them as soon as the layer is done.
constexpr int64_t kManyBlocks = 8;
// Blocks handed to the log at once, and bytes read at once when a session is opened.
constexpr int64_t kAppendBytes = int64_t{64} << 20;
constexpr int64_t kRestoreBytes = int64_t{32} << 20;
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

int64_t KvCache::far_bytes_for(const ModelConfig& config, const KvLayout& layout, int64_t tokens) {
  return tokens / layout.block_tokens * config.n_sparse() * layout.groups * layout.kv_block_bytes();
}

int64_t KvCache::least_near_bytes(const ModelConfig& config, const KvLayout& layout) {
  constexpr int64_t kSpare = 8;
  return (config.index_heads * config.topk_blocks + kSpare) * layout.kv_block_bytes();
}

int64_t KvCache::working_bytes(const ModelConfig& config, const KvLayout& layout, int64_t context, int64_t rows) {
  const int64_t block = layout.groups * layout.kv_block_bytes();
  const int64_t blocks = (context + layout.block_tokens - 1) / layout.block_tokens;
  // Small waves may fill a few blocks of every layer before they are written.
  const int64_t open = config.n_sparse() * block * 2;
  return open + (rows >= kManyRows ? blocks * block : 0) + std::min(kAppendBytes, blocks * config.layers * block);
}

int64_t KvCache::bytes() const {
  const KvLayout& l = pools_->layout;
  return blocks_ *
         (pools_->config.layers * l.groups * l.kv_block_bytes() + pools_->config.n_sparse() * l.index_block_bytes());
}

bool KvCache::leaves(int64_t layer) const {
  return pools_->tier != nullptr && pools_->tier->limited() && pools_->config.sparse_layer[layer];
}

bool KvCache::is_logged(int64_t layer) const { return leaves(layer) || (log_ != nullptr && log_->durable); }

void KvCache::grow_tables(int64_t blocks) {
  if (blocks <= capacity_) return;
  const int64_t groups = pools_->layout.groups;
  const int64_t capacity = std::max(blocks, capacity_ * 2);
  for (int64_t layer = 0; layer < pools_->config.layers; ++layer) {
    Layer& tables = layers_[layer];
    std::vector<BlockRef> kv(groups * capacity);
    std::vector<void*> kv_table(groups * capacity, nullptr);
    std::vector<storage::SlotKey> far(pools_->tier != nullptr ? groups * capacity : 0, 0);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t b = 0; b < blocks_; ++b) {
        kv[g * capacity + b] = std::move(tables.kv[g * capacity_ + b]);
        kv_table[g * capacity + b] = tables.kv_table[g * capacity_ + b];
        if (!far.empty()) far[g * capacity + b] = tables.far[g * capacity_ + b];
      }
    }
    tables.kv = std::move(kv);
    tables.kv_table = std::move(kv_table);
    tables.far = std::move(far);
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

  // The open block is written in place: it comes back if it had left, and is copied if a fork holds it too.
  const bool open = tokens > 0 && length_ % layout.block_tokens != 0;
  std::vector<std::pair<BlockRef*, void**>> copies;
  int64_t kv_copies = 0;
  if (open) {
    for (int64_t layer = 0; layer < config.layers; ++layer) FIRN_TRY(bring(layer, blocks_ - 1, blocks_));
    for (Layer& tables : layers_) {
      for (int64_t g = 0; g < layout.groups; ++g) {
        const int64_t at = g * capacity_ + blocks_ - 1;
        if (!tables.far.empty()) tables.far[at] = 0;
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
  int64_t kv_layers = 0;  // whose blocks come now
  for (int64_t layer = 0; layer < config.layers; ++layer) kv_layers += !leaves(layer);
  const std::string context = fmt::format("{} more tokens after {}", tokens, length_);
  Status room = pools_->kv.ensure_free(fresh * kv_layers * layout.groups + kv_copies);
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
  for (int64_t i = 0; i < fresh * kv_layers * layout.groups; ++i) {
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
    for (int64_t g = 0; g < layout.groups && !leaves(layer); ++g) {
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
  reserved_ = tokens;
  return {};
}

// Blocks of a layer into memory of the pool: what only the log holds is read, what nobody wrote yet is merely there.
Status KvCache::bring(int64_t layer, int64_t block_begin, int64_t block_end) {
  Layer& tables = layers_[layer];
  const int64_t groups = pools_->layout.groups;
  std::vector<int64_t> missing;
  for (int64_t b = block_begin; b < block_end; ++b) {
    for (int64_t g = 0; g < groups; ++g) {
      if (tables.kv[g * capacity_ + b].empty()) missing.push_back(g * capacity_ + b);
    }
  }
  if (missing.empty()) return {};
  FIRN_TRY(pools_->kv.ensure_free(static_cast<int64_t>(missing.size()))
               .with_context(fmt::format("K and V of {} blocks of layer {}", missing.size(), layer)));
  std::vector<BlockRef> blocks;
  std::vector<storage::IoTicket> reads;
  Status status;
  for (const int64_t at : missing) {
    FIRN_ASSIGN(BlockRef block, pools_->kv.acquire());
    if (!tables.far.empty() && tables.far[at] != 0) {
      auto read = pools_->tier->read(tables.far[at], {static_cast<std::byte*>(block.data()),
                                                      static_cast<size_t>(pools_->layout.kv_block_bytes())});
      if (read.ok()) {
        reads.push_back(std::move(read).value());
      } else {
        status = read.status();
      }
    }
    blocks.push_back(std::move(block));
    if (!status.ok()) break;
  }
  for (const storage::IoTicket& read : reads) {
    if (Status s = read.wait(); status.ok()) status = s;
  }
  FIRN_TRY(status);
  for (size_t i = 0; i < missing.size(); ++i) {
    tables.kv_table[missing[i]] = blocks[i].data();
    tables.kv[missing[i]] = std::move(blocks[i]);
  }
  return {};
}

Status KvCache::begin_layer(int64_t layer, int64_t rows) {
  if (pools_->tier == nullptr) return {};
  const int64_t first = length_ / pools_->layout.block_tokens;
  // A reopened sequence has far blocks in an unlimited tier too.
  brought_from_ = rows >= kManyRows ? 0 : first;
  return bring(layer, brought_from_, blocks_);
}

Status KvCache::end_layer(int64_t layer) {
  if (!is_logged(layer)) return {};
  const int64_t full = (length_ + reserved_) / pools_->layout.block_tokens;
  if (full - layers_[layer].logged >= kManyBlocks) FIRN_TRY(seal(layer, layer + 1, full, false));
  let_go(layer, brought_from_, std::min(full, layers_[layer].logged));
  return {};
}

void KvCache::let_go(int64_t layer, int64_t begin, int64_t end) {
  if (!leaves(layer)) return;
  Layer& tables = layers_[layer];
  for (int64_t g = 0; g < pools_->layout.groups; ++g) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = g * capacity_ + b;
      if (tables.far[at] == 0 || tables.kv[at].empty()) continue;
      tables.kv[at] = BlockRef();
      tables.kv_table[at] = nullptr;
    }
  }
}

Status KvCache::ensure_log() {
  if (conflict_) {
    return unsupported(
        "the session was cut back while questions forked from it still use what was cut: end those first");
  }
  if (log_ != nullptr) return {};
  FIRN_ASSIGN(log_, pools_->tier->scratch());
  return {};
}

// Writes blocks [logged, blocks) of these layers. `keep_all`: into the near cache as well, as they were just made by
// decoding; else only while it has room.
Status KvCache::seal(int64_t layer_begin, int64_t layer_end, int64_t blocks, bool keep_all) {
  const KvLayout& layout = pools_->layout;
  const int64_t raw_index = layout.index_norm_offset();
  std::vector<storage::LogEntry> entries;
  int64_t bytes = 0;
  const auto write = [&]() -> Status {
    if (entries.empty()) return {};
    FIRN_TRY(ensure_log());
    FIRN_ASSIGN([[maybe_unused]] const auto places, log_->log->append(entries));
    for (const storage::LogEntry& entry : entries) {
      const storage::BlockKey& k = entry.key;
      if (k.kind != storage::BlockKind::kKv) continue;
      const storage::SlotKey key = KvTier::key(log_->id, k.layer, k.group, k.block);
      layers_[k.layer].far[k.group * capacity_ + k.block] = key;
      if (!leaves(k.layer)) continue;
      storage::SlotCache& near = pools_->tier->near();
      if (near.contains(key) || (!keep_all && near.in_use() >= near.n_slots())) continue;
      if (auto pin = near.insert(key)) {
        std::memcpy(pin->data(), entry.bytes.data(), entry.bytes.size());
        near.publish(*pin);
      }
    }
    entries.clear();
    bytes = 0;
    return {};
  };
  for (int64_t layer = layer_begin; layer < layer_end; ++layer) {
    if (!is_logged(layer)) continue;
    Layer& tables = layers_[layer];
    for (int64_t b = tables.logged; b < blocks; ++b) {
      const auto at = [&](storage::BlockKind kind, int64_t group) {
        return storage::BlockKey{kind, static_cast<uint16_t>(layer), static_cast<uint16_t>(group),
                                 static_cast<uint32_t>(b)};
      };
      for (int64_t g = 0; g < layout.groups; ++g) {
        const void* data = tables.kv_table[g * capacity_ + b];
        FIRN_CHECK(data != nullptr, "a block to be sealed is not near");
        entries.push_back({at(storage::BlockKind::kKv, g),
                           {static_cast<const std::byte*>(data), static_cast<size_t>(layout.kv_block_bytes())}});
        bytes += layout.kv_block_bytes();
      }
      if (log_ != nullptr && log_->durable && !tables.index.empty()) {
        entries.push_back({at(storage::BlockKind::kIndex, 0),
                           {static_cast<const std::byte*>(tables.index_table[b]), static_cast<size_t>(raw_index)}});
        bytes += raw_index;
      }
      if (bytes >= kAppendBytes) FIRN_TRY(write());
    }
  }
  FIRN_TRY(write());
  for (int64_t layer = layer_begin; layer < layer_end; ++layer) {
    if (is_logged(layer)) layers_[layer].logged = std::max(layers_[layer].logged, blocks);
  }
  return {};
}

Status KvCache::commit(int64_t tokens) {
  FIRN_CHECK(blocks_for(length_ + tokens) <= blocks_, "commit of more than was reserved");
  const int64_t first = length_ / pools_->layout.block_tokens;
  length_ += tokens;
  truncate(length_);
  if (pools_->tier == nullptr) return {};
  const int64_t full = length_ / pools_->layout.block_tokens;
  FIRN_TRY(seal(0, pools_->config.layers, full, true));
  for (int64_t layer = 0; layer < pools_->config.layers; ++layer) let_go(layer, first, layers_[layer].logged);
  if (tokens >= kManyRows && pools_->tier->limited()) pools_->kv.trim();
  return {};
}

void KvCache::truncate(int64_t n) {
  FIRN_CHECK(n >= 0 && n <= length_, fmt::format("truncate({}) of a sequence of {}", n, length_));
  const int64_t keep = blocks_for(n), full = n / pools_->layout.block_tokens;
  bool rewrites = false;  // something logged will be written again
  for (const Layer& tables : layers_) rewrites = rewrites || tables.logged > full;
  if (rewrites && log_ != nullptr) {
    if (forks_.use_count() > 1) {  // they read what this log holds under the same keys
      if (log_->durable) conflict_ = true;
      shared_.push_back(std::move(log_));
      log_ = nullptr;
    } else {
      // Forgotten in memory until the next commit: what fails here is asked again then. The block that is open now may
      // be nowhere else; it is superseded when it is written again.
      (void)log_->log->drop(
          [&](const storage::BlockKey& key) { return key.kind != storage::BlockKind::kTokens && key.block >= keep; });
    }
  }
  for (Layer& tables : layers_) {
    for (int64_t g = 0; g < pools_->layout.groups; ++g) {
      for (int64_t b = std::min(full, keep); b < blocks_; ++b) {
        const int64_t at = g * capacity_ + b;
        if (!tables.far.empty() && tables.far[at] != 0 && rewrites) {
          if (b < keep && tables.kv[at].empty()) continue;  // the open block to be: reserve() brings it back
          const bool ours = log_ != nullptr && static_cast<int32_t>(tables.far[at] >> 48) == log_->id;
          if (ours) pools_->tier->near().drop(tables.far[at]);
          tables.far[at] = 0;
        }
        if (b < keep) continue;
        tables.kv[at] = BlockRef();
        tables.kv_table[at] = nullptr;
      }
    }
    tables.logged = std::min(tables.logged, full);
    if (tables.index.empty()) continue;
    for (int64_t b = keep; b < blocks_; ++b) {
      tables.index[b] = BlockRef();
      tables.index_table[b] = nullptr;
    }
  }
  blocks_ = keep;
  length_ = n;
  reserved_ = 0;
}

KvCache KvCache::fork() const {
  KvCache other(pools_);
  other.length_ = length_;
  other.blocks_ = blocks_;
  other.capacity_ = capacity_;
  other.layers_ = layers_;
  other.shared_ = shared_;
  if (log_ != nullptr) other.shared_.push_back(log_);
  if (forks_ == nullptr) forks_ = std::make_shared<char>();
  other.parents_ = parents_;
  other.parents_.push_back(forks_);
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

int64_t KvCache::far_blocks() const {
  int64_t n = 0;
  for (const Layer& tables : layers_) {
    for (int64_t g = 0; g < pools_->layout.groups && !tables.far.empty(); ++g) {
      for (int64_t b = 0; b < blocks_; ++b) n += tables.kv[g * capacity_ + b].empty();
    }
  }
  return n;
}

void KvCache::attach(std::shared_ptr<KvLogHandle> log) {
  FIRN_CHECK(pools_->tier != nullptr && length_ == 0, "a session's log is attached to an empty sequence");
  log_ = std::move(log);
}

Status KvCache::log_open_block(int64_t layer) {
  const KvLayout& layout = pools_->layout;
  const int64_t tokens = length_ + reserved_;
  if (tokens % layout.block_tokens == 0) return {};
  const int64_t b = tokens / layout.block_tokens;
  Layer& tables = layers_[layer];
  std::vector<storage::LogEntry> entries;
  FIRN_TRY(bring(layer, b, b + 1));
  const storage::BlockKey key{storage::BlockKind::kKv, static_cast<uint16_t>(layer), 0, static_cast<uint32_t>(b)};
  for (int64_t g = 0; g < layout.groups; ++g) {
    storage::BlockKey at = key;
    at.group = static_cast<uint16_t>(g);
    entries.push_back({at,
                       {static_cast<const std::byte*>(tables.kv_table[g * capacity_ + b]),
                        static_cast<size_t>(layout.kv_block_bytes())}});
  }
  if (!tables.index.empty()) {
    storage::BlockKey at = key;
    at.kind = storage::BlockKind::kIndex;
    entries.push_back(
        {at, {static_cast<const std::byte*>(tables.index_table[b]), static_cast<size_t>(layout.index_norm_offset())}});
  }
  return log_->log->append(entries).status();
}

Status KvCache::log_open_blocks() {
  for (int64_t layer = 0; layer < pools_->config.layers; ++layer) FIRN_TRY(log_open_block(layer));
  return {};
}

Status KvCache::restore(std::shared_ptr<KvLogHandle> log, int64_t length) {
  FIRN_CHECK(length_ == 0 && blocks_ == 0, "restore() of a sequence in use");
  log_ = std::move(log);
  const KvLayout& layout = pools_->layout;
  const int64_t blocks = blocks_for(length), full = length / layout.block_tokens;
  grow_tables(blocks);
  blocks_ = blocks;
  length_ = length;
  const Status status = read_near(0, pools_->config.layers, 0, blocks);
  for (Layer& tables : layers_) tables.logged = full;
  if (!status.ok()) {
    log_ = nullptr;
    for (Layer& tables : layers_) tables.logged = 0;
    truncate(0);
  }
  return status;
}

Status KvCache::restore_wave(int64_t tokens, int64_t layers) {
  FIRN_TRY(reserve(tokens));
  const int64_t block = pools_->layout.block_tokens;
  FIRN_TRY(read_near(0, layers, length_ / block, blocks_));
  const int64_t full = (length_ + reserved_) / block;
  for (int64_t layer = 0; layer < layers; ++layer) {
    layers_[layer].logged = full;
    FIRN_TRY(bring(layer, full, blocks_));
    for (int64_t g = 0; g < pools_->layout.groups; ++g) {
      for (int64_t b = full; b < blocks_; ++b) layers_[layer].far[g * capacity_ + b] = 0;
    }
  }
  return {};
}

// Index keys, and K and V of layers that stay near, from the log; for the others only where they are. Positions up to
// length_ + reserved_ are valid.
Status KvCache::read_near(int64_t layer_begin, int64_t layer_end, int64_t block_begin, int64_t block_end) {
  const KvLayout& layout = pools_->layout;
  const storage::KvLog& log = *log_->log;
  const int64_t tokens = length_ + reserved_;
  const int64_t raw_index = layout.index_norm_offset();
  const int64_t at_once = std::max<int64_t>(1, kRestoreBytes / std::max<int64_t>(raw_index, 1));
  const int64_t half = std::min(at_once, block_end - block_begin) * raw_index;
  Buffer staging;
  const auto missing = [&](const storage::BlockKey& key) {
    return corrupt(fmt::format(
        "{}: {} of block {} of layer {}, group {} is not in the log: the session cannot be opened", log.dir(),
        key.kind == storage::BlockKind::kKv ? "K and V" : "the index keys", key.block, key.layer, key.group));
  };
  for (int64_t layer = layer_begin; layer < layer_end; ++layer) {
    Layer& tables = layers_[layer];
    const bool sparse = pools_->config.sparse_layer[layer];
    for (int64_t g = 0; g < layout.groups; ++g) {
      for (int64_t b = block_begin; b < block_end; ++b) {
        const storage::BlockKey key{storage::BlockKind::kKv, static_cast<uint16_t>(layer), static_cast<uint16_t>(g),
                                    static_cast<uint32_t>(b)};
        const auto place = log.find(key);
        if (!place) return missing(key);
        const int64_t at = g * capacity_ + b;
        tables.far[at] = KvTier::key(log_->id, layer, g, b);
        tables.kv[at] = BlockRef();  // what reserve() may have made is empty memory
        tables.kv_table[at] = nullptr;
      }
    }
    if (!sparse) {
      for (int64_t b = block_begin; b < block_end; b += at_once) {
        FIRN_TRY(bring(layer, b, std::min(block_end, b + at_once)));
      }
      continue;
    }
    for (int64_t b = block_begin; b < block_end; ++b) {
      if (!tables.index[b].empty()) continue;
      FIRN_ASSIGN(tables.index[b], pools_->index.acquire());
      tables.index_table[b] = tables.index[b].data();
    }
    if (staging.empty()) {
      FIRN_ASSIGN(staging, pools_->ops->arena().allocate(2 * half, "index keys while a session is opened"));
    }
    // One half is read while the other's keys are appended.
    Status status;
    const auto post = [&](int64_t first) {
      std::vector<storage::IoTicket> reads;
      std::byte* to = staging.as<std::byte>() + (first - block_begin) / at_once % 2 * half;
      for (int64_t b = first; b < std::min(block_end, first + at_once) && status.ok(); ++b, to += raw_index) {
        const storage::BlockKey key{storage::BlockKind::kIndex, static_cast<uint16_t>(layer), 0,
                                    static_cast<uint32_t>(b)};
        const auto place = log.find(key);
        if (!place || place->bytes != raw_index) {
          status = missing(key);
          break;
        }
        reads.push_back(pools_->tier->queue().submit(log.read_of(key, *place, {to, static_cast<size_t>(raw_index)})));
      }
      return reads;
    };
    std::vector<storage::IoTicket> reads = post(block_begin);
    for (int64_t first = block_begin; first < block_end; first += at_once) {
      std::vector<storage::IoTicket> next;
      if (first + at_once < block_end) next = post(first + at_once);
      for (const storage::IoTicket& read : reads) {
        if (Status s = read.wait(); status.ok()) status = s;
      }
      if (status.ok()) {
        // Appending anew makes the norms and the low-bit copy, which are not stored.
        const int64_t begin = first * layout.block_tokens;
        const int64_t rows = std::min((first + at_once) * layout.block_tokens, tokens) - begin;
        const KvSpan spans[] = {span(layer, 0, rows, begin)};
        const ConstMatrixView keys{staging.as<std::byte>() + (first - block_begin) / at_once % 2 * half,
                                   layout.dtype,
                                   rows,
                                   layout.index_dim,
                                   layout.index_dim,
                                   pools_->ops->space()};
        status = pools_->ops->wait(pools_->ops->index_append({keys, spans, layout}));
      }
      reads = std::move(next);
      if (status.ok()) continue;
      for (const storage::IoTicket& read : reads) (void)read.wait();  // nothing writes to staging after this
      return status;
    }
  }
  return {};
}

}  // namespace firn::model
