"""Named random streams: one root seed, one independent generator per source of randomness.

Because each source draws from its own stream, switching a controller on does not move the arrivals or the lengths:
two runs that differ in one law share their random numbers (common random numbers).
"""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["repeat_seeds", "stream"]


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the stream ``name`` under the root ``seed``.

    The name enters through the first 128 bits of its SHA-256, so that the mapping is the same on every platform and
    in every process (Python's own ``hash`` of a string is not).

    Parameters
    ----------
    seed : int
        Root seed, >= 0.
    name : str
        For example ``"arrivals"``.
    """
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], "<u4")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(int(word) for word in words)))


def repeat_seeds(root: int, repeats: int) -> list[int]:
    """Return one root seed per repeat; every arm of a comparison uses the same list.

    Seed r does not depend on ``repeats``, so more repeats extend an experiment without changing its first ones.

    Parameters
    ----------
    root : int
        Root seed, >= 0.
    repeats : int
    """
    children = np.random.SeedSequence(root).spawn(repeats)
    return [int(child.generate_state(1, np.uint32)[0]) for child in children]
