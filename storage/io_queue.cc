// One queue, two engines: a ring of the kernel's for files that have a descriptor, a pool of threads for the others and
// for kernels that deny rings.
//
// Files are not registered with the ring: a File may be closed and its descriptor number used again, and since Linux
// 5.12 the gain is small. Bounce buffers are registered when the first one is needed, if the memory-lock limit allows.
//
// finish() of a large read (an expert's checksum takes milliseconds) runs on a thread of its own, so that the ring is
// refilled meanwhile; of a small one at once, because handing it over would cost more.
#include "storage/io_queue.h"

#include <fmt/format.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "runtime/thread_team.h"

namespace firn::storage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMinAlignment = 4096;
constexpr int64_t kLargeFinish = int64_t{2} << 20;
constexpr int kAgain = 1000;  // EAGAIN in a row before it counts as an error

int64_t align_down(int64_t v, int64_t a) { return v / a * a; }
int64_t align_up(int64_t v, int64_t a) { return (v + a - 1) / a * a; }
double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<std::byte, FreeDeleter>;

AlignedBytes allocate_aligned(int64_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      std::aligned_alloc(static_cast<size_t>(kMinAlignment), static_cast<size_t>(align_up(bytes, kMinAlignment)))));
}

// A stretch of one piece that is read by one request.
struct Part {
  const File* file = nullptr;
  int64_t offset = 0;  // wanted
  int64_t bytes = 0;
  std::byte* dst = nullptr;
  bool ring = false;
  bool bounce = false;
  bool started = false;
  bool speculative = false;  // counted as such while in flight
  int8_t retries = 0;
  int again = 0;
  // The request: [from, from + span) of the file to `buffer`, of which `done` bytes are there.
  int64_t from = 0, span = 0, done = 0;
  std::byte* buffer = nullptr;
  int buffer_number = -1;
};

}  // namespace

struct IoTicket::Read {
  IoRead what;
  std::vector<Part> parts;
  std::atomic<bool> done{false};
  // Guarded by the queue's mutex until done.
  std::weak_ptr<std::mutex> mutex;     // the queue's; gone with it
  std::function<void(Read*)> promote;  // of the queue; empty once done
  std::function<bool(Read*)> cancel;
  int64_t parts_left = 0;
  int64_t bytes = 0;
  bool any_started = false;
  bool demand = false;
  bool counts_demand = false;  // by its class at submission
  Status status;
  Clock::time_point start;
  double seconds = 0;
};

bool IoTicket::done() const { return read_ == nullptr || read_->done.load(std::memory_order_acquire); }

Status IoTicket::wait() const {
  if (read_ == nullptr) return {};
  read_->done.wait(false, std::memory_order_acquire);
  return read_->status;
}

double IoTicket::seconds() const { return read_ != nullptr && done() ? read_->seconds : 0; }

bool IoTicket::cancel() const {
  if (read_ == nullptr || done()) return false;
  const auto mutex = read_->mutex.lock();
  if (mutex == nullptr) return false;
  std::function<Status()> finish;  // what it holds goes after the lock
  {
    const std::lock_guard lock(*mutex);
    if (read_->done.load() || !read_->cancel || !read_->cancel(read_.get())) return false;
    finish = std::move(read_->what.finish);
    read_->what.finish = nullptr;
  }
  read_->done.notify_all();
  return true;
}

void IoTicket::promote() const {
  if (read_ == nullptr || done()) return;
  const auto mutex = read_->mutex.lock();
  if (mutex == nullptr) return;
  const std::lock_guard lock(*mutex);
  if (!read_->done.load() && read_->promote) read_->promote(read_.get());
}

struct IoQueue::Core {
  using Read = IoTicket::Read;
  struct Entry {
    std::shared_ptr<Read> read;
    size_t part;
  };
  // What waits for one of the two engines, by class.
  struct Waiting {
    std::deque<Entry> demand, speculative;
    bool empty() const { return demand.empty() && speculative.empty(); }
  };
  struct InFlight {
    Entry entry;
  };

