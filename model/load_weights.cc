// Loading the text weights as stored.
//
// One Buffer for what belongs to no layer, one for each layer without its routed experts, and one for each routed
// expert (gate, up, down and their scales, 64-byte aligned each): an expert is the unit that residency moves. Ranges go
// to storage::load in the disk's order, batch by batch, and every scale byte and 8-bit weight code of a batch is looked
// at once while the next one is read: kernels expand codes by bit operations that do not carry NaN through.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "model/extent_checks.h"
#include "model/weights.h"
#include "runtime/thread_team.h"
#include "storage/loader.h"

namespace firn::model {
namespace {

using storage::TensorInfo;

constexpr int64_t kAlign = 64;
constexpr int64_t kScanPiece = int64_t{1} << 16;
constexpr int64_t kBatchBytes = int64_t{256} << 20;
// formats.md 4.4: a typical largest weight lies between these; the wrong direction of a global scale is off by its
// square.
constexpr double kSmallestTypicalMax = 1e-3, kLargestTypicalMax = 1e1;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// What the bytes of a tensor must not be.
enum class Check : uint8_t { kNone, kE8m0Scale, kE4m3Scale, kE4m3Data };

bool bad_code(Check check, uint8_t code) {
  switch (check) {
    case Check::kE8m0Scale:
      return code == 0xFF;
    case Check::kE4m3Scale:
      return code >= 0x7F;
    case Check::kE4m3Data:
      return (code & 0x7F) == 0x7F;
    case Check::kNone:
      break;
  }
  return false;
}

// Position of the first bad code, or -1. The inner loop has no branch, so that compilers make it wide.
template <typename Bad>
int64_t scan(const uint8_t* p, int64_t n, Bad bad) {
  for (int64_t begin = 0; begin < n; begin += kScanPiece) {
    const int64_t end = std::min(n, begin + kScanPiece);
    unsigned any = 0;
    for (int64_t i = begin; i < end; ++i) any |= static_cast<unsigned>(bad(p[i]));
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (bad(p[i])) return i;
    }
  }
  return -1;
}

int64_t first_bad(Check check, const uint8_t* p, int64_t n) {
  switch (check) {
    case Check::kE8m0Scale:
      return scan(p, n, [](uint8_t c) { return c == 0xFF; });
    case Check::kE4m3Scale:
      return scan(p, n, [](uint8_t c) { return c >= 0x7F; });
    case Check::kE4m3Data:
      return scan(p, n, [](uint8_t c) { return (c & 0x7F) == 0x7F; });
    case Check::kNone:
      break;
  }
  return -1;
}

struct Placed {
  const TensorInfo* tensor;
  const uint8_t* data;
  Check check;
};

Status describe_bad(const Placed& placed, int64_t at) {
  const TensorInfo& t = *placed.tensor;
  const uint8_t code = placed.data[at];
  FIRN_CHECK(bad_code(placed.check, code));
  const int64_t cols = t.shape.empty() ? 1 : std::max<int64_t>(t.shape.back(), 1);
  const char* what = placed.check == Check::kE8m0Scale  ? "scale byte 255 is NaN (E8M0); expected 0 to 254"
                     : placed.check == Check::kE4m3Data ? "is an E4M3 NaN; expected a number"
                                                        : "is not a positive E4M3 number; a scale must be 0x00 to 0x7E";
  return corrupt(fmt::format("{}: code 0x{:02X} at [{}, {}] {}; the file is damaged or was converted wrongly", t.name,
                             code, at / cols, at % cols, what));
}

// Looks at every placed tensor, several at a time.
Status check_codes(const std::vector<Placed>& placed, int n_threads, const std::atomic<bool>* cancel) {
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards `first` and `first_at`
  Status first;
  size_t first_at = placed.size();
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < placed.size(); i = next.fetch_add(1)) {
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return;
      const int64_t at = first_bad(placed[i].check, placed[i].data, placed[i].tensor->bytes);
      if (at < 0) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (i < first_at) {
        first_at = i;
        first = describe_bad(placed[i], at);
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
    collect();
    FIRN_TRY(place_units());
    FIRN_TRY(read_and_check(seconds));
    FIRN_TRY(build_views());
    return std::move(weights_);
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
        return check_codes(batch, threads, options_.cancel);
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

  void collect() {
    units_.push_back({"embeddings and output head", {}, false});
    const size_t first_layer = units_.size();
    for (int64_t l = 0; l < config_.layers; ++l) units_.push_back({fmt::format("layer {}", l), {}, false});
    for (const FoundSlot& found : survey_.found) {
      const Slot& slot = *found.slot;
      if (slot.role == Role::kVision) continue;
      if (slot.layer < 0) {
        units_[0].slots.push_back(&found);
      } else if (slot.expert < 0) {
        units_[first_layer + static_cast<size_t>(slot.layer)].slots.push_back(&found);
      } else {
        if (slot.role == Role::kExpertGate) {
          units_.push_back({fmt::format("expert {} of layer {}", slot.expert, slot.layer), {}, true});
        }
        units_.back().slots.push_back(&found);
      }
    }
  }

  void range(const TensorInfo& t, uint8_t* dst, Check check) {
    if (t.bytes == 0) return;
    ranges_.push_back({t.shard, t.file_offset, t.bytes, dst});
    extents_.placed(t, dst);
    if (check != Check::kNone) placed_.push_back({&t, dst, check});
  }

  static int64_t data_room(const FoundSlot& f) {
    // The router bias becomes f32 whatever it is stored as.
    return f.slot->role == Role::kRouterBias ? f.data->elements() * int64_t{sizeof(float)} : f.data->bytes;
  }

  Status place_units() {
    for (const Unit& unit : units_) {
      int64_t bytes = 0;
      for (const FoundSlot* f : unit.slots) {
        bytes += aligned(data_room(*f)) + (f->scales != nullptr ? aligned(f->scales->bytes) : 0);
      }
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
        range(*f->data, dst, f->format == WeightFormat::kMxfp8 ? Check::kE4m3Data : Check::kNone);
        at += aligned(room);
        if (f->scales != nullptr) {
          place.scales = base + at;
          range(*f->scales, place.scales, f->format == WeightFormat::kNvfp4 ? Check::kE4m3Scale : Check::kE8m0Scale);
          at += aligned(f->scales->bytes);
        }
        if (f->scalar != nullptr) {
          ranges_.push_back({f->scalar->shard, f->scalar->file_offset, f->scalar->bytes, &place.scalar});
          extents_.placed(*f->scalar, &place.scalar);
        }
      }
      FIRN_CHECK(at == bytes);
      weights_.bytes += bytes;
      if (unit.expert) weights_.experts_bytes += bytes;
      weights_.buffers.push_back(std::move(buffer).value());
    }
    return {};
  }

  int64_t survey_bytes() const {
    int64_t bytes = 0;
    for (const FoundSlot& f : survey_.found) bytes += f.slot->role == Role::kVision ? 0 : f.bytes;
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
      widen_bias(f, place.data);
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
      const float v = place.scalar;
      if (!(std::isfinite(v) && v > 0)) {
        return corrupt(
            fmt::format("{}: the scale of the whole matrix must be a positive number, found {}", f.scalar->name, v));
      }
      view->tensor_scale = f.scalar_inverse ? 1.0f / v : v;
      if (!(std::isfinite(view->tensor_scale) && view->tensor_scale > 0)) {
        return corrupt(fmt::format("{}: {} has no usable inverse", f.scalar->name, v));
      }
      note_maximum(f, *view);
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
    float scalar = 1.0f;  // load writes here: the map's nodes do not move
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

Result<Weights> load_weights(storage::FileSystem& fs, const Survey& survey, Arena& arena, const LoadOptions& options,
                             double* seconds) {
  return Loader(fs, survey, arena, options).run(seconds);
}

}  // namespace firn::model
