// Intervals on the log-mass of pages from their quantised keys alone; integer dot products, float32 softmax.
//
// Sixteen pages at a time, so that what is one number per page and head (sums over channels, the page's mass) is one
// lane of a vector; the products, which are most of the work, have one lane per token.
#include <algorithm>

#include "attention.h"

namespace attention {
namespace {

using namespace simd;

constexpr float kUnit = 5.9604645e-8f;  // 2^-24
constexpr float kLog2e = 1.44269504f;
constexpr float kChord = 0.0598f;          // ln of how far exp2_above is above, rounded up
constexpr float kChordRounding = 132.0f;   // how far below 2^x it may round, in units of 2^-24
constexpr float kFlushed = 2e-38f;         // a token's mass that exp makes 0, or exp2_above 2^-126
constexpr int kPages = 16;
constexpr int kAhead = 8;  // pages fetched before they are scored
constexpr int kWide = 288;  // channels, with room to write whole vectors

// Weights of a page as 16-bit factors: w << 7.
inline void spread(const uint8_t* w, int width, int16_t* out) {
#ifdef ENTROPIC_AVX512
  for (int d = 0; d < width; d += 32) {
    const int n = std::min(width - d, 32);
    const __mmask32 mask = n == 32 ? ~0u : (1u << n) - 1u;
    _mm512_store_si512(out + d, _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, w + d)), 7));
  }
#else
  for (int d = 0; d < width; ++d) out[d] = static_cast<int16_t>(w[d] << 7);
#endif
}

// qw = round(q16 w / 256), zero past dim; its plain and absolute sums, spread over the lanes.
template <bool Sums>
inline void weigh(const int16_t* w, const int16_t* q16, int width, int16_t* qw, Vec* plain, Vec* absolute) {
#ifdef ENTROPIC_AVX512
  const Ints ones{_mm512_set1_epi16(1)};
  Ints s = int_zero(), a = s;
  for (int d = 0; d < width; d += 32) {
    const __m512i x = _mm512_mulhrs_epi16(_mm512_loadu_si512(q16 + d), _mm512_load_si512(w + d));
    _mm512_store_si512(qw + d, x);
    if (Sums) s = pairs_dot(s, {x}, ones), a = pairs_dot(a, {_mm512_abs_epi16(x)}, ones);
  }
  if (Sums) *plain = to_floats(s), *absolute = to_floats(a);
#else
  int32_t s = 0, a = 0;
  for (int d = 0; d < width; ++d) {
    qw[d] = static_cast<int16_t>((static_cast<int32_t>(q16[d]) * w[d] + 16384) >> 15);
    s += qw[d], a += qw[d] < 0 ? -qw[d] : qw[d];
  }
  *plain = keep_first(set(static_cast<float>(s)), 1, 0.0f);
  *absolute = keep_first(set(static_cast<float>(a)), 1, 0.0f);
#endif
}

// Two chains of additions per head: one alone would wait for each product.
template <int G>
inline void plane_dots(const void* plane, int groups, const int16_t (*qw)[kWide], Ints acc[G]) {
  const uint8_t* p = static_cast<const uint8_t*>(plane);
  Ints more[G];
  for (int g = 0; g < G; ++g) acc[g] = more[g] = int_zero();
  for (int d8 = 0; d8 < groups; ++d8) {
    const Ints x = load_ints(p + 64 * d8);
    const Ints n0 = nibbles<0>(x), n1 = nibbles<1>(x), n2 = nibbles<2>(x), n3 = nibbles<3>(x);
    for (int g = 0; g < G; ++g) {
      const int16_t* q = qw[g] + 8 * d8;
      acc[g] = pairs_dot(acc[g], n0, set_pair(q));
      more[g] = pairs_dot(more[g], n1, set_pair(q + 2));
      acc[g] = pairs_dot(acc[g], n2, set_pair(q + 4));
      more[g] = pairs_dot(more[g], n3, set_pair(q + 6));
    }
  }
  for (int g = 0; g < G; ++g) acc[g] = acc[g] + more[g];
}

