// Checkpoint folders: the index and its shards agree, or the error says which file and tensor do not.
#include <chrono>
#include <cstring>
#include <vector>

#include "storage/faulty_file.h"
#include "storage/loader.h"
#include "storage/safetensors.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;

constexpr const char* kIndex = "model.safetensors.index.json";

void write_shard(const std::string& path, const std::vector<std::string>& names, int64_t bytes_each = 1000) {
  std::vector<SafetensorsWriter::Declared> declared;
  for (const std::string& name : names) declared.push_back({name, DType::kU8, {bytes_each}});
  auto writer = SafetensorsWriter::create(path, declared);
  REQUIRE(writer.ok());
  const std::string data = test::pattern(0, bytes_each * static_cast<int64_t>(names.size()));
  REQUIRE(writer->append(data.data(), static_cast<int64_t>(data.size())).ok());
  REQUIRE(writer->finish().ok());
}

void write_index(const TempFolder& folder, const std::vector<std::pair<std::string, std::string>>& map) {
  std::string json = R"({"metadata":{"total_size":1,"more":[{"weight_map":{}}]},"weight_map":{)";
  for (const auto& [tensor, file] : map) {
    if (json.back() != '{') json += ',';
    json += "\"" + tensor + "\":\"" + file + "\"";
  }
  test::put_file(folder / kIndex, json + "}}");
}

Result<Checkpoint> open(const std::string& path) { return Checkpoint::open(FileSystem::real(), path); }

void expect_error(const std::string& path, Code code, const std::vector<std::string>& parts) {
  const auto checkpoint = open(path);
  REQUIRE_FALSE(checkpoint.ok());
  INFO(checkpoint.status().message());
  CHECK(checkpoint.status().code() == code);
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(contains(checkpoint.status().message(), part));
  }
}

TEST_CASE("The stored fixtures open, and every tensor loads as its file holds it", "[checkpoint]") {
  for (const char* name : {"tiny-bf16", "tiny-mxfp8"}) {
    const std::string folder = std::string(FIRN_TEST_DATA) + "/fixtures/" + name;
    const auto checkpoint = open(folder);
    INFO(checkpoint.status().message());
    REQUIRE(checkpoint.ok());
    CHECK(checkpoint->shards.size() == 3);
    REQUIRE(checkpoint->tensors.size() > 100);
    CHECK(checkpoint->find("language_model.lm_head.weight") != nullptr);
    CHECK(checkpoint->find("language_model.lm_head") == nullptr);

    LoadPlan plan;
    for (const Shard& shard : checkpoint->shards) plan.paths.push_back(shard.path);
    int64_t total = 0;
    for (const TensorInfo& tensor : checkpoint->tensors) total += tensor.bytes;
    std::string memory(static_cast<size_t>(total), '\0');
    int64_t at = 0;
    for (const TensorInfo& tensor : checkpoint->tensors) {
      plan.ranges.push_back({tensor.shard, tensor.file_offset, tensor.bytes, memory.data() + at});
      at += tensor.bytes;
    }
    REQUIRE(load(FileSystem::real(), plan, nullptr, nullptr).ok());
    std::vector<SafetensorsFile> files;
    for (const Shard& shard : checkpoint->shards) files.push_back(SafetensorsFile::read(shard.path).value());
    at = 0;
    for (const TensorInfo& tensor : checkpoint->tensors) {
      const std::byte* expected = files[static_cast<size_t>(tensor.shard)].data(tensor.name);
      CHECK(std::memcmp(memory.data() + at, expected, static_cast<size_t>(tensor.bytes)) == 0);
      at += tensor.bytes;
    }
  }
}

TEST_CASE("A folder opens by index, by its files, or as one file", "[checkpoint]") {
  const TempFolder folder;
  write_shard(folder / "one.safetensors", {"b", "a"});
  write_shard(folder / "two.safetensors", {"c"});
  write_shard(folder / ".hidden.safetensors", {"a"});

  SECTION("all files without an index") {
    const auto checkpoint = open(folder.path() + "//");
    REQUIRE(checkpoint.ok());
    REQUIRE(checkpoint->tensors.size() == 3);
    CHECK(checkpoint->tensors[0].name == "a");
    CHECK(checkpoint->shards[0].path == folder / "one.safetensors");
    CHECK(checkpoint->find("c")->shard == 1);
    CHECK(checkpoint->shards[1].bytes == static_cast<int64_t>(std::filesystem::file_size(folder / "two.safetensors")));
  }
  SECTION("one file") {
    const auto checkpoint = open(folder / "two.safetensors");
    REQUIRE(checkpoint.ok());
    CHECK(checkpoint->tensors.size() == 1);
  }
  SECTION("the index decides which files and which of two tensors; unlisted tensors are listed all the same") {
    write_shard(folder / "three.safetensors", {"c", "extra"});
    write_index(folder, {{"c", "three.safetensors"}, {"a", "one.safetensors"}, {"b", "one.safetensors"}});
    for (const std::string& path : {folder.path(), folder / kIndex}) {
      const auto checkpoint = open(path);
      REQUIRE(checkpoint.ok());
      CHECK(checkpoint->shards.size() == 2);  // two.safetensors is not named
      REQUIRE(checkpoint->tensors.size() == 4);
      CHECK(checkpoint->find("extra") != nullptr);
    }
    write_index(folder, {{"c", "three.safetensors"}, {"a", "one.safetensors"}, {"extra", "two.safetensors"}});
    expect_error(folder.path(), Code::kCorrupt, {"\"extra\"", "two.safetensors", "three.safetensors"});
  }
}

