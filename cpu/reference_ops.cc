// The scalar oracle's object: copies, tickets and what its operations share.
#include <cstring>

#include "cpu/reference_internal.h"

namespace firn::cpu {

std::unique_ptr<Ops> make_reference_ops(Arena* arena) { return std::make_unique<ReferenceOps>(arena); }

std::vector<const KvSpan*> row_spans(std::span<const KvSpan> spans, int64_t rows) {
  std::vector<const KvSpan*> out(static_cast<size_t>(rows), nullptr);
  for (const KvSpan& span : spans) {
    FIRN_CHECK(span.row_begin >= 0 && span.n_rows >= 0 && span.row_begin + span.n_rows <= rows,
               "a span reaches outside the rows of its call");
    for (int64_t r = span.row_begin; r < span.row_begin + span.n_rows; ++r) {
      FIRN_CHECK(out[static_cast<size_t>(r)] == nullptr, "two spans hold the same row");
      out[static_cast<size_t>(r)] = &span;
    }
  }
  for (const KvSpan* span : out) FIRN_CHECK(span != nullptr, "a row belongs to no span");
  return out;
}

std::vector<int64_t> row_positions(std::span<const KvSpan> spans, int64_t rows) {
  const std::vector<const KvSpan*> of = row_spans(spans, rows);
  std::vector<int64_t> out(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const KvSpan& span = *of[static_cast<size_t>(r)];
    out[static_cast<size_t>(r)] = span.pos_begin + (r - span.row_begin);
  }
  return out;
}

void ReferenceOps::check_space(const ConstMatrixView& view, const char* what) const {
  FIRN_CHECK(view.data == nullptr || view.space == space(), std::string(what) + ": the view lies in another space");
}

Ticket ReferenceOps::upload(void* dst, const void* host_src, int64_t bytes) {
  if (bytes > 0) std::memcpy(dst, host_src, static_cast<size_t>(bytes));
  return done();
}

Ticket ReferenceOps::download(void* host_dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memcpy(host_dst, src, static_cast<size_t>(bytes));
  return done();
}

Ticket ReferenceOps::copy(void* dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memmove(dst, src, static_cast<size_t>(bytes));
  return done();
}

Ticket ReferenceOps::zero(void* dst, int64_t bytes) {
  if (bytes > 0) std::memset(dst, 0, static_cast<size_t>(bytes));
  return done();
}

Status ReferenceOps::wait(Ticket ticket) {
  FIRN_CHECK(ticket.id <= last_ticket_, "waiting for a ticket that was never issued");
  return {};
}

int64_t ReferenceOps::scratch_bytes(const Limits&) const { return 0; }

}  // namespace firn::cpu
