// Budgets and arenas: a charge is given back exactly once, whatever is moved where.
#include "runtime/budget.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/arena.h"
#include "tests/support/catch.h"

namespace firn {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

Reservation take(Budget* budget, int64_t bytes) {
  Result<Reservation> r = budget->reserve(bytes, "a test");
  REQUIRE(r.ok());
  return std::move(r).value();
}

TEST_CASE("a reservation gives its bytes back once, through every kind of move") {
  Budget budget("--ram", 1000);
  {
    Reservation a = take(&budget, 300);
    CHECK(budget.used_bytes() == 300);
    Reservation b = std::move(a);
    CHECK(budget.used_bytes() == 300);
    CHECK(b.bytes() == 300);
    Reservation c = take(&budget, 200);
    c = std::move(b);  // the 200 go back, the 300 stay
    CHECK(budget.used_bytes() == 300);
    Reservation& alias = c;
    c = std::move(alias);  // onto itself
    CHECK(budget.used_bytes() == 300);
    CHECK(c.bytes() == 300);
    std::vector<Reservation> many;
    for (int i = 0; i < 7; ++i) many.push_back(take(&budget, 100));  // moves while it grows
    CHECK(budget.used_bytes() == 1000);
    CHECK(budget.left_bytes() == 0);
    many.erase(many.begin() + 2);
    CHECK(budget.used_bytes() == 900);
    c.release();
    c.release();
    CHECK(budget.used_bytes() == 600);
  }
  CHECK(budget.used_bytes() == 0);
  CHECK(budget.peak_bytes() == 1000);
  CHECK(budget.left_bytes() == 1000);
}

TEST_CASE("a child charges its parent, and the parent's limit holds") {
  Budget ram("--ram", 1000), kv("--kv-ram", 800, &ram), experts("--expert-ram", -1, &ram);
  Reservation a = take(&kv, 500);
  CHECK(ram.used_bytes() == 500);
  CHECK(experts.left_bytes() == 500);
  CHECK(kv.left_bytes() == 300);
  Reservation b = take(&experts, 400);
  CHECK(kv.left_bytes() == 100);

  const Result<Reservation> refused = kv.reserve(200, "KV blocks");
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == Code::kNoMemory);
  const std::string& message = refused.status().message();
  CAPTURE(message);
  CHECK(message.find("--ram") != std::string::npos);  // the level that is short, not the one asked
  CHECK(message.find("KV blocks") != std::string::npos);
  CHECK(message.find("(200 bytes)") != std::string::npos);   // asked
  CHECK(message.find("(100 bytes)") != std::string::npos);   // left
  CHECK(message.find("(1000 bytes)") != std::string::npos);  // limit
  CHECK(kv.used_bytes() == 500);                             // nothing of the refused charge stays
  CHECK(kv.peak_bytes() == 500);
  CHECK(ram.used_bytes() == 900);

  const Result<Reservation> own = kv.reserve(301, "KV blocks");
  REQUIRE_FALSE(own.ok());
  CHECK(own.status().message().find("--kv-ram") == 0);
  a.release();
  b.release();
  CHECK(ram.used_bytes() == 0);
}

TEST_CASE("no limit, a limit of nothing, and sums beyond 63 bits") {
  Budget unlimited("none", -1);
  CHECK(unlimited.left_bytes() == std::numeric_limits<int64_t>::max());
  Reservation a = take(&unlimited, std::numeric_limits<int64_t>::max() - 1);
  CHECK_FALSE(unlimited.reserve(2, "a sum that wraps").ok());
  Budget nothing("--kv-ram", 0);
  CHECK(nothing.reserve(0, "nothing").ok());
  CHECK_FALSE(nothing.reserve(1, "a byte").ok());
}

