// What is done with one page: scores of its tokens, and values weighted by them. One head at a time or several together,
// every head gets the same sums in the same order.
#pragma once
#include <algorithm>

#include "attention.h"

namespace attention {
namespace {

using namespace simd;

#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
inline Vec dot(const bf16* k, const Query& query, int g, int dim) {
  const uint16_t* q = query.bf16.data() + static_cast<int64_t>(g) * query.stride;
  __m512 acc = _mm512_setzero_ps();
  int d = 0;
  for (; d + 32 <= dim; d += 32)
    acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(k + d), (__m512bh)_mm512_loadu_si512(q + d));
  if (d < dim) {
    const __mmask32 tail = (1u << (dim - d)) - 1u;
    acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_maskz_loadu_epi16(tail, k + d), (__m512bh)_mm512_loadu_si512(q + d));
  }
  return {acc};
}
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
inline Vec round_weights(Vec e, uint16_t*) { return e; }
#endif

template <class T>
inline Vec dot_floats(const T* k, const float* q, int dim) {
  Vec acc = zero();
  int d = 0;
  for (; d + 16 <= dim; d += 16) acc = fma(load(k + d), load(q + d), acc);
  if (d < dim) acc = fma(load(k + d, dim - d), load(q + d), acc);
  return acc;
}

// A page that is read later, a row at a time between the products of this one: a burst would stall them.
template <class T>
inline void fetch_row(const T* row, int dim) {
  for (int b = 0; b < dim * static_cast<int>(sizeof(T)); b += 64) prefetch(reinterpret_cast<const char*>(row) + b);
}

// Of sixteen of its rows, those that head g of a group fetches: the next one at each step whose bit is set.
template <class T>
struct Later {
  const T* row = nullptr;
  uint32_t steps = 0;
  Later(const T* rows, int dim, int g, int group) {
    const int each = (16 + group - 1) / group, mine = std::min(each, 16 - g * each);
    if (rows == nullptr || mine <= 0) return;
    row = rows + static_cast<int64_t>(g) * each * dim;
    for (int i = 0; i < mine; ++i) steps |= 1u << 16 * i / each;
  }
  void step(int i, int dim) {
    if (steps >> i & 1) fetch_row(row, dim), row += dim;
  }
};

#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
// Products of sixteen rows of 32 N channels with head g: as `dot`, everything in registers.
template <int N>
inline Vec dots16(const bf16* k, const Query& query, int g, Later<bf16> later) {
  const uint16_t* from = query.bf16.data() + static_cast<int64_t>(g) * query.stride;
  __m512bh q[N];
  Vec r[16];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) q[j] = (__m512bh)_mm512_loadu_si512(from + 32 * j);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    later.step(i, 32 * N);
    __m512 acc = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(k + 32 * (N * i + j)), q[j]);
    r[i] = {acc};
  }
  return sums(r);
}
#endif

// Products of the sixteen rows from `k`, of which lo .. hi - 1 are read; the others get 0.
template <class T>
inline Vec row_dots(const T* k, int dim, int lo, int hi, const Query& query, int g, Later<T> later) {
#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    if (query.exact_bf16 && hi - lo == 16) {
      if (dim == 64) return dots16<2>(k, query, g, later);
      if (dim == 96) return dots16<3>(k, query, g, later);
      if (dim == 128) return dots16<4>(k, query, g, later);
    }
  }
#endif
  const float* q = query.values.data() + static_cast<int64_t>(g) * query.stride;
  Vec r[16];
  for (int i = 0; i < 16; ++i) {
    const T* row = k + static_cast<int64_t>(i) * dim;
    if (i < lo || i >= hi) {
      r[i] = zero();
      continue;
    }
    later.step(i, dim);
#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      if (query.exact_bf16) {
        r[i] = dot(row, query, g, dim);
        continue;
      }
    }
#endif
    r[i] = dot_floats(row, q, dim);
  }
  return sums(r);
}

// Scaled scores of a page's tokens for head g, padded to 16; -inf outside begin .. end - 1.
template <class T>
void page_scores(const T* k, int dim, const Segment& segment, const Query& query, int g, float* out, const T* next) {
  for (int t0 = segment.begin / 16 * 16; t0 < segment.end; t0 += 16) {
    const int lo = std::max(segment.begin - t0, 0), hi = std::min(segment.end - t0, 16);
    const int64_t at = static_cast<int64_t>(t0) * dim;
    const Later<T> later(next == nullptr ? nullptr : next + at, dim, g % query.group, query.group);
    Vec s = row_dots(k + at, dim, lo, hi, query, g, later) * set(query.scale);
    if (query.softcap > 0) s = cap(s, query.softcap);
    s = keep_first(s, hi, -kInfinity);
    store(out + t0, s);
    for (int i = 0; i < lo; ++i) out[t0 + i] = -kInfinity;
  }
}

