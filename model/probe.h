// Whether guessing pays, found out while running: it only moves bytes early, so a clock may decide it.
//
// A cost (seconds lost to waiting and to guessing) is recorded for each step with and without guesses; the cheaper way
// is taken, and now and then the other one is tried for a step, in case things have changed.
#pragma once

#include <cstdint>

namespace firn::model {

class Probe {
 public:
  static constexpr int64_t kLearn = 3;    // steps of each way at first
  static constexpr int64_t kEvery = 128;  // steps between two trials of the other way

  // To be asked once a step.
  bool guess() {
    ++steps_;
    if (steps_ <= kLearn) return on_ = false;
    if (steps_ <= 2 * kLearn) return on_ = true;
    // Guessing has to save something: of equals, not guessing wears the drive less.
    const bool pays = with_ < 0.98 * without_;
    return on_ = steps_ % kEvery == 0 ? !pays : pays;
  }
  void record(double seconds) {
    double& average = on_ ? with_ : without_;
    average = average < 0 ? seconds : 0.75 * average + 0.25 * seconds;
  }
  bool paying() const { return with_ >= 0 && without_ >= 0 && with_ < 0.98 * without_; }
  bool known() const { return with_ >= 0 && without_ >= 0; }
  double with_guesses() const { return with_; }
  double without_guesses() const { return without_; }

 private:
  int64_t steps_ = 0;
  bool on_ = false;
  double with_ = -1, without_ = -1;  // decaying averages, seconds a step
};

}  // namespace firn::model
