// Implementation of io_queue.h.
//
// A read is walked by one cursor for each way its pieces go: through the ring, or through the pool of threads (every
// piece where there is no ring; pieces of files without a descriptor; and what the ring hands back). A part is cut off
// at the cursor only when the caps let it start, so nothing is planned ahead and promote() and cancel() are moves
// between lists.
#include "storage/io_queue.h"

#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/thread_team.h"

namespace firn::storage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBufferAlignment = int64_t{2} << 20;
constexpr int64_t kMaxPartBytes = int64_t{1} << 30;
// Below this a piece is copied whole instead of being cut into an unaligned head and an aligned rest: a second request
// costs more than copying so little.
constexpr int64_t kSplitBytes = int64_t{128} << 10;
constexpr uint64_t kWakeData = UINT64_MAX;
enum Route : uint8_t { kRing = 0, kPool = 1, kRoutes = 2 };

double seconds_between(Clock::time_point a, Clock::time_point b) { return (b - a) / std::chrono::duration<double>(1); }
int64_t floor_to(int64_t value, int64_t alignment) { return alignment > 1 ? value - value % alignment : value; }
int64_t ceil_to(int64_t value, int64_t alignment) { return floor_to(value + alignment - 1, alignment); }

struct Board;
using ReadList = std::list<std::shared_ptr<IoTicket::Read>>;

}  // namespace

struct IoTicket::Read {
  // Constant after submit().
  std::shared_ptr<Board> board;  // null: the read was done when it was submitted
  std::vector<IoPiece> pieces;
  std::array<std::vector<size_t>, kRoutes> path;  // the pieces that go each way, in order
  IoClass submitted_class = IoClass::kDemand;

  std::atomic<bool> done{false};
  // Under the board's mutex until done, constant afterwards.
  struct Cursor {
    size_t index = 0;  // into path
    int64_t pos = 0;   // in that piece
  };
  std::array<Cursor, kRoutes> cursor;
  std::array<bool, kRoutes> queued{};
  std::array<ReadList::iterator, kRoutes> place;  // where queued
  IoClass io_class = IoClass::kDemand;
  std::function<Status()> finish;  // the settling thread's alone once nothing is queued or in flight
  int in_flight = 0;
  bool started = false;
  Status status;
  std::pair<size_t, int64_t> failed_at{std::numeric_limits<size_t>::max(), 0};  // piece and position, the lowest
  Clock::time_point begin, end;
  std::condition_variable settled;
};

namespace {

using Read = IoTicket::Read;

// A part on its way: the bytes asked for, the range read for them, and how far that has come.
struct Part {
  std::shared_ptr<Read> read;
  const File* file = nullptr;  // null: a read without any bytes
  size_t piece = 0;
  int64_t pos = 0;     // of the part in its piece
  int64_t offset = 0;  // asked for, in the file
  int64_t bytes = 0;
  std::byte* dst = nullptr;
  int64_t from = 0;  // the range read; the asked bytes lie in it
  int64_t span = 0;
  std::byte* to = nullptr;
  int64_t alignment = 1;  // of from, span, to and of every request for a rest
  bool bounced = false;
  bool whole = false;  // through read_at: the file's alignment does not fit our parts
  int buffer = -1;     // index of the bounce buffer
  IoClass io_class = IoClass::kDemand;
  int64_t got = 0;  // bytes of the range that are there
  bool tried = false;
  int64_t bytes_read = 0, retried = 0, short_reads = 0;

  int64_t request_at() const { return floor_to(got, alignment); }
};

struct Board {
  explicit Board(const IoQueueOptions& o) : options(o) {}

  const IoQueueOptions options;
  bool ring = false;  // constant once threads run
  int wake_fd = -1;
  std::byte* buffers = nullptr;

  mutable std::mutex mutex;
  std::condition_variable pool_work;
  std::array<std::array<ReadList, 2>, kRoutes> lists;
  std::vector<Part> handed;  // parts in flight that the ring could not do
  std::vector<int> free_buffers;
  int flight = 0, speculative_flight = 0;
  int64_t flight_bytes = 0, speculative_flight_bytes = 0;
  int ring_flight = 0;
  int64_t unsettled = 0;
  bool ring_waiting = false;
  bool stop = false;
  IoQueueStats stats;
  Clock::time_point busy_since;

