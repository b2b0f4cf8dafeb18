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
constexpr int kPages = 16;
constexpr int kAhead = 2;    // pages fetched before they are scored
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

// qw = round(q16 w / 256), zero past dim; returns its absolute sum, spread over the lanes.
inline Vec weigh(const int16_t* w, const int16_t* q16, int width, int16_t* qw) {
#ifdef ENTROPIC_AVX512
  const Ints ones{_mm512_set1_epi16(1)};
  Ints a = int_zero();
  for (int d = 0; d < width; d += 32) {
    const __m512i x = _mm512_mulhrs_epi16(_mm512_loadu_si512(q16 + d), _mm512_load_si512(w + d));
    _mm512_store_si512(qw + d, x);
    a = pairs_dot(a, {_mm512_abs_epi16(x)}, ones);
  }
  return to_floats(a);
#else
  int32_t a = 0;
  for (int d = 0; d < width; ++d) {
    qw[d] = static_cast<int16_t>((static_cast<int32_t>(q16[d]) * w[d] + 16384) >> 15);
    a += qw[d] < 0 ? -qw[d] : qw[d];
  }
  return keep_first(set(static_cast<float>(a)), 1, 0.0f);
#endif
}

// Sixteen tokens against G queries: codes (width / 2, 16, 2).
template <int G>
inline void code_dots(const int8_t* codes, int width, const int16_t (*qw)[kWide], Ints acc[G]) {
  for (int g = 0; g < G; ++g) acc[g] = int_zero();
  for (int d = 0; d < width; d += 2) {
    const Ints x = load_bytes(codes + 16 * d);
    for (int g = 0; g < G; ++g) acc[g] = pairs_dot(acc[g], x, set_pair(qw[g] + d));
  }
}

inline Vec capped(Vec s, float limit) {
  alignas(64) float x[16];
  store(x, s);
  for (float& y : x) y = limit * std::tanh(y / limit);
  return load(x);
}

// Pages p0 .. p0 + n - 1 (at most 16) of the list, heads g0 .. g0 + G - 1.
template <int G>
void score_batch(const Pool& pool, const Record& shape, int head, const int64_t* pages, int64_t p0, int n,
                 const Query& query, int g0, const float* reference, Bounds* b) {
  alignas(64) int16_t weight[kWide], qw[G][kWide];
  alignas(64) float part[G][2][kPages][16], mass[G][kPages][16];
  int32_t* dots = b->dots.data();
  for (int i = 0; i < n; ++i) {
    const int64_t p = p0 + i;
    const uint8_t* record = pool.record + (pages[p] * pool.heads + head) * pool.record_bytes;
    if (g0 == 0 && p + kAhead < b->count) {
      const char* later = reinterpret_cast<const char*>(pool.record + (pages[p + kAhead] * pool.heads + head) * pool.record_bytes);
      for (int64_t at = 0; at < pool.record_bytes; at += 64) prefetch(later + at);
    }
    spread(record + shape.weight(), shape.width, weight);
    Vec centre[G];
    for (int g = 0; g < G; ++g) {
      const int16_t* q16 = query.q16.data() + static_cast<int64_t>(g0 + g) * query.stride;
      store(part[g][0][i], weigh(weight, q16, shape.width, qw[g]));
      centre[g] = zero();
    }
    const half* m = reinterpret_cast<const half*>(record + shape.centre());
    for (int d = 0; d < shape.width; d += 16) {
      const Vec x = shape.width - d >= 16 ? load(m + d) : load(m + d, shape.width - d);
      for (int g = 0; g < G; ++g)
        centre[g] = fma(load(query.values.data() + static_cast<int64_t>(g0 + g) * query.stride + d), x, centre[g]);
    }
    for (int g = 0; g < G; ++g) store(part[g][1][i], centre[g]);
    float scalars[4];
    std::memcpy(scalars, record, 16);
    b->step[p] = scalars[0], b->error[p] = scalars[1], b->norm[p] = scalars[2];
    const int8_t* codes = reinterpret_cast<const int8_t*>(record + shape.codes());
    for (int block = 0; block < shape.blocks; ++block) {
      Ints acc[G];
      code_dots<G>(codes + 16 * block * shape.width, shape.width, qw, acc);
      for (int g = 0; g < G; ++g) store_ints(dots + ((i * G + g) * shape.blocks + block) * 16, acc[g]);
    }
  }
  for (int g = 0; g < G; ++g) {  // one lane per page
    const int64_t at = (g0 + g) * b->capacity + p0;
    for (int kind = 0; kind < 2; ++kind) {
      Vec r[16];
      for (int i = 0; i < 16; ++i) r[i] = i < n ? load(part[g][kind][i]) : zero();
      store((kind == 0 ? b->weight : b->centre).data() + at, sums(r));
    }
    alignas(64) float factor[16], offset[16];
    store(factor, load(b->step.data() + p0) * set(query.scale * 256.0f * query.alpha[g0 + g]));
    store(offset, load(b->centre.data() + at) * set(query.scale));
    for (int i = 0; i < n; ++i) {
      Vec total = zero();
      for (int block = 0; block < shape.blocks; ++block) {
        Vec s = fma(to_floats(load_ints(dots + ((i * G + g) * shape.blocks + block) * 16)), set(factor[i]), set(offset[i]));
        if (query.softcap > 0) s = capped(s, query.softcap);
        s = exp(s - set(reference[g0 + g]));
        const int tokens = pool.page - 16 * block;
        total = total + (tokens < 16 ? keep_first(s, tokens, 0.0f) : s);
      }
      store(mass[g][i], total);
    }
    Vec r[16];
    for (int i = 0; i < 16; ++i) r[i] = i < n ? load(mass[g][i]) : zero();
    store(b->mass.data() + at, sums(r));
  }
}

