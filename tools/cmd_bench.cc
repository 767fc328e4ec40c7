// firn bench NAME: kernels and memory beside the limits of this machine. firn bench compare A B: two result files side
// by side.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/units.h"
#include "tools/bench.h"

namespace firn::tools {
namespace {

struct Bench {
  const char* name;
  const char* what;
  Status (*run)(BenchContext&);
  bool in_all;  // --all runs it: it needs no checkpoint
};

const Bench kBenches[] = {
    {"mem", "reading, writing and copying memory", bench_mem, true},
    {"gemm", "oneDNN's products at M3's shapes", bench_gemm, true},
    {"linear", "projections at M3's shapes", bench_linear, true},
    {"moe", "router picks to combined expert output", bench_moe, true},
    {"attention", "sparse and dense attention at depth", bench_attention, true},
    {"index", "block scores and the exact choice of blocks at depth", bench_index, true},
    {"model", "prefill, decode and small steps of a checkpoint (--model DIR)", bench_model, false},
    {"disk", "random reads of a drive by size and depth, and writing (--dir DIR)", bench_disk, false},
    {"tiers", "experts from disk; far KV, with --session SHORT,LONG (--model DIR)", bench_tiers, false},
};

struct Flags {
  std::vector<std::string> words;
  bool all = false;
  std::string out;
  int threads = 0, runs = 7;
  std::vector<int64_t> tokens, queries;
  std::vector<std::string> formats, depths;
  std::string model, dir;
  int64_t prompt = 512, gen = 64, expert_percent = 25, kv_percent = 5;
  std::vector<int64_t> steps = {1, 4};
  std::vector<std::string> sessions;
};

std::string names() {
  std::string out;
  for (const Bench& b : kBenches) out += fmt::format("{}{}", out.empty() ? "" : ", ", b.name);
  return out + ", compare";
}

std::string nearest_bench(const std::string& word) {
  std::vector<std::string> known = {"compare"};
  for (const Bench& b : kBenches) known.push_back(b.name);
  const std::string close = nearest(word, known);
  return close.empty() ? "." : fmt::format("; did you mean '{}'?", close);
}

// "8K" and "1M" count positions in powers of two, as contexts are spoken of.
Result<int64_t> parse_depth(const std::string& text) {
  std::string digits = text;
  int64_t unit = 1;
  if (!digits.empty()) {
    const char last = digits.back();
    if (last == 'K' || last == 'k') unit = 1024;
    if (last == 'M' || last == 'm') unit = 1024 * 1024;
    if (unit != 1) digits.pop_back();
  }
  if (digits.empty() || digits.size() > 12 || digits.find_first_not_of("0123456789") != std::string::npos) {
    return invalid(fmt::format("--depth {}: expected positions such as 8192, 128K or 1M", text));
  }
  return std::stoll(digits) * unit;
}

struct FileRow {
  std::string key;
  double rate = 0, ratio = 0;
  bool has_ratio = false;
  std::string unit;
};

Result<std::vector<FileRow>> read_rows(const std::string& path) {
  std::ifstream in(path);
  if (!in) return not_found(fmt::format("{}: cannot be opened", path));
  std::vector<FileRow> rows;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (line.empty()) continue;
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("bench") || !json.contains("gb_s") || !json.contains("gflop_s")) {
      return corrupt(fmt::format("{}, line {}: expected one JSON row of firn bench --json", path, number));
    }
    try {
      FileRow row;
      row.key = fmt::format("{} {} ({} threads)", json.at("bench").get<std::string>(),
                            json.at("shape").get<std::string>(), json.at("threads").get<int>());
      const bool flops =
          json.at("gflop_s").get<double>() > 0 && json.value("limit_source", nlohmann::json()) != "mem read";
      row.unit = flops ? "GFLOP/s" : "GB/s";
      row.rate = json.at(flops ? "gflop_s" : "gb_s").get<double>();
      row.has_ratio = json.contains("ratio") && json.at("ratio").is_number();
      if (row.has_ratio) row.ratio = json.at("ratio").get<double>();
      rows.push_back(std::move(row));
    } catch (const nlohmann::json::exception& e) {
      return corrupt(fmt::format("{}, line {}: {}", path, number, e.what()));
    }
  }
  return rows;
}

