// Row operations of the CPU backend against the oracle: every instruction set, odd shapes, both activation types; and
// the promises that are about bits: thread count, other rows of the call, padding.
#include <algorithm>
#include <limits>

#include "cpu/cpu_ops.h"
#include "cpu/device.h"
#include "cpu/reference.h"
#include "support/catch.h"

namespace firn::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBf16};
constexpr int64_t kWidths[] = {192, 200, 6144};
constexpr int64_t kRowCounts[] = {1, 3, 17};
constexpr int64_t kPad = 5;

// The oracle, and CpuOps of every level with one thread and with three.
struct Fixture {
  Budget budget{"test", -1};
  HostArena arena{&budget};
  std::unique_ptr<ThreadTeam> one = must_have(ThreadTeam::create(1, {})), three = must_have(ThreadTeam::create(3, {}));
  std::unique_ptr<Ops> oracle = cpu::make_reference_ops(&arena);
  std::vector<std::unique_ptr<cpu::CpuOps>> single, several;
  Fixture() {
    for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
      if (isa > cpu::cpu_features().best) continue;
      single.push_back(must_have(cpu::CpuOps::create(one.get(), &arena, isa)));
      several.push_back(must_have(cpu::CpuOps::create(three.get(), &arena, isa)));
    }
  }
};

Fixture& fixture() {
  static Fixture f;
  return f;
}

// Runs `op(ops, out)` on the oracle and on every CpuOps, starting each time from a copy of `start`; `tol` gets row,
// column and the oracle's value.
template <typename Op, typename Tolerance>
void check(const TestMatrix& start, Op&& op, Tolerance&& tol) {
  Fixture& f = fixture();
  TestMatrix want = start;
  op(*f.oracle, want);
  for (size_t i = 0; i < f.single.size(); ++i) {
    INFO(f.single[i]->name());
    TestMatrix got = start, threaded = start;
    op(*f.single[i], got);
    op(*f.several[i], threaded);
    const Match match = compare(got.view(), want.view(), tol);
    INFO(match.message);
    CHECK(match.ok);
    CHECK(got == threaded);
    CHECK(got.padding_untouched());
  }
}

// Stored rounding of `dtype` plus `steps` fp32 roundings of the value itself.
auto relative(DType dtype, double steps) {
  const double t = (dtype == DType::kBf16 ? 2 * unit(DType::kBf16) : 0) + steps * unit(DType::kF32);
  return [t](int64_t, int64_t, double want) { return t * std::abs(want); };
}

TEST_CASE("embed copies rows of the table") {
  for (const DType table_type : kTypes) {
    for (const DType out_type : kTypes) {
      for (const int64_t cols : kWidths) {
        const TestMatrix table = TestMatrix::random(table_type, 7, cols, 1);
        std::vector<uint8_t> moved(table.bytes().size() + 1);  // as a checkpoint may leave it: at an odd address
        std::copy(table.bytes().begin(), table.bytes().end(), moved.begin() + 1);
        WeightView weight = table.weight();
        weight.data = moved.data() + 1;
        const std::vector<int32_t> ids{6, 0, 3, 3, 1};
        check(
            TestMatrix(out_type, 5, cols, kPad),
            [&](Ops& ops, TestMatrix& out) {
              ops.embed({ids, weight, out.view()});
            },
            [](int64_t, int64_t, double) { return 0.0; });
      }
    }
  }
}

TEST_CASE("norm") {
  for (const DType x_type : kTypes) {
    for (const DType out_type : kTypes) {
      for (const int64_t cols : kWidths) {
        for (const int64_t rows : kRowCounts) {
          INFO(dtype_name(x_type) << " -> " << dtype_name(out_type) << " [" << rows << ", " << cols << "]");
          const TestMatrix x = TestMatrix::random(x_type, rows, cols, 2, 30.0, kPad);
          const TestMatrix w = TestMatrix::random(rows == 3 ? DType::kF32 : DType::kBf16, 1, cols, 3, 0.5);
          const auto tol = relative(out_type, static_cast<double>(cols) / 16 + 12);
          const TestMatrix out(out_type, rows, cols, kPad);
          check(
              out,
              [&](Ops& ops, TestMatrix& y) {
                ops.norm({x.view(), {}, w.norm_weight(1.0f), y.view()});
              },
              tol);
          check(
              out,
              [&](Ops& ops, TestMatrix& y) {
                ops.norm({x.view(), {}, w.norm_weight(0.0f), y.view()});
              },
              tol);
          const std::vector<int32_t> gather{static_cast<int32_t>(rows - 1), 0};
          check(
              TestMatrix(out_type, 2, cols, kPad),
              [&](Ops& ops, TestMatrix& y) {
                ops.norm({x.view(), gather, w.norm_weight(), y.view()});
              },
              tol);
        }
      }
    }
  }
}

