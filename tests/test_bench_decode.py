"""`entropic bench decode`: copies that share no memory, the table's arithmetic, peers that are absent or misbehave."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends import bench_decode as bench
from backends import machine
from backends.decode_arms import Arm, Sample, engine_config, run_round
from backends.decode_table import Row, ratios_of, summarise, targets_of
from backends.engine import Engine
from backends.filled import FilledCache, FilledEngine, _pools
from backends.models import LoadedModel, wrap
from backends.peers import launch
from backends.prompts import document_ids
from backends.sampling import SamplingParams
from entropic_ctl.cli_decode_run import parse_cells, parse_thetas
from entropic_ctl.errors import BadInputError
from tests.command import entropic
from tests.tiny_model import byte_tokenizer, save_tiny, tiny_llama

PAGE, CONTEXT, ROWS = 8, 117, 3  # the last page is not full
THETA = 0.3
CELLS = ("--cells", "1x64")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(launch.__file__).parents[2])}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The tiny model with one more layer, so that one is pruned; no token ends a text."""
    wrapped = wrap(tiny_llama(num_hidden_layers=3), byte_tokenizer(), name="tiny")
    return dataclasses.replace(wrapped, eos_ids=frozenset())


@pytest.fixture(scope="module")
def filled(model: LoadedModel) -> FilledCache:
    """A text in a cache of its own."""
    return FilledCache(model, document_ids(model, CONTEXT), page_tokens=PAGE, chunk=32)


