// Layout of the files: storage/FORMAT.md, "Segment log".
//
// Order across drives: every record carries a sequence number of the whole log. Opening gathers the entries of all
// drives and applies them in that order. A segment that is full ends with a footer, the copy of all its directories, so
// that only the last segment of a drive is walked record by record.
#include "storage/kv_log.h"

#include "storage/kv_log_core.h"

namespace firn::storage {

KvLog::KvLog(std::unique_ptr<Core> core) : core_(std::move(core)) {}

bool KvLog::unborn(FileSystem& fs, const std::string& dir) {
  const auto names = fs.list_folder(dir);
  if (!names.ok()) return false;
  for (const std::string& name : *names) {
    if (name == "lock") continue;
    if (name != "journal" && name != segment_name(1)) return false;
    const auto file = fs.open(dir + "/" + name, OpenMode::kRead);
    if (!file.ok()) return false;
    const auto size = (*file)->size();
    // A header alone, whole or torn; records would follow it.
    SegmentHeader header{};
    if (!size.ok()) return false;
    if (*size >= kPage && name != "journal" &&
        !(*file)->read_at(0, std::as_writable_bytes(std::span(&header, 1))).ok()) {
      return false;
    }
    const bool whole = std::memcmp(header.magic, kSegmentMagic, sizeof(kSegmentMagic)) == 0;
    if (name == "journal" ? *size > 0 : *size > (whole ? static_cast<int64_t>(header.header_bytes) : kPage))
      return false;
  }
  return true;
}

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
      if (name == "lock" || unborn(fs, d)) continue;
      return invalid(fmt::format("{}: expected an empty folder for a new session, found {} in it", d, name));
    }
  }
  FIRN_TRY(core->lock(dir));
  std::random_device random;
  core->log_id = static_cast<uint64_t>(random()) << 32 | random();
  for (size_t d = 0; d < core->dirs.size(); ++d) FIRN_TRY(core->new_segment(static_cast<int>(d), 1).status());
  FIRN_TRY(core->read_journal());
  if (options.durable) {
    for (const std::string& d : core->dirs) {
      const size_t slash = d.find_last_of('/');
      FIRN_TRY(fs.sync_folder(slash == std::string::npos ? "." : slash == 0 ? "/" : d.substr(0, slash)));
    }
  }
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

Result<std::unique_ptr<KvLog>> KvLog::open(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
  auto core = std::make_unique<Core>();
  core->fs = &fs;
  core->options = options;
  core->dirs = {dir};
  FIRN_ASSIGN(const auto numbers, core->segment_numbers(dir));
  if (numbers.empty()) return not_found(fmt::format("{}: holds no segments: not a session", dir));
  FIRN_TRY(core->lock(dir));
  FIRN_TRY(core->open_all());
  return std::unique_ptr<KvLog>(new KvLog(std::move(core)));
}

KvLog::~KvLog() {
  if (core_->options.durable) return;
  core_->journal.reset();
  for (const auto& s : core_->segments) {
    if (s->file == nullptr) continue;
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
    FIRN_TRY(c.put_blocks(&sources, true));
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
        s.entry.codec = static_cast<uint8_t>(c.options.element_bytes);
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

Status KvLog::commit(std::string_view state) { return core_->commit(state, true); }

Status KvLog::journal(std::string_view text) {
  Core& c = *core_;
  if (static_cast<int64_t>(text.size()) > kMostNote) {
    return invalid(fmt::format("a note of {} bytes: expected at most {}", text.size(), kMostNote));
  }
  const Note note{kJournalMagic, static_cast<uint32_t>(text.size()), c.log_id, c.epoch,
                  XXH3_64bits_withSeed(text.data(), text.size(), c.epoch)};
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
  FIRN_CHECK(segment->file != nullptr, "a place from before the log was compacted");
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
  read.finish = [key, place, dst, to, scratch, file = segment->file]() -> Status {
    const uint64_t found = XXH3_64bits(to, static_cast<size_t>(place.stored_bytes));
    if (found != place.checksum) {
      return corrupt(fmt::format("{}: {} at offset {}: expected checksum {:016x}, found {:016x}: the file is damaged",
                                 file->path(), Core::words(key), place.offset, place.checksum, found));
    }
    if (place.codec == 0) return {};
    return decompress_block({to, static_cast<size_t>(place.stored_bytes)}, place.codec,
                            dst.first(static_cast<size_t>(place.bytes)))
        .with_context(fmt::format("{}: {}", file->path(), Core::words(key)));
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
  // What a drop record in them held down could come back from segments that stay.
  if (old.size() < n_before) {
    c.pending_drops.assign(c.dropped.begin(), c.dropped.end());
    FIRN_TRY(c.flush_drops());
  }
  for (const size_t i : old) c.segments[i]->gone = true;
  if (Status s = c.commit(std::string(c.state), false); !s.ok()) {
    for (const size_t i : old) c.segments[i]->gone = false;
    return s;
  }
  for (const size_t i : old) {
    Core::Segment& s = *c.segments[i];
    const std::string path = s.file->path();
    {
      const std::lock_guard guard(c.mutex);
      c.stats.bytes_on_disk -= s.length;
      s.file.reset();
    }
    (void)c.fs->remove_file(path);  // no commit names it any more: the next open tries again
  }
  return {};
}

KvLogStats KvLog::stats() const {
  const std::lock_guard guard(core_->mutex);
  KvLogStats stats = core_->stats;
  stats.bytes_dead = 0;
  for (const auto& s : core_->segments) stats.bytes_dead += s->gone ? 0 : s->dead;
  return stats;
}

}  // namespace firn::storage