TEST_CASE("Folders that are no checkpoint say what is missing", "[checkpoint]") {
  const TempFolder folder;
  expect_error(folder / "absent", Code::kNotFound, {"absent", "no such file or folder"});
  expect_error(folder.path(), Code::kNotFound, {kIndex, "neither"});
  test::put_file(folder / "model.gguf", "GGUF");
  expect_error(folder.path(), Code::kNotFound, {"GGUF"});

  SECTION("a tensor in two files without an index") {
    write_shard(folder / "one.safetensors", {"a"});
    write_shard(folder / "two.safetensors", {"a"});
    expect_error(folder.path(), Code::kCorrupt, {"\"a\"", "one.safetensors", "two.safetensors"});
  }
  SECTION("numbered shards with a gap and no index") {
    write_shard(folder / "model-00001-of-00003.safetensors", {"a"});
    write_shard(folder / "model-00003-of-00003.safetensors", {"b"});
    expect_error(folder.path(), Code::kNotFound, {"2 of 3 shards"});
    write_shard(folder / "model-00002-of-00003.safetensors", {"c"});
    CHECK(open(folder.path()).ok());
  }
}

TEST_CASE("An index and its shards must agree", "[checkpoint]") {
  const TempFolder folder;
  write_shard(folder / "one.safetensors", {"a", "b"});
  write_shard(folder / "two.safetensors", {"c"});
  SECTION("missing shards, with how many tensors they hold") {
    write_index(folder, {{"a", "one.safetensors"}, {"x", "gone.safetensors"}, {"y", "gone.safetensors"}});
    expect_error(folder.path(), Code::kNotFound, {"gone.safetensors", "(2 tensors)", "1 of the 2 shards"});
  }
  SECTION("a tensor that no shard has") {
    write_index(folder, {{"a", "one.safetensors"}, {"b", "one.safetensors"}, {"bb", "one.safetensors"}});
    expect_error(folder.path(), Code::kCorrupt, {"\"bb\"", "one.safetensors", "no shard has it"});
    write_index(folder, {{"a", "one.safetensors"}, {"b", "one.safetensors"}, {"z", "two.safetensors"}});
    expect_error(folder.path(), Code::kCorrupt, {"\"z\""});
  }
  SECTION("files outside the folder") {
    write_shard(folder.path() + "-outside.safetensors", {"a"});
    for (const std::string& name :
         {std::string("../") + folder.path().substr(folder.path().rfind('/') + 1) + "-outside.safetensors",
          folder.path() + "-outside.safetensors", std::string("sub/../../x"), std::string()}) {
      write_index(folder, {{"a", name}});
      expect_error(folder.path(), Code::kCorrupt, {"expected a file inside", kIndex});
    }
    std::filesystem::remove(folder.path() + "-outside.safetensors");
  }
  SECTION("a folder named as a shard") {
    std::filesystem::create_directory(folder / "dir.safetensors");
    write_index(folder, {{"a", "dir.safetensors"}});
    expect_error(folder.path(), Code::kInvalid, {"dir.safetensors", "directory"});
  }
}

TEST_CASE("A broken index is refused with the reason", "[checkpoint]") {
  const TempFolder folder;
  write_shard(folder / "one.safetensors", {"a"});
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {std::string(R"({"weight_map":{"a":"one.safetensors"}})") + '\0', "not valid JSON"},
      {"[]", "expected an object"},
      {"7", "expected an object"},
      {"{}", "no weight_map"},
      {R"({"metadata":{"weight_map":{"a":"one.safetensors"}}})", "no weight_map"},
      {R"({"weight_map":[]})", "expected an object, found a list"},
      {R"({"weight_map":null})", "expected an object, found null"},
      {R"({"weight_map":{}})", "names no tensors"},
      {R"({"weight_map":{"a":1}})", "\"a\": expected the name of a file, found a number"},
      {R"({"weight_map":{"a":["one.safetensors"]}})", "found a list"},
      {R"({"weight_map":{"a":{"b":"one.safetensors"}}})", "found an object"},
      {R"({"weight_map":{"a":"one.safetensors","a":"one.safetensors"}})", "names \"a\" twice"},
      {R"({"weight_map":{"a":"one.safetensors"},"weight_map":{}})", "weight_map is there twice"},
      {R"({"x":)" + std::string(1'000'000, '['), "not valid JSON"},
  };
  for (const auto& [json, expected] : cases) {
    INFO(json.substr(0, 100));
    test::put_file(folder / kIndex, json);
    expect_error(folder.path(), Code::kCorrupt, {expected, kIndex});
  }
}

