r"""The linear temperature loop as python-control objects: built, cut, closed, written to files and read back.

One sample per accepted token (dt = 1). With e the target minus the tempered entropy, varentropy V as the plant's slope,
observation lag d and, where entropies are filtered before they are used (no shipped law does), an average of weight b,

    u+ = u + k F(z) z^-d e,     y = V u,     F(z) = b z / (z - 1 + b),     L(z) = k V F(z) z^-d / (z - 1).

Source: ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.results import atomic, write_json

if TYPE_CHECKING:
    import control

__all__ = ["ComplexArray", "FloatArray", "closed", "frequencies", "gain_of", "load", "loop", "response", "save", "step"]

FloatArray = npt.NDArray[np.float64]
ComplexArray = npt.NDArray[np.complex128]


def gain_of(config: RunConfig) -> float:
    """Return k of a loop that has integral action.

    Raises
    ------
    BadInputError
        For a law without any (what it has instead is said), or a gain that is not positive: no margin exists.
    """
    law = config.loop.temperature
    if law.name != "feedback":
        raise BadInputError(
            "the law feeds back no past error, so there is no loop with margins",
            field="loop.temperature.law",
            value=law.name,
            allowed="feedback",
        )
    gain = float(law.config.gain)
    if not gain > 0.0:
        raise BadInputError(
            "no margin exists: a gain that is not positive does not pull towards the target",
            field="loop.temperature.gain",
            value=gain,
            allowed="> 0",
        )
    return gain


def loop(
    config: RunConfig, varentropy: float, *, ema: float = 1.0, gain: float | None = None, lag: int | None = None
) -> control.StateSpace:
    """Return the open loop L from the error (target minus entropy, nats) to the tempered entropy (nats).

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law; k is its gain, d the engine's observation lag.
    varentropy : float
        V > 0, nats squared.
    ema : float
        Weight b of the newest entropy, in (0, 1]; 1 is no filter.
    gain, lag : float, int, optional
        In place of the config's; a lag has no upper limit here.

    Returns
    -------
    control.StateSpace
        dt = 1 (an accepted token). States: ``u`` (ln T), ``late1`` ... ``late<d>`` (errors on their way), ``filtered``.

    Raises
    ------
    BadInputError
        For another law, a gain that is not positive, or a varentropy or weight out of range.
    """
    import control  # it brings in much of scipy

    k = gain_of(config) if gain is None else gain
    lag = config.engine.observation_lag if lag is None else lag
    if lag < 0:
        raise BadInputError("negative", field="lag", value=lag, allowed=">= 0 tokens")
    if not 0.0 < varentropy < math.inf:
        raise BadInputError("not a varentropy", field="varentropy", value=varentropy, allowed="> 0 nats^2, finite")
    if not 0.0 < ema <= 1.0:
        raise BadInputError("not a filter weight", field="ema", value=ema, allowed="(0, 1]")
    names = ["u", *(f"late{i}" for i in range(1, lag + 1)), *(["filtered"] if ema < 1.0 else [])]
    size = len(names)
    A, B, C = np.zeros((size, size)), np.zeros((size, 1)), np.zeros((1, size))
    for i in range(1, lag + 1):  # late1+ = e, late2+ = late1, ...
        (B if i == 1 else A)[i, 0 if i == 1 else i - 1] = 1.0
    seen = (A, lag) if lag else (B, 0)  # where the entropy that is used stands
    A[0, 0] = 1.0
    seen[0][0, seen[1]] = k * ema
    if ema < 1.0:
        A[-1, -1] = 1.0 - ema
        A[0, -1] = k * (1.0 - ema)
        seen[0][size - 1, seen[1]] = ema
    C[0, 0] = varentropy
    return control.StateSpace(
        A,
        B,
        C,
        0.0,
        1,
        inputs=["error_nats"],
        outputs=["tempered_entropy"],
        states=names,
        name="L",
        remove_useless_states=False,
    )


def closed(L: control.StateSpace) -> tuple[control.StateSpace, control.StateSpace]:
    """Return (S, T): from a disturbance of the entropy, and from the target, to the entropy.

    Parameters
    ----------
    L : control.StateSpace
        From error to entropy, strictly proper, one input and output.
    """
    import control

    A, B, C = (np.asarray(m) for m in (L.A, L.B, L.C))
    said: dict[str, Any] = {"states": list(L.state_labels), "remove_useless_states": False}
    S = control.StateSpace(
        A - B @ C, B, -C, 1.0, 1, inputs=["disturbance"], outputs=["tempered_entropy"], name="S", **said
    )
    T = control.StateSpace(A - B @ C, B, C, 0.0, 1, inputs=["target"], outputs=["tempered_entropy"], name="T", **said)
    return S, T


def response(system: control.StateSpace, w: npt.ArrayLike) -> ComplexArray:
    """Return the frequency response at ``w``, rad per token: shape (len(w),), or (len(w), outputs, inputs) of a matrix.

    Parameters
    ----------
    system : control.StateSpace
    w : array_like, shape (W,)
        In (0, pi].
    """
    value = np.asarray(system(np.exp(1j * np.atleast_1d(np.asarray(w, np.float64))), squeeze=False))
    value = np.moveaxis(value.reshape(system.noutputs, system.ninputs, -1), -1, 0).astype(np.complex128)
    return value[:, 0, 0] if value.shape[1:] == (1, 1) else value


def frequencies(slowest: float, count: int = 2000) -> FloatArray:
    """Return frequencies (rad per token) that show a loop of loop gain ``slowest``, up to pi: 2 tokens per period.

    Parameters
    ----------
    slowest : float
        Smallest k V shown.
    count : int
        Points in logarithmic steps; half as many more in linear ones.
    """
    low = min(1e-3, 0.02 * slowest)
    return np.unique(np.concatenate((np.geomspace(low, math.pi, count), np.linspace(low, math.pi, count // 2))))


def step(T: control.StateSpace, tokens: int) -> FloatArray:
    """Return the response to a unit step, shape (tokens,).

    Parameters
    ----------
    T : control.StateSpace
        One input, one output.
    tokens : int
    """
    import control
    from scipy import signal

    if tokens <= 2000:
        return np.asarray(control.step_response(T, np.arange(tokens)).outputs, np.float64).ravel()
    num, den = signal.ss2tf(T.A, T.B, T.C, T.D)
    return np.asarray(signal.lfilter(num[0], den, np.ones(tokens)), np.float64)


# -- files ------------------------------------------------------------------------------------------------------------


def _described(system: control.StateSpace) -> dict[str, Any]:
    return {
        **{name: np.asarray(getattr(system, name), np.float64).tolist() for name in "ABCD"},
        "dt": 1,
        "inputs": list(system.input_labels),
        "outputs": list(system.output_labels),
        "states": list(system.state_labels),
    }


def save(path: str | Path, systems: Mapping[str, control.StateSpace]) -> None:
    """Write systems with their names: ``*.json`` (:func:`load` reads it) or ``*.mat`` (a struct each, for MATLAB).

    Parameters
    ----------
    path : str or Path
    systems : mapping of str to control.StateSpace
        Names must be identifiers.

    Raises
    ------
    BadInputError
        For another suffix, or a path that cannot be written.
    """
    path = Path(path)
    documents = {name: _described(system) for name, system in systems.items()}
    if path.suffix == ".json":
        write_json(path, {"dt_unit": "accepted token", "systems": documents})
    elif path.suffix == ".mat":
        from scipy.io import savemat

        cells = ("inputs", "outputs", "states")
        structs = {
            name: {key: np.asarray(value, object if key in cells else None) for key, value in document.items()}
            for name, document in documents.items()
        }
        with atomic(path) as temporary:
            savemat(temporary, structs, appendmat=False)
    else:
        raise BadInputError("unknown kind of file", where="--export", value=path.suffix, allowed=".json, .mat")


def load(path: str | Path, name: str | None = None) -> control.StateSpace:
    """Read a system that :func:`save` wrote as JSON.

    Parameters
    ----------
    path : str or Path
    name : str, optional
        Which one; the first if absent.

    Raises
    ------
    BadInputError
        If the file cannot be read or holds no such system.

    Examples
    --------
    >>> from proofs import margins                                            # doctest: +SKIP
    >>> L = margins.load("loops.json", "v_max_L")                             # doctest: +SKIP
    """
    import control

    where = str(path)
    try:
        systems = dict(json.loads(Path(path).read_text(encoding="utf-8"))["systems"])
    except OSError as error:
        raise BadInputError(f"cannot read systems: {error.strerror}", where=where) from None
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise BadInputError(f"not a file of systems: {error}", where=where) from None
    if not systems or name not in (None, *systems):
        raise BadInputError("no such system", where=where, field="name", value=name, allowed=", ".join(systems))
    chosen = next(iter(systems)) if name is None else name
    try:
        given = systems[chosen]
        return control.StateSpace(
            *(np.asarray(given[key], np.float64) for key in "ABCD"),
            given["dt"],
            inputs=given["inputs"],
            outputs=given["outputs"],
            states=given["states"],
            name=chosen,
            remove_useless_states=False,
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInputError(f"not a state space: {error}", where=where, field=chosen) from None
