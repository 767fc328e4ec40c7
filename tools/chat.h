// `firn run` without a prompt on a terminal: a conversation with line editing (libedit).
//
// /file PATH puts a document before the next message, /reset starts over, /help lists the commands, /quit (or end of
// input) leaves. Ctrl-C stops an answer, not the program; at the prompt it clears the line.
#pragma once

#include "model/chat.h"
#include "model/generate.h"
#include "tools/cli.h"

namespace firn::tools {

struct ChatOptions {
  model::GenerateRequest request;    // sampling, stops, thinking; prompt is filled in here
  model::Conversation conversation;  // system message, thinking mode
};

int run_chat(model::Engine* engine, const ChatOptions& options, const Globals& globals);

}  // namespace firn::tools
