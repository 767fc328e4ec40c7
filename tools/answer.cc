#include "tools/answer.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "runtime/progress.h"
#include "runtime/units.h"

namespace firn::tools {

std::string clean_text(const std::string& name, std::string_view bytes) {
  const bool utf16 = bytes.substr(0, 2) == "\xFF\xFE" || bytes.substr(0, 2) == "\xFE\xFF";
  if (bytes.substr(0, 3) == "\xEF\xBB\xBF") bytes.remove_prefix(3);
  int64_t replaced = 0;
  std::string text = model::sanitize_utf8(bytes, &replaced);
  if (replaced > 0) {
    const std::string hint = utf16 ? ". It looks like UTF-16: convert it to UTF-8 first" : "";
    std::fprintf(stderr, "firn: %s: %lld invalid UTF-8 sequence%s replaced by U+FFFD%s\n", name.c_str(),
                 static_cast<long long>(replaced), replaced == 1 ? "" : "s", hint.c_str());
  }
  return text;
}

Status drive(model::Generation* generation, const StreamTo& to) {
  std::optional<Progress> progress;
  const int64_t prompt = generation->prompt_tokens();
  if (to.progress) progress.emplace("reading the prompt", prompt, "tokens", false);
  Status status;
  bool thinking_shown = false;
  while (!generation->finished()) {
    if (interrupted().load()) {
      generation->cancel();
      status = cancelled(fmt::format(
          "interrupted after {} of {} prompt tokens and {} answer tokens",
          generation->in_prefill() ? static_cast<int64_t>(generation->prefill_progress() * static_cast<double>(prompt))
                                   : prompt,
          prompt, generation->token_ids().size()));
      break;
    }
    status = generation->step();
    if (!status.ok()) break;
    if (progress.has_value()) {
      if (generation->in_prefill()) {
        progress->update(static_cast<int64_t>(generation->prefill_progress() * static_cast<double>(prompt)));
      } else {
        progress->finish();
        progress.reset();
      }
    }
    for (const model::StreamEvent& event : generation->take_events()) {
      if (event.kind == model::StreamEvent::Kind::kContent && to.text) {
        if (std::exchange(thinking_shown, false)) std::fputs("\n\n", stderr);
        std::fwrite(event.text.data(), 1, event.text.size(), stdout);
        std::fflush(stdout);
      } else if (event.kind == model::StreamEvent::Kind::kReasoning && to.reasoning) {
        std::fwrite(event.text.data(), 1, event.text.size(), stderr);
        thinking_shown = true;
      }
    }
  }
  if (progress.has_value()) progress->finish();
  for (const model::StreamEvent& event : generation->take_events()) {
    if (event.kind == model::StreamEvent::Kind::kContent && to.text) {
      std::fwrite(event.text.data(), 1, event.text.size(), stdout);
    }
  }
  std::fflush(stdout);
  return status;
}

int64_t peak_rss_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

namespace {

// Sums over everything that was fetched on a guess.
storage::CauseStats guesses(const storage::SlotCacheStats& s) {
  storage::CauseStats all;
  for (size_t i = 1; i < static_cast<size_t>(storage::Cause::kCount); ++i) {
    const storage::CauseStats& c = s.cause[i];
    all.loads += c.loads;
    all.bytes += c.bytes;
    all.useful += c.useful;
    all.useful_bytes += c.useful_bytes;
    all.late += c.late;
    all.late_bytes += c.late_bytes;
    all.wasted += c.wasted;
    all.wasted_bytes += c.wasted_bytes;
    all.cancelled += c.cancelled;
  }
  return all;
}

nlohmann::ordered_json tier_json(const storage::SlotCacheStats& s) {
  const storage::CauseStats g = guesses(s);
  return {{"hits", s.hits},
          {"misses", s.misses + s.joined},
          {"demand_bytes", s.cause[0].bytes},
          {"speculative_bytes", g.bytes},
          {"useful_bytes", g.useful_bytes},
          {"late", g.late},
          {"wasted_bytes", g.wasted_bytes},
          {"wait_s", s.wait_seconds},
          {"service_s", s.service_seconds}};
}

std::string tier_line(const char* name, const storage::SlotCacheStats& s) {
  const int64_t asked = s.hits + s.joined + s.misses;
  const double hidden = s.service_seconds > 0 ? std::max(0.0, 1 - s.wait_seconds / s.service_seconds) : 1.0;
  std::string line =
      fmt::format("{}: {} asked for, {:.1f} % there, {} read on demand, {:.0f} % of {:.2f} s of reading hidden", name,
                  asked, asked > 0 ? 100.0 * static_cast<double>(s.hits) / static_cast<double>(asked) : 0.0,
                  format_size(s.cause[0].bytes), 100 * hidden, s.service_seconds);
  for (size_t i = 1; i < static_cast<size_t>(storage::Cause::kCount); ++i) {
    const storage::CauseStats& c = s.cause[i];
    if (c.loads == 0) continue;
    line += fmt::format(" | on {}: {} useful, {} late, {} wasted", storage::cause_name(static_cast<storage::Cause>(i)),
                        c.useful, c.late, c.wasted);
  }
  return line;
}

}  // namespace

std::vector<std::string> tier_lines(const model::Engine& engine) {
  const model::TierStats t = engine.tier_stats();
  std::vector<std::string> lines;
  if (t.expert_cache) lines.push_back(tier_line("experts", t.expert));
  if (t.kv_tier) {
    lines.push_back(tier_line("far KV", t.kv));
    lines.back() +=
        fmt::format(" | {} on disk, {} written", format_size(t.kv_bytes_on_disk), format_size(t.kv_bytes_written));
  }
  return lines;
}

std::vector<std::string> probe_lines(const model::Session& session) {
  std::vector<std::string> lines;
  if (session.forward() == nullptr) return lines;
  for (const auto& [name, probe] :
       {std::pair("experts", &session.forward()->expert_probe()), std::pair("KV", &session.forward()->kv_probe())}) {
    if (!probe->known() || probe->with_guesses() + probe->without_guesses() == 0) continue;
    lines.push_back(fmt::format("guessing {}: {} (lost a token {:.2f} ms with, {:.2f} ms without)", name,
                                probe->paying() ? "pays" : "turned down, it does not pay", probe->with_guesses() * 1e3,
                                probe->without_guesses() * 1e3));
  }
  return lines;
}

nlohmann::ordered_json answer_json(const model::Engine& engine, const model::Generation& g, bool prompt_ids,
                                   const std::vector<int32_t>& prompt) {
  using nlohmann::ordered_json;
  ordered_json j;
  j["text"] = g.text();
  j["reasoning"] = g.reasoning();
  j["tool_calls"] = ordered_json::array();
  for (const model::ToolCall& call : g.tool_calls()) {
    j["tool_calls"].push_back({{"id", call.id},
                               {"type", "function"},
                               {"function", {{"name", call.name}, {"arguments", call.arguments.dump()}}}});
  }
  j["token_ids"] = g.token_ids();
  if (prompt_ids) j["prompt_token_ids"] = prompt;
  j["finish_reason"] = model::finish_name(g.finish());
  const int64_t completion = static_cast<int64_t>(g.token_ids().size());
  j["usage"] = {
      {"prompt_tokens", g.prompt_tokens()}, {"completion_tokens", completion}, {"cached_tokens", g.cached_tokens()}};
  const model::GenerateTimings& t = g.timings();
  const double computed = static_cast<double>(g.prompt_tokens() - g.cached_tokens());
  const double decoded = static_cast<double>(std::max<int64_t>(0, completion - 1));
  j["timings"] = {{"load_s", engine.load_seconds()},
                  {"prefill_s", t.prefill_s},
                  {"prefill_tok_s", t.prefill_s > 0 ? computed / t.prefill_s : 0.0},
                  {"decode_s", t.decode_s},
                  {"decode_tok_s", t.decode_s > 0 ? decoded / t.decode_s : 0.0},
                  {"first_token_s", t.first_token_s}};
  j["logits_xxh3"] = g.logits_xxh3();
  const auto& budget = const_cast<model::Engine&>(engine).budget();
  const model::ModelConfig& c = engine.config();
  const DType kv = engine.options().kv_dtype;
  const int64_t context = g.prompt_tokens() + completion;
  const int64_t sparse_kv = c.layers == 0 ? 0 : c.kv_bytes_per_token(kv) / c.layers * c.n_sparse();
  j["memory"] = {{"peak_rss_bytes", peak_rss_bytes()},
                 {"budget_bytes", budget.limit_bytes()},
                 {"resident_bytes", budget.used_bytes()},
                 {"experts_bytes", engine.survey().groups[static_cast<size_t>(model::Group::kExperts)].bytes},
                 {"kv_bytes", sparse_kv * context}};
  const model::TierStats tiers = engine.tier_stats();
  ordered_json kv_tier = tier_json(tiers.kv);
  const int64_t blocks = (context + c.block_tokens - 1) / c.block_tokens * c.n_sparse() * c.kv_heads;
  const int64_t near = tiers.kv_tier && engine.placement().kv_limited ? std::min(tiers.near_blocks, blocks) : blocks;
  kv_tier["near_blocks"] = near;
  kv_tier["far_blocks"] = blocks - near;
  kv_tier["bytes_on_disk"] = tiers.kv_bytes_on_disk;
  kv_tier["bytes_written"] = tiers.kv_bytes_written;
  j["tiers"] = {{"expert", tier_json(tiers.expert)}, {"kv", kv_tier}};
  return j;
}

std::vector<Evidence> find_evidence(const model::Engine& engine, const model::Generation& g,
                                    const std::vector<int32_t>& prompt, size_t most) {
  const model::ModelConfig& c = engine.config();
  std::map<int64_t, double> weight;
  double total = 0;
  for (size_t step = 0; step < g.attended().size(); ++step) {
    const int64_t own = (g.prompt_tokens() + static_cast<int64_t>(step)) / c.block_tokens;
    const auto& attended = g.attended()[step];
    for (size_t i = 0; i < attended.mass.size(); ++i) {
      const int32_t block = attended.blocks[i / static_cast<size_t>(c.heads_per_group())];
      if (block < 0 || block == own) continue;
      const double mass = attended.mass[i];
      weight[block] += mass * mass;
      total += mass * mass;
    }
  }
  std::vector<std::pair<int64_t, double>> order(weight.begin(), weight.end());
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<Evidence> out;
  for (const auto& [block, squares] : order) {
    if (out.size() == most) break;
    Evidence e;
    e.block = block;
    e.token_begin = block * c.block_tokens;
    e.token_end = std::min<int64_t>(static_cast<int64_t>(prompt.size()), e.token_begin + c.block_tokens);
    if (e.token_begin >= e.token_end) continue;
    e.share = squares / total;
    if (engine.tokenizer() != nullptr) {
      e.text = engine.tokenizer()->decode(std::span(prompt).subspan(e.token_begin, e.token_end - e.token_begin));
    }
    out.push_back(std::move(e));
  }
  return out;
}

}  // namespace firn::tools
