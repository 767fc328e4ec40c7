// The codec of stored blocks: zstd after a byte-plane split.
//
// A block of elements of 2 or 4 bytes is split into planes (all first bytes, all second bytes, ...), so that sign and
// exponent, which repeat, do not alternate with mantissas, which do not. What does not fill an element follows the
// planes as it is. The stored form is one byte with the element size and one zstd frame (level 1) of the planes.
//
// Compressing keeps a context between calls, so one thread at a time uses a BlockCompressor; decompress_block may be
// called from any thread. Stored bytes are not trusted: what does not decompress to exactly the expected size is
// kCorrupt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/status.h"

namespace firn::storage {

class BlockCompressor {
 public:
  explicit BlockCompressor(int element_bytes);  // 2 or 4; FIRN_CHECK
  ~BlockCompressor();
  // The stored form, valid until the next call; empty where it does not save at least one page of 4096 bytes.
  std::span<const std::byte> compress(std::span<const std::byte> block);

 private:
  struct Context;
  const int element_bytes_;
  std::unique_ptr<Context> context_;
  std::vector<std::byte> planes_, stored_;
};

Status decompress_block(std::span<const std::byte> stored, std::span<std::byte> block);

}  // namespace firn::storage