TEST_CASE("a row's norm does not depend on the other rows") {
  TestMatrix x = TestMatrix::random(DType::kBf16, 17, 200, 4);
  const TestMatrix w = TestMatrix::random(DType::kBf16, 1, 200, 5);
  for (const auto& ops : fixture().several) {
    TestMatrix before(DType::kF32, 17, 200), after(DType::kF32, 17, 200);
    ops->norm({x.view(), {}, w.norm_weight(), before.view()});
    TestMatrix spoilt = x;
    for (int64_t c = 0; c < 200; ++c) spoilt.set(3, c, std::numeric_limits<float>::quiet_NaN());
    ops->norm({spoilt.view(), {}, w.norm_weight(), after.view()});
    for (int64_t r = 0; r < 17; ++r) {
      const bool same = std::memcmp(before.view().row(r), after.view().row(r), 200 * 4) == 0;
      CHECK(same == (r != 3));
    }
    CHECK(std::isnan(after.at(3, 7)));
  }
}

TEST_CASE("norm_rope") {
  for (const DType out_type : kTypes) {
    for (const int64_t heads : {1, 4, 64}) {
      for (const int64_t dim : {64, 80, 128}) {
        for (const int64_t rows : kRowCounts) {
          for (const int64_t rotary : {int64_t{0}, dim / 2, dim}) {
            INFO(dtype_name(out_type) << " heads " << heads << " dim " << dim << " rows " << rows << " rotary "
                                      << rotary);
            const TestMatrix x = TestMatrix::random(DType::kF32, rows, heads * dim, 6, 3.0, kPad);
            const TestMatrix other = TestMatrix::random(DType::kF32, rows, dim, 7, 3.0);
            const TestMatrix w = TestMatrix::random(DType::kBf16, 1, dim, 8, 0.3);
            // Two sequences: the first row of the call, far out, and the others at the start of another.
            std::vector<KvSpan> spans{{0, 1, 999999}};
            if (rows > 1) spans.push_back({1, rows - 1, 126});
            TestMatrix second(out_type, rows, dim);
            double largest = 0;
            {
              TestMatrix want(out_type, rows, heads * dim);
              const NormRopePart part{x.view(), heads, dim, w.norm_weight(), want.view()};
              fixture().oracle->norm_rope({{&part, 1}, spans, rotary, 5e6});
              for (int64_t r = 0; r < rows; ++r) {
                for (int64_t c = 0; c < heads * dim; ++c) largest = std::max(largest, std::abs(want.at(r, c)));
              }
            }
            check(
                TestMatrix(out_type, rows, heads * dim, kPad),
                [&](Ops& ops, TestMatrix& out) {
                  const NormRopePart parts[] = {{other.view(), 1, dim, w.norm_weight(), second.view()},
                                                {x.view(), heads, dim, w.norm_weight(), out.view()}};
                  ops.norm_rope({parts, spans, rotary, 5e6});
                },
                [&](int64_t, int64_t, double want) {
                  return (out_type == DType::kBf16 ? 2 * unit(DType::kBf16) * std::abs(want) : 0) +
                         (static_cast<double>(dim) / 16 + 16) * unit(DType::kF32) * largest;
                });
          }
        }
      }
    }
  }
}

TEST_CASE("norm_rope over more rows than one table holds") {
  const int64_t rows = 2100, dim = 64;
  const TestMatrix x = TestMatrix::random(DType::kF32, rows, dim, 9), w = TestMatrix::random(DType::kF32, 1, dim, 10);
  const KvSpan span{0, rows, 5000};
  check(
      TestMatrix(DType::kF32, rows, dim),
      [&](Ops& ops, TestMatrix& out) {
        const NormRopePart part{x.view(), 1, dim, w.norm_weight(), out.view()};
        ops.norm_rope({{&part, 1}, {&span, 1}, 32, 1e4});
      },
      [](int64_t, int64_t, double) { return 1e-5; });
}

