// firn bench model: prefill, decode and steps of several tokens of a checkpoint at depth, on random token ids.
//
// Bytes of a decode step are what it has to read: every resident matrix once (embedding rows aside), the distinct
// experts its rows were routed to, index keys up to the depth, and the keys and values of the blocks attended. FLOPs of
// a prefill are two a weight a row uses, logits of one row, and attention's products.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "model/engine.h"
#include "runtime/units.h"
#include "tools/bench.h"
#include "tools/timed_ops.h"

namespace firn::tools {
namespace {

using model::Engine;
using model::Forward;
using model::KvCache;

struct Cost {
  int64_t bytes = 0, flops = 0;
};

int64_t matrix_flops(const WeightView& w) { return w.empty() ? 0 : 2 * w.rows * w.cols; }

// One forward of `rows` rows at `depth`, of which `n_logits` want logits; experts_read as counted.
Cost cost_of(const Engine& engine, int64_t depth, int64_t rows, int64_t n_logits, int64_t experts_read) {
  const model::ModelConfig& c = engine.config();
  const int64_t kv_element = static_cast<int64_t>(dtype_bytes(engine.options().kv_dtype));
  Cost cost;
  auto resident = [&](const WeightView& w) {
    cost.bytes += w.bytes();
    cost.flops += rows * matrix_flops(w);
  };
  int64_t expert_bytes = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    const model::LayerWeights& w = engine.weights().layers[static_cast<size_t>(l)];
    for (const WeightView* m : {&w.q, &w.k, &w.v, &w.o, &w.index_q, &w.index_k, &w.mlp_gate, &w.mlp_up, &w.mlp_down,
                                &w.router, &w.shared_gate, &w.shared_up, &w.shared_down}) {
      resident(*m);
    }
    if (!w.experts.empty()) {
      const model::ExpertWeights& e = w.experts[0];
      expert_bytes = e.gate.bytes() + e.up.bytes() + e.down.bytes();
      cost.flops += rows * c.experts_per_token * (matrix_flops(e.gate) + matrix_flops(e.up) + matrix_flops(e.down));
    }
    int64_t attended = depth + rows;
    if (c.sparse_layer[static_cast<size_t>(l)]) {
      cost.bytes += attended * c.index_dim * kv_element;
      cost.flops += rows * (depth + rows / 2) * c.index_heads * c.index_dim * 2;
      // Rows of one step may share blocks; what is sure to be read is one row's choice.
      attended = std::min(attended, c.topk_blocks * c.block_tokens);
    }
    cost.bytes += attended * c.kv_heads * c.head_dim * 2 * kv_element;
    const int64_t seen =
        c.sparse_layer[static_cast<size_t>(l)] ? std::min(depth + rows / 2, attended) : depth + rows / 2;
    cost.flops += rows * seen * c.heads * c.head_dim * 4;
  }
  cost.bytes += experts_read * expert_bytes + engine.weights().lm_head.bytes();
  cost.flops += n_logits * matrix_flops(engine.weights().lm_head);
  return cost;
}

class ModelRunner {
 public:
  explicit ModelRunner(Engine* engine)
      : engine_(engine),
        timed_(&engine->ops()),
        pools_(&timed_, &engine->ops().arena(), engine->config(), engine->options().kv_dtype),
        kv_(&pools_) {
    model::ForwardOptions options;
    options.activation = engine->activation();
    forward_ = std::make_unique<Forward>(&engine->config(), &engine->weights(), &timed_, options);
    options.capture.routing = true;
    counting_ = std::make_unique<Forward>(&engine->config(), &engine->weights(), &timed_, options);
  }

  int64_t depth() const { return kv_.length(); }
  void truncate(int64_t n) { kv_.truncate(n); }
  TimedOps& timed() { return timed_; }

  // Feeds n fresh random ids; logits of the last or of all.
  Status feed(int64_t n, bool all_logits) { return run(forward_.get(), n, all_logits); }

