from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import EOS, byte_tokenizer, tiny_llama

from backends import models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError, EntropicError, UncertifiedError
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FinishReason, StepPlan, StepResult

FEEDBACK = {"law": "feedback", "target_nats": 2.0, "gain": 0.05}
BUDGET = {"law": "budget", "dense_layers": 0, "recent_pages": 1, "sink_pages": 1}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> models.LoadedModel:
    return models.wrap(tiny_llama(), byte_tokenizer())


@pytest.fixture(scope="module")
def endless() -> models.LoadedModel:
    """The same weights without an end of text: every request runs to its limit."""
    return dataclasses.replace(models.wrap(tiny_llama(), byte_tokenizer()), eos_ids=frozenset())


class Watched(Engine):
    """Remembers every plan and result; ``force`` may replace the logits of a pass."""

    force: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    def _execute(self, plan: StepPlan, on_text: Any) -> StepResult:
        result = super()._execute(plan, on_text)
        self.plans.append(plan)
        self.results.append(result)
        return result

    def _forward(self, batch: Any, tokens: Any) -> torch.Tensor:
        logits = super()._forward(batch, tokens)
        return logits if self.force is None else self.force(batch, logits)


def start(
    model: models.LoadedModel, *, loop: dict[str, Any] | None = None, clock: Any = time.perf_counter, **engine: Any
) -> Watched:
    limits = {"pages": 256, "page_tokens": 4, "max_batch": 8, "max_batch_tokens": 256, "prefill_chunk": 256} | engine
    run = configs.from_mapping({"engine": limits, "loop": loop or {}})
    watched = Watched(run, model, uncertified=True, metrics=Metrics(limits["page_tokens"]), clock=clock)
    watched.plans, watched.results = [], []
    return watched


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def trajectory(engine: Watched, number: int) -> np.ndarray:
    """Columns (T, H tempered, H model) of one request's accepted tokens."""
    parts = []
    for result in engine.results:
        mine = result.token_ids == number
        columns = (result.temperature, result.tempered_entropy, result.model_entropy)
        parts.append(np.stack([c[mine] for c in columns], axis=1))
    return np.concatenate(parts)


def nothing_left(engine: Watched) -> bool:
    return (
        engine.idle
        and engine.loop.live == 0
        and engine.loop.backlog == 0
        and not engine.loop.policy.active.any()
        and not engine.loop.policy.u.any()
        and engine.loop.batcher.pages.pool.used == 0
    )


# -- text -----------------------------------------------------------------------------------------------------------


def reference(model: models.LoadedModel, ids: Sequence[int], n: int) -> list[int]:
    """What transformers' own generate says, greedy."""
    network = model.model
    network.set_attn_implementation("sdpa")
    x = torch.tensor([list(ids)])
    out = network.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=n, do_sample=False, pad_token_id=0, use_cache=True
    )
    return out[0, len(ids) :].tolist()


def test_greedy_equals_generate_on_a_tiny_model(model: models.LoadedModel) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 3, 4, 17, 40)]
    want = [reference(model, p, 30) for p in prompts]
    engine = start(model, prefill_chunk=7, max_batch_tokens=16)
    for p in prompts:
        engine.submit(p, SamplingParams(max_new_tokens=30, greedy=True))
    outputs = engine.run()
    assert [o.token_ids for o in outputs] == want
    for o in outputs:
        assert o.finish.reason is (FinishReason.EOS if o.token_ids[-1] == EOS else FinishReason.LENGTH)
        assert o.text == model.decode(o.token_ids)
    assert any(plan.n_rows > 1 and len(set(plan.n_tokens.tolist())) > 1 for plan in engine.plans)  # ragged
    assert nothing_left(engine)


@pytest.mark.model
def test_greedy_equals_generate_on_the_default_model() -> None:
    if not models.fetching.default_folder().is_dir():
        pytest.skip("the default model is not fetched (run `entropic fetch`)")
    model = models.load(dtype="float32")
    texts = [
        "What is the capital of France?",
        "Write one sentence about the sea.",
        "2 + 2 =",
        "Name three colours.",
        "def add(a, b):",
    ]
    prompts = [model.prompt_ids(text, chat=i % 2 == 0) for i, text in enumerate(texts)]
    want = [reference(model, p, 24) for p in prompts]
    engine = start(model, page_tokens=16, pages=64)
    for p in prompts:
        engine.submit(p, SamplingParams(max_new_tokens=24, greedy=True))
    assert [o.token_ids for o in engine.run()] == want


