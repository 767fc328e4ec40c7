// oneDNN matmul behind GemmCache. B is given as it lies, [n, k] row-major ("ba" in oneDNN's words): measured within 10
// % of its own blocked layout for 64 rows and more, and no second layout has to be written.
#include "cpu/gemm.h"

#include <omp.h>

#include <algorithm>

#include "dnnl.hpp"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

class DnnlKernel final : public GemmKernel {
 public:
  DnnlKernel(dnnl::engine engine, dnnl::matmul::primitive_desc desc)
      : engine_(std::move(engine)), desc_(std::move(desc)), matmul_(desc_) {}

  int64_t scratchpad_bytes() const override { return static_cast<int64_t>(desc_.scratchpad_desc().get_size()); }

  void run(const void* a, const void* b, float* c, std::byte* scratchpad) const override {
    const OneThread one_thread;
    dnnl::stream stream(engine_);
    const dnnl::memory src(desc_.src_desc(), engine_, const_cast<void*>(a));
    const dnnl::memory weights(desc_.weights_desc(), engine_, const_cast<void*>(b));
    const dnnl::memory dst(desc_.dst_desc(), engine_, c);
    const dnnl::memory pad(desc_.scratchpad_desc(), engine_, scratchpad);
    matmul_.execute(
        stream, {{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, dst}, {DNNL_ARG_SCRATCHPAD, pad}});
    stream.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::matmul::primitive_desc desc_;
  dnnl::matmul matmul_;
};

}  // namespace

GemmCache::GemmCache() = default;
GemmCache::~GemmCache() = default;

Result<std::shared_ptr<const GemmKernel>> GemmCache::find(const GemmShape& shape) {
  const std::lock_guard lock(mutex_);
  const auto it = kernels_.find(shape);
  if (it != kernels_.end()) return it->second;
  if (kernels_.size() >= kMaxKernels) kernels_.clear();
  // oneDNN cuts a product by the number of threads it expects; one, here and in run().
  const OneThread one_thread;
  try {
    const auto type = shape.type == GemmType::kBf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    using Dims = dnnl::memory::dims;
    const dnnl::memory::desc a(Dims{shape.m, shape.k}, type, Dims{shape.lda, 1});
    const dnnl::memory::desc b(Dims{shape.k, shape.n}, type, Dims{1, shape.ldb});
    const dnnl::memory::desc c(Dims{shape.m, shape.n}, dnnl::memory::data_type::f32, Dims{shape.ldc, 1});
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    auto kernel = std::make_shared<const DnnlKernel>(
        engine, dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine));
    kernels_.emplace(shape, kernel);
    return std::shared_ptr<const GemmKernel>(std::move(kernel));
  } catch (const dnnl::error& e) {
    return internal(fmt::format("oneDNN has no {} product of {} x {} by {} x {} (strides {}, {}, {}): {}",
                                shape.type == GemmType::kBf16 ? "bf16" : "f32", shape.m, shape.k, shape.k, shape.n,
                                shape.lda, shape.ldb, shape.ldc, e.what()));
  }
}

// oneDNN rearranges the weights in every call, which costs as much as some forty rows: so as few pieces as can be, and
// the last one reaches back rather than being cut in two.
std::vector<RowPiece> row_pieces(int64_t rows) {
  FIRN_CHECK(rows >= kMinGemmRows, fmt::format("{} rows are too few for a product by oneDNN", rows));
  if (rows <= kGemmRows) return {{0, rows}};
  std::vector<RowPiece> pieces;
  int64_t begin = 0;
  for (; begin + kGemmRows <= rows; begin += kGemmRows) pieces.push_back({begin, kGemmRows});
  if (begin < rows) {
    const int64_t last = (rows - begin + kGemmRowStep - 1) / kGemmRowStep * kGemmRowStep;
    pieces.push_back({rows - last, last});
  }
  return pieces;
}

OneThread::OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
OneThread::~OneThread() { omp_set_num_threads(before_); }

}  // namespace firn::cpu
