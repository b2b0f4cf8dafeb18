"""Cases of `shared/cases` with their exact inputs, end to end: engine with a tiny model, loop, registered attention."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_backends_engine import FEEDBACK, Watched, nothing_left, prompt, start, trajectory
from tiny_model import _byte_to_char, byte_tokenizer, save_tiny, tiny_llama
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from toy_driver import Scored, Trace, check_invariants, make, step
from transformers import PreTrainedTokenizerFast

from backends import models
from backends.attention import PagedBatch, paged_attention
from backends.attention.rows import single_row_plan
from backends.kv_cache import PagedKVCache
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.config import EngineConfig
from entropic_ctl.loop import Loop
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.pruning.scores import entropic_share
from entropic_ctl.signals import FinishReason, Request, StepResult

LAYER0 = SimpleNamespace(layer_idx=0)
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def endless() -> models.LoadedModel:
    return dataclasses.replace(models.wrap(tiny_llama(), byte_tokenizer()), eos_ids=frozenset())


def always(*rows: Sequence[float]) -> Any:
    """Replace the logits of each sampling row by the first ones given, -inf behind; the last row repeats."""

    def force(batch: Any, logits: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(logits, -torch.inf)
        for i in range(logits.shape[0]):
            row = torch.tensor(rows[min(i, len(rows) - 1)], dtype=torch.float16).float()
            out[i, : row.shape[0]] = row
        return out

    return force


# -- entropy, temperature, sampling ---------------------------------------------------------------------------------


def test_e3_which_entropy_feeds_what(endless: models.LoadedModel) -> None:
    """Logits [2, 1, 0] at T = 0.5: the micro law sees 0.441057 nats; the budget, the scheduler, the clock 0.832396."""
    loop = {
        "temperature": {
            "law": "feedback", "temperature": 0.5, "t_min": 0.1, "t_max": 2.0, "target_nats": 0.6, "gain": 0.1
        },
        "pruning": {
            "law": "budget", "theta_nats": 0.01, "theta_wide_nats": 0.03, "widen_after": 1, "entropy_low_nats": 0.5,
            "entropy_high_nats": 1.0,
        },
    }  # fmt: skip
    engine = start(endless, loop=loop)
    engine.force = always([2.0, 1.0, 0.0])
    engine.submit(prompt(4), SamplingParams(max_new_tokens=9))
    result = engine.step()
    assert result is not None
    assert result.tempered_entropy[0] == pytest.approx(0.44105744, abs=1e-6)
    assert result.model_entropy[0] == pytest.approx(0.832396, abs=1e-6)
    policy = engine.loop.policy
    assert policy.u[0] == pytest.approx(math.log(0.5) - 0.1 * (0.44105744 - 0.6), abs=1e-6)
    assert policy.theta[0] == pytest.approx(0.01 + 0.02 * (1.0 - 0.832396) / 0.5, abs=1e-6)
    assert policy.signals(np.array([0])).entropy[0] == pytest.approx(0.832396, abs=1e-6)
    engine.force = always([50.0, 0.0, 0.0])
    engine.step()
    assert engine.metrics.summary()["tau_nats"] == pytest.approx(0.832396, abs=1e-6)


class Given:
    """A view of one row with this tempered entropy, whatever the temperature."""

    model_entropy = np.array([1.0])

    def __init__(self, entropy: float) -> None:
        self.entropy = np.array([entropy])

    def at(self, temperature: Any) -> tuple[Any, Any]:
        return self.entropy, np.array([1.0])


def test_e5_no_wind_up_in_the_loop() -> None:
    law = {
        "law": "feedback", "temperature": 1.0, "t_min": 0.1, "t_max": 2.0, "target_nats": 2.0, "gain": 0.1,
        "rate_limit": 0.0,
    }  # fmt: skip
    run = configs.from_mapping({"loop": {"temperature": law}})
    loop = Loop(run.loop, run.engine, 32_000, uncertified=True)
    loop.submit(Request(0, 0.0, 1, 1020))
    T = []
    for token in range(1020):
        plan, view = loop.plan(float(token)), Given(0.0 if token < 1000 else 4.0)
        t = loop.temper(view)
        T.append(float(t.temperature[0]))
        columns = (t.temperature, t.model_entropy, t.tempered_entropy, t.varentropy)
        loop.observe(StepResult(plan.step, 0.0, 1.0, plan.ids, np.array([0]), *columns))
    assert T[4:1001] == [pytest.approx(2.0)] * 997  # token 1000 is the first whose entropy is 4
    assert T[1001] < 2.0
    assert T[1014] > 0.1
    assert T[1015] == pytest.approx(0.1)


def test_e6_greedy_and_sampled_rows_in_one_batch_of_the_engine(endless: models.LoadedModel) -> None:
    engine = start(endless, loop={"temperature": {"law": "fixed", "temperature": 1.0}})
    engine.force = always([1.0, -math.inf, 3.0], [0.0, 0.0, 0.0])
    for i in range(8):
        engine.submit(prompt(3, i), SamplingParams(max_new_tokens=60, seed=i, greedy=i == 0))
    first, *others = engine.run()
    assert first.token_ids == [2] * 60
    counts = np.bincount([t for o in others for t in o.token_ids], minlength=3)
    assert counts.shape == (3,)
    assert ((counts - 140) ** 2 / 140).sum() < 13.8
    for result in engine.results:
        for column in (result.temperature, result.tempered_entropy, result.model_entropy, result.varentropy):
            assert np.isfinite(column).all()
        assert (result.temperature[0], result.tempered_entropy[0], result.varentropy[0]) == (0.0, 0.0, 0.0)
        assert result.tempered_entropy[1:] == pytest.approx(math.log(3))


@pytest.mark.parametrize("best", [0, 2])
@pytest.mark.parametrize("T", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-310, 0.0])
def test_e8_tiny_temperatures_in_the_engine(endless: models.LoadedModel, T: float, best: int) -> None:
    """Also with the best token last, where an overflow at the second best would be drawn first."""
    law = {"law": "fixed", "temperature": T} | ({"t_min": T} if T else {})
    engine = start(endless, loop={"temperature": law})
    engine.force = always([11.0625, 2.875, -1.9463][:: 1 - best])
    engine.submit(prompt(3), SamplingParams(max_new_tokens=20, seed=4))
    assert engine.run()[0].token_ids == [best] * 20
    _, tempered, model = trajectory(engine, 0).T
    np.testing.assert_allclose(tempered, 0.0, atol=1e-6)  # probability 1 to 1e-6 has an entropy below 2e-5
    assert np.isfinite(model).all()


class Counted(Watched):
    """Records the controllers' state of request ``mine`` after each of its tokens, and counts the micro updates."""

    mine = 0

    def watch(self) -> None:
        self.states, self.updates, self.slot = [], 0, -1
        policy, law = self.loop.policy, self.loop.policy.temperature
        update, observe = law.update, policy.observe

        def count(u: Any, entropy: Any) -> Any:
            self.updates += u.shape[0]
            return update(u, entropy)

        def record(slots: Any, *args: Any, **kwargs: Any) -> None:
            observe(slots, *args, **kwargs)
            found = self.loop.batcher.slot_of(self.mine)
            slot = self.slot = self.slot if found is None else found  # at its last token it has left the batcher
            if slot in slots.tolist():
                signals = policy.signals(np.array([slot]))
                self.states.append([math.exp(policy.u[slot]), signals.reduction_ewma[0], signals.entropy_mean[0]])

        law.update, policy.observe = count, record


