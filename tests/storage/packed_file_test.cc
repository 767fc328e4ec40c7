// The packed model file: what is written comes back, damage anywhere is found, and a run that was stopped at any moment
// is finished by the next one, with the same bytes.
#include "storage/packed_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "storage/faulty_file.h"
#include "storage/packed_bytes.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;

FileSystem& real() { return FileSystem::real(); }

// In memory where there is such a folder: thousands of syncs would take long on a disk and tell nothing more.
std::string quick_folder() {
  std::error_code ec;
  return std::filesystem::is_directory("/dev/shm", ec) && ::access("/dev/shm", W_OK) == 0
             ? "/dev/shm"
             : std::filesystem::temp_directory_path().string();
}

// Rows of a repeatable pattern that starts elsewhere for each seed.
PackTensor tensor(std::string name, DType dtype, std::vector<int64_t> shape, int64_t seed, int microseconds = 0) {
  PackTensor t{std::move(name), dtype, std::move(shape), {}};
  int64_t row_bytes = static_cast<int64_t>(dtype_bytes(t.dtype));
  for (size_t d = 1; d < t.shape.size(); ++d) row_bytes *= t.shape[d];
  const int64_t rows = t.shape.empty() ? 1 : t.shape[0];
  const auto content = std::make_shared<const std::string>(test::pattern(seed * 1'000'003, rows * row_bytes));
  t.fill = [content, row_bytes, microseconds](int64_t begin, int64_t n, uint8_t* out) -> Status {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    std::memcpy(out, content->data() + begin * row_bytes, static_cast<size_t>(n * row_bytes));
    return {};
  };
  return t;
}

// Two layers with three experts, odd sizes, a scalar, an empty tensor, and one row that is larger than a write buffer.
PackPlan plan_for(const std::string& out, int microseconds = 0) {
  PackPlan plan;
  plan.out = out;
  plan.files = {{"config.json", "{\"a\": 1}"}, {"empty.txt", ""}, {"tokenizer.json", test::pattern(5, 9000)}};
  plan.identity = "0123456789abcdef0123456789abcdef";
  plan.n_threads = 1;
  plan.record_bytes = 1;
  int64_t seed = 1;
  const auto add = [&](ExtentKind kind, int layer, int expert, std::vector<PackTensor> tensors) {
    plan.extents.push_back({kind, layer, expert, std::move(tensors)});
  };
  add(ExtentKind::kGlobal, -1, -1,
      {tensor("embed", DType::kBf16, {37, 100}, ++seed, microseconds),
       tensor("wide", DType::kU8, {1, (5 << 20) + 3}, ++seed), tensor("none", DType::kF32, {0, 4}, ++seed)});
  for (int layer = 0; layer < 2; ++layer) {
    const std::string at = "l" + std::to_string(layer);
    add(ExtentKind::kLayer, layer, -1, {tensor(at + ".norm", DType::kBf16, {65}, ++seed, microseconds)});
    for (int e = 0; e < 3; ++e) {
      const std::string stem = at + ".e" + std::to_string(e);
      add(ExtentKind::kExpert, layer, e,
          {tensor(stem + ".w1", DType::kF8E4m3, {50, 96}, ++seed, microseconds),
           tensor(stem + ".s1", DType::kU8, {50, 3}, ++seed), tensor(stem + ".g", DType::kF32, {}, ++seed)});
    }
  }
  add(ExtentKind::kOther, -1, -1, {tensor("left", DType::kI64, {3, 2, 1}, ++seed)});
  return plan;
}

PackStats written(const PackPlan& plan, FileSystem& fs = real()) {
  const auto stats = write_packed(fs, plan);
  INFO(stats.status().message());
  REQUIRE(stats.ok());
  return *stats;
}

Status verified(const std::string& path, int threads = 2) {
  return verify_packed(real(), path, threads, {}, nullptr).status();
}

