// Entropy, varentropy and the Gumbel-max draw over the vocabulary.
//
// A row is cut into blocks of kBlock logits. Sums are taken per block (float lanes, emptied into doubles every 256
// logits) and added up block by block, so a row's result is the same whatever the batch, the threads and their order.
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kState = 6;        // numbers kept of a row between calls
constexpr int64_t kTask = 16;         // blocks handed out at a time
constexpr float kCut = -104.0f;       // exp is 0 in float32; keeps 0 * -inf out of the sums
constexpr double kCold = 1.1754943508222875e-38, kHot = 1e30;
constexpr double kGumbelMax = 22.8739, kSlack = 1e-4;

inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

struct Sums {
  double weight = 0, first = 0, second = 0;  // sum of e, e x, e x^2 with x = (z - max) / T, e = exp x
  int64_t near = 0;                          // logits with z - max >= the threshold asked for
};

#ifdef ENTROPIC_AVX512
constexpr int64_t kShare = 1 << 17;  // logits worth a thread: waking one costs some 50 us

// exp on [-104, 0]: relative error below 1.3e-7 (tested); below -103.3 it is 0.
inline __m512 exp16(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline double sum16(__m512 v) {
  return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)),
                                            _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))));
}

inline __m512 load_tail(const float* z, int64_t left) {  // missing lanes: -inf
  const __mmask16 m = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), m, z);
}
#else
constexpr int64_t kShare = 1 << 14;
#endif

// Sums over `count` <= kBlock logits. `kept`: where to copy those with z - top >= lead, or null; the copies are z itself.
Sums block_sums(const float* z, int64_t count, float top, float r, float lead, float* kept) {
  Sums out;
#ifdef ENTROPIC_AVX512
  const __m512 vtop = _mm512_set1_ps(top), vr = _mm512_set1_ps(r), cut = _mm512_set1_ps(kCut);
  const __m512 threshold = _mm512_set1_ps(lead);
  __m512d weight = _mm512_setzero_pd(), first = weight, second = weight;
  for (int64_t start = 0; start < count; start += 256) {
    __m512 s = _mm512_setzero_ps(), a = s, b = s;
    for (int64_t i = start; i < std::min(start + 256, count); i += 16) {
      const __m512 value = load_tail(z + i, count - i);
      const __m512 below = _mm512_sub_ps(value, vtop);
      const __m512 raw = _mm512_mul_ps(below, vr);
      const __mmask16 m = _mm512_cmp_ps_mask(below, threshold, _CMP_GE_OQ);
      const int found = __builtin_popcount(m);
      if (kept && found)  // compressing straight to memory is slow on some processors
        _mm512_mask_storeu_ps(kept + out.near, static_cast<__mmask16>((1u << found) - 1),
                              _mm512_maskz_compress_ps(m, value));
      out.near += found;
      const __m512 x = _mm512_max_ps(cut, raw);  // NaN stays: max returns its second operand
      const __m512 e = exp16(x), ex = _mm512_mul_ps(e, x);
      s = _mm512_add_ps(s, e);
      a = _mm512_add_ps(a, ex);
      b = _mm512_fmadd_ps(ex, x, b);
    }
    const auto widen = [](__m512d to, __m512 v) {
      return _mm512_add_pd(to, _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)),
                                             _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))));
    };
    weight = widen(weight, s), first = widen(first, a), second = widen(second, b);
  }
  out.weight = _mm512_reduce_add_pd(weight), out.first = _mm512_reduce_add_pd(first);
  out.second = _mm512_reduce_add_pd(second);
#else
  for (int64_t start = 0; start < count; start += 256) {
    float s[16] = {}, a[16] = {}, b[16] = {};
    for (int64_t i = start; i < std::min(start + 256, count); ++i) {
      const float below = z[i] - top, raw = below * r;
      if (below >= lead) {
        if (kept) kept[out.near] = z[i];
        ++out.near;
      }
      const float x = raw < kCut ? kCut : raw;
      const float e = std::exp(x);
      s[i & 15] += e, a[i & 15] += e * x, b[i & 15] += e * x * x;
    }
    for (int k = 0; k < 16; ++k) out.weight += s[k], out.first += a[k], out.second += b[k];
  }
#endif
  return out;
}

