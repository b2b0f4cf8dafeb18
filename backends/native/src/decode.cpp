// Attention of one layer for all rows of a step: exact for rows without a budget; scored, selected, read and certified
// for the others. Work is cut by (row, KV head) and, where exact, by a fixed number of pages, so that what a
// row gets does not depend on the rest of the batch or on the number of threads.
#include <algorithm>

#include "attention.h"
#include "pool.h"

namespace attention {
namespace {

using namespace simd;

constexpr double kCoarse = 0.25;    // share of the budget that pages may spend on their 4-bit bounds
constexpr int64_t kAlone = 150000;  // products of queries and keys done sooner than another thread comes
constexpr double kUnit = 5.9604644775390625e-8;  // 2^-24

double gamma(int n) { return n * kUnit / (1.0 - n * kUnit); }

// Rounding of a float32 log-sum-exp over `terms` real keys; see backends/attention/pruned.py. Products of bfloat16 flush
// numbers below 2^-126, operands and results: 16 2^-126 of either norm at most, for up to 256 channels.
double exact_slack(double query_norm, double key_norm, double lse, double terms, int dim, double softcap) {
  const double g = gamma(dim + 6), n = terms + 8.0;
  return query_norm * key_norm * g * (1.0 + 8.0 * g) + (n + 5.0 * std::log(n) + 16.0) * kUnit +
         4.0 * kUnit * std::fabs(lse) + 8.0 * kUnit * softcap + 1e-36 * (query_norm + key_norm) + 1e-30;
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

struct Scratch {  // one per thread
  Query query;
  std::vector<Query> queries;
  Bounds high, low;  // of all pages after the first look; of those looked at twice
  State state;
  std::vector<float> weight, reference;
  std::vector<double> least, dropped;
  std::vector<Segment> segments;
  std::vector<int64_t> pages;
  std::vector<int32_t> place, twice, votes, kept;
  std::vector<Mask> gone, agreed, taken;
  Dropper dropper;
};

float* lse_of(const Work& w, const Pool& pool, int64_t row) {
  return w.lse == nullptr ? nullptr : w.lse + row * pool.heads * w.group;
}

struct Parts {  // of what a token sees: part i is segments from[i] .. from[i + 1] - 1
  std::vector<Segment> segments;
  std::vector<int64_t> from;
  int64_t place;  // of its first part's states
  int64_t count() const { return static_cast<int64_t>(from.size()) - 1; }
};

// The tokens that the last of a row sees: all, or the sinks and the window.
void visible(const Work& w, const Pool& pool, int64_t row, Parts* out) {
  const int64_t page = pool.page, each = part_pages(pool, w), length = w.length[row];
  const int64_t* table = w.table + row * w.table_stride;
  const int64_t start = w.window > 0 ? std::max<int64_t>(length - w.window, 0) : 0;
  const auto add = [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to;) {
      const int64_t p = t / page, end = std::min((p + 1) * page, to);
      if (t == from || p % each == 0) out->from.push_back(static_cast<int64_t>(out->segments.size()));
      out->segments.push_back({table[p], static_cast<int32_t>(t - p * page), static_cast<int32_t>(end - p * page)});
      t = end;
    }
  };
  add(0, std::min<int64_t>(w.sink_tokens, start));
  add(start, length);
  out->from.push_back(static_cast<int64_t>(out->segments.size()));
}

// One (row, KV head) with a budget. Masses are relative to e^reference, the fixed pages' own.
class Pruned {
 public:
  Pruned(const Pool& pool, const Work& work, int64_t row, int head, Scratch* scratch)
      : pool_(pool), w_(work), row_(row), head_(head), s_(scratch), table_(work.table + row * work.table_stride),
        length_(work.length[row]), pages_((length_ + pool.page - 1) / pool.page), group_(work.group) {}

