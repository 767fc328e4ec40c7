// Topology: described machines and fake /proc and cgroup folders; this machine only for what must always hold.
#include "runtime/topology.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "runtime/cgroup.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

namespace firn {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kMiB = int64_t{1} << 20;

// A described machine with 64 GiB available, no groups and no limits unless a test writes them.
struct Box {
  test::TempFolder tree;
  TopologyOptions options;

  explicit Box(const std::string& synthetic) {
    options.synthetic = synthetic;
    options.proc_root = tree.path() + "/proc";
    options.cgroup_root = tree.path() + "/cgroup";
    options.sys_root = tree.path() + "/sys";
    options.address_space_limit_bytes = -1;
    options.memlock_limit_bytes = -1;
    tree.write("proc/meminfo", "MemTotal:       100000000 kB\nMemFree: 5 kB\nMemAvailable:   67108864 kB\n");
  }
  Topology detect() const {
    Result<Topology> t = Topology::detect(options);
    INFO((t.ok() ? "" : t.status().message()));
    REQUIRE(t.ok());
    return std::move(t).value();
  }
  void group(const std::string& line) { tree.write("proc/self/cgroup", line + "\n"); }
};

constexpr const char* kOneNode = "pack:1 [numa(memory=64GB)] l3:1(size=32MB) core:4 pu:2";
constexpr const char* kTwoNodes = "pack:2 [numa(memory=64GB)] l3:1(size=32MB) core:4 pu:2";
constexpr const char* kEightNodes = "pack:2 group:4 [numa(memory=32GB)] core:2 pu:2";

TEST_CASE("one node: cores, threads of a core, caches, memory") {
  const Topology t = Box(kOneNode).detect();
  CHECK(t.packages == 1);
  CHECK(t.cores_present == 4);
  CHECK(t.cpus_present == 8);
  CHECK(t.cores_allowed == 4);
  CHECK(t.cpus_allowed == 8);
  CHECK(t.default_threads == 4);
  CHECK(t.core_cpus == std::vector<int>{0, 2, 4, 6});
  REQUIRE(t.nodes.size() == 1);
  CHECK(t.nodes[0].memory_bytes == 64'000'000'000);
  CHECK(t.nodes[0].cpus == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(t.nodes[0].cores == 4);
  CHECK(t.nodes[0].has_cpus);
  CHECK(t.nodes[0].allowed);
  CHECK(t.l3_caches == 1);
  CHECK(t.l3_bytes == 32'000'000);
  CHECK(t.memory_usable_bytes == 64 * kGiB);
  CHECK(t.memory_usable_reason.find("MemAvailable") != std::string::npos);
  CHECK(t.cpu_quota == 0);
  CHECK(t.memlock_bytes == -1);
}

TEST_CASE("two and eight nodes: cores in node order, fewer threads spread over all nodes") {
  const Topology two = Box(kTwoNodes).detect();
  REQUIRE(two.nodes.size() == 2);
  CHECK(two.packages == 2);
  CHECK(two.core_cpus == std::vector<int>{0, 2, 4, 6, 8, 10, 12, 14});
  CHECK(two.nodes[1].cpus == std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15});
  CHECK(two.cpus_for(8) == two.core_cpus);
  CHECK(two.cpus_for(2) == std::vector<int>{0, 8});
  CHECK(two.cpus_for(4) == std::vector<int>{0, 4, 8, 12});
  CHECK(two.cpus_for(9).empty());
  CHECK(two.cpus_for(0).empty());
  CHECK(two.l3_caches == 2);
  CHECK(two.memory_present_bytes == 128'000'000'000);

  const Topology eight = Box(kEightNodes).detect();
  REQUIRE(eight.nodes.size() == 8);
  CHECK(eight.cores_allowed == 16);
  CHECK(eight.default_threads == 16);
  CHECK(eight.cpus_for(8) == std::vector<int>{0, 4, 8, 12, 16, 20, 24, 28});
  for (const NumaNode& node : eight.nodes) CHECK(node.cores == 2);
  const std::vector<int> some = eight.cpus_for(11);
  CHECK(std::set<int>(some.begin(), some.end()).size() == 11);
}

// Two nodes of one package; node 1 is memory without processors, with the CPU set given.
std::string xml_with_memory_node(const std::string& cpuset) {
  const std::string sets = " cpuset=\"0x3\" complete_cpuset=\"0x3\" ";
  std::string xml =
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology "
      "version=\"2.0\">\n"
      "<object type=\"Machine\" os_index=\"0\"" +
      sets +
      "allowed_cpuset=\"0x3\" nodeset=\"0x3\" complete_nodeset=\"0x3\" "
      "allowed_nodeset=\"0x3\" gp_index=\"1\">\n"
      "<object type=\"NUMANode\" os_index=\"0\"" +
      sets +
      "nodeset=\"0x1\" complete_nodeset=\"0x1\" gp_index=\"2\" "
      "local_memory=\"17179869184\"/>\n"
      "<object type=\"NUMANode\" os_index=\"1\" cpuset=\"" +
      cpuset + "\" complete_cpuset=\"" + cpuset +
      "\" nodeset=\"0x2\" complete_nodeset=\"0x2\" gp_index=\"3\" local_memory=\"274877906944\"/>\n"
      "<object type=\"Package\" os_index=\"0\"" +
      sets + "nodeset=\"0x3\" complete_nodeset=\"0x3\" gp_index=\"4\">\n";
  for (int core = 0; core < 2; ++core) {
    const std::string set = core == 0 ? "0x1" : "0x2", index = std::to_string(core);
    const std::string rest = " os_index=\"" + index + "\" cpuset=\"" + set + "\" complete_cpuset=\"" + set +
                             "\" nodeset=\"0x3\" complete_nodeset=\"0x3\" gp_index=\"";
    xml += "<object type=\"Core\"" + rest + std::to_string(10 + core) + "\"><object type=\"PU\"" + rest +
           std::to_string(20 + core) + "\"/></object>\n";
  }
  return xml + "</object></object></topology>\n";
}

TEST_CASE("a node without processors counts as memory, never as a place for threads") {
  for (const std::string& cpuset : {std::string("0x0"), std::string("0x3")}) {
    Box box("");
    box.options.xml = xml_with_memory_node(cpuset);
    CAPTURE(cpuset);
    const Topology t = box.detect();
    REQUIRE(t.nodes.size() == 2);
    CHECK(t.nodes[0].has_cpus);
    CHECK(t.nodes[0].cpus == std::vector<int>{0, 1});
    CHECK(t.nodes[1].os_index == 1);
    CHECK_FALSE(t.nodes[1].has_cpus);
    CHECK(t.nodes[1].cpus.empty());
    CHECK(t.nodes[1].cores == 0);
    CHECK(t.nodes[1].memory_bytes == 256 * kGiB);
    CHECK(t.core_cpus == std::vector<int>{0, 1});
    CHECK(t.memory_present_bytes == 272 * kGiB);
  }
}

TEST_CASE("affinity and CPU sets leave a part of the machine") {
  Box box(kTwoNodes);
  box.options.affinity = std::vector<int>{1, 2, 3, 8, 9, 14};
  Topology t = box.detect();
  CHECK(t.cores_present == 8);
  CHECK(t.cores_allowed == 4);  // cores of CPUs 1; 2,3; 8,9; 14
  CHECK(t.cpus_allowed == 6);
  CHECK(t.core_cpus == std::vector<int>{1, 2, 8, 14});
  CHECK(t.nodes[0].cores == 2);
  CHECK(t.nodes[1].cpus == std::vector<int>{8, 9, 14});

  box.group("0::/a/b");
  box.tree.write("cgroup/a/b/cpuset.cpus.effective", "2-9\n");
  box.tree.write("cgroup/a/b/cpuset.mems.effective", "1\n");
  t = box.detect();
  CHECK(t.core_cpus == std::vector<int>{2, 8});
  CHECK_FALSE(t.nodes[0].allowed);
  CHECK(t.nodes[1].allowed);

  // The parent's set counts too, even where the child's file says more (the kernel would say "effective").
  box.tree.write("cgroup/a/cpuset.cpus", "0-3\n");
  CHECK(box.detect().core_cpus == std::vector<int>{2});
  // An empty file sets nothing.
  box.tree.write("cgroup/a/cpuset.cpus", "\n");
  CHECK(box.detect().core_cpus == std::vector<int>{2, 8});
}

TEST_CASE("cpu.max of any level gives fewer threads and no pinning") {
  Box box(kOneNode);
  box.group("0::/a/b/c");
  box.tree.write("cgroup/a/b/c/cpu.max", "max 100000\n");
  CHECK(box.detect().default_threads == 4);
  CHECK(box.detect().cpus_for(4).size() == 4);
  box.tree.write("cgroup/a/cpu.max", "250000 100000\n");  // grandparent
  Topology t = box.detect();
  CHECK(t.cpu_quota == 2.5);
  CHECK(t.default_threads == 2);
  CHECK(t.cpu_quota_where.find("/a") != std::string::npos);
  CHECK(t.cpus_for(2).empty());
  box.tree.write("cgroup/a/b/c/cpu.max", "50000 100000\n");
  t = box.detect();
  CHECK(t.cpu_quota == 0.5);
  CHECK(t.default_threads == 1);
  box.tree.write("cgroup/a/b/c/cpu.max", "9900000 100000\n");  // more than there is
  CHECK(box.detect().cpu_quota == 2.5);
}

TEST_CASE("memory limits of this group, its parent and its grandparent") {
  for (const std::string& level : {std::string("a/b/c"), std::string("a/b"), std::string("a")}) {
    CAPTURE(level);
    Box box(kOneNode);
    box.group("0::/a/b/c");
    for (const char* all : {"a/b/c", "a/b", "a"}) {
      box.tree.write("cgroup/" + std::string(all) + "/memory.max", "max\n");
      box.tree.write("cgroup/" + std::string(all) + "/memory.high", "max\n");
    }
    CHECK(box.detect().memory_usable_bytes == 64 * kGiB);
    box.tree.write("cgroup/" + level + "/memory.max", std::to_string(8 * kGiB) + "\n");
    box.tree.write("cgroup/" + level + "/memory.current", std::to_string(3 * kGiB) + "\n");
    Topology t = box.detect();
    CHECK(t.memory_usable_bytes == 5 * kGiB);
    CHECK(t.memory_usable_reason == "memory.max of cgroup /" + level + " (8GiB, 5GiB left)");
    // The page cache in a group's charge goes when memory is needed; shared memory does not.
    box.tree.write(
        "cgroup/" + level + "/memory.stat",
        "anon 1073741824\nfile 2147483648\nshmem 1073741824\ninactive_file 536870912\nactive_file 536870912\n");
    CHECK(box.detect().memory_usable_bytes == 6 * kGiB);
    // memory.high below memory.max binds: above it the kernel throttles us to a crawl.
    box.tree.write("cgroup/" + level + "/memory.high", std::to_string(4 * kGiB) + "\n");
    t = box.detect();
    CHECK(t.memory_usable_bytes == 2 * kGiB);
    CHECK(t.memory_usable_reason.find("memory.high of cgroup /" + level) == 0);
    // A group above its limit has nothing left, not less than nothing.
    box.tree.write("cgroup/" + level + "/memory.current", std::to_string(9 * kGiB) + "\n");
    CHECK(box.detect().memory_usable_bytes == 0);
  }
}

TEST_CASE("a container's own root, version 1, both versions at once, and no groups at all") {
  SECTION("the path is the host's, the folders are the container's") {
    Box box(kOneNode);
    box.group("0::/docker/0123abcd");
    box.tree.write("cgroup/memory.max", std::to_string(kGiB) + "\n");
    CHECK(box.detect().memory_usable_bytes == kGiB);
  }
  SECTION("a group outside the namespace") {
    Box box(kOneNode);
    box.group("0::/../../other");
    box.tree.write("cgroup/memory.max", std::to_string(kGiB) + "\n");
    CHECK(box.detect().memory_usable_bytes == kGiB);
  }
  SECTION("version 1") {
    Box box(kOneNode);
    box.group("9:name=systemd:/\n4:memory:/x/y\n2:cpu,cpuacct:/x");
    box.tree.write("cgroup/memory/x/y/memory.limit_in_bytes", "9223372036854771712\n");  // how it says "none"
    CHECK(box.detect().memory_usable_bytes == 64 * kGiB);
    box.tree.write("cgroup/memory/x/memory.limit_in_bytes", std::to_string(2 * kGiB) + "\n");
    box.tree.write("cgroup/memory/x/memory.usage_in_bytes", std::to_string(kGiB) + "\n");
    box.tree.write("cgroup/memory/x/memory.stat", "cache 5\ntotal_inactive_file 536870912\n");
    box.tree.write("cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "300000\n");
    box.tree.write("cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
    const Topology t = box.detect();
    CHECK(t.memory_usable_bytes == 1536 * kMiB);
    CHECK(t.memory_usable_reason.find("memory.limit_in_bytes of cgroup /x") == 0);
    CHECK(t.cpu_quota == 3.0);
    box.tree.write("cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1\n");
    CHECK(box.detect().cpu_quota == 0);
  }
  SECTION("version 2 beside version 1") {
    Box box(kOneNode);
    box.group("4:memory:/x\n0::/y");
    box.tree.write("cgroup/unified/cgroup.controllers", "cpu memory\n");
    box.tree.write("cgroup/unified/y/memory.max", std::to_string(kGiB) + "\n");
    box.tree.write("cgroup/memory/x/memory.limit_in_bytes", std::to_string(2 * kGiB) + "\n");
    CHECK(box.detect().memory_usable_bytes == kGiB);
    CHECK(box.detect().memory_limits.size() == 3);
  }
  SECTION("nothing to read at all") {
    Box box(kOneNode);
    box.options.proc_root = "/nonexistent";
    const Topology t = box.detect();
    CHECK(t.memory_usable_bytes == 64'000'000'000);
    CHECK(t.huge_pages.empty());
  }
}

TEST_CASE("address space, memlock and huge pages") {
  Box box(kOneNode);
  box.options.address_space_limit_bytes = 2 * kGiB;
  box.options.memlock_limit_bytes = 8 * kMiB;
  box.tree.write("proc/self/statm", "262144 100 1 1 0 1 0\n");  // pages: 1 GiB of 4 KiB
  box.tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  const Topology t = box.detect();
  CHECK(t.memory_usable_bytes == kGiB);
  CHECK(t.memory_usable_reason.find("ulimit -v") != std::string::npos);
  CHECK(t.memlock_bytes == 8 * kMiB);
  CHECK(t.huge_pages == "madvise");
}

TEST_CASE("descriptions that are none are refused by name") {
  TopologyOptions options;
  options.synthetic = "nonsense:x";
  const Result<Topology> a = Topology::detect(options);
  REQUIRE_FALSE(a.ok());
  CHECK(a.status().message().find("nonsense:x") != std::string::npos);
  options.synthetic.clear();
  options.xml = "<topology";
  CHECK_FALSE(Topology::detect(options).ok());
}

TEST_CASE("CPU lists as the kernel writes them") {
  CHECK(*parse_cpu_list("0-3,8,10-11\n") == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_cpu_list("")->empty());
  CHECK(*parse_cpu_list("5,1,1-2") == std::vector<int>{1, 2, 5});
  for (const char* bad : {"a", "3-1", "-1", "1-", "0x3", "0-99999999999"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_cpu_list(bad).has_value());
  }
  CHECK(format_cpu_list({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11");
  CHECK(format_cpu_list({}).empty());
}

TEST_CASE("this machine: at least a core, memory, and limits that explain themselves") {
  const Result<Topology> t = Topology::detect();
  REQUIRE(t.ok());
  CHECK(t->cores_allowed >= 1);
  CHECK(t->cores_allowed <= t->cores_present);
  CHECK(t->cpus_allowed <= t->cpus_present);
  CHECK(static_cast<int>(t->core_cpus.size()) == t->cores_allowed);
  CHECK(t->default_threads >= 1);
  CHECK_FALSE(t->nodes.empty());
  CHECK(t->memory_usable_bytes > 0);
  CHECK_FALSE(t->memory_usable_reason.empty());
}

}  // namespace
}  // namespace firn
