// Views of matrices and weights. A view is a pointer, a type and a shape: cheap to copy, owns nothing, and says in
// which memory space its address is valid. Owners are runtime/arena.h Buffers.
#pragma once

#include <cstdint>

#include "runtime/arena.h"
#include "runtime/dtype.h"

namespace firn {

// Row-major matrix; `stride` is elements from one row to the next (>= cols).
struct ConstMatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  Space space = Space::kHost;

  bool empty() const { return data == nullptr || rows == 0; }
  const void* row(int64_t r) const {
    return static_cast<const char*>(data) + r * stride * static_cast<int64_t>(dtype_bytes(dtype));
  }
  ConstMatrixView slice_rows(int64_t begin, int64_t n) const { return {row(begin), dtype, n, cols, stride, space}; }
};

struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
  Space space = Space::kHost;

  bool empty() const { return data == nullptr || rows == 0; }
  void* row(int64_t r) const {
    return static_cast<char*>(data) + r * stride * static_cast<int64_t>(dtype_bytes(dtype));
  }
  MatrixView slice_rows(int64_t begin, int64_t n) const { return {row(begin), dtype, n, cols, stride, space}; }
  operator ConstMatrixView() const { return {data, dtype, rows, cols, stride, space}; }  // NOLINT
};

// How a weight matrix is stored. Each is read as it is on disk; nothing is converted at load.
enum class WeightFormat : uint8_t {
  kF32,    // data f32 [rows, cols]
  kBf16,   // data bf16 [rows, cols]
  kMxfp8,  // data e4m3 [rows, cols], scales e8m0 [rows, cols/32]:           w = e4m3 * 2^(s-127)
  kNvfp4,  // data e2m1x2 [rows, cols/2], scales e4m3 [rows, cols/16]:       w = e2m1 * e4m3 * tensor_scale
  kMxfp4,  // data e2m1x2 [rows, cols/2], scales e8m0 [rows, cols/32]:       w = e2m1 * 2^(s-127)
};
// In packed rows byte j holds element 2j in the low nibble and 2j+1 in the high one.

const char* weight_format_name(WeightFormat format);
int64_t weight_data_bytes(WeightFormat format, int64_t rows, int64_t cols);
int64_t weight_scale_bytes(WeightFormat format, int64_t rows, int64_t cols);  // without the per-tensor scalar
int64_t weight_scale_group(WeightFormat format);                              // inputs a scale covers; 0 = no scales

// A linear layer's matrix [rows = outputs, cols = inputs]: y[r] = tensor_scale * sum_c w[r,c] * x[c].
// data and scales are rows back to back without padding and may be unaligned (as safetensors leaves them).
struct WeightView {
  WeightFormat format = WeightFormat::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* data = nullptr;
  const void* scales = nullptr;
  float tensor_scale = 1.0f;  // applied once to the fp32 sum
  Space space = Space::kHost;

  bool empty() const { return data == nullptr; }
  int64_t bytes() const { return weight_data_bytes(format, rows, cols) + weight_scale_bytes(format, rows, cols); }
  WeightView slice_rows(int64_t begin, int64_t n) const;
};

// A norm's weight [n]: y = x / rms(x) * (offset + w). offset is 1 for safetensors checkpoints (Gemma style), 0 for
// GGUF.
struct NormWeight {
  const void* data = nullptr;
  DType dtype = DType::kBf16;  // kBf16 or kF32
  int64_t n = 0;
  float offset = 1.0f;
  float eps = 1e-6f;
};

}  // namespace firn
