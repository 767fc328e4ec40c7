// Matching a checkpoint's tensors to the slots of its config.
//
// The format of a matrix follows from which companions stand beside it and from their dtypes and shapes (formats.md 2);
// each layout firn does not compute has its own sentence. A tensor belongs to at most one slot; what belongs to none is
// ignorable by name, an orphan, or unexpected.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "model/weights.h"
#include "storage/packed_file.h"

namespace firn::model {
namespace {

using storage::TensorInfo;

constexpr size_t kProblemsShown = 6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string shape_of(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

std::string found_text(const TensorInfo& t) { return fmt::format("{} {}", dtype_name(t.dtype), shape_of(t.shape)); }

bool is_scalar(const TensorInfo& t) { return t.shape.empty() || (t.shape.size() == 1 && t.shape[0] == 1); }
bool is_float(DType d) { return d == DType::kF32 || d == DType::kBf16 || d == DType::kF16; }
bool is_exponent(DType d) { return d == DType::kU8 || d == DType::kF8E8m0; }
bool is_plain(DType d) { return d == DType::kF32 || d == DType::kBf16; }

// "MXFP8": as people write it.
std::string format_label(WeightFormat format) {
  std::string name = weight_format_name(format);
  for (char& c : name) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

std::string_view last_part(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

bool contains(std::string_view name, std::string_view part) { return name.find(part) != std::string_view::npos; }

bool one_of(std::string_view value, std::initializer_list<const char*> list) {
  return std::any_of(list.begin(), list.end(), [&](const char* s) { return value == s; });
}

bool is_vision_name(std::string_view name) {
  for (const char* prefix : {"vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "model.vision_tower.",
                             "model.multi_modal_projector.", "model.patch_merge_mlp."}) {
    if (name.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

bool is_mtp_name(std::string_view name) { return name.rfind("mtp.", 0) == 0 || contains(name, ".mtp."); }

class Matcher {
 public:
  explicit Matcher(Survey& survey) : s_(survey) {
    const auto& tensors = s_.checkpoint.tensors;
    by_name_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) by_name_.emplace(tensors[i].name, i);
    used_.assign(tensors.size(), false);
  }

  void run() {
    s_.found.resize(s_.slots.size());
    for (size_t i = 0; i < s_.slots.size(); ++i) {
      FoundSlot& found = s_.found[i];
      found.slot = &s_.slots[i];
      if (found.slot->role == Role::kVision) {
        match_plain(found);
      } else if (found.slot->matrix) {
        match_matrix(found);
      } else {
        match_plain(found);
      }
    }
    vision_state();
    leftovers();
    totals();
    check_declared();
  }

 private:
  const TensorInfo* look(const std::string& name) const {
    const auto it = by_name_.find(name);
    return it == by_name_.end() ? nullptr : &s_.checkpoint.tensors[it->second];
  }
  void use(const TensorInfo* t) {
    if (t != nullptr) used_[static_cast<size_t>(t - s_.checkpoint.tensors.data())] = true;
  }
  static std::string full_name(const std::string& stem, const std::string& leaf) {
    return leaf.empty() ? stem : stem + "." + leaf;
  }
  static std::string expected_name(const Slot& slot) { return full_name(slot.stems[0], slot.leaf); }

  void mismatch(const TensorInfo& t, const std::string& expected) {
    s_.mismatched.push_back(fmt::format("{}: expected {}, found {}", t.name, expected, found_text(t)));
  }

  void match_plain(FoundSlot& found) {
    const Slot& slot = *found.slot;
    for (const std::string& stem : slot.stems) {
      const TensorInfo* t = look(full_name(stem, slot.leaf));
      if (t == nullptr) continue;
      use(t);
      admit_plain(found, *t);
      return;
    }
    if (slot.role != Role::kVision) {
      s_.missing.push_back(fmt::format("{} {}", expected_name(slot), shape_of(slot.shape)));
    }
  }

  void admit_plain(FoundSlot& found, const TensorInfo& t) {
    const Slot& slot = *found.slot;
    if (t.dtype == DType::kF16) {
      s_.unsupported.push_back(fmt::format("{}: plain F16 is not supported; expected BF16 or F32", t.name));
      return;
    }
    if (!is_plain(t.dtype) || t.shape != slot.shape) {
      mismatch(t, fmt::format("BF16 or F32 {}", shape_of(slot.shape)));
      return;
    }
    found.data = &t;
    found.format = t.dtype == DType::kF32 ? WeightFormat::kF32 : WeightFormat::kBf16;
    found.bytes = t.bytes;
    found.parameters = t.elements();
  }

  // Everything that may stand beside a matrix under one stem.
  struct Companions {
    std::string stem;
    const TensorInfo *weight, *packed, *scale_inv, *scale, *scale_2, *global_scale;
  };

  void match_matrix(FoundSlot& found) {
    const Slot& slot = *found.slot;
    for (const std::string& stem : slot.stems) {
      Companions c{stem,
                   look(stem + ".weight"),
                   look(stem + ".weight_packed"),
                   look(stem + ".weight_scale_inv"),
                   look(stem + ".weight_scale"),
                   look(stem + ".weight_scale_2"),
                   look(stem + ".weight_global_scale")};
      if (c.weight == nullptr && c.packed == nullptr) continue;
      for (const TensorInfo* t : {c.weight, c.packed, c.scale_inv, c.scale, c.scale_2, c.global_scale}) use(t);
      if (c.weight != nullptr && c.packed != nullptr) {
        s_.mismatched.push_back(fmt::format("{}: both weight and weight_packed are there; expected one of them", stem));
      } else if (c.packed != nullptr) {
        match_packed(found, c);
      } else {
        match_weight(found, c);
      }
      return;
    }
    s_.missing.push_back(fmt::format("{} {}", expected_name(slot), shape_of(slot.shape)));
  }

  void missing_companion(const Companions& c, const char* leaf, const std::string& what, const std::string& why) {
    s_.missing.push_back(fmt::format("{}.{} {} ({})", c.stem, leaf, what, why));
  }

  // Companions other than those of the format chosen contradict it.
  bool no_others(const Companions& c, std::initializer_list<const TensorInfo*> allowed, const std::string& format) {
    bool clean = true;
    for (const TensorInfo* t : {c.scale_inv, c.scale, c.scale_2, c.global_scale}) {
      if (t == nullptr || std::find(allowed.begin(), allowed.end(), t) != allowed.end()) continue;
      s_.mismatched.push_back(fmt::format("{}: expected no such tensor beside a matrix stored as {}, found {}", t->name,
                                          format, found_text(*t)));
      clean = false;
    }
    return clean;
  }

  void unsupported(const Companions& c, const std::string& layout) {
    s_.unsupported.push_back(fmt::format(
        "{}: {} is not supported; firn reads BF16, F32, MXFP8, NVFP4 and MXFP4 (compressed-tensors)", c.stem, layout));
  }

  bool group_divides(const Companions& c, const Slot& slot, int64_t group, const std::string& format) {
    if (slot.shape[1] % group == 0) return true;
    s_.mismatched.push_back(fmt::format("{}: {} needs an input width that is a multiple of {}, found {}", c.stem,
                                        format, group, slot.shape[1]));
    return false;
  }

  // Scales in the tile order of the kernels have padded extents.
  bool swizzled(const Slot& slot, const TensorInfo& scale, int64_t group) const {
    const int64_t rows = ceil_div(slot.shape[0], 128) * 128, cols = ceil_div(slot.shape[1] / group, 4) * 4;
    const std::vector<int64_t> linear = {slot.shape[0], slot.shape[1] / group};
    if (scale.shape == linear) return false;
    return scale.elements() == rows * cols && (scale.shape.size() != 2 || scale.shape[0] % 128 == 0);
  }

  void accept(FoundSlot& found, WeightFormat format, const TensorInfo* data, const TensorInfo* scales,
              const TensorInfo* scalar, bool inverse) {
    found.format = format;
    found.data = data;
    found.scales = scales;
    found.scalar = scalar;
    found.scalar_inverse = inverse;
    found.bytes = data->bytes + (scales ? scales->bytes : 0) + (scalar ? scalar->bytes : 0);
    found.parameters = found.slot->shape[0] * found.slot->shape[1];
  }

  // `codes_per_byte` 2 for packed FP4. Checks data and scale shapes and admits the matrix.
  void admit_scaled(FoundSlot& found, const Companions& c, WeightFormat format, const TensorInfo* data,
                    const TensorInfo* scales, const TensorInfo* scalar, bool inverse) {
    const Slot& slot = *found.slot;
    const int64_t group = weight_scale_group(format);
    const std::string name = format_label(format);
    if (!group_divides(c, slot, group, name)) return;
    const int64_t per_byte = format == WeightFormat::kMxfp8 ? 1 : 2;
    const std::vector<int64_t> data_shape = {slot.shape[0], slot.shape[1] / per_byte};
    const std::vector<int64_t> scale_shape = {slot.shape[0], slot.shape[1] / group};
    if (data->shape != data_shape) {
      mismatch(*data, fmt::format("{} {} ({}, logical {})", dtype_name(data->dtype), shape_of(data_shape), name,
                                  shape_of(slot.shape)));
      return;
    }
    if (swizzled(slot, *scales, group)) {
      unsupported(c, fmt::format("{} with swizzled scales ({} {})", name, scales->name, shape_of(scales->shape)));
      return;
    }
    if (scales->shape != scale_shape) {
      mismatch(*scales, fmt::format("{} {} ({})", dtype_name(scales->dtype), shape_of(scale_shape), name));
      return;
    }
    if (scalar != nullptr && (scalar->dtype != DType::kF32 || !is_scalar(*scalar))) {
      mismatch(*scalar, "F32 [] or [1]");
      return;
    }
    if (!no_others(c, {scales, scalar}, name)) return;
    accept(found, format, data, scales, scalar, inverse);
  }

  void match_packed(FoundSlot& found, const Companions& c) {
    const Slot& slot = *found.slot;
    if (c.packed->dtype == DType::kI32) {
      unsupported(c, "integer-packed weights (weight_packed I32)");
      return;
    }
    if (c.packed->dtype != DType::kU8) {
      mismatch(*c.packed, "U8 (packed FP4)");
      return;
    }
    if (c.scale == nullptr) {
      missing_companion(c, "weight_scale", shape_of({slot.shape[0], slot.shape[1] / 16}), "scales of weight_packed");
      return;
    }
    if (c.scale->dtype == DType::kF8E4m3) {
      if (c.global_scale == nullptr) {
        missing_companion(c, "weight_global_scale", "F32 [1]", "NVFP4, compressed-tensors");
        return;
      }
      admit_scaled(found, c, WeightFormat::kNvfp4, c.packed, c.scale, c.global_scale, true);
    } else if (is_exponent(c.scale->dtype)) {
      admit_scaled(found, c, WeightFormat::kMxfp4, c.packed, c.scale, nullptr, false);
    } else {
      mismatch(*c.scale, "F8_E4M3 (NVFP4) or U8 (MXFP4)");
    }
  }

  void match_weight(FoundSlot& found, const Companions& c) {
    const Slot& slot = *found.slot;
    switch (c.weight->dtype) {
      case DType::kF32:
      case DType::kBf16:
        if (no_others(c, {}, "BF16 or F32")) admit_plain(found, *c.weight);
        return;
      case DType::kF16:
        unsupported(c, "plain F16");
        return;
      case DType::kF8E5m2:
        unsupported(c, "FP8 E5M2");
        return;
      case DType::kF8E4m3:
        match_fp8(found, c);
        return;
      case DType::kU8:
        match_u8(found, c);
        return;
      default:
        mismatch(*c.weight, fmt::format("BF16, F32, F8_E4M3 or packed FP4 {}", shape_of(slot.shape)));
        return;
    }
  }

  void match_fp8(FoundSlot& found, const Companions& c) {
    const Slot& slot = *found.slot;
    if (c.scale != nullptr && c.scale_inv != nullptr) {
      s_.mismatched.push_back(
          fmt::format("{}: both weight_scale and weight_scale_inv are there; expected one of them", c.stem));
      return;
    }
    const TensorInfo* scale = c.scale_inv != nullptr ? c.scale_inv : c.scale;
    if (scale == nullptr) {
      missing_companion(c, "weight_scale_inv", "U8 " + shape_of({slot.shape[0], ceil_div(slot.shape[1], 32)}),
                        "scales of an F8_E4M3 weight");
      return;
    }
    if (is_exponent(scale->dtype)) {
      admit_scaled(found, c, WeightFormat::kMxfp8, c.weight, scale, nullptr, false);
      return;
    }
    if (!is_float(scale->dtype)) {
      mismatch(*scale, "U8 or F8_E8M0 (MXFP8)");
      return;
    }
    const std::vector<int64_t> tiles = {ceil_div(slot.shape[0], 128), ceil_div(slot.shape[1], 128)};
    const bool per_row = (scale->shape.size() == 2 && scale->shape[0] == slot.shape[0] && scale->shape[1] == 1) ||
                         (scale->shape.size() == 1 && scale->shape[0] == slot.shape[0]);
    if (is_scalar(*scale)) {
      unsupported(c, "FP8 with one float scale per tensor");
    } else if (per_row) {
      unsupported(c, "FP8 with one float scale per row");
    } else if (scale->shape == tiles) {
      unsupported(c, "FP8 with float scales of 128x128 tiles");
    } else {
      unsupported(c, fmt::format("FP8 with float scales {}", shape_of(scale->shape)));
    }
  }

  void match_u8(FoundSlot& found, const Companions& c) {
    const Slot& slot = *found.slot;
    const TensorInfo* scale = c.scale != nullptr ? c.scale : c.scale_inv;
    if (scale == nullptr) {
      missing_companion(c, "weight_scale", shape_of({slot.shape[0], slot.shape[1] / 16}),
                        fmt::format("scales of {} {}: packed FP4?", c.weight->name, found_text(*c.weight)));
      return;
    }
    if (scale->dtype == DType::kF8E4m3) {
      if (c.scale_2 == nullptr) {
        missing_companion(c, "weight_scale_2", "F32 []", "NVFP4, ModelOpt");
        return;
      }
      admit_scaled(found, c, WeightFormat::kNvfp4, c.weight, scale, c.scale_2, false);
    } else if (is_exponent(scale->dtype)) {
      unsupported(c, "MXFP4 in Quark's layout (U8 weight and U8 weight_scale; its nibble order is not verified)");
    } else {
      mismatch(*scale, "F8_E4M3 (NVFP4)");
    }
  }

  void vision_state() {
    if (!s_.config.vision.present) {
      s_.vision_absent = true;
      return;
    }
    size_t there = 0, all = 0;
    for (const FoundSlot& f : s_.found) {
      if (f.slot->role != Role::kVision) continue;
      ++all;
      there += f.data != nullptr ? 1 : 0;
    }
    // A vision tensor of the wrong shape is listed already; it must not make the rest look absent.
    const bool any = there > 0 || std::any_of(s_.checkpoint.tensors.begin(), s_.checkpoint.tensors.end(),
                                              [](const TensorInfo& t) { return is_vision_name(t.name); });
    s_.has_vision = there == all && all > 0;
    s_.vision_absent = !any;
    if (s_.has_vision || s_.vision_absent) return;
    for (const FoundSlot& f : s_.found) {
      if (f.slot->role != Role::kVision || f.data != nullptr) continue;
      bool listed = false;
      for (const std::string& stem : f.slot->stems) listed = listed || look(full_name(stem, f.slot->leaf)) != nullptr;
      if (!listed) s_.missing.push_back(fmt::format("{} {}", expected_name(*f.slot), shape_of(f.slot->shape)));
    }
  }

  // What no slot asked for.
  void leftovers() {
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i]) continue;
      const TensorInfo& t = s_.checkpoint.tensors[i];
      const std::string_view last = last_part(t.name);
      if (one_of(last, {"input_scale", "input_global_scale", "k_scale", "v_scale"}) || is_mtp_name(t.name) ||
          (last == "inv_freq" && contains(t.name, "rotary_emb."))) {
        s_.ignored.push_back(t.name);
      } else if (stacked_experts(t)) {
        s_.unsupported.push_back(
            fmt::format("{} {}: stacked experts (one tensor for all experts of a layer) are not "
                        "supported; expected one tensor per expert",
                        t.name, found_text(t)));
      } else if (contains(t.name, "gate_up_proj")) {
        s_.unsupported.push_back(
            fmt::format("{} {}: fused gate and up projections are not supported; expected "
                        "gate_proj and up_proj",
                        t.name, found_text(t)));
      } else if (one_of(last, {"weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale"})) {
        s_.mismatched.push_back(fmt::format("{}: a scale without its weight; expected {}weight beside it, found none",
                                            t.name, t.name.substr(0, t.name.size() - last.size())));
      } else {
        s_.unexpected.push_back(t.name);
      }
    }
  }

  // ".experts." followed by something other than an expert's number.
  static bool stacked_experts(const TensorInfo& t) {
    const size_t at = t.name.find(".experts.");
    if (at == std::string::npos) return false;
    const size_t next = at + std::string_view(".experts.").size();
    return next < t.name.size() && (t.name[next] < '0' || t.name[next] > '9');
  }

  void totals() {
    for (const FoundSlot& f : s_.found) {
      if (f.data == nullptr) continue;
      Survey::GroupTotal& group = s_.groups[static_cast<size_t>(f.slot->group)];
      group.parameters += f.parameters;
      group.bytes += f.bytes;
      const std::string format = format_label(f.format);
      if (std::find(group.formats.begin(), group.formats.end(), format) == group.formats.end()) {
        group.formats.push_back(format);
      }
      s_.parameters += f.parameters;
      s_.bytes += f.bytes;
    }
  }

  // The config's quant_method says what to expect; what the files hold decides, and a contradiction is an error.
  void check_declared() {
    std::string method = s_.config.quant_method;
    for (char& ch : method) ch = static_cast<char>(ch >= 'A' && ch <= 'Z' ? ch - 'A' + 'a' : ch);
    if (method.empty() || !s_.unsupported.empty()) return;
    const FoundSlot* any = nullptr;
    const FoundSlot* stranger = nullptr;
    for (const FoundSlot& f : s_.found) {
      if (f.data == nullptr || weight_scale_group(f.format) == 0) continue;
      if (any == nullptr) any = &f;
      const bool mx8 = f.format == WeightFormat::kMxfp8, nv4 = f.format == WeightFormat::kNvfp4;
      const bool fits = method == "compressed-tensors" || (method == "mxfp8" && mx8) ||
                        (method.rfind("modelopt", 0) == 0 && (mx8 || nv4));
      if (!fits && stranger == nullptr) stranger = &f;
    }
    if (any == nullptr) {
      s_.mismatched.push_back(fmt::format(
          "config.json: quantization_config.quant_method is \"{}\", but every matrix found is stored as BF16 or F32",
          method));
    } else if (stranger != nullptr) {
      s_.mismatched.push_back(
          fmt::format("config.json: quantization_config.quant_method is \"{}\", but {} is stored as {}", method,
                      stranger->data->name, format_label(stranger->format)));
    }
  }

  Survey& s_;
  std::unordered_map<std::string_view, size_t> by_name_;
  std::vector<bool> used_;
};

}  // namespace

Result<Survey> Survey::open(storage::FileSystem& fs, const std::string& path) {
  Survey survey;
  FIRN_ASSIGN(survey.config, ModelConfig::open(fs, path));
  std::error_code ec;
  FIRN_ASSIGN(const bool packed, storage::is_packed_file(fs, path));
  const bool whole = packed || std::filesystem::is_directory(path, ec);
  const std::string folder = whole ? path : std::filesystem::path(path).parent_path().string();
  FIRN_ASSIGN(survey.checkpoint, storage::Checkpoint::open(fs, folder.empty() ? "." : folder));
  survey.slots = enumerate_slots(survey.config);
  Matcher(survey).run();
  return survey;
}

Status Survey::loadable() const {
  std::vector<std::string> problems;
  for (const std::string& m : unsupported) problems.push_back(m);
  for (const std::string& m : mismatched) problems.push_back(m);
  for (const std::string& m : missing) problems.push_back("missing " + m);
  for (const std::string& m : unexpected) {
    if (!is_vision_name(m)) problems.push_back("unexpected tensor " + m);
  }
  if (problems.empty()) return {};
  std::string text;
  for (size_t i = 0; i < std::min(problems.size(), kProblemsShown); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : "; ", problems[i]);
  }
  if (problems.size() > kProblemsShown) text += fmt::format("; and {} more", problems.size() - kProblemsShown);
  text = fmt::format("{} does not hold the weights its config calls for: {} (firn inspect lists everything)",
                     checkpoint.path, text);
  if (!unsupported.empty()) return {Code::kUnsupported, std::move(text)};
  return corrupt(std::move(text));
}

}  // namespace firn::model
