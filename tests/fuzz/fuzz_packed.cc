// Fuzzes the directory of packed model files: whatever is accepted must be consistent, and whatever is refused, said
// shortly.
//
// Input: one byte with the pages between header and directory, then the directory.
#include <cstdint>
#include <string>
#include <string_view>

#include "storage/packed_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int64_t data_end = (int64_t{data[0]} + 1) * 4096;
  const std::string_view directory(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto parsed = firn::storage::parse_packed_directory(directory, data_end, "fuzz");
  if (!parsed.ok()) {
    FIRN_CHECK(!parsed.status().message().empty() && parsed.status().message().size() < 2000);
    return 0;
  }
  int64_t at = 4096;
  size_t tensors = 0;
  for (const firn::storage::Extent& extent : parsed->extents) {
    FIRN_CHECK(extent.offset == at && extent.bytes > 0);
    at += extent.bytes;
    int64_t inside = extent.offset;
    for (const int32_t i : extent.tensors) {
      const firn::storage::TensorInfo& t = parsed->tensors.at(static_cast<size_t>(i));
      FIRN_CHECK(t.file_offset >= inside && t.bytes >= 0);
      FIRN_CHECK(t.bytes == t.elements() * static_cast<int64_t>(firn::dtype_bytes(t.dtype)));
      inside = t.file_offset + t.bytes;
      FIRN_CHECK(inside <= at);
      ++tensors;
    }
  }
  FIRN_CHECK(at == data_end && tensors == parsed->tensors.size());
  for (const auto& [name, file] : parsed->files) FIRN_CHECK(!name.empty() && file.offset + file.bytes <= data_end);
  return 0;
}
