// Sixteen lanes of float32 or int32: AVX-512 where the compiler has it, the same arithmetic in plain loops elsewhere.
//
// Accuracy the certificates rely on (see backends/attention/pruned.py): `exp` is within 2 ulp, or flushes to 0 below
// -87; sums and products are float32, fused or not; products of two bfloat16 are exact in float32.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ENTROPIC_AVX512 1
#include <immintrin.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace simd {

using Mask = uint16_t;  // one bit per lane
constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline Mask first_lanes(int64_t n) { return static_cast<Mask>(n >= 16 ? 0xffff : (1 << n) - 1); }
inline int count(Mask m) { return __builtin_popcount(m); }

using bf16 = uint16_t;
struct half {
  uint16_t bits;
};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float to_float(half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, body = x.bits & 0x7fffu;
  const float magnitude = body >= 0x7c00u ? (body == 0x7c00u ? kInfinity : std::numeric_limits<float>::quiet_NaN())
                          : body < 0x400u ? std::ldexp(static_cast<float>(body), -24)
                                          : std::ldexp(static_cast<float>((body & 0x3ffu) | 0x400u), (body >> 10) - 25);
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

inline void from_float(float x, float* out) { *out = x; }

// a b + c, rounded once where the processor can: the compiler itself fuses nothing (-ffp-contract=off), or else the same
// expression would round differently from one place to the next.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline bf16 to_bf16(float x) {  // nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void from_float(float x, bf16* out) { *out = to_bf16(x); }

inline half to_half(float x) {  // nearest even
#if defined(__F16C__)
  return half{static_cast<uint16_t>(_cvtss_sh(x, 0))};
#else
  const uint16_t sign = std::signbit(x) ? 0x8000u : 0u;
  const float a = std::fabs(x);
  if (std::isnan(x)) return half{static_cast<uint16_t>(sign | 0x7e00u)};
  if (a >= 65520.0f) return half{static_cast<uint16_t>(sign | 0x7c00u)};
  int exponent = a < 6.103515625e-05f ? -14 : std::ilogb(a);
  const float scaled = std::nearbyint(std::ldexp(a, 10 - exponent));  // 0 .. 2048
  uint32_t mantissa = static_cast<uint32_t>(scaled);
  if (mantissa >= 2048u) mantissa >>= 1, ++exponent;
  const uint32_t body = mantissa < 1024u ? mantissa : ((exponent + 15) << 10) | (mantissa & 0x3ffu);
  return half{static_cast<uint16_t>(sign | body)};
#endif
}

inline void from_float(float x, half* out) { *out = to_half(x); }

#ifdef ENTROPIC_AVX512

struct Vec {
  __m512 v;
};
struct Ints {
  __m512i v;
};

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline Vec load(const half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }  // 0 past n <= 16
inline Vec load(const bf16* p, int n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16))};
}
inline Vec load(const half* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p))}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Mask at_most(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }  // NaN: no
inline Mask above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Mask equal(Ints a, int32_t n) { return _mm512_cmpeq_epi32_mask(a.v, _mm512_set1_epi32(n)); }
inline Vec where(Mask m, Vec a) { return {_mm512_maskz_mov_ps(m, a.v)}; }  // else 0
inline Ints ones(Mask m) { return {_mm512_maskz_set1_epi32(m, 1)}; }       // else 0
inline Vec packed(Mask m, Vec a) { return {_mm512_maskz_compress_ps(m, a.v)}; }  // the lanes of m first, then 0
inline Ints packed(Mask m, Ints a) { return {_mm512_maskz_compress_epi32(m, a.v)}; }
inline Vec keep_first(Vec a, int n, float other) { return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first(n), a.v)}; }

inline Vec exp(Vec a) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(a.v, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), a.v);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.98412698e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.38888889e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.33333333e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.16666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.66666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_scalef_ps(p, n);
  p = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), p);  // NaN stays NaN
  return {_mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(88.7f), _CMP_GT_OQ), _mm512_set1_ps(kInfinity))};
}

// 2^x from above: at most 1.0616 times it (a chord in each octave), and less only by the rounding of x + 127 to 24 bits,
// 2^-17 of it; 2^-126 below -126, infinity from 128.
inline Vec exp2_above(Vec x) {
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(128.0f), _mm512_max_ps(_mm512_set1_ps(-126.0f), x.v));
  const __m512 bits = _mm512_fmadd_ps(t, _mm512_set1_ps(8388608.0f), _mm512_set1_ps(1065353216.0f));
  return {_mm512_castsi512_ps(_mm512_cvtps_epi32(bits))};
}

