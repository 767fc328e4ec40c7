// The parallel loader: a plan of pieces made up front, then taken in order by all readers from one counter.
//
// Concurrency: the plan (pieces, segments, open files) is built before the first reader starts and constant after that.
// Readers share only `next` (which piece to take), `stop`, the byte count (atomics), and, under `mutex`, the first
// error and the progress callback. Destinations of different segments do not overlap unless the caller's ranges do.
#include "storage/loader.h"
#include "runtime/thread_team.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace firn::storage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kGapBytes = 64 << 10;  // a gap up to this is read through: cheaper than another request
constexpr int64_t kMinAlignment = 4096;
constexpr auto kProgressInterval = std::chrono::milliseconds(200);

struct Segment {
  int64_t offset = 0;  // in the file
  int64_t bytes = 0;
  std::byte* dst = nullptr;
};

struct Piece {
  int32_t file = 0;
  int64_t begin = 0;  // first and past-the-last byte wanted; the read may be a little wider
  int64_t end = 0;
  std::vector<Segment> segments;
};

int64_t align_down(int64_t value, int64_t alignment) { return value & ~(alignment - 1); }
int64_t align_up(int64_t value, int64_t alignment) { return align_down(value + alignment - 1, alignment); }

Status check_plan(const LoadPlan& plan) {
  for (const LoadRange& range : plan.ranges) {
    if (range.file < 0 || static_cast<size_t>(range.file) >= plan.paths.size()) {
      return invalid(fmt::format("load: file number {} of a range, expected 0 to {}", range.file,
                                 static_cast<int64_t>(plan.paths.size()) - 1));
    }
    const std::string& path = plan.paths[static_cast<size_t>(range.file)];
    // A little below the end of int64, so that aligning upwards cannot overflow.
    constexpr int64_t kMaxEnd = std::numeric_limits<int64_t>::max() - (int64_t{1} << 32);
    if (range.offset < 0 || range.bytes < 0 || range.bytes > kMaxEnd || range.offset > kMaxEnd - range.bytes) {
      return invalid(fmt::format("{}: load: a range of {} bytes at offset {}", path, range.bytes, range.offset));
    }
    if (range.bytes > 0 && range.dst == nullptr) {
      return invalid(
          fmt::format("{}: load: no destination for {} bytes at offset {}", path, range.bytes, range.offset));
    }
  }
  if (plan.n_readers < 1) return invalid(fmt::format("load: {} readers, expected at least 1", plan.n_readers));
  return {};
}

std::vector<Piece> make_pieces(const std::vector<LoadRange>& ranges) {
  std::vector<const LoadRange*> order;
  for (const LoadRange& range : ranges) {
    if (range.bytes > 0) order.push_back(&range);
  }
  std::stable_sort(order.begin(), order.end(), [](const LoadRange* a, const LoadRange* b) {
    return std::pair(a->file, a->offset) < std::pair(b->file, b->offset);
  });
  std::vector<Piece> pieces;
  for (size_t first = 0; first < order.size();) {
    // A run: ranges of one file with no large gap between them, cut at multiples of the piece size from its start.
    const int32_t file = order[first]->file;
    const int64_t base = align_down(order[first]->offset, kMinAlignment);
    int64_t run_end = order[first]->offset;
    size_t last = first;
    for (; last < order.size() && order[last]->file == file && order[last]->offset - run_end <= kGapBytes; ++last) {
      run_end = std::max(run_end, order[last]->offset + order[last]->bytes);
    }
    const size_t run_first_piece = pieces.size();
    pieces.resize(run_first_piece + static_cast<size_t>((run_end - base + kPieceBytes - 1) / kPieceBytes));
    for (; first < last; ++first) {
      const LoadRange& range = *order[first];
      auto* dst = static_cast<std::byte*>(range.dst);
      for (int64_t at = range.offset; at < range.offset + range.bytes;) {
        const int64_t number = (at - base) / kPieceBytes;
        const int64_t end = std::min(range.offset + range.bytes, base + (number + 1) * kPieceBytes);
        Piece& piece = pieces[run_first_piece + static_cast<size_t>(number)];
        if (piece.segments.empty()) piece.begin = at;
        piece.file = file;
        piece.begin = std::min(piece.begin, at);
        piece.end = std::max(piece.end, end);
        piece.segments.push_back({at, end - at, dst});
        dst += end - at;
        at = end;
      }
    }
  }
  std::erase_if(pieces, [](const Piece& piece) { return piece.segments.empty(); });
  return pieces;
}

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};

