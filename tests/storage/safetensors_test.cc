// safetensors: hostile headers are refused by name, whole files and written files come back as they were.
#include "storage/safetensors.h"

#include <sys/stat.h>

#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;

std::string length_bytes(uint64_t n) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>((n >> (8 * i)) & 0xFF);
  return out;
}

std::string file_of(const std::string& json, int64_t data_bytes) {
  return length_bytes(json.size()) + json + test::pattern(0, data_bytes);
}

Status header_status(const std::string& content) {
  const TempFolder folder;
  test::put_file(folder / "m.safetensors", content);
  const auto file = open_file(folder / "m.safetensors", OpenMode::kRead);
  REQUIRE(file.ok());
  const auto header = read_safetensors_header(**file);
  // Both readers must agree on what is acceptable.
  CHECK(header.status().code() == SafetensorsFile::read(folder / "m.safetensors").status().code());
  if (!header.ok()) CHECK(contains(header.status().message(), "m.safetensors"));
  return header.status();
}

TEST_CASE("A plain header gives names, types, shapes and absolute offsets", "[safetensors]") {
  const std::string json =
      R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"format":"pt"},)"
      R"("a":{"data_offsets":[0,4],"shape":[],"dtype":"F32"},"none":{"dtype":"U8","shape":[0,7],"data_offsets":[16,16]}})"
      "   ";
  const TempFolder folder;
  test::put_file(folder / "m.safetensors", file_of(json, 16));
  const auto file = SafetensorsFile::read(folder / "m.safetensors");
  REQUIRE(file.ok());
  REQUIRE(file->tensors().size() == 3);
  CHECK(file->metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  const TensorInfo* b = file->find("b");
  REQUIRE(b != nullptr);
  CHECK(b->dtype == DType::kBf16);
  CHECK(b->shape == std::vector<int64_t>{2, 3});
  CHECK(b->shape_text() == "[2, 3]");
  CHECK(b->elements() == 6);
  CHECK(b->bytes == 12);
  CHECK(b->file_offset == 8 + static_cast<int64_t>(json.size()) + 4);
  CHECK(std::memcmp(file->data("b"), test::pattern(4, 12).data(), 12) == 0);
  CHECK(file->find("a")->elements() == 1);
  CHECK(file->find("a")->shape_text() == "[]");
  CHECK(file->find("none")->elements() == 0);
  CHECK(file->find("c") == nullptr);
}

TEST_CASE("A file without tensors is legal", "[safetensors]") {
  CHECK(header_status(file_of("{}", 0)).ok());
  CHECK(header_status(file_of("{\"__metadata__\":{}}  ", 0)).ok());
}

TEST_CASE("A length that contradicts the file is refused", "[safetensors]") {
  const std::string json = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "found 0"},
      {"\x01\x02\x03", "found 3"},
      {length_bytes(0), "found nothing"},
      {length_bytes(100) + "{}", "100 bytes, but only 2"},
      {length_bytes(uint64_t{1} << 63) + json, "9223372036854775808"},
      {length_bytes(~uint64_t{0}) + json, "18446744073709551615"},
      {length_bytes(json.size() - 1) + json + "abcd", "not valid JSON"},
      {length_bytes(json.size() + 1) + json + "abcd", "not valid JSON"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"},
  };
  for (const auto& [content, expected] : cases) {
    const Status status = header_status(content);
    INFO(expected << " / " << status.message());
    CHECK(status.code() == Code::kCorrupt);
    CHECK(contains(status.message(), expected));
  }
}

TEST_CASE("A header beyond 100 MB is refused before it is read", "[safetensors]") {
  const TempFolder folder;
  test::put_file(folder / "m", length_bytes(100'000'001));
  std::filesystem::resize_file(folder / "m", 300'000'000);
  FaultyFileSystem no_second_read(FileSystem::real(), {{.kind = FaultKind::kReadError, .first = 2}});
  const auto file = no_second_read.open(folder / "m", OpenMode::kRead);
  const auto header = read_safetensors_header(**file);
  CHECK(header.status().code() == Code::kCorrupt);
  CHECK(contains(header.status().message(), "100000001 bytes, expected at most 100000000"));
}