TEST_CASE("A packed file gives back tensors, extents and small files", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  const PackStats stats = written(plan);
  CHECK(stats.experts == 6);
  CHECK(stats.extents == 3 + 1 + 2 + 6 + 1);
  CHECK(stats.resumed_bytes == 0);
  CHECK(folder.entries() == 1);  // neither the partial file nor its record is left
  const auto opened = Checkpoint::open(real(), plan.out);
  REQUIRE(opened.ok());
  const Checkpoint& c = *opened;
  CHECK(c.packed());
  CHECK(c.shards.at(0).bytes == stats.bytes);
  CHECK(c.model_hash == stats.model_hash);
  CHECK(c.identity == plan.identity);
  CHECK(model_identity(real(), c).value() == plan.identity);
  const std::string bytes = test::get_file(plan.out);
  REQUIRE(static_cast<int64_t>(bytes.size()) == stats.bytes);

  size_t extent = plan.files.size(), tensors = 0;
  for (const PackExtent& planned : plan.extents) {
    const Extent& e = c.extents.at(extent++);
    CHECK(e.kind == planned.kind);
    CHECK(e.layer == planned.layer);
    CHECK(e.expert == planned.expert);
    CHECK(e.offset % 4096 == 0);
    CHECK(e.bytes % 4096 == 0);
    REQUIRE(e.tensors.size() == planned.tensors.size());
    for (size_t i = 0; i < planned.tensors.size(); ++i, ++tensors) {
      const TensorInfo& t = c.tensors.at(static_cast<size_t>(e.tensors[i]));
      CHECK(t.name == planned.tensors[i].name);
      CHECK(t.dtype == planned.tensors[i].dtype);
      CHECK(t.shape == planned.tensors[i].shape);
      CHECK((t.file_offset - e.offset) % 64 == 0);
      CHECK(c.find(t.name) == &t);
      std::string expected(static_cast<size_t>(t.bytes), '\0');
      if (t.bytes > 0) {
        REQUIRE(planned.tensors[i]
                    .fill(0, t.shape.empty() ? 1 : t.shape[0], reinterpret_cast<uint8_t*>(expected.data()))
                    .ok());
      }
      CHECK(bytes.compare(static_cast<size_t>(t.file_offset), expected.size(), expected) == 0);
    }
    const auto at = [&](int32_t i) {
      return reinterpret_cast<const std::byte*>(bytes.data()) + c.tensors[static_cast<size_t>(i)].file_offset;
    };
    CHECK(check_extent(c, e, at).ok());
    CHECK(verify_extent(real(), c, e).ok());
  }
  CHECK(tensors == c.tensors.size());
  for (const auto& [name, text] : plan.files) CHECK(read_model_file(real(), plan.out, name, 1 << 20).value() == text);
  CHECK(read_model_file(real(), plan.out, "absent", 100).status().code() == Code::kNotFound);
  CHECK(read_model_file(real(), plan.out, "tokenizer.json", 100).status().code() == Code::kInvalid);
  CHECK(verified(plan.out).ok());
}

TEST_CASE("Small files are read beside a folder's files too", "[packed]") {
  const TempFolder folder;
  folder.write("config.json", "abc");
  folder.write("model.safetensors", "no magic");
  CHECK(read_model_file(real(), folder.path(), "config.json", 10).value() == "abc");
  CHECK(read_model_file(real(), folder / "model.safetensors", "config.json", 10).value() == "abc");
  CHECK(read_model_file(real(), folder / "absent", "config.json", 10).status().code() == Code::kNotFound);
  CHECK_FALSE(is_packed_file(real(), folder.path()).value());
  CHECK_FALSE(is_packed_file(real(), folder / "model.safetensors").value());
  CHECK(verified(folder / "model.safetensors").code() == Code::kInvalid);
}

