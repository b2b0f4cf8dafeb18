"""Decode steps of llama.cpp on the CPU: one ``llama_decode`` of a token per sequence, and a sample from each.

    python llama_peer.py --gguf FILE --tokens FILE --threads 2 --weights bf16

Each sequence has its own buffer of keys and values (``kv_unified`` off): the text is prefilled once and copied into the
others, byte by byte, so no two sequences read the same memory. ``--weights`` re-writes the model once, beside FILE.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp
from protocol import answers, serve

_FTYPES = {"f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16, "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16}
_CHUNK = 512


def rewritten(gguf: str, weights: str) -> str:
    """Return ``gguf`` with its weights stored as asked, made once by llama.cpp's own converter."""
    if weights == "own":
        return gguf
    target = f"{gguf.removesuffix('.gguf')}.{weights}.gguf"
    if not Path(target).exists():
        asked = llama_cpp.llama_model_quantize_default_params()
        asked.ftype, asked.allow_requantize, asked.pure = _FTYPES[weights], True, True
        staged = f"{target}.{os.getpid()}.part"
        if llama_cpp.llama_model_quantize(gguf.encode(), staged.encode(), ctypes.byref(asked)):
            raise SystemExit(f"llama.cpp could not re-write {gguf} as {weights}")
        Path(staged).replace(target)
    return target


class Sequences:
    """``batch`` sequences with ``context`` tokens of text each in a context of their own.

    Parameters
    ----------
    model : llama_model
    text : list of int
        Token ids, more than ``context``.
    batch, context, room, threads : int
        Sequences; tokens cached of each; tokens that may follow; threads.
    """

    def __init__(self, model: Any, text: list[int], batch: int, context: int, room: int, threads: int) -> None:
        self.batch, self.context, self.last = batch, context, text[context]
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = batch * 256 * -(-(context + room) // 256)
        options.n_batch = options.n_ubatch = max(_CHUNK, batch)
        options.n_seq_max, options.kv_unified = batch, False
        options.n_threads = options.n_threads_batch = threads
        self.handle = llama_cpp.llama_init_from_model(model, options)
        if not self.handle:
            raise MemoryError(f"no context of {batch} x {context} tokens")
        self.memory = llama_cpp.llama_get_memory(self.handle)
        self.tokens = llama_cpp.llama_batch_init(max(_CHUNK, batch), 0, 1)
        for start in range(0, context, _CHUNK):
            part = text[start : min(context, start + _CHUNK)]
            self.decode([(token, start + i, 0, False) for i, token in enumerate(part)])
        for row in range(1, batch):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, row, -1, -1)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, wants logits) entries."""
        batch = self.tokens
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        if code := llama_cpp.llama_decode(self.handle, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def steps(self, count: int, sampler: Any) -> list[float]:
        """Time ``count`` decode steps, sampling included, milliseconds; the cache is as before afterwards."""
        tokens, times = [self.last] * self.batch, []
        for step in range(count):
            start = time.perf_counter()
            self.decode([(token, self.context + step, row, True) for row, token in enumerate(tokens)])
            tokens = [llama_cpp.llama_sampler_sample(sampler, self.handle, row) for row in range(self.batch)]
            times.append(1e3 * (time.perf_counter() - start))
        for row in range(self.batch):
            llama_cpp.llama_memory_seq_rm(self.memory, row, self.context, -1)
        return times

    def close(self) -> None:
        """Free everything."""
        llama_cpp.llama_batch_free(self.tokens)
        llama_cpp.llama_free(self.handle)


def main() -> None:
    """Load the model, greet, obey."""
    options = argparse.ArgumentParser()
    options.add_argument("--gguf", required=True)
    options.add_argument("--tokens", required=True)
    options.add_argument("--threads", type=int, required=True)
    options.add_argument("--weights", choices=("own", *_FTYPES), required=True)
    asked = options.parse_args()
    stream = answers()
    text = json.loads(Path(asked.tokens).read_text("utf-8"))
    llama_cpp.llama_backend_init()
    place = rewritten(asked.gguf, asked.weights)
    model = llama_cpp.llama_model_load_from_file(place.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp could not load {place}")
    sampler = llama_cpp.llama_sampler_init_dist(0)
    held: list[Sequences] = []  # the last measured shape, so that a repeat needs no prefill

    def measure(batch: int, context: int, steps: int, warmup: int) -> list[float]:
        room = steps + warmup + 1
        if not held or (held[0].batch, held[0].context) != (batch, context):
            while held:
                held.pop().close()
            held.append(Sequences(model, text, batch, context, room, asked.threads))
        return held[0].steps(steps + warmup, sampler)[warmup:]

    layers, kv_heads = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_head_kv(model)
    head = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
    greeting = {
        "engine": "llama.cpp",
        "version": llama_cpp.__version__,
        "weight_bytes": llama_cpp.llama_model_size(model),
        "kv_token_bytes": 4 * layers * kv_heads * head,
    }
    serve(stream, greeting, measure)


if __name__ == "__main__":
    main()
