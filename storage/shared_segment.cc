#include "storage/shared_segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>

#include "runtime/thread_team.h"
#include "runtime/units.h"

namespace firn::storage {
namespace {

constexpr char kMagic[8] = {'F', 'I', 'R', 'N', 'S', 'H', 'M', '\0'};
constexpr int64_t kPage = 4096, kHugePage = int64_t{2} << 20;
constexpr int64_t kLargeUnit = int64_t{1} << 20, kSmallAlign = 64;
constexpr int64_t kPieceBytes = int64_t{32} << 20;
constexpr int64_t kFallocateStep = int64_t{1} << 30;  // between two looks at cancel
constexpr const char* kNew = ".new";

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t complete;
  uint64_t identity;
  uint64_t layout;
  int64_t file_bytes;
  int64_t data_offset;
  int64_t pieces;
  int64_t created_s;  // seconds since 1970
  uint32_t uid;
  uint32_t maker;  // process id
  uint64_t table_hash;
  char source[2048];
  uint64_t header_hash;  // of everything before it
};
static_assert(sizeof(Header) <= kPage);

struct Piece {
  int64_t offset, bytes;
  uint64_t hash;
};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

uint64_t hash_of(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }
uint64_t header_hash(const Header& h) { return hash_of(&h, offsetof(Header, header_hash)); }

struct Layout {
  std::vector<int64_t> offsets;  // of the units
  std::vector<Piece> pieces;
  std::vector<size_t> unit_of;  // of each piece
  int64_t data_offset = 0, end = 0, content = 0;
  uint64_t hash = 0;
};

Layout lay_out(const std::vector<SharedUnit>& units) {
  Layout out;
  std::string text;
  int64_t n_pieces = 0;
  for (const SharedUnit& u : units) {
    n_pieces += (u.bytes + kPieceBytes - 1) / kPieceBytes;
    text += fmt::format("{}:{}\n", u.what, u.bytes);
  }
  out.hash = hash_of(text.data(), text.size());
  out.data_offset = round_up(kPage + n_pieces * int64_t{sizeof(Piece)}, kHugePage);
  int64_t at = out.data_offset;
  for (size_t i = 0; i < units.size(); ++i) {
    const int64_t bytes = units[i].bytes;
    FIRN_CHECK(bytes > 0, units[i].what);
    at = round_up(at, bytes >= kLargeUnit ? kPage : kSmallAlign);
    out.offsets.push_back(at);
    for (int64_t done = 0; done < bytes; done += kPieceBytes) {
      out.pieces.push_back({at + done, std::min(kPieceBytes, bytes - done), 0});
      out.unit_of.push_back(i);
    }
    at += bytes;
    out.content += bytes;
  }
  out.end = at;
  return out;
}

// fn(i) for 0 <= i < n on several threads, until one returns false or `cancel` is set.
void each(size_t n, int threads, const std::atomic<bool>* cancel, const std::function<bool(size_t)>& fn) {
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < n && !stop.load(std::memory_order_relaxed); i = next.fetch_add(1)) {
      if ((cancel != nullptr && cancel->load(std::memory_order_relaxed)) || !fn(i)) stop.store(true);
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads && static_cast<size_t>(t) < n; ++t) {
    others.emplace_back([&] {
      unpin_this_thread();
      work();
    });
  }
  work();
  for (std::thread& t : others) t.join();
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

// O_NONBLOCK: a FIFO that somebody put here must not block us.
Fd open_read(const std::string& path) { return Fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)); }

