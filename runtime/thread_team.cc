// The only parallel region of the project.
//
// libgomp keeps its threads between regions, one set for each thread that opens regions. Every member therefore carries
// the id of the team it was last placed for, and places itself anew when that changes: a second team, pinned or not,
// never inherits the places of the first, and a pinned region costs no system call after the first.
#include "runtime/thread_team.h"

#include <fmt/format.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#ifdef FIRN_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace firn {
namespace {

constexpr int kMaxCpus = 8192;

class CpuMask {
 public:
  static CpuMask of_this_thread() {
    CpuMask mask;
    // Fails only for a kernel with more CPUs than this; then nothing is pinned.
    mask.valid_ = sched_getaffinity(0, kBytes, mask.set()) == 0;
    return mask;
  }
  static CpuMask single(int cpu) {
    CpuMask mask;
    CPU_SET_S(static_cast<size_t>(cpu), kBytes, mask.set());
    mask.valid_ = true;
    return mask;
  }
  bool has(int cpu) const {
    return valid_ && cpu >= 0 && cpu < kMaxCpus &&
           CPU_ISSET_S(static_cast<size_t>(cpu), kBytes, const_cast<CpuMask*>(this)->set());
  }
  bool apply() const { return valid_ && sched_setaffinity(0, kBytes, const_cast<CpuMask*>(this)->set()) == 0; }

 private:
  static constexpr size_t kBytes = kMaxCpus / 8;
  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words_); }
  unsigned long words_[kBytes / sizeof(unsigned long)] = {};
  bool valid_ = false;
};

// What the process was allowed before the first team pinned anything.
const CpuMask& process_mask() {
  static const CpuMask mask = CpuMask::of_this_thread();
  return mask;
}

thread_local uint64_t placed_for = 0;  // id of the team; 0 = where the process started it

void place(uint64_t team, int cpu) {
  if (placed_for == team) return;
  if (cpu >= 0) {
    CpuMask::single(cpu).apply();
  } else if (placed_for != 0) {
    process_mask().apply();
  }
  placed_for = team;
}

uint64_t next_team_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

void unpin_this_thread() {
  process_mask().apply();
  placed_for = 0;
}

Result<std::unique_ptr<ThreadTeam>> ThreadTeam::create(int n_threads, std::vector<int> cpus) {
  constexpr int kMaxThreads = 4096;
  if (n_threads < 1 || n_threads > kMaxThreads) {
    return invalid(fmt::format("--threads: expected 1 to {}, found {}", kMaxThreads, n_threads));
  }
  const CpuMask& allowed = process_mask();
  // Pinning two members to one place, or to a place that is not ours, is worse than leaving it to the kernel.
  const bool enough = cpus.size() >= static_cast<size_t>(n_threads);
  if (!enough || !std::all_of(cpus.begin(), cpus.end(), [&](int cpu) { return allowed.has(cpu); })) cpus.clear();
  return std::unique_ptr<ThreadTeam>(new ThreadTeam(n_threads, std::move(cpus)));
}

ThreadTeam::ThreadTeam(int n_threads, std::vector<int> cpus)
    : n_threads_(n_threads), cpus_(std::move(cpus)), pinned_(!cpus_.empty()), id_(next_team_id()) {}

ThreadTeam::~ThreadTeam() {
  if (pinned_ && placed_for == id_) unpin_this_thread();
}

// Not instrumented: TSan does not see libgomp's fork, so it would report the hand-over of `fn` and `arg` itself. The
// two edges it is told of instead cover everything that the bodies do.
#ifdef FIRN_TSAN
__attribute__((no_sanitize_thread))
#endif
void ThreadTeam::run_erased(void (*fn)(void*, int, int), void* arg) {
  FIRN_CHECK(omp_in_parallel() == 0, "a region inside a region");
  omp_set_dynamic(0);  // of the calling thread, so it is said where the region is
  const int n = n_threads_;
  const uint64_t id = id_;
  const int* cpus = pinned_ ? cpus_.data() : nullptr;
#ifdef FIRN_TSAN
  char fork_edge = 0, join_edge = 0;
  void* const fork_address = &fork_edge;
  void* const join_address = &join_edge;
  __tsan_release(fork_address);
#endif
#pragma omp parallel num_threads(n)
  {
#ifdef FIRN_TSAN
    __tsan_acquire(fork_address);
#endif
    const int member = omp_get_thread_num(), granted = omp_get_num_threads();
    place(id, cpus != nullptr ? cpus[member] : -1);
    // A thread limit (OMP_THREAD_LIMIT, ulimit -u) may grant fewer members than asked: they share the work.
    for (int t = member; t < n; t += granted) fn(arg, t, n);
#ifdef FIRN_TSAN
    __tsan_release(join_address);
#endif
  }
#ifdef FIRN_TSAN
  __tsan_acquire(join_address);
#endif
}

}  // namespace firn
