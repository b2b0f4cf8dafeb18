"""Shared fixtures. Tests that need the model or the shared material skip with a reason when it is absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does; read when torch is first imported

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("ci")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no shared material at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def azure_trace(shared: Path) -> Path:
    path = shared / "traces" / "AzureLLMInferenceTrace_conv.csv"
    if not path.is_file():
        pytest.skip(f"no Azure trace at {path}")
    return path


@pytest.fixture(scope="session")
def bank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small synthetic entropy bank."""
    from synthetic_bank import make_bank

    from entropic_ctl import bank as banks

    path = tmp_path_factory.mktemp("bank") / "bank.npz"
    banks.save(make_bank()[0], path)
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
