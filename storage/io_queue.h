// Reads of files in the background: io_uring where the kernel lets us, a pool of preads where it does not.
//
//   FIRN_ASSIGN(auto queue, IoQueue::create(options));
//   IoTicket t = queue->submit({{{file, offset, bytes, dst}}, IoClass::kDemand, {}});
//   ... compute ...
//   FIRN_TRY(t.wait());
//
// A read is one or more pieces, each a range of a File and where it goes. Where the file is open for direct I/O
// (File::direct_alignment() > 0) and offset, length and address are aligned, bytes go straight to their destination;
// else through the queue's own aligned buffers and a copy. Large pieces are cut into parts of part_bytes, so that a
// single 58 MB expert already keeps the drive's queue deep.
//
// Classes: demand reads are started before any speculative one. Speculative reads have their own caps on parts and
// bytes in flight, so that they cannot delay a demand read by more than the few that are already at the drive;
// promote() makes one a demand read, cancel() drops it if none of its parts has been started.
//
// Errors: a short read is continued; end of file before the asked length is kCorrupt naming file, offset, expected and
// found; EIO is tried once more and then reported the same way; a full submission queue is waited for, and a part that
// the ring refuses with EAGAIN or EBUSY is read by a thread that may block. When a part fails the read fails, after its
// parts in flight have come back: nothing writes to a destination after wait() returned. Of several failures the first
// one in the read is reported.
//
// Threads: every method may be called from any thread. One thread of the queue's own submits and reaps (io_uring).
// `threads` more read what has no descriptor or what the ring refused, and everything where there is no ring; so many
// parts at most are in flight there, whatever the depth. IoRead::finish runs on any of these, several at once for
// different reads, so it must be short, must not throw, and must not wait for another read. States of a read:
// queued -> in flight -> (finishing) -> done; queued -> cancelled. Lock order: the queue's mutex is a leaf: finish and
// destructors of what a read holds run without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"

namespace firn::storage {

enum class IoClass : uint8_t { kDemand, kSpeculative };

struct IoPiece {
  const File* file = nullptr;  // must stay open until the read is done
  int64_t offset = 0;
  int64_t bytes = 0;
  std::byte* dst = nullptr;  // host memory, valid until the read is done
};

struct IoRead {
  std::vector<IoPiece> pieces;
  IoClass io_class = IoClass::kDemand;
  // Called once when every byte is there (not after an error or a cancel); what it returns becomes the read's status:
  // checksums, decompression, copies.
  std::function<Status()> finish;
};

// Shared handle to one read; copies refer to the same read. An empty one counts as done and ok.
class IoTicket {
 public:
  IoTicket() = default;
  bool done() const;
  Status wait() const;     // blocks; Code::kCancelled after a successful cancel()
  bool cancel() const;     // true: it will never write to its destinations; false: started, done or empty
  void promote() const;    // speculative becomes demand
  double seconds() const;  // from its first part's start to done; 0 while it is not done
  explicit operator bool() const { return read_ != nullptr; }

  struct Read;  // implementation

 private:
  friend class IoQueue;
  explicit IoTicket(std::shared_ptr<Read> read) : read_(std::move(read)) {}
  std::shared_ptr<Read> read_;
};

struct IoQueueOptions {
  bool io_uring = true;  // false: preads, whatever the kernel offers
  bool sqpoll = false;
  int depth = 32;                           // parts in flight, all classes
  int64_t depth_bytes = int64_t{64} << 20;  // bytes in flight, all classes (at least one part always goes)
  int speculative_depth = 8;                // of these, speculative parts
  int64_t speculative_bytes = int64_t{8} << 20;
  int64_t part_bytes = int64_t{1} << 20;  // a multiple of 4096
  int threads = 4;                        // of the pread pool
};

struct IoQueueStats {
  int64_t demand_bytes = 0, speculative_bytes = 0;  // read from files, by the class at submission
  int64_t reads = 0, parts = 0, cancelled = 0, retried = 0, short_reads = 0;
  int64_t bounced_bytes = 0;  // that went through the queue's own buffers
  double busy_seconds = 0;    // time with at least one part in flight
};

class IoQueue {
 public:
  // Fails only when memory or threads are short (kNoMemory) or an option makes no sense (kInvalid); a refused io_uring
  // is a fallback, named by refusal().
  static Result<std::unique_ptr<IoQueue>> create(const IoQueueOptions& options);
  ~IoQueue();  // cancels what is queued, waits for what is in flight

  IoTicket submit(IoRead read);
  bool idle() const;  // nothing queued or in flight
  IoQueueStats stats() const;
  const char* backend() const;         // "io_uring", "io_uring sqpoll" or "preads"
  const std::string& refusal() const;  // why not io_uring, in words; empty when it is used
  int64_t buffer_bytes() const;        // memory of its own, for plans and budgets

 private:
  struct Core;
  explicit IoQueue(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace firn::storage
