// Loading the text weights as stored.
//
// One Buffer for what belongs to no layer, one for each layer without its routed experts, and one for each routed
// expert (gate, up, down and their scales, 64-byte aligned each): an expert is the unit that residency moves. Ranges go
// to storage::load in the disk's order, batch by batch, and every scale byte and 8-bit weight code of a batch is looked
// at once while the next one is read: kernels expand codes by bit operations that do not carry NaN through.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "model/extent_checks.h"
#include "model/weight_codes.h"
#include "model/weights.h"
#include "runtime/thread_team.h"
#include "storage/loader.h"

namespace firn::model {
namespace {

using storage::TensorInfo;

constexpr int64_t kAlign = 64;
constexpr int64_t kBatchBytes = int64_t{256} << 20;
// formats.md 4.4: a typical largest weight lies between these; the wrong direction of a global scale is off by its
// square.
constexpr double kSmallestTypicalMax = 1e-3, kLargestTypicalMax = 1e1;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

struct Placed {
  const FoundSlot* slot;
  const uint8_t* data;  // of the weights, or of the scales
  bool scales;
};

// Looks at every placed tensor, several at a time.
Status check_all_codes(const std::vector<Placed>& placed, int n_threads, const std::atomic<bool>* cancel) {
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards `first` and `first_at`
  Status first;
  size_t first_at = placed.size();
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < placed.size(); i = next.fetch_add(1)) {
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return;
      const auto* bytes = reinterpret_cast<const std::byte*>(placed[i].data);
      Status status =
          placed[i].scales ? check_scale_codes(*placed[i].slot, bytes) : check_weight_codes(*placed[i].slot, bytes);
      if (status.ok()) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (i < first_at) {
        first_at = i;
        first = std::move(status);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < n_threads; ++t)
    threads.emplace_back([&] {
      unpin_this_thread();
      work();
    });
  work();
  for (std::thread& t : threads) t.join();
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return cancelled("loading was cancelled");
  return first;
}

class Loader {
 public:
  Loader(storage::FileSystem& fs, const Survey& survey, Arena& arena, const LoadOptions& options)
      : fs_(fs),
        survey_(survey),
        arena_(arena),
        options_(options),
        config_(survey.config),
        extents_(survey.checkpoint) {}

  Result<Weights> run(double* seconds) {
    FIRN_TRY(survey_.loadable());
    FIRN_CHECK(arena_.space() == Space::kHost, "weights are loaded into host memory");
    units_ = collect(survey_, options_.experts);
    FIRN_TRY(place_units());
    if (!options_.content_is_there) FIRN_TRY(read_and_check(seconds));
    FIRN_TRY(build_views());
    return std::move(weights_);
  }

  static std::vector<WeightUnit> units(const Survey& survey, bool experts) {
    std::vector<WeightUnit> out;
    int64_t scalars = 0;
    for (const Unit& unit : collect(survey, experts)) {
      if (const int64_t bytes = unit_bytes(unit); bytes > 0) out.push_back({"weights: " + unit.what, bytes});
      scalars += unit_scalars(unit);
    }
    if (scalars > 0) out.push_back({kScalarsUnit, scalars * int64_t{sizeof(float)}});
    return out;
  }

