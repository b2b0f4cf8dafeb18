// Sixteen float lanes: one AVX-512 register where there is one, the same source on any other machine.
//
// `Lanes` is a vector type of the compiler, so + - * / < and ?: work lane by lane on both. Loads and stores convert from
// and to the element type; with a count they touch the first elements only and read zeros beyond.
#pragma once
#include "simd.h"

namespace lanes {

using simd::bf16;
constexpr int kWidth = 16;
typedef int32_t Ints __attribute__((vector_size(64)));

#ifdef ENTROPIC_AVX512
typedef __m512 Lanes;

inline __mmask16 first(int64_t count) {
  return count >= kWidth ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1u);
}
constexpr __mmask16 kAll = 0xffff;  // with it, where the plain form makes GCC 12 warn about its own header
inline Lanes widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, x), 16));
}
inline __m256i narrow(Lanes x) {  // nearest even; NaN stays NaN
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i nan = _mm512_or_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan));
#endif
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Lanes load(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
inline Lanes load(const bf16* p, int64_t count) { return widen(_mm256_maskz_loadu_epi16(first(count), p)); }
inline void store(float* p, Lanes x, int64_t count) { _mm512_mask_storeu_ps(p, first(count), x); }
inline void store(bf16* p, Lanes x, int64_t count) { _mm256_mask_storeu_epi16(p, first(count), narrow(x)); }
inline Lanes round_to(bf16, Lanes x) { return widen(narrow(x)); }
inline float sum(Lanes x) {
  const __m256 half = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, x, 0), _mm512_maskz_extractf32x8_ps(0xff, x, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
#else
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector leaves this library
typedef float Lanes __attribute__((vector_size(64)));

inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  float x[kWidth], y[kWidth], z[kWidth];
  std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
  for (int i = 0; i < kWidth; ++i) z[i] = simd::fused(x[i], y[i], z[i]);
  Lanes out;
  std::memcpy(&out, z, sizeof out);
  return out;
}
template <class T>
inline float element(const T* p);
template <>
inline float element(const float* p) {
  return *p;
}
template <>
inline float element(const bf16* p) {
  return simd::to_float(*p);
}
template <class T>
inline Lanes load(const T* p, int64_t count) {
  Lanes out{};
  for (int i = 0; i < kWidth && i < count; ++i) out[i] = element(p + i);
  return out;
}
template <class T>
inline Lanes load(const T* p) {
  alignas(64) float out[kWidth];
  for (int i = 0; i < kWidth; ++i) out[i] = element(p + i);
  Lanes x;
  std::memcpy(&x, out, sizeof x);
  return x;
}
inline void store(float* p, const Lanes& x, int64_t count) {
  for (int i = 0; i < kWidth && i < count; ++i) p[i] = x[i];
}
inline void store(bf16* p, const Lanes& x, int64_t count) {
  for (int i = 0; i < kWidth && i < count; ++i) p[i] = simd::to_bf16(x[i]);
}
inline Lanes round_to(bf16, const Lanes& x) {
  Lanes out;
  for (int i = 0; i < kWidth; ++i) out[i] = simd::to_float(simd::to_bf16(x[i]));
  return out;
}
inline float sum(const Lanes& x) {  // in halves, as a register is folded
  float part[kWidth];
  std::memcpy(part, &x, sizeof part);
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}
#endif

inline Lanes round_to(float, const Lanes& x) { return x; }
inline Lanes all(float x) { return Lanes{} + x; }

// e^x within 2 ulp; arguments outside +-87 give the value at the end of the range.
inline Lanes exp(Lanes x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  x = x < all(-87.0f) ? all(-87.0f) : x;
  x = x > all(87.0f) ? all(87.0f) : x;
  const Lanes shifted = fma(x, all(1.44269504f), all(magic));
  const Lanes n = shifted - magic;
  const Lanes r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  Lanes p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  return (Lanes)((Ints)p + ((Ints)shifted << 23));
}

}  // namespace lanes
