"""Speculative decoding in the engine: the text of plain decoding, whoever drafts, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from metrics_doc import undefined
from tiny_model import EOS, byte_tokenizer, tiny_llama

from backends import models
from backends.drafting import Drafted, DraftModel, PromptLookup, TokenIndex, lookup
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl import replay
from entropic_ctl.config import SpeculationConfig
from entropic_ctl.drafting import best_length, expected_yield, rule_of, thresholds
from entropic_ctl.errors import BadInputError, UncertifiedError
from entropic_ctl.loop import Loop, Recorder
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FinishReason, StepPlan, StepResult

pytestmark = pytest.mark.usefixtures("one_thread")

SOLVE = {"law": "solve", "target_nats": 2.0}
FEEDBACK = {"law": "feedback", "target_nats": 2.0, "gain": 0.05}
BUDGET = {
    "law": "budget",
    "dense_layers": 0,
    "recent_pages": 1,
    "sink_pages": 1,
    "theta_nats": 0.3,
    "theta_wide_nats": 0.3,
}


@pytest.fixture(scope="module")
def endless() -> models.LoadedModel:
    return dataclasses.replace(models.wrap(tiny_llama(), byte_tokenizer()), eos_ids=frozenset())


class Watched(Engine):
    """Checks every step: what is sealed is settled, and results are within the plan."""

    def _execute(self, plan: StepPlan, on_text: Any) -> StepResult:
        result = super()._execute(plan, on_text)
        self.plans.append(plan)
        self.results.append(result)
        for row in range(plan.n_rows):
            job = self._jobs[int(plan.ids[row])]
            settled = min(len(job.known) - 1, int(plan.context[row] + plan.n_tokens[row]))
            table = plan.pages(row, self.limits.page_tokens)
            assert not self.cache.sealed[table[settled // self.limits.page_tokens :]].any()
            if self._prunes:
                assert self.cache.sealed[table[: settled // self.limits.page_tokens]].all()
        return result


def start(
    model: models.LoadedModel, d: int = 4, *, loop: Any = None, drafter: Any = None, recorder: Any = None,
    draft_model: Any = None, spec: dict[str, Any] | None = None, **engine: Any,
) -> Watched:  # fmt: skip
    limits = {"pages": 256, "page_tokens": 4, "max_batch": 8, "max_batch_tokens": 256, "prefill_chunk": 256} | engine
    asked = {"draft_tokens": d} | (spec or {}) | ({"drafter": "model"} if draft_model is not None else {})
    run = configs.from_mapping({"engine": limits, "loop": loop or {}, "speculation": asked})
    watched = Watched(
        run, model, uncertified=True, drafter=drafter, draft_model=draft_model, recorder=recorder,
        metrics=Metrics(limits["page_tokens"]),
    )  # fmt: skip
    watched.plans, watched.results = [], []
    return watched


def texts(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
    for i, ids in enumerate(prompts):
        engine.submit(list(ids), SamplingParams(**({"max_new_tokens": 24, "seed": i} | params)))
    return [output.token_ids for output in engine.run()]


def prompt(n: int, seed: int = 0) -> list[int]:
    """Random bytes, the second half a repetition of the first."""
    half = np.random.default_rng(seed).integers(0, 256, -(-n // 2)).tolist()
    return (half + half)[:n]


def nothing_left(engine: Engine) -> bool:
    drafter = engine._drafter
    held = drafter._cached if isinstance(drafter, DraftModel) else getattr(drafter, "_texts", {})
    return (
        engine.idle
        and engine.loop.live == 0
        and not engine.loop.policy.active.any()
        and engine.loop.batcher.pages.pool.used == 0
        and not held
    )


class Scripted:
    """Drafts what ``tokens(job, most)`` says."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = tokens

    def propose(self, plan: StepPlan, jobs: Any) -> Drafted:
        return Drafted([self._tokens(j, m) if m else [] for j, m in zip(jobs, plan.n_draft.tolist(), strict=True)])

    def leave(self, request_id: int) -> None:
        pass


def oracle(want: Sequence[Sequence[int]]) -> Scripted:
    """Knows the text."""
    return Scripted(lambda job, most: want[job.request.id][len(job.output.token_ids) :][:most])


