// Weights in a shared segment: the same logits as from private memory in every format, whoever made the segment, and a
// run that cannot share computes all the same.
#include "model/shared_weights.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "model/synth.h"
#include "support/catch.h"
#include "support/fixtures.h"
#include "tests/support/temp_folder.h"

namespace firn::model {
namespace {

namespace fs = std::filesystem;

struct Lab {
  std::unique_ptr<test::TempFolder> folder;  // in a tmpfs
  EngineOptions options;
  std::string said;

  explicit Lab(const std::string& model) {
    if (access(storage::kSharedFolder, W_OK) == 0 && storage::shared_room(storage::kSharedFolder).why_not.empty()) {
      folder = std::make_unique<test::TempFolder>(storage::kSharedFolder);
      options.shared.folder = folder->path();
    } else {
      WARN("no tmpfs at /dev/shm: not tested");
    }
    options.model = model;
    options.threads = 2;
    options.isa = test::must(cpu::choose_isa());
    options.share_weights = true;
    options.shared.say = [this](const std::string& words) { said += words + "\n"; };
  }
  std::unique_ptr<Engine> open() {
    said.clear();
    return test::must(Engine::open(storage::FileSystem::real(), options));
  }
  bool usable() const { return folder != nullptr; }
};

std::vector<float> logits(Engine* engine) {
  Session session = engine->new_session();
  const std::vector<int32_t> ids = {5, 6, 7, 1, 2, 3, 4, 9, 11, 17};
  test::must(session.begin(ids));
  while (!session.idle()) test::must(session.step());
  return {session.logits().begin(), session.logits().end()};
}

bool says(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST_CASE("shared weights give the logits of private ones, whether made or attached", "[shared]") {
  test::TempFolder disk;
  for (const std::string format : {"bf16", "mxfp8", "nvfp4"}) {
    CAPTURE(format);
    std::string model = test::data_path("tiny-" + format);
    if (format == "nvfp4") {
      model = disk / format;
      test::must(convert_checkpoint(storage::FileSystem::real(), test::data_path("tiny-bf16"), model,
                                    CheckpointFormat::kNvfp4));
    }
    Lab lab(model);
    if (!lab.usable()) return;
    lab.options.share_weights = false;
    const auto alone = lab.open();
    const std::vector<float> expected = logits(alone.get());
    CHECK(lab.folder->entries() == 0);
    CHECK(says(alone->first_line(), "in RAM"));
    lab.options.share_weights = true;
    const auto first = lab.open();
    CHECK(says(first->first_line(), "shared for later runs"));
    CHECK(logits(first.get()) == expected);
    for (int i = 0; i < 2; ++i) {
      const auto second = lab.open();
      CAPTURE(lab.said, second->first_line());
      CHECK(says(second->first_line(), "shared (attached in "));
      CHECK(lab.said.empty());
      CHECK(logits(second.get()) == expected);
      CHECK(second->weights().bytes == alone->weights().bytes);
      CHECK(second->budget().used_bytes() >= second->weights().bytes);
    }
    CHECK(lab.folder->entries() == 1);
    CHECK(shared_weights_bytes(lab.folder->path(), model + "/.") >= alone->weights().bytes);
  }
}

TEST_CASE("the units a load asks its arena for are those it was said to", "[shared]") {
  for (const auto& entry : fs::directory_iterator(test::data_path(""))) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    CAPTURE(entry.path().string());
    const auto survey = Survey::open(storage::FileSystem::real(), entry.path().string());
    if (!survey.ok() || !survey->loadable().ok()) continue;
    Budget budget("--ram", -1);
    HostArena arena(&budget);
    const auto weights = load_weights(storage::FileSystem::real(), *survey, arena, {});
    REQUIRE(weights.ok());
    const std::vector<WeightUnit> units = weight_units(*survey, {});
    REQUIRE(units.size() == weights->buffers.size());
    for (size_t i = 0; i < units.size(); ++i) CHECK(units[i].bytes == weights->buffers[i].bytes());
  }
}

TEST_CASE("damage in the segment and a changed checkpoint are found, said and made good", "[shared]") {
  test::TempFolder disk;
  fs::copy(test::data_path("tiny-mxfp8"), disk / "m", fs::copy_options::recursive);
  Lab lab(disk / "m");
  if (!lab.usable()) return;
  const std::vector<float> expected = logits(lab.open().get());
  const std::string path = fs::directory_iterator(lab.folder->path())->path().string();
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg((2 << 20) + 12345);
    const int c = file.get();
    file.seekp((2 << 20) + 12345);
    file.put(static_cast<char>(c ^ 1));
  }
  {
    const auto engine = lab.open();
    CHECK(says(lab.said, "is damaged (weights: "));
    CHECK(says(engine->first_line(), "shared for later runs"));
    CHECK(logits(engine.get()) == expected);
  }
  // An attached run reads headers only: data that became noise under its old time makes no difference to it.
  for (const auto& entry : fs::directory_iterator(disk / "m")) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto time = fs::last_write_time(entry.path());
    const auto bytes = static_cast<int64_t>(fs::file_size(entry.path()));
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof(header));
    const int64_t data = 8 + static_cast<int64_t>(header);
    file.seekp(data);
    file << std::string(static_cast<size_t>(bytes - data), '\x11');
    file.close();
    fs::last_write_time(entry.path(), time);
  }
  {
    const auto engine = lab.open();
    CHECK(says(engine->first_line(), "attached"));
    CHECK(logits(engine.get()) == expected);
  }
  for (const auto& entry : fs::directory_iterator(disk / "m")) {
    if (entry.path().extension() == ".safetensors") {
      fs::last_write_time(entry.path(), fs::last_write_time(entry.path()) + std::chrono::seconds(1));
    }
  }
  {
    const auto engine = lab.open();
    CHECK(says(lab.said, "stale"));
    CHECK(logits(engine.get()) != expected);  // the noise
  }
  CHECK(lab.folder->entries() == 1);
}

TEST_CASE("a run that cannot share says so and computes the same", "[shared]") {
  Lab lab(test::data_path("tiny-mxfp8"));
  if (!lab.usable()) return;
  const std::vector<float> expected = logits(lab.open().get());
  REQUIRE(storage::drop_shared(lab.folder->path(), "all").ok());
  lab.options.shared.room_bytes = 1000;
  auto engine = lab.open();
  CHECK(says(lab.said, "weights are not shared: "));
  CHECK(says(lab.said, "remount,size="));
  CHECK(says(engine->first_line(), "weights not shared"));
  CHECK(says(engine->first_line(), "in RAM"));
  CHECK(logits(engine.get()) == expected);
  CHECK(lab.folder->entries() == 0);
  lab.options.shared.room_bytes = -1;
  // A load that fails leaves no segment behind.
  std::atomic<bool> cancel{true};
  lab.options.cancel = &cancel;
  CHECK_FALSE(Engine::open(storage::FileSystem::real(), lab.options).ok());
  CHECK(lab.folder->entries() == 0);
  cancel = false;
  lab.options.load_progress = [&](int64_t, int64_t) { cancel = true; };
  CHECK_FALSE(Engine::open(storage::FileSystem::real(), lab.options).ok());
  CHECK(lab.folder->entries() == 0);
}

}  // namespace
}  // namespace firn::model