  // The same, counting distinct (layer, expert) pairs.
  Result<int64_t> feed_and_count(int64_t n, bool all_logits) {
    FIRN_TRY(run(counting_.get(), n, all_logits));
    const auto& ids = counting_->captured().expert_ids;
    const int64_t moe = engine_->config().n_moe();
    std::set<std::pair<int64_t, int32_t>> distinct;
    const int64_t per_layer = moe == 0 ? 0 : static_cast<int64_t>(ids.size()) / moe;
    for (size_t i = 0; i < ids.size(); ++i) distinct.emplace(static_cast<int64_t>(i) / per_layer, ids[i]);
    return static_cast<int64_t>(distinct.size());
  }

 private:
  Status run(Forward* forward, int64_t n, bool all_logits) {
    model::WaveSpan span;
    span.kv = &kv_;
    for (int64_t i = 0; i < n; ++i) {
      state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
      span.ids.push_back(static_cast<int32_t>((state_ >> 33) % static_cast<uint64_t>(engine_->config().vocab)));
      if (all_logits || i + 1 == n) span.logits_at.push_back(i);
    }
    model::Wave wave;
    wave.spans.push_back(std::move(span));
    FIRN_TRY(forward->begin(std::move(wave)));
    while (!forward->finished()) {
      if (interrupted().load()) return cancelled("interrupted");
      FIRN_TRY(forward->step());
    }
    return {};
  }

  Engine* const engine_;
  TimedOps timed_;
  model::KvPools pools_;
  KvCache kv_;
  std::unique_ptr<Forward> forward_, counting_;
  uint64_t state_ = 12345;
};

Status bench_depth(BenchContext& context, Engine* engine, ModelRunner* runner, int64_t depth, double memory,
                   double gemm) {
  const BenchOptions& o = context.options();
  while (runner->depth() < depth) FIRN_TRY(runner->feed(std::min<int64_t>(depth - runner->depth(), 4096), false));
  Status status;
  auto timed_feed = [&](int64_t rows, bool all) {
    if (status.ok()) status = runner->feed(rows, all);
  };

  BenchRow prefill;
  prefill.bench = "model";
  prefill.shape = fmt::format("prefill {} at {}", o.prompt, depth);
  prefill.time = time_runs(std::min(o.runs, 3), 1, [&](int64_t) {
    runner->truncate(depth);
    timed_feed(o.prompt, false);
  });
  FIRN_TRY(status);
  prefill.flops = cost_of(*engine, depth, o.prompt, 1, 0).flops;
  prefill.limit = gemm;
  prefill.limit_is_bytes = false;
  prefill.limit_source = "best gemm";
  context.emit(prefill);

  for (const int64_t step : o.steps) {
    runner->truncate(depth);
    int64_t experts = 0;
    const int64_t counted = 4;
    for (int64_t i = 0; i < counted; ++i) {
      FIRN_ASSIGN(const int64_t n, runner->feed_and_count(step, true));
      experts += n;
    }
    runner->truncate(depth);
    double kernels = 0, wall = 0;
    const int runs = std::max(1, static_cast<int>(o.gen / std::max<int64_t>(1, step)));
    BenchRow row;
    row.bench = "model";
    row.shape = step == 1 ? fmt::format("decode at {}", depth) : fmt::format("step of {} at {}", step, depth);
    row.time = time_runs(runs, 1, [&](int64_t) {
      runner->timed().reset();
      const auto start = std::chrono::steady_clock::now();
      timed_feed(step, true);
      wall += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      kernels += runner->timed().seconds();
    });
    FIRN_TRY(status);
    const Cost cost = cost_of(*engine, depth, step, step, experts / counted);
    row.bytes = cost.bytes;
    row.flops = cost.flops;
    row.limit = memory;
    row.limit_source = "mem read";
    context.emit(row);
    if (step == 1 && row.time.runs > 0) {
      BenchRow share = row;
      share.shape = fmt::format("decode at {}: kernels of wall", depth);
      share.limit = static_cast<double>(cost.bytes) / (row.time.median * kernels / wall) * 1e-9;
      share.limit_source = "its kernels alone";
      context.emit(share);
    }
  }
  runner->truncate(depth);
  return {};
}

// Touches every page of as much memory as the weights take (up to 64 GiB) and gives it back. In a virtual machine the
// host may have to find memory the first time, at a fraction of a disk's rate: a row of its own, so that the load after
// it shows the loader beside the disk.
Status bench_first_touch(BenchContext& context, int64_t bytes) {
  constexpr int64_t kPage = 4096, kPiece = int64_t{64} << 20;
  bytes = std::min({bytes, int64_t{64} << 30, context.topology().memory_usable_bytes / 10 * 8}) / kPage * kPage;
  if (bytes == 0) return {};
  FIRN_ASSIGN(const Buffer memory, context.arena().allocate(bytes, "bench model: memory of the weights' size"));
  BenchRow row;
  const auto start = std::chrono::steady_clock::now();
  context.team().parallel_for(bytes, kPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end && !interrupted(); at += kPage) memory.as<char>()[at] = 1;
  });
  row.time.median = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (interrupted()) return cancelled("bench model interrupted");
  row.time.min = row.time.median;
  row.time.runs = 1;
  row.bench = "model";
  row.shape = fmt::format("first touch of {} of memory", format_size(bytes));
  row.bytes = bytes;
  context.emit(row);
  return {};
}

}  // namespace

