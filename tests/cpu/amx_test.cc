// Products on matrix tiles against the oracle, for every format, and what they promise beyond it.
#include "cpu/amx_gemm.h"
#include "cpu/linear_fixture.h"

namespace firn::test {
namespace {

std::vector<Bf16> random_rows(int64_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<Bf16> out(static_cast<size_t>(n));
  for (Bf16& v : out) v = to_bf16(normal(rng));
  return out;
}

TEST_CASE("matrix tiles equal the oracle at every edge of their tiles", "[amx]") {
  if (cpu::cpu_features().best < cpu::Isa::kAmx) {
    WARN("skipped: this CPU has no AMX");
    return;
  }
  Budget budget("test", -1);
  HostArena arena(&budget);
  auto team = ThreadTeam::create(2, {});
  REQUIRE(team.ok());
  auto ops = cpu::CpuOps::create(team->get(), &arena, cpu::Isa::kAmx);
  REQUIRE(ops.ok());
  const auto oracle = cpu::make_reference_ops(&arena);
  for (const WeightFormat format : kAllFormats) {
    if (format == WeightFormat::kF32) continue;  // f32 weights stay f32
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 32}, {48, 192}, {208, 96}, {32, 3072}}) {
      const RandomWeight weight(format, n, k, 7);
      const WeightView w = weight.view();
      for (const int64_t m : {9, 15, 16, 17, 31, 32, 33, 73, 130, 300}) {
        INFO(weight_format_name(format) << " n " << n << " k " << k << " m " << m);
        const auto x = random_rows(m * k, static_cast<uint64_t>(m));
        std::vector<float> got(static_cast<size_t>(m * n), NAN), want(got);
        const ConstMatrixView xv = {x.data(), DType::kBf16, m, k, k, Space::kHost};
        const MatrixView gv = {got.data(), DType::kF32, m, n, n, Space::kHost};
        const MatrixView wv = {want.data(), DType::kF32, m, n, n, Space::kHost};
        (*ops)->linear({xv, std::span(&w, 1), std::span(&gv, 1)});
        oracle->linear({xv, std::span(&w, 1), std::span(&wv, 1)});
        double worst = 0, largest = 0;
        for (size_t i = 0; i < got.size(); ++i) {
          const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
          if (!(d <= worst)) worst = std::isnan(d) ? HUGE_VAL : d;
          largest = std::max(largest, std::abs(static_cast<double>(want[i])));
        }
        CHECK(worst <= 1e-5 * largest * std::sqrt(static_cast<double>(k)));
        // The first row again among nine rows: the same bits.
        std::vector<float> few(static_cast<size_t>(9 * n), NAN);
        const MatrixView fv = {few.data(), DType::kF32, 9, n, n, Space::kHost};
        (*ops)->linear({xv.slice_rows(0, 9), std::span(&w, 1), std::span(&fv, 1)});
        CHECK(std::memcmp(few.data(), got.data(), few.size() * 4) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace firn::test
