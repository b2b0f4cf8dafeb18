r"""Entropy trajectories: what the simulated model would have shown the controllers, read from a recorded bank.

**Which recording.** A request has a prompt and a uniform number xi. The bank holds each prompt sampled at several
temperatures T_1 < T_2 < ... . At a step whose text so far has temperature T, with T_j <= T <= T_{j+1}, it reads the
recording at T_{j+1} if xi < w and the one at T_j otherwise, w = ln(T / T_j) / ln(T_{j+1} / T_j). Choosing instead
of averaging keeps the variance of the recorded entropies. The temperature of the text is the exponential moving average
of ln T over its tokens (weight :data:`TEXT_WEIGHT`, the base temperature at first): a recording at T_{j+1} differs by
all that was written at T_{j+1} before, and one warmer token does not make a text warm. On the real model no effect of
the last ln T on the next model entropy can be seen (``entropic identify --world engine``: -0.14 [-0.42, 0.14] nats
per unit); reading the recording of the last temperature instead would put one of about 1 into the simulated loop. A
temperature below T_1 or above the last is an error, found before the first step (``require_range``): nothing is
extrapolated. Greedy requests read the lowest recorded temperature.

**Which token, and the end of text.** Token i of a request is token i of the recording. In mode ``bank`` a request
ends (EOS) with the last token of a recording that ended by itself. A recording that ended *before* token i says
nothing about a text that goes on, so the nearest one (in ln T) still going is read in its place; only if all of the
prompt's are over does the request end. (Ending it at once would cut a text short at the first of several recordings to
end, merely because a law moves T: with a limit of 400 tokens that alone cost the shipped bank 11% of its output.) A
recording cut off by the recording limit says nothing about the end of the text: it is read again from its start
(modulo). In mode ``limit`` every recording is.

**Entropy at any temperature.** On the grid of u = ln T the bank has H and V = dH/du. Between two grid points H is
the cubic Hermite interpolant with V as slopes, limited to three times the secant so that H is monotone in T
(Fritsch and Carlson, 1980; the bank stores half-precision numbers); the varentropy reported is the derivative of
that interpolant, so H and V stay consistent for a law that takes Newton steps. Temperatures outside the grid are an
error.

The selection rule, the interpolations and the end-of-text rule are ours. All of it works on columns, one entry per
row.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl import bank as banks
from entropic_ctl.arrays import log
from entropic_ctl.bank import Bank
from entropic_ctl.clock import Runs
from entropic_ctl.compiled import compiled, faster
from entropic_ctl.config import LoopConfig, RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray
from sim.model_file import read_model
from sim.parametric import generate
from sim.response import Response, cell

__all__ = ["TEXT_WEIGHT", "BankView", "Trajectories", "bank_of", "load_bank"]

Table = npt.NDArray[np.float32]

TEXT_WEIGHT = 1.0 / 16.0
"""Weight of the newest token in the temperature of a text (ours)."""

_SLACK = 1e-9
"""Relative distance by which a temperature may miss the grid (exp of a log) before it is an error."""


def load_bank(path: str = "", *, seed: int = 0, prompts: int = 32) -> Bank:
    """Read a bank; the empty path is the one shipped with this package.

    Parameters
    ----------
    path : str
        ``*.json`` is a fitted model (:mod:`sim.parametric`) from which a bank is generated.
    seed, prompts : int
        Root seed and number of prompts of a generated bank; a recorded one ignores them.

    Raises
    ------
    BadInputError
        If the file is missing or broken.
    """
    if path.endswith(".json"):
        return generate(read_model(path), seed=seed, prompts=prompts)
    if path:
        return banks.load(path)
    with importlib.resources.as_file(importlib.resources.files("sim") / "data" / "smollm2-135m.npz") as shipped:
        return banks.load(Path(shipped))


def bank_of(config: RunConfig) -> Bank:
    """Return the bank a run reads: recorded, or generated from a fitted model with the run's seed.

    Raises
    ------
    BadInputError
        If the file is missing or broken.
    """
    return load_bank(config.cost.bank, seed=config.seed, prompts=config.cost.bank_prompts)


def require_range(bank: Bank, loop: LoopConfig) -> None:
    """Check that no temperature or theta the laws can ask for lies outside those of a bank.

    Parameters
    ----------
    bank : Bank
    loop : LoopConfig

    Raises
    ------
    BadInputError
        Naming the configuration field, its value and the recorded range.
    """
    sampled = bank.temperature  # entropies are tabulated on the grid, texts were sampled at these
    low = max(float(bank.grid[0]), float(sampled.min()))
    high = min(float(bank.grid[-1]), float(sampled.max()))
    law = loop.temperature.config
    fixed = loop.temperature.name == "fixed" and law.temperature > 0
    limits = {"temperature": law.temperature} if fixed else {"t_min": law.t_min, "t_max": law.t_max}
    if law.temperature > 0:
        for name, value in limits.items():
            if not low * (1 - _SLACK) <= value <= high * (1 + _SLACK):
                raise BadInputError(
                    "outside the temperatures of the entropy bank",
                    field=f"loop.temperature.{name}",
                    value=value,
                    allowed=f"[{low:g}, {high:g}]",
                    remedy="narrow t_min and t_max or record a wider bank (entropic record --temperatures)",
                )
    top = float(bank.theta[-1])
    for name, value in vars(loop.pruning.config).items():
        if name.startswith("theta") and isinstance(value, float) and value > top * (1 + _SLACK):
            raise BadInputError(
                "beyond the budgets of the entropy bank",
                field=f"loop.pruning.{name}",
                value=value,
                allowed=f"[0, {top:g}] nats",
                remedy="lower it or record a wider bank",
            )


class BankView:
    """The distributions of one step, as recorded (implements ``LogitView``).

    Parameters
    ----------
    model_entropy : FloatArray, shape (M,)
    entropy, varentropy : float32 array, shape (N, G)
        On the grid, for each token of the bank.
    log_grid : FloatArray, shape (G,)
    at : IntArray, shape (M,)
        Which token each row shows.
    shift : FloatArray, shape (M,), or None
        Added to both entropies (response to pruning).
    vocab_size : int
        Tokens a distribution is over, what T = infinity asks for; 0 if nobody knows.
    """

    __slots__ = ("_H", "_V", "_at", "_grid", "_model", "_shift", "_vocab_size")

    def __init__(
        self,
        model_entropy: FloatArray,
        entropy: Table,
        varentropy: Table,
        log_grid: FloatArray,
        at: IntArray,
        shift: FloatArray | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._vocab_size = vocab_size
        self._H, self._V, self._grid, self._at, self._shift = entropy, varentropy, log_grid, at, shift
        self._model = model_entropy if shift is None else np.maximum(model_entropy + shift, 0.0)

    @property
    def model_entropy(self) -> FloatArray:
        """Entropy at temperature 1, shape (M,), nats."""
        return self._model

    def at(self, temperature: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return tempered entropy and varentropy, each (M,), at ``temperature``, shape (M,): on the grid, or infinite.

        Raises
        ------
        BadInputError
            If a temperature lies outside the recorded grid.
        """
        grid = self._grid
        if self._vocab_size and temperature.shape[0] and temperature[0] == np.inf and (temperature == np.inf).all():
            return np.full(temperature.shape[0], np.log(self._vocab_size)), np.zeros(temperature.shape[0])
        entropy, varentropy, inside = _hermite(self._H, self._V, grid, self._at, log(temperature))
        if not inside:
            raise BadInputError(
                "temperature outside the recorded grid",
                where="entropy bank",
                field="temperature",
                value=[float(temperature.min()), float(temperature.max())],
                allowed=f"[{np.exp(grid[0]):g}, {np.exp(grid[-1]):g}]",
            )
        if self._shift is not None:
            entropy = np.maximum(entropy + self._shift, 0.0)
        return entropy, varentropy


