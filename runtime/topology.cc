// Topology from hwloc, limits from /proc, control groups and resource limits.
#include "runtime/topology.h"

#include <fmt/format.h>
#include <hwloc.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>

#include "runtime/cgroup.h"
#include "runtime/units.h"

namespace firn {
namespace {

struct FreeTopology {
  void operator()(hwloc_topology_t t) const { hwloc_topology_destroy(t); }
};
using TopologyPtr = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, FreeTopology>;

struct FreeBitmap {
  void operator()(hwloc_bitmap_t b) const { hwloc_bitmap_free(b); }
};
using BitmapPtr = std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, FreeBitmap>;

std::vector<int> members(hwloc_const_bitmap_t set) {
  std::vector<int> out;
  for (int i = hwloc_bitmap_next(set, -1); i >= 0; i = hwloc_bitmap_next(set, i)) out.push_back(i);
  return out;
}

BitmapPtr bitmap_of(const std::vector<int>& values) {
  BitmapPtr set(hwloc_bitmap_alloc());
  for (int v : values) {
    if (v >= 0) hwloc_bitmap_set(set.get(), static_cast<unsigned>(v));
  }
  return set;
}

bool described(const TopologyOptions& options) { return !options.synthetic.empty() || !options.xml.empty(); }

Result<TopologyPtr> load(const TopologyOptions& options) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return internal("hwloc could not start");
  TopologyPtr topology(raw);
  if (!options.synthetic.empty() && !options.xml.empty()) {
    return invalid("topology: expected one description, found a synthetic one and XML");
  }
  if (!options.synthetic.empty() && hwloc_topology_set_synthetic(raw, options.synthetic.c_str()) != 0) {
    return invalid(fmt::format("'{}' is not an hwloc synthetic description", options.synthetic));
  }
  if (!options.xml.empty() &&
      hwloc_topology_set_xmlbuffer(raw, options.xml.c_str(), static_cast<int>(options.xml.size() + 1)) != 0) {
    return invalid("the topology is not hwloc XML; `lstopo --of xml` writes it");
  }
  // Present and allowed are told apart by us, so hwloc must not drop what is not allowed.
  hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(raw) != 0) {
    return invalid(described(options) ? "hwloc could not load the description of the machine"
                                      : "hwloc could not read this machine's topology; is /sys mounted?");
  }
  return topology;
}

std::vector<int> affinity_of_process() {
  constexpr size_t kBytes = 1024;  // 8192 CPUs
  unsigned long words[kBytes / sizeof(unsigned long)] = {};
  auto* set = reinterpret_cast<cpu_set_t*>(words);
  std::vector<int> out;
  // The main thread's mask would be narrower than the process's once a team has pinned it, so detect() comes first.
  if (sched_getaffinity(0, kBytes, set) != 0) return out;
  for (size_t cpu = 0; cpu < kBytes * 8; ++cpu) {
    if (CPU_ISSET_S(cpu, kBytes, set)) out.push_back(static_cast<int>(cpu));
  }
  return out;
}

// The CPUs that every source allows.
BitmapPtr allowed_cpus(hwloc_topology_t topology, const TopologyOptions& options, const CgroupLimits& groups) {
  BitmapPtr allowed(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)));
  std::vector<std::vector<int>> sources;
  if (options.affinity) sources.push_back(*options.affinity);
  if (!options.affinity && !described(options)) sources.push_back(affinity_of_process());
  if (groups.cpus) sources.push_back(*groups.cpus);
  for (const std::vector<int>& source : sources) {
    BitmapPtr set = bitmap_of(source);
    BitmapPtr both(hwloc_bitmap_alloc());
    hwloc_bitmap_and(both.get(), allowed.get(), set.get());
    // A source that would leave nothing contradicts the others (a fake or stale file): we are running, so it is wrong.
    if (!hwloc_bitmap_iszero(both.get())) allowed = std::move(both);
  }
  return allowed;
}

