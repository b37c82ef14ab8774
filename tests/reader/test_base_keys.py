"""Lookups in the base table: right whatever its BTree covers, and without reading what was not asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from lancewal.base import BaseTable
from lancewal.reader import BaseSource, base_keys
from lancewal.sstable import KeyProbe
from lancewal.storage import process_cache
from tests.tables import KEY, rows, wal_table

DIMENSIONS = 512
ROW_BYTES = 4 * DIMENSIONS
FRAGMENTS = 20
ROWS_EACH = 50
WIDE = pa.schema(
    [pa.field("id", pa.int64(), False, KEY), pa.field("vector", pa.list_(pa.float32(), DIMENSIONS))]
)


def wide(start: int, count: int) -> pa.Table:
    values = pa.array(np.repeat(np.arange(start, start + count, dtype=np.float32), DIMENSIONS))
    vectors = pa.FixedSizeListArray.from_arrays(values, DIMENSIONS)
    return pa.table([pa.array(range(start, start + count), pa.int64()), vectors], schema=WIDE)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    def table(*, indexed: bool) -> str:
        """One fragment, with a BTree on the key or without, and others that came later."""
        uri = str(tmp_path / f"t{indexed}")
        dataset = lance.write_dataset(wide(0, ROWS_EACH), uri, schema=WIDE)
        dataset.initialize_mem_wal(unsharded=True)
        if indexed:
            dataset.create_scalar_index("id", "BTREE")
        for number in range(1, FRAGMENTS):
            dataset.insert(wide(ROWS_EACH * number, ROWS_EACH))
        return uri

    return table


def opened(uri: str) -> BaseSource:
    return BaseSource(BaseTable.open(uri))


def read_bytes(source: BaseSource, keys: Sequence[int]) -> tuple[int, int]:
    """Requests and bytes that looking up the keys takes of Lance; all of them must be there."""
    source.base.dataset.io_stats_incremental()
    found = source.look_up(KeyProbe([pa.array(keys, pa.int64())]), ["id", "vector"])
    stats = source.base.dataset.io_stats_incremental()
    first = [vector[0] for vector in found.rows["vector"].to_pylist()]
    assert sorted(zip(first, found.rows["id"].to_pylist(), strict=True)) == [(k, k) for k in sorted(keys)]
    assert [keys[number] for number in found.numbers] == found.rows["id"].to_pylist()
    return stats.read_iops, stats.read_bytes


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("key", [3, ROWS_EACH * 7 + 3])
def test_a_lookup_read_all_columns_of_the_fragments_without_index(
    make: Callable[..., str], monkeypatch: pytest.MonkeyPatch, indexed: bool, kept: bool, key: int
) -> None:
    if not kept:
        monkeypatch.setattr(base_keys, "MOST_KEPT", 0)
    source = opened(make(indexed=indexed))
    read_bytes(source, [key])  # also reads the metadata of files
    # The keys of all fragments, which Lance pads, and the row.
    assert read_bytes(source, [key])[1] < FRAGMENTS * 2048 + 3 * ROW_BYTES


@pytest.mark.parametrize("indexed", [True, False])
def test_the_next_lookup_reads_the_row_alone(make: Callable[..., str], indexed: bool) -> None:
    source = opened(make(indexed=indexed))
    for key in (3, ROWS_EACH * 7 + 3, ROWS_EACH * FRAGMENTS - 1):
        read_bytes(source, [key + 1 if key == 3 else key - 1])
        requests, size = read_bytes(source, [key])
        assert requests <= 2
        assert size < 3 * ROW_BYTES
    source.base.dataset.io_stats_incremental()
    assert not len(source.look_up(KeyProbe([pa.array([-1])]), ["vector"]).numbers)
    assert source.base.dataset.io_stats_incremental().read_iops == 0


@pytest.mark.parametrize("indexed", [True, False])
def test_many_keys_read_their_rows_alone(make: Callable[..., str], indexed: bool) -> None:
    source = opened(make(indexed=indexed))
    keys = list(range(0, ROWS_EACH * FRAGMENTS, 25))
    read_bytes(source, keys)
    assert read_bytes(source, keys)[1] < 3 * ROW_BYTES * len(keys)


def test_a_new_version_reads_the_keys_of_what_changed(make: Callable[..., str]) -> None:
    uri = make(indexed=True)
    read_bytes(opened(uri), [1])
    lance.dataset(uri).insert(wide(5000, 10))
    lance.dataset(uri).delete(f"id = {ROWS_EACH * 3}")
    read: list[list[int]] = []
    original = base_keys.KeyPlaces._read

    def watched(self: base_keys.KeyPlaces, fragments: list[lance.LanceFragment]) -> Any:
        read.append([fragment.fragment_id for fragment in fragments])
        return original(self, fragments)

    base_keys.KeyPlaces._read = watched  # type: ignore[method-assign]
    try:
        source = opened(uri)
        read_bytes(source, [5003, 7, ROWS_EACH * 3 + 1])
        read_bytes(opened(uri), [5004])
    finally:
        base_keys.KeyPlaces._read = original  # type: ignore[method-assign]
    assert read == [[3, FRAGMENTS]]
    assert not len(source.look_up(KeyProbe([pa.array([ROWS_EACH * 3])]), ["id"]).numbers)


def test_keys_are_not_kept_beyond_the_budget(
    make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_cache, "_max_bytes", 1000)
    source = opened(make(indexed=True))
    assert not source._places.are_kept
    read_bytes(source, [3, 500])


KEYS: dict[str, tuple[list[pa.Field], Callable[[int], tuple[Any, ...]]]] = {
    "number": ([pa.field("id", pa.int32(), False, KEY)], lambda n: (n - 20,)),
    "text": ([pa.field("id", pa.string(), False, KEY)], lambda n: (f"{n}",)),
    "binary": ([pa.field("id", pa.large_binary(), False, KEY)], lambda n: (bytes([n, 0]),)),
    "composite": (
        [pa.field("a", pa.int16(), False, KEY), pa.field("b", pa.string(), False, KEY)],
        lambda n: (n % 5, f"{n // 5}"),
    ),
}


@pytest.mark.parametrize("stable_row_ids", [True, False])
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("how", ["kept", "scanned", "colliding"])
def test_whatever_was_committed_a_lookup_finds_what_a_scan_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, kind: str, stable_row_ids: bool
) -> None:
    if how == "scanned":
        monkeypatch.setattr(base_keys, "MOST_KEPT", 0)
    if how == "colliding":
        plain = base_keys.key_words
        for module in ("base_keys", "base_source"):
            monkeypatch.setattr(f"lancewal.reader.{module}.key_words", lambda values: plain(values) % 4)
    fields, key_of = KEYS[kind]
    schema = pa.schema([*fields, pa.field("value", pa.int64())])
    names = [field.name for field in fields]
    uri = str(tmp_path / "t")
    chance = random.Random(f"{kind} {how}")

    def rows(numbers: Sequence[int]) -> pa.Table:
        values = [dict(zip(names, key_of(n), strict=True), value=chance.randrange(10**6)) for n in numbers]
        return pa.Table.from_pylist(values, schema)

    dataset = lance.write_dataset(rows(range(10)), uri, enable_stable_row_ids=stable_row_ids)
    dataset.initialize_mem_wal(unsharded=True)
    steps: list[Callable[[], object]] = [
        lambda: dataset.insert(rows(range(dataset.count_rows() + 40, dataset.count_rows() + 45))),
        lambda: (
            dataset.merge_insert(names)
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute(rows(chance.sample(range(40), 6)))
        ),
        lambda: dataset.delete(f"value % 5 = {chance.randrange(5)}"),
        lambda: len(names) == 1 and dataset.create_scalar_index("id", "BTREE", replace=True),
        lambda: dataset.optimize.optimize_indices(),
        lambda: dataset.optimize.compact_files(),
    ]
    # Not all that are there: a word may stand for one that is asked for and one that is not.
    numbers = range(0, 80, 2)
    asked = pa.Table.from_pylist([dict(zip(names, key_of(n), strict=True)) for n in numbers])
    probe = KeyProbe([asked[name].cast(schema.field(name).type).combine_chunks() for name in names])
    for _ in range(14):
        chance.choice(steps)()
        source = BaseSource(BaseTable.open(uri))
        found = source.look_up(probe, ["value", *names])
        there = lance.dataset(uri).to_table().to_pylist()
        wanted = {key_of(n): place for place, n in enumerate(numbers)}
        expected = {
            (wanted[key], row["value"])
            for row in there
            if (key := tuple(row[name] for name in names)) in wanted
        }
        values = found.rows["value"].to_pylist() if len(found.numbers) else []
        assert set(zip(found.numbers.tolist(), values, strict=True)) == expected


def test_naming_every_column_of_a_wide_table_took_longer_than_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lance takes 0.16 s to find 2,000 names among 2,000 columns, and nothing when it is not asked."""
    table = wal_table(tmp_path / "t", data=pa.Table.from_batches([rows(0, 5)]))
    asked: list[list[str] | None] = []
    scanner = lance.LanceDataset.scanner

    def noted(self: lance.LanceDataset, columns: Any = None, *args: Any, **how: Any) -> Any:
        asked.append(columns)
        return scanner(self, columns, *args, **how)

    monkeypatch.setattr(lance.LanceDataset, "scanner", noted)
    assert table.scan().to_table().num_rows == 5
    assert table.lookup(3) == {"id": 3, "name": "name_3"}
    assert table.scan(["name", "id"]).to_table().column_names == ["name", "id"]
    assert asked[0] is None
    assert ["id", "name"] not in asked
    assert ["name", "id"] in asked
