// Everything of a decoder-only transformer except its attention, on activations packed row by row.
//
// One layer is two functions around the attention. They run inside a `pool::run` of the caller and meet at the barriers
// of a `Team`, so that a caller who has the attention at hand can run a whole stack in one go.
#pragma once
#include <memory>

#include "gemm.h"
#include "pool.h"
#include "rows.h"

namespace decoder {

// The three structs are the C ABI that backends/decoder_abi.py mirrors. Pointers are to elements of the model's dtype
// unless typed; a null norm is left out. T tokens, H query heads, G KV heads, D head size.
struct Layer {
  gemm::Matrix q, k, v, o, gate, up, down;
  const void *attention_norm, *q_norm, *k_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
  int64_t rope;  // which cos and sin of the step
};
struct Model {
  const Layer* layers;
  const void* final_norm;
  gemm::Matrix head;
  int64_t n_layers, hidden, heads, kv_heads, head_dim, rotary;
  int64_t whole_qk_norm;  // q_norm and k_norm span all heads, not one
  int64_t exact_rope;     // rotary products are not rounded one by one
  float eps;
  rows::Norm norm;
  rows::Activation activation;
  int32_t bf16;  // else float32
};
struct Step {
  int64_t tokens, sampled;
  const int64_t* angles;         // (T,) row of cos and sin of each token
  const int64_t* last;           // (sampled,) tokens whose logits are wanted
  const float *cos[2], *sin[2];  // (angles, rotary)
  void *x, *h;                   // (T, hidden): residual stream; scratch
  void *q, *k, *v;               // (T, H, D), (T, G, D), (T, G, D)
  void* mlp;                     // (T, intermediate)
  const void* attention;         // (T, H, D)
  float* logits;                 // (sampled, vocabulary), rounded to the model's dtype
};

// Who takes part in a run. Phases follow each other at barriers. Within a phase every thread works through its own
// stretch of the pieces, so that it reads the weights in order, and then helps where something is left.
class Team {
 public:
  struct Shared {
    explicit Shared(int threads) : barrier(threads), queues(new pool::Queue[3 * threads]) {}
    pool::Barrier barrier;
    std::unique_ptr<pool::Queue[]> queues;
  };
  Team(Shared* shared, int thread, int threads) : shared_(shared), thread_(thread), threads_(threads) {}

  // Start the next phase: everything before it, by all, is done. Each thread resets its queue of the phase after it:
  // nobody can still hold it, as its last use lies two barriers back.
  void next() {
    if (threads_ > 1) shared_->barrier.wait();
    phase_ = (phase_ + 1) % 3;
    helped_ = 0;
    shared_->queues[(phase_ + 1) % 3 * threads_ + thread_].reset();
  }

  // Return the next of the pieces 0..total-1 of this phase, or total when none is left. Call it until then.
  int64_t take(int64_t total) {
    for (; helped_ < threads_; ++helped_) {
      const int whose = (thread_ + helped_) % threads_;
      const int64_t from = total * whose / threads_, to = total * (whose + 1) / threads_;
      const int64_t piece = from + shared_->queues[phase_ * threads_ + whose].take();
      if (piece < to) return piece;
    }
    return total;
  }

 private:
  Shared* shared_;
  int thread_, threads_, phase_ = 0, helped_ = 0;
};

// x -> q, k, v: norm, projections, norms of q and k, rotary embedding. Ends without a barrier.
template <class T>
void before_attention(const Model& model, const Step& step, int64_t layer, Team& team);
// attention -> x: output projection, residual, gated MLP, residual. Ends without a barrier.
template <class T>
void after_attention(const Model& model, const Step& step, int64_t layer, Team& team);
// x -> logits of the sampled tokens.
template <class T>
void head(const Model& model, const Step& step, Team& team);

}  // namespace decoder