  // --- with the mutex held ---

  // The part at the read's cursor; its buffer is not chosen yet.
  Part cut(const std::shared_ptr<Read>& read, Route route) const {
    Part part;
    part.read = read;
    part.io_class = read->io_class;
    const Read::Cursor& cursor = read->cursor[route];
    if (read->path[route].empty()) return part;
    part.piece = read->path[route][cursor.index];
    const IoPiece& piece = read->pieces[part.piece];
    const int64_t rest = piece.bytes - cursor.pos;
    part.file = piece.file;
    part.pos = cursor.pos;
    part.offset = piece.offset + cursor.pos;
    part.dst = piece.dst + cursor.pos;
    const int64_t direct = piece.file->direct_alignment();
    part.whole = direct > kBufferAlignment || (direct > 0 && options.part_bytes % direct != 0);
    part.alignment = direct > 0 && !part.whole ? direct : 1;
    const int64_t a = part.alignment;
    const auto skew = static_cast<int64_t>(reinterpret_cast<uintptr_t>(part.dst) % static_cast<uintptr_t>(a));
    const int64_t head = part.offset % a;
    if (head == 0 && skew == 0 && (rest % a == 0 || rest >= kSplitBytes) && rest >= a) {
      part.bytes = part.span = std::min(floor_to(rest, a), options.part_bytes);
      part.from = part.offset;
      part.to = part.dst;
      return part;
    }
    part.bounced = true;
    part.bytes = std::min(rest, options.part_bytes - head);
    // With the same skew in the file and in memory only the first block needs a copy.
    if (head == skew && head != 0 && rest >= kSplitBytes) part.bytes = std::min(part.bytes, a - head);
    part.from = part.offset - head;
    part.span = ceil_to(head + part.bytes, a);
    return part;
  }

  bool fits(const Part& part) const {
    if (part.bounced && free_buffers.empty()) return false;
    if (flight >= options.depth) return false;
    if (flight > 0 && flight_bytes + part.span > options.depth_bytes) return false;
    if (part.io_class == IoClass::kDemand) return true;
    if (speculative_flight >= options.speculative_depth) return false;
    return speculative_flight == 0 || speculative_flight_bytes + part.span <= options.speculative_bytes;
  }

  // The next part that may start now on this route. Demand on either route comes before any speculation.
  bool peek(Route route, Part* part) const {
    if (stop || flight >= options.depth) return false;
    const bool demand_waits = !lists[kRing][0].empty() || !lists[kPool][0].empty();
    const ReadList& list = lists[route][demand_waits ? 0 : 1];
    if (list.empty()) return false;
    *part = cut(list.front(), route);
    return fits(*part);
  }

  bool take(Route route, Part* part) {
    if (!peek(route, part)) return false;
    Read& read = *part->read;
    if (part->bounced) {
      part->buffer = free_buffers.back();
      free_buffers.pop_back();
      part->to = buffers + part->buffer * options.part_bytes;
    }
    Read::Cursor& cursor = read.cursor[route];
    cursor.pos += part->bytes;
    if (part->file == nullptr) {
      unqueue(read, route);
    } else if (cursor.pos == read.pieces[part->piece].bytes) {
      cursor.pos = 0;
      if (++cursor.index == read.path[route].size()) unqueue(read, route);
    }
    const Clock::time_point now = Clock::now();
    if (!read.started) {
      read.started = true;
      read.begin = now;
    }
    ++read.in_flight;
    if (flight++ == 0) busy_since = now;
    flight_bytes += part->span;
    if (part->io_class == IoClass::kSpeculative) {
      ++speculative_flight;
      speculative_flight_bytes += part->span;
    }
    if (route == kRing) ++ring_flight;
    wake();
    return true;
  }

  void unqueue(Read& read, Route route) {
    if (!read.queued[route]) return;
    read.queued[route] = false;
    lists[route][static_cast<size_t>(read.io_class)].erase(read.place[route]);
  }

  void unqueue(Read& read) {
    unqueue(read, kRing);
    unqueue(read, kPool);
  }

  // Called after every change that may let a part start. A woken thread that takes one calls it again, so that one call
  // wakes as many as there is work for.
  void wake() {
    Part part;
    if (!handed.empty() || peek(kPool, &part)) pool_work.notify_one();
    if (ring_waiting && peek(kRing, &part)) wake_ring();
  }

