// Products of a few dozen rows or more by oneDNN, one thread each: C = A * B^T, fp32 sums.
//
// A GemmCache makes oneDNN's kernels once per shape (a kernel is compiled at run time, milliseconds) and keeps them.
// Two steps, because compiling needs memory and locks that have no place inside a parallel region: find() on the
// calling thread, run() on any thread of the team. A product is computed by the thread that calls run() alone, so its
// bits do not depend on the number of threads.
//
// Row counts. A kernel is compiled for a fixed number of rows. Up to kGemmRows rows are one piece; more are cut into
// pieces of kGemmRows, the last a multiple of kGemmRowStep that may reach back over rows of the one before, which are
// then computed again. So there are at most kGemmRows kernels for a shape of weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/isa.h"
#include "runtime/status.h"

namespace firn::cpu {

// A [m, k] row-major with lda, of `type`; B [n, k] row-major with ldb, of `type`; C [m, n] f32 with ldc.
struct GemmShape {
  GemmType type = GemmType::kF32;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldc = 0;
  friend auto operator<=>(const GemmShape&, const GemmShape&) = default;
};

// One compiled product. Immutable; run() may be called from several threads at once, each with its own scratchpad.
class GemmKernel {
 public:
  virtual ~GemmKernel() = default;
  virtual int64_t scratchpad_bytes() const = 0;
  virtual void run(const void* a, const void* b, float* c, std::byte* scratchpad) const = 0;
};

class GemmCache {
 public:
  GemmCache();
  ~GemmCache();
  // Fails only when oneDNN refuses the shape. The pointer lives until the cache is cleared, which happens only inside
  // find() when it holds more than kMaxKernels: callers keep the shared pointer while they use it.
  Result<std::shared_ptr<const GemmKernel>> find(const GemmShape& shape);

 private:
  static constexpr size_t kMaxKernels = 1024;
  std::mutex mutex_;
  std::map<GemmShape, std::shared_ptr<const GemmKernel>> kernels_;  // guarded by mutex_
};

struct RowPiece {
  int64_t begin = 0, rows = 0;
};
// Cuts `rows` >= kMinGemmRows into pieces; depends on `rows` alone.
inline constexpr int64_t kGemmRows = 256, kGemmRowStep = 16;
inline constexpr int64_t kMinGemmRows = 8;
std::vector<RowPiece> row_pieces(int64_t rows);

// While it lives, oneDNN called from this thread (outside a parallel region too) uses this thread only.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

}  // namespace firn::cpu