  IoQueueOptions options;
  std::string refusal;
  bool has_ring = false;
  io_uring ring{};
  int event = -1;
  uint64_t event_value = 0;
  std::thread ring_thread, finisher;
  std::vector<std::thread> pool;

  std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>();
  std::condition_variable pool_work, finish_work;
  // All below guarded by *mutex.
  Waiting for_ring, for_pool;
  std::deque<std::shared_ptr<Read>> to_finish;
  int parts_in_flight = 0, speculative_in_flight = 0, unfinished = 0;
  int64_t bytes_in_flight = 0, speculative_bytes_in_flight = 0;
  bool stop = false, finisher_stop = false, signalled = false;
  IoQueueStats stats;
  Clock::time_point busy_since;
  std::vector<AlignedBytes> bounces;  // of the ring
  std::vector<int> free_bounces;
  bool fixed_buffers = false;

  int64_t bounce_bytes() const { return options.part_bytes + 2 * kMinAlignment; }

  // --- Starting and ending parts; *mutex held.

  bool may_start(const Part& part, bool demand) const {
    if (parts_in_flight >= options.depth) return false;
    if (parts_in_flight > 0 && bytes_in_flight + part.bytes > options.depth_bytes) return false;
    if (demand) return true;
    if (speculative_in_flight >= options.speculative_depth) return false;
    return speculative_in_flight == 0 || speculative_bytes_in_flight + part.bytes <= options.speculative_bytes;
  }

  // The next part that may start now. A speculative part never starts while any demand waits.
  bool next(Waiting* waiting, Entry* out) {
    const auto pick = [&](std::deque<Entry>* list, bool demand) {
      while (!list->empty()) {
        Entry& e = list->front();
        if (e.read->parts[e.part].started) {  // promoted, cancelled or failed meanwhile
          list->pop_front();
          continue;
        }
        if (!may_start(e.read->parts[e.part], demand)) return false;
        *out = std::move(e);
        list->pop_front();
        return true;
      }
      return false;
    };
    if (pick(&waiting->demand, true)) return true;
    if (!waiting->demand.empty() || !for_ring.demand.empty() || !for_pool.demand.empty()) return false;
    return pick(&waiting->speculative, false);
  }

  void start(const Entry& e) {
    Part& part = e.read->parts[e.part];
    part.started = true;
    part.speculative = !e.read->demand;
    if (!e.read->any_started) {
      e.read->any_started = true;
      e.read->start = Clock::now();
    }
    if (parts_in_flight++ == 0) busy_since = Clock::now();
    bytes_in_flight += part.bytes;
    if (part.speculative) {
      ++speculative_in_flight;
      speculative_bytes_in_flight += part.bytes;
    }
    ++stats.parts;
  }

  void count_end(const Part& part) {
    if (--parts_in_flight == 0) stats.busy_seconds += seconds_between(busy_since, Clock::now());
    bytes_in_flight -= part.bytes;
    if (part.speculative) {
      --speculative_in_flight;
      speculative_bytes_in_flight -= part.bytes;
    }
  }

  // Marks what has not started as never to be started.
  void skip_rest(Read* read) {
    for (Part& part : read->parts) {
      if (part.started) continue;
      part.started = true;
      --read->parts_left;
    }
  }

  // A part has ended; true when the read has.
  bool end(const Entry& e, const Status& status) {
    Read* read = e.read.get();
    Part& part = read->parts[e.part];
    count_end(part);
    --read->parts_left;
    if (status.ok()) {
      (read->counts_demand ? stats.demand_bytes : stats.speculative_bytes) += part.bytes;
      if (part.bounce) stats.bounced_bytes += part.bytes;
    } else if (read->status.ok()) {
      read->status = status;
      skip_rest(read);
    }
    return read->parts_left == 0;
  }