// out[h] += sum over tokens of weight[h][t] v[t], for G heads.
template <class T, int G>
void page_values(const T* v, int dim, const Segment& segment, const float* weight, int64_t weight_stride, float* out,
                 int out_stride, const T* next) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) {
    Vec acc[G][4];
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < 4; ++j) acc[g][j] = load(out + g * out_stride + d + 16 * j);
    for (int t = segment.begin; t < segment.end; ++t) {
      const T* row = v + static_cast<int64_t>(t) * dim + d;
      if (next != nullptr) fetch_row(next + static_cast<int64_t>(t) * dim + d, 64);
      const Vec a = load(row), b = load(row + 16), c = load(row + 32), e = load(row + 48);
      for (int g = 0; g < G; ++g) {
        const Vec p = set(weight[g * weight_stride + t]);
        acc[g][0] = fma(p, a, acc[g][0]);
        acc[g][1] = fma(p, b, acc[g][1]);
        acc[g][2] = fma(p, c, acc[g][2]);
        acc[g][3] = fma(p, e, acc[g][3]);
      }
    }
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < 4; ++j) store(out + g * out_stride + d + 16 * j, acc[g][j]);
  }
  for (; d < dim; d += 16) {
    const int n = std::min(dim - d, 16);
    Vec acc[G];
    for (int g = 0; g < G; ++g) acc[g] = load(out + g * out_stride + d);
    for (int t = segment.begin; t < segment.end; ++t) {
      const Vec a = load(v + static_cast<int64_t>(t) * dim + d, n);
      for (int g = 0; g < G; ++g) acc[g] = fma(set(weight[g * weight_stride + t]), a, acc[g]);
    }
    for (int g = 0; g < G; ++g) store(out + g * out_stride + d, acc[g]);
  }
}

#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
inline __m512i row_of(const bf16* v, int n) {
  return n >= 32 ? _mm512_loadu_si512(v) : _mm512_maskz_loadu_epi16((1u << n) - 1u, v);
}

// Of 64 channels from `v` (Whole), or of n0 + n1 of them. What is constant here stays in registers.
template <int G, bool Whole>
inline void value_pairs(const bf16* v, int dim, int n0, int n1, const Segment& segment, const uint16_t* weight,
                        int64_t weight_stride, float* out, int out_stride, const bf16* next) {
  if (Whole) n0 = n1 = 32;
  __m512 acc[G][4];
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < 4; ++j)
      acc[g][j] = Whole || j < 2 || n1 > 0 ? _mm512_loadu_ps(out + g * out_stride + 16 * j) : _mm512_setzero_ps();
  const auto add = [&](int t, __m512i a, __m512i b, __m512i c, __m512i e) __attribute__((always_inline)) {
    const __m512bh ab = (__m512bh)_mm512_unpacklo_epi16(a, b), ba = (__m512bh)_mm512_unpackhi_epi16(a, b);
    const __m512bh ce = (__m512bh)_mm512_unpacklo_epi16(c, e), ec = (__m512bh)_mm512_unpackhi_epi16(c, e);
    for (int g = 0; g < G; ++g) {
      int32_t pair;
      std::memcpy(&pair, weight + g * weight_stride + t, 4);
      const __m512bh p = (__m512bh)_mm512_set1_epi32(pair);
      acc[g][0] = _mm512_dpbf16_ps(acc[g][0], ab, p);
      acc[g][1] = _mm512_dpbf16_ps(acc[g][1], ba, p);
      acc[g][2] = _mm512_dpbf16_ps(acc[g][2], ce, p);
      acc[g][3] = _mm512_dpbf16_ps(acc[g][3], ec, p);
    }
  };
  const __m512i none = _mm512_setzero_si512();
  const bf16* row = v + static_cast<int64_t>(segment.begin) * dim;
  int t = segment.begin;
  for (; t + 1 < segment.end; t += 2, row += 2 * dim) {
    if (next != nullptr) {
      fetch_row(next + static_cast<int64_t>(t) * dim, 64);
      fetch_row(next + static_cast<int64_t>(t + 1) * dim, 64);
    }
    add(t, row_of(row, n0), row_of(row + dim, n0), n1 > 0 ? row_of(row + 32, n1) : none,
        n1 > 0 ? row_of(row + dim + 32, n1) : none);
  }
  if (t < segment.end) add(t, row_of(row, n0), none, n1 > 0 ? row_of(row + 32, n1) : none, none);
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < 4; ++j)
      if (Whole || j < 2 || n1 > 0) _mm512_storeu_ps(out + g * out_stride + 16 * j, acc[g][j]);
}

