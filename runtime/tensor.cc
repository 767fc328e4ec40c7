// Sizes of stored weight matrices, by format.
#include "runtime/tensor.h"

namespace firn {
namespace {

int64_t row_data_bytes(WeightFormat format, int64_t cols) {
  switch (format) {
    case WeightFormat::kF32:
      return cols * 4;
    case WeightFormat::kBf16:
      return cols * 2;
    case WeightFormat::kMxfp8:
      return cols;
    case WeightFormat::kNvfp4:
    case WeightFormat::kMxfp4:
      return cols / 2;
  }
  FIRN_CHECK(false, "unknown weight format");
  return 0;
}

int64_t row_scale_bytes(WeightFormat format, int64_t cols) {
  const int64_t group = weight_scale_group(format);
  return group == 0 ? 0 : cols / group;  // every scale type is one byte
}

}  // namespace

const char* weight_format_name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kBf16:
      return "bf16";
    case WeightFormat::kMxfp8:
      return "mxfp8";
    case WeightFormat::kNvfp4:
      return "nvfp4";
    case WeightFormat::kMxfp4:
      return "mxfp4";
  }
  return "unknown";
}

int64_t weight_scale_group(WeightFormat format) {
  switch (format) {
    case WeightFormat::kMxfp8:
    case WeightFormat::kMxfp4:
      return 32;
    case WeightFormat::kNvfp4:
      return 16;
    case WeightFormat::kF32:
    case WeightFormat::kBf16:
      return 0;
  }
  return 0;
}

int64_t weight_data_bytes(WeightFormat format, int64_t rows, int64_t cols) {
  return rows * row_data_bytes(format, cols);
}

int64_t weight_scale_bytes(WeightFormat format, int64_t rows, int64_t cols) {
  return rows * row_scale_bytes(format, cols);
}

WeightView WeightView::slice_rows(int64_t begin, int64_t n) const {
  FIRN_CHECK(begin >= 0 && n >= 0 && begin <= rows - n, "rows outside the matrix");
  WeightView view = *this;
  view.rows = n;
  view.data = static_cast<const char*>(data) + begin * row_data_bytes(format, cols);
  if (scales != nullptr) view.scales = static_cast<const char*>(scales) + begin * row_scale_bytes(format, cols);
  return view;
}

}  // namespace firn