  void wake_ring() {
    ring_waiting = false;
    const uint64_t one = 1;
    // The counter cannot overflow with one write a wait; there is nothing to do about any other error.
    [[maybe_unused]] const ssize_t n = ::write(wake_fd, &one, sizeof(one));
  }

  // --- without it ---

  // The books of a part that came back, whose bytes are at their destination. True: the read is to be settled.
  bool complete(const Part& part, Status status, Route route) {
    Read& read = *part.read;
    const std::lock_guard lock(mutex);
    if (part.buffer >= 0) free_buffers.push_back(part.buffer);
    if (route == kRing) --ring_flight;
    flight_bytes -= part.span;
    if (part.io_class == IoClass::kSpeculative) {
      --speculative_flight;
      speculative_flight_bytes -= part.span;
    }
    if (--flight == 0) stats.busy_seconds += seconds_between(busy_since, Clock::now());
    (read.submitted_class == IoClass::kDemand ? stats.demand_bytes : stats.speculative_bytes) += part.bytes_read;
    if (part.file != nullptr) ++stats.parts;
    if (part.bounced) stats.bounced_bytes += part.bytes;
    stats.retried += part.retried;
    stats.short_reads += part.short_reads;
    if (!status.ok()) {
      // Parts start in order, so of several failures the first in the read is among those that come back: which one is
      // reported does not depend on timing.
      const std::pair<size_t, int64_t> at{part.piece, part.pos};
      if (at < read.failed_at) {
        read.failed_at = at;
        read.status = std::move(status);
      }
      unqueue(read);
    }
    --read.in_flight;
    const bool last = read.in_flight == 0 && !read.queued[kRing] && !read.queued[kPool];
    wake();
    return last;
  }

  // Nothing of the read is queued or in flight.
  void settle(const std::shared_ptr<Read>& read) {
    std::function<Status()> finish = std::move(read->finish);
    read->finish = nullptr;
    Status status = read->status;
    if (status.ok() && finish) status = finish();
    finish = nullptr;  // what it holds goes before anyone hears of the end
    const std::lock_guard lock(mutex);
    read->status = std::move(status);
    read->end = Clock::now();
    read->done.store(true, std::memory_order_release);
    --unsettled;
    read->settled.notify_all();
  }
};

std::string error_text(int error) { return std::generic_category().message(error); }

Status read_failure(const Part& part, Code code, const std::string& why) {
  return {code, fmt::format("{}: reading {} bytes at offset {} failed{}: {}", part.file->path(), part.bytes,
                            part.offset, part.tried ? " twice" : "", why)};
}

// Takes in that a request at request_at() brought n bytes. False: there is more to ask for.
bool advance(Part* part, int64_t n, Status* status) {
  const int64_t needed = part->offset + part->bytes - part->from;
  const int64_t before = part->got;
  const bool full = n >= part->span - part->request_at();
  part->got = std::max(part->got, part->request_at() + n);
  part->bytes_read += n;
  if (part->got >= needed) {
    if (part->bounced) {
      std::memcpy(part->dst, part->to + (part->offset - part->from), static_cast<size_t>(part->bytes));
    }
    return true;
  }
  if (!full && part->got > before) {
    ++part->short_reads;
    return false;
  }
  const IoPiece& piece = part->read->pieces[part->piece];
  const int64_t found = std::max<int64_t>(part->from + part->got - piece.offset, part->pos);
  *status = corrupt(fmt::format(
      "{}: unexpected end of file: expected {} bytes at offset {}, found {}; the file is truncated, fetch it again",
      piece.file->path(), piece.bytes, piece.offset, found));
  return true;
}

// Reads a part, or the rest of one, on the calling thread.
Status perform(Part* part) {
  if (part->file == nullptr) return {};
  for (;;) {
    const int64_t at = part->request_at();
    const std::span<std::byte> out(part->to + at, static_cast<size_t>(part->span - at));
    Result<int64_t> n = 0;
    if (part->whole) {
      const Status status = part->file->read_at(part->from + at, out);
      n = status.ok() ? Result<int64_t>(part->span - at) : Result<int64_t>(status);
    } else {
      n = part->file->read_some_at(part->from + at, out);
    }
    if (!n.ok()) {
      if (n.status().code() == Code::kIo && !part->tried) {
        part->tried = true;
        ++part->retried;
        continue;
      }
      return part->whole && n.status().code() == Code::kCorrupt
                 ? n.status()
                 : read_failure(*part, n.status().code(), n.status().message());
    }
    const int64_t needed = part->offset + part->bytes - part->from;
    if (*n > 0 && at + *n <= part->got && part->got < needed) {
      // Short of a block again, so aligned requests do not get past it: the rest as it comes.
      const std::span<std::byte> rest(part->to + part->got, static_cast<size_t>(needed - part->got));
      if (part->file->read_at(part->from + part->got, rest).ok()) n = needed - at;
    }
    Status status;
    if (advance(part, *n, &status)) return status;
  }
}

// Null if the piece makes sense.
const char* piece_fault(const IoPiece& piece) {
  if (piece.file == nullptr) return "has no file";
  if (piece.bytes < 0) return "has a negative length";
  if (piece.offset < 0) return "starts at a negative offset";
  if (piece.offset > std::numeric_limits<int64_t>::max() - kBufferAlignment - piece.bytes) return "is outside any file";
  if (piece.bytes > 0 && piece.dst == nullptr) return "has no destination";
  return nullptr;
}

}  // namespace

