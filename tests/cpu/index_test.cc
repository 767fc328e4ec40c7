// The index branch on every instruction set: the choice of blocks must be that of the canonical scores, whatever the
// keys, the level, the threads and the cut of the rows.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "cpu/attention_rows.h"
#include "cpu/cpu_ops.h"
#include "cpu/index_kernels.h"
#include "cpu/reference.h"
#include "support/catch.h"
#include "support/oracle.h"

namespace firn::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

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

struct Shape {
  DType dtype = DType::kBf16;
  int64_t dim = 32, heads = 1, depth = 1, rows = 1, topk = 4, init = 0, local = 1;
  int64_t block_tokens = 128;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << dtype_name(s.dtype) << " dim " << s.dim << " heads " << s.heads << " depth " << s.depth << " rows "
             << s.rows << " topk " << s.topk << " init " << s.init << " local " << s.local << " block "
             << s.block_tokens;
}

// Index keys of shape.depth tokens; the last shape.rows of them are the queries' positions.
class Sequence {
 public:
  Sequence(const Shape& shape, uint64_t seed, uint8_t fill = 0xFF)
      : s(shape),
        keys(TestMatrix::random(s.dtype, s.depth, s.dim, seed)),
        q(TestMatrix::random(s.dtype, s.rows, s.heads * s.dim, seed + 1, 1.0, 5)) {
    layout.dtype = s.dtype;
    layout.block_tokens = s.block_tokens;
    layout.index_dim = s.dim;
    n_blocks = (s.depth + s.block_tokens - 1) / s.block_tokens;
    memory.assign(static_cast<size_t>(n_blocks * layout.index_block_bytes()), fill);
    for (int64_t b = 0; b < n_blocks; ++b) {
      table.push_back(memory.data() + (n_blocks - 1 - b) * layout.index_block_bytes());
    }
  }
  int64_t position() const { return s.depth - s.rows; }
  KvSpan span(int64_t row_begin, int64_t n, int64_t pos) const {
    return {row_begin, n, pos, nullptr, table.data(), n_blocks};
  }
  void append(Ops& ops) {
    const KvSpan all[] = {span(0, s.depth, 0)};
    REQUIRE(ops.wait(ops.index_append({keys.view(), all, layout})).ok());
  }
  void select(Ops& ops, TestMatrix* ids, int64_t first, int64_t n) const {
    const KvSpan spans[] = {span(0, n, position() + first)};
    IndexSelectParams p;
    p.q = q.view().slice_rows(first, n);
    p.heads = s.heads;
    p.spans = spans;
    p.layout = layout;
    p.topk = s.topk;
    p.init_blocks = s.init;
    p.local_blocks = s.local;
    p.ids = ids->view().slice_rows(first, n);
    REQUIRE(ops.wait(ops.index_select(p)).ok());
  }
  TestMatrix select(Ops& ops) const {
    TestMatrix ids(DType::kI32, s.rows, s.heads * s.topk, 2);
    select(ops, &ids, 0, s.rows);
    return ids;
  }
  std::vector<float> canonical(int64_t r, int64_t h) const {
    const int64_t pos = position() + r, own = pos / s.block_tokens;
    const char* query =
        static_cast<const char*>(q.view().row(r)) + h * s.dim * static_cast<int64_t>(dtype_bytes(s.dtype));
    std::vector<float> scores;
    for (int64_t b = 0; b <= own; ++b) {
      scores.push_back(cpu::canonical_block_max(query, table[static_cast<size_t>(b)], s.dtype, s.dim,
                                                std::min(s.block_tokens, pos + 1 - b * s.block_tokens)));
    }
    return scores;
  }
  // By the definition alone.
  TestMatrix want() const {
    TestMatrix ids(DType::kI32, s.rows, s.heads * s.topk, 2);
    for (int64_t r = 0; r < s.rows; ++r) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const auto chosen =
            cpu::choose_blocks(canonical(r, h), (position() + r) / s.block_tokens, s.topk, s.init, s.local);
        int32_t* out = static_cast<int32_t*>(ids.view().row(r)) + h * s.topk;
        for (int64_t j = 0; j < s.topk; ++j) {
          out[j] = j < static_cast<int64_t>(chosen.size()) ? chosen[static_cast<size_t>(j)] : -1;
        }
      }
    }
    return ids;
  }

  Shape s;
  TestMatrix keys, q;
  KvLayout layout;
  int64_t n_blocks = 0;
  std::vector<uint8_t> memory;
  std::vector<void*> table;
};

