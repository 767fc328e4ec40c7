// The loader: same bytes as a plain read for every offset and size, and an error for every byte it cannot get.
#include "storage/loader.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>

#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr char kGuard = '\x5A';

// Destinations with guard bytes around them, at odd addresses.
class Target {
 public:
  Target(int64_t offset, int64_t bytes)
      : offset_(offset), bytes_(bytes), memory_(static_cast<size_t>(bytes) + 33, kGuard) {}
  void* dst() { return memory_.data() + 17; }
  LoadRange range(int32_t file) { return {file, offset_, bytes_, dst()}; }
  bool right() const {
    return memory_.substr(17, static_cast<size_t>(bytes_)) == test::pattern(offset_, bytes_) && guarded();
  }
  bool guarded() const {
    const std::string_view all = memory_;
    return all.substr(0, 17).find_first_not_of(kGuard) == std::string_view::npos &&
           all.substr(17 + static_cast<size_t>(bytes_)).find_first_not_of(kGuard) == std::string_view::npos;
  }

 private:
  int64_t offset_;
  int64_t bytes_;
  std::string memory_;
};

TEST_CASE("Every offset and size loads the file's own bytes", "[loader]") {
  for (const char* base : {"/tmp", "/var/tmp", "/dev/shm"}) {
    if (::access(base, W_OK) != 0) continue;
    const TempFolder folder(base);
    const std::string path = folder / "data";
    for (const int64_t offset : {0, 8, 511, 512, 4095, 4096, 4097}) {
      for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{4097}, 9 * kMiB + 5}) {
        for (const int64_t tail : {0, 1000}) {
          if (bytes > kMiB && tail != 0 && offset != 511) continue;  // the large ones are slow to make
          test::put_file(path, test::pattern(0, offset + bytes + tail));
          for (const bool direct : {true, false}) {
            Target target(offset, bytes);
            const auto stats = load(FileSystem::real(), {{path}, {target.range(0)}, 3, direct}, nullptr, nullptr);
            INFO(path << " offset " << offset << " bytes " << bytes << " tail " << tail << " direct " << direct);
            REQUIRE(stats.ok());
            CHECK(target.right());
            CHECK(stats->bytes == bytes);
            CHECK(stats->direct == stats->fallback.empty());
            if (!direct) CHECK_FALSE(stats->direct);
          }
        }
      }
    }
  }
}

TEST_CASE("Without O_DIRECT the loader says why and loads all the same", "[loader]") {
  const TempFolder folder;
  test::put_file(folder / "a", test::pattern(0, 100000));
  FaultyFileSystem refusing(FileSystem::real(), {{.kind = FaultKind::kDirectRefused}});
  Target target(123, 50000);
  const auto stats = load(refusing, {{folder / "a"}, {target.range(0)}, 2, true}, nullptr, nullptr);
  REQUIRE(stats.ok());
  CHECK(target.right());
  CHECK_FALSE(stats->direct);
  CHECK(contains(stats->fallback, folder / "a"));
  CHECK(contains(stats->fallback, "O_DIRECT"));
}

TEST_CASE("Many ranges of many files, in any order, reach their own destinations", "[loader]") {
  const TempFolder folder;
  LoadPlan plan;
  std::deque<Target> targets;
  int64_t total = 0;
  for (int32_t f = 0; f < 3; ++f) {
    plan.paths.push_back(folder / std::to_string(f));
    test::put_file(plan.paths.back(), test::pattern(0, 11 * kMiB));
    for (int64_t at = f * 7; at < 11 * kMiB;) {
      // Sizes from a byte to three pieces; neighbours, small gaps and large gaps.
      int64_t bytes = 1 + (at * 31 + f) % (at % 3 == 0 ? 200 : kMiB);
      bytes = std::min(bytes, 11 * kMiB - at);
      plan.ranges.push_back(targets.emplace_back(at, bytes).range(f));
      total += bytes;
      at += bytes + (at % 5 == 0 ? 0 : at % 5 == 1 ? 300 : 70000);
    }
  }
  plan.ranges.push_back(targets.emplace_back(5, 10 * kMiB).range(1));  // overlaps others; more than two pieces
  total += 10 * kMiB;
  REQUIRE(plan.ranges.size() > 60);
  std::reverse(plan.ranges.begin(), plan.ranges.end());
  std::swap(plan.ranges[3], plan.ranges[40]);
  for (const int n : {1, 2, 7}) {
    plan.n_readers = n;
    for (LoadRange& range : plan.ranges) std::memset(range.dst, 0, static_cast<size_t>(range.bytes));
    int64_t last = -1;
    const auto stats = load(
        FileSystem::real(), plan,
        [&](int64_t done, int64_t of) {
          CHECK(of == total);
          CHECK(done >= last);
          last = done;
        },
        nullptr);
    REQUIRE(stats.ok());
    CHECK(stats->bytes == total);
    CHECK(last == total);
    CHECK(std::all_of(targets.begin(), targets.end(), [](const Target& t) { return t.right(); }));
  }
}

