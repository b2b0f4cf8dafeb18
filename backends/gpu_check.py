"""Check that the Triton kernels are right and fast on this machine's GPU: ``make gpu-check``.

    python3 -m backends.gpu_check [--out DIR] [--seconds 420]

Runs in place with the machine's own interpreter: PyTorch and Triton are all it needs. Every part is reported on its
own; one that fails leaves its error in the table and a status of 1 at the end, and the others still run. Without a GPU
it prints the floor computed from bytes, says why there is nothing else, and ends with status 2.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.triton import exit_without, interpreted, reason_unavailable

if __name__ == "__main__":
    exit_without("gpu-check", "numpy", "torch")

import torch

__all__ = ["main"]

_NOMINAL = {"A100 80GB": 2.04e12, "H100 SXM": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth by data sheet, bytes per second."""

_GRID = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (8, 131072), (64, 32768), (64, 131072)]
_THETA = 0.05
_ASSUMED = {"kept": 0.15, "refined": 0.4}
"""Shares of pages for the pruned floor without a GPU: of K and V read, of low planes read."""


class _Sections:
    """Runs parts one by one, keeps what they return or the error they end with."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        print(f"-- {name}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 -- a part that fails is a row of the table
            traceback.print_exc(file=sys.stderr)
            self.failed.append(name)
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        self.results[name] = result
        print(f"   {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        return result


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": str(device),
        "interpreter": interpreted(),
    }
    for name in ("triton", "transformers", "flash_attn", "flashinfer"):
        try:
            found[name] = __import__(name).__version__
        except Exception as error:  # noqa: BLE001 -- a peer that cannot even be imported is simply not there
            found[name] = f"no ({type(error).__name__})"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found


def _copy(device: torch.device, *, tiny: bool) -> dict[str, float]:
    from backends.gpu_decode import timed

    source = torch.ones((1 << 16) if tiny else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source), device, repeats=5) for _ in range(3))
    return {"bytes_per_s": 2.0 * source.numel() / best}


def _correct_attention(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Dense and pruned decode against float64 on small shapes: largest deviation; certificates against true masses."""
    from backends.attention.reference import Scoring
    from backends.gpu_decode import Shape, synthetic
    from backends.triton.dispatch import Pruning, budget_ratio, decode

    worst = {"dense": 0.0, "pruned_tightness": 0.0, "violations": 0.0}
    shapes = [Shape(4, 2, 64, 16)] if tiny else [Shape(32, 8, 128, 16), Shape(9, 3, 64, 16), Shape(8, 8, 80, 32)]
    for shape in shapes:
        made = synthetic(shape, 2, 20 * shape.page - 5, device, seed=3)
        scoring = Scoring(shape.dim**-0.5)
        ratio = budget_ratio(torch.full((2,), _THETA, dtype=torch.float64, device=device))
        exact = decode(*made.inputs, scoring)
        lost = []
        for two_stage in (False, True):
            got = decode(*made.inputs, scoring, pruning=Pruning(made.shadow, ratio, made.candidates, two_stage))
            lost.append(_lost(made, got, scoring))
            true, certified = lost[-1]
            worst["violations"] += float((true > certified).sum())
            if two_stage and true.any():
                worst["pruned_tightness"] = max(worst["pruned_tightness"], float(certified.mean() / true.mean()))
        for r in range(2):
            k, v, q = _row(made, r)
            p = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * scoring.scale, dim=-1)
            want = torch.matmul(p, v).reshape(shape.heads, shape.dim)
            worst["dense"] = max(worst["dense"], float((exact.out[r].double() - want).abs().max()))
    if worst["violations"] or not worst["dense"] < 0.02:
        raise RuntimeError(f"attention is wrong here: {worst}")
    return worst


