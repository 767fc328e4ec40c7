// The segment log: what was committed is what is found, whatever happens to the process, the drive or the bytes.
#include "storage/kv_log.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "storage/block_codec.h"
#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;
using Twin = std::map<BlockKey, std::string>;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string random_block(std::mt19937_64& random, size_t bytes, bool compressible = false) {
  std::string block(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) {
    const uint64_t r = random();
    block[i] = static_cast<char>(compressible && i % 2 == 1 ? 0x3C + (r & 3) : r);
  }
  return block;
}

BlockKey key_of(uint32_t block, uint16_t layer = 0, uint16_t group = 0, BlockKind kind = BlockKind::kKv) {
  return {kind, layer, group, block};
}

// What a queue does with a read, without one.
Status execute(const IoRead& read) {
  for (const IoPiece& piece : read.pieces) {
    FIRN_TRY(piece.file->read_at(piece.offset, {piece.dst, static_cast<size_t>(piece.bytes)}));
  }
  return read.finish ? read.finish() : Status();
}

Result<std::string> read_block(const KvLog& log, const BlockKey& key, bool queued = false) {
  const auto place = log.find(key);
  if (!place) return not_found("no such block");
  std::string block(static_cast<size_t>(place->bytes), '\0');
  const auto dst = std::as_writable_bytes(std::span(block));
  FIRN_TRY(queued ? execute(log.read_of(key, *place, dst)) : log.read(key, *place, dst));
  return block;
}

// The first difference in words; empty where there is none.
std::string difference(const KvLog& log, const Twin& twin) {
  auto at = twin.begin();
  std::string text;
  bool queued = false;
  log.for_each([&](const BlockKey& key, const BlockPlace&) {
    if (!text.empty()) return;
    if (at == twin.end() || at->first != key) {
      text = "key: block " + std::to_string(key.block);
      return;
    }
    queued = !queued;
    const auto block = read_block(log, key, queued);
    if (!block.ok()) {
      text = block.status().message();
    } else if (*block != at->second) {
      text = "content: block " + std::to_string(key.block);
    }
    ++at;
  });
  if (text.empty() && at != twin.end()) text = "missing: block " + std::to_string(at->first.block);
  return text;
}

Status append_all(KvLog& log, const Twin& blocks) {
  std::vector<LogEntry> entries;
  for (const auto& [key, block] : blocks) entries.push_back({key, bytes_of(block)});
  return log.append(entries).status();
}

Twin some_blocks(std::mt19937_64& random, uint32_t keys, size_t count, size_t max_bytes, bool compressible = false) {
  Twin blocks;
  for (size_t i = 0; i < count; ++i) {
    const BlockKey key{static_cast<BlockKind>(1 + random() % 3), static_cast<uint16_t>(random() % 3),
                       static_cast<uint16_t>(random() % 2), static_cast<uint32_t>(random() % keys)};
    blocks[key] = random_block(random, 1 + random() % max_bytes, compressible);
  }
  return blocks;
}

// Thousands of syncs take minutes on a drive and nothing in memory; what is tested is the order of writes.
std::string memory_folder() {
  const bool there = ::access("/dev/shm", W_OK) == 0;
  return there ? "/dev/shm" : std::filesystem::temp_directory_path().string();
}

KvLogOptions small_options() {
  KvLogOptions options;
  options.identity = "model abc bf16 block 128";
  options.segment_bytes = 96 * 1024;
  return options;
}

// A disk that takes no write, resize or removal any more after some number of them; the one at the limit is torn. What
// was not synced when the power goes can be taken back.
struct Switch {
  struct Undo {
    std::string path;
    int64_t offset = 0, size = 0;  // the file's size before
    std::string old;
  };
  std::vector<Undo> undo;
  std::atomic<int64_t> left{INT64_MAX};
  int64_t used = 0;
  uint64_t torn = 0;
  bool take() {
    ++used;
    return left.fetch_sub(1) > 0;
  }
};

