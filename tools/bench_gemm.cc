// firn bench gemm: oneDNN's products at M3's shapes, bf16 and f32, with all threads and oneDNN's own layout of weights:
// the yardstick of every many-token product.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>

#include "dnnl.hpp"
#include "tools/bench.h"

namespace firn::tools {
namespace {

struct Shape {
  const char* name;
  int64_t m, n, k;
};
constexpr Shape kShapes[] = {
    {"expert gate/up", 512, 3072, 6144},
    {"expert down", 512, 6144, 3072},
    {"q", 512, 8192, 6144},
    {"o", 512, 6144, 8192},
    {"expert gate/up", 128, 3072, 6144},
};

Result<Timing> time_gemm(BenchContext& context, const Shape& shape, bool bf16, int runs) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(context.team().size());
  try {
    using dnnl::memory;
    const auto type = bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const memory::desc a({shape.m, shape.k}, type, memory::format_tag::ab);
    const memory::desc b({shape.k, shape.n}, type, memory::format_tag::any);
    const memory::desc c({shape.m, shape.n}, memory::data_type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a, b, c), engine);
    const dnnl::matmul matmul(desc);
    const auto b_bytes = static_cast<int64_t>(desc.weights_desc().get_size());
    const auto element = static_cast<int64_t>(bf16 ? 2 : 4);
    FIRN_ASSIGN(const Buffer a_data, context.arena().allocate(shape.m * shape.k * element, "gemm input"));
    FIRN_ASSIGN(const Buffer b_data, context.arena().allocate(b_bytes, "gemm weights"));
    FIRN_ASSIGN(const Buffer c_data, context.arena().allocate(shape.m * shape.n * 4, "gemm output"));
    const WeightFormat format = bf16 ? WeightFormat::kBf16 : WeightFormat::kF32;
    fill_random_weights(context.team(), format, a_data.data(), a_data.bytes(), nullptr, 0, 1);
    fill_random_weights(context.team(), format, b_data.data(), b_bytes, nullptr, 0, 2);
    const memory am(desc.src_desc(), engine, a_data.data()), bm(desc.weights_desc(), engine, b_data.data());
    const memory cm(desc.dst_desc(), engine, c_data.data());
    const Timing time = time_runs(runs, 3, [&](int64_t) {
      matmul.execute(stream, {{DNNL_ARG_SRC, am}, {DNNL_ARG_WEIGHTS, bm}, {DNNL_ARG_DST, cm}});
      stream.wait();
    });
    omp_set_num_threads(before);
    if (time.runs == 0) return cancelled("bench gemm interrupted");
    return time;
  } catch (const dnnl::error& e) {
    omp_set_num_threads(before);
    return unsupported(fmt::format("oneDNN has no {} product on this CPU: {}", bf16 ? "bf16" : "f32", e.what()));
  }
}

double rate(const Shape& s, const Timing& time) {
  return 2.0 * static_cast<double>(s.m * s.n * s.k) / time.median * 1e-9;
}

}  // namespace

Status bench_gemm(BenchContext& context) {
  struct Measured {
    Shape shape;
    bool bf16;
    Timing time;
  };
  std::vector<Measured> all;
  double best = 0;
  for (const bool bf16 : {true, false}) {
    for (const Shape& shape : kShapes) {
      const Result<Timing> time = time_gemm(context, shape, bf16, context.options().runs);
      if (!time.ok() && time.status().code() == Code::kUnsupported) break;  // no bf16 before AVX-512: f32 remains
      if (!time.ok()) return time.status();
      all.push_back({shape, bf16, *time});
      best = std::max(best, rate(shape, *time));
    }
  }
  context.set_gemm_limit(best);
  for (const Measured& m : all) {
    BenchRow row;
    row.bench = "gemm";
    row.shape = fmt::format("{} {} {}x{}x{}", m.bf16 ? "bf16" : "f32", m.shape.name, m.shape.m, m.shape.n, m.shape.k);
    row.time = m.time;
    const int64_t element = m.bf16 ? 2 : 4;
    row.bytes = element * (m.shape.m + m.shape.n) * m.shape.k + 4 * m.shape.m * m.shape.n;
    row.flops = 2 * m.shape.m * m.shape.n * m.shape.k;
    row.limit = best;
    row.limit_is_bytes = false;
    row.limit_source = "gemm best";
    context.emit(row);
  }
  return {};
}

Result<double> measure_best_gemm(BenchContext& context) {
  double best = 0;
  for (const bool bf16 : {true, false}) {
    for (const Shape& shape : kShapes) {
      const Result<Timing> time = time_gemm(context, shape, bf16, 5);
      if (!time.ok() && time.status().code() == Code::kUnsupported) break;
      if (!time.ok()) return time.status();
      best = std::max(best, rate(shape, *time));
    }
  }
  return best;
}

}  // namespace firn::tools
