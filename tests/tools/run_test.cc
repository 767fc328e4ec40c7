// `firn run` as a user or a script types it: the fields of its JSON, equal answers whatever the threads and the
// instruction set, and how inputs that are not plain text come through.
#include <sys/stat.h>

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "runtime/units.h"
#include "tests/support/catch.h"
#include "tests/support/fixtures.h"
#include "tests/tools/run_firn.h"

namespace firn::test {
namespace {

using nlohmann::json;

const std::string kQuestion = "What is the secret word of Flora Kendall?";
const std::string kAnswer = "The secret word of Flora Kendall is Opal.";

std::vector<std::string> nano(const std::vector<std::string>& more) {
  std::vector<std::string> all = {"run", "--model", nano_path("nano-bf16"), "--thinking", "disabled", "--greedy"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<std::string> question(const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = nano({"--file", nano_path("docs/doc-2k.txt"), "--prompt", kQuestion});
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

json answer(const std::vector<std::string>& arguments, const RunOptions& options = {}) {
  const Ran ran = run_firn(arguments, options);
  INFO("stderr: " << ran.err);
  REQUIRE(ran.code == 0);
  return json::parse(ran.out);
}

void refused(const Ran& ran, int code, const std::vector<std::string>& words) {
  INFO("stderr: " << ran.err);
  CHECK(ran.code == code);
  CHECK(ran.out.empty());
  for (const std::string& word : words) {
    INFO("expected in the message: " << word);
    CHECK(ran.err.find(word) != std::string::npos);
  }
}

TEST_CASE("run --json holds every field, and the numbers agree with each other") {
  TempFolder temp;
  const json j = answer(question({"--json", "--evidence", "--logits", temp / "l.safetensors"}));
  CHECK(j.at("text") == kAnswer);
  CHECK(j.at("reasoning") == "");
  CHECK(j.at("tool_calls").empty());
  CHECK(j.at("finish_reason") == "stop");
  const auto steps = j.at("token_ids").size();
  REQUIRE(steps == 10);
  CHECK_FALSE(j.contains("prompt_token_ids"));
  CHECK(j.at("usage") == json({{"prompt_tokens", 2006}, {"completion_tokens", 10}, {"cached_tokens", 0}}));
  const json& t = j.at("timings");
  for (const char* name : {"load_s", "prefill_s", "prefill_tok_s", "decode_s", "decode_tok_s", "first_token_s"}) {
    CAPTURE(name);
    CHECK(t.at(name).get<double>() > 0);
  }
  CHECK(t.at("prefill_s").get<double>() <= t.at("first_token_s").get<double>());
  CHECK(t.at("prefill_tok_s").get<double>() == Approx(2006 / t.at("prefill_s").get<double>()).epsilon(1e-3));
  CHECK(j.at("logits_xxh3").size() == steps);
  for (const json& hash : j.at("logits_xxh3")) CHECK(hash.get<std::string>().size() == 16);
  const json& m = j.at("memory");
  const auto bytes = [&](const char* name) { return m.at(name).get<int64_t>(); };
  CHECK(bytes("resident_bytes") > bytes("experts_bytes"));
  CHECK(bytes("experts_bytes") == 2654208);
  CHECK(bytes("resident_bytes") <= bytes("budget_bytes"));
  CHECK(bytes("peak_rss_bytes") > 8000000);
  CHECK(bytes("kv_bytes") > 0);
  for (const char* tier : {"expert", "kv"}) {
    for (const char* name :
         {"hits", "misses", "demand_bytes", "speculative_bytes", "useful_bytes", "late", "wasted_bytes", "wait_s"}) {
      CAPTURE(tier, name);
      CHECK(j.at("tiers").at(tier).at(name) == 0);
    }
  }
  CHECK(j.at("tiers").at("kv").at("near_blocks").get<int64_t>() > 0);
  CHECK(j.at("tiers").at("kv").at("far_blocks") == 0);
  CHECK(j.at("tiers").at("kv").at("bytes_on_disk") == 0);
  CHECK_FALSE(j.at("evidence").empty());

  const auto logits = must(storage::SafetensorsFile::read(temp / "l.safetensors"));
  REQUIRE(logits.find("logits") != nullptr);
  const std::vector<int64_t> shape = {static_cast<int64_t>(steps), 3658};
  CHECK(logits.find("logits")->shape == shape);
  const auto values = tensor<float>(logits, "logits");
  for (size_t step = 0; step < steps; ++step) {
    const auto row = values.begin() + static_cast<int64_t>(step) * shape[1];
    CHECK(std::max_element(row, row + shape[1]) - row == j.at("token_ids")[step].get<int64_t>());
  }
  // Nothing but the file asked for is left.
  CHECK(std::distance(std::filesystem::directory_iterator(temp.path()), {}) == 1);
}

TEST_CASE("for people only the answer goes to stdout") {
  const Ran ran = run_firn(question({"--stats", "--evidence"}));
  CHECK(ran.code == 0);
  CHECK(ran.out == kAnswer + "\n");
  CHECK(has_all(ran.err, {"MiniMax-M3", "parameters", "missing", "prompt 2006 tokens", "tok/s", "evidence"}));
  const Ran quiet = run_firn(question({"--quiet"}));
  CHECK(quiet.out == kAnswer + "\n");
  CHECK(quiet.err.empty());
}

TEST_CASE("evidence of a long document: the passage with the fact comes first, one line each") {
  // The first question of the 16K document that the model answers right.
  std::istringstream lines(get_file(nano_path("docs/questions.jsonl")));
  json asked;
  for (std::string line; std::getline(lines, line);) {
    const json q = json::parse(line);
    if (q.at("doc") == "doc-16k.txt" && q.at("kind") == "fact" && q.at("msa_correct") == true) {
      asked = q;
      break;
    }
  }
  REQUIRE(asked.is_object());
  const Ran ran =
      run_firn(nano({"--file", nano_path("docs/doc-16k.txt"), "--prompt", asked.at("question"), "--evidence"}));
  CHECK(ran.out == asked.at("msa_text").get<std::string>() + "\n");
  const size_t at = ran.err.find("evidence:");
  REQUIRE(at != std::string::npos);
  const std::string evidence = ran.err.substr(at);
  CHECK(std::count(evidence.begin(), evidence.end(), '\n') == 6);
  INFO(evidence);
  double last = 100;
  std::istringstream passages(evidence.substr(evidence.find('\n') + 1));
  for (std::string line; std::getline(passages, line);) {
    double share = 0;
    long long begin = -1, end = -1;
    REQUIRE(std::sscanf(line.c_str(), " %lf %% tokens %lld to %lld:", &share, &begin, &end) == 3);
    CHECK(begin % 128 == 0);
    CHECK(end - begin == 128);
    CHECK(share > 0);
    CHECK(share <= last);
    if (last == 100) {
      CHECK(begin <= asked.at("fact_token").get<long long>());
      CHECK(asked.at("fact_token").get<long long>() < end);
    }
    last = share;
  }
}

TEST_CASE("logits are the same bits for every thread count and every run") {
  const json first = answer(question({"--json", "--threads", "1"}));
  for (const char* threads : {"2", "64", "2"}) {
    CAPTURE(threads);
    CHECK(answer(question({"--json", "--threads", threads})).at("logits_xxh3") == first.at("logits_xxh3"));
  }
}

TEST_CASE("every instruction set gives the answer") {
  RunOptions options;
  for (const char* isa : {"scalar", "avx2", "avx512", "amx"}) {
    CAPTURE(isa);
    options.env["FIRN_ISA"] = isa;
    const Ran ran = run_firn(question({"--json"}), options);
    if (ran.code != 0) {
      // A machine without it has to say so, and may not answer with something else.
      CHECK(ran.code == 1);
      CHECK(has_all(ran.err, {"FIRN_ISA", isa}));
      continue;
    }
    CHECK(json::parse(ran.out).at("text") == kAnswer);
  }
  options.env["FIRN_ISA"] = "nonsense";
  refused(run_firn(question(), options), 1, {"FIRN_ISA", "nonsense", "scalar", "amx"});
}

TEST_CASE("--seed repeats a sampled answer, --stop ends before its text, --max-tokens counts") {
  const std::vector<std::string> base = {"run",          "--model", nano_path("nano-bf16"), "--prompt",
                                         "Tell me",      "--json",  "--temperature",        "1.5",
                                         "--max-tokens", "12"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = base;
    all.insert(all.end(), more.begin(), more.end());
    return answer(all);
  };
  CHECK(with({"--seed", "5"}).at("token_ids") == with({"--seed", "5"}).at("token_ids"));
  std::set<std::string> different;
  for (const char* seed : {"1", "2", "3", "4"}) different.insert(with({"--seed", seed}).at("token_ids").dump());
  CHECK(different.size() > 1);

  const json stopped = answer(question({"--json", "--stop", " Kendall"}));
  CHECK(stopped.at("text") == "The secret word of Flora");
  CHECK(stopped.at("finish_reason") == "stop");
  const json cut = answer(question({"--json", "--max-tokens", "3"}));
  CHECK(cut.at("finish_reason") == "length");
  CHECK(cut.at("token_ids").size() == 3);
  const json on = answer(question({"--json", "--max-tokens", "14", "--ignore-eos"}));
  CHECK(on.at("token_ids").size() == 14);
  CHECK(on.at("finish_reason") == "length");
}

TEST_CASE("--tokens and --raw show the ids they fed; --messages takes a list with tools") {
  TempFolder temp;
  const json ids = answer(nano({"--json", "--max-tokens", "4", "--tokens", temp.write("ids.json", "[5,6,7]")}));
  CHECK(ids.at("prompt_token_ids") == json({5, 6, 7}));
  const json raw = answer(nano({"--json", "--max-tokens", "4", "--raw", "--prompt", "The access"}));
  CHECK(raw.at("prompt_token_ids").size() >= 2);
  CHECK(raw.at("text").get<std::string>().rfind(" code", 0) == 0);
  const std::string chat = temp.write(
      "chat.json",
      R"({"messages":[{"role":"user","content":"Hello!"}],"tools":[{"type":"function","function":{"name":"f",)"
      R"("description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}]})");
  const json with_tools = answer(nano({"--json", "--max-tokens", "4", "--messages", chat}));
  const json without = answer(nano({"--json", "--max-tokens", "4", "--prompt", "Hello!"}));
  CHECK(with_tools.at("usage").at("prompt_tokens") > without.at("usage").at("prompt_tokens"));

  refused(run_firn(nano({"--tokens", temp.write("high.json", "[5,6,999999]")})), 1, {"999999", "position 2", "3657"});
  refused(run_firn(nano({"--tokens", temp.write("low.json", "[5,-1]")})), 1, {"low.json", "entry 1", "-1"});
  refused(run_firn(nano({"--tokens", temp.write("word.json", "{\"a\":1}")})), 1, {"word.json", "list of token ids"});
  refused(run_firn(nano({"--tokens", temp.write("none.json", "[]")})), 1, {"none.json", "empty"});
  refused(run_firn(nano({"--messages", temp.write("half.json", "[{\"role\":")})), 1, {"half.json"});
}

TEST_CASE("an image in the messages is refused by name on every checkpoint, exit code 2") {
  TempFolder temp;
  const std::string chat =
      temp.write("image.json",
                 R"([{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://example.org/a.png"}},)"
                 R"({"type":"text","text":"What is this?"}]}])");
  for (const std::string& model : {nano_path("nano-bf16"), nano_path("nano-mxfp8"), data_path("tiny-bf16")}) {
    refused(run_firn({"run", "--model", model, "--messages", chat}), 2, {"image.json", "image", "text only"});
  }
}