class StoppingFile : public File {
 public:
  StoppingFile(Switch& stop, std::unique_ptr<File> inner) : stop_(stop), inner_(std::move(inner)) {}
  const std::string& path() const override { return inner_->path(); }
  Result<int64_t> size() const override { return inner_->size(); }
  Status read_at(int64_t offset, std::span<std::byte> out) const override { return inner_->read_at(offset, out); }
  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    return inner_->read_some_at(offset, out);
  }
  int64_t direct_alignment() const override { return inner_->direct_alignment(); }
  Status write_at(int64_t offset, std::span<const std::byte> in) override {
    const int64_t left = stop_.left.load();
    if (left >= 0) remember(offset, static_cast<int64_t>(in.size()));
    if (stop_.take()) return inner_->write_at(offset, in);
    if (left == 0 && !in.empty()) FIRN_TRY(inner_->write_at(offset, in.first(stop_.torn % in.size())));
    return io_error(path() + ": the power is off");
  }
  Status resize(int64_t bytes) override {
    if (stop_.left.load() > 0) remember(bytes, INT64_MAX / 2);
    return stop_.take() ? inner_->resize(bytes) : io_error(path() + ": the power is off");
  }
  Status sync() override {
    if (stop_.left.load() <= 0) return io_error(path() + ": the power is off");
    std::erase_if(stop_.undo, [this](const Switch::Undo& u) { return u.path == path(); });
    return inner_->sync();
  }

 private:
  void remember(int64_t offset, int64_t bytes) {
    const int64_t size = inner_->size().value();
    std::string old(static_cast<size_t>(std::clamp<int64_t>(size - offset, 0, bytes)), '\0');
    REQUIRE(inner_->read_at(offset, std::as_writable_bytes(std::span(old))).ok());
    stop_.undo.push_back({path(), offset, size, std::move(old)});
  }

  Switch& stop_;
  std::unique_ptr<File> inner_;
};

class StoppingFileSystem : public FileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) override {
    FIRN_ASSIGN(auto inner, real().open(path, mode));
    return std::unique_ptr<File>(std::make_unique<StoppingFile>(stop, std::move(inner)));
  }
  Status remove(const std::string& path) override {
    return stop.take() ? real().remove(path) : io_error(path + ": the power is off");
  }
  // Takes back what was not synced, all of it or each write by chance.
  void lose_unsynced(bool all, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = stop.undo.size(); i-- > 0;) {
      const Switch::Undo& u = stop.undo[i];
      if ((!all && random() % 2 == 0) || !std::filesystem::exists(u.path)) continue;
      const auto file = std::move(real().open(u.path, OpenMode::kUpdate)).value();
      REQUIRE(file->write_at(u.offset, bytes_of(u.old)).ok());
      const bool last = std::none_of(stop.undo.begin() + static_cast<int64_t>(i) + 1, stop.undo.end(),
                                     [&](const Switch::Undo& v) { return v.path == u.path; });
      if (all || last) REQUIRE(file->resize(u.size).ok());
    }
  }
  Switch stop;
};

TEST_CASE("A log gives back what was appended, before and after it is opened again", "[kv_log]") {
  const TempFolder folder;
  const TempFolder second;
  for (const bool compress : {false, true}) {
    for (const bool two : {false, true}) {
      const std::string dir = folder / ("log" + std::to_string(compress) + std::to_string(two));
      KvLogOptions options = small_options();
      options.compress = compress;
      if (two) options.more_dirs = {second / ("more" + std::to_string(compress))};
      std::mt19937_64 random(7);
      Twin twin = some_blocks(random, 100, 60, 40000, true);
      {
        auto log = KvLog::create(FileSystem::real(), dir, options);
        REQUIRE(log.ok());
        REQUIRE(append_all(**log, twin).ok());
        CHECK(difference(**log, twin).empty());
        REQUIRE((*log)->commit("state one").ok());
        REQUIRE((*log)->journal("note one").ok());
        REQUIRE((*log)->journal("").ok());
        const KvLogStats stats = (*log)->stats();
        CHECK(stats.entries == static_cast<int64_t>(twin.size()));
        CHECK((compress ? stats.bytes_stored * 10 < stats.bytes_appended * 9
                        : stats.bytes_stored == stats.bytes_appended));
        CHECK((*log)->verify({}).value().empty());
      }
      options.more_dirs.clear();
      auto log = KvLog::open(FileSystem::real(), dir, options);
      REQUIRE(log.ok());
      CHECK((*log)->state() == "state one");
      CHECK((*log)->identity() == options.identity);
      CHECK((*log)->notes() == std::vector<std::string>{"note one", ""});
      CHECK((*log)->dirs().size() == (two ? 2 : 1));
      CHECK(difference(**log, twin).empty());
      CHECK((*log)->verify({}).value().empty());
    }
  }
}

