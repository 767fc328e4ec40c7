// Hidden states of a wave on disk: one file of rows of H floats, written and read in order, tile by tile.
//
// Each write() keeps a checksum of its rows; read() asks for the same ranges and checks them. checksums() go into the
// commit that makes the file part of a session; with them a file can be opened again by another process.
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/status.h"
#include "storage/file.h"

namespace firn::model {

class HiddenFile {
 public:
  struct Tile {
    int64_t row = 0, n = 0;
    uint64_t checksum = 0;  // XXH3-64 of its bytes
  };

  // A new file, or an old one whose tiles are known. `width`: values a row.
  static Result<std::unique_ptr<HiddenFile>> open(storage::FileSystem& fs, const std::string& path, int64_t width,
                                                  const std::vector<Tile>& tiles = {});
  Status write(int64_t row, int64_t n, const float* values);
  Status read(int64_t row, int64_t n, float* values) const;
  Status sync();
  std::vector<Tile> tiles() const;  // ascending
  const std::string& path() const { return file_->path(); }
  int64_t bytes_written() const { return bytes_written_; }
  // Scratch files need not survive the machine.
  void set_durable(bool durable) { durable_ = durable; }

 private:
  HiddenFile(std::unique_ptr<storage::File> file, int64_t width) : file_(std::move(file)), width_(width) {}
  std::unique_ptr<storage::File> file_;
  const int64_t width_;
  std::map<int64_t, Tile> tiles_;  // by first row
  int64_t bytes_written_ = 0;
  bool durable_ = true;
};

}  // namespace firn::model
