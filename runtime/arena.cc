// Arenas: buffers and the host's two sources of memory.
#include "runtime/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "runtime/units.h"

#ifdef FIRN_HAVE_MIMALLOC
#include <mimalloc.h>
#endif

namespace firn {
namespace {

constexpr int64_t kLargeBytes = int64_t{1} << 20;
constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kSmallAlignment = 64;
constexpr int64_t kMaxBytes = int64_t{1} << 56;  // beyond any address space; keeps the roundings from overflowing

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Pages of [data, data + bytes) come from `node` while it has any. A machine that does not let us say so (no NUMA in
// the kernel, a filtered system call) still gives correct memory, only slower.
void prefer_node(void* data, int64_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> mask{};
  if (static_cast<size_t>(node) >= mask.size() * kWordBits) return;
  mask[static_cast<size_t>(node) / kWordBits] |= 1ul << (static_cast<size_t>(node) % kWordBits);
  // The kernel reads one bit fewer than the count it is given.
  (void)syscall(SYS_mbind, data, bytes, kPreferred, mask.data(), mask.size() * kWordBits + 1, 0);
}

// Anonymous pages, aligned to the huge page size when they can hold one.
void* map_pages(int64_t bytes) {
  const int64_t size = round_up(bytes, kPageBytes);
  const int64_t slack = size >= kHugePageBytes ? kHugePageBytes - kPageBytes : 0;
  void* base = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  if (slack == 0) return base;
  const auto address = reinterpret_cast<intptr_t>(base);
  const intptr_t aligned = round_up(address, kHugePageBytes);
  const int64_t head = aligned - address, tail = slack - head;
  if (head > 0) munmap(base, head);
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + size), tail);
  return reinterpret_cast<void*>(aligned);
}

// With "never" the kernel accepts the advice and does nothing, so the setting has to be read.
bool huge_pages_off() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  return std::getline(file, line) && line.find("[never]") != std::string::npos;
}

}  // namespace

Buffer::Buffer(Buffer&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      reservation_(std::move(other.reservation_)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) arena_->raw_free(data_, bytes_);
    arena_ = std::exchange(other.arena_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    reservation_ = std::move(other.reservation_);
  }
  return *this;
}

// The memory goes first and the charge after it: the budget never promises bytes that still exist.
Buffer::~Buffer() {
  if (data_ != nullptr) arena_->raw_free(data_, bytes_);
}

Result<Buffer> Arena::allocate(int64_t bytes, const std::string& what) {
  FIRN_CHECK(bytes >= 0, fmt::format("{} bytes asked for {}", bytes, what));
  if (bytes == 0) return Buffer();
  FIRN_ASSIGN(Reservation reservation, budget_->reserve(bytes, what));
  errno = 0;
  void* data = bytes > kMaxBytes ? nullptr : raw_allocate(bytes);
  if (data == nullptr) {
    return no_memory(
        fmt::format("{}: the machine refused {} ({} bytes) for {} although {} had room ({}); end other "
                    "programs, raise the memory limit, or lower {}",
                    budget_->name(), format_size(bytes), bytes, what, budget_->name(),
                    errno != 0 ? std::strerror(errno) : "no memory", budget_->name()));
  }
  return Buffer(this, data, bytes, std::move(reservation));
}

HostArena::HostArena(Budget* budget, int numa_node)
    : Arena(budget), numa_node_(numa_node), huge_refused_(huge_pages_off()) {}

bool HostArena::huge_pages_granted() const { return !huge_refused_.load(); }

void* HostArena::raw_allocate(int64_t bytes) {
  if (bytes < kLargeBytes) {
#ifdef FIRN_HAVE_MIMALLOC
    return mi_malloc_aligned(static_cast<size_t>(bytes), kSmallAlignment);
#else
    return std::aligned_alloc(kSmallAlignment, static_cast<size_t>(round_up(bytes, kSmallAlignment)));
#endif
  }
  void* data = map_pages(bytes);
  if (data == nullptr) return nullptr;
  if (numa_node_ >= 0) prefer_node(data, round_up(bytes, kPageBytes), numa_node_);
  if (madvise(data, round_up(bytes, kPageBytes), MADV_HUGEPAGE) != 0) huge_refused_.store(true);
  return data;
}

void HostArena::raw_free(void* data, int64_t bytes) {
  if (bytes < kLargeBytes) {
#ifdef FIRN_HAVE_MIMALLOC
    mi_free(data);
#else
    std::free(data);
#endif
    return;
  }
  const int rc = munmap(data, round_up(bytes, kPageBytes));
  FIRN_CHECK(rc == 0, "munmap of a buffer of ours");
}

}  // namespace firn
