#include "tools/engine_options.h"

#include <fmt/format.h>

#include <sys/vfs.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
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
  typed(app.add_option("--model", f->model, "checkpoint folder"), "DIR (needed)")->required();
  typed(app.add_option("--device", f->device, "cpu or cuda:N; default: auto (this version computes on the CPU)"),
        "NAME");
  typed(app.add_option("--threads", f->threads, "worker threads; default: the physical cores allowed to us"), "N")
      ->check(CLI::Range(1, 4096));
  typed(app.add_option("--ctx", f->ctx, "positions to plan for; default: fitted to the input"), "N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  typed(
      app.add_option("--ram", f->ram, "everything firn may hold in host memory; default: 90 % of what is free for us"),
      "SIZE");
  app.add_flag("--share-weights", f->share_weights,
               "keep the weights in shared memory after this run: later runs start at once (firn doctor lists them)");
  typed(app.add_option("--share-dir", f->share_dir, "memory file system for --share-weights; default: /dev/shm"),
        "DIR");
  typed(app.add_option("--wave", f->wave, "most tokens in one prefill wave; default: the whole prompt"), "N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  typed(app.add_option("--kv-dtype", f->kv_dtype, "storage of K, V and index keys, bf16 or f32; default: bf16"),
        "TYPE");
  app.add_flag("--precise", f->precise, "f32 weights, activations, caches and products");
  typed(app.add_option("--expert-ram", f->expert_ram,
                       "slot cache for routed experts, at least two of them; default: all of them, or what is left"),
        "SIZE");
  typed(app.add_option("--kv-ram", f->kv_ram,
                       "sealed KV blocks of sparse layers kept in memory; default: all, or 10 % of what is left"),
        "SIZE");
  typed(app.add_option("--kv-dir", f->kv_dir,
                       "where far KV goes; several drives are used side by side; default: the largest disk's temporary "
                       "folder"),
        "DIR");
  typed(
      app.add_option("--kv-disk", f->kv_disk, "most that far KV may take on disk; default: 90 % of what is free there"),
      "SIZE");
  app.add_flag("--kv-compress", f->kv_compress, "zstd for KV on disk: less of it, at the cost of processor time");
  typed(app.add_option("--prefetch", f->prefetch,
                       "reads on a guess: auto (while they pay), off, kv, experts or all; default: auto"),
        "WHAT");
  typed(app.add_option("--expert-policy", f->expert_policy, "what the expert cache keeps, frequency or lru"), "NAME");
  typed(app.add_option("--io", f->io, "auto (io_uring where the kernel allows it) or preads"), "WAY");
  // Known names of what is not built: refused by check_engine_flags, never ignored.
  typed(app.add_option("--vram", f->vram, "device memory to use"), "SIZE", kLater);
  typed(app.add_option("--kv-vram", f->kv_vram, "KV blocks kept on the device"), "SIZE", kLater);
  typed(app.add_option("--trace", f->trace, "record routing and block choices"), "FILE", kLater);
}

namespace {

// The folder for temporary files with the most room that is not memory in disguise.
std::string largest_temporary_folder() {
  std::string best;
  int64_t most = -1;
  std::vector<std::string> candidates = {"/var/tmp", "/tmp"};
  if (const char* tmp = std::getenv("TMPDIR"); tmp != nullptr && *tmp != 0) candidates.insert(candidates.begin(), tmp);
  for (const std::string& dir : candidates) {
    struct statfs info {};
    constexpr long kTmpfs = 0x01021994, kRamfs = 0x858458f6;
    if (::statfs(dir.c_str(), &info) != 0 || ::access(dir.c_str(), W_OK) != 0 || info.f_type == kTmpfs ||
        info.f_type == kRamfs) {
      continue;
    }
    const auto free = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_bsize);
    if (free > most) {
      most = free;
      best = dir;
    }
  }
  return best;
}

}  // namespace

