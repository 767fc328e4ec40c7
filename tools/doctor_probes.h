// What `firn doctor` finds out by asking the machine itself: system calls, files of /proc and /sys, one small file each
// in the folders it was told of.
//
// Contract: every probe undoes what it did; none of them fails, each says what it found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace firn::tools {

struct IoUringProbe {
  bool works = false;
  std::vector<std::string> features;  // names of the flags the kernel set
  std::string why;                    // when it does not work, in words
  std::string fix;
};
IoUringProbe probe_io_uring();

// Whether the kernel lets us say which node pages come from (containers often forbid it); empty = yes, else why not.
std::string probe_numa_binding();

struct FolderProbe {
  std::string path;
  std::string file_system;  // "ext4"
  std::string disk;         // "nvme0n1" when it stands on one disk, else empty
  int64_t size_bytes = 0, free_bytes = 0;
  bool exists = false, writable = false;
  bool in_memory = false;        // tmpfs and the like: what is kept here takes host memory
  int64_t direct_alignment = 0;  // 0: no O_DIRECT, see why
  std::string why;
};
FolderProbe probe_folder(const std::string& path);

struct DiskProbe {
  std::string name, kind, model;  // kind: "NVMe", "SSD", "hard disk", "virtual", "mapped"
  int64_t size_bytes = 0;
  int64_t free_bytes = -1;  // of its mounted file systems together; < 0: none is mounted here
  std::vector<std::string> mounts;
  std::string link;        // "16.0 GT/s PCIe x4", empty when unknown
  std::string link_below;  // the better link it could have, empty when it has its best
};
std::vector<DiskProbe> probe_disks();

}  // namespace firn::tools