// In each lane the sums of a[j] and of b[j] over the lanes j that come no later in ascending order of a, ties by lane.
inline void sums_in_order(const float* a, const float* b, Vec* sum_a, Vec* sum_b) {
  const __m512 x = _mm512_loadu_ps(a);
  __m512 u[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, v[2] = {u[0], u[0]};
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    const __m512 y = _mm512_set1_ps(a[j]);
    const __mmask16 after = static_cast<__mmask16>(0xffffu << j);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(after, y, x, _CMP_LE_OQ) |
                         _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(~after), y, x, _CMP_LT_OQ);
    u[j & 1] = _mm512_mask_add_ps(u[j & 1], in, u[j & 1], y);
    v[j & 1] = _mm512_mask_add_ps(v[j & 1], in, v[j & 1], _mm512_set1_ps(b[j]));
  }
  *sum_a = {_mm512_add_ps(u[0], u[1])}, *sum_b = {_mm512_add_ps(v[0], v[1])};
}

inline Ints int_zero() { return {_mm512_setzero_si512()}; }
inline Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Ints loaded(Ints a) {  // in a register: a compiler may load again for every use
  asm("" : "+v"(a.v));
  return a;
}
inline void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints set_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Vec to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
// the int16 pair of nibbles i and i + 4 of each lane
template <int I>
inline Ints nibbles(Ints x) {
  return {_mm512_and_si512(_mm512_srli_epi32(x.v, 4 * I), _mm512_set1_epi32(0x000f000f))};
}
inline Ints set_pair(const int16_t* p) {  // the same two int16 in every lane
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
inline void store_int16(int16_t* p, Vec a) {  // rounded to nearest, within +-32767; NaN to anything
  const Vec low = set(-32767.0f), high = set(32767.0f);
  const __m512i x = _mm512_cvtps_epi32(_mm512_max_ps(low.v, _mm512_min_ps(high.v, a.v)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x));
}
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
// 16 a + b
inline Ints shifted_sum(Ints a, Ints b) { return {_mm512_add_epi32(_mm512_slli_epi32(a.v, 4), b.v)}; }
// acc + a.lo b.lo + a.hi b.hi on int16 pairs
inline Ints pairs_dot(Ints acc, Ints a, Ints b) {
#ifdef __AVX512VNNI__
  return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)};
#else
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}

// The sums of sixteen vectors, one per lane.
inline Vec sums(const Vec r[16]) {
  __m512 x[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = r[4 * i].v, b = r[4 * i + 1].v, c = r[4 * i + 2].v, d = r[4 * i + 3].v;
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  const __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
  const __m512 t = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(s, t, 0x88), _mm512_shuffle_f32x4(s, t, 0xdd))};
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

#else

struct Vec {
  float v[16];
};
struct Ints {
  int32_t v[16];
};

