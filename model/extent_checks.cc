// See extent_checks.h.
#include "model/extent_checks.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "runtime/thread_team.h"

namespace firn::model {
namespace {

constexpr int64_t kMostScratch = int64_t{1} << 20;  // for one extent

}  // namespace

void ExtentChecks::placed(const storage::TensorInfo& t, const void* dst) {
  if (places_.empty()) return;
  places_[static_cast<size_t>(&t - checkpoint_.tensors.data())] = static_cast<const std::byte*>(dst);
}

void ExtentChecks::place_rest(std::vector<storage::LoadRange>* ranges) {
  if (places_.empty()) return;
  const auto place = [&](int32_t i) -> const std::byte*& { return places_[static_cast<size_t>(i)]; };
  for (const storage::Extent& extent : checkpoint_.extents) {
    bool touched = false;
    int64_t rest = 0;
    for (const int32_t i : extent.tensors) {
      touched = touched || place(i) != nullptr;
      if (place(i) == nullptr) rest += checkpoint_.tensors[static_cast<size_t>(i)].bytes;
    }
    if (!touched) continue;
    due_.push_back(&extent);
    if (rest > kMostScratch) continue;
    for (const int32_t i : extent.tensors) {
      const storage::TensorInfo& t = checkpoint_.tensors[static_cast<size_t>(i)];
      if (place(i) != nullptr) continue;
      auto& room = scratch_.emplace_back(static_cast<size_t>(std::max<int64_t>(t.bytes, 1)));
      place(i) = room.data();
      if (t.bytes > 0) ranges->push_back({t.shard, t.file_offset, t.bytes, room.data()});
    }
  }
}

Status ExtentChecks::check(storage::FileSystem& fs, const storage::Extent& extent) const {
  const bool in_memory = std::all_of(extent.tensors.begin(), extent.tensors.end(),
                                     [&](int32_t i) { return places_[static_cast<size_t>(i)] != nullptr; });
  if (!in_memory) return storage::verify_extent(fs, checkpoint_, extent);
  return storage::check_extent(checkpoint_, extent, [&](int32_t i) { return places_[static_cast<size_t>(i)]; });
}

Status ExtentChecks::check_read(storage::FileSystem& fs, int64_t read_to, int n_threads,
                                const std::atomic<bool>* cancel) {
  std::atomic<size_t> next{next_};
  while (next_ < due_.size() && due_[next_]->offset + due_[next_]->bytes <= read_to) ++next_;
  const size_t end = next_;
  std::mutex mutex;  // guards the two below
  Status first;
  size_t first_at = end;
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < end; i = next.fetch_add(1)) {
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return;
      Status status = check(fs, *due_[i]);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (i < first_at) {
        first_at = i;
        first = std::move(status);
      }
    }
  };
  std::vector<std::thread> threads;
  const auto n = std::min<size_t>(static_cast<size_t>(std::max(n_threads, 1)), end - next.load());
  for (size_t t = 1; t < n; ++t) {
    threads.emplace_back([&] {
      unpin_this_thread();
      work();
    });
  }
  work();
  for (std::thread& t : threads) t.join();
  return first;
}

}  // namespace firn::model
