// What must not change an answer: the cut into waves and spans, company in a wave, threads, repetition, recycled
// memory.
#include "golden/run_wave.h"
#include "support/catch.h"

namespace firn::test {
namespace {

std::vector<int32_t> prompt_ids(const std::string& name) {
  return tensor<int32_t>(must(storage::SafetensorsFile::read(data_path("golden/bf16/" + name + ".safetensors"))),
                         "input_ids");
}

std::vector<float> last_logits(model::Engine& engine, const std::vector<int32_t>& ids) {
  model::Session session = engine.new_session();
  feed(session, ids);
  return {session.logits().begin(), session.logits().end()};
}

TEST_CASE("any split of a prompt gives the same picks, and in precise mode the same bits", "[golden]") {
  auto engine = open_model(data_path("tiny-mxfp8"));
  const auto ids = prompt_ids("p2500");
  model::Capture capture;
  capture.routing = capture.blocks = true;
  model::KvCache whole(&engine->kv_pools());
  const int64_t n = static_cast<int64_t>(ids.size());
  const WaveRun reference = run_wave(*engine, one_span(&whole, ids, iota(n)), capture);
  const auto& c = engine->config();
  for (const int64_t cut : {1, 7, 128, 129, 1000, 2049}) {
    INFO("waves of " << cut);
    model::KvCache kv(&engine->kv_pools());
    int64_t wrong_logits = 0, wrong_picks = 0, wrong_blocks = 0;
    const int64_t until = cut == 1 ? 300 : cut == 7 ? 700 : n;
    for (int64_t at = 0; at < until; at += cut) {
      const int64_t rows = std::min(cut, n - at);
      const WaveRun run =
          run_wave(*engine, one_span(&kv, {ids.begin() + at, ids.begin() + at + rows}, iota(rows)), capture);
      const int64_t k = c.experts_per_token, b = c.index_heads * c.topk_blocks;
      for (int64_t i = 0; i < rows; ++i) {
        wrong_logits += !same_bits(run.logits(i), reference.logits(at + i));
        for (int64_t m = 0; m < c.n_moe(); ++m) {
          wrong_picks += !std::equal(run.captured().expert_ids.begin() + (m * rows + i) * k,
                                     run.captured().expert_ids.begin() + (m * rows + i + 1) * k,
                                     reference.captured().expert_ids.begin() + (m * n + at + i) * k);
        }
        for (int64_t s = 0; s < c.n_sparse(); ++s) {
          wrong_blocks += !std::equal(run.captured().block_ids.begin() + (s * rows + i) * b,
                                      run.captured().block_ids.begin() + (s * rows + i + 1) * b,
                                      reference.captured().block_ids.begin() + (s * n + at + i) * b);
        }
      }
    }
    CHECK(wrong_logits == 0);
    CHECK(wrong_picks == 0);
    CHECK(wrong_blocks == 0);
  }
}

TEST_CASE("two sequences in one wave equal each alone, bit for bit in precise mode", "[golden]") {
  auto engine = open_model(data_path("tiny-bf16"));
  const auto a = prompt_ids("p2176"), b = prompt_ids("p300");
  const auto alone_a = last_logits(*engine, a), alone_b = last_logits(*engine, b);
  model::KvCache kv_a(&engine->kv_pools()), kv_b(&engine->kv_pools());
  model::Wave wave;
  wave.spans.push_back(make_span(&kv_a, a, {static_cast<int64_t>(a.size()) - 1}));
  wave.spans.push_back(make_span(&kv_b, b, {static_cast<int64_t>(b.size()) - 1}));
  const WaveRun run = run_wave(*engine, std::move(wave));
  CHECK(same_bits(run.logits(0), alone_a));
  CHECK(same_bits(run.logits(1), alone_b));
}

TEST_CASE("decode steps of several sequences in one wave equal each alone in default mode", "[golden]") {
  // Up to eight rows go through the same few-row kernels whatever their number (cpu/cpu_ops.h).
  ModelOptions options;
  options.precise = false;
  auto engine = open_model(data_path("tiny-mxfp8"), options);
  const auto ids = prompt_ids("p2500");
  const std::vector<int64_t> lengths = {5, 130, 2060};
  std::vector<model::Session> sessions;
  std::vector<std::vector<float>> alone;
  std::vector<model::KvCache> together;
  for (const int64_t n : lengths) {
    together.emplace_back(&engine->kv_pools());
    run_wave(*engine, one_span(&together.back(), {ids.begin(), ids.begin() + n}, {}));
    model::KvCache kv(&engine->kv_pools());
    run_wave(*engine, one_span(&kv, {ids.begin(), ids.begin() + n}, {}));
    const WaveRun run = run_wave(*engine, one_span(&kv, {ids[n]}, {0}));
    alone.emplace_back(run.logits(0).begin(), run.logits(0).end());
  }
  model::Wave wave;
  for (size_t i = 0; i < lengths.size(); ++i) wave.spans.push_back(make_span(&together[i], {ids[lengths[i]]}, {0}));
  const WaveRun run = run_wave(*engine, std::move(wave));
  for (size_t i = 0; i < lengths.size(); ++i) CHECK(same_bits(run.logits(i), alone[i]));
}

TEST_CASE("threads and repetition do not change a bit", "[golden]") {
  const auto ids = prompt_ids("p2176");
  for (const bool precise : {true, false}) {
    std::vector<float> first;
    for (const int threads : {1, 2, 64}) {
      ModelOptions options;
      options.precise = precise;
      options.threads = threads;
      auto engine = open_model(data_path("tiny-mxfp8"), options);
      for (int repeat = 0; repeat < 2; ++repeat) {  // the second run reuses the blocks of the first
        const auto logits = last_logits(*engine, ids);
        if (first.empty()) first = logits;
        INFO("precise " << precise << " threads " << threads << " repeat " << repeat);
        CHECK(same_bits(first, logits));
      }
    }
  }
}

TEST_CASE("memory that held NaN or large values before does not reach an answer", "[golden]") {
  for (const bool precise : {true, false}) {
    ModelOptions options;
    options.precise = precise;
    auto engine = open_model(data_path("tiny-bf16"), options);
    auto poison = [&](uint32_t bits) {
      // Takes blocks from the pools, fills them and gives them back, so that the next sequence gets them.
      std::vector<model::BlockRef> held;
      for (model::BlockPool* pool : {&engine->kv_pools().kv, &engine->kv_pools().index}) {
        for (int i = 0; i < 300; ++i) {
          held.push_back(must(pool->acquire()));
          auto* words = static_cast<uint32_t*>(held.back().data());
          std::fill(words, words + pool->block_bytes() / 4, bits);
        }
      }
    };
    for (const char* name : {"p1", "p127", "p128", "p129", "p2049", "p2176"}) {
      const auto ids = prompt_ids(name);
      INFO(name << " precise " << precise);
      poison(0);
      const auto clean = last_logits(*engine, ids);
      poison(0x7FC07FC0u);  // NaN in f32 and in both bf16 halves
      CHECK(same_bits(clean, last_logits(*engine, ids)));
      poison(0x461C461Cu);  // 1e4
      CHECK(same_bits(clean, last_logits(*engine, ids)));
    }
  }
}

TEST_CASE("the attention of a head is shared out among its chosen blocks", "[golden]") {
  auto engine = open_model(data_path("tiny-mxfp8"));
  const auto ids = prompt_ids("p2176");
  model::Capture capture;
  capture.blocks = capture.mass = true;
  model::KvCache kv(&engine->kv_pools());
  const int64_t n = static_cast<int64_t>(ids.size());
  const WaveRun run = run_wave(*engine, one_span(&kv, ids, {n - 1}), capture);
  const auto& c = engine->config();
  const int64_t lists = c.n_sparse() * n * c.kv_heads, per_group = c.heads_per_group();
  const auto& mass = run.captured().block_mass;
  REQUIRE(static_cast<int64_t>(mass.size()) == lists * c.topk_blocks * per_group);
  REQUIRE(run.captured().block_ids.size() * per_group == mass.size());
  int64_t wrong = 0;
  for (int64_t list = 0; list < lists; ++list) {
    for (int64_t head = 0; head < per_group; ++head) {
      double sum = 0;
      for (int64_t j = 0; j < c.topk_blocks; ++j) {
        const float part = mass[(list * c.topk_blocks + j) * per_group + head];
        const bool chosen = run.captured().block_ids[list * c.topk_blocks + j] >= 0;
        wrong += chosen ? !(part >= 0 && part <= 1.00001f) : part != 0;
        sum += part;
      }
      wrong += !(std::abs(sum - 1) <= 1e-5);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a wave replaces embeddings by given rows", "[golden]") {
  auto engine = open_model(data_path("tiny-bf16"));
  auto ids = prompt_ids("p300");
  const int64_t H = engine->config().hidden;
  model::KvCache plain(&engine->kv_pools()), replaced(&engine->kv_pools());
  const WaveRun want = run_wave(*engine, one_span(&plain, ids, {299}));
  // The rows of the true tokens, put over other tokens' embeddings, must give the same answer.
  model::WaveSpan span = make_span(&replaced, ids, {299});
  const auto* table = static_cast<const Bf16*>(engine->weights().embed.data);
  for (const int64_t at : {0, 5, 299}) {
    for (int64_t col = 0; col < H; ++col) {
      Bf16 v;
      std::memcpy(&v, table + ids[at] * H + col, 2);
      span.replace_rows.push_back(to_float(v));
    }
    span.replace_at.push_back(at);
    span.ids[at] = (ids[at] + 1) % 1000;
  }
  model::Wave wave;
  wave.spans.push_back(std::move(span));
  const WaveRun got = run_wave(*engine, std::move(wave));
  CHECK(same_bits(want.logits(0), got.logits(0)));
}

}  // namespace
}  // namespace firn::test
