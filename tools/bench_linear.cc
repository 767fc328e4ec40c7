// firn bench linear: the projections of a layer at M3's shapes, weights rotating over 1.5 GiB or more.
#include <fmt/format.h>

#include <algorithm>

#include "tools/bench.h"

namespace firn::tools {
namespace {

struct Layer {
  const char* name;
  int64_t inputs;
  std::vector<int64_t> outputs;  // one call; the weights share the input
};

// 64 query and 4 KV heads of 128, 4 index heads of 128 and one index key.
const Layer kLayers[] = {
    {"q", 6144, {8192}},
    {"k+v", 6144, {512, 512}},
    {"index q+k", 6144, {512, 128}},
    {"q+k+v+index", 6144, {8192, 512, 512, 512, 128}},
    {"o", 8192, {6144}},
    {"shared gate+up", 6144, {3072, 3072}},
    {"shared down", 3072, {6144}},
    {"lm_head", 6144, {200064}},
};

Status bench_layer(BenchContext& context, RotatingWeights& weights, const Layer& layer, WeightFormat format,
                   int64_t tokens) {
  int64_t outputs = 0, bytes = 0;
  for (const int64_t n : layer.outputs) {
    outputs += n;
    bytes += weight_data_bytes(format, n, layer.inputs) + weight_scale_bytes(format, n, layer.inputs);
  }
  FIRN_ASSIGN(const Buffer x, context.arena().allocate(tokens * layer.inputs * 2, "bench linear: inputs"));
  FIRN_ASSIGN(const Buffer y, context.arena().allocate(tokens * outputs * 4, "bench linear: outputs"));
  fill_random_bf16(x.as<Bf16>(), tokens * layer.inputs, 3);
  const ConstMatrixView input = {x.data(), DType::kBf16, tokens, layer.inputs, layer.inputs};
  Status failure;
  BenchRow row;
  row.bytes = bytes;
  row.flops = 2 * tokens * outputs * layer.inputs;
  const int64_t calls = std::clamp<int64_t>((int64_t{256} << 20) / bytes, 1, tokens <= 8 ? 64 : 2);
  std::vector<WeightView> views(layer.outputs.size());
  std::vector<MatrixView> outs(layer.outputs.size());
  row.time = time_runs(context.options().runs, calls, [&](int64_t) {
    int64_t at = 0;
    for (size_t j = 0; j < views.size(); ++j) {
      views[j] = weights.next(layer.outputs[j], layer.inputs);
      outs[j] = {y.as<float>() + at, DType::kF32, tokens, layer.outputs[j], layer.outputs[j]};
      at += tokens * layer.outputs[j];
    }
    const Status status = context.ops().wait(context.ops().linear({input, views, outs}));
    if (!status.ok()) failure = status;
  });
  if (!failure.ok()) return failure;
  row.bench = "linear";
  row.shape = fmt::format("{} {} tokens {}", weight_format_name(format), layer.name, tokens);
  FIRN_TRY(context.set_lower_limit(row));
  context.emit(row);
  return {};
}

}  // namespace

Status bench_linear(BenchContext& context) {
  std::vector<std::string> formats = context.options().formats;
  if (formats.empty()) formats = {"mxfp8", "bf16"};
  std::vector<int64_t> tokens = context.options().tokens;
  if (tokens.empty()) tokens = {1, 4, 32, 512};
  FIRN_TRY(context.memory_limit().status());
  for (const std::string& name : formats) {
    FIRN_ASSIGN(const WeightFormat format, parse_weight_format(name));
    FIRN_ASSIGN(RotatingWeights weights, RotatingWeights::create(context, format));
    for (const int64_t n : tokens) {
      for (const Layer& layer : kLayers) {
        if (interrupted()) return cancelled("bench linear interrupted");
        // Logits are wanted of a few positions only.
        if (n > 32 && layer.outputs.front() > 100000) continue;
        FIRN_TRY(bench_layer(context, weights, layer, format, n));
      }
    }
  }
  return {};
}

}  // namespace firn::tools
