// The separate memory space itself: what it refuses, and that work really is late.
#include "support/shadow_ops.h"

#include <sys/wait.h>
#include <unistd.h>

#include "cpu/device.h"
#include "cpu/reference.h"
#include "support/catch.h"

namespace firn::test {
namespace {

struct Fixture {
  Budget budget{"test", -1};
  HostArena arena{&budget};
  std::unique_ptr<Ops> inner = cpu::make_reference_ops(&arena);
};

// Runs `body` in a child process; true when a signal ended it.
template <typename F>
bool dies(F&& body) {
  const pid_t pid = fork();
  FIRN_CHECK(pid >= 0, "fork failed");
  if (pid == 0) {
    (void)!freopen("/dev/null", "w", stderr);
    for (const int signal_number : {SIGSEGV, SIGBUS, SIGABRT}) signal(signal_number, SIG_DFL);
    body();
    _exit(0);
  }
  int status = 0;
  FIRN_CHECK(waitpid(pid, &status, 0) == pid, "waitpid failed");
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_CASE("shadow memory cannot be touched by the host") {
  Fixture f;
  ShadowOps ops(f.inner.get(), &f.budget);
  const Buffer buffer = must_have(ops.arena().allocate(100, "test"));
  CHECK_FALSE(dies([] {}));
  CHECK(dies([&] { static_cast<volatile char*>(buffer.data())[0] = 1; }));
  CHECK(dies([&] { std::vector<char> v(buffer.as<char>(), buffer.as<char>() + 10); }));
  must_ok(ops.wait(ops.zero(buffer.data(), 100)));
  CHECK(dies([&] { static_cast<volatile char*>(buffer.data())[0] = 1; }));
}

TEST_CASE("shadow operations refuse views that are not theirs") {
  Fixture f;
  ShadowOps ops(f.inner.get(), &f.budget), other(f.inner.get(), &f.budget);
  Device device(&ops), stranger(&other);
  const DeviceMatrix h = device.matrix(DType::kF32, 2, 8), y = device.matrix(DType::kF32, 2, 8);
  const DeviceMatrix foreign = stranger.matrix(DType::kF32, 2, 8);
  CHECK_FALSE(dies([&] { ops.add({h.view, y.view}); }));
  MatrixView says_host = y.view;
  says_host.space = Space::kHost;
  CHECK(dies([&] { ops.add({h.view, says_host}); }));
  MatrixView too_long = y.view;
  too_long.rows = 3;
  CHECK(dies([&] { ops.add({h.view, too_long}); }));
  CHECK(dies([&] { ops.add({h.view, foreign.view}); }));
  CHECK(dies([&] { must_ok(ops.wait(ops.upload(h.view.data, y.view.data, 64))); }));
  CHECK(dies([&] {  // freed while an operation is still queued
    DeviceMatrix gone = device.matrix(DType::kF32, 2, 8);
    Ticket ticket;
    do {
      ticket = ops.add({h.view, gone.view});
    } while (ops.pending() == 0);
    gone.buffer = Buffer();
    must_ok(ops.wait(ticket));
  }));
}

TEST_CASE("shadow work is late, in order, and copies its host arrays") {
  Fixture f;
  int64_t late = 0, early = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    ShadowOps ops(f.inner.get(), &f.budget, nullptr, seed);
    Device device(&ops);
    const TestMatrix table = TestMatrix::random(DType::kF32, 5, 8, seed);
    const DeviceMatrix weight = device.put(table.view().data, DType::kF32, 5, 8);
    const DeviceMatrix out = device.matrix(DType::kF32, 3, 8);
    std::vector<int32_t> ids{4, 0, 2};
    std::vector<float> got(24, 1.0f);
    ops.embed({ids, {WeightFormat::kF32, 5, 8, weight.view.data, nullptr, 1.0f, Space::kDevice}, out.view});
    ids.assign(3, 999);
    const Ticket ticket = ops.download(got.data(), out.view.data, 24 * 4);
    // Nothing has a result before it is waited for, except by luck.
    (ops.pending() > 0 ? late : early) += 1;
    if (ops.pending() > 0) CHECK(got[0] != static_cast<float>(table.at(4, 0)));
    must_ok(ops.wait(ticket));
    CHECK(ops.pending() == 0);
    for (int64_t c = 0; c < 8; ++c) {
      CHECK(static_cast<double>(got[static_cast<size_t>(c)]) == table.at(4, c));
      CHECK(static_cast<double>(got[static_cast<size_t>(16 + c)]) == table.at(2, c));
    }
  }
  CHECK(late > 0);
  CHECK(early > 0);
}

TEST_CASE("shadow memory is never clean") {
  Fixture f;
  ShadowOps ops(f.inner.get(), &f.budget);
  Device device(&ops);
  const DeviceMatrix m = device.matrix(DType::kF32, 1, 16);
  for (const float v : device.get<float>(m.view)) CHECK(std::isnan(v));
}

TEST_CASE("two shadow spaces finish in no fixed order") {
  Fixture f;
  int64_t other_done = 0, other_pending = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const auto scheduler = std::make_shared<ShadowScheduler>(seed);
    ShadowOps a(f.inner.get(), &f.budget, scheduler), b(f.inner.get(), &f.budget, scheduler);
    const Buffer in_a = must_have(a.arena().allocate(64, "test")), in_b = must_have(b.arena().allocate(64, "test"));
    b.zero(in_b.data(), 64);
    const Ticket ticket = a.zero(in_a.data(), 64);
    must_ok(a.wait(ticket));
    (b.pending() == 0 ? other_done : other_pending) += 1;
  }
  CHECK(other_done > 0);
  CHECK(other_pending > 0);
}

}  // namespace
}  // namespace firn::test
