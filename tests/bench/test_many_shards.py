"""The memory of a process with many shards stays within its budget: guarantee 10."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.workloads.many_shards import measured
from lancewal.config import MB


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_500_shards_stay_within_the_budget_of_their_process(tmp_path: Path) -> None:
    """Three times the budget is written, and no MemTable is ever full by a limit of its own."""
    budget = 512 * MB
    found = measured(tmp_path / "table", shards=500, budget=budget, written=3 * budget)
    assert found["shards"] == 500
    assert found["flushes"] > 500
    assert found["waiting"] <= found["limit"] == budget // 2
    assert found["peak"] <= budget


def test_a_few_shards_flush_because_their_process_is_nearly_full(tmp_path: Path) -> None:
    found = measured(tmp_path / "table", shards=4, budget=64 * MB, written=64 * MB)
    assert found["flushes"] > 0
    assert found["waiting"] <= 1.5 * found["limit"], "one put may go beyond it"