  void run() {
    list();
    s_->query.load(w_, w_.token[row_], head_, pool_);
    s_->state.reset(group_, pool_.dim);
    s_->dropped.assign(group_, 0.0), s_->least.assign(group_, 0.0), s_->reference.resize(group_);
    s_->kept.clear(), s_->twice.clear();
    read();
    norm_ = key_norm(pool_, head_, s_->segments.data(), read_);
    for (int g = 0; g < group_; ++g) s_->reference[g] = static_cast<float>(s_->state.lse(g));
    measure();
    const double budget = std::expm1(w_.theta[row_]) * (1.0 - 8.0 * summing(count_));
    if (known_ && budget > 0.0)
      look(budget);
    else
      keep_the_rest();
    read();
    report();
  }

 private:
  // The candidates, and what is read in any case.
  void list() {
    const uint8_t* candidate = w_.candidate + row_ * w_.table_stride;
    s_->segments.resize(pages_), s_->pages.resize(pages_), s_->place.resize(pages_);
    int64_t fixed = 0;
    for (int64_t p = 0; p < pages_; ++p) {
      s_->pages[count_] = table_[p], s_->place[count_] = static_cast<int32_t>(p);
      s_->segments[fixed] = {table_[p], 0, static_cast<int32_t>(std::min<int64_t>(pool_.page, length_ - p * pool_.page))};
      count_ += candidate[p] != 0, fixed += candidate[p] == 0;
    }
    s_->segments.resize(fixed), s_->pages.resize(count_), s_->place.resize(count_);
  }

  // Attends to what was kept and not yet read.
  void read() {
    const int64_t all = static_cast<int64_t>(s_->segments.size());
    attend(pool_, head_, 1, s_->segments.data() + read_, all - read_, &s_->query, &s_->state, &s_->weight);
    read_ = all;
  }

  double slack(int g, double lse) const {  // of the log-sum-exp of what was read
    const double tokens = static_cast<double>(length_ - (pages_ - read_) * pool_.page);
    return exact_slack(s_->query.norm[g], norm_, lse, tokens, pool_.dim, w_.softcap);
  }

  // Lower bounds on the mass of what was read.
  void measure() {
    for (int g = 0; g < group_; ++g) {
      const double lse = s_->state.lse(g), off = slack(g, lse);
      s_->least[g] = std::exp(lse - static_cast<double>(s_->reference[g]) - off);
      known_ = known_ && std::isfinite(off) && std::isfinite(s_->least[g]);
    }
  }

  void keep(int64_t i, float norm) {  // candidate i
    s_->segments.push_back({s_->pages[i], 0, pool_.page});
    s_->kept.push_back(static_cast<int32_t>(i));
    norm_ = norm <= norm_ ? norm_ : norm;
  }

  void keep_the_rest() {
    std::vector<uint8_t> in(count_, 0);
    for (int32_t i : s_->kept) in[i] = 1;
    for (int64_t i = 0; i < count_; ++i) {
      float norm;
      std::memcpy(&norm, pool_.record_of(s_->pages[i], head_) + 8, 4);
      if (!in[i]) keep(i, norm);
    }
  }

  // Masks of the pages that all heads would drop.
  void vote(const std::vector<float>& upper, const std::vector<float>& lower, const Bounds& of, double f,
            std::vector<Mask>* out) {
    s_->votes.assign(of.capacity, 0);
    for (int g = 0; g < group_; ++g) {
      const int64_t at = g * of.capacity;
      s_->dropper.vote(upper.data() + at, lower.data() + at, of.count, s_->dropped[g], s_->least[g], f, s_->votes.data());
    }
    out->resize(of.capacity / 16);
    for (size_t i = 0; i < out->size(); ++i)
      (*out)[i] = equal(load_ints(s_->votes.data() + 16 * i), group_) & first_lanes(of.count - 16 * i);
  }

  void drop(const std::vector<Mask>& pages, const Bounds& of) {
    for (int g = 0; g < group_; ++g)
      s_->dropped[g] += sum_over(pages, of.upper.data() + g * of.capacity) * (1.0 + summing(of.capacity));
  }

