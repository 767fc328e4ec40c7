// Writing packed files. The layout follows from the plan alone and is known before the first byte is written; threads
// take whole extents in order and write each at its place.
//
// On disk, in this order, so that a stop at any point leaves something to go on from: extents, sync, progress record
// (atomically replaced); and at the end: last extents, directory, sync, header, sync, rename, record removed.
// Concurrency: `next_` and `stop_` are atomics; results of extents and the record are under `mutex_`, which is held
// over the sync: the others find it at the end of their extents.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/thread_team.h"
#include "storage/packed_bytes.h"
#include "storage/packed_file.h"
#include "storage/text.h"

namespace firn::storage {
namespace {

using packed::align_up;
using packed::AlignedBytes;
using packed::put;
using Clock = std::chrono::steady_clock;

namespace stdfs = std::filesystem;

constexpr int64_t kStageBytes = int64_t{4} << 20;
constexpr std::string_view kRecordMagic = "FIRNPROG";
constexpr int64_t kMaxRecordBytes = int64_t{1} << 30;
constexpr auto kProgressEvery = std::chrono::milliseconds(200);

std::string folder_of(const std::string& path) {
  const std::string folder = stdfs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

Status sync_folder(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int rc = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  // Some file systems cannot sync a folder and say EINVAL.
  if (rc != 0 && error != EINVAL) {
    return io_error(fmt::format("{}: syncing the folder failed: {}", folder, std::generic_category().message(error)));
  }
  return {};
}

// Keeps a second process from writing the same OUT.partial; the kernel drops the lock when the process dies.
class Lock {
 public:
  Lock() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    if (fd_ >= 0) ::close(fd_);
  }
  Status take(const std::string& path) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
    if (fd_ < 0) {
      return io_error(fmt::format("{}: creating it failed: {}", path, std::generic_category().message(errno)));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      return invalid(fmt::format("{}: another firn pack is writing this file; wait for it or stop it", path));
    }
    return {};
  }