TEST_CASE("A log does what a map does, through commits, drops, compaction and reopening", "[kv_log]") {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    const TempFolder folder(memory_folder());
    KvLogOptions options = small_options();
    options.durable = true;
    options.compress = seed == 2;
    if (seed == 3) options.more_dirs = {folder / "b", folder / "c"};
    std::mt19937_64 random(seed);
    auto log = std::move(KvLog::create(FileSystem::real(), folder / "a", options)).value();
    Twin now, committed;
    std::string state;
    std::vector<std::string> notes;
    for (int step = 0; step < 1500; ++step) {
      const uint64_t what = random() % 100;
      if (what < 50) {
        const Twin blocks = some_blocks(random, 40, 1 + random() % 6, 9000, seed == 2);
        REQUIRE(append_all(*log, blocks).ok());
        for (const auto& [key, block] : blocks) now[key] = block;
      } else if (what < 62) {
        const uint32_t from = static_cast<uint32_t>(random() % 40), to = from + static_cast<uint32_t>(random() % 10);
        const auto layer = static_cast<uint16_t>(random() % 3);
        const auto which = [&](const BlockKey& k) { return k.layer == layer && k.block >= from && k.block < to; };
        REQUIRE(log->drop(which).ok());
        std::erase_if(now, [&](const auto& e) { return which(e.first); });
      } else if (what < 72) {
        state = random_block(random, random() % 10000);
        REQUIRE(log->commit(state).ok());
        committed = now;
        notes.clear();
      } else if (what < 80) {
        notes.push_back(random_block(random, random() % 100));
        REQUIRE(log->journal(notes.back()).ok());
      } else if (what < 85) {
        log.reset();
        log = std::move(KvLog::open(FileSystem::real(), folder / "a", options)).value();
        REQUIRE(log->state() == state);
        REQUIRE(log->notes() == notes);
        now = committed;
        REQUIRE(difference(*log, now).empty());
      } else if (what < 87) {
        REQUIRE(log->compact(random() % 3 == 0, {}).ok());
        // Only where something was rewritten is what was appended committed too, with the same state.
        REQUIRE(log->commit(state).ok());
        committed = now;
        notes.clear();
      } else if (!now.empty()) {
        auto at = now.begin();
        std::advance(at, random() % now.size());
        const auto block = read_block(*log, at->first, what % 2 == 0);
        REQUIRE(block.ok());
        REQUIRE(*block == at->second);
      }
    }
    CHECK(difference(*log, now).empty());
    CHECK(log->verify({}).value().empty());
    REQUIRE(log->compact(true, {}).ok());
    CHECK(log->stats().bytes_dead == 0);
    CHECK(difference(*log, now).empty());
    int64_t on_disk = 0;
    for (const std::string& dir : log->dirs()) {
      for (const auto& e : std::filesystem::directory_iterator(dir)) {
        if (contains(e.path().filename().string(), "segment-")) on_disk += static_cast<int64_t>(e.file_size());
      }
    }
    CHECK(on_disk == log->stats().bytes_on_disk);
  }
}

// One scripted life of a log. Remembers what each commit held; a commit that failed may or may not have happened.
struct Life {
  std::vector<std::pair<std::string, Twin>> commits = {{"", {}}};
  std::pair<std::string, Twin> trying = {"", {}};
  std::string error;  // what ended it

