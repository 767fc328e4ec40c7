// The oracle's matrix products: every weight format decoded element by element, products summed in double.
#include <cmath>

#include "cpu/reference_internal.h"

namespace firn::cpu {
namespace {

// w[r, c] without tensor_scale. Exact in double for every format.
double weight_element(const WeightView& w, int64_t r, int64_t c) {
  const auto* data = static_cast<const uint8_t*>(w.data);
  const auto* scales = static_cast<const uint8_t*>(w.scales);
  switch (w.format) {
    case WeightFormat::kF32:
      return load_element(data, DType::kF32, r * w.cols + c);
    case WeightFormat::kBf16:
      return load_element(data, DType::kBf16, r * w.cols + c);
    case WeightFormat::kMxfp8:
      return static_cast<double>(e4m3_to_float(data[r * w.cols + c])) *
             static_cast<double>(e8m0_to_float(scales[r * (w.cols / 32) + c / 32]));
    case WeightFormat::kNvfp4:
    case WeightFormat::kMxfp4: {
      const uint8_t pair = data[r * (w.cols / 2) + c / 2];
      const double value = e2m1_to_float(static_cast<uint8_t>(c % 2 == 0 ? pair & 15u : pair >> 4));
      const double scale = w.format == WeightFormat::kNvfp4 ? e4m3_to_float(scales[r * (w.cols / 16) + c / 16])
                                                            : e8m0_to_float(scales[r * (w.cols / 32) + c / 32]);
      return value * scale;
    }
  }
  FIRN_CHECK(false, "unknown weight format");
  return 0;
}

std::vector<double> weight_row(const WeightView& w, int64_t r) {
  std::vector<double> out(static_cast<size_t>(w.cols));
  for (int64_t c = 0; c < w.cols; ++c) out[static_cast<size_t>(c)] = weight_element(w, r, c);
  return out;
}

// y[m][r] = tensor_scale * sum_c w[r, c] * x[m][c], unrounded.
std::vector<std::vector<double>> product(const std::vector<std::vector<double>>& x, const WeightView& w) {
  std::vector<std::vector<double>> y(x.size(), std::vector<double>(static_cast<size_t>(w.rows)));
  for (int64_t r = 0; r < w.rows; ++r) {
    const std::vector<double> row = weight_row(w, r);
    for (size_t m = 0; m < x.size(); ++m) {
      FIRN_CHECK(x[m].size() == row.size(), "weight columns and input width differ");
      double sum = 0;
      for (size_t c = 0; c < row.size(); ++c) sum += row[c] * x[m][c];
      y[m][static_cast<size_t>(r)] = sum * static_cast<double>(w.tensor_scale);
    }
  }
  return y;
}

std::vector<std::vector<double>> load_rows(const ConstMatrixView& m, int64_t begin, int64_t n) {
  std::vector<std::vector<double>> out;
  for (int64_t r = begin; r < begin + n; ++r) out.push_back(load_row(m, r));
  return out;
}

void store_rows(const MatrixView& m, int64_t begin, const std::vector<std::vector<double>>& y) {
  for (size_t r = 0; r < y.size(); ++r) {
    for (size_t c = 0; c < y[r].size(); ++c) {
      store_element(m.row(begin + static_cast<int64_t>(r)), m.dtype, static_cast<int64_t>(c), y[r][c]);
    }
  }
}

}  // namespace

void reference_dequantise_row(const WeightView& w, int64_t r, float* out) {
  FIRN_CHECK(r >= 0 && r < w.rows, "row outside the weight");
  for (int64_t c = 0; c < w.cols; ++c) {
    out[c] = static_cast<float>(weight_element(w, r, c) * static_cast<double>(w.tensor_scale));
  }
}

double reference_activation(const Activation& a, double gate, double up) {
  // Written so that NaN passes through the clamps.
  const double limit = a.limit;
  const double g = gate > limit ? limit : gate;
  const double u = up > limit ? limit : up < -limit ? -limit : up;
  return (u + static_cast<double>(a.beta)) * g / (1.0 + std::exp(-static_cast<double>(a.alpha) * g));
}

Ticket ReferenceOps::linear(const LinearParams& p) {
  check_space(p.x, "linear");
  FIRN_CHECK(p.weights.size() == p.outs.size(), "linear: as many outputs as weights are needed");
  const auto x = load_rows(p.x, 0, p.x.rows);
  for (size_t j = 0; j < p.weights.size(); ++j) {
    check_space(p.outs[j], "linear");
    FIRN_CHECK(p.outs[j].rows == p.x.rows && p.outs[j].cols == p.weights[j].rows, "linear: output shape differs");
    store_rows(p.outs[j], 0, product(x, p.weights[j]));
  }
  return done();
}

Ticket ReferenceOps::mlp(const MlpParams& p) {
  check_space(p.x, "mlp");
  check_space(p.out, "mlp");
  for (const MlpTask& task : p.tasks) {
    FIRN_CHECK(task.row_begin >= 0 && task.row_begin + task.n_rows <= p.x.rows, "mlp: rows outside x");
    FIRN_CHECK(p.out.rows == p.x.rows && p.out.cols == task.down.rows, "mlp: output shape differs");
    const auto x = load_rows(p.x, task.row_begin, task.n_rows);
    auto gate = product(x, task.gate);
    const auto up = product(x, task.up);
    for (size_t r = 0; r < gate.size(); ++r) {
      for (size_t i = 0; i < gate[r].size(); ++i) {
        gate[r][i] = round_to(p.x.dtype, reference_activation(p.activation, gate[r][i], up[r][i]));
      }
    }
    store_rows(p.out, task.row_begin, product(gate, task.down));
  }
  return done();
}

}  // namespace firn::cpu
