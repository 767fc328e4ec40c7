// Files: what is refused, what is read, and that replacing a file is all or nothing.
#include "storage/file.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;
using test::TempFolder;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

TEST_CASE("Reads fill exactly what was asked or say what is missing", "[file]") {
  const TempFolder folder;
  const std::string path = folder / "data";
  test::put_file(path, test::pattern(0, 10000));
  const auto file = open_file(path, OpenMode::kRead);
  REQUIRE(file.ok());
  CHECK((*file)->size().value() == 10000);
  CHECK((*file)->direct_alignment() == 0);
  std::string out(3000, '\0');
  REQUIRE((*file)->read_at(7000, std::as_writable_bytes(std::span(out))).ok());
  CHECK(out == test::pattern(7000, 3000));

  const Status past = (*file)->read_at(7001, std::as_writable_bytes(std::span(out)));
  CHECK(past.code() == Code::kCorrupt);
  CHECK(contains(past.message(), path));
  CHECK(contains(past.message(), "3000 bytes at offset 7001"));
  CHECK(contains(past.message(), "found 2999"));

  CHECK((*file)->read_at(-1, std::as_writable_bytes(std::span(out))).code() == Code::kInvalid);
  CHECK((*file)->read_at(INT64_MAX - 5, std::as_writable_bytes(std::span(out))).code() == Code::kInvalid);
  CHECK((*file)->read_at(10000, {}).ok());
}

TEST_CASE("What is not a regular file is refused by name, without waiting", "[file]") {
  const TempFolder folder;
  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  const int sock = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (folder / "socket").c_str(), sizeof(address.sun_path) - 1);
  REQUIRE(::bind(sock, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {folder.path(), "directory"},
      {folder / "fifo", "FIFO"},
      {folder / "socket", "socket"},
      {"/dev/null", "character device"},
  };
  for (const auto& [path, kind] : cases) {
    for (const OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect, OpenMode::kCreate}) {
      const auto file = open_file(path, mode);
      REQUIRE_FALSE(file.ok());
      CHECK(file.status().code() == Code::kInvalid);
      CHECK(contains(file.status().message(), kind));
      CHECK(contains(file.status().message(), path));
    }
  }
  ::close(sock);
}

TEST_CASE("Missing and forbidden files say so", "[file]") {
  const TempFolder folder;
  CHECK(open_file(folder / "absent", OpenMode::kRead).status().code() == Code::kNotFound);
  CHECK(open_file("", OpenMode::kRead).status().code() == Code::kInvalid);
  CHECK(open_file(std::string("a\0b", 3), OpenMode::kRead).status().code() == Code::kInvalid);

  REQUIRE(::symlink("nowhere", (folder / "link").c_str()) == 0);
  const auto dangling = open_file(folder / "link", OpenMode::kRead);
  CHECK(dangling.status().code() == Code::kNotFound);
  CHECK(contains(dangling.status().message(), "symbolic link"));

  const auto no_folder = open_file(folder / "no/such", OpenMode::kCreate);
  CHECK(no_folder.status().code() == Code::kNotFound);
  CHECK(contains(no_folder.status().message(), folder / "no"));

  test::put_file(folder / "secret", "x");
  REQUIRE(::chmod((folder / "secret").c_str(), 0) == 0);
  REQUIRE(::chmod(folder.path().c_str(), 0755) == 0);
  // The superuser may read everything, so such a run looks as somebody else.
  const bool superuser = ::geteuid() == 0;
  if (superuser) REQUIRE(::seteuid(65534) == 0);
  const auto forbidden = open_file(folder / "secret", OpenMode::kRead);
  if (superuser) REQUIRE(::seteuid(0) == 0);
  CHECK(forbidden.status().code() == Code::kIo);
  CHECK(contains(forbidden.status().message(), "permission denied"));
}

TEST_CASE("A text file is read whole, up to a limit", "[file]") {
  const TempFolder folder;
  test::put_file(folder / "text", "hello");
  test::put_file(folder / "empty", "");
  CHECK(read_text_file(FileSystem::real(), folder / "text", 5).value() == "hello");
  CHECK(read_text_file(FileSystem::real(), folder / "empty", 0).value().empty());
  const auto large = read_text_file(FileSystem::real(), folder / "text", 4);
  CHECK(large.status().code() == Code::kInvalid);
  CHECK(contains(large.status().message(), "5 bytes, expected at most 4"));
}

TEST_CASE("Direct reads give the bytes of buffered reads, or say why they are buffered", "[file]") {
  for (const char* base : {"/tmp", "/dev/shm", "/var/tmp"}) {
    if (::access(base, W_OK) != 0) continue;
    const TempFolder folder(base);
    const std::string path = folder / "data";
    for (const int64_t size : {0, 1, 4095, 4096, 4097, 100000}) {
      test::put_file(path, test::pattern(0, size));
      const auto file = open_file(path, OpenMode::kReadDirect);
      REQUIRE(file.ok());
      std::string out(static_cast<size_t>(size), '\0');
      REQUIRE((*file)->read_at(0, std::as_writable_bytes(std::span(out))).ok());  // any address and length
      CHECK(out == test::pattern(0, size));
      const int64_t alignment = (*file)->direct_alignment();
      CHECK((alignment == 0) == !(*file)->direct_refusal().empty());
      if (alignment == 0) continue;
      const int64_t wide = (size + alignment) / alignment * alignment;
      const std::unique_ptr<void, void (*)(void*)> block(
          std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(wide)), std::free);
      const auto n = (*file)->read_some_at(0, {static_cast<std::byte*>(block.get()), static_cast<size_t>(wide)});
      REQUIRE(n.ok());
      REQUIRE(*n == size);
      CHECK((size == 0 || std::memcmp(block.get(), out.data(), static_cast<size_t>(size)) == 0));
    }
  }
}