// Every level and way of reading the keys, with one thread and with many, in one call and row by row.
void check_choice(const Sequence& sequence) {
  CAPTURE(sequence.s);
  const TestMatrix want = sequence.want();
  for (const cpu::Isa isa : levels()) {
    CAPTURE(cpu::isa_name(isa));
    Backend one(isa, 1), many(isa, 9);
    for (const cpu::IndexPath path : {cpu::IndexPath::kScan, cpu::IndexPath::kTwoStage}) {
      INFO((path == cpu::IndexPath::kScan ? "scan" : "two stages"));
      one.ops->set_index_path(path);
      many.ops->set_index_path(path);
      CHECK(sequence.select(*one.ops) == want);
      CHECK(sequence.select(*many.ops) == want);
      TestMatrix cut(DType::kI32, sequence.s.rows, sequence.s.heads * sequence.s.topk, 2);
      for (int64_t first = 0, n = 1; first < sequence.s.rows;
           first += n, n = std::min(n + 2, sequence.s.rows - first)) {
        sequence.select(*many.ops, &cut, first, n);
      }
      CHECK(cut == want);
    }
  }
}

void append_and_check(Sequence& sequence) {
  Backend backend(levels().back());
  sequence.append(*backend.ops);
  check_choice(sequence);
}

TEST_CASE("index: the choice is the canonical one in every shape", "[index]") {
  std::vector<Shape> shapes;
  for (const int64_t depth : {1, 127, 128, 129, 511, 512, 513, 641}) {
    shapes.push_back({DType::kBf16, 64, 2, depth, std::min<int64_t>(depth, 3), 4, 0, 1});
  }
  for (const int64_t depth : {2047, 2048, 2049, 2175, 2176, 5000}) {
    shapes.push_back({DType::kBf16, 128, 4, depth, 2, 16, 0, 1});
  }
  for (const int64_t dim : {8, 16, 24, 32, 40, 96, 192, 256, 7}) {
    shapes.push_back({DType::kBf16, dim, 2, 1500, 2, 4, 1, 2});
    shapes.push_back({DType::kF32, dim, 1, 1500, 2, 4, 0, 1});
  }
  shapes.push_back({DType::kBf16, 64, 3, 1500, 1, 1, 0, 1});    // the own block only
  shapes.push_back({DType::kBf16, 64, 3, 1500, 5, 3, 1, 2});    // forced blocks take every place
  shapes.push_back({DType::kBf16, 64, 2, 1500, 5, 4, 1, 0});    // the own block is not forced
  shapes.push_back({DType::kBf16, 64, 4, 1000, 600, 4, 0, 1});  // many rows, across the border of choosing at all
  shapes.push_back({DType::kF32, 128, 4, 900, 100, 4, 0, 1});
  shapes.push_back({DType::kBf16, 64, 17, 2000, 3, 4, 0, 1});  // more heads than one tile of queries
  shapes.push_back({DType::kBf16, 64, 2, 700, 40, 5, 0, 1, 16});
  shapes.push_back({DType::kBf16, 64, 2, 700, 40, 5, 0, 1, 48});
  shapes.push_back({DType::kBf16, 64, 2, 700, 40, 5, 0, 1, 20});
  uint64_t seed = 1;
  for (const Shape& shape : shapes) {
    Sequence sequence(shape, seed += 10);
    append_and_check(sequence);
  }
}