  void complete(const std::shared_ptr<Read>& read) {
    std::function<Status()> finish;
    Status status;
    {
      const std::lock_guard lock(*mutex);
      status = read->status;
      finish = std::move(read->what.finish);
      read->what.finish = nullptr;
    }
    if (status.ok() && finish) status = finish();
    finish = nullptr;  // what it holds goes before anybody is told
    {
      const std::lock_guard lock(*mutex);
      read->status = std::move(status);
      read->seconds = seconds_between(read->start, Clock::now());
      read->promote = nullptr;
      read->cancel = nullptr;
      --unfinished;
      read->done.store(true, std::memory_order_release);
    }
    read->done.notify_all();
  }

  // Called without the lock when all parts of a read have come back.
  void hand_to_finish(const std::shared_ptr<Read>& read) {
    if (read->bytes < kLargeFinish) return complete(read);
    {
      const std::lock_guard lock(*mutex);
      if (!finisher_stop) {
        to_finish.push_back(read);
        finish_work.notify_one();
        return;
      }
    }
    complete(read);
  }

  void finish_loop() {
    unpin_this_thread();
    std::unique_lock lock(*mutex);
    for (;;) {
      finish_work.wait(lock, [&] { return finisher_stop || !to_finish.empty(); });
      if (to_finish.empty()) return;
      std::shared_ptr<Read> read = std::move(to_finish.front());
      to_finish.pop_front();
      lock.unlock();
      complete(read);
      read.reset();
      lock.lock();
    }
  }

  Status failed(const Part& part, int error, int64_t done) const {
    return io_error(fmt::format("{}: reading {} bytes at offset {} failed after {}: {}", part.file->path(), part.bytes,
                                part.offset, done, std::generic_category().message(error)));
  }

  // --- The ring.

