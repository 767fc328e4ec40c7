// Implementation of kv_log.h. The byte format is in FORMAT.md; the order of writes is what makes it survive a crash:
//
//   records of all drives -> sync -> commit record (which lists every segment and its length) -> sync
//
// so a complete commit record proves that everything it lists is on the drives. open() finds the last one, takes the
// segments it lists at the lengths it gives, and cuts off or removes the rest. The journal's header is written after
// a commit, so it can tell that a commit which was completed is not found any more; without it, damage to the last
// commit record would look like a torn one.
#include "storage/kv_log.h"

#define XXH_STATIC_LINKING_ONLY  // the streaming state on the stack
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <random>
#include <system_error>
#include <type_traits>
#include <utility>

#include "storage/block_codec.h"

namespace firn::storage {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kRecordBytes = int64_t{4} << 20;    // of blocks in one record, unless one block is larger
constexpr int64_t kLeastSpread = int64_t{256} << 10;  // a record is not made smaller than this to use more drives
constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;
constexpr int64_t kMaxNoteBytes = int64_t{1} << 20;
constexpr int64_t kMaxManifestBytes = int64_t{1} << 20;
constexpr int64_t kReservedBytes = int64_t{256} << 10;  // kept free under the limit for commits and drops
constexpr int64_t kLeastSegmentBytes = 16 * kPage;
constexpr uint64_t kRecordMagic = 0x31474F4C4E524946u;   // "FIRNLOG1"
constexpr uint64_t kJournalMagic = 0x314E524A4E524946u;  // "FIRNJRN1"
constexpr uint32_t kNoteMagic = 0x45544F4Eu;             // "NOTE"
constexpr int64_t kFirstNote = 64;
constexpr int kVersion = 1;
constexpr size_t kMaxProblems = 100;

enum class RecordType : uint8_t { kSegment = 1, kBlocks = 2, kDrop = 3, kCommit = 4, kFooter = 5 };

struct RecordHeader {
  uint64_t magic = kRecordMagic;
  uint64_t log_id = 0;
  uint64_t sequence = 0;
  uint32_t segment = 0;
  uint32_t page = 0;  // of this record in its segment
  RecordType type{};
  uint8_t drive = 0;
  uint16_t zero = 0;
  uint32_t count = 0;
  uint64_t payload_bytes = 0;
  uint32_t pages = 0;  // of the whole record
  uint32_t zero2 = 0;
  uint64_t checksum = 0;  // of the 56 bytes above and the payload
};
static_assert(sizeof(RecordHeader) == 64);
constexpr size_t kChecked = offsetof(RecordHeader, checksum);

struct DiskEntry {
  uint8_t kind = 0;
  uint8_t codec = 0;
  uint16_t layer = 0;
  uint16_t group = 0;
  uint16_t zero = 0;
  uint32_t block = 0;
  uint32_t bytes = 0;
  uint32_t stored_bytes = 0;
  uint32_t page = 0;  // from the record's start
  uint64_t checksum = 0;
};
static_assert(sizeof(DiskEntry) == 32);

struct DiskRun {
  uint8_t kind = 0;
  uint8_t zero = 0;
  uint16_t layer = 0;
  uint16_t group = 0;
  uint16_t zero2 = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};
static_assert(sizeof(DiskRun) == 16);

struct DiskSegment {
  uint32_t drive = 0;
  uint32_t number = 0;
  uint32_t pages = 0;
  uint32_t footer_page = 0;  // 0: none
};
static_assert(sizeof(DiskSegment) == 16);

struct CommitHead {
  uint64_t epoch = 0;
  uint64_t state_bytes = 0;
};

struct SegmentHead {
  uint64_t commit_sequence = 0;
  uint32_t commit_segment = 0;
  uint32_t commit_page = 0;
};

struct JournalHead {
  uint64_t magic = kJournalMagic;
  uint64_t log_id = 0;
  uint64_t commit_sequence = 0;
  uint64_t checksum = 0;
};
static_assert(sizeof(JournalHead) == 32);

struct NoteHead {
  uint32_t magic = kNoteMagic;
  uint32_t bytes = 0;
  uint64_t epoch = 0;
  uint64_t index = 0;
  uint64_t checksum = 0;
};
static_assert(sizeof(NoteHead) == 32);

int64_t pages_of(int64_t bytes) { return (bytes + kPage - 1) / kPage; }

uint64_t hash_of(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

// Of `head` bytes followed by `tail`, seeded with the log's id.
uint64_t hash_of(uint64_t seed, const void* head, size_t head_bytes, std::span<const std::byte> tail) {
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset_withSeed(&state, seed);
  XXH3_64bits_update(&state, head, head_bytes);
  XXH3_64bits_update(&state, tail.data(), tail.size());
  return XXH3_64bits_digest(&state);
}

template <typename T>
T load(const std::byte* at) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <typename T>
void append_bytes(std::vector<std::byte>& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto bytes = std::as_bytes(std::span(&value, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

std::string describe(const BlockKey& key) {
  return fmt::format("layer {}, group {}, block {} (kind {})", key.layer, key.group, key.block,
                     static_cast<int>(key.kind));
}

std::string absolute_path(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path full = std::filesystem::absolute(path, ignored).lexically_normal();
  if (!full.has_filename()) full = full.parent_path();
  return full.string();
}

std::string segment_name(uint32_t number) { return fmt::format("segment-{:06}", number); }

std::optional<uint32_t> segment_number(const std::string& name) {
  constexpr std::string_view kPrefix = "segment-";
  if (name.compare(0, kPrefix.size(), kPrefix) != 0) return std::nullopt;
  uint32_t number = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, number);
  if (error != std::errc() || stop != end || segment_name(number) != name) return std::nullopt;
  return number;
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Page-aligned memory that grows and is used again.
class AlignedBuffer {
 public:
  Status reserve(int64_t bytes) {
    if (bytes <= capacity_) return {};
    bytes = pages_of(bytes) * kPage;
    void* memory = std::aligned_alloc(static_cast<size_t>(kPage), static_cast<size_t>(bytes));
    if (memory == nullptr) return no_memory(fmt::format("segment log: no memory for a buffer of {} bytes", bytes));
    memory_.reset(static_cast<std::byte*>(memory));
    capacity_ = bytes;
    return {};
  }
  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t capacity_ = 0;
};

struct Slot {
  uint64_t checksum = 0;
  uint32_t block = 0;
  uint32_t file = 0;
  uint32_t page = 0;
  uint32_t stored_bytes = 0;
  uint32_t bytes = 0;
  uint16_t layer = 0;
  uint16_t group = 0;
  BlockKind kind{};
  uint8_t codec = 0;

  BlockKey key() const { return {kind, layer, group, block}; }
  int64_t pages() const { return pages_of(stored_bytes); }
  BlockPlace place() const {
    return {static_cast<int32_t>(file), int64_t{page} * kPage, stored_bytes, bytes, checksum, codec};
  }
};
static_assert(sizeof(Slot) == 40);

// Key to slot: slots densely in a vector, and an open-addressed index of their numbers: about 48 bytes an entry.
class Table {
 public:
  size_t size() const { return slots_.size(); }
  const std::vector<Slot>& slots() const { return slots_; }

  const Slot* find(const BlockKey& key) const {
    if (index_.empty()) return nullptr;
    const uint32_t number = index_[position(key)];
    return number == 0 ? nullptr : &slots_[number - 1];
  }

  void reserve(size_t count) {
    slots_.reserve(count);
    size_t want = 64;
    while (want * 5 < count * 8) want *= 2;
    if (want > index_.size()) rehash(want);
  }

  // Returns what it replaces.
  std::optional<Slot> put(const Slot& slot) {
    if ((slots_.size() + 1) * 8 > index_.size() * 5) rehash(std::max<size_t>(64, index_.size() * 2));
    uint32_t& number = index_[position(slot.key())];
    if (number != 0) return std::exchange(slots_[number - 1], slot);
    slots_.push_back(slot);
    number = static_cast<uint32_t>(slots_.size());
    return std::nullopt;
  }

  std::optional<Slot> erase(const BlockKey& key) {
    if (index_.empty()) return std::nullopt;
    size_t hole = position(key);
    const uint32_t number = index_[hole];
    if (number == 0) return std::nullopt;
    const Slot old = slots_[number - 1];
    // Linear probing without tombstones: later ones of the same run move up into the hole.
    const size_t mask = index_.size() - 1;
    for (size_t i = (hole + 1) & mask; index_[i] != 0; i = (i + 1) & mask) {
      const size_t home = hash(slots_[index_[i] - 1].key()) & mask;
      if (((i - home) & mask) >= ((i - hole) & mask)) {
        index_[hole] = index_[i];
        hole = i;
      }
    }
    index_[hole] = 0;
    if (number != slots_.size()) {
      index_[position(slots_.back().key())] = number;
      slots_[number - 1] = slots_.back();
    }
    slots_.pop_back();
    return old;
  }

 private:
  static size_t hash(const BlockKey& key) {
    uint64_t x = key.block | uint64_t{key.layer} << 32 | uint64_t{key.group} << 48;
    x ^= static_cast<uint64_t>(key.kind) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 32)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 29)) * 0x94D049BB133111EBu;
    return static_cast<size_t>(x ^ (x >> 32));
  }

  // Where the key's number is, or the empty place where it belongs.
  size_t position(const BlockKey& key) const {
    const size_t mask = index_.size() - 1;
    size_t i = hash(key) & mask;
    while (index_[i] != 0 && slots_[index_[i] - 1].key() != key) i = (i + 1) & mask;
    return i;
  }

  void rehash(size_t size) {
    index_.assign(size, 0);
    for (size_t i = 0; i < slots_.size(); ++i) index_[position(slots_[i].key())] = static_cast<uint32_t>(i + 1);
  }

  std::vector<Slot> slots_;
  std::vector<uint32_t> index_;  // slot number + 1; 0: empty; a power of two long
};

// A record's directory, as read.
struct Record {
  RecordHeader header;
  std::span<const std::byte> payload;

  template <typename T>
  std::optional<std::span<const std::byte>> array() const {
    if (payload.size() != size_t{header.count} * sizeof(T)) return std::nullopt;
    return payload;
  }
};

struct Segment {
  int drive = 0;
  uint32_t number = 0;
  std::shared_ptr<File> file;
  int64_t pages = 0;        // that belong to it; the file may be longer after a failed write
  int64_t footer_page = 0;  // 0: none
  int64_t block_pages = 0;  // of all blocks in it
  int64_t live_pages = 0;   // of those that are current
  uint64_t first_sequence = UINT64_MAX;
  bool has_drops = false;
  bool unsynced = false;
  std::vector<std::byte> directory;  // headers and payloads of its block and drop records, until the footer holds them
  uint32_t directory_records = 0;
};

struct Checked {
  uint64_t log_id = 0;
  int drive = 0;
  uint32_t segment = 0;
};

bool plausible(const RecordHeader& h, const Checked& expected, int64_t page) {
  return h.magic == kRecordMagic && h.log_id == expected.log_id && h.drive == expected.drive &&
         h.segment == expected.segment && (page < 0 || h.page == page) && h.pages > 0 &&
         h.payload_bytes <= static_cast<uint64_t>(h.pages) * kPage - sizeof(RecordHeader);
}

bool intact(const RecordHeader& h, std::span<const std::byte> payload) {
  return hash_of(h.log_id, &h, kChecked, payload) == h.checksum;
}

// Reads directories of a segment through a window, which grows while what is asked for lies close together.
class SegmentReader {
 public:
  SegmentReader(const File& file, Checked expected, int64_t* bytes_read)
      : file_(file), expected_(expected), bytes_read_(bytes_read) {}

  // The record at `page`, of which nothing lies behind `limit` pages; nullopt where there is no intact one. What it
  // points to is valid until the next call.
  Result<std::optional<Record>> record_at(int64_t page, int64_t limit) {
    if (page >= limit) return std::optional<Record>();
    FIRN_TRY(view(page * kPage, kPage, limit * kPage));
    RecordHeader header = load<RecordHeader>(at(page * kPage));
    if (!plausible(header, expected_, page) || page + header.pages > limit) return std::optional<Record>();
    const auto bytes = static_cast<int64_t>(sizeof(RecordHeader) + header.payload_bytes);
    FIRN_TRY(view(page * kPage, bytes, limit * kPage));
    const std::span<const std::byte> payload(at(page * kPage) + sizeof(RecordHeader), header.payload_bytes);
    if (!intact(header, payload)) return std::optional<Record>();
    return std::optional<Record>(Record{header, payload});
  }

 private:
  const std::byte* at(int64_t offset) const { return window_.data() + (offset - start_); }

  Status view(int64_t offset, int64_t bytes, int64_t end) {
    const auto held = static_cast<int64_t>(window_.size());
    if (offset >= start_ && offset + bytes <= start_ + held) return {};
    const bool near = offset >= start_ && offset <= start_ + held + kPage;
    ahead_ = near ? std::min<int64_t>(ahead_ * 2, int64_t{1} << 20) : 4 * kPage;
    const int64_t want = std::min(std::max(bytes, ahead_), end - offset);
    window_.resize(static_cast<size_t>(want));
    start_ = offset;
    *bytes_read_ += want;
    const Status status = file_.read_at(offset, window_);
    if (!status.ok()) window_.clear();
    return status;
  }

  const File& file_;
  const Checked expected_;
  int64_t* bytes_read_;
  std::vector<std::byte> window_;
  int64_t start_ = 0;
  int64_t ahead_ = 2 * kPage;
};

struct Commit {
  uint64_t sequence = 0;
  uint32_t segment = 0;
  int64_t page = 0;
  uint64_t epoch = 0;
  std::string state;
  std::vector<DiskSegment> segments;
};

std::optional<Commit> parse_commit(const Record& record) {
  const size_t list = size_t{record.header.count} * sizeof(DiskSegment);
  if (record.header.type != RecordType::kCommit || record.payload.size() < sizeof(CommitHead) + list) return {};
  const auto head = load<CommitHead>(record.payload.data());
  if (head.state_bytes != record.payload.size() - sizeof(CommitHead) - list) return {};
  Commit commit{record.header.sequence, record.header.segment, record.header.page, head.epoch, {}, {}};
  for (uint32_t i = 0; i < record.header.count; ++i) {
    commit.segments.push_back(load<DiskSegment>(record.payload.data() + sizeof(CommitHead) + i * sizeof(DiskSegment)));
  }
  const std::byte* state = record.payload.data() + sizeof(CommitHead) + list;
  commit.state.assign(reinterpret_cast<const char*>(state), head.state_bytes);
  return commit;
}

struct Manifest {
  uint64_t log_id = 0;
  std::string identity;
  int64_t segment_bytes = 0;
  std::vector<std::string> more_dirs;
};

constexpr std::string_view kManifestTitle = "firn segment log ";

std::string manifest_text(const Manifest& m) {
  std::string text = fmt::format("{}{}\nid {:016x}\nsegment_bytes {}\nidentity {}\n", kManifestTitle, kVersion,
                                 m.log_id, m.segment_bytes, m.identity);
  for (const std::string& dir : m.more_dirs) text += fmt::format("dir {}\n", dir);
  return text + fmt::format("checksum {:016x}\n", XXH3_64bits(text.data(), text.size()));
}

Result<Manifest> parse_manifest(const std::string& path, const std::string& text) {
  if (text.compare(0, kManifestTitle.size(), kManifestTitle) != 0) {
    return corrupt(fmt::format("{}: not a segment log: expected it to begin with \"{}\"", path, kManifestTitle));
  }
  int version = 0;
  std::from_chars(text.data() + kManifestTitle.size(), text.data() + text.size(), version);
  if (version != kVersion) {
    return unsupported(fmt::format("{}: version: expected {}, found {}: use the program that wrote it, or a newer one",
                                   path, kVersion, version));
  }
  const size_t last = text.rfind("checksum ");
  const std::string body = text.substr(0, last == std::string::npos ? 0 : last);
  const std::string expected = fmt::format("checksum {:016x}\n", XXH3_64bits(body.data(), body.size()));
  const std::string found = last == std::string::npos ? "no checksum" : text.substr(last);
  if (found != expected) {
    return corrupt(fmt::format("{}: damaged: expected \"{}\" at its end, found \"{}\"", path,
                               expected.substr(0, expected.size() - 1), found.substr(0, found.find('\n'))));
  }
  Manifest m;
  for (size_t at = body.find('\n') + 1; at < body.size();) {
    const size_t end = body.find('\n', at);
    const std::string line = body.substr(at, end - at);
    at = end + 1;
    const size_t space = line.find(' ');
    const std::string word = line.substr(0, space), value = line.substr(std::min(line.size(), space + 1));
    if (word == "id") std::from_chars(value.data(), value.data() + value.size(), m.log_id, 16);
    if (word == "segment_bytes") std::from_chars(value.data(), value.data() + value.size(), m.segment_bytes);
    if (word == "identity") m.identity = value;
    if (word == "dir") m.more_dirs.push_back(value);
  }
  if (m.segment_bytes < kLeastSegmentBytes) {
    return corrupt(
        fmt::format("{}: segment_bytes: expected at least {}, found {}", path, kLeastSegmentBytes, m.segment_bytes));
  }
  return m;
}

// The lock file, held while it lives.
class FolderLock {
 public:
  FolderLock() = default;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }

  Status take(const std::string& dir) {
    const std::string path = dir + "/lock";
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd_ < 0) {
      return io_error(
          fmt::format("{}: opening the lock file failed: {}", path, std::generic_category().message(errno)));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      std::array<char, 32> holder{};
      const ssize_t n = ::pread(fd_, holder.data(), holder.size() - 1, 0);
      std::string pid(holder.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
      pid = pid.substr(0, pid.find('\n'));
      if (error != EWOULDBLOCK) {
        return io_error(fmt::format("{}: locking failed: {}", path, std::generic_category().message(error)));
      }
      return invalid(fmt::format("{}: in use by process {}: end that process first, or use another folder", dir,
                                 pid.empty() ? "unknown" : pid));
    }
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, pid.data(), pid.size(), 0) < 0) {
      return io_error(
          fmt::format("{}: writing the process id failed: {}", path, std::generic_category().message(errno)));
    }
    return {};
  }

 private:
  int fd_ = -1;
};

