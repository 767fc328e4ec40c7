// `firn inspect DIR or FILE`: what a checkpoint or packed file holds and would need, from its headers alone.
//
// Exit 0 when firn could load it, 1 when not (everything that stands in the way is named), 2 for wrong use.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "model/weights.h"
#include "runtime/units.h"
#include "storage/file.h"
#include "tools/cli.h"

namespace firn::tools {
namespace {

using model::Group;
using model::Survey;
using Json = nlohmann::ordered_json;

constexpr std::array<int64_t, 3> kContexts = {8192, 131072, 1048576};
constexpr size_t kNamesShown = 20;

std::string joined(const std::vector<std::string>& values) {
  std::string out;
  for (const std::string& v : values) out += (out.empty() ? "" : ", ") + v;
  return out;
}

// "0-2, 5": the layers whose bit is set.
std::string ranges(const std::vector<bool>& bits) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < bits.size(); ++i) {
    if (!bits[i]) continue;
    size_t last = i;
    while (last + 1 < bits.size() && bits[last + 1]) ++last;
    parts.push_back(last == i ? fmt::format("{}", i) : fmt::format("{}-{}", i, last));
    i = last;
  }
  return parts.empty() ? "none" : joined(parts);
}

int64_t text_bytes(const Survey& survey) {
  int64_t bytes = 0;
  for (const model::FoundSlot& f : survey.found) bytes += f.slot->role == model::Role::kVision ? 0 : f.bytes;
  return bytes;
}

struct Need {
  int64_t context, weights, kv, index;
  int64_t total() const { return weights + kv + index; }
};

std::vector<Need> needs(const Survey& survey) {
  std::vector<Need> out;
  const int64_t weights = text_bytes(survey);
  for (const int64_t n : kContexts) {
    out.push_back({n, weights, n * survey.config.kv_bytes_per_token(DType::kBf16),
                   n * survey.config.index_bytes_per_token(DType::kBf16)});
  }
  return out;
}

Json as_json(const Survey& survey, bool loadable) {
  Json out;
  out["parameters"] = survey.parameters;
  out["bytes"] = survey.bytes;
  Json& groups = out["groups"] = Json::object();
  for (size_t g = 0; g < survey.groups.size(); ++g) {
    const Survey::GroupTotal& total = survey.groups[g];
    if (total.bytes == 0) continue;
    groups[model::group_name(static_cast<Group>(g))] = {
        {"parameters", total.parameters}, {"bytes", total.bytes}, {"formats", total.formats}};
  }
  out["missing"] = survey.missing;
  out["unexpected"] = survey.unexpected;
  out["mismatched"] = survey.mismatched;
  out["unsupported"] = survey.unsupported;
  out["ignored"] = survey.ignored;
  out["kv_bytes_per_token"] = survey.config.kv_bytes_per_token(DType::kBf16);
  out["index_bytes_per_token"] = survey.config.index_bytes_per_token(DType::kBf16);
  out["tensors"] = survey.checkpoint.tensors.size();
  out["shards"] = survey.checkpoint.shards.size();
  out["loadable"] = loadable;
  if (survey.checkpoint.packed()) {
    out["packed"] = {{"extents", survey.checkpoint.extents.size()},
                     {"experts_option", survey.checkpoint.experts},
                     {"model_hash", survey.checkpoint.model_hash},
                     {"identity", survey.checkpoint.identity}};
  }
  out["vision"] = survey.has_vision ? "complete" : survey.vision_absent ? "absent" : "incomplete";
  Json& memory = out["memory"] = Json::array();
  for (const Need& need : needs(survey)) {
    memory.push_back({{"context_tokens", need.context},
                      {"weights_bytes", need.weights},
                      {"kv_bytes", need.kv},
                      {"index_bytes", need.index},
                      {"total_bytes", need.total()}});
  }
  return out;
}