def _row(made: Any, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, _, dim = made.k.shape[1:]
    ids, length = made.table[r].long(), int(made.lengths[r])
    k, v = (pool[ids].double().transpose(0, 1).reshape(heads, -1, dim)[:, :length] for pool in (made.k, made.v))
    return k, v, made.query[r].double().reshape(heads, -1, dim)


def _lost(made: Any, got: Any, scoring: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (true, certified) pruned mass of every (row, query head), float64."""
    page, heads = made.k.shape[2], made.k.shape[1]
    true = torch.empty(got.mass.shape, dtype=torch.float64)
    for r in range(true.shape[0]):
        k, _, q = _row(made, r)
        p = torch.softmax(torch.matmul(q, k.transpose(1, 2)) * scoring.scale, dim=-1).cpu()
        where = torch.arange(p.shape[-1]) // page
        for j in range(heads):
            kept = got.pages.index[r, j, : int(got.pages.count[r, j])].cpu().long()
            out = ~torch.isin(where, kept)
            group = p.shape[1]
            true[r, j * group : (j + 1) * group] = p[j][:, out].sum(dim=-1)
    return true, got.mass.double().cpu()


def _correct_sampling(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Check entropy, varentropy and the solve against float64; return the largest errors."""
    from backends.triton.sampling import Target, sample_rows
    from entropic_ctl.entropy import entropy_varentropy

    n = 3000 if tiny else 128256
    made = torch.Generator(device).manual_seed(0)
    logits = torch.randn(4, n, generator=made, device=device) * torch.tensor(
        [[1.0], [3.0], [8.0], [0.0]], device=device
    )
    words = torch.arange(4, device=device)
    got = sample_rows(logits, words, words, temperature=torch.full((4,), 0.8, dtype=torch.float64, device=device))
    h, _ = entropy_varentropy(logits.double().cpu().numpy(), 0.8)
    error = float((got.entropy.double().cpu() - torch.from_numpy(h)).abs().max())
    solved = sample_rows(logits, words, words, target=Target(2.0, 0.05, 5.0))
    met = entropy_varentropy(logits[1].double().cpu().numpy(), float(solved.temperature[1]))[0]
    if error > 1e-4 or abs(float(met) - 2.0) > 1e-3:
        raise RuntimeError(f"sampling is wrong here: entropy off by {error:.2g}, solved entropy {float(met):.5f}")
    return {"entropy_error_nats": error, "solve_error_nats": abs(float(met) - 2.0)}


def _decode(device: torch.device, bandwidth: float, *, tiny: bool, deadline: float) -> list[dict[str, Any]]:
    from backends.gpu_decode import LLAMA_8B, Shape, bytes_dense, measure

    shape = Shape(4, 2, 64, 16) if tiny else LLAMA_8B
    rows: list[dict[str, Any]] = []
    for batch, context in [(1, 160)] if tiny else _GRID:
        row: dict[str, Any] = {"batch": batch, "context": context}
        need = 2.6 * bytes_dense(shape, batch * context)  # cache, contiguous copies for the peers, shadow
        if device.type == "cuda" and need > 0.85 * torch.cuda.mem_get_info(device)[0]:
            row["skipped"] = f"needs {need / 2**30:.0f} GiB"
        elif time.monotonic() > deadline:
            row["skipped"] = "out of time"
        else:
            print(f"   batch {batch}, {context} tokens", file=sys.stderr, flush=True)
            try:
                row |= measure(shape, batch, context, _THETA, device, repeats=1 if tiny else 20, bandwidth=bandwidth)
            except Exception as error:  # noqa: BLE001 -- the other sizes still count
                row["wrong"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def floor_table() -> list[dict[str, Any]]:
    """Return the least time per layer that the bytes allow, by data-sheet bandwidth: megabytes, microseconds.

    Dense, and pruned with an *assumed* share of pages read and of low planes looked at (:data:`_ASSUMED`): arithmetic,
    nothing measured.
    """
    from backends.gpu_decode import LLAMA_8B, bytes_dense, bytes_pruned

    rows = []
    for batch, context in _GRID:
        dense = bytes_dense(LLAMA_8B, batch * context)
        pruned = bytes_pruned(LLAMA_8B, batch * context, **_ASSUMED)
        row: dict[str, Any] = {"batch": batch, "context": context, "dense_mb": dense / 1e6, "pruned_mb": pruned / 1e6}
        row |= {f"floor_us {name}": 1e6 * dense / rate for name, rate in _NOMINAL.items()}
        rows.append(row | {f"floor_pruned_us {name}": 1e6 * pruned / rate for name, rate in _NOMINAL.items()})
    return rows


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in shown)) for i, column in enumerate(columns)]
    for line in [columns, *shown]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status: 1 if a part failed, 2 if there is no GPU to check."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Are the Triton kernels right and fast here?")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"), help="folder for result.json")
    parser.add_argument("--seconds", type=float, default=420.0, help="start no further size after this long")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on any device (under the interpreter: CPU)")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    why = reason_unavailable()
    parts = _Sections()
    device = torch.device("cpu" if why is not None or interpreted() else "cuda")
    tiny = bool(options.tiny)
    parts.run("hardware", lambda: _hardware(device))
    if why is not None:
        parts.results["not measured"] = why
        assumed = ", ".join(f"{name} {share:.0%}" for name, share in _ASSUMED.items())
        parts.results[f"floor per layer of Llama-3-8B: bytes over bandwidth (pruned: assumed {assumed})"] = (
            floor_table()
        )
    else:
        copied = parts.run("copy bandwidth", lambda: _copy(device, tiny=tiny))
        bandwidth = copied.get("bytes_per_s", _NOMINAL["H200"])
        parts.run("attention against the reference", lambda: _correct_attention(device, tiny=tiny))
        parts.run("sampling against the reference", lambda: _correct_sampling(device, tiny=tiny))
        rows = parts.run("decode attention", lambda: _decode(device, bandwidth, tiny=tiny, deadline=deadline))
        if isinstance(rows, list) and any("wrong" in row for row in rows):
            parts.failed.append("decode attention")
    for name, result in parts.results.items():
        print(f"\n{name}")
        if isinstance(result, list):
            _print_rows(result)
        elif isinstance(result, dict):
            print("  " + ", ".join(f"{key} {_cell(value)}" for key, value in result.items()))
        else:
            print(f"  {result}")
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "result.json"
    target.write_text(json.dumps(parts.results | {"failed": parts.failed}, indent=1) + "\n", encoding="utf-8")
    verdict = "FAILED: " + ", ".join(parts.failed) if parts.failed else "all parts ran" if why is None else "no GPU"
    print(f"\n{verdict}; written to {target}")
    if parts.failed:
        return 1
    if why is not None:
        print(f"gpu-check: nothing was checked: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
