// The shape of the source tree: who includes whom, where CUDA may be named, how long a file may be, and that the object
// files of wider instruction sets share no code with the rest of the program.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace firn {
namespace {

namespace fs = std::filesystem;

const std::set<std::string> kFolders = {"runtime", "storage", "cpu", "gpu", "model", "tools", "tests"};

// Besides itself. tools and tests may include everything.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"runtime", {}},
    {"storage", {"runtime"}},
    {"cpu", {"runtime"}},
    {"gpu", {"runtime"}},
    {"model", {"runtime", "storage", "cpu", "gpu"}},
    {"tools", kFolders},
    {"tests", kFolders},
};

std::vector<fs::path> sources() {
  std::vector<fs::path> out;
  for (const std::string& folder : kFolders) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(FIRN_SOURCE_DIR) / folder)) {
      const std::string extension = entry.path().extension().string();
      if (entry.is_regular_file() &&
          (extension == ".cc" || extension == ".h" || extension == ".cu" || extension == ".py")) {
        out.push_back(entry.path());
      }
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::string tree_name(const fs::path& path) { return fs::relative(path, FIRN_SOURCE_DIR).generic_string(); }

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// The reason why a file of `folder` must not hold this line; empty when it may.
std::string breach_of_layers(const std::string& folder, const std::string& line) {
  static const std::regex include(R"(^\s*#\s*include\s*["<]([^">]+)[">])");
  std::smatch match;
  if (!std::regex_search(line, match, include)) return {};
  const std::string target = match[1];
  const std::string first = target.substr(0, target.find('/'));
  if (target.find("..") != std::string::npos) return "includes by a path with ..: " + target;
  if (first == target || !kFolders.contains(first) || first == folder) return {};
  return kMayInclude.at(folder).contains(first) ? std::string() : folder + "/ includes " + target;
}

// A CUDA header, type or function named in code; comments may speak of CUDA.
std::string cuda_name(const std::string& line) {
  static const std::regex name(
      R"(#\s*include\s*[<"](cuda|cu[a-z]+_v\d|cublas|nvml|mma)|\bcuda[A-Z]\w*|\bCU(stream|device|context|module|function|event)\b|\bcublas\w+|__global__|__device__|\bdim3\b)");
  std::smatch match;
  const std::string code = line.substr(0, line.find("//"));
  return std::regex_search(code, match, name) ? match[0].str() : std::string();
}

// The first weak definition in `nm` output that could carry instructions; empty when there is none. DW.ref.* is a word
// of data that points to the C++ runtime.
std::string weak_definition(const std::string& nm_output) {
  std::istringstream in(nm_output);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string address, kind, name;
    if (!(words >> address >> kind >> name)) continue;
    if ((kind == "W" || kind == "V" || kind == "u") && name.rfind("DW.ref.", 0) != 0) return name;
  }
  return {};
}

std::string output_of(const std::string& command) {
  std::string out;
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (!pipe) return out;
  std::array<char, 4096> buffer{};
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe.get())) > 0;) out.append(buffer.data(), n);
  return out;
}

TEST_CASE("the checkers see what they look for") {
  CHECK(breach_of_layers("cpu", "#include \"gpu/gpu.h\"") == "cpu/ includes gpu/gpu.h");
  CHECK(breach_of_layers("gpu", "  # include \"cpu/isa.h\"") == "gpu/ includes cpu/isa.h");
  CHECK_FALSE(breach_of_layers("runtime", "#include <storage/file.h>").empty());
  CHECK_FALSE(breach_of_layers("storage", "#include \"model/config.h\"").empty());
  CHECK_FALSE(breach_of_layers("model", "#include \"tools/cli.h\"").empty());
  CHECK_FALSE(breach_of_layers("model", "#include \"../tools/cli.h\"").empty());
  CHECK(breach_of_layers("model", "#include \"cpu/isa.h\"").empty());
  CHECK(breach_of_layers("runtime", "#include <hwloc.h>").empty());
  CHECK(breach_of_layers("runtime", "#include <sys/mman.h>").empty());
  CHECK(breach_of_layers("runtime", "// #include \"model/config.h\" is what this must not do").empty());
  CHECK(cuda_name("  cudaStream_t stream_;") == "cudaStream_t");
  CHECK(cuda_name("#include <cuda_runtime.h>") == "#include <cuda");
  CHECK(cuda_name("bool built_with_cuda();  // cudaStream_t never appears").empty());
  CHECK(weak_definition("0000000000000000 W _ZNSt6vectorIiE4sizeEv\n") == "_ZNSt6vectorIiE4sizeEv");
  CHECK(weak_definition("                 w __gmon_start__\n0000000000000010 T kernel\n0 V DW.ref.x\n").empty());
}

TEST_CASE("every include keeps to the table of layers") {
  int files = 0;
  for (const fs::path& path : sources()) {
    const std::string name = tree_name(path), folder = name.substr(0, name.find('/'));
    for (const std::string& line : lines_of(path)) {
      const std::string breach = path.extension() == ".py" ? "" : breach_of_layers(folder, line);
      if (!breach.empty()) FAIL_CHECK(name << ": " << breach);
    }
    ++files;
  }
  CHECK(files > 20);
}

TEST_CASE("no header outside gpu/ names a CUDA type") {
  int headers = 0;
  for (const fs::path& path : sources()) {
    const std::string name = tree_name(path);
    if (path.extension() != ".h" || name.rfind("gpu/", 0) == 0) continue;
    ++headers;
    for (const std::string& line : lines_of(path)) {
      const std::string found = cuda_name(line);
      if (!found.empty()) FAIL_CHECK(name << ": " << found);
    }
  }
  CHECK(headers > 10);
}

TEST_CASE("no file is longer than 800 lines, and every header opens with a comment") {
  for (const fs::path& path : sources()) {
    const std::vector<std::string> lines = lines_of(path);
    if (lines.size() > 800) FAIL_CHECK(tree_name(path) << ": " << lines.size() << " lines, at most 800");
    if (lines.empty()) {
      FAIL_CHECK(tree_name(path) << ": empty");
    } else if (path.extension() == ".h" && lines[0].rfind("//", 0) != 0) {
      FAIL_CHECK(tree_name(path) << ": a header opens with a comment that states its contract");
    }
  }
}

// Inline code is compiled into every object that uses it and the linker keeps one copy. Were it the copy of a file
// built with AVX flags, the whole program would need AVX, and only on the machines we do not have.
TEST_CASE("objects of wider instruction sets define nothing that the linker could share") {
  static const std::regex wider(R"(_avx(2|512|512bf16)\.cc\.o$)");
  const fs::path objects = fs::path(FIRN_BINARY_DIR) / "CMakeFiles" / "firn_cpu.dir";
  INFO("objects are looked for in " << objects.string());
  REQUIRE(fs::exists(objects));
  int checked = 0;
  for (const auto& entry : fs::recursive_directory_iterator(objects)) {
    const std::string path = entry.path().string();
    if (!std::regex_search(path, wider)) continue;
    // Objects of files that no longer exist stay in a build folder.
    const std::string name = entry.path().stem().string();
    if (!fs::exists(fs::path(FIRN_SOURCE_DIR) / "cpu" / name)) continue;
    const std::string symbols = output_of("nm --defined-only -C '" + path + "' 2>&1");
    CAPTURE(name);
    REQUIRE(symbols.find("firn::cpu::") != std::string::npos);  // nm ran, and the file defines something
    CHECK(weak_definition(output_of("nm --defined-only '" + path + "' 2>&1")) == "");
    ++checked;
  }
  CHECK(checked >= 2);
}

}  // namespace
}  // namespace firn
