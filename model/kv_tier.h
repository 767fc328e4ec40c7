// Far K and V: segment logs on disk and the near cache of sealed blocks that come back from them.
//
// A sealed block of a sparse layer is named by a key made of its log, layer, group and block number. KvCache writes
// sealed blocks to a log and keeps keys; an attention call pins what its queries chose (model/forward.cc). Logs are
// shared by the sequences that refer to blocks in them (forks), and live as long as any of them or a read in flight.
//
// Threads: as KvCache; read_of() is called by the near cache. Lock order: the cache's mutex, then mutex_, then the
// log's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/ops.h"
#include "storage/kv_log.h"
#include "storage/slot_cache.h"

namespace firn::model {

// A log under its number in a tier.
struct KvLogHandle {
  int32_t id = 0;
  bool durable = false;
  std::unique_ptr<storage::KvLog> log;
};

class KvTier final : private storage::SlotSource {
 public:
  struct Options {
    // Sealed blocks leave memory for a log, and at most near_bytes of them are kept in or come back to the near cache;
    // otherwise they stay where they are, and the cache serves reopened sessions.
    bool limited = false;
    int64_t near_bytes = 0;
    storage::PolicyOptions policy;
    std::vector<std::string> dirs;  // for scratch logs; the first is where they are made
    storage::KvLogOptions log;      // disk limit, compression, segment size
  };
  // All referenced objects must outlive the tier.
  static Result<std::unique_ptr<KvTier>> create(storage::FileSystem& fs, Arena* arena, storage::IoQueue* queue,
                                                const KvLayout& layout, Options options);
  ~KvTier() override;

  bool limited() const { return options_.limited; }
  storage::SlotCache& near() { return *near_; }
  storage::IoQueue& queue() { return *queue_; }
  storage::FileSystem& file_system() { return fs_; }
  const Options& options() const { return options_; }

  std::shared_ptr<KvLogHandle> add(std::unique_ptr<storage::KvLog> log, bool durable);
  // A log that goes away with the last sequence that uses it.
  Result<std::shared_ptr<KvLogHandle>> scratch();

  static storage::SlotKey key(int32_t log, int64_t layer, int64_t group, int64_t block) {
    return (static_cast<uint64_t>(log) << 48) | (static_cast<uint64_t>(layer) << 36) |
           (static_cast<uint64_t>(group) << 28) | static_cast<uint64_t>(block);
  }
  static storage::BlockKey block_of(storage::SlotKey key) {
    return {storage::BlockKind::kKv, static_cast<uint16_t>(key >> 36 & 0xFFF), static_cast<uint16_t>(key >> 28 & 0xFF),
            static_cast<uint32_t>(key & 0xFFFFFFF)};
  }
  // Reads a block outside the cache; `dst` holds a whole block.
  Result<storage::IoTicket> read(storage::SlotKey key, std::span<std::byte> dst);
  int64_t bytes_on_disk() const;  // of all logs alive
  int64_t bytes_written() const;

 private:
  KvTier(storage::FileSystem& fs, storage::IoQueue* queue, const KvLayout& layout, Options options);
  Result<storage::IoRead> read_of(storage::SlotKey key, std::span<std::byte> slot) override;
  std::shared_ptr<KvLogHandle> find(storage::SlotKey key) const;

  storage::FileSystem& fs_;
  storage::IoQueue* const queue_;
  const KvLayout layout_;
  const Options options_;
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<KvLogHandle>> logs_;  // guarded by mutex_; index = id, from 1: no key is 0
  int64_t scratch_made_ = 0;
  std::unique_ptr<storage::SlotCache> near_;
};

}  // namespace firn::model
