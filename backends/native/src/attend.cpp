// Exact attention over listed pages, one KV head at a time: scores, softmax, values; float32 inside.
#include <algorithm>

#include "attention.h"

namespace attention {
namespace {

using namespace simd;

constexpr int kChunk = 1024;  // tokens whose scores are held before their values are read
constexpr int kAhead = 4;       // pages fetched before they are read

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

inline Vec cap(Vec s, float limit) {
  alignas(64) float x[16];
  store(x, s);
  for (float& y : x) y = limit * std::tanh(y / limit);
  return load(x);
}

// Scaled scores of a page's tokens for head g, padded to 16; -inf outside begin .. end - 1.
template <class T>
void page_scores(const T* k, int dim, const Segment& segment, const Query& query, int g, float* out, const T* next) {
  const float* q = query.values.data() + static_cast<int64_t>(g) * query.stride;
  for (int t0 = segment.begin / 16 * 16; t0 < segment.end; t0 += 16) {
    Vec r[16];
    const int lo = std::max(segment.begin - t0, 0), hi = std::min(segment.end - t0, 16);
    for (int i = 0; i < 16; ++i) {
      if (i < lo || i >= hi) {
        r[i] = zero();
        continue;
      }
      const T* row = k + static_cast<int64_t>(t0 + i) * dim;
      if (next != nullptr) fetch_row(next + static_cast<int64_t>(t0 + i) * dim, dim);
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
    Vec s = sums(r) * set(query.scale);
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

// As page_values with bfloat16 weights, two tokens per product. Channels come out in the order of unpacklo, unpackhi
// (see `channel`).
template <int G>
void page_value_pairs(const bf16* v, int dim, const Segment& segment, const uint16_t* weight, int64_t weight_stride,
                      float* out, int out_stride, const bf16* next) {
  for (int d = 0; d < dim; d += 64) {
    const int n0 = std::min(dim - d, 32), n1 = std::min(dim - d - 32, 32);
    __m512 acc[G][4];
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < (n1 > 0 ? 4 : 2); ++j) acc[g][j] = _mm512_loadu_ps(out + g * out_stride + d + 16 * j);
    for (int t = segment.begin; t < segment.end; t += 2) {
      const bf16* row = v + static_cast<int64_t>(t) * dim + d;
      const bool both = t + 1 < segment.end;
      if (next != nullptr) {
        fetch_row(next + static_cast<int64_t>(t) * dim + d, 64);
        fetch_row(next + static_cast<int64_t>(t + 1) * dim + d, 64);
      }
      const __m512i a = row_of(row, n0), b = both ? row_of(row + dim, n0) : _mm512_setzero_si512();
      const __m512bh ab = (__m512bh)_mm512_unpacklo_epi16(a, b), ba = (__m512bh)_mm512_unpackhi_epi16(a, b);
      __m512bh p[G];
      for (int g = 0; g < G; ++g) {
        int32_t pair;
        std::memcpy(&pair, weight + g * weight_stride + t, 4);
        p[g] = (__m512bh)_mm512_set1_epi32(pair);
        acc[g][0] = _mm512_dpbf16_ps(acc[g][0], ab, p[g]);
        acc[g][1] = _mm512_dpbf16_ps(acc[g][1], ba, p[g]);
      }
      if (n1 > 0) {
        const __m512i c = row_of(row + 32, n1), e = both ? row_of(row + dim + 32, n1) : _mm512_setzero_si512();
        const __m512bh ce = (__m512bh)_mm512_unpacklo_epi16(c, e), ec = (__m512bh)_mm512_unpackhi_epi16(c, e);
        for (int g = 0; g < G; ++g) {
          acc[g][2] = _mm512_dpbf16_ps(acc[g][2], ce, p[g]);
          acc[g][3] = _mm512_dpbf16_ps(acc[g][3], ec, p[g]);
        }
      }
    }
    for (int g = 0; g < G; ++g)
      for (int j = 0; j < (n1 > 0 ? 4 : 2); ++j) _mm512_storeu_ps(out + g * out_stride + d + 16 * j, acc[g][j]);
  }
}

inline Vec round_weights(Vec e, uint16_t* out) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(e.v);
  _mm256_storeu_si256((__m256i*)out, rounded);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}
#endif

template <class T>
void attend_typed(const Pool& pool, int head, const Segment* segments, int64_t count, const Query& query, State* state,
                  std::vector<float>* scratch) {
  const int dim = pool.dim, group = query.group, wide = padded(pool.page, 16);
  const int64_t chunk = std::max(kChunk / wide, 1), tokens = chunk * wide;
  if (scratch->size() < static_cast<size_t>(tokens) * group) scratch->resize(tokens * group);
  float* weight = scratch->data();
  const int64_t page_size = static_cast<int64_t>(pool.page) * dim;
  const auto at = [&](const void* base, int64_t s) {
    return static_cast<const T*>(base) + (segments[s].page * pool.heads + head) * page_size;
  };
  // The order of reading: keys of a chunk, its values, keys of the next chunk. What comes kAhead pages later:
  const auto after_keys = [&](int64_t c, int64_t n, int64_t s) {
    if (s + kAhead < n) return at(pool.k, c + s + kAhead);
    return s + kAhead - n < n ? at(pool.v, c + s + kAhead - n) : nullptr;
  };
  const auto after_values = [&](int64_t c, int64_t n, int64_t s) {
    if (s + kAhead < n) return at(pool.v, c + s + kAhead);
    return c + s + kAhead < count ? at(pool.k, c + s + kAhead) : nullptr;
  };
  for (int64_t s = 0; s < std::min<int64_t>(kAhead, count); ++s)
    for (int t = 0; t < pool.page; ++t) fetch_row(at(pool.k, s) + static_cast<int64_t>(t) * dim, dim);
  for (int64_t c = 0; c < count; c += chunk) {
    const int64_t n = std::min(chunk, count - c);
    std::fill(weight, weight + tokens * group, -kInfinity);
    for (int64_t s = 0; s < n; ++s) {
      const T* k = at(pool.k, c + s);
      for (int g = 0; g < group; ++g)
        page_scores(k, dim, segments[c + s], query, g, weight + g * tokens + s * wide,
                    g == 0 ? after_keys(c, n, s) : nullptr);
    }
    for (int g = 0; g < group; ++g) {
      float* w = weight + g * tokens;
      Vec most = set(-kInfinity);
      for (int64_t t = 0; t < n * wide; t += 16) most = max(load(w + t), most);
      const float top = std::max(state->top[g], largest(most));
      const float shift = top == -kInfinity ? 0.0f : top;
      const float shrink = state->top[g] == -kInfinity ? 0.0f : std::exp(state->top[g] - shift);
      Vec add = zero(), add_rounded = zero();
      for (int64_t t = 0; t < n * wide; t += 16) {
        const Vec e = exp(load(w + t) - set(shift));
        add = add + e;
        if (query.exact_bf16)
          add_rounded = add_rounded + round_weights(e, reinterpret_cast<uint16_t*>(w) + t);  // behind what is read
        else
          store(w + t, e);
      }
      state->total[g] = state->total[g] * shrink + sum(add);
      state->weight[g] = state->weight[g] * shrink + sum(query.exact_bf16 ? add_rounded : add);
      state->top[g] = top;
      float* o = state->out.data() + static_cast<int64_t>(g) * state->stride;
      for (int d = 0; d < state->stride; d += 16) store(o + d, load(o + d) * set(shrink));
    }
    for (int64_t s = 0; s < n; ++s) {
      const T* v = at(pool.v, c + s);
      for (int g = 0; g < group; g += kBlock) {
        const float* w = weight + g * tokens + s * wide;
        const T* later = g == 0 ? after_values(c, n, s) : nullptr;
        float* o = state->out.data() + static_cast<int64_t>(g) * state->stride;
#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
        if constexpr (std::is_same_v<T, bf16>) {
          if (query.exact_bf16) {
            const uint16_t* pair = reinterpret_cast<const uint16_t*>(weight + g * tokens) + s * wide;
            switch (std::min(group - g, kBlock)) {
              case 1: page_value_pairs<1>(v, dim, segments[c + s], pair, 2 * tokens, o, state->stride, later); break;
              case 2: page_value_pairs<2>(v, dim, segments[c + s], pair, 2 * tokens, o, state->stride, later); break;
              case 3: page_value_pairs<3>(v, dim, segments[c + s], pair, 2 * tokens, o, state->stride, later); break;
              default: page_value_pairs<4>(v, dim, segments[c + s], pair, 2 * tokens, o, state->stride, later);
            }
            continue;
          }
        }
#endif
        switch (std::min(group - g, kBlock)) {
          case 1: page_values<T, 1>(v, dim, segments[c + s], w, tokens, o, state->stride, later); break;
          case 2: page_values<T, 2>(v, dim, segments[c + s], w, tokens, o, state->stride, later); break;
          case 3: page_values<T, 3>(v, dim, segments[c + s], w, tokens, o, state->stride, later); break;
          default: page_values<T, 4>(v, dim, segments[c + s], w, tokens, o, state->stride, later);
        }
      }
    }
  }
}

template <class T>
double key_norm_typed(const Pool& pool, int head, const Segment* segments, int64_t count) {
  double most = 0.0;
  for (int64_t s = 0; s < count; ++s) {
    const T* k = static_cast<const T*>(pool.k) +
                 (segments[s].page * pool.heads + head) * static_cast<int64_t>(pool.page) * pool.dim;
    for (int t = segments[s].begin; t < segments[s].end; ++t) {
      const T* row = k + static_cast<int64_t>(t) * pool.dim;
      Vec acc = zero();
      for (int d = 0; d < pool.dim; d += 16) {
        const Vec x = load(row + d, std::min(pool.dim - d, 16));
        acc = fma(x, x, acc);
      }
      const double square = sum(acc);
      most = square <= most ? most : square;  // NaN wins
    }
  }
  return std::sqrt(most) * (1.0 + 1e-5) + 4e-18;  // squares below 2^-126 may be lost
}

}  // namespace

void attend(const Pool& pool, int head, const Segment* segments, int64_t count, const Query& query, State* state,
            std::vector<float>* scratch) {
  switch (pool.dtype) {
    case kBf16: return attend_typed<bf16>(pool, head, segments, count, query, state, scratch);
    case kHalf: return attend_typed<half>(pool, head, segments, count, query, state, scratch);
    default: return attend_typed<float>(pool, head, segments, count, query, state, scratch);
  }
}

double key_norm(const Pool& pool, int head, const Segment* segments, int64_t count) {
  switch (pool.dtype) {
    case kBf16: return key_norm_typed<bf16>(pool, head, segments, count);
    case kHalf: return key_norm_typed<half>(pool, head, segments, count);
    default: return key_norm_typed<float>(pool, head, segments, count);
  }
}

bool pairs_used(const Work& work, const Pool& pool) {
  return kPairs && work.query_dtype == kBf16 && pool.dtype == kBf16;
}

void State::reset(int heads, int dim) {
  group = heads;
  stride = padded(dim, 32);
  weight.assign(heads, 0.0f);
  top.assign(heads, -kInfinity);
  total.assign(heads, 0.0f);
  out.assign(static_cast<size_t>(heads) * stride, 0.0f);
}

double State::lse(int head) const {
  if (total[head] == 0.0f) return -kInfinity;
  return static_cast<double>(top[head]) + std::log(static_cast<double>(total[head]));
}

void Query::load(const Work& work, int64_t row, int head, int d, int32_t pool_dtype) {
  group = work.group, dim = d, stride = padded(d, 32);
  scale = work.scale, softcap = work.softcap;
  exact_bf16 = kPairs && work.query_dtype == kBf16 && pool_dtype == kBf16;
  values.assign(static_cast<size_t>(group) * stride, 0.0f);
  q16.assign(static_cast<size_t>(group) * stride, 0);
  if (exact_bf16) bf16.assign(static_cast<size_t>(group) * stride, 0);
  alpha.resize(group), norm.resize(group);
  for (int g = 0; g < group; ++g) {
    const int64_t at = work.token[row] * work.query_token + (static_cast<int64_t>(head) * group + g) * work.query_head;
    float* q = values.data() + static_cast<int64_t>(g) * stride;
    float most = 0.0f;
    double square = 0.0;
    for (int i = 0; i < d; ++i) {
      switch (work.query_dtype) {
        case kBf16: q[i] = to_float(static_cast<const simd::bf16*>(work.query)[at + i]); break;
        case kHalf: q[i] = to_float(static_cast<const half*>(work.query)[at + i]); break;
        default: q[i] = static_cast<const float*>(work.query)[at + i];
      }
      most = std::max(most, std::fabs(q[i]));
      square += static_cast<double>(q[i]) * q[i];
      if (exact_bf16) bf16[static_cast<int64_t>(g) * stride + i] = static_cast<const simd::bf16*>(work.query)[at + i];
    }
    norm[g] = std::fabs(static_cast<double>(scale)) * std::sqrt(square) * (1.0 + 1e-9);
    // below 1e-30 a query is as good as 0: with keys within float16 its scores are less than 1e-20
    alpha[g] = most >= 1e-30f && most < kInfinity ? most / 32767.0f : 0.0f;
    for (int i = 0; i < d; ++i) {
      const float x = alpha[g] > 0.0f ? std::nearbyint(q[i] / alpha[g]) : 0.0f;
      q16[static_cast<int64_t>(g) * stride + i] = x >= -32767.0f && x <= 32767.0f ? static_cast<int16_t>(x) : 0;
    }
  }
}

}  // namespace attention