// A reader's bounce buffer, grown when a file's alignment asks for it.
class Bounce {
 public:
  Status reserve(int64_t bytes, int64_t alignment) {
    if (bytes <= bytes_ && alignment <= alignment_) return {};
    bytes = align_up(std::max(bytes, bytes_), alignment);
    data_.reset();
    data_.reset(
        static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(bytes))));
    if (!data_) {
      bytes_ = 0;
      return no_memory(fmt::format("load: no memory for a read buffer of {} bytes", bytes));
    }
    bytes_ = bytes;
    alignment_ = alignment;
    return {};
  }
  std::byte* data() const { return data_.get(); }

 private:
  std::unique_ptr<std::byte, FreeDeleter> data_;
  int64_t bytes_ = 0;
  int64_t alignment_ = 0;
};

// Reads [begin, end) of the file and as much around it as the alignment asks for. Returns where byte `begin` landed.
Result<const std::byte*> read_direct(const File& file, int64_t begin, int64_t end, Bounce& bounce) {
  const int64_t alignment = std::max(file.direct_alignment(), kMinAlignment);
  const int64_t from = align_down(begin, alignment);
  const int64_t to = align_up(end, alignment);
  FIRN_TRY(bounce.reserve(std::max(to - from, kPieceBytes), alignment));
  int64_t done = 0;  // bytes that are there, from `from` on
  while (from + done < end) {
    // After a short read that stopped between two blocks the last block is read again: offsets must stay aligned.
    const int64_t at = align_down(done, alignment);
    FIRN_ASSIGN(const int64_t n,
                file.read_some_at(from + at, {bounce.data() + at, static_cast<size_t>(to - from - at)}));
    if (at + n <= done) {
      // No progress. Either the file ends here, or a block comes in several parts; the buffered way decides.
      const int64_t need_from = std::max(from + done, begin);
      FIRN_TRY(file.read_at(need_from, {bounce.data() + (need_from - from), static_cast<size_t>(end - need_from)}));
      break;
    }
    done = at + n;
  }
  return bounce.data() + (begin - from);
}

Status read_piece(const File& file, const Piece& piece, Bounce& bounce) {
  const Segment& only = piece.segments.front();
  if (file.direct_alignment() == 0 && piece.segments.size() == 1) {
    return file.read_at(only.offset, {only.dst, static_cast<size_t>(only.bytes)});
  }
  const std::byte* data = nullptr;
  if (file.direct_alignment() > 0) {
    FIRN_ASSIGN(data, read_direct(file, piece.begin, piece.end, bounce));
  } else {
    FIRN_TRY(bounce.reserve(std::max(piece.end - piece.begin, kPieceBytes), kMinAlignment));
    FIRN_TRY(file.read_at(piece.begin, {bounce.data(), static_cast<size_t>(piece.end - piece.begin)}));
    data = bounce.data();
  }
  for (const Segment& segment : piece.segments) {
    std::memcpy(segment.dst, data + (segment.offset - piece.begin), static_cast<size_t>(segment.bytes));
  }
  return {};
}

class Loader {
 public:
  Loader(std::vector<std::unique_ptr<File>> files, std::vector<Piece> pieces, int64_t bytes_total,
         const std::function<void(int64_t, int64_t)>& progress, const std::atomic<bool>* cancel)
      : files_(std::move(files)),
        pieces_(std::move(pieces)),
        bytes_total_(bytes_total),
        progress_(progress),
        cancel_(cancel) {}