std::string manifest_path(const std::string& dir) { return dir + "/log"; }

bool own_file(const std::string& name) {
  return name == "lock" || name == "log" || name == "journal" || segment_number(name) ||
         name.compare(0, 8, "log.tmp-") == 0;
}

}  // namespace

struct KvLog::Core {
  // A block on its way into a record.
  struct Input {
    BlockKey key;
    std::span<const std::byte> bytes;
    bool stored = false;  // bytes are as on disk already, and the rest describes them
    int64_t memory_bytes = 0;
    uint64_t checksum = 0;
    uint8_t codec = 0;
  };

  // A record of blocks being built or written.
  struct Pending {
    AlignedBuffer buffer;
    std::vector<DiskEntry> entries;
    RecordHeader header;
    size_t first = 0;  // of the inputs
    int64_t input_bytes = 0, stored_bytes = 0;
    uint32_t file = 0;
    bool in_flight = false;
    std::future<Status> write;
    double seconds = 0;
  };

  Core(FileSystem& files, std::string folder, KvLogOptions opts)
      : fs(files), dir(std::move(folder)), options(std::move(opts)) {}

  FileSystem& fs;
  const std::string dir;
  KvLogOptions options;
  Manifest manifest;
  std::vector<std::string> dirs;
  FolderLock lock;
  std::vector<int64_t> current;       // per drive, the segment that grows; -1: none
  std::vector<uint32_t> next_number;  // per drive
  std::vector<bool> names_unsynced;   // per drive: files were made since its folder was synced
  std::vector<std::unique_ptr<Pending>> pool;
  AlignedBuffer small;  // for records without blocks
  std::unique_ptr<BlockCompressor> compressor;
  size_t next_drive = 0;
  uint64_t next_sequence = 1;
  Commit last_commit;  // without its segments
  std::vector<std::string> notes;
  std::unique_ptr<File> journal;
  int64_t journal_end = kFirstNote;
  uint64_t next_note = 0;
  Status failed;  // set once when what is on disk is not known any more
  bool remove_all = false;