TEST_CASE("Threads and the rhythm of records do not change a byte", "[packed]") {
  const TempFolder folder;
  PackPlan plan = plan_for(folder / "one");
  const PackStats one = written(plan);
  for (const int threads : {2, 5}) {
    plan.out = folder / std::to_string(threads);
    plan.n_threads = threads;
    plan.record_bytes = threads == 2 ? int64_t{1} << 40 : 5000;
    CHECK(written(plan).model_hash == one.model_hash);
    CHECK(test::get_file(plan.out) == test::get_file(folder / "one"));
  }
}

TEST_CASE("The model hash follows names, config and content, not the layout", "[packed]") {
  const TempFolder folder;
  PackPlan plan = plan_for(folder / "a");
  const std::string hash = written(plan).model_hash;
  plan = plan_for(folder / "b");
  std::swap(plan.extents[1], plan.extents[5]);
  plan.files.erase("tokenizer.json");
  CHECK(written(plan).model_hash == hash);
  plan = plan_for(folder / "c");
  plan.files["config.json"] += " ";
  CHECK(written(plan).model_hash != hash);
  plan = plan_for(folder / "d");
  plan.extents.back().tensors[0] = tensor("left", DType::kI64, {3, 2, 1}, 999);
  CHECK(written(plan).model_hash != hash);
}

TEST_CASE("A damaged byte anywhere is found and its place is named", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  written(plan);
  const Checkpoint c = Checkpoint::open(real(), plan.out).value();
  const std::string good = test::get_file(plan.out);
  const auto file = real().open(plan.out, OpenMode::kUpdate);
  REQUIRE(file.ok());
  const auto status_with = [&](int64_t at, bool verify) {
    const auto broken = static_cast<std::byte>(good[static_cast<size_t>(at)] ^ 0x10);
    const auto whole = static_cast<std::byte>(good[static_cast<size_t>(at)]);
    REQUIRE((*file)->write_at(at, {&broken, 1}).ok());
    const Status status = verify ? verified(plan.out) : Checkpoint::open(real(), plan.out).status();
    REQUIRE((*file)->write_at(at, {&whole, 1}).ok());
    return status;
  };
  for (const Extent& e : c.extents) {
    for (const int64_t at : {e.offset, e.offset + e.bytes / 2, e.offset + e.bytes - 1}) {
      const Status status = status_with(at, true);
      INFO(at << ": " << status.message());
      CHECK(status.code() == Code::kCorrupt);
      CHECK(contains(status.message(), plan.out));
      CHECK(contains(status.message(), "bytes " + std::to_string(e.offset) + " to"));
      if (e.kind != ExtentKind::kFile) CHECK(contains(status.message(), e.what()));
      CHECK(contains(status.message(), "expected checksum"));
    }
  }
  const int64_t directory = c.extents.back().offset + c.extents.back().bytes;
  for (int64_t at = 8; at < 4096; at += at < 80 || at >= 4080 ? 1 : 97) CHECK_FALSE(status_with(at, false).ok());
  for (int64_t at = directory; at < static_cast<int64_t>(good.size()); at += 13) {
    CHECK(status_with(at, false).code() == Code::kCorrupt);
  }
  CHECK(contains(status_with(16, false).message(), "header"));
  CHECK(contains(status_with(directory, false).message(), "directory"));
  CHECK(status_with(8, false).code() == Code::kUnsupported);  // the version
  CHECK(verified(plan.out).ok());
}

TEST_CASE("The first damaged extent is the one that is named", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  written(plan);
  const Checkpoint c = Checkpoint::open(real(), plan.out).value();
  std::string bytes = test::get_file(plan.out);
  for (size_t i = 6; i < c.extents.size(); ++i) bytes[static_cast<size_t>(c.extents[i].offset)] ^= 1;
  test::put_file(plan.out, bytes);
  for (int round = 0; round < 5; ++round) CHECK(contains(verified(plan.out, 4).message(), c.extents[6].what()));
}

