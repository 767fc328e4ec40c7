// Driving one Generation for a person or a script: streams text, shows prefill progress, obeys Ctrl-C.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/generate.h"
#include "tools/cli.h"

namespace firn::tools {

struct StreamTo {
  bool text = true;        // content to stdout as it comes
  bool reasoning = false;  // reasoning to stderr as it comes
  bool progress = true;    // prefill progress on stderr
};

// Runs to the end, or to the first Ctrl-C (then cancels and returns kCancelled; what was said stays in `generation`).
Status drive(model::Generation* generation, const StreamTo& to);

// A document's or a prompt's bytes as text: a byte order mark is dropped, broken UTF-8 becomes U+FFFD and is said once
// under the file's name. Line ends and NUL bytes stay as they are.
std::string clean_text(const std::string& name, std::string_view bytes);

// The JSON object of cli.md for `firn run`, without `evidence`.
nlohmann::ordered_json answer_json(const model::Engine& engine, const model::Generation& generation, bool prompt_ids,
                                   const std::vector<int32_t>& prompt);

// What the tiers did, a line each; none when everything is near.
std::vector<std::string> tier_lines(const model::Engine& engine);

// Whether reading on a guess paid, a line for each kind that was tried.
std::vector<std::string> probe_lines(const model::Session& session);

// Peak resident memory of this process so far.
int64_t peak_rss_bytes();

// Which blocks of the prompt the answer drew on, for --evidence. Every generated token, layer and head spreads its
// attention over the blocks it chose; a block counts by the sum of the squares of its parts, so that one head that
// looks at one passage outweighs many that look everywhere. (Counting choices alone found none of 14 facts in nano's
// 16K document among the first five, this puts all 14 first.)
struct Evidence {
  int64_t block = 0, token_begin = 0, token_end = 0;
  double share = 0;  // of these sums over all blocks, the tokens' own blocks aside
  std::string text;
};
std::vector<Evidence> find_evidence(const model::Engine& engine, const model::Generation& generation,
                                    const std::vector<int32_t>& prompt, size_t most);

}  // namespace firn::tools