// hwloc gives a node without processors (CXL, HBM in flat mode) no CPUs, or those of the nodes it serves, or the whole
// machine's. So a node has processors of its own unless its set is empty, strictly holds another node's, or equals that
// of an earlier node: the kernel numbers the nodes that have processors first.
bool has_own_cpus(hwloc_topology_t topology, hwloc_obj_t node) {
  if (hwloc_bitmap_iszero(node->cpuset)) return false;
  for (hwloc_obj_t other = nullptr; (other = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, other));) {
    if (other == node || hwloc_bitmap_iszero(other->cpuset)) continue;
    const bool equal = hwloc_bitmap_isequal(other->cpuset, node->cpuset) != 0;
    if (equal ? other->os_index < node->os_index : hwloc_bitmap_isincluded(other->cpuset, node->cpuset) != 0) {
      return false;
    }
  }
  return true;
}

void fill_cores_and_nodes(hwloc_topology_t topology, hwloc_const_bitmap_t allowed, const CgroupLimits& groups,
                          Topology* out) {
  out->packages = std::max(0, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PACKAGE));
  out->cpus_present = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
  // Some virtual machines show no cores; there every logical CPU counts as one.
  const int cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  const hwloc_obj_type_t core_type = cores > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  out->cores_present = cores > 0 ? cores : out->cpus_present;
  out->cpus_allowed = hwloc_bitmap_weight(allowed);

  struct Core {
    hwloc_obj_t object;
    int cpu;  // its first allowed logical CPU
    bool listed;
  };
  std::vector<Core> usable;
  for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_by_type(topology, core_type, core));) {
    BitmapPtr cpus(hwloc_bitmap_alloc());
    hwloc_bitmap_and(cpus.get(), core->cpuset, allowed);
    if (!hwloc_bitmap_iszero(cpus.get())) usable.push_back({core, hwloc_bitmap_first(cpus.get()), false});
  }
  out->cores_allowed = static_cast<int>(usable.size());

  hwloc_const_bitmap_t allowed_nodes = hwloc_topology_get_allowed_nodeset(topology);
  for (hwloc_obj_t node = nullptr; (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node));) {
    NumaNode n;
    n.os_index = static_cast<int>(node->os_index);
    n.memory_bytes = static_cast<int64_t>(node->attr->numanode.local_memory);
    n.has_cpus = has_own_cpus(topology, node);
    n.allowed = hwloc_bitmap_isset(allowed_nodes, node->os_index) != 0 &&
                (!groups.nodes || std::binary_search(groups.nodes->begin(), groups.nodes->end(), n.os_index));
    if (n.has_cpus) {
      BitmapPtr cpus(hwloc_bitmap_alloc());
      hwloc_bitmap_and(cpus.get(), node->cpuset, allowed);
      n.cpus = members(cpus.get());
      for (Core& core : usable) {
        if (!hwloc_bitmap_isincluded(core.object->cpuset, node->cpuset)) continue;
        ++n.cores;
        if (!core.listed) out->core_cpus.push_back(core.cpu);
        core.listed = true;
      }
    }
    out->memory_present_bytes += n.memory_bytes;
    out->nodes.push_back(std::move(n));
  }
  for (const Core& core : usable) {
    if (!core.listed) out->core_cpus.push_back(core.cpu);
  }
  for (hwloc_obj_t cache = nullptr; (cache = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_L3CACHE, cache));) {
    out->l3_bytes = std::max(out->l3_bytes, static_cast<int64_t>(cache->attr->cache.size));
    ++out->l3_caches;
  }
}

// "name:   123 kB" of /proc/meminfo, in bytes.
std::optional<int64_t> meminfo(const std::string& proc_root, const std::string& name) {
  std::ifstream file(proc_root + "/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t kib = 0;
    if (words >> key >> kib && key == name + ":") return kib * 1024;
  }
  return std::nullopt;
}

int64_t soft_limit(int resource, const std::optional<int64_t>& given) {
  if (given) return *given;
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      limit.rlim_cur > static_cast<rlim_t>(std::numeric_limits<int64_t>::max())) {
    return -1;
  }
  return static_cast<int64_t>(limit.rlim_cur);
}