bool same_file(int fd, const std::string& path) {
  struct stat a {
  }, b{};
  return fstat(fd, &a) == 0 && lstat(path.c_str(), &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

void unlink_if_same(int fd, const std::string& path) {
  if (same_file(fd, path)) unlink(path.c_str());
}

// Why the file must not be used, or empty.
std::string distrust(const struct stat& s) {
  if (!S_ISREG(s.st_mode)) return "is not a regular file";
  if (s.st_uid != geteuid()) return fmt::format("belongs to user {}, we are {}", s.st_uid, geteuid());
  if ((s.st_mode & 077) != 0) return fmt::format("has mode {:o}; expected 600", s.st_mode & 07777);
  return {};
}

bool read_all(int fd, void* out, size_t bytes, int64_t offset) {
  auto* p = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = pread(fd, p, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    p += got;
    offset += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// Why no run would attach to a file with this header, or empty.
std::string header_problem(int fd, const struct stat& s, Header* h) {
  std::memset(h, 0, sizeof(*h));
  if (!read_all(fd, h, sizeof(*h), 0)) return "is shorter than a header";
  h->source[sizeof(h->source) - 1] = '\0';
  if (std::memcmp(h->magic, kMagic, sizeof(kMagic)) != 0) return "has no header of a segment";
  if (h->version != kSharedVersion) return fmt::format("has layout version {}; this is {}", h->version, kSharedVersion);
  if (header_hash(*h) != h->header_hash) return "has a damaged header";
  if (h->complete != 1) return "is half-made";
  if (s.st_size != h->file_bytes) return fmt::format("has {} bytes; its header says {}", s.st_size, h->file_bytes);
  return {};
}

struct FileSystemInfo {
  std::string name;
  std::string why_not;
  int64_t block = kPage;
  int64_t free_bytes = 0, size_bytes = 0;
  bool huge = false;
  std::string mount;
};

// The mount that holds `folder`, and whether its "huge=" option lets it have huge pages. huge=advise is not enough:
// fallocate takes the pages and knows of no advice.
void find_mount(const std::string& folder, FileSystemInfo* info) {
  std::error_code ec;
  const std::string real = std::filesystem::canonical(folder, ec).string();
  std::ifstream mounts("/proc/self/mountinfo");
  info->mount = folder;
  size_t best = 0;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string skip, point;
    words >> skip >> skip >> skip >> skip >> point;
    const bool holds = point == "/" || real == point || real.rfind(point + "/", 0) == 0;
    if (!holds || point.size() < best) continue;
    best = point.size();
    info->mount = point;
    info->huge = line.find("huge=always") != std::string::npos || line.find("huge=within_size") != std::string::npos;
  }
}

FileSystemInfo look_at(const std::string& folder) {
  FileSystemInfo out;
  struct statfs s {};
  if (statfs(folder.c_str(), &s) != 0) {
    out.why_not = fmt::format("{}: {}", folder, std::strerror(errno));
    return out;
  }
  const auto type = static_cast<uint64_t>(s.f_type);
  if (type != TMPFS_MAGIC && type != HUGETLBFS_MAGIC) {
    out.why_not = fmt::format("{} is not on a memory file system; expected tmpfs (as /dev/shm) or hugetlbfs", folder);
    return out;
  }
  out.name = type == TMPFS_MAGIC ? "tmpfs" : "hugetlbfs";
  out.block = std::max<int64_t>(s.f_bsize, kPage);
  out.size_bytes = static_cast<int64_t>(s.f_blocks) * s.f_bsize;
  // A tmpfs without a limit reports no blocks at all.
  out.free_bytes = s.f_blocks == 0 ? INT64_MAX : static_cast<int64_t>(s.f_bavail) * s.f_bsize;
  find_mount(folder, &out);
  if (type == HUGETLBFS_MAGIC) out.huge = true;
  return out;
}

bool hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// firn-<16 hex digits>-<8 hex digits>-<version>[.new]: nothing else in the folder is ever touched.
bool is_segment_name(std::string_view name) {
  if (name.ends_with(kNew)) name.remove_suffix(4);
  if (name.size() < 32 || name.substr(0, 5) != "firn-" || name[21] != '-' || name[30] != '-') return false;
  const std::string_view version = name.substr(31);
  return hex(name.substr(5, 16)) && hex(name.substr(22, 8)) &&
         std::all_of(version.begin(), version.end(), [](char c) { return c >= '0' && c <= '9'; });
}

int64_t count_lockers(const struct stat& s) {
  std::ifstream locks("/proc/locks");
  std::set<int64_t> pids;
  const std::string id = fmt::format("{:02x}:{:02x}:{}", major(s.st_dev), minor(s.st_dev), s.st_ino);
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, mode, file;
    int64_t pid = 0;
    if (!(words >> number >> kind)) continue;
    if (kind == "->") continue;  // waits for it
    if (!(words >> advisory >> mode >> pid >> file)) continue;
    if (kind == "FLOCK" && file == id) pids.insert(pid);
  }
  return static_cast<int64_t>(pids.size());
}

}  // namespace

// One call of SharedSegment::open.
class SegmentOpener {
 public:
  SegmentOpener(const SharedOptions& options, Budget* budget)
      : o_(options), budget_(budget), layout_(lay_out(options.units)) {
    const uint64_t key[2] = {layout_.hash, geteuid()};
    name_ = fmt::format("firn-{:016x}-{:08x}-{}", o_.identity, hash_of(key, sizeof(key)) & 0xFFFFFFFFu, kSharedVersion);
    path_ = o_.folder + "/" + name_;
    new_path_ = path_ + kNew;
  }

  Result<SharedSegment::Opened> run() {
    fs_ = look_at(o_.folder);
    if (!fs_.why_not.empty()) return alone(fs_.why_not);
    if (o_.source.size() >= sizeof(Header::source)) return alone("the checkpoint's path is too long for a header");
    layout_.end = round_up(layout_.end, fs_.block);
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      if (cancelled_now()) return cancelled("loading was cancelled");
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > o_.max_wait_s) {
        return alone(fmt::format("another run has been filling {} for {:.0f} s", name_, o_.max_wait_s));
      }
      FIRN_ASSIGN(std::optional<SharedSegment::Opened> found, attach());
      if (found.has_value()) return std::move(*found);
      FIRN_ASSIGN(std::optional<SharedSegment::Opened> made, make());
      if (made.has_value()) return std::move(*made);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

 private:
  using Maybe = Result<std::optional<SharedSegment::Opened>>;

  bool cancelled_now() const { return o_.cancel != nullptr && o_.cancel->load(std::memory_order_relaxed); }
  void say(const std::string& words) const {
    if (o_.say) o_.say(words);
  }
  static SharedSegment::Opened alone(std::string why) { return {nullptr, std::move(why)}; }
  static Maybe again() { return std::optional<SharedSegment::Opened>(); }
  static Maybe done(SharedSegment::Opened opened) { return std::optional(std::move(opened)); }

  // Nothing when there is no segment one may attach to (any more).
  Maybe attach() {
    Fd fd = open_read(path_);
    if (!fd.ok()) {
      if (errno == ENOENT) return again();
      return done(alone(fmt::format("{}: {}", path_, std::strerror(errno))));
    }
    struct stat s {};
    if (fstat(fd.get(), &s) != 0) return done(alone(fmt::format("{}: {}", path_, std::strerror(errno))));
    const std::string distrusted = distrust(s);
    if (!distrusted.empty()) return done(alone(fmt::format("{} {}", path_, distrusted)));
    if (flock(fd.get(), LOCK_SH | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) return again();  // somebody looks at it; make() waits as need be
      return done(alone(fmt::format("{} cannot be locked: {}", path_, std::strerror(errno))));
    }
    Header header;
    std::string problem = header_problem(fd.get(), s, &header);
    std::vector<Piece> table(layout_.pieces.size());
    if (problem.empty()) problem = plan_problem(fd.get(), header, &table);
    if (!problem.empty()) {
      rebuild(fd.get(), problem);
      return again();
    }
    FIRN_ASSIGN(auto segment, map(std::move(fd), PROT_READ));
    if (segment == nullptr) return done(alone(fmt::format("{} cannot be mapped: {}", path_, std::strerror(errno))));
    if (o_.verify) {
      FIRN_ASSIGN(problem, verify(*segment, table));
      if (!problem.empty()) {
        rebuild(segment->fd_, problem);
        return again();
      }
    }
    segment->attached_ = true;
    return done({std::move(segment), {}});
  }

  void rebuild(int fd, const std::string& problem) const {
    say(fmt::format("the shared segment {} {}; its weights are loaded again", name_, problem));
    unlink_if_same(fd, path_);
  }

  std::string plan_problem(int fd, const Header& h, std::vector<Piece>* table) const {
    if (h.identity != o_.identity || h.layout != layout_.hash) return "is of another checkpoint or layout";
    if (h.pieces != static_cast<int64_t>(table->size()) || h.data_offset != layout_.data_offset ||
        h.file_bytes != layout_.end || h.uid != geteuid()) {
      return "has another layout than this checkpoint's";
    }
    const size_t bytes = table->size() * sizeof(Piece);
    if (!read_all(fd, table->data(), bytes, kPage) || hash_of(table->data(), bytes) != h.table_hash) {
      return "has a damaged table of checksums";
    }
    for (size_t i = 0; i < table->size(); ++i) {
      const Piece &a = (*table)[i], &b = layout_.pieces[i];
      if (a.offset != b.offset || a.bytes != b.bytes) return "has another layout than this checkpoint's";
    }
    return {};
  }

  Result<std::string> verify(const SharedSegment& segment, const std::vector<Piece>& table) const {
    const auto* base = static_cast<const char*>(segment.map_);
    std::atomic<int64_t> seen{0};
    std::atomic<size_t> bad{table.size()};
    if (o_.progress) o_.progress(0, layout_.content);
    each(table.size(), o_.threads, o_.cancel, [&](size_t i) {
      const Piece& p = table[i];
#ifdef MADV_POPULATE_READ
      // One call instead of a fault every few pages; a kernel that does not know it faults as ever.
      const int64_t from = p.offset / kPage * kPage;
      (void)madvise(static_cast<char*>(segment.map_) + from, p.offset + p.bytes - from, MADV_POPULATE_READ);
#endif
      if (hash_of(base + p.offset, static_cast<size_t>(p.bytes)) != p.hash) {
        bad.store(i);
        return false;
      }
      const int64_t now = seen.fetch_add(p.bytes) + p.bytes;
      if (o_.progress) o_.progress(now, layout_.content);
      return true;
    });
    if (cancelled_now()) return cancelled("loading was cancelled");
    if (bad.load() == table.size()) return std::string();
    return fmt::format("is damaged ({})", o_.units[layout_.unit_of[bad.load()]].what);
  }

  // Null with errno when the kernel refuses the mapping.
  Result<std::unique_ptr<SharedSegment>> map(Fd fd, int protection) {
    // Charged as a whole before a page is touched; allocate() charges unit by unit once this is given back.
    FIRN_ASSIGN(Reservation content, budget_->reserve(layout_.content, "shared weights"));
    FIRN_ASSIGN(Reservation overhead,
                budget_->reserve(layout_.end - layout_.content, "header and gaps of shared weights"));
    std::unique_ptr<SharedSegment> segment(new SharedSegment(budget_, o_));
    void* data = mmap(nullptr, static_cast<size_t>(layout_.end), protection, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) return std::unique_ptr<SharedSegment>();
    // So that huge pages of the file are mapped as such.
    (void)madvise(data, static_cast<size_t>(layout_.end), MADV_HUGEPAGE);
    segment->name_ = name_;
    segment->file_system_ = fs_.name;
    segment->offsets_ = layout_.offsets;
    segment->map_ = data;
    segment->map_bytes_ = layout_.end;
    segment->huge_pages_ = fs_.huge;
    segment->overhead_ = std::move(overhead);
    segment->fd_ = fd.release();
    return segment;
  }

  // Nothing when another process came first or went away: look again.
  Maybe make() {
    Fd fd(open(new_path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!fd.ok()) {
      if (errno == EEXIST) return wait_for_maker();
      return done(alone(fmt::format("{}: {}", new_path_, std::strerror(errno))));
    }
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      unlink_if_same(fd.get(), new_path_);
      if (error == EWOULDBLOCK || error == EINTR) return again();
      return done(alone(fmt::format("{} cannot be locked: {}", new_path_, std::strerror(error))));
    }
    if (!same_file(fd.get(), new_path_)) return again();
    struct stat s {};
    if (lstat(path_.c_str(), &s) == 0) {  // finished between our two looks
      unlink(new_path_.c_str());
      return again();
    }
    drop_stale();
    // The lock belongs to both descriptors: it is ours until the name is gone.
    auto made = fill(Fd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
    if (!made.ok() || made->segment == nullptr) unlink_if_same(fd.get(), new_path_);
    if (!made.ok()) return made.status();
    return done(std::move(made).value());
  }

  Result<SharedSegment::Opened> fill(Fd fd) {
    fs_ = look_at(o_.folder);
    const int64_t room = o_.room_bytes >= 0 ? std::min(o_.room_bytes, fs_.free_bytes) : fs_.free_bytes;
    if (room < layout_.end) return alone(no_room(room));
    const int raw = fd.get();
    FIRN_ASSIGN(Reservation promise, budget_->reserve(layout_.end, "shared weights"));
    if (ftruncate(raw, layout_.end) != 0) return alone(refused("ftruncate"));
    for (int64_t at = 0; at < layout_.end; at += kFallocateStep) {
      if (cancelled_now()) return cancelled("loading was cancelled");
      int rc = 0;
      do {
        rc = fallocate(raw, 0, at, std::min(kFallocateStep, layout_.end - at));
      } while (rc != 0 && errno == EINTR);
      if (rc != 0) return alone(errno == ENOSPC ? no_room(look_at(o_.folder).free_bytes + at) : refused("fallocate"));
    }
    promise.release();
    FIRN_ASSIGN(auto segment, map(std::move(fd), PROT_READ | PROT_WRITE));
    if (segment == nullptr) return alone(refused("mmap"));
    Header h{};
    std::memcpy(h.magic, kMagic, sizeof(kMagic));
    h.version = kSharedVersion;
    h.identity = o_.identity;
    h.layout = layout_.hash;
    h.file_bytes = layout_.end;
    h.data_offset = layout_.data_offset;
    h.pieces = static_cast<int64_t>(layout_.pieces.size());
    h.created_s = static_cast<int64_t>(std::time(nullptr));
    h.uid = geteuid();
    h.maker = static_cast<uint32_t>(getpid());
    o_.source.copy(h.source, sizeof(h.source) - 1);
    h.header_hash = header_hash(h);
    std::memcpy(segment->map_, &h, sizeof(h));
    return SharedSegment::Opened{std::move(segment), {}};
  }

  std::string refused(const char* call) const {
    return fmt::format("{}: {}: {}", new_path_, call, std::strerror(errno));
  }

  std::string no_room(int64_t room) const {
    constexpr int64_t kGiB = int64_t{1} << 30;
    std::string fix = fs_.name == "hugetlbfs"
                          ? fmt::format("raise vm.nr_hugepages by {}", (layout_.end - room + fs_.block - 1) / fs_.block)
                          : fmt::format("sudo mount -o remount,size={}G {}",
                                        (fs_.size_bytes + layout_.end - room + kGiB - 1) / kGiB, fs_.mount);
    return fmt::format("{} has {} free, shared weights need {}, {} short: {}", o_.folder, format_size(room),
                       format_size(layout_.end), format_size(layout_.end - room), fix);
  }

  Maybe wait_for_maker() {
    Fd fd = open_read(new_path_);
    if (!fd.ok()) {
      if (errno == ENOENT) return again();
      return done(alone(fmt::format("{}: {}", new_path_, std::strerror(errno))));
    }
    struct stat s {};
    if (fstat(fd.get(), &s) != 0) return again();
    const std::string distrusted = distrust(s);
    if (!distrusted.empty()) return done(alone(fmt::format("{} {}", new_path_, distrusted)));
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) {
        return done(alone(fmt::format("{} cannot be locked: {}", new_path_, std::strerror(errno))));
      }
      if (!waiting_) say("another run is loading these weights into shared memory; waiting for it");
      waiting_ = true;
      return again();
    }
    // Unlocked: its maker is gone, has just finished, or has not come to lock it yet.
    const bool young = s.st_size == 0 && std::time(nullptr) - s.st_mtime < 2;
    if (!young && same_file(fd.get(), new_path_)) {
      say(fmt::format("the shared segment {} was left half-made by a run that ended; its weights are loaded again",
                      name_));
      unlink(new_path_.c_str());
    }
    return again();
  }

  // What the same checkpoint held before it changed would stay in memory for ever: its name is another.
  void drop_stale() const {
    std::error_code ec;
    for (const auto& entry : std::filesystem::directory_iterator(o_.folder, ec)) {
      const std::string name = entry.path().filename().string();
      if (!is_segment_name(name) || name.ends_with(kNew)) continue;
      const Fd fd = open_read(entry.path().string());
      struct stat s {};
      Header h;
      if (!fd.ok() || fstat(fd.get(), &s) != 0 || !distrust(s).empty()) continue;
      if (!header_problem(fd.get(), s, &h).empty() || h.identity == o_.identity || o_.source != h.source) continue;
      say(fmt::format("the shared segment {} is stale, {} has changed; it is removed", name, o_.source));
      unlink_if_same(fd.get(), entry.path().string());
    }
  }

  const SharedOptions& o_;
  Budget* const budget_;
  Layout layout_;
  FileSystemInfo fs_;
  std::string name_, path_, new_path_;
  bool waiting_ = false;
};

