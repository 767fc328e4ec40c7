#include "model/shared_weights.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>

namespace firn::model {
namespace {

// To be raised when load_weights puts the same tensors elsewhere within the same units.
constexpr int kPlacementVersion = 1;

std::string real_path(const std::string& path) {
  std::error_code ec;
  const auto real = std::filesystem::canonical(path, ec);
  return ec ? path : real.string();
}

}  // namespace

uint64_t weights_identity(const Survey& survey) {
  std::string text = fmt::format("placement {}\n", kPlacementVersion);
  for (const storage::Shard& shard : survey.checkpoint.shards) {
    struct stat s {};
    // A file system of a test's own has no times.
    if (stat(shard.path.c_str(), &s) != 0) s = {};
    text += fmt::format("{} {} {}.{}\n", std::filesystem::path(shard.path).filename().string(), shard.bytes,
                        s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
  }
  for (const storage::TensorInfo& t : survey.checkpoint.tensors) {
    text += fmt::format("{} {} {} {} {} {}\n", t.name, static_cast<int>(t.dtype), t.shape_text(), t.shard,
                        t.file_offset, t.bytes);
  }
  return XXH3_64bits(text.data(), text.size());
}

int64_t shared_weights_bytes(const std::string& folder, const std::string& model) {
  return storage::shared_bytes_of(folder, real_path(model));
}

Result<Weights> load_shared_weights(storage::FileSystem& fs, const Survey& survey, Arena& private_arena,
                                    const LoadOptions& load, const SharedWeightsOptions& options, SharedWeights* out) {
  storage::SharedOptions shared;
  shared.folder = options.folder;
  shared.identity = weights_identity(survey);
  shared.source = real_path(survey.checkpoint.path);
  for (WeightUnit& unit : weight_units(survey, load)) shared.units.push_back({std::move(unit.what), unit.bytes});
  shared.threads = static_cast<int>(std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, 64));
  shared.verify = options.verify;
  shared.max_wait_s = options.max_wait_s;
  shared.room_bytes = options.room_bytes;
  shared.progress = options.progress;
  shared.say = options.say;
  shared.cancel = load.cancel;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  FIRN_ASSIGN(auto opened, storage::SharedSegment::open(shared, &private_arena.budget()));
  if (opened.segment == nullptr) {
    if (options.say) options.say("weights are not shared: " + opened.why_private);
    out->missing.push_back("weights not shared");
    return load_weights(fs, survey, private_arena, load);
  }
  out->segment = std::move(opened.segment);
  const std::string kind = out->segment->file_system() == "tmpfs" ? "shared" : "shared in hugetlbfs";
  LoadOptions how = load;
  how.content_is_there = out->segment->attached();
  FIRN_ASSIGN(Weights weights, load_weights(fs, survey, *out->segment, how));
  if (how.content_is_there) {
    out->seconds = seconds();
    out->place = fmt::format("{} (attached in {:.1f} s)", kind, out->seconds);
  } else {
    const Status sealed = out->segment->seal();
    out->seconds = seconds();
    if (sealed.code() == Code::kCancelled) return sealed;
    if (sealed.ok()) {
      out->place = fmt::format("{} for later runs (made in {:.1f} s)", kind, out->seconds);
    } else {
      if (options.say) options.say("weights are not shared: " + sealed.message());
      out->place = "in RAM";
      out->missing.push_back("weights not shared");
    }
  }
  if (!out->segment->huge_pages()) {
    out->missing.push_back("no huge pages for shared weights (firn doctor says how)");
  }
  return weights;
}

}  // namespace firn::model
