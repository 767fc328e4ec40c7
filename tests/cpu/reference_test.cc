// The oracle against published values: weight formats, the clamped activation, block and expert choice with ties; and
// the comparator that every other kernel test relies on.
#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "cpu/device.h"
#include "cpu/reference.h"
#include "storage/safetensors.h"
#include "support/catch.h"

namespace firn::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

const storage::SafetensorsFile& formats() {
  static const storage::SafetensorsFile file =
      must_have(storage::SafetensorsFile::read(std::string(FIRN_TEST_DATA) + "/fixtures/formats.safetensors"));
  return file;
}

std::vector<float> floats(const std::string& name) {
  const storage::TensorInfo* info = formats().find(name);
  FIRN_CHECK(info != nullptr, name);
  std::vector<float> out(static_cast<size_t>(info->elements()));
  std::memcpy(out.data(), formats().data(name), out.size() * sizeof(float));
  return out;
}

void check_dequantised(WeightFormat format, int64_t rows, int64_t cols, const std::string& data,
                       const std::string& scales, float tensor_scale, const std::string& want_name) {
  const WeightView w{format, rows, cols, formats().data(data), formats().data(scales), tensor_scale};
  const std::vector<float> want = floats(want_name);
  std::vector<float> got(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    cpu::reference_dequantise_row(w, r, got.data());
    INFO(want_name << " row " << r);
    CHECK(std::memcmp(got.data(), want.data() + r * cols, static_cast<size_t>(cols) * sizeof(float)) == 0);
  }
}

struct Fixture {
  Budget budget{"test", -1};
  HostArena arena{&budget};
  std::unique_ptr<Ops> ops = cpu::make_reference_ops(&arena);
};

TEST_CASE("the comparator does not bless NaN or infinity") {
  CHECK(close(1.0, 1.0, 0.0));
  CHECK(close(1.0, 1.5, 0.5));
  CHECK_FALSE(close(1.0, 1.6, 0.5));
  CHECK_FALSE(close(kNan, 1.0, 1e9));
  CHECK_FALSE(close(1.0, kNan, 1e9));
  CHECK(close(kNan, kNan, 0.0));
  CHECK_FALSE(close(kInf, 1.0, 1e9));
  CHECK_FALSE(close(1.0, kInf, 1e9));
  CHECK(close(-kInf, -kInf, 0.0));
  CHECK_FALSE(close(-kInf, kInf, 1e300));
  CHECK_FALSE(close(1.0, 2.0, kNan));
  CHECK_FALSE(close(-2.0, -1.0, 0.5));

  const TestMatrix want = TestMatrix::random(DType::kF32, 3, 5, 1);
  TestMatrix got = want;
  const auto tight = [](int64_t, int64_t, double) { return 1e-6; };
  CHECK(compare(got.view(), want.view(), tight).ok);
  got.set(2, 4, std::numeric_limits<float>::quiet_NaN());
  CHECK_FALSE(compare(got.view(), want.view(), tight).ok);
  CHECK(compare(got.view(), want.view(), tight).message.substr(0, 6) == "[2, 4]");
  got = want;
  got.set(0, 0, static_cast<float>(want.at(0, 0)) + 1e-3f);
  CHECK_FALSE(compare(got.view(), want.view(), tight).ok);
  CHECK_FALSE(compare(want.view().slice_rows(0, 2), want.view(), tight).ok);
  CHECK_FALSE(compare_rounded(got.view(), want.view(), 16, [&](int64_t r) { return row_norm(want.view(), r); }).ok);
}

TEST_CASE("weight formats are decoded exactly") {
  check_dequantised(WeightFormat::kMxfp8, 8, 128, "mxfp8.weight_bytes", "mxfp8.scale", 1.0f, "mxfp8.dequantised");
  check_dequantised(WeightFormat::kMxfp4, 4, 64, "mxfp4.packed", "mxfp4.scale", 1.0f, "mxfp4.dequantised");
  check_dequantised(WeightFormat::kNvfp4, 4, 64, "nvfp4.packed", "nvfp4.scale", floats("nvfp4.scale_2")[0],
                    "nvfp4.dequantised");
}

TEST_CASE("bf16 and f32 weights are read at odd addresses") {
  const TestMatrix bf16 = TestMatrix::random(DType::kBf16, 2, 37, 3), f32 = TestMatrix::random(DType::kF32, 2, 37, 4);
  for (const TestMatrix* m : {&bf16, &f32}) {
    std::vector<uint8_t> moved(m->bytes().size() + 1);
    std::copy(m->bytes().begin(), m->bytes().end(), moved.begin() + 1);
    WeightView w = m->weight();
    w.data = moved.data() + 1;
    std::vector<float> row(37);
    cpu::reference_dequantise_row(w, 1, row.data());
    for (int64_t c = 0; c < 37; ++c) CHECK(static_cast<double>(row[static_cast<size_t>(c)]) == m->at(1, c));
  }
}

