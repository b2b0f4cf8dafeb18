"""The ``[workload]`` table: who arrives, when, and how much they ask for.

One flat table serves every kind of workload. Which keys a kind reads is written down in ``READ_BY``: a key that only
other kinds read is an error in a file (it would be ignored, and somebody would wonder why), unless it says its default.
Programs that replace fields of a parsed configuration may leave such keys behind; they are ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError

__all__ = ["READ_BY", "TRACE_FORMATS", "WorkloadConfig"]

TRACE_FORMATS = ("azure", "burstgpt", "mooncake", "vidur", "parquet")
"""Formats of recorded traces, each a kind of its own; the kind ``trace`` detects the format."""

_PROCESSES = ("burst", "poisson", "gamma", "mmpp", "diurnal")
_DRAWN = (*_PROCESSES, "closed", "sessions")
_RECORDED = ("trace", *TRACE_FORMATS)

READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("n_requests", "prompt_tokens", "prompt_cv", "output_tokens", "output_cv"), _DRAWN),
    "rate_per_s": ("poisson", "gamma"),
    "rate_scale": ("poisson", "gamma", "mmpp", "diurnal", *_RECORDED),
    "arrival_cv": ("gamma",),
    "rates_per_s": ("mmpp", "diurnal"),
    "dwell_s": ("mmpp",),
    "period_s": ("diurnal",),
    "users": ("closed",),
    "think_s": ("closed", "sessions"),
    **dict.fromkeys(("session_arrivals", "turns", "turns_law", "message_tokens", "shared_tokens"), ("sessions",)),
    **dict.fromkeys(("trace", "trace_rows", "trace_repeat", "window_start_s", "window_s"), _RECORDED),
}
"""Key -> kinds that read it; keys not listed are read by every kind. Sessions also read what their arrivals read."""


@dataclass(frozen=True)
class WorkloadConfig:
    """Who arrives, when, and how much they ask for (see :mod:`sim.arrivals` for the laws and their means)."""

    kind: str = fields.choice("burst", (*_DRAWN, *_RECORDED), "arrival process, or format of a recorded trace")
    n_requests: int = fields.integer(64, 1, 10**8, "requests to generate (a trace has its own number)")
    rate_per_s: float = fields.number(1.0, 0.0, 1e6, "poisson, gamma: mean arrivals per second", open_lo=True)
    rate_scale: float = fields.number(
        1.0, 0.0, 1e6, "traces and open processes: factor on the arrival rate", open_lo=True
    )
    arrival_cv: float = fields.number(1.0, 0.0, 10.0, "gamma: coefficient of variation of the gaps; 0 is regular")
    rates_per_s: tuple[float, ...] = fields.numbers(
        (), 0.0, 1e6, "mmpp: rate in each state; diurnal: rate in each of equal slices of the period"
    )
    dwell_s: tuple[float, ...] = fields.numbers((), 0.0, 1e9, "mmpp: mean time in each state", open_lo=True)
    period_s: float = fields.number(86_400.0, 0.0, 1e9, "diurnal: length of the period", open_lo=True)
    users: int = fields.integer(8, 1, 10**6, "closed: concurrent users")
    think_s: float = fields.number(0.0, 0.0, 1e6, "closed, sessions: mean think time, exponential")
    session_arrivals: str = fields.choice("poisson", _PROCESSES, "sessions: process by which sessions start")
    turns: float = fields.number(4.0, 1.0, 1e4, "sessions: mean requests per session")
    turns_law: str = fields.choice("geometric", ("geometric", "fixed"), "sessions: law of the requests per session")
    message_tokens: float = fields.number(32.0, 1.0, 1e6, "sessions: mean length of a later message (log-normal)")
    shared_tokens: int = fields.integer(0, 0, 10**6, "sessions: tokens with which every session begins")
    prompt_tokens: float = fields.number(128.0, 1.0, 1e6, "mean prompt length (log-normal); sessions: first message")
    prompt_cv: float = fields.number(0.5, 0.0, 10.0, "coefficient of variation of the prompt length; 0 is constant")
    output_tokens: float = fields.number(64.0, 1.0, 1e6, "mean limit on output tokens (log-normal)")
    output_cv: float = fields.number(0.0, 0.0, 10.0, "coefficient of variation of the output limit; 0 is constant")
    output_length: str = fields.choice(
        "auto",
        ("auto", "bank", "limit"),
        "bank: the recorded end of text ends a request; limit: only its limit does; auto: limit for traces and "
        "sessions, else bank",
    )
    length_prediction: str = fields.choice(
        "noisy",
        ("noisy", "exact", "none"),
        "what schedulers are told of a request's output length: the true one times a random factor, itself, or nothing",
    )
    length_error: float = fields.number(
        0.5, 0.0, 10.0, "noisy: standard deviation of ln(predicted / true), log-normal with median 1"
    )
    trace: str = fields.text("", "traces: path of the file")
    trace_rows: int = fields.integer(0, 0, 10**8, "traces: use the first rows only; 0 is all of them")
    trace_repeat: int = fields.integer(1, 1, 10**6, "traces: play it so many times, end to end")
    window_start_s: float = fields.number(0.0, 0.0, 1e9, "traces: leave out what was recorded before")
    window_s: float = fields.number(0.0, 0.0, 1e9, "traces: length of the part to play, recorded time; 0 is the rest")

    def __post_init__(self) -> None:
        fields.check(self)
        if self.replays and not self.trace:
            raise BadInputError(
                f"a workload of kind {self.kind!r} needs a trace", field="trace", remedy="set trace = 'FILE'"
            )
        if self.process in ("mmpp", "diurnal"):
            self._check_rates()
        if self.kind == "sessions":
            if self.turns_law == "fixed" and not self.turns.is_integer():
                raise BadInputError(
                    "a fixed number of turns is whole", field="turns", value=self.turns, allowed="1, 2, 3, ..."
                )
            if self.output_length == "bank":
                raise BadInputError(
                    "the next prompt of a session holds the reply, so its length must be known beforehand",
                    field="output_length",
                    value=self.output_length,
                    allowed="auto, limit",
                )

    def _check_rates(self) -> None:
        """Enforce what the lists of numbers must satisfy together."""
        least = 2 if self.process == "mmpp" else 1
        if len(self.rates_per_s) < least:
            raise BadInputError(
                "too few rates",
                field="rates_per_s",
                value=list(self.rates_per_s),
                allowed=f"at least {least} numbers",
                remedy="one rate per state" if least == 2 else "one rate per slice of the period",
            )
        if not any(self.rates_per_s):
            raise BadInputError(
                "nobody would ever arrive",
                field="rates_per_s",
                value=list(self.rates_per_s),
                allowed="one of them positive",
            )
        if self.process == "mmpp" and len(self.dwell_s) != len(self.rates_per_s):
            raise BadInputError(
                "one mean time per state is needed",
                field="dwell_s",
                value=list(self.dwell_s),
                allowed=f"{len(self.rates_per_s)} numbers, as in rates_per_s",
            )

    @property
    def replays(self) -> bool:
        """True if arrivals and lengths come from a recorded trace."""
        return self.kind in _RECORDED

    @property
    def process(self) -> str:
        """The process by which requests (of sessions: sessions) arrive: ``kind``, or ``session_arrivals``."""
        return self.session_arrivals if self.kind == "sessions" else self.kind

    @property
    def open(self) -> bool:
        """True if arrivals do not depend on when requests are served."""
        return self.kind not in ("closed", "sessions")

    @property
    def runs_to_limit(self) -> bool:
        """True if a request ends at its output limit only, never where the recorded text ended."""
        return self.output_length == "limit" or (
            self.output_length == "auto" and (self.replays or self.kind == "sessions")
        )

    @property
    def mean_rate_per_s(self) -> float | None:
        """Mean arrivals per second (of sessions: sessions); None for bursts, closed loops and traces."""
        if self.process in ("poisson", "gamma"):
            return self.rate_per_s * self.rate_scale
        if self.process == "mmpp":
            weighted = sum(r * d for r, d in zip(self.rates_per_s, self.dwell_s, strict=True))
            return self.rate_scale * weighted / sum(self.dwell_s)
        if self.process == "diurnal":
            return self.rate_scale * sum(self.rates_per_s) / len(self.rates_per_s)
        return None

    def unread(self) -> tuple[str, ...]:
        """Return the keys that differ from their default although this kind does not read them."""
        kinds = {self.kind, self.process}
        return tuple(
            item.name
            for item in dataclasses.fields(self)
            if kinds.isdisjoint(READ_BY.get(item.name, kinds)) and getattr(self, item.name) != item.default
        )

    def replaying(self, trace: str | Path) -> WorkloadConfig:
        """Return the workload that plays ``trace``, whatever its format.

        Keys that no trace reads return to their defaults.
        """
        other = {
            item.name: item.default
            for item in dataclasses.fields(self)
            if "trace" not in READ_BY.get(item.name, ("trace",))
        }
        changes: dict[str, Any] = {**other, "kind": "trace", "trace": str(trace)}
        return dataclasses.replace(self, **changes)