  mutable std::mutex mutex;                        // guards what follows; only the appending thread changes it
  std::vector<std::shared_ptr<Segment>> segments;  // null: removed by compaction
  Table table;
  KvLogStats stats;

  ~Core() {
    journal.reset();
    if (!remove_all) return;
    segments.clear();
    for (const std::string& d : dirs) {
      auto names = fs.list_folder(d);
      if (!names.ok()) continue;
      for (const std::string& name : *names) {
        if (own_file(name)) (void)fs.remove(d + "/" + name);
      }
      (void)fs.remove_folder(d);
    }
  }

  int drives() const { return static_cast<int>(dirs.size()); }
  int64_t segment_pages() const { return manifest.segment_bytes / kPage; }
  Segment* growing(int drive) const {
    const int64_t at = current[static_cast<size_t>(drive)];
    return at < 0 ? nullptr : segments[static_cast<size_t>(at)].get();
  }
  Checked expected(const Segment& s) const { return {manifest.log_id, s.drive, s.number}; }

  void prepare() {
    dirs = {dir};
    for (const std::string& d : manifest.more_dirs) dirs.push_back(d);
    current.assign(dirs.size(), -1);
    next_number.assign(dirs.size(), 1);
    names_unsynced.assign(dirs.size(), true);
    for (size_t i = 0; i < std::max<size_t>(2, dirs.size()); ++i) pool.push_back(std::make_unique<Pending>());
    if (options.compress) compressor = std::make_unique<BlockCompressor>(options.element_bytes);
  }

  // --- writing records

  void count_written(int64_t bytes, double seconds) {
    const std::lock_guard hold(mutex);
    stats.bytes_written += bytes;
    stats.write_seconds += seconds;
  }

  // Completes the header of a record that lies in `buffer` with its payload and writes it behind the segment's end,
  // which does not move yet. A record that failed is cut off again where that works; else the next one overwrites it.
  static Status write_record(File& file, RecordHeader header, std::byte* buffer) {
    header.checksum = hash_of(header.log_id, &header, kChecked, {buffer + sizeof(RecordHeader), header.payload_bytes});
    std::memcpy(buffer, &header, sizeof(header));
    const int64_t offset = int64_t{header.page} * kPage;
    Status status = file.write_at(offset, {buffer, static_cast<size_t>(header.pages) * kPage});
    if (!status.ok()) (void)file.resize(offset);
    return status;
  }

  RecordHeader header_for(const Segment& s, RecordType type, size_t count, size_t payload_bytes, int64_t pages) {
    RecordHeader h;
    h.log_id = manifest.log_id;
    h.sequence = next_sequence++;
    h.segment = s.number;
    h.page = static_cast<uint32_t>(s.pages);
    h.type = type;
    h.drive = static_cast<uint8_t>(s.drive);
    h.count = static_cast<uint32_t>(count);
    h.payload_bytes = payload_bytes;
    h.pages = static_cast<uint32_t>(pages);
    return h;
  }

  static int64_t small_pages(size_t payload_bytes) {
    return pages_of(static_cast<int64_t>(sizeof(RecordHeader) + payload_bytes));
  }

  // Writes a record without blocks; the segment's end moves behind it. Returns its header.
  Result<RecordHeader> write_small(Segment& s, RecordType type, size_t count, std::span<const std::byte> payload) {
    const int64_t pages = small_pages(payload.size());
    FIRN_TRY(small.reserve(pages * kPage));
    std::copy(payload.begin(), payload.end(), small.data() + sizeof(RecordHeader));
    const size_t used = sizeof(RecordHeader) + payload.size();
    std::memset(small.data() + used, 0, static_cast<size_t>(pages * kPage) - used);
    const RecordHeader header = header_for(s, type, count, payload.size(), pages);
    const Stopwatch watch;
    FIRN_TRY(write_record(*s.file, header, small.data()));
    count_written(pages * kPage, watch.seconds());
    const std::lock_guard hold(mutex);
    s.pages += pages;
    s.unsynced = true;
    ++stats.records;
    return header;
  }

  // Remembers a block or drop record for the segment's footer.
  static void remember(Segment& s, const RecordHeader& header, std::span<const std::byte> payload) {
    RecordHeader sealed = header;
    sealed.checksum = hash_of(header.log_id, &header, kChecked, payload);
    append_bytes(s.directory, sealed);
    s.directory.insert(s.directory.end(), payload.begin(), payload.end());
    ++s.directory_records;
    s.first_sequence = std::min(s.first_sequence, header.sequence);
    if (header.type == RecordType::kDrop) s.has_drops = true;
  }

  // Ends the drive's segment with a footer.
  Status finish(int drive) {
    Segment& s = *growing(drive);
    const int64_t at = s.pages;
    FIRN_TRY(write_small(s, RecordType::kFooter, s.directory_records, s.directory).status());
    s.footer_page = at;
    s.directory = {};
    current[static_cast<size_t>(drive)] = -1;
    return {};
  }

  Status start_segment(int drive) {
    const auto d = static_cast<size_t>(drive);
    auto s = std::make_shared<Segment>();
    s->drive = drive;
    s->number = next_number[d]++;
    const std::string path = dirs[d] + "/" + segment_name(s->number);
    FIRN_ASSIGN(s->file, fs.open(path, OpenMode::kUpdate));
    names_unsynced[d] = true;
    const SegmentHead head{last_commit.sequence, last_commit.segment, static_cast<uint32_t>(last_commit.page)};
    const auto header = write_small(*s, RecordType::kSegment, 0, std::as_bytes(std::span(&head, 1)));
    if (!header.ok()) {
      (void)fs.remove(path);
      return header.status();
    }
    const std::lock_guard hold(mutex);
    current[d] = static_cast<int64_t>(segments.size());
    segments.push_back(std::move(s));
    return {};
  }

  // Makes sure that the drive has a segment with room for a record of so many pages.
  Status room(int drive, int64_t pages) {
    if (const Segment* s = growing(drive)) {
      if (s->pages <= 1 || s->pages + pages <= segment_pages()) return {};
      FIRN_TRY(finish(drive));
    }
    return start_segment(drive);
  }

  // What all drives would hold with `pages` more and every growing segment ended.
  Status check_limit(int64_t pages, int64_t reserved) const {
    if (options.disk_limit_bytes < 0) return {};
    int64_t held = disk_bytes() + reserved;
    for (int d = 0; d < drives(); ++d) {
      if (const Segment* s = growing(d)) held += small_pages(s->directory.size()) * kPage;
    }
    const int64_t need = held + pages * kPage;
    if (need <= options.disk_limit_bytes) return {};
    return io_error(
        fmt::format("{}: the disk limit of {} bytes is reached: {} bytes are used and {} more needed, {} short: raise "
                    "the limit, drop blocks or compact",
                    dir, options.disk_limit_bytes, held, pages * kPage, need - options.disk_limit_bytes));
  }

  int64_t disk_bytes() const {
    const std::lock_guard hold(mutex);
    return disk_bytes_held();
  }

  int64_t disk_bytes_held() const {
    int64_t pages = 0;
    for (const auto& s : segments) {
      if (s) pages += s->pages;
    }
    return pages * kPage;
  }

  // --- the table (under the mutex)

  void forget(const std::optional<Slot>& old) {
    if (old && segments[old->file]) segments[old->file]->live_pages -= old->pages();
  }

