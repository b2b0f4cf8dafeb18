#include "decoder.h"

#include <algorithm>

namespace decoder {
namespace {

using gemm::Matrix;
using simd::bf16;

constexpr int64_t kChunk = 32;  // weight rows handed out at once
constexpr int64_t kGroup = 24;  // activation rows that share a pass over a chunk

template <class T>
const T* at(const void* p, int64_t index = 0) {
  return static_cast<const T*>(p) + index;
}
template <class T>
T* at(void* p, int64_t index = 0) {
  return static_cast<T*>(p) + index;
}

int64_t chunks(const Matrix& w) { return (w.rows + kChunk - 1) / kChunk; }

// Products of all rows of x with chunk c of w, bias added: done(row, first column, columns, values) for each row.
template <class T, class Done>
void product(const T* x, int64_t m, const Matrix& w, int64_t c, Done done) {
  alignas(64) float out[kGroup * kChunk];
  const int64_t from = c * kChunk, n = std::min(kChunk, w.rows - from);
  for (int64_t row = 0; row < m; row += kGroup) {
    const int64_t group = std::min(kGroup, m - row);
    gemm::dots(x + row * w.depth, w.depth, group, at<T>(w.weight, from * w.stride), w.stride, n, w.depth, out,
               kChunk);
    for (int64_t i = 0; i < group; ++i) {
      if (w.bias != nullptr) rows::add_bias(out + i * kChunk, at<T>(w.bias, from), n);
      done(row + i, from, n, out + i * kChunk);
    }
  }
}

template <class T>
void norm_all(const Model& model, const T* x, const void* weight, int64_t m, T* out, Team& team) {
  for (int64_t i; (i = team.take(m)) < m;)
    rows::norm(model.norm, x + i * model.hidden, at<T>(weight), model.hidden, model.eps, out + i * model.hidden);
}

// residual += product, through a norm if the layer has one there.
template <class T>
void project_back(const Model& model, const Step& step, const T* from, const Matrix& w, const void* weight,
                  Team& team) {
  const int64_t hidden = model.hidden;
  T *x = at<T>(step.x), *h = at<T>(step.h);
  team.next();
  for (int64_t c; (c = team.take(chunks(w))) < chunks(w);)
    product(from, step.tokens, w, c, [&](int64_t i, int64_t column, int64_t n, const float* value) {
      if (weight == nullptr)
        rows::add(value, n, x + i * hidden + column);
      else
        rows::put(value, n, h + i * hidden + column);
    });
  if (weight == nullptr) return;
  team.next();
  for (int64_t i; (i = team.take(step.tokens)) < step.tokens;) {
    T* row = h + i * hidden;
    rows::norm(model.norm, row, at<T>(weight), hidden, model.eps, row);
    rows::add(row, hidden, x + i * hidden);
  }
}

template <class T>
void turn(const Model& model, const Step& step, const Layer& layer, T* row, const void* weight, int64_t heads,
          int64_t token) {
  const int64_t d = model.head_dim, angle = step.angles[token] * model.rotary;
  if (weight != nullptr && model.whole_qk_norm)
    rows::norm(model.norm, row, at<T>(weight), heads * d, model.eps, row);
  for (int64_t h = 0; h < heads; ++h) {
    T* head = row + h * d;
    if (weight != nullptr && !model.whole_qk_norm) rows::norm(model.norm, head, at<T>(weight), d, model.eps, head);
    rows::rotate(head, step.cos[layer.rope] + angle, step.sin[layer.rope] + angle, model.rotary, model.exact_rope != 0);
  }
}

}  // namespace

template <class T>
void before_attention(const Model& model, const Step& step, int64_t index, Team& team) {
  const Layer& layer = model.layers[index];
  const int64_t m = step.tokens;
  T* input = at<T>(step.x);
  team.next();
  if (layer.attention_norm != nullptr) {
    norm_all(model, input, layer.attention_norm, m, at<T>(step.h), team);
    input = at<T>(step.h);
    team.next();
  }
  const Matrix* parts[3] = {&layer.q, &layer.k, &layer.v};
  T* outputs[3] = {at<T>(step.q), at<T>(step.k), at<T>(step.v)};
  const int64_t ends[3] = {chunks(layer.q), chunks(layer.q) + chunks(layer.k),
                           chunks(layer.q) + chunks(layer.k) + chunks(layer.v)};
  for (int64_t c; (c = team.take(ends[2])) < ends[2];) {
    const int part = c < ends[0] ? 0 : c < ends[1] ? 1 : 2;
    const Matrix& w = *parts[part];
    product(input, m, w, part ? c - ends[part - 1] : c, [&](int64_t i, int64_t column, int64_t n, const float* value) {
      rows::put(value, n, outputs[part] + i * w.rows + column);
    });
  }
  team.next();
  for (int64_t i; (i = team.take(m)) < m;) {
    turn(model, step, layer, outputs[0] + i * layer.q.rows, layer.q_norm, model.heads, i);
    turn(model, step, layer, outputs[1] + i * layer.k.rows, layer.k_norm, model.kv_heads, i);
  }
}

template <class T>
void after_attention(const Model& model, const Step& step, int64_t index, Team& team) {
  const Layer& layer = model.layers[index];
  const int64_t m = step.tokens, inner = layer.down.depth;
  project_back(model, step, at<T>(step.attention), layer.o, layer.attention_out_norm, team);
  T *input = at<T>(step.x), *mlp = at<T>(step.mlp);
  team.next();
  if (layer.mlp_norm != nullptr) {
    norm_all(model, input, layer.mlp_norm, m, at<T>(step.h), team);
    input = at<T>(step.h);
    team.next();
  }
  alignas(64) float gates[kGroup * kChunk];
  for (int64_t c; (c = team.take(chunks(layer.gate))) < chunks(layer.gate);)
    for (int64_t row = 0; row < m; row += kGroup) {
      const T* x = input + row * layer.gate.depth;
      const int64_t group = std::min(kGroup, m - row);
      product(x, group, layer.gate, c,
              [&](int64_t i, int64_t, int64_t n, const float* value) { std::copy(value, value + n, gates + i * kChunk); });
      product(x, group, layer.up, c, [&](int64_t i, int64_t column, int64_t n, const float* value) {
        rows::gate(model.activation, gates + i * kChunk, value, n, mlp + (row + i) * inner + column);
      });
    }
  project_back(model, step, mlp, layer.down, layer.mlp_out_norm, team);
}

template <class T>
void head(const Model& model, const Step& step, Team& team) {
  const int64_t hidden = model.hidden;
  T *x = at<T>(step.x), *h = at<T>(step.h);
  team.next();
  for (int64_t i; (i = team.take(step.sampled)) < step.sampled;)
    rows::norm(model.norm, x + step.last[i] * hidden, at<T>(model.final_norm), hidden, model.eps, h + i * hidden);
  team.next();
  for (int64_t c; (c = team.take(chunks(model.head))) < chunks(model.head);)
    product(h, step.sampled, model.head, c, [&](int64_t i, int64_t column, int64_t n, const float* value) {
      rows::put_rounded<T>(value, n, step.logits + i * model.head.rows + column);
    });
}

namespace {

template <class T>
void advance(const Model& model, const Step& step, int64_t layer, int threads) {
  Team::Shared shared(threads);
  pool::run(threads, [&](int thread, int n) {
    Team team(&shared, thread, n);
    if (layer > 0) after_attention<T>(model, step, layer - 1, team);
    if (layer < model.n_layers)
      before_attention<T>(model, step, layer, team);
    else
      head<T>(model, step, team);
  });
}

template <class T>
void linear(const T* x, int64_t m, const Matrix& w, float* y, int threads) {
  Team::Shared shared(threads);
  pool::run(threads, [&](int thread, int n) {
    Team team(&shared, thread, n);
    team.next();
    for (int64_t c; (c = team.take(chunks(w))) < chunks(w);)
      product(x, m, w, c, [&](int64_t i, int64_t column, int64_t columns, const float* value) {
        rows::put(value, columns, y + i * w.rows + column);
      });
  });
}

}  // namespace
}  // namespace decoder

extern "C" {

// Finish layer - 1 (if there is one) on the step's attention output, then prepare `layer`, or after the last the logits.
void entropic_decoder_advance(const decoder::Model* model, const decoder::Step* step, int64_t layer, int threads) {
  if (model->bf16)
    decoder::advance<simd::bf16>(*model, *step, layer, threads);
  else
    decoder::advance<float>(*model, *step, layer, threads);
}

// y (m, rows) float32 = x (m, depth) w^T + bias.
void entropic_linear(const void* x, int64_t m, const gemm::Matrix* w, float* y, int bf16, int threads) {
  if (bf16)
    decoder::linear(static_cast<const simd::bf16*>(x), m, *w, y, threads);
  else
    decoder::linear(static_cast<const float*>(x), m, *w, y, threads);
}

// 1 if the kernels were compiled with the processor's bf16 dot product.
int entropic_bf16_dot() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}
}
