// CpuOps: construction, scratch memory, copies and tickets. The operations are in cpu_ops_*.cc.
#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cstring>

#include "cpu/amx_gemm.h"
#include "cpu/attention_rows.h"
#include "cpu/linear_products.h"
#include "cpu/rows_scratch.h"
#include "fmt/format.h"

namespace firn::cpu {
namespace {

// Pieces a large copy is cut into, so that several cores pull on memory.
constexpr int64_t kCopyPiece = int64_t{1} << 20;

constexpr const char* kScratchNames[] = {"gate and up projections", "activations",        "dequantised weight tiles",
                                         "rotary tables",           "attention partials", "block scores",
                                         "packed products",         "block selection",    "inputs as float",
                                         "router logits",           "two-term inputs",    "two-term sums"};

}  // namespace

Result<std::unique_ptr<CpuOps>> CpuOps::create(ThreadTeam* team, Arena* arena, Isa isa) {
  FIRN_CHECK(team != nullptr && arena != nullptr, "CpuOps needs a thread team and an arena");
  FIRN_CHECK(arena->space() == Space::kHost, "CpuOps works in host memory");
  if (isa > cpu_features().best) {
    return unsupported(
        fmt::format("CPU kernels of level {} asked for, but this CPU ({}) goes up to {}; choose a lower "
                    "level with FIRN_ISA",
                    isa_name(isa), cpu_features().model, isa_name(cpu_features().best)));
  }
  return std::unique_ptr<CpuOps>(new CpuOps(team, arena, isa));
}

CpuOps::CpuOps(ThreadTeam* team, Arena* arena, Isa isa) : team_(team), arena_(arena), isa_(isa) {
  static_assert(sizeof kScratchNames / sizeof kScratchNames[0] == kScratchCount, "each scratch slot has a name");
}

CpuOps::~CpuOps() = default;

std::string CpuOps::name() const { return fmt::format("cpu/{}", isa_name(isa_)); }

std::byte* CpuOps::scratch(Scratch slot, int64_t bytes) {
  Buffer& buffer = scratch_[slot];
  if (bytes <= 0) bytes = 1;  // so that nullptr always means refusal
  if (buffer.bytes() < bytes) {
    buffer = Buffer();  // its bytes go back first: the old and the new need never be charged together
    const int64_t rounded = (bytes + 4095) / 4096 * 4096;
    Result<Buffer> grown = arena_->allocate(rounded, fmt::format("CPU scratch ({})", kScratchNames[slot]));
    if (!grown.ok()) {
      record_failure(grown.status(), last_ticket_ + 1);
      return nullptr;
    }
    buffer = std::move(grown).value();
  }
  return buffer.as<std::byte>();
}

void CpuOps::record_failure(const Status& status, uint64_t ticket) {
  FIRN_CHECK(!status.ok(), "an operation failed without a reason");
  if (!failure_.ok()) return;  // the first failure is the one that explains the others
  failure_ = status;
  failed_ticket_ = ticket;
}

Ticket CpuOps::fail(Status status) {
  const Ticket ticket = done();
  record_failure(status, ticket.id);
  return ticket;
}

// The only failures are scratch that the budget refused and shapes that oneDNN refused: neither outlives its call.
Status CpuOps::recover() {
  failure_ = Status();
  failed_ticket_ = 0;
  return {};
}

Status CpuOps::wait(Ticket ticket) {
  FIRN_CHECK(ticket.id <= last_ticket_, "waiting for a ticket that was never issued");
  return !failure_.ok() && ticket.id >= failed_ticket_ ? failure_ : Status();
}

Ticket CpuOps::copy(void* dst, const void* src, int64_t bytes) {
  if (failed() || bytes <= 0) return done();
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const bool apart = to + bytes <= from || from + bytes <= to;
  if (bytes <= kCopyPiece || !apart) {
    std::memmove(to, from, static_cast<size_t>(bytes));
  } else {
    team_->parallel_for(bytes, kCopyPiece, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
  }
  return done();
}

Ticket CpuOps::upload(void* dst, const void* host_src, int64_t bytes) { return copy(dst, host_src, bytes); }

Ticket CpuOps::download(void* host_dst, const void* src, int64_t bytes) { return copy(host_dst, src, bytes); }

Ticket CpuOps::zero(void* dst, int64_t bytes) {
  if (failed() || bytes <= 0) return done();
  auto* to = static_cast<char*>(dst);
  team_->parallel_for(bytes, kCopyPiece, [&](int64_t begin, int64_t end, int) {
    std::memset(to + begin, 0, static_cast<size_t>(end - begin));
  });
  return done();
}

// An upper bound over both activation types and both product types: inputs widened to float, activations of the gated
// MLPs, and what the files of the operations need beside them.
int64_t CpuOps::scratch_bytes(const Limits& limits) const {
  const int n_threads = team_->size();
  const int64_t attention_width = limits.heads * limits.head_dim;
  const int64_t input = std::max(limits.hidden, attention_width), widest = std::max(input, limits.intermediate);
  const int64_t pad = kXPad;
  // Rows of a bf16 call that take the few-rows path keep float activations beside the others' bf16 ones.
  constexpr int64_t kExperts = 512;
  const int64_t few = std::min(limits.rows, kFewRows * kExperts);
  const int64_t products = limits.rows * (input + limits.intermediate + 2 * pad) * 4 +
                           few * (limits.intermediate + pad) * 2 + 2 * limits.rows * (input * 2 + attention_width * 4) +
                           (isa_ >= Isa::kAmx ? 2 * amx_packed_bytes(limits.rows + kAmxRows, widest) : 0) +
                           linear_tile_bytes(n_threads, widest);
  return products + rows_scratch_bytes(limits, n_threads) + attention_scratch_bytes(limits, n_threads) +
         index_scratch_bytes(limits, n_threads) + int64_t{kScratchCount} * 4096;
}

}  // namespace firn::cpu