def _hermite_columns(
    entropy: Table, varentropy: Table, grid: FloatArray, at: IntArray, u: FloatArray
) -> tuple[FloatArray, FloatArray, bool]:
    """Return (H, V) at u = ln T of the token rows ``at``, and whether every u lies on the grid.

    Parameters
    ----------
    entropy, varentropy : float32 array, shape (N, G)
    grid : FloatArray, shape (G,)
        ln T.
    at : IntArray, shape (M,)
    u : FloatArray, shape (M,)
    """
    j = cell(grid, u)
    left = grid[j]
    width = grid[j + 1] - left
    h0 = entropy[at, j].astype(np.float64)
    s = np.minimum(np.maximum((u - left) / width, 0.0), 1.0)
    rise = np.maximum(entropy[at, j + 1] - h0, 0.0)
    top = 3.0 * rise
    m0 = np.minimum(varentropy[at, j] * width, top)
    m1 = np.minimum(varentropy[at, j + 1] * width, top)
    a, b = m0 + m1 - 2.0 * rise, top - 2.0 * m0 - m1  # H = h0 + s (m0 + s (b + s a))
    inside = bool(((u >= grid[0] - _SLACK) & (u <= grid[-1] + _SLACK)).all())
    return h0 + s * (m0 + s * (b + s * a)), np.maximum(m0 + s * (2.0 * b + 3.0 * s * a), 0.0) / width, inside


