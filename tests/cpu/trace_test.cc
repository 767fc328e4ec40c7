// One layer of the tiny checkpoint, step by step through an Ops, against the recorded intermediates of the reference
// implementation: the first tensor that is off names the step. The same walk runs on the oracle, on the CPU kernels of
// every level, and on a separate memory space.
#include <algorithm>
#include <map>
#include <numeric>

#include "cpu/cpu_ops.h"
#include "cpu/device.h"
#include "cpu/reference.h"
#include "storage/safetensors.h"
#include "support/catch.h"
#include "support/shadow_ops.h"

namespace firn::test {
namespace {

using storage::SafetensorsFile;

constexpr int64_t kHidden = 128, kHeads = 4, kGroups = 2, kDim = 64, kRotary = 32, kIndexHeads = 2, kIndexDim = 64;
constexpr int64_t kBlock = 128, kTopk = 16, kExperts = 8, kPerToken = 4, kWidth = 64;
constexpr double kTheta = 5e6;

std::string fixture(const std::string& name) { return std::string(FIRN_TEST_DATA) + "/fixtures/" + name; }

// The tiny checkpoint's tensors; a layer may lie in two shards.
const std::vector<SafetensorsFile>& shards() {
  static const std::vector<SafetensorsFile> files = [] {
    std::vector<SafetensorsFile> out;
    for (const int i : {1, 2}) {
      out.push_back(
          must_have(SafetensorsFile::read(fixture(fmt::format("tiny-bf16/model-0000{}-of-00003.safetensors", i)))));
    }
    return out;
  }();
  return files;
}

struct Tensor {
  const std::byte* data;
  DType dtype;
  int64_t rows, cols;
};

Tensor tensor(const std::string& name) {
  for (const SafetensorsFile& file : shards()) {
    if (const storage::TensorInfo* info = file.find(name); info != nullptr) {
      const bool vector = info->shape.size() == 1;
      return {file.data(name), info->dtype, vector ? 1 : info->shape[0], info->shape.back()};
    }
  }
  FIRN_CHECK(false, "no tensor " + name);
  return {};
}

// A recorded trace, and the differences found so far.
class Trace {
 public:
  explicit Trace(const std::string& name)
      : file_(must_have(SafetensorsFile::read(fixture("trace/" + name + ".safetensors")))) {
    positions_ = values<int32_t>("positions");
    n_ = file_.find("input")->shape[0];
  }
  template <typename T>
  std::vector<T> values(const std::string& name) const {
    const storage::TensorInfo* info = file_.find(name);
    FIRN_CHECK(info != nullptr, "no tensor " + name);
    std::vector<T> out(static_cast<size_t>(info->elements()));
    std::memcpy(out.data(), file_.data(name), static_cast<size_t>(info->bytes));
    return out;
  }
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  int64_t n() const { return n_; }
  const std::vector<int32_t>& positions() const { return positions_; }
  void check(const std::string& name, const std::vector<float>& got, double tol) const {
    const Match match = compare_absolute(got, values<float>(name), tol);
    INFO(name << ": " << match.message);
    CHECK(match.ok);
  }

 private:
  SafetensorsFile file_;
  std::vector<int32_t> positions_;
  int64_t n_ = 0;
};

class Layer {
 public:
  Layer(Ops* ops, int layer) : device_(ops), prefix_(fmt::format("language_model.model.layers.{}.", layer)) {}