TEST_CASE("A shard shorter than its header says is refused with file, tensor and sizes", "[checkpoint]") {
  const TempFolder folder;
  const std::string two = folder / "two.safetensors";
  write_shard(folder / "one.safetensors", {"a", "b"});
  write_shard(two, {"c", "d", "e"});
  write_index(folder, {{"a", "one.safetensors"}, {"c", "two.safetensors"}, {"e", "two.safetensors"}});
  REQUIRE(open(folder.path()).ok());
  const std::string whole = test::get_file(two);
  const auto full = static_cast<int64_t>(whole.size());
  const std::vector<std::pair<int64_t, std::string>> cuts = {{1, "\"e\""},    {500, "\"e\""},  {1000, "\"e\""},
                                                             {1001, "\"d\""}, {2000, "\"d\""}, {3000, "\"c\""}};
  for (const auto& [cut, tensor] : cuts) {
    test::put_file(two, whole.substr(0, static_cast<size_t>(full - cut)));
    expect_error(
        folder.path(), Code::kCorrupt,
        {two, tensor, "expected a file of " + std::to_string(full) + " bytes, found " + std::to_string(full - cut)});
  }
  test::put_file(two, whole.substr(0, 50));  // inside the header
  expect_error(folder.path(), Code::kCorrupt, {two, "truncated"});
  test::put_file(two, whole + "x");
  expect_error(folder.path(), Code::kCorrupt, {two, "found " + std::to_string(full + 1)});
}

TEST_CASE("A faulty disk while opening a checkpoint is reported as such", "[checkpoint][faults]") {
  const TempFolder folder;
  write_shard(folder / "one.safetensors", {"a", "b"});
  write_shard(folder / "two.safetensors", {"c"});
  write_index(folder, {{"a", "one.safetensors"}, {"c", "two.safetensors"}});
  // Calls: the index, then length and header of each shard.
  for (int64_t call = 1; call <= 5; ++call) {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kReadError, .first = call, .count = 1}});
    CHECK(Checkpoint::open(faulty, folder.path()).status().code() == Code::kIo);
    CHECK(faulty.hits() == 1);
  }
  for (const char* part : {kIndex, "/one", "/two"}) {
    FaultyFileSystem refused(FileSystem::real(), {{.kind = FaultKind::kOpenError, .path_part = part}});
    CHECK(Checkpoint::open(refused, folder.path()).status().code() == Code::kIo);
    FaultyFileSystem early(FileSystem::real(), {{.kind = FaultKind::kEarlyEnd, .path_part = part, .bytes = 30}});
    CHECK(Checkpoint::open(early, folder.path()).status().code() == Code::kCorrupt);
  }
  FaultyFileSystem brief(FileSystem::real(), {{.kind = FaultKind::kShortRead, .bytes = 5}});
  CHECK(Checkpoint::open(brief, folder.path()).ok());
}

// Names, counts and shard number of the release: 45,838 tensors in 31 files, as header-only copies.
TEST_CASE("A checkpoint of the real size opens quickly", "[checkpoint]") {
  const TempFolder folder;
  constexpr int kTensors = 45838;
  constexpr int kShards = 31;
  std::vector<std::vector<SafetensorsWriter::Declared>> shards(kShards);
  std::vector<std::pair<std::string, std::string>> map;
  const auto shard_name = [](int i) {
    const std::string number = std::to_string(i + 1);
    return "model-" + std::string(5 - number.size(), '0') + number + "-of-00031.safetensors";
  };
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = "language_model.model.layers." + std::to_string(i / 800) + ".block_sparse_moe.experts." +
                             std::to_string(i % 800 / 6) + ".w" + std::to_string(i % 3 + 1) +
                             (i % 6 < 3 ? ".weight" : ".weight_scale_inv");
    const int shard = static_cast<int>(static_cast<int64_t>(i) * kShards / kTensors);
    shards[static_cast<size_t>(shard)].push_back({name, DType::kF8E4m3, {3072, 6144}});
    map.emplace_back(name, shard_name(shard));
  }
  for (int i = 0; i < kShards; ++i) {
    auto writer = SafetensorsWriter::create(folder / shard_name(i), shards[static_cast<size_t>(i)], {}, true);
    REQUIRE(writer.ok());
    REQUIRE(writer->finish().ok());
  }
  write_index(folder, map);
  const auto start = std::chrono::steady_clock::now();
  const auto checkpoint = open(folder.path());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  INFO(checkpoint.status().message());
  REQUIRE(checkpoint.ok());
  CHECK(checkpoint->tensors.size() == kTensors);
  CHECK(checkpoint->shards.size() == kShards);
#if defined(FIRN_ASAN) || defined(FIRN_TSAN)
  constexpr double kLimit = 120;
#else
  constexpr double kLimit = 2;  // 0.11 s measured on an idle machine
#endif
  INFO("opened in " << seconds << " s");
  CHECK(seconds <= kLimit);
}

}  // namespace
}  // namespace firn::storage
