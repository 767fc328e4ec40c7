// The engine options of cli.md, shared by every command that loads a model.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/engine.h"
#include "tools/cli.h"

namespace firn::tools {

struct EngineFlags {
  std::string model, device = "auto", ram, vram, kv_ram, kv_vram, expert_ram, kv_disk, prefetch = "auto",
                     kv_dtype = "bf16", trace, io = "auto", expert_policy = "frequency", session, share_dir;
  std::vector<std::string> kv_dir;
  int threads = 0;
  int64_t ctx = 0, wave = 0;
  bool precise = false, kv_compress = false, share_weights = false;
};

void add_engine_flags(CLI::App& app, EngineFlags* flags);

// Exit code 2 with a message when a flag's value is wrong or its feature is not in this version, else 0.
int check_engine_flags(const EngineFlags& flags);

// Loads the model with a progress bar; prints the first line to stderr. REQUIRES check_engine_flags() == 0.
// `before_load` may refuse the work once headers and tokenizer are read and before the weights are.
Result<std::unique_ptr<model::Engine>> open_engine(const EngineFlags& flags, const Globals& globals,
                                                   std::function<Status(const model::Engine&)> before_load = {});

}  // namespace firn::tools
