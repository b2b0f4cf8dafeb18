"""Named columns of equal length that grow by doubling: the memory behind every result table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Columns"]

_FILL: dict[str, Any] = {"f": np.nan, "i": 0, "b": False}


class Columns:
    """Growing columns.

    Parameters
    ----------
    dtypes : mapping of str to NumPy dtype
        Column names, in table order, with their types; new rows are NaN, 0 or False.
    capacity : int
        Rows reserved at first.

    Attributes
    ----------
    n : int
        Rows in use.
    """

    def __init__(self, dtypes: Mapping[str, npt.DTypeLike], capacity: int = 256) -> None:
        self.n = 0
        self._capacity = max(1, capacity)
        self._data = {name: self._blank(np.dtype(dtype), self._capacity) for name, dtype in dtypes.items()}

    @staticmethod
    def _blank(dtype: np.dtype[Any], rows: int) -> npt.NDArray[Any]:
        return np.full(rows, _FILL[dtype.kind], dtype)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a writable view of the rows in use."""
        return self._data[name][: self.n]

    def grow(self, rows: int) -> slice:
        """Append blank rows and return where they are; views taken earlier may be stale afterwards."""
        start, self.n = self.n, self.n + rows
        if self.n > self._capacity:
            extra = max(self.n, 2 * self._capacity) - self._capacity
            for name, data in self._data.items():
                self._data[name] = np.concatenate([data, self._blank(data.dtype, extra)])
            self._capacity += extra
        return slice(start, self.n)

    def append(self, rows: int, /, **values: Any) -> None:
        """Append ``rows`` rows; columns not named stay blank, scalars are repeated."""
        where = self.grow(rows)
        for name, value in values.items():
            self._data[name][where] = value

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows; the memory stays reserved (dropped rows are blanked)."""
        for data in self._data.values():
            data[rows : self.n] = _FILL[data.dtype.kind]
        self.n = rows

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of every column."""
        return {name: data[: self.n].copy() for name, data in self._data.items()}