Result<SharedSegment::Opened> SharedSegment::open(const SharedOptions& options, Budget* budget) {
  return SegmentOpener(options, budget).run();
}

SharedSegment::~SharedSegment() {
  if (map_ != nullptr) munmap(map_, static_cast<size_t>(map_bytes_));
  if (fd_ < 0) return;
  if (!attached_ && !sealed_) unlink_if_same(fd_, options_.folder + "/" + name_ + kNew);
  close(fd_);
}

void* SharedSegment::raw_allocate(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  FIRN_CHECK(next_ < options_.units.size(), "more units than the segment has");
  FIRN_CHECK(options_.units[next_].bytes == bytes, options_.units[next_].what);
  return static_cast<char*>(map_) + offsets_[next_++];
}

Status SharedSegment::seal() {
  FIRN_CHECK(!attached_ && !sealed_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    FIRN_CHECK(next_ == options_.units.size(), "a unit was never asked for");
  }
  Layout layout = lay_out(options_.units);
  auto* const base = static_cast<char*>(map_);
  each(layout.pieces.size(), options_.threads, options_.cancel, [&](size_t i) {
    Piece& p = layout.pieces[i];
    p.hash = hash_of(base + p.offset, static_cast<size_t>(p.bytes));
    return true;
  });
  if (options_.cancel != nullptr && options_.cancel->load()) return cancelled("loading was cancelled");
  const size_t table_bytes = layout.pieces.size() * sizeof(Piece);
  std::memcpy(base + kPage, layout.pieces.data(), table_bytes);
  Header h;
  std::memcpy(&h, base, sizeof(h));
  h.table_hash = hash_of(layout.pieces.data(), table_bytes);
  h.complete = 1;
  h.header_hash = header_hash(h);
  std::memcpy(base, &h, sizeof(h));
  const std::string path = options_.folder + "/" + name_, new_path = path + kNew;
  if (mprotect(map_, static_cast<size_t>(map_bytes_), PROT_READ) != 0) {
    return io_error(fmt::format("{}: mprotect: {}", new_path, std::strerror(errno)));
  }
  if (!same_file(fd_, new_path)) {
    return not_found(fmt::format("{} was removed while it was being filled; this run has it alone", new_path));
  }
  if (rename(new_path.c_str(), path.c_str()) != 0) {
    return io_error(fmt::format("{}: rename: {}; this run has it alone", new_path, std::strerror(errno)));
  }
  sealed_ = true;
  // From exclusive to shared; whoever holds it in between lets go at once.
  while (flock(fd_, LOCK_SH) != 0 && errno == EINTR) {
  }
  return {};
}