  void adopt(uint32_t file, int64_t record_page, const DiskEntry& e) {
    Slot slot;
    slot.checksum = e.checksum;
    slot.block = e.block;
    slot.file = file;
    slot.page = static_cast<uint32_t>(record_page + e.page);
    slot.stored_bytes = e.stored_bytes;
    slot.bytes = e.bytes;
    slot.layer = e.layer;
    slot.group = e.group;
    slot.kind = static_cast<BlockKind>(e.kind);
    slot.codec = e.codec;
    segments[file]->block_pages += slot.pages();
    segments[file]->live_pages += slot.pages();
    forget(table.put(slot));
  }

  // --- append

  // Fills a record with inputs from `first` on, of at most so many pages unless one block has more.
  Status build(Pending& p, std::span<const Input> inputs, size_t first, int64_t max_pages) {
    int64_t pages = 0;
    size_t end = first;
    while (end < inputs.size()) {
      const int64_t more = pages_of(static_cast<int64_t>(inputs[end].bytes.size()));
      if (end > first && pages + more > max_pages) break;
      pages += more;
      ++end;
    }
    const size_t count = end - first;
    const int64_t directory_pages = small_pages(count * sizeof(DiskEntry));
    FIRN_TRY(p.buffer.reserve((directory_pages + pages) * kPage));
    p.first = first;
    p.entries.clear();
    p.input_bytes = p.stored_bytes = 0;
    int64_t at = directory_pages;
    for (size_t i = first; i < end; ++i) {
      const Input& in = inputs[i];
      DiskEntry e;
      e.kind = static_cast<uint8_t>(in.key.kind);
      e.layer = in.key.layer;
      e.group = in.key.group;
      e.block = in.key.block;
      e.page = static_cast<uint32_t>(at);
      std::span<const std::byte> stored = in.bytes;
      e.bytes = static_cast<uint32_t>(in.stored ? in.memory_bytes : static_cast<int64_t>(stored.size()));
      e.codec = in.codec;
      if (compressor && !in.stored) {
        const Stopwatch watch;
        const auto smaller = compressor->compress(stored);
        if (!smaller.empty()) {
          stored = smaller;
          e.codec = 1;
        }
        const std::lock_guard hold(mutex);
        stats.compress_seconds += watch.seconds();
      }
      e.stored_bytes = static_cast<uint32_t>(stored.size());
      std::byte* to = p.buffer.data() + at * kPage;
      std::memcpy(to, stored.data(), stored.size());
      const int64_t whole = pages_of(static_cast<int64_t>(stored.size())) * kPage;
      std::memset(to + stored.size(), 0, static_cast<size_t>(whole) - stored.size());
      e.checksum = in.stored ? in.checksum : hash_of({to, stored.size()});
      p.input_bytes += static_cast<int64_t>(in.bytes.size());
      p.stored_bytes += static_cast<int64_t>(stored.size());
      at += whole / kPage;
      p.entries.push_back(e);
    }
    const size_t used = sizeof(RecordHeader) + count * sizeof(DiskEntry);
    std::memcpy(p.buffer.data() + sizeof(RecordHeader), p.entries.data(), count * sizeof(DiskEntry));
    std::memset(p.buffer.data() + used, 0, static_cast<size_t>(directory_pages * kPage) - used);
    p.header.pages = static_cast<uint32_t>(at);
    return {};
  }

  // Gives the record its place and starts to write it.
  Status launch(Pending& p, int drive, bool alone) {
    const int64_t pages = p.header.pages;
    FIRN_TRY(room(drive, pages));
    Segment& s = *growing(drive);
    p.header = header_for(s, RecordType::kBlocks, p.entries.size(), p.entries.size() * sizeof(DiskEntry), pages);
    p.file = static_cast<uint32_t>(current[static_cast<size_t>(drive)]);
    p.in_flight = true;
    auto write = [&p, file = s.file] {
      const Stopwatch watch;
      Status status = write_record(*file, p.header, p.buffer.data());
      p.seconds = watch.seconds();
      return status;
    };
    // A thread a record costs little beside megabytes; a single small record is written here.
    p.write = std::async(alone ? std::launch::deferred : std::launch::async, std::move(write));
    return {};
  }

  // Waits for the record and enters its blocks.
  Status retire(Pending& p, std::span<BlockPlace> places, bool fresh) {
    Status status = p.write.get();
    p.in_flight = false;
    FIRN_TRY(status);
    count_written(int64_t{p.header.pages} * kPage, p.seconds);
    const std::lock_guard hold(mutex);
    Segment& s = *segments[p.file];
    remember(s, p.header, std::as_bytes(std::span(p.entries)));
    s.pages += p.header.pages;
    s.unsynced = true;
    ++stats.records;
    if (fresh) {
      stats.bytes_appended += p.input_bytes;
      stats.bytes_stored += p.stored_bytes;
    }
    for (size_t i = 0; i < p.entries.size(); ++i) {
      const DiskEntry& e = p.entries[i];
      adopt(p.file, p.header.page, e);
      if (!places.empty()) {
        places[p.first + i] = {static_cast<int32_t>(p.file),
                               (int64_t{p.header.page} + e.page) * kPage,
                               e.stored_bytes,
                               e.bytes,
                               e.checksum,
                               e.codec};
      }
    }
    return {};
  }

  // One write in flight a drive, while the next record is built.
  Status append_inputs(std::span<const Input> inputs, std::span<BlockPlace> places, bool fresh) {
    int64_t total_pages = 0;
    for (const Input& in : inputs) total_pages += pages_of(static_cast<int64_t>(in.bytes.size()));
    const auto overhead = static_cast<int64_t>(sizeof(RecordHeader) + 2 * sizeof(DiskEntry));
    if (!compressor) {
      FIRN_TRY(check_limit(total_pages + pages_of(static_cast<int64_t>(inputs.size()) * overhead) + 1, kReservedBytes));
    }
    const int64_t spread = (total_pages + drives() - 1) / drives();
    const int64_t record_pages = std::clamp(spread, kLeastSpread / kPage, kRecordBytes / kPage);
    Status status;
    std::vector<Pending*> flying;  // oldest first
    const auto retire_oldest = [&] {
      const Status s = retire(*flying.front(), places, fresh);
      flying.erase(flying.begin());
      if (status.ok()) status = s;
    };
    for (size_t next = 0; next < inputs.size() && status.ok();) {
      if (flying.size() == pool.size()) retire_oldest();
      Pending& p = **std::find_if(pool.begin(), pool.end(), [](const auto& q) { return !q->in_flight; });
      Status built = build(p, inputs, next, record_pages);
      const size_t drive = next_drive;
      while (std::any_of(flying.begin(), flying.end(), [&](Pending* q) { return q->header.drive == drive; })) {
        retire_oldest();
      }
      if (built.ok() && compressor) built = check_limit(p.header.pages, kReservedBytes);
      if (status.ok()) status = built;
      if (!status.ok()) break;
      next += p.entries.size();
      status = launch(p, static_cast<int>(drive), flying.empty() && next == inputs.size());
      if (!status.ok()) break;
      flying.push_back(&p);
      next_drive = (next_drive + 1) % dirs.size();
    }
    while (!flying.empty()) retire_oldest();
    return status;
  }

  // --- drop, commit, journal

  Status write_drop(const std::vector<DiskRun>& runs) {
    const auto payload = std::as_bytes(std::span(runs));
    const int64_t pages = small_pages(payload.size());
    FIRN_TRY(check_limit(pages, 0));
    FIRN_TRY(room(0, pages));
    FIRN_ASSIGN(const RecordHeader header, write_small(*growing(0), RecordType::kDrop, runs.size(), payload));
    remember(*growing(0), header, payload);
    return {};
  }

  static std::vector<DiskRun> runs_of(std::vector<BlockKey> keys) {
    std::sort(keys.begin(), keys.end());
    std::vector<DiskRun> runs;
    for (const BlockKey& key : keys) {
      if (!runs.empty()) {
        DiskRun& r = runs.back();
        if (r.kind == static_cast<uint8_t>(key.kind) && r.layer == key.layer && r.group == key.group &&
            uint64_t{r.first} + r.count == key.block) {
          ++r.count;
          continue;
        }
      }
      runs.push_back({static_cast<uint8_t>(key.kind), 0, key.layer, key.group, 0, key.block, 1});
    }
    return runs;
  }

  Status sync_file(File& file) {
    if (!options.durable) return {};
    const Stopwatch watch;
    const Status status = file.sync();
    const std::lock_guard hold(mutex);
    stats.sync_seconds += watch.seconds();
    return status;
  }

  // After a failed sync nobody knows what reached the drive, and trying again would not tell: the log must be opened
  // again, which finds the last complete commit.
  Status give_up(const Status& status) {
    if (status.ok()) return status;
    failed = Status(status.code(), status.message() + ": the log takes nothing more: close it and open it again");
    return failed;
  }

  Status sync_drives(const std::vector<const Segment*>& without) {
    for (const auto& s : segments) {
      if (!s || !s->unsynced || std::find(without.begin(), without.end(), s.get()) != without.end()) continue;
      FIRN_TRY(sync_file(*s->file));
      s->unsynced = false;
    }
    for (size_t d = 0; d < dirs.size(); ++d) {
      if (!names_unsynced[d]) continue;
      if (options.durable) FIRN_TRY(fs.sync_folder(dirs[d]));
      names_unsynced[d] = false;
    }
    return {};
  }

