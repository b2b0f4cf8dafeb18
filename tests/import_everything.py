"""Import every module of the installed packages; run from another directory by `make wheel-check`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

PACKAGES = ("entropic_ctl", "sim", "backends", "proofs", "figures", "paper_repro")


def main() -> None:
    here = Path(__file__).resolve().parents[1]
    count = 0
    for name in PACKAGES:
        package = importlib.import_module(name)
        location = Path(str(package.__file__)).resolve()
        if here in location.parents and "site-packages" not in location.parts:
            sys.exit(f"{name} was imported from the checkout ({location}), not from the wheel")
        for info in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
            if info.name.endswith("_peer"):  # a script for the interpreter of another engine's environment
                continue
            importlib.import_module(info.name)
            count += 1
    print(f"{count} modules of {len(PACKAGES)} packages import from the wheel")


if __name__ == "__main__":
    main()