// Up to 16 pages, heads g0 .. g0 + G - 1. `which` maps to positions in `pages` and in the bounds' arrays.
template <int G, bool Fine>
void score_batch(const Pool& pool, const Record& shape, int head, const int64_t* pages, const int32_t* which, int n,
                 int n_next, const Query& query, int g0, const float* reference, Bounds* b, Ahead* ahead) {
  alignas(64) int16_t spread_weight[kWide], qw[G][kWide];
  alignas(64) float part[G][3][kPages][16], factor[G][kPages], offset[G][kPages], mass[G][kPages][16];
  const int64_t low_size = shape.plane() / 4;
  const auto cell = [&](int i) { return pages[which[i]] * pool.heads + head; };
  for (int i = 0; i < n; ++i) {
    const int64_t p = which[i];
    const uint8_t* record = pool.record + cell(i) * pool.record_bytes;
    const uint8_t* plane = Fine ? reinterpret_cast<const uint8_t*>(pool.low + cell(i) * low_size) : record + shape.high();
    const char* later = nullptr;
    if (g0 == 0 && i + kAhead < n + n_next) {
      later = Fine ? reinterpret_cast<const char*>(pool.low + cell(i + kAhead) * low_size)
                   : reinterpret_cast<const char*>(pool.record + cell(i + kAhead) * pool.record_bytes);
    }
    const int64_t later_bytes = later == nullptr ? 0 : Fine ? shape.plane() : pool.record_bytes;
    for (int64_t at = 0; at < later_bytes; at += 64) prefetch(later + at);
    if (Fine && g0 == 0) ahead->some();
    spread(record + shape.weight(), shape.width, spread_weight);
    Vec centre[G];
    for (int g = 0; g < G; ++g) {
      Vec s, a;
      weigh<!Fine>(spread_weight, query.q16.data() + static_cast<int64_t>(g0 + g) * query.stride, shape.width, qw[g], &s, &a);
      if (!Fine) store(part[g][0][i], s), store(part[g][1][i], a), centre[g] = zero();
    }
    if (!Fine) {
      const half* m = reinterpret_cast<const half*>(record + shape.centre());
      for (int d = 0; d < shape.width; d += 16) {
        const Vec x = shape.width - d >= 16 ? load(m + d) : load(m + d, shape.width - d);
        for (int g = 0; g < G; ++g)
          centre[g] = fma(load(query.values.data() + static_cast<int64_t>(g0 + g) * query.stride + d), x, centre[g]);
      }
      for (int g = 0; g < G; ++g) store(part[g][2][i], centre[g]);
      float scalars[4];
      std::memcpy(scalars, record, 16);
      b->step[p] = scalars[0], b->error[p] = scalars[1], b->norm[p] = scalars[2];
    }
    for (int block = 0; block < shape.blocks; ++block) {
      Ints acc[G];
      plane_dots<G>(plane + static_cast<int64_t>(block) * shape.groups * 64, shape.groups, qw, acc);
      for (int g = 0; g < G; ++g) {
        int32_t* dots = b->dots.data() + ((p * query.group + g0 + g) * shape.blocks + block) * 16;
        store_ints(dots, Fine ? shifted_sum(load_ints(dots), acc[g]) : acc[g]);
      }
    }
  }
  const int live = n;
  for (int g = 0; g < G; ++g) {  // one lane per page
    const int64_t row = (g0 + g) * b->capacity;
    const float unit = 256.0f * query.alpha[g0 + g];
    if (!Fine) {
      float* into[3] = {b->weight_sum.data() + row, b->weight_abs.data() + row, b->centre.data() + row};
      for (int kind = 0; kind < 3; ++kind) {
        for (int i = live; i < kPages; ++i) store(part[g][kind][i], zero());
        Vec r[16];
        for (int i = 0; i < 16; ++i) r[i] = load(part[g][kind][i]);
        alignas(64) float x[16];
        store(x, sums(r));
        for (int i = 0; i < live; ++i) into[kind][which[i]] = x[i];
      }
    }
    for (int i = 0; i < live; ++i) {
      const int64_t p = which[i];
      const float u = unit * b->step[p], sum = b->weight_sum[row + p];
      factor[g][i] = query.scale * (Fine ? u : 16.0f * u);
      offset[g][i] = query.scale * (b->centre[row + p] - u * (Fine ? 128.0f : 120.5f) * sum);
    }
  }
  for (int i = 0; i < live; ++i) {
    for (int g = 0; g < G; ++g) {
      const int32_t* dots = b->dots.data() + (static_cast<int64_t>(which[i]) * query.group + g0 + g) * shape.blocks * 16;
      Vec total = zero();
      for (int block = 0; block < shape.blocks; ++block) {
        Vec s = fma(to_floats(load_ints(dots + 16 * block)), set(factor[g][i]), set(offset[g][i]));
        if (query.softcap > 0) s = cap(s, query.softcap);
        s = s - set(reference[g0 + g]);
        s = Fine ? exp(s) : exp2_above(s * set(kLog2e));
        const int tokens = pool.page - 16 * block;
        total = total + (tokens < 16 ? keep_first(s, tokens, 0.0f) : s);
      }
      store(mass[g][i], total);
    }
  }
  for (int g = 0; g < G; ++g) {
    Vec r[16];
    for (int i = 0; i < 16; ++i) r[i] = i < live ? load(mass[g][i]) : zero();
    alignas(64) float x[16];
    store(x, sums(r));
    for (int i = 0; i < live; ++i) b->mass[(g0 + g) * b->capacity + which[i]] = x[i];
  }
}

