// Writing tokens into pages, and the quantised shadow of full pages. The format: Shadow in backends/kv_cache.py.
#include <algorithm>

#include "attention.h"
#include "pool.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector leaves this file

namespace {

using namespace simd;
using attention::Pool;
using attention::Record;

// Eight channels, lane by lane on any machine.
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Words __attribute__((vector_size(64)));
constexpr int kGroup = 8;

constexpr int32_t kHalfMax = 0x477fe000;         // 65504, as the bits of a float
constexpr double kNearest = 6755399441055744.0;  // 1.5 2^52: what is added to it is rounded to an integer, ties to even
constexpr Words kNibble = {0, 16, 4, 20, 8, 24, 12, 28};  // where a word has channel j; see Shadow

float up(double x) {  // to float32, away from zero (x >= 0)
  const float near = static_cast<float>(x);
  return static_cast<double>(near) < x ? std::nextafter(near, kInfinity) : near;
}

inline uint64_t any(const Words& a) {  // of the eight
#ifdef ENTROPIC_AVX512
  return static_cast<uint64_t>(_mm512_reduce_or_epi64((__m512i)a));
#else
  uint64_t out = 0;
  for (int j = 0; j < kGroup; ++j) out |= static_cast<uint64_t>(a[j]);
  return out;
#endif
}

inline Doubles most(const Doubles& a, const Doubles& b) { return a > b ? a : b; }
inline Doubles least(const Doubles& a, const Doubles& b) { return a < b ? a : b; }

// Keys or values of one (page, KV head); channels past the head's are 0.
struct Sheet {
  int page, dim, groups;
  std::vector<float> given;      // (page, groups, 8)
  std::vector<Doubles> x;        // (page, groups): the same
  std::vector<Doubles> squares;  // (page): summed over groups

  Sheet(const Pool& pool, const Record& shape)
      : page(pool.page),
        dim(pool.dim),
        groups(shape.groups),
        given(static_cast<size_t>(page) * groups * kGroup + 16),
        x(static_cast<size_t>(page) * groups),
        squares(page) {}

  template <class T>
  bool read_typed(const T* from) {
    const int64_t width = static_cast<int64_t>(groups) * kGroup, size = page * width;
    for (int t = 0; t < page; ++t, from += dim)
      for (int d = 0; d < dim; d += 16)  // what goes beyond the row is written again
        store(given.data() + t * width + d, load(from + d, std::min(dim - d, 16)));
    double* wide = reinterpret_cast<double*>(x.data());
    for (int64_t i = 0; i < size; ++i) wide[i] = given[i];
    int32_t largest = 0;  // magnitude, as bits
    for (int64_t i = 0; i < size; ++i) {
      int32_t bits;
      std::memcpy(&bits, &given[i], 4);
      largest = std::max(largest, bits & 0x7fffffff);
    }
    std::fill(squares.begin(), squares.end(), Doubles{});
    return largest <= kHalfMax;
  }

  // False if a value is not finite or beyond float16.
  bool read(const void* base, int32_t dtype, int64_t at) {
    switch (dtype) {
      case attention::kBf16: return read_typed(static_cast<const bf16*>(base) + at);
      case attention::kHalf: return read_typed(static_cast<const half*>(base) + at);
      default: return read_typed(static_cast<const float*>(base) + at);
    }
  }

  const Doubles& at(int t, int group) const { return x[static_cast<int64_t>(t) * groups + group]; }

