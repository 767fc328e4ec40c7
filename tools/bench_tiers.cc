// firn bench tiers: what it costs that experts, or K and V, are not in memory.
//
//   firn bench tiers --model DIR                        experts from disk, with --expert-percent of them in memory
//   firn bench tiers --model DIR --session SHORT,LONG   far K and V of two sessions (firn session synth)
//
// Steps are decode steps of one token with random ids, so that routing and block choices are fresh each time.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>

#include "model/engine.h"
#include "model/session_files.h"
#include "runtime/units.h"
#include "tools/answer.h"
#include "tools/bench.h"
#include "tools/timed_ops.h"

namespace firn::tools {
namespace {

using model::Engine;
using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 4, kSteps = 32;

double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

model::EngineOptions engine_options(BenchContext& context) {
  model::EngineOptions options;
  options.model = context.options().model;
  options.threads = context.team().size();
  options.cpus = context.topology().cpus_for(options.threads);
  options.isa = context.isa();
  options.ram_bytes = context.topology().memory_usable_bytes / 10 * 9;
  options.ram_reason = context.topology().memory_usable_reason;
  options.kv_dirs = {"/var/tmp"};
  options.cancel = &interrupted();
  return options;
}

// A sequence on an engine's weights whose operations are timed.
class Runner {
 public:
  explicit Runner(Engine* engine)
      : engine_(engine),
        timed_(&engine->ops()),
        pools_(&timed_, &engine->ops().arena(), engine->config(), engine->options().kv_dtype),
        kv_(&with_tier()) {
    model::ForwardOptions options;
    options.activation = engine->activation();
    options.experts = engine->experts();
    options.prefetch_experts = engine->options().prefetch_experts;
    options.prefetch_kv = engine->options().prefetch_kv;
    forward_ = std::make_unique<model::Forward>(&engine->config(), &engine->weights(), &timed_, options);
  }
  model::KvCache& kv() { return kv_; }

  struct Step {
    double wall = 0, choosing = 0, dense = 0;
    double rest() const { return wall - choosing - dense; }
  };
  Result<Step> feed(int64_t n) {
    model::WaveSpan span;
    span.kv = &kv_;
    for (int64_t i = 0; i < n; ++i) {
      state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
      span.ids.push_back(static_cast<int32_t>((state_ >> 33) % static_cast<uint64_t>(engine_->config().vocab)));
    }
    span.logits_at = {n - 1};
    model::Wave wave;
    wave.spans.push_back(std::move(span));
    timed_.reset();
    const auto start = Clock::now();
    FIRN_TRY(forward_->begin(std::move(wave)));
    while (!forward_->finished()) {
      if (interrupted()) return cancelled("bench tiers interrupted");
      FIRN_TRY(forward_->step());
    }
    return Step{since(start), timed_.choosing_seconds(), timed_.dense_seconds()};
  }