// --- tickets ---

bool IoTicket::done() const { return !read_ || read_->done.load(std::memory_order_acquire); }

Status IoTicket::wait() const {
  if (!read_) return {};
  if (!done()) {
    std::unique_lock lock(read_->board->mutex);
    read_->settled.wait(lock, [this] { return done(); });
  }
  return read_->status;
}

bool IoTicket::cancel() const {
  if (!read_ || !read_->board) return false;
  Board& board = *read_->board;
  {
    const std::lock_guard lock(board.mutex);
    if (read_->started || done()) return false;
    if (!read_->queued[kRing] && !read_->queued[kPool]) return true;  // cancelled before, being settled elsewhere
    board.unqueue(*read_);
    read_->status = cancelled("the read was cancelled before it started");
    ++board.stats.cancelled;
    board.wake();
  }
  board.settle(read_);
  return true;
}

void IoTicket::promote() const {
  if (!read_ || !read_->board) return;
  Board& board = *read_->board;
  const std::lock_guard lock(board.mutex);
  if (read_->io_class == IoClass::kDemand) return;
  read_->io_class = IoClass::kDemand;
  for (const Route route : {kRing, kPool}) {
    if (!read_->queued[route]) continue;
    auto& lists = board.lists[route];
    lists[0].splice(lists[0].end(), lists[1], read_->place[route]);
  }
  board.wake();
}

double IoTicket::seconds() const {
  if (!read_ || !done() || !read_->started) return 0;
  return seconds_between(read_->begin, read_->end);
}

// --- the queue ---

struct IoQueue::Core {
  std::shared_ptr<Board> board;
  std::vector<std::thread> threads;
  std::string refusal;
  int64_t buffer_bytes = 0;

  io_uring ring{};
  bool ring_made = false;
  bool sqpoll = false;
  bool fixed_buffers = false;
  // The ring thread's own.
  std::vector<Part> slots;
  std::vector<int> free_slots;

  ~Core() {
    if (board) shut_down();
    if (ring_made) io_uring_queue_exit(&ring);
    if (board && board->wake_fd >= 0) ::close(board->wake_fd);
    if (board) std::free(std::exchange(board->buffers, nullptr));
  }

  void shut_down() {
    std::vector<std::shared_ptr<Read>> dropped;
    {
      const std::lock_guard lock(board->mutex);
      board->stop = true;
      for (auto& route : board->lists) {
        for (ReadList& list : route) {
          while (!list.empty()) {
            const std::shared_ptr<Read> read = list.front();
            board->unqueue(*read);
            if (read->status.ok()) read->status = cancelled("the queue was closed before the read was done");
            ++board->stats.cancelled;
            if (read->in_flight == 0) dropped.push_back(read);
          }
        }
      }
      board->pool_work.notify_all();
      if (board->ring_waiting) board->wake_ring();
    }
    for (const auto& read : dropped) board->settle(read);
    for (std::thread& thread : threads) thread.join();
  }