// One tensor's JSON inside a header.
std::string with(const std::string& body) { return R"({"t":)" + body + "}"; }

TEST_CASE("Hostile headers are refused with the reason", "[safetensors]") {
  const std::string ok = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  REQUIRE(parse_safetensors_header(with(ok), 4, "f").ok());
  const std::string deep(1'000'000, '[');
  using Case = std::tuple<std::string, int64_t, std::string>;
  const std::vector<Case> cases = {
      {"", 0, "found nothing"},
      {"[]", 0, "begins with {"},
      {" {}", 0, "begins with {"},
      {"{", 0, "not valid JSON"},
      {"{}x", 0, "not valid JSON"},
      {std::string("{}\0", 3), 0, "not valid JSON"},
      {"{\"\xFF\":1}", 0, "not valid JSON"},
      {with("1"), 4, "expected an object, found the number 1"},
      {with("null"), 4, "found null"},
      {with("[]"), 4, "expected an object, found a list"},
      {with(deep), 4, "expected an object, found a list"},
      {with("{\"shape\":" + deep), 4, "found a list"},
      {with(R"({"x":)" + deep), 4, "unknown field \"x\""},
      {R"({"__metadata__":[]})", 0, "__metadata__: expected an object"},
      {R"({"__metadata__":{"a":1}})", 0, "key \"a\": expected a text"},
      {R"({"__metadata__":{"a":{}}})", 0, "key \"a\": expected a text"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ is there twice"},
      {with("{}"), 4, "no dtype"},
      {with(R"({"dtype":"U8"})"), 4, "no shape"},
      {with(R"({"dtype":"U8","shape":[4]})"), 4, "no data_offsets"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[0]})"), 4, "no data_offsets"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4,4]})"), 4, "more than 2"},
      {with(R"({"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]})"), 4, "repeated field \"dtype\""},
      {with(R"({"dtype":8,"shape":[4],"data_offsets":[0,4]})"), 4, "dtype: expected a text"},
      {with(R"({"dtype":"U8","shape":4,"data_offsets":[0,4]})"), 4, "shape: expected a list"},
      {with(R"({"dtype":"U8","shape":[[4]],"data_offsets":[0,4]})"), 4, "found a list"},
      {with(R"({"dtype":"U8","shape":["4"],"data_offsets":[0,4]})"), 4, "found the text \"4\""},
      {with(R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})"), 4, "negative number -4"},
      {with(R"({"dtype":"U8","shape":[4.0],"data_offsets":[0,4]})"), 4, "found the number \"4.0\""},
      {with(R"({"dtype":"U8","shape":[true],"data_offsets":[0,4]})"), 4, "found a boolean"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[-1,3]})"), 4, "negative number -1"},
      {with(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]})"), 4, "too large"},
      {with(R"({"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,4]})"), 4, "99999999999999999999"},
      {with(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), 0, "more than 2^63 bytes"},
      {with(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})"), 0, "more than 2^63 bytes"},
      {with(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4],"data_offsets":[0,4]})"), 4, "more than 16"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})"), 4, "run backwards"},
      {with(R"({"dtype":"F32","shape":[4],"data_offsets":[0,4]})"), 4, "takes 16 bytes"},
      {with(ok), 3, "truncated"},
      {with(ok), 0, "truncated"},
      {with(ok), 5, "the tensors end at byte 4 of the data, but 5 bytes are there"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[1,5]})"), 5, "bytes 0 to 1 of the data"},
      {with(R"({"dtype":"U8","shape":[4],"data_offsets":[9223372036854775803,9223372036854775807]})"), 4, "truncated"},
      {R"({"a":)" + ok + R"(,"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8, "tensor \"a\" is there twice"},
      {R"({"a":)" + ok + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})", 7, "inside tensor \"a\""},
      {R"({"a":)" + ok + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4, "inside tensor"},
      {R"({"a":)" + ok + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}})", 10, "bytes 4 to 6"},
  };
  for (const auto& [json, data_bytes, expected] : cases) {
    const auto header = parse_safetensors_header(json, data_bytes, "evil.safetensors");
    INFO(json.substr(0, 200) << " -> " << header.status().message());
    REQUIRE_FALSE(header.ok());
    CHECK(header.status().code() == Code::kCorrupt);
    CHECK(contains(header.status().message(), expected));
    CHECK(contains(header.status().message(), "evil.safetensors"));
    CHECK(header.status().message().size() < 1000);
  }
}

