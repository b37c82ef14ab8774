"""Which rows newer levels hide: as dictionaries say, in one pass over all keys, and only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lancewal.format import key_set
from lancewal.format.key_set import KeySet
from lancewal.reader import TableReader, TableView, snapshot
from lancewal.reader.snapshot import newest_first
from lancewal.storage import process_cache
from lancewal.writer import ShardWriter
from tests.reader.support import TableUnderTest, everywhere, looked_up, named, names
from tests.tables import KEY

Key = tuple[Any, ...]
Level = dict[Key, str | None]

#: By kind, the types of the key columns and what is drawn for them: few values, so that levels overlap.
_KINDS: dict[str, tuple[list[pa.DataType], st.SearchStrategy[Key]]] = {
    "int64": ([pa.int64()], st.tuples(st.sampled_from([-(2**63), -7, -1, 0, 1, 5, 2**63 - 1]))),
    "int8": ([pa.int8()], st.tuples(st.integers(-3, 3))),
    "uint64": ([pa.uint64()], st.tuples(st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]))),
    "string": ([pa.string()], st.tuples(st.sampled_from(["", "a", "b", "ab", "ä", "a" * 40]))),
    "binary": ([pa.binary()], st.tuples(st.sampled_from([b"", b"\0", b"\0\0", b"a", b"\xff"]))),
    "composite": (
        [pa.int32(), pa.string()],
        st.tuples(st.integers(-1, 1), st.sampled_from(["", "a", "a\0b"])),
    ),
}
_SHARDS = [UUID(int=number) for number in (1, 2, 3)]


class Merged:
    """A table of some shards that share keys, and what was written to each of their levels."""

    def __init__(self, where: Path, types: Sequence[pa.DataType]) -> None:
        keys = [
            pa.field(
                f"k{place}",
                type_,
                False,
                {**KEY, "lance-schema:unenforced-primary-key:position": str(place + 1)},
            )
            for place, type_ in enumerate(types)
        ]
        self.schema = pa.schema([*keys, pa.field("name", pa.string())])
        self.table = TableUnderTest(where, self.schema)
        self.levels: dict[UUID, list[Level]] = {shard: [] for shard in _SHARDS}

    def write(self, writer: ShardWriter, shard: UUID, rows: Level) -> None:
        """A new level of the shard; ``None`` deletes a key."""
        number = sum(map(len, self.levels.values()))
        level = {key: None if name is None else f"{name} {number}" for key, name in rows.items()}
        self.levels[shard].append(level)
        put = [(*key, name) for key, name in level.items() if name is not None]
        if put:
            writer.put(self._rows(put, self.schema))
        dead = [key for key, name in level.items() if name is None]
        if dead:
            writer.delete(self._rows(dead, pa.schema(list(self.schema)[:-1])))

    @staticmethod
    def _rows(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
        columns = zip(*rows, strict=True)
        return pa.table(
            [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)],
            schema=schema,
        )

    def expected(self, reader: TableReader) -> dict[Key, str]:
        """The newest version of each key, in the order that levels of several shards have."""
        found = []
        for shard in reader.snapshot().shards:
            written = reversed(self.levels[shard.shard_id])
            for source, level in zip(shard.sources, written, strict=True):
                found.append((newest_first(source.in_memory, source.generation, shard.shard_id), level))
        newest: Level = {}
        for _, level in sorted(found, key=lambda each: each[0], reverse=True):
            newest.update(level)
        return {key: name for key, name in newest.items() if name is not None}

    def check(self) -> None:
        for reader in self.table.readers:
            expected = self.expected(reader)
            # The second time from what was kept.
            for _ in range(2):
                shown = reader.scan().to_table().to_pylist()
                assert len(shown) == len(expected)
                assert {tuple(row.values())[:-1]: row["name"] for row in shown} == expected
                assert reader.scan().count_rows() == len(expected)
                even = [name for name in expected.values() if name.endswith(("0", "2", "4", "6", "8"))]
                sql = " OR ".join(f"name LIKE '%{digit}'" for digit in "02468")
                assert sorted(reader.scan(["name"], filter=sql).to_table()["name"].to_pylist()) == sorted(
                    even
                )
                assert reader.scan(filter=sql).count_rows() == len(even)
            self._check_lookup(reader, expected)

    def _check_lookup(self, reader: TableReader, expected: dict[Key, str]) -> None:
        every = sorted({key for levels in self.levels.values() for level in levels for key in level})
        if every:
            asked = [
                pa.array([key[place] for key in every], field.type)
                for place, field in enumerate(list(self.schema)[:-1])
            ]
            result = reader.lookup(asked[0] if len(asked) == 1 else pa.table(asked, self.schema.names[:-1]))
            assert result.found.tolist() == [key in expected for key in every]
            assert result.table["name"].to_pylist() == [expected[key] for key in every if key in expected]


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_levels_merge_as_dictionaries_do(kind: str, data: st.DataObject) -> None:
    types, keys = _KINDS[kind]
    rows = st.dictionaries(keys, st.sampled_from(["x", "y", None]), min_size=1, max_size=5)
    with TemporaryDirectory() as where, ExitStack() as writers:
        merged = Merged(Path(where) / "t", types)
        for shard in data.draw(st.lists(st.sampled_from(_SHARDS), min_size=3, max_size=6)):
            with merged.table.writer(shard) as writer:
                merged.write(writer, shard, data.draw(rows))
        merged.check()
        for shard in data.draw(st.lists(st.sampled_from(_SHARDS), unique=True)):
            writer = writers.enter_context(merged.table.writer(shard))
            merged.write(writer, shard, data.draw(rows))
        merged.check()


class Work:
    """The keys that were gone through: united, compared with a set, and compared with newer levels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = 0
        of, union, contains = KeySet.of.__func__, KeySet.union.__func__, KeySet.contains  # type: ignore[attr-defined]

        def counted_of(cls: type[KeySet], keys: Any) -> KeySet:
            arrays = list(keys)
            self.keys += sum(map(len, arrays))
            return of(cls, arrays)  # type: ignore[no-any-return]

        def counted_union(cls: type[KeySet], sets: Any) -> KeySet:
            filled = [each for each in sets if len(each)]
            self.keys += sum(map(len, filled)) if len(filled) > 1 else 0
            return union(cls, filled)  # type: ignore[no-any-return]

        def counted_contains(keys: KeySet, asked: pa.Array) -> Any:
            self.keys += len(asked) if len(keys) else 0
            return contains(keys, asked)

        def counted_superseded(levels: Sequence[pa.Array]) -> Any:
            self.keys += sum(map(len, levels))
            return key_set.superseded(levels)

        monkeypatch.setattr(KeySet, "of", classmethod(counted_of))
        monkeypatch.setattr(KeySet, "union", classmethod(counted_union))
        monkeypatch.setattr(KeySet, "contains", counted_contains)
        monkeypatch.setattr(snapshot, "superseded", counted_superseded)

    def of(self, call: Callable[[], object]) -> int:
        self.keys = 0
        call()
        return self.keys


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def overlapping(where: Path, levels: int, rows: int = 10) -> TableUnderTest:
    """A table whose SSTables have half of their keys in common with the one before."""
    table = TableUnderTest(where, data=named({-1: "base"}))
    for number in range(levels):
        first = number * rows // 2
        table.flushed(dict.fromkeys(range(first, first + rows), f"{number}"), [first])
    return table


