#include "tools/chat.h"

#include <fmt/format.h>
#include <histedit.h>

#include <cstdio>

#include "runtime/units.h"
#include "storage/file.h"
#include "tools/answer.h"

namespace firn::tools {

namespace {

constexpr int64_t kMostDocumentBytes = int64_t{256} << 20;

// libedit wants a plain function; the prompt never changes.
const char* prompt_text(EditLine*) { return "> "; }

class LineEditor {
 public:
  LineEditor() : editor_(el_init("firn", stdin, stderr, stderr)), history_(history_init()) {
    HistEvent event;
    history(history_, &event, H_SETSIZE, 500);
    el_set(editor_, EL_PROMPT, prompt_text);
    el_set(editor_, EL_EDITOR, "emacs");
    el_set(editor_, EL_HIST, history, history_);
    el_set(editor_, EL_SIGNAL, 0);
  }
  ~LineEditor() {
    history_end(history_);
    el_end(editor_);
  }
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // False at end of input. An interrupted line is empty.
  bool read(std::string* line) {
    int length = 0;
    interrupted() = false;
    const char* text = el_gets(editor_, &length);
    if (interrupted().exchange(false)) {
      std::fputc('\n', stderr);
      line->clear();
      el_reset(editor_);
      return true;
    }
    if (text == nullptr || length <= 0) return false;
    line->assign(text, static_cast<size_t>(length));
    while (!line->empty() && (line->back() == '\n' || line->back() == '\r')) line->pop_back();
    if (!line->empty()) {
      HistEvent event;
      history(history_, &event, H_ENTER, line->c_str());
    }
    return true;
  }

 private:
  EditLine* editor_;
  History* history_;
};

}  // namespace

int run_chat(model::Engine* engine, const ChatOptions& options, const Globals& globals) {
  std::fputs("Type a message. /file PATH adds a document, /reset starts over, /quit leaves, Ctrl-C stops an answer.\n",
             stderr);
  LineEditor editor;
  model::Session session = engine->new_session();
  model::Conversation conversation = options.conversation;
  std::string document;
  std::string line;
  while (editor.read(&line)) {
    if (line.empty()) continue;
    if (line == "/quit" || line == "/exit") break;
    if (line == "/help") {
      std::fputs(
          "/file PATH   put a document before the next message\n/reset       forget the conversation\n"
          "/quit        leave\n",
          stderr);
      continue;
    }
    if (line == "/reset") {
      conversation = options.conversation;
      document.clear();
      session.truncate(0);
      std::fputs("(new conversation)\n", stderr);
      continue;
    }
    if (line.rfind("/file", 0) == 0) {
      const size_t at = line.find_first_not_of(' ', 5);
      if (at == std::string::npos) {
        std::fputs("/file wants a path: /file report.txt\n", stderr);
        continue;
      }
      auto text = storage::read_text_file(storage::FileSystem::real(), line.substr(at), kMostDocumentBytes);
      if (!text.ok()) {
        report(text.status());
        continue;
      }
      document += clean_text(line.substr(at), *text) + "\n\n";
      std::fprintf(stderr, "(%s will precede your next message)\n",
                   format_size(static_cast<int64_t>(text->size())).c_str());
      continue;
    }
    if (line[0] == '/') {
      std::fprintf(stderr, "no command %s; /help lists them\n", line.c_str());
      continue;
    }
    int64_t replaced = 0;
    model::Message user;
    user.role = "user";
    user.content.push_back({model::Part::Kind::kText, document + model::sanitize_utf8(line, &replaced)});
    conversation.messages.push_back(user);
    auto pieces = model::render(conversation);
    Status status = pieces.status();
    std::unique_ptr<model::Generation> generation;
    if (pieces.ok()) {
      model::GenerateRequest request = options.request;
      request.prompt = engine->tokenizer()->encode(*pieces);
      auto started = model::Generation::start(engine, &session, std::move(request));
      status = started.status();
      if (started.ok()) generation = std::move(started).value();
    }
    if (!status.ok()) {
      report(status);
      conversation.messages.pop_back();
      continue;
    }
    StreamTo to;
    to.reasoning = true;
    to.progress = !globals.quiet;
    status = drive(generation.get(), to);
    std::fputc('\n', stdout);
    std::fflush(stdout);
    if (status.code() == Code::kCancelled) {
      interrupted() = false;
      std::fputs("(stopped)\n", stderr);
    } else if (!status.ok()) {
      report(status);
    }
    if (!status.ok() && generation->token_ids().empty()) {
      // Nothing was said: a turn with an empty answer would only confuse the next one.
      std::fputs("(the message is taken back; its documents still precede your next one)\n", stderr);
      conversation.messages.pop_back();
      continue;
    }
    document.clear();
    model::Message answer;
    answer.role = "assistant";
    answer.content.push_back({model::Part::Kind::kText, generation->text()});
    answer.reasoning = generation->reasoning();
    conversation.messages.push_back(answer);
  }
  std::fputc('\n', stderr);
  return 0;
}

}  // namespace firn::tools
