// Fuzzes the safetensors header parser: whatever it accepts must be consistent, and whatever it refuses, said shortly.
//
// Input: one byte that chooses how long the data after the header claims to be, then the header's JSON text.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

#include "storage/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using firn::storage::TensorInfo;
  if (size == 0) return 0;
  // Small lengths exactly, the others spread up to 2^62: offsets near every border can be reached.
  const int64_t data_bytes = data[0] < 192 ? data[0] : int64_t{1} << (data[0] - 192);
  const std::string_view json(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::map<std::string, std::string> metadata;
  const auto header = firn::storage::parse_safetensors_header(json, data_bytes, "fuzz", &metadata);
  if (!header.ok()) {
    FIRN_CHECK(!header.status().message().empty() && header.status().message().size() < 2000);
    return 0;
  }
  // The tensors tile the data: each lies inside it and their lengths add up to it.
  int64_t total = 0;
  for (const TensorInfo& tensor : *header) {
    FIRN_CHECK(tensor.file_offset >= 0 && tensor.bytes >= 0);
    FIRN_CHECK(tensor.file_offset <= data_bytes && tensor.bytes <= data_bytes - tensor.file_offset);
    FIRN_CHECK(tensor.elements() * static_cast<int64_t>(firn::dtype_bytes(tensor.dtype)) == tensor.bytes);
    FIRN_CHECK(!tensor.shape_text().empty());
    total += tensor.bytes;
  }
  FIRN_CHECK(total == data_bytes);
  return 0;
}