  void wake_ring() {  // *mutex held
    if (!has_ring || signalled) return;
    signalled = true;
    const uint64_t one = 1;
    while (::write(event, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  // A bounce buffer for the ring's thread, or -1: all are in use, or memory is short.
  int take_bounce() {
    if (bounces.empty()) {
      std::vector<iovec> all;
      for (int i = 0; i < options.depth; ++i) {
        AlignedBytes one = allocate_aligned(bounce_bytes());
        if (one == nullptr) break;
        all.push_back({one.get(), static_cast<size_t>(bounce_bytes())});
        free_bounces.push_back(i);
        bounces.push_back(std::move(one));
      }
      // Refused where the memory-lock limit is low: plain reads into the same buffers do as well.
      fixed_buffers =
          !all.empty() && io_uring_register_buffers(&ring, all.data(), static_cast<unsigned>(all.size())) == 0;
    }
    if (free_bounces.empty()) return -1;
    const int number = free_bounces.back();
    free_bounces.pop_back();
    return number;
  }

  // Prepares a started part; an error ends it.
  Status prepare(Part* part, std::byte* bounce) {
    const int64_t alignment = std::max(part->file->direct_alignment(), int64_t{1});
    part->from = part->bounce ? align_down(part->offset, alignment) : part->offset;
    part->span = part->bounce ? align_up(part->offset + part->bytes, alignment) - part->from : part->bytes;
    part->buffer = part->bounce ? bounce : part->dst;
    part->done = 0;
    if (part->bounce && part->span > bounce_bytes()) {
      return internal(fmt::format("{}: an alignment of {} bytes is more than the read buffers allow",
                                  part->file->path(), alignment));
    }
    return {};
  }

  // After `n` more bytes at part.from + part.done: what is left to do.
  enum class Next { kMore, kDone, kEnd };
  Next advance(Part* part, int64_t n) const {
    const int64_t need = part->offset + part->bytes - part->from;
    if (part->done + n >= need) return Next::kDone;
    if (n <= 0) return Next::kEnd;
    const int64_t alignment = std::max(part->file->direct_alignment(), int64_t{1});
    const int64_t before = part->done;
    part->done = align_down(part->done + n, alignment);
    return part->done > before ? Next::kMore : Next::kEnd;
  }

  // The end of the file, or a short direct read that cannot be continued aligned: the buffered way decides.
  Status read_rest(const Part& part) const {
    const int64_t begin = std::max(part.offset, part.from + part.done);
    return part.file->read_at(
        begin, {part.buffer + (begin - part.from), static_cast<size_t>(part.offset + part.bytes - begin)});
  }

  void land(const Part& part) const {
    if (!part.bounce) return;
    std::memcpy(part.dst, part.buffer + (part.offset - part.from), static_cast<size_t>(part.bytes));
  }

  void ring_loop() {
    unpin_this_thread();
    std::vector<std::unique_ptr<InFlight>> retry;  // to be submitted again
    const auto queue_sqe = [&](InFlight* flight) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring);
      if (sqe == nullptr) {
        io_uring_submit(&ring);
        sqe = io_uring_get_sqe(&ring);
      }
      if (sqe == nullptr) return false;
      const Part& p = flight->entry.read->parts[flight->entry.part];
      const auto length = static_cast<unsigned>(p.span - p.done);
      const auto offset = static_cast<uint64_t>(p.from + p.done);
      if (p.bounce && fixed_buffers && p.buffer_number >= 0) {
        io_uring_prep_read_fixed(sqe, p.file->descriptor(), p.buffer + p.done, length, offset, p.buffer_number);
      } else {
        io_uring_prep_read(sqe, p.file->descriptor(), p.buffer + p.done, length, offset);
      }
      io_uring_sqe_set_data(sqe, flight);
      return true;
    };
    const auto arm_event = [&] {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring);
      if (sqe == nullptr) {
        io_uring_submit(&ring);
        sqe = io_uring_get_sqe(&ring);
      }
      FIRN_CHECK(sqe != nullptr, "the ring takes no more requests");
      io_uring_prep_read(sqe, event, &event_value, sizeof(event_value), 0);
      io_uring_sqe_set_data(sqe, nullptr);
    };
    const auto end_part = [&](std::unique_ptr<InFlight> flight, const Status& status) {
      Part& p = flight->entry.read->parts[flight->entry.part];
      if (status.ok()) land(p);
      bool all = false;
      {
        const std::lock_guard lock(*mutex);
        if (p.buffer_number >= 0) free_bounces.push_back(p.buffer_number);
        p.buffer_number = -1;
        all = end(flight->entry, status);
        if (!pool.empty()) pool_work.notify_all();  // caps moved
      }
      if (all) hand_to_finish(flight->entry.read);
    };

    arm_event();
    bool stopping = false;
    int in_ring = 0;
    for (;;) {
      // Fill the ring.
      std::vector<std::pair<std::unique_ptr<InFlight>, Status>> fresh;
      {
        const std::lock_guard lock(*mutex);
        signalled = false;
        stopping = stop;
        Entry e;
        while (!stopping && next(&for_ring, &e)) {
          Part& p = e.read->parts[e.part];
          if (p.bounce) {
            const int number = take_bounce();
            if (number < 0) {
              const bool wait = parts_in_flight > 0;  // one comes back
              if (wait) {
                (e.read->demand ? for_ring.demand : for_ring.speculative).push_front(std::move(e));
                break;
              }
            }
            p.buffer_number = number;
          }
          start(e);
          const Status status =
              p.bounce && p.buffer_number < 0
                  ? no_memory(
                        fmt::format("{}: no memory for a read buffer of {} bytes", p.file->path(), bounce_bytes()))
                  : prepare(&p, p.bounce ? bounces[static_cast<size_t>(p.buffer_number)].get() : nullptr);
          fresh.emplace_back(new InFlight{std::move(e)}, status);
        }
      }
      for (auto& [flight, status] : fresh) {
        if (!status.ok()) {
          end_part(std::move(flight), status);
          continue;
        }
        retry.push_back(std::move(flight));
      }
      std::vector<std::unique_ptr<InFlight>> left;
      for (std::unique_ptr<InFlight>& flight : retry) {
        if (queue_sqe(flight.get())) {
          (void)flight.release();
          ++in_ring;
        } else {
          left.push_back(std::move(flight));
        }
      }
      retry = std::move(left);
      if (stopping && in_ring == 0 && retry.empty()) return;
      int rc = io_uring_submit_and_wait(&ring, 1);
      if (rc < 0 && rc != -EINTR && rc != -EAGAIN && rc != -EBUSY) {
        FIRN_CHECK(false, fmt::format("io_uring_enter failed: {}", std::generic_category().message(-rc)));
      }
      io_uring_cqe* cqe = nullptr;
      while (io_uring_peek_cqe(&ring, &cqe) == 0 && cqe != nullptr) {
        auto* flight = static_cast<InFlight*>(io_uring_cqe_get_data(cqe));
        const int n = cqe->res;
        io_uring_cqe_seen(&ring, cqe);
        if (flight == nullptr) {
          arm_event();
          continue;
        }
        --in_ring;
        std::unique_ptr<InFlight> owned(flight);
        Part& p = flight->entry.read->parts[flight->entry.part];
        if (n == -EINTR || n == -EAGAIN || n == -EBUSY) {
          if (++p.again < kAgain) {
            retry.push_back(std::move(owned));
          } else {
            end_part(std::move(owned), failed(p, -n, p.done));
          }
          continue;
        }
        if (n < 0) {
          if (n == -EIO && p.retries++ == 0) {
            const std::lock_guard lock(*mutex);
            ++stats.retried;
            retry.push_back(std::move(owned));
            continue;
          }
          end_part(std::move(owned), failed(p, -n, p.done));
          continue;
        }
        p.again = 0;
        switch (advance(&p, n)) {
          case Next::kDone:
            end_part(std::move(owned), Status());
            break;
          case Next::kMore: {
            const std::lock_guard lock(*mutex);
            ++stats.short_reads;
            retry.push_back(std::move(owned));
            break;
          }
          case Next::kEnd: {
            const Status status = read_rest(p);
            end_part(std::move(owned), status);
            break;
          }
        }
      }
    }
  }

