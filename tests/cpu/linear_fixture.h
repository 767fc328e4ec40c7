// Weights of every format with random contents, thread teams and Ops for the tests of products.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "cpu/linear_products.h"
#include "cpu/reference.h"
#include "tests/support/catch.h"
#include "tests/support/oracle.h"

namespace firn::test {

inline constexpr WeightFormat kAllFormats[] = {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kMxfp8,
                                               WeightFormat::kNvfp4, WeightFormat::kMxfp4};

inline std::vector<cpu::Isa> available_isas() {
  std::vector<cpu::Isa> out;
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    if (isa <= cpu::cpu_features().best) out.push_back(isa);
  }
  return out;
}

// A weight matrix at an odd address, with every code of its format but NaN.
class RandomWeight {
 public:
  RandomWeight(WeightFormat format, int64_t rows, int64_t cols, uint64_t seed, float tensor_scale = 1.0f) {
    std::mt19937_64 rng(seed);
    data_.resize(static_cast<size_t>(weight_data_bytes(format, rows, cols)) + 1);
    scales_.resize(static_cast<size_t>(weight_scale_bytes(format, rows, cols)) + 1);
    const int64_t n = rows * cols;
    std::normal_distribution<float> normal(0.0f, 0.05f);
    uint8_t* const data = data_.data() + 1;
    if (format == WeightFormat::kF32) {
      for (int64_t i = 0; i < n; ++i) {
        const float v = normal(rng);
        std::memcpy(data + i * 4, &v, 4);
      }
    } else if (format == WeightFormat::kBf16) {
      for (int64_t i = 0; i < n; ++i) {
        const Bf16 v = to_bf16(normal(rng));
        std::memcpy(data + i * 2, &v, 2);
      }
    } else {
      for (size_t i = 1; i < data_.size(); ++i) {
        data_[i] = static_cast<uint8_t>(rng());
        if (format == WeightFormat::kMxfp8 && (data_[i] & 0x7F) == 0x7F) data_[i] = 0;
      }
      for (size_t i = 1; i < scales_.size(); ++i) {
        scales_[i] = static_cast<uint8_t>(format == WeightFormat::kNvfp4 ? rng() % 0x7F : 112 + rng() % 12);
      }
    }
    view_ = {format, rows, cols, data, scales_.data() + 1, tensor_scale};
    if (weight_scale_group(format) == 0) view_.scales = nullptr;
  }
  RandomWeight(RandomWeight&&) = default;

  const WeightView& view() const { return view_; }
  uint8_t* scales() { return scales_.data() + 1; }
  uint8_t* data() { return data_.data() + 1; }
  double row_norm(int64_t r) const {
    std::vector<float> row(static_cast<size_t>(view_.cols));
    cpu::reference_dequantise_row(view_, r, row.data());
    double sum = 0;
    for (const float v : row) sum += static_cast<double>(v) * v;
    return std::sqrt(sum);
  }

 private:
  std::vector<uint8_t> data_, scales_;
  WeightView view_;
};

// An Ops with the team, budget and arena it needs.
struct CpuFixture {
  explicit CpuFixture(cpu::Isa isa, int threads = 1, int64_t budget_bytes = -1)
      : budget("test", budget_bytes),
        arena(&budget),
        team(std::move(ThreadTeam::create(threads, {}).value())),
        ops(std::move(cpu::CpuOps::create(team.get(), &arena, isa).value())) {}
  Budget budget;
  HostArena arena;
  std::unique_ptr<ThreadTeam> team;
  std::unique_ptr<cpu::CpuOps> ops;
};

struct ReferenceFixture {
  ReferenceFixture() : budget("test", -1), arena(&budget), ops(cpu::make_reference_ops(&arena)) {}
  Budget budget;
  HostArena arena;
  std::unique_ptr<Ops> ops;
};

}  // namespace firn::test
