// Layout of the files: storage/FORMAT.md, "Segment log".
//
// Order across drives: every record carries a sequence number of the whole log. Opening gathers the entries of all
// drives and applies them in that order. A segment that is full ends with a footer, the copy of all its directories, so
// that only the last segment of a drive is walked record by record.
#include "storage/kv_log.h"

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
#include <utility>

#include "storage/block_codec.h"

namespace firn::storage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr uint32_t kVersion = 1;
constexpr char kSegmentMagic[8] = {'F', 'I', 'R', 'N', 'K', 'V', 'S', '1'};
constexpr uint32_t kRecordMagic = 0x43455246;   // "FREC"
constexpr uint32_t kTailMagic = 0x4C494154;     // "TAIL"
constexpr uint32_t kJournalMagic = 0x4E524A46;  // "FJRN"
constexpr int64_t kRecordBytes = int64_t{8} << 20;
constexpr uint8_t kDropped = 255;  // codec of an entry that forgets its key
constexpr uint32_t kMostBlocks = uint32_t{1} << 28;
constexpr int64_t kMostState = int64_t{1} << 30;
constexpr int64_t kMostNote = int64_t{1} << 20;

enum RecordType : uint16_t { kBlocks = 1, kCommit = 2, kFooter = 3 };

int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage; }
double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

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
  uint16_t zero;
  uint64_t log_id;
  uint64_t sequence;
  uint32_t entries;
  uint32_t directory_pages;  // this header and what follows it, before the blocks
  uint64_t payload_bytes;    // of blocks behind the directory; a multiple of a page
  uint64_t extra;            // commit: bytes of state; footer: offset of the segment's last commit
  uint64_t checksum;         // of the directory pages with this field 0
  uint64_t zeros;
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

std::string segment_name(uint32_t number) { return fmt::format("{:08}.seg", number); }

}  // namespace

struct KvLog::Core {
  struct Segment {
    int drive = 0;
    uint32_t number = 0;
    int64_t length = 0;  // up to which records are complete
    int64_t live = 0;    // stored bytes that the table refers to
    bool sealed = false;
    bool dirty = false;  // written since it was last synced
    bool gone = false;
    int64_t last_commit = 0;
    std::unique_ptr<File> file;
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
  uint64_t sequence = 0;         // of the last record
  uint64_t commit_sequence = 0;  // of the last commit
  std::unique_ptr<File> journal;
  int64_t journal_at = 0;
  std::vector<BlockKey> pending_drops;
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
    segments[static_cast<size_t>(c->segment)]->live -= disk_bytes(*c);
    stats.bytes_dead += disk_bytes(*c);
    c->segment = -1;
    --stats.entries;
  }

  void apply(const Entry& e, int32_t segment, int64_t record_page) {
    const BlockKey key{static_cast<BlockKind>(e.kind), e.layer, e.group, e.block};
    if (Compact* old = look(key)) forget(old);
    if (e.codec == kDropped) return;
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
    if (last->length + bytes <= options.segment_bytes || last->length <= 2 * kPage) return last;
    FIRN_TRY(seal(last));
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
    FIRN_TRY(limit(bytes));
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
  Status put_blocks(std::vector<Source>* sources) {
    const int64_t directory =
        pages(static_cast<int64_t>(sizeof(RecordHeader) + sources->size() * sizeof(Entry))) * kPage;
    int64_t payload = 0;
    for (const Source& s : *sources) payload += pages(static_cast<int64_t>(s.stored.size())) * kPage;
    const int64_t bytes = directory + payload;
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
      FIRN_TRY(s->file->sync());
      s->dirty = false;
    }
    const std::lock_guard guard(mutex);
    stats.sync_seconds += since(start);
    return {};
  }