Status bench_model(BenchContext& context) {
  const BenchOptions& o = context.options();
  if (o.model.empty()) return invalid("bench model: --model DIR names the checkpoint");
  // Limits first: their buffers are gone before the weights come.
  FIRN_ASSIGN(const double memory, context.memory_limit());
  FIRN_ASSIGN(const double gemm, context.gemm_limit());
  model::EngineOptions options;
  options.model = o.model;
  options.threads = context.team().size();
  options.cpus = context.topology().cpus_for(options.threads);
  options.isa = context.isa();
  options.ram_bytes = context.topology().memory_usable_bytes / 10 * 9;
  options.ram_reason = context.topology().memory_usable_reason;
  options.cancel = &interrupted();
  FIRN_ASSIGN(const auto checkpoint, storage::Checkpoint::open(storage::FileSystem::real(), o.model));
  FIRN_ASSIGN(const double disk, measure_file_read(checkpoint.shards.back().path));
  int64_t shard_bytes = 0;
  for (const auto& shard : checkpoint.shards) {
    FIRN_ASSIGN(const auto file, storage::open_file(shard.path, storage::OpenMode::kRead));
    FIRN_ASSIGN(const int64_t size, file->size());
    shard_bytes += size;
  }
  FIRN_TRY(bench_first_touch(context, shard_bytes));
  FIRN_ASSIGN(const std::unique_ptr<Engine> engine, Engine::open(storage::FileSystem::real(), options));
  const int64_t deepest = *std::max_element(o.depths.begin(), o.depths.end());
  FIRN_TRY(engine->check_fits(std::min<int64_t>(4096, std::max(deepest, o.prompt)), deepest + o.prompt + o.gen));
  BenchRow load;
  load.bench = "model";
  load.shape = "load";
  load.time = {engine->load_seconds(), engine->load_seconds(), 1};
  load.bytes = engine->weights().bytes;
  load.limit = disk;
  load.limit_source = "disk, random reads";
  context.emit(load);
  ModelRunner runner(engine.get());
  std::vector<int64_t> depths = o.depths;
  std::sort(depths.begin(), depths.end());
  for (const int64_t depth : depths) FIRN_TRY(bench_depth(context, engine.get(), &runner, depth, memory, gemm));
  return {};
}

}  // namespace firn::tools