def liar(want: Sequence[Sequence[int]], vocab: int = 257) -> Scripted:
    """Knows the text and says something else."""
    return Scripted(
        lambda job, most: [(t + 1) % vocab for t in want[job.request.id][len(job.output.token_ids) :][:most]]
    )


def gambler(vocab: int) -> Scripted:
    """Tokens out of a hat, right now and then."""
    rng = np.random.default_rng(5)
    return Scripted(lambda job, most: rng.integers(0, vocab, int(rng.integers(0, most + 1))).tolist())


PROMPTS = [prompt(n, n) for n in (1, 3, 9, 16, 17, 40)]


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 4, 8])
@pytest.mark.parametrize("greedy", [True, False])
def test_lookup_drafts_change_no_text(endless: models.LoadedModel, d: int, greedy: bool) -> None:
    want = texts(start(endless, 0), PROMPTS, greedy=greedy)
    engine = start(endless, d, prefill_chunk=7, max_batch_tokens=32)
    assert texts(engine, PROMPTS, greedy=greedy) == want
    assert engine.drafted > 0
    assert nothing_left(engine)


def test_drafts_beside_a_prefill_chunk_change_no_text(endless: models.LoadedModel) -> None:
    want = texts(start(endless, 0), [PROMPTS[3], PROMPTS[5]])
    engine = start(endless, 3, drafter=oracle(want), prefill_chunk=4)
    for i, ids in enumerate((PROMPTS[3], PROMPTS[5])):
        engine.submit(ids, SamplingParams(max_new_tokens=24, seed=i))
    assert [o.token_ids for o in engine.run()] == want
    mixed = [p for p in engine.plans if p.n_draft.any() and ((p.n_tokens > 1) & (p.n_draft == 0)).any()]
    assert len(mixed) > 2
    assert nothing_left(engine)


@pytest.mark.parametrize("law", [{"law": "fixed", "temperature": 0.7}, SOLVE])
@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.3}, {"allowed": tuple(range(60, 90))}]
)
def test_sampled_texts_of_laws_without_state_are_those_of_plain_decoding(
    endless: models.LoadedModel, law: dict[str, Any], more: dict[str, Any]
) -> None:
    loop = {"temperature": law}
    want = texts(start(endless, 0, loop=loop), PROMPTS, **more)
    for drafter in (None, oracle(want), liar(want), gambler(257)):
        engine = start(endless, 3, loop=loop, drafter=drafter)
        assert texts(engine, PROMPTS, **more) == want
        assert nothing_left(engine)


