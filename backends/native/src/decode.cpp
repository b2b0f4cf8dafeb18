// Attention of one layer for all rows of a step: exact for rows without a budget; scored, selected, read and certified
// for the others. Work is cut by (row, KV head) and, where exact, by a fixed number of pages, so that what a
// row gets does not depend on the rest of the batch or on the number of threads.
#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "pruned.h"

namespace attention {
namespace {

constexpr int64_t kTeam = 2048;     // tokens of the longest pruned row from which sharing it pays
constexpr int64_t kAlone = 150000;  // products of queries and keys done sooner than another thread comes

struct Scratch {  // one per thread
  std::vector<Query> queries;
  std::vector<float> weight;
  Pruned pruned;
  Prefill prefill;
};

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

struct Task {
  enum Kind : int32_t { kPruned, kTokens, kPart } kind;
  int32_t row, head, heads;
  int64_t at;  // first query token, or part of the pages
};

// Pruned rows and heads that are fewer than the threads: every stage is shared, a barrier after each. (With three for two
// threads the barriers cost what sharing gains; one for two is 1.3 times as fast.)
class Team {
 public:
  Team(std::vector<Pruned>* all, pool::Barrier* barrier) : all_(*all), barrier_(*barrier) {}

  // Called by every thread.
  void run(const Pool& pool, const Work& w, const std::vector<Task>& tasks, std::vector<float>* scratch) {
    const auto one = [](const Pruned&) -> int64_t { return 1; };
    stage(0, one, [&](int64_t i, int64_t) { all_[i].open(pool, w, tasks[i].row, tasks[i].head, scratch); });
    stage(1, [](const Pruned& p) { return p.high_units(); }, [&](int64_t i, int64_t unit) { all_[i].look_high(unit); });
    stage(2, one, [&](int64_t i, int64_t) { all_[i].settle(); });
    stage(3, [](const Pruned& p) { return p.read_units(); }, [&](int64_t i, int64_t unit) { all_[i].read(unit, scratch); });
    stage(4, one, [&](int64_t i, int64_t) { all_[i].gather(); });
    stage(5, [](const Pruned& p) { return p.low_units(); }, [&](int64_t i, int64_t unit) { all_[i].look_low(unit); });
    stage(6, one, [&](int64_t i, int64_t) { all_[i].close(scratch); });
  }

 private:
  template <class Units, class Body>
  void stage(int number, Units units, Body body) {  // body(i, unit) for the units of all
    size_t i = 0;
    int64_t first = 0;  // unit of i
    for (;;) {
      const int64_t at = queues_[number].take();
      for (; i < all_.size() && at >= first + units(all_[i]); ++i) first += units(all_[i]);
      if (i == all_.size()) break;
      body(i, at - first);
    }
    barrier_.wait();
  }

  std::vector<Pruned>& all_;
  pool::Barrier& barrier_;
  pool::Queue queues_[7];
};

}  // namespace
}  // namespace attention

extern "C" void entropic_attend(const attention::Pool* pool_, const attention::Work* work_) {
  using namespace attention;
  const Pool& pool = *pool_;
  const Work& w = *work_;
  std::vector<Task> tasks, pruned;
  std::vector<Parts> seen(w.rows);
  const int64_t block = std::max(kPrefillQueries / w.group, 1);
  for (int r = 0; r < w.rows; ++r)
    if (w.span[r] > 1)
      for (int64_t b = (w.span[r] - 1) / block; b >= 0; --b)  // the longest first
        for (int h = 0; h < pool.heads; ++h) tasks.push_back({Task::kTokens, r, h, 1, b * block});
  int64_t longest = 0;
  for (int r = 0; r < w.rows; ++r) {
    if (w.theta[r] <= 0) continue;
    longest = std::max(longest, w.length[r]);
    for (int h = 0; h < pool.heads; ++h) pruned.push_back({Task::kPruned, r, h, 1, 0});
  }
  const bool team = pruned.size() < static_cast<size_t>(w.threads) && longest >= kTeam;
  if (!team) tasks.insert(tasks.end(), pruned.begin(), pruned.end());
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
  static thread_local std::vector<Pruned> shared;
  if (team) shared.resize(pruned.size());
  Team members(&shared, &barrier);
  pool::run(threads, [&](int, int) {
    static thread_local Scratch scratch;
    if (team) members.run(pool, w, pruned, &scratch.weight);
    for (int64_t i; (i = queue.take()) < n;) {
      const Task& task = tasks[i];
      if (task.kind == Task::kPruned) {
        scratch.pruned.run(pool, w, task.row, task.head, &scratch.weight);
      } else if (task.kind == Task::kTokens) {
        const int count = static_cast<int>(std::min(block, w.span[task.row] - task.at));
        prefill(pool, w, task.row, task.head, task.at, count, &scratch.prefill);
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
