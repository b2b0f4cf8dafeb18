"""Run the tuned loop against the baseline, end to end through the engine, on a GPU: ``make gpu-demo``.

    python3 -m backends.gpu_demo [--model FOLDER] [--requests 32] [--prompt-tokens 4096] [--new-tokens 128]

Runs in place with the machine's own interpreter (torch, transformers, triton). Without a model folder and without the
fetched default it builds a random Llama of about a billion parameters: its text means nothing, its work is real.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.triton import exit_without

if __name__ == "__main__":
    exit_without("gpu-demo", "numpy", "torch", "transformers", "array_api_compat")

import numpy as np
import torch

from backends.engine import Engine
from backends.models import LoadedModel, load, wrap
from backends.sampling import SamplingParams
from backends.triton import interpreted
from entropic_ctl import config as configs
from entropic_ctl.errors import EntropicError

__all__ = ["main", "random_model"]

_LOOPS: dict[str, dict[str, Any]] = {
    "baseline": {"pruning": {"law": "off"}},
    "tuned": {
        "temperature": {"law": "solve", "target_nats": 1.0},
        "pruning": {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.05},
        "scheduling": {"policy": "entropic"},
    },
}


def random_model(device: torch.device, *, tiny: bool = False) -> LoadedModel:
    """Return a Llama with random weights (about 1.2 billion, or next to none) and no tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    if tiny:
        sizes |= {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.05)).to(device, dtype).eval()
    return dataclasses.replace(wrap(network, None, name="random Llama"), eos_ids=frozenset())


def _run(model: LoadedModel, name: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Run all prompts through the engine under one loop, on the Triton kernels where they run."""
    batch = min(len(prompts), 32)
    pages = (batch + 1) * (-(-(len(prompts[0]) + new_tokens + 1) // 16) + 1)
    run = configs.from_mapping(
        {
            "engine": {
                "pages": pages,
                "max_batch": batch,
                "max_batch_tokens": 8192,
                "kernels": "triton" if interpreted() else "auto",
            },
            "loop": _LOOPS[name],
        }
    )
    engine = Engine(run, dataclasses.replace(model, eos_ids=frozenset()), uncertified=True)
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(max_new_tokens=new_tokens, seed=i))
    steps, kept, certificate, kv_bytes = [], [], 0.0, 0.0
    start = time.perf_counter()
    said = start
    while not engine.idle:
        result = engine.step()
        if result is None:
            continue
        kv_bytes += result.kv_bytes
        certificate = max(certificate, float(np.max(result.certificate_max, initial=0.0)))
        if result.token_ids.shape[0] == result.kept_fraction.shape[0]:  # a pure decode step
            steps.append(1e3 * (result.end_s - result.start_s))
            kept.append(float(result.kept_fraction.mean()))
        if time.perf_counter() - said > 5.0:
            said = time.perf_counter()
            print(f"   {len(steps)} decode steps", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    return {
        "kernels": engine.cache.kernels,
        "seconds": seconds,
        "tokens_per_s": len(prompts) * new_tokens / seconds,
        "decode_step_ms": float(np.median(steps)) if steps else float("nan"),
        "kept_fraction": float(np.mean(kept)) if kept else 1.0,
        "certificate_max_nats": certificate,
        "kv_gigabytes": kv_bytes / 1e9,
    }


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both loops and return the exit status: 2 if there is no GPU, or the input is bad."""
    parser = argparse.ArgumentParser(prog="gpu-demo", description="Tuned loop against baseline on a GPU.")
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: fetched, else random)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out/gpu-demo"), help="folder for result.json")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on any device")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.tiny:
        why = "no CUDA device is visible to PyTorch; `entropic demo` runs the same loop on a CPU"
        print(f"gpu-demo: {why}", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")
    try:
        if options.tiny:
            model = random_model(device, tiny=True)
        elif options.model is not None:
            model = load(options.model, device=str(device))
        else:
            try:
                model = load(device=str(device))
            except EntropicError:
                model = random_model(device)
        limit = max(1, model.max_context - options.new_tokens - 1)
        length = min(options.prompt_tokens, limit)
        made = np.random.default_rng(0)
        prompts = [made.integers(0, model.vocab_size, length).tolist() for _ in range(options.requests)]
        print("-- warm-up", file=sys.stderr, flush=True)
        for name in _LOOPS:  # compiles and allocates
            _run(model, name, prompts[:1], min(4, options.new_tokens))
        rows = {}
        for name in _LOOPS:
            print(f"-- {name}", file=sys.stderr, flush=True)
            rows[name] = _run(model, name, prompts, options.new_tokens)
    except EntropicError as error:
        print(f"gpu-demo: {error}", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{model.name} on {where}, torch {torch.__version__}: {options.requests} x {length} + {options.new_tokens}")
    for key in rows["baseline"]:
        print(f"{key:>22}  " + "  ".join(f"{name} {_shown(row[key]):>10}" for name, row in rows.items()))
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"device": where, "torch": torch.__version__, "model": model.name, "prompt_tokens": length, "loops": rows}
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