SharedRoom shared_room(const std::string& folder) {
  const FileSystemInfo info = look_at(folder);
  return {info.why_not, info.mount, info.free_bytes, info.size_bytes, info.huge};
}

Result<std::vector<SharedInfo>> list_shared(const std::string& folder) {
  std::vector<SharedInfo> out;
  std::error_code ec;
  std::filesystem::directory_iterator it(folder, ec);
  if (ec == std::errc::no_such_file_or_directory) return out;
  if (ec) return io_error(fmt::format("{}: {}", folder, ec.message()));
  for (const auto& entry : it) {
    SharedInfo info;
    info.name = entry.path().filename().string();
    struct stat s {};
    if (!is_segment_name(info.name) || lstat(entry.path().c_str(), &s) != 0 || !S_ISREG(s.st_mode)) continue;
    info.bytes = static_cast<int64_t>(s.st_blocks) * 512;
    info.age_s = static_cast<double>(std::time(nullptr) - s.st_mtime);
    info.ours = s.st_uid == geteuid();
    info.processes = count_lockers(s);
    info.problem = distrust(s);
    const Fd fd = open_read(entry.path().string());
    if (fd.ok()) {
      Header h;
      const std::string problem = header_problem(fd.get(), s, &h);
      if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) == 0 && h.version == kSharedVersion) info.source = h.source;
      if (problem.empty()) info.age_s = static_cast<double>(std::time(nullptr) - h.created_s);
      if (info.problem.empty()) info.problem = problem;
      // /proc may be hidden from us; the lock itself is not.
      if (info.processes == 0 && flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) info.processes = 1;
    }
    const bool is_new = info.name.ends_with(kNew);
    info.filling = is_new && info.processes > 0;
    if (is_new) info.problem = info.filling ? "is being filled" : "was left half-made";
    info.complete = info.problem.empty();
    out.push_back(std::move(info));
  }
  std::sort(out.begin(), out.end(), [](const SharedInfo& a, const SharedInfo& b) { return a.name < b.name; });
  return out;
}

