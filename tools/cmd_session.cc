// `firn session`: looks after sessions on disk, and makes one for measurements.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "model/session_files.h"
#include "runtime/progress.h"
#include "runtime/units.h"
#include "storage/kv_log.h"
#include "tools/cli.h"

namespace firn::tools {

namespace {

using nlohmann::ordered_json;
using storage::FileSystem;
using storage::KvLog;

struct SessionFlags {
  std::string dir, out, model, kv_dtype = "bf16", tokens;
  std::vector<std::string> kv_dirs;
  double locality = 0;
  int64_t seed = 1;
  bool all = false, precise = false;
};

ordered_json info_json(const std::string& dir, const model::SessionInfo& i) {
  return {{"session", dir},
          {"identity", i.identity},
          {"tokens", i.tokens},
          {"interrupted_tokens", i.interrupted_tokens},
          {"interrupted_layers", i.interrupted_layers},
          {"steps_to_replay", i.steps_to_replay},
          {"entries", i.stats.entries},
          {"bytes_on_disk", i.stats.bytes_on_disk},
          {"bytes_dead", i.stats.bytes_dead},
          {"dirs", i.dirs}};
}

void print_info(const std::string& dir, const model::SessionInfo& i) {
  std::printf("%s: %lld tokens, %s on disk (%s of it no longer needed)\n  %s\n", dir.c_str(),
              static_cast<long long>(i.tokens), format_size(i.stats.bytes_on_disk).c_str(),
              format_size(i.stats.bytes_dead).c_str(), i.identity.c_str());
  if (i.interrupted_tokens > 0) {
    std::printf("  a prompt of %lld tokens was interrupted behind layer %lld: the same prompt goes on from there\n",
                static_cast<long long>(i.interrupted_tokens), static_cast<long long>(i.interrupted_layers));
  }
  if (i.steps_to_replay > 0) {
    std::printf("  %lld steps after the last commit will be replayed\n", static_cast<long long>(i.steps_to_replay));
  }
  for (size_t d = 1; d < i.dirs.size(); ++d) std::printf("  also in %s\n", i.dirs[d].c_str());
}

Result<std::unique_ptr<KvLog>> open(const std::string& dir) { return KvLog::open(FileSystem::real(), dir, {}); }

// A progress bar that appears with the first report.
class Bar {
 public:
  Bar(const char* what, const Globals& globals) : what_(what), quiet_(globals.quiet) {}
  void operator()(int64_t done, int64_t total) {
    if (!bar_) bar_.emplace(what_, total, "B", quiet_);
    bar_->update(done);
  }
  void finish() {
    if (bar_) bar_->finish();
  }