TEST_CASE("An unknown dtype is unsupported, by name", "[safetensors]") {
  const auto header = parse_safetensors_header(with(R"({"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]})"), 3, "f");
  CHECK(header.status().code() == Code::kUnsupported);
  CHECK(contains(header.status().message(), "\"t\""));
  CHECK(contains(header.status().message(), "F6_E2M3"));
}

TEST_CASE("A name cannot spoil the terminal or fill it", "[safetensors]") {
  const std::string name = "\\u001b[2J" + std::string(100'000, 'n');
  const auto header = parse_safetensors_header("{\"" + name + "\":1}", 0, "f");
  CHECK(header.status().message().size() < 1000);
  CHECK_FALSE(contains(header.status().message(), "\x1b"));
}

TEST_CASE("A faulty disk while reading a header is reported as such", "[safetensors][faults]") {
  const TempFolder folder;
  const std::string json = with(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})");
  test::put_file(folder / "m", file_of(json, 4));
  for (const int64_t call : {1, 2}) {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kReadError, .first = call, .count = 1}});
    const auto file = faulty.open(folder / "m", OpenMode::kRead);
    CHECK(read_safetensors_header(**file).status().code() == Code::kIo);
  }
  for (const int64_t end : {0, 7, 8, 20}) {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kEarlyEnd, .bytes = end}});
    const auto file = faulty.open(folder / "m", OpenMode::kRead);
    CHECK(read_safetensors_header(**file).status().code() == Code::kCorrupt);
  }
  FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kShortRead, .bytes = 3}});
  const auto file = faulty.open(folder / "m", OpenMode::kRead);
  CHECK(read_safetensors_header(**file).ok());
}

TEST_CASE("What the writer writes the reader reads", "[safetensors][writer]") {
  const TempFolder folder;
  const std::string path = folder / "out.safetensors";
  const std::string name = "quote\" \\ tab\t \xC3\xA9";
  auto writer = SafetensorsWriter::create(
      path, {{name, DType::kF32, {2, 2}}, {"e", DType::kU8, {0}}, {"s", DType::kBf16, {}}}, {{"key\n", "va\"lue"}});
  REQUIRE(writer.ok());
  CHECK_FALSE(std::filesystem::exists(path));  // not before finish()
  const std::string data = test::pattern(0, 18);
  REQUIRE(writer->append(data.data(), 5).ok());  // pieces need not follow the tensors
  REQUIRE(writer->append(data.data() + 5, 13).ok());
  const Status too_many = writer->append(data.data(), 1);
  CHECK(too_many.code() == Code::kInvalid);
  CHECK(contains(too_many.message(), "take 18 and 18 are written"));
  REQUIRE(writer->finish().ok());
  CHECK(writer->finish().code() == Code::kInvalid);
  CHECK(writer->append(data.data(), 0).code() == Code::kInvalid);
  CHECK(folder.entries() == 1);

  const auto file = SafetensorsFile::read(path);
  REQUIRE(file.ok());
  CHECK(file->metadata() == std::map<std::string, std::string>{{"key\n", "va\"lue"}});
  REQUIRE(file->find(name) != nullptr);
  CHECK(file->find(name)->shape == std::vector<int64_t>{2, 2});
  CHECK(file->find(name)->file_offset % 8 == 0);
  CHECK(std::memcmp(file->data(name), data.data(), 16) == 0);
  CHECK(std::memcmp(file->data("s"), data.data() + 16, 2) == 0);
}