TEST_CASE("A file system without O_DIRECT is read buffered, and the file says so", "[file]") {
  const std::string path = "/proc/self/limits";  // procfs has regular files and no direct I/O
  const auto file = open_file(path, OpenMode::kReadDirect);
  REQUIRE(file.ok());
  CHECK((*file)->direct_alignment() == 0);
  CHECK(contains((*file)->direct_refusal(), "O_DIRECT"));
  std::string out(10, '\0');
  REQUIRE((*file)->read_at(0, std::as_writable_bytes(std::span(out))).ok());
  CHECK(out.substr(0, 5) == "Limit");
}

TEST_CASE("Replacing a file is all or nothing", "[file]") {
  const TempFolder folder;
  const std::string path = folder / "state";
  REQUIRE(write_file_atomically(path, bytes_of("old")).ok());
  CHECK(test::get_file(path) == "old");
  REQUIRE(write_file_atomically(path, bytes_of("newer")).ok());
  CHECK(test::get_file(path) == "newer");
  CHECK(folder.entries() == 1);

  for (const FaultKind kind :
       {FaultKind::kOpenError, FaultKind::kNoSpace, FaultKind::kTornWrite, FaultKind::kSyncError}) {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = kind, .bytes = 2}});
    const Status status = write_file_atomically(faulty, path, bytes_of("broken"));
    CHECK(status.code() == Code::kIo);
    CHECK(faulty.hits() == 1);
    CHECK(test::get_file(path) == "newer");
    CHECK(folder.entries() == 1);
  }

  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  CHECK(write_file_atomically(folder / "fifo", bytes_of("x")).code() == Code::kInvalid);
  CHECK(write_file_atomically(folder.path(), bytes_of("x")).code() == Code::kInvalid);
  CHECK(write_file_atomically(folder / "no/such", bytes_of("x")).code() == Code::kNotFound);
  CHECK(folder.entries() == 2);
}

TEST_CASE("A file can be given a length without data", "[file]") {
  const TempFolder folder;
  auto file = open_file(folder / "sparse", OpenMode::kCreate);
  REQUIRE(file.ok());
  REQUIRE((*file)->resize(int64_t{3} << 40).ok());
  REQUIRE((*file)->write_at((int64_t{3} << 40) - 1, bytes_of("z")).ok());
  CHECK((*file)->size().value() == int64_t{3} << 40);
  struct stat info {};
  REQUIRE(::stat((folder / "sparse").c_str(), &info) == 0);
  CHECK(info.st_blocks * 512 < 1 << 20);
}

TEST_CASE("Faults strike where and when the plan says", "[file][faults]") {
  const TempFolder folder;
  test::put_file(folder / "a", test::pattern(0, 1000));
  test::put_file(folder / "b", test::pattern(0, 1000));
  std::string out(1000, '\0');
  const auto all = std::as_writable_bytes(std::span(out));

  SECTION("short reads are continued") {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kShortRead, .bytes = 7}});
    const auto file = faulty.open(folder / "a", OpenMode::kRead);
    REQUIRE(file.ok());
    CHECK((*file)->read_some_at(0, all).value() == 7);
    REQUIRE((*file)->read_at(0, all).ok());
    CHECK(out == test::pattern(0, 1000));
    CHECK(faulty.hits() == 1 + 143);
  }
  SECTION("the third read of b fails, others do not") {
    FaultyFileSystem faulty(FileSystem::real(),
                            {{.kind = FaultKind::kReadError, .path_part = "/b", .first = 3, .count = 1}});
    const auto a = faulty.open(folder / "a", OpenMode::kRead);
    const auto b = faulty.open(folder / "b", OpenMode::kRead);
    REQUIRE((a.ok() && b.ok()));
    for (int i = 1; i <= 5; ++i) {
      CHECK((*a)->read_at(0, all).ok());
      const Status status = (*b)->read_at(0, all);
      CHECK(status.ok() == (i != 3));
      if (i == 3) CHECK(status.code() == Code::kIo);
    }
  }
  SECTION("an early end is corruption") {
    FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kEarlyEnd, .bytes = 600}});
    const auto file = faulty.open(folder / "a", OpenMode::kRead);
    REQUIRE(file.ok());
    CHECK((*file)->read_at(0, all.first(600)).ok());
    const Status status = (*file)->read_at(500, all.first(200));
    CHECK(status.code() == Code::kCorrupt);
    CHECK(contains(status.message(), "found 100"));
  }
  SECTION("chance comes from the seed") {
    const auto run = [&](uint64_t seed) {
      FaultyFileSystem faulty(FileSystem::real(), {{.kind = FaultKind::kReadError, .probability = 0.5}}, seed);
      const auto file = faulty.open(folder / "a", OpenMode::kRead);
      std::string result;
      for (int i = 0; i < 64; ++i) result += (*file)->read_at(0, all).ok() ? '.' : 'x';
      return result;
    };
    CHECK(run(1) == run(1));
    CHECK(run(1) != run(2));
    CHECK(contains(run(1), "x"));
    CHECK(contains(run(1), "."));
  }
}

}  // namespace
}  // namespace firn::storage
