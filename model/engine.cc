#include "model/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "gpu/gpu.h"
#include "model/session_files.h"
#include "runtime/units.h"

namespace firn::model {

Engine::Engine(EngineOptions options) : options_(std::move(options)), budget_("--ram", options_.ram_bytes) {
  if (options_.precise) options_.kv_dtype = DType::kF32;
}

Engine::~Engine() = default;

namespace {

int64_t routed_expert_bytes(const Survey& survey) { return survey.groups[static_cast<size_t>(Group::kExperts)].bytes; }

}  // namespace

Result<std::unique_ptr<Engine>> Engine::open(storage::FileSystem& fs, EngineOptions options) {
  std::unique_ptr<Engine> engine(new Engine(std::move(options)));
  FIRN_TRY(engine->load(fs));
  return engine;
}

Status Engine::load(storage::FileSystem& fs) {
  FIRN_ASSIGN(survey_, Survey::open(fs, options_.model));
  FIRN_TRY(survey_.loadable());
  fs_ = &fs;
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
  placed_ = true;
  load.experts = placement_.expert_slots < 0;
  FIRN_TRY(make_tiers());
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

Status Engine::make_tiers() {
  const bool cached = placement_.expert_slots >= 0;
  const bool far = placement_.kv_limited || options_.sessions;
  if (!cached && !far) return {};
  if (options_.sessions) {
    FIRN_ASSIGN(identity_, session_identity(*fs_, survey_, options_.kv_dtype, options_.precise));
  }
  storage::IoQueueOptions io;
  io.io_uring = options_.io_uring;
  FIRN_ASSIGN(queue_, storage::IoQueue::create(io));
  if (options_.io_uring && !queue_->refusal().empty()) missing_.push_back(queue_->refusal() + "; reads by threads");
  if (cached) {
    storage::PolicyOptions policy;
    policy.name = options_.expert_policy;
    FIRN_ASSIGN(experts_,
                ExpertStore::create(*fs_, survey_, arena_.get(), queue_.get(), placement_.expert_slots, policy));
  }
  if (far) {
    KvTier::Options tier;
    tier.limited = placement_.kv_limited;
    tier.near_bytes = placement_.kv_near_bytes;
    tier.policy.name = "lru";
    tier.dirs = options_.kv_dirs;
    tier.log.disk_limit_bytes = options_.kv_disk_bytes;
    tier.log.compress = options_.kv_compress;
    tier.log.element_bytes = static_cast<int>(dtype_bytes(options_.kv_dtype));
    FIRN_ASSIGN(tier_, KvTier::create(*fs_, arena_.get(), queue_.get(), pools_->layout, std::move(tier)));
    pools_->tier = tier_.get();
  }
  return {};
}

MemoryPlan Engine::plan(int64_t prompt_tokens, int64_t context, const Placement& placement) const {
  const ModelConfig& c = config();
  const KvLayout layout = c.kv_layout(options_.kv_dtype);
  const int64_t wave = options_.wave_tokens > 0 ? std::min(options_.wave_tokens, prompt_tokens) : prompt_tokens;
  MemoryPlan plan;
  for (size_t g = 0; g < survey_.groups.size(); ++g) {
    const bool vision = g >= static_cast<size_t>(Group::kVisionBlocks);
    const bool cached = placement.expert_slots >= 0 && g == static_cast<size_t>(Group::kExperts);
    if (!vision && !cached) plan.weights_bytes += survey_.groups[g].bytes;
  }
  if (placement.expert_slots >= 0) plan.expert_cache_bytes = placement.expert_slots * ExpertStore::slot_bytes(survey_);
  plan.kv_bytes = KvCache::bytes_for(c, layout, context);
  if (placement.kv_limited) {
    plan.kv_bytes += KvCache::working_bytes(c, layout, context, wave) + placement.kv_near_bytes -
                     KvCache::far_bytes_for(c, layout, context);
  }
  plan.wave_bytes = Forward::wave_bytes(c, activation(), wave, 1, placement.hidden_on_disk);
  const int64_t rows = placement.hidden_on_disk ? std::min(wave, Forward::kTileRows) : wave;
  plan.scratch_bytes = ops_->scratch_bytes(Forward::limits(c, rows, context));
  if (placement.expert_slots >= 0 || placement.kv_limited || options_.sessions) {
    plan.scratch_bytes += storage::IoQueueOptions().depth * (storage::IoQueueOptions().part_bytes + 8192);
  }
  return plan;
}

// All near where it fits. Else KV of sparse layers goes far first (it comes back only where the indexer chooses it), to
// a tenth of what is left; then experts, which are read in full every time; then the wave's hidden states.
Status Engine::choose(int64_t prompt_tokens, int64_t context) const {
  const ModelConfig& c = config();
  const KvLayout layout = c.kv_layout(options_.kv_dtype);
  const int64_t limit = budget_.limit_bytes();
  const int64_t slot = c.n_moe() > 0 ? ExpertStore::slot_bytes(survey_) : 0;
  const int64_t all_experts = ExpertStore::n_experts(survey_), experts_bytes = routed_expert_bytes(survey_);
  const int64_t far_bytes = KvCache::far_bytes_for(c, layout, context);
  const int64_t least_near = KvCache::least_near_bytes(c, layout);
  const bool can_cache = all_experts > 2 && slot > 0;
  Placement p;
  if (options_.expert_ram_bytes >= 0 && options_.expert_ram_bytes < experts_bytes && can_cache) {
    p.expert_slots = options_.expert_ram_bytes / slot;
    if (p.expert_slots < 2) {
      return invalid(fmt::format("--expert-ram {}: expected at least two slots of {}, {}",
                                 format_size(options_.expert_ram_bytes), format_size(slot), format_size(2 * slot)));
    }
  }
  if (options_.kv_ram_bytes >= 0 && options_.kv_ram_bytes < far_bytes && c.n_sparse() > 0) {
    if (options_.kv_ram_bytes < least_near) {
      return invalid(fmt::format("--kv-ram {}: one token may need {} blocks of K and V at once: expected at least {}",
                                 format_size(options_.kv_ram_bytes), c.index_heads * c.topk_blocks,
                                 format_size(least_near)));
    }
    p.kv_limited = true;
    p.kv_near_bytes = options_.kv_ram_bytes;
  }
  if (options_.hidden_on_disk.has_value()) p.hidden_on_disk = *options_.hidden_on_disk;
  const auto total = [&] { return plan(prompt_tokens, context, p).total(); };
  const bool wave_given = options_.hidden_on_disk.has_value();
  if (limit >= 0 && total() > limit && options_.kv_ram_bytes < 0 && far_bytes > 0 && !options_.kv_dirs.empty()) {
    p.kv_limited = true;
    p.kv_near_bytes = 0;
    const int64_t left = limit - total();
    p.kv_near_bytes = std::clamp(left / 10, least_near, std::max(far_bytes, least_near));
  }
  if (limit >= 0 && total() > limit && options_.expert_ram_bytes < 0 && can_cache) {
    p.expert_slots = 2;
    if (total() <= limit) {
      p.expert_slots = std::min(all_experts, 2 + (limit - total()) / slot);
    } else if (!wave_given && !options_.kv_dirs.empty()) {
      // Streamed tiles pass all experts of a layer each: those must be there at once, or each tile would read them
      // anew.
      p.hidden_on_disk = true;
      p.expert_slots = c.experts;
      if (total() <= limit) {
        p.expert_slots = std::min(all_experts, c.experts + (limit - total()) / slot);
      } else {
        p.hidden_on_disk = false;
        p.expert_slots = 2;
      }
    }
  } else if (limit >= 0 && total() > limit && !wave_given && !options_.kv_dirs.empty()) {
    p.hidden_on_disk = true;
    if (total() > limit) p.hidden_on_disk = false;
  }
  // A reopened session's blocks come through the near cache even where all would fit.
  if (!p.kv_limited) p.kv_near_bytes = std::max(far_bytes, least_near);
  placement_ = p;
  return {};
}

Status Engine::check_fits(int64_t prompt_tokens, int64_t context) const {
  if (!placed_) FIRN_TRY(choose(prompt_tokens, context));
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
      "{} {}: weights {}, {}K/V and index keys {}, a wave of {} {}, scratch {}; {} allows {}{}, {} short: {}",
      context == 1 ? std::string("even one token of context needs") : fmt::format("{} tokens of context need", context),
      format_size(need.total()), format_size(need.weights_bytes),
      need.expert_cache_bytes > 0 ? fmt::format("expert cache {}, ", format_size(need.expert_cache_bytes)) : "",
      format_size(need.kv_bytes),
      prompt_tokens == 1 ? std::string("one token") : fmt::format("{} tokens", prompt_tokens),
      format_size(need.wave_bytes), format_size(need.scratch_bytes), budget_.name(), format_size(limit),
      options_.ram_reason.empty() ? "" : " (" + options_.ram_reason + ")", format_size(need.total() - limit), advice));
}