  void run(FileSystem& fs, const std::string& dir, const KvLogOptions& options) {
    std::mt19937_64 random(5);
    auto opened = KvLog::open(fs, dir, options);
    if (!opened.ok()) {
      error = opened.status().message();
      return;
    }
    KvLog& log = **opened;
    const auto fails = [this](const Status& status) {
      error = status.message();
      return !status.ok();
    };
    Twin now;
    for (int step = 0; step < 12; ++step) {
      const Twin blocks = some_blocks(random, 12, 4, 9000);
      if (fails(append_all(log, blocks))) return;
      for (const auto& [key, block] : blocks) now[key] = block;
      if (step % 4 == 1) {
        if (fails(log.drop([](const BlockKey& k) { return k.block < 4; }))) return;
        std::erase_if(now, [](const auto& e) { return e.first.block < 4; });
      }
      trying = {"state " + std::to_string(step), now};
      if (fails(log.commit(trying.first))) return;
      commits.push_back(trying);
      if (fails(log.journal("note"))) return;
      // It commits again what is committed, so what is found stays the same.
      if (step % 5 == 4 && fails(log.compact(false, {}))) return;
    }
    (void)fails(append_all(log, some_blocks(random, 12, 4, 9000)));
  }

  std::string check(const std::string& dir, const KvLogOptions& options) const {
    const auto log = KvLog::open(FileSystem::real(), dir, options);
    if (!log.ok()) return log.status().message();
    const std::string last =
        (*log)->state() == commits.back().first ? difference(**log, commits.back().second) : "state " + (*log)->state();
    if (!last.empty() && !((*log)->state() == trying.first && difference(**log, trying.second).empty())) return last;
    const auto problems = (*log)->verify({});
    if (!problems.ok()) return problems.status().message();
    if (!problems->empty()) return problems->front();
    // It goes on from there.
    const std::string block(5000, 'x');
    const BlockKey key = key_of(99, 9);
    const LogEntry entry{key, bytes_of(block)};
    if (!(*log)->append({&entry, 1}).ok() || !(*log)->commit("after").ok()) return "it does not go on";
    const auto back = read_block(**log, key);
    return back.ok() && *back == block ? "" : "what was appended afterwards is lost";
  }
};

TEST_CASE("After the power goes at any moment the log opens as of its last commit", "[kv_log]") {
  enum class Lost { kNothing, kUnsynced, kSomeUnsynced };
  std::mt19937_64 random(11);
  for (const bool two : {false, true}) {
    for (const Lost lost : {Lost::kNothing, Lost::kUnsynced, Lost::kSomeUnsynced}) {
      const TempFolder folder(memory_folder());
      // The first life has no end, and tells how many writes there are.
      int64_t writes = 0;
      for (int64_t stop = 0; stop <= writes; ++stop) {
        const std::string name = std::to_string(stop);
        KvLogOptions options = small_options();
        options.segment_bytes = 64 * 1024;
        if (two) options.more_dirs = {folder / ("more" + name)};
        REQUIRE(KvLog::create(FileSystem::real(), folder / name, options).ok());
        StoppingFileSystem fs;
        if (stop > 0) fs.stop.left = stop - 1;
        fs.stop.torn = random();
        Life life;
        life.run(fs, folder / name, options);
        if (stop == 0) {
          writes = fs.stop.used;
          REQUIRE(life.commits.size() == 13);
          REQUIRE(writes > 40);
        }
        INFO("stopped at write " << stop << " of " << writes << ", lost: " << static_cast<int>(lost));
        CHECK(life.error.empty() == (stop == 0));
        if (lost != Lost::kNothing) fs.lose_unsynced(lost == Lost::kUnsynced, random());
        CHECK(life.check(folder / name, options) == "");
        std::filesystem::remove_all(folder / name);
      }
    }
  }
}

TEST_CASE("A failing drive gives a clear error, and the log opens afterwards", "[kv_log]") {
  const TempFolder folder(memory_folder());
  int number = 0;
  for (const FaultKind kind : {FaultKind::kNoSpace, FaultKind::kTornWrite, FaultKind::kSyncError, FaultKind::kReadError,
                               FaultKind::kOpenError, FaultKind::kFolderError, FaultKind::kEarlyEnd}) {
    for (int64_t call = 1;; ++call) {
      const std::string dir = folder / std::to_string(number++);
      const KvLogOptions options = small_options();
      REQUIRE(KvLog::create(FileSystem::real(), dir, options).ok());
      FaultyFileSystem fs(FileSystem::real(), {{.kind = kind, .first = call, .count = 1, .bytes = call * 977 % 9000}});
      Life life;
      life.run(fs, dir, options);
      INFO("fault " << static_cast<int>(kind) << " at call " << call);
      CHECK(life.check(dir, options) == "");
      // It names the file or the log's folder. A fault that nobody was told of was one of clearing up.
      CHECK((life.error.empty() || contains(life.error, dir)));
      std::filesystem::remove_all(dir);
      if (fs.hits() == 0 || call > 400) break;
    }
  }
}

