"""The loads that a calibration is fitted from, logged on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from backends.bench_steps import record_steps
from backends.models import wrap
from sim.engine_log import read_log, read_logs
from tests.tiny_model import byte_tokenizer, tiny_llama


def test_every_load_is_logged_and_filling_a_cache_is_none(tmp_path: Path) -> None:
    model = wrap(tiny_llama(num_hidden_layers=3), byte_tokenizer(), name="tiny")
    logs = record_steps(
        model, tmp_path, batches=(1, 3), contexts=(140,), thetas=(0.0, 0.3), chunks=(16,), prompts=(20, 50), steps=4
    )
    assert len(logs) == 2 * 2 + 2
    load = read_logs(logs).load
    assert load["pruned_rows"].max() == 3
    assert load["prefill_pairs"].max() > 0
    for batch in (1, 3):
        decode = read_log(tmp_path / f"decode-{batch}x140-0.jsonl")
        assert len(decode) == 4
        np.testing.assert_array_equal(decode.load["decode_context"], batch * (140 + np.arange(4)))
    assert read_log(tmp_path / "prefill-16-0.3.jsonl").prunes.all()