@compiled
def hermite_loop(
    entropy: Table, varentropy: Table, grid: FloatArray, at: IntArray, u: FloatArray
) -> tuple[FloatArray, FloatArray, bool]:
    """Twin of :func:`_hermite_columns`."""
    rows, inside = at.shape[0], True
    H, V = np.empty(rows), np.empty(rows)
    for r in range(rows):
        j, k = 0, at[r]
        inside &= u[r] >= grid[0] - _SLACK and u[r] <= grid[-1] + _SLACK
        while j < grid.shape[0] - 2 and grid[j + 1] <= u[r]:
            j += 1
        width = grid[j + 1] - grid[j]
        h0 = np.float64(entropy[k, j])
        s = min(max((u[r] - grid[j]) / width, 0.0), 1.0)
        rise = max(np.float64(entropy[k, j + 1]) - h0, 0.0)
        top = 3.0 * rise
        m0 = min(np.float64(varentropy[k, j]) * width, top)
        m1 = min(np.float64(varentropy[k, j + 1]) * width, top)
        a, b = m0 + m1 - 2.0 * rise, top - 2.0 * m0 - m1
        H[r] = h0 + s * (m0 + s * (b + s * a))
        V[r] = max(m0 + s * (2.0 * b + 3.0 * s * a), 0.0) / width
    return H, V, inside


_hermite = faster(hermite_loop, _hermite_columns)


