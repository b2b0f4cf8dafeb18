// Intervals on the log-mass of pages from their quantised keys alone; integer dot products, float32 softmax.
//
// Sixteen pages at a time, so that what is one number per page and head (sums over channels, the page's mass) is one
// lane of a vector; the products, which are most of the work, have one lane per token.
#include <algorithm>
#include <type_traits>

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
  if (Sums) *plain = keep_first(set(static_cast<float>(s)), 1, 0.0f);
  if (Sums) *absolute = keep_first(set(static_cast<float>(a)), 1, 0.0f);
#endif
}

// Products of B blocks of a plane with G heads, sixteen tokens each. Blocks share what is broadcast, as loads are what
// limits this loop; two chains of additions each, as one would wait for every product.
template <int G, int B>
inline void plane_dots(const uint8_t* plane, int groups, const int16_t (*qw)[kWide], Ints out[B][G]) {
  Ints even[B][G], odd[B][G];
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) even[b][g] = odd[b][g] = int_zero();
  for (int d8 = 0; d8 < groups; ++d8) {
    Ints n[B][4];
    for (int b = 0; b < B; ++b) {
      const Ints x = load_ints(plane + 64 * (b * groups + d8));
      n[b][0] = nibbles<0>(x), n[b][1] = nibbles<1>(x), n[b][2] = nibbles<2>(x), n[b][3] = nibbles<3>(x);
    }
    for (int g = 0; g < G; ++g) {
      const int16_t* q = qw[g] + 8 * d8;
      const Ints q0 = set_pair(q), q1 = set_pair(q + 2);
      for (int b = 0; b < B; ++b) even[b][g] = pairs_dot(even[b][g], n[b][0], q0), odd[b][g] = pairs_dot(odd[b][g], n[b][1], q1);
      const Ints q2 = set_pair(q + 4), q3 = set_pair(q + 6);
      for (int b = 0; b < B; ++b) even[b][g] = pairs_dot(even[b][g], n[b][2], q2), odd[b][g] = pairs_dot(odd[b][g], n[b][3], q3);
    }
  }
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) out[b][g] = even[b][g] + odd[b][g];
}

// done(block, head, products) for all blocks of a plane
template <int G, class Done>
inline void page_dots(const uint8_t* plane, const Record& shape, const int16_t (*qw)[kWide], Done done) {
  for (int block = 0; block < shape.blocks;) {
    const uint8_t* at = plane + static_cast<int64_t>(block) * shape.groups * 64;
    if (block + 2 <= shape.blocks) {
      Ints acc[2][G];
      plane_dots<G, 2>(at, shape.groups, qw, acc);
      for (int g = 0; g < G; ++g) done(block, g, acc[0][g]), done(block + 1, g, acc[1][g]);
      block += 2;
    } else {
      Ints acc[1][G];
      plane_dots<G, 1>(at, shape.groups, qw, acc);
      for (int g = 0; g < G; ++g) done(block, g, acc[0][g]);
      block += 1;
    }
  }
}

// Sums over the lanes of sixteen vectors, of which the first `n` are there.
inline Vec lane_sums(const float (*from)[16], int n) {
  Vec r[16];
  for (int i = 0; i < 16; ++i) r[i] = i < n ? load(from[i]) : zero();
  return sums(r);
}

// The masses of n <= 16 pages for G heads: factor dots + offset are scores; `out` is one vector per head.
template <bool Low, int G>
inline void masses(const Pool& pool, const Record& shape, const Query& query, int n, const int32_t* dots,
                   const float (*factor)[kPages], const float (*offset)[kPages], const float* reference, Vec* out) {
  alignas(64) float mass[G][kPages][16];
  for (int i = 0; i < n; ++i) {
    for (int g = 0; g < G; ++g) {
      const int32_t* from = dots + (i * query.group + g) * shape.blocks * 16;
      Vec total = zero();
      for (int block = 0; block < shape.blocks; ++block) {
        Vec s = fma(to_floats(load_ints(from + 16 * block)), set(factor[g][i]), set(offset[g][i]));
        if (query.softcap > 0) s = cap(s, query.softcap);
        s = s - set(reference[g]);
        s = Low ? exp(s) : exp2_above(s * set(kLog2e));
        const int tokens = pool.page - 16 * block;
        total = total + (tokens < 16 ? keep_first(s, tokens, 0.0f) : s);
      }
      store(mass[g][i], total);
    }
  }
  for (int g = 0; g < G; ++g) out[g] = lane_sums(mass[g], n);
}

