// Writing tokens into pages, and the quantised shadow of full pages. The format: Shadow in backends/kv_cache.py.
#include <algorithm>

#include "attention.h"
#include "pool.h"

namespace {

using namespace simd;
using attention::Pool;
using attention::Record;

float up(double x) {  // to float32, away from zero (x >= 0)
  const float near = static_cast<float>(x);
  return static_cast<double>(near) < x ? std::nextafter(near, kInfinity) : near;
}

constexpr double kHalfMax = 65504.0;

// One (page, KV head): keys (page, dim) as float64 in `k`. False if a value is not finite or beyond float16.
bool seal_keys(const Pool& pool, const Record& shape, const double* k, uint8_t* record, uint32_t* low) {
  const int dim = pool.dim, page = pool.page;
  std::vector<double> minimum(dim), maximum(dim), radius(dim);
  std::vector<float> centre(dim);
  double widest = 0.0;
  for (int d = 0; d < dim; ++d) {
    double lo = k[d], hi = k[d];
    for (int t = 0; t < page; ++t) {
      const double x = k[static_cast<int64_t>(t) * dim + d];
      if (!(std::fabs(x) <= kHalfMax)) return false;
      lo = std::min(lo, x), hi = std::max(hi, x);
    }
    centre[d] = to_float(to_half(static_cast<float>(0.5 * (lo + hi))));
    radius[d] = std::max(hi - static_cast<double>(centre[d]), static_cast<double>(centre[d]) - lo);
    widest = std::max(widest, radius[d]);
  }
  std::memset(record, 0, shape.bytes());
  std::memset(low, 0, shape.plane());
  uint32_t* high = reinterpret_cast<uint32_t*>(record + shape.high());
  // weights: radius in units of widest / 255, rounded up; 127.5 steps of w a reach it
  const float step = up(widest / (255.0 * 127.5));
  double error = 0.0, square_most = 0.0;
  std::vector<double> reach(dim);
  for (int d = 0; d < dim; ++d) {
    const double w = widest > 0.0 ? std::min(255.0, std::max(1.0, std::ceil(radius[d] / widest * 255.0))) : 1.0;
    record[shape.weight() + d] = static_cast<uint8_t>(w);
    const uint16_t bits = to_half(centre[d]).bits;
    std::memcpy(record + shape.centre() + 2 * d, &bits, 2);
    const double unit = w * static_cast<double>(step), m = centre[d];
    const int nibble = 4 * (((d & 7) >> 1) + 4 * (d & 1));
    for (int t = 0; t < page; ++t) {
      const double x = k[static_cast<int64_t>(t) * dim + d];
      const double code = unit > 0.0 ? std::min(255.0, std::max(0.0, std::nearbyint((x - m) / unit) + 128.0)) : 128.0;
      error = std::max(error, std::fabs(x - (m + unit * (code - 128.0))) / w);
      const uint32_t c = static_cast<uint32_t>(code);
      const int64_t at = (static_cast<int64_t>(t / 16) * shape.groups + d / 8) * 16 + t % 16;
      high[at] |= (c >> 4) << nibble;
      low[at] |= (c & 15u) << nibble;
    }
    reach[d] = std::fabs(m) + 128.0 * unit;
  }
  for (int d = 0; d < dim; ++d) square_most += reach[d] * reach[d];
  for (int t = 0; t < page; ++t) {
    double square = 0.0;
    for (int d = 0; d < dim; ++d) square += k[static_cast<int64_t>(t) * dim + d] * k[static_cast<int64_t>(t) * dim + d];
    square_most = std::max(square_most, square);
  }
  // float64 leaves a few 2^-53 of the magnitudes in each residue: covered by 2^-48 of the widest reach
  double magnitude = 0.0;
  for (const double r : reach) magnitude = std::max(magnitude, r);
  const float scalars[4] = {step, up(error + (error > 0.0 ? magnitude * 0x1p-48 : 0.0)),
                            up(std::sqrt(square_most) * (1.0 + 1e-12)), 0.0f};
  std::memcpy(record, scalars, 16);
  return true;
}

template <class T>
void to_double(const T* x, int64_t n, double* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i]);
}

