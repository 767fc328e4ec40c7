// Implementation of faulty_file.h.
#include "storage/faulty_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace firn::storage {
namespace {

// A well-mixed function of seed and call number (the finaliser of a 64-bit hash): no state shared between threads.
double unit_random(uint64_t seed, uint64_t call) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + call;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

class FaultyFile : public File {
 public:
  FaultyFile(FaultyFileSystem& owner, std::unique_ptr<File> inner, std::string refusal)
      : owner_(owner), inner_(std::move(inner)), refusal_(std::move(refusal)) {}

  const std::string& path() const override { return inner_->path(); }
  Result<int64_t> size() const override { return inner_->size(); }
  int64_t direct_alignment() const override { return refusal_.empty() ? inner_->direct_alignment() : 0; }
  std::string direct_refusal() const override { return refusal_.empty() ? inner_->direct_refusal() : refusal_; }

  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    return read_exactly(path(), offset, out, [this](int64_t at, std::span<std::byte> rest) -> Result<int64_t> {
      FIRN_ASSIGN(const int64_t n, allowed(at, static_cast<int64_t>(rest.size())));
      if (n <= 0) return n;
      FIRN_TRY(inner_->read_at(at, rest.first(static_cast<size_t>(n))));
      return n;
    });
  }

  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    FIRN_ASSIGN(const int64_t n, allowed(offset, static_cast<int64_t>(out.size())));
    if (n <= 0) return n;
    // The whole read is made, since a direct read of fewer bytes might not be aligned; the caller hears of n.
    if (inner_->direct_alignment() > 0 && direct_alignment() > 0) {
      FIRN_ASSIGN(const int64_t read, inner_->read_some_at(offset, out));
      return std::min(n, read);
    }
    if (inner_->direct_alignment() > 0) {  // refused on purpose: the buffered way, as far as the file goes
      FIRN_ASSIGN(const int64_t size, inner_->size());
      const int64_t rest = std::clamp<int64_t>(size - offset, 0, n);
      FIRN_TRY(inner_->read_at(offset, out.first(static_cast<size_t>(rest))));
      return rest;
    }
    return inner_->read_some_at(offset, out.first(static_cast<size_t>(n)));
  }

  Status write_at(int64_t offset, std::span<const std::byte> in) override {
    if (owner_.next(FaultKind::kNoSpace, path()) != nullptr) return no_space(offset, in.size());
    if (const Fault* fault = owner_.next(FaultKind::kTornWrite, path())) {
      const size_t torn = std::min(in.size(), static_cast<size_t>(std::max<int64_t>(fault->bytes, 0)));
      FIRN_TRY(inner_->write_at(offset, in.first(torn)));
      return no_space(offset, in.size());
    }
    return inner_->write_at(offset, in);
  }

  Status resize(int64_t bytes) override {
    if (owner_.next(FaultKind::kNoSpace, path()) != nullptr) return no_space(bytes, 0);
    return inner_->resize(bytes);
  }

  Status sync() override {
    if (owner_.next(FaultKind::kSyncError, path()) != nullptr) {
      return io_error(fmt::format("{}: syncing to disk failed: injected fault", path()));
    }
    return inner_->sync();
  }

 private:
  Status no_space(int64_t offset, size_t bytes) const {
    return io_error(
        fmt::format("{}: no space left while writing {} bytes at offset {}: injected fault", path(), bytes, offset));
  }

  // How many of `bytes` at `offset` this read may return.
  Result<int64_t> allowed(int64_t offset, int64_t bytes) const {
    if (const Fault* slow = owner_.next(FaultKind::kSlowRead, path())) std::this_thread::sleep_for(slow->delay);
    if (owner_.next(FaultKind::kReadError, path()) != nullptr) {
      return io_error(fmt::format("{}: reading {} bytes at offset {} failed: injected fault", path(), bytes, offset));
    }
    if (const Fault* end = owner_.next(FaultKind::kEarlyEnd, path())) {
      bytes = std::clamp<int64_t>(end->bytes - offset, 0, bytes);
    }
    // A short read still moves: 0 would mean end of file.
    if (const Fault* brief = owner_.next(FaultKind::kShortRead, path())) {
      bytes = std::min(bytes, std::max<int64_t>(brief->bytes, 1));
    }
    return bytes;
  }

  FaultyFileSystem& owner_;
  std::unique_ptr<File> inner_;
  std::string refusal_;
};

}  // namespace

FaultyFileSystem::FaultyFileSystem(FileSystem& inner, std::vector<Fault> plan, uint64_t seed)
    : inner_(inner), seed_(seed) {
  for (Fault& fault : plan) plan_.emplace_back().fault = std::move(fault);
}

const Fault* FaultyFileSystem::next(FaultKind kind, const std::string& path) {
  const Fault* hit = nullptr;
  for (Armed& armed : plan_) {
    const Fault& fault = armed.fault;
    if (fault.kind != kind || path.find(fault.path_part) == std::string::npos) continue;
    const int64_t call = armed.calls.fetch_add(1) + 1;
    if (call < fault.first || call - fault.first >= fault.count) continue;
    if (fault.probability < 1 && !(unit_random(seed_, static_cast<uint64_t>(call)) < fault.probability)) continue;
    if (hit == nullptr) hit = &fault;
  }
  if (hit != nullptr) hits_.fetch_add(1);
  return hit;
}

Result<std::unique_ptr<File>> FaultyFileSystem::open(const std::string& path, OpenMode mode) {
  if (next(FaultKind::kOpenError, path) != nullptr) {
    return io_error(fmt::format("{}: opening it failed: injected fault", path));
  }
  FIRN_ASSIGN(auto inner, inner_.open(path, mode));
  std::string refusal;
  if ((mode == OpenMode::kReadDirect || mode == OpenMode::kUpdate) &&
      next(FaultKind::kDirectRefused, path) != nullptr) {
    refusal = "the file system refuses O_DIRECT (injected fault)";
  }
  return std::unique_ptr<File>(std::make_unique<FaultyFile>(*this, std::move(inner), std::move(refusal)));
}

Status FaultyFileSystem::folder_fault(const std::string& path, const char* action) {
  if (next(FaultKind::kFolderError, path) == nullptr) return {};
  return io_error(fmt::format("{}: {} failed: injected fault", path, action));
}

Status FaultyFileSystem::make_folder(const std::string& path) {
  FIRN_TRY(folder_fault(path, "creating the folder"));
  return inner_.make_folder(path);
}

Result<std::vector<std::string>> FaultyFileSystem::list_folder(const std::string& path) {
  FIRN_TRY(folder_fault(path, "listing the folder"));
  return inner_.list_folder(path);
}

Status FaultyFileSystem::remove(const std::string& path) {
  FIRN_TRY(folder_fault(path, "removing it"));
  return inner_.remove(path);
}

Status FaultyFileSystem::remove_folder(const std::string& path) {
  FIRN_TRY(folder_fault(path, "removing the folder"));
  return inner_.remove_folder(path);
}

Result<bool> FaultyFileSystem::exists(const std::string& path) {
  FIRN_TRY(folder_fault(path, "looking for it"));
  return inner_.exists(path);
}

Result<int64_t> FaultyFileSystem::free_bytes(const std::string& path) {
  FIRN_TRY(folder_fault(path, "asking for free space"));
  return inner_.free_bytes(path);
}

Status FaultyFileSystem::sync_folder(const std::string& path) {
  if (next(FaultKind::kSyncError, path) != nullptr) {
    return io_error(fmt::format("{}: syncing the folder failed: injected fault", path));
  }
  return inner_.sync_folder(path);
}

}  // namespace firn::storage