  void set_up_ring(const IoQueueOptions& options) {
    if (!options.io_uring) {
      refusal = "io_uring is switched off by an option";
      return;
    }
    const auto entries = static_cast<unsigned>(options.depth) + 2;
    // Newer kernels need not interrupt us for a completion, since we come to ask; older ones refuse the flag.
    struct Attempt {
      unsigned flags;
      bool sqpoll;
    };
    std::vector<Attempt> attempts;
    if (options.sqpoll) attempts.push_back({IORING_SETUP_SQPOLL, true});
    attempts.push_back({IORING_SETUP_COOP_TASKRUN, false});
    attempts.push_back({0, false});
    int rc = 0;
    for (const Attempt& attempt : attempts) {
      io_uring_params params{};
      params.flags = attempt.flags;
      params.sq_thread_idle = 20;
      rc = io_uring_queue_init_params(entries, &ring, &params);
      sqpoll = attempt.sqpoll;
      if (rc == 0) break;
    }
    if (rc != 0) {
      refusal = fmt::format("io_uring is refused by the kernel ({}); containers often forbid it", error_text(-rc));
      return;
    }
    ring_made = true;
    board->wake_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (board->wake_fd < 0) {
      refusal = fmt::format("no event descriptor for io_uring ({})", error_text(errno));
      io_uring_queue_exit(&ring);
      ring_made = false;
      return;
    }
    board->ring = true;
  }

  Status set_up_buffers(const IoQueueOptions& options) {
    const int64_t most = std::max<int64_t>(options.depth_bytes / options.part_bytes, 1);
    const int64_t n = std::min<int64_t>(most, board->ring ? options.depth : std::min(options.depth, options.threads));
    buffer_bytes = n * options.part_bytes;
    board->buffers = static_cast<std::byte*>(
        std::aligned_alloc(kBufferAlignment, static_cast<size_t>(ceil_to(buffer_bytes, kBufferAlignment))));
    if (board->buffers == nullptr) {
      return no_memory(fmt::format("no memory for {} read buffers of {} bytes: lower the queue's depth or part size", n,
                                   options.part_bytes));
    }
    std::vector<iovec> list;
    for (int i = 0; i < n; ++i) {
      list.push_back({board->buffers + i * options.part_bytes, static_cast<size_t>(options.part_bytes)});
      board->free_buffers.push_back(static_cast<int>(n) - 1 - i);
    }
    // Refused where little memory may be locked; plain reads into the same buffers do then.
    if (board->ring) fixed_buffers = io_uring_register_buffers(&ring, list.data(), static_cast<unsigned>(n)) == 0;
    return {};
  }

  // --- pool ---

  void pool_loop() {
    unpin_this_thread();
    for (;;) {
      Part part;
      Route route = kPool;
      {
        std::unique_lock lock(board->mutex);
        for (;;) {
          if (!board->handed.empty()) {
            part = std::move(board->handed.back());
            board->handed.pop_back();
            route = kRing;
            board->wake();
            break;
          }
          if (board->take(kPool, &part)) break;
          // The ring may still hand parts over while it has some in flight.
          if (board->stop && board->ring_flight == 0) return;
          board->pool_work.wait(lock);
        }
      }
      Status status = perform(&part);
      finish_part(part, std::move(status), route);
    }
  }

  void finish_part(const Part& part, Status status, Route route) {
    if (board->complete(part, std::move(status), route)) board->settle(part.read);
    if (route == kRing) wake_stopping();
  }

  // A part of the ring's is gone: those who wait only for that before they leave look again.
  void wake_stopping() {
    const std::lock_guard lock(board->mutex);
    if (!board->stop || board->ring_flight > 0) return;
    board->pool_work.notify_all();
    if (board->ring_waiting) board->wake_ring();
  }

  // --- ring ---

  io_uring_sqe* next_sqe() {
    for (;;) {
      if (io_uring_sqe* sqe = io_uring_get_sqe(&ring)) return sqe;
      // Full only while a polling kernel thread has not yet fetched what was completed otherwise.
      if (sqpoll) {
        io_uring_submit(&ring);
        io_uring_sqring_wait(&ring);
      } else if (io_uring_submit(&ring) < 0) {
        pause_briefly();
      }
    }
  }

  // For a kernel that is short of memory: a wait, so that nothing spins.
  static void pause_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

