// The thread team: every piece exactly once, every member called, places given and taken back.
#include "runtime/thread_team.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "runtime/topology.h"
#include "tests/support/catch.h"

namespace firn {
namespace {

std::unique_ptr<ThreadTeam> make(int n, std::vector<int> cpus = {}) {
  Result<std::unique_ptr<ThreadTeam>> team = ThreadTeam::create(n, std::move(cpus));
  REQUIRE(team.ok());
  return std::move(team).value();
}

int cpus_of_this_thread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : -1;
}

TEST_CASE("parallel loops cover every index once, cut by size and grain alone") {
  for (int threads : {1, 2, 64}) {
    const auto team = make(threads);
    for (int64_t n : {0, 1, 7, 1000}) {
      for (int64_t grain : {1, 3, 64}) {
        CAPTURE(threads, n, grain);
        for (bool stretches : {false, true}) {
          std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
          std::atomic<int> bad{0};
          const auto body = [&](int64_t begin, int64_t end, int thread) {
            const bool cut = begin % grain == 0 && end > begin && (end - begin == grain || end == n);
            if (!cut || end > n || thread < 0 || thread >= threads) ++bad;
            for (int64_t i = begin; i < end && i < n; ++i) ++hits[static_cast<size_t>(i)];
          };
          if (stretches) {
            team->parallel_stretches(n, grain, body);
          } else {
            team->parallel_for(n, grain, body);
          }
          int wrong = 0;
          for (const std::atomic<int>& h : hits) wrong += h.load() != 1;
          CHECK(wrong == 0);
          CHECK(bad.load() == 0);
        }
      }
    }
  }
}

TEST_CASE("run calls every member once; what one region wrote the next one reads") {
  for (int threads : {1, 2, 5, 64}) {
    const auto team = make(threads);
    std::vector<int64_t> values(static_cast<size_t>(threads), 0);  // plain: the regions' edges must order it
    int64_t total = 0;
    for (int round = 0; round < 20; ++round) {
      team->run([&](int thread, int n) {
        if (n == threads) values[static_cast<size_t>((thread + round) % n)] += 1;
      });
      for (int64_t v : values) total += v;  // read by the caller between regions
    }
    CAPTURE(threads);
    for (int64_t v : values) CHECK(v == 20);
    CHECK(total == int64_t{threads} * 20 * 21 / 2);
  }
}

TEST_CASE("64 threads on few cores finish many short regions soon") {
  const auto team = make(64);
  std::atomic<int64_t> calls{0};
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i) team->run([&](int, int) { calls.fetch_add(1, std::memory_order_relaxed); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(calls.load() == 200 * 64);
  CHECK(seconds < 30.0);
}

TEST_CASE("members stand on the CPUs they were given, and go back") {
  Result<Topology> topology = Topology::detect();
  REQUIRE(topology.ok());
  const int before = cpus_of_this_thread();
  const std::vector<int> cpus = topology->core_cpus;
  const int n = static_cast<int>(cpus.size());
  {
    const auto team = make(n, cpus);
    REQUIRE(team->pinned());
    for (int round = 0; round < 3; ++round) {
      std::vector<int> at(static_cast<size_t>(n), -1);
      team->run([&](int thread, int) { at[static_cast<size_t>(thread)] = sched_getcpu(); });
      CHECK(at == cpus);
    }
    int inherited = 0, freed = 0;
    std::thread io([&] {
      inherited = cpus_of_this_thread();
      unpin_this_thread();
      freed = cpus_of_this_thread();
    });
    io.join();
    if (n > 1) CHECK(inherited == 1);
    CHECK(freed == before);

    // A second team without places must not inherit the first one's.
    const auto loose = make(n);
    CHECK_FALSE(loose->pinned());
    std::vector<int> allowed(static_cast<size_t>(n), 0);
    loose->run([&](int thread, int) { allowed[static_cast<size_t>(thread)] = cpus_of_this_thread(); });
    for (int a : allowed) CHECK(a == before);
    team->run([&](int thread, int) { allowed[static_cast<size_t>(thread)] = sched_getcpu(); });
    CHECK(allowed == cpus);
  }
  CHECK(cpus_of_this_thread() == before);
}

TEST_CASE("too few places, or places that are not ours, mean no pinning; impossible sizes are refused") {
  CHECK_FALSE(make(3, {0, 1})->pinned());
  CHECK_FALSE(make(1, {8000})->pinned());
  CHECK_FALSE(make(1, {-1})->pinned());
  CHECK(make(4)->size() == 4);
  for (int n : {0, -1, 1 << 20}) {
    const auto refused = ThreadTeam::create(n, {});
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.status().code() == Code::kInvalid);
    CHECK(refused.status().message().find("--threads") == 0);
  }
}

}  // namespace
}  // namespace firn
