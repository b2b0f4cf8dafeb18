"""The benchmark reports what it promises (no time is asserted)."""

from __future__ import annotations

from pathlib import Path

import pytest
from metrics_doc import defined
from synthetic_bank import make_bank

from sim.bench import bench


@pytest.mark.parametrize("loop", [True, False])
def test_bench_counts_what_ran(tmp_path: Path, loop: bool) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:17:0{s}.0,{20 + s},{3 + s}" for s in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    values = bench(trace, loop=loop, batch=8, bank=make_bank()[0])
    assert set(values) == set(defined("bench sim"))
    assert values["requests_in"] == values["requests_finished"] == 4
    assert values["requests_refused"] == 0
    assert values["output_tokens"] == 3 + 4 + 5 + 6
    assert values["iterations"] > 0