TEST_CASE("No space leaves what was appended, and appending goes on when there is some again", "[kv_log]") {
  const TempFolder folder(memory_folder());
  for (const FaultKind kind : {FaultKind::kNoSpace, FaultKind::kTornWrite}) {
    for (int64_t call = 1; call < 30; ++call) {
      const std::string dir = folder / (std::to_string(static_cast<int>(kind)) + "-" + std::to_string(call));
      FaultyFileSystem fs(
          FileSystem::real(),
          {{.kind = kind, .path_part = "segment", .first = call, .count = 1, .bytes = call * 1777 % 20000}});
      std::mt19937_64 random(3);
      Twin twin;
      int errors = 0;
      {
        auto log = KvLog::create(fs, dir, small_options());
        if (!log.ok()) {
          CHECK(contains(log.status().message(), "no space"));
          CHECK_FALSE(std::filesystem::exists(dir));
          continue;
        }
        for (int step = 0; step < 12; ++step) {
          const Twin blocks = some_blocks(random, 30, 3, 9000);
          for (int again = 0; again < 3; ++again) {
            const Status status = append_all(**log, blocks);
            if (status.ok()) break;
            CHECK(contains(status.message(), "no space"));
            ++errors;
          }
          for (const auto& [key, block] : blocks) twin[key] = block;
          if (!(*log)->commit("s").ok()) {
            ++errors;
            REQUIRE((*log)->commit("s").ok());
          }
        }
        CHECK(difference(**log, twin).empty());
      }
      auto log = KvLog::open(FileSystem::real(), dir, small_options());
      REQUIRE(log.ok());
      CHECK(difference(**log, twin).empty());
      CHECK(errors <= 2);
    }
  }
}

TEST_CASE("A flipped bit is an error or changes nothing", "[kv_log]") {
  const TempFolder folder(memory_folder());
  const std::string dir = folder / "log";
  KvLogOptions options = small_options();
  options.segment_bytes = 64 * 1024;
  std::mt19937_64 random(17);
  Twin twin;
  {
    auto log = KvLog::create(FileSystem::real(), dir, options);
    REQUIRE(log.ok());
    for (int step = 0; step < 8; ++step) {
      const Twin blocks = some_blocks(random, 20, 4, 6000);
      for (const auto& [key, block] : blocks) twin[key] = block;
      REQUIRE(append_all(**log, blocks).ok());
      REQUIRE((*log)->drop([&](const BlockKey& k) { return k.block == static_cast<uint32_t>(step); }).ok());
      std::erase_if(twin, [&](const auto& e) { return e.first.block == static_cast<uint32_t>(step); });
      REQUIRE((*log)->commit("state " + std::to_string(step)).ok());
    }
    REQUIRE((*log)->journal("a note").ok());
  }
  int errors = 0, harmless = 0, flips = 0;
  const auto names = FileSystem::real().list_folder(dir).value();
  for (const std::string& name : names) {
    if (name == "lock") continue;
    const std::string whole = test::get_file(dir + "/" + name);
    // Each page's head, where records begin, and places within.
    std::vector<size_t> places;
    for (size_t at = 0; at < whole.size(); at += 4096) {
      for (const size_t in : {random() % 64, random() % 64, 64 + random() % 200, random() % 4096}) {
        if (at + in < whole.size()) places.push_back(at + in);
      }
    }
    for (const size_t at : places) {
      std::string broken = whole;
      broken[at] = static_cast<char>(broken[at] ^ (1 << (random() % 8)));
      const TempFolder copy(memory_folder());
      std::filesystem::copy(dir, copy / "log");
      test::put_file(copy / "log" + "/" + name, broken);
      ++flips;
      INFO(name << " at " << at);
      const auto log = KvLog::open(FileSystem::real(), copy / "log", options);
      if (!log.ok()) {
        ++errors;
        CHECK(contains(log.status().message(), copy.path()));
        continue;
      }
      CHECK((*log)->state() == "state 7");
      int damaged = 0;
      for (const auto& [key, block] : twin) {
        const auto found = read_block(**log, key);
        if (found.ok()) {
          CHECK(*found == block);
        } else {
          CHECK(found.status().code() == Code::kCorrupt);
          CHECK(contains(found.status().message(), "block " + std::to_string(key.block)));
          ++damaged;
        }
      }
      CHECK(damaged <= 1);
      CHECK((*log)->stats().entries == static_cast<int64_t>(twin.size()));
      damaged > 0 ? ++errors : ++harmless;
      if (damaged > 0) CHECK((*log)->verify({}).value().size() == 1);
    }
  }
  CHECK(flips > 100);
  CHECK(errors > 50);
  CHECK(harmless > 10);
}