 private:
  Status read_and_check(double* seconds) {
    const auto start = std::chrono::steady_clock::now();
    extents_.place_rest(&ranges_);
    std::sort(ranges_.begin(), ranges_.end(), [](const storage::LoadRange& a, const storage::LoadRange& b) {
      return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
    });
    std::unordered_map<const void*, Placed> to_check;
    for (const Placed& placed : placed_) to_check.emplace(placed.data, placed);
    int64_t total = 0, done = 0;
    for (const storage::LoadRange& r : ranges_) total += r.bytes;
    storage::LoadPlan plan;
    for (const storage::Shard& shard : survey_.checkpoint.shards) plan.paths.push_back(shard.path);
    plan.n_readers = options_.n_readers;
    plan.direct = options_.direct;
    const int threads = static_cast<int>(std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, 64));
    std::future<Status> checking;
    for (size_t next = 0; next < ranges_.size();) {
      plan.ranges.clear();
      std::vector<Placed> batch;
      int64_t bytes = 0;
      for (; next < ranges_.size() && bytes < kBatchBytes; ++next) {
        bytes += ranges_[next].bytes;
        plan.ranges.push_back(ranges_[next]);
        if (const auto it = to_check.find(ranges_[next].dst); it != to_check.end()) batch.push_back(it->second);
      }
      const auto progress = [&](int64_t now, int64_t) {
        if (options_.progress) options_.progress(done + now, total);
      };
      const auto stats = storage::load(fs_, plan, progress, options_.cancel);
      const Status checked = checking.valid() ? checking.get() : Status();
      if (!stats.ok()) return stats.status();
      FIRN_TRY(checked);
      done += bytes;
      const int64_t read_to = next < ranges_.size() ? ranges_[next].offset : INT64_MAX;
      checking = std::async(std::launch::async, [batch = std::move(batch), threads, read_to, this] {
        unpin_this_thread();
        FIRN_TRY(extents_.check_read(fs_, read_to, threads, options_.cancel));
        return check_all_codes(batch, threads, options_.cancel);
      });
    }
    if (checking.valid()) FIRN_TRY(checking.get());
    if (seconds != nullptr) {
      *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return {};
  }

  // A Buffer to be: the slots in it. layer -1 is the unit of embeddings, head and final norm.
  struct Unit {
    std::string what;
    std::vector<const FoundSlot*> slots;
    bool expert = false;
  };

  static constexpr const char* kScalarsUnit = "weights: scales of whole matrices";

  static std::vector<Unit> collect(const Survey& survey, bool experts) {
    std::vector<Unit> units = {{"embeddings and output head", {}, false}};
    const size_t first_layer = units.size();
    for (int64_t l = 0; l < survey.config.layers; ++l) units.push_back({fmt::format("layer {}", l), {}, false});
    for (const FoundSlot& found : survey.found) {
      const Slot& slot = *found.slot;
      if (slot.role == Role::kVision || (slot.expert >= 0 && !experts)) continue;
      if (slot.layer < 0) {
        units[0].slots.push_back(&found);
      } else if (slot.expert < 0) {
        units[first_layer + static_cast<size_t>(slot.layer)].slots.push_back(&found);
      } else {
        if (slot.role == Role::kExpertGate) {
          units.push_back({fmt::format("expert {} of layer {}", slot.expert, slot.layer), {}, true});
        }
        units.back().slots.push_back(&found);
      }
    }
    return units;
  }

  void range(const FoundSlot& f, const TensorInfo& t, uint8_t* dst, bool checked) {
    if (t.bytes == 0) return;
    ranges_.push_back({t.shard, t.file_offset, t.bytes, dst});
    extents_.placed(t, dst);
    if (checked) placed_.push_back({&f, dst, &t == f.scales});
  }

  static int64_t data_room(const FoundSlot& f) {
    // The router bias becomes f32 whatever it is stored as.
    return f.slot->role == Role::kRouterBias ? f.data->elements() * int64_t{sizeof(float)} : f.data->bytes;
  }

  static int64_t unit_bytes(const Unit& unit) {
    int64_t bytes = 0;
    for (const FoundSlot* f : unit.slots) {
      bytes += aligned(data_room(*f)) + (f->scales != nullptr ? aligned(f->scales->bytes) : 0);
    }
    return bytes;
  }

  static int64_t unit_scalars(const Unit& unit) {
    return std::count_if(unit.slots.begin(), unit.slots.end(), [](const FoundSlot* f) { return f->scalar != nullptr; });
  }

  Status place_units() {
    for (const Unit& unit : units_) {
      const int64_t bytes = unit_bytes(unit);
      if (bytes == 0) continue;
      auto buffer = arena_.allocate(bytes, "weights: " + unit.what);
      if (!buffer.ok()) {
        return buffer.status().with_context(fmt::format("the weights need {} bytes of memory in all", survey_bytes()));
      }
      auto* const base = buffer->as<uint8_t>();
      int64_t at = 0;
      for (const FoundSlot* f : unit.slots) {
        Place& place = places_[f];
        place.data = base + at;
        const int64_t room = data_room(*f);
        // A bf16 bias is read into the second half of its room and widened in place from the front.
        uint8_t* const dst = place.data + (room - f->data->bytes);
        range(*f, *f->data, dst, f->format == WeightFormat::kMxfp8);
        at += aligned(room);
        if (f->scales != nullptr) {
          place.scales = base + at;
          range(*f, *f->scales, place.scales, true);
          at += aligned(f->scales->bytes);
        }
      }
      FIRN_CHECK(at == bytes);
      weights_.bytes += bytes;
      if (unit.expert) weights_.experts_bytes += bytes;
      weights_.buffers.push_back(std::move(buffer).value());
    }
    return place_scalars();
  }

