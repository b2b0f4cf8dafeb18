"""A cost model measured on a machine: the calibration as a record, as a file, and as what the simulator charges.

``[cost] calibrated = "cost.json"`` makes the simulator use it. :mod:`sim.calibrate` makes it from engine logs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim.cost import CostModel, StepCost
from sim.load import StepLoad
from sim.streams import stream

__all__ = [
    "FORMAT",
    "REFERENCE_LAW",
    "REGIMES",
    "TERMS",
    "CalibratedCost",
    "Calibration",
    "Residuals",
    "load",
    "read",
    "regime",
    "terms",
    "to_json",
]

FORMAT = 1
"""Version of the file."""
_KIND = "entropic calibration"
REFERENCE_LAW = "fixed"
"""The temperature law whose cost is inside the term of the sampling rows."""
REGIMES = ("decode", "prefill", "pruned", "pruned with prefill")
"""Kinds of iterations whose residuals are kept apart."""
TERMS = (
    "sampling_row",
    "dense_row",
    "dense_context",
    "prefill_row",
    "prefill_context",
    "prefill_pair",
    "pruning_step",
    "pruned_row",
    "pruned_context",
    "kept_context",
    "sealed_page",
)
"""Linear terms, in the order of :func:`terms`; each coefficient is in seconds per unit."""
_REACH = 1.25
"""A sum may exceed the largest seen by this factor (the terms are linear); tokens may not (their table is measured)."""
_BOUNDED = ("rows", "decode_context", "pruned_context", "prefill_context", "prefill_pairs")
_NOISE_BLOCK = 4096
_LARGEST = sys.float_info.max


def terms(load: Any, prunes: Any, page_tokens: int) -> tuple[Any, ...]:
    """Return the linear terms of a load, in the order of ``TERMS``: numbers, or columns if the load holds columns.

    Parameters
    ----------
    load : StepLoad
        Of one iteration, or of columns of shape (S,).
    prunes : bool or bool array, shape (S,)
        Whether the pruning law is on.
    page_tokens : int
    """
    return (
        load.sampling,
        load.decode_rows - load.pruned_rows,
        load.decode_context - load.pruned_context,
        load.rows - load.decode_rows,
        load.prefill_context,
        load.prefill_pairs,
        1.0 * (load.pruned_rows > 0),
        load.pruned_rows,
        load.pruned_context,
        load.pruned_kept_context,
        load.tokens * prunes / page_tokens,
    )


def regime(load: Any) -> Any:
    """Return the index in ``REGIMES`` of a load (a number, or a column)."""
    return 1 * (load.rows > load.decode_rows) + 2 * (load.pruned_rows > 0)


@dataclass(frozen=True)
class Residuals:
    """Measured / fitted: how many, the mean, and equally spaced quantiles from the smallest to the largest."""

    n: int
    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """What a fit found.

    Parameters
    ----------
    knots, table_s, table_se : tuple of float, length K
        Tokens of a step, g at them and its standard errors, seconds.
    terms_s, terms_se : dict
        Coefficient and standard error by name in ``TERMS``, seconds per unit; NaN where the bound at 0 holds.
    laws_s, laws_se : dict
        Seconds per sampling row by temperature law.
    residuals : dict of str to Residuals
        By regime.
    ranges : dict of str to (low, high)
        Of each field of the load.
    page_tokens : int
    between_s : float
        Median time between two steps (already part of the fitted durations).
    iterations, outliers : int
        Seen; and of them given no weight.
    r2 : float
        Weighted share of the variance of the durations that the fit explains.
    source : tuple of str
    device, versions : dict
    """

    knots: tuple[float, ...]
    table_s: tuple[float, ...]
    table_se: tuple[float, ...]
    terms_s: Mapping[str, float]
    terms_se: Mapping[str, float]
    laws_s: Mapping[str, float]
    laws_se: Mapping[str, float]
    residuals: Mapping[str, Residuals]
    ranges: Mapping[str, tuple[float, float]]
    page_tokens: int
    between_s: float
    iterations: int
    outliers: int
    r2: float
    source: tuple[str, ...]
    device: Mapping[str, Any]
    versions: Mapping[str, str]


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Return a calibration as plain values; ``results.write_json`` writes them."""
    return {"kind": _KIND, "format": FORMAT, **dataclasses.asdict(calibration)}


def _bad(where: str, field: str, value: object, allowed: str) -> BadInputError:
    return BadInputError(
        "not a calibration of this version",
        where=where,
        field=field,
        value=value,
        allowed=allowed,
        remedy="make one with `entropic calibrate LOG --out FILE`",
    )


def _number(where: str, field: str, value: Any, *, lowest: float = 0.0, null: bool = False) -> float:
    if value is None and null:
        return math.nan
    low = max(lowest, -_LARGEST)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= _LARGEST:
        raise _bad(where, field, value, f"a finite number >= {lowest:g}")
    return float(value)


