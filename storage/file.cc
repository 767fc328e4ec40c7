// Files over pread and pwrite: loops, refusals and messages. See file.h for the contract.
//
// A file opened with kReadDirect holds two descriptors: O_DIRECT for read_some_at, whose arguments are aligned, and a
// buffered one for read_at, whose arguments are not. Whether O_DIRECT works is found out by reading one block, because
// some file systems accept the flag at open and refuse the first read.
#include "storage/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

namespace firn::storage {
namespace {

constexpr int64_t kMaxCallBytes = int64_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB in one call
constexpr int64_t kProbeAlignment = 4096;            // assumed where the kernel does not tell

std::string error_text(int error) { return std::generic_category().message(error); }

Status errno_status(int error, const std::string& path, const std::string& action) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return not_found(fmt::format("{}: no such file (while {})", path, action));
    case EACCES:
    case EPERM:
      return io_error(fmt::format(
          "{}: permission denied while {}: check the owner and mode of the file and its folders", path, action));
    case ENOSPC:
    case EDQUOT:
      return io_error(
          fmt::format("{}: no space left while {}: free some space or choose another folder", path, action));
    case EROFS:
      return io_error(fmt::format("{}: the file system is read-only (while {})", path, action));
    case EMFILE:
    case ENFILE:
      return io_error(fmt::format("{}: too many open files while {}: raise the limit (ulimit -n)", path, action));
    default:
      return io_error(fmt::format("{}: {} failed: {}", path, action, error_text(error)));
  }
}

const char* kind_name(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO (named pipe)";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISCHR(mode)) return "a character device";
  return "not a regular file";
}

Status refuse_kind(const std::string& path, mode_t mode) {
  if (S_ISREG(mode)) return {};
  return invalid(fmt::format("{}: expected a regular file, found {}", path, kind_name(mode)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

int open_retrying(const std::string& path, int flags, mode_t mode) {
  for (;;) {
    // O_NONBLOCK has no effect on regular files; it keeps the open from hanging if a FIFO takes the name meanwhile.
    const int fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode);
    if (fd >= 0 || errno != EINTR) return fd;
  }
}

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};

struct DirectProbe {
  Descriptor fd;
  int64_t alignment = 0;  // 0: refused, and `refusal` says why
  std::string refusal;
};

// The alignment direct I/O on this file needs as the kernel tells it; 0 if it says there is none, -1 if it does not
// say.
int64_t told_alignment([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    return std::max<int64_t>(info.stx_dio_mem_align, info.stx_dio_offset_align);
  }
#endif
  return -1;
}

DirectProbe probe_direct(const std::string& path, int access) {
  DirectProbe probe;
  Descriptor fd(open_retrying(path, access | O_DIRECT, 0));
  if (!fd.valid()) {
    probe.refusal = fmt::format("the file system refuses O_DIRECT ({})", error_text(errno));
    return probe;
  }
  int64_t alignment = told_alignment(fd.get());
  if (alignment == 0) {
    probe.refusal = "the kernel reports no direct I/O for this file";
    return probe;
  }
  if (alignment < 0) alignment = kProbeAlignment;
  // Never below a page: smaller reads save nothing, and buffers are allocated in pages anyway.
  alignment = std::max(alignment, kProbeAlignment);
  if (!std::has_single_bit(static_cast<uint64_t>(alignment)) || alignment > (int64_t{1} << 24)) {
    probe.refusal = fmt::format("the kernel asks for an alignment of {} bytes", alignment);
    return probe;
  }
  std::unique_ptr<void, AlignedFree> block(
      std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(alignment)));
  ssize_t n = -1;
  if (block) {
    do {
      n = ::pread(fd.get(), block.get(), static_cast<size_t>(alignment), 0);
    } while (n < 0 && errno == EINTR);
  }
  if (n < 0) {
    probe.refusal = fmt::format("a direct read of {} bytes failed ({})", alignment, error_text(block ? errno : ENOMEM));
    return probe;
  }
  probe.fd = std::move(fd);
  probe.alignment = alignment;
  return probe;
}

class PosixFile : public File {
 public:
  PosixFile(std::string path, Descriptor fd, DirectProbe direct, bool writable)
      : path_(std::move(path)), fd_(std::move(fd)), direct_(std::move(direct)), writable_direct_(writable) {}

  const std::string& path() const override { return path_; }
  int64_t direct_alignment() const override { return direct_.alignment; }
  std::string direct_refusal() const override { return direct_.refusal; }
  int descriptor() const override { return direct_.alignment > 0 ? direct_.fd.get() : fd_.get(); }

  Result<int64_t> size() const override {
    struct stat info {};
    if (::fstat(fd_.get(), &info) != 0) return errno_status(errno, path_, "asking for its size");
    return static_cast<int64_t>(info.st_size);
  }