TEST_CASE("Damage before a commit is told from a torn tail even without the journal", "[kv_log]") {
  const TempFolder folder(memory_folder());
  const std::string dir = folder / "log", segment = dir + "/segment-000001";
  const KvLogOptions options = small_options();
  int64_t first = 0;
  {
    auto log = std::move(KvLog::create(FileSystem::real(), dir, options)).value();
    REQUIRE(log->commit("one").ok());
    first = log->stats().bytes_on_disk;
    const std::string block(5000, 'x');
    const LogEntry entry{key_of(1), bytes_of(block)};
    REQUIRE(log->append({&entry, 1}).ok());
    REQUIRE(log->commit("two").ok());
  }
  std::filesystem::remove(dir + "/journal");
  const std::string whole = test::get_file(segment);
  std::string broken = whole;
  broken[static_cast<size_t>(first) + 70] ^= 1;
  test::put_file(segment, broken);
  CHECK(contains(KvLog::open(FileSystem::real(), dir, options).status().message(),
                 "damaged at offset " + std::to_string(first)));
  // The same record without what follows is a torn tail.
  test::put_file(segment, broken.substr(0, static_cast<size_t>(first) + 4096));
  CHECK(KvLog::open(FileSystem::real(), dir, options).value()->state() == "one");
}

TEST_CASE("What is not this log is refused with the reason", "[kv_log]") {
  const TempFolder folder(memory_folder());
  const KvLogOptions options = small_options();
  FileSystem& fs = FileSystem::real();
  const auto why = [&](const std::string& name, const KvLogOptions& o) {
    const auto log = KvLog::open(fs, folder / name, o);
    return log.ok() ? std::string("opened") : log.status().message();
  };
  CHECK(contains(why("absent", options), "no such folder"));
  std::filesystem::create_directory(folder / "empty");
  CHECK(contains(why("empty", options), "an empty folder"));
  folder.write("other/readme", "hello");
  CHECK(contains(why("other", options), "not a segment log"));
  CHECK(contains(KvLog::create(fs, folder / "other", options).status().message(), "expected an empty folder"));
  folder.write("half/journal", "");
  CHECK(contains(why("half", options), "cut short"));
  CHECK(contains(KvLog::create(fs, folder / "no/parent", options).status().message(), "create it first"));
  {
    KvLogOptions two = options;
    two.more_dirs = {folder / "drive"};
    const auto log = KvLog::create(fs, folder / "log", two);
    REQUIRE(log.ok());
    CHECK(contains(why("log", options), "in use by process " + std::to_string(::getpid())));
    CHECK(contains(KvLog::create(fs, folder / "log", options).status().message(), "already"));
  }
  KvLogOptions wrong = options;
  wrong.identity = "model xyz";
  CHECK(contains(why("log", wrong), "expected \"model xyz\", found \"model abc bf16 block 128\""));
  wrong.identity = "";
  CHECK(why("log", wrong) == "opened");
  wrong = options;
  wrong.more_dirs = {folder / "elsewhere"};
  CHECK(contains(why("log", wrong), folder / "elsewhere"));
  std::filesystem::rename(folder / "drive", folder / "gone");
  CHECK(contains(why("log", options), "the folder " + (folder / "drive") + " on another drive is missing"));
  std::filesystem::rename(folder / "gone", folder / "drive");
  CHECK(why("log", options) == "opened");
  std::string manifest = test::get_file(folder / "log/log");
  manifest.replace(manifest.find("log 1"), 5, "log 9");
  test::put_file(folder / "log/log", manifest);
  CHECK(contains(why("log", options), "version: expected 1, found 9"));
}

