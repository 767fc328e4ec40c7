// Comparators that NaN cannot pass, tolerances from norms, and owned matrices for kernel tests.
//
// A comparison is ok when `error <= tolerance`, so a NaN or infinite error fails. Where the wanted value is NaN or
// infinite the value found must be the same kind. Tolerances are stated in units of the rounding that the arithmetic
// under test does: unit(dtype) for the stored value, unit(kF32) times a norm for the sums before it.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "runtime/dtype.h"
#include "runtime/ops.h"

namespace firn::test {

struct Match {
  bool ok = true;
  std::string message;  // the worst element, or what is wrong with the shapes
  double worst_error = 0;
};

// True when `got` is `want` within tol: equal values always, NaN only for NaN.
inline bool close(double got, double want, double tol) {
  if (std::isnan(want)) return std::isnan(got);
  if (got == want) return true;
  return std::abs(got - want) <= tol;
}

// Largest relative rounding error of a stored value.
inline double unit(DType dtype) { return dtype == DType::kBf16 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -24); }

// Element (r, c) of a host view as double; F32, BF16 and I32.
inline double element(const ConstMatrixView& m, int64_t r, int64_t c) {
  if (m.dtype == DType::kBf16) return to_float(static_cast<const Bf16*>(m.row(r))[c]);
  if (m.dtype == DType::kI32) return static_cast<const int32_t*>(m.row(r))[c];
  FIRN_CHECK(m.dtype == DType::kF32, "F32, BF16 or I32 expected");
  return static_cast<const float*>(m.row(r))[c];
}

// Euclidean norm of a row.
inline double row_norm(const ConstMatrixView& m, int64_t r) {
  double sum = 0;
  for (int64_t c = 0; c < m.cols; ++c) sum += element(m, r, c) * element(m, r, c);
  return std::sqrt(sum);
}

// Compares element by element with tol(r, c, want).
template <typename Tolerance>
Match compare(const ConstMatrixView& got, const ConstMatrixView& want, Tolerance&& tol) {
  Match match;
  if (got.rows != want.rows || got.cols != want.cols) {
    return {false, fmt::format("shape [{}, {}] instead of [{}, {}]", got.rows, got.cols, want.rows, want.cols),
            HUGE_VAL};
  }
  for (int64_t r = 0; r < want.rows; ++r) {
    for (int64_t c = 0; c < want.cols; ++c) {
      const double g = element(got, r, c), w = element(want, r, c), t = tol(r, c, w);
      const double error = std::abs(g - w);
      if (!std::isnan(error)) match.worst_error = std::max(match.worst_error, error);
      if (close(g, w, t) || !match.ok) continue;
      match.ok = false;
      match.message = fmt::format("[{}, {}] is {} instead of {}: error {} above {}", r, c, g, w, error, t);
    }
  }
  return match;
}

// The usual tolerance: one step of the stored type, plus `sums` fp32 roundings of a value as large as scale(r).
template <typename Scale>
Match compare_rounded(const ConstMatrixView& got, const ConstMatrixView& want, double sums, Scale&& scale) {
  return compare(got, want, [&](int64_t r, int64_t, double w) {
    const double rounding = got.dtype == DType::kBf16 || want.dtype == DType::kBf16 ? 2 * unit(DType::kBf16) : 0;
    return rounding * std::abs(w) + sums * unit(DType::kF32) * scale(r);
  });
}

inline Match compare_absolute(std::span<const float> got, std::span<const float> want, double tol) {
  const auto view = [](std::span<const float> v) {
    return ConstMatrixView{v.data(), DType::kF32, 1, static_cast<int64_t>(v.size()), static_cast<int64_t>(v.size())};
  };
  return compare(view(got), view(want), [&](int64_t, int64_t, double) { return tol; });
}

// A matrix on the host that owns its elements; `pad` extra elements a row hold a pattern that untouched() looks for.
class TestMatrix {
 public:
  TestMatrix(DType dtype, int64_t rows, int64_t cols, int64_t pad = 0)
      : dtype_(dtype), rows_(rows), cols_(cols), stride_(cols + pad), bytes_(rows * (cols + pad) * size(), kPattern) {}

  static TestMatrix random(DType dtype, int64_t rows, int64_t cols, uint64_t seed, double scale = 1.0,
                           int64_t pad = 0) {
    TestMatrix m(dtype, rows, cols, pad);
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) m.set(r, c, static_cast<float>(normal(rng)));
    }
    return m;
  }

  MatrixView view() { return {bytes_.data(), dtype_, rows_, cols_, stride_}; }
  ConstMatrixView view() const { return {bytes_.data(), dtype_, rows_, cols_, stride_}; }
  NormWeight norm_weight(float offset = 1.0f) const { return {bytes_.data(), dtype_, cols_, offset, 1e-6f}; }
  WeightView weight() const {
    FIRN_CHECK(stride_ == cols_, "weights have no padding");
    return {
        dtype_ == DType::kBf16 ? WeightFormat::kBf16 : WeightFormat::kF32, rows_, cols_, bytes_.data(), nullptr, 1.0f};
  }
  double at(int64_t r, int64_t c) const { return element(view(), r, c); }
  void set(int64_t r, int64_t c, float v) {
    if (dtype_ == DType::kBf16) {
      static_cast<Bf16*>(view().row(r))[c] = to_bf16(v);
    } else if (dtype_ == DType::kI32) {
      static_cast<int32_t*>(view().row(r))[c] = static_cast<int32_t>(v);
    } else {
      static_cast<float*>(view().row(r))[c] = v;
    }
  }
  bool padding_untouched() const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t i = cols_ * size(); i < stride_ * size(); ++i) {
        if (bytes_[static_cast<size_t>(r * stride_ * size() + i)] != kPattern) return false;
      }
    }
    return true;
  }
  friend bool operator==(const TestMatrix& a, const TestMatrix& b) { return a.bytes_ == b.bytes_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  static constexpr uint8_t kPattern = 0xA5;
  int64_t size() const { return static_cast<int64_t>(dtype_bytes(dtype_)); }
  DType dtype_;
  int64_t rows_, cols_, stride_;
  std::vector<uint8_t> bytes_;
};

}  // namespace firn::test
