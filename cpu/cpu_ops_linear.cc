// CpuOps::linear and CpuOps::mlp: which path each product takes (the rule of cpu_ops.h), and where inputs and
// activations lie between the two halves of an MLP.
#include <algorithm>
#include <cstring>

#include "cpu/amx_gemm.h"
#include "cpu/cpu_ops.h"
#include "cpu/linear_products.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

int64_t padded(int64_t n) { return (n + kXPad - 1) / kXPad * kXPad; }

// VDPBF16PS by vendor: on Zen 4 it does twice the work of a fused multiply-add in its time, on Intel's cores as much.
bool has_bf16_dot(Isa isa) {
  const CpuFeatures& f = cpu_features();
  return isa >= Isa::kAvx512 && f.avx512_bf16 && f.avx512_vbmi && f.vendor == "AuthenticAMD";
}

LinearPath choose_path(Isa isa, DType act, int64_t rows, std::initializer_list<const WeightView*> weights) {
  if (act == DType::kF32) return rows <= kFewRows ? LinearPath::kDot : LinearPath::kDotMany;
  bool stored = true, whole_tiles = isa >= Isa::kAmx;
  for (const WeightView* w : weights) {
    stored = stored && w->format != WeightFormat::kF32;
    whole_tiles = whole_tiles && w->cols % kAmxDims == 0 && w->rows % kAmxRows == 0;
  }
  if (stored && whole_tiles) return LinearPath::kTiles;
  if (rows > kFewRows) return LinearPath::kGemm;
  return stored && has_bf16_dot(isa) ? LinearPath::kBf16Dot : LinearPath::kDot;
}

// f32 weights are never rounded: their products stay f32.
GemmType choose_type(Isa isa, std::initializer_list<WeightFormat> formats) {
  for (const WeightFormat f : formats) {
    if (f == WeightFormat::kF32) return GemmType::kF32;
  }
  return gemm_type(isa);
}

bool wants_float(LinearPath path, GemmType type) {
  if (path == LinearPath::kBf16Dot || path == LinearPath::kTiles) return false;
  return path != LinearPath::kGemm || type == GemmType::kF32;
}

// The view already is what the f32 kernels read.
bool is_padded_float(const ConstMatrixView& x) { return x.dtype == DType::kF32 && x.cols % kXPad == 0; }

void check_input(const ConstMatrixView& x) {
  FIRN_CHECK(x.dtype == DType::kF32 || x.dtype == DType::kBf16, "inputs of products are f32 or bf16");
}

void check_weight(const WeightView& w, int64_t k) {
  FIRN_CHECK(w.cols == k, fmt::format("a weight with {} inputs meets rows of {}", w.cols, k));
  const int64_t group = weight_scale_group(w.format);
  FIRN_CHECK(group == 0 || k % group == 0, fmt::format("{} inputs are no multiple of a scale's {}", k, group));
  FIRN_CHECK(group == 0 || w.scales != nullptr, "a weight has lost its scales");
}

// out row r = both row r + both row (rows + r).
void add_terms(ThreadTeam* team, const MatrixView& both, const MatrixView& out) {
  team->parallel_for(out.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const auto* const high = static_cast<const float*>(both.row(r));
      const auto* const low = static_cast<const float*>(both.row(out.rows + r));
      auto* const to = static_cast<float*>(out.row(r));
      for (int64_t c = 0; c < out.cols; ++c) to[c] = high[c] + low[c];
    }
  });
}

}  // namespace