float block_max(const float* z, int64_t count) {  // NaN is not seen here: it shows in the sums
  float top = -std::numeric_limits<float>::infinity();
#ifdef ENTROPIC_AVX512
  __m512 best = _mm512_set1_ps(top);
  for (int64_t i = 0; i < count; i += 16) best = _mm512_max_ps(load_tail(z + i, count - i), best);
  top = _mm512_reduce_max_ps(best);
#else
  float best[16];
  std::fill(best, best + 16, top);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int k = 0; k < 16; ++k) best[k] = z[i + k] > best[k] ? z[i + k] : best[k];
  for (; i < count; ++i) best[0] = z[i] > best[0] ? z[i] : best[0];
  for (float b : best) top = b > top ? b : top;
#endif
  return top;
}

// Runs body(row, first block, last block) over all blocks of the rows for which wanted(row).
template <class Wanted, class Body>
void over_blocks(int64_t rows, int64_t n, int threads, Wanted&& wanted, Body&& body) {
  const int64_t per_row = blocks_of(n), tasks = (per_row + kTask - 1) / kTask;
  std::vector<int64_t> live;
  for (int64_t row = 0; row < rows; ++row)
    if (wanted(row)) live.push_back(row);
  if (live.empty()) return;
  pool::Queue queue;
  const int64_t total = static_cast<int64_t>(live.size()) * tasks;
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(live.size()) * n / kShare);
  pool::run(static_cast<int>(std::min<int64_t>(threads, most)), [&](int, int) {
    for (int64_t t = queue.take(); t < total; t = queue.take())
      body(live[t / tasks], t % tasks * kTask, std::min(per_row, (t % tasks + 1) * kTask));
  });
}

// The largest logit of each block, float[rows, blocks_of(n)], of the rows for which wanted(row).
template <class Wanted>
std::vector<float> block_maxima(const float* z, int64_t rows, int64_t n, int64_t stride, int threads, Wanted&& wanted) {
  const int64_t per_row = blocks_of(n);
  std::vector<float> maxima(static_cast<size_t>(rows * per_row));
  over_blocks(rows, n, threads, wanted, [&](int64_t row, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b)
      maxima[row * per_row + b] = block_max(z + row * stride + b * kBlock, std::min(kBlock, n - b * kBlock));
  });
  return maxima;
}

// -- Philox4x32-10 and the map from its words to Gumbel noise (specification: backends/gumbel.py) --------------------

constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;

inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round, k0 += kW0, k1 += kW1) {
    const uint64_t p0 = static_cast<uint64_t>(c[0]) * kM0, p1 = static_cast<uint64_t>(c[2]) * kM1;
    const uint32_t a = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, b = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[0] = a, c[1] = static_cast<uint32_t>(p1), c[2] = b, c[3] = static_cast<uint32_t>(p0);
  }
}

