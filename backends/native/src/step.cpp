// A whole forward pass of the decoder over the paged cache: projections, K and V written, attention, layer after layer.
#include "attention.h"
#include "decoder.h"

namespace attention {

// What may differ between layers.
struct Rule {
  const float* sinks;  // (H): learned sink logits, or null
  float scale, softcap;
  int32_t window;  // 0: none
};

// The attention of a step. Results of layer l follow those of layer l - 1.
struct Layers {
  const Pool* pools;
  const Rule* rules;
  const int64_t *page, *offset;  // (tokens): where K and V of each packed token go
  const double* nothing;         // (rows): no budgets
  int64_t first;                 // layers before it, and those with a window, read everything, whatever the budgets
  Work work;                     // of the first layer
};

}  // namespace attention

extern "C" {
void entropic_decoder_advance(const decoder::Model* model, const decoder::Step* step, int64_t layer, int threads);
void entropic_attend(const attention::Pool* pool, const attention::Work* work);
void entropic_write(void* k, void* v, const void* key, const void* value, const int64_t* page, const int64_t* offset,
                    int64_t tokens, int32_t heads, int32_t page_tokens, int32_t dim, int32_t item, int64_t key_head,
                    int64_t key_token, int64_t value_head, int64_t value_token);

void entropic_decoder_run(const decoder::Model* model, const decoder::Step* step, const attention::Layers* layers) {
  attention::Work work = layers->work;
  const double* theta = work.theta;
  const int threads = work.threads;
  for (int64_t l = 0; l < model->n_layers; ++l) {
    entropic_decoder_advance(model, step, l, threads);
    const attention::Pool& pool = layers->pools[l];
    const attention::Rule& rule = layers->rules[l];
    const int64_t row = static_cast<int64_t>(pool.heads) * pool.dim;
    entropic_write(const_cast<void*>(pool.k), const_cast<void*>(pool.v), step->k, step->v, layers->page, layers->offset,
                   step->tokens, pool.heads, pool.page, pool.dim, pool.dtype == attention::kFloat ? 4 : 2, pool.dim, row,
                   pool.dim, row);
    work.sinks = rule.sinks, work.scale = rule.scale, work.softcap = rule.softcap, work.window = rule.window;
    work.theta = l >= layers->first && rule.window == 0 ? theta : layers->nothing;
    entropic_attend(&pool, &work);
    if (work.mass != nullptr) {
      const int64_t cells = static_cast<int64_t>(work.rows) * pool.heads;
      work.mass += cells * work.group, work.read += cells, work.fine += cells;
    }
  }
  entropic_decoder_advance(model, step, model->n_layers, threads);
}
}
