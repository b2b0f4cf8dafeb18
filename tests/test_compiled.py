"""Every compiled twin against its NumPy reference, bit for bit; stretches against single steps; runs without numba."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_ctl import accounts, arrays, compiled, policy, steady
from entropic_ctl import config as configs
from entropic_ctl.histogram import PLACES
from entropic_ctl.pruning.laws import budget
from entropic_ctl.temperature import feedback
from sim import load, replica, response, trajectories
from sim.stretch import Stretch

ROOT = Path(__file__).parent.parent
ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0)

seeds = st.integers(0, 2**32 - 1)


def same(one: Any, other: Any) -> None:
    """Equal to the bit, NaN included; tuples entry by entry."""
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        a, b = np.asarray(one), np.asarray(other)
        assert a.shape == b.shape
        assert a.dtype.kind == b.dtype.kind
        if a.dtype.kind == "f":
            a, b = a + 0.0, b + 0.0  # the sign of a zero may differ: maximum(-0.0, 0.0) is either
        np.testing.assert_array_equal(a, b)


def copies(*arguments: Any) -> tuple[Any, ...]:
    """Return deep copies, so that both sides start from the same state."""
    return tuple(
        copies(*a) if isinstance(a, tuple) else a.copy() if isinstance(a, np.ndarray) else a for a in arguments
    )


def both(loop: Any, reference: Any, *arguments: Any) -> Any:
    """Call both on equal arguments; compare what they return and what they left in the arrays."""
    one, other = copies(*arguments), copies(*arguments)
    got, expected = loop(*one), reference(*other)
    same(got if got is not None else (), expected if expected is not None else ())
    same(one, other)
    return expected


def pool(rng: np.random.Generator, slots: int, page: int) -> tuple[Any, ...]:
    """Return (held, table, stack, free, refs) of a pool in which some slots hold pages."""
    pages = int(rng.integers(1, 60))
    order = rng.permutation(pages).astype(np.int32)
    held, table = np.zeros(slots, np.int64), np.zeros((slots, 40), np.int32)
    refs, free = np.zeros(pages, np.int32), pages
    for slot in range(slots):
        take = int(min(rng.integers(0, 6), free))
        table[slot, :take] = order[free - take : free]
        refs[order[free - take : free]] = 1
        held[slot], free = take, free - take
    return held, table, order, free, refs


@given(seeds)
def test_advance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, page = 8, int(rng.integers(1, 5))
    held, table, stack, free, refs = pool(rng, slots, page)
    rows = rng.permutation(slots)[: rng.integers(1, slots + 1)]
    before = np.maximum(held[rows] * page - rng.integers(1, page + 1, rows.shape[0]), 0)
    done = both(
        steady._advance_loop, steady._advance_columns, rows, before, 7, page, held, table, stack, free, refs,
        np.full(slots, 6), rng.random(slots),
    )[0]  # fmt: skip
    assert done or free < rows.shape[0]


@given(seeds)
def test_seat_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, page, step = 6, int(rng.integers(1, 5)), 50
    held, table, stack, free, refs = pool(rng, slots, page)
    live = rng.permutation(slots)[: rng.integers(1, slots + 1)]
    prompt = rng.integers(1, 12, slots)
    known = prompt + rng.integers(0, 4, slots)
    cached = np.minimum(np.minimum(known - 1, held * page), rng.integers(0, 15, slots))
    waits = (
        np.where(rng.random(slots) < 0.9, step - 1, step - 30),
        np.where(rng.random(slots) < 0.95, 0, step + 2),
        rng.random(slots) < 0.03,
    )
    limits = (step, page, int(rng.integers(1, 30)), int(rng.integers(1, 12)), 20)
    both(
        steady.seat_all_loop, steady._seat_all_columns, live, limits, np.arange(100, 100 + slots), prompt, known,
        cached,
        rng.random(slots) < 0.1, waits, held, table, stack, free, refs, rng.random(slots),
    )  # fmt: skip


@given(seeds)
def test_accept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 7
    rows = rng.permutation(slots)[: rng.integers(1, slots + 1)]
    table_ids = np.arange(slots) + 10
    if rng.random() < 0.2:
        table_ids[rng.integers(slots)] = -1  # cancelled
    samples = rng.random(rows.shape[0]) < 0.7
    ids = rows + 10
    tokens = ids[samples]
    if rng.random() < 0.3:
        tokens = tokens[: rng.integers(0, tokens.shape[0] + 1)]
    known = rng.integers(2, 9, slots)
    both(
        steady._accept_loop, steady._accept_columns, rows, ids, known[rows] - 1, np.ones(rows.shape[0], np.int64),
        samples, tokens, table_ids, known - 1, known, rng.random(slots) < 0.5, rng.integers(2, 9, slots),
    )  # fmt: skip


def entropies(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    values = rng.random(n) * 6
    values[rng.random(n) < 0.1] = rng.choice(ODD)
    return values


@given(seeds)
def test_accounts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sums = np.zeros((9, len(accounts.REQUEST)))
    sums[:, :2] = np.nan
    counts = np.zeros(PLACES, np.int64)
    target = rng.choice([np.nan, 1.5])
    now = 0.0
    for step in range(4):
        rows = rng.permutation(9)[: rng.integers(1, 10)]
        start, now = now, now + float(rng.exponential())
        tokens = (entropies(rng, rows.shape[0]), entropies(rng, rows.shape[0]))
        nats = rng.random(rows.shape[0])
        both(accounts.book_tokens_loop, accounts._book_tokens_columns, sums, counts, rows, now, *tokens, target, 0.2)
        both(accounts.book_rows_loop, accounts._book_rows_columns, sums, rows, step, start, now, nats)
        accounts._book_rows_columns(sums, rows, step, start, now, nats)
        accounts._book_tokens_columns(sums, counts, rows, now, *tokens, target, 0.2)


@given(seeds)
def test_step_account_and_load(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 9))
    context, tokens = rng.integers(0, 400, n), rng.integers(1, 4, n)
    kept, mass, most, nats = rng.random((4, n))
    row = np.zeros(len(accounts.STEP))
    both(accounts.book_step_loop, accounts._book_step_columns, row, 16, context, tokens, kept, mass, most, nats)
    samples, theta = rng.random(n) < 0.8, rng.choice([0.0, 0.02], n)
    arguments = (context, tokens, samples, theta, kept)
    fast = load.StepLoad(n, *load.sums_loop(*arguments, 80, 300.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "ENABLED", False)
        assert load.measure(*arguments, protected_tokens=80, longest_tokens=300.0) == fast


@given(seeds)
def test_laws(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    u, h = rng.normal(0, 0.5, n), entropies(rng, n)
    micro = feedback.Feedback(feedback.Config(gain=float(rng.uniform(-1, 1)), rate_limit=float(rng.choice([0.0, 0.1]))))
    meso = budget.Budget(budget.Config(widen_after=int(rng.integers(1, 4))))
    theta, timer = rng.choice([0.02, 0.025, 0.03], n), rng.integers(0, 4, n)
    fast = feedback.linear_loop(u, h, *micro.constants), budget.step_loop(theta, timer, h, *meso.constants)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feedback, "ENABLED", False)
        patch.setattr(budget, "ENABLED", False)
        same(fast, (micro.update(u, h), meso.update(theta, timer, h)))


@given(seeds)
def test_policy_statistics(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(6)[: rng.integers(1, 7)]
    stats, seen = rng.random((6, 6)), rng.integers(0, 3, 6)
    both(policy.count_loop, policy._count_columns, stats, seen, slots, rng.random(slots.shape[0]) * 4, 0.2)
    a, b = entropies(rng, 4), entropies(rng, 4)
    assert policy._finite_loop(a, b) == policy._finite_columns(a, b)


@given(seeds)
def test_response_and_interpolation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 8))
    contexts, thetas = np.array([0.0, 256.0, 1024.0, 4096.0]), np.array([0.0, 0.01, 0.05, 0.2])
    theta = rng.choice([0.0, 0.005, 0.05, 0.2, 0.3, 0.11], n)
    both(
        response.bilinear_loop, response._bilinear, contexts, thetas, rng.random((16, 7)), rng.integers(0, 5000, n),
        theta,
        rng.random(n) < 0.8,
    )  # fmt: skip
    grid, tokens = np.log(np.geomspace(0.3, 2.0, 6)), 5
    tables = (rng.random((2, tokens, 6)) * 8).astype(np.float16).astype(np.float32)
    u = np.log(rng.uniform(0.28, 2.1, n)) if n else np.empty(0)
    both(
        trajectories.hermite_loop,
        trajectories._hermite_columns,
        tables[0],
        tables[1],
        grid,
        rng.integers(0, tokens, n),
        u,
    )


@given(seeds, st.integers(1, 4))
def test_selection_of_recordings(seed: int, temperatures: int) -> None:
    rng = np.random.default_rng(seed)
    n, prompts = int(rng.integers(0, 9)), 3
    length = rng.integers(1, 9, prompts * temperatures)
    table = rng.permutation(prompts * temperatures).reshape(prompts, temperatures)
    both(
        trajectories.select_loop, trajectories._select_columns, np.log(np.linspace(0.4, 1.6, temperatures)), table,
        np.cumsum(length) - length, length, rng.random(length.shape[0]) < 0.7, rng.integers(0, prompts, n),
        rng.random(n),
        rng.integers(0, 12, n), np.log(rng.uniform(0.35, 1.7, n)) if n else np.empty(0),
    )  # fmt: skip


def test_exponentials_differ_from_numpy_in_the_last_place_at_most() -> None:
    x = np.random.default_rng(0).uniform(-5, 5, 2000)
    np.testing.assert_allclose(arrays.exp(x), np.exp(x), rtol=3e-16)
    np.testing.assert_allclose(arrays.log(np.exp(x)), np.log(np.exp(x)), rtol=0, atol=9e-16)


MESO = {
    "budget": {"law": "budget"},
    "off": {"law": "off"},
    "limited": {"law": "budget", "total_nats": 0.2},
    "long": {"law": "budget", "min_context": 60},
}


def tables(result: replica.SimulationResult) -> list[dict[str, Any]]:
    return [result.requests, result.steps, {k: np.array([v], float) for k, v in result.summary.items()}]


@pytest.mark.skipif(not compiled.ENABLED, reason="numba is absent or switched off")
@settings(max_examples=12)
@given(
    st.sampled_from(["feedback", "fixed"]),
    st.sampled_from(sorted(MESO)),
    st.sampled_from(["fcfs", "entropic"]),
    st.sampled_from([(400, 8), (60, 8), (40, 3)]),
    st.sampled_from([("poisson", 3.0), ("closed", 1.0), ("poisson", 0.3)]),
    st.integers(0, 10**6),
)
def test_a_stretch_leaves_what_single_steps_leave(
    micro: str, meso: str, macro: str, size: tuple[int, int], arrivals: tuple[str, float], seed: int
) -> None:
    """Tables and summary are equal bit for bit, with enough memory and with preemptions, with texts that end."""
    workload = {"kind": arrivals[0], "n_requests": 20, "output_tokens": 40.0, "output_cv": 0.5}
    workload |= {"rate_per_s": arrivals[1]} if arrivals[0] == "poisson" else {"users": 5, "think_s": 0.5}
    run = configs.from_mapping(
        {
            "seed": seed,
            "workload": workload,
            "engine": {"pages": size[0], "max_batch": size[1], "prefill_chunk": 64, "max_batch_tokens": 96},
            "loop": {"temperature": {"law": micro}, "pruning": MESO[meso], "scheduling": {"policy": macro}},
        }
    )
    fast = replica.simulate(run, uncertified=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stretch, "of", staticmethod(lambda *_: None))
        slow = replica.simulate(run, uncertified=True)
    for one, other in zip(tables(fast), tables(slow), strict=True):
        assert one.keys() == other.keys()
        for name, column in one.items():
            np.testing.assert_array_equal(column, other[name], err_msg=name)


@pytest.mark.skipif(not compiled.ENABLED, reason="numba is absent or switched off")
def test_stretches_are_used_where_they_may_be() -> None:
    """A run whose iterations are all plain takes a call per arrival or finish, not one per iteration."""
    run = configs.from_mapping({"workload": {"kind": "poisson", "n_requests": 10, "rate_per_s": 0.5}})
    calls, steps = [], Stretch.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stretch, "run", lambda self, until_s: calls.append(result := steps(self, until_s)) or result)
        summary = replica.simulate(run).summary
    taken = [count for count, _ in calls]
    assert sum(taken) == summary["iterations"] > 100
    assert len(taken) <= 2 * 10 + 5


@pytest.mark.skipif(not compiled.ENABLED, reason="numba is absent or switched off")
def test_what_a_stretch_does_not_know_takes_single_steps() -> None:
    base = {"workload": {"n_requests": 3}, "engine": {}, "loop": {}}
    known = configs.from_mapping(base)
    seen: list[bool] = []
    of = Stretch.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Stretch, "of", staticmethod(lambda *parts: seen.append((found := of(*parts)) is not None) or found)
        )
        replica.simulate(known)
        for change in (
            {"loop": {"temperature": {"law": "solve"}}},
            {"loop": {"temperature": {"law": "feedback", "phi": "tanh"}}},
            {"loop": {"temperature": {"temperature": 0.0}}},
            {"engine": {"observation_lag": 1}},
            {"speculation": {"draft_tokens": 2}},
        ):
            replica.simulate(configs.from_mapping(base | change), uncertified=True)
        replica.simulate(known, keep_tokens=True)
    assert seen == [True] + [False] * 6


_SCRIPT = """
import sys, numpy as np
from entropic_ctl import compiled, config
from sim.replica import simulate
run = config.from_mapping({"workload": {"kind": "poisson", "n_requests": 12, "rate_per_s": 1.0},
    "loop": {"temperature": {"law": "feedback"}, "pruning": {"law": "budget"}, "scheduling": {"policy": "entropic"}}})