  // In a buffer of their own, so that an arena whose content is there brings them too.
  Status place_scalars() {
    int64_t count = 0;
    for (const Unit& unit : units_) count += unit_scalars(unit);
    if (count == 0) return {};
    FIRN_ASSIGN(Buffer buffer, arena_.allocate(count * int64_t{sizeof(float)}, kScalarsUnit));
    float* next = buffer.as<float>();
    for (const Unit& unit : units_) {
      for (const FoundSlot* f : unit.slots) {
        if (f->scalar == nullptr) continue;
        ranges_.push_back({f->scalar->shard, f->scalar->file_offset, f->scalar->bytes, next});
        extents_.placed(*f->scalar, next);
        places_[f].scalar = next++;
      }
    }
    weights_.buffers.push_back(std::move(buffer));
    return {};
  }

  int64_t survey_bytes() const {
    int64_t bytes = 0;
    for (const FoundSlot& f : survey_.found) {
      if (f.slot->role != Role::kVision && (f.slot->expert < 0 || options_.experts)) bytes += f.bytes;
    }
    return bytes;
  }

  Status build_views() {
    weights_.layers.resize(static_cast<size_t>(config_.layers));
    for (size_t l = 0; l < weights_.layers.size(); ++l) {
      if (config_.moe_layer[l]) weights_.layers[l].experts.resize(static_cast<size_t>(config_.experts));
    }
    for (const Unit& unit : units_) {
      for (const FoundSlot* f : unit.slots) FIRN_TRY(build_view(*f));
    }
    return check_typical_maxima();
  }

  Status build_view(const FoundSlot& f) {
    const Slot& slot = *f.slot;
    Place& place = places_[&f];
    if (NormWeight* norm = norm_of(slot)) {
      norm->data = place.data;
      norm->dtype = f.data->dtype;
      norm->n = slot.shape[0];
      norm->offset = 1.0f;
      norm->eps = config_.norm_eps;
      return {};
    }
    if (slot.role == Role::kRouterBias) {
      if (!options_.content_is_there) widen_bias(f, place.data);
      weights_.layers[static_cast<size_t>(slot.layer)].router_bias = {place.data,    DType::kF32,   1,
                                                                      slot.shape[0], slot.shape[0], Space::kHost};
      return {};
    }
    WeightView* const view = matrix_of(slot);
    FIRN_CHECK(view != nullptr, "a slot without a place in Weights");
    view->format = f.format;
    view->rows = slot.shape[0];
    view->cols = slot.shape[1];
    view->data = place.data;
    view->scales = place.scales;
    if (f.scalar != nullptr) {
      FIRN_ASSIGN(view->tensor_scale, usable_tensor_scale(f, *place.scalar));
      if (!options_.content_is_there) note_maximum(f, *view);
    }
    return {};
  }

  static void widen_bias(const FoundSlot& f, uint8_t* data) {
    if (f.data->dtype == DType::kF32) return;
    const int64_t n = f.data->elements();
    const uint8_t* const source = data + n * 2;
    for (int64_t i = 0; i < n; ++i) {
      Bf16 narrow;
      std::memcpy(&narrow.bits, source + 2 * i, sizeof(narrow.bits));
      const float wide = to_float(narrow);
      std::memcpy(data + 4 * i, &wide, sizeof(wide));
    }
  }

  // Upper bound of the matrix's largest weight: 6 is the largest E2M1 value.
  void note_maximum(const FoundSlot& f, const WeightView& view) {
    const auto* codes = static_cast<const uint8_t*>(view.scales);
    const uint8_t largest = *std::max_element(codes, codes + f.scales->bytes);
    if (largest == 0) return;
    maxima_[f.slot->layer].push_back({6.0 * e4m3_to_float(largest) * view.tensor_scale, &f});
  }