 private:
  const char* const what_;
  const bool quiet_;
  std::optional<Progress> bar_;
};

int list(const SessionFlags& f, const Globals& globals) {
  const std::string base = f.dir.empty() ? "." : f.dir;
  const auto names = FileSystem::real().list_folder(base);
  if (!names.ok()) return report(names.status());
  auto all = ordered_json::array();
  int found = 0;
  for (const std::string& name : *names) {
    const std::string dir = base + "/" + name;
    std::error_code error;
    if (!std::filesystem::exists(dir + "/lock", error) || !std::filesystem::exists(dir + "/journal", error)) continue;
    ++found;
    const auto log = open(dir);
    if (!log.ok()) {
      if (globals.json) {
        all.push_back({{"session", dir}, {"error", log.status().message()}});
      } else {
        std::printf("%s: %s\n", dir.c_str(), log.status().message().c_str());
      }
      continue;
    }
    if (globals.json) {
      all.push_back(info_json(dir, model::session_info(**log)));
    } else {
      print_info(dir, model::session_info(**log));
    }
  }
  if (globals.json) {
    std::puts(ordered_json{{"sessions", all}}.dump().c_str());
  } else if (found == 0) {
    std::printf("%s: no sessions\n", base.c_str());
  }
  return 0;
}

int info(const SessionFlags& f, const Globals& globals) {
  const auto log = open(f.dir);
  if (!log.ok()) return report(log.status());
  if (globals.json) {
    std::puts(info_json(f.dir, model::session_info(**log)).dump().c_str());
  } else {
    print_info(f.dir, model::session_info(**log));
  }
  return 0;
}

int verify(const SessionFlags& f, const Globals& globals) {
  const auto log = open(f.dir);
  if (!log.ok()) return report(log.status());
  Bar bar("verifying", globals);
  const auto problems = (*log)->verify([&](int64_t done, int64_t total) { bar(done, total); });
  bar.finish();
  if (!problems.ok()) return report(problems.status());
  if (globals.json) {
    std::puts(
        ordered_json{{"session", f.dir}, {"entries", (*log)->stats().entries}, {"problems", *problems}}.dump().c_str());
  } else if (problems->empty()) {
    std::printf("%s: all %lld blocks are as they were written\n", f.dir.c_str(),
                static_cast<long long>((*log)->stats().entries));
  } else {
    for (const std::string& problem : *problems) std::printf("%s\n", problem.c_str());
  }
  return problems->empty() ? 0 : 1;
}

int compact(const SessionFlags& f, const Globals& globals) {
  auto log = open(f.dir);
  if (!log.ok()) return report(log.status());
  if (!(*log)->notes().empty()) {
    return report(invalid(fmt::format("{}: {} steps wait to be replayed: open it once with firn run --session first",
                                      f.dir, (*log)->notes().size())));
  }
  const int64_t before = (*log)->stats().bytes_on_disk;
  Bar bar("compacting", globals);
  const Status status = (*log)->compact(f.all, [&](int64_t done, int64_t total) { bar(done, total); });
  bar.finish();
  if (!status.ok()) return report(status);
  const int64_t after = (*log)->stats().bytes_on_disk;
  if (globals.json) {
    std::puts(ordered_json{{"session", f.dir}, {"bytes_before", before}, {"bytes_after", after}}.dump().c_str());
  } else {
    std::printf("%s: %s, was %s\n", f.dir.c_str(), format_size(after).c_str(), format_size(before).c_str());
  }
  return 0;
}

// What is live, as a new session in one folder.
Status copy_live(const KvLog& from, const std::string& out, const std::function<void(int64_t, int64_t)>& progress) {
  storage::KvLogOptions options;
  options.identity = from.identity();
  FIRN_ASSIGN(auto to, KvLog::create(FileSystem::real(), out, options));
  int64_t total = 0, done = 0, bytes = 0;
  from.for_each([&](const storage::BlockKey&, const storage::BlockPlace& p) { total += p.bytes; });
  std::vector<std::vector<std::byte>> memory;
  std::vector<storage::LogEntry> entries;
  Status status;
  const auto flush = [&] {
    if (status.ok()) status = to->append(entries).status();
    entries.clear();
    memory.clear();
    done += std::exchange(bytes, 0);
    progress(done, total);
  };
  from.for_each([&](const storage::BlockKey& key, const storage::BlockPlace& place) {
    if (!status.ok()) return;
    memory.emplace_back(static_cast<size_t>(place.bytes));
    status = from.read(key, place, memory.back());
    entries.push_back({key, memory.back()});
    bytes += place.bytes;
    if (bytes >= (int64_t{64} << 20)) flush();
  });
  flush();
  FIRN_TRY(status);
  return to->commit(from.state());
}

int export_to(const SessionFlags& f, const Globals& globals) {
  const auto log = open(f.dir);
  if (!log.ok()) return report(log.status());
  const model::SessionInfo i = model::session_info(**log);
  if (i.interrupted_tokens > 0 || i.steps_to_replay > 0) {
    return report(
        invalid(fmt::format("{}: a prompt or steps wait to be finished: open it once with firn run --session "
                            "first",
                            f.dir)));
  }
  Bar bar("copying", globals);
  const Status status = copy_live(**log, f.out, [&](int64_t done, int64_t total) { bar(done, total); });
  bar.finish();
  if (!status.ok()) return report(status);
  if (globals.json) {
    std::puts(ordered_json{{"session", f.dir}, {"out", f.out}, {"tokens", i.tokens}}.dump().c_str());
  } else {
    std::printf("%s: %lld tokens\n", f.out.c_str(), static_cast<long long>(i.tokens));
  }
  return 0;
}

int synth(const SessionFlags& f, const Globals& globals) {
  const auto tokens = parse_size(f.tokens);
  if (!tokens.ok() || *tokens < 1) {
    return usage_error("--tokens " + f.tokens + ": expected a number of tokens, for example 1000000");
  }
  if (f.kv_dtype != "bf16" && f.kv_dtype != "f32") {
    return usage_error("--kv-dtype " + f.kv_dtype + ": expected bf16 or f32");
  }
  auto survey = model::Survey::open(FileSystem::real(), f.model);
  if (!survey.ok()) return report(survey.status());
  model::SynthSession options;
  options.tokens = *tokens;
  options.locality = f.locality;
  options.seed = static_cast<uint64_t>(f.seed);
  options.kv_dtype = f.kv_dtype == "f32" ? DType::kF32 : DType::kBf16;
  options.precise = f.precise;
  for (const std::string& dir : f.kv_dirs) {
    options.more_dirs.push_back(std::filesystem::absolute(dir).string() + "/" +
                                std::filesystem::path(f.out).filename().string() + ".part");
  }
  Bar bar("writing", globals);
  const Status status = model::synth_session(
      FileSystem::real(), *survey, f.out, options, [&](int64_t done, int64_t total) { bar(done, total); },
      &interrupted());
  bar.finish();
  if (!status.ok()) return report(status);
  const auto log = open(f.out);
  if (!log.ok()) return report(log.status());
  if (globals.json) {
    std::puts(info_json(f.out, model::session_info(**log)).dump().c_str());
  } else {
    print_info(f.out, model::session_info(**log));
  }
  return 0;
}

}  // namespace

Runner add_session(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<SessionFlags>();
  SessionFlags& f = *flags;
  app.require_subcommand(1);
  // --json and --quiet may stand behind the subcommand's name.
  const auto command = [&](const char* name, const char* words) {
    return app.add_subcommand(name, words)->fallthrough()->allow_extras(false);
  };
  auto* list_cmd = command("list", "sessions in a folder");
  list_cmd->add_option("dir", f.dir, "folder; default: this one")->option_text("DIR");
  auto* info_cmd = command("info", "what a session holds");
  auto* verify_cmd = command("verify", "reads everything and checks it");
  auto* compact_cmd = command("compact", "gives back the space of what is no longer needed");
  compact_cmd->add_flag("--all", f.all, "rewrite everything, not only what is mostly unneeded");
  auto* export_cmd = command("export", "a copy in one folder, without what is no longer needed");
  export_cmd->add_option("--out", f.out, "folder to make")->required()->option_text("DIR");
  for (CLI::App* c : {info_cmd, verify_cmd, compact_cmd, export_cmd}) {
    c->add_option("session", f.dir, "the session's folder")->required()->option_text("DIR");
  }
  auto* synth_cmd = command("synth", "a session of random K, V and index keys, to measure long contexts");
  synth_cmd->add_option("--model", f.model, "checkpoint folder")->required()->option_text("DIR");
  synth_cmd->add_option("--tokens", f.tokens, "how long")->required()->option_text("N");
  synth_cmd->add_option("--out", f.out, "folder to make")->required()->option_text("DIR");
  synth_cmd->add_option("--locality", f.locality, "share of choices that are the same for every token; default: 0")
      ->check(CLI::Range(0.0, 1.0))
      ->option_text("X");
  synth_cmd->add_option("--seed", f.seed, "default: 1")->check(CLI::NonNegativeNumber)->option_text("N");
  synth_cmd->add_option("--kv-dtype", f.kv_dtype, "bf16 or f32; default: bf16")->option_text("TYPE");
  synth_cmd->add_flag("--precise", f.precise, "for runs with --precise");
  synth_cmd->add_option("--kv-dir", f.kv_dirs, "further drives to spread over")->option_text("DIR");
  return [=, &globals] {
    if (list_cmd->parsed()) return list(*flags, globals);
    if (info_cmd->parsed()) return info(*flags, globals);
    if (verify_cmd->parsed()) return verify(*flags, globals);
    if (compact_cmd->parsed()) return compact(*flags, globals);
    if (export_cmd->parsed()) return export_to(*flags, globals);
    return synth(*flags, globals);
  };
}

}  // namespace firn::tools