result = simulate(run, uncertified=True)
np.savez(sys.argv[1], enabled=compiled.ENABLED, **{k: v for k, v in result.requests.items() if v.dtype.kind == "f"})
"""


def test_a_run_without_numba_gives_the_same_tables(tmp_path: Path) -> None:
    """Up to the last place of exp and log."""
    found = []
    for name, switch in (("on", "1"), ("off", "0")):
        path = tmp_path / f"{name}.npz"
        environment = {**os.environ, "ENTROPIC_COMPILED": switch}
        subprocess.run([sys.executable, "-c", _SCRIPT, str(path)], cwd=ROOT, env=environment, check=True)
        with np.load(path) as data:
            found.append({key: data[key] for key in data.files})
    on, off = found
    assert not off.pop("enabled")
    on.pop("enabled")
    assert on.keys() == off.keys()
    for name, column in on.items():
        np.testing.assert_allclose(column, off[name], rtol=1e-9, err_msg=name)


def test_dataclasses_of_laws_give_their_twins_all_parameters() -> None:
    """A field added to a law's configuration must reach its twin, or the twin must not be used."""
    assert {f.name for f in dataclasses.fields(feedback.Config)} == {
        "temperature", "t_min", "t_max", "target_nats", "gain", "phi", "phi_scale_nats", "rate_limit",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(budget.Config)} == {
        "sink_pages", "recent_pages", "dense_layers", "selection", "theta_nats", "theta_wide_nats", "entropy_low_nats",
        "entropy_high_nats", "widen_after", "total_nats", "min_context",
    }  # fmt: skip