class _Watch:
    """A probe that keeps what the engine showed it."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.tables: list[list[set[int]]] = []
        self.theta: list[float] = []

    def __call__(self, plan: Any, rows: Any, logits: torch.Tensor) -> None:
        self.logits.append(logits.clone())
        self.theta.append(float(plan.theta_nats.max()))
        self.tables.append([set(plan.pages(row, PAGE).tolist()) for row in range(plan.n_rows)])


def _run(engine: Engine) -> list[list[int]]:
    certificates = []
    while not engine.idle:
        result = engine.step()
        if result is not None:
            certificates.append(result.certificate_max.max())
    assert (max(certificates) > 0) == (engine.config.loop.pruning.name != "off")  # the shadow was copied too
    return [engine.outputs[number].token_ids for number in sorted(engine.outputs)]


@pytest.mark.parametrize("theta", [0.0, THETA])
def test_copies_decode_as_prefills_do_and_share_no_page(model: LoadedModel, filled: FilledCache, theta: float) -> None:
    config = engine_config(ROWS, CONTEXT, 12, theta, PAGE, min_context=0)
    copied, exact = _Watch(), _Watch()
    engine = FilledEngine(config, model, filled, probe=copied)
    engine.admit(ROWS, max_new_tokens=10)
    plain = Engine(config, model, probe=exact)
    for row in range(ROWS):
        plain.submit(filled.tokens, SamplingParams(max_new_tokens=10, seed=row))
    assert _run(engine) == _run(plain)
    assert max(copied.theta) == theta
    assert len(copied.logits) == len(exact.logits) == 10
    for a, b in zip(copied.logits, exact.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    tables = copied.tables[-1]
    assert len(set.union(*tables)) == sum(map(len, tables)) == ROWS * math.ceil((CONTEXT + 9) / PAGE)


def test_a_copy_is_independent_of_its_source(model: LoadedModel, filled: FilledCache) -> None:
    own = FilledCache(model, filled.tokens, page_tokens=PAGE, chunk=32)
    outputs = []
    for spoil in (False, True):
        engine = FilledEngine(engine_config(2, CONTEXT, 8, THETA, PAGE, min_context=0), model, own)
        engine.admit(2, max_new_tokens=6)
        engine.step()
        if spoil:
            for _, pool in _pools(own.cache, shadow=True):
                with torch.inference_mode():
                    pool.zero_()
        outputs.append(_run(engine))
    assert outputs[0] == outputs[1]


def test_a_prompt_that_would_be_chunked_is_refused(model: LoadedModel, filled: FilledCache) -> None:
    config = engine_config(2, CONTEXT, 8, 0.0, PAGE, min_context=0)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, prefill_chunk=32))
    engine = FilledEngine(config, model, filled)
    engine.admit(1, max_new_tokens=2)
    with pytest.raises(BadInputError, match="one step"):
        engine.step()


def test_a_dense_fill_cannot_feed_a_pruning_engine(model: LoadedModel, filled: FilledCache) -> None:
    dense = FilledCache(model, filled.tokens[:20], page_tokens=PAGE, shadow=False)
    with pytest.raises(BadInputError, match="quantised"):
        FilledEngine(engine_config(1, 20, 8, THETA, PAGE, min_context=0), model, dense)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command wrote for the tiny model, with its figure and its standard output."""
    folder = tmp_path_factory.mktemp("decode")
    save_tiny(folder / "m", num_hidden_layers=3)
    arguments = ["--model", folder / "m", "--cells", "1x32,2x32,2x200", "--theta", "0.3", "--repeats", 2]
    arguments += ["--steps", 3, "--warmup", 1, "--texts", 2, "--positions", 2, "--page-tokens", 8, "--crossover"]
    arguments += ["--min-context", 100]
    arguments += ["--figure", folder / "f.png", "--json", folder / "d.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "find_peers", lambda _=None: None)
        patch.setattr(bench, "find_peers", lambda _=None: None)
        patch.setattr(bench, "read_bandwidth", lambda: 1e10)
        status, shown, _ = entropic("bench", "decode", *arguments)
    assert status == 0
    return {"json": json.loads((folder / "d.json").read_text()), "shown": shown, "figure": folder / "f.png"}


def test_the_json_has_one_row_per_engine_and_cell(table: dict[str, Any]) -> None:
    rows = table["json"]["rows"]
    assert [(r["engine"], r["batch"], r["context"]) for r in rows] == [
        (engine, *cell) for cell in ((1, 32), (2, 32), (2, 200)) for engine in ("ours dense", "ours theta 0.3")
    ]
    promised = {
        "engine",
        "batch",
        "context",
        "step_ms",
        "kv_bytes_fraction",
        "kl_mean",
        "certificate_max",
        "violations",
    }
    assert all(promised <= row.keys() for row in rows)
    assert set(rows[0]) == {field.name for field in dataclasses.fields(Row)}
    assert table["figure"].stat().st_size > 1000


def test_rows_are_consistent(table: dict[str, Any]) -> None:
    values = table["json"]
    for row in values["rows"]:
        assert row["violations"] == 0
        assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["floor_fraction"] == pytest.approx(row["floor_ms"] / row["step_ms"])
        assert len(row["rounds_ms"]) == 2
        if row["theta_nats"] == 0:
            assert (row["kv_bytes_fraction"], row["kl_mean"], row["certificate_max"]) == (1.0, 0.0, 0.0)
    short, long = (next(r for r in values["rows"] if r["theta_nats"] and r["context"] == c) for c in (32, 200))
    assert long["audited_positions"] == 4
    assert 0 < long["certificate_max"] <= 0.3 * (1 + 1e-12)
    nothing = ("audited_heads", "audited_positions", "kl_mean", "kl_rounding", "certificate_max", "violations")
    assert [short[name] for name in nothing] == [0] * 6  # below min_context all is read, and nothing audited
    assert (short["kv_bytes_fraction"], short["certificate_ratio"]) == (1.0, None)
    assert values["targets"] == []  # they are about cells that were not measured
    assert [r["over"] for r in values["ratios"] if r["engine"] == "ours theta 0.3"] == ["ours dense"] * 3
    (found,) = values["crossover"]
    assert found["contexts"] == [128, 200]
    assert found["prunes"] == [True, True]


def test_the_table_is_whole_at_80_columns(table: dict[str, Any]) -> None:
    shown = table["shown"].splitlines()
    lines = shown[1 : next(i for i, line in enumerate(shown) if line.startswith("vllm: "))]
    assert max(map(len, lines)) <= 80
    assert "…" not in table["shown"]
    rows = [line.split("  ") for line in lines if line.startswith(("dense", "theta 0.3"))]
    assert [next(cell.strip() for cell in row if " x " in cell) for row in rows] == [
        cell for cell in ("1 x 32", "2 x 32", "2 x 200") for _ in range(2)
    ]
    for row, line in zip(table["json"]["rows"], rows, strict=True):
        assert f"{row['step_ms']:.2f}" in map(str.strip, line)
        assert (line[-1] == "–") == (row["certificate_max"] == 0)


def test_absent_peers_are_named_with_how_to_get_them(table: dict[str, Any]) -> None:
    assert {p["engine"]: p["state"] for p in table["json"]["peers"]} == dict.fromkeys(launch.PEERS, "absent")
    assert table["shown"].count("make bench-peers") == len(launch.PEERS)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cells", "8x"), ("--cells", "8"), ("--cells", "0x128"), ("--cells", "1x8"), ("--theta", "a"),
     ("--theta", "-0.1"), ("--theta", "nan"), ("--peers", "/nowhere"),
     ("--cells", "1x5000")],
)  # fmt: skip
def test_bad_options_are_refused_before_any_work(option: str, value: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "m")
    status, _, said = entropic(
        "bench",
        "decode",
        "--model",
        tmp_path / "m",
        "--no-peers",
        *([] if option == "--cells" else CELLS),
        *([] if option in ("--cells", "--positions") else ["--positions", 2]),
        "--min-context",
        0,
        option,
        value,
    )
    assert status == 2
    assert option.removeprefix("--") in said
    assert "round" not in said


