"""A small entropy bank made from actual softmax distributions, so that H and V are consistent: dH/du = V."""

from __future__ import annotations

import numpy as np

from entropic_ctl.bank import SCHEMA, Bank

VOCAB = 64


def distributions(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Logits (tokens, VOCAB) whose scale follows an AR(1) in the logarithm."""
    log_scale, out = 0.0, np.empty((tokens, VOCAB))
    for t in range(tokens):
        log_scale = 0.4 * log_scale + 0.6 * rng.standard_normal()
        out[t] = 2.5 * np.exp(log_scale) * rng.standard_normal(VOCAB)
    return out


def entropy_varentropy(logits: np.ndarray, temperature: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """Closed form in float64, independent of the package's own estimator; temperature broadcasts over rows."""
    z = logits / np.expand_dims(np.asarray(temperature, float), -1)
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    p = np.exp(log_p)
    h = -(p * log_p).sum(-1)
    return h, (p * (log_p + h[..., None]) ** 2).sum(-1)


def make_bank(
    seed: int = 0,
    prompts: int = 4,
    temperatures: tuple[float, ...] = (0.3, 0.8, 1.2, 1.6),
    lengths: tuple[int, int] = (20, 60),
    grid: np.ndarray | None = None,
    *,
    ended: bool = True,
) -> tuple[Bank, np.ndarray]:
    """Return (bank, logits of every token). Every third trajectory is censored when ``ended``, else all are."""
    rng = np.random.default_rng(seed)
    grid = np.geomspace(0.25, 2.0, 13) if grid is None else grid
    count = prompts * len(temperatures)
    length = rng.integers(*lengths, count)
    offset = np.concatenate(([0], np.cumsum(length)))
    logits = distributions(rng, int(offset[-1]))
    tables = [entropy_varentropy(logits, np.full(len(logits), t)) for t in grid]
    theta, context = np.array([0.0, 0.01, 0.05, 0.1, 0.2]), np.array([256.0, 1024.0, 4096.0])
    share = np.array([[1.0, 0.95, 0.85, 0.8, 0.7], [1.0, 0.7, 0.5, 0.4, 0.3], [1.0, 0.5, 0.26, 0.18, 0.11]])
    mass = np.broadcast_to(1 - np.exp(-theta), share.shape)
    bank = Bank(
        meta={
            "schema": SCHEMA,
            "model": "synthetic",
            "vocab_size": VOCAB,
            "seed": seed,
            "kinds": ["noise"],
            "page_tokens": 16,
            "dense_layers": 2,
            "prompts": prompts,
            "command": "tests",
        },
        grid=grid,
        prompt_kind=np.zeros(count, np.int64),
        prompt=np.repeat(np.arange(prompts), len(temperatures)),
        temperature=np.tile(np.array(temperatures), prompts),
        offset=offset.astype(np.int64),
        ended=np.array([ended and k % 3 != 2 for k in range(count)]),
        model_entropy=entropy_varentropy(logits, 1.0)[0].astype(np.float32),
        entropy_grid=np.stack([h for h, _ in tables], 1).astype(np.float32),
        varentropy_grid=np.stack([v for _, v in tables], 1).astype(np.float32),
        theta=theta,
        context=context,
        kept=share,
        certificate_mean=0.6 * mass,
        certificate_max=mass.copy(),
        mass_mean=0.5 * mass,
        kl=np.broadcast_to(0.37 * theta**2, share.shape).copy(),
        entropy_shift=np.broadcast_to(0.1 * theta, share.shape).copy(),
    )
    return bank, logits