  Status commit(std::string_view new_state) {
    if (static_cast<int64_t>(new_state.size()) > kMostState) {
      return invalid(fmt::format("a session's state of {} bytes: expected at most {}", new_state.size(), kMostState));
    }
    FIRN_TRY(flush_drops());
    // The commit's own place first: sealing a segment is part of what it tells.
    int64_t bytes = 0;
    Segment* segment = nullptr;
    for (;;) {
      const auto alive = static_cast<int64_t>(segments.size());
      bytes = pages(static_cast<int64_t>(sizeof(RecordHeader) + dirs.size() * sizeof(DriveState) + new_state.size()) +
                    alive * 4) *
              kPage;
      FIRN_ASSIGN(segment, room(0, bytes));
      if (alive == static_cast<int64_t>(segments.size())) break;
    }
    FIRN_TRY(sync_dirty());
    std::byte* data = staging.reserve(bytes);
    if (data == nullptr) return no_memory(fmt::format("no memory for a commit of {} bytes", bytes));
    std::memset(data, 0, static_cast<size_t>(bytes));
    auto* header = reinterpret_cast<RecordHeader*>(data);
    header->magic = kRecordMagic;
    header->type = kCommit;
    header->log_id = log_id;
    header->sequence = sequence + 1;
    header->entries = static_cast<uint32_t>(dirs.size());
    header->directory_pages = static_cast<uint32_t>(bytes / kPage);
    header->extra = new_state.size();
    std::byte* at = data + sizeof(RecordHeader);
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
    const int64_t where = segment->length;
    FIRN_TRY(put(segment, data, bytes));
    if (Status s = sync_dirty(); !s.ok()) {
      // What the disk holds is unknown: the record must not count, and the next one goes in its place.
      segment->length = where;
      return s;
    }
    ++sequence;
    commit_sequence = sequence;
    segment->last_commit = where;
    state.assign(new_state);
    journal_at = 0;
    const std::lock_guard guard(mutex);
    ++stats.commits;
    return {};
  }

  // --- Reading.

  // The record at `offset` of a file whose valid bytes end at `end`: its directory pages, or nothing when there is no
  // complete record of this log.
  Result<std::vector<std::byte>> directory_at(const File& file, int64_t offset, int64_t end) {
    if (offset + kPage > end) return std::vector<std::byte>();
    std::vector<std::byte> data(kPage);
    FIRN_TRY(file.read_at(offset, data));
    RecordHeader header;
    std::memcpy(&header, data.data(), sizeof(header));
    const int64_t directory = static_cast<int64_t>(header.directory_pages) * kPage;
    if (header.magic != kRecordMagic || header.log_id != log_id || directory < kPage || directory > end - offset ||
        header.payload_bytes % kPage != 0 || header.payload_bytes > static_cast<uint64_t>(end - offset - directory)) {
      return std::vector<std::byte>();
    }
    data.resize(static_cast<size_t>(directory));
    FIRN_TRY(file.read_at(offset, data));
    stats.metadata_bytes_read += directory;
    if (checksum_of<RecordHeader>(data.data(), directory) != header.checksum) return std::vector<std::byte>();
    std::memcpy(data.data(), &header, sizeof(header));
    return data;
  }

  static RecordHeader header_in(const std::vector<std::byte>& data) {
    RecordHeader header;
    std::memcpy(&header, data.data(), sizeof(header));
    return header;
  }

  struct Found {
    uint64_t sequence;
    int32_t segment;
    int64_t page;
    std::vector<Entry> entries;
  };

  Status check_entries(const std::string& path, const Found& f, int64_t end) const {
    for (const Entry& e : f.entries) {
      const int64_t last = (f.page + e.page) * kPage + pages(e.stored) * kPage;
      if (e.block >= kMostBlocks || e.group > 255 || e.kind == 0 ||
          (e.codec != kDropped && (e.codec > 1 || last > end))) {
        return corrupt(fmt::format("{}: an entry of the record at {} (layer {}, block {}) lies outside the file", path,
                                   f.page * kPage, e.layer, e.block));
      }
    }
    return {};
  }

