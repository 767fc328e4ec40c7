// Attention on every instruction set against the oracle, and the bits that must not change: with the number of threads,
// with the cut of the rows, by way of partials, with what recycled memory holds.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "cpu/attention_kernels.h"
#include "cpu/attention_rows.h"
#include "cpu/cpu_ops.h"
#include "cpu/reference.h"
#include "support/catch.h"
#include "support/oracle.h"

namespace firn::test {
namespace {

std::vector<cpu::Isa> levels() {
  std::vector<cpu::Isa> out;
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    if (isa <= cpu::cpu_features().best) out.push_back(isa);
  }
  return out;
}

struct Backend {
  explicit Backend(cpu::Isa isa, int threads = 1)
      : team(std::move(ThreadTeam::create(threads, {}).value())),
        ops(std::move(cpu::CpuOps::create(team.get(), &arena, isa).value())) {}
  Budget budget{"test", -1};
  HostArena arena{&budget};
  std::unique_ptr<ThreadTeam> team;
  std::unique_ptr<cpu::CpuOps> ops;
};

struct Oracle {
  Budget budget{"test", -1};
  HostArena arena{&budget};
  std::unique_ptr<Ops> ops = cpu::make_reference_ops(&arena);
};

struct Shape {
  DType dtype = DType::kBf16;
  int64_t dim = 64, groups = 1, per_group = 1, depth = 1, rows = 1, topk = 0;  // topk 0: dense
  int64_t block_tokens = 128;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << dtype_name(s.dtype) << " dim " << s.dim << " groups " << s.groups << " x " << s.per_group << " depth "
             << s.depth << " rows " << s.rows << " topk " << s.topk << " block " << s.block_tokens;
}

// A sequence of shape.depth tokens whose last shape.rows rows are the queries. Memory starts out filled with `fill`, so
// whatever the keys do not cover is NaN (0xFF) or some number.
class Sequence {
 public:
  Sequence(const Shape& shape, uint8_t fill, uint64_t seed) : s(shape) {
    layout = {s.dtype, s.block_tokens, s.groups, s.dim, 0};
    n_blocks = (s.depth + s.block_tokens - 1) / s.block_tokens;
    memory.assign(static_cast<size_t>(s.groups * n_blocks * layout.kv_block_bytes()), fill);
    // The tables run backwards: neighbours in the sequence are not neighbours in memory.
    for (int64_t i = 0; i < s.groups * n_blocks; ++i) {
      table.push_back(memory.data() + (s.groups * n_blocks - 1 - i) * layout.kv_block_bytes());
    }
    k = std::make_unique<TestMatrix>(TestMatrix::random(s.dtype, s.depth, s.groups * s.dim, seed));
    v = std::make_unique<TestMatrix>(TestMatrix::random(DType::kF32, s.depth, s.groups * s.dim, seed + 1));
    q = std::make_unique<TestMatrix>(
        TestMatrix::random(s.dtype, s.rows, s.groups * s.per_group * s.dim, seed + 2, 1.0, 3));
    if (s.topk > 0) {
      ids = std::make_unique<TestMatrix>(DType::kI32, s.rows, s.groups * s.topk);
      std::mt19937_64 rng(seed + 3);
      for (int64_t r = 0; r < s.rows; ++r) {
        for (int64_t g = 0; g < s.groups; ++g) choose(r, g, rng);
      }
    }
  }

  // Random ascending blocks, the own one always among them.
  void choose(int64_t r, int64_t g, std::mt19937_64& rng) {
    const int64_t own = (position() + r) / s.block_tokens;
    std::vector<int32_t> all(static_cast<size_t>(own));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng);
    all.resize(std::min(all.size(), static_cast<size_t>(s.topk - 1)));
    all.push_back(static_cast<int32_t>(own));
    std::sort(all.begin(), all.end());
    int32_t* out = static_cast<int32_t*>(ids->view().row(r)) + g * s.topk;
    for (int64_t j = 0; j < s.topk; ++j)
      out[j] = j < static_cast<int64_t>(all.size()) ? all[static_cast<size_t>(j)] : -1;
  }

