// A team of worker threads, pinned once and reused for every kernel.
//
// Built over OpenMP (this is the only file of the project that opens a parallel region), so oneDNN called inside a
// region runs on the calling thread alone. Contract: one region at a time per team, called from one thread; bodies must
// not throw and must not open another region. Nothing a kernel returns may depend on size(): work is cut by shape, not
// by thread count, so results are bit-identical for every team size.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "runtime/status.h"

namespace firn {

// Gives the calling thread back every CPU the process had before the first team was made; for I/O threads, which
// inherit the one CPU of a pinned thread that starts them.
void unpin_this_thread();

class ThreadTeam {
 public:
  // n_threads >= 1; may exceed the number of cores. cpus: logical CPUs to pin to, one a thread in order, empty = no
  // pinning (also used when there are more threads than cpus, or one of them is not ours). The thread that calls run()
  // is member 0 and stays pinned until the team dies, and threads it starts inherit that: they call
  // unpin_this_thread().
  static Result<std::unique_ptr<ThreadTeam>> create(int n_threads, std::vector<int> cpus);
  ~ThreadTeam();

  int size() const { return n_threads_; }
  bool pinned() const { return pinned_; }

  // Calls body(thread, n_threads) once on every thread of the team; returns when all are done.
  template <typename F>
  void run(F&& body) {
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* f, int t, int n) { (*static_cast<Fn*>(f))(t, n); },
               const_cast<std::remove_const_t<Fn>*>(&body));
  }

  // Splits [0, n) into pieces of `grain` (the last may be shorter) and calls body(begin, end, thread) for each, pieces
  // handed out dynamically. The cut depends on n and grain alone.
  template <typename F>
  void parallel_for(int64_t n, int64_t grain, F&& body) {
    if (n <= 0) return;
    const int64_t pieces = (n + grain - 1) / grain;
    if (pieces == 1 || n_threads_ == 1) {
      for (int64_t p = 0; p < pieces; ++p) body(p * grain, p + 1 == pieces ? n : (p + 1) * grain, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int thread, int) {
      for (int64_t p = next.fetch_add(1, std::memory_order_relaxed); p < pieces;
           p = next.fetch_add(1, std::memory_order_relaxed)) {
        body(p * grain, p + 1 == pieces ? n : (p + 1) * grain, thread);
      }
    });
  }

  // As parallel_for, but thread t gets the t-th contiguous stretch of pieces: for streaming reads, where each core (and
  // NUMA node) should walk memory in order.
  template <typename F>
  void parallel_stretches(int64_t n, int64_t grain, F&& body) {
    if (n <= 0) return;
    const int64_t pieces = (n + grain - 1) / grain;
    if (pieces == 1 || n_threads_ == 1) {
      for (int64_t p = 0; p < pieces; ++p) body(p * grain, p + 1 == pieces ? n : (p + 1) * grain, 0);
      return;
    }
    run([&](int thread, int n_threads) {
      const int64_t first = pieces * thread / n_threads, last = pieces * (thread + 1) / n_threads;
      for (int64_t p = first; p < last; ++p) body(p * grain, p + 1 == pieces ? n : (p + 1) * grain, thread);
    });
  }

 private:
  ThreadTeam(int n_threads, std::vector<int> cpus);
  void run_erased(void (*fn)(void*, int, int), void* arg);
  const int n_threads_;
  const std::vector<int> cpus_;
  const bool pinned_;
  const uint64_t id_;  // of this team among all of the process
};

}  // namespace firn