TEST_CASE("a document's broken bytes are replaced, counted and said once") {
  TempFolder temp;
  const std::string text = get_file(nano_path("docs/doc-2k.txt"));
  const std::string broken = temp.write("broken.txt", text + "\nA \xFF and a \xC3( end.");
  const Ran ran = run_firn(nano({"--file", broken, "--prompt", kQuestion}));
  CHECK(ran.code == 0);
  CHECK(ran.out == kAnswer + "\n");
  CHECK(has_all(ran.err, {"broken.txt: 2 invalid UTF-8 sequences"}));
  CHECK(ran.err.find("U+FFFD") == ran.err.rfind("U+FFFD"));
}

TEST_CASE("byte order mark, CRLF and NUL in a document") {
  TempFolder temp;
  const std::string text = get_file(nano_path("docs/doc-2k.txt"));
  const auto prompt_tokens = [&](const std::string& content) {
    const json j = answer(nano({"--json", "--file", temp.write("doc.txt", content), "--prompt", kQuestion}));
    CHECK(j.at("text") == kAnswer);
    return j.at("usage").at("prompt_tokens").get<int64_t>();
  };
  // The mark is about the file, not part of the text. Line ends and NUL bytes are text and reach the model.
  CHECK(prompt_tokens("\xEF\xBB\xBF" + text) == 2006);
  CHECK(prompt_tokens(text + "\r\nThe end.\r\n") > 2006);
  CHECK(prompt_tokens(text + std::string("\nThe\0end.", 9)) > 2006);
  const Ran wide =
      run_firn(nano({"--file", temp.write("wide.txt", std::string("\xFF\xFEH\0i\0", 6)), "--prompt", "x"}));
  CHECK(has_all(wide.err, {"wide.txt", "UTF-16"}));
}