def test_e9_a_sampled_text_does_not_depend_on_company_or_order(endless: models.LoadedModel) -> None:
    a, b = prompt(9, 1), prompt(5, 2)
    params = SamplingParams(max_new_tokens=20, seed=42)

    def tokens_of_a(*others: SamplingParams, first: bool = True) -> list[int]:
        engine = start(endless)
        if first:
            number = engine.submit(a, params)
        for other in others:
            engine.submit(b, other)
        if not first:
            number = engine.submit(a, params)
        engine.run()
        return engine.outputs[number].token_ids

    alone = tokens_of_a()
    assert tokens_of_a(SamplingParams(max_new_tokens=20)) == alone
    assert tokens_of_a(SamplingParams(max_new_tokens=20, seed=7)) == alone
    assert tokens_of_a(SamplingParams(max_new_tokens=20, seed=42), first=False) == alone
    assert len(set(alone)) > 5


def test_e10_trajectory_survives_chunks_and_preemption(endless: models.LoadedModel) -> None:
    loop = {"temperature": FEEDBACK}
    params = SamplingParams(max_new_tokens=40, seed=3)

    alone = start(endless, loop=loop)
    alone.submit(prompt(10), params)
    want_tokens = alone.run()[0].token_ids
    want = trajectory(alone, 0)
    assert want.shape == (40, 3)
    assert np.ptp(want[:, 0]) > 0.01  # the law moves T

    chunked = start(endless, loop=loop, prefill_chunk=4)
    chunked.submit(prompt(10), params)
    assert chunked.run()[0].token_ids == want_tokens
    assert [int(p.n_tokens[0]) for p in chunked.plans[:3]] == [4, 4, 2]

    crowded = start(endless, loop=loop, pages=16)
    crowded.submit(prompt(10, 5), SamplingParams(max_new_tokens=45, seed=9))
    mine = crowded.submit(prompt(10), params)
    outputs = crowded.run()
    assert outputs[mine].token_ids == want_tokens
    preempted = [i for i, p in enumerate(crowded.plans) if mine in p.preempted]
    assert len(preempted) == 1
    assert sum((r.token_ids == mine).sum() for r in crowded.results[: preempted[0]]) >= 20
    for engine, number in ((chunked, 0), (crowded, mine)):
        np.testing.assert_allclose(trajectory(engine, number), want, rtol=1e-4, atol=1e-5)
        assert nothing_left(engine)


def test_e11_trajectories_equal_solo_runs_when_rows_are_compacted(endless: models.LoadedModel) -> None:
    loop = {"temperature": FEEDBACK}
    cases = [SamplingParams(max_new_tokens=n, seed=s) for s, n in ((1, 5), (2, 10), (3, 20))]
    together = start(endless, loop=loop)
    for params in cases:
        together.submit(prompt(6), params)
    outputs = together.run()
    for number, params in enumerate(cases):
        solo = start(endless, loop=loop)
        solo.submit(prompt(6), params)
        assert solo.run()[0].token_ids == outputs[number].token_ids
        np.testing.assert_allclose(trajectory(together, number), trajectory(solo, 0), rtol=1e-4, atol=1e-5)
    assert len({tuple(o.token_ids[:5]) for o in outputs}) == 3
    assert nothing_left(together)


def test_e11_a10_two_thousand_requests_leave_nothing_behind(endless: models.LoadedModel) -> None:
    engine = start(endless, loop={"temperature": FEEDBACK}, max_batch=64, max_batch_tokens=512, max_live=128)
    rng = np.random.default_rng(0)
    lengths, limits = rng.integers(1, 9, 2000), rng.integers(1, 4, 2000)
    for i in range(2000):
        engine.submit(prompt(int(lengths[i]), i % 7), SamplingParams(max_new_tokens=int(limits[i]), seed=i))
    outputs = engine.run()
    assert [len(o.token_ids) for o in outputs] == limits.tolist()
    assert all(o.finish.reason is FinishReason.LENGTH for o in outputs)
    assert nothing_left(engine)
    assert engine.metrics.live == 0