 private:
  int fd_ = -1;
};

struct Layout {
  struct Placed {
    const PackTensor* tensor;
    int64_t offset, bytes, row_bytes, rows;
  };
  std::vector<Extent> extents;              // tensors: indices into `tensors`
  std::vector<const std::string*> content;  // of the first extents, those of files
  std::vector<Placed> tensors;              // in disk order
  int64_t directory_offset = 0, directory_bytes = 0;
  int64_t file_bytes() const { return directory_offset + directory_bytes; }
};

std::string encode_directory(const PackPlan& plan, const Layout& layout,
                             const std::vector<uint64_t>& tensor_checksums) {
  std::string out;
  put<uint32_t>(out, static_cast<uint32_t>(layout.extents.size()));
  put<uint32_t>(out, static_cast<uint32_t>(plan.files.size()));
  put<uint32_t>(out, static_cast<uint32_t>(layout.tensors.size()));
  put<uint32_t>(out, static_cast<uint32_t>(plan.experts.size()));
  out += plan.experts;
  for (const Extent& e : layout.extents) {
    put<uint64_t>(out, static_cast<uint64_t>(e.offset));
    put<uint64_t>(out, static_cast<uint64_t>(e.bytes));
    put<uint64_t>(out, e.checksum);
    put<uint32_t>(out, static_cast<uint32_t>(e.kind));
    put<int32_t>(out, e.layer);
    put<int32_t>(out, e.expert);
    put<uint32_t>(out, static_cast<uint32_t>(e.tensors.size()));
  }
  uint32_t extent = 0;
  for (const auto& [name, text] : plan.files) {
    put<uint32_t>(out, extent++);
    put<uint64_t>(out, text.size());
    put<uint16_t>(out, static_cast<uint16_t>(name.size()));
    out += name;
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const PackTensor& t = *layout.tensors[i].tensor;
    put<uint64_t>(out, static_cast<uint64_t>(layout.tensors[i].offset));
    put<uint64_t>(out, tensor_checksums[i]);
    put<uint8_t>(out, static_cast<uint8_t>(t.dtype));
    put<uint8_t>(out, static_cast<uint8_t>(t.shape.size()));
    put<uint16_t>(out, static_cast<uint16_t>(t.name.size()));
    for (const int64_t d : t.shape) put<uint64_t>(out, static_cast<uint64_t>(d));
    out += t.name;
  }
  out.resize(static_cast<size_t>(align_up(static_cast<int64_t>(out.size()), kPackedAlignment)), '\0');
  return out;
}

Result<Layout::Placed> measure(const PackTensor& t) {
  Layout::Placed placed{&t, 0, 0, static_cast<int64_t>(dtype_bytes(t.dtype)), 1};
  if (t.name.empty() || t.name.size() > UINT16_MAX || t.shape.size() > UINT8_MAX) {
    return invalid(fmt::format("tensor {}: its name or its shape is too long", shown(t.name)));
  }
  for (size_t d = 0; d < t.shape.size(); ++d) {
    int64_t& size = d == 0 ? placed.rows : placed.row_bytes;
    if (t.shape[d] < 0 || __builtin_mul_overflow(size, t.shape[d], &size)) {
      return invalid(fmt::format("tensor {}: impossible shape", shown(t.name)));
    }
  }
  if (__builtin_mul_overflow(placed.rows, placed.row_bytes, &placed.bytes) || placed.bytes > (int64_t{1} << 50)) {
    return invalid(fmt::format("tensor {}: impossible size", shown(t.name)));
  }
  return placed;
}

Result<Layout> lay_out(const PackPlan& plan) {
  Layout layout;
  std::set<std::string_view> names;
  int64_t at = packed::kHeaderBytes;
  for (const auto& [name, text] : plan.files) {
    const auto bytes = static_cast<int64_t>(text.size());
    if (name.empty() || name.size() > UINT16_MAX || name.find('/') != std::string::npos ||
        bytes > kMaxEmbeddedFileBytes) {
      return invalid(fmt::format("{}: no file that can be packed ({} bytes)", shown(name), bytes));
    }
    Extent e;
    e.kind = ExtentKind::kFile;
    e.offset = at;
    e.bytes = std::max(align_up(bytes, kPackedAlignment), kPackedAlignment);
    at += e.bytes;
    layout.extents.push_back(std::move(e));
    layout.content.push_back(&text);
  }
  for (const PackExtent& planned : plan.extents) {
    Extent e;
    e.kind = planned.kind;
    e.layer = planned.layer;
    e.expert = planned.expert;
    e.offset = at;
    int64_t inside = 0;
    for (const PackTensor& t : planned.tensors) {
      FIRN_ASSIGN(Layout::Placed placed, measure(t));
      if (!names.insert(t.name).second) return invalid(fmt::format("tensor {} is planned twice", shown(t.name)));
      inside = align_up(inside, kPackedTensorAlignment);
      placed.offset = at + inside;
      inside += placed.bytes;
      e.tensors.push_back(static_cast<int32_t>(layout.tensors.size()));
      layout.tensors.push_back(placed);
    }
    e.bytes = std::max(align_up(inside, kPackedAlignment), kPackedAlignment);
    at += e.bytes;
    layout.extents.push_back(std::move(e));
  }
  layout.directory_offset = at;
  layout.directory_bytes =
      static_cast<int64_t>(encode_directory(plan, layout, std::vector<uint64_t>(layout.tensors.size())).size());
  if (layout.directory_bytes > packed::kMaxDirectoryBytes) return invalid("too many tensors for a packed file");
  return layout;
}

// Collects an extent's bytes and writes them in large aligned pieces.
class Stage {
 public:
  Stage(File& file, std::byte* buffer) : file_(file), buffer_(buffer) {}
  void start(int64_t offset) {
    offset_ = offset;
    used_ = 0;
    hash_ = packed::Hasher();
  }
  int64_t at() const { return offset_ + used_; }
  int64_t room() const { return kStageBytes - used_; }
  std::byte* place() { return buffer_ + used_; }
  // `bytes` at place() are there now.
  Status advance(int64_t bytes) {
    used_ += bytes;
    return used_ == kStageBytes ? flush() : Status();
  }
  Status append(const void* data, int64_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const int64_t n = std::min(bytes, room());
      std::memcpy(place(), from, static_cast<size_t>(n));
      FIRN_TRY(advance(n));
      from += n;
      bytes -= n;
    }
    return {};
  }
  Status zeros_to(int64_t offset) {
    while (at() < offset) {
      const int64_t n = std::min(offset - at(), room());
      std::memset(place(), 0, static_cast<size_t>(n));
      FIRN_TRY(advance(n));
    }
    return {};
  }
  Status flush() {
    if (used_ == 0) return {};
    const auto n = static_cast<size_t>(used_);
    hash_.add(buffer_, n);
    FIRN_TRY(file_.write_at(offset_, {buffer_, n}));
    offset_ += used_;
    used_ = 0;
    return {};
  }
  uint64_t checksum() const { return hash_.value(); }

