#include "tools/answer.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "runtime/progress.h"

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
                 {"experts_bytes", engine.weights().experts_bytes},
                 {"kv_bytes", sparse_kv * context}};
  // Everything is near: the tiers exist in the output and count nothing.
  const ordered_json none = {{"hits", 0},         {"misses", 0}, {"demand_bytes", 0}, {"speculative_bytes", 0},
                             {"useful_bytes", 0}, {"late", 0},   {"wasted_bytes", 0}, {"wait_s", 0.0}};
  ordered_json kv_tier = none;
  const int64_t blocks = (context + c.block_tokens - 1) / c.block_tokens;
  kv_tier["near_blocks"] = blocks * c.n_sparse() * c.kv_heads;
  kv_tier["far_blocks"] = 0;
  kv_tier["bytes_on_disk"] = 0;
  j["tiers"] = {{"expert", none}, {"kv", kv_tier}};
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
