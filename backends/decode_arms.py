"""The engines that ``entropic bench decode`` times: ours on copies of a filled cache, peers in their own processes."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backends.filled import FilledCache, FilledEngine
from backends.machine import ForeignLoad, SpeedProbe
from backends.models import LoadedModel
from backends.peers.launch import HOW_TO_GET, PEERS, Peer, PeerError, gguf_of, installed
from backends.prompts import document_ids
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig

__all__ = ["Arm", "Sample", "engine_config", "our_arm", "peer_arms", "run_round", "time_engine"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One arm, one round.

    Parameters
    ----------
    step_ms : list of float
        Timed steps.
    kv_bytes : float
        KV-cache bytes read per step, metadata included.
    certificate_max : float
        Largest certified -ln(1 - m) of the timed steps, nats.
    foreign_cores : float
        Cores that other processes kept busy meanwhile.
    probe_s : float
        Duration of the speed probe just before.
    """

    step_ms: list[float]
    kv_bytes: float
    certificate_max: float
    foreign_cores: float
    probe_s: float = math.nan


@dataclass
class Arm:
    """An engine to time; ``measure(batch, filled)`` runs it once, ``weight_bytes`` is what each of its steps reads."""

    name: str
    measure: Callable[[int, FilledCache], Sample]
    weight_bytes: int
    theta_nats: float = 0.0
    samples: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)
    failed: str = ""


MIN_CONTEXT = 1600
"""Tokens from which the pruned arms prune, by default: about where it begins to pay (``--crossover`` measures that)."""


def protected(page_tokens: int, *, min_context: int = 0) -> PruningConfig:
    """Return the rule of the pruned arms: the first page, the last 64 tokens and the first layer are read in full."""
    return PruningConfig(recent_pages=max(1, 64 // page_tokens), dense_layers=1, min_context=min_context)


def engine_config(
    batch: int, context: int, room: int, theta_nats: float, page_tokens: int, *, min_context: int = MIN_CONTEXT
) -> configs.RunConfig:
    """Return a run whose pool fits ``batch`` rows of ``context + room`` tokens; ``theta_nats`` 0 is dense."""
    rule = dataclasses.asdict(protected(page_tokens, min_context=min_context))
    pruning = rule | {"law": "budget", "theta_nats": theta_nats, "theta_wide_nats": theta_nats}
    engine = {
        "page_tokens": page_tokens,
        "pages": batch * -(-(context + room) // page_tokens) + 1,
        "max_batch": batch,
        "max_batch_tokens": batch * context,
        "prefill_chunk": context,
    }
    return configs.from_mapping({"engine": engine, "loop": {"pruning": pruning} if theta_nats else {}})


def time_engine(
    model: LoadedModel,
    filled: FilledCache,
    batch: int,
    theta_nats: float,
    *,
    steps: int,
    warmup: int,
    min_context: int = MIN_CONTEXT,
) -> Sample:
    """Time decode steps of our engine on ``batch`` copies of a filled cache; ``theta_nats`` 0 is dense."""
    room = steps + warmup + 2
    page = filled.cache.page_tokens
    config = engine_config(batch, len(filled.tokens), room, theta_nats, page, min_context=min_context)
    engine = FilledEngine(config, dataclasses.replace(model, eos_ids=frozenset()), filled)
    engine.admit(batch, max_new_tokens=room)
    for _ in range(1 + warmup):
        engine.step()
    gc.collect()
    load, times, read, certificate = ForeignLoad(), [], 0.0, 0.0
    for _ in range(steps):
        start = time.perf_counter()
        result = engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        if result is None or result.tokens.shape[0] != batch:
            raise BadInputError("a decode step lost a row", where="bench decode", field="batch", value=batch)
        read += result.kv_bytes / steps
        certificate = max(certificate, float(result.certificate_max.max()))
    return Sample(times, read, certificate, load.cores())


def our_arm(model: LoadedModel, theta_nats: float, steps: int, warmup: int, *, min_context: int = MIN_CONTEXT) -> Arm:
    """Return this engine as an arm; ``theta_nats`` 0 is dense."""
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    name = f"ours theta {theta_nats:g}" if theta_nats else "ours dense"

    def measure(batch: int, filled: FilledCache) -> Sample:
        sizes = {"steps": steps, "warmup": warmup, "min_context": min_context}
        return time_engine(model, filled, batch, theta_nats, **sizes)

    return Arm(name, measure, weights, theta_nats)


def _peer_arm(peer: Peer, steps: int, warmup: int) -> Arm:
    token_bytes = int(peer.greeting["kv_token_bytes"])

    def measure(batch: int, filled: FilledCache) -> Sample:
        context = len(filled.tokens)
        times, cores = peer.measure(batch, context, steps, warmup)
        return Sample(times, float(batch * token_bytes * (context + warmup + steps // 2)), 0.0, cores)

    return Arm(peer.name, measure, int(peer.greeting["weight_bytes"]))


@contextmanager
def peer_arms(
    model: LoadedModel, python: Path | None, longest: tuple[int, int], steps: int, warmup: int, say: Say
) -> Iterator[tuple[list[Arm], list[dict[str, str]]]]:
    """Start every peer that is installed; yield their arms, and the state of all of them."""
    arms: list[Arm] = []
    states: list[dict[str, str]] = []
    batch, context = longest
    threads, gguf = str(torch.get_num_threads()), gguf_of(python)
    folder = str(getattr(model.model.config, "_name_or_path", ""))
    with ExitStack() as stack:
        tokens = Path(stack.enter_context(tempfile.TemporaryDirectory()), "tokens.json")
        tokens.write_text(json.dumps(document_ids(model, context + batch + 1)), "utf-8")
        for name, package in PEERS.items():
            state = {"engine": name, "state": "absent", "remedy": HOW_TO_GET}
            states.append(state)
            if python is None or not installed(python, package):
                continue
            if package == "llama_cpp":
                if gguf is None or model.name != "smollm2-135m":
                    state |= {"state": "no GGUF file of this model", "remedy": "measured for the default model only"}
                    continue
                weights = "own" if name.endswith("Q4_1") else "bf16"
                script, arguments = "llama_peer.py", ["--gguf", str(gguf), "--weights", weights]
            else:
                if not Path(folder).is_dir():
                    state |= {"state": "no Hugging Face folder of this model", "remedy": "pass --model DIR"}
                    continue
                room = min(context + steps + warmup + 16 + -(-batch * context // 1024), model.max_context)
                script = "vllm_peer.py"
                arguments = ["--model", folder, "--batch", str(batch), "--context", str(room)]
            say(f"starting {name}")
            try:
                peer = stack.enter_context(
                    Peer(name, python, script, [*arguments, "--tokens", str(tokens), "--threads", threads])
                )
            except PeerError as error:
                state |= {"state": f"failed: {error}", "remedy": "see the peer's own message"}
                continue
            state |= {"state": f"version {peer.version}", "remedy": ""}
            arms.append(_peer_arm(peer, steps, warmup))
        yield arms, states


def run_round(arms: Sequence[Arm], batch: int, filled: FilledCache, probe: SpeedProbe, say: Say, label: str) -> None:
    """Measure every arm once at this batch and context; a peer that fails is left out from then on."""
    cell = (batch, len(filled.tokens))
    for arm in arms:
        if arm.failed:
            continue
        say(f"{label}: {arm.name}")
        probe.sample()
        try:
            sample = arm.measure(batch, filled)
        except PeerError as error:
            arm.failed = str(error)
            say(f"{arm.name} left out: {error}")
            continue
        arm.samples.setdefault(cell, []).append(dataclasses.replace(sample, probe_s=probe.last_s))