TEST_CASE("index: equal and nearly equal blocks", "[index]") {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Shape shape{dtype, 64, 2, 128 * 20 + 50, 4, 6, 0, 1};
    const int64_t n = shape.dim;
    using Fill = std::function<void(Sequence&, std::mt19937_64&)>;
    const auto each_key = [](Sequence& s, const std::function<void(int64_t token, int64_t block)>& f) {
      for (int64_t t = 0; t < s.s.depth; ++t) f(t, t / s.s.block_tokens);
    };
    const std::vector<std::pair<const char*, Fill>> cases = {
        {"all keys alike",
         [&](Sequence& s, std::mt19937_64&) {
           each_key(s, [&](int64_t t, int64_t) {
             for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, static_cast<float>(s.keys.at(0, d)));
           });
         }},
        {"all keys zero",
         [&](Sequence& s, std::mt19937_64&) {
           each_key(s, [&](int64_t t, int64_t) {
             for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, t % 2 == 0 ? 0.0f : -0.0f);
           });
         }},
        {"blocks come three times, keys in another order",
         [&](Sequence& s, std::mt19937_64&) {
           each_key(s, [&](int64_t t, int64_t b) {
             const int64_t from = b % 7 * 128 + (t * 37 + b) % 128;
             if (b >= 7) {
               for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, static_cast<float>(s.keys.at(from, d)));
             }
           });
         }},
        {"one key's values in other dims, queries constant: equal sums, other roundings on the way",
         [&](Sequence& s, std::mt19937_64& rng) {
           for (int64_t r = 0; r < s.s.rows; ++r) {
             for (int64_t c = 0; c < s.q.view().cols; ++c) s.q.set(r, c, 1.2578125f);
           }
           std::vector<float> values(static_cast<size_t>(n));
           for (int64_t d = 0; d < n; ++d) values[static_cast<size_t>(d)] = static_cast<float>(s.keys.at(0, d));
           each_key(s, [&](int64_t t, int64_t) {
             std::shuffle(values.begin(), values.end(), rng);
             for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, values[static_cast<size_t>(d)]);
           });
         }},
        {"large terms cancel, what decides is below their rounding",
         [&](Sequence& s, std::mt19937_64& rng) {
           for (int64_t r = 0; r < s.s.rows; ++r) {
             for (int64_t c = 0; c < s.q.view().cols; ++c) s.q.set(r, c, 1.0f);
           }
           std::uniform_int_distribution<int> pick(0, 255);
           each_key(s, [&](int64_t t, int64_t) {
             for (int64_t d = 0; d + 1 < n; d += 2) {
               const float large = std::ldexp(1.0f + static_cast<float>(pick(rng) & 127) / 128, 20);
               s.keys.set(t, d, large);
               s.keys.set(t, d + 1, -large);
             }
             s.keys.set(t, n - 1, std::ldexp(static_cast<float>(pick(rng) % 16), -3));
             s.keys.set(t, n - 2, 0.0f);
           });
         }},
        {"sums one unit in the last place apart",
         [&](Sequence& s, std::mt19937_64&) {
           for (int64_t r = 0; r < s.s.rows; ++r) {
             for (int64_t c = 0; c < s.q.view().cols; ++c) s.q.set(r, c, 1.0f);
           }
           each_key(s, [&](int64_t t, int64_t b) {
             for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, 0.0f);
             s.keys.set(t, b % n, 1.0f);
             s.keys.set(t, (b * 5 + 1) % n, std::ldexp(static_cast<float>(b * 11 % 20), -23));
           });
         }},
        {"just below halves of the last place: the canonical rounding makes ties",
         [&](Sequence& s, std::mt19937_64&) {
           for (int64_t r = 0; r < s.s.rows; ++r) {
             for (int64_t c = 0; c < s.q.view().cols; ++c) s.q.set(r, c, 1.0f);
           }
           each_key(s, [&](int64_t t, int64_t b) {
             for (int64_t d = 0; d < n; ++d) s.keys.set(t, d, 0.0f);
             s.keys.set(t, 3, 1.0f);
             s.keys.set(t, 4, std::ldexp(static_cast<float>(b * 7 % 20), -27));
           });
         }},
    };
    for (const auto& [name, fill] : cases) {
      INFO(name);
      Sequence sequence(shape, 900);
      std::mt19937_64 rng(5);
      fill(sequence, rng);
      append_and_check(sequence);
    }
  }
}

