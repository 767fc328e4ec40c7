// Detection of instruction sets and FIRN_ISA.
#include "cpu/isa.h"

#include <cstdlib>

#include "cpu/cpu_ops.h"
#include "cpu/device.h"
#include "support/catch.h"

namespace firn::test {
namespace {

// Sets FIRN_ISA for a scope and puts back what was there.
class IsaVariable {
 public:
  explicit IsaVariable(const char* value) {
    const char* old = std::getenv("FIRN_ISA");
    had_ = old != nullptr;
    if (had_) old_ = old;
    setenv("FIRN_ISA", value, 1);
  }
  ~IsaVariable() {
    if (had_) {
      setenv("FIRN_ISA", old_.c_str(), 1);
    } else {
      unsetenv("FIRN_ISA");
    }
  }

 private:
  bool had_ = false;
  std::string old_;
};

TEST_CASE("CPU features are consistent") {
  const cpu::CpuFeatures& f = cpu::cpu_features();
  CHECK_FALSE(f.vendor.empty());
  CHECK_FALSE(f.model.empty());
  CHECK(f.model.find('\0') == std::string::npos);
  if (f.best >= cpu::Isa::kAmx) CHECK((f.amx_bf16 && f.avx512_bf16));
  if (f.amx_bf16 || f.avx512_bf16 || f.avx512_vnni) CHECK(f.best >= cpu::Isa::kAvx512);
#if defined(__x86_64__)
  CHECK((__builtin_cpu_supports("avx2") != 0) == (f.best >= cpu::Isa::kAvx2));
  CHECK((__builtin_cpu_supports("avx512bw") != 0) == (f.best >= cpu::Isa::kAvx512));
#endif
}

TEST_CASE("FIRN_ISA lowers the level, and a wrong value is an error that says what is right") {
  const cpu::Isa best = cpu::cpu_features().best;
  {
    const IsaVariable v("");
    CHECK(must_have(cpu::choose_isa()) == best);
  }
  {
    const IsaVariable v("scalar");
    CHECK(must_have(cpu::choose_isa()) == cpu::Isa::kScalar);
  }
  for (const char* wrong : {"AVX2", "sse", "avx512 ", "best"}) {
    const IsaVariable v(wrong);
    const auto result = cpu::choose_isa();
    CHECK(result.status().code() == Code::kInvalid);
    CHECK(result.status().message().find(wrong) != std::string::npos);
    CHECK(result.status().message().find("avx512") != std::string::npos);
  }
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    const IsaVariable v(cpu::isa_name(isa));
    const auto result = cpu::choose_isa();
    CHECK(result.ok() == (isa <= best));
    if (!result.ok()) CHECK(result.status().code() == Code::kUnsupported);
  }
}

TEST_CASE("every level of the CPU makes an Ops, a higher one is refused") {
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto team = must_have(ThreadTeam::create(1, {}));
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    const auto result = cpu::CpuOps::create(team.get(), &arena, isa);
    CHECK(result.ok() == (isa <= cpu::cpu_features().best));
    if (result.ok()) CHECK(result.value()->name().find(cpu::isa_name(isa)) != std::string::npos);
  }
}

TEST_CASE("the product type follows the features") {
  CHECK(cpu::gemm_type(cpu::Isa::kScalar) == cpu::GemmType::kF32);
  CHECK(cpu::gemm_type(cpu::Isa::kAvx2) == cpu::GemmType::kF32);
  if (cpu::cpu_features().amx_bf16) CHECK(cpu::gemm_type(cpu::Isa::kAmx) == cpu::GemmType::kBf16);
}

TEST_CASE("scratch bounds grow with every limit") {
  Budget budget("test", -1);
  HostArena arena(&budget);
  const auto team = must_have(ThreadTeam::create(2, {}));
  const auto ops = must_have(cpu::CpuOps::create(team.get(), &arena, cpu::Isa::kScalar));
  const Ops::Limits m3{1024, 6144, 12288, 64, 128, 200064, 8192, 4};
  const int64_t bytes = ops->scratch_bytes(m3);
  CHECK(bytes > 0);
  Ops::Limits more = m3;
  more.rows *= 2;
  CHECK(ops->scratch_bytes(more) > bytes);
  more = m3;
  more.intermediate *= 2;
  CHECK(ops->scratch_bytes(more) > bytes);
}

}  // namespace
}  // namespace firn::test