// x as hi + lo, stacked so that every weight tile is dequantised once for both terms.
Ticket CpuOps::linear_two_terms(const LinearParams& p) {
  const int64_t rows = p.x.rows, cols = p.x.cols;
  int64_t widest = 0;
  for (const MatrixView& out : p.outs) widest = std::max(widest, out.cols);
  auto* const terms = reinterpret_cast<Bf16*>(scratch(kTerms, 2 * rows * cols * 2));
  auto* const sums = reinterpret_cast<float*>(scratch(kTermSums, 2 * rows * widest * 4));
  if (terms == nullptr || sums == nullptr) return done();
  team_->parallel_for(rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const auto* const x = static_cast<const float*>(p.x.row(r));
      for (int64_t c = 0; c < cols; ++c) {
        const Bf16 high = to_bf16(x[c]);
        terms[r * cols + c] = high;
        terms[(rows + r) * cols + c] = to_bf16(x[c] - to_float(high));
      }
    }
  });
  const ConstMatrixView stacked = {terms, DType::kBf16, 2 * rows, cols, cols, Space::kHost};
  for (size_t j = 0; j < p.weights.size(); ++j) {
    const MatrixView out = p.outs[j];
    const MatrixView both = {sums, DType::kF32, 2 * rows, out.cols, out.cols, Space::kHost};
    linear({stacked, p.weights.subspan(j, 1), std::span<const MatrixView>(&both, 1)});
    if (failed()) return done();
    add_terms(team_, both, out);
  }
  return done();
}

Ticket CpuOps::linear(const LinearParams& p) {
  if (failed()) return done();
  FIRN_CHECK(p.weights.size() == p.outs.size(), "one output a weight");
  if (p.x.rows == 0 || p.weights.empty()) return done();
  check_input(p.x);
  if (gemms_ == nullptr) gemms_ = std::make_shared<GemmCache>();
  const LinearContext context = {team_, &linear_kernels(isa_), gemms_.get(),
                                 [this](int64_t bytes) { return scratch(kTiles, bytes); }};
  const bool as_they_are = p.two_terms && p.x.rows > kFewRows;
  if (as_they_are) {
    FIRN_CHECK(p.x.dtype == DType::kF32, "two terms come from f32 inputs");
    if (gemm_type(isa_) == GemmType::kBf16) return linear_two_terms(p);
  }
  std::vector<Product> products;
  bool any_float = false;
  for (size_t j = 0; j < p.weights.size(); ++j) {
    const WeightView& w = p.weights[j];
    const MatrixView& out = p.outs[j];
    check_weight(w, p.x.cols);
    FIRN_CHECK(out.dtype == DType::kF32 && out.rows == p.x.rows && out.cols == w.rows, "output of a product: shape");
    const GemmType type = choose_type(isa_, {w.format});
    const LinearPath path = as_they_are ? LinearPath::kGemm : choose_path(isa_, p.x.dtype, p.x.rows, {&w});
    any_float = any_float || wants_float(path, type);
    products.push_back({w, path, type, nullptr, nullptr, 0, p.x.rows, static_cast<float*>(out.data), out.stride});
  }
  const float* x_f32 = static_cast<const float*>(p.x.data);
  int64_t stride = p.x.stride;
  if (any_float && !is_padded_float(p.x)) {
    stride = padded(p.x.cols);
    auto* const wide = reinterpret_cast<float*>(scratch(kXFloat, p.x.rows * stride * 4));
    if (wide == nullptr) return done();
    widen_rows(context, p.x, wide, stride);
    x_f32 = wide;
  }
  for (Product& product : products) {
    if (wants_float(product.path, product.type)) {
      product.x_f32 = x_f32;
      product.x_stride = stride;
    } else {
      product.x_bf16 = static_cast<const uint16_t*>(p.x.data);
      product.x_stride = p.x.stride;
    }
  }
  const Status status = run_products(context, products);
  return status.ok() || status.code() == Code::kNoMemory ? done() : fail(status);
}