def test_lists_are_read() -> None:
    assert parse_cells("8x128, 1x64,8x128") == [(8, 128), (1, 64)]
    assert parse_thetas("0.02,0.1") == [0.02, 0.1]


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _sample(
    ms: float, *, kv: float = 1e8, foreign: float = 0.0, probe: float = 1.0, certificate: float = 0.0
) -> Sample:
    return Sample([ms] * 3, kv, certificate, foreign, probe)


def _row(name: str, samples: list[Sample], cell: tuple[int, int] = (8, 8000), **options: Any) -> Row:
    settings: dict[str, Any] = {"dense": samples, "base": None, "loss": None, "theta_nats": 0.0}
    return summarise(name, *cell, samples, **(settings | options), weight_bytes=10**8, bandwidth=1e10)


def test_disturbed_rounds_are_left_out_of_the_median_but_shown() -> None:
    row = _row("ours dense", [_sample(40.0), _sample(90.0, foreign=0.5), _sample(44.0), _sample(95.0, probe=1.5)])
    assert (row.step_ms, row.step_ms_low, row.step_ms_high, row.disturbed) == (42.0, 40.0, 44.0, 2)
    assert row.rounds_ms == [40.0, 90.0, 44.0, 95.0]
    assert row.floor_ms == pytest.approx(20.0)
    everything = _row("ours dense", [_sample(40.0, foreign=1.0), _sample(90.0, foreign=1.0)])
    assert (everything.step_ms, everything.disturbed) == (65.0, 2)


def test_attention_speed_is_bytes_over_time_beyond_the_short_step() -> None:
    row = _row("ours dense", [_sample(100.0, kv=1.5e9)], base=[_sample(20.0, kv=0.3e9)])
    assert row.attention_gb_s == pytest.approx(15.0)
    assert math.isnan(_row("ours dense", [_sample(20.0)], base=[_sample(20.0)]).attention_gb_s)


def _rows(dense: float, pruned: float, vllm: float, kl: float) -> list[Row]:
    base = [_sample(20.0, kv=0.3e8)]
    loss = {"kl_mean": kl, "violations": 0, "heads": 9, "positions": 3, "certificate_ratio": 1.1}
    full, part = [_sample(dense, kv=15e8)], [_sample(pruned, kv=6e8, certificate=0.04)]
    rows = [_row("ours dense", full, base=base), _row("vllm", [_sample(vllm, kv=15e8)], base=base)]
    rows.append(_row("ours theta 0.05", part, dense=full, base=base, loss=loss, theta_nats=0.05))
    return rows + [_row(name, base, (8, 128)) for name in ("ours dense", "vllm")]


