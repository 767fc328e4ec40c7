// `firn pack`: a checkpoint as one packed file, and the check of such a file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "model/pack.h"
#include "runtime/progress.h"
#include "runtime/units.h"
#include "storage/packed_file.h"
#include "tools/cli.h"

namespace firn::tools {
namespace {

using Json = nlohmann::ordered_json;

struct PackFlags {
  std::string source, out, verify, experts = "keep";
  bool force = false;
  int threads = 0;
};

double rate(int64_t bytes, double seconds) { return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0; }

int verify(const PackFlags& flags, const Globals& globals) {
  std::optional<Progress> bar;
  const auto progress = [&](int64_t done, int64_t total) {
    if (!bar) bar.emplace("checking " + flags.verify, total, ProgressUnit::kBytes, globals.quiet);
    bar->update(done);
  };
  const int threads = flags.threads > 0 ? flags.threads : std::clamp<int>(std::thread::hardware_concurrency(), 2, 8);
  const auto stats =
      storage::verify_packed(storage::FileSystem::real(), flags.verify, threads, progress, &interrupted());
  if (bar) bar->finish();
  if (!stats.ok()) return report(stats.status());
  if (globals.json) {
    const Json out = {{"path", flags.verify},      {"bytes", stats->bytes},
                      {"experts", stats->experts}, {"extents", stats->extents},
                      {"seconds", stats->seconds}, {"gb_s", rate(stats->bytes, stats->seconds)},
                      {"undamaged", true}};
    std::fprintf(stdout, "%s\n", out.dump(2).c_str());
  } else {
    std::fprintf(stderr, "%s\n",
                 fmt::format("{}: {} in {} extents ({} experts), undamaged; {:.1f} s, {:.2f} GB/s", flags.verify,
                             format_size(stats->bytes), stats->extents, stats->experts, stats->seconds,
                             rate(stats->bytes, stats->seconds))
                     .c_str());
  }
  return 0;
}

int pack(const PackFlags& flags, const Globals& globals) {
  if (!flags.verify.empty()) {
    if (!flags.source.empty() || !flags.out.empty()) {
      return usage_error("--verify FILE stands alone; make the file first, then check it");
    }
    return verify(flags, globals);
  }
  if (flags.source.empty() || flags.out.empty()) {
    return usage_error("expected DIR --out FILE, or --verify FILE. See `firn help pack`.");
  }
  model::PackOptions options;
  options.source = flags.source;
  options.out = flags.out;
  options.overwrite = flags.force;
  options.n_threads = flags.threads;
  options.cancel = &interrupted();
  if (flags.experts != "keep") {
    const auto format = model::checkpoint_format(flags.experts);
    if (!format.ok()) {
      return usage_error(fmt::format("--experts {}: expected keep, bf16, mxfp8, nvfp4 or mxfp4", flags.experts));
    }
    options.experts = *format;
  }
  std::optional<Progress> bar;
  options.progress = [&](int64_t done, int64_t total) {
    if (!bar) bar.emplace("packing " + flags.out, total, ProgressUnit::kBytes, globals.quiet);
    bar->update(done);
  };
  const auto stats = model::pack_checkpoint(storage::FileSystem::real(), options);
  if (bar) bar->finish();
  if (!stats.ok()) return report(stats.status());
  const int64_t written = stats->bytes - stats->resumed_bytes;
  if (globals.json) {
    const Json out = {{"path", flags.out},
                      {"bytes", stats->bytes},
                      {"resumed_bytes", stats->resumed_bytes},
                      {"experts", stats->experts},
                      {"extents", stats->extents},
                      {"experts_option", flags.experts},
                      {"model_hash", stats->model_hash},
                      {"seconds", stats->seconds},
                      {"gb_s", rate(written, stats->seconds)}};
    std::fprintf(stdout, "%s\n", out.dump(2).c_str());
  } else {
    std::fprintf(stderr, "%s\n",
                 fmt::format("{}: {} in {} extents ({} experts){}; {:.1f} s, {:.2f} GB/s", flags.out,
                             format_size(stats->bytes), stats->extents, stats->experts,
                             stats->resumed_bytes > 0
                                 ? fmt::format(", {} of it from an earlier run", format_size(stats->resumed_bytes))
                                 : "",
                             stats->seconds, rate(written, stats->seconds))
                     .c_str());
  }
  return 0;
}

}  // namespace

Runner add_pack(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<PackFlags>();
  app.add_option("DIR", flags->source, "checkpoint folder (or packed file) to pack");
  app.add_option("--out", flags->out, "the file to make; a run that was stopped goes on when it is started again");
  app.add_option("--experts", flags->experts, "format of routed experts: keep, bf16, mxfp8, nvfp4 or mxfp4")
      ->capture_default_str();
  app.add_option("--verify", flags->verify, "re-reads this packed file and checks every checksum");
  app.add_flag("--force", flags->force, "replaces the file --out names if it exists");
  app.add_option("--threads", flags->threads, "extents in the making at once (default: all cores, at most 16)")
      ->check(CLI::Range(1, 256));
  return [flags, &globals] { return pack(*flags, globals); };
}

}  // namespace firn::tools