Ticket CpuOps::mlp(const MlpParams& p) {
  if (failed()) return done();
  if (gemms_ == nullptr) gemms_ = std::make_shared<GemmCache>();
  const LinearContext context = {team_, &linear_kernels(isa_), gemms_.get(),
                                 [this](int64_t bytes) { return scratch(kTiles, bytes); }};
  // Rows of tasks that work in float lie one after another in f32 scratch, the others' activations in bf16 scratch.
  struct Plan {
    const MlpTask* task;
    LinearPath path;
    GemmType type;
    bool as_float;
    int64_t x_at, act_at;  // elements
  };
  std::vector<Plan> plans;
  const bool act_f32 = p.x.dtype == DType::kF32;
  int64_t x_floats = 0, act_floats = 0, act_halves = 0;
  for (const MlpTask& task : p.tasks) {
    if (task.n_rows == 0) continue;
    check_input(p.x);
    check_weight(task.gate, p.x.cols);
    check_weight(task.up, p.x.cols);
    check_weight(task.down, task.gate.rows);
    FIRN_CHECK(task.up.rows == task.gate.rows && task.down.rows == p.out.cols, "shapes of an MLP's weights disagree");
    FIRN_CHECK(task.row_begin >= 0 && task.n_rows > 0 && task.row_begin + task.n_rows <= p.x.rows &&
                   task.row_begin + task.n_rows <= p.out.rows && p.out.dtype == DType::kF32,
               "an MLP task's rows lie outside the call's");
    Plan plan = {&task,
                 choose_path(isa_, p.x.dtype, task.n_rows, {&task.gate, &task.up, &task.down}),
                 choose_type(isa_, {task.gate.format, task.up.format, task.down.format}),
                 false,
                 0,
                 0};
    plan.as_float = wants_float(plan.path, plan.type);
    int64_t& acts = plan.as_float ? act_floats : act_halves;
    plan.act_at = acts;
    acts += task.n_rows * padded(task.gate.rows);
    if (plan.as_float && !is_padded_float(p.x)) {
      plan.x_at = x_floats;
      x_floats += task.n_rows * padded(p.x.cols);
    }
    plans.push_back(plan);
  }
  if (plans.empty()) return done();
  auto* const x_wide = reinterpret_cast<float*>(x_floats == 0 ? nullptr : scratch(kXFloat, x_floats * 4));
  auto* const acts_f32 = reinterpret_cast<float*>(act_floats == 0 ? nullptr : scratch(kGateUp, act_floats * 4));
  auto* const acts_bf16 = reinterpret_cast<uint16_t*>(act_halves == 0 ? nullptr : scratch(kAct, act_halves * 2));
  if (failed()) return done();

  std::vector<GatedProduct> gated;
  std::vector<Product> downs;
  for (const Plan& plan : plans) {
    const MlpTask& task = *plan.task;
    const ConstMatrixView x = p.x.slice_rows(task.row_begin, task.n_rows);
    const int64_t act_stride = padded(task.gate.rows);
    GatedProduct g;
    g.gate = {task.gate, plan.path, plan.type, nullptr, nullptr, 0, task.n_rows, nullptr, 0};
    g.up = task.up;
    g.act_stride = act_stride;
    Product down = {task.down, plan.path, plan.type, nullptr, nullptr, act_stride, task.n_rows, nullptr, p.out.stride};
    down.out = static_cast<float*>(p.out.row(task.row_begin));
    if (!plan.as_float) {
      g.gate.x_bf16 = static_cast<const uint16_t*>(x.data);
      g.gate.x_stride = x.stride;
      down.x_bf16 = g.act_bf16 = acts_bf16 + plan.act_at;
    } else {
      if (is_padded_float(x)) {
        g.gate.x_f32 = static_cast<const float*>(x.data);
        g.gate.x_stride = x.stride;
      } else {
        g.gate.x_stride = padded(x.cols);
        widen_rows(context, x, x_wide + plan.x_at, g.gate.x_stride);
        g.gate.x_f32 = x_wide + plan.x_at;
      }
      down.x_f32 = g.act_f32 = acts_f32 + plan.act_at;
      g.round_to_bf16 = !act_f32;
      for (int64_t r = 0; r < task.n_rows; ++r) {
        std::fill(g.act_f32 + r * act_stride + task.gate.rows, g.act_f32 + (r + 1) * act_stride, 0.0f);
      }
    }
    gated.push_back(g);
    downs.push_back(down);
  }
  Status status = run_gated(context, gated, p.activation);
  if (status.ok()) status = run_products(context, downs);
  return status.ok() || status.code() == Code::kNoMemory ? done() : fail(status);
}

}  // namespace firn::cpu