def test_a_merge_of_64_sstables_goes_through_each_key_a_constant_number_of_times(
    tmp_path: Path, work: Work
) -> None:
    done = []
    for levels in (16, 64):
        table = overlapping(tmp_path / str(levels), levels)
        process_cache.after_fork()
        done.append(work.of(TableReader(table.store).scan().to_table) / (levels * 10))
    # Once to find hidden rows, once for the set that hides rows of the base; and its one row.
    assert done[1] <= 2.1, f"{done[1]} times the keys"
    assert done[1] <= done[0] * 1.05


def test_a_second_read_computes_nothing(tmp_path: Path, work: Work) -> None:
    table = overlapping(tmp_path / "t", 8)
    reader = TableReader(table.store)
    expected = names(reader.scan().to_table())
    base_rows = 1
    for again in (reader, TableReader(table.store)):
        assert work.of(again.scan().to_table) <= base_rows
        assert work.of(again.scan().count_rows) <= base_rows
        assert work.of(again.scan(filter="name = '3'").to_table) <= base_rows
    assert names(reader.scan().to_table()) == expected


def _searchable(where: Path, levels: int) -> TableUnderTest:
    """As :func:`overlapping`, with a text and a vector."""
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), False, KEY),
            pa.field("name", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), 2)),
        ]
    )

    def rows(first: int, count: int) -> pa.Table:
        ids = range(first, first + count)
        return pa.table(
            {"id": ids, "name": [f"word{i}" for i in ids], "vector": [[i, i] for i in ids]}, schema
        )

    table = TableUnderTest(where, schema, rows(-1, 1))
    for number in range(levels):
        with table.writer() as writer:
            writer.put(rows(number * 5, 10))
    return table