TEST_CASE("index: the smallest and the largest numbers", "[index]") {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Shape shape{dtype, 64, 2, 128 * 12 + 3, 2, 4, 0, 1};
    // Scale of keys and of queries; products then underflow, are subnormal, or overflow in fp32 sums.
    for (const auto& [ks, qs] : std::initializer_list<std::pair<double, double>>{{0x1p-126, 1.0},
                                                                                 {0x1p-133, 1.0},
                                                                                 {0x1p-70, 0x1p-70},
                                                                                 {1.0, 0x1p-130},
                                                                                 {0x1p-140, 0x1p100},
                                                                                 {0x1p64, 0x1p62},
                                                                                 {0x1p120, 0x1p6},
                                                                                 {0x1p60, 0x1p58}}) {
      CAPTURE(ks, qs);
      Sequence sequence(shape, 70);
      for (int64_t t = 0; t < shape.depth; ++t) {
        for (int64_t d = 0; d < shape.dim; ++d) {
          sequence.keys.set(t, d, static_cast<float>(sequence.keys.at(t, d) * ks));
        }
      }
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t c = 0; c < shape.heads * shape.dim; ++c) {
          sequence.q.set(r, c, static_cast<float>(sequence.q.at(r, c) * qs));
        }
      }
      append_and_check(sequence);
    }
    // Cancelling overflow: fp32 sums would be infinite or NaN, the canonical score is finite.
    Sequence sequence(shape, 71);
    for (int64_t t = 0; t < shape.depth; ++t) {
      sequence.keys.set(t, 0, 0x1p126f);
      sequence.keys.set(t, 1, 0x1p126f);
      sequence.keys.set(t, 2, -0x1p126f);
      sequence.keys.set(t, 3, -0x1p126f);
    }
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t d = 0; d < 4; ++d) sequence.q.set(r, h * shape.dim + d, 3.0f);
      }
    }
    append_and_check(sequence);
    // Only in blocks too few to fill the list, whose canonical scores are the lowest: nothing may take them for large.
    Sequence few(shape, 72);
    for (int64_t t = 0; t < shape.depth; ++t) {
      const int64_t block = t / 128;
      for (int64_t d = 0; d < 4; ++d)
        few.keys.set(t, d, block != 3 && block != 7 ? 0.0f : d < 2 ? 0x1p126f : -0x1p126f);
      for (int64_t d = 4; d < shape.dim && (block == 3 || block == 7); ++d) few.keys.set(t, d, 0.0f);
      if (block == 3 || block == 7) few.keys.set(t, 3, -0x1.02p126f);
    }
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t d = 0; d < 4; ++d) few.q.set(r, h * shape.dim + d, 3.0f);
      }
    }
    append_and_check(few);
  }
}

TEST_CASE("index: keys whose copy is coarse", "[index]") {
  const Shape shape{DType::kBf16, 64, 2, 128 * 40 + 77, 2, 6, 0, 1};
  // One dim of a key sets its scale: the others vanish in the copy, and only the bound of what was lost is right.
  Sequence outlier(shape, 81);
  for (int64_t t = 0; t < shape.depth; ++t) outlier.keys.set(t, t % shape.dim, t % 3 == 0 ? 300.0f : -40.0f);
  append_and_check(outlier);
  // The same where the query does not look at the large dim.
  Sequence hidden(shape, 82);
  for (int64_t t = 0; t < shape.depth; ++t) hidden.keys.set(t, 5, 5000.0f);
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t h = 0; h < shape.heads; ++h) hidden.q.set(r, h * shape.dim + 5, 0.0f);
  }
  append_and_check(hidden);
  // Keys near a few directions, as trained ones are, and queries along them.
  Sequence clusters(shape, 83);
  for (int64_t t = 0; t < shape.depth; ++t) {
    for (int64_t d = 0; d < shape.dim; ++d) {
      const double centre = clusters.keys.at(t / 700, d);
      clusters.keys.set(t, d, static_cast<float>(8 * centre + 0.25 * clusters.keys.at(t, d)));
    }
  }
  append_and_check(clusters);
  // Norms over twenty powers of two.
  Sequence norms(shape, 84);
  for (int64_t t = 0; t < shape.depth; ++t) {
    for (int64_t d = 0; d < shape.dim; ++d) {
      norms.keys.set(t, d, static_cast<float>(std::ldexp(norms.keys.at(t, d), static_cast<int>(t * 7 % 21) - 10)));
    }
  }
  append_and_check(norms);
}

TEST_CASE("index: the copy follows keys that are written again", "[index]") {
  const Shape shape{DType::kBf16, 128, 4, 128 * 30 + 9, 1, 8, 0, 1};
  Backend backend(levels().back());
  Sequence sequence(shape, 91);
  sequence.append(*backend.ops);
  // From the middle of a block on, as after a truncation, other keys.
  const int64_t from = 128 * 11 + 37;
  const TestMatrix other = TestMatrix::random(DType::kBf16, shape.depth, shape.dim, 92, 2.0);
  for (int64_t t = from; t < shape.depth; ++t) {
    for (int64_t d = 0; d < shape.dim; ++d) sequence.keys.set(t, d, static_cast<float>(other.at(t, d)));
  }
  const KvSpan rest[] = {sequence.span(0, shape.depth - from, from)};
  REQUIRE(backend.ops
              ->wait(backend.ops->index_append(
                  {sequence.keys.view().slice_rows(from, shape.depth - from), rest, sequence.layout}))
              .ok());
  check_choice(sequence);
}

