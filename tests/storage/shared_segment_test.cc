// Shared segments: what a second opening finds is what the first left, whatever was damaged, killed or in the way is
// said and made anew, and nothing but our own files is touched.
#include "storage/shared_segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

namespace firn::storage {
namespace {

namespace fs = std::filesystem;

// A folder in a memory file system, or nothing where the system has none for us.
std::unique_ptr<test::TempFolder> memory_folder() {
  if (access(kSharedFolder, W_OK) != 0 || !shared_room(kSharedFolder).why_not.empty()) {
    WARN("no tmpfs at /dev/shm: not tested");
    return nullptr;
  }
  return std::make_unique<test::TempFolder>(kSharedFolder);
}

uint8_t byte_of(size_t unit, int64_t i) { return static_cast<uint8_t>(unit * 37 + static_cast<size_t>(i) * 11 + 5); }

struct Lab {
  explicit Lab(const std::string& folder) {
    options.folder = folder;
    options.identity = 0x1234;
    options.source = "/models/one";
    options.units = {{"layer 0", 3 << 20}, {"expert 0 of layer 1", 1000}, {"expert 1 of layer 1", 64}, {"scales", 4}};
    options.say = [this](const std::string& words) { said += words + "\n"; };
  }
  SharedOptions options;
  Budget budget{"--ram", -1};
  std::string said;

