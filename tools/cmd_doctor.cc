// `firn doctor`: what this machine gives, and for everything missing its effect and the command that would fix it.
//
// Exit 0 when the machine could be read, whatever is missing: nothing here is needed for a right answer.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cpu/isa.h"
#include "gpu/gpu.h"
#include "runtime/cgroup.h"
#include "runtime/topology.h"
#include "runtime/units.h"
#include "storage/shared_segment.h"
#include "tools/cli.h"
#include "tools/doctor_probes.h"

namespace firn::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kEnoughMemlock = int64_t{64} << 20;

struct Check {
  std::string name;
  std::string found;
  bool ok = true;
  std::string effect, fix;  // when not ok
  std::vector<std::string> more;
};

struct Report {
  std::vector<Check> checks;
  Json details = Json::object();

  Check& add(std::string name, std::string found) {
    checks.push_back({std::move(name), std::move(found), true, "", "", {}});
    return checks.back();
  }
};

void missing(Check* check, std::string effect, std::string fix) {
  check->ok = false;
  check->effect = std::move(effect);
  check->fix = std::move(fix);
}

std::string gib(int64_t bytes) { return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30)); }

std::string joined(const std::vector<std::string>& words) { return fmt::format("{}", fmt::join(words, ", ")); }

bool cpu_flag(const std::string& flag) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) return (line + " ").find(" " + flag + " ") != std::string::npos;
  }
  return false;
}

void check_cpu(Report* report) {
  const cpu::CpuFeatures& f = cpu::cpu_features();
  std::vector<std::string> has;
  const std::pair<bool, const char*> kAll[] = {{f.avx512_bf16, "AVX512_BF16"},
                                               {f.avx512_vnni, "AVX512_VNNI"},
                                               {f.avx512_vbmi, "AVX512_VBMI"},
                                               {f.avx512_fp16, "AVX512_FP16"},
                                               {f.amx_bf16, "AMX-BF16"}};
  for (const auto& [present, name] : kAll) {
    if (present) has.emplace_back(name);
  }
  report->add("CPU", f.model.empty() ? "unknown model" : f.model);
  const Result<cpu::Isa> chosen = cpu::choose_isa();
  Check& isa = report->add("instructions", chosen.ok() ? fmt::format("{}{}", cpu::isa_name(*chosen),
                                                                     has.empty() ? "" : "  (" + joined(has) + ")")
                                                       : chosen.status().message());
  if (!chosen.ok()) {
    missing(&isa, "firn refuses to start with this setting", "unset FIRN_ISA");
  } else if (*chosen != f.best) {
    missing(&isa, fmt::format("slower than this CPU's {}: FIRN_ISA says so", cpu::isa_name(f.best)), "unset FIRN_ISA");
  } else if (f.best == cpu::Isa::kScalar) {
    missing(&isa, "no AVX2: every kernel is scalar, about ten times slower",
            "a CPU with AVX2; in a VM, pass the host's CPU");
  } else if (f.best == cpu::Isa::kAvx2) {
    missing(&isa, "no AVX-512: the AVX2 kernels are used", "a CPU with AVX-512; in a VM, pass the host's CPU");
  } else if (cpu_flag("amx_bf16") && !f.amx_bf16) {
    missing(&isa, "the CPU has AMX but the kernel does not grant it: long prompts are slower",
            "run Linux 5.16 or later");
  }
  report->details["cpu"] = {{"model", f.model}, {"isa", cpu::isa_name(f.best)}, {"features", has}};
}

void check_cores(const Topology& t, Report* report) {
  Check& cores = report->add(
      "cores", fmt::format("{} of {} physical cores ours ({} of {} logical CPUs), {} threads by default",
                           t.cores_allowed, t.cores_present, t.cpus_allowed, t.cpus_present, t.default_threads));
  if (t.cores_allowed < t.cores_present) {
    missing(&cores, fmt::format("{} of the cores idle", t.cores_present - t.cores_allowed),
            fmt::format("taskset -c 0-{} firn ..., or widen the container's --cpuset-cpus", t.cpus_present - 1));
  }
  Check& quota =
      report->add("CPU time", t.cpu_quota > 0 ? fmt::format("{:.2f} CPUs by {}", t.cpu_quota, t.cpu_quota_where)
                                              : std::string("no quota"));
  if (t.cpu_quota > 0 && t.cpu_quota < t.cores_allowed) {
    missing(&quota, fmt::format("{} threads instead of {}, not pinned", t.default_threads, t.cores_allowed),
            "raise the container's --cpus, or cpu.max of its cgroup");
  }
  report->add("L3 cache", t.l3_caches == 0 ? std::string("not reported")
                                           : fmt::format("{} x {}", t.l3_caches, format_size(t.l3_bytes)));
}