inline float gumbel(uint32_t word) {
  const float v = std::min((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  const float e = v < 0x1p-8f ? v * (1.0f + v * (0.5f + v * (1.0f / 3.0f))) : -std::log(1.0f - v);
  return -std::log(e);
}

struct Draw {
  float key = -std::numeric_limits<float>::infinity();
  int64_t token = -1;
  void offer(float y, int64_t id) {
    if (y > key || (y == key && id < token)) key = y, token = id;
  }
};

// Offers every token of 16 counters (64 tokens from `base` on) that can still beat `draw`.
struct Noise {
  uint32_t k0, k1, step;
};

void offer_words(const uint32_t* words, uint32_t limit, const float* z, int64_t base, int64_t count, float top, float r,
                 Draw& draw) {  // words[j * 16 + i]: token base + 4 i + j
  for (int64_t t = 0; t < count; ++t) {
    const uint32_t w = words[(t & 3) * 16 + (t >> 2)];
    if (w > limit) continue;
    const float x = (z[base + t] - top) * r;
    if (std::isinf(x)) continue;
    draw.offer(static_cast<float>(static_cast<double>(x) + static_cast<double>(gumbel(w))), base + t);
  }
}

void draw_block(const float* z, int64_t base, int64_t end, float top, float r, Noise noise, Draw& draw) {
  for (; base < end; base += 64) {
    const int64_t count = std::min<int64_t>(64, end - base);
    const float reach = (block_max(z + base, count) - top) * r;
    const double gap = static_cast<double>(reach) - draw.key + kSlack;  // a winner here has E < exp(gap), and v <= E
    if (gap < -kGumbelMax) continue;
    const double most = gap >= 0 ? 1.0 : std::exp(gap);
    const uint32_t limit = most > 0.999 ? 0xffffffffu : static_cast<uint32_t>(most * 0x1p32) + 1;
    alignas(64) uint32_t words[64];
    const uint32_t group = static_cast<uint32_t>(base >> 2);
#ifdef ENTROPIC_AVX512
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(group)), lanes);
    __m512i c1 = _mm512_set1_epi32(static_cast<int>(noise.step)), c2 = _mm512_setzero_si512(), c3 = c2;
    const __m512i m0 = _mm512_set1_epi32(static_cast<int>(kM0)), m1 = _mm512_set1_epi32(static_cast<int>(kM1));
    uint32_t k0 = noise.k0, k1 = noise.k1;
    for (int round = 0; round < 10; ++round, k0 += kW0, k1 += kW1) {
      const auto high = [](__m512i a, __m512i b) {  // upper 32 bits of each lane's product
        const __m512i even = _mm512_mul_epu32(a, b);
        const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
        return _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
      };
      const __m512i h0 = high(c0, m0), l0 = _mm512_mullo_epi32(c0, m0);
      const __m512i h1 = high(c2, m1), l1 = _mm512_mullo_epi32(c2, m1);
      c0 = _mm512_ternarylogic_epi32(h1, c1, _mm512_set1_epi32(static_cast<int>(k0)), 0x96);
      c2 = _mm512_ternarylogic_epi32(h0, c3, _mm512_set1_epi32(static_cast<int>(k1)), 0x96);
      c1 = l1, c3 = l0;
    }
    const __m512i least = _mm512_min_epu32(_mm512_min_epu32(c0, c1), _mm512_min_epu32(c2, c3));
    if (!_mm512_cmple_epu32_mask(least, _mm512_set1_epi32(static_cast<int>(limit)))) continue;
    _mm512_store_si512(words, c0), _mm512_store_si512(words + 16, c1);
    _mm512_store_si512(words + 32, c2), _mm512_store_si512(words + 48, c3);
#else
    for (uint32_t i = 0; i < 16; ++i) {
      uint32_t c[4] = {group + i, noise.step, 0, 0};
      philox(c, noise.k0, noise.k1);
      for (int j = 0; j < 4; ++j) words[j * 16 + i] = c[j];
    }
#endif
    offer_words(words, limit, z, base, count, top, r, draw);
  }
}

}  // namespace

