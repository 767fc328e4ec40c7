// Gated MLPs: every format, instruction set and mix of task sizes against the scalar oracle.
#include "tests/cpu/linear_fixture.h"

namespace firn::test {
namespace {

double largest_norm(const RandomWeight& w) {
  double most = 0;
  for (int64_t r = 0; r < w.view().rows; ++r) most = std::max(most, w.row_norm(r));
  return most;
}

struct Expert {
  RandomWeight gate, up, down;
  double largest;
  std::vector<double> down_norms;
  Expert(WeightFormat format, int64_t hidden, int64_t inner, uint64_t seed)
      : gate(format, inner, hidden, seed, 0.3f),
        up(format, inner, hidden, seed + 1, 0.2f),
        down(format, hidden, inner, seed + 2, 0.1f),
        largest(std::max(largest_norm(gate), largest_norm(up))) {
    for (int64_t r = 0; r < hidden; ++r) down_norms.push_back(down.row_norm(r));
  }
  MlpTask task(int64_t row_begin, int64_t n_rows) const {
    return {0, gate.view(), up.view(), down.view(), row_begin, n_rows};
  }
};

TestMatrix run_mlp(Ops& ops, const TestMatrix& x, const std::vector<MlpTask>& tasks,
                   const Activation& activation = {}) {
  TestMatrix out(DType::kF32, x.view().rows, tasks.empty() ? x.view().cols : tasks[0].down.rows, 2);
  const Status status = ops.wait(ops.mlp({x.view(), tasks, activation, out.view()}));
  INFO(status.message());
  REQUIRE(status.ok());
  REQUIRE(out.padding_untouched());
  return out;
}

// Sums of the first half err by fp32 roundings of products as large as the norms; the activation's slope is under 10
// and its size at most 56. In bf16 mode an activation at a rounding border may land one step aside: few do, so an
// eighth of a step each is generous.
void check_mlp(Ops& ops, Ops& oracle, const TestMatrix& x, const Expert& expert, const MlpTask& task) {
  const TestMatrix got = run_mlp(ops, x, {task}), want = run_mlp(oracle, x, {task});
  const double inner = static_cast<double>(task.gate.rows), hidden = static_cast<double>(task.gate.cols);
  const double norms = expert.largest;
  for (int64_t m = task.row_begin; m < task.row_begin + task.n_rows; ++m) {
    const double sums = (8 + hidden / 2) * unit(DType::kF32) * norms * row_norm(x.view(), m);
    const double step = x.view().dtype == DType::kBf16 ? 56 * unit(DType::kBf16) / 8 : 0;
    const double last = (8 + inner / 2) * unit(DType::kF32) * 56;
    const double act = std::min(10 * sums, 56.0) + step + last;
    for (int64_t r = 0; r < expert.down.view().rows; ++r) {
      const double tol = act * std::sqrt(inner) * expert.down_norms[static_cast<size_t>(r)];
      if (!close(got.at(m, r), want.at(m, r), tol)) {
        FAIL("row " << m << ", output " << r << ": " << got.at(m, r) << " instead of " << want.at(m, r) << " +- "
                    << tol);
      }
    }
  }
}

}  // namespace

TEST_CASE("mlp: every format and number of rows agrees with the oracle", "[mlp]") {
  ReferenceFixture reference;
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture cpu(isa, 2);
    for (const WeightFormat format : kAllFormats) {
      const bool plain = weight_scale_group(format) == 0;
      const int64_t hidden = plain ? 75 : 96, inner = plain ? 101 : 160;
      const Expert expert(format, hidden, inner, 40);
      for (const int64_t rows : {1, 2, 7, 8, 9, 31}) {
        for (const DType act : {DType::kBf16, DType::kF32}) {
          INFO(cpu::isa_name(isa) << ' ' << weight_format_name(format) << " rows " << rows << ' ' << dtype_name(act));
          const TestMatrix x = TestMatrix::random(act, rows, hidden, static_cast<uint64_t>(rows), 1.0, 4);
          check_mlp(*cpu.ops, *reference.ops, x, expert, expert.task(0, rows));
        }
      }
    }
  }
}

TEST_CASE("mlp: one large task", "[mlp]") {
  ReferenceFixture reference;
  CpuFixture cpu(cpu::cpu_features().best, 2);
  const Expert expert(WeightFormat::kMxfp8, 64, 64, 4);
  for (const int64_t rows : {264, 530, 1039}) {
    for (const DType act : {DType::kBf16, DType::kF32}) {
      INFO(rows << ' ' << dtype_name(act));
      check_mlp(*cpu.ops, *reference.ops, TestMatrix::random(act, rows, 64, 5), expert, expert.task(0, rows));
    }
  }
}

