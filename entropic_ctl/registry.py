"""Find a law, score or policy by name: one module in a package is one entry, so adding one is adding a file.

A plug-in module defines ``Config`` (a frozen dataclass of its parameters) and ``build(config)``. The names on
offer are the public module names of the package; nothing else needs editing.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from entropic_ctl.errors import BadInputError

__all__ = ["load", "names"]


def names(package: str) -> tuple[str, ...]:
    """Return the sorted plug-in names a package offers (modules that start with ``_`` or are ``base`` do not count)."""
    module = importlib.import_module(package)
    found = (info.name for info in pkgutil.iter_modules(module.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_") and name != "base"))


def load(package: str, name: str) -> ModuleType:
    """Import the plug-in ``name`` of ``package``.

    Raises
    ------
    BadInputError
        If the package has no such plug-in; the message lists those it has.
    """
    on_offer = names(package)
    if name not in on_offer:
        raise BadInputError("no such " + package.rsplit(".", 1)[-1] + " law", value=name, allowed=", ".join(on_offer))
    return importlib.import_module(f"{package}.{name}")
