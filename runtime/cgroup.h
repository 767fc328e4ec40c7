// What the control groups of this process allow: version 2, version 1 and both at once, this group and all above it.
//
// Contract: reads only files under the given roots, so tests give it folders of their own. A file that is absent is no
// limit. A limit on any ancestor counts, because the kernel enforces them all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace firn {

struct CgroupLimits {
  // Each memory limit found: bytes that may still be used under it (limit minus what is charged, where the page cache
  // of files counts as free, since the kernel drops it before it refuses anything), and where it was found.
  struct Memory {
    int64_t limit_bytes = 0;
    int64_t left_bytes = 0;
    std::string where;  // "memory.max of cgroup /a/b"
  };
  std::vector<Memory> memory;
  double cpu_quota = 0;  // CPUs' worth of time, the smallest of the chain; 0 = no quota
  std::string cpu_quota_where;
  std::optional<std::vector<int>> cpus;   // the intersection of the chain's CPU sets
  std::optional<std::vector<int>> nodes;  // the same for memory nodes
};

CgroupLimits read_cgroups(const std::string& proc_root, const std::string& cgroup_root);

// "0-3,8,10-11" as the kernel writes it; nothing when the text is not of that form.
std::optional<std::vector<int>> parse_cpu_list(const std::string& text);
std::string format_cpu_list(const std::vector<int>& ascending);

}  // namespace firn
