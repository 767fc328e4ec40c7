// What `firn run` says about a checkpoint that is not what it should be: small broken copies of the tiny fixture. Every
// refusal is exit code 1, one message that names the thing, what was expected and found, and nothing on stdout.
#include <functional>
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kShard = "model-00002-of-00003.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// A copy of a fixture checkpoint to break.
class Copy {
 public:
  explicit Copy(const std::string& fixture = "tiny-bf16") {
    for (const auto& entry : fs::directory_iterator(data_path(fixture))) {
      fs::copy_file(entry.path(), temp_ / entry.path().filename().string());
    }
  }
  std::string path() const { return temp_.path(); }
  std::string file(const std::string& name) const { return temp_ / name; }
  const TempFolder& folder() const { return temp_; }

  void edit_json(const std::string& name, const std::function<void(json&)>& edit) const {
    json j = json::parse(get_file(file(name)));
    edit(j);
    put_file(file(name), j.dump());
  }
  // Rewrites a shard's header, and appends `more` to its data.
  void edit_header(const std::string& name, const std::function<void(ordered_json&, int64_t data_bytes)>& edit,
                   const std::string& more = "") const {
    const std::string bytes = get_file(file(name));
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    ordered_json header = ordered_json::parse(bytes.substr(8, length));
    edit(header, static_cast<int64_t>(bytes.size() - 8 - length));
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    length = text.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &length, 8);
    const uint64_t data = bytes.size() - header_end(bytes);
    put_file(file(name), out + text + bytes.substr(bytes.size() - data) + more);
  }
  Ran run(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"run", "--model", path(), "--max-tokens", "3", "--greedy", "--json"};
    const bool asked = std::find(more.begin(), more.end(), "--tokens") != more.end();
    if (!asked) arguments.insert(arguments.end(), {"--prompt", "Hello"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_firn(arguments);
  }

 private:
  static size_t header_end(const std::string& bytes) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    return 8 + length;
  }
  TempFolder temp_;
};

void refused(const Ran& ran, const std::vector<std::string>& words) {
  INFO("stderr: " << ran.err);
  CHECK(ran.code == 1);
  CHECK(ran.out.empty());
  for (const std::string& word : words) {
    INFO("expected in the message: " << word);
    CHECK(ran.err.find(word) != std::string::npos);
  }
  CHECK(std::count(ran.err.begin(), ran.err.end(), '\n') == 1);
}

std::string some_tensor(const Copy& copy, const std::string& shard, const std::string& ending) {
  const json index = json::parse(get_file(copy.file(kIndex)));
  for (const auto& [name, where] : index.at("weight_map").items()) {
    const bool ends =
        name.size() >= ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
    if (ends && (shard.empty() || where == shard)) return name;
  }
  FAIL("the fixture has no tensor that ends in " << ending);
  return "";
}

TEST_CASE("an unharmed copy answers") {
  const Ran ran = Copy().run();
  INFO(ran.err);
  REQUIRE(ran.code == 0);
  CHECK(json::parse(ran.out).at("token_ids").size() >= 1);
}

TEST_CASE("a model that is not there, or is no folder, is named") {
  TempFolder temp;
  refused(run_firn({"run", "--model", temp / "nowhere", "--prompt", "x"}), {temp / "nowhere"});
  const std::string file = temp.write("weights.bin", "x");
  refused(run_firn({"run", "--model", file, "--prompt", "x"}), {file, "folder"});
  refused(run_firn({"run", "--model", temp.path(), "--prompt", "x"}), {temp / "config.json"});
}

TEST_CASE("a missing shard is named") {
  const Copy copy;
  fs::remove(copy.file(kShard));
  refused(copy.run(), {kShard});
}

TEST_CASE("a truncated shard: how many bytes were expected and found") {
  const Copy copy;
  const uintmax_t bytes = fs::file_size(copy.file(kShard));
  fs::resize_file(copy.file(kShard), bytes - 1000);
  refused(copy.run(), {kShard, std::to_string(bytes), std::to_string(bytes - 1000)});
}

