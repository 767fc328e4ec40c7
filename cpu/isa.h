// Which instruction sets the CPU backend uses: detected once, lowered on request, never chosen by a timing.
//
// Kernels of every level are in one binary; the files whose names end in _avx2.cc, _avx512.cc and _avx512bf16.cc are
// the only ones compiled with those flags, include nothing but POD headers and define nothing inline that the linker
// could share with baseline code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/status.h"

namespace firn::cpu {

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAmx };  // ascending: each level includes those below

struct CpuFeatures {
  Isa best = Isa::kScalar;
  bool avx512_bf16 = false, avx512_vnni = false, avx512_vbmi = false, avx512_fp16 = false;
  bool amx_bf16 = false;  // the CPU has it and the kernel granted tile state to this process
  std::string vendor, model;
};

const CpuFeatures& cpu_features();         // detected once; thread-safe
const char* isa_name(Isa isa);             // "scalar", "avx2", "avx512", "amx"
std::vector<std::string> compiled_isas();  // for --version

// The level to use: the best this CPU has, or what the environment variable FIRN_ISA asks for. Errors: an unknown name;
// a level this CPU lacks.
Result<Isa> choose_isa();

// The type many-token products are computed in, by CPU features: bf16 where the CPU multiplies bf16 faster (AMX, Zen 4
// and later AVX512_BF16), f32 on bf16-rounded inputs elsewhere. The table and the measurements behind it are in isa.cc.
enum class GemmType : uint8_t { kF32, kBf16 };
GemmType gemm_type(Isa isa);

}  // namespace firn::cpu
