#include "model/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "gpu/gpu.h"
#include "runtime/units.h"

namespace firn::model {

Engine::Engine(EngineOptions options) : options_(std::move(options)), budget_("--ram", options_.ram_bytes) {
  if (options_.precise) options_.kv_dtype = DType::kF32;
}

Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::open(storage::FileSystem& fs, EngineOptions options) {
  std::unique_ptr<Engine> engine(new Engine(std::move(options)));
  FIRN_TRY(engine->load(fs));
  return engine;
}

Status Engine::load(storage::FileSystem& fs) {
  FIRN_ASSIGN(survey_, Survey::open(fs, options_.model));
  FIRN_TRY(survey_.loadable());
  arena_ = std::make_unique<HostArena>(&budget_);
  FIRN_ASSIGN(team_, ThreadTeam::create(options_.threads, options_.cpus));
  FIRN_ASSIGN(ops_, cpu::CpuOps::create(team_.get(), arena_.get(), options_.isa));
  pools_ = std::make_unique<KvPools>(ops_.get(), arena_.get(), survey_.config, options_.kv_dtype);

  // A minimal prompt must fit beside the weights, or reading them would be for nothing.
  FIRN_TRY(check_fits(1, 1));

  auto tokenizer = Tokenizer::open(fs, options_.model);
  if (tokenizer.ok()) {
    tokenizer_ = std::move(tokenizer).value();
  } else {
    tokenizer_status_ = tokenizer.status();
  }
  if (options_.before_load) FIRN_TRY(options_.before_load(*this));

  LoadOptions load;
  load.n_readers = options_.load_readers;
  load.direct = options_.load_direct;
  load.progress = options_.load_progress;
  load.cancel = options_.cancel;
  const auto start = std::chrono::steady_clock::now();
  if (options_.share_weights) {
    FIRN_ASSIGN(weights_, load_shared_weights(fs, survey_, *arena_, load, options_.shared, &shared_));
    for (const std::string& m : shared_.missing) missing_.push_back(m);
  } else {
    FIRN_ASSIGN(weights_, load_weights(fs, survey_, *arena_, load));
  }
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!arena_->huge_pages_granted()) missing_.push_back("no huge pages (slower random reads)");
  return {};
}

MemoryPlan Engine::plan(int64_t prompt_tokens, int64_t context) const {
  const ModelConfig& c = config();
  const int64_t wave = options_.wave_tokens > 0 ? std::min(options_.wave_tokens, prompt_tokens) : prompt_tokens;
  MemoryPlan plan;
  for (size_t g = 0; g < survey_.groups.size(); ++g) {
    const bool vision = g >= static_cast<size_t>(Group::kVisionBlocks);
    if (!vision) plan.weights_bytes += survey_.groups[g].bytes;
  }
  plan.kv_bytes = KvCache::bytes_for(c, c.kv_layout(options_.kv_dtype), context);
  plan.wave_bytes = Forward::wave_bytes(c, activation(), wave, 1);
  plan.scratch_bytes = ops_->scratch_bytes(Forward::limits(c, wave, context));
  return plan;
}

Status Engine::check_fits(int64_t prompt_tokens, int64_t context) const {
  if (budget_.limit_bytes() < 0) return {};
  const MemoryPlan need = plan(prompt_tokens, context);
  const int64_t limit = budget_.limit_bytes();
  if (need.total() <= limit) return {};
  std::string advice;
  const MemoryPlan least = plan(1, 1);
  if (least.total() > limit) {
    advice = fmt::format("this checkpoint needs at least --ram {}", format_size(least.total()));
  } else {
    // The largest context whose prompt is fed in waves of one chunk.
    int64_t low = 1, high = context;
    const int64_t wave = std::min(prompt_tokens, Forward::kChunkRows);
    while (low < high) {
      const int64_t mid = low + (high - low + 1) / 2;
      if (plan(std::min(mid, wave), mid).total() <= limit) {
        low = mid;
      } else {
        high = mid - 1;
      }
    }
    advice = low >= context ? fmt::format("--wave {} would fit", wave)
                            : fmt::format("with --wave {} a context of {} tokens would fit; or give --ram {}", wave,
                                          low, format_size(need.total()));
  }
  return no_memory(fmt::format(
      "{} {}: weights {}, K/V and index keys {}, a wave of {} {}, scratch {}; {} allows {}{}, {} short: {}",
      context == 1 ? std::string("even one token of context needs") : fmt::format("{} tokens of context need", context),
      format_size(need.total()), format_size(need.weights_bytes), format_size(need.kv_bytes),
      prompt_tokens == 1 ? std::string("one token") : fmt::format("{} tokens", prompt_tokens),
      format_size(need.wave_bytes), format_size(need.scratch_bytes), budget_.name(), format_size(limit),
      options_.ram_reason.empty() ? "" : " (" + options_.ram_reason + ")", format_size(need.total() - limit), advice));
}

std::string Engine::first_line() const {
  std::vector<std::string> formats;
  for (const auto& group : survey_.groups) {
    for (const std::string& f : group.formats) {
      if (std::find(formats.begin(), formats.end(), f) == formats.end()) formats.push_back(f);
    }
  }
  std::string format_text, missing_text;
  for (const std::string& f : formats) format_text += (format_text.empty() ? "" : "+") + f;
  for (const std::string& m : missing_) missing_text += (missing_text.empty() ? "" : ", ") + m;
  const ModelConfig& c = config();
  return fmt::format(
      "MiniMax-M3 {} parameters, {} layers ({} sparse, {} MoE x {} experts), {} | {}{} | {} threads{} | weights "
      "{} {} "
      "(experts {} all near), KV near | {}",
      survey_.parameters >= 100'000'000 ? fmt::format("{:.1f}B", static_cast<double>(survey_.parameters) / 1e9)
                                        : fmt::format("{:.1f}M", static_cast<double>(survey_.parameters) / 1e6),
      c.layers, c.n_sparse(), c.n_moe(), c.experts, format_text, ops_->name(), options_.precise ? " precise" : "",
      team_->size(), team_->pinned() ? " pinned" : "", format_size(weights_.bytes),
      shared_.segment != nullptr ? shared_.place : "in RAM", format_size(weights_.experts_bytes),
      missing_text.empty() ? "nothing missing" : "missing: " + missing_text);
}

}  // namespace firn::model
