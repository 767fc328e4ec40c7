// Quantised formats: exact against the fixtures, worked examples and bounds of the rules.
#include "model/quantise.h"

#include <cmath>
#include <cstring>
#include <random>

#include "cpu/reference.h"
#include "runtime/dtype.h"
#include "storage/safetensors.h"
#include "support/catch.h"

namespace firn::model {
namespace {

storage::SafetensorsFile formats() {
  auto file = storage::SafetensorsFile::read(std::string(FIRN_TEST_DATA) + "/fixtures/formats.safetensors");
  REQUIRE(file.ok());
  return std::move(file).value();
}

template <typename T>
std::vector<T> values(const storage::SafetensorsFile& file, const char* name) {
  const auto* info = file.find(name);
  REQUIRE(info != nullptr);
  std::vector<T> out(static_cast<size_t>(info->bytes) / sizeof(T));
  std::memcpy(out.data(), file.data(name), static_cast<size_t>(info->bytes));
  return out;
}

struct Matrix {
  std::vector<uint8_t> data, scales;
  WeightView view;
};

Matrix quantised(WeightFormat format, const std::vector<float>& w, int64_t rows, int64_t cols) {
  Matrix m;
  const float scale = nvfp4_tensor_scale(largest_magnitude(w.data(), rows * cols));
  m.data.resize(static_cast<size_t>(weight_data_bytes(format, rows, cols)));
  m.scales.resize(static_cast<size_t>(weight_scale_bytes(format, rows, cols)));
  for (int64_t r = 0; r < rows; ++r) {
    quantise_row(format, w.data() + r * cols, cols, scale, m.data.data() + weight_data_bytes(format, r, cols),
                 m.scales.data() + weight_scale_bytes(format, r, cols));
  }
  m.view = {format,      rows, cols, m.data.data(), m.scales.data(), format == WeightFormat::kNvfp4 ? scale : 1.0f,
            Space::kHost};
  return m;
}

std::vector<float> dequantised(const WeightView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  for (int64_t r = 0; r < view.rows; ++r) cpu::reference_dequantise_row(view, r, out.data() + r * view.cols);
  return out;
}

TEST_CASE("the fixtures' matrices dequantise bit for bit", "[quantise]") {
  const auto file = formats();
  struct Case {
    WeightFormat format;
    const char *data, *scales, *expected;
    int64_t rows, cols;
  };
  const Case cases[] = {
      {WeightFormat::kMxfp8, "mxfp8.weight_bytes", "mxfp8.scale", "mxfp8.dequantised", 8, 128},
      {WeightFormat::kMxfp4, "mxfp4.packed", "mxfp4.scale", "mxfp4.dequantised", 4, 64},
      {WeightFormat::kNvfp4, "nvfp4.packed", "nvfp4.scale", "nvfp4.dequantised", 4, 64},
  };
  for (const Case& c : cases) {
    const auto data = values<uint8_t>(file, c.data), scales = values<uint8_t>(file, c.scales);
    const float scalar = c.format == WeightFormat::kNvfp4 ? values<float>(file, "nvfp4.scale_2")[0] : 1.0f;
    const WeightView view{c.format, c.rows, c.cols, data.data(), scales.data(), scalar, Space::kHost};
    const auto expected = values<uint32_t>(file, c.expected);
    const auto found = dequantised(view);
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      INFO(weight_format_name(c.format) << " element " << i);
      CHECK(std::bit_cast<uint32_t>(found[i]) == expected[i]);
    }
  }
}

TEST_CASE("MXFP8 quantises as the fixtures' quantiser", "[quantise]") {
  const auto file = formats();
  const auto input = values<float>(file, "mxfp8_quantise.input");
  const Matrix m = quantised(WeightFormat::kMxfp8, input, 16, 96);
  CHECK(m.data == values<uint8_t>(file, "mxfp8_quantise.weight_bytes"));
  CHECK(m.scales == values<uint8_t>(file, "mxfp8_quantise.scale"));
}

TEST_CASE("worked examples", "[quantise]") {
  // Byte 0x2B: element 0 is code 0xB = -1.5, element 1 is code 0x2 = +1.
  const uint8_t data[16] = {0x2B};
  const uint8_t e4m3_two = 0x40, e8m0_two = 128;
  float out[32];
  cpu::reference_dequantise_row({WeightFormat::kNvfp4, 1, 16, data, &e4m3_two, 0.01f, Space::kHost}, 0, out);
  CHECK(out[0] == Approx(-0.03f));
  CHECK(out[1] == Approx(0.02f));
  cpu::reference_dequantise_row({WeightFormat::kMxfp4, 1, 32, data, &e8m0_two, 1.0f, Space::kHost}, 0, out);
  CHECK(out[0] == -3.0f);
  CHECK(out[1] == 2.0f);
  CHECK(nvfp4_tensor_scale(26.88f) == Approx(0.01f));
  CHECK(nvfp4_tensor_scale(0) == 1.0f);
}

TEST_CASE("MXFP8 scale is the smallest power of two that holds the group", "[quantise]") {
  for (const float amax : {448.0f, 448.0001f, 447.99f, 1.0f, 1.75f, 1.7500001f, 1e38f, 1e-30f, 1e-44f}) {
    std::vector<float> row(32, 0.0f);
    row[5] = -amax;
    const Matrix m = quantised(WeightFormat::kMxfp8, row, 1, 32);
    const double scale = std::ldexp(1.0, m.scales[0] - 127);
    INFO(amax << " scale byte " << int{m.scales[0]});
    CHECK(amax <= 448 * scale);
    if (m.scales[0] > 0) CHECK(amax > 448 * scale / 2);
    const auto back = dequantised(m.view);
    // E4M3 keeps four significant bits; below 2^-6 of the scale the step is 2^-9.
    CHECK(std::abs(back[5] + amax) <= std::max<double>(amax / 16.0, scale / 1024));
    CHECK(back[0] == 0.0f);
  }
}

TEST_CASE("every format gives back what it can hold exactly, and zeros as zeros", "[quantise]") {
  std::mt19937 rng(7);
  const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  std::vector<float> w(4 * 64);
  for (size_t i = 0; i < w.size(); ++i) w[i] = (rng() % 2 ? -1.0f : 1.0f) * e2m1[rng() % 8] * 0.25f;
  for (size_t g = 0; g < w.size(); g += 16) w[g] = 1.5f;  // 6 * 0.25 in every group fixes all scales
  for (int i = 0; i < 32; ++i) w[static_cast<size_t>(64 + i)] = 0;
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kMxfp8, WeightFormat::kMxfp4}) {
    const Matrix m = quantised(format, w, 4, 64);
    INFO(weight_format_name(format));
    CHECK(dequantised(m.view) == w);
  }
  // NVFP4's scalar is amax / 2688, which is no power of two: equal up to its rounding.
  const auto back = dequantised(quantised(WeightFormat::kNvfp4, w, 4, 64).view);
  for (size_t i = 0; i < w.size(); ++i) CHECK(std::abs(back[i] - w[i]) <= 1e-6f);
  CHECK(quantised(WeightFormat::kNvfp4, w, 4, 64).scales[4] == 0x38);  // a group of zeros gets 1.0
}

