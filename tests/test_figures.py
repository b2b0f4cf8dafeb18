from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_ctl.errors import BadInputError

pytest.importorskip("matplotlib")

from figures import ablation, generation, phase, pruning_cost, quality, style, workload
from paper_repro import claims, experiments

METRICS = {"latency": "latency (lower is better)", "throughput": "throughput (higher is better)"}


def tokens(n: int = 40, request: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    entropy = rng.gamma(2.0, 1.0, n)
    return {
        "id": np.full(n, request),
        "index": np.arange(n),
        "model_entropy": entropy,
        "tempered_entropy": 0.7 * entropy,
        "temperature": np.exp(rng.normal(0, 0.1, n)),
        "theta_nats": np.where(entropy > 2, 0.02, 0.03),
        "kept_fraction": rng.uniform(0.2, 1.0, n),
    }


def effects() -> dict[str, np.ndarray]:
    rows = [
        (world, arm, metric, 0.9, 0.8, 1.02)
        for world in ("simulation", "engine")
        for arm in claims.ARMS[1:]
        for metric in METRICS
    ]
    rows[0] = (*rows[0][:3], 1.5, np.nan, np.nan)
    rows[1] = (*rows[1][:3], np.nan, np.nan, np.nan)
    return dict(
        zip(("world", "arm", "metric", "ratio", "low", "high"), map(np.array, zip(*rows, strict=True)), strict=True)
    )


def trajectories() -> dict[str, np.ndarray]:
    rows = [
        ("a", start, step, u := 0.5 * start - 0.1 * step, np.exp(u), u + 2, u) for start in (0, 1) for step in range(9)
    ]
    names = ("arm", "start", "step", "u", "temperature", "entropy", "error")
    return dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))


def response() -> dict[str, np.ndarray]:
    rows = [(c, t, 1 / (1 + 20 * t), t, 2 * t, 0.9 * t, t * t) for c in (512.0, 4096.0) for t in (0.0, 0.01, 0.1)]
    names = ("context", "theta_nats", "kept", "certificate_mean", "certificate_max", "mass_mean", "kl")
    return dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))


def requests(n: int = 50) -> dict[str, np.ndarray]:
    times = np.cumsum(np.random.default_rng(1).exponential(2.0, n))
    return {"arrival_s": times, "prompt_tokens": np.arange(1, n + 1) ** 2, "output_limit": np.full(n, 64)}


def draw_all(folder: Path) -> list[Path]:
    paths = [folder / f"{name}.png" for name in ("generation", "ablation", "phase", "pruning", "workload")]
    generation.draw(tokens(), paths[0], target_nats=1.0)
    ablation.draw(effects(), claims.table(), paths[1], arms=claims.ARMS[1:], metrics=METRICS)
    phase.draw(trajectories(), paths[2], titles={"a": "k = 0.02 (certified)"}, target_nats=2.0)
    pruning_cost.draw(response(), paths[3])
    workload.draw(requests(), paths[4])
    return paths


def test_every_figure_is_a_png_and_leaves_no_half_file(tmp_path: Path) -> None:
    for path in draw_all(tmp_path):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert width >= 400
        assert height >= 300
    assert not list(tmp_path.glob("*.part"))


def test_f1_fifty_plots_without_a_display_leave_no_open_figures(tmp_path: Path) -> None:
    """F1: DISPLAY=localhost:64.0, 50 plots: files made, no open figures; pyplot (which would look for it) unused."""
    code = (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, 'tests')\n"
        "from test_figures import draw_all\nfrom figures import style\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "draw_all(folder)\n"
        "for i in range(45):\n"
        "    with style.canvas(folder / f'{i}.png', size=(2, 1.5)) as (_, axes):\n"
        "        axes[0].plot([0, 1], [1, i])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib.pyplot as plt\nassert plt.get_fignums() == []\n"
    )
    environment = {**os.environ, "DISPLAY": "localhost:64.0", "PYTHONPATH": "."}
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=root, timeout=300)
    assert len(list(tmp_path.glob("*.png"))) == 50


