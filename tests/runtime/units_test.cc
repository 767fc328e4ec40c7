// Sizes, durations, counts; progress lines with a clock of the test's own; metrics.
#include "runtime/units.h"

#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "runtime/metrics.h"
#include "runtime/progress.h"
#include "tests/support/catch.h"

namespace firn {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

TEST_CASE("sizes are read exactly") {
  const auto size = [](const char* text) {
    const Result<int64_t> r = parse_size(text);
    INFO(text);
    REQUIRE(r.ok());
    return r.value();
  };
  CHECK(size("4096") == 4096);
  CHECK(size("0") == 0);
  CHECK(size("512MiB") == int64_t{512} << 20);
  CHECK(size("1.5GiB") == int64_t{3} << 29);
  CHECK(size("2GB") == 2'000'000'000);
  CHECK(size("2.5kB") == 2500);
  CHECK(size("100B") == 100);
  CHECK(size(" 3 gib ") == int64_t{3} << 30);
  CHECK(size("0.1TiB") == 109951162777);  // rounded down to a byte, not through a float
  CHECK(size("7.999999999999999999EiB") == std::numeric_limits<int64_t>::max() - 1);
  CHECK(size("9223372036854775807") == std::numeric_limits<int64_t>::max());
}

TEST_CASE("what is no size is refused with the text and the accepted form") {
  for (const char* bad :
       {"", " ", "GiB", "1.5", "-1", "1.GiB", ".5GiB", "1e9", "1,5GiB", "5XB", "5M", "1GiBx", "1 2", "8EiB",
        "9223372036854775808", "99999999999999999999999999999999999999999999GiB", "0x10", "NaN", "inf"}) {
    CAPTURE(bad);
    const Result<int64_t> r = parse_size(bad);
    REQUIRE_FALSE(r.ok());
    CHECK(r.status().code() == Code::kInvalid);
    CHECK(r.status().message().find("'" + std::string(bad) + "'") == 0);
    CHECK(r.status().message().find("512MiB") != std::string::npos);
  }
}

TEST_CASE("sizes print in the form they are read") {
  CHECK(format_size(0) == "0B");
  CHECK(format_size(1023) == "1023B");
  CHECK(format_size(1024) == "1KiB");
  CHECK(format_size(int64_t{512} << 20) == "512MiB");
  CHECK(format_size(int64_t{3} << 29) == "1.5GiB");
  CHECK(format_size((int64_t{1} << 30) - 1) == "1GiB");  // not 1024MiB
  CHECK(format_size(1'000'000'000) == "953.67MiB");
  CHECK(format_size(int64_t{100} << 40) == "100TiB");
  CHECK(format_size(-(int64_t{1} << 30)) == "-1GiB");
  CHECK(format_size(std::numeric_limits<int64_t>::max()) == "8EiB");
  CHECK(format_size(std::numeric_limits<int64_t>::min()) == "-8EiB");
  for (int64_t bytes : {int64_t{1}, int64_t{1023}, int64_t{4096}, int64_t{15} << 20, int64_t{7} << 41}) {
    CHECK(parse_size(format_size(bytes)).value() == bytes);
  }
}

TEST_CASE("durations go both ways") {
  const auto ns = [](const char* text) {
    const Result<int64_t> r = parse_duration(text);
    INFO(text);
    REQUIRE(r.ok());
    return r.value();
  };
  CHECK(ns("350ms") == 350'000'000);
  CHECK(ns("2.4s") == 2'400'000'000);
  CHECK(ns("1m05s") == 65 * kSecond);
  CHECK(ns("1h30m") == 5400 * kSecond);
  CHECK(ns("15us") == 15'000);
  CHECK(ns("0s") == 0);
  for (const char* bad : {"", "5", "s", "5x", "1s1m", "1m1m", "-1s", "1m5", "300000000h", "1.s"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_duration(bad).ok());
  }
  CHECK(format_duration(350'000'000) == "350ms");
  CHECK(format_duration(2'400'000'000) == "2.4s");
  CHECK(format_duration(3 * kSecond) == "3s");
  CHECK(format_duration(65 * kSecond) == "1m05s");
  CHECK(format_duration(59'960'000'000) == "1m00s");  // not 60s
  CHECK(format_duration(999'600'000) == "1s");        // not 1000ms
  CHECK(format_duration(7384 * kSecond) == "2h03m");
  CHECK(format_duration(850'000) == "850us");
  CHECK(format_duration(12) == "12ns");
  CHECK(format_duration(-65 * kSecond) == "-1m05s");
  CHECK(format_count(1'048'576) == "1,048,576");
  CHECK(format_count(999) == "999");
  CHECK(format_count(-1000) == "-1,000");
  CHECK(format_count(std::numeric_limits<int64_t>::min()) == "-9,223,372,036,854,775,808");
}

struct FakeScreen {
  int64_t now = 0;
  std::vector<std::string> out;
  ProgressSink sink(bool terminal) {
    ProgressSink s;
    s.write = [this](const std::string& text) { out.push_back(text); };
    s.now_ns = [this] { return now; };
    s.terminal = terminal ? 1 : 0;
    s.columns = 80;
    return s;
  }
};

TEST_CASE("short work and quiet work show nothing") {
  FakeScreen screen;
  {
    Progress p("reading", 100, "tokens", false, screen.sink(false));
    screen.now = kSecond - 1;
    p.update(100);
  }
  {
    Progress p("reading", 100, "tokens", true, screen.sink(true));
    screen.now = 100 * kSecond;
    p.update(50);
  }
  CHECK(screen.out.empty());
}

TEST_CASE("a log gets a plain line every few seconds and one at the end") {
  FakeScreen screen;
  {
    Progress p("reading experts", int64_t{100} << 20, "B", false, screen.sink(false));
    for (int i = 1; i <= 100; ++i) {
      screen.now += kSecond / 5;
      p.update(int64_t{i} << 20);
    }
  }
  // 20 s: at 1, 6, 11, 16, and the end.
  REQUIRE(screen.out.size() == 5);
  CHECK(screen.out[0] == "reading experts:   5%  5MiB of 100MiB, 5MiB/s, 19s left\n");
  CHECK(screen.out[3] == "reading experts:  80%  80MiB of 100MiB, 5MiB/s, 4s left\n");
  CHECK(screen.out[4] == "reading experts: 100MiB in 20s (5MiB/s)\n");
  for (const std::string& line : screen.out) CHECK(line.find('\x1b') == std::string::npos);
}

TEST_CASE("a terminal gets a bar that stays on its line") {
  FakeScreen screen;
  Progress p("prefill", 1000, "tokens", false, screen.sink(true));
  screen.now = 2 * kSecond;
  p.add(500);
  REQUIRE(screen.out.size() == 1);
  const std::string bar = screen.out[0];
  CAPTURE(bar);
  CHECK(bar.find("\r\x1b[Kprefill:  50%") == 0);
  CHECK(bar.find("250 tokens/s, 2s left") != std::string::npos);
  CHECK(bar.find("##") != std::string::npos);
  CHECK(bar.find('\n') == std::string::npos);
  CHECK(bar.size() < 80 + 4);
  p.add(1);  // not due yet
  CHECK(screen.out.size() == 1);
  p.update(400);  // never backwards
  screen.now = 4 * kSecond;
  p.add(0);
  CHECK(screen.out.back().find("501 tokens of") != std::string::npos);
  p.finish();
  p.finish();
  CHECK(screen.out.size() == 3);
  CHECK(screen.out.back() == "\r\x1b[Kprefill: 501 tokens in 4s (125 tokens/s)\n");
}

TEST_CASE("no total, nothing done and a label longer than the screen are all printable") {
  FakeScreen screen;
  Progress open("scanning", 0, "files", false, screen.sink(false));
  Progress idle("waiting", 10, "", false, screen.sink(false));
  Progress wide(std::string(200, 'x'), 10, "", false, screen.sink(true));
  screen.now = 2 * kSecond;
  open.update(8);
  idle.update(0);
  wide.update(3);
  REQUIRE(screen.out.size() == 3);
  CHECK(screen.out[0] == "scanning: 8 files, 4 files/s\n");
  CHECK(screen.out[1] == "waiting:   0%  0 of 10, 0/s\n");
  CHECK(screen.out[2].size() == 4 + 79);
}

TEST_CASE("progress from many threads loses nothing") {
  FakeScreen screen;
  ProgressSink sink = screen.sink(false);
  std::atomic<int64_t> clock{0};
  sink.now_ns = [&] { return clock.fetch_add(kSecond / 100); };
  Progress p("work", 8000, "", false, sink);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) p.add(1);
    });
  }
  for (std::thread& t : threads) t.join();
  p.finish();
  REQUIRE(screen.out.size() > 2);
  CHECK(screen.out.back().find("work: 8,000 in ") == 0);
}

TEST_CASE("metrics keep their address, add up over threads and come out by name") {
  Metrics metrics;
  Metric& hits = metrics.value("cache_hits");
  for (int i = 0; i < 100; ++i) metrics.value("other_" + std::to_string(i)).set(i);
  CHECK(&metrics.value("cache_hits") == &hits);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) hits.add();
    });
  }
  for (std::thread& t : threads) t.join();
  const auto all = metrics.snapshot();
  REQUIRE(all.size() == 101);
  CHECK(all[0].first == "cache_hits");
  CHECK(all[0].second == 4000);
  CHECK(all[1].first == "other_0");
  CHECK(all[2].first == "other_1");
  CHECK(all[2].second == 1);
}

}  // namespace
}  // namespace firn