Status compare(const std::string& a_path, const std::string& b_path, bool json) {
  FIRN_ASSIGN(const std::vector<FileRow> a, read_rows(a_path));
  FIRN_ASSIGN(const std::vector<FileRow> b, read_rows(b_path));
  std::map<std::string, const FileRow*> of_b;
  for (const FileRow& row : b) of_b[row.key] = &row;
  std::string lines;
  if (!json) lines += fmt::format("{:<58} {:>12} {:>12} {:>8}\n", "row", "A", "B", "B / A");
  for (const FileRow& row : a) {
    const auto it = of_b.find(row.key);
    if (it == of_b.end()) continue;
    const double change = row.rate > 0 ? it->second->rate / row.rate : 0;
    if (json) {
      lines += nlohmann::ordered_json(
                   {{"row", row.key}, {"unit", row.unit}, {"a", row.rate}, {"b", it->second->rate}, {"change", change}})
                   .dump() +
               "\n";
    } else {
      lines += fmt::format("{:<58} {:>12.1f} {:>12.1f} {:>8.3f}  {}\n", row.key, row.rate, it->second->rate, change,
                           row.unit);
    }
  }
  std::fputs(lines.c_str(), stdout);
  return {};
}

// Who measures and with what: a figure without it is worth nothing.
void print_machine(BenchContext& context) {
  const Topology& t = context.topology();
  std::fprintf(stderr, "%s\n",
               fmt::format("{}; {} of {} cores, {} threads{}; {} NUMA node(s); L3 {}; memory {} usable; huge pages {}; "
                           "kernels {}",
                           cpu::cpu_features().model, t.cores_allowed, t.cores_present, context.team().size(),
                           context.team().pinned() ? " pinned" : "", t.nodes.size(), format_size(t.l3_bytes),
                           format_size(t.memory_usable_bytes), t.huge_pages.empty() ? "none" : t.huge_pages,
                           context.ops().name())
                   .c_str());
#if defined(FIRN_ASAN) || defined(FIRN_TSAN)
  std::fprintf(stderr, "warning: built with sanitizers: these figures say nothing about speed\n");
#elif !defined(__OPTIMIZE__)
  std::fprintf(stderr, "warning: built without optimisation: these figures say nothing about speed\n");
#elif !defined(NDEBUG)
  std::fprintf(stderr, "warning: built with assertions on: configure with -DCMAKE_BUILD_TYPE=Release\n");
#endif
  if (context.team().size() > t.cores_allowed) {
    std::fprintf(stderr, "warning: more threads than cores\n");
  }
}

