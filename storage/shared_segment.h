// Shared segments: memory with a name that outlives the process which filled it, so that a later one starts with its
// content at once.
//
// A segment is a file in a folder of a memory file system (tmpfs such as /dev/shm, or a hugetlbfs mount), mode 0600:
// a page of header, a table of pieces, then the units at fixed offsets (64-byte aligned, 4096 when a unit has >= 1 MiB;
// the first at a multiple of 2 MiB). Every piece (a unit, cut at 32 MiB) has an XXH3-64; header and table have their
// own. Nothing in it is an address, so it may be mapped anywhere.
//
//   (none) --open(): <name>.new made with O_EXCL, flock exclusive--> filling --seal(): checksums, header says complete,
//          renamed to <name>, read-only from then on--> complete --stale, damaged, dropped: unlinked--> (none)
//   filling --its maker dies--> half-made: a .new nobody has locked --the next open()--> unlinked, (none)
//
// Locks: only flock, which the kernel gives back when a process ends however it ends. The maker holds the .new file
// exclusively until seal(); whoever uses a complete segment holds it shared. A second open() of a segment that is being
// filled waits, and takes over when the maker goes away. Nobody holds two locks. To drop a segment is to unlink it:
// mappings live on, and the memory is free when the last of them ends.
//
// Memory: allocate() charges the budget as for private memory, in every process: pages of a mapping count in the
// resident set of whoever touches them. The kernel's control groups see it otherwise: a tmpfs page is charged once, to
// the group of the process that touched it first, until the segment is gone, and not to those that attach later.
// Room is taken with fallocate before anything is touched, because a write beyond the file system's size is a SIGBUS.
//
// Trust: a file that is not a regular one, not ours (effective user), open to others or of another size than its
// header says is never mapped. A program of the same user that truncates a segment in use ends its users (SIGBUS).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/arena.h"

namespace firn::storage {

inline constexpr const char* kSharedFolder = "/dev/shm";
inline constexpr uint32_t kSharedVersion = 1;

// One allocation, in order. `what` names it in messages about damage.
struct SharedUnit {
  std::string what;
  int64_t bytes = 0;
};

struct SharedOptions {
  std::string folder = kSharedFolder;
  uint64_t identity = 0;          // of the content; a change makes segments of the same `source` stale
  std::string source;             // where the content comes from (the checkpoint's path)
  std::vector<SharedUnit> units;  // also part of the name: another set of units is another segment
  int threads = 1;                // for checksums
  bool verify = true;             // look at every byte before attaching
  double max_wait_s = 1800;       // for another process that fills it; then the caller goes on alone
  int64_t room_bytes = -1;        // the most a new one may take; -1: what the file system has free
  // Of checksums when attaching: first with 0 by the caller's thread, then by any.
  std::function<void(int64_t done, int64_t total)> progress;
  std::function<void(const std::string&)> say;  // at once: what is waited for, found bad and rebuilt
  const std::atomic<bool>* cancel = nullptr;
};

// The arena of one segment: allocate() hands out the units in their order and checks the sizes (a contradiction is our
// bug). Thread-safe like every Arena. It must outlive its Buffers. While attached() or after seal() the memory is
// read-only.
class SharedSegment final : public Arena {
 public:
  struct Opened {
    std::unique_ptr<SharedSegment> segment;  // null: go on with private memory, `why_private` says why
    std::string why_private;                 // and what would change it
  };
  // Attaches to the segment, or makes one to be filled. Errors: the budget refuses the header (kNoMemory), cancelled.
  static Result<Opened> open(const SharedOptions& options, Budget* budget);
  ~SharedSegment() override;  // one that was never sealed is removed

  Space space() const override { return Space::kHost; }
  bool attached() const { return attached_; }  // the content is there
  // Checksums, complete header, name; REQUIRES !attached() and that every unit was allocated. After an error the memory
  // stays valid and only this process has it.
  Status seal();
  const std::string& name() const { return name_; }
  int64_t file_bytes() const { return map_bytes_; }
  const std::string& file_system() const { return file_system_; }  // "tmpfs" or "hugetlbfs"
  bool huge_pages() const { return huge_pages_; }                  // the file system may back it with huge pages

 protected:
  void* raw_allocate(int64_t bytes) override;
  void raw_free(void*, int64_t) override {}

 private:
  friend class SegmentOpener;
  SharedSegment(Budget* budget, const SharedOptions& options) : Arena(budget), options_(options) {}

  const SharedOptions options_;
  std::string name_, file_system_;
  std::vector<int64_t> offsets_;  // of the units
  int fd_ = -1;
  void* map_ = nullptr;
  int64_t map_bytes_ = 0;
  bool attached_ = false, sealed_ = false, huge_pages_ = false;
  Reservation overhead_;  // header, table and gaps between units
  std::mutex mutex_;      // guards next_
  size_t next_ = 0;
};

struct SharedRoom {
  std::string why_not;  // why no segment can be here, else empty
  std::string mount;    // what to remount for more room or huge pages
  int64_t free_bytes = 0, size_bytes = 0;
  bool huge_pages = false;
};
SharedRoom shared_room(const std::string& folder);

struct SharedInfo {
  std::string name;  // of the file
  std::string source;
  int64_t bytes = 0;  // of memory taken
  double age_s = 0;
  int64_t processes = 0;  // that have it open as far as we may see
  bool complete = false;
  bool filling = false;  // being made right now
  bool ours = false;     // belongs to this user
  std::string problem;   // why no run would attach to it ("half-made", "layout version 2; this is 1"), else empty
};

// Segments of a folder, by name. A folder that does not exist has none. Contents are not checked.
Result<std::vector<SharedInfo>> list_shared(const std::string& folder);
// Unlinks one (or "all"), also half-made ones; refuses one that is being filled. Returns what was removed.
Result<std::vector<SharedInfo>> drop_shared(const std::string& folder, const std::string& name);
// Memory that segments of this source hold already: what a run which attaches need not find free. 0 on any problem.
int64_t shared_bytes_of(const std::string& folder, const std::string& source);

}  // namespace firn::storage