extern "C" {

// Entropy and varentropy (nats, nats^2) of softmax(z / T) for each row; NaN where it has none.
//
// last: double[rows, 6], state of the row between calls, NaN at first: T, H, V of the last call; the highest T for which
// the copies in `kept` (float[rows, n], block b from b * kBlock on, kept_count int32[rows, blocks]) suffice; the highest
// T for which copies are worth making; the largest logit. `reach`: a logit with x < -reach is without effect (the wrapper
// has the bound).
void entropic_moments(const float* z, int64_t rows, int64_t n, int64_t stride, const double* temperature, double* last,
                      float* kept, int32_t* kept_count, double reach, double* entropy, double* varentropy, int threads) {
  const int64_t per_row = blocks_of(n);
  const auto fresh = [&](int64_t row) { return std::isnan(last[row * kState + 5]); };
  const std::vector<float> maxima = block_maxima(z, rows, n, stride, threads, fresh);
  std::vector<float> top(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    const float* begin = maxima.data() + row * per_row;
    if (fresh(row)) last[row * kState + 5] = *std::max_element(begin, begin + per_row);
    top[row] = static_cast<float>(last[row * kState + 5]);
  }
  constexpr double kAhead = 1.25;  // copies serve temperatures up to this much higher
  std::vector<Sums> sums(static_cast<size_t>(rows * per_row));
  std::vector<char> copies(static_cast<size_t>(rows));  // 0: read all; 1: read the copies; 2: read all and copy
  const auto scale = [&](int64_t row) {
    return static_cast<float>(1.0 / std::min(std::max(temperature[row], kCold), kHot));
  };
  const auto lead = [&](double t) {  // finite, so that -inf, of which padding is made, is never near
    return static_cast<float>(-std::min(reach * t, 1e38));
  };
  const auto wanted = [&](int64_t row) {
    const double t = temperature[row];
    return t >= 0 && t != last[row * kState] && std::isfinite(top[row]);
  };
  for (int64_t row = 0; row < rows; ++row) {
    const double t = temperature[row], *state = last + row * kState;
    copies[row] = t <= state[3] ? 1 : t <= state[4] ? 2 : 0;  // NaN compares false
  }
  over_blocks(rows, n, threads, wanted, [&](int64_t row, int64_t first, int64_t last_block) {
    const float r = scale(row);
    for (int64_t b = first; b < last_block; ++b) {
      const int64_t start = b * kBlock, size = std::min(kBlock, n - start);
      float* mine = kept + row * n + start;
      int32_t& count = kept_count[row * per_row + b];
      Sums& into = sums[row * per_row + b];
      if (copies[row] == 1) {
        into = block_sums(mine, count, top[row], r, -std::numeric_limits<float>::infinity(), nullptr);
      } else if (copies[row] == 2) {
        const double limit = last[row * kState + 4];
        into = block_sums(z + row * stride + start, size, top[row], r, lead(limit), mine);
        count = static_cast<int32_t>(into.near);
      } else {
        into = block_sums(z + row * stride + start, size, top[row], r, lead(kAhead * temperature[row]), nullptr);
      }
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    double* state = last + row * kState;
    const double t = temperature[row];
    if (!(t >= 0) || !std::isfinite(top[row])) {
      entropy[row] = varentropy[row] = std::numeric_limits<double>::quiet_NaN();
      continue;
    }
    if (t != state[0]) {
      double weight = 0, first = 0, second = 0;
      int64_t near = 0;
      for (int64_t b = 0; b < per_row; ++b) {
        const Sums& s = sums[row * per_row + b];
        weight += s.weight, first += s.first, second += s.second, near += s.near;
      }
      const double mean = first / weight;
      state[0] = t;
      state[1] = std::log(weight) - mean;
      state[2] = std::max(second / weight - mean * mean, 0.0);
      if (std::isnan(state[1])) state[2] = state[1];
      if (copies[row] == 2 && !std::isnan(state[1])) state[3] = state[4];
      if (copies[row] == 0) state[4] = 2 * near <= n ? t * kAhead : std::numeric_limits<double>::quiet_NaN();
    }
    entropy[row] = state[1], varentropy[row] = state[2];
  }
}

// The token with the largest (z - top) r + Gumbel, of equal ones the lowest; see backends/gumbel.py. T > 0.
void entropic_choose(const float* z, int64_t rows, int64_t n, int64_t stride, const double* temperature,
                     const int64_t* seed, const int64_t* index, int64_t* token, int threads) {
  const int64_t per_row = blocks_of(n), tasks = (per_row + kTask - 1) / kTask;
  const auto all = [](int64_t) { return true; };
  const std::vector<float> maxima = block_maxima(z, rows, n, stride, threads, all);
  std::vector<float> top(static_cast<size_t>(rows));
  std::vector<Draw> draws(static_cast<size_t>(rows * tasks)), starts(static_cast<size_t>(rows));
  const auto visit = [&](int64_t row, int64_t b, Draw& draw) {
    const float r = static_cast<float>(1.0 / std::max(temperature[row], 0x1p-126));
    const double gap = static_cast<double>((maxima[row * per_row + b] - top[row]) * r) - draw.key + kSlack;
    if (gap < -kGumbelMax) return;
    const Noise noise{static_cast<uint32_t>(seed[row]), static_cast<uint32_t>(static_cast<uint64_t>(seed[row]) >> 32),
                      static_cast<uint32_t>(index[row])};
    draw_block(z + row * stride, b * kBlock, std::min(n, (b + 1) * kBlock), top[row], r, noise, draw);
  };
  for (int64_t row = 0; row < rows; ++row) {  // first the block of the largest logit: most others then need no noise
    const float* begin = maxima.data() + row * per_row;
    const float* best = std::max_element(begin, begin + per_row);
    top[row] = *best;
    visit(row, best - begin, starts[row]);
  }
  over_blocks(rows, n, threads, all, [&](int64_t row, int64_t first, int64_t last) {
    Draw draw = starts[row];
    for (int64_t b = first; b < last; ++b) visit(row, b, draw);
    draws[row * tasks + first / kTask] = draw;
  });
  for (int64_t row = 0; row < rows; ++row) {
    Draw best = starts[row];
    for (int64_t t = 0; t < tasks; ++t) best.offer(draws[row * tasks + t].key, draws[row * tasks + t].token);
    token[row] = best.token;
  }
}

// For the tests: exp of the kernels, and the noise of words.
void entropic_exp(const float* x, float* out, int64_t n) {
#ifdef ENTROPIC_AVX512
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 m = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(out + i, m, exp16(_mm512_maskz_loadu_ps(m, x + i)));
  }
#else
  for (int64_t i = 0; i < n; ++i) out[i] = std::exp(x[i]);
#endif
}

void entropic_gumbel(const uint32_t* words, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gumbel(words[i]);
}

}  // extern "C"