  Status run(int n_readers) {
    last_progress_ = Clock::now();
    const auto readers = static_cast<size_t>(std::min<int64_t>(n_readers, static_cast<int64_t>(pieces_.size())));
    std::vector<std::thread> threads;
    threads.reserve(readers);
    for (size_t i = 1; i < readers; ++i) {
      try {
        threads.emplace_back([this] {
          unpin_this_thread();
          read_pieces();
        });
      } catch (const std::system_error&) {
        break;  // a process limit: the readers there are do the work
      }
    }
    read_pieces();
    for (std::thread& thread : threads) thread.join();
    if (error_.ok() && progress_) progress_(bytes_done_, bytes_total_);
    return error_;
  }

 private:
  void read_pieces() {
    Bounce bounce;
    while (!stop_.load(std::memory_order_relaxed)) {
      const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= pieces_.size()) return;
      if (cancel_ != nullptr && cancel_->load()) return fail(cancelled("loading was cancelled"));
      const Piece& piece = pieces_[i];
      Status status = read_piece(*files_[static_cast<size_t>(piece.file)], piece, bounce);
      if (!status.ok()) return fail(std::move(status));
      int64_t bytes = 0;
      for (const Segment& segment : piece.segments) bytes += segment.bytes;
      report(bytes);
    }
  }

  void fail(Status status) {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
    if (error_.ok()) error_ = std::move(status);
  }

  void report(int64_t bytes) {
    bytes_done_.fetch_add(bytes);
    if (!progress_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    const auto now = Clock::now();
    if (now - last_progress_ < kProgressInterval) return;
    last_progress_ = now;
    progress_(bytes_done_.load(), bytes_total_);
  }

  const std::vector<std::unique_ptr<File>> files_;
  const std::vector<Piece> pieces_;
  const int64_t bytes_total_;
  const std::function<void(int64_t, int64_t)>& progress_;
  const std::atomic<bool>* const cancel_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> bytes_done_{0};
  std::mutex mutex_;  // guards error_, last_progress_ and calls of progress_
  Status error_;
  Clock::time_point last_progress_;
};

// Opens the files the plan uses and checks that every range lies inside them.
Result<std::vector<std::unique_ptr<File>>> open_files(FileSystem& fs, const LoadPlan& plan, LoadStats& stats) {
  std::vector<int64_t> ends(plan.paths.size(), -1);
  for (const LoadRange& range : plan.ranges) {
    int64_t& end = ends[static_cast<size_t>(range.file)];
    end = std::max(end, range.offset + range.bytes);
  }
  std::vector<std::unique_ptr<File>> files(plan.paths.size());
  stats.direct = plan.direct;
  if (!plan.direct) stats.fallback = "direct reads were not asked for";
  for (size_t i = 0; i < files.size(); ++i) {
    if (ends[i] < 0) continue;
    FIRN_ASSIGN(files[i], fs.open(plan.paths[i], plan.direct ? OpenMode::kReadDirect : OpenMode::kRead));
    FIRN_ASSIGN(const int64_t bytes, files[i]->size());
    if (bytes < ends[i]) {
      return corrupt(fmt::format("{}: expected at least {} bytes, found {}: the file is truncated, fetch it again",
                                 plan.paths[i], ends[i], bytes));
    }
    if (plan.direct && files[i]->direct_alignment() == 0) {
      stats.direct = false;
      if (stats.fallback.empty()) {
        const std::string why = files[i]->direct_refusal();
        stats.fallback = fmt::format("{}: {}", plan.paths[i], why.empty() ? "no O_DIRECT" : why);
      }
    }
  }
  return files;
}

}  // namespace

Result<LoadStats> load(FileSystem& fs, const LoadPlan& plan, const std::function<void(int64_t, int64_t)>& progress,
                       const std::atomic<bool>* cancel) {
  FIRN_TRY(check_plan(plan));
  const auto start = Clock::now();
  LoadStats stats;
  FIRN_ASSIGN(auto files, open_files(fs, plan, stats));
  for (const LoadRange& range : plan.ranges) {
    if (__builtin_add_overflow(stats.bytes, range.bytes, &stats.bytes)) return invalid("load: more than 2^63 bytes");
  }
  Loader loader(std::move(files), make_pieces(plan.ranges), stats.bytes, progress, cancel);
  FIRN_TRY(loader.run(plan.n_readers));
  stats.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return stats;
}

}  // namespace firn::storage
