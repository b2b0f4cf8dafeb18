r"""A regime-switching autoregression of entropy, fitted by EM: a hidden Markov chain with an AR(1) in each regime.

Of one text, in the unbounded variable x (see :mod:`sim.parametric`)::

    x_t = c_s + phi_s x_{t-1} + tau z + sigma_s e_t,    s = s_t,  P(s_t = j | s_{t-1} = i) = P_ij

e_t is white and normal. z ~ N(0, 1) is drawn once per text: texts differ in their level, and without it a model fitted
to all of them would make every text alike. It is integrated out on equally spaced nodes (some tens of tokens tell z to
about 0.2, which the few far-apart nodes of a Gauss rule would miss), so that the likelihood is that of a finite mixture
and EM increases it exactly. The first value is taken as given.

Sources: the filter of Hamilton (1989) and the smoother of Kim (1994), scaled forward and backward passes; the random
level and its quadrature are ours. A prior pulls the fit of few data towards another fit by adding that fit's sufficient
statistics, worth ``weight`` tokens per regime.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Fit", "Regimes", "fit", "log_likelihood"]

NODES = 25
_PHI_LIMIT = 0.98
_SIGMA_FLOOR = 1e-3
_CENTRING = 30
"""First iterations of EM, which also centre z."""
_START_TAU = 0.3
_ROUNDS = 3


@dataclass(frozen=True)
class Regimes:
    """Parameters; all float64, K regimes in the order of their stationary means.

    ``level`` c, ``phi``, ``sigma``: (K,); ``text`` tau; ``transition`` P: (K, K), rows sum to 1; ``start``: (K,).
    """

    level: FloatArray
    phi: FloatArray
    text: float
    sigma: FloatArray
    transition: FloatArray
    start: FloatArray

    @property
    def parameters(self) -> int:
        """Free parameters."""
        k = int(self.level.shape[0])
        return 3 * k + 1 + k * (k - 1) + k - 1

    def means(self) -> FloatArray:
        """Return the stationary mean of each regime, were it never left, (K,)."""
        return self.level / (1.0 - self.phi)


@dataclass(frozen=True)
class Fit:
    """A fit: parameters, log-likelihood after every iteration, posterior mean of z per text (S,), and statistics."""

    regimes: Regimes
    log_likelihood: list[float]
    text_effect: FloatArray
    moments: FloatArray
    """(K, 4, 4): weighted sums of the products of (1, x_{t-1}, z, x_t)."""


def _nodes(model: Regimes) -> tuple[FloatArray, FloatArray]:
    """Return values of z and their weights; one node without z."""
    if not model.text:
        return np.zeros(1), np.ones(1)
    z = np.linspace(-3.6, 3.6, NODES)
    w = np.exp(-0.5 * z**2)
    return z, w / w.sum()


def _emissions(model: Regimes, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return densities (T, S, Q, K), scaled to a maximum of 1, and the logarithm of the scale (T, S, Q)."""
    z, _ = _nodes(model)
    before, now = x[:, :-1].T[:, :, None, None], x[:, 1:].T[:, :, None, None]
    residual = (now - model.level - model.phi * before - model.text * z[:, None]) / model.sigma
    log_f = -0.5 * residual**2 - np.log(model.sigma) - 0.5 * np.log(2 * np.pi)
    top: FloatArray = log_f.max(axis=-1)
    return np.exp(log_f - top[..., None]), top


