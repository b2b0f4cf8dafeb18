// Attention of a row's query tokens, several at a time over the same pages: a page is read once for all of them, and each
// gets the sums it would get as a row of its own (same tokens, same order), so neither chunking nor batch changes it.
#include <algorithm>

#include "attention.h"
#include "pages.h"

namespace attention {
namespace {

inline void put_tile(const Vec r[16], const Query& query, float* out, int64_t tokens) {
  Vec s = sums(r) * set(query.scale);
  if (query.softcap > 0) s = cap(s, query.softcap);
  alignas(64) float tile[16];
  store(tile, s);
  for (int i = 0; i < 4; ++i) std::memcpy(out + i * tokens, tile + 4 * i, 16);
}

#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
// Scores of a page's tokens, 4 at a time, for 4 heads from `m`; the sums of page_scores.
__attribute__((noinline)) void tile_pairs(const bf16* k, int page, int dim, const Query& query, int m, float* out,
                                          int64_t tokens) {
  const uint16_t* q = query.bf16.data() + static_cast<int64_t>(m) * query.stride;
  const int stride = query.stride;
  for (int t = 0; t < page; t += 4, k += 4 * dim) {
    Vec r[16];
    for (int i = 0; i < 16; ++i) r[i] = zero();
    for (int d = 0; d < dim; d += 32) {
      const __mmask32 some = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1u;
      __m512bh x[4];
      for (int j = 0; j < 4; ++j) x[j] = (__m512bh)_mm512_maskz_loadu_epi16(some, k + j * dim + d);
      for (int i = 0; i < 4; ++i) {
        const __m512bh y = (__m512bh)_mm512_loadu_si512(q + i * stride + d);
        for (int j = 0; j < 4; ++j) r[4 * i + j].v = _mm512_dpbf16_ps(r[4 * i + j].v, x[j], y);
      }
    }
    put_tile(r, query, out + t, tokens);
  }
}
#endif

template <class T>
__attribute__((noinline)) void tile_floats(const T* k, int page, int dim, const Query& query, int m, float* out,
                                           int64_t tokens) {
  const float* q = query.values.data() + static_cast<int64_t>(m) * query.stride;
  for (int t = 0; t < page; t += 4, k += 4 * dim) {
    Vec r[16];
    for (int i = 0; i < 16; ++i) r[i] = zero();
    for (int d = 0; d < dim; d += 16) {
      Vec x[4];
      for (int j = 0; j < 4; ++j) x[j] = dim - d >= 16 ? load(k + j * dim + d) : load(k + j * dim + d, dim - d);
      for (int i = 0; i < 4; ++i) {
        const Vec y = load(q + i * query.stride + d);
        for (int j = 0; j < 4; ++j) r[4 * i + j] = fma(x[j], y, r[4 * i + j]);
      }
    }
    put_tile(r, query, out + t, tokens);
  }
}

template <class T>
inline void score_tiles(const T* k, int page, int dim, const Query& query, int m, float* out, int64_t tokens) {
#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    if (query.exact_bf16) return tile_pairs(k, page, dim, query, m, out, tokens);
  }
#endif
  tile_floats(k, page, dim, query, m, out, tokens);
}

template <class T>
void add_part(const Pool& pool, int head, const int64_t* table, int64_t from, int64_t to, const Prefill& p,
              std::vector<float>* scratch, State* state) {
  const int dim = pool.dim, heads = p.query.group, wide = padded(pool.page, 16);
  const int64_t chunk = std::max(kChunk / wide, 1), tokens = chunk * wide + 16;  // rows 4096 bytes apart would collide
  const int64_t page_size = static_cast<int64_t>(pool.page) * dim;
  if (scratch->size() < static_cast<size_t>(tokens) * heads) scratch->resize(tokens * heads);
  float* weight = scratch->data();
  const bool tiled = pool.page % 4 == 0, pairs = p.query.exact_bf16;
  const auto inside = [&](int64_t token, int64_t page) {
    return static_cast<int32_t>(std::clamp<int64_t>(token - page * pool.page, 0, pool.page));
  };
  const auto begin = [&](int m, int64_t page) { return inside(p.first[m], page); };
  const auto end = [&](int m, int64_t page) { return inside(p.limit[m], page); };
  const auto whole = [&](int64_t page) { return begin(heads - 1, page) == 0 && end(0, page) == pool.page; };
  for (int64_t c = from; c < to; c += chunk) {
    const int64_t n = std::min(chunk, to - c);
    for (int m = 0; m < heads; ++m) std::fill_n(weight + m * tokens, n * wide, -kInfinity);
    for (int64_t s = 0; s < n; ++s) {
      const T* k = static_cast<const T*>(pool.k) + (table[c + s] * pool.heads + head) * page_size;
      int m = 0;
      if (tiled && whole(c + s))
        for (; m + 4 <= heads; m += 4) score_tiles(k, pool.page, dim, p.query, m, weight + m * tokens + s * wide, tokens);
      while (m < heads) {  // both ends ascend
        float* w = weight + m * tokens + s * wide;
        const int count = tiled && m + 4 <= heads ? 4 : 1;
        const int32_t least = begin(m, c + s), most = end(m + count - 1, c + s);
        if (least >= most) {
        } else if (count == 4) {
          const int32_t from4 = least & ~3, to4 = padded(most, 4);
          score_tiles(k + static_cast<int64_t>(from4) * dim, to4 - from4, dim, p.query, m, w + from4, tokens);
          for (int i = 0; i < 4; ++i, w += tokens) {
            std::fill(w + from4, w + begin(m + i, c + s), -kInfinity);
            std::fill(w + end(m + i, c + s), w + to4, -kInfinity);
          }
        } else {
          page_scores(k, dim, Segment{table[c + s], least, most}, p.query, m, w, static_cast<const T*>(nullptr));
        }
        m += count;
      }
    }
    for (int m = 0; m < heads; ++m) soften(weight + m * tokens, n * wide, pairs, m, state);
    for (int64_t s = 0; s < n; ++s) {
      const T* v = static_cast<const T*>(pool.v) + (table[c + s] * pool.heads + head) * page_size;
      const auto add = [&](int m, int count, int32_t start, int32_t stop) {
        if (start < stop)
          add_values(v, dim, Segment{table[c + s], start, stop}, weight + m * tokens, tokens, s * wide, count, pairs,
                     state->out.data() + static_cast<int64_t>(m) * state->stride, state->stride,
                     static_cast<const T*>(nullptr));
      };
      const bool all = whole(c + s);
      for (int m = 0, count; m < heads; m += count) {
        count = std::min(heads - m, kBlock);
        if (all) {
          add(m, count, 0, pool.page);
          continue;
        }
        const int32_t first = begin(m, c + s), least = end(m, c + s);
        while (begin(m + count - 1, c + s) != first) --count;
        const int32_t most = end(m + count - 1, c + s);
        const int32_t shared = least == most ? most : least & ~1;  // products take tokens in pairs
        add(m, count, first, shared);
        for (int i = m; i < m + count; ++i) add(i, 1, shared, end(i, c + s));
      }
    }
  }
}

}  // namespace

