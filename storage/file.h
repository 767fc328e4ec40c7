// Files as firn reads and writes them: positioned, whole, checked.
//
// Contract: read_at fills exactly the bytes asked for or returns an error that names the file, offset, expected and
// found; short reads are continued, EINTR retried. No method asserts the outside world. Read methods are thread-safe.
// FaultyFile (storage/faulty_file.h) wraps any File and breaks it on purpose, for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/status.h"

namespace firn::storage {

class File {
 public:
  virtual ~File() = default;
  virtual const std::string& path() const = 0;
  virtual Result<int64_t> size() const = 0;
  virtual Status read_at(int64_t offset, std::span<std::byte> out) const = 0;
  // Offset, length and address must be multiples of direct_alignment() when it is > 0; returns the bytes read, fewer
  // than asked only at end of file. With direct_alignment() == 0 any values do.
  virtual Result<int64_t> read_some_at(int64_t offset, std::span<std::byte> out) const = 0;
  virtual int64_t direct_alignment() const = 0;  // 0: buffered
  // Why a file asked for with kReadDirect is buffered after all, in words; empty otherwise.
  virtual std::string direct_refusal() const { return {}; }
  // The descriptor that read_some_at reads from, for queues of the kernel's own; -1 where reads must go through this
  // object (a FaultyFile).
  virtual int descriptor() const { return -1; }
  virtual Status write_at(int64_t offset, std::span<const std::byte> in) = 0;
  // Sets the length; new bytes are a hole that reads as zero.
  virtual Status resize(int64_t bytes);
  virtual Status sync() = 0;
};

// The loop behind read_at: calls some(offset, rest) until `out` is full; a read of 0 bytes is an unexpected end of
// file.
Status read_exactly(const std::string& path, int64_t offset, std::span<std::byte> out,
                    const std::function<Result<int64_t>(int64_t, std::span<std::byte>)>& some);

// kReadDirect falls back to buffered; ask the alignment. kCreate: a new file, or an old one emptied. kUpdate: a file
// that is there or is made, its content kept; reads as kReadDirect, and writes that are aligned go past the page cache
// too.
enum class OpenMode : uint8_t { kRead, kReadDirect, kCreate, kUpdate };

// Refuses directories, FIFOs, sockets and devices by name before opening them (a FIFO would block).
Result<std::unique_ptr<File>> open_file(const std::string& path, OpenMode mode);

// How code that is tested under faults opens its files.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual Result<std::unique_ptr<File>> open(const std::string& path, OpenMode mode) = 0;
  // Folders. make_folder: its parent must exist, itself may. list_folder: names, sorted, without . and ..
  virtual Status make_folder(const std::string& path);
  virtual Result<std::vector<std::string>> list_folder(const std::string& path);
  virtual Status remove_file(const std::string& path);
  virtual Status remove_folder(const std::string& path);        // must be empty
  virtual Status sync_folder(const std::string& path);          // makes new and removed names durable
  virtual Result<int64_t> free_bytes(const std::string& path);  // for us on the file system of an existing path
  static FileSystem& real();                                    // stateless
};

// The whole of a regular file (at most max_bytes, so that a mistaken path cannot fill memory).
Result<std::string> read_text_file(FileSystem& fs, const std::string& path, int64_t max_bytes);

// Writes to `path`.tmp-PID-N, syncs, renames over `path`, syncs the folder: old content or new, never a mixture. The
// temporary file is removed when anything fails.
Status write_file_atomically(const std::string& path, std::span<const std::byte> content);
Status write_file_atomically(FileSystem& fs, const std::string& path, std::span<const std::byte> content);

// The two halves of that, for files written in pieces: a name nobody else uses beside `path`, and the rename with its
// folder sync. A failed commit removes the temporary file.
std::string temporary_name(const std::string& path);
Status commit_temporary(const std::string& temporary, const std::string& path);
void remove_quietly(const std::string& path);

}  // namespace firn::storage