 private:
  File& file_;
  std::byte* const buffer_;
  int64_t offset_ = 0, used_ = 0;
  packed::Hasher hash_;
};

class Writer {
 public:
  Writer(FileSystem& fs, const PackPlan& plan, Layout layout)
      : fs_(fs),
        plan_(plan),
        layout_(std::move(layout)),
        partial_(plan.out + ".partial"),
        record_path_(plan.out + ".partial.progress"),
        finished_(layout_.extents.size()),
        tensor_checksums_(layout_.tensors.size()) {
    packed::Hasher128 hash;
    hash.text(plan_.identity);
    hash.text(encode_directory(plan_, layout_, tensor_checksums_));
    for (const auto& [name, text] : plan_.files) hash.text(text);
    plan_hash_ = hash.value();
  }

  Result<PackStats> run() {
    const auto start = Clock::now();
    last_progress_ = start;
    FIRN_TRY(prepare());
    PackStats stats;
    stats.resumed_bytes = done_bytes_;
    Status status = write_extents();
    if (status.ok()) status = finish();
    if (!status.ok()) {
      if (committed_) return status;
      return Status(status.code(), fmt::format("{} ({} of {} extents are written to {}; the same command goes on from "
                                               "there)",
                                               status.message(), recorded_, layout_.extents.size(), partial_));
    }
    stats.bytes = layout_.file_bytes();
    stats.extents = static_cast<int64_t>(layout_.extents.size());
    stats.experts = std::count_if(layout_.extents.begin(), layout_.extents.end(),
                                  [](const Extent& e) { return e.kind == ExtentKind::kExpert; });
    stats.model_hash = packed::hex(model_hash_);
    stats.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return stats;
  }

 private:
  // Opens OUT.partial, with what an earlier run left when it is of this plan.
  Status prepare() {
    std::error_code ec;
    const std::string folder = folder_of(plan_.out);
    const stdfs::file_status out = stdfs::status(plan_.out, ec);
    if (stdfs::exists(out)) {
      if (!stdfs::is_regular_file(out)) {
        return invalid(fmt::format("{}: expected the name of a file to make, found another kind of thing", plan_.out));
      }
      if (!plan_.overwrite) {
        return invalid(fmt::format("{} exists already; choose another name or pass --force", plan_.out));
      }
    }
    if (!stdfs::is_directory(folder, ec)) {
      return not_found(fmt::format("{}: its folder {} does not exist: create it first", plan_.out, folder));
    }
    const bool partial_there = stdfs::exists(partial_, ec);
    FIRN_TRY(check_space(folder));
    FIRN_TRY(lock_.take(partial_));
    if (!partial_there && stdfs::exists(record_path_, ec)) {
      // A record without its file is left over from a run that was finished; it must be gone for good before there is
      // another file for it to speak of.
      remove_quietly(record_path_);
      FIRN_TRY(sync_folder(folder));
    }
    FIRN_TRY(read_record());
    FIRN_ASSIGN(file_, fs_.open(partial_, OpenMode::kUpdate));
    FIRN_ASSIGN(const int64_t bytes, file_->size());
    for (size_t i = 0; i < finished_.size(); ++i) {
      const Extent& e = layout_.extents[i];
      if (finished_[i] && bytes < e.offset + e.bytes) std::fill(finished_.begin(), finished_.end(), false);
    }
    n_finished_ = static_cast<size_t>(std::count(finished_.begin(), finished_.end(), true));
    if (n_finished_ == 0) {
      // A record that was not believed must not be believed later, when the file has grown again.
      if (stdfs::exists(record_path_, ec)) {
        remove_quietly(record_path_);
        FIRN_TRY(sync_folder(folder));
      }
      FIRN_TRY(file_->resize(0));
    }
    recorded_ = n_finished_;
    for (size_t i = 0; i < finished_.size(); ++i) {
      if (finished_[i]) {
        done_bytes_ += layout_.extents[i].bytes;
      } else {
        todo_.push_back(i);
      }
    }
    written_bytes_ = done_bytes_;
    return {};
  }

