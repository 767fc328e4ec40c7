// Sessions: append, truncate across block borders, fork, cancel, prefix reuse, and what they may hold.
#include "golden/run_wave.h"
#include "model/generate.h"
#include "support/catch.h"
#include "support/temp_folder.h"

namespace firn::test {
namespace {

std::vector<int32_t> prompt_ids(const std::string& name) {
  return tensor<int32_t>(must(storage::SafetensorsFile::read(data_path("golden/bf16/" + name + ".safetensors"))),
                         "input_ids");
}

// Everything near; and as little K and V near as one token may choose.
std::vector<ModelOptions> near_and_far(const TempFolder& folder) {
  ModelOptions far;
  far.kv_dir = folder.path();
  far.kv_ram = least_kv_ram(data_path("tiny-mxfp8"));
  return {ModelOptions(), far};
}

std::vector<float> fresh(model::Engine& engine, std::span<const int32_t> ids) {
  model::Session session = engine.new_session();
  feed(session, ids);
  return {session.logits().begin(), session.logits().end()};
}

TEST_CASE("truncate across block borders and feed again equals a fresh session", "[session]") {
  TempFolder folder;
  for (const ModelOptions& options : near_and_far(folder)) {
    CAPTURE(options.kv_ram);
    auto engine = open_model(data_path("tiny-mxfp8"), options);
    const auto ids = prompt_ids("p2500");
    std::vector<int32_t> other(ids.rbegin(), ids.rend());
    model::Session session = engine->new_session();
    feed(session, ids);
    for (const int64_t keep : {2499, 2433, 2432, 2431, 2048, 2047, 129, 128, 127, 1, 0}) {
      INFO("kept " << keep);
      session.truncate(keep);
      REQUIRE(session.length() == keep);
      // Different tokens after the cut, so that stale keys would show.
      std::vector<int32_t> want(ids.begin(), ids.begin() + keep);
      want.insert(want.end(), other.begin(), other.begin() + 140);
      feed(session, std::span(other).first(140));
      CHECK(same_bits(session.logits(), fresh(*engine, want)));
      session.truncate(keep);
    }
    CHECK(engine->kv_pools().kv.blocks_in_use() == 0);
  }
}

TEST_CASE("a fork shares blocks and neither side sees the other's tokens", "[session]") {
  TempFolder folder;
  for (const ModelOptions& options : near_and_far(folder)) {
    CAPTURE(options.kv_ram);
    auto engine = open_model(data_path("tiny-mxfp8"), options);
    const auto ids = prompt_ids("p2176");
    for (const int64_t n : {100, 128, 2100}) {
      INFO("forked at " << n);
      model::Session a = engine->new_session();
      feed(a, std::span(ids).first(n));
      const int64_t before = engine->kv_pools().kv.blocks_in_use();
      model::Session b = a.fork();
      CHECK(engine->kv_pools().kv.blocks_in_use() == before);
      CHECK(same_bits(a.logits(), b.logits()));
      std::vector<int32_t> tail_a(ids.begin() + n, ids.begin() + n + 40), tail_b(ids.begin(), ids.begin() + 60);
      feed(b, tail_b);
      feed(a, tail_a);
      std::vector<int32_t> want_a(ids.begin(), ids.begin() + n), want_b = want_a;
      want_a.insert(want_a.end(), tail_a.begin(), tail_a.end());
      want_b.insert(want_b.end(), tail_b.begin(), tail_b.end());
      CHECK(same_bits(a.logits(), fresh(*engine, want_a)));
      CHECK(same_bits(b.logits(), fresh(*engine, want_b)));
      // A fork of a fork outlives its parents.
      model::Session c = b.fork();
      { const model::Session gone = std::move(b); }
      feed(c, tail_a);
      want_b.insert(want_b.end(), tail_a.begin(), tail_a.end());
      CHECK(same_bits(c.logits(), fresh(*engine, want_b)));
    }
    CHECK(engine->kv_pools().kv.blocks_in_use() == 0);
    engine->kv_pools().kv.trim();
    CHECK(engine->kv_pools().kv.bytes_held() == 0);
  }
}

TEST_CASE("a wave given up in the middle leaves the session as it was", "[session]") {
  auto engine = open_model(data_path("tiny-bf16"));
  const auto ids = prompt_ids("p2500");
  model::Session session = engine->new_session();
  feed(session, std::span(ids).first(300));
  const auto want = fresh(*engine, ids);
  for (const int steps : {0, 1, 5, 12, 40}) {
    must(session.begin(std::span(ids).subspan(300)));
    for (int i = 0; i < steps && !session.idle(); ++i) must(session.step());
    session.cancel();
    REQUIRE(session.length() == 300);
  }
  feed(session, std::span(ids).subspan(300));
  CHECK(same_bits(session.logits(), want));
}

TEST_CASE("another session's wave runs between the steps of a long prefill", "[session]") {
  auto engine = open_model(data_path("tiny-mxfp8"));
  const auto ids = prompt_ids("p2500"), small = prompt_ids("p129");
  const auto want_long = fresh(*engine, ids), want_small = fresh(*engine, small);
  model::Session a = engine->new_session(), b = engine->new_session();
  must(a.begin(ids));
  int rounds = 0;
  double last = -1;
  while (!a.idle()) {
    must(a.step());
    CHECK(a.progress() >= last);
    last = a.progress();
    if (++rounds % 9 != 0) continue;
    b.truncate(0);
    feed(b, small);
    CHECK(same_bits(b.logits(), want_small));
  }
  CHECK(rounds > 40);
  CHECK(same_bits(a.logits(), want_long));
}

TEST_CASE("prefix reuse leaves at least one token to compute", "[session]") {
  auto engine = open_model(data_path("tiny-mxfp8"));
  const auto ids = prompt_ids("p2500");
  for (const int64_t n : {1, 127, 128, 129, 256, 2048, 2049}) {
    INFO("prompt of " << n);
    model::Session session = engine->new_session();
    const auto prompt = std::span(ids).first(n);
    feed(session, prompt);
    const auto cold = std::vector<float>(session.logits().begin(), session.logits().end());
    const int64_t reused = session.reuse_prefix(prompt);
    CHECK(reused == n - 1);
    feed(session, prompt.subspan(reused));
    CHECK(same_bits(session.logits(), cold));
    // Continue by 50: everything held is reused.
    const auto longer = std::span(ids).first(n + 50);
    CHECK(session.reuse_prefix(longer) == n);
    feed(session, longer.subspan(n));
    CHECK(same_bits(session.logits(), fresh(*engine, longer)));
  }
}

TEST_CASE("what cannot be computed is refused before work", "[session]") {
  auto engine = open_model(data_path("tiny-bf16"));
  model::Session session = engine->new_session();
  CHECK(session.begin({}).message().find("empty") != std::string::npos);
  const std::vector<int32_t> wrong = {5, 1344};
  const Status id = session.begin(wrong);
  CHECK(id.message().find("1344") != std::string::npos);
  CHECK(id.message().find("1343") != std::string::npos);
  const std::vector<int32_t> negative = {-1};
  CHECK_FALSE(session.begin(negative).ok());
  CHECK(session.idle());
  model::GenerateRequest request;
  request.prompt.assign(200, 7);
  request.context = 100;
  const auto refused = model::Generation::start(engine.get(), &session, request);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().message().find("200") != std::string::npos);
  CHECK(refused.status().message().find("100") != std::string::npos);
}

TEST_CASE("a memory limit is refused up front with the bytes short, and held", "[session]") {
  model::EngineOptions options;
  options.model = data_path("tiny-bf16");
  options.threads = 1;
  options.isa = must(cpu::choose_isa());
  options.ram_bytes = 1 << 20;
  const auto refused = model::Engine::open(storage::FileSystem::real(), options);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == Code::kNoMemory);
  CHECK(refused.status().message().find("short") != std::string::npos);

  ModelOptions fits;
  fits.ram_bytes = int64_t{64} << 20;
  auto engine = open_model(data_path("tiny-bf16"), fits);
  model::Session session = engine->new_session();
  model::GenerateRequest request;
  request.prompt.assign(200000, 7);
  const auto generation = model::Generation::start(engine.get(), &session, request);
  REQUIRE_FALSE(generation.ok());
  CHECK(generation.status().code() == Code::kNoMemory);
  CHECK(generation.status().message().find("--wave") != std::string::npos);
  // Growing past the limit in the middle is an error too, and the session stays usable.
  const std::vector<int32_t> many(100000, 7);
  CHECK(session.begin(many).code() == Code::kNoMemory);
  feed(session, std::span(many).first(10));
  CHECK(session.length() == 10);
  CHECK(engine->budget().peak_bytes() <= fits.ram_bytes);
}

}  // namespace
}  // namespace firn::test
