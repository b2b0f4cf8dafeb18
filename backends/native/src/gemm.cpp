#include "gemm.h"

#include "lanes.h"

namespace gemm {
namespace {

using lanes::Lanes;
using simd::bf16;

constexpr int64_t kAhead = 12288;  // bytes; measured: 9 to 12 KB, and in order, not row beside row

template <class T>
struct Step;  // what one register of weights holds: how many elements, how it is loaded, how it is accumulated

#if defined(ENTROPIC_AVX512) && defined(__AVX512BF16__)
template <>
struct Step<bf16> {  // 32 elements; pairs are multiplied exactly and added in float32
  static constexpr int kDepth = 32;
  typedef __m512i Register;
  static Register load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Register load(const bf16* p, int64_t count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1u), p);
  }
  static Lanes add(Lanes sum, Register x, Register w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
};
template <class T>
struct Step {
#else
template <class T>
struct Step {
#endif
  static constexpr int kDepth = lanes::kWidth;
  typedef Lanes Register;
  static Register load(const T* p) { return lanes::load(p); }
  static Register load(const T* p, int64_t count) { return lanes::load(p, count); }
  static Lanes add(const Lanes& sum, const Register& x, const Register& w) { return lanes::fma(x, w, sum); }
};

// Add up the lanes of four registers, each in the same order.
#ifdef ENTROPIC_AVX512
inline __m128 fold(const Lanes a[kColumns]) {
  using lanes::kAll;
  const __m512 ab = _mm512_add_ps(_mm512_maskz_unpacklo_ps(kAll, a[0], a[1]), _mm512_maskz_unpackhi_ps(kAll, a[0], a[1]));
  const __m512 cd = _mm512_add_ps(_mm512_maskz_unpacklo_ps(kAll, a[2], a[3]), _mm512_maskz_unpackhi_ps(kAll, a[2], a[3]));
  const __m512 all =
      _mm512_add_ps(_mm512_maskz_shuffle_ps(kAll, ab, cd, 0x44), _mm512_maskz_shuffle_ps(kAll, ab, cd, 0xee));
  const __m256 half =
      _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, all, 0), _mm512_maskz_extractf32x8_ps(0xff, all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline void put(float* out, const Lanes a[kColumns], int columns) {
  _mm_mask_storeu_ps(out, static_cast<__mmask8>((1u << columns) - 1u), fold(a));
}
#else
inline void put(float* out, const Lanes a[kColumns], int columns) {
  for (int j = 0; j < columns; ++j) out[j] = lanes::sum(a[j]);
}
#endif

// Products of M rows of x with kColumns rows of w; each step fetches as much as P registers hold, from `ahead` on.
template <class T, int M, int P>
void tile(const T* x, int64_t x_stride, const T* const w[kColumns], const char* ahead, int64_t depth, float* out,
          int64_t out_stride, int columns) {
  using S = Step<T>;
  constexpr int64_t kBytes = S::kDepth * sizeof(T);
  Lanes sum[M][kColumns] = {};
  const auto step = [&](int64_t k, auto... count) {
    typename S::Register row[kColumns];
    for (int j = 0; j < kColumns; ++j) row[j] = S::load(w[j] + k, count...);
    for (int i = 0; i < M; ++i) {
      const auto value = S::load(x + i * x_stride + k, count...);
      for (int j = 0; j < kColumns; ++j) sum[i][j] = S::add(sum[i][j], value, row[j]);
    }
  };
  int64_t k = 0;
  for (; k + S::kDepth <= depth; k += S::kDepth, ahead += P * kBytes) {
    for (int j = 0; j < P; ++j) __builtin_prefetch(ahead + j * kBytes);
    step(k);
  }
  if (k < depth) step(k, depth - k);
#pragma GCC unroll 8  // else the sums pass through memory
  for (int i = 0; i < M; ++i) put(out + i * out_stride, sum[i], columns);
}

}  // namespace

template <class T>
void dots(const T* x, int64_t x_stride, int64_t m, const T* w, int64_t w_stride, int64_t n, int64_t depth, float* out,
          int64_t out_stride) {
  using Tile = void (*)(const T*, int64_t, const T* const*, const char*, int64_t, float*, int64_t, int);
  constexpr int kHalf = kColumns / 2;  // a tile's worth is fetched by one block, or by two
  static constexpr Tile kTiles[2][kRows + 1] = {
      {nullptr, tile<T, 1, kColumns>, tile<T, 2, kColumns>, tile<T, 3, kColumns>, tile<T, 4, kColumns>,
       tile<T, 5, kColumns>, tile<T, 6, kColumns>},
      {nullptr, nullptr, nullptr, tile<T, 3, kHalf>, tile<T, 4, kHalf>, tile<T, 5, kHalf>, tile<T, 6, kHalf>}};
  const int64_t blocks = (m + kRows - 1) / kRows;
  for (int64_t j = 0; j < n; j += kColumns) {
    const T* row[kColumns];  // past the end: the last row again, and its result left out
    for (int c = 0; c < kColumns; ++c) row[c] = w + (j + c < n ? j + c : n - 1) * w_stride;
    const int columns = static_cast<int>(n - j < kColumns ? n - j : kColumns);
    for (int64_t b = 0; b < blocks; ++b) {  // blocks of equal height, give or take one row
      const int64_t from = b * m / blocks, to = (b + 1) * m / blocks;
      const char* ahead = reinterpret_cast<const char*>(row[0] + b % 2 * kHalf * depth) + kAhead;
      kTiles[blocks > 1][to - from](x + from * x_stride, x_stride, row, ahead, depth, out + from * out_stride + j,
                                    out_stride, columns);
    }
  }
}

template void dots<float>(const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t);
template void dots<bf16>(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, int64_t, float*, int64_t);

}  // namespace gemm