  Status check_space(const std::string& folder) const {
    struct stat info {};
    const int64_t there = ::stat(partial_.c_str(), &info) == 0 ? int64_t{info.st_blocks} * 512 : 0;
    std::error_code ec;
    const stdfs::space_info space = stdfs::space(folder, ec);
    const int64_t needed = layout_.file_bytes() - there;
    if (!ec && needed > 0 && space.available < static_cast<uintmax_t>(needed)) {
      return io_error(
          fmt::format("{}: the packed file needs {} bytes of disk{}, {} are free: free some or choose "
                      "another folder",
                      plan_.out, needed, there > 0 ? " more" : "", space.available));
    }
    return {};
  }

  // The record: magic, plan hash, number of extents; for each, whether it is done, its checksum and its tensors'
  // checksums (zeros while it is not); XXH3-64 of all that.
  std::string encode_record() const {
    std::string out(kRecordMagic);
    put(out, plan_hash_.low64);
    put(out, plan_hash_.high64);
    put<uint64_t>(out, finished_.size());
    for (size_t i = 0; i < finished_.size(); ++i) {
      const bool done = finished_[i];
      put<uint64_t>(out, done ? 1 : 0);
      put<uint64_t>(out, done ? layout_.extents[i].checksum : 0);
      for (const int32_t t : layout_.extents[i].tensors) {
        put<uint64_t>(out, done ? tensor_checksums_[static_cast<size_t>(t)] : 0);
      }
    }
    put(out, packed::hash64(out));
    return out;
  }

  Status read_record() {
    std::error_code ec;
    if (!stdfs::exists(record_path_, ec)) return {};
    FIRN_ASSIGN(const std::string text, read_text_file(fs_, record_path_, kMaxRecordBytes));
    constexpr size_t kFixed = 8 + 16 + 8;
    if (text.size() < kFixed + 8 || text.compare(0, kRecordMagic.size(), kRecordMagic) != 0) return {};
    const auto number = [&](size_t at) {
      uint64_t value = 0;
      std::memcpy(&value, text.data() + at, sizeof(value));
      return value;
    };
    // A damaged record vouches for nothing: the work starts anew.
    if (number(text.size() - 8) != packed::hash64(std::string_view(text).substr(0, text.size() - 8))) return {};
    if (number(8) != plan_hash_.low64 || number(16) != plan_hash_.high64) {
      return invalid(
          fmt::format("{} was begun from another checkpoint or with other options; finish it with those, or remove {} "
                      "and {} to start anew",
                      partial_, partial_, record_path_));
    }
    if (number(24) != finished_.size() ||
        text.size() != kFixed + 8 * (2 * finished_.size() + layout_.tensors.size()) + 8) {
      return {};
    }
    size_t at = kFixed;
    for (size_t i = 0; i < finished_.size(); ++i, at += 16) {
      finished_[i] = number(at) == 1;
      layout_.extents[i].checksum = number(at + 8);
      for (const int32_t t : layout_.extents[i].tensors) {
        tensor_checksums_[static_cast<size_t>(t)] = number(at + 16);
        at += 8;
      }
    }
    return {};
  }

