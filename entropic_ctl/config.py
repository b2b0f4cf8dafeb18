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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropic_ctl import fields, registry
from entropic_ctl.errors import BadInputError
from entropic_ctl.workload_config import READ_BY, WorkloadConfig

__all__ = [
    "LAWS",
    "TABLES",
    "ClusterConfig",
    "CostConfig",
    "EngineConfig",
    "LawSpec",
    "LoopConfig",
    "ModelConfig",
    "RunConfig",
    "SloConfig",
    "SpeculationConfig",
    "WorkloadConfig",
    "digest",
    "inputs_of",
    "load",
    "resolve",
]

LAWS = {
    "temperature": ("entropic_ctl.temperature", "law", "fixed"),
    "pruning": ("entropic_ctl.pruning.laws", "law", "off"),
    "scheduling": ("entropic_ctl.scheduling", "policy", "fcfs"),
}
"""Loop table to (plug-in package, key that names the plug-in, default)."""


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
    kernels: str = fields.choice(
        "auto",
        ("auto", "native", "triton", "torch"),
        "engine: C++ kernels on a CPU (native), Triton's on a GPU (triton), PyTorch's, or the best that runs (auto)",
    )
    audit_rate: float = fields.number(
        0.0, 0.0, 1.0, "engine: chance that a pruned step also runs dense, for a bound on the mean KL; 0 is never"
    )
    audit_cap_nats: float = fields.number(
        0.1,
        0.0,
        100.0,
        "KL of a step above which the bound counts no more; the sequence is about min(KL, cap)",
        open_lo=True,
    )
    audit_alpha: float = fields.number(0.05, 1e-9, 0.5, "chance that the bound on the mean KL is ever wrong")
    audit_limit_nats: float = fields.number(
        0.0, 0.0, 100.0, "dense for the rest of the run once the mean KL is surely above; 0: no such limit"
    )

    def __post_init__(self) -> None:
        fields.check(self)
        if self.audit_every and self.audit_rate:
            raise BadInputError(
                "two schedules of audits",
                field="audit_rate",
                value=self.audit_rate,
                allowed=f"0 with audit_every = {self.audit_every}",
                remedy="set one of them to 0",
            )
        if self.audit_limit_nats and not (self.audit_rate or self.audit_every == 1):
            raise BadInputError(
                "a limit on the mean KL needs audits that bound it",
                field="audit_limit_nats",
                value=self.audit_limit_nats,
                allowed="0 without audit_rate",
                remedy="set audit_rate, 0.05 for example",
            )
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
    bank: str = fields.text(
        "", "entropy bank (.npz) or fitted model (.json), relative to the config; empty: the bank shipped with sim"
    )
    bank_prompts: int = fields.integer(32, 1, 10**5, "prompts generated when the bank is a fitted model")
    beyond_bank: str = fields.choice(
        "error",
        ("error", "dense"),
        "pruned rows longer than the recorded contexts: refused at the start, or run dense and counted",
    )
    calibrated: str = fields.text(
        "", "file of `entropic calibrate`, relative to the config: its times, not the preset's"
    )
    device: str = fields.text("", "in place of the preset's: a device's name, or a .json file, relative to the config")
    model: str = fields.text("", "in place of the preset's: a model's name, or a Hugging Face folder or config.json")
    weight_bits: int = fields.integer(0, 0, 32, "stored width of a weight: 4, 8, 16 or 32; 0: the model's")
    kv_bits: int = fields.integer(0, 0, 32, "stored width of a KV element: 4, 8, 16 or 32; 0: the model's")
    compute_bits: int = fields.integer(
        0, 0, 32, "width of the arithmetic: 8, 16 or 32; 0: 32 for such weights, else 16"
    )
    cores: int = fields.integer(0, 0, 4096, "device cpu: its cores; 0: one")
    bandwidth: float = fields.number(0.0, 0.0, 1e15, "memory bandwidth, bytes/s; 0: the device's")
    matmul_efficiency: float = fields.number(0.0, 0.0, 1.0, "share of the peak in the layers; 0: the device's")
    attention_efficiency: float = fields.number(0.0, 0.0, 1.0, "share of the peak in attention; 0: the device's")
    bandwidth_efficiency: float = fields.number(0.0, 0.0, 1.0, "share of the bandwidth; 0: the device's")

    def __post_init__(self) -> None:
        fields.check(self)
        for name, allowed in (
            ("weight_bits", (4, 8, 16, 32)),
            ("kv_bits", (4, 8, 16, 32)),
            ("compute_bits", (8, 16, 32)),
        ):
            value = getattr(self, name)
            if value and value not in allowed:
                raise BadInputError("not a width", field=name, value=value, allowed=f"0 or one of {allowed}")