Result<std::vector<SharedInfo>> drop_shared(const std::string& folder, const std::string& name) {
  FIRN_ASSIGN(const std::vector<SharedInfo> all, list_shared(folder));
  std::vector<SharedInfo> dropped;
  bool found = name == "all";
  for (const SharedInfo& info : all) {
    if (name == "all" ? (!info.ours || info.filling) : info.name != name) continue;
    found = true;
    if (info.filling) {
      return invalid(fmt::format("{} is being filled by a run; end that run or wait for it", info.name));
    }
    if (unlink((folder + "/" + info.name).c_str()) != 0) {
      return io_error(fmt::format("{}/{}: {}", folder, info.name, std::strerror(errno)));
    }
    dropped.push_back(info);
  }
  if (!found) {
    std::string names;
    for (const SharedInfo& info : all) names += (names.empty() ? "" : ", ") + info.name;
    return not_found(
        fmt::format("no shared weights named {} in {}; there are {}", name, folder, names.empty() ? "none" : names));
  }
  return dropped;
}

int64_t shared_bytes_of(const std::string& folder, const std::string& source) {
  const auto all = list_shared(folder);
  int64_t bytes = 0;
  if (!all.ok()) return 0;
  for (const SharedInfo& info : *all) {
    if (info.ours && info.source == source && (info.complete || info.filling)) bytes += info.bytes;
  }
  return bytes;
}

}  // namespace firn::storage