  void ask_for_wake() {
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_poll_add(sqe, board->wake_fd, POLLIN);
    sqe->user_data = kWakeData;
  }

  void request(int slot) {
    const Part& part = slots[static_cast<size_t>(slot)];
    const int64_t at = part.request_at();
    const auto bytes = static_cast<unsigned>(part.span - at);
    const auto offset = static_cast<uint64_t>(part.from + at);
    io_uring_sqe* sqe = next_sqe();
    if (part.buffer >= 0 && fixed_buffers) {
      io_uring_prep_read_fixed(sqe, part.file->descriptor(), part.to + at, bytes, offset, part.buffer);
    } else {
      io_uring_prep_read(sqe, part.file->descriptor(), part.to + at, bytes, offset);
    }
    sqe->user_data = static_cast<uint64_t>(slot);
  }

  // A result of the ring for a part. False: another request for it is on its way.
  bool take_in(int slot, int result, Status* status, bool* hand_over) {
    Part& part = slots[static_cast<size_t>(slot)];
    if (result >= 0) {
      if (advance(&part, result, status)) return true;
    } else if (result == -EAGAIN || result == -EBUSY) {
      // The kernel cannot do this one without blocking (some file systems never can): a thread may block.
      *hand_over = true;
      return true;
    } else if (result == -EIO && !part.tried) {
      part.tried = true;
      ++part.retried;
    } else if (result != -EINTR) {
      *status = read_failure(part, Code::kIo, error_text(-result));
      return true;
    }
    request(slot);
    return false;
  }

  void release(int slot) {
    slots[static_cast<size_t>(slot)] = Part();
    free_slots.push_back(slot);
  }

  void hand_over(int slot) {
    {
      const std::lock_guard lock(board->mutex);
      board->handed.push_back(std::move(slots[static_cast<size_t>(slot)]));
      board->wake();
    }
    release(slot);
  }

  void ring_loop() {
    unpin_this_thread();
    ask_for_wake();
    std::vector<std::shared_ptr<Read>> ready;
    std::vector<int> started;
    for (;;) {
      started.clear();
      {
        const std::lock_guard lock(board->mutex);
        Part part;
        while (board->take(kRing, &part)) {
          const int slot = free_slots.back();
          free_slots.pop_back();
          slots[static_cast<size_t>(slot)] = std::move(part);
          started.push_back(slot);
        }
        if (board->stop && board->ring_flight == 0 && ready.empty()) return;
        board->ring_waiting = ready.empty();
      }
      for (const int slot : started) request(slot);
      if (!ready.empty()) {
        // The drive works on while the ends of reads are dealt with.
        io_uring_submit(&ring);
        for (const auto& read : ready) board->settle(read);
        ready.clear();
        wake_stopping();
        continue;
      }
      const int rc = io_uring_submit_and_wait(&ring, 1);
      if ((rc == -EAGAIN || rc == -EBUSY) && io_uring_cq_ready(&ring) == 0) pause_briefly();
      {
        const std::lock_guard lock(board->mutex);
        board->ring_waiting = false;
      }
      reap(&ready);
    }
  }

  void reap(std::vector<std::shared_ptr<Read>>* ready) {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring, &cqe) == 0 && cqe != nullptr) {
      const uint64_t data = cqe->user_data;
      const int result = cqe->res;
      io_uring_cqe_seen(&ring, cqe);
      if (data == kWakeData) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = ::read(board->wake_fd, &count, sizeof(count));
        ask_for_wake();
        continue;
      }
      const auto slot = static_cast<int>(data);
      Status status;
      bool blocks = false;
      if (!take_in(slot, result, &status, &blocks)) continue;
      if (blocks) {
        hand_over(slot);
        continue;
      }
      const Part& part = slots[data];
      if (board->complete(part, std::move(status), kRing)) ready->push_back(part.read);
      release(slot);
    }
    wake_stopping();
  }

  Status start(const IoQueueOptions& options) {
    if (board->ring) {
      slots.resize(static_cast<size_t>(options.depth));
      for (int i = options.depth; i-- > 0;) free_slots.push_back(i);
    }
    try {
      for (int i = 0; i < options.threads; ++i) threads.emplace_back([this] { pool_loop(); });
      if (board->ring) threads.emplace_back([this] { ring_loop(); });
    } catch (const std::system_error& error) {
      return no_memory(fmt::format("a read queue needs {} threads and the system refuses: {}",
                                   options.threads + (board->ring ? 1 : 0), error.what()));
    }
    return {};
  }
};

