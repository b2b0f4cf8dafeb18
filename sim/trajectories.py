r"""Entropy trajectories: what the simulated model would have shown the controllers, read from a recorded bank.

**Which recording.** A request has a prompt and a uniform number xi. The bank holds each prompt sampled at several
temperatures T_1 < T_2 < ... . At a step whose last temperature was T, with T_j <= T <= T_{j+1}, it reads the
recording at T_{j+1} if xi < w and the one at T_j otherwise, w = ln(T / T_j) / ln(T_{j+1} / T_j). Choosing instead
of averaging keeps the variance of the recorded entropies. The temperature of the step *before* selects (the base
temperature at first), because this step's temperature is decided from what the step shows. A temperature below T_1 or
above the last is an error, found before the first step (``require_range``): nothing is extrapolated. Greedy requests
read the lowest recorded temperature.

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

import numpy as np
import numpy.typing as npt

from entropic_ctl import bank as banks
from entropic_ctl.bank import Bank
from entropic_ctl.config import LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray
from sim.model_file import read_model
from sim.parametric import generate
from sim.response import Response, cell

__all__ = ["BankView", "Trajectories", "load_bank"]

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


class BankView:
    """The distributions of one step, as recorded (implements ``LogitView``).

    Parameters
    ----------
    model_entropy : FloatArray, shape (M,)
    entropy, varentropy : FloatArray, shape (M, G)
        On the grid, for each row.
    log_grid : FloatArray, shape (G,)
    shift : FloatArray, shape (M,), or None
        Added to both entropies (response to pruning).
    """

    __slots__ = ("_H", "_V", "_flat", "_grid", "_model", "_shift")

    def __init__(
        self,
        model_entropy: FloatArray,
        entropy: FloatArray,
        varentropy: FloatArray,
        log_grid: FloatArray,
        shift: FloatArray | None = None,
    ) -> None:
        rows, points = entropy.shape
        self._H, self._V, self._grid, self._shift = entropy.ravel(), varentropy.ravel(), log_grid, shift
        self._flat = np.arange(0, rows * points, points)
        self._model = model_entropy if shift is None else np.maximum(model_entropy + shift, 0.0)

    @property
    def model_entropy(self) -> FloatArray:
        """Entropy at temperature 1, shape (M,), nats."""
        return self._model

    def at(self, temperature: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return tempered entropy and varentropy, each (M,), at ``temperature``, shape (M,).

        Raises
        ------
        BadInputError
            If a temperature lies outside the recorded grid.
        """
        u = np.log(temperature)
        grid = self._grid
        if u.size and not (u.min() >= grid[0] - _SLACK and u.max() <= grid[-1] + _SLACK):
            raise BadInputError(
                "temperature outside the recorded grid",
                where="entropy bank",
                field="temperature",
                value=[float(temperature.min()), float(temperature.max())],
                allowed=f"[{np.exp(grid[0]):g}, {np.exp(grid[-1]):g}]",
            )
        j = cell(grid, u)
        left, at = grid[j], self._flat + j
        width = grid[j + 1] - left
        h0 = self._H[at]
        s = np.minimum(np.maximum((u - left) / width, 0.0), 1.0)
        rise = np.maximum(self._H[at + 1] - h0, 0.0)
        top = 3.0 * rise
        m0 = np.minimum(self._V[at] * width, top)
        m1 = np.minimum(self._V[at + 1] * width, top)
        a, b = m0 + m1 - 2.0 * rise, top - 2.0 * m0 - m1  # H = h0 + s (m0 + s (b + s a))
        entropy = h0 + s * (m0 + s * (b + s * a))
        varentropy = np.maximum(m0 + s * (2.0 * b + 3.0 * s * a), 0.0) / width
        if self._shift is not None:
            entropy = np.maximum(entropy + self._shift, 0.0)
        return entropy, varentropy


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
        self._log_recorded = np.log(temperatures)
        self._start, self._length = bank.offset[:-1], np.diff(bank.offset)
        self._prompt, self._xi, self._ends = prompt, xi, ends
        self._lowest = float(temperatures[0])  # what a greedy token counts as
        base = temperatures[0] if base_temperature <= 0 else base_temperature
        self._u = np.full(prompt.shape[0], np.log(base))
        self._token = np.zeros(prompt.shape[0], np.int64)

    @staticmethod
    def count_prompts(bank: Bank) -> int:
        """Return the number of selectable prompts: recordings per temperature (repeats count one each)."""
        return int(_index(bank)[0].shape[0])

    def select(self, ids: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return (row of the bank's token tables, whether this token is its text's last) for each request, (M,)."""
        u, recorded = self._u[ids], self._log_recorded
        if recorded.shape[0] > 1:
            j = cell(recorded, u)
            left = recorded[j]
            weight = (u - left) / (recorded[j + 1] - left)
            if weight.size and (weight.min() < -_SLACK or weight.max() > 1 + _SLACK):
                raise BadInputError(
                    "temperature outside those the bank was sampled at",
                    where="entropy bank",
                    field="temperature",
                    value=[float(np.exp(u.min())), float(np.exp(u.max()))],
                    allowed=f"[{np.exp(recorded[0]):g}, {np.exp(recorded[-1]):g}]",
                )
            column = j + (self._xi[ids] < weight)
        else:
            column = np.zeros(ids.shape[0], np.int64)
        k = self._table[self._prompt[ids], column]
        token, length = self._token[ids], self._length[k]
        if not self._ends:
            return self._start[k] + token % length, np.zeros(ids.shape[0], np.bool_)
        own_end = self.bank.ended[k]
        over = own_end & (token >= length)
        if over.any():
            k[over] = self._still_going(self._prompt[ids[over]], token[over], u[over])
            length, own_end = self._length[k], self.bank.ended[k]
        place = np.where(own_end, np.minimum(token, length - 1), token % length)
        return self._start[k] + place, own_end & (token + 1 >= length)

    def _still_going(self, prompt: IntArray, token: IntArray, u: FloatArray) -> IntArray:
        """Return the recording nearest in ln T that is not over at ``token``, or the nearest if all are."""
        choices: IntArray = self._table[prompt]
        over = self.bank.ended[choices] & (token[:, None] >= self._length[choices])
        distance = np.abs(self._log_recorded - u[:, None])
        nearest = np.where(over & ~over.all(axis=1, keepdims=True), np.inf, distance).argmin(axis=1)
        chosen: IntArray = choices[np.arange(prompt.shape[0]), nearest]
        return chosen

    def view(self, at: IntArray, shift: FloatArray | None = None) -> BankView:
        """Return the distributions at the token rows ``at`` (from :meth:`select`), shifted by pruning."""
        bank = self.bank
        return BankView(
            bank.model_entropy[at].astype(np.float64),
            bank.entropy_grid[at].astype(np.float64),
            bank.varentropy_grid[at].astype(np.float64),
            self._log_grid,
            shift,
        )

    def advance(self, ids: IntArray, temperature: FloatArray) -> None:
        """Record that each request accepted one token, sampled at ``temperature`` (0 for greedy), shape (M,)."""
        self._token[ids] += 1
        self._u[ids] = np.log(np.where(temperature > 0, temperature, self._lowest))

    def require_range(self, loop: LoopConfig) -> None:
        """Check once that no temperature or theta the laws can ask for lies outside the recorded ones.

        Raises
        ------
        BadInputError
            Naming the configuration field, its value and the recorded range.
        """
        sampled = self.bank.temperature  # entropies are tabulated on the grid, texts were sampled at these
        low = max(float(self.bank.grid[0]), float(sampled.min()))
        high = min(float(self.bank.grid[-1]), float(sampled.max()))
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
        top = float(self.bank.theta[-1])
        for name, value in vars(loop.pruning.config).items():
            if name.startswith("theta") and isinstance(value, float) and value > top * (1 + _SLACK):
                raise BadInputError(
                    "beyond the budgets of the entropy bank",
                    field=f"loop.pruning.{name}",
                    value=value,
                    allowed=f"[0, {top:g}] nats",
                    remedy="lower it or record a wider bank",
                )


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
