"""Texts whose every token is known at any temperature, and per-text targets for the shipped temperature laws.

A text's words are fixed here; what a law changes is the temperature at which each recorded distribution is read, so
its entropies are exogenous. They come from an entropy bank, or from the engine's own run at a fixed temperature.
Source: ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.arrays import log, namespace
from entropic_ctl.bank import Bank
from entropic_ctl.config import LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Array, FloatArray, IntArray, LogitView
from entropic_ctl.temperature.base import TemperatureLaw
from sim.trajectories import BankView

__all__ = ["LEAST_TOKENS", "LinearView", "OwnTargets", "Texts", "from_bank", "own_targets"]

LEAST_TOKENS = 64
"""Shorter texts are left out: their variance and autocorrelations say too little."""


@dataclass(frozen=True)
class Texts:
    """Recorded texts, one after another.

    Parameters
    ----------
    name, kind : tuple of str, length B
        What each text is called, and the kind of its prompt.
    start : IntArray, shape (B + 1,)
        Text i holds tokens ``start[i] : start[i + 1]``.
    grid : FloatArray, shape (G,)
        Temperatures at which entropies are tabulated.
    entropy, varentropy : float32 array, shape (N, G)
        Of each token at each grid temperature.
    temperature : float
        T0, at which the texts were sampled.
    """

    name: tuple[str, ...]
    kind: tuple[str, ...]
    start: IntArray
    grid: FloatArray
    entropy: Any
    varentropy: Any
    temperature: float

    @property
    def lengths(self) -> IntArray:
        """Tokens of each text, shape (B,)."""
        return np.diff(self.start)

    def split(self, column: Any) -> list[Any]:
        """Cut a column of tokens (N, ...) into one part per text."""
        return np.split(column, self.start[1:-1])

    def view(self, at: IntArray) -> BankView:
        """Return the recorded distributions of the tokens ``at``."""
        grid = np.log(self.grid)
        one = np.zeros(at.shape[0])
        model = BankView(one, self.entropy, self.varentropy, grid, at).at(np.ones(at.shape[0]))[0]
        return BankView(model, self.entropy, self.varentropy, grid, at)

    def at_start(self) -> tuple[FloatArray, FloatArray]:
        """Return entropy and varentropy of every token at T0, each (N,)."""
        n = int(self.start[-1])
        return self.view(np.arange(n)).at(np.full(n, self.temperature))


def from_bank(bank: Bank, temperature: float, *, least: int = LEAST_TOKENS) -> Texts:
    """Return the texts of a bank that were sampled at one temperature and are long enough.

    Raises
    ------
    BadInputError
        If there is none.
    """
    sampled = np.isclose(bank.temperature, temperature)
    picked = np.flatnonzero(sampled & (np.diff(bank.offset) >= least))
    if picked.size == 0:
        raise BadInputError(
            f"no recorded text of {least} tokens at this temperature",
            where="entropy bank",
            field="temperature",
            value=temperature,
            allowed=", ".join(f"{t:g}" for t in np.unique(bank.temperature)),
        )
    spans = [slice(int(bank.offset[k]), int(bank.offset[k + 1])) for k in picked]
    kinds = [str(bank.meta["kinds"][i]) for i in bank.prompt_kind[picked]]
    return Texts(
        name=tuple(f"bank {int(bank.prompt[k])}" for k in picked),
        kind=tuple(kinds),
        start=np.concatenate([[0], np.cumsum([s.stop - s.start for s in spans])]).astype(np.int64),
        grid=bank.grid,
        entropy=np.concatenate([bank.entropy_grid[s] for s in spans]),
        varentropy=np.concatenate([bank.varentropy_grid[s] for s in spans]),
        temperature=temperature,
    )


class LinearView:
    """Entropies as linear theory sees them: H0 + V (ln T - ln T0), one row per text (implements ``LogitView``).

    Parameters
    ----------
    entropy, varentropy : FloatArray, shape (M,)
        At T0.
    temperature : float
        T0.
    """

    def __init__(self, entropy: FloatArray, varentropy: FloatArray, temperature: float) -> None:
        self._entropy, self._varentropy, self._u0 = entropy, varentropy, np.log(temperature)

    @property
    def model_entropy(self) -> FloatArray:
        """The line at T = 1, shape (M,), nats."""
        return self.at(np.ones(self._entropy.shape[0]))[0]

    def at(self, temperature: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the line at ``temperature``, shape (M,), and its slope."""
        return self._entropy + self._varentropy * (log(temperature) - self._u0), self._varentropy


class _Shifted:
    """A view whose tempered entropies are moved by a constant per row."""

    def __init__(self, view: LogitView, shift: FloatArray) -> None:
        self._view, self._shift = view, shift

    @property
    def model_entropy(self) -> Any:
        """Not moved."""
        return self._view.model_entropy

    def at(self, temperature: Any) -> tuple[Any, Any]:
        """Return moved entropy and varentropy."""
        entropy, varentropy = self._view.at(temperature)
        return entropy + _like(self._shift, entropy), varentropy


def _like(values: FloatArray, array: Any) -> Any:
    return namespace(array).asarray(values, dtype=array.dtype)


class OwnTargets:
    """A shipped law in which every text has its own H*: it sees the entropy moved by (its H* - the text's).

    Parameters
    ----------
    law : TemperatureLaw
        Built with the largest target (the moved entropies are then never negative).
    targets : FloatArray, shape (B,)
        H* of each text, nats.

    Attributes
    ----------
    rows : IntArray
        Which texts the next call is about; the driver sets it where that is not all of them in order.
    """

    def __init__(self, law: TemperatureLaw, targets: FloatArray) -> None:
        self.config, self.integral_action, self._law = law.config, law.integral_action, law
        self._shift = law.config.target_nats - targets
        self.rows = np.arange(targets.shape[0])

    def start(self) -> float:
        """Return the law's initial u."""
        return self._law.start()

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy), the entropy as it is."""
        shift = self._shift[self.rows]
        temperature, entropy, varentropy = self._law.temper(u, _Shifted(view, shift))
        return temperature, entropy - _like(shift, entropy), varentropy

    def update(self, u: Array, tempered_entropy: Array) -> Array:
        """Return the next u."""
        return self._law.update(u, tempered_entropy + self._shift[self.rows])


def own_targets(law: Any, targets: FloatArray) -> OwnTargets:
    """Return the law of ``law`` (a ``LawSpec``) with a target per text."""
    config = dataclasses.replace(law.config, target_nats=float(targets.max()))
    built, _, _ = LoopConfig(temperature=dataclasses.replace(law, config=config)).build()
    return OwnTargets(built, targets)