TEST_CASE("errors stay within the formats' steps on random weights", "[quantise]") {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> w(64 * 192);
  for (float& v : w) v = normal(rng);
  const auto energy = [&](const std::vector<float>& v) {
    double sum = 0;
    for (const float x : v) sum += double{x} * x;
    return sum;
  };
  const std::pair<WeightFormat, double> decibels[] = {
      {WeightFormat::kMxfp8, 29.0}, {WeightFormat::kNvfp4, 19.0}, {WeightFormat::kMxfp4, 16.0}};
  for (const auto& [format, least] : decibels) {
    auto error = dequantised(quantised(format, w, 64, 192).view);
    for (size_t i = 0; i < w.size(); ++i) error[i] -= w[i];
    const double ratio = 10 * std::log10(energy(w) / energy(error));
    INFO(weight_format_name(format) << " signal to noise " << ratio << " dB");
    CHECK(ratio >= least);
  }
}

TEST_CASE("largest magnitude keeps NaN and infinity", "[quantise]") {
  const float inf = INFINITY, nan = NAN;
  const float a[] = {1, -3, 2}, b[] = {1, nan, 2}, c[] = {-inf, 1};
  CHECK(largest_magnitude(a, 3) == 3.0f);
  CHECK(std::isnan(largest_magnitude(b, 3)));
  CHECK(std::isinf(largest_magnitude(c, 2)));
  CHECK(largest_magnitude(a, 0) == 0.0f);
}

}  // namespace
}  // namespace firn::model
