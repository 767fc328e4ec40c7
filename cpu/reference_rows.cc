// The oracle's row operations: embedding, norms, rotary positions, sums, router, combination of experts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu/reference_internal.h"

namespace firn::cpu {
namespace {

// x / sqrt(mean(x^2) + eps) * (offset + w), unrounded.
std::vector<double> rms_norm(const std::vector<double>& x, const NormWeight& weight) {
  FIRN_CHECK(static_cast<int64_t>(x.size()) == weight.n, "norm weight and row differ in width");
  double sum = 0;
  for (const double v : x) sum += v * v;
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + static_cast<double>(weight.eps));
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = load_element(weight.data, weight.dtype, static_cast<int64_t>(i));
    out[i] = x[i] * scale * (static_cast<double>(weight.offset) + w);
  }
  return out;
}

}  // namespace

Ticket ReferenceOps::embed(const EmbedParams& p) {
  check_space(p.out, "embed");
  FIRN_CHECK(p.out.rows == static_cast<int64_t>(p.ids.size()) && p.out.cols == p.table.cols, "embed: shapes differ");
  std::vector<float> row(static_cast<size_t>(p.table.cols));
  for (size_t r = 0; r < p.ids.size(); ++r) {
    FIRN_CHECK(p.ids[r] >= 0 && p.ids[r] < p.table.rows, "embed: token id outside the table");
    reference_dequantise_row(p.table, p.ids[r], row.data());
    void* out = p.out.row(static_cast<int64_t>(r));
    for (int64_t i = 0; i < p.table.cols; ++i) store_element(out, p.out.dtype, i, row[static_cast<size_t>(i)]);
  }
  return done();
}

Ticket ReferenceOps::norm(const NormParams& p) {
  check_space(p.x, "norm");
  check_space(p.out, "norm");
  const int64_t n_out = p.rows.empty() ? p.x.rows : static_cast<int64_t>(p.rows.size());
  FIRN_CHECK(p.out.rows == n_out && p.out.cols == p.x.cols, "norm: shapes differ");
  for (int64_t r = 0; r < n_out; ++r) {
    const int64_t from = p.rows.empty() ? r : p.rows[static_cast<size_t>(r)];
    FIRN_CHECK(from >= 0 && from < p.x.rows, "norm: gathered row outside x");
    const std::vector<double> y = rms_norm(load_row(p.x, from), p.weight);
    for (int64_t i = 0; i < p.x.cols; ++i) store_element(p.out.row(r), p.out.dtype, i, y[static_cast<size_t>(i)]);
  }
  return done();
}

Ticket ReferenceOps::norm_rope(const NormRopeParams& p) {
  for (const NormRopePart& part : p.parts) {
    check_space(part.x, "norm_rope");
    check_space(part.out, "norm_rope");
    FIRN_CHECK(part.x.cols == part.heads * part.dim && part.out.cols == part.x.cols && part.out.rows == part.x.rows,
               "norm_rope: shapes differ");
    FIRN_CHECK(p.rotary_dim % 2 == 0 && p.rotary_dim <= part.dim, "norm_rope: rotary_dim odd or wider than a head");
    const std::vector<int64_t> positions = row_positions(p.spans, part.x.rows);
    const int64_t half = p.rotary_dim / 2;
    std::vector<double> cosines(static_cast<size_t>(half)), sines(cosines);
    for (int64_t r = 0; r < part.x.rows; ++r) {
      const std::vector<double> row = load_row(part.x, r);
      for (int64_t i = 0; i < half; ++i) {
        const double inverse_frequency =
            std::pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.rotary_dim));
        const double angle = static_cast<double>(positions[static_cast<size_t>(r)]) * inverse_frequency;
        cosines[static_cast<size_t>(i)] = std::cos(angle);
        sines[static_cast<size_t>(i)] = std::sin(angle);
      }
      for (int64_t h = 0; h < part.heads; ++h) {
        const auto begin = row.begin() + h * part.dim;
        std::vector<double> y = rms_norm({begin, begin + part.dim}, part.weight);
        for (int64_t i = 0; i < half; ++i) {
          const double c = cosines[static_cast<size_t>(i)], s = sines[static_cast<size_t>(i)];
          const double a = y[static_cast<size_t>(i)], b = y[static_cast<size_t>(i + half)];
          y[static_cast<size_t>(i)] = a * c - b * s;
          y[static_cast<size_t>(i + half)] = b * c + a * s;
        }
        for (int64_t i = 0; i < part.dim; ++i) {
          store_element(part.out.row(r), part.out.dtype, h * part.dim + i, y[static_cast<size_t>(i)]);
        }
      }
    }
  }
  return done();
}

