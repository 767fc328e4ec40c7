#include "tools/engine_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>

#include "gpu/gpu.h"
#include "runtime/progress.h"
#include "runtime/topology.h"
#include "runtime/units.h"

namespace firn::tools {

namespace {

constexpr const char* kLater = "Known, but refused by this version";

// Shows `name` for the value in the help, and only that. A check's own words still stand in its error.
CLI::Option* typed(CLI::Option* option, const char* name, const char* group = nullptr) {
  if (group != nullptr) option->group(group);
  return option->option_text(name);
}

}  // namespace

void add_engine_flags(CLI::App& app, EngineFlags* f) {
  typed(app.add_option("--model", f->model, "checkpoint folder or packed file"), "DIR (needed)")->required();
  typed(app.add_option("--device", f->device, "cpu or cuda:N; default: auto (this version computes on the CPU)"),
        "NAME");
  typed(app.add_option("--threads", f->threads, "worker threads; default: the physical cores allowed to us"), "N")
      ->check(CLI::Range(1, 4096));
  typed(app.add_option("--ctx", f->ctx, "positions to plan for; default: fitted to the input"), "N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  typed(
      app.add_option("--ram", f->ram, "everything firn may hold in host memory; default: 90 % of what is free for us"),
      "SIZE");
  typed(app.add_option("--wave", f->wave, "most tokens in one prefill wave; default: the whole prompt"), "N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  typed(app.add_option("--kv-dtype", f->kv_dtype, "storage of K, V and index keys, bf16 or f32; default: bf16"),
        "TYPE");
  app.add_flag("--precise", f->precise, "f32 weights, activations, caches and products");
  // Known names whose features come with the memory tiers: refused by check_engine_flags, never ignored.
  typed(app.add_option("--vram", f->vram, "device memory to use"), "SIZE", kLater);
  typed(app.add_option("--kv-vram", f->kv_vram, "KV blocks kept on the device"), "SIZE", kLater);
  typed(app.add_option("--kv-ram", f->kv_ram, "KV blocks kept in host memory"), "SIZE", kLater);
  typed(app.add_option("--expert-ram", f->expert_ram, "slot cache for experts"), "SIZE", kLater);
  typed(app.add_option("--kv-dir", f->kv_dir, "where far KV goes"), "DIR", kLater);
  typed(app.add_option("--kv-disk", f->kv_disk, "most that far KV may take on disk"), "SIZE", kLater);
  typed(app.add_option("--prefetch", f->prefetch,
                       "auto or off; default: auto (kv, experts and all are not in this version)"),
        "WHAT");
  typed(app.add_option("--trace", f->trace, "record routing and block choices"), "FILE", kLater);
}

int check_engine_flags(const EngineFlags& f) {
  struct Later {
    const char* name;
    bool given;
    const char* why;
  };
  const Later later[] = {
      {"--vram", !f.vram.empty(), "no GPU backend is built"},
      {"--kv-vram", !f.kv_vram.empty(), "no GPU backend is built"},
      {"--kv-ram", !f.kv_ram.empty(), "every KV block stays in host memory; --ram limits the total"},
      {"--expert-ram", !f.expert_ram.empty(), "every expert stays in host memory; --ram limits the total"},
      {"--kv-dir", !f.kv_dir.empty(), "KV does not go to disk"},
      {"--kv-disk", !f.kv_disk.empty(), "KV does not go to disk"},
      {"--trace", !f.trace.empty(), "traces are not recorded"},
  };
  for (const Later& option : later) {
    if (option.given) return usage_error(fmt::format("{}: not in this version ({})", option.name, option.why));
  }
  if (f.prefetch != "auto" && f.prefetch != "off") {
    const bool known = f.prefetch == "kv" || f.prefetch == "experts" || f.prefetch == "all";
    return usage_error(known ? fmt::format("--prefetch {}: not in this version (nothing is far away)", f.prefetch)
                             : fmt::format("--prefetch {}: expected auto, off, kv, experts or all", f.prefetch));
  }
  if (f.kv_dtype == "fp8") return usage_error("--kv-dtype fp8: not in this version; bf16 and f32 are");
  if (f.kv_dtype != "bf16" && f.kv_dtype != "f32") {
    return usage_error(fmt::format("--kv-dtype {}: expected bf16 or f32", f.kv_dtype));
  }
  if (f.device.rfind("cuda", 0) == 0) {
    return usage_error(fmt::format("--device {}: no such device ({})", f.device, gpu::why_none()));
  }
  if (f.device != "auto" && f.device != "cpu") {
    return usage_error(fmt::format("--device {}: expected auto, cpu or cuda:N", f.device));
  }
  if (!f.ram.empty()) {
    const auto ram = parse_size(f.ram);
    if (!ram.ok()) return usage_error("--ram: " + ram.status().message());
    if (*ram <= 0) return usage_error("--ram: expected more than 0 bytes");
  }
  return 0;
}

Result<std::unique_ptr<model::Engine>> open_engine(const EngineFlags& f, const Globals& globals,
                                                   std::function<Status(const model::Engine&)> before_load) {
  FIRN_ASSIGN(const Topology topology, Topology::detect());
  model::EngineOptions options;
  options.model = f.model;
  options.threads = f.threads > 0 ? f.threads : topology.default_threads;
  options.cpus = topology.cpus_for(options.threads);
  options.wave_tokens = f.wave;
  options.precise = f.precise;
  options.kv_dtype = f.kv_dtype == "f32" ? DType::kF32 : DType::kBf16;
  FIRN_ASSIGN(options.isa, cpu::choose_isa());
  options.cancel = &interrupted();
  options.before_load = std::move(before_load);
  if (f.ram.empty()) {
    options.ram_bytes = topology.memory_usable_bytes / 10 * 9;
    options.ram_reason = "90 % of what is free for us: " + topology.memory_usable_reason;
  } else {
    FIRN_ASSIGN(options.ram_bytes, parse_size(f.ram));
    if (options.ram_bytes > topology.memory_usable_bytes) {
      return no_memory(fmt::format("--ram {} is more than this machine gives us: {} ({}). Give less",
                                   format_size(options.ram_bytes), format_size(topology.memory_usable_bytes),
                                   topology.memory_usable_reason));
    }
  }
  std::optional<Progress> bar;
  options.load_progress = [&](int64_t done, int64_t total) {
    if (!bar.has_value()) bar.emplace("loading weights", total, "B", globals.quiet);
    bar->update(done);
  };
  FIRN_ASSIGN(std::unique_ptr<model::Engine> engine, model::Engine::open(storage::FileSystem::real(), options));
  if (bar.has_value()) bar->finish();
  if (gpu::devices().empty()) engine->add_missing_capability("no GPU (" + gpu::why_none() + ")");
  if (engine->options().isa < cpu::Isa::kAvx512) {
    engine->add_missing_capability(fmt::format("no AVX-512 ({} kernels)", cpu::isa_name(engine->options().isa)));
  }
  if (!globals.quiet) std::fprintf(stderr, "firn: %s\n", engine->first_line().c_str());
  return engine;
}

}  // namespace firn::tools
