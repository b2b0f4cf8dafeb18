"""From the tables of a quality run to one table of comparisons, each with its interval, and to a verdict in words.

One row is one metric of one arm in one group (all, a context length, a depth, greedy or sampled texts): the arm's value
with its interval, dense's value, and the paired difference with its interval. Intervals hold for one comparison at a
time; of many rows, one in twenty will miss by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backends.eval_arms import CONTROL, DENSE
from backends.eval_intervals import Interval, block_statistic, item_statistic, mean_of
from backends.eval_overlap import corpus_bleu
from backends.eval_repetition import MEASURES
from backends.pieces import Arrays
from entropic_ctl.signals import FloatArray

__all__ = ["COLUMNS", "summarise_long", "summarise_needles", "summarise_outputs", "table_of", "verdict"]

COLUMNS = (
    "task",
    "metric",
    "group",
    "arm",
    "value",
    "low",
    "high",
    "dense",
    "difference",
    "difference_low",
    "difference_high",
    "n",
)
_NONE = Interval(float("nan"), float("nan"), float("nan"))
Row = dict[str, Any]
Over = Callable[[FloatArray], Interval]


def _row(task: str, metric: str, group: str, arm: str, value: Interval, dense: float, change: Interval, n: int) -> Row:
    return dict(zip(COLUMNS, (task, metric, group, arm, *value, dense, *change, n), strict=True))


def _paired(task: str, metric: str, group: str, arm: str, values: FloatArray, dense: FloatArray, over: Over) -> Row:
    """Return the row of values that are paired with dense's; ``over`` gives the interval of a mean."""
    return _row(task, metric, group, arm, over(values), float(dense.mean()), over(values - dense), values.size)


def table_of(rows: Sequence[Row]) -> Arrays:
    """Return the rows as columns."""
    return {name: np.array([row[name] for row in rows]) for name in COLUMNS}


def _mean(values: FloatArray) -> FloatArray:
    return np.asarray(values.mean(axis=-1))


def _p99(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, 0.99, axis=-1))


def summarise_long(table: Arrays, arms: Sequence[str], moving: Sequence[str], *, block: int, seed: int) -> list[Row]:
    """Compare arms on long text, over all contexts and for each.

    Parameters
    ----------
    table : dict of arrays
        From :func:`backends.eval_long.measure_long_text`.
    arms : sequence of str
        Dense first.
    moving : sequence of str
        Arms whose temperature moves: only for them is the tempered distribution a matter of its own.
    block : int
        Positions per bootstrap block.
    seed : int
    """
    contexts = np.unique(table["context"]).tolist()
    rows: list[Row] = []
    for group, pick in [("all", None), *((f"context {context}", context) for context in contexts)]:

        def grid(name: str, arm: str, pick: int | None = pick) -> FloatArray:
            mine = table["arm"] == arm
            if pick is not None:
                mine = mine & (table["context"] == pick)
            width = int(table["index"].max()) + 1
            return np.asarray(table[name][mine], np.float64).reshape(-1, width)

        def over(values: FloatArray, statistic: Callable[[FloatArray], FloatArray] = _mean) -> Interval:
            return block_statistic(statistic, values, block=block, seed=seed)

        for arm in arms:
            nll, base = grid("nll", arm), grid("nll", DENSE)
            n = nll.size
            change = over(nll - base)
            rows.append(_row("long text", "nll", group, arm, over(nll), float(base.mean()), change, n))
            perplexity, ratio = (Interval(*np.exp(values)) for values in (over(nll), change))
            rows.append(_row("long text", "perplexity", group, arm, perplexity, float(np.exp(base.mean())), _NONE, n))
            rows.append(_row("long text", "perplexity_ratio", group, arm, ratio, 1.0, _NONE, n))
            kl = grid("kl", arm)
            rows.append(_row("long text", "kl", group, arm, over(kl), 0.0, _NONE, n))
            rows.append(_row("long text", "kl_p99", group, arm, over(kl, _p99), 0.0, _NONE, n))
            rows += [
                _paired("long text", name, group, arm, grid(name, arm), grid(name, DENSE), over)
                for name in ("hit", "agrees", "kept")
            ]
            worst = float(grid("certificate", arm).max())
            rows.append(_row("long text", "certificate_max", group, arm, Interval(worst, *_NONE[1:]), 0.0, _NONE, n))
            rows += [
                _paired("long text", name, group, arm, grid(name, arm), grid(name, DENSE), over)
                for name in (("nll_tempered", "kl_tempered", "temperature") if arm in moving else ())
            ]
    return rows


def summarise_outputs(table: Arrays, arms: Sequence[str], *, seed: int) -> list[Row]:
    """Compare the written texts.

    Parameters
    ----------
    table : dict of arrays
        From :func:`backends.eval_outputs.compare_outputs`.
    arms : sequence of str
        Dense first.
    seed : int
    """
    rows: list[Row] = []
    for mode in dict.fromkeys(table["mode"].tolist()):
        base = {name: column[(table["arm"] == DENSE) & (table["mode"] == mode)] for name, column in table.items()}
        n = base["prompt"].shape[0]
        for arm in arms:
            mine = {name: column[(table["arm"] == arm) & (table["mode"] == mode)] for name, column in table.items()}

            def add(metric: str, value: Interval, dense: float, change: Interval = _NONE, arm: str = arm) -> None:
                rows.append(_row("texts", metric, mode, arm, value, dense, change, n))  # noqa: B023 - called at once

            if mode == "greedy":
                for name in ("exact", "rouge_l"):
                    add(name, item_statistic(mean_of(mine[name]), n, seed=seed), 1.0)
                score = corpus_bleu(mine["text"].tolist(), base["text"].tolist())
                add("bleu", item_statistic(score, n, seed=seed), 100.0)
                differ = mine["first_difference"] >= 0
                middle = float(np.median(mine["first_difference"][differ])) if differ.any() else float("nan")
                add("first_difference_median", Interval(middle, *_NONE[1:]), float("nan"))
            for name in ("kept", "tokens", *MEASURES):
                values, dense = (np.asarray(side[name], np.float64) for side in (mine, base))
                value, change = (item_statistic(mean_of(x), n, seed=seed) for x in (values, values - dense))
                add(name, value, float(mean_of(dense)(np.arange(n))), change)
    return rows


