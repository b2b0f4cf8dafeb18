// Attention of one (row, KV head) under a budget; the readable version is backends/attention/pruned.py.
#include "pruned.h"

#include <algorithm>
#include <limits>

namespace attention {
namespace {

using namespace simd;

constexpr double kCoarse = 0.25;    // share of the budget that pages may spend on their 4-bit bounds
constexpr double kUnit = 5.9604644775390625e-8;  // 2^-24
constexpr double kMost = std::numeric_limits<float>::max();  // what a sum that overflowed is at least

double gamma(int n) { return n * kUnit / (1.0 - n * kUnit); }

// Rounding of a float32 log-sum-exp over `terms` real keys; see backends/attention/pruned.py. Products of bfloat16 flush
// numbers below 2^-126, operands and results: 16 2^-126 of either norm at most, for up to 256 channels.
double exact_slack(double query_norm, double key_norm, double lse, double terms, int dim, double softcap) {
  const double g = gamma(dim + 6), n = terms + 8.0;
  return query_norm * key_norm * g * (1.0 + 8.0 * g) + (n + 5.0 * std::log(n) + 16.0) * kUnit +
         4.0 * kUnit * std::fabs(lse) + 8.0 * kUnit * softcap + 1e-36 * (query_norm + key_norm) + 1e-30;
}

// The most that may be dropped for one unit of what is kept: m / (1 - m) for the mass m = 1 - e^-theta, which mass_of
// takes for up to 2e-15 of it more.
double ratio_of(double theta) {
  const double mass = -std::expm1(-theta);
  return mass * (1.0 - 2e-15) / (std::exp(-theta) + mass * 2e-15);
}

// m = r / (1 + r), rounded up, from the ratio r of what was dropped to what is kept; NaN or infinite: 1.
double mass_of(double ratio) {
  const double mass = ratio / (1.0 + ratio) * (1.0 + 1e-15) + 1e-300;
  return mass <= 1.0 ? mass : 1.0;
}

// The sum of `bound` over the pages in the masks, in float32: off by at most this share of it.
double sum_over(const std::vector<Mask>& pages, const float* bound) {
  Vec total = zero();
  for (size_t i = 0; i < pages.size(); ++i) total = total + where(pages[i], load(bound + 16 * i));
  return sum(total);
}
double summing(int64_t capacity) { return (static_cast<double>(capacity) + 64.0) * kUnit; }

}  // namespace

void Pruned::open(const Pool& pool, const Work& work, int64_t row, int head, std::vector<float>* scratch) {
  pool_ = &pool, work_ = &work, row_ = row, head_ = head, group_ = work.group;
  length_ = work.length[row], pages_ = (length_ + pool.page - 1) / pool.page;
  known_ = true, norm_ = 0.0, read_ = 0;
  list();
  query_.load(work, work.token[row], head, pool);
  state_.reset(group_, pool.dim);
  dropped_.assign(group_, 0.0), least_.assign(group_, 0.0), reference_.resize(group_);
  kept_.clear(), twice_.clear();
  attend_to(0, fixed_, &state_, scratch);
  read_ = fixed_;
  norm_ = key_norm(pool, head, segments_.data(), fixed_);
  for (int g = 0; g < group_; ++g) reference_[g] = static_cast<float>(state_.lse(g));
  measure();
  budget_ = ratio_of(work.theta[row]) * (1.0 - 8.0 * summing(count_));
  looks_ = known_ && budget_ > 0.0;
  if (looks_) high_.resize(group_, count_, Record(pool).blocks);
}

// The candidates, and what is read in any case.
void Pruned::list() {
  const int64_t* table = work_->table + row_ * work_->table_stride;
  const uint8_t* candidate = work_->candidate + row_ * work_->table_stride;
  segments_.resize(pages_), candidates_.resize(pages_), place_.resize(pages_);
  count_ = fixed_ = 0;
  for (int64_t p = 0; p < pages_; ++p) {
    candidates_[count_] = table[p], place_[count_] = static_cast<int32_t>(p);
    segments_[fixed_] = {table[p], 0, static_cast<int32_t>(std::min<int64_t>(pool_->page, length_ - p * pool_->page))};
    count_ += candidate[p] != 0, fixed_ += candidate[p] == 0;
  }
  segments_.resize(fixed_), candidates_.resize(count_), place_.resize(count_);
}

void Pruned::attend_to(int64_t from, int64_t to, State* state, std::vector<float>* scratch) const {
  attend(*pool_, head_, 1, segments_.data() + from, to - from, &query_, state, scratch);
}

double Pruned::slack(int g, double lse) const {  // of the log-sum-exp of what was read
  const double tokens = static_cast<double>(length_ - (pages_ - read_) * pool_->page);
  return exact_slack(query_.norm[g], norm_, lse, tokens, pool_->dim, work_->softcap);
}

void Pruned::measure() {
  for (int g = 0; g < group_; ++g) {
    const double lse = state_.lse(g), off = slack(g, lse);
    least_[g] = std::exp(lse - static_cast<double>(reference_[g]) - off);
    known_ = known_ && std::isfinite(off) && std::isfinite(least_[g]);
  }
}

void Pruned::keep(int64_t candidate, float norm) {
  segments_.push_back({candidates_[candidate], 0, pool_->page});
  kept_.push_back(static_cast<int32_t>(candidate));
  norm_ = norm <= norm_ ? norm_ : norm;
}

// Pages of `of` in the masks; page p is candidate which[p], or p without a list.
void Pruned::keep(const std::vector<Mask>& pages, const Bounds& of, const int32_t* which) {
  for (size_t i = 0; i < pages.size(); ++i)
    for (uint32_t left = pages[i]; left; left &= left - 1) {
      const int64_t p = 16 * i + __builtin_ctz(left);
      keep(which == nullptr ? p : which[p], of.norm[p]);
    }
}

void Pruned::keep_the_rest() {
  std::vector<uint8_t> in(count_, 0);
  for (int32_t i : kept_) in[i] = 1;
  for (int64_t i = 0; i < count_; ++i) {
    float norm;
    std::memcpy(&norm, pool_->record_of(candidates_[i], head_) + 8, 4);
    if (!in[i]) keep(i, norm);
  }
}

void Pruned::look_high(int64_t unit) {
  score_high(*pool_, head_, candidates_, query_, reference_.data(), unit * kLook, std::min((unit + 1) * kLook, count_),
             &high_);
}

void Pruned::look_low(int64_t unit) {
  score_low(*pool_, head_, candidates_, twice_, query_, reference_.data(), high_, unit * kLook,
            std::min((unit + 1) * kLook, low_.count), &low_);
}

// Masks of the pages that all heads would drop.
void Pruned::vote(const std::vector<float>& upper, const std::vector<float>& lower, const Bounds& of, double f,
                  std::vector<Mask>* out) {
  votes_.assign(of.capacity, 0);
  for (int g = 0; g < group_; ++g) {
    const int64_t at = g * of.capacity;
    dropper_.vote(upper.data() + at, lower.data() + at, of.count, dropped_[g], least_[g], f, votes_.data());
  }
  out->resize(of.capacity / 16);
  for (size_t i = 0; i < out->size(); ++i)
    (*out)[i] = equal(load_ints(votes_.data() + 16 * i), group_) & first_lanes(of.count - 16 * i);
}

void Pruned::drop(const std::vector<Mask>& pages, const Bounds& of) {
  for (int g = 0; g < group_; ++g)
    dropped_[g] += sum_over(pages, of.upper.data() + g * of.capacity) * (1.0 + summing(of.capacity));
}

void Pruned::settle() {
  if (looks_)
    choose();
  else
    keep_the_rest();
  if (parts_.size() < static_cast<size_t>(read_units())) parts_.resize(read_units());
}

// What is dropped after the first look, what is read at once and what is looked at again.
void Pruned::choose() {
  vote(high_.upper, high_.lower, high_, kCoarse * budget_, &gone_);
  drop(gone_, high_);
  // What a second look would likely keep is read without one: its mass is then known, which leaves more to spend.
  for (int g = 0; g < group_; ++g)
    for (size_t i = 0; i < gone_.size(); ++i) {
      float* mass = high_.mass.data() + g * high_.capacity + 16 * i;
      store(mass, where(static_cast<Mask>(~gone_[i]), load(mass)));
    }
  vote(high_.mass, high_.mass, high_, budget_, &agreed_);
  taken_.resize(gone_.size());
  for (size_t i = 0; i < gone_.size(); ++i) taken_[i] = first_lanes(count_ - 16 * i) & ~(agreed_[i] | gone_[i]);
  keep(taken_, high_, nullptr);
  for (size_t i = 0; i < gone_.size(); ++i) taken_[i] = agreed_[i] & ~gone_[i];
  low_.choose(high_, taken_, group_, Record(*pool_).blocks, &twice_);
}

void Pruned::read(int64_t unit, std::vector<float>* scratch) {
  const int64_t from = fixed_ + unit * part(), to = std::min<int64_t>(from + part(), segments_.size());
  parts_[unit].reset(group_, pool_->dim);
  attend_to(from, to, &parts_[unit], scratch);
}

void Pruned::gather() {
  for (int64_t unit = 0; unit < read_units(); ++unit) state_.merge(parts_[unit]);
  read_ = static_cast<int64_t>(segments_.size());
  measure();
}

void Pruned::close(std::vector<float>* scratch) {
  if (looks_) {
    vote(low_.upper, low_.lower, low_, budget_, &agreed_);
    drop(agreed_, low_);
    taken_.resize(agreed_.size());
    for (size_t i = 0; i < taken_.size(); ++i) taken_[i] = first_lanes(low_.count - 16 * i) & ~agreed_[i];
    keep(taken_, low_, twice_.data());
    // Once more without cancellation: `vote` takes from a sum, which fails where what is dropped outweighs what is kept.
    bool within = known_;
    for (int g = 0; g < group_; ++g) {
      const double more = std::min<double>(sum_over(taken_, low_.lower.data() + g * low_.capacity), kMost);
      least_[g] += more * (1.0 - summing(low_.capacity));
      within = within && dropped_[g] * (1.0 + 2e-9) <= ratio_of(work_->theta[row_]) * least_[g];
    }
    if (!within) keep_the_rest();
    const int64_t all = static_cast<int64_t>(segments_.size());
    attend_to(read_, all, &state_, scratch);
    read_ = all;
  }
  report();
}

void Pruned::report() {
  const Work& w = *work_;
  const int64_t heads = static_cast<int64_t>(pool_->heads) * group_;
  for (int g = 0; g < group_; ++g) {
    double mass = 0.0;
    if (read_ < pages_) {
      const double lse = state_.lse(g), kept = lse - slack(g, lse);
      const double lost = std::log(dropped_[g]) + static_cast<double>(reference_[g]);
      const double exact = std::exp(lost - kept + 1e-9 + 1e-15 * (std::fabs(lost) + std::fabs(kept)));
      mass = std::min(mass_of(exact), mass_of(dropped_[g] / least_[g] * (1.0 + 1e-9)));
    }
    w.mass[row_ * heads + static_cast<int64_t>(head_) * group_ + g] = mass;
  }
  const int64_t cell = row_ * pool_->heads + head_;
  w.read[cell] = static_cast<int32_t>(read_);
  w.fine[cell] = static_cast<int32_t>(twice_.size());
  if (w.kept != nullptr) {
    uint8_t* kept = w.kept + cell * w.table_stride;
    std::fill(kept, kept + pages_, uint8_t{1});
    for (int32_t p : place_) kept[p] = 0;
    for (int32_t i : kept_) kept[place_[i]] = 1;
  }
  write_out(w, *pool_, w.token[row_], head_, state_, 0, lse_of(w, *pool_, row_));
}

void Pruned::run(const Pool& pool, const Work& work, int64_t row, int head, std::vector<float>* scratch) {
  open(pool, work, row, head, scratch);
  for (int64_t unit = 0; unit < high_units(); ++unit) look_high(unit);
  settle();
  for (int64_t unit = 0; unit < read_units(); ++unit) read(unit, scratch);
  gather();
  for (int64_t unit = 0; unit < low_units(); ++unit) look_low(unit);
  close(scratch);
}

}  // namespace attention