TEST_CASE("add, combine, finish_ffn") {
  for (const DType type : kTypes) {
    for (const int64_t cols : kWidths) {
      for (const int64_t rows : kRowCounts) {
        INFO(dtype_name(type) << " [" << rows << ", " << cols << "]");
        const TestMatrix h = TestMatrix::random(type, rows, cols, 11, 2.0, kPad);
        const TestMatrix y = TestMatrix::random(DType::kF32, rows, cols, 12, 1.0, 3);
        check(
            h,
            [&](Ops& ops, TestMatrix& out) {
              ops.add({out.view(), y.view()});
            },
            relative(type, 1));

        // Four rows for every token, scattered.
        const TestMatrix outs = TestMatrix::random(DType::kF32, 4 * rows, cols, 13);
        std::vector<int32_t> to;
        std::vector<float> weights;
        for (int64_t i = 0; i < 4 * rows; ++i) {
          to.push_back(static_cast<int32_t>((i * 7 + i / rows) % rows));
          weights.push_back(0.1f + 0.01f * static_cast<float>(i % 31));
        }
        const TestMatrix acc = TestMatrix::random(DType::kF32, rows, cols, 14, 1.0, kPad);
        check(
            acc,
            [&](Ops& ops, TestMatrix& out) {
              ops.combine({out.view(), outs.view(), to, weights});
            },
            [&](int64_t, int64_t, double) { return 64 * unit(DType::kF32) * row_norm(acc.view(), 0) / 4; });

        const double steps = 8 * unit(DType::kF32) * 16 + (type == DType::kBf16 ? 2 * unit(DType::kBf16) * 8 : 0);
        for (const bool with_acc : {false, true}) {
          for (const bool with_shared : {false, true}) {
            check(
                h,
                [&](Ops& ops, TestMatrix& out) {
                  TestMatrix sum = acc;
                  ops.finish_ffn({out.view(), with_acc ? sum.view() : MatrixView{},
                                  with_shared ? y.view() : ConstMatrixView{}, 2.0f});
                  for (int64_t r = 0; with_acc && r < rows; ++r) {
                    for (int64_t c = 0; c < cols; ++c) FIRN_CHECK(sum.at(r, c) == 0, "acc is not zero afterwards");
                  }
                  FIRN_CHECK(sum.padding_untouched(), "padding of acc was written");
                },
                [&](int64_t, int64_t, double) { return steps; });
          }
        }
      }
    }
  }
}

TEST_CASE("combine adds a token's experts in the order given") {
  // 1e8 + 1 - 1e8 is 0 in fp32 and 1 in any order that cancels first: the order is visible.
  TestMatrix y(DType::kF32, 3, 40);
  for (int64_t c = 0; c < 40; ++c) y.set(0, c, 1e8f), y.set(1, c, 1.0f), y.set(2, c, -1e8f);
  for (const int64_t tokens : {1, 20}) {
    for (const auto& ops : fixture().several) {
      TestMatrix acc(DType::kF32, tokens, 40);
      ops->zero(acc.view().data, tokens * 40 * 4);
      const int32_t row = static_cast<int32_t>(tokens - 1);
      ops->combine({acc.view(), y.view(), std::vector<int32_t>{row, row, row}, std::vector<float>{1, 1, 1}});
      for (int64_t c = 0; c < 40; ++c) CHECK(acc.at(row, c) == 0.0);
    }
  }
}

struct Routed {
  TestMatrix ids, weights, logits;
};

Routed route(Ops& ops, const TestMatrix& x, const TestMatrix& gate, const TestMatrix& bias, int64_t topk,
             bool keep_logits = true) {
  const int64_t rows = x.view().rows, n = gate.view().rows;
  Routed out{TestMatrix(DType::kI32, rows, topk), TestMatrix(DType::kF32, rows, topk),
             TestMatrix(DType::kF32, rows, n, kPad)};
  ops.router({x.view(), gate.weight(), bias.view(), topk, out.ids.view(), out.weights.view(),
              keep_logits ? out.logits.view() : MatrixView{}});
  must_ok(ops.wait(ops.zero(nullptr, 0)));
  return out;
}

