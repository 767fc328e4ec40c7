// `firn doctor` as a user runs it: what must hold on every machine.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/topology.h"
#include "tests/support/catch.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

Ran doctor(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "doctor");
  return run_firn(arguments);
}

TEST_CASE("doctor --json is one object whose checks are complete and agree with the topology") {
  const Ran ran = doctor({"--json", "--dir", "/tmp", "--dir", "/nonexistent-folder"});
  REQUIRE(ran.code == 0);
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  for (const char* name :
       {"CPU", "instructions", "cores", "NUMA", "memory", "huge pages", "memlock", "io_uring", "O_DIRECT", "GPU"}) {
    CAPTURE(name);
    const auto& checks = json.at("checks");
    CHECK(std::any_of(checks.begin(), checks.end(), [&](const auto& c) { return c.at("name") == name; }));
  }
  for (const auto& check : json.at("checks")) {
    CAPTURE(check.dump());
    CHECK_FALSE(check.at("found").get<std::string>().empty());
    if (check.at("state") == "missing") {
      CHECK_FALSE(check.at("effect").get<std::string>().empty());
      CHECK_FALSE(check.at("fix").get<std::string>().empty());
    } else {
      CHECK(check.at("state") == "ok");
    }
  }
  const Result<Topology> topology = Topology::detect();
  REQUIRE(topology.ok());
  CHECK(json.at("cores_allowed") == topology->cores_allowed);
  CHECK(json.at("numa").size() == topology->nodes.size());
  CHECK(json.at("memory").at("usable_bytes").get<int64_t>() > 0);
  REQUIRE(json.at("folders").size() == 2);
  CHECK(json.at("folders")[0].at("size_bytes").get<int64_t>() > 0);
  CHECK(json.at("folders")[1].at("why") == "No such file or directory");
}

TEST_CASE("doctor tells a user what a missing thing costs and leaves no file behind") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "firn-doctor-test";
  std::filesystem::create_directory(folder);
  const Ran ran = doctor({"--dir", folder.string(), "--dir", "/nonexistent-folder"});
  CHECK(ran.code == 0);
  CHECK(ran.out.find("/nonexistent-folder  No such file or directory") != std::string::npos);
  CHECK(ran.out.find("effect: nothing can be kept or read here") != std::string::npos);
  CHECK(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST_CASE("doctor refuses a wrong option with exit code 2") { CHECK(doctor({"--dri", "/tmp"}).code == 2); }

}  // namespace
}  // namespace firn::test