TEST_CASE("a prompt from standard input equals the same one as an argument") {
  RunOptions options;
  options.input = kQuestion;
  const json piped = answer(nano({"--json", "--file", nano_path("docs/doc-2k.txt"), "--prompt-file", "-"}), options);
  CHECK(piped.at("text") == kAnswer);
  CHECK(piped.at("usage").at("prompt_tokens") == 2006);
}

TEST_CASE("empty prompts, folders, FIFOs and missing files are refused before the model is read") {
  TempFolder temp;
  refused(run_firn(nano({"--prompt", ""})), 1, {"prompt is empty"});
  refused(run_firn(nano({"--raw", "--prompt", "\n"})), 1, {"prompt is empty"});
  refused(run_firn(nano({"--file", temp.write("empty.txt", ""), "--prompt", ""})), 1, {"prompt is empty"});
  refused(run_firn(nano({"--file", temp.path(), "--prompt", "x"})), 1,
          {temp.path(), "expected a regular file", "directory"});
  REQUIRE(mkfifo((temp / "pipe").c_str(), 0600) == 0);
  refused(run_firn(nano({"--file", temp / "pipe", "--prompt", "x"})), 1, {temp / "pipe", "FIFO"});
  refused(run_firn(nano({"--file", temp / "nowhere.txt", "--prompt", "x"})), 1, {temp / "nowhere.txt"});
  refused(run_firn(nano({"--prompt-file", temp / "nowhere.txt"})), 1, {temp / "nowhere.txt"});
}

