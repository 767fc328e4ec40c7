// The segment log's files and its writing half; storage/FORMAT.md describes the bytes. Included by kv_log*.cc alone.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>

#include "storage/block_codec.h"
#include "storage/kv_log.h"

namespace firn::storage::kvlog {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr uint32_t kVersion = 1;
constexpr char kSegmentMagic[8] = {'F', 'I', 'R', 'N', 'K', 'V', 'S', '1'};
constexpr uint32_t kRecordMagic = 0x43455246;   // "FREC"
constexpr uint32_t kTailMagic = 0x4C494154;     // "TAIL"
constexpr uint32_t kJournalMagic = 0x4E524A46;  // "FJRN"
constexpr int64_t kRecordBytes = int64_t{8} << 20;
constexpr uint8_t kDropped = 255;  // codec of an entry that forgets its key
constexpr uint32_t kMostBlocks = uint32_t{1} << 24;
constexpr int64_t kTwice = int64_t{64} << 10;  // commits up to this are written twice: one flipped bit loses none
constexpr int64_t kMostState = int64_t{1} << 30;
constexpr int64_t kMostNote = int64_t{1} << 20;

enum RecordType : uint16_t { kBlocks = 1, kCommit = 2, kFooter = 3 };

inline int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage; }
inline double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct SegmentHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;  // pages of the file before the first record
  uint64_t log_id;
  uint32_t drive;
  uint32_t number;
  uint32_t json_bytes;  // behind this struct
  uint32_t zero;
  uint64_t checksum;  // of the header's pages with this field 0
  uint64_t zeros[2];
};
static_assert(sizeof(SegmentHeader) == 64);

struct RecordHeader {
  uint32_t magic;
  uint16_t type;
  uint16_t copies;  // commit: 2 when the same record follows, or is the second of the two
  uint64_t log_id;
  uint64_t sequence;
  uint32_t entries;
  uint32_t directory_pages;  // this header and what follows it, before the blocks
  uint64_t payload_bytes;    // of blocks behind the directory; a multiple of a page
  uint64_t extra;            // commit: bytes of state; footer: offset of the segment's last commit
  uint64_t checksum;         // of the directory pages with this field 0
  uint64_t back;             // commit: bytes from the first of two copies to this one
};
static_assert(sizeof(RecordHeader) == 64);

struct Entry {
  uint8_t kind;
  uint8_t codec;
  uint16_t layer;
  uint16_t group;
  uint16_t zero;
  uint32_t block;
  uint32_t stored;
  uint32_t bytes;
  uint32_t page;  // from the record's start
  uint64_t checksum;
};
static_assert(sizeof(Entry) == 32);

// In a footer, in front of each record's entries.
struct FooterGroup {
  uint64_t sequence;
  uint32_t entries;
  uint32_t page;  // of the record, from the segment's start
  uint64_t zeros[2];
};
static_assert(sizeof(FooterGroup) == 32);

struct DriveState {  // in a commit
  uint32_t segment;  // its last
  uint32_t alive;    // how many segment numbers follow
  uint64_t length;   // of that segment
};
static_assert(sizeof(DriveState) == 16);

struct Tail {
  uint32_t magic;
  uint32_t zero;
  uint64_t log_id;
  uint64_t footer;  // its offset
  uint64_t checksum;
};

struct Note {
  uint32_t magic;
  uint32_t bytes;
  uint64_t log_id;
  uint64_t commit;  // sequence of the commit it follows
  uint64_t checksum;
};

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};

// Page-aligned memory that grows.
class Pages {
 public:
  std::byte* reserve(int64_t bytes) {
    bytes = pages(bytes) * kPage;
    if (bytes > bytes_) {
      data_.reset();
      data_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, static_cast<size_t>(bytes))));
      bytes_ = data_ == nullptr ? 0 : bytes;
    }
    return data_.get();
  }
  std::byte* data() const { return data_.get(); }

 private:
  std::unique_ptr<std::byte, FreeDeleter> data_;
  int64_t bytes_ = 0;
};

template <typename Header>
uint64_t checksum_of(std::byte* data, int64_t bytes) {
  reinterpret_cast<Header*>(data)->checksum = 0;
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

inline std::string segment_name(uint32_t number) { return fmt::format("{:08}.seg", number); }

}  // namespace firn::storage::kvlog