  int64_t position() const { return s.depth - s.rows; }
  KvSpan span(int64_t row_begin, int64_t n_rows, int64_t pos) const {
    return {row_begin, n_rows, pos, table.data(), nullptr, n_blocks};
  }
  void append(Ops& ops) {
    const KvSpan all[] = {span(0, s.depth, 0)};
    REQUIRE(ops.wait(ops.kv_append({k->view(), v->view(), all, layout})).ok());
  }
  AttentionParams params(const MatrixView& out, std::span<const KvSpan> spans, int64_t first, int64_t n) const {
    AttentionParams p;
    p.q = q->view().slice_rows(first, n);
    p.heads_per_group = s.per_group;
    p.spans = spans;
    p.layout = layout;
    p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.dim)));
    if (ids) p.block_ids = ids->view().slice_rows(first, n);
    p.topk = s.topk;
    p.out = out;
    return p;
  }
  // Attention of rows [first, first + n) in one call.
  void attend(Ops& ops, TestMatrix* out, int64_t first, int64_t n) const {
    const KvSpan spans[] = {span(0, n, position() + first)};
    REQUIRE(ops.wait(ops.attention(params(out->view().slice_rows(first, n), spans, first, n))).ok());
  }
  TestMatrix attend(Ops& ops, DType dtype) const {
    TestMatrix out(dtype, s.rows, s.groups * s.per_group * s.dim, 1);
    attend(ops, &out, 0, s.rows);
    return out;
  }

  Shape s;
  KvLayout layout;
  int64_t n_blocks = 0;
  std::vector<uint8_t> memory;
  std::vector<void*> table;
  std::unique_ptr<TestMatrix> k, v, q, ids;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const auto add = [&](DType dtype, int64_t dim, int64_t groups, int64_t per_group, int64_t depth, int64_t rows,
                       int64_t topk, int64_t block_tokens = 128) {
    all.push_back({dtype, dim, groups, per_group, depth, rows, topk, block_tokens});
  };
  for (const int64_t depth : {1, 127, 128, 129, 255})
    add(DType::kBf16, 64, 2, 2, depth, std::min<int64_t>(depth, 2), 0);
  for (const int64_t depth : {2047, 2048, 2049, 2175, 2176}) add(DType::kBf16, 32, 1, 2, depth, 2, 16);
  for (const int64_t dim : {8, 16, 24, 40, 96, 128, 192, 256, 20, 7}) add(DType::kBf16, dim, 1, 2, 300, 3, 0);
  for (const int64_t dim : {16, 24, 128, 256, 10}) add(DType::kF32, dim, 2, 1, 300, 3, 2);
  add(DType::kBf16, 128, 4, 16, 5000, 1, 16);  // decode as the model does it
  add(DType::kBf16, 128, 1, 16, 1000, 37, 4);
  add(DType::kF32, 128, 1, 16, 700, 20, 4);
  add(DType::kBf16, 64, 2, 20, 600, 5, 0);  // more heads a group than one call of a kernel takes
  add(DType::kF32, 64, 4, 1, 5000, 2, 1);
  add(DType::kBf16, 64, 1, 3, 200, 200, 0);  // every row of a prompt
  add(DType::kF32, 32, 2, 2, 400, 150, 2);
  add(DType::kBf16, 128, 2, 8, 3000, 70, 5);    // two rows a query tile
  add(DType::kBf16, 64, 1, 5, 1500, 150, 6);    // three rows a query tile, one column to spare
  add(DType::kBf16, 96, 1, 17, 900, 9, 3);      // a query tile with one head
  add(DType::kBf16, 32, 1, 2, 100, 40, 3, 16);  // other block sizes
  add(DType::kBf16, 64, 2, 16, 200, 30, 3, 48);
  add(DType::kBf16, 32, 1, 2, 100, 40, 0, 20);
  return all;
}