@given(st.floats(10, 300), st.floats(10, 300), st.floats(10, 300))
def test_ratios_are_step_times_the_right_way_round(dense: float, pruned: float, vllm: float) -> None:
    found = {
        (r["engine"], r["over"]): r["speedup"]
        for r in ratios_of(_rows(dense, pruned, vllm, 0.001))
        if r["context"] == 8000
    }
    assert found == pytest.approx(
        {("ours dense", "vllm"): vllm / dense, ("ours theta 0.05", "ours dense"): dense / pruned,
         ("ours theta 0.05", "vllm"): vllm / pruned}
    )  # fmt: skip


@given(st.lists(st.tuples(st.floats(10, 300), st.floats(10, 300), st.booleans()), min_size=1, max_size=6))
def test_a_speedup_compares_what_ran_in_the_same_round(rounds: list[tuple[float, float, bool]]) -> None:
    """Were medians compared, one engine's undisturbed rounds would meet other rounds of the other."""
    slow = _row("ours dense", [_sample(ms, foreign=busy) for ms, _, busy in rounds])
    fast = _row("ours theta 0.05", [_sample(ms) for _, ms, _ in rounds], theta_nats=0.05)
    (found,) = (r for r in ratios_of([slow, fast]) if r["over"] == "ours dense")
    assert found["speedup"] == pytest.approx(statistics.median(a / b for a, b, _ in rounds))
    assert found["low"] <= found["speedup"] <= found["high"]


def test_targets_are_those_of_the_issue() -> None:
    met = {t["target"]: t["met"] for t in targets_of(_rows(100.0, 50.0, 110.0, 0.001))}
    assert all(met.values())
    assert len(met) == 10
    missed = {t["target"]: t["met"] for t in targets_of(_rows(120.0, 90.0, 110.0, 0.002))}
    assert missed == met | {name: False for name in met if "over" in name and "8,000" in name} | {
        "its mean KL, nats": False,
        "its attention, GB/s of bytes read": False,
        "dense attention, GB/s of bytes read": False,
    } | {t["target"]: t["met"] for t in targets_of(_rows(120.0, 90.0, 110.0, 0.002)) if "GB/s" in t["target"]}
    part = _rows(100.0, 50.0, 110.0, 0.001)
    assert targets_of([row for row in part if row.context == 128])[0]["target"].startswith("dense step over vllm's")
    assert not any("128" in t["target"] or "GB/s" in t["target"] for t in targets_of(part[:3]))
    assert targets_of([]) == targets_of([dataclasses.replace(row, batch=4) for row in part]) == []


@pytest.mark.parametrize(
    ("speedup", "expected"), [([1.1, 1.2], 100.0), ([0.9, 0.8], None), ([0.9, 1.1], math.sqrt(100 * 400))]
)
def test_the_crossing_is_interpolated_in_the_logarithm(speedup: list[float], expected: float | None) -> None:
    assert bench._crossing([100, 400], speedup) == (None if expected is None else pytest.approx(expected))


def test_a_single_win_before_a_loss_is_no_crossing() -> None:
    assert bench._crossing([100, 200, 400], [1.2, 0.5, 1.5]) == pytest.approx(200 * 2**0.5)


# -- the machine ------------------------------------------------------------------------------------------------------


def test_read_bandwidth_reads_every_word() -> None:
    assert machine.read_bandwidth(megabytes=1, threads=3, repeats=1) > 0  # it checks the sum itself
    assert machine.read_bandwidth(megabytes=1, threads=1, repeats=1) > 0


def test_process_time_of_this_process_is_known() -> None:
    sum(range(2_000_000))
    assert machine.process_s(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.1)
    assert math.isnan(machine.process_s(2**30))


# -- peers ------------------------------------------------------------------------------------------------------------