TEST_CASE("Short reads are continued, whatever their length", "[loader][faults]") {
  const TempFolder folder;
  test::put_file(folder / "a", test::pattern(0, 6 * kMiB + 77));
  for (const int64_t limit : {4096, 12288, 100000, 1 << 20}) {
    for (const bool direct : {true, false}) {
      FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kShortRead, .bytes = limit}});
      Target target(99, 6 * kMiB + 77 - 99);
      const auto stats = load(faulty, {{folder / "a"}, {target.range(0)}, 2, direct}, nullptr, nullptr);
      REQUIRE(stats.ok());
      CHECK(faulty.hits() > 0);
      CHECK(target.right());
    }
  }
}

TEST_CASE("A read error or an early end stops the load and names the place", "[loader][faults]") {
  const TempFolder folder;
  test::put_file(folder / "good", test::pattern(0, 9 * kMiB));
  test::put_file(folder / "bad", test::pattern(0, 9 * kMiB));
  for (const bool direct : {true, false}) {
    Target a(8, 9 * kMiB - 8);
    Target b(8, 9 * kMiB - 8);
    const LoadPlan plan{{folder / "good", folder / "bad"}, {a.range(0), b.range(1)}, 3, direct};
    {
      FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kReadError, .path_part = "/bad", .first = 2}});
      const auto stats = load(faulty, plan, nullptr, nullptr);
      REQUIRE_FALSE(stats.ok());
      CHECK(stats.status().code() == Code::kIo);
      CHECK(contains(stats.status().message(), folder / "bad"));
    }
    {
      FaultyFileSystem faulty(FileSystem::real(),
                              {{.kind = FaultKind::kEarlyEnd, .path_part = "/bad", .bytes = 5 * kMiB + 3}});
      const auto stats = load(faulty, plan, nullptr, nullptr);
      REQUIRE_FALSE(stats.ok());
      CHECK(stats.status().code() == Code::kCorrupt);
      CHECK(contains(stats.status().message(), folder / "bad"));
      CHECK(contains(stats.status().message(), "unexpected end of file"));
      CHECK(contains(stats.status().message(), "found"));
    }
    {
      FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kOpenError, .path_part = "/bad"}});
      CHECK(load(faulty, plan, nullptr, nullptr).status().code() == Code::kIo);
    }
    CHECK(a.guarded());
    CHECK(b.guarded());
  }
}

TEST_CASE("A file that became shorter than the plan is corrupt", "[loader]") {
  const TempFolder folder;
  test::put_file(folder / "a", test::pattern(0, 5000));
  Target target(8, 4992);
  const LoadPlan plan{{folder / "a"}, {target.range(0)}, 2, true};
  REQUIRE(load(FileSystem::real(), plan, nullptr, nullptr).ok());
  std::filesystem::resize_file(folder / "a", 4999);
  const auto stats = load(FileSystem::real(), plan, nullptr, nullptr);
  CHECK(stats.status().code() == Code::kCorrupt);
  CHECK(contains(stats.status().message(), "expected at least 5000 bytes, found 4999"));
}

