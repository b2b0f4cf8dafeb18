"""One TOML file describes a run: workload, engine, model, cost, loop, seed.

Unknown keys, wrong types and out-of-range values are errors that name file, line, key, value and range. The resolved
configuration (every default spelled out) is stamped into each result, and ``digest`` identifies it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropic_ctl import fields, registry
from entropic_ctl.errors import BadInputError

__all__ = [
    "CostConfig",
    "EngineConfig",
    "LawSpec",
    "LoopConfig",
    "ModelConfig",
    "RunConfig",
    "WorkloadConfig",
    "digest",
    "load",
    "resolve",
]

_LAWS = {  # loop table -> (plug-in package, key that names the plug-in, default)
    "temperature": ("entropic_ctl.temperature", "law", "fixed"),
    "pruning": ("entropic_ctl.pruning.laws", "law", "off"),
    "scheduling": ("entropic_ctl.scheduling", "policy", "fcfs"),
}


@dataclass(frozen=True)
class WorkloadConfig:
    """Who arrives, when, and how much they ask for."""

    kind: str = fields.choice("burst", ("burst", "poisson", "closed", "azure"), "arrival process")
    n_requests: int = fields.integer(64, 1, 10**8, "requests to generate (a trace has its own number)")
    rate_per_s: float = fields.number(1.0, 0.0, 1e6, "poisson: mean arrivals per second", open_lo=True)
    rate_scale: float = fields.number(1.0, 0.0, 1e6, "azure: factor on the recorded arrival rate", open_lo=True)
    users: int = fields.integer(8, 1, 10**6, "closed: concurrent users")
    think_s: float = fields.number(0.0, 0.0, 1e6, "closed: mean think time, exponential")
    prompt_tokens: float = fields.number(128.0, 1.0, 1e6, "mean prompt length (log-normal)")
    prompt_cv: float = fields.number(0.5, 0.0, 10.0, "coefficient of variation of the prompt length; 0 is constant")
    output_tokens: float = fields.number(64.0, 1.0, 1e6, "mean limit on output tokens (log-normal)")
    output_cv: float = fields.number(0.0, 0.0, 10.0, "coefficient of variation of the output limit; 0 is constant")
    output_length: str = fields.choice(
        "auto",
        ("auto", "bank", "limit"),
        "bank: the recorded end of text ends a request; limit: only its limit does; auto: limit for a trace, else bank",
    )
    trace: str = fields.text("", "azure: path of the CSV file")
    trace_rows: int = fields.integer(0, 0, 10**8, "azure: use the first rows only; 0 is all of them")

    def __post_init__(self) -> None:
        fields.check(self)
        if self.kind == "azure" and not self.trace:
            raise BadInputError("an azure workload needs a trace", field="trace", remedy="set trace = 'FILE.csv'")

    @property
    def runs_to_limit(self) -> bool:
        """True if a request ends at its output limit only, never where the recorded text ended."""
        return self.output_length == "limit" or (self.output_length == "auto" and self.kind == "azure")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one replica, the same for the simulator and the real engine."""

    page_tokens: int = fields.integer(16, 1, 1024, "tokens per KV page")
    pages: int = fields.integer(2048, 1, 2**24, "pages in the KV pool")
    max_batch: int = fields.integer(8, 1, 65536, "B: rows that run in one step")
    max_batch_tokens: int = fields.integer(512, 1, 2**24, "tokens one step can run")
    prefill_chunk: int = fields.integer(256, 1, 2**24, "most prompt tokens of one request in one step")
    max_live: int = fields.integer(256, 1, 2**20, "N: requests admitted at once; more wait outside, in arrival order")
    max_context: int = fields.integer(2**24, 2, 2**31 - 1, "longest context the model accepts, tokens")
    observation_lag: int = fields.integer(0, 0, 1, "steps by which the host sees entropies late")
    prefix_caching: bool = fields.flag(False, "share full prompt pages between requests")
    audit_every: int = fields.integer(0, 0, 10**6, "engine: every n-th step also runs dense to measure KL; 0 is never")

    def __post_init__(self) -> None:
        fields.check(self)
        if self.max_batch_tokens < self.max_batch:
            raise BadInputError(
                "a step must have room for one token of every row",
                field="max_batch_tokens",
                value=self.max_batch_tokens,
                allowed=f">= max_batch = {self.max_batch}",
            )


@dataclass(frozen=True)
class ModelConfig:
    """Which weights the real engine runs."""

    path: str = fields.text("smollm2-135m", "the embedded default, a Hugging Face folder, or a GGUF file")
    dtype: str = fields.choice("bfloat16", ("bfloat16", "float16", "float32"), "dtype of weights and KV cache")
    device: str = fields.text("cpu", "torch device")


@dataclass(frozen=True)
class CostConfig:
    """What the simulator charges for a step, and where entropies come from."""

    preset: str = fields.text("cpu2-smollm2-135m", "device and model shape; see sim/cost.py")
    bank: str = fields.text("", "recorded entropy bank; empty is the bank shipped with sim")
    calibrated: str = fields.text("", "file of `entropic calibrate`: its times replace the preset's; empty: none")


@dataclass(frozen=True)
class LawSpec:
    """A named law with its parameters."""

    name: str
    config: Any


def _default_law(table: str) -> LawSpec:
    package, _, default = _LAWS[table]
    return LawSpec(default, registry.load(package, default).Config())


