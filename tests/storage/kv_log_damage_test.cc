// The segment log where things go wrong: full disks, flipped bits, exchanged folders, compaction. Each case states what
// must hold.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>

#include "storage/faulty_file.h"
#include "storage/kv_log.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {
using test::TempFolder;

std::string body(int seed, size_t n = 8192) { return test::pattern(seed * 100003LL, static_cast<int64_t>(n)); }
LogEntry entry(uint32_t block, const std::string& s, uint16_t layer = 0) {
  return {{BlockKind::kKv, layer, 0, block}, std::as_bytes(std::span(s))};
}
Status put(KvLog& log, uint32_t block, const std::string& s) {
  const LogEntry e = entry(block, s);
  return log.append({&e, 1}).status();
}
std::string get(const KvLog& log, uint32_t block) {
  const BlockKey key{BlockKind::kKv, 0, 0, block};
  const auto place = log.find(key);
  if (!place) return "absent";
  std::string out(static_cast<size_t>(place->bytes), '\0');
  const Status s = log.read(key, *place, std::as_writable_bytes(std::span(out)));
  return s.ok() ? out : "error " + s.message();
}
KvLogOptions small(int64_t segment = 64 << 10) {
  KvLogOptions o;
  o.identity = "x";
  o.segment_bytes = segment;
  return o;
}
auto& real() { return FileSystem::real(); }

TEST_CASE("a: no space for a new segment, then tried again: nothing is lost", "[kv_log]") {
  for (int64_t hit = 1; hit < 12; ++hit) {
    const TempFolder folder;
    FaultyFileSystem fs(real(), {{FaultKind::kNoSpace, "00000002.seg", hit, 1}});
    auto log = KvLog::create(fs, folder / "l", small()).value();
    std::map<uint32_t, std::string> twin;
    int failed = 0;
    for (uint32_t b = 0; b < 12; ++b) {
      twin[b] = body(static_cast<int>(b));
      while (!put(*log, b, twin[b]).ok()) REQUIRE(++failed < 5);
    }
    Status s;
    do s = log->commit("s");
    while (!s.ok() && ++failed < 5);
    log.reset();
    auto again = KvLog::open(real(), folder / "l", small());
    INFO("fault at call " << hit << ": " << again.status().message());
    CHECK(again.ok());
    if (!again.ok()) continue;
    for (auto& [b, s2] : twin) CHECK((get(**again, b) == s2));
  }
}

TEST_CASE("b: one flipped bit in the last commit: an error or that commit, not an older one", "[kv_log]") {
  const TempFolder folder;
  {
    auto log = KvLog::create(real(), folder / "l", small(1 << 20)).value();
    REQUIRE(put(*log, 1, body(1)).ok());
    REQUIRE(log->commit("only").ok());
  }
  const std::string path = folder / "l/00000001.seg";
  std::string bytes = test::get_file(path);
  bytes[bytes.size() - 4096 + 100] ^= 1;
  test::put_file(path, bytes);
  const auto log = KvLog::open(real(), folder / "l", small(1 << 20));
  if (log.ok()) {
    CHECK((*log)->state() == "only");
    CHECK((get(**log, 1) == body(1)));
  } else {
    CHECK(test::get_file(path).size() == bytes.size());
  }
}

TEST_CASE("c: a dropped key stays dropped after compact", "[kv_log]") {
  for (const bool all : {false, true}) {
    const TempFolder folder;
    {
      auto log = KvLog::create(real(), folder / "l", small(1 << 20)).value();
      for (uint32_t b = 0; b < 8; ++b)
        REQUIRE(put(*log, b, body(static_cast<int>(b), 120 << 10)).ok());  // segment 1, mostly live
      REQUIRE(log->commit("1").ok());
      for (uint32_t b = 100; b < 104; ++b) REQUIRE(put(*log, b, body(static_cast<int>(b), 120 << 10)).ok());
      REQUIRE(log->drop([](const BlockKey& k) { return k.block == 2 || k.block >= 100; }).ok());
      REQUIRE(log->commit("2").ok());
      REQUIRE(log->compact(all, {}).ok());
      CHECK((get(*log, 2) == "absent"));
    }
    auto log = KvLog::open(real(), folder / "l", small(1 << 20)).value();
    INFO("all " << all);
    CHECK((get(*log, 2) == "absent"));
    CHECK((get(*log, 3) == body(3, 120 << 10)));
  }
}