void print_config(const model::ModelConfig& c) {
  std::vector<bool> dense_mlp = c.moe_layer, dense_attention = c.sparse_layer;
  dense_mlp.flip();
  dense_attention.flip();
  fmt::print("MiniMax-M3, {} layers, hidden {}, vocabulary {}, up to {} positions\n", c.layers, c.hidden,
             format_count(c.vocab), format_count(c.max_positions));
  fmt::print("  attention   {} query heads, {} key heads, head size {}, {} dimensions rotated, theta {:.0f}\n", c.heads,
             c.kv_heads, c.head_dim, c.rotary_dim, c.rope_theta);
  fmt::print(
      "  sparse      layers {} (full attention: {}); {} of the blocks of {} tokens per key head, index {} x {}\n",
      ranges(c.sparse_layer), ranges(dense_attention), c.topk_blocks, c.block_tokens, c.index_heads, c.index_dim);
  fmt::print("  experts     layers {} (dense MLP of {}: {}); {} experts of {}, {} per token, scaled by {}, shared {}\n",
             ranges(c.moe_layer), c.dense_intermediate, ranges(dense_mlp), c.experts, c.expert_intermediate,
             c.experts_per_token, c.routed_scale,
             c.shared_intermediate == 0 ? "none" : format_count(c.shared_intermediate));
  fmt::print("  activation  swigluoai, alpha {}, beta {}, limit {}\n", c.activation.alpha, c.activation.beta,
             c.activation.limit);
  fmt::print("  declared    quant_method {}\n\n", c.quant_method.empty() ? "none" : "\"" + c.quant_method + "\"");
}

void print_names(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return;
  fmt::print("\n{} ({}):\n", title, names.size());
  for (size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) fmt::print("  {}\n", names[i]);
  if (names.size() > kNamesShown) fmt::print("  and {} more (--json lists all)\n", names.size() - kNamesShown);
}

void print_text(const Survey& survey, const Status& loadable) {
  print_config(survey.config);
  fmt::print("{:<22} {:>18} {:>20} {:>12}  {}\n", "group", "parameters", "bytes", "", "format");
  const auto row = [](const char* name, int64_t parameters, int64_t bytes, const std::string& formats) {
    fmt::print("{:<22} {:>18} {:>20} {:>12}  {}\n", name, format_count(parameters), format_count(bytes),
               format_size(bytes), formats);
  };
  for (size_t g = 0; g < survey.groups.size(); ++g) {
    const Survey::GroupTotal& total = survey.groups[g];
    if (total.bytes > 0)
      row(model::group_name(static_cast<Group>(g)), total.parameters, total.bytes, joined(total.formats));
  }
  row("total", survey.parameters, survey.bytes, "");
  fmt::print("{} tensors in {} files; vision {}\n",
             format_count(static_cast<int64_t>(survey.checkpoint.tensors.size())), survey.checkpoint.shards.size(),
             survey.has_vision      ? "complete (not used by this version)"
             : survey.vision_absent ? "absent"
                                    : "incomplete");

  if (survey.checkpoint.packed()) {
    fmt::print("packed file, {} extents, experts {}, model hash {}\n", survey.checkpoint.extents.size(),
               survey.checkpoint.experts, survey.checkpoint.model_hash);
  }

  fmt::print("\nMemory with every weight and all of K, V and index keys near (bf16; {} + {} bytes a token):\n",
             format_count(survey.config.kv_bytes_per_token(DType::kBf16)),
             format_count(survey.config.index_bytes_per_token(DType::kBf16)));
  fmt::print("{:>12} {:>12} {:>12} {:>12} {:>12}\n", "context", "weights", "K and V", "index keys", "total");
  for (const Need& need : needs(survey)) {
    fmt::print("{:>12} {:>12} {:>12} {:>12} {:>12}{}\n", format_count(need.context), format_size(need.weights),
               format_size(need.kv), format_size(need.index), format_size(need.total()),
               need.context > survey.config.max_positions ? "  (beyond the model's positions)" : "");
  }
  print_names("missing", survey.missing);
  print_names("mismatched", survey.mismatched);
  print_names("not supported", survey.unsupported);
  print_names("unexpected", survey.unexpected);
  if (!survey.ignored.empty()) {
    fmt::print("\n{} tensors are known and not needed (first: {})\n",
               format_count(static_cast<int64_t>(survey.ignored.size())), survey.ignored[0]);
  }
  fmt::print("\n{}\n", loadable.ok() ? "firn can load this checkpoint." : "firn cannot load this checkpoint.");
}

int inspect(const std::string& path, const Globals& globals) {
  const auto survey = Survey::open(storage::FileSystem::real(), path);
  if (!survey.ok()) return report(survey.status());
  const Status loadable = survey->loadable();
  if (globals.json) {
    const std::string text = as_json(*survey, loadable.ok()).dump(2, ' ', false, Json::error_handler_t::replace);
    std::fprintf(stdout, "%s\n", text.c_str());
  } else {
    print_text(*survey, loadable);
  }
  return loadable.ok() ? 0 : report(loadable);
}

}  // namespace

Runner add_inspect(CLI::App& app, const Globals& globals) {
  auto path = std::make_shared<std::string>();
  app.add_option("DIR", *path, "checkpoint folder (config.json and safetensors files), or packed file")->required();
  return [path, &globals] { return inspect(*path, globals); };
}

}  // namespace firn::tools
