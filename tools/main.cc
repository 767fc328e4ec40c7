// The `firn` program: parses the command line, runs one subcommand, turns its outcome into an exit code.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>

#include "cpu/isa.h"
#include "gpu/gpu.h"
#include "tools/cli.h"

namespace firn::tools {

int report(const Status& status) {
  std::fprintf(stderr, "firn: %s\n", status.message().c_str());
  return status.code() == Code::kCancelled ? 130 : 1;
}

int usage_error(const std::string& message) {
  std::fprintf(stderr, "firn: %s\n", message.c_str());
  return 2;
}

std::atomic<bool>& interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}

void install_interrupt_handler() {
  struct sigaction action = {};
  action.sa_handler = [](int) {
    if (interrupted().exchange(true)) _exit(130);
  };
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

namespace {

constexpr const char* kVersion = "0.1.0";

struct Command {
  const char* name;
  const char* example;
  const char* purpose;
  Runner (*add)(CLI::App&, const Globals&);
};

const Command kCommands[] = {
    {"run", "firn run --model DIR --file report.txt --prompt \"Who signed it?\"",
     "Answers one prompt, about a document or not; chats when there is no prompt and stdin is a terminal.", add_run},
    {"inspect", "firn inspect DIR", "Says what a checkpoint holds and would need, reading its headers only.",
     add_inspect},
    {"tokenize", "firn tokenize --model DIR \"some text\"", "Shows the tokens a text becomes, or the text of tokens.",
     add_tokenize},
    {"render", "firn render --model DIR --messages chat.json", "Shows the prompt a message list becomes.", add_render},
    {"synth", "firn synth --config config.json --out DIR --format mxfp8",
     "Makes a checkpoint of any size with seeded random weights.", add_synth},
    {"session", "firn session info DIR", "Looks after sessions on disk; makes one of any length for measurements.",
     add_session},
    {"pack", "firn pack DIR --out model.firn",
     "Puts a checkpoint into one file, one aligned and checksummed extent an expert; checks such files.", add_pack},
    {"doctor", "firn doctor", "Says what this machine gives, what is missing, what that costs and how to fix it.",
     add_doctor},
    {"bench", "firn bench moe --tokens 1,32", "Measures kernels beside the limits of this machine.", add_bench},
};

std::string version_text() {
  std::string isas;
  for (const std::string& isa : cpu::compiled_isas()) isas += (isas.empty() ? "" : ", ") + isa;
#if defined(FIRN_ASAN)
  const char* build = "address and undefined sanitizers";
#elif defined(FIRN_TSAN)
  const char* build = "thread sanitizer";
#elif defined(__OPTIMIZE__)
  const char* build = "optimised";
#else
  const char* build = "not optimised";
#endif
  return fmt::format("firn {}\nbuild: {} {}, {}\nISA paths: {}\nCUDA: {}", kVersion,
#if defined(__clang__)
                     "clang " __clang_version__,
#else
                     "g++ " __VERSION__,
#endif
                     "C++20", build, isas, gpu::built_with_cuda() ? "yes" : "no (" + gpu::why_none() + ")");
}

void add_common(CLI::App& app, Globals* globals) {
  app.add_flag("--json", globals->json, "one JSON object on stdout; everything else goes to stderr");
  app.add_flag("--quiet", globals->quiet, "no progress");
  app.add_option("--log-level", globals->log_level, "error, warn, info or debug")
      ->check(CLI::IsMember({"error", "warn", "info", "debug"}))
      ->capture_default_str();
}

int parse_failure(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* where = &app;
  for (const CLI::App* sub : app.get_subcommands()) where = sub;
  std::string message = error.what();
  // A missing required option is often a misspelt one: the words nobody knows come first.
  const std::vector<std::string> extras = where->remaining(true);
  if (!extras.empty()) {
    std::vector<std::string> names;
    for (const CLI::Option* option : where->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    if (where == &app) {
      for (const Command& command : kCommands) names.push_back(command.name);
    }
    const std::string word = extras.front().substr(0, extras.front().find('='));
    const std::string close = nearest(word, names);
    message = fmt::format("unknown {} '{}'{}",
                          word.rfind("-", 0) == 0 ? "option"
                          : where == &app         ? "command"
                                                  : "word",
                          word, close.empty() ? "" : fmt::format(" (did you mean {}?)", close));
  }
  const std::string name = where == &app ? "" : " " + where->get_name();
  return usage_error(fmt::format("{}. See `firn help{}`.", message, name));
}

int run_main(int argc, char** argv) {
  install_interrupt_handler();
  Globals globals;
  CLI::App app(
      "Example:\n  firn run --model DIR --file report.txt --prompt \"Who signed it?\"\n\n"
      "firn runs MiniMax-M3 on one machine and measures what that machine can do.");
  app.name("firn");
  app.require_subcommand(0, 1);
  app.set_help_flag("-h,--help", "this text");
  add_common(app, &globals);
  bool version = false;
  app.add_flag("--version", version, "version, build, instruction sets, CUDA");

  std::map<const CLI::App*, Runner> runners;
  for (const Command& command : kCommands) {
    CLI::App* sub =
        app.add_subcommand(command.name, fmt::format("Example:\n  {}\n\n{}", command.example, command.purpose));
    sub->set_help_flag("-h,--help", "this text");
    runners[sub] = command.add(*sub, globals);
    add_common(*sub, &globals);
  }
  std::string topic;
  CLI::App* help = app.add_subcommand("help", "Example:\n  firn help run\n\nHelp on a command.");
  help->add_option("COMMAND", topic);
  // The list of commands shows purposes, the help of one command starts with its example.
  app.footer([&] {
    std::string list = "Commands:\n";
    for (const Command& command : kCommands) list += fmt::format("  {:<9} {}\n", command.name, command.purpose);
    return list + "\n`firn help COMMAND` shows a command's options.";
  });
  class Formatter : public CLI::Formatter {
   public:
    std::string make_subcommands(const CLI::App*, CLI::AppFormatMode) const override { return ""; }
  };
  app.formatter(std::make_shared<Formatter>());

  // CLI11 answers help() with that of the chosen subcommand, so the overview is taken before there is one.
  const std::string overview = app.help();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    const CLI::App* where = &app;
    for (const CLI::App* sub : app.get_subcommands()) where = sub;
    std::fputs(where == &app ? overview.c_str() : where->help("firn").c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    return parse_failure(app, error);
  }
  if (version) {
    std::puts(version_text().c_str());
    return 0;
  }
  if (help->parsed()) {
    if (topic.empty()) {
      std::fputs(overview.c_str(), stdout);
      return 0;
    }
    std::vector<std::string> names;
    for (const Command& command : kCommands) {
      names.push_back(command.name);
      if (topic == command.name) {
        std::fputs(app.get_subcommand(topic)->help("firn").c_str(), stdout);
        return 0;
      }
    }
    const std::string close = nearest(topic, names);
    return usage_error(fmt::format("unknown command '{}'{}. See `firn help`.", topic,
                                   close.empty() ? "" : " (did you mean " + close + "?)"));
  }
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  if (chosen.empty()) {
    std::fputs(overview.c_str(), stderr);
    return 2;
  }
  return runners.at(chosen.front())();
}

}  // namespace
}  // namespace firn::tools

int main(int argc, char** argv) { return firn::tools::run_main(argc, argv); }
