r"""How often a prompt-lookup draft is right, as a function of entropy: what speculative decoding in simulation needs.

Texts are sampled by the real engine at fixed temperatures (and greedily), then every position is looked at once more
in one dense forward pass, with the draft that :func:`backends.drafting.lookup` finds there. Recorded as functions of
entropy:

- ``found``: share of positions where there is a draft;
- ``accepted``: mean probability that the verifier accepts the draft's next token. A draft without randomness is
  accepted with probability p_T(token) (Leviathan et al., 2023), so that mean, not a count of coin tosses, is taken.
  Every position starts a draft; the draft's later tokens count where the sampled text followed it so far, as a
  verifier sees them.

Sampled texts are tabulated over the entropy at the temperature sampled with, greedy ones over the model entropy (a
greedy verifier accepts exactly the most likely token). Bins hold equal counts; the knots are the bins' mean
entropies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.drafting import NGRAMS, lookup
from backends.engine import Engine
from backends.models import LoadedModel
from backends.prompts import PROMPTS, Prompt
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.signals import FloatArray

__all__ = ["SCHEMA", "measure"]

SCHEMA = 1
TEMPERATURES = (0.0, 0.3, 0.6, 0.9, 1.2, 1.6)


def measure(
    model: LoadedModel,
    *,
    seed: int = 0,
    prompts: Sequence[Prompt] = PROMPTS,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 192,
    draft_tokens: int = 4,
    bins: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the two tables (``sampled``, ``greedy``) with their provenance, ready for JSON.

    Parameters
    ----------
    model : LoadedModel
    seed : int
    prompts : sequence of Prompt
    temperatures : sequence of float
        0 is greedy.
    max_new_tokens : int
    draft_tokens : int
        Longest draft.
    bins : int
        Knots per table.
    progress : callable(done, total), optional
    """
    rows: dict[str, list[tuple[float, float, float]]] = {"sampled": [], "greedy": []}  # entropy, is a start, p or nan
    for at, temperature in enumerate(temperatures):
        if progress is not None:
            progress(at, len(temperatures))
        texts = _texts(model, temperature, prompts, [seed, at], max_new_tokens)
        kind = "sampled" if temperature > 0 else "greedy"
        for prompt, tokens in texts:
            rows[kind] += _positions(model, prompt, tokens, temperature, draft_tokens)
    if progress is not None:
        progress(len(temperatures), len(temperatures))
    return {
        "schema": SCHEMA,
        "drafter": "prompt_lookup",
        "model": model.name,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "seed": seed,
        "prompts": len(prompts),
        "temperatures": list(temperatures),
        "max_new_tokens": max_new_tokens,
        "draft_tokens": draft_tokens,
        "ngrams": list(NGRAMS),
        **{kind: _table(np.array(found), bins) for kind, found in rows.items() if found},
    }


def _texts(
    model: LoadedModel, temperature: float, prompts: Sequence[Prompt], seed: list[int], max_new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Sample every prompt once; return (prompt ids, new ids)."""
    ids = [model.prompt_ids(prompt.text, chat=prompt.chat) for prompt in prompts]
    pages = sum(-(-(len(prompt) + max_new_tokens) // 16) for prompt in ids) + 1
    law = {"law": "fixed", "temperature": temperature}
    limits = {"pages": pages, "max_batch": min(len(ids), 16)}
    engine = Engine(configs.from_mapping({"engine": limits, "loop": {"temperature": law}}, where="acceptance"), model)
    for number, prompt in enumerate(ids):
        key = int(np.random.SeedSequence([*seed, number]).generate_state(1, np.uint64)[0] >> 1)
        engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=key))
    outputs = engine.run()
    return [(prompt, list(output.token_ids)) for prompt, output in zip(ids, outputs, strict=True)]


def _positions(
    model: LoadedModel, prompt: list[int], new: list[int], temperature: float, draft_tokens: int
) -> list[tuple[float, float, float]]:
    """Return (entropy, 1 if a draft starts here, acceptance probability or NaN) of every drafted token and start."""
    text = prompt + new
    network = model.model
    network.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = network(torch.tensor([text], device=network.device), use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_p = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    best = log_p.argmax(-1)
    out = []
    for i in range(len(new)):
        draft = lookup(text[: len(prompt) + i], draft_tokens)
        if not draft:
            out.append((float(entropy[i]), 1.0, float("nan")))
        for j, token in enumerate(draft[: len(new) - i]):
            at = i + j
            p = float(log_p[at, token].exp()) if temperature > 0 else float(int(best[at]) == token)
            out.append((float(entropy[at]), float(j == 0), p))
            if new[at] != token:
                break
    return out


def _table(rows: FloatArray, bins: int) -> dict[str, Any]:
    """Return acceptance and share found over entropy, each with its knots and counts."""
    entropy, start, p = rows.T
    drafted, starts = ~np.isnan(p), start > 0
    return {
        "accepted": _binned(entropy[drafted], p[drafted], bins),
        "found": _binned(entropy[starts], drafted[starts].astype(float), bins),
    }


def _binned(x: FloatArray, y: FloatArray, bins: int) -> dict[str, Any]:
    order = np.argsort(x, kind="stable")
    parts = [part for part in np.array_split(order, bins) if part.size]
    knots = [float(x[part].mean()) for part in parts]
    keep = [i for i in range(len(knots)) if i == 0 or knots[i] > knots[i - 1]]
    return {
        "entropy_nats": [round(knots[i], 6) for i in keep],
        "share": [round(float(y[parts[i]].mean()), 6) for i in keep],
        "count": [int(parts[i].size) for i in keep],
    }