int check_engine_flags(const EngineFlags& f) {
  struct Later {
    const char* name;
    bool given;
    const char* why;
  };
  const Later later[] = {
      {"--vram", !f.vram.empty(), "no GPU backend is built"},
      {"--kv-vram", !f.kv_vram.empty(), "no GPU backend is built"},
      {"--trace", !f.trace.empty(), "traces are not recorded"},
  };
  for (const Later& option : later) {
    if (option.given) return usage_error(fmt::format("{}: not in this version ({})", option.name, option.why));
  }
  const auto one_of = [&](const char* name, const std::string& value, std::initializer_list<const char*> known) {
    std::string words;
    for (const char* k : known) {
      if (value == k) return 0;
      words += (words.empty() ? "" : ", ") + std::string(k);
    }
    return usage_error(fmt::format("{} {}: expected one of {}", name, value, words));
  };
  if (const int code = one_of("--prefetch", f.prefetch, {"auto", "off", "kv", "experts", "all"}); code != 0)
    return code;
  if (const int code = one_of("--io", f.io, {"auto", "preads"}); code != 0) return code;
  if (const int code = one_of("--expert-policy", f.expert_policy, {"frequency", "lru"}); code != 0) return code;
  for (const auto& [name, value] : {std::pair("--kv-ram", &f.kv_ram), std::pair("--expert-ram", &f.expert_ram),
                                    std::pair("--kv-disk", &f.kv_disk)}) {
    if (value->empty()) continue;
    const auto size = parse_size(*value);
    if (!size.ok()) return usage_error(std::string(name) + ": " + size.status().message());
    if (*size < 0) return usage_error(std::string(name) + ": expected 0 bytes or more");
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
  if (!f.share_dir.empty() && !f.share_weights) return usage_error("--share-dir: needs --share-weights");
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
  if (!f.expert_ram.empty()) {
    FIRN_ASSIGN(options.expert_ram_bytes, parse_size(f.expert_ram));
  }
  if (!f.kv_ram.empty()) {
    FIRN_ASSIGN(options.kv_ram_bytes, parse_size(f.kv_ram));
  }
  options.kv_dirs = f.kv_dir;
  if (options.kv_dirs.empty()) {
    if (const std::string dir = largest_temporary_folder(); !dir.empty()) options.kv_dirs.push_back(dir);
  }
  if (!f.kv_disk.empty()) {
    FIRN_ASSIGN(options.kv_disk_bytes, parse_size(f.kv_disk));
  } else if (!options.kv_dirs.empty()) {
    options.kv_disk_bytes = 0;
    for (const std::string& dir : options.kv_dirs) {
      FIRN_ASSIGN(const int64_t free, storage::FileSystem::real().free_bytes(dir));
      options.kv_disk_bytes += free / 10 * 9;
    }
  }
  options.kv_compress = f.kv_compress;
  options.expert_policy = f.expert_policy;
  options.prefetch_experts = f.prefetch == "auto" || f.prefetch == "all" || f.prefetch == "experts";
  options.prefetch_kv = f.prefetch == "auto" || f.prefetch == "all" || f.prefetch == "kv";
  options.always_guess = f.prefetch != "auto" && f.prefetch != "off";
  options.io_uring = f.io == "auto";
  options.sessions = !f.session.empty();
  // Names that hold wherever the session is opened from.
  for (const std::string& dir : f.kv_dir) options.session_dirs.push_back(std::filesystem::absolute(dir).string());
  if (!f.kv_disk.empty()) options.session_disk_bytes = options.kv_disk_bytes;
  options.cancel = &interrupted();
  options.before_load = std::move(before_load);
  std::optional<Progress> check_bar;
  int64_t usable = topology.memory_usable_bytes;
  std::string usable_reason = topology.memory_usable_reason;
  if (f.share_weights) {
    options.share_weights = true;
    if (!f.share_dir.empty()) options.shared.folder = f.share_dir;
    options.shared.progress = [&](int64_t done, int64_t total) {
      if (done == 0) check_bar.emplace("checking shared weights", total, "B", globals.quiet);
      check_bar->update(done);
    };
    options.shared.say = [&](const std::string& words) {
      if (!globals.quiet) std::fprintf(stderr, "firn: %s\n", words.c_str());
    };
    // Weights that stand in memory already need not be free for us as well.
    const int64_t there = model::shared_weights_bytes(options.shared.folder, f.model);
    if (there > 0) usable_reason += fmt::format(", and {} of shared weights that are there", format_size(there));
    usable += there;
  }
  if (f.ram.empty()) {
    options.ram_bytes = usable / 10 * 9;
    options.ram_reason = "90 % of what is free for us: " + usable_reason;
  } else {
    FIRN_ASSIGN(options.ram_bytes, parse_size(f.ram));
    if (options.ram_bytes > usable) {
      return no_memory(fmt::format("--ram {} is more than this machine gives us: {} ({}). Give less",
                                   format_size(options.ram_bytes), format_size(usable), usable_reason));
    }
  }
  std::optional<Progress> bar;
  options.load_progress = [&](int64_t done, int64_t total) {
    check_bar.reset();
    if (!bar.has_value()) bar.emplace("loading weights", total, "B", globals.quiet);
    bar->update(done);
  };
  FIRN_ASSIGN(std::unique_ptr<model::Engine> engine, model::Engine::open(storage::FileSystem::real(), options));
  if (bar.has_value()) bar->finish();
  check_bar.reset();
  if (gpu::devices().empty()) engine->add_missing_capability("no GPU (" + gpu::why_none() + ")");
  if (engine->options().isa < cpu::Isa::kAvx512) {
    engine->add_missing_capability(fmt::format("no AVX-512 ({} kernels)", cpu::isa_name(engine->options().isa)));
  }
  if (!globals.quiet) std::fprintf(stderr, "firn: %s\n", engine->first_line().c_str());
  return engine;
}

}  // namespace firn::tools
