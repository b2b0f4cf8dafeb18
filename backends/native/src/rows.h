// What a decoder layer does to one row between its products, rounded where transformers rounds it.
#pragma once
#include "lanes.h"

namespace rows {

using lanes::Lanes;

enum class Norm : int32_t {
  kLlama = 0,  // w * round(x / rms)
  kOlmo = 1,   // round(w * x / rms)
  kGemma = 2,  // round((1 + w) * x / rms)
};
enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

template <class T>
void norm(Norm kind, const T* x, const T* weight, int64_t n, float eps, T* out) {  // out may be x
  Lanes squares{};
  for (int64_t i = 0; i < n; i += lanes::kWidth) {
    const Lanes v = lanes::load(x + i, n - i);
    squares = lanes::fma(v, v, squares);
  }
  const float scale = 1.0f / std::sqrt(lanes::sum(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += lanes::kWidth) {
    Lanes v = lanes::load(x + i, n - i) * scale;
    const Lanes w = lanes::load(weight + i, n - i);
    if (kind == Norm::kLlama) v = lanes::round_to(T{}, v) * w;
    if (kind == Norm::kOlmo) v = v * w;
    if (kind == Norm::kGemma) v = v * (w + 1.0f);
    lanes::store(out + i, v, n - i);
  }
}

// Turn the first `rotary` elements of x: pairs are (i, i + rotary / 2). `exact` rounds once, at the end.
template <class T>
void rotate(T* x, const float* cos, const float* sin, int64_t rotary, bool exact) {
  const int64_t half = rotary / 2;
  const auto term = [exact](const Lanes& v) { return exact ? v : lanes::round_to(T{}, v); };
  for (int64_t i = 0; i < half; i += lanes::kWidth) {
    const int64_t count = half - i;
    const Lanes a = lanes::load(x + i, count), b = lanes::load(x + half + i, count);
    const Lanes turned_a = term(a * lanes::load(cos + i, count)) - term(b * lanes::load(sin + i, count));
    const Lanes turned_b = term(b * lanes::load(cos + half + i, count)) + term(a * lanes::load(sin + half + i, count));
    lanes::store(x + i, turned_a, count);
    lanes::store(x + half + i, turned_b, count);
  }
}

template <class T>
void add_bias(float* value, const T* bias, int64_t n) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < n; i += lanes::kWidth)
    lanes::store(value + i, lanes::load(value + i, n - i) + lanes::load(bias + i, n - i), n - i);
}

template <class T>
void put(const float* value, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += lanes::kWidth) lanes::store(out + i, lanes::load(value + i, n - i), n - i);
}

template <class T>
void put_rounded(const float* value, int64_t n, float* out) {  // float32 holding values of T
  for (int64_t i = 0; i < n; i += lanes::kWidth)
    lanes::store(out + i, lanes::round_to(T{}, lanes::load(value + i, n - i)), n - i);
}

template <class T, class V>
void add(const V* value, int64_t n, T* residual) {  // residual += round(value)
  for (int64_t i = 0; i < n; i += lanes::kWidth) {
    const Lanes v = lanes::round_to(T{}, lanes::load(value + i, n - i));
    lanes::store(residual + i, lanes::load(residual + i, n - i) + v, n - i);
  }
}

template <class T>
void gate(Activation kind, const float* gate, const float* up, int64_t n, T* out) {  // round(round(act(g)) * u)
  for (int64_t i = 0; i < n; i += lanes::kWidth) {
    const Lanes g = lanes::round_to(T{}, lanes::load(gate + i, n - i));
    const Lanes u = lanes::round_to(T{}, lanes::load(up + i, n - i));
    Lanes slope = g;  // both activations are g * sigmoid(slope)
    if (kind == Activation::kGeluTanh) slope = g * lanes::fma(lanes::all(0.0713548163f), g * g, lanes::all(1.5957691216f));
    lanes::store(out + i, lanes::round_to(T{}, g / (lanes::exp(-slope) + 1.0f)) * u, n - i);
  }
}

}  // namespace rows
