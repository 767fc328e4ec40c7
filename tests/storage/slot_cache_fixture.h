// What the tests of the slot cache share: a source of known bytes, and a file whose reads can be held back.
#pragma once

#include "storage/slot_cache.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "storage/faulty_file.h"
#include "tests/storage/patterns.h"
#include "tests/support/catch.h"

namespace firn::storage {
namespace {

using test::contains;

constexpr int64_t kSlot = 8192;
constexpr int64_t kKeys = 64;

int64_t content_at(int64_t tag) { return tag * kSlot; }  // where in the pattern a key's or an insert's bytes begin

bool holds(const std::byte* data, int64_t tag) {
  return std::memcmp(data, test::pattern(content_at(tag), kSlot).data(), static_cast<size_t>(kSlot)) == 0;
}

// The pattern as a file whose reads can be held back and can fail by key.
class GatedFile final : public File {
 public:
  const std::string& path() const override { return path_; }
  Result<int64_t> size() const override { return kKeys * kSlot; }
  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    std::unique_lock<std::mutex> lock(mutex_);
    order_.push_back(offset / kSlot);
    started_.notify_all();
    opened_.wait(lock, [this] { return open_; });
    if (bad_.count(offset / kSlot) != 0) return io_error("gated: key " + std::to_string(offset / kSlot) + " is bad");
    const std::string bytes = test::pattern(offset, static_cast<int64_t>(out.size()));
    std::memcpy(out.data(), bytes.data(), out.size());
    return {};
  }
  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    FIRN_TRY(read_at(offset, out));
    return static_cast<int64_t>(out.size());
  }
  int64_t direct_alignment() const override { return 0; }
  Status write_at(int64_t, std::span<const std::byte>) override { return io_error("read only"); }
  Status sync() override { return {}; }

  void open(bool yes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = yes;
    opened_.notify_all();
  }
  void bad(int64_t key, bool yes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (yes) {
      bad_.insert(key);
    } else {
      bad_.erase(key);
    }
  }
  void wait_started(size_t reads) const {
    std::unique_lock<std::mutex> lock(mutex_);
    started_.wait(lock, [&] { return order_.size() >= reads; });
  }
  std::vector<int64_t> order() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return order_;
  }

 private:
  const std::string path_ = "gated";
  mutable std::mutex mutex_;
  mutable std::condition_variable opened_, started_;
  mutable std::vector<int64_t> order_;  // keys as their reads began
  bool open_ = true;
  std::set<int64_t> bad_;
};

class FileSource final : public SlotSource {
 public:
  explicit FileSource(const File* file) : file_(file) {}
  Result<IoRead> read_of(SlotKey key, std::span<std::byte> slot) override {
    FIRN_CHECK(reinterpret_cast<uintptr_t>(slot.data()) % 4096 == 0 && slot.size() % 4096 == 0, "a slot off its page");
    if (key >= static_cast<SlotKey>(kKeys)) return not_found("no key " + std::to_string(key));
    IoRead read;
    read.pieces.push_back({file_, static_cast<int64_t>(key) * kSlot, kSlot, slot.data()});
    if (finish) read.finish = [this, key] { return finish(key); };
    return read;
  }
  std::function<Status(SlotKey)> finish;

 private:
  const File* file_;
};

// A cache over a GatedFile whose queue has one read at the drive at a time.
struct Bench {
  explicit Bench(int32_t n_slots, const std::string& policy = "lru", int64_t limit = -1)
      : budget("--ram", limit), arena(&budget), source(&file) {
    IoQueueOptions options;
    options.io_uring = false;
    options.depth = options.speculative_depth = options.threads = 1;
    auto made = IoQueue::create(options);
    FIRN_CHECK(made.ok(), made.status().message());
    queue = std::move(made).value();
    auto cached = SlotCache::create(&arena, "slots", n_slots, kSlot, {policy, 0, {}}, queue.get(), &source);
    FIRN_CHECK(cached.ok(), cached.status().message());
    cache = std::move(cached).value();
  }
  ~Bench() { file.open(true); }
  SlotCache::Pin get(SlotKey key) {
    auto pin = cache->acquire(key);
    FIRN_CHECK(pin.ok() && pin->has_value(), "no slot for key " + std::to_string(key));
    return std::move(**pin);
  }
  void load(SlotKey key) {
    const auto pin = get(key);
    FIRN_CHECK(pin.wait().ok() && holds(pin.data(), static_cast<int64_t>(key)), "load of " + std::to_string(key));
  }
  bool full(SlotKey key) {
    auto pin = cache->acquire(key);
    return pin.ok() && !pin->has_value();
  }
  // Until a prefetch has ended, well or not.
  void settle(SlotKey key) const {
    while (cache->contains(key) && !cache->ready(key)) std::this_thread::yield();
  }
  CauseStats cause(Cause c) const { return cache->stats().cause[static_cast<size_t>(c)]; }

  Budget budget;
  HostArena arena;
  GatedFile file;
  FileSource source;
  std::unique_ptr<IoQueue> queue;
  std::unique_ptr<SlotCache> cache;
};

}  // namespace
}  // namespace firn::storage
