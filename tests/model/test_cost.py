"""What a merged scan does beyond reading the base: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lancewal.format.key_set import KeySet
from lancewal.reader import TableReader
from tests.reader.support import TableUnderTest, named

OVERLAP = 20


@dataclass
class Work:
    """Keys compared with newer ones, and the filters that the base was asked with."""

    compared: int = 0
    searches: list[str] = field(default_factory=list)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()
    contains: Callable[[KeySet, pa.Array], Any] = KeySet.contains
    scanner = lance.LanceDataset.scanner

    def compared(self: KeySet, keys: pa.Array) -> Any:
        done.compared += len(keys) if len(self) else 0
        return contains(self, keys)

    def searched(self: lance.LanceDataset, *args: Any, **options: Any) -> Any:
        if options.get("filter") and "_mem_wal" not in self.uri:
            done.searches.append(options["filter"])
        return scanner(self, *args, **options)

    monkeypatch.setattr(KeySet, "contains", compared)
    monkeypatch.setattr(lance.LanceDataset, "scanner", searched)
    return done


def overlapping(where: Path, base_rows: int) -> TableUnderTest:
    """A base with a BTree on its key, and two SSTables and a MemTable that update some of it."""
    table = TableUnderTest(where, data=named({i: f"base {i}" for i in range(base_rows)}))
    table.dataset.create_scalar_index("id", "BTREE")
    step = base_rows // OVERLAP
    table.flushed({i * step: "first" for i in range(OVERLAP)})
    table.flushed({i * step: "second" for i in range(0, OVERLAP, 2)}, [1])
    return table


@pytest.mark.parametrize("by_filter", [False, True])
def test_a_merged_scan_costs_the_overlapping_rows_whatever_the_size_of_the_base(
    tmp_path: Path, work: Work, by_filter: bool
) -> None:
    costs = []
    for base_rows in (10_000, 100_000):
        table = overlapping(tmp_path / str(base_rows), base_rows)
        with table.writer() as writer:
            writer.put(named({2: "live", base_rows + 5: "live"}))
            reader = TableReader(table.store)
            work.compared, work.searches = 0, []
            scan = reader.scan(filter="name LIKE 'base%'" if by_filter else None)
            # Replaced: those of both SSTables, the deleted one and the one in memory.
            left = base_rows - OVERLAP - 2
            assert scan.to_table().num_rows == (left if by_filter else left + OVERLAP + 2)
            costs.append((work.compared, len(work.searches)))
    assert costs[0] == costs[1], "more work on a larger base"
    assert costs[0][0] <= 10 * OVERLAP


def test_a_second_scan_does_not_search_again_for_what_was_flushed(tmp_path: Path, work: Work) -> None:
    table = overlapping(tmp_path / "t", 10_000)
    reader = TableReader(table.store)
    assert reader.scan().count_rows() == 9_999
    work.compared, work.searches = 0, []
    assert reader.scan().to_table().num_rows == 9_999
    assert work.searches == []