  // Everything appended so far and `state`, without the segments `without`.
  Status write_commit(uint64_t epoch, std::string_view state, const std::vector<const Segment*>& without) {
    const auto payload_bytes = [&](size_t count) {
      return sizeof(CommitHead) + count * sizeof(DiskSegment) + state.size();
    };
    FIRN_TRY(check_limit(small_pages(payload_bytes(segments.size() + 1)), 0));
    FIRN_TRY(room(0, small_pages(payload_bytes(segments.size() + 1))));
    FIRN_TRY(give_up(sync_drives(without)));
    Segment& last = *growing(0);
    std::vector<DiskSegment> list;
    for (const auto& s : segments) {
      if (!s || std::find(without.begin(), without.end(), s.get()) != without.end()) continue;
      list.push_back({static_cast<uint32_t>(s->drive), s->number, static_cast<uint32_t>(s->pages),
                      static_cast<uint32_t>(s->footer_page)});
    }
    for (DiskSegment& s : list) {
      if (s.drive == 0 && s.number == last.number) s.pages += small_pages(payload_bytes(list.size()));
    }
    std::vector<std::byte> payload;
    append_bytes(payload, CommitHead{epoch, state.size()});
    for (const DiskSegment& s : list) append_bytes(payload, s);
    const auto blob = std::as_bytes(std::span(state));
    payload.insert(payload.end(), blob.begin(), blob.end());
    FIRN_ASSIGN(const RecordHeader header, write_small(last, RecordType::kCommit, list.size(), payload));
    FIRN_TRY(give_up(sync_file(*last.file)));
    last.unsynced = false;
    const bool fresh = epoch != last_commit.epoch;
    last_commit = {header.sequence, header.segment, header.page, epoch, std::string(state), {}};
    if (fresh) {
      journal_end = kFirstNote;
      next_note = 0;
    }
    // The commit is done; a journal that cannot be written says so when it is next asked to hold a note.
    (void)write_journal_head();
    return {};
  }

  Status write_journal_head() {
    JournalHead head;
    head.log_id = manifest.log_id;
    head.commit_sequence = last_commit.sequence;
    head.checksum = hash_of(std::as_bytes(std::span(&head, 1)).first(offsetof(JournalHead, checksum)));
    FIRN_TRY(journal->write_at(0, std::as_bytes(std::span(&head, 1))));
    count_written(sizeof(head), 0);
    return {};
  }

  Status write_note(std::string_view note) {
    NoteHead head;
    head.bytes = static_cast<uint32_t>(note.size());
    head.epoch = last_commit.epoch;
    head.index = next_note;
    const auto text = std::as_bytes(std::span(note));
    head.checksum = hash_of(manifest.log_id, &head, offsetof(NoteHead, checksum), text);
    std::vector<std::byte> bytes;
    append_bytes(bytes, head);
    bytes.insert(bytes.end(), text.begin(), text.end());
    FIRN_TRY(journal->write_at(journal_end, bytes));
    count_written(static_cast<int64_t>(bytes.size()), 0);
    journal_end += static_cast<int64_t>(bytes.size());
    ++next_note;
    return {};
  }

  // --- creating and opening

  Status create_files() {
    std::random_device random;
    manifest.log_id = uint64_t{random()} << 32 | random();
    manifest.identity = options.identity;
    manifest.segment_bytes = std::max(kLeastSegmentBytes, options.segment_bytes / kPage * kPage);
    for (const std::string& d : options.more_dirs) manifest.more_dirs.push_back(absolute_path(d));
    prepare();
    FIRN_ASSIGN(journal, fs.open(dir + "/journal", OpenMode::kUpdate));
    FIRN_TRY(write_commit(0, "", {}));
    // The manifest comes last: a folder with one is a whole log.
    const std::string text = manifest_text(manifest);
    return write_file_atomically(fs, manifest_path(dir), std::as_bytes(std::span(text)));
  }

  Status open_files() {
    FIRN_ASSIGN(const std::string text, read_text_file(fs, manifest_path(dir), kMaxManifestBytes));
    FIRN_ASSIGN(manifest, parse_manifest(manifest_path(dir), text));
    stats.metadata_bytes_read += static_cast<int64_t>(text.size());
    if (!options.identity.empty() && options.identity != manifest.identity) {
      return invalid(
          fmt::format("{}: belongs to something else: expected \"{}\", found \"{}\": open it with what it "
                      "was made with, or use another folder",
                      dir, options.identity, manifest.identity));
    }
    std::vector<std::string> asked;
    for (const std::string& d : options.more_dirs) asked.push_back(absolute_path(d));
    if (!asked.empty() && asked != manifest.more_dirs) {
      return invalid(
          fmt::format("{}: its further folders: expected {}, found {}: leave them out, or give the same", dir,
                      fmt::join(asked, ", "),
                      manifest.more_dirs.empty() ? "none" : fmt::format("{}", fmt::join(manifest.more_dirs, ", "))));
    }
    prepare();
    std::vector<std::vector<uint32_t>> found(dirs.size());
    for (size_t d = 0; d < dirs.size(); ++d) {
      FIRN_ASSIGN(const bool there, fs.exists(dirs[d]));
      if (!there) {
        return not_found(fmt::format("{}: the folder {} on another drive is missing: mount the drive", dir, dirs[d]));
      }
      FIRN_ASSIGN(const auto names, fs.list_folder(dirs[d]));
      for (const std::string& name : names) {
        if (const auto number = segment_number(name)) found[d].push_back(*number);
      }
      std::sort(found[d].begin(), found[d].end());
      if (!found[d].empty()) next_number[d] = found[d].back() + 1;
    }
    FIRN_ASSIGN(last_commit, find_commit(found[0]));
    FIRN_ASSIGN(journal, fs.open(dir + "/journal", OpenMode::kUpdate));
    FIRN_TRY(read_journal());
    FIRN_TRY(load_segments());
    last_commit.segments.clear();
    FIRN_TRY(cut_off(found));
    next_sequence = std::max(next_sequence, last_commit.sequence + 1);
    return {};
  }

  Status damaged_at(const std::string& path, int64_t page, const std::string& what) const {
    return corrupt(fmt::format("{}: damaged at offset {}: expected {}: restore the log from a copy, or make it anew",
                               path, page * kPage, what));
  }

  // The last complete commit: in the newest segment of the first drive, or where that segment's head says.
  Result<Commit> find_commit(const std::vector<uint32_t>& numbers) {
    for (size_t i = numbers.size(); i-- > 0;) {
      const std::string path = dir + "/" + segment_name(numbers[i]);
      FIRN_ASSIGN(const auto file, fs.open(path, OpenMode::kRead));
      FIRN_ASSIGN(const int64_t bytes, file->size());
      SegmentReader reader(*file, {manifest.log_id, 0, numbers[i]}, &stats.metadata_bytes_read);
      const int64_t limit = bytes / kPage;
      FIRN_ASSIGN(const auto first, reader.record_at(0, limit));
      // A segment that was being made at the crash has no head; the one before it is the newest then.
      if (!first || first->header.type != RecordType::kSegment || first->payload.size() != sizeof(SegmentHead))
        continue;
      const auto head = load<SegmentHead>(first->payload.data());
      std::optional<Commit> best;
      int64_t page = first->header.pages;
      for (;;) {
        FIRN_ASSIGN(const auto record, reader.record_at(page, limit));
        if (!record) break;
        if (auto commit = parse_commit(*record)) best = std::move(commit);
        page += record->header.pages;
      }
      // Behind a torn tail there is nothing; behind damage there may be a commit, and then going back would lose it.
      FIRN_ASSIGN(const int64_t later, commit_behind(*file, numbers[i], page, limit, best ? best->sequence : 0));
      if (later >= 0) {
        return damaged_at(path, page, fmt::format("a record, since there is a commit at {}", later * kPage));
      }
      if (best) return std::move(*best);
      if (head.commit_sequence == 0) break;
      const std::string before = dir + "/" + segment_name(head.commit_segment);
      FIRN_ASSIGN(const auto older, fs.open(before, OpenMode::kRead));
      FIRN_ASSIGN(const int64_t older_bytes, older->size());
      SegmentReader there(*older, {manifest.log_id, 0, head.commit_segment}, &stats.metadata_bytes_read);
      FIRN_ASSIGN(const auto record, there.record_at(head.commit_page, older_bytes / kPage));
      if (record && record->header.sequence == head.commit_sequence) {
        if (auto commit = parse_commit(*record)) return std::move(*commit);
      }
      return damaged_at(before, head.commit_page, "the last commit");
    }
    return corrupt(fmt::format("{}: no commit in any segment: restore the log from a copy, or make it anew", dir));
  }

  // The page of a later commit in the rest of the file; -1 where there is none.
  Result<int64_t> commit_behind(const File& file, uint32_t number, int64_t page, int64_t limit, uint64_t sequence) {
    constexpr int64_t kChunk = (int64_t{1} << 20) / kPage;
    std::vector<std::byte> chunk;
    for (int64_t at = page; at < limit; at += kChunk) {
      const int64_t count = std::min(kChunk, limit - at);
      chunk.resize(static_cast<size_t>(count * kPage));
      FIRN_TRY(file.read_at(at * kPage, chunk));
      stats.metadata_bytes_read += count * kPage;
      for (int64_t i = 0; i < count; ++i) {
        const auto header = load<RecordHeader>(chunk.data() + i * kPage);
        if (header.type != RecordType::kCommit || header.sequence <= sequence ||
            !plausible(header, {manifest.log_id, 0, number}, at + i)) {
          continue;
        }
        SegmentReader reader(file, {manifest.log_id, 0, number}, &stats.metadata_bytes_read);
        FIRN_ASSIGN(const auto record, reader.record_at(at + i, limit));
        if (record && parse_commit(*record)) return at + i;
      }
    }
    return -1;
  }

