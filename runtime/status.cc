#include "runtime/status.h"

#include <cstdio>
#include <cstdlib>

namespace firn {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalid:
      return "invalid";
    case Code::kNotFound:
      return "not found";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kIo:
      return "I/O error";
    case Code::kNoMemory:
      return "out of memory";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown";
}

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "firn: bug at %s:%d: %s does not hold%s%s\n", file, line, condition, message.empty() ? "" : ": ",
               message.c_str());
  std::abort();
}

}  // namespace firn