def test_an_oracle_is_always_right_and_a_liar_never(endless: models.LoadedModel) -> None:
    want = texts(start(endless, 0), PROMPTS)
    right = start(endless, 5, drafter=oracle(want))
    assert texts(right, PROMPTS) == want
    assert right.accepted == right.drafted > 0
    steps = max(len(text) for text in want)
    assert len(right.results) == 1 + -(-(steps - 1) // 6)  # the prefill yields one token, then six a step
    wrong = start(endless, 5, drafter=liar(want))
    assert texts(wrong, PROMPTS) == want
    assert wrong.accepted == 0 < wrong.drafted
    assert len(wrong.results) == steps


def test_the_model_itself_as_its_drafter_is_always_right(endless: models.LoadedModel) -> None:
    """With the request's own noise, at one temperature; chunked prefill and preemption included."""
    twin = dataclasses.replace(models.wrap(tiny_llama(), endless.tokenizer), eos_ids=frozenset())
    want = texts(start(endless, 0), PROMPTS)
    for limits in ({}, {"prefill_chunk": 5}, {"pages": 26}):
        engine = start(endless, 3, draft_model=twin, **limits)
        assert texts(engine, PROMPTS) == want
        assert engine.accepted == engine.drafted > 0
        assert nothing_left(engine)
        if "pages" in limits:
            assert any(p.preempted.size for p in engine.plans)


def test_another_model_as_drafter_changes_no_text(endless: models.LoadedModel) -> None:
    other = models.wrap(tiny_llama(3, num_hidden_layers=1, num_key_value_heads=4), endless.tokenizer)
    for greedy in (True, False):
        want = texts(start(endless, 0), PROMPTS, greedy=greedy)
        engine = start(endless, 3, draft_model=other, spec={"rule": "history"}, page_tokens=2)
        assert texts(engine, PROMPTS, greedy=greedy) == want
        assert nothing_left(engine)


def test_a_drafter_that_could_not_keep_up_drafts_what_a_fresh_one_does(endless: models.LoadedModel) -> None:
    """Its cache after rejected drafts and steps without a draft: the proposals do not depend on the past."""
    other = models.wrap(tiny_llama(3), endless.tokenizer)
    seen: dict[int, list[tuple[int, list[int]]]] = {1: [], 3: []}
    for gap, log in seen.items():
        inner = DraftModel(other, endless, start(endless).limits)

        class Sometimes(Scripted):
            def __init__(self) -> None:
                self.turn = 0

            def propose(self, plan: StepPlan, jobs: Any) -> Drafted:
                self.turn += 1
                if self.turn % gap:  # noqa: B023 - used at once
                    plan = plan._replace(n_tokens=plan.n_tokens - plan.n_draft, n_draft=plan.n_draft * 0)
                out = inner.propose(plan, jobs)  # noqa: B023
                if out.tokens[0]:
                    log.append((len(jobs[0].known), out.tokens[0]))  # noqa: B023
                return out

        texts(start(endless, 4, drafter=Sometimes()), [PROMPTS[4]], greedy=True, max_new_tokens=40)
    often = dict(seen[1])
    assert len(seen[3]) > 3
    common = [(at, draft) for at, draft in seen[3] if at in often]
    assert common
    assert all(often[at] == draft for at, draft in common)


def test_the_distribution_is_that_of_the_model() -> None:
    """Chi-square of the first three tokens of 3,000 seeds, four tokens in the vocabulary, drafts out of a hat."""
    network = tiny_llama(1, vocab_size=4, eos_token_id=None)
    model = dataclasses.replace(models.wrap(network, None), eos_ids=frozenset())
    ids, law = [0, 1, 0, 1], {"temperature": {"law": "fixed", "temperature": 1.5}}
    network.set_attn_implementation("sdpa")
    cells = list(itertools.product(range(4), repeat=3))
    with torch.inference_mode():
        rows = torch.tensor([ids + list(cell) for cell in cells])
        log_p = torch.log_softmax(network(rows).logits[:, 3:6].double() / 1.5, -1)
    at = torch.tensor(cells)
    p = log_p.gather(-1, at[..., None]).sum((1, 2)).exp().numpy()
    engine = start(model, 2, loop=law, drafter=gambler(4), max_batch=64, max_batch_tokens=512, max_live=64)
    n = 3000
    got = texts(engine, [ids] * n, max_new_tokens=3)
    assert engine.accepted > 0.1 * engine.drafted > 100
    counts = np.array([sum(tuple(text) == cell for text in got) for cell in cells])
    pool = p * n >= 5
    seen, expected = np.append(counts[pool], counts[~pool].sum()), np.append(p[pool], p[~pool].sum()) * n
    statistic = ((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    from scipy.stats import chi2

    assert pool.sum() > 8
    assert statistic < chi2.ppf(0.999, pool.sum())


@pytest.mark.model
def test_greedy_identity_on_the_default_model() -> None:
    if not models.fetching.default_folder().is_dir():
        pytest.skip("the default model is not fetched (run `entropic fetch`)")
    model = models.load(dtype="float32")
    prompts = [
        model.prompt_ids(text)
        for text in ("Count from 1 to 12.", "Repeat twice: the cat sat on the mat.", "def add(a, b):")
    ]
    want = texts(start(model, 0, page_tokens=16), prompts, greedy=True, max_new_tokens=40)
    for d in (2, 8):
        engine = start(model, d, page_tokens=16)
        assert texts(engine, prompts, greedy=True, max_new_tokens=40) == want
        assert engine.accepted > 0


# -- ends, limits, faults ---------------------------------------------------------------------------------------------


def test_an_end_of_text_inside_an_accepted_run_ends_there() -> None:
    model = models.wrap(tiny_llama(), byte_tokenizer())
    want = texts(start(model, 0), PROMPTS, greedy=True, allowed=(EOS, *range(6)), max_new_tokens=60)
    assert any(text[-1] == EOS and len(text) > 3 for text in want)
    longer = [[*text, 1, 2, 3] for text in want]  # the oracle drafts past the end
    engine = start(model, 4, drafter=oracle(longer))
    assert texts(engine, PROMPTS, greedy=True, allowed=(EOS, *range(6)), max_new_tokens=60) == want
    assert all(o.finish.reason in (FinishReason.EOS, FinishReason.LENGTH) for o in engine.outputs.values())
    assert nothing_left(engine)
    early = start(model, 4, drafter=Scripted(lambda job, most: [EOS] * most))
    assert texts(early, PROMPTS, greedy=True, allowed=(EOS, *range(6)), max_new_tokens=60) == want


def test_a_stop_string_inside_an_accepted_run_ends_there(endless: models.LoadedModel) -> None:
    letters = tuple(range(97, 123))
    (plain,) = texts(start(endless, 0), [PROMPTS[2]], greedy=True, allowed=letters)
    stop = bytes(plain[7:9]).decode()
    want = bytes(plain).decode().split(stop)[0]
    for drafter in (oracle([plain]), liar([plain])):
        engine = start(endless, 6, drafter=drafter)
        engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=24, greedy=True, allowed=letters, stop=(stop,)))
        (output,) = engine.run()
        assert (output.text, output.finish.reason) == (want, FinishReason.STOP)
        assert output.token_ids == plain[: len(output.token_ids)]
        assert nothing_left(engine)


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7])
def test_limits_cut_drafts(endless: models.LoadedModel, most: int) -> None:
    (plain,) = texts(start(endless, 0), [PROMPTS[3]], max_new_tokens=10)
    engine = start(endless, 4, drafter=oracle([plain]))
    assert texts(engine, [PROMPTS[3]], max_new_tokens=most) == [plain[:most]]
    assert engine.outputs[0].finish.reason is FinishReason.LENGTH
    tight = start(endless, 4, drafter=oracle([plain]), pages=5)  # 20 tokens: 16 of the prompt
    assert texts(tight, [PROMPTS[3]], max_new_tokens=10) == [plain[:5]]
    assert tight.outputs[0].finish.reason is FinishReason.CAPACITY
    assert nothing_left(tight)


