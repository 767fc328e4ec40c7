#include "tests/tools/run_firn.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>

#include "runtime/status.h"

namespace firn::test {

namespace {
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace

bool have_terminals() {
  int master = -1, slave = -1;
  if (openpty(&master, &slave, nullptr, nullptr, nullptr) != 0) return false;
  close(master);
  close(slave);
  return true;
}

Child::Child(const std::vector<std::string>& arguments, const RunOptions& options) {
  deadline_ = now_s() + options.timeout_s;
  std::vector<std::string> words = {FIRN_BINARY_DIR "/firn"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  int master = -1, slave = -1, out[2] = {-1, -1}, err[2] = {-1, -1};
  if (options.terminal || options.terminal_err) {
    winsize size = {24, 100, 0, 0};
    FIRN_CHECK(openpty(&master, &slave, nullptr, nullptr, &size) == 0, "openpty");
  }
  if (!options.terminal) FIRN_CHECK(pipe2(out, O_CLOEXEC) == 0, "pipe");
  if (!options.terminal && !options.terminal_err) FIRN_CHECK(pipe2(err, O_CLOEXEC) == 0, "pipe");
  // A file for standard input: a pipe would block us when the child does not read it.
  FILE* input = std::tmpfile();
  FIRN_CHECK(input != nullptr, "tmpfile");
  FIRN_CHECK(std::fwrite(options.input.data(), 1, options.input.size(), input) == options.input.size(), "input");
  std::rewind(input);

  pid_ = fork();
  FIRN_CHECK(pid_ >= 0, "fork");
  if (pid_ == 0) {
    if (options.terminal) {
      setsid();
      ioctl(slave, TIOCSCTTY, 0);
    }
    dup2(options.terminal ? slave : fileno(input), STDIN_FILENO);
    dup2(options.terminal ? slave : out[1], STDOUT_FILENO);
    dup2(slave >= 0 ? slave : err[1], STDERR_FILENO);
    if (slave > 2) close(slave);
    if (master > 2) close(master);
    for (const auto& [name, value] : options.env) setenv(name.c_str(), value.c_str(), 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::fclose(input);
  for (int fd : {slave, out[1], err[1]}) {
    if (fd >= 0) close(fd);
  }
  out_ = options.terminal ? master : out[0];
  err_ = options.terminal ? -1 : options.terminal_err ? master : err[0];
}

Child::~Child() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (int fd : {out_, err_}) {
    if (fd >= 0) close(fd);
  }
}

double Child::left_s() const { return deadline_ - now_s(); }

void Child::write(const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(out_, bytes.data() + at, bytes.size() - at);
    FIRN_CHECK(n > 0, "writing to the terminal of firn");
    at += static_cast<size_t>(n);
  }
}

void Child::interrupt() { ::kill(pid_, SIGINT); }
void Child::kill() { ::kill(pid_, SIGKILL); }

bool Child::read_some() {
  pollfd polled[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  if ((out_ < 0 && err_ < 0) || left_s() <= 0) return false;
  if (poll(polled, 2, static_cast<int>(left_s() * 1000) + 1) <= 0) return false;
  char buffer[65536];
  for (int i = 0; i < 2; ++i) {
    if (polled[i].fd < 0 || polled[i].revents == 0) continue;
    const ssize_t n = ::read(polled[i].fd, buffer, sizeof(buffer));
    if (n > 0) {
      (i == 0 ? ran_.out : ran_.err).append(buffer, static_cast<size_t>(n));
    } else {  // A closed pseudo-terminal reads as EIO.
      close(polled[i].fd);
      (i == 0 ? out_ : err_) = -1;
    }
  }
  return true;
}

bool Child::read_until(const std::string& text) {
  for (;;) {
    if (const size_t at = ran_.out.find(text, out_seen_); at != std::string::npos) {
      out_seen_ = at + text.size();
      return true;
    }
    if (const size_t at = ran_.err.find(text, err_seen_); at != std::string::npos) {
      err_seen_ = at + text.size();
      return true;
    }
    if (!read_some()) return false;
  }
}

Ran Child::wait() {
  while (read_some()) {
  }
  if (left_s() <= 0) ::kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  ran_.code = left_s() <= 0 ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ran_;
}

Ran run_firn(const std::vector<std::string>& arguments, const RunOptions& options) {
  Child child(arguments, options);
  return child.wait();
}

bool has_all(const std::string& text, const std::vector<std::string>& words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const std::string& w) { return text.find(w) != std::string::npos; });
}

}  // namespace firn::test