  double largest_square() const {
    double out = 0.0;
    for (const Doubles& s : squares)
      out = std::max(out, ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
    return out;
  }
};

void seal_keys(Sheet* keys, const Record& shape, uint8_t* record, uint32_t* low) {
  const int page = keys->page, dim = keys->dim, groups = keys->groups;
  std::memset(record, 0, shape.bytes());
  std::memset(low, 0, shape.plane());
  uint32_t* high = reinterpret_cast<uint32_t*>(record + shape.high());
  double centre[256], radius[256], widest = 0.0;
  for (int g = 0; g < groups; ++g) {
    Doubles lo = keys->at(0, g), hi = lo;
    for (int t = 0; t < page; ++t) {
      const Doubles x = keys->at(t, g);
      lo = least(lo, x), hi = most(hi, x);
      keys->squares[t] += x * x;
    }
    for (int j = 0, d = kGroup * g; j < kGroup && d < dim; ++j, ++d) {
      const half c = to_half(static_cast<float>(0.5 * (lo[j] + hi[j])));
      std::memcpy(record + shape.centre() + 2 * d, &c.bits, 2);
      centre[d] = to_float(c);
      radius[d] = std::max(hi[j] - centre[d], centre[d] - lo[j]);
      widest = std::max(widest, radius[d]);
    }
  }
  // weights: radius in units of widest / 255, rounded up; 127.5 steps of w a reach it
  const float step = up(widest / (255.0 * 127.5));
  double error = 0.0, magnitude = 0.0, reach_square = 0.0;
  for (int g = 0; g < groups; ++g) {
    Doubles m{}, unit{}, weight = m + 1.0;
    Words real{};
    for (int j = 0, d = kGroup * g; j < kGroup && d < dim; ++j, ++d) {
      real[j] = 255;
      weight[j] = widest > 0.0 ? std::min(255.0, std::max(1.0, std::ceil(radius[d] / widest * 255.0))) : 1.0;
      record[shape.weight() + d] = static_cast<uint8_t>(weight[j]);
      m[j] = centre[d], unit[j] = weight[j] * static_cast<double>(step);
      const double reach = std::fabs(centre[d]) + 128.0 * unit[j];
      reach_square += reach * reach;
      magnitude = std::max(magnitude, reach);
    }
    const Doubles divisor = unit > 0.0 ? unit : m * 0.0 + 1.0, zero_code = m * 0.0 + (kNearest + 128.0);
    Doubles residue{};
    for (int t = 0; t < page; ++t) {
      const Doubles x = keys->at(t, g);
      const Doubles code = least(most((x - m) / divisor + zero_code, zero_code - 128.0), zero_code + 127.0);
      const Doubles off = x - (m + unit * (code - zero_code));
      residue = most(residue, most(off, -off));
      const Words c = (Words)code & real, words = ((c & 15) << kNibble) | ((c >> 4) << (kNibble + 32));
      const uint64_t both = any(words);
      const int64_t at = (static_cast<int64_t>(t / 16) * groups + g) * 16 + t % 16;
      high[at] = static_cast<uint32_t>(both >> 32), low[at] = static_cast<uint32_t>(both);
    }
    for (int j = 0; j < kGroup; ++j) error = std::max(error, residue[j] / weight[j]);
  }
  // float64 leaves a few 2^-53 of the magnitudes in each residue: covered by 2^-48 of the widest reach
  const double square = std::max(reach_square, keys->largest_square());
  const float scalars[4] = {step, up(error + (error > 0.0 ? magnitude * 0x1p-48 : 0.0)),
                            up(std::sqrt(square) * (1.0 + 1e-12)), 0.0f};
  std::memcpy(record, scalars, 16);
}

// Centre (dim) of the values, and the largest distance from it.
float summarise_values(Sheet* values, uint16_t* centre) {
  for (int g = 0; g < values->groups; ++g) {
    Doubles sum{}, middle{};
    for (int t = 0; t < values->page; ++t) sum += values->at(t, g);
    for (int j = 0, d = kGroup * g; j < kGroup && d < values->dim; ++j, ++d) {
      const half c = to_half(static_cast<float>(sum[j] / values->page));
      centre[d] = c.bits, middle[j] = to_float(c);
    }
    for (int t = 0; t < values->page; ++t) {
      const Doubles away = values->at(t, g) - middle;
      values->squares[t] += away * away;
    }
  }
  return up(std::sqrt(values->largest_square()) * (1.0 + 1e-12));
}

}  // namespace

// Seals `count` pages in `layers` layers. Strides in elements from one layer to the next of k and v; of record, low,
// value centre (half), value radius the arrays are (layers, pages, heads, ...), contiguous but for the records' strides.
// sealed[i] becomes 0 where page i has a value that cannot be sealed in some layer.
extern "C" void entropic_seal(const Pool* pool_, int64_t layers, int64_t pages, const int64_t* ids, int64_t count,
                              uint16_t* value_centre, float* value_radius, uint8_t* sealed, int32_t threads) {
  const Pool& pool = *pool_;
  const Record shape(pool);
  const int64_t size = static_cast<int64_t>(pool.page) * pool.dim;
  std::vector<uint8_t> good(static_cast<size_t>(layers * count * pool.heads), 0);
  pool::Queue queue;
  pool::run(threads, [&](int, int) {
    Sheet sheet(pool, shape);
    for (int64_t i; (i = queue.take()) < layers * count;) {
      const int64_t layer = i / count, page = ids[i % count];
      for (int h = 0; h < pool.heads; ++h) {
        const int64_t cell = (layer * pages + page) * pool.heads + h;
        bool ok = sheet.read(pool.k, pool.dtype, cell * size);
        if (ok)
          seal_keys(&sheet, shape,
                    const_cast<uint8_t*>(pool.record_of(page, h)) + layer * pages * pool.heads * pool.record_bytes,
                    const_cast<uint32_t*>(pool.low) + cell * (shape.plane() / 4));
        ok = sheet.read(pool.v, pool.dtype, cell * size) && ok;
        value_radius[cell] = summarise_values(&sheet, value_centre + cell * pool.dim);
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