@pytest.mark.parametrize("bad", [257, -1])
def test_a_draft_outside_the_vocabulary_is_an_error(endless: models.LoadedModel, bad: int) -> None:
    engine = start(endless, 2, drafter=Scripted(lambda job, most: [bad]))
    with pytest.raises(BadInputError, match=rf"outside the vocabulary.*{bad}.*\[0, 256\]"):
        texts(engine, [PROMPTS[2]])


def test_a_draft_longer_than_asked_is_an_error(endless: models.LoadedModel) -> None:
    engine = start(endless, 2, drafter=Scripted(lambda job, most: [1] * (most + 1)))
    with pytest.raises(BadInputError, match="more tokens drafted"):
        texts(engine, [PROMPTS[2]])


def test_malformed_logits_after_a_draft_matter_only_if_the_text_comes_there(endless: models.LoadedModel) -> None:
    class Faulty(Watched):
        def _forward(self, batch: Any, tokens: Any) -> torch.Tensor:
            logits = super()._forward(batch, tokens)
            if logits.shape[0] > 1:
                logits[-1] = float("nan")
            return logits

    want = texts(start(endless, 0), [PROMPTS[3]])
    for drafter, reason in ((liar(want), FinishReason.LENGTH), (oracle(want), FinishReason.EMPTY_SUPPORT)):
        engine = start(endless, 3, drafter=drafter)
        engine.__class__ = Faulty
        (text,) = texts(engine, [PROMPTS[3]])
        assert engine.outputs[0].finish.reason is reason
        assert text == want[0][: len(text)]
        assert len(text) == (24 if reason is FinishReason.LENGTH else 4)
        assert nothing_left(engine)


def test_cancelling_between_steps_frees_everything(endless: models.LoadedModel) -> None:
    want = texts(start(endless, 0), PROMPTS)
    engine = start(endless, 4, drafter=None)
    for i, ids in enumerate(PROMPTS):
        engine.submit(ids, SamplingParams(max_new_tokens=24, seed=i))
    engine.step()
    engine.step()
    assert engine.cancel(2)
    outputs = engine.run()
    assert [o.token_ids for o in outputs if o.id != 2] == [t for i, t in enumerate(want) if i != 2]
    assert nothing_left(engine)


