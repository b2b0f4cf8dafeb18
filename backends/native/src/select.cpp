// The smallest kept set without a sort: the bound up to which pages may be dropped is bracketed over the whole list, then
// the few pages in the bracket are taken in order.
#include <algorithm>

#include "attention.h"

namespace attention {
namespace {

using namespace simd;

constexpr int kCuts = 2;  // tried in one pass

int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float of_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// All pages with bounds up to the float of these bits (ordered as the floats, down from -1: none).
struct Cut {
  int32_t limit;
  int64_t count;
  double upper, others;  // sum of their upper bounds; sum of the lower bounds of all others
};

template <int N>
void sum_cuts(const float* upper, const float* lower, int64_t count, Cut* cuts) {
  Vec at[N], u[N], l[N];
  Ints n[N];
  for (int c = 0; c < N; ++c) at[c] = set(of_bits(cuts[c].limit)), u[c] = l[c] = zero(), n[c] = int_zero();
  for (int64_t i = 0; i < count; i += 16) {
    const Vec a = load(upper + i), b = load(lower + i);
    for (int c = 0; c < N; ++c) {
      const Mask in = at_most(a, at[c]);
      u[c] = u[c] + where(in, a);
      l[c] = l[c] + where(static_cast<Mask>(~in), b);
      n[c] = n[c] + ones(in);
    }
  }
  const double most = std::numeric_limits<float>::max();  // a sum that overflowed is at least that
  for (int c = 0; c < N; ++c)
    cuts[c].count = sum(n[c]), cuts[c].upper = sum(u[c]), cuts[c].others = std::min<double>(sum(l[c]), most);
}

}  // namespace

void Dropper::vote(const float* upper_bound, const float* lower_bound, int64_t count, double spent, double base,
                   double f, int32_t* votes) {
  Cut low{-1, 0, 0.0, 0.0};
  sum_cuts<1>(upper_bound, lower_bound, count, &low);
  int32_t high = bits_of(kInfinity);
  int64_t open = (count + 15) / 16 * 16;  // in the bracket, padding included
  while (open > 16 && high - low.limit > 1) {
    // No page above what is left to spend goes; up to a share of it that all could spend, every page does.
    const double left = f * (base + low.others) - spent - low.upper;
    if (!(left >= 0.0)) break;
    if (left < of_bits(high)) high = std::max(low.limit, bits_of(static_cast<float>(left)));
    const int32_t sure = bits_of(static_cast<float>(left / ((1.0 + f) * static_cast<double>(open))));
    const int32_t from = sure < high ? std::max(low.limit, sure) : low.limit;
    Cut cuts[kCuts];
    for (int c = 0; c < kCuts; ++c)
      cuts[c].limit = from + static_cast<int32_t>((static_cast<int64_t>(high) - from) * (c + 1) / (kCuts + 1));
    sum_cuts<kCuts>(upper_bound, lower_bound, count, cuts);
    int64_t most = low.count + open;
    for (const Cut& cut : cuts) {
      if (!(spent + cut.upper <= f * (base + cut.others))) {
        most = cut.count, high = cut.limit;
        break;
      }
      low = cut;
    }
    open = most - low.count;
  }

  const size_t room = static_cast<size_t>(count) + 32;
  if (upper.size() < room) upper.resize(room), lower.resize(room), place.resize(room);
  const float decided = low.limit < 0 ? -1.0f : of_bits(low.limit);
  int64_t n = 0;
  Ints at = load_ints(kLanes);
  for (int64_t i = 0; i < count; i += 16, at = at + set_ints(16)) {
    const Vec a = load(upper_bound + i);
    store_ints(votes + i, load_ints(votes + i) + ones(at_most(a, set(decided))));
    const Mask in = at_most(a, set(of_bits(high))) & above(a, set(decided)) & first_lanes(count - i);
    store(upper.data() + n, packed(in, a)), store(lower.data() + n, packed(in, load(lower_bound + i)));
    store_ints(place.data() + n, packed(in, at));
    n += simd::count(in);
  }
  store(upper.data() + n, set(kInfinity)), store(lower.data() + n, zero());
  double gone = spent + low.upper, rest = base + low.others;
  for (int64_t i = 0; i < n; i += 16) {  // more than once only if all are equal
    float u[16], l[16];
    Vec us, ls;
    sums_in_order(upper.data() + i, lower.data() + i, &us, &ls);
    store(u, us), store(l, ls);
    const int m = static_cast<int>(std::min<int64_t>(n - i, 16));
    int fit = 0;
    for (int j = 0; j < m; ++j) {
      const bool fits = gone + u[j] <= f * (rest - l[j]);
      votes[place[i + j]] += fits, fit += fits;
    }
    if (fit < m) break;
    gone += largest(us), rest -= largest(ls);
  }
}

}  // namespace attention
