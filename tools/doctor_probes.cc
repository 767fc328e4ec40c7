// Probes of the machine. The names of /sys and the bits of io_uring_setup are the kernel's own interface.
#include "tools/doctor_probes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "storage/file.h"

namespace firn::tools {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

// "259:2" -> "nvme0n1": the disk that a block device is, or is a partition of.
std::string disk_of(const std::string& device) {
  std::error_code error;
  fs::path path = fs::canonical("/sys/dev/block/" + device, error);
  if (error) return {};
  if (fs::exists(path / "partition", error)) path = path.parent_path();
  return path.filename().string();
}

struct Mount {
  std::string device, folder, file_system;
};

// Fields of /proc/self/mountinfo: id parent major:minor root folder options ... - type source options.
std::vector<Mount> mounts() {
  std::vector<Mount> out;
  std::ifstream file("/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string id, parent, root, word;
    Mount m;
    words >> id >> parent >> m.device >> root >> m.folder;
    while (words >> word && word != "-") {
    }
    words >> m.file_system;
    // Spaces and the like are written as octal escapes.
    for (size_t at; (at = m.folder.find("\\040")) != std::string::npos;) m.folder.replace(at, 4, " ");
    out.push_back(std::move(m));
  }
  return out;
}

bool space_of(const std::string& folder, int64_t* size, int64_t* free) {
  struct statvfs s {};
  if (statvfs(folder.c_str(), &s) != 0) return false;
  *size = static_cast<int64_t>(s.f_blocks) * static_cast<int64_t>(s.f_frsize);
  *free = static_cast<int64_t>(s.f_bavail) * static_cast<int64_t>(s.f_frsize);
  return true;
}

std::string kind_of(const std::string& name, const fs::path& sys) {
  const auto starts = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  if (starts("nvme")) return "NVMe";
  if (starts("dm-") || starts("md")) return "mapped";
  // A hypervisor's disk says that it turns, whatever stands behind it.
  if (starts("vd") || starts("xvd")) return "virtual";
  return first_line(sys / "queue/rotational") == "1" ? "hard disk" : "SSD";
}

// Two blocks in a file of our own, opened as firn opens its files.
void probe_direct(FolderProbe* out) {
  std::string name = out->path + "/.firn-doctor-XXXXXX";
  const int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) {
    out->why = fmt::format("no file can be made here ({})", std::strerror(errno));
    return;
  }
  out->writable = true;
  const std::string block(8192, 'x');
  const bool written = write(fd, block.data(), block.size()) == static_cast<ssize_t>(block.size());
  const std::string write_error = std::strerror(errno);
  close(fd);
  if (!written) {
    out->why = fmt::format("8192 bytes could not be written ({})", write_error);
  } else if (auto file = storage::open_file(name, storage::OpenMode::kReadDirect); !file.ok()) {
    out->why = file.status().message();
  } else {
    out->direct_alignment = (*file)->direct_alignment();
    out->why = (*file)->direct_refusal();
  }
  unlink(name.c_str());
}

}  // namespace

IoUringProbe probe_io_uring() {
  IoUringProbe out;
  io_uring_params params{};
  const auto fd = static_cast<int>(syscall(SYS_io_uring_setup, 8, &params));
  if (fd >= 0) {
    close(fd);
    out.works = true;
    const std::pair<uint32_t, const char*> kNames[] = {
        {IORING_FEAT_SINGLE_MMAP, "single mmap"},       {IORING_FEAT_NODROP, "no drop"},
        {IORING_FEAT_FAST_POLL, "fast poll"},           {IORING_FEAT_EXT_ARG, "wait with time-out"},
        {IORING_FEAT_NATIVE_WORKERS, "native workers"}, {IORING_FEAT_RSRC_TAGS, "tagged buffers"},
    };
    for (const auto& [bit, name] : kNames) {
      if ((params.features & bit) != 0) out.features.emplace_back(name);
    }
    return out;
  }
  switch (errno) {
    case ENOSYS:
      out.why = "the kernel does not have the system call (ENOSYS): older than 5.1, built without it, or a sandbox";
      out.fix = "run a kernel of 5.6 or later, outside a sandbox that filters system calls";
      break;
    case EPERM: {
      const std::string disabled = first_line("/proc/sys/kernel/io_uring_disabled");
      if (!disabled.empty() && disabled != "0") {
        out.why = fmt::format("not permitted (EPERM): kernel.io_uring_disabled is {}", disabled);
        out.fix = "sudo sysctl kernel.io_uring_disabled=0";
      } else {
        out.why = "not permitted (EPERM): a container's filter of system calls refuses it";
        out.fix = "docker run --security-opt seccomp=unconfined ... (or a profile that allows io_uring_*)";
      }
      break;
    }
    case ENOMEM:
      out.why = "not enough lockable memory (ENOMEM)";
      out.fix = "ulimit -l unlimited (and memlock in /etc/security/limits.conf)";
      break;
    case EMFILE:
    case ENFILE:
      out.why = "no file descriptor is left";
      out.fix = "ulimit -n 65536";
      break;
    default:
      out.why = std::strerror(errno);
      out.fix = "see `man io_uring_setup` for this error";
  }
  return out;
}

