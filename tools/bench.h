// What the benches of `firn bench` share: rows, timing, memory that rotates, and the limits of this machine.
//
// A bench is one function in bench_NAME.cc and one line in the table of cmd_bench.cc. It measures with time_runs(),
// fills a BenchRow and hands it to BenchContext::emit(). A limit is measured in the same run, once, by the first bench
// that asks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "runtime/arena.h"
#include "runtime/status.h"
#include "runtime/thread_team.h"
#include "runtime/topology.h"
#include "tools/cli.h"

namespace firn::tools {

// Bytes that weights or KV rotate over, so that no run finds the last one's data in a cache.
inline constexpr int64_t kRotateBytes = int64_t{3} << 29;  // 1.5 GiB

struct BenchOptions {
  int threads = 0;  // 0: one a core we may use
  int runs = 7;
  std::vector<int64_t> tokens;                  // linear, moe; empty: the bench's own
  std::vector<std::string> formats;             // moe, linear
  std::vector<int64_t> depths;                  // attention, index, model
  std::vector<int64_t> queries;                 // attention, index
  std::string model;                            // model
  int64_t prompt = 512, gen = 64;               // model
  std::vector<int64_t> steps;                   // model
  std::vector<std::string> sessions;            // tiers
  int64_t expert_percent = 25, kv_percent = 5;  // tiers: of all experts, of all KV of sparse layers
  std::string dir;                              // disk, tiers: where files may be made
};

struct Timing {
  double median = 0, min = 0;  // seconds of one call
  int runs = 0;
};
// One warm-up, then `runs` timed runs of `calls` calls each; body(i) gets the number of the call, counted on over runs,
// so that it can take other data each time. Stops early with empty runs when interrupted.
Timing time_runs(int runs, int64_t calls, const std::function<void(int64_t)>& body);

struct BenchRow {
  std::string bench, shape;
  Timing time;
  int64_t bytes = 0;  // of one call
  int64_t flops = 0;
  // In the unit of the row's own figure: GB/s when limit_is_bytes, else GFLOP/s; 0: none.
  double limit = 0;
  bool limit_is_bytes = true;
  std::string limit_source;
  double ratio = 0;  // where it is not the rate over the limit: what limit_source says
  int threads = 0;   // 0: the team's
};

class BenchContext {
 public:
  static Result<std::unique_ptr<BenchContext>> create(const BenchOptions& options, const Globals& globals,
                                                      std::function<void(const std::string&)> line);

  const BenchOptions& options() const { return options_; }
  const Topology& topology() const { return topology_; }
  ThreadTeam& team() { return *team_; }
  HostArena& arena() { return arena_; }
  cpu::CpuOps& ops() { return *ops_; }
  cpu::Isa isa() const { return ops_->isa(); }

  // Prints the row: a JSON line, or a line of the table.
  void emit(const BenchRow& row);
  int64_t rows() const { return rows_; }

  // The best read rate of the whole team, GB/s, and the best oneDNN product at M3's shapes, GFLOP/s.
  Result<double> memory_limit();
  Result<double> gemm_limit();
  // Sets the row's limit to the one that binds at its FLOP a byte: memory (in GB/s) or products (in GFLOP/s).
  Status set_lower_limit(BenchRow& row);
  // For benches that measure these anyway.
  void set_memory_limit(double gb_s) { memory_limit_ = gb_s; }
  void set_gemm_limit(double gflop_s) { gemm_limit_ = gflop_s; }
  // 4 x the last-level cache, at least 1 GiB, at most 60 % of the memory we may use.
  int64_t working_set_bytes() const;

 private:
  BenchContext(const BenchOptions& options, const Globals& globals, std::function<void(const std::string&)> line,
               Topology topology, std::unique_ptr<ThreadTeam> team);
  const BenchOptions options_;
  const Globals globals_;
  const std::function<void(const std::string&)> line_;
  const Topology topology_;
  Budget budget_;
  HostArena arena_;
  std::unique_ptr<ThreadTeam> team_;
  std::unique_ptr<cpu::CpuOps> ops_;
  std::optional<double> memory_limit_, gemm_limit_;
  int64_t rows_ = 0;
};

// Memory with random weights of one format: view(i) gives matrix number i, a different place each time, wrapping around
// after kRotateBytes or more.
class RotatingWeights {
 public:
  static Result<RotatingWeights> create(BenchContext& context, WeightFormat format);
  // The next place for a matrix of this shape.
  WeightView next(int64_t rows, int64_t cols);

 private:
  WeightFormat format_ = WeightFormat::kMxfp8;
  Buffer data_, scales_;
  int64_t data_at_ = 0, scales_at_ = 0;
};

// Fills with codes of a format that are numbers of ordinary size; `scales` may be empty.
void fill_random_weights(ThreadTeam& team, WeightFormat format, void* data, int64_t bytes, void* scales,
                         int64_t scale_bytes, uint64_t seed);
void fill_random_bf16(Bf16* data, int64_t n, uint64_t seed);
Result<WeightFormat> parse_weight_format(const std::string& name);  // "mxfp8", "nvfp4", "mxfp4", "bf16", "f32"

Status bench_mem(BenchContext& context);
Status bench_gemm(BenchContext& context);
Status bench_linear(BenchContext& context);
Status bench_moe(BenchContext& context);
Status bench_attention(BenchContext& context);  // bench_attention.cc
Status bench_index(BenchContext& context);      // bench_index.cc
Status bench_model(BenchContext& context);      // bench_model.cc
Status bench_disk(BenchContext& context);       // bench_disk.cc
Status bench_tiers(BenchContext& context);      // bench_tiers.cc

// One rate each, for the limits.
Result<double> measure_memory_read(BenchContext& context);
Result<double> measure_best_gemm(BenchContext& context);
// GB/s of random reads of a file past the page cache, the best of a few sizes; 0 when it is too small to tell.
Result<double> measure_file_read(const std::string& path);

}  // namespace firn::tools