TEST_CASE("A file that is too short or too long is refused", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  written(plan);
  const std::string good = test::get_file(plan.out);
  for (const size_t bytes : {size_t{8}, size_t{4095}, size_t{4096}, good.size() / 2, good.size() - 4096,
                             good.size() - 1, good.size() + 1, good.size() + 4096}) {
    std::string changed = good;
    changed.resize(bytes, '\0');
    test::put_file(plan.out, changed);
    const auto opened = Checkpoint::open(real(), plan.out);
    REQUIRE_FALSE(opened.ok());
    CHECK(opened.status().code() == Code::kCorrupt);
    CHECK(contains(opened.status().message(), plan.out));
  }
}

TEST_CASE("A directory that contradicts itself is refused, whatever is wrong with it", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  written(plan);
  const Checkpoint c = Checkpoint::open(real(), plan.out).value();
  const int64_t data_end = c.extents.back().offset + c.extents.back().bytes;
  const std::string good = test::get_file(plan.out).substr(static_cast<size_t>(data_end));
  REQUIRE(parse_packed_directory(good, data_end, "f").ok());
  CHECK_FALSE(parse_packed_directory(good, data_end + 4096, "f").ok());
  CHECK_FALSE(parse_packed_directory(good, data_end - 4096, "f").ok());
  CHECK_FALSE(parse_packed_directory(good + std::string(4096, '\0'), data_end, "f").ok());
  std::mt19937_64 random(7);
  int64_t accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    // One or several bytes or words changed, often to values at the borders of their types; or the end cut off.
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % 1500 % (bytes.size() - 8);
      static constexpr uint64_t kBorders[] = {0, 1, 63, 64, 4095, 4096, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX};
      const uint64_t value = random() % 2 == 0 ? kBorders[random() % std::size(kBorders)] : random();
      std::memcpy(bytes.data() + at, &value, size_t{1} << random() % 4);
    }
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    const auto parsed = parse_packed_directory(bytes, data_end, "f");
    if (!parsed.ok()) {
      CHECK(parsed.status().code() == Code::kCorrupt);
      CHECK(parsed.status().message().size() < 2000);
      continue;
    }
    ++accepted;
    int64_t at = 4096;
    for (const Extent& e : parsed->extents) {
      REQUIRE(e.offset == at);
      REQUIRE(e.bytes > 0);
      at += e.bytes;
      int64_t inside = e.offset;
      for (const int32_t i : e.tensors) {
        const TensorInfo& t = parsed->tensors.at(static_cast<size_t>(i));
        REQUIRE(t.file_offset >= inside);
        REQUIRE(t.bytes == t.elements() * static_cast<int64_t>(dtype_bytes(t.dtype)));
        inside = t.file_offset + t.bytes;
        REQUIRE(inside <= at);
      }
    }
    REQUIRE(at == data_end);
  }
  CHECK(accepted > 0);  // checksums and names may change; else the mutations are too crude to mean anything
  CHECK(accepted < 20000);
}

TEST_CASE("After a fault at any call the next run finishes the file, with the same bytes", "[packed]") {
  const TempFolder folder(quick_folder());
  PackPlan plan = plan_for(folder / "good");
  written(plan);
  const std::string good = test::get_file(plan.out);
  plan.out = folder / "m.firn";
  int64_t resumed = 0, failures = 0;
  for (const FaultKind kind :
       {FaultKind::kNoSpace, FaultKind::kTornWrite, FaultKind::kSyncError, FaultKind::kOpenError}) {
    for (int64_t call = 1;; ++call) {
      INFO("fault " << static_cast<int>(kind) << " at call " << call);
      REQUIRE(call < 500);
      FaultyFileSystem faulty(real(), {{.kind = kind, .first = call, .count = 1, .bytes = 1000}});
      const auto broken = write_packed(faulty, plan);
      if (faulty.hits() == 0) {
        REQUIRE(broken.ok());
        std::filesystem::remove(plan.out);
        break;
      }
      ++failures;
      REQUIRE_FALSE(broken.ok());
      CHECK(contains(broken.status().message(), "injected fault"));
      CHECK_FALSE(std::filesystem::exists(plan.out));
      resumed += written(plan).resumed_bytes > 0 ? 1 : 0;
      REQUIRE(test::get_file(plan.out) == good);
      CHECK(folder.entries() == 2);
      std::filesystem::remove(plan.out);
    }
  }
  CHECK(failures > 60);
  CHECK(resumed > failures / 2);
}