def test_searches_compare_the_keys_of_sstables_once(tmp_path: Path, work: Work) -> None:
    searches: list[Callable[[TableView], object]] = [
        lambda view: view.vector_search("vector", [3.0, 3.0], 4),
        lambda view: view.full_text_search("name", "word7 word8", 4),
    ]
    table = _searchable(tmp_path / "t", 16)

    def newly_read(search: Callable[[TableView], object]) -> int:
        return work.of(lambda: search(TableView(table.store, TableReader(table.store))))

    for search in searches:
        process_cache.after_fork()
        # Once to find hidden rows, once for the set that hides rows of the base; and its one row.
        assert newly_read(search) <= 2.1 * 16 * 10
        for again in searches:
            assert newly_read(again) <= 1, "of the base"


def test_changed_columns_leave_what_is_known_of_the_keys(tmp_path: Path, work: Work) -> None:
    # The key itself cannot be renamed: Lance refuses that as long as there is a WAL.
    table = overlapping(tmp_path / "t", 8)
    before = everywhere(table)
    table.dataset.alter_columns({"path": "name", "name": "title"})
    table.dataset.add_columns(pa.field("note", pa.string()))
    for reader in table.readers:
        assert work.of(reader.scan().count_rows) <= 1
        found = reader.scan().to_table()
        assert dict(zip(found["id"].to_pylist(), found["title"].to_pylist(), strict=True)) == before


def test_a_put_costs_the_next_read_one_question_for_each_flushed_key(tmp_path: Path, work: Work) -> None:
    table = overlapping(tmp_path / "t", 8)
    reader = TableReader(table.store)
    with table.writer() as writer:
        for number in range(3):
            writer.put(named({number: "live"}))
            if number:
                assert work.of(lambda: reader.scan().to_table()) <= 8 * 10 + 10
            else:
                reader.scan().to_table()
        assert looked_up(table, [0, 1, 2, 999]) == ["live", "live", "live", None]


def test_many_levels_in_memory_are_compared_once(tmp_path: Path, work: Work) -> None:
    table = TableUnderTest(tmp_path / "t")
    shards = [UUID(int=number + 1) for number in range(12)]
    with ExitStack() as writers:
        for number, shard in enumerate(shards):
            writer = writers.enter_context(table.writer(shard))
            writer.put(named(dict.fromkeys(range(number, number + 20), f"{number}")))
        # In memory and of one generation: the lowest shard id is the newest.
        expected = {key: f"{max(key - 19, 0)}" for key in range(31)}
        assert everywhere(table) == expected
        assert work.of(lambda: table.live.scan().to_table()) <= 3 * 12 * 20


def test_nothing_is_compared_for_a_read_that_the_newest_level_answers(tmp_path: Path, work: Work) -> None:
    table = overlapping(tmp_path / "t", 8)
    reader = TableReader(table.store)
    process_cache.after_fork()
    assert work.of(lambda: reader.scan(limit=3).to_table()) == 0


def test_levels_without_keys_are_merged_too(tmp_path: Path) -> None:
    def hidden(levels: Sequence[Sequence[int]]) -> list[list[bool]]:
        return [mask.tolist() for mask in key_set.superseded([pa.array(keys, pa.int64()) for keys in levels])]

    assert hidden([[], [1], [], [1, 2]]) == [[], [False], [], [True, False]]
    assert hidden([]) == []
    assert hidden([[], []]) == [[], []]
