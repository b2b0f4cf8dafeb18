// The smallest kept set without a sort: quickselect on the bounds, then the last few in order.
#include <algorithm>
#include <numeric>

#include "attention.h"

namespace attention {

using namespace simd;

void Dropper::vote(const float* upper_bound, const float* lower_bound, int64_t count, double spent, double base,
                   double f, int32_t* votes) {
  const size_t room = static_cast<size_t>(count) + 16;
  for (int i = 0; i < 3; ++i) {
    if (upper[i].size() < room) upper[i].resize(room), lower[i].resize(room), place[i].resize(room);
  }
  int now = 0;
  double rest = base;
  Vec lowers = zero();
  for (int64_t i = 0; i < count; i += 16) {  // the bounds are padded to 16 with zeros
    const Vec u = load(upper_bound + i), l = load(lower_bound + i);
    store(upper[0].data() + i, u), store(lower[0].data() + i, l);
    lowers = lowers + l;
  }
  std::iota(place[0].begin(), place[0].begin() + count, 0);
  rest += sum(lowers);
  int64_t n = count;
  const auto bits_of = [](float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
  };
  while (n > 16) {
    // pivot: halfway between the extremes' bits, that is, on a logarithmic scale
    Vec least = set(kInfinity), most = zero();
    for (int64_t i = 0; i < n; i += 16) {
      const int m = static_cast<int>(std::min<int64_t>(n - i, 16));
      const Vec x = load(upper[now].data() + i);
      least = zero() - max(zero() - keep_first(x, m, kInfinity), zero() - least);
      most = max(keep_first(x, m, 0.0f), most);
    }
    const float lo = -largest(zero() - least), hi = largest(most);
    if (!(lo < hi)) break;  // all equal (or all infinite)
    const int32_t middle = bits_of(lo) + (bits_of(hi) - bits_of(lo)) / 2;
    float pivot;
    std::memcpy(&pivot, &middle, 4);
    const int left = (now + 1) % 3, right = (now + 2) % 3;
    int64_t n_left = 0, n_right = 0;
    double u = 0.0, l = 0.0;
    Vec us = zero(), ls = zero();
    for (int64_t i = 0; i < n; i += 16) {
      const int m = static_cast<int>(std::min<int64_t>(n - i, 16));
      const Vec a = keep_first(load(upper[now].data() + i), m, kInfinity), b = load(lower[now].data() + i);
      us = us + where_at_most(a, set(pivot), a), ls = ls + where_at_most(a, set(pivot), b);
      const int went = part(a, b, load_ints(place[now].data() + i), m, set(pivot), upper[left].data() + n_left,
                            lower[left].data() + n_left, place[left].data() + n_left, upper[right].data() + n_right,
                            lower[right].data() + n_right, place[right].data() + n_right);
      n_left += went, n_right += m - went;
    }
    u = sum(us), l = sum(ls);
    if (spent + u <= f * (rest - l)) {
      for (int64_t i = 0; i < n_left; ++i) ++votes[place[left][i]];
      spent += u, rest -= l, now = right, n = n_right;
    } else {
      now = left, n = n_left;
    }
  }
  order.resize(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return upper[now][a] < upper[now][b] || (upper[now][a] == upper[now][b] && place[now][a] < place[now][b]);
  });
  for (const int32_t i : order) {
    const double u = upper[now][i], l = lower[now][i];
    if (!(spent + u <= f * (rest - l))) break;
    ++votes[place[now][i]];
    spent += u, rest -= l;
  }
}

}  // namespace attention
