// `firn synth`: a checkpoint of any size with seeded random weights, for benches and tests.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "model/synth.h"
#include "runtime/progress.h"
#include "runtime/units.h"
#include "storage/file.h"
#include "tools/cli.h"

namespace firn::tools {
namespace {

struct SynthFlags {
  std::string config, out, format = "bf16", shard_size = "2GB";
  uint64_t seed = 1;
  int64_t layers = 0, experts = 0;
  int threads = 0;
};

int synth(const SynthFlags& flags, const Globals& globals) {
  const auto format = model::checkpoint_format(flags.format);
  if (!format.ok()) return usage_error("--format: " + format.status().message());
  const auto shard_bytes = parse_size(flags.shard_size);
  if (!shard_bytes.ok()) return usage_error("--shard-size: " + shard_bytes.status().message());
  if (*shard_bytes < 1 || *shard_bytes > int64_t{5'000'000'000}) {
    return usage_error(fmt::format("--shard-size {}: expected 1 byte to 5GB", flags.shard_size));
  }
  model::SynthOptions options;
  options.config = flags.config;
  options.out = flags.out;
  options.format = *format;
  options.seed = flags.seed;
  options.layers = flags.layers;
  options.experts = flags.experts;
  options.n_threads = flags.threads;
  options.shard_bytes = *shard_bytes;
  options.cancel = &interrupted();
  std::optional<Progress> progress;
  options.progress = [&](int64_t done, int64_t total) {
    if (!progress) progress.emplace("writing " + flags.out, total, ProgressUnit::kBytes, globals.quiet);
    progress->update(done);
  };
  const auto start = std::chrono::steady_clock::now();
  const Status status = model::synth_checkpoint(storage::FileSystem::real(), options);
  if (progress) progress->finish();
  if (!status.ok()) return report(status);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto survey = model::Survey::open(storage::FileSystem::real(), flags.out);
  if (!survey.ok()) return report(survey.status());
  if (globals.json) {
    const nlohmann::ordered_json out = {{"path", flags.out},      {"format", flags.format},
                                        {"seed", flags.seed},     {"parameters", survey->parameters},
                                        {"bytes", survey->bytes}, {"shards", survey->checkpoint.shards.size()},
                                        {"seconds", seconds}};
    std::fprintf(stdout, "%s\n", out.dump(2).c_str());
  } else {
    std::fprintf(stderr, "%s\n",
                 fmt::format("{}: {} parameters, {} in {} files, {:.1f} s", flags.out, format_count(survey->parameters),
                             format_size(survey->bytes), survey->checkpoint.shards.size(), seconds)
                     .c_str());
  }
  return 0;
}

}  // namespace

Runner add_synth(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<SynthFlags>();
  app.add_option("--config", flags->config, "config.json, or the folder that holds one")->required();
  app.add_option("--out", flags->out, "folder to make; must not exist")->required();
  app.add_option("--format", flags->format,
                 "bf16, mxfp8, nvfp4 or mxfp4 (the last two: routed experts; the rest mxfp8)")
      ->capture_default_str();
  app.add_option("--seed", flags->seed, "other seeds give other weights")->capture_default_str();
  app.add_option("--layers", flags->layers, "number of layers instead of the config's")->check(CLI::Range(1, 4096));
  app.add_option("--experts", flags->experts, "number of experts instead of the config's")->check(CLI::Range(1, 65536));
  app.add_option("--threads", flags->threads, "writing threads (default: all cores, at most 16)")
      ->check(CLI::Range(1, 256));
  app.add_option("--shard-size", flags->shard_size, "most bytes of one file, unless one tensor is larger; up to 5GB")
      ->capture_default_str();
  return [flags, &globals] { return synth(*flags, globals); };
}

}  // namespace firn::tools