  // All entries of a segment up to `end`, by its footer if it has one.
  Status entries_of(Segment* segment, int32_t number, bool sealed, std::vector<Found>* out) {
    const std::string& path = segment->file->path();
    if (sealed) {
      std::vector<std::byte> page(kPage);
      FIRN_TRY(segment->file->read_at(segment->length - kPage, page));
      Tail tail;
      std::memcpy(&tail, page.data(), sizeof(tail));
      const uint64_t expected = tail.checksum;
      if (tail.magic == kTailMagic && tail.log_id == log_id &&
          checksum_of<Tail>(page.data(), sizeof(Tail)) == expected &&
          tail.footer < static_cast<uint64_t>(segment->length)) {
        FIRN_ASSIGN(const auto data, directory_at(*segment->file, static_cast<int64_t>(tail.footer), segment->length));
        if (!data.empty() && header_in(data).type == kFooter) {
          const RecordHeader header = header_in(data);
          segment->last_commit = static_cast<int64_t>(header.extra);
          const std::byte* at = data.data() + sizeof(RecordHeader);
          const std::byte* const last = at + static_cast<int64_t>(header.entries) * static_cast<int64_t>(sizeof(Entry));
          if (static_cast<int64_t>(sizeof(RecordHeader)) + (last - at) <= static_cast<int64_t>(data.size())) {
            while (at < last) {
              FooterGroup group;
              std::memcpy(&group, at, sizeof(group));
              at += sizeof(group);
              if (static_cast<int64_t>(group.entries) > (last - at) / static_cast<int64_t>(sizeof(Entry))) break;
              Found f{group.sequence, number, group.page, std::vector<Entry>(group.entries)};
              std::memcpy(f.entries.data(), at, group.entries * sizeof(Entry));
              at += group.entries * sizeof(Entry);
              FIRN_TRY(check_entries(path, f, segment->length));
              out->push_back(std::move(f));
            }
            return {};
          }
        }
      }
      // A damaged footer is no loss: the directories are there too.
    }
    FIRN_ASSIGN(const auto head, open_segment(path));
    for (int64_t offset = head.header.header_bytes; offset < segment->length;) {
      FIRN_ASSIGN(const auto data, directory_at(*segment->file, offset, segment->length));
      if (data.empty()) {
        if (sealed && offset == segment->length - kPage) break;  // the tail
        return corrupt(fmt::format("{}: the record at offset {} is damaged, {} bytes behind it cannot be reached", path,
                                   offset, segment->length - offset));
      }
      const RecordHeader header = header_in(data);
      if (header.type == kBlocks) {
        if (sizeof(RecordHeader) + header.entries * sizeof(Entry) > data.size()) {
          return corrupt(
              fmt::format("{}: the record at offset {} says {} entries: damaged", path, offset, header.entries));
        }
        Found f{header.sequence, number, offset / kPage, std::vector<Entry>(header.entries)};
        std::memcpy(f.entries.data(), data.data() + sizeof(RecordHeader), header.entries * sizeof(Entry));
        FIRN_TRY(check_entries(path, f, segment->length));
        if (!sealed) {
          std::vector<Source> sources(header.entries);
          for (size_t i = 0; i < sources.size(); ++i) sources[i].entry = f.entries[i];
          remember(segment, header.sequence, f.page, sources);
        }
        out->push_back(std::move(f));
      } else if (header.type == kCommit) {
        segment->last_commit = offset;
      }
      offset += static_cast<int64_t>(header.directory_pages) * kPage + static_cast<int64_t>(header.payload_bytes);
    }
    return {};
  }

  // Where the last complete commit of the first drive is; offset 0 when there is none.
  struct Last {
    uint32_t segment = 0;
    int64_t offset = 0;
  };
  // A tail that was torn holds no commit; damage in front of one must not be taken for it.
  Status nothing_committed_behind(const File& file, int64_t offset, int64_t size) {
    for (int64_t at = offset + kPage; at + kPage <= size; at += kPage) {
      RecordHeader header;
      FIRN_TRY(file.read_at(at, std::as_writable_bytes(std::span(&header, 1))));
      if (header.magic != kRecordMagic || header.log_id != log_id || header.type != kCommit) continue;
      FIRN_ASSIGN(const auto data, directory_at(file, at, size));
      if (data.empty()) continue;
      return corrupt(
          fmt::format("{}: the record at offset {} is damaged; what was committed behind it, at {}, cannot be "
                      "reached. Restore the file from a copy",
                      file.path(), offset, at));
    }
    return {};
  }

