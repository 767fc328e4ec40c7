// Implementation of block_codec.h.
#include "storage/block_codec.h"

#include <fmt/format.h>
#include <zstd.h>

#include <cstring>

namespace firn::storage {
namespace {

constexpr int kLevel = 1;
constexpr size_t kPage = 4096;

template <size_t kBytes>
void split(const std::byte* in, size_t elements, std::byte* planes) {
  for (size_t i = 0; i < elements; ++i) {
    for (size_t p = 0; p < kBytes; ++p) planes[p * elements + i] = in[i * kBytes + p];
  }
}

template <size_t kBytes>
void join(const std::byte* planes, size_t elements, std::byte* out) {
  for (size_t i = 0; i < elements; ++i) {
    for (size_t p = 0; p < kBytes; ++p) out[i * kBytes + p] = planes[p * elements + i];
  }
}

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage; }

}  // namespace

struct BlockCompressor::Context {
  ZSTD_CCtx* zstd = ZSTD_createCCtx();
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { ZSTD_freeCCtx(zstd); }
};

BlockCompressor::BlockCompressor(int element_bytes)
    : element_bytes_(element_bytes), context_(std::make_unique<Context>()) {
  FIRN_CHECK(element_bytes == 2 || element_bytes == 4, fmt::format("element size {}", element_bytes));
}

BlockCompressor::~BlockCompressor() = default;

std::span<const std::byte> BlockCompressor::compress(std::span<const std::byte> block) {
  if (context_->zstd == nullptr || pages(block.size()) < 2) return {};
  const auto size = static_cast<size_t>(element_bytes_);
  const size_t elements = block.size() / size;
  planes_.resize(block.size());
  if (size == 2) {
    split<2>(block.data(), elements, planes_.data());
  } else {
    split<4>(block.data(), elements, planes_.data());
  }
  const size_t whole = elements * size;
  std::memcpy(planes_.data() + whole, block.data() + whole, block.size() - whole);
  // No room for more than one page less than the block: zstd gives up early where it does not pay.
  stored_.resize((pages(block.size()) - 1) * kPage);
  stored_[0] = static_cast<std::byte>(size);
  const size_t n =
      ZSTD_compressCCtx(context_->zstd, stored_.data() + 1, stored_.size() - 1, planes_.data(), planes_.size(), kLevel);
  if (ZSTD_isError(n) != 0) return {};
  return std::span<const std::byte>(stored_).first(n + 1);
}

Status decompress_block(std::span<const std::byte> stored, std::span<std::byte> block) {
  const size_t size = stored.empty() ? 0 : static_cast<size_t>(stored[0]);
  if (size != 2 && size != 4) {
    return corrupt(fmt::format("compressed block: element size: expected 2 or 4, found {}", size));
  }
  const std::unique_ptr<std::byte[]> planes(new std::byte[block.size() + 1]);
  const size_t n = ZSTD_decompress(planes.get(), block.size(), stored.data() + 1, stored.size() - 1);
  if (ZSTD_isError(n) != 0) return corrupt(fmt::format("compressed block: zstd: {}", ZSTD_getErrorName(n)));
  if (n != block.size()) {
    return corrupt(fmt::format("compressed block: expected {} bytes, found {}", block.size(), n));
  }
  const size_t elements = block.size() / size;
  if (size == 2) {
    join<2>(planes.get(), elements, block.data());
  } else {
    join<4>(planes.get(), elements, block.data());
  }
  const size_t whole = elements * size;
  std::memcpy(block.data() + whole, planes.get() + whole, block.size() - whole);
  return {};
}

}  // namespace firn::storage
