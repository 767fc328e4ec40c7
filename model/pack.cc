// From a survey to a plan for storage::write_packed.
#include "model/pack.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace firn::model {
namespace {

namespace stdfs = std::filesystem;
using storage::ExtentKind;
using storage::PackExtent;
using storage::TensorInfo;

// Embeddings and head from here on are extents of their own, so that they are read and checked side by side.
constexpr int64_t kLargeGlobal = int64_t{64} << 20;

std::string stem_of(const std::string& name) { return name.substr(0, name.rfind('.')); }

// What the expert's matrices are stored as when `format` is asked for.
WeightFormat expert_format(CheckpointFormat format) {
  switch (format) {
    case CheckpointFormat::kBf16:
      return WeightFormat::kBf16;
    case CheckpointFormat::kMxfp8:
      return WeightFormat::kMxfp8;
    case CheckpointFormat::kNvfp4:
      return WeightFormat::kNvfp4;
    case CheckpointFormat::kMxfp4:
      return WeightFormat::kMxfp4;
  }
  return WeightFormat::kBf16;
}

class Planner {
 public:
  Planner(const Survey& survey, const SourceFiles& files, const PackOptions& options)
      : survey_(survey), files_(files), options_(options), used_(survey.checkpoint.tensors.size()) {}

  Status run(storage::PackPlan* plan) {
    collect();
    FIRN_TRY(add_experts());
    add_leftovers();
    for (PackExtent& extent : large_) append(extent, plan);
    append(global_, plan);
    for (auto& [layer, extent] : layers_) {
      append(extent, plan);
      const auto [first, last] = experts_.equal_range(layer);
      for (auto it = first; it != last; ++it) append(it->second, plan);
    }
    append(vision_, plan);
    append(other_, plan);
    return {};
  }

  bool converted() const { return converted_; }

  // The quantization_config that fits what is stored now.
  CheckpointFormat declared() const {
    if (formats_.contains(WeightFormat::kMxfp4)) return CheckpointFormat::kMxfp4;
    if (formats_.contains(WeightFormat::kNvfp4)) return CheckpointFormat::kNvfp4;
    return formats_.contains(WeightFormat::kMxfp8) ? CheckpointFormat::kMxfp8 : CheckpointFormat::kBf16;
  }

 private:
  static void append(PackExtent& extent, storage::PackPlan* plan) {
    if (!extent.tensors.empty()) plan->extents.push_back(std::move(extent));
  }

  static void move_into(std::vector<PlannedTensor>& from, PackExtent& to) {
    for (PlannedTensor& t : from) {
      to.tensors.push_back({std::move(t.name), t.dtype, std::move(t.shape), std::move(t.fill)});
    }
    from.clear();
  }

  void keep(const TensorInfo* t, PackExtent& extent) {
    if (t == nullptr) return;
    used_[static_cast<size_t>(t - survey_.checkpoint.tensors.data())] = true;
    std::vector<PlannedTensor> one;
    add_copy(files_, t, one);
    move_into(one, extent);
  }

  PackExtent& layer_extent(int32_t layer) {
    PackExtent& extent = layers_[layer];
    extent.kind = ExtentKind::kLayer;
    extent.layer = layer;
    return extent;
  }

  // Everything but experts goes where it belongs; experts' parts come together.
  void collect() {
    global_.kind = ExtentKind::kGlobal;
    vision_.kind = ExtentKind::kVision;
    for (const FoundSlot& found : survey_.found) {
      const Slot& slot = *found.slot;
      if (found.data == nullptr) continue;  // the vision part of a text-only checkpoint
      if (slot.expert >= 0) {
        layer_extent(slot.layer);
        parts_[{slot.layer, slot.expert}].push_back(&found);
        continue;
      }
      PackExtent& extent = slot.role == Role::kVision ? vision_
                           : slot.layer >= 0          ? layer_extent(slot.layer)
                           : found.bytes >= kLargeGlobal
                               ? large_.emplace_back(PackExtent{ExtentKind::kGlobal, -1, -1, {}})
                               : global_;
      for (const TensorInfo* t : {found.data, found.scales, found.scalar}) keep(t, extent);
      if (weight_scale_group(found.format) > 0) formats_.insert(found.format);
    }
  }

  Status add_experts() {
    for (auto& [id, parts] : parts_) {
      PackExtent extent;
      extent.kind = ExtentKind::kExpert;
      extent.layer = id.first;
      extent.expert = id.second;
      std::vector<PlannedTensor> scalars;
      for (const FoundSlot* found : parts) FIRN_TRY(add_part(*found, extent, scalars));
      move_into(scalars, extent);
      experts_of_[id] = &experts_.emplace(id.first, std::move(extent))->second;
    }
    return {};
  }

  Status add_part(const FoundSlot& found, PackExtent& extent, std::vector<PlannedTensor>& scalars) {
    const WeightFormat target = options_.experts ? expert_format(*options_.experts) : found.format;
    if (weight_scale_group(target) > 0) formats_.insert(target);
    std::vector<PlannedTensor> tensors;
    if (target == found.format) {
      for (const TensorInfo* t : {found.data, found.scales, found.scalar}) add_copy(files_, t, tensors);
      kept_stems_.emplace(stem_of(found.data->name), std::pair(extent.layer, extent.expert));
    } else {
      FIRN_TRY(add_converted(files_, found, target, tensors));
      dropped_stems_.insert(stem_of(found.data->name));
      converted_ = true;
    }
    for (const TensorInfo* t : {found.data, found.scales, found.scalar}) {
      if (t != nullptr) used_[static_cast<size_t>(t - survey_.checkpoint.tensors.data())] = true;
    }
    const size_t parts = weight_scale_group(target) > 0 ? 2 : 1;
    for (size_t i = parts; i < tensors.size(); ++i) scalars.push_back(std::move(tensors[i]));
    tensors.resize(std::min(parts, tensors.size()));
    move_into(tensors, extent);
    return {};
  }