  Result<Last> last_commit(const std::vector<uint32_t>& numbers) {
    for (auto number = numbers.rbegin(); number != numbers.rend(); ++number) {
      const std::string path = dirs[0] + "/" + segment_name(*number);
      auto opened = open_segment(path);
      // The newest may have died in its first write.
      if (!opened.ok()) {
        if (number == numbers.rbegin() && numbers.size() > 1 && opened.status().code() == Code::kCorrupt) continue;
        return opened.status();
      }
      FIRN_ASSIGN(const int64_t size, opened->file->size());
      int64_t found = 0;
      for (int64_t offset = opened->header.header_bytes;;) {
        FIRN_ASSIGN(const auto data, directory_at(*opened->file, offset, size));
        if (data.empty()) {
          FIRN_TRY(nothing_committed_behind(*opened->file, offset, size));
          break;
        }
        const RecordHeader header = header_in(data);
        if (header.type == kCommit) found = offset;
        offset += static_cast<int64_t>(header.directory_pages) * kPage + static_cast<int64_t>(header.payload_bytes);
      }
      if (found > 0) return Last{*number, found};
    }
    return Last{};
  }

  Result<std::vector<uint32_t>> segment_numbers(const std::string& dir) const {
    std::vector<uint32_t> numbers;
    FIRN_ASSIGN(const auto names, fs->list_folder(dir));
    for (const std::string& name : names) {
      if (name.size() != 12 || name.substr(8) != ".seg" || name.find_first_not_of("0123456789") != 8) {
        continue;
      }
      numbers.push_back(static_cast<uint32_t>(std::stoul(name)));
    }
    return numbers;
  }