namespace firn::storage {

using namespace kvlog;  // NOLINT: an internal header

struct KvLog::Core {
  struct Segment {
    int drive = 0;
    uint32_t number = 0;
    int64_t length = 0;  // up to which records are complete
    int64_t live = 0;    // stored bytes that the table refers to
    int64_t dead = 0;    // and that it did, and does no longer
    bool sealed = false;
    bool dirty = false;  // written since it was last synced
    bool gone = false;
    int64_t last_commit = 0;
    std::shared_ptr<File> file;        // also held by reads in flight; null once the segment is gone
    std::vector<std::byte> directory;  // FooterGroups and Entries so far
  };
  struct Compact {
    uint64_t checksum = 0;
    uint32_t page = 0;
    uint32_t stored = 0;
    uint32_t bytes = 0;
    int32_t segment = -1;  // -1: nothing
    uint8_t codec = 0;
  };

  FileSystem* fs = nullptr;
  KvLogOptions options;
  std::vector<std::string> dirs;
  uint64_t log_id = 0;
  int lock_fd = -1;
  std::string state;
  std::vector<std::string> notes;
  uint64_t sequence = 0;  // of the last record
  uint64_t epoch = 0;     // of the last commit but those of compactions: what journal notes follow
  Status broken;          // a sync failed: what the disk holds is unknown until the log is opened again
  std::unique_ptr<File> journal;
  int64_t journal_at = 0;
  std::vector<BlockKey> pending_drops;
  std::set<BlockKey> dropped;  // keys that a drop record holds down, and that did not come back
  Pages staging;

  mutable std::mutex mutex;  // guards all below against find() and read_of()
  std::vector<std::unique_ptr<Segment>> segments;
  std::map<uint32_t, std::vector<Compact>> table;  // kind, layer, group -> by block
  KvLogStats stats;

  ~Core() {
    if (lock_fd >= 0) ::close(lock_fd);
  }

  static uint32_t row_of(const BlockKey& k) {
    return static_cast<uint32_t>(k.kind) << 24 | static_cast<uint32_t>(k.layer) << 8 | k.group;
  }
  static BlockKey key_of(uint32_t row, size_t block) {
    return {static_cast<BlockKind>(row >> 24), static_cast<uint16_t>(row >> 8 & 0xFFFF),
            static_cast<uint16_t>(row & 0xFF), static_cast<uint32_t>(block)};
  }

  Compact* look(const BlockKey& key) {
    const auto row = table.find(row_of(key));
    if (row == table.end() || key.block >= row->second.size() || row->second[key.block].segment < 0) return nullptr;
    return &row->second[key.block];
  }

  static int64_t disk_bytes(const Compact& c) { return pages(c.stored) * kPage; }

  void forget(Compact* c) {
    Segment& s = *segments[static_cast<size_t>(c->segment)];
    s.live -= disk_bytes(*c);
    s.dead += disk_bytes(*c);
    c->segment = -1;
    --stats.entries;
  }

  void apply(const Entry& e, int32_t segment, int64_t record_page) {
    const BlockKey key{static_cast<BlockKind>(e.kind), e.layer, e.group, e.block};
    if (Compact* old = look(key)) forget(old);
    if (e.codec == kDropped) {
      dropped.insert(key);
      return;
    }
    dropped.erase(key);
    std::vector<Compact>& row = table[row_of(key)];
    if (row.size() <= e.block) row.resize(std::max<size_t>(e.block + 1, row.size() + row.size() / 2));
    Compact& c = row[e.block];
    c = {e.checksum, static_cast<uint32_t>(record_page + e.page), e.stored, e.bytes, segment, e.codec};
    segments[static_cast<size_t>(segment)]->live += disk_bytes(c);
    ++stats.entries;
  }

  BlockPlace place_of(const Compact& c) const {
    return {c.segment, static_cast<int64_t>(c.page) * kPage, c.stored, c.bytes, c.checksum, c.codec};
  }

  // --- Folders, lock, headers.