TEST_CASE("index: one query over many blocks goes in two stages and reads few keys in full", "[index]") {
  if (levels().back() < cpu::Isa::kAvx2) return;
  const Shape shape{DType::kBf16, 128, 4, 128 * 300 + 5, 1, 16, 0, 1};
  Backend backend(levels().back(), 2);
  Sequence sequence(shape, 95);
  sequence.append(*backend.ops);
  CHECK(sequence.select(*backend.ops) == sequence.want());
  const KernelStats& stats = backend.ops->stats();
  const int64_t keys = shape.depth / 128 * 128;
  CHECK(stats.index_copy_bytes == shape.depth / 128 * sequence.layout.index_copy_bytes());
  CHECK(stats.index_keys_refined > 0);
  CHECK(stats.index_keys_refined < keys / 4);  // random keys, four heads: about 8 %
}

TEST_CASE("index: NaN and infinite keys and queries", "[index]") {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Shape shape{dtype, 32, 2, 128 * 10 + 60, 3, 4, 0, 1};
    for (const float odd : {kNan, kInf, -kInf}) {
      for (int where = 0; where < 5; ++where) {
        CAPTURE(odd, where);
        Sequence sequence(shape, 33);
        if (where == 0) sequence.keys.set(5 * 128, 3, odd);       // a block's first key
        if (where == 1) sequence.keys.set(5 * 128 + 70, 3, odd);  // a later one
        if (where == 2) {                                         // all keys of some blocks
          for (int64_t t = 128; t < 3 * 128; ++t) sequence.keys.set(t, t % 32, odd);
        }
        if (where == 3) sequence.q.set(1, 7, odd);
        if (where == 4) {
          sequence.q.set(1, 7, odd);
          for (int64_t t = 128; t < 9 * 128; t += 3) sequence.keys.set(t, 7, 0.0f);
        }
        append_and_check(sequence);
      }
    }
  }
}

TEST_CASE("index: recycled memory and rows spread over calls change nothing", "[index]") {
  const Shape shape{DType::kBf16, 64, 2, 1500, 7, 4, 0, 1};
  for (const cpu::Isa isa : levels()) {
    Backend backend(isa, 3);
    Sequence zero(shape, 21, 0);
    zero.append(*backend.ops);
    const TestMatrix want = zero.select(*backend.ops);
    for (const int fill : {0xFF, 0x7F, 0x46}) {
      Sequence sequence(shape, 21, static_cast<uint8_t>(fill));
      int64_t at = 0;
      for (int64_t n = 1; at < shape.depth; at += n, n = std::min<int64_t>(n * 2 + 1, shape.depth - at)) {
        const KvSpan spans[] = {sequence.span(0, n, at)};
        REQUIRE(backend.ops
                    ->wait(backend.ops->index_append({sequence.keys.view().slice_rows(at, n), spans, sequence.layout}))
                    .ok());
      }
      CHECK(sequence.select(*backend.ops) == want);
    }
  }
}

TEST_CASE("index: the norm bound covers every key and starts anew", "[index]") {
  const Shape shape{DType::kF32, 48, 1, 300, 1, 4, 0, 1};
  Backend backend(levels().back(), 2);
  const auto bound_of = [&](const Sequence& s, int64_t block) {
    float v;
    std::memcpy(&v, static_cast<const char*>(s.table[static_cast<size_t>(block)]) + s.layout.index_norm_offset(), 4);
    return v;
  };
  Sequence sequence(shape, 8);
  sequence.append(*backend.ops);
  for (int64_t b = 0; b < 3; ++b) {
    double largest = 0;
    for (int64_t t = b * 128; t < std::min<int64_t>(300, b * 128 + 128); ++t) {
      largest = std::max(largest, row_norm(sequence.keys.view(), t));
    }
    CHECK(bound_of(sequence, b) >= largest);
    CHECK(bound_of(sequence, b) <= largest * (1 + 1e-6));
  }
  // The block is used again for smaller keys.
  for (int64_t t = 0; t < 128; ++t) {
    for (int64_t d = 0; d < 48; ++d) sequence.keys.set(t, d, 0.001f);
  }
  const KvSpan spans[] = {sequence.span(0, 128, 0)};
  REQUIRE(
      backend.ops->wait(backend.ops->index_append({sequence.keys.view().slice_rows(0, 128), spans, sequence.layout}))
          .ok());
  CHECK(bound_of(sequence, 0) < 0.01f);
}

