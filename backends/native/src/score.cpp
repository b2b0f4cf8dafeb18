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
constexpr int kAhead = 6;  // pages fetched before they are scored
constexpr int kWide = 288;  // channels, with room to write whole vectors

// Short loops over a page must be unrolled: what follows is compiled for the usual records and group sizes (`specialised`).
#define ENTROPIC_INLINE inline __attribute__((always_inline))

// Weights of a page as 16-bit factors: w << 7.
ENTROPIC_INLINE void spread(const uint8_t* w, int width, int16_t* out) {
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
ENTROPIC_INLINE void weigh(const int16_t* w, const int16_t* q16, int width, int16_t* qw, Vec* plain, Vec* absolute) {
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
ENTROPIC_INLINE void plane_dots(const uint8_t* plane, int groups, const int16_t (*qw)[kWide], const char* later,
                                Ints out[B][G]) {
  Ints even[B][G], odd[B][G];
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) even[b][g] = odd[b][g] = int_zero();
  for (int d8 = 0; d8 < groups; ++d8) {
    Ints n[B][4];
    for (int b = 0; b < B; ++b) {
      if (later != nullptr) prefetch(later + 64 * (b * groups + d8));
      const Ints x = loaded(load_ints(plane + 64 * (b * groups + d8)));
      n[b][0] = nibbles<0>(x), n[b][1] = nibbles<1>(x), n[b][2] = nibbles<2>(x), n[b][3] = nibbles<3>(x);
    }
    for (int g = 0; g < G; ++g) {
      const int16_t* q = qw[g] + 8 * d8;
      const Ints q0 = set_pair(q), q1 = set_pair(q + 2);
      for (int b = 0; b < B; ++b) {
        even[b][g] = pairs_dot(even[b][g], n[b][0], q0);
        odd[b][g] = pairs_dot(odd[b][g], n[b][1], q1);
      }
      const Ints q2 = set_pair(q + 4), q3 = set_pair(q + 6);
      for (int b = 0; b < B; ++b) {
        even[b][g] = pairs_dot(even[b][g], n[b][2], q2);
        odd[b][g] = pairs_dot(odd[b][g], n[b][3], q3);
      }
    }
  }
  for (int b = 0; b < B; ++b)
    for (int g = 0; g < G; ++g) out[b][g] = even[b][g] + odd[b][g];
}

// done(block, head, products) for all blocks of a plane
template <int G, class Done>
ENTROPIC_INLINE void page_dots(const uint8_t* plane, const Record& shape, const int16_t (*qw)[kWide], const char* later,
                               Done done) {
  for (int block = 0; block < shape.blocks;) {
    const uint8_t* at = plane + static_cast<int64_t>(block) * shape.groups * 64;
    const char* then = later == nullptr ? nullptr : later + static_cast<int64_t>(block) * shape.groups * 64;
    if (block + 2 <= shape.blocks) {
      Ints acc[2][G];
      plane_dots<G, 2>(at, shape.groups, qw, then, acc);
      for (int g = 0; g < G; ++g) done(block, g, acc[0][g]), done(block + 1, g, acc[1][g]);
      block += 2;
    } else {
      Ints acc[1][G];
      plane_dots<G, 1>(at, shape.groups, qw, then, acc);
      for (int g = 0; g < G; ++g) done(block, g, acc[0][g]);
      block += 1;
    }
  }
}

// Sums over the lanes of sixteen vectors, of which the first `n` are there.
ENTROPIC_INLINE Vec lane_sums(const float (*from)[16], int n) {
  Vec r[16];
  for (int i = 0; i < 16; ++i) r[i] = i < n ? load(from[i]) : zero();
  return sums(r);
}

// The masses of n <= 16 pages for G heads: factor dots + offset are scores; `out` is one vector per head.
template <bool Low, bool Capped, int G>
ENTROPIC_INLINE void masses(const Record& shape, int page, float softcap, int n, const int32_t* dots, int64_t stride,
                            Vec (&factor)[G], Vec (&offset)[G], const float* reference, Vec* out) {
  alignas(64) float mass[G][kPages][16], f[G][kPages], o[G][kPages];
  for (int g = 0; g < G; ++g) {
    if (!Capped) offset[g] = offset[g] - set(reference[g]);
    if (!Capped && !Low) factor[g] = factor[g] * set(kLog2e), offset[g] = offset[g] * set(kLog2e);
    store(f[g], factor[g]), store(o[g], offset[g]);
  }
  for (int i = 0; i < n; ++i) {
    for (int g = 0; g < G; ++g) {
      const int32_t* from = dots + i * stride + g * shape.blocks * 16;
      Vec total = zero();
      for (int block = 0; block < shape.blocks; ++block) {
        Vec s = fma(to_floats(load_ints(from + 16 * block)), set(f[g][i]), set(o[g][i]));
        if (Capped) s = cap(s, softcap) - set(reference[g]);
        if (Capped && !Low) s = s * set(kLog2e);
        s = Low ? exp(s) : exp2_above(s);
        const int tokens = page - 16 * block;
        total = total + (tokens < 16 ? keep_first(s, tokens, 0.0f) : s);
      }
      store(mass[g][i], total);
    }
  }
  for (int g = 0; g < G; ++g) out[g] = lane_sums(mass[g], n);
}

struct Batch {  // of pages from .. from + n - 1 of `count`, sixteen at most; heads from g0 on
  const Pool& pool;
  const Query& query;
  const float* reference;
  int head, g0, n;
  int64_t from, count;
};

// From the high plane alone, of the pages listed.
template <int G, bool Capped>
ENTROPIC_INLINE void high_batch(const Batch& batch, const Record& shape, const int64_t* pages, Bounds* b) {
  alignas(64) int16_t weight[kWide], qw[G][kWide];
  alignas(64) float part[3][G][kPages][16], scalar[3][kPages] = {};
  const Pool& pool = batch.pool;
  const Query& query = batch.query;
  const int g0 = batch.g0, n = batch.n;
  const int64_t from = batch.from;
  const int16_t* q16 = query.q16.data() + g0 * query.stride;
  const float* values = query.values.data() + g0 * query.stride;
  const int64_t stride = query.stride, each = static_cast<int64_t>(query.group) * shape.blocks * 16;
  int32_t* dots = b->dots.data() + from * each + g0 * shape.blocks * 16;
  for (int i = 0; i < n; ++i) {
    const uint8_t* record = pool.record_of(pages[from + i], batch.head);
    const char* later = nullptr;
    if (g0 == 0 && from + i + kAhead < batch.count) {
      later = reinterpret_cast<const char*>(pool.record_of(pages[from + i + kAhead], batch.head));
      for (int64_t byte = 0; byte < shape.high(); byte += 64) prefetch(later + byte);
      later += shape.high();
    }
    for (int k = 0; k < 3; ++k) std::memcpy(&scalar[k][i], record + 4 * k, 4);  // step, error, norm
    spread(record + shape.weight(), shape.width(), weight);
    Vec centre[G];
    for (int g = 0; g < G; ++g) {
      Vec plain, absolute;
      weigh<true>(weight, q16 + g * stride, shape.width(), qw[g], &plain, &absolute);
      store(part[0][g][i], plain), store(part[1][g][i], absolute), centre[g] = zero();
    }
    const half* m = reinterpret_cast<const half*>(record + shape.centre());
    for (int d = 0; d < shape.width(); d += 16) {
      const Vec x = shape.width() - d >= 16 ? load(m + d) : load(m + d, shape.width() - d);
      for (int g = 0; g < G; ++g) centre[g] = fma(load(values + g * stride + d), x, centre[g]);
    }
    for (int g = 0; g < G; ++g) store(part[2][g][i], centre[g]);
    int32_t* to = dots + i * each;
    page_dots<G>(record + shape.high(), shape, qw, later,
                 [&](int block, int g, Ints sum) { store_ints(to + (g * shape.blocks + block) * 16, sum); });
  }
  const Vec step = load(scalar[0]);
  store(b->step.data() + from, step), store(b->error.data() + from, load(scalar[1]));
  store(b->norm.data() + from, load(scalar[2]));
  Vec factor[G], offset[G], mass[G];
  for (int g = 0; g < G; ++g) {  // one lane per page
    const int64_t lane = (g0 + g) * b->capacity + from;
    const Vec plain = lane_sums(part[0][g], n), centre = lane_sums(part[2][g], n);
    store(b->centre.data() + lane, centre), store(b->weight_sum.data() + lane, plain);
    store(b->weight_abs.data() + lane, lane_sums(part[1][g], n));
    const Vec u = set(256.0f * query.alpha[g0 + g]) * step;
    factor[g] = set(query.scale) * (set(16.0f) * u);
    offset[g] = set(query.scale) * (centre - u * set(120.5f) * plain);
  }
  masses<false, Capped, G>(shape, pool.page, query.softcap, n, dots, each, factor, offset, batch.reference + g0, mass);
  for (int g = 0; g < G; ++g) store(b->mass.data() + (g0 + g) * b->capacity + from, mass[g]);
}

// As high_batch from both planes; page i of `b` is page which[i] of the list and of `high`.
template <int G, bool Capped>
ENTROPIC_INLINE void low_batch(const Batch& batch, const Record& shape, const int64_t* pages, const int32_t* which,
                               const Bounds& high, Bounds* b) {
  alignas(64) int16_t weight[kWide], qw[G][kWide];
  const Pool& pool = batch.pool;
  const Query& query = batch.query;
  const int g0 = batch.g0, n = batch.n;
  const int64_t from = batch.from, low_size = shape.plane() / 4;
  const auto cell = [&](int64_t i) { return pages[which[i]] * pool.heads + batch.head; };
  const int16_t* q16 = query.q16.data() + g0 * query.stride;
  const int64_t stride = query.stride, each = static_cast<int64_t>(query.group) * shape.blocks * 16;
  int32_t* dots = b->dots.data() + from * each + g0 * shape.blocks * 16;
  for (int i = 0; i < n; ++i) {
    const uint8_t* record = pool.record_of(pages[which[from + i]], batch.head);
    const char* later = nullptr;
    if (g0 == 0 && from + i + kAhead < batch.count) {
      later = reinterpret_cast<const char*>(pool.low + cell(from + i + kAhead) * low_size);
    }
    spread(record + shape.weight(), shape.width(), weight);
    for (int g = 0; g < G; ++g) weigh<false>(weight, q16 + g * stride, shape.width(), qw[g], nullptr, nullptr);
    const int32_t* before = high.dots.data() + which[from + i] * each + g0 * shape.blocks * 16;
    int32_t* to = dots + i * each;
    page_dots<G>(reinterpret_cast<const uint8_t*>(pool.low + cell(from + i) * low_size), shape, qw, later,
                 [&](int block, int g, Ints sum) {
                   const int64_t at = (g * shape.blocks + block) * 16;
                   store_ints(to + at, shifted_sum(load_ints(before + at), sum));
                 });
  }
  Vec factor[G], offset[G], mass[G];
  for (int g = 0; g < G; ++g) {
    const int64_t lane = (g0 + g) * b->capacity + from;
    const Vec u = set(256.0f * query.alpha[g0 + g]) * load(b->step.data() + from);
    factor[g] = set(query.scale) * u;
    offset[g] = set(query.scale) * (load(b->centre.data() + lane) - u * set(128.0f) * load(b->weight_sum.data() + lane));
  }
  masses<true, Capped, G>(shape, pool.page, query.softcap, n, dots, each, factor, offset, batch.reference + g0, mass);
  for (int g = 0; g < G; ++g) store(b->mass.data() + (g0 + g) * b->capacity + from, mass[g]);
}

// body(G, Capped, record) with what a batch is made for as constants
template <class Body>
void specialised(int heads, bool capped, const Record& shape, Body body) {
  const auto sized = [&](auto block, auto cap) {
    if (shape.groups == 8 && shape.blocks == 2) return body(block, cap, Record(8, 2));
    if (shape.groups == 16 && shape.blocks == 2) return body(block, cap, Record(16, 2));
    body(block, cap, shape);
  };
  const auto grouped = [&](auto cap) {
    switch (heads) {
      case 1: return sized(std::integral_constant<int, 1>(), cap);
      case 2: return sized(std::integral_constant<int, 2>(), cap);
      case 3: return sized(std::integral_constant<int, 3>(), cap);
      default: return sized(std::integral_constant<int, 4>(), cap);
    }
  };
  if (capped) return grouped(std::true_type());
  grouped(std::false_type());
}

// body(G, Capped, batch, record) for all batches of pages from .. to - 1 of `count`
template <class Body>
void each_batch(const Pool& pool, const Query& query, const float* reference, int head, int64_t from, int64_t to,
                int64_t count, Body body) {
  for (int64_t i = from; i < to; i += kPages)
    for (int g = 0; g < query.group; g += kBlock) {
      const Batch batch{pool, query, reference, head, g, static_cast<int>(std::min<int64_t>(kPages, to - i)), i, count};
      specialised(std::min(query.group - g, kBlock), query.softcap > 0, Record(pool),
                  [&](auto heads, auto capped, const Record& shape) __attribute__((always_inline)) {
                    body(heads, capped, batch, shape);
                  });
    }
}

// upper and lower from mass and the width of its interval; `unread` is 7.5 after the high plane, 0 after both, and
// `above` how far (in nats) the mass may lie above what it stands for.
void widen(const Pool& pool, const Query& query, const float* reference, float unread, float above, int64_t from,
           int64_t to, Bounds* b) {
  const float dim = static_cast<float>(pool.dim), terms = static_cast<float>(padded(pool.page, 16));
  const float below = above > 0.0f ? kChordRounding : 0.0f, flushed = terms * kFlushed;
  const float unscaled = 1.0f / std::min(std::fabs(query.scale), 1.0f);
  for (int g = 0; g < query.group; ++g) {
    const float unit = 256.0f * query.alpha[g] * std::fabs(query.scale);
    const float norm_q = static_cast<float>(query.norm[g]), rounding = norm_q * (dim + 32.0f) * kUnit * 1.01f;
    const float always = 8.0f * kUnit * std::fabs(reference[g]) + (terms + 24.0f + below) * kUnit + 8.0f * kUnit * query.softcap;
    const int64_t row = g * b->capacity;
    for (int64_t p = from; p < to; p += 16) {
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
  for (auto* x : {&step, &error, &norm}) x->assign(capacity + 16, 0.0f);  // room for whole vectors from any place
  for (auto* x : {&centre, &weight_sum, &weight_abs, &mass, &upper, &lower}) x->assign(all + 16, 0.0f);
  if (dots.size() < all * blocks * 16) dots.resize(all * blocks * 16);
}

void score_high(const Pool& pool, int head, const std::vector<int64_t>& pages, const Query& query,
                const float* reference, int64_t from, int64_t to, Bounds* b) {
  each_batch(pool, query, reference, head, from, to, b->count,
             [&](auto heads, auto capped, const Batch& batch, const Record& shape) __attribute__((always_inline)) {
               high_batch<heads.value, capped.value>(batch, shape, pages.data(), b);
             });
  widen(pool, query, reference, 7.5f, kChord, from, to, b);
}

void Bounds::choose(const Bounds& from, const std::vector<Mask>& taken, int group, int blocks,
                    std::vector<int32_t>* which) {
  int64_t n = 0;
  for (Mask m : taken) n += simd::count(m);
  resize(group, n, blocks);
  which->resize(capacity + 16);
  Ints at = load_ints(kLanes);
  int64_t to = 0;
  for (Mask m : taken) {
    store_ints(which->data() + to, packed(m, at));
    to += simd::count(m), at = at + set_ints(16);
  }
  which->resize(n);
  const auto take = [&](const std::vector<float>& source, std::vector<float>& target, int g) {
    const float* read = source.data() + g * from.capacity;
    float* write = target.data() + g * capacity;  // a row's last vector may reach into the next, written after it
    for (size_t i = 0; i < taken.size(); ++i) {
      store(write, packed(taken[i], load(read + 16 * i)));
      write += simd::count(taken[i]);
    }
  };
  take(from.step, step, 0), take(from.error, error, 0), take(from.norm, norm, 0);
  for (int g = 0; g < group; ++g) {
    take(from.centre, centre, g);
    take(from.weight_sum, weight_sum, g), take(from.weight_abs, weight_abs, g);
  }
}

void score_low(const Pool& pool, int head, const std::vector<int64_t>& pages, const std::vector<int32_t>& which,
               const Query& query, const float* reference, const Bounds& high, int64_t from, int64_t to, Bounds* b) {
  each_batch(pool, query, reference, head, from, to, b->count,
             [&](auto heads, auto capped, const Batch& batch, const Record& shape) __attribute__((always_inline)) {
               low_batch<heads.value, capped.value>(batch, shape, pages.data(), which.data(), high, b);
             });
  widen(pool, query, reference, 0.0f, 0.0f, from, to, b);
}

}  // namespace attention