# -- with the rest of the loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("rule", ["fixed", "entropy", "history"])
def test_a_recorded_run_replays(endless: models.LoadedModel, tmp_path: Path, rule: str, lag: int) -> None:
    loop = {"temperature": FEEDBACK, "pruning": BUDGET}
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        engine = start(
            endless, 3, loop=loop, recorder=recorder, pages=40, prefill_chunk=8, observation_lag=lag,
            spec={"rule": rule, "draft_below_nats": 6.0, "rule_acceptance": 0.9, "rule_scale_nats": 9.0},
        )  # fmt: skip
        got = texts(engine, PROMPTS * 2, repetition_penalty=0.8)
    assert engine.drafted > 0
    assert any(p.preempted.size for p in engine.plans)
    assert all(len(text) == 24 for text in got)
    assert nothing_left(engine)
    report = replay.replay(path)
    assert report.equal, report.difference
    assert report.tokens == 24 * len(got)


def test_the_law_is_updated_once_per_accepted_token(endless: models.LoadedModel) -> None:
    """Under `feedback` all positions of a step share one u, and the accepted ones then update it in order."""
    want = texts(start(endless, 0), [PROMPTS[3]])
    engine = start(endless, 3, loop={"temperature": FEEDBACK}, drafter=oracle(want))
    texts(engine, [PROMPTS[3]], max_new_tokens=12)
    law = engine.loop.policy.temperature
    u = np.array([np.log(engine.results[0].temperature[0])])
    multiple = 0
    for result in engine.results:
        np.testing.assert_allclose(result.temperature, np.exp(u).repeat(result.token_ids.size), rtol=1e-6)
        for entropy in result.tempered_entropy:
            u = law.update(u, np.array([entropy]))
        multiple += result.token_ids.size > 1
    assert multiple > 0 or engine.accepted == 0


@pytest.mark.parametrize("pages", [256, 24])
def test_drafts_beside_pruning_keep_certificates_and_pages(endless: models.LoadedModel, pages: int) -> None:
    loop = {"pruning": BUDGET}
    engine = start(endless, 3, loop=loop, drafter=gambler(257), pages=pages, prefix_caching=True)
    got = texts(engine, [prompt(20, 1), prompt(20, 1), prompt(33, 2)], max_new_tokens=20)
    assert all(len(text) == 20 for text in got)
    assert any((result.kept_fraction < 1).any() for result in engine.results)
    for plan, result in zip(engine.plans, engine.results, strict=True):
        assert (result.certificate_max <= 0.3 * (1 + 1e-9)).all()
        assert (result.kept_fraction[plan.n_draft > 0] == 1).all()
    assert nothing_left(engine) or engine.loop.batcher.pages.pool.used == 0


def test_an_audit_compares_the_same_positions(endless: models.LoadedModel) -> None:
    loop = {"pruning": BUDGET}
    runs = []
    for every in (0, 1):
        engine = start(endless, 3, loop=loop, drafter=gambler(257), audit_every=every)
        runs.append((texts(engine, [prompt(40, 1), prompt(30, 2)]), engine))
    assert runs[0][0] == runs[1][0]
    kl = runs[1][1].audit.table()["kl_nats"]
    assert kl.size > 0
    assert kl.max() < 1.0  # of other positions it would be several nats


def test_a_gain_certified_without_drafts_does_not_cover_them(endless: models.LoadedModel) -> None:
    config = configs.from_mapping({"speculation": {"draft_tokens": 2}, "loop": {"temperature": FEEDBACK}})
    with pytest.raises(UncertifiedError):
        Engine(config, endless)


def test_a_draft_model_with_other_tokens_is_refused(endless: models.LoadedModel) -> None:
    other = models.wrap(tiny_llama(vocab_size=99), None)
    with pytest.raises(BadInputError, match=r"speculation\.draft_model"):
        start(endless, 2, draft_model=other)