  Status read_journal() {
    FIRN_ASSIGN(const int64_t bytes, journal->size());
    JournalHead head;
    if (bytes < static_cast<int64_t>(sizeof(head))) return {};
    FIRN_TRY(journal->read_at(0, std::as_writable_bytes(std::span(&head, 1))));
    const bool whole =
        head.magic == kJournalMagic && head.log_id == manifest.log_id &&
        head.checksum == hash_of(std::as_bytes(std::span(&head, 1)).first(offsetof(JournalHead, checksum)));
    if (whole && head.commit_sequence > last_commit.sequence) {
      return corrupt(
          fmt::format("{}: damaged: expected commit {}, found {} as the last one: restore the log from a "
                      "copy, or remove {} to go back to that commit",
                      dir, head.commit_sequence, last_commit.sequence, journal->path()));
    }
    for (int64_t at = kFirstNote; at + static_cast<int64_t>(sizeof(NoteHead)) <= bytes;) {
      NoteHead note;
      FIRN_TRY(journal->read_at(at, std::as_writable_bytes(std::span(&note, 1))));
      const int64_t text_at = at + static_cast<int64_t>(sizeof(note));
      if (note.magic != kNoteMagic || note.epoch != last_commit.epoch || note.index != next_note ||
          note.bytes > kMaxNoteBytes || text_at + note.bytes > bytes) {
        break;
      }
      std::string text(note.bytes, '\0');
      FIRN_TRY(journal->read_at(text_at, std::as_writable_bytes(std::span(text))));
      stats.metadata_bytes_read += static_cast<int64_t>(sizeof(note) + text.size());
      if (hash_of(manifest.log_id, &note, offsetof(NoteHead, checksum), std::as_bytes(std::span(text))) !=
          note.checksum) {
        break;
      }
      notes.push_back(std::move(text));
      at = journal_end = text_at + note.bytes;
      ++next_note;
    }
    return {};
  }

  // The block and drop records of a segment, as header and payload one after another: from its footer, or from the
  // records themselves.
  Result<std::vector<std::byte>> directory_of(const Segment& s, int64_t* bytes_read, uint32_t* records) const {
    SegmentReader reader(*s.file, expected(s), bytes_read);
    if (s.footer_page > 0) {
      FIRN_ASSIGN(const auto footer, reader.record_at(s.footer_page, s.pages));
      if (footer && footer->header.type == RecordType::kFooter) {
        *records = footer->header.count;
        return std::vector<std::byte>(footer->payload.begin(), footer->payload.end());
      }
    }
    std::vector<std::byte> directory;
    *records = 0;
    const int64_t end = s.footer_page > 0 ? s.footer_page : s.pages;
    for (int64_t page = 0; page < end;) {
      FIRN_ASSIGN(const auto record, reader.record_at(page, end));
      if (!record) return damaged_at(s.file->path(), page, "a record");
      if (record->header.type == RecordType::kBlocks || record->header.type == RecordType::kDrop) {
        append_bytes(directory, record->header);
        directory.insert(directory.end(), record->payload.begin(), record->payload.end());
        ++*records;
      }
      page += record->header.pages;
    }
    return directory;
  }

  // Visits the records of a directory; an error where it contradicts itself.
  Status each_record(const Segment& s, std::span<const std::byte> directory,
                     const std::function<void(const Record&)>& visit) const {
    for (size_t at = 0; at < directory.size();) {
      const auto rest = directory.subspan(at);
      if (rest.size() < sizeof(RecordHeader)) return damaged_at(s.file->path(), s.footer_page, "a whole directory");
      const auto header = load<RecordHeader>(rest.data());
      if (!plausible(header, expected(s), -1) || header.payload_bytes > rest.size() - sizeof(RecordHeader) ||
          int64_t{header.page} + header.pages > s.pages) {
        return damaged_at(s.file->path(), s.footer_page, "a directory of this segment's records");
      }
      const Record record{header, rest.subspan(sizeof(RecordHeader), header.payload_bytes)};
      const size_t one = header.type == RecordType::kDrop ? sizeof(DiskRun) : sizeof(DiskEntry);
      if (record.payload.size() != header.count * one) {
        return damaged_at(s.file->path(), header.page, fmt::format("{} entries", header.count));
      }
      visit(record);
      at += sizeof(RecordHeader) + header.payload_bytes;
    }
    return {};
  }

  Status load_segments() {
    std::vector<std::vector<std::byte>> directories;
    std::vector<std::pair<uint32_t, Record>> records;  // segment's index
    size_t entries = 0;
    for (const DiskSegment& listed : last_commit.segments) {
      if (listed.drive >= dirs.size() || listed.pages == 0 || listed.footer_page >= listed.pages) {
        return corrupt(fmt::format("{}: the commit names drive {} of {} and {} pages", dir, listed.drive, dirs.size(),
                                   listed.pages));
      }
      auto s = std::make_shared<Segment>();
      s->drive = static_cast<int>(listed.drive);
      s->number = listed.number;
      s->pages = listed.pages;
      s->footer_page = listed.footer_page;
      const std::string path = dirs[listed.drive] + "/" + segment_name(listed.number);
      FIRN_ASSIGN(const bool there, fs.exists(path));
      if (!there) return not_found(fmt::format("{}: missing, though the last commit needs it", path));
      FIRN_ASSIGN(s->file, fs.open(path, s->footer_page > 0 ? OpenMode::kReadDirect : OpenMode::kUpdate));
      FIRN_ASSIGN(const int64_t bytes, s->file->size());
      if (bytes < s->pages * kPage) {
        return corrupt(
            fmt::format("{}: too short: expected at least {} bytes, found {}", path, s->pages * kPage, bytes));
      }
      FIRN_ASSIGN(auto directory, directory_of(*s, &stats.metadata_bytes_read, &s->directory_records));
      const auto index = static_cast<uint32_t>(segments.size());
      directories.push_back(std::move(directory));  // moving a vector keeps its memory, so records stay valid
      FIRN_TRY(each_record(*s, directories.back(), [&](const Record& record) {
        records.emplace_back(index, record);
        s->first_sequence = std::min(s->first_sequence, record.header.sequence);
        if (record.header.type == RecordType::kDrop) s->has_drops = true;
        if (record.header.type == RecordType::kBlocks) entries += record.header.count;
        next_sequence = std::max(next_sequence, record.header.sequence + 1);
      }));
      if (s->footer_page == 0) {
        int64_t& grows = current[listed.drive];
        if (grows < 0 || segments[static_cast<size_t>(grows)]->number < s->number) grows = index;
      }
      segments.push_back(std::move(s));
    }
    if (!growing(0) || growing(0)->number != last_commit.segment) {
      return corrupt(fmt::format("{}: the commit does not list its own segment", dir));
    }
    std::stable_sort(records.begin(), records.end(),
                     [](const auto& a, const auto& b) { return a.second.header.sequence < b.second.header.sequence; });
    table.reserve(entries);
    for (const auto& [index, record] : records) {
      FIRN_TRY(apply(index, record));
      ++stats.records;
    }
    for (size_t i = 0; i < segments.size(); ++i) {
      if (segments[i]->footer_page == 0) segments[i]->directory = std::move(directories[i]);
    }
    return {};
  }

  Status apply(uint32_t index, const Record& record) {
    if (record.header.type == RecordType::kDrop) {
      for (uint32_t i = 0; i < record.header.count; ++i) {
        const auto run = load<DiskRun>(record.payload.data() + i * sizeof(DiskRun));
        for (uint32_t b = 0; b < run.count; ++b) {
          forget(table.erase({static_cast<BlockKind>(run.kind), run.layer, run.group, run.first + b}));
        }
      }
      return {};
    }
    for (uint32_t i = 0; i < record.header.count; ++i) {
      const auto e = load<DiskEntry>(record.payload.data() + i * sizeof(DiskEntry));
      if (e.kind == 0 || e.bytes == 0 || e.stored_bytes == 0 || e.codec > 1 ||
          (e.codec == 0 && e.bytes != e.stored_bytes) || e.page + pages_of(e.stored_bytes) > record.header.pages) {
        return damaged_at(segments[index]->file->path(), record.header.page, fmt::format("a block as entry {}", i));
      }
      adopt(index, record.header.page, e);
    }
    return {};
  }

  // Makes the files what the last commit says, durably, so that nothing of what was behind it can come back.
  Status cut_off(const std::vector<std::vector<uint32_t>>& found) {
    for (int d = 0; d < drives(); ++d) {
      bool removed = false;
      for (const uint32_t number : found[static_cast<size_t>(d)]) {
        const bool listed = std::any_of(segments.begin(), segments.end(),
                                        [&](const auto& s) { return s->drive == d && s->number == number; });
        if (listed) continue;
        FIRN_TRY(fs.remove(dirs[static_cast<size_t>(d)] + "/" + segment_name(number)));
        removed = true;
      }
      if (removed && options.durable) FIRN_TRY(fs.sync_folder(dirs[static_cast<size_t>(d)]));
    }
    for (const auto& s : segments) {
      if (s->footer_page > 0) continue;
      FIRN_ASSIGN(const int64_t bytes, s->file->size());
      if (bytes == s->pages * kPage) continue;
      FIRN_TRY(s->file->resize(s->pages * kPage));
      FIRN_TRY(sync_file(*s->file));
    }
    return {};
  }