_PEER = """
import sys
sys.path.insert(0, {here!r})
from protocol import answers, serve
stream = answers()
print("chatter of the engine")
def measure(batch, context, steps, warmup):
    if context > 100:
        raise ValueError("too long")
    print("more chatter")
    return [float(batch)] * (steps if context > 10 else 1)
serve(stream, {{"engine": "toy", "version": "1", "weight_bytes": 5, "kv_token_bytes": 7}}, measure)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    """A peer run by this interpreter that obeys the protocol."""
    script = tmp_path / "toy.py"
    script.write_text(_PEER.format(here=str(Path(launch.__file__).parent)))
    with launch.Peer("toy", Path(sys.executable), str(script), []) as peer:
        yield peer


def test_a_peer_is_frozen_except_while_it_measures(toy: launch.Peer) -> None:
    state = lambda: Path(f"/proc/{toy._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]  # noqa: E731
    assert toy.greeting == {"engine": "toy", "version": "1", "weight_bytes": 5, "kv_token_bytes": 7}
    for batch in (1, 8):
        times, cores = toy.measure(batch, 50, 4, 2)
        assert times == [float(batch)] * 4
        assert cores >= 0
        os.waitid(os.P_PID, toy._process.pid, os.WSTOPPED | os.WNOWAIT)
        assert state() == "T"


def test_a_failing_measurement_is_reported_and_the_peer_lives(toy: launch.Peer) -> None:
    with pytest.raises(launch.PeerError, match="too long"):
        toy.measure(1, 1000, 4, 2)
    with pytest.raises(launch.PeerError, match="1 decode steps of 4"):
        toy.measure(1, 5, 4, 2)
    assert toy.measure(2, 50, 4, 2)[0] == [2.0] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_frozen_peer_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    toy_script, parent = tmp_path / "toy.py", tmp_path / "parent.py"
    toy_script.write_text(_PEER.format(here=str(Path(launch.__file__).parent)))
    parent.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom backends.peers.launch import Peer\n"
        f"peer = Peer('toy', Path(sys.executable), {str(toy_script)!r}, [])\n"
        "print(peer._process.pid, flush=True)\nos._exit(9)\n"
    )
    done = subprocess.run([sys.executable, parent], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 9, done.stderr
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(200):  # the kernel kills it at once; whoever adopts it may be slow to bury it
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return
        time.sleep(0.05)
    pytest.fail("the peer still runs")


def test_a_peer_that_dies_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "dead.py"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(launch.PeerError, match="no such model"):
        launch.Peer("toy", Path(sys.executable), str(script), [])


def test_peers_are_found_where_they_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    assert launch.find_peers(tmp_path / "env") == launch.find_peers(python) == python
    monkeypatch.setenv("ENTROPIC_PEERS", str(tmp_path / "env"))
    assert launch.find_peers() == python
    assert not launch.installed(python, "vllm")
    package = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert launch.installed(python, "vllm")
    assert launch.gguf_of(python) is None


def test_a_peer_that_fails_leaves_the_others_in_the_table(model: LoadedModel, filled: FilledCache) -> None:
    def fails(_batch: int, _filled: FilledCache) -> Sample:
        raise launch.PeerError("out of memory")

    bad = Arm("vllm", fails, 1)
    good = Arm("ours dense", lambda _batch, _filled: _sample(1.0), 1)
    for _ in range(2):
        run_round([bad, good], 2, filled, machine.SpeedProbe(every_s=0.0), lambda _: None, "")
    assert bad.failed == "out of memory"
    assert (len(bad.samples), len(good.samples[2, CONTEXT])) == (0, 2)
    assert np.isfinite(good.samples[2, CONTEXT][0].probe_s)


@pytest.mark.parametrize(("said", "why"), [("hello", "no JSON object"), ("{}", "kv_token_bytes"), ("[]", "no JSON")])
def test_a_peer_that_does_not_speak_the_protocol_is_no_peer(tmp_path: Path, said: str, why: str) -> None:
    script = tmp_path / "odd.py"
    script.write_text(f"print({said!r})")
    with pytest.raises(launch.PeerError, match=why):
        launch.Peer("toy", Path(sys.executable), str(script), [])


def test_sizes_of_the_command_are_checked_before_work() -> None:
    assert parse_thetas("0.05,0.05,0.02") == [0.05, 0.02]
    assert entropic("bench", "decode", "--no-peers", "--page-tokens", 5000, "--model", "none")[2].count("1024") == 1