def test_flops_and_bytes_of_a_verifying_step(endless: models.LoadedModel) -> None:
    want = texts(start(endless, 0), [PROMPTS[3]])
    engine = start(endless, 3, drafter=oracle(want))
    texts(engine, [PROMPTS[3]])
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    head, attention = 32 * 257, 2 * 2 * 4 * 8
    pairs = 4 * 16 + 10
    assert engine.results[1].drafted.tolist() == [3]
    assert engine.results[1].flops == 4 * 2 * (2 * layer + 32) + 4 * 2 * head + 2 * attention * pairs


# -- prompt lookup ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.lists(st.integers(1, 9), max_size=12))
def test_the_index_of_a_growing_text_says_what_a_search_says(text: list[int], length: int, cuts: list[int]) -> None:
    index = TokenIndex((3, 2))
    for size in sorted({*np.cumsum(cuts).tolist(), len(text)}):
        part = text[:size]
        want: list[int] = []
        for n in (3, 2):
            ends = [e for e in range(n, len(part)) if part[e - n : e] == part[-n:]]
            if len(part) > n and ends:
                source = list(part)
                for i in range(length):
                    source.append(source[ends[-1] + i])
                want = source[len(part) :]
                break
        assert index.draft(part, length) == want == lookup(part, length)


def test_a_token_costs_the_index_one_entry_per_n() -> None:
    index = TokenIndex((3, 2))
    text = list(range(1000))
    index.draft(text, 4)
    before = index._seen
    text += [1, 2, 3]
    index.draft(text, 4)
    assert index._seen - before == 3
    assert sum(len(ends) for ends in index._ends.values()) <= 2 * len(text)


def test_lookup_forgets_who_left(endless: models.LoadedModel) -> None:
    drafter = PromptLookup()
    engine = start(endless, 2, drafter=drafter)
    texts(engine, PROMPTS)
    assert not drafter._texts


# -- draft length -----------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 1.2), st.integers(1, 10), st.floats(0, 2))
def test_the_best_length_is_the_best(a: float, cost: float, most: int, begin: float) -> None:
    values = [1.0, *(expected_yield(a, d) / (1 + begin + cost * d) for d in range(1, most + 1))]
    assert values[best_length(a, cost, most, begin)] >= max(values) * (1 - 1e-12)


@given(st.floats(0, 1.2), st.integers(1, 10))
def test_thresholds_rise(cost: float, most: int) -> None:
    least = thresholds(cost, most)
    assert (least[1:] >= least[:-1]).all()
    if 0 < cost < 1:
        assert least[0] == pytest.approx(cost, abs=1e-12)  # one token pays iff a > c


@given(st.lists(st.floats(0, 12), min_size=2), st.floats(0.01, 0.9), st.floats(0.05, 1), st.floats(0.1, 10))
def test_the_entropy_rule_is_monotone_and_optimal(h: list[float], cost: float, a: float, scale: float) -> None:
    config = SpeculationConfig(
        draft_tokens=8, rule="entropy", rule_start=0.0, rule_cost=cost, rule_acceptance=a, rule_scale_nats=scale
    )
    entropies = np.array([*sorted(h), np.nan])
    got = rule_of(config, 1).lengths(entropies)
    assert (np.diff(got) <= 0).all()
    assert got[-1] == 0
    for entropy, d in zip(entropies[:-1], got[:-1], strict=True):
        values = [expected_yield(a * np.exp(-entropy / scale), k) / (1 + cost * k) for k in range(9)]
        assert values[int(d)] >= max(values) * (1 - 1e-9)


def test_the_history_rule_learns_stops_and_tries_again() -> None:
    config = SpeculationConfig(
        draft_tokens=8,
        rule="history",
        rule_cost=0.2,
        rule_start=0.0,
        rule_acceptance=0.5,
        rule_weight=0.3,
        rule_probe=4,
    )
    rule = rule_of(config, 3)
    slots, zeros, h = np.array([0, 2]), np.zeros(2, np.int64), np.zeros(3)
    first = rule.lengths(h)
    for _ in range(12):
        d = rule.lengths(h)[slots]
        rule.observe(slots, d, np.array([d[0], 0]))
    after = rule.lengths(h)
    assert after[0] == 8 > first[0] == after[1] == first[1]
    tried = []
    for _ in range(11):
        d = rule.lengths(h)[slots]
        tried.append(int(d[1]))
        rule.observe(slots, d, np.array([d[0], 0]))
    assert set(tried) == {0, 1}
    assert 1 <= tried.count(1) <= 3
    rule.observe(slots, zeros, zeros)
    rule.stop(slots)
    assert (rule.lengths(h) == first).all()


