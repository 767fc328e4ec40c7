// Sessions on disk as a user meets them: asked twice, looked after, damaged, locked, killed.
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

using nlohmann::json;

std::vector<std::string> ask(const std::vector<std::string>& more, const char* document = "docs/doc-16k.txt") {
  std::vector<std::string> all = {"run",
                                  "--model",
                                  nano_path("nano-bf16"),
                                  "--file",
                                  nano_path(document),
                                  "--prompt",
                                  "What is it?",
                                  "--greedy",
                                  "--ignore-eos",
                                  "--max-tokens",
                                  "20",
                                  "--json"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

json good(const std::vector<std::string>& arguments) {
  const Ran ran = run_firn(arguments);
  INFO("stderr: " << ran.err);
  REQUIRE(ran.code == 0);
  return json::parse(ran.out);
}

void refused(const std::vector<std::string>& arguments, int code, const std::string& words) {
  const Ran ran = run_firn(arguments);
  INFO("stderr: " << ran.err);
  CHECK(ran.code == code);
  CHECK(ran.out.empty());
  CHECK(ran.err.find(words) != std::string::npos);
}

TEST_CASE("tiers on the command line give the answer of a run without them, and count") {
  TempFolder temp;
  const json near = good(ask({}));
  const json far = good(ask({"--kv-ram", "5MiB", "--expert-ram", "1MiB", "--kv-dir", temp.path(), "--io", "preads"}));
  CHECK(far.at("logits_xxh3") == near.at("logits_xxh3"));
  CHECK(near.at("tiers").at("kv").at("far_blocks") == 0);
  for (const char* tier : {"expert", "kv"}) CHECK(far.at("tiers").at(tier).at("demand_bytes").get<int64_t>() > 0);
  CHECK(far.at("tiers").at("kv").at("far_blocks").get<int64_t>() > 0);
  CHECK(temp.entries() == 0);
  refused(ask({"--kv-ram", "1KiB"}), 1, "expected at least");
  refused(ask({"--expert-ram", "1KiB"}), 1, "at least two slots");
  refused(ask({"--kv-ram", "5MiB", "--kv-dir", temp / "absent"}), 1, "absent");
  refused(ask({"--kv-ram", "5MiB", "--kv-dir", temp.path(), "--kv-disk", "1MiB"}), 1, "--kv-disk");
  CHECK(temp.entries() == 0);
}

TEST_CASE("a session answers the second time without reading the document again, and is looked after") {
  TempFolder temp;
  const std::string dir = temp / "s";
  const json first = good(ask({"--session", dir})), second = good(ask({"--session", dir}));
  CHECK(second.at("logits_xxh3") == first.at("logits_xxh3"));
  CHECK(first.at("usage").at("cached_tokens") == 0);
  CHECK(second.at("usage").at("cached_tokens").get<int64_t>() > 16000);

  const json info = good({"session", "info", dir, "--json"});
  CHECK(info.at("tokens") == first.at("usage").at("prompt_tokens").get<int64_t>() + 19);
  CHECK(info.at("steps_to_replay") == 0);
  CHECK(good({"session", "list", temp.path(), "--json"}).at("sessions").size() == 1);
  CHECK(good({"session", "verify", dir, "--json"}).at("problems").empty());
  good({"session", "compact", dir, "--all", "--json"});
  CHECK(good({"session", "verify", dir, "--json"}).at("problems").empty());
  good({"session", "export", dir, "--out", temp / "copy", "--json"});
  for (const std::string& d : {dir, temp / "copy"}) {
    CHECK(good(ask({"--session", d, "--kv-ram", "5MiB"})).at("logits_xxh3") == first.at("logits_xxh3"));
  }
  // Made by one process, spread over two folders.
  const std::string wide = temp / "wide";
  std::filesystem::create_directory(temp / "drive");
  good(ask({"--session", wide, "--kv-dir", temp / "drive"}));
  CHECK(good({"session", "info", wide, "--json"}).at("dirs").size() == 2);
  CHECK(good(ask({"--session", wide})).at("logits_xxh3") == first.at("logits_xxh3"));
  std::filesystem::rename(temp / "drive", temp / "gone");
  refused(ask({"--session", wide}), 1, "a drive of this session is missing");
}

TEST_CASE("what is no session, or another model's, or damaged, is refused by name and left alone") {
  TempFolder temp;
  const std::string dir = temp / "s";
  good(ask({"--session", dir}, "docs/doc-2k.txt"));
  refused(ask({"--session", dir, "--precise"}, "docs/doc-2k.txt"), 1, "another model or setting");
  auto other = ask({"--session", dir}, "docs/doc-2k.txt");
  other[2] = nano_path("nano-mxfp8");
  refused(other, 1, "another model or setting");

  temp.write("mine/notes.txt", "text");
  refused(ask({"--session", temp / "mine"}, "docs/doc-2k.txt"), 1, "not a session");
  refused({"session", "info", temp / "mine"}, 1, "not a session");
  CHECK(std::distance(std::filesystem::directory_iterator(temp / "mine"), std::filesystem::directory_iterator()) == 1);
  refused({"session", "info", temp / "absent"}, 1, "absent");
  refused({"session", "verify"}, 2, "session");
  refused({"session", "wash", dir}, 2, "wash");

  // One byte in the middle: verify names it, and a run that needs the block says so instead of answering.
  const std::string segment = dir + "/00000001.seg";
  std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(200000);
  const char byte = static_cast<char>(file.get());
  file.seekp(200000);
  file.put(static_cast<char>(byte ^ 16));
  file.close();
  const Ran verify = run_firn({"session", "verify", dir, "--json"});
  CHECK(verify.code == 1);
  const json problems = json::parse(verify.out).at("problems");
  REQUIRE(problems.size() == 1);
  CHECK(problems[0].get<std::string>().find("expected checksum") != std::string::npos);
}

// FIRN_KILLS in the environment asks for more than a test has time for.
TEST_CASE("kill -9 at any moment: the session opens again and gives the same bits") {
  const char* asked = std::getenv("FIRN_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : 12;
  const json whole = good(ask({}));
  std::mt19937 random(static_cast<unsigned>(kills));
  TempFolder temp;
  std::string dir;
  int64_t interrupted = 0, finished = 0;
  for (int i = 0; i < kills; ++i) {
    if (i % 4 == 0) dir = temp / std::to_string(i);  // a new one; the others go on where the last left off
    const bool small = i % 2 != 0;
    auto arguments = ask({"--session", dir, "--max-tokens", "200"});
    if (small) arguments.insert(arguments.end(), {"--kv-ram", "5MiB", "--expert-ram", "1MiB"});
    {
      Child child(arguments, {});
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 2500));
      child.kill();
      const Ran ran = child.wait();
      finished += ran.code == 0;
    }
    if (!std::filesystem::exists(dir + "/lock")) continue;
    const Ran info = run_firn({"session", "info", dir, "--json"});
    if (info.code == 0) interrupted += json::parse(info.out).at("interrupted_layers").get<int64_t>() > 0;
    if (i % 4 != 3) continue;
    INFO("after kill " << i << " of " << kills);
    CHECK(good(ask({"--session", dir})).at("logits_xxh3") == whole.at("logits_xxh3"));
    CHECK(good({"session", "verify", dir, "--json"}).at("problems").empty());
  }
  CHECK(finished < kills);  // some were really killed
  WARN(kills << " kills: " << kills - finished << " before the end, " << interrupted << " inside a prompt's layers");
}

}  // namespace
}  // namespace firn::test
