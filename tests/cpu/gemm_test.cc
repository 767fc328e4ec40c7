// The oneDNN wrapper: row pieces, strides, and that a product is computed by the calling thread alone.
#include "cpu/gemm.h"

#include <omp.h>

#include <numeric>

#include "tests/cpu/linear_fixture.h"

namespace firn::test {

TEST_CASE("gemm: row pieces cover every row with known sizes and little is computed twice", "[gemm]") {
  for (int64_t rows = cpu::kMinGemmRows; rows < 2200; ++rows) {
    int64_t covered = 0, computed = 0;
    for (const cpu::RowPiece& piece : cpu::row_pieces(rows)) {
      REQUIRE(piece.rows <= cpu::kGemmRows);
      REQUIRE((rows <= cpu::kGemmRows || piece.rows % cpu::kGemmRowStep == 0));
      REQUIRE(piece.begin >= 0);
      REQUIRE(piece.begin <= covered);
      REQUIRE(piece.begin + piece.rows > covered);
      covered = piece.begin + piece.rows;
      computed += piece.rows;
    }
    REQUIRE(covered == rows);
    REQUIRE(computed < rows + cpu::kGemmRowStep);
  }
}

TEST_CASE("gemm: strides, types and odd shapes", "[gemm]") {
  cpu::GemmCache cache;
  for (const cpu::GemmType type : {cpu::GemmType::kF32, cpu::GemmType::kBf16}) {
    if (type == cpu::GemmType::kBf16 && cpu::cpu_features().best < cpu::Isa::kAvx512) continue;
    const DType dtype = type == cpu::GemmType::kBf16 ? DType::kBf16 : DType::kF32;
    for (const int64_t m : {8, 16, 128}) {
      for (const int64_t n : {1, 33, 128}) {
        for (const int64_t k : {1, 37, 200, 512}) {
          const TestMatrix a = TestMatrix::random(dtype, m, k, 1, 1.0, 7),
                           b = TestMatrix::random(dtype, n, k, 2, 1.0, 32);
          TestMatrix c(DType::kF32, m, n, 5);
          const auto kernel = cache.find({type, m, n, k, k + 7, k + 32, n + 5});
          INFO(m << " x " << n << " x " << k << ' ' << dtype_name(dtype) << ' ' << kernel.status().message());
          REQUIRE(kernel.ok());
          std::vector<std::byte> pad(static_cast<size_t>((*kernel)->scratchpad_bytes()) + 64);
          (*kernel)->run(a.view().data, b.view().data, static_cast<float*>(c.view().data), pad.data());
          REQUIRE(c.padding_untouched());
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double want = 0, size = 0;
              for (int64_t l = 0; l < k; ++l) {
                want += a.at(i, l) * b.at(j, l);
                size += std::abs(a.at(i, l) * b.at(j, l));
              }
              const double tol = (8 + static_cast<double>(k) / 4) * unit(DType::kF32) * size;
              if (!close(c.at(i, j), want, tol)) FAIL(i << ", " << j << ": " << c.at(i, j) << " instead of " << want);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("gemm: a kernel is made once and a refusal is named", "[gemm]") {
  cpu::GemmCache cache;
  const cpu::GemmShape shape = {cpu::GemmType::kF32, 8, 16, 32, 32, 32, 16};
  REQUIRE(cache.find(shape).value() == cache.find(shape).value());
  const auto refused = cache.find({cpu::GemmType::kF32, 8, 16, -3, 32, 32, 16});
  REQUIRE(!refused.ok());
  REQUIRE(refused.status().message().find("-3") != std::string::npos);
}

TEST_CASE("gemm: one thread a product, whatever OpenMP would use", "[gemm]") {
  const int before = omp_get_max_threads();
  omp_set_num_threads(7);
  {
    const cpu::OneThread one;
    REQUIRE(omp_get_max_threads() == 1);
  }
  REQUIRE(omp_get_max_threads() == 7);
  // The bits are those of a run where OpenMP has one thread only.
  const TestMatrix a = TestMatrix::random(DType::kF32, 256, 512, 1), b = TestMatrix::random(DType::kF32, 96, 512, 2);
  std::vector<TestMatrix> results;
  for (const int threads : {1, 7}) {
    omp_set_num_threads(threads);
    cpu::GemmCache cache;
    const auto kernel = cache.find({cpu::GemmType::kF32, 256, 96, 512, 512, 512, 96}).value();
    std::vector<std::byte> pad(static_cast<size_t>(kernel->scratchpad_bytes()) + 64);
    results.emplace_back(DType::kF32, 256, 96);
    kernel->run(a.view().data, b.view().data, static_cast<float*>(results.back().view().data), pad.data());
  }
  omp_set_num_threads(before);
  REQUIRE(results[0] == results[1]);
}

}  // namespace firn::test