TEST_CASE("d: compact keeps the notes journalled since the last commit", "[kv_log]") {
  const TempFolder folder;
  {
    auto log = KvLog::create(real(), folder / "l", small()).value();
    for (uint32_t b = 0; b < 20; ++b) REQUIRE(put(*log, b % 3, body(static_cast<int>(b))).ok());
    REQUIRE(log->commit("1").ok());
    REQUIRE(log->journal("note").ok());
    REQUIRE(log->compact(true, {}).ok());
  }
  auto log = KvLog::open(real(), folder / "l", small()).value();
  CHECK(log->notes() == std::vector<std::string>{"note"});
}

TEST_CASE("e: at the disk limit what was appended can still be committed, and compacted", "[kv_log]") {
  const TempFolder folder;
  KvLogOptions o = small();
  o.disk_limit_bytes = 256 << 10;
  auto log = KvLog::create(real(), folder / "l", o).value();
  Status s;
  for (uint32_t b = 0; s.ok(); ++b) s = put(*log, b % 4, body(static_cast<int>(b), 4096));
  INFO(s.message());
  CHECK(log->commit("full").ok());
  CHECK(log->compact(true, {}).ok());
  CHECK(put(*log, 1, body(77)).ok());
}

TEST_CASE("f: another log's folder in the place of a drive loses nothing", "[kv_log]") {
  const TempFolder folder;
  KvLogOptions a = small(), b = small();
  a.more_dirs = {folder / "a2"};
  b.more_dirs = {folder / "b2"};
  for (auto* o : {&a, &b}) {
    auto log = KvLog::create(real(), o == &a ? folder / "a" : folder / "b", *o).value();
    const uint32_t n = o == &a ? 4 : 60;
    for (uint32_t i = 0; i < n; ++i) REQUIRE(put(*log, i, body(static_cast<int>(i))).ok());
    REQUIRE(log->commit("s").ok());
    if (o == &a) REQUIRE(log->compact(true, {}).ok());
  }
  std::filesystem::rename(folder / "a2", folder / "a2-kept");
  std::filesystem::rename(folder / "b2", folder / "a2");
  const auto count = [&] {
    return std::distance(std::filesystem::directory_iterator(folder / "a2"), std::filesystem::directory_iterator());
  };
  const auto before = count();
  const auto log = KvLog::open(real(), folder / "a", small());
  CHECK_FALSE(log.ok());
  CHECK(count() == before);
}

TEST_CASE("g: a compressed block opened with another element size is right or an error", "[kv_log]") {
  const TempFolder folder;
  std::string block(65536, '\0');
  std::mt19937 r(1);
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<char>(i % 4 < 2 ? r() % 256 : r() % 3);
  KvLogOptions o = small(1 << 20);
  o.compress = true;
  o.element_bytes = 4;
  {
    auto log = KvLog::create(real(), folder / "l", o).value();
    REQUIRE(put(*log, 1, block).ok());
    REQUIRE(log->commit("s").ok());
  }
  auto log = KvLog::open(real(), folder / "l", {}).value();
  const std::string found = get(*log, 1);
  const bool right = found == block || found.rfind("error", 0) == 0;
  CHECK(right);
}

