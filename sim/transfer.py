r"""Transfer functions fitted to records of many requests, chosen on requests the fit has not seen.

    y_t = G(q) u_t + v_t,     G = (b_0 + b_1 q^-1 + ...) / (1 + a_1 q^-1 + ...),     v any noise unrelated to u,

one sample per accepted token; b_0 is the same-step effect. This is an *output-error* model (Ljung, System
Identification, 2nd ed., 4.2): least squares on the simulated output, so the colour of v does not matter. Numerator and
denominator orders are those with the least

    AIC = N ln(mean square of y - G u over the held-out requests) + 2 (number of coefficients)

(Akaike 1974, on a held-out set). Standard errors are clustered by request: only requests must be independent.

In closed loop u reacts to v. Two stages keep the fit consistent (Van den Hof and Schrama 1993): fit r -> u, simulate
the part of u that the excitation r explains, and fit y on that. A static plant under u+ = u - k (H - H*) gives r -> u
one pole at 1 - k V, which the first stage estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["ImpulseResponse", "Transfer", "fit", "impulse_response", "load", "padded", "simulate"]

_ORDERS = tuple((taps, poles) for poles in range(3) for taps in range(1, 5))


@dataclass(frozen=True)
class Transfer:
    """A discrete-time transfer function, one sample per accepted token.

    Parameters
    ----------
    numerator : FloatArray, shape (nb,)
        b_0 ... in rising powers of q^-1.
    denominator : FloatArray, shape (na + 1,)
        1, a_1 ... in rising powers of q^-1.
    covariance : FloatArray, shape (nb + na, nb + na)
        Of (b, a), clustered by request.
    aic : float
        On the held-out requests.
    explained : float
        Share of the held-out output's variance the model explains.
    """

    numerator: FloatArray
    denominator: FloatArray
    covariance: FloatArray
    aic: float = math.nan
    explained: float = math.nan

    @property
    def poles(self) -> npt.NDArray[np.complex128]:
        """Poles in the z plane, shape (na,)."""
        return np.roots(self.denominator).astype(np.complex128)

    def response(self, frequency: FloatArray) -> npt.NDArray[np.complex128]:
        """Return G at ``frequency``, cycles per token, any shape."""
        z = np.exp(-2j * np.pi * np.asarray(frequency))
        value = np.polynomial.polynomial.polyval(z, self.numerator) / np.polynomial.polynomial.polyval(
            z, self.denominator
        )
        return np.asarray(value, np.complex128)

    def static_gain(self) -> tuple[float, float]:
        """Return (G at frequency 0, its standard error)."""
        top, bottom = float(self.numerator.sum()), float(self.denominator.sum())
        slope = np.concatenate(
            (np.full(self.numerator.shape, 1.0 / bottom), np.full(self.denominator.shape[0] - 1, -top / bottom**2))
        )
        return top / bottom, math.sqrt(max(0.0, float(slope @ self.covariance @ slope)))

    def direct(self) -> tuple[float, float]:
        """Return (b_0, its standard error): the effect on the same token."""
        return float(self.numerator[0]), math.sqrt(max(0.0, float(self.covariance[0, 0])))

    def first_pole(self) -> tuple[float, float]:
        """Return (largest pole, its standard error) of a model with one real pole; NaN for any other."""
        if self.denominator.shape[0] != 2:
            return math.nan, math.nan
        return -float(self.denominator[1]), math.sqrt(max(0.0, float(self.covariance[-1, -1])))

    def in_z(self) -> tuple[list[float], list[float]]:
        """Return numerator and denominator in falling powers of z, equally long."""
        n = max(self.numerator.shape[0], self.denominator.shape[0])
        b, a = (np.concatenate((c, np.zeros(n - c.shape[0]))).tolist() for c in (self.numerator, self.denominator))
        return b, a

    def document(self) -> dict[str, Any]:
        """Return a JSON-able description: numerator and denominator in z, state space, poles, standard errors."""
        num, den = self.in_z()
        from scipy.signal import tf2ss

        a, b, c, d = tf2ss(num, den)
        return {
            "numerator": num,
            "denominator": den,
            "dt": 1,
            "dt_unit": "accepted token",
            "standard_errors": np.sqrt(np.maximum(np.diag(self.covariance), 0.0)).tolist(),
            "coefficients": [
                *(f"b{i}" for i in range(self.numerator.shape[0])),
                *(f"a{i}" for i in range(1, self.denominator.shape[0])),
            ],
            "poles": [[float(p.real), float(p.imag)] for p in self.poles],
            "static_gain": self.static_gain()[0],
            "aic_held_out": self.aic,
            "explained_held_out": self.explained,
            "state_space": {name: np.atleast_2d(m).tolist() for name, m in zip("ABCD", (a, b, c, d), strict=True)},
        }

    def to_control(self) -> Any:
        """Return a :class:`control.TransferFunction` with dt = 1 token."""
        import control

        return control.TransferFunction(*self.in_z(), 1)


def load(path: str | Path, name: str, *, form: str = "transfer") -> Any:
    """Read a fitted model from the JSON file ``entropic identify`` wrote, as an object of python-control.

    Parameters
    ----------
    path : str or Path
        ``models.json``.
    name : str
        Which model, for example ``tempered_entropy``.
    form : str
        ``transfer`` (control.TransferFunction) or ``state_space`` (control.StateSpace).

    Raises
    ------
    BadInputError
        If the file cannot be read or holds no such model.
    """
    import control

    where = str(path)
    try:
        models = json.loads(Path(path).read_text(encoding="utf-8"))["models"]
        model: Mapping[str, Any] = models[name]
        if form == "state_space":
            return control.StateSpace(*(np.asarray(model["state_space"][key]) for key in "ABCD"), model["dt"])
        return control.TransferFunction(model["numerator"], model["denominator"], model["dt"])
    except OSError as error:
        raise BadInputError(f"cannot read models: {error.strerror}", where=where) from None
    except KeyError as error:
        raise BadInputError("no such model", where=where, field=str(error), remedy="see the keys of `models`") from None
    except (ValueError, TypeError) as error:
        raise BadInputError(f"not a model file: {error}", where=where) from None


def padded(records: Sequence[FloatArray]) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return (records about their common mean, zero where there is no token; which entries are tokens), (R, N)."""
    longest, common = max(r.shape[0] for r in records), float(np.mean(np.concatenate(records)))
    out, real = np.zeros((len(records), longest)), np.zeros((len(records), longest), np.bool_)
    for i, r in enumerate(records):
        out[i, : r.shape[0]] = r - common
        real[i, : r.shape[0]] = True
    return out, real