Ticket ReferenceOps::add(const AddParams& p) {
  check_space(p.h, "add");
  check_space(p.y, "add");
  FIRN_CHECK(p.h.rows == p.y.rows && p.h.cols == p.y.cols, "add: shapes differ");
  for (int64_t r = 0; r < p.h.rows; ++r) {
    for (int64_t i = 0; i < p.h.cols; ++i) {
      const double sum = load_element(p.h.row(r), p.h.dtype, i) + load_element(p.y.row(r), p.y.dtype, i);
      store_element(p.h.row(r), p.h.dtype, i, sum);
    }
  }
  return done();
}

// The choice: falling s + bias, ties to the lower id, scores and sums in double from the logit rounded to fp32. A NaN
// logit ranks below every number; when one has to be chosen all the same, its weight is NaN, so that it shows in
// the output. When every chosen score is zero (logits below about -745) the weights are equal.
Ticket ReferenceOps::router(const RouterParams& p) {
  const int64_t n_experts = p.gate.rows;
  check_space(p.x, "router");
  check_space(p.ids, "router");
  FIRN_CHECK(p.x.cols == p.gate.cols && p.topk <= n_experts && p.bias.cols == n_experts, "router: shapes differ");
  std::vector<std::vector<float>> gate(static_cast<size_t>(n_experts));
  for (int64_t e = 0; e < n_experts; ++e) {
    gate[static_cast<size_t>(e)].resize(static_cast<size_t>(p.gate.cols));
    reference_dequantise_row(p.gate, e, gate[static_cast<size_t>(e)].data());
  }
  std::vector<double> s(static_cast<size_t>(n_experts)), choice(s);
  std::vector<int32_t> order(static_cast<size_t>(n_experts));
  for (int64_t r = 0; r < p.x.rows; ++r) {
    const std::vector<double> x = load_row(p.x, r);
    for (size_t e = 0; e < s.size(); ++e) {
      double dot = 0;
      for (size_t i = 0; i < x.size(); ++i) dot += static_cast<double>(gate[e][i]) * x[i];
      const float logit = static_cast<float>(dot);
      if (!p.logits.empty()) store_element(p.logits.row(r), p.logits.dtype, static_cast<int64_t>(e), logit);
      s[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(logit)));
      choice[e] = s[e] + load_element(p.bias.row(0), p.bias.dtype, static_cast<int64_t>(e));
      if (std::isnan(choice[e])) choice[e] = -std::numeric_limits<double>::infinity();
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return choice[static_cast<size_t>(a)] > choice[static_cast<size_t>(b)];
    });
    std::sort(order.begin(), order.begin() + p.topk);
    double sum = 0;
    for (int64_t k = 0; k < p.topk; ++k) sum += s[static_cast<size_t>(order[static_cast<size_t>(k)])];
    int32_t* ids = static_cast<int32_t*>(p.ids.row(r));
    for (int64_t k = 0; k < p.topk; ++k) {
      const int32_t id = order[static_cast<size_t>(k)];
      ids[k] = id;
      const double weight = sum == 0 ? 1.0 / static_cast<double>(p.topk) : s[static_cast<size_t>(id)] / sum;
      store_element(p.weights.row(r), p.weights.dtype, k, weight);
    }
  }
  return done();
}

Ticket ReferenceOps::combine(const CombineParams& p) {
  check_space(p.acc, "combine");
  check_space(p.y, "combine");
  FIRN_CHECK(p.rows.size() == p.weights.size() && p.acc.cols == p.y.cols, "combine: shapes differ");
  FIRN_CHECK(static_cast<int64_t>(p.rows.size()) <= p.y.rows, "combine: more rows named than y has");
  for (size_t i = 0; i < p.rows.size(); ++i) {
    FIRN_CHECK(p.rows[i] >= 0 && p.rows[i] < p.acc.rows, "combine: row outside acc");
    void* acc = p.acc.row(p.rows[i]);
    for (int64_t c = 0; c < p.acc.cols; ++c) {
      const double y = load_element(p.y.row(static_cast<int64_t>(i)), p.y.dtype, c);
      store_element(acc, p.acc.dtype, c, load_element(acc, p.acc.dtype, c) + static_cast<double>(p.weights[i]) * y);
    }
  }
  return done();
}

Ticket ReferenceOps::finish_ffn(const FinishFfnParams& p) {
  check_space(p.h, "finish_ffn");
  for (int64_t r = 0; r < p.h.rows; ++r) {
    for (int64_t c = 0; c < p.h.cols; ++c) {
      double sum = load_element(p.h.row(r), p.h.dtype, c);
      double ffn = 0;
      if (!p.acc.empty()) {
        ffn += static_cast<double>(p.scale) * load_element(p.acc.row(r), p.acc.dtype, c);
        store_element(p.acc.row(r), p.acc.dtype, c, 0);
      }
      if (!p.shared.empty()) ffn += load_element(p.shared.row(r), p.shared.dtype, c);
      sum += ffn;
      store_element(p.h.row(r), p.h.dtype, c, sum);
    }
  }
  return done();
}

}  // namespace firn::cpu