  void look(double budget) {
    Bounds &high = s_->high, &low = s_->low;
    score_high(pool_, head_, s_->pages, s_->query, s_->reference.data(), &high);
    vote(high.upper, high.lower, high, kCoarse * budget, &s_->gone);
    drop(s_->gone, high);

    // What a second look would likely keep is read without one: its mass is then known, which leaves more to spend.
    for (int g = 0; g < group_; ++g)
      for (size_t i = 0; i < s_->gone.size(); ++i) {
        float* mass = high.mass.data() + g * high.capacity + 16 * i;
        store(mass, where(static_cast<Mask>(~s_->gone[i]), load(mass)));
      }
    vote(high.mass, high.mass, high, budget, &s_->agreed);
    s_->taken.resize(s_->gone.size());
    for (size_t i = 0; i < s_->gone.size(); ++i) {
      s_->taken[i] = s_->agreed[i] & ~s_->gone[i];
      for (uint32_t left = first_lanes(count_ - 16 * i) & ~(s_->agreed[i] | s_->gone[i]); left; left &= left - 1) {
        const int64_t p = 16 * i + __builtin_ctz(left);
        keep(p, high.norm[p]);
      }
    }
    read();
    measure();

    low.choose(high, s_->taken, group_, Record(pool_).blocks, &s_->twice);
    score_low(pool_, head_, s_->pages, s_->twice, s_->query, s_->reference.data(), high, &low);
    vote(low.upper, low.lower, low, budget, &s_->agreed);
    drop(s_->agreed, low);
    s_->taken.resize(s_->agreed.size());
    for (size_t i = 0; i < s_->taken.size(); ++i) {
      s_->taken[i] = first_lanes(low.count - 16 * i) & ~s_->agreed[i];
      for (uint32_t left = s_->taken[i]; left; left &= left - 1) {
        const int64_t p = 16 * i + __builtin_ctz(left);
        keep(s_->twice[p], low.norm[p]);
      }
    }
    // Once more without cancellation: `vote` takes from a sum, which fails where what is dropped outweighs what is kept.
    bool within = known_;
    for (int g = 0; g < group_; ++g) {
      s_->least[g] += sum_over(s_->taken, low.lower.data() + g * low.capacity) * (1.0 - summing(low.capacity));
      within = within && s_->dropped[g] * (1.0 + 2e-9) <= std::expm1(w_.theta[row_]) * s_->least[g];
    }
    if (!within) keep_the_rest();
  }

  void report() {
    const int64_t heads = static_cast<int64_t>(pool_.heads) * group_;
    for (int g = 0; g < group_; ++g) {
      double mass = 0.0;
      if (read_ < pages_) {
        const double lse = s_->state.lse(g), kept = lse - slack(g, lse);
        const double lost = std::log(s_->dropped[g]) + static_cast<double>(s_->reference[g]);
        const double exact = std::exp(lost - kept + 1e-9 + 1e-15 * (std::fabs(lost) + std::fabs(kept)));
        mass = std::min(mass_of(exact), mass_of(s_->dropped[g] / s_->least[g] * (1.0 + 1e-9)));
      }
      w_.mass[row_ * heads + static_cast<int64_t>(head_) * group_ + g] = mass;
    }
    const int64_t cell = row_ * pool_.heads + head_;
    w_.read[cell] = static_cast<int32_t>(read_);
    w_.fine[cell] = static_cast<int32_t>(s_->twice.size());
    if (w_.kept != nullptr) {
      uint8_t* kept = w_.kept + cell * w_.table_stride;
      std::fill(kept, kept + pages_, uint8_t{1});
      for (int32_t p : s_->place) kept[p] = 0;
      for (int32_t i : s_->kept) kept[s_->place[i]] = 1;
    }
    write_out(w_, pool_, w_.token[row_], head_, s_->state, 0, lse_of(w_, pool_, row_));
  }

  const Pool& pool_;
  const Work& w_;
  const int64_t row_;
  const int head_;
  Scratch* const s_;
  const int64_t* const table_;
  const int64_t length_, pages_;
  const int group_;
  int64_t count_ = 0, read_ = 0;  // candidates; pages read
  double norm_ = 0.0;             // at least that of every key read
  bool known_ = true;             // all masses are finite so far
};

struct Task {
  enum Kind : int32_t { kPruned, kTokens, kPart } kind;
  int32_t row, head, heads;
  int64_t at;  // first query token, or part of the pages
};

}  // namespace
}  // namespace attention

