// Exact attention over listed pages, one KV head at a time: scores, softmax, values; float32 inside.
#include <algorithm>

#include "attention.h"
#include "pages.h"

namespace attention {
namespace {

template <class T>
void attend_typed(const Pool& pool, int head, int heads, const Segment* segments, int64_t count, const Query* query,
                  State* state, std::vector<float>* scratch) {
  const int dim = pool.dim, group = query->group, wide = padded(pool.page, 16);
  const int64_t chunk = std::max(kChunk / wide, 1), tokens = chunk * wide;
  if (scratch->size() < static_cast<size_t>(tokens) * group * heads) scratch->resize(tokens * group * heads);
  const int64_t page_size = static_cast<int64_t>(pool.page) * dim;
  const auto at = [&](const void* base, int64_t s, int h) {
    return static_cast<const T*>(base) + (segments[s].page * pool.heads + head + h) * page_size;
  };
  const auto weight = [&](int h, int g) { return scratch->data() + (static_cast<int64_t>(h) * group + g) * tokens; };
  // What is read next: the next head's part of a page, the next page, from keys to values to the next chunk's keys.
  const auto next = [&](const void* base, int64_t s, int h, int64_t end, const void* other, int64_t start) -> const T* {
    if (h + 1 < heads) return at(base, s, h + 1);
    if (s + 1 < end) return at(base, s + 1, 0);
    return start < count ? at(other, start, 0) : nullptr;
  };
  for (int64_t c = 0; c < count; c += chunk) {
    const int64_t end = std::min(c + chunk, count);
    for (int64_t s = c; s < end; ++s) {
      for (int h = 0; h < heads; ++h) {
        const T* later = next(pool.k, s, h, end, pool.v, c);
        for (int g = 0; g < group; ++g) {
          float* out = weight(h, g) + (s - c) * wide;
          if (segments[s].end - segments[s].begin < wide) std::fill(out, out + wide, -kInfinity);
          page_scores(at(pool.k, s, h), dim, segments[s], query[h], g, out, later);
        }
      }
    }
    for (int h = 0; h < heads; ++h)
      for (int g = 0; g < group; ++g) soften(weight(h, g), (end - c) * wide, query->exact_bf16, g, state + h);
    for (int64_t s = c; s < end; ++s) {
      for (int h = 0; h < heads; ++h) {
        const T* later = next(pool.v, s, h, end, pool.k, end);
        for (int g = 0; g < group; g += kBlock)
          add_values(at(pool.v, s, h), dim, segments[s], weight(h, g), tokens, (s - c) * wide,
                     std::min(group - g, kBlock), query->exact_bf16,
                     state[h].out.data() + static_cast<int64_t>(g) * state[h].stride, state[h].stride,
                     g == 0 ? later : nullptr);
      }
    }
  }
}

template <class T>
double key_norm_typed(const Pool& pool, int head, const Segment* segments, int64_t count) {
  Vec most = zero(), total = zero();
  for (int64_t s = 0; s < count; ++s) {
    const T* k = static_cast<const T*>(pool.k) +
                 (segments[s].page * pool.heads + head) * static_cast<int64_t>(pool.page) * pool.dim;
    for (int t0 = segments[s].begin; t0 < segments[s].end; t0 += 16) {
      Vec squares[16];
      for (int i = 0; i < 16; ++i) {
        squares[i] = zero();
        if (t0 + i >= segments[s].end) continue;
        const T* row = k + static_cast<int64_t>(t0 + i) * pool.dim;
        for (int d = 0; d < pool.dim; d += 16) {
          const Vec x = load(row + d, std::min(pool.dim - d, 16));
          squares[i] = fma(x, x, squares[i]);
        }
      }
      const Vec norms = sums(squares);
      most = max(most, norms), total = total + norms;
    }
  }
  const float all = sum(total), square = std::isnan(all) ? all : largest(most);  // NaN if any is
  return std::sqrt(static_cast<double>(square)) * (1.0 + 1e-5) + 4e-18;  // squares below 2^-126 may be lost
}

}  // namespace

void attend(const Pool& pool, int head, int heads, const Segment* segments, int64_t count, const Query* query,
            State* state, std::vector<float>* scratch) {
  switch (pool.dtype) {
    case kBf16: return attend_typed<bf16>(pool, head, heads, segments, count, query, state, scratch);
    case kHalf: return attend_typed<half>(pool, head, heads, segments, count, query, state, scratch);
    default: return attend_typed<float>(pool, head, heads, segments, count, query, state, scratch);
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

void State::merge(const State& other) {
  for (int g = 0; g < group; ++g) {
    const float most = std::max(top[g], other.top[g]);
    const float shift = most == -kInfinity ? 0.0f : most;
    const float a = top[g] == -kInfinity ? 0.0f : std::exp(top[g] - shift);
    const float b = other.top[g] == -kInfinity ? 0.0f : std::exp(other.top[g] - shift);
    float* o = out.data() + static_cast<int64_t>(g) * stride;
    const float* x = other.out.data() + static_cast<int64_t>(g) * other.stride;
    for (int d = 0; d < stride; d += 16) store(o + d, fma(load(x + d), set(b), load(o + d) * set(a)));
    total[g] = std::fma(total[g], a, other.total[g] * b);
    weight[g] = std::fma(weight[g], a, other.weight[g] * b);
    top[g] = most;
  }
}

namespace {

float element(const Work& work, int64_t at) {
  switch (work.query_dtype) {
    case kBf16: return to_float(static_cast<const bf16*>(work.query)[at]);
    case kHalf: return to_float(static_cast<const half*>(work.query)[at]);
    default: return static_cast<const float*>(work.query)[at];
  }
}

}  // namespace

void Query::load_tokens(const Work& work, int64_t token, int count, int head, const Pool& pool) {
  group = count * work.group, dim = pool.dim, stride = padded(dim, 32);
  scale = work.scale, softcap = work.softcap;
  exact_bf16 = pairs_used(work, pool);
  if (exact_bf16)
    bf16.assign(static_cast<size_t>(group) * stride, 0);
  else
    values.assign(static_cast<size_t>(group) * stride, 0.0f);
  for (int g = 0; g < group; ++g) {
    const int64_t at = (token + g / work.group) * work.query_token +
                       (static_cast<int64_t>(head) * work.group + g % work.group) * work.query_head;
    const int64_t to = static_cast<int64_t>(g) * stride;
    if (exact_bf16)
      std::memcpy(&bf16[to], static_cast<const simd::bf16*>(work.query) + at, 2 * dim);
    else
      for (int i = 0; i < dim; ++i) values[to + i] = element(work, at + i);
  }
}

void Query::load(const Work& work, int64_t token, int head, const Pool& pool) {
  load_tokens(work, token, 1, head, pool);
  values.assign(static_cast<size_t>(group) * stride, 0.0f);
  q16.resize(static_cast<size_t>(group) * stride);
  alpha.resize(group), norm.resize(group);
  for (int g = 0; g < group; ++g) {
    const int64_t at = token * work.query_token + (static_cast<int64_t>(head) * group + g) * work.query_head;
    float* q = values.data() + static_cast<int64_t>(g) * stride;
    for (int i = 0; i < dim; ++i) q[i] = element(work, at + i);
    Vec most = zero(), square = zero();
    for (int i = 0; i < stride; i += 16) {
      const Vec x = simd::load(q + i);
      most = max(most, max(x, zero() - x)), square = fma(x, x, square);
    }
    const double size = std::sqrt(static_cast<double>(sum(square))) * (1.0 + 1e-5) + 4e-18;
    norm[g] = std::fabs(static_cast<double>(scale)) * size;
    // below 1e-30 a query is as good as 0: with keys within float16 its scores are less than 1e-20
    const float top = largest(most);
    alpha[g] = top >= 1e-30f && top < kInfinity ? top / 32767.0f : 0.0f;
    const Vec inverse = set(alpha[g] > 0.0f ? 1.0f / alpha[g] : 0.0f);
    for (int i = 0; i < stride; i += 16)
      store_int16(q16.data() + static_cast<int64_t>(g) * stride + i, simd::load(q + i) * inverse);
  }
}

void write_out(const Work& w, const Pool& pool, int64_t token, int head, const State& state, int first, float* lses) {
  const bool pairs = pairs_used(w, pool);
  const int64_t heads = static_cast<int64_t>(pool.heads) * w.group;
  for (int g = 0; g < w.group; ++g) {
    const int64_t h = static_cast<int64_t>(head) * w.group + g;
    const float weight = state.weight[first + g];
    double lse = state.lse(first + g), share = weight == 0.0f ? 0.0 : 1.0 / weight;
    if (w.sinks != nullptr) {
      const double sink = w.sinks[h], top = std::max(lse, sink);
      const double joined = top == -kInfinity ? top : top + std::log(std::exp(lse - top) + std::exp(sink - top));
      share *= joined == -kInfinity ? 0.0 : std::exp(lse - joined);
      lse = joined;
    }
    const float* o = state.out.data() + static_cast<int64_t>(first + g) * state.stride;
    const int64_t at = (token * heads + h) * pool.dim;
    for (int d = 0; d < pool.dim; ++d) {
      const float x = o[channel(d, pairs)] * static_cast<float>(share);
      switch (w.query_dtype) {
        case kBf16: from_float(x, static_cast<bf16*>(w.out) + at + d); break;
        case kHalf: from_float(x, static_cast<half*>(w.out) + at + d); break;
        default: static_cast<float*>(w.out)[at + d] = x;
      }
    }
    if (lses != nullptr) lses[h] = static_cast<float>(lse);
  }
}

}  // namespace attention
