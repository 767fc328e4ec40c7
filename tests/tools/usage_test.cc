// Wrong use of the command line, and options whose feature is not built: exit code 2 and the word that was wrong.
#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

void wrong(const std::vector<std::string>& arguments, const std::vector<std::string>& words) {
  const Ran ran = run_firn(arguments);
  INFO("stderr: " << ran.err);
  CHECK(ran.code == 2);
  CHECK(ran.out.empty());
  for (const std::string& word : words) {
    INFO("expected in the message: " << word);
    CHECK(ran.err.find(word) != std::string::npos);
  }
}

std::vector<std::string> run_with(const std::vector<std::string>& more) {
  std::vector<std::string> all = {"run", "--model", nano_path("nano-bf16"), "--prompt", "x"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST_CASE("unknown words and options are refused with the nearest name") {
  wrong({"rnu"}, {"unknown command 'rnu'", "run"});
  wrong({"run", "--modle", "x", "--prompt", "y"}, {"'--modle'", "--model", "firn help run"});
  wrong(run_with({"--max-token", "5"}), {"'--max-token'", "--max-tokens"});
  wrong(run_with({"--greedi"}), {"'--greedi'", "--greedy"});
  wrong({"inspekt", "x"}, {"inspect"});
  wrong({"help", "rnu"}, {"rnu", "run"});
  wrong({"run", "--prompt", "x"}, {"--model"});
  wrong({"run", "--model", nano_path("nano-bf16")}, {"no prompt", "--prompt"});
}

TEST_CASE("an option whose feature is not built is refused by name, never ignored") {
  const std::vector<std::vector<std::string>> later = {
      {"--vram", "1GiB"}, {"--kv-vram", "1GiB"}, {"--trace", "t.bin"}, {"--kv-dtype", "fp8"}};
  for (const auto& option : later) wrong(run_with(option), {option[0], "not in this version"});
  wrong(run_with({"--device", "cuda:0"}), {"--device cuda:0"});
}

TEST_CASE("wrong values name the option and what it takes") {
  wrong(run_with({"--max-tokens", "0"}), {"--max-tokens", "1 or more"});
  wrong(run_with({"--max-tokens", "many"}), {"--max-tokens", "many"});
  wrong(run_with({"--threads", "0"}), {"--threads"});
  wrong(run_with({"--ctx", "-5"}), {"--ctx"});
  wrong(run_with({"--ram", "lots"}), {"--ram", "lots"});
  wrong(run_with({"--ram", "0"}), {"--ram"});
  wrong(run_with({"--temperature", "-1"}), {"--temperature"});
  wrong(run_with({"--top-p", "2"}), {"--top-p"});
  wrong(run_with({"--kv-dtype", "f16"}), {"--kv-dtype f16", "bf16 or f32"});
  wrong(run_with({"--device", "tpu"}), {"--device tpu", "auto, cpu or cuda:N"});
  wrong(run_with({"--prefetch", "some"}), {"--prefetch some", "auto"});
  wrong(run_with({"--io", "mmap"}), {"--io mmap", "auto, preads"});
  wrong(run_with({"--expert-policy", "random"}), {"--expert-policy random", "frequency, lru"});
  wrong(run_with({"--kv-ram", "much"}), {"--kv-ram", "much"});
  wrong(run_with({"--expert-ram", "-1"}), {"--expert-ram"});
  wrong(run_with({"--kv-disk", "x"}), {"--kv-disk"});
  wrong(run_with({"--thinking", "hard"}), {"--thinking hard", "enabled, disabled or adaptive"});
  wrong(run_with({"--stop", ""}), {"--stop"});
}

TEST_CASE("options that contradict each other") {
  wrong(run_with({"--tokens", "ids.json"}), {"--prompt", "--tokens"});
  wrong(run_with({"--messages", "m.json"}), {"--prompt", "--messages"});
  wrong(run_with({"--prompt-file", "p.txt"}), {"--prompt-file"});
  wrong(run_with({"--raw", "--system", "s"}), {"--raw", "--system"});
  wrong(run_with({"--greedy", "--temperature", "1"}), {"--greedy", "--temperature"});
}

TEST_CASE("help opens with an example and lists what there is") {
  const Ran all = run_firn({"help"});
  CHECK(all.code == 0);
  CHECK(all.out.rfind("Example:\n  firn run --model", 0) == 0);
  CHECK(has_all(all.out, {"run ", "inspect ", "tokenize ", "render ", "synth ", "doctor ", "bench "}));
  const Ran run = run_firn({"help", "run"});
  CHECK(run.out.rfind("Example:\n  firn run --model", 0) == 0);
  CHECK(
      has_all(run.out, {"Usage: firn run", "--prompt TEXT", "--ram SIZE", "refused by this version", "--kv-dir DIR"}));
  CHECK(run_firn({"run", "--help"}).out == run.out);
  CHECK(run_firn({"--help"}).out == all.out);
  const Ran none = run_firn({});
  CHECK(none.code == 2);
  CHECK(none.out.empty());
  CHECK(none.err == all.out);
  CHECK(has_all(run_firn({"--version"}).out, {"firn 0.", "build: ", "ISA paths: ", "CUDA: "}));
}

}  // namespace
}  // namespace firn::test
