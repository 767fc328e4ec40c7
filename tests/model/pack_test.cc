// A checkpoint and the packed file made of it are the same model: same weights, same identity; and damage in what is
// loaded is found while it is loaded.
#include "model/pack.h"

#include <cstring>

#include "cpu/reference.h"
#include "model/extent_checks.h"
#include "storage/faulty_file.h"
#include "tests/model/checkpoint_fixture.h"
#include "tests/support/catch.h"
#include "tests/support/fixtures.h"

namespace firn::model {
namespace {

using storage::Checkpoint;
using storage::Extent;
using storage::ExtentKind;
using test::data_path;
using test::must;
using test::TempFolder;

storage::FileSystem& real() { return storage::FileSystem::real(); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string packed(const TempFolder& folder, const std::string& source, std::optional<CheckpointFormat> experts = {},
                   const std::string& name = "m.firn") {
  PackOptions options;
  options.source = source;
  options.out = folder / name;
  options.experts = experts;
  options.n_threads = 2;
  must(pack_checkpoint(real(), options));
  return options.out;
}

struct Loaded {
  explicit Loaded(const std::string& path, storage::FileSystem& fs = real()) : budget("test", -1), arena(&budget) {
    survey = must(Survey::open(fs, path));
    LoadOptions options;
    options.n_readers = 2;
    auto result = load_weights(fs, survey, arena, options);
    if (result.ok()) {
      weights = std::move(result).value();
    } else {
      status = result.status();
    }
  }
  Budget budget;
  HostArena arena;
  Survey survey;
  Weights weights;
  Status status;
};

// Every matrix, row by row as floats.
std::vector<float> values(const WeightView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  for (int64_t r = 0; r < view.rows; ++r) cpu::reference_dequantise_row(view, r, out.data() + r * view.cols);
  return out;
}

TEST_CASE("A packed checkpoint loads to the same bytes as its folder", "[pack]") {
  for (const char* fixture : {"tiny-bf16", "tiny-mxfp8"}) {
    CAPTURE(fixture);
    const TempFolder folder;
    const std::string path = packed(folder, data_path(fixture));
    const Loaded a(data_path(fixture)), b(path);
    REQUIRE(a.status.ok());
    INFO(b.status.message());
    REQUIRE(b.status.ok());
    CHECK(a.weights.bytes == b.weights.bytes);
    CHECK(a.weights.experts_bytes == b.weights.experts_bytes);
    CHECK(values(a.weights.embed) == values(b.weights.embed));
    CHECK(values(a.weights.lm_head) == values(b.weights.lm_head));
    for (size_t l = 0; l < a.weights.layers.size(); ++l) {
      const LayerWeights &x = a.weights.layers[l], &y = b.weights.layers[l];
      CHECK(values(x.q) == values(y.q));
      CHECK(values(x.o) == values(y.o));
      REQUIRE(x.experts.size() == y.experts.size());
      for (size_t e = 0; e < x.experts.size(); ++e) {
        CHECK(values(x.experts[e].gate) == values(y.experts[e].gate));
        CHECK(values(x.experts[e].up) == values(y.experts[e].up));
        CHECK(values(x.experts[e].down) == values(y.experts[e].down));
      }
    }
    CHECK(must(storage::model_identity(real(), a.survey.checkpoint)) ==
          must(storage::model_identity(real(), b.survey.checkpoint)));
    CHECK(a.survey.parameters == b.survey.parameters);
    CHECK(a.survey.has_vision == b.survey.has_vision);
    CHECK(a.survey.unexpected == b.survey.unexpected);
    CHECK(Tokenizer::open(real(), path).ok());
    for (const char* name : {"chat_template.jinja", "generation_config.json", "preprocessor_config.json"}) {
      CHECK(must(storage::read_model_file(real(), path, name, 1 << 20)) ==
            test::get_file(data_path(fixture) + "/" + name));
    }
    CHECK(storage::read_model_file(real(), path, "model.safetensors.index.json", 1 << 20).status().code() ==
          Code::kNotFound);
    // Packed again from the packed file: the same bytes.
    CHECK(test::get_file(packed(folder, path, {}, "again.firn")) == test::get_file(path));
  }
}

TEST_CASE("An expert's extent is laid out as its slot in memory is", "[pack]") {
  const TempFolder folder;
  for (const CheckpointFormat format :
       {CheckpointFormat::kBf16, CheckpointFormat::kMxfp8, CheckpointFormat::kNvfp4, CheckpointFormat::kMxfp4}) {
    const std::string path = packed(folder, data_path("tiny-mxfp8"), format, checkpoint_format_name(format));
    CAPTURE(path);
    const Loaded loaded(path);
    REQUIRE(loaded.status.ok());
    const Survey& survey = loaded.survey;
    std::map<std::pair<int32_t, int32_t>, const Extent*> extents;
    for (const Extent& e : survey.checkpoint.extents) {
      if (e.kind == ExtentKind::kExpert) extents[{e.layer, e.expert}] = &e;
    }
    CHECK(static_cast<int64_t>(extents.size()) == survey.config.n_moe() * survey.config.experts);
    std::map<std::pair<int32_t, int32_t>, int64_t> next;
    for (const FoundSlot& f : survey.found) {
      if (f.slot->expert < 0) continue;
      const Extent& e = *extents.at({f.slot->layer, f.slot->expert});
      int64_t& at = next.try_emplace({f.slot->layer, f.slot->expert}, e.offset).first->second;
      for (const storage::TensorInfo* t : {f.data, f.scales}) {
        if (t == nullptr) continue;
        CHECK(t->file_offset == at);
        at += (t->bytes + 63) / 64 * 64;
      }
      if (f.scalar != nullptr) {
        CHECK(f.scalar->file_offset > e.offset);
        CHECK(f.scalar->file_offset < e.offset + e.bytes);
      }
    }
  }
}

TEST_CASE("Converted experts are those that convert_checkpoint makes; the rest stays", "[pack]") {
  for (const char* fixture : {"tiny-bf16", "tiny-mxfp8"}) {
    const TempFolder folder;
    const Loaded before(data_path(fixture));
    const std::string identity = must(storage::model_identity(real(), before.survey.checkpoint));
    for (const CheckpointFormat format :
         {CheckpointFormat::kBf16, CheckpointFormat::kMxfp8, CheckpointFormat::kNvfp4, CheckpointFormat::kMxfp4}) {
      const std::string name = checkpoint_format_name(format);
      INFO(fixture << " to " << name);
      const std::string path = packed(folder, data_path(fixture), format, name + ".firn");
      must(convert_checkpoint(real(), data_path(fixture), folder / name, format));
      const Loaded a(folder / name), b(path);
      REQUIRE(a.status.ok());
      INFO(b.status.message());
      REQUIRE(b.status.ok());
      const bool same = std::string(fixture) == "tiny-" + name;
      CHECK((b.survey.checkpoint.identity == identity) == same);
      CHECK(b.survey.checkpoint.experts == (same ? "keep" : name));
      for (size_t l = 0; l < a.weights.layers.size(); ++l) {
        for (size_t e = 0; e < a.weights.layers[l].experts.size(); ++e) {
          const ExpertWeights &x = a.weights.layers[l].experts[e], &y = b.weights.layers[l].experts[e];
          CHECK(x.gate.format == y.gate.format);
          CHECK(x.gate.tensor_scale == y.gate.tensor_scale);
          CHECK(values(x.gate) == values(y.gate));
          CHECK(values(x.up) == values(y.up));
          CHECK(values(x.down) == values(y.down));
        }
        CHECK(b.weights.layers[l].q.format == before.weights.layers[l].q.format);
        CHECK(values(b.weights.layers[l].q) == values(before.weights.layers[l].q));
      }
    }
  }
}

TEST_CASE("A damaged tensor is found while it is loaded, and its extent is named", "[pack]") {
  const TempFolder folder;
  for (const CheckpointFormat format : {CheckpointFormat::kMxfp8, CheckpointFormat::kNvfp4}) {
    const std::string path = packed(folder, data_path("tiny-mxfp8"), format, checkpoint_format_name(format));
    const Checkpoint c = must(Checkpoint::open(real(), path));
    const std::string good = test::get_file(path);
    int64_t tried = 0;
    const auto file = must(real().open(path, storage::OpenMode::kUpdate));
    for (const Extent& e : c.extents) {
      if (e.kind == ExtentKind::kFile || e.kind == ExtentKind::kVision || e.kind == ExtentKind::kOther) continue;
      if (e.kind == ExtentKind::kExpert && e.expert % 5 != 0) continue;
      // The lowest bit of the last byte of some tensor: nothing but the checksum can tell.
      const storage::TensorInfo& t =
          c.tensors[static_cast<size_t>(e.tensors[e.tensors.size() * 7 % 11 % e.tensors.size()])];
      const int64_t at = t.file_offset + t.bytes - 1;
      const auto broken = static_cast<std::byte>(good[static_cast<size_t>(at)] ^ 1);
      const auto whole = static_cast<std::byte>(good[static_cast<size_t>(at)]);
      must(file->write_at(at, {&broken, 1}));
      const Loaded loaded(path);
      must(file->write_at(at, {&whole, 1}));
      INFO(t.name << ": " << loaded.status.message());
      CHECK(loaded.status.code() == Code::kCorrupt);
      CHECK(contains(loaded.status.message(), path));
      CHECK(contains(loaded.status.message(), e.what()));
      CHECK(contains(loaded.status.message(), "expected checksum"));
      ++tried;
    }
    CHECK(tried > 10);
    CHECK(Loaded(path).status.ok());
  }
}

TEST_CASE("An extent with much that is not loaded is read by itself", "[pack]") {
  const TempFolder folder;
  storage::PackPlan plan;
  plan.out = folder / "m.firn";
  plan.files = {{"config.json", "{}"}};
  plan.identity = std::string(32, '0');
  const auto fill = [](int64_t begin, int64_t n, uint8_t* out) -> Status {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>((begin + i) * 31);
    return {};
  };
  plan.extents = {{ExtentKind::kLayer, 0, -1, {{"a", DType::kU8, {100}, fill}, {"b", DType::kU8, {3 << 20}, fill}}},
                  {ExtentKind::kLayer, 1, -1, {{"c", DType::kU8, {100}, fill}, {"d", DType::kU8, {30}, fill}}}};
  must(storage::write_packed(real(), plan));
  for (const char* damaged : {"", "a", "b", "c", "d"}) {
    CAPTURE(damaged);
    const Checkpoint c = must(Checkpoint::open(real(), plan.out));
    const std::string good = test::get_file(plan.out);
    if (*damaged != '\0') {
      std::string bytes = good;
      bytes[static_cast<size_t>(c.find(damaged)->file_offset) + 9] ^= 1;
      test::put_file(plan.out, bytes);
    }
    ExtentChecks checks(c);
    std::vector<uint8_t> a(100), b(100);
    std::vector<storage::LoadRange> ranges = {{0, c.find("a")->file_offset, 100, a.data()},
                                              {0, c.find("c")->file_offset, 100, b.data()}};
    checks.placed(*c.find("a"), a.data());
    checks.placed(*c.find("c"), b.data());
    checks.place_rest(&ranges);
    CHECK(ranges.size() == 3);  // d is small, b is not
    storage::LoadPlan load;
    load.paths = {plan.out};
    load.ranges = ranges;
    must(storage::load(real(), load, {}, nullptr));
    const Extent& second = c.extents[2];
    const Status first = checks.check_read(real(), second.offset, 2, nullptr);
    CHECK(first.ok() == (std::string(damaged) != "a" && std::string(damaged) != "b"));
    const Status rest = checks.check_read(real(), INT64_MAX, 2, nullptr);
    CHECK(rest.ok() == (std::string(damaged) != "c" && std::string(damaged) != "d"));
    test::put_file(plan.out, good);
  }
}

TEST_CASE("Small files inside are checked when they are read", "[pack]") {
  const TempFolder folder;
  const std::string path = packed(folder, data_path("tiny-bf16"));
  const Checkpoint c = must(Checkpoint::open(real(), path));
  std::string bytes = test::get_file(path);
  bytes[static_cast<size_t>(c.files.at("config.json").offset) + 20] ^= 1;
  bytes[static_cast<size_t>(c.files.at("tokenizer.json").offset) + 20] ^= 1;
  test::put_file(path, bytes);
  const auto survey = Survey::open(real(), path);
  CHECK(survey.status().code() == Code::kCorrupt);
  CHECK(contains(survey.status().message(), "config.json"));
  const auto tokenizer = Tokenizer::open(real(), path);
  CHECK(contains(tokenizer.status().message(), "tokenizer.json"));
  CHECK(contains(tokenizer.status().message(), "expected checksum"));
}

TEST_CASE("Read faults at any call fail packing and loading, never silently", "[pack]") {
  const TempFolder folder;
  PackOptions options;
  options.source = data_path("tiny-mxfp8");
  options.out = folder / "m.firn";
  options.n_threads = 1;
  int64_t hits = 0;
  for (int64_t call = 1;; call += 1 + call / 12) {
    storage::FaultyFileSystem faulty(real(), {{.kind = storage::FaultKind::kReadError, .first = call, .count = 1}});
    const auto stats = pack_checkpoint(faulty, options);
    if (faulty.hits() == 0) {
      REQUIRE(stats.ok());
      break;
    }
    ++hits;
    REQUIRE_FALSE(stats.ok());
  }
  CHECK(hits > 20);
  const std::string good = packed(folder, options.source, {}, "good.firn");
  REQUIRE(test::get_file(options.out) == test::get_file(good));
  for (int64_t call = 1;; call += 1 + call / 12) {
    storage::FaultyFileSystem faulty(real(), {{.kind = storage::FaultKind::kReadError, .first = call, .count = 1}});
    const auto survey = Survey::open(faulty, good);
    if (survey.ok()) {
      Budget budget("test", -1);
      HostArena arena(&budget);
      const auto weights = load_weights(faulty, *survey, arena, {});
      if (faulty.hits() == 0) {
        CHECK(weights.ok());
        break;
      }
      CHECK(weights.status().code() == Code::kIo);
    }
  }
}

TEST_CASE("What cannot be packed is refused before anything is written", "[pack]") {
  const TempFolder folder;
  test::HeldCheckpoint held = test::HeldCheckpoint::read(data_path("tiny-bf16"));
  held.remove(held.tensors.begin()->first);
  held.write(folder / "broken");
  PackOptions options;
  options.source = folder / "broken";
  options.out = folder / "m.firn";
  CHECK(pack_checkpoint(real(), options).status().code() == Code::kCorrupt);
  options.source = folder / "absent";
  CHECK_FALSE(pack_checkpoint(real(), options).ok());
  CHECK(folder.entries() == 1);
}

TEST_CASE("The packed file may lie in the folder it is made from", "[pack]") {
  const TempFolder folder;
  std::filesystem::copy(data_path("tiny-bf16"), folder / "model");
  const std::string first = packed(folder, folder / "model", {}, "model/m.firn");
  const std::string bytes = test::get_file(first);
  PackOptions options;
  options.source = folder / "model";
  options.out = first;
  CHECK(contains(pack_checkpoint(real(), options).status().message(), "exists already"));
  options.overwrite = true;
  REQUIRE(pack_checkpoint(real(), options).ok());
  CHECK(test::get_file(first) == bytes);
  CHECK(test::get_file(packed(folder, data_path("tiny-bf16"))) == bytes);
  CHECK(Survey::open(real(), folder / "model")->loadable().ok());
}

TEST_CASE("The identity of a folder follows config, headers and the ends of its data", "[pack]") {
  const TempFolder folder;
  test::HeldCheckpoint held = test::HeldCheckpoint::read(data_path("tiny-bf16"));
  const auto identity = [&](const std::string& name) {
    held.write(folder / name);
    return must(storage::model_identity(real(), must(Checkpoint::open(real(), folder / name))));
  };
  const std::string a = identity("a");
  CHECK(identity("b") == a);
  held.tensors.begin()->second.bytes[5] ^= 1;
  CHECK(identity("c") != a);
  held.tensors.begin()->second.bytes[5] ^= 1;
  held.tensors.rbegin()->second.bytes.back() ^= 1;
  CHECK(identity("d") != a);
  held.tensors.rbegin()->second.bytes.back() ^= 1;
  held.config["torch_dtype"] = "other";
  CHECK(identity("e") != a);
}

}  // namespace
}  // namespace firn::model
