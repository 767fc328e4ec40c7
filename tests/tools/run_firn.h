// Starts the built `firn` as a user would and captures what comes back: for tests of the command line.
//
//   const Ran ran = run_firn({"run", "--model", path, "--prompt", "Hello!"});
//   ran.code, ran.out, ran.err
//
// Child is the same for a dialogue: with `terminal` its input and outputs are one pseudo-terminal (all in `out`), and
// with `terminal_err` only stderr is. A child that outlives `timeout_s` is killed and its code is -1. POSIX only.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace firn::test {

struct RunOptions {
  std::string input;                       // bytes of standard input; it is closed after them
  std::map<std::string, std::string> env;  // added to ours
  bool terminal = false, terminal_err = false;
  int timeout_s = 60;
};

struct Ran {
  int code = -1;  // exit code; 128 + signal; -1: killed because the time was over
  std::string out, err;
};

class Child {
 public:
  Child(const std::vector<std::string>& arguments, const RunOptions& options);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void write(const std::string& bytes);  // to a terminal child
  void interrupt();                      // SIGINT
  void kill();                           // SIGKILL
  // Reads until `text` is in out or err, beyond what earlier calls found; false at the end or when the time is over.
  bool read_until(const std::string& text);
  Ran wait();

 private:
  bool read_some();  // false when both outputs are closed or the time is over
  double left_s() const;

  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  double deadline_ = 0;
  size_t out_seen_ = 0, err_seen_ = 0;
  Ran ran_;
};

// False where the system has no pseudo-terminals (a container without /dev/pts): a test that needs one says so, leaves.
bool have_terminals();

Ran run_firn(const std::vector<std::string>& arguments, const RunOptions& options = {});

// True when `text` holds every one of `words`.
bool has_all(const std::string& text, const std::vector<std::string>& words);

}  // namespace firn::test