TEST_CASE("exp of the kernels is within two units in the last place", "[attention]") {
  for (const cpu::AttentionKernels* kernels : {&cpu::kAttentionScalar, &cpu::kAttentionAvx2, &cpu::kAttentionAvx512}) {
    if (kernels == &cpu::kAttentionAvx2 && cpu::cpu_features().best < cpu::Isa::kAvx2) continue;
    if (kernels == &cpu::kAttentionAvx512 && cpu::cpu_features().best < cpu::Isa::kAvx512) continue;
    double worst = 0;
    for (int i = 0; i <= 200000; ++i) {
      const float x = -87.3f * static_cast<float>(i) / 200000.0f * (i % 3 == 0 ? 1.0f : 0.01f);
      const double want = std::exp(static_cast<double>(x));
      const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
      const double error = std::abs(static_cast<double>(kernels->exp_nonpositive(x)) - want) / ulp;
      if (!(error <= worst)) worst = error;
    }
    CHECK(worst <= 1.5);
    CHECK(kernels->exp_nonpositive(0.0f) == 1.0f);
    CHECK(kernels->exp_nonpositive(-88.0f) == 0.0f);
    CHECK(kernels->exp_nonpositive(-1e30f) == 0.0f);
    CHECK(kernels->exp_nonpositive(-std::numeric_limits<float>::infinity()) == 0.0f);
    CHECK(std::isnan(kernels->exp_nonpositive(std::numeric_limits<float>::quiet_NaN())));
  }
}

TEST_CASE("kv_append writes what the oracle writes", "[attention]") {
  Oracle oracle;
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Shape shape{dtype, 24, 2, 1, 700, 1, 0};
    Sequence want(shape, 0x5A, 5);
    want.append(*oracle.ops);
    for (const int threads : {1, 5}) {
      Backend backend(levels().back(), threads);
      Sequence got(shape, 0x5A, 5);
      got.append(*backend.ops);
      CHECK(got.memory == want.memory);
      // In two spans, the second beginning inside a block.
      Sequence cut(shape, 0x5A, 5);
      const KvSpan spans[] = {cut.span(0, 300, 0), cut.span(300, 400, 300)};
      REQUIRE(backend.ops->wait(backend.ops->kv_append({cut.k->view(), cut.v->view(), spans, cut.layout})).ok());
      CHECK(cut.memory == want.memory);
    }
  }
}

TEST_CASE("attention agrees with the oracle in every shape, on every level", "[attention]") {
  Oracle oracle;
  uint64_t seed = 100;
  for (const Shape& shape : shapes()) {
    CAPTURE(shape);
    Sequence sequence(shape, 0xFF, seed += 10);
    sequence.append(*oracle.ops);
    const TestMatrix want = sequence.attend(*oracle.ops, DType::kF32);
    for (const cpu::Isa isa : levels()) {
      CAPTURE(cpu::isa_name(isa));
      Backend one(isa, 1);
      const TestMatrix got = sequence.attend(*one.ops, DType::kF32);
      // |v| stays below 6; scores err by some 2^-24 * sqrt(dim) * |q||k| / sqrt(dim).
      const Match match = compare(got.view(), want.view(), [](int64_t, int64_t, double) { return 1e-5; });
      INFO(match.message);
      CHECK(match.ok);
      CHECK(got.padding_untouched());
      const TestMatrix rounded = sequence.attend(*one.ops, DType::kBf16);
      const Match close_enough = compare(rounded.view(), want.view(), [](int64_t, int64_t, double w) {
        return 1.01 * unit(DType::kBf16) * std::abs(w) + 1e-5;
      });
      INFO(close_enough.message);
      CHECK(close_enough.ok);
    }
  }
}