TEST_CASE("the activation clamps the gate above only, the up value on both sides") {
  const Activation a;
  const struct {
    double gate, up, want;
  } table[] = {{0, 0, 0},  {1, 1, 1.69159153},      {-1, 2, -0.46261270},     {8, 8, 55.99962503},
               {7, -1, 0}, {-8, -8, 5.8598574e-05}, {-20, 3, -1.3173641e-13}, {3, -9, -17.89157214}};
  for (const auto& row : table) {
    INFO(row.gate << " " << row.up);
    CHECK(close(cpu::reference_activation(a, row.gate, row.up), row.want, 1e-6 * std::abs(row.want)));
  }
  const std::vector<float> gate = floats("activation.gate"), up = floats("activation.up"),
                           out = floats("activation.out");
  for (size_t i = 0; i < out.size(); ++i) {
    const double want = out[i];
    CHECK(close(cpu::reference_activation(a, gate[i], up[i]), want, 1e-6 * std::abs(want) + 1e-30));
  }
  CHECK(std::isnan(cpu::reference_activation(a, kNan, 1)));
  CHECK(std::isnan(cpu::reference_activation(a, 1, kNan)));
}

nlohmann::json ties() {
  std::ifstream in(std::string(FIRN_TEST_DATA) + "/fixtures/ties.json");
  return nlohmann::json::parse(in);
}

TEST_CASE("block choice follows the tie rule") {
  const nlohmann::json data = ties();
  REQUIRE(data["blocks"].size() > 8);
  for (const auto& c : data["blocks"]) {
    INFO(c["name"].get<std::string>());
    const auto scores = c["scores"].get<std::vector<float>>();
    const auto want = c["lower_id_first"].get<std::vector<int32_t>>();
    CHECK(cpu::choose_blocks(scores, c["own_block"].get<int64_t>(), data["top_k"].get<int64_t>(), 0, 1) == want);
  }
}

TEST_CASE("forced blocks take places, NaN scores come last") {
  std::vector<float> scores{5, 1, 4, 2, 3, 0};
  CHECK(cpu::choose_blocks(scores, 5, 3, 0, 1) == std::vector<int32_t>{0, 2, 5});
  CHECK(cpu::choose_blocks(scores, 5, 4, 2, 1) == std::vector<int32_t>{0, 1, 2, 5});
  CHECK(cpu::choose_blocks(scores, 5, 3, 0, 3) == std::vector<int32_t>{3, 4, 5});
  CHECK(cpu::choose_blocks(scores, 1, 4, 3, 1) == std::vector<int32_t>{0, 1});
  scores[0] = std::numeric_limits<float>::quiet_NaN();
  CHECK(cpu::choose_blocks(scores, 5, 3, 0, 1) == std::vector<int32_t>{2, 4, 5});
}

TEST_CASE("a block's canonical maximum sees the visible keys only") {
  TestMatrix keys(DType::kF32, 4, 3);
  const float rows[4][3] = {{1, 0, 0}, {0, 2, 0}, {0, 0, 9}, {100, 100, 100}};
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 3; ++c) keys.set(r, c, rows[r][c]);
  }
  const float query[3] = {3, 2, -1};
  CHECK(cpu::canonical_block_max(query, keys.view().data, DType::kF32, 3, 1) == 3.0f);
  CHECK(cpu::canonical_block_max(query, keys.view().data, DType::kF32, 3, 3) == 4.0f);
  CHECK(cpu::canonical_block_max(query, keys.view().data, DType::kF32, 3, 4) == 400.0f);
  keys.set(1, 1, std::numeric_limits<float>::quiet_NaN());
  CHECK(cpu::canonical_block_max(query, keys.view().data, DType::kF32, 3, 3) == 3.0f);
}

TEST_CASE("expert choice follows the tie rule") {
  const nlohmann::json data = ties();
  REQUIRE(!data["router"].empty());
  Fixture f;
  for (const auto& c : data["router"]) {
    INFO(c["name"].get<std::string>());
    // The scores come in as bias over equal logits of zero: sigmoid(0) + bias orders as the scores do.
    const auto scores = c["choice_scores"].get<std::vector<float>>();
    const auto n = static_cast<int64_t>(scores.size());
    auto want = c["lower_id_first"].get<std::vector<int32_t>>();
    std::sort(want.begin(), want.end());
    TestMatrix x(DType::kF32, 1, 2), gate(DType::kF32, n, 2), bias(DType::kF32, 1, n), weights(DType::kF32, 1, 4);
    x.set(0, 0, 0), x.set(0, 1, 0);
    for (int64_t e = 0; e < n; ++e) {
      gate.set(e, 0, 1), gate.set(e, 1, 1);
      bias.set(0, e, scores[static_cast<size_t>(e)]);
    }
    TestMatrix ids(DType::kI32, 1, 4);
    f.ops->router({x.view(), gate.weight(), bias.view(), 4, ids.view(), weights.view(), {}});
    for (int64_t k = 0; k < 4; ++k) {
      CHECK(ids.at(0, k) == want[static_cast<size_t>(k)]);
      CHECK(weights.at(0, k) == 0.25);
    }
  }
}