@pytest.mark.parametrize("n", [63, 64, 65])
def test_a8_cached_prefix_is_reused_and_at_least_one_token_recomputed(endless: models.LoadedModel, n: int) -> None:
    engine = start(endless, page_tokens=16, prefix_caching=True)
    outputs = []
    for _ in range(2):
        engine.submit(prompt(n), SamplingParams(max_new_tokens=8, greedy=True))
        outputs = engine.run()
    assert outputs[0].token_ids == outputs[1].token_ids
    first_rows = {int(p.ids[0]): int(p.context[0]) for p in reversed(engine.plans)}
    assert first_rows == {0: 0, 1: (n - 1) // 16 * 16}
    plain = start(endless, page_tokens=16)
    plain.submit(prompt(n), SamplingParams(max_new_tokens=8, greedy=True))
    assert plain.run()[0].token_ids == outputs[0].token_ids


# -- how requests end -----------------------------------------------------------------------------------------------


def spell(tokens: Sequence[int]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Make every sampling row's next token the next of ``tokens`` (one request)."""
    left = list(tokens)

    def force(batch: Any, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.zeros_like(logits)
        if logits.shape[0]:
            forced[0, left.pop(0)] = 50.0
        return forced

    return force


def test_a13_any_end_of_text_token_stops(model: models.LoadedModel) -> None:
    many = dataclasses.replace(model, eos_ids=frozenset({2, 3}))
    engine = start(many)
    engine.force = spell([65, 3, 66])
    engine.submit([1], SamplingParams(max_new_tokens=9, greedy=True))
    (output,) = engine.run()
    assert (output.token_ids, output.finish.reason, output.text) == ([65, 3], FinishReason.EOS, "A")


@pytest.mark.parametrize(
    ("text", "stop", "want", "reason"),
    [
        ("The quick brown fox", "own fox", "The quick br", FinishReason.STOP),
        ("The quick brown foot", "own fox", "The quick brown foot", FinishReason.LENGTH),
        ("a \U0001f999 e\u0301", "none", "a \U0001f999 e\u0301", FinishReason.LENGTH),
    ],
)
def test_w2_w5_streamed_text_with_stop_strings(
    model: models.LoadedModel, text: str, stop: str, want: str, reason: FinishReason
) -> None:
    tokens = list(text.encode())
    engine = start(model)
    engine.force = spell(tokens)
    engine.submit("x", SamplingParams(max_new_tokens=len(tokens), greedy=True, stop=(stop,)))
    pieces = [piece for _, piece in engine.stream()]
    assert "".join(pieces) == want == engine.outputs[0].text
    assert engine.outputs[0].finish.reason is reason
    assert nothing_left(engine)


def test_e7_empty_support_ends_one_row_and_leaves_the_other_alone(endless: models.LoadedModel) -> None:
    solo = start(endless, loop={"temperature": FEEDBACK})
    solo.submit(prompt(4, 1), SamplingParams(max_new_tokens=6, seed=1))
    want = solo.run()[0].token_ids
    engine = start(endless, loop={"temperature": FEEDBACK})

    def force(batch: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(engine.plans) == 2:
            logits[1] = torch.tensor([float("-inf"), float("nan")])[len(engine.plans) % 2]
        return logits

    engine.force = force
    engine.submit(prompt(4, 1), SamplingParams(max_new_tokens=6, seed=1))
    engine.submit(prompt(4, 2), SamplingParams(max_new_tokens=6, seed=2))
    first, second = engine.run()
    assert first.token_ids == want
    assert second.finish.reason is FinishReason.EMPTY_SUPPORT
    assert len(second.token_ids) == 2
    assert np.isfinite(trajectory(engine, 1)).all()
    assert nothing_left(engine)


def test_capacity_length_and_rejection(endless: models.LoadedModel) -> None:
    engine = start(endless, pages=4)  # 16 tokens
    engine.submit(prompt(6), SamplingParams(max_new_tokens=100, greedy=True))
    engine.submit(prompt(40), SamplingParams(max_new_tokens=1))
    full, refused = engine.run()
    assert full.finish.reason is FinishReason.CAPACITY
    assert len(full.token_ids) == 16 - 6 + 1  # the last token needs no KV
    assert refused.finish.reason is FinishReason.REJECTED
    assert "40" in refused.finish.detail
    assert refused.token_ids == []
    assert nothing_left(engine)


def test_cancel_frees_pages_before_and_after_arrival(endless: models.LoadedModel) -> None:
    engine = start(endless)
    running = engine.submit(prompt(8), SamplingParams(max_new_tokens=50))
    future = engine.submit(prompt(8), arrival_s=1e9)
    for _ in range(3):
        engine.step()
    assert engine.loop.batcher.pages.pool.used > 0
    assert engine.cancel(running)
    assert engine.cancel(future)
    assert not engine.cancel(running)
    outputs = engine.run()
    assert [o.finish.reason for o in outputs] == [FinishReason.CANCELLED] * 2
    assert len(outputs[0].token_ids) == 3
    assert nothing_left(engine)


@pytest.mark.parametrize("where", ["text", "forward", "draw", "observed"])
def test_what_is_raised_inside_a_step_ends_its_requests_and_no_other(
    endless: models.LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Shared prefixes included: pages that were being written are not found by those who come later."""
    prompts = [prompt(20), prompt(20), prompt(20)]
    alone = start(endless)
    alone.submit(prompts[0], SamplingParams(max_new_tokens=6, seed=5))
    want = alone.run()[0].token_ids
    engine = start(endless, max_batch=2, max_live=2, prefix_caching=True)
    for ids in prompts:
        engine.submit(ids, SamplingParams(max_new_tokens=6, seed=5))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "observed":
            patch.setattr(engine.metrics, "step", fail)
        elif where != "text":
            patch.setattr(engine, "_forward" if where == "forward" else "_choose", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.run(on_text=fail if where == "text" else None)
    outputs = engine.run()
    if where != "observed":
        assert [o.finish.reason for o in outputs[:2]] == [FinishReason.CANCELLED] * 2
        assert "interrupted" in outputs[0].finish.detail
    assert outputs[2].token_ids == want
    assert nothing_left(engine)


def test_cancelling_releases_the_text_held_back_for_a_stop_string(model: models.LoadedModel) -> None:
    engine, pieces = start(model), []
    engine.force = spell(b"The quick brown")
    number = engine.submit("x", SamplingParams(max_new_tokens=50, greedy=True, stop=("own fox",)))
    for _ in range(15):
        engine.step(on_text=lambda i, text: pieces.append(text))
    assert "".join(pieces) == "The quick br"
    assert engine.cancel(number, on_text=lambda i, text: pieces.append(text))
    assert "".join(pieces) == engine.outputs[number].text == "The quick brown"


# -- time, cost, audits ---------------------------------------------------------------------------------------------


class Ticks:
    """A clock that advances by one millisecond per look, and by what is slept."""

    def __init__(self) -> None:
        self.t = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.t += 1e-3
        return self.t

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.t += seconds


def test_future_arrivals_wait_outside_until_their_time(endless: models.LoadedModel) -> None:
    ticks = Ticks()
    run = configs.from_mapping({"engine": {"pages": 64}})
    engine = Engine(run, endless, clock=ticks, sleep=ticks.sleep)
    early = engine.submit(prompt(4), SamplingParams(max_new_tokens=2))
    late = engine.submit(prompt(4), SamplingParams(max_new_tokens=2), arrival_s=50.0)
    outputs = engine.run()
    assert outputs[early].end_s < 1.0
    assert 50.0 <= outputs[late].first_token_s <= outputs[late].end_s < 51.0
    assert sum(ticks.slept) == pytest.approx(50.0, abs=0.5)


def test_flops_of_a_dense_decode_step(endless: models.LoadedModel) -> None:
    engine = start(endless)
    engine.submit(prompt(10), SamplingParams(max_new_tokens=2, greedy=True))
    engine.run()
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32  # q, k and v, o, mlp, norms
    head, attention = 32 * 257, 2 * 2 * 4 * 8
    prefill, decode = engine.results
    assert decode.flops == 2 * (2 * layer + 32) + 2 * head + 2 * attention * 11
    assert prefill.flops == 10 * 2 * (2 * layer + 32) + 2 * head + 2 * attention * 55
    assert decode.kv_bytes == 2 * 11 * 2 * 2 * 8 * 4  # layers, tokens, K and V, KV heads, head size, float32


def test_flops_of_a_pruned_decode_step_include_the_scoring(endless: models.LoadedModel) -> None:
    runs = []
    for loop in ({}, {"pruning": BUDGET | {"theta_nats": 0.3, "theta_wide_nats": 0.3}}):
        engine = start(endless, loop=loop)
        engine.submit(prompt(60), SamplingParams(max_new_tokens=2, greedy=True))
        engine.run()
        runs.append(engine.results[-1])
    dense, pruned = runs
    assert (kept := pruned.kept_fraction[0]) < 1
    attention = 2 * 2 * 4 * 8 * 61 * 2  # QK and PV, heads, head size, keys, layers
    assert pruned.flops == pytest.approx(dense.flops + attention * (kept - 0.5))


def test_audit_measures_kl_and_changes_nothing_else(endless: models.LoadedModel) -> None:
    loop = {"pruning": BUDGET | {"theta_nats": 0.3, "theta_wide_nats": 0.3}}
    runs = []
    for every in (0, 1, 3):
        engine = start(endless, loop=loop, audit_every=every)
        engine.submit(prompt(60), SamplingParams(max_new_tokens=20, seed=5))
        engine.submit(prompt(30, 1), SamplingParams(max_new_tokens=20, seed=6))
        runs.append((engine, [o.token_ids for o in engine.run()]))
    (plain, want), (every, got), (third, also) = runs
    assert got == want == also
    assert [r.kv_bytes for r in every.results] == [r.kv_bytes for r in plain.results]
    assert any((r.kept_fraction < 1).any() for r in plain.results)
    assert plain.audit.table()["kl_nats"].size == 0
    table = every.audit.table()
    assert table["kl_nats"].size == sum(int(((p.theta_nats > 0) & (p.n_tokens == 1)).sum()) for p in every.plans)
    assert (table["kl_nats"] >= 0).all()
    assert table["kl_nats"].max() > 0
    assert set(third.audit.table()["step"].astype(int)) <= set(range(0, 60, 3))


def test_audit_time_is_not_engine_time(endless: models.LoadedModel) -> None:
    spans = []
    for every in (0, 1):
        now = [0.0]
        engine = start(endless, loop={"pruning": BUDGET}, audit_every=every, clock=lambda now=now: now[0])
        engine.force = lambda batch, logits, now=now: (now.__setitem__(0, now[0] + 1.0), logits)[1]
        engine.submit(prompt(40), SamplingParams(max_new_tokens=6), arrival_s=0.0)
        engine.run()
        spans.append((engine.outputs[0].end_s, now[0]))
    assert spans == [(6.0, 6.0), (6.0, 11.0)]  # one forward pass is a second; five decode steps were audited


def test_same_seeds_same_run(endless: models.LoadedModel) -> None:
    def run() -> list[list[int]]:
        engine = start(endless, loop={"temperature": FEEDBACK, "pruning": BUDGET})
        for i in range(5):
            engine.submit(prompt(20 + i, i), SamplingParams(max_new_tokens=12, seed=i, top_p=0.9))
        return [o.token_ids for o in engine.run()]

    assert run() == run()


def test_a_recorded_run_replays_to_the_same_decisions(endless: models.LoadedModel, tmp_path: Any) -> None:
    from entropic_ctl import replay
    from entropic_ctl.loop import Recorder

    path = tmp_path / "run.jsonl"
    limits = {"pages": 24, "page_tokens": 4, "prefill_chunk": 8}
    loop = {"temperature": FEEDBACK, "pruning": BUDGET}
    with Recorder(path) as recorder:
        engine = Engine(
            configs.from_mapping({"engine": limits, "loop": loop}), endless, uncertified=True, recorder=recorder
        )
        for i in range(6):
            engine.submit(prompt(12 + i, i), SamplingParams(max_new_tokens=15, seed=i))
        engine.step()
        engine.cancel(2)
        engine.run()
    report = replay.replay(path)
    assert report.equal, report.difference
    assert report.steps >= 15
    assert report.largest_temperature_error < 1e-9


# -- bad input ------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_with_field_and_value(model: models.LoadedModel) -> None:
    engine = start(model)
    with pytest.raises(BadInputError, match="empty prompt"):
        engine.submit([])
    with pytest.raises(BadInputError, match=r"prompt.*257.*\[0, 256\]"):
        engine.submit([1, 257])
    with pytest.raises(BadInputError, match=r"prompt.*-1"):
        engine.submit([-1])
    with pytest.raises(BadInputError, match=r"allowed.*999"):
        engine.submit([1], SamplingParams(allowed=(999,)))
    with pytest.raises(BadInputError, match=r"arrival_s.*nan"):
        engine.submit([1], arrival_s=float("nan"))
    bare = start(models.wrap(tiny_llama(), None))
    with pytest.raises(BadInputError, match="stop"):
        bare.submit([1], SamplingParams(stop=("x",)))
    with pytest.raises(BadInputError, match="tokenizer"):
        bare.submit("text")
    assert nothing_left(engine)


def test_attention_switched_under_the_engine_is_an_error() -> None:
    own = models.wrap(tiny_llama(), None)
    engine = start(own, kernels="torch")
    own.model.set_attn_implementation("sdpa")
    engine.submit([1, 2])
    with pytest.raises(EntropicError, match="switched"):
        engine.run()


def test_an_uncertified_gain_is_refused(model: models.LoadedModel) -> None:
    run = configs.from_mapping({"loop": {"temperature": FEEDBACK}})
    with pytest.raises(UncertifiedError):
        Engine(run, model)