// Heads g0 .. g0 + G - 1 and pages from .. from + n - 1, sixteen at most, from the high plane alone.
template <int G>
void high_batch(const Pool& pool, const Record& shape, int head, const int64_t* pages, int64_t from, int n,
                int64_t count, const Query& query, int g0, const float* reference, Bounds* b) {
  alignas(64) int16_t weight[kWide], qw[G][kWide];
  alignas(64) float part[3][G][kPages][16], scalar[3][kPages] = {}, factor[G][kPages], offset[G][kPages];
  const auto record_of = [&](int64_t p) { return pool.record + (pages[p] * pool.heads + head) * pool.record_bytes; };
  for (int i = 0; i < n; ++i) {
    const uint8_t* record = record_of(from + i);
    if (g0 == 0 && from + i + kAhead < count) {
      const uint8_t* later = record_of(from + i + kAhead);
      for (int64_t at = 0; at < pool.record_bytes; at += 64) prefetch(later + at);
    }
    for (int k = 0; k < 3; ++k) std::memcpy(&scalar[k][i], record + 4 * k, 4);  // step, error, norm
    spread(record + shape.weight(), shape.width, weight);
    Vec centre[G];
    for (int g = 0; g < G; ++g) {
      Vec plain, absolute;
      weigh<true>(weight, query.q16.data() + (g0 + g) * query.stride, shape.width, qw[g], &plain, &absolute);
      store(part[0][g][i], plain), store(part[1][g][i], absolute), centre[g] = zero();
    }
    const half* m = reinterpret_cast<const half*>(record + shape.centre());
    for (int d = 0; d < shape.width; d += 16) {
      const Vec x = shape.width - d >= 16 ? load(m + d) : load(m + d, shape.width - d);
      for (int g = 0; g < G; ++g) centre[g] = fma(load(query.values.data() + (g0 + g) * query.stride + d), x, centre[g]);
    }
    for (int g = 0; g < G; ++g) store(part[2][g][i], centre[g]);
    int32_t* dots = b->dots.data() + ((from + i) * query.group + g0) * shape.blocks * 16;
    page_dots<G>(record + shape.high(), shape, qw, [&](int block, int g, Ints sum) {
      store_ints(dots + (g * shape.blocks + block) * 16, sum);
    });
  }
  const Vec step = load(scalar[0]);
  store(b->step.data() + from, step), store(b->error.data() + from, load(scalar[1]));
  store(b->norm.data() + from, load(scalar[2]));
  for (int g = 0; g < G; ++g) {  // one lane per page
    const int64_t at = (g0 + g) * b->capacity + from;
    const Vec plain = lane_sums(part[0][g], n), centre = lane_sums(part[2][g], n);
    store(b->centre.data() + at, centre), store(b->weight_sum.data() + at, plain);
    store(b->weight_abs.data() + at, lane_sums(part[1][g], n));
    const Vec u = set(256.0f * query.alpha[g0 + g]) * step;
    store(factor[g], set(query.scale) * (set(16.0f) * u));
    store(offset[g], set(query.scale) * (centre - u * set(120.5f) * plain));
  }
  Vec mass[G];
  masses<false, G>(pool, shape, query, n, b->dots.data() + (from * query.group + g0) * shape.blocks * 16, factor, offset,
                  reference + g0, mass);
  for (int g = 0; g < G; ++g) store(b->mass.data() + (g0 + g) * b->capacity + from, mass[g]);
}