extern "C" void entropic_attend(const attention::Pool* pool_, const attention::Work* work_) {
  using namespace attention;
  const Pool& pool = *pool_;
  const Work& w = *work_;
  std::vector<Task> tasks;
  std::vector<Parts> seen(w.rows);
  const int64_t block = std::max(kPrefillQueries / w.group, 1);
  for (int r = 0; r < w.rows; ++r)
    if (w.span[r] > 1)
      for (int64_t b = (w.span[r] - 1) / block; b >= 0; --b)  // the longest first
        for (int h = 0; h < pool.heads; ++h) tasks.push_back({Task::kTokens, r, h, 1, b * block});
  for (int r = 0; r < w.rows; ++r)
    if (w.theta[r] > 0)
      for (int h = 0; h < pool.heads; ++h) tasks.push_back({Task::kPruned, r, h, 1, 0});
  const int64_t whole = static_cast<int64_t>(tasks.size());
  int64_t n_parts = 0;
  for (int r = 0; r < w.rows; ++r) {
    if (w.theta[r] > 0 || w.span[r] > 1) continue;
    visible(w, pool, r, &seen[r]);
    seen[r].place = n_parts * pool.heads;
    n_parts += seen[r].count();
  }
  // A page's KV heads lie side by side in memory: they are read together, unless that leaves threads without work.
  const int together = n_parts < 8 * w.threads ? 1 : std::clamp(kTogether / w.group, 1, static_cast<int>(pool.heads));
  for (int r = 0; r < w.rows; ++r)
    for (int64_t part = 0; part < seen[r].count(); ++part)
      for (int h = 0; h < pool.heads; h += together)
        tasks.push_back({Task::kPart, r, h, std::min(together, pool.heads - h), part});
  const int64_t n = static_cast<int64_t>(tasks.size());
  std::vector<State> parts(n_parts * pool.heads);  // by row, part, head
  pool::Queue queue, rows;
  int64_t products = 0;
  for (int r = 0; r < w.rows; ++r) products += w.span[r] * w.length[r];
  const int threads = products * pool.heads * w.group * pool.dim < kAlone ? 1 : w.threads;
  pool::Barrier barrier(threads);
  pool::run(threads, [&](int, int) {
    static thread_local Scratch scratch;
    static thread_local Prefill prefilled;
    for (int64_t i; (i = queue.take()) < n;) {
      const Task& task = tasks[i];
      if (task.kind == Task::kPruned) {
        Pruned(pool, w, task.row, task.head, &scratch).run();
      } else if (task.kind == Task::kTokens) {
        const int count = static_cast<int>(std::min(block, w.span[task.row] - task.at));
        prefill(pool, w, task.row, task.head, task.at, count, &prefilled);
      } else {
        const Parts& all = seen[task.row];
        const int64_t from = all.from[task.at], count = all.from[task.at + 1] - from;
        State* state = &parts[all.place + task.at * pool.heads + task.head];
        if (scratch.queries.size() < static_cast<size_t>(task.heads)) scratch.queries.resize(task.heads);
        for (int h = 0; h < task.heads; ++h) {
          scratch.queries[h].load_tokens(w, w.token[task.row], 1, task.head + h, pool);
          state[h].reset(w.group, pool.dim);
        }
        attend(pool, task.head, task.heads, all.segments.data() + from, count, scratch.queries.data(), state,
               &scratch.weight);
      }
    }
    if (whole == n) return;
    barrier.wait();
    for (int64_t r; (r = rows.take()) < w.rows;) {
      if (w.theta[r] > 0 || w.span[r] > 1) continue;
      const int64_t each = seen[r].count();
      for (int h = 0; h < pool.heads; ++h) {
        State& all = parts[seen[r].place + h];
        for (int64_t part = 1; part < each; ++part) all.merge(parts[seen[r].place + part * pool.heads + h]);
        write_out(w, pool, w.token[r], h, all, 0, lse_of(w, pool, r));
      }
    }
  });
}
