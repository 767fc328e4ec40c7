// --share-weights and doctor's list of shared weights, as a user types them.
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "storage/shared_segment.h"
#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

using nlohmann::json;

std::vector<std::string> hello(const std::string& folder) {
  return {"run",          "--model", nano_path("nano-bf16"), "--prompt",    "Hello!", "--greedy",
          "--max-tokens", "3",       "--share-weights",      "--share-dir", folder,   "--json"};
}

TEST_CASE("a second run attaches, doctor lists the weights while a chat uses them, and drops them") {
  if (access(storage::kSharedFolder, W_OK) != 0 || !storage::shared_room(storage::kSharedFolder).why_not.empty()) {
    WARN("no tmpfs at /dev/shm: not tested");
    return;
  }
  const TempFolder folder(storage::kSharedFolder);
  const auto doctor = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"doctor", "--share-dir", folder.path(), "--dir", "/tmp"});
    return run_firn(more);
  };
  CHECK(json::parse(doctor({"--json"}).out).at("shared_weights").empty());
  const Ran first = run_firn(hello(folder.path()));
  INFO(first.err);
  REQUIRE(first.code == 0);
  CHECK(has_all(first.err, {"shared for later runs (made in "}));
  const Ran second = run_firn(hello(folder.path()));
  INFO(second.err);
  REQUIRE(second.code == 0);
  CHECK(has_all(second.err, {"shared (attached in "}));
  CHECK(json::parse(first.out).at("logits_xxh3") == json::parse(second.out).at("logits_xxh3"));
  auto quiet = hello(folder.path());
  quiet.push_back("--quiet");
  CHECK(run_firn(quiet).err.empty());

  const json idle = json::parse(doctor({"--json"}).out);
  REQUIRE(idle.at("shared_weights").size() == 1);
  const json& segment = idle.at("shared_weights")[0];
  const std::string name = segment.at("name");
  CHECK(segment.at("model") == std::filesystem::canonical(nano_path("nano-bf16")).string());
  CHECK(segment.at("complete") == true);
  CHECK(segment.at("processes") == 0);
  CHECK(segment.at("bytes").get<int64_t>() > 7000000);
  CHECK(has_all(doctor({}).out, {name, "nano-bf16", "complete", "0 processes"}));

  const Ran unknown = doctor({"--drop-shared", "firn-x"});
  CHECK(unknown.code == 1);
  CHECK(has_all(unknown.err, {"firn-x", name}));
  if (have_terminals()) {
    RunOptions options;
    options.terminal = true;
    Child chat({"run", "--model", nano_path("nano-bf16"), "--greedy", "--max-tokens", "3", "--share-weights",
                "--share-dir", folder.path()},
               options);
    REQUIRE(chat.read_until("attached in"));
    CHECK(json::parse(doctor({"--json"}).out).at("shared_weights")[0].at("processes") == 1);
    const json dropped = json::parse(doctor({"--json", "--drop-shared", name}).out);
    REQUIRE(dropped.at("dropped").size() == 1);
    CHECK(dropped.at("dropped")[0].at("processes") == 1);
    CHECK(folder.entries() == 0);
    chat.write("Hello!\n");  // it goes on
    CHECK(chat.read_until("Hello"));
    chat.write("/quit\n");
    CHECK(chat.wait().code == 0);
    REQUIRE(run_firn(hello(folder.path())).code == 0);
  }
  const Ran all = doctor({"--drop-shared", "all"});
  CHECK(all.code == 0);
  CHECK(has_all(all.out, {"removed", name}));
  CHECK(folder.entries() == 0);
  CHECK(has_all(doctor({"--drop-shared", "all"}).out, {"nothing to remove"}));

  const Ran lonely = run_firn({"run", "--model", nano_path("nano-bf16"), "--prompt", "x", "--share-dir", "/tmp"});
  CHECK(lonely.code == 2);
  CHECK(has_all(lonely.err, {"--share-dir", "--share-weights"}));
}

}  // namespace
}  // namespace firn::test