void read_page(const void* base, int32_t dtype, int64_t at, int64_t n, double* out) {
  switch (dtype) {
    case attention::kBf16: return to_double(static_cast<const bf16*>(base) + at, n, out);
    case attention::kHalf: return to_double(static_cast<const half*>(base) + at, n, out);
    default: return to_double(static_cast<const float*>(base) + at, n, out);
  }
}

}  // namespace

// Seals `count` pages in `layers` layers. Strides in elements from one layer to the next of k and v; of record, low,
// value centre (half), value radius the arrays are (layers, pages, heads, ...), contiguous. sealed[i] becomes 0 where
// page i has a value that cannot be sealed in some layer.
extern "C" void entropic_seal(const Pool* pool_, int64_t layers, int64_t pages, const int64_t* ids, int64_t count,
                              uint16_t* value_centre, float* value_radius, uint8_t* sealed, int32_t threads) {
  const Pool& pool = *pool_;
  const Record shape(pool);
  const int64_t size = static_cast<int64_t>(pool.page) * pool.dim;
  std::vector<uint8_t> good(static_cast<size_t>(layers * count * pool.heads), 0);
  pool::Queue queue;
  pool::run(threads, [&](int, int) {
    std::vector<double> x(size), centre(pool.dim);
    for (int64_t i; (i = queue.take()) < layers * count;) {
      const int64_t layer = i / count, page = ids[i % count];
      for (int h = 0; h < pool.heads; ++h) {
        const int64_t cell = (layer * pages + page) * pool.heads + h;
        read_page(pool.k, pool.dtype, cell * size, size, x.data());
        bool ok = seal_keys(pool, shape, x.data(), const_cast<uint8_t*>(pool.record) + cell * pool.record_bytes,
                            const_cast<uint32_t*>(pool.low) + cell * (shape.plane() / 4));
        read_page(pool.v, pool.dtype, cell * size, size, x.data());
        double farthest = 0.0;
        for (int d = 0; d < pool.dim; ++d) {
          double mean = 0.0;
          for (int t = 0; t < pool.page; ++t) {
            const double v = x[static_cast<int64_t>(t) * pool.dim + d];
            ok = ok && std::fabs(v) <= kHalfMax;
            mean += v;
          }
          const half c = to_half(static_cast<float>(mean / pool.page));
          value_centre[cell * pool.dim + d] = c.bits;
          centre[d] = to_float(c);
        }
        for (int t = 0; t < pool.page; ++t) {
          double square = 0.0;
          for (int d = 0; d < pool.dim; ++d) {
            const double away = x[static_cast<int64_t>(t) * pool.dim + d] - centre[d];
            square += away * away;
          }
          farthest = std::max(farthest, square);
        }
        value_radius[cell] = up(std::sqrt(farthest) * (1.0 + 1e-12));
        good[i * pool.heads + h] = ok;
      }
    }
  });
  for (int64_t i = 0; i < count; ++i) {
    sealed[i] = 1;
    for (int64_t layer = 0; layer < layers; ++layer)
      for (int h = 0; h < pool.heads; ++h) sealed[i] &= good[(layer * count + i) * pool.heads + h];
  }
}

// Stores K and V of packed tokens in one layer: key (heads, token) rows of dim elements, bytes each `item` wide.
extern "C" void entropic_write(void* k, void* v, const void* key, const void* value, const int64_t* page,
                               const int64_t* offset, int64_t tokens, int32_t heads, int32_t page_tokens, int32_t dim,
                               int32_t item, int64_t key_head, int64_t key_token, int64_t value_head,
                               int64_t value_token) {
  const int64_t row = static_cast<int64_t>(dim) * item;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      const int64_t at = ((page[t] * heads + h) * page_tokens + offset[t]) * row;
      std::memcpy(static_cast<char*>(k) + at, static_cast<const char*>(key) + (h * key_head + t * key_token) * item, row);
      std::memcpy(static_cast<char*>(v) + at, static_cast<const char*>(value) + (h * value_head + t * value_token) * item,
                  row);
    }
  }
}
