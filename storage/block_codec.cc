#include "storage/block_codec.h"

#include <fmt/format.h>
#include <zstd.h>

#include <cstring>

namespace firn::storage {
namespace {

constexpr int kLevel = 1;

void split(std::span<const std::byte> in, size_t width, std::byte* out) {
  const size_t n = in.size() / width;
  for (size_t plane = 0; plane < width; ++plane) {
    for (size_t i = 0; i < n; ++i) out[plane * n + i] = in[i * width + plane];
  }
  if (n * width < in.size()) std::memcpy(out + n * width, in.data() + n * width, in.size() - n * width);
}

void join(const std::byte* in, size_t width, std::span<std::byte> out) {
  const size_t n = out.size() / width;
  for (size_t plane = 0; plane < width; ++plane) {
    for (size_t i = 0; i < n; ++i) out[i * width + plane] = in[plane * n + i];
  }
  if (n * width < out.size()) std::memcpy(out.data() + n * width, in + n * width, out.size() - n * width);
}

}  // namespace

std::vector<std::byte> compress_block(std::span<const std::byte> in, int element_bytes) {
  std::vector<std::byte> planes(in.size());
  split(in, static_cast<size_t>(element_bytes), planes.data());
  std::vector<std::byte> out(ZSTD_compressBound(in.size()));
  const size_t n = ZSTD_compress(out.data(), out.size(), planes.data(), planes.size(), kLevel);
  if (ZSTD_isError(n) != 0 || n >= in.size()) return {};
  out.resize(n);
  return out;
}

Status decompress_block(std::span<const std::byte> in, int element_bytes, std::span<std::byte> out) {
  std::vector<std::byte> planes(out.size());
  const size_t n = ZSTD_decompress(planes.data(), planes.size(), in.data(), in.size());
  if (ZSTD_isError(n) != 0) return corrupt(fmt::format("a compressed block cannot be read: {}", ZSTD_getErrorName(n)));
  if (n != out.size()) {
    return corrupt(fmt::format("a compressed block: expected {} bytes, found {}", out.size(), n));
  }
  join(planes.data(), static_cast<size_t>(element_bytes), out);
  return {};
}

}  // namespace firn::storage
