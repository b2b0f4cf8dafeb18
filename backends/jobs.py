"""One request inside the engine: its checks on the way in, its tokens and text, its output at the end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.models import LoadedModel
from backends.sampling import SamplingParams
from backends.text import TextStream
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Finish, FinishReason, Request

__all__ = ["Job", "OnText", "Output", "new_job", "prefix_hashes"]

OnText = Callable[[int, str], None]


@dataclass
class Output:
    """What became of one request; complete once ``finish`` is set.

    Parameters
    ----------
    id : int
    prompt_ids, token_ids : list of int
        The prompt, and what was generated (an end-of-text token included).
    text : str
        Generated text, cut before a stop string.
    arrival_s, first_token_s, end_s : float
        Engine clock; NaN until it happened.
    loss_nats, loss_max_nats : float
        What pruning cost it: the largest certified -ln(1 - m) of each step, summed, and the largest of all; see
        :mod:`entropic_ctl.pruning.accountant` for what the sum bounds.
    finish : Finish or None
    """

    id: int
    prompt_ids: list[int]
    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = float("nan")
    end_s: float = float("nan")
    finish: Finish | None = None
    loss_nats: float = 0.0
    loss_max_nats: float = 0.0


@dataclass
class Job:
    """A request that has not left yet.

    Parameters
    ----------
    request : Request
    params : SamplingParams
    known : list of int
        Prompt plus generated tokens.
    stream : TextStream or None
    output : Output
    draft : list of int
        Tokens that the current step verifies after the known ones.
    temperature : float
        Of the last token sampled; NaN before the first.
    """

    request: Request
    params: SamplingParams
    known: list[int]
    stream: TextStream | None
    output: Output
    draft: list[int] = field(default_factory=list)
    temperature: float = math.nan

    def tokens(self, context: int, count: int) -> list[int]:
        """Return ``count`` tokens from place ``context`` on, those of the draft (all of it, or none) included."""
        if not self.draft:
            return self.known[context : context + count]
        return self.known[context:] + self.draft

    def seen(self, ahead: int) -> list[int]:
        """Return the text that a penalty sees ``ahead`` drafted tokens past the known ones."""
        return self.known + self.draft[:ahead] if ahead else self.known

    def accept(self, token: int, now_s: float, eos_ids: frozenset[int], on_text: OnText | None) -> FinishReason | None:
        """Append a sampled token; return a reason if the text ends with it (end of text, stop string)."""
        output = self.output
        if not output.token_ids:
            output.first_token_s = now_s
        output.token_ids.append(token)
        self.known.append(token)
        if token in eos_ids:
            return FinishReason.EOS
        if self.stream is None:
            return None
        self._show(self.stream.push(token), on_text)
        return FinishReason.STOP if self.stream.stopped else None

    def charge(self, certificate: float) -> None:
        """Book the certified loss of one step, nats."""
        output = self.output
        output.loss_nats += certificate
        output.loss_max_nats = max(output.loss_max_nats, certificate)

    def leave(self, finish: Finish, now_s: float, on_text: OnText | None) -> None:
        """Complete the output, releasing text that was held back."""
        if self.stream is not None:
            self._show(self.stream.finish(), on_text)
        self.output.finish, self.output.end_s = finish, now_s

    def _show(self, delta: str, on_text: OnText | None) -> None:
        if self.stream is not None:
            self.output.text = self.stream.text
        if delta and on_text is not None:
            on_text(self.request.id, delta)


def new_job(
    model: LoadedModel,
    number: int,
    ids: list[int],
    params: SamplingParams,
    *,
    arrival_s: float,
    prefix_page: int,
    client: int = -1,
    expected_tokens: int = 0,
) -> Job:
    """Check a request and make its job.

    Parameters
    ----------
    model : LoadedModel
    number : int
        Its id.
    ids : list of int
        Prompt tokens.
    params : SamplingParams
    arrival_s : float
    prefix_page : int
        Page size when prefixes are cached, else 0.
    client, expected_tokens : int
        As in :class:`~entropic_ctl.signals.Request`.

    Raises
    ------
    BadInputError
        If the prompt is empty, a token lies outside the vocabulary, a number is below its least value, the arrival
        is not finite, or stop strings meet a model without tokenizer.
    """
    top = model.vocab_size - 1
    if not ids:
        raise BadInputError("empty prompt", where="submit", field="prompt", allowed="at least 1 token")
    for name, tokens in (("prompt", ids), ("allowed", params.allowed or ())):
        bad = next((token for token in tokens if not 0 <= token <= top), None)
        if bad is not None:
            raise BadInputError(
                "token outside the vocabulary", where="submit", field=name, value=bad, allowed=f"[0, {top}]"
            )
    if params.stop and model.tokenizer is None:
        raise BadInputError("the model has no tokenizer", where="submit", field="stop", value=params.stop)
    for name, value, least in (("client", client, -1), ("expected_tokens", expected_tokens, 0)):
        if value < least:
            raise BadInputError("out of range", where="submit", field=name, value=value, allowed=f">= {least}")
    if not math.isfinite(arrival_s):
        raise BadInputError("not a time", where="submit", field="arrival_s", value=arrival_s, allowed="finite")
    request = Request(
        id=number,
        arrival_s=arrival_s,
        prompt_tokens=len(ids),
        max_new_tokens=params.max_new_tokens,
        greedy=params.greedy,
        prefix_hashes=prefix_hashes(ids, prefix_page) if prefix_page else (),
        client=client,
        expected_tokens=expected_tokens,
    )
    stream = TextStream(model.decode, params.stop) if model.tokenizer is not None else None
    return Job(request, params, list(ids), stream, Output(number, ids, arrival_s))


def prefix_hashes(ids: Sequence[int], page_tokens: int) -> tuple[int, ...]:
    """Return a chained 63-bit hash of each full page of a prompt: equal only where everything before is equal too."""
    out, chain = [], b""
    for start in range(0, len(ids) - page_tokens + 1, page_tokens):
        page = np.asarray(ids[start : start + page_tokens], np.int64).tobytes()
        chain = hashlib.blake2b(chain + page, digest_size=16).digest()
        out.append(int.from_bytes(chain[:8], "little") >> 1)
    return tuple(out)