  Status read_at(int64_t offset, std::span<std::byte> out) const override {
    return read_exactly(path_, offset, out,
                        [this](int64_t at, std::span<std::byte> rest) { return read_once(fd_.get(), at, rest); });
  }

  Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const override {
    if (direct_.alignment > 0) {
      const auto mask = static_cast<uint64_t>(direct_.alignment - 1);
      FIRN_CHECK(((static_cast<uint64_t>(offset) | out.size() | reinterpret_cast<uintptr_t>(out.data())) & mask) == 0,
                 fmt::format("{}: direct read of {} bytes at {} is not aligned to {}", path_, out.size(), offset,
                             direct_.alignment));
      return read_once(direct_.fd.get(), offset, out);
    }
    return read_once(fd_.get(), offset, out);
  }

  Status write_at(int64_t offset, std::span<const std::byte> in) override {
    size_t done = 0;
    const auto mask = static_cast<uint64_t>(direct_.alignment - 1);
    bool direct = direct_.alignment > 0 && writable_direct_ &&
                  ((static_cast<uint64_t>(offset) | in.size() | reinterpret_cast<uintptr_t>(in.data())) & mask) == 0;
    while (done < in.size()) {
      const size_t want = std::min<size_t>(in.size() - done, kMaxCallBytes);
      const int fd = direct ? direct_.fd.get() : fd_.get();
      const ssize_t n = ::pwrite(fd, in.data() + done, want, offset + static_cast<int64_t>(done));
      if (direct && (n < 0 ? errno == EINVAL : (static_cast<uint64_t>(n) & mask) != 0)) {
        direct = false;  // the rest is not aligned any more, or the file system changed its mind
        if (n < 0) continue;
      }
      if (n < 0 && errno == EINTR) continue;
      // A write of 0 bytes without an error is not defined for regular files; it must not become an endless loop.
      if (n <= 0) {
        return errno_status(n < 0 ? errno : EIO, path_,
                            fmt::format("writing {} bytes at offset {} ({} written)", in.size(), offset, done));
      }
      done += static_cast<size_t>(n);
    }
    return {};
  }

  Status resize(int64_t bytes) override {
    int rc = 0;
    do {
      rc = ::ftruncate(fd_.get(), bytes);
    } while (rc != 0 && errno == EINTR);
    return rc == 0 ? Status() : errno_status(errno, path_, fmt::format("setting its length to {} bytes", bytes));
  }

  Status sync() override {
    int rc = 0;
    do {
      rc = ::fsync(fd_.get());
    } while (rc != 0 && errno == EINTR);
    return rc == 0 ? Status() : errno_status(errno, path_, "syncing to disk");
  }

 private:
  Result<int64_t> read_once(int fd, int64_t offset, std::span<std::byte> out) const {
    if (offset < 0) return invalid(fmt::format("{}: read at negative offset {}", path_, offset));
    const size_t want = std::min<size_t>(out.size(), kMaxCallBytes);
    for (;;) {
      const ssize_t n = ::pread(fd, out.data(), want, offset);
      if (n >= 0) return static_cast<int64_t>(n);
      if (errno != EINTR) {
        return errno_status(errno, path_, fmt::format("reading {} bytes at offset {}", want, offset));
      }
    }
  }

  std::string path_;
  Descriptor fd_;
  DirectProbe direct_;
  const bool writable_direct_;  // direct_.fd may be written to
};

class RealFileSystem : public FileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) override { return open_file(path, mode); }
};

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Status File::resize(int64_t bytes) {
  return unsupported(fmt::format("{}: this kind of file cannot be set to {} bytes", path(), bytes));
}

Status read_exactly(const std::string& path, int64_t offset, std::span<std::byte> out,
                    const std::function<Result<int64_t>(int64_t, std::span<std::byte>)>& some) {
  if (offset < 0 || static_cast<uint64_t>(std::numeric_limits<int64_t>::max() - offset) < out.size()) {
    return invalid(fmt::format("{}: a read of {} bytes at offset {} is outside any file", path, out.size(), offset));
  }
  size_t done = 0;
  while (done < out.size()) {
    FIRN_ASSIGN(const int64_t n, some(offset + static_cast<int64_t>(done), out.subspan(done)));
    if (n <= 0) {
      return corrupt(fmt::format(
          "{}: unexpected end of file: expected {} bytes at offset {}, found {}; the file is truncated, fetch it again",
          path, out.size(), offset, done));
    }
    done += static_cast<size_t>(n);
  }
  return {};
}