@dataclass(frozen=True)
class LoopConfig:
    """The three laws. ``fixed`` / ``off`` / ``fcfs`` switch a law off (the paper's ablations)."""

    temperature: LawSpec = field(default_factory=lambda: _default_law("temperature"))
    pruning: LawSpec = field(default_factory=lambda: _default_law("pruning"))
    scheduling: LawSpec = field(default_factory=lambda: _default_law("scheduling"))

    def build(self) -> tuple[Any, Any, Any]:
        """Return the (temperature, pruning, scheduling) law objects."""
        laws = []
        for table, (package, _, _) in _LAWS.items():
            spec: LawSpec = getattr(self, table)
            laws.append(registry.load(package, spec.name).build(spec.config))
        return laws[0], laws[1], laws[2]


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    seed: int = fields.integer(0, 0, 2**63 - 1, "root seed; every source of randomness derives a named stream from it")
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        fields.check(self)


_PLAIN = {"workload": WorkloadConfig, "engine": EngineConfig, "model": ModelConfig, "cost": CostConfig}


class _Lines:
    """Where a key stands in the TOML source: good enough to point an editor at it."""

    def __init__(self, source: str) -> None:
        self._at: dict[tuple[str, str], int] = {}
        table = ""
        for number, raw in enumerate(source.splitlines(), start=1):
            if header := re.match(r"\s*\[\s*([\w.\-]+)\s*\]", raw):
                table = header[1]
                self._at.setdefault((table, ""), number)
            elif key := re.match(r"\s*([\w\-]+)\s*=", raw):
                self._at.setdefault((table, key[1]), number)

    def of(self, table: str) -> fields.LineOf:
        return lambda key: self._at.get((table, key), self._at.get((table, "")))


def _law(table: str, values: object, where: str, lines: _Lines) -> LawSpec:
    package, key, default = _LAWS[table]
    place = f"loop.{table}"
    if not isinstance(values, Mapping):
        raise BadInputError("not a table", where=where, field=place, value=values, allowed="key = value pairs")
    name = values.get(key, default)
    if name not in registry.names(package):
        raise BadInputError(
            "no such law",
            where=where,
            line=lines.of(place)(key),
            field=f"{place}.{key}",
            value=name,
            allowed=", ".join(registry.names(package)),
        )
    rest = {k: v for k, v in values.items() if k != key}
    cls = registry.load(package, name).Config
    return LawSpec(name, fields.parse(cls, rest, where=where, table=place, line_of=lines.of(place)))


def from_mapping(values: Mapping[str, Any], *, where: str = "config", source: str = "") -> RunConfig:
    """Build a :class:`RunConfig` from nested mappings (a parsed TOML file, or a resolved config)."""
    lines = _Lines(source)
    known = {"seed", *_PLAIN, "loop"}
    for key in values:
        if key not in known:
            raise BadInputError(
                "unknown table or key",
                where=where,
                line=lines.of(key)("") or lines.of("")(key),
                field=key,
                allowed=", ".join(sorted(known)),
            )
    built: dict[str, Any] = {
        name: fields.parse(cls, values.get(name, {}), where=where, table=name, line_of=lines.of(name))
        for name, cls in _PLAIN.items()
    }
    loop = values.get("loop", {})
    if not isinstance(loop, Mapping):
        raise BadInputError("not a table", where=where, field="loop", value=loop, allowed="[loop.LAW] tables")
    for key in loop:
        if key not in _LAWS:
            raise BadInputError(
                "unknown law table",
                where=where,
                line=lines.of(f"loop.{key}")("") or lines.of("loop")(key),
                field=f"loop.{key}",
                allowed=", ".join(f"loop.{name}" for name in _LAWS),
            )
    built["loop"] = LoopConfig(**{name: _law(name, loop.get(name, {}), where, lines) for name in _LAWS})
    seed = values.get("seed", 0)
    try:
        return RunConfig(seed=seed, **built)
    except BadInputError as error:
        raise BadInputError(
            error.problem, where=where, line=lines.of("")("seed"), field="seed", value=seed, allowed=error.allowed
        ) from None


def load(path: str | Path) -> RunConfig:
    """Read a run from a TOML file.

    Raises
    ------
    BadInputError
        If the file is missing, is not UTF-8 TOML, or holds an unknown key or a bad value.
    """
    where = str(path)
    try:
        source = Path(path).read_bytes().decode("utf-8-sig")  # editors on Windows put a byte-order mark first
        values = tomllib.loads(source)
    except OSError as error:
        raise BadInputError(
            f"cannot read config: {error.strerror}", where=where, remedy="pass the path of a TOML file"
        ) from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"not UTF-8 at byte {error.start}", where=where, allowed="TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"not TOML: {error}", where=where) from None
    except RecursionError:
        raise BadInputError("not TOML: nested too deeply", where=where) from None
    except ValueError as error:  # an integer with thousands of digits
        raise BadInputError(f"not TOML: {str(error).partition(':')[0]}", where=where) from None
    return from_mapping(values, where=where, source=source)


def resolve(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain nested dicts, every default spelled out; ``from_mapping`` inverts it."""
    out: dict[str, Any] = {"seed": config.seed}
    for name in _PLAIN:
        out[name] = dataclasses.asdict(getattr(config, name))
    out["loop"] = resolve_loop(config.loop)
    return out


def resolve_loop(loop: LoopConfig) -> dict[str, Any]:
    """Return the loop part of :func:`resolve`."""
    out = {}
    for table, (_, key, _) in _LAWS.items():
        spec: LawSpec = getattr(loop, table)
        out[table] = {key: spec.name, **dataclasses.asdict(spec.config)}
    return out


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a mapping in canonical JSON: equal exactly when the settings are equal."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
