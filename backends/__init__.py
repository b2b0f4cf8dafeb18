"""The real engine: models, paged KV cache, attention, sampling."""