Result<std::unique_ptr<File>> open_file(const std::string& path, OpenMode mode) {
  const bool update = mode == OpenMode::kUpdate;
  const bool create = mode == OpenMode::kCreate || update;
  if (path.empty()) return invalid("an empty file name");
  if (path.find('\0') != std::string::npos) return invalid("a file name with a zero byte in it");
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    FIRN_TRY(refuse_kind(path, info.st_mode));
  } else if (errno == ENOENT && ::lstat(path.c_str(), &info) == 0) {
    return not_found(fmt::format("{}: a symbolic link to a file that does not exist", path));
  } else if (!(create && errno == ENOENT)) {
    return errno_status(errno, path, create ? "creating it" : "opening it");
  }
  Descriptor fd(open_retrying(path, create ? O_RDWR | O_CREAT | (update ? 0 : O_TRUNC) : O_RDONLY, 0644));
  if (!fd.valid()) {
    // For a new file ENOENT is about the folder.
    if (create && errno == ENOENT) {
      return not_found(fmt::format("{}: its folder {} does not exist: create it first", path, folder_of(path)));
    }
    return errno_status(errno, path, create ? "creating it" : "opening it");
  }
  if (::fstat(fd.get(), &info) != 0) return errno_status(errno, path, "asking what it is");
  FIRN_TRY(refuse_kind(path, info.st_mode));
  DirectProbe direct;
  if (mode == OpenMode::kReadDirect || update) direct = probe_direct(path, update ? O_RDWR : O_RDONLY);
  return std::unique_ptr<File>(std::make_unique<PosixFile>(path, std::move(fd), std::move(direct), update));
}

Status FileSystem::make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) == 0) return {};
  if (errno == ENOENT) {
    return not_found(fmt::format("{}: its folder {} does not exist: create it first", path, folder_of(path)));
  }
  return errno_status(errno, path, "creating the folder");
}

Result<std::vector<std::string>> FileSystem::list_folder(const std::string& path) {
  struct Close {
    void operator()(DIR* d) const { ::closedir(d); }
  };
  const std::unique_ptr<DIR, Close> dir(::opendir(path.c_str()));
  if (!dir) return errno_status(errno, path, "opening the folder");
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) return errno_status(errno, path, "listing the folder");
  std::sort(names.begin(), names.end());
  return names;
}

Status FileSystem::remove(const std::string& path) {
  return ::unlink(path.c_str()) == 0 ? Status() : errno_status(errno, path, "removing it");
}

Status FileSystem::remove_folder(const std::string& path) {
  return ::rmdir(path.c_str()) == 0 ? Status() : errno_status(errno, path, "removing the folder");
}

Result<bool> FileSystem::exists(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return errno_status(errno, path, "looking for it");
}

Result<int64_t> FileSystem::free_bytes(const std::string& path) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return errno_status(errno, path, "asking for free space");
  return static_cast<int64_t>(info.f_bavail * info.f_frsize);
}

Status FileSystem::sync_folder(const std::string& path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return errno_status(errno, path, "opening the folder to sync it");
  // Some file systems cannot sync a folder and say EINVAL.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) return errno_status(errno, path, "syncing the folder");
  return {};
}

FileSystem& FileSystem::real() {
  static RealFileSystem stateless;
  return stateless;
}

Result<std::string> read_text_file(FileSystem& fs, const std::string& path, int64_t max_bytes) {
  FIRN_ASSIGN(auto file, fs.open(path, OpenMode::kRead));
  FIRN_ASSIGN(const int64_t bytes, file->size());
  if (bytes > max_bytes) {
    return invalid(fmt::format("{}: {} bytes, expected at most {}: is this the right file?", path, bytes, max_bytes));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  FIRN_TRY(file->read_at(0, std::as_writable_bytes(std::span(text))));
  return text;
}

std::string temporary_name(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  return fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter.fetch_add(1));
}

void remove_quietly(const std::string& path) { ::unlink(path.c_str()); }

Status commit_temporary(const std::string& temporary, const std::string& path) {
  // A rename would replace a device such as /dev/null by a regular file.
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    remove_quietly(temporary);
    return refuse_kind(path, info.st_mode);
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    remove_quietly(temporary);
    return errno_status(error, path, "putting the finished file in its place");
  }
  return FileSystem::real().sync_folder(folder_of(path));
}

Status write_file_atomically(FileSystem& fs, const std::string& path, std::span<const std::byte> content) {
  const std::string temporary = temporary_name(path);
  Status status;
  {
    auto file = fs.open(temporary, OpenMode::kCreate);
    if (!file.ok()) return file.status();
    status = (*file)->write_at(0, content);
    if (status.ok()) status = (*file)->sync();
  }
  if (!status.ok()) {
    remove_quietly(temporary);
    return status;
  }
  return commit_temporary(temporary, path);
}

Status write_file_atomically(const std::string& path, std::span<const std::byte> content) {
  return write_file_atomically(FileSystem::real(), path, content);
}

}  // namespace firn::storage
