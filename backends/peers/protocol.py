"""How a peer talks: one JSON object per line, commands on standard input, answers on standard output.

The first answer is the greeting: ``engine``, ``version``, ``weight_bytes``, ``kv_token_bytes``. A command is
``{"batch", "context", "steps", "warmup"}``; its answer holds ``step_ms``, one number per timed decode step, or
``error``. Whatever the engine itself prints goes to standard error. End of input ends the peer.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["answers", "serve"]


def answers() -> Any:
    """Return a stream for answers, and send everything else that is written to standard output to standard error.

    On Linux the peer also asks to be killed when its parent dies: frozen, it could not notice by itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def serve(stream: Any, greeting: dict[str, Any], measure: Callable[..., list[float]]) -> None:
    """Greet, then answer commands until the input ends.

    Parameters
    ----------
    stream : text file
        From :func:`answers`.
    greeting : dict
    measure : callable(batch, context, steps, warmup) -> list of float
        Durations of decode steps, milliseconds.
    """
    print(json.dumps(greeting), file=stream, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: dict[str, Any] = {"step_ms": measure(**command)}
        except Exception as error:  # noqa: BLE001 - an engine raises anything; the caller shows it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=stream, flush=True)