def _forward(
    model: Regimes, density: FloatArray, scale: FloatArray, live: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return filtered probabilities (T, S, Q, K), normalisers (T, S, Q), log-likelihoods by text and node (S, Q)."""
    steps = density.shape[0]
    filtered, norm = np.empty_like(density), np.ones(density.shape[:3])
    past = np.broadcast_to(model.start, density.shape[1:])
    for t in range(steps):
        ahead = (past if t == 0 else past @ model.transition) * density[t]
        total = ahead.sum(axis=-1)
        on = live[t][:, None] > 0
        norm[t] = np.where(on, total, 1.0)
        past = np.where(on[..., None], ahead / total[..., None], past)
        filtered[t] = past
    log_p: FloatArray = np.where(live[:, :, None] > 0, np.log(norm) + scale, 0.0).sum(axis=0)
    return filtered, norm, log_p


def _mix(model: Regimes, log_p: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the posterior of the nodes (S, Q) and each text's log-likelihood (S,)."""
    _, w = _nodes(model)
    joint = log_p + np.log(w)
    top = joint.max(axis=1, keepdims=True)
    total = np.exp(joint - top).sum(axis=1, keepdims=True)
    return np.exp(joint - top) / total, (top + np.log(total))[:, 0]


def _live(x: FloatArray, length: IntArray) -> FloatArray:
    return np.asarray(np.arange(1, x.shape[1])[:, None] < length, np.float64)  # (T, S)


def log_likelihood(model: Regimes, x: FloatArray, length: IntArray) -> FloatArray:
    """Return the log-likelihood of each text given its first value, (S,).

    Parameters
    ----------
    model : Regimes
    x : FloatArray, shape (S, L)
        Padded after ``length`` with anything finite.
    length : IntArray, shape (S,)
    """
    density, scale = _emissions(model, x)
    return _mix(model, _forward(model, density, scale, _live(x, length))[2])[1]


def _expect(
    model: Regimes, x: FloatArray, length: IntArray
) -> tuple[float, FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return log-likelihood, moments (K, 4, 4), counts of transitions (K, K) and starts (K,), mean of z (S,)."""
    live = _live(x, length)
    density, scale = _emissions(model, x)
    filtered, norm, log_p = _forward(model, density, scale, live)
    weight, by_text = _mix(model, log_p)
    steps = density.shape[0]
    ahead = np.ones_like(density)
    counts = np.zeros_like(model.transition)
    for t in range(steps - 1, 0, -1):
        on = live[t][:, None, None]
        carried = density[t] * ahead[t] / norm[t][..., None] * on
        back = carried @ model.transition.T
        counts += np.einsum("sqi,sqj->ij", filtered[t - 1] * weight[..., None], carried) * model.transition
        ahead[t - 1] = np.where(on > 0, back, 1.0)
    smoothed = filtered * ahead * weight[..., None] * live[:, :, None, None]  # (T, S, Q, K)
    z, _ = _nodes(model)
    powers = [np.einsum("tsqk,q->tsk", smoothed, z**m) for m in range(3)]
    before, now = x[:, :-1].T[..., None], x[:, 1:].T[..., None]
    ones = np.ones_like(before)
    k = model.level.shape[0]
    moments = np.empty((k, 4, 4))
    columns = ((ones, 0), (before, 0), (ones, 1), (now, 0))  # (regressor, power of z)
    for i, (a, p) in enumerate(columns):
        for j, (b, q) in enumerate(columns):
            moments[:, i, j] = (powers[p + q] * a * b).sum(axis=(0, 1))
    return float(by_text.sum()), moments, counts, smoothed[0].sum(axis=(0, 1)), weight @ z


def _maximise(moments: FloatArray, counts: FloatArray, start: FloatArray, model: Regimes) -> Regimes:
    """Return better parameters: level, phi and sigma of each regime given tau, then tau given those, a few times."""
    k, tau = moments.shape[0], model.text
    beta, sigma = np.empty((k, 2)), np.empty(k)
    for _ in range(_ROUNDS):
        for i in range(k):
            s = moments[i]
            gram = s[:2, :2] + 1e-9 * max(1.0, s[0, 0]) * np.eye(2)
            target = s[:2, 3] - tau * s[:2, 2]
            beta[i] = np.linalg.solve(gram, target)
            if abs(beta[i, 1]) > _PHI_LIMIT:  # not stationary: hold phi at the limit
                beta[i, 1] = np.copysign(_PHI_LIMIT, beta[i, 1])
                beta[i, 0] = (target[0] - beta[i, 1] * s[0, 1]) / gram[0, 0]
            weights = np.array([-beta[i, 0], -beta[i, 1], -tau, 1.0])  # residual = weights . (1, x_{t-1}, z, x_t)
            sigma[i] = max(np.sqrt(max(weights @ s @ weights, 0.0) / max(s[0, 0], 1e-9)), _SIGMA_FLOOR)
        if model.text:
            precise = moments[:, 2] / sigma[:, None] ** 2
            tau = float((precise[:, 3] - precise[:, 0] * beta[:, 0] - precise[:, 1] * beta[:, 1]).sum())
            tau /= float(precise[:, 2].sum())
    rows, first = counts + 1e-9, start + 1e-9
    return Regimes(beta[:, 0], beta[:, 1], tau, sigma, rows / rows.sum(axis=1, keepdims=True), first / first.sum())


def _centred(model: Regimes, effect: FloatArray) -> Regimes:
    """Return the model with the mean that z has in these texts taken into the level.

    Texts at one temperature all lie to one side of a fit to all temperatures; EM alone moves that into the level only
    slowly (parameter expansion: Liu, Rubin and Wu, 1998).
    """
    return dataclasses.replace(model, level=model.level + model.text * float(effect.mean()))


def _guess(x: FloatArray, length: IntArray, k: int, text: float) -> Regimes:
    """Return regimes cut at quantiles of x, sticky, without memory inside."""
    values = x[np.arange(x.shape[1]) < length[:, None]]
    parts = np.array_split(np.sort(values), k)
    stay = 0.6 * np.eye(k) + 0.4 / k
    return Regimes(
        np.array([part.mean() for part in parts]),
        np.zeros(k),
        text,
        np.array([max(part.std(), 0.1) for part in parts]),
        stay,
        np.full(k, 1.0 / k),
    )


def fit(
    x: FloatArray,
    length: IntArray,
    k: int,
    *,
    iterations: int = 200,
    tolerance: float = 1e-6,
    texts_differ: bool = True,
    prior: Fit | None = None,
    weight: float = 5.0,
) -> Fit:
    """Fit K regimes by EM; deterministic.

    Parameters
    ----------
    x : FloatArray, shape (S, L)
        Texts, padded after ``length`` with anything finite.
    length : IntArray, shape (S,)
        At least 2 each.
    k : int
        Regimes.
    iterations, tolerance
        It stops after so many iterations, or when the log-likelihood per token gains less.
    texts_differ : bool
        False leaves z out (tau = 0).
    prior : Fit, optional
        Start from this fit (of a model without z) and be pulled to it.
    weight : float
        Tokens per regime the prior is worth.

    Returns
    -------
    Fit
    """
    tau = _START_TAU if texts_differ else 0.0
    model = _guess(x, length, k, tau) if prior is None else dataclasses.replace(prior.regimes, text=tau)
    extra = np.zeros((k, 4, 4))
    if prior is not None:
        extra = weight * prior.moments / prior.moments[:, :1, :1]
        extra[:, 2, 2] = weight  # of z it says: unit variance, unrelated to x
    row = np.zeros((k, k)) if prior is None else weight * prior.regimes.transition
    tokens, history = int(length.sum()), []
    for _ in range(iterations):
        value, moments, counts, start, effect = _expect(model, x, length)
        history.append(value)
        centring = len(history) <= _CENTRING
        if not centring and abs(value - history[-2]) < tolerance * tokens:
            break
        model = _maximise(moments + extra, counts + row, start, model)
        if centring:
            model = _centred(model, effect)
    if prior is None:
        order = np.argsort(model.means(), kind="stable")
        model = Regimes(
            model.level[order],
            model.phi[order],
            model.text,
            model.sigma[order],
            model.transition[np.ix_(order, order)],
            model.start[order],
        )
        moments = moments[order]
    return Fit(model, history, effect, moments)
