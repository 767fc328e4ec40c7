// Detection of instruction sets, and the table of gemm_type().
//
// A level counts only when the operating system saves its registers: XCR0 is asked through XGETBV, and AMX tile state
// through arch_prctl, which Linux grants per process.
//
// gemm_type(): measured with oneDNN 2.6.3, M 1024, N 3072, K 6144, two threads, best of six, GFLOP/s:
//
//   machine                                      bf16    f32    chosen
//   Xeon VM with AMX_BF16                        5229    406    bf16
//   the same, AMX and tiles not used              229    420    f32
//   Xeon VM with AVX512, no AMX                   161    298    f32
//   Zen 4 VM, AVX512_BF16                         455    228    bf16
//
// So: AMX -> bf16; AMD (and its licensee Hygon) with AVX512_BF16 -> bf16; everything else -> f32 on bf16-rounded
// inputs. The choice follows CPU features alone, never a timing of this run, because it decides the last bits of an
// answer.
#include "cpu/isa.h"

#include <dnnl.h>

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "fmt/format.h"

namespace firn::cpu {
namespace {

constexpr Isa kLevels[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx};

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

bool bit(unsigned value, int n) { return ((value >> n) & 1u) != 0; }

uint64_t xcr0() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KiB of tile state on request only.
bool request_tile_state() {
#if defined(SYS_arch_prctl)
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

std::string text_of(std::initializer_list<unsigned> words) {
  std::string out;
  for (const unsigned word : words) {
    char bytes[4];
    std::memcpy(bytes, &word, sizeof bytes);
    out.append(bytes, sizeof bytes);
  }
  return out;
}

std::string brand_string() {
  if (static_cast<unsigned>(__get_cpuid_max(0x80000000u, nullptr)) < 0x80000004u) return "unknown";
  std::string out;
  for (unsigned leaf = 0x80000002u; leaf <= 0x80000004u; ++leaf) {
    const Registers r = cpuid(leaf, 0);
    out += text_of({r.eax, r.ebx, r.ecx, r.edx});
  }
  out.resize(std::strlen(out.c_str()));
  const size_t begin = out.find_first_not_of(' ');
  return begin == std::string::npos ? "unknown" : out.substr(begin);
}

CpuFeatures detect() {
  CpuFeatures f;
  const Registers leaf0 = cpuid(0, 0), leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  f.vendor = text_of({leaf0.ebx, leaf0.edx, leaf0.ecx});
  f.model = brand_string();
  if (!bit(leaf1.ecx, 27)) return f;  // OSXSAVE: without it XGETBV is not there
  const uint64_t saved = xcr0();
  const bool ymm = (saved & 0x6u) == 0x6u, zmm = (saved & 0xE6u) == 0xE6u, tiles = (saved & 0x60000u) == 0x60000u;
  const bool fma = bit(leaf1.ecx, 12), f16c = bit(leaf1.ecx, 29);
  const bool avx2 = bit(leaf7.ebx, 5), bmi2 = bit(leaf7.ebx, 8);
  if (!(ymm && fma && f16c && avx2 && bmi2)) return f;
  f.best = Isa::kAvx2;
  const bool avx512 =
      bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 28) && bit(leaf7.ebx, 30) && bit(leaf7.ebx, 31);
  if (!(zmm && avx512)) return f;
  f.best = Isa::kAvx512;
  f.avx512_vbmi = bit(leaf7.ecx, 1);
  f.avx512_vnni = bit(leaf7.ecx, 11);
  f.avx512_fp16 = bit(leaf7.edx, 23);
  f.avx512_bf16 = bit(leaf7_1.eax, 5);
  f.amx_bf16 = tiles && bit(leaf7.edx, 22) && bit(leaf7.edx, 24) && request_tile_state();
  if (f.amx_bf16 && f.avx512_bf16 && f.avx512_vnni && f.avx512_vbmi) f.best = Isa::kAmx;
  return f;
}

#else

CpuFeatures detect() {
  CpuFeatures f;
  f.vendor = f.model = "unknown";
  return f;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

std::vector<std::string> compiled_isas() {
  std::vector<std::string> out;
  for (const Isa isa : kLevels) out.emplace_back(isa_name(isa));
  return out;
}

Result<Isa> choose_isa() {
  const char* wanted = std::getenv("FIRN_ISA");
  if (wanted == nullptr || *wanted == '\0') return cpu_features().best;
  for (const Isa isa : kLevels) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    if (isa > cpu_features().best) {
      return unsupported(fmt::format("FIRN_ISA={}: this CPU ({}) goes up to {}; unset FIRN_ISA or name a lower level",
                                     wanted, cpu_features().model, isa_name(cpu_features().best)));
    }
    // oneDNN chooses by itself; a lowered level must lower it too, before its first product.
    static constexpr dnnl_cpu_isa_t kMost[] = {dnnl_cpu_isa_sse41, dnnl_cpu_isa_avx2, dnnl_cpu_isa_avx512_core_bf16,
                                               dnnl_cpu_isa_all};
    dnnl_set_max_cpu_isa(kMost[static_cast<size_t>(isa)]);
    return isa;
  }
  return invalid(fmt::format("FIRN_ISA={}: expected scalar, avx2, avx512 or amx", wanted));
}

GemmType gemm_type(Isa isa) {
  const CpuFeatures& f = cpu_features();
  if (isa >= Isa::kAmx && f.amx_bf16) return GemmType::kBf16;
  const bool amd = f.vendor == "AuthenticAMD" || f.vendor == "HygonGenuine";
  if (isa >= Isa::kAvx512 && f.avx512_bf16 && amd) return GemmType::kBf16;
  return GemmType::kF32;
}

}  // namespace firn::cpu
