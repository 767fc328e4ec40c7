// Arenas: where bytes of one memory space come from.
//
// Contract: Arena::allocate charges the budget first, then allocates; the Buffer returns both when it dies. Host arenas
// align to 64 bytes (4096 when bytes >= 1 MiB), ask for transparent huge pages on large buffers (madvise) and remember
// whether that was refused. Contents are unspecified unless zeroed. Thread-safe. A Buffer must not outlive its Arena.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/budget.h"
#include "runtime/status.h"

namespace firn {

// Where an address is valid. The host must not dereference kDevice addresses, nor a device kHost ones.
enum class Space : uint8_t { kHost, kDevice };

class Arena;

// Move-only owner of a range of one space.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool empty() const { return data_ == nullptr; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  friend class Arena;
  Buffer(Arena* arena, void* data, int64_t bytes, Reservation reservation)
      : arena_(arena), data_(data), bytes_(bytes), reservation_(std::move(reservation)) {}
  Arena* arena_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  Reservation reservation_;
};

class Arena {
 public:
  virtual ~Arena() = default;
  virtual Space space() const = 0;

  // `what` names the purpose in a refusal. bytes == 0 gives an empty Buffer.
  Result<Buffer> allocate(int64_t bytes, const std::string& what);
  Budget& budget() const { return *budget_; }

 protected:
  explicit Arena(Budget* budget) : budget_(budget) {}
  friend class Buffer;
  virtual void* raw_allocate(int64_t bytes) = 0;  // nullptr when the machine refuses
  virtual void raw_free(void* data, int64_t bytes) = 0;

 private:
  Budget* const budget_;
};

// Host memory: small buffers from mimalloc, large ones (>= 1 MiB) from mmap with MADV_HUGEPAGE. numa_node < 0: no
// preference; otherwise pages are bound to that node (preferred, not strict, so that a full node is not an error).
class HostArena final : public Arena {
 public:
  explicit HostArena(Budget* budget, int numa_node = -1);
  Space space() const override { return Space::kHost; }
  // False once the kernel refused MADV_HUGEPAGE for a large buffer; the run's first line says so.
  bool huge_pages_granted() const;

 protected:
  void* raw_allocate(int64_t bytes) override;
  void raw_free(void* data, int64_t bytes) override;

 private:
  const int numa_node_;
  std::atomic<bool> huge_refused_{false};
};

}  // namespace firn