  SharedSegment::Opened open() {
    said.clear();
    auto opened = SharedSegment::open(options, &budget);
    FIRN_CHECK(opened.ok(), opened.status().message());
    return std::move(opened).value();
  }
  std::vector<Buffer> buffers(SharedSegment* segment) const {
    std::vector<Buffer> out;
    for (const SharedUnit& u : options.units) {
      auto buffer = segment->allocate(u.bytes, u.what);
      FIRN_CHECK(buffer.ok(), buffer.status().message());
      out.push_back(std::move(buffer).value());
    }
    return out;
  }
  void fill(SharedSegment* segment) const {
    const std::vector<Buffer> all = buffers(segment);
    for (size_t u = 0; u < all.size(); ++u) {
      for (int64_t i = 0; i < all[u].bytes(); ++i) all[u].as<uint8_t>()[i] = byte_of(u, i);
    }
    const Status sealed = segment->seal();
    FIRN_CHECK(sealed.ok(), sealed.message());
  }
  bool right(SharedSegment* segment) const {
    const std::vector<Buffer> all = buffers(segment);
    for (size_t u = 0; u < all.size(); ++u) {
      if (reinterpret_cast<uintptr_t>(all[u].data()) % 64 != 0) return false;
      for (int64_t i = 0; i < all[u].bytes(); ++i) {
        if (all[u].as<uint8_t>()[i] != byte_of(u, i)) return false;
      }
    }
    return true;
  }
  // A complete segment that nobody uses; its path.
  std::string make() {
    const auto opened = open();
    FIRN_CHECK(opened.segment != nullptr && !opened.segment->attached(), opened.why_private + said);
    fill(opened.segment.get());
    return options.folder + "/" + opened.segment->name();
  }
  bool attaches() {
    const auto opened = open();
    return opened.segment != nullptr && opened.segment->attached() && right(opened.segment.get());
  }
};

void flip(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int c = file.get();
  file.seekp(at);
  file.put(static_cast<char>(c ^ 0x40));
  FIRN_CHECK(file.good(), path);
}

// Runs `work` in a process of its own.
template <typename Work>
pid_t in_child(Work work) {
  const pid_t pid = fork();
  FIRN_CHECK(pid >= 0);
  if (pid == 0) _exit(work());
  return pid;
}
int wait_for(pid_t pid) {
  int status = 0;
  FIRN_CHECK(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
void wait_until(const std::function<bool()>& is) {
  for (int i = 0; i < 1000 && !is(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  REQUIRE(is());
}

TEST_CASE("a second opening finds the bytes of the first, read-only and charged like private memory", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  for (const int threads : {1, 3}) {
    lab.options.threads = threads;
    const std::string path = lab.make();
    CHECK(lab.budget.used_bytes() == 0);
    struct stat s {};
    REQUIRE(stat(path.c_str(), &s) == 0);
    CHECK((s.st_mode & 07777) == 0600);
    int64_t last = 0, total = 0;
    lab.options.progress = [&](int64_t done, int64_t all) { last = std::max(last, done), total = all; };
    if (threads > 1) lab.options.progress = {};
    const auto opened = lab.open();
    INFO(opened.why_private << lab.said);
    REQUIRE(opened.segment != nullptr);
    CHECK(opened.segment->attached());
    CHECK(lab.said.empty());
    CHECK(last == total);
    {
      const std::vector<Buffer> held = lab.buffers(opened.segment.get());
      CHECK(lab.budget.used_bytes() == opened.segment->file_bytes());
      CHECK(held[0].as<uint8_t>()[77] == byte_of(0, 77));
      void* const target = held[0].data();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
      CHECK(wait_for(in_child([&] {
              const rlimit none{0, 0};
              setrlimit(RLIMIT_CORE, &none);
              signal(SIGSEGV, SIG_DFL);
              std::memset(target, 0, 1);
              return 0;
            })) == 128 + SIGSEGV);
#endif
      CHECK(static_cast<uint8_t*>(target)[0] == byte_of(0, 0));
    }
    REQUIRE(drop_shared(folder->path(), "all").ok());
  }
}

TEST_CASE("a damaged byte anywhere in header, table or content is found and the segment made anew", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  const std::string path = lab.make();
  REQUIRE(lab.attaches());
  constexpr int64_t kData = 2 << 20, kUnit1 = kData + (3 << 20);
  std::vector<int64_t> places = {4096, 4096 + 23, 4096 + 24 * 3 + 8, kData, kData + (3 << 20) - 1};
  for (int64_t at = 0; at < 100; at += 3) places.push_back(at);  // every field, and the path
  for (const int64_t at : {int64_t{0}, int64_t{999}, int64_t{1024}, int64_t{1024 + 63}, int64_t{1024 + 64 + 3}}) {
    places.push_back(kUnit1 + at);
  }
  for (const int64_t at : places) {
    CAPTURE(at);
    flip(path, at);
    const auto opened = lab.open();
    REQUIRE(opened.segment != nullptr);
    CHECK_FALSE(opened.segment->attached());
    CAPTURE(lab.said);
    CHECK(lab.said.find("loaded again") != std::string::npos);
    if (at == kUnit1) CHECK(lab.said.find("expert 0 of layer 1") != std::string::npos);
    if (at == 9) CHECK(lab.said.find("version") != std::string::npos);
    lab.fill(opened.segment.get());
  }
  CHECK(lab.attaches());
  for (const int64_t bytes : {int64_t{0}, int64_t{100}, int64_t{4096}, kData + 5, kUnit1 + 4096 * 8}) {
    CAPTURE(bytes);
    REQUIRE(truncate(path.c_str(), bytes) == 0);
    CHECK(lab.make() == path);
    CHECK(lab.said.find("loaded again") != std::string::npos);
  }
  CHECK(lab.attaches());
  // Who asks for no check trusts the content, but never the header.
  flip(path, kUnit1);
  lab.options.verify = false;
  CHECK(lab.open().segment->attached());
  flip(path, 20);
  CHECK_FALSE(lab.open().segment->attached());
}

TEST_CASE("a segment that was never finished leaves nothing, unless its maker is killed: then the next one says so") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  {
    const auto opened = lab.open();
    REQUIRE(opened.segment != nullptr);
    CHECK(folder->entries() == 1);
  }
  CHECK(folder->entries() == 0);
  CHECK(wait_for(in_child([&] {
          const auto opened = lab.open();
          lab.buffers(opened.segment.get());
          raise(SIGKILL);
          return 0;
        })) == 128 + SIGKILL);
  CHECK(folder->entries() == 1);
  const auto listed = list_shared(folder->path());
  REQUIRE(listed.ok());
  REQUIRE(listed->size() == 1);
  CHECK_FALSE((*listed)[0].complete);
  CHECK_FALSE((*listed)[0].filling);
  CHECK((*listed)[0].source == "/models/one");
  CHECK(shared_bytes_of(folder->path(), "/models/one") == 0);
  lab.make();
  CHECK(lab.said.find("left half-made") != std::string::npos);
  CHECK(lab.attaches());
  CHECK(folder->entries() == 1);
}

TEST_CASE("of processes that start at once one makes the segment and the others get it", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  for (int round = 0; round < 5; ++round) {
    std::vector<pid_t> children;
    for (int c = 0; c < 6; ++c) {
      children.push_back(in_child([&] {
        const auto opened = lab.open();
        if (opened.segment == nullptr) return 3;
        if (lab.said.find("half-made") != std::string::npos) return 4;
        if (opened.segment->attached()) return lab.right(opened.segment.get()) ? 0 : 2;
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        lab.fill(opened.segment.get());
        return 1;
      }));
    }
    int makers = 0;
    for (const pid_t pid : children) {
      const int code = wait_for(pid);
      CHECK(code <= 1);
      makers += code == 1 ? 1 : 0;
    }
    CHECK(makers == 1);
    CHECK(folder->entries() == 1);
    const auto dropped = drop_shared(folder->path(), "all");
    REQUIRE(dropped.ok());
    CHECK(dropped->size() == 1);
  }
}

TEST_CASE("who waits for a maker takes over when it dies, gives up in time, and can be cancelled", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  const pid_t maker = in_child([&] {
    const auto opened = lab.open();
    for (;;) pause();
    return 0;
  });
  wait_until([&] {
    const auto listed = list_shared(folder->path());
    return listed.ok() && listed->size() == 1 && (*listed)[0].filling && (*listed)[0].bytes > (3 << 20);
  });
  CHECK((*list_shared(folder->path()))[0].processes == 1);
  const auto refused = drop_shared(folder->path(), (*list_shared(folder->path()))[0].name);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().message().find("being filled") != std::string::npos);

  lab.options.max_wait_s = 0.1;
  auto opened = lab.open();
  CHECK(opened.segment == nullptr);
  CHECK(opened.why_private.find("another run") != std::string::npos);
  CHECK(lab.said.find("waiting") != std::string::npos);

  lab.options.max_wait_s = 60;
  std::atomic<bool> cancel{false};
  lab.options.cancel = &cancel;
  const auto say = lab.options.say;
  lab.options.say = [&](const std::string&) { cancel = true; };
  const auto stopped = SharedSegment::open(lab.options, &lab.budget);
  REQUIRE_FALSE(stopped.ok());
  CHECK(stopped.status().code() == Code::kCancelled);

  cancel = false;
  lab.said.clear();
  lab.options.say = [&](const std::string& words) {
    say(words);
    if (words.find("waiting") != std::string::npos) kill(maker, SIGKILL);
  };
  const auto taken = SharedSegment::open(lab.options, &lab.budget);
  CHECK(wait_for(maker) == 128 + SIGKILL);
  REQUIRE(taken.ok());
  REQUIRE(taken->segment != nullptr);
  CHECK_FALSE(taken->segment->attached());
  CHECK(lab.said.find("half-made") != std::string::npos);
}

TEST_CASE("without room nothing is touched and the message says what is short and how to enlarge", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  lab.options.room_bytes = 4 << 20;
  auto opened = lab.open();
  CHECK(opened.segment == nullptr);
  for (const char* words : {"4MiB free", "short", "mount -o remount,size="}) {
    CHECK(opened.why_private.find(words) != std::string::npos);
  }
  CHECK(folder->entries() == 0);
  CHECK(lab.budget.used_bytes() == 0);
  lab.options.room_bytes = -1;
  // The kernel's own refusal, half way.
  rlimit old{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{3 << 20, old.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  opened = lab.open();
  REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
  signal(SIGXFSZ, handler);
  CHECK(opened.segment == nullptr);
  CHECK_FALSE(opened.why_private.empty());
  CHECK(folder->entries() == 0);
  // The budget's refusal is the caller's error, as for private memory.
  Budget tight("--ram", 3 << 20);
  const auto refused = SharedSegment::open(lab.options, &tight);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == Code::kNoMemory);
  CHECK(folder->entries() == 0);
  CHECK(tight.used_bytes() == 0);
  lab.options.folder = *folder / "nowhere";
  CHECK(lab.open().why_private.find("No such file") != std::string::npos);
  test::TempFolder disk(".");
  lab.options.folder = disk.path();
  if (!shared_room(disk.path()).why_not.empty()) {
    CHECK(lab.open().why_private.find("not on a memory file system") != std::string::npos);
  }
  CHECK(disk.entries() == 0);
}

TEST_CASE("what is not ours alone is never mapped and never removed", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  const std::string path = lab.make();
  REQUIRE(chmod(path.c_str(), 0644) == 0);
  CHECK(lab.open().why_private.find("mode 644") != std::string::npos);
  REQUIRE(chmod(path.c_str(), 0600) == 0);
  REQUIRE(lab.attaches());
  fs::rename(path, path + "x");
  REQUIRE(symlink((path + "x").c_str(), path.c_str()) == 0);
  CHECK(lab.open().segment == nullptr);
  fs::remove(path);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK(lab.open().why_private.find("regular file") != std::string::npos);
  fs::remove(path);
  fs::rename(path + "x", path);
  folder->write("firn-notes.txt", "mine");
  folder->write("firn-0000000000000000-00000000-", "mine too");
  REQUIRE(drop_shared(folder->path(), "all").ok());
  CHECK(folder->entries() == 2);
  CHECK_FALSE(drop_shared(folder->path(), "firn-notes.txt").ok());
  CHECK(test::get_file(*folder / "firn-notes.txt") == "mine");
}

TEST_CASE("a changed checkpoint removes its older state, and only that", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  const std::string old = lab.make();
  lab.options.units.pop_back();  // other units of the same checkpoint live beside it
  const std::string fewer = lab.make();
  lab.options.source = "/models/two";
  lab.options.identity = 7;
  const std::string other = lab.make();
  lab.options.source = "/models/one";
  lab.options.identity = 8;
  const std::string now = lab.make();
  CHECK(lab.said.find("stale") != std::string::npos);
  CHECK_FALSE(fs::exists(old));
  CHECK_FALSE(fs::exists(fewer));
  CHECK(fs::exists(other));
  CHECK(fs::exists(now));
  CHECK(shared_bytes_of(folder->path(), "/models/one") > (3 << 20));
  CHECK(shared_bytes_of(folder->path(), "/models/three") == 0);
}

TEST_CASE("dropping a segment in use takes its name only", "[shared]") {
  const auto folder = memory_folder();
  if (folder == nullptr) return;
  Lab lab(folder->path());
  lab.make();
  const auto used = lab.open();
  const auto listed = list_shared(folder->path());
  REQUIRE(listed.ok());
  REQUIRE(listed->size() == 1);
  const SharedInfo& info = (*listed)[0];
  CHECK(info.name == used.segment->name());
  CHECK(info.complete);
  CHECK(info.ours);
  CHECK(info.processes == 1);
  CHECK(info.bytes == used.segment->file_bytes());
  CHECK(info.age_s < 60);
  const auto missing = drop_shared(folder->path(), "firn-unknown");
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.status().message().find(info.name) != std::string::npos);
  REQUIRE(drop_shared(folder->path(), info.name).ok());
  CHECK(folder->entries() == 0);
  CHECK(lab.right(used.segment.get()));
  // The next one makes another, beside the one that lives on.
  lab.make();
  // A segment that loses its name while it is filled stays with its maker.
  REQUIRE(drop_shared(folder->path(), "all").ok());
  const auto filling = lab.open();
  fs::remove(folder->path() + "/" + filling.segment->name() + ".new");
  lab.buffers(filling.segment.get());
  const Status sealed = filling.segment->seal();
  CHECK(sealed.message().find("removed while") != std::string::npos);
  CHECK(folder->entries() == 0);
}

}  // namespace
}  // namespace firn::storage
