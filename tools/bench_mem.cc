// firn bench mem: what memory gives, read, written and copied, by thread count and NUMA node.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "cpu/stream_kernels.h"
#include "runtime/units.h"
#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;

const cpu::StreamKernels& streams(cpu::Isa isa) {
  if (isa >= cpu::Isa::kAvx512) return cpu::stream_kernels_avx512();
  return isa == cpu::Isa::kAvx2 ? cpu::stream_kernels_avx2() : cpu::stream_kernels_scalar();
}

// Each thread owns one contiguous stretch, as the kernels of a token do.
template <typename F>
void over(ThreadTeam& team, int64_t bytes, F&& body) {
  team.run([&](int thread, int n) {
    const int64_t pieces = bytes / kPiece;
    const int64_t begin = pieces * thread / n * kPiece, end = pieces * (thread + 1) / n * kPiece;
    body(begin, end - begin, thread);
  });
}

Timing time_read(ThreadTeam& team, const cpu::StreamKernels& kernels, const uint8_t* data, int64_t bytes, int runs) {
  std::atomic<uint64_t> sum{0};
  const Timing time = time_runs(runs, 1, [&](int64_t) {
    over(team, bytes, [&](int64_t begin, int64_t n, int) {
      sum.fetch_add(kernels.read(data + begin, n), std::memory_order_relaxed);
    });
  });
  // The checksum is looked at, so that no read is dead.
  if (sum.load() == 0) return {};
  return time;
}

void touch(ThreadTeam& team, const cpu::StreamKernels& kernels, uint8_t* data, int64_t bytes) {
  over(team, bytes, [&](int64_t begin, int64_t n, int) { kernels.write(data + begin, n, 1); });
}

Status measure(BenchContext& context, HostArena& arena, ThreadTeam& team, const std::string& where, bool only_read,
               double* best_read) {
  const cpu::StreamKernels& kernels = streams(context.isa());
  const int64_t bytes = context.working_set_bytes() / (2 * kPiece) * (2 * kPiece);
  FIRN_ASSIGN(const Buffer buffer, arena.allocate(bytes, "working set of bench mem"));
  auto* const data = buffer.as<uint8_t>();
  touch(team, kernels, data, bytes);
  const int runs = context.options().runs;
  const auto emit = [&](const std::string& what, const Timing& time, int64_t moved) {
    BenchRow row;
    row.bench = "mem";
    row.shape = fmt::format("{} {}{}", what, format_size(bytes), where);
    row.time = time;
    row.bytes = moved;
    row.threads = team.size();
    context.emit(row);
  };
  const Timing read = time_read(team, kernels, data, bytes, runs);
  if (read.runs == 0) return cancelled("bench mem interrupted");
  *best_read = std::max(*best_read, static_cast<double>(bytes) / read.median * 1e-9);
  emit("read", read, bytes);
  if (only_read) return {};
  emit("write", time_runs(runs, 1, [&](int64_t) { touch(team, kernels, data, bytes); }), bytes);
  emit("copy",
       time_runs(runs, 1,
                 [&](int64_t) {
                   over(team, bytes / 2, [&](int64_t begin, int64_t n, int) {
                     kernels.copy(data + bytes / 2 + begin, data + begin, n);
                   });
                 }),
       bytes);
  return {};
}

}  // namespace

Status bench_mem(BenchContext& context) {
  double best_all = 0, ignored = 0;
  // One thread, half of them, all.
  std::vector<int> counts = {1, context.team().size() / 2, context.team().size()};
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  for (const int n : counts) {
    if (n == 0) continue;
    const bool all = n == context.team().size();
    std::unique_ptr<ThreadTeam> part;
    if (!all) {
      FIRN_ASSIGN(part, ThreadTeam::create(n, context.topology().cpus_for(n)));
    }
    FIRN_TRY(measure(context, context.arena(), all ? context.team() : *part, "", false, all ? &best_all : &ignored));
  }
  context.set_memory_limit(best_all);
  if (context.topology().nodes.size() < 2) return {};
  for (const NumaNode& node : context.topology().nodes) {
    if (!node.allowed) continue;
    HostArena arena(&context.arena().budget(), node.os_index);
    FIRN_TRY(measure(context, arena, context.team(), fmt::format(" node {}", node.os_index), true, &ignored));
    if (node.cpus.empty()) continue;
    FIRN_ASSIGN(const auto local, ThreadTeam::create(static_cast<int>(std::max<int64_t>(1, node.cores)), node.cpus));
    FIRN_TRY(measure(context, arena, *local, fmt::format(" node {} from its cores", node.os_index), true, &ignored));
  }
  return {};
}

Result<double> measure_memory_read(BenchContext& context) {
  const cpu::StreamKernels& kernels = streams(context.isa());
  const int64_t bytes = context.working_set_bytes() / kPiece * kPiece;
  FIRN_ASSIGN(const Buffer buffer, context.arena().allocate(bytes, "working set of the memory limit"));
  auto* const data = buffer.as<uint8_t>();
  touch(context.team(), kernels, data, bytes);
  const Timing time = time_read(context.team(), kernels, data, bytes, 7);
  if (time.runs == 0) return cancelled("interrupted");
  return static_cast<double>(bytes) / time.median * 1e-9;
}

}  // namespace firn::tools
