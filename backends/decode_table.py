"""From timed rounds to the table of ``entropic bench decode``: medians, spread, floor, ratios, and the targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.decode_arms import Sample

__all__ = ["Row", "disturbed", "ratios_of", "summarise", "targets_of"]

_FOREIGN = 0.15  # cores of others from which a round counts as disturbed
_SLOW = 1.25  # times the fastest speed probe from which it does
_TARGET_CELLS = (8, 8000, 128)  # batch, long and short context


@dataclass(frozen=True)
class Row:
    """One engine at one batch and context.

    Parameters
    ----------
    engine : str
    batch, context : int
        Rows; tokens cached of each when timing starts.
    step_ms : float
        Median duration of a decode step over the undisturbed rounds (all rounds if none was undisturbed).
    step_ms_low, step_ms_high : float
        Lowest and highest median of a round.
    rounds_ms : list of float
        Median of each round, disturbed ones included, in order.
    disturbed : int
        Rounds in which another process took a core, or the machine was slow.
    tokens_per_s : float
    kv_bytes : float
        KV-cache bytes read per step, metadata included.
    kv_bytes_fraction : float
        Of what our dense engine reads.
    attention_gb_s : float
        KV bytes beyond those of the shortest context with the same batch, over the time beyond that step: 1e9 bytes/s;
        NaN at that context.
    floor_ms : float
        (weights + KV bytes read) over the measured read bandwidth.
    floor_fraction : float
        Floor over step: 1 is perfect.
    theta_nats : float
        0 is dense.
    kl_mean, kl_low, kl_high : float
        KL(pruned || dense) in nats per token, with the weights in float32: mean over texts, means of the best and the
        worst text. 0 where everything is read: dense, and below ``min_context``; peers are not compared (0 too).
    kl_as_run, kl_rounding : float
        In the model's own dtype: this budget, and one that leaves out nothing (mere rounding).
    certificate_max : float
        Largest certified -ln(1 - m), timed and audited steps, nats; 0 where everything is read.
    violations : int
        Heads that lost more than certified, or more than theta.
    audited_heads, audited_positions : int
        0 where nothing is pruned, so nothing audited.
    certificate_ratio : float
        Mean certificate over mean true mass; NaN where nothing was pruned.
    """

    engine: str
    batch: int
    context: int
    step_ms: float
    step_ms_low: float
    step_ms_high: float
    rounds_ms: list[float]
    disturbed: int
    tokens_per_s: float
    kv_bytes: float
    kv_bytes_fraction: float
    attention_gb_s: float
    floor_ms: float
    floor_fraction: float
    theta_nats: float
    kl_mean: float
    kl_low: float
    kl_high: float
    kl_as_run: float
    kl_rounding: float
    certificate_max: float
    violations: int
    audited_heads: int
    audited_positions: int
    certificate_ratio: float


def disturbed(sample: Sample, fastest_probe_s: float) -> bool:
    """Return True if others were at work during a round, or the speed probe before it was slow."""
    return sample.foreign_cores > _FOREIGN or sample.probe_s > _SLOW * fastest_probe_s


def _kept(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    fastest = min((s.probe_s for s in samples if not math.isnan(s.probe_s)), default=math.nan)
    good = [s for s in samples if not disturbed(s, fastest)]
    return good or list(samples), len(samples) - len(good)


def _step_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(t for sample in _kept(samples)[0] for t in sample.step_ms)


def _kv_bytes(samples: Sequence[Sample]) -> float:
    return statistics.fmean(sample.kv_bytes for sample in samples)


def summarise(
    engine: str,
    batch: int,
    context: int,
    samples: Sequence[Sample],
    *,
    dense: Sequence[Sample],
    base: Sequence[Sample] | None,
    loss: dict[str, float] | None,
    theta_nats: float,
    weight_bytes: int,
    bandwidth: float,
) -> Row:
    """Make a row of the rounds of one engine.

    Parameters
    ----------
    engine, batch, context
    samples : sequence of Sample
    dense : sequence of Sample
        Our dense engine at the same batch and context.
    base : sequence of Sample, optional
        This engine at the same batch and the shortest context.
    loss : dict, optional
        From :func:`backends.decode_loss.audit_losses`, of this budget; None for dense engines.
    theta_nats : float
    weight_bytes : int
    bandwidth : float
        Bytes per second.
    """
    good, bad = _kept(samples)
    middle, medians = _step_ms(samples), [statistics.median(s.step_ms) for s in good]
    read = _kv_bytes(samples)
    floor = 1e3 * (weight_bytes + read) / bandwidth
    beyond_ms = middle - _step_ms(base) if base else 0.0
    beyond = read - _kv_bytes(base) if base else 0.0
    lost = loss or {}
    return Row(
        engine=engine,
        batch=batch,
        context=context,
        step_ms=middle,
        step_ms_low=min(medians),
        step_ms_high=max(medians),
        rounds_ms=[statistics.median(s.step_ms) for s in samples],
        disturbed=bad,
        tokens_per_s=1e3 * batch / middle,
        kv_bytes=read,
        kv_bytes_fraction=read / _kv_bytes(dense),
        attention_gb_s=1e-6 * beyond / beyond_ms if beyond_ms > 0 and beyond > 0 else math.nan,
        floor_ms=floor,
        floor_fraction=floor / middle,
        theta_nats=theta_nats,
        kl_mean=lost.get("kl_mean", 0.0),
        kl_low=lost.get("kl_low", 0.0),
        kl_high=lost.get("kl_high", 0.0),
        kl_as_run=lost.get("kl_as_run", 0.0),
        kl_rounding=lost.get("kl_rounding", 0.0),
        certificate_max=max(lost.get("certificate_max", 0.0), *(s.certificate_max for s in samples)),
        violations=int(lost.get("violations", 0)),
        audited_heads=int(lost.get("heads", 0)),
        audited_positions=int(lost.get("positions", 0)),
        certificate_ratio=lost.get("certificate_ratio", math.nan),
    )


def _pairs(mine: Row, other: Row) -> list[float]:
    """Return the ratio of ``other`` to ``mine`` in each round: what slows a round slows both."""
    return [b / a for a, b in zip(mine.rounds_ms, other.rounds_ms, strict=False)]


def _speedup(mine: Row, other: Row) -> float:
    return statistics.median(_pairs(mine, other))


def ratios_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return how much faster each engine of ours is than each other row of its cell.

    Each entry: ``engine``, ``over``, ``batch``, ``context``; ``speedup``, ``low`` and ``high``: median, lowest and
    highest ratio within one round.
    """
    out = []
    for mine in (row for row in rows if row.engine.startswith("ours")):
        for other in rows:
            same = (other.batch, other.context) == (mine.batch, mine.context)
            if not same or other is mine or (other.theta_nats and not mine.theta_nats):
                continue
            pairs = _pairs(mine, other)
            out.append(
                {
                    "engine": mine.engine,
                    "over": other.engine,
                    "batch": mine.batch,
                    "context": mine.context,
                    "speedup": _speedup(mine, other),
                    "low": min(pairs),
                    "high": max(pairs),
                }
            )
    return out