TEST_CASE("what does not fit is refused with both numbers and before anything is loaded") {
  const Ran ctx = run_firn(question({"--ctx", "100"}));
  refused(ctx, 1, {"2006 tokens", "100 (--ctx)", "1906 too many"});
  CHECK(ctx.err.find("loading") == std::string::npos);
  CHECK(ctx.err.find("parameters") == std::string::npos);  // the first line comes with a loaded model
  const Ran least = run_firn(question({"--ram", "1MiB"}));
  refused(least, 1, {"--ram allows 1MiB", "short", "at least --ram"});
  // A little over what one token needs is not what 2009 need.
  const size_t at = least.err.find("at least --ram ");
  const double mib = std::stod(least.err.substr(at + 15)) + 0.25;
  const std::string ram = format_size(static_cast<int64_t>(mib * 1024 * 1024));
  const Ran prompt = run_firn(question({"--ram", ram, "--max-tokens", "4"}));
  refused(prompt, 1, {"2009 tokens of context", "--ram allows " + ram, "short"});
  CHECK(prompt.err.find("parameters") == std::string::npos);
}

TEST_CASE("--logits to a place where no file can be is refused before the work") {
  TempFolder temp;
  const Ran nowhere = run_firn(nano({"--prompt", "Hello!", "--logits", temp / "no/where.safetensors"}));
  refused(nowhere, 1, {"--logits", temp / "no", "does not exist"});
  CHECK(nowhere.err.find("parameters") == std::string::npos);
  refused(run_firn(nano({"--prompt", "Hello!", "--logits", temp.path()})), 1, {"--logits", "folder"});
  CHECK(std::filesystem::is_empty(temp.path()));
}

}  // namespace
}  // namespace firn::test