def _whole(where: str, field: str, value: Any, *, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**63:
        raise _bad(where, field, value, f"an integer >= {lowest}")
    return value


def _numbers(where: str, field: str, values: Any, *, null: bool = False) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise _bad(where, field, values, "a list of numbers")
    return tuple(_number(where, f"{field}[{i}]", v, null=null) for i, v in enumerate(values))


def _table(where: str, field: str, values: Any, names: Any = None, *, null: bool = False) -> dict[str, float]:
    if not isinstance(values, dict) or (names is not None and set(values) != set(names)):
        raise _bad(where, field, values, f"the keys {', '.join(names)}" if names else "a table")
    return {str(k): _number(where, f"{field}.{k}", v, null=null) for k, v in values.items()}


def read(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises
    ------
    BadInputError
        If it is missing, is no JSON, is no calibration of this version, or holds a value out of range: the field, the
        value and what is allowed.
    """
    where = str(path)
    try:
        v = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(
            f"cannot read calibration: {error.strerror}", where=where, remedy="make one with `entropic calibrate`"
        ) from None
    except (ValueError, RecursionError):
        raise BadInputError("not JSON", where=where, remedy="make one with `entropic calibrate`") from None
    if not isinstance(v, dict) or v.get("kind") != _KIND or v.get("format") != FORMAT:
        found = (v.get("kind"), v.get("format")) if isinstance(v, dict) else type(v).__name__
        raise _bad(where, "kind, format", found, f"{_KIND!r}, {FORMAT}")
    for item in dataclasses.fields(Calibration):
        if item.name not in v:
            raise _bad(where, item.name, None, "present")
    knots = _numbers(where, "knots", v["knots"])
    table = _numbers(where, "table_s", v["table_s"])
    if len(table) != len(knots) or any(b <= a for a, b in itertools.pairwise(knots)):
        raise _bad(where, "knots, table_s", (len(knots), len(table)), "increasing knots, one value at each")
    if not isinstance(v["residuals"], dict) or set(v["residuals"]) != set(REGIMES):
        raise _bad(where, "residuals", v["residuals"], f"the keys {', '.join(REGIMES)}")
    residuals = {}
    for name, r in v["residuals"].items():
        field = f"residuals.{name}"
        if not isinstance(r, dict) or set(r) != {"n", "mean", "quantiles"}:
            raise _bad(where, field, r, "n, mean, quantiles")
        quantiles = _numbers(where, f"{field}.quantiles", r["quantiles"])
        if len(quantiles) < 2 or list(quantiles) != sorted(quantiles):
            raise _bad(where, f"{field}.quantiles", quantiles, "at least two, not decreasing")
        mean = _number(where, f"{field}.mean", r["mean"])
        if not (mean > 0.0 and quantiles[-1] > 0.0):
            raise _bad(where, field, (mean, quantiles[-1]), "a mean and a largest quantile > 0")
        residuals[name] = Residuals(_whole(where, f"{field}.n", r["n"]), mean, quantiles)
    if not isinstance(v["ranges"], dict) or set(v["ranges"]) != set(StepLoad._fields):
        raise _bad(where, "ranges", v["ranges"], f"the keys {', '.join(StepLoad._fields)}")
    ranges = {}
    for name, pair in v["ranges"].items():
        both = _numbers(where, f"ranges.{name}", pair)
        if len(both) != 2 or both[1] < both[0]:
            raise _bad(where, f"ranges.{name}", pair, "[low, high]")
        ranges[name] = (both[0], both[1])
    errors = _numbers(where, "table_se", v["table_se"], null=True)
    if len(errors) != len(knots):
        raise _bad(where, "table_se", len(errors), f"{len(knots)} numbers, one per knot")
    linear, laws = _table(where, "terms_s", v["terms_s"], TERMS), _table(where, "laws_s", v["laws_s"])
    if not any((*table, *linear.values(), *laws.values())):
        raise _bad(where, "table_s, terms_s, laws_s", 0, "at least one > 0: a step takes time")
    if not isinstance(v["source"], list) or not all(isinstance(name, str) for name in v["source"]):
        raise _bad(where, "source", v["source"], "a list of file names")
    for name in ("device", "versions"):
        if not isinstance(v[name], dict):
            raise _bad(where, name, v[name], "a table")
    return Calibration(
        knots=knots,
        table_s=table,
        table_se=errors,
        terms_s=linear,
        terms_se=_table(where, "terms_se", v["terms_se"], TERMS, null=True),
        laws_s=laws,
        laws_se=_table(where, "laws_se", v["laws_se"], laws, null=True),
        residuals=residuals,
        ranges=ranges,
        page_tokens=_whole(where, "page_tokens", v["page_tokens"], lowest=1),
        between_s=_number(where, "between_s", v["between_s"]),
        iterations=_whole(where, "iterations", v["iterations"], lowest=1),
        outliers=_whole(where, "outliers", v["outliers"]),
        r2=_number(where, "r2", v["r2"], lowest=-math.inf),
        source=tuple(v["source"]),
        device=v["device"],
        versions=v["versions"],
    )


class CalibratedCost:
    """Charges what a machine was measured to take (``CostModel``); FLOPs, KV bytes and joules come from ``accounts``.

    Parameters
    ----------
    calibration : Calibration
    config : RunConfig
        Its laws and page size; its seed names the stream ``cost noise``.
    accounts : CostModel
        Counts operations and bytes (they follow from the model's shape, not from a clock).
    noise : bool
        Draw each step's measured / fitted ratio from the residuals; without, charge their mean.
    beyond : str
        ``"error"``: a load outside what was calibrated is refused; ``"count"``: it is charged and counted in
        ``beyond_steps``.

    Attributes
    ----------
    beyond_steps : int
        Iterations so far outside the calibrated ranges.

    Raises
    ------
    BadInputError
        If the temperature law, the pruning law or the page size was not calibrated.
    """

    def __init__(
        self,
        calibration: Calibration,
        config: RunConfig,
        accounts: CostModel,
        *,
        noise: bool = True,
        beyond: str = "error",
        where: str = "calibration",
    ) -> None:
        law, pruning = config.loop.temperature.name, config.loop.pruning.name
        self._prunes = pruning != "off"
        self._where, self._strict = where, beyond == "error"
        if law not in calibration.laws_s:
            raise BadInputError(
                "a temperature law the calibration has not seen",
                where=where,
                field="loop.temperature.law",
                value=law,
                allowed=", ".join(calibration.laws_s),
                remedy="log a run under this law too",
            )
        if self._prunes and not calibration.ranges["pruned_rows"][1]:
            raise BadInputError(
                "the calibration has seen no pruning",
                where=where,
                field="loop.pruning.law",
                value=pruning,
                allowed="off",
                remedy="log a run under this law too",
            )
        if config.engine.page_tokens != calibration.page_tokens:
            raise BadInputError(
                "calibrated at another page size",
                where=where,
                field="engine.page_tokens",
                value=config.engine.page_tokens,
                allowed=str(calibration.page_tokens),
            )
        self.beyond_steps = 0
        self._accounts, self._page = accounts, calibration.page_tokens
        self._knots, self._table = calibration.knots, calibration.table_s
        self._b = tuple(calibration.terms_s[name] for name in TERMS)
        self._law_s, self._between_s = calibration.laws_s[law], calibration.between_s
        self._limits = tuple((name, _REACH * calibration.ranges[name][1]) for name in _BOUNDED)
        self._means = tuple(calibration.residuals[name].mean for name in REGIMES)
        self._quantiles = tuple(calibration.residuals[name].quantiles for name in REGIMES)
        self._random = stream(config.seed, "cost noise") if noise else None
        self._drawn: list[float] = []

    def _ratio(self, kind: int) -> float:
        if self._random is None:
            return self._means[kind]
        if not self._drawn:
            self._drawn = self._random.random(_NOISE_BLOCK).tolist()
        quantiles = self._quantiles[kind]
        at = self._drawn.pop() * (len(quantiles) - 1)
        i = int(at)
        return quantiles[i] + (at - i) * (quantiles[i + 1] - quantiles[i])

    def _outside(self, load: StepLoad) -> None:
        """Refuse or count a load outside what was calibrated."""
        found: tuple[str, float, str] | None = None
        low, high = self._knots[0], self._knots[-1]
        if not low <= load.tokens <= high:
            found = "tokens", load.tokens, f"[{low:g}, {high:g}]"
        for name, limit in self._limits:
            if getattr(load, name) > limit:
                found = name, getattr(load, name), f"<= {limit:g} ({_REACH:g} times the largest seen)"
        if found is None:
            return
        self.beyond_steps += 1
        if self._strict:
            raise BadInputError(
                "an iteration outside what was calibrated",
                where=self._where,
                field=found[0],
                value=found[1],
                allowed=found[2],
                remedy="calibrate on logs that cover it, or lower engine.max_batch, max_batch_tokens or the lengths",
            )

    def fitted_s(self, load: StepLoad) -> float:
        """Return the fitted duration of an iteration, residual left out, seconds."""
        knots, table, tokens = self._knots, self._table, load.tokens
        i = min(max(bisect_right(knots, tokens), 1), len(knots) - 1)
        if len(knots) == 1:
            seconds = table[0]
        else:
            share = (tokens - knots[i - 1]) / (knots[i] - knots[i - 1])
            seconds = table[i - 1] + min(max(share, 0.0), 1.0) * (table[i] - table[i - 1])
        for b, x in zip(self._b, terms(load, self._prunes, self._page), strict=True):
            seconds += b * x
        return seconds + self._law_s * load.sampling

    def step(self, load: StepLoad) -> StepCost:
        """Return the cost of one iteration.

        Raises
        ------
        BadInputError
            If it lies outside what was calibrated (``beyond="error"``).
        """
        if load.rows == 0:
            return StepCost(self._between_s, 0.0, 0.0)
        self._outside(load)
        counted = self._accounts.step(load)
        return counted._replace(seconds=self.fitted_s(load) * self._ratio(int(regime(load))))


def load(config: RunConfig, accounts: CostModel) -> CalibratedCost:
    """Return the cost model that ``cost.calibrated`` names.

    Raises
    ------
    BadInputError
        If the file cannot be used for this configuration.
    """
    path = config.cost.calibrated
    return CalibratedCost(read(path), config, accounts, where=path)
