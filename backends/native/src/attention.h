// Attention over the paged cache: shared types. See backends/native/paged.py for the Python side.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace attention {

enum Dtype : int32_t { kBf16 = 0, kHalf = 1, kFloat = 2 };

// One layer of the cache. Pools are (pages, heads, page, dim), contiguous.
struct Pool {
  const void *k, *v;
  const uint8_t* record;  // of (page, head): record_bytes at page * record_page + head * record_head; null: no shadow
  const uint32_t* low;    // (pages, heads, blocks, groups, 16)
  int64_t record_bytes, record_page, record_head;
  int32_t heads, page, dim, dtype;
  const uint8_t* record_of(int64_t id, int head) const { return record + id * record_page + head * record_head; }
};

// The rows of one step in one layer, and where their results go. A row is `span` query tokens, the last of those cached;
// each sees the tokens up to itself. Only rows of one token are pruned.
struct Work {
  const void* query;  // dtype query_dtype; element (token, head, d) at token * query_token + head * query_head + d
  int64_t query_token, query_head;
  void* out;                 // (tokens, H, dim), contiguous, dtype of the query
  const int64_t* token;      // (rows): place of each row's first query in the packed axis
  const int64_t* length;     // (rows): tokens cached, the queries' own included
  const int64_t* span;       // (rows): query tokens
  const int64_t* table;      // (rows, table_stride): page ids
  const double* theta;       // (rows): 0 reads everything
  const uint8_t* candidate;  // (rows, table_stride): 1 where a page may be left out
  const float* sinks;        // (H): learned sink logits, or null
  double* mass;              // (rows, H): certified pruned mass
  int32_t* read;             // (rows, heads): pages read exactly
  int32_t* fine;             // (rows, heads): pages whose low plane was read
  uint8_t* kept;             // (rows, heads, table_stride), or null: 1 where a page was read
  float* lse;                // (rows, H), or null: log-sum-exp of the last query, sinks included
  int64_t table_stride;
  int32_t rows, group, query_dtype, window, sink_tokens, threads;
  float scale, softcap;  // softcap 0: none
};

constexpr int kBlock = 4;      // query heads that go through a kernel together
constexpr int kChunk = 1024;   // tokens whose scores are held before their values are read
constexpr int kTogether = 12;  // about; query heads whose KV heads' pages are read together

inline int padded(int n, int to) { return (n + to - 1) / to * to; }

// A softmax is taken over so many pages at a time, counted from the row's first, then merged. The first page that a window
// reaches is anywhere, so there a part is no more than `attend` takes in one piece.
inline int64_t part_pages(const Pool& pool, const Work& work) {
  return std::max(work.window > 0 ? 512 / padded(pool.page, 16) : 2048 / pool.page, 1);
}

// Whether the bfloat16 products are used: keys, values and queries all bfloat16, and the processor has them.
bool pairs_used(const Work& work, const Pool& pool);

// The query heads of one (token, KV head); of several tokens with `load_tokens`, which fills `values` or `bf16` only.
struct Query {
  int group, dim, stride;     // stride: dim padded to 32
  bool exact_bf16;            // the query's own values are bfloat16
  std::vector<float> values;  // (group, stride), 0 past dim
  std::vector<uint16_t> bf16; // (group, stride), if exact_bf16
  std::vector<int16_t> q16;   // (group, stride): values / alpha, rounded
  std::vector<float> alpha;   // (group)
  std::vector<double> norm;   // (group): |scale| times the Euclidean norm, rounded up
  float scale, softcap;
  void load(const Work& work, int64_t token, int head, const Pool& pool);
  void load_tokens(const Work& work, int64_t token, int count, int head, const Pool& pool);
};

struct Segment {  // tokens begin .. end - 1 of a page
  int64_t page;
  int32_t begin, end;
};

// Partial softmax of `group` heads: maximum, sum of exp(score - maximum), values weighted by them. With bfloat16 keys,
// values and queries the weights of the values are bfloat16 too; `weight` is the sum of what they were rounded to, and
// the channels of `out` are in the order of `channel`.
struct State {
  int group, stride;  // stride: dim padded to 32
  std::vector<float> top, total, weight, out;
  void reset(int group, int dim);
  void merge(const State& other);  // of the tokens after those of this one
  double lse(int head) const;
};

