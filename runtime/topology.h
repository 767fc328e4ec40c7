// The machine as far as we may use it: cores, NUMA nodes, caches, memory, and every limit that makes it smaller.
//
// Contract: detect() reads, never changes anything, and takes its sources as options, so that tests can describe any
// machine. "Present" is what the box has; "allowed" is what the affinity mask and the control groups leave of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/status.h"

namespace firn {

struct TopologyOptions {
  // At most one: a machine in hwloc's synthetic notation or XML. Both empty: this machine.
  std::string synthetic;
  std::string xml;
  std::string proc_root = "/proc";
  std::string cgroup_root = "/sys/fs/cgroup";
  std::string sys_root = "/sys";
  // Instead of the affinity mask and resource limits of this process (ignored for a described machine unless given).
  std::optional<std::vector<int>> affinity;
  std::optional<int64_t> address_space_limit_bytes;  // < 0: none
  std::optional<int64_t> memlock_limit_bytes;        // < 0: none
};

struct NumaNode {
  int os_index = 0;
  int64_t memory_bytes = 0;
  std::vector<int> cpus;  // allowed logical CPUs near this memory; empty for memory-only nodes
  int64_t cores = 0;      // allowed physical cores
  bool has_cpus = false;  // false: memory without processors of its own (CXL, persistent or device memory)
  bool allowed = true;    // false: a control group keeps us off its memory
};

// One reason why memory is limited, whether or not it is the one that binds.
struct MemoryLimit {
  int64_t bytes = 0;   // we may still use
  std::string reason;  // "memory.max of cgroup /a (4GiB, 3GiB left)"
};

struct Topology {
  static Result<Topology> detect(const TopologyOptions& options = {});

  int packages = 0;
  int cores_present = 0, cpus_present = 0;
  int cores_allowed = 0, cpus_allowed = 0;
  double cpu_quota = 0;  // CPUs' worth of time a control group grants; 0 = no quota
  std::string cpu_quota_where;
  // Physical cores allowed, or the whole CPUs of the quota if that is fewer; at least 1.
  int default_threads = 1;
  // One logical CPU of every allowed core, NUMA node by NUMA node.
  std::vector<int> core_cpus;

  std::vector<NumaNode> nodes;
  int64_t l3_bytes = 0;  // of one L3 cache
  int l3_caches = 0;

  int64_t memory_present_bytes = 0;
  int64_t memory_usable_bytes = 0;   // the smallest of the limits
  std::string memory_usable_reason;  // that limit in words
  std::vector<MemoryLimit> memory_limits;

  std::string huge_pages;     // "always", "madvise", "never"; empty when the kernel has none
  int64_t memlock_bytes = 0;  // < 0: unlimited
  std::string source;         // "this machine", "synthetic", "XML"

  // CPUs to pin n threads to: spread evenly over core_cpus, so that fewer threads than cores still reach every node's
  // memory. Empty (do not pin) for more threads than cores, and under a quota smaller than the cores: quotas share
  // cores with other groups, and only the kernel knows which of them are idle.
  std::vector<int> cpus_for(int n_threads) const;
};

}  // namespace firn