TEST_CASE("attention's bits depend on neither threads nor cuts nor the way through partials", "[attention]") {
  uint64_t seed = 7000;
  Oracle oracle;
  for (const Shape& shape : shapes()) {
    CAPTURE(shape);
    Sequence sequence(shape, 0xFF, seed += 10);
    sequence.append(*oracle.ops);
    for (const cpu::Isa isa : levels()) {
      CAPTURE(cpu::isa_name(isa));
      Backend one(isa, 1), two(isa, 2), many(isa, 64);
      const TestMatrix want = sequence.attend(*one.ops, DType::kF32);
      CHECK(sequence.attend(*two.ops, DType::kF32) == want);
      CHECK(sequence.attend(*many.ops, DType::kF32) == want);

      TestMatrix cut(DType::kF32, shape.rows, want.view().cols, 1);
      for (int64_t first = 0, n = 1; first < shape.rows; first += n, n = std::min(2 * n + 1, shape.rows - first)) {
        sequence.attend(first % 2 == 0 ? *one.ops : *many.ops, &cut, first, std::min(n, shape.rows - first));
      }
      CHECK(cut == want);

      if (shape.topk == 0) continue;
      const int64_t heads = shape.groups * shape.per_group;
      for (Backend* backend : {&one, &many}) {
        TestMatrix partials(DType::kF32, shape.rows * heads, shape.topk * (shape.dim + 2));
        TestMatrix even(DType::kI32, shape.rows, shape.groups * shape.topk), odd = even;
        for (int64_t r = 0; r < shape.rows; ++r) {
          for (int64_t c = 0; c < shape.groups * shape.topk; ++c) {
            even.set(r, c, (r + c) % 2 == 0 ? 5 : 0);
            odd.set(r, c, (r + c) % 2 == 0 ? 0 : -1);
          }
        }
        const KvSpan spans[] = {sequence.span(0, shape.rows, sequence.position())};
        Ops& ops = *backend->ops;
        for (TestMatrix* only : {&odd, &even}) {
          AttentionPartialParams p;
          p.base = sequence.params({}, spans, 0, shape.rows);
          p.only = only->view();
          p.partials = partials.view();
          REQUIRE(ops.wait(ops.attention_partial(p)).ok());
        }
        TestMatrix merged(DType::kF32, shape.rows, want.view().cols, 1);
        REQUIRE(ops.wait(ops.attention_merge({partials.view(), sequence.ids->view(), shape.groups, shape.per_group,
                                              shape.dim, shape.topk, merged.view()}))
                    .ok());
        CHECK(merged == want);
      }
    }
  }
}

TEST_CASE("attention sees nothing of what memory held before", "[attention]") {
  for (const int64_t depth : {1, 127, 128, 129, 255, 2047, 2048, 2049, 2175}) {
    const Shape shape{DType::kBf16, 64, 2, 4, depth, std::min<int64_t>(depth, 3), depth > 2000 ? 4 : 0};
    CAPTURE(shape);
    for (const cpu::Isa isa : levels()) {
      Backend backend(isa, 3);
      Sequence zero(shape, 0, 40);
      zero.append(*backend.ops);
      const TestMatrix want = zero.attend(*backend.ops, DType::kBf16);
      for (const int fill : {0xFF, 0x7F, 0x46}) {  // NaN, NaN, some 12,000
        Sequence poisoned(shape, static_cast<uint8_t>(fill), 40);
        poisoned.append(*backend.ops);
        CHECK(poisoned.attend(*backend.ops, DType::kBf16) == want);
      }
    }
  }
}

TEST_CASE("several sequences in one call get what each gets alone", "[attention]") {
  const Shape long_one{DType::kBf16, 64, 2, 2, 900, 20, 3}, short_one{DType::kBf16, 64, 2, 2, 130, 4, 3};
  for (const int threads : {1, 2, 64}) {
    Backend backend(levels().back(), threads);
    Sequence a(long_one, 0xFF, 1), b(short_one, 0xFF, 9);
    a.append(*backend.ops);
    b.append(*backend.ops);
    const TestMatrix want_a = a.attend(*backend.ops, DType::kF32), want_b = b.attend(*backend.ops, DType::kF32);
    TestMatrix q(DType::kBf16, 24, 256), ids(DType::kI32, 24, 6), out(DType::kF32, 24, 256);
    for (int64_t r = 0; r < 24; ++r) {
      const Sequence& from = r < 20 ? a : b;
      for (int64_t c = 0; c < 256; ++c) q.set(r, c, static_cast<float>(from.q->at(r < 20 ? r : r - 20, c)));
      for (int64_t c = 0; c < 6; ++c) ids.set(r, c, static_cast<float>(from.ids->at(r < 20 ? r : r - 20, c)));
    }
    const KvSpan spans[] = {a.span(0, 20, a.position()), b.span(20, 4, b.position())};
    AttentionParams p = a.params(out.view(), spans, 0, 20);
    p.q = q.view();
    p.block_ids = ids.view();
    REQUIRE(backend.ops->wait(backend.ops->attention(p)).ok());
    for (int64_t r = 0; r < 24; ++r) {
      const TestMatrix& want = r < 20 ? want_a : want_b;
      CHECK(std::memcmp(out.view().row(r), want.view().row(r < 20 ? r : r - 20), 256 * 4) == 0);
    }
  }
}