def test_e10_same_controller_states_and_forty_updates(endless: models.LoadedModel) -> None:
    """Alone; prompt of 10 in chunks of 4; preempted once, after token 20 (two rows then outgrow 58 pages of 1)."""

    def run(*, other: bool = False, **limits: Any) -> Counted:
        engine = start(endless, loop={"temperature": FEEDBACK}, **limits)
        engine.__class__ = Counted
        engine.watch()
        if other:
            engine.submit(prompt(10, 5), SamplingParams(max_new_tokens=45, seed=9))
        engine.mine = engine.submit(prompt(10), SamplingParams(max_new_tokens=40, seed=3))
        engine.run()
        assert nothing_left(engine)
        return engine

    alone, chunked = run(), run(prefill_chunk=4)
    crowded = run(other=True, pages=58, page_tokens=1)
    assert [int(p.n_tokens[0]) for p in chunked.plans[:3]] == [4, 4, 2]
    assert [int((p.preempted == 1).sum()) for p in crowded.plans].index(1) == 20
    assert sum(p.preempted.shape[0] for p in crowded.plans) == 1
    assert (alone.updates, chunked.updates, crowded.updates) == (40, 40, 40 + 45)
    want = np.array(alone.states)
    assert want.shape == (40, 3)
    assert np.ptp(want, axis=0).min() > 0.01
    for engine in (chunked, crowded):
        np.testing.assert_allclose(engine.states, want, rtol=1e-4, atol=1e-5)
        assert engine.outputs[engine.mine].token_ids == alone.outputs[0].token_ids


