// The segment log: where K, V and index keys go when they leave memory, and what a session reopens from.
//
// A log is a folder. It holds the lock file, segments (append-only files of about segment_bytes) and the journal; with
// several drives each further one has a folder of its own with segments of its own, named in the first folder. The byte
// format is in storage/FORMAT.md.
//
// Append-only: append() writes records, each an aligned directory page (keys, places, checksums of the blocks in it)
// and the blocks, each aligned to 4096 so that one direct read brings it back. commit() makes everything before it
// durable together with a state blob of the caller's: after a crash at any moment, open() gives exactly what the last
// complete commit held, and the log goes on from there. An entry supersedes an earlier one of the same key; drop()
// forgets keys. Space of dead entries comes back by compact(), which is crash-safe too.
//
// journal() keeps small notes (token ids) that survive the death of the process, though not of the machine, without a
// commit; commit() empties it; open() hands out the complete ones since the last commit.
//
// Threads: one thread at a time appends, commits, drops and compacts; find() and read_of() may be called from others
// meanwhile (one mutex guards the table; no I/O under it). One process at a time: a second open() of the same folder
// fails and names the holder's process id.
//
// Errors: what is on disk is never trusted. A block whose checksum does not match is kCorrupt naming file, layer,
// block, expected and found; a torn tail behind the last commit is cut off silently, since nothing in it was promised;
// damage before it is an error of the entry concerned, found at the latest when it is read. ENOSPC and the limit leave
// the log as of the last commit plus what was appended completely; append may be tried again. After a failed sync
// nobody knows what reached the drive: every later write is refused, and the log must be opened again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"
#include "storage/io_queue.h"

namespace firn::storage {

// Open-ended: a log stores any kind from 1 to 255.
enum class BlockKind : uint8_t { kKv = 1, kIndex = 2, kTokens = 3 };

struct BlockKey {
  BlockKind kind = BlockKind::kKv;
  uint16_t layer = 0;
  uint16_t group = 0;  // 0 for index keys
  uint32_t block = 0;
  auto operator<=>(const BlockKey&) const = default;
};

// Where a block lies. Stays valid until the log is compacted or closed.
struct BlockPlace {
  int32_t file = -1;  // of the log's own numbering
  int64_t offset = 0;
  int64_t stored_bytes = 0;  // on disk; a multiple of 4096 is read
  int64_t bytes = 0;         // in memory
  uint64_t checksum = 0;     // XXH3-64 of the stored bytes
  uint8_t codec = 0;         // 0 as it is, 1 zstd after a byte-plane split
};

struct LogEntry {
  BlockKey key;
  std::span<const std::byte> bytes;  // any alignment; 1 byte to 1 GiB
};

struct KvLogOptions {
  std::vector<std::string> more_dirs;  // further drives: records are spread over the log's folder and these
  std::string identity;  // what must match when it is opened again: model hash, dtypes, block shape; one line of words
  int64_t disk_limit_bytes = -1;  // of all drives together; < 0: none
  int64_t segment_bytes = int64_t{1} << 30;
  bool durable = true;    // false: a scratch log; nothing is synced, and destruction removes the folder
  bool compress = false;  // zstd with a byte-plane split for what gains by it
  int element_bytes = 2;  // of the byte-plane split
};

struct KvLogStats {
  int64_t bytes_appended = 0;       // blocks as the caller gave them
  int64_t bytes_stored = 0;         // of these blocks as they were stored, compressed or not: ratio = appended / stored
  int64_t bytes_written = 0;        // to files, everything included (drives wear)
  int64_t bytes_on_disk = 0;        // now, all drives
  int64_t bytes_dead = 0;           // of these, of superseded or dropped entries
  int64_t metadata_bytes_read = 0;  // by open()
  int64_t records = 0, commits = 0, entries = 0;
  double write_seconds = 0, sync_seconds = 0, compress_seconds = 0;
};

class KvLog {
 public:
  // A new log in a folder that does not exist yet or is empty. The folder's parent must exist.
  static Result<std::unique_ptr<KvLog>> create(FileSystem& fs, const std::string& dir, const KvLogOptions& options);
  // Opens one as of its last commit. options.identity must equal the stored one (or be empty: not compared); the error
  // names both. more_dirs are taken from the log itself; those given must be the same or absent.
  static Result<std::unique_ptr<KvLog>> open(FileSystem& fs, const std::string& dir, const KvLogOptions& options);
  ~KvLog();  // does not commit

  // Appends the blocks, in records of at most a few MiB, and returns their places in the order given. All or nothing is
  // not promised on an error: entries of complete records stay.
  Result<std::vector<BlockPlace>> append(std::span<const LogEntry> entries);
  Status drop(const std::function<bool(const BlockKey&)>& which);  // takes effect on disk with the next commit
  Status commit(std::string_view state);
  Status journal(std::string_view note);  // at most 1 MiB

  const std::string& identity() const;
  const std::string& state() const;               // of the last commit; empty before the first
  const std::vector<std::string>& notes() const;  // journalled after the last commit, as found by open()

  std::optional<BlockPlace> find(const BlockKey& key) const;
  void for_each(const std::function<void(const BlockKey&, const BlockPlace&)>& visit) const;  // ascending keys
  // The read that brings a block to `dst` (place.bytes long; 4096-aligned and stored uncompressed: no copy), checked.
  // `scratch` bytes for a compressed block belong to the read. The log must stay open until it is done.
  IoRead read_of(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const;
  // The same now, without a queue.
  Status read(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const;

  // Re-reads and checks everything; the first problems in words (empty: all well). progress may be empty.
  Result<std::vector<std::string>> verify(const std::function<void(int64_t done, int64_t total)>& progress) const;
  // Rewrites live entries of segments that are mostly dead (or of all) and frees the rest, a segment at a time, within
  // the disk limit. Each segment ends with a commit of the same state, which makes what was appended or dropped since
  // the last commit() last as well: call it right after one. Notes stay.
  // Places change: ask find() again.
  Status compact(bool all, const std::function<void(int64_t done, int64_t total)>& progress);

  KvLogStats stats() const;
  const std::string& dir() const;
  std::vector<std::string> dirs() const;  // all drives' folders

 private:
  struct Core;
  explicit KvLog(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace firn::storage