TEST_CASE("norm: one plus weight, gathered rows, one rounding") {
  Fixture f;
  TestMatrix x(DType::kF32, 2, 4), w(DType::kF32, 1, 4), out(DType::kF32, 1, 4);
  const float values[4] = {1, -2, 3, -4};
  for (int64_t c = 0; c < 4; ++c) {
    x.set(0, c, 7);
    x.set(1, c, values[c]);
    w.set(0, c, 0.5f);
  }
  const int32_t row = 1;
  f.ops->norm({x.view(), {&row, 1}, w.norm_weight(1.0f), out.view()});
  for (int64_t c = 0; c < 4; ++c) CHECK(close(out.at(0, c), values[c] * 1.5 / std::sqrt(7.5 + 1e-6), 1e-6));
  f.ops->norm({x.view(), {&row, 1}, w.norm_weight(0.0f), out.view()});
  for (int64_t c = 0; c < 4; ++c) CHECK(close(out.at(0, c), values[c] * 0.5 / std::sqrt(7.5 + 1e-6), 1e-6));
}

TEST_CASE("RoPE pairs i with i + half and turns by position * theta^(-2i/d)") {
  Fixture f;
  constexpr int64_t kDim = 128, kRotary = 64, kPosition = 100000;
  TestMatrix x(DType::kF32, 1, kDim), w(DType::kF32, 1, kDim), out(DType::kF32, 1, kDim);
  for (int64_t c = 0; c < kDim; ++c) {
    x.set(0, c, 1);
    w.set(0, c, 0);
  }
  const NormRopePart part{x.view(), 1, kDim, w.norm_weight(), out.view()};
  const KvSpan span{0, 1, kPosition};
  f.ops->norm_rope({{&part, 1}, {&span, 1}, kRotary, 5e6});
  const double frequency_1 = 0.617528757, frequency_31 = 3.23871563e-7;  // 5e6^(-2/64), 5e6^(-62/64)
  CHECK(close(out.at(0, 0), std::cos(1e5) - std::sin(1e5), 1e-5));
  CHECK(close(out.at(0, 32), std::cos(1e5) + std::sin(1e5), 1e-5));
  CHECK(close(out.at(0, 1), std::cos(1e5 * frequency_1) - std::sin(1e5 * frequency_1), 1e-3));
  CHECK(close(out.at(0, 63), std::cos(1e5 * frequency_31) + std::sin(1e5 * frequency_31), 1e-5));
  for (int64_t c = 64; c < 128; ++c) CHECK(close(out.at(0, c), 1.0, 1e-6));
}

TEST_CASE("a double is rounded to bf16 once") {
  // 1 + 2^-8 + 2^-31 lies above the middle between 1 and 1 + 2^-7; through fp32 it would become the middle and go down.
  Fixture f;
  TestMatrix h(DType::kBf16, 1, 2), y(DType::kF32, 1, 2);
  h.set(0, 0, 1.0f), h.set(0, 1, -1.0f);
  y.set(0, 0, std::ldexp(1.0f, -8) + std::ldexp(1.0f, -31)), y.set(0, 1, -std::ldexp(1.0f, -8) - std::ldexp(1.0f, -31));
  f.ops->add({h.view(), y.view()});
  CHECK(h.at(0, 0) == 1.0 + std::ldexp(1.0, -7));
  CHECK(h.at(0, 1) == -1.0 - std::ldexp(1.0, -7));
}

TEST_CASE("index blocks keep a bound on their keys' norms and start anew at their first position") {
  Fixture f;
  Device device(f.ops.get());
  const KvLayout layout{DType::kBf16, 4, 1, 8, 8};
  const DeviceKv kv(device, layout, 8);
  const auto append = [&](int64_t position, float value) {
    TestMatrix key(DType::kBf16, 1, 8);
    for (int64_t c = 0; c < 8; ++c) key.set(0, c, value);
    const KvSpan span = kv.span(0, 1, position);
    f.ops->index_append({key.view(), {&span, 1}, layout});
    float bound;
    std::memcpy(&bound, static_cast<char*>(kv.index(position / 4)) + layout.index_norm_offset(), sizeof bound);
    return static_cast<double>(bound);
  };
  const double unit_norm = std::sqrt(8.0);
  CHECK(close(append(0, 2), 2 * unit_norm, 1e-5));
  CHECK(close(append(1, 1), 2 * unit_norm, 1e-5));
  CHECK(append(2, 3) >= 3 * unit_norm);
  CHECK(close(append(4, 1), unit_norm, 1e-5));
  CHECK(close(append(0, 1), unit_norm, 1e-5));
}

}  // namespace
}  // namespace firn::test
