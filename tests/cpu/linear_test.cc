// Linear layers: every format, instruction set and path against the scalar oracle, and what must not change a bit.
#include "tests/cpu/linear_fixture.h"

namespace firn::test {
namespace {

TestMatrix run_linear(Ops& ops, const TestMatrix& x, const WeightView& w, int64_t pad = 3) {
  TestMatrix out(DType::kF32, x.view().rows, w.rows, pad);
  const WeightView weights[] = {w};
  const MatrixView outs[] = {out.view()};
  const Status status = ops.wait(ops.linear({x.view(), weights, outs}));
  INFO(status.message());
  REQUIRE(status.ok());
  REQUIRE(out.padding_untouched());
  return out;
}

// K / 16 additions a lane in the dot path; oneDNN's order is its own, so allow one rounding for every two products.
void check_against_oracle(Ops& ops, Ops& oracle, const TestMatrix& x, const RandomWeight& w) {
  const TestMatrix got = run_linear(ops, x, w.view());
  const TestMatrix want = run_linear(oracle, x, w.view());
  std::vector<double> w_norms, x_norms;
  for (int64_t r = 0; r < w.view().rows; ++r) w_norms.push_back(w.row_norm(r));
  for (int64_t m = 0; m < x.view().rows; ++m) x_norms.push_back(row_norm(x.view(), m));
  const double roundings = 8 + static_cast<double>(w.view().cols) / 2;
  for (int64_t m = 0; m < x.view().rows; ++m) {
    for (int64_t r = 0; r < w.view().rows; ++r) {
      const double tol =
          roundings * unit(DType::kF32) * w_norms[static_cast<size_t>(r)] * x_norms[static_cast<size_t>(m)];
      if (!close(got.at(m, r), want.at(m, r), tol)) {
        FAIL("row " << m << ", output " << r << ": " << got.at(m, r) << " instead of " << want.at(m, r) << " +- "
                    << tol);
      }
    }
  }
}

bool same_row(const TestMatrix& a, int64_t ra, const TestMatrix& b, int64_t rb) {
  return std::memcmp(a.view().row(ra), b.view().row(rb), static_cast<size_t>(a.view().cols) * 4) == 0;
}

}  // namespace

TEST_CASE("linear: every format, path and instruction set agrees with the oracle", "[linear]") {
  ReferenceFixture reference;
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture cpu(isa, 2);
    for (const WeightFormat format : kAllFormats) {
      const bool plain = weight_scale_group(format) == 0;
      for (const int64_t k : {int64_t{32}, int64_t{544}, int64_t{37}, int64_t{200}, int64_t{1}, int64_t{48}}) {
        if (!plain && k % weight_scale_group(format) != 0) continue;
        for (const int64_t n : {5, 67}) {
          const RandomWeight w(format, n, k, static_cast<uint64_t>(k * 1000 + n),
                               format == WeightFormat::kNvfp4 ? 0.013f : 1.0f);
          for (const int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 31}) {
            for (const DType act : {DType::kBf16, DType::kF32}) {
              INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format) << " k " << k << " n " << n << " rows "
                                      << rows << ' ' << dtype_name(act));
              const TestMatrix x = TestMatrix::random(act, rows, k, static_cast<uint64_t>(rows), 1.0, 5);
              check_against_oracle(*cpu.ops, *reference.ops, x, w);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("linear: no rows, no weights", "[linear]") {
  CpuFixture cpu(cpu::cpu_features().best);
  const RandomWeight w(WeightFormat::kMxfp8, 5, 64, 1);
  const TestMatrix x(DType::kBf16, 0, 64);
  const TestMatrix out = run_linear(*cpu.ops, x, w.view());
  REQUIRE(out.view().rows == 0);
  REQUIRE(cpu.ops->wait(cpu.ops->linear({x.view(), {}, {}})).ok());
}

TEST_CASE("linear: many rows", "[linear]") {
  ReferenceFixture reference;
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture cpu(isa, 2);
    for (const WeightFormat format : {WeightFormat::kBf16, WeightFormat::kMxfp8}) {
      const RandomWeight w(format, 67, 256, 5);
      for (const int64_t rows : {512, 1039}) {
        if (isa == cpu::Isa::kScalar && rows > 512) continue;
        INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format) << ' ' << rows);
        check_against_oracle(*cpu.ops, *reference.ops, TestMatrix::random(DType::kBf16, rows, 256, 2), w);
        check_against_oracle(*cpu.ops, *reference.ops, TestMatrix::random(DType::kF32, rows, 256, 2), w);
      }
    }
  }
}

TEST_CASE("linear: a row's bits do not depend on the other rows", "[linear]") {
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture cpu(isa, 2);
    for (const WeightFormat format : kAllFormats) {
      const int64_t k = weight_scale_group(format) == 0 ? 203 : 224;
      const RandomWeight w(format, 45, k, 3, 0.7f);
      for (const DType act : {DType::kBf16, DType::kF32}) {
        const int64_t most = act == DType::kF32 ? 77 : cpu::kFewRows;
        const TestMatrix x = TestMatrix::random(act, most, k, 9);
        const TestMatrix all = run_linear(*cpu.ops, x, w.view());
        for (int64_t begin = 0; begin < most; begin += 5) {
          for (const int64_t n : {1, 2, 3, 5, 8, 9, 40}) {
            if (begin + n > most) continue;
            TestMatrix part(act, n, k);
            for (int64_t r = 0; r < n; ++r) {
              for (int64_t c = 0; c < k; ++c) part.set(r, c, static_cast<float>(x.at(begin + r, c)));
            }
            const TestMatrix got = run_linear(*cpu.ops, part, w.view());
            for (int64_t r = 0; r < n; ++r) {
              INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format) << ' ' << dtype_name(act) << " rows "
                                      << begin << " + " << n << ", row " << r);
              REQUIRE(same_row(got, r, all, begin + r));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("linear: the number of threads changes no bit", "[linear]") {
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture one(isa, 1), two(isa, 2), many(isa, 64);
    for (const WeightFormat format : kAllFormats) {
      const RandomWeight w(format, 1500, 512, 3);
      for (const DType act : {DType::kBf16, DType::kF32}) {
        for (const int64_t rows : {1, 8, 70}) {
          if (isa == cpu::Isa::kScalar && rows == 70) continue;
          const TestMatrix x = TestMatrix::random(act, rows, 512, 4);
          const TestMatrix want = run_linear(*one.ops, x, w.view());
          INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format) << ' ' << dtype_name(act) << ' ' << rows);
          REQUIRE(run_linear(*two.ops, x, w.view()) == want);
          REQUIRE(run_linear(*many.ops, x, w.view()) == want);
        }
      }
    }
  }
}

TEST_CASE("linear: several weights in one call give what each gives alone", "[linear]") {
  CpuFixture cpu(cpu::cpu_features().best, 2);
  const RandomWeight a(WeightFormat::kMxfp8, 130, 192, 1), b(WeightFormat::kBf16, 33, 192, 2),
      c(WeightFormat::kF32, 9, 192, 3);
  for (const int64_t rows : {3, 50}) {
    const TestMatrix x = TestMatrix::random(DType::kBf16, rows, 192, 8);
    TestMatrix outs[] = {TestMatrix(DType::kF32, rows, 130, 3), TestMatrix(DType::kF32, rows, 33, 3),
                         TestMatrix(DType::kF32, rows, 9, 3)};
    const WeightView weights[] = {a.view(), b.view(), c.view()};
    const MatrixView views[] = {outs[0].view(), outs[1].view(), outs[2].view()};
    REQUIRE(cpu.ops->wait(cpu.ops->linear({x.view(), weights, views})).ok());
    REQUIRE(outs[0] == run_linear(*cpu.ops, x, a.view()));
    REQUIRE(outs[1] == run_linear(*cpu.ops, x, b.view()));
    REQUIRE(outs[2] == run_linear(*cpu.ops, x, c.view()));
  }
}

// Every code of every format and every scale byte, decoded by each level: bit for bit the exact value in units of
// kUnit.
TEST_CASE("linear: dequantising is exact", "[linear]") {
  for (const cpu::Isa isa : available_isas()) {
    const cpu::LinearKernels& kernels = cpu::linear_kernels(isa);
    for (const WeightFormat format : {WeightFormat::kMxfp8, WeightFormat::kNvfp4, WeightFormat::kMxfp4}) {
      const int64_t k = 256, scales_per_row = k / weight_scale_group(format);
      RandomWeight w(format, 256, k, 6);
      for (int64_t r = 0; r < 256; ++r) {
        for (int64_t s = 0; s < scales_per_row; ++s) {
          // 255 is E8M0's NaN, 0x7F and 0xFF E4M3's.
          w.scales()[r * scales_per_row + s] =
              static_cast<uint8_t>(format == WeightFormat::kNvfp4 ? (r % 128 == 127 ? 5 : r) : r % 255);
        }
      }
      std::vector<float> got(256 * 256), want(256);
      std::vector<float> table(256);
      for (size_t i = 0; i < 256; ++i) {
        table[i] = format == WeightFormat::kNvfp4 ? e4m3_to_float(static_cast<uint8_t>(i))
                                                  : e8m0_to_float(static_cast<uint8_t>(i));
      }
      const int64_t row_bytes = weight_data_bytes(format, 1, k);
      const cpu::WeightRows rows = {w.data(), w.scales(), row_bytes, scales_per_row, 256, k, table.data()};
      kernels.dequantise_f32[static_cast<int>(format)]({rows, got.data(), k});
      const double unit_of = cpu::kUnit[static_cast<int>(format)];
      int64_t wrong = 0;
      for (int64_t r = 0; r < 256; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          double value = 0;
          if (format == WeightFormat::kMxfp8) {
            value = e4m3_to_float(w.data()[r * k + c]);
          } else {
            const uint8_t pair = w.data()[r * row_bytes + c / 2];
            value = e2m1_to_float(static_cast<uint8_t>(c % 2 == 0 ? pair & 15 : pair >> 4));
          }
          value *= static_cast<double>(table[w.scales()[r * scales_per_row + c / weight_scale_group(format)]]);
          wrong += static_cast<double>(got[static_cast<size_t>(r * k + c)]) * unit_of == value ? 0 : 1;
        }
      }
      INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format));
      REQUIRE(wrong == 0);
    }
  }
}

TEST_CASE("linear: a budget too small is refused by name and leaves the object failed", "[linear]") {
  CpuFixture cpu(cpu::cpu_features().best, 1, 1 << 12);
  const RandomWeight w(WeightFormat::kMxfp8, 64, 4096, 3);
  const TestMatrix x = TestMatrix::random(DType::kBf16, 64, 4096, 4);
  TestMatrix out(DType::kF32, 64, 64);
  const WeightView weights[] = {w.view()};
  const MatrixView outs[] = {out.view()};
  const Status status = cpu.ops->wait(cpu.ops->linear({x.view(), weights, outs}));
  REQUIRE(status.code() == Code::kNoMemory);
  REQUIRE(status.message().find("scratch") != std::string::npos);
}

}  // namespace firn::test
