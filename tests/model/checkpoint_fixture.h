// Small checkpoints held in memory, so that tests can take a tensor out, damage it or rename it and write the rest.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "storage/file.h"
#include "storage/safetensors.h"
#include "tests/support/temp_folder.h"

namespace firn::test {

struct HeldTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

struct HeldCheckpoint {
  std::map<std::string, HeldTensor> tensors;
  nlohmann::json config;

  static HeldCheckpoint read(const std::string& folder) {
    HeldCheckpoint held;
    auto& fs = storage::FileSystem::real();
    auto checkpoint = storage::Checkpoint::open(fs, folder);
    FIRN_CHECK(checkpoint.ok(), checkpoint.status().message());
    for (const storage::TensorInfo& t : checkpoint->tensors) {
      auto file = fs.open(checkpoint->shards[static_cast<size_t>(t.shard)].path, storage::OpenMode::kRead);
      FIRN_CHECK(file.ok(), file.status().message());
      HeldTensor& tensor = held.tensors[t.name];
      tensor = {t.dtype, t.shape, std::vector<uint8_t>(static_cast<size_t>(t.bytes))};
      const Status status = (*file)->read_at(t.file_offset, std::as_writable_bytes(std::span(tensor.bytes)));
      FIRN_CHECK(status.ok(), status.message());
    }
    held.config = nlohmann::json::parse(get_file(folder + "/config.json"));
    return held;
  }

  HeldTensor& at(const std::string& name) {
    FIRN_CHECK(tensors.count(name) == 1, "no tensor " + name);
    return tensors[name];
  }
  void rename(const std::string& from, const std::string& to) {
    FIRN_CHECK(tensors.count(from) == 1, "no tensor " + from);
    tensors[to] = std::move(tensors[from]);
    tensors.erase(from);
  }
  void remove(const std::string& name) { FIRN_CHECK(tensors.erase(name) == 1, "no tensor " + name); }

  void write(const std::string& folder) const {
    std::filesystem::create_directories(folder);
    std::vector<storage::SafetensorsWriter::Declared> declared;
    for (const auto& [name, t] : tensors) declared.push_back({name, t.dtype, t.shape});
    auto writer = storage::SafetensorsWriter::create(folder + "/model.safetensors", declared);
    FIRN_CHECK(writer.ok(), writer.status().message());
    for (const auto& [name, t] : tensors) {
      const Status status = writer->append(t.bytes.data(), static_cast<int64_t>(t.bytes.size()));
      FIRN_CHECK(status.ok(), status.message());
    }
    const Status status = writer->finish();
    FIRN_CHECK(status.ok(), status.message());
    put_file(folder + "/config.json", config.dump());
  }
};

}  // namespace firn::test
