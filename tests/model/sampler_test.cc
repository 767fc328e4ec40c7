// The sampler against a naive double implementation and fixed-seed distributions; stop strings under every cut.
#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "tests/support/catch.h"

namespace firn::model {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint64_t next_random(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

// Logits with many ties: quarters between -4 and 4.
std::vector<float> random_logits(size_t n, uint64_t seed) {
  std::vector<float> out(n);
  uint64_t state = seed * 77 + 1;
  for (float& x : out) x = static_cast<float>(next_random(&state) % 33) / 4.0f - 4.0f;
  return out;
}

// Straight from the definition: probabilities of all ids after the three filters.
std::vector<double> naive(const std::vector<float>& logits, const SamplingOptions& o, size_t n_tokens) {
  const size_t n = std::min(n_tokens, logits.size());
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (o.top_k > 0) order.resize(std::min(n, static_cast<size_t>(o.top_k)));
  std::vector<double> p(logits.size(), 0.0);
  double total = 0.0;
  for (const size_t i : order) total += std::exp((double{logits[i]} - logits[order[0]]) / o.temperature);
  double before = 0.0, kept = 0.0;
  for (const size_t i : order) {
    const double w = std::exp((double{logits[i]} - logits[order[0]]) / o.temperature);
    // Strictly inside top-p when the mass in front of it is short of top_p; rounding aside, which the cases avoid.
    const bool in_p = o.top_p >= 1.0 || before < o.top_p * total * (1.0 - 1e-12);
    if (in_p && w >= o.min_p) p[i] = w, kept += w;
    before += w;
  }
  for (double& x : p) x /= kept;
  return p;
}

std::vector<int64_t> counts(const std::vector<float>& logits, const SamplingOptions& o, int32_t n_tokens, int draws) {
  Sampler sampler(o, n_tokens);
  std::vector<int64_t> out(logits.size());
  for (int i = 0; i < draws; ++i) {
    const auto id = sampler.sample(logits);
    REQUIRE(id.ok());
    REQUIRE(*id >= 0);
    ++out.at(static_cast<size_t>(*id));
  }
  return out;
}

}  // namespace

TEST_CASE("sampler: distribution and filter sets equal the naive ones") {
  struct Case {
    SamplingOptions options;
    int32_t n_tokens;
  };
  std::vector<Case> cases;
  for (const double temperature : {0.3, 1.0, 2.5}) {
    for (const double top_p : {1.0, 0.95, 0.5, 0.01}) {
      for (const int64_t top_k : {0, 1, 3, 7, 1000}) {
        for (const double min_p : {0.0, 0.1, 1.0}) {
          cases.push_back({{temperature, top_p, top_k, min_p, 1234 + cases.size()}, 20});
        }
      }
    }
  }
  constexpr int kDraws = 4000;
  double worst = 0.0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [options, n_tokens] = cases[i];
    const auto logits = random_logits(24, i);
    const auto p = naive(logits, options, static_cast<size_t>(n_tokens));
    const auto n = counts(logits, options, n_tokens, kDraws);
    INFO("T " << options.temperature << " top_p " << options.top_p << " top_k " << options.top_k << " min_p "
              << options.min_p);
    double chi2 = 0.0;
    int free = -1;
    for (size_t id = 0; id < logits.size(); ++id) {
      const double expected = p[id] * kDraws;
      if (p[id] <= 0.0) CHECK(n[id] == 0);  // outside the set, or masked
      if (expected >= 12.0) CHECK(n[id] > 0);
      if (expected < 5.0) continue;
      const double diff = static_cast<double>(n[id]) - expected;
      chi2 += diff * diff / expected;
      ++free;
    }
    if (free < 1) continue;
    // Wilson and Hilferty: the cube root of chi2 / f is near normal.
    const double f = free, z = (std::cbrt(chi2 / f) - (1.0 - 2.0 / (9.0 * f))) / std::sqrt(2.0 / (9.0 * f));
    worst = std::max(worst, z);
    CHECK(z <= 4.5);
  }
  CHECK(worst > 0.5);  // the statistic lives
}