#define ENTROPIC_EACH for (int i = 0; i < 16; ++i)
inline Vec set(float x) {
  Vec o;
  ENTROPIC_EACH o.v[i] = x;
  return o;
}
inline Vec zero() { return set(0.0f); }
template <class T>
inline Vec load(const T* p) {
  Vec o;
  ENTROPIC_EACH o.v[i] = to_float(p[i]);
  return o;
}
template <class T>
inline Vec load(const T* p, int n) {
  Vec o;
  ENTROPIC_EACH o.v[i] = i < n ? to_float(p[i]) : 0.0f;
  return o;
}
inline void store(float* p, Vec a) { std::memcpy(p, a.v, 64); }
inline Vec operator+(Vec a, Vec b) {
  ENTROPIC_EACH a.v[i] += b.v[i];
  return a;
}
inline Vec operator-(Vec a, Vec b) {
  ENTROPIC_EACH a.v[i] -= b.v[i];
  return a;
}
inline Vec operator*(Vec a, Vec b) {
  ENTROPIC_EACH a.v[i] *= b.v[i];
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  ENTROPIC_EACH a.v[i] = fused(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline Vec max(Vec a, Vec b) {
  ENTROPIC_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline float sum(Vec a) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
  return a.v[0];
}
inline float largest(Vec a) {
  float o = a.v[0];
  ENTROPIC_EACH o = a.v[i] > o ? a.v[i] : o;
  return o;
}
inline Mask at_most(Vec a, Vec b) {
  Mask m = 0;
  ENTROPIC_EACH m |= (a.v[i] <= b.v[i]) << i;
  return m;
}
inline Mask above(Vec a, Vec b) {
  Mask m = 0;
  ENTROPIC_EACH m |= (a.v[i] > b.v[i]) << i;
  return m;
}
inline Mask equal(Ints a, int32_t n) {
  Mask m = 0;
  ENTROPIC_EACH m |= (a.v[i] == n) << i;
  return m;
}
inline Vec where(Mask m, Vec a) {
  ENTROPIC_EACH a.v[i] = m >> i & 1 ? a.v[i] : 0.0f;
  return a;
}
inline Ints ones(Mask m) {
  Ints o;
  ENTROPIC_EACH o.v[i] = m >> i & 1;
  return o;
}
template <class T>
inline T packed(Mask m, T a) {
  T o{};
  int n = 0;
  ENTROPIC_EACH if (m >> i & 1) o.v[n++] = a.v[i];
  return o;
}
inline Vec keep_first(Vec a, int n, float other) {
  ENTROPIC_EACH a.v[i] = i < n ? a.v[i] : other;
  return a;
}
inline Vec exp(Vec a) {
  ENTROPIC_EACH a.v[i] = a.v[i] < -87.0f ? 0.0f : std::exp(a.v[i]);
  return a;
}
inline Vec exp2_above(Vec a) {
  ENTROPIC_EACH {
    const float t = !(a.v[i] >= -126.0f) ? -126.0f : a.v[i] > 128.0f ? 128.0f : a.v[i];
    const int32_t bits = static_cast<int32_t>(std::nearbyint(static_cast<double>(t) * 8388608.0 + 1065353216.0));
    std::memcpy(&a.v[i], &bits, 4);
  }
  return a;
}
inline void sums_in_order(const float* a, const float* b, Vec* sum_a, Vec* sum_b) {
  *sum_a = *sum_b = zero();
  for (int j = 0; j < 16; ++j)
    ENTROPIC_EACH if (a[j] < a[i] || (a[j] == a[i] && j <= i)) sum_a->v[i] += a[j], sum_b->v[i] += b[j];
}
inline Ints set_ints(int32_t x) {
  Ints o;
  ENTROPIC_EACH o.v[i] = x;
  return o;
}
inline Ints int_zero() { return set_ints(0); }
inline Ints load_ints(const void* p) {
  Ints o;
  std::memcpy(o.v, p, 64);
  return o;
}
inline Ints loaded(Ints a) { return a; }
inline void store_ints(void* p, Ints a) { std::memcpy(p, a.v, 64); }
inline Vec to_floats(Ints a) {
  Vec o;
  ENTROPIC_EACH o.v[i] = static_cast<float>(a.v[i]);
  return o;
}
inline int32_t sum(Ints a) {
  int32_t o = 0;
  ENTROPIC_EACH o += a.v[i];
  return o;
}
template <int I>
inline Ints nibbles(Ints x) {
  ENTROPIC_EACH x.v[i] = static_cast<int32_t>((static_cast<uint32_t>(x.v[i]) >> (4 * I)) & 0x000f000fu);
  return x;
}
inline Ints set_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return set_ints(pair);
}
inline void store_int16(int16_t* p, Vec a) {
  ENTROPIC_EACH {
    const float x = a.v[i] <= 32767.0f ? a.v[i] : 32767.0f;
    p[i] = static_cast<int16_t>(std::nearbyint(x >= -32767.0f ? x : -32767.0f));
  }
}
inline Ints operator+(Ints a, Ints b) {
  ENTROPIC_EACH a.v[i] += b.v[i];
  return a;
}
inline Ints shifted_sum(Ints a, Ints b) {
  ENTROPIC_EACH b.v[i] += 16 * a.v[i];
  return b;
}
inline Ints pairs_dot(Ints acc, Ints a, Ints b) {
  ENTROPIC_EACH {
    const auto x = static_cast<uint32_t>(a.v[i]), y = static_cast<uint32_t>(b.v[i]);
    acc.v[i] += static_cast<int16_t>(x) * static_cast<int16_t>(y) +
                static_cast<int16_t>(x >> 16) * static_cast<int16_t>(y >> 16);
  }
  return acc;
}
inline Vec sums(const Vec r[16]) {
  Vec o;
  ENTROPIC_EACH o.v[i] = sum(r[i]);
  return o;
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
#undef ENTROPIC_EACH

#endif

inline Vec cap(Vec s, float limit) {  // limit tanh(s / limit)
  alignas(64) float x[16];
  store(x, s);
  for (float& y : x) y = limit * std::tanh(y / limit);
  return load(x);
}

}  // namespace simd