 private:
  model::KvPools& with_tier() {
    pools_.tier = engine_->kv_tier();
    return pools_;
  }
  Engine* const engine_;
  TimedOps timed_;
  model::KvPools pools_;
  model::KvCache kv_;
  std::unique_ptr<model::Forward> forward_;
  uint64_t state_ = 777;
};

Timing timing(std::vector<double> seconds) {
  return {median(seconds), *std::min_element(seconds.begin(), seconds.end()), static_cast<int>(seconds.size())};
}

BenchRow make_row(const std::string& shape, const Timing& time, double ratio, const std::string& what) {
  BenchRow row;
  row.bench = "tiers";
  row.shape = shape;
  row.time = time;
  row.ratio = ratio;
  row.limit_source = what;
  return row;
}

void emit_peak(BenchContext& context, Engine& engine, const char* what) {
  const int64_t peak = peak_rss_bytes();
  const double allowed = 1.05 * static_cast<double>(engine.budget().peak_bytes()) + 256.0 * 1024 * 1024;
  BenchRow row = make_row(fmt::format("peak memory, {}", what), {1, 1, 1}, static_cast<double>(peak) / allowed,
                          "of 1.05 x what was charged + 256MiB");
  row.bytes = peak;
  context.emit(row);
}

int64_t demand_and_guesses(const storage::SlotCacheStats& s) {
  int64_t bytes = 0;
  for (const storage::CauseStats& c : s.cause) bytes += c.bytes;
  return bytes;
}

// Decode with a part of the experts in memory; the prompt before it.
Status bench_experts(BenchContext& context) {
  const BenchOptions& o = context.options();
  model::EngineOptions options = engine_options(context);
  FIRN_ASSIGN(const auto survey, model::Survey::open(storage::FileSystem::real(), o.model));
  FIRN_ASSIGN(const double disk, measure_file_read(survey.checkpoint.shards.front().path));
  if (disk == 0) return invalid(fmt::format("{}: too small to measure reading from disk", o.model));
  const int64_t all = survey.groups[static_cast<size_t>(model::Group::kExperts)].bytes;
  const int64_t prompt = std::max<int64_t>(o.prompt, 16);
  options.before_load = [&](const Engine& e) { return e.check_fits(prompt, prompt + 2 * (kWarmUp + kSteps) + 64); };

  // What a step computes, with everything in memory if that fits.
  double compute = 0;
  {
    auto engine = Engine::open(storage::FileSystem::real(), options);
    if (engine.ok() && (*engine)->experts() == nullptr) {
      Runner runner(engine->get());
      FIRN_TRY(runner.feed(16).status());
      std::vector<double> seconds;
      for (int i = 0; i < kWarmUp + kSteps; ++i) {
        FIRN_ASSIGN(const Runner::Step step, runner.feed(1));
        if (i >= kWarmUp) seconds.push_back(step.wall);
      }
      compute = median(seconds);
      context.emit(make_row("step, all experts in memory", timing(seconds), 0, ""));
    }
  }
  for (const bool prefetch : {true, false}) {
    options.expert_ram_bytes = all / 100 * o.expert_percent;
    options.prefetch_experts = prefetch;
    FIRN_ASSIGN(auto engine, Engine::open(storage::FileSystem::real(), options));
    if (engine->experts() == nullptr) return invalid("bench tiers: all experts fit into the given share");
    Runner runner(engine.get());
    if (prefetch) {
      FIRN_ASSIGN(const Runner::Step step, runner.feed(prompt));
      const int64_t read = demand_and_guesses(engine->tier_stats().expert);
      BenchRow row = make_row(fmt::format("prompt of {}: expert bytes read", prompt), {step.wall, step.wall, 1},
                              static_cast<double>(read) / static_cast<double>(all), "of all experts' bytes");
      row.bytes = read;
      context.emit(row);
    } else {
      FIRN_TRY(runner.feed(16).status());
    }
    std::vector<double> seconds;
    double wall = 0;
    int64_t before = 0;
    double busy_before = 0;
    for (int i = 0; i < kWarmUp + kSteps; ++i) {
      if (i == kWarmUp) {
        before = demand_and_guesses(engine->tier_stats().expert);
        busy_before = engine->tier_stats().io.busy_seconds;
      }
      FIRN_ASSIGN(const Runner::Step step, runner.feed(1));
      if (i < kWarmUp) continue;
      seconds.push_back(step.wall);
      wall += step.wall;
    }
    const model::TierStats t = engine->tier_stats();
    const int64_t bytes = demand_and_guesses(t.expert) - before;
    const char* how = prefetch ? "prefetch" : "no prefetch";
    BenchRow rate;
    rate.bench = "tiers";
    rate.shape = fmt::format("{} % of experts, {}: from disk", o.expert_percent, how);
    rate.time = {wall, wall, kSteps};
    rate.bytes = bytes;
    rate.limit = disk;
    rate.limit_source = "disk, random reads";
    context.emit(rate);
    BenchRow busy = rate;
    busy.shape += ", while reading";
    busy.time.median = busy.time.min = t.io.busy_seconds - busy_before;
    context.emit(busy);
    const double io = static_cast<double>(bytes) / kSteps / (disk * 1e9);
    context.emit(make_row(fmt::format("{} % of experts, {}: step", o.expert_percent, how), timing(seconds),
                          wall / kSteps / std::max(compute, io),
                          fmt::format("of max(compute {:.1f} ms, reading {:.1f} ms)", compute * 1e3, io * 1e3)));
    emit_peak(context, *engine, how);
  }
  return {};
}

struct FarResult {
  double rest = 0, wall = 0, hidden = 0;
};

Result<FarResult> bench_session(BenchContext& context, const std::string& dir, bool prefetch, bool report) {
  const BenchOptions& o = context.options();
  storage::KvLogOptions log_options;
  int64_t tokens = 0;
  {
    FIRN_ASSIGN(const auto log, storage::KvLog::open(storage::FileSystem::real(), dir, {}));
    tokens = model::session_info(*log).tokens;
  }
  FIRN_ASSIGN(const auto survey, model::Survey::open(storage::FileSystem::real(), o.model));
  model::EngineOptions options = engine_options(context);
  const int64_t far = model::KvCache::far_bytes_for(survey.config, survey.config.kv_layout(options.kv_dtype), tokens);
  const KvLayout layout = survey.config.kv_layout(options.kv_dtype);
  const int64_t least = model::KvCache::least_near_bytes(survey.config, layout);
  options.kv_ram_bytes = std::max(least, far / 100 * o.kv_percent);
  options.sessions = true;
  options.prefetch_kv = prefetch;
  options.before_load = [&](const Engine& e) { return e.check_fits(1, tokens + 2 * (kWarmUp + kSteps)); };
  FIRN_ASSIGN(auto engine, Engine::open(storage::FileSystem::real(), options));
  Runner runner(engine.get());
  log_options.identity = engine->identity();
  const std::string name = fmt::format("{} tokens", tokens);
  const auto start = Clock::now();
  FIRN_ASSIGN(auto log, storage::KvLog::open(storage::FileSystem::real(), dir, log_options));
  const double metadata_s = since(start);
  const int64_t metadata = log->stats().metadata_bytes_read;
  const auto handle = engine->kv_tier()->add(std::move(log), true);
  FIRN_TRY(runner.kv().restore(handle, tokens));
  const double open_s = since(start);
  const int64_t read = engine->tier_stats().io.demand_bytes + metadata;
  std::vector<double> seconds, rest;
  double first = 0, wall = 0;
  storage::SlotCacheStats before;
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    if (i == kWarmUp) before = engine->tier_stats().kv;
    FIRN_ASSIGN(const Runner::Step step, runner.feed(1));
    if (i == 0) first = since(start);
    if (i < kWarmUp) continue;
    seconds.push_back(step.wall);
    rest.push_back(step.rest());
    wall += step.wall;
  }
  const storage::SlotCacheStats after = engine->tier_stats().kv;
  const double wait = after.wait_seconds - before.wait_seconds,
               service = after.service_seconds - before.service_seconds;
  FarResult result{median(rest), median(seconds), service > 0 ? 1 - wait / service : 1};
  if (!report) return result;
  const int64_t blocks = (tokens + layout.block_tokens - 1) / layout.block_tokens;
  const int64_t must =
      blocks * survey.config.n_sparse() * layout.index_norm_offset() +
      blocks * (survey.config.layers - survey.config.n_sparse()) * layout.groups * layout.kv_block_bytes() + metadata +
      (tokens % layout.block_tokens != 0 ? survey.config.n_sparse() * layout.groups * layout.kv_block_bytes() : 0);
  context.emit(make_row(name + ": reopen, bytes read", {open_s, open_s, 1},
                        static_cast<double>(read) / static_cast<double>(must),
                        "of index keys, dense layers, open blocks and metadata"));
  FIRN_ASSIGN(const double disk, measure_file_read(dir + "/00000001.seg"));
  BenchRow rate;
  rate.bench = "tiers";
  rate.shape = name + ": reopen";
  rate.time = {open_s, open_s, 1};
  rate.bytes = read;
  rate.limit = disk;
  rate.limit_source = fmt::format("disk, random reads; table {:.2f} s, first token after {:.2f} s", metadata_s, first);
  context.emit(rate);
  const int64_t fetched = demand_and_guesses(after) - demand_and_guesses(before);
  BenchRow step =
      make_row(name + fmt::format(": step, KV {} %", o.kv_percent), timing(seconds), result.hidden,
               fmt::format("of far reading hidden ({:.1f} ms of {:.1f} ms a step waited for; {} of {} far "
                           "blocks there)",
                           wait / kSteps * 1e3, service / kSteps * 1e3, after.hits - before.hits,
                           after.hits + after.joined + after.misses - before.hits - before.joined - before.misses));
  step.bytes = fetched / kSteps;
  context.emit(step);
  emit_peak(context, *engine, name.c_str());
  return result;
}

}  // namespace

Status bench_tiers(BenchContext& context) {
  const BenchOptions& o = context.options();
  if (o.sessions.empty()) return bench_experts(context);
  std::vector<FarResult> on;
  for (const std::string& dir : o.sessions) {
    FIRN_ASSIGN(const FarResult r, bench_session(context, dir, true, true));
    on.push_back(r);
    FIRN_ASSIGN(const FarResult off, bench_session(context, dir, false, false));
    context.emit(make_row(dir + ": step without prefetch", {off.wall, off.wall, kSteps}, r.wall / off.wall,
                          fmt::format("is the step with prefetch; {:.2f} hidden without", off.hidden)));
  }
  if (on.size() >= 2) {
    context.emit(make_row("long step but choosing and dense attention", {on.back().rest, on.back().rest, kSteps},
                          on.back().rest / on.front().rest, "of the same of the short session"));
  }
  return {};
}

}  // namespace firn::tools
