// Files that break on purpose, for tests.
//
// A FaultyFileSystem wraps another one and applies a plan: each Fault names the files it concerns (by a part of the
// path), the operation, and which of the matching calls it hits. Calls are counted per fault over all files, in order,
// so a test with one reader is exactly repeatable; with probability < 1 the choice comes from the seed and the call's
// number alone. Thread-safe. The file system must outlive its files.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "storage/file.h"

namespace firn::storage {

enum class FaultKind : uint8_t {
  kOpenError,      // open() fails with an I/O error
  kDirectRefused,  // kReadDirect opens buffered, as on a file system without O_DIRECT
  kShortRead,      // a read returns at most `bytes` bytes (callers must go on)
  kReadError,      // a read fails, as after EIO
  kEarlyEnd,       // the file ends at offset `bytes`, whatever its size said
  kSlowRead,       // a read takes `delay` longer
  kNoSpace,        // a write fails, as after ENOSPC, having written nothing
  kTornWrite,      // a write fails after its first `bytes` bytes are in the file
  kSyncError,      // sync() fails, of a file or a folder
  kFolderError,    // making, listing, removing, looking for or asking about a name or folder fails
};

struct Fault {
  FaultKind kind = FaultKind::kReadError;
  std::string path_part = {};  // "" concerns every file
  int64_t first = 1;           // the first matching call that is hit, counted from 1
  int64_t count = INT64_MAX;   // how many calls from there on
  int64_t bytes = 0;           // see FaultKind
  double probability = 1;      // of each such call being hit
  std::chrono::milliseconds delay{0};
};

class FaultyFileSystem : public FileSystem {
 public:
  FaultyFileSystem(FileSystem& inner, std::vector<Fault> plan, uint64_t seed = 1);
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) override;
  Status make_folder(const std::string& path) override;
  Result<std::vector<std::string>> list_folder(const std::string& path) override;
  Status remove(const std::string& path) override;
  Status remove_folder(const std::string& path) override;
  Result<bool> exists(const std::string& path) override;
  Result<int64_t> free_bytes(const std::string& path) override;
  Status sync_folder(const std::string& path) override;

  int64_t hits() const { return hits_.load(); }  // faults applied so far: a test can tell that its plan took effect
  // The fault to apply to this call, nullptr for none; counts the call. Used by the files this opens.
  const Fault* next(FaultKind kind, const std::string& path);

 private:
  Status folder_fault(const std::string& path, const char* action);
  struct Armed {
    Fault fault;
    std::atomic<int64_t> calls{0};
  };
  FileSystem& inner_;
  std::deque<Armed> plan_;  // a deque: atomics do not move
  const uint64_t seed_;
  std::atomic<int64_t> hits_{0};
};

}  // namespace firn::storage
