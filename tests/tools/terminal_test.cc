// What a person at a terminal meets: the chat, progress, and Ctrl-C.
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

// Skipped, not passed, where the system has none.
bool no_terminals() {
  if (have_terminals()) return false;
  WARN("skipped: no pseudo-terminal can be had here (is /dev/pts mounted?)");
  return true;
}

// A prompt that takes seconds to read: the 16K document, several times.
std::string long_document(const TempFolder& temp) {
  const std::string text = get_file(nano_path("docs/doc-16k.txt"));
  return temp.write("long.txt", text + text + text + text);
}

TEST_CASE("a chat answers, reads documents, forgets, and stays when an answer is stopped") {
  if (no_terminals()) return;
  TempFolder temp;
  RunOptions options;
  options.terminal = true;
  Child chat({"run", "--model", nano_path("nano-bf16"), "--thinking", "disabled", "--greedy"}, options);
  REQUIRE(chat.read_until("> "));
  chat.write("/file " + nano_path("docs/doc-2k.txt") + "\n");
  REQUIRE(chat.read_until("will precede your next message"));
  chat.write("What is the secret word of Flora Kendall?\n");
  REQUIRE(chat.read_until("The secret word of Flora Kendall is Opal."));
  chat.write("What is the secret word of Vlad Garcia?\n");
  CHECK(chat.read_until("The secret word of Vlad Garcia is"));
  chat.write("/reset\n");
  REQUIRE(chat.read_until("(new conversation)"));
  chat.write("/file " + (temp / "nowhere.txt") + "\n");
  CHECK(chat.read_until("no such file"));
  chat.write("/fiel x\n");
  CHECK(chat.read_until("no command"));

  chat.write("/file " + long_document(temp) + "\n");
  REQUIRE(chat.read_until("will precede your next message"));
  chat.write("What is it?\n");
  REQUIRE(chat.read_until("reading the prompt"));
  chat.interrupt();
  REQUIRE(chat.read_until("(stopped)"));
  chat.write("/reset\n");
  REQUIRE(chat.read_until("(new conversation)"));
  chat.write("Hello!\n");
  CHECK(chat.read_until("How can I help you?"));
  chat.write("/quit\n");
  const Ran ran = chat.wait();
  CHECK(ran.code == 0);
  CHECK(ran.out.find("\xEF\xBF\xBD") == std::string::npos);  // no character was cut
}

TEST_CASE("Ctrl-C while the prompt is read ends with code 130 and says how far it came") {
  TempFolder temp;
  const std::string document = long_document(temp);
  const std::vector<std::string> arguments = {
      "run", "--model", nano_path("nano-bf16"), "--file", document, "--prompt", "Hello!", "--json"};
  SECTION("in a log: plain lines") {
    Child child(arguments, {});
    REQUIRE(child.read_until("reading the prompt"));
    child.interrupt();
    const Ran ran = child.wait();
    INFO(ran.err);
    CHECK(ran.code == 130);
    CHECK(has_all(ran.err, {"interrupted after", "prompt tokens", "0 answer tokens"}));
    CHECK(ran.err.find('\r') == std::string::npos);
    CHECK(ran.err.find('\x1b') == std::string::npos);
    const auto j = nlohmann::json::parse(ran.out);
    CHECK(j.at("finish_reason") == "cancelled");
    CHECK(j.at("token_ids").empty());
  }
  SECTION("on a terminal: a bar that is redrawn") {
    if (no_terminals()) return;
    RunOptions options;
    options.terminal_err = true;
    Child child(arguments, options);
    REQUIRE(child.read_until("reading the prompt"));
    REQUIRE(child.read_until("%"));
    REQUIRE(child.read_until("\r"));
    child.interrupt();
    const Ran ran = child.wait();
    CHECK(ran.code == 130);
    CHECK(has_all(ran.err, {"left", "interrupted after"}));
  }
  SECTION("twice: at once") {
    Child child(arguments, {});
    REQUIRE(child.read_until("reading the prompt"));
    child.interrupt();
    child.interrupt();
    CHECK(child.wait().code == 130);
  }
}

TEST_CASE("Ctrl-C while standard input is read") {
  if (no_terminals()) return;
  RunOptions options;
  options.terminal = true;
  Child child({"run", "--model", nano_path("nano-bf16"), "--prompt-file", "-", "--quiet"}, options);
  child.write("half a question\n");
  // The terminal echoes before the program is there to be interrupted, and the program says nothing while it reads.
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  child.write("\x03");
  const Ran ran = child.wait();
  INFO(ran.out);
  CHECK(ran.code == 130);
  CHECK(has_all(ran.out, {"interrupted while reading standard input"}));
}

}  // namespace
}  // namespace firn::test