TEST_CASE("router") {
  Fixture& f = fixture();
  for (const DType type : kTypes) {
    for (const DType gate_type : kTypes) {
      for (const int64_t cols : kWidths) {
        for (const int64_t rows : {int64_t{1}, int64_t{3}, int64_t{17}, int64_t{37}}) {
          const int64_t n = cols == 200 ? 7 : 128, topk = cols == 200 ? 3 : 4;
          INFO(dtype_name(type) << " gate " << dtype_name(gate_type) << " [" << rows << ", " << cols << "] experts "
                                << n);
          const TestMatrix x = TestMatrix::random(type, rows, cols, 15, 1.0, kPad);
          const TestMatrix gate =
              TestMatrix::random(gate_type, n, cols, 16, 1.5 / std::sqrt(static_cast<double>(cols)));
          const TestMatrix bias = TestMatrix::random(DType::kF32, 1, n, 17, 0.3);
          const Routed want = route(*f.oracle, x, gate, bias, topk);
          for (size_t i = 0; i < f.single.size(); ++i) {
            INFO(f.single[i]->name());
            const Routed got = route(*f.single[i], x, gate, bias, topk);
            const double steps =
                (static_cast<double>(cols) / 16 + 8) * unit(DType::kF32) * row_norm(gate.view(), 0) * 2;
            const Match logits = compare(got.logits.view(), want.logits.view(),
                                         [&](int64_t r, int64_t, double) { return steps * row_norm(x.view(), r); });
            INFO(logits.message);
            CHECK(logits.ok);
            CHECK(got.ids == want.ids);
            CHECK(compare(got.weights.view(), want.weights.view(), [](int64_t, int64_t, double) { return 1e-5; }).ok);
            CHECK(got.logits.padding_untouched());
            // The same bits with more threads, without logits, and for a row alone.
            const Routed threaded = route(*f.several[i], x, gate, bias, topk, false);
            CHECK(threaded.ids == got.ids);
            CHECK(threaded.weights == got.weights);
            TestMatrix last(type, 1, cols);
            for (int64_t c = 0; c < cols; ++c) last.set(0, c, static_cast<float>(x.at(rows - 1, c)));
            const Routed alone = route(*f.several[i], last, gate, bias, topk);
            CHECK(std::memcmp(alone.logits.view().data, got.logits.view().row(rows - 1), static_cast<size_t>(n) * 4) ==
                  0);
            CHECK(std::memcmp(alone.weights.view().data, got.weights.view().row(rows - 1),
                              static_cast<size_t>(topk) * 4) == 0);
          }
        }
      }
    }
  }
}

// One row whose logits are exactly those given: x is a unit vector, the gate's first column holds them.
Routed route_logits(Ops& ops, const std::vector<float>& logits, const std::vector<float>& biases, int64_t topk) {
  const auto n = static_cast<int64_t>(logits.size());
  TestMatrix x(DType::kF32, 1, 20), gate(DType::kF32, n, 20), bias(DType::kF32, 1, n);
  for (int64_t c = 0; c < 20; ++c) x.set(0, c, c == 0 ? 1.0f : 0.0f);
  for (int64_t e = 0; e < n; ++e) {
    for (int64_t c = 0; c < 20; ++c) gate.set(e, c, c == 0 ? logits[static_cast<size_t>(e)] : 0.0f);
    bias.set(0, e, biases[static_cast<size_t>(e)]);
  }
  return route(ops, x, gate, bias, topk);
}

TEST_CASE("router: biases that dwarf the scores, ties, scores that vanish") {
  std::vector<Ops*> all{fixture().oracle.get()};
  for (const auto& ops : fixture().several) all.push_back(ops.get());
  std::vector<float> close_bias(128), low(128), logits_18(128);
  for (size_t i = 0; i < 128; ++i) {
    close_bias[i] =
        6.9f + 0.001f * static_cast<float>((i * 37) % 128);  // distinct, in no order; bf16 sees eight values
    logits_18[i] = -18.0f - 0.05f * static_cast<float>(i % 11);
  }
  const std::vector<float> zero(128, 0.0f), minus_two(128, -2.0f);
  struct Case {
    const char* name;
    std::vector<float> logits, bias;
  };
  const Case cases[] = {{"close biases, tiny scores", logits_18, close_bias},
                        {"all equal", zero, zero},
                        {"bias of -2 everywhere", logits_18, minus_two},
                        {"scores below fp32's range", std::vector<float>(128, -120.0f), zero},
                        {"scores of zero", std::vector<float>(128, -900.0f), zero},
                        {"scores of one", std::vector<float>(128, 900.0f), zero}};
  for (const Case& c : cases) {
    // The specification in double, by plain sorting.
    std::vector<double> s(128);
    std::vector<int32_t> order(128);
    for (size_t e = 0; e < 128; ++e) {
      s[e] = 1 / (1 + std::exp(-static_cast<double>(c.logits[e])));
      order[e] = static_cast<int32_t>(e);
    }
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
      return s[i] + static_cast<double>(c.bias[i]) > s[j] + static_cast<double>(c.bias[j]);
    });
    std::sort(order.begin(), order.begin() + 4);
    double sum = 0;
    for (size_t k = 0; k < 4; ++k) sum += s[static_cast<size_t>(order[k])];
    for (Ops* ops : all) {
      INFO(ops->name() << ": " << c.name);
      const Routed got = route_logits(*ops, c.logits, c.bias, 4);
      for (int64_t k = 0; k < 4; ++k) {
        const int32_t id = order[static_cast<size_t>(k)];
        CHECK(got.ids.at(0, k) == id);
        const double want = sum == 0 ? 0.25 : s[static_cast<size_t>(id)] / sum;
        CHECK(close(got.weights.at(0, k), want, 1e-6 * want));
      }
    }
  }
}