  // What belongs to no slot: beside its expert if it is small and named like a part of one, else at the end. Companions
  // of the format an expert no longer has are left out.
  void add_leftovers() {
    constexpr int64_t kSmall = 4096;
    other_.kind = ExtentKind::kOther;
    for (size_t i = 0; i < used_.size(); ++i) {
      const TensorInfo& t = survey_.checkpoint.tensors[i];
      if (used_[i]) continue;
      const std::string stem = stem_of(t.name);
      if (dropped_stems_.contains(stem)) continue;
      const auto it = kept_stems_.find(stem);
      keep(&t, it != kept_stems_.end() && t.bytes <= kSmall ? *experts_of_.at(it->second) : other_);
    }
  }

  const Survey& survey_;
  const SourceFiles& files_;
  const PackOptions& options_;
  std::vector<bool> used_;
  std::set<WeightFormat> formats_;  // of quantised matrices, after conversion
  bool converted_ = false;
  PackExtent global_, vision_, other_;
  std::vector<PackExtent> large_;  // embeddings and output head, when they are large
  std::map<int32_t, PackExtent> layers_;
  std::map<std::pair<int32_t, int32_t>, std::vector<const FoundSlot*>> parts_;
  std::multimap<int32_t, PackExtent> experts_;  // by layer, in order of their ids
  std::map<std::pair<int32_t, int32_t>, PackExtent*> experts_of_;
  std::unordered_map<std::string, std::pair<int32_t, int32_t>> kept_stems_;
  std::unordered_set<std::string> dropped_stems_;
};

// Whether a file of a checkpoint folder goes into the packed file: everything that is neither weights, nor their index,
// nor hidden, nor what packing itself makes.
Result<bool> belongs(storage::FileSystem& fs, const stdfs::directory_entry& entry, const stdfs::path& out) {
  std::error_code ec;
  const std::string name = entry.path().filename().string();
  if (!entry.is_regular_file(ec) || name.front() == '.') return false;
  const auto size = entry.file_size(ec);
  if (ec || size > static_cast<uintmax_t>(storage::kMaxEmbeddedFileBytes)) return false;
  for (const char* end : {".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".pt", ".pth"}) {
    if (std::string_view(name).ends_with(end)) return false;
  }
  if (name.rfind(out.filename().string(), 0) == 0 &&
      stdfs::equivalent(entry.path().parent_path(), out.has_parent_path() ? out.parent_path() : ".", ec)) {
    return false;
  }
  FIRN_ASSIGN(const bool packed, storage::is_packed_file(fs, entry.path().string()));
  return !packed;
}

Result<std::map<std::string, std::string>> small_files(storage::FileSystem& fs, const Survey& survey,
                                                       const std::string& out) {
  std::map<std::string, std::string> files;
  std::vector<std::string> names;
  if (survey.checkpoint.packed()) {
    for (const auto& [name, file] : survey.checkpoint.files) names.push_back(name);
  } else {
    std::error_code ec;
    auto entry = stdfs::directory_iterator(survey.checkpoint.path, ec);
    for (; !ec && entry != stdfs::directory_iterator(); entry.increment(ec)) {
      FIRN_ASSIGN(const bool yes, belongs(fs, *entry, out));
      if (yes) names.push_back(entry->path().filename().string());
    }
    if (ec) return io_error(fmt::format("{}: cannot list the folder: {}", survey.checkpoint.path, ec.message()));
  }
  for (const std::string& name : names) {
    FIRN_ASSIGN(files[name],
                storage::read_model_file(fs, survey.checkpoint.path, name, storage::kMaxEmbeddedFileBytes));
  }
  return files;
}

int allowed_threads(int asked) {
  if (asked > 0) return asked;
  cpu_set_t set;
  CPU_ZERO(&set);
  const int n = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::clamp(n, 1, 16);
}

}  // namespace

Result<storage::PackStats> pack_checkpoint(storage::FileSystem& fs, const PackOptions& options) {
  FIRN_ASSIGN(const Survey survey, Survey::open(fs, options.source));
  FIRN_TRY(survey.loadable());
  FIRN_ASSIGN(const SourceFiles files, open_shards(fs, survey.checkpoint));
  storage::PackPlan plan;
  plan.out = options.out;
  plan.overwrite = options.overwrite;
  plan.n_threads = allowed_threads(options.n_threads);
  plan.record_bytes = options.record_bytes;
  plan.progress = options.progress;
  plan.cancel = options.cancel;
  FIRN_ASSIGN(plan.files, small_files(fs, survey, options.out));
  FIRN_ASSIGN(plan.identity, storage::model_identity(fs, survey.checkpoint));
  Planner planner(survey, files, options);
  FIRN_TRY(planner.run(&plan));
  if (survey.checkpoint.packed()) plan.experts = survey.checkpoint.experts;
  if (planner.converted()) {
    plan.experts = checkpoint_format_name(*options.experts);
    plan.identity = storage::derived_identity(plan.identity, "experts " + plan.experts);
    FIRN_ASSIGN(plan.files["config.json"], edit_config(plan.files["config.json"], 0, 0, planner.declared()));
  }
  return storage::write_packed(fs, plan);
}

}  // namespace firn::model