  // --- reading

  struct ReadJob {
    std::shared_ptr<File> file;
    BlockKey key;
    BlockPlace place;
    std::span<std::byte> dst;
    std::shared_ptr<AlignedBuffer> scratch;  // of a compressed block

    Status finish() const {
      const auto size = static_cast<size_t>(place.stored_bytes);
      const std::span<const std::byte> stored(scratch ? scratch->data() : dst.data(), size);
      const auto damaged = [&](const std::string& what) {
        return corrupt(fmt::format("{}: {}: the block at offset {} is damaged: {}", file->path(), describe(key),
                                   place.offset, what));
      };
      const uint64_t found = hash_of(stored);
      if (found != place.checksum) {
        return damaged(fmt::format("checksum: expected {:016x}, found {:016x}", place.checksum, found));
      }
      if (place.codec == 0) return {};
      const Status status = decompress_block(stored, dst);
      return status.ok() ? status : damaged(status.message());
    }
  };

  Result<std::shared_ptr<ReadJob>> job_for(const BlockKey& key, const BlockPlace& place,
                                           std::span<std::byte> dst) const {
    auto job = std::make_shared<ReadJob>();
    {
      const std::lock_guard hold(mutex);
      if (place.file >= 0 && static_cast<size_t>(place.file) < segments.size() &&
          segments[static_cast<size_t>(place.file)]) {
        job->file = segments[static_cast<size_t>(place.file)]->file;
      }
    }
    if (!job->file) {
      return invalid(fmt::format("{}: {}: its place in file {} is gone: the log was compacted, find it again", dir,
                                 describe(key), place.file));
    }
    if (place.bytes != static_cast<int64_t>(dst.size())) {
      return invalid(
          fmt::format("{}: {}: expected room for {} bytes, found {}", dir, describe(key), place.bytes, dst.size()));
    }
    job->key = key;
    job->place = place;
    job->dst = dst;
    if (place.codec != 0) {
      job->scratch = std::make_shared<AlignedBuffer>();
      FIRN_TRY(job->scratch->reserve(place.stored_bytes));
    }
    return job;
  }

  IoRead read_of(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
    const auto job = job_for(key, place, dst);
    IoRead read;
    if (!job.ok()) {
      read.finish = [status = job.status()] { return status; };
      return read;
    }
    const ReadJob& j = **job;
    if (j.scratch) {
      read.pieces.push_back({j.file.get(), place.offset, pages_of(place.stored_bytes) * kPage, j.scratch->data()});
    } else {
      read.pieces.push_back({j.file.get(), place.offset, place.stored_bytes, dst.data()});
    }
    read.finish = [job = *job] { return job->finish(); };
    return read;
  }

  Status read(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
    FIRN_ASSIGN(const auto job, job_for(key, place, dst));
    std::byte* to = job->scratch ? job->scratch->data() : dst.data();
    FIRN_TRY(job->file->read_at(place.offset, {to, static_cast<size_t>(place.stored_bytes)}));
    return job->finish();
  }

  // --- verify and compact

  using Progress = std::function<void(int64_t, int64_t)>;

  Result<std::vector<std::string>> verify(const Progress& progress) const {
    std::vector<std::string> problems;
    const auto note = [&](const std::string& text) {
      if (problems.size() < kMaxProblems) problems.push_back(text);
    };
    const int64_t total = disk_bytes();
    int64_t before = 0, ignored = 0;
    AlignedBuffer buffer;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (!segments[i]) continue;
      const Segment& s = *segments[i];
      SegmentReader reader(*s.file, expected(s), &ignored);
      for (int64_t page = 0; page < s.pages;) {
        auto record = reader.record_at(page, s.pages);
        if (!record.ok() || !*record) {
          note(record.ok() ? damaged_at(s.file->path(), page, "a record").message() : record.status().message());
          // What is current behind it is still known, from the footer or from before.
          for (const Slot& slot : table.slots()) {
            if (slot.file == i && slot.page >= page) FIRN_TRY(verify_slot(s, slot, buffer, note));
          }
          break;
        }
        if ((*record)->header.type == RecordType::kBlocks) {
          FIRN_TRY(verify_blocks(s, static_cast<uint32_t>(i), **record, buffer, note));
        }
        page += (*record)->header.pages;
        if (progress) progress(before + page * kPage, total);
      }
      before += s.pages * kPage;
    }
    return problems;
  }

  template <typename Note>
  Status verify_slot(const Segment& s, const Slot& slot, AlignedBuffer& buffer, const Note& note) const {
    FIRN_TRY(buffer.reserve(slot.stored_bytes));
    const std::span<std::byte> stored(buffer.data(), slot.stored_bytes);
    Status status = s.file->read_at(int64_t{slot.page} * kPage, stored);
    if (status.ok()) {
      AlignedBuffer block;
      auto job = ReadJob{s.file, slot.key(), slot.place(), stored, nullptr};
      if (slot.codec != 0) {
        FIRN_TRY(block.reserve(slot.bytes));
        job.scratch = std::make_shared<AlignedBuffer>();
        FIRN_TRY(job.scratch->reserve(slot.stored_bytes));
        std::memcpy(job.scratch->data(), stored.data(), stored.size());
        job.dst = {block.data(), slot.bytes};
      }
      status = job.finish();
    }
    if (!status.ok()) note(status.message());
    return {};
  }

  template <typename Note>
  Status verify_blocks(const Segment& s, uint32_t file, const Record& record, AlignedBuffer& buffer,
                       const Note& note) const {
    for (uint32_t i = 0; i < record.header.count; ++i) {
      const auto e = load<DiskEntry>(record.payload.data() + i * sizeof(DiskEntry));
      Slot slot;
      slot.checksum = e.checksum;
      slot.block = e.block;
      slot.file = file;
      slot.page = record.header.page + e.page;
      slot.stored_bytes = e.stored_bytes;
      slot.bytes = e.bytes;
      slot.layer = e.layer;
      slot.group = e.group;
      slot.kind = static_cast<BlockKind>(e.kind);
      slot.codec = e.codec;
      FIRN_TRY(verify_slot(s, slot, buffer, note));
    }
    return {};
  }

  // Copies what is current in a segment to the growing ones, a few megabytes at a time.
  Status move_live(uint32_t file) {
    const std::shared_ptr<Segment> s = segments[file];
    std::vector<Slot> live;
    for (const Slot& slot : table.slots()) {
      if (slot.file == file) live.push_back(slot);
    }
    std::sort(live.begin(), live.end(), [](const Slot& a, const Slot& b) { return a.page < b.page; });
    AlignedBuffer buffer;
    for (size_t next = 0; next < live.size();) {
      size_t end = next;
      int64_t pages = 0;
      while (end < live.size() && (end == next || (pages + live[end].pages()) * kPage <= kRecordBytes)) {
        pages += live[end++].pages();
      }
      FIRN_TRY(buffer.reserve(pages * kPage));
      std::vector<Input> inputs;
      std::byte* to = buffer.data();
      for (; next < end; ++next) {
        const Slot& slot = live[next];
        const std::span<std::byte> stored(to, slot.stored_bytes);
        FIRN_TRY(s->file->read_at(int64_t{slot.page} * kPage, stored));
        BlockPlace place = slot.place();
        place.codec = 0;  // it moves as it is stored
        FIRN_TRY((ReadJob{s->file, slot.key(), place, stored, nullptr}.finish()));
        inputs.push_back({slot.key(), stored, true, slot.bytes, slot.checksum, slot.codec});
        to += slot.pages() * kPage;
      }
      FIRN_TRY(append_inputs(inputs, {}, false));
    }
    return {};
  }

  // Drops recorded in a segment that goes must be told again while an older entry of a dropped key lies elsewhere: it
  // would come back otherwise. A key that is there again needs none: its newer entry hides the older.
  Status move_drops(uint32_t file) {
    const std::shared_ptr<Segment> s = segments[file];
    if (!s->has_drops) return {};
    int64_t ignored = 0;
    uint32_t records = 0;
    FIRN_ASSIGN(const auto directory, directory_of(*s, &ignored, &records));
    std::vector<BlockKey> keys;
    FIRN_TRY(each_record(*s, directory, [&](const Record& record) {
      if (record.header.type != RecordType::kDrop) return;
      const bool needed = std::any_of(segments.begin(), segments.end(), [&](const auto& other) {
        return other && other != s && other->first_sequence < record.header.sequence &&
               other->block_pages > other->live_pages;
      });
      for (uint32_t i = 0; needed && i < record.header.count; ++i) {
        const auto run = load<DiskRun>(record.payload.data() + i * sizeof(DiskRun));
        for (uint32_t b = 0; b < run.count; ++b) {
          const BlockKey key{static_cast<BlockKind>(run.kind), run.layer, run.group, run.first + b};
          if (table.find(key) == nullptr) keys.push_back(key);
        }
      }
    }));
    if (keys.empty()) return {};
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return write_drop(runs_of(std::move(keys)));
  }

  Status compact(bool all, const Progress& progress) {
    std::vector<uint32_t> victims;
    int64_t total = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment* s = segments[i].get();
      if (s == nullptr || (s->pages <= 1 && growing(s->drive) == s)) continue;
      const bool idle = s->live_pages == 0 && growing(s->drive) != s;  // holds commits and drops at most
      if (!all && !idle && s->live_pages * 2 >= s->block_pages) continue;
      victims.push_back(static_cast<uint32_t>(i));
      total += s->live_pages * kPage;
    }
    // Those that need the least room first; those with drops last and oldest first, when fewest drops are needed.
    std::sort(victims.begin(), victims.end(), [&](uint32_t a, uint32_t b) {
      const Segment &x = *segments[a], &y = *segments[b];
      if (x.has_drops != y.has_drops) return y.has_drops;
      return x.has_drops ? x.number < y.number : x.live_pages < y.live_pages;
    });
    int64_t done = 0;
    for (const uint32_t file : victims) {
      const std::shared_ptr<Segment> s = segments[file];
      const int64_t live = s->live_pages * kPage;
      if (growing(s->drive) == s.get()) FIRN_TRY(finish(s->drive));
      FIRN_TRY(move_live(file));
      FIRN_TRY(move_drops(file));
      FIRN_TRY(write_commit(last_commit.epoch, last_commit.state, {s.get()}));
      {
        const std::lock_guard hold(mutex);
        segments[file].reset();  // reads under way hold the file
      }
      FIRN_TRY(fs.remove(s->file->path()));
      names_unsynced[static_cast<size_t>(s->drive)] = true;
      done += live;
      if (progress) progress(done, total);
    }
    return {};
  }
};