def targets_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the targets that these rows decide: ``target``, ``value``, ``wanted``, ``at_most``, ``met``.

    They are about two cells, 8 x 8,000 and 8 x 128; none is judged whose cell was not measured. The pruned engine is
    the fastest one at the long cell whose mean KL is at most 0.0015 nats (the one with the least KL if none is).
    """
    batch, context, short = _TARGET_CELLS

    def at(engine: str, tokens: int) -> Row | None:
        return next((r for r in rows if (r.engine, r.batch, r.context) == (engine, batch, tokens)), None)

    dense, vllm, vllm_short = at("ours dense", context), at("vllm", context), at("vllm", short)
    dense_short = at("ours dense", short)
    pruned = [r for r in rows if r.theta_nats and (r.batch, r.context) == (batch, context)]
    faithful = [r for r in pruned if r.kl_mean <= 0.0015]
    best = min(faithful, key=lambda r: r.step_ms) if faithful else min(pruned, key=lambda r: r.kl_mean, default=None)
    out: list[dict[str, Any]] = []

    def add(target: str, value: float, wanted: float, *, most: bool = False) -> None:
        met = bool(value <= wanted if most else value >= wanted)
        out.append({"target": target, "value": value, "wanted": wanted, "at_most": most, "met": met})

    if dense and vllm:
        add(f"dense over vllm, {batch} x {context:,}: speedup", _speedup(dense, vllm), 1.0)
    if dense and best:
        add(f"{best.engine} over dense, {batch} x {context:,}: speedup", _speedup(best, dense), 1.45)
        add("its mean KL, nats", best.kl_mean, 0.0015, most=True)
        add("its share of dense KV bytes", best.kv_bytes_fraction, 0.45, most=True)
        add("its certificate violations", best.violations, 0, most=True)
        if best.audited_heads:
            add("its mean certificate over mean true mass", best.certificate_ratio, 1.25, most=True)
        if dense_short and not math.isnan(best.attention_gb_s):
            add("its attention, GB/s of bytes read", best.attention_gb_s, 15.0)
    if dense and dense_short and not math.isnan(dense.attention_gb_s):
        add("dense attention, GB/s of bytes read", dense.attention_gb_s, 15.0)
    if vllm and best:
        add(f"{best.engine} over vllm, {batch} x {context:,}: speedup", _speedup(best, vllm), 1.5)
    best_short = at(best.engine, short) if best else None
    if dense_short and vllm_short:
        add(f"dense step over vllm's, {batch} x {short:,}", 1 / _speedup(dense_short, vllm_short), 1.3, most=True)
    if dense_short and best_short:
        add(f"pruned step over dense, {batch} x {short:,}", 1 / _speedup(best_short, dense_short), 1.05, most=True)
    return out