TEST_CASE("An unfinished or failing writer leaves nothing behind", "[safetensors][writer][faults]") {
  const TempFolder folder;
  const std::string path = folder / "out.safetensors";
  const std::vector<SafetensorsWriter::Declared> tensors = {{"t", DType::kU8, {8}}};
  {
    auto writer = SafetensorsWriter::create(path, tensors);
    REQUIRE(writer.ok());
    REQUIRE(writer->append("1234", 4).ok());
    const Status status = writer->finish();
    CHECK(status.code() == Code::kInvalid);
    CHECK(contains(status.message(), "4 bytes are missing"));
    CHECK(folder.entries() == 1);
    SafetensorsWriter moved = std::move(*writer);  // the temporary file moves along and goes once
    REQUIRE(moved.append("5678", 4).ok());
  }
  CHECK(folder.entries() == 0);
  test::put_file(path, "old");
  for (const Fault& fault : std::vector<Fault>{{.kind = FaultKind::kOpenError},
                                               {.kind = FaultKind::kNoSpace},
                                               {.kind = FaultKind::kTornWrite, .first = 2, .bytes = 3},
                                               {.kind = FaultKind::kSyncError}}) {
    FaultyFileSystem faulty(FileSystem::real(), {fault});
    Status status;
    {
      auto writer = SafetensorsWriter::create(path, tensors, {}, false, faulty);
      status = writer.status();
      if (status.ok()) status = writer->append("12345678", 8);
      if (status.ok()) status = writer->finish();
    }
    CHECK(status.code() == Code::kIo);
    CHECK(faulty.hits() == 1);
    CHECK(test::get_file(path) == "old");
    CHECK(folder.entries() == 1);
  }
}

TEST_CASE("The writer refuses what no reader would take", "[safetensors][writer]") {
  const TempFolder folder;
  const auto code = [&](std::vector<SafetensorsWriter::Declared> tensors, bool sparse = false) {
    return SafetensorsWriter::create(folder / "x", std::move(tensors), {}, sparse).status().code();
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  CHECK(code({{"a", DType::kU8, {-1}}}) == Code::kInvalid);
  CHECK(code({{"a", DType::kF32, {kHuge}}}) == Code::kInvalid);
  CHECK(code({{"a", DType::kU8, {kHuge}}, {"b", DType::kU8, {1}}}) == Code::kInvalid);
  CHECK(code({{"a", DType::kU8, {kHuge}}}, true) == Code::kInvalid);
  CHECK(code({{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}) == Code::kInvalid);
  CHECK(code({{"__metadata__", DType::kU8, {1}}}) == Code::kInvalid);
  CHECK(code({{"\xFF", DType::kU8, {1}}}) == Code::kInvalid);
  CHECK(folder.entries() == 0);
  CHECK(SafetensorsWriter::create(folder / "no/x", {}).status().code() == Code::kNotFound);
}

TEST_CASE("A header-only copy has the length but not the data", "[safetensors][writer]") {
  const TempFolder folder;
  constexpr int64_t kRows = 100'000'000;
  auto writer = SafetensorsWriter::create(folder / "x", {{"w", DType::kBf16, {kRows, 6144}}}, {}, true);
  REQUIRE(writer.ok());
  REQUIRE(writer->finish().ok());
  const auto file = open_file(folder / "x", OpenMode::kRead);
  const auto header = read_safetensors_header(**file);
  REQUIRE(header.ok());
  CHECK((*header)[0].bytes == kRows * 6144 * 2);
  struct stat info {};
  REQUIRE(::stat((folder / "x").c_str(), &info) == 0);
  CHECK(info.st_blocks * 512 < 1 << 20);
}

}  // namespace
}  // namespace firn::storage