  WeightView weight(const std::string& name) {
    const Tensor t = tensor(prefix_ + name);
    held_.push_back(device_.put(t.data, t.dtype, t.rows, t.cols));
    const MatrixView& m = held_.back().view;
    return {t.dtype == DType::kBf16 ? WeightFormat::kBf16 : WeightFormat::kF32,
            m.rows,
            m.cols,
            m.data,
            nullptr,
            1.0f,
            m.space};
  }
  NormWeight norm_weight(const std::string& name) {
    const Tensor t = tensor(prefix_ + name);
    held_.push_back(device_.put(t.data, t.dtype, 1, t.cols));
    return {held_.back().view.data, t.dtype, t.cols, 1.0f, 1e-6f};
  }
  MatrixView f32(int64_t rows, int64_t cols) {
    held_.push_back(device_.matrix(DType::kF32, rows, cols));
    return held_.back().view;
  }
  MatrixView put(const std::vector<float>& v, int64_t cols) {
    held_.push_back(device_.put(v.data(), DType::kF32, static_cast<int64_t>(v.size()) / cols, cols));
    return held_.back().view;
  }
  MatrixView norm(const MatrixView& x, const std::string& name, std::span<const int32_t> rows = {}) {
    const MatrixView out = f32(rows.empty() ? x.rows : static_cast<int64_t>(rows.size()), x.cols);
    ops().norm({x, rows, norm_weight(name), out});
    return out;
  }
  MatrixView linear(const MatrixView& x, const WeightView& w) {
    const MatrixView out = f32(x.rows, w.rows);
    ops().linear({x, {&w, 1}, {&out, 1}});
    return out;
  }
  // Norm per head and rotation; rotary 0 leaves the rotation out.
  MatrixView norm_rope(const MatrixView& x, int64_t heads, const std::string& name, std::span<const KvSpan> spans,
                       int64_t rotary) {
    const MatrixView out = f32(x.rows, x.cols);
    const NormRopePart part{x, heads, x.cols / heads, norm_weight(name), out};
    ops().norm_rope({{&part, 1}, spans, rotary, kTheta});
    return out;
  }
  MatrixView mlp(const MatrixView& x, std::span<const MlpTask> tasks) {
    const MatrixView out = f32(x.rows, tasks[0].down.rows);
    ops().mlp({x, tasks, Activation{}, out});
    return out;
  }
  std::vector<float> get(const MatrixView& m) { return device_.get<float>(m); }
  std::vector<int32_t> get_ids(const MatrixView& m) { return device_.get<int32_t>(m); }
  std::vector<float> get_rows(const MatrixView& m, const std::vector<int32_t>& rows) {
    const std::vector<float> all = get(m);
    std::vector<float> out;
    for (const int32_t r : rows) out.insert(out.end(), all.begin() + r * m.cols, all.begin() + (r + 1) * m.cols);
    return out;
  }
  MatrixView i32(int64_t rows, int64_t cols) {
    held_.push_back(device_.matrix(DType::kI32, rows, cols));
    return held_.back().view;
  }
  Device& device() { return device_; }
  Ops& ops() { return device_.ops(); }