  // The median per layer, so that one odd expert is no error while a scale used in the wrong direction is.
  Status check_typical_maxima() {
    for (auto& [layer, maxima] : maxima_) {
      const auto middle = maxima.begin() + static_cast<int64_t>(maxima.size() / 2);
      std::nth_element(maxima.begin(), middle, maxima.end(),
                       [](const Maximum& a, const Maximum& b) { return a.value < b.value; });
      if (middle->value >= kSmallestTypicalMax && middle->value <= kLargestTypicalMax) continue;
      const FoundSlot& f = *middle->slot;
      return corrupt(
          fmt::format("{}: with {} the largest weight of the matrix is about {:.3g}; expected {:g} to {:g}. The file "
                      "seems to store the "
                      "inverse of what this name stands for (weight_scale_2 multiplies, weight_global_scale divides)",
                      f.data->name, f.scalar->name, middle->value, kSmallestTypicalMax, kLargestTypicalMax));
    }
    return {};
  }

  NormWeight* norm_of(const Slot& slot) {
    if (slot.role == Role::kFinalNorm) return &weights_.final_norm;
    if (slot.layer < 0) return nullptr;
    LayerWeights& layer = weights_.layers[static_cast<size_t>(slot.layer)];
    switch (slot.role) {
      case Role::kInputNorm:
        return &layer.input_norm;
      case Role::kPostNorm:
        return &layer.post_norm;
      case Role::kQNorm:
        return &layer.q_norm;
      case Role::kKNorm:
        return &layer.k_norm;
      case Role::kIndexQNorm:
        return &layer.index_q_norm;
      case Role::kIndexKNorm:
        return &layer.index_k_norm;
      default:
        return nullptr;
    }
  }

  WeightView* matrix_of(const Slot& slot) {
    if (slot.role == Role::kEmbed) return &weights_.embed;
    if (slot.role == Role::kLmHead) return &weights_.lm_head;
    if (slot.layer < 0) return nullptr;
    LayerWeights& layer = weights_.layers[static_cast<size_t>(slot.layer)];
    const auto expert = [&]() -> ExpertWeights& { return layer.experts[static_cast<size_t>(slot.expert)]; };
    switch (slot.role) {
      case Role::kQ:
        return &layer.q;
      case Role::kK:
        return &layer.k;
      case Role::kV:
        return &layer.v;
      case Role::kO:
        return &layer.o;
      case Role::kIndexQ:
        return &layer.index_q;
      case Role::kIndexK:
        return &layer.index_k;
      case Role::kMlpGate:
        return &layer.mlp_gate;
      case Role::kMlpUp:
        return &layer.mlp_up;
      case Role::kMlpDown:
        return &layer.mlp_down;
      case Role::kRouterGate:
        return &layer.router;
      case Role::kExpertGate:
        return &expert().gate;
      case Role::kExpertUp:
        return &expert().up;
      case Role::kExpertDown:
        return &expert().down;
      case Role::kSharedGate:
        return &layer.shared_gate;
      case Role::kSharedUp:
        return &layer.shared_up;
      case Role::kSharedDown:
        return &layer.shared_down;
      default:
        return nullptr;
    }
  }

  struct Place {
    uint8_t* data = nullptr;
    uint8_t* scales = nullptr;
    const float* scalar = nullptr;
  };
  struct Maximum {
    double value;
    const FoundSlot* slot;
  };

  storage::FileSystem& fs_;
  const Survey& survey_;
  Arena& arena_;
  const LoadOptions& options_;
  const ModelConfig& config_;
  ExtentChecks extents_;
  std::vector<Unit> units_;
  std::unordered_map<const FoundSlot*, Place> places_;
  std::unordered_map<int32_t, std::vector<Maximum>> maxima_;
  std::vector<storage::LoadRange> ranges_;
  std::vector<Placed> placed_;
  Weights weights_;
};

}  // namespace

std::vector<WeightUnit> weight_units(const Survey& survey, const LoadOptions& options) {
  return Loader::units(survey, options.experts);
}

Result<Weights> load_weights(storage::FileSystem& fs, const Survey& survey, Arena& arena, const LoadOptions& options,
                             double* seconds) {
  return Loader(fs, survey, arena, options).run(seconds);
}

}  // namespace firn::model
