"""Where runs are carried out: in this process, in worker processes, or on a Dask cluster.

Each pool has one method, ``each(tasks)``, which yields ``(task, result)`` in the order of completion; the result is
what the pool's function returned, or a :class:`Crash` if the process that ran it died. Pools hold one task per worker
at a time and ask the task iterator only then, so preparing tasks overlaps with running them.

Workers are fresh interpreters (``spawn``) restricted to one thread each, so that W workers use W cores. They ignore
Ctrl-C (the parent stops them), are replaced when they die, and end by themselves when the parent is killed: their pipe
closes. A standard-library executor cannot say *which* task killed a worker, hence the few lines of our own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self

from entropic_ctl.errors import BadInputError

__all__ = ["Cluster", "Crash", "Inline", "Pool", "Processes", "cores", "make"]

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Crash:
    """The worker that had the task died; ``how`` says what is known (exit status or signal)."""

    how: str


class Pool(Protocol):
    """What carries out tasks."""

    def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result or Crash) in the order of completion."""
        ...

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop at once; what runs is lost."""
        ...


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def make(function: Function, *, workers: int, dask: str | None = None) -> Pool:
    """Return the pool for the given options.

    Parameters
    ----------
    function : callable
        Importable by name in another process; takes one task.
    workers : int
        Processes; 1 runs in this process. With ``dask="local"``, the size of the local cluster.
    dask : str, optional
        Address of a Dask scheduler (``tcp://host:port``), or ``local`` to start a cluster on this machine.

    Raises
    ------
    BadInputError
        If ``workers`` is below 1.
    """
    if workers < 1:
        raise BadInputError("out of range", where="--workers", value=workers, allowed=">= 1")
    if dask is not None:
        return Cluster(function, dask, workers)
    return Inline(function) if workers == 1 else Processes(function, workers)


class Inline:
    """Runs tasks one after the other in this process."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result), in the given order."""
        for task in tasks:
            yield task, self._function(task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def _serve(pipe: Connection, function: Function) -> None:
    """Answer tasks until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, Any] = True, function(task)
        except Exception:  # noqa: BLE001 - reported to the parent, which raises
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return


@contextmanager
def _one_thread() -> Iterator[None]:
    """Start processes under variables that hold numerical libraries to one thread."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Processes:
    """Worker processes of this machine (see the module)."""

    def __init__(self, function: Function, workers: int) -> None:
        self._function, self._workers = function, workers
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[Connection] = []
        self._process: dict[Connection, Any] = {}

    def _hire(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._function), daemon=True)
        with _one_thread():
            process.start()
        theirs.close()
        self._process[ours] = process
        self._idle.append(ours)

    def _bury(self, pipe: Connection) -> Crash:
        process = self._process.pop(pipe)
        process.join(10)
        pipe.close()
        code = process.exitcode
        if code is not None and code < 0:
            return Crash(f"killed by signal {signal.Signals(-code).name}")
        return Crash(f"exit status {code}")

    def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result or Crash) in the order of completion.

        Raises
        ------
        RuntimeError
            If the function raised; the worker's traceback is in the message.
        """
        source = iter(tasks)
        running: dict[Connection, Any] = {}
        waiting = True
        while waiting or running:
            while waiting and len(running) < self._workers:
                task = next(source, _END)
                if task is _END:
                    waiting = False
                    break
                if not self._idle:
                    self._hire()
                pipe = self._idle.pop()
                running[pipe] = task
                try:
                    pipe.send(task)
                except OSError:  # it died while idle or starting: found out below
                    continue
            for ready in wait(list(running)) if running else ():
                pipe = ready  # type: ignore[assignment]
                task = running.pop(pipe)
                try:
                    good, answer = pipe.recv()
                except (EOFError, OSError):
                    yield task, self._bury(pipe)
                    continue
                self._idle.append(pipe)
                if not good:
                    raise RuntimeError(f"a worker failed:\n{answer}")
                yield task, answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._process.values():
            process.terminate()
        for pipe, process in self._process.items():
            process.join(10)
            pipe.close()
        self._process.clear()
        self._idle.clear()


_END = object()


class Cluster:
    """A Dask cluster, by address or started here.

    Parameters
    ----------
    function : callable
    address : str
        ``tcp://host:port``, or ``local``.
    workers : int
        Size of a local cluster; processes of one thread each.
    """

    def __init__(self, function: Function, address: str, workers: int) -> None:
        self._function, self._address, self._workers = function, address, workers
        self._client: Any = None
        self._own: Any = None

    def __enter__(self) -> Self:
        try:
            import distributed
        except ImportError:
            raise BadInputError(
                "Dask is not installed", where="--dask", remedy="pip install 'entropic-ctl[sweep]'"
            ) from None
        try:
            if self._address == "local":
                self._own = distributed.LocalCluster(
                    n_workers=self._workers,
                    threads_per_worker=1,
                    processes=True,
                    dashboard_address=None,
                    silence_logs=40,
                )
            self._client = distributed.Client(self._own or self._address, timeout="10s", set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise BadInputError(
                f"no Dask scheduler: {str(error) or type(error).__name__}",
                where="--dask",
                value=self._address,
                allowed="local, or the address of a scheduler: tcp://host:port",
            ) from None
        return self

    def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result or Crash) in the order of completion; an exception of the function is raised."""
        import distributed

        task_of = {}
        futures = []
        for task in tasks:
            futures.append(self._client.submit(self._function, task, pure=False))
            task_of[futures[-1].key] = task
        for future in distributed.as_completed(futures, loop=self._client.loop):
            error = future.exception()
            if isinstance(error, distributed.KilledWorker):
                yield task_of[future.key], Crash("its Dask workers died")
            elif error is not None:
                raise error
            else:
                yield task_of[future.key], future.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._client is not None:
            self._client.close()
        if self._own is not None:
            self._own.close()
