#include "model/hidden_file.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace firn::model {

Result<std::unique_ptr<HiddenFile>> HiddenFile::open(storage::FileSystem& fs, const std::string& path, int64_t width,
                                                     const std::vector<Tile>& tiles) {
  FIRN_ASSIGN(auto file, fs.open(path, storage::OpenMode::kUpdate));
  std::unique_ptr<HiddenFile> hidden(new HiddenFile(std::move(file), width));
  for (const Tile& tile : tiles) hidden->tiles_[tile.row] = tile;
  return hidden;
}

Status HiddenFile::write(int64_t row, int64_t n, const float* values) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(values),
                                         static_cast<size_t>(n * width_) * sizeof(float));
  tiles_.erase(row);
  FIRN_TRY(file_->write_at(row * width_ * static_cast<int64_t>(sizeof(float)), bytes));
  tiles_[row] = {row, n, XXH3_64bits(bytes.data(), bytes.size())};
  bytes_written_ += static_cast<int64_t>(bytes.size());
  return {};
}

Status HiddenFile::read(int64_t row, int64_t n, float* values) const {
  const auto tile = tiles_.find(row);
  if (tile == tiles_.end() || tile->second.n != n) {
    return internal(fmt::format("{}: rows {} to {} were never written as one tile", path(), row, row + n));
  }
  const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(values),
                                   static_cast<size_t>(n * width_) * sizeof(float));
  FIRN_TRY(file_->read_at(row * width_ * static_cast<int64_t>(sizeof(float)), bytes));
  const uint64_t found = XXH3_64bits(bytes.data(), bytes.size());
  if (found != tile->second.checksum) {
    return corrupt(
        fmt::format("{}: hidden states of tokens {} to {}: expected checksum {:016x}, found {:016x}: the "
                    "file is damaged; the prompt has to be read again",
                    path(), row, row + n, tile->second.checksum, found));
  }
  return {};
}

Status HiddenFile::sync() { return durable_ ? file_->sync() : Status(); }

std::vector<HiddenFile::Tile> HiddenFile::tiles() const {
  std::vector<Tile> all;
  for (const auto& [row, tile] : tiles_) all.push_back(tile);
  return all;
}

}  // namespace firn::model