@dataclass(frozen=True)
class ClusterConfig:
    """How many replicas of the engine the simulator runs, and who sends a request to which."""

    replicas: int = fields.integer(1, 1, 4096, "replicas of [engine] behind the router")
    router: str = fields.choice(
        "round_robin", ("round_robin", "least_loaded", "prefix_affinity", "entropic"), "see sim/routers.py"
    )
    affinity_pages: int = fields.integer(4, 1, 10**6, "prefix_affinity: full prompt pages that name a replica")
    load_guard: float = fields.number(
        1.25, 1.0, 1e6, "prefix_affinity: most load of the named replica, in mean loads; else the least loaded"
    )

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class SloConfig:
    """Latency objective of one request, for goodput; 0 is no limit."""

    ttft_s: float = fields.number(0.0, 0.0, 1e9, "most seconds to the first token")
    tpot_s: float = fields.number(0.0, 0.0, 1e9, "most seconds per further token, mean over the request")
    e2e_s: float = fields.number(0.0, 0.0, 1e9, "most seconds from arrival to the last token")

    def __post_init__(self) -> None:
        fields.check(self)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, seconds, by the request table's column."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value > 0}


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding: drafted tokens that one step verifies, in the simulator and in the real engine."""

    draft_tokens: int = fields.integer(0, 0, 64, "d: most drafted tokens of a row in one step; 0 is off")
    drafter: str = fields.choice("prompt_lookup", ("prompt_lookup", "model"), "who drafts")
    draft_below_nats: float = fields.number(100.0, 0.0, 100.0, "draft only while the last model entropy is lower, nats")
    acceptance: float = fields.number(
        0.0, 0.0, 1.0, "simulator: chance that a drafted token is accepted; 0: the measured function"
    )
    draft_model: str = fields.text(
        "smollm2-135m", "drafter 'model': as in model.path for the engine, as in cost.model for the simulator"
    )
    rule: str = fields.choice(
        "fixed", ("fixed", "entropy", "history"), "draft length: always d, or at most d by entropy or past acceptance"
    )
    rule_cost: float = fields.number(0.025, 0.0, 10.0, "c: a drafted and verified token's cost, in one-token steps")
    rule_start: float = fields.number(0.05, 0.0, 10.0, "what verifying costs besides, however many, in one-token steps")
    rule_acceptance: float = fields.number(
        0.6, 0.0, 1.0, "a_0: acceptance that 'entropy' assumes at 0 nats and 'history' starts from"
    )
    rule_scale_nats: float = fields.number(
        8.0, 0.0, 1e6, "h: 'entropy' assumes acceptance a_0 exp(-H / h)", open_lo=True
    )
    rule_weight: float = fields.number(0.1, 0.0, 1.0, "weight of the newest draft token in 'history'", open_lo=True)
    rule_probe: int = fields.integer(16, 1, 10**6, "'history': steps without a draft before it tries one token")

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class LawSpec:
    """A named law with its parameters."""

    name: str
    config: Any


def _default_law(table: str) -> LawSpec:
    package, _, default = LAWS[table]
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
        for table, (package, _, _) in LAWS.items():
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        fields.check(self)


TABLES = {
    "workload": WorkloadConfig,
    "engine": EngineConfig,
    "model": ModelConfig,
    "cost": CostConfig,
    "cluster": ClusterConfig,
    "slo": SloConfig,
    "speculation": SpeculationConfig,
}
"""Tables of a run besides ``loop``, with what describes each."""


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


def _home(key: str) -> str | None:
    """Say in which table a key that is unknown elsewhere belongs, or None."""
    found = [f"[{name}]" for name, cls in TABLES.items() if key in _names(cls)]
    for table, (package, choice, _) in LAWS.items():
        laws = [name for name in registry.names(package) if key in _names(registry.load(package, name).Config)]
        if laws:
            found.append(f"[loop.{table}] with {choice} = {' or '.join(map(repr, laws))}")
    if not found and key in _names(RunConfig) - {*TABLES, "loop"}:
        found.append("the head of the file, before any table")
    return f"{key} belongs in {' or '.join(found)}" if found else None


def _names(cls: Any) -> set[str]:
    return {item.name for item in dataclasses.fields(cls)}


def _law(table: str, values: object, where: str, lines: _Lines) -> LawSpec:
    package, key, default = LAWS[table]
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
    return LawSpec(name, fields.parse(cls, rest, where=where, table=place, line_of=lines.of(place), home=_home))


def _refuse_unread(workload: WorkloadConfig, written: Mapping[str, Any], where: str, lines: _Lines) -> None:
    """Refuse a key of a file that its kind of workload does not read, unless it says the default."""
    for name in workload.unread():
        if name in written:
            raise BadInputError(
                f"a workload of kind {workload.kind!r} does not read this key",
                where=where,
                line=lines.of("workload")(name),
                field=f"workload.{name}",
                value=written[name],
                allowed="with kind " + ", ".join(READ_BY[name]),
                remedy="delete the line, or change workload.kind",
            )


def from_mapping(values: Mapping[str, Any], *, where: str = "config", source: str = "") -> RunConfig:
    """Build a :class:`RunConfig` from nested mappings (a parsed TOML file, or a resolved config)."""
    lines = _Lines(source)
    known = {"seed", *TABLES, "loop"}
    for key in values:
        if key not in known:
            raise BadInputError(
                "unknown table or key",
                where=where,
                line=lines.of(key)("") or lines.of("")(key),
                field=key,
                allowed=", ".join(sorted(known)),
                remedy=_home(str(key)),
            )
    built: dict[str, Any] = {
        name: fields.parse(cls, values.get(name, {}), where=where, table=name, line_of=lines.of(name), home=_home)
        for name, cls in TABLES.items()
    }
    if source:
        _refuse_unread(built["workload"], values.get("workload", {}), where, lines)
    loop = values.get("loop", {})
    if not isinstance(loop, Mapping):
        raise BadInputError("not a table", where=where, field="loop", value=loop, allowed="[loop.LAW] tables")
    for key in loop:
        if key not in LAWS:
            raise BadInputError(
                "unknown law table",
                where=where,
                line=lines.of(f"loop.{key}")("") or lines.of("loop")(key),
                field=f"loop.{key}",
                allowed=", ".join(f"loop.{name}" for name in LAWS),
            )
    built["loop"] = LoopConfig(**{name: _law(name, loop.get(name, {}), where, lines) for name in LAWS})
    seed = values.get("seed", 0)
    try:
        return RunConfig(seed=seed, **built)
    except BadInputError as error:
        raise BadInputError(
            error.problem, where=where, line=lines.of("")("seed"), field="seed", value=seed, allowed=error.allowed
        ) from None


def _beside(config: RunConfig, folder: Path) -> RunConfig:
    """Take the files of ``[cost]`` that have relative paths from ``folder``."""
    cost = config.cost
    files = {"bank": cost.bank, "calibrated": cost.calibrated}
    if cost.device.endswith(".json"):  # else a name
        files["device"] = cost.device
    found: dict[str, Any] = {name: str(folder.absolute() / file) for name, file in files.items() if file}
    return dataclasses.replace(config, cost=dataclasses.replace(cost, **found)) if found else config


def load(path: str | Path) -> RunConfig:
    """Read a run from a TOML file.

    ``cost.bank``, ``cost.calibrated`` and a ``cost.device`` that ends in ``.json`` are relative to the file's folder.

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
    return _beside(from_mapping(values, where=where, source=source), Path(path).parent)