void prefill(const Pool& pool, const Work& w, int64_t row, int head, int64_t from, int count, Prefill* p) {
  const int64_t token = w.token[row] + from, before = w.length[row] - w.span[row] + from;
  const int64_t* table = w.table + row * w.table_stride;
  p->query.load_tokens(w, token, count, head, pool);
  const int heads = p->query.group;
  p->first.resize(heads), p->limit.resize(heads);
  p->whole.reset(heads, pool.dim);
  // Adds the tokens first .. limit - 1 of each query, as `visible` cuts them.
  const auto add = [&] {
    const int64_t pages = (p->limit[heads - 1] + pool.page - 1) / pool.page, each = part_pages(pool, w);
    for (int64_t at = p->first[0] / pool.page, to; at < pages; at = to) {
      to = std::min((at / each + 1) * each, pages);
      p->part.reset(heads, pool.dim);
      switch (pool.dtype) {
        case kBf16: add_part<bf16>(pool, head, table, at, to, *p, &p->weight, &p->part); break;
        case kHalf: add_part<half>(pool, head, table, at, to, *p, &p->weight, &p->part); break;
        default: add_part<float>(pool, head, table, at, to, *p, &p->weight, &p->part);
      }
      p->whole.merge(p->part);
    }
  };
  const auto start = [&](int m) { return w.window > 0 ? std::max<int64_t>(before + m / w.group + 1 - w.window, 0) : 0; };
  for (int m = 0; m < heads; ++m) p->first[m] = 0, p->limit[m] = std::min<int64_t>(w.sink_tokens, start(m));
  add();
  for (int m = 0; m < heads; ++m) p->first[m] = start(m), p->limit[m] = before + m / w.group + 1;
  add();
  float* lse = w.lse == nullptr ? nullptr : w.lse + row * pool.heads * w.group;
  for (int i = 0; i < count; ++i)
    write_out(w, pool, token + i, head, p->whole, i * w.group, from + i + 1 == w.span[row] ? lse : nullptr);
}

}  // namespace attention