TEST_CASE("The disk limit refuses before anything is written, and says how much is short", "[kv_log]") {
  const TempFolder folder(memory_folder());
  KvLogOptions options = small_options();
  options.disk_limit_bytes = 1 << 20;
  auto log = std::move(KvLog::create(FileSystem::real(), folder / "log", options)).value();
  std::mt19937_64 random(1);
  const std::string block = random_block(random, 50000);
  int64_t held = 0;
  for (uint32_t i = 0; i < 100; ++i) {
    const LogEntry entry{key_of(i), bytes_of(block)};
    const int64_t written = log->stats().bytes_written;
    const auto places = log->append({&entry, 1});
    if (!places.ok()) {
      CHECK(contains(places.status().message(), "disk limit of 1048576 bytes"));
      CHECK(contains(places.status().message(), "short"));
      CHECK(log->stats().bytes_written == written);
      break;
    }
    ++held;
    REQUIRE(log->commit("s").ok());
  }
  CHECK(held >= 10);
  CHECK(log->stats().bytes_on_disk <= options.disk_limit_bytes);
  // Dropping and compacting makes room again.
  REQUIRE(log->drop([](const BlockKey& k) { return k.block % 2 == 0; }).ok());
  REQUIRE(log->commit("s").ok());
  REQUIRE(log->compact(true, {}).ok());
  const LogEntry entry{key_of(1000), bytes_of(block)};
  CHECK(log->append({&entry, 1}).ok());
  CHECK(log->stats().bytes_on_disk <= options.disk_limit_bytes);
}

TEST_CASE("A scratch log leaves nothing", "[kv_log]") {
  const TempFolder folder(memory_folder());
  KvLogOptions options = small_options();
  options.durable = false;
  options.more_dirs = {folder / "b"};
  {
    auto log = KvLog::create(FileSystem::real(), folder / "a", options);
    REQUIRE(log.ok());
    std::mt19937_64 random(1);
    REQUIRE(append_all(**log, some_blocks(random, 50, 30, 20000)).ok());
    CHECK(folder.entries() == 2);
  }
  CHECK(folder.entries() == 0);
}

TEST_CASE("A process killed at any moment leaves its last commit and its notes", "[kv_log]") {
  const TempFolder folder(memory_folder());
  const std::string dir = folder / "log";
  KvLogOptions options = small_options();
  REQUIRE(KvLog::create(FileSystem::real(), dir, options).ok());
  std::mt19937_64 random(23);
  uint64_t before = 0;
  for (int round = 0; round < 30; ++round) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // Block b of commit n holds n in every word; the state is n, and each commit is followed by a note of it.
      auto log = KvLog::open(FileSystem::real(), dir, options);
      if (!log.ok()) ::_exit(1);
      uint64_t n = (*log)->state().empty() ? 0 : std::stoull((*log)->state());
      for (;;) {
        ++n;
        const std::vector<uint64_t> words(1200, n);
        std::vector<LogEntry> entries;
        for (uint32_t b = 0; b < 4; ++b) entries.push_back({key_of(b), std::as_bytes(std::span(words))});
        if (!(*log)->append(entries).ok() || !(*log)->commit(std::to_string(n)).ok() ||
            !(*log)->journal(std::to_string(n)).ok() || (n % 16 == 0 && !(*log)->compact(false, {}).ok())) {
          ::_exit(2);
        }
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(3000 + random() % 40000));
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    const auto log = KvLog::open(FileSystem::real(), dir, options);
    REQUIRE(log.ok());
    const uint64_t n = (*log)->state().empty() ? 0 : std::stoull((*log)->state());
    CHECK(n >= before);
    before = n;
    if (n == 0) continue;
    const std::vector<uint64_t> words(1200, n);
    for (uint32_t b = 0; b < 4; ++b) {
      const auto block = read_block(**log, key_of(b));
      REQUIRE(block.ok());
      CHECK(std::memcmp(block->data(), words.data(), 9600) == 0);
    }
    if (!(*log)->notes().empty()) CHECK((*log)->notes() == std::vector<std::string>{std::to_string(n)});
  }
  CHECK(before > 30);
}