TEST_CASE("threads never take more than the limit and leave nothing behind") {
  constexpr int64_t kLimit = 1000;
  Budget parent("--ram", kLimit), left("left", 700, &parent), right("right", 700, &parent);
  std::atomic<int64_t> granted{0}, over{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Budget& budget = t % 2 == 0 ? left : right;
      for (int i = 0; i < 4000; ++i) {
        Result<Reservation> r = budget.reserve(1 + (i * 37 + t * 101) % 300, "a thread");
        if (!r.ok()) continue;
        granted.fetch_add(1);
        if (parent.used_bytes() > kLimit) over.fetch_add(1);
        Reservation moved = std::move(r).value();
        if (i % 3 == 0) moved.release();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  CHECK(granted.load() > 0);
  CHECK(over.load() == 0);
  CHECK(parent.used_bytes() == 0);
  CHECK(left.used_bytes() == 0);
  CHECK(right.used_bytes() == 0);
  CHECK(parent.peak_bytes() <= kLimit);
}

TEST_CASE("buffers charge the budget, move, and give memory and charge back once") {
  Budget budget("--ram", 64 * kMiB);
  HostArena arena(&budget);
  {
    Result<Buffer> small = arena.allocate(100, "a small buffer"),
                   large = arena.allocate(3 * kMiB + 5, "a large buffer");
    REQUIRE(small.ok());
    REQUIRE(large.ok());
    CHECK(budget.used_bytes() == 100 + 3 * kMiB + 5);
    CHECK(reinterpret_cast<uintptr_t>(small->data()) % 64 == 0);
    CHECK(reinterpret_cast<uintptr_t>(large->data()) % 4096 == 0);
    std::memset(small->data(), 1, 100);
    std::memset(large->data(), 2, 3 * kMiB + 5);
    Buffer moved = std::move(large).value();
    CHECK(budget.used_bytes() == 100 + 3 * kMiB + 5);
    CHECK(moved.as<uint8_t>()[3 * kMiB + 4] == 2);
    moved = std::move(small).value();  // the large one dies here
    CHECK(budget.used_bytes() == 100);
    CHECK(moved.bytes() == 100);
    CHECK(moved.as<uint8_t>()[99] == 1);
    Buffer& alias = moved;
    moved = std::move(alias);
    CHECK(moved.bytes() == 100);
    Buffer empty = std::move(moved);
    CHECK(moved.empty());  // NOLINT: a moved-from Buffer is empty by contract
    CHECK(budget.used_bytes() == 100);
  }
  CHECK(budget.used_bytes() == 0);
}

TEST_CASE("sizes around the change from small to large are all usable") {
  Budget budget("--ram", -1);
  HostArena arena(&budget, 0);  // bound to node 0 where the kernel lets us
  for (int64_t bytes : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{4097}, kMiB - 1, kMiB, kMiB + 1, 2 * kMiB - 1,
                        2 * kMiB, 2 * kMiB + 4097}) {
    Result<Buffer> buffer = arena.allocate(bytes, "a sweep of sizes");
    REQUIRE(buffer.ok());
    CAPTURE(bytes);
    CHECK(reinterpret_cast<uintptr_t>(buffer->data()) % (bytes >= kMiB ? 4096 : 64) == 0);
    buffer->as<uint8_t>()[0] = 1;
    buffer->as<uint8_t>()[bytes - 1] = 2;
    CHECK(buffer->as<uint8_t>()[bytes - 1] == 2);
  }
  CHECK(budget.used_bytes() == 0);
  const Result<Buffer> none = arena.allocate(0, "nothing");
  REQUIRE(none.ok());
  CHECK(none.value().empty());
}

TEST_CASE("what the budget or the machine refuses is an error and no charge stays") {
  Budget small("--ram", 1000), unlimited("--ram", -1);
  HostArena arena(&small), huge(&unlimited);
  const Result<Buffer> over = arena.allocate(1001, "a buffer");
  REQUIRE_FALSE(over.ok());
  CHECK(over.status().code() == Code::kNoMemory);
  const Result<Buffer> impossible = huge.allocate(int64_t{1} << 55, "more than the address space");
  REQUIRE_FALSE(impossible.ok());
  CHECK(impossible.status().code() == Code::kNoMemory);
  CHECK(impossible.status().message().find("the machine refused 32PiB") != std::string::npos);
  CHECK_FALSE(huge.allocate(std::numeric_limits<int64_t>::max(), "everything").ok());
  CHECK(small.used_bytes() == 0);
  CHECK(unlimited.used_bytes() == 0);
}

}  // namespace
}  // namespace firn