IoQueue::IoQueue(std::unique_ptr<Core> core) : core_(std::move(core)) {}
IoQueue::~IoQueue() = default;

Result<std::unique_ptr<IoQueue>> IoQueue::create(const IoQueueOptions& options) {
  const auto require = [](bool ok, const char* name, int64_t found, const char* expected) {
    return ok ? Status() : invalid(fmt::format("read queue: {} is {}, expected {}", name, found, expected));
  };
  FIRN_TRY(require(options.depth >= 1 && options.depth <= 4096, "depth", options.depth, "1 to 4096"));
  FIRN_TRY(require(options.depth_bytes >= 1, "depth_bytes", options.depth_bytes, "at least 1"));
  FIRN_TRY(require(options.speculative_depth >= 1, "speculative_depth", options.speculative_depth, "at least 1"));
  FIRN_TRY(require(options.speculative_bytes >= 1, "speculative_bytes", options.speculative_bytes, "at least 1"));
  FIRN_TRY(require(options.part_bytes >= 4096 && options.part_bytes % 4096 == 0 && options.part_bytes <= kMaxPartBytes,
                   "part_bytes", options.part_bytes, "a multiple of 4096 up to 1 GiB"));
  FIRN_TRY(require(options.threads >= 1 && options.threads <= 1024, "threads", options.threads, "1 to 1024"));
  auto core = std::make_unique<Core>();
  core->board = std::make_shared<Board>(options);
  core->set_up_ring(options);
  FIRN_TRY(core->set_up_buffers(options));
  FIRN_TRY(core->start(options));
  return std::unique_ptr<IoQueue>(new IoQueue(std::move(core)));
}

IoTicket IoQueue::submit(IoRead read) {
  Board& board = *core_->board;
  auto r = std::make_shared<Read>();
  for (size_t i = 0; i < read.pieces.size(); ++i) {
    const IoPiece& piece = read.pieces[i];
    if (const char* fault = piece_fault(piece)) {
      r->status = invalid(fmt::format("read queue: piece {} of a read ({} bytes at offset {}) {}", i, piece.bytes,
                                      piece.offset, fault));
      r->done.store(true);
      return IoTicket(std::move(r));
    }
    if (piece.bytes == 0) continue;
    const int64_t direct = piece.file->direct_alignment();
    const bool fits = direct <= kBufferAlignment && (direct == 0 || board.options.part_bytes % direct == 0);
    r->path[board.ring && fits && piece.file->descriptor() >= 0 ? kRing : kPool].push_back(i);
  }
  r->board = core_->board;
  r->pieces = std::move(read.pieces);
  r->finish = std::move(read.finish);
  r->io_class = r->submitted_class = read.io_class;
  const std::lock_guard lock(board.mutex);
  // A read without bytes goes through the pool too: finish runs on the queue's threads, never in submit().
  const bool empty = r->path[kRing].empty() && r->path[kPool].empty();
  for (const Route route : {kRing, kPool}) {
    if (r->path[route].empty() && !(empty && route == kPool)) continue;
    ReadList& list = board.lists[route][static_cast<size_t>(r->io_class)];
    r->place[route] = list.insert(list.end(), r);
    r->queued[route] = true;
  }
  ++board.stats.reads;
  ++board.unsettled;
  board.wake();
  return IoTicket(std::move(r));
}

bool IoQueue::idle() const {
  const std::lock_guard lock(core_->board->mutex);
  return core_->board->unsettled == 0;
}

IoQueueStats IoQueue::stats() const {
  const Board& board = *core_->board;
  const std::lock_guard lock(board.mutex);
  IoQueueStats stats = board.stats;
  if (board.flight > 0) stats.busy_seconds += seconds_between(board.busy_since, Clock::now());
  return stats;
}

const char* IoQueue::backend() const {
  if (!core_->board->ring) return "preads";
  return core_->sqpoll ? "io_uring sqpoll" : "io_uring";
}

const std::string& IoQueue::refusal() const { return core_->refusal; }
int64_t IoQueue::buffer_bytes() const { return core_->buffer_bytes; }

}  // namespace firn::storage