  Status open_all() {
    FIRN_ASSIGN(const auto numbers, segment_numbers(dirs[0]));
    if (numbers.empty()) return not_found(fmt::format("{}: holds no segments: not a session", dirs[0]));
    {
      const std::string path = dirs[0] + "/" + segment_name(numbers.front());
      FIRN_ASSIGN(const auto first, open_segment(path));
      log_id = first.header.log_id;
      if (!options.identity.empty() && options.identity != first.identity) {
        return invalid(fmt::format("{}: made for another model or setting: it holds [{}], this run has [{}]", dirs[0],
                                   first.identity, options.identity));
      }
      options.identity = first.identity;
      for (const std::string& dir : options.more_dirs) {
        if (std::find(first.dirs.begin(), first.dirs.end(), dir) == first.dirs.end()) {
          return invalid(
              fmt::format("{}: was not spread over {}: its drives were fixed when it was made", dirs[0], dir));
        }
      }
      for (size_t i = 1; i < first.dirs.size(); ++i) dirs.push_back(first.dirs[i]);
    }
    FIRN_ASSIGN(const Last last, last_commit(numbers));
    std::vector<DriveState> drives(dirs.size());
    std::vector<std::vector<uint32_t>> alive(dirs.size());
    if (last.offset > 0) {
      const std::string path = dirs[0] + "/" + segment_name(last.segment);
      FIRN_ASSIGN(const auto opened, open_segment(path));
      FIRN_ASSIGN(const int64_t size, opened.file->size());
      FIRN_ASSIGN(const auto data, directory_at(*opened.file, last.offset, size));
      if (data.empty())
        return corrupt(fmt::format("{}: the commit at offset {} cannot be read twice", path, last.offset));
      const RecordHeader header = header_in(data);
      const std::byte* at = data.data() + sizeof(RecordHeader);
      const std::byte* const end = data.data() + data.size();
      const auto damaged = [&] {
        return corrupt(fmt::format("{}: the commit at offset {} is damaged", path, last.offset));
      };
      if (header.entries != dirs.size()) return damaged();
      for (size_t d = 0; d < dirs.size(); ++d) {
        if (end - at < static_cast<int64_t>(sizeof(DriveState))) return damaged();
        std::memcpy(&drives[d], at, sizeof(DriveState));
        at += sizeof(DriveState);
        if ((end - at) / 4 < static_cast<int64_t>(drives[d].alive)) return damaged();
        alive[d].resize(drives[d].alive);
        std::memcpy(alive[d].data(), at, alive[d].size() * 4);
        at += alive[d].size() * 4;
      }
      if (static_cast<uint64_t>(end - at) < header.extra) return damaged();
      state.assign(reinterpret_cast<const char*>(at), header.extra);
      sequence = commit_sequence = header.sequence;
      // The commit itself lies behind the length it tells of its own segment.
      if (drives[0].segment == last.segment) {
        drives[0].length = static_cast<uint64_t>(last.offset + static_cast<int64_t>(header.directory_pages) * kPage);
      }
    }
    std::vector<Found> found;
    for (size_t d = 0; d < dirs.size(); ++d) {
      auto there = segment_numbers(dirs[d]);
      if (!there.ok()) {
        return there.status().with_context(fmt::format("{}: a drive of this session is missing: {}", dirs[0], dirs[d]));
      }
      for (const uint32_t number : *there) {
        const std::string path = dirs[d] + "/" + segment_name(number);
        const bool wanted = std::find(alive[d].begin(), alive[d].end(), number) != alive[d].end();
        if (!wanted) {  // begun after the commit, or given up by a compaction
          FIRN_TRY(fs->remove_file(path));
          continue;
        }
        FIRN_ASSIGN(auto opened, open_segment(path));
        if (opened.header.log_id != log_id || opened.header.drive != d || opened.header.number != number) {
          return corrupt(fmt::format("{}: belongs to another session or drive", path));
        }
        auto segment = std::make_unique<Segment>();
        segment->drive = static_cast<int>(d);
        segment->number = number;
        FIRN_ASSIGN(segment->length, opened.file->size());
        const bool is_last = number == drives[d].segment;
        if (is_last) {
          const auto length = static_cast<int64_t>(drives[d].length);
          if (segment->length < length) {
            return corrupt(fmt::format("{}: expected at least {} bytes, found {}: the end is missing", path, length,
                                       segment->length));
          }
          if (segment->length > length) FIRN_TRY(opened.file->resize(length));
          segment->length = length;
        }
        segment->file = std::move(opened.file);
        segment->sealed = !is_last;
        segments.push_back(std::move(segment));
        FIRN_TRY(entries_of(segments.back().get(), static_cast<int32_t>(segments.size()) - 1, !is_last, &found));
        stats.bytes_on_disk += segments.back()->length;
      }
      for (const uint32_t number : alive[d]) {
        if (std::find(there->begin(), there->end(), number) == there->end()) {
          return corrupt(fmt::format("{}: segment {} is missing", dirs[d], segment_name(number)));
        }
      }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Found& a, const Found& b) { return a.sequence < b.sequence; });
    for (const Found& f : found) {
      for (const Entry& e : f.entries) apply(e, f.segment, f.page);
    }
    for (size_t d = 0; d < dirs.size(); ++d) {
      const bool any =
          std::any_of(segments.begin(), segments.end(), [&](const auto& s) { return s->drive == static_cast<int>(d); });
      if (!any) FIRN_TRY(new_segment(static_cast<int>(d), 1).status());
    }
    return read_journal();
  }

  Status read_journal() {
    FIRN_ASSIGN(journal, fs->open(dirs[0] + "/journal", OpenMode::kUpdate));
    FIRN_ASSIGN(const int64_t size, journal->size());
    journal_at = 0;
    while (journal_at + static_cast<int64_t>(sizeof(Note)) <= size) {
      Note note;
      FIRN_TRY(journal->read_at(journal_at, std::as_writable_bytes(std::span(&note, 1))));
      const int64_t end = journal_at + static_cast<int64_t>(sizeof(Note)) + note.bytes;
      if (note.magic != kJournalMagic || note.log_id != log_id || note.commit != commit_sequence ||
          note.bytes > kMostNote || end > size) {
        break;
      }
      std::string text(note.bytes, '\0');
      FIRN_TRY(
          journal->read_at(journal_at + static_cast<int64_t>(sizeof(Note)), std::as_writable_bytes(std::span(text))));
      if (XXH3_64bits_withSeed(text.data(), text.size(), note.commit) != note.checksum) break;
      notes.push_back(std::move(text));
      journal_at = end;
    }
    return {};
  }

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