namespace {

Status check_options(const KvLogOptions& options) {
  if (options.identity.find('\n') != std::string::npos) return invalid("segment log: the identity has several lines");
  if (options.element_bytes != 2 && options.element_bytes != 4) {
    return invalid(fmt::format("segment log: element_bytes: expected 2 or 4, found {}", options.element_bytes));
  }
  if (options.more_dirs.size() > 254) return invalid("segment log: more than 255 drives");
  for (const std::string& d : options.more_dirs) {
    if (d.empty() || d.find('\n') != std::string::npos) return invalid("segment log: a folder without a usable name");
  }
  if (options.segment_bytes > int64_t{UINT32_MAX} / 2 * kPage) {
    return invalid(fmt::format("segment log: segment_bytes {}: expected at most {}", options.segment_bytes,
                               int64_t{UINT32_MAX} / 2 * kPage));
  }
  return {};
}

// Makes the folder, or takes an empty one.
Status take_folder(FileSystem& fs, const std::string& path, std::vector<std::string>* made) {
  FIRN_ASSIGN(const bool there, fs.exists(path));
  if (!there) {
    FIRN_TRY(fs.make_folder(path));
    made->push_back(path);
    return {};
  }
  FIRN_ASSIGN(const auto names, fs.list_folder(path));
  if (names.empty()) return {};
  if (std::find(names.begin(), names.end(), "log") != names.end()) {
    return invalid(fmt::format("{}: there is a segment log already: open it, or remove the folder first", path));
  }
  return invalid(fmt::format("{}: expected an empty folder, found {} and {} more: use another one", path, names[0],
                             names.size() - 1));
}

}  // namespace

KvLog::KvLog(std::unique_ptr<Core> core) : core_(std::move(core)) {}
KvLog::~KvLog() = default;

Result<std::unique_ptr<KvLog>> KvLog::create(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
  FIRN_TRY(check_options(options));
  auto core = std::make_unique<Core>(fs, absolute_path(dir), options);
  std::vector<std::string> made;
  FIRN_TRY(take_folder(fs, core->dir, &made));
  Status status = core->lock.take(core->dir);
  std::vector<std::string> taken = {core->dir};
  for (const std::string& d : options.more_dirs) {
    if (!status.ok()) break;
    status = take_folder(fs, absolute_path(d), &made);
    if (status.ok()) taken.push_back(absolute_path(d));
  }
  if (status.ok()) status = core->create_files();
  if (!status.ok()) {
    // What was made here goes again, so that another try finds the folders as they were.
    core->segments.clear();
    for (const std::string& d : taken) {
      const auto names = fs.list_folder(d);
      for (const std::string& name : names.ok() ? *names : std::vector<std::string>()) {
        if (own_file(name)) (void)fs.remove(d + "/" + name);
      }
    }
    for (const std::string& d : made) (void)fs.remove_folder(d);
    return status;
  }
  core->stats.records = core->stats.commits = 0;
  core->remove_all = !options.durable;
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

Result<std::unique_ptr<KvLog>> KvLog::open(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
  FIRN_TRY(check_options(options));
  auto core = std::make_unique<Core>(fs, absolute_path(dir), options);
  FIRN_ASSIGN(const bool there, fs.exists(core->dir));
  if (!there) return not_found(fmt::format("{}: no such folder", dir));
  FIRN_ASSIGN(const auto names, fs.list_folder(core->dir));
  if (names.empty()) return invalid(fmt::format("{}: an empty folder, expected a segment log: create one there", dir));
  if (std::find(names.begin(), names.end(), "log") == names.end()) {
    if (std::all_of(names.begin(), names.end(), own_file)) {
      return invalid(fmt::format("{}: a segment log whose creation was cut short: remove the folder", dir));
    }
    return invalid(fmt::format("{}: not a segment log: expected a file named log in it, found {}", dir, names[0]));
  }
  FIRN_TRY(core->lock.take(core->dir));
  FIRN_TRY(core->open_files());
  core->remove_all = !options.durable;
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

Result<std::vector<BlockPlace>> KvLog::append(std::span<const LogEntry> entries) {
  FIRN_TRY(core_->failed);
  std::vector<Core::Input> inputs;
  inputs.reserve(entries.size());
  for (const LogEntry& e : entries) {
    if (static_cast<int>(e.key.kind) == 0 || e.bytes.empty() || e.bytes.size() > static_cast<size_t>(kMaxBlockBytes)) {
      return invalid(fmt::format("{}: {}: expected a kind from 1 to 255 and 1 to {} bytes, found {} bytes", core_->dir,
                                 describe(e.key), kMaxBlockBytes, e.bytes.size()));
    }
    inputs.push_back({e.key, e.bytes});
  }
  std::vector<BlockPlace> places(entries.size());
  FIRN_TRY(core_->append_inputs(inputs, places, true));
  return places;
}

Status KvLog::drop(const std::function<bool(const BlockKey&)>& which) {
  FIRN_TRY(core_->failed);
  std::vector<BlockKey> keys;
  for (const Slot& slot : core_->table.slots()) {
    if (which(slot.key())) keys.push_back(slot.key());
  }
  if (keys.empty()) return {};
  FIRN_TRY(core_->write_drop(Core::runs_of(keys)));
  const std::lock_guard hold(core_->mutex);
  for (const BlockKey& key : keys) core_->forget(core_->table.erase(key));
  return {};
}

Status KvLog::commit(std::string_view state) {
  FIRN_TRY(core_->failed);
  FIRN_TRY(core_->write_commit(core_->last_commit.epoch + 1, state, {}));
  const std::lock_guard hold(core_->mutex);
  ++core_->stats.commits;
  return {};
}

Status KvLog::journal(std::string_view note) {
  FIRN_TRY(core_->failed);
  if (note.size() > static_cast<size_t>(kMaxNoteBytes)) {
    return invalid(fmt::format("{}: a note of {} bytes: expected at most {}", core_->dir, note.size(), kMaxNoteBytes));
  }
  return core_->write_note(note);
}

const std::string& KvLog::identity() const { return core_->manifest.identity; }
const std::string& KvLog::state() const { return core_->last_commit.state; }
const std::vector<std::string>& KvLog::notes() const { return core_->notes; }

std::optional<BlockPlace> KvLog::find(const BlockKey& key) const {
  const std::lock_guard hold(core_->mutex);
  const Slot* slot = core_->table.find(key);
  return slot == nullptr ? std::nullopt : std::optional(slot->place());
}

void KvLog::for_each(const std::function<void(const BlockKey&, const BlockPlace&)>& visit) const {
  std::vector<Slot> slots;
  {
    const std::lock_guard hold(core_->mutex);
    slots = core_->table.slots();
  }
  std::sort(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.key() < b.key(); });
  for (const Slot& slot : slots) visit(slot.key(), slot.place());
}

IoRead KvLog::read_of(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
  return core_->read_of(key, place, dst);
}

Status KvLog::read(const BlockKey& key, const BlockPlace& place, std::span<std::byte> dst) const {
  return core_->read(key, place, dst);
}

Result<std::vector<std::string>> KvLog::verify(const std::function<void(int64_t, int64_t)>& progress) const {
  return core_->verify(progress);
}

Status KvLog::compact(bool all, const std::function<void(int64_t, int64_t)>& progress) {
  FIRN_TRY(core_->failed);
  return core_->compact(all, progress);
}

KvLogStats KvLog::stats() const {
  const std::lock_guard hold(core_->mutex);
  KvLogStats stats = core_->stats;
  stats.entries = static_cast<int64_t>(core_->table.size());
  stats.bytes_on_disk = core_->disk_bytes_held();
  for (const auto& s : core_->segments) {
    if (s) stats.bytes_dead += (s->block_pages - s->live_pages) * kPage;
  }
  return stats;
}

const std::string& KvLog::dir() const { return core_->dir; }
std::vector<std::string> KvLog::dirs() const { return core_->dirs; }

}  // namespace firn::storage