TEST_CASE("A disk that stays full leaves what was recorded, and the next run goes on from it", "[packed]") {
  const TempFolder folder(quick_folder());
  PackPlan plan = plan_for(folder / "good");
  written(plan);
  const std::string good = test::get_file(plan.out);
  plan.out = folder / "m.firn";
  for (const int64_t call : {9, 9, 9}) {
    FaultyFileSystem faulty(real(), {{.kind = FaultKind::kTornWrite, .first = call, .bytes = 100}});
    REQUIRE_FALSE(write_packed(faulty, plan).ok());
  }
  CHECK(written(plan).resumed_bytes > 0);
  CHECK(test::get_file(plan.out) == good);
}

TEST_CASE("A read that fails while checking says so", "[packed]") {
  const TempFolder folder;
  const PackPlan plan = plan_for(folder / "m.firn");
  written(plan);
  for (int64_t call = 1;; ++call) {
    REQUIRE(call < 200);
    FaultyFileSystem faulty(real(), {{.kind = FaultKind::kReadError, .first = call, .count = 1}});
    const auto stats = verify_packed(faulty, plan.out, 1, {}, nullptr);
    if (faulty.hits() == 0) {
      CHECK(stats.ok());
      break;
    }
    CHECK(stats.status().code() == Code::kIo);
  }
  FaultyFileSystem brief(real(), {{.kind = FaultKind::kShortRead, .bytes = 4097}, {.kind = FaultKind::kDirectRefused}});
  CHECK(verify_packed(brief, plan.out, 2, {}, nullptr).ok());
  FaultyFileSystem odd(real(), {{.kind = FaultKind::kShortRead, .bytes = 5000}});
  CHECK(verify_packed(odd, plan.out, 2, {}, nullptr).ok());
}

TEST_CASE("A process killed at any moment leaves a file that the next one finishes", "[packed]") {
  const TempFolder folder(quick_folder());
  PackPlan plan = plan_for(folder / "good");
  written(plan);
  const std::string good = test::get_file(plan.out);
  plan = plan_for(folder / "m.firn", 1500);
  std::mt19937 random(3);
  int killed = 0;
  for (int round = 0; round < 25; ++round) {
    plan.n_threads = 1 + round % 3;  // with several, extents are not finished in their order
    for (int kills = 0; kills < 3; ++kills) {
      const pid_t child = fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        const auto stats = write_packed(real(), plan);
        _exit(stats.ok() || contains(stats.status().message(), "exists already") ? 0 : 1);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
      kill(child, SIGKILL);
      int status = 0;
      REQUIRE(waitpid(child, &status, 0) == child);
      if (WIFSIGNALED(status)) ++killed;
      if (WIFEXITED(status)) CHECK(WEXITSTATUS(status) == 0);
    }
    // The rename may have been the last thing a child did.
    if (!std::filesystem::exists(plan.out)) written(plan);
    REQUIRE(test::get_file(plan.out) == good);
    std::filesystem::remove(plan.out);
  }
  CHECK(killed > 10);
}

