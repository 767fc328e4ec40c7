#include "model/kv_tier.h"

#include <fmt/format.h>
#include <unistd.h>

namespace firn::model {

using storage::SlotKey;

KvTier::KvTier(storage::FileSystem& fs, storage::IoQueue* queue, const KvLayout& layout, Options options)
    : fs_(fs), queue_(queue), layout_(layout), options_(std::move(options)), logs_(1) {}

KvTier::~KvTier() {
  if (near_ != nullptr) near_->cancel_speculation();
  near_.reset();
}

Result<std::unique_ptr<KvTier>> KvTier::create(storage::FileSystem& fs, Arena* arena, storage::IoQueue* queue,
                                               const KvLayout& layout, Options options) {
  std::unique_ptr<KvTier> tier(new KvTier(fs, queue, layout, std::move(options)));
  const int64_t block = (layout.kv_block_bytes() + 4095) / 4096 * 4096;
  const int64_t slots = std::clamp<int64_t>(tier->options_.near_bytes / block, 1, int64_t{1} << 30);
  FIRN_ASSIGN(tier->near_, storage::SlotCache::create(arena, "near KV blocks", static_cast<int32_t>(slots), block,
                                                      tier->options_.policy, queue, tier.get()));
  return tier;
}

std::shared_ptr<KvLogHandle> KvTier::add(std::unique_ptr<storage::KvLog> log, bool durable) {
  auto handle = std::make_shared<KvLogHandle>();
  handle->log = std::move(log);
  handle->durable = durable;
  const std::lock_guard lock(mutex_);
  FIRN_CHECK(logs_.size() < 65535, "more logs than keys can name");
  handle->id = static_cast<int32_t>(logs_.size());
  logs_.push_back(handle);
  return handle;
}

Result<std::shared_ptr<KvLogHandle>> KvTier::scratch() {
  FIRN_CHECK(!options_.dirs.empty(), "a scratch log without a folder");
  storage::KvLogOptions log = options_.log;
  log.durable = false;
  log.identity = "scratch";
  const std::string name = fmt::format("firn-kv-{}-{}-{}", ::getpid(), static_cast<const void*>(this), scratch_made_++);
  log.more_dirs.clear();
  for (size_t i = 1; i < options_.dirs.size(); ++i) log.more_dirs.push_back(options_.dirs[i] + "/" + name);
  FIRN_ASSIGN(auto made, storage::KvLog::create(fs_, options_.dirs.front() + "/" + name, log));
  return add(std::move(made), false);
}

std::shared_ptr<KvLogHandle> KvTier::find(SlotKey key) const {
  const std::lock_guard lock(mutex_);
  const auto id = static_cast<size_t>(key >> 48);
  return id < logs_.size() ? logs_[id].lock() : nullptr;
}

Result<storage::IoRead> KvTier::read_of(SlotKey key, std::span<std::byte> slot) {
  const std::shared_ptr<KvLogHandle> handle = find(key);
  if (handle == nullptr) return internal("a KV block of a log that is closed");
  const storage::BlockKey block = block_of(key);
  const auto place = handle->log->find(block);
  if (!place.has_value()) {
    return corrupt(
        fmt::format("{}: no block {} of layer {}, group {}: the log does not hold what the session refers to",
                    handle->log->dir(), block.block, block.layer, block.group));
  }
  if (place->bytes != layout_.kv_block_bytes()) {
    return corrupt(fmt::format("{}: block {} of layer {}, group {}: expected {} bytes, found {}", handle->log->dir(),
                               block.block, block.layer, block.group, layout_.kv_block_bytes(), place->bytes));
  }
  storage::IoRead read = handle->log->read_of(block, *place, slot.first(static_cast<size_t>(place->bytes)));
  read.finish = [handle, check = std::move(read.finish)] { return check ? check() : Status(); };
  return read;
}

Result<storage::IoTicket> KvTier::read(SlotKey key, std::span<std::byte> dst) {
  FIRN_ASSIGN(storage::IoRead read, read_of(key, dst));
  return queue_->submit(std::move(read));
}

int64_t KvTier::bytes_on_disk() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& weak : logs_) {
    if (const auto handle = weak.lock()) total += handle->log->stats().bytes_on_disk;
  }
  return total;
}

int64_t KvTier::bytes_written() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& weak : logs_) {
    if (const auto handle = weak.lock()) total += handle->log->stats().bytes_written;
  }
  return total;
}

}  // namespace firn::model