TEST_CASE("mlp: tasks of different sizes, paths and formats do not touch each other", "[mlp]") {
  for (const DType act : {DType::kBf16, DType::kF32}) {
    CpuFixture cpu(cpu::cpu_features().best, 2);
    const int64_t sizes[] = {3, 0, 20, 1, 8, 9};
    const WeightFormat formats[] = {WeightFormat::kMxfp8, WeightFormat::kMxfp8, WeightFormat::kNvfp4,
                                    WeightFormat::kBf16,  WeightFormat::kBf16,  WeightFormat::kF32};
    std::vector<Expert> experts;
    std::vector<MlpTask> tasks;
    int64_t rows = 0;
    for (size_t i = 0; i < 6; ++i) experts.emplace_back(formats[i], 96, i % 2 == 0 ? 64 : 160, 100 * i);
    for (size_t i = 0; i < 6; ++i) {
      tasks.push_back(experts[i].task(rows, sizes[i]));
      rows += sizes[i];
    }
    const TestMatrix x = TestMatrix::random(act, rows, 96, 5);
    const TestMatrix all = run_mlp(*cpu.ops, x, tasks);
    for (size_t i = 0; i < 6; ++i) {
      const TestMatrix alone = run_mlp(*cpu.ops, x, {tasks[i]});
      for (int64_t r = tasks[i].row_begin; r < tasks[i].row_begin + tasks[i].n_rows; ++r) {
        INFO("task " << i << " row " << r << ' ' << dtype_name(act));
        REQUIRE(std::memcmp(all.view().row(r), alone.view().row(r), 96 * 4) == 0);
      }
    }
    REQUIRE(run_mlp(*cpu.ops, TestMatrix(act, 0, 96), {}).view().rows == 0);
  }
}

TEST_CASE("mlp: gate and up of different formats", "[mlp]") {
  ReferenceFixture reference;
  CpuFixture cpu(cpu::cpu_features().best, 2);
  Expert a(WeightFormat::kBf16, 96, 64, 1), b(WeightFormat::kMxfp8, 96, 64, 2);
  for (const int64_t rows : {2, 40}) {
    for (const DType act : {DType::kBf16, DType::kF32}) {
      MlpTask task = a.task(0, rows);
      task.up = b.up.view();
      a.largest = b.largest = std::max(a.largest, b.largest);
      check_mlp(*cpu.ops, *reference.ops, TestMatrix::random(act, rows, 96, 5), a, task);
      task = b.task(0, rows);
      task.up = a.up.view();
      check_mlp(*cpu.ops, *reference.ops, TestMatrix::random(act, rows, 96, 5), b, task);
    }
  }
}

TEST_CASE("mlp: precise rows are independent, and the number of threads changes no bit", "[mlp]") {
  for (const cpu::Isa isa : available_isas()) {
    CpuFixture one(isa, 1), many(isa, 16);
    const Expert expert(WeightFormat::kMxfp8, 96, 160, 7);
    for (const DType act : {DType::kBf16, DType::kF32}) {
      const TestMatrix x = TestMatrix::random(act, 45, 96, 6);
      const TestMatrix want = run_mlp(*one.ops, x, {expert.task(0, 45)});
      REQUIRE(run_mlp(*many.ops, x, {expert.task(0, 45)}) == want);
      if (act == DType::kBf16) continue;
      const TestMatrix few = run_mlp(*one.ops, x, {expert.task(0, 3), expert.task(3, 8), expert.task(11, 34)});
      INFO(cpu::isa_name(isa));
      REQUIRE(few == want);
    }
  }
}

// Values of specification 3.8's table, and what the clamps do beyond it; the stored values were computed in float64.
TEST_CASE("mlp: the activation", "[mlp]") {
  const float table[][3] = {{0, 0, 0},
                            {1, 1, 1.69159153f},
                            {-1, 2, -0.46261270f},
                            {8, 8, 55.99962503f},
                            {7, -1, 0},
                            {-8, -8, 5.8598574e-05f},
                            {-20, 3, -1.3173641e-13f},
                            {3, -9, -17.89157214f},
                            {7, 7, 55.99962503f},
                            {-1000, 1, 0}};
  for (const cpu::Isa isa : available_isas()) {
    const cpu::LinearKernels& kernels = cpu::linear_kernels(isa);
    // A whole vector and a tail, each value at every place.
    for (size_t shift = 0; shift < 10; ++shift) {
      std::vector<float> gate(29), up(29), out(30, 77.0f);
      for (size_t i = 0; i < 29; ++i) {
        gate[i] = table[(i + shift) % 10][0] / 2;
        up[i] = table[(i + shift) % 10][1] / 4;
      }
      kernels.activate({gate.data(), up.data(), 29, 2.0f, 4.0f, 1.702f, 1.0f, 7.0f, out.data(), nullptr, false});
      for (size_t i = 0; i < 29; ++i) {
        const double want = table[(i + shift) % 10][2];
        INFO(cpu::isa_name(isa) << " gate " << gate[i] * 2 << " up " << up[i] * 4);
        REQUIRE(close(out[i], want, 1e-6 * std::abs(want) + 1e-30));
      }
      REQUIRE(out[29] == 77.0f);
    }
    float nan_gate[2] = {NAN, 1}, nan_up[2] = {1, NAN}, out[2] = {0, 0};
    kernels.activate({nan_gate, nan_up, 2, 1.0f, 1.0f, 1.702f, 1.0f, 7.0f, out, nullptr, false});
    REQUIRE(std::isnan(out[0]));
    REQUIRE(std::isnan(out[1]));
    uint16_t halves[2] = {0, 0};
    kernels.activate({nan_gate, nan_up, 2, 1.0f, 1.0f, 1.702f, 1.0f, 7.0f, nullptr, halves, false});
    REQUIRE(std::isnan(to_float(Bf16{halves[0]})));
    // Other constants than the model's.
    const float g[1] = {2}, u[1] = {-9};
    kernels.activate({g, u, 1, 1.0f, 1.0f, 1.0f, 0.5f, 3.5f, out, nullptr, false});
    REQUIRE(close(out[0], (-3.5 + 0.5) * 2 / (1 + std::exp(-2.0)), 1e-5));
  }
}

}  // namespace firn::test
