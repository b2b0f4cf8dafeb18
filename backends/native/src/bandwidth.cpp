// How fast this machine reads memory: every thread adds up its share of a large block.
#include <chrono>
#include <cstdint>

#include "pool.h"
#include "simd.h"

namespace {

uint64_t added(const uint64_t* data, int64_t words) {  // eight sums, so that no addition waits for the one before
  uint64_t sum[8] = {};
  int64_t i = 0;
#ifdef ENTROPIC_AVX512
  __m512i lanes[8];
  for (auto& lane : lanes) lane = _mm512_setzero_si512();
  for (; i + 64 <= words; i += 64) {
    for (int j = 0; j < 8; ++j) lanes[j] = _mm512_add_epi64(lanes[j], _mm512_loadu_si512(data + i + 8 * j));
  }
  for (auto& lane : lanes) sum[0] += static_cast<uint64_t>(_mm512_reduce_add_epi64(lane));
#else
  for (; i + 8 <= words; i += 8) {
    for (int j = 0; j < 8; ++j) sum[j] += data[i + j];
  }
#endif
  for (; i < words; ++i) sum[0] += data[i];
  for (int j = 1; j < 8; ++j) sum[0] += sum[j];
  return sum[0];
}

}  // namespace

// Seconds to read `words` 64-bit words once with `threads` threads; *sum receives their sum (modulo 2^64).
extern "C" double entropic_read_seconds(const uint64_t* data, int64_t words, int threads, uint64_t* sum) {
  std::atomic<uint64_t> total{0};
  const auto start = std::chrono::steady_clock::now();
  pool::run(threads, [&](int thread, int n) {
    const int64_t first = words * thread / n, last = words * (thread + 1) / n;
    total.fetch_add(added(data + first, last - first), std::memory_order_relaxed);
  });
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  *sum = total.load();
  return passed.count();
}