void check_numa(const Topology& t, Report* report) {
  Check& numa =
      report->add("NUMA", fmt::format("{} node{}, {} package{}", t.nodes.size(), t.nodes.size() == 1 ? "" : "s",
                                      t.packages, t.packages == 1 ? "" : "s"));
  std::vector<std::string> kept_off;
  for (const NumaNode& n : t.nodes) {
    numa.more.push_back(fmt::format(
        "node {:>2}  {:>11}  {}{}", n.os_index, gib(n.memory_bytes),
        n.has_cpus ? fmt::format("{} cores, CPUs {}", n.cores, format_cpu_list(n.cpus)) : std::string("memory only"),
        n.allowed ? "" : "  (not ours)"));
    if (!n.allowed) kept_off.push_back(fmt::format("{}", n.os_index));
  }
  const std::string refused = probe_numa_binding();
  if (!kept_off.empty()) {
    missing(&numa, fmt::format("memory of node {} cannot be used", joined(kept_off)),
            "widen the container's --cpuset-mems");
  } else if (!refused.empty() && t.nodes.size() > 1) {
    missing(
        &numa,
        fmt::format("weights cannot be placed beside their cores ({}): reads cross the link between nodes", refused),
        "docker run --cap-add SYS_NICE ...");
  }
}

void check_memory(const Topology& t, Report* report) {
  Check& memory = report->add("memory", fmt::format("{} ours of {}: {}", gib(t.memory_usable_bytes),
                                                    gib(t.memory_present_bytes), t.memory_usable_reason));
  Json limits = Json::array();
  for (const MemoryLimit& limit : t.memory_limits) {
    memory.more.push_back(fmt::format("{:>11}  {}", gib(limit.bytes), limit.reason));
    limits.push_back({{"bytes", limit.bytes}, {"reason", limit.reason}});
  }
  if (t.memory_limits.size() > 1 && t.memory_usable_bytes < t.memory_limits[0].bytes) {
    const bool address_space = t.memory_usable_reason.find("ulimit -v") != std::string::npos;
    missing(&memory,
            fmt::format("{} that are free cannot be used", gib(t.memory_limits[0].bytes - t.memory_usable_bytes)),
            address_space ? "ulimit -v unlimited" : "raise the container's --memory, or that file of its cgroup");
  }
  report->details["memory"] = {{"present_bytes", t.memory_present_bytes},
                               {"usable_bytes", t.memory_usable_bytes},
                               {"reason", t.memory_usable_reason},
                               {"limits", limits}};

  Check& huge = report->add("huge pages", t.huge_pages.empty() ? std::string("the kernel has none") : t.huge_pages);
  if (t.huge_pages.empty()) {
    missing(&huge, "walking the weights costs more address translation", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE");
  } else if (t.huge_pages == "never") {
    missing(&huge, "walking the weights costs more address translation",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled");
  }

  Check& memlock =
      report->add("memlock", t.memlock_bytes < 0 ? std::string("unlimited") : format_size(t.memlock_bytes));
  if (t.memlock_bytes >= 0 && t.memlock_bytes < kEnoughMemlock) {
    missing(&memlock, "buffers cannot be locked in memory for a disk or a device",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1)");
  }
}

void check_storage(const std::vector<std::string>& folders, Report* report) {
  const IoUringProbe uring = probe_io_uring();
  Check& ring = report->add("io_uring", uring.works ? "works  (" + joined(uring.features) + ")" : uring.why);
  if (!uring.works) missing(&ring, "files are read by threads with pread", uring.fix);
  report->details["io_uring"] = {{"works", uring.works}, {"features", uring.features}, {"why", uring.why}};

  Json json = Json::array();
  for (const std::string& folder : folders) {
    const FolderProbe p = probe_folder(folder);
    const bool direct = p.direct_alignment > 0;
    Check& check =
        report->add("O_DIRECT", fmt::format("{}  ({}{}, {} free of {})  {}", p.path, p.file_system,
                                            p.disk.empty() ? "" : " on " + p.disk, gib(p.free_bytes), gib(p.size_bytes),
                                            direct ? fmt::format("works in blocks of {}", p.direct_alignment) : p.why));
    if (!p.exists) {
      check.found = fmt::format("{}  {}", p.path, p.why);
      missing(&check, "nothing can be kept or read here", "give a folder that exists with --dir");
    } else if (p.in_memory) {
      missing(&check, "this folder is host memory: models and far KV kept here take RAM",
              "give a folder on a disk (--dir, --kv-dir, TMPDIR)");
    } else if (!p.writable) {
      missing(&check, "could not be tried: reading still works",
              fmt::format("give a folder you may write to, or chmod u+w {}", p.path));
    } else if (!direct) {
      missing(&check, "reads go through the page cache, which takes memory and time",
              "put the model on ext4, XFS or btrfs on a local disk (not tmpfs, overlay or a network)");
    }
    json.push_back({{"path", p.path},
                    {"file_system", p.file_system},
                    {"disk", p.disk},
                    {"size_bytes", p.size_bytes},
                    {"free_bytes", p.free_bytes},
                    {"direct_alignment", p.direct_alignment},
                    {"why", p.why}});
  }
  report->details["folders"] = json;

  const std::vector<DiskProbe> disks = probe_disks();
  Json disk_json = Json::array();
  if (disks.empty()) {
    missing(&report->add("disks", "none is shown to us"), "which disk holds a folder is not known",
            "mount /sys in the container");
  }
  for (const DiskProbe& d : disks) {
    Check& check = report->add(
        "disk", fmt::format("{:<9} {:<9} {:>11}, {}{}{}", d.name, d.kind, gib(d.size_bytes),
                            d.free_bytes < 0 ? std::string("not mounted here") : gib(d.free_bytes) + " free",
                            d.link.empty() ? "" : ", " + d.link, d.model.empty() ? "" : ", " + d.model));
    if (d.kind == "hard disk" && d.free_bytes >= 0) {
      missing(&check, "it turns: far too slow for far experts or KV", "keep models and --kv-dir on an NVMe disk");
    } else if (!d.link_below.empty()) {
      missing(&check, fmt::format("its link could be {}", d.link_below),
              "another slot, or the slot's setting in the firmware");
    }
    disk_json.push_back({{"name", d.name},
                         {"kind", d.kind},
                         {"model", d.model},
                         {"size_bytes", d.size_bytes},
                         {"free_bytes", d.free_bytes},
                         {"mounts", d.mounts},
                         {"link", d.link}});
  }
  report->details["disks"] = disk_json;
}

void check_gpus(Report* report) {
  const std::vector<gpu::DeviceInfo> devices = gpu::devices();
  Json json = Json::array();
  for (const gpu::DeviceInfo& d : devices) {
    report->add("GPU", fmt::format("cuda:{}  {}  {}", d.ordinal, d.name, gib(d.memory_bytes)));
    json.push_back({{"ordinal", d.ordinal}, {"name", d.name}, {"memory_bytes", d.memory_bytes}});
  }
  if (devices.empty()) {
    missing(&report->add("GPU", fmt::format("none ({})", gpu::why_none())), "everything runs on the CPU",
            gpu::built_with_cuda() ? "nvidia-smi says whether the driver sees one"
                                   : "none: this version has no CUDA kernels");
  }
  report->details["gpus"] = json;
}

std::string age(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", std::max(0.0, seconds));
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return seconds < 172800 ? fmt::format("{:.0f} h", seconds / 3600) : fmt::format("{:.0f} days", seconds / 86400);
}

std::string shared_state(const storage::SharedInfo& s) {
  if (s.complete) return "complete";
  return s.filling ? "being filled" : "not usable: " + s.problem;
}

Json shared_json(const std::vector<storage::SharedInfo>& segments) {
  Json out = Json::array();
  for (const storage::SharedInfo& s : segments) {
    out.push_back({{"name", s.name},
                   {"model", s.source},
                   {"bytes", s.bytes},
                   {"age_s", s.age_s},
                   {"processes", s.processes},
                   {"complete", s.complete},
                   {"filling", s.filling},
                   {"problem", s.problem}});
  }
  return out;
}

std::string shared_line(const storage::SharedInfo& s) {
  return fmt::format("{}  {}  {}, {} old, {} process{}, {}", s.name, s.source.empty() ? "(unknown model)" : s.source,
                     format_size(s.bytes), age(s.age_s), s.processes, s.processes == 1 ? "" : "es", shared_state(s));
}

void check_shared(const std::string& folder, Report* report) {
  const storage::SharedRoom room = storage::shared_room(folder);
  const auto listed = storage::list_shared(folder);
  report->details["shared_weights"] = listed.ok() ? shared_json(*listed) : Json::array();
  report->details["shared_folder"] = {
      {"path", folder}, {"free_bytes", room.free_bytes}, {"huge_pages", room.huge_pages}, {"why", room.why_not}};
  if (!room.why_not.empty()) {
    missing(&report->add("shared", room.why_not), "--share-weights loads into private memory, every run anew",
            fmt::format("sudo mount -t tmpfs -o size=SIZE,huge=within_size tmpfs {}", folder));
    return;
  }
  Check& check = report->add(
      "shared", fmt::format("{} in {} ({} free of {})",
                            !listed.ok() || listed->empty() ? std::string("no weights")
                                                            : fmt::format("{} set(s) of weights", listed->size()),
                            folder, gib(room.free_bytes), gib(room.size_bytes)));
  if (!listed.ok()) {
    missing(&check, listed.status().message(), fmt::format("chmod u+rx {}", folder));
    return;
  }
  for (const storage::SharedInfo& s : *listed) check.more.push_back(shared_line(s));
  if (!room.huge_pages) {
    missing(&check, "walking shared weights costs more address translation",
            fmt::format("sudo mount -o remount,huge=within_size {} (before the weights are loaded)", room.mount));
  }
}

int drop_shared(const std::string& folder, const std::string& name, const Globals& globals) {
  const auto dropped = storage::drop_shared(folder, name);
  if (!dropped.ok()) return firn::tools::report(dropped.status());
  if (globals.json) {
    fmt::print("{}\n", Json({{"dropped", shared_json(*dropped)}}).dump(2, ' ', false, Json::error_handler_t::replace));
    return 0;
  }
  for (const storage::SharedInfo& s : *dropped) {
    fmt::print("removed {}  {}  {}{}\n", s.name, s.source, format_size(s.bytes),
               s.processes > 0 ? fmt::format(" (free when the {} using it end)", s.processes) : "");
  }
  if (dropped->empty()) fmt::print("nothing to remove in {}\n", folder);
  return 0;
}

void print(const Report& report) {
  int64_t gaps = 0;
  for (const Check& c : report.checks) {
    fmt::print("{:<7}  {:<12}  {}\n", c.ok ? "ok" : "missing", c.name, c.found);
    for (const std::string& line : c.more) fmt::print("{:<23}{}\n", "", line);
    if (c.ok) continue;
    ++gaps;
    fmt::print("{:<23}effect: {}\n{:<23}fix:    {}\n", "", c.effect, "", c.fix);
  }
  fmt::print("\n{}\n", gaps == 0
                           ? std::string("Nothing is missing.")
                           : fmt::format("{} missing. firn runs without; each costs what its effect says.", gaps));
}

Json to_json(const Report& report, const Topology& t) {
  Json checks = Json::array();
  for (const Check& c : report.checks) {
    Json json = {{"name", c.name}, {"state", c.ok ? "ok" : "missing"}, {"found", c.found}};
    if (!c.ok) json["effect"] = c.effect;
    if (!c.ok) json["fix"] = c.fix;
    checks.push_back(std::move(json));
  }
  Json nodes = Json::array();
  for (const NumaNode& n : t.nodes) {
    nodes.push_back({{"node", n.os_index},
                     {"memory_bytes", n.memory_bytes},
                     {"cpus", n.cpus},
                     {"cores", n.cores},
                     {"has_cpus", n.has_cpus},
                     {"allowed", n.allowed}});
  }
  Json out = {{"checks", checks},
              {"cores_allowed", t.cores_allowed},
              {"cores_present", t.cores_present},
              {"cpus_allowed", t.cpus_allowed},
              {"cpus_present", t.cpus_present},
              {"cpu_quota", t.cpu_quota},
              {"default_threads", t.default_threads},
              {"l3_bytes", t.l3_bytes},
              {"l3_caches", t.l3_caches},
              {"huge_pages", t.huge_pages},
              {"memlock_bytes", t.memlock_bytes},
              {"numa", nodes}};
  out.update(report.details);
  return out;
}

int run_doctor(std::vector<std::string> folders, const std::string& share_dir, const Globals& globals) {
  const Result<Topology> topology = Topology::detect();
  if (!topology.ok()) return firn::tools::report(topology.status());
  if (folders.empty()) {
    const char* temp = std::getenv("TMPDIR");
    folders = {".", temp != nullptr && *temp != '\0' ? temp : "/tmp"};
  }
  Report report;
  check_cpu(&report);
  check_cores(*topology, &report);
  check_numa(*topology, &report);
  check_memory(*topology, &report);
  check_storage(folders, &report);
  check_shared(share_dir, &report);
  check_gpus(&report);
  if (globals.json) {
    // Names and paths of the machine need not be UTF-8; the JSON must be.
    fmt::print("{}\n", to_json(report, *topology).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    print(report);
  }
  return 0;
}

}  // namespace

Runner add_doctor(CLI::App& app, const Globals& globals) {
  auto folders = std::make_shared<std::vector<std::string>>();
  app.add_option("--dir", *folders,
                 "folders that hold models or far KV (repeatable); default: this one and the temporary one");
  auto share_dir = std::make_shared<std::string>(storage::kSharedFolder);
  auto drop = std::make_shared<std::string>();
  app.add_option("--share-dir", *share_dir, "where shared weights are (--share-weights); default: /dev/shm");
  app.add_option("--drop-shared", *drop, "remove shared weights by name, or all of ours; runs that use them go on");
  return [folders, share_dir, drop, &app, &globals] {
    if (app.count("--drop-shared") > 0) return drop_shared(*share_dir, *drop, globals);
    return run_doctor(*folders, *share_dir, globals);
  };
}

}  // namespace firn::tools