class Trajectories:
    """The place of every request in its recordings: columns indexed by request id.

    Parameters
    ----------
    bank : Bank
    prompt : IntArray, shape (N,)
        Prompt index of each request, in [0, ``prompts``).
    xi : FloatArray, shape (N,)
        Uniform numbers in [0, 1).
    base_temperature : float
        Temperature that selects the recording of the first token (greedy: the lowest recorded one is taken).
    ends : bool
        True: the recorded end of text ends a request.

    Raises
    ------
    BadInputError
        If the bank does not hold every prompt at every temperature.
    """

    def __init__(self, bank: Bank, prompt: IntArray, xi: FloatArray, *, base_temperature: float, ends: bool) -> None:
        self.bank, self.response = bank, Response(bank)
        self._log_grid = np.log(bank.grid)
        self._table, temperatures = _index(bank)
        self._vocab_size = int(bank.meta.get("vocab_size", 0))
        self._log_recorded = np.log(temperatures)
        self._start, self._length = bank.offset[:-1], np.diff(bank.offset)
        self._may_end = bank.ended & ends  # a recording whose end ends a request
        self._prompt, self._xi = prompt, xi
        self._lowest = float(temperatures[0])  # what a greedy token counts as
        base = temperatures[0] if base_temperature <= 0 else base_temperature
        self._u = np.full(prompt.shape[0], np.log(base))
        self._token = np.zeros(prompt.shape[0], np.int64)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Prompt, xi, place and ln T by request; tables of :func:`select_loop`; the bank's entropies and ln grid."""
        bank = self.bank
        return (
            self._prompt, self._xi, self._token, self._u, self._log_recorded, self._table, self._start, self._length,
            self._may_end, bank.model_entropy, bank.entropy_grid, bank.varentropy_grid, self._log_grid,
        )  # fmt: skip

    @staticmethod
    def count_prompts(bank: Bank) -> int:
        """Return the number of selectable prompts: recordings per temperature (repeats count one each)."""
        return int(_index(bank)[0].shape[0])

    def token(self, ids: IntArray) -> IntArray:
        """Return the number of tokens each request has, shape (M,)."""
        return self._token[ids]

    def select(self, ids: IntArray, ahead: IntArray | None = None) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return (row of the bank's token tables, whether this token is its text's last) for each request, (M,).

        Parameters
        ----------
        ids : IntArray, shape (M,)
        ahead : IntArray, shape (M,), optional
            Tokens beyond the next one (drafts), if any.
        """
        token = self._token[ids]
        if ahead is not None:
            token += ahead
        at, last, off = _select(
            self._log_recorded, self._table, self._start, self._length, self._may_end, self._prompt[ids],
            self._xi[ids], token, self._u[ids],
        )  # fmt: skip
        if off:
            raise BadInputError(
                "temperature outside those the bank was sampled at",
                where="entropy bank",
                field="temperature",
                value=[float(np.exp(self._u[ids].min())), float(np.exp(self._u[ids].max()))],
                allowed=f"[{np.exp(self._log_recorded[0]):g}, {np.exp(self._log_recorded[-1]):g}]",
            )
        return at, last

    def lengths(self, limit: IntArray) -> IntArray:
        """Return how many tokens each request would generate if its temperature stayed at the base; shape (N,).

        The length of the recording it reads, where that ended by itself, and the limit if that is less. Call it before
        the first token.

        Parameters
        ----------
        limit : IntArray, shape (N,)
            Limits on output tokens.
        """
        if not self._may_end.any():
            return limit
        first, _ = self.select(np.arange(self._prompt.shape[0]))
        k = np.searchsorted(self._start, first, side="right") - 1
        length: IntArray = np.where(self.bank.ended[k], np.minimum(self._length[k], limit), limit)
        return length

    def view(self, at: IntArray, shift: FloatArray | None = None) -> BankView:
        """Return the distributions at the token rows ``at`` (from :meth:`select`), shifted by pruning."""
        bank = self.bank
        model = bank.model_entropy[at].astype(np.float64)
        return BankView(model, bank.entropy_grid, bank.varentropy_grid, self._log_grid, at, shift, self._vocab_size)

    def advance(self, ids: IntArray, temperature: FloatArray) -> None:
        """Record that each request accepted one token, sampled at ``temperature`` (0 for greedy), shape (M,)."""
        self._token[ids] += 1
        u = self._u[ids]
        self._u[ids] = u + TEXT_WEIGHT * (log(np.where(temperature > 0, temperature, self._lowest)) - u)

    def advance_all(self, ids: IntArray, temperature: FloatArray) -> None:
        """Do as :meth:`advance` where an id may occur several times, in order."""
        for part in Runs.of(ids).rounds() if ids.shape[0] else ():
            self.advance(ids[part], temperature[part])

    def require_range(self, loop: LoopConfig) -> None:
        """Check once that no temperature or theta the laws can ask for lies outside the recorded ones.

        Raises
        ------
        BadInputError
            Naming the configuration field, its value and the recorded range.
        """
        require_range(self.bank, loop)


def _select_columns(
    recorded: FloatArray,
    table: IntArray,
    start: IntArray,
    length: IntArray,
    ends: npt.NDArray[np.bool_],
    prompt: IntArray,
    xi: FloatArray,
    token: IntArray,
    u: FloatArray,
) -> tuple[IntArray, npt.NDArray[np.bool_], int]:
    """Return (row of the bank's token tables, whether it is the text's last) and how many u were off the recorded ones.

    Parameters
    ----------
    recorded : FloatArray, shape (J,)
        ln of the recorded temperatures.
    table : IntArray, shape (P, J)
        Recording of each prompt at each temperature.
    start, length : IntArray, shape (K,)
        Where each recording's tokens lie.
    ends : bool array, shape (K,)
        Recordings whose end is an end of text.
    prompt, token : IntArray, shape (M,)
    xi, u : FloatArray, shape (M,)
    """
    column, off = np.zeros(u.shape[0], np.int64), 0
    if recorded.shape[0] > 1:
        j = cell(recorded, u)
        weight = (u - recorded[j]) / (recorded[j + 1] - recorded[j])
        off = int(np.count_nonzero((weight < -_SLACK) | (weight > 1 + _SLACK)))
        column = j + (xi < weight)
    k = table[prompt, column]
    over = ends[k] & (token >= length[k])
    if over.any():  # the nearest in ln T that is still going, or the nearest if none is
        choices = table[prompt[over]]
        done = ends[choices] & (token[over][:, None] >= length[choices])
        distance = np.abs(recorded - u[over][:, None])
        nearest = np.where(done & ~done.all(axis=1, keepdims=True), np.inf, distance).argmin(axis=1)
        k[over] = choices[np.arange(nearest.shape[0]), nearest]
    place = np.where(ends[k], np.minimum(token, length[k] - 1), token % length[k])
    return start[k] + place, ends[k] & (token + 1 >= length[k]), off


@compiled
def select_loop(
    recorded: FloatArray,
    table: IntArray,
    start: IntArray,
    length: IntArray,
    ends: npt.NDArray[np.bool_],
    prompt: IntArray,
    xi: FloatArray,
    token: IntArray,
    u: FloatArray,
) -> tuple[IntArray, npt.NDArray[np.bool_], int]:
    """Twin of :func:`_select_columns`."""
    rows, choices, off = u.shape[0], recorded.shape[0], 0
    at, last = np.empty(rows, np.int64), np.empty(rows, np.bool_)
    for r in range(rows):
        j, i = 0, token[r]
        if choices > 1:
            while j < choices - 2 and recorded[j + 1] <= u[r]:
                j += 1
            weight = (u[r] - recorded[j]) / (recorded[j + 1] - recorded[j])
            off += weight < -_SLACK or weight > 1 + _SLACK
            j += xi[r] < weight
        k = table[prompt[r], j]
        if ends[k] and i >= length[k]:
            best, going = np.inf, False
            for c in range(choices):
                candidate = table[prompt[r], c]
                alive = not (ends[candidate] and i >= length[candidate])
                distance = abs(recorded[c] - u[r])
                if (alive and not going) or (alive == going and distance < best):
                    k, best, going = candidate, distance, alive
        place = min(i, length[k] - 1) if ends[k] else i % length[k]
        at[r], last[r] = start[k] + place, ends[k] and i + 1 >= length[k]
    return at, last, off


_select = faster(select_loop, _select_columns)


def _index(bank: Bank) -> tuple[IntArray, FloatArray]:
    """Return (trajectory by prompt and temperature, recorded temperatures); a repeat is a prompt of its own."""
    temperatures, column = np.unique(bank.temperature, return_inverse=True)
    prompts, row = np.unique(bank.prompt, return_inverse=True)
    counts = np.zeros((prompts.shape[0], temperatures.shape[0]), np.int64)
    np.add.at(counts, (row, column), 1)
    repeats = counts.min(axis=1)
    if (repeats < 1).any() or temperatures[0] <= 0:
        missing = int(prompts[int(np.argmin(repeats))])
        raise BadInputError(
            "a prompt is not recorded at every temperature (all above 0)",
            where="entropy bank",
            field="prompt",
            value=missing,
            allowed=f"one recording at each of {temperatures.tolist()}",
            remedy="record it anew with `entropic record`",
        )
    first = np.concatenate(([0], np.cumsum(repeats)))
    table = np.empty((int(first[-1]), temperatures.shape[0]), np.int64)
    for r in range(prompts.shape[0]):
        for c in range(temperatures.shape[0]):
            found = np.flatnonzero((row == r) & (column == c))
            table[first[r] : first[r + 1], c] = found[: repeats[r]]
    return table, temperatures
