"""A run as a timeline that https://ui.perfetto.dev draws: Chrome trace events, the same from simulator and engine.

One process per replica. Its tracks (threads):

- *iterations*: a span per iteration, with its rows and tokens;
- *arrivals* and *departures*: an instant per request that enters, and per one that leaves, with the reason;
- *slot i*: the request that holds slot i, as consecutive spans ``prefill``, ``decode``, ``recompute`` (prefill of a
  request that has had a token: after preemption), ``paused`` (pages kept) and ``preempted`` (pages freed). Each span
  carries the tokens computed and accepted in it; a preemption is also an instant;
- *queued*: an asynchronous span per request from arrival until it first runs, or leaves without running;
- counters ``live``, ``queue`` (live without a seat), ``kv_pages``, ``entropy_nats``, ``temperature`` (means over the
  step's tokens) and ``theta_nats`` (mean over its decode rows).

A request's spans touch: together they last from its arrival until it left. Spans of one slot that continue across
iterations are one event, so the size of a trace goes with iterations and changes, not with tokens. Times are in
microseconds. Memory is bounded by the requests in the system; the file by ``seconds`` and ``max_events``, after which
the open spans are closed and nothing more is written.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from entropic_ctl import results
from entropic_ctl.collectors import Collector
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, Request, StepPlan, StepResult

__all__ = ["ARRIVALS", "DEPARTURES", "FIRST_SLOT", "ITERATIONS", "PHASES", "PerfettoFile", "PerfettoTrack"]

ITERATIONS, ARRIVALS, DEPARTURES, FIRST_SLOT = 1, 2, 3, 10
"""Thread ids; slot i has FIRST_SLOT + i."""

PHASES = ("", "prefill", "decode", "recompute", "paused", "preempted")
"""Names of a slot's spans by code."""

_NONE, _PREFILL, _DECODE, _RECOMPUTE, _PAUSED, _PREEMPTED = range(6)


class _DropError(Exception):
    """Ends the writing of a file that is not to appear."""


