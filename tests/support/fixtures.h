// Loading of fixtures and a small model around them, for tests of the forward pass.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_ops.h"
#include "model/engine.h"
#include "storage/safetensors.h"

namespace firn::test {

inline std::string data_path(const std::string& relative) {
  return std::string(FIRN_TEST_DATA) + "/fixtures/" + relative;
}
inline std::string nano_path(const std::string& relative) { return std::string(FIRN_NANO) + "/" + relative; }

// Aborts the test program with the message when a fixture is broken: nothing after it would mean anything.
template <typename T>
T must(Result<T> result) {
  FIRN_CHECK(result.ok(), result.status().message());
  return std::move(result).value();
}
inline void must(Status status) { FIRN_CHECK(status.ok(), status.message()); }

// One tensor of a golden file as a vector of T (CHECKs the byte count).
template <typename T>
std::vector<T> tensor(const storage::SafetensorsFile& file, const std::string& name) {
  const storage::TensorInfo* info = file.find(name);
  FIRN_CHECK(info != nullptr, "no tensor " + name);
  FIRN_CHECK(info->bytes == info->elements() * static_cast<int64_t>(sizeof(T)), "type of " + name);
  std::vector<T> out(info->elements());
  std::memcpy(out.data(), file.data(name), info->bytes);
  return out;
}

struct ModelOptions {
  bool precise = true;
  int threads = 2;
  int64_t wave = 0;
  int64_t ram_bytes = -1;
  std::string isa;  // "" = the best
  // Tiers: as model::EngineOptions.
  int64_t expert_ram = -1, kv_ram = -1;
  std::string kv_dir;
  bool prefetch_experts = true, prefetch_kv = true, io_uring = true, compress = false, sessions = false;
  bool hidden_on_disk = false;
  std::string expert_policy = "frequency";
  storage::FileSystem* fs = &storage::FileSystem::real();
};

inline model::EngineOptions engine_options(const std::string& path, const ModelOptions& m);

// Context that memory is planned for where a test limits KV: it decides whether anything is far.
inline constexpr int64_t kPlanned = 20000;

inline model::EngineOptions engine_options(const std::string& path, const ModelOptions& m) {
  model::EngineOptions options;
  options.model = path;
  options.threads = m.threads;
  options.precise = m.precise;
  options.wave_tokens = m.wave;
  options.ram_bytes = m.ram_bytes;
  options.isa = must(cpu::choose_isa());
  for (cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    if (m.isa == cpu::isa_name(isa)) options.isa = isa;
  }
  options.expert_ram_bytes = m.expert_ram;
  options.kv_ram_bytes = m.kv_ram;
  if (!m.kv_dir.empty()) options.kv_dirs = {m.kv_dir};
  options.prefetch_experts = m.prefetch_experts;
  options.prefetch_kv = m.prefetch_kv;
  options.always_guess = true;
  options.io_uring = m.io_uring;
  options.kv_compress = m.compress;
  options.sessions = m.sessions;
  options.expert_policy = m.expert_policy;
  if (m.hidden_on_disk) options.hidden_on_disk = true;
  if (m.kv_ram >= 0 || m.sessions) {
    options.before_load = [](const model::Engine& engine) { return engine.check_fits(kPlanned, kPlanned); };
  }
  return options;
}

inline std::unique_ptr<model::Engine> open_model(const std::string& path, const ModelOptions& m = {}) {
  return must(model::Engine::open(*m.fs, engine_options(path, m)));
}

inline void feed(model::Session& session, std::span<const int32_t> ids, model::Capture capture = {}) {
  must(session.begin(ids, capture));
  while (!session.idle()) must(session.step());
}

}  // namespace firn::test