def simulate(model: Transfer, inputs: FloatArray) -> FloatArray:
    """Return the output of ``model`` to padded ``inputs``, (R, N), from rest."""
    return _filter(model.numerator, model.denominator, inputs)


def _filter(b: FloatArray, a: FloatArray, u: FloatArray) -> FloatArray:
    from scipy.signal import lfilter

    return np.asarray(lfilter(b, a, u, axis=1), np.float64)


def _residual(theta: FloatArray, taps: int, u: FloatArray, y: FloatArray, real: npt.NDArray[np.bool_]) -> FloatArray:
    """Return y - G u about each request's mean (the mean of what the filter gives is not the filtered mean)."""
    a = np.concatenate(([1.0], theta[taps:]))
    if theta.shape[0] > taps and np.abs(np.roots(a)).max() >= 0.9999:
        return np.asarray(1e3 * y[real])  # unstable: far worse than no model
    e = np.where(real, y - _filter(theta[:taps], a, u), 0.0)
    e -= e.sum(1, keepdims=True) / real.sum(1, keepdims=True)
    return np.asarray(e[real])


def _lags(u: FloatArray, count: int) -> FloatArray:
    """Return u delayed by 0 .. count - 1 tokens, (count, R, N), zero before a request starts."""
    out = np.zeros((count, *u.shape))
    for j in range(count):
        out[j, :, j:] = u[:, : u.shape[1] - j]
    return out


def _start(taps: int, poles: int, u: FloatArray, y: FloatArray) -> FloatArray:
    """Return an instrumental-variable ARX estimate of (b, a): delayed inputs are the instruments."""
    x = np.concatenate((_lags(u, taps), -_lags(y, poles + 1)[1:])).reshape(taps + poles, -1)
    z = _lags(u, taps + poles).reshape(taps + poles, -1)
    theta = np.linalg.lstsq(z @ x.T, z @ y.ravel(), rcond=None)[0]
    if poles and np.abs(np.roots(np.concatenate(([1.0], theta[taps:])))).max() >= 0.98:
        theta[taps:] = 0.0
        theta[taps] = -0.5
    return np.asarray(theta)