class PerfettoFile:
    """A trace file under construction; it appears under its name when it is complete, or not at all.

    Parameters
    ----------
    path : Path
        File to write (JSON).
    seconds : float, optional
        Keep the first seconds of the run only.
    max_events : int
        Most events, about 130 bytes each; spans that are open when it is reached are closed beyond it.

    Raises
    ------
    BadInputError
        If ``seconds`` or ``max_events`` is not positive.

    Notes
    -----
    Used as a context manager. Leaving it by an interrupt keeps what there is; by another exception, nothing. Links and
    devices are treated as :func:`entropic_ctl.results.atomic` treats them.
    """

    def __init__(self, path: Path, *, seconds: float | None = None, max_events: int = 1_000_000) -> None:
        if seconds is not None and not seconds > 0:
            raise BadInputError("not a duration", field="seconds", value=seconds, allowed="> 0")
        if max_events < 1:
            raise BadInputError("not a number of events", field="max_events", value=max_events, allowed=">= 1")
        self.path, self.until_s, self.max_events = path, math.inf if seconds is None else float(seconds), max_events
        self.events = 0
        self._file: IO[str] | None = None
        self._open = contextlib.ExitStack()
        self._tracks: dict[int, PerfettoTrack] = {}

    def __enter__(self) -> PerfettoFile:
        with contextlib.ExitStack() as stack:
            part = stack.enter_context(results.atomic(self.path))
            self._file = stack.enter_context(part.open("w", encoding="utf-8"))
            self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if kind is None or issubclass(kind, KeyboardInterrupt):
            with self._open:
                for track in self._tracks.values():
                    track.close()
                stop_s = min((track.stopped_s for track in self._tracks.values()), default=math.inf)
                note = {"truncated_at_s": stop_s} if math.isfinite(stop_s) else {}
                self._file.write(f'\n],"otherData":{json.dumps(note)}}}\n')
        else:  # the error of the block is what counts, not that the rest of the file could not be written either
            with contextlib.suppress(_DropError, OSError, BadInputError), self._open:
                raise _DropError
        self._file = None

    def replica(self, index: int) -> PerfettoTrack:
        """Return the collector of one replica; the same one for the same index."""
        if index not in self._tracks:
            self._tracks[index] = PerfettoTrack(self, index)
        return self._tracks[index]

    @property
    def full(self) -> bool:
        """True when nothing but the ends of open spans may be added."""
        return self.events >= self.max_events

    def write(self, **event: Any) -> None:
        """Append one event.

        Raises
        ------
        BadInputError
            If the file is not open.
        """
        if self._file is None:
            raise BadInputError("the trace is not open", where="PerfettoFile", remedy="use it in a with statement")
        self._file.write((",\n" if self.events else "\n") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        self.events += 1


class PerfettoTrack(Collector):
    """The process of one replica in a trace.

    Parameters
    ----------
    file : PerfettoFile
    index : int
        Replica, from 0; its process id is one more.

    Attributes
    ----------
    stopped_s : float
        When the limits of the file ended the recording; infinite before.
    """

    def __init__(self, file: PerfettoFile, index: int) -> None:
        self._out, self._pid = file, index + 1
        self.stopped_s = math.inf
        self._end_s = self._departed_s = 0.0
        self._arrival_s: dict[int, float] = {}  # of requests that have not run
        self._slot: dict[int, int] = {}
        self._id: IntArray = np.full(64, -1, np.int64)  # by slot, as all that follow
        self._phase = np.zeros(64, np.int8)
        self._since_s: FloatArray = np.zeros(64)
        self._computed: IntArray = np.zeros(64, np.int64)
        self._accepted: IntArray = np.zeros(64, np.int64)
        self._started = np.zeros(64, np.bool_)  # has had a token
        self._named: set[int] = set()
        self._last: dict[str, float] = {}
        self._meta("process_name", ITERATIONS, name=f"replica {index}")
        for thread, name in ((ITERATIONS, "iterations"), (ARRIVALS, "arrivals"), (DEPARTURES, "departures")):
            self._meta("thread_name", thread, name=name)
            self._meta("thread_sort_index", thread, sort_index=thread)

    # -- events of the run ------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        """Mark an arrival; the request is queued from here."""
        if self._over(request.arrival_s):
            return
        self._arrival_s[request.id] = request.arrival_s
        args = {"request": request.id, "prompt_tokens": request.prompt_tokens, "max_new_tokens": request.max_new_tokens}
        self._instant(ARRIVALS, "arrival", request.arrival_s, args)

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """Mark a departure outside a step."""
        if now_s is None:
            now_s = self._arrival_s.get(finish.id, self._end_s)
        if not self._over(now_s):
            self._leave(finish, now_s)

    def cancelled(self, request_id: int, now_s: float) -> None:
        """Mark the cancelling of a request."""
        self.refused(Finish(request_id, FinishReason.CANCELLED), now_s)

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """Mark one iteration and whatever it changed."""
        start_s = result.start_s
        if self._over(start_s):
            return
        slots = plan.slots
        if slots.shape[0]:
            self._seat(plan, start_s)
        for ids, phase in ((plan.paused, _PAUSED), (plan.preempted, _PREEMPTED)):
            self._set_aside(ids, phase, start_s)
        self._computed[slots] += plan.n_tokens
        self._accept(plan, result)
        rows, tokens = plan.n_rows, int(result.token_ids.shape[0])
        if rows:
            args = {"rows": rows, "computed_tokens": int(plan.n_tokens.sum()), "output_tokens": tokens}
            self._span(ITERATIONS, "iteration", start_s, result.end_s, args)
        self._count(plan, result)
        self._end_s = result.end_s
        for finish in {f.id: f for f in (*plan.rejected, *finished)}.values():
            self._leave(finish, result.end_s)

    def close(self) -> None:
        """End the open spans: at the end of the last step, or where a limit stopped the recording."""
        at_s = min(self._end_s, self.stopped_s)
        for slot in np.flatnonzero(self._phase).tolist():
            self._turn(slot, _NONE, max(at_s, float(self._since_s[slot])))
        for request_id, arrival_s in self._arrival_s.items():
            self._queued(request_id, arrival_s, max(at_s, arrival_s))
        self._arrival_s.clear()

    # -- phases of the slots ----------------------------------------------------------------------------------------

    def _over(self, now_s: float) -> bool:
        """Return True if the recording has ended, and end it when a limit is reached."""
        if math.isfinite(self.stopped_s):
            return True
        if now_s < self._out.until_s and not self._out.full:
            return False
        self.stopped_s = min(now_s, self._out.until_s)
        self._end_s = max(self._end_s, self.stopped_s)
        self.close()
        self._slot.clear()
        return True

    def _unqueue(self, request_id: int, now_s: float) -> None:
        arrival_s = self._arrival_s.pop(request_id, None)
        if arrival_s is not None:
            self._queued(request_id, arrival_s, now_s)

    def _queued(self, request_id: int, arrival_s: float, end_s: float) -> None:
        common = {"cat": "queue", "id": request_id, "pid": self._pid, "tid": ARRIVALS, "name": "queued"}
        self._out.write(ph="b", ts=_us(arrival_s), **common, args={"request": request_id})
        self._out.write(ph="e", ts=_us(max(end_s, arrival_s)), **common)

    def _seat(self, plan: StepPlan, start_s: float) -> None:
        """Turn the slots of the plan's rows to what they do now."""
        slots = plan.slots
        self._reserve(int(slots.max()) + 1)
        for i in np.flatnonzero(self._id[slots] != plan.ids).tolist():
            slot, request_id = int(slots[i]), int(plan.ids[i])
            self._id[slot], self._slot[request_id] = request_id, slot
            self._started[slot] = False
            self._unqueue(request_id, start_s)
            self._name(slot)
        started = self._started[slots]
        decode = plan.samples & (plan.n_tokens == 1 + plan.n_draft) & started
        phase = np.where(decode, _DECODE, np.where(started, _RECOMPUTE, _PREFILL))
        for i in np.flatnonzero(phase != self._phase[slots]).tolist():
            self._turn(int(slots[i]), int(phase[i]), start_s)

    def _set_aside(self, ids: IntArray, phase: int, start_s: float) -> None:
        for request_id in ids.tolist():
            slot = self._slot.get(request_id)
            if slot is not None and self._phase[slot] != phase:
                self._turn(slot, phase, start_s)
                if phase == _PREEMPTED:
                    self._instant(FIRST_SLOT + slot, "preemption", start_s, {"request": request_id})

    def _accept(self, plan: StepPlan, result: StepResult) -> None:
        ids = result.token_ids
        if np.array_equal(ids, plan.ids[plan.samples]):
            slots = plan.slots[plan.samples]
            self._accepted[slots] += 1
        else:
            slots = np.array([self._slot[i] for i in ids.tolist()], np.int64)
            np.add.at(self._accepted, slots, 1)
        self._started[slots] = True

    def _turn(self, slot: int, phase: int, now_s: float) -> None:
        """End a slot's span and begin the next one."""
        old = int(self._phase[slot])
        if old != _NONE:
            args: dict[str, Any] = {"request": int(self._id[slot])}
            if old in (_PREFILL, _DECODE, _RECOMPUTE):
                args |= {"computed_tokens": int(self._computed[slot]), "output_tokens": int(self._accepted[slot])}
            self._span(FIRST_SLOT + slot, PHASES[old], float(self._since_s[slot]), now_s, args)
        self._phase[slot], self._since_s[slot] = phase, now_s
        self._computed[slot] = self._accepted[slot] = 0

    def _leave(self, finish: Finish, now_s: float) -> None:
        self._unqueue(finish.id, now_s)
        slot = self._slot.pop(finish.id, None)
        if slot is not None:
            self._turn(slot, _NONE, now_s)
            self._id[slot] = -1
        self._departed_s = max(self._departed_s, now_s)  # a refusal may bear an earlier time than a finish before it
        self._instant(DEPARTURES, str(finish.reason), self._departed_s, {"request": finish.id, "detail": finish.detail})

    def _reserve(self, slots: int) -> None:
        have = self._id.shape[0]
        if slots > have:
            extra = max(slots, 2 * have) - have
            self._id = np.concatenate([self._id, np.full(extra, -1, np.int64)])
            for name in ("_phase", "_since_s", "_computed", "_accepted", "_started"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(extra, column.dtype)]))

    # -- writing ----------------------------------------------------------------------------------------------------

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        """Write the counters that changed."""
        live = len(self._slot) + len(self._arrival_s)
        values = {"live": float(live), "queue": float(live - plan.n_rows), "kv_pages": float(plan.pages_used)}
        if result.token_ids.shape[0]:
            values["entropy_nats"] = float(result.model_entropy.mean())
            values["temperature"] = float(result.temperature.mean())
        decode = plan.samples & (plan.n_tokens == 1 + plan.n_draft)
        if decode.any():
            values["theta_nats"] = float(plan.theta_nats[decode].mean())
        for name, value in values.items():
            if math.isfinite(value) and self._last.get(name) != value:
                self._last[name] = value
                self._out.write(
                    ph="C", ts=_us(result.start_s), pid=self._pid, tid=ITERATIONS, name=name, args={"value": value}
                )

    def _name(self, slot: int) -> None:
        if slot not in self._named:
            self._named.add(slot)
            self._meta("thread_name", FIRST_SLOT + slot, name=f"slot {slot}")
            self._meta("thread_sort_index", FIRST_SLOT + slot, sort_index=FIRST_SLOT + slot)

    def _meta(self, what: str, thread: int, **args: Any) -> None:
        self._out.write(ph="M", ts=0, pid=self._pid, tid=thread, name=what, args=args)

    def _instant(self, thread: int, name: str, at_s: float, args: dict[str, Any]) -> None:
        self._out.write(ph="i", ts=_us(at_s), pid=self._pid, tid=thread, name=name, s="t", args=args)

    def _span(self, thread: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        start, end = _us(start_s), _us(max(start_s, end_s))
        self._out.write(
            ph="X", ts=start, dur=round(end - start, 3), pid=self._pid, tid=thread, name=name, cat="request", args=args
        )


def _us(seconds: float) -> float:
    """Return microseconds, to the nanosecond."""
    return round(1e6 * seconds, 3)
