// Opening a segment log: finding the last commit, cutting off what is behind it, and the table of what is live.
#include "storage/kv_log_core.h"

namespace firn::storage {
namespace {

RecordHeader header_in(const std::vector<std::byte>& data) {
  RecordHeader header;
  std::memcpy(&header, data.data(), sizeof(header));
  return header;
}

}  // namespace

// The record at `offset` of a file whose valid bytes end at `end`: its directory pages, or nothing when there is no
// complete record of this log.
Result<std::vector<std::byte>> KvLog::Core::directory_at(const File& file, int64_t offset, int64_t end) {
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

// The record at *offset; where that is the damaged first copy of a commit, its second one, which *offset then points
// at.
Result<bool> KvLog::Core::record_at(const File& file, int64_t* offset, int64_t end, std::vector<std::byte>* data) {
  FIRN_ASSIGN(*data, directory_at(file, *offset, end));
  if (!data->empty()) return true;
  for (int64_t at = *offset + kPage; at <= *offset + kTwice && at + kPage <= end; at += kPage) {
    FIRN_ASSIGN(*data, directory_at(file, at, end));
    if (data->empty()) continue;
    const RecordHeader header = header_in(*data);
    if (header.type != kCommit || header.copies != 2 || static_cast<int64_t>(header.back) != at - *offset) break;
    *offset = at;
    return true;
  }
  data->clear();
  return false;
}

Status KvLog::Core::check_entries(const std::string& path, const Found& f, int64_t end) const {
  for (const Entry& e : f.entries) {
    const int64_t last = (f.page + e.page) * kPage + pages(e.stored) * kPage;
    if (e.codec == 0 && e.stored != e.bytes) {
      return corrupt(fmt::format("{}: an entry of the record at {} (layer {}, block {}): expected {} bytes, found {}",
                                 path, f.page * kPage, e.layer, e.block, e.bytes, e.stored));
    }
    if (e.block >= kMostBlocks || e.group > 255 || e.kind == 0 ||
        (e.codec != kDropped && ((e.codec != 0 && e.codec != 2 && e.codec != 4) || last > end))) {
      return corrupt(fmt::format("{}: an entry of the record at {} (layer {}, block {}) lies outside the file", path,
                                 f.page * kPage, e.layer, e.block));
    }
  }
  return {};
}

// All entries of a segment up to `end`, by its footer if it has one.
Status KvLog::Core::entries_of(Segment* segment, int32_t number, bool sealed, std::vector<Found>* out) {
  const std::string& path = segment->file->path();
  if (sealed) {
    std::vector<std::byte> page(kPage);
    FIRN_TRY(segment->file->read_at(segment->length - kPage, page));
    Tail tail;
    std::memcpy(&tail, page.data(), sizeof(tail));
    const uint64_t expected = tail.checksum;
    if (tail.magic == kTailMagic && tail.log_id == log_id && checksum_of<Tail>(page.data(), sizeof(Tail)) == expected &&
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
    std::vector<std::byte> data;
    FIRN_ASSIGN(const bool whole, record_at(*segment->file, &offset, segment->length, &data));
    if (!whole) {
      if (segment->sealed && offset == segment->length - kPage) break;  // the tail
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
      {
        std::vector<Source> sources(header.entries);
        for (size_t i = 0; i < sources.size(); ++i) sources[i].entry = f.entries[i];
        remember(segment, header.sequence, f.page, sources);
      }
      out->push_back(std::move(f));
    } else if (header.type == kCommit) {
      segment->last_commit = offset;
    } else if (header.type == kFooter) {
      segment->sealed = true;  // the next record goes to a new segment
    }
    offset += static_cast<int64_t>(header.directory_pages) * kPage + static_cast<int64_t>(header.payload_bytes);
  }
  return {};
}

// Whether anything in the file is a record of this log, whatever its header says.
Result<bool> KvLog::Core::holds_records(const File& file, int64_t size) {
  for (int64_t at = 0; at + kPage <= size; at += kPage) {
    FIRN_ASSIGN(const auto data, directory_at(file, at, size));
    if (!data.empty()) return true;
  }
  return false;
}

// A tail that was torn holds no commit; damage in front of one must not be taken for it.
Status KvLog::Core::nothing_committed_behind(const File& file, int64_t offset, int64_t size) {
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

Result<KvLog::Core::Last> KvLog::Core::last_commit(const std::vector<uint32_t>& numbers) {
  for (auto number = numbers.rbegin(); number != numbers.rend(); ++number) {
    const std::string path = dirs[0] + "/" + segment_name(*number);
    auto opened = open_segment(path);
    if (!opened.ok()) {
      // The newest may have died in its first write; then nothing is in it.
      if (number != numbers.rbegin() || numbers.size() == 1 || opened.status().code() != Code::kCorrupt) {
        return opened.status();
      }
      FIRN_ASSIGN(const auto file, fs->open(path, OpenMode::kRead));
      FIRN_ASSIGN(const int64_t bytes, file->size());
      FIRN_ASSIGN(const bool used, holds_records(*file, bytes));
      if (used) return opened.status();
      continue;
    }
    FIRN_ASSIGN(const int64_t size, opened->file->size());
    int64_t found = 0;
    for (int64_t offset = opened->header.header_bytes;;) {
      std::vector<std::byte> data;
      FIRN_ASSIGN(const bool whole, record_at(*opened->file, &offset, size, &data));
      if (!whole) {
        FIRN_TRY(nothing_committed_behind(*opened->file, offset, size));
        break;
      }
      const RecordHeader header = header_in(data);
      if (header.type == kCommit && header.back == 0) found = offset;
      if (header.type == kCommit && header.back > 0 && found != offset - static_cast<int64_t>(header.back))
        found = offset;
      offset += static_cast<int64_t>(header.directory_pages) * kPage + static_cast<int64_t>(header.payload_bytes);
    }
    if (found > 0) return Last{*number, found};
  }
  return Last{};
}

Result<std::vector<uint32_t>> KvLog::Core::segment_numbers(const std::string& dir) const {
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

Status KvLog::Core::open_all() {
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
        return invalid(fmt::format("{}: was not spread over {}: its drives were fixed when it was made", dirs[0], dir));
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
    if (header.entries != dirs.size() || end - at < static_cast<int64_t>(sizeof(epoch))) return damaged();
    std::memcpy(&epoch, at, sizeof(epoch));
    at += sizeof(epoch);
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
    sequence = header.sequence;
    // The commit itself lies behind the length it tells of its own segment.
    if (drives[0].segment == last.segment) {
      int64_t length = last.offset + static_cast<int64_t>(header.directory_pages) * kPage;
      if (header.copies == 2 && header.back == 0) {
        FIRN_ASSIGN(const auto second, directory_at(*opened.file, length, size));
        if (!second.empty() && header_in(second).back > 0)
          length += static_cast<int64_t>(header.directory_pages) * kPage;
      }
      drives[0].length = static_cast<uint64_t>(length);
    }
  }
  // Whose they are, before anything is removed or cut.
  for (size_t d = 0; d < dirs.size(); ++d) {
    const auto there = segment_numbers(dirs[d]);
    if (!there.ok()) continue;  // said below
    for (const uint32_t number : *there) {
      const auto opened = open_segment(dirs[d] + "/" + segment_name(number));
      if (!opened.ok() || (opened->header.log_id == log_id && opened->header.drive == d)) continue;
      return corrupt(fmt::format("{}/{}: belongs to another session or drive", dirs[d], segment_name(number)));
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
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.sequence < b.sequence; });
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

Status KvLog::Core::read_journal() {
  FIRN_ASSIGN(journal, fs->open(dirs[0] + "/journal", OpenMode::kUpdate));
  FIRN_ASSIGN(const int64_t size, journal->size());
  journal_at = 0;
  while (journal_at + static_cast<int64_t>(sizeof(Note)) <= size) {
    Note note;
    FIRN_TRY(journal->read_at(journal_at, std::as_writable_bytes(std::span(&note, 1))));
    const int64_t end = journal_at + static_cast<int64_t>(sizeof(Note)) + note.bytes;
    if (note.magic != kJournalMagic || note.log_id != log_id || note.commit != epoch || note.bytes > kMostNote ||
        end > size) {
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

}  // namespace firn::storage
