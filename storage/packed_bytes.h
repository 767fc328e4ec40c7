// What reading and writing packed files share: the bytes of header and directory, and hashes. Internal to storage/.
#pragma once

#include <xxhash.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/dtype.h"
#include "storage/packed_file.h"

namespace firn::storage::packed {

static_assert(std::endian::native == std::endian::little, "numbers are stored as they lie in memory");

inline constexpr std::string_view kMagic = "FIRNPACK";
inline constexpr uint32_t kVersion = 1;
inline constexpr int64_t kHeaderBytes = 4096;
inline constexpr int64_t kHeaderChecksumAt = kHeaderBytes - 8;
inline constexpr int64_t kMaxDirectoryBytes = int64_t{1} << 30;

struct Header {
  uint64_t file_bytes = 0;
  uint64_t directory_offset = 0;
  uint64_t directory_bytes = 0;
  uint64_t directory_checksum = 0;
  XXH128_hash_t model_hash = {};
  XXH128_hash_t identity = {};
};

inline int64_t align_up(int64_t value, int64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

inline uint64_t hash64(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string hex(XXH128_hash_t hash);
bool parse_hex(std::string_view text, XXH128_hash_t* hash);

// The page at offset 0.
std::string encode_header(const Header& header);

// XXH3 over pieces.
class Hasher {
 public:
  Hasher() : state_(XXH3_createState(), &XXH3_freeState) {
    FIRN_CHECK(state_ != nullptr, "no memory for a hash");
    XXH3_64bits_reset(state_.get());
  }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  void zeros(int64_t bytes);
  uint64_t value() const { return XXH3_64bits_digest(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

class Hasher128 {
 public:
  Hasher128() : state_(XXH3_createState(), &XXH3_freeState) {
    FIRN_CHECK(state_ != nullptr, "no memory for a hash");
    XXH3_128bits_reset(state_.get());
  }
  void add(const void* data, size_t bytes) { XXH3_128bits_update(state_.get(), data, bytes); }
  template <typename T>
  void number(T value) {
    add(&value, sizeof(value));
  }
  // With its length in front, so that neighbours cannot run into each other.
  void text(std::string_view value) {
    number<uint64_t>(value.size());
    add(value.data(), value.size());
  }
  void tensor(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    text(name);
    text(dtype_name(dtype));
    number<uint64_t>(shape.size());
    for (const int64_t d : shape) number(d);
  }
  XXH128_hash_t value() const { return XXH3_128bits_digest(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

// Over config.json's text and every tensor; `checkpoint` has tensors and their checksums.
XXH128_hash_t content_hash(std::string_view config, const Checkpoint& checkpoint);

struct AlignedDelete {
  void operator()(std::byte* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;
inline AlignedBytes aligned_bytes(int64_t bytes) {
  return AlignedBytes(
      static_cast<std::byte*>(std::aligned_alloc(static_cast<size_t>(kPackedAlignment), static_cast<size_t>(bytes))));
}

}  // namespace firn::storage::packed
