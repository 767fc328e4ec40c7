// `firn pack` as a user types it.
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

using nlohmann::json;

json run_json(const std::vector<std::string>& arguments) {
  const Ran ran = run_firn(arguments);
  INFO("stderr: " << ran.err);
  REQUIRE(ran.code == 0);
  return json::parse(ran.out);
}

json logits(const std::string& model) {
  return run_json({"run", "--model", model, "--json", "--greedy", "--thinking", "disabled", "--prompt", "Hello!",
                   "--max-tokens", "4"})
      .at("logits_xxh3");
}

TEST_CASE("A packed model answers with the same logits as its folder, and verify finds damage") {
  TempFolder temp;
  const std::string out = temp / "m.firn", folder = nano_path("nano-mxfp8");
  const json packed = run_json({"pack", folder, "--out", out, "--json"});
  CHECK(packed.at("bytes") == std::filesystem::file_size(out));
  CHECK(packed.at("experts") == 24);
  CHECK(packed.at("resumed_bytes") == 0);
  CHECK(packed.at("seconds").get<double>() > 0);
  CHECK(packed.at("gb_s").get<double>() > 0);
  CHECK(packed.at("model_hash").get<std::string>().size() == 32);
  CHECK(logits(out) == logits(folder));

  const json inspected = run_json({"inspect", out, "--json"});
  CHECK(inspected.at("loadable") == true);
  CHECK(inspected.at("packed").at("model_hash") == packed.at("model_hash"));
  CHECK(inspected.at("packed").at("extents") == packed.at("extents"));
  CHECK(inspected.at("bytes") == run_json({"inspect", folder, "--json"}).at("bytes"));
  CHECK(run_firn({"tokenize", "--model", out, "a"}).out == run_firn({"tokenize", "--model", folder, "a"}).out);

  const json checked = run_json({"pack", "--verify", out, "--json"});
  CHECK(checked.at("undamaged") == true);
  CHECK(checked.at("bytes") == packed.at("bytes"));
  std::string bytes = get_file(out);
  bytes[bytes.size() / 2] ^= 1;
  put_file(out, bytes);
  const Ran damaged = run_firn({"pack", "--verify", out});
  CHECK(damaged.code == 1);
  CHECK(damaged.out.empty());
  CHECK(has_all(damaged.err, {out, "layer", "expected checksum", "found"}));
  CHECK(run_firn({"run", "--model", out, "--prompt", "Hello!"}).code == 1);
}

TEST_CASE("pack: wrong use is 2, a file in the way is 1, --force replaces it") {
  TempFolder temp;
  const std::string out = temp / "m.firn", folder = nano_path("nano-bf16");
  CHECK(run_firn({"pack"}).code == 2);
  CHECK(run_firn({"pack", folder}).code == 2);
  CHECK(run_firn({"pack", folder, "--out", out, "--verify", out}).code == 2);
  const Ran unknown = run_firn({"pack", folder, "--out", out, "--experts", "q4_k"});
  CHECK(unknown.code == 2);
  CHECK(has_all(unknown.err, {"q4_k", "mxfp4"}));
  CHECK_FALSE(std::filesystem::exists(out));
  put_file(out, "mine");
  const Ran refused = run_firn({"pack", folder, "--out", out});
  CHECK(refused.code == 1);
  CHECK(has_all(refused.err, {out, "--force"}));
  CHECK(run_firn({"pack", "--verify", out}).code == 1);
  CHECK(run_firn({"pack", folder, "--out", out, "--force", "--experts", "nvfp4", "--quiet"}).code == 0);
  CHECK(run_firn({"pack", "--verify", out}).code == 0);
  CHECK(temp.entries() == 1);
  CHECK(has_all(run_firn({"help"}).out, {"pack"}));
}

}  // namespace
}  // namespace firn::test
