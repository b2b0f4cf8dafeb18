// Products of activations with row-major weights, y = x W^T, accumulated in float32.
//
// A weight matrix is used where the model keeps it, (rows, depth) with consecutive depth: a row is one contiguous
// stream, sixteen partial sums run along it, and one tree adds them at the end. That costs about a tenth more
// instructions than an interleaved copy at depth 576, and saves the copy.
// Every output has one accumulator and one order of additions, whatever the number of rows of x, the tile or the thread:
// a request's logits do not depend on its batch.
#pragma once
#include <cstdint>

#include "simd.h"

namespace gemm {

constexpr int kColumns = 4;  // rows of W in one register tile
constexpr int kRows = 6;     // most rows of x in one register tile

struct Matrix {  // C ABI; bias may be null
  const void* weight;
  const void* bias;
  int64_t rows, depth, stride;  // stride in elements
};

// out[i * out_stride + j] = sum over k of x[i * x_stride + k] * w[j * w_stride + k], for i < m, j < n.
// What follows in memory is fetched meanwhile, for the next call.
template <class T>
void dots(const T* x, int64_t x_stride, int64_t m, const T* w, int64_t w_stride, int64_t n, int64_t depth, float* out,
          int64_t out_stride);

}  // namespace gemm