def test_an_exponential_average_by_hand() -> None:
    rule = rule_of(SpeculationConfig(draft_tokens=4, rule="history", rule_acceptance=0.5, rule_weight=0.5), 1)
    rule.observe(np.array([0]), np.array([3]), np.array([2]))  # yes, yes, no
    assert rule.acceptance[0] == pytest.approx(((0.5 * 0.5 + 0.5) * 0.5 + 0.5) * 0.5)


@pytest.mark.parametrize("rule", ["entropy", "history"])
def test_the_simulator_runs_the_same_rules(rule: str) -> None:
    from synthetic_bank import make_bank

    from sim.arrivals import Workload
    from sim.cost import LinearCost
    from sim.replica import simulate

    bank, _ = make_bank(lengths=(30, 50))

    def jobs() -> Workload:
        return Workload(
            configs.WorkloadConfig(output_length="limit"), np.zeros(4), prompt_tokens=np.full(4, 9),
            limit_tokens=np.full(4, 60), prompt=np.arange(4), xi=np.linspace(0, 0.9, 4), greedy=False,
        )  # fmt: skip

    got = []
    for extra in ({"draft_tokens": 0}, {"acceptance": 0.9}, {"acceptance": 0.05}):
        spec = {"draft_tokens": 4, "rule": rule, "rule_acceptance": 0.9, "rule_weight": 0.3} | extra
        run = configs.from_mapping({"speculation": spec})
        result = simulate(run, bank=bank, workload=jobs(), cost=LinearCost(0.0, 1.0), keep_tokens=True)
        assert int(result.requests["output_tokens"].sum()) == 240
        got.append((result.summary.get("draft_tokens", 0), result.summary.get("draft_tokens_accepted", 0)))
    assert got[0] == (0, 0)
    assert got[1][0] > 0
    if rule == "history":  # it learns that drafts fail here
        assert got[2][0] < 0.5 * got[1][0]


def test_results_that_claim_impossible_drafts_are_refused() -> None:
    config = configs.from_mapping({"speculation": {"draft_tokens": 2}})
    loop = Loop(config.loop, config.engine, 64, speculation=config.speculation)
    from entropic_ctl.signals import Request

    loop.submit(Request(0, 0.0, 4, 9))
    plan = loop.plan(0.0)

    class View:
        model_entropy = np.ones(1)

        def at(self, temperature: Any) -> Any:
            return np.ones(1), np.ones(1)

    for positions in (np.array([2]), np.array([0]), np.array([1, 1])):
        with pytest.raises(BadInputError, match="positions"):
            loop.temper(View(), positions)
    ones = np.ones(1)
    result = StepResult(
        plan.step, 0.0, 1.0, token_ids=np.array([0]), tokens=np.array([-1]), temperature=ones, model_entropy=ones,
        tempered_entropy=ones, varentropy=ones, drafted=np.array([1]),
    )  # fmt: skip
    with pytest.raises(BadInputError, match="drafted"):
        loop.observe(result)


# -- command line, benchmark, figure ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import save_tiny

    place = tmp_path_factory.mktemp("tiny")
    save_tiny(place)
    return place


def test_generate_with_drafts_says_the_same_and_how_many_were_right(folder: Path, tmp_path: Path) -> None:
    from command import entropic

    said = []
    for number, more in enumerate(((), ("--draft", 3), ("--draft", 3, "--draft-model", folder))):
        file = tmp_path / f"{number}.json"
        common = (
            "--model",
            folder,
            "--prompt",
            "abcabcabcabc",
            "--raw",
            "--max-tokens",
            12,
            "--greedy",
            "--json",
            file,
        )
        status, _, err = entropic("generate", *common, *more)
        assert status == 0, err
        said.append(json.loads(file.read_text()))
    assert said[0]["text"] == said[1]["text"] == said[2]["text"]
    assert said[0]["draft_tokens"] == 0
    assert 0 < said[2]["draft_tokens_accepted"] <= said[2]["draft_tokens"]  # the model drafts for itself
    assert "drafted tokens accepted" in err
    status, _, err = entropic("generate", "--model", folder, "--prompt", "x", "--draft", 2, "--draft-rule", "guess")
    assert status == 2
    assert "fixed, entropy, history" in err


