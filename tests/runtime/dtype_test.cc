// Element types: the stored tables of the fixture, bit for bit, and the properties that hold for every value.
#include "runtime/dtype.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/tensor.h"
#include "tests/support/catch.h"

namespace firn {
namespace {

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }

// The fixture read by hand: this test must not lean on the reader that other tests check.
class Formats {
 public:
  Formats() {
    std::ifstream file(std::string(FIRN_TEST_DATA) + "/fixtures/formats.safetensors", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    REQUIRE(bytes_.size() > 8);
    uint64_t header = 0;
    std::memcpy(&header, bytes_.data(), 8);
    REQUIRE(header < bytes_.size() - 8);
    json_ = nlohmann::json::parse(bytes_.begin() + 8, bytes_.begin() + 8 + static_cast<int64_t>(header));
    data_ = 8 + header;
  }
  template <typename T>
  std::vector<T> get(const std::string& name) const {
    const auto offsets = json_.at(name).at("data_offsets");
    const size_t begin = offsets[0].get<size_t>(), end = offsets[1].get<size_t>();
    std::vector<T> out((end - begin) / sizeof(T));
    std::memcpy(out.data(), bytes_.data() + data_ + begin, end - begin);
    return out;
  }

 private:
  std::string bytes_;
  nlohmann::json json_;
  size_t data_ = 0;
};

void check_table(const std::vector<float>& expected, float (*convert)(uint8_t)) {
  for (size_t code = 0; code < expected.size(); ++code) {
    CAPTURE(code);
    const float found = convert(static_cast<uint8_t>(code));
    if (std::isnan(expected[code])) {
      CHECK(std::isnan(found));
    } else {
      CHECK(bits(found) == bits(expected[code]));
    }
  }
}

TEST_CASE("tables of E4M3, E8M0 and E2M1 equal the fixture bit for bit") {
  const Formats formats;
  const auto e4m3 = formats.get<float>("e4m3.values"), e8m0 = formats.get<float>("e8m0.values"),
             e2m1 = formats.get<float>("e2m1.values");
  REQUIRE(e4m3.size() == 256);
  REQUIRE(e8m0.size() == 256);
  REQUIRE(e2m1.size() == 16);
  check_table(e4m3, e4m3_to_float);
  check_table(e8m0, e8m0_to_float);
  check_table(e2m1, e2m1_to_float);
  CHECK(bits(e8m0_to_float(0)) == 0x00400000u);
  CHECK(e2m1_to_float(0xF3) == 1.5f);  // the high nibble is another element
}

TEST_CASE("encoders equal the fixture and round to the nearest even code") {
  const Formats formats;
  const auto input4 = formats.get<float>("e2m1_encode.input"), input8 = formats.get<float>("e4m3_encode.input");
  const auto codes4 = formats.get<uint8_t>("e2m1_encode.codes"), codes8 = formats.get<uint8_t>("e4m3_encode.codes");
  REQUIRE(input4.size() == codes4.size());
  REQUIRE(input8.size() == codes8.size());
  for (size_t i = 0; i < input4.size(); ++i) {
    CAPTURE(i, input4[i]);
    CHECK(int{float_to_e2m1(input4[i])} == int{codes4[i]});
  }
  for (size_t i = 0; i < input8.size(); ++i) {
    CAPTURE(i, input8[i]);
    CHECK(int{float_to_e4m3(input8[i])} == int{codes8[i]});
  }
}

TEST_CASE("encoders keep exact values, saturate, and mark what is no number") {
  for (int code = 0; code < 256; ++code) {
    const float v = e4m3_to_float(static_cast<uint8_t>(code));
    CAPTURE(code);
    CHECK(int{float_to_e4m3(v)} == code);  // also the two NaNs and -0
  }
  for (int code = 0; code < 16; ++code) {
    CHECK(int{float_to_e2m1(e2m1_to_float(static_cast<uint8_t>(code)))} == code);
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  CHECK(int{float_to_e4m3(1e30f)} == 0x7E);
  CHECK(int{float_to_e4m3(-kInf)} == 0xFE);
  CHECK(int{float_to_e4m3(460.0f)} == 0x7E);
  CHECK(int{float_to_e4m3(0x1p-10f)} == 0);  // half of the smallest: a tie, to even
  CHECK(int{float_to_e4m3(std::nextafter(0x1p-10f, 1.0f))} == 1);
  CHECK(int{float_to_e2m1(kInf)} == 7);
  CHECK(int{float_to_e2m1(-100.0f)} == 15);
  CHECK(int{float_to_e2m1(std::numeric_limits<float>::quiet_NaN())} == 7);
}

TEST_CASE("every f16 code converts exactly") {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto half = static_cast<uint16_t>(code);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    const float found = f16_to_float(half);
    if (exponent == 31) {
      if (mantissa == 0 ? !std::isinf(found) : !std::isnan(found)) FAIL("code " << code);
    } else if (!(static_cast<double>(found) == ((half & 0x8000) != 0 ? -magnitude : magnitude))) {
      FAIL("code " << code << " gives " << found);
    }
    if (std::signbit(found) != ((half & 0x8000) != 0)) FAIL("sign of code " << code);
  }
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN and infinity") {
  for (uint32_t code = 0; code < 65536; ++code) {
    const Bf16 v{static_cast<uint16_t>(code)};
    const float f = to_float(v);
    if (std::isnan(f)) {
      if (!std::isnan(to_float(to_bf16(f)))) FAIL("NaN code " << code);
    } else if (to_bf16(f).bits != v.bits) {
      FAIL("code " << code);
    }
  }
  CHECK(to_bf16(std::bit_cast<float>(0x3F808000u)).bits == 0x3F80);  // tie, even below
  CHECK(to_bf16(std::bit_cast<float>(0x3F818000u)).bits == 0x3F82);  // tie, even above
  CHECK(to_bf16(std::bit_cast<float>(0x3F808001u)).bits == 0x3F81);
  CHECK(std::isinf(to_float(to_bf16(std::numeric_limits<float>::max()))));
  CHECK(std::isnan(to_float(to_bf16(std::bit_cast<float>(0x7F800001u)))));
}

TEST_CASE("names of types go both ways and unknown ones are refused") {
  for (int i = 0; i <= static_cast<int>(DType::kF8E5m2); ++i) {
    const auto dtype = static_cast<DType>(i);
    REQUIRE(dtype_from_name(dtype_name(dtype)).has_value());
    CHECK(*dtype_from_name(dtype_name(dtype)) == dtype);
  }
  CHECK(std::string(dtype_name(DType::kF8E4m3)) == "F8_E4M3");
  CHECK(dtype_bytes(DType::kBf16) == 2);
  CHECK(dtype_bytes(DType::kF64) == 8);
  CHECK_FALSE(dtype_from_name("F12").has_value());
  CHECK_FALSE(dtype_from_name("bf16").has_value());
}

TEST_CASE("weight sizes and row slices follow the format, beyond 32 bits too") {
  // The embedding of the full model: rows and columns fit 32 bits, their product in bytes does not.
  CHECK(weight_data_bytes(WeightFormat::kBf16, 200064, 6144) == int64_t{200064} * 6144 * 2);
  CHECK(weight_data_bytes(WeightFormat::kF32, 1 << 20, 1 << 20) == int64_t{1} << 42);
  CHECK(weight_data_bytes(WeightFormat::kMxfp8, 3072, 6144) == 3072 * 6144);
  CHECK(weight_scale_bytes(WeightFormat::kMxfp8, 3072, 6144) == 3072 * 192);
  CHECK(weight_data_bytes(WeightFormat::kNvfp4, 3072, 6144) == 3072 * 3072);
  CHECK(weight_scale_bytes(WeightFormat::kNvfp4, 3072, 6144) == 3072 * 384);
  CHECK(weight_scale_bytes(WeightFormat::kMxfp4, 3072, 6144) == 3072 * 192);
  CHECK(weight_scale_bytes(WeightFormat::kBf16, 3072, 6144) == 0);

  std::vector<uint8_t> data(8 * 128), scales(8 * 4);
  WeightView view{WeightFormat::kMxfp8, 8, 128, data.data(), scales.data(), 1.0f, Space::kHost};
  const WeightView part = view.slice_rows(3, 2);
  CHECK(part.rows == 2);
  CHECK(part.data == data.data() + 3 * 128);
  CHECK(part.scales == scales.data() + 3 * 4);
  CHECK(part.bytes() == 2 * 128 + 2 * 4);
  view = {WeightFormat::kNvfp4, 8, 128, data.data(), scales.data(), 0.5f, Space::kHost};
  CHECK(view.slice_rows(1, 1).data == data.data() + 64);
  CHECK(view.slice_rows(1, 1).scales == scales.data() + 8);
  CHECK(view.slice_rows(1, 1).tensor_scale == 0.5f);
}

}  // namespace
}  // namespace firn
