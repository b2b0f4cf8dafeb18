"""A two-layer random Llama with a byte tokenizer: the real code path at almost no cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 256


def byte_tokenizer() -> Any:
    """Tokens 0..255 are bytes, 256 ends a text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    to_char = _byte_to_char()
    assert set(to_char.values()) == set(alphabet)
    vocab = {to_char[byte]: byte for byte in range(256)} | {"<eos>": EOS}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def _byte_to_char() -> dict[int, str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out = {byte: chr(byte) for byte in plain}
    for shift, byte in enumerate(b for b in range(256) if b not in out):
        out[byte] = chr(256 + shift)
    return out


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights; the logits are spread enough that argmax has no near ties."""
    settings: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def save_tiny(folder: Path, *, shards: bool = False, tokenizer: bool = True, **changes: Any) -> LlamaForCausalLM:
    """Write a Hugging Face folder."""
    model = tiny_llama(**changes)
    model.save_pretrained(folder, max_shard_size="30KB" if shards else "1GB")
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return model