def inputs_of(config: RunConfig, also: Iterable[Any] = ()) -> list[str]:
    """Return the files a simulation reads, as far as they exist; of a model folder, its ``config.json``.

    Parameters
    ----------
    config : RunConfig
    also : iterable
        Further values that fields of the run may take; what is not text is ignored.
    """
    cost = config.cost
    named = (
        config.workload.trace,
        cost.bank,
        cost.calibrated,
        cost.device,
        cost.model,
        config.speculation.draft_model,
        *also,
    )
    paths = [Path(name) for name in named if name and isinstance(name, str)]
    files = [str(path / "config.json" if path.is_dir() else path) for path in paths]
    return sorted({name for name in files if Path(name).is_file()})


def resolve(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain nested dicts and lists, every default spelled out, as JSON would have it.

    ``from_mapping`` inverts it.
    """
    out: dict[str, Any] = {"seed": config.seed}
    for name in TABLES:
        values = dataclasses.asdict(getattr(config, name))
        out[name] = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    out["loop"] = resolve_loop(config.loop)
    return out


def resolve_loop(loop: LoopConfig) -> dict[str, Any]:
    """Return the loop part of :func:`resolve`."""
    out = {}
    for table, (_, key, _) in LAWS.items():
        spec: LawSpec = getattr(loop, table)
        out[table] = {key: spec.name, **dataclasses.asdict(spec.config)}
    return out


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a mapping in canonical JSON: equal exactly when the settings are equal."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
