"""Decode steps of vLLM on the CPU, timed one by one around its engine's own ``step()``, in this process.

    python vllm_peer.py --model DIR --tokens FILE --threads 2 --batch 8 --context 8192

``FILE`` holds token ids of real text as a JSON list. Row i of a batch gets the text from its i-th token on, so no two
rows share a page; the prefix cache only spares a repeated measurement its prefill. A step is timed only if every row
of the batch gained a token in it and had one before: no prefill, no ramp.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

from protocol import answers, serve


def main() -> None:
    """Start the engine, greet, obey."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--tokens", required=True)
    options.add_argument("--threads", type=int, required=True)
    options.add_argument("--batch", type=int, required=True, help="largest batch")
    options.add_argument("--context", type=int, required=True, help="longest context, generated tokens included")
    asked = options.parse_args()
    stream = answers()
    cores = sorted(os.sched_getaffinity(0))[: asked.threads]
    shape = json.loads(Path(asked.model, "config.json").read_text("utf-8"))
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    room = 1 + int(1.1 * asked.batch * asked.context * token_bytes / 2**30)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(room),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    text = json.loads(Path(asked.tokens).read_text("utf-8"))
    engine = vllm.LLM(
        model=asked.model,
        dtype="bfloat16",
        max_model_len=asked.context,
        max_num_seqs=asked.batch,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    ).llm_engine
    numbers = itertools.count()

    def measure(batch: int, context: int, steps: int, warmup: int) -> list[float]:
        # rows that are prefilled first decode while the others are: at least 1,024 prompt tokens per step
        most = min(steps + warmup + 8 + -(-batch * context // 1024), asked.context - context - 1)
        sampling = vllm.SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True, detokenize=True)
        run = next(numbers)
        for row in range(batch):
            prompt = {"prompt_token_ids": text[row : row + context]}
            engine.add_request(f"{run}-{row}", prompt, sampling)
        lengths: dict[str, int] = {}
        times: list[float] = []
        while engine.has_unfinished_requests() and len(times) < warmup + steps:
            start = time.perf_counter()
            outputs = engine.step()
            passed = 1e3 * (time.perf_counter() - start)
            grew = [o for o in outputs if lengths.get(o.request_id, 0) > 0]
            if len(grew) == batch and not any(o.finished for o in outputs):
                times.append(passed)
            for output in outputs:
                lengths[output.request_id] = len(output.outputs[0].token_ids)
        engine.abort_request([f"{run}-{row}" for row in range(batch)])
        while engine.has_unfinished_requests():
            engine.step()
        return times[warmup : warmup + steps]

    weights = sum(file.stat().st_size for file in Path(asked.model).glob("*.safetensors"))
    greeting = {
        "engine": "vllm",
        "version": vllm.__version__,
        "weight_bytes": weights,
        "kv_token_bytes": token_bytes,
    }
    serve(stream, greeting, measure)


if __name__ == "__main__":
    main()
