// What the files of the `firn` program share: one file a subcommand (cmd_NAME.cc), each with one add_NAME function.
//
// add_NAME puts the options on the subcommand and returns the function that runs it; its int is the exit code: 0 done,
// 1 failed, 2 wrong use, 130 interrupted. With --json exactly one JSON object (or JSON lines) goes to stdout and
// nothing else; everything for people goes to stderr.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "runtime/status.h"

namespace CLI {
class App;
}

namespace firn::tools {

struct Globals {
  bool json = false;
  bool quiet = false;
  std::string log_level = "info";
};

using Runner = std::function<int()>;

// Prints "firn: message" to stderr; returns the exit code that fits the status: 130 for kCancelled, else 1.
int report(const Status& status);
// Prints "firn: message" to stderr and returns 2: wrong use, or an option whose feature this version lacks.
int usage_error(const std::string& message);

// The closest of `names` when it is close enough to be what was meant, else empty.
std::string nearest(const std::string& word, const std::vector<std::string>& names);

// Set by the first Ctrl-C; the second ends the program at once (files are safe by construction).
std::atomic<bool>& interrupted();
void install_interrupt_handler();

Runner add_run(CLI::App& app, const Globals& globals);
Runner add_inspect(CLI::App& app, const Globals& globals);
Runner add_tokenize(CLI::App& app, const Globals& globals);
Runner add_render(CLI::App& app, const Globals& globals);
Runner add_session(CLI::App& app, const Globals& globals);
Runner add_synth(CLI::App& app, const Globals& globals);
Runner add_pack(CLI::App& app, const Globals& globals);
Runner add_doctor(CLI::App& app, const Globals& globals);
Runner add_bench(CLI::App& app, const Globals& globals);

}  // namespace firn::tools
