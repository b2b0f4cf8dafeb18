#include "gemm.h"

#include "lanes.h"

namespace gemm {
namespace {

using lanes::Lanes;
using simd::bf16;

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

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

template <class T, int M>
void tile(const T* x, int64_t x_stride, const T* const w[kColumns], const T* const next[kColumns], int64_t depth,
          float* out, int64_t out_stride, int columns) {
  using S = Step<T>;
  Lanes sum[M][kColumns] = {};
  int64_t k = 0;
  for (; k + S::kDepth <= depth; k += S::kDepth) {
    typename S::Register row[kColumns];
    for (int j = 0; j < kColumns; ++j) {
      row[j] = S::load(w[j] + k);
      if (M == 1 || next[j] != w[j]) prefetch(next[j] + k);
    }
    for (int i = 0; i < M; ++i) {
      const auto value = S::load(x + i * x_stride + k);
      for (int j = 0; j < kColumns; ++j) sum[i][j] = S::add(sum[i][j], value, row[j]);
    }
  }
  if (k < depth) {
    typename S::Register row[kColumns];
    for (int j = 0; j < kColumns; ++j) row[j] = S::load(w[j] + k, depth - k);
    for (int i = 0; i < M; ++i) {
      const auto value = S::load(x + i * x_stride + k, depth - k);
      for (int j = 0; j < kColumns; ++j) sum[i][j] = S::add(sum[i][j], value, row[j]);
    }
  }
  for (int i = 0; i < M; ++i) put(out + i * out_stride, sum[i], columns);
}

}  // namespace

template <class T>
void dots(const T* x, int64_t x_stride, int64_t m, const T* w, int64_t w_stride, int64_t n, int64_t rows, int64_t depth,
          float* out, int64_t out_stride) {
  using Tile = void (*)(const T*, int64_t, const T* const*, const T* const*, int64_t, float*, int64_t, int);
  static constexpr Tile kTiles[kRows + 1] = {nullptr,    tile<T, 1>, tile<T, 2>, tile<T, 3>,
                                             tile<T, 4>, tile<T, 5>, tile<T, 6>};
  const int64_t blocks = (m + kRows - 1) / kRows;
  for (int64_t j = 0; j < n; j += kColumns) {
    const T *row[kColumns], *next[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      row[c] = w + (j + c < n ? j + c : n - 1) * w_stride;  // the last row again, and its result left out
      next[c] = w + (j + kColumns + c < rows ? j + kColumns + c : rows - 1) * w_stride;
    }
    const int columns = static_cast<int>(n - j < kColumns ? n - j : kColumns);
    for (int64_t b = 0; b < blocks; ++b) {  // blocks of equal height, give or take one row
      const int64_t from = b * m / blocks, to = (b + 1) * m / blocks;
      kTiles[to - from](x + from * x_stride, x_stride, row, b == 0 ? next : row, depth, out + from * out_stride + j,
                        out_stride, columns);
    }
  }
}

template void dots<float>(const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t, int64_t, float*,
                          int64_t);
template void dots<bf16>(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, int64_t, int64_t, float*,
                          int64_t);

}  // namespace gemm