int run_benches(const Flags& flags, const Globals& globals) {
  std::vector<const Bench*> chosen;
  if (flags.all) {
    if (!flags.words.empty()) return usage_error("bench: a name or --all, not both");
    for (const Bench& b : kBenches) {
      if (b.in_all) chosen.push_back(&b);
    }
  } else {
    if (flags.words.empty()) return usage_error(fmt::format("bench: expected a name ({}) or --all", names()));
    if (flags.words[0] == "compare") {
      if (flags.words.size() != 3) return usage_error("bench compare: expected two files of rows");
      const Status status = compare(flags.words[1], flags.words[2], globals.json);
      return status.ok() ? 0 : report(status);
    }
    if (flags.words.size() > 1) return usage_error(fmt::format("bench: unexpected word '{}'", flags.words[1]));
    for (const Bench& b : kBenches) {
      if (flags.words[0] == b.name) chosen.push_back(&b);
    }
    if (chosen.empty()) {
      return usage_error(fmt::format("bench: there is no bench '{}'{} Benches: {}", flags.words[0],
                                     nearest_bench(flags.words[0]), names()));
    }
  }
  for (const Bench* bench : chosen) {
    if (flags.all) break;
    const std::string name = bench->name;
    const bool rows = name == "linear" || name == "moe", depth = name == "attention" || name == "index",
               model = name == "model" || name == "tiers";
    if (model && flags.model.empty()) {
      return usage_error(fmt::format("bench {}: --model DIR names the checkpoint", name));
    }
    if (!model && !flags.model.empty()) {
      return usage_error(fmt::format("bench {}: --model belongs to model and tiers", name));
    }
    if (name == "disk" && flags.dir.empty()) return usage_error("bench disk: --dir DIR says on which drive");
    if (name != "disk" && !flags.dir.empty()) return usage_error(fmt::format("bench {}: --dir belongs to disk", name));
    if (name != "tiers" && !flags.sessions.empty()) {
      return usage_error(fmt::format("bench {}: --session belongs to tiers", name));
    }
    if (!rows && (!flags.tokens.empty() || !flags.formats.empty())) {
      return usage_error(fmt::format("bench {}: --tokens and --format belong to linear and moe", name));
    }
    if (model ? !flags.queries.empty() : !depth && (!flags.depths.empty() || !flags.queries.empty())) {
      return usage_error(
          fmt::format("bench {}: --queries belongs to attention and index, --depth to these and model", name));
    }
  }
  BenchOptions options;
  options.threads = flags.threads;
  options.runs = flags.runs;
  options.tokens = flags.tokens;
  options.formats = flags.formats;
  options.queries = flags.queries;
  options.model = flags.model;
  options.prompt = flags.prompt;
  options.gen = flags.gen;
  options.steps = flags.steps;
  options.sessions = flags.sessions;
  options.dir = flags.dir;
  options.expert_percent = flags.expert_percent;
  options.kv_percent = flags.kv_percent;
  for (const std::string& format : flags.formats) {
    const Result<WeightFormat> parsed = parse_weight_format(format);
    if (!parsed.ok()) return usage_error(parsed.status().message());
  }
  for (const std::string& text : flags.depths) {
    const Result<int64_t> depth = parse_depth(text);
    if (!depth.ok()) return usage_error(depth.status().message());
    options.depths.push_back(*depth);
  }
  if (!flags.model.empty() && options.depths.empty()) options.depths = {0, 2048, 8192};
  std::FILE* file = stdout;
  if (!flags.out.empty()) {
    file = std::fopen(flags.out.c_str(), "w");
    if (file == nullptr) return report(io_error(fmt::format("{}: cannot be written", flags.out)));
  }
  // A file holds JSON rows, whatever is printed.
  Globals to_file = globals;
  to_file.json = globals.json || !flags.out.empty();
  bool written = true;
  install_interrupt_handler();
  auto context = BenchContext::create(options, to_file, [&](const std::string& line) {
    written = std::fprintf(file, "%s\n", line.c_str()) >= 0 && std::fflush(file) == 0 && written;
  });
  int code = 0;
  if (!context.ok()) {
    code = report(context.status());
  } else {
    print_machine(**context);
    for (const Bench* bench : chosen) {
      const Status status = bench->run(**context);
      if (interrupted()) code = 130;
      if (!status.ok() && code == 0) code = report(status);
      if (code != 0) break;
    }
  }
  if (file != stdout && std::fclose(file) != 0) written = false;
  if (!written && code == 0) code = report(io_error(fmt::format("{}: rows could not be written", flags.out)));
  return code;
}

}  // namespace

Runner add_bench(CLI::App& app, const Globals& globals) {
  auto flags = std::make_shared<Flags>();
  std::string which = "one of these, or compare with two files of rows:";
  for (const Bench& b : kBenches) which += fmt::format("\n  {:<10} {}", b.name, b.what);
  app.add_option("name", flags->words, which);
  app.add_flag("--all", flags->all, "every bench that needs no checkpoint");
  app.add_option("--out", flags->out, "write JSON rows to a file");
  app.add_option("--threads", flags->threads, "worker threads (default: one a core we may use)")
      ->check(CLI::Range(1, 4096));
  app.add_option("--runs", flags->runs, "timed runs of each row")->check(CLI::Range(7, 1000))->capture_default_str();
  app.add_option("--tokens", flags->tokens, "linear, moe: rows of a call")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  app.add_option("--format", flags->formats, "linear, moe: mxfp8, nvfp4, bf16, mxfp4, f32")->delimiter(',');
  app.add_option("--depth", flags->depths, "attention, index: positions before the queries, such as 8K,128K")
      ->delimiter(',');
  app.add_option("--model", flags->model, "model, tiers: the checkpoint");
  app.add_option("--dir", flags->dir, "disk: a folder on the drive to measure");
  app.add_option("--session", flags->sessions, "tiers: a short and a long session of this checkpoint")->delimiter(',');
  app.add_option("--expert-percent", flags->expert_percent, "tiers: experts in memory, of all")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option("--kv-percent", flags->kv_percent, "tiers: K and V of sparse layers in memory, of all")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option("--prompt", flags->prompt, "model: tokens of a prefill")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  app.add_option("--gen", flags->gen, "model: tokens decoded")->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  app.add_option("--step", flags->steps, "model: tokens of a step, such as 1,4")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  app.add_option("--queries", flags->queries, "attention, index: rows of a call")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  return [flags, &globals] { return run_benches(*flags, globals); };
}

}  // namespace firn::tools