# -- pages ----------------------------------------------------------------------------------------------------------


def test_s7_a_chunk_of_five_behind_three_tokens_takes_one_page_of_four() -> None:
    """Requests of 3 and 8 in a pool of 3 pages, 6 tokens a step: the second holds 3 tokens, then needs 5 more."""
    loop = make(
        EngineConfig(page_tokens=4, pages=3, max_batch=2, max_batch_tokens=6, prefill_chunk=5),
        macro=Scored(lambda v: 0 * v.pages),
    )
    loop.submit(Request(0, 0.0, 3, 2))
    loop.submit(Request(1, 0.0, 8, 1))
    pool, trace = loop.batcher.pages.pool, Trace()
    step(loop, 0.0, trace, check_invariants)
    assert trace.plans[0].n_tokens.tolist() == [3, 3]
    assert pool.available == 1
    step(loop, 1.0, trace, check_invariants)
    (row,) = np.flatnonzero(trace.plans[1].ids == 1)
    assert (trace.plans[1].context[row], trace.plans[1].n_tokens[row]) == (3, 5)
    assert trace.plans[1].allocated.shape == (1, 3)
    assert trace.plans[1].preempted.size == 0
    assert {finish.id for finish in trace.finished} == {0, 1}
    assert pool.used == 0


# -- attention ------------------------------------------------------------------------------------------------------


