"""Paged attention, registered with transformers by name.

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="entropic_paged")
    batch = PagedBatch.from_plan(plan, cache, pruning)
    model(input_ids=ids[None], position_ids=batch.positions[None], use_cache=False,
          logits_to_keep=batch.last_index, paged=batch)
    batch.statistics()
    cache.seal(batch)

The model's own cache and masks are not used: keys, values and metadata travel in ``paged``.
"""

from __future__ import annotations

from backends.attention.batch import AttentionStatistics, LayerAudit, PagedBatch
from backends.attention.forward import NAME, paged_attention, register

__all__ = ["NAME", "AttentionStatistics", "LayerAudit", "PagedBatch", "paged_attention", "register"]