def test_the_benchmark_adds_up_on_a_tiny_model(folder: Path, tmp_path: Path) -> None:
    from backends.bench_speculation import bench_speculation
    from backends.prompts import Prompt
    from figures import speculation as figure

    model = models.load(folder, "float32")
    kinds = {"code": (Prompt("code", "abcabcabcabc", chat=False),), "prose": (Prompt("prose", "abxyab", chat=False),)}
    arms = {
        "fixed 0": {"draft_tokens": 0},
        "fixed 3": {"draft_tokens": 3},
        "history": {"draft_tokens": 3, "rule": "history"},
    }
    got = bench_speculation(model, tokens=12, repeats=2, kinds=kinds, arms=arms)
    units = got.pop("units")
    assert not undefined("bench speculation", got)
    assert units["tokens"].shape == (2 * 3 * (1 + 2),)
    assert units["same_text"].all()  # float32
    assert (units["tokens"] <= units["steps"] + units["accepted"]).all()
    assert (units["accepted"] <= units["drafted"]).all()
    plain = units["arm"] == "fixed 0"
    assert (units["tokens"][plain] == units["steps"][plain]).all()
    assert not units["drafted"][plain].any()
    assert len(got["step_ms"]) == 4
    for row in got["rows"]:
        assert row["speedup_low"] <= row["speedup"] * (1 + 1e-9)
        assert row["speedup"] <= row["speedup_high"] * (1 + 1e-9)
        if row["arm"] == "fixed 0":
            assert row["speedup"] == row["wall_speedup"] == 1.0
    assert {row["kind"] for row in got["rows"]} == {"code", "prose", "all"}
    table = {name: [row[name] for row in got["rows"]] for name in got["rows"][0]}
    figure.draw(table, tmp_path / "speculation.png")
    assert (tmp_path / "speculation.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(BadInputError, match="speedup_low"):
        figure.draw({name: values for name, values in table.items() if name != "speedup_low"}, tmp_path / "x.png")


def test_an_acceptance_curve_is_found_again() -> None:
    from backends.draft_replay import fit_acceptance

    rng = np.random.default_rng(0)
    entropy = rng.exponential(1.5, 20_000)
    a, h = fit_acceptance(entropy, (rng.random(20_000) < 0.8 * np.exp(-entropy / 2.5)).astype(float))
    assert a == pytest.approx(0.8, abs=0.03)
    assert h == pytest.approx(2.5, rel=0.12)


@pytest.mark.parametrize("rule", ["fixed", "entropy", "history"])
def test_a_recorded_text_says_what_the_engine_would_have_drafted(endless: models.LoadedModel, rule: str) -> None:
    from backends.draft_replay import Recorded, replayed, sensitivity

    spec = {"draft_tokens": 5, "rule": rule, "rule_scale_nats": 9.0, "rule_acceptance": 0.9, "rule_weight": 0.3}
    letters = tuple(range(97, 103))  # few, so that drafts are found
    for seed in range(3):
        plain, live = start(endless, 0), start(endless, 5, spec=spec)
        for engine in (plain, live):
            engine.submit(PROMPTS[4], SamplingParams(max_new_tokens=60, seed=seed, allowed=letters))
            engine.run()
        entropy = np.concatenate([result.model_entropy for result in plain.results])
        text = Recorded("sampled", "code", PROMPTS[4], plain.outputs[0].token_ids, entropy, 60)
        want = np.array([(r.drafted[0], r.token_ids.size - 1) for r in live.results[1:]])
        assert np.array_equal(replayed(text, live.config.speculation), want)
        assert want.sum() > 0
        rows = sensitivity([text], {"fixed 0": {"draft_tokens": 0}, "fixed 5": {"draft_tokens": 5}}, costs=(0.0, 0.5))
        speed = {(row["cost"], row["arm"]): row["speedup"] for row in rows}
        assert speed[0.0, "fixed 0"] == speed[0.5, "fixed 0"] == 1.0
        assert speed[0.0, "fixed 5"] >= 1.0
        assert speed[0.5, "fixed 5"] < speed[0.0, "fixed 5"]
