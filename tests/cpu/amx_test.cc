// Products on matrix tiles against the oracle, for every format, and what they promise beyond it.
#include "cpu/amx_gemm.h"
#include "cpu/bf16_dot.h"
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
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{16, 32}, {48, 192}, {208, 96}, {32, 3072}, {80, 800}}) {
      const RandomWeight weight(format, n, k, 7);
      const WeightView w = weight.view();
      for (const int64_t m : {1, 2, 3, 5, 9, 15, 16, 17, 31, 32, 33, 49, 73, 130, 300, 530}) {
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
        // The last row alone: the same bits.
        const ConstMatrixView last = xv.slice_rows(m - 1, 1);
        std::vector<float> few(static_cast<size_t>(n), NAN);
        const MatrixView fv = {few.data(), DType::kF32, 1, n, n, Space::kHost};
        (*ops)->linear({last, std::span(&w, 1), std::span(&fv, 1)});
        CHECK(std::memcmp(few.data(), got.data() + (m - 1) * n, few.size() * 4) == 0);
      }
    }
  }
}

TEST_CASE("bf16 dot products equal the oracle for every format and number of rows", "[amx]") {
  if (!cpu::cpu_features().avx512_bf16 || !cpu::cpu_features().avx512_vbmi) {
    WARN("skipped: this CPU has no AVX512_BF16 or no VBMI");
    return;
  }
  const cpu::Bf16DotKernels& kernels = cpu::bf16_dot_kernels();
  std::vector<float> e8m0(256), e4m3(256);
  for (size_t i = 0; i < 256; ++i) {
    e8m0[i] = e8m0_to_float(static_cast<uint8_t>(i));
    e4m3[i] = e4m3_to_float(static_cast<uint8_t>(i));
  }
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto oracle = cpu::make_reference_ops(&arena);
  for (const WeightFormat format : kAllFormats) {
    if (format == WeightFormat::kF32) continue;
    const int64_t group = weight_scale_group(format);
    for (const int64_t k : {1, 16, 31, 32, 37, 48, 96, 256, 272, 2080, 3072}) {
      if (group != 0 && k % group != 0) continue;
      for (const int64_t n : {1, 4, 7}) {
        const RandomWeight weight(format, n, k, static_cast<uint64_t>(k * 10 + n));
        const WeightView w = weight.view();
        for (int64_t m = 1; m <= 8; ++m) {
          INFO(weight_format_name(format) << " n " << n << " k " << k << " m " << m);
          const auto x = random_rows(m * k, static_cast<uint64_t>(m));
          const int64_t stride = (k + 31) / 32 * 32;
          std::vector<uint16_t> rows(static_cast<size_t>(m * stride));
          for (int64_t r = 0; r < m; ++r) {
            const auto* from = reinterpret_cast<const uint16_t*>(x.data() + r * k);
            auto* to = rows.data() + r * stride;
            if (format == WeightFormat::kNvfp4 || format == WeightFormat::kMxfp4) {
              kernels.order_fp4(from, k, to);
            } else {
              std::copy(from, from + k, to);
            }
          }
          std::vector<float> got(static_cast<size_t>(m * n), NAN), want(got);
          cpu::Bf16DotArgs args;
          const auto* scales = static_cast<const uint8_t*>(w.scales != nullptr ? w.scales : w.data);
          args.w = {static_cast<const uint8_t*>(w.data),
                    scales,
                    weight_data_bytes(format, 1, k),
                    weight_scale_bytes(format, 1, k),
                    n,
                    k,
                    format == WeightFormat::kNvfp4 ? e4m3.data() : e8m0.data()};
          args.x = rows.data();
          args.x_stride = stride;
          args.n_x = m;
          args.out = got.data();
          args.out_stride = n;
          args.out_scale = cpu::kUnit[static_cast<size_t>(format)] * w.tensor_scale;
          kernels.dot[static_cast<size_t>(format)](args);
          const ConstMatrixView xv = {x.data(), DType::kBf16, m, k, k, Space::kHost};
          const MatrixView wv = {want.data(), DType::kF32, m, n, n, Space::kHost};
          oracle->linear({xv, std::span(&w, 1), std::span(&wv, 1)});
          for (int64_t i = 0; i < m * n; ++i) {
            const double size = weight.row_norm(i % n) * row_norm(xv, i / n);
            REQUIRE(close(got[static_cast<size_t>(i)], want[static_cast<size_t>(i)],
                          static_cast<double>(8 + k / 2) * unit(DType::kF32) * size));
          }
        }
      }
    }
  }
}

// Every code under every scale that is not of the least, and both zeros.
TEST_CASE("matrix tiles read every code exactly", "[amx]") {
  if (cpu::cpu_features().best < cpu::Isa::kAmx) {
    WARN("skipped: this CPU has no AMX");
    return;
  }
  Budget budget("test", -1);
  HostArena arena(&budget);
  auto team = ThreadTeam::create(1, {});
  auto ops = cpu::CpuOps::create(team->get(), &arena, cpu::Isa::kAmx);
  REQUIRE(ops.ok());
  const auto oracle = cpu::make_reference_ops(&arena);
  for (const WeightFormat format : {WeightFormat::kMxfp8, WeightFormat::kNvfp4, WeightFormat::kMxfp4}) {
    const int64_t k = 512, n = 256, group = weight_scale_group(format);
    RandomWeight weight(format, n, k, 1);
    const bool fp8 = format == WeightFormat::kMxfp8;
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < (fp8 ? k : k / 2); ++c) {
        const auto code = static_cast<uint8_t>(c % 256);
        weight.data()[r * (fp8 ? k : k / 2) + c] = fp8 && code % 128 == 127 ? uint8_t{1} : code;
      }
      for (int64_t g = 0; g < k / group; ++g) {
        const auto nv = static_cast<uint8_t>(r % 128 == 127 ? 5 : r % 128);
        weight.scales()[r * (k / group) + g] = format == WeightFormat::kNvfp4 ? nv : static_cast<uint8_t>(18 + r % 200);
      }
    }
    // One input at a time, so that the outputs are the weights.
    for (const int64_t m : {1, 2}) {
      int64_t wrong = 0;
      for (int64_t c = 0; c < k; ++c) {
        std::vector<Bf16> x(static_cast<size_t>(m * k));
        for (int64_t i = 0; i < m; ++i) x[static_cast<size_t>(i * k + c)] = to_bf16(1.0f);
        std::vector<float> got(static_cast<size_t>(m * n)), want(got);
        const WeightView w = weight.view();
        const ConstMatrixView xv = {x.data(), DType::kBf16, m, k, k, Space::kHost};
        const MatrixView gv = {got.data(), DType::kF32, m, n, n, Space::kHost};
        const MatrixView wv = {want.data(), DType::kF32, m, n, n, Space::kHost};
        (*ops)->linear({xv, std::span(&w, 1), std::span(&gv, 1)});
        oracle->linear({xv, std::span(&w, 1), std::span(&wv, 1)});
        for (size_t i = 0; i < got.size(); ++i) wrong += got[i] == want[i] ? 0 : 1;
      }
      INFO(weight_format_name(format) << " rows " << m);
      CHECK(wrong == 0);
    }
  }
}

}  // namespace
}  // namespace firn::test