TEST_CASE("sampler: large vocabulary, the short cuts of top-p and min-p keep the same set") {
  std::vector<float> logits(5000);
  uint64_t state = 9;
  for (float& x : logits) x = static_cast<float>(next_random(&state) % 100000) / 10000.0f;
  logits[77] = logits[4321] = 14.0f;
  for (const double top_p : {0.999, 0.9, 0.3}) {
    for (const double min_p : {0.0, 0.02}) {
      const SamplingOptions options{1.0, top_p, 0, min_p, 5};
      const auto p = naive(logits, options, logits.size());
      const auto n = counts(logits, options, 5000, 1500);
      size_t outside = 0;
      for (size_t id = 0; id < logits.size(); ++id) outside += p[id] <= 0.0 && n[id] > 0;
      CHECK(outside == 0);
      CHECK(std::fabs(static_cast<double>(n[77]) / 1500 - p[77]) <= 0.06);
    }
  }
}

TEST_CASE("sampler: greedy, ties, masks") {
  const std::vector<float> logits = {1, 5, 5, -kInf, 9};
  const auto pick = [&](SamplingOptions o, int32_t n) { return *Sampler(o, n).sample(logits); };
  CHECK(pick({0.0}, 5) == 4);
  CHECK(pick({0.0}, 4) == 1);
  CHECK(pick({0.0}, 1) == 0);
  CHECK(pick({0.0}, 100) == 4);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    CHECK(pick({1.0, 1.0, 1, 0.0, seed}, 4) == 1);     // the lowest id of equals
    CHECK(pick({1e-300, 1.0, 0, 0.0, seed}, 5) == 4);  // colder than any difference
    CHECK(pick({1.0, 1e-9, 0, 0.0, seed}, 4) == 1);
    const int32_t hot = pick({1e300, 1.0, 0, 0.0, seed}, 5);
    CHECK(hot != 3);  // -inf stays impossible
  }
  const std::vector<float> cold = {-kInf, -kInf, -3e38f, -kInf};
  CHECK(*Sampler({1.0}, 4).sample(cold) == 2);
  CHECK(*Sampler({1.0, 0.5, 3, 0.5, 1}, 4).sample(cold) == 2);
  const std::vector<float> wide = {3e38f, -3e38f};
  CHECK(*Sampler({0.1}, 2).sample(wide) == 0);
  // At a huge temperature all finite tokens are equally likely.
  const auto n = counts(logits, {1e300, 1.0, 0, 0.0, 3}, 5, 4000);
  for (const size_t id : {0, 1, 2, 4}) CHECK(std::abs(n[id] - 1000) <= 150);
}

TEST_CASE("sampler: broken logits are errors and do not use up a step") {
  const std::vector<float> good = random_logits(50, 4);
  for (const float broken : {kNan, kInf}) {
    for (const double temperature : {0.0, 1.0}) {
      std::vector<float> logits = good;
      logits[30] = broken;
      Sampler sampler({temperature, 0.9, 0, 0.0, 8}, 50), other({temperature, 0.9, 0, 0.0, 8}, 50);
      const auto id = sampler.sample(logits);
      REQUIRE_FALSE(id.ok());
      CHECK(id.status().message().find("token 30") != std::string::npos);
      CHECK(*sampler.sample(good) == *other.sample(good));
      CHECK(Sampler({temperature}, 30).sample(logits).ok());  // masked ids are not looked at
    }
  }
  CHECK_FALSE(Sampler({0.0}, 3).sample(std::vector<float>{-kInf, -kInf, -kInf}).ok());
  CHECK_FALSE(Sampler({1.0}, 0).sample(good).ok());
  CHECK_FALSE(Sampler({1.0}, 5).sample({}).ok());
}

TEST_CASE("sampler: seed and step decide the draw") {
  const auto draw = [](uint64_t seed) {
    Sampler sampler({1.0, 0.95, 0, 0.0, seed}, 200);
    std::vector<int32_t> out;
    for (uint64_t i = 0; i < 64; ++i) out.push_back(*sampler.sample(random_logits(200, i)));
    return out;
  };
  CHECK(draw(1) == draw(1));
  std::set<std::vector<int32_t>> seen;
  for (uint64_t seed = 0; seed < 32; ++seed) seen.insert(draw(seed));
  CHECK(seen.size() == 32);
  // The bits of the generator are part of the contract: a session continued elsewhere draws the same.
  Sampler sampler({1.0, 1.0, 0, 0.0, 42}, 1000);
  std::vector<int32_t> ids;
  const std::vector<float> flat(1000, 0.0f);
  for (int i = 0; i < 6; ++i) ids.push_back(*sampler.sample(flat));
  CHECK(ids == std::vector<int32_t>{343, 955, 486, 67, 676, 67});
}