TEST_CASE("index: block scores are the canonical ones", "[index]") {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const int64_t dim : {7, 24, 128}) {
      const Shape shape{dtype, dim, 3, 700, 5, 4, 0, 1};
      Sequence sequence(shape, 50);
      sequence.keys.set(130, 2, kNan);
      for (const cpu::Isa isa : levels()) {
        Backend backend(isa, 3);
        sequence.append(*backend.ops);
        const int64_t n_blocks = 8;  // more than there are
        TestMatrix scores(DType::kF32, shape.rows, shape.heads * n_blocks);
        const KvSpan spans[] = {sequence.span(0, shape.rows, sequence.position())};
        REQUIRE(backend.ops
                    ->wait(backend.ops->block_scores(
                        {sequence.q.view(), shape.heads, spans, sequence.layout, scores.view()}))
                    .ok());
        for (int64_t r = 0; r < shape.rows; ++r) {
          for (int64_t h = 0; h < shape.heads; ++h) {
            const std::vector<float> want = sequence.canonical(r, h);
            for (int64_t b = 0; b < n_blocks; ++b) {
              const double expected = b < static_cast<int64_t>(want.size()) ? want[static_cast<size_t>(b)] : -kInf;
              CHECK(scores.at(r, h * n_blocks + b) == expected);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("index: fast maxima stay within the bound, and few blocks need rescoring", "[index]") {
  const Shape shape{DType::kBf16, 128, 4, 128 * 200, 1, 16, 0, 1};
  Sequence sequence(shape, 60);
  for (const cpu::Isa isa : levels()) {
    CAPTURE(cpu::isa_name(isa));
    Backend backend(isa, 1);
    sequence.append(*backend.ops);
    sequence.select(*backend.ops);
    CHECK(backend.ops->stats().index_blocks_scored == 4 * 199);
    CHECK(backend.ops->stats().index_blocks_rescored <= 20);
  }
}

TEST_CASE("index: scratch stays within what a plan is told, and within 512 MiB at a million tokens", "[index]") {
  const Shape shape{DType::kBf16, 128, 4, 128 * 60, 300, 16, 0, 1};
  Sequence sequence(shape, 90);
  for (const int threads : {1, 4}) {
    Backend backend(levels().back(), threads);
    sequence.append(*backend.ops);
    sequence.select(*backend.ops);
    Ops::Limits limits;
    limits.rows = shape.rows;
    limits.head_dim = shape.dim;
    limits.heads = 64;
    limits.blocks = sequence.n_blocks;
    limits.index_heads = shape.heads;
    CHECK(backend.budget.used_bytes() > 0);
    CHECK(backend.budget.used_bytes() <= cpu::index_scratch_bytes(limits, threads));
    limits.rows = 512;
    limits.blocks = 8192;
    CHECK(cpu::index_scratch_bytes(limits, 64) + cpu::attention_scratch_bytes(limits, 64) <= int64_t{512} << 20);
  }
}

TEST_CASE("index: sequences of one call do not mix", "[index]") {
  const Shape a{DType::kBf16, 64, 2, 3000, 70, 4, 0, 1}, b{DType::kBf16, 64, 2, 130, 3, 4, 0, 1},
      c{DType::kBf16, 64, 2, 1100, 1, 4, 0, 1};
  for (const cpu::Isa isa : levels()) {
    Backend backend(isa, 4);
    std::vector<Sequence> all;
    int64_t rows = 0;
    for (const Shape& shape : {a, b, c}) all.emplace_back(shape, static_cast<uint64_t>(shape.depth));
    for (Sequence& s : all) {
      s.append(*backend.ops);
      rows += s.s.rows;
    }
    TestMatrix q(DType::kBf16, rows, 128), ids(DType::kI32, rows, 8);
    std::vector<KvSpan> spans;
    int64_t at = 0;
    for (const Sequence& s : all) {
      spans.push_back(s.span(at, s.s.rows, s.position()));
      for (int64_t r = 0; r < s.s.rows; ++r, ++at) {
        for (int64_t d = 0; d < 128; ++d) q.set(at, d, static_cast<float>(s.q.at(r, d)));
      }
    }
    IndexSelectParams p;
    p.q = q.view();
    p.heads = 2;
    p.spans = spans;
    p.layout = all[0].layout;
    p.topk = 4;
    p.ids = ids.view();
    REQUIRE(backend.ops->wait(backend.ops->index_select(p)).ok());
    at = 0;
    for (const Sequence& s : all) {
      const TestMatrix want = s.want();
      for (int64_t r = 0; r < s.s.rows; ++r, ++at) {
        CHECK(std::memcmp(ids.view().row(at), want.view().row(r), 8 * 4) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace firn::test