  // REQUIRES mutex_ (or no other thread).
  Status write_record() {
    if (n_finished_ == recorded_) return {};
    FIRN_TRY(file_->sync());
    const std::string record = encode_record();
    FIRN_TRY(write_file_atomically(fs_, record_path_, std::as_bytes(std::span(record))));
    recorded_ = n_finished_;
    unrecorded_bytes_ = 0;
    return {};
  }

  Status write_extents() {
    const auto left = static_cast<int64_t>(todo_.size());
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < std::min<int64_t>(plan_.n_threads, left); ++t) {
      try {
        threads.emplace_back([this] {
          unpin_this_thread();
          work();
        });
      } catch (const std::system_error&) {
        break;  // a process limit: the threads there are do the work
      }
    }
    work();
    for (std::thread& t : threads) t.join();
    if (error_.ok()) return {};
    // Whatever stopped the work, what is done is worth keeping; if this fails too, the last record still holds.
    (void)write_record();
    return error_;
  }

  void work() {
    const AlignedBytes buffer = packed::aligned_bytes(kStageBytes);
    if (!buffer) return fail(no_memory("no memory for a write buffer"));
    Stage stage(*file_, buffer.get());
    std::vector<uint8_t> row;
    while (!stop_.load()) {
      const size_t next = next_.fetch_add(1);
      if (next >= todo_.size()) return;
      const size_t i = todo_[next];
      Status status = write_extent(i, stage, row);
      if (status.ok()) status = extent_done(i, stage.checksum());
      if (!status.ok()) return fail(std::move(status));
    }
  }

  void fail(Status status) {
    stop_ = true;
    const std::lock_guard lock(mutex_);
    if (error_.ok()) error_ = std::move(status);
  }

  Status extent_done(size_t i, uint64_t checksum) {
    const std::lock_guard lock(mutex_);
    layout_.extents[i].checksum = checksum;
    finished_[i] = true;
    ++n_finished_;
    unrecorded_bytes_ += layout_.extents[i].bytes;
    return unrecorded_bytes_ >= plan_.record_bytes ? write_record() : Status();
  }

  Status check_cancel() const {
    if (stop_.load()) return cancelled("packing stopped");
    if (plan_.cancel != nullptr && plan_.cancel->load()) return cancelled("packing was cancelled");
    return {};
  }

  Status write_extent(size_t i, Stage& stage, std::vector<uint8_t>& row) {
    const int64_t offset = layout_.extents[i].offset, end = offset + layout_.extents[i].bytes;
    FIRN_TRY(check_cancel());
    stage.start(offset);
    if (i < layout_.content.size()) {
      FIRN_TRY(stage.append(layout_.content[i]->data(), static_cast<int64_t>(layout_.content[i]->size())));
    }
    int64_t reported = offset;
    for (const int32_t t : layout_.extents[i].tensors) {
      const Layout::Placed& placed = layout_.tensors[static_cast<size_t>(t)];
      FIRN_TRY(stage.zeros_to(placed.offset));
      packed::Hasher hash;
      for (int64_t begin = 0; begin < placed.rows && placed.row_bytes > 0;) {
        FIRN_TRY(check_cancel());
        const int64_t fit = stage.room() / placed.row_bytes;
        const int64_t n = std::min(placed.rows - begin, std::max<int64_t>(fit, 1)), bytes = n * placed.row_bytes;
        if (fit > 0) {
          FIRN_TRY(placed.tensor->fill(begin, n, reinterpret_cast<uint8_t*>(stage.place())));
          hash.add(stage.place(), static_cast<size_t>(bytes));
          FIRN_TRY(stage.advance(bytes));
        } else {
          row.resize(static_cast<size_t>(bytes));
          FIRN_TRY(placed.tensor->fill(begin, 1, row.data()));
          hash.add(row.data(), row.size());
          FIRN_TRY(stage.append(row.data(), bytes));
        }
        begin += n;
        report(stage.at() - reported);
        reported = stage.at();
      }
      tensor_checksums_[static_cast<size_t>(t)] = hash.value();
    }
    FIRN_TRY(stage.zeros_to(end));
    FIRN_TRY(stage.flush());
    report(end - reported);
    return {};
  }

  void report(int64_t bytes) {
    const std::lock_guard lock(progress_mutex_);
    written_bytes_ += bytes;
    const auto now = Clock::now();
    if (!plan_.progress || now - last_progress_ < kProgressEvery) return;
    last_progress_ = now;
    plan_.progress(written_bytes_, layout_.file_bytes());
  }

  Status write_aligned(int64_t offset, const std::string& bytes) {
    const AlignedBytes buffer = packed::aligned_bytes(static_cast<int64_t>(bytes.size()));
    if (!buffer) return no_memory("no memory for a write buffer");
    std::memcpy(buffer.get(), bytes.data(), bytes.size());
    return file_->write_at(offset, {buffer.get(), bytes.size()});
  }

  Status finish() {
    FIRN_TRY(check_cancel());
    FIRN_TRY(write_record());
    const std::string directory = encode_directory(plan_, layout_, tensor_checksums_);
    packed::Header header;
    header.file_bytes = static_cast<uint64_t>(layout_.file_bytes());
    header.directory_offset = static_cast<uint64_t>(layout_.directory_offset);
    header.directory_bytes = directory.size();
    header.directory_checksum = packed::hash64(directory);
    FIRN_ASSIGN(const Checkpoint checkpoint, parse_packed_directory(directory, layout_.directory_offset, plan_.out));
    model_hash_ = packed::content_hash(plan_.files.at("config.json"), checkpoint);
    header.model_hash = model_hash_;
    FIRN_CHECK(packed::parse_hex(plan_.identity, &header.identity));
    FIRN_TRY(write_aligned(layout_.directory_offset, directory));
    FIRN_TRY(file_->sync());
    FIRN_TRY(write_aligned(0, packed::encode_header(header)));
    FIRN_TRY(file_->sync());
    file_.reset();
    // Not commit_temporary(): it removes the file when the rename fails, and this one took hours.
    if (::rename(partial_.c_str(), plan_.out.c_str()) != 0) {
      return io_error(fmt::format("{}: putting the finished file in its place failed: {}", plan_.out,
                                  std::generic_category().message(errno)));
    }
    committed_ = true;
    FIRN_TRY(sync_folder(folder_of(plan_.out)));
    remove_quietly(record_path_);
    if (plan_.progress) plan_.progress(layout_.file_bytes(), layout_.file_bytes());
    return {};
  }

  FileSystem& fs_;
  const PackPlan& plan_;
  Layout layout_;
  const std::string partial_, record_path_;
  XXH128_hash_t plan_hash_{}, model_hash_{};
  Lock lock_;
  std::unique_ptr<File> file_;
  int64_t done_bytes_ = 0;    // of earlier runs
  std::vector<size_t> todo_;  // extents to write
  bool committed_ = false;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;            // guards the block below and the checksums of extents
  std::vector<bool> finished_;  // by extent
  size_t n_finished_ = 0;
  size_t recorded_ = 0;  // of these, in the record on disk
  int64_t unrecorded_bytes_ = 0;
  Status error_;
  std::vector<uint64_t> tensor_checksums_;  // each written by the thread that has its extent
  std::mutex progress_mutex_;               // guards the two below and calls of progress
  int64_t written_bytes_ = 0;
  Clock::time_point last_progress_;
};

}  // namespace

Result<PackStats> write_packed(FileSystem& fs, const PackPlan& plan) {
  XXH128_hash_t identity;
  if (!packed::parse_hex(plan.identity, &identity)) return invalid("a packed file needs its model's identity");
  if (!plan.files.contains("config.json")) return invalid("a packed file needs config.json");
  if (plan.out.empty() || plan.out.back() == '/') return invalid("the packed file needs a name");
  FIRN_ASSIGN(Layout layout, lay_out(plan));
  return Writer(fs, plan, std::move(layout)).run();
}

}  // namespace firn::storage