TEST_CASE("sampler: options are checked by name") {
  CHECK(SamplingOptions{}.validate().ok());
  CHECK(SamplingOptions{0.0, 1.0, 40, 1.0, 0}.validate().ok());
  const auto refused = [](const SamplingOptions& o, const char* name) {
    const Status status = o.validate();
    CHECK(status.code() == Code::kInvalid);
    CHECK(status.message().find(name) == 0);
  };
  refused({-0.1}, "temperature");
  refused({double{kNan}}, "temperature");
  refused({double{kInf}}, "temperature");
  refused({1.0, 0.0}, "top_p");
  refused({1.0, 1.01}, "top_p");
  refused({1.0, double{kNan}}, "top_p");
  refused({1.0, 1.0, -1}, "top_k");
  refused({1.0, 1.0, 0, -0.1}, "min_p");
  refused({1.0, 1.0, 0, 1.1}, "min_p");
  refused({1.0, 1.0, 0, double{kNan}}, "min_p");
}

TEST_CASE("stop strings: the same for every cut of the text") {
  struct Case {
    std::string text;
    std::vector<std::string> stops;
    std::string shown;
    bool stopped;
  };
  const std::vector<Case> cases = {
      {"hello world", {}, "hello world", false},
      {"hello world", {"xyz"}, "hello world", false},
      {"hello world", {"o w"}, "hell", true},
      {"hello world", {"world"}, "hello ", true},
      {"hello worl", {"world"}, "hello worl", false},
      {"aaab", {"aab"}, "a", true},
      {"abababac", {"ababac"}, "ab", true},
      {"xabcd", {"abcd", "bc"}, "xa", true},  // bc is complete first
      {"xabcd", {"bcd", "abcd"}, "x", true},  // complete together: the longest
      {"xabcd", {"abcd", "bcd"}, "x", true},
      {"xabxabc", {"abc", "abd"}, "xabx", true},
      {"stop", {"stop"}, "", true},
      {"\xC3\xA9t\xC3\xA9 \xE4\xBD\xA0\xE5\xA5\xBD!", {"\xE5\xA5\xBD"}, "\xC3\xA9t\xC3\xA9 \xE4\xBD\xA0", true},
      {"\xC3\xA9t\xC3\xA9", {"\xC3\xA8"}, "\xC3\xA9t\xC3\xA9", false},
      {"one\n\ntwo", {"\n\n", "\nt"}, "one", true},
      {"cut \xE4\xBD", {"x"}, "cut \xE4\xBD", false},
  };
  for (const Case& c : cases) {
    INFO(c.text);
    // Each bit of `cuts` says whether the text is cut behind that byte.
    for (uint32_t cuts = 0; cuts<(1u << (c.text.size() - 1)); cuts += c.text.size()> 12 ? 37 : 1) {
      StopMatcher matcher(c.stops);
      std::string shown;
      size_t begin = 0;
      for (size_t i = 0; i < c.text.size(); ++i) {
        if (i + 1 < c.text.size() && !((cuts >> i) & 1)) continue;
        const std::string part = matcher.feed(std::string_view(c.text).substr(begin, i + 1 - begin));
        begin = i + 1;
        shown += part;
        // What is shown is whole characters and never more than it should be.
        if (c.text.compare(0, 3, "cut") != 0 && !part.empty()) {
          const auto next = static_cast<uint8_t>(shown.size() < c.text.size() ? c.text[shown.size()] : 0);
          if ((next & 0xC0) == 0x80) FAIL("cut inside a character");
        }
        if (c.shown.compare(0, shown.size(), shown) != 0) FAIL("too much was shown: " << shown);
      }
      shown += matcher.finish();
      if (shown != c.shown || matcher.stopped() != c.stopped) FAIL("cuts " << cuts << " show " << shown);
      CHECK(matcher.finish().empty());
      if (c.stopped) CHECK(matcher.feed("more").empty());
    }
  }
}

TEST_CASE("stop strings: nothing is held back longer than it must be") {
  StopMatcher matcher({"<end>", "--"});
  CHECK(matcher.feed("a<en") == "a");
  CHECK(matcher.feed("t>") == "<ent>");
  CHECK(matcher.feed("b-") == "b");
  CHECK(matcher.feed("c") == "-c");
  CHECK(matcher.feed("\xE4\xBD") == "");
  CHECK(matcher.feed("\xA0") == "\xE4\xBD\xA0");
  CHECK(matcher.feed("-") == "");
  CHECK(matcher.finish() == "-");
  CHECK_FALSE(matcher.stopped());
}

}  // namespace firn::model
