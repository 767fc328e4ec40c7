// zstd over byte planes, for cold blocks.
//
// The bytes of equal significance are put together first: exponents of K and V repeat and compress, mantissas do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/status.h"

namespace firn::storage {

// Compresses `in` (elements of element_bytes each; a rest is kept as it is). Empty when it would not get smaller.
std::vector<std::byte> compress_block(std::span<const std::byte> in, int element_bytes);
// Fills `out` exactly or says why not.
Status decompress_block(std::span<const std::byte> in, int element_bytes, std::span<std::byte> out);

}  // namespace firn::storage