def test_drawing_a_table_from_disk_equals_drawing_it_from_memory(tmp_path: Path) -> None:
    results = pytest.importorskip("entropic_ctl.results")
    results.write_table(tmp_path / "response.parquet", response(), {})
    pruning_cost.draw(tmp_path / "response.parquet", tmp_path / "a.png")
    pruning_cost.draw(response(), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_drawn_request_is_the_one_asked_for(tmp_path: Path) -> None:
    two = {
        name: np.concatenate([a, b]) for (name, a), b in zip(tokens(40, 1).items(), tokens(9, 2).values(), strict=True)
    }
    generation.draw(two, tmp_path / "default.png")
    generation.draw(two, tmp_path / "one.png", request=1)
    generation.draw(two, tmp_path / "two.png", request=2)
    assert (tmp_path / "default.png").read_bytes() == (tmp_path / "one.png").read_bytes()
    assert (tmp_path / "default.png").read_bytes() != (tmp_path / "two.png").read_bytes()


def test_the_paper_is_drawn_hollow_and_never_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    seen: list[tuple[float, Any]] = []
    original = Axes.plot

    def spy(self: Axes, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and args[2] in ("D", "o", "s") and np.size(args[0]) == 1:
            seen.append((float(args[0]), kwargs.get("mfc")))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", spy)
    ablation.draw(effects(), claims.table(), tmp_path / "a.png", arms=("full loop",), metrics={"latency": "latency"})
    hollow = [value for value, face in seen if face == "none"]
    assert hollow == [0.70]
    assert [value for value, face in seen if face is None] == [0.9, 0.9]
    seen.clear()
    efficiency = {"dτ/d second": "per second", "dτ/d KV byte": "per byte"}
    ablation.draw(
        effects(), experiments.claims_by_metric(), tmp_path / "b.png", arms=("full loop",), metrics=efficiency
    )
    assert [value for value, face in seen if face == "none"] == [1.55, 1.55]  # one claim, in each currency


@pytest.mark.parametrize(
    ("draw", "table", "column"),
    [
        (generation.draw, tokens(), "theta_nats"),
        (pruning_cost.draw, response(), "kl"),
        (workload.draw, requests(), "prompt_tokens"),
        (lambda t, p: phase.draw(t, p, titles={"a": "a"}), trajectories(), "u"),
        (lambda t, p: ablation.draw(t, claims.table(), p, arms=("full loop",), metrics=METRICS), effects(), "low"),
    ],
)
def test_a_table_without_a_column_or_rows_is_refused(tmp_path: Path, draw: Any, table: Any, column: str) -> None:
    path = tmp_path / "x.png"
    with pytest.raises(BadInputError, match=f"{column}: column missing"):
        draw({k: v for k, v in table.items() if k != column}, path)
    with pytest.raises(BadInputError, match="no rows to draw"):
        draw({k: v[:0] for k, v in table.items()}, path)
    with pytest.raises(BadInputError, match="different lengths"):
        draw({k: v[:1] if k == column else v for k, v in table.items()}, path)
    assert not path.exists()


def test_an_error_while_drawing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), style.canvas(path):
        raise RuntimeError
    assert path.read_bytes() == b"old"


def test_workloads_that_start_at_one_moment_or_wait_for_others_can_be_drawn(tmp_path: Path) -> None:
    table = requests()
    for name, times in (("burst", np.zeros(50)), ("closed", np.where(np.arange(50) < 3, np.arange(50.0), np.nan))):
        workload.draw({**table, "arrival_s": times}, tmp_path / f"{name}.png")
    assert (tmp_path / "burst.png").read_bytes() != (tmp_path / "closed.png").read_bytes()


def test_quality_draws_the_tasks_there_are_and_names_a_missing_column(tmp_path: Path) -> None:
    rows = [("needle", "log_p", f"length {n}", arm, -1.0, -2.0, -0.5, d, d - 0.1, np.nan)
            for n in (256, 512) for arm, d in (("dense", 0.0), ("theta 0.1", -0.2))]  # fmt: skip
    summary = dict(zip(quality.NEEDS, map(np.array, zip(*rows, strict=True)), strict=True))
    quality.draw(summary, tmp_path / "q.png")
    assert (tmp_path / "q.png").stat().st_size > 5000
    del summary["low"]
    with pytest.raises(BadInputError, match="low: column missing"):
        quality.draw(summary, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
