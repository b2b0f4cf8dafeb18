"""The Triton kernels: tests under the interpreter, each file in a process of its own, and what the compiler says.

The interpreter is switched on by the environment before Triton is first imported, hence the processes. On a machine
with a GPU the same files also run compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

TESTS = Path(__file__).parent
ROWS = [(0, 160, 0.05), (1, 155, 0.0), (2, 145, 0.2)]  # place, tokens, theta
FILES = sorted(path.name for path in TESTS.glob("kernels_*.py"))


def run(file: str, *, interpreted: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS / file)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted.group(1)) > 5
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str) -> None:
    run(file, interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("file", FILES)
def test_on_the_gpu(file: str) -> None:
    run(file, interpreted=False)


def test_a14_the_package_imports_without_triton(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS.parent)!r})\n"
        "sys.modules['triton'] = None\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import backends.triton, backends.engine, backends.attention.forward\n"
        "assert 'pip install' in backends.triton.reason_unavailable()\n"
        "from backends.attention.reference import Scoring, attend\n"
        "import torch\n"
        "assert attend(torch.ones(1, 1, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4), Scoring(1.0)).out.sum() == 4\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def reports() -> list[object]:
    from backends.triton.aot import compile_all

    return compile_all()


def test_every_kernel_compiles_for_both_architectures_without_spills(reports: list[object]) -> None:
    from backends.triton.aot import ARCHITECTURES

    assert not [r for r in reports if r.spill_bytes]
    limit = {80: 163 << 10, 90: 227 << 10}  # shared memory a block may ask for
    assert all(0 < r.registers <= 255 and r.shared_bytes <= limit[r.architecture] for r in reports)
    assert {r.architecture for r in reports} == set(ARCHITECTURES)


def test_the_committed_table_is_of_these_kernels(reports: list[object]) -> None:
    import triton

    from backends.triton.aot import table

    head, *lines = (TESTS.parent / "backends/triton/kernels.txt").read_text(encoding="utf-8").splitlines()
    fresh = table(reports).splitlines()

    def names(rows: list[str]) -> list[list[str]]:
        return [re.split(r"\s{2,}", row)[:3] for row in rows]

    assert names(lines) == names(fresh), "run: make kernels-report"
    if f"triton {triton.__version__};" in head:
        assert lines == fresh, "run: make kernels-report"


def test_no_kernel_of_the_package_is_forgotten(reports: list[object]) -> None:
    from backends.triton.aot import ARCHITECTURES, kernels_of_package

    wanted = {(name.rpartition(".")[2].lstrip("_"), arch) for name in kernels_of_package() for arch in ARCHITECTURES}
    assert wanted
    assert {(r.kernel, r.architecture) for r in reports} == wanted


def test_nothing_between_scoring_and_attention_is_looked_at_by_the_host() -> None:
    """Tensors of the device "meta" have no values: reading one on the host would raise."""
    from backends.triton.cases import launches

    names = [launch.kernel.fn.__name__ for case, launch in launches() if case == "pruned, llama-8b page 16"]
    assert names == [
        "_score_keys",
        "_score",
        "_choose",
        "_compact",
        "_score",
        "_choose",
        "_compact",
        "_attend",
        "_merge",
    ]


def test_a_layer_of_the_engine_looks_at_nothing_on_the_host() -> None:
    """The whole attention of a mixed decode step on tensors without values: only the statistics may want one."""
    import numpy as np

    from backends.attention import PagedBatch
    from backends.attention.forward import paged_attention
    from backends.attention.rows import single_row_plan
    from backends.kv_cache import PagedKVCache
    from backends.triton.launch import recording
    from entropic_ctl.pruning.base import PruningConfig

    cache = PagedKVCache(2, 2, 64, 64, 16, torch.bfloat16, "meta", kernels="torch")
    cache.kernels = "triton"
    cache.sealed[:] = True
    rows = [single_row_plan(length - 1, 1, range(10 * r, 10 * r + 10), theta_nats=theta) for r, length, theta in ROWS]
    table = np.concatenate([plan.block_table for plan in rows])
    joined = {
        name: np.concatenate([getattr(plan, name) for plan in rows])
        for name in ("context", "n_tokens", "samples", "greedy", "theta_nats", "n_draft")
    }
    index = np.arange(len(rows))
    plan = rows[0]._replace(ids=index, slots=index, block_table=table, **joined)
    batch = PagedBatch.from_plan(plan, cache, PruningConfig(dense_layers=1))
    query, key = (torch.empty(1, heads, 3, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    seen = []
    for layer in range(2):
        module = torch.nn.Identity()
        module.layer_idx = layer
        with recording() as launches:
            paged_attention(module, query, key, key, None, paged=batch)
        seen.append([launch.kernel.fn.__name__ for launch in launches])
    dense = ["_attend", "_merge"]
    scored = ["_score_keys", "_score", "_choose", "_compact", "_score", "_choose", "_compact"]
    assert seen == [["_write", *dense], ["_write", *scored, *dense, *dense]]  # pruned rows, then the exact one
    assert [tuple(x.shape) for x in batch.pending[0].tensors] == [(2, 4), (2, 2), (2, 2)]
    with pytest.raises(NotImplementedError, match="meta"):
        batch.statistics()


def test_the_report_sees_spills() -> None:
    """A kernel made to spill must be reported as spilling, or the check above could not fail."""
    from backends.triton import aot

    body = "".join(f"ld.global.f64 %fd{i}, [%rd1+{8 * i}];\n" for i in range(1, 200))
    stores = "".join(f"st.global.f64 [%rd1+{8 * i}], %fd{200 - i};\n" for i in range(1, 200))
    ptx = (
        ".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry f(.param .u64 p)\n.maxntid 1024\n{\n"
        ".reg .b64 %rd<2>;\n.reg .f64 %fd<200>;\nld.param.u64 %rd1, [p];\n"
        f"{body}bar.sync 0;\n{stores}ret;\n}}\n"
    )
    registers, spills, _ = aot._ptxas_report(ptx, 80)
    assert registers == 64
    assert spills > 0


def test_gpu_check_runs_on_tiny_sizes_under_the_interpreter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backends.gpu_check", "--tiny", "--out", str(tmp_path)],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["failed"] == []
    assert result["attention against the reference"]["violations"] == 0
    assert {"dense_us", "pruned_us", "sdpa_us", "floor_us", "kept"} <= set(result["decode attention"][0])


def test_gpu_check_without_a_gpu_prints_the_floor_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from backends import gpu_check

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    said, complaint = capsys.readouterr()
    assert complaint.splitlines()[-1] == "gpu-check: nothing was checked: no CUDA device is visible to PyTorch"
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["failed"] == []
    assert "assumed kept 15%" in said
    row = next(row for row in gpu_check.floor_table() if (row["batch"], row["context"]) == (64, 32768))
    assert row["floor_us H200"] == pytest.approx(64 * 32768 * 4096 / 4.8e6)
    pages = 64 * 32768 // 16 * 8  # (page, KV head) pairs; 16 header, 384 weights and centres, 1,024 per plane
    assert row["pruned_mb"] == pytest.approx((pages * (1424 + 0.4 * 1024) + 0.15 * 64 * 32768 * 4096) / 1e6)


def test_gpu_demo_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from backends import gpu_demo

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_demo.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["gpu_check", "gpu_demo"])
def test_a_python_without_torch_gets_one_line(program: str) -> None:
    command = [sys.executable, "-S", "-m", f"backends.{program}"]  # -S: no site-packages
    done = subprocess.run(command, cwd=TESTS.parent, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "torch" in done.stderr


def test_gpu_check_reports_a_failing_part_and_goes_on() -> None:
    from backends.gpu_check import _Sections

    parts = _Sections()
    parts.run("bad", lambda: 1 / 0)
    assert parts.run("good", lambda: 7) == 7
    assert parts.failed == ["bad"]
    assert "ZeroDivisionError" in parts.results["bad"]["error"]


def test_gpu_demo_runs_both_loops_on_the_kernels(tmp_path: Path) -> None:
    few = ["--tiny", "--requests", "1", "--prompt-tokens", "200", "--new-tokens", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "backends.gpu_demo", *few],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    loops = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["loops"]
    assert set(loops) == {"baseline", "tuned"}
    assert all(row["kernels"] == "triton" and row["tokens_per_s"] > 0 for row in loops.values())
    assert loops["baseline"]["kept_fraction"] == 1.0
    assert loops["tuned"]["kv_gigabytes"] != loops["baseline"]["kv_gigabytes"]  # pages were scored
    assert loops["tuned"]["certificate_max_nats"] <= 0.05
