"""Who begins like whom: chained hashes of full prompt pages, made when a request arrives.

Both classes are sequences over request ids whose items are ``Request.prefix_hashes``: one integer per *full* page of
the prompt; two equal integers mean that everything up to the end of that page is equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import IntArray

__all__ = ["BlockHashes", "SessionHashes", "TraceBlocks"]

_WORDS = npt.NDArray[np.uint64]
_ONE_SESSION = 1 << 28
"""More pages than one prompt can have."""


def _mix(x: _WORDS) -> _WORDS:
    """Scramble 64-bit words, one to one (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class TraceBlocks:
    """The recorded block ids of a trace, ragged: row i has ``ids[offset[i]:offset[i + 1]]``.

    Parameters
    ----------
    offset : IntArray, shape (N + 1,)
    ids : IntArray, shape (offset[-1],)
        One id per block of ``tokens`` prompt tokens, the last one possibly partly filled.
    tokens : int
        Tokens per block.
    """

    offset: IntArray
    ids: IntArray
    tokens: int

    def take(self, rows: IntArray) -> TraceBlocks:
        """Return the blocks of ``rows``, in that order."""
        counts = np.diff(self.offset)[rows]
        offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        source = np.arange(int(offset[-1])) + np.repeat(self.offset[rows] - offset[:-1], counts)
        return TraceBlocks(offset, self.ids[source], self.tokens)

    def chained(self) -> _WORDS:
        """Return one word per block that stands for it and every block before it: h_b = mix(h_(b-1) + mix(id_b))."""
        own = _mix(self.ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        out = np.zeros_like(own)
        counts, block = np.diff(self.offset), 0
        rows = np.flatnonzero(counts > 0)
        while rows.shape[0]:
            at = self.offset[rows] + block
            out[at] = _mix(own[at] + (out[at - 1] if block else np.uint64(0)))
            block += 1
            rows = rows[counts[rows] > block]
        return out

    def shared_tokens(self, prompt_tokens: IntArray) -> IntArray:
        """Return, per row, the prompt tokens that an earlier row began with, in whole blocks, at most prompt - 1.

        Parameters
        ----------
        prompt_tokens : IntArray, shape (N,)
        """
        seen: set[int] = set()
        words = self.chained().tolist()
        shared = np.zeros(prompt_tokens.shape[0], np.int64)
        for i, (begin, end) in enumerate(zip(self.offset[:-1].tolist(), self.offset[1:].tolist(), strict=True)):
            mine = words[begin:end]
            shared[i] = next((b for b, word in enumerate(mine) if word not in seen), len(mine))
            seen.update(mine)
        return np.minimum(shared * self.tokens, prompt_tokens - 1)


class BlockHashes:
    """Page hashes of a recorded trace, played one or more times.

    Page k of a block has the hash (chained word of the block) + k: a page is equal to another only if all blocks up to
    its own are. Repetitions share nothing.

    Parameters
    ----------
    blocks : TraceBlocks
    prompt_tokens : IntArray, shape (N,)
    page_tokens : int
        Must divide the block.
    where : str
        File that errors name.

    Raises
    ------
    BadInputError
        If a block is not a whole number of pages.
    """

    def __init__(self, blocks: TraceBlocks, prompt_tokens: IntArray, page_tokens: int, *, where: str) -> None:
        if blocks.tokens % page_tokens:
            raise BadInputError(
                f"{where} has hashes per {blocks.tokens} tokens, which are not whole pages",
                where="engine",
                field="page_tokens",
                value=page_tokens,
                allowed=f"divisors of {blocks.tokens}",
                remedy="choose another page size, or switch engine.prefix_caching off",
            )
        self._blocks, self._prompts = blocks, prompt_tokens
        self._words, self._offset = blocks.chained(), blocks.offset
        self._full = prompt_tokens // page_tokens
        self._page = np.arange(blocks.tokens // page_tokens, dtype=np.uint64)

    def __getitem__(self, i: int) -> tuple[int, ...]:
        n = self._full.shape[0]
        repetition, row = divmod(i, n)
        words = self._words[self._offset[row] : self._offset[row + 1], None]
        if repetition:
            words = words ^ _mix(np.array([repetition], np.uint64))
        return tuple((words + self._page).ravel()[: self._full[row]].view(np.int64).tolist())

    def shared_tokens(self) -> IntArray:
        """Return, per row of one repetition, the prompt tokens that an earlier row began with, in whole blocks."""
        return self._blocks.shared_tokens(self._prompts)


class SessionHashes:
    """Page hashes of sessions: the context of a session only grows, so page k of it is always the same page.

    Parameters
    ----------
    session : IntArray, shape (N,)
        Session of each request, from 0.
    prompt_tokens : IntArray, shape (N,)
    page_tokens : int
    shared_tokens : int
        Tokens with which every session begins: the full pages among them are equal in all sessions.
    """

    def __init__(self, session: IntArray, prompt_tokens: IntArray, page_tokens: int, shared_tokens: int) -> None:
        self._session, self._full, self._page_tokens = session, prompt_tokens // page_tokens, page_tokens
        self._common = shared_tokens // page_tokens

    def __getitem__(self, i: int) -> tuple[int, ...]:
        full, base = int(self._full[i]), (int(self._session[i]) + 1) * _ONE_SESSION
        common = min(full, self._common)
        return (*range(common), *range(base + common, base + full))

    def shared_tokens(self) -> IntArray:
        """Return, per request, the prompt tokens that an earlier request (by id) began with, in whole pages."""
        later = np.diff(self._session, prepend=-1) == 0
        before = np.where(later, np.roll(self._full, 1), np.minimum(self._common, self._full))
        before[0] = 0
        shared: IntArray = before * self._page_tokens
        return shared
