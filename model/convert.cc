// convert_checkpoint: a matrix is read row by row, expanded to float by the scalar definition of its format, and
// quantised anew; what is stored in the wanted format already is copied byte for byte.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>

#include "cpu/reference.h"
#include "model/quantise.h"
#include "model/synth.h"
#include "storage/file.h"

namespace firn::model {
namespace {

using storage::TensorInfo;
using Files = SourceFiles;

// Rows of one stored tensor.
Status read_rows(const Files& files, const TensorInfo& t, int64_t begin, int64_t n, std::vector<uint8_t>& out) {
  const int64_t rows = t.shape.empty() ? 1 : t.shape[0];
  const int64_t row_bytes = rows == 0 ? 0 : t.bytes / rows;
  out.resize(static_cast<size_t>(n * row_bytes));
  return files[static_cast<size_t>(t.shard)]->read_at(t.file_offset + begin * row_bytes,
                                                      std::as_writable_bytes(std::span(out)));
}

// A matrix being converted; shared by the fills of the tensors it becomes.
class Conversion {
 public:
  Conversion(const Files& files, const FoundSlot& found, WeightFormat target)
      : files_(files), found_(found), target_(target), rows_(found.slot->shape[0]), cols_(found.slot->shape[1]) {}

  Status data(int64_t begin, int64_t n, uint8_t* out) const { return quantise(begin, n, out, nullptr); }
  Status scales(int64_t begin, int64_t n, uint8_t* out) const { return quantise(begin, n, nullptr, out); }
  Status scalar(uint8_t* out) const {
    FIRN_TRY(find_scale());
    std::memcpy(out, &tensor_scale_, sizeof(tensor_scale_));
    return {};
  }

 private:
  // Calls row(values, i) for rows [begin, begin + n).
  template <typename F>
  Status each_row(int64_t begin, int64_t n, F&& row) const {
    std::vector<uint8_t> data, scales;
    FIRN_TRY(read_rows(files_, *found_.data, begin, n, data));
    WeightView view;
    view.format = found_.format;
    view.rows = n;
    view.cols = cols_;
    view.data = data.data();
    if (found_.scales != nullptr) {
      FIRN_TRY(read_rows(files_, *found_.scales, begin, n, scales));
      view.scales = scales.data();
    }
    if (found_.scalar != nullptr) {
      std::vector<uint8_t> scalar;
      FIRN_TRY(read_rows(files_, *found_.scalar, 0, 1, scalar));
      float v = 0;
      std::memcpy(&v, scalar.data(), sizeof(v));
      view.tensor_scale = found_.scalar_inverse ? 1.0f / v : v;
    }
    std::vector<float> values(static_cast<size_t>(cols_));
    for (int64_t i = 0; i < n; ++i) {
      cpu::reference_dequantise_row(view, i, values.data());
      if (!std::isfinite(largest_magnitude(values.data(), cols_))) {
        return corrupt(fmt::format("{}: row {} holds NaN or infinity, which no quantised format can store",
                                   found_.data->name, begin + i));
      }
      row(values.data(), i);
    }
    return {};
  }

  Status find_scale() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (known_ || target_ != WeightFormat::kNvfp4) return {};
    float amax = 0;
    const int64_t step = std::max<int64_t>(1, (int64_t{4} << 20) / cols_);
    for (int64_t begin = 0; begin < rows_; begin += step) {
      FIRN_TRY(each_row(begin, std::min(step, rows_ - begin), [&](const float* values, int64_t) {
        amax = std::max(amax, largest_magnitude(values, cols_));
      }));
    }
    tensor_scale_ = nvfp4_tensor_scale(amax);
    known_ = true;
    return {};
  }

  Status quantise(int64_t begin, int64_t n, uint8_t* data, uint8_t* scales) const {
    FIRN_TRY(find_scale());
    const int64_t data_row = weight_data_bytes(target_, 1, cols_), scale_row = weight_scale_bytes(target_, 1, cols_);
    std::vector<uint8_t> unused(static_cast<size_t>(std::max(data_row, scale_row)) + 1);
    return each_row(begin, n, [&](const float* values, int64_t i) {
      quantise_row(target_, values, cols_, tensor_scale_, data != nullptr ? data + i * data_row : unused.data(),
                   scales != nullptr ? scales + i * scale_row : unused.data());
    });
  }