TEST_CASE("a long context in rounds: a query over more blocks than one round holds", "[attention]") {
  // 4,000 blocks of 16 keys, 64 heads of dim 128: triples of one round would take 147 MB, a round holds 24 MiB.
  const Shape shape{DType::kBf16, 128, 4, 16, 64000, 1, 0, 16};
  Backend one(levels().back(), 1), many(levels().back(), 8);
  Sequence sequence(shape, 0xFF, 3);
  sequence.append(*one.ops);
  const TestMatrix want = sequence.attend(*one.ops, DType::kF32);
  CHECK(sequence.attend(*many.ops, DType::kF32) == want);
  CHECK(many.budget.used_bytes() <= int64_t{64} << 20);
}

TEST_CASE("a NaN in a visible key or value reaches the heads that see it, and no other", "[attention]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const cpu::Isa isa : levels()) {
    for (const bool in_value : {false, true}) {
      Backend backend(isa, 2);
      Sequence sequence({DType::kBf16, 32, 2, 2, 300, 2, 0}, 0, 11);
      (in_value ? *sequence.v : *sequence.k).set(40, 5, nan);
      sequence.append(*backend.ops);
      const TestMatrix out = sequence.attend(*backend.ops, DType::kF32);
      for (int64_t r = 0; r < 2; ++r) {
        for (int64_t c = 0; c < 128; ++c) {
          const bool hit = in_value ? c == 5 || c == 32 + 5 : c < 64;
          CHECK(std::isnan(out.at(r, c)) == hit);
        }
      }
    }
  }
}

TEST_CASE("a NaN that only later rows see does not reach the rows before", "[attention]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const cpu::Isa isa : levels()) {
    for (const int64_t per_group : {2, 16}) {
      for (const bool in_value : {false, true}) {
        Backend backend(isa, 1);
        Sequence sequence({DType::kBf16, 64, 1, per_group, 300, 40, 0}, 0, 12);
        (in_value ? *sequence.v : *sequence.k).set(275, 5, nan);
        sequence.append(*backend.ops);
        const TestMatrix out = sequence.attend(*backend.ops, DType::kF32);
        for (int64_t r = 0; r < 40; ++r) {
          for (int64_t c = 0; c < per_group * 64; ++c) {
            const bool hit = sequence.position() + r >= 275 && (!in_value || c % 64 == 5);
            CHECK(std::isnan(out.at(r, c)) == hit);
          }
        }
      }
    }
  }
}

TEST_CASE("attention: scratch stays within what a plan is told", "[attention]") {
  for (const cpu::Isa isa : levels()) {
    for (const int threads : {1, 2, 5, 40}) {
      for (const Shape& shape :
           {Shape{DType::kBf16, 128, 4, 16, 3000, 1, 0}, Shape{DType::kBf16, 128, 4, 16, 3000, 130, 16},
            Shape{DType::kBf16, 64, 1, 20, 600, 256, 3}, Shape{DType::kBf16, 64, 20, 1, 600, 70, 3},
            Shape{DType::kF32, 128, 2, 3, 600, 70, 3}}) {
        CAPTURE(shape, threads, cpu::isa_name(isa));
        if (isa < cpu::Isa::kAvx2 && shape.depth > 1000) continue;  // slow, and of the same sizes
        Backend backend(isa, threads);
        Sequence sequence(shape, 0, 13);
        sequence.append(*backend.ops);
        sequence.attend(*backend.ops, DType::kBf16);
        Ops::Limits limits;
        limits.rows = shape.rows;
        limits.heads = shape.groups * shape.per_group;
        limits.head_dim = shape.dim;
        CHECK(backend.budget.used_bytes() <= cpu::attention_scratch_bytes(limits, threads));
      }
    }
  }
}

}  // namespace
}  // namespace firn::test
