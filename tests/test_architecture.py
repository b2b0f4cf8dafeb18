"""The folders, their import directions, and what must import without the heavy libraries."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("entropic_ctl", "sim", "backends", "proofs", "figures", "paper_repro")


def modules(package: str) -> list[str]:
    root = importlib.import_module(package)
    return [package, *(info.name for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}."))]


@pytest.mark.parametrize("package", ["entropic_ctl", "sim", "proofs"])
def test_imports_without_torch_in_a_fresh_process_elsewhere(package: str, tmp_path: Path) -> None:
    names = [name for name in modules(package) if not name.startswith(("entropic_ctl.cli", "entropic_ctl.__main__"))]
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "for blocked in ('torch', 'transformers', 'triton'): sys.modules[blocked] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_control_plane_needs_numpy_alone(tmp_path: Path) -> None:
    names = [
        name for name in modules("entropic_ctl") if not name.startswith(("entropic_ctl.cli", "entropic_ctl.__main__"))
    ]
    blocked = ("scipy", "simpy", "flint", "matplotlib", "pyarrow", "typer", "rich", "optuna")
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for blocked in {blocked!r}: sys.modules[blocked] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_changes_nothing_outside(tmp_path: Path) -> None:
    code = (
        "import importlib, os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import numpy as np\n"
        "before = (np.random.get_state()[1].sum(), dict(os.environ), np.geterr())\n"
        f"for name in {modules('entropic_ctl') + modules('sim') + modules('proofs')!r}: importlib.import_module(name)\n"
        "after = (np.random.get_state()[1].sum(), dict(os.environ), np.geterr())\n"
        "assert before == after\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_it_holds_and_may_import(package: str) -> None:
    text = (ROOT / package / "README.md").read_text(encoding="utf-8")
    assert "may import" in text.lower()
    assert len(text.split()) > 80


@pytest.mark.parametrize("package", ["entropic_ctl", "sim", "proofs"])
def test_public_names_exist_and_are_documented(package: str) -> None:
    missing = []
    for name in modules(package):
        if name.startswith("entropic_ctl.cli"):
            continue  # typer prints their parameters' help
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            thing = getattr(module, public)  # raises if __all__ lies
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and not inspect.getdoc(thing):
                missing.append(f"{name}.{public}")
            if inspect.isfunction(thing) and inspect.getdoc(thing):
                text = inspect.getdoc(thing) or ""
                named = [p for p in inspect.signature(thing).parameters if p not in text]
                if len(inspect.signature(thing).parameters) > 2 and named:
                    missing.append(f"{name}.{public}: {', '.join(named)}")
    assert not missing, "undocumented: " + "; ".join(missing)


def test_no_module_level_asserts_guard_input() -> None:
    """House style: callers' mistakes raise; an ``assert`` vanishes under ``python -O``."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)
            ]
    assert not found
