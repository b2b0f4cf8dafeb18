// One (row, KV head) under a budget: looked at twice, read and certified. Cut into stages, so that several threads can
// share it: those with a number of units have independent ones, and stages follow one another.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"

namespace attention {

class Pruned {
 public:
  void open(const Pool& pool, const Work& work, int64_t row, int head, std::vector<float>* scratch);  // the fixed pages
  void look_high(int64_t unit);  // all candidates, by half of their codes
  void settle();                 // which are dropped, read, looked at again
  void read(int64_t unit, std::vector<float>* scratch);
  void gather();
  void look_low(int64_t unit);
  void close(std::vector<float>* scratch);  // which else are read; output and certificates
  int64_t high_units() const { return looks_ ? units(count_, kLook) : 0; }
  int64_t read_units() const { return units(static_cast<int64_t>(segments_.size()) - fixed_, part()); }
  int64_t low_units() const { return looks_ ? units(low_.count, kLook) : 0; }
  void run(const Pool& pool, const Work& work, int64_t row, int head, std::vector<float>* scratch);  // all stages

 private:
  static constexpr int64_t kLook = 64;  // pages of a unit
  static constexpr int kPart = 512;     // tokens of a unit that is read
  static int64_t units(int64_t n, int64_t each) { return (n + each - 1) / each; }
  int64_t part() const { return std::max(kPart / padded(pool_->page, 16), 1); }
  void list();
  void choose();
  void measure();
  double slack(int head, double lse) const;
  void keep(int64_t candidate, float norm);
  void keep(const std::vector<simd::Mask>& pages, const Bounds& of, const int32_t* which);
  void keep_the_rest();
  void attend_to(int64_t from, int64_t to, State* state, std::vector<float>* scratch) const;
  void vote(const std::vector<float>& upper, const std::vector<float>& lower, const Bounds& of, double f,
            std::vector<simd::Mask>* out);
  void drop(const std::vector<simd::Mask>& pages, const Bounds& of);
  void report();

  const Pool* pool_;
  const Work* work_;
  int64_t row_;
  int head_, group_;
  int64_t length_, pages_;        // tokens, and pages of the row
  int64_t count_, fixed_, read_;  // candidates; pages read in any case; pages read so far
  double budget_, norm_;          // e^theta - 1 at most; at least the norm of every key read
  bool known_, looks_;            // all masses are finite so far; anything may be dropped
  Query query_;
  State state_;
  std::vector<State> parts_;
  Bounds high_, low_;                    // of all candidates after the first look; of those looked at twice
  std::vector<float> reference_;         // masses are relative to e^reference, the fixed pages' own
  std::vector<double> least_, dropped_;  // lower bounds on what was read, upper ones on what was not, in its units
  std::vector<Segment> segments_;        // read: the fixed pages, then what was kept
  std::vector<int64_t> candidates_;      // page ids
  std::vector<int32_t> place_, twice_, kept_, votes_;
  std::vector<simd::Mask> gone_, agreed_, taken_;
  Dropper dropper_;
};

}  // namespace attention