def summarise_needles(table: Arrays, arms: Sequence[str], *, seed: int) -> list[Row]:
    """Compare retrieval, over all needles, by length and by depth.

    Parameters
    ----------
    table : dict of arrays
        From :func:`backends.eval_needle.measure_needles`.
    arms : sequence of str
        Dense first.
    seed : int
    """

    def over(values: FloatArray) -> Interval:
        return item_statistic(mean_of(values), values.size, seed=seed)

    everything = np.ones(table["depth"].shape[0], np.bool_)
    groups = [("all", everything)]
    for name in ("length", "depth"):
        groups += [(f"{name} {value:g}", table[name] == value) for value in np.unique(table[name]).tolist()]
    rows: list[Row] = []
    for group, pick in groups:
        for arm in arms:
            mine, base = ((table["arm"] == name) & pick for name in (arm, DENSE))
            for metric in ("retrieved", "log_p", "kept"):
                values, dense = (np.asarray(table[metric][side], np.float64) for side in (mine, base))
                rows.append(_paired("needle", metric, group, arm, values, dense, over))
    return rows


def verdict(rows: Sequence[Row], arms: Sequence[str]) -> list[str]:
    """Return what the numbers say: a line on the resolution, one per arm, and one on what they do not say.

    Parameters
    ----------
    rows : sequence of dict
        Of the ``summarise_`` functions.
    arms : sequence of str
        Dense first.
    """
    at = {(row["task"], row["metric"], row["group"], row["arm"]): row for row in rows}
    lines = []
    floor = at.get(("long text", "kl", "all", CONTROL))
    if floor is not None:
        lines.append(
            f"resolution: a budget of 1e-06 nats, which loses nothing but rounds in another order, gives mean KL "
            f"{floor['value']:.2g} nats{_equal(at, CONTROL)}"
        )
    for arm in arms:
        if arm in (DENSE, CONTROL):
            continue
        said = [part for part in (_on_long(at, arm), _on_texts(at, arm), _on_needles(at, arm)) if part]
        lines.append(f"{arm}: {'; '.join(said)}")
    lines.append(
        "95% intervals over the positions, prompts and needles looked at, one comparison at a time: they say nothing "
        "about other models, other kinds of text or longer contexts"
    )
    return lines


def _equal(at: dict[Any, Row], arm: str) -> str:
    row = at.get(("texts", "exact", "greedy", arm))
    return "" if row is None else f", {round(row['value'] * row['n'])} of {row['n']} greedy texts equal"


def _change(row: Row, unit: str) -> str:
    """Return a paired difference with what it allows to say; ``unit`` follows the numbers."""
    value, low, high = (row[f"difference{end}"] for end in ("", "_low", "_high"))
    if not np.isfinite([low, high]).all():
        return f"{value:+.2g}{unit} (too few for an interval)"
    shown = f"{value:+.2g}{unit} [{low:+.2g}, {high:+.2g}]"
    if low == high == 0.0:
        return "the same everywhere"
    if low <= 0.0 <= high:
        return f"{shown}, no difference found, up to {max(-low, high):.2g} not excluded"
    return shown


def _on_long(at: dict[Any, Row], arm: str) -> str:
    if ("long text", "kl", "all", arm) not in at:
        return ""
    kl, nll, kept = (at["long text", metric, "all", arm] for metric in ("kl", "nll", "kept"))
    floor = at.get(("long text", "kl", "all", CONTROL))
    rounding = " (not above rounding)" if floor is not None and 0 < kl["low"] <= floor["high"] else ""
    return (
        f"{100 * kept['value']:.0f}% of pages read on long text, mean KL {kl['value']:.2g} "
        f"[{kl['low']:.2g}, {kl['high']:.2g}] nats{rounding}, NLL {_change(nll, ' nats per token')}"
    )


def _on_texts(at: dict[Any, Row], arm: str) -> str:
    if ("texts", "exact", "greedy", arm) not in at:
        return ""
    rouge, bleu, repeated = (
        at["texts", metric, mode, arm]
        for metric, mode in (("rouge_l", "greedy"), ("bleu", "greedy"), ("repeated_4", "sampled"))
    )
    return (
        f"greedy texts ROUGE-L {rouge['value']:.2f}, BLEU {bleu['value']:.0f} to dense's{_equal(at, arm)}; "
        f"repeated 4-grams of sampled texts {_change(repeated, '')}"
    )


def _on_needles(at: dict[Any, Row], arm: str) -> str:
    if ("needle", "retrieved", "all", arm) not in at:
        return ""
    found, log_p = (at["needle", metric, "all", arm] for metric in ("retrieved", "log_p"))
    n = found["n"]
    return (
        f"needles found {round(found['value'] * n)} of {n} (dense {round(found['dense'] * n)}), "
        f"log-probability of the number {_change(log_p, ' nats per token')}"
    )