std::string probe_numa_binding() {
  constexpr size_t kBytes = 4096;
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  void* page = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return std::strerror(errno);
  unsigned long node0 = 1;
  const long rc = syscall(SYS_mbind, page, kBytes, kPreferred, &node0, 8 * sizeof(node0) + 1, 0);
  const std::string why = rc == 0 ? "" : std::strerror(errno);
  munmap(page, kBytes);
  return why;
}

FolderProbe probe_folder(const std::string& path) {
  FolderProbe out;
  std::error_code error;
  const fs::path full = fs::canonical(path, error);
  out.path = error ? path : full.string();
  struct stat info {};
  if (stat(out.path.c_str(), &info) != 0) {
    out.why = std::strerror(errno);
    return out;
  }
  if (!S_ISDIR(info.st_mode)) {
    out.why = "not a folder";
    return out;
  }
  out.exists = true;
  space_of(out.path, &out.size_bytes, &out.free_bytes);
  // The mount whose folder is the longest beginning of the path; device numbers differ on some file systems.
  size_t longest = 0;
  for (const Mount& m : mounts()) {
    const std::string prefix = m.folder == "/" ? "/" : m.folder + "/";
    if ((out.path + "/").rfind(prefix, 0) == 0 && prefix.size() >= longest) {
      longest = prefix.size();
      out.file_system = m.file_system;
      out.disk = disk_of(m.device);
    }
  }
  out.in_memory = out.file_system == "tmpfs" || out.file_system == "ramfs";
  probe_direct(&out);
  return out;
}

std::vector<DiskProbe> probe_disks() {
  std::map<std::string, std::vector<Mount>> mounted;
  std::set<std::string> seen;  // a file system mounted twice has its free bytes once
  for (const Mount& m : mounts()) {
    if (const std::string disk = disk_of(m.device); !disk.empty() && seen.insert(m.device).second) {
      mounted[disk].push_back(m);
    }
  }
  std::vector<DiskProbe> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/sys/block", error)) {
    const std::string name = entry.path().filename().string();
    const fs::path sys = entry.path();
    const std::string sectors = first_line(sys / "size");
    if (name.rfind("loop", 0) == 0 || name.rfind("ram", 0) == 0 || name.rfind("zram", 0) == 0) continue;
    if (sectors.empty() || sectors == "0") continue;
    DiskProbe disk;
    disk.name = name;
    disk.size_bytes = std::strtoll(sectors.c_str(), nullptr, 10) * 512;  // always in units of 512
    disk.kind = kind_of(name, sys);
    disk.model = first_line(sys / "device/model");
    for (const Mount& m : mounted[name]) {
      int64_t size = 0, free = 0;
      if (!space_of(m.folder, &size, &free)) continue;
      disk.free_bytes = std::max<int64_t>(0, disk.free_bytes) + free;
      disk.mounts.push_back(m.folder);
    }
    // An NVMe disk's controller is the PCIe device.
    const fs::path pci = sys / "device/device";
    const std::string speed = first_line(pci / "current_link_speed"), width = first_line(pci / "current_link_width");
    if (!speed.empty() && !width.empty()) {
      const std::string best_speed = first_line(pci / "max_link_speed"),
                        best_width = first_line(pci / "max_link_width");
      disk.link = fmt::format("{} x{}", speed, width);
      if (!best_speed.empty() && (best_speed != speed || best_width != width)) {
        disk.link_below = fmt::format("{} x{}", best_speed, best_width);
      }
    }
    out.push_back(std::move(disk));
  }
  std::sort(out.begin(), out.end(), [](const DiskProbe& a, const DiskProbe& b) { return a.name < b.name; });
  return out;
}

}  // namespace firn::tools
