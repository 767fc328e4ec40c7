// Synthetic and converted checkpoints: complete, reproducible, of sane magnitude, and nothing half-written.
#include "model/synth.h"

#include <cmath>
#include <filesystem>
#include <random>
#include <set>

#include "cpu/reference.h"
#include "support/catch.h"
#include "tests/model/checkpoint_fixture.h"

namespace firn::model {
namespace {

namespace stdfs = std::filesystem;
using test::HeldCheckpoint;

std::string fixture(const std::string& name) { return std::string(FIRN_TEST_DATA) + "/fixtures/" + name; }

struct Loaded {
  Budget budget{"--ram", -1};
  HostArena arena{&budget};
  Result<Survey> survey;
  Result<Weights> weights = internal("not loaded");
  explicit Loaded(const std::string& path) : survey(Survey::open(storage::FileSystem::real(), path)) {
    if (survey.ok()) weights = load_weights(storage::FileSystem::real(), *survey, arena, {});
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
};

Status make(const std::string& out, CheckpointFormat format, uint64_t seed = 1, int threads = 2, int64_t layers = 0,
            int64_t experts = 0, int64_t shard_bytes = 2'000'000'000) {
  SynthOptions options;
  options.config = fixture("tiny-bf16");
  options.out = out;
  options.format = format;
  options.seed = seed;
  options.n_threads = threads;
  options.layers = layers;
  options.experts = experts;
  options.shard_bytes = shard_bytes;
  return synth_checkpoint(storage::FileSystem::real(), options);
}

std::vector<float> matrix_of(const WeightView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  for (int64_t r = 0; r < view.rows; ++r) cpu::reference_dequantise_row(view, r, out.data() + r * view.cols);
  return out;
}

double deviation(const std::vector<float>& v) {
  double sum = 0;
  for (const float x : v) sum += double{x} * x;
  return std::sqrt(sum / static_cast<double>(v.size()));
}

constexpr CheckpointFormat kAll[] = {CheckpointFormat::kBf16, CheckpointFormat::kMxfp8, CheckpointFormat::kNvfp4,
                                     CheckpointFormat::kMxfp4};

TEST_CASE("a synthetic checkpoint is complete in every format and its weights have the size asked for", "[synth]") {
  test::TempFolder folder;
  for (const CheckpointFormat format : kAll) {
    const std::string out = folder / checkpoint_format_name(format);
    const Status made = make(out, format);
    INFO(out << ": " << made.message());
    REQUIRE(made.ok());
    CHECK(stdfs::exists(out + "/tokenizer.json"));
    CHECK(stdfs::exists(out + "/generation_config.json"));
    CHECK_FALSE(stdfs::exists(out + ".partial"));
    Loaded loaded(out);
    INFO(loaded.weights.status().message());
    REQUIRE(loaded.weights.ok());
    CHECK(loaded.survey->unexpected.empty());
    const LayerWeights& layer = loaded.weights->layers[2];
    CHECK(layer.router.format == WeightFormat::kF32);
    CHECK(layer.q.format == (format == CheckpointFormat::kBf16 ? WeightFormat::kBf16 : WeightFormat::kMxfp8));
    const WeightFormat expert = format == CheckpointFormat::kBf16    ? WeightFormat::kBf16
                                : format == CheckpointFormat::kMxfp8 ? WeightFormat::kMxfp8
                                : format == CheckpointFormat::kNvfp4 ? WeightFormat::kNvfp4
                                                                     : WeightFormat::kMxfp4;
    CHECK(layer.experts[3].gate.format == expert);
    // gain / sqrt(inputs), within the spread of scales and of rounding to 4 bits
    CHECK(deviation(matrix_of(layer.q)) == Approx(1.0 / std::sqrt(128.0)).epsilon(0.25));
    CHECK(deviation(matrix_of(layer.experts[3].gate)) == Approx(1.5 / std::sqrt(128.0)).epsilon(0.25));
    CHECK(deviation(matrix_of(layer.router)) == Approx(1.5 / std::sqrt(128.0)).epsilon(0.1));
    CHECK(deviation(matrix_of(loaded.weights->embed)) == Approx(1.0).epsilon(0.05));
    // Neighbours cancel in down projections, within a scale group.
    const auto down = matrix_of(layer.experts[3].down);
    for (size_t i = 0; i + 1 < down.size(); i += 2) REQUIRE(down[i] == -down[i + 1]);
    // Different tensors hold different numbers.
    CHECK(matrix_of(layer.experts[0].gate) != matrix_of(layer.experts[1].gate));
    CHECK(matrix_of(layer.experts[0].gate) != matrix_of(layer.experts[0].up));
  }
}

TEST_CASE("routers spread tokens over the experts", "[synth]") {
  test::TempFolder folder;
  REQUIRE(make(folder / "m", CheckpointFormat::kBf16, 5, 2, 0, 32).ok());
  Loaded loaded(folder / "m");
  REQUIRE(loaded.weights.ok());
  const LayerWeights& layer = loaded.weights->layers[1];
  const auto router = matrix_of(layer.router);
  const auto* bias = static_cast<const float*>(layer.router_bias.data);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<int> chosen(32);
  for (int t = 0; t < 500; ++t) {
    std::vector<float> x(128);
    for (float& v : x) v = normal(rng);
    std::vector<std::pair<double, int>> scores;
    for (int e = 0; e < 32; ++e) {
      double logit = 0;
      for (int i = 0; i < 128; ++i)
        logit += double{router[static_cast<size_t>(e * 128 + i)]} * x[static_cast<size_t>(i)];
      scores.push_back({-(1 / (1 + std::exp(-logit)) + bias[e]), e});
    }
    std::sort(scores.begin(), scores.end());
    for (int k = 0; k < 4; ++k) ++chosen[static_cast<size_t>(scores[static_cast<size_t>(k)].second)];
  }
  for (int e = 0; e < 32; ++e) {
    INFO("expert " << e << " chosen " << chosen[static_cast<size_t>(e)] << " times; the mean is 62.5");
    CHECK(chosen[static_cast<size_t>(e)] >= 15);
    CHECK(chosen[static_cast<size_t>(e)] <= 190);
  }
}

TEST_CASE("the same seed gives the same bytes on any number of threads, another seed others", "[synth]") {
  test::TempFolder folder;
  for (const CheckpointFormat format : {CheckpointFormat::kBf16, CheckpointFormat::kNvfp4}) {
    const std::string name = checkpoint_format_name(format);
    REQUIRE(make((folder / (name + "a")), format, 9, 1, 0, 0, 300'000).ok());
    REQUIRE(make((folder / (name + "b")), format, 9, 4, 0, 0, 300'000).ok());
    REQUIRE(make((folder / (name + "c")), format, 10, 2, 0, 0, 300'000).ok());
    size_t files = 0;
    for (const auto& entry : stdfs::directory_iterator((folder / (name + "a")))) {
      const std::string file = entry.path().filename().string();
      CHECK(test::get_file(entry.path().string()) == test::get_file((folder / (name + "b")) + "/" + file));
      files += file.find(".safetensors") != std::string::npos ? 1 : 0;
    }
    CHECK(files > 4);
    const HeldCheckpoint a = HeldCheckpoint::read((folder / (name + "a"))),
                         c = HeldCheckpoint::read((folder / (name + "c")));
    const std::string q = "language_model.model.layers.1.self_attn.q_proj.weight";
    CHECK(a.tensors.at(q).bytes != c.tensors.at(q).bytes);
  }
}

TEST_CASE("layers and experts can be changed in both directions", "[synth]") {
  test::TempFolder folder;
  for (const auto& [layers, experts] : {std::pair<int64_t, int64_t>{2, 4}, {9, 16}}) {
    const std::string out = folder / std::to_string(layers);
    REQUIRE(make(out, CheckpointFormat::kMxfp8, 1, 2, layers, experts).ok());
    Loaded loaded(out);
    INFO(loaded.weights.status().message());
    REQUIRE(loaded.weights.ok());
    CHECK(loaded.survey->config.layers == layers);
    CHECK(loaded.survey->config.experts == experts);
    CHECK(loaded.survey->config.n_moe() == layers - 1);
    CHECK(loaded.survey->config.n_sparse() == layers - 1);
    CHECK(loaded.survey->config.quant_method == "mxfp8");
  }
  CHECK_FALSE(make(folder / "few", CheckpointFormat::kBf16, 1, 2, 0, 2).ok());  // 4 experts a token
  CHECK_FALSE(stdfs::exists(folder / "few"));
}

TEST_CASE("nothing half-written is left behind", "[synth]") {
  test::TempFolder folder;
  const std::atomic<bool> cancel{true};
  SynthOptions options;
  options.config = fixture("tiny-bf16/config.json");
  options.out = folder / "m";
  options.cancel = &cancel;
  const Status status = synth_checkpoint(storage::FileSystem::real(), options);
  CHECK(status.code() == Code::kCancelled);
  CHECK_FALSE(stdfs::exists(folder / "m"));
  CHECK_FALSE(stdfs::exists(folder / "m.partial"));

  stdfs::create_directory(folder / "m.partial");  // what a crash leaves
  test::put_file((folder / "m.partial") + "/junk.safetensors", "junk");
  options.cancel = nullptr;
  REQUIRE(synth_checkpoint(storage::FileSystem::real(), options).ok());
  CHECK_FALSE(stdfs::exists((folder / "m") + "/junk.safetensors"));
  const Status again = synth_checkpoint(storage::FileSystem::real(), options);
  CHECK(again.message().find("exists already") != std::string::npos);
  options.out = folder / "no/such/folder";
  CHECK(synth_checkpoint(storage::FileSystem::real(), options).code() == Code::kNotFound);
}

TEST_CASE("conversion keeps what is exact and rounds the rest within the format", "[synth]") {
  test::TempFolder folder;
  auto& fs = storage::FileSystem::real();
  const struct {
    CheckpointFormat format;
    double error;  // relative to the matrix's deviation
  } cases[] = {{CheckpointFormat::kMxfp8, 0.04}, {CheckpointFormat::kNvfp4, 0.12}, {CheckpointFormat::kMxfp4, 0.16}};
  for (const std::string& source : {fixture("tiny-bf16"), std::string(FIRN_NANO) + "/nano-bf16"}) {
    Loaded original(source);
    REQUIRE(original.weights.ok());
    for (const auto& c : cases) {
      const std::string out =
          (folder / (std::to_string(std::hash<std::string>{}(source)) + checkpoint_format_name(c.format)));
      const Status status = convert_checkpoint(fs, source, out, c.format, 1'000'000);
      INFO(source << " to " << checkpoint_format_name(c.format) << ": " << status.message());
      REQUIRE(status.ok());
      Loaded converted(out);
      INFO(converted.weights.status().message());
      REQUIRE(converted.weights.ok());
      CHECK(converted.survey->has_vision);
      CHECK(converted.survey->parameters == original.survey->parameters);
      for (size_t l = 1; l < original.weights->layers.size(); ++l) {
        const ExpertWeights& from = original.weights->layers[l].experts[1];
        const ExpertWeights& to = converted.weights->layers[l].experts[1];
        for (const auto& [a, b] : {std::pair{&from.gate, &to.gate}, {&from.up, &to.up}, {&from.down, &to.down}}) {
          auto x = matrix_of(*a), y = matrix_of(*b);
          for (size_t i = 0; i < x.size(); ++i) y[i] -= x[i];
          CHECK(deviation(y) <= c.error * deviation(x));
          CHECK(deviation(y) > 0);
        }
        const auto *a = &original.weights->layers[l].router, *b = &converted.weights->layers[l].router;
        CHECK(matrix_of(*a) == matrix_of(*b));
      }
    }
  }
  // MXFP8 is exact in bf16, and what has the format already keeps its bytes.
  REQUIRE(convert_checkpoint(fs, fixture("tiny-mxfp8"), folder / "back", CheckpointFormat::kBf16).ok());
  Loaded a(fixture("tiny-mxfp8")), b(folder / "back");
  REQUIRE(a.weights.ok());
  REQUIRE(b.weights.ok());
  for (size_t l = 1; l < 5; ++l) {
    CHECK(matrix_of(a.weights->layers[l].experts[7].down) == matrix_of(b.weights->layers[l].experts[7].down));
    CHECK(matrix_of(a.weights->layers[l].index_q) == matrix_of(b.weights->layers[l].index_q));
  }
  REQUIRE(convert_checkpoint(fs, fixture("tiny-mxfp8"), folder / "mixed", CheckpointFormat::kNvfp4).ok());
  const HeldCheckpoint before = HeldCheckpoint::read(fixture("tiny-mxfp8")),
                       after = HeldCheckpoint::read(folder / "mixed");
  int same = 0;
  for (const auto& [name, t] : before.tensors) {
    if (name.find(".experts.") != std::string::npos) continue;
    REQUIRE(after.tensors.count(name) == 1);
    CHECK(after.tensors.at(name).bytes == t.bytes);
    ++same;
  }
  CHECK(same > 100);
}

TEST_CASE("a NaN weight cannot be quantised and is named", "[synth]") {
  HeldCheckpoint held = HeldCheckpoint::read(fixture("tiny-bf16"));
  const std::string name = "language_model.model.layers.2.self_attn.k_proj.weight";
  held.at(name).bytes[2 * (5 * 128 + 9)] = 0xC0;
  held.at(name).bytes[2 * (5 * 128 + 9) + 1] = 0x7F;
  test::TempFolder folder;
  held.write(folder / "m");
  const Status status =
      convert_checkpoint(storage::FileSystem::real(), folder / "m", folder / "out", CheckpointFormat::kMxfp8);
  REQUIRE_FALSE(status.ok());
  CHECK(status.message().find(name) != std::string::npos);
  CHECK(status.message().find("row 5") != std::string::npos);
  CHECK_FALSE(stdfs::exists(folder / "out"));
  CHECK_FALSE(stdfs::exists(folder / "out.partial"));
}

}  // namespace
}  // namespace firn::model