// upper and lower from mass and the width of its interval.
void widen(const Pool& pool, const Query& query, const float* reference, Bounds* b) {
  const float dim = static_cast<float>(pool.dim), terms = static_cast<float>(padded(pool.page, 16));
  for (int g = 0; g < query.group; ++g) {
    const float unit = 256.0f * query.alpha[g] * std::fabs(query.scale);
    const float norm_q = static_cast<float>(query.norm[g]), rounding = norm_q * (dim + 32.0f) * kUnit * 1.01f;
    const float always = 8.0f * kUnit * std::fabs(reference[g]) + (terms + 24.0f) * kUnit + 8.0f * kUnit * query.softcap;
    const int64_t row = g * b->capacity;
    for (int64_t p = 0; p < b->capacity; p += 16) {
      const Vec a = load(b->step.data() + p), e = load(b->error.data() + p), norm = load(b->norm.data() + p);
      const Vec reach = (load(b->weight.data() + row + p) + set(1.02f * dim)) * e;
      const Vec rounded = a * set(1.02f * 128.0f * dim);
      Vec delta = (reach + rounded) * set(unit * (1.0f + 32.0f * kUnit));
      delta = fma(norm, set(rounding), delta) + set(always);
      const Vec mass = load(b->mass.data() + row + p) + set(1e-35f);
      alignas(64) float u[16], l[16], reach_most[16];
      store(u, mass * exp(delta)), store(l, mass * exp(zero() - delta)), store(reach_most, norm * set(norm_q));
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
  for (auto* x : {&centre, &weight, &mass, &upper, &lower}) x->assign(all, 0.0f);
  dots.resize(static_cast<size_t>(kPages) * kBlock * blocks * 16);
}

void score(const Pool& pool, int head, const int64_t* pages, const Query& query, const float* reference, Bounds* b) {
  const Record shape(pool);
  for (int64_t p = 0; p < b->count; p += kPages) {
    const int n = static_cast<int>(std::min<int64_t>(kPages, b->count - p));
    for (int g = 0; g < query.group; g += kBlock) {
      switch (std::min(query.group - g, kBlock)) {
        case 1: score_batch<1>(pool, shape, head, pages, p, n, query, g, reference, b); break;
        case 2: score_batch<2>(pool, shape, head, pages, p, n, query, g, reference, b); break;
        case 3: score_batch<3>(pool, shape, head, pages, p, n, query, g, reference, b); break;
        default: score_batch<4>(pool, shape, head, pages, p, n, query, g, reference, b);
      }
    }
  }
  widen(pool, query, reference, b);
}

}  // namespace attention