def _clustered(jacobian: FloatArray, residual: FloatArray, real: npt.NDArray[np.bool_]) -> FloatArray:
    """Return the sandwich covariance of least-squares coefficients with requests as clusters."""
    request = np.nonzero(real)[0]
    score = np.zeros((real.shape[0], jacobian.shape[1]))
    np.add.at(score, request, jacobian * residual[:, None])
    inverse = np.linalg.pinv(jacobian.T @ jacobian, hermitian=True)
    groups = real.shape[0]
    return np.asarray(inverse @ (score.T @ score) @ inverse * groups / max(1, groups - 1))


def _split(real: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return (requests to fit, requests held out): every third is held out."""
    held = np.arange(real.shape[0]) % 3 == 2
    return ~held, held


def fit(
    inputs: Sequence[FloatArray], outputs: Sequence[FloatArray], *, orders: Sequence[tuple[int, int]] = _ORDERS
) -> Transfer:
    """Fit output-error models of several orders, keep the best on held-out requests, refit it on all of them.

    Parameters
    ----------
    inputs, outputs : sequences of FloatArray
        One array per request, equally long pairs; the inputs must not react to the noise of the outputs.
    orders : sequence of (int, int)
        (numerator coefficients, poles) to try.

    Raises
    ------
    BadInputError
        With fewer than 6 requests, or an input that does not move.
    """
    if len(inputs) < 6:
        raise BadInputError("too few requests to hold some out", field="requests", value=len(inputs), allowed=">= 6")
    (u, real), (y, _) = padded(inputs), padded([record - record.mean() for record in outputs])
    if not float(u.var()) > 0.0:
        raise BadInputError("the input does not move", field="inputs", remedy="raise the amplitude")
    train, held = _split(real)
    best: tuple[float, tuple[int, int], float] | None = None
    spread = float(np.sum(y[held][real[held]] ** 2))
    count = int(real[held].sum())
    for taps, poles in orders:
        theta = _least_squares(taps, poles, u[train], y[train], real[train]).x
        e = _residual(theta, taps, u[held], y[held], real[held])
        square = float(e @ e)
        aic = count * math.log(max(square, 1e-300) / count) + 2 * (taps + poles)
        if best is None or aic < best[0]:
            best = aic, (taps, poles), 1.0 - square / max(spread, 1e-300)
    if best is None:
        raise BadInputError("no orders to try", field="orders")
    aic, (taps, poles), explained = best
    found = _least_squares(taps, poles, u, y, real)
    covariance = _clustered(found.jac, found.fun, real)
    return Transfer(found.x[:taps], np.concatenate(([1.0], found.x[taps:])), covariance, aic, explained)


def _least_squares(taps: int, poles: int, u: FloatArray, y: FloatArray, real: npt.NDArray[np.bool_]) -> Any:
    return optimize.least_squares(
        _residual, _start(taps, poles, u, y), args=(taps, u, y, real), x_scale="jac", max_nfev=40
    )


@dataclass(frozen=True)
class ImpulseResponse:
    """Finite impulse response with clustered standard errors.

    Parameters
    ----------
    lag : IntArray, shape (L,)
        Tokens.
    value, error : FloatArray, shape (L,)
        Coefficients (output units per input unit) and their standard errors.
    """

    lag: npt.NDArray[np.int64]
    value: FloatArray
    error: FloatArray


def impulse_response(inputs: Sequence[FloatArray], outputs: Sequence[FloatArray], *, lags: int = 8) -> ImpulseResponse:
    """Regress outputs on the inputs of this token and of the ``lags`` before it.

    Parameters
    ----------
    inputs, outputs : sequences of FloatArray
        One array per request, equally long pairs.
    lags : int
        Longest lag, tokens.

    Raises
    ------
    BadInputError
        If no request is longer than ``lags``.
    """
    if not 0 <= lags < max(u.shape[0] for u in inputs):
        raise BadInputError("no request is that long", field="lags", value=lags, allowed="fewer than its tokens")
    (u, real), (y, _) = padded(inputs), padded(outputs)
    full = real.copy()
    full[:, :lags] = False  # an input before the first token is unknown, not zero
    x = _lags(u, lags + 1)
    weight = full.sum(1, keepdims=True)
    keep = weight[:, 0] > 1
    x, y, full, weight = x[:, keep], y[keep], full[keep], weight[keep]
    x = x - (x * full).sum(2, keepdims=True) / weight
    y = y - (y * full).sum(1, keepdims=True) / weight
    design, target = x[:, full].T, y[full]
    value = np.linalg.lstsq(design, target, rcond=None)[0]
    covariance = _clustered(design, target - design @ value, full)
    return ImpulseResponse(np.arange(lags + 1), value, np.sqrt(np.maximum(np.diag(covariance), 0.0)))
