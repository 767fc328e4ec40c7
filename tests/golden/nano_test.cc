// The trained model answers its documents' questions token for token.
#include <nlohmann/json.hpp>

#include <fstream>
#include <sstream>

#include "golden/run_wave.h"
#include "model/chat.h"
#include "model/generate.h"
#include "support/catch.h"

namespace firn::test {
namespace {

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  FIRN_CHECK(in.good(), "cannot read " + path);
  return text.str();
}

std::vector<nlohmann::json> questions(const std::string& doc) {
  std::vector<nlohmann::json> out;
  std::ifstream in(nano_path("docs/questions.jsonl"));
  for (std::string line; std::getline(in, line);) {
    auto entry = nlohmann::json::parse(line);
    if (entry["doc"] == doc) out.push_back(std::move(entry));
  }
  FIRN_CHECK(!out.empty(), "no questions for " + doc);
  return out;
}

std::vector<int32_t> prompt_of(const model::Engine& engine, const std::string& document, const std::string& question) {
  model::Conversation conversation;
  conversation.thinking = model::Thinking::kDisabled;
  model::Message user;
  user.role = "user";
  user.content.push_back({model::Part::Kind::kText, document + "\n\n" + question});
  conversation.messages.push_back(user);
  return engine.tokenizer()->encode(must(model::render(conversation)));
}

// One prefill a document; each question goes on from a fork of it.
void answer_all(const std::string& checkpoint, const std::string& doc, bool precise, double margin) {
  ModelOptions options;
  options.precise = precise;
  auto engine = open_model(nano_path(checkpoint), options);
  const std::string document = read(nano_path("docs/" + doc));
  model::Session base = engine->new_session();
  int64_t compared = 0, equal = 0;
  for (const auto& q : questions(doc)) {
    const auto ids = prompt_of(*engine, document, q["question"]);
    REQUIRE(static_cast<int64_t>(ids.size()) == q["prompt_tokens"].get<int64_t>());
    if (base.length() == 0) {  // everything but the question and the turn's end
      feed(base, std::span(ids).first(ids.size() - 64));
    }
    model::Session session = base.fork();
    model::GenerateRequest request;
    request.prompt = ids;
    request.max_tokens = 24;
    request.sampling.temperature = 0;
    request.thinking = model::Thinking::kDisabled;
    auto generation = must(model::Generation::start(engine.get(), &session, request));
    if (compared > 0) CHECK(generation->cached_tokens() >= static_cast<int64_t>(ids.size()) - 100);
    while (!generation->finished()) must(generation->step());
    if (!(q["msa_min_margin"].get<double>() > margin)) continue;
    ++compared;
    INFO(doc << ": " << q["question"] << " -> " << generation->text());
    const bool same = generation->token_ids() == q["msa_ids"].get<std::vector<int32_t>>();
    CHECK(same);
    equal += same;
    CHECK(generation->text() == q["msa_text"].get<std::string>());
  }
  WARN(checkpoint << " " << doc << (precise ? " precise" : " default") << ": " << equal << " of " << compared
                  << " answers equal to the reference's");
  CHECK(compared >= 5);
}

TEST_CASE("nano answers the 2K document in precise mode", "[nano]") {
  answer_all("nano-bf16", "doc-2k.txt", true, 0.01);
}
TEST_CASE("nano answers the 2K document in default mode", "[nano]") {
  answer_all("nano-bf16", "doc-2k.txt", false, 0.5);
}
TEST_CASE("nano answers the 16K document in precise mode", "[nano]") {
  answer_all("nano-bf16", "doc-16k.txt", true, 0.01);
}
TEST_CASE("nano answers the 16K document in default mode", "[nano]") {
  answer_all("nano-bf16", "doc-16k.txt", false, 0.5);
}
TEST_CASE("nano in MXFP8 answers the 2K document", "[nano]") { answer_all("nano-mxfp8", "doc-2k.txt", false, 0.5); }

// Minutes of work, so hidden: test_golden "[128k]".
TEST_CASE("nano answers the 128K document in default mode", "[.128k]") {
  answer_all("nano-bf16", "doc-128k.txt", false, 0.5);
}

TEST_CASE("default mode agrees with precise mode on the 16K document", "[nano]") {
  const std::string document = read(nano_path("docs/doc-16k.txt"));
  std::vector<int32_t> top1[2];
  for (const bool precise : {true, false}) {
    ModelOptions options;
    options.precise = precise;
    auto engine = open_model(nano_path("nano-bf16"), options);
    const auto ids = prompt_of(*engine, document, "What is the secret word of Flora Kendall?");
    model::KvCache kv(&engine->kv_pools());
    const int64_t n = static_cast<int64_t>(ids.size());
    const WaveRun run = run_wave(*engine, one_span(&kv, ids, iota(n)));
    for (int64_t i = 0; i < n; ++i) top1[precise].push_back(argmax(run.logits(i)));
  }
  int64_t agree = 0;
  for (size_t i = 0; i < top1[0].size(); ++i) agree += top1[0][i] == top1[1][i];
  const double share = static_cast<double>(agree) / static_cast<double>(top1[0].size());
  WARN("top-1 agreement of default with precise mode over " << top1[0].size() << " positions: " << share);
  CHECK(share >= 0.99);
}

}  // namespace
}  // namespace firn::test
