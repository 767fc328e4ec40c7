// firn bench disk: what a drive gives through the engine's own read queue, past the page cache.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>

#include "runtime/units.h"
#include "storage/io_queue.h"
#include "tools/bench.h"

namespace firn::tools {
namespace {

constexpr int64_t kFileBytes = int64_t{4} << 30;
constexpr int64_t kReadBytes = int64_t{512} << 20;  // of one timed run
constexpr int64_t kLeastRun = int64_t{32} << 20;
constexpr int64_t kPage = 4096;

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};
using Memory = std::unique_ptr<std::byte, FreeDeleter>;

Memory pages(int64_t bytes) {
  return Memory(static_cast<std::byte*>(std::aligned_alloc(kPage, static_cast<size_t>(bytes))));
}

// Reads `total` bytes in random pieces of `size`, `depth` of them at once; `skew` bytes off the alignment.
Status random_reads(storage::IoQueue& queue, const storage::File& file, int64_t file_bytes, int64_t size, int depth,
                    int64_t total, int64_t skew, std::byte* memory, std::mt19937_64* random) {
  std::vector<storage::IoTicket> tickets(static_cast<size_t>(depth));
  const int64_t places = (file_bytes - kPage) / size;
  for (int64_t n = 0; n < total / size && !interrupted(); ++n) {
    storage::IoTicket& slot = tickets[static_cast<size_t>(n % depth)];
    FIRN_TRY(slot.wait());
    const auto place = static_cast<int64_t>((*random)() % static_cast<uint64_t>(places));
    storage::IoRead read;
    read.pieces.push_back({&file, place * size + skew, size - skew, memory + n % depth * size});
    slot = queue.submit(std::move(read));
  }
  for (const storage::IoTicket& t : tickets) FIRN_TRY(t.wait());
  return {};
}

// A file that goes when its owner does.
struct Temporary {
  std::string path;
  ~Temporary() { storage::remove_quietly(path); }
};

}  // namespace

Result<double> measure_file_read(const std::string& path) {
  FIRN_ASSIGN(const auto file, storage::open_file(path, storage::OpenMode::kReadDirect));
  FIRN_ASSIGN(const int64_t bytes, file->size());
  FIRN_ASSIGN(auto queue, storage::IoQueue::create({}));
  std::mt19937_64 random(1);
  double best = 0;
  for (const int64_t size : {int64_t{1} << 20, int64_t{4} << 20, int64_t{16} << 20}) {
    if (bytes < 8 * size) continue;
    constexpr int kDepth = 16;
    const Memory memory = pages(size * kDepth);
    Status status;
    const Timing time = time_runs(3, 1, [&](int64_t) {
      const Status s =
          random_reads(*queue, *file, bytes / kPage * kPage, size, kDepth, kReadBytes, 0, memory.get(), &random);
      if (status.ok()) status = s;
    });
    FIRN_TRY(status);
    if (time.runs > 0) best = std::max(best, static_cast<double>(kReadBytes) / time.min * 1e-9);
  }
  return best;
}

Status bench_disk(BenchContext& context) {
  const std::string& dir = context.options().dir;
  FIRN_ASSIGN(const int64_t free, storage::FileSystem::real().free_bytes(dir));
  const int64_t bytes = std::min(kFileBytes, free / 2) / (int64_t{64} << 20) * (int64_t{64} << 20);
  if (bytes < (int64_t{256} << 20)) {
    return invalid(
        fmt::format("{}: {} free: expected at least {}", dir, format_size(free), format_size(int64_t{512} << 20)));
  }
  const Temporary temporary{storage::temporary_name(dir + "/firn-bench-disk")};
  FIRN_ASSIGN(const auto file, storage::open_file(temporary.path, storage::OpenMode::kUpdate));
  constexpr int64_t kPiece = int64_t{8} << 20;
  const Memory piece = pages(kPiece);
  std::mt19937_64 random(7);
  for (int64_t i = 0; i < kPiece / 8; ++i) reinterpret_cast<uint64_t*>(piece.get())[i] = random();
  Status status;
  BenchRow write;
  write.bench = "disk";
  write.shape =
      fmt::format("write {} in order, {}", format_size(bytes), file->direct_alignment() > 0 ? "direct" : "buffered");
  write.bytes = bytes;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t at = 0; at < bytes && status.ok() && !interrupted(); at += kPiece) {
    reinterpret_cast<uint64_t*>(piece.get())[0] = random();  // no two pieces are the same
    status = file->write_at(at, {piece.get(), static_cast<size_t>(kPiece)});
  }
  if (status.ok()) status = file->sync();
  FIRN_TRY(status);
  write.time.median = write.time.min = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  write.time.runs = 1;
  write.threads = 1;
  context.emit(write);
  std::vector<BenchRow> rows;
  for (const bool ring : {true, false}) {
    storage::IoQueueOptions options;
    options.io_uring = ring;
    options.depth = 64;
    options.depth_bytes = int64_t{256} << 20;
    options.part_bytes = int64_t{4} << 20;
    options.threads = 16;
    FIRN_ASSIGN(auto queue, storage::IoQueue::create(options));
    const std::string backend = queue->backend();
    if (ring && backend != "io_uring") continue;
    for (const int64_t size : {int64_t{64} << 10, int64_t{256} << 10, int64_t{1} << 20, int64_t{4} << 20}) {
      for (const int depth : {1, 4, 16, 64}) {
        if (!ring && depth != 16) continue;
        for (const int64_t skew : {int64_t{0}, int64_t{8}}) {
          if (skew != 0 && (depth != 16 || size != (int64_t{1} << 20))) continue;
          if (interrupted()) return cancelled("bench disk interrupted");
          const Memory memory = pages(size * depth);
          const int64_t total = std::max(kLeastRun, std::min(kReadBytes, size * depth * 64)) / size * size;
          BenchRow row;
          row.bench = "disk";
          row.shape =
              fmt::format("read {} x {}, {}{}", format_size(size), depth, backend, skew != 0 ? ", unaligned" : "");
          row.time = time_runs(context.options().runs, 1, [&](int64_t) {
            const Status s = random_reads(*queue, *file, bytes, size, depth, total, skew, memory.get(), &random);
            if (status.ok()) status = s;
          });
          FIRN_TRY(status);
          row.bytes = total;
          row.threads = 1;
          rows.push_back(row);
        }
      }
    }
  }
  const auto rate = [](const BenchRow& r) {
    return r.time.median > 0 ? static_cast<double>(r.bytes) / r.time.median : 0;
  };
  double best = 0;
  for (const BenchRow& row : rows) best = std::max(best, rate(row) * 1e-9);
  for (BenchRow& row : rows) {
    row.limit = best;
    row.limit_source = "best row";
    context.emit(row);
  }
  return {};
}

}  // namespace firn::tools