// Place in `out` of channel d: as it is, or the order that interleaving two rows leaves (32 channels at a time).
inline int channel(int d, bool pairs) { return pairs ? (d & ~31) + ((d & 4) << 2) + ((d & 24) >> 1) + (d & 3) : d; }

// Adds the tokens of the segments to the states of KV heads head .. head + heads - 1, in order; one query and state each.
// `scratch` grows as needed.
void attend(const Pool& pool, int head, int heads, const Segment* segments, int64_t count, const Query* query,
            State* state, std::vector<float>* scratch);

inline float* lse_of(const Work& w, const Pool& pool, int64_t row) {
  return w.lse == nullptr ? nullptr : w.lse + row * pool.heads * w.group;
}

// Writes the state's heads first .. first + group - 1 as the output of a packed token; lse of one entry per head, or null.
void write_out(const Work& work, const Pool& pool, int64_t token, int head, const State& state, int first, float* lse);

// The queries of several tokens of a row, as if each were a row of its own: same sums in the same order.
struct Prefill {
  Query query;
  State whole, part;
  std::vector<float> weight;
  std::vector<int64_t> first, limit;  // of the tokens that each query sees
};
constexpr int kPrefillQueries = 48;  // about; query heads that share the reading of a page
void prefill(const Pool& pool, const Work& work, int64_t row, int head, int64_t from, int count, Prefill* scratch);

// Largest Euclidean norm of a key among the segments' tokens.
double key_norm(const Pool& pool, int head, const Segment* segments, int64_t count);

// What the shadow says of one (row, KV head)'s candidate pages; arrays are (group, capacity).
struct Bounds {
  int64_t count = 0, capacity = 0;
  std::vector<float> step, error, norm;                    // (capacity)
  std::vector<float> centre, weight_sum, weight_abs;  // q.m, sum qw, sum |qw|
  std::vector<float> mass, upper, lower;              // in units of exp(reference)
  std::vector<int32_t> dots;                          // (capacity, group, blocks, 16): of the planes read so far
  void resize(int group, int64_t count, int blocks);
  // What is known of the pages of another whose bits are set, sixteen to a mask; entry i is its page which[i].
  void choose(const Bounds& from, const std::vector<simd::Mask>& taken, int group, int blocks,
              std::vector<int32_t>* which);
};

// Bounds of pages from .. to - 1 from their high planes; then of those chosen (`Bounds::choose`) from both planes. `from`
// is a multiple of 16, `to` too or the last; `bounds` has its size.
void score_high(const Pool& pool, int head, const std::vector<int64_t>& pages, const Query& query,
                const float* reference, int64_t from, int64_t to, Bounds* bounds);
void score_low(const Pool& pool, int head, const std::vector<int64_t>& pages, const std::vector<int32_t>& which,
               const Query& query, const float* reference, const Bounds& high, int64_t from, int64_t to, Bounds* bounds);

// Which pages one query head may drop: ascending by upper bound (ties by place) while
//   spent + sum of upper <= f (base + sum of lower of the others).
struct Dropper {
  std::vector<float> upper, lower;
  std::vector<int32_t> place;
  // Adds 1 to votes[i] for each of the `count` pages it may drop. All three lists go on to whole vectors, in which the
  // lower bounds are 0 and the upper ones next to nothing, or infinite.
  void vote(const float* upper_bound, const float* lower_bound, int64_t count, double spent, double base, double f,
            int32_t* votes);
};

// The parts of a record; see Shadow in backends/kv_cache.py.
struct Record {
  int groups, blocks;  // 8 channels each; 16 tokens each
  constexpr Record(int groups, int blocks) : groups(groups), blocks(blocks) {}
  explicit Record(const Pool& pool) : Record((pool.dim + 7) / 8, (pool.page + 15) / 16) {}
  int width() const { return 8 * groups; }
  int weight() const { return 16; }
  int centre() const { return 16 + width(); }
  int high() const { return 16 + 3 * width(); }
  int plane() const { return 64 * blocks * groups; }
  int bytes() const { return high() + plane(); }
};

}  // namespace attention