  Status lock(const std::string& dir) {
    const std::string path = dir + "/lock";
    lock_fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_fd < 0) {
      return io_error(fmt::format("{}: the lock file cannot be opened: {}", path, std::strerror(errno)));
    }
    if (::flock(lock_fd, LOCK_EX | LOCK_NB) != 0) {
      char pid[32] = {};
      const ssize_t n = ::pread(lock_fd, pid, sizeof(pid) - 1, 0);
      std::string who(pid, n > 0 ? static_cast<size_t>(n) : 0);
      while (!who.empty() && who.back() == '\n') who.pop_back();
      return invalid(fmt::format("{}: in use by another process ({}): end it first, or work on a copy", dir,
                                 who.empty() ? "unknown" : "process " + who));
    }
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(lock_fd, 0) != 0 || ::pwrite(lock_fd, pid.data(), pid.size(), 0) < 0) {
      return io_error(fmt::format("{}: cannot be written: {}", path, std::strerror(errno)));
    }
    return {};
  }

  std::string header_json() const { return nlohmann::json{{"identity", options.identity}, {"dirs", dirs}}.dump(); }

  Result<Segment*> new_segment(int drive, uint32_t number) {
    const std::string json = header_json();
    const int64_t bytes = pages(static_cast<int64_t>(sizeof(SegmentHeader) + json.size())) * kPage;
    std::byte* data = staging.reserve(bytes);
    if (data == nullptr) return no_memory("no memory for a segment's header");
    std::memset(data, 0, static_cast<size_t>(bytes));
    auto* header = reinterpret_cast<SegmentHeader*>(data);
    std::memcpy(header->magic, kSegmentMagic, sizeof(kSegmentMagic));
    header->version = kVersion;
    header->header_bytes = static_cast<uint32_t>(bytes);
    header->log_id = log_id;
    header->drive = static_cast<uint32_t>(drive);
    header->number = number;
    header->json_bytes = static_cast<uint32_t>(json.size());
    std::memcpy(data + sizeof(SegmentHeader), json.data(), json.size());
    header->checksum = checksum_of<SegmentHeader>(data, bytes);
    const std::string path = dirs[static_cast<size_t>(drive)] + "/" + segment_name(number);
    auto segment = std::make_unique<Segment>();
    FIRN_ASSIGN(segment->file, fs->open(path, OpenMode::kUpdate));
    FIRN_TRY(segment->file->resize(0));
    FIRN_TRY(segment->file->write_at(0, {data, static_cast<size_t>(bytes)}));
    if (options.durable) FIRN_TRY(fs->sync_folder(dirs[static_cast<size_t>(drive)]));
    segment->drive = drive;
    segment->number = number;
    segment->length = bytes;
    segment->dirty = true;
    const std::lock_guard guard(mutex);
    stats.bytes_written += bytes;
    stats.bytes_on_disk += bytes;
    segments.push_back(std::move(segment));
    return segments.back().get();
  }

  struct Opened {
    std::unique_ptr<File> file;
    SegmentHeader header{};
    std::string identity;
    std::vector<std::string> dirs;
  };
  Result<Opened> open_segment(const std::string& path) {
    Opened o;
    FIRN_ASSIGN(o.file, fs->open(path, OpenMode::kUpdate));
    FIRN_ASSIGN(const int64_t size, o.file->size());
    if (size < kPage) {
      return corrupt(fmt::format("{}: expected a segment's header of {} bytes, found a file of {}", path, kPage, size));
    }
    std::vector<std::byte> data(kPage);
    FIRN_TRY(o.file->read_at(0, data));
    std::memcpy(&o.header, data.data(), sizeof(o.header));
    if (std::memcmp(o.header.magic, kSegmentMagic, sizeof(kSegmentMagic)) != 0) {
      return corrupt(fmt::format("{}: not a segment of a session", path));
    }
    if (o.header.version != kVersion) {
      return unsupported(fmt::format("{}: written in version {} of the format; this firn reads version {}", path,
                                     o.header.version, kVersion));
    }
    const int64_t bytes = o.header.header_bytes;
    if (bytes % kPage != 0 || bytes < kPage || bytes > size || bytes > (int64_t{1} << 24) ||
        o.header.json_bytes + static_cast<int64_t>(sizeof(SegmentHeader)) > bytes) {
      return corrupt(fmt::format("{}: its header says {} bytes: damaged", path, bytes));
    }
    data.resize(static_cast<size_t>(bytes));
    FIRN_TRY(o.file->read_at(0, data));
    stats.metadata_bytes_read += bytes;
    const uint64_t expected = o.header.checksum;
    if (const uint64_t found = checksum_of<SegmentHeader>(data.data(), bytes); found != expected) {
      return corrupt(fmt::format("{}: header: expected checksum {:016x}, found {:016x}", path, expected, found));
    }
    const auto json = nlohmann::json::parse(
        reinterpret_cast<const char*>(data.data()) + sizeof(SegmentHeader),
        reinterpret_cast<const char*>(data.data()) + sizeof(SegmentHeader) + o.header.json_bytes, nullptr, false);
    if (!json.is_object() || !json.contains("identity") || !json["identity"].is_string() || !json.contains("dirs") ||
        !json["dirs"].is_array()) {
      return corrupt(fmt::format("{}: its header holds no identity", path));
    }
    o.identity = json["identity"].get<std::string>();
    for (const auto& dir : json["dirs"]) {
      if (dir.is_string()) o.dirs.push_back(dir.get<std::string>());
    }
    return o;
  }

  // --- Writing.

  // The segment that a drive's next record of `bytes` goes to.
  Result<Segment*> room(int drive, int64_t bytes) {
    Segment* last = nullptr;
    for (const auto& s : segments) {
      if (!s->gone && s->drive == drive && (last == nullptr || s->number > last->number)) last = s.get();
    }
    FIRN_CHECK(last != nullptr, "a drive without a segment");
    if (!last->sealed) {
      if (last->length + bytes <= options.segment_bytes || last->length <= 2 * kPage) return last;
      FIRN_TRY(seal(last));
    }
    return new_segment(drive, last->number + 1);
  }

  Status limit(int64_t bytes) const {
    if (options.disk_limit_bytes < 0 || stats.bytes_on_disk + bytes <= options.disk_limit_bytes) return {};
    return io_error(fmt::format("{}: {} bytes more would make {} on disk, the limit (--kv-disk) is {}: {} short",
                                dirs[0], bytes, stats.bytes_on_disk + bytes, options.disk_limit_bytes,
                                stats.bytes_on_disk + bytes - options.disk_limit_bytes));
  }

  // Writes the record at the segment's end; the segment does not know it on an error.
  Status put(Segment* segment, std::byte* data, int64_t bytes) {
    FIRN_TRY(broken);
    const auto start = Clock::now();
    FIRN_TRY(segment->file->write_at(segment->length, {data, static_cast<size_t>(bytes)}));
    const std::lock_guard guard(mutex);
    stats.write_seconds += since(start);
    stats.bytes_written += bytes;
    stats.bytes_on_disk += bytes;
    ++stats.records;
    segment->length += bytes;
    segment->dirty = true;
    return {};
  }

  Status seal(Segment* segment) {
    const int64_t bytes = pages(static_cast<int64_t>(sizeof(RecordHeader) + segment->directory.size())) * kPage;
    std::byte* data = staging.reserve(bytes + kPage);
    if (data == nullptr) return no_memory("no memory for a segment's footer");
    std::memset(data, 0, static_cast<size_t>(bytes + kPage));
    auto* header = reinterpret_cast<RecordHeader*>(data);
    header->magic = kRecordMagic;
    header->type = kFooter;
    header->log_id = log_id;
    header->sequence = sequence;
    header->entries = static_cast<uint32_t>(segment->directory.size() / sizeof(Entry));
    header->directory_pages = static_cast<uint32_t>(bytes / kPage);
    header->extra = static_cast<uint64_t>(segment->last_commit);
    if (!segment->directory.empty()) {
      std::memcpy(data + sizeof(RecordHeader), segment->directory.data(), segment->directory.size());
    }
    header->checksum = checksum_of<RecordHeader>(data, bytes);
    auto* tail = reinterpret_cast<Tail*>(data + bytes);
    tail->magic = kTailMagic;
    tail->log_id = log_id;
    tail->footer = static_cast<uint64_t>(segment->length);
    tail->checksum = checksum_of<Tail>(data + bytes, sizeof(Tail));
    FIRN_TRY(put(segment, data, bytes + kPage));
    segment->sealed = true;
    segment->directory = {};
    return {};
  }

  int least_filled() const {
    std::vector<int64_t> bytes(dirs.size(), 0);
    for (const auto& s : segments) {
      if (!s->gone) bytes[static_cast<size_t>(s->drive)] += s->length;
    }
    return static_cast<int>(std::min_element(bytes.begin(), bytes.end()) - bytes.begin());
  }

  struct Source {  // of one entry: bytes as they will lie on disk
    Entry entry{};
    std::span<const std::byte> stored;
    std::vector<std::byte> owned;
  };

  // One record with these entries.
  Status put_blocks(std::vector<Source>* sources, bool limited = false) {
    const int64_t directory =
        pages(static_cast<int64_t>(sizeof(RecordHeader) + sources->size() * sizeof(Entry))) * kPage;
    int64_t payload = 0;
    for (const Source& s : *sources) payload += pages(static_cast<int64_t>(s.stored.size())) * kPage;
    const int64_t bytes = directory + payload;
    if (limited) FIRN_TRY(limit(bytes));
    FIRN_ASSIGN(Segment * segment, room(least_filled(), bytes));
    std::byte* data = staging.reserve(bytes);
    if (data == nullptr) return no_memory(fmt::format("no memory for a record of {} bytes", bytes));
    std::memset(data, 0, static_cast<size_t>(directory));
    auto* header = reinterpret_cast<RecordHeader*>(data);
    header->magic = kRecordMagic;
    header->type = kBlocks;
    header->log_id = log_id;
    header->sequence = sequence + 1;
    header->entries = static_cast<uint32_t>(sources->size());
    header->directory_pages = static_cast<uint32_t>(directory / kPage);
    header->payload_bytes = static_cast<uint64_t>(payload);
    auto* entries = reinterpret_cast<Entry*>(data + sizeof(RecordHeader));
    int64_t at = directory;
    for (size_t i = 0; i < sources->size(); ++i) {
      Source& s = (*sources)[i];
      s.entry.page = static_cast<uint32_t>(at / kPage);
      const auto n = static_cast<int64_t>(s.stored.size());
      if (n > 0) std::memcpy(data + at, s.stored.data(), s.stored.size());
      std::memset(data + at + n, 0, static_cast<size_t>(pages(n) * kPage - n));
      at += pages(n) * kPage;
      entries[i] = s.entry;
    }
    header->checksum = checksum_of<RecordHeader>(data, directory);
    const int64_t page = segment->length / kPage;
    FIRN_TRY(put(segment, data, bytes));
    ++sequence;
    const std::lock_guard guard(mutex);
    int32_t number = 0;
    while (segments[static_cast<size_t>(number)].get() != segment) ++number;
    remember(segment, sequence, page, *sources);
    for (const Source& s : *sources) apply(s.entry, number, page);
    return {};
  }

  static void remember(Segment* segment, uint64_t sequence, int64_t page, const std::vector<Source>& sources) {
    const FooterGroup group{sequence, static_cast<uint32_t>(sources.size()), static_cast<uint32_t>(page), {}};
    const auto add = [&](const void* from) {
      const auto* p = static_cast<const std::byte*>(from);
      segment->directory.insert(segment->directory.end(), p, p + sizeof(Entry));
    };
    add(&group);
    for (const Source& s : sources) add(&s.entry);
  }

  Status flush_drops() {
    for (size_t done = 0; done < pending_drops.size();) {
      std::vector<Source> sources;
      for (; done < pending_drops.size() && sources.size() < 100000; ++done) {
        const BlockKey& k = pending_drops[done];
        Source s;
        s.entry.kind = static_cast<uint8_t>(k.kind);
        s.entry.codec = kDropped;
        s.entry.layer = k.layer;
        s.entry.group = k.group;
        s.entry.block = k.block;
        sources.push_back(std::move(s));
      }
      FIRN_TRY(put_blocks(&sources));
    }
    pending_drops.clear();
    return {};
  }

  Status sync_dirty() {
    if (!options.durable) return {};
    const auto start = Clock::now();
    for (const auto& s : segments) {
      if (!s->dirty || s->gone) continue;
      if (Status synced = s->file->sync(); !synced.ok()) {
        broken = synced.with_context("nothing more is written to this session until it is opened again");
        return synced;
      }
      s->dirty = false;
    }
    const std::lock_guard guard(mutex);
    stats.sync_seconds += since(start);
    return {};
  }

  // `fresh`: the journal starts anew; a compaction keeps it.
  Status commit(std::string_view new_state, bool fresh) {
    FIRN_TRY(broken);
    if (static_cast<int64_t>(new_state.size()) > kMostState) {
      return invalid(fmt::format("a session's state of {} bytes: expected at most {}", new_state.size(), kMostState));
    }
    FIRN_TRY(flush_drops());
    // The commit's own place first: sealing a segment is part of what it tells.
    int64_t bytes = 0, copies = 1;
    Segment* segment = nullptr;
    for (;;) {
      const auto alive = static_cast<int64_t>(segments.size());
      bytes = pages(static_cast<int64_t>(sizeof(RecordHeader) + sizeof(epoch) + dirs.size() * sizeof(DriveState) +
                                         new_state.size()) +
                    alive * 4) *
              kPage;
      copies = bytes <= kTwice ? 2 : 1;
      FIRN_ASSIGN(segment, room(0, bytes * copies));
      if (alive == static_cast<int64_t>(segments.size())) break;
    }
    FIRN_TRY(sync_dirty());
    std::byte* data = staging.reserve(bytes * copies);
    if (data == nullptr) return no_memory(fmt::format("no memory for a commit of {} bytes", bytes));
    std::memset(data, 0, static_cast<size_t>(bytes));
    auto* header = reinterpret_cast<RecordHeader*>(data);
    header->magic = kRecordMagic;
    header->type = kCommit;
    header->copies = static_cast<uint16_t>(copies);
    header->log_id = log_id;
    header->sequence = sequence + 1;
    header->entries = static_cast<uint32_t>(dirs.size());
    header->directory_pages = static_cast<uint32_t>(bytes / kPage);
    header->extra = new_state.size();
    std::byte* at = data + sizeof(RecordHeader);
    const uint64_t new_epoch = fresh ? sequence + 1 : epoch;
    std::memcpy(at, &new_epoch, sizeof(new_epoch));
    at += sizeof(new_epoch);
    for (size_t drive = 0; drive < dirs.size(); ++drive) {
      DriveState d{};
      std::vector<uint32_t> alive;
      for (const auto& s : segments) {
        if (s->gone || s->drive != static_cast<int>(drive)) continue;
        alive.push_back(s->number);
        if (s->number >= d.segment) {
          d.segment = s->number;
          d.length = static_cast<uint64_t>(s->length);
        }
      }
      d.alive = static_cast<uint32_t>(alive.size());
      std::memcpy(at, &d, sizeof(d));
      at += sizeof(d);
      std::memcpy(at, alive.data(), alive.size() * 4);
      at += alive.size() * 4;
    }
    std::memcpy(at, new_state.data(), new_state.size());
    header->checksum = checksum_of<RecordHeader>(data, bytes);
    if (copies == 2) {
      std::byte* second = data + bytes;
      std::memcpy(second, data, static_cast<size_t>(bytes));
      auto* copy = reinterpret_cast<RecordHeader*>(second);
      copy->back = static_cast<uint64_t>(bytes);
      copy->checksum = checksum_of<RecordHeader>(second, bytes);
    }
    const int64_t where = segment->length;
    FIRN_TRY(put(segment, data, bytes * copies));
    FIRN_TRY(sync_dirty());
    ++sequence;
    segment->last_commit = where;
    state.assign(new_state);
    if (fresh) {
      epoch = new_epoch;
      journal_at = 0;
    }
    const std::lock_guard guard(mutex);
    ++stats.commits;
    return {};
  }

  // --- Reading: kv_log_open.cc.
  struct Found {
    uint64_t sequence;
    int32_t segment;
    int64_t page;
    std::vector<Entry> entries;
  };
  // Where the last complete commit of the first drive is; offset 0 when there is none.
  struct Last {
    uint32_t segment = 0;
    int64_t offset = 0;
  };
  Result<bool> record_at(const File& file, int64_t* offset, int64_t end, std::vector<std::byte>* data);
  Result<std::vector<std::byte>> directory_at(const File& file, int64_t offset, int64_t end);
  Status check_entries(const std::string& path, const Found& f, int64_t end) const;
  Status entries_of(Segment* segment, int32_t number, bool sealed, std::vector<Found>* out);
  Status nothing_committed_behind(const File& file, int64_t offset, int64_t size);
  Result<bool> holds_records(const File& file, int64_t size);
  Result<Last> last_commit(const std::vector<uint32_t>& numbers);
  Result<std::vector<uint32_t>> segment_numbers(const std::string& dir) const;
  Status open_all();
  Status read_journal();

  const Segment* segment_of(const BlockPlace& place) const {
    const std::lock_guard guard(mutex);
    FIRN_CHECK(place.file >= 0 && place.file < static_cast<int32_t>(segments.size()), "a place of another log");
    return segments[static_cast<size_t>(place.file)].get();
  }

  static std::string words(const BlockKey& key) {
    const char* kind = key.kind == BlockKind::kKv ? "K and V" : key.kind == BlockKind::kIndex ? "index keys" : "data";
    return fmt::format("{} of layer {}, group {}, block {}", kind, key.layer, key.group, key.block);
  }
};

}  // namespace firn::storage