// As page_values with bfloat16 weights, two tokens per product. Channels come out in the order of unpacklo, unpackhi
// (see `channel`).
template <int G>
__attribute__((noinline)) void page_value_pairs(const bf16* v, int dim, const Segment& segment, const uint16_t* weight,
                                                int64_t weight_stride, float* out, int out_stride, const bf16* next) {
  for (int d = 0; d < dim; d += 64) {
    const bf16* later = next == nullptr ? nullptr : next + d;
    if (dim - d >= 64)
      value_pairs<G, true>(v + d, dim, 32, 32, segment, weight, weight_stride, out + d, out_stride, later);
    else
      value_pairs<G, false>(v + d, dim, std::min(dim - d, 32), std::min(dim - d - 32, 32), segment, weight,
                            weight_stride, out + d, out_stride, later);
  }
}

inline Vec round_weights(Vec e, uint16_t* out) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(e.v);
  _mm256_storeu_si256((__m256i*)out, rounded);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}
#endif


// Adds the weighted values of a page's tokens to `heads` <= kBlock outputs. `weight` holds float32, or, with `pairs`,
// bfloat16 in the first half of each row.
template <class T>
inline void add_values(const T* v, int dim, const Segment& segment, const float* weight, int64_t tokens, int64_t at,
                       int heads, bool pairs, float* out, int stride, const T* next) {
#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    if (pairs) {
      const uint16_t* w = reinterpret_cast<const uint16_t*>(weight) + at;
      switch (heads) {
        case 1: return page_value_pairs<1>(v, dim, segment, w, 2 * tokens, out, stride, next);
        case 2: return page_value_pairs<2>(v, dim, segment, w, 2 * tokens, out, stride, next);
        case 3: return page_value_pairs<3>(v, dim, segment, w, 2 * tokens, out, stride, next);
        default: return page_value_pairs<4>(v, dim, segment, w, 2 * tokens, out, stride, next);
      }
    }
  }
#endif
  switch (heads) {
    case 1: return page_values<T, 1>(v, dim, segment, weight + at, tokens, out, stride, next);
    case 2: return page_values<T, 2>(v, dim, segment, weight + at, tokens, out, stride, next);
    case 3: return page_values<T, 3>(v, dim, segment, weight + at, tokens, out, stride, next);
    default: return page_values<T, 4>(v, dim, segment, weight + at, tokens, out, stride, next);
  }
}

// Turns head g's scores (`tokens` of them, whole vectors, -inf where there is none) into weights in place, and rescales
// what the state holds to the new maximum.
inline void soften(float* w, int64_t tokens, bool pairs, int g, State* state) {
  Vec most = set(-kInfinity);
  for (int64_t t = 0; t < tokens; t += 16) most = max(load(w + t), most);
  const float top = std::max(state->top[g], largest(most));
  const float shift = top == -kInfinity ? 0.0f : top;
  const float shrink = state->top[g] == -kInfinity ? 0.0f : std::exp(state->top[g] - shift);
  Vec add = zero(), add_rounded = zero();
  for (int64_t t = 0; t < tokens; t += 16) {
    const Vec e = exp(load(w + t) - set(shift));
    add = add + e;
    if (pairs)
      add_rounded = add_rounded + round_weights(e, reinterpret_cast<uint16_t*>(w) + t);  // behind what is read
    else
      store(w + t, e);
  }
  // written out, as a compiler may fuse these in one place and not in another
  state->total[g] = std::fma(state->total[g], shrink, sum(add));
  state->weight[g] = std::fma(state->weight[g], shrink, sum(pairs ? add_rounded : add));
  state->top[g] = top;
  float* o = state->out.data() + static_cast<int64_t>(g) * state->stride;
  for (int d = 0; d < state->stride; d += 16) store(o + d, load(o + d) * set(shrink));
}

}  // namespace
}  // namespace attention
