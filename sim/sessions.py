"""Sessions: conversations whose every prompt is the whole conversation so far plus a new message.

A session starts at an arrival of ``session_arrivals``. Its first prompt is ``shared_tokens`` (a system prompt, the same
in every session) and a message of mean ``prompt_tokens``. Each further request comes an exponential think time (mean
``think_s``) after the previous one *left* (was served, or refused); its prompt is the previous prompt, the previous
reply and a message of mean ``message_tokens``. Messages are log-normal with ``prompt_cv``, replies have exactly their
drawn length (mean ``output_tokens``): what is said does not depend on who is served when, so two runs that differ in
one law hold the same conversations. (A reply cut short by the KV capacity still counts in full in the next prompt,
which is refused for its length in any case.)

The number of requests per session is geometric or fixed, of mean ``turns``; the session that passes ``n_requests`` is
cut there. ``Request.client`` is the session. Randomness: streams ``arrivals``, ``lengths``, ``messages``,
``session-turns`` and ``think``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.signals import FloatArray, IntArray
from sim.arrival_processes import arrival_times
from sim.lengths import lognormal_lengths, turn_counts
from sim.streams import stream

__all__ = ["Sessions", "draw_sessions"]


@dataclass(frozen=True)
class Sessions:
    """Drawn sessions, request by request: all of session 0 in order, then all of session 1, ...

    Parameters
    ----------
    arrival_s : FloatArray, shape (N,)
        First requests: arrival time; later ones: think time after the previous one left.
    follows : IntArray, shape (N,)
        The request before it in its session, or -1.
    session, prompt_tokens, limit_tokens : IntArray, shape (N,)
    """

    arrival_s: FloatArray
    follows: IntArray
    session: IntArray
    prompt_tokens: IntArray
    limit_tokens: IntArray


def draw_sessions(config: WorkloadConfig, seed: int) -> Sessions:
    """Draw ``config.n_requests`` requests in sessions.

    Parameters
    ----------
    config : WorkloadConfig
    seed : int
        Root seed.
    """
    n = config.n_requests
    ends = np.cumsum(turn_counts(stream(seed, "session-turns"), n, config.turns, config.turns_law))
    sessions = int(np.searchsorted(ends, n)) + 1
    begins = np.concatenate([[0], ends[: sessions - 1]])
    session = np.repeat(np.arange(sessions), np.diff(np.append(begins, n)))
    first = np.zeros(n, np.bool_)
    first[begins] = True
    arrival_s = stream(seed, "think").standard_exponential(n) * config.think_s
    arrival_s[begins] = arrival_times(config, sessions, seed)
    lengths = stream(seed, "lengths")
    opening = config.shared_tokens + lognormal_lengths(lengths, n, config.prompt_tokens, config.prompt_cv)
    reply = lognormal_lengths(lengths, n, config.output_tokens, config.output_cv)
    message = lognormal_lengths(stream(seed, "messages"), n, config.message_tokens, config.prompt_cv)
    grown = np.cumsum(np.where(first, opening, message + np.concatenate([[0], reply[:-1]])))
    before = np.where(begins > 0, grown[begins - 1], 0)
    return Sessions(arrival_s, np.where(first, -1, np.arange(n) - 1), session, grown - before[session], reply)