  Status open_ring() {
    io_uring_params params{};
    if (options.sqpoll) {
      params.flags |= IORING_SETUP_SQPOLL;
      params.sq_thread_idle = 20;
    }
    const int rc = io_uring_queue_init_params(static_cast<unsigned>(2 * options.depth + 8), &ring, &params);
    if (rc < 0) {
      return unsupported(fmt::format("the kernel refuses io_uring ({}{})", std::generic_category().message(-rc),
                                     rc == -EPERM ? "; containers often deny it: see kernel.io_uring_disabled and the "
                                                    "seccomp profile"
                                                  : ""));
    }
    event = ::eventfd(0, EFD_CLOEXEC);
    if (event < 0) {
      io_uring_queue_exit(&ring);
      return unsupported(fmt::format("no eventfd ({})", std::generic_category().message(errno)));
    }
    has_ring = true;
    return {};
  }

  // --- The pool.

  Status read_part(Part* part, AlignedBytes* bounce) {
    if (part->bounce && *bounce == nullptr) {
      *bounce = allocate_aligned(bounce_bytes());
      if (*bounce == nullptr) {
        return no_memory(
            fmt::format("{}: no memory for a read buffer of {} bytes", part->file->path(), bounce_bytes()));
      }
    }
    FIRN_TRY(prepare(part, bounce->get()));
    for (;;) {
      auto n = part->file->read_some_at(part->from + part->done,
                                        {part->buffer + part->done, static_cast<size_t>(part->span - part->done)});
      if (!n.ok()) {
        if (n.status().code() == Code::kIo && part->retries++ == 0) {
          const std::lock_guard lock(*mutex);
          ++stats.retried;
          continue;
        }
        return n.status().with_context(
            fmt::format("{}: {} bytes at offset {}", part->file->path(), part->bytes, part->offset));
      }
      switch (advance(part, *n)) {
        case Next::kDone:
          land(*part);
          return {};
        case Next::kEnd: {
          FIRN_TRY(read_rest(*part));
          land(*part);
          return {};
        }
        case Next::kMore:
          const std::lock_guard lock(*mutex);
          ++stats.short_reads;
          break;
      }
    }
  }

