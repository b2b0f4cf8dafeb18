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

// The sum of `upper` over the pages that all heads voted for, rounded up.
double voted_sum(const float* upper, const std::vector<int32_t>& votes, int64_t capacity, int group) {
  Vec total = zero();
  for (int64_t p = 0; p < capacity; p += 16) total = total + where_equal(load_ints(votes.data() + p), group, load(upper + p));
  return sum(total) * (1.0 + (static_cast<double>(capacity) + 64.0) * kUnit);
}

struct Scratch {  // one per thread
  Query query;
  std::vector<Query> queries;
  Bounds high, low;  // of all pages after the first look; of those left after the second
  State state;
  std::vector<float> weight;
  std::vector<Segment> segments;
  std::vector<int64_t> pages;
  std::vector<int32_t> place, unsure, votes;
  std::vector<uint8_t> out;
  Dropper dropper;
  Ahead ahead;
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

void pruned(const Pool& pool, const Work& w, int64_t row, int head, Scratch* s) {
  const int64_t length = w.length[row], pages = (length + pool.page - 1) / pool.page;
  const int64_t* table = w.table + row * w.table_stride;
  const uint8_t* candidate = w.candidate + row * w.table_stride;
  const int group = w.group, dim = pool.dim;
  const int64_t heads = static_cast<int64_t>(pool.heads) * group;
  s->segments.clear(), s->pages.clear(), s->place.clear();
  for (int64_t p = 0; p < pages; ++p) {
    if (candidate[p]) {
      s->pages.push_back(table[p]);
      s->place.push_back(static_cast<int32_t>(p));
    } else {
      s->segments.push_back({table[p], 0, static_cast<int32_t>(std::min<int64_t>(pool.page, length - p * pool.page))});
    }
  }
  const int64_t count = static_cast<int64_t>(s->pages.size()), fixed = static_cast<int64_t>(s->segments.size());
  s->query.load(w, w.token[row], head, pool);
  s->state.reset(group, dim);
  attend(pool, head, 1, s->segments.data(), fixed, &s->query, &s->state, &s->weight);
  double norm = key_norm(pool, head, s->segments.data(), fixed);

  // Masses are relative to e^reference, the fixed pages' own: their lower bound is then 1 less the slack.
  std::vector<float> reference(group);
  std::vector<double> base(group);
  bool known = true;
  const double fixed_tokens = static_cast<double>(length - count * pool.page);
  for (int g = 0; g < group; ++g) {
    const double lse = s->state.lse(g);
    reference[g] = static_cast<float>(lse);
    const double slack = exact_slack(s->query.norm[g], norm, lse, fixed_tokens, dim, w.softcap);
    known = known && std::isfinite(lse) && std::isfinite(slack);
    base[g] = std::exp(lse - static_cast<double>(reference[g]) - slack);
  }
  const double budget = std::expm1(w.theta[row]) * (1.0 - (static_cast<double>(count) + 64.0) * 8.0 * kUnit);
  std::vector<double> dropped(group, 0.0), kept_least(group, 0.0);
  s->out.assign(count, 0);
  s->unsure.clear();
  if (known && budget > 0.0) {
    const Bounds &high = s->high, &low = s->low;
    const auto vote = [&](const std::vector<float>& upper, const std::vector<float>& lower, const Bounds& of, double f) {
      s->votes.assign(of.capacity, 0);
      for (int g = 0; g < group; ++g) {
        const int64_t at = g * of.capacity;
        s->dropper.vote(upper.data() + at, lower.data() + at, of.count, dropped[g], base[g], f, s->votes.data());
      }
    };
    const auto drop = [&](const Bounds& of) {
      for (int g = 0; g < group; ++g)
        dropped[g] += voted_sum(of.upper.data() + g * of.capacity, s->votes, of.capacity, group);
    };
    score_high(pool, head, s->pages, s->query, reference.data(), &s->high);
    vote(high.upper, high.lower, high, kCoarse * budget);
    drop(high);
    for (int64_t p = 0; p < count; ++p) {
      s->out[p] = s->votes[p] == group;
      if (!s->out[p]) s->unsure.push_back(static_cast<int32_t>(p));
    }

    s->low.choose(high, s->unsure, group, Record(pool).blocks);
    vote(low.mass, low.mass, low, budget);  // what the second look will likely keep is fetched while it goes on
    s->ahead.reset(static_cast<int64_t>(pool.page) * dim * (pool.dtype == kFloat ? 4 : 2));
    const int64_t left = low.count;
    for (const void* from : {pool.k, pool.v})
      for (int64_t i = 0; i < left; ++i)
        if (s->votes[i] != group) s->ahead.add(from, s->pages[s->unsure[i]] * pool.heads + head);
    s->ahead.spread(left);
    score_low(pool, head, s->pages, s->unsure, s->query, reference.data(), high, &s->ahead, &s->low);
    vote(low.upper, low.lower, low, budget);
    drop(low);
    for (int64_t i = 0; i < left; ++i) s->out[s->unsure[i]] = s->votes[i] == group;

    // Once more without cancellation: `vote` takes from a sum, which fails where what is dropped outweighs what is kept.
    bool within = true;
    for (int g = 0; g < group; ++g) {
      kept_least[g] = base[g];
      for (int64_t i = 0; i < left; ++i)
        if (s->votes[i] != group) kept_least[g] += low.lower[g * low.capacity + i];
      within = within && dropped[g] * (1.0 + 2e-9) <= std::expm1(w.theta[row]) * kept_least[g];
    }
    if (!within) s->out.assign(count, 0);
  }

  const int64_t fixed_end = fixed;
  for (int64_t p = 0; p < count; ++p) {
    if (s->out[p]) continue;
    s->segments.push_back({s->pages[p], 0, pool.page});
    float scalars[4];
    std::memcpy(scalars, pool.record + (s->pages[p] * pool.heads + head) * pool.record_bytes, 16);
    norm = scalars[2] <= norm ? norm : scalars[2];
  }
  const int64_t read = static_cast<int64_t>(s->segments.size());
  attend(pool, head, 1, s->segments.data() + fixed_end, read - fixed_end, &s->query, &s->state, &s->weight);

  const double read_tokens = static_cast<double>(length - (pages - read) * pool.page);
  for (int g = 0; g < group; ++g) {
    double mass = 0.0;
    if (read < pages) {
      const double lse = s->state.lse(g);
      const double kept = lse - exact_slack(s->query.norm[g], norm, lse, read_tokens, dim, w.softcap);
      const double lost = std::log(dropped[g]) + static_cast<double>(reference[g]);
      const double exact = std::exp(lost - kept + 1e-9 + 1e-15 * (std::fabs(lost) + std::fabs(kept)));
      mass = std::min(mass_of(exact), mass_of(dropped[g] / kept_least[g] * (1.0 + 1e-9)));
    }
    w.mass[row * heads + static_cast<int64_t>(head) * group + g] = mass;
  }
  const int64_t cell = row * pool.heads + head;
  w.read[cell] = static_cast<int32_t>(read);
  w.fine[cell] = static_cast<int32_t>(s->unsure.size());
  if (w.kept != nullptr) {
    uint8_t* kept = w.kept + cell * w.table_stride;
    std::fill(kept, kept + pages, uint8_t{1});
    for (int64_t p = 0; p < count; ++p) kept[s->place[p]] = !s->out[p];
  }
  write_out(w, pool, w.token[row], head, s->state, 0, lse_of(w, pool, row));
}

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
        pruned(pool, w, task.row, task.head, &scratch);
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