template <bool Fine>
void score(const Pool& pool, int head, const int64_t* pages, const std::vector<int32_t>& which, const Query& query,
           const float* reference, Bounds* b, Ahead* ahead) {
  const Record shape(pool);
  const int total = static_cast<int>(which.size());
  for (int i = 0; i < total; i += kPages) {
    const int n = std::min(kPages, total - i), next = std::min(kAhead, total - i - n);
    const int32_t* some = which.data() + i;
    for (int g = 0; g < query.group; g += kBlock) {
      switch (std::min(query.group - g, kBlock)) {
        case 1: score_batch<1, Fine>(pool, shape, head, pages, some, n, next, query, g, reference, b, ahead); break;
        case 2: score_batch<2, Fine>(pool, shape, head, pages, some, n, next, query, g, reference, b, ahead); break;
        case 3: score_batch<3, Fine>(pool, shape, head, pages, some, n, next, query, g, reference, b, ahead); break;
        default: score_batch<4, Fine>(pool, shape, head, pages, some, n, next, query, g, reference, b, ahead);
      }
    }
  }
}

// upper and lower from mass and the width of its interval; `unread` is 7.5 after the high plane, 0 after both, and
// `above` how far (in nats) the mass may lie above what it stands for.
void widen(const Pool& pool, const Query& query, const float* reference, float unread, float above, Bounds* b) {
  const float dim = static_cast<float>(pool.dim), terms = static_cast<float>(padded(pool.page, 16));
  const float below = above > 0.0f ? kChordRounding : 0.0f, flushed = terms * kFlushed;
  const float unscaled = 1.0f / std::min(std::fabs(query.scale), 1.0f);
  for (int g = 0; g < query.group; ++g) {
    const float unit = 256.0f * query.alpha[g] * std::fabs(query.scale);
    const float norm_q = static_cast<float>(query.norm[g]), rounding = norm_q * (dim + 32.0f) * kUnit * 1.01f;
    const float always = 8.0f * kUnit * std::fabs(reference[g]) + (terms + 24.0f + below) * kUnit + 8.0f * kUnit * query.softcap;
    const int64_t row = g * b->capacity;
    for (int64_t p = 0; p < b->capacity; p += 16) {
      const Vec a = load(b->step.data() + p), e = load(b->error.data() + p), norm = load(b->norm.data() + p);
      const Vec reach = (load(b->weight_abs.data() + row + p) + set(1.02f * dim)) * fma(set(unread), a, e);
      const Vec rounded = a * set(1.02f * 128.0f * dim);
      Vec delta = (reach + rounded) * set(unit * (1.0f + 32.0f * kUnit));
      delta = fma(norm, set(rounding), delta) + set(always);
      const Vec mass = load(b->mass.data() + row + p), most = mass + set(flushed);
      const Vec least = max(mass - set(flushed), zero());
      alignas(64) float u[16], l[16], reach_most[16];
      store(u, most * exp(delta)), store(l, least * exp(zero() - delta - set(above)));
      store(reach_most, norm * set(norm_q * unscaled));
      for (int i = 0; i < 16; ++i)
        if (!(u[i] <= std::numeric_limits<float>::max() && reach_most[i] < 1e30f)) u[i] = kInfinity, l[i] = 0.0f;
      std::memcpy(b->upper.data() + row + p, u, 64);
      std::memcpy(b->lower.data() + row + p, l, 64);
    }
  }
}

}  // namespace

void Bounds::resize(int group, int64_t n, int blocks) {
  count = n, capacity = padded(static_cast<int>(n), 16);
  const size_t all = static_cast<size_t>(capacity) * group;
  for (auto* x : {&step, &error, &norm}) x->assign(capacity, 0.0f);
  for (auto* x : {&centre, &weight_sum, &weight_abs, &mass, &upper, &lower}) x->assign(all, 0.0f);
  if (dots.size() < all * blocks * 16) dots.resize(all * blocks * 16);
}

void score_high(const Pool& pool, int head, const int64_t* pages, const std::vector<int32_t>& which, const Query& query,
                const float* reference, Bounds* b) {
  score<false>(pool, head, pages, which, query, reference, b, nullptr);
  widen(pool, query, reference, 7.5f, kChord, b);
}

void score_low(const Pool& pool, int head, const int64_t* pages, const std::vector<int32_t>& which, const Query& query,
               const float* reference, Bounds* b, Ahead* ahead) {
  score<true>(pool, head, pages, which, query, reference, b, ahead);
  widen(pool, query, reference, 0.0f, 0.0f, b);
}

}  // namespace attention