TEST_CASE("A cancelled run says how to go on; other options are refused until it is finished", "[packed]") {
  const TempFolder folder(quick_folder());
  PackPlan plan = plan_for(folder / "good");
  const std::string good = (written(plan), test::get_file(plan.out));
  plan.out = folder / "m.firn";
  std::atomic<bool> cancel{false};
  plan.cancel = &cancel;
  auto& last = plan.extents[5].tensors[0];
  const auto fill = last.fill;
  last.fill = [&](int64_t begin, int64_t n, uint8_t* out) {
    cancel = true;
    return fill(begin, n, out);
  };
  const auto stopped = write_packed(real(), plan);
  CHECK(stopped.status().code() == Code::kCancelled);
  CHECK(contains(stopped.status().message(), "the same command goes on"));
  INFO(stopped.status().message());
  CHECK(contains(stopped.status().message(), "9 of 13"));

  PackPlan other = plan_for(plan.out);
  other.files["config.json"] = "{\"a\": 2}";
  const auto refused = write_packed(real(), other);
  CHECK(refused.status().code() == Code::kInvalid);
  CHECK(contains(refused.status().message(), "m.firn.partial.progress"));
  other = plan_for(plan.out);
  other.identity[3] = 'f';
  CHECK(write_packed(real(), other).status().code() == Code::kInvalid);

  cancel = false;
  const PackPlan again = plan_for(plan.out);
  CHECK(written(again).resumed_bytes > 5 << 20);
  CHECK(test::get_file(plan.out) == good);
}

TEST_CASE("Records that are damaged or without their file are not believed", "[packed]") {
  const TempFolder folder(quick_folder());
  PackPlan plan = plan_for(folder / "good");
  const std::string good = (written(plan), test::get_file(plan.out));
  plan.out = folder / "m.firn";
  const std::string record_path = plan.out + ".partial.progress", partial = plan.out + ".partial";
  FaultyFileSystem faulty(real(), {{.kind = FaultKind::kNoSpace, .path_part = ".partial", .first = 24}});
  REQUIRE_FALSE(write_packed(faulty, plan).ok());
  const std::string record = test::get_file(record_path), begun = test::get_file(partial);
  for (size_t at = 24; at < record.size(); at += 11) {
    test::put_file(partial, std::string(begun.size(), 'x'));  // wrong, should it be believed
    std::string damaged = record;
    damaged[at] ^= 1;
    test::put_file(record_path, damaged);
    CHECK(written(plan).resumed_bytes == 0);
    REQUIRE(test::get_file(plan.out) == good);
    std::filesystem::remove(plan.out);
  }
  test::put_file(record_path, record);
  CHECK(written(plan).resumed_bytes == 0);  // the file it speaks of is gone
  REQUIRE(test::get_file(plan.out) == good);
  std::filesystem::remove(plan.out);
  test::put_file(record_path, record);
  test::put_file(partial, begun.substr(0, 5000));  // shorter than what it vouches for
  CHECK(written(plan).resumed_bytes == 0);
  REQUIRE(test::get_file(plan.out) == good);
}

TEST_CASE("OUT is not replaced unasked, and not written by two at once", "[packed]") {
  const TempFolder folder;
  PackPlan plan = plan_for(folder / "m.firn");
  test::put_file(plan.out, "mine");
  const auto refused = write_packed(real(), plan);
  CHECK(refused.status().code() == Code::kInvalid);
  CHECK(contains(refused.status().message(), "--force"));
  CHECK(test::get_file(plan.out) == "mine");
  CHECK(folder.entries() == 1);
  const int fd = ::open((plan.out + ".partial").c_str(), O_RDWR | O_CREAT, 0644);
  REQUIRE(::flock(fd, LOCK_EX | LOCK_NB) == 0);
  plan.overwrite = true;
  CHECK(contains(write_packed(real(), plan).status().message(), "another firn pack"));
  ::close(fd);
  written(plan);
  CHECK(verified(plan.out).ok());

  plan.out = folder / "absent/m.firn";
  CHECK(write_packed(real(), plan).status().code() == Code::kNotFound);
  plan.out = folder.path();
  CHECK(write_packed(real(), plan).status().code() == Code::kInvalid);
  plan.out = folder / "x";
  plan.extents.push_back({ExtentKind::kOther, -1, -1, {tensor("left", DType::kU8, {1}, 1)}});
  CHECK(contains(write_packed(real(), plan).status().message(), "twice"));
  CHECK_FALSE(std::filesystem::exists(folder / "x.partial"));
}

}  // namespace
}  // namespace firn::storage