TEST_CASE("a header longer than its file") {
  const Copy copy;
  std::string bytes = get_file(copy.file(kShard));
  const uint64_t length = 50'000'000;
  std::memcpy(bytes.data(), &length, 8);
  put_file(copy.file(kShard), bytes);
  refused(copy.run(), {kShard, "50000000"});
}

TEST_CASE("an empty shard, and one that is text") {
  const Copy copy;
  put_file(copy.file(kShard), "");
  refused(copy.run(), {kShard, "found 0"});
  put_file(copy.file(kShard), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
  refused(copy.run(), {kShard, "Git LFS pointer"});
}

TEST_CASE("a wrong dtype and a wrong shape: expected and found") {
  const Copy copy;
  const std::string name = some_tensor(copy, kShard, "self_attn.q_proj.weight");
  copy.edit_header(kShard, [&](ordered_json& h, int64_t) { h.at(name).at("dtype") = "I16"; });
  refused(copy.run(), {name, "expected", "found", "I16"});
  copy.edit_header(kShard, [&](ordered_json& h, int64_t) {
    h.at(name).at("dtype") = "BF16";
    auto& shape = h.at(name).at("shape");
    std::swap(shape[0], shape[1]);
  });
  refused(copy.run(), {name, "expected", "found"});
}

TEST_CASE("a missing scale is named with its matrix") {
  const Copy copy("tiny-mxfp8");
  const std::string name = some_tensor(copy, "", ".weight_scale_inv");
  const std::string other = name.substr(0, name.rfind('.')) + ".nothing";
  const std::string shard = json::parse(get_file(copy.file(kIndex))).at("weight_map").at(name);
  copy.edit_header(shard, [&](ordered_json& h, int64_t) {
    h[other] = h.at(name);
    h.erase(name);
  });
  copy.edit_json(kIndex, [&](json& j) {
    j["weight_map"].erase(name);
    j["weight_map"][other] = shard;
  });
  refused(copy.run(), {name});
}

TEST_CASE("a missing tensor is named with its shape") {
  const Copy copy;
  const std::string name = some_tensor(copy, kShard, "input_layernorm.weight");
  copy.edit_header(kShard, [&](ordered_json& h, int64_t) {
    h["something.else"] = h.at(name);
    h.erase(name);
  });
  copy.edit_json(kIndex, [&](json& j) {
    j["weight_map"].erase(name);
    j["weight_map"]["something.else"] = kShard;
  });
  refused(copy.run(), {name, "[128]"});
}

TEST_CASE("an extra tensor is named: weights nobody asked for mean another model") {
  const Copy copy;
  copy.edit_header(
      kShard,
      [&](ordered_json& h, int64_t data) {
        h["a.tensor.nobody.asked.for"] = {{"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {data, data + 8}}};
      },
      std::string(8, '\0'));
  copy.edit_json(kIndex, [&](json& j) { j["weight_map"]["a.tensor.nobody.asked.for"] = kShard; });
  refused(copy.run(), {"unexpected tensor a.tensor.nobody.asked.for"});
}

TEST_CASE("another architecture is named, and what firn runs") {
  const Copy copy;
  copy.edit_json("config.json", [](json& j) {
    j["architectures"] = {"LlamaForCausalLM"};
    j["model_type"] = "llama";
  });
  refused(copy.run(), {copy.path(), "llama", "minimax_m3"});
}

TEST_CASE("a config that contradicts itself or the weights") {
  const Copy copy;
  const std::string good = get_file(copy.file("config.json"));
  copy.edit_json("config.json", [](json& j) { j["text_config"]["num_attention_heads"] = 3; });
  refused(copy.run(), {"config.json", "3"});
  put_file(copy.file("config.json"), good);
  copy.edit_json("config.json", [](json& j) { j["text_config"]["num_experts_per_tok"] = 9; });
  refused(copy.run(), {"config.json", "9", "8"});
  put_file(copy.file("config.json"), good);
  copy.edit_json("config.json", [](json& j) { j["text_config"]["hidden_size"] = 256; });
  refused(copy.run(), {"expected", "found"});
  put_file(copy.file("config.json"), good);
  copy.edit_json("config.json", [](json& j) { j["text_config"]["moe_layer_freq"] = {0, 1}; });
  refused(copy.run(), {"config.json", "moe_layer_freq"});
  put_file(copy.file("config.json"), good.substr(0, good.size() / 2));
  refused(copy.run(), {"config.json"});
}

TEST_CASE("without a tokenizer text is refused and token ids work") {
  const Copy copy;
  fs::remove(copy.file("tokenizer.json"));
  refused(copy.run(), {"tokenizer.json", "--tokens"});
  const Ran ran = copy.run({"--tokens", copy.folder().write("ids.json", "[5, 6, 7]")});
  INFO(ran.err);
  REQUIRE(ran.code == 0);
  CHECK(json::parse(ran.out).at("token_ids").size() == 3);
}

TEST_CASE("a broken tokenizer is named; token ids still work") {
  const Copy copy;
  const std::string good = get_file(copy.file("tokenizer.json"));
  put_file(copy.file("tokenizer.json"), good.substr(0, good.size() / 2));
  refused(copy.run(), {"tokenizer.json"});
  const Ran ran = copy.run({"--tokens", copy.folder().write("ids.json", "{\"ids\": [5, 6, 7]}")});
  CHECK(ran.code == 0);
}

TEST_CASE("a text-only checkpoint, without the vision tensors, answers the same") {
  const Copy whole, copy;
  const json index = json::parse(get_file(copy.file(kIndex)));
  std::map<std::string, std::vector<std::string>> dropped;  // by shard
  for (const auto& [name, where] : index.at("weight_map").items()) {
    if (name.rfind("vision", 0) == 0 || name.rfind("multi_modal", 0) == 0 || name.rfind("patch_merge", 0) == 0) {
      dropped[where].push_back(name);
    }
  }
  REQUIRE_FALSE(dropped.empty());
  for (const auto& [shard, names] : dropped) {
    // Data cannot be left without a tensor, so what stays is written anew.
    const auto file = must(storage::SafetensorsFile::read(copy.file(shard)));
    std::vector<storage::SafetensorsWriter::Declared> kept;
    for (const auto& t : file.tensors()) {
      if (std::find(names.begin(), names.end(), t.name) == names.end()) kept.push_back({t.name, t.dtype, t.shape});
    }
    if (kept.empty()) {
      fs::remove(copy.file(shard));
      continue;
    }
    auto writer = must(storage::SafetensorsWriter::create(copy.file("new"), kept));
    for (const auto& d : kept) must(writer.append(file.data(d.name), file.find(d.name)->bytes));
    must(writer.finish());
    fs::rename(copy.file("new"), copy.file(shard));
  }
  copy.edit_json(kIndex, [&](json& j) {
    for (const auto& [shard, names] : dropped) {
      for (const std::string& name : names) j["weight_map"].erase(name);
    }
  });
  const Ran with = whole.run(), without = copy.run();
  INFO(without.err);
  REQUIRE(without.code == 0);
  CHECK(json::parse(without.out).at("logits_xxh3") == json::parse(with.out).at("logits_xxh3"));
}

TEST_CASE("a weight that is no number ends the answer with its place named, not with nonsense") {
  const Copy copy;
  const std::string name = "language_model.lm_head.weight";
  std::string shard = json::parse(get_file(copy.file(kIndex))).at("weight_map").value(name, "");
  REQUIRE_FALSE(shard.empty());
  std::string bytes = get_file(copy.file(shard));
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const int64_t at = ordered_json::parse(bytes.substr(8, length)).at(name).at("data_offsets")[0];
  const uint16_t nan = 0x7FC0;
  for (int i = 0; i < 64; ++i) std::memcpy(bytes.data() + 8 + length + at + 2 * i, &nan, 2);
  put_file(copy.file(shard), bytes);
  refused(copy.run({"--quiet"}), {"token 0", "nan", "expected a number"});
}

}  // namespace
}  // namespace firn::test
