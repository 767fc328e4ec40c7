// Control groups are read as folders of small text files. In a container the path in /proc/self/cgroup may be the
// host's while the folders are the container's own; whatever part of the path exists is walked, and the mounted root
// always.
#include "runtime/cgroup.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

namespace firn {
namespace {

// Version 1 says "no limit" with a number of this order; no machine has as much.
constexpr int64_t kNoLimitBytes = int64_t{1} << 60;

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<int64_t> to_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<int64_t> read_number(const std::string& path) {
  const std::optional<std::string> line = first_line(path);
  return line ? to_number(*line) : std::nullopt;  // "max" is no number: no limit
}

// The sum of the named rows of a "name value" file.
int64_t sum_of_rows(const std::string& path, std::initializer_list<std::string_view> names) {
  std::ifstream file(path);
  int64_t sum = 0, value = 0;
  std::string name;
  while (file >> name >> value) {
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  }
  return sum;
}

// The folders from the process's group up to the mounted root: (folder, name for messages).
struct Level {
  std::string folder, name;
};
std::vector<Level> chain(const std::string& mount, std::string path) {
  std::vector<Level> levels;
  // A group above the namespace's root shows as /../..; nothing below the mount stands for it.
  if (path.find("/..") != std::string::npos) path = "/";
  while (path.size() > 1) {
    if (path.back() == '/') {
      path.pop_back();
      continue;
    }
    levels.push_back({mount + path, path});
    path.erase(path.rfind('/'));
  }
  levels.push_back({mount, "/"});
  return levels;
}

void add_memory(CgroupLimits* out, const Level& level, const char* limit_name, const char* used_name,
                std::initializer_list<std::string_view> cache_rows) {
  const std::optional<int64_t> limit = read_number(level.folder + "/" + limit_name);
  if (!limit || *limit >= kNoLimitBytes) return;
  const int64_t used = read_number(level.folder + "/" + used_name).value_or(0);
  const int64_t cache = sum_of_rows(level.folder + "/memory.stat", cache_rows);
  const int64_t left = *limit - std::max<int64_t>(0, used - cache);
  out->memory.push_back({*limit, std::max<int64_t>(0, left), fmt::format("{} of cgroup {}", limit_name, level.name)});
}

void add_quota(CgroupLimits* out, std::optional<int64_t> quota, std::optional<int64_t> period, std::string where) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return;
  const double cpus = static_cast<double>(*quota) / static_cast<double>(*period);
  if (out->cpu_quota > 0 && out->cpu_quota <= cpus) return;
  out->cpu_quota = cpus;
  out->cpu_quota_where = std::move(where);
}

void intersect(std::optional<std::vector<int>>* set, const std::string& path) {
  const std::optional<std::string> line = first_line(path);
  if (!line) return;
  const std::optional<std::vector<int>> found = parse_cpu_list(*line);
  if (!found || found->empty()) return;  // empty: the group sets none of its own
  if (!*set) {
    *set = found;
    return;
  }
  std::vector<int> both;
  std::set_intersection((*set)->begin(), (*set)->end(), found->begin(), found->end(), std::back_inserter(both));
  *set = both;
}

void read_version2(CgroupLimits* out, const std::string& mount, const std::string& path) {
  for (const Level& level : chain(mount, path)) {
    for (const char* limit : {"memory.max", "memory.high"}) {
      add_memory(out, level, limit, "memory.current", {"active_file", "inactive_file"});
    }
    if (const std::optional<std::string> line = first_line(level.folder + "/cpu.max")) {
      std::istringstream words(*line);
      std::string quota, period;
      words >> quota >> period;
      add_quota(out, to_number(quota), to_number(period), "cpu.max of cgroup " + level.name);
    }
    for (const char* name : {"cpuset.cpus", "cpuset.cpus.effective"}) {
      intersect(&out->cpus, level.folder + "/" + name);
    }
    for (const char* name : {"cpuset.mems", "cpuset.mems.effective"}) {
      intersect(&out->nodes, level.folder + "/" + name);
    }
  }
}

void read_version1(CgroupLimits* out, const std::string& mount, const std::string& controllers,
                   const std::string& path) {
  // A hierarchy is mounted under the list of its controllers, or under a single one of them.
  std::vector<std::string> names;
  std::istringstream words(controllers);
  for (std::string name; std::getline(words, name, ',');) names.push_back(name);
  for (const std::string& name : names) {
    for (const std::string& folder : {controllers, name}) {
      if (name != "memory" && name != "cpu" && name != "cpuset") continue;
      for (const Level& level : chain(mount + "/" + folder, path)) {
        if (name == "memory") {
          add_memory(out, level, "memory.limit_in_bytes", "memory.usage_in_bytes",
                     {"total_active_file", "total_inactive_file"});
        } else if (name == "cpu") {
          add_quota(out, read_number(level.folder + "/cpu.cfs_quota_us"),
                    read_number(level.folder + "/cpu.cfs_period_us"), "cpu.cfs_quota_us of cgroup " + level.name);
        } else {
          intersect(&out->cpus, level.folder + "/cpuset.cpus");
          intersect(&out->nodes, level.folder + "/cpuset.mems");
        }
      }
      if (controllers == name) break;  // one and the same folder
    }
  }
}

}  // namespace

std::optional<std::vector<int>> parse_cpu_list(const std::string& text) {
  std::vector<int> out;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    while (!part.empty() && (part.back() == '\n' || part.back() == ' ')) part.pop_back();
    if (part.empty()) continue;
    const size_t dash = part.find('-');
    const std::optional<int64_t> first = to_number(std::string_view(part).substr(0, dash));
    const std::optional<int64_t> last =
        dash == std::string::npos ? first : to_number(std::string_view(part).substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last > 1'000'000) return std::nullopt;
    for (int64_t cpu = *first; cpu <= *last; ++cpu) out.push_back(static_cast<int>(cpu));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::string format_cpu_list(const std::vector<int>& ascending) {
  std::string out;
  for (size_t i = 0; i < ascending.size();) {
    size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    if (!out.empty()) out += ',';
    out += last == i ? fmt::format("{}", ascending[i]) : fmt::format("{}-{}", ascending[i], ascending[last]);
    i = last + 1;
  }
  return out;
}

CgroupLimits read_cgroups(const std::string& proc_root, const std::string& cgroup_root) {
  CgroupLimits out;
  std::ifstream file(proc_root + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (!controllers.empty()) {
      read_version1(&out, cgroup_root, controllers, path);
      continue;
    }
    // Version 2 is mounted at the root, or beside version 1 in a folder of its own.
    const std::string beside = cgroup_root + "/unified";
    read_version2(&out, first_line(beside + "/cgroup.controllers") ? beside : cgroup_root, path);
  }
  return out;
}

}  // namespace firn
