"""Filters on rows in memory that a BTree answers for the most part."""

from __future__ import annotations

from pathlib import Path

from lancewal.predicate.predicate import Predicate
from lancewal.reader.memory_source import MemorySource
from tests.reader.searched import ALL_INDEXES, Searched, as_table, kill, row, seal


def test_scans_with_a_btree_see_the_newest_rows_only_and_explain_it(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, n=5)], indexes={"n": ALL_INDEXES["n"]})
    writer = table.writer()
    writer.put(as_table([row(i, n=i % 100) for i in range(1000)]))
    for shard_writer in writer.shard_writers.values():
        shard_writer._mode._flushes._worker.stop()  # what is frozen stays frozen
    seal(writer)
    writer.put(as_table([row(i, n=i % 100) for i in range(1000, 2000)]))
    writer.put(as_table([row(5, n=7), row(1205, n=7), row(7, n=1)]))
    writer.delete([105, 1105])
    expected = {i for i in range(2000) if i % 100 == 5} - {5, 1205, 105, 1105}
    for reader in (table.live, table.other):
        scan = reader.scan(filter="n = 5", columns=["id"])
        assert set(scan.to_table()["id"].to_pylist()) == expected
        assert scan.count_rows() == len(expected)
    text = table.live.scan(filter="n = 5").explain()
    assert "memtable:1, filtered in memory: BTree on n leaves 10 of 1000 rows" in text
    assert "BTree on n leaves" not in table.other.scan(filter="n = 5").explain()
    assert "BTree on n leaves" not in table.live.scan(filter="n > 5").explain()
    assert set(table.live.scan(filter="n = 7").to_table()["id"].to_pylist()) == {
        *(i for i in range(2000) if i % 100 == 7 and i != 7),
        5,
        1205,
    }
    # A renamed column has the same BTree.
    table.dataset.alter_columns({"path": "n", "name": "number"})
    scan = table.live.scan(filter="number = 5", columns=["id", "number"])
    assert "BTree on number leaves" in scan.explain()
    assert set(scan.to_table()["id"].to_pylist()) == expected
    kill(writer)


def test_rows_of_wide_and_of_few_results_are_the_same(tmp_path: Path) -> None:
    """Few rows are cut out one by one, many are taken together."""
    table = Searched(tmp_path, indexes={"n": ALL_INDEXES["n"]})
    with table.writer(max_memtable_rows=100_000) as writer:
        for start in range(0, 8000, 500):
            writer.put(as_table([row(i, f"t{i}", [i, 0, 0, 0], i) for i in range(start, start + 500)]))
        for low, high in ((10, 13), (100, 800)):
            found = table.live.scan(filter=f"n >= {low} AND n < {high}").to_table()
            assert found["id"].to_pylist() == list(range(low, high))
            assert found["text"].to_pylist() == [f"t{i}" for i in range(low, high)]
            assert found["v"].to_pylist() == [[i, 0, 0, 0] for i in range(low, high)]
        ((_, (source,)),) = table.live.snapshot().groups
        assert isinstance(source, MemorySource)
        assert source.narrowed(Predicate.parse("n < 800", source.view.schema.plain)) is not None