TierStats Engine::tier_stats() const {
  TierStats t;
  if (experts_ != nullptr) {
    t.expert_cache = true;
    t.expert = std::as_const(*experts_).cache().stats();
  }
  if (tier_ != nullptr) {
    t.kv_tier = true;
    t.kv = tier_->near().stats();
    t.near_blocks = tier_->near().in_use();
    t.kv_bytes_on_disk = tier_->bytes_on_disk();
    t.kv_bytes_written = tier_->bytes_written();
  }
  if (queue_ != nullptr) t.io = queue_->stats();
  return t;
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
  const std::string experts =
      experts_ == nullptr
          ? fmt::format("experts {} all near", format_size(weights_.experts_bytes))
          : fmt::format("{} of {} experts near in {}, the rest on disk ({})", experts_->cache().n_slots(),
                        ExpertStore::n_experts(survey_),
                        format_size(experts_->cache().n_slots() * experts_->cache().slot_bytes()), queue_->backend());
  std::string kv = "KV near";
  if (placement_.kv_limited) {
    kv = fmt::format("KV {} near, the rest in {} ({})", format_size(placement_.kv_near_bytes),
                     options_.kv_dirs.empty() ? std::string("the session's folder") : options_.kv_dirs.front(),
                     queue_->backend());
  }
  if (placement_.hidden_on_disk) kv += ", hidden states of long prompts on disk";
  return fmt::format(
      "MiniMax-M3 {} parameters, {} layers ({} sparse, {} MoE x {} experts), {} | {}{} | {} threads{} | weights "
      "{} {} ({}), {} | {}",
      survey_.parameters >= 100'000'000 ? fmt::format("{:.1f}B", static_cast<double>(survey_.parameters) / 1e9)
                                        : fmt::format("{:.1f}M", static_cast<double>(survey_.parameters) / 1e6),
      c.layers, c.n_sparse(), c.n_moe(), c.experts, format_text, ops_->name(), options_.precise ? " precise" : "",
      team_->size(), team_->pinned() ? " pinned" : "", format_size(weights_.bytes),
      shared_.segment != nullptr ? shared_.place : "in RAM", experts, kv,
      missing_text.empty() ? "nothing missing" : "missing: " + missing_text);
}

}  // namespace firn::model