// Cuts the file after it was opened and measured: only the reads themselves can notice.
class TruncatingFileSystem : public FileSystem {
 public:
  explicit TruncatingFileSystem(int64_t bytes) : bytes_(bytes) {}
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) override {
    return std::unique_ptr<File>(std::make_unique<Cut>(FileSystem::real().open(path, mode).value(), bytes_));
  }

 private:
  class Cut : public File {
   public:
    Cut(std::unique_ptr<File> inner, int64_t bytes) : inner_(std::move(inner)), bytes_(bytes) {}
    const std::string& path() const override { return inner_->path(); }
    Result<int64_t> size() const override {
      const auto size = inner_->size();
      std::filesystem::resize_file(path(), static_cast<uintmax_t>(bytes_));
      return size;
    }
    Status read_at(int64_t o, std::span<std::byte> out) const override { return inner_->read_at(o, out); }
    Result<int64_t> read_some_at(int64_t o, std::span<std::byte> out) const override {
      return inner_->read_some_at(o, out);
    }
    int64_t direct_alignment() const override { return inner_->direct_alignment(); }
    Status write_at(int64_t o, std::span<const std::byte> in) override { return inner_->write_at(o, in); }
    Status sync() override { return inner_->sync(); }

   private:
    std::unique_ptr<File> inner_;
    int64_t bytes_;
  };
  int64_t bytes_;
};

TEST_CASE("A file cut while it is being loaded is an error, never other bytes", "[loader]") {
  const TempFolder folder;
  for (const int64_t left : {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{10000}, 5 * kMiB, 6 * kMiB - 1}) {
    for (const bool direct : {true, false}) {
      test::put_file(folder / "a", test::pattern(0, 6 * kMiB));
      TruncatingFileSystem cutting(left);
      Target target(0, 6 * kMiB);
      const auto stats = load(cutting, {{folder / "a"}, {target.range(0)}, 2, direct}, nullptr, nullptr);
      INFO("left " << left << " direct " << direct);
      REQUIRE_FALSE(stats.ok());
      CHECK(stats.status().code() == Code::kCorrupt);
      CHECK(contains(stats.status().message(), folder / "a"));
      CHECK(target.guarded());
    }
  }
}

TEST_CASE("A cancelled load stops within a piece", "[loader]") {
  const TempFolder folder;
  test::put_file(folder / "a", test::pattern(0, 24 * kMiB));
  // Every piece is slow enough for a progress report, and the first report cancels.
  FaultyFileSystem slow(FileSystem::real(), {{.kind = FaultKind::kSlowRead, .delay = std::chrono::milliseconds(210)}});
  std::atomic<bool> cancel{false};
  int64_t seen = 0;
  Target target(0, 24 * kMiB);
  const auto stats = load(
      slow, {{folder / "a"}, {target.range(0)}, 1, true},
      [&](int64_t done, int64_t) {
        seen = done;
        cancel = true;
      },
      &cancel);
  CHECK(stats.status().code() == Code::kCancelled);
  CHECK(seen == 4 * kMiB);
  CHECK(slow.hits() <= 2);

  cancel = true;
  CHECK(load(FileSystem::real(), {{folder / "a"}, {target.range(0)}, 2, true}, nullptr, &cancel).status().code() ==
        Code::kCancelled);
}

TEST_CASE("Impossible plans are refused", "[loader]") {
  const TempFolder folder;
  test::put_file(folder / "a", "abc");
  char byte = 0;
  const std::vector<LoadRange> bad = {{1, 0, 1, &byte},  {-1, 0, 1, &byte},        {0, -1, 1, &byte},
                                      {0, 0, -1, &byte}, {0, INT64_MAX, 1, &byte}, {0, 1, INT64_MAX, &byte},
                                      {0, 0, 1, nullptr}};
  for (const LoadRange& range : bad) {
    CHECK(load(FileSystem::real(), {{folder / "a"}, {range}, 1, true}, nullptr, nullptr).status().code() ==
          Code::kInvalid);
  }
  CHECK(load(FileSystem::real(), {{folder / "a"}, {}, 0, true}, nullptr, nullptr).status().code() == Code::kInvalid);
  CHECK(
      load(FileSystem::real(), {{folder / "absent"}, {{0, 0, 1, &byte}}, 1, true}, nullptr, nullptr).status().code() ==
      Code::kNotFound);
  CHECK(load(FileSystem::real(), {{folder / "absent"}, {}, 1, true}, nullptr, nullptr).ok());  // nothing to read
}

}  // namespace
}  // namespace firn::storage