  const Files& files_;
  const FoundSlot& found_;
  const WeightFormat target_;
  const int64_t rows_, cols_;
  mutable std::mutex mutex_;  // guards the two below until known_
  mutable bool known_ = false;
  mutable float tensor_scale_ = 1.0f;
};

}  // namespace

void add_copy(const SourceFiles& files, const TensorInfo* t, std::vector<PlannedTensor>& out) {
  if (t == nullptr) return;
  out.push_back({t->name, t->dtype, t->shape, [&files, t](int64_t begin, int64_t n, uint8_t* dst) -> Status {
                   std::vector<uint8_t> rows;
                   FIRN_TRY(read_rows(files, *t, begin, n, rows));
                   std::memcpy(dst, rows.data(), rows.size());
                   return {};
                 }});
}

Status add_converted(const SourceFiles& files, const FoundSlot& found, WeightFormat target,
                     std::vector<PlannedTensor>& out) {
  const int64_t group = weight_scale_group(target);
  if (group > 0 && found.slot->shape[1] % group != 0) {
    return unsupported(fmt::format("{}: input width {} is no multiple of {}, which {} needs", found.data->name,
                                   found.slot->shape[1], group, weight_format_name(target)));
  }
  auto conversion = std::make_shared<Conversion>(files, found, target);
  std::vector<PlannedTensor> tensors = stored_tensors(*found.slot, target);
  for (size_t i = 0; i < tensors.size(); ++i) {
    switch (i) {
      case 0:
        tensors[i].fill = [conversion](int64_t b, int64_t n, uint8_t* dst) { return conversion->data(b, n, dst); };
        break;
      case 1:
        tensors[i].fill = [conversion](int64_t b, int64_t n, uint8_t* dst) { return conversion->scales(b, n, dst); };
        break;
      case 2:
        tensors[i].fill = [conversion](int64_t, int64_t, uint8_t* dst) { return conversion->scalar(dst); };
        break;
      default:
        tensors[i].fill = [](int64_t, int64_t, uint8_t* dst) -> Status {
          const float one = 1.0f;
          std::memcpy(dst, &one, sizeof(one));
          return {};
        };
    }
    out.push_back(std::move(tensors[i]));
  }
  return {};
}

Result<SourceFiles> open_shards(storage::FileSystem& fs, const storage::Checkpoint& checkpoint) {
  SourceFiles files;
  for (const storage::Shard& shard : checkpoint.shards) {
    FIRN_ASSIGN(auto file, fs.open(shard.path, storage::OpenMode::kRead));
    files.push_back(std::move(file));
  }
  return files;
}

Status convert_checkpoint(storage::FileSystem& fs, const std::string& source, const std::string& out,
                          CheckpointFormat format, int64_t shard_bytes) {
  FIRN_ASSIGN(const Survey survey, Survey::open(fs, source));
  FIRN_TRY(survey.loadable());
  FIRN_ASSIGN(const SourceFiles files, open_shards(fs, survey.checkpoint));
  CheckpointPlan plan;
  plan.out = out;
  plan.shard_bytes = shard_bytes;
  for (const FoundSlot& found : survey.found) {
    if (found.data == nullptr) continue;  // the vision part of a text-only checkpoint
    const bool keep = !found.slot->matrix || found.slot->role == Role::kLmHead;
    const WeightFormat target = keep ? found.format : stored_format(*found.slot, format);
    if (target == found.format) {
      for (const TensorInfo* t : {found.data, found.scales, found.scalar}) add_copy(files, t, plan.tensors);
    } else {
      FIRN_TRY(add_converted(files, found, target, plan.tensors));
    }
  }
  FIRN_ASSIGN(const std::string config,
              storage::read_text_file(fs, (std::filesystem::path(source) / "config.json").string(), int64_t{16} << 20));
  FIRN_ASSIGN(plan.texts["config.json"], edit_config(config, 0, 0, format));
  plan.copies = companion_files(source);
  return write_checkpoint(plan);
}

}  // namespace firn::model