 private:
  Device device_;
  std::string prefix_;
  std::vector<DeviceMatrix> held_;
};

void check_moe(Layer& layer, const Trace& trace, const MatrixView& h) {
  const int64_t n_rows = h.rows;
  const MatrixView x = layer.norm(h, "post_attention_layernorm.weight");
  trace.check("x_ffn", layer.get(x), 1e-3);
  const Tensor bias = tensor("language_model.model.layers.2.block_sparse_moe.e_score_correction_bias");
  std::vector<float> bias_values(static_cast<size_t>(bias.cols));
  std::memcpy(bias_values.data(), bias.data, bias_values.size() * 4);
  const MatrixView ids = layer.i32(n_rows, kPerToken), weights = layer.f32(n_rows, kPerToken);
  const MatrixView logits = layer.f32(n_rows, kExperts);
  layer.ops().router({x, layer.weight("block_sparse_moe.gate.weight"), layer.put(bias_values, kExperts), kPerToken, ids,
                      weights, logits});
  trace.check("router_logits", layer.get(logits), 3e-4);
  const std::vector<int32_t> got_ids = layer.get_ids(ids);
  const std::vector<float> got_weights = layer.get(weights);
  const auto want_ids = trace.values<int32_t>("expert_ids");
  const auto want_weights = trace.values<float>("expert_weights");
  // The trace lists experts by falling score, Ops by ascending id: place[i] = where the i-th of ours stands there.
  std::vector<size_t> place(got_ids.size());
  for (size_t i = 0; i < got_ids.size(); ++i) {
    const size_t row = i / kPerToken * kPerToken;
    const auto begin = want_ids.begin() + static_cast<int64_t>(row);
    place[i] = row + static_cast<size_t>(std::find(begin, begin + kPerToken, got_ids[i]) - begin);
    REQUIRE(place[i] < row + kPerToken);
    CHECK(close(got_weights[i], want_weights[place[i]], 2e-4));
    if (i % kPerToken != 0) CHECK(got_ids[i] > got_ids[i - 1]);
  }

  // Rows grouped by expert, ascending; then the same experts with an identity for w2, which shows the activation.
  std::vector<int32_t> rows;
  std::vector<float> row_weights;
  std::vector<size_t> source;
  std::vector<MlpTask> tasks, bare;
  std::vector<float> identity(kWidth * kWidth, 0.0f);
  for (int64_t i = 0; i < kWidth; ++i) identity[static_cast<size_t>(i * kWidth + i)] = 1.0f;
  const MatrixView eye = layer.put(identity, kWidth);
  for (int32_t e = 0; e < kExperts; ++e) {
    MlpTask task;
    task.id = e;
    task.row_begin = static_cast<int64_t>(rows.size());
    for (size_t i = 0; i < got_ids.size(); ++i) {
      if (got_ids[i] != e) continue;
      rows.push_back(static_cast<int32_t>(i / kPerToken));
      row_weights.push_back(got_weights[i]);
      source.push_back(place[i]);
    }
    task.n_rows = static_cast<int64_t>(rows.size()) - task.row_begin;
    if (task.n_rows == 0) continue;
    const std::string name = fmt::format("block_sparse_moe.experts.{}.", e);
    task.gate = layer.weight(name + "w1.weight");
    task.up = layer.weight(name + "w3.weight");
    task.down = layer.weight(name + "w2.weight");
    tasks.push_back(task);
    task.down = {WeightFormat::kF32, kWidth, kWidth, eye.data, nullptr, 1.0f, eye.space};
    bare.push_back(task);
  }
  const MatrixView grouped = layer.norm(h, "post_attention_layernorm.weight", rows);
  const auto in_trace_order = [&](const MatrixView& m) {
    const std::vector<float> ours = layer.get(m);
    std::vector<float> out(ours.size());
    for (size_t i = 0; i < source.size(); ++i) {
      std::copy_n(ours.begin() + static_cast<int64_t>(i) * m.cols, m.cols,
                  out.begin() + static_cast<int64_t>(source[i]) * m.cols);
    }
    return out;
  };
  trace.check("expert_act", in_trace_order(layer.mlp(grouped, bare)), 1e-3);
  const MatrixView y = layer.mlp(grouped, tasks);
  trace.check("expert_out", in_trace_order(y), 1e-3);

  const MatrixView acc = layer.f32(n_rows, kHidden);
  layer.ops().zero(acc.data, n_rows * kHidden * 4);
  layer.ops().combine({acc, y, rows, row_weights});
  std::vector<float> routed = layer.get(acc);
  for (float& v : routed) v *= 2.0f;
  trace.check("routed", routed, 1e-3);
  MlpTask shared;
  shared.gate = layer.weight("block_sparse_moe.shared_experts.gate_proj.weight");
  shared.up = layer.weight("block_sparse_moe.shared_experts.up_proj.weight");
  shared.down = layer.weight("block_sparse_moe.shared_experts.down_proj.weight");
  shared.n_rows = n_rows;
  const MatrixView shared_out = layer.mlp(x, {&shared, 1});
  trace.check("shared_out", layer.get(shared_out), 1e-3);
  layer.ops().finish_ffn({h, acc, shared_out, 2.0f});
  trace.check("output", layer.get(h), 1e-3);
  for (const float v : layer.get(acc)) CHECK(v == 0.0f);
}

void check_dense_mlp(Layer& layer, const Trace& trace, const MatrixView& h) {
  const MatrixView x = layer.norm(h, "post_attention_layernorm.weight");
  trace.check("x_ffn", layer.get(x), 1e-3);
  MlpTask task;
  task.gate = layer.weight("mlp.gate_proj.weight");
  task.up = layer.weight("mlp.up_proj.weight");
  task.down = layer.weight("mlp.down_proj.weight");
  task.n_rows = h.rows;
  trace.check("mlp_gate", layer.get(layer.linear(x, task.gate)), 1e-3);
  trace.check("mlp_up", layer.get(layer.linear(x, task.up)), 1e-3);
  const MatrixView out = layer.mlp(x, {&task, 1});
  trace.check("ffn_out", layer.get(out), 1e-3);
  layer.ops().finish_ffn({h, {}, out, 1.0f});
  trace.check("output", layer.get(h), 1e-3);
}

void walk(Ops* ops, const std::string& name, int layer_id) {
  INFO(ops->name() << " " << name);
  const bool sparse = layer_id > 0;
  const Trace trace(name);
  Layer layer(ops, layer_id);
  const int64_t n = trace.n();
  const std::vector<int32_t>& positions = trace.positions();
  const auto n_rows = static_cast<int64_t>(positions.size());
  const KvLayout layout{DType::kF32, kBlock, kGroups, kDim, sparse ? kIndexDim : 0};
  const DeviceKv kv(layer.device(), layout, n);
  const std::vector<KvSpan> all{kv.span(0, n, 0)};
  std::vector<KvSpan> some;
  for (int64_t i = 0; i < n_rows; ++i) some.push_back(kv.span(i, 1, positions[static_cast<size_t>(i)]));

  // Keys, values and index keys of every position.
  const MatrixView input = layer.put(trace.values<float>("input"), kHidden);
  const MatrixView x_all = layer.norm(input, "input_layernorm.weight");
  const MatrixView k_raw = layer.linear(x_all, layer.weight("self_attn.k_proj.weight"));
  const MatrixView v = layer.linear(x_all, layer.weight("self_attn.v_proj.weight"));
  const MatrixView k = layer.norm_rope(k_raw, kGroups, "self_attn.k_norm.weight", all, kRotary);
  const bool kv_everywhere = n == 300;
  trace.check("x_attn", layer.get_rows(x_all, positions), 1e-3);
  trace.check("k_norm", layer.get_rows(layer.norm_rope(k_raw, kGroups, "self_attn.k_norm.weight", all, 0), positions),
              1e-3);
  trace.check("k_rope", kv_everywhere ? layer.get(k) : layer.get_rows(k, positions), 1e-3);
  trace.check("v", kv_everywhere ? layer.get(v) : layer.get_rows(v, positions), 1e-3);
  ops->kv_append({k, v, all, layout});

  // Queries at the recorded positions.
  const MatrixView x = layer.norm(input, "input_layernorm.weight", positions);
  const MatrixView q_raw = layer.linear(x, layer.weight("self_attn.q_proj.weight"));
  const MatrixView q = layer.norm_rope(q_raw, kHeads, "self_attn.q_norm.weight", some, kRotary);
  trace.check("q_norm", layer.get(layer.norm_rope(q_raw, kHeads, "self_attn.q_norm.weight", some, 0)), 1e-3);
  trace.check("q_rope", layer.get(q), 1e-3);

  MatrixView block_ids;
  if (sparse) {
    const MatrixView ik_raw = layer.linear(x_all, layer.weight("self_attn.index_k_proj.weight"));
    const MatrixView ik = layer.norm_rope(ik_raw, 1, "self_attn.index_k_norm.weight", all, kRotary);
    trace.check("index_k_norm",
                layer.get_rows(layer.norm_rope(ik_raw, 1, "self_attn.index_k_norm.weight", all, 0), positions), 1e-3);
    trace.check("index_k_rope", layer.get(ik), 1e-3);
    ops->index_append({ik, all, layout});
    const MatrixView iq_raw = layer.linear(x, layer.weight("self_attn.index_q_proj.weight"));
    const MatrixView iq = layer.norm_rope(iq_raw, kIndexHeads, "self_attn.index_q_norm.weight", some, kRotary);
    trace.check("index_q_norm",
                layer.get(layer.norm_rope(iq_raw, kIndexHeads, "self_attn.index_q_norm.weight", some, 0)), 1e-3);
    trace.check("index_q_rope", layer.get(iq), 1e-3);
    const int64_t n_blocks = (n + kBlock - 1) / kBlock;
    const MatrixView scores = layer.f32(n_rows, kIndexHeads * n_blocks);
    ops->block_scores({iq, kIndexHeads, some, layout, scores});
    trace.check("block_scores", layer.get(scores), 1.5e-3);
    block_ids = layer.i32(n_rows, kGroups * kTopk);
    ops->index_select({iq, kIndexHeads, some, layout, kTopk, 0, 1, block_ids});
    CHECK(layer.get_ids(block_ids) == trace.values<int32_t>("block_ids"));
  }

  const MatrixView heads = layer.f32(n_rows, kHeads * kDim);
  const AttentionParams attention{q, kHeads / kGroups, some, layout, 0.125f, block_ids, sparse ? kTopk : 0, heads};
  ops->attention(attention);
  const std::vector<float> whole = layer.get(heads);
  trace.check("attn_heads", whole, 1e-3);
  if (sparse) {
    // The same from per-block partials, computed in two calls and merged: the same bits.
    const MatrixView partials = layer.f32(n_rows * kHeads, kTopk * (kDim + 2));
    for (const int32_t half : {0, 1}) {
      std::vector<int32_t> only(static_cast<size_t>(n_rows * kGroups * kTopk));
      for (size_t i = 0; i < only.size(); ++i) only[i] = static_cast<int32_t>(i) % 2 == half ? 1 : 0;
      const MatrixView mask = layer.i32(n_rows, kGroups * kTopk);
      layer.device().upload(mask.data, only.data(), static_cast<int64_t>(only.size() * 4));
      ops->attention_partial({attention, mask, partials});
    }
    const MatrixView merged = layer.f32(n_rows, kHeads * kDim);
    ops->attention_merge({partials, block_ids, kGroups, kHeads / kGroups, kDim, kTopk, merged});
    CHECK(layer.get(merged) == whole);
  }
  const MatrixView attn_out = layer.linear(heads, layer.weight("self_attn.o_proj.weight"));
  trace.check("attn_out", layer.get(attn_out), 1e-3);

  // The residual of the recorded positions.
  std::vector<float> residual;
  const std::vector<float> all_input = trace.values<float>("input");
  for (const int32_t p : positions) {
    residual.insert(residual.end(), all_input.begin() + p * kHidden, all_input.begin() + (p + 1) * kHidden);
  }
  const MatrixView h = layer.put(residual, kHidden);
  ops->add({h, attn_out});
  trace.check("after_attn", layer.get(h), 1e-3);
  if (sparse) {
    check_moe(layer, trace, h);
  } else {
    check_dense_mlp(layer, trace, h);
  }
}

void walk_all(Ops* ops) {
  walk(ops, "p300_layer0", 0);
  walk(ops, "p300_layer2", 2);
  walk(ops, "p2500_layer2", 2);
}

TEST_CASE("the oracle walks the recorded layers") {
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto ops = cpu::make_reference_ops(&arena);
  walk_all(ops.get());
}

TEST_CASE("the oracle walks the recorded layers in a separate memory space") {
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto ops = cpu::make_reference_ops(&arena);
  ShadowOps shadow(ops.get(), &budget, nullptr, 7);
  walk_all(&shadow);
  CHECK(shadow.ran_early() > 0);
}

TEST_CASE("CPU kernels of every level walk the recorded layers") {
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto team = must_have(ThreadTeam::create(2, {}));
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    if (isa > cpu::cpu_features().best) continue;
    const auto ops = must_have(cpu::CpuOps::create(team.get(), &arena, isa));
    walk_all(ops.get());
    ShadowOps shadow(ops.get(), &budget, nullptr, 11);
    walk_all(&shadow);
  }
}

}  // namespace
}  // namespace firn::test