TEST_CASE("Blocks are found and read while others are appended", "[kv_log]") {
  const TempFolder folder(memory_folder());
  KvLogOptions options = small_options();
  options.durable = false;
  auto log = std::move(KvLog::create(FileSystem::real(), folder / "log", options)).value();
  std::atomic<bool> stop{false};
  std::atomic<int64_t> wrong{0}, reads{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<uint64_t>(t));
      while (!stop) {
        const auto block = static_cast<uint32_t>(random() % 200);
        const auto found = read_block(*log, key_of(block), t == 0);
        if (!found.ok()) {
          if (found.status().code() != Code::kNotFound) ++wrong;
          std::this_thread::yield();
          continue;
        }
        ++reads;
        if (found->find_first_not_of(static_cast<char>(block)) != std::string::npos) ++wrong;
      }
    });
  }
  for (uint32_t step = 0; step < 400 || reads < 100; ++step) {
    const std::string block(5000, static_cast<char>(step % 200));
    const LogEntry entry{key_of(step % 200), bytes_of(block)};
    REQUIRE(log->append({&entry, 1}).ok());
    if (step % 50 == 0) REQUIRE(log->commit("s").ok());
    (void)log->stats();
  }
  stop = true;
  for (std::thread& t : readers) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("Bulk appends write hardly more than the blocks, each at a whole page", "[kv_log]") {
  const TempFolder folder(memory_folder());
  for (const auto& [bytes, count, most] : {std::tuple{32768, 64, 1.05}, {32768, 1000, 1.015}, {65536, 1000, 1.01}}) {
    KvLogOptions options;
    options.durable = false;
    auto log = std::move(KvLog::create(FileSystem::real(), folder / "log", options)).value();
    const int64_t before = log->stats().bytes_written;
    const std::string block(static_cast<size_t>(bytes), 'x');
    std::vector<LogEntry> entries;
    for (int i = 0; i < count; ++i) entries.push_back({key_of(static_cast<uint32_t>(i)), bytes_of(block)});
    const auto places = log->append(entries);
    REQUIRE(places.ok());
    REQUIRE(log->commit("").ok());
    for (const BlockPlace& place : *places) CHECK(place.offset % 4096 == 0);
    const auto written = static_cast<double>(log->stats().bytes_written - before);
    CHECK(written <= most * bytes * count);
  }
}

TEST_CASE("The codec gives back every block and refuses what is not one", "[kv_log]") {
  std::mt19937_64 random(9);
  for (const int element : {2, 4}) {
    BlockCompressor compressor(element);
    for (const size_t bytes : {size_t{1}, size_t{4097}, size_t{8192}, size_t{32768}, size_t{65531}}) {
      const std::string block = random_block(random, bytes, true);
      const auto stored = compressor.compress(bytes_of(block));
      if (bytes < 30000 && stored.empty()) continue;
      REQUIRE_FALSE(stored.empty());
      CHECK(stored.size() + 4095 < bytes + 4095);
      std::string back(bytes, '\0');
      const auto dst = std::as_writable_bytes(std::span(back));
      REQUIRE(decompress_block(stored, dst).ok());
      CHECK(back == block);
      CHECK_FALSE(decompress_block(stored.first(stored.size() / 2), dst).ok());
      CHECK_FALSE(decompress_block(stored, dst.first(dst.size() - 1)).ok());
      CHECK_FALSE(decompress_block({}, dst).ok());
    }
    CHECK(compressor.compress(bytes_of(random_block(random, 32768))).empty());
  }
}

}  // namespace
}  // namespace firn::storage