def attend_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page: int, theta: float) -> tuple[torch.Tensor, Any]:
    """The last of the tokens (heads, T, D) attends over all, after a prefill of the others: ((H, D), audits)."""
    n, heads, dim = k.shape[1] - 1, k.shape[0], k.shape[2]
    cache = PagedKVCache(1, heads, dim, -(-(n + 1) // page), page, torch.float32)
    rule, pages = PruningConfig(sink_pages=0, recent_pages=1, dense_layers=0), range(cache.n_pages)
    for start_, stop, budget in ((0, n, 0.0), (n, n + 1, theta)):
        plan = single_row_plan(start_, stop - start_, pages, theta_nats=budget, samples=start_ == n)
        batch = PagedBatch.from_plan(plan, cache, rule)
        batch.audit = True
        now = slice(start_, stop)
        out, _ = paged_attention(
            LAYER0, q[None, :, now], k[None, :, now], v[None, :, now], None, paged=batch, scaling=1.0
        )
        cache.seal(batch)
    return out[0, 0], batch.audits


@pytest.mark.parametrize("theta", [0.0, 1e-9])
def test_a7_very_negative_scores_in_the_registered_attention(theta: float) -> None:
    """Dense in one go; with a budget the two tokens lie on two pages whose partial states are merged."""
    q, k, v = (torch.zeros(1, 2, 8) for _ in range(3))
    q[..., 0], k[0, :, 0], v[0, :, :2] = 2.0, torch.tensor([-50000.0, -50000.5]), torch.eye(2)
    out, audits = attend_last(q, k, v, 1, theta)
    assert len(audits) == (theta > 0)
    torch.testing.assert_close(out[0, :2], torch.tensor([0.731059, 0.268941]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("peak", "diffuse"), [(0.99, 9), (1 - 1e-6, 200)])
def test_a15_one_page_with_the_mass_on_a_single_token(peak: float, diffuse: int) -> None:
    """The pruned attention keeps it and drops diffuse ones; the literal entropic share would drop it first."""
    page, tokens = 16, 16 * (diffuse + 2)
    weight = torch.full((tokens,), (1 - peak) / (page * diffuse))
    weight[:page], weight[5] = 0.0, peak
    weight[-page:] = 1e-12  # the page being written
    k = torch.zeros(1, tokens, 8)
    k[0, :, 0] = torch.log(weight).clamp(min=-40.0)
    q, v = torch.zeros(1, tokens, 8), torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(0))
    q[..., 0] = 1.0
    _, (audit,) = attend_last(q, k, v, page, theta=-math.log1p(-(1 - peak) / 2))
    assert audit.kept[0, 0]
    assert 0 < audit.kept[0, 1:-1].mean() < 1
    assert audit.true_mass[0] <= audit.certified_mass[0]
    literal = entropic_share.importance(weight[:-page].reshape(-1, page).numpy())
    if diffuse == 9:
        assert int(np.argmin(literal)) == 0
    else:
        assert literal[0] < 1e-5


# -- models and text ------------------------------------------------------------------------------------------------


def test_a13_a_second_end_of_text_of_the_generation_config_stops_the_engine(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    engine = start(models.load(tmp_path, dtype="float32"))
    engine.force = always([0.0, 0.0, 0.0, 50.0])
    engine.submit([1], SamplingParams(max_new_tokens=9, greedy=True))
    (output,) = engine.run()
    assert output.token_ids == [3]
    assert output.finish is not None
    assert output.finish.reason is FinishReason.EOS


def test_a14_the_engine_runs_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, 'tests')\n"
        "from tiny_model import tiny_llama; from backends import models; from backends.engine import Engine\n"
        "from entropic_ctl import config\n"
        "law = {'law': 'budget', 'theta_nats': 0.1, 'theta_wide_nats': 0.1, 'dense_layers': 0, 'recent_pages': 1}\n"
        "run = config.from_mapping({'engine': {'pages': 64, 'page_tokens': 4}, 'loop': {'pruning': law}})\n"
        "engine = Engine(run, models.wrap(tiny_llama(), None)); engine.submit(list(range(40)))\n"
        "kept = [engine.step().kept_fraction[0] for _ in range(3)]; print(kept[0], kept[-1] < 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ, check=False
    )
    assert done.stdout.split() == ["1.0", "True"], done.stderr


def pieces_model(pieces: Sequence[bytes]) -> models.LoadedModel:
    """Token i stands for the bytes ``pieces[i]``."""
    to_char = _byte_to_char()
    vocab = {"".join(to_char[b] for b in piece): i for i, piece in enumerate(pieces)}
    inner = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return dataclasses.replace(
        models.wrap(tiny_llama(), PreTrainedTokenizerFast(tokenizer_object=inner)), eos_ids=frozenset()
    )


WORDS = [b"The quick br", b"own", b" fox", b" foot"]
BYTES = [b"\xf0\x9f", b"\xa6\x99", b"e", "\u0301".encode()]


@pytest.mark.parametrize(
    ("pieces", "tokens", "stop", "deltas", "reason"),
    [
        (WORDS, [0, 1, 2], "own fox", ["The quick br"], FinishReason.STOP),
        (WORDS, [0, 1, 3], "own fox", ["The quick br", "own foot"], FinishReason.LENGTH),
        (WORDS, [0, 1], "own fox", ["The quick br", "own"], FinishReason.LENGTH),
        (BYTES, [0, 1, 2, 3], None, ["\U0001f999", "e", "\u0301"], FinishReason.LENGTH),
        (BYTES, [2, 0], None, ["e", "\ufffd"], FinishReason.LENGTH),
    ],
)
def test_w2_w5_the_cases_tokens_through_the_engine(
    pieces: list[bytes], tokens: list[int], stop: str | None, deltas: list[str], reason: FinishReason
) -> None:
    loaded, left = pieces_model(pieces), list(tokens)
    engine = start(loaded)
    engine.force = lambda batch, logits: torch.eye(logits.shape[1])[[left.pop(0)]] * 50.0
    engine.submit([1], SamplingParams(max_new_tokens=len(tokens), greedy=True, stop=(stop,) if stop else ()))
    assert [text for _, text in engine.stream()] == deltas
    output = engine.outputs[0]
    assert output.text == "".join(deltas)
    assert output.finish is not None
    assert output.finish.reason is reason
    if reason is FinishReason.LENGTH:
        assert output.text == loaded.decode(tokens)