int64_t mapped_bytes(const std::string& proc_root) {
  std::ifstream file(proc_root + "/self/statm");
  int64_t pages = 0;
  return file >> pages ? pages * static_cast<int64_t>(sysconf(_SC_PAGESIZE)) : 0;
}

void fill_memory(const TopologyOptions& options, const CgroupLimits& groups, Topology* out) {
  // Virtual machines that gain memory while running may not show all of it in their nodes.
  out->memory_present_bytes = std::max(out->memory_present_bytes, meminfo(options.proc_root, "MemTotal").value_or(0));
  if (const std::optional<int64_t> available = meminfo(options.proc_root, "MemAvailable")) {
    out->memory_limits.push_back({*available, "memory the kernel calls available (MemAvailable)"});
  } else if (out->memory_present_bytes > 0) {
    out->memory_limits.push_back({out->memory_present_bytes, "memory of the machine (MemAvailable is not known)"});
  }
  for (const CgroupLimits::Memory& limit : groups.memory) {
    out->memory_limits.push_back(
        {limit.left_bytes,
         fmt::format("{} ({}, {} left)", limit.where, format_size(limit.limit_bytes), format_size(limit.left_bytes))});
  }
  const int64_t address_space = soft_limit(RLIMIT_AS, options.address_space_limit_bytes);
  if (address_space >= 0) {
    const int64_t left = std::max<int64_t>(0, address_space - mapped_bytes(options.proc_root));
    out->memory_limits.push_back({left, fmt::format("address space limit (ulimit -v: {}, {} left)",
                                                    format_size(address_space), format_size(left))});
  }
  const auto least = std::min_element(out->memory_limits.begin(), out->memory_limits.end(),
                                      [](const MemoryLimit& a, const MemoryLimit& b) { return a.bytes < b.bytes; });
  if (least != out->memory_limits.end()) {
    out->memory_usable_bytes = least->bytes;
    out->memory_usable_reason = least->reason;
  }
  out->memlock_bytes = soft_limit(RLIMIT_MEMLOCK, options.memlock_limit_bytes);
}

// "always [madvise] never": the word in brackets.
std::string huge_page_setting(const std::string& sys_root) {
  std::ifstream file(sys_root + "/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  if (!std::getline(file, line)) return {};
  const size_t open = line.find('['), close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? std::string()
                                                                 : line.substr(open + 1, close - open - 1);
}

}  // namespace

Result<Topology> Topology::detect(const TopologyOptions& options) {
  FIRN_ASSIGN(TopologyPtr topology, load(options));
  const CgroupLimits groups = read_cgroups(options.proc_root, options.cgroup_root);
  Topology out;
  out.source = !options.synthetic.empty() ? "synthetic" : !options.xml.empty() ? "XML" : "this machine";
  BitmapPtr allowed = allowed_cpus(topology.get(), options, groups);
  fill_cores_and_nodes(topology.get(), allowed.get(), groups, &out);
  if (out.cpus_allowed < 1) return unsupported("the topology shows no CPU that this process may use");
  out.cpu_quota = groups.cpu_quota;
  out.cpu_quota_where = groups.cpu_quota_where;
  out.default_threads = out.cores_allowed;
  if (out.cpu_quota > 0 && out.cpu_quota < out.cores_allowed) {
    out.default_threads = std::max(1, static_cast<int>(std::floor(out.cpu_quota)));
  }
  fill_memory(options, groups, &out);
  out.huge_pages = huge_page_setting(options.sys_root);
  return out;
}

std::vector<int> Topology::cpus_for(int n_threads) const {
  const auto cores = static_cast<int64_t>(core_cpus.size());
  std::vector<int> out;
  if (n_threads < 1 || n_threads > cores || (cpu_quota > 0 && cpu_quota < cores_allowed)) return out;
  for (int64_t t = 0; t < n_threads; ++t) out.push_back(core_cpus[static_cast<size_t>(t * cores / n_threads)]);
  return out;
}

}  // namespace firn