TEST_CASE("h: the newest segment's header damaged: no silent return to an older commit", "[kv_log]") {
  const TempFolder folder;
  {
    auto log = KvLog::create(real(), folder / "l", small()).value();
    for (uint32_t b = 0; b < 20; ++b) {
      REQUIRE(put(*log, b, body(static_cast<int>(b))).ok());
      REQUIRE(log->commit(std::to_string(b)).ok());
    }
  }
  std::string newest;
  for (const auto& f : std::filesystem::directory_iterator(folder / "l")) {
    if (f.path().extension() == ".seg") newest = std::max(newest, f.path().string());
  }
  std::string bytes = test::get_file(newest);
  bytes[70] ^= 4;
  test::put_file(newest, bytes);
  const auto log = KvLog::open(real(), folder / "l", small());
  if (log.ok()) CHECK((*log)->state() == "19");
  CHECK(std::filesystem::exists(newest));
}

TEST_CASE("i: compact gives the space back while the log is open; dead bytes are told", "[kv_log]") {
  const TempFolder folder;
  auto log = KvLog::create(real(), folder / "l", small()).value();
  for (uint32_t b = 0; b < 60; ++b) REQUIRE(put(*log, b % 2, body(static_cast<int>(b))).ok());
  REQUIRE(log->commit("1").ok());
  REQUIRE(log->compact(true, {}).ok());
  int deleted = 0;
  for (const auto& f : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string to = std::filesystem::read_symlink(f.path(), ignored).string();
    deleted += to.find(folder.path()) == 0 && to.find("(deleted)") != std::string::npos;
  }
  CHECK(deleted == 0);
}

TEST_CASE("measure", "[.measure]") {
  using Clock = std::chrono::steady_clock;
  const auto secs = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  for (const size_t size : {size_t{8} << 10, size_t{32} << 10, size_t{64} << 10}) {
    for (const bool compress : {false, true}) {
      const TempFolder folder;
      KvLogOptions o = small(1 << 30);
      o.compress = compress;
      auto log = KvLog::create(real(), folder / "l", o).value();
      std::vector<uint16_t> data(size / 2 * 64);
      std::mt19937 r(1);
      std::normal_distribution<float> normal;
      for (auto& x : data) {
        const float f = normal(r);
        uint32_t u;
        std::memcpy(&u, &f, 4);
        x = static_cast<uint16_t>(u >> 16);
      }
      const int64_t batches = static_cast<int64_t>((compress ? int64_t{256} << 20 : int64_t{2} << 30) / (size * 64));
      const auto t = Clock::now();
      for (int64_t b = 0; b < batches; ++b) {
        std::vector<LogEntry> e;
        for (uint32_t i = 0; i < 64; ++i) {
          e.push_back({{BlockKind::kKv, 0, 0, static_cast<uint32_t>(b) * 64 + i},
                       std::as_bytes(std::span(data)).subspan(i * size, size)});
        }
        REQUIRE(log->append(e).ok());
      }
      REQUIRE(log->commit("s").ok());
      const double s = secs(t);
      const auto st = log->stats();
      std::vector<std::byte> out(size);
      const auto t2 = Clock::now();
      int n = 0;
      log->for_each([&](const BlockKey& k, const BlockPlace& p) {
        if (n < 2000) n += log->read(k, p, out).ok();
      });
      std::printf("block %zu compress %d: append %.2f GB/s, written/appended %.4f, buffered reads %.2f GB/s\n", size,
                  compress, st.bytes_appended / s / 1e9, double(st.bytes_written) / double(st.bytes_appended),
                  double(n) * double(size) / secs(t2) / 1e9);
    }
  }
  const TempFolder folder;
  std::string tiny = body(1, 4096);
  {
    auto log = KvLog::create(real(), folder / "l", small(1 << 30)).value();
    for (int layer = 0; layer < 50; ++layer) {
      std::vector<LogEntry> e;
      for (uint32_t b = 0; b < 10000; ++b) e.push_back(entry(b, tiny, static_cast<uint16_t>(layer)));
      REQUIRE(log->append(e).ok());
    }
    REQUIRE(log->commit("s").ok());
  }
  const auto t = Clock::now();
  auto log = KvLog::open(real(), folder / "l", {}).value();
  std::printf("open of %ld entries: %.3f s, %ld bytes read\n", log->stats().entries, secs(t),
              log->stats().metadata_bytes_read);
}
}  // namespace
}  // namespace firn::storage