  void pool_loop() {
    unpin_this_thread();
    AlignedBytes bounce;
    std::unique_lock lock(*mutex);
    for (;;) {
      Entry e;
      pool_work.wait(lock, [&] { return stop || next(&for_pool, &e); });
      if (e.read == nullptr) return;
      start(e);
      lock.unlock();
      const Status status = read_part(&e.read->parts[e.part], &bounce);
      lock.lock();
      const bool all = end(e, status);
      pool_work.notify_all();  // caps moved
      wake_ring();
      lock.unlock();
      if (all) hand_to_finish(e.read);
      e.read.reset();
      lock.lock();
    }
  }

  void start_pool() {  // *mutex held
    if (!pool.empty()) return;
    for (int i = 0; i < options.threads; ++i) {
      try {
        pool.emplace_back([this] { pool_loop(); });
      } catch (const std::system_error&) {
        break;
      }
    }
  }
};

IoQueue::IoQueue(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Result<std::unique_ptr<IoQueue>> IoQueue::create(const IoQueueOptions& options) {
  FIRN_CHECK(options.depth >= 1 && options.speculative_depth >= 1 && options.threads >= 1 &&
                 options.part_bytes >= kMinAlignment && options.part_bytes % kMinAlignment == 0,
             "options of a read queue");
  auto core = std::make_unique<Core>();
  core->options = options;
  if (!options.io_uring) {
    core->refusal = "preads were asked for";
  } else if (const Status s = core->open_ring(); !s.ok()) {
    core->refusal = s.message();
  }
  Core* const c = core.get();
  try {
    c->finisher = std::thread([c] { c->finish_loop(); });
    if (c->has_ring) c->ring_thread = std::thread([c] { c->ring_loop(); });
  } catch (const std::system_error& e) {
    if (c->finisher.joinable()) {
      {
        const std::lock_guard lock(*c->mutex);
        c->finisher_stop = true;
      }
      c->finish_work.notify_all();
      c->finisher.join();
    }
    if (c->has_ring) {
      ::close(c->event);
      io_uring_queue_exit(&c->ring);
    }
    return no_memory(fmt::format("no thread for reads in the background: {}", e.what()));
  }
  return std::unique_ptr<IoQueue>(new IoQueue(std::move(core)));
}

IoQueue::~IoQueue() {
  Core& c = *core_;
  std::vector<std::shared_ptr<IoTicket::Read>> dropped;
  {
    const std::lock_guard lock(*c.mutex);
    c.stop = true;
    for (auto* list : {&c.for_ring.demand, &c.for_ring.speculative, &c.for_pool.demand, &c.for_pool.speculative}) {
      for (Core::Entry& e : *list) {
        IoTicket::Read* read = e.read.get();
        if (read->parts[e.part].started) continue;
        if (read->status.ok()) read->status = cancelled("the read queue was closed");
        c.skip_rest(read);
        if (read->parts_left == 0) dropped.push_back(e.read);  // else what is in flight ends it
      }
      list->clear();
    }
    c.wake_ring();
  }
  c.pool_work.notify_all();
  for (const auto& read : dropped) c.complete(read);
  dropped.clear();
  if (c.ring_thread.joinable()) c.ring_thread.join();
  for (std::thread& t : c.pool) t.join();
  {
    const std::lock_guard lock(*c.mutex);
    c.finisher_stop = true;
  }
  c.finish_work.notify_all();
  c.finisher.join();
  if (c.has_ring) {
    io_uring_queue_exit(&c.ring);
    ::close(c.event);
  }
}

IoTicket IoQueue::submit(IoRead what) {
  Core& c = *core_;
  auto read = std::make_shared<IoTicket::Read>();
  read->what = std::move(what);
  read->demand = read->counts_demand = read->what.io_class == IoClass::kDemand;
  const int64_t most = c.options.part_bytes;
  for (const IoPiece& piece : read->what.pieces) {
    FIRN_CHECK(
        piece.file != nullptr && piece.bytes >= 0 && piece.offset >= 0 && (piece.dst != nullptr || piece.bytes == 0),
        "a piece of a read");
    read->bytes += piece.bytes;
    const int64_t alignment = piece.file->direct_alignment();
    for (int64_t at = 0; at < piece.bytes;) {
      Part part;
      part.file = piece.file;
      part.offset = piece.offset + at;
      part.dst = piece.dst + at;
      // Parts end at multiples of part_bytes in the file, so that only a piece's ends are unaligned.
      part.bytes = std::min(piece.bytes - at, most - part.offset % most);
      part.ring = c.has_ring && piece.file->descriptor() >= 0;
      const auto mask = static_cast<uint64_t>(std::max(alignment, int64_t{1}) - 1);
      part.bounce = ((static_cast<uint64_t>(part.offset) | static_cast<uint64_t>(part.bytes) |
                      reinterpret_cast<uintptr_t>(part.dst)) &
                     mask) != 0;
      at += part.bytes;
      read->parts.push_back(part);
    }
  }
  read->parts_left = static_cast<int64_t>(read->parts.size());
  read->mutex = c.mutex;
  read->promote = [&c](IoTicket::Read* r) {
    if (r->demand) return;
    r->demand = true;
    bool ring = false, pool = false;
    // Found by searching: what is queued on a guess is not much.
    for (Core::Waiting* waiting : {&c.for_ring, &c.for_pool}) {
      std::deque<Core::Entry> keep;
      for (Core::Entry& e : waiting->speculative) {
        if (e.read.get() != r) {
          keep.push_back(std::move(e));
          continue;
        }
        (waiting == &c.for_ring ? ring : pool) = true;
        waiting->demand.push_back(std::move(e));
      }
      waiting->speculative = std::move(keep);
    }
    if (ring) c.wake_ring();
    if (pool) c.pool_work.notify_all();
  };
  read->cancel = [&c](IoTicket::Read* r) {
    if (r->any_started || r->parts.empty()) return false;
    c.skip_rest(r);
    r->status = cancelled("a read that had not begun was taken back");
    r->promote = nullptr;
    ++c.stats.cancelled;
    --c.unfinished;
    r->done.store(true, std::memory_order_release);
    return true;
  };
  const IoTicket ticket(read);
  bool empty = false;
  {
    const std::lock_guard lock(*c.mutex);
    FIRN_CHECK(!c.stop, "a read submitted to a closed queue");
    ++c.stats.reads;
    ++c.unfinished;
    read->start = Clock::now();
    bool ring = false, pool = false;
    for (size_t i = 0; i < read->parts.size(); ++i) {
      Core::Waiting& waiting = read->parts[i].ring ? c.for_ring : c.for_pool;
      (read->parts[i].ring ? ring : pool) = true;
      (read->demand ? waiting.demand : waiting.speculative).push_back({read, i});
    }
    if (pool) c.start_pool();
    if (ring) c.wake_ring();
    if (pool) c.pool_work.notify_all();
    empty = read->parts.empty();
  }
  if (empty) c.hand_to_finish(read);
  return ticket;
}

bool IoQueue::idle() const {
  const std::lock_guard lock(*core_->mutex);
  return core_->unfinished == 0;
}

IoQueueStats IoQueue::stats() const {
  const std::lock_guard lock(*core_->mutex);
  return core_->stats;
}

const char* IoQueue::backend() const {
  return !core_->has_ring ? "preads" : core_->options.sqpoll ? "io_uring sqpoll" : "io_uring";
}

const std::string& IoQueue::refusal() const { return core_->refusal; }

int64_t IoQueue::buffer_bytes() const {
  return (core_->has_ring ? core_->options.depth : core_->options.threads) * core_->bounce_bytes();
}

}  // namespace firn::storage