// As high_batch from both planes; page i of `b` is page which[i] of the list and of `high`.
template <int G>
void low_batch(const Pool& pool, const Record& shape, int head, const int64_t* pages, const int32_t* which,
               int64_t from, int n, int64_t count, const Query& query, int g0, const float* reference, const Bounds& high,
               Ahead* ahead, Bounds* b) {
  alignas(64) int16_t weight[kWide], qw[G][kWide];
  alignas(64) float factor[G][kPages], offset[G][kPages];
  const int64_t low_size = shape.plane() / 4;
  const auto cell = [&](int64_t i) { return pages[which[i]] * pool.heads + head; };
  for (int i = 0; i < n; ++i) {
    const uint8_t* record = pool.record + cell(from + i) * pool.record_bytes;
    if (g0 == 0) {
      if (from + i + kAhead < count) {
        const uint32_t* later = pool.low + cell(from + i + kAhead) * low_size;
        for (int64_t at = 0; at < low_size; at += 16) prefetch(later + at);
      }
      ahead->some();
    }
    spread(record + shape.weight(), shape.width, weight);
    for (int g = 0; g < G; ++g)
      weigh<false>(weight, query.q16.data() + (g0 + g) * query.stride, shape.width, qw[g], nullptr, nullptr);
    const int64_t each = static_cast<int64_t>(shape.blocks) * 16;
    int32_t* dots = b->dots.data() + ((from + i) * query.group + g0) * each;
    const int32_t* before = high.dots.data() + (which[from + i] * query.group + g0) * each;
    page_dots<G>(reinterpret_cast<const uint8_t*>(pool.low + cell(from + i) * low_size), shape, qw,
                 [&](int block, int g, Ints sum) {
                   const int64_t at = g * each + block * 16;
                   store_ints(dots + at, shifted_sum(load_ints(before + at), sum));
                 });
  }
  for (int g = 0; g < G; ++g) {
    const int64_t at = (g0 + g) * b->capacity + from;
    const Vec u = set(256.0f * query.alpha[g0 + g]) * load(b->step.data() + from);
    store(factor[g], set(query.scale) * u);
    store(offset[g], set(query.scale) * (load(b->centre.data() + at) - u * set(128.0f) * load(b->weight_sum.data() + at)));
  }
  Vec mass[G];
  masses<true, G>(pool, shape, query, n, b->dots.data() + (from * query.group + g0) * shape.blocks * 16, factor, offset,
                 reference + g0, mass);
  for (int g = 0; g < G; ++g) store(b->mass.data() + (g0 + g) * b->capacity + from, mass[g]);
}

// body(heads g0 .. g0 + G - 1 as integral constant G, g0) for all heads, kBlock at a time
template <class Body>
void each_block(int group, Body body) {
  for (int g = 0; g < group; g += kBlock) {
    switch (std::min(group - g, kBlock)) {
      case 1: body(std::integral_constant<int, 1>(), g); break;
      case 2: body(std::integral_constant<int, 2>(), g); break;
      case 3: body(std::integral_constant<int, 3>(), g); break;
      default: body(std::integral_constant<int, 4>(), g);
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

void score_high(const Pool& pool, int head, const std::vector<int64_t>& pages, const Query& query,
                const float* reference, Bounds* b) {
  const Record shape(pool);
  const int64_t count = static_cast<int64_t>(pages.size());
  b->resize(query.group, count, shape.blocks);
  for (int64_t i = 0; i < count; i += kPages)
    each_block(query.group, [&](auto block, int g0) {
      high_batch<block.value>(pool, shape, head, pages.data(), i, static_cast<int>(std::min<int64_t>(kPages, count - i)),
                              count, query, g0, reference, b);
    });
  widen(pool, query, reference, 7.5f, kChord, b);
}

void Bounds::choose(const Bounds& from, const std::vector<int32_t>& which, int group, int blocks) {
  resize(group, static_cast<int64_t>(which.size()), blocks);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t p = which[i];
    step[i] = from.step[p], error[i] = from.error[p], norm[i] = from.norm[p];
    for (int g = 0; g < group; ++g) {
      const int64_t to = g * capacity + i, at = g * from.capacity + p;
      centre[to] = from.centre[at], mass[to] = from.mass[at];
      weight_sum[to] = from.weight_sum[at], weight_abs[to] = from.weight_abs[at];
    }
  }
}

void score_low(const Pool& pool, int head, const std::vector<int64_t>& pages, const std::vector<int32_t>& which,
               const Query& query, const float* reference, const Bounds& high, Ahead* ahead, Bounds* b) {
  const Record shape(pool);
  for (int64_t i = 0; i < b->count; i += kPages)
    each_block(query.group, [&](auto block, int g0) {
      low_batch<block.value>(pool, shape, head, pages.data(), which.data(), i,
                             static_cast<int>(std::min<int64_t>(kPages, b->count - i)), b->count, query, g0, reference,
                             high, ahead, b);
    });
  widen(pool, query, reference, 0.0f, 0.0f, b);
}

}  // namespace attention