KvLog::KvLog(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Result<std::unique_ptr<KvLog>> KvLog::create(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
  auto core = std::make_unique<Core>();
  core->fs = &fs;
  core->options = options;
  core->dirs = {dir};
  core->dirs.insert(core->dirs.end(), options.more_dirs.begin(), options.more_dirs.end());
  for (const std::string& d : core->dirs) {
    FIRN_TRY(fs.make_folder(d));
    FIRN_ASSIGN(const auto names, fs.list_folder(d));
    for (const std::string& name : names) {
      if (name == "lock") continue;
      return invalid(fmt::format("{}: expected an empty folder for a new session, found {} in it", d, name));
    }
  }
  FIRN_TRY(core->lock(dir));
  std::random_device random;
  core->log_id = static_cast<uint64_t>(random()) << 32 | random();
  for (size_t d = 0; d < core->dirs.size(); ++d) FIRN_TRY(core->new_segment(static_cast<int>(d), 1).status());
  FIRN_TRY(core->read_journal());
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

Result<std::unique_ptr<KvLog>> KvLog::open(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
  auto core = std::make_unique<Core>();
  core->fs = &fs;
  core->options = options;
  core->dirs = {dir};
  FIRN_TRY(fs.list_folder(dir).status());
  FIRN_TRY(core->lock(dir));
  FIRN_TRY(core->open_all());
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

KvLog::~KvLog() {
  if (core_->options.durable) return;
  core_->journal.reset();
  for (const auto& s : core_->segments) {
    const std::string path = s->file->path();
    s->file.reset();
    if (!s->gone) remove_quietly(path);
  }
  for (size_t d = core_->dirs.size(); d-- > 0;) {
    if (d == 0) {
      remove_quietly(core_->dirs[0] + "/journal");
      remove_quietly(core_->dirs[0] + "/lock");
    }
    (void)core_->fs->remove_folder(core_->dirs[d]);
  }
}

Result<std::vector<BlockPlace>> KvLog::append(std::span<const LogEntry> entries) {
  Core& c = *core_;
  std::vector<Core::Source> sources;
  int64_t bytes = 0;
  const auto write = [&]() -> Status {
    if (sources.empty()) return {};
    FIRN_TRY(c.put_blocks(&sources));
    sources.clear();
    bytes = 0;
    return {};
  };
  // Keys that were dropped and come back must not be forgotten by the drop's record later on.
  FIRN_TRY(c.flush_drops());
  for (const LogEntry& entry : entries) {
    FIRN_CHECK(entry.key.block < kMostBlocks && entry.key.group <= 255 && entry.bytes.size() < (size_t{1} << 31),
               "a block of the log");
    Core::Source s;
    s.stored = entry.bytes;
    if (c.options.compress) {
      s.owned = compress_block(entry.bytes, c.options.element_bytes);
      const auto before = static_cast<int64_t>(entry.bytes.size()), after = static_cast<int64_t>(s.owned.size());
      if (after > 0 && pages(after) < pages(before)) {
        s.stored = s.owned;
        s.entry.codec = 1;
        const std::lock_guard guard(c.mutex);
        c.stats.compressed_from += before;
        c.stats.compressed_to += pages(after) * kPage;
      }
    }
    s.entry.kind = static_cast<uint8_t>(entry.key.kind);
    s.entry.layer = entry.key.layer;
    s.entry.group = entry.key.group;
    s.entry.block = entry.key.block;
    s.entry.stored = static_cast<uint32_t>(s.stored.size());
    s.entry.bytes = static_cast<uint32_t>(entry.bytes.size());
    s.entry.checksum = XXH3_64bits(s.stored.data(), s.stored.size());
    const int64_t add = pages(static_cast<int64_t>(s.stored.size())) * kPage;
    if (!sources.empty() && bytes + add > kRecordBytes) FIRN_TRY(write());
    bytes += add;
    sources.push_back(std::move(s));
    {
      const std::lock_guard guard(c.mutex);
      c.stats.bytes_appended += static_cast<int64_t>(entry.bytes.size());
    }
  }
  FIRN_TRY(write());
  std::vector<BlockPlace> places;
  places.reserve(entries.size());
  const std::lock_guard guard(c.mutex);
  for (const LogEntry& entry : entries) places.push_back(c.place_of(*c.look(entry.key)));
  return places;
}

Status KvLog::drop(const std::function<bool(const BlockKey&)>& which) {
  Core& c = *core_;
  const std::lock_guard guard(c.mutex);
  for (auto& [row, blocks] : c.table) {
    for (size_t b = 0; b < blocks.size(); ++b) {
      if (blocks[b].segment < 0) continue;
      const BlockKey key = Core::key_of(row, b);
      if (!which(key)) continue;
      c.forget(&blocks[b]);
      c.pending_drops.push_back(key);
    }
  }
  return {};
}

Status KvLog::commit(std::string_view state) { return core_->commit(state); }

Status KvLog::journal(std::string_view text) {
  Core& c = *core_;
  if (static_cast<int64_t>(text.size()) > kMostNote) {
    return invalid(fmt::format("a note of {} bytes: expected at most {}", text.size(), kMostNote));
  }
  const Note note{kJournalMagic, static_cast<uint32_t>(text.size()), c.log_id, c.commit_sequence,
                  XXH3_64bits_withSeed(text.data(), text.size(), c.commit_sequence)};
  std::vector<std::byte> data(sizeof(Note) + text.size());
  std::memcpy(data.data(), &note, sizeof(note));
  std::memcpy(data.data() + sizeof(note), text.data(), text.size());
  FIRN_TRY(c.journal->write_at(c.journal_at, data));
  c.journal_at += static_cast<int64_t>(data.size());
  const std::lock_guard guard(c.mutex);
  c.stats.bytes_written += static_cast<int64_t>(data.size());
  return {};
}

const std::string& KvLog::identity() const { return core_->options.identity; }
const std::string& KvLog::state() const { return core_->state; }
const std::vector<std::string>& KvLog::notes() const { return core_->notes; }
const std::string& KvLog::dir() const { return core_->dirs[0]; }
std::vector<std::string> KvLog::dirs() const { return core_->dirs; }

std::optional<BlockPlace> KvLog::find(const BlockKey& key) const {
  const std::lock_guard guard(core_->mutex);
  const Core::Compact* c = core_->look(key);
  return c == nullptr ? std::nullopt : std::optional(core_->place_of(*c));
}

void KvLog::for_each(const std::function<void(const BlockKey&, const BlockPlace&)>& visit) const {
  for (const auto& [row, blocks] : core_->table) {
    for (size_t b = 0; b < blocks.size(); ++b) {
      if (blocks[b].segment >= 0) visit(Core::key_of(row, b), core_->place_of(blocks[b]));
    }
  }
}

IoRead KvLog::read_of(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
  const Core::Segment* segment = core_->segment_of(place);
  FIRN_CHECK(static_cast<int64_t>(dst.size()) >= place.bytes, "a destination shorter than its block");
  IoRead read;
  std::shared_ptr<std::byte> scratch;
  std::byte* to = dst.data();
  if (place.codec != 0) {
    const auto n = static_cast<size_t>(pages(place.stored_bytes) * kPage);
    scratch = std::shared_ptr<std::byte>(static_cast<std::byte*>(std::aligned_alloc(kPage, n)), FreeDeleter());
    to = scratch.get();
  }
  // Whole pages keep the read direct where there is room for them.
  int64_t n = place.stored_bytes;
  if (place.codec != 0) n = pages(n) * kPage;
  read.pieces.push_back({segment->file.get(), place.offset, n, to});
  read.finish = [key, place, dst, to, scratch, path = segment->file->path(),
                 element_bytes = core_->options.element_bytes]() -> Status {
    const uint64_t found = XXH3_64bits(to, static_cast<size_t>(place.stored_bytes));
    if (found != place.checksum) {
      return corrupt(fmt::format("{}: {} at offset {}: expected checksum {:016x}, found {:016x}: the file is damaged",
                                 path, Core::words(key), place.offset, place.checksum, found));
    }
    if (place.codec == 0) return {};
    return decompress_block({to, static_cast<size_t>(place.stored_bytes)}, element_bytes,
                            dst.first(static_cast<size_t>(place.bytes)))
        .with_context(fmt::format("{}: {}", path, Core::words(key)));
  };
  return read;
}

Status KvLog::read(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
  const IoRead read = read_of(key, place, dst);
  for (const IoPiece& piece : read.pieces) {
    FIRN_TRY(piece.file->read_at(piece.offset, {piece.dst, static_cast<size_t>(piece.bytes)}));
  }
  return read.finish();
}

Result<std::vector<std::string>> KvLog::verify(const std::function<void(int64_t, int64_t)>& progress) const {
  constexpr size_t kMostProblems = 20;
  std::vector<std::string> problems;
  int64_t total = 0, done = 0;
  for_each([&](const BlockKey&, const BlockPlace& place) { total += place.stored_bytes; });
  std::vector<std::byte> block;
  for_each([&](const BlockKey& key, const BlockPlace& place) {
    if (problems.size() >= kMostProblems) return;
    block.resize(static_cast<size_t>(place.bytes));
    if (const Status s = read(key, place, block); !s.ok()) problems.push_back(s.message());
    done += place.stored_bytes;
    if (progress) progress(done, total);
  });
  return problems;
}

Status KvLog::compact(bool all, const std::function<void(int64_t, int64_t)>& progress) {
  Core& c = *core_;
  FIRN_TRY(c.flush_drops());
  std::vector<size_t> old;
  int64_t total = 0, done = 0;
  const size_t n_before = c.segments.size();
  for (size_t i = 0; i < n_before; ++i) {
    const Core::Segment& s = *c.segments[i];
    if (s.gone || (!all && s.live * 2 > s.length)) continue;
    old.push_back(i);
    total += s.live;
  }
  if (old.empty()) return {};
  // Nothing more goes into what is given up.
  for (size_t d = 0; d < c.dirs.size(); ++d) {
    Core::Segment* last = nullptr;
    size_t index = 0;
    for (size_t i = 0; i < n_before; ++i) {
      Core::Segment* s = c.segments[i].get();
      if (s->gone || s->drive != static_cast<int>(d) || (last != nullptr && s->number < last->number)) continue;
      last = s;
      index = i;
    }
    if (std::find(old.begin(), old.end(), index) == old.end()) continue;
    FIRN_TRY(c.seal(last));
    FIRN_TRY(c.new_segment(static_cast<int>(d), last->number + 1).status());
  }
  std::vector<std::pair<BlockKey, BlockPlace>> live;
  for_each([&](const BlockKey& key, const BlockPlace& place) {
    if (std::find(old.begin(), old.end(), static_cast<size_t>(place.file)) != old.end()) live.emplace_back(key, place);
  });
  std::sort(live.begin(), live.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.file, a.second.offset) < std::pair(b.second.file, b.second.offset);
  });
  for (size_t next = 0; next < live.size();) {
    std::vector<Core::Source> sources;
    for (int64_t bytes = 0; next < live.size() && (sources.empty() || bytes < kRecordBytes); ++next) {
      const auto& [key, place] = live[next];
      Core::Source s;
      s.owned.resize(static_cast<size_t>(place.stored_bytes));
      FIRN_TRY(c.segment_of(place)->file->read_at(place.offset, s.owned));
      if (XXH3_64bits(s.owned.data(), s.owned.size()) != place.checksum) {
        return corrupt(fmt::format("{}: {} is damaged: nothing was compacted", c.dirs[0], Core::words(key)));
      }
      s.entry.kind = static_cast<uint8_t>(key.kind);
      s.entry.codec = place.codec;
      s.entry.layer = key.layer;
      s.entry.group = key.group;
      s.entry.block = key.block;
      s.entry.stored = static_cast<uint32_t>(place.stored_bytes);
      s.entry.bytes = static_cast<uint32_t>(place.bytes);
      s.entry.checksum = place.checksum;
      bytes += place.stored_bytes;
      sources.push_back(std::move(s));
      sources.back().stored = sources.back().owned;
    }
    for (Core::Source& s : sources) s.stored = s.owned;
    FIRN_TRY(c.put_blocks(&sources));
    for (const Core::Source& s : sources) done += static_cast<int64_t>(s.stored.size());
    if (progress) progress(done, total);
  }
  for (const size_t i : old) c.segments[i]->gone = true;
  if (Status s = c.commit(std::string(c.state)); !s.ok()) {
    for (const size_t i : old) c.segments[i]->gone = false;
    return s;
  }
  for (const size_t i : old) {
    Core::Segment& s = *c.segments[i];
    const std::lock_guard guard(c.mutex);
    c.stats.bytes_on_disk -= s.length;
    c.stats.bytes_dead = 0;
    FIRN_TRY(c.fs->remove_file(s.file->path()));
  }
  return {};
}

KvLogStats KvLog::stats() const {
  const std::lock_guard guard(core_->mutex);
  return core_->stats;
}

}  // namespace firn::storage