TEST_CASE("router: NaN is never chosen silently") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<Ops*> all{fixture().oracle.get()};
  for (const auto& ops : fixture().several) all.push_back(ops.get());
  for (Ops* ops : all) {
    INFO(ops->name());
    const auto* fast = dynamic_cast<cpu::CpuOps*>(ops);
    const int64_t before = fast == nullptr ? 0 : fast->stats().nan_logits;
    const Routed some = route_logits(*ops, {nan, 1, nan, 3, 2, 0}, {9, 0, 9, 0, 0, 0}, 3);
    for (int64_t k = 0; k < 3; ++k) {
      CHECK(some.ids.at(0, k) == (k == 0 ? 1 : k + 2));
      CHECK(some.weights.at(0, k) > 0);
    }
    const Routed most = route_logits(*ops, {nan, nan, 1, nan}, {0, 0, 0, 0}, 2);
    CHECK(most.ids.at(0, 0) == 0);
    CHECK(most.ids.at(0, 1) == 2);
    CHECK(std::isnan(most.weights.at(0, 0)));
    if (fast != nullptr) CHECK(fast->stats().nan_logits == before + 5);
  }
}

TEST_CASE("copies and zeros, small and large") {
  for (const auto& ops : fixture().several) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, int64_t{3} << 20}) {
      std::vector<uint8_t> from(static_cast<size_t>(bytes) + 1), to(from.size(), 9);
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 251);
      ops->upload(to.data(), from.data(), bytes);
      CHECK(std::equal(from.begin(), from.end() - 1, to.begin()));
      CHECK(to.back() == 9);
      ops->zero(to.data(), bytes);
      CHECK(std::all_of(to.begin(), to.end() - 1, [](uint8_t b) { return b == 0; }));
      CHECK(to.back() == 9);
    }
    std::vector<int> shifted{1, 2, 3, 4, 5};
    ops->copy(shifted.data() + 1, shifted.data(), 16);
    CHECK(shifted == std::vector<int>{1, 1, 2, 3, 4});
  }
}

TEST_CASE("a refused budget fails the operation and every later one, not the earlier") {
  Budget small("--ram", 6000);
  HostArena arena(&small);
  const auto ops = must_have(cpu::CpuOps::create(fixture().one.get(), &arena, cpu::Isa::kScalar));
  TestMatrix h = TestMatrix::random(DType::kF32, 1, 64, 18), y = h;
  const Ticket first = ops->add({h.view(), y.view()});
  const TestMatrix x = TestMatrix::random(DType::kF32, 900, 64, 19), w = TestMatrix::random(DType::kF32, 1, 64, 20);
  TestMatrix out(DType::kF32, 900, 64);
  const NormRopePart part{x.view(), 1, 64, w.norm_weight(), out.view()};
  const KvSpan span{0, 900, 0};
  const Ticket refused = ops->norm_rope({{&part, 1}, {&span, 1}, 64, 1e4});
  const TestMatrix untouched = h;
  const Ticket later = ops->add({h.view(), y.view()});
  CHECK(ops->wait(first).ok());
  CHECK(ops->wait(refused).code() == Code::kNoMemory);
  CHECK(ops->wait(later).message() == ops->wait(refused).message());
  CHECK(ops->wait(refused).message().find("--ram") != std::string::npos);
  CHECK(h == untouched);
  CHECK(small.used_bytes() == 0);
}

}  // namespace
}  // namespace firn::test
