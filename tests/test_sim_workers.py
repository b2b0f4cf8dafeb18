"""Pools: every task answered exactly once, crashes named, workers replaced, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from entropic_ctl.errors import BadInputError
from sim import workers
from sim.workers import Cluster, Crash, Inline, Processes

ROOT = Path(__file__).resolve().parents[1]


def work(task: object) -> object:
    if task == "die":
        os._exit(7)
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "raise":
        raise ValueError("a bug")
    if task == "threads":
        return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
    return os.getpid(), task


def test_every_task_once_on_at_most_that_many_processes() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    with Processes(work, 2) as pool:
        answers = list(pool.each(range(20)))
        assert sorted(task for task, _ in answers) == list(range(20))
        assert all(answer[1] == task for task, answer in answers)
        pids = {answer[0] for _, answer in answers}
        assert 1 <= len(pids) <= 2
        assert os.getpid() not in pids
        (only,) = pool.each(["threads"])  # a pool is used again, and holds libraries to one thread
        assert set(only[1].values()) == {"1"}
        died = dict(pool.each(["die", "killed", 1, 2]))
        assert died["die"] == Crash("exit status 7")
        assert died["killed"] == Crash("killed by signal SIGKILL")
        assert died[1][1] == 1
        with pytest.raises(RuntimeError, match="a bug"):
            list(pool.each(["raise"]))
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_tasks_are_asked_for_only_when_a_worker_is_free() -> None:
    asked = []

    def tasks() -> Iterator[int]:
        for i in range(6):
            asked.append(i)
            yield i

    with Processes(work, 1) as pool:
        for n, _ in enumerate(pool.each(tasks()), start=1):
            assert len(asked) <= n + 1


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "if __name__ == '__main__':\n"
        "    import test_sim_workers as t\n"
        "    pool = t.Processes(t.work, 1).__enter__()\n"
        "    for _, answer in pool.each([1]):\n"
        "        print(answer[0], flush=True)\n"
        "    import time; time.sleep(60)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(500):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the worker outlived its parent")


def test_choices() -> None:
    assert isinstance(workers.make(work, workers=1), Inline)
    assert isinstance(workers.make(work, workers=2), Processes)
    assert [task for task, _ in Inline(work).each(["a", "b"])] == ["a", "b"]
    with pytest.raises(BadInputError, match="--workers"):
        workers.make(work, workers=0)
    with pytest.raises(BadInputError, match="--dask"), Cluster(work, "nonsense", 1):
        pass
