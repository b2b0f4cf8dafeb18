"""Turn tokens into text as they come: no broken characters, no half stop string shown.

Two rules, both exact: what has been emitted is always a prefix of the final text, and all deltas together equal the
decoding of all tokens (cut before the first stop string, if one appears). One exception to the second: a byte-fallback
decoder turns a whole run of byte tokens into U+FFFD if any of it is broken; characters that are out then stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopStrings", "TextStream"]

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"


class Detokenizer:
    """Decode incrementally, holding back a trailing incomplete character.

    A window of recent tokens is decoded instead of the whole text. It starts with tokens whose text is already out,
    because some tokenizers drop a leading space; it moves on only where the text ends in a whole character.

    Parameters
    ----------
    decode : callable(list of int) -> str
        The tokenizer's decoder, special tokens skipped.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text is out

    def push(self, token: int) -> str:
        """Add one token and return the text that is now certain."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            return ""
        delta = self._fresh(text)
        if delta:
            del self._window[: self._shown]
            self._shown = len(self._window)
        return delta

    def flush(self) -> str:
        """Return what is still held back; an incomplete character comes out as U+FFFD."""
        delta = self._fresh(self._decode(self._window))
        self._shown = len(self._window)
        return delta

    def _fresh(self, text: str) -> str:
        """Return the part of the window's text that is not out yet."""
        out = self._decode(self._window[: self._shown])
        return text[len(out) :] if text.startswith(out) else self._decode(self._window[self._shown :])


class StopStrings:
    """Cut a text before the first stop string, holding back whatever might become one.

    Parameters
    ----------
    stop : sequence of str
        Non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return (text that is now certain, True if a stop string was met)."""
        held = self._held + text
        hits = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self._held = ""
            return held[: min(hits)], True
        keep = max((self._overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0


class TextStream:
    """Detokenizer and stop strings of one request, with the text emitted so far."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._tokens = Detokenizer(decode)
        self._stops = StopStrings(stop)
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token and return the new text; ``stopped`` tells whether a stop string was met."""
        return self._emit(self._tokens.push(token))

    def finish(self) -> str:
        """End the text (end of sequence, length, cancellation) and return what was held back."""
        if self.stopped:
            return ""
        delta = self._emit(self._tokens.flush())
        if not self.stopped:
            rest = self._stops.flush()
            self.text += rest
            delta += rest
        return delta

    def _emit(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        delta, self.stopped = self._stops.push(text)
        self.text += delta
        return delta
